"""What the operators on windows of tokens share: checks, and where windows lie."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from tile_kernels import config
from tile_kernels.attention.geometry import blocks_per_sm, geometry
from tile_kernels.runtime import checks
from tile_kernels.runtime.launch import Kernel, alignment, row_alignment

MOST_WINDOW = 65536
DTYPES = (torch.bfloat16, torch.float32)

_PLACES = Kernel("tile_kernels.attention.kernels.compress", "place_windows")


def _check_series(
    names: tuple[str, str, str], kv: Tensor, z: Tensor, bias: Tensor, like: Tensor | None = None
) -> None:
    """One series; of the sizes and the dtype of `like`, the values of another one, if given."""
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
    if not 1 <= bias.shape[0] <= MOST_WINDOW:
        raise ValueError(f"{names[2]} must have 1..{MOST_WINDOW} rows, got {bias.shape[0]}")


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
            raise ValueError("num_windows is for sequences: it needs cu_seqlens")


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
    """For the checked mode: bounds are in order, and all windows have an entry."""
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


def unit_stride(x: Tensor) -> Tensor:
    """`x` with stride 1 in its last dimension also where that has one element."""
    if x.stride(1) == 1:
        return x
    return x.as_strided(x.shape, (x.stride(0), 1))


class Series(NamedTuple):
    """The tensors of series a, and of series b or None three times, in the order of kernels."""

    kv_a: Tensor
    z_a: Tensor
    bias_a: Tensor
    kv_b: Tensor | None = None
    z_b: Tensor | None = None
    bias_b: Tensor | None = None

    @classmethod
    def of(cls, *tensors: Tensor | None) -> Series:
        """As kernels take them: with stride 1."""
        return cls(*[None if x is None else unit_stride(x) for x in tensors])  # type: ignore[arg-type]

    @property
    def number(self) -> int:
        """One or two."""
        return 1 if self.kv_b is None else 2

    @property
    def rows(self) -> tuple[Tensor, ...]:
        """Values and scores."""
        if self.kv_b is None or self.z_b is None:
            return self.kv_a, self.z_a
        return self.kv_a, self.z_a, self.kv_b, self.z_b

    @property
    def biases(self) -> tuple[Tensor, ...]:
        """By position in the window."""
        return (self.bias_a,) if self.bias_b is None else (self.bias_a, self.bias_b)

    @property
    def vector(self) -> int:
        """Channels that a thread loads at once: 16 bytes where all rows start at such multiples."""
        vector = row_vector(self.kv_a.shape[1], self.rows)
        part = math.gcd(vector, 4, *[row_alignment(x) // 4 for x in self.biases])
        return vector if part == min(vector, 4) else part


def row_vector(channels: int, rows: tuple[Tensor, ...]) -> int:
    """Channels in 16 bytes, or in as many as divide the addresses of all `rows`."""
    size = rows[0].element_size()
    return math.gcd(channels, 16 // size, *[max(row_alignment(x) // size, 1) for x in rows])


def count_windows(num_tokens: int, window: int, num_windows: int | None) -> int:
    """Entries of a result: as given, else as many as the tokens could have."""
    return num_tokens // window if num_windows is None else num_windows


def place_windows(
    cu_seqlens: Tensor, num_tokens: int, window: int, num_windows: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Bounds inside the tokens, windows before each of them, and where each window lies."""
    bounds, counted = torch.empty_like(cu_seqlens), torch.empty_like(cu_seqlens)
    places = cu_seqlens.new_empty((num_windows, 3))
    _PLACES.launch((window,), cu_seqlens, bounds, counted, places, num_tokens)
    return bounds, counted, places


def count_parts(num_windows: int, problem: tuple[int, int, int, int], device: torch.device) -> int:
    """Blocks of the backward pass, each with its own sum of bias gradients.

    `problem` is channels, window, series and vector. As many as fit on the device, whatever the SM
    budget is, so that results do not depend on it.
    """
    geo = geometry(*problem)
    sms = config.get_device_num_sms(device if device.type == "cuda" else None)
    most = max(1, blocks_per_sm(geo, gradient=True) * sms // geo.blocks_across)
    return torch.sym_max(1, torch.sym_min(-(-num_windows // geo.slots), most))


def accessible(x: Tensor) -> Tensor:
    """`x` contiguous, from a multiple of 16 bytes on; a copy where it is not."""
    if x.is_contiguous() and alignment(x) == 16:
        return x
    return x.clone(memory_format=torch.contiguous_format)
