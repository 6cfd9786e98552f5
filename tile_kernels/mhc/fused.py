"""Several steps of a sublayer at once: what comes before it, and residuals computed again."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tile_kernels.mhc import shapes
from tile_kernels.mhc.cases.fused import MHC_MULTILAYER_RECOMPUTE, MHC_PRE_BIG_FUSE, MHC_PRE_FWD
from tile_kernels.mhc.mixes import check_parameter, mhc_pre_split_mixes_bwd
from tile_kernels.mhc.projection import check_inputs, mhc_norm_fn_bwd, project
from tile_kernels.mhc.read import mhc_pre_apply_mix_bwd
from tile_kernels.mhc.sinkhorn import check_steps, is_near, sinkhorn_normalize_bwd
from tile_kernels.runtime import checks
from tile_kernels.runtime.cases import Cost, tensors_in
from tile_kernels.runtime.launch import Kernel, nonempty
from tile_kernels.runtime.op import gradient, op
from tile_kernels.torch import mhc as oracles
from tile_kernels.torch.mhc_projection import mhc_norm_fn_fwd

LAYERS = 10  # of a launch

_READ = Kernel("tile_kernels.mhc.kernels.fused", "read_from_products")
_RECOMPUTE = Kernel("tile_kernels.mhc.kernels.fused", "recompute")

Pre = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


# ---- from the residual to the input of a sublayer -----------------------------------------------


def _check_big_fuse(
    residual: Tensor,
    fn: Tensor,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    rms_eps: float,
    mhc_pre_eps: float,
    mhc_sinkhorn_eps: float,
    mhc_post_mult_value: float,
    sinkhorn_repeat: int,
    n_splits: int = 16,
) -> None:
    check_inputs(residual, fn, rms_eps, name="rms_eps")
    m = residual.shape[-2]
    count = m * (m + 2)
    if fn.shape[0] != count:
        raise ValueError(f"fn must have {count} rows for {m} streams, got {fn.shape[0]}")
    check_parameter("mhc_scale", mhc_scale, 3)
    check_parameter("mhc_base", mhc_base, count)
    checks.epsilon("mhc_pre_eps", mhc_pre_eps)
    checks.number("mhc_post_mult_value", mhc_post_mult_value)
    check_steps(sinkhorn_repeat, mhc_sinkhorn_eps, "sinkhorn_repeat", "mhc_sinkhorn_eps")
    checks.integer("n_splits", n_splits, 1)


def _oracle_pre(
    residual: Tensor,
    fn: Tensor,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    rms_eps: float,
    mhc_pre_eps: float,
    mhc_sinkhorn_eps: float,
    mhc_post_mult_value: float,
    sinkhorn_repeat: int,
) -> Pre:
    mixes, mul, s = mhc_norm_fn_fwd(residual, fn, rms_eps)
    pre, post, logits = oracles.mhc_pre_split_mixes(
        mixes, mhc_scale, mhc_base, residual.shape[-2], mhc_post_mult_value, mhc_pre_eps
    )
    comb = oracles.sinkhorn_normalize(logits, sinkhorn_repeat, mhc_sinkhorn_eps)
    return oracles.mhc_pre_apply_mix(residual, pre), post, comb, pre, mixes, mul, s, logits


def _oracle_big_fuse(
    *given: Any,
    n_splits: int = 16,  # noqa: ARG001
    **named: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    layer_input, post, comb, *_ = _oracle_pre(*given[:9], **named)
    return post, comb, layer_input


def _cost_big_fuse(residual: Tensor, fn: Tensor, **_: Any) -> Cost:
    m = residual.shape[-2]
    tokens = residual.numel() // fn.shape[1]
    return Cost(
        2 * residual.numel()
        + 4 * fn.numel()
        + 2 * residual.numel() // m
        + 4 * tokens * m * (m + 1),
        2 * residual.numel() * (fn.shape[0] + 2),
    )


def _cost_pre(residual: Tensor, fn: Tensor, **_: Any) -> Cost:
    m = residual.shape[-2]
    tokens = residual.numel() // fn.shape[1]
    least = _cost_big_fuse(residual, fn)
    return Cost(least.bytes + 4 * tokens * (2 * fn.shape[0] + 1 + m * (m + 1)), least.flops)


def _launch_pre(
    residual: Tensor,
    fn: Tensor,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    rms_eps: float,
    mhc_pre_eps: float,
    mhc_sinkhorn_eps: float,
    mhc_post_mult_value: float,
    sinkhorn_repeat: int,
    saved: tuple[Tensor, ...] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Layer input, `post` and `comb`; into `saved`, if given, what the gradients need."""
    *leading, m, h = residual.shape
    post = fn.new_empty((*leading, m, 1))
    comb = fn.new_empty((*leading, m, m))
    out = residual.new_empty((*leading, h))
    if nonempty(residual):
        rows, to = shapes.rows(residual, m, h), shapes.rows(out, 1, h)
        aligned, near = shapes.common_alignment(rows, to), is_near(mhc_sinkhorn_eps)
        kept: Sequence[Tensor | None] = (None,) * 5
        if saved is not None:
            pre, mixes, products, norms, logits = saved
            kept = (
                shapes.rows(mixes, m * (m + 2)), shapes.rows(products, m * (m + 2)),
                norms.view(-1), shapes.rows(pre, m), shapes.rows(logits, m, m),
            )  # fmt: skip
        mul, squares = project(residual, fn)
        splits, num_tokens, padded = mul.shape
        _READ.launch(
            (m, h, num_tokens, aligned, padded, splits, near, saved is not None),
            rows, mul, squares, mhc_scale, mhc_base, shapes.rows(post, m), shapes.rows(comb, m, m),
            to, *kept, float(rms_eps), float(mhc_pre_eps), float(mhc_sinkhorn_eps),
            float(mhc_post_mult_value), sinkhorn_repeat,
        )  # fmt: skip
    return out, post, comb


@op(
    check=_check_big_fuse,
    oracle=_oracle_big_fuse,
    cost=_cost_big_fuse,
    cases=MHC_PRE_BIG_FUSE,
    instead="tile_kernels.mhc.mhc_pre_fwd",
)
def mhc_pre_big_fuse(
    residual: Tensor,
    fn: Tensor,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    rms_eps: float,
    mhc_pre_eps: float,
    mhc_sinkhorn_eps: float,
    mhc_post_mult_value: float,
    sinkhorn_repeat: int,
    n_splits: int = 16,  # noqa: ARG001
) -> tuple[Tensor, Tensor, Tensor]:
    """All that comes before a sublayer, without gradients: mixes, Sinkhorn and what it reads.

    | argument | shape | dtype |
    |---|---|---|
    | `residual` | `[..., m, h]`, contiguous; `m` in `1..8`, `h` a multiple of 8 | bfloat16 |
    | `fn` | `[m * (m + 2), m * h]`, contiguous | float32 |
    | `mhc_scale`, `mhc_base` | `[3]` and `[m * (m + 2)]`, contiguous | float32 |
    | `rms_eps`, `mhc_pre_eps`, `mhc_sinkhorn_eps`, `mhc_post_mult_value` | | float |
    | `sinkhorn_repeat` | | int, at least 1 |
    | `n_splits` | | int, without effect |
    | returns `post_mix` | `[..., m, 1]` | float32 |
    | returns `comb_mix` | `[..., m, m]` | float32 |
    | returns `layer_input` | `[..., h]` | bfloat16 |

    Bit for bit `mhc_norm_fn_fwd`, `mhc_pre_split_mixes`, `sinkhorn_normalize` and
    `mhc_pre_apply_mix` in turn, in two launches. `mhc_pre_fwd` is the same with gradients.

    Raises `TypeError` or `ValueError` with the argument's name.

    >>> residual, fn = torch.ones(1, 1, 8).bfloat16(), torch.zeros(3, 8)
    >>> scale, base = torch.ones(3), torch.tensor([0.0, 0.0, 5.0])
    >>> post, comb, read = mhc_pre_big_fuse(residual, fn, scale, base, 1e-6, 0.0, 1e-6, 2.0, 3)
    >>> post.item(), round(comb.item(), 4), read[0, 0].item()
    (1.0, 1.0, 0.5)
    """
    out, post, comb = _launch_pre(
        residual, fn, mhc_scale, mhc_base, rms_eps, mhc_pre_eps, mhc_sinkhorn_eps,
        mhc_post_mult_value, sinkhorn_repeat, None,
    )  # fmt: skip
    return post, comb, out


@op(check=_check_big_fuse, oracle=_oracle_pre, cost=_cost_pre, cases=MHC_PRE_FWD)
def mhc_pre_fwd(
    residual: Tensor,
    fn: Tensor,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    rms_eps: float,
    mhc_pre_eps: float,
    mhc_sinkhorn_eps: float,
    mhc_post_mult_value: float,
    sinkhorn_repeat: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """All that comes before a sublayer in training: `mhc_pre_big_fuse` that keeps what it made.

    | argument | shape | dtype |
    |---|---|---|
    | arguments | those of `mhc_pre_big_fuse`, without `n_splits` | |
    | returns `layer_input` | `[..., h]` | bfloat16 |
    | returns `post_mix`, `comb_mix` | `[..., m, 1]` and `[..., m, m]` | float32 |
    | returns `pre_mix` | `[..., m, 1]` | float32 |
    | returns `mixes`, `mul` | `[..., m * (m + 2)]`, of `mhc_norm_fn_fwd` | float32 |
    | returns `s` | `[...]`, of `mhc_norm_fn_fwd` | float32 |
    | returns `logits` | `[..., m, m]`, `comb` of `mhc_pre_split_mixes` | float32 |

    Bit for bit the four operators in turn, in two launches. Differentiable in the four tensors,
    through `layer_input`, `post_mix` and `comb_mix`, by the gradients of those four.

    Raises `TypeError` or `ValueError` with the argument's name.

    >>> residual, fn = torch.ones(1, 1, 8).bfloat16(), torch.zeros(3, 8)
    >>> scale, base = torch.ones(3), torch.tensor([0.0, 0.0, 5.0])
    >>> read, post, comb, pre, *saved = mhc_pre_fwd(
    ...     residual, fn, scale, base, 1e-6, 0.0, 1e-6, 2.0, 3
    ... )
    >>> read[0, 0].item(), pre.item(), [tuple(kept.shape) for kept in saved]
    (0.5, 0.5, [(1, 3), (1, 3), (1,), (1, 1, 1)])
    """
    *leading, m, _ = residual.shape
    mixes, mul = (fn.new_empty((*leading, m * (m + 2))) for _ in range(2))
    pre, s, logits = (fn.new_empty((*leading, *last)) for last in ((m, 1), (), (m, m)))
    saved = pre, mixes, mul, s, logits
    out, post, comb = _launch_pre(
        residual, fn, mhc_scale, mhc_base, rms_eps, mhc_pre_eps, mhc_sinkhorn_eps,
        mhc_post_mult_value, sinkhorn_repeat, saved,
    )  # fmt: skip
    return out, post, comb, *saved


def pre_gradients(
    saved: Sequence[Tensor],
    grads: tuple[Tensor, Tensor, Tensor],
    total: Tensor | None,
    numbers: tuple[float, float, float, int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of `mhc_pre_fwd` from those of layer input, `post` and `comb`.

    `saved` are its four tensors and the last five of its results; `total`, a gradient of the
    residual, is added to in place. `numbers` are `rms_eps`, `mhc_sinkhorn_eps`,
    `mhc_post_mult_value` and `sinkhorn_repeat`.
    """
    residual, fn, scale, base, pre, mixes, mul, s, logits = saved
    rms_eps, sinkhorn_eps, post_mult, repeat = numbers
    total, of_pre = mhc_pre_apply_mix_bwd(grads[0], residual, pre, total)
    of_logits = sinkhorn_normalize_bwd(grads[2], logits, repeat, sinkhorn_eps)
    of_mixes, of_scale, of_base = mhc_pre_split_mixes_bwd(
        of_pre, grads[1], of_logits, mixes, scale, base, post_mult
    )
    total, of_fn = mhc_norm_fn_bwd(of_mixes, residual, fn, mul, s, rms_eps, total)
    return total, of_fn, of_scale, of_base


def _save_pre(ctx: Any, inputs: tuple[Any, ...], output: Pre) -> None:
    ctx.save_for_backward(*inputs[:4], *output[3:])
    ctx.numbers = inputs[4], *inputs[6:]
    ctx.mark_non_differentiable(*output[3:])


def _backward_pre(
    ctx: Any, of_input: Tensor, of_post: Tensor, of_comb: Tensor, *_: Any
) -> tuple[Any, ...]:
    grads = of_input, of_post, of_comb
    return *pre_gradients(ctx.saved_tensors, grads, None, ctx.numbers), *(None,) * 5


gradient(mhc_pre_fwd, _backward_pre, setup_context=_save_pre)


# ---- layers again -------------------------------------------------------------------------------


def _check_recompute(
    initial_residual: Tensor,
    pre_mix_list: list[Tensor],
    layer_output_list: list[Tensor],
    post_mix_list: list[Tensor],
    comb_mix_list: list[Tensor],
    layer_input_list: list[Tensor],
    residual_list: list[Tensor],
) -> None:
    tokens, m, h = shapes.streams("initial_residual", initial_residual)
    fp32, bf16 = torch.float32, torch.bfloat16
    named: tuple[tuple[str, Any, Any, torch.dtype, tuple[int, ...]], ...] = (
        ("pre_mix_list", pre_mix_list, shapes.STREAMS, fp32, (m, 1)),
        ("layer_output_list", layer_output_list, ("hidden",), bf16, (h,)),
        ("post_mix_list", post_mix_list, shapes.STREAMS, fp32, (m, 1)),
        ("comb_mix_list", comb_mix_list, shapes.STREAMS, fp32, (m, m)),
        ("layer_input_list", layer_input_list, ("hidden",), bf16, (h,)),
        ("residual_list", residual_list, shapes.STREAMS, bf16, (m, h)),
    )
    for name, tensors, last, dtype, sizes in named:
        if not isinstance(tensors, (list, tuple)):
            raise TypeError(f"{name} must be a list of tensors, got {type(tensors).__name__}")
        for i, tensor in enumerate(tensors):
            shapes.tensor(f"{name}[{i}]", tensor, last, dtype, like=tokens, sizes=sizes)
            if tensor.device != initial_residual.device:
                raise ValueError(
                    f"{name}[{i}] must be on {initial_residual.device}, got {tensor.device}"
                )
    reads, writes = len(pre_mix_list), len(layer_output_list)
    if reads < 1:
        raise ValueError("pre_mix_list must have at least one layer, got 0")
    if writes not in (reads - 1, reads):
        raise ValueError(f"layer_output_list must have {reads - 1} or {reads} layers, got {writes}")
    for name, tensors, count in (
        ("post_mix_list", post_mix_list, writes),
        ("comb_mix_list", comb_mix_list, writes),
        ("layer_input_list", layer_input_list, reads),
        ("residual_list", residual_list, writes),
    ):
        if len(tensors) != count:
            raise ValueError(f"{name} must have {count} layers, got {len(tensors)}")
    written, read = (
        [(f"{name}[{i}]", tensor) for name, tensors in lists for i, tensor in enumerate(tensors)]
        for lists in (
            (("layer_input_list", layer_input_list), ("residual_list", residual_list)),
            [(name, tensors) for name, tensors, *_ in named[:4]],
        )
    )
    checks.apart(written, [*read, ("initial_residual", initial_residual)])


def _oracle_recompute(
    initial_residual: Tensor,
    pre_mix_list: list[Tensor],
    layer_output_list: list[Tensor],
    post_mix_list: list[Tensor],
    comb_mix_list: list[Tensor],
    layer_input_list: list[Tensor],
    residual_list: list[Tensor],
) -> None:
    residual = initial_residual
    for i, pre in enumerate(pre_mix_list):
        layer_input_list[i].copy_(oracles.mhc_pre_apply_mix(residual, pre))
        if i < len(layer_output_list):
            residual = oracles.mhc_post(
                layer_output_list[i], residual, post_mix_list[i], comb_mix_list[i]
            )
            residual_list[i].copy_(residual)


@op(
    check=_check_recompute,
    oracle=_oracle_recompute,
    cost=lambda initial_residual, **others: Cost(
        sum(x.numel() * x.element_size() for x in tensors_in((initial_residual, others)))
    ),
    cases=MHC_MULTILAYER_RECOMPUTE,
    mutates=("layer_input_list", "residual_list"),
    differentiable=False,
)
def mhc_multilayer_recompute(
    initial_residual: Tensor,
    pre_mix_list: list[Tensor],
    layer_output_list: list[Tensor],
    post_mix_list: list[Tensor],
    comb_mix_list: list[Tensor],
    layer_input_list: list[Tensor],
    residual_list: list[Tensor],
) -> None:
    """What layers read, and the residuals between them, again from their mixes and outputs.

    | argument | each of shape | dtype |
    |---|---|---|
    | `initial_residual` | `[..., m, h]`, `m` in `1..8` | bfloat16 |
    | `pre_mix_list`, of `A` layers | `[..., m, 1]` | float32 |
    | `layer_output_list`, of `B` layers, `A` or `A - 1` | `[..., h]` | bfloat16 |
    | `post_mix_list`, `comb_mix_list`, of `B` | `[..., m, 1]`, `[..., m, m]` | float32 |
    | `layer_input_list`, of `A`, written | `[..., h]` | bfloat16 |
    | `residual_list`, of `B`, written | `[..., m, h]` | bfloat16 |

    All are contiguous, over the same tokens, and what is written shares no memory. With `R` the
    initial residual, for each layer `layer_input = mhc_pre_apply_mix(R, pre)`, and for the first
    `B` of them `R = mhc_post(layer_output, R, post, comb)`, which is stored and goes on rounded:
    bit for bit what those operators give. Ten layers take one launch, in which the residual stays
    in registers; there is no other work on the host than the calls, so CUDA graphs hold.

    Raises `TypeError` or `ValueError` with the argument's name.

    >>> streams = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).bfloat16()
    >>> read = torch.empty(2).bfloat16()
    >>> mix = torch.tensor([[0.25], [0.5]])
    >>> mhc_multilayer_recompute(streams, [mix], [], [], [], [read], [])
    >>> read.tolist()
    [1.75, 2.5]
    """
    if not nonempty(initial_residual):
        return
    m, h = initial_residual.shape[-2:]
    lists = (
        _rows(pre_mix_list, m), _rows(layer_output_list, 1, h), _rows(post_mix_list, m),
        _rows(comb_mix_list, m * m), _rows(layer_input_list, 1, h), _rows(residual_list, m, h),
    )  # fmt: skip
    residual = shapes.rows(initial_residual, m, h)
    streams = (residual, *lists[1], *lists[4], *lists[5])
    problem = (
        m, h, residual.shape[0], shapes.common_alignment(*streams),
        shapes.common_alignment(*lists[0], *lists[2], *lists[3]),
    )  # fmt: skip
    # Kernels take all tensors; those of layers that are not there are never looked at.
    comb = lists[3][0] if lists[3] else lists[0][0].new_empty((residual.shape[0], m * m))
    spare = (lists[0][0], lists[4][0], lists[0][0], comb, lists[4][0], residual)
    for first in range(0, len(pre_mix_list), LAYERS):
        layers = [tensors[first : first + LAYERS] for tensors in lists]
        filled = (
            [*tensors, *[other] * (LAYERS - len(tensors))] for tensors, other in zip(layers, spare)
        )
        _RECOMPUTE.launch(
            problem, residual, len(layers[0]), len(layers[1]), *itertools.chain(*filled)
        )
        if layers[5]:
            residual = layers[5][-1]


def _rows(tensors: Sequence[Tensor], *last: int) -> list[Tensor]:
    return [shapes.rows(tensor, *last) for tensor in tensors]
