"""SwiGLU with casts along rows, beyond the op suite: bits on CUDA, odd maps, what is not read."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tile_kernels
from tile_kernels.quant import (
    swiglu_backward_and_per_token_cast,
    swiglu_forward_and_per_token_cast,
)
from tile_kernels.quant.swiglu.plan import SF_CLAMP_RANGE
from tile_kernels.runtime import registry
from tile_kernels.runtime.cases import Sample, assert_equal_results
from tile_kernels.runtime.launch import recording
from tile_kernels.runtime.operator import Operator

FORWARD = registry.get("quant.swiglu_forward_and_per_token_cast")
BACKWARD = registry.get("quant.swiglu_backward_and_per_token_cast")
INT32 = torch.int32


def sample_of(op: Operator, label: str) -> dict[str, Any]:
    return next(s for s in op.cases.small if s.label == label).build("cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("sample", FORWARD.cases.small, ids=lambda sample: sample.label)
def test_forward_has_the_bits_of_the_reference(sample: Sample) -> None:
    expected = FORWARD.outcome(FORWARD.public_reference, sample.build("cuda"))
    assert_equal_results(FORWARD.outcome(FORWARD.function, sample.build("cuda")), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("sample", BACKWARD.cases.small, ids=lambda sample: sample.label)
def test_backward_has_the_bits_of_the_reference(sample: Sample) -> None:
    """All but the sum over a row, whose order is the kernel's own."""
    expected = BACKWARD.public_reference(**sample.build("cuda"))
    assert_equal_results(BACKWARD.function(**sample.build("cuda"))[:3], expected[:3])


@pytest.mark.parametrize("backend", ["torch", "emulate"])
def test_padding_rows_are_neither_read_nor_counted(backend: str) -> None:
    x = torch.randn(4, 64)
    x[1] = float("nan")
    x[3] = 1e9
    count = torch.zeros(3, dtype=torch.int64)
    expert = torch.tensor([0, -1, 2, -7], dtype=INT32)
    with tile_kernels.backend(backend):
        data, sf = swiglu_forward_and_per_token_cast(
            x, "e4m3", 16, pos_to_expert=expert, swiglu_clamp_value=1e6, clamped_count=count
        )
    assert data[1::2].view(torch.uint8).count_nonzero() == 0
    assert sf[1::2].count_nonzero() == 0
    assert (sf[::2] > 0).all()
    assert count.tolist() == [0, 0, 0]


def test_one_kernel_serves_all_clamp_values() -> None:
    arguments = sample_of(FORWARD, "6x96.32.all")
    with tile_kernels.backend("emulate"), recording() as requests:
        for clamp, bound in ((1.0, None), (2.5, 1e-3), (7, 1.0)):
            FORWARD.function(**{**arguments, "swiglu_clamp_value": clamp, "sf_clamp_min": bound})
    assert len(requests) == 3
    assert len({request.problem for request in requests}) == 1


def test_counts_accumulate() -> None:
    arguments = sample_of(FORWARD, "counted")
    before = arguments["clamped_count"].clone()
    added = torch.zeros(3, dtype=torch.int64)
    FORWARD.public_reference(**{**arguments, "clamped_count": added})
    assert added.min() > 0
    with tile_kernels.backend("emulate"):
        for times in (1, 2):
            FORWARD.function(**arguments)
            assert_equal_results(arguments["clamped_count"], before + times * added)


def test_counts_and_buffers_under_compile() -> None:
    arguments = sample_of(FORWARD, "6x96.32.all")
    expected = FORWARD.outcome(
        FORWARD.function, {**arguments, "clamped_count": arguments["clamped_count"].clone()}
    )
    out = tuple(torch.zeros_like(t) for t in expected[0])
    torch._dynamo.reset()
    compiled = torch.compile(FORWARD.function, fullgraph=True, backend="aot_eager")
    compiled(**arguments, out=out)
    assert_equal_results((out, arguments["clamped_count"]), expected)


@pytest.mark.parametrize("inverse", [[[1, 0]], [[-1, -1]]])
@pytest.mark.parametrize("backend", ["torch", "emulate"])
def test_weights_whose_rows_name_others_have_no_gradient(
    backend: str, inverse: list[list[int]]
) -> None:
    x = torch.ones(3, 64).to(torch.float8_e4m3fn), torch.ones(3, 2)
    index = torch.tensor([0, 1, -1], dtype=INT32)
    arguments = (x, torch.ones(3, 32).bfloat16(), torch.ones(1, 2), index)
    with tile_kernels.backend(backend):
        consistent = torch.tensor([[0, 1]], dtype=INT32)
        assert BACKWARD.function(*arguments, consistent, 32)[3].count_nonzero() == 2
        found = BACKWARD.function(*arguments, torch.tensor(inverse, dtype=INT32), 32)
        assert found[3].tolist() == [[0.0, 0.0]]
        with tile_kernels.checked(), pytest.raises(ValueError, match=r"inverse of .*element \[0\]"):
            BACKWARD.function(*arguments, torch.tensor(inverse, dtype=INT32), 32)


@pytest.mark.parametrize("order", ["forward", "reverse", "random"])
def test_weight_gradients_of_maps_that_disagree(order: str) -> None:
    """Each weight has one writer: the row that it names, if that names it back; else it is 0."""
    arguments = sample_of(BACKWARD, "6x128.32")
    index = torch.tensor([0, 0, 3, 9, 99, -5], dtype=INT32)
    inverse = torch.tensor([[1, 2], [-1, 2], [5, 77], [-9, 0], [4, 3]], dtype=INT32)
    maps = {"pos_to_token_topk": index, "token_topk_to_pos": inverse}
    with tile_kernels.backend("emulate", order=order):
        weight_grad = BACKWARD.function(**{**arguments, **maps})[3]
    alone = {**maps, "pos_to_token_topk": torch.tensor([-1, 0, 3, 9, -1, -1], dtype=INT32)}
    expected = BACKWARD.public_reference(**{**arguments, **alone})[3]
    with tile_kernels.backend("torch"):
        assert_equal_results(BACKWARD.function(**{**arguments, **maps})[3], expected)
    assert weight_grad.flatten()[[0, 3, 9]].count_nonzero() == 3
    torch.testing.assert_close(weight_grad, expected, rtol=1e-5, atol=1e-5)


def test_backward_into_buffers_as_returned() -> None:
    arguments = sample_of(BACKWARD, "6x128.32")
    expected = swiglu_backward_and_per_token_cast(**arguments)
    out = torch.utils._pytree.tree_map(torch.empty_like, expected)
    written = swiglu_backward_and_per_token_cast(**arguments, out=out)
    assert_equal_results(written, expected)
    assert written[1][1] is out[1][1]


def test_no_rows_have_no_weight_gradient() -> None:
    arguments = sample_of(BACKWARD, "0x64")
    for backend in ("torch", "emulate"):
        with tile_kernels.backend(backend):
            weight_grad = BACKWARD.function(**arguments)[3]
        assert weight_grad.shape == (5, 2)
        assert weight_grad.count_nonzero() == 0


def test_the_least_bound_has_a_finite_inverse() -> None:
    least = torch.tensor([SF_CLAMP_RANGE[0]])
    assert (448 / least).isfinite().all()
    assert (448 / (least / 2)).isinf().all()
