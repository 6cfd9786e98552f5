"""`indexer_select`: the best keys of each query, without their scores in memory."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tile_kernels.attention import indexer
from tile_kernels.attention.indexer_reference import Operand
from tile_kernels.attention.select import reference
from tile_kernels.attention.select.plan import plan
from tile_kernels.runtime import checks
from tile_kernels.runtime.cases import Cost
from tile_kernels.runtime.declaration import Host, Launch, Out, Spec
from tile_kernels.runtime.launch import Kernel
from tile_kernels.runtime.operator import Operator

MAX_SHORT = 1 << 16  # keys of a block that lists have by 16 bits
MAX_LOGITS_BYTES = 1 << 28  # that are written to memory for few queries

_BEST_KEYS = Kernel("tile_kernels.attention.select.kernel", "best_keys", plan)


class Arguments(NamedTuple):
    q: Tensor
    q_sf: Tensor | None
    k: Tensor
    k_sf: Tensor | None
    weights: Tensor
    start: Tensor | None
    end: Tensor | None
    topk: int

    def check(self) -> None:
        indexer.check_operands(self.q, self.q_sf, self.k, self.k_sf, self.weights)
        for name, bound in (("start", self.start), ("end", self.end)):
            if bound is not None:
                indexer.check_bound(name, bound, self.q.shape[0])
        checks.integer("topk", self.topk, 1, indexer.MAX_TOPK)

    def outputs(self) -> Out:
        return Out("out", (self.q.shape[0], self.topk), torch.int32)

    def launches(self, out: Spec, *scratch: Spec) -> list[Launch | Host]:
        num_queries, num_keys = self.q.shape[0], self.k.shape[0]
        if num_keys == 0:
            return [Host(Tensor.fill_, (out, -1))]
        bounds = (_bound(self.start, self.weights, 0), _bound(self.end, self.weights, num_keys))
        operands = (*self[:5], *bounds)
        if _has_logits(self):
            return self._by_logits(operands, out, scratch)
        share, shares = _shares(self)
        merged = shares > 1
        if merged:
            *buffers, names, scores = scratch
        else:  # nothing is written to scores then
            buffers, names = list(scratch), out.view(num_queries, 1, self.topk)
            scores = names.view(torch.uint32)
        block_queries = indexer.queries_per_block(num_queries, shares, self.q.device)
        problem = (self.topk, share <= MAX_SHORT)
        results = (names, scores, share, block_queries)
        found: list[Launch | Host] = [
            *indexer.score(_BEST_KEYS, problem, operands, buffers, results)
        ]
        if merged:
            rows = (num_queries, shares * self.topk)
            found.append(indexer.merge(scores.view(*rows), names.view(*rows), out))
        return found

    def _by_logits(
        self, operands: tuple[Any, ...], out: Spec, scratch: tuple[Spec, ...]
    ) -> list[Launch | Host]:
        """Few queries: all their logits, and then the best of them."""
        share, shares = _shares_of_logits(self)
        count = len(indexer.score_scratch(self.q, self.k, shares))
        buffers, logits, lists = scratch[:count], scratch[count], scratch[count + 1 :]
        block_queries = indexer.queries_per_block(self.q.shape[0], shares, self.q.device)
        start, end = operands[-2:]
        return [
            *indexer.score_all(operands, buffers, logits, share, block_queries, _are_many(self)),
            *indexer.best_of_parts(logits, start, end, out, lists),
        ]


def _shares(a: Arguments) -> tuple[int, int]:
    return indexer.shares_to_select(a.q.shape[0], a.k.shape[0], a.q.device)


def _has_logits(a: Arguments) -> bool:
    """Whether logits are written to memory: those of few queries, whose keys blocks share."""
    _, shares = _shares(a)
    return shares > 1 and 4 * a.q.shape[0] * a.k.shape[0] <= MAX_LOGITS_BYTES


def _are_many(a: Arguments) -> bool:
    """Whether pipelined blocks, which have 8 queries, score the few queries of this path.

    A block multiplies the keys from the first to the last in range of its queries with all of them.
    Ranges that begin anywhere may be those of as many sequences, and not overlap.
    """
    return a.start is None and indexer.are_many(a.q.shape[0])


def _shares_of_logits(a: Arguments) -> tuple[int, int]:
    """Keys of a block, and how many blocks share the keys."""
    share = indexer.share_of_keys(a.q.shape[0], a.k.shape[0], _are_many(a), a.q.device)
    return share, -(-a.k.shape[0] // share)


def scratch(a: Arguments) -> tuple[Out, ...]:
    """What scores need; then logits and lists of their best, or lists of the best that blocks leave
    which share the keys of a query."""
    num_queries, num_keys = a.q.shape[0], a.k.shape[0]
    if _has_logits(a):
        _, shares = _shares_of_logits(a)
        return (
            *indexer.score_scratch(a.q, a.k, shares),
            Out("logits", (num_queries, num_keys), torch.float32),
            *indexer.parts_scratch(num_queries, num_keys, a.topk),
        )
    _, shares = _shares(a)
    lists: tuple[Out, ...] = ()
    if shares > 1:
        shape = (num_queries, shares, a.topk)
        lists = (Out("names", shape, torch.int32), Out("scores", shape, torch.uint32))
    return indexer.score_scratch(a.q, a.k, shares) + lists


def _filled(weights: Tensor, value: int) -> Tensor:
    return weights.new_full(weights.shape[:1], value, dtype=torch.int32)


def _bound(given: Any, weights: Any, default: int) -> Spec:
    """A bound of each query, as given or the same for all."""
    if given is not None:
        return given
    like = Spec(weights.shape[:1], (1,), torch.int32, weights.device)
    return weights.apply(_filled, default, like=like)


def cost(q: Operand, k: Operand, weights: Tensor, topk: int, **_: Any) -> Cost:
    queries, num_keys = indexer.pair(q)[0], indexer.pair(k)[0].shape[0]
    return Cost(
        indexer.operand_bytes(q, k, weights) + 4 * queries.shape[0] * (topk + 2),
        indexer.score_flops(queries, num_keys),
    )


# Nothing is dynamic: the numbers of queries and of keys decide how many blocks share the keys of a
# query, whether their lists are merged, and whether packed keys are expanded before.
INDEXER_SELECT = Operator(
    "attention.indexer_select",
    Arguments,
    scratch=scratch,
    reference=indexer.by_field(reference.indexer_select),
    cost=cost,
    differentiable=False,
)


@INDEXER_SELECT.public(reference=reference.indexer_select)
def indexer_select(
    q: Operand,
    k: Operand,
    weights: Tensor,
    start: Tensor | None = None,
    end: Tensor | None = None,
    topk: int | None = None,
) -> Tensor:
    """Selects the keys that matter most to each query, without storing the logits.

    The selection is exact for the float32 logits; of equal ones the smaller index is taken, and NaN
    counts as -inf. The logits exist a tile at a time, in the shared memory of a multiprocessor:
    nothing of the size `[T, S]` is allocated, except for queries too few to fill the GPU. Their
    logits are written to memory, up to 256 MiB of them; beyond, blocks share the keys, and their
    lists, some megabytes at most, are merged. The result is deterministic.

    Args:
        q: As in `indexer_logits`.
        k: As in `indexer_logits`.
        weights: As in `indexer_logits`.
        start: As in `indexer_logits`; None: from the first key on.
        end: As in `indexer_logits`; None: up to the last key.
        topk: How many, in `1..4096`, also above `S`. It must be given.

    Returns:
        `[T, topk]`, int32, contiguous: indices in ascending order, -1 where a query has fewer keys
        in its range.

    Raises:
        TypeError: If an argument has another type or dtype, or `topk` is missing.
        ValueError: If an argument has another shape or is not contiguous, or `topk` is out of
            range.

    Example:
        >>> q, k = torch.zeros(1, 2, 32).bfloat16(), torch.zeros(3, 32).bfloat16()
        >>> q[0, :, 0], k[:, 0] = torch.tensor([1, -1]), torch.tensor([1, -2, 3])
        >>> weights, ends = torch.tensor([[0.5, 2.0]]), torch.tensor([0, 3]).int()
        >>> indexer_select(q, k, weights, ends[:1], ends[1:], 2).tolist()
        [[1, 2]]
        >>> indexer_select(q, k, weights, topk=1).tolist()
        [[1]]
    """
    (queries, q_sf), (keys, k_sf) = indexer.pair(q), indexer.pair(k)
    return INDEXER_SELECT(queries, q_sf, keys, k_sf, weights, start, end, topk)
