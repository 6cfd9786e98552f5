"""The tiny model: it learns, resumes exactly, and its report has its pictures."""

from __future__ import annotations

import copy
import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from examples.tiny_v4 import ablate, report, speed, train
from examples.tiny_v4.model import Config, TinyV4
from examples.tiny_v4.text import Text, corpus
from tile_kernels.runtime.backends import choose

QUIET = Console(quiet=True)
SMALL = ["--hidden", "32", "--layers", "1", "--rows", "2", "--length", "24"]


def run(out: Path, *more: str) -> dict[str, Any]:
    return train.train(train.arguments([*SMALL, "--out", str(out), *more]), QUIET)


def test_text_is_the_same_everywhere() -> None:
    text = corpus(2000)
    assert text == corpus(2000)
    assert text != corpus(2000, seed=1)
    assert len(text) >= 2000
    letters = Text(5000)
    assert letters.decode(letters.encode("The otter")) == "The otter"
    assert torch.equal(letters.batch(3, 0, 2, 8), letters.batch(3, 0, 2, 8))
    assert not torch.equal(letters.batch(3, 0, 2, 8), letters.batch(4, 0, 2, 8))
    assert 2.5 < letters.unigram_entropy() < 3.3


def test_learns_and_reports(tmp_path: Path) -> None:
    result = run(tmp_path, "--steps", "40", "--rows", "4", "--length", "48")
    assert result["losses"][-1] < 2.2 < result["unigram"] < result["losses"][0]
    path = report.write_report(result, tmp_path / "report.html")
    page = path.read_text()
    for heading in ("Loss", "Load of the experts", "How streams are mixed", "What the memory adds"):
        assert f"<h2>{heading}</h2><figure><svg" in page
    assert page.count("</svg>") == 4
    assert "http" not in page.replace("http://www.w3.org", "").replace(
        "http://purl.org", ""
    ).replace("http://creativecommons.org", "").replace(
        "https://matplotlib.org", ""
    )  # names of formats, and who made the pictures
    assert len(result["sample"]) == 164


def test_numbers_are_written_with_their_machine(tmp_path: Path) -> None:
    options = train.arguments([*SMALL, "--out", str(tmp_path), "--steps", "2"])
    result = train.train(options, QUIET)
    numbers = json.loads(train.write_numbers(result, options).read_text())
    assert numbers["losses"] == result["losses"]
    assert {"device", "torch", "date"} <= numbers["machine"].keys()
    assert numbers["options"]["rows"] == "2"


def test_reproducible_by_seed(tmp_path: Path) -> None:
    whole = run(tmp_path / "one", "--steps", "4")["losses"]
    assert run(tmp_path / "two", "--steps", "4")["losses"] == whole
    assert run(tmp_path / "three", "--steps", "4", "--seed", "1")["losses"] != whole


def test_a_signal_stops_a_run_that_can_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted by a signal and resumed, the losses are those of a run that was not."""
    whole = run(tmp_path / "whole", "--steps", "9")["losses"]
    steps = []

    def loss_of(model: TinyV4, token_ids: torch.Tensor) -> torch.Tensor:
        steps.append(1)
        if len(steps) == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(model, token_ids)

    original = train.loss_of
    assert threading.current_thread() is threading.main_thread()
    monkeypatch.setattr(train, "loss_of", loss_of)
    with pytest.raises(SystemExit) as stopped:
        run(tmp_path / "parts", "--steps", "9")
    assert stopped.value.code == 128 + signal.SIGTERM
    monkeypatch.setattr(train, "loss_of", original)
    parts = run(tmp_path / "parts", "--steps", "9", "--resume")["losses"]
    assert parts == whole


def test_parts_can_be_left_out(tmp_path: Path) -> None:
    found = ablate.losses(2, tmp_path, *SMALL)
    assert list(found) == list(ablate.VARIANTS)
    assert len(set(found.values())) == len(found)
    assert all(0 < loss < 6 for loss in found.values())


def test_speed_of_each_way() -> None:
    """Both ways train the same model, and the plain one runs no kernel, not even backwards."""
    torch.manual_seed(0)
    model = TinyV4(Config(20, hidden=32, layers=1, engram_layers=(0,), fp8=False))
    ids = torch.randint(1, 20, (2, 9))
    found = speed.compare(model, train.loss_of, ids, repeats=1, compiled=False)
    assert list(found) == ["kernels", "plain PyTorch"]
    assert all(value > 0 for value in found.values())
    backends = []
    with speed.plain():
        loss = train.loss_of(model, ids)
        loss.register_hook(lambda _: backends.append(choose(torch.device("cuda"))))
        loss.backward()
    assert backends == ["torch"]


def test_causal() -> None:
    """A letter does not change what was predicted before it."""
    torch.manual_seed(0)
    model = TinyV4(Config(20, hidden=32, layers=1, engram_layers=(0,), fp8=False))
    ids = torch.randint(1, 20, (1, 12))
    other = ids.clone()
    other[0, 7] = ids[0, 7] % 19 + 1
    one, two = model(ids), model(other)
    torch.testing.assert_close(one[:, :7], two[:, :7])
    assert not torch.allclose(one[:, 7:], two[:, 7:])


def gradients(model: TinyV4, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    train.loss_of(model, ids.to(next(model.parameters()).device)).backward()
    named = model.named_parameters()
    return {name: p.grad.cpu().clone() for name, p in named if p.grad is not None}


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return ((one - other).norm() / one.norm().clamp(min=1e-6)).item()


@pytest.mark.gpu
def test_gradients_on_cuda_are_those_on_cpu() -> None:
    """One batch, kernels against oracles.

    Where streams are nearly equal, the gradient of what mixes them is a difference that rounding
    decides: as far off as a change of the parameters by a millionth makes it is near enough.
    """
    torch.manual_seed(0)
    model = TinyV4(Config(20, hidden=64, layers=1, engram_layers=(0,), fp8=False))
    ids = torch.randint(1, 20, (4, 33))
    expected, noise = gradients(model, ids), {}
    parameters = copy.deepcopy(model.state_dict())
    for _ in range(4):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + 1e-6 * torch.randn_like(parameter))
        for name, grad in gradients(model, ids).items():
            noise[name] = max(noise.get(name, 0.0), distance(expected[name], grad))
        model.load_state_dict(parameters)
    found = gradients(model.cuda(), ids)
    assert found.keys() == expected.keys()
    far = {
        name: (error, noise[name])
        for name, grad in expected.items()
        if (error := distance(grad, found[name])) > max(5e-2, 2 * noise[name])
    }
    assert not far
