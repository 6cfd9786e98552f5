"""Argument sets of attention over shared rows: queries, rows and sinks, and the comparison."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tile_kernels.runtime.cases import Arguments, Reject
from tile_kernels.runtime.sampling import (
    INF,
    NAN,
    assert_equal_results,
    changed,
    edited,
    with_value,
)

# The weights of values are rounded to bfloat16 once, and so is the result, each by 2**-9 of itself
# at most, or 2**-8 where a rounded value is next to a power of two.
_OUT_NORM, _OUT_ELEMENT = 5e-3, 2.0**-7
_STATS_RTOL, _STATS_ATOL = 3.1e-5, 1e-6


def queries(
    num_tokens: int,
    heads: int,
    width: int,
    sink: str,
    device: torch.device,
    *,
    pad: int = 0,
    loud: float = 1.0,
) -> Arguments:
    """`q`, `sm_scale` and, unless `sink` is empty, that: "normal", or "wild" with infinities.

    `pad`: channels between heads, and heads between tokens.
    """
    q = loud * torch.randn(num_tokens, heads + pad, width + pad, device=device).bfloat16()
    found: Arguments = {"q": q[:, :heads, :width], "sm_scale": width**-0.5}
    if sink:
        found["sink"] = 2 * torch.randn(heads, device=device)
    if sink == "wild":
        found["sink"][0::3], found["sink"][1::3] = INF, -INF
    return found


def rows(count: int, width: int, device: torch.device, *, pad: int = 0) -> Tensor:
    """Normal rows, `pad` channels apart."""
    return torch.randn(count, width + pad, device=device).bfloat16()[:, :width]


def compare(result: Any, expected: Any) -> None:
    """`out` alone or with `max_logits` and `lse`, to the tolerances of their precision.

    The largest logit is not specified where NaN is among the logits.
    """
    if isinstance(expected, Tensor):
        _compare_out(result, expected)
        return
    assert_equal_results((type(result), len(result)), (type(expected), len(expected)))
    _compare_out(result[0], expected[0])
    for one, other in zip(result[1:], expected[1:]):
        assert_equal_results(torch.zeros_like(one), torch.zeros_like(other))
    top = torch.where(expected[1].isnan(), expected[1], result[1])
    stats = (torch.stack((top, result[2])), torch.stack(expected[1:]))
    torch.testing.assert_close(*stats, rtol=_STATS_RTOL, atol=_STATS_ATOL, equal_nan=True)


def _compare_out(result: Tensor, expected: Tensor) -> None:
    compare_norms("out", result, expected, _OUT_NORM, _OUT_ELEMENT)


def compare_norms(
    name: str, result: Tensor, expected: Tensor, norm: float, element: float, atol: float = 0.0
) -> None:
    """Compares by the norm of the difference, and by elements; NaN and infinities are alike.

    Args:
        name: What it is, for the message.
        result: The tensor.
        expected: That of the reference.
        norm: How large the norm of the difference may be, in norms of `expected`.
        element: How large a difference may be, in units of the largest element or 1.
        atol: The root mean square of differences that are allowed in any case.
    """
    assert_equal_results(torch.zeros_like(result), torch.zeros_like(expected))
    assert_equal_results(result.isfinite().cpu(), expected.isfinite().cpu())
    if not expected.numel():
        return
    got, wanted = (x.float().nan_to_num(0, 0, 0) for x in (result, expected))
    largest = element * max(1.0, wanted.abs().max().item())
    torch.testing.assert_close(got, wanted, rtol=0, atol=largest)
    allowed = norm * wanted.norm().item() + atol * wanted.numel() ** 0.5 + 1e-12
    if (error := (got - wanted).norm().item()) > allowed:
        size = wanted.norm().item()
        raise AssertionError(f"{name} is off by {error:.1e} of {size:.1e}, allowed {allowed:.1e}")


QUERY_REJECTS = [
    Reject("q", "too wide", edited("q", lambda x: x.repeat(1, 1, 2))),
    Reject("q", "no heads", edited("q", lambda x: x[:, :0])),
    Reject("q", "strides off 16 bytes", edited("q", lambda x: _spaced(x, 3))),
    Reject("sm_scale", "zero", changed(sm_scale=0.0)),
    Reject("sm_scale", "negative", changed(sm_scale=-1.0)),
    Reject("sm_scale", "infinite", changed(sm_scale=INF)),
    Reject("sm_scale", "NaN", changed(sm_scale=NAN)),
    Reject("sm_scale", "a string", changed(sm_scale="1")),
    Reject("sink", "of other heads", lambda a: {**a, "sink": torch.zeros(a["q"].shape[1] + 1)}),
    Reject("sink", "bfloat16", lambda a: {**a, "sink": torch.zeros(a["q"].shape[1]).bfloat16()}),
]


def row_rejects(name: str) -> list[Reject]:
    """What keys must not be."""
    return [
        Reject(name, "another width", edited(name, lambda x: x[..., :256])),
        Reject(name, "float32", edited(name, lambda x: x.float())),
        Reject(name, "strides off 16 bytes", edited(name, lambda x: _spaced(x, 3))),
    ]


def _spaced(x: Tensor, pad: int) -> Tensor:
    """The same values, in rows that `pad` channels are between."""
    return torch.cat((x, x[..., :pad]), -1)[..., : x.shape[-1]]


SEQUENCE_REJECTS = [
    Reject("cu_seqlens", "one element", edited("cu_seqlens", lambda x: x[:1])),
    Reject("cu_seqlens", "int64", edited("cu_seqlens", lambda x: x.long())),
    Reject("ratio", "zero", changed(ratio=0)),
    Reject("ratio", "too large", changed(ratio=65537)),
    Reject("window", "zero", changed(window=0)),
    Reject("window", "too large", changed(window=65537)),
]
SEQUENCE_BAD_VALUES = [
    Reject("cu_seqlens", "negative", with_value("cu_seqlens", -1, 0)),
    Reject("cu_seqlens", "after the tokens", with_value("cu_seqlens", 999)),
    Reject("cu_seqlens", "decreases", with_value("cu_seqlens", 1)),
]
