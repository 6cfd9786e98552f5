import pytest
from hypothesis import given
from hypothesis import strategies as st

from tile_kernels import utils
from tile_kernels.testing import generator, quant

sizes = st.integers(0, 2**70)
divisors = st.integers(1, 2**40)


@pytest.mark.parametrize(("x", "y", "expected"), [(7, 4, 2), (8, 4, 2), (9, 4, 3), (0, 4, 0)])
def test_ceil_div_examples(x, y, expected):
    assert utils.ceil_div(x, y) == expected


@pytest.mark.parametrize(("x", "y", "expected"), [(7, 4, 8), (0, 4, 0), (8, 4, 8), (1, 1, 1)])
def test_align_examples(x, y, expected):
    assert utils.align(x, y) == expected


@pytest.mark.parametrize(
    ("x", "expected"), [(0, False), (8, True), (1, True), (-8, False), (12, False), (2**62, True)]
)
def test_is_power_of_two_examples(x, expected):
    assert utils.is_power_of_two(x) is expected


@given(sizes, divisors)
def test_ceil_div_is_the_smallest_cover(x, y):
    q = utils.ceil_div(x, y)
    assert q * y >= x > (q - 1) * y


@given(sizes, divisors)
def test_align_is_the_next_multiple(x, y):
    aligned = utils.align(x, y)
    assert aligned % y == 0
    assert 0 <= aligned - x < y


@given(st.integers(-(2**70), 2**70))
def test_is_power_of_two_counts_bits(x):
    assert utils.is_power_of_two(x) == (x > 0 and bin(x).count("1") == 1)


def test_names_of_tilekernels() -> None:
    assert generator.align is quant.align is utils.align
    assert quant.ceil_div is utils.ceil_div
