"""Argument sets of the indexer's gradients."""

from __future__ import annotations

import torch

from tile_kernels.attention.cases.indexer import BF16, E4M3, arguments
from tile_kernels.runtime.cases import (
    Arguments,
    Benchmark,
    Build,
    Cases,
    Reject,
    Sample,
    Vector,
    close_results,
    edited,
    with_value,
)


def _gradients(
    tokens: int,
    keys: int,
    chosen: int,
    heads: int = 4,
    depth: int = 32,
    source: str = BF16,
    exact: bool = False,
    shift: bool = False,
) -> Build:
    """Distinct keys for each query in ascending order, some missing at the end; then any keys."""
    forward = arguments(tokens, keys, heads, depth, source, exact=exact, shift=shift)

    def make(device: torch.device) -> Arguments:
        given = forward(device)
        indices = torch.randint(max(keys, 1), (tokens, chosen), device=device)
        indices = indices.sort(dim=1).values
        indices[:, chosen - chosen // 4 if keys else 0 :] = -1
        grad = torch.randn(tokens, chosen, device=device)
        if exact:
            grad = grad.round()
        return {
            "q": given["q"], "k": given["k"], "weights": given["weights"],
            "indices": indices.int(), "grad": grad,
        }  # fmt: skip

    return make


def _worked() -> Arguments:
    q, k = torch.zeros(1, 2, 32), torch.zeros(2, 32)
    q[0, :, :2] = torch.tensor([[1, 2], [-1, 1]])
    k[:, :2] = torch.tensor([[0, 1], [1, 0]])
    return {
        "q": q.bfloat16(), "k": k.bfloat16(), "weights": torch.tensor([[0.5, 2.0]]),
        "indices": torch.tensor([[0, 1, -1]], dtype=torch.int32),
        "grad": torch.tensor([[1.0, 10.0, 100.0]]),
    }  # fmt: skip


def _expected() -> tuple[torch.Tensor, ...]:
    """Products: key 0 has 2 and 1, key 1 has 1 and -1."""
    of_q, of_k = torch.zeros(1, 2, 32), torch.zeros(2, 32)
    of_q[0, :, :2] = torch.tensor([[0.5 * 10, 0.5 * 1], [0, 2 * 1]])
    of_k[:, :2] = torch.tensor([[0.5 * 1 + 2 * -1, 0.5 * 2 + 2 * 1], [5 * 1, 5 * 2]])
    return of_q, of_k, torch.tensor([[2.0 + 10.0, 1.0]])


INDEXER_LOGITS_BWD = Cases(
    small=[
        Sample("5x70.20", _gradients(5, 70, 20)),
        Sample("no queries", _gradients(0, 70, 20)),
        Sample("no keys", _gradients(2, 0, 0)),
        Sample("no keys.e4m3.20", _gradients(2, 0, 20, source=E4M3)),
        Sample("none chosen", _gradients(2, 70, 0)),
        Sample("one of one", _gradients(1, 1, 1)),
        Sample("exact.3x300.150.64x128", _gradients(3, 300, 150, 64, 128, exact=True)),
        Sample("e4m3.3x70.80", _gradients(3, 70, 80, source=E4M3)),
        Sample("2x70.80.100x64", _gradients(2, 70, 80, 100, 64)),
        Sample("shifted.2x70.20", _gradients(2, 70, 20, shift=True)),
    ],
    large=[
        Sample("300x3000.512.64x128", _gradients(300, 3000, 512, 64, 128)),
        Sample("e4m3.300x3000.512.64x128", _gradients(300, 3000, 512, 64, 128, E4M3)),
        Sample("exact.200x3000.1000.128x128", _gradients(200, 3000, 1000, 128, 128, exact=True)),
        Sample("200x3000.500.64x256", _gradients(200, 3000, 500, 64, 256)),
    ],
    benchmarks=[
        Benchmark("4096x16384.2048.64x128", _gradients(4096, 16384, 2048, 64, 128)),
        Benchmark("e4m3.4096x16384.512.64x128", _gradients(4096, 16384, 512, 64, 128, E4M3)),
    ],
    vectors=[Vector("two heads", _worked, _expected)],
    rejects=[
        Reject("q", "packed", edited("q", lambda x: x.to(torch.int8))),
        Reject("k", "no tensor", edited("k", lambda x: (x, x, x))),
        Reject("weights", "fewer heads", edited("weights", lambda x: x[:, 1:].contiguous())),
        Reject("indices", "fewer", edited("indices", lambda x: x[1:])),
        Reject("grad", "fewer", edited("grad", lambda x: x[:, 1:].contiguous())),
    ],
    bad_values=[
        Reject("indices", "past the end", with_value("indices", 70)),
        Reject("indices", "negative", with_value("indices", -2)),
    ],
    # A product near zero counts or does not, by its sign: one that flips moves all channels of a
    # key, 128 of the 384,000 elements that a sample has.
    compare=close_results(rtol=1e-3, atol=1e-3, strays=1e-3),
)
