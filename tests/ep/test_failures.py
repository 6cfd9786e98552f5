"""Ranks that die or hang: the others say which one and in which phase, and go on without it."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ep.helpers import Case, check_handle
from tests.ep.processes import run_processes
from tile_kernels.ep import (
    ElasticBuffer,
    LocalGroup,
    get_physical_domain_size,
    reference,
    run_ranks,
)
from tile_kernels.ep.engines.base import Engine
from tile_kernels.ep.engines.collective import CollectiveEngine
from tile_kernels.ep.engines.watch import Watch
from tile_kernels.testing.numeric import assert_equal

TIMEOUT = 3
LOST = 2  # of four ranks

each_engine = pytest.mark.parametrize("engine", ["collective", "mmap"])


def the_case(**changes: Any) -> Case:
    return Case(
        ranks_per_node=4, tokens=(5, 3, 4, 8), num_topk=5, experts_per_rank=3, num_biases=1,
        **changes,
    )  # fmt: skip


def without(case: Case, rank: int) -> Case:
    """The same, as if that rank had no tokens and nobody had chosen its experts."""
    count = case.experts_per_rank
    for ids in case.topk_idx:
        ids[ids // count == rank] = -1
    parts = (case.topk_idx, case.topk_weights, case.payloads, case.bias)
    for part in parts:
        mine = part[rank]
        part[rank] = tuple(each[:0] for each in mine) if isinstance(mine, tuple) else mine[:0]
    return case


def check_survivor(group: Any, case: Case, **options: Any) -> None:
    """A rank of a group that goes on without `LOST`, against the reference."""
    active = [rank != LOST for rank in range(case.num_ranks)]
    buffer = ElasticBuffer(
        group, num_max_tokens_per_rank=case.max_tokens, hidden=6, active_ranks=active,
        num_cpu_timeout_secs=20, **options,
    )  # fmt: skip
    me, chosen = buffer.rank_idx, case.topk_idx[buffer.rank_idx]
    assert buffer.num_ranks == case.num_ranks
    left = without(case, LOST)
    everything = left.expected()
    static = options.get("check_ranks") is False
    (rows,), ids, weights, handle, _ = buffer.dispatch(
        case.payloads[me], chosen, case.topk_weights[me], num_experts=case.num_experts,
        expert_alignment=case.alignment, do_expand=case.expand, do_cpu_sync=not static,
    )  # fmt: skip
    count = everything[me].payloads[0].shape[0]
    assert_equal(rows[:count], everything[me].payloads[0])
    assert_equal(weights[:count], everything[me].topk_weights)
    if not case.expand:
        assert_equal(ids[:count], everything[me].topk_idx)
    if not static:
        check_handle(handle, case, everything[me], me)
    outputs = case.outputs(everything)
    given = torch.zeros(rows.shape, dtype=outputs[me].dtype)
    given[:count] = outputs[me]
    combined, back, _ = buffer.combine(given, handle, weights, bias=case.bias[me])
    wanted = reference.combine(
        outputs, everything, left.topk_idx, case.num_experts, case.max_tokens, case.topology,
        case.expand, bias=left.bias,
    )  # fmt: skip
    assert_equal(combined, wanted[me])
    assert_equal(back, case.topk_weights[me] * (left.topk_idx[me] >= 0))
    with pytest.raises(ValueError, match=r"all ranks must be active, but only \[0, 1, 3\] of 4"):
        buffer.pp_set_config(32, 1)
    with pytest.raises(ValueError, match="engram_write: all ranks must be active"):
        buffer.engram_write(torch.zeros(2, 2))


def lose_a_rank(group: dist.ProcessGroup, engine: str, how: str) -> tuple[str, float] | None:
    """`LOST` leaves in the middle of things; what this rank hears and when, and that it goes on."""
    case = the_case()
    me = group.rank()
    buffer = ElasticBuffer(
        group, num_max_tokens_per_rank=case.max_tokens, hidden=6, engine=engine,
        num_cpu_timeout_secs=TIMEOUT,
    )  # fmt: skip
    arguments = {"topk_idx": case.topk_idx[me], "num_experts": case.num_experts}
    rows, _, _, handle, _ = buffer.dispatch(case.payloads[me][0], **arguments)
    if me == LOST:
        if how == "dies":
            os._exit(1)
        time.sleep(TIMEOUT + 6)
        return None
    start = time.monotonic()
    with pytest.raises(RuntimeError) as error:
        buffer.combine(rows, handle)
    seconds = time.monotonic() - start
    check_survivor(group, case, engine=engine)
    return str(error.value), seconds


@pytest.mark.parametrize("how", ["dies", "hangs"])
@each_engine
def test_a_lost_rank_is_named_and_left_behind(engine: str, how: str) -> None:
    results = run_processes(4, lose_a_rank, engine, how, may_die=(LOST,))
    assert results.pop(LOST) is None
    for rank, (message, seconds) in zip((0, 1, 3), results):
        assert message.startswith(f"rank {rank} ")
        assert f"rank {LOST}" in message
        assert "ElasticBuffer.combine (exchange of descriptors)" in message
        assert seconds < TIMEOUT + 4


def die_in_the_middle(group: dist.ProcessGroup, engine: str) -> str | None:
    """`LOST` agrees to a dispatch and is gone when its rows are wanted."""
    case = the_case(empty_slots=0.0)
    me = group.rank()
    buffer = ElasticBuffer(
        group, num_max_tokens_per_rank=case.max_tokens, hidden=6, engine=engine,
        num_cpu_timeout_secs=TIMEOUT,
    )  # fmt: skip
    if me == LOST:
        hop = buffer._fabric.hops[0]
        exchange = hop.exchange
        hop.exchange = lambda *a: os._exit(1) if "rows" in a[3] else exchange(*a)  # type: ignore
    with pytest.raises(RuntimeError) as error:
        buffer.dispatch(case.payloads[me][0], case.topk_idx[me], num_experts=case.num_experts)
    return str(error.value)


@each_engine
def test_a_rank_that_dies_in_the_middle_is_named(engine: str) -> None:
    results = run_processes(4, die_in_the_middle, engine, may_die=(LOST,))
    assert results.pop(LOST) is None
    for message in results:
        assert "in ElasticBuffer.dispatch (rows)" in message
        assert f"rank {LOST}" in message


CALLS = ("ElasticBuffer", "ElasticBuffer.dispatch", "ElasticBuffer.combine",
         "ElasticBuffer.barrier", "ElasticBuffer.destroy")  # fmt: skip
PHASES = [
    *(f"{call} (exchange of descriptors)" for call in CALLS),
    "learning the hosts",
    "ElasticBuffer.dispatch (rows)",
    "ElasticBuffer.dispatch (counts inside the node)",
    "ElasticBuffer.combine (rows)",
    "ElasticBuffer.all_gather",
    "ElasticBuffer.reduce_scatter",
    "ElasticBuffer.engram_write",
    "ElasticBuffer.engram_fetch",
    "ElasticBuffer.sum_over_ranks",
]


def die_in_a_phase(group: dist.ProcessGroup, phase: str) -> str | None:
    """Rank 1 is gone at the beginning of a phase, in two hops where that phase needs it."""
    if group.rank() == 1:
        start = CollectiveEngine.start

        def last_words(self: CollectiveEngine, *arguments: Any) -> Any:
            if arguments[3] == phase:
                os._exit(1)
            return start(self, *arguments)

        CollectiveEngine.start = last_words  # type: ignore[method-assign]
    x, chosen = torch.ones(2, 8), torch.tensor([[0, 1], [2, 3]])

    def use() -> None:
        buffer = ElasticBuffer(
            group, num_bytes=8 << 20, num_cpu_bytes=2 << 20, num_max_tokens_per_rank=4,
            num_cpu_timeout_secs=TIMEOUT, explicitly_destroy=True,
            num_scaleup_ranks=2 if "inside" in phase else None,
        )  # fmt: skip
        rows, _, _, handle, _ = buffer.dispatch(x, chosen, num_experts=4)
        buffer.combine(rows, handle)
        buffer.agrs_set_config(1024, 4)
        with buffer.agrs_new_session():
            buffer.all_gather(x)
            buffer.reduce_scatter(x)
        buffer.engram_write(x)
        buffer.engram_fetch(chosen[:1].int())
        buffer.sum_over_ranks(chosen)
        buffer.barrier()
        buffer.destroy()

    with pytest.raises(RuntimeError) as error:
        use()
    return str(error.value)


@pytest.mark.parametrize("phase", PHASES)
def test_a_rank_may_die_in_any_phase(phase: str) -> None:
    size = 4 if "inside" in phase else 2
    results = run_processes(size, die_in_a_phase, phase, may_die=(1,))
    assert results.pop(1) is None
    assert results[0].startswith(f"rank 0 gave up in {phase}: ")
    assert "rank 1" in results[0]


def die_before_a_buffer(group: dist.ProcessGroup, where: str) -> str | None:
    """Rank 1 is gone before the ranks have connections, or when it has answered once."""
    Engine.timeout = TIMEOUT  # 300 s for calls without a buffer
    if group.rank() == 1:
        if where == "later":
            CollectiveEngine.hosts = lambda _: os._exit(1)  # type: ignore
            get_physical_domain_size(group)
        os._exit(1)
    with pytest.raises(RuntimeError) as error:
        get_physical_domain_size(group)
    return str(error.value)


@pytest.mark.parametrize("where", ["at first", "later"])
def test_a_rank_that_dies_before_there_is_a_buffer_is_named(where: str) -> None:
    message, _ = run_processes(2, die_before_a_buffer, where, may_die=(1,))
    phase = "learning the hosts"
    if where == "at first":
        phase = "get_physical_domain_size (exchange of descriptors)"
    assert message.startswith(f"rank 0 gave up in {phase}: no answer from rank 1 (")


class Never:
    """An event on a stream that waits for a rank that never comes."""

    def query(self) -> bool:
        return False


def wait_on_a_stream(group: dist.ProcessGroup) -> list[str]:
    """Rank 1 is silent in a transfer of streams, which the hosts have enqueued."""
    buffer = ElasticBuffer(group, num_max_tokens_per_rank=4, hidden=8, num_gpu_timeout_secs=1)
    engine = buffer._fabric.world
    if group.rank() == 1:
        time.sleep(6)
        return []
    engine._watch = Watch(engine, engine.device_timeout)
    engine._watch.add(Never(), "ElasticBuffer.combine (rows)")
    messages = []
    for call in (engine.settle, buffer.barrier):
        with pytest.raises(RuntimeError) as error:
            call()
        messages.append(str(error.value))
    return messages


def test_a_rank_that_streams_wait_for_is_named() -> None:
    messages, _ = run_processes(2, wait_on_a_stream, may_die=(0, 1))
    cause = (
        "rank 0 gave up in ElasticBuffer.combine (rows): no answer from rank 1 (no data after 1 s)"
    )
    assert messages == [cause, f"collective: this buffer broke down before: {cause}"]


def test_the_watching_thread_needs_nobody_to_ask(caplog: pytest.LogCaptureFixture) -> None:
    """It names the phase in the log, and ends with its engine."""

    class Owner:
        def lost(self, phase: str, reason: str) -> RuntimeError:
            return RuntimeError(f"{phase}: {reason}")

        def give_up(self, watch: Watch, problem: str) -> None:
            assert watch.unfinished()
            assert problem == "a phase: no data after 0.1 s"

    def threads() -> int:
        return sum(each.name == "tile_kernels.ep" for each in threading.enumerate())

    before, owner = threads(), Owner()
    watches = [Watch(owner, 0.1), Watch(owner, 100)]
    for watch in watches:
        assert not watch.check()
        watch.add(Never(), "a phase")
    assert threads() == before + 2
    time.sleep(0.5)
    assert [watch.problem for watch in watches] == ["a phase: no data after 0.1 s", None]
    assert [record.getMessage() for record in caplog.records] == ["a phase: no data after 0.1 s"]
    del watch, watches
    time.sleep(0.3)
    assert threads() == before


def come_too_late(group: dist.ProcessGroup) -> str:
    """Rank 1 is late, so that both give up; then they begin again with all ranks."""
    options = {"num_max_tokens_per_rank": 4, "hidden": 8, "num_cpu_timeout_secs": 1}
    buffer = ElasticBuffer(group, explicitly_destroy=True, **options)
    time.sleep(3 * group.rank())
    with pytest.raises(RuntimeError) as error:
        buffer.barrier()
    options["num_cpu_timeout_secs"] = 20
    new = ElasticBuffer(group, **options)
    x = torch.ones(2, 8)
    rows, _, _, handle, _ = new.dispatch(x, torch.tensor([[0, 1], [2, 3]]), num_experts=4)
    assert_equal(new.combine(rows, handle)[0], x)
    with pytest.raises(RuntimeError, match="collective: this buffer broke down before: rank"):
        buffer.destroy()
    another = ElasticBuffer(group, **options)
    assert another._fabric.world._made is new._fabric.world._made  # type: ignore[attr-defined]
    another.barrier()
    new.barrier()
    return str(error.value)


def test_ranks_begin_again_after_one_was_late() -> None:
    for rank, message in enumerate(run_processes(2, come_too_late)):
        assert message.startswith(f"rank {rank} gave up in ElasticBuffer.barrier (exchange of des")


def hang_in_a_pipeline(group: dist.ProcessGroup) -> str | None:
    buffer = ElasticBuffer(group, num_bytes=2 << 20, num_cpu_timeout_secs=TIMEOUT)
    buffer.pp_set_config(num_max_tensor_bytes=64, num_max_inflight_tensors=1)
    if group.rank() == 1:
        time.sleep(TIMEOUT + 1)
        return None
    with pytest.raises(RuntimeError) as error:
        buffer.pp_recv(torch.zeros(8), 1)
    return str(error.value)


def test_a_neighbour_that_hangs_is_named() -> None:
    message, _ = run_processes(2, hang_in_a_pipeline, may_die=(0, 1))
    assert message.startswith("rank 0 waited in vain for rank 1 to send (")


def a_broken_buffer(group: dist.ProcessGroup) -> list[str]:
    """What rank 0 hears without rank 1 in `mmap`: which phase, then that it is too late."""
    buffer = ElasticBuffer(group, num_bytes=2 << 20, engine="mmap", num_cpu_timeout_secs=1)
    x, chosen = torch.ones(2, 8), torch.tensor([[0], [1]])

    def dispatch() -> None:
        buffer.dispatch(x, chosen, num_experts=2, num_max_tokens_per_rank=2)

    if group.rank() == 1:
        engine: Any = buffer._fabric.world
        engine.exchange = lambda *_: time.sleep(3)
        with pytest.raises(AttributeError):  # nothing arrived
            dispatch()
        return []
    results = []
    for action in (dispatch, buffer.barrier):
        with pytest.raises(RuntimeError) as error:
            action()
        results.append(str(error.value))
    return results


def test_a_buffer_that_broke_down_says_so() -> None:
    results, _ = run_processes(2, a_broken_buffer, may_die=(0, 1))
    cause = "rank 0 waited 1 s in ElasticBuffer.dispatch (rows) for rank 1 to send"
    assert results == [cause, f"mmap: this buffer broke down before: {cause}"]


@pytest.mark.parametrize("check_ranks", [True, False], ids=["counted", "static"])
@pytest.mark.parametrize("expand", [False, True], ids=["compact", "expanded"])
def test_threads_go_on_without_one(expand: bool, check_ranks: bool) -> None:
    case = the_case(expand=expand, alignment=4)

    def rank(group: LocalGroup) -> None:
        if group.rank != LOST:
            check_survivor(group, the_case(expand=expand, alignment=4), check_ranks=check_ranks)

    run_ranks(case.num_ranks, rank)


def test_buffers_of_changing_ranks() -> None:
    """Ranks that made different numbers of buffers before make one together."""

    def rank(group: LocalGroup) -> None:
        for active in ([True, True, False], [False, True, True], [True] * 3, [True, True, False]):
            if active[group.rank]:
                ElasticBuffer(group, num_bytes=2 << 20, active_ranks=active).barrier()

    run_ranks(3, rank)


def test_all_active_is_nothing_special() -> None:
    def rank(group: LocalGroup) -> tuple[int, int]:
        buffer = ElasticBuffer(
            group, num_bytes=2 << 20, num_scaleup_ranks=1, active_ranks=[True, True]
        )
        return buffer.get_logical_domain_size()

    assert run_ranks(2, rank) == [(2, 1)] * 2


@pytest.mark.parametrize(
    ("active", "message"),
    [
        ([True], "active_ranks must be 2 bools, one for each rank, got"),
        ([1, 1], "active_ranks must be 2 bools"),
        ([False, False], "active_ranks must not leave out this rank"),
    ],
)
def test_masks_that_mean_nothing(active: Any, message: str) -> None:
    def rank(group: LocalGroup) -> None:
        with pytest.raises(ValueError, match=message):
            ElasticBuffer(group, num_bytes=2 << 20, active_ranks=active)

    run_ranks(2, rank)
