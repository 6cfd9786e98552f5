"""The tiny model learns with experts in FP8 as it does without."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest
import torch

from benchmarks import fp8_convergence
from benchmarks.fp8_convergence import SIZES, final_losses, run
from examples.tiny_v4 import report, train


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Six runs of about a minute each on a CPU: there only with `--full`."""
    if "device" in metafunc.fixturenames:
        devices = [pytest.param("cuda", marks=pytest.mark.gpu)]
        if metafunc.config.getoption("--full"):
            devices.append("cpu")
        metafunc.parametrize("device", devices)


def test_learns_in_forty_steps(tmp_path: Path) -> None:
    small = ["--steps", "40", "--rows", "4", "--length", "48", "--device", "cpu"]
    found = run(tmp_path / "fp8", "fp8", *small)
    expected = run(tmp_path / "bf16", "bf16", *small)
    assert found["losses"] != expected["losses"]
    assert found["losses"][-1] < 2.0 < found["unigram"] < found["losses"][0]
    last = [statistics.fmean(result["losses"][-10:]) for result in (found, expected)]
    assert last[0] == pytest.approx(last[1], rel=0.05)
    page = report.write_report(found, tmp_path / "report.html").read_text()
    assert "all products in FP8" in page


def test_final_loss_is_that_of_bf16(device: str) -> None:
    """300 steps; the mean over the last 50 and over the seeds, whose own differences are larger."""
    final = {name: statistics.fmean(found) for name, found in final_losses(device).items()}
    assert final["fp8"] == pytest.approx(final["bf16"], rel=0.01)


def test_results_are_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = {"fp8": [1.0, 3.02], "bf16": [1.0, 3.0]}
    monkeypatch.setattr(fp8_convergence, "final_losses", lambda *_: losses)
    saved = json.loads(fp8_convergence.main(["--output", str(tmp_path)]).read_text())
    assert saved["final_loss_by_seed"] == losses
    assert saved["relative_difference"] == pytest.approx(0.005)


@pytest.mark.parametrize("name", ["hidden", "intermediate"])
def test_sizes_that_fp8_products_do_not_take(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        train.arguments([*SIZES, "--precision", "fp8", f"--{name}", "64"])
    assert f"--precision fp8 needs --{name} to be a multiple of 128" in capsys.readouterr().err


def test_dtype_of_the_parameters_does_not_change(tmp_path: Path) -> None:
    """FP8 is how products are computed: checkpoints are the same."""
    options = train.arguments([*SIZES, "--precision", "fp8", "--out", str(tmp_path)])
    model = train.TinyV4(train.config_of(options, 20))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
