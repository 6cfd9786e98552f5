"""Another package with our import name, DeepSeek's TileKernels, in a separate process.

A child process imports the package from its folder, and what it needs of ours under other names:
the emulator, or what measures device time. Arguments and results travel as files. Whatever else the
folder holds comes before what is installed, such as the older TileLang that TileKernels 1.0 needs:

    pip install --target build/tilekernels/2.1.0 --no-deps tile-kernels==2.1.0
    pip install --target build/tilekernels/1.0.0 --no-deps tile-kernels==1.0.0 \
        tilelang==0.1.11 apache-tvm-ffi==0.1.11 z3-solver==4.15.4.0

TileKernels 1.0.0 imports a module that TileLang has up to 0.1.11. TileKernels 2.1.0 asks for Python
3.12 and runs with 3.11 too (`--ignore-requires-python`). For a machine without a network, fetch the
wheels elsewhere (`pip download --no-deps`), and add `--no-index --find-links` to these commands.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import select
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

ROOT = Path(__file__).parents[1]
INSTALLED = ROOT / "build" / "tilekernels"
EMULATOR, TIMING = "emulator_under_test", "timing_alone"  # names of our modules in the child
CASE_SECONDS = 300  # for the call of a case, compilation included

Arguments = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One call: a function of both packages and its arguments by name."""

    function: str  # its path below the package
    label: str
    arguments: Any  # by name; None only asks for the parameters of the function
    gradients: bool = False  # of all floating-point arguments


class Answer(NamedTuple):
    """How a call ended.

    `outcome` is `"ran"`, `"not accepted"`, `"refused"`, `"reported"` or `"other error"`; `value`
    has the tensors of the results or the reason; `us` is the device time where it was measured.
    """

    outcome: str
    value: Any
    launches: int = 0
    us: float | None = None


# ---- calls --------------------------------------------------------------------------------------


def leaves(value: Any) -> list[torch.Tensor]:
    """The tensors of arguments or results, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value
    return (
        [t for i in items for t in leaves(i)]
        if isinstance(items, (tuple, list)) or isinstance(value, dict)
        else []
    )


def on(value: Any, device: str) -> Any:
    """Arguments with every tensor copied to `device`, strides kept."""
    if isinstance(value, torch.Tensor):
        size, stride = value.size(), value.stride()
        span = 1 + sum((n - 1) * s for n, s in zip(size, stride)) if value.numel() else 0
        if 0 in stride:  # of an expanded tensor
            return value.contiguous().to(device)
        storage = torch.empty(span, dtype=value.dtype, device=device)
        storage.view(torch.uint8).zero_()
        return storage.as_strided(size, stride).copy_(value)
    if isinstance(value, dict):
        return {name: on(item, device) for name, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(on(item, device) for item in value)
    return value


def prepared(package: str, case: Case, device: str) -> tuple[Callable[[], Any], list[torch.Tensor]]:
    """A call that can be repeated, and the tensors of its arguments.

    With gradients it is the backward pass alone, and the tensors are the results of the forward.
    """
    module, _, name = f"{package}.{case.function}".rpartition(".")
    function = getattr(importlib.import_module(module), name)
    arguments = on(case.arguments, device)
    if not case.gradients:
        return lambda: function(**arguments), leaves(arguments)
    inputs = [t.requires_grad_() for t in leaves(arguments) if t.is_floating_point()]
    outputs = leaves(function(**arguments))
    generator = torch.Generator().manual_seed(1)
    seeds = [on(torch.randn(o.shape, generator=generator).to(o.dtype), device) for o in outputs]
    return lambda: torch.autograd.grad(outputs, inputs, seeds, retain_graph=True), outputs


def call(package: str, case: Case, device: str) -> list[torch.Tensor]:
    """The tensors of the results of one call, then those of `prepared`."""
    run, others = prepared(package, case, device)
    return [t.detach() for t in [*leaves(run()), *others]]


def difference(theirs: list[torch.Tensor], ours: list[torch.Tensor], float32: float = 1e-4) -> str:
    """`"exact"`, `"close"`, or what differs.

    Close are float32 values to 1e-4, or what is given, and bfloat16 values to 8e-3, each of the
    value and of the tensor's root mean square; all others must be equal.
    """
    if len(theirs) != len(ours):
        return f"{len(theirs)} tensors, expected {len(ours)}"
    worst = "exact"
    for number, (a, b) in enumerate(zip(theirs, ours)):
        if a.dtype != b.dtype or a.shape != b.shape:
            return f"tensor {number}: {a.dtype} {list(a.shape)}, expected {b.dtype} {list(b.shape)}"
        if torch.equal(_bytes(a), _bytes(b)):
            continue
        if not a.is_floating_point():
            count = int((a != b).sum())
            return f"tensor {number}: {count} of {a.numel()} differ"
        x, y = a.double(), b.double()
        rtol = {torch.float32: float32, torch.bfloat16: 8e-3}.get(a.dtype, 0.0)
        atol = rtol * y.nan_to_num(0, 0, 0).square().mean().sqrt().clamp_min(1e-6).item()
        far = ~torch.isclose(x, y, rtol, atol, equal_nan=True)
        if far.any():
            at = int(far.view(-1).nonzero()[0])
            return (f"tensor {number}: {int(far.sum())} of {far.numel()} differ, first at {at}: "
                    f"{x.reshape(-1)[at]:g}, expected {y.reshape(-1)[at]:g}")  # fmt: skip
        worst = "close"
    return worst


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


# ---- the child ----------------------------------------------------------------------------------


def alone(name: str, path: Path) -> ModuleType:
    """A module or package of ours under another name, without the package around it."""
    folder = [str(path.parent)] if path.name == "__init__.py" else None
    spec = importlib.util.spec_from_file_location(name, path, submodule_search_locations=folder)
    if spec is None or spec.loader is None:
        raise ImportError(f"there is no {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def child(folder: Path, scratch: Path, emulated: bool) -> None:
    """Answer the cases that the parent writes to `scratch`, one for each line of the input."""
    said = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what packages print
    sys.path[0] = str(folder)  # instead of the folder of this script
    # Hooks of editable installations find our package where the folder has no module.
    sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in str(f).lower()]
    session: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if emulated:
        alone(EMULATOR, ROOT / "tile_kernels" / "emulator" / "__init__.py")
        jit = importlib.import_module(f"{EMULATOR}.jit")
        session = jit.emulated_tilelang(jit.Settings())
    with session as found:
        try:
            importlib.import_module("tile_kernels")
        except Exception as error:
            said.write(f"{type(error).__name__}: {error}".partition("\n")[0] + "\n")
            return
        said.write("ready\n")
        for _ in sys.stdin:
            before = found.launches if emulated else 0
            function, arguments, gradients, measure = torch.load(
                scratch / "case.pt", weights_only=False
            )
            answer = answered(folder, Case(function, "", arguments, gradients), measure)
            launches = found.launches - before if emulated else 0
            torch.save(tuple(answer._replace(launches=launches)), scratch / "answer.pt")
            said.write("done\n")
            torch.cuda.empty_cache()


def answered(folder: Path, case: Case, measure: bool) -> Answer:
    """How a call ended, and its results or the message."""
    module, _, name = f"tile_kernels.{case.function}".rpartition(".")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        return Answer("not accepted", f"absent: {error}")
    parameters = inspect.signature(function).parameters
    if case.arguments is None:
        return Answer("ran", list(parameters))
    starred = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    unknown = [key for key in case.arguments if key not in parameters]
    if unknown and not starred:
        return Answer("not accepted", f"has no argument {unknown[0]}")
    emulator = sys.modules.get(EMULATOR)
    reports: Any = emulator.EmulationError if emulator else ()
    try:
        value = on(call("tile_kernels", case, "cuda"), "cpu")
        us = None
        if measure:
            path = ROOT / "tile_kernels" / "testing" / "timing.py"
            timing = sys.modules.get(TIMING) or alone(TIMING, path)
            us = timing.time_device(prepared("tile_kernels", case, "cuda")[0]).us
    except reports as error:
        if error.kind == "assert":  # the kernel's own, on values of its arguments
            return Answer("not accepted", str(error))
        kind = "refused" if error.kind in ("unsupported", "toolchain") else "reported"
        text = error.message.partition("\n")[0]
        if error.python_file:
            text += f" ({Path(error.python_file).name}, line {error.python_line})"
        return Answer(kind, text)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        text = f"{type(error).__name__}: {error}".strip().partition("\n")[0]
        inside = Path(frames[-1].filename).is_relative_to(folder / "tile_kernels")
        where = f"{text} ({Path(frames[-1].filename).name}, line {frames[-1].lineno})"
        return Answer("not accepted" if inside else "other error", where)
    return Answer("ran", value, us=us)


# ---- the parent ---------------------------------------------------------------------------------


def version_of(folder: Path, distribution: str) -> str | None:
    """The version of a distribution that is installed into a folder."""
    found = list(folder.glob(f"{distribution}-*.dist-info"))
    return found[0].name.removesuffix(".dist-info").rpartition("-")[2] if found else None


class Package:
    """The package in a folder. Its process starts with the first case, and again where it ended."""

    def __init__(self, folder: Path, *, emulated: bool) -> None:
        self.folder, self.emulated = folder.absolute(), emulated
        version = version_of(self.folder, "tile_kernels")
        if version is None:
            raise ImportError(f"no tile-kernels is installed in {folder}")
        self.version = version
        installed = importlib.metadata.version("tilelang")
        self.tilelang = version_of(self.folder, "tilelang") or installed
        self._scratch = tempfile.TemporaryDirectory()
        self._process: subprocess.Popen[str] | None = None

    @property
    def ours(self) -> str:
        """Our package with the same signatures."""
        return "tile_kernels" if self.version[0] == "1" else "tile_kernels.v2"

    def start(self) -> subprocess.Popen[str]:
        """The process, in which the package is imported.

        Raises:
            ImportError: If it cannot be imported there.
        """
        if self._process is not None:
            return self._process
        paths = [str(self.folder), os.environ.get("PYTHONPATH", "")]
        words = [str(self.folder), self._scratch.name, str(int(self.emulated))]
        self._process = subprocess.Popen(
            [sys.executable, __file__, *words],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=self._scratch.name,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        )  # fmt: skip
        said = _line(self._process)
        if said != "ready":
            status = self.end()
            late = f"its import took longer than {CASE_SECONDS} s"
            raise ImportError(late if said is None else said or f"the process ended with {status}")
        return self._process

    def ask(self, case: Case, *, measure: bool = False) -> Answer:
        """Call the package's function; with `measure` also measure it."""
        try:
            process, scratch = self.start(), Path(self._scratch.name)
        except ImportError as error:  # of a process that replaces one that ended
            return Answer("other error", str(error))
        torch.save((case.function, case.arguments, case.gradients, measure), scratch / "case.pt")
        print(file=process.stdin, flush=True)
        said = _line(process)
        if said:
            answer = Answer(*torch.load(scratch / "answer.pt", weights_only=False))
            if answer.outcome == "other error" and not self.emulated:
                self.end()  # the GPU may keep something of it
            return answer
        status = self.end()
        late = f"took longer than {CASE_SECONDS} s"
        return Answer("other error", late if said is None else f"the process ended with {status}")

    def parameters(self, function: str) -> list[str] | None:
        """The names of a function's arguments; None where the package has no such function."""
        answer = self.ask(Case(function, "", None))
        return answer.value if answer.outcome == "ran" else None

    def end(self) -> str:
        """How the process ended, if not before then now."""
        if self._process is None:
            return ""
        process, self._process = self._process, None
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1)  # it may be about to end
        process.kill()
        return f"status {process.wait()}"


def _line(process: subprocess.Popen[str]) -> str | None:
    """What a process says; empty if it has ended, None if it says nothing in time."""
    output = process.stdout
    if output is None or not select.select([output], [], [], CASE_SECONDS)[0]:
        return None
    return output.readline().strip()


if __name__ == "__main__":
    child(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "1")
