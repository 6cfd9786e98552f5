"""What the operators on windows of tokens share: checks, series of tensors, and launches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tile_kernels import config
from tile_kernels.attention.compress.plan import plan_compress, plan_places
from tile_kernels.attention.geometry import blocks_per_sm, geometry
from tile_kernels.runtime import checks
from tile_kernels.runtime.declaration import (
    Launch,
    Out,
    Size,
    Spec,
    alignment,
    dtype_name,
    row_alignment,
)
from tile_kernels.runtime.launch import Kernel

MAX_WINDOW = 65536
DTYPES = (torch.bfloat16, torch.float32)

_COMPRESS = Kernel("tile_kernels.attention.compress.kernel", "compress", plan_compress)
_PLACES = Kernel("tile_kernels.attention.compress.kernel", "place_windows", plan_places)

# ---- checks -------------------------------------------------------------------------------------


def _check_series(
    names: tuple[str, str, str], kv: Tensor, z: Tensor, bias: Tensor, like: Tensor | None = None
) -> None:
    """One series; with the sizes and the dtype of `like`, the values of another one, if given."""
    dims = ("num_tokens", "channels")
    dtype = DTYPES if like is None else like.dtype
    shape = None if like is None else tuple(like.shape)
    checks.tensor(names[0], kv, dims, dtype, shape=shape, unit_inner_stride=True)
    if kv.shape[1] < 1:
        raise ValueError(f"{names[0]} must have at least one channel, got 0")
    shape = tuple(kv.shape)
    checks.tensor(names[1], z, dims, kv.dtype, shape=shape, unit_inner_stride=True)
    checks.tensor(
        names[2], bias, ("window", "channels"), torch.float32, shape=(None, shape[1]),
        unit_inner_stride=True,
    )  # fmt: skip
    if not 1 <= bias.shape[0] <= MAX_WINDOW:
        raise ValueError(f"{names[2]} must have 1..{MAX_WINDOW} rows, got {bias.shape[0]}")


def check_series(
    kv_a: Tensor,
    z_a: Tensor,
    bias_a: Tensor,
    kv_b: Tensor | None = None,
    z_b: Tensor | None = None,
    bias_b: Tensor | None = None,
) -> None:
    """Series a, and series b like it or not at all."""
    _check_series(("kv_a", "z_a", "bias_a"), kv_a, z_a, bias_a)
    given = [
        name for name, x in (("kv_b", kv_b), ("z_b", z_b), ("bias_b", bias_b)) if x is not None
    ]
    if kv_b is None or z_b is None or bias_b is None:
        if given:
            raise ValueError(f"kv_b, z_b and bias_b must be given together, got {', '.join(given)}")
        return
    _check_series(("kv_b", "z_b", "bias_b"), kv_b, z_b, bias_b, like=kv_a)
    if bias_b.shape[0] != bias_a.shape[0]:
        rows = f"{bias_a.shape[0]} rows as bias_a has"
        raise ValueError(f"bias_b must have {rows}, got {bias_b.shape[0]}")


def check_packed(kv: Tensor, gate: Tensor, ape: Tensor) -> None:
    """Two series in one."""
    _check_series(("kv", "gate", "ape"), kv, gate, ape)
    if kv.shape[1] % 2:
        raise ValueError(f"kv must have an even number of channels, got {kv.shape[1]}")


def check_windows(cu_seqlens: Tensor | None, num_windows: int | None) -> None:
    """Sequences, and the number of entries."""
    if cu_seqlens is not None:
        checks.tensor("cu_seqlens", cu_seqlens, ("num_bounds",), torch.int32, contiguous=True)
        if cu_seqlens.shape[0] < 1:
            raise ValueError("cu_seqlens must have at least one element, got 0")
    if num_windows is not None:
        checks.integer("num_windows", num_windows, 0, checks.MOST_SIZE)
        if cu_seqlens is None:
            raise ValueError("num_windows needs cu_seqlens, got None")


def check_dtype(name: str, dtype: torch.dtype | None, or_none: bool = True) -> None:
    """The dtype of entries, or None for a default."""
    if dtype not in DTYPES and not (dtype is None and or_none):
        raise TypeError(f"{name} must be bfloat16 or float32, got {dtype}")


def check_sequences(
    cu_seqlens: Tensor | None,
    kv: Tensor,
    bias: Tensor,
    num_windows: int | None,
    name: str = "num_windows",
) -> None:
    """For the checked mode: bounds do not decrease, and all windows have an entry."""
    if cu_seqlens is None:
        return
    num_tokens, window = kv.shape[0], bias.shape[0]
    entries = count_windows(num_tokens, window, num_windows)
    checks.in_range("cu_seqlens", cu_seqlens, 0, num_tokens)
    falls = (cu_seqlens.diff() < 0).nonzero()
    if len(falls):
        raise ValueError(f"cu_seqlens must not decrease, but element {falls[0].tolist()} does")
    needed = int((cu_seqlens.diff() // window).sum())
    if needed > entries:
        raise ValueError(f"{name} must have room for {needed} windows, got {entries}")


def count_windows(num_tokens: int, window: int, num_windows: int | None) -> int:
    """Entries of a result: as given, else as many as the tokens could have."""
    return num_tokens // window if num_windows is None else num_windows


# ---- series -------------------------------------------------------------------------------------


def as_specs(record: Any) -> Any:
    """The arguments of a call with metadata in place of tensors, as `launches` gets them."""
    return type(record)(*[Spec.of(x, None) if isinstance(x, Tensor) else x for x in record])


def accessible(x: Spec) -> Spec:
    """`x` if it is contiguous and starts at a multiple of 16 bytes, else such a copy."""
    return x if x.is_contiguous() and alignment(x) == 16 else x.clone()


def _unit_inner_stride(x: Tensor) -> Tensor:
    return x.as_strided(x.shape, (x.stride(0), 1))


def _with_unit_inner_stride(x: Spec) -> Spec:
    if x.stride(1) == 1:
        return x
    like = Spec(x.shape, (x.stride(0), 1), x.dtype, x.device, x.alignment)
    return x.apply(_unit_inner_stride, like=like)


class Series(NamedTuple):
    """The tensors of series a, and of series b or None three times, in the order of kernels."""

    kv_a: Any
    z_a: Any
    bias_a: Any
    kv_b: Any = None
    z_b: Any = None
    bias_b: Any = None

    @classmethod
    def of(cls, *specs: Any) -> Series:
        """As kernels take them: with stride 1, also where rows have one channel."""
        return cls(*[None if x is None else _with_unit_inner_stride(x) for x in specs])

    @property
    def number(self) -> int:
        """One or two."""
        return 1 if self.kv_b is None else 2

    @property
    def window(self) -> int:
        """Tokens of a window."""
        return self.bias_a.shape[0]

    @property
    def channels(self) -> int:
        """Channels of a row."""
        return self.kv_a.shape[1]

    @property
    def rows(self) -> tuple[Spec, ...]:
        """Values and scores."""
        return tuple(x for x in (self.kv_a, self.z_a, self.kv_b, self.z_b) if x is not None)

    @property
    def biases(self) -> tuple[Spec, ...]:
        """By position in the window."""
        return (self.bias_a,) if self.bias_b is None else (self.bias_a, self.bias_b)

    @property
    def vector(self) -> int:
        """Channels that a thread loads at once: 16 bytes where all rows start at such multiples."""
        vector = row_vector(self.channels, self.rows)
        part = math.gcd(vector, 4, *[row_alignment(x) // 4 for x in self.biases])
        return vector if part == min(vector, 4) else part


def row_vector(channels: int, rows: tuple[Spec, ...]) -> int:
    """Channels in 16 bytes, or in as many as divide the addresses of all `rows`."""
    size = rows[0].element_size()
    return math.gcd(channels, 16 // size, *[max(row_alignment(x) // size, 1) for x in rows])


# ---- launches -----------------------------------------------------------------------------------


def places_scratch(cu_seqlens: Tensor | None, num_windows: int) -> tuple[Out, ...]:
    """What `place_windows` writes, if there are sequences.

    These are the bounds, cut to the tokens; the number of windows before each of them; and where
    each window lies.
    """
    if cu_seqlens is None:
        return ()
    bounds = tuple(cu_seqlens.shape)
    return (
        Out("bounds", bounds, torch.int32),
        Out("counted", bounds, torch.int32),
        Out("places", (num_windows, 3), torch.int32),
    )


def place_windows(
    cu_seqlens: Any, window: int, num_tokens: Size, places: Sequence[Spec]
) -> list[Launch]:
    """Fills the buffers of `places_scratch`."""
    if cu_seqlens is None:
        return []
    return [Launch(_PLACES, (window,), (cu_seqlens, *places, num_tokens))]


def compress_windows(series: Series, places: Spec | None, out: Spec) -> Launch:
    """Fills `out` with the entries of windows, which follow each other or lie at `places`."""
    problem = (
        series.channels, series.window, series.number, places is not None,
        dtype_name(series.kv_a), dtype_name(out), series.vector,
    )  # fmt: skip
    return Launch(_COMPRESS, problem, (*series, places, out))


def count_parts(num_windows: int, problem: tuple[int, int, int, int], device: torch.device) -> int:
    """Blocks of the backward pass, each with its own sum of bias gradients.

    `problem` is channels, window, series and vector. The number is what fits on the device, for
    any SM budget, so that results do not depend on the budget.
    """
    geo = geometry(*problem)
    sms = config.get_device_num_sms(device if device.type == "cuda" else None)
    most = max(1, blocks_per_sm(geo, gradient=True) * sms // geo.blocks_across)
    return max(1, min(-(-num_windows // geo.slots), most))
