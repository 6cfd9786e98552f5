"""Compression while decoding: a state for each sequence, and one token at a time."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tile_kernels.attention.cases.decode import KV_COMPRESS_STEP
from tile_kernels.attention.compress import launch_compress
from tile_kernels.attention.windows import Series, check_dtype, check_series, row_vector
from tile_kernels.runtime import backends, checks
from tile_kernels.runtime.cases import Cost
from tile_kernels.runtime.launch import Kernel, alignment, dtype_name, nonempty
from tile_kernels.runtime.op import face, op
from tile_kernels.torch import compress as oracles

_APPEND = Kernel("tile_kernels.attention.kernels.append", "append")

INTEGERS = (torch.int32, torch.int64)


class KVCompressorState(tuple[Tensor, Tensor]):
    """What the compression of sequences must remember between tokens: a pair of tensors.

    | | shape | dtype | |
    |---|---|---|---|
    | `kept` | `[num_sequences, kept tokens, 2 or 4, channels]` | bfloat16 or float32 | rows |
    | `lengths` | `[num_sequences]` | int32 | tokens so far |

    Of each token its row in `kv_a`, `z_a` and, with two series, `kv_b`, `z_b`. The last window is
    kept, with two series the last two; token `t` is at place `t` modulo that. Being a tuple, it
    goes wherever tuples of tensors go: through `torch.compile`, into CUDA graphs.

    >>> state = KVCompressorState.empty(num_sequences=2, window=4, channels=8)
    >>> tuple(state.kept.shape), state.lengths.tolist()
    ((2, 8, 4, 8), [0, 0])
    """

    __slots__ = ()

    @classmethod
    def empty(
        cls,
        num_sequences: int,
        window: int,
        channels: int,
        *,
        overlap: bool = True,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
    ) -> KVCompressorState:
        """A state of sequences without tokens; `overlap`: two series."""
        for name, value in (
            ("num_sequences", num_sequences), ("window", window), ("channels", channels)
        ):  # fmt: skip
            checks.integer(name, value, 0 if name == "num_sequences" else 1)
        check_dtype("dtype", dtype, or_none=False)
        series = 2 if overlap else 1
        shape = (num_sequences, series * window, 2 * series, channels)
        kept = torch.zeros(shape, dtype=dtype, device=device)
        return cls((kept, torch.zeros(num_sequences, dtype=torch.int32, device=device)))

    @property
    def kept(self) -> Tensor:
        """The last tokens' rows."""
        return self[0]

    @property
    def lengths(self) -> Tensor:
        """Tokens of each sequence so far."""
        return self[1]

    @property
    def overlap(self) -> bool:
        """Whether there are two series."""
        return self.kept.shape[2] == 4

    @property
    def window(self) -> int:
        """Tokens of a window."""
        return self.kept.shape[1] // (2 if self.overlap else 1)

    def reset(self, slots: Tensor | None = None) -> None:
        """Forget the tokens of the sequences at `slots`, or of all; slots outside are left out."""
        if slots is None:
            self.lengths.zero_()
            return
        try:
            checks.tensor("slots", slots, ("slots",), INTEGERS)
        except (TypeError, ValueError) as error:
            raise type(error)(f"reset: {error}") from None
        count = self.lengths.shape[0]
        outside = (slots < 0) | (slots >= count)
        marked = torch.zeros(count + 1, dtype=torch.bool, device=slots.device)
        marked[torch.where(outside, count, slots).long()] = True
        self.lengths.masked_fill_(marked[:count], 0)

    def prefill(
        self,
        kv_a: Tensor,
        z_a: Tensor,
        kv_b: Tensor | None = None,
        z_b: Tensor | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        slots: Tensor | None = None,
    ) -> None:
        """Start sequences with the tokens that `kv_compress` took, to decode from there on.

        Sequence `i` of `cu_seqlens` (default: one, of all tokens) becomes that of `slots[i]`
        (default: `i`), whatever was there; each slot comes once, and sequences with slots outside
        of the state are left out. Nothing waits for the GPU, but for the checked mode, which looks
        at the slots.
        """
        given = [x for x in (kv_a, z_a, kv_b, z_b) if x is not None]
        if len(given) != self.kept.shape[2]:
            raise ValueError(
                f"prefill: kv_b and z_b must be given {'' if self.overlap else 'not '}here, got "
                f"{len(given)} tensors"
            )
        try:
            self._check_prompts(given, cu_seqlens, slots)
        except (TypeError, ValueError) as error:
            raise type(error)(f"prefill: {error}") from None
        if cu_seqlens is None:
            cu_seqlens = torch.arange(2, device=kv_a.device) * kv_a.shape[0]
        if slots is None:
            slots = torch.arange(cu_seqlens.shape[0] - 1, device=kv_a.device)
        if not slots.shape[0]:
            return
        bounds = cu_seqlens.long().clamp(0, kv_a.shape[0]).cummax(0).values
        start, length = bounds[:-1, None], bounds.diff()[:, None]
        ring = self.kept.shape[1]
        place = torch.arange(ring, device=kv_a.device)
        token = length - 1 - (length - 1 - place) % ring  # the last at each place, if not negative
        row = torch.where(token >= 0, start + token, 0)
        here = (token >= 0)[:, :, None, None]
        # What is left out is written like the first that is not: twice the same.
        count = self.lengths.shape[0]
        inside = (slots >= 0) & (slots < count)
        turn = torch.arange(slots.shape[0], device=slots.device)
        turn = torch.where(inside, turn, inside.int().argmax())
        slot, inside = slots.long()[turn].clamp(0, count - 1), inside[turn]
        if kv_a.shape[0]:
            rows = torch.stack([x.detach()[row] for x in given], 2)[turn]
            here = here[turn] & inside[:, None, None, None]
            self.kept[slot] = torch.where(here, rows, self.kept[slot])
        length = length[turn, 0].to(torch.int32)
        self.lengths[slot] = torch.where(inside, length, self.lengths[slot])

    def _check_prompts(
        self, given: list[Tensor], cu_seqlens: Tensor | None, slots: Tensor | None
    ) -> None:
        """Rows as the state keeps them, and a place for each sequence."""
        num_slots, _, _, channels = self.kept.shape
        for name, x in zip(("kv_a", "z_a", "kv_b", "z_b"), given):
            checks.tensor(
                name, x, ("num_tokens", "channels"), self.kept.dtype,
                shape=(given[0].shape[0], channels),
            )  # fmt: skip
        num_sequences = 1
        if cu_seqlens is not None:
            checks.tensor("cu_seqlens", cu_seqlens, ("num_bounds",), INTEGERS)
            if cu_seqlens.shape[0] < 1:
                raise ValueError("cu_seqlens must have at least one element, got 0")
            num_sequences = cu_seqlens.shape[0] - 1
        if slots is None:
            if num_sequences > num_slots:
                raise ValueError(
                    f"cu_seqlens must have at most {num_slots} sequences, as the state, or come "
                    f"with slots, got {num_sequences}"
                )
            return
        checks.tensor("slots", slots, ("num_sequences",), INTEGERS, shape=(num_sequences,))
        if not torch.compiler.is_compiling() and backends.is_checked():
            _check_slots(slots, 0, num_slots)


def _check(kept: Tensor, lengths: Tensor, *rest: Any) -> None:
    *given, slots, out_dtype = rest
    check_series(*given)
    kv_a, _, bias_a, kv_b, *_ = given
    series = 1 if kv_b is None else 2
    window = bias_a.shape[0]
    checks.tensor(
        "state", kept, ("num_sequences", "kept", "vectors", "channels"), kv_a.dtype,
        shape=(None, series * window, 2 * series, kv_a.shape[1]), contiguous=True,
    )  # fmt: skip
    num_sequences = kept.shape[0]
    checks.tensor(
        "state", lengths, ("num_sequences",), torch.int32, shape=(num_sequences,), contiguous=True
    )
    places = num_sequences * series * window
    if isinstance(places, int) and places > checks.MOST_SIZE:
        raise ValueError(f"state must keep at most {checks.MOST_SIZE} tokens, got {places}")
    tokens = kv_a.shape[0]
    if slots is not None:
        checks.tensor(
            "slots", slots, ("num_tokens",), torch.int32, shape=(tokens,), contiguous=True
        )
    elif tokens != num_sequences:
        raise ValueError(
            f"kv_a must have a token for each of {num_sequences} sequences of the state, or come "
            f"with slots, got {tokens}"
        )
    check_dtype("out_dtype", out_dtype)


def _check_values(kept: Tensor, lengths: Tensor, *rest: Any) -> None:
    slots = rest[-2]
    checks.in_range("state", lengths, 0, 2**31 - 2)
    if slots is not None:
        _check_slots(slots, -1, kept.shape[0])


def _check_slots(slots: Tensor, low: int, num_sequences: int) -> None:
    checks.in_range("slots", slots, low, num_sequences - 1)
    named, counts = slots[slots >= 0].unique(return_counts=True)
    if (counts > 1).any():
        twice = named[counts > 1][0].item()
        raise ValueError(f"slots must name a sequence once, but {twice} comes more often")


def _oracle(kept: Tensor, lengths: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    *series, slots, out_dtype = rest
    return oracles.kv_compress_step((kept, lengths), *series, slots=slots, out_dtype=out_dtype)


def _cost(kv_a: Tensor, kv_b: Tensor | None = None, **_: Any) -> Cost:
    """Rows in and kept, and a result; of those that complete a window here nothing is known."""
    series = 1 if kv_b is None else 2
    return Cost(kv_a.numel() * kv_a.element_size() * (4 * series + 1) + 20 * kv_a.shape[0])


@op(
    check=_check,
    oracle=_oracle,
    cost=_cost,
    cases=KV_COMPRESS_STEP,
    instead="tile_kernels.attention.kv_compress of whole sequences",
    values=_check_values,
    mutates=("kept", "lengths"),
    name="kv_compress_step",
)
def _step(
    kept: Tensor,
    lengths: Tensor,
    kv_a: Tensor,
    z_a: Tensor,
    bias_a: Tensor,
    kv_b: Tensor | None,
    z_b: Tensor | None,
    bias_b: Tensor | None,
    slots: Tensor | None,
    out_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    tokens, channels = kv_a.shape
    entries = kv_a.new_empty((tokens, channels), dtype=out_dtype or kv_a.dtype)
    completed = kv_a.new_empty((tokens,), dtype=torch.bool)
    if not nonempty(kv_a):
        return entries, completed
    places = lengths.new_empty((tokens, 3))
    given = Series.of(kv_a, z_a, bias_a, kv_b, z_b, bias_b)
    unit = max(alignment(kept) // kept.element_size(), 1)
    vector = math.gcd(row_vector(channels, given.rows), unit)
    problem = (
        channels, bias_a.shape[0], given.number, slots is not None, dtype_name(kv_a), vector
    )  # fmt: skip
    rows = (given.kv_a, given.z_a, given.kv_b, given.z_b)
    _APPEND.launch(problem, kept, lengths, slots, *rows, places, completed)
    kv, z, *others = kept.view(-1, 2 * given.number, channels).unbind(1)
    next_kv, next_z = others or (None, None)
    launch_compress(Series.of(kv, z, bias_a, next_kv, next_z, bias_b), places, entries)
    return entries, completed


@face(_step, oracle=oracles.kv_compress_step, mutates=("state",))
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
    """One token more for each sequence, and the entries that these complete.

    | argument | shape | dtype | meaning |
    |---|---|---|---|
    | `state` | a `KVCompressorState` | | written |
    | `kv_a`, `z_a` | `[num_tokens, channels]` | as the state, `stride(1) == 1` | of the tokens |
    | `bias_a` | `[window, channels]` | float32, `stride(1) == 1` | as in `kv_compress` |
    | `kv_b`, `z_b`, `bias_b` | as those of a | | with two series |
    | `slots` | `[num_tokens]` | int32, contiguous | the sequence of a token; None: in order |
    | `out_dtype` | | bfloat16, float32 | None: that of `kv_a` |
    | returns `entries` | `[num_tokens, channels]` | `out_dtype`, contiguous | zeros: none |
    | returns `completed` | `[num_tokens]` | bool | which tokens complete a window |

    `entries[completed]` are the new ones; they have the bits that `kv_compress` of the whole
    sequence gives. The shapes are always the same and nothing waits, so a CUDA graph can record
    the step. A token with a slot outside the state (-1: padding) is left out; no slot may come
    twice. Without a gradient.

    Raises `TypeError` or `ValueError` with the argument's name.

    >>> state = KVCompressorState.empty(1, 2, 1, overlap=False, dtype=torch.float32)
    >>> z, bias = torch.zeros(1, 1), torch.zeros(2, 1)
    >>> for kv in (1.0, 3.0):
    ...     print(kv_compress_step(state, torch.tensor([[kv]]), z, bias))
    (tensor([[0.]]), tensor([False]))
    (tensor([[2.]]), tensor([True]))
    """
    if not (isinstance(state, tuple) and len(state) == 2):
        raise TypeError(f"state must be a KVCompressorState, got {type(state).__name__}")
    kept, lengths = state
    return _step(kept, lengths, kv_a, z_a, bias_a, kv_b, z_b, bias_b, slots, out_dtype)
