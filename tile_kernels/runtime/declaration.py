"""The vocabulary of an operator's declaration: results, launches, and tensors as metadata.

`outputs` of an operator returns `Out`s, `launches` returns `Launch`es and `Host` steps. In
`launches`, tensors are `Spec`s: they have the metadata of a tensor and remember how to obtain it
from the arguments of a call, so that a prepared call can be repeated with other tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tile_kernels.runtime.launch import Kernel

ALIGNMENT = 16  # bytes: the widest access of a kernel, and what plans ask of addresses


class Out(NamedTuple):
    """A result or a scratch buffer.

    `strides` default to contiguous. With `base`, the memory is a contiguous tensor of that shape
    and the result is a view of it with `shape` and `strides`; launches get the base.
    """

    name: str
    shape: Sequence[int]
    dtype: torch.dtype
    strides: Sequence[int] | None = None
    base: Sequence[int] | None = None

    @property
    def memory(self) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
        """Shape, strides and dtype of the allocation."""
        shape = tuple(self.base or self.shape)
        strides = None if self.base else self.strides
        return shape, tuple(strides or contiguous_strides(shape)), self.dtype

    def empty(self, device: torch.device) -> Tensor:
        """Uninitialized memory for this result."""
        shape, strides, dtype = self.memory
        memory = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        return memory if self.base is None else memory.as_strided(self.shape, self.strides or ())


class Size(NamedTuple):
    """A number in a problem or a launch argument that depends on dynamic sizes.

    `value(arguments)` is evaluated again for every new size, while the rest of `launches` is not.
    """

    value: Callable[[Any], Any]


class Launch(NamedTuple):
    """A kernel, the problem that its plan sees, its arguments: specs, numbers, `Size`s, None."""

    kernel: Kernel
    problem: tuple[Any, ...]
    arguments: tuple[Any, ...]


class Host(NamedTuple):
    """A PyTorch function in the place of a launch, e.g. `Host(Tensor.fill_, (out, 0))`."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]


class Spec:
    """A tensor in `launches`: metadata, and how a call obtains the tensor.

    It has those members of `torch.Tensor` that do not touch memory. `source` is a position among
    the values of a call, or `(spec, function, operands)`: the result of a function of another
    value, evaluated at every call.
    """

    __slots__ = ("_stride", "alignment", "device", "dtype", "shape", "source")

    def __init__(
        self,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        alignment: int = ALIGNMENT,
        source: Any = None,
    ) -> None:
        self.shape, self._stride, self.dtype, self.device = shape, stride, dtype, device
        self.alignment, self.source = alignment, source

    @classmethod
    def of(cls, x: Tensor, source: Any) -> Spec:
        """The metadata of a tensor. A contiguous one has the strides that follow from its shape."""
        if x.is_meta or not _has_address(x):
            offset = x.storage_offset()
            address = offset * x.element_size() if isinstance(offset, int) else 0
        else:
            address = x.data_ptr()
        stride = contiguous_strides(x.shape) if x.is_contiguous() else x.stride()
        alignment = math.gcd(address, ALIGNMENT)
        return cls(tuple(x.shape), stride, x.dtype, x.device, alignment, source)

    def stride(self, dim: int | None = None) -> Any:
        """As `torch.Tensor.stride`."""
        return self._stride if dim is None else self._stride[dim]

    def dim(self) -> int:
        """As `torch.Tensor.dim`."""
        return len(self.shape)

    def numel(self) -> int:
        """As `torch.Tensor.numel`."""
        return math.prod(self.shape)

    def element_size(self) -> int:
        """As `torch.Tensor.element_size`."""
        return self.dtype.itemsize

    def is_contiguous(self) -> bool:
        """As `torch.Tensor.is_contiguous`; strides of dimensions of size 1 are ignored."""
        pairs = zip(self.shape, self._stride, contiguous_strides(self.shape))
        return self.numel() == 0 or all(size == 1 or mine == want for size, mine, want in pairs)

    def apply(self, function: Callable[..., Any], *operands: Any, like: Spec | None = None) -> Spec:
        """The result of `function(tensor, *operands)`, evaluated at every call.

        `like` has its metadata; by default that of this tensor.
        """
        of = like or self
        source = (self, function, operands)
        return Spec(of.shape, of._stride, of.dtype, of.device, of.alignment, source)

    def clone(self) -> Spec:
        """A contiguous copy, aligned to 16 bytes."""
        strides = contiguous_strides(self.shape)
        copy = Spec(self.shape, strides, self.dtype, self.device)
        return self.apply(_contiguous_clone, like=copy)

    def contiguous(self) -> Spec:
        """This tensor, or a contiguous copy."""
        return self if self.is_contiguous() else self.clone()

    def view(self, *shape: Any) -> Spec:
        """Another shape of a contiguous tensor, or the same memory as another dtype.

        Write -1 for a size that depends on dynamic sizes: operands are recorded as they are.
        """
        if len(shape) == 1 and isinstance(shape[0], torch.dtype):
            return self._view_as(shape[0])
        known = math.prod(size for size in shape if size >= 0)
        full = tuple(self.numel() // max(known, 1) if size < 0 else size for size in shape)
        if full == self.shape and 1 not in full[1:]:  # a dynamic size may be 1 this time alone
            return self
        strides = contiguous_strides(full)
        like = Spec(full, strides, self.dtype, self.device, self.alignment)
        return self.apply(Tensor.view, *shape, like=like)

    def _view_as(self, dtype: torch.dtype) -> Spec:
        if dtype is self.dtype:
            return self
        old, new = self.dtype.itemsize, dtype.itemsize
        shape = (*self.shape[:-1], self.shape[-1] * old // new)
        strides = (*(stride * old // new for stride in self._stride[:-1]), 1)
        like = Spec(shape, strides, dtype, self.device, self.alignment)
        return self.apply(Tensor.view, dtype, like=like)


def _has_address(x: Tensor) -> bool:
    return type(x) in (Tensor, torch.nn.Parameter)


def _contiguous_clone(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor, as PyTorch has them."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size if isinstance(size, torch.SymInt) else max(size, 1)
    return tuple(reversed(strides))


def alignment(*tensors: Any) -> int:
    """The largest power of two, up to 16 bytes, that divides the addresses of these specs."""
    return min(x.alignment for x in tensors)


def row_alignment(x: Any) -> int:
    """The bytes, at most 16, that divide the address of every row of a spec."""
    return math.gcd(x.alignment, x.stride(0) * x.element_size())


def dtype_name(x: Any) -> str:
    """The dtype as kernels name it, `float32`; empty without a tensor."""
    return "" if x is None else str(x.dtype).removeprefix("torch.")
