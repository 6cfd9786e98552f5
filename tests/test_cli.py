"""The command line, as a user types it."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tile_kernels
from tests.requirements import needs_nvcc
from tile_kernels import cli
from tile_kernels.commands import check, info, pool
from tile_kernels.mhc.pre.op import pre_gradients
from tile_kernels.runtime import emulation, logs, registry, terminal
from tile_kernels.runtime.declaration import Host
from tile_kernels.runtime.operator import Operator
from tile_kernels.testing import benchmark


def said(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> str:
    assert cli.main(words) == status
    captured = capsys.readouterr()
    return captured.err if status == 2 else captured.out


def test_info(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "info")
    assert tile_kernels.__version__ in text
    assert torch.__version__ in text


def test_info_says_that_tilelang_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda _: "0.1.12")
    expected = r"0.1.12, too old to compile these kernels: pip install 'moe-tile-kernels\[jit]'"
    assert info._version("tilelang", "[jit]") == expected
    assert info._version("torch", "") == "0.1.12"


def test_ops_lists_the_registry(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "ops")
    assert "moe.topk_gate" in text
    assert "(scores: Tensor, num_topk: int) -> Tensor" in text
    assert "moe.topk_gate" not in said(capsys, "ops", "transpose")


def test_operators_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    """Without the family where that leaves no doubt; similar ones for an unknown name."""
    assert "moe.topk_gate" in said(capsys, "ops", "topk_gate")
    refused = said(capsys, "ops", "topkgate", status=2)
    assert "no family or operator 'topkgate'; did you mean moe.topk_gate or " in refused
    assert "'nosuch'; tile-kernels ops lists them\n" in said(capsys, "ops", "nosuch", status=2)
    assert "did you mean transpose or " in said(capsys, "ops", "transpos", status=2)
    refused = said(capsys, "source", "moe.topk_gat", status=2)
    assert "no operator 'moe.topk_gat'; did you mean moe.topk_gate or " in refused
    assert "._" not in refused
    assert "__global__" in said(capsys, "source", "topk_gate", "--arch", "sm_80")


def test_check_of_references_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That no kernel ran is a failure unless it was asked for, and is never left out."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(emulation, "missing", lambda: "missing: a compiler")
    refused = said(capsys, "check", "transpose.transpose", status=2)
    assert "no kernel ran: there is no CUDA device, and kernels cannot be emulated" in refused
    assert "missing: a compiler" in refused
    for words in (("--references-only",), ("--backend", "torch")):
        text = said(capsys, "check", "transpose.transpose", "--jobs", "1", *words)
        assert "all 48 cases passed on torch" in text
        assert "no kernel ran" in text
    words = ("check", "--references-only", "--backend", "emulate")
    assert "--references-only runs no kernel" in said(capsys, *words, status=2)


def test_check_reports_a_wrong_result(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def zeros(_: Any, out: Any) -> Host:
        return Host(torch.Tensor.zero_, (out,))

    monkeypatch.setattr(registry.get("transpose.transpose"), "_launches", zeros)
    words = ["check", "transpose.transpose", "--backend", "emulate", "--full", "--jobs", "1"]
    assert cli.main(words) == 1
    captured = capsys.readouterr()
    assert "cases failed" in captured.out
    assert "transpose.transpose 64i+j: AssertionError: contents differ" in captured.err


def test_check_in_several_processes(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "check", "transpose", "--backend", "emulate", "--jobs", "2")
    assert "all 4 cases passed on emulate" in text
    assert "These are 4 of 73 cases" in text
    assert "--full runs all" in text
    assert "--jobs must be at least 1, got 0" in said(capsys, "check", "--jobs", "0", status=2)


def test_check_reaches_every_kernel_by_default() -> None:
    cases = [case for op in registry.all_ops() for case in check._cases(op, "emulate")]
    chosen = check._cheapest(cases)
    assert len(chosen) < len(cases) / 8
    reached = {(case.op, kernel) for case in chosen for kernel in case.kernels}
    assert reached == {(case.op, kernel) for case in cases for kernel in case.kernels}
    assert {case.op for case in chosen} == {op.name for op in registry.all_ops()}
    worked = {case.op for case in chosen if case.kind == "vectors"}
    assert worked == {op.name for op in registry.all_ops() if op.cases.vectors}


def test_an_interrupted_check_shows_what_it_has(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = check._error, []

    def interrupted(backend: str, case: Any) -> str | None:
        calls.append(case)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(backend, case)

    monkeypatch.setattr(check, "_error", interrupted)
    words = ("check", "transpose.transpose", "--references-only", "--jobs", "1")
    text = said(capsys, *words, status=130)
    assert "stopped after 2 of 48 cases, of which 0 failed, on torch" in text
    assert "46 not run" in text
    monkeypatch.setattr(pool, "each", lambda *_: throw(OSError("no more processes")))
    assert cli.main(words) == 2
    captured = capsys.readouterr()
    assert "stopped after 0 of 48 cases" in captured.out
    assert "no more processes" in captured.err


def test_progress_in_a_file_is_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no bar can be drawn: the share that is done and an estimate, now and then."""
    seconds = iter([0.0, 10.0, 31.0, 40.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(seconds))
    with terminal.progress_bar(4, "checking") as advance:
        for _ in range(3):
            advance("x")
    assert capsys.readouterr().err == "checking: 50 % after 31 s, about 31 s left\n"


def throw(error: Exception) -> Any:
    raise error


def sleep_or_die(item: str) -> str | None:
    if item == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60 if item == "sleep" else 0)
    return None if item == "good" else item


@pytest.mark.multiprocess
def test_a_worker_that_dies_is_one_failure() -> None:
    found = sorted(pool.each(sleep_or_die, ["good", "die", "bad", "good"], 2), key=str)
    died = "the process that ran it died with exit code -9"
    assert found == [("bad", "bad"), ("die", died), ("good", None), ("good", None)]


_INTERRUPTED = """
import multiprocessing, os, signal, threading
from tests.test_cli import sleep_or_die
from tile_kernels.commands import pool

signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
results = pool.each(sleep_or_die, ["good", "good", "sleep", "sleep"], 2)
assert next(results) == ("good", None)
threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    list(results)
except KeyboardInterrupt:
    print("interrupted,", len(multiprocessing.active_children()), "left")
"""


@pytest.mark.multiprocess
def test_ctrl_c_ends_the_workers() -> None:
    """In a separate process: libraries of this one may have replaced the handler of Ctrl-C."""
    done = subprocess.run(
        [sys.executable, "-c", _INTERRUPTED],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == "interrupted, 0 left\n", done.stderr


def test_what_cannot_be_done_is_a_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    words = ("check", "--backend", "tilelang")
    assert "needs a CUDA device, and there is none" in said(capsys, *words, status=2)
    words = ("source", "transpose.transpose", "x=complex128[4,4]")
    assert "x must have elements of 1, 2, 4 or 8 bytes" in said(capsys, *words, status=2)
    words = ("source", "moe.topk_gate", "num_topk=4")
    missing = "topk_gate() missing 1 required positional argument: 'scores'"
    assert missing in said(capsys, *words, status=2)
    refused = said(capsys, "check", "--replay", str(tmp_path), status=2)
    assert refused == f"tile-kernels check: {tmp_path}: Is a directory\n"
    refused = said(capsys, "warmup", "--calls", "absent.json", status=2)
    assert refused == "tile-kernels warmup: absent.json: No such file or directory\n"
    refused = said(capsys, "warmup", "--model", "absent", status=2)
    assert refused.startswith("tile-kernels warmup: model must be one of the presets ")


def test_without_a_command_they_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    listed = said(capsys, status=2)
    for name in ("info", "ops", "check", "bench", "warmup", "pack", "source", "emulate"):
        assert f"    {name} " in listed


def test_files_of_others_are_refused_in_words(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text, other = tmp_path / "text.json", tmp_path / "other.pt"
    torch.save([1, 2], other)
    for content in ("not json", '{"a": 1}', "[1]", '[["transpose.transpose"]]'):
        text.write_text(content)
        for path in (text, other):
            refused = said(capsys, "check", "--replay", str(path), status=2)
            assert "is not a call that was saved" in refused
        assert "is not a file of results" in said(
            capsys, "bench", "--load", str(tmp_path), status=2
        )
    assert "must hold a list of" in said(capsys, "warmup", "--calls", str(text), status=2)
    assert "jobs must be at least 1" in said(capsys, "warmup", "--jobs", "0", status=2)


# ---- calls that the log saved -------------------------------------------------------------------


@pytest.fixture
def dumps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The folder in which calls are saved while the test runs."""
    monkeypatch.setattr(logs.settings, "folder", tmp_path)
    tile_kernels.set_log_level(3)
    yield tmp_path
    tile_kernels.set_log_level(0)


# They have an operator for calls with a gradient.
GATES = {"moe.top2_sum_gate", "moe.moe_topk_gate_forward"}


@pytest.mark.parametrize("op", registry.all_ops(), ids=lambda op: op.name)
def test_every_saved_call_can_be_replayed(
    op: Operator, dumps: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of the operators behind the public function too."""
    serving = {one.name for one in registry.operators() if one.serves == op.name}
    samples = op.cases.small if serving else [op.cases.ordinary()]
    for sample in samples:
        op.function(**sample.build("cpu"))
    if op.name in GATES:
        arguments = op.cases.ordinary().build("cpu")
        op.function(**{**arguments, "logits": arguments["logits"].requires_grad_()})
    if op.name == "mhc.mhc_pre_fwd":  # has operators for its gradients
        *tensors, rms_eps, _, sinkhorn_eps, post_mult, repeat = sample.build("cpu").values()
        results = op.function(*tensors, rms_eps, 0.0, sinkhorn_eps, post_mult, repeat)
        numbers = rms_eps, sinkhorn_eps, post_mult, repeat
        for total in (None, torch.zeros_like(tensors[0])):
            pre_gradients((*tensors, *results[3:]), results[:3], total, numbers)
    tile_kernels.set_log_level(0)
    files = {path.name.partition("-")[0]: path for path in dumps.iterdir()}
    assert {op.name, *serving} <= set(files)
    for path in files.values():
        said(capsys, "check", "--replay", str(path), "--backend", "torch")


@pytest.mark.parametrize(
    "name", ["quant.per_token_cast", "moe.reduce_fused", "mhc.mhc_pre_apply_mix_bwd"]
)
def test_a_saved_call_runs_the_kernel(
    name: str, dumps: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    op = registry.get(name)
    with tile_kernels.backend("emulate"):
        op.function(**op.cases.ordinary().build("cpu"))
    tile_kernels.set_log_level(0)
    (path,) = dumps.glob(f"{name}-*")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    text = said(capsys, "check", "--replay", str(path))
    assert "equal to the reference on the backend emulate" in text


def test_a_saved_call_with_a_buffer_for_its_result(
    dumps: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    op = registry.get("quant.per_token_cast")
    arguments = op.cases.ordinary().build("cpu")
    buffers = [torch.empty_like(result) for result in op.public_reference(**arguments)]
    with tile_kernels.backend("emulate"):
        op.function(**arguments, **op.buffers(*buffers))
    tile_kernels.set_log_level(0)
    (path,) = dumps.iterdir()
    assert set(op.dispatched().outputs) <= torch.load(path)["arguments"].keys()
    said(capsys, "check", "--replay", str(path), "--backend", "emulate")


def test_a_wrong_saved_call(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Bad arguments are reported by the checks, a wrong result by the comparison."""
    monkeypatch.setattr(logs.settings, "folder", tmp_path)

    def replayed(status: int, backend: str = "torch", **arguments: Any) -> str:
        path = str(logs.dump("moe.topk_gate", arguments))
        return said(capsys, "check", "--replay", path, "--backend", backend, status=status)

    scores = torch.randn(3, 8)
    refused = replayed(2, scores=scores, num_topk=9)
    assert "topk_gate: num_topk must be in 1..8 (the number of experts), got 9" in refused
    refused = replayed(2, scores=scores, topk=2)
    assert "topk_gate: missing a required argument: 'num_topk'" in refused
    path = tmp_path / "code.pt"
    torch.save({"op": "moe.topk_gate", "arguments": {"scores": Path}}, path)
    refused = said(capsys, "check", "--replay", str(path), "--backend", "torch", status=2)
    assert "is not a call that was saved" in refused
    wrong = registry.get("moe.topk_gate").dispatched()
    wrong.public_reference = lambda *_: torch.full((3, 2), 9)
    monkeypatch.setattr(Operator, "dispatched", lambda _: wrong)
    text = replayed(1, "torch", scores=scores, num_topk=2)
    assert "contents differ in 6 of 6" in text


# ---- source, warmup, bench ----------------------------------------------------------------------


def test_source(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("source", "moe.topk_gate", "scores=float32[64,48]", "num_topk=4", "--arch", "sm_80")
    text = said(capsys, *words)
    assert "// topk_gate_warp(48, 4" in text
    assert "for sm_80" in text
    assert "__global__" in text
    wrong = said(capsys, "source", "moe.topk_gate", "topk=4", status=2)
    assert "'topk=4' must be NAME=VALUE, where NAME is one of scores, num_topk" in wrong


def test_source_emulated_and_kept(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ("source", "moe.topk_gate", "scores=float32[5,48]", "num_topk=4", "--emulate")
    text = said(capsys, *words, "--keep", str(tmp_path))
    assert "scores: 960 bytes read (960 distinct)" in text
    assert "topk_idx: 0 bytes read (0 distinct), 160 written (160 distinct)" in text
    script = tmp_path / "topk_gate_warp" / "debug.sh"
    assert f"step through it: {script}" in text
    assert script.exists()
    assert "--keep needs --emulate" in said(
        capsys, "source", "moe.topk_gate", "--keep", str(tmp_path), status=2
    )


def test_warmup_of_a_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sizes = {"hidden": 64, "experts": {"intermediate": 32, "experts": 4, "topk": 2}}
    path = tmp_path / "model.json"
    path.write_text(json.dumps(sizes))
    words = ("warmup", "--model", str(path), "--max-tokens", "9", "--arch", "sm_80")
    text = said(capsys, *words, "--list")
    assert "group_count(4, 108, False" in text
    assert "kernels for sm_80 with 108 SMs" in text
    assert len(said(capsys, *words, "--training", "--list")) > len(text)
    path.write_text(json.dumps({**sizes, "expert": {}}))
    assert "nearest key is 'experts'" in said(capsys, *words, status=2)
    for wrong in (["--training"], ["--max-tokens", "4"], ["--list"]):
        assert f"{wrong[0]}" in said(capsys, "warmup", *wrong, status=2)
    message = "--model cannot be combined with an operator"
    assert message in said(capsys, "warmup", "moe.aux_fi", "--model", "tiny-v4", status=2)


@needs_nvcc
def test_warmup_of_a_list_of_calls(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    calls = tmp_path / "calls.json"
    calls.write_text('[["moe.topk_gate", {"scores": "float32[8,44]", "num_topk": 2}]]')
    text = said(capsys, "warmup", "--calls", str(calls), "--arch", "sm_80")
    assert "compiled for sm_80" in text
    assert "topk_gate_warp(44, 2, 4, 4)" in text


def test_bench_without_a_gpu_measures_the_host(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    text = said(capsys, "bench", "moe.topk_gate", "--save", "--output", str(tmp_path))
    assert "no GPU here" in text
    report = benchmark.load(tmp_path / "cpu" / "moe.topk_gate.json")
    assert all(result.host_us > 0 for result in report.results)
    assert all(result.device_us is None for result in report.results)
    folder = str(tmp_path / "cpu")
    assert "moe.topk_gate.256.8" in said(capsys, "bench", "--load", folder)
    assert "moe.topk_gate.256.8" in said(capsys, "bench", "--load", folder, "topk_gate")
    refused = said(capsys, "bench", "--load", folder, "transpose", status=2)
    assert f"no results of transpose in {folder}" in refused
    assert "no results in" in said(capsys, "bench", "--load", str(tmp_path), status=2)
    saved = json.loads((tmp_path / "cpu" / "moe.topk_gate.json").read_text())
    assert saved["machine"]["torch"] == torch.__version__


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = benchmark.Result(
        "moe.topk_gate.x", 10**7, 6.0, 5.9, 6.0, 20.0, 90.0, 50.0, 0.35, "cupti"
    )
    report = benchmark.Report({"device": "GPU", "date": "today"}, 4000.0, [result])
    for ending, magic in (("png", b"\x89PNG"), ("svg", b"<?xml")):
        benchmark.plot(report, tmp_path / f"plot.{ending}")
        assert (tmp_path / f"plot.{ending}").read_bytes().startswith(magic)
    with pytest.raises(ValueError, match="holds no device times"):
        benchmark.plot(benchmark.Report({"device": "CPU"}, None, []), tmp_path / "none.png")


# ---- expert parallelism -------------------------------------------------------------------------

BLACKWELL = ("--nodes", "1", "--nvlink-gbs", "810", "--sms", "148")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), "12 of 132"),
        (("--nodes", "4"), "6 of 132"),
        (("--nodes", "8"), "4 of 132"),
        (BLACKWELL, "24 of 148"),
        ((*BLACKWELL, "--no-overlap"), "64 of 148"),
        (("--direct",), "18 of 132"),
    ],
)
def test_ep_model_finds_the_published_numbers(
    words: tuple[str, ...], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f" {expected} " in said(capsys, "ep-model", *words)


def test_ep_model_sizes_and_times(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "ep-model")
    assert "1,218,445,312" in text
    assert "queue pairs" in text
    # 4096 tokens x 1.996 nodes / 2 x 14,400 bytes at 50 GB/s; NVLink: 4096 x 6.524 x 7/8 at 430.
    assert [row.split("│")[-2].strip() for row in text.splitlines() if "combine" in row] == ["1176"]
    text = said(capsys, "ep-model", "--nodes", "1", "--tokens", "8192")
    assert "943,718,400" in text


def test_ep_model_simulates_and_draws(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "traffic.svg"
    words = ("--simulate", "--tokens", "64", "--skew", "2", "--plot", str(picture))
    text = said(capsys, "ep-model", *words)
    shares = {
        row.split("│")[1].strip(): float(row.split("│")[-2]) for row in text.splitlines()
        if any(f"│ {name} " in row for name in ("tokens", "received"))
    }  # fmt: skip
    assert shares["tokens"] == 1.0
    assert 1.6 < shares["received"] < 2.1  # twice the others, a little less than twice the average
    drawn = picture.read_text()
    assert drawn.lstrip().startswith("<?xml")
    assert len(drawn) > 10_000


def test_a_picture_that_cannot_be_drawn_is_refused_first(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    for words in (("ep-model", "--simulate", "--plot", "x.png"), ("bench", "--plot")):
        assert cli.main(words) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert "--plot needs matplotlib: pip install 'moe-tile-kernels[bench]'" in captured.err


def test_ep_model_errors(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "ep-model", "--experts", "100", status=2)
    assert "--experts must be a multiple of the 16 ranks and at least --topk, got 100" in text
    assert "--topk must be at least 1" in said(capsys, "ep-model", "--topk", "0", status=2)
    assert "need --simulate" in said(capsys, "ep-model", "--plot", "x.png", status=2)
    text = said(capsys, "ep-model", "--rdma-gbs", "0", status=2)
    assert "rdma_gbs must be positive and finite for 2 nodes, got 0" in text
    for wrong in ("nan", "inf"):
        text = said(capsys, "ep-model", "--rdma-gbs", wrong, status=2)
        assert f"rdma_gbs must be positive and finite for 2 nodes, got {wrong}" in text
        text = said(capsys, "ep-model", "--nvlink-gbs", wrong, status=2)
        assert f"nvlink_gbs must be positive and finite, got {wrong}" in text
        text = said(capsys, "ep-model", "--simulate", "--skew", wrong, status=2)
        assert f"--skew must be a positive number, got {wrong}" in text
