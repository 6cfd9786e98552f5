"""The layouts of scale factors: shapes, strides, padding, and the way back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.quant.helpers import LAYOUTS, bits
from tile_kernels.quant import scales
from tile_kernels.testing.numeric import assert_equal
from tile_kernels.testing.quant import clear_unused_sf
from tile_kernels.utils import align, ceil_div


def buffer_of(sf: torch.Tensor) -> torch.Tensor:
    """All that was allocated for `sf`, padding included."""
    return torch.empty(0, dtype=sf.dtype).set_(sf.untyped_storage())


def powers(num_rows: int, num_groups: int) -> torch.Tensor:
    return 2.0 ** torch.randint(-126, 127, (num_rows, num_groups))


@pytest.mark.parametrize(
    ("shape", "block_size", "row_major", "col_major", "packed"),
    [
        ((5, 576), (1, 128), ((5, 5), (5, 1)), ((5, 5), (1, 8)), ((5, 2), (1, 8))),
        ((4001, 576), (1, 576), ((4001, 1), (1, 1)), *[((4001, 1), (1, 4004))] * 2),
        ((300, 576), (128, 128), ((3, 5), (5, 1)), ((3, 5), (1, 4)), ((3, 2), (1, 4))),
    ],
)  # fmt: skip
def test_example_shapes(
    shape: tuple[int, int],
    block_size: tuple[int, int],
    row_major: tuple[tuple[int, int], tuple[int, int]],
    col_major: tuple[tuple[int, int], tuple[int, int]],
    packed: tuple[tuple[int, int], tuple[int, int]],
) -> None:
    blocks = scales.num_blocks(shape, block_size)
    for flags, expected in zip(LAYOUTS, (row_major, col_major, packed)):
        for sf in (
            scales.alloc_sf(*blocks, *flags, "cpu"),
            scales.lay_out_sf(powers(*blocks), *flags),
        ):
            assert (tuple(sf.shape), sf.stride()) == expected
            assert sf.dtype == (torch.int32 if flags[1] else torch.float32)


def test_no_rows() -> None:
    blocks = scales.num_blocks((0, 576), (1, 128))
    shapes = [scales.lay_out_sf(powers(*blocks), *flags) for flags in LAYOUTS]
    assert [tuple(sf.shape) for sf in shapes] == [(0, 5), (0, 5), (0, 2)]
    assert [sf.dtype for sf in shapes] == [torch.float32, torch.float32, torch.int32]
    assert [tuple(scales.read_sf(sf).shape) for sf in shapes] == [(0, 5), (0, 5), (0, 8)]


def test_packed_example() -> None:
    exponents = torch.arange(3)[:, None] + torch.arange(5)
    sf = scales.lay_out_sf(2.0**exponents, True, True)
    assert sf.stride() == (1, 4)
    assert bits(sf.contiguous()) == [0x8281807F, 0x83, 0x83828180, 0x84, 0x84838281, 0x85]
    assert bits(buffer_of(sf)) == [0x8281807F, 0x83828180, 0x84838281, 0, 0x83, 0x84, 0x85, 0]


def test_only_the_first_byte_of_one_group() -> None:
    sf = scales.lay_out_sf(torch.full((3, 1), 2.0), True, True)
    assert buffer_of(sf).tolist() == [128, 128, 128, 0]


@settings(deadline=None)
@given(st.integers(0, 20), st.integers(0, 20), st.sampled_from([*LAYOUTS, (False, True)]))
def test_layouts_keep_the_scales(num_rows: int, num_groups: int, flags: tuple[bool, bool]) -> None:
    sf = powers(num_rows, num_groups)
    laid_out = scales.lay_out_sf(sf, *flags)
    assert_equal(scales.read_sf(laid_out)[:, :num_groups], sf, check_stride=False)
    columns = ceil_div(num_groups, 4) if flags[1] else num_groups
    assert laid_out.shape == (num_rows, columns)
    if laid_out.numel() > 0:
        assert laid_out.stride() == ((1, align(num_rows, 4)) if flags[0] else (columns, 1))

    # What is not a scale factor is zero: rows that pad columns, and bytes that pad words.
    used = (scales.read_exponents(laid_out) != 0).sum()
    assert used == num_rows * num_groups
    whole = buffer_of(laid_out)
    assert whole.numel() == columns * (align(num_rows, 4) if flags[0] else num_rows)
    assert (whole != 0).sum() == num_rows * columns
    if flags[1] and laid_out.numel() > 1:
        cleared = clear_unused_sf(laid_out.clone(), num_groups, 1)
        assert_equal(cleared, scales.read_exponents(laid_out), check_stride=False)


def test_exponents_of_both_dtypes() -> None:
    sf = powers(5, 7)
    expected = (sf.log2() + 127).to(torch.uint8)
    for flags in LAYOUTS:
        exponents = scales.read_exponents(scales.lay_out_sf(sf, *flags))[:, :7]
        assert_equal(exponents, expected, check_stride=False)


def test_packing_drops_the_mantissa() -> None:
    sf = torch.tensor([[1.0, 1.99, 3.0]])
    assert scales.read_sf(scales.lay_out_sf(sf, True, True)).tolist() == [[1.0, 1.0, 2.0, 0.0]]


def test_laying_out_copies() -> None:
    sf = torch.ones(2, 2)
    scales.lay_out_sf(sf, False, False).zero_()
    assert sf.tolist() == [[1.0, 1.0], [1.0, 1.0]]


@settings(deadline=None)
@given(
    st.integers(0, 9), st.integers(0, 9), st.tuples(st.integers(1, 10), st.integers(1, 10))
)  # fmt: skip
def test_blocks_by_loops(num_rows: int, num_columns: int, block_size: tuple[int, int]) -> None:
    shape = num_rows, num_columns
    blocks = scales.num_blocks(shape, block_size)
    per_block = torch.rand(blocks[0] + 1, blocks[1] + 1)  # what is too much is not used
    values = torch.rand(shape)
    expanded = scales.expand_blocks(per_block, block_size, shape)
    largest = scales.block_max(values, block_size)
    assert (expanded.shape, largest.shape) == (shape, blocks)
    expected = torch.zeros(blocks)
    for row in range(num_rows):
        for column in range(num_columns):
            block = row // block_size[0], column // block_size[1]
            assert expanded[row, column] == per_block[block]
            expected[block] = max(expected[block], values[row, column])
    assert_equal(largest, expected)


def test_wrong_scales_are_named() -> None:
    with pytest.raises(ValueError, match=r"2 x 3 blocks of \(2, 2\) .* got \(2, 2\)"):
        scales.expand_blocks(torch.ones(2, 2), (2, 2), (4, 6))
    with pytest.raises(TypeError, match="float64"):
        scales.read_sf(torch.ones(1, 1, dtype=torch.float64))
