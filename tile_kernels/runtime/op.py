"""`@op`: one declaration per public operator, and the registry that everything else reads.

    @op(check=_check, oracle=oracles.f, cost=_cost, cases=cases.F)
    def f(x: Tensor, n: int) -> Tensor:
        '''Docstring.'''
        out = torch.empty(...)              # on the input's device
        _KERNEL.launch((sizes...), x, out)
        return out

The decorated body only allocates and launches. A call of the public function goes

    checks -> one device? -> backend -> body (kernel) or oracle

and through PyTorch's dispatcher first where that is needed: under `torch.compile`, for tensor
subclasses and dispatch modes, and when autograd must see the operator. Shape inference for the
dispatcher is the body itself with its launches left out.

Two things the dispatcher cannot express have their own place:

- buffers for results: parameters named in `outputs=` become a second custom op that writes them;
- signatures with tuples, unions or lists: `@face(f)` makes a plain function, which unpacks its
  arguments and calls `f`, the public function of the operator.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeVar, get_args

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack as dispatch_modes
from torch._C._functorch import peek_interpreter_stack as functorch_transform
from torch._library.custom_ops import CustomOpDef
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version
from torch.compiler import is_dynamo_compiling
from torch.nn import Parameter

from tile_kernels.runtime import backends, checks, logs, registry
from tile_kernels.runtime.autograd import last_gradients, no_gradient_message, refuse_tangents
from tile_kernels.runtime.cases import Cases, Cost, tensors_in
from tile_kernels.runtime.launch import recording
from tile_kernels.runtime.outputs import check_output
from tile_kernels.runtime.pytorch import LateAutograd
from tile_kernels.runtime.registry import all_ops, dispatched, get, load_all, select
from tile_kernels.runtime.replay import remembering
from tile_kernels.runtime.road import road as state

__all__ = [
    "Op",
    "all_ops",
    "dispatched",
    "face",
    "get",
    "gradient",
    "last_gradients",
    "load_all",
    "op",
    "refuse_tangents",
    "select",
]

F = TypeVar("F", bound=Callable[..., Any])

_registry: dict[str, Any] = registry._registry
_dispatched = registry._dispatched
_NO_CASES = Cases(small=())


@dataclass(frozen=True, eq=False)
class Op:
    """One operator. `function` is what users call; `name` is `family.function`."""

    name: str
    function: Callable[..., Any]
    body: Callable[..., Any]
    check: Callable[..., None]
    oracle: Callable[..., Any]
    cost: Callable[..., Cost]
    cases: Cases
    mutates: tuple[str, ...]
    outputs: tuple[str, ...]
    signature: inspect.Signature
    custom_op: CustomOpDef
    serves: str | None

    @property
    def short_name(self) -> str:
        """The public function's name."""
        return self.name.rpartition(".")[2]

    @property
    def family(self) -> str:
        """The package it lives in."""
        return self.name.partition(".")[0]

    @property
    def tensor_parameters(self) -> list[str]:
        """The parameters that take tensors, optional ones included."""
        return [
            name
            for name, parameter in self.signature.parameters.items()
            if parameter.annotation is Tensor or Tensor in get_args(parameter.annotation)
        ]

    def outcome(self, function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        """What `function` returns for `arguments`, and with it the arguments written in place."""
        result = function(**arguments)
        written = tuple(arguments.get(name) for name in self.mutates)
        return (result, *written) if self.mutates else result

    def buffers(self, *values: Tensor) -> dict[str, Any]:
        """Buffers for the results as arguments: by name, or several as one tuple `out`."""
        if len(values) == 1 or self.outputs[-1] in self.signature.parameters:
            return dict(zip(self.outputs, values))
        return {"out": values}

    def bind(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The arguments by name, defaults filled in."""
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return dict(bound.arguments)


def op(
    *,
    check: Callable[..., None],
    oracle: Callable[..., Any],
    cost: Callable[..., Cost] = lambda **_: Cost(bytes=0),
    cases: Cases = _NO_CASES,
    mutates: Iterable[str] = (),
    outputs: Iterable[str] = (),
    in_place: Iterable[str] = (),
    differentiable: bool = True,
    instead: str = "",
    values: Callable[..., None] | None = None,
    name: str | None = None,
    serves: str | None = None,
    signature: inspect.Signature | None = None,
) -> Callable[[F], F]:
    """Declare the decorated function as a public operator of its family.

    - `check(*arguments)` raises `ValueError`/`TypeError` on bad arguments;
    - `oracle(*arguments)` is the definition in PyTorch, with the operator's signature;
    - `cost(**arguments)` is the least work of a call;
    - `cases` are the argument sets for tests and benchmarks;
    - `mutates` names the arguments written in place;
    - `outputs` names the last parameters, `Tensor | None = None`: buffers that receive the results
      and are returned, all or none given; the body gets each by `runtime.outputs.output`, which
      allocates or checks, and the other functions here do not see them. They share no memory with
      arguments, but one may be an argument named in `in_place`;
    - `values(*arguments)` raises `ValueError` on wrong values, in the checked mode only;
    - `name` is the function's name where that is not the body's (see `face`);
    - an operator whose name starts with `_` serves another one: it is a custom op like all, but not
      listed, and needs neither cost nor cases; `serves` names that one, for error messages;
    - `signature` is what the dispatcher sees where that is not the body's own, so that operators
      behind one face share a body;
    - `differentiable=False` says that no result has a gradient (indices, counts), so that
      arguments which require one do not matter. Otherwise see `gradient`;
    - `instead` names the public function that has a gradient, for an operator that has none.
    """

    def declare(body: F) -> F:
        family = (body.__module__.split(".") * 2)[1]  # tile_kernels.FAMILY.module
        short_name = name or body.__name__
        full_name = f"{family}.{short_name}"
        if full_name in _registry:
            raise ValueError(f"the operator {full_name} is declared twice")
        seen = signature or inspect.signature(body, eval_str=True)
        road = _Road(full_name, body, check, oracle, seen, tuple(outputs), differentiable)
        road.name, road.values, road.in_place = serves or short_name, values, tuple(in_place)
        public = _public_function(road, body)
        function = _counted(road.name, public, seen, (*road.outputs, *mutates))
        registered, no_gradient = f"{family}_{short_name}", no_gradient_message(road.name, instead)
        custom_op = _custom_op(
            registered, road.from_dispatcher, road.shapes, road.functional, tuple(mutates),
            no_gradient,
        )  # fmt: skip
        road.dispatched = custom_op._opoverload
        if road.outputs:
            written = (*road.outputs, *mutates)
            writing = _custom_op(
                f"{registered}_out", road.write, road.shapes_to_write, road.writing, written,
                no_gradient,
            )  # fmt: skip
            road.dispatched_out = writing._opoverload
        _registry[full_name] = _dispatched[full_name] = Op(
            name=full_name,
            function=function,
            body=body,
            check=check,
            oracle=oracle,
            cost=cost,
            cases=cases,
            mutates=tuple(mutates),
            outputs=road.outputs,
            signature=seen,
            custom_op=custom_op,
            serves=serves and f"{family}.{serves}",
        )
        return function  # type: ignore[return-value]

    return declare


def face(
    function: Callable[..., Any],
    oracle: Callable[..., Any],
    check: Callable[..., None] | None = None,
    mutates: Iterable[str] = (),
) -> Callable[[F], F]:
    """Make the decorated function the public one of the operator that declared `function`.

    It unpacks what the dispatcher cannot take (tuples of tensors, unions) and calls `function`.
    `oracle` has the public signature; samples, cost and tests speak in public terms too. `check`
    looks at what the operator itself does not see; `mutates` names what is written in place.
    """

    def declare(public: F) -> F:
        declared = get(function)
        signature = inspect.signature(public, eval_str=True)

        @remembering
        @functools.wraps(public)
        def inner(*args: Any, **kwargs: Any) -> Any:
            if is_dynamo_compiling():
                if check is not None:
                    check(*args, **kwargs)
                return public(*args, **kwargs)
            try:
                if check is not None:
                    check(*args, **kwargs)
                return public(*args, **kwargs)
            except (TypeError, ValueError) as error:
                _check_bound(declared.short_name, signature, args, kwargs)
                if str(error).startswith(f"{declared.short_name}: "):
                    raise
                raise type(error)(f"{declared.short_name}: {error}") from error

        outer = _counted(declared.short_name, inner, signature, (*mutates, "out"))
        _registry[declared.name] = replace(
            declared,
            function=outer,
            body=public,
            oracle=oracle,
            signature=signature,
            mutates=tuple(mutates),
        )
        return outer  # type: ignore[return-value]

    return declare


def _counted(
    name: str, function: Callable[..., Any], signature: inspect.Signature, written: Iterable[str]
) -> Callable[..., Any]:
    """`function`, after which autograd knows that the arguments named `written` have changed.

    Inference tensors, which have no version, can be written in inference mode only.

    The dispatcher would see to it, but kernels write behind its back. Without it a gradient that
    needs what was overwritten would be wrong instead of an error.
    """
    places = {key: i for i, key in enumerate(signature.parameters) if key in written}
    if not places:
        return function

    @functools.wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling() or state.watch is not None:  # then a call around this one does it
            return function(*args, **kwargs)
        changed = []
        for key, place in places.items():
            for x in tensors_in(args[place] if place < len(args) else kwargs.get(key)):
                if not x.is_inference():
                    changed.append(x)
                elif not torch.is_inference_mode_enabled():
                    raise ValueError(
                        f"{name}: {key} must not be an inference tensor outside of "
                        "torch.inference_mode(), where it cannot be written; pass a clone"
                    )
        result = function(*args, **kwargs)
        increment_version(changed)
        return result

    return counted


def _check_bound(name: str, signature: inspect.Signature, args: Any, kwargs: Any) -> None:
    """Raise in words if the number or the names of arguments are wrong."""
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{name}: {error}") from None


def gradient(
    function: Callable[..., Any],
    backward: Callable[..., Any],
    *,
    setup_context: Callable[..., None] | None = None,
) -> None:
    """Make a declared operator differentiable.

    `setup_context(ctx, inputs, output)` saves what `backward(ctx, *grads)` needs; `backward`
    returns one gradient (or None) per argument. It then holds on every backend, in eager code and
    under `torch.compile`.
    """
    get(function).custom_op.register_autograd(backward, setup_context=setup_context)


class _Road:
    """What one call needs, apart from `Op` so that the hot path reads few plain attributes."""

    __slots__ = (
        "body", "check", "differentiable", "dispatched", "dispatched_out", "full_name",
        "functional", "in_place", "name", "oracle", "outputs", "signature", "values",
        "writing",
    )  # fmt: skip
    dispatched: Callable[..., Any]
    in_place: tuple[str, ...]
    dispatched_out: Callable[..., Any]
    values: Callable[..., None] | None

    def __init__(
        self,
        full_name: str,
        body: Callable[..., Any],
        check: Callable[..., None],
        oracle: Callable[..., Any],
        signature: inspect.Signature,
        outputs: tuple[str, ...],
        differentiable: bool,
    ) -> None:
        self.full_name, self.signature = full_name, signature
        self.name = full_name.rpartition(".")[2]
        self.outputs, self.differentiable = outputs, differentiable
        self.body, self.check, self.oracle = body, check, oracle
        self.functional, self.writing = _without_and_with(signature, outputs)

    def explained(self, error: Exception, args: Any, kwargs: Any) -> Exception:
        """The checks' error with the operator's name in front, to be raised instead."""
        try:
            self.signature.bind(*args, **kwargs)
        except TypeError as unbound:  # a wrong number of arguments, a wrong name
            error = unbound
        return type(error)(f"{self.name}: {error}")

    def run(self, device: torch.device, args: Any, kwargs: Any) -> Any:
        """Serve a checked call by the backend of `device`."""
        try:
            backend = backends.choose(device)
        except ValueError as error:
            raise self.explained(error, args, kwargs) from None
        if logs.settings.level:
            logs.call(self.full_name, backend, self.signature.bind(*args, **kwargs).arguments)
        if self.values is not None and backend != "meta" and backends.is_checked():
            try:
                self.values(*args, **kwargs)
            except ValueError as error:
                raise self.explained(error, args, kwargs) from None
        if backend == "torch":
            if torch.is_autocast_enabled(device.type):  # which would round inside of the definition
                with torch.autocast(device.type, enabled=False):
                    return self.oracle(*args, **kwargs)
            return self.oracle(*args, **kwargs)
        if backend == "meta":
            with recording():
                return self.body(*args, **kwargs)
        return self.body(*args, **kwargs)

    def checked(self, args: Any, kwargs: Any) -> None:
        try:
            self.check(*args, **kwargs)
        except (TypeError, ValueError) as error:
            raise self.explained(error, args, kwargs) from None

    def from_dispatcher(self, *args: Any, **kwargs: Any) -> Any:
        """The custom op's implementation: PyTorch calls it with plain tensors."""
        self.checked(args, kwargs)
        return self.run(_inspect(self, args, kwargs)[0], args, kwargs)

    def shapes(self, *args: Any, **kwargs: Any) -> Any:
        """The custom op's fake implementation: allocate as the body does, launch nothing."""
        self.checked(args, kwargs)
        with recording():
            return self.body(*args, **kwargs)

    # ---- results into buffers of the caller ----

    def into(self, args: Any, kwargs: Any) -> Any:
        """A call of the public function that may bring buffers; None means that it brings none."""
        named = {**dict(zip(self.signature.parameters, args)), **kwargs}
        if len(named) != len(args) + len(kwargs):
            raise self.explained(TypeError("too many arguments"), args, kwargs)
        buffers = {key: named.pop(key, None) for key in self.outputs}
        missing = [key for key, value in buffers.items() if value is None]
        if len(missing) == len(buffers):
            return None
        if missing:
            raise ValueError(f"{self.name}: {' and '.join(self.outputs)} must be given together")
        if is_dynamo_compiling():
            self.dispatched_out(**buffers, **named)
        else:
            self.checked((), named)
            self.check_apart(named, buffers)
            device, plain = _inspect(self, (), {**named, **buffers})
            if not plain and _wants_gradient(named):
                raise ValueError(f"{self.name}: {self.outputs[0]} cannot be given with gradients")
            if plain and not (dispatch_modes() or functorch_transform()):
                self.write_checked(device, named, buffers)
            else:
                self.dispatched_out(**buffers, **named)
        values = tuple(buffers.values())
        return values if len(values) > 1 else values[0]

    def check_apart(self, named: dict[str, Any], buffers: dict[str, Any]) -> None:
        """Buffers share memory with nothing, unless one is an argument that may be overwritten."""
        if not all(isinstance(buffer, Tensor) for buffer in buffers.values()):
            return  # the operator's own checks say it better
        mine = [named.get(name) for name in self.in_place]
        same = [x for x in mine if isinstance(x, Tensor) and any(x is b for b in buffers.values())]
        read = [
            (name, x)
            for name, value in named.items()
            for x in tensors_in(value)
            if not any(x is other for other in same)
        ]
        try:
            checks.apart(list(buffers.items()), read)
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from None

    def write(self, *args: Any, **kwargs: Any) -> None:
        """The writing custom op's implementation."""
        named, buffers = self.bound_to_write(args, kwargs)
        self.write_checked(_inspect(self, (), {**named, **buffers})[0], named, buffers)

    def shapes_to_write(self, *args: Any, **kwargs: Any) -> None:
        """The writing custom op's fake implementation."""
        named, buffers = self.bound_to_write(args, kwargs)
        with recording():
            self.body(**named, **buffers)

    def bound_to_write(self, args: Any, kwargs: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The writing custom op's inputs, checked, and its buffers."""
        named = self.writing.bind(*args, **kwargs).arguments
        buffers = {key: named.pop(key) for key in self.outputs}
        self.checked((), named)
        return named, buffers

    def write_checked(
        self, device: torch.device, named: dict[str, Any], buffers: dict[str, Tensor]
    ) -> None:
        """Serve a call by the backend of `device`, results into `buffers`, which may not fit."""
        try:
            if backends.choose(device) != "torch":
                self.run(device, (), {**named, **buffers})
                return
            results = self.run(device, (), named)
            named_results = dict(zip(buffers, tensors_in(results)))
            for key, result in named_results.items():
                check_output(key, buffers[key], result.shape, result.dtype, result.stride())
            for key, result in named_results.items():
                buffers[key].copy_(result)
        except (TypeError, ValueError) as error:
            raise self.explained(error, (), {**named, **buffers}) from None


def _without_and_with(
    signature: inspect.Signature, outputs: tuple[str, ...]
) -> tuple[inspect.Signature, inspect.Signature]:
    """The signatures of the functional op and of the one that writes `outputs`, those first."""
    inputs = [p for p in signature.parameters.values() if p.name not in outputs]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    written = [inspect.Parameter(key, kind, annotation=Tensor) for key in outputs]
    return (
        signature.replace(parameters=inputs),
        signature.replace(parameters=written + inputs, return_annotation=None),
    )


def _wants_gradient(named: dict[str, Any]) -> bool:
    return torch.is_grad_enabled() and any(
        isinstance(value, Tensor) and value.requires_grad for value in named.values()
    )


def _public_function(road: _Road, body: Callable[..., Any]) -> Callable[..., Any]:
    check, overrides, settings = road.check, backends.overrides, logs.settings

    def function(*args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            return road.dispatched(*args, **kwargs)
        try:
            check(*args, **kwargs)
        except (TypeError, ValueError) as error:
            raise road.explained(error, args, kwargs) from None
        device, plain = _inspect(road, args, kwargs)
        if forward_ad._current_level >= 0 and road.differentiable:
            refuse_tangents(road.name, (*args, *kwargs.values()))
        if not plain or dispatch_modes() or functorch_transform():
            return road.dispatched(*args, **kwargs)
        if device.type == "cuda" and not (overrides.count or settings.level):
            return body(*args, **kwargs)  # as `run` would, by the shortest way
        return road.run(device, args, kwargs)

    if not road.outputs:
        return remembering(functools.wraps(body)(function))
    least = len(road.functional.parameters)

    @remembering
    @functools.wraps(body)
    def function_or_into(*args: Any, **kwargs: Any) -> Any:
        if len(args) > least or any(key in kwargs for key in road.outputs):
            written = road.into(args, kwargs)
            if written is not None:
                return written
            args = args[:least]
            kwargs = {key: value for key, value in kwargs.items() if key not in road.outputs}
        return function(*args, **kwargs)

    return function_or_into


def _inspect(road: _Road, args: Any, kwargs: Any) -> tuple[torch.device, bool]:
    """The one device of all tensors, and whether they are plain ones that autograd ignores."""
    device, plain = None, True
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, Tensor):
            if device is None:
                device = value.device
            elif value.device != device:
                raise _mixed(road, args, kwargs)
            kind = type(value)
            if (kind is not Tensor and kind is not Parameter) or value.is_neg() or value.is_conj():
                plain = False  # PyTorch unwraps it, or applies the pending sign or conjugation
            if value.requires_grad and road.differentiable and torch.is_grad_enabled():
                plain = False
    if device is None:
        raise TypeError(f"{road.name}: at least one argument must be a torch.Tensor")
    return device, plain


def _mixed(road: _Road, args: Any, kwargs: Any) -> ValueError:
    named = road.signature.bind(*args, **kwargs).arguments
    places = [f"{name} is on {t.device}" for name, t in named.items() if isinstance(t, Tensor)]
    return ValueError(f"{road.name}: all tensors must be on one device, but {', '.join(places)}")


def _custom_op(
    name: str,
    implementation: Callable[..., Any],
    shapes: Callable[..., Any],
    signature: inspect.Signature,
    mutates: tuple[str, ...],
    no_gradient: str,
) -> CustomOpDef:
    def implemented(*args: Any, **kwargs: Any) -> Any:
        return implementation(*args, **kwargs)

    implemented.__signature__ = signature  # type: ignore[attr-defined]
    schema = torch.library.infer_schema(implemented, mutates_args=mutates)
    custom_op = LateAutograd("tile_kernels", name, schema, implemented)
    custom_op.no_gradient = no_gradient
    custom_op.register_kernel(None)(implemented)
    custom_op.register_fake(shapes)
    return custom_op
