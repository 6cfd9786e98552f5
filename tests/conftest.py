"""Options and markers of the tests, and what tests of several families share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import selection
from tests.requirements import NEEDS_NVCC
from tile_kernels.runtime.operator import Operator
from tile_kernels.testing.bench import dtype_to_str
from tile_kernels.testing.numeric import count_bytes

pytest_plugins = ["tile_kernels.testing.pytest_plugin", "pytester"]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tile_kernels")
    group.addoption("--full", action="store_true", help="every sample and every architecture")
    group.addoption("--op", metavar="FAMILY.NAME", help="only the tests of one operator")


def pytest_configure(config: pytest.Config) -> None:
    for line in (
        "emulated: runs kernels on the CPU; seconds each where the cache of compiled ones is cold",
        "compiled: lowers kernels to CUDA, or compiles them with nvcc",
        "multiprocess: starts other processes",
        "slow: takes seconds for another reason",
        "full: repeats what other tests show, for more cases; runs with --full or on a GPU",
    ):
        config.addinivalue_line("markers", line)
    selection.select(config.getoption("--op"))
    if hasattr(config, "workerinput"):  # of pytest-xdist: workers, not threads, share the cores
        torch.set_num_threads(1)
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # of processes that tests start


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`--op`: files that cannot have a test of the operator are not even imported."""
    name = config.getoption("--op")
    if name is None or collection_path.suffix != ".py" or collection_path.name == "conftest.py":
        return None
    return None if selection.may_test(collection_path, name) else True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        for marker in markers_of(item):
            item.add_marker(marker)
    if not config.getoption("--full"):
        _keep(config, items, lambda item: not is_long(item))
    name = config.getoption("--op")
    if name is not None:
        _keep(config, items, lambda item: selection.tests(item, name))
    # Thousands of tests: leaving them out is much faster than skipping them one by one. Whoever
    # asks for them by their marker sees why they are skipped.
    if not torch.cuda.is_available() and "gpu" not in config.getoption("-m"):
        _keep(config, items, lambda item: item.get_closest_marker("gpu") is None)
    items.sort(key=operator_of)


def operator_of(item: pytest.Item) -> str:
    """The operator that a test of all operators is called with, or nothing.

    Those of one operator run one after the other: with several processes, one of them builds its
    kernels and the others do not.
    """
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    for value in parameters.values():
        op = value[0] if isinstance(value, tuple) and value else value
        if isinstance(op, Operator):
            return op.name
    return ""


def _keep(
    config: pytest.Config, items: list[pytest.Item], kept: Callable[[pytest.Item], bool]
) -> None:
    """Deselect all other tests."""
    others = [item for item in items if not kept(item)]
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if kept(item)]


def is_long(item: pytest.Item) -> bool:
    """Whether a test runs with `--full` alone; on a GPU it always runs."""
    has = item.get_closest_marker
    return has("full") is not None and has("gpu") is None


# Test files by marker, where all of their tests are of that kind.
_MARKED_FILES = {
    "emulated": ("tests/emulator/", "tests/runtime/test_emulation.py"),
    "multiprocess": ("tests/test_install.py",),
    "slow": ("tests/examples/", "tests/test_docs.py"),
}
# Functions that start processes.
_STARTS_PROCESSES = {"run_processes", "run_fresh", "subprocess"}


def markers_of(item: pytest.Item) -> Iterator[str]:
    """The markers that follow from where a test is and from what it calls."""
    path = item.path.as_posix()
    for marker, paths in _MARKED_FILES.items():
        if any(part in path for part in paths):
            yield marker
    if any(mark.kwargs.get("reason") == NEEDS_NVCC for mark in item.iter_markers("skipif")):
        yield "compiled"
    if not isinstance(item, pytest.Function):
        return
    code = item.function.__code__
    if _STARTS_PROCESSES & set(code.co_names):
        yield "multiprocess"
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    backend = parameters.get("backend", parameters.get("ground", None))
    if backend in ("collective", "mmap"):  # engines between processes
        yield "multiprocess"
    if backend is None:
        emulates = "emulate" in code.co_consts  # `with tile_kernels.backend("emulate")`
    else:
        emulates = backend == "emulate" or backend[0] == "emulate"
    if emulates:
        yield "emulated"


@pytest.fixture
def record_time(benchmark_timer: Any, benchmark_record: Any) -> Callable[..., None]:
    """`record(op, params, x, *others)`: the time of a call; the bytes of `x` and the result."""

    def record(op: Any, params: dict[str, Any], x: torch.Tensor, *others: Any) -> None:
        time_us = benchmark_timer(lambda: op(x, *others))
        moved = count_bytes(x, op(x, *others))
        benchmark_record(
            kernel=op.__name__,
            operation="fwd",
            params={
                name: dtype_to_str(value) if isinstance(value, torch.dtype) else value
                for name, value in params.items()
            },
            time_us=time_us,
            bandwidth_gbs=moved / time_us / 1e3,
        )

    return record
