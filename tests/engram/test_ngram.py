"""Windows of tokens against a plain loop, and documents in them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engram.helpers import INT32, INT64
from tile_kernels.testing.numeric import assert_equal
from tile_kernels.torch import engram

# ---- windows -----------------------------------------------------------------------------------


def plain_windows(
    rows: list[list[int]], window: int, pad: int, starts: list[int], token_map: list[int] | None
) -> list[list[int]]:
    """Window after window, place after place."""

    def canonical(token: int) -> int:
        if token_map is None:
            return token
        return token_map[token] if 0 <= token < len(token_map) else pad

    windows, place = [], 0
    for row in rows:
        for column, token in enumerate(row):
            out = [canonical(token)]
            while len(out) < window:
                distance = len(out)
                ended = out[-1] == pad or distance > column or place - distance + 1 in starts
                out.append(pad if ended else canonical(row[column - distance]))
            windows.append(out)
            place += 1
    return windows


@st.composite
def texts(draw: st.DrawFn) -> tuple:
    batch, length = draw(st.integers(1, 3)), draw(st.integers(0, 9))
    token = st.integers(-2, 6)
    row = st.lists(token, min_size=length, max_size=length)
    rows = draw(st.lists(row, min_size=batch, max_size=batch))
    window, pad = draw(st.integers(1, 5)), draw(st.integers(-1, 6))
    boundaries = st.lists(st.integers(0, batch * length), max_size=4).map(sorted)
    cu_seqlens = draw(st.none() | boundaries)
    token_map = draw(st.none() | st.lists(st.integers(-1, 4), max_size=6))
    return rows, window, pad, cu_seqlens, token_map, draw(st.sampled_from([INT32, INT64]))


@settings(max_examples=300, deadline=None)
@given(texts())
def test_windows_are_those_of_a_plain_loop(text: tuple) -> None:
    rows, window, pad, cu_seqlens, token_map, dtype = text
    token_ids = torch.tensor(rows, dtype=dtype)
    found = engram.ngram_windows(
        token_ids, window, pad,
        None if cu_seqlens is None else torch.tensor(cu_seqlens, dtype=dtype),
        None if token_map is None else torch.tensor(token_map, dtype=dtype),
    )  # fmt: skip
    assert found.dtype == INT32
    assert found.is_contiguous()
    assert found.shape == (*token_ids.shape, window)
    expected = plain_windows(rows, window, pad, cu_seqlens or [], token_map)
    assert found.view(-1, window).tolist() == expected
    if len(rows) == 1:
        flat = engram.ngram_windows(
            token_ids[0], window, pad,
            None if cu_seqlens is None else torch.tensor(cu_seqlens, dtype=dtype),
            None if token_map is None else torch.tensor(token_map, dtype=dtype),
        )  # fmt: skip
        assert_equal(flat, found[0])


def test_windows_of_documents() -> None:
    ids = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    found = engram.ngram_windows(ids, 3, 0, cu_seqlens=torch.tensor([2, 7]))
    assert found.tolist() == [
        [[1, 0, 0], [2, 1, 0], [3, 0, 0], [4, 3, 0]],
        [[5, 0, 0], [6, 5, 0], [7, 6, 5], [8, 0, 0]],
    ]


def test_boundaries_outside_of_the_tokens_do_nothing() -> None:
    ids = torch.tensor([1, 2, 3])
    expected = engram.ngram_windows(ids, 2, 0)
    for boundary in (-7, 3, 2**40):
        cu_seqlens = torch.tensor([0, boundary, 3])
        assert_equal(engram.ngram_windows(ids, 2, 0, cu_seqlens), expected)


@pytest.mark.parametrize("shape", [(0,), (0, 5), (3, 0)])
def test_windows_of_no_tokens(shape: tuple[int, ...]) -> None:
    token_ids = torch.empty(shape, dtype=INT64)
    found = engram.ngram_windows(token_ids, 3, 0, torch.tensor([0, 0]), torch.tensor([1, 2]))
    assert found.shape == (*shape, 3)


def test_windows_have_a_token() -> None:
    with pytest.raises(ValueError, match="max_ngram_size must be at least 1, got 0"):
        engram.ngram_windows(torch.tensor([1]), 0, 0)
