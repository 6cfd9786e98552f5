"""The command line, as a user types it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import tile_kernels
from tests.requirements import needs_nvcc
from tile_kernels import cli
from tile_kernels.runtime import logs
from tile_kernels.runtime import op as ops
from tile_kernels.testing import benchmark


def said(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> str:
    assert cli.main(words) == status
    captured = capsys.readouterr()
    return captured.err if status == 2 else captured.out


def test_info(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "info")
    assert tile_kernels.__version__ in text
    assert torch.__version__ in text


def test_ops_lists_the_registry(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "ops")
    assert "moe.topk_gate" in text
    assert "(scores: Tensor, num_topk: int) -> Tensor" in text
    assert "moe.topk_gate" not in said(capsys, "ops", "transpose")
    assert "no family or operator 'nothing'; there are" in said(capsys, "ops", "nothing", status=2)


def test_check_on_the_oracles(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "check", "transpose.transpose", "--backend", "torch")
    assert "cases passed" in text


def test_check_reports_a_wrong_result(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tile_kernels.transpose import batched

    monkeypatch.setattr(batched, "_launch", lambda _x, out, *_: out.zero_())
    assert cli.main(["check", "transpose.transpose", "--backend", "emulate"]) == 1
    captured = capsys.readouterr()
    assert "cases failed" in captured.out
    assert "transpose.transpose 64i+j: AssertionError: contents differ" in captured.err


def test_what_cannot_be_done_is_a_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    words = ("check", "--backend", "tilelang")
    assert "needs a CUDA device, and there is none" in said(capsys, *words, status=2)
    words = ("source", "transpose.transpose", "x=complex128[4,4]")
    assert "x must have elements of 1, 2, 4 or 8 bytes" in said(capsys, *words, status=2)
    words = ("source", "moe.topk_gate", "num_topk=4")
    assert "missing a required argument: 'scores'" in said(capsys, *words, status=2)
    assert "directory" in said(capsys, "check", "--replay", str(tmp_path), status=2)


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
    refused = said(capsys, "source", "moe.nothing", status=2)
    assert "moe.topk_gate" in refused
    assert "._" not in refused


def test_replay_of_a_dumped_call(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(logs.settings, "folder", tmp_path)
    path = logs.dump("moe.topk_gate", {"scores": torch.randn(3, 8), "num_topk": 2})
    assert "equal to the oracle" in said(capsys, "check", "--replay", str(path))
    declared = ops.get("moe.topk_gate")
    wrong = replace(declared, oracle=lambda **_: torch.full((3, 2), 9))
    monkeypatch.setattr(ops, "get", lambda _: wrong)
    assert "contents differ in 6 of 6" in said(capsys, "check", "--replay", str(path), status=1)


def test_source(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("source", "moe.topk_gate", "scores=float32[64,48]", "num_topk=4", "--arch", "sm_80")
    text = said(capsys, *words)
    assert "// topk_gate_warp(48, 4" in text
    assert "for sm_80" in text
    assert "__global__" in text
    wrong = said(capsys, "source", "moe.topk_gate", "topk=4", status=2)
    assert "'topk=4' is not NAME=VALUE with a name out of scores, num_topk" in wrong


def test_source_emulated_and_kept(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ("source", "moe.topk_gate", "scores=float32[5,48]", "num_topk=4", "--emulate")
    text = said(capsys, *words, "--keep", str(tmp_path))
    assert "scores: 960 bytes read (960 distinct)" in text
    assert "topk_idx: 0 bytes read (0 distinct), 160 written (160 distinct)" in text
    script = tmp_path / "topk_gate_warp" / "debug.sh"
    assert f"step through it: {script}" in text
    assert script.exists()
    assert "--keep goes with --emulate" in said(
        capsys, "source", "moe.topk_gate", "--keep", str(tmp_path), status=2
    )


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


def test_ep_model_errors(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "ep-model", "--experts", "100", status=2)
    assert "--experts must be a multiple of the 16 ranks and at least --topk, got 100" in text
    assert "--topk must be at least 1" in said(capsys, "ep-model", "--topk", "0", status=2)
    assert "go with --simulate" in said(capsys, "ep-model", "--plot", "x.png", status=2)
    text = said(capsys, "ep-model", "--rdma-gbs", "0", status=2)
    assert "rdma_gbs must be positive and finite for 2 nodes, got 0" in text
    for wrong in ("nan", "inf"):
        text = said(capsys, "ep-model", "--rdma-gbs", wrong, status=2)
        assert f"rdma_gbs must be positive and finite for 2 nodes, got {wrong}" in text
        text = said(capsys, "ep-model", "--nvlink-gbs", wrong, status=2)
        assert f"nvlink_gbs must be positive and finite, got {wrong}" in text
        text = said(capsys, "ep-model", "--simulate", "--skew", wrong, status=2)
        assert f"--skew must be a positive number, got {wrong}" in text
