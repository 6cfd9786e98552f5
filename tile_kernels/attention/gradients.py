"""The gradients of the compression of keys and values."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tile_kernels.attention.adapters import in_order
from tile_kernels.attention.cases.compress import KV_COMPRESS_BWD, KV_COMPRESS_PACKED_BWD
from tile_kernels.attention.windows import (
    DTYPES,
    Series,
    accessible,
    check_packed,
    check_sequences,
    check_series,
    check_windows,
    count_parts,
    place_windows,
)
from tile_kernels.runtime import checks
from tile_kernels.runtime.cases import Cost
from tile_kernels.runtime.launch import Kernel, dtype_name, nonempty
from tile_kernels.runtime.op import face, op
from tile_kernels.torch import compress as oracles
from tile_kernels.torch.compress import Gradients, halves, unpacked

_GRADIENTS = Kernel("tile_kernels.attention.kernels.gradients", "gradients")


def _check_grad(
    grad_out: Tensor, kv: Tensor, bias: Tensor, channels: int, cu_seqlens: Tensor | None
) -> None:
    check_windows(cu_seqlens, None)
    entries = kv.shape[0] // bias.shape[0] if cu_seqlens is None else None
    checks.tensor(
        "grad_out", grad_out, ("num_windows", "channels"), DTYPES, shape=(entries, channels)
    )


def _launch(grad_out: Tensor, series: Series, of: Series, cu_seqlens: Tensor | None) -> None:
    """Fill the tensors of `of`, the gradients of those of `series`."""
    num_windows, channels = grad_out.shape
    window, count = series.bias_a.shape[0], series.number
    if not nonempty(grad_out):
        for x in (*of.rows, *of.biases):
            x.zero_()
        return
    vector = series.vector
    parts = count_parts(num_windows, (channels, window, count, vector), grad_out.device)
    partial = series.bias_a.new_empty((parts, count, window, channels))
    places: tuple[Tensor | None, ...] = (None, None, None)
    if cu_seqlens is not None:
        places = place_windows(cu_seqlens, series.kv_a.shape[0], window, num_windows)
    problem = (
        channels, window, count, cu_seqlens is not None,
        dtype_name(series.kv_a), dtype_name(grad_out), vector,
    )  # fmt: skip
    _GRADIENTS.launch(
        problem, accessible(grad_out), *series, *places,
        of.kv_a, of.z_a, of.kv_b, of.z_b, of.bias_a, of.bias_b, partial,
    )  # fmt: skip


def _cost(
    grad_out: Tensor, kv_a: Tensor, bias_a: Tensor, kv_b: Tensor | None = None, **_: Any
) -> Cost:
    series = 1 if kv_b is None else 2
    rows = 4 * series * kv_a.numel() * kv_a.element_size()
    biases = 8 * series * bias_a.numel()
    return Cost(
        rows + biases + grad_out.numel() * grad_out.element_size(), 16 * series * kv_a.numel()
    )


# ---- two series, or one -------------------------------------------------------------------------

_ORACLE = in_order(oracles.kv_compress_bwd)


def _empty(kv: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return kv.new_empty(kv.shape), kv.new_empty(kv.shape), bias.new_empty(bias.shape)


def _check(*arguments: Any) -> None:
    grad_out, *series, cu_seqlens = arguments
    check_series(*series)
    kv_a, _, bias_a, *_ = series
    _check_grad(grad_out, kv_a, bias_a, kv_a.shape[1], cu_seqlens)


def _check_values(*arguments: Any) -> None:
    grad_out, kv, _, bias, *_, cu_seqlens = arguments
    check_sequences(cu_seqlens, kv, bias, grad_out.shape[0], "grad_out")


def _oracle(*arguments: Any) -> tuple[Tensor, ...]:
    grads = _ORACLE(*arguments)
    return tuple(grad for grad in grads if grad is not None)


@op(
    check=_check,
    oracle=_oracle,
    cost=_cost,
    cases=KV_COMPRESS_BWD,
    values=_check_values,
    name="kv_compress_bwd",
)
def _of_two(
    grad_out: Tensor,
    kv_a: Tensor,
    z_a: Tensor,
    bias_a: Tensor,
    kv_b: Tensor,
    z_b: Tensor,
    bias_b: Tensor,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    grads = *_empty(kv_a, bias_a), *_empty(kv_b, bias_b)
    _launch(grad_out, Series.of(kv_a, z_a, bias_a, kv_b, z_b, bias_b), Series(*grads), cu_seqlens)
    return grads


@op(
    check=_check,
    oracle=_oracle,
    values=_check_values,
    serves="kv_compress_bwd",
)
def _kv_compress_bwd_of_one(
    grad_out: Tensor, kv_a: Tensor, z_a: Tensor, bias_a: Tensor, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    grads = _empty(kv_a, bias_a)
    _launch(grad_out, Series.of(kv_a, z_a, bias_a), Series(*grads), cu_seqlens)
    return grads


@face(_of_two, oracle=oracles.kv_compress_bwd)
def kv_compress_bwd(
    grad_out: Tensor,
    kv_a: Tensor,
    z_a: Tensor,
    bias_a: Tensor,
    kv_b: Tensor | None = None,
    z_b: Tensor | None = None,
    bias_b: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
) -> Gradients:
    """The gradients of `kv_compress`; weights are computed again, not kept.

    | argument | shape | dtype |
    |---|---|---|
    | `grad_out` | `[num_windows, channels]` | bfloat16 or float32; copied if not contiguous |
    | `kv_a`, `z_a`, `bias_a`, `kv_b`, `z_b`, `bias_b`, `cu_seqlens` | those of `kv_compress` | |
    | returns `grad_kv_a`, `grad_z_a` | `[num_tokens, channels]` | as `kv_a`, contiguous |
    | returns `grad_bias_a` | `[window, channels]` | float32, contiguous |
    | returns `grad_kv_b`, `grad_z_b`, `grad_bias_b` | likewise, or None | |

    With `p` the weight of a token in its window, `g` the gradient of the entry, in float32,

        grad_kv = p * g        grad_z = p * g * (kv - out)        grad_bias = sum(grad_z)

    the last over windows, by position in the window. A token counts in one window through each
    series, so nothing is added up between threads but biases, and those in a fixed order: the same
    input gives the same bits. Tokens that no window takes have zeros.

    Raises `TypeError` or `ValueError` with the argument's name.

    >>> import torch
    >>> kv, z = torch.tensor([[1.0], [3.0], [5.0]]), torch.zeros(3, 1)
    >>> grad_kv, grad_z, grad_bias, *_ = kv_compress_bwd(torch.ones(1, 1), kv, z, torch.zeros(2, 1))
    >>> grad_kv.tolist(), grad_z.tolist()
    ([[0.5], [0.5], [0.0]], [[-0.5], [0.5], [0.0]])
    """
    if kv_b is None and z_b is None and bias_b is None:
        of_a = _kv_compress_bwd_of_one(grad_out, kv_a, z_a, bias_a, cu_seqlens)
        return *of_a, None, None, None
    return _of_two(grad_out, kv_a, z_a, bias_a, kv_b, z_b, bias_b, cu_seqlens)  # type: ignore[arg-type]


# ---- both series in one tensor ------------------------------------------------------------------


def _check_both(
    grad_out: Tensor, kv: Tensor, gate: Tensor, ape: Tensor, cu_seqlens: Tensor | None
) -> None:
    check_packed(kv, gate, ape)
    _check_grad(grad_out, kv, ape, kv.shape[1] // 2, cu_seqlens)


@op(
    check=_check_both,
    oracle=in_order(oracles.kv_compress_packed_bwd),
    cost=lambda grad_out, kv, ape, **_: _cost(
        grad_out, halves(kv)[0], halves(ape)[0], halves(kv)[1]
    ),
    cases=KV_COMPRESS_PACKED_BWD,
    values=_check_values,
    name="kv_compress_packed_bwd",
)
def _of_both(
    grad_out: Tensor, kv: Tensor, gate: Tensor, ape: Tensor, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    grads = _empty(kv, ape)
    series, of = Series.of(*unpacked(kv, gate, ape)), Series(*unpacked(*grads))
    _launch(grad_out, series, of, cu_seqlens)
    return grads


@face(_of_both, oracle=oracles.kv_compress_packed_bwd)
def kv_compress_packed_bwd(
    grad_out: Tensor,
    kv: Tensor,
    gate: Tensor,
    ape: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `kv_compress_packed`, packed as its arguments are.

    | argument | shape | dtype |
    |---|---|---|
    | `grad_out` | `[num_windows, channels]` | bfloat16 or float32; copied if not contiguous |
    | `kv`, `gate`, `ape`, `cu_seqlens` | those of `kv_compress_packed` | |
    | returns `grad_kv`, `grad_gate` | `[num_tokens, 2 * channels]` | as `kv`, contiguous |
    | returns `grad_ape` | `[window, 2 * channels]` | float32, contiguous |

    By the formulas of `kv_compress_bwd`, with the same promises.

    Raises `TypeError` or `ValueError` with the argument's name.

    >>> import torch
    >>> kv = torch.tensor([[10.0, 1.0], [20.0, 2.0]])
    >>> grads = kv_compress_packed_bwd(torch.ones(2, 1), kv, torch.zeros(2, 2), torch.zeros(1, 2))
    >>> grads[0].tolist()
    [[0.5, 1.0], [0.0, 0.5]]
    """
    return _of_both(grad_out, kv, gate, ape, cu_seqlens)
