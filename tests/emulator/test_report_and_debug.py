"""Reports, contraction, speed, and the files left behind for gdb."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from tile_kernels.emulator import Emulated, EmulationError

from . import sample_kernels as k
from .helpers import rand, replace_nth, run

# ---- reports -----------------------------------------------------------------------------------


def test_report_shows_that_every_byte_is_moved_exactly_once() -> None:
    x = rand(64, 96, dtype=torch.bfloat16)
    y = torch.zeros(96, 64, dtype=torch.bfloat16)
    report = run(k.transpose(), x, y)
    assert report.buffers is not None
    tx, ty = report.buffers["x"], report.buffers["y"]
    assert tx.read == tx.distinct_read == x.nbytes
    assert tx.written == 0
    assert ty.written == ty.distinct_written == y.nbytes
    assert ty.read == 0
    assert report.blocks == 6
    assert report.threads == 6 * 128
    assert report.barriers == 6
    (launch,) = report.kernels
    assert launch.grid == (3, 2, 1)
    assert launch.block == (128, 1, 1)
    assert 0 < launch.seconds <= report.seconds
    assert "x: 12288 bytes read (12288 distinct)" in str(report)


def test_report_shows_repeated_reads_and_atomics() -> None:
    x = torch.ones(1024, dtype=torch.int32)
    part, out = torch.zeros(4, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    report = run(k.grid_sum(1024), x, part, out)
    assert report.buffers is not None
    assert report.buffers["part"].distinct_read == part.nbytes
    assert report.buffers["part"].read == 4 * 128 * part.nbytes  # every thread reads all partials
    y = torch.zeros(1, dtype=torch.int32)
    counted = run(k.unguarded_counter(64, atomic=True), y).buffers
    assert counted is not None
    assert counted["y"].atomic == 128 * 4
    assert counted["y"].written == 0


def test_report_tells_an_unwritten_tail() -> None:
    x, y = rand(64), torch.zeros(64)
    half = Emulated.build(
        k.shifted_copy(64, 0, 0),
        pass_configs=k.NO_GUARDS,
        transform=lambda s: s.replace("  y[", "  if (threadIdx.x < 48) y[", 1),
    )
    buffers = half(x, y).buffers
    assert buffers is not None
    assert buffers["y"].distinct_written == 48 * 4


def test_fast_mode_watches_no_memory() -> None:
    report = run(
        k.transpose(), torch.zeros(4, 4).bfloat16(), torch.zeros(4, 4).bfloat16(), mode="fast"
    )
    assert report.buffers is None
    assert report.blocks == 1


# ---- contraction -------------------------------------------------------------------------------


def test_contraction_rounds_once_per_multiply_add() -> None:
    n, h = 40, 64
    x, w = rand(n, h), rand(h, seed=1)
    separate, fused = torch.zeros(n), torch.zeros(n)
    run(k.weighted_rows(h), x, w, separate)
    run(k.weighted_rows(h), x, w, fused, contract=True)
    want_separate, want_fused = torch.zeros(n), torch.zeros(n, dtype=torch.float64)
    for j in range(h):
        want_separate = want_separate + x[:, j] * w[j]
        exact = x[:, j].double() * w[j].double()  # exact, so one rounding remains
        want_fused = (want_fused + exact).float().double()
    assert torch.equal(separate, want_separate)
    # the double sum may round twice; that touches at most isolated last bits
    torch.testing.assert_close(fused.double(), want_fused, rtol=1e-6, atol=1e-7)
    assert (fused.double() == want_fused).float().mean() > 0.9
    assert not torch.equal(fused, separate)


# ---- speed and processes -----------------------------------------------------------------------


def test_warm_calls_are_quick() -> None:
    emulated = Emulated.build(k.softmax(512), pass_configs=k.PLAIN)
    x, y = rand(4, 512, dtype=torch.bfloat16), torch.zeros(4, 512)
    emulated(x, y)
    best = 1.0
    for _ in range(5):
        started = time.perf_counter()
        emulated(x, y)
        best = min(best, time.perf_counter() - started)
    assert best < 0.05


def test_threads_of_one_process_take_turns() -> None:
    emulated = Emulated.build(k.softmax(512), pass_configs=k.PLAIN)
    x = rand(4, 512, dtype=torch.bfloat16)
    outputs = [torch.zeros(4, 512) for _ in range(4)]
    threads = [threading.Thread(target=emulated, args=(x, y)) for y in outputs]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for y in outputs:
        torch.testing.assert_close(y, x.float().softmax(-1), rtol=1e-6, atol=1e-7)


BUILD = """
import ctypes
from tile_kernels.emulator import build
source = '#include "emu.h"\\nextern "C" __global__ void empty() {\\n}\\nEMU_EXPORT(empty)\\n'
library = build.compile_kernel(source, build.flags("fast"))
assert ctypes.CDLL(str(library))["emu_launch_empty"]
"""


def test_two_processes_may_fill_one_cache(tmp_path: Path) -> None:
    root = str(Path(__file__).parents[2])
    env = {**os.environ, "TILE_KERNELS_CACHE": str(tmp_path / "cache"), "PYTHONPATH": root}
    command = [sys.executable, "-c", BUILD]
    running = [subprocess.Popen(command, cwd=tmp_path, env=env) for _ in range(2)]
    assert [p.wait() for p in running] == [0, 0]
    left = [p.name for p in (tmp_path / "cache" / "emulator").iterdir()]
    assert left
    assert not [n for n in left if n.startswith(".")]  # no temporary files


def test_kept_folder_may_be_deleted_between_calls(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    emulated = Emulated.build(k.reverse(64, sync=True), pass_configs=k.NO_BARRIERS, keep=kept)
    shutil.rmtree(kept)
    emulated(torch.zeros(64), torch.zeros(64))
    assert [p.name for p in kept.iterdir()] == ["reverse_kernel.launch"]


# ---- gdb ---------------------------------------------------------------------------------------


def test_keep_leaves_sources_inputs_and_a_script(tmp_path: Path) -> None:
    x, y = torch.arange(64).float(), torch.zeros(64)
    run(k.reverse(64, sync=True), x, y, configs=k.NO_BARRIERS, keep=tmp_path)
    names = {p.name for p in tmp_path.iterdir()}
    assert names == {"kernel.cpp", "kernel.cu", "debug.sh", "reverse_kernel.launch"}
    assert "__global__" in (tmp_path / "kernel.cu").read_text()
    assert os.access(tmp_path / "debug.sh", os.X_OK)


@pytest.mark.skipif(not shutil.which("gdb"), reason="gdb is not installed")
def test_gdb_steps_one_thread_over_a_barrier(tmp_path: Path) -> None:
    x, y = torch.arange(64).float() * 10, torch.zeros(64)
    run(k.reverse(64, sync=True), x, y, configs=k.NO_BARRIERS, keep=tmp_path)
    steps = ["-batch", "-ex", "next", "-ex", "next", "-ex", "next"]
    show = ["-ex", "print threadIdx.x", "-ex", "print s[58]", "-ex", "delete", "-ex", "continue"]
    done = subprocess.run(
        [tmp_path / "debug.sh", "-t", "5", *steps, *show],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "$1 = 5" in done.stdout, done.stdout + done.stderr
    assert "$2 = 580" in done.stdout  # written by thread 58 while thread 5 waited
    assert "reverse_kernel: 1 blocks, 1 barriers" in done.stdout


@pytest.mark.full
@pytest.mark.skipif(not shutil.which("gdb"), reason="gdb is not installed")
def test_replay_repeats_a_failure_with_tensor_maps(tmp_path: Path) -> None:
    x, y = rand(70, 136, dtype=torch.bfloat16), torch.zeros(70, 136, dtype=torch.bfloat16)
    with pytest.raises(EmulationError, match="race"):
        run(
            k.tma_copy(70, 136),
            x,
            y,
            keep=tmp_path,
            transform=lambda s: s.replace("x_to_s_mbarrier[0].wait(0);", ""),
        )
    done = subprocess.run(
        [tmp_path / "debug.sh", "-batch", "-ex", "delete", "-ex", "continue"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "tma_copy_kernel: race:" in done.stdout, done.stdout + done.stderr


# ---- the page of a failure ---------------------------------------------------------------------


def test_page_of_a_race(tmp_path: Path) -> None:
    page = tmp_path / "race.html"
    kernel = k.global_exchange(128, sync=False)
    x, y = torch.zeros(128), torch.zeros(128)
    with pytest.raises(EmulationError, match=f"report: {page}") as caught:
        run(kernel, rand(128), x, y, configs=k.NO_BARRIERS, report=page)
    text, error = page.read_text(), caught.value
    assert "<span class='kind'>race</span> in global_exchange_kernel" in text
    assert f"<tr class='bad'><td>{error.python_line}</td>" in text
    assert f"<tr class='other'><td>{error.other_python_line}</td>" in text
    assert "No thread of this block had met a barrier" in text


def test_page_has_barriers_and_shared_memory(tmp_path: Path) -> None:
    x, w, y = rand(8, 512), rand(512), torch.zeros(8)
    shift = replace_nth(r"\(\(float\*\)ws\) \+ \(", 1, "((float*)ws) + (9000 + ")
    kernel = k.pipelined_rowsum(512)
    with pytest.raises(EmulationError) as caught:
        run(kernel, x, w, y, transform=shift, report=tmp_path / "new" / "page.html")
    error = caught.value
    arrivals = [e for e in error.barriers if e.what == "arrives"]
    assert {e.warp for e in arrivals} == {0, 1, 2, 3}
    assert arrivals[0].python_line is not None
    assert [(p.name, p.offset) for p in error.shared] == [
        ("workspace", 0),
        ("xs", 0),
        ("ws", 24576),
    ]
    text = (tmp_path / "new" / "page.html").read_text()
    assert "timeline of barriers" in text
    assert "map of shared memory" in text
    assert "<title>barrier 0 completes</title>" in text
    assert "xs (24576 bytes)" in text


def test_page_named_after_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    kernel = k.shifted_copy(64, 1, 0)
    with pytest.raises(EmulationError):
        run(kernel, torch.zeros(64), torch.zeros(64), configs=k.NO_GUARDS, report="html")
    assert [p.name for p in tmp_path.iterdir()] == ["shifted_copy_kernel-out-of-bounds.html"]
