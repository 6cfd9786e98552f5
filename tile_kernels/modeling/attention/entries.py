"""The compressor inside of an attention layer, with the parameters of V4's checkpoints."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tile_kernels import attention
from tile_kernels.attention import KVCompressorState
from tile_kernels.modeling.attention.compressor import halves, series
from tile_kernels.modeling.attention.sequences import Sequences
from tile_kernels.modeling.bf16_experts import without_autocast


def float32_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The RMS norm of the last dimension, computed in float32, with the dtype of `x`."""
    return F.rms_norm(x.float(), x.shape[-1:], weight.float(), eps).to(x.dtype)


class EntryCompressor(nn.Module):
    """Hidden states to normed entries, in float32.

    The projections `wkv` and `wgate`, the biases `ape` and the pooling are float32, also under
    `torch.autocast` and with an input of bfloat16. Entries are neither rotated nor rounded here.

    Args:
        hidden: Channels of a token.
        channels: Channels of an entry.
        ratio: Tokens of an entry.
        overlap: Whether an entry also takes the tokens of the one before, by a second series.
        norm_eps: Of the norm of entries.
        device: Of the parameters.
    """

    def __init__(
        self,
        hidden: int,
        channels: int,
        ratio: int,
        *,
        overlap: bool,
        norm_eps: float,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.channels, self.ratio, self.overlap = channels, ratio, overlap
        self.norm_eps = norm_eps
        width = (2 if overlap else 1) * channels
        self.wkv = nn.Linear(hidden, width, False, device, torch.float32)
        self.wgate = nn.Linear(hidden, width, False, device, torch.float32)
        self.ape = nn.Parameter(torch.empty(ratio, width, device=device, dtype=torch.float32))
        self.norm = nn.RMSNorm(channels, norm_eps, device=device, dtype=torch.float32)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """All positions in a window count alike."""
        nn.init.zeros_(self.ape)

    def extra_repr(self) -> str:
        """The sizes."""
        kind = "overlapping " if self.overlap else ""
        return f"{kind}windows of {self.ratio}"

    def state(self, num_sequences: int) -> KVCompressorState:
        """What decoding remembers of sequences, none of which has tokens yet."""
        return KVCompressorState.empty(
            num_sequences, self.ratio, self.channels, overlap=self.overlap, dtype=torch.float32,
            device=self.ape.device,
        )  # fmt: skip

    def forward(
        self,
        x: Tensor,
        sequences: Sequences,
        state: KVCompressorState | None = None,
        slots: Tensor | None = None,
    ) -> Tensor:
        """The entries of tokens `x [T, hidden]`, float32, as many as `sequences.num_entries` says.

        With a `state`, sequence `i` starts in it at `slots[i]`.
        """
        kv, gate = self._projected(x)
        compress = attention.kv_compress_packed if self.overlap else attention.kv_compress
        entries = compress(
            kv, gate, self.ape.float(), cu_seqlens=sequences.cu_seqlens,
            num_windows=sequences.num_entries(self.ratio),
        )  # fmt: skip
        if state is not None:
            rows = series(kv, gate, self.channels)
            state.prefill(*rows, cu_seqlens=sequences.cu_seqlens, slots=slots)
        return float32_rms_norm(entries, self.norm.weight, self.norm_eps)

    def step(self, x: Tensor, state: KVCompressorState, slots: Tensor | None) -> Tensor:
        """The entries that one more token of each sequence completes, other rows without meaning.

        `x` is `[num_tokens, hidden]`; slots are those of `attention.kv_compress_step`.
        """
        kv_a, z_a, *series_b = series(*self._projected(x), self.channels)
        bias_a, *bias_b = halves(self.ape.float(), self.channels)
        arguments = (kv_a, z_a, bias_a, *series_b, *bias_b)
        entries, _ = attention.kv_compress_step(state, *arguments, slots=slots)
        return float32_rms_norm(entries, self.norm.weight, self.norm_eps)

    def _projected(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Values and scores of tokens."""
        with without_autocast(x):
            x = x.float()
            return F.linear(x, self.wkv.weight.float()), F.linear(x, self.wgate.weight.float())
