"""Rows written into the memory of their receivers: kernels, windows, and whole calls over them."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tile_kernels
from tests.ep.helpers import Case, check_rank
from tests.ep.test_no_sync import NoWaiting, unwatched
from tests.ep.windows import use_windows
from tests.requirements import needs_nvcc
from tile_kernels import moe
from tile_kernels.ep import (
    ElasticBuffer,
    LocalGroup,
    agreement,
    base,
    direct,
    exchange,
    rows,
    run_ranks,
    transport,
)
from tile_kernels.ep.engines.local import LocalEngine
from tile_kernels.ep.engines.window import ALIGNMENT
from tile_kernels.ep.peers import op, reference
from tile_kernels.ep.peers.plan import put_plan, sum_plan
from tile_kernels.ep.rows import as_bytes
from tile_kernels.ep.transport import staged_sum
from tile_kernels.runtime import emulation, sources
from tile_kernels.runtime.device import DESCRIBED
from tile_kernels.testing.numeric import assert_equal

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
RANKS, EMPTY = 3, 0xA5

# ---- kernels ------------------------------------------------------------------------------------


def slots_of(num_tokens: int, num_topk: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ranks, distinct rows, and items at some of them."""
    generator = torch.Generator().manual_seed(num_tokens)
    ranks = torch.randint(0, RANKS, (num_tokens, num_topk), generator=generator).int()
    slots = torch.randperm(num_tokens * num_topk, generator=generator).view_as(ranks).int()
    slots[torch.rand(ranks.shape, generator=generator) < 0.3] = -1
    items = torch.randperm(num_tokens * num_topk, generator=generator).view_as(ranks).int()
    return ranks, slots, torch.where(torch.rand(ranks.shape, generator=generator) < 0.5, items, -1)


def memory(rows: int, widths: tuple[int, int, int]) -> tuple[Any, torch.Tensor]:
    """Sections `[3][RANKS]` of bytes, and their addresses."""
    sections = [
        [torch.full((rows, max(1, width)), EMPTY, dtype=torch.uint8) for _ in range(RANKS)]
        for width in widths
    ]
    return sections, torch.tensor([[each.data_ptr() for each in row] for row in sections])


@pytest.mark.parametrize("order", ["forward", "reverse"])
@pytest.mark.parametrize(
    ("num_tokens", "num_topk", "dtype", "width", "num_scales"),
    [
        (9, 5, BF16, 24, 3),
        (1, 1, torch.float32, 4, 0),
        (7, 3, torch.uint8, 7, 1),
        (5, 40, FP8, 1040, 9),
        (300, 4, BF16, 264, 5),
        (300, 2, torch.int16, 9, 0),
    ],
)
def test_rows_go_to_their_ranks(
    num_tokens: int, num_topk: int, dtype: torch.dtype, width: int, num_scales: int, order: str
) -> None:
    """The emulated kernel writes what loops write, and nothing else."""
    ranks, slots, items = slots_of(num_tokens, num_topk)
    x = torch.randint(0, 256, (num_tokens, width * dtype.itemsize)).to(torch.uint8).view(dtype)
    sf = torch.randn(max(1, num_scales), num_tokens + 3).T[:num_tokens, :num_scales]
    words = torch.randint(-9, 9, (num_tokens, 2 * num_topk + 1)).int()
    num_rows = num_tokens * num_topk
    found, peers = memory(num_rows, (x[0].nbytes, 4 * num_scales, words[0].nbytes))
    given = None if num_scales == 0 else sf
    with tile_kernels.backend("emulate", order=order), emulation.reports() as reports:
        op.put_rows(x, ranks, slots, peers, 16, num_rows, given, items, words)
    assert "put_rows" in str(reports[0])
    wanted, peers = memory(num_rows, (x[0].nbytes, 4 * num_scales, words[0].nbytes))
    for token in range(num_tokens):
        for k in range(num_topk):
            rank = int(ranks[token, k])
            if slots[token, k] >= 0:
                row = int(slots[token, k])
                wanted[0][rank][row] = x[token].view(torch.uint8)
                if num_scales:
                    wanted[1][rank][row] = as_bytes(sf)[token]
            if items[token, k] >= 0:
                wanted[2][rank][int(items[token, k])] = words[token].view(torch.uint8)
    assert_sections(found, wanted)
    again, peers = memory(num_rows, (x[0].nbytes, 4 * num_scales, words[0].nbytes))
    reference.put_rows(x, ranks, slots, peers, given, items, words)
    assert_sections(again, wanted)


def assert_sections(found: Any, wanted: Any) -> None:
    for one, other in zip(found, wanted):
        for mine, theirs in zip(one, other):
            assert_equal(mine, theirs)


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("num_rows", "num_topk", "hidden"), [(9, 5, 24), (1, 1, 8), (5, 40, 7), (300, 3, 264)]
)
def test_sums_go_to_their_ranks(
    num_rows: int, num_topk: int, hidden: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(hidden)
    x = torch.randn(2 * num_rows, hidden, generator=generator).to(dtype)
    positions = torch.randint(-2, len(x), (num_rows, num_topk), generator=generator).int()
    ranks = torch.randint(0, RANKS, (num_rows,), generator=generator).int()
    slots = torch.randperm(num_rows, generator=generator).int()
    words = torch.randint(-9, 9, (num_rows, num_topk)).int()
    widths = (x[0].nbytes, 0, words[0].nbytes)
    found, peers = memory(num_rows, widths)
    with tile_kernels.backend("emulate"), emulation.reports() as reports:
        op.put_sums(x, positions, ranks, slots, peers, 16, num_rows, words)
    assert "put_sums" in str(reports[0])
    again, peers = memory(num_rows, widths)
    reference.put_sums(x, positions, ranks, slots, peers, words)
    wanted, _ = memory(num_rows, widths)
    sums = staged_sum(x, positions)
    for row in range(num_rows):
        wanted[0][ranks[row]][slots[row]] = sums[row].view(torch.uint8)
        wanted[2][ranks[row]][slots[row]] = words[row].view(torch.uint8)
    assert_sections(found, wanted)
    assert_sections(again, wanted)


@needs_nvcc
@pytest.mark.compiled
@pytest.mark.parametrize("name", ["put_rows", "put_sums"])
def test_rows_are_copied_16_bytes_at_a_time(name: str) -> None:
    device = DESCRIBED["sm_90a"]
    kernel, static = {
        "put_rows": (op._PUT, put_plan("int32", 4, 3584, 8, 4096, 16, 56, 17, True, device)),
        "put_sums": (op._SUM, sum_plan("bfloat16", 2, 7168, 8, 4096, 16, 8, device)),
    }[name]
    source = sources.cuda_source(kernel.definition, tuple(static), "sm_90a")
    (function,) = sources.compile_source(source, "sm_90a")
    assert function.spill_bytes == 0
    rows = 1 if name == "put_rows" else 4  # vectors of a row that a thread has
    assert function.accesses["LDG.128"] == function.accesses["STG.128"] == rows
    named = {each for each in function.accesses if each.startswith(("LDG", "STG", "LDL", "STL"))}
    assert named == {
        "LDG.128", "LDG.64", "LDG.32", "STG.128", "STG.32"
    }  # fmt: skip


# ---- calls over windows -------------------------------------------------------------------------

WIDTHS: dict[str, tuple[tuple[torch.dtype, int], ...]] = {
    "bf16": ((BF16, 24),),
    "fp8": ((FP8, 32), (torch.float32, 3)),
    "odd": ((torch.float32, 5), (torch.int16, 3), (torch.uint8, 1), (torch.bool, 2)),
    "wide": ((BF16, 264), (torch.int64, 2)),
    "none": ((torch.bfloat16, 0), (torch.float32, 2)),
}


@pytest.mark.parametrize("expand", [False, True], ids=["compact", "expanded"])
@pytest.mark.parametrize("widths", WIDTHS)
def test_the_bits_of_the_other_engines(
    widths: str, expand: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = use_windows(monkeypatch)
    case = Case(
        ranks_per_node=4, experts_per_rank=3, num_topk=5, tokens=(9, 0, 17, 4), expand=expand,
        widths=WIDTHS[widths], alignment=4 if expand else 1, num_biases=2,
    )  # fmt: skip
    run_ranks(4, lambda group: check_rank(group, case))
    for window in made.values():
        phases = [phase.split(" (")[0] for phase in window.log]
        assert phases == ["ElasticBuffer.dispatch"] * 2 + ["ElasticBuffer.combine"] * 2


@pytest.mark.parametrize("expand", [False, True], ids=["compact", "expanded"])
def test_calls_run_on_the_kernels(expand: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    use_windows(monkeypatch, one_storage=True)
    case = Case(
        ranks_per_node=2, experts_per_rank=3, num_topk=3, tokens=(5, 6), expand=expand,
        widths=((BF16, 16), (torch.float32, 3)), alignment=4 if expand else 1,
    )  # fmt: skip
    with tile_kernels.backend("emulate"), emulation.reports() as reports:
        run_ranks(2, lambda group: check_rank(group, case))
    ran = " ".join(str(report) for report in reports)
    assert "put_rows" in ran
    assert ("put_sums" in ran) == expand


@pytest.mark.parametrize("nodes", [1, 2])
def test_what_windows_do_not_serve_takes_the_other_path(
    nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hybrid mode, and a window on one rank that is too small."""
    made = use_windows(monkeypatch, (1 << 20, 1 << 10))
    case = Case(
        num_nodes=nodes, ranks_per_node=2 // nodes, tokens=(40, 3), experts_per_rank=4,
        num_topk=5, widths=((BF16, 64),),
    )  # fmt: skip
    run_ranks(2, lambda group: check_rank(group, case))
    assert all(not window.log for window in made.values())


def tokens(rank: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * seed + rank)
    chosen = torch.rand(6, 4, generator=generator).argsort(1)[:, :2]
    return torch.randn(6, 32, generator=generator), chosen


def test_results_stay_as_they_are_while_they_are_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many dispatches whose results are kept: in the window first, then in copies."""
    made = use_windows(monkeypatch, 16 << 10)

    def rank(group: LocalGroup) -> None:
        buffer = ElasticBuffer(group, num_max_tokens_per_rank=6, hidden=32)
        kept = []
        for step in range(12):
            x, chosen = tokens(group.rank, step)
            rows = buffer.dispatch(x, chosen, num_experts=4)[0]
            kept.append((rows, rows.clone()))
            for now, then in kept:
                assert_equal(now, then)
        window = made[group.rank]
        own = range(window.own.data_ptr(), window.own.data_ptr() + window.num_bytes)
        inside = [rows.data_ptr() in own for rows, _ in kept]
        assert inside[0]
        assert not inside[-1]

    run_ranks(2, rank)


@pytest.mark.parametrize("expand", [False, True], ids=["compact", "expanded"])
def test_a_thousand_steps_leave_nothing_behind(
    expand: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = use_windows(monkeypatch, 64 << 10)

    def rank(group: LocalGroup) -> None:
        buffer = ElasticBuffer(group, num_max_tokens_per_rank=6, hidden=32)
        for step in range(500):
            x, chosen = tokens(group.rank, step)
            rows, _, _, handle, _ = buffer.dispatch(x, chosen, num_experts=4, do_expand=expand)
            buffer.combine(rows, handle)

    run_ranks(2, rank)
    gc.collect()
    for window in made.values():
        assert len(window.log) == 1000
        assert window.announced() == (0, window.num_bytes)
        assert len(window.take_marks()) == 0


@pytest.mark.parametrize("room", [5, 6])
def test_counts_travel_with_descriptors(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of two ranks and four experts, if there is room for six numbers."""
    use_windows(monkeypatch)
    monkeypatch.setattr(agreement, "_MAX_NUMBERS", room)
    phases: list[str] = []
    gather = LocalEngine.exchange

    def logged(self: LocalEngine, *args: Any) -> torch.Tensor:
        phases.append(args[3])
        return gather(self, *args)

    case = Case(tokens=(5, 3), expand=True)
    run_ranks(2, lambda group: check_rank(group, case))
    monkeypatch.setattr(LocalEngine, "exchange", logged)
    run_ranks(2, lambda group: check_rank(group, case))
    assert ("ElasticBuffer.dispatch (counts)" in phases) == (room == 5)


@pytest.mark.parametrize("expand", [False, True], ids=["compact", "expanded"])
def test_the_host_waits_once_for_a_new_routing(
    expand: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For its counts; and never with a handle or to combine. What is on the host does not count."""
    use_windows(monkeypatch)
    on_host = False
    waits: list[str] = []

    def hidden(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal on_host
            before, on_host = on_host, True
            result = unwatched(function)(*args, **kwargs)
            on_host = before
            return result

        return call

    names = ("expand_to_fused", "get_fused_mapping", "reduce_fused")
    kernels = SimpleNamespace(**{name: hidden(getattr(moe, name)) for name in names})
    read = torch.Tensor.tolist
    monkeypatch.setattr(
        torch.Tensor, "tolist", lambda x: (on_host or waits.append("tolist"), read(x))[1]
    )
    for module in (transport, exchange, rows, direct):
        monkeypatch.setattr(module, "moe", kernels)
    for module in (transport, rows):
        monkeypatch.setattr(module, "on_host", lambda _: False)
    propose = hidden(base.propose)
    monkeypatch.setattr(base, "propose", lambda *args: hidden(propose(*args)))
    for name in ("gather_numbers", "on_device", "put_rows", "put_sums"):
        monkeypatch.setattr(direct, name, hidden(getattr(direct, name)))
    buffer = ElasticBuffer(LocalGroup(), num_max_tokens_per_rank=6, hidden=32)
    (x, chosen), weights = tokens(0), torch.rand(6, 2)
    waits.clear()
    with NoWaiting():
        options: dict[str, Any] = {"do_expand": expand, "expert_alignment": 4 if expand else 1}
        found, _, back, handle, _ = buffer.dispatch(x, chosen, weights, num_experts=4, **options)
        assert waits == ["tolist"]
        buffer.dispatch(x, handle=handle)
        buffer.combine(found, handle, back, bias=x)
    assert waits == ["tolist"]


def test_parts_of_a_window_are_free_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made = use_windows(monkeypatch, 10 * ALIGNMENT)
    ElasticBuffer(LocalGroup(), num_bytes=2 << 20)
    window = made[0]
    first, second = window.take(0, 1), window.take(ALIGNMENT, ALIGNMENT + 1)
    third = window.take(3 * ALIGNMENT, 10)
    assert window.announced() == (4 * ALIGNMENT, 6 * ALIGNMENT)
    view = window.tensor(second, 8, (3, 2), torch.int16)
    del second, first
    assert window.announced() == (4 * ALIGNMENT, 6 * ALIGNMENT)
    view.fill_(7)
    part = view[1:]
    del view
    assert part.tolist() == [[7, 7], [7, 7]]
    del part
    assert window.announced() == (4 * ALIGNMENT, 6 * ALIGNMENT)  # the first three are not larger
    with pytest.raises(ValueError, match="1792 bytes do not fit into 1536"):
        window.take(4 * ALIGNMENT, 6 * ALIGNMENT + 1)
    del third
    assert window.announced() == (0, 10 * ALIGNMENT)


def test_gradients_over_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    def rank(group: LocalGroup) -> list[torch.Tensor]:
        buffer = ElasticBuffer(group, num_max_tokens_per_rank=6, hidden=32)
        x, chosen = tokens(group.rank)
        x.requires_grad_()
        weights = torch.rand(6, 2, generator=torch.Generator().manual_seed(3)).requires_grad_()
        rows, _, row_weights, handle, _ = buffer.dispatch(
            x, chosen, weights, num_experts=4, do_expand=True, expert_alignment=4
        )
        total, _, _ = buffer.combine((rows * rows) * row_weights[:, None], handle)
        total.sum().backward()
        return [total.detach(), x.grad, weights.grad]

    plain = run_ranks(2, rank)
    made = use_windows(monkeypatch)
    direct = run_ranks(2, rank)
    assert all(len(window.log) >= 4 for window in made.values())
    for one, other in zip(plain, direct):
        for wanted, found in zip(one, other):
            assert_equal(found, wanted)
