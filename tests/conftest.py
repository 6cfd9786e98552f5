"""What tests of several families share."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tile_kernels.runtime import registry
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
        "compiled: compiles kernels with nvcc",
        "multiprocess: starts other processes",
        "slow: takes seconds for another reason",
    ):
        config.addinivalue_line("markers", line)


# Test files by marker, where all of their tests are of that kind.
_MARKED_FILES = {
    "emulated": ("tests/emulator/", "tests/runtime/test_emulation.py"),
    "multiprocess": (
        "tests/ep/test_processes.py",
        "tests/ep/test_failures.py",
        "tests/test_install.py",
    ),
    "slow": ("tests/examples/", "tests/test_docs.py"),
}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        for marker, paths in _MARKED_FILES.items():
            if any(path in item.path.as_posix() for path in paths):
                item.add_marker(marker)
    _select_operator(config, items)


def _select_operator(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`--op`: the op suite for this operator, and the test file named like its folder."""
    name = config.getoption("--op")
    if name is None:
        return
    op = registry.get(name)
    folder = op.function.__module__.split(".")[-2]
    file = f"{op.family}/test_{folder}.py"
    kept, others = [], []
    for item in items:
        of_operator = name in re.split(r"[\[\]-]", item.name)
        kept_item = of_operator or item.path.as_posix().endswith(file)
        (kept if kept_item else others).append(item)
    config.hook.pytest_deselected(items=others)
    items[:] = kept


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
