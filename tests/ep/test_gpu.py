"""All ranks on one GPU, as threads: the same bits as on the CPU, also when asynchronous."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.ep.helpers import Case, make_buffer
from tile_kernels.ep import run_ranks
from tile_kernels.testing.numeric import assert_equal

pytestmark = pytest.mark.gpu

WIDTHS = ((torch.bfloat16, 256), (torch.float32, 3))


def results(group: Any, case: Case, device: str, wait: bool, **options: Any) -> list[Any]:
    """Everything that a rank sees of a dispatch, a second one along the handle, and a combine."""
    buffer, me = make_buffer(group, case, **options), group.rank
    payloads = tuple(each.to(device) for each in case.payloads[me])
    (rows, sf), ids, weights, handle, event = buffer.dispatch(
        payloads,
        case.topk_idx[me].to(device),
        case.topk_weights[me].to(device),
        num_experts=case.num_experts,
        expert_alignment=case.alignment,
        do_expand=case.expand,
        do_cpu_sync=options.get("check_ranks", True),
        async_with_compute_stream=wait,
    )
    if wait:
        event.current_stream_wait()
    (again, _), *_ = buffer.dispatch(payloads, handle=handle)
    bias = tuple(each.to(device) for each in case.bias[me])
    combined, back, event = buffer.combine(
        rows * 3, handle, weights, bias, async_with_compute_stream=wait
    )
    if wait:
        event.current_stream_wait()
    found = [rows, sf, ids, weights, again, combined, back, *handle.tensors()]
    return [None if each is None else each.cpu() for each in found]


@pytest.mark.parametrize("check_ranks", [True, False], ids=["counted", "static"])
@pytest.mark.parametrize("wait", [False, True], ids=["", "async"])
@pytest.mark.parametrize("expand", [False, True], ids=["compact", "expanded"])
@pytest.mark.parametrize(("nodes", "per_node"), [(1, 4), (2, 2)], ids=["direct", "hybrid"])
def test_as_on_the_cpu(
    nodes: int, per_node: int, expand: bool, wait: bool, check_ranks: bool
) -> None:
    case = Case(
        nodes, per_node, 3, num_topk=6, tokens=(33, 0, 64, 20), widths=WIDTHS, expand=expand,
        alignment=16, num_biases=2,
    )  # fmt: skip

    def run(device: str) -> list[list[Any]]:
        return run_ranks(
            4, lambda group: results(group, case, device, wait, check_ranks=check_ranks)
        )

    on_cpu, on_gpu = run("cpu"), run("cuda")
    for wanted, found in zip(on_cpu, on_gpu):
        for one, other in zip(wanted, found):
            assert (one is None) == (other is None)
            if one is not None:
                assert_equal(other, one)


def test_gradients_as_on_the_cpu() -> None:
    case = Case(2, 2, 3, num_topk=6, tokens=(33, 1, 64, 20), widths=((torch.bfloat16, 128),))

    def rank(group: Any, device: str) -> list[torch.Tensor]:
        buffer, me = make_buffer(group, case), group.rank
        x = case.payloads[me][0].to(device).requires_grad_()
        weights = case.topk_weights[me].to(device).requires_grad_()
        rows, _, row_weights, handle, _ = buffer.dispatch(
            x, case.topk_idx[me].to(device), weights, num_experts=12, do_expand=True
        )
        out, _, _ = buffer.combine((rows.float() * row_weights[:, None]).bfloat16(), handle)
        out.float().sum().backward()
        return [each.cpu() for each in (out.detach(), x.grad, weights.grad)]

    on_cpu = run_ranks(4, lambda group: rank(group, "cpu"))
    on_gpu = run_ranks(4, lambda group: rank(group, "cuda"))
    for wanted, found in zip(on_cpu, on_gpu):
        for one, other in zip(wanted, found):
            torch.testing.assert_close(other, one, rtol=1e-3, atol=1e-3)
