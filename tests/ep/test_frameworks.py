"""`install_as_deep_ep`: programs that import `deep_ep` as Megatron-core and torchtitan do.

Each runs on two processes over gloo, forward and backward. The calls are theirs, with their names;
the functions around them are written for this test.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ep.processes import run_processes

pytestmark = pytest.mark.multiprocess

EXPERTS, LOCAL, HIDDEN, TOPK = 8, 4, 256, 3


def tokens(rank: int) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(rank)
    x = torch.randn(5 + 2 * rank, HIDDEN, generator=draw).bfloat16()
    topk_idx = torch.rand(len(x), EXPERTS, generator=draw).topk(TOPK).indices
    return x, topk_idx, torch.rand(len(x), TOPK, generator=draw)


def distances(rank: int, y: Tensor, x: Tensor, topk_idx: Tensor, weights: Tensor) -> list[float]:
    """Relative errors of the layer in which expert `e` multiplies by `1 + e`, and of its gradients.

    The loss is the sum of `y`."""
    factors = 1 + topk_idx.float()
    values = x.detach().float()
    output = (factors * weights.detach()).sum(1, keepdim=True) * values
    of_x = (factors * weights.detach()).sum(1, keepdim=True).expand(values.shape)
    of_weights = factors * values.sum(1, keepdim=True)
    y.float().sum().backward()
    pairs = ((y.detach(), output), (x.grad, of_x), (weights.grad, of_weights))
    return [float((one.float() - right).norm() / right.norm()) for one, right in pairs]


# ---- Megatron-core: `Buffer`, sized by hints, in two autograd functions -------------------------


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ids: Tensor, probs: Tensor, buffer: Any) -> Any:
        from deep_ep.utils import EventHandle, EventOverlap

        previous = EventOverlap(EventHandle())
        per_rank, per_node, per_expert, in_rank, previous = buffer.get_dispatch_layout(
            ids, EXPERTS, previous_event=previous, async_finish=True, allocate_on_comm_stream=True
        )
        rows, local, probs, counts, handle, after = buffer.dispatch(
            x, topk_idx=ids, topk_weights=probs.float(), num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node, is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert, previous_event=previous, async_finish=True,
            allocate_on_comm_stream=True,
        )  # fmt: skip
        after.current_stream_wait()
        ctx.buffer, ctx.handle = buffer, handle
        ctx.mark_non_differentiable(local)
        return rows, local, probs, torch.tensor(counts), handle

    @staticmethod
    def backward(ctx: Any, rows: Tensor, _: Any, probs: Tensor, *__: Any) -> Any:
        x, of_probs, _ = ctx.buffer.combine(
            rows.contiguous(), ctx.handle, topk_weights=probs.float(), previous_event=None,
            async_finish=False, allocate_on_comm_stream=False,
        )  # fmt: skip
        return x, None, of_probs, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, buffer: Any, handle: Any) -> Tensor:
        y, _, _ = buffer.combine(
            x, handle=handle, async_finish=False, previous_event=None, allocate_on_comm_stream=False
        )
        ctx.buffer, ctx.handle = buffer, handle
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, _, _, _, _, _ = ctx.buffer.dispatch(
            grad.contiguous(), handle=ctx.handle, previous_event=None, async_finish=False,
            allocate_on_comm_stream=False,
        )  # fmt: skip
        return x, None, None


def megatron(group: Any) -> list[float]:
    from tile_kernels.ep import install_as_deep_ep

    install_as_deep_ep()
    from deep_ep import Buffer

    Buffer.set_num_sms(24)
    x, ids, probs = tokens(group.rank())
    sizes = [0, 0]
    for config in (Buffer.get_dispatch_config(2), Buffer.get_combine_config(2)):
        hints = config.get_nvl_buffer_size_hint, config.get_rdma_buffer_size_hint
        sizes = [max(hint(2 * HIDDEN, 2), size) for hint, size in zip(hints, sizes)]
    buffer = Buffer(group, *sizes)
    assert buffer.group == group
    assert [buffer.num_nvl_bytes, buffer.num_rdma_bytes] == sizes
    x.requires_grad_()
    probs.requires_grad_()
    rows, local, received, counts, handle = _Dispatch.apply(x, ids, probs, buffer)
    assert counts.tolist() == [int((local == e).sum()) for e in range(LOCAL)]
    numbers = local.clamp(min=0) + group.rank() * LOCAL
    shares = torch.where(local >= 0, received * (1 + numbers), 0.0).sum(1, keepdim=True)
    y = _Combine.apply((rows.float() * shares).bfloat16(), buffer, handle)
    return distances(group.rank(), y, x, ids, probs)


def test_megatron() -> None:
    for found in run_processes(2, megatron):
        assert max(found) < 5e-3


# ---- torchtitan: `ElasticBuffer` behind custom operators that carry a number of the handle ------


def torchtitan(group: Any) -> list[float]:
    from tile_kernels.ep import install_as_deep_ep

    install_as_deep_ep()
    from deep_ep import ElasticBuffer

    size = ElasticBuffer.get_buffer_size_hint(
        group, 16, HIDDEN, num_topk=TOPK, use_fp8_dispatch=False
    )
    buffer = ElasticBuffer(
        group, num_bytes=size, num_max_tokens_per_rank=16, hidden=HIDDEN, num_topk=TOPK,
        use_fp8_dispatch=False, deterministic=False, explicitly_destroy=True,
    )  # fmt: skip
    assert buffer.group == group
    assert buffer.num_bytes >= size
    numbers, handles = itertools.count(), {}
    library = torch.library.Library("frameworks_test", "DEF")
    library.define("dispatch(Tensor x, Tensor ids, Tensor w) -> (Tensor, Tensor, Tensor, Tensor)")
    library.define("combine(Tensor x, Tensor handle) -> Tensor")

    def dispatch(x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
        rows, local, received, handle, _ = buffer.dispatch(
            x, topk_idx=ids, topk_weights=weights, num_experts=EXPERTS, num_max_tokens_per_rank=16,
            num_sms=buffer.get_theoretical_num_sms(EXPERTS, TOPK), do_expand=False,
            do_cpu_sync=True,
        )  # fmt: skip
        assert handle.num_sms > 0
        counts = torch.tensor(handle.num_recv_tokens_per_expert_list)
        assert torch.equal(handle.psum_num_recv_tokens_per_expert.long(), counts.cumsum(0))
        number = torch.tensor(next(numbers))
        handles[number.item()] = handle
        return rows, local, received, number

    def combine(x: Tensor, handle: Tensor) -> Tensor:
        y, _, event = buffer.combine(
            x, handle=handles[handle.item()], num_sms=handles[handle.item()].num_sms,
            async_with_compute_stream=True,
        )  # fmt: skip
        event.current_stream_wait()
        return y

    library.impl("dispatch", dispatch, "CPU")
    library.impl("combine", combine, "CPU")
    ops = torch.ops.frameworks_test

    def dispatch_backward(ctx: Any, rows: Any, _: Any, received: Any, __: Any) -> Any:
        x, weights, _ = buffer.combine(
            rows.contiguous(), handle=handles[ctx.number.item()], topk_weights=received.float()
        )
        return x, None, weights

    def combine_backward(ctx: Any, grad: Tensor) -> Any:
        x, _, _, _, _ = buffer.dispatch(grad.contiguous(), handle=handles[ctx.number.item()])
        return x, None

    def keep_result(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.number = output[3]

    def keep_input(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.number = inputs[1]

    for name, backward, setup in (
        ("dispatch", dispatch_backward, keep_result),
        ("combine", combine_backward, keep_input),
    ):
        torch.library.register_autograd(
            f"frameworks_test::{name}", backward, setup_context=setup, lib=library
        )

    x, ids, weights = tokens(group.rank())
    x.requires_grad_()
    weights.requires_grad_()
    rows, local, received, number = ops.dispatch(x, ids, weights)
    factors = 1 + local.clamp(min=0) + group.rank() * LOCAL
    shares = torch.where(local >= 0, received * factors, 0.0).sum(1, keepdim=True)
    y = ops.combine((rows.float() * shares).bfloat16(), number)
    found = distances(group.rank(), y, x, ids, weights)

    with torch.no_grad():  # the static layout of inference: rows by expert, no wait of the host
        rows, _, received, handle, _ = buffer.dispatch(
            x.detach(), topk_idx=ids, topk_weights=weights.detach(), num_experts=EXPERTS,
            num_max_tokens_per_rank=16, num_sms=20, do_expand=True, do_cpu_sync=False,
        )  # fmt: skip
        psum = handle.psum_num_recv_tokens_per_expert
        counts = torch.diff(psum, prepend=psum.new_zeros(1))
        experts = torch.repeat_interleave(torch.arange(LOCAL) + group.rank() * LOCAL, counts)
        factors = torch.zeros(len(rows))
        factors[: len(experts)] = 1.0 + experts
        shares = received.reshape(len(rows), -1).sum(1) * factors
        again = buffer.combine((rows.float() * shares[:, None]).bfloat16(), handle=handle)[0]
    error = (again.float() - y.detach().float()).norm() / y.detach().float().norm()
    buffer.destroy()
    return [*found, float(error)]


def test_torchtitan() -> None:
    for found in run_processes(2, torchtitan):
        assert max(found) < 5e-3
