"""Arguments that the cases of several quantizing operators are built from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tile_kernels.quant import scales
from tile_kernels.quant.casting import cast
from tile_kernels.quant.sample_flags import ROW, Flags, all_flags
from tile_kernels.runtime.cases import Arguments, Build, Reject
from tile_kernels.runtime.sampling import (
    BF16,
    NAN,
    assert_equal_results,
    builder,
    changed,
    edited,
    misaligned,
    with_some,
)

_DTYPES = {"e4m3": torch.float8_e4m3fn, "e2m1": torch.int8, "e5m6": torch.uint8}
_BYTES = {"e4m3": (1, 1), "e2m1": (1, 2), "e5m6": (3, 2)}


def numbers(
    rows: int, width: int, dtype: torch.dtype, device: torch.device, *, special: bool = False
) -> torch.Tensor:
    """Normal numbers over many magnitudes; special ones with NaN, infinities and zeros."""
    x = torch.randn(rows, width, device=device)
    x = x * torch.exp2(torch.randint(-20, 20, (rows, 1), device=device).float())
    if special and rows:
        x = with_some(x)
        x[0] = NAN
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


@builder
def plain(
    device: torch.device,
    rows: int,
    width: int,
    dtype: torch.dtype = BF16,
    *,
    special: bool = False,
    extra: int = 0,
    shift: bool = False,
    **others: Any,
) -> Arguments:
    """`x`, which is not quantized, `placed`, and other arguments."""
    x = numbers(rows, width, dtype, device, special=special)
    return {"x": placed(x, extra, shift), **others}


def plain_cast(block: str) -> Callable[..., Build]:
    """`plain` samples of a cast with a format and all flags, whose scale blocks go by that name."""

    def build(
        rows: int,
        width: int,
        fmt: str,
        block_size: int | tuple[int, int],
        dtype: torch.dtype = BF16,
        flags: Flags = ROW,
        **how: Any,
    ) -> Build:
        named: dict[str, Any] = {"fmt": fmt, block: block_size, **all_flags(flags)}
        return plain(rows, width, dtype, **named, **how)

    return build


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


def gates_and_values(
    rows: int, hidden: int, dtype: torch.dtype, device: torch.device, special: bool
) -> torch.Tensor:
    """The input of SwiGLU: `[rows, 2 * hidden]`, of a few units, or `numbers` with special ones."""
    if special:
        return numbers(rows, 2 * hidden, dtype, device, special=True)
    return (4 * torch.randn(rows, 2 * hidden, device=device)).to(dtype)


def block_scales(
    rows: int,
    width: int,
    block: tuple[int, int],
    device: torch.device,
    exponents: tuple[int, int],
    flags: Flags,
) -> torch.Tensor:
    """Scales of the blocks of `rows x width` values; exponents from a range without its end."""
    shape = scales.num_blocks((rows, width), block)
    sf = torch.exp2(torch.randint(*exponents, shape, device=device).float())
    given = all_flags(flags)
    if not given["round_sf"]:
        sf = sf * (1 + torch.rand(shape, device=device))
    return scales.lay_out_sf(sf, given["use_tma_aligned_col_major_sf"], given["use_packed_ue8m0"])


def with_data(edit: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Arguments], Arguments]:
    """An edit for `Reject` of the data of a quantized `x`."""
    return edited("x", lambda x: (edit(x[0]), x[1]))


def with_sf(edit: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Arguments], Arguments]:
    """An edit for `Reject` of the scales of a quantized `x`."""
    return edited("x", lambda x: (x[0], edit(x[1])))


# Of operators that take nothing but quantized data.
QUANTIZED_REJECTS = [
    Reject("x", "a tensor", edited("x", lambda x: x[0])),
    Reject("x", "a triple", edited("x", lambda x: (*x, x[1]))),
    Reject("x", "bytes", with_data(lambda data: data.view(torch.uint8))),
    Reject("x", "no channels", with_data(lambda data: data[:, :0])),
    Reject("x_sf", "too few", with_sf(lambda sf: sf[:, :1])),
]


CLAMP_REJECTS = [
    Reject("swiglu_clamp_value", "negative", changed(swiglu_clamp_value=-1.0)),
    Reject("swiglu_clamp_value", "NaN", changed(swiglu_clamp_value=NAN)),
    Reject("swiglu_clamp_value", "text", changed(swiglu_clamp_value="1")),
]


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
