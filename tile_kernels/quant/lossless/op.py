"""`per_block_cast_lossless`: from e2m1 to e4m3 in larger blocks, without loss."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tile_kernels.quant import layout, scales
from tile_kernels.quant.lossless import reference
from tile_kernels.quant.lossless.plan import MAX_CHANNELS, MAX_RATIO, plan
from tile_kernels.quant.storage import is_packed
from tile_kernels.quant.types import QuantTensor
from tile_kernels.runtime import checks
from tile_kernels.runtime.cases import Cost
from tile_kernels.runtime.declaration import Launch, Out, Spec, row_alignment
from tile_kernels.runtime.launch import Kernel

_CAST_LOSSLESS = Kernel("tile_kernels.quant.lossless.kernel", "cast_lossless", plan)


class Arguments(NamedTuple):
    x: Tensor
    x_sf: Tensor
    fmt: str
    x_block_size: list[int]
    out_block_size: list[int]
    use_tma_aligned_col_major_sf: bool
    round_sf: bool
    use_packed_ue8m0: bool

    def check(self) -> None:
        layout.check_pair(self.x, self.x_sf)
        checks.one_of("fmt", self.fmt, ("e4m3",))
        layout.check_flags(self, rounded=True)
        checks.tensor("x", self.x, ("num_tokens", "hidden / 2"), torch.int8, unit_inner_stride=True)
        if self.x.shape[1] == 0:
            raise ValueError("x must have at least two channels, got 0")
        block, out_block = self.x_block_size, self.out_block_size
        layout.check_block("x_block_size", block)
        layout.check_block("out_block_size", out_block)
        channels = out_block[1]
        if out_block[0] % block[0] or channels % block[1]:
            raise ValueError(
                f"out_block_size must be a multiple of x_block_size, {tuple(block)}, in both "
                f"dimensions, got {tuple(out_block)}"
            )
        if channels & (channels - 1) or not 2 <= channels <= MAX_CHANNELS:
            raise ValueError(
                f"out_block_size must have a power of two of channels, 2 to {MAX_CHANNELS}, got "
                f"{tuple(out_block)}"
            )
        layout.check_source_scales(self.x, self.x_sf, block)

    def outputs(self) -> tuple[Out, Out]:
        shape = (self.x.shape[0], 2 * self.x.shape[1])
        return layout.cast_outs(self, self.fmt, shape, self.out_block_size)

    def launches(self, out: Spec, out_sf: Spec) -> Launch | None:
        x: Any = self.x
        if x.numel() == 0:
            return None
        width, alignment, out_alignment = 2 * x.shape[1], row_alignment(x), row_alignment(out)
        # Eight values share a word of x, and a scale.
        words = not (width % 8 or self.x_block_size[1] % 8 or alignment % 4 or out_alignment % 8)
        scale_layout = layout.layout_of(self)
        problem = (
            width, tuple(self.x_block_size), self.x_sf.dtype == torch.int32,
            tuple(self.out_block_size), scale_layout, words, alignment, out_alignment,
        )  # fmt: skip
        arguments = (
            x.view(torch.uint32 if words else torch.uint8),
            self.x_sf,
            out.view(torch.uint32) if words else out,
            out_sf.view(torch.uint8) if is_packed(scale_layout) else out_sf,
        )
        return Launch(_CAST_LOSSLESS, problem, arguments)

    def check_values(self) -> None:
        """No scale in a block of the result is more than 2**11 times another one."""
        block, out_block = self.x_block_size, self.out_block_size
        rows, groups = scales.num_blocks((self.x.shape[0], 2 * self.x.shape[1]), block)
        ratio = out_block[0] // block[0], out_block[1] // block[1]
        exponents = scales.read_exponents(self.x_sf)[:rows, :groups].int()
        largest = scales.block_max(exponents, ratio)
        below = scales.expand_blocks(largest, ratio, exponents.shape) - exponents
        bad = below > MAX_RATIO
        if bad.any():
            where = bad.nonzero()[0].tolist()
            raise ValueError(
                f"x_sf must vary by at most 2**{MAX_RATIO} within a block of the result, but "
                f"element {where} is 2**-{below[tuple(where)].item()} of the largest"
            )


def cost(
    x: QuantTensor,
    fmt: str,
    out_block_size: tuple[int, int],
    use_packed_ue8m0: bool = False,
    **_: Any,
) -> Cost:
    shape = (x[0].shape[0], 2 * x[0].shape[1])
    return layout.cast_cost(x, fmt, shape, out_block_size, use_packed_ue8m0)


PER_BLOCK_CAST_LOSSLESS = layout.cast_operator(reference.per_block_cast_lossless, Arguments, cost)


@PER_BLOCK_CAST_LOSSLESS.public(reference=reference.per_block_cast_lossless)
def per_block_cast_lossless(
    x: QuantTensor,
    fmt: str,
    x_block_size: tuple[int, int],
    out_block_size: tuple[int, int],
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    out: QuantTensor | None = None,
) -> QuantTensor:
    """Converts e2m1 to e4m3 in larger blocks without changing any value.

    Scales of `x` are powers of two; of others only the exponent counts. With their biased exponents
    `e_in`, that of an output block is `e_out = max(max(e_in) - 6, 1)`, and an element becomes
    `e4m3(value * 2**(e_in - e_out))`. That is exact if no scale in the block is more than `2**11`
    times another one. Beyond that, the smaller elements are rounded to nearest, and the checked
    mode (`tile_kernels.checked`) raises. A scale of zero makes zeros. Not differentiable.

    Args:
        x: `(data, scales)`. The data are `[num_tokens, hidden / 2]` int8 that hold two e2m1 each,
            of any row stride. The scales are `[ceil(num_tokens / rows), channel_blocks]` float32,
            with `channel_blocks = ceil(hidden / channels)`, or `[.., ceil(channel_blocks / 4)]`
            int32 that hold four exponents each, of any strides.
        fmt: `"e4m3"`.
        x_block_size: `(rows, channels)` of a scale of `x`.
        out_block_size: `(rows, channels)` of a scale of the result: multiples of those of `x`, the
            channels a power of two from 2 to 4096.
        use_tma_aligned_col_major_sf: As in `per_token_cast`.
        round_sf: Has no effect.
        use_packed_ue8m0: As in `per_token_cast`, but without `round_sf`.
        out: Buffers `(data, scales)` that are filled and returned.

    Returns:
        `(data, scales)`. The data are `[num_tokens, hidden]` float8_e4m3fn. The scales are laid out
        as those of `per_block_cast`, and are powers of two.

    Raises:
        TypeError: If a dtype or the kind of an argument differs; `x_sf` names the scales of `x`.
        ValueError: If a shape, a layout or a value is not one of these; in the checked mode also if
            scales are too far apart.

    Example:
        >>> x = torch.tensor([[0x21, 0x43]], dtype=torch.int8), torch.tensor([[1.0, 0.25]])
        >>> data, scales = per_block_cast_lossless(x, "e4m3", (1, 2), (1, 4))
        >>> data.float().tolist(), scales.tolist()
        ([[32.0, 64.0, 24.0, 32.0]], [[0.015625]])
    """
    data, sf = layout.pair(x)
    return PER_BLOCK_CAST_LOSSLESS(
        data, sf, fmt, x_block_size, out_block_size, use_tma_aligned_col_major_sf, round_sf,
        use_packed_ue8m0, out=out,
    )  # fmt: skip
