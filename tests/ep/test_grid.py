"""Every combination of options on real processes, bit for bit.

144 of them: a handle that copies or not, alignment 128 or 1, FP8 or not, no, one or two biases, and
six ways to use events and streams. Each is dispatched in both layouts, again along the handles, and
combined from both. Two ranks go through a part in which every option meets every other, two nodes
through one in which every option occurs. With `--full` one and two ranks go through all of them,
and four and eight ranks through such parts.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.ep.helpers import Case, check_handle, make_buffer
from tests.ep.processes import run_processes
from tile_kernels.ep import ElasticBuffer, reference
from tile_kernels.testing.numeric import assert_equal

TOKENS, TOPK, LOCAL, HIDDEN = 9, 6, 3, 32
EVENTS = [(prev, wait, own) for prev in (0, 1) for wait in (0, 1) for own in (0, 1) if own >= prev]


class Options(NamedTuple):
    copy: bool
    alignment: int
    fp8: bool
    num_biases: int
    events: tuple[int, int, int]  # a previous event, asynchronous, allocated for its stream


GRID = [
    Options(*each)
    for each in itertools.product((True, False), (128, 1), (True, False), (0, 1, 2), EVENTS)
]


def pairs(options: list[Options]) -> set[tuple[int, Any, int, Any]]:
    """Which value of one option meets which of another."""
    places = list(itertools.combinations(range(5), 2))
    return {(one, each[one], two, each[two]) for each in options for one, two in places}


def test_the_grid_is_the_grid() -> None:
    assert len(GRID) == 144
    assert pairs(GRID[::5]) == pairs(GRID)
    for step in (7, 11):
        for place in range(5):
            assert {each[place] for each in GRID[::step]} == {each[place] for each in GRID}


@functools.cache
def case_of(nodes: int, per_node: int, options: Options, expand: bool) -> tuple[Case, Any]:
    """The inputs of all ranks and what the reference makes of them; rank `r` has `T - r` tokens."""
    widths = ((torch.bfloat16, HIDDEN),)
    if options.fp8:
        widths = ((torch.float8_e4m3fn, HIDDEN), (torch.float32, 2))
    tokens = tuple(max(1, TOKENS - rank) for rank in range(nodes * per_node))
    case = Case(
        nodes, per_node, LOCAL, num_topk=TOPK, tokens=tokens, widths=widths, expand=expand,
        alignment=options.alignment, num_biases=options.num_biases, max_tokens=TOKENS,
    )  # fmt: skip
    return case, case.expected()


def of_slots(case: Case, source: int, seed: float = 0.5) -> Tensor:
    """What the expert of each slot `[K, H]` makes of a token: all different, none round."""
    size = case.num_ranks * case.max_tokens * TOPK
    slots = torch.arange(TOPK)
    phase = (((source * TOPK + slots) * 131071) % size + 1).double() / size
    wave = phase[:, None] * torch.arange(1, HIDDEN + 1) + torch.tensor(seed).sin()
    return wave.sin().bfloat16()


def outputs(case: Case, received: reference.Received) -> Tensor:
    """The results of one rank in the layout of `received`; compact ones are added up by slot."""
    out = torch.zeros(received.payloads[0].shape[0], HIDDEN, dtype=torch.bfloat16)
    for row, source in enumerate(received.sources.tolist()):
        results = of_slots(case, source)
        slots = (received.topk_idx[row] >= 0).nonzero().flatten().tolist()
        if case.expand:
            for slot in slots:
                out[received.topk_to_pos[row, slot]] = results[slot]
        else:
            chosen = [results[slot] for slot in slots]
            out[row] = reference.ordered_sum(chosen, torch.bfloat16)
    return out


@functools.cache
def combined_of(nodes: int, per_node: int, options: Options, expand: bool) -> list[Tensor]:
    case, received = case_of(nodes, per_node, options, expand)
    return reference.combine(
        [outputs(case, each) for each in received], received, case.topk_idx, case.num_experts,
        case.max_tokens, case.topology, expand, bias=case.bias,
    )  # fmt: skip


def check_options(buffer: ElasticBuffer, options: Options) -> None:
    """All calls with these options on this rank."""
    shape = (buffer.num_scaleout_ranks, buffer.num_scaleup_ranks)
    still = options._replace(events=(0, 0, 0), copy=True)  # what the numbers do not depend on
    prev, wait, own = options.events
    me = buffer.rank_idx

    def events() -> dict[str, Any]:
        return {
            "previous_event": buffer.capture() if prev else None,
            "async_with_compute_stream": bool(wait),
            "allocate_on_comm_stream": bool(own),
        }

    def done(event: Any) -> None:
        if wait:
            event.current_stream_wait()

    totals = []
    for expand in (False, True):
        case, everything = case_of(*shape, still, expand)
        expected = everything[me]
        payloads, chosen = case.payloads[me], case.topk_idx[me]
        stats = torch.zeros(LOCAL, dtype=torch.int32)
        received, ids, weights, handle, event = buffer.dispatch(
            payloads, chosen, case.topk_weights[me], stats, num_experts=case.num_experts,
            expert_alignment=options.alignment, do_handle_copy=options.copy, do_expand=expand,
            do_zero_padding=expand, **events(),
        )  # fmt: skip
        done(event)
        for found, wanted in zip(received, expected.payloads, strict=True):
            assert_equal(found, wanted)
        assert_equal(weights, expected.topk_weights)
        assert ids is None if expand else torch.equal(ids, expected.topk_idx)
        assert stats.tolist() == expected.counts
        assert (handle.topk_idx is chosen) == (not options.copy)
        check_handle(handle, case, expected, me)
        again, _, _, same, event = buffer.dispatch(payloads, handle=handle, **events())
        done(event)
        assert same is handle
        for found, wanted in zip(again, received, strict=True):
            assert_equal(found, wanted)
        total, back, event = buffer.combine(
            outputs(case, expected), handle, weights, case.bias[me], **events()
        )
        done(event)
        assert_equal(total, combined_of(*shape, still, expand)[me])
        assert_equal(back, case.topk_weights[me] * (chosen >= 0))
        totals.append(total)
    assert_equal(*totals)  # compact rows were added up in the same order


def walk(group: dist.ProcessGroup, engine: str, nodes: int, step: int) -> None:
    """One buffer for all of them, back to back."""
    per_node = group.size() // nodes
    case, _ = case_of(nodes, per_node, GRID[0], False)
    buffer = make_buffer(group, case, engine=engine)
    for options in GRID[::step]:
        check_options(buffer, options)


WALKS = [("collective", 1, 2, 5), ("mmap", 1, 2, 7), ("collective", 2, 2, 11)]
# What more ranks add is in other tests too: four as processes in `test_processes.py`, up to six as
# threads in `test_local.py`.
LONG_WALKS = [
    ("collective", 1, 1, 1),
    ("collective", 1, 2, 1),
    ("mmap", 1, 2, 5),
    ("collective", 1, 4, 5),
    ("mmap", 1, 4, 5),
    ("collective", 2, 2, 5),
    ("mmap", 2, 2, 7),
    ("collective", 1, 8, 11),
    ("mmap", 1, 8, 11),
    ("collective", 2, 4, 11),
    ("collective", 4, 2, 11),
]


@pytest.mark.parametrize(
    ("engine", "nodes", "per_node", "step"),
    [*WALKS, *(pytest.param(*walk, marks=pytest.mark.full) for walk in LONG_WALKS)],
    ids=str,
)
def test_grid(engine: str, nodes: int, per_node: int, step: int) -> None:
    run_processes(nodes * per_node, walk, engine, nodes, step, timeout=170)
