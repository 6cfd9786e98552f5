"""`kv_compress_step`: compression while decoding, one token at a time."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tile_kernels.attention.step import reference
from tile_kernels.attention.step.plan import plan
from tile_kernels.attention.step.state import check_slots
from tile_kernels.attention.windows import (
    Series,
    check_dtype,
    check_series,
    compress_windows,
    row_vector,
)
from tile_kernels.runtime import checks
from tile_kernels.runtime.cases import Cost
from tile_kernels.runtime.declaration import Launch, Out, Spec, alignment, dtype_name
from tile_kernels.runtime.launch import Kernel
from tile_kernels.runtime.operator import Operator

_APPEND = Kernel("tile_kernels.attention.step.kernel", "append", plan)


class Arguments(NamedTuple):
    """`state` and `lengths` are the two tensors of the public argument `state`."""

    state: Tensor
    lengths: Tensor
    kv_a: Tensor
    z_a: Tensor
    bias_a: Tensor
    kv_b: Tensor | None
    z_b: Tensor | None
    bias_b: Tensor | None
    slots: Tensor | None
    out_dtype: torch.dtype | None

    def check(self) -> None:
        if self.lengths is None:
            raise TypeError(f"state must be a KVCompressorState, got {type(self.state).__name__}")
        check_series(*self[2:8])
        series, (tokens, channels) = 1 if self.kv_b is None else 2, self.kv_a.shape
        window = self.bias_a.shape[0]
        checks.tensor(
            "state", self.state, ("num_sequences", "kept", "vectors", "channels"), self.kv_a.dtype,
            shape=(None, series * window, 2 * series, channels), contiguous=True,
        )  # fmt: skip
        num_sequences = self.state.shape[0]
        checks.tensor(
            "state",
            self.lengths,
            ("num_sequences",),
            torch.int32,
            shape=(num_sequences,),
            contiguous=True,
        )
        num_kept = num_sequences * series * window
        if isinstance(num_kept, int) and num_kept > checks.MOST_SIZE:
            raise ValueError(f"state must keep at most {checks.MOST_SIZE} tokens, got {num_kept}")
        if self.slots is not None:
            checks.tensor(
                "slots", self.slots, ("num_tokens",), torch.int32, shape=(tokens,), contiguous=True
            )
        elif tokens != num_sequences:
            raise ValueError(
                f"kv_a must have a token for each of {num_sequences} sequences of the state, or "
                f"come with slots, got {tokens}"
            )
        check_dtype("out_dtype", self.out_dtype)

    def outputs(self) -> tuple[Out, Out]:
        tokens, channels = self.kv_a.shape
        return (
            Out("entries", (tokens, channels), self.out_dtype or self.kv_a.dtype),
            Out("completed", (tokens,), torch.bool),
        )

    def launches(self, entries: Spec, completed: Spec, places: Spec) -> list[Launch]:
        if self.kv_a.numel() == 0:
            return []
        state: Any = self.state
        given, slotted = Series.of(*self[2:8]), self.slots is not None
        unit = max(alignment(state) // state.element_size(), 1)
        vector = math.gcd(row_vector(given.channels, given.rows), unit)
        dtype = dtype_name(given.kv_a)
        problem = (given.channels, given.window, given.number, slotted, dtype, vector)
        rows = (given.kv_a, given.z_a, given.kv_b, given.z_b)
        append = Launch(
            _APPEND, problem, (state, self.lengths, self.slots, *rows, places, completed)
        )
        kept = _kept_series(state, self.bias_a, self.bias_b)
        return [append, compress_windows(kept, places, entries)]

    def scratch(self) -> tuple[Out, ...]:
        return (Out("places", (self.kv_a.shape[0], 3), torch.int32),)

    def check_values(self) -> None:
        checks.in_range("state", self.lengths, 0, 2**31 - 2)
        if self.slots is not None:
            check_slots(self.slots, -1, self.state.shape[0])


def _kept_rows(state: Tensor, which: int) -> Tensor:
    return state.flatten(0, 1).select(1, which)


def _kept_series(state: Any, bias_a: Any, bias_b: Any) -> Series:
    """What the state keeps, as series over the tokens of all sequences."""
    num_sequences, num_kept, vectors, channels = state.shape
    rows: list[Any] = []
    for which in range(vectors):
        aligned = math.gcd(alignment(state), which * channels * state.element_size())
        shape, stride = (num_sequences * num_kept, channels), (vectors * channels, 1)
        like = Spec(shape, stride, state.dtype, state.device, aligned)
        rows.append(state.apply(_kept_rows, which, like=like))
    kv_a, z_a, kv_b, z_b = (*rows, None, None)[:4]
    return Series.of(kv_a, z_a, bias_a, kv_b, z_b, bias_b)


def cost(kv_a: Tensor, kv_b: Tensor | None = None, **_: Any) -> Cost:
    """Rows in and kept, and a result; how many tokens complete a window is not known here."""
    series = 1 if kv_b is None else 2
    return Cost(kv_a.numel() * kv_a.element_size() * (4 * series + 1) + 20 * kv_a.shape[0])


def _reference(state: Tensor, lengths: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    *series, slots, out_dtype = rest
    return reference.kv_compress_step((state, lengths), *series, slots=slots, out_dtype=out_dtype)


KV_COMPRESS_STEP = Operator(
    "attention.kv_compress_step",
    Arguments,
    reference=_reference,
    cost=cost,
    dynamic={"state": 3, "lengths": 0, "kv_a": 1, "z_a": 1, "kv_b": 1, "z_b": 1, "slots": 0},
    mutates=("state", "lengths"),
    instead="tile_kernels.attention.kv_compress of whole sequences",
)


@KV_COMPRESS_STEP.public(reference=reference.kv_compress_step, mutates=("state",))
def kv_compress_step(
    state: tuple[Tensor, Tensor],
    kv_a: Tensor,
    z_a: Tensor,
    bias_a: Tensor,
    kv_b: Tensor | None = None,
    z_b: Tensor | None = None,
    bias_b: Tensor | None = None,
    *,
    slots: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Appends one token to each sequence and returns the entries that these complete.

    `entries[completed]` are the new ones; they have the bits that `kv_compress` of the whole
    sequence gives. The shapes are always the same and the host does not wait for the GPU, so a CUDA
    graph can record the step. A token with a slot outside the state (-1: padding) is ignored; no
    slot may come twice. The results have no gradient.

    Args:
        state: A `KVCompressorState`, written in place.
        kv_a: `[num_tokens, channels]`, dtype of the state, any row stride, stride 1 in the last
            dimension: the values of the tokens.
        z_a: `[num_tokens, channels]`, likewise: their scores.
        bias_a: `[window, channels]`, float32, stride 1 in the last dimension, as in `kv_compress`.
        kv_b: Values of the second series, like `kv_a`, where the state has two.
        z_b: Scores of that series, like `z_a`.
        bias_b: Biases of that series, like `bias_a`.
        slots: `[num_tokens]`, int32, contiguous: the sequence of each token. None: token `i`
            belongs to sequence `i`, and there is one for each sequence of the state.
        out_dtype: bfloat16 or float32; None: the dtype of `kv_a`.

    Returns:
        `(entries, completed)`: `[num_tokens, channels]`, `out_dtype`, contiguous, with zeros where
        a token completes no window; and `[num_tokens]`, bool: which tokens complete one.

    Raises:
        TypeError: If an argument has another type or dtype.
        ValueError: If an argument has another shape or stride, if the state has another window or
            number of series, or shares memory with another argument.

    Example:
        >>> from tile_kernels.attention import KVCompressorState
        >>> state = KVCompressorState.empty(1, 2, 1, overlap=False, dtype=torch.float32)
        >>> z, bias = torch.zeros(1, 1), torch.zeros(2, 1)
        >>> for kv in (1.0, 3.0):
        ...     print(kv_compress_step(state, torch.tensor([[kv]]), z, bias))
        (tensor([[0.]]), tensor([False]))
        (tensor([[2.]]), tensor([True]))
    """
    kept, lengths = state if isinstance(state, tuple) and len(state) == 2 else (state, None)
    return KV_COMPRESS_STEP(
        kept, lengths, kv_a, z_a, bias_a, kv_b, z_b, bias_b, slots, out_dtype
    )  # fmt: skip
