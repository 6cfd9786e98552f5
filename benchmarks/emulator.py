"""The emulator beside Triton's interpreter, the cost of its checks, and the planted bugs it finds.

    python benchmarks/emulator.py [--only PART] [FILE]      writes JSON; needs no GPU

The same four computations are written in TileLang and in Triton and run on CPU tensors. Times are
the processor's, of the fastest of some warm calls. Triton (`pip install triton`) is optional:
without it its column is missing. The planted bugs are those of the tests. `--only` measures one
part again (times, scaling, python_lines, planted) and leaves the others in the file as they are.
"""

# No `from __future__ import annotations`: TileLang reads the annotations as values.
import argparse
import json
import os
import platform
import re
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
os.environ["TILE_KERNELS_CACHE"] = tempfile.mkdtemp()  # every kernel is built anew
sys.path.insert(0, str(Path(__file__).parents[1]))

import tilelang
import torch
from tilelang import language as T

from tile_kernels.emulator import Emulated, EmulationError, places
from tile_kernels.emulator.lowering import lower

try:
    import triton
    from triton import language as tl
except ImportError:
    triton = None

REPEATS = 5
RESULTS = Path(__file__).parent / "results"


# ---- TileLang ------------------------------------------------------------------------------------


def _add(n: int) -> Any:
    @T.prim_func
    def add(
        x: T.Tensor[(n,), T.float32], y: T.Tensor[(n,), T.float32], z: T.Tensor[(n,), T.float32]
    ):
        with T.Kernel(n // 1024, threads=128) as b:
            for i in T.Parallel(1024):
                z[b * 1024 + i] = x[b * 1024 + i] + y[b * 1024 + i]

    return add


def _softmax(m: int, n: int) -> Any:
    @T.prim_func
    def softmax(x: T.Tensor[(m, n), T.float32], y: T.Tensor[(m, n), T.float32]):
        with T.Kernel(m, threads=128) as row:
            f = T.alloc_fragment((n,), T.float32)
            top = T.alloc_fragment((1,), T.float32)
            total = T.alloc_fragment((1,), T.float32)
            T.copy(x[row, 0], f)
            T.reduce_max(f, top, dim=0)
            for j in T.Parallel(n):
                f[j] = T.exp(f[j] - top[0])
            T.reduce_sum(f, total, dim=0)
            for j in T.Parallel(n):
                y[row, j] = f[j] / total[0]

    return softmax


def _gemm(m: int, n: int, k: int) -> Any:
    @T.prim_func
    def gemm(
        a: T.Tensor[(m, k), T.float16],
        b: T.Tensor[(k, n), T.float16],
        c: T.Tensor[(m, n), T.float32],
    ):
        with T.Kernel(n // 64, m // 64, threads=128) as (bx, by):
            sa = T.alloc_shared((64, 32), T.float16)
            sb = T.alloc_shared((32, 64), T.float16)
            acc = T.alloc_fragment((64, 64), T.float32)
            T.clear(acc)
            for i in T.Pipelined(k // 32, num_stages=2):
                T.copy(a[by * 64, i * 32], sa)
                T.copy(b[i * 32, bx * 64], sb)
                T.gemm(sa, sb, acc)
            T.copy(acc, c[by * 64, bx * 64])

    return gemm


def _transpose(m: int, n: int) -> Any:
    @T.prim_func
    def transpose(x: T.Tensor[(m, n), T.float32], y: T.Tensor[(n, m), T.float32]):
        with T.Kernel(n // 32, m // 32, threads=128) as (bx, by):
            s = T.alloc_shared((32, 33), T.float32)
            for i, j in T.Parallel(32, 32):
                s[i, j] = x[by * 32 + i, bx * 32 + j]
            for i, j in T.Parallel(32, 32):
                y[bx * 32 + i, by * 32 + j] = s[j, i]

    return transpose


# ---- Triton --------------------------------------------------------------------------------------

if triton is not None:

    @triton.jit
    def _triton_add(x, y, z, block: tl.constexpr):
        i = tl.program_id(0) * block + tl.arange(0, block)
        tl.store(z + i, tl.load(x + i) + tl.load(y + i))

    @triton.jit
    def _triton_softmax(x, y, n: tl.constexpr):
        i = tl.program_id(0) * n + tl.arange(0, n)
        f = tl.load(x + i)
        f = tl.exp(f - tl.max(f, axis=0))
        tl.store(y + i, f / tl.sum(f, axis=0))

    @triton.jit
    def _triton_gemm(a, b, c, n: tl.constexpr, k: tl.constexpr):
        rows = tl.program_id(1) * 64 + tl.arange(0, 64)
        columns = tl.program_id(0) * 64 + tl.arange(0, 64)
        inner = tl.arange(0, 32)
        acc = tl.zeros((64, 64), dtype=tl.float32)
        for i in range(0, k, 32):
            left = tl.load(a + rows[:, None] * k + (i + inner)[None, :])
            right = tl.load(b + (i + inner)[:, None] * n + columns[None, :])
            acc += tl.dot(left, right)
        tl.store(c + rows[:, None] * n + columns[None, :], acc)

    @triton.jit
    def _triton_transpose(x, y, m: tl.constexpr, n: tl.constexpr):
        rows = tl.program_id(1) * 32 + tl.arange(0, 32)
        columns = tl.program_id(0) * 32 + tl.arange(0, 32)
        tile = tl.load(x + rows[:, None] * n + columns[None, :])
        tl.store(y + columns[:, None] * m + rows[None, :], tl.trans(tile))


Case = tuple[Any, list[Any], Callable[[list[Any]], None], Callable[[list[Any]], Any]]


def cases() -> dict[str, Case]:
    """Name -> TileLang kernel, arguments, the launch in Triton, the expected result."""
    x, y = torch.randn(1 << 18), torch.randn(1 << 18)
    rows = torch.randn(512, 512)
    a, b = torch.randn(256, 256).half(), torch.randn(256, 256).half()
    return {
        "add, 262144 elements": (
            _add(1 << 18),
            [x, y, torch.zeros(1 << 18)],
            lambda v: _triton_add[(256,)](*v, block=1024),
            lambda v: v[0] + v[1],
        ),
        "softmax, 512 x 512": (
            _softmax(512, 512),
            [rows, torch.zeros(512, 512)],
            lambda v: _triton_softmax[(512,)](*v, n=512),
            lambda v: v[0].softmax(1),
        ),
        "transpose, 512 x 512": (
            _transpose(512, 512),
            [rows, torch.zeros(512, 512)],
            lambda v: _triton_transpose[(16, 16)](*v, m=512, n=512),
            lambda v: v[0].T,
        ),
        "product, 256 x 256 x 256": (
            _gemm(256, 256, 256),
            [a, b, torch.zeros(256, 256)],
            lambda v: _triton_gemm[(4, 4)](*v, n=256, k=256),
            lambda v: v[0].float() @ v[1].float(),
        ),
    }


def milliseconds(call: Callable[[], Any]) -> float:
    """Processor time of the fastest of some calls, after one to warm up."""
    call()
    times = []
    for _ in range(REPEATS):
        started = time.process_time()
        call()
        times.append(time.process_time() - started)
    return round(min(times) * 1e3, 2)


def measure(case: Case) -> dict[str, float]:
    """Times of one computation; the results are compared first."""
    kernel, values, launch, expected = case
    times = {}
    for mode in ("check", "fast"):
        started = time.perf_counter()
        emulated = Emulated.build(kernel, pass_configs={}, mode=mode)
        times[f"build_{mode}_ms"] = round((time.perf_counter() - started) * 1e3, 1)
        values[-1].zero_()
        times[f"{mode}_ms"] = milliseconds(lambda run=emulated: run(*values))
        torch.testing.assert_close(values[-1], expected(values), rtol=1e-2, atol=1e-2)
    if triton is not None:
        values[-1].zero_()
        times["triton_ms"] = milliseconds(lambda: launch(values))
        torch.testing.assert_close(values[-1], expected(values), rtol=1e-2, atol=1e-2)
    return times


def planted() -> dict[str, Any]:
    """What the emulator says about each planted bug."""
    from tests.emulator.planted_bugs import BUGS

    found = {}
    for name, bug in BUGS.items():
        kernel = Emulated.build(bug.kernel(True), pass_configs=bug.configs, transform=bug.edit)
        try:
            kernel(*bug.args(), fresh=bug.fresh)
            found[name] = {"diagnosed": False, "message": "no report"}
        except EmulationError as error:
            message = re.sub(r"^\w+: ", "", error.message.splitlines()[0])
            right = error.kind == bug.kind and bug.words in message
            right &= bug.line in (error.python_text or "")
            found[name] = {"diagnosed": right, "message": message, "line": error.python_text}
    return found


def python_lines() -> dict[str, int]:
    """How many statements of generated sources have a Python line: exactly, nearly, not at all."""
    from tests.emulator.planted_bugs import BUGS

    counts = {"exact": 0, "near": 0, "none": 0}
    prim_funcs = [(case[0], {}) for case in cases().values()]
    prim_funcs += [(bug.kernel(False), bug.configs) for bug in BUGS.values()]
    for prim_func, configs in prim_funcs:
        lowered = lower(prim_func, pass_configs=configs)
        source = lowered.source
        start = source.rindex("__global__")
        for number, text in enumerate(source.splitlines(), 1):
            if number <= source.count("\n", 0, start) + 1 or not text.strip().endswith(";"):
                continue
            place = places.find(lowered.python, source, source, number)
            counts["none" if place is None else "exact" if place.exact else "near"] += 1
    return counts


def times() -> dict[str, dict[str, float]]:
    """Times of each computation."""
    found = {}
    for name, case in cases().items():
        found[name] = measure(case)
        print(name, found[name], flush=True)
    return found


def scaling() -> dict[str, dict[str, float]]:
    """A vector add in check mode by its number of elements: warm calls, and the first one."""
    found = {}
    for log in (16, 18, 20, 22):
        n = 1 << log
        emulated = Emulated.build(_add(n), pass_configs={})
        values = [torch.randn(n), torch.randn(n), torch.zeros(n)]
        started = time.process_time()
        emulated(*values)
        first = round((time.process_time() - started) * 1e3, 1)
        warm = milliseconds(lambda run=emulated, v=values: run(*v))
        per_element = round(warm * 1e6 / n, 1)
        found[str(n)] = {"check_ms": warm, "ns_per_element": per_element, "first_ms": first}
        print(n, found[str(n)], flush=True)
    return found


PARTS: dict[str, Callable[[], Any]] = {
    "times": times, "scaling": scaling, "python_lines": python_lines, "planted": planted
}  # fmt: skip


def main() -> None:
    """Measures and writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", nargs="?", type=Path, default=RESULTS / "emulator.json")
    parser.add_argument("--only", choices=PARTS)
    options = parser.parse_args()
    for mode in ("check", "fast"):
        Emulated.build(_add(1024), pass_configs={}, mode=mode)  # the headers are compiled once
    content = json.loads(options.file.read_text()) if options.only else {}
    machine = {
        "cpu": re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())[1],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "tilelang": tilelang.__version__,
        "triton": None if triton is None else triton.__version__,
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }
    if options.only in (None, "times"):
        content["machine"] = machine  # printed beside the times
    content.setdefault("machine", machine)
    for name in [options.only] if options.only else PARTS:
        content[name] = PARTS[name]()
        content.setdefault("dates", {})[name] = machine["date"]
    planted_bugs = content.get("planted", {}).values()
    print(sum(bug["diagnosed"] for bug in planted_bugs), "of", len(planted_bugs), "diagnosed")
    options.file.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
