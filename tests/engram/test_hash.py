"""Hashes of windows against worked vectors and Python's integers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engram.helpers import INT32, INT64, int32
from tile_kernels.engram.hash.cases import CASES
from tile_kernels.runtime.device import described
from tile_kernels.runtime.warmup import compilations
from tile_kernels.testing.numeric import assert_equal
from tile_kernels.torch import engram


def wrapped(value: int, bits: int) -> int:
    """`value` modulo 2^bits, as a signed number."""
    value %= 1 << bits
    return value - (1 << bits) if value >> (bits - 1) else value


# ---- hash --------------------------------------------------------------------------------------


def test_offsets_vector() -> None:
    sizes = int32([[[3, 4], [5, 6]], [[7, 8], [9, 10]]])
    assert_equal(engram.make_offsets(sizes), int32([[0, 3, 7, 12], [0, 7, 15, 24]]))


def test_offsets_wrap_in_their_dtype() -> None:
    sizes = int32([[[2**31 - 1, 2**31 - 1, 5]]])
    assert engram.make_offsets(sizes).tolist() == [[0, 2**31 - 1, -2]]
    assert_equal(engram.make_offsets(sizes, INT64), torch.tensor([[0, 2**31 - 1, 2**32 - 2]]))


@pytest.mark.parametrize("hashes", [engram.engram_hash, engram.engram_hash_ref])
@pytest.mark.parametrize(
    ("ids", "multipliers", "sizes", "expected"),
    [
        (
            [[5, 7, 11], [-1, 0, 2]], [3, 5, 9], [[10, 13], [17, 19]],
            [[4, 15, 34, 43], [7, 20, 23, 42]],
        ),
        ([[3, 1]], [2**62, 1], [[7]], [[4]]),
        ([[100000, 99999]], [2**62 + 1, 2**40 + 3], [[1000003]], [[105154]]),
    ],
)  # fmt: skip
def test_hash_vectors(
    hashes: object, ids: list, multipliers: list, sizes: list, expected: list
) -> None:
    assert callable(hashes)
    vocab_sizes = int32([sizes])
    offsets = engram.make_offsets(vocab_sizes)
    found = hashes(int32(ids), torch.tensor([multipliers]), vocab_sizes, offsets)
    assert_equal(found, int32([expected]))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_hash_is_that_of_python_integers(data: st.DataObject) -> None:
    layers, tokens, window, tables = (
        data.draw(st.integers(low, high)) for low, high in ((1, 3), (0, 4), (2, 5), (1, 4))
    )

    def fill(numbers: st.SearchStrategy, *shape: int) -> list:
        if not shape:
            return data.draw(numbers)
        return [fill(numbers, *shape[1:]) for _ in range(shape[0])]

    wide = data.draw(st.booleans())
    bits = 63 if wide else 31
    ids = fill(st.integers(-(2**31), 2**31 - 1), tokens, window)
    multipliers = fill(st.integers(-(2**63), 2**63 - 1), layers, window)
    sizes = fill(st.integers(1, 2**31 - 1), layers, window - 1, tables)
    offsets = fill(st.integers(-(2**bits), 2**bits - 1), layers, (window - 1) * tables)

    found = engram.engram_hash(
        int32(ids).view(tokens, window), torch.tensor(multipliers), int32(sizes),
        torch.tensor(offsets, dtype=INT64 if wide else INT32),
    )  # fmt: skip
    assert found.dtype == (INT64 if wide else INT32)
    assert found.is_contiguous()
    assert found.shape == (layers, tokens, (window - 1) * tables)
    for layer in range(layers):
        for token in range(tokens):
            hashed = wrapped(ids[token][0] * multipliers[layer][0], 64)
            for order in range(1, window):
                hashed ^= wrapped(ids[token][order] * multipliers[layer][order], 64)
                for table in range(tables):
                    column = (order - 1) * tables + table
                    row = hashed % sizes[layer][order - 1][table] + offsets[layer][column]
                    assert found[layer, token, column] == wrapped(row, bits + 1)


def test_tables_without_rows_give_their_offset() -> None:
    sizes = int32([[[7, 0]]])
    found = engram.engram_hash(int32([[3, 1]]), torch.tensor([[2**62, 1]]), sizes, int32([[0, 5]]))
    assert found.tolist() == [[[4, 5]]]


def test_hash_needs_two_tokens() -> None:
    with pytest.raises(ValueError, match="at least 2 tokens, got 1"):
        engram.engram_hash(int32([[1]]), torch.tensor([[1]]), int32([[]]), int32([[]]))


def test_hashes_without_tables_need_no_kernel() -> None:
    """A kernel for no columns could not be compiled by a warm-up."""
    samples = {sample.label: sample for sample in CASES["engram_hash"].small}
    assert compilations([("engram.engram_hash", samples["37"].build("meta"))], described())
    assert not compilations(
        [("engram.engram_hash", samples["no tables"].build("meta"))], described()
    )
