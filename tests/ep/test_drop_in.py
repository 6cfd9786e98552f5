"""Calls as programs written for DeepEP make them, and mistakes that must not break the group."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from tests.ep.processes import run_processes
from tests.ep.windows import use_windows
from tile_kernels.ep import (
    Buffer,
    ElasticBuffer,
    LocalGroup,
    get_logical_domain_size,
    get_physical_domain_size,
    model,
    run_ranks,
)

EXPERTS, HIDDEN = 4, 8


def tokens(rank: int, num_topk: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(rank)
    x = torch.randn(3 + rank, HIDDEN, generator=draw)
    return x, torch.rand(len(x), EXPERTS, generator=draw).topk(num_topk).indices


def buffer_of(group: Any, **options: Any) -> ElasticBuffer:
    return ElasticBuffer(group, num_max_tokens_per_rank=8, hidden=HIDDEN, num_topk=2, **options)


# ---- drop-in ------------------------------------------------------------------------------------


def test_flags_may_be_integers() -> None:
    def rank(group: LocalGroup) -> None:
        buffer = buffer_of(
            group, use_fp8_dispatch=0, deterministic=1, allow_hybrid_mode=0,
            allow_multiple_reduction=1, prefer_overlap_with_compute=1, explicitly_destroy=1,
        )  # fmt: skip
        assert buffer.deterministic is True
        assert buffer.allow_hybrid_mode is False
        x, topk_idx = tokens(group.rank)
        rows, ids, _, handle, _ = buffer.dispatch(
            x, topk_idx, num_experts=EXPERTS, do_expand=1, do_cpu_sync=1, do_handle_copy=0,
            do_zero_padding=1, async_with_compute_stream=0,
        )  # fmt: skip
        assert ids is None
        assert handle.do_expand is True
        torch.testing.assert_close(buffer.combine(rows, handle)[0], 2 * x)
        buffer.destroy()

    run_ranks(2, rank)


def test_bfloat16_ignores_the_layout_of_scales() -> None:
    def rank(group: LocalGroup) -> None:
        x, topk_idx = tokens(group.rank)
        given = (x.bfloat16(), topk_idx)
        buffer = buffer_of(group)
        plain = buffer.dispatch(*given, num_experts=EXPERTS)
        other = buffer.dispatch(*given, num_experts=EXPERTS, use_tma_aligned_col_major_sf=True)
        assert torch.equal(plain[0], other[0])

    run_ranks(2, rank)


@pytest.mark.parametrize("expand", [False, True])
def test_ids_of_32_bits(expand: bool) -> None:
    def rank(group: LocalGroup) -> None:
        x, topk_idx = tokens(group.rank)
        buffer = buffer_of(group)
        results = []
        for ids in (topk_idx, topk_idx.int()):
            rows, local, _, handle, _ = buffer.dispatch(
                x, ids, num_experts=EXPERTS, do_expand=expand
            )
            assert torch.equal(handle.topk_idx, ids)
            again = buffer.dispatch(x, handle=handle)
            assert torch.equal(again[0], rows)
            assert local is None or local.dtype == ids.dtype
            results.append((rows, local, buffer.combine(rows, handle)[0]))
        assert torch.equal(results[0][0], results[1][0])
        assert expand or torch.equal(results[0][1], results[1][1].long())
        assert torch.equal(results[0][2], results[1][2])

    run_ranks(2, rank)


def test_dtype_of_ids_from_the_environment() -> None:
    code = "from tile_kernels.ep import topk_idx_t; print(topk_idx_t)"
    environment = {**os.environ, "EP_NUM_TOPK_IDX_BITS": "32"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "torch.int32"


def test_fields_of_a_handle() -> None:
    """The worked example: ranks 0 and 1 with the choices of the documentation."""
    choices = [[[0, 3], [1, 0]], [[2, 3], [-1, 1]]]
    slots = [[[0, 0], [-1, 1]], [[-1, 4], [-1, 4]]]

    def rank(group: LocalGroup) -> None:
        topk_idx = torch.tensor(choices[group.rank])
        buffer = ElasticBuffer(group, num_max_tokens_per_rank=4, hidden=HIDDEN, num_topk=2)
        x = torch.ones(2, HIDDEN)
        for static in (False, True):
            handle = buffer.dispatch(x, topk_idx, num_experts=4, do_cpu_sync=not static)[3]
            assert handle.dst_buffer_slot_idx.tolist() == slots[group.rank]
            assert handle.dst_buffer_slot_idx.dtype == torch.int32
            assert handle.token_metadata_at_forward is handle.channel_linked_list is None
            handle.deterministic_sort(x)
            metadata = handle.recv_src_metadata.clone()
            handle.recv_src_metadata = metadata
            assert handle.recv_src_metadata is metadata

    run_ranks(2, rank)


def test_slots_are_those_of_the_metadata() -> None:
    """The sender's slot of a token is its index among the rows that it sent to that rank."""

    def rank(group: LocalGroup) -> list[Any]:
        x, topk_idx = tokens(group.rank)
        handle = buffer_of(group).dispatch(x, topk_idx, num_experts=EXPERTS)[3]
        sent = handle.dst_buffer_slot_idx.tolist()
        return [topk_idx.tolist(), sent, handle.recv_src_metadata[:, 0].tolist()]

    found = run_ranks(2, rank)
    for receiver in range(2):
        for sender in range(2):
            ids, slots, _ = found[sender]
            order = [
                (slot, sender * 8 + token)
                for token, (chosen, row) in enumerate(zip(ids, slots))
                for expert, slot in zip(chosen, row)
                if slot >= 0 and expert // 2 == receiver
            ]
            assert [slot - sender * 8 for slot, _ in sorted(order)] == list(range(len(order)))
            arrived = [source for source in found[receiver][2] if source // 8 == sender]
            assert [source for _, source in sorted(order)] == arrived


def test_session_bytes_of_one_shape() -> None:
    group = LocalGroup()
    one = ElasticBuffer.get_agrs_num_max_session_bytes(group, (3, 5), torch.float32)
    assert one == ElasticBuffer.get_agrs_num_max_session_bytes(group, [(3, 5)], torch.float32) == 64
    several = ElasticBuffer.get_agrs_num_max_session_bytes(group, [(3, 5), (8,)], torch.float32)
    assert several == 96


def test_size_of_the_buffer_is_enforced() -> None:
    def rank(group: LocalGroup) -> None:
        buffer = ElasticBuffer(group, num_bytes=2 << 20)
        x, topk_idx = torch.ones(4, 64), torch.zeros(4, 1, dtype=torch.int64)
        handle = buffer.dispatch(x, topk_idx, num_experts=2, num_max_tokens_per_rank=4)[3]
        # 2 ranks x 4096 tokens of 256 bytes of data and 32 of metadata
        needed = model.PAGE * 2
        with pytest.raises(ValueError, match=f"must be at least {needed} for this call, got 2097"):
            buffer.dispatch(x, topk_idx, num_experts=2, num_max_tokens_per_rank=4096)
        with pytest.raises(ValueError, match=r"must be at least .* for this call"):
            buffer.combine(torch.ones(handle.num_recv_tokens, 1 << 19), handle)
        buffer.barrier()  # the group is usable after that

    run_ranks(2, rank)


def test_size_for_sessions_and_the_pipeline_is_enforced() -> None:
    def rank(group: LocalGroup) -> None:
        buffer = ElasticBuffer(group, num_bytes=2 * model.PAGE, num_cpu_bytes=model.PAGE)
        buffer.pp_set_config(model.PAGE // 8, 2)
        buffer.agrs_set_config(model.PAGE, 2)
        needed = f"must be at least {3 * model.PAGE} for this call with {model.PAGE} num_cpu_bytes"
        x = torch.ones(4096, 64)
        topk_idx = torch.zeros(len(x), 1, dtype=torch.int64)
        for call in (
            lambda: buffer.pp_set_config(model.PAGE // 8 + 1, 2),
            lambda: buffer.agrs_set_config(model.PAGE + 1, 2),
            lambda: buffer.dispatch(x, topk_idx, num_experts=2, num_max_tokens_per_rank=4096),
        ):
            with pytest.raises(ValueError, match=needed):
                call()

    run_ranks(2, rank)


def test_arguments_of_a_fetch() -> None:
    buffer = ElasticBuffer(
        LocalGroup(), num_bytes=2 * model.PAGE, num_cpu_bytes=model.PAGE, num_allocated_qps=9
    )
    buffer.engram_write(torch.ones(6, 16).to(torch.float8_e4m3fn), torch.rand(6, 3))
    indices = torch.tensor([[1, 5], [0, 2], [3, 3]], dtype=torch.int32)
    for flag in (0, 1):
        fetch = buffer.engram_fetch(indices, num_qps=9, use_tma_aligned_col_major_sf=flag)
        assert fetch()[1].stride() == ((1, 4) if flag else (6, 1))
    with pytest.raises(ValueError, match="num_qps must be at most the 9 queue pairs"):
        buffer.engram_fetch(indices, num_qps=10)
    with pytest.raises(TypeError, match="use_tma_aligned_col_major_sf must be"):
        buffer.engram_fetch(indices, use_tma_aligned_col_major_sf=2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"use_tma_aligned_col_major_sf": 2},
            "use_tma_aligned_col_major_sf must be a bool, got int",
        ),
        ({"num_qps": 10}, "num_qps must be at most the 9 queue pairs"),
        ({"indices": torch.full((1, 2), 8, dtype=torch.int32)}, "indices must hold 0..7"),
    ],
)
def test_a_wrong_fetch_of_one_rank_is_an_error_of_all(
    changes: dict[str, Any], message: str
) -> None:
    def rank(group: LocalGroup) -> None:
        buffer = ElasticBuffer(
            group, num_bytes=2 * model.PAGE, num_cpu_bytes=model.PAGE, num_allocated_qps=9
        )
        buffer.engram_write(torch.ones(4, 16))
        given: dict[str, Any] = {"indices": torch.tensor([[1, 5]], dtype=torch.int32)}
        with pytest.raises((TypeError, ValueError), match=f"rank 1: {message}"):
            buffer.engram_fetch(**{**given, **(changes if group.rank else {})})
        assert buffer.engram_fetch(**given)()[0].shape == (1, 32)

    run_ranks(2, rank)


def test_limits_of_deep_ep_are_named() -> None:
    assert model.limits_exceeded(1, 8, 256) == []
    sentences = model.limits_exceeded(16, 128, 4096)
    assert sentences[0] == "DeepEP has at most 1024 ranks, this configuration has 2048"
    assert "experts, this configuration has 4096" in sentences[1]
    assert "ranks of a node and local experts" in sentences[2]


# ---- mistakes -----------------------------------------------------------------------------------


def different_calls(group: Any, engine: str = "auto") -> list[str]:
    """Ranks that call different things; each is an error on both, and the group stays usable."""
    me = group.rank() if callable(group.rank) else group.rank
    first = buffer_of(group, explicitly_destroy=True, engine=engine)
    second = buffer_of(group, engine=engine)
    x, topk_idx = tokens(me)
    legacy = Buffer(group, engine=engine)
    _, _, per_expert, in_rank, _ = legacy.get_dispatch_layout(topk_idx, EXPERTS)

    def legacy_dispatch() -> Any:
        return legacy.dispatch(
            x, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert, topk_idx=topk_idx
        )

    received = legacy_dispatch()
    for each in (first, second):
        each.agrs_set_config(1024, 2)
        each.create_agrs_session()
    nothing, part = torch.zeros(0, 2), torch.ones(2)
    calls: list[Any] = [
        (first.barrier, lambda: first.dispatch(x, topk_idx, num_experts=EXPERTS)),
        (first.destroy, first.barrier),
        (first.barrier, second.barrier),
        (lambda: first.agrs_set_config(1024, 2), lambda: first.pp_set_config(1024, 2)),
        (lambda: first.engram_write(nothing), lambda: second.engram_write(nothing)),
        (lambda: first.all_gather(part), lambda: second.all_gather(part)),
        (lambda: ElasticBuffer.get_buffer_size_hint(group, 4, HIDDEN), first.barrier),
        (first.barrier, lambda: buffer_of(group, engine=engine)),
        (lambda: get_physical_domain_size(group), lambda: get_logical_domain_size(group)),
        (legacy_dispatch, lambda: legacy.combine(received[0], received[4])),
    ]
    found = []
    for pair in calls:
        try:
            pair[me]()
        except ValueError as error:
            found.append(str(error))
    first.barrier()
    rows, _, _, handle, _ = second.dispatch(x, topk_idx, num_experts=EXPERTS)
    num_ranks = 1 + (topk_idx[:, 0] // 2 != topk_idx[:, 1] // 2).int()
    torch.testing.assert_close(second.combine(rows, handle)[0], x * num_ranks[:, None])
    return found


EXPECTED = [
    "all ranks must make the same call, but rank 0 calls ElasticBuffer.barrier and rank 1 calls "
    "ElasticBuffer.dispatch",
    "all ranks must make the same call, but rank 0 calls ElasticBuffer.destroy and rank 1 calls "
    "ElasticBuffer.barrier",
    "ElasticBuffer.barrier: buffer must be the same on all ranks, got number 1 of the group on "
    "rank 0 and number 2 of the group on rank 1",
    "all ranks must make the same call, but rank 0 calls ElasticBuffer.agrs_set_config and rank 1 "
    "calls ElasticBuffer.pp_set_config",
    "ElasticBuffer.engram_write: buffer must be the same on all ranks, got number 1 of the group "
    "on rank 0 and number 2 of the group on rank 1",
    "ElasticBuffer.all_gather: buffer must be the same on all ranks, got number 1 of the group on "
    "rank 0 and number 2 of the group on rank 1",
    "all ranks must make the same call, but rank 0 calls ElasticBuffer.get_buffer_size_hint and "
    "rank 1 calls ElasticBuffer.barrier",
    "all ranks must make the same call, but rank 0 calls ElasticBuffer.barrier and rank 1 calls "
    "ElasticBuffer",
    "all ranks must make the same call, but rank 0 calls get_physical_domain_size and rank 1 calls "
    "get_logical_domain_size",
    "all ranks must make the same call, but rank 0 calls Buffer.dispatch and rank 1 calls "
    "ElasticBuffer.combine",
]


def test_different_calls_of_threads() -> None:
    assert run_ranks(2, different_calls) == [EXPECTED] * 2


@pytest.mark.multiprocess
@pytest.mark.parametrize("engine", ["collective", "mmap"])
def test_different_calls_of_processes(engine: str) -> None:
    assert run_processes(2, different_calls, engine) == [EXPECTED] * 2


def test_different_calls_over_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where one of the calls is made before there are windows."""
    use_windows(monkeypatch)
    assert run_ranks(2, different_calls) == [EXPECTED] * 2


def test_a_destroyed_buffer_refuses_every_call() -> None:
    def rank(group: LocalGroup) -> None:
        buffer = buffer_of(group, explicitly_destroy=True)
        x, topk_idx = tokens(group.rank)
        rows, _, _, handle, _ = buffer.dispatch(x, topk_idx, num_experts=EXPERTS)
        buffer.agrs_set_config(1024, 2)
        buffer.pp_set_config(1024, 2)
        buffer.destroy()
        buffer.destroy()  # again: nothing
        for call in (
            buffer.barrier,
            buffer.create_agrs_session,
            lambda: buffer.agrs_get_inplace_tensor((2,), torch.float32),
            lambda: buffer.all_gather(x),
            lambda: buffer.dispatch(x, topk_idx, num_experts=EXPERTS),
            lambda: buffer.combine(rows, handle),
            lambda: buffer.pp_send(torch.ones(8), 1 - group.rank),
            lambda: buffer.engram_write(torch.ones(2, 2)),
            lambda: buffer.engram_fetch(torch.zeros(1, 1, dtype=torch.int32)),
            lambda: buffer.sum_over_ranks(torch.ones(2, dtype=torch.int64)),
        ):
            with pytest.raises(RuntimeError, match="the buffer was destroyed"):
                call()

    run_ranks(2, rank)


def test_weights_that_cannot_come_back_are_refused_in_forward() -> None:
    def rank(group: LocalGroup) -> None:
        buffer = buffer_of(group, allow_multiple_reduction=False)
        x, topk_idx = tokens(group.rank)
        weights = torch.rand(topk_idx.shape)
        options: dict[str, Any] = {"num_experts": EXPERTS, "do_expand": True}
        buffer.dispatch(x, topk_idx, weights, **options)
        with pytest.raises(ValueError, match="topk_weights must not require gradients"):
            buffer.dispatch(x, topk_idx, weights.requires_grad_(), **options)
        with torch.no_grad():
            buffer.dispatch(x, topk_idx, weights, **options)

    run_ranks(2, rank)
