"""What attention layers share: projections, rows, entries, the output, and decoding.

One softmax has the rows of the last tokens, compressed entries of older ones and a sink. All heads
share one row of 512 channels for a token or an entry, which is key and value at once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from tile_kernels import attention, quant
from tile_kernels.attention.windows import MAX_WINDOW
from tile_kernels.modeling.attention.entries import EntryCompressor, float32_rms_norm
from tile_kernels.modeling.attention.rope import Angles, Rope, angles_at, rotate_tail
from tile_kernels.modeling.attention.sequences import Places, Sequences
from tile_kernels.modeling.attention.state import LAYOUTS, PAGE, AttentionState
from tile_kernels.modeling.bf16_experts import uses_autocast
from tile_kernels.modeling.norm import rms_norm
from tile_kernels.runtime import backends, checks

CHANNELS = 512  # of a row, which the operators of attention are for
GROUP = 64  # channels of a row that share a power of two in e4m3


class Projected(NamedTuple):
    """What a layer computes of tokens before it attends."""

    x: Tensor  # [T, hidden]
    compressed: Tensor  # [T, q_rank]
    q: Tensor  # [T, heads, 512], bfloat16
    rows: Tensor  # [T, 512], bfloat16: keys and values of the tokens
    angles: Angles  # of the tokens


class Kept(NamedTuple):
    """What a state keeps of prompts besides the rows of the last tokens."""

    entries: Tensor | None
    keys: tuple[Tensor, ...] = ()


class WindowAttention(nn.Module):
    """What layers with and without compression share; `HeavilyCompressedAttention` documents it."""

    frequency_bits: Tensor
    has_indexer = False

    def __init__(
        self,
        hidden: int,
        *,
        heads: int,
        head_dim: int,
        rope_dim: int,
        q_rank: int,
        out_groups: int,
        out_rank: int,
        window: int,
        ratio: int,
        overlap: bool,
        rope: Rope | None,
        norm_eps: float,
        cache: str,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        with checks.named(type(self).__name__):
            hidden, heads, q_rank, out_groups, out_rank = (
                checks.integer(name, value, 1, checks.MOST_SIZE)
                for name, value in (
                    ("hidden", hidden), ("heads", heads), ("q_rank", q_rank),
                    ("out_groups", out_groups), ("out_rank", out_rank),
                )
            )  # fmt: skip
            window = checks.integer("window", window, 1, MAX_WINDOW)
            ratio = checks.integer("ratio", ratio, 1 if overlap else 0, MAX_WINDOW)
            head_dim = checks.integer("head_dim", head_dim, 1)
            if head_dim != CHANNELS:
                raise ValueError(f"head_dim must be {CHANNELS}, got {head_dim}")
            rope_dim = checks.integer("rope_dim", rope_dim, 2, CHANNELS - GROUP)
            if rope_dim % GROUP:
                raise ValueError(f"rope_dim must be a multiple of {GROUP}, got {rope_dim}")
            if heads % out_groups:
                raise ValueError(f"out_groups must divide {heads} heads, got {out_groups}")
            if rope is not None and not isinstance(rope, Rope):
                raise TypeError(f"rope must be a Rope or None, got {type(rope).__name__}")
            norm_eps = checks.epsilon("norm_eps", norm_eps)
            checks.one_of("cache", cache, tuple(LAYOUTS))
            if cache == "fp8" and rope_dim != GROUP:
                raise ValueError(f"rope_dim must be {GROUP} for cache='fp8', got {rope_dim}")
            checks.device("device", device)
            checks.parameter_dtype("dtype", dtype, checks.PARAMETER_DTYPES)
        self.hidden, self.heads, self.head_dim, self.rope_dim = hidden, heads, head_dim, rope_dim
        self.out_groups, self.out_rank = out_groups, out_rank
        self.window, self.ratio, self.cache, self.norm_eps = window, ratio, cache, norm_eps
        self.rope = rope or (Rope() if ratio else Rope.plain())
        self.sm_scale = head_dim**-0.5
        self.wq_a = nn.Linear(hidden, q_rank, False, device, dtype)
        self.q_norm = nn.RMSNorm(q_rank, norm_eps, device=device, dtype=torch.float32)
        self.wq_b = nn.Linear(q_rank, heads * head_dim, False, device, dtype)
        self.wkv = nn.Linear(hidden, head_dim, False, device, dtype)
        self.kv_norm = nn.RMSNorm(head_dim, norm_eps, device=device, dtype=torch.float32)
        self.attn_sink = nn.Parameter(torch.empty(heads, device=device, dtype=torch.float32))
        group_width = heads * head_dim // out_groups
        self.wo_a = nn.Linear(group_width, out_groups * out_rank, False, device, dtype)
        self.wo_b = nn.Linear(out_groups * out_rank, hidden, False, device, dtype)
        self.compressor: EntryCompressor | None = None
        if ratio:
            self.compressor = EntryCompressor(
                hidden, head_dim, ratio, overlap=overlap, norm_eps=norm_eps, device=device
            )
        # Bits instead of numbers: `layer.bfloat16()` must not round frequencies.
        bits = torch.empty(rope_dim // 2, dtype=torch.int32, device=device)
        self.register_buffer("frequency_bits", bits, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sinks of zero, and the frequencies, which no checkpoint has; the parts have their own."""
        nn.init.zeros_(self.attn_sink)
        frequencies = self.rope.frequencies(self.rope_dim, self.frequency_bits.device)
        self.frequency_bits.copy_(frequencies.view(torch.int32))

    def extra_repr(self) -> str:
        """The sizes."""
        return f"heads={self.heads}, window={self.window}, ratio={self.ratio}, cache={self.cache!r}"

    # ---- the parts of a layer -------------------------------------------------------------------

    def angles(self, positions: Tensor) -> Angles:
        """Returns the angles by which rows are rotated.

        Args:
            positions: `[n]`: the positions of tokens.
        """
        return angles_at(positions, self.frequency_bits.view(torch.float32))

    def project(self, x: Tensor, positions: Tensor) -> Projected:
        """Computes the queries and rows of tokens.

        Args:
            x: `[T, hidden]`.
            positions: `[T]`: the positions of the tokens.
        """
        angles = self.angles(positions)
        compressed = rms_norm(self.wq_a(x), self.q_norm.weight, self.norm_eps)
        q = self.wq_b(compressed).unflatten(-1, (self.heads, self.head_dim))
        q = rotate_tail(rms_norm(q, None, self.norm_eps), angles).bfloat16()
        row = float32_rms_norm(self.wkv(x).float(), self.kv_norm.weight, self.norm_eps)
        return Projected(x, compressed, q, self.round_rows(row, angles), angles)

    def round_rows(self, rows: Tensor, angles: Angles) -> Tensor:
        """Rotates normed rows and rounds them as a cache stores them.

        Channels that are not rotated are rounded to e4m3 with one power-of-two scale per 64 of
        them. The gradient ignores the rounding.

        Args:
            rows: `[n, 512]`: normed rows.
            angles: The angles of their positions.

        Returns:
            `[n, 512]`, bfloat16.
        """
        rotated = rotate_tail(rows.float(), angles)
        plain, tail = rotated.split((self.head_dim - self.rope_dim, self.rope_dim), dim=-1)
        rounded = quant.fake_cast(plain, "e4m3", GROUP, round_sf=True)
        return torch.cat((rounded, tail), -1).bfloat16()

    def entry_angles(self, index: Tensor) -> Angles:
        """Returns the angles of entries, which are those of their first token.

        Args:
            index: `[n]`: the indices of entries in their sequences.
        """
        return self.angles(index * self.ratio)

    def output(self, out: Tensor, angles: Angles) -> Tensor:
        """Rotates the results of attention back, and projects them by groups of heads.

        Args:
            out: `[T, heads, 512]`: the results of attention.
            angles: The angles of the positions of the queries.

        Returns:
            `[T, hidden]`.
        """
        out = rotate_tail(out, angles, inverse=True)
        out = out.unflatten(1, (self.out_groups, -1)).flatten(2)
        weight = self.wo_a.weight.unflatten(0, (self.out_groups, self.out_rank))
        if not uses_autocast(out):
            out = out.to(weight.dtype)
        return self.wo_b(torch.einsum("tgc,grc->tgr", out, weight).flatten(1))

    # ---- whole sequences ------------------------------------------------------------------------

    def forward(
        self,
        x: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        state: AttentionState | None = None,
        slots: Tensor | None = None,
    ) -> Tensor:
        """Attention within each sequence.

        Args:
            x: `[B, L, hidden]`; or `[T, hidden]`, one sequence or several with `cu_seqlens`.
            cu_seqlens: `[num_sequences + 1]`, int32: where sequences begin, and the end of the
                last. Rows outside of all sequences have results without meaning.
            state: A state in which these sequences start, to decode from there on. There are no
                gradients then.
            slots: `[num_sequences]`, int32 or int64: where in the state; None: in order. Sequences
                with slots outside of the state are not kept.

        Returns:
            As `x`.

        Raises:
            TypeError: If an argument has another type or dtype.
            ValueError: If a shape does not fit, or a prompt is longer than the state has room for.
        """
        sequences = self._sequences(x, cu_seqlens, state, slots)
        if state is None:
            out, projected, _ = self._attended(x.flatten(0, -2), sequences)
            return self.output(out, projected.angles).view(x.shape)
        with torch.no_grad():
            out, projected, kept = self._attended(x.flatten(0, -2), sequences, state, slots)
            self._remember(projected.rows, kept, sequences, state, slots)
            return self.output(out, projected.angles).view(x.shape)

    def _attended(
        self,
        x: Tensor,
        sequences: Sequences,
        state: AttentionState | None = None,
        slots: Tensor | None = None,
    ) -> tuple[Tensor, Projected, Kept]:
        """Attended rows, what went into them, and what a state is to keep."""
        projected = self.project(x, sequences.tokens().position)
        entries = self._all_entries(x, sequences, state, slots) if self.ratio else None
        out, _, _ = attention.hca_attention(
            projected.q, projected.rows, entries, self.sm_scale, cu_seqlens=sequences.bounds,
            ratio=self.ratio, window=self.window, sink=self.attn_sink.float(), return_stats=True,
        )  # fmt: skip
        return out, projected, Kept(entries)

    def _all_entries(
        self,
        x: Tensor,
        sequences: Sequences,
        state: AttentionState | None = None,
        slots: Tensor | None = None,
    ) -> Tensor:
        """Entries of all sequences as rows, bfloat16 `[num_entries, 512]`."""
        if self.compressor is None:
            raise RuntimeError("unreachable: a window alone has no entries")
        open_windows = None if state is None else state.compressor
        entries = self.compressor(x, sequences, open_windows, slots)
        return self.round_rows(entries, self.entry_angles(sequences.entries(self.ratio).position))

    def _remember(
        self,
        rows: Tensor,
        kept: Kept,
        sequences: Sequences,
        state: AttentionState,
        slots: Tensor | None,
    ) -> None:
        """Puts prompts into a state."""
        lengths, places = sequences.lengths(), sequences.tokens()
        recent = places.position >= lengths[places.sequence] - self.window
        state.write_window(rows, _in_slots(places, slots, state, recent))
        if kept.entries is not None:
            places = _in_slots(sequences.entries(self.ratio), slots, state)
            state.write_entries(kept.entries, places)
            state.write_keys(kept.keys, places)
        sequence = torch.arange(sequences.num_sequences, device=rows.device)
        places = _in_slots(Places(sequence, lengths, sequence >= 0), slots, state)
        # Sequences that are not kept write to one place past the end, which is cut off.
        target = torch.where(places.exists, places.sequence, state.num_sequences)
        longer = torch.cat((state.lengths, state.lengths.new_zeros(1)))
        longer[target] = lengths.to(torch.int32)
        state.lengths.copy_(longer[:-1])

    # ---- decoding -------------------------------------------------------------------------------

    def state(self, num_sequences: int, max_length: int) -> AttentionState:
        """Room for sequences of up to `max_length` tokens, none of which has tokens yet.

        Args:
            num_sequences: How many.
            max_length: Tokens of the longest. A token past it is attended with its window and the
                entries that there is room for.
        """
        with checks.named(type(self).__name__):
            checks.integer("num_sequences", num_sequences, 0, checks.MOST_SIZE)
            checks.integer("max_length", max_length, 1, checks.MOST_SIZE)
        device, layout = self.attn_sink.device, LAYOUTS[self.cache]
        window = attention.kv_cache_empty(num_sequences, self.window, layout, device=device)
        lengths = torch.zeros(num_sequences, dtype=torch.int32, device=device)
        if self.compressor is None:
            return AttentionState(window, None, (), None, None, lengths)
        pages = num_sequences * -(-max(max_length // self.ratio, 1) // PAGE)
        return AttentionState(
            window,
            attention.kv_cache_empty(pages, PAGE, layout, device=device),
            self._empty_keys(pages * PAGE),
            self.compressor.state(num_sequences),
            self._indexer_state(num_sequences),
            lengths,
        )

    def _empty_keys(self, count: int) -> tuple[Tensor, ...]:  # noqa: ARG002
        return ()

    def _indexer_state(self, num_sequences: int) -> attention.KVCompressorState | None:  # noqa: ARG002
        return None

    @torch.no_grad()
    def step(self, x: Tensor, state: AttentionState, slots: Tensor | None = None) -> Tensor:
        """One token more for each sequence, after those that the state has.

        Shapes are always the same and the host does not wait for the device, so that a CUDA graph
        can record it. Without a gradient.

        Args:
            x: `[num_tokens, hidden]`.
            state: What `state` made, written in place.
            slots: `[num_tokens]`, int32: the sequence of each token, none twice. A token with a
                slot outside of the state (-1: padding) changes nothing. None: token `i` belongs to
                sequence `i`, and there is one for each.

        Returns:
            As `x`; without meaning for padding.
        """
        with checks.named(type(self).__name__):
            self._check_step(x, state, slots)
        places = self._next_places(state, slots)
        projected = self.project(x, places.position)
        state.write_window(projected.rows, places)
        self._step_entries(projected, places, state, slots)
        out = self._attend_state(projected, places, state)
        state.lengths.index_add_(0, places.sequence, places.exists.to(torch.int32))
        return self.output(out, projected.angles)

    def _next_places(self, state: AttentionState, slots: Tensor | None) -> Places:
        """Where the next token of each sequence belongs."""
        count = state.num_sequences
        if slots is None:
            sequence = torch.arange(count, device=state.lengths.device)
            return Places(sequence, state.lengths.long(), sequence >= 0)
        exists = (slots >= 0) & (slots < count)
        sequence = slots.long().clamp(0, max(count - 1, 0))
        return Places(sequence, state.lengths[sequence].long(), exists)

    def _step_entries(
        self, projected: Projected, places: Places, state: AttentionState, slots: Tensor | None
    ) -> None:
        """Writes the entries that tokens complete."""
        if self.compressor is None or state.compressor is None:
            return
        entries = self.compressor.step(projected.x, state.compressor, slots)
        written = self._completed(places)
        state.write_entries(self.round_rows(entries, self.entry_angles(written.position)), written)

    def _completed(self, places: Places) -> Places:
        """Where the entries belong that tokens at `places` complete."""
        complete = (places.position + 1) % self.ratio == 0
        return Places(places.sequence, places.position // self.ratio, places.exists & complete)

    def _attend_state(self, projected: Projected, places: Places, state: AttentionState) -> Tensor:
        """Attention of one token of each sequence over what the state has of it."""
        chosen: tuple[Tensor | None, Tensor | None] = (None, None)
        if state.entries is not None:
            chosen = self._chosen(projected, places, state)
        return self._attend_rows(projected.q, places, state, *chosen)

    def _attend_rows(
        self,
        q: Tensor,
        places: Places,
        state: AttentionState,
        chosen: Tensor | None,
        count: Tensor | None,
    ) -> Tensor:
        """The same with the slots of entries `[n, k]`, of which the first `count` are valid."""
        seen = torch.where(places.exists, places.position + 1, 0).clamp(max=self.window)
        index = torch.arange(self.window, device=q.device)
        window = places.sequence[:, None] * self.window + index
        out, _ = attention.sparse_attention_decode(
            q[:, None], state.window, window[:, None].to(torch.int32), self.sm_scale,
            sink=self.attn_sink.float(), topk_length=seen.to(torch.int32),
            extra_cache=state.entries,
            extra_indices=None if chosen is None else chosen[:, None],
            extra_topk_length=count,
        )  # fmt: skip
        return out[:, 0]

    def _chosen(
        self, projected: Projected, places: Places, state: AttentionState
    ) -> tuple[Tensor, Tensor]:
        """Slots of the entries that each token attends to, valid ones first, and their number."""
        del projected
        count = self._num_entries(places, state)
        index = torch.arange(state.max_entries, device=count.device, dtype=torch.int32)
        return self._first_key(places, state)[:, None] + index, count

    def _num_entries(self, places: Places, state: AttentionState) -> Tensor:
        """Entries that each token sees: int32 `[n]`."""
        count = ((places.position + 1) // self.ratio).clamp(max=state.max_entries)
        return torch.where(places.exists, count, 0).to(torch.int32)

    def _first_key(self, places: Places, state: AttentionState) -> Tensor:
        """The slot of the first entry of each sequence: int32 `[n]`."""
        return (places.sequence * state.max_entries).to(torch.int32)

    # ---- checks ---------------------------------------------------------------------------------

    def _sequences(
        self,
        x: Tensor,
        cu_seqlens: Tensor | None,
        state: AttentionState | None,
        slots: Tensor | None,
    ) -> Sequences:
        with checks.named(type(self).__name__):
            checks.tensor_for("x", x, self.wq_a.weight)
            sequences = Sequences.in_rows(x, cu_seqlens, self.hidden)
            if state is None:
                if slots is not None:
                    raise ValueError("slots need a state, got None")
                return sequences
            self._check_state(state)
            if slots is not None:
                checks.tensor(
                    "slots",
                    slots,
                    ("num_sequences",),
                    checks.INTEGERS,
                    shape=(sequences.num_sequences,),
                )
                checks.tensor_on("slots", slots, x.device)
                _check_room(state, sequences.num_sequences)
            elif sequences.num_sequences > state.num_sequences:
                raise ValueError(
                    f"x must have at most {state.num_sequences} sequences, as the state, or come "
                    f"with slots, got {sequences.num_sequences}"
                )
            room = state.max_entries * self.ratio
            if self.ratio and sequences.length is not None and sequences.length > room:
                raise ValueError(
                    f"x must have at most {room} tokens for this state, got {sequences.length}"
                )
            return sequences

    def _check_step(self, x: Tensor, state: AttentionState, slots: Tensor | None) -> None:
        checks.tensor_for("x", x, self.wq_a.weight)
        checks.tensor("x", x, ("num_tokens", "hidden"), shape=(None, self.hidden))
        self._check_state(state)
        if slots is not None:
            shape = (x.shape[0],)
            checks.tensor(
                "slots", slots, ("num_tokens",), torch.int32, shape=shape, contiguous=True
            )
            checks.tensor_on("slots", slots, x.device)
            _check_room(state, x.shape[0])
        elif x.shape[0] != state.num_sequences:
            raise ValueError(
                f"x must have a token for each of {state.num_sequences} sequences of the state, or "
                f"come with slots, got {x.shape[0]}"
            )
        if not torch.compiler.is_compiling() and backends.is_checked() and self.ratio:
            room = state.max_entries * self.ratio
            checks.in_range("state.lengths", state.lengths, 0, room - 1)

    def _check_state(self, state: AttentionState) -> None:
        if not isinstance(state, AttentionState):
            raise TypeError(f"state must be an AttentionState, got {type(state).__name__}")
        checks.tensor_on("state.lengths", state.lengths, self.attn_sink.device)
        given = (
            state.window.shape[1],
            "bf16" if state.window.dtype is torch.bfloat16 else "fp8",
            0 if state.compressor is None else state.compressor.window,
            len(state.keys) > 0,
        )
        wanted = (self.window, self.cache, self.ratio, self.has_indexer)
        if given != wanted:
            names = "(window, cache, ratio, whether it has an indexer)"
            raise ValueError(f"state must be one of {names} = {wanted}, got {given}")


def _check_room(state: AttentionState, count: int) -> None:
    """Padding, too, is computed with what the state has of a sequence."""
    if not state.num_sequences and count:
        raise ValueError("state must have room for at least 1 sequence, got 0")


def _in_slots(
    places: Places, slots: Tensor | None, state: AttentionState, also: Tensor | None = None
) -> Places:
    """The places with sequences numbered as in the state; those that are not there do not exist."""
    sequence = places.sequence if slots is None else slots.long()[places.sequence]
    exists = places.exists & (sequence >= 0) & (sequence < state.num_sequences)
    if also is not None:
        exists = exists & also
    return Places(torch.where(exists, sequence, 0), places.position, exists)
