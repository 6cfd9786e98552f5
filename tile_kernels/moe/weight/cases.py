"""Argument sets of `topk_weights` and `normalize_weight`."""

from __future__ import annotations

import torch

from tile_kernels.moe.samples import SCORING, fewer_tokens, no_columns, outside
from tile_kernels.runtime.cases import Arguments, Benchmark, Cases, Reject, Sample, Vector
from tile_kernels.runtime.sampling import INF, builder, changed, close_results, edited, normal

# ---- weights of a given choice ------------------------------------------------------------------


@builder
def _chosen(
    device: torch.device,
    num_tokens: int,
    num_experts: int,
    num_topk: int,
    scoring_func: str,
    skip: int = 0,
) -> Arguments:
    """Choices from -1 to a little beyond the experts."""
    return {
        "logits": normal(num_tokens, num_experts, device=device, skip=skip).mul_(4),
        "topk_idx": torch.randint(-1, num_experts + 2, (num_tokens, num_topk), device=device),
        "scoring_func": scoring_func,
        "routed_scaling_factor": 2.5,
    }


_TOPK_WEIGHTS = Cases(
    small=[
        *(
            Sample(f"{t}x{e}.top{k}.{s}", _chosen(t, e, k, s))
            for t, e, k in [(0, 8, 2), (1, 256, 8), (1, 1, 1), (5, 33, 7), (9, 64, 32)]
            for s in SCORING
        ),
        Sample("misaligned", _chosen(5, 64, 6, "softmax", skip=1)),
    ],
    large=[Sample(f"8001x256.{s}", _chosen(8001, 256, 8, s)) for s in SCORING],
    benchmarks=[Benchmark(f"{s}.256.8", _chosen(8192, 256, 8, s)) for s in SCORING],
    vectors=[
        Vector(
            "hash gate",
            lambda: {
                "logits": torch.tensor(
                    [[0, 1, 2, -1, 0.5, -0.5], [3, -2, 0, 1, -1, 2], [1.0, 1, 1, 1, 1, 1]]
                ),
                "topk_idx": torch.tensor([[2, 5], [4, 1], [1, 1]]),
                "scoring_func": "sqrtsoftplus",
                "routed_scaling_factor": 1.5,
            },
            lambda: torch.tensor([[1.0189420, 0.4810580], [0.9165684, 0.5834316], [0.75, 0.75]]),
        )
    ],
    bad_values=outside("topk_idx"),
    rejects=[
        no_columns("topk_idx"),
        fewer_tokens("topk_idx"),
        Reject("scoring_func", "unknown", changed(scoring_func="relu")),
        Reject("logits", "no experts", edited("logits", lambda x: x[:, :0])),
        Reject("routed_scaling_factor", "a bool", changed(routed_scaling_factor=True)),
    ],
    compare=close_results(rtol=1e-5, atol=1e-8),
)


@builder
def _backward(
    device: torch.device, num_tokens: int, num_experts: int, num_topk: int, scoring_func: str,
    skip: int = 0,
) -> Arguments:  # fmt: skip
    arguments = _chosen(num_tokens, num_experts, num_topk, scoring_func, skip)(device)
    return {"grad_weights": normal(num_tokens, num_topk, device=device), **arguments}


_TOPK_WEIGHTS_BACKWARD = Cases(
    small=[
        *(
            Sample(f"{t}x{e}.top{k}.{s}", _backward(t, e, k, s))
            for t, e, k in [(5, 33, 7), (0, 8, 2), (1, 256, 8), (1, 1, 1), (9, 64, 32)]
            for s in SCORING
        ),
        Sample("misaligned", _backward(5, 64, 6, "softmax", skip=1)),
    ],
    large=[Sample(f"8001x256.{s}", _backward(8001, 256, 8, s)) for s in SCORING],
    benchmarks=[Benchmark(f"{s}.256.8", _backward(8192, 256, 8, s)) for s in SCORING],
    vectors=[
        Vector(
            "gate",
            lambda: {
                "grad_weights": torch.tensor([[1.0, 0.0], [0.5, -1.0], [1.0, 2.0]]),
                "logits": torch.tensor(
                    [[0, 1, 2, -1, 0.5, -0.5], [3, -2, 0, 1, -1, 2], [1.0, 1, 1, 1, 1, 1]]
                ),
                "topk_idx": torch.tensor([[2, 5], [4, 1], [1, 1]]),
                "scoring_func": "sqrtsoftplus",
                "routed_scaling_factor": 1.5,
            },
            lambda: torch.tensor(
                [
                    [0.0, 0.0, 0.0676626, 0.0, 0.0, -0.1301189],
                    [0.0, -0.2511044, 0.0, 0.0, 0.2295489, 0.0],
                    [0.0] * 6,
                ]
            ),
        )
    ],
    bad_values=outside("topk_idx"),
    rejects=[
        no_columns("topk_idx"),
        fewer_tokens("topk_idx"),
        Reject("grad_weights", "half", edited("grad_weights", torch.Tensor.half)),
        Reject("scoring_func", "unknown", changed(scoring_func="relu")),
    ],
    # Gradients of logits are differences that may cancel: on an H200 one of 2 million elements,
    # 2.6e-7, was 1.1e-6 off.
    compare=close_results(rtol=1e-4, atol=4e-6),
)


# ---- normalization of given weights -------------------------------------------------------------


@builder
def _weights(device: torch.device, num_tokens: int, num_topk: int, skip: int = 0) -> Arguments:
    flat = torch.rand(num_tokens * num_topk + skip, device=device)
    return {"topk_weights": flat[skip:].view(num_tokens, num_topk)}


def _extreme_weights(device: torch.device) -> Arguments:
    """Cancellation, denormals, overflow; nothing that gives NaN, whose bits differ by device."""
    rows = [[0.0, 0.0, 1.0], [1e30, 1e-30, -1e30], [1e-38, 1e-44, 3e-39], [3e38] * 3]
    return {"topk_weights": torch.tensor(rows, device=device)}


_NORMALIZE_WEIGHT = Cases(
    small=[
        *(
            Sample(f"{t}x{k}", _weights(t, k))
            for t, k in [(0, 8), (1, 8), (1, 1), (127, 6), (129, 8), (130, 9), (33, 64), (5, 65)]
        ),
        Sample("long.3x200", _weights(3, 200)),
        Sample("misaligned.40x8", _weights(40, 8, skip=1)),
        Sample("extreme", _extreme_weights),
    ],
    large=[Sample(f"{t}x{k}", _weights(t, k)) for t in (4001, 34345) for k in (2, 6, 8, 9)],
    benchmarks=[Benchmark("32768x8", _weights(32768, 8), goal_us=2.1)],
    vectors=[
        Vector(
            "exact",
            lambda: {"topk_weights": torch.tensor([[1.0, 2.0, 3.0, 2.0]])},
            lambda: (torch.tensor([8.0]), torch.tensor([[0.125, 0.25, 0.375, 0.25]])),
        ),
        Vector(
            "sum of one",
            lambda: {"topk_weights": torch.tensor([[0.1, 0.2, 0.3, 0.4]])},
            lambda: (torch.tensor([1.0]), torch.tensor([[0.1, 0.2, 0.3, 0.4]])),
        ),
        Vector(
            "zeros, cancellation",
            lambda: {"topk_weights": torch.tensor([[0.0, 0.0], [1.0, -1.0]])},
            lambda: (torch.tensor([1e-20, 0.0]), torch.tensor([[0.0, 0.0], [INF, -INF]])),
        ),
    ],
    rejects=[
        no_columns("topk_weights"),
        Reject("topk_weights", "half precision", edited("topk_weights", torch.Tensor.half)),
    ],
)

CASES = {
    "topk_weights": _TOPK_WEIGHTS,
    "topk_weights_backward": _TOPK_WEIGHTS_BACKWARD,
    "normalize_weight": _NORMALIZE_WEIGHT,
}
