"""TileLang's own examples on the emulator: the tests of the examples in its source distribution.

    pip download --no-deps --no-binary tilelang tilelang==0.1.14    # and unpack it
    pip install --target FOLDER --no-deps tilelang==0.1.14 apache-tvm-ffi==0.1.12 einops triton
    pip install --target FOLDER --no-deps z3-solver==4.15.4
    python benchmarks/emulator_examples.py SOURCES/examples [--tilelang FOLDER] [--only FILE ...]

Each test runs unmodified in check mode, at the sizes that it has for a GPU, and compares the result
with PyTorch itself. One that exceeds the time limit is too slow, one that needs a missing
package or other kernels than TileLang's needs more. Writes
`benchmarks/results/emulator_examples.json`. Needs no GPU.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "emulator_examples.json"
ARCHITECTURES = ("sm_90a", "sm_89")  # the second for tests that the first one skips
ENDS = ("right", "wrong", "reported", "refused", "too slow", "other error", "skipped",
        "needs more", "no kernel")  # fmt: skip


# ---- the child: one file of tests ---------------------------------------------------------------


class Recorder:
    """A pytest plugin that notes how each test ends, one line of JSON for each."""

    def __init__(self, output: Path, seconds: float, session: Any) -> None:
        self.output, self.seconds, self.session = output, seconds, session

    def note(self, test: str, outcome: str, text: str = "", seconds: float = 0.0) -> None:
        """Append a line."""
        entry = {"test": test, "outcome": outcome, "text": text, "seconds": round(seconds, 1)}
        with self.output.open("a") as file:
            print(json.dumps(entry), file=file)

    @pytest.hookimpl(wrapper=True)
    def pytest_pyfunc_call(self, pyfuncitem: Any) -> Iterator[None]:
        """Run a test under the time limit."""
        from tile_kernels.emulator import EmulationError
        from tile_kernels.emulator.runner import TimeLimitError, time_limit

        self.note(pyfuncitem.nodeid, "started")
        began, launches = time.perf_counter(), self.session.launches
        outcome, text = "right", ""
        try:
            with time_limit(self.seconds):
                return (yield)
        except EmulationError as error:
            kinds = {"unsupported": "refused", "toolchain": "refused", "timeout": "too slow"}
            outcome, text = kinds.get(error.kind, "reported"), error.message.partition("\n")[0]
            if error.python_file:
                text += f" ({Path(error.python_file).name}, line {error.python_line})"
            raise
        except TimeLimitError:
            outcome = "too slow"
            raise
        except pytest.skip.Exception as error:
            outcome, text = "skipped", str(error)
            raise
        except Exception as error:
            outcome, text = _fault(error), f"{type(error).__name__}: {error}"
            raise
        finally:
            if outcome == "right" and self.session.launches == launches:
                outcome = "no kernel"
            self.note(pyfuncitem.nodeid, outcome, text[:1000], time.perf_counter() - began)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Note tests that are skipped before they start."""
        if report.when == "setup" and report.outcome != "passed":
            outcome = "skipped" if report.skipped else "other error"
            self.note(report.nodeid, outcome, report.longreprtext[-1000:])

    def pytest_collectreport(self, report: Any) -> None:
        """Note files that cannot be imported."""
        if report.failed:
            text = report.longreprtext[-1000:]
            missing = "ModuleNotFoundError" in text
            self.note(report.nodeid, "needs more" if missing else "other error", text)


def _fault(error: Exception) -> str:
    """How a test ended."""
    *_, last = traceback.extract_tb(error.__traceback__)
    file = Path(last.filename)
    if isinstance(error, ModuleNotFoundError) or "triton" in file.parts:
        return "needs more"
    if file.name == "cpp_extension.py":  # compiles CUDA for a GPU
        return "needs more"
    return "wrong" if isinstance(error, AssertionError) else "other error"


def child(options: argparse.Namespace) -> None:
    """Run the tests of a file but those that are done."""
    from tile_kernels.emulator.jit import Settings, emulated_tilelang

    command = ["-q", "-p", "no:cacheprovider", "--tb=short", f"--rootdir={options.folder}"]
    command += [f"--deselect={test}" for test in options.done]
    with emulated_tilelang(Settings(arch=options.arch)) as session:
        recorder = Recorder(options.output, options.seconds, session)
        pytest.main([*command, str(options.child)], plugins=[recorder])
        print(session.summary(), flush=True)


# ---- the parent ---------------------------------------------------------------------------------


def run_file(file: Path, options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """How the tests of a file end; the child is started again behind a test that ends it."""
    entries: dict[str, Any] = {}
    for arch in ARCHITECTURES:
        while _run_rest(file, options, scratch, arch, entries):
            pass
        if all(entry["outcome"] != "skipped" for entry in entries.values()):
            break
    return entries


def _run_rest(
    file: Path, options: argparse.Namespace, scratch: Path, arch: str, entries: dict[str, Any]
) -> bool:
    """Run the tests that have no outcome, or were skipped; whether one has ended the child."""
    scratch.write_text("")
    done = [f"--done={test}" for test, entry in entries.items() if entry["outcome"] != "skipped"]
    command = [sys.executable, __file__, str(options.folder), f"--child={file}", *done,
               f"--output={scratch}", f"--seconds={options.seconds}", f"--arch={arch}"]  # fmt: skip
    paths = [str(p) for p in (options.tilelang, ROOT) if p is not None]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    subprocess.run(command, env=environment, cwd=file.parent, check=False)
    died = False
    for line in scratch.read_text().splitlines():
        entry = json.loads(line)
        entries[entry.pop("test")] = {**entry, "arch": arch}
    for entry in entries.values():
        if entry["outcome"] == "started":
            entry.update(outcome="other error", text="the process ended")
            died = True
    return died


def summary(files: dict[str, Any]) -> dict[str, int]:
    """Tests by their ends."""
    ends = Counter(entry["outcome"] for tests in files.values() for entry in tests.values())
    return {"tests": ends.total(), **{end: ends[end] for end in ENDS}}


def main() -> None:
    """Run the tests of the examples and write how they end."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="the folder `examples`")
    parser.add_argument("--tilelang", type=Path, help="where another TileLang is installed")
    parser.add_argument("--only", nargs="+", metavar="FILE", help="run these again, keep the rest")
    parser.add_argument("--seconds", type=float, default=120.0, help="time limit of a test")
    parser.add_argument("--json", type=Path, default=RESULTS, help="file of the results")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--arch", help=argparse.SUPPRESS)
    parser.add_argument("--done", action="append", default=[], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options)
        return
    folder = options.folder = options.folder.absolute()
    options.tilelang = options.tilelang and options.tilelang.absolute()
    path = [str(options.tilelang)] if options.tilelang else sys.path
    (used,) = {d.version for d in importlib.metadata.distributions(name="tilelang", path=path)}
    files: dict[str, Any] = {}
    scratch = options.json.with_suffix(f".{os.getpid()}.part")
    for file in sorted(folder.rglob("test_*.py")):
        name = file.relative_to(folder).as_posix()
        if options.only and name not in options.only:
            continue
        entries = run_file(file, options, scratch)
        if options.only and options.json.exists():  # other runs may have written in the meantime
            files = json.loads(options.json.read_text())["files"]
        files[name] = entries
        run = {
            "tilelang": used,
            "torch": importlib.metadata.version("torch"),
            "seconds": options.seconds,
            "time": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        }
        result = {"run": run, "summary": summary(files), "files": files}
        options.json.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n")
        print(name, {test: entry["outcome"] for test, entry in files[name].items()}, flush=True)
    scratch.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
