"""`fake_cast`: what remains of values after a cast, for training with quantization."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from tile_kernels.quant.fake import reference
from tile_kernels.quant.per_token.op import check_plain_cast, launch_cast
from tile_kernels.quant.storage import FAKE, ROW
from tile_kernels.runtime import checks
from tile_kernels.runtime.cases import Cost
from tile_kernels.runtime.declaration import Launch, Out, Spec
from tile_kernels.runtime.operator import Operator


class Arguments(NamedTuple):
    x: Tensor
    fmt: str
    num_per_channels: int
    round_sf: bool

    def check(self) -> None:
        check_plain_cast(self.x, self.fmt, self.num_per_channels)
        checks.boolean("round_sf", self.round_sf)

    def outputs(self) -> Out:
        return Out("out", self.x.shape, self.x.dtype)

    def launches(self, out: Spec) -> Launch | None:
        if self.x.numel() == 0:
            return None
        return launch_cast(
            self.x,
            None,
            self.fmt,
            self.num_per_channels,
            (0, 0),
            ROW,
            self.round_sf,
            FAKE,
            out,
            None,
        )


def cost(x: Tensor, **_: Any) -> Cost:
    return Cost(bytes=2 * x.numel() * x.element_size())


def _backward(_: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    return grad, None, None, None


FAKE_CAST = Operator(
    "quant.fake_cast",
    Arguments,
    reference=reference.fake_cast,
    cost=cost,
    dynamic={"x": 1},
    out=("out",),
    backward=_backward,
)


@FAKE_CAST.public()
def fake_cast(
    x: Tensor, fmt: str, num_per_channels: int, round_sf: bool = False, out: Tensor | None = None
) -> Tensor:
    """Casts rows to a format and back in one pass; the gradient passes straight through.

    The result is that of `per_token_cast` and `per_token_cast_back`, bit for bit, without the
    quantized tensor in between. Its gradient with respect to `x` is the identity, as
    quantization-aware training wants it: rounding has no useful derivative. What `per_token_cast`
    says of e5m6 below `2**-14`, and of the largest finite float32, holds here.

    Args:
        x: `[num_tokens, hidden]`, bfloat16 or float32, any row stride.
        fmt: `"e4m3"`, `"e2m1"` or `"e5m6"`, which has one scale per row.
        num_per_channels: Channels of a scale: 16, 32, 64, 128, or `hidden`.
        round_sf: Takes the next power of two as scale.
        out: A buffer for the result that is filled and returned, without a gradient.

    Returns:
        `[num_tokens, hidden]`, dtype of `x`, contiguous.

    Raises:
        TypeError: If a dtype or the kind of an argument differs.
        ValueError: If a shape, a layout or a value is not one of these.

    Example:
        >>> import torch
        >>> fake_cast(torch.tensor([[1.0, -2.0, 3.3, 7.0]]), "e4m3", 4).tolist()
        [[1.0, -2.0, 3.25, 7.0]]
    """
    return FAKE_CAST(x, fmt, num_per_channels, round_sf, out=out)
