"""How `benchmarks/emulator_foreign.py` judges the calls of another package."""

import runpy
from pathlib import Path

import torch

SCRIPT = runpy.run_path(
    str(Path(__file__).parents[2] / "benchmarks" / "emulator_foreign.py"), run_name="script"
)


def test_difference() -> None:
    difference, x = SCRIPT["difference"], torch.tensor([1.0, -0.0, float("nan")])
    assert difference([x], [x.clone()]) == "exact"
    assert difference([x + 1e-6], [x]) == "close"
    assert difference([torch.tensor([1.1])], [torch.tensor([1.0])]).startswith("tensor 0: 1 of 1")
    assert difference([x, x.int()], [x, x.int() + 1]) == "tensor 1: 3 of 3 differ"
    assert "expected torch.float64" in difference([x], [x.double()])
    assert difference([x], []) == "1 tensors, expected 0"


def test_summary() -> None:
    """An operator counts as its worst call."""
    calls = {"a": ["right", "wrong"], "b": ["right"], "c": [], "d": ["reported", "right"]}
    operators = {n: {"calls": [{"outcome": o} for o in ends]} for n, ends in calls.items()}
    found = SCRIPT["summary"](operators)
    assert found["operators"] | {"refused": 0, "other error": 0} == found["operators"]
    assert found["operators"]["called"] == 3
    assert [found["operators"][end] for end in ("right", "wrong", "reported")] == [1, 1, 1]
    assert found["calls"]["right"] == 3
    assert found["not called"] == ["c"]


def test_copies_keep_strides() -> None:
    padded = torch.arange(12).view(3, 4)[:, :3].t()
    copy = SCRIPT["on"]({"x": (padded, 1)}, "cpu")["x"][0]
    assert copy.stride() == padded.stride()
    assert torch.equal(copy, padded)
