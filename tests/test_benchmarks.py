"""`python -m benchmarks`: its parts, their order, and runs that fail or take too long."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from benchmarks import __main__ as benchmarks
from benchmarks import rivals

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


def test_unknown_parts_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        benchmarks.main(["run", "nonsense"])
    assert "PART must be one of operators" in capsys.readouterr().err
