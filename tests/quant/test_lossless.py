"""Casts without loss: worked examples, properties, what they do beyond their range."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.quant.helpers import (
    LAYOUTS,
    float32,
    hex_rows,
)
from tile_kernels import torch as references
from tile_kernels.quant import formats, scales
from tile_kernels.testing.numeric import assert_equal
from tile_kernels.torch import (
    cast,
)

LOSSLESS = torch.tensor(
    [[6, -4, 1, 0.5, 0.75, -0.5, 0, 0.1875], [48, 8, -1, 2, 3, 3, 1.5, -6]], dtype=torch.float32
)


@pytest.mark.parametrize("x_flags", LAYOUTS)
@pytest.mark.parametrize("flags", LAYOUTS)
def test_lossless(x_flags: tuple[bool, bool], flags: tuple[bool, bool]) -> None:
    col_major, packed = x_flags
    x = cast(
        LOSSLESS,
        "e2m1",
        (1, 4),
        round_sf=True,
        use_tma_aligned_col_major_sf=col_major,
        use_packed_ue8m0=packed,
    )
    assert hex_rows(x[0]) == "E7 12 E7 30 / 27 08 55 F3"
    assert scales.read_sf(x[1])[:, :2].tolist() == [[1, 0.125], [8, 1]]
    options = {"use_tma_aligned_col_major_sf": flags[0], "use_packed_ue8m0": flags[1]}

    data, sf = references.per_block_cast_lossless(x, "e4m3", (1, 4), (2, 8), **options)
    assert hex_rows(data) == "64 E0 50 48 4C C8 00 3C / 7C 68 80 00 5C 5C 54 E4"
    assert_equal(sf, scales.lay_out_sf(torch.tensor([[0.125]]), *flags))

    data, sf = references.per_block_cast_lossless(x, "e4m3", (1, 4), (1, 8), **options)
    assert hex_rows(data[:1]) == "7C F8 68 60 64 E0 00 54"
    assert_equal(sf, scales.lay_out_sf(torch.tensor([[1 / 64], [1 / 8]]), *flags))


# ---- without loss ------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.data())
def test_lossless_is_lossless(data: st.DataObject) -> None:
    """Any exponents that are at most 11 apart, down to the least that stands for a number."""
    lowest = data.draw(st.integers(1, 254 - 11))
    offsets = torch.tensor(data.draw(st.lists(st.integers(0, 11), min_size=12, max_size=12)))
    sf = formats.decode_ue8m0((lowest + offsets).view(3, 4))
    x = torch.randint(-128, 128, (5, 14), dtype=torch.int8), sf
    out_block = data.draw(st.sampled_from([(2, 8), (4, 8), (6, 16), (2, 32), (8, 32)]))
    out_data, out_sf = references.per_block_cast_lossless(x, "e4m3", (2, 8), out_block)
    back = references.cast_back((out_data, out_sf), "fp32", out_block)
    assert_equal(back, references.cast_back(x, "fp32", (2, 8)))
    assert out_sf.shape == scales.num_blocks((5, 28), out_block)


def test_lossless_beyond_its_range() -> None:
    """Zero blocks and zero scales are exact; what e4m3 cannot hold beside the rest is rounded."""
    data = torch.tensor([[0x77, 0x80, 0x13, 0x77]], dtype=torch.uint8).view(torch.int8)
    x = data, float32(2.0**20, 2.0**-126, 2.0**8, 0.0)[None]
    out_data, out_sf = references.per_block_cast_lossless(x, "e4m3", (1, 2), (1, 8))
    assert out_sf.tolist() == [[2.0**14]]
    assert (out_data.float() * 2.0**14).tolist() == [
        [6 * 2.0**20, 6 * 2.0**20, 0.0, -0.0, 1.5 * 2.0**8, 0.5 * 2.0**8, 0.0, 0.0]
    ]
    assert hex_rows(out_data)[6:11] == "00 80"
    beyond = torch.tensor([[0x03]], dtype=torch.int8), float32(2.0**20, 2.0**5)[None]
    out_data, _ = references.per_block_cast_lossless(beyond, "e4m3", (1, 1), (1, 2))
    assert (out_data.float() * 2.0**14).tolist() == [[1.5 * 2.0**20, 0.0]]


def test_lossless_with_zero_scales() -> None:
    """A zero scale makes zeros also where the other scales are the smallest there are."""
    x = torch.tensor([[0x72, 0x72]], dtype=torch.int8), float32(0.0, 2.0**-125)[None]
    for out_block in ((1, 2), (1, 4)):
        out = references.per_block_cast_lossless(x, "e4m3", (1, 2), out_block)
        assert_equal(
            references.cast_back(out, "fp32", out_block), references.cast_back(x, "fp32", (1, 2))
        )


def test_lossless_reads_only_exponents() -> None:
    data = torch.randint(-128, 128, (2, 8), dtype=torch.int8)
    exact = references.per_block_cast_lossless((data, torch.ones(2, 2)), "e4m3", (1, 8), (2, 16))
    sloppy = references.per_block_cast_lossless(
        (data, torch.ones(2, 2) * 1.9), "e4m3", (1, 8), (2, 16)
    )
    assert_equal(sloppy[0], exact[0])
    assert_equal(sloppy[1], exact[1])


def test_lossless_ignores_bytes_of_missing_groups() -> None:
    data = torch.randint(-128, 128, (2, 4), dtype=torch.int8)
    sf = torch.tensor([[0x7F7F7F7F]] * 2, dtype=torch.int32)
    garbage = torch.tensor([[0x7E7E7F7F]] * 2, dtype=torch.int32)
    expected = references.per_block_cast_lossless((data, sf), "e4m3", (1, 4), (1, 8))
    found = references.per_block_cast_lossless((data, garbage), "e4m3", (1, 4), (1, 8))
    assert_equal(found[0], expected[0])
    assert_equal(found[1], expected[1])
