"""MX formats: what PyTorch's dtypes say of our scales, and the blocked layout by its formula."""

from __future__ import annotations

import pytest
import torch

import tile_kernels
from tile_kernels.integrations import mx

E8M0 = torch.float8_e8m0fnu


def values(rows: int, channels: int) -> torch.Tensor:
    torch.manual_seed(0)
    scale = torch.exp2(torch.randint(-20, 20, (rows, channels // 32)).float())
    return (torch.randn(rows, channels) * scale.repeat_interleave(32, 1)).bfloat16()


@pytest.mark.parametrize("packed", [False, True])
def test_scales_are_the_exponents(packed: bool) -> None:
    """PyTorch's conversion of the bytes to float32 gives the scales of the cast back."""
    x = values(9, 32 * 6)
    _, sf = tile_kernels.quant.per_token_cast(x, "e4m3", 32, round_sf=True)
    given = sf
    if packed:
        layout = {"use_tma_aligned_col_major_sf": True, "use_packed_ue8m0": True}
        _, given = tile_kernels.quant.per_token_cast(x, "e4m3", 32, round_sf=True, **layout)
        assert given.dtype == torch.int32
    scales = mx.mx_scales(given, 6)
    assert scales.dtype == E8M0
    assert scales.is_contiguous()
    assert torch.equal(scales.float(), sf)


def test_mxfp8_and_mxfp4_hold_the_values() -> None:
    """Data times scale, both by PyTorch's dtypes, is what `cast_back` gives."""
    x = values(5, 64)
    pair = tile_kernels.quant.per_token_cast(x, "e4m3", 32, round_sf=True)
    data, scales = mx.mx_operand(*pair)
    found = data.float().view(5, 2, 32) * scales.float()[:, :, None]
    expected = tile_kernels.quant.per_token_cast_back(pair, "fp32", 32)
    assert torch.equal(found.flatten(1), expected)
    data4, sf4 = tile_kernels.quant.per_token_cast(x, "e2m1", 32, round_sf=True)
    viewed, scales4 = mx.mx_operand(data4, sf4)
    assert viewed.dtype == torch.float4_e2m1fn_x2
    assert viewed.data_ptr() == data4.data_ptr()
    assert torch.equal(scales4.float(), sf4)


@pytest.mark.parametrize("shape", [(1, 1), (128, 4), (129, 5), (200, 16), (0, 4)])
def test_blocked_layout(shape: tuple[int, int]) -> None:
    rows, columns = shape
    scales = torch.randint(1, 255, shape, dtype=torch.uint8)
    blocked = mx.to_blocked(scales)
    tiles = -(-columns // 4)
    assert blocked.shape == (512 * -(-rows // 128) * tiles,)
    for row in range(0, rows, 7):
        for column in range(columns):
            tile = row // 128 * tiles + column // 4
            at = tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4
            assert blocked[at] == scales[row, column]
    assert int((blocked != 0).sum()) == rows * columns  # padding is zero
    assert torch.equal(mx.from_blocked(blocked, rows, columns), scales)
    assert mx.to_blocked(scales.view(E8M0)).dtype == E8M0


def test_bad_arguments() -> None:
    with pytest.raises(TypeError, match="mx_scales: sf must be float32 or int32, got bfloat16"):
        mx.mx_scales(torch.ones(2, 2).bfloat16())
    with pytest.raises(ValueError, match=r"mx_scales: num_groups must be in 5\.\.8, got 4"):
        mx.mx_scales(torch.ones(2, 2, dtype=torch.int32), 4)
    with pytest.raises(ValueError, match="num_groups must be 2, got 3"):
        mx.mx_scales(torch.ones(2, 2), 3)
    data = torch.zeros(3, 64).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="mx_operand: data must have a multiple of 32 channels"):
        mx.mx_operand(data[:, :40], torch.ones(3, 2))
    with pytest.raises(ValueError, match="mx_operand: sf must have 3 rows like data, got 2"):
        mx.mx_operand(data, torch.ones(2, 2))
    with pytest.raises(TypeError, match="to_blocked: scales must have one byte each"):
        mx.to_blocked(torch.ones(2, 2))
    with pytest.raises(ValueError, match="from_blocked: blocked must have 512 bytes, got 4"):
        mx.from_blocked(torch.zeros(4, dtype=torch.uint8), 1, 1)
