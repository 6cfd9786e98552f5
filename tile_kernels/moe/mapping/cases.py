"""Argument sets of the mapping."""

from __future__ import annotations

import torch

from tile_kernels.moe.mapping.reference import max_expanded_tokens
from tile_kernels.moe.samples import no_columns, outside
from tile_kernels.runtime.cases import Arguments, Benchmark, Cases, Reject, Sample, Vector
from tile_kernels.runtime.sampling import builder, changed

# What one of 8 ranks receives when each sends 4096 tokens to 8 of 256 experts, 32 of them here:
# the tokens that chose at least one of its experts, about 1.5 each.
ROUTED_TOKENS, ROUTED_TOPK, ROUTED_EXPERTS = 21504, 8, 32


def routed_topk_idx(
    num_tokens: int, num_topk: int, num_experts: int, share: float, device: torch.device
) -> torch.Tensor:
    """Random experts, distinct in a row; a slot is -1 unless chance (`share`) keeps it."""
    if device.type == "meta" or num_tokens == 0:
        return torch.empty(num_tokens, num_topk, dtype=torch.int64, device=device)
    scores = torch.rand(num_tokens, max(num_experts, num_topk), device=device)
    chosen = scores.topk(num_topk, dim=1).indices
    kept = torch.rand(num_tokens, num_topk, device=device) < share
    return torch.where(kept & (chosen < num_experts), chosen, -1)


@builder
def _mapping(
    device: torch.device,
    num_tokens: int,
    num_topk: int,
    num_experts: int,
    alignment: int,
    *,
    rows: int | None = None,
    share: float = 0.6,
) -> Arguments:
    """`rows` None: as many as can be needed."""
    max_rows = max_expanded_tokens(num_tokens * num_topk, num_experts, alignment)
    return {
        "topk_idx": routed_topk_idx(num_tokens, num_topk, num_experts, share, device),
        "num_experts": num_experts,
        "num_expanded_tokens": max_rows if rows is None else rows,
        "alignment": alignment,
    }


def _bad_values(device: torch.device) -> Arguments:
    arguments = _mapping(50, 3, 5, 8)(device)
    return {**arguments, "topk_idx": torch.randint(-4, 9, (50, 3), device=device)}


@builder
def _overflowing(device: torch.device, rows: int) -> Arguments:
    """With a buffer for the number of choices that found no row."""
    arguments = _mapping(90, 4, 6, 16, rows=rows)(device)
    return {**arguments, "overflow": torch.full((1,), -7, dtype=torch.int32, device=device)}


def _one_expert(device: torch.device) -> Arguments:
    arguments = _mapping(300, 2, 7, 16)(device)
    return {**arguments, "topk_idx": torch.full((300, 2), 5, device=device)}


_CHOSEN = [[0, 2], [2, -1], [0, 3], [2, 0]]
_ROWS = (
    [0, 0, 0, -1, 2, 2, 2, -1, 3, -1, -1, -1],
    [0, 2, 3, -1, 0, 1, 3, -1, 2, -1, -1, -1],
    [0, 4, 7, -1, 1, 2, 6, -1, 5, -1, -1, -1],
)
_POSITIONS = [[0, 4], [5, -1], [1, 8], [6, 2]]


def _arguments(num_expanded_tokens: int) -> Arguments:
    return {
        "topk_idx": torch.tensor(_CHOSEN),
        "num_experts": 4,
        "num_expanded_tokens": num_expanded_tokens,
        "alignment": 4,
    }


def _tensors(*values: object) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor(value, dtype=torch.int32) for value in values)


_EXPERTS = ([0, 4, 4, 8], [4, 4, 8, 12], [4, 0, 4, 4])

_GET_FUSED_MAPPING = Cases(
    small=[
        Sample("40x3.7", _mapping(40, 3, 7, 4)),
        Sample("0x8.4", _mapping(0, 8, 4, 16, rows=32)),
        Sample("0x8.sync", _mapping(0, 8, 4, 16, rows=0)),
        Sample("1x1.1", _mapping(1, 1, 1, 1, share=1.0)),
        Sample("1x8.9", _mapping(1, 8, 9, 128, rows=0)),
        Sample("129x6.16.sync", _mapping(129, 6, 16, 64, rows=0)),
        Sample("700x8.32", _mapping(700, 8, 32, 128)),  # several chunks
        Sample("700x8.600", _mapping(700, 8, 600, 3, share=1.0)),  # more experts than threads
        Sample("20x6.4096", _mapping(20, 6, 4096, 2, rows=300)),
        Sample("20x6.8192", _mapping(20, 6, 8192, 1, rows=200)),
        Sample("all-masked", _mapping(33, 2, 4, 8, share=0.0)),
        Sample("too-few-rows", _mapping(90, 4, 6, 16, rows=150)),
        Sample("one-row", _mapping(90, 4, 6, 16, rows=1)),
        *(Sample(f"overflow.{n}", _overflowing(n)) for n in (0, 1, 50, 150, 1000)),
        Sample("more-rows", _mapping(30, 2, 4, 4, rows=1000)),
        Sample("one-expert", _one_expert),
        Sample("bad-values", _bad_values),
    ],
    large=[
        *(
            Sample(f"{t}x{k}.{e}.{a}", _mapping(t, k, e, a, rows=0, share=0.2))
            for t, k, e in [(7500, 2, 9), (21504, 8, 32), (34001, 9, 4), (12001, 6, 4096)]
            for a in (1, 64, 128)
        ),
        Sample("1000003x8.256", _mapping(1_000_003, 8, 256, 128, share=1.0)),
    ],
    benchmarks=[
        Benchmark(
            "nosync",
            _mapping(ROUTED_TOKENS, ROUTED_TOPK, ROUTED_EXPERTS, 128, share=0.19),
            goal_us=8.0,
        ),
        Benchmark("256", _mapping(8192, 8, 256, 128, share=1.0)),
        Benchmark("64x8", _mapping(64, 8, 256, 16, share=1.0)),
    ],
    vectors=[
        Vector(
            "as many as needed",
            lambda: _arguments(0),
            lambda: ((*_tensors(*_ROWS, _POSITIONS, *_EXPERTS), [4, 0, 4, 4]), None),
        ),
        Vector(
            "16 rows",
            lambda: _arguments(16),
            lambda: (
                (*_tensors(*([*row, -1, -1, -1, -1] for row in _ROWS), _POSITIONS, *_EXPERTS), []),
                None,
            ),
        ),
        Vector(
            "5 rows: the rest is dropped",
            lambda: {**_arguments(5), "overflow": torch.zeros(1, dtype=torch.int32)},
            lambda: (
                (
                    *_tensors(
                        *(row[:5] for row in _ROWS),
                        [[0, 4], [-1, -1], [1, -1], [-1, 2]],
                        [0, 4, 4, 5],
                        [4, 4, 5, 5],
                        [4, 0, 1, 0],
                    ),
                    [],
                ),
                torch.tensor([3], dtype=torch.int32),
            ),
        ),
    ],
    bad_values=outside("topk_idx"),
    rejects=[
        no_columns("topk_idx"),
        Reject("num_experts", "zero", changed(num_experts=0)),
        Reject("num_experts", "too many", changed(num_experts=8193)),
        Reject("alignment", "zero", changed(alignment=0)),
        Reject("num_expanded_tokens", "negative", changed(num_expanded_tokens=-1)),
        Reject("num_expanded_tokens", "too many", changed(num_expanded_tokens=2**30)),
        Reject("overflow", "float", changed(overflow=torch.zeros(1))),
        Reject("force_no_sync", "an int", changed(force_no_sync=1)),
    ],
)

CASES = {"get_fused_mapping": _GET_FUSED_MAPPING}
