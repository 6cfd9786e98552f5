"""The best entries of each row of logits."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tile_kernels.attention.cases.indexer_topk import INDEXER_TOPK
from tile_kernels.runtime import checks
from tile_kernels.runtime.cases import Cost
from tile_kernels.runtime.launch import Kernel, alignment, dtype_name, nonempty
from tile_kernels.runtime.op import face, op
from tile_kernels.torch import indexer as oracles

LOGITS = (torch.float32, torch.bfloat16)
MOST_TOPK = 4096
_BEST = Kernel("tile_kernels.attention.kernels.indexer_topk", "best_of_rows")


def check_bound(name: str, value: object, num_queries: int) -> None:
    """The first key of each query, or the one after its last."""
    checks.tensor(name, value, ("T",), torch.int32, shape=(num_queries,), contiguous=True)


def _check(logits: Tensor, k: int, end: Tensor, start: Tensor | None, by_value: bool) -> None:
    checks.tensor("logits", logits, ("T", "S"), LOGITS, unit_inner_stride=True)
    if logits.shape[0] > 1 and 0 < logits.stride(0) < logits.shape[1]:
        raise ValueError(f"logits must have rows apart, got stride {logits.stride(0)}")
    checks.integer("k", k, 1, MOST_TOPK)
    check_bound("end", end, logits.shape[0])
    if start is not None:
        check_bound("start", start, logits.shape[0])
    checks.boolean("sorted", by_value)


def _oracle(logits: Tensor, k: int, end: Tensor, start: Tensor | None, by_value: bool) -> Tensor:
    return oracles.indexer_topk(logits, k, end, start=start, sorted=by_value)


def merge(keys: Tensor, names: Tensor, out: Tensor) -> None:
    """Launch the choice of the best of `keys`, 0 for none, `[T, n]`; their `names` into `out`."""
    vector = math.gcd(4, keys.shape[1])
    _BEST.launch(
        (out.shape[1], dtype_name(keys), vector, False, False), keys, None, None, names, out
    )


@op(
    check=_check,
    oracle=_oracle,
    cost=lambda logits, k, **_: Cost(
        logits.numel() * logits.element_size() + 4 * logits.shape[0] * (k + 1)
    ),
    cases=INDEXER_TOPK,
    differentiable=False,
    name="indexer_topk",
)
def _topk(logits: Tensor, k: int, end: Tensor, start: Tensor | None, by_value: bool) -> Tensor:
    out = end.new_empty((logits.shape[0], k))
    if nonempty(out):
        size = logits.element_size()
        places = math.gcd(alignment(logits), logits.stride(0) * size, logits.shape[1] * size)
        vector = min(4, places // size)
        _BEST.launch(
            (k, dtype_name(logits), vector, start is not None, by_value),
            logits,
            start,
            end,
            None,
            out,
        )
    return out


@face(_topk, oracle=oracles.indexer_topk)
def indexer_topk(
    logits: Tensor,
    k: int,
    end: Tensor | None = None,
    *,
    start: Tensor | None = None,
    sorted: bool = False,  # noqa: A002
) -> Tensor:
    """The `k` largest logits of each query among its keys, exactly.

    | argument | shape | dtype |
    |---|---|---|
    | `logits` | `[T, S]`, stride 1 in a row, any stride between rows | float32 or bfloat16 |
    | `k` | `1..4096`, also above `S` | int |
    | `start`, `end` | `[T]`: keys `start <= s < end` count, by default all | int32 |
    | returns | `[T, k]` | int32 |

    Of equal logits the smaller index is taken; the two zeros are equal, and NaN is -inf. An entry
    that is -inf is one like any other, after all larger ones. Indices come in ascending order, with
    `sorted` by descending logits (equal ones by index); where a query has fewer than `k` keys, -1
    fills the rest. Ranges are cut to `0..S`. Deterministic; a row is read once, or twice where a
    sample of it misleads, and no values make a difference to the result's exactness.

    Raises `TypeError` or `ValueError` with the argument's name.

    >>> logits = torch.tensor([[0.5, 1.5, 3.0, 7.5], [-2.0, 0.5, 0.0, 2.0]])
    >>> end = torch.tensor([4, 3], dtype=torch.int32)
    >>> indexer_topk(logits, 2, end).tolist()
    [[2, 3], [1, 2]]
    >>> indexer_topk(logits, 2).tolist()
    [[2, 3], [1, 3]]
    >>> indexer_topk(logits, 4, end, sorted=True).tolist()
    [[3, 2, 1, 0], [1, 2, 0, -1]]
    """
    checks.tensor("logits", logits, ("T", "S"))
    return _topk(logits, k, oracles.bound(end, logits, logits.shape[1]), start, sorted)
