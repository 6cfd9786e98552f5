"""Ranks as processes, over gloo and through shared memory: the same bits as the reference, the same
errors on every rank.
"""

from __future__ import annotations

import gc
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ep.helpers import Case, check_rank, make_buffer
from tests.ep.processes import run_processes
from tile_kernels.ep import (
    ElasticBuffer,
    exchange,
    get_logical_domain_size,
    get_physical_domain_size,
    transport,
)
from tile_kernels.ep.engines import chosen_engine, make_engine
from tile_kernels.ep.engines.collective import CollectiveEngine
from tile_kernels.ep.engines.mmap import CHUNK
from tile_kernels.testing.numeric import assert_equal

FP8 = ((torch.float8_e4m3fn, 64), (torch.float32, 2))
MIXED = ((torch.bfloat16, 5), (torch.int16, 3), (torch.bool, 1), (torch.int64, 2))

each_engine = pytest.mark.parametrize("engine", ["collective", "mmap"])

ALONE: list[dict[str, Any]] = [
    {"ranks_per_node": 1, "tokens": (7,)},
    {"ranks_per_node": 1, "tokens": (0,), "expand": True},
]
PAIR: list[dict[str, Any]] = [
    {"tokens": (5, 3)},
    {"tokens": (5, 0), "expand": True, "alignment": 4, "num_biases": 2, "num_topk": 4},
    {"tokens": (0, 0)},
    {"tokens": (4, 9), "widths": FP8, "expand": True, "alignment": 8},
    {"tokens": (4, 9), "widths": MIXED, "num_topk": 32, "experts_per_rank": 24},
    {"num_nodes": 2, "ranks_per_node": 1, "tokens": (4, 6), "num_biases": 1},
]
FOUR: list[dict[str, Any]] = [
    {"ranks_per_node": 4, "tokens": (5, 3, 0, 8), "num_topk": 6, "expand": True, "alignment": 4},
    {"ranks_per_node": 4, "tokens": (5, 3, 0, 8), "num_topk": 6, "multiple_reduction": False,
     "expand": True},
    {"num_nodes": 2, "tokens": (5, 3, 0, 8), "num_topk": 6, "num_biases": 1, "widths": FP8},
    {"num_nodes": 2, "tokens": (5, 3, 0, 8), "num_topk": 6, "num_biases": 2, "expand": True,
     "experts_per_rank": 3},
    {"num_nodes": 2, "tokens": (5, 3, 2, 8), "num_topk": 6, "multiple_reduction": False},
    {"num_nodes": 2, "tokens": (5, 3, 2, 8), "num_topk": 6, "multiple_reduction": False,
     "expand": True},
]  # fmt: skip


def check_all(group: dist.ProcessGroup, engine: str, cases: list[dict[str, Any]]) -> None:
    for case in cases:
        check_rank(group, Case(**case), engine=engine, explicitly_destroy=True)


@pytest.mark.parametrize(
    ("num_ranks", "cases"), [(1, ALONE), (2, PAIR), (4, FOUR)], ids=["1", "2", "4"]
)
@each_engine
def test_against_reference(engine: str, num_ranks: int, cases: list[dict[str, Any]]) -> None:
    run_processes(num_ranks, check_all, engine, cases)


def errors_of(group: dist.ProcessGroup, engine: str) -> list[str]:
    """What this rank hears of mistakes that rank 1 makes; in between, that all is still well."""
    buffer = ElasticBuffer(group, num_max_tokens_per_rank=4, hidden=2, engine=engine)
    good: dict[str, Any] = {
        "x": torch.zeros(2, 2),
        "topk_idx": torch.tensor([[0, 3], [1, -1]]),
        "num_experts": 4,
    }
    mistakes: list[dict[str, Any]] = [
        {"x": torch.zeros(2, 3)},
        {"x": torch.zeros(2, 2).to(torch.float8_e4m3fn)},
        {"topk_idx": torch.tensor([[3, 3], [1, -1]])},
        {"x": torch.zeros(5, 2), "topk_idx": torch.full((5, 1), -1)},
        {"num_experts": 3},
    ]
    heard = []
    for mistake in mistakes:
        try:
            buffer.dispatch(**{**good, **(mistake if buffer.rank_idx == 1 else {})})
        except (TypeError, ValueError) as error:
            heard.append(f"{type(error).__name__} {error}")
        rows, _, _, handle, _ = buffer.dispatch(**good)
        try:
            buffer.combine(rows[: -1 if buffer.rank_idx == 1 else None], handle)
        except ValueError as error:
            heard.append(str(error))
    return heard


@each_engine
def test_errors_on_every_rank_and_life_goes_on(engine: str) -> None:
    first, second = run_processes(2, errors_of, engine)
    assert first == second
    call = "ElasticBuffer.dispatch: "
    assert first[0::2] == [
        f"ValueError {call}x must be the same on all ranks, got float32 rows of 2 on rank 0 and "
        "float32 rows of 3 on rank 1",
        f"ValueError {call}x must be the same on all ranks, got float32 rows of 2 on rank 0 and "
        "float8_e4m3fn rows of 2 on rank 1",
        f"ValueError {call}rank 1: topk_idx must name an expert once for each token, but token 0 "
        "names expert 3 more often",
        f"ValueError {call}rank 1: x must have at most num_max_tokens_per_rank = 4 tokens, got 5",
        f"ValueError {call}rank 1: num_experts must be a multiple of the 2 ranks, got 3",
    ]
    combine = "ElasticBuffer.combine: rank 1: x must have shape [2, hidden], got (1, 2)"
    assert first[1::2] == [combine] * 5


def part_of_the_world(group: dist.ProcessGroup) -> tuple[int, int] | None:
    """Ranks 1 and 3 of four: their numbers in the group are not those in the world."""
    part = dist.new_group([1, 3])
    if group.rank() not in (1, 3):
        return None
    check_rank(part, Case(tokens=(4, 6), num_topk=3))
    check_rank(part, Case(num_nodes=2, ranks_per_node=1, tokens=(4, 6), num_topk=3))
    assert get_logical_domain_size(part, allow_hybrid_mode=False) == (1, 2)
    return get_physical_domain_size(part)


def test_part_of_the_world() -> None:
    assert run_processes(4, part_of_the_world) == [None, (1, 2), None, (1, 2)]


def unavailable(group: dist.ProcessGroup, engine: str) -> str:
    with pytest.raises(ValueError, match="is not available") as error:
        ElasticBuffer(group, num_bytes=2 << 20, engine=engine)
    return str(error.value)


def test_engine_that_cannot_serve_the_group() -> None:
    (message,) = run_processes(1, unavailable, "local")
    assert message.startswith(
        "ElasticBuffer: rank 0: engine 'local' is not available: its ranks are threads"
    )


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="asks what a machine without a CUDA device says"
)
def test_symm_says_what_is_missing() -> None:
    assert set(run_processes(2, unavailable, "symm")) == {
        "ElasticBuffer: rank 0: engine 'symm' is not available: there is no CUDA device "
        "(errors on 2 ranks)"
    }


def many_buffers(group: dist.ProcessGroup) -> tuple[int, list[int]]:
    before = len(dist.distributed_c10d._world.pg_map)
    held = []
    for _ in range(4):
        case = Case(num_nodes=2, ranks_per_node=1, tokens=(4, 6))
        check_rank(group, case, explicitly_destroy=True)
        buffer = ElasticBuffer(
            group, num_bytes=2 << 20, num_scaleup_ranks=1, explicitly_destroy=True
        )
        buffer.barrier()
        buffer.destroy()
        del buffer
        gc.collect()
        held.append(what_is_held()[1])
    return len(dist.distributed_c10d._world.pg_map) - before, held


def test_buffers_share_their_connections() -> None:
    for num_groups, held in run_processes(2, many_buffers):
        assert num_groups == 0
        assert held == held[:1] * 4


def count_collectives(group: dist.ProcessGroup, engine: str) -> int:
    """How often the group itself is used by a buffer of CPU ranks."""
    case = Case(num_nodes=2, ranks_per_node=1, tokens=(4, 6))
    before = group._get_sequence_number_for_group()
    check_rank(group, case, engine=engine)
    return group._get_sequence_number_for_group() - before


@pytest.mark.parametrize("engine", ["collective", "mmap"])
def test_a_buffer_leaves_its_group_alone(engine: str) -> None:
    assert run_processes(2, count_collectives, engine) == [0, 0]


def beside_other_calls(group: dist.ProcessGroup) -> None:
    """A thread uses a buffer, and another one its group, in any order."""
    case = Case(tokens=(40, 60))
    buffer = make_buffer(group, case)
    me = buffer.rank_idx
    x, chosen = case.payloads[me][0], case.topk_idx[me]
    owners = torch.where(chosen >= 0, chosen // case.experts_per_rank, -1)
    copies = sum((owners == rank).any(1, keepdim=True) for rank in range(2))
    problems: list[BaseException] = []

    def use() -> None:
        try:
            for _ in range(20):
                rows, _, _, handle, _ = buffer.dispatch(x, chosen, num_experts=case.num_experts)
                assert_equal(buffer.combine(rows, handle)[0], x * copies + 0.0)
        except BaseException as error:
            problems.append(error)

    thread = threading.Thread(target=use)
    thread.start()
    for _ in range(20):
        time.sleep(0.003 * me)
        total = torch.ones(3)
        dist.all_reduce(total, group=group)
        assert total.tolist() == [2.0] * 3
    thread.join()
    if problems:
        raise problems[0]


def test_a_buffer_beside_other_calls_of_its_group() -> None:
    run_processes(2, beside_other_calls)


def prepare_meanwhile(group: dist.ProcessGroup) -> list[list[str]]:
    """What rank 0 does of a call while rank 1 has not made it yet."""
    case = Case(tokens=(5, 3), expand=True)
    buffer = make_buffer(group, case)
    me, log, found = buffer.rank_idx, [], []
    start = CollectiveEngine.start

    def logged(self: CollectiveEngine, *args: Any) -> Any:
        end = start(self, *args)
        log.append(f"starts {args[3]}")
        return lambda: (log.append(f"awaits {args[3]}"), end())[1]

    def named(name: str, function: Any) -> Any:
        return lambda *args, **kwargs: (log.append(name), function(*args, **kwargs))[1]

    CollectiveEngine.start = logged  # type: ignore[method-assign]
    transport.pack = named("packs", transport.pack)
    exchange.pack = named("packs", exchange.pack)
    transport.staged_sum = exchange.staged_sum = named("adds", transport.staged_sum)

    def call(function: Any) -> Any:
        log.clear()
        result = function()
        found.append(list(log))
        return result

    x, chosen = case.payloads[me][0], case.topk_idx[me]
    rows, _, _, handle, _ = call(lambda: buffer.dispatch(x, chosen, num_experts=4, do_expand=True))
    call(lambda: buffer.dispatch(x, handle=handle))
    call(lambda: buffer.combine(rows, handle))
    return found


def test_ranks_prepare_while_they_agree() -> None:
    for new, again, combine in run_processes(2, prepare_meanwhile):
        call = "ElasticBuffer.dispatch"
        descriptors, sent = f"{call} (exchange of descriptors)", f"{call} (rows)"
        steps = [f"starts {descriptors}", "packs", f"awaits {descriptors}", f"starts {sent}"]
        assert new == again == [*steps, f"awaits {sent}"]
        call = "ElasticBuffer.combine"
        descriptors, sent = f"{call} (exchange of descriptors)", f"{call} (rows)"
        steps = [f"starts {descriptors}", "adds", "packs", f"awaits {descriptors}"]
        assert combine == [*steps, f"starts {sent}", f"awaits {sent}", "adds"]


def two_worlds(group: dist.ProcessGroup, folder: str) -> None:
    """A process may leave one world and join another."""
    case = Case(num_nodes=2, ranks_per_node=1, tokens=(4, 6))
    check_rank(group, case)
    rank = group.rank()
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{folder}/2", rank=rank, world_size=2)
    check_rank(dist.group.WORLD, case)


def test_two_worlds(tmp_path: Path) -> None:
    run_processes(2, two_worlds, str(tmp_path))


def large_rows(group: dist.ProcessGroup) -> None:
    """Many chunks, more than a slab holds, unequally many to each rank; then single messages."""
    folders = set(Path("/dev/shm").glob("tile_kernels_ep_*"))
    engine = chosen_engine(make_engine(group), "mmap")
    engine.barrier()
    assert set(Path("/dev/shm").glob("tile_kernels_ep_*")) <= folders  # no trace on the disk
    rank, size = engine.index, engine.size
    width, counts = (
        1001,
        [[rank * 300 + peer * 500 for peer in range(size)] for rank in range(size)],
    )
    sent = torch.cat(
        [
            torch.full((counts[rank][p], width), 10 * rank + p, dtype=torch.uint8)
            for p in range(size)
        ]
    )
    for _ in range(2):
        recv_counts = [counts[peer][rank] for peer in range(size)]
        found = engine.exchange(sent, counts[rank], recv_counts)
        for peer, part in enumerate(found.split(recv_counts)):
            assert (part == 10 * peer + rank).all()
        engine.barrier()
    pending = engine.send(torch.full((CHUNK * 3,), rank, dtype=torch.uint8), (rank + 1) % size)
    out = torch.empty(CHUNK * 3, dtype=torch.uint8)
    engine.receive(out, (rank - 1) % size)
    assert (out == (rank - 1) % size).all()
    pending.wait()
    if rank < 2:  # a part uses the same rings
        pair = engine.split([0, 1])
        assert pair.gather(torch.tensor([rank], dtype=torch.uint8)).tolist() == [[0], [1]]


def test_rows_larger_than_a_slab() -> None:
    run_processes(3, large_rows)


def different_engines(group: dist.ProcessGroup) -> str:
    engine = "mmap" if group.rank() else "collective"
    with pytest.raises(ValueError, match="engine must be the same") as error:
        ElasticBuffer(group, num_bytes=2 << 20, engine=engine)
    return str(error.value)


def test_engines_must_be_the_same() -> None:
    assert set(run_processes(2, different_engines)) == {
        "ElasticBuffer: engine must be the same on all ranks, got collective on rank 0 and mmap on "
        "rank 1"
    }


def what_is_held() -> tuple[int, int]:
    """Resident memory of this process in KiB, and its open descriptors."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4, len([*Path("/proc/self/fd").iterdir()])


def many_steps(group: Any, engine: str, steps: int) -> list[tuple[int, int]]:
    """Dispatch, dispatch with the handle, combine; what is held after a fifth, and at the end."""
    buffer = ElasticBuffer(group, num_max_tokens_per_rank=64, hidden=256, engine=engine)
    generator = torch.Generator().manual_seed(buffer.rank_idx)
    found = []
    for step in range(steps):
        x = torch.randn(64, 256, generator=generator)
        chosen = torch.rand(64, 8, generator=generator).argsort(1)[:, :3].contiguous()
        rows, _, _, handle, _ = buffer.dispatch(x, chosen, num_experts=8, do_expand=True)
        buffer.dispatch(x, handle=handle)
        torch.testing.assert_close(buffer.combine(rows, handle)[0], 3 * x)
        if step in (steps // 5, steps - 1):
            gc.collect()
            found.append(what_is_held())
    return found


@pytest.mark.parametrize("engine", ["collective", "mmap"])
def test_many_steps_hold_nothing_more(engine: str, request: pytest.FixtureRequest) -> None:
    """1000 steps in the full run. A tensor of each step that stayed would be 50 MiB or more."""
    steps = 1000 if request.config.getoption("full") else 250
    for (memory, files), (memory_after, files_after) in run_processes(
        2, many_steps, engine, steps, timeout=500
    ):
        assert files_after <= files
        assert memory_after - memory < 8 << 10
