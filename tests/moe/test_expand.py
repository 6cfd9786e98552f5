"""Expanding tokens to the fused layout: padding, gradients, the reference grid."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tile_kernels
from tests.moe.helpers import (
    each_backend,
    each_grid_point_and_hidden,
    mapped,
    reduced_plainly,
    routed,
)
from tile_kernels.testing.numeric import assert_equal


@each_backend
def test_the_room_behind_column_major_scales_is_zero(backend: str) -> None:
    slots = torch.tensor([[0, 5], [3, -1]], dtype=torch.int32)
    experts = torch.zeros(6, dtype=torch.int32)
    for num_tokens in (2, 0):
        x = torch.ones(num_tokens, 64, dtype=torch.uint8), torch.ones(num_tokens, 4)
        with tile_kernels.backend(backend), tile_kernels.testing.poison.poisoned_empty(0xA5):
            _, sf = tile_kernels.moe.expand_to_fused_with_sf(
                x, 16, slots[:num_tokens], experts, use_tma_aligned_col_major_sf=True
            )
        assert sf.stride() == (1, 8)
        room = sf.as_strided((4, 2), (8, 1), 6)
        assert not room.any()
        assert sf.sum() == 4 * (slots[:num_tokens] >= 0).sum()


def test_sizes_known_at_run_time_only() -> None:
    """Tokens and positions that are chosen by masks, without a graph break."""
    slots, experts = routed()
    x = torch.randn(21, 64)

    def there_and_back(kept: Tensor, length: Tensor) -> tuple[Tensor, ...]:
        tokens = kept.nonzero()[:, 0]
        rows, mine, positions = x[tokens], slots[tokens], experts[length]
        sf = rows[:, :4].contiguous()
        arguments = (16, mine, positions)
        columns = tile_kernels.moe.expand_to_fused_with_sf((rows, sf), *arguments, True)
        data, scales = tile_kernels.moe.expand_to_fused_with_sf((rows, sf), *arguments)
        return *columns, scales, tile_kernels.moe.reduce_fused(data, None, mine)

    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(there_and_back, fullgraph=True, backend="aot_eager")
        for num_tokens, num_positions in ((21, len(experts)), (7, 11), (0, 5)):
            masks = torch.arange(21) < num_tokens, torch.arange(len(experts)) < num_positions
            for result, expected in zip(compiled(*masks), there_and_back(*masks)):
                assert_equal(result, expected)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gradient_of_expand(dtype: torch.dtype, compiled: bool) -> None:
    slots, experts = routed()
    upstream = torch.randn(experts.shape[0], 9).to(dtype)
    x = torch.randn(21, 9).to(dtype).requires_grad_()
    function = tile_kernels.moe.expand_to_fused
    if compiled:
        torch._dynamo.reset()
        function = torch.compile(function, fullgraph=True, backend="aot_eager")
    function(x, slots, experts).backward(upstream)
    assert x.grad is not None
    assert_equal(x.grad, tile_kernels.torch.reduce_fused(upstream, None, slots))
    plain = reduced_plainly(upstream.double(), None, slots, None)
    torch.testing.assert_close(x.grad.double(), plain, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
@each_grid_point_and_hidden
def test_expand_on_the_grid(params: dict[str, int]) -> None:
    hidden = params["hidden"]
    slots, tokens = mapped(params, 16)
    x = torch.randn(slots.shape[0], hidden, device="cuda", dtype=torch.bfloat16)
    expected = tile_kernels.torch.expand_to_fused(x, slots, tokens)
    assert_equal(tile_kernels.moe.expand_to_fused(x, slots, tokens), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("packed", [False, True])
@each_grid_point_and_hidden
def test_expand_with_sf_on_the_grid(params: dict[str, int], packed: bool, group: int) -> None:
    hidden = params["hidden"]
    slots, tokens = mapped(params, 16)
    num_scales = -(-hidden // group)
    sf = torch.rand(slots.shape[0], -(-num_scales // 4) if packed else num_scales, device="cuda")
    sf = sf.view(torch.int32) if packed else sf
    x = torch.randn(slots.shape[0], hidden, device="cuda").to(torch.float8_e4m3fn), sf
    arguments = (x, group, slots, tokens, packed)
    expected = tile_kernels.torch.expand_to_fused_with_sf(*arguments)
    for mine, other in zip(tile_kernels.moe.expand_to_fused_with_sf(*arguments), expected):
        assert_equal(mine, other)
