"""Argument sets of the gradients of attention over shared rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tile_kernels.attention.hca import cases as hca_cases
from tile_kernels.attention.hca import reference as hca_reference
from tile_kernels.attention.softmax_samples import (
    QUERY_REJECTS,
    SEQUENCE_BAD_VALUES,
    SEQUENCE_REJECTS,
    compare_norms,
    row_rejects,
)
from tile_kernels.attention.sparse import cases as sparse_cases
from tile_kernels.attention.sparse import reference as sparse_reference
from tile_kernels.runtime.cases import Arguments, Benchmark, Build, Cases, Reject, Sample, Vector
from tile_kernels.runtime.sampling import assert_equal_results, edited, with_value

# p and ds are rounded to bfloat16 before their products, and so is each result once: grad_q, or a
# piece of grad_kv. Each rounding is up to 2**-9 of a number, 2**-8 next to a power of two. Norms of
# differences are about 2.7e-3 of norms in emulated samples; the specification allows 1e-2.
_NORM, _ELEMENT, _ATOL = 5e-3, 2.0**-6, 1e-5


def compare(result: Any, expected: Any) -> None:
    """Gradients of queries, of rows and of sinks, to the tolerances of their precision."""
    assert_equal_results((type(result), len(result)), (type(expected), len(expected)))
    for at, (one, other) in enumerate(zip(result, expected)):
        compare_norms(f"gradient {at}", one, other, _NORM, _ELEMENT, _ATOL)


def _results(attended: Any, given: Arguments, *operands: Any) -> Arguments:
    """`grad`, `out` and `lse`, those by the reference of the attention."""
    q = given["q"]
    out, lse = q.new_empty(*q.shape[:2], 512), q.new_empty(q.shape[:2], dtype=torch.float32)
    grad = torch.randn(out.shape, device=q.device).bfloat16()
    if q.device.type != "meta":
        out, _, lse = attended(*operands)
    return {"grad": grad, "out": out, "lse": lse}


def sparse_arguments(*sizes: int, **how: Any) -> Build:
    """Arguments of `sparse_attention` and its results; see there."""
    forward = sparse_cases.arguments(*sizes, **how)

    def make(device: torch.device) -> Arguments:
        given = forward(device)
        del given["return_stats"]
        operands = [given[name] for name in ("q", "kv", "indices", "sm_scale")]
        others = given.get("sink"), given.get("topk_length")
        return given | _results(sparse_reference.attended, given, *operands, *others)

    return make


def _everyone(num_tokens: int, heads: int, num_rows: int, k: int) -> Build:
    """All queries choose row 3, the others are among the first half of the rows."""

    def make(device: torch.device) -> Arguments:
        given = sparse_arguments(num_tokens, heads, num_rows // 2, k)(device)
        given["indices"][:, k // 2] = 3
        kv = torch.cat((given["kv"], given["kv"]))
        if device.type != "meta":
            operands = (given["q"], kv, given["indices"], given["sm_scale"])
            given["out"], _, given["lse"] = sparse_reference.attended(*operands)
        return given | {"kv": kv}

    return make


def _low(num_tokens: int, heads: int, num_rows: int, k: int) -> Build:
    """Logits are so low that the logit 0 of a row that is none would have an infinite weight."""

    def make(device: torch.device) -> Arguments:
        given = sparse_arguments(num_tokens, heads, num_rows, k)(device)
        given |= {"q": 8 * given["q"].abs(), "kv": -given["kv"].abs()}
        given["indices"][:, ::3] = -1
        if device.type != "meta":
            operands = [given[name] for name in ("q", "kv", "indices", "sm_scale")]
            given["out"], _, given["lse"] = sparse_reference.attended(*operands)
        return given

    return make


def _worked() -> Arguments:
    """One head and two rows of weight 1/2 each; `grad . value` is 0 and 2, `grad . out` 1."""
    q, kv, grad = torch.zeros(1, 1, 512), torch.zeros(3, 512), torch.zeros(1, 1, 512)
    q[0, 0, 1], kv[1, 0], kv[2, 3], grad[0, 0, 0] = 8.0, 2.0, 1.0, 1.0
    out = (kv[:1] + kv[1:2]) / 2
    return {
        "q": q.bfloat16(), "kv": kv.bfloat16(), "grad": grad.bfloat16(),
        "indices": torch.tensor([[0, 1, -1]], dtype=torch.int32), "out": out[None].bfloat16(),
        "lse": torch.tensor([[2.0]]).log(), "sm_scale": 0.5,
    }  # fmt: skip


def _worked_gradients() -> tuple[Tensor, Tensor, Tensor]:
    """`ds` is -1/2 and 1/2: 1/4 of row 1 for the query, -2 and 2 of channel 1 for rows."""
    grad_q, grad_kv = torch.zeros(1, 1, 512), torch.zeros(3, 512)
    grad_q[0, 0, 0] = 0.5 * 0.5 * 2
    grad_kv[:2, 0], grad_kv[:2, 1] = 0.5, torch.tensor([-2.0, 2.0])
    return grad_q.bfloat16(), grad_kv, torch.zeros(1)


def _goal(num_tokens: int, heads: int, k: int, width: int, tflops: float) -> float:
    return round(2 * num_tokens * heads * k * (3 * width + 2 * 512) / tflops / 1e6, 1)


SPARSE_ATTENTION_BWD = Cases(
    small=[
        Sample("3x2.70 of 90", sparse_arguments(3, 2, 90, 70, sink="normal", lengths=True)),
        Sample("no tokens", sparse_arguments(0, 2, 9, 5)),
        Sample("no rows", sparse_arguments(2, 3, 0, 5, sink="normal")),
        Sample("no indices", sparse_arguments(2, 3, 5, 0, sink="normal")),
        Sample("one of one", sparse_arguments(1, 1, 1, 1)),
        Sample("two blocks.2x65.130 of 200", sparse_arguments(2, 65, 200, 130, sink="normal")),
        Sample("wild.7x2.130 of 150",
               sparse_arguments(7, 2, 150, 130, sink="wild", lengths=True, invalid=True)),
        Sample("576.strided.6x3.70 of 90",
               sparse_arguments(6, 3, 90, 70, width=576, pad=8, invalid=True)),
        Sample("nan.3x2.65 of 80", sparse_arguments(3, 2, 80, 65, special="nan")),
        Sample("everyone.9x3.20 of 60", _everyone(9, 3, 60, 20)),
        Sample("low.2x3.20 of 60", _low(2, 3, 60, 20)),
    ],
    large=[
        *(Sample(f"{num_tokens}x{heads}x{width}.{k} of {num_rows}",
                 sparse_arguments(num_tokens, heads, num_rows, k, width=width, sink=sink,
                                  lengths=dirty, invalid=dirty))
          for num_tokens, heads, width, num_rows, k, sink, dirty in (
              (1, 64, 512, 128, 128, "", False), (62, 128, 512, 592, 128, "normal", True),
              (213, 64, 512, 1840, 256, "wild", True), (62, 64, 576, 1592, 384, "", True),
              (213, 128, 576, 1521, 512, "normal", True), (1, 128, 576, 95, 128, "wild", False),
              (62, 128, 512, 114, 384, "", True), (62, 64, 512, 32, 2048, "normal", False),
              (62, 128, 576, 64, 1024, "normal", True),
              (213, 128, 512, 3000, 1152, "normal", False),
          )),
        *(Sample(f"k {k}", sparse_arguments(62, 64, 1700, k, lengths=True, invalid=True))
          for k in (1, 63, 64, 65)),
        *(Sample(f"{heads} heads", sparse_arguments(33, heads, 900, 300, sink="normal"))
          for heads in (1, 96, 200)),
        Sample("everyone", _everyone(213, 128, 2000, 256)),
        Sample("chunks", sparse_arguments(700, 128, 5000, 1152, sink="normal", lengths=True)),
        Sample("many tokens", sparse_arguments(70000, 1, 500, 70, sink="normal")),
        Sample("over 2**31", sparse_arguments(40, 64, 2**22 + 1000, 200, sink="normal")),
    ],
    benchmarks=[
        Benchmark(
            "128 heads.1024+128 of 16384",
            sparse_arguments(4096, 128, 16384, 1152, sink="normal"),
            goal_us=_goal(4096, 128, 1152, 512, 250),
        ),
        Benchmark(
            "64 heads.512+128 of 16384",
            sparse_arguments(4096, 64, 16384, 640, sink="normal"),
            goal_us=_goal(4096, 64, 640, 512, 250),
        ),
        Benchmark(
            "128 heads.576.2048 of 32768",
            sparse_arguments(4096, 128, 32768, 2048, width=576),
            goal_us=_goal(4096, 128, 2048, 576, 250),
        ),
    ],
    vectors=[Vector("two rows", _worked, _worked_gradients)],
    rejects=[
        *QUERY_REJECTS,
        *row_rejects("kv"),
        Reject("indices", "int64", edited("indices", lambda x: x.long())),
        Reject("grad", "float32", edited("grad", lambda x: x.float())),
        Reject("out", "of other queries", edited("out", lambda x: x[1:])),
        Reject("lse", "of other heads", edited("lse", lambda x: x[:, 1:])),
        Reject("topk_length", "int64", edited("topk_length", lambda x: x.long())),
    ],
    bad_values=[
        Reject("indices", "after the last row", with_value("indices", 90)),
        Reject("topk_length", "negative", with_value("topk_length", -1)),
    ],
    compare=compare,
)  # fmt: skip

# ---- windows and all entries ---------------------------------------------------------------------


def hca_arguments(bounds: tuple[int, ...], num_tokens: int, heads: int, **how: Any) -> Build:
    """Arguments of `hca_attention` and its results; see there."""
    forward = hca_cases.arguments(bounds, num_tokens, heads, **how)

    def make(device: torch.device) -> Arguments:
        given = forward(device)
        del given["return_stats"]
        names = ("q", "window_kv", "entries", "sm_scale", "cu_seqlens", "ratio", "window")
        operands = [given[name] for name in names]
        return given | _results(hca_reference.attended, given, *operands, given.get("sink"))

    return make


def _worked_hca() -> Arguments:
    """Token 1 sees both rows and the entry, each of weight 1/3; gradients are of channel 0."""
    zeros, grad = torch.zeros(2, 1, 512).bfloat16(), torch.zeros(2, 1, 512)
    grad[:, 0, 0] = torch.tensor([2.0, 3.0])
    return {
        "q": zeros, "window_kv": zeros[:, 0], "entries": zeros[:1, 0], "grad": grad.bfloat16(),
        "out": zeros, "lse": torch.tensor([[1.0], [3.0]]).log(), "sm_scale": 1.0,
        "cu_seqlens": torch.tensor([0, 2], dtype=torch.int32), "ratio": 2, "window": 2,
    }  # fmt: skip


def _worked_hca_gradients() -> tuple[Tensor, ...]:
    grads = torch.zeros(3, 512)
    grads[:, 0] = torch.tensor([2.0 + 1.0, 1.0, 1.0])
    return torch.zeros(2, 1, 512).bfloat16(), grads[:2], grads[2:], torch.zeros(1)


HCA_ATTENTION_BWD = Cases(
    small=[
        Sample("5x2", hca_arguments((0, 3, 5), 5, 2, ratio=2, window=3, num_entries=4,
                                    sink="normal")),
        Sample("no tokens", hca_arguments((0, 0), 0, 2, num_entries=3)),
        Sample("one token", hca_arguments((0, 1), 1, 1, ratio=1, window=1)),
        Sample("no entries", hca_arguments((0, 3), 3, 2, ratio=128)),
        Sample("windows alone.6x2",
               hca_arguments((1, 4, 6), 6, 2, ratio=0, window=2, sink="normal")),
        Sample("strided.576.3x65", hca_arguments((0, 3), 3, 65, ratio=1, window=3, width=576,
                                                 pad=8)),
        Sample("nan.9x2", hca_arguments((2, 7), 9, 2, ratio=2, window=2, special="nan")),
        Sample("missing.6x2", hca_arguments((0, 6), 6, 2, ratio=1, window=2, num_entries=3)),
    ],
    large=[
        *(Sample(f"{width}.{heads} heads",
                 hca_arguments((0, 100, 101, 600), 600, heads, ratio=4, width=width, sink="normal"))
          for width in (512, 576) for heads in (3, 64, 128)),
        Sample("windows alone", hca_arguments((7, 300, 990), 1000, 64, ratio=0, sink="normal")),
        Sample("window 200", hca_arguments((0, 700), 700, 64, ratio=7, window=200, pad=8)),
        Sample("heavy", hca_arguments((0, 2000, 5000), 5000, 16, ratio=128, sink="normal")),
        Sample("many sequences",
               hca_arguments(tuple(range(0, 1001, 2)), 1000, 16, ratio=1, window=3)),
    ],
    benchmarks=[
        Benchmark("128 heads.8192 tokens", hca_arguments((0, 8192), 8192, 128, sink="normal")),
    ],
    vectors=[Vector("one entry", _worked_hca, _worked_hca_gradients)],
    rejects=[
        *QUERY_REJECTS,
        *row_rejects("window_kv"),
        *row_rejects("entries"),
        *SEQUENCE_REJECTS,
        Reject("grad", "float32", edited("grad", lambda x: x.float())),
        Reject("lse", "of other heads", edited("lse", lambda x: x[:, 1:])),
    ],
    bad_values=SEQUENCE_BAD_VALUES,
    compare=compare,
)  # fmt: skip

CASES = {
    "sparse_attention_bwd": SPARSE_ATTENTION_BWD,
    "hca_attention_bwd": HCA_ATTENTION_BWD,
}
