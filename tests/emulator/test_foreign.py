"""How the benchmarks of kernels from elsewhere judge what they run."""

import json
import subprocess
import sys
from pathlib import Path

import torch

from benchmarks import foreign
from benchmarks.emulator_foreign import summary

EXAMPLES = Path(__file__).parents[2] / "benchmarks" / "emulator_examples.py"


def test_difference() -> None:
    difference, x = foreign.difference, torch.tensor([1.0, -0.0, float("nan")])
    assert difference([x], [x.clone()]) == "exact"
    assert difference([x + 1e-6], [x]) == "close"
    assert difference([x + 1e-3], [x], 2e-3) == "close"
    assert difference([x + 1e-3], [x]).startswith("tensor 0: 2 of 3")
    assert difference([torch.tensor([1.1])], [torch.tensor([1.0])]).startswith("tensor 0: 1 of 1")
    assert difference([x, x.int()], [x, x.int() + 1]) == "tensor 1: 3 of 3 differ"
    assert "expected torch.float64" in difference([x], [x.double()])
    assert difference([x], []) == "1 tensors, expected 0"
    for size, stride in (((0, 2), (1, 0)), ((9, 1), (1, 12)), ((1, 1), (4, 4))):
        padded = torch.empty_strided(size, stride, dtype=torch.int32)
        assert difference([padded], [padded]) == "exact"


def test_summary() -> None:
    """An operator counts as its worst call."""
    calls = {"a": ["right", "wrong"], "b": ["right"], "c": [], "d": ["reported", "right"]}
    operators = {n: {"calls": [{"outcome": o} for o in ends]} for n, ends in calls.items()}
    found = summary(operators)
    assert found["operators"] | {"refused": 0, "other error": 0} == found["operators"]
    assert found["operators"]["called"] == 3
    assert [found["operators"][end] for end in ("right", "wrong", "reported")] == [1, 1, 1]
    assert found["calls"]["right"] == 3
    assert found["not called"] == ["c"]


def test_copies_keep_strides() -> None:
    padded = torch.arange(12).view(3, 4)[:, :3].t()
    copy = foreign.on({"x": (padded, 1)}, "cpu")["x"][0]
    assert copy.stride() == padded.stride()
    assert torch.equal(copy, padded)


TESTS = """
import os, pytest, tilelang, torch
from tilelang import language as T

def shifted(step):
    @T.prim_func
    def kernel(x: T.Tensor((32,), "float32"), y: T.Tensor((32,), "float32")):
        with T.Kernel(1, threads=32):
            t = T.get_thread_binding()
            y[t // step] = x[t]
    x, y = torch.arange(32.0, device="cuda"), torch.zeros(32, device="cuda")
    tilelang.compile(kernel)(x, y)
    return y

def test_right(): assert shifted(1)[3] == 3
def test_ended(): os._exit(3)
def test_wrong(): assert shifted(1)[3] == 4
def test_reported(): shifted(2)
def test_needs_more(): import flash_attention_for_martians
def test_skipped(): pytest.skip("never")
def test_no_kernel(): pass
"""


def test_ends_of_examples(tmp_path: Path) -> None:
    """A test that ends the process is noted, and those behind it run."""
    (tmp_path / "test_theirs.py").write_text(TESTS)
    output = tmp_path / "results.json"
    command = [sys.executable, str(EXAMPLES), str(tmp_path), f"--json={output}", "--seconds=60"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(output.read_text())
    ends = {
        test.rpartition("::")[2].removeprefix("test_").replace("_", " "): entry["outcome"]
        for test, entry in found["files"]["test_theirs.py"].items()
    }
    assert ends.pop("ended") == "other error"
    assert len(ends) == 6
    assert all(test == outcome for test, outcome in ends.items()), ends
    assert found["summary"]["tests"] == 7
    assert found["summary"]["right"] == 1
