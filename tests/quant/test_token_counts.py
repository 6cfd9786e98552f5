"""A new number of tokens is served by the plan of an earlier call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.runtime.test_operator import evaluated
from tile_kernels import quant
from tile_kernels.runtime import launch

__all__ = ["evaluated"]  # a fixture
WIDTH, TOPK = 256, 2


def index(*shape: int) -> torch.Tensor:
    return torch.full(shape, -1, dtype=torch.int32)


def plain(rows: int) -> torch.Tensor:
    return torch.zeros(rows, WIDTH).bfloat16()


def e4m3(rows: int) -> torch.Tensor:
    return torch.zeros(rows, WIDTH).to(torch.float8_e4m3fn)


CALLS: dict[str, Callable[[int], Any]] = {
    "cast": lambda rows: quant.per_token_cast(plain(rows), "e4m3", 128),
    "packed": lambda rows: quant.per_token_cast(plain(rows), "e2m1", 32, None, True, True, True),
    "again": lambda rows: quant.per_token_cast(
        (e4m3(rows), torch.ones(rows, 2)), "e2m1", 32, (1, 128)
    ),
    "scales": lambda rows: quant.per_token_cast_with_sf_only(plain(rows), "e4m3", 128),
    "given": lambda rows: quant.per_token_cast_with_precomputed_sf(
        plain(rows), "e4m3", 128, torch.ones(rows, 2)
    ),
    "back": lambda rows: quant.cast_back(
        (e4m3(rows), torch.ones(-(-rows // 4), 2)), "bf16", (4, 128)
    ),
    "back of tokens": lambda rows: quant.per_token_cast_back(
        (e4m3(rows), torch.ones(rows, 2)), "bf16", 128
    ),
    "blocks": lambda rows: quant.per_block_cast(plain(rows), "e4m3", (32, 32)),
    "scales of blocks": lambda rows: quant.per_block_cast_with_sf_only(
        plain(rows), "e4m3", (32, 32)
    ),
    "given of blocks": lambda rows: quant.per_block_cast_with_precomputed_sf(
        plain(rows), "e4m3", (32, 32), torch.ones(-(-rows // 32), 8)
    ),
    "lossless": lambda rows: quant.per_block_cast_lossless(
        (torch.zeros(rows, WIDTH // 2, dtype=torch.int8), torch.ones(rows, 8)),
        "e4m3", (1, 32), (32, 32),
    ),
    "channels": lambda rows: quant.per_channel_cast(plain(rows), "e4m3", 32),
    "transposed": lambda rows: quant.per_channel_cast_and_transpose(plain(rows), "e4m3", 32),
    "fused": lambda rows: quant.per_channel_cast_fused(
        (e4m3(rows), torch.ones(rows, 2)), "e4m3", 32, False, 128, index(2 * rows)
    ),
    "swiglu, transposed": lambda rows: (
        quant.swiglu_forward_and_per_channel_cast_and_transpose(plain(rows), "e4m3", 32)
    ),
    "swiglu": lambda rows: quant.swiglu_forward_and_per_token_cast(
        plain(rows), "e4m3", 128, index(rows), torch.ones(rows, TOPK), index(rows),
        swiglu_clamp_value=1.0, clamped_count=torch.zeros(3, dtype=torch.int64),
    ),
    "gradient": lambda rows: quant.swiglu_backward_and_per_token_cast(
        (e4m3(rows), torch.ones(rows, 2)), torch.ones(rows, WIDTH // 2).bfloat16(),
        torch.ones(rows, TOPK), index(rows), index(rows, TOPK), 128,
    ),
    "fake": lambda rows: quant.fake_cast(plain(rows), "e4m3", 128),
}  # fmt: skip


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_launches_are_evaluated_once(
    call: Callable[[int], Any],
    evaluated: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launch.Kernel, "handle", lambda *_: lambda *_: None)
    for rows in (40, 48, 1, 300, 48):
        call(rows)
    assert len(evaluated) == 1
