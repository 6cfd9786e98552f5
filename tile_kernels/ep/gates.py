"""Scores whose best experts are spread unevenly over the ranks, to test what that does."""

from __future__ import annotations

import torch
from torch import Tensor

from tile_kernels.utils import ceil_div

_STEPS = 20
_MAX_FACTOR = 100.0


def get_unbalanced_scores(
    num_tokens: int,
    num_experts: int,
    num_ranks: int,
    num_topk: int,
    ratio: float,
    precise: bool = False,
    generator: torch.Generator | None = None,
) -> Tensor:
    """float32 `[num_tokens, num_experts]` whose top `num_topk` favour rank 0 by `ratio`.

    Rank 0 receives `ratio` times as many tokens as another rank does on average, a token counting
    once however many experts of a rank it chose. By chance: the scores of rank 0 are drawn from a
    larger range, which bisection finds, as far as that goes. With `precise` the number of tokens of
    each rank is laid out first, and is as equal among the others as can be.

    >>> scores = get_unbalanced_scores(1000, 64, 8, 4, ratio=2.0, precise=True)
    >>> ranks = scores.topk(4).indices // 8
    >>> tokens = [(ranks == rank).any(1).sum().item() for rank in range(8)]
    >>> round(tokens[0] / (sum(tokens[1:]) / 7), 2), max(tokens[1:]) - min(tokens[1:]) <= 8
    (2.0, True)
    """
    if num_experts % num_ranks:
        raise ValueError(
            f"num_experts must be a multiple of the {num_ranks} ranks, got {num_experts}"
        )
    if not 1 <= num_topk <= num_experts:
        raise ValueError(f"num_topk must be in 1..{num_experts} (the experts), got {num_topk}")
    if ratio < 1:
        raise ValueError(f"ratio must be at least 1, got {ratio}")
    if precise:
        return _precise_scores(num_tokens, num_experts, num_ranks, num_topk, ratio, generator)
    scores = torch.rand(num_tokens, num_experts, generator=generator)
    num_local = num_experts // num_ranks
    low, high = 1.0, _MAX_FACTOR
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if _ratio_of(_favoured(scores, num_local, middle), num_ranks, num_topk) < ratio:
            low = middle
        else:
            high = middle
    return _favoured(scores, num_local, (low + high) / 2)


def _favoured(scores: Tensor, num_local: int, factor: float) -> Tensor:
    out = scores.clone()
    out[:, :num_local] *= factor
    return out


def _ratio_of(scores: Tensor, num_ranks: int, num_topk: int) -> float:
    """Tokens of rank 0 over the average of the others."""
    if num_ranks == 1 or not scores.numel():
        return 1.0
    ranks = scores.topk(num_topk).indices // (scores.shape[1] // num_ranks)
    hit = torch.zeros(scores.shape[0], num_ranks).scatter_(1, ranks, 1.0).sum(0)
    return float(hit[0] / hit[1:].mean().clamp(min=1e-9))


def _precise_scores(
    num_tokens: int,
    num_experts: int,
    num_ranks: int,
    num_topk: int,
    ratio: float,
    generator: torch.Generator | None,
) -> Tensor:
    """Choose ranks first: a share of the tokens goes to rank 0, the rest of the slots round-robin.

    Each token goes to equally many ranks, as many as `ratio` allows, and takes equally many experts
    of each, up to one.
    """
    num_local = num_experts // num_ranks
    min_ranks = ceil_div(num_topk, num_local)  # ranks that have enough experts
    reach = max(min_ranks, min(num_topk, num_ranks, int((num_ranks - 1) / ratio + 1e-9) + 1))
    max_ratio = (num_ranks - 1) / (min_ranks - 1) if min_ranks > 1 else float("inf")
    if num_ranks > 1 and ratio > max_ratio + 1e-9:
        raise ValueError(
            f"ratio must be at most {max_ratio:.3g}, since {num_topk} experts are on {min_ranks} "
            f"of {num_ranks} ranks at least, got {ratio}"
        )
    # A share p of the tokens has rank 0; the others get (reach - p) / (num_ranks - 1) each.
    share = min(1.0, ratio * reach / (num_ranks - 1 + ratio))
    favoured = round(share * num_tokens)
    scores = 0.9 * torch.rand(num_tokens, num_experts, generator=generator)
    order = torch.randperm(num_tokens, generator=generator).tolist()
    others = list(range(1, num_ranks))
    step = 0
    for position, token in enumerate(order):
        ranks = [0] if position < favoured else []
        while len(ranks) < reach:
            ranks.append(others[step % len(others)])
            step += 1
        for slot in range(reach):
            count = num_topk // reach + (slot < num_topk % reach)
            local = torch.randperm(num_local, generator=generator)[:count]
            chosen = 1 - 0.1 * torch.rand(count, generator=generator)
            scores[token, ranks[slot] * num_local + local] = chosen
    return scores
