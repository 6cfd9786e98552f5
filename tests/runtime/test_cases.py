"""How results are compared, and moved between devices."""

from __future__ import annotations

import pytest
import torch

from tile_kernels.runtime.cases import close_results, moved


def test_tolerance_counts_in_units_of_the_size() -> None:
    compare = close_results(rtol=0, atol=1e-3)
    small, large = torch.full((8,), 0.5), torch.full((8,), 100.0)
    compare(small + 9e-4, small)
    compare(large + 0.09, large)
    for expected, error in ((small, 2e-3), (large, 0.2)):
        with pytest.raises(AssertionError):
            compare(expected + error, expected)


def test_a_share_may_stray() -> None:
    expected = torch.ones(1000)
    result = expected.clone()
    result[:3] = -5
    close_results(rtol=0, atol=1e-3, strays=3e-3)(result, expected)
    for strays in (0, 2e-3):
        with pytest.raises(AssertionError):
            close_results(rtol=0, atol=1e-3, strays=strays)(result, expected)


def test_not_a_number_dtypes_and_lengths_count() -> None:
    compare = close_results(rtol=1, atol=1)
    nan = torch.tensor([float("nan"), 1.0])
    compare(nan, nan.clone())
    for result, expected in (
        (torch.ones(2), nan),
        (torch.ones(2).double(), torch.ones(2)),
        ((nan,), (nan, nan)),
        (torch.ones(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)),
    ):
        with pytest.raises(AssertionError):
            compare(result, expected)


@pytest.mark.gpu
def test_strides_and_padding_move_along() -> None:
    whole = torch.arange(40, device="cuda").view(8, 5)
    there = moved({"x": [whole[:3].T, 1]}, "cpu")["x"][0]
    assert there.stride() == (1, 5)
    assert there.untyped_storage().tolist() == whole.untyped_storage().tolist()
