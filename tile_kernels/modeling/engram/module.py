"""One Engram layer, from token ids to what it adds to the residual streams."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tile_kernels.engram.gate.op import MAX_STREAMS
from tile_kernels.engram.gate.plan import VECTOR
from tile_kernels.modeling.engram.convolution import CausalConvolution
from tile_kernels.modeling.engram.gate import engram_gate
from tile_kernels.modeling.engram.hashing import EngramHasher
from tile_kernels.modeling.engram.tables import EngramTable
from tile_kernels.runtime import checks


class EngramModule(nn.Module):
    """An Engram layer: it looks up n-grams in a memory, and adds them to the residual streams.

    With `e` the embeddings of a token, `k` and `v` its projections, and for each stream `x`

        y = gate(x, k) v        out = x + y + silu(convolution(norm(y)))

    Streams, keys and values enter the gate in bfloat16, and `y` is bfloat16, whatever the dtype of
    streams and parameters; the weights of the norms keep their dtype. The sum is computed in the
    dtype of `hidden_states`.

    Args:
        hasher: The `EngramHasher` of the model. The layer keeps its own part of it.
        layer: The index of the layer in the hasher.
        hidden_size: The channels `H` of a stream.
        num_streams: The number of streams `hc`.
        embed_dim: The width of a table; a token looks up `C * embed_dim` numbers.
        kernel_size: The taps of the convolution, which are `max_ngram_size` tokens apart.
        clamp_value: The clamp of the gate.
        eps: The epsilon of the gate and of the norm of the convolution.
        sparse: Whether the gradient of the table is sparse, see `EngramTable`.
        host_resident: Whether the table stays in host memory, see `EngramTable`.
        device: The device of the parameters.
        dtype: The dtype of the parameters.

    Example:
        >>> hasher = EngramHasher(num_layers=2, vocab_size=50, table_rows=100, num_tables=2)
        >>> layer = EngramModule(hasher, layer=1, hidden_size=16, num_streams=4, embed_dim=8)
        >>> token_ids = torch.tensor([[3, 1, 4], [1, 5, 9]])
        >>> layer(torch.randn(2, 3, 4, 16), token_ids).shape
        torch.Size([2, 3, 4, 16])
    """

    def __init__(
        self,
        hasher: EngramHasher,
        layer: int,
        hidden_size: int,
        num_streams: int = 4,
        embed_dim: int = 64,
        kernel_size: int = 4,
        clamp_value: float = 1e-6,
        eps: float = 1e-6,
        sparse: bool = False,
        host_resident: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        with checks.named("EngramModule"):
            if not isinstance(hasher, EngramHasher):
                raise TypeError(f"hasher must be an EngramHasher, got {type(hasher).__name__}")
            layer = checks.integer("layer", layer, 0, hasher.num_layers - 1)
            hidden_size = checks.integer("hidden_size", hidden_size, 1, checks.MOST_SIZE)
            if hidden_size % VECTOR:
                raise ValueError(f"hidden_size must be a multiple of {VECTOR}, got {hidden_size}")
            num_streams = checks.integer("num_streams", num_streams, 1, MAX_STREAMS)
            embed_dim = checks.integer("embed_dim", embed_dim, 1, checks.MOST_SIZE)
            kernel_size = checks.integer("kernel_size", kernel_size, 1, checks.MOST_SIZE)
            clamp_value = checks.epsilon("clamp_value", clamp_value)
            eps = checks.epsilon("eps", eps)
            sparse = checks.boolean("sparse", sparse)
            host_resident = checks.boolean("host_resident", host_resident)
            checks.device("device", device)
            checks.parameter_dtype("dtype", dtype)
        self.hidden_size, self.num_streams = hidden_size, num_streams
        self.clamp_value, self.eps = clamp_value, eps
        self.hasher = hasher.layer(layer)
        if device is not None:
            self.hasher.to(device)
        columns = hasher.num_columns
        self.table = EngramTable(
            hasher.rows_per_layer[layer], embed_dim, sparse, host_resident, device, dtype
        )
        # The keys of all streams and the value, one matrix product: the gate reads slices of it.
        outputs = (num_streams + 1) * hidden_size
        self.projection = nn.Linear(columns * embed_dim, outputs, False, device, dtype)
        shape = num_streams, hidden_size
        self.weight_hidden = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.weight_embed = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.convolution = CausalConvolution(
            num_streams, hidden_size, kernel_size, hasher.max_ngram_size, eps, device, dtype
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Norms of weight one; the parts of the layer have a `reset_parameters` of their own."""
        nn.init.ones_(self.weight_hidden)
        nn.init.ones_(self.weight_embed)

    def prefetch(
        self,
        token_ids: Tensor | None = None,
        indices: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> None:
        """Starts to copy the rows of a table in host memory to the device.

        The next `forward` uses these rows if it receives the same tensor objects, and neither they
        nor the table were written in between; otherwise it reads the table again. Call
        `discard_prefetched` after writes that PyTorch does not record, such as those through
        `.data`. With ids and `cu_seqlens` in host memory, the host need not wait for the device.

        Args:
            token_ids: As in `forward`.
            indices: As in `forward`.
            cu_seqlens: As in `forward`.
        """
        if not self.table.host_resident:
            return
        rows = self._rows(token_ids, indices, cu_seqlens)
        device = self.projection.weight.device
        self.table.prefetch(rows, device, (token_ids, indices, cu_seqlens))

    def discard_prefetched(self) -> None:
        """Forget prefetched rows, so that the next `forward` reads the table."""
        self.table.discard_prefetched()

    def forward(
        self,
        hidden_states: Tensor,
        token_ids: Tensor | None = None,
        indices: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """Adds the memory to the residual streams.

        Rows are separate texts. With `cu_seqlens` neither n-grams nor the convolution cross the
        start of a document; pass it with `indices` too. A pad token inside a row ends n-grams only.

        Args:
            hidden_states: `[B, S, hc, H]`, or `[S, hc, H]` for one text; bfloat16 or float32.
            token_ids: `[B, S]` or `[S]`, int32 or int64. With a table in host memory they may be
                there as well.
            indices: Instead of `token_ids`: `[B, S, C]` or `[S, C]`, the part of this layer of the
                hasher's result.
            cu_seqlens: `[D + 1]`, int32 or int64: the starts of documents in the flattened tokens,
                or None.

        Returns:
            A tensor with the shape and dtype of `hidden_states`.
        """
        self._check(hidden_states, token_ids, indices, cu_seqlens)
        device, embeddings = hidden_states.device, None
        if self.table.host_resident:
            embeddings = self.table.prefetched((token_ids, indices, cu_seqlens), device)
        if embeddings is None:
            embeddings = self.table(self._rows(token_ids, indices, cu_seqlens), device)
        kv = self._projected(embeddings)
        y = engram_gate(
            hidden_states.bfloat16(), kv.bfloat16(), None, *self._norm_weights(),
            self.clamp_value, self.eps, add_residual=False,
        )  # fmt: skip
        if cu_seqlens is not None and cu_seqlens.device != device:
            # From memory that is not pinned the host neither waits nor may change what is copied.
            cu_seqlens = cu_seqlens.clone().to(device, non_blocking=device.type == "cuda")
        return self.convolution(y, cu_seqlens, hidden_states)

    def _projected(self, embeddings: Tensor) -> Tensor:
        """Embeddings `[*, C * d]` to keys and value `[*, hc + 1, H]`."""
        both = F.linear(embeddings, self.projection.weight)
        return both.unflatten(-1, (self.num_streams + 1, self.hidden_size))

    def project(self, embeddings: Tensor) -> tuple[Tensor, Tensor]:
        """Projects embeddings to the keys of all streams and a value.

        Args:
            embeddings: `[*, C * d]`.

        Returns:
            Keys `[*, hc, H]` and values `[*, H]`, slices of one tensor.
        """
        both = self._projected(embeddings)
        return both[..., :-1, :], both[..., -1, :]

    def _norm_weights(self) -> tuple[Tensor, Tensor]:
        """The parameters themselves where the gate takes them, otherwise in float32."""
        hidden, embed = self.weight_hidden, self.weight_embed
        if hidden.dtype == embed.dtype and hidden.dtype in (torch.bfloat16, torch.float32):
            return hidden, embed
        return hidden.float(), embed.float()

    def _rows(
        self, token_ids: Tensor | None, indices: Tensor | None, cu_seqlens: Tensor | None
    ) -> Tensor:
        """The rows to look up, `[*, C]`."""
        if token_ids is None and indices is not None:
            return indices
        if token_ids is None or indices is not None:
            raise ValueError("EngramModule: give token_ids or indices, and not both")
        if cu_seqlens is not None:
            cu_seqlens = cu_seqlens.to(token_ids.device)
        rows: Tensor = self.hasher(token_ids, cu_seqlens)[0]
        return rows

    def _check(
        self,
        hidden_states: Tensor,
        token_ids: Tensor | None,
        indices: Tensor | None,
        cu_seqlens: Tensor | None,
    ) -> None:
        device = self.projection.weight.device
        checks.tensor_on(
            "EngramModule: hidden_states", hidden_states, device, checks.PARAMETER_DTYPES
        )
        shape = list(hidden_states.shape)
        streams = [self.num_streams, self.hidden_size]
        if len(shape) not in (3, 4) or shape[-2:] != streams:
            raise ValueError(
                f"EngramModule: hidden_states must be [B, S, {streams[0]}, {streams[1]}] or "
                f"[S, {streams[0]}, {streams[1]}], got {shape}"
            )
        if cu_seqlens is not None:
            checks.tensor("EngramModule: cu_seqlens", cu_seqlens, ("D + 1",), checks.INTEGERS)
        tokens = shape[:-2]
        for name, tensor, expected in (
            ("token_ids", token_ids, tokens),
            ("indices", indices, [*tokens, self.hasher.num_columns]),
        ):
            if tensor is None:
                continue
            on_host = self.table.host_resident and getattr(tensor, "is_cpu", False)
            where = torch.device("cpu") if on_host else device
            checks.tensor_on(f"EngramModule: {name}", tensor, where, checks.INTEGERS)
            if list(tensor.shape) != expected:
                raise ValueError(
                    f"EngramModule: {name} must be {expected} for hidden_states of {shape}, got "
                    f"{list(tensor.shape)}"
                )

    def extra_repr(self) -> str:
        """Sizes, for `print`."""
        return (
            f"hidden={self.hidden_size}, streams={self.num_streams}, "
            f"clamp_value={self.clamp_value}, eps={self.eps}"
        )
