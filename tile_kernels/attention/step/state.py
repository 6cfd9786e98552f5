"""What the compression of sequences remembers while decoding."""

from __future__ import annotations

import torch
from torch import Tensor

from tile_kernels.attention.windows import check_dtype
from tile_kernels.runtime import backends, checks

INTEGERS = (torch.int32, torch.int64)


class KVCompressorState(tuple[Tensor, Tensor]):
    """The state of incremental compression, for decoding: a pair of tensors.

    The state stores the rows of recent tokens in `kv_a` and `z_a`, and with two series also in
    `kv_b` and `z_b`. These are the tokens of the last window, or with two series those of the last
    two windows. Token `t` is stored at index `t` modulo their number. The state is a tuple of
    tensors, so it works under `torch.compile` and in CUDA graphs.

    Attributes:
        kept: `[num_sequences, kept tokens, 2 or 4, channels]`, bfloat16 or float32: the rows.
        lengths: `[num_sequences]`, int32: the number of tokens so far.

    Example:
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
        """Returns a state for sequences that have no tokens yet.

        Args:
            num_sequences: The number of sequences.
            window: Tokens of a window.
            channels: Channels of an entry.
            overlap: Whether there are two series, as in compressed sparse attention.
            dtype: bfloat16 or float32.
            device: The device of the tensors.
        """
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
        """Removes the tokens of some sequences, or of all.

        Args:
            slots: Indices of sequences; those outside the state are ignored. None: all sequences.
        """
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
        """Starts sequences with the tokens that `kv_compress` compressed, to decode from there on.

        The host does not wait for the GPU, except in the checked mode, which reads the slots.

        Args:
            kv_a: `[num_tokens, channels]`: the values of `kv_compress`.
            z_a: `[num_tokens, channels]`: its scores.
            kv_b: `[num_tokens, channels]`: the values of the second series, if there is one.
            z_b: `[num_tokens, channels]`: its scores.
            cu_seqlens: `[num_sequences + 1]`, int32: the bounds of the sequences; None: one
                sequence.
            slots: `[num_sequences]`: the sequences of the state that are replaced, each at most
                once; those outside the state are ignored. None: sequence `i` replaces that at `i`.
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
        index = torch.arange(ring, device=kv_a.device)
        token = length - 1 - (length - 1 - index) % ring  # the last at each index, if not negative
        row = torch.where(token >= 0, start + token, 0)
        here = (token >= 0)[:, :, None, None]
        # A sequence that is ignored writes what the first other one writes: the same twice.
        count = self.lengths.shape[0]
        inside = (slots >= 0) & (slots < count)
        source = torch.arange(slots.shape[0], device=slots.device)
        source = torch.where(inside, source, inside.int().argmax())
        slot, inside = slots.long()[source].clamp(0, count - 1), inside[source]
        if kv_a.shape[0]:
            rows = torch.stack([x.detach()[row] for x in given], 2)[source]
            here = here[source] & inside[:, None, None, None]
            self.kept[slot] = torch.where(here, rows, self.kept[slot])
        length = length[source, 0].to(torch.int32)
        self.lengths[slot] = torch.where(inside, length, self.lengths[slot])

    def _check_prompts(
        self, given: list[Tensor], cu_seqlens: Tensor | None, slots: Tensor | None
    ) -> None:
        """Rows as the state keeps them, and a slot for each sequence."""
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
            check_slots(slots, 0, num_slots)


def check_slots(slots: Tensor, low: int, num_sequences: int) -> None:
    """For the checked mode: slots are `low` or more, of the state, and each comes once."""
    checks.in_range("slots", slots, low, num_sequences - 1)
    named, counts = slots[slots >= 0].unique(return_counts=True)
    if (counts > 1).any():
        twice = named[counts > 1][0].item()
        raise ValueError(
            f"slots must contain each sequence at most once, but {twice} occurs more than once"
        )
