"""`HeavilyCompressedAttention`: over a window and all entries, or over a window alone."""

from __future__ import annotations

import torch

from tile_kernels.modeling.attention.base import CHANNELS, WindowAttention
from tile_kernels.modeling.attention.rope import Rope


class HeavilyCompressedAttention(WindowAttention):
    """Attention over a window of tokens and all compressed entries, of 128 tokens each.

    With `c = RMSNorm(x wkv)` and `q = x wq_a wq_b`, the last `rope_dim` channels of both rotated,

        s_j = q . row_j / sqrt(512)            j over the window and the entries before
        out = sum_j exp(s_j) row_j / (sum_j exp(s_j) + exp(attn_sink))

    A row is key and value, so its rotation is part of the value; `out` is rotated back by the
    query's position, which leaves relative positions. Rows go through e4m3 and back, in training
    too, so that an FP8 cache loses nothing. With `ratio=0` there is the window alone.

    In training, `layer(x)`. In inference, `state = layer.state(num_sequences, max_length)`, then
    `layer(x, state=state)` for prompts and `layer.step(x, state)` for each token after them.

    Args:
        hidden: Channels of a token.
        heads: Query heads; 64 and 128 are the fast ones.
        head_dim: Channels of a row: 512.
        rope_dim: How many of these are rotated.
        q_rank: Channels between the two projections of queries.
        out_groups: Groups of heads that are projected apart; a divisor of `heads`.
        out_rank: Channels of a group after that.
        window: Tokens that are seen without compression.
        ratio: Tokens of an entry; 0: no entries.
        rope: Positions; None: V4's, which are plain with base 10000 where `ratio` is 0.
        norm_eps: Of all norms.
        cache: `"bf16"`, or `"fp8"` for pages of 584 bytes a row.
        device: Of the parameters.
        dtype: Of the projections; norms, sinks and compressors are float32.

    Example:
        >>> layer = HeavilyCompressedAttention(
        ...     32, heads=2, q_rank=16, out_groups=1, out_rank=16, window=4, ratio=4
        ... )
        >>> layer(torch.randn(2, 9, 32)).shape
        torch.Size([2, 9, 32])
    """

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
        ratio: int = 128,
        rope: Rope | None = None,
        norm_eps: float = 1e-6,
        cache: str = "bf16",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            hidden, heads=heads, head_dim=head_dim, rope_dim=rope_dim, q_rank=q_rank,
            out_groups=out_groups, out_rank=out_rank, window=window, ratio=ratio, overlap=False,
            rope=rope, norm_eps=norm_eps, cache=cache, device=device, dtype=dtype,
        )  # fmt: skip
