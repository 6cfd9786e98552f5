"""A run that goes on is the run that was interrupted, or says why it cannot be."""

from __future__ import annotations

import io
import os
import signal
import threading
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file
from torch import Tensor

from examples.tiny_v4 import report, step, train
from examples.tiny_v4.checkpoint import FIXED, ResumeError
from examples.tiny_v4.model import TinyV4
from tests.examples.small import SMALL, run

STEPS = ("--steps", "9")


@pytest.fixture
def interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run that a signal stopped in its fourth step."""
    steps = []

    def loss_of(model: TinyV4, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        steps.append(1)
        if len(steps) == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(model, token_ids)

    original = step.training_loss_of
    assert threading.current_thread() is threading.main_thread()
    monkeypatch.setattr(step, "training_loss_of", loss_of)
    with pytest.raises(SystemExit) as stopped:
        run(tmp_path / "parts", *STEPS)
    assert stopped.value.code == 128 + signal.SIGTERM
    monkeypatch.setattr(step, "training_loss_of", original)
    return tmp_path / "parts"


def test_a_signal_stops_a_run_that_can_go_on(interrupted: Path, tmp_path: Path) -> None:
    """Losses, loads and the whole report are those of a run that nobody stopped."""
    whole = run(tmp_path / "whole", *STEPS)
    parts = run(interrupted, *STEPS, "--resume")
    assert parts["losses"] == whole["losses"]
    assert parts["loads"] == whole["loads"]
    assert len(parts["loads"]) == 9
    time = {"seconds": 1.0, "tokens_per_second": 1.0}
    pages = [
        report.write_report({**result, **time}, tmp_path / name).read_text()
        for name, result in (("whole.html", whole), ("parts.html", parts))
    ]
    assert pages[0] == pages[1]


def test_time_is_that_of_all_steps(interrupted: Path) -> None:
    parts = run(interrupted, *STEPS, "--resume")
    again = run(interrupted, *STEPS, "--resume")  # nothing is left to do
    assert again["losses"] == parts["losses"]
    assert again["seconds"] == parts["seconds"] > 0
    assert again["tokens_per_second"] == pytest.approx(9 * 2 * 24 / parts["seconds"])


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (["--seed", "1"], "--seed was 0, now it is 1"),
        (["--fp8", "off"], "--fp8 was on, now it is off"),
        (["--intermediate", "32"], "--intermediate was 64, now it is 32"),
        (["--attention", "dense"], "--attention was sparse, now it is dense"),
        (["--dense"], "--dense was not given, now it is given"),
        (["--no-engram"], "--no-engram was not given, now it is given"),
        (["--no-mhc"], "--no-mhc was not given, now it is given"),
        (["--hidden", "64"], "--hidden was 32, now it is 64"),
        (["--layers", "2"], "--layers was 1, now it is 2"),
        (["--rows", "3"], "--rows was 2, now it is 3"),
        (["--length", "32"], "--length was 24, now it is 32"),
        (["--learning-rate", "0.1"], "--learning-rate was 0.005, now it is 0.1"),
        (["--seed", "2", "--dense"], "--seed was 0, now it is 2; --dense was not given"),
    ],
    ids=lambda given: given[0] if isinstance(given, list) else "",
)
def test_other_options_are_refused(interrupted: Path, changed: list[str], words: str) -> None:
    with pytest.raises(ResumeError, match="is of another run") as refused:
        run(interrupted, *STEPS, "--resume", *changed)
    assert words in str(refused.value)


def test_every_option_of_a_step_is_compared() -> None:
    """Only where a run is, and how long, may change; a new option must be put on one side."""
    others = {"steps", "out", "every", "resume", "device", "no_emulation"}
    assert set(FIXED) | others == vars(train.arguments([])).keys()


def test_more_steps_are_allowed_and_said(interrupted: Path) -> None:
    options = train.arguments([*SMALL, "--out", str(interrupted), "--steps", "10", "--resume"])
    printed = io.StringIO()
    assert len(train.train(options, Console(file=printed, width=200))["losses"]) == 10
    assert "it was to have 9 steps, not 10" in printed.getvalue()


def test_no_checkpoint_is_an_error_in_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        train.main([*SMALL, "--out", str(tmp_path), "--resume"])
    assert ended.value.code == (
        f"--resume: there is no checkpoint {tmp_path / 'checkpoint.safetensors'}; start without "
        "--resume"
    )
    assert "Traceback" not in capsys.readouterr().err


def test_a_file_that_is_no_checkpoint(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint.safetensors"
    checkpoint.write_bytes(b"not a checkpoint")
    with pytest.raises(ResumeError, match=r"checkpoint\.safetensors cannot be read"):
        run(tmp_path, *STEPS, "--resume")
    save_file({"x": torch.zeros(1)}, checkpoint)
    with pytest.raises(ResumeError, match="does not say which run it is of"):
        run(tmp_path, *STEPS, "--resume")


def test_numbers_of_nothing_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        train.arguments(["--steps", "0"])
    assert "must be at least 1, got 0" in capsys.readouterr().err
