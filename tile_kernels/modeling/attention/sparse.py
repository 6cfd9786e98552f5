"""`CompressedSparseAttention`: over a window and the entries that an indexer chooses."""

from __future__ import annotations

import torch
from torch import Tensor

from tile_kernels import attention
from tile_kernels.modeling.attention.base import CHANNELS, Kept, Projected, WindowAttention
from tile_kernels.modeling.attention.indexer import DIMS, FORMATS, IndexerLoss, LightningIndexer
from tile_kernels.modeling.attention.rope import Rope
from tile_kernels.modeling.attention.sequences import Places, Sequences
from tile_kernels.modeling.attention.state import AttentionState, empty_keys
from tile_kernels.runtime import checks

MAX_TOPK = 4096
MAX_INDEX_HEADS = 64


class CompressedSparseAttention(WindowAttention):
    """Attention over a window of tokens and the compressed entries that an indexer chooses.

    As `HeavilyCompressedAttention`, with overlapping entries of few tokens and, for each query,
    the `topk` of them that the indexer scores highest. The choice has no gradient: the indexer
    learns to imitate the attention, from the loss that `layer(x, indexer_loss=True)` returns.

    Args:
        hidden: Channels of a token.
        heads: Query heads; 64 and 128 are the fast ones.
        head_dim: Channels of a row: 512.
        rope_dim: How many of these are rotated, and of the indexer's channels.
        q_rank: Channels between the two projections of queries.
        out_groups: Groups of heads that are projected apart; a divisor of `heads`.
        out_rank: Channels of a group after that.
        window: Tokens that are seen without compression.
        ratio: Tokens of an entry.
        topk: Entries that a query attends to, in `1..4096`. The attribute may be changed.
        index_heads: Heads of the indexer.
        index_dim: Channels of a head of the indexer: 64, 128 or 256.
        index_format: `"e2m1"`, `"e4m3"` or `"bf16"`: what its queries and keys are rounded to.
        rope: Positions; None: V4's.
        norm_eps: Of all norms.
        cache: `"bf16"`, or `"fp8"` for pages of 584 bytes a row.
        device: Of the parameters.
        dtype: Of the projections; norms, sinks and compressors are float32.

    Example:
        >>> layer = CompressedSparseAttention(
        ...     32, heads=2, q_rank=16, out_groups=1, out_rank=16, window=4, topk=2, index_heads=2
        ... )
        >>> y, loss = layer(torch.randn(2, 9, 32), indexer_loss=True)
        >>> y.shape, loss.shape
        (torch.Size([2, 9, 32]), torch.Size([]))
    """

    has_indexer = True

    def __init__(
        self,
        hidden: int,
        *,
        heads: int = 64,
        head_dim: int = CHANNELS,
        rope_dim: int = 64,
        q_rank: int = 1024,
        out_groups: int = 8,
        out_rank: int = 1024,
        window: int = 128,
        ratio: int = 4,
        topk: int = 512,
        index_heads: int = 64,
        index_dim: int = 128,
        index_format: str = "e2m1",
        rope: Rope | None = None,
        norm_eps: float = 1e-6,
        cache: str = "bf16",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            hidden, heads=heads, head_dim=head_dim, rope_dim=rope_dim, q_rank=q_rank,
            out_groups=out_groups, out_rank=out_rank, window=window, ratio=ratio, overlap=True,
            rope=rope, norm_eps=norm_eps, cache=cache, device=device, dtype=dtype,
        )  # fmt: skip
        with checks.named("CompressedSparseAttention"):
            topk = checks.integer("topk", topk, 1, MAX_TOPK)
            index_heads = checks.integer("index_heads", index_heads, 1, MAX_INDEX_HEADS)
            index_dim = checks.integer("index_dim", index_dim, 1)
            checks.one_of("index_dim", index_dim, [dim for dim in DIMS if dim >= rope_dim])
            checks.one_of("index_format", index_format, FORMATS)
        self.topk = topk
        self.indexer = LightningIndexer(
            hidden, q_rank, heads=index_heads, dim=index_dim, rope_dim=rope_dim, ratio=ratio,
            fmt=index_format, norm_eps=norm_eps, device=device, dtype=dtype,
        )  # fmt: skip

    def extra_repr(self) -> str:
        """The sizes."""
        return f"{super().extra_repr()}, topk={self.topk}"

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        state: AttentionState | None = None,
        slots: Tensor | None = None,
        indexer_loss: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attention within each sequence.

        Args:
            x: As in `HeavilyCompressedAttention.forward`.
            cu_seqlens: Likewise.
            state: Likewise.
            slots: Likewise.
            indexer_loss: Also returns the loss of the indexer: the divergence of its distribution
                over the chosen entries from that of the attention itself, the mean over tokens.
                Its gradient reaches the parameters of the indexer alone, and no other loss reaches
                these.

        Returns:
            `y`, as `x`; or `(y, loss)`, the loss float32 without dimensions.

        Raises:
            TypeError: If an argument has another type or dtype.
            ValueError: If a shape does not fit, or a prompt is longer than the state has room for.
        """
        with checks.named("CompressedSparseAttention"):
            checks.boolean("indexer_loss", indexer_loss)
            if indexer_loss and state is not None:
                raise ValueError(
                    "indexer_loss must be False with a state, because it is for training"
                )
        if not indexer_loss:
            return super().forward(x, cu_seqlens=cu_seqlens, state=state, slots=slots)
        sequences = self._sequences(x, cu_seqlens, None, slots)
        out, projected, loss = self._attended_with_loss(x.flatten(0, -2), sequences)
        return self.output(out, projected.angles).view(x.shape), loss

    def _attended(
        self,
        x: Tensor,
        sequences: Sequences,
        state: AttentionState | None = None,
        slots: Tensor | None = None,
    ) -> tuple[Tensor, Projected, Kept]:
        projected = self.project(x, sequences.tokens().position)
        entries = self._all_entries(x, sequences, state, slots)
        with torch.no_grad():
            q, weights = self.indexer.queries(x, projected.compressed, projected.angles)
            keys = self._keys(x, sequences, None if state is None else state.indexer, slots)
            parts = self.indexer.parts(keys)
            selected = self._selected(self.indexer.parts(q), parts, weights, sequences)
        out, _ = self._attend(projected, entries, selected, sequences)
        return out, projected, Kept(entries, parts)

    def _attended_with_loss(
        self, x: Tensor, sequences: Sequences
    ) -> tuple[Tensor, Projected, Tensor]:
        """As `_attended`, with what the indexer would have to learn."""
        projected = self.project(x, sequences.tokens().position)
        entries = self._all_entries(x, sequences)
        q, weights = self.indexer.queries(x, projected.compressed, projected.angles)
        q, keys = self.indexer.rounded(q), self.indexer.rounded(self._keys(x, sequences))
        start, end = self._ranges(sequences)
        with torch.no_grad():
            selected = attention.indexer_select(q, keys, weights, start, end, self.topk)
        out, lse = self._attend(projected, entries, selected, sequences)
        with torch.no_grad():
            full = torch.logaddexp(lse, self.attn_sink.float())
            target = attention.attention_target(projected.q, entries, selected, full, self.sm_scale)
        loss = IndexerLoss.apply(q, keys, weights, target, selected, start, end)
        return out, projected, loss

    def _keys(
        self,
        x: Tensor,
        sequences: Sequences,
        state: attention.KVCompressorState | None = None,
        slots: Tensor | None = None,
    ) -> Tensor:
        """Keys of the indexer, before rounding."""
        entries = self.indexer.compressor(x.detach(), sequences, state, slots)
        angles = self.entry_angles(sequences.entries(self.ratio).position)
        return self.indexer.keys(entries, angles)

    def _ranges(self, sequences: Sequences) -> tuple[Tensor, Tensor]:
        return attention.indexer_ranges(sequences.bounds, self.ratio, sequences.num_tokens)

    def _selected(
        self,
        q: tuple[Tensor, ...],
        keys: tuple[Tensor, ...],
        weights: Tensor,
        sequences: Sequences,
    ) -> Tensor:
        return self.indexer.select(q, keys, weights, *self._ranges(sequences), self.topk)

    def _attend(
        self, projected: Projected, entries: Tensor, selected: Tensor, sequences: Sequences
    ) -> tuple[Tensor, Tensor]:
        """Attended rows, and the logarithm of the sum of exponentials without the sink."""
        rows = torch.cat((projected.rows, entries))
        indices, lengths = attention.attention_indices(
            selected, sequences.bounds, window=self.window, ratio=self.ratio,
            num_tokens=sequences.num_tokens, entry_offset=sequences.num_tokens,
        )  # fmt: skip
        out, _, lse = attention.sparse_attention(
            projected.q, rows, indices, self.sm_scale, sink=self.attn_sink.float(),
            topk_length=lengths, return_stats=True,
        )  # fmt: skip
        return out, lse

    # ---- decoding -------------------------------------------------------------------------------

    def _empty_keys(self, count: int) -> tuple[Tensor, ...]:
        return empty_keys(self.indexer.fmt, count, self.indexer.dim, self.attn_sink.device)

    def _indexer_state(self, num_sequences: int) -> attention.KVCompressorState | None:
        return self.indexer.compressor.state(num_sequences)

    def _step_entries(
        self, projected: Projected, places: Places, state: AttentionState, slots: Tensor | None
    ) -> None:
        super()._step_entries(projected, places, state, slots)
        if state.indexer is None:
            return
        entries = self.indexer.compressor.step(projected.x, state.indexer, slots)
        written = self._completed(places)
        keys = self.indexer.keys(entries, self.entry_angles(written.position))
        state.write_keys(self.indexer.parts(keys), written)

    def _chosen(
        self, projected: Projected, places: Places, state: AttentionState
    ) -> tuple[Tensor, Tensor]:
        q, weights = self.indexer.queries(projected.x, projected.compressed, projected.angles)
        start = self._first_key(places, state)
        count = self._num_entries(places, state)
        selected = self.indexer.select(
            self.indexer.parts(q), state.keys, weights, start, start + count, self.topk
        )
        return selected, count.clamp(max=self.topk)
