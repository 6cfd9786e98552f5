"""Fake quantisation: what remains of values after a cast, for training that knows of it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tile_kernels.quant import layout
from tile_kernels.quant.cases.fake import FAKE_CAST
from tile_kernels.quant.tokens import check_plain_cast, launch
from tile_kernels.runtime import checks
from tile_kernels.runtime.cases import Cost
from tile_kernels.runtime.launch import nonempty
from tile_kernels.runtime.op import gradient, op
from tile_kernels.runtime.outputs import output
from tile_kernels.torch import quant as oracles


def _check(x: Tensor, fmt: str, num_per_channels: int, round_sf: bool = False) -> None:
    check_plain_cast(x, fmt, num_per_channels)
    checks.boolean("round_sf", round_sf)


@op(
    check=_check,
    oracle=oracles.fake_cast,
    cost=lambda x, **_: Cost(bytes=2 * x.numel() * x.element_size()),
    cases=FAKE_CAST,
    outputs=("out",),
)
def fake_cast(
    x: Tensor, fmt: str, num_per_channels: int, round_sf: bool = False, out: Tensor | None = None
) -> Tensor:
    """Cast rows to a format and back in one pass; the gradient passes straight through.

    | argument | shape | dtype |
    |---|---|---|
    | `x` | `[num_tokens, hidden]`, any row stride | bfloat16, float32 |
    | `fmt` | | `e4m3`, `e2m1`, `e5m6` (one scale per row) |
    | `num_per_channels` | | 16, 32, 64, 128, or `hidden`: channels of a scale |
    | `out` | as returned; filled and returned, without a gradient | |
    | returns | `[num_tokens, hidden]`, contiguous | as `x` |

    The result is that of `per_token_cast` and `per_token_cast_back`, bit for bit, without the
    quantised tensor in between. Its gradient with respect to `x` is the identity, as
    quantisation-aware training wants it: rounding has no useful derivative. What `per_token_cast`
    says of e5m6 below `2**-14`, and of the largest finite float32, holds here.

    Raises `TypeError` or `ValueError` with the argument's name.

    >>> import torch
    >>> fake_cast(torch.tensor([[1.0, -2.0, 3.3, 7.0]]), "e4m3", 4).tolist()
    [[1.0, -2.0, 3.25, 7.0]]
    """
    out = output("out", out, x, tuple(x.shape))
    if nonempty(x):
        args = ((0, 0), layout.ROW, round_sf, "fake", out, None)
        launch(x, None, fmt, num_per_channels, *args)
    return out


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # noqa: ARG001
    return grad, None, None, None


gradient(fake_cast, _backward, setup_context=lambda ctx, inputs, output: None)  # noqa: ARG005
