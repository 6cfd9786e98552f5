"""Bind tensors to an emulated kernel, run it, and turn a failure into an exception."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import linecache
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch

from . import build as _build
from . import cache, pointers
from . import debug as _debug
from . import page as _page
from . import places as _places
from .arguments import TensorSlot, check_scalar
from .errors import BarrierEvent, EmulationError, SharedPart
from .lowering import DEFAULT_ARCH, Kernel, Lowered, Param, compile_expressions, lower
from .report import KernelRun, Report, Traffic
from .rewrite import rewrite
from .staging import staged
from .undefined import UNDEFINED
from .undefined import Rerun as _Rerun

FIRST_MBARRIER, GRID_BARRIER = 100, 16  # numbers of barriers in emu::Event
ORDERS = {"forward": 0, "reverse": 1, "random": 2}
# Shared memory a block may use, by architecture, as the launch would enforce it.
SHARED_LIMIT = {
    "sm_80": 163 << 10, "sm_86": 99 << 10, "sm_89": 99 << 10, "sm_90": 227 << 10,
    "sm_100": 227 << 10, "sm_120": 99 << 10,
}  # fmt: skip


# ---- the C side's structures (include/core.h) --------------------------------------------------


_TRAFFIC = ("read", "written", "atomic", "distinct_read", "distinct_written")


def _fields(ctype: Any, names: str) -> list[tuple[str, Any]]:
    """Fields of one type, in their order."""
    return [(name, ctype) for name in names.split()]


class CTraffic(ctypes.Structure):
    """emu::Traffic."""

    _fields_ = [(n, ctypes.c_uint64) for n in _TRAFFIC]


class CRange(ctypes.Structure):
    """emu::Range."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("size", ctypes.c_uint64),
        *_fields(ctypes.c_uint32, "elem_bits fresh"),
        ("traffic", CTraffic),
    ]


class CEvent(ctypes.Structure):
    """emu::Event."""

    _fields_ = [
        ("serial", ctypes.c_uint32),
        *_fields(ctypes.c_int32, "what warp barrier line"),
    ]


class CSharedMap(ctypes.Structure):
    """emu::SharedMap."""

    _fields_ = [
        ("name", ctypes.c_char * 48),
        *_fields(ctypes.c_uint32, "offset size elem_bits planned"),
    ]


class CFailure(ctypes.Structure):
    """emu::Failure."""

    _fields_ = [
        ("kind", ctypes.c_char * 24),
        ("text", ctypes.c_char * 1000),
        ("buffer", ctypes.c_char * 80),
        *_fields(ctypes.c_int64, "offset element"),
        *_fields(ctypes.c_uint32 * 3, "block thread"),
        ("pcs", ctypes.c_void_p * 24),
        ("other_pc", ctypes.c_void_p),
        *_fields(ctypes.c_int32, "num_pcs has_thread num_events num_maps"),
        ("events", CEvent * 256),
        ("maps", CSharedMap * 64),
    ]


class CLaunch(ctypes.Structure):
    """emu::Launch."""

    _fields_ = [
        *_fields(ctypes.c_uint32 * 3, "grid block"),
        ("dyn_bytes", ctypes.c_uint64),
        ("order", ctypes.c_int32),
        ("seed", ctypes.c_uint32),
        *_fields(ctypes.c_int32, "cooperative check async_late num_ranges"),
        ("ranges", ctypes.POINTER(CRange)),
        ("failure", ctypes.POINTER(CFailure)),
        *_fields(ctypes.c_uint64, "blocks threads barriers warp_ops async_ops"),
        *_fields(ctypes.c_uint32, "blamed strict num_sites"),
        ("sites", ctypes.c_uint32 * 16),
        ("cluster", ctypes.c_uint32 * 3),
    ]


class CTensorMap(ctypes.Structure):
    """emu::TensorMap."""

    _fields_ = [
        ("base", ctypes.c_void_p),
        *_fields(ctypes.c_int32, "elem_bytes rank swizzle kind"),
        *_fields(ctypes.c_int64 * 5, "dims strides"),
        *_fields(ctypes.c_int32 * 5, "box steps"),
        *_fields(ctypes.c_int32 * 3, "lower upper offset"),
        ("im2col", ctypes.c_int32),
    ]


_SCALARS: dict[str, Any] = {
    "int8": ctypes.c_int8,
    "int16": ctypes.c_int16,
    "int32": ctypes.c_int32,
    "int64": ctypes.c_int64,
    "uint8": ctypes.c_uint8,
    "uint16": ctypes.c_uint16,
    "uint32": ctypes.c_uint32,
    "uint64": ctypes.c_uint64,
    "float32": ctypes.c_float,
    "float64": ctypes.c_double,
    "bool": ctypes.c_bool,
}

_lock = threading.RLock()  # the runtime keeps its state in globals


def _span(t: torch.Tensor) -> int:
    """Bytes from the first to the last addressed element."""
    if t.numel() == 0:
        return 0
    return (
        sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) + 1
    ) * t.element_size()


@contextlib.contextmanager
def _addresses(
    spans: Mapping[str, tuple[int, int]],
    totals: Mapping[str, list[int]],
    checked: bool,
    fixed: Set[str],
) -> Iterator[dict[str, int]]:
    """Addresses for the kernels: of far apart copies, or in fast mode of the tensors themselves.

    `fixed` tensors stay where they are, because the kernel knows their addresses.
    """
    here = {n: address for n, (address, _) in spans.items()}
    if not checked:
        yield here
        return
    written, atomic = _TRAFFIC.index("written"), _TRAFFIC.index("atomic")
    movable = {n: s for n, s in spans.items() if n not in fixed}
    with staged(movable, lambda n: bool(totals[n][written] or totals[n][atomic])) as copies:
        yield here | copies


class _Launcher:
    """One device function with its library symbol and compiled launch sizes."""

    def __init__(self, kernel: Kernel, function: Any) -> None:
        self.kernel = kernel
        self.function = function
        self.sizes = compile_expressions([*kernel.grid, *kernel.block, kernel.dyn_bytes])


class Options(TypedDict, total=False):
    """How a kernel is built.

    | key | meaning |
    |---|---|
    | `mode` | `"check"`: every access is checked; `"fast"`: only results, deadlock, asserts |
    | `split_shared` | each shared buffer in its own memory (overruns show), or TileLang's placement (hazards of reuse show) |
    | `contract` | let the compiler fuse multiply-adds, as nvcc does by default |
    | `name` | name in reports, default the prim_func's |
    | `cooperative` | keep all blocks resident; default: when the source has a grid barrier |
    | `keep` | folder that receives the C++ file, the inputs of the last call and `debug.sh` |
    | `report` | file that receives an HTML page about a failure; `"html"`: one named after the kernel |
    | `transform` | edits the generated source before compilation, for mutation tests |
    """  # noqa: E501

    mode: str
    split_shared: bool
    contract: bool
    name: str | None
    cooperative: bool | None
    keep: str | Path | None
    report: str | Path | None
    transform: Callable[[str], str] | None


class Emulated:
    """A kernel that is ready to run on CPU tensors.

    Call it with tensors and scalars in the order of the prim_func's parameters, as the compiled
    kernel is called. Outputs are written in place. `None` stands for an optional tensor that the
    kernel does not use. `Emulated.build` creates one.

    Args:
        lowered: The lowered kernel.
        library: The compiled library.
        name: The name in reports.
        mode: `"check"` or `"fast"`.
        keep: The folder that receives sources and inputs, or None.
        cooperative: Whether all blocks are resident.
        report: The file that receives an HTML page about a failure, or None.
    """

    def __init__(
        self,
        lowered: Lowered,
        library: Path,
        *,
        name: str,
        mode: str,
        keep: Path | None,
        cooperative: bool,
        report: Path | None = None,
    ) -> None:
        self.lowered, self.library = lowered, library
        self.name, self.mode = name, mode
        self.cooperative, self.keep, self.report = cooperative, keep, report
        self._places: dict[int, _places.Place | None] = {}
        handle = ctypes.CDLL(str(library))
        self._launchers = [_Launcher(k, handle[f"emu_launch_{k.name}"]) for k in lowered.kernels]
        used = {n for k in lowered.kernels for n, kind in k.args if kind == "tensor"}
        used |= {
            lowered.maps[n].tensor for k in lowered.kernels for n, _ in k.args if n in lowered.maps
        }
        self._slots: list[TensorSlot | Param] = [
            p if p.shape is None else TensorSlot(p, p.name in used) for p in lowered.params
        ]
        self._workspaces = [TensorSlot(p, True) for p in lowered.workspaces]
        self._maps = {
            name: (m, compile_expressions([*m.dims, *m.strides, *m.box]))
            for name, m in lowered.maps.items()
        }
        for descriptor, m in lowered.maps.items():
            if m.interleave or m.fill:
                raise EmulationError(
                    f"the tensor map {descriptor} uses interleaving or NaN fill, which the emulator"
                    " does not provide"
                )

    @classmethod
    def build(
        cls,
        prim_func: Any,
        *,
        arch: str = DEFAULT_ARCH,
        pass_configs: Mapping[Any, Any] | None = None,
        **options: Unpack[Options],
    ) -> Emulated:
        """Lowers and compiles a prim_func for the CPU; both results are cached on disk.

        Args:
            prim_func: The kernel.
            arch: The architecture for which source is generated, such as `"sm_80"` for mma.sync.
            pass_configs: As given to `tilelang.jit`; must equal those with which the kernel is
                used.
            options: The fields of `Options`.
        """
        lowered = lower(
            prim_func, arch=arch, pass_configs=pass_configs, cache_dir=cache.open_cache()
        )
        return cls.from_lowered(lowered, **options)

    @classmethod
    def from_lowered(
        cls,
        lowered: Lowered,
        *,
        mode: str = "check",
        split_shared: bool = True,
        contract: bool = False,
        name: str | None = None,
        cooperative: bool | None = None,
        keep: str | Path | None = None,
        report: str | Path | None = None,
        transform: Callable[[str], str] | None = None,
    ) -> Emulated:
        """Compiles a kernel that is already lowered.

        Args:
            lowered: The lowered kernel.
            mode: As in `Options`.
            split_shared: As in `Options`.
            contract: As in `Options`.
            name: As in `Options`.
            cooperative: As in `Options`.
            keep: As in `Options`.
            report: As in `Options`.
            transform: As in `Options`.
        """
        flags = _build.flags(mode, contract=contract)
        source = lowered.source if transform is None else transform(lowered.source)
        kernels = [k.name for k in lowered.kernels]
        shared = {k.name: k.shared for k in lowered.kernels}
        try:
            text = rewrite(
                source,
                shared,
                kernels,
                split_shared=split_shared,
                follow_locals=mode == "check",
            )
            library = _build.compile_kernel(text, flags)
        except EmulationError as e:
            raise EmulationError(f"{lowered.name}: {e}", kind=e.kind) from None
        folder = None if keep is None else Path(keep)
        if folder is not None:
            _debug.write_sources(folder, text, source, flags, kernels)
        return cls(
            lowered,
            library,
            name=name or lowered.name,
            mode=mode,
            keep=folder,
            report=None if report is None else Path(report),
            cooperative=lowered.cooperative if cooperative is None else cooperative,
        )

    @property
    def source(self) -> str:
        """The CUDA source TileLang generated."""
        return self.lowered.source

    def __call__(
        self,
        *args: Any,
        order: str = "forward",
        seed: int = 0,
        async_late: bool = True,
        fresh: Sequence[str] = (),
    ) -> Report:
        """Run every kernel of the prim_func.

        | argument | meaning |
        |---|---|
        | `args` | tensors and scalars in the prim_func's parameter order |
        | `order` | order in which threads and blocks run: `"forward"`, `"reverse"`, `"random"` |
        | `seed` | of the random order |
        | `async_late` | True: asynchronous copies land as late as allowed; False: at once |
        | `fresh` | names of tensors whose content is undefined, as of `torch.empty`: results may not depend on it |
        """  # noqa: E501
        __tracebackhide__ = True  # pytest shows the caller of the kernel
        if order not in ORDERS:
            raise ValueError(f"order must be one of {', '.join(ORDERS)}; got {order!r}")
        with torch._C.DisableTorchFunction():  # modes may tell stories about tensors (cuda_api.py)
            return self._run(args, order, seed, async_late, fresh)

    def _run(
        self,
        args: tuple[Any, ...],
        order: str,
        seed: int,
        async_late: bool,
        fresh: Sequence[str],
    ) -> Report:
        __tracebackhide__ = True
        started = time.perf_counter()
        tensors, symbols = self._bind(args)
        tensors |= self._allocate_workspaces(symbols)
        fresh = [*fresh, *(w.name for w in self.lowered.workspaces if w.name in tensors)]
        targets = pointers.targets({n: tensors[n][1] for n in self.lowered.tables if n in tensors})
        fixed = pointers.overlapping({n: t for n, (_, t) in tensors.items()}, targets)
        tensors |= {n: (TensorSlot.of_bytes(n), t) for n, t in targets.items()}
        checked = self.mode == "check"
        spans = {n: (t.data_ptr(), _span(t)) for n, (_, t) in tensors.items()}
        unknown = [n for n in fresh if n not in tensors]
        if unknown:
            raise ValueError(f"fresh: {self.name} has no tensor {', '.join(unknown)}")
        totals = {n: [0] * 5 for n in tensors}
        runs = []
        with _lock, _addresses(spans, totals, checked, fixed) as addresses:
            ranges = (CRange * max(1, len(tensors)))()
            for r, (slot, _) in zip(ranges, tensors.values(), strict=False):
                r.name, r.base = slot.name.encode(), addresses[slot.name]
                r.size, r.elem_bits = spans[slot.name][1], slot.elem_bits
            failure = CFailure()
            launch = CLaunch(
                order=ORDERS[order],
                seed=seed & 0xFFFFFFFF,
                cooperative=self.cooperative,
                check=checked,
                async_late=async_late,
                num_ranges=len(tensors),
                ranges=ranges,
                failure=ctypes.pointer(failure),
            )
            rerun = _Rerun(spans, addresses, fresh) if checked and not fixed else None
            for name in fresh if rerun is not None else ():
                ctypes.memset(addresses[name], UNDEFINED, spans[name][1])
            for done, launcher in enumerate(self._launchers):
                for r, name in zip(ranges, tensors, strict=False):  # undefined until first written
                    r.fresh = rerun is not None and name in fresh and not any(totals[name][1:3])
                try:
                    runs.append(self._launch(launcher, launch, tensors, addresses, symbols))
                    error = None
                except EmulationError as e:
                    error = e
                for r, name in zip(ranges, tensors, strict=False):
                    for i, field in enumerate(_TRAFFIC):
                        totals[name][i] += getattr(r.traffic, field)
                if rerun is not None and launch.num_sites:
                    again = functools.partial(
                        self._repeat, done + 1, launch, tensors, addresses, symbols, True
                    )
                    error = rerun.blame(launch, again, error)
                if error is not None:
                    if self.report is not None:
                        error.message += f"\n  report: {_page.write(error, self.report)}"
                    raise error
        buffers = {n: Traffic(*t) for n, t in totals.items()} if checked else None
        seconds = time.perf_counter() - started
        return Report(self.name, self.mode, tuple(runs), buffers, seconds)

    def symbols(self, values: Sequence[Any]) -> dict[str, Any]:
        """Returns the values of the scalars and of the symbols in shapes.

        Args:
            values: The arguments of a call; `None` stands for unknown tensors.
        """
        found: dict[str, Any] = {}
        with torch._C.DisableTorchFunction():
            for slot, value in zip(self._slots, values, strict=True):
                if value is None:
                    continue
                if isinstance(slot, Param):
                    found[slot.name] = value
                else:
                    slot.bind(value, found)
        return found

    def empty(self, index: int, sizes: Sequence[int]) -> torch.Tensor:
        """Returns a new tensor for a parameter, filled with 0xFF bytes.

        Args:
            index: The index of the parameter.
            sizes: The shape.
        """
        slot = self._slots[index]
        if isinstance(slot, Param):
            raise TypeError(f"{slot.name} is a scalar, which a kernel cannot return")
        with torch._C.DisableTorchFunction():
            return slot.empty(sizes)

    def _allocate_workspaces(
        self, symbols: dict[str, Any]
    ) -> dict[str, tuple[TensorSlot, torch.Tensor]]:
        return {
            s.name: (s, s.empty(compile_expressions(s.shape)(symbols))) for s in self._workspaces
        }

    def _bind(
        self, args: tuple[Any, ...]
    ) -> tuple[dict[str, tuple[TensorSlot, torch.Tensor]], dict[str, Any]]:
        if len(args) != len(self._slots):
            names = ", ".join(s.name for s in self._slots)
            raise TypeError(
                f"{self.name}: expected {len(self._slots)} arguments ({names}), got {len(args)}"
            )
        tensors: dict[str, tuple[TensorSlot, torch.Tensor]] = {}
        symbols: dict[str, Any] = {}
        for slot, value in zip(self._slots, args, strict=True):
            if isinstance(slot, Param):
                check_scalar(slot, value)
                symbols[slot.name] = value
            elif value is None and not slot.used:
                continue
            else:
                slot.bind(value, symbols)
                tensors[slot.name] = (slot, value)
        for slot, t in tensors.values():
            slot.check_derived(t, symbols)
        return tensors, symbols

    def _repeat(self, count: int, *how: Any) -> None:
        """The first `count` kernels once more; `how` are the other arguments of `_launch`."""
        for launcher in self._launchers[:count]:
            self._launch(launcher, *how)

    def _launch(
        self,
        launcher: _Launcher,
        launch: CLaunch,
        tensors: Mapping[str, tuple[TensorSlot, torch.Tensor]],
        addresses: Mapping[str, int],
        symbols: dict[str, Any],
        again: bool = False,
    ) -> KernelRun:
        __tracebackhide__ = True
        kernel = launcher.kernel
        try:
            *size, dyn = launcher.sizes(symbols)
        except NameError as e:
            raise EmulationError(
                f"{kernel.name}: the launch size needs {e.name}, which no argument determines",
                kind="launch",
                kernel=kernel.name,
            ) from None
        grid, block = tuple(size[:3]), tuple(size[3:])
        self._check_limits(kernel, grid, block, dyn)
        launch.grid[:], launch.block[:], launch.dyn_bytes = grid, block, dyn
        launch.cluster[:] = kernel.cluster
        values = [self._argument(n, kind, addresses, symbols) for n, kind in kernel.args]
        pointers = (ctypes.c_void_p * max(1, len(values)))(*map(ctypes.addressof, values))
        if self.keep is not None and not again:
            _debug.write_launch(self.keep, kernel.name, launch, values, tensors)
        t0 = time.perf_counter()
        if launcher.function(ctypes.byref(launch), pointers):
            error = self._error(kernel, launch, tensors)
            raise KeyboardInterrupt(str(error)) if error.kind == "interrupted" else error
        seconds = time.perf_counter() - t0
        return KernelRun(
            name=kernel.name,
            grid=grid,
            block=block,
            blocks=launch.blocks,
            threads=launch.threads,
            barriers=launch.barriers,
            warp_ops=launch.warp_ops,
            async_ops=launch.async_ops,
            seconds=seconds,
        )

    def check_static_limits(self) -> None:
        """Refuse launches that a GPU would refuse, where their size depends on no argument."""
        for launcher in self._launchers:
            with contextlib.suppress(NameError):
                *size, dyn = launcher.sizes({})
                self._check_limits(launcher.kernel, tuple(size[:3]), tuple(size[3:]), dyn)

    def _check_limits(
        self, kernel: Kernel, grid: tuple[int, ...], block: tuple[int, ...], dyn: int
    ) -> None:
        arch = self.lowered.arch.rstrip("abcdef")
        limit = SHARED_LIMIT.get(arch, max(SHARED_LIMIT.values()))
        threads = block[0] * block[1] * block[2]
        problem = None
        if dyn > limit:
            problem = f"{dyn} bytes of shared memory, {self.lowered.arch} has {limit}"
        elif not 1 <= threads <= 1024:
            problem = f"{threads} threads per block, the limit is 1024"
        elif grid[0] >= 2**31 or max(grid[1:]) > 65535:
            problem = f"a grid of {grid}, the limits are (2147483647, 65535, 65535)"
        if problem:
            raise EmulationError(
                f"{kernel.name}: needs {problem}; the launch would fail on a GPU",
                kind="launch",
                kernel=kernel.name,
            )

    def _argument(
        self,
        name: str,
        kind: str,
        addresses: Mapping[str, int],
        symbols: dict[str, Any],
    ) -> Any:
        if kind == "tensor":
            return ctypes.c_void_p(addresses[name])
        if kind == "map":
            spec, evaluate = self._maps[name]
            values, rank = evaluate(symbols), len(spec.dims)
            dims, strides, box = values[:rank], values[rank : 2 * rank], values[2 * rank :]
            base = addresses[spec.tensor]
            _check_map(spec.tensor, base, strides[1:])
            m = CTensorMap(
                base=base,
                elem_bytes=strides[0],
                rank=rank,
                swizzle=spec.swizzle,
                kind=spec.kind,
            )
            m.dims[:rank], m.strides[:rank], m.box[: len(box)] = dims, strides, box
            if spec.pixels is not None:
                m.im2col = 1
                m.steps[:rank], m.lower[: rank - 2], m.upper[: rank - 2] = spec.pixels
            return m
        if name not in symbols:
            raise EmulationError(f"the kernel needs {name}, which no argument determines")
        if kind in {"float16", "bfloat16"}:
            half = torch.tensor(symbols[name], dtype=getattr(torch, kind))
            return ctypes.c_int16(int(half.view(torch.int16)))
        if kind not in _SCALARS:
            raise EmulationError(f"the emulator cannot pass the {kind} scalar {name}")
        return _SCALARS[kind](symbols[name])

    # ---- failures ----------------------------------------------------------------------------

    def _error(
        self,
        kernel: Kernel,
        launch: CLaunch,
        tensors: Mapping[str, tuple[TensorSlot, torch.Tensor]],
    ) -> EmulationError:
        f: CFailure = launch.failure.contents
        buffer: str | None = f.buffer.decode() or None
        text, asserted = _asserted(f.text.decode(errors="replace"))
        message = f"{kernel.name}: {text}"
        if buffer is not None and buffer in tensors:
            index = _unravel(f.element, tensors[buffer][1], tensors[buffer][0].packed)
            message += f", {buffer}{list(index)}" if index else ""
        block, thread = tuple(f.block), tuple(f.thread)
        if f.has_thread:
            message += f" [block {block} thread {thread}]"
        where = _source_line(self.library, [f.pcs[i] for i in range(f.num_pcs)])
        other = _source_line(self.library, [f.other_pc]) if f.other_pc else None
        python, other_python = asserted or self._python_line(where), self._python_line(other)
        if python:
            message += f"\n  {python}"
        if other_python:
            message += f"\n  conflicts with {other_python}"
        if where:
            message += f"\n  {'generated: ' if python else ''}{where[0]}:{where[1]}: {where[2]}"
        if other:
            message += f"\n  conflicts with line {other[1]}: {other[2]}"
        return EmulationError(
            message,
            kind=f.kind.decode(),
            kernel=kernel.name,
            buffer=buffer,
            byte_offset=f.offset if buffer else None,
            element=f.element if buffer else None,
            block=block if f.has_thread else None,
            thread=thread if f.has_thread else None,
            python_file=python.file if python else None,
            python_line=python.line if python else None,
            python_text=python.text if python else None,
            other_python_file=other_python.file if other_python else None,
            other_python_line=other_python.line if other_python else None,
            other_python_text=other_python.text if other_python else None,
            source_file=where[0] if where else None,
            source_line=where[1] if where else None,
            source_text=where[2] if where else None,
            other_line=other[1] if other else None,
            other_text=other[2] if other else None,
            warp=_warp(launch) if f.has_thread else None,
            barriers=tuple(self._event(f.events[i]) for i in range(f.num_events)),
            shared=tuple(_shared_parts(f)),
        )

    def _event(self, event: CEvent) -> BarrierEvent:
        mbarrier = event.barrier >= FIRST_MBARRIER
        number = event.barrier - FIRST_MBARRIER if mbarrier else event.barrier
        name = f"m{number}" if mbarrier else "grid" if number == GRID_BARRIER else str(number)
        place = self._python_line(self._barrier_line(event.line))
        return BarrierEvent(
            what=("arrives", "completes", "waits")[event.what],
            warp=event.warp,
            barrier=name,
            python_file=place.file if place else None,
            python_line=place.line if place else None,
        )

    def _barrier_line(self, number: int) -> tuple[str, int, str] | None:
        """A line with a barrier; a barrier inside the headers counts their lines instead."""
        cpp = self.library.with_suffix(".cpp")
        text = cpp.read_text().splitlines() if cpp.exists() else []
        found = 0 < number <= len(text) and "sync" in text[number - 1]
        return (str(cpp), number, text[number - 1]) if found else None

    def _python_line(self, where: tuple[str, int, str] | None) -> _places.Place | None:
        if where is None or not Path(where[0]).exists():
            return None
        number = where[1]
        if number not in self._places:
            edited = Path(where[0]).read_text()
            place = _places.find(self.lowered.python, self.lowered.source, edited, number)
            self._places[number] = place
        return self._places[number]


def _unravel(element: int, t: torch.Tensor, packed: bool) -> tuple[int, ...] | None:
    """Index of a flat element in a contiguous tensor; None when it lies outside."""
    sizes = list(t.shape)
    if packed and sizes:
        sizes[-1] *= 2
    total = 1
    for n in sizes:
        total *= n
    if not t.is_contiguous() or not 0 <= element < total or len(sizes) < 2:
        return None
    index = []
    for n in reversed(sizes):
        element, i = divmod(element, n)
        index.append(i)
    return tuple(reversed(index))


def _asserted(text: str) -> tuple[str, _places.Place | None]:
    """The message of a failure, and the line of `T.device_assert`, which TileLang appends to it."""
    m = re.fullmatch(r"(.*?)\n?\n  at (.+?):(\d+) in .*", text, re.DOTALL)
    if m is None:
        return text, None
    return m[1], _places.Place(m[2], int(m[3]), linecache.getline(m[2], int(m[3])).strip(), True)


def _warp(launch: CLaunch) -> int:
    """Which warp of the block the failing thread is in."""
    f, size = launch.failure.contents, launch.block
    x, y, z = f.thread
    return int((x + size[0] * (y + size[1] * z)) // 32)


def _shared_parts(f: CFailure) -> Iterator[SharedPart]:
    """Shared buffers at their planned places; those without one after each other."""
    end = 0
    for i in range(f.num_maps):
        m = f.maps[i]
        offset = m.planned - 1 if m.planned else end
        yield SharedPart(m.name.decode(errors="replace"), offset, m.size)
        end = max(end, offset + m.size)


def _check_map(tensor: str, base: int, strides: Sequence[int]) -> None:
    """A copy by tensor map wants its tensor, and the rows of it, on multiples of 16 bytes."""
    found = [f"starts at {base:#x}"] if base % 16 else []
    found += [f"has a stride of {stride} bytes" for stride in strides if stride % 16]
    if found:
        raise EmulationError(
            f"a tensor map needs multiples of 16 bytes, but {tensor} {found[0]}; the launch would "
            "fail on a GPU",
            kind="misaligned",
            buffer=tensor,
        )


def _source_line(library: Path, addresses: list[int]) -> tuple[str, int, str] | None:
    """File, line and text of the innermost generated line among return addresses."""
    name = str(library.resolve())  # as the loader reports it
    spans = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5] == name:
            spans.append(tuple(int(x, 16) for x in fields[0].split("-")))
    if not spans:
        return None
    base, end = min(s[0] for s in spans), max(s[1] for s in spans)
    offsets = [hex(a - 1 - base) for a in addresses if a and base <= a < end]
    if not offsets:
        return None
    try:
        command = ["addr2line", "-i", "-e", name, *offsets]
        answer = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    except OSError:
        return None  # no binutils: the message stays without its line
    cpp = library.with_suffix(".cpp")
    for line in answer.splitlines():
        m = re.match(r"(.*):(\d+)", line)
        if m and Path(m[1]).name == cpp.name and cpp.exists():  # the cache may have moved
            number = int(m[2])
            lines = cpp.read_text().splitlines()
            if 0 < number <= len(lines):
                return str(cpp), number, lines[number - 1].strip()
    return None
