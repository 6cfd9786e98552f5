"""`python -m benchmarks`: its parts, their order, and runs that fail or take too long."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from benchmarks import __main__ as benchmarks
from benchmarks import rivals, tilekernels
from benchmarks.foreign import Case, Package

FOLDER = benchmarks.ROOT / "benchmarks"


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Parts that are scripts of a few lines, in a folder for their results."""
    bodies = {
        "writes": (
            "import json, sys\n"
            "content = {'machine': {'date': '2026-11-02 00:00 UTC'}}\n"
            "open(sys.argv[1], 'w').write(json.dumps(content))\n"
        ),
        "fails": "raise SystemExit(3)\n",
        "hangs": "import time\ntime.sleep(60)\n",
    }
    parts = {}
    for name, body in bodies.items():
        (tmp_path / f"{name}.py").write_text(body)
        results = f"{name}.{{device}}.json"
        parts[name] = benchmarks.Part(name, results, name, ("{results}",), needs_gpu=False)
    monkeypatch.setattr(benchmarks, "ROOT", tmp_path)
    monkeypatch.setattr(benchmarks, "PARTS", parts)
    return tmp_path


def test_parts_are_scripts_that_exist() -> None:
    for part in benchmarks.PARTS.values():
        assert importlib.util.find_spec(part.module) is not None, part.module


def test_results_belong_to_parts() -> None:
    """Results of a GPU that are in the repository are those of a part."""
    device = "nvidia-h200"
    known = {part.results.format(device=device) for part in benchmarks.PARTS.values()}
    found = {path.name for path in (FOLDER / "results").glob(f"*{device}*")}
    # Layers that were measured alone have files of their own; the sanitizer gives no times.
    apart = {name for name in found if name.startswith(("layers_", "sanitizer."))}
    assert found - apart <= known


def test_oldest_results_come_first(scripts: Path) -> None:
    device = benchmarks.device_of(benchmarks.PARTS["writes"])
    for name, day in (("writes", 3), ("hangs", 2)):
        content = {"machine": {"date": f"2026-11-0{day} 00:00 UTC"}}
        (scripts / f"{name}.{device}.json").write_text(json.dumps(content))
    assert benchmarks.order(["writes", "hangs", "fails"], scripts) == ["fails", "hangs", "writes"]


def test_a_part_that_fails_does_not_stop_the_others(
    scripts: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert benchmarks.run(["fails", "writes"], scripts, None) == 1
    text = capfd.readouterr().out
    assert "failed with status 3" in text
    assert "[2/2] writes" in text
    assert set(benchmarks.durations(scripts)) == {"writes"}
    device = benchmarks.device_of(benchmarks.PARTS["writes"])
    assert benchmarks.dates(scripts / f"writes.{device}.json") == ["2026-11-02 00:00 UTC"]


def test_the_time_limit(scripts: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (scripts / benchmarks.DURATIONS).write_text(json.dumps({"writes": 100.0}))
    assert benchmarks.run(["writes", "hangs", "fails"], scripts, 1 / 60) == 1
    text = capfd.readouterr().out
    assert "not started: 1 s left, needs 100 s" in text
    assert "ended: the time was over" in text
    assert "not started: 0 s left" in text


def test_rivals_that_a_run_did_not_reach_are_in_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rivals.timing, "copy_bandwidth", lambda: 1.0)
    words = ["rivals", "topk_gate", "swiglu", "--seconds", "-1", "--folder", str(tmp_path)]
    monkeypatch.setattr("sys.argv", words)
    monkeypatch.setattr("torch._inductor.config.compile_threads", 1)  # which main sets
    precision = torch.get_float32_matmul_precision()
    try:
        rivals.main()
    finally:
        torch.set_float32_matmul_precision(precision)
    (path,) = tmp_path.glob("rivals.*.json")
    content = json.loads(path.read_text())
    assert (content["left_out"], content["results"]) == (["topk_gate", "swiglu"], {})


# ---- DeepSeek's TileKernels ----------------------------------------------------------------------

PACKAGE = """
import torch

class Config:
    amax = 1.0

def topk_gate(scores, num_topk):
    return torch.topk(scores, num_topk).indices

def normalize_weight(topk_weights):
    return topk_weights.sum(1), topk_weights

def aux_fi(topk_idx, num_experts, num_aux_topk):
    assert False, "never"

def group_count(group_idx, num_groups):
    import os
    os._exit(3)
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder with a package of TileKernels' name, one of whose functions is right."""
    folder = tmp_path / "installed"
    (folder / "tile_kernels-1.7.0.dist-info").mkdir(parents=True)
    (folder / "tile_kernels").mkdir()
    (folder / "tile_kernels" / "__init__.py").write_text("")
    (folder / "tile_kernels" / "moe.py").write_text(PACKAGE)
    return folder


def test_both_packages_in_one_run(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU, theirs on the emulated device; reasons where there is no result."""
    monkeypatch.setattr(tilekernels.torch.cuda, "is_available", lambda: False)
    cases = [
        f"moe.{name}"
        for name in (
            "topk_gate.256.8", "normalize_weight.32768x8", "aux_fi.32768x8.32",
            "group_count.32768x8.32", "top2_sum_gate.sigmoid.8g4.256.8",
        )
    ]  # fmt: skip
    words = [f"--installed={package}", f"--installed={tmp_path / 'none'}", f"--folder={tmp_path}"]
    monkeypatch.setattr("sys.argv", ["tilekernels", *words, *cases])
    assert tilekernels.main() == 0
    (path,) = tmp_path.glob("tilekernels*.json")
    report = json.loads(path.read_text())
    assert set(report["packages"]) == {"1.7.0", "none"}
    assert "no tile-kernels is installed" in report["packages"]["none"]["error"]
    results = report["results"]["1.7.0"]
    assert set(results) == set(cases[:-1])  # it has no function for the last
    assert results[cases[0]]["results"] == "exact"
    assert "of 762 differ" in results[cases[1]]["results"]
    assert results[cases[2]]["error"] == "not accepted: AssertionError: never (moe.py, line 14)"
    assert results[cases[3]]["error"] == "other error: the process ended with status 3"
    monkeypatch.setattr("sys.argv", ["tilekernels", *words, "--seconds=-1", cases[0]])
    assert tilekernels.main() == 0
    (path,) = tmp_path.glob(f"tilekernels_{cases[0]}.*.json")  # some cases: their own file
    assert json.loads(path.read_text())["left_out"] == [f"1.7.0: {cases[0]}"]


def test_preparing_starts_processes_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with a share of the cases, which it prepares itself."""
    started: list[list[str]] = []

    class Process:
        def __init__(self, command: list[str]) -> None:
            started.append(command)

        def wait(self) -> None: ...

    monkeypatch.setattr(tilekernels.preparation.subprocess, "Popen", Process)
    cases = list(tilekernels.planned("1", False))[: tilekernels.AT_ONCE + 2]
    words = ["--prepare", f"--installed={tmp_path}"]
    monkeypatch.setattr("sys.argv", ["tilekernels", *words, *cases])
    assert tilekernels.main() == 0
    assert len(started) == tilekernels.AT_ONCE
    assert sorted(w for command in started for w in command if w in cases) == sorted(cases)
    for command in started.copy():
        monkeypatch.setattr("sys.argv", ["tilekernels", *command[command.index("--prepare") :]])
        assert tilekernels.main() == 0
    assert len(started) == tilekernels.AT_ONCE


def test_a_run_without_the_package_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["tilekernels", f"--installed={tmp_path / 'none'}", f"--folder={tmp_path}"]
    monkeypatch.setattr("sys.argv", words)
    assert tilekernels.main() == 1
    assert not list(tmp_path.iterdir())


def test_their_time_is_measured_in_their_process(package: Path) -> None:
    """On the emulated device, whose events count the host's time."""
    asked = Package(package, emulated=True)
    try:
        answer = asked.ask(
            Case("moe.topk_gate", "", {"scores": torch.rand(3, 8), "num_topk": 2}), measure=True
        )
    finally:
        asked.end()
    assert answer.outcome == "ran", answer.value
    assert answer.us is not None
    assert answer.us > 0


@pytest.mark.parametrize("gpu", [False, True])
def test_cases_of_the_earlier_run_are_measured(gpu: bool) -> None:
    """All that are listed, first, and before any tensor is made."""
    listed = json.loads(tilekernels.LISTED.read_text())["us"]
    assert list(tilekernels.planned("1", gpu))[: len(listed)] == list(listed)


def test_unknown_parts_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        benchmarks.main(["run", "nonsense"])
    assert "PART must be one of operators" in capsys.readouterr().err
