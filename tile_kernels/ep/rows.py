"""Rows of bytes: any number of tensors, of any dtypes, packed side by side for a transfer.

Collectives disagree about dtypes (gloo knows no float8, and an operation that one rank rejects
leaves the others waiting), so everything is sent as `uint8`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tile_kernels import moe
from tile_kernels.runtime import backends

# Rows are padded to a multiple of these: copies move 16 bytes at a time, and a GPU scatters long
# rows a fifth faster if they are aligned to 256 bytes.
ROW_BYTES, LONG_ROW_BYTES = 16, 256
LONG_ROW = 4096
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Field(NamedTuple):
    """The part of a row that one tensor takes: `width` elements."""

    dtype: torch.dtype
    width: int

    @property
    def num_bytes(self) -> int:
        """Bytes in each row."""
        return self.width * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} rows of {self.width}"


def field_of(tensor: Tensor) -> Field:
    """The field for a tensor `[rows, width]`."""
    return Field(tensor.dtype, tensor.shape[1])


def zeros(num_rows: int, field: Field, device: torch.device) -> Tensor:
    """`[num_rows, width]` of zero bytes, whatever they mean in the dtype."""
    if field.width * num_rows == 0:
        return torch.empty((num_rows, field.width), dtype=field.dtype, device=device)
    size = (num_rows, field.num_bytes)
    return torch.zeros(size, dtype=torch.uint8, device=device).view(field.dtype)


def as_bytes(tensor: Tensor) -> Tensor:
    """`[rows, width]` of any dtype as `[rows, bytes]`; a view where the tensor is contiguous."""
    num_rows, width = tensor.shape
    if tensor.numel() == 0:
        size = (num_rows, width * tensor.element_size())
        return torch.empty(size, dtype=torch.uint8, device=tensor.device)
    rows = tensor.contiguous()
    if rows.stride(-1) != 1:  # one column counts as contiguous whatever its stride
        rows = rows.clone(memory_format=torch.contiguous_format)
    return rows.view(torch.uint8)


def _words(*sizes: int) -> torch.dtype:
    """The widest integer whose size divides all of these numbers of bytes."""
    return _INTEGERS[math.gcd(8, *sizes)]


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors `[rows, width]` side by side as `uint8` `[rows, bytes]`.

    Several of them are filled up with zeros to a multiple of 16 bytes, long ones of 256, so that
    rows can be copied many bytes at a time.

    >>> row = pack([torch.tensor([[1, 2]], dtype=torch.int16), torch.tensor([[0.0]])])
    >>> row.tolist()
    [[1, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]]
    """
    if len(tensors) == 1:
        return as_bytes(tensors[0])
    parts = [as_bytes(tensor) for tensor in tensors]
    sizes = [part.shape[1] for part in parts]
    fill = -sum(sizes) % (ROW_BYTES if sum(sizes) < LONG_ROW else LONG_ROW_BYTES)
    if fill:
        parts.append(parts[0].new_zeros((parts[0].shape[0], fill)))
    if not parts[0].shape[0]:
        return parts[0].new_empty((0, sum(sizes) + fill))
    word = _words(*sizes, fill, *(int(part.storage_offset()) for part in parts))
    return torch.cat([part.view(word) for part in parts if part.shape[1]], dim=1).view(torch.uint8)


def unpack(
    rows: Tensor, fields: Sequence[Field], start: int = 0, views: bool = False
) -> list[Tensor]:
    """The tensors that were packed, from byte `start` of each row on.

    They are contiguous, and only one that takes whole rows may share memory with them. With `views`
    all do whose elements are aligned in the rows.
    """
    tensors = []
    for field in fields:
        size = field.num_bytes
        if rows.shape[0] * size == 0:
            shape = (rows.shape[0], field.width)
            tensors.append(torch.empty(shape, dtype=field.dtype, device=rows.device))
        elif size == rows.shape[1]:
            tensors.append(rows.contiguous().view(field.dtype))
        else:
            word = _words(start, size, rows.shape[1], int(rows.storage_offset()))
            section = rows.view(word)[:, start // word.itemsize :][:, : size // word.itemsize]
            if not views or word.itemsize < field.dtype.itemsize:
                section = section.clone(memory_format=torch.contiguous_format)
            tensors.append(section.view(field.dtype))
        start += size
    return tensors


# ---- scattered rows, by the kernels of `tile_kernels.moe` ---------------------------------------


def on_host(x: Tensor) -> bool:
    """Whether PyTorch's own functions on the CPU process a tensor, and no kernel."""
    return x.device.type == "cpu" and backends.choose(x.device) == "torch"


def _gathered(rows: Tensor, positions: Tensor, num_rows: int) -> Tensor:
    """`scatter_rows` on the host, where it is faster to copy the row that belongs to a position."""
    sources = positions.new_full((num_rows,), -1, dtype=torch.int64)
    named = (positions >= 0) & (positions < num_rows)
    row, slot = named.nonzero(as_tuple=True)
    sources[positions[row, slot].long()] = row
    # Parts of longer rows need not be contiguous for this.
    source_bytes = rows.view(torch.uint8) if rows.stride(1) == 1 else as_bytes(rows)
    layout = source_bytes.shape[1], source_bytes.stride(0), int(source_bytes.storage_offset())
    words = source_bytes.view(_words(*layout))
    empty = (sources < 0).nonzero().flatten()
    out = words.index_select(0, sources.clamp_(min=0))
    if empty.numel():
        out.index_fill_(0, empty, 0)
    return out.view(rows.dtype)


def scatter_rows(rows: Tensor, positions: Tensor, num_rows: int) -> Tensor:
    """`out[positions[r, k]] = rows[r]`, zeros elsewhere; `[num_rows, ...]`.

    `positions` `[rows, K]` are int32 and contiguous, -1: none. Any dtype.
    """
    field = field_of(rows)
    if rows.numel() == 0 or num_rows == 0:
        return zeros(num_rows, field, rows.device)
    if on_host(rows):
        return _gathered(rows, positions, num_rows)
    fused = positions.new_empty(num_rows)
    return moe.expand_to_fused(as_bytes(rows), positions, fused).view(field.dtype)


def reordered(rows: Tensor, order: Tensor) -> Tensor:
    """`out[i] = rows[order[i]]` for a permutation."""
    numbers = torch.arange(order.numel(), dtype=torch.int32, device=order.device)
    inverse = torch.empty_like(numbers).scatter_(0, order, numbers)
    return scatter_rows(rows, inverse[:, None], order.numel())


def restored(rows: Tensor, order: Tensor) -> Tensor:
    """`out[order[i]] = rows[i]` for a permutation: the inverse of `reordered`."""
    return scatter_rows(rows, order.int()[:, None], order.numel())
