"""What tests of several families share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tile_kernels.testing.bench import dtype_to_str
from tile_kernels.testing.numeric import count_bytes

pytest_plugins = ["tile_kernels.testing.pytest_plugin", "pytester"]


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
