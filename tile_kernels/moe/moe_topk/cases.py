"""Argument sets of the gate with image bias and of its gradient."""

from __future__ import annotations

from typing import Any

import torch

from tile_kernels.moe.samples import SCORING, SPECIAL_LOGITS, physical_map
from tile_kernels.moe.weight.reference import gate_scores
from tile_kernels.runtime.cases import Arguments, Benchmark, Cases, Reject, Sample, Vector
from tile_kernels.runtime.sampling import (
    INF,
    builder,
    changed,
    close_results,
    edited,
    normal,
    picked,
)


@builder
def _gate(
    device: torch.device,
    num_tokens: int,
    num_experts: int,
    num_topk: int,
    scoring_func: str = "sqrtsoftplus",
    *,
    shared: int = 0,
    extra: int | None = None,
    masked: int = 0,
    biased: bool = True,
    image: bool = False,
    fixed: bool = False,
    random: bool = False,
    unmapped: bool = False,
    scores: bool = False,
    with_scores: bool = False,
    special: bool = False,
    skip: int = 0,
    ids: torch.dtype = torch.int64,
) -> Arguments:
    """`extra` physical experts come with a map; the last tokens are masked."""
    logits = normal(num_tokens, num_experts, device=device, skip=skip)
    if special and num_tokens:
        logits = picked(num_tokens, num_experts, device=device, values=SPECIAL_LOGITS)
        logits[0] = -INF
    token = torch.arange(num_tokens, device=device)
    arguments: Arguments = {
        "logits": logits,
        "num_topk": num_topk,
        "use_shared_as_routed": shared > 0,
        "num_shared_experts": shared,
        "routed_scaling_factor": 1.5,
        "ep_rank": 3,
        "scoring_func": scoring_func,
        "out_dtype": ids,
    }
    if biased:
        arguments["bias"] = torch.randn(num_experts, device=device)
    if image:
        arguments["image_bias"] = torch.randn(num_experts, device=device)
        arguments["image_token_mask"] = token % 2 == 1
    if masked:
        arguments["mask"] = token < num_tokens - masked
    if extra is not None:
        arguments.update(physical_map(num_experts + shared, extra, device))
    if unmapped or fixed:
        choice = torch.randint(num_experts, (num_tokens, num_topk), device=device)
        arguments["unmapped_topk_idx"] = choice.to(ids)
    if fixed:
        arguments["fix_routing_mask"] = token % 3 != 0
    if random:
        arguments["force_random"] = token % 4 == 1
    if scores:
        arguments["scores"] = normal(num_tokens, num_experts, device=device, skip=skip)
    if with_scores:
        arguments["with_scores"] = True
    return arguments


def _everything(
    num_tokens: int, num_experts: int, num_topk: int, scoring: str, **changes: Any
) -> Any:
    options = {
        "shared": 2, "extra": 6, "masked": 1, "image": True, "fixed": True, "random": True,
        "scores": True,
    }  # fmt: skip
    return _gate(num_tokens, num_experts, num_topk, scoring, **{**options, **changes})


def _bad_values(device: torch.device) -> Arguments:
    """Fixed choices outside the experts, experts without replicas or with too many."""
    arguments = _gate(7, 16, 4, fixed=True, extra=3)(device)
    if device.type != "meta":
        arguments["unmapped_topk_idx"] = torch.randint(-3, 20, (7, 4), device=device)
        arguments["logical_count"] = torch.arange(16, dtype=torch.int32, device=device) - 4
    return arguments


def _too_few_to_draw(device: torch.device) -> Arguments:
    """Random experts of fewer physical ones than there are slots: the last slots have none."""
    arguments = _gate(6, 8, 6, random=True, extra=1)(device)
    arguments["logical_count"] = torch.zeros(8, dtype=torch.int32, device=device)
    arguments["logical_count"][:4] = 1
    return arguments


def _row_strided(device: torch.device) -> Arguments:
    arguments = _gate(9, 64, 6, fixed=True)(device)
    arguments["unmapped_topk_idx"] = torch.randint(64, (9, 11), device=device)[:, 2:8]
    return arguments


# ---- worked examples ----------------------------------------------------------------------------

_LOGITS = [[0.0, 1, -1, 2], [0.5, 0.5, 3, -2], [25, -100, 0, 1], [1, 2, 3, 4]]
_SCORES = [
    [0.8325546, 1.1459763, 0.5596979, 1.4583992],
    [0.9869534, 0.9869534, 1.7460204, 0.3562696],
    [5.0, 1.9287499e-22, 0.8325546, 1.1459763],
    [0.0] * 4,
]
_WEIGHTS = [[0.6030133, 0.8969867], [0.5416920, 0.9583080], [1.2858858, 0.2141140], [0.0, 0.0]]
_CHOICE = [[2, 0], [1, 2], [0, 2], [-1, -1]]


def _example(**changes: Any) -> Arguments:
    return {
        "logits": torch.tensor(_LOGITS),
        "num_topk": 2,
        "use_shared_as_routed": False,
        "num_shared_experts": 0,
        "routed_scaling_factor": 1.5,
        "ep_rank": 3,
        "mask": torch.tensor([True, True, True, False]),
        "bias": torch.tensor([0.0, -1, 0.5, -1]),
        **changes,
    }


def _image_example() -> Arguments:
    return _example(
        image_bias=torch.tensor([0.0, 1, 0, 0]),
        image_token_mask=torch.tensor([False, True, False, False]),
        unmapped_topk_idx=torch.zeros(4, 2, dtype=torch.int64),
        scores=torch.full((4, 4), 7.0),
    )


def _mapped_example() -> Arguments:
    physical = [[0, -1], [1, 2], [3, -1], [4, 5], [6, 7]]
    return _example(
        use_shared_as_routed=True,
        num_shared_experts=1,
        to_physical_map=torch.tensor(physical, dtype=torch.int32),
        logical_count=torch.tensor([1, 2, 1, 2, 2], dtype=torch.int32),
        unmapped_topk_idx=torch.zeros(4, 2, dtype=torch.int64),
    )


def _mapped_result() -> Any:
    weights = [
        [0.6030133, 0.8969867, 1.0],
        [0.9583080, 0.5416920, 1.0],
        [1.2858858, 0.2141140, 1.0],
        [0.0, 0.0, 0.0],
    ]
    idx = [[3, 0, 7], [3, 0, 6], [0, 3, 7], [-1, -1, -1]]
    choice = [[2, 0], [2, 0], [0, 2], [-1, -1]]
    return (torch.tensor(idx), torch.tensor(weights)), torch.tensor(choice), None


_FORWARD = Cases(
    small=[
        Sample("5x16.top4", _gate(5, 16, 4, image=True, unmapped=True, scores=True)),
        Sample("0x64.top6", _gate(0, 64, 6, scores=True)),
        Sample("1x256.top8", _gate(1, 256, 8)),
        Sample("1x1.top1", _gate(1, 1, 1, biased=False)),
        *(Sample(f"5x64.all.{s}", _everything(5, 64, 6, s)) for s in SCORING),
        Sample("5x72.all.int32", _everything(5, 72, 6, "sigmoid", ids=torch.int32)),
        Sample("5x36.scores", _gate(5, 36, 6, image=True, biased=False, scores=True, masked=2)),
        Sample("3x37.random", _gate(3, 37, 30, "softmax", random=True, shared=2)),
        Sample("3x600.all", _everything(3, 600, 8, "sigmoid")),
        Sample("3x1030.softmax", _gate(3, 1030, 8, "softmax", scores=True, masked=1)),
        Sample("special.6x72", _gate(6, 72, 6, special=True, scores=True)),
        Sample("special.6x64.softmax", _gate(6, 64, 6, "softmax", special=True, scores=True)),
        Sample("misaligned.5x64", _gate(5, 64, 6, skip=1, scores=True)),
        Sample("5x64.with-scores", _gate(5, 64, 6, image=True, masked=1, with_scores=True)),
        Sample("5x72.with-scores.all", _everything(5, 72, 6, "softmax", with_scores=True)),
        Sample("row-strided", _row_strided),
        Sample("bad-values", _bad_values),
        Sample("too-few-to-draw", _too_few_to_draw),
    ],
    large=[
        *(
            Sample(f"8001x{e}.top{k}.{s}", _everything(8001, e, k, s, extra=32))
            for e, k in [(256, 8), (72, 6), (16, 6), (144, 6)]
            for s in SCORING
        ),
        Sample("replicas.100001x64", _gate(100_001, 64, 4, extra=40)),
        Sample("257x16384", _gate(257, 16384, 30, random=True, scores=True)),
    ],
    benchmarks=[
        Benchmark("sqrtsoftplus.256.6", _gate(8192, 256, 6), goal_us=8.0),
        Benchmark("sqrtsoftplus.256.6.image", _gate(8192, 256, 6, image=True), goal_us=9.0),
        Benchmark("sqrtsoftplus.256.6.scores", _gate(8192, 256, 6, image=True, scores=True)),
        Benchmark("sqrtsoftplus.256.6.all", _everything(8192, 256, 6, "sqrtsoftplus", extra=32)),
        Benchmark("softmax.256.8.scores", _gate(8192, 256, 8, "softmax", scores=True)),
        Benchmark("sqrtsoftplus.256.6.t32", _gate(32, 256, 6, image=True), goal_us=3.5),
    ],
    vectors=[
        Vector(
            "image bias, mask, scores",
            _image_example,
            lambda: (
                (torch.tensor(_CHOICE), torch.tensor(_WEIGHTS)),
                torch.tensor(_CHOICE),
                torch.tensor(_SCORES),
            ),
        ),
        Vector("map, shared", _mapped_example, _mapped_result),
    ],
    bad_values=[
        Reject("unmapped_topk_idx", "not an expert", lambda a: _bad_values(a["logits"].device)),
        Reject(
            "logical_count",
            "beyond the map",
            lambda a: {
                **a,
                "to_physical_map": torch.zeros(16, 2, dtype=torch.int32),
                "logical_count": torch.full((16,), 3, dtype=torch.int32),
            },
        ),
    ],
    rejects=[
        Reject("num_topk", "zero", changed(num_topk=0)),
        Reject("num_topk", "too many", changed(num_topk=17)),
        Reject("scoring_func", "unknown", changed(scoring_func="relu")),
        Reject("scoring_func", "identity", changed(scoring_func="identity")),
        Reject("routed_scaling_factor", "a string", changed(routed_scaling_factor="1")),
        Reject("ep_rank", "negative", changed(ep_rank=-1)),
        Reject(
            "num_shared_experts", "slots", changed(use_shared_as_routed=True, num_shared_experts=29)
        ),
        Reject("use_shared_as_routed", "an int", changed(use_shared_as_routed=1)),
        Reject("mask", "too short", changed(mask=torch.ones(4, dtype=torch.bool))),
        Reject("bias", "too long", changed(bias=torch.zeros(17))),
        Reject("image_bias", "alone", changed(image_token_mask=None)),
        Reject("image_token_mask", "float", changed(image_token_mask=torch.ones(5))),
        Reject("force_random", "too short", changed(force_random=torch.ones(4, dtype=torch.bool))),
        Reject("logical_count", "alone", changed(logical_count=torch.ones(16, dtype=torch.int32))),
        Reject("scores", "half", edited("scores", torch.Tensor.half)),
        Reject("out_dtype", "int16", changed(out_dtype=torch.int16)),
        Reject("unmapped_topk_idx", "another dtype", changed(out_dtype=torch.int32)),
        Reject("with_scores", "an int", changed(with_scores=1)),
        Reject(
            "fix_routing_mask",
            "no choice",
            changed(fix_routing_mask=torch.ones(5, dtype=torch.bool), unmapped_topk_idx=None),
        ),
    ],
    compare=close_results(rtol=1e-5, atol=1e-8),
)


# ---- gradient -----------------------------------------------------------------------------------


@builder
def _backward(
    device: torch.device,
    num_tokens: int,
    num_experts: int,
    num_topk: int,
    scoring_func: str = "sqrtsoftplus",
    *,
    sequences: int = 0,
    scores: bool = False,
    masked: bool = False,
    strided: bool = False,
    skip: int = 0,
    ids: torch.dtype = torch.int64,
) -> Arguments:
    """A choice from -1 to a little beyond the experts, with repetitions."""
    logits = normal(num_tokens, num_experts, device=device, skip=skip).mul_(2)
    wide = num_topk + 2 if strided else num_topk
    arguments: Arguments = {
        "scores": logits.copy_(gate_scores(logits, scoring_func)),
        "topk_idx": torch.randint(-1, num_experts + 2, (num_tokens, num_topk), device=device).to(
            ids
        ),
        "topk_weights": torch.rand(num_tokens, wide, device=device)[:, :num_topk],
        "grad_topk_weights": normal(num_tokens, wide, device=device)[:, :num_topk],
        "routed_scaling_factor": 2.5,
        "scoring_func": scoring_func,
    }
    if sequences:
        arguments["grad_scores_sum"] = normal(sequences, num_experts, device=device)
    if scores:
        arguments["grad_scores"] = normal(num_tokens, num_experts, device=device)
    if masked:
        arguments["mask"] = torch.arange(num_tokens, device=device) % 3 != 1
    return arguments


def _without_scores(device: torch.device) -> Arguments:
    """Tokens whose scores are all 0, as those with random experts have them."""
    arguments = _backward(6, 24, 4, sequences=2)(device)
    arguments["scores"][1:3] = 0
    return arguments


def _backward_example(with_loss: bool) -> Arguments:
    arguments: Arguments = {
        "scores": torch.tensor(_SCORES),
        "topk_idx": torch.tensor(_CHOICE),
        "topk_weights": torch.tensor(_WEIGHTS),
        "grad_topk_weights": torch.tensor([[1.0, 0], [0.5, -1], [2, 1], [1, 1]]),
        "routed_scaling_factor": 1.5,
    }
    if with_loss:
        arguments["mask"] = torch.tensor([True, True, True, False])
        arguments["grad_scores_sum"] = torch.tensor([[1.0, 0, -1, 2], [0.5, 0.5, 0, 0]])
    return arguments


_GRADIENT = [
    [-0.1300577, 0, 0.1547897, 0],
    [0, 0.1658614, -0.0811013, 0],
    [0.0036710, 0, -0.0662020, 0],
    [0.0, 0, 0, 0],
]
_GRADIENT_WITH_LOSS = [
    [-0.1148873, -0.0636946, 0.0466984, 0.0908132],
    [0.0782453, 0.1667444, -0.1472587, 0.0825514],
    [0.0057024, 0, -0.0816168, -0.0163741],
    [0.0, 0, 0, 0],
]

_BACKWARD = Cases(
    small=[
        Sample("6x33.top7", _backward(6, 33, 7, sequences=2)),
        Sample("0x8.top2", _backward(0, 8, 2)),
        Sample("1x256.top8", _backward(1, 256, 8, scores=True)),
        Sample("1x1.top1", _backward(1, 1, 1)),
        *(Sample(f"9x64.top6.{s}", _backward(9, 64, 6, s, ids=torch.int32)) for s in SCORING),
        *(
            Sample(f"6x72.all.{s}", _backward(6, 72, 6, s, sequences=3, scores=True, masked=True))
            for s in SCORING
        ),
        Sample("5x600.softmax", _backward(5, 600, 32, "softmax", sequences=1, scores=True)),
        Sample("5x600", _backward(5, 600, 8, sequences=5)),
        Sample("strided", _backward(5, 64, 6, strided=True)),
        Sample("misaligned", _backward(5, 64, 6, scores=True, skip=1)),
        Sample("without-scores", _without_scores),
    ],
    large=[
        Sample(f"8001x256.{s}", _backward(8001, 256, 8, s, sequences=9, masked=True))
        for s in SCORING
    ],
    benchmarks=[
        Benchmark("sqrtsoftplus.256.6", _backward(8192, 256, 6)),
        Benchmark("sqrtsoftplus.256.6.loss", _backward(8192, 256, 6, sequences=2, masked=True)),
        Benchmark("sqrtsoftplus.256.6.scores", _backward(8192, 256, 6, scores=True)),
        Benchmark("softmax.256.8", _backward(8192, 256, 8, "softmax")),
    ],
    vectors=[
        Vector("gate", lambda: _backward_example(False), lambda: torch.tensor(_GRADIENT)),
        Vector(
            "with a loss of the scores",
            lambda: _backward_example(True),
            lambda: torch.tensor(_GRADIENT_WITH_LOSS),
        ),
    ],
    bad_values=[
        Reject("topk_idx", "below -1", edited("topk_idx", lambda x: x.fill_(-2))),
        Reject("topk_idx", "too large", edited("topk_idx", lambda x: x.fill_(10_000))),
    ],
    rejects=[
        Reject("topk_idx", "no columns", edited("topk_idx", lambda x: x[:, :0])),
        Reject("topk_idx", "other tokens", edited("topk_idx", lambda x: x[:-1])),
        Reject("topk_weights", "half", edited("topk_weights", torch.Tensor.half)),
        Reject("grad_topk_weights", "fewer", edited("grad_topk_weights", lambda x: x[:, 1:])),
        Reject("scoring_func", "unknown", changed(scoring_func="relu")),
        Reject("grad_scores_sum", "no divisor", changed(grad_scores_sum=torch.zeros(4, 33))),
        Reject("grad_scores", "too few", changed(grad_scores=torch.zeros(5, 33))),
        Reject("routed_scaling_factor", "a bool", changed(routed_scaling_factor=True)),
    ],
    # As for `topk_weights_backward`: differences that may cancel.
    compare=close_results(rtol=1e-4, atol=4e-6),
)

CASES = {"moe_topk_gate_forward": _FORWARD, "moe_topk_gate_backward": _BACKWARD}
