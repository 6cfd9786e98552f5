"""Rows of bytes: what travels. Any number of tensors, of any dtypes, packed side by side.

Collectives disagree about dtypes (gloo knows no float8, and an operation that one rank rejects
leaves the others waiting), so everything is sent as `uint8`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


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
    if field.width == 0:
        return torch.empty((num_rows, 0), dtype=field.dtype, device=device)
    size = (num_rows, field.num_bytes)
    return torch.zeros(size, dtype=torch.uint8, device=device).view(field.dtype)


def as_bytes(tensor: Tensor) -> Tensor:
    """`[rows, width]` of any dtype as `[rows, bytes]`; a view where the tensor is contiguous."""
    num_rows, width = tensor.shape
    if tensor.numel() == 0:
        size = (num_rows, width * tensor.element_size())
        return torch.empty(size, dtype=torch.uint8, device=tensor.device)
    return tensor.contiguous().view(torch.uint8)


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors `[rows, width]` side by side as `uint8` `[rows, bytes]`.

    >>> row = pack([torch.tensor([[1, 2]], dtype=torch.int16), torch.tensor([[0.0]])])
    >>> row.tolist()
    [[1, 0, 2, 0, 0, 0, 0, 0]]
    """
    if len(tensors) == 1:
        return as_bytes(tensors[0])
    return torch.cat([as_bytes(tensor) for tensor in tensors], dim=1)


def unpack(rows: Tensor, fields: Sequence[Field]) -> list[Tensor]:
    """The tensors that were packed, contiguous. Only a single one may share memory with `rows`."""
    sections = rows.split([field.num_bytes for field in fields], dim=1)
    tensors = []
    for section, field in zip(sections, fields):
        shape = (rows.shape[0], field.width)
        if section.numel() == 0:
            tensors.append(torch.empty(shape, dtype=field.dtype, device=rows.device))
            continue
        whole = len(fields) == 1 and section.stride(0) == section.shape[1]
        own = section if whole else section.clone(memory_format=torch.contiguous_format)
        tensors.append(own.view(field.dtype))
    return tensors
