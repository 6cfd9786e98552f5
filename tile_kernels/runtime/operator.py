"""Operators as data: a declaration of pure functions, and a cache of prepared calls.

    build the key -> look up the prepared call -> allocate -> launch

The key of a call holds shapes, dtypes, devices, alignment, strides and scalars. It finds the
prepared call, a `Plan` and a `Sized`. If it does not, the key without the sizes that are declared
as dynamic finds a `Plan`, and those sizes a `Sized` in it. For a new token count the plan is found:
`check` and `outputs` are evaluated, `launches` is not, and nothing is compiled.

CPU and meta tensors, other backends, logging, the checked mode, dispatch modes, tensor subclasses,
functorch and autograd are not cached: such calls are checked and evaluated every time.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import typing
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, strided
from torch.autograd.graph import increment_version
from torch.compiler import is_dynamo_compiling
from torch.nn import Parameter

from tile_kernels import config
from tile_kernels.runtime import backends, checks, emulation, logs, registry
from tile_kernels.runtime.autograd import no_gradient_message, refuse_tangents
from tile_kernels.runtime.cases import Cases, Cost, tensors_in
from tile_kernels.runtime.compilation import CompilationForbiddenError
from tile_kernels.runtime.declaration import Host, Launch, Out, Spec
from tile_kernels.runtime.device import DESCRIBED
from tile_kernels.runtime.launch import Request, recorder
from tile_kernels.runtime.prepared import MAX_SIZES, Plan, Sized, remember, sized
from tile_kernels.runtime.pytorch import (
    LateAutograd,
    current_device,
    define,
    dispatch_modes,
    forward_ad_active,
    functorch_transform,
)

F = TypeVar("F", bound=Callable[..., Any])

MAX_PLANS = 1024  # of one operator; the oldest is dropped first
MAX_CALLS = 1024  # of one operator, with their sizes
_SCALARS = frozenset({bool, int, str, type(None), torch.dtype})
_METHODS = ("check", "outputs", "launches", "scratch", "check_values")


def _method(arguments: type, given: dict[str, Any], name: str, *default: Any) -> Any:
    """A function of the declaration: one that was given, or the record's method."""
    return given[name] if name in given else getattr(arguments, name, *default)


def _no_scratch(arguments: Any) -> tuple[Out, ...]:  # noqa: ARG001
    return ()


class _NullCache(dict[Any, Any]):
    """A cache that keeps nothing."""

    def __setitem__(self, key: Any, value: Any) -> None:
        pass


class Keys(NamedTuple):
    """The keys of a call: of these very sizes, of its plan, and of the sizes in that plan."""

    call: tuple[Any, ...]
    plan: tuple[Any, ...]
    sizes: tuple[Any, ...]


class _Dispatched(registry.Registered):
    public_reference: Callable[..., Any]
    cases: Cases


class Operator(registry.Registered):
    """One operator, declared by pure functions of its arguments.

    Args:
        name: `family.function`. A name that starts with `_` serves another operator, `serves`.
        arguments: A `NamedTuple` of the arguments as PyTorch's dispatcher sees them, with the
            methods of a `Record`: `check`, `outputs`, `launches`, and where needed `scratch` and
            `check_values`.
        reference: The definition in PyTorch; takes the fields of `arguments` by position.
        cost: The least work of a call of the public function, by its keyword arguments.
        dynamic: `{argument: number of static dimensions}`: the leading sizes of this tensor may
            change from call to call with the same launches, apart from what `Size` marks. A tensor
            without elements is never dynamic.
        mutates: Arguments written in place.
        out: The names of buffers for the results, if the operator accepts them: those of `outputs`.
        in_place: Arguments that may be the buffer `out` themselves.
        differentiable: False if no result has a gradient (indices, counts).
        backward, setup_context: As `torch.library.register_autograd` takes them.
        check, outputs, launches, scratch, check_values: Functions of a record that replace its
            methods, for operators that share a record.
        instead: The public function that has a gradient, for an operator without one.
        archs: The architectures that have a kernel, if not all: elsewhere the plan raises.
    """

    def __init__(
        self,
        name: str,
        arguments: type,
        *,
        reference: Callable[..., Any],
        cost: Callable[..., Cost] = lambda **_: Cost(bytes=0),
        dynamic: dict[str, int] | None = None,
        mutates: tuple[str, ...] = (),
        out: tuple[str, ...] = (),
        in_place: tuple[str, ...] = (),
        differentiable: bool = True,
        backward: Callable[..., Any] | None = None,
        setup_context: Callable[..., None] | None = None,
        instead: str = "",
        serves: str | None = None,
        archs: tuple[str, ...] = tuple(DESCRIBED),
        **methods: Callable[..., Any],
    ) -> None:
        self.archs = archs
        self.name, self._label = name, serves or name.rpartition(".")[2]
        registry.register(self)  # first: a name that exists must not replace its custom op
        self.serves = f"{self.family}.{serves}" if serves else None
        self.arguments, self.reference, self.cost = arguments, reference, cost
        self.public_reference = reference
        if unknown := methods.keys() - set(_METHODS):
            raise TypeError(f"{name}: an operator is not declared by {', '.join(sorted(unknown))}")
        get = functools.partial(_method, arguments, methods)
        self.check, self._outputs, self._launches = get("check"), get("outputs"), get("launches")
        self._scratch, self.check_values = get("scratch", _no_scratch), get("check_values", None)
        self.differentiable = differentiable
        hints = typing.get_type_hints(arguments)
        self.parameters = tuple(hints)
        self.mutates, self.outputs = mutates, ()
        self._schema_mutates = mutates
        self._mutated = tuple(self.parameters.index(each) for each in mutates)
        self._in_place = tuple(self.parameters.index(each) for each in in_place)
        self._has_lists = list[Tensor] in hints.values()
        self._static_dims = tuple((dynamic or {}).get(each) for each in self.parameters)
        self._plans: dict[tuple[Any, ...], Plan] = {}
        self._calls: dict[tuple[Any, ...], tuple[Plan, Sized]] = {}
        returned = typing.get_type_hints(self._outputs).get("return")
        self._single = returned is Out
        self.num_results = 1 if self._single else len(typing.get_args(returned))
        no_gradient = no_gradient_message(self._label, instead)
        self._register(hints, out, no_gradient, backward, setup_context)
        self.function: Callable[..., Any] = self

    def _register(
        self,
        hints: dict[str, Any],
        out: tuple[str, ...],
        no_gradient: str,
        backward: Any,
        setup: Any,
    ) -> None:
        """Defines the custom op, and the one that writes buffers."""
        name, kind = self.name.replace(".", "_"), inspect.Parameter.POSITIONAL_OR_KEYWORD
        for each in self.mutates:  # the dispatcher has no optional argument that is written
            hints[each] = Tensor if hints[each] == (Tensor | None) else hints[each]
        parameters = [inspect.Parameter(k, kind, annotation=v) for k, v in hints.items()]
        returned: Any = Tensor if self._single else None
        if not self._single and self.num_results:
            returned = tuple.__class_getitem__((Tensor,) * self.num_results)
        signature = inspect.Signature(parameters, return_annotation=returned)
        self.signature = signature
        self.custom_op: LateAutograd = define(
            name, signature, self._implementation, self._fake, self.mutates, no_gradient
        )
        if backward is not None:
            self.custom_op.register_autograd(backward, setup_context=setup)
        self._dispatched = self.custom_op._opoverload
        self._dispatched_out: Any = None
        if out:
            names = tuple(f"out_{i}" for i in range(self.num_results))
            buffers = [inspect.Parameter(each, kind, annotation=Tensor) for each in names]
            writing = inspect.Signature([*buffers, *parameters], return_annotation=None)
            written = (*names, *self.mutates)
            defined = define(
                f"{name}_out",
                writing,
                self._implementation_out,
                self._fake_out,
                written,
                no_gradient,
            )
            self._dispatched_out = defined._opoverload
            self.outputs = out

    def public(
        self, reference: Callable[..., Any] | None = None, mutates: tuple[str, ...] | None = None
    ) -> Callable[[F], F]:
        """Declares the decorated function as the public one; it stays as it is.

        Where its signature differs from `arguments` (tuples of tensors), `reference` is the
        definition with the public signature, and `mutates` names what it writes in place.
        """

        def declare(function: F) -> F:
            self.function = function
            self.signature = inspect.signature(function, eval_str=True)
            self.public_reference = reference or self.reference
            self.mutates = self.mutates if mutates is None else mutates
            return function

        return declare

    @functools.cached_property
    def cases(self) -> Cases:
        """The argument sets of `cases.py` beside the operator's file: `CASES[short_name]`."""
        module = importlib.import_module(f"{self.function.__module__.rpartition('.')[0]}.cases")
        return module.CASES[self.short_name]

    def dispatched(self) -> registry.Registered:
        """The operator with the signature of its custom op, in which the log saves its calls."""
        found = _Dispatched()
        found.name, found.mutates, found.outputs = self.name, self._schema_mutates, self.outputs
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        buffers = [inspect.Parameter(each, kind, default=None) for each in self.outputs]
        found.signature = inspect.Signature(
            [inspect.Parameter(each, kind) for each in self.parameters] + buffers
        )
        count = len(self.parameters)

        def call(*values: Any) -> Any:
            out = values[count:] or None
            return self(*values[:count], out=out[0] if out and self._single else out)

        found.function, found.public_reference = call, self.reference
        found.cases = registry.get(f"{self.family}.{self._label}").cases
        return found

    # ---- the call ----

    def __call__(self, *args: Any, out: Any = None) -> Any:
        """Serves one call. `args` are all fields of `arguments`, in order."""
        if is_dynamo_compiling():
            return self._dispatch(tuple(map(checks.plain, args)), self._buffers(out))
        values = self._flat(args)
        given = () if out is None else self._buffers(out)
        values += given
        call = self._call_key(args, values)
        if call is None:
            return self._slow(args, given, values)
        found = self._calls.get(call)
        if found is None:
            keys = self._keys(call, values, len(values) - len(given))
            found = self._known(keys, args, given, values)
            if found is None:
                return self._slow(args, given, values, keys)
        plan, sized = found
        if plan.device != current_device() or (
            plan.written and plan.conflicts(values, sized, self._in_place)
        ):
            return self._slow(args, given, values)
        return plan.run(values, sized)

    def fill(self, args: tuple[Any, ...], out: Any, wanted: Sequence[bool] = ()) -> Any:
        """Serves a call of which not all results are public, or have buffers.

        Args:
            args: As for a call.
            out: A buffer for each public result, or None for one that is to be allocated; a single
                one need not be in a tuple.
            wanted: Which results are public, if not all.

        Returns:
            All results.
        """
        wanted = wanted or (True,) * self.num_results
        given = out if isinstance(out, (tuple, list)) else (out,)
        if len(given) != sum(wanted):
            raise TypeError(f"{self._label}: out must be {sum(wanted)} tensors, got {len(given)}")
        if all(wanted) and all(buffer is not None for buffer in given):
            return self(*args, out=tuple(given))  # a cached call, if there was one before
        record = self.arguments(*args)
        self.require(self.check, record)
        outs = self._results(record)
        rest = iter(given)
        buffers = [next(rest) if each else None for each in wanted]
        device = tensors_in(args)[0].device
        filled = (o.empty(device) if buffer is None else buffer for o, buffer in zip(outs, buffers))
        return self(*args, out=tuple(filled))

    def remember_sizes(self, enabled: bool) -> None:
        """With False, every call is one with new sizes, for measuring such calls."""
        cache = dict if enabled else _NullCache
        self._calls = cache()
        if not any(dims is not None for dims in self._static_dims):
            self._plans = cache()
        for plan in self._plans.values():
            plan.sizes = cache()

    def forget(self) -> None:
        """Drops all prepared calls."""
        self._calls.clear()
        self._plans.clear()

    def _call_key(self, args: tuple[Any, ...], values: list[Any]) -> tuple[Any, ...] | None:
        """The key of a call with these very sizes. None: the call must not be cached.

        Each tensor has five entries, each other value two; `_keys` takes them apart.
        """
        if (
            backends.overrides.count
            or logs.settings.level
            or forward_ad_active()
            or dispatch_modes()
            or functorch_transform()
            or recorder.requests is not None
        ):
            return None
        key: list[Any] = [config.generation, len(values)]
        if self._has_lists:
            key.append(tuple([len(x) if isinstance(x, list) else -1 for x in args]))
        recorded = self.differentiable and torch.is_grad_enabled()
        for value in values:
            kind = type(value)
            if kind is Tensor or kind is Parameter:
                index = value.get_device()
                if (
                    index < 0
                    or value.layout is not strided
                    or value.is_neg()
                    or (recorded and value.requires_grad)
                ):
                    return None
                stride = None if value.is_contiguous() else value.stride()
                key += (value.shape, stride, value.dtype, index, value.data_ptr() & 15)
            elif kind in _SCALARS:
                key += (kind, value)  # 1 equals True: the kind tells them apart
            elif kind is float:
                key += (kind, value.hex())  # so do 0.0 and -0.0, which are equal
            elif kind in (tuple, list) and all(type(each) is int for each in value):
                key += (tuple, tuple(value))
            else:
                return None
        return tuple(key)

    def _keys(self, call: tuple[Any, ...], values: list[Any], num_args: int) -> Keys:
        """Takes the dynamic sizes out of the key of a call."""
        at = 2 + self._has_lists
        plan: list[Any] = [*call[:at]]
        sizes: list[Any] = []
        for i, value in enumerate(values):
            if not isinstance(value, Tensor):
                plan += call[at : at + 2]
                at += 2
                continue
            shape, stride = call[at : at + 2]
            if i >= num_args:  # a buffer: compared with `outputs` for every new size
                sizes.append((shape, stride))
                shape = stride = None
            elif not self._has_lists and (dims := self._static_dims[i]) is not None and (
                0 not in shape
            ):  # fmt: skip
                leading = len(shape) - dims
                sizes.append(shape[:leading])
                shape = (leading, shape[leading:])
            plan += (shape, stride, *call[at + 2 : at + 5])
            at += 5
        return Keys(call, tuple(plan), tuple(sizes))

    def _known(
        self, keys: Keys, args: Any, given: Any, values: list[Any]
    ) -> tuple[Plan, Sized] | None:
        """A call of a known plan, perhaps with new sizes."""
        plan = self._plans.get(keys.plan)
        if plan is None:
            return None
        sized = plan.sizes.get(keys.sizes)
        if sized is None:
            record = self.arguments(*args)
            try:
                self.check(record)
                sized = plan.size(record, self._outs(record), given, values)
            except (TypeError, ValueError) as error:
                raise self._named(error) from None
            except CompilationForbiddenError as error:
                raise error.during(self._described(args)) from None
        self._remember(plan, sized, keys)
        return plan, sized

    def _remember(self, plan: Plan, sized: Sized, keys: Keys) -> None:
        remember(plan.sizes, keys.sizes, sized, MAX_SIZES)
        remember(self._calls, keys.call, (plan, sized), MAX_CALLS)

    def _slow(self, args: Any, given: Any, values: list[Any], keys: Keys | None = None) -> Any:
        """A call with nothing left out: checks, the dispatcher if something must see it."""
        args = tuple(map(checks.plain, args))  # NumPy's numbers become Python's
        if not self._has_lists:
            values[: len(args)] = args
        self._checked(args)
        for name, buffer in zip(self.outputs, given):
            if not isinstance(buffer, Tensor):
                kind = type(buffer).__name__
                raise TypeError(f"{self._label}: {name} must be a tensor, got {kind}")
        self._check_apart(args, given)
        device, plain = self._inspect(args, given)
        if self.differentiable:
            refuse_tangents(self._label, tensors_in(args))
        if not plain or dispatch_modes() or functorch_transform():
            if given and not plain and self._wants_gradient(args):
                raise ValueError(f"{self._label}: out cannot be given with gradients")
            return self._dispatch(args, given)
        return self._execute(device, args, given, values, keys)

    def _dispatch(self, args: tuple[Any, ...], given: Sequence[Any]) -> Any:
        """Lets PyTorch's dispatcher see the call."""
        if not given:
            return self._dispatched(*args)
        self._dispatched_out(*given, *args)
        return given[0] if self._single else tuple(given)

    def _execute(
        self,
        device: torch.device,
        args: Any,
        given: Sequence[Tensor] = (),
        values: list[Any] | None = None,
        keys: Keys | None = None,
    ) -> Any:
        """Serves a checked call on plain tensors by its backend."""
        values = [*self._flat(args), *given] if values is None else values
        try:
            backend = backends.choose(device)
            if logs.settings.level:
                named = zip((*self.parameters, *self.outputs), (*args, *given))
                logs.call(self.name, backend, dict(named))
            if self.check_values is not None and backend != "meta" and backends.is_checked():
                self.check_values(self.arguments(*args))
            if backend == "torch":
                return self._refer(device, args, given)
            plan, sized = self._prepare(backend, device, args, given, values, keys)
        except (TypeError, ValueError) as error:
            raise self._named(error) from None
        except CompilationForbiddenError as error:
            raise error.during(self._described(args)) from None
        if device.type == "cuda" and device.index != current_device():
            with torch.cuda.device(device):
                return plan.run(values, sized)
        return plan.run(values, sized)

    def _prepare(
        self,
        backend: str,
        device: torch.device,
        args: Any,
        given: Sequence[Tensor],
        values: list[Any],
        keys: Keys | None,
    ) -> tuple[Plan, Sized]:
        """Evaluates the declaration for a call that is checked; remembers it under `keys`."""
        record = self.arguments(*args)
        outs = self._outs(record)
        specs = [Spec.of(x, i) if isinstance(x, Tensor) else x for i, x in enumerate(values)]
        num_args = len(values) - len(given)
        written = tuple(i for i in self._written(args) if isinstance(values[i], Tensor))
        buffers, cached = specs[num_args:], keys is not None
        plan = Plan(outs, self.num_results, buffers, len(values), written, device, cached)
        launches = self._launched(self.arguments(*self._nested(args, specs)), plan.specs)
        if recorder.requests is not None:
            recorder.requests += self._requests(launches, record)
        if backend == "meta" or recorder.requests is not None:
            launches = ()
        plan.finish(launches, functools.partial(_handle, device, backend))
        found = plan.size(record, outs, given, values)
        if keys is not None and not any(x.is_complex() for x in values if isinstance(x, Tensor)):
            remember(self._plans, keys.plan, plan, MAX_PLANS)  # a complex tensor may be conjugated
            self._remember(plan, found, keys)
        return plan, found

    def _launched(self, record: Any, specs: Sequence[Spec]) -> tuple[Launch | Host, ...]:
        launches = self._launches(record, *specs) or ()
        return (launches,) if isinstance(launches, (Launch, Host)) else tuple(launches)

    def _requests(self, launches: Sequence[Any], record: Any) -> list[Request]:
        found = [each for each in launches if isinstance(each, Launch)]
        return [
            Request(each.kernel, sized(each.problem, record), (self, record, each))
            for each in found
        ]

    def _refer(self, device: torch.device, args: Any, given: Sequence[Tensor]) -> Any:
        """The reference, with its results in the caller's buffers."""
        with torch.autocast(device.type, enabled=False):  # it would round inside the definition
            result = self.reference(*args)
        written = [args[i] for i in self._mutated] if self._mutated else []
        if given:
            results = (result,) if self._single else tuple(result)
            for out, buffer in zip(self._outs(self.arguments(*args)), given):
                checks.buffer(out.name, buffer, out.shape, out.dtype, out.strides)
            for buffer, each in zip(given, results):
                buffer.copy_(each)
            result = given[0] if self._single else tuple(given)
        increment_version([x for x in tensors_in(written) if not x.is_inference()])
        return result

    # ---- the dispatcher's implementations ----

    def _implementation(self, *args: Any) -> Any:
        self._checked(args)
        return self._execute(self._inspect(args)[0], args)

    def _implementation_out(self, *args: Any) -> None:
        given, args = args[: self.num_results], args[self.num_results :]
        self._checked(args)
        self._execute(self._inspect(args, given)[0], args, given)

    def _fake(self, *args: Any) -> Any:
        """Results without memory, from `outputs` alone; sizes may be symbolic."""
        self._checked(args)
        device = self._inspect(args)[0]
        self._record(device, args)
        results = [out.empty(device) for out in self._results(self.arguments(*args))]
        return results[0] if self._single else tuple(results) if results else None

    def _fake_out(self, *args: Any) -> None:
        given, args = args[: self.num_results], args[self.num_results :]
        self._checked(args)
        self._record(self._inspect(args, given)[0], args, given)
        for out, buffer in zip(self._results(self.arguments(*args)), given):
            checks.buffer(out.name, buffer, out.shape, out.dtype, out.strides)

    def _record(self, device: torch.device, args: Any, given: Sequence[Tensor] = ()) -> None:
        """Records the launches of a call that autograd sees, on meta tensors."""
        if recorder.requests is not None and device.type == "meta":
            values = [*self._flat(args), *given]
            self._prepare("meta", device, args, given, values, None)

    # ---- pieces ----

    def _results(self, record: Any) -> tuple[Out, ...]:
        outs = self._outputs(record)
        return (outs,) if self._single else tuple(outs or ())

    def _outs(self, record: Any) -> tuple[Out, ...]:
        return self._results(record) + self._scratch(record)

    def _flat(self, args: Sequence[Any]) -> list[Any]:
        """The arguments with lists of tensors taken apart."""
        if not self._has_lists:
            return list(args)
        return [x for value in args for x in (value if isinstance(value, list) else (value,))]

    def _nested(self, args: Sequence[Any], flat: Sequence[Any]) -> list[Any]:
        """Flat values in the lists that the arguments have."""
        if not self._has_lists:
            return list(flat[: len(args)])
        rest = iter(flat)
        return [[next(rest) for _ in x] if isinstance(x, list) else next(rest) for x in args]

    def _written(self, args: Any) -> list[int]:
        """The positions among the flat values of what is written in place."""
        positions = self._nested(args, range(len(self._flat(args))))
        written = [positions[i] for i in self._mutated]
        return [k for at in written for k in (at if isinstance(at, list) else (at,))]

    def require(self, check: Callable[..., object], *args: Any) -> None:
        """Runs a check of the public function; its errors get the operator's name in front."""
        if is_dynamo_compiling():
            check(*args)
            return
        try:
            check(*args)
        except (TypeError, ValueError) as error:
            raise self._named(error) from None

    def _described(self, args: Sequence[Any]) -> str:
        """A call with its arguments, for messages."""
        named = zip(self.parameters, args)
        return f"{self.name}({', '.join(f'{k}={logs.describe(v)}' for k, v in named)})"

    def _named(self, error: Exception) -> Exception:
        return type(error)(f"{self._label}: {error}")

    def _checked(self, args: tuple[Any, ...]) -> None:
        self.require(self.check, self.arguments(*args))

    def _buffers(self, out: Any) -> tuple[Any, ...]:
        if out is None:
            return ()
        buffers = (out,) if self._single else out
        if not isinstance(buffers, (tuple, list)) or len(buffers) != self.num_results:
            given = f"{len(out)} parts" if isinstance(out, (tuple, list)) else type(out).__name__
            raise TypeError(f"{self._label}: out must be {self.num_results} tensors, got {given}")
        return tuple(buffers)

    def _wants_gradient(self, values: Sequence[Any]) -> bool:
        return torch.is_grad_enabled() and any(x.requires_grad for x in tensors_in(tuple(values)))

    def _inspect(self, args: Sequence[Any], given: Sequence[Any] = ()) -> tuple[torch.device, bool]:
        """The one device of all tensors, and whether they are plain ones that autograd ignores."""
        tensors = tensors_in((*args, *given))
        devices = {x.device for x in tensors}
        if len(devices) > 1:
            named = [(name, x) for name, x in zip(self.parameters, args) if isinstance(x, Tensor)]
            where = ", ".join(f"{name} is on {x.device}" for name, x in named)
            raise ValueError(f"{self._label}: all tensors must be on one device, but {where}")
        if not devices:
            raise TypeError(f"{self._label}: at least one argument must be a torch.Tensor")
        plain = all(
            type(x) in (Tensor, Parameter) and not x.is_neg() and not x.is_conj() for x in tensors
        ) and not (self.differentiable and self._wants_gradient(tensors))
        return devices.pop(), plain

    def _check_apart(self, args: tuple[Any, ...], given: Sequence[Any]) -> None:
        """Written tensors share memory with no other, unless `in_place` allows it."""
        if not given and not self._mutated:
            return
        outs = list(zip(self.outputs, given))
        allowed = [args[i] for i in self._in_place if any(args[i] is x for _, x in outs)]
        read = []
        written = outs
        for i, (name, value) in enumerate(zip(self.parameters, args)):
            named = [(name, x) for x in tensors_in(value) if not any(x is y for y in allowed)]
            if i in self._mutated:
                written = written + named
            else:
                read += named
        try:
            for name, x in written:
                checks.writable(name, x)
            checks.apart(written, read)
        except ValueError as error:
            raise self._named(error) from None


def _handle(
    device: torch.device, backend: str, launch: Launch, problem: tuple[Any, ...]
) -> Callable[..., Any]:
    """What runs a launch. A kernel of a CUDA device is compiled now, if it is not yet."""
    if backend == "tilelang":
        return launch.kernel.bound(problem, device.index or 0)
    launch.kernel.static_arguments(problem, emulation.device())  # raises before anything runs
    return functools.partial(emulation.run, launch.kernel, problem)
