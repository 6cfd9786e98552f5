"""Decoding: the state of the compression, and the bits of prefill."""

from __future__ import annotations

import pytest
import torch

import tile_kernels
from tests.attention.helpers import LENGTHS, arguments, each_ground
from tile_kernels import attention
from tile_kernels.attention.compress.cases import (
    column,
)

# ---- decoding -----------------------------------------------------------------------------------


@each_ground
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("window", "overlap"), [(1, True), (3, True), (4, True), (4, False), (10, True), (20, False)]
)
def test_decoding_gives_the_bits_of_prefill(
    window: int, overlap: bool, dtype: torch.dtype, ground: tuple[str, str]
) -> None:
    """From the first token on, and from the middle of a sequence on."""
    backend, device = ground
    num_tokens, channels, start = 3 * window + 2, 24, window + window // 2
    given = arguments(num_tokens, channels, window, device, overlap=overlap, dtype=dtype)
    biases = {name: x for name, x in given.items() if name.startswith("bias")}
    tokens = {name: x for name, x in given.items() if not name.startswith("bias")}
    state = attention.KVCompressorState.empty(
        2, window, channels, overlap=overlap, dtype=dtype, device=device
    )
    with tile_kernels.backend(backend):
        expected = attention.kv_compress(**given)
        state.prefill(*(x[:start] for x in tokens.values()), slots=torch.tensor([1], device=device))
        entries: list[list[torch.Tensor]] = [[], []]
        for t in range(num_tokens):  # slot 0 starts at the first token, slot 1 in the middle
            slots = torch.tensor([0, 1 if t >= start else -1], device=device).int()
            step = {name: x[[t, t]] for name, x in tokens.items()}
            new, completed = attention.kv_compress_step(state, **step, **biases, slots=slots)
            for entry, complete, mine in zip(new, completed.tolist(), entries):
                if complete:
                    mine.append(entry)
    assert torch.equal(torch.stack(entries[0]), expected)
    assert torch.equal(torch.stack(entries[1]), expected[start // window :])
    assert state.lengths.tolist() == [num_tokens, num_tokens]


def test_state_of_several_sequences_after_prefill() -> None:
    """Ragged prefill, with sequences that are empty or shorter than a window, then one step."""
    window, channels = 4, 8
    given = arguments(36, channels, window, lengths=LENGTHS, dtype=torch.float32)
    cu_seqlens = given.pop("cu_seqlens")
    tokens = {name: x for name, x in given.items() if not name.startswith("bias")}
    state = attention.KVCompressorState.empty(7, window, channels, dtype=torch.float32)
    state.prefill(*tokens.values(), cu_seqlens=cu_seqlens)
    assert state.lengths.tolist() == list(LENGTHS)
    step = {name: torch.randn(7, channels) for name in tokens}
    biases = {name: x for name, x in given.items() if name.startswith("bias")}
    entries, completed = attention.kv_compress_step(state, **step, **biases)
    assert completed.tolist() == [(length + 1) % window == 0 for length in LENGTHS]
    starts = cu_seqlens.tolist()
    for i, length in enumerate(LENGTHS):
        whole = {
            name: torch.cat((x[starts[i] : starts[i] + length], step[name][i : i + 1]))
            for name, x in tokens.items()
        }
        expected = attention.kv_compress(**whole, **biases)
        if completed[i]:
            assert torch.equal(entries[i], expected[-1])
        else:
            assert not entries[i].any()


def test_state_is_made_and_reset() -> None:
    state = attention.KVCompressorState.empty(3, 4, 8, overlap=False)
    assert (state.window, state.overlap) == (4, False)
    assert state.kept.shape == (3, 4, 2, 8)
    state.lengths.fill_(7)
    state.reset(torch.tensor([1]))
    assert state.lengths.tolist() == [7, 0, 7]
    state.reset()
    assert state.lengths.tolist() == [0, 0, 0]
    with pytest.raises(ValueError, match="prefill: kv_b and z_b must be given not here"):
        state.prefill(*(torch.zeros(1, 8) for _ in range(4)))
    for dtype in (torch.float16, None):
        with pytest.raises(TypeError, match="dtype must be bfloat16 or float32"):
            attention.KVCompressorState.empty(1, 1, 1, dtype=dtype)  # type: ignore[arg-type]


def test_a_slot_that_comes_twice_is_found_in_the_checked_mode() -> None:
    state = attention.KVCompressorState.empty(3, 2, 1, overlap=False, dtype=torch.float32)
    rows = column(1, 2)
    with (
        tile_kernels.checked(),
        pytest.raises(ValueError, match="slots must contain each sequence at most once"),
    ):
        attention.kv_compress_step(
            state, rows, rows, column(0, 0), slots=torch.tensor([1, 1]).int()
        )


def test_slots_to_prefill_are_found_in_the_checked_mode() -> None:
    state = attention.KVCompressorState.empty(2, 2, 1, overlap=False, dtype=torch.float32)
    rows, cu_seqlens = column(1, 2), torch.tensor([0, 1, 2])
    with tile_kernels.checked():
        state.prefill(rows, rows, cu_seqlens=cu_seqlens, slots=torch.tensor([1, 0]))
        with pytest.raises(ValueError, match=r"slots must hold 0\.\.1, but element \[1\] is -1"):
            state.prefill(rows, rows, cu_seqlens=cu_seqlens, slots=torch.tensor([0, -1]))
        with pytest.raises(
            ValueError, match="slots must contain each sequence at most once, but 1 "
        ):
            state.prefill(rows, rows, cu_seqlens=cu_seqlens, slots=torch.tensor([1, 1]))


def test_slots_outside_of_the_state_are_left_out() -> None:
    state = attention.KVCompressorState.empty(3, 4, 8, dtype=torch.float32)
    state.lengths[:] = 5
    state.reset(torch.tensor([-1, 7]))
    assert state.lengths.tolist() == [5, 5, 5]
    state.reset(torch.tensor([2, -1]))
    assert state.lengths.tolist() == [5, 5, 0]
    with pytest.raises(TypeError, match="reset: slots must be int32 or int64, got bool"):
        state.reset(torch.tensor([True, False, True]))

    rows = torch.randn(4, 6, 8, requires_grad=True)
    bounds = torch.tensor([0, 2, 3, 6])
    before = state.kept.clone()
    state.prefill(*rows.unbind(), cu_seqlens=bounds, slots=torch.tensor([-1, 1, 9]))
    assert state.lengths.tolist() == [5, 1, 0]
    assert not state.kept.requires_grad
    assert torch.equal(state.kept[[0, 2]], before[[0, 2]])
    assert torch.equal(state.kept[1, 0], rows[:, 2])
    state.prefill(*rows.unbind(), cu_seqlens=bounds, slots=torch.tensor([-1, -1, 9]))
    assert state.lengths.tolist() == [5, 1, 0]
