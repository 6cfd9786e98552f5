"""The embeddings that n-grams look up, on the device or in the host's memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tile_kernels.runtime import checks

Source = tuple[Tensor | None, ...]


@dataclass
class _Fetched:
    """Rows that are being copied to the device."""

    source: Source  # what they were asked for with, and the table
    versions: list[int | Tensor | None]  # what tells whether these were written since
    indices: Tensor  # in host memory
    rows: Tensor  # `[n, d]` on the device
    ready: Any  # the event after the copy, None where there is none


class EngramTable(nn.Module):
    """All tables of one layer, stored one after the other.

    A table in host memory does not move with the module (its dtype does). The host gathers rows
    into pinned memory and copies them to the device on a separate stream; `prefetch` starts that
    early. Its gradient is computed on the host, which waits for the device. Use `sparse=True` for a
    table that is much larger than the rows that a step looks up.

    Args:
        num_rows: The rows of `weight`.
        embed_dim: The columns of `weight`.
        sparse: Whether the gradient is a sparse tensor of the rows that were looked up.
        host_resident: Whether `weight` stays in host memory.
        device: The device of the parameter.
        dtype: The dtype of the parameter.

    Example:
        >>> table = EngramTable(num_rows=100, embed_dim=4, dtype=torch.float32)
        >>> table(torch.tensor([[1, 50], [7, 99]])).shape
        torch.Size([2, 8])
    """

    def __init__(
        self,
        num_rows: int,
        embed_dim: int,
        sparse: bool = False,
        host_resident: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        with checks.named("EngramTable"):
            num_rows = checks.integer("num_rows", num_rows, 1)
            embed_dim = checks.integer("embed_dim", embed_dim, 1, checks.MOST_SIZE)
            sparse = checks.boolean("sparse", sparse)
            host_resident = checks.boolean("host_resident", host_resident)
            checks.device("device", device)
            checks.parameter_dtype("dtype", dtype)
        self.sparse, self.host_resident = sparse, host_resident
        device = torch.get_default_device() if device is None else torch.device(device)
        if host_resident and device.type != "meta":
            device = torch.device("cpu")
        self.weight = nn.Parameter(torch.empty(num_rows, embed_dim, device=device, dtype=dtype))
        self._fetched: _Fetched | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal with standard deviation 0.02."""
        nn.init.normal_(self.weight, std=0.02)

    def prefetch(self, indices: Tensor, device: torch.device, source: Source | None = None) -> None:
        """Starts to copy the rows of `indices` to `device`.

        The next `forward` with these indices uses them; or, if the indices come from tensors
        `source`, the next `prefetched` with those. Indices on a GPU make the host wait for them.
        This does nothing for a table on the device, and for a table that was created in inference
        mode, where PyTorch does not record writes.

        Args:
            indices: `[*, C]`: the rows.
            device: The device to which they are copied.
            source: The tensors from which the indices were computed, or None.
        """
        self.discard_prefetched()
        if self.host_resident and not self.weight.is_inference():
            source = (indices,) if source is None else source
            self._fetched = self._fetch(indices, device, source)

    def discard_prefetched(self) -> None:
        """Forget prefetched rows; for after a write that PyTorch does not count.

        Such writes go through `.data`, NumPy or memory shared with another process.
        """
        self._fetched = None

    def prefetched(self, source: Source, device: torch.device) -> Tensor | None:
        """Returns the embeddings that `prefetch` has started for `source`, once.

        They are valid if the tensors are the same objects, and neither they nor the table were
        written in between. See `discard_prefetched` for writes that are not recorded.

        Args:
            source: The tensors that `prefetch` was given.
            device: The device of the embeddings.

        Returns:
            The embeddings, or None if there are none that are valid.
        """
        fetched = self._fetched
        self.discard_prefetched()
        if fetched is None or fetched.rows.device != device:
            return None
        tensors = *source, self.weight
        fresh = len(tensors) == len(fetched.source) and all(
            tensor is before and _unwritten(tensor, version)
            for tensor, before, version in zip(tensors, fetched.source, fetched.versions)
        )
        return self._arrived(fetched) if fresh else None

    def forward(
        self, indices: Tensor, device: torch.device | None = None, *, masked: bool = False
    ) -> Tensor:
        """Looks up embeddings.

        Args:
            indices: `[*, C]`: the rows.
            device: The device of the result; by default that of `indices`.
            masked: Whether negative indices are allowed (`engram_hash` with an `image_token_mask`);
                they give zeros, which have no gradient.

        Returns:
            `[*, C * embed_dim]`.
        """
        if masked:
            absent = indices < 0
            # In place of them a row that is looked up: sparse gradients have no others.
            present = indices.amax().clamp(min=0) if indices.numel() else 0
            rows = self.forward(indices.masked_fill(absent, present), device)
            absent = absent[..., None].to(rows.device)
            return rows.unflatten(-1, (indices.shape[-1], -1)).masked_fill(absent, 0).flatten(-2)
        where = None if self.host_resident else self.weight.device
        checks.tensor_on("EngramTable: indices", indices, where, checks.INTEGERS)
        if indices.dim() == 0:
            raise ValueError("EngramTable: indices must be [*, C], got a tensor without dimensions")
        if not self.host_resident:
            return F.embedding(indices, self.weight, sparse=self.sparse).flatten(-2)
        device = indices.device if device is None else device
        found = self.prefetched((indices,), device)
        return self._arrived(self._fetch(indices, device)) if found is None else found

    def _fetch(
        self, indices: Tensor, device: torch.device, source: Source | None = None
    ) -> _Fetched:
        """Gather in host memory, and start the copy; `source` only for what is used later."""
        tensors = () if source is None else (*source, self.weight)
        versions, ready = [_version(tensor) for tensor in tensors], None
        indices = indices.cpu()
        on_cuda = device.type == "cuda"
        rows = self.weight.new_empty(indices.numel(), self.weight.shape[1], pin_memory=on_cuda)
        torch.index_select(self.weight.detach(), 0, indices.reshape(-1), out=rows)
        if on_cuda:
            stream = _copy_stream(device)
            with torch.cuda.stream(stream):
                rows = rows.to(device, non_blocking=True)
                ready = stream.record_event()
        return _Fetched(tensors, versions, indices, rows.to(device), ready)

    def _arrived(self, fetched: _Fetched) -> Tensor:
        """The embeddings `[*, C * d]`, in the order of the current stream and with a gradient."""
        indices, rows = fetched.indices, fetched.rows
        if fetched.ready is not None:
            stream = torch.cuda.current_stream(rows.device)
            stream.wait_event(fetched.ready)
            rows.record_stream(stream)
        found: Tensor = _HostRows.apply(self.weight, indices.reshape(-1), rows, self.sparse)
        return found.view(*indices.shape, self.weight.shape[1]).flatten(-2)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> EngramTable:
        """A table in host memory takes a new dtype, and no new device."""
        self.discard_prefetched()

        def without_moving(x: Tensor) -> Tensor:
            probe = fn(x.new_empty(0))
            device = "meta" if probe.is_meta else "cpu"
            if x.is_meta:
                return torch.empty_like(x, dtype=probe.dtype, device=device)
            return x.to(device, probe.dtype)

        return super()._apply(without_moving if self.host_resident else fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_fetched": None}

    def extra_repr(self) -> str:
        """Sizes, for `print`."""
        num_rows, embed_dim = self.weight.shape
        return (
            f"rows={num_rows}, embed_dim={embed_dim}, sparse={self.sparse}, "
            f"host_resident={self.host_resident}"
        )


class _HostRows(torch.autograd.Function):
    """Rows that were gathered already, with the gradient of the gather."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, indices: Tensor, rows: Tensor, sparse: bool) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.shape, ctx.sparse = weight.shape, sparse
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (indices,) = ctx.saved_tensors
        grad = grads[0].cpu()
        if ctx.sparse:
            weight_grad = torch.sparse_coo_tensor(
                indices[None], grad, ctx.shape, check_invariants=False
            )
        else:
            weight_grad = torch.ops.aten.embedding_dense_backward(
                grad, indices, ctx.shape[0], -1, False
            )
        return weight_grad, None, None, None


def _version(tensor: Tensor | None) -> int | Tensor | None:
    """The number of writes, or a copy where PyTorch does not count them."""
    if tensor is None:
        return None
    return tensor.clone() if tensor.is_inference() else tensor._version


def _unwritten(tensor: Tensor | None, version: int | Tensor | None) -> bool:
    """Whether a tensor is as it was when it had this version."""
    if tensor is None:
        return True
    return (
        torch.equal(tensor, version) if isinstance(version, Tensor) else tensor._version == version
    )


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    """The one stream of a device on which rows arrive."""
    return torch.cuda.Stream(device)
