"""Run other people's scripts and test files on the emulator, in a child process with limits.

    $ tile-kernels emulate script.py --size 256
    $ python -m tile_kernels.emulator script.py --size 256
    $ python -m tile_kernels.emulator -m package.module --size 256

The script runs unmodified: see `jit.emulated_tilelang`. The child has a time limit, which is
reported with the position of the running kernel, and a memory limit.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib.util
import os
import re
import runpy
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from .errors import EmulationError

_PACKAGE = __name__.rpartition(".")[0]
_CHILD = "TILE_KERNELS_EMULATE_CHILD"  # set in the child's environment
_GRACE_SECONDS = 20.0  # from the child's time limit, which it reports, to the parent's, which kills
_POLL_SECONDS = 0.2

# Exit states beside 0 and the script's own.
FAILED = 1  # a kernel failed
TIMED_OUT = 124  # as timeout(1) has it
OUT_OF_MEMORY = 137
INTERRUPTED = 130


def _architecture(text: str) -> str:
    if not re.fullmatch(r"sm_\d{2,3}[a-f]?", text):
        raise argparse.ArgumentTypeError(f"expected an architecture such as sm_90a, got {text!r}")
    return text


def _at_least(least: float, kind: type) -> Callable[[str], Any]:
    """A number of a kind, for an option that takes no smaller ones."""

    def number(text: str) -> Any:
        with contextlib.suppress(ValueError):
            if (value := kind(text)) >= least:
                return value
        name = "an integer" if kind is int else "a number"
        raise argparse.ArgumentTypeError(f"expected {name} of at least {least}, got {text!r}")

    return number


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `emulate`, the script, and the script's own arguments."""
    parser.add_argument("--mode", choices=("check", "fast"), default="check",
                        help="check every access (default), or results only")  # fmt: skip
    parser.add_argument("--arch", type=_architecture, default="sm_90a", metavar="SM",
                        help="architecture that the script finds (default: sm_90a)")  # fmt: skip
    parser.add_argument("--order", choices=("forward", "reverse", "random"), default="forward",
                        help="order in which threads and blocks run")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the random order")
    text = "TileLang's placement of shared buffers, which shows hazards of reused memory"
    parser.add_argument("--merged-shared", action="store_true", help=text)
    text = "the autotuner's configuration to use (default: the first that compiles)"
    parser.add_argument("--config", type=_at_least(0, int), metavar="N", help=text)
    text = "multiprocessors that the device reports"
    parser.add_argument("--sms", type=_at_least(1, int), metavar="N", help=text)
    text = "leave source, inputs and a gdb script of each kernel there"
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help=text)
    text = "write a page about a failure: the kernel's source, both accesses, barriers, memory"
    parser.add_argument("--report", choices=("html",), help=text)
    parser.add_argument("--reports", action="store_true", help="print what each launch did")
    text = "seconds after which the script is stopped (default: 600; 0: never)"
    parser.add_argument("--time-limit", type=_at_least(0, float), default=600.0, metavar="S",
                        help=text)  # fmt: skip
    text = "gigabytes of memory after which it is stopped (default: 3/4 of the machine's)"
    parser.add_argument("--memory-limit", type=_at_least(0.1, float), metavar="GB",
                        help=text)  # fmt: skip
    text = "`script` is a module, which runs as by `python -m`"
    parser.add_argument("-m", dest="module", action="store_true", help=text)
    parser.add_argument("script", type=Path, help="a Python script, or a pytest file")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...",
                        help="the script's own arguments")  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m tile_kernels.emulator`."""
    parser = argparse.ArgumentParser(
        prog="python -m tile_kernels.emulator",
        description="Run a TileLang script or test file on the CPU, every memory access checked.",
        allow_abbrev=False,  # an abbreviation might be the script's option
    )
    add_arguments(parser)
    given = list(sys.argv[1:] if arguments is None else arguments)
    return run(parser.parse_args(given))


def run(options: argparse.Namespace) -> int:
    """Run the script of parsed `options`; the result is the exit status."""
    if not options.module and not options.script.is_file():
        raise FileNotFoundError(f"script: {options.script} is not a file")
    if os.environ.get(_CHILD):
        return _run_here(options)
    return _supervise(options)


# ---- the parent ---------------------------------------------------------------------------------


def _command(options: argparse.Namespace) -> list[str]:
    flags = [f"--mode={options.mode}", f"--arch={options.arch}", f"--order={options.order}",
             f"--seed={options.seed}", f"--time-limit={options.time_limit}"]  # fmt: skip
    flags += ["--merged-shared"] * options.merged_shared + ["--reports"] * options.reports
    for name in ("config", "sms", "keep", "report"):
        value = getattr(options, name)
        if value is not None:
            flags.append(f"--{name}={value}")
    script = [*["-m"] * options.module, str(options.script), *options.arguments]
    return [sys.executable, "-m", _PACKAGE, *flags, *script]


def _supervise(options: argparse.Namespace) -> int:
    """Run the child and stop it where it exceeds a limit."""
    package_root = str(Path(__file__).parents[_PACKAGE.count(".") + 1])
    path = os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, _CHILD: "1", "PYTHONPATH": path}
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    signal.signal(signal.SIGTERM, _end)
    # A separate session, so that the script's own processes end with it.
    child = subprocess.Popen(_command(options), env=environment, start_new_session=True)
    limit_bytes = _memory_limit(options.memory_limit)
    deadline = (
        time.monotonic() + options.time_limit + _GRACE_SECONDS if options.time_limit else None
    )
    try:
        while True:
            try:
                status = child.wait(_POLL_SECONDS)
            except subprocess.TimeoutExpired:
                problem = _exceeded(child.pid, limit_bytes, deadline, options)
                if problem is None:
                    continue
                _say(problem[0])
                _stop(child)
                return problem[1]
            return status if status >= 0 else 128 - status
    except KeyboardInterrupt:
        child.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(5)
        return INTERRUPTED
    finally:
        _stop(child)


def _end(_signal: int, _frame: Any) -> None:
    raise SystemExit(128 + signal.SIGTERM)


def _exceeded(
    pid: int, limit_bytes: int, deadline: float | None, options: argparse.Namespace
) -> tuple[str, int] | None:
    """A sentence and the exit status, if the child has exceeded a limit."""
    used = _resident_bytes(pid)
    if used > limit_bytes:
        text = (
            f"the script was stopped: it uses {used / 1e9:.1f} GB, the limit is "
            f"{limit_bytes / 1e9:.1f} GB (--memory-limit; fast mode needs less, smaller sizes too)"
        )
        return text, OUT_OF_MEMORY
    if deadline is not None and time.monotonic() > deadline:
        return f"the script was stopped after {options.time_limit:g} s (--time-limit)", TIMED_OUT
    return None


def _memory_limit(gigabytes: float | None) -> int:
    if gigabytes is not None:
        return int(gigabytes * 1e9)
    total = re.search(r"MemTotal:\s+(\d+)", Path("/proc/meminfo").read_text())
    return int(total[1]) * 1024 * 3 // 4 if total else sys.maxsize


def _resident_bytes(session: int) -> int:
    """Memory of all processes of a session."""
    page, total = os.sysconf("SC_PAGE_SIZE"), 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session:
                total += int(fields[21]) * page
    return total


def _stop(child: subprocess.Popen[Any]) -> None:
    """End the child and the processes that it has started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _say(text: str) -> None:
    sys.stdout.flush()
    print(f"emulator: {text}", file=sys.stderr, flush=True)


# ---- the child ----------------------------------------------------------------------------------


class TimeLimitError(Exception):
    """The time limit was reached outside of any kernel."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise after so many seconds; a running kernel ends with its position (runtime.cpp)."""

    def stop(_signal: int, _frame: Any) -> None:
        raise TimeLimitError(f"the time limit of {seconds:g} s was reached (--time-limit)")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _settings(options: argparse.Namespace) -> Any:
    from .jit import Settings

    return Settings(
        mode=options.mode,
        arch=options.arch,
        order=options.order,
        seed=options.seed,
        split_shared=not options.merged_shared,
        config=options.config,
        num_sms=options.sms,
        keep=options.keep,
        show_reports=options.reports,
        report=options.report,
    )


def _run_here(options: argparse.Namespace) -> int:
    """Run the script in this process, which nothing else uses."""
    from .jit import emulated_tilelang

    os.environ.pop(_CHILD)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    status: int
    with emulated_tilelang(_settings(options)) as session:
        try:
            with time_limit(options.time_limit):
                status = _execute(options)
        except KeyboardInterrupt:
            _say("interrupted")
            status = INTERRUPTED
        except TimeLimitError as error:
            _print_script_traceback(error, _script_file(options))
            status = TIMED_OUT
        except EmulationError as error:
            _print_script_traceback(error, _script_file(options))
            status = TIMED_OUT if error.kind == "timeout" else FAILED
        except Exception as error:
            _print_script_traceback(error, _script_file(options))
            status = FAILED
        _say(session.summary())
    sys.stdout.flush()
    if session.failures and status == 0:
        _say(f"a failure that the script did not report: {session.failures[0]}")
        status = FAILED
    return status


def _execute(options: argparse.Namespace) -> int:
    script, arguments = options.script, options.arguments
    sys.argv = [str(script), *arguments]
    if not options.module:
        sys.path[0:0] = [str(script.parent.absolute())]
        if _is_test_file(script):
            import pytest

            return int(pytest.main(["-p", "no:cacheprovider", str(script), *arguments]))
    try:
        if options.module:
            runpy.run_module(str(script), run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(str(script), run_name="__main__")
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
            return 1
        return ended.code or 0
    return 0


def _script_file(options: argparse.Namespace) -> Path:
    """The file that was run; of a module that has none, its name."""
    script: Path = options.script
    if options.module:
        with contextlib.suppress(ImportError):
            spec = importlib.util.find_spec(str(script))
            if spec and spec.submodule_search_locations is not None:
                spec = importlib.util.find_spec(f"{script}.__main__")
            if spec and spec.origin:
                return Path(spec.origin)
    return script


def _is_test_file(script: Path) -> bool:
    """Whether a file has tests and nothing that runs them."""
    if not re.fullmatch(r"test_.*|.*_test", script.stem):
        return False
    body = ast.parse(script.read_text()).body
    runs_itself = any(isinstance(n, ast.If) and "__name__" in ast.dump(n.test) for n in body)
    return not runs_itself


def _print_script_traceback(error: BaseException, script: Path) -> None:
    """The frames of the script and what it imports, without those of the machinery around it."""
    own = str(Path(__file__).parent)
    frames = traceback.extract_tb(error.__traceback__)
    first = next((i for i, f in enumerate(frames) if Path(f.filename) == script.absolute()), None)
    if first is None:
        first = next((i for i, f in enumerate(frames) if Path(f.filename).name == script.name), 0)
    kept = [f for f in frames[first:] if not f.filename.startswith(own)]
    sys.stdout.flush()
    print("Traceback (most recent call last):", file=sys.stderr)
    print("".join(traceback.format_list(kept)), end="", file=sys.stderr)
    print("".join(traceback.format_exception_only(error)), end="", file=sys.stderr, flush=True)
