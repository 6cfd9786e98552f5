"""The gradients of the indexer's logits, given theirs at selected keys."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tile_kernels.attention.cases.indexer_gradient import INDEXER_LOGITS_BWD
from tile_kernels.attention.indexer import SOURCES, check_operands, pair, rows_of
from tile_kernels.runtime import checks
from tile_kernels.runtime.cases import Cost
from tile_kernels.runtime.launch import Kernel, is_recording, nonempty
from tile_kernels.runtime.op import face, op
from tile_kernels.torch import indexer as oracles
from tile_kernels.torch.indexer import Operand

MOST_ROW = 128 * 128  # heads times channels, whose gradient a block holds
_LARGEST_E4M3 = 448.0
_BITS = 61  # of a sum of shares
_GRADIENTS = Kernel("tile_kernels.attention.kernels.indexer_gradient", "selected_gradients")


def _check(
    q: Tensor, k: Tensor, k_sf: Tensor | None, weights: Tensor, indices: Tensor, grad: Tensor
) -> None:
    checks.tensor("q", q, ("T", "h", "D"), (torch.bfloat16, torch.float8_e4m3fn))
    check_operands(q, None, k, k_sf, weights)
    heads, depth = q.shape[1:]
    if (64 if heads <= 64 else 128) * depth > MOST_ROW:
        raise ValueError(f"q must have up to 64 heads with {depth} channels, got {heads}")
    checks.tensor(
        "indices", indices, ("T", "K"), torch.int32, shape=(q.shape[0], None), contiguous=True
    )
    checks.tensor(
        "grad", grad, ("T", "K"), torch.float32, shape=tuple(indices.shape), contiguous=True
    )


def _values(
    _q: Tensor, k: Tensor, _k_sf: Tensor | None, _weights: Tensor, indices: Tensor, _grad: Tensor
) -> None:
    checks.in_range("indices", indices, -1, k.shape[0] - 1)


def _unit(
    q: Tensor, num_keys: int, k_sf: Tensor | None, weights: Tensor, indices: Tensor, grad: Tensor
) -> Tensor:
    """The power of two that shares of a key's gradient are counted in, its inverse: `[1]`.

    A share is at most `|grad| |k_sf| sum of |weights| max of |q|`; there are as many as indices.
    """
    present = (indices >= 0) & (indices < num_keys)
    if k_sf is not None:
        grad = grad * k_sf[indices.where(present, 0)]
    largest = torch.where(present, grad, 0).abs().amax() * weights.abs().sum(-1).amax()
    largest = largest * (q.abs().amax().float() if q.dtype == torch.bfloat16 else _LARGEST_E4M3)
    bits = _BITS - math.ceil(math.log2(max(2, grad.numel())))
    exponent = (bits - largest.log2().ceil()).clamp(-126, 126)
    return torch.where(largest.isfinite(), exponent.exp2(), torch.nan).view(1)


def _cost(q: Tensor, k: Operand, indices: Tensor, **_: Any) -> Cost:
    rows = indices.numel() * q.shape[2]
    keys = pair("k", k)[0]
    return Cost(
        rows * (q.element_size() + 8) + q.numel() * (q.element_size() + 4) + 4 * keys.numel(),
        6 * rows * q.shape[1],
    )


def _oracle(
    q: Tensor, k: Tensor, k_sf: Tensor | None, weights: Tensor, indices: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return oracles.indexer_logits_bwd(q, k if k_sf is None else (k, k_sf), weights, indices, grad)


@op(
    check=_check,
    oracle=_oracle,
    cost=_cost,
    cases=INDEXER_LOGITS_BWD,
    values=_values,
    name="indexer_logits_bwd",
)
def _bwd(
    q: Tensor, k: Tensor, k_sf: Tensor | None, weights: Tensor, indices: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    if not (nonempty(q) and nonempty(indices) and nonempty(k)):
        of_q, of_k, of_weights = (
            x.new_zeros(x.shape, dtype=torch.float32) for x in (q, k, weights)
        )
        return of_q, of_k, of_weights
    grad_q = torch.empty_like(q, dtype=torch.float32)
    counted = torch.zeros_like(k, dtype=torch.int64)
    grad_weights = torch.empty_like(weights)
    unit = (
        weights.new_empty(1)
        if is_recording()
        else _unit(q, k.shape[0], k_sf, weights, indices, grad)
    )
    _GRADIENTS.launch(
        (SOURCES[q.dtype], q.shape[1], q.shape[2]),
        rows_of(q), rows_of(k), k_sf, weights, indices, grad, unit, grad_q, counted, grad_weights,
    )  # fmt: skip
    return grad_q, (counted.double() / unit.double()).float(), grad_weights


@face(_bwd, oracle=oracles.indexer_logits_bwd)
def indexer_logits_bwd(
    q: Tensor, k: Operand, weights: Tensor, indices: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `indexer_logits`, given that of the logits at selected keys.

    | argument | shape | dtype |
    |---|---|---|
    | `q`, `k`, `weights` | those of `indexer_logits`; with `D` 256 up to 64 heads | not e2m1 |
    | `indices` | `[T, K]`, contiguous: keys, as `indexer_select` gives them, -1 for none | int32 |
    | `grad` | `[T, K]`, contiguous: of the logits at these keys | float32 |
    | returns `grad_q`, `grad_k`, `grad_weights` | as `q`, the data of `k`, `weights` | float32 |

    With `d = grad * k_sf` at key `s` of query `t`, and `c = q[t, h] . k[s]`,

        grad_weights[t, h] = sum over s of d * relu(c)
        grad_q[t, h]       = sum over s of d * weights[t, h] * [c > 0] * k[s]
        grad_k[s]          = sum over t, h of d * weights[t, h] * [c > 0] * q[t, h]

    where `d * weights` has 16 bits for the matrix units, sums are in float32, and those over
    queries exact: deterministic, without floating-point atomics. Indices may come twice, and those
    outside of `-1..S-1` count as -1. `q` and `k` must be finite; anything else that is not makes
    all of `grad_k` NaN.

    Raises `TypeError` or `ValueError` with the argument's name.

    >>> q, k = torch.zeros(1, 1, 32).bfloat16(), torch.zeros(2, 32).bfloat16()
    >>> q[0, 0, 0], k[:, 0] = 2, torch.tensor([3, -3])
    >>> indices, grad = torch.tensor([[0, 1]]).int(), torch.tensor([[1.0, 10.0]])
    >>> of_q, of_k, of_weights = indexer_logits_bwd(q, k, torch.tensor([[0.5]]), indices, grad)
    >>> of_q[0, 0, 0].item(), of_k[:, 0].tolist(), of_weights.item()
    (1.5, [1.0, 0.0], 6.0)
    """
    return _bwd(q, *pair("k", k), weights, indices, grad)
