"""Selection of keys: lists that fill up, bounds, limits, memory."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

import tile_kernels
from tile_kernels import torch as references
from tile_kernels.attention import (
    indexer,
    indexer_logits,
    indexer_select,
    indexer_topk,
)
from tile_kernels.attention.indexer import are_many, share_of_keys
from tile_kernels.attention.indexer_plan import KEYS, with_tile
from tile_kernels.attention.logits.cases import arguments
from tile_kernels.attention.logits.plan import Plan
from tile_kernels.attention.select import op as select_op
from tile_kernels.attention.topk.plan import PART
from tile_kernels.runtime import emulation
from tile_kernels.runtime.cases import moved
from tile_kernels.runtime.device import DESCRIBED, described
from tile_kernels.runtime.launch import recording

NO_LIMIT = 4096
FORMATS = ("bfloat16", "float8_e4m3fn", "e2m1")
# As in docs/indexer.md: arch, format, channels, heads, the largest topk of blocks with few keys and
# of others, logits too.
LIMITS = [
    *(("sm_80", source, 256, 128, NO_LIMIT, 3264, True) for source in FORMATS),
    *((arch, *limit) for arch in ("sm_89", "sm_120a") for limit in (
        ("bfloat16", 128, 64, NO_LIMIT, NO_LIMIT, True),
        ("bfloat16", 128, 128, NO_LIMIT, 3264, True),
        ("bfloat16", 256, 8, 4032, 2496, True), ("bfloat16", 256, 16, 3264, 2240, True),
        ("bfloat16", 256, 32, 1984, 1216, True), ("bfloat16", 256, 64, 0, 0, True),
        ("bfloat16", 256, 128, 0, 0, False), ("float8_e4m3fn", 256, 64, NO_LIMIT, NO_LIMIT, True),
        ("float8_e4m3fn", 256, 128, NO_LIMIT, 3264, True),
        ("e2m1", 128, 128, NO_LIMIT, NO_LIMIT, True), ("e2m1", 256, 32, NO_LIMIT, NO_LIMIT, True),
        ("e2m1", 256, 64, NO_LIMIT, 3264, True), ("e2m1", 256, 128, 0, 0, True),
    )),
    *((arch, source, 256, 128, NO_LIMIT, NO_LIMIT, True) for arch in ("sm_90a", "sm_100a")
      for source in FORMATS),
]  # fmt: skip


@pytest.mark.parametrize(("arch", "source", "depth", "heads", "few", "many", "logits"), LIMITS)
def test_limits_are_as_documented(
    arch: str, source: str, depth: int, heads: int, few: int, many: int, logits: bool
) -> None:
    """Plans are made up to the limit, and refused above it with a reason."""
    from tile_kernels.attention.logits.plan import plan as plan_logits
    from tile_kernels.attention.select.plan import plan as plan_select

    device = DESCRIBED[arch]
    keys_and_roles = [(source, "all")]
    if source == "e2m1":
        keys_and_roles = [(source, "marking"), ("float8_e4m3fn", "marking"), (source, "marked")]

    def select(topk: int, short: bool) -> None:
        for key_format, role in keys_and_roles:
            plan_select(source, key_format, heads, depth, topk, short, role, device)

    for short, most in ((True, few), (False, many)):
        if most:
            select(most, short)
        if most < NO_LIMIT:
            with pytest.raises(ValueError, match="fewer heads or channels, or topk smaller"):
                select(most + 1, short)
    with contextlib.nullcontext() if logits else pytest.raises(ValueError, match="fewer heads"):
        for key_format, role in keys_and_roles:
            plan_logits(source, key_format, heads, depth, "float32", False, role, device)


@pytest.mark.parametrize("tokens", [5, 70])
def test_nothing_runs_where_the_last_launch_does_not_fit(tokens: int) -> None:
    given = arguments(tokens, 130, 128, 256, "e2m1")(torch.device("cpu"))
    with (
        tile_kernels.backend("emulate", arch="sm_89"),
        emulation.reports() as reports,
        pytest.raises(ValueError, match="fewer heads or channels, or topk smaller"),
    ):
        indexer_select(**given, topk=8)
    assert not reports


# ---- the choice ---------------------------------------------------------------------------------


@pytest.mark.parametrize("scales", ["ascending", "steps", "equal"])
@pytest.mark.parametrize("ranges", ["all", "ragged"])
@pytest.mark.parametrize("short", [True, False])
def test_lists_that_fill_up(
    scales: str, ranges: str, short: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One block has all keys, and its lists are shortened again and again, or bounds stay."""
    monkeypatch.setattr(indexer, "MIN_TILES", 10**6)
    monkeypatch.setattr(select_op, "MAX_SHORT", 1 << 16 if short else 0)
    num_keys, heads, depth = 1500, 4, 128
    generator = torch.Generator().manual_seed(0)
    factors = {
        "ascending": torch.arange(1.0, num_keys + 1),
        "steps": torch.randint(1, 6, (num_keys,), generator=generator).float().sort().values,
        "equal": torch.ones(num_keys),
    }[scales]
    weights = torch.ones(4, heads)
    weights[1], weights[2], weights[3, 0] = -1, 0, torch.nan
    start, end = torch.zeros(4).int(), torch.full((4,), num_keys).int()
    if ranges == "ragged":
        start, end = torch.tensor([[5, 300, 0, 129], [1400, 1301, 1500, 999]]).int()
    q, k = torch.ones(4, heads, depth), torch.ones(num_keys, depth)
    given = {
        "q": q.to(torch.float8_e4m3fn),
        "k": (k.to(torch.float8_e4m3fn), factors),
        "weights": weights,
        "start": start,
        "end": end,
        "topk": 20,
    }
    with tile_kernels.backend("emulate"):
        chosen = indexer_select(**given)
    assert torch.equal(chosen, references.indexer_select(**given))


@pytest.mark.parametrize("equal", [True, False])
def test_best_of_parts_of_a_row(equal: bool) -> None:
    """Few queries: their logits are in memory, and blocks choose among parts of them."""
    num_keys = PART + 3000
    given = arguments(3, num_keys, 2, 32, "bf16", "all", exact=True)(torch.device("cpu"))
    if equal:
        given["k"] = torch.ones_like(given["k"])
    # All keys; those of both parts; fewer than are chosen.
    given["start"] = torch.tensor([0, PART - 500, PART - 10]).int()
    given["end"] = torch.tensor([num_keys, num_keys - 1, PART + 20]).int()
    given["weights"][0, 0] = torch.nan if equal else 1
    with tile_kernels.backend("emulate", mode="fast"), emulation.reports() as reports:
        chosen = indexer_select(**given, topk=700)
    assert ["best_of_parts" in report.name for report in reports] == [False, True, True]
    assert torch.equal(chosen, references.indexer_select(**given, topk=700))


@pytest.mark.parametrize("source", ["bf16", "e4m3", "e2m1"])
@pytest.mark.parametrize("tokens", [63, 64, 263])
def test_no_block_has_queries_of_many_sequences(tokens: int, source: str) -> None:
    """A block multiplies the keys of all its queries with each, and sequences share none.

    Only where all ranges begin at the first key have blocks more queries."""
    given = arguments(tokens, 64 * tokens, 64, 128, source)(torch.device("meta"))

    def tiles(**bounds: Any) -> list[Any]:
        with recording() as requests:
            indexer_select(**{**given, **bounds}, topk=20)
        static = [
            each.kernel.static_arguments(each.problem, described())
            for each in requests
            if each.kernel.name == "score_tiles"
        ]
        return [with_tile(Plan, each).tile for each in static]

    assert {(tile.queries, tile.pipelined) for tile in tiles()} == {(2, False)}
    assert any(tile.pipelined for tile in tiles(start=None)) == (tokens >= 64)


@pytest.mark.parametrize("source", ["e4m3", "e2m1"])
def test_one_query_of_each_of_many_sequences(source: str) -> None:
    """As in decoding: ranges that do not overlap, of different lengths, one of them empty."""
    tokens, room = 64, 20
    build = arguments(tokens, tokens * room + 1, 4, 32, source, exact=True)
    given = build(torch.device("cpu"))
    given["start"] = torch.arange(tokens).int() * room
    given["end"] = given["start"] + torch.arange(tokens).int() % (room + 1)
    with tile_kernels.backend("emulate", mode="fast"), emulation.reports() as reports:
        chosen = indexer_select(**given, topk=7)
    assert "best_of_parts" in reports[-1].name
    assert torch.equal(chosen, references.indexer_select(**given, topk=7))


@pytest.mark.parametrize(
    ("keys", "heads", "depth", "source", "ranges", "topk"),
    [(3000, 4, 32, "e4m3", "all", 900), (1100, 4, 128, "e2m1", "causal", 20)],
)
def test_lists_of_blocks_that_share_keys_are_merged(
    keys: int,
    heads: int,
    depth: int,
    source: str,
    ranges: str,
    topk: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where logits of few queries would take too much memory."""
    monkeypatch.setattr(select_op, "MAX_LOGITS_BYTES", 0)
    build = arguments(2, keys, heads, depth, source, ranges, exact=True)
    given = build(torch.device("cpu"))
    with tile_kernels.backend("emulate"), emulation.reports() as reports:
        chosen = indexer_select(**given, topk=topk)
    assert "best_of_rows" in reports[-1].name
    assert torch.equal(chosen, references.indexer_select(**given, topk=topk))


@pytest.mark.parametrize("source", ["bf16", "e4m3", "e2m1"])
@pytest.mark.parametrize("ground", ["torch", "emulate", "meta", "compile"])
def test_all_keys_count_without_bounds(source: str, ground: str) -> None:
    given = arguments(5, 70, 2, 32, source)(torch.device("cpu"))
    q, k, weights = given["q"], given["k"], given["weights"]
    logits = indexer_logits(q, k, weights, given["start"], given["end"])
    start, end = torch.zeros(5, dtype=torch.int32), torch.full((5,), 70, dtype=torch.int32)
    expected = indexer_select(q, k, weights, start, end, 20), indexer_topk(logits, 20, end)
    later = start + 30
    from_later = indexer_select(q, k, weights, later, end, 20)

    def without_bounds(*arguments: Any) -> tuple[torch.Tensor, ...]:
        q, k, weights, logits, later = arguments
        return (
            indexer_select(q, k, weights, topk=20),
            indexer_topk(logits, 20),
            indexer_select(q, k, weights, later, None, 20),
        )

    values = (q, k, weights, logits, later)
    if ground == "meta":
        for result in without_bounds(*moved(values, "meta")):
            assert (result.shape, result.dtype, result.is_meta) == ((5, 20), torch.int32, True)
        return
    function = without_bounds
    if ground == "compile":
        torch._dynamo.reset()
        function = torch.compile(without_bounds, fullgraph=True, backend="aot_eager")
    with tile_kernels.backend("emulate" if ground == "emulate" else "torch"):
        results = function(*values)
    for result, wanted in zip(results, (*expected, from_later), strict=True):
        assert torch.equal(result, wanted)
    with pytest.raises(TypeError, match="indexer_select: topk must be an int, got NoneType"):
        indexer_select(q, k, weights)
    with pytest.raises(ValueError, match=r"indexer_select: k must have 2 dimensions"):
        indexer_select(q, torch.ones(()).bfloat16(), weights, topk=1)


@pytest.mark.parametrize("num_queries", [1, 4096])
@pytest.mark.parametrize("num_keys", [1, 65536, 2**28, 2**31 - 2**16])
def test_blocks_fit_a_grid(num_queries: int, num_keys: int) -> None:
    device = torch.device("cpu")
    share = share_of_keys(num_queries, num_keys, are_many(num_queries), device)
    assert share % KEYS == 0
    assert -(-num_keys // share) <= 65535


@pytest.mark.parametrize("source", ["e4m3", "e2m1"])
@pytest.mark.parametrize("short", [False, True])
def test_selection_is_the_choice_among_logits(
    source: str, short: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of inexact logits too: both kernels compute the same ones. Keys of 16 or 32 bits in lists."""
    monkeypatch.setattr(select_op, "MAX_SHORT", 2**16 if short else 0)
    given = arguments(5, 900, 4, 32, source, "causal")(torch.device("cpu"))
    with tile_kernels.backend("emulate", mode="fast"):
        logits = indexer_logits(**given)
        chosen = indexer_topk(logits, 40, given["end"], start=given["start"])
        assert torch.equal(indexer_select(**given, topk=40), chosen)


@pytest.mark.parametrize("source", ["bf16", "e4m3", "e2m1"])
def test_selection_needs_a_twentieth_of_the_memory(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = arguments(4096, 65536, 64, 128, source)(torch.device("meta"))
    allocated = []

    def counted(allocate: Any) -> Any:
        def count(*args: Any, **kwargs: Any) -> torch.Tensor:
            result = allocate(*args, **kwargs)
            allocated.append(result.numel() * result.element_size())
            return result

        return count

    for module, name in (
        (torch.Tensor, "new_empty"), (torch.Tensor, "new_full"), (torch, "empty"),
        (torch, "empty_like"), (torch, "empty_strided"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, counted(getattr(module, name)))
    logits = indexer_logits(**given)
    indexer_topk(logits, 2048, given["end"], start=given["start"])
    two_steps = sum(allocated)
    allocated.clear()
    indexer_select(**given, topk=2048)
    assert 4096 * 2048 * 4 <= sum(allocated) < two_steps / 20
