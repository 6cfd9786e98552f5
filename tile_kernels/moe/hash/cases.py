"""Argument sets of the hash gate."""

from __future__ import annotations

from typing import Any

import torch

from tile_kernels.moe.samples import (
    GATE_REJECTS,
    SCORING,
    SPECIAL_LOGITS,
    fewer_tokens,
    no_columns,
    physical_map,
)
from tile_kernels.runtime.cases import Arguments, Benchmark, Cases, Reject, Sample, Vector
from tile_kernels.runtime.sampling import (
    builder,
    changed,
    close_results,
    edited,
    picked,
    with_value,
)


@builder
def _gate(
    device: torch.device,
    num_tokens: int,
    num_experts: int,
    num_topk: int,
    scoring_func: str = "sqrtsoftplus",
    *,
    vocabulary: int = 50,
    dtype: torch.dtype = torch.float32,
    ids: torch.dtype = torch.int64,
    entries: torch.dtype = torch.int32,
    shared: int = 0,
    extra: int | None = None,
    masked: bool = False,
    outside: bool = False,
    special: bool = False,
    pad: int = 0,
    ranks: tuple[int, int, int, int] = (0, 1, 0, 1),
) -> Arguments:
    """`pad` elements between rows; `outside`: ids and entries that name nothing, in between."""
    logits = 4 * torch.randn(num_tokens, num_experts + pad, device=device)
    if special and device.type != "meta":
        logits = picked(*logits.shape, device=device, values=SPECIAL_LOGITS)
    beyond = 3 if outside else 0
    token_ids = torch.randint(-beyond, vocabulary + beyond, (num_tokens,), device=device)
    table = torch.randint(-beyond, num_experts + beyond, (vocabulary, num_topk), device=device)
    arguments: Arguments = {
        "logits": logits.to(dtype)[:, :num_experts],
        "token_ids": token_ids.to(ids),
        "table": table.to(entries),
        "routed_scaling_factor": 2.5,
        "scoring_func": scoring_func,
    }
    if masked:
        arguments["mask"] = torch.arange(num_tokens, device=device) % 3 != 1
    if shared:
        arguments["num_shared_experts"] = shared
    if extra is not None:
        arguments.update(physical_map(num_experts + shared, extra, device))
    names = ("ep_rank", "num_ep_ranks", "tp_rank", "num_tp_ranks")
    return {**arguments, **dict(zip(names, ranks))}


# ---- worked examples ----------------------------------------------------------------------------

LOGITS = [[0, 1, 2, -1, 0.5, -0.5], [3, -2, 0, 1, -1, 2], [1.0, 1, 1, 1, 1, 1]]
TABLE = [[0, 3], [2, 5], [4, 1], [1, 1]]
_WEIGHTS = [[1.0189420, 0.4810580], [0.9165684, 0.5834316], [0.75, 0.75]]


def _example(**changes: Any) -> Arguments:
    return {
        "logits": torch.tensor(LOGITS),
        "token_ids": torch.tensor([1, 2, 3]),
        "table": torch.tensor(TABLE),
        "routed_scaling_factor": 1.5,
        **changes,
    }


def _vector(label: str, idx: Any, weights: Any, **changes: Any) -> Vector:
    return Vector(
        label, lambda: _example(**changes), lambda: (torch.tensor(idx), torch.tensor(weights))
    )


_COUNT = torch.tensor([1, 1, 2, 1, 1, 1, 1], dtype=torch.int32)
_MAP = torch.tensor([[0, 0], [1, 1], [2, 7], [3, 3], [4, 4], [5, 5], [6, 6]], dtype=torch.int32)


_HASH_GATE = Cases(
    small=[
        Sample("5x16.top4", _gate(5, 16, 4)),
        Sample("0x16.top4", _gate(0, 16, 4)),
        Sample("1x256.top6", _gate(1, 256, 6)),
        Sample("1x1.top1", _gate(1, 1, 1, vocabulary=1)),
        *(Sample(f"9x72.top6.{s}", _gate(9, 72, 6, s, masked=True)) for s in SCORING),
        *(Sample(f"outside.9x33.{s}", _gate(9, 33, 7, s, outside=True)) for s in SCORING),
        *(
            Sample(f"bfloat16.7x40.{s}", _gate(7, 40, 6, s, dtype=torch.bfloat16, pad=8))
            for s in SCORING
        ),
        *(
            Sample(
                f"shared.5x64.{s}",
                _gate(
                    5, 64, 6, s, shared=2, extra=6, masked=True, outside=True, ranks=(3, 4, 1, 2)
                ),
            )
            for s in SCORING
        ),
        Sample("3x37.top32", _gate(3, 37, 32, "softmax", shared=32, extra=32)),
        Sample("int32.6x20", _gate(6, 20, 3, ids=torch.int32)),
        Sample("int64.6x20", _gate(6, 20, 3, ids=torch.int32, entries=torch.int64)),
        Sample("odd-rows.6x31", _gate(6, 31, 3, "softmax", pad=2, dtype=torch.bfloat16)),
        Sample("special.9x40", _gate(9, 40, 5, special=True)),
        Sample("special.9x40.softmax", _gate(9, 40, 5, "softmax", special=True)),
    ],
    large=[
        *(
            Sample(f"8001x256.{s}", _gate(8001, 256, 6, s, vocabulary=129_280, masked=True))
            for s in SCORING
        ),
        Sample(
            "replicas.100001x64",
            _gate(100_001, 64, 4, extra=40, outside=True, ranks=(5, 4, 1, 2)),
        ),
        Sample("wide.9000001x256", _gate(9_000_001, 256, 6, vocabulary=129_280)),  # > 2^31 logits
    ],
    benchmarks=[
        Benchmark("sqrtsoftplus.8192x256.6", _gate(8192, 256, 6, vocabulary=129_280), goal_us=4.0),
        Benchmark(
            "sigmoid.8192x256.8", _gate(8192, 256, 8, "sigmoid", vocabulary=129_280), goal_us=4.0
        ),
        Benchmark("softmax.8192x256.8", _gate(8192, 256, 8, "softmax", vocabulary=129_280)),
        Benchmark(
            "full.8192x256.6",
            _gate(
                8192,
                256,
                6,
                vocabulary=129_280,
                dtype=torch.bfloat16,
                shared=2,
                extra=32,
                masked=True,
                ranks=(0, 4, 1, 2),
            ),
        ),
    ],
    vectors=[
        _vector("sqrtsoftplus", [[2, 5], [4, 1], [1, 1]], _WEIGHTS),
        _vector(
            "masked, no such id",
            [[2, 5], [-1, -1], [-1, -1]],
            [_WEIGHTS[0], [0.0] * 2, [0.0] * 2],
            token_ids=torch.tensor([1, 2, 4]),
            mask=torch.tensor([True, False, True]),
        ),
        _vector(
            "a slot without expert",
            [[2, 5], [-1, 1], [1, 1]],
            [_WEIGHTS[0], [0, 1.5], [0.75] * 2],
            table=torch.tensor([[0, 3], [2, 5], [-1, 1], [1, 1]]),
        ),
        # Token 0 takes replica (1 + 0) mod 2 of expert 2: number 7. With 3 experts per rank those
        # are 0..2 and 6..7 here, counted 0..2 and 3..4; 3..5 belong to the other rank of two.
        _vector(
            "map, shared, ranks",
            [[4, -1, 3], [-1, 1, 3], [1, 1, 3]],
            [[*row, 1.0] for row in _WEIGHTS],
            num_shared_experts=1,
            to_physical_map=_MAP,
            logical_count=_COUNT,
            ep_rank=1,
            num_ep_ranks=2,
            tp_rank=0,
            num_tp_ranks=2,
        ),
    ],
    bad_values=[
        Reject("token_ids", "below -1", with_value("token_ids", -2)),
        Reject("token_ids", "beyond the table", with_value("token_ids", 50)),
        Reject("table", "below -1", with_value("table", -2)),
        Reject("table", "not an expert", with_value("table", 16)),
        Reject(
            "logical_count",
            "none",
            lambda a: {
                **a,
                **physical_map(16, 3, torch.device("cpu")),
                "logical_count": torch.zeros(16, dtype=torch.int32),
            },
        ),
    ],
    rejects=[
        Reject("logits", "no experts", edited("logits", lambda x: x[:, :0])),
        Reject("logits", "transposed", edited("logits", lambda x: x.t().contiguous().t())),
        fewer_tokens("token_ids"),
        Reject("token_ids", "floats", edited("token_ids", lambda x: x.float())),
        Reject("table", "no rows", edited("table", lambda x: x[:0])),
        no_columns("table"),
        Reject("table", "33 columns", edited("table", lambda x: x[:, :1].repeat(1, 33))),
        *GATE_REJECTS,
        Reject("num_shared_experts", "negative", changed(num_shared_experts=-1)),
        Reject("to_physical_map", "needed", changed(num_shared_experts=1)),
    ],
    compare=close_results(rtol=1e-5, atol=1e-8),
)

CASES = {"hash_gate": _HASH_GATE}
