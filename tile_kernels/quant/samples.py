"""Arguments that the cases of several quantizing operators are built from."""

from __future__ import annotations

from typing import Any

import torch

from tile_kernels.quant.casting import cast
from tile_kernels.runtime.cases import Arguments, Build, assert_equal_results, misaligned

_NAN, _INF = float("nan"), float("inf")
Flags = dict[str, bool]
ROW: Flags = {}
ROUNDED: Flags = {"round_sf": True}
COLUMN: Flags = {"use_tma_aligned_col_major_sf": True}
PACKED: Flags = {"round_sf": True, "use_tma_aligned_col_major_sf": True, "use_packed_ue8m0": True}
LAYOUTS = {"row": ROW, "rounded": ROUNDED, "column": COLUMN, "packed": PACKED}
_DTYPES = {"e4m3": torch.float8_e4m3fn, "e2m1": torch.int8, "e5m6": torch.uint8}
_BYTES = {"e4m3": (1, 1), "e2m1": (1, 2), "e5m6": (3, 2)}


def numbers(
    rows: int, width: int, dtype: torch.dtype, device: torch.device, *, special: bool = False
) -> torch.Tensor:
    """Normal numbers over many magnitudes; special ones with NaN, infinities and zeros."""
    x = torch.randn(rows, width, device=device)
    x = x * torch.exp2(torch.randint(-20, 20, (rows, 1), device=device).float())
    if special and rows:
        values = torch.tensor([_NAN, -_NAN, _INF, -_INF, 0.0, -0.0, 3e38, 1e-40], device=device)
        picks = torch.randint(len(values), (rows, width), device=device)
        x = torch.where(torch.rand(rows, width, device=device) < 0.1, values[picks], x)
        x[0] = _NAN
        x[-1] = 0.0
    return x.to(dtype)


def strided(x: torch.Tensor, extra: int) -> torch.Tensor:
    """The same numbers in rows that are `extra` elements apart."""
    wide = torch.zeros(x.shape[0], x.shape[1] + extra, dtype=x.dtype, device=x.device)
    wide[:, : x.shape[1]] = x
    return wide[:, : x.shape[1]]


def placed(x: torch.Tensor, extra: int = 0, shift: bool = False) -> torch.Tensor:
    """The same numbers `strided`, or one element into their storage, or as they are."""
    return strided(x, extra) if extra else misaligned(x) if shift else x


def all_flags(given: Flags) -> Flags:
    """The flags of scales, False where they are not given."""
    return {**dict.fromkeys(PACKED, False), **given}


def plain(
    rows: int,
    width: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    special: bool = False,
    extra: int = 0,
    shift: bool = False,
    **others: Any,
) -> Build:
    """`x`, which is not quantized, `placed`, and other arguments."""

    def make(device: torch.device) -> Arguments:
        x = numbers(rows, width, dtype, device, special=special)
        return {"x": placed(x, extra, shift), **others}

    return make


def quantized(
    rows: int,
    width: int,
    fmt: str,
    block: tuple[int, int],
    device: torch.device,
    flags: Flags,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A quantized tensor by the reference."""
    return cast(numbers(rows, width, torch.float32, device), fmt, block, None, None, **flags)


def codes(rows: int, width: int, fmt: str, device: torch.device) -> torch.Tensor:
    """Data of random bytes, NaN and infinities among them."""
    times, per = _BYTES[fmt]
    data = torch.randint(256, (rows, width * times // per), dtype=torch.uint8, device=device)
    return data.view(_DTYPES[fmt])


def hexed(text: str, dtype: torch.dtype) -> torch.Tensor:
    """A tensor from bytes in hexadecimal, rows separated by slashes."""
    rows = [list(bytes.fromhex(row)) for row in text.split("/")]
    return torch.tensor(rows, dtype=torch.uint8).view(dtype)


def words(*rows: list[int]) -> torch.Tensor:
    """float32 from their bits."""
    return (
        torch.tensor([list(row) for row in rows], dtype=torch.int64)
        .to(torch.int32)
        .view(torch.float32)
    )


def within_one_step(result: Any, expected: Any) -> None:
    """A comparison for results of `exp`: on CUDA, with the reference there too, equal to the bit.

    The CPU's `exp` may differ in its last bit. So codes and bfloat16 may be a step off, of the same
    sign, and float32 by 1e-6; integers, dtypes, shapes and strides are equal, and NaN is where NaN
    is.
    """
    if isinstance(expected, tuple) and isinstance(result, tuple):
        assert_equal_results(len(result), len(expected))
        for one, other in zip(result, expected):
            within_one_step(one, other)
        return
    if not (isinstance(expected, torch.Tensor) and expected.is_floating_point()):
        assert_equal_results(result, expected)
        return
    if result.is_cuda and expected.is_cuda:
        assert_equal_results(result, expected)
        return
    laid_out = [(t.dtype, t.shape, t.numel() and t.stride()) for t in (result, expected)]
    assert_equal_results(*laid_out)
    if expected.dtype == torch.float32:
        torch.testing.assert_close(result, expected, rtol=1e-6, atol=0.0, equal_nan=True)
        return
    nan = expected.float().isnan()
    assert_equal_results(result.float().isnan(), nan)
    bits = {1: torch.int8, 2: torch.int16}[expected.itemsize]
    # The same sign, so the codes are as far apart as the magnitudes.
    one, other = (t.view(bits).int().masked_fill(nan, 0) for t in (result, expected))
    assert_equal_results(one < 0, other < 0)
    if one.numel() and (one - other).abs().max() > 1:
        raise AssertionError(f"{(one - other).abs().max()} steps apart")
