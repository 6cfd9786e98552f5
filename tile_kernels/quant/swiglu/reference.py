"""References of SwiGLU and its gradient, alone and with casts along rows.

A row `x` of width `2 H` holds the gate, its left half `l`, and the value, its right half `r`. With
a clamp value `c` first `l = min(l, c)` and `r = min(max(r, -c), c)`, where NaN stays NaN. Then

    act = (l / (1 + exp(-l))) * r        out = act * w

with a weight `w` for each row, in float32 and in exactly this association.
"""

from __future__ import annotations

import torch

from tile_kernels import config
from tile_kernels.quant import formats
from tile_kernels.quant.casting import dequantize, quantize
from tile_kernels.quant.gather import gather_or_zero
from tile_kernels.quant.types import QuantTensor, ScaleFlags
from tile_kernels.runtime.arithmetic import fused_multiply_add, widened


def swiglu_forward(
    x: torch.Tensor,
    pos_to_token_topk: torch.Tensor | None = None,
    topk_weights: torch.Tensor | None = None,
    swiglu_clamp_value: float | None = None,
    clamped_count: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes SwiGLU of each row, times the weight of its token and expert if there are weights.

    Args:
        x: `[E, 2 * H]`, bfloat16 or float32.
        pos_to_token_topk: `[E]`, int32 or int64: `n * K + k`, negative for weight 0; or None.
        topk_weights: `[N, K]`, float32; ignored without an index.
        swiglu_clamp_value: A clamp `c`: gates `l` are at most `c`, and values `r` are in `[-c, c]`;
            or None.
        clamped_count: `[3]`, int64, or None: the numbers of `l > c`, `r > c` and `r < -c` are
            added.

    Returns:
        `[E, H]`, float32 (float64 for float64 `x`).

    Example:
        >>> count = torch.zeros(3, dtype=torch.int64)
        >>> swiglu_forward(torch.tensor([[1.0, -2.0, 12.0, 3.0]]), None, None, 10.0, count)
        tensor([[ 7.3106, -0.7152]])
        >>> count.tolist()
        [0, 1, 0]
    """
    left, right = split_halves(widened(x))
    if swiglu_clamp_value is not None:
        if clamped_count is not None:
            add_clamped(x, x.new_ones(len(x), dtype=torch.bool), swiglu_clamp_value, clamped_count)
        left, right = clamp_halves(left, right, swiglu_clamp_value)
    act, _ = activate(left, right)
    if pos_to_token_topk is None:
        return act
    if topk_weights is None:
        raise ValueError("pos_to_token_topk is an index into topk_weights, which is None")
    return act * weights_of_rows(topk_weights, pos_to_token_topk)


def swiglu_backward(
    x: QuantTensor,
    grad_out: torch.Tensor,
    weight: torch.Tensor,
    pos_to_token_topk: torch.Tensor,
    token_topk_to_pos: torch.Tensor,
    num_per_channels: int,
    swiglu_clamp_value: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Recomputes the weighted SwiGLU of a quantized `x`, with gradients of `x` and the weights.

    Leading dimensions of `x` and `grad_out` may be more than one. A padding row is computed like
    any other with weight 0, so its results are zeros with the signs that the formulas give. A row
    belongs to a weight if each map names the other. `weight_grad` sums its float32 products in
    float64. `x_grad` is that of `swiglu_gradients`.

    Args:
        x: `([E, 2 * H], sf)`, e4m3 and float32 or int32, in blocks of `(1, num_per_channels)`.
        grad_out: `[E, H]`, bfloat16 or float32.
        weight: `[N, K]`, float32.
        pos_to_token_topk: `[E]`, int32 or int64: `n * K + k`, negative for padding.
        token_topk_to_pos: `[N, K]`, int32 or int64: the inverse, -1 for none.
        num_per_channels: Channels per scale of `x`.
        swiglu_clamp_value: The clamp of gates and values, or None.

    Returns:
        `out` `[E, H]` and `x_grad` `[E, 2 * H]`, float32; `weight_grad` `[N, K]`, dtype of
        `weight`, zero where no row belongs to the weight.

    Example:
        >>> x = torch.tensor([[1.0, 3.0]]).to(torch.float8_e4m3fn), torch.ones(1, 1)
        >>> index, inverse = torch.tensor([0]), torch.tensor([[0]])
        >>> swiglu_backward(x, torch.ones(1, 1), torch.tensor([[2.0]]), index, inverse, 2)
        (tensor([[4.3864]]), tensor([[5.5660, 1.4621]]), tensor([[2.1932]]))
    """
    if token_topk_to_pos.shape != weight.shape:
        raise ValueError(
            f"token_topk_to_pos must have the shape of weight, {tuple(weight.shape)}, got "
            f"{tuple(token_topk_to_pos.shape)}"
        )
    data, sf = x
    rows = data.flatten(0, -2), sf.flatten(0, -2)
    left, right = split_halves(dequantize(rows, (1, num_per_channels)))
    grad_out = grad_out.reshape(left.shape).float()
    weight_of_row = weights_of_rows(weight, pos_to_token_topk)
    act, grad_left, grad_right = swiglu_gradients(
        left, right, grad_out, weight_of_row, swiglu_clamp_value
    )

    grad_of_row = (grad_out * act).sum(dim=1, dtype=torch.float64).to(weight.dtype)
    weight_grad = of_weights(grad_of_row, pos_to_token_topk, token_topk_to_pos)
    x_grad = torch.cat((grad_left, grad_right), dim=1)
    return act * weight_of_row, x_grad, weight_grad


def swiglu_gradients(
    left: torch.Tensor,
    right: torch.Tensor,
    grad_out: torch.Tensor,
    weight_of_row: torch.Tensor,
    swiglu_clamp_value: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The activation without weight, and the gradients of both halves: `[E, H]` each.

    `left`, `right` and `grad_out` are `[E, H]`, `weight_of_row` is `[E, 1]`, all of one dtype,
    float32 or float64. With `s = 1 / (1 + exp(-l))` and `q = (g * w) * s`

        grad_left = (q * r) * fma(l, 1 - s, 1)        grad_right = q * l

    and `+0` where the half was clamped.

    >>> one = torch.ones(1, 1)
    >>> swiglu_gradients(one, 3 * one, one, 2 * one, None)
    (tensor([[2.1932]]), tensor([[5.5660]]), tensor([[1.4621]]))
    """
    left_clamped = right_clamped = torch.zeros_like(left, dtype=torch.bool)
    if swiglu_clamp_value is not None:
        left_clamped = left > swiglu_clamp_value
        right_clamped = right.abs() > swiglu_clamp_value
        left, right = clamp_halves(left, right, swiglu_clamp_value)
    act, denominator = activate(left, right)
    sigmoid = torch.ones_like(denominator) / denominator
    shared = grad_out * weight_of_row * sigmoid
    grad_left = shared * right * _slope(left, sigmoid)
    grad_right = shared * left
    return act, grad_left.masked_fill(left_clamped, 0.0), grad_right.masked_fill(right_clamped, 0.0)


def _slope(left: torch.Tensor, sigmoid: torch.Tensor) -> torch.Tensor:
    """`l * (1 - s) + 1` with one rounding; two in float64, for which there is no wider format."""
    if left.dtype == torch.float64:
        return left * (1 - sigmoid) + 1
    return fused_multiply_add(left, 1 - sigmoid, left.new_ones(()))


def split_halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`[E, 2 * H]` to the gate and the value, `[E, H]` each.

    >>> split_halves(torch.tensor([[1, 2, 3, 4]]))
    (tensor([[1, 2]]), tensor([[3, 4]]))
    """
    if x.shape[1] % 2 != 0:
        raise ValueError(f"x must have an even number of channels, got {tuple(x.shape)}")
    hidden = x.shape[1] // 2
    return x[:, :hidden], x[:, hidden:]


def clamp_halves(
    left: torch.Tensor, right: torch.Tensor, clamp_value: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gate bounded above, the value on both sides.

    >>> clamp_halves(torch.tensor([-9.0, 9.0]), torch.tensor([-9.0, 9.0]), 5.0)
    (tensor([-9.,  5.]), tensor([-5.,  5.]))
    """
    most = float(clamp_value)  # an integer 0 has no negative
    return left.clamp(max=most), right.clamp(-most, most)


def activate(left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`(l / d) * r` with `d = 1 + exp(-l)`, and `d`.

    >>> activate(torch.tensor([0.0, 1.0]), torch.tensor([5.0, 3.0]))
    (tensor([0.0000, 2.1932]), tensor([2.0000, 1.3679]))
    """
    denominator = 1 + torch.exp(-left)
    return left / denominator * right, denominator


def weights_of_rows(weights: torch.Tensor, pos_to_token_topk: torch.Tensor) -> torch.Tensor:
    """The weight of each row, `[E, 1]`: `weights.flatten()[pos]`, 0 where the index is negative.

    >>> weights_of_rows(torch.tensor([[0.5, 2.0]]), torch.tensor([1, -1])).tolist()
    [[2.0], [0.0]]
    """
    return gather_or_zero(weights.flatten(), pos_to_token_topk)[:, None]


def rows_in_ranges(ends: torch.Tensor, alignment: int | None, num_rows: int) -> torch.Tensor:
    """Which rows belong to an expert: `[align(ends[e - 1], alignment), ends[e])`, from 0 on.

    The alignment is by default that of `config.get_token_alignment`.

    >>> rows_in_ranges(torch.tensor([2, 4, 5]), 4, 6).tolist()
    [True, True, False, False, True, False]
    """
    if alignment is None:
        alignment = config.get_token_alignment()
    row = torch.arange(num_rows, device=ends.device)
    expert = torch.searchsorted(ends.long(), row, right=True)
    aligned = (ends.long() + alignment - 1) // alignment * alignment
    starts = torch.cat((aligned.new_zeros(1), aligned))
    return (expert < len(ends)) & (row >= starts[expert])


def rows_and_weights(
    num_rows: int,
    psum_num_tokens_per_expert: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    routed_scaling_factor: float | None,
    alignment: int | None,
    pos_to_token_topk: torch.Tensor | None,
    like: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which rows exist, bool `[N]`, and their weight times the factor, `[N, 1]`; 1 without weights.

    >>> rows_and_weights(2, None, torch.tensor([3.0, 4.0]), 0.5, 1, None, torch.zeros(1))
    (tensor([True, True]), tensor([[1.5000],
            [2.0000]]))
    """
    exists = torch.ones(num_rows, dtype=torch.bool, device=like.device)
    if pos_to_token_topk is not None and topk_weights is not None:
        exists = (pos_to_token_topk >= 0) & (pos_to_token_topk < topk_weights.numel())
        index = pos_to_token_topk.masked_fill(~exists, -1)
        topk_weights = gather_or_zero(topk_weights.flatten(), index)
    elif psum_num_tokens_per_expert is not None:
        exists = rows_in_ranges(psum_num_tokens_per_expert, alignment, num_rows)
    if topk_weights is None:
        return exists, like.new_ones(num_rows, 1, dtype=torch.float32)
    return exists, (topk_weights * _factor(routed_scaling_factor, like))[:, None]


def _factor(routed_scaling_factor: float | None, like: torch.Tensor) -> torch.Tensor:
    """The factor of all weights as a float32 tensor, 1 by default."""
    factor = 1.0 if routed_scaling_factor is None else routed_scaling_factor
    return torch.tensor(factor, dtype=torch.float32, device=like.device)


_OUT_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def swiglu_rows_forward(
    x: torch.Tensor,
    fmt: str,
    psum_num_tokens_per_expert: torch.Tensor | None = None,
    topk_weights: torch.Tensor | None = None,
    routed_scaling_factor: float | None = None,
    clamp_value: float | None = None,
    clamped_count: torch.Tensor | None = None,
    *,
    alignment: int | None = None,
    pos_to_token_topk: torch.Tensor | None = None,
    fill_padding: bool = True,  # noqa: ARG001
) -> torch.Tensor:
    """SwiGLU of the rows that exist, times their weights, rounded once; zeros elsewhere.

    `fill_padding` allows other implementations to leave out those zeros.

    >>> swiglu_rows_forward(torch.tensor([[1.0, 3.0]]), "fp32", None, torch.tensor([2.0]))
    tensor([[4.3864]])
    """
    exists, weight = rows_and_weights(
        len(x), psum_num_tokens_per_expert, topk_weights, routed_scaling_factor, alignment,
        pos_to_token_topk, x,
    )  # fmt: skip
    act = swiglu_forward(x, None, None, clamp_value)
    if topk_weights is not None:
        act = act * weight
    if clamped_count is not None and clamp_value is not None:
        add_clamped(x, exists, clamp_value, clamped_count)
    return act.masked_fill(~exists[:, None], 0.0).to(_OUT_DTYPES[fmt])


def add_clamped(
    x: torch.Tensor, exists: torch.Tensor, clamp_value: float, clamped_count: torch.Tensor
) -> None:
    """Adds how many elements `clamp_halves` changes in rows that exist: `l > c`, `r > c`, `r < -c`.

    Where there is a fourth number, the elements of these rows are added to it.

    >>> count, x = torch.zeros(4, dtype=torch.int64), torch.tensor([[9.0, -9.0], [9.0, 9.0]])
    >>> add_clamped(x, torch.tensor([True, False]), 5.0, count)
    >>> count.tolist()
    [1, 0, 1, 1]
    """
    left, right = split_halves(widened(x))
    valid = exists[:, None]
    clamped = left > clamp_value, right > clamp_value, right < -clamp_value
    counts = [(each & valid).sum() for each in clamped]
    if len(clamped_count) == 4:
        counts.append(exists.sum() * left.shape[1])
    clamped_count += torch.stack(counts)


def swiglu_rows_gradients(
    x: torch.Tensor,
    act_x_grad: torch.Tensor,
    fmt: str,
    psum_num_tokens_per_expert: torch.Tensor | None = None,
    topk_weights: torch.Tensor | None = None,
    routed_scaling_factor: float | None = None,
    clamp_value: float | None = None,
    do_recompute: bool = False,
    alignment: int | None = None,
    pos_to_token_topk: torch.Tensor | None = None,
    token_topk_to_pos: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of `x` and of the weights, and the result of `swiglu_rows_forward` again.

    What was not asked for has no elements. Rows that do not exist are zeros. The gradient of a
    weight sums its float32 products in float64, then is rounded and multiplied by the factor.

    >>> x, g = torch.tensor([[1.0, 3.0]]), torch.ones(1, 1)
    >>> swiglu_rows_gradients(x, g, "fp32", None, torch.tensor([2.0]), do_recompute=True)
    (tensor([[5.5660, 1.4621]]), tensor([2.1932]), tensor([[4.3864]]))
    """
    exists, weight = rows_and_weights(
        len(x), psum_num_tokens_per_expert, topk_weights, routed_scaling_factor, alignment,
        pos_to_token_topk, x,
    )  # fmt: skip
    dtype = _OUT_DTYPES[fmt]
    left, right = split_halves(x.float())
    grad_out = act_x_grad.float()
    act, *grads = swiglu_gradients(left, right, grad_out, weight, clamp_value)
    absent = ~exists[:, None]
    x_grad = torch.cat(grads, dim=1).masked_fill(absent, 0.0).to(dtype)
    out = x_grad.new_empty(0, act.shape[1])
    if do_recompute:
        out = (act * weight).masked_fill(absent, 0.0).to(dtype)
    if topk_weights is None:
        return x_grad, x_grad.new_empty(0, dtype=torch.float32), out
    products = (grad_out * act).masked_fill(absent, 0.0)
    grad_of_row = products.sum(dim=1, dtype=torch.float64).float()
    grad_of_row = grad_of_row * _factor(routed_scaling_factor, x)
    if pos_to_token_topk is None or token_topk_to_pos is None:
        return x_grad, grad_of_row, out
    weight_grad = of_weights(grad_of_row, pos_to_token_topk, token_topk_to_pos)
    return x_grad, weight_grad, out


def swiglu_rows_backward(
    x: torch.Tensor,
    act_x_grad: torch.Tensor,
    fmt: str,
    psum_num_tokens_per_expert: torch.Tensor | None = None,
    topk_weights: torch.Tensor | None = None,
    routed_scaling_factor: float | None = None,
    clamp_value: float | None = None,
    do_recompute: bool = False,
    *,
    alignment: int | None = None,
    pos_to_token_topk: torch.Tensor | None = None,
    token_topk_to_pos: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """The results of `swiglu_rows_gradients` that were asked for.

    >>> swiglu_rows_backward(torch.tensor([[1.0, 3.0]]), torch.ones(1, 1), "fp32")
    (tensor([[2.7830, 0.7311]]),)
    """
    x_grad, weight_grad, act = swiglu_rows_gradients(
        x, act_x_grad, fmt, psum_num_tokens_per_expert, topk_weights, routed_scaling_factor,
        clamp_value, do_recompute, alignment, pos_to_token_topk, token_topk_to_pos,
    )  # fmt: skip
    weights = () if topk_weights is None else (weight_grad,)
    return (x_grad, *weights, *((act,) if do_recompute else ()))


def of_weights(
    grad_of_row: torch.Tensor, pos_to_token_topk: torch.Tensor, token_topk_to_pos: torch.Tensor
) -> torch.Tensor:
    """The values of rows at the weights that they belong to: where each map names the other.

    >>> index, inverse = torch.tensor([1, -1]), torch.tensor([[-1, 0]])
    >>> of_weights(torch.tensor([5.0, 7.0]), index, inverse)
    tensor([[0., 5.]])
    """
    row = token_topk_to_pos.flatten().long()
    row = row.masked_fill(row >= grad_of_row.shape[0], -1)
    place = torch.arange(row.numel(), device=row.device)
    mutual = gather_or_zero(pos_to_token_topk, row) == place
    picked = gather_or_zero(grad_of_row, row.masked_fill(~mutual, -1))
    return picked.view(token_topk_to_pos.shape)


def swiglu_forward_and_per_token_cast(
    x: torch.Tensor,
    fmt: str,
    num_per_channels: int,
    pos_to_token_topk: torch.Tensor | None = None,
    topk_weights: torch.Tensor | None = None,
    pos_to_expert: torch.Tensor | None = None,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    swiglu_clamp_value: float | None = None,
    clamped_count: torch.Tensor | None = None,
    sf_clamp_min: float | None = None,
    *,
    psum_num_tokens_per_expert: torch.Tensor | None = None,
    routed_scaling_factor: float | None = None,
    alignment: int | None = None,
    fill_padding: bool = True,  # noqa: ARG001
    amax_min: float | None = None,
) -> QuantTensor:
    """`swiglu_forward`, and its float32 result to e4m3 in blocks of `(1, num_per_channels)`.

    Rows whose `pos_to_expert` is negative, or outside of the ranges of experts, are padding: they
    are not read and not counted, and their data and scale factors are zero (`fill_padding` allows
    other implementations to leave out the zeros of data). `topk_weights` `[E]` are those of the
    rows; `routed_scaling_factor` multiplies weights. `sf_clamp_min`, or `amax_min`, replaces
    `1e-4`, the least magnitude that a block's scale factor is made from.

    >>> x = torch.tensor([[1.0, -2.0, 12.0, 3.0], [1.0, 1.0, 1.0, 1.0]])
    >>> expert = torch.tensor([3, -1])
    >>> data, sf = swiglu_forward_and_per_token_cast(
    ...     x, "e4m3", 2, pos_to_expert=expert, round_sf=True
    ... )
    >>> data.float().tolist(), sf.tolist()
    ([[288.0, -22.0], [0.0, 0.0]], [[0.03125], [0.0]])
    """
    if fmt != formats.E4M3.name:
        raise ValueError(f"fmt must be 'e4m3', got {fmt!r}")
    flags = ScaleFlags(round_sf, use_tma_aligned_col_major_sf, use_packed_ue8m0)
    exists = torch.ones(x.shape[0], dtype=torch.bool, device=x.device)
    if pos_to_expert is not None:
        exists = pos_to_expert >= 0
    elif psum_num_tokens_per_expert is not None:
        exists = rows_in_ranges(psum_num_tokens_per_expert, alignment, x.shape[0])
    if swiglu_clamp_value is not None and clamped_count is not None:
        add_clamped(x, exists, swiglu_clamp_value, clamped_count)
    out = swiglu_forward(x, None, None, swiglu_clamp_value)
    scale = _factor(routed_scaling_factor, x)
    if topk_weights is not None and topk_weights.dim() == 1:
        out = out * (topk_weights * scale)[:, None]
    elif topk_weights is not None and pos_to_token_topk is not None:
        out = out * (weights_of_rows(topk_weights, pos_to_token_topk) * scale)
    out = out.masked_fill(~exists[:, None], 0.0)
    least = sf_clamp_min if amax_min is None else amax_min
    data, sf = quantize(out, formats.E4M3, (1, num_per_channels), flags, least)
    return data, sf.masked_fill_(~exists[:, None], 0)


def swiglu_backward_and_per_token_cast(
    x: QuantTensor,
    grad_out: torch.Tensor,
    weight: torch.Tensor | None,
    pos_to_token_topk: torch.Tensor | None,
    token_topk_to_pos: torch.Tensor | None,
    num_per_channels: int,
    round_sf: bool = False,
    swiglu_clamp_value: float | None = None,
    *,
    use_tma_aligned_col_major_sf: bool = False,
    use_packed_ue8m0: bool = False,
    psum_num_tokens_per_expert: torch.Tensor | None = None,
    routed_scaling_factor: float | None = None,
    alignment: int | None = None,
    do_recompute: bool = True,
    amax_min: float | None = None,
) -> tuple[torch.Tensor, QuantTensor, torch.Tensor, torch.Tensor]:
    """`swiglu_backward`, and its `x_grad` also to e4m3 in blocks of `(1, num_per_channels)`.

    Returns `(out, (x_grad_e4m3, x_grad_sf), x_grad, weight_grad)`, where `out` and `x_grad` are
    rounded to bfloat16; the e4m3 gradient is made from the float32 one. Without an index it is
    `swiglu_rows_backward` with weights `[E]`, or None: rows that do not exist have scale factors 0.

    >>> x = torch.tensor([[1.0, 3.0]]).to(torch.float8_e4m3fn), torch.ones(1, 2)
    >>> index, inverse = torch.tensor([0]), torch.tensor([[0]])
    >>> weight = torch.tensor([[2.0]])
    >>> out, (data, sf), x_grad, weight_grad = swiglu_backward_and_per_token_cast(
    ...     x, torch.ones(1, 1), weight, index, inverse, 1, round_sf=True
    ... )
    >>> out.tolist(), (data.float() * sf).tolist(), x_grad.tolist()
    ([[4.375]], [[5.5, 1.5]], [[5.5625, 1.4609375]])
    """
    flags = ScaleFlags(round_sf, use_tma_aligned_col_major_sf, use_packed_ue8m0)
    block = (1, num_per_channels)
    if pos_to_token_topk is not None and token_topk_to_pos is not None and weight is not None:
        maps = pos_to_token_topk, token_topk_to_pos
        out, x_grad, weight_grad = swiglu_backward(
            x, grad_out, weight, *maps, num_per_channels, swiglu_clamp_value
        )
        quantized = quantize(x_grad, formats.E4M3, block, flags, amax_min)
    else:
        rows = dequantize((x[0].flatten(0, -2), x[1].flatten(0, -2)), block)
        x_grad, weight_grad, out = swiglu_rows_gradients(
            rows, grad_out.flatten(0, -2), "fp32", psum_num_tokens_per_expert, weight,
            routed_scaling_factor, swiglu_clamp_value, True, alignment,
        )  # fmt: skip
        data, sf = quantize(x_grad, formats.E4M3, block, flags, amax_min)
        if psum_num_tokens_per_expert is not None:
            exists = rows_in_ranges(psum_num_tokens_per_expert, alignment, rows.shape[0])
            sf.masked_fill_(~exists[:, None], 0)
        quantized = data, sf
    out = out.bfloat16() if do_recompute else out.new_empty((0, out.shape[1])).bfloat16()
    return out, quantized, x_grad.bfloat16(), weight_grad
