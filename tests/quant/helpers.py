"""Bit patterns in and out of tensors, for vectors written in hex, and encoding by search."""

from __future__ import annotations

import torch

from tile_kernels.quant import formats
from tile_kernels.quant.formats import E2M1, E4M3

NAN = float("nan")
INF = float("inf")
FLOAT32_MAX = torch.finfo(torch.float32).max

# (use_tma_aligned_col_major_sf, use_packed_ue8m0) of the three layouts of scale factors.
LAYOUTS = [(False, False), (True, False), (True, True)]


def float32(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def float32_of_bits(*patterns: int) -> torch.Tensor:
    signed = [pattern - (1 << 32) if pattern >= 1 << 31 else pattern for pattern in patterns]
    return torch.tensor(signed, dtype=torch.int32).view(torch.float32)


def bits(x: torch.Tensor) -> list[int]:
    """The float32 or int32 elements in row-major order, as unsigned bit patterns."""
    return [pattern & 0xFFFFFFFF for pattern in x.view(torch.int32).flatten().tolist()]


def hex_rows(data: torch.Tensor) -> str:
    """One-byte elements as in `01 02 / 03 04`."""
    rows = data.view(torch.uint8).tolist()
    return " / ".join(" ".join(f"{byte:02X}" for byte in row) for row in rows)


def random_float32(shape: tuple[int, ...]) -> torch.Tensor:
    """Every finite bit pattern is as likely as any other."""
    x = torch.randint(-(1 << 31), 1 << 31, shape, dtype=torch.int64).to(torch.int32)
    return x.view(torch.float32).nan_to_num(nan=1.0)


def values_of_codes(fmt: formats.Format) -> torch.Tensor:
    """The value of every code, in order of the codes."""
    if fmt is E4M3:
        return formats.decode_e4m3(torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn))
    if fmt is E2M1:
        return formats.decode_e2m1(formats.pack_e2m1(torch.arange(16, dtype=torch.uint8)))
    return formats.decode_e5m6(formats.pack_e5m6(torch.arange(4096)))


def nearest_codes(x: torch.Tensor, fmt: formats.Format) -> list[int]:
    """By search among all finite values, in float64; ties to the even code."""
    values = values_of_codes(fmt)
    magnitudes = values[: values.numel() // 2].double()
    magnitudes = magnitudes[magnitudes.isfinite()]
    distances = (x.double().abs().clamp(max=2 * fmt.max)[:, None] - magnitudes).abs()
    nearest = distances == distances.min(dim=1, keepdim=True).values
    even = torch.arange(len(magnitudes)) % 2 == 0
    code = (nearest.int() + (nearest & even).int()).argmax(dim=1)
    return (code + torch.signbit(x) * (values.numel() // 2)).tolist()


FORMATS = {"e4m3": E4M3, "e2m1": E2M1}


def e4m3(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.uint8).view(torch.float8_e4m3fn)
