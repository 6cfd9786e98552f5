"""Fill fresh memory with a pattern, so that what a kernel leaves unwritten shows."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["poisoned_empty"]

_ALLOCATORS: tuple[tuple[Any, str], ...] = (
    (torch, "empty"),
    (torch, "empty_like"),
    (torch, "empty_permuted"),
    (torch, "empty_strided"),
    (torch.Tensor, "new_empty"),
    (torch.Tensor, "new_empty_strided"),
)
_ALLOCATOR_OPS = frozenset(
    (
        torch.ops.aten.empty.memory_format,
        torch.ops.aten.empty_like.default,
        torch.ops.aten.empty_permuted.default,
        torch.ops.aten.empty_strided.default,
        torch.ops.aten.new_empty.default,
        torch.ops.aten.new_empty_strided.default,
    )
)


def _fill(x: Any, byte: int) -> None:
    """Fill the memory behind `x`, if it is a tensor with memory.

    Meta tensors have none, nor have tensor subclasses, fake tensors among them, of their own.
    """
    if type(x) is not torch.Tensor or x.device.type == "meta" or x.layout != torch.strided:
        return
    # Through the storage: reaches the gaps between strides, any dtype, and autograd never sees it.
    storage: Any = x.untyped_storage()
    storage.fill_(byte)


class _PoisonMode(TorchDispatchMode):
    """Poisons what is allocated through the dispatcher, whoever calls it and by whatever name."""

    def __init__(self, byte: int) -> None:
        super().__init__()
        self.byte = byte

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _ALLOCATOR_OPS:
            _fill(result, self.byte)
        return result


def _poisoning(allocate: Callable[..., Any], byte: int) -> Callable[..., Any]:
    @functools.wraps(allocate)
    def poisoned(*args: Any, **kwargs: Any) -> Any:
        result = allocate(*args, **kwargs)
        # With `out=` the memory is the caller's, and may hold other tensors too.
        if kwargs.get("out") is None and not torch.compiler.is_compiling():
            _fill(result, byte)
        return result

    return poisoned


@contextlib.contextmanager
def poisoned_empty(byte: int = 0xA5) -> Iterator[None]:
    """Within this context uninitialised tensors hold `byte` in every byte of their memory.

    Holds for `torch.empty`, `empty_like`, `empty_strided`, `empty_permuted`, `Tensor.new_empty`
    and `new_empty_strided` of any dtype on any real device, also within backward passes and
    operators written in Python; meta and fake tensors are left alone. Not poisoned: memory that
    an operator allocates in C++. The functions of torch are replaced for the whole process.

    An output that holds the pattern may hold it by right. Running twice with different bytes and
    comparing the results byte for byte proves that every byte was written; 0xFF, which is NaN in
    every float format and -1 in integers, shows best that unwritten memory was *read*.

    >>> with poisoned_empty(0x01):
    ...     torch.empty(2, dtype=torch.int16).tolist()
    [257, 257]
    """
    from unittest import mock

    if isinstance(byte, bool) or not isinstance(byte, int):
        raise TypeError(f"poisoned_empty: byte must be an int, got {type(byte).__name__}")
    if not 0 <= byte <= 0xFF:
        raise ValueError(f"poisoned_empty: byte must be in 0..255, got {byte}")
    with contextlib.ExitStack() as stack:
        stack.enter_context(_PoisonMode(byte))
        # A mode is suspended while it handles an operator, so operators written in Python need
        # the functions themselves replaced.
        for owner, name in _ALLOCATORS:
            poisoned = _poisoning(getattr(owner, name), byte)
            stack.enter_context(mock.patch.object(owner, name, poisoned))
        yield
