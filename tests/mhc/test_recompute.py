"""Recomputation of several layers gives the bits of the chain of operators."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tile_kernels
from tests.mhc.helpers import BF16, grounds
from tile_kernels import mhc
from tile_kernels.runtime import registry
from tile_kernels.runtime.cases import assert_equal_results


@pytest.mark.parametrize(
    ("backend", "device", "reads", "writes", "h"),
    grounds(
        [(3, 2, 40), (12, 12, 8)],
        [(1, 1, 2560), (3, 3, 2560), (10, 9, 4096), (10, 10, 7168), (25, 25, 1280)],
    ),
)
def test_recompute_is_the_chain(backend: str, device: str, reads: int, writes: int, h: int) -> None:
    n, m = (3, 4) if device == "cpu" else (8192, 4)
    torch.manual_seed(5)

    def normal(count: int, *last: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        return [torch.randn(1, n, *last, device=device).to(dtype) for _ in range(count)]

    (first,) = normal(1, m, h, dtype=BF16)
    pre, outputs = normal(reads, m, 1), normal(writes, h, dtype=BF16)
    post, comb = normal(writes, m, 1), normal(writes, m, m)
    reading, residuals = normal(reads, h, dtype=BF16), normal(writes, m, h, dtype=BF16)
    with tile_kernels.backend(backend):
        mhc.mhc_multilayer_recompute(first, pre, outputs, post, comb, reading, residuals)
        residual = first
        for i in range(reads):
            assert torch.equal(reading[i], mhc.mhc_pre_apply_mix(residual, pre[i]))
            if i < writes:
                residual = mhc.mhc_post(outputs[i], residual, post[i], comb[i])
                assert torch.equal(residuals[i], residual)


def test_what_is_written_is_apart_from_what_is_read() -> None:
    first, shared = torch.zeros(1, 2, 8).to(BF16), torch.zeros(1, 8).to(BF16)
    mix, comb = torch.ones(1, 2, 1), torch.ones(1, 2, 2)
    with pytest.raises(
        ValueError, match=r"layer_input_list\[0\] must not share memory with layer_o"
    ):
        mhc.mhc_multilayer_recompute(
            first, [mix], [shared], [mix], [comb], [shared], [torch.zeros_like(first)]
        )


@pytest.mark.parametrize("backend", ["torch", "emulate"])
def test_layers_in_tuples(backend: str) -> None:
    op = registry.get("mhc.mhc_multilayer_recompute")
    given = op.cases.small[0].build("cpu")
    expected = op.cases.small[0].build("cpu")
    op.reference(*expected.values())
    with tile_kernels.backend(backend):
        op.function(**{k: tuple(v) if isinstance(v, list) else v for k, v in given.items()})
    assert_equal_results(list(given.values()), list(expected.values()))
