"""`fake_cast`: what remains of values after a cast, for training with quantization."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tile_kernels.quant import layout
from tile_kernels.quant.fake import reference
from tile_kernels.quant.per_token.op import check_e4m3_groups, check_plain_cast, launch_cast
from tile_kernels.quant.storage import E4M3_ROW, FAKE, ROW
from tile_kernels.runtime import checks
from tile_kernels.runtime.autograd import no_gradient_message
from tile_kernels.runtime.cases import Cost
from tile_kernels.runtime.declaration import Launch, Out, Spec


class Arguments(NamedTuple):
    x: Tensor
    fmt: str
    num_per_channels: int
    round_sf: bool
    use_e4m3_sf: bool
    global_sf: Tensor | None
    amax_min: float

    def check(self) -> None:
        check_plain_cast(self.x, self.fmt, self.num_per_channels)
        checks.boolean("round_sf", self.round_sf)
        check_e4m3_groups(self)
        layout.check_amax_min(self.amax_min, self.fmt)

    def outputs(self) -> Out:
        return Out("out", self.x.shape, self.x.dtype)

    def launches(self, out: Spec) -> Launch | None:
        return launch_cast(
            self.x, self.fmt, self.num_per_channels, FAKE, out, None, round_sf=self.round_sf,
            scale_layout=E4M3_ROW if self.use_e4m3_sf else ROW, global_sf=self.global_sf,
            amax_min=self.amax_min,
        )  # fmt: skip


def cost(x: Tensor, **_: Any) -> Cost:
    return Cost(bytes=2 * layout.bytes_of(x))


def _backward(_: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return grad, None, None, None, None, None, None


def _by_fields(*fields: Any) -> Tensor:
    return reference.fake_cast(**Arguments(*fields)._asdict())


# Every value of a group is read before one of them is written, so that `out` may be `x`.
FAKE_CAST = layout.cast_operator(
    reference.fake_cast, Arguments, cost, by_fields=_by_fields, backward=_backward, in_place=("x",)
)


@FAKE_CAST.public(reference=reference.fake_cast)
def fake_cast(
    x: Tensor,
    fmt: str,
    num_per_channels: int,
    round_sf: bool = False,
    out: Tensor | None = None,
    *,
    use_e4m3_sf: bool = False,
    global_sf: Tensor | float | None = None,
    amax_min: float | None = None,
) -> Tensor:
    """Casts rows to a format and back in one pass; the gradient ignores the rounding.

    The result equals `per_token_cast` followed by `per_token_cast_back`, bit for bit, without
    storing the quantized tensor. The gradient with respect to `x` is the identity (a
    straight-through estimator), as usual in quantization-aware training. The remarks of
    `per_token_cast` on e5m6 below `2**-14` and on the largest finite float32 apply here too.

    Args:
        x: `[num_tokens, hidden]`, bfloat16 or float32, any row stride.
        fmt: `"e4m3"`, `"e2m1"` or `"e5m6"`, which has one scale per row.
        num_per_channels: Channels of a scale: 16, 32, 64, 128, or `hidden`.
        round_sf: Takes the next power of two as scale.
        out: A buffer for the result that is filled and returned, without a gradient. It may be `x`
            itself.
        use_e4m3_sf, global_sf, amax_min: As in `per_token_cast`.

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
    return FAKE_CAST(
        x, fmt, num_per_channels, round_sf, use_e4m3_sf,
        layout.as_scalar(global_sf, x, torch.float32),
        layout.least_amax(fmt, use_e4m3_sf, amax_min), out=out,
    )  # fmt: skip


@checks.named_errors
def per_token_cast_and_cast_back(
    x: Tensor,
    fmt: str,
    num_per_channels: int,
    round_sf: bool = False,
    use_e4m3_sf: bool = False,
    *,
    global_sf: Tensor | float | None = None,
    amax_min: float | None = None,
) -> None:
    """`fake_cast` in place: `x` becomes what remains of it after a cast.

    Args:
        x: As in `fake_cast`; written. One whose rows are not contiguous goes through a buffer.
        fmt, num_per_channels, round_sf, use_e4m3_sf, global_sf, amax_min: As in `fake_cast`.

    Raises:
        TypeError: If a dtype or the kind of an argument differs.
        ValueError: If a shape, a layout or a value is not one of these.
        RuntimeError: If a gradient would be lost: `fake_cast` has one.

    Example:
        >>> import torch
        >>> x = torch.tensor([[1.0, -2.0, 3.3, 7.0]])
        >>> per_token_cast_and_cast_back(x, "e4m3", 4)
        >>> x.tolist()
        [[1.0, -2.0, 3.25, 7.0]]
    """
    options = {"use_e4m3_sf": use_e4m3_sf, "global_sf": global_sf, "amax_min": amax_min}
    is_tensor = isinstance(x, Tensor)
    if is_tensor and torch.is_grad_enabled() and x.requires_grad:
        raise RuntimeError(
            no_gradient_message("per_token_cast_and_cast_back", "tile_kernels.quant.fake_cast")
        )
    if is_tensor and not x.is_contiguous():
        x.copy_(fake_cast(x, fmt, num_per_channels, round_sf, **options))  # type: ignore[arg-type]
    else:
        fake_cast(x, fmt, num_per_channels, round_sf, x, **options)  # type: ignore[arg-type]
