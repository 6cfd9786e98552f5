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
    """Compresses hidden states to keys and values: one entry for each window of tokens.

    One matrix product projects a token to values and scores, and `attention.kv_compress` compresses
    windows of tokens, with a trained bias for each position in a window. Entries are normalized in
    float32 and have the dtype of the projection.

    For training, call `layer(x)`. For inference, create `state = layer.state(num_sequences)`, then
    call `layer(x, state=state)` for the prompts and `layer.step(x, state)` for each token after
    them. The entries are those of the whole sequence, with the same bits where the matrix product
    gives a token the same bits in both calls. Under `torch.autocast` the state keeps its own dtype.

    Args:
        hidden: Channels of a token.
        channels: Channels of an entry.
        window: Tokens of a window.
        overlap: Whether a window also takes the previous one, through a second series (CSA).
        norm_eps: The epsilon of the norm of entries; None: no norm.
        device: The device of the parameters.
        dtype: The dtype of the projection; biases and norm are float32.

    Example:
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
        """Returns a state for decoding sequences that have no tokens yet.

        Args:
            num_sequences: The number of sequences.
        """
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
        """Computes the entries of sequences.

        Args:
            x: `[B, S, hidden]`, or `[num_tokens, hidden]` for sequences that follow each other.
            cu_seqlens: int32: the bounds of the latter, as in `attention.kv_compress`.
            num_windows: The number of their windows, as in `attention.kv_compress`.
            state: A state that starts with these sequences, to decode from there on; or None.
            slots: `[num_sequences]`: the sequences of the state; None: in order.

        Returns:
            `[B, S // window, channels]`, or `[num_windows, channels]`.
        """
        if slots is not None and state is None:
            raise ValueError("KVCompressor: slots need a state, got None")
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
        """Adds one token to each sequence. There is no gradient.

        Args:
            x: `[num_tokens, hidden]`.
            state: The state of the sequences, which is updated.
            slots: The sequence of each token, as in `attention.kv_compress_step`.

        Returns:
            Entries, and which tokens completed one, as `attention.kv_compress_step`.
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
        """Computes entries for an FP8 cache.

        Args:
            x: As in `forward`.
            cos: As in `attention.kv_compress_norm_rope_cast`.
            sin: As in `attention.kv_compress_norm_rope_cast`.
            cu_seqlens: As in `forward`.
            num_windows: As in `forward`.

        Returns:
            `codes`, `sf` and `rotated` of `attention.kv_compress_norm_rope_cast`, with the leading
            dimensions of `forward`.
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
