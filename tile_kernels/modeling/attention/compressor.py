"""`KVCompressor`: a layer of compressed keys and values by itself."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tile_kernels import attention
from tile_kernels.attention import KVCompressorState
from tile_kernels.attention.windows import DTYPES, MAX_WINDOW
from tile_kernels.runtime import checks


def halves(packed: Tensor, channels: int) -> tuple[Tensor, ...]:
    """Series a, and with an overlap series b, of a packed tensor."""
    return packed.split(channels, dim=1)[::-1]


def series(kv: Tensor, gate: Tensor, channels: int) -> list[Tensor]:
    """Values and scores of series a, then of b, if there is one."""
    pairs = zip(halves(kv, channels), halves(gate, channels))
    return [tensor for pair in pairs for tensor in pair]


class KVCompressor(nn.Module):
    """Hidden states to compressed keys and values: one entry for each window of tokens.

    | argument | meaning |
    |---|---|
    | `hidden` | channels of a token |
    | `channels` | channels of an entry |
    | `window` | tokens of a window |
    | `overlap` | a window also takes the one before it, through a series of its own (CSA) |
    | `norm_eps` | of the norm of entries; None: no norm |
    | `device`, `dtype` | of the projection; biases and norm are float32 |

    A token is projected to values and scores, by one matrix product, and windows of tokens are
    compressed by `attention.kv_compress`, with a trained bias for each position in a window.
    Entries are normalised in float32 and have the dtype of the projection.

    In training, `layer(x)`. In inference, `state = layer.state(num_sequences)`, then
    `layer(x, state=state)` for the prompts and `layer.step(x, state)` for each token after them:
    the entries are those of the whole sequence. Where the matrix product gives a token the same
    bits in both, so do the entries. Under `torch.autocast` the state keeps its own dtype.

    >>> layer = KVCompressor(hidden=16, channels=8, window=4)
    >>> layer(torch.randn(2, 9, 16)).shape
    torch.Size([2, 2, 8])
    """

    def __init__(
        self,
        hidden: int,
        channels: int,
        window: int,
        *,
        overlap: bool = True,
        norm_eps: float | None = 1e-6,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        with checks.named("KVCompressor"):
            hidden = checks.integer("hidden", hidden, 1, checks.MOST_SIZE)
            channels = checks.integer("channels", channels, 1, checks.MOST_SIZE)
            window = checks.integer("window", window, 1, MAX_WINDOW)
            overlap = checks.boolean("overlap", overlap)
            if norm_eps is not None:
                norm_eps = checks.epsilon("norm_eps", norm_eps)
            checks.device("device", device)
            checks.parameter_dtype("dtype", dtype, DTYPES)
        self.hidden, self.channels, self.window, self.overlap = hidden, channels, window, overlap
        self.norm_eps = norm_eps
        self.width = (2 if overlap else 1) * channels  # of values, and of scores
        self.projection = nn.Linear(hidden, 2 * self.width, False, device, dtype)
        biases = torch.empty(window, self.width, device=device, dtype=torch.float32)
        self.ape = nn.Parameter(biases)
        self.norm_weight: nn.Parameter | None = None
        if norm_eps is not None:
            ones = torch.empty(channels, device=device, dtype=torch.float32)
            self.norm_weight = nn.Parameter(ones)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """All positions alike, a norm of weight one; the projection has its own."""
        nn.init.zeros_(self.ape)
        if self.norm_weight is not None:
            nn.init.ones_(self.norm_weight)

    def extra_repr(self) -> str:
        """The sizes."""
        kind = "overlapping " if self.overlap else ""
        return f"{self.hidden} -> {self.channels}, {kind}windows of {self.window}"

    def state(self, num_sequences: int) -> KVCompressorState:
        """What decoding remembers of sequences, none of which has tokens yet."""
        weight = self.projection.weight
        return KVCompressorState.empty(
            num_sequences, self.window, self.channels, overlap=self.overlap, dtype=weight.dtype,
            device=weight.device,
        )  # fmt: skip

    def forward(
        self,
        x: Tensor,
        cu_seqlens: Tensor | None = None,
        num_windows: int | None = None,
        *,
        state: KVCompressorState | None = None,
        slots: Tensor | None = None,
    ) -> Tensor:
        """The entries of sequences.

        | argument | shape | dtype |
        |---|---|---|
        | `x` | `[B, S, hidden]`, or `[num_tokens, hidden]` for sequences one after the other | |
        | `cu_seqlens`, `num_windows` | for the latter, as in `attention.kv_compress` | int32 |
        | `state` | a state to start with these sequences, to decode from there on | |
        | `slots` | `[num_sequences]`: where in the state; None: in order | integers |
        | returns | `[B, S // window, channels]`, or `[num_windows, channels]` | |
        """
        if slots is not None and state is None:
            raise ValueError("KVCompressor: slots are places in a state, got slots without state")
        if state is not None:
            self._check_state(state)
        kv, gate, cu_seqlens, num_windows, lead = self._projected(x, cu_seqlens, num_windows)
        if self.overlap:
            entries = attention.kv_compress_packed(
                kv, gate, self.ape.float(), cu_seqlens=cu_seqlens, num_windows=num_windows
            )
        else:
            entries = attention.kv_compress(
                kv, gate, self.ape.float(), cu_seqlens=cu_seqlens, num_windows=num_windows
            )
        if state is not None:
            with torch.no_grad():
                rows = (row.to(state.kept.dtype) for row in series(kv, gate, self.channels))
                state.prefill(*rows, cu_seqlens=cu_seqlens, slots=slots)
        return self._normed(entries).view(*lead, self.channels)

    def step(
        self, x: Tensor, state: KVCompressorState, slots: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """One token more for each sequence: entries, and which tokens completed one.

        `x` is `[num_tokens, hidden]`; state, slots and results are as those of
        `attention.kv_compress_step`. Without a gradient.
        """
        checks.tensor_for("KVCompressor: x", x, self.projection.weight)
        if x.dim() != 2 or x.shape[1] != self.hidden:
            raise ValueError(
                f"KVCompressor: x must be [num_tokens, {self.hidden}], got shape {tuple(x.shape)}"
            )
        self._check_state(state)
        with torch.no_grad():
            projected = self.projection(x)
            kv, gate = projected.to(state.kept.dtype).split(self.width, dim=1)
            kv_a, z_a, *series_b = series(kv, gate, self.channels)
            bias_a, *bias_b = halves(self.ape.float(), self.channels)
            arguments = (kv_a, z_a, bias_a, *series_b, *bias_b)
            entries, completed = attention.kv_compress_step(state, *arguments, slots=slots)
            return self._normed(entries.to(projected.dtype)), completed

    @torch.no_grad()
    def compress_and_cast(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        cu_seqlens: Tensor | None = None,
        num_windows: int | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Entries for an FP8 cache: `codes`, `sf` and `rotated`.

        See `attention.kv_compress_norm_rope_cast`; the leading dimensions are those of `forward`.
        """
        if self.norm_weight is None or self.norm_eps is None:
            raise ValueError("KVCompressor: compress_and_cast needs a norm, but norm_eps is None")
        kv, gate, cu_seqlens, num_windows, lead = self._projected(x, cu_seqlens, num_windows)
        kv_a, z_a, *series_b = series(kv, gate, self.channels)
        bias_a, *bias_b = halves(self.ape.float(), self.channels)
        results = attention.kv_compress_norm_rope_cast(
            kv_a, z_a, bias_a, *series_b, *bias_b,
            weight=self.norm_weight.float(), cos=cos, sin=sin, eps=self.norm_eps,
            cu_seqlens=cu_seqlens, num_windows=num_windows,
        )  # fmt: skip
        codes, sf, rotated = (result.view(*lead, result.shape[1]) for result in results)
        return codes, sf, rotated

    def _projected(
        self, x: Tensor, cu_seqlens: Tensor | None, num_windows: int | None
    ) -> tuple[Tensor, Tensor, Tensor | None, int | None, tuple[int, ...]]:
        """Values and scores of tokens in rows, their sequences, and the shape of the entries."""
        checks.tensor_for("KVCompressor: x", x, self.projection.weight)
        if x.dim() not in (2, 3) or x.shape[-1] != self.hidden:
            wanted = f"[B, S, {self.hidden}] or [num_tokens, {self.hidden}]"
            raise ValueError(f"KVCompressor: x must be {wanted}, got shape {tuple(x.shape)}")
        lead: tuple[int, ...] = (-1,)
        if x.dim() == 3:
            if cu_seqlens is not None or num_windows is not None:
                raise ValueError(
                    "KVCompressor: cu_seqlens and num_windows are for x of two dimensions, but "
                    f"x has shape {tuple(x.shape)}"
                )
            batch, length, _ = x.shape
            lead = (batch, length // self.window)
            num_windows = batch * lead[1]
            steps = torch.arange(batch + 1, device=x.device, dtype=torch.int32)
            cu_seqlens = steps * length
        kv, gate = self.projection(x.flatten(0, -2)).split(self.width, dim=1)
        return kv, gate, cu_seqlens, num_windows, lead

    def _check_state(self, state: KVCompressorState) -> None:
        """Whether it is one of such windows."""
        if not isinstance(state, KVCompressorState):
            raise TypeError(
                f"KVCompressor: state must be a KVCompressorState, got {type(state).__name__}"
            )

        def in_words(overlap: bool, window: int, channels: int) -> str:
            kind = "overlapping " if overlap else ""
            return f"{kind}windows of {window} tokens and {channels} channels"

        wanted = in_words(self.overlap, self.window, self.channels)
        given = in_words(state.overlap, state.window, state.kept.shape[3])
        if given != wanted:
            raise ValueError(f"KVCompressor: state must be of {wanted}, got one of {given}")

    def _normed(self, entries: Tensor) -> Tensor:
        if self.norm_weight is None:
            return entries
        weight = self.norm_weight.float()
        normed = F.rms_norm(entries.float(), (self.channels,), weight, self.norm_eps)
        return normed.to(entries.dtype)
