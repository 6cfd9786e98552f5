import pytest
import torch

import tile_kernels.testing
from tile_kernels import quant
from tile_kernels.quant import formats
from tile_kernels.testing.quant import (
    clear_unused_sf,
    clear_unused_sf_col_pack,
    quant_level_rank,
)


def test_exposed_by_the_package():
    assert tile_kernels.testing.clear_unused_sf is clear_unused_sf


def test_example():
    sf = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]], dtype=torch.uint8)
    result = clear_unused_sf(sf, hidden=288, num_per_channels=128)
    assert result.dtype == torch.uint8
    assert result.tolist() == [[1, 2, 3, 0], [5, 6, 7, 0]]
    assert sf.tolist() == [[1, 2, 3, 0], [5, 6, 7, 0]]  # in place


def test_int32_in_place():
    sf = torch.full((3, 2), 0x0B0B0B0B, dtype=torch.int32)
    result = clear_unused_sf(sf, 640, 128)
    assert result.tolist() == [[11] * 5 + [0] * 3] * 3
    assert sf.tolist() == [[0x0B0B0B0B, 0x0B]] * 3


def test_transposed_is_copied():
    data = torch.arange(24, dtype=torch.uint8)
    sf = data.clone().view(torch.int32).view(2, 3).t()  # [3, 2], column-major
    result = clear_unused_sf(sf, 7 * 32, 32)
    assert result.tolist() == [
        [0, 1, 2, 3, 12, 13, 14, 0],
        [4, 5, 6, 7, 16, 17, 18, 0],
        [8, 9, 10, 11, 20, 21, 22, 0],
    ]
    assert sf.t().contiguous().view(torch.uint8).view(-1).tolist() == data.tolist()


def test_nothing_unused():
    sf = torch.arange(8, dtype=torch.uint8).view(2, 4)
    assert clear_unused_sf(sf.clone(), 512, 128).tolist() == sf.tolist()


def test_empty():
    assert clear_unused_sf(torch.zeros(0, 2, dtype=torch.int32), 640, 128).shape == (0, 8)


def test_bad_input():
    with pytest.raises(ValueError, match=r"multiple of 8 bytes .* got shape \(3,\)"):
        clear_unused_sf(torch.zeros(3, dtype=torch.int32), 640, 128)
    with pytest.raises(ValueError, match="must be positive, got 0 and 128"):
        clear_unused_sf(torch.zeros(3, dtype=torch.int32), 0, 128)


def test_one_word_of_a_column() -> None:
    sf = torch.tensor([[0x04030201, 0, 0, 0]], dtype=torch.int32).T[:1]
    assert sf.stride() == (1, 4) or sf.shape == (1, 1)
    assert clear_unused_sf(sf, hidden=128, num_per_channels=64).tolist() == [[1, 2, 0, 0]]


def test_words_along_tokens() -> None:
    for blocks, kept in ((4, 0xFFFFFFFF), (5, 0xFF), (7, 0xFFFFFF)):
        sf = torch.full((-(-blocks // 4), 3), -1, dtype=torch.int32)
        data = clear_unused_sf_col_pack(sf, 32 * blocks - 5, 32)
        assert torch.equal(data.view(torch.int32), sf)
        assert data.data_ptr() == sf.data_ptr()
        assert [word & 0xFFFFFFFF for word in sf[-1].tolist()] == [kept] * 3
        assert (sf[:-1] == -1).all()
    with pytest.raises(ValueError, match="must be int32 with 2 rows of words"):
        clear_unused_sf_col_pack(torch.zeros(1, 3, dtype=torch.int32), 640, 128)


@pytest.mark.parametrize("fmt", ["e4m3", "e2m1", "bf16"])
def test_ranks_are_in_the_order_of_values(fmt: str) -> None:
    """Those of neighbours differ by 1."""
    if fmt == "e2m1":
        codes = formats.pack_e2m1(torch.arange(16, dtype=torch.uint8))
        values = formats.decode_e2m1(codes)
    elif fmt == "e4m3":
        codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
        values = codes.float()
    else:
        codes = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
        values = codes.float()
    values = values.flatten()
    ranks = quant_level_rank(codes, fmt)[~values.isnan()]
    order = values[~values.isnan()].argsort()
    steps = ranks[order].diff()
    assert steps.min() == 0  # between the zeros alone
    assert (steps == 1).sum() == len(steps) - 1


def test_ranks_are_those_of_tilekernels() -> None:
    """What version 2.1.0 returns."""
    bf16 = torch.tensor([[0.0, -0.0], [1.0, -1.0], [3.3895e38, -3.3895e38]]).bfloat16()
    assert quant_level_rank(bf16, "bf16").tolist() == [32639, 32639, 48895, 16383, 65278, 0]
    e4m3 = torch.tensor([[0x00, 0x80, 0x01], [0x7E, 0xFE, 0xFF]], dtype=torch.uint8)
    ranks = quant_level_rank(e4m3.view(torch.float8_e4m3fn), "e4m3")
    assert ranks.tolist() == [126, 126, 127, 252, 0, -1]
    e2m1 = torch.tensor([[0x10, 0x32, -1, 0x54, 0x76]], dtype=torch.int8)
    assert quant_level_rank(e2m1, "e2m1").tolist() == [7, 8, 9, 10, 0, 0, 11, 12, 13, 14]


def test_ranks_of_stochastic_rounding() -> None:
    x = torch.randn(8, 64)
    for fmt in ("e4m3", "e2m1"):
        nearest, sf = quant.per_token_cast(x, fmt, 32)
        data, same = quant.per_token_cast(x, fmt, 32, stochastic_cast=True, seed=1)
        assert torch.equal(sf, same)
        off = (quant_level_rank(data, fmt) - quant_level_rank(nearest, fmt)).abs()
        assert off.max() == 1
    with pytest.raises(ValueError, match="fmt must be e4m3, bf16 or e2m1, got 'e5m6'"):
        quant_level_rank(nearest, "e5m6")
