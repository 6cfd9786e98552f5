"""Dispatch without CPU sync: worst-case sizes, the same rows, and a host that does not wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from tests.ep.helpers import Case, make_buffer
from tests.ep.processes import run_processes
from tests.ep.windows import use_windows
from tile_kernels import moe
from tile_kernels.ep import ElasticBuffer, exchange, rows, run_ranks, transport
from tile_kernels.testing.numeric import assert_equal

CASES: dict[str, dict[str, Any]] = {
    "2x2": {"num_nodes": 2, "tokens": (3, 0, 2, 4), "num_topk": 3},
    "direct": {"ranks_per_node": 4, "tokens": (3, 0, 5, 4), "num_topk": 6, "empty_slots": 0.5},
    "no tokens": {"num_nodes": 2, "ranks_per_node": 1, "tokens": (0, 0)},
    "one rank": {"ranks_per_node": 1, "tokens": (4,), "num_topk": 1},
}


def check_loose(group: Any, case: Case, check_ranks: bool) -> None:
    """Exact and worst-case sizes on this rank: the same rows, counts and sums."""
    buffer = make_buffer(group, case, check_ranks=check_ranks)
    me, experts = buffer.rank_idx, case.num_experts
    arguments = (case.payloads[me], case.topk_idx[me], case.topk_weights[me])
    options = {"num_experts": experts, "expert_alignment": 4, "do_expand": case.expand}
    (exact,), ids, weights, handle, _ = buffer.dispatch(*arguments, **options)
    (rows,), all_ids, all_weights, loose, _ = buffer.dispatch(
        *arguments, do_cpu_sync=False, **options
    )
    assert loose.routing.plan.is_static == (not check_ranks)
    num_tokens = case.num_ranks * case.max_tokens
    most = num_tokens * min(case.num_topk, case.experts_per_rank) + 3 * case.experts_per_rank
    assert loose.num_recv_tokens == num_tokens
    assert loose.num_expanded_tokens == (most + 3) // 4 * 4
    assert loose.num_recv_tokens_per_expert_list == []
    for name in ("psum_num_recv_tokens_per_expert", "psum_num_recv_tokens_per_scaleup_rank",
                 "num_unaligned_recv_tokens_per_expert"):  # fmt: skip
        assert_equal(getattr(loose, name), getattr(handle, name))
    arrived = handle.num_recv_tokens
    assert_equal(loose.recv_src_metadata[:arrived], handle.recv_src_metadata)
    count = exact.shape[0]
    assert rows.shape[0] == (loose.num_expanded_tokens if case.expand else num_tokens)
    assert_equal(rows[:count], exact)
    assert not rows[count:].any()
    assert_equal(all_weights[:count], weights)
    assert not all_weights[count:].any()
    if not case.expand:
        assert_equal(all_ids[:count], ids)
        assert (all_ids[count:] == -1).all()
    again = buffer.dispatch(case.payloads[me], handle=loose)[0][0]
    assert_equal(again, rows)
    rows[count:] = float("nan")  # nobody may look there
    all_weights[count:] = float("nan")
    found, back, _ = buffer.combine(rows, loose, all_weights, case.bias[me])
    wanted, back_wanted, _ = buffer.combine(exact, handle, weights, case.bias[me])
    assert_equal(found, wanted)
    assert_equal(back, back_wanted)


@pytest.mark.parametrize("check_ranks", [True, False], ids=["counted", "static"])
@pytest.mark.parametrize("expand", [False, True], ids=["compact", "expanded"])
@pytest.mark.parametrize("name", CASES)
def test_sizes_do_not_depend_on_what_arrives(name: str, expand: bool, check_ranks: bool) -> None:
    case = Case(**CASES[name], expand=expand, alignment=4, max_tokens=5, num_biases=1)
    run_ranks(case.num_ranks, lambda group: check_loose(group, case, check_ranks))


def between_processes(group: Any) -> None:
    case = Case(num_nodes=2, ranks_per_node=1, tokens=(3, 4), expand=True, alignment=4)
    check_loose(group, case, check_ranks=False)


def test_between_processes() -> None:
    run_processes(2, between_processes)


class NoWaiting(TorchDispatchMode):
    """Raises on operators whose result, or its size, the host must know."""

    NAMES = ("_local_scalar_dense", "item", "nonzero", "bincount", "masked_select", "equal",
             "unique", "repeat_interleave", "is_nonzero")  # fmt: skip

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name.startswith(self.NAMES):
            raise AssertionError(f"{func} waits for the device")
        if name in ("index", "index_put", "index_put_"):
            for index in args[1]:
                if index is not None and index.dtype in (torch.bool, torch.uint8):
                    raise AssertionError(f"{func} by a mask waits for the device")
        return func(*args, **(kwargs or {}))


def unwatched(function: Callable[..., Any]) -> Callable[..., Any]:
    """Kernels do not wait; their references may."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return call


class Kernels:
    """Stands for `tile_kernels.moe`."""

    expand_to_fused = staticmethod(unwatched(moe.expand_to_fused))
    get_fused_mapping = staticmethod(unwatched(moe.get_fused_mapping))
    reduce_fused = staticmethod(unwatched(moe.reduce_fused))


@pytest.mark.parametrize("expand", [False, True], ids=["compact", "expanded"])
@pytest.mark.parametrize("name", ["2x2", "direct"])
def test_the_host_does_not_wait(name: str, expand: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (transport, exchange, rows):
        monkeypatch.setattr(module, "moe", Kernels)
    for module in (transport, rows):  # as tensors on a GPU
        monkeypatch.setattr(module, "on_host", lambda _: False)
    case = Case(**CASES[name], num_biases=1)

    def rank(group: Any) -> None:
        buffer = make_buffer(group, case, check_ranks=False)
        me = group.rank
        options = {"num_experts": case.num_experts, "do_expand": expand, "expert_alignment": 2}
        arguments = (case.payloads[me][0], case.topk_idx[me], case.topk_weights[me])
        stats = torch.zeros(case.experts_per_rank, dtype=torch.int32)
        with NoWaiting():
            found, _, weights, handle, _ = buffer.dispatch(
                *arguments, stats, do_cpu_sync=False, **options
            )
            buffer.dispatch(case.payloads[me][0], handle=handle)
            buffer.combine(found, handle, weights, case.bias[me])
            buffer.dispatch(*arguments, do_cpu_sync=False, num_max_rows=3, **options)
        with pytest.raises(AssertionError, match="waits for the device"), NoWaiting():
            buffer.dispatch(*arguments, **options)

    run_ranks(case.num_ranks, rank)


@pytest.mark.parametrize("check_ranks", [True, False], ids=["counted", "static"])
@pytest.mark.parametrize("expand", [False, True], ids=["compact", "expanded"])
@pytest.mark.parametrize("windows", [False, True])
def test_rows_without_columns(
    windows: bool, expand: bool, check_ranks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights alone: a gradient of combine sends them, with rows of no columns."""
    if windows:
        use_windows(monkeypatch)
    case = Case(expand=expand)

    def rank(group: Any) -> None:
        buffer = make_buffer(group, case, check_ranks=check_ranks)
        me = buffer.rank_idx
        (rows,), ids, weights, handle, _ = buffer.dispatch(
            case.payloads[me], case.topk_idx[me], case.topk_weights[me],
            num_experts=case.num_experts, do_expand=expand, do_cpu_sync=False,
        )  # fmt: skip
        (nothing,), _, again, _, _ = buffer.dispatch(
            (case.payloads[me][0][:, :0],), topk_weights=case.topk_weights[me], handle=handle
        )
        assert nothing.shape == (len(rows), 0)
        assert_equal(again, weights)
        given = weights.clone().requires_grad_()
        back = buffer.combine(rows, handle, topk_weights=given)[1]
        back.sum().backward()
        sent = (weights != 0) if ids is None else (ids >= 0)
        assert_equal(given.grad, sent.float())

    run_ranks(2, rank)


def test_an_error_of_one_rank_stays_there() -> None:
    """Without the agreement check no rank waits for another."""
    case = Case()

    def rank(group: Any) -> None:
        buffer = make_buffer(group, case, check_ranks=False)
        with pytest.raises(ValueError, match=f"rank {group.rank}: num_experts must be given"):
            buffer.dispatch(case.payloads[0][0], case.topk_idx[0], do_cpu_sync=False)

    run_ranks(2, rank)


# ---- fewer rows than could be needed ------------------------------------------------------------


def check_capacity(group: Any, case: Case, capacity: int, check_ranks: bool) -> None:
    """What fits is as with enough room, the rest is counted and adds nothing."""
    buffer = make_buffer(group, case, check_ranks=check_ranks)
    me = buffer.rank_idx
    arguments = (case.payloads[me][0], case.topk_idx[me], case.topk_weights[me])
    options = {
        "num_experts": case.num_experts, "expert_alignment": 4, "do_expand": case.expand,
        "do_cpu_sync": False,
    }  # fmt: skip
    stats = torch.zeros(case.experts_per_rank, dtype=torch.int32)
    all_rows, all_ids, all_weights, full, _ = buffer.dispatch(*arguments, **options)
    rows, ids, weights, handle, _ = buffer.dispatch(
        *arguments, stats, num_max_rows=capacity, **options
    )
    assert rows.shape[0] == capacity
    assert full.num_dropped.tolist() == [0]
    full.raise_if_dropped()
    fits = min(capacity, all_rows.shape[0])
    assert_equal(rows[:fits], all_rows[:fits])
    assert_equal(weights[:fits], all_weights[:fits])
    assert_equal(stats, full.num_unaligned_recv_tokens_per_expert)  # the load, not what fits
    counts = full.num_unaligned_recv_tokens_per_expert.tolist()
    if case.expand:
        starts = [sum((n + 3) // 4 * 4 for n in counts[:e]) for e in range(len(counts))]
        kept = [max(0, min(n, capacity - start)) for n, start in zip(counts, starts)]
        ends = [min(start, capacity) + n for n, start in zip(kept, starts)]
        assert handle.psum_num_recv_tokens_per_expert.tolist() == ends
    else:
        assert_equal(ids[:fits], all_ids[:fits])
        kept = [int((all_ids[:capacity] == e).sum()) for e in range(len(counts))]
    assert handle.num_unaligned_recv_tokens_per_expert.tolist() == kept
    arrived = int(full.psum_num_recv_tokens_per_scaleup_rank[-1])
    dropped = sum(counts) - sum(kept) if case.expand else max(0, arrived - capacity)
    assert handle.num_dropped.tolist() == [dropped]
    if dropped:
        message = f"rank {me}: {dropped} .* found no place in num_max_rows = {capacity}"
        with pytest.raises(RuntimeError, match=message):
            handle.raise_if_dropped()
    else:
        handle.raise_if_dropped()
    results = torch.randn(all_rows.shape, generator=torch.Generator().manual_seed(me))
    results = results.to(all_rows.dtype)
    given = torch.zeros((capacity, all_rows.shape[1]), dtype=all_rows.dtype)
    given[:fits] = results[:fits]
    results[capacity:] = 0
    wanted, back_wanted, _ = buffer.combine(results, full, all_weights, case.bias[me])
    found, back, _ = buffer.combine(given, handle, weights, case.bias[me])
    assert_equal(found, wanted)
    assert ((back == back_wanted) | (back == 0)).all()
    again = buffer.dispatch(case.payloads[me][0], handle=handle)[0]
    assert_equal(again, rows)


@pytest.mark.parametrize("check_ranks", [True, False], ids=["counted", "static"])
@pytest.mark.parametrize("expand", [False, True], ids=["compact", "expanded"])
@pytest.mark.parametrize("capacity", [1, 6, 500])
@pytest.mark.parametrize("name", ["2x2", "direct"])
def test_what_does_not_fit_is_counted(
    name: str, capacity: int, expand: bool, check_ranks: bool
) -> None:
    case = Case(**CASES[name], expand=expand, alignment=4, max_tokens=5, num_biases=1)
    run_ranks(case.num_ranks, lambda group: check_capacity(group, case, capacity, check_ranks))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_max_rows": 4}, "num_max_rows needs do_cpu_sync=False"),
        ({"num_max_rows": 0, "do_cpu_sync": False}, "num_max_rows must be at least 1, got 0"),
    ],
)
def test_capacity_errors(arguments: dict[str, Any], message: str) -> None:
    case = Case(ranks_per_node=1, tokens=(3,))

    def rank(group: Any) -> None:
        buffer = make_buffer(group, case)
        with pytest.raises(ValueError, match=message):
            buffer.dispatch(case.payloads[0][0], case.topk_idx[0], num_experts=2, **arguments)
        handle = buffer.dispatch(case.payloads[0][0], case.topk_idx[0], num_experts=2)[3]
        with pytest.raises(ValueError, match="num_max_rows must be None with a handle"):
            buffer.dispatch(case.payloads[0][0], handle=handle, num_max_rows=4)

    run_ranks(1, rank)


@pytest.mark.parametrize("check_ranks", [True, False], ids=["counted", "static"])
@pytest.mark.parametrize("expand", [False, True], ids=["compact", "expanded"])
def test_what_does_not_fit_has_no_gradient(expand: bool, check_ranks: bool) -> None:
    """Each token has the sum over its rows; of five with two experts each, four rows stay."""

    def rank(group: Any) -> tuple[list[float], list[int]]:
        buffer = ElasticBuffer(group, num_max_tokens_per_rank=5, hidden=2, check_ranks=check_ranks)
        x = torch.ones(5, 2, requires_grad=True)
        ids = torch.tensor([[0, 1]] * 5)  # one expert on each rank
        rows, _, _, handle, _ = buffer.dispatch(
            x, ids, num_experts=2, do_expand=expand, do_cpu_sync=False, num_max_rows=4
        )
        rows.sum().backward()
        return x.grad[:, 0].tolist(), handle.num_dropped.tolist()

    # Both ranks take the tokens of rank 0 first: four of them, then none of the others.
    assert run_ranks(2, rank) == [([2, 2, 2, 2, 0], [6]), ([0] * 5, [6])]
