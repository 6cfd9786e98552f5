"""Checks of a kernel's arguments against its signature, and the symbols that they determine."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .errors import EmulationError
from .lowering import Param, compile_expressions

# TileLang's name of a dtype -> torch's. Packed fp4 is two values per byte, in a byte tensor of half
# the last dimension.
_DTYPES = {
    "float8_e4m3": "float8_e4m3fn",
    "float8_e8m0": "float8_e8m0fnu",
    "e4m3_float8": "float8_e4m3fn",
    "e5m2_float8": "float8_e5m2",
    "custom[tfloat32]": "float32",
}
_PACKED = {
    "float4_e2m1fn": ("float4_e2m1fn_x2", "uint8", "int8"),
    "int4": ("int8", "uint8"),
    "uint4": ("uint8", "int8"),
}


_INTEGER = functools.cache(re.compile(r"(u?)int(\d+)").fullmatch)


def _accepted_dtypes(name: str) -> tuple[torch.dtype, ...]:
    names = _PACKED.get(name, (_DTYPES.get(name, name),))
    found = tuple(d for n in names if isinstance(d := getattr(torch, n, None), torch.dtype))
    if not found:
        raise EmulationError(f"the emulator does not know the dtype {name}")
    return found


def _evaluator(expression: str) -> Callable[[dict[str, Any]], int]:
    """What computes a size from the symbols."""
    if expression.isdigit():
        number = int(expression)
        return lambda _: number
    evaluate = compile_expressions([expression])
    return lambda symbols: evaluate(symbols)[0]


class TensorSlot:
    """Checks one tensor argument and solves for the symbols in its shape."""

    def __init__(self, param: Param, used: bool) -> None:
        self.name = param.name
        self.used = used
        self.shape = param.shape or ()
        self.strides = param.strides
        self.dtypes = _accepted_dtypes(param.dtype)
        self.packed = param.dtype in _PACKED
        bits = re.search(r"\d+", param.dtype)
        self.elem_bits = 8 if param.dtype == "bool" else int(bits[0]) if bits else 8
        self.symbols = [(i, e) for i, e in enumerate(self.shape) if e.isidentifier()]
        self.constants = [(i, int(e)) for i, e in enumerate(self.shape) if e.isdigit()]
        rest = [(i, e) for i, e in enumerate(self.shape) if not (e.isidentifier() or e.isdigit())]
        self.derived = [(i, e, _evaluator(e)) for i, e in rest]
        self.stride_symbols = [(i, e) for i, e in enumerate(self.strides or ()) if e.isidentifier()]
        self.stride_rest = [
            (i, e, _evaluator(e)) for i, e in enumerate(self.strides or ()) if not e.isidentifier()
        ]

    @classmethod
    def of_bytes(cls, name: str) -> TensorSlot:
        """Memory that the kernel reaches through an address in a tensor."""
        return cls(Param(name, "uint8", ("num_bytes",)), True)

    def empty(self, sizes: Sequence[int]) -> torch.Tensor:
        """A tensor of these (logical) sizes whose bytes are 0xFF: NaN, or -1."""
        sizes = list(sizes)
        if self.packed and sizes:
            sizes[-1] //= 2
        made = torch.empty(sizes, dtype=self.dtypes[0])
        if made.dtype == torch.bool:
            return made.fill_(True)
        made.view(torch.uint8).fill_(0xFF)
        return made

    def sizes(self, t: torch.Tensor) -> list[int]:
        """The sizes in elements of the kernel's dtype."""
        sizes = list(t.shape)
        if self.packed and sizes:
            sizes[-1] *= 2
        return sizes

    def bind(self, t: Any, symbols: dict[str, Any], device: str = "cpu") -> None:
        """Check `t`, a tensor on a device of this type, and enter its sizes and strides."""
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"{self.name}: expected a tensor, got {type(t).__name__}")
        if t.device.type != device:
            kind = device.upper()
            raise ValueError(f"{self.name}: expected a {kind} tensor, got one on {t.device}")
        if t.dtype not in self.dtypes:
            expected = " or ".join(str(d) for d in self.dtypes)
            raise TypeError(f"{self.name}: expected dtype {expected}, got {t.dtype}")
        if t.dim() != len(self.shape):
            raise ValueError(
                f"{self.name}: expected {len(self.shape)} dimensions ({', '.join(self.shape)}), "
                f"got {t.dim()}"
            )
        sizes = self.sizes(t)
        for i, e in self.symbols:
            if symbols.setdefault(e, sizes[i]) != sizes[i]:
                raise ValueError(
                    f"{self.name}: dimension {i} ({e}) is {sizes[i]}, elsewhere {e} is {symbols[e]}"
                )
        for i, size in self.constants:
            if sizes[i] != size:
                raise ValueError(f"{self.name}: dimension {i} must be {size}, got {sizes[i]}")
        if self.strides is None:
            if not t.is_contiguous():
                raise ValueError(f"{self.name}: expected a contiguous tensor, got {t.stride()}")
            return
        for i, e in self.stride_symbols:
            stride = t.stride(i)
            if symbols.setdefault(e, stride) != stride:
                raise ValueError(
                    f"{self.name}: stride {i} ({e}) is {stride}, elsewhere {e} is {symbols[e]}"
                )

    def check_derived(self, t: torch.Tensor, symbols: dict[str, Any]) -> None:
        """Check sizes and strides that follow from symbols, when these are known."""
        for i, e, value in self.derived:
            expected = value(symbols)
            if self.sizes(t)[i] != expected:
                raise ValueError(
                    f"{self.name}: dimension {i} must be {e} = {expected}, got {self.sizes(t)[i]}"
                )
        for i, e, value in self.stride_rest:
            expected = value(symbols)
            if self.packed and i < t.dim() - 1:
                expected //= 2
            if t.stride(i) != expected and t.shape[i] > 1 and t.numel():
                shown = expected if e.isdigit() else f"{e} = {expected}"
                raise ValueError(f"{self.name}: stride {i} must be {shown}, got {t.stride(i)}")


def check_scalar(param: Param, value: Any) -> None:
    """A scalar of the right type that the kernel's own type can hold; ctypes would cut it off."""
    integer = _INTEGER(param.dtype)
    accepted = (int,) if integer or param.dtype == "bool" else (int, float)
    if not isinstance(value, accepted):
        raise TypeError(
            f"{param.name}: expected a {param.dtype} scalar, got {type(value).__name__}"
        )
    if integer:
        bits = int(integer[2])
        low, high = (0, 2**bits) if integer[1] else (-(2 ** (bits - 1)), 2 ** (bits - 1))
        if not low <= value < high:
            raise ValueError(f"{param.name}: {value} is out of range for {param.dtype}")
