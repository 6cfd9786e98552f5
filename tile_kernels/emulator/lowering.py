"""From a TileLang kernel to its CUDA source and a launch description made of plain data.

Nothing here runs nvcc or needs a GPU. The result holds no TVM object: sizes that depend on dynamic
symbols are kept as Python expressions, so it can be stored on disk and evaluated quickly.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from . import cache, lines
from .errors import EmulationError

DEFAULT_ARCH = "sm_90a"
_DATA_FIELD = 1  # of DLTensor, in the numbering of tvm_struct_get
# Of launches with programmatic stream serialization; the spelling is TVM's.
_OVERLAP_TAG = "tirx.use_programtic_dependent_launch"


# Part of the cache's keys. Read at import: a file that changes later is not the code that runs.
_SOURCES = tuple(Path(str(name)).read_text() for name in (__file__, lines.__file__))


@dataclass(frozen=True)
class Param:
    """A parameter of the prim_func: a tensor with a shape, or a scalar."""

    name: str
    dtype: str
    shape: tuple[str, ...] | None = None  # None: a scalar
    strides: tuple[str, ...] | None = None  # None: contiguous


@dataclass(frozen=True)
class SharedBuffer:
    """Exact size of a shared buffer, and the width of its elements."""

    size: int
    elem_bits: int


@dataclass(frozen=True)
class TensorMap:
    """Arguments of a TMA descriptor, as the host code would encode them."""

    tensor: str
    kind: int  # CUtensorMapDataType
    dims: tuple[str, ...]
    strides: tuple[str, ...]  # bytes; the first is the element size
    box: tuple[str, ...]
    interleave: int
    swizzle: int
    fill: int
    promotion: int = 0  # of accesses in L2; the emulator has no use for it
    # of im2col, where `box` is (channels, pixels): traversal strides, lower and upper corner
    pixels: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]] | None = None


@dataclass(frozen=True)
class Kernel:
    """One device function: its arguments in call order and its launch size."""

    name: str
    args: tuple[tuple[str, str], ...]  # (name, "tensor" | "map" | scalar dtype)
    grid: tuple[str, str, str]
    block: tuple[str, str, str]
    dyn_bytes: str
    shared: dict[str, SharedBuffer]
    cluster: tuple[int, ...] = (1, 1, 1)
    overlaps: bool = False  # may start before the launch before it has ended (PDL)


@dataclass(frozen=True)
class Lowered:
    """A lowered prim_func: generated source plus everything needed to launch it."""

    name: str
    arch: str
    source: str
    params: tuple[Param, ...]
    kernels: tuple[Kernel, ...]  # in launch order
    maps: dict[str, TensorMap]
    cooperative: bool
    workspaces: tuple[Param, ...] = ()  # tensors that the host code allocates (T.alloc_global)
    tables: tuple[str, ...] = ()  # parameters whose elements are addresses of other tensors
    python: lines.LineMap = lines.NOTHING  # where the lines of `source` come from
    assumptions: tuple[str, ...] = ()  # what `T.assume` says of sizes and scalars

    def to_json(self) -> str:
        """Serialize for the cache."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Lowered:
        """Read back what `to_json` wrote."""
        d = json.loads(text)
        for field in ("params", "workspaces"):
            d[field] = tuple(
                Param(p["name"], p["dtype"], _thaw(p["shape"]), _thaw(p["strides"]))
                for p in d[field]
            )
        d["tables"], d["assumptions"] = tuple(d["tables"]), tuple(d["assumptions"])
        d["kernels"] = tuple(
            Kernel(
                name=k["name"],
                args=tuple((a[0], a[1]) for a in k["args"]),
                grid=tuple(k["grid"]),
                block=tuple(k["block"]),
                dyn_bytes=k["dyn_bytes"],
                shared={n: SharedBuffer(**s) for n, s in k["shared"].items()},
                cluster=tuple(k["cluster"]),
                overlaps=k["overlaps"],
            )
            for k in d["kernels"]
        )
        d["maps"] = {
            name: TensorMap(**{f: _thaw(v) for f, v in m.items()}) for name, m in d["maps"].items()
        }
        d["python"] = lines.LineMap(
            **{name: tuple(map(_thaw, values)) for name, values in d["python"].items()}
        )
        return cls(**d)


def _thaw(value: Any) -> Any:
    """JSON has lists only; the dataclasses hold tuples."""
    return tuple(map(_thaw, value)) if isinstance(value, list) else value


# ---- Python expressions from TIR -------------------------------------------------------------

_BINARY = {
    "Add": "({} + {})",
    "Sub": "({} - {})",
    "Mul": "({} * {})",
    "FloorDiv": "({} // {})",
    "FloorMod": "({} % {})",
    "Div": "_div({}, {})",
    "Mod": "_mod({}, {})",
    "Min": "min({}, {})",
    "Max": "max({}, {})",
    "EQ": "({} == {})",
    "NE": "({} != {})",
    "LT": "({} < {})",
    "LE": "({} <= {})",
    "GT": "({} > {})",
    "GE": "({} >= {})",
    "And": "({} and {})",
    "Or": "({} or {})",
}
_CALLS = {
    "shift_left": "({} << {})",
    "shift_right": "({} >> {})",
    "bitwise_and": "({} & {})",
    "bitwise_or": "({} | {})",
    "bitwise_xor": "({} ^ {})",
    "if_then_else": "({1} if {0} else {2})",
}


def _div(a: int, b: int) -> int:
    """C division: towards zero."""
    q = abs(a) // abs(b)
    return q if (a < 0) == (b < 0) else -q


def _mod(a: int, b: int) -> int:
    return a - _div(a, b) * b


def to_python(expr: Any) -> str:
    """A TIR integer expression as Python source over the names of its variables."""
    if isinstance(expr, int):
        return str(expr)
    kind = type(expr).__name__
    if kind == "IntImm":
        return str(int(expr.value))
    if kind in {"Var", "SizeVar"}:
        return str(expr.name)
    if kind == "Cast":
        return to_python(expr.value)
    if kind == "Not":
        return f"(not {to_python(expr.a)})"
    if kind == "Select":
        yes, no = to_python(expr.true_value), to_python(expr.false_value)
        return f"({yes} if {to_python(expr.condition)} else {no})"
    if kind in _BINARY:
        return _BINARY[kind].format(to_python(expr.a), to_python(expr.b))
    if kind == "Call":
        form = _CALLS.get(str(expr.op.name).rsplit(".", 1)[-1])
        if form is not None:
            return form.format(*(to_python(a) for a in expr.args))
    raise EmulationError(f"a launch size uses an expression the emulator cannot evaluate: {expr}")


def compile_expressions(exprs: Sequence[str]) -> Callable[[dict[str, Any]], tuple[Any, ...]]:
    """One function that evaluates several expressions over a dict of symbols."""
    body = ", ".join(exprs) + ("," if exprs else "")
    code = compile(f"({body})", "<launch sizes>", "eval")
    scope = {"__builtins__": {}, "min": min, "max": max, "_div": _div, "_mod": _mod}
    return lambda symbols: eval(code, scope, symbols)  # noqa: S307 (written by to_python)


# ---- lowering ----------------------------------------------------------------------------------


def plain_configs(pass_configs: Mapping[Any, Any] | None) -> dict[str, Any]:
    """Pass configs keyed by string, whichever of string or enum the caller used."""
    return {str(getattr(k, "value", k)): v for k, v in (pass_configs or {}).items()}


def lower(
    prim_func: Any,
    *,
    arch: str = DEFAULT_ARCH,
    pass_configs: Mapping[Any, Any] | None = None,
    cache_dir: Path | None = None,
    with_lines: bool = True,
) -> Lowered:
    """Lower a prim_func to CUDA source and a launch description.

    With `with_lines` the result says from which Python lines the source comes; without, the source
    is exactly what TileLang compiles.

    With `cache_dir` the result is kept on disk, keyed by the prim_func's text, the architecture,
    the pass configs and the TileLang version.
    """
    import tilelang
    from tilelang import tvm

    if not isinstance(prim_func, tvm.tirx.PrimFunc):
        raise TypeError(f"expected a TileLang prim_func, got {type(prim_func).__name__}")
    attrs = prim_func.attrs
    own = attrs["tilelang_pass_configs"] if attrs and "tilelang_pass_configs" in attrs else {}
    configs = {**plain_configs(dict(own)), **plain_configs(pass_configs)}
    stored: Path | None = None
    python = lines.python_lines(prim_func) if with_lines else {}
    first = [min(numbers) for numbers in python.values()]
    if cache_dir is not None:
        facts = [
            prim_func.script(show_meta=True),
            arch,
            sorted((k, repr(v)) for k, v in configs.items()),
            str(tilelang.__version__),
            with_lines,
            *_SOURCES,
            # Relative: a kernel that only moved in its file is still the same.
            [[n - f for n in ns] for ns, f in zip(python.values(), first, strict=True)],
        ]
        key = hashlib.sha256(repr(facts).encode()).hexdigest()[:24]
        stored = cache_dir / f"{key}.json"
        known = _read_stored(stored)
        if known is not None:
            return replace(known, python=known.python.shifted(list(python), first))
    result = _lower(prim_func, arch, configs, python, with_lines)
    if stored is not None:
        moved = result.python.shifted([""] * len(first), [-f for f in first])
        text = replace(result, python=moved).to_json()
        cache.write_atomically(stored, cache.sealed(text.encode()))
    return result


def _read_stored(path: Path) -> Lowered | None:
    """A stored lowering; None when there is none, or only a damaged one."""
    content = cache.read_sealed(path)
    return None if content is None else Lowered.from_json(content.decode())


def _lower(
    prim_func: Any,
    arch: str,
    configs: dict[str, Any],
    python_lines: Mapping[str, Sequence[int]],
    with_lines: bool,
) -> Lowered:
    from tilelang import tvm
    from tilelang.engine.lower import lower as tilelang_lower

    try:
        from tilelang.backend.target import determine_target
    except ModuleNotFoundError:  # 0.1.11
        from tilelang.utils.target import determine_target

    target = determine_target({"kind": "cuda", "arch": arch}, return_object=True)
    if with_lines and lines.supported():
        configs = {**configs, lines.DIRECTIVES: True}
    with tvm.transform.PassContext(opt_level=3, config=configs), target:
        artifact = tilelang_lower(prim_func, target=target)
    host = artifact.host_mod
    maps: dict[str, TensorMap] = {}
    aliases: dict[str, str] = {}
    workspaces: dict[str, Param] = {}
    for f in host.functions.values():
        aliases |= _data_pointers(f, prim_func)
        workspaces |= _workspaces(f)
        for var, args in dict((f.attrs or {}).get("tma_descriptor_args", {}) or {}).items():
            made = _tensor_map(list(args))
            maps[str(var.name)] = replace(made, tensor=aliases.get(made.tensor, made.tensor))
    kernels = {}
    for f in artifact.device_mod.functions.values():
        kernel = _kernel(f, maps)
        kernels[kernel.name] = kernel
    launches = [n for f in host.functions.values() for n in _launch_order(f, kernels)]
    source, python = lines.take_out(artifact.kernel_source, python_lines)
    return Lowered(
        name=str((prim_func.attrs or {}).get("global_symbol", "kernel")),
        arch=arch,
        source=source,
        params=tuple(_param(prim_func, p) for p in prim_func.params),
        kernels=tuple(_with_arguments(kernels[n], args, aliases) for n, args in launches),
        maps=maps,
        cooperative="this_grid()" in source,
        workspaces=tuple(workspaces.values()),
        tables=_pointer_tables(prim_func),
        python=python,
        assumptions=tuple(a for f in host.functions.values() for a in _assumptions(f)),
    )


def _data_pointers(host: Any, prim_func: Any) -> dict[str, str]:
    """Names under which the host code keeps the addresses of tensors -> names of the parameters.

    They differ where a tensor is seen under another shape (`T.view`).
    """
    from tilelang import tvm

    tirx = tvm.tirx
    names = {str(p.name): str(b.name) for p, b in prim_func.buffer_map.items()}
    found: dict[str, str] = {}

    def visit(node: Any) -> None:
        value = getattr(node, "value", None)
        if not (hasattr(node, "var") and isinstance(value, tirx.Call)):
            return
        if not str(value.op.name).endswith("tvm_struct_get") or int(value.args[2]) != _DATA_FIELD:
            return
        handle = str(getattr(value.args[0], "name", ""))
        if handle in names:
            found[str(node.var.name)] = names[handle]

    tirx.stmt_functor.post_order_visit(host.body, visit)
    return found


def _workspaces(host: Any) -> dict[str, Param]:
    """Tensors that the host code allocates for its kernels, by name."""
    from tilelang import tvm

    found: dict[str, Param] = {}

    def visit(node: Any) -> None:
        kind = type(node).__name__
        if kind == "AllocBuffer":
            name, dtype, shape = str(node.buffer.data.name), node.buffer.dtype, node.buffer.shape
        elif kind == "Allocate":
            name, dtype, shape = str(node.buffer_var.name), node.dtype, node.extents
        else:
            return
        found[name] = Param(name, str(dtype), tuple(to_python(e) for e in shape))

    tvm.tirx.stmt_functor.post_order_visit(host.body, visit)
    return found


def _assumptions(host: Any) -> list[str]:
    """The conditions of `T.assume`, which the host code checks."""
    from tilelang import tvm

    tirx = tvm.tirx
    found: list[str] = []

    def visit(node: Any) -> None:
        if isinstance(node, tirx.AssertStmt):
            message = "".join(str(part.value) for part in node.message_parts)
            if message.startswith("Assume: "):
                found.append(to_python(node.condition))

    tirx.stmt_functor.post_order_visit(host.body, visit)
    return found


def _pointer_tables(prim_func: Any) -> tuple[str, ...]:
    """Parameters whose elements the kernel uses as addresses (`T.Tensor(shape, T.ptr)`)."""
    from tilelang import tvm

    tirx = tvm.tirx
    found: dict[str, None] = {}

    def visit(node: Any) -> None:
        if (
            isinstance(node, tirx.Call)
            and str(getattr(node.op, "name", "")).endswith("reinterpret")
            and str(node.dtype) == "handle"
            and isinstance(node.args[0], tirx.BufferLoad)
        ):
            found[str(node.args[0].buffer.name)] = None

    tirx.stmt_functor.post_order_visit(prim_func.body, visit)
    return tuple(found)


def _with_arguments(kernel: Kernel, given: Sequence[Any], aliases: Mapping[str, str]) -> Kernel:
    """The kernel with its arguments named as the host code passes them, not as it calls them."""
    args = []
    for (name, kind), value in zip(kernel.args, given, strict=False):
        passed = str(getattr(value, "name", name))
        args.append((aliases.get(passed, passed) if kind == "tensor" else name, kind))
    return replace(kernel, args=tuple(args))


def _launch_order(host: Any, kernels: Mapping[str, Kernel]) -> list[tuple[str, list[Any]]]:
    """The kernels that a host function launches, one after the other, with their arguments.

    Under a host loop or branch the launches depend on values that only the host code computes, so
    running each once would be wrong.
    """
    from tilelang import tvm

    tirx = tvm.tirx

    def launches(node: Any) -> list[tuple[str, list[Any]]]:
        found: list[tuple[str, list[Any]]] = []

        def visit(call: Any) -> None:
            if isinstance(call, tirx.Call) and call.args:
                first = call.args[0]
                if isinstance(first, tirx.StringImm) and str(first.value) in kernels:
                    found.append((str(first.value), list(call.args[1:])))

        tirx.stmt_functor.post_order_visit(node, visit)
        return found

    branches: list[Any] = []  # judged outside the visitor, whose exceptions TVM would replace

    def collect(node: Any) -> None:
        if isinstance(node, (tirx.For, tirx.While, tirx.IfThenElse)):
            branches.append(node)

    tirx.stmt_functor.post_order_visit(host.body, collect)
    for node in branches:
        inside = launches(node)
        if inside:
            where = f"for {node.loop_var.name}" if isinstance(node, tirx.For) else node.condition
            raise EmulationError(
                "kernel launches under host control flow are not supported: "
                f"{', '.join(n for n, _ in inside)} under `{where}`"
            )
    return launches(host.body)


def _param(prim_func: Any, var: Any) -> Param:
    if var not in prim_func.buffer_map:
        return Param(str(var.name), str(var.dtype))
    buffer = prim_func.buffer_map[var]
    return Param(
        name=str(buffer.name),
        dtype=str(buffer.dtype),
        shape=tuple(to_python(e) for e in buffer.shape),
        strides=tuple(to_python(e) for e in buffer.strides) if len(buffer.strides) else None,
    )


def _tensor_map(args: list[Any]) -> TensorMap:
    """Decode ("...create_tiled", desc, type, rank, base, dims, strides, box, steps, 4 options)."""
    what = str(args[0].value)
    rank = int(args[3])
    if what.endswith("im2col"):
        return _im2col_map(args, rank)
    if not what.endswith("tiled"):
        raise EmulationError(
            f"the kernel builds a TMA descriptor with {what}, which the emulator does not know"
        )
    parts = [tuple(to_python(e) for e in args[5 + i * rank : 5 + (i + 1) * rank]) for i in range(4)]
    if any(step != "1" for step in parts[3]):
        raise EmulationError(
            f"the TMA descriptor of {args[4].name} has element strides {parts[3]}, not 1"
        )
    interleave, swizzle, promotion, fill = (int(a) for a in args[5 + 4 * rank :])
    return TensorMap(
        tensor=str(args[4].name),
        kind=int(args[2]),
        dims=parts[0],
        strides=parts[1],
        box=parts[2],
        interleave=interleave,
        swizzle=swizzle,
        fill=fill,
        promotion=promotion,
    )


def _im2col_map(args: list[Any], rank: int) -> TensorMap:
    """Decode (..., base, dims, strides, steps, lower, upper, pixels, channels, 4 options)."""
    rest = [to_python(e) for e in args[5:]]
    dims, strides, steps = (tuple(rest[i * rank : (i + 1) * rank]) for i in range(3))
    corners = [int(e) for e in rest[3 * rank : 5 * rank - 4]]
    pixels, channels, interleave, swizzle, _promotion, fill = rest[5 * rank - 4 :]
    return TensorMap(
        tensor=str(args[4].name),
        kind=int(args[2]),
        dims=dims,
        strides=strides,
        box=(channels, pixels),
        interleave=int(interleave),
        swizzle=int(swizzle),
        fill=int(fill),
        pixels=(tuple(map(int, steps)), tuple(corners[: rank - 2]), tuple(corners[rank - 2 :])),
    )


def _kernel(f: Any, maps: Mapping[str, TensorMap]) -> Kernel:
    extent = f.attrs["thread_extent"]

    def size(axis: str) -> tuple[str, str, str]:
        x, y, z = (to_python(extent.get(f"{axis}.{c}", 1)) for c in "xyz")
        return x, y, z

    args = []
    for p in f.params:
        name, dtype = str(p.name), str(p.dtype)
        args.append((name, ("map" if name in maps else "tensor") if dtype == "handle" else dtype))
    return Kernel(
        name=str(f.attrs["global_symbol"]),
        args=tuple(args),
        grid=size("blockIdx"),
        block=size("threadIdx"),
        dyn_bytes=to_python(f.attrs.get("dyn_shared_memory_buf", 0)),
        shared=_shared_buffers(f),
        cluster=tuple(int(n) for n in f.attrs.get("cluster_dims", None) or (1, 1, 1)),
        overlaps="has_cuda_pdl_sync" in f.attrs
        or _OVERLAP_TAG in map(str, f.attrs.get("tirx.kernel_launch_params", None) or ()),
    )


def _shared_buffers(f: Any) -> dict[str, SharedBuffer]:
    """Sizes of the shared buffers of a device function, where the lowered code states them."""
    from tilelang import tvm

    tirx = tvm.tirx
    found: dict[str, SharedBuffer] = {}

    def note(var: Any, extents: Sequence[Any], dtype: Any) -> None:
        count = 1
        for e in extents:
            if not isinstance(e, (int, tirx.IntImm)):
                return
            count *= int(e)
        bits = tvm.DataType(str(dtype)).bits
        size = (count * bits + 7) // 8
        before = found.get(str(var.name), SharedBuffer(0, bits))
        found[str(var.name)] = SharedBuffer(max(size, before.size), min(bits, before.elem_bits))

    def visit(node: Any) -> None:
        buffer = getattr(node, "buffer", None)
        if buffer is not None and str(buffer.scope()).startswith("shared"):
            note(buffer.data, buffer.shape, buffer.dtype)
        elif (
            isinstance(node, tirx.Call)
            and str(node.op.name).endswith("tvm_access_ptr")
            and isinstance(node.args[1], tirx.Var)
            and all(isinstance(a, tirx.IntImm) for a in node.args[2:4])
        ):
            reach = int(node.args[2]) + int(node.args[3])
            note(node.args[1], [reach], node.args[0].dtype)

    tirx.stmt_functor.post_order_visit(f.body, visit)
    return found
