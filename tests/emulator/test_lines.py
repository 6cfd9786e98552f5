"""Errors name the Python line of the kernel; the compiled source is the one without directives."""

from __future__ import annotations

import importlib.util
import linecache
from pathlib import Path
from typing import Any

import pytest
import torch

from tile_kernels.emulator import Emulated, EmulationError, lines, lowering, places

from . import sample_kernels as k
from .helpers import fails, rand, replace_nth

HERE = str(Path(k.__file__))


def line_of(text: str, function: str) -> int:
    """Number of the only line of a sample kernel that contains `text`."""
    start = next(
        n for n, s in enumerate(linecache.getlines(HERE), 1) if s.startswith(f"def {function}(")
    )
    first, last = places.kernel_range(HERE, start) or (0, 0)
    found = [n for n in range(first, last + 1) if text in linecache.getline(HERE, n)]
    assert len(found) == 1, found
    return found[0]


SAMPLES: dict[str, tuple[Any, dict[Any, Any]]] = {
    "reverse": (lambda: k.reverse(64, sync=True), k.NO_BARRIERS),
    "gemm": (lambda: k.gemm(128, 128, 128), {}),
    "gemm_stmatrix": (lambda: k.gemm_stmatrix(64, 64, 64), k.PLAIN),
    "tma_copy": (lambda: k.tma_copy(70, 136), k.PLAIN),
    "warp_topk": (lambda: k.warp_topk(64, 4), k.PLAIN),
    "pipelined_rowsum": (lambda: k.pipelined_rowsum(512), k.PLAIN),
    "grid_sum": (lambda: k.grid_sum(256), k.PLAIN),
}


REPEATED = {"gemm_stmatrix", "pipelined_rowsum", "warp_topk"}  # nothing that the others lack


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.full if n in REPEATED else ()) for n in SAMPLES],
)
def test_the_source_is_the_one_that_ships(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, configs = SAMPLES[name]
    mapped = lowering.lower(make(), pass_configs=configs)
    assert len(mapped.python.marks) >= 4
    monkeypatch.setattr(lines, "supported", lambda: False)
    plain = lowering.lower(make(), pass_configs=configs)
    assert mapped.source == plain.source
    assert plain.python == lines.LineMap()


def test_a_race_names_both_python_lines() -> None:
    x, y = rand(64), torch.zeros(64)
    error = fails("race", k.reverse(64, sync=False), x, y, configs=k.NO_BARRIERS)
    assert error.python_file == error.other_python_file == HERE
    assert error.python_line == line_of("s[t] = x[t]", "reverse")
    assert error.python_text == "s[t] = x[t]"
    assert error.other_python_line == line_of("y[t] = s[N - 1 - t]", "reverse")
    place, other, generated = str(error).splitlines()[1:4]
    assert place == f"  {HERE}:{error.python_line}: s[t] = x[t]"
    assert other.startswith(f"  conflicts with {HERE}:{error.other_python_line}: y[t] = ")
    assert generated.startswith("  generated: ")


def test_library_operations_are_named_by_the_line_that_calls_them() -> None:
    a = rand(128, 128, dtype=torch.bfloat16)
    unwaited = replace_nth(r"tl::cp_async_wait<\d>\(\);", 0)
    c = torch.zeros(128, 128)
    error = fails("race", k.gemm(128, 128, 128), a, a.clone(), c, configs={}, transform=unwaited)
    assert error.python_line == line_of("T.gemm(sa, sb, acc", "gemm")
    far = replace_nth(r"workspace\)\[0", 0, "workspace)[90000")
    kernel = k.pipelined_rowsum(512)
    error = fails("out of bounds", kernel, rand(8, 512), rand(512), torch.zeros(8), transform=far)
    assert error.python_line == line_of("T.reduce_sum(acc, r", "pipelined_rowsum")


def test_copies_loops_and_inserted_barriers() -> None:
    kernel, x, w = k.pipelined_rowsum(512), rand(8, 512), rand(512)
    shift = replace_nth(r"\(\(float\*\)ws\) \+ \(", 0, "((float*)ws) + (-4 + ")
    error = fails("out of bounds", kernel, x, w, torch.zeros(8), transform=shift)
    assert error.python_line == line_of("acc[i, j] += xs[i, j] * ws[j]", "pipelined_rowsum")
    x, y = rand(64, 64, dtype=torch.bfloat16), torch.zeros(64, 64, dtype=torch.bfloat16)
    split = "if (threadIdx.x < 40) __syncthreads(); else emu::bar_sync(3, 128);"
    error = fails(
        "deadlock", k.transpose(), x, y, transform=replace_nth(r"__syncthreads\(\);", 0, split)
    )
    assert error.python_line == line_of("s[i, j] = x[by * tile + i", "transpose")
    assert f"\n  after {HERE}:{error.python_line}: " in str(error)


@pytest.mark.parametrize("guarded", [False, True])
def test_the_condition_of_a_loop_is_its_line(guarded: bool) -> None:
    following, last = torch.arange(1, 33, dtype=torch.int32), torch.zeros(32, dtype=torch.int32)
    kernel, configs = k.linked_list(32), k.PLAIN if guarded else k.NO_GUARDS
    if guarded:  # the read that the guard selects, as a line of the source
        lowered = lowering.lower(kernel, pass_configs=configs)
        rows = lowered.source.splitlines()
        number = next(n for n, text in enumerate(rows, 1) if "condval = following[" in text)
        place = places.find(lowered.python, lowered.source, lowered.source, number)
        assert place is not None
        found = place.line
    else:
        error = fails("out of bounds", kernel, following, last, configs=configs)
        found = error.python_line or 0
    assert found == line_of("while following[entry[0]] >= 0", "linked_list")


MOVING = """
from tilelang import language as T

def shifted(N):
    @T.prim_func
    def shifted(flag: T.Tensor[(N,), T.int32], y: T.Tensor[(N,), T.int32]):
        with T.Kernel(1, threads=N):
            t = T.get_thread_binding()
            y[t] = 1
            if flag[t + 1] > 0:
                y[t] = 2

    return shifted
"""


def _load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location("moving_kernel", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_kernel_that_moved_keeps_its_cache_entry_but_not_its_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flag, y = torch.ones(32, dtype=torch.int32), torch.zeros(32, dtype=torch.int32)
    lowered = []
    real = lowering._lower
    monkeypatch.setattr(lowering, "_lower", lambda *a: lowered.append(a) or real(*a))
    for blank_lines in (0, 7):
        path = tmp_path / f"moved_by_{blank_lines}.py"
        path.write_text("\n" * blank_lines + MOVING)
        emulated = Emulated.build(_load(path).shifted(32), pass_configs=k.NO_GUARDS)
        with pytest.raises(EmulationError, match="out of bounds: 4-byte read of flag") as caught:
            emulated(flag, y)
        assert (caught.value.python_file, caught.value.python_line) == (str(path), 10 + blank_lines)
        assert caught.value.python_text == "if flag[t + 1] > 0:"
    assert len(lowered) <= 1  # 0 when an earlier run has filled the cache


def test_lines_that_were_not_generated() -> None:
    before = ["a", "b", "c", "d"]
    assert places._original(before, ["new", "b", "c", "d"], 1) == 1
    assert places._original(before, ["a", "c", "d"], 0) == 0
    assert places._original(before, ["a", "x", "c", "d"], 1) == 1
    assert places._original(before, ["a", "b", "new", "c", "d"], 2) == 1
