"""`indexer_topk`: the best entries of each row of logits."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tile_kernels.attention.indexer import BEST_OF_ROWS, MAX_TOPK, check_bound
from tile_kernels.attention.topk import reference
from tile_kernels.runtime import checks
from tile_kernels.runtime.cases import Cost
from tile_kernels.runtime.declaration import Launch, Out, Size, Spec, alignment, dtype_name
from tile_kernels.runtime.operator import Operator

DTYPES = (torch.float32, torch.bfloat16)


class Arguments(NamedTuple):
    logits: Tensor
    k: int
    end: Tensor | None
    start: Tensor | None
    by_value: bool

    def check(self) -> None:
        checks.tensor("logits", self.logits, ("T", "S"), DTYPES, unit_inner_stride=True)
        rows, columns = self.logits.shape
        if rows > 1 and 0 < self.logits.stride(0) < columns:
            raise ValueError(
                f"logits must have rows that do not overlap, got row stride {self.logits.stride(0)}"
            )
        checks.integer("k", self.k, 1, MAX_TOPK)
        for name, bound in (("end", self.end), ("start", self.start)):
            if bound is not None:
                check_bound(name, bound, rows)
        checks.boolean("sorted", self.by_value)

    def outputs(self) -> Out:
        return Out("out", (self.logits.shape[0], self.k), torch.int32)

    def launches(self, out: Spec) -> Launch:
        logits: Any = self.logits
        end: Any = self.end
        if end is None:
            like = Spec(logits.shape[:1], (1,), torch.int32, logits.device)
            end = logits.apply(_num_columns, like=like)
        problem = (
            self.k, dtype_name(logits), logits.element_size(), Size(lambda a: a.logits.shape[1]),
            Size(_stride), alignment(logits), self.start is not None, self.by_value,
        )  # fmt: skip
        return Launch(BEST_OF_ROWS, problem, (logits, self.start, end, None, out))


def _stride(a: Arguments) -> int:
    """From a row to the next, in logits."""
    return max(a.logits.shape[1], 1) if a.logits.is_contiguous() else a.logits.stride(0)


def _num_columns(logits: Tensor) -> Tensor:
    return logits.new_full(logits.shape[:1], logits.shape[1], dtype=torch.int32)


def cost(logits: Tensor, k: int, **_: Any) -> Cost:
    return Cost(logits.numel() * logits.element_size() + 4 * logits.shape[0] * (k + 1))


def _reference(
    logits: Tensor, k: int, end: Tensor | None, start: Tensor | None, by_value: bool
) -> Tensor:
    return reference.indexer_topk(logits, k, end, start=start, sorted=by_value)


INDEXER_TOPK = Operator(
    "attention.indexer_topk",
    Arguments,
    reference=_reference,
    cost=cost,
    dynamic={"logits": 0, "end": 0, "start": 0},
    differentiable=False,
)


@INDEXER_TOPK.public(reference=reference.indexer_topk)
def indexer_topk(
    logits: Tensor,
    k: int,
    end: Tensor | None = None,
    *,
    start: Tensor | None = None,
    sorted: bool = False,  # noqa: A002
) -> Tensor:
    """Selects exactly the `k` largest logits of each query among its keys.

    Of equal logits the smaller index is taken; the two zeros are equal, and NaN counts as -inf. An
    entry that is -inf is one like any other, after all larger ones. Ranges are cut to `0..S`. The
    result is deterministic. A row is read once, or twice where a sample of it misleads; the values
    make no difference to the exactness of the result.

    Args:
        logits: `[T, S]`, float32 or bfloat16, stride 1 in a row, any stride between rows.
        k: How many, in `1..4096`, also above `S`.
        end: `[T]`, int32, contiguous: the key after the last one of each query. None: all keys.
        start: `[T]`, int32, contiguous: the first key of each query. None: from key 0 on.
        sorted: Whether indices come by descending logits, equal ones by index, instead of in
            ascending order.

    Returns:
        `[T, k]`, int32, contiguous: indices, -1 in the rest of a row that has fewer than `k` keys.

    Raises:
        TypeError: If an argument has another type or dtype.
        ValueError: If an argument has another shape or stride, or `k` is out of range.

    Example:
        >>> logits = torch.tensor([[0.5, 1.5, 3.0, 7.5], [-2.0, 0.5, 0.0, 2.0]])
        >>> end = torch.tensor([4, 3], dtype=torch.int32)
        >>> indexer_topk(logits, 2, end).tolist()
        [[2, 3], [1, 2]]
        >>> indexer_topk(logits, 2).tolist()
        [[2, 3], [1, 3]]
        >>> indexer_topk(logits, 4, end, sorted=True).tolist()
        [[3, 2, 1, 0], [1, 2, 0, -1]]
    """
    return INDEXER_TOPK(logits, k, end, start, sorted)
