"""DeepEP's first interface: what its callers do, and the module under its name."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ep.processes import run_processes
from tests.ep.windows import use_windows
from tile_kernels import quant
from tile_kernels.ep import Buffer, Config, EventOverlap, LocalGroup, run_ranks

EXPERTS, HIDDEN, TOPK = 8, 256, 3


def rank_of(group: Any) -> int:
    return int(group.rank() if callable(group.rank) else group.rank)


def tokens(rank: int) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(rank)
    x = torch.randn(5 + 2 * rank, HIDDEN, generator=draw).bfloat16()
    topk_idx = torch.rand(len(x), EXPERTS, generator=draw).topk(TOPK).indices
    topk_idx[0, 1] = -1
    return x, topk_idx, torch.rand(len(x), TOPK, generator=draw)


def expert(x: Tensor, number: Tensor) -> Tensor:
    """A function of a row that differs from expert to expert."""
    return (x.float() * (1 + number.float())[:, None]).to(x.dtype)


def expected(rank: int) -> Tensor:
    """The weighted sum of the experts of each token, in float32."""
    x, topk_idx, weights = tokens(rank)
    total = torch.zeros(x.shape)
    for slot in range(TOPK):
        chosen = topk_idx[:, slot]
        rows = expert(x, chosen.clamp(min=0)).float() * weights[:, slot, None]
        total += torch.where((chosen >= 0)[:, None], rows, 0)
    return total


def distance(found: Tensor, right: Tensor) -> float:
    return float((found.float() - right).norm() / right.norm())


# ---- normal mode --------------------------------------------------------------------------------


def test_layout() -> None:
    def rank(group: LocalGroup) -> None:
        topk_idx = torch.tensor([[0, 5, 1], [7, -1, 4], [-1, -1, -1]])
        found = Buffer(group).get_dispatch_layout(topk_idx, EXPERTS)
        per_rank, per_node, per_expert, in_rank, event = found
        assert per_rank.tolist() == [1, 2]
        assert per_node is None
        assert per_expert.tolist() == [1, 1, 0, 0, 1, 1, 0, 1]
        assert in_rank.tolist() == [[True, True], [False, True], [False, False]]
        assert event.event is None

    run_ranks(2, rank)


def normal(group: Any, fp8: bool = False) -> float:
    """A layer as the callers of the interface write it; the distance from what is expected."""
    rank = rank_of(group)
    x, topk_idx, weights = tokens(rank)
    buffer = Buffer(group, num_nvl_bytes=1 << 20)
    previous = Buffer.capture()
    layout = buffer.get_dispatch_layout(topk_idx, EXPERTS, previous, True, True)
    per_rank, per_node, per_expert, in_rank, event = layout
    given: Any = quant.per_token_cast(x, "e4m3", 128) if fp8 else x
    received, ids, row_weights, counts, handle, event = buffer.dispatch(
        given, num_tokens_per_rank=per_rank, num_tokens_per_rdma_rank=per_node,
        is_token_in_rank=in_rank, num_tokens_per_expert=per_expert, topk_idx=topk_idx,
        topk_weights=weights, config=Buffer.get_dispatch_config(2), previous_event=event,
        async_finish=True, allocate_on_comm_stream=True,
    )  # fmt: skip
    event.current_stream_wait()
    rows = quant.per_token_cast_back(received, "bf16", 128) if fp8 else received
    assert counts == [(ids == e).sum() for e in range(EXPERTS // 2)]
    assert row_weights[ids < 0].eq(0).all()
    total = torch.zeros(rows.shape)
    for slot in range(TOPK):
        number = ids[:, slot].clamp(min=0) + rank * EXPERTS // 2
        total += expert(rows, number).float() * row_weights[:, slot, None]
    y, back, event = buffer.combine(
        total.bfloat16(), handle, row_weights, config=Buffer.get_combine_config(2)
    )
    assert torch.equal(back, torch.where(topk_idx >= 0, weights, 0))
    again = buffer.dispatch(given, handle=handle)
    assert again[1:5] == (None,) * 4
    first = received[0] if fp8 else received
    assert torch.equal((again[0][0] if fp8 else again[0]).float(), first.float())
    return distance(y, expected(rank))


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_a_layer(fp8: bool) -> None:
    assert max(run_ranks(2, lambda group: normal(group, fp8))) < (0.04 if fp8 else 5e-3)


@pytest.mark.multiprocess
def test_a_layer_on_processes() -> None:
    assert max(run_processes(2, normal)) < 5e-3


def test_ranks_without_choices_and_worst_case_sizes() -> None:
    def rank(group: LocalGroup) -> None:
        x, topk_idx, weights = tokens(group.rank)
        buffer = Buffer(group)
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, EXPERTS)
        given = {"is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert}
        rows, ids, none, _, handle, _ = buffer.dispatch(x, num_tokens_per_rank=per_rank, **given)
        assert ids is none is None
        y, _, _ = buffer.combine(rows, handle)
        assert torch.equal(y.float(), (x.float() * in_rank.sum(1)[:, None]).bfloat16().float())
        worst, ids, _, counts, handle, _ = buffer.dispatch(
            x, topk_idx=topk_idx, topk_weights=weights, num_worst_tokens=40, **given
        )
        assert worst.shape == (40, HIDDEN)
        assert counts == []
        assert torch.equal(worst[: len(rows)], rows)
        assert ids[len(rows) :].eq(-1).all()
        assert torch.equal(buffer.combine(worst, handle)[0], y)

    run_ranks(2, rank)


class Dispatch(torch.autograd.Function):
    """Dispatch with a gradient, as frameworks write it around the interface."""

    @staticmethod
    def forward(ctx: Any, buffer: Buffer, x: Tensor, ids: Tensor, weights: Tensor) -> Any:
        _, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, EXPERTS)
        rows, local, carried, _, handle, _ = buffer.dispatch(
            x, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert, topk_idx=ids,
            topk_weights=weights,
        )  # fmt: skip
        ctx.buffer, ctx.handle = buffer, handle
        ctx.mark_non_differentiable(local)
        return rows, local, carried, handle

    @staticmethod
    def backward(ctx: Any, rows: Tensor, _: Any, weights: Tensor, __: Any) -> Any:
        x, back, _ = ctx.buffer.combine(rows.contiguous(), ctx.handle, weights.float())
        return None, x, None, back


def test_gradients_of_a_layer() -> None:
    def rank(group: LocalGroup) -> None:
        x, topk_idx, weights = tokens(group.rank)
        x, weights = x.requires_grad_(), weights.requires_grad_()
        rows, _, carried, _ = Dispatch.apply(Buffer(group), x, topk_idx, weights)
        (rows.float().sum() + (carried * 3).sum()).backward()
        in_rank = torch.zeros(len(x), 2, dtype=torch.bool)
        for slot in range(TOPK):
            valid = topk_idx[:, slot] >= 0
            in_rank[valid, topk_idx[valid, slot] // 4] = True
        assert torch.equal(x.grad.float(), in_rank.sum(1)[:, None].expand(x.shape).float())
        assert torch.equal(weights.grad, torch.where(topk_idx >= 0, 3.0, 0.0))

    run_ranks(2, rank)


# ---- low latency --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bf16", "fp8", "ue8m0"])
def test_low_latency(kind: str) -> None:
    def rank(group: LocalGroup) -> float:
        x, topk_idx, weights = tokens(group.rank)
        buffer = Buffer(group, low_latency_mode=True, explicitly_destroy=True)
        stats = torch.zeros(EXPERTS // 2, dtype=torch.int32)
        options = {"use_fp8": kind != "bf16", "round_scale": kind == "ue8m0"}
        for repeat in (1, 2):
            received, counts, handle, event, hook = buffer.low_latency_dispatch(
                x, topk_idx, 8, EXPERTS, stats, use_ue8m0=kind == "ue8m0", **options,
                return_recv_hook=True,
            )  # fmt: skip
            hook()
            assert isinstance(event, EventOverlap)
            assert torch.equal(stats, counts * repeat)
            size = (EXPERTS // 2, 16)
            if kind == "bf16":
                rows = received
            else:
                data, scales = received
                packs = HIDDEN // (512 if kind == "ue8m0" else 128) or 1
                assert scales.shape == (*size, packs)
                assert scales.stride(1) == 1
                values = scales
                if kind == "ue8m0":
                    exponents = scales.contiguous().view(torch.uint8)[..., : HIDDEN // 128]
                    values = torch.exp2(exponents.float() - 127)
                rows = data.float().unflatten(2, (-1, 128)) * values[..., None]
                rows = rows.flatten(2).bfloat16()
            for local, count in enumerate(counts.tolist()):
                assert rows[local, count:].eq(0).all()
            out = buffer.get_next_low_latency_combine_buffer(handle)
            numbers = torch.arange(EXPERTS // 2) + group.rank * EXPERTS // 2
            out.copy_(rows.float() * (1 + numbers)[:, None, None])
            into = torch.empty_like(x)
            y, _, hook = buffer.low_latency_combine(
                out, topk_idx, weights, handle, zero_copy=True, out=into
            )
            hook()
            assert y is into
        buffer.clean_low_latency_buffer(8, HIDDEN, EXPERTS)
        buffer.destroy()
        return distance(y, expected(group.rank))

    assert max(run_ranks(2, rank)) < (5e-3 if kind == "bf16" else 0.05)


def test_masked_ranks_receive_nothing() -> None:
    def rank(group: LocalGroup) -> int:
        x, topk_idx, _ = tokens(group.rank)
        buffer = Buffer(group, low_latency_mode=True, enable_shrink=True)
        buffer.low_latency_update_mask_buffer(1, True)
        status = torch.zeros(2, dtype=torch.int32)
        buffer.low_latency_query_mask_buffer(status)
        assert status.tolist() == [0, 1]
        unknown = topk_idx if group.rank == 0 else torch.full_like(topk_idx, 99)
        with pytest.raises(ValueError, match="rank 1: topk_idx must "):
            buffer.low_latency_dispatch(x, unknown, 8, EXPERTS, use_fp8=False)
        _, counts, _, _, _ = buffer.low_latency_dispatch(x, topk_idx, 8, EXPERTS, use_fp8=False)
        buffer.low_latency_clean_mask_buffer()
        _, unmasked, _, _, _ = buffer.low_latency_dispatch(x, topk_idx, 8, EXPERTS, use_fp8=False)
        assert unmasked.sum() > 0
        return int(counts.sum())

    assert run_ranks(2, rank)[1] == 0


# ---- settings and errors ------------------------------------------------------------------------


def test_settings_and_hints() -> None:
    config = Config(num_sms=24, num_max_nvl_chunked_send_tokens=8)
    assert config.get_nvl_buffer_size_hint(7168 * 2, 8) > 12 * 8 * 256 * 7168 * 2
    assert config.get_rdma_buffer_size_hint(7168 * 2, 8) == 0
    assert config.get_rdma_buffer_size_hint(7168 * 2, 16) > 0
    hint = Buffer.get_low_latency_rdma_size_hint(128, 7168, 8, 256)
    assert hint >= 2 * 256 * 128 * 7168 * 2
    assert Buffer.is_sm90_compiled()
    try:
        Buffer.set_num_sms(30)
        assert Buffer.get_dispatch_config(8).num_sms == 30
        with pytest.raises(ValueError, match="new_num_sms must be even, got 7"):
            Buffer.set_num_sms(7)
    finally:
        Buffer.set_num_sms(20)


def test_mistakes_are_named() -> None:
    group = LocalGroup()
    buffer = Buffer(group)
    x, topk_idx, weights = tokens(0)
    with pytest.raises(RuntimeError, match="explicitly_destroy=False"):
        buffer.destroy()
    with pytest.raises(ValueError, match="num_nvl_bytes must be at least 0, got -1"):
        Buffer(group, num_nvl_bytes=-1)
    with pytest.raises(ValueError, match="use_ue8m0 needs use_fp8=True and round_scale=True"):
        buffer.low_latency_dispatch(x, topk_idx, 8, EXPERTS, use_ue8m0=True)
    with pytest.raises(ValueError, match="multiple of 128 channels, got 8"):
        buffer.low_latency_dispatch(x[:, :8], topk_idx, 8, EXPERTS)
    handle = buffer.low_latency_dispatch(x, topk_idx, 8, EXPERTS)[2]
    rows = torch.zeros(8, 8, HIDDEN).bfloat16()
    for shape in ((8, 9, HIDDEN), (9, 8, HIDDEN), (8, 8, 128)):
        with pytest.raises(ValueError, match=r"x must have shape \[8, 8, 256\], got"):
            buffer.low_latency_combine(rows.new_zeros(shape), topk_idx, weights, handle)
    with pytest.raises(ValueError, match=r"out must have shape \[5, 256\], got \(4, 256\)"):
        buffer.low_latency_combine(rows, topk_idx, weights, handle, out=x[1:])


def wrong_calls(buffer: Buffer, other: Buffer, rank: int) -> list[tuple[str, Any, Any]]:
    """For each kind of mistake the message, a wrong call and a right one."""
    x, topk_idx, weights = tokens(rank)
    _, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, EXPERTS)
    layout = {"is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert}

    def dispatch(**changes: Any) -> Any:
        given = {"x": x, "topk_idx": topk_idx, "topk_weights": weights, **layout, **changes}
        return lambda: buffer.dispatch(**given)

    def low_latency(**changes: Any) -> Any:
        given = {"x": x, "topk_idx": topk_idx, **changes}
        most, experts = given.pop("most", 8), given.pop("num_experts", EXPERTS)
        return lambda: buffer.low_latency_dispatch(
            given["x"], given["topk_idx"], most, experts, use_fp8=False
        )

    rows, _, _, _, handle, _ = dispatch()()
    found, _, fast, _, _ = low_latency()()
    theirs = other.dispatch(x, topk_idx=topk_idx, **layout)[4]

    def combine(**changes: Any) -> Any:
        return lambda: buffer.combine(**{"x": rows, "handle": handle, **changes})

    def fast_combine(**changes: Any) -> Any:
        given = {"x": found, "topk_idx": topk_idx, "topk_weights": weights, "handle": fast}
        return lambda: buffer.low_latency_combine(**{**given, **changes})

    calls = [
        ("Buffer.dispatch", "is_token_in_rank and num_tokens_per_expert must be given", dispatch,
         {"is_token_in_rank": None}),
        ("Buffer.dispatch", "expert_alignment must be in 1..65536, got 0", dispatch,
         {"expert_alignment": 0}),
        ("Buffer.dispatch", "num_experts must be a multiple of the 2 ranks, got 7", dispatch,
         {"num_tokens_per_expert": per_expert[1:]}),
        ("Buffer.dispatch", "x must be a torch.Tensor, got list", dispatch, {"x": [1.0]}),
        ("Buffer.dispatch", "topk_idx must have shape", dispatch, {"topk_idx": topk_idx[1:]}),
        ("Buffer.dispatch", "is_token_in_rank must have shape", dispatch,
         {"is_token_in_rank": in_rank[:, :1], "topk_idx": None, "topk_weights": None}),
        ("Buffer.dispatch", "handle must be a NormalHandle of a dispatch, got str", dispatch,
         {"handle": "h"}),
        ("Buffer.dispatch", "handle must come from this group", dispatch, {"handle": theirs}),
        ("ElasticBuffer.dispatch", "topk_weights must be float32", dispatch,
         {"topk_weights": weights.double()}),
        ("Buffer.combine", "handle must be a NormalHandle of a dispatch, got NoneType", combine,
         {"handle": None}),
        ("Buffer.combine", "handle must be a NormalHandle of a dispatch, got LowLat", combine,
         {"handle": fast}),
        ("ElasticBuffer.combine", "x must have shape", combine, {"x": rows[1:]}),
        ("Buffer.low_latency_dispatch", "x must be bfloat16, got float32", low_latency,
         {"x": x.float()}),
        ("Buffer.low_latency_dispatch", "num_max_dispatch_tokens_per_rank must be at least",
         low_latency, {"most": 1}),
        ("Buffer.low_latency_dispatch", "num_experts must be a multiple", low_latency,
         {"num_experts": 7}),
        ("Buffer.low_latency_dispatch", "topk_idx must have shape", low_latency,
         {"topk_idx": topk_idx[1:]}),
        ("Buffer.low_latency_combine", "handle must be a LowLatencyHandle of a dispatch, got Norm",
         fast_combine, {"handle": handle}),
        ("Buffer.low_latency_combine", "topk_weights must have shape", fast_combine,
         {"topk_weights": weights[1:]}),
        ("Buffer.low_latency_combine", "x must have shape", fast_combine, {"x": found[1:]}),
    ]  # fmt: skip
    return [
        (f"{name}: rank 1: {message}", make(**changes), make())
        for name, message, make, changes in calls
    ]


@pytest.mark.parametrize("windows", [False, True])
def test_an_error_of_one_rank_is_raised_on_all(
    windows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if windows:
        use_windows(monkeypatch)
    run_ranks(2, errors_of_one_rank)


@pytest.mark.multiprocess
@pytest.mark.parametrize("engine", ["collective", "mmap"])
def test_an_error_of_one_process_is_raised_on_all(engine: str) -> None:
    run_processes(2, errors_of_one_rank, engine)


def errors_of_one_rank(group: Any, engine: str = "auto") -> None:
    """Mistakes of rank 1, while rank 0 calls what is right."""
    rank = rank_of(group)
    with pytest.raises(ValueError, match="Buffer: rank 1: num_nvl_bytes must be at least 0, got"):
        Buffer(group, num_nvl_bytes=-rank)
    with pytest.raises(ValueError, match="Buffer: rank 1: engine must be one of"):
        Buffer(group, engine=engine if rank == 0 else "fast")
    buffer = Buffer(group, engine=engine)
    x, topk_idx, _ = tokens(rank)
    with pytest.raises(ValueError, match=r"Buffer.low_latency_dispatch: rank 1: num_experts must"):
        buffer.low_latency_dispatch(x, topk_idx, 8, EXPERTS - rank)  # the first call
    alone = Buffer(LocalGroup())
    for message, wrong, right in wrong_calls(buffer, alone, rank):
        with pytest.raises((TypeError, ValueError), match=re.escape(message)):
            (wrong if rank else right)()
        right()


def test_different_buffers_and_calls_are_told_apart() -> None:
    """Also before the first dispatch."""

    def rank(group: LocalGroup) -> None:
        buffers = [Buffer(group, explicitly_destroy=True) for _ in range(2)]
        x, topk_idx, _ = tokens(group.rank)
        _, _, per_expert, in_rank, _ = buffers[0].get_dispatch_layout(topk_idx, EXPERTS)

        def dispatch(buffer: Buffer) -> Any:
            return buffer.dispatch(
                x, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert, topk_idx=topk_idx
            )

        with pytest.raises(ValueError, match="buffer must be the same on all ranks, got number 1"):
            dispatch(buffers[group.rank])
        with pytest.raises(ValueError, match=r"rank 0 calls Buffer.dispatch and rank 1 calls Buff"):
            buffers[0].destroy() if group.rank else dispatch(buffers[0])
        rows, handle = dispatch(buffers[0])[:5:4]
        for buffer in buffers:
            buffer.destroy()
            buffer.destroy()  # again: nothing
            for call in (
                lambda buffer=buffer: dispatch(buffer),
                lambda buffer=buffer: buffer.combine(rows, handle),
                lambda buffer=buffer: buffer.low_latency_dispatch(x, topk_idx, 8, EXPERTS),
            ):
                with pytest.raises(RuntimeError, match="the buffer was destroyed"):
                    call()

    run_ranks(2, rank)


def test_a_handle_serves_a_larger_buffer_of_the_group() -> None:
    """Megatron makes one when rows get wider, also between the forward and the backward pass."""

    def rank(group: LocalGroup) -> None:
        x, topk_idx, weights = tokens(group.rank)
        first = Buffer(group)
        _, _, per_expert, in_rank, _ = first.get_dispatch_layout(topk_idx, EXPERTS)
        layout = {"is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert}
        rows, _, _, _, handle, _ = first.dispatch(
            x, topk_idx=topk_idx, topk_weights=weights, **layout
        )
        received, _, fast, _, _ = first.low_latency_dispatch(x, topk_idx, 8, EXPERTS, use_fp8=False)
        wanted = first.combine(rows, handle)[0]
        weighted = first.low_latency_combine(received, topk_idx, weights, fast)[0]
        del first
        second = Buffer(group, num_nvl_bytes=1 << 20)
        for _ in range(2):
            assert torch.equal(second.combine(rows, handle)[0], wanted)
            assert torch.equal(second.dispatch(x, handle=handle)[0], rows)
            found = second.low_latency_combine(received, topk_idx, weights, fast)[0]
            assert torch.equal(found, weighted)
            second.dispatch(x.repeat(1, 2), topk_idx=topk_idx, **layout)

    run_ranks(2, rank)


INSTALLED = """
from tile_kernels.ep import ElasticBuffer, install_as_deep_ep
module = install_as_deep_ep()
import deep_ep
from deep_ep import Buffer, Config, ElasticBuffer as found, EPHandle, topk_idx_t
from deep_ep import get_logical_domain_size, get_physical_domain_size
from deep_ep.utils import EventHandle, EventOverlap
assert deep_ep is module is install_as_deep_ep() and found is ElasticBuffer
"""
REFUSED = """
import sys, types
sys.modules["deep_ep"] = types.ModuleType("deep_ep")
from tile_kernels.ep import install_as_deep_ep
try:
    install_as_deep_ep()
except RuntimeError as error:
    assert "a package deep_ep is installed" in str(error)
else:
    raise AssertionError
"""


@pytest.mark.parametrize("code", [INSTALLED, REFUSED], ids=["installed", "refused"])
def test_module_under_the_name_of_deep_ep(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], check=True)
