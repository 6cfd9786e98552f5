"""Options of the calls, and what is said about bad arguments: on every rank."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tile_kernels.ep import (
    ElasticBuffer,
    EPHandle,
    EventHandle,
    EventOverlap,
    LocalGroup,
    get_logical_domain_size,
    get_physical_domain_size,
    run_ranks,
    topk_idx_t,
)
from tile_kernels.ep.arguments import CombineArguments, DispatchArguments
from tile_kernels.ep.setup import BufferArguments
from tile_kernels.testing.numeric import assert_equal

NUM_EXPERTS = 4


def alone(**options: Any) -> ElasticBuffer:
    return ElasticBuffer(LocalGroup(), num_max_tokens_per_rank=4, hidden=2, **options)


def choices(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=topk_idx_t)


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        (ElasticBuffer.__init__, BufferArguments),
        (ElasticBuffer.dispatch, DispatchArguments),
        (ElasticBuffer.combine, CombineArguments),
    ],
)
def test_every_argument_reaches_the_checks(call: Callable[..., Any], arguments: type) -> None:
    """A call hands all of its parameters on, as one object with the same names and no defaults."""
    parameters = set(inspect.signature(call).parameters) - {"self", "group"}
    fields = dataclasses.fields(arguments)
    assert {field.name for field in fields} == parameters
    assert all(field.default is dataclasses.MISSING for field in fields)


# ---- errors on every rank -----------------------------------------------------------------------

ARGUMENTS: dict[str, Any] = {
    "x": torch.zeros(2, 2),
    "topk_idx": choices([0, 3], [1, -1]),
    "num_experts": NUM_EXPERTS,
}

BAD_ON_ONE: list[tuple[dict[str, Any], str]] = [
    ({"x": 3}, "x must be a torch.Tensor, got int"),
    ({"x": torch.zeros(3, 2)}, r"topk_idx must have shape [3, num_topk], got (2, 2)"),
    ({"x": (torch.zeros(2, 2), torch.zeros(3, 1))}, "x[1] must have shape [2, width], got (3, 1)"),
    ({"x": (torch.zeros(2, 2),) * 9}, "x must have 1..8 tensors, got 9"),
    ({"topk_idx": None}, "topk_idx must be given unless there is a handle"),
    ({"topk_idx": choices([0, 3], [1, -1]).short()}, "topk_idx must be int32 or int64, got int16"),
    ({"topk_idx": choices([0, 4], [1, -1])}, "topk_idx must hold -1..3, but element [0, 1] is 4"),
    ({"topk_idx": choices([0, 3], [1, -2])}, "topk_idx must hold -1..3, but element [1, 1] is -2"),
    (
        {"topk_idx": choices([0, 3], [2, 2])},
        "topk_idx must name an expert once for each token, but token 1 names expert 2 more often",
    ),
    (
        {"x": torch.zeros(9, 2), "topk_idx": torch.full((9, 2), -1)},
        "x must have at most num_max_tokens_per_rank = 4 tokens, got 9",
    ),
    ({"topk_idx": torch.full((2, 33), -1)}, "columns of topk_idx must be in 1..32, got 33"),
    ({"topk_weights": torch.zeros(2, 3)}, "topk_weights must have shape [2, 2], got (2, 3)"),
    ({"num_experts": 5}, "num_experts must be a multiple of the 2 ranks, got 5"),
    ({"num_experts": None}, "num_experts must be given"),
    (
        {"num_experts": 20000, "do_expand": True},
        "num_experts must be at most 8192 on each rank for the expanded layout, got 10000",
    ),
    ({"expert_alignment": 0}, "expert_alignment must be in 1..65536, got 0"),
    ({"num_sms": -1}, "num_sms must be at least 0, got -1"),
    ({"previous_event": EventHandle()}, "allocate_on_comm_stream must be True"),
    ({"do_zero_padding": True}, "do_zero_padding needs the expanded layout"),
    (
        {"use_tma_aligned_col_major_sf": True, "x": (torch.zeros(2, 2), torch.zeros(2, 2).half())},
        "use_tma_aligned_col_major_sf needs scale factors of 4 bytes as the second of x, got",
    ),
    ({"do_expand": 2}, "do_expand must be a bool, got int"),
    ({"num_qps": 130}, "num_qps must be at most the 129 queue pairs of the buffer"),
    ({"handle": "h", "topk_idx": None}, "handle must be an EPHandle, got str"),
    (
        {"cumulative_local_expert_recv_stats": torch.zeros(3, dtype=torch.int32)},
        "cumulative_local_expert_recv_stats must have shape [2], got (3,)",
    ),
]


def errors_of(num_ranks: int, body: Callable[[LocalGroup], Any]) -> list[str]:
    """What every rank raises."""

    def rank(group: LocalGroup) -> str:
        try:
            body(group)
        except (TypeError, ValueError) as error:
            return str(error)
        return "no error"

    return run_ranks(num_ranks, rank)


@pytest.mark.parametrize(("changes", "message"), BAD_ON_ONE, ids=lambda value: str(value)[:40])
def test_an_error_of_one_rank_is_raised_on_all(changes: dict[str, Any], message: str) -> None:
    def rank(group: LocalGroup) -> None:
        buffer = ElasticBuffer(group, num_max_tokens_per_rank=4, hidden=2)
        buffer.dispatch(**{**ARGUMENTS, **(changes if group.rank == 1 else {})})

    for found in errors_of(2, rank):
        assert found.startswith("ElasticBuffer.dispatch: rank 1: ")
        assert message in found


@pytest.mark.parametrize(
    ("changes", "name", "values"),
    [
        ({"x": torch.zeros(2, 3)}, "x", ("float32 rows of 2", "float32 rows of 3")),
        ({"x": torch.zeros(2, 2).half()}, "x", ("float32 rows of 2", "float16 rows of 2")),
        ({"num_experts": 6}, "num_experts", (4, 6)),
        ({"topk_idx": choices([0], [1])}, "the number of columns of topk_idx", (2, 1)),
        ({"num_max_tokens_per_rank": 5}, "num_max_tokens_per_rank", (4, 5)),
        ({"do_expand": True}, "do_expand", (False, True)),
        ({"topk_weights": torch.zeros(2, 2)}, "topk_weights", ("none", "given")),
        ({"x": torch.zeros(2, 2, requires_grad=True)}, "gradients", ("none", "x[0]")),
    ],
)
def test_differences_are_raised_on_all(
    changes: dict[str, Any], name: str, values: tuple[Any, Any]
) -> None:
    def rank(group: LocalGroup) -> None:
        buffer = ElasticBuffer(group, num_max_tokens_per_rank=4, hidden=2)
        buffer.dispatch(**{**ARGUMENTS, **(changes if group.rank == 1 else {})})

    for found in errors_of(2, rank):
        assert found == (
            f"ElasticBuffer.dispatch: {name} must be the same on all ranks, got {values[0]} on "
            f"rank 0 and {values[1]} on rank 1"
        )


def test_different_calls_are_told_apart() -> None:
    def rank(group: LocalGroup) -> None:
        buffer = ElasticBuffer(group, num_max_tokens_per_rank=4, hidden=2)
        rows, _, _, handle, _ = buffer.dispatch(**ARGUMENTS)
        buffer.dispatch(**ARGUMENTS) if group.rank else buffer.combine(rows, handle)

    assert set(errors_of(2, rank)) == {
        "all ranks must make the same call, but rank 0 calls ElasticBuffer.combine and rank 1 "
        "calls ElasticBuffer.dispatch"
    }


def test_handles_of_different_dispatches_are_told_apart() -> None:
    def rank(group: LocalGroup) -> None:
        buffer = ElasticBuffer(group, num_max_tokens_per_rank=4, hidden=2)
        results = [buffer.dispatch(**ARGUMENTS) for _ in range(2)]
        rows, _, _, handle, _ = results[group.rank]
        buffer.combine(rows, handle)

    for found in errors_of(2, rank):
        assert "got of dispatch 1 on rank 0 and of dispatch 2 on rank 1" in found


def test_a_buffer_goes_on_after_an_error() -> None:
    def rank(group: LocalGroup) -> int:
        buffer = ElasticBuffer(group, num_max_tokens_per_rank=4, hidden=2)
        with pytest.raises(ValueError, match="num_experts"):
            buffer.dispatch(**{**ARGUMENTS, "num_experts": 5})
        return buffer.dispatch(**ARGUMENTS)[3].num_recv_tokens

    assert run_ranks(2, rank) == [4, 2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "give num_bytes, or num_max_tokens_per_rank and hidden"),
        ({"num_bytes": 5}, "num_bytes must be a multiple of 2097152 (2 MiB), got 5"),
        ({"num_bytes": 2 << 20, "num_cpu_bytes": 4 << 20}, "num_cpu_bytes must be at most"),
        ({"num_cpu_bytes": 2 << 20}, "num_cpu_bytes needs num_bytes"),
        ({"num_bytes": 2 << 20, "sl_idx": 16}, "sl_idx must be in 0..15, got 16"),
        ({"num_bytes": 2 << 20, "num_scaleup_ranks": 3}, "num_scaleup_ranks must divide the 2"),
        ({"num_bytes": 2 << 20, "num_topk": 40}, "num_topk must be in 0..32, got 40"),
        (
            {"num_bytes": 2 << 20, "engine": "gin"},
            "engine must be one of auto, collective, ",
        ),
        ({"num_bytes": 2 << 20, "engine": "collective"}, "engine 'collective' is not available"),
        ({"num_bytes": 2 << 20, "engine": "mmap"}, "engine 'mmap' is not available: it needs a t"),
    ],
)
def test_constructor_errors(arguments: dict[str, Any], message: str) -> None:
    for found in errors_of(2, lambda group: ElasticBuffer(group, **arguments)):
        assert message in found


def test_constructor_differences() -> None:
    def rank(group: LocalGroup) -> None:
        ElasticBuffer(group, num_max_tokens_per_rank=4 + group.rank, hidden=2)

    for found in errors_of(2, rank):
        assert found == (
            "ElasticBuffer: num_max_tokens_per_rank must be the same on all ranks, got 4 on rank 0 "
            "and 5 on rank 1"
        )


def test_group_must_be_one() -> None:
    with pytest.raises(TypeError, match=r"group must be a torch.dist.*, got str"):
        ElasticBuffer("world", num_bytes=2 << 20)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x": torch.zeros(5, 2)}, "x must have shape [2, hidden], got (5, 2)"),
        ({"x": torch.zeros(2, 2, dtype=torch.int32)}, "x must be float32 or float16 or bfloat16"),
        ({"topk_weights": torch.zeros(2)}, "topk_weights must have 2 dimensions"),
        ({"bias": torch.zeros(2, 2).half()}, "bias must be float32, got float16"),
        ({"bias": (torch.zeros(2, 2), torch.zeros(1, 2))}, "bias[1] must have shape [2, 2]"),
        ({"bias": (torch.zeros(2, 2),) * 3}, "bias must be None, a tensor or a pair, got 3"),
        ({"handle": None}, "handle must be an EPHandle, got NoneType"),
    ],
)
def test_combine_errors(arguments: dict[str, Any], message: str) -> None:
    buffer = alone()
    rows, _, _, handle, _ = buffer.dispatch(**ARGUMENTS)
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        buffer.combine(**{"x": rows, "handle": handle, **arguments})


def test_weights_of_single_slots_cannot_come_back() -> None:
    buffer = alone(allow_multiple_reduction=False)
    rows, _, _, handle, _ = buffer.dispatch(**ARGUMENTS, do_expand=True)
    with pytest.raises(ValueError, match="topk_weights must be None for the expanded layout"):
        buffer.combine(rows, handle, topk_weights=torch.zeros(len(rows)))


# ---- handles ------------------------------------------------------------------------------------


def handle_of(buffer: ElasticBuffer, **options: Any) -> EPHandle:
    return buffer.dispatch(**ARGUMENTS, **options)[3]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"topk_idx": ARGUMENTS["topk_idx"]}, "topk_idx must be None with a handle"),
        ({"num_experts": 8}, "num_experts must be that of the handle, 4, got 8"),
        ({"expert_alignment": 8}, "expert_alignment must be that of the handle, 1, got 8"),
        ({"do_cpu_sync": True}, "do_cpu_sync must not be True with a handle"),
        ({"do_expand": True}, "do_expand must be False with a handle of the compact layout"),
        ({"x": torch.zeros(3, 2)}, "x must have the 2 tokens of the handle, got 3"),
    ],
)
def test_handle_errors(arguments: dict[str, Any], message: str) -> None:
    buffer = alone()
    handle = handle_of(buffer)
    with pytest.raises(ValueError, match=re.escape(message)):
        buffer.dispatch(**{"x": torch.zeros(2, 2), "handle": handle, **arguments})


def test_handle_keeps_a_copy_of_the_choices_or_the_tensor() -> None:
    buffer, idx = alone(), choices([0, 3], [1, -1])
    for copy in (True, False):
        _, _, _, handle, _ = buffer.dispatch(
            torch.zeros(2, 2), idx, num_experts=4, do_handle_copy=copy
        )
        assert (handle.topk_idx is idx) == (not copy)


def test_handle_remembers_the_number_of_sms() -> None:
    assert handle_of(alone(), num_sms=12).num_sms == 12


def test_handle_carries_new_payloads_and_weights() -> None:
    buffer = alone()
    handle = handle_of(buffer, do_expand=True, expert_alignment=2)
    weights = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    x = (torch.arange(2).view(2, 1).to(torch.int16), torch.ones(2, 3).bfloat16())
    (first, second), ids, found, same, _ = buffer.dispatch(x, handle=handle, topk_weights=weights)
    assert same is handle
    assert ids is None
    assert first.flatten().tolist() == [0, 0, 1, 0, 0, 0]
    assert second[:, 0].tolist() == [1, 0, 1, 0, 1, 0]
    assert found.tolist() == [1, 0, 3, 0, 2, 0]


@pytest.mark.parametrize("given", [(1, 1), (0, 1)], ids=["of all ranks", "of one rank"])
@pytest.mark.parametrize("call", ["combine", "dispatch"])
def test_handle_of_another_buffer_is_refused(call: str, given: tuple[int, int]) -> None:
    """Also one of the same dispatch number of a buffer that is made alike."""

    def rank(group: LocalGroup) -> None:
        buffers = [ElasticBuffer(group, num_max_tokens_per_rank=4, hidden=2) for _ in range(2)]
        results = [buffer.dispatch(**ARGUMENTS) for buffer in buffers]
        rows, handle = results[given[group.rank]][:4:3]
        x = rows if call == "combine" else ARGUMENTS["x"]
        getattr(buffers[0], call)(x, handle=handle)

    expected = "handle must come from this buffer, got one of another buffer"
    others = " (errors on 2 ranks)" if given[0] else ""
    first = given.index(1)
    for found in errors_of(2, rank):
        assert found == f"ElasticBuffer.{call}: rank {first}: {expected}{others}"


# ---- other options ------------------------------------------------------------------------------


@pytest.mark.parametrize("expand", [False, True])
def test_scale_factors_in_columns(expand: bool) -> None:
    buffer = alone()
    sf = torch.arange(6).view(2, 3).float()
    x = (torch.zeros(2, 2).to(torch.float8_e4m3fn), sf.T.contiguous().T)
    options = {"num_experts": 4, "do_expand": expand}
    (_, plain), *_ = buffer.dispatch(x, choices([0, 3], [1, -1]), **options)
    (_, found), *_ = buffer.dispatch(
        x, choices([0, 3], [1, -1]), use_tma_aligned_col_major_sf=True, **options
    )
    assert torch.equal(found, plain)
    assert plain.is_contiguous()
    assert found.stride() == (1, 4)


@pytest.mark.parametrize("num_tokens", [1, 3])
@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.complex128])
def test_rows_alone_are_contiguous(num_tokens: int, dtype: torch.dtype) -> None:
    x = torch.arange(3 * num_tokens).view(num_tokens, 3).to(dtype)
    buffer, idx = alone(), torch.zeros(num_tokens, 1, dtype=topk_idx_t)
    rows, _, _, handle, _ = buffer.dispatch(x, idx, num_experts=1)
    for found in (rows, buffer.dispatch(x, handle=handle)[0]):
        assert torch.equal(found, x)
        assert found.stride() == (3, 1)


def test_events() -> None:
    buffer = alone()
    before = ElasticBuffer.capture()
    *_, event = buffer.dispatch(
        **ARGUMENTS,
        previous_event=before,
        previous_event_before_epilogue=before,
        allocate_on_comm_stream=True,
        async_with_compute_stream=True,
    )
    calls = []
    event.register_hook_after_wait(lambda: calls.append(1))
    with pytest.raises(RuntimeError, match="there is a hook already"):
        event.register_hook_after_wait(lambda: None)
    with event(release_handle=True) as same:
        assert same is event
        assert calls == []
    assert calls == [1]
    with pytest.raises(RuntimeError, match="there is no event to wait for"):
        event.current_stream_wait()
    with EventOverlap():
        pass
    *_, event = buffer.dispatch(**ARGUMENTS)
    assert event.event is None


def test_destroy_is_for_those_who_asked_for_it() -> None:
    with pytest.raises(RuntimeError, match="made with explicitly_destroy=False"):
        alone().destroy()
    buffer = alone(explicitly_destroy=True)
    buffer.barrier(with_cpu_sync=True)
    buffer.destroy()
    with pytest.raises(RuntimeError, match="the buffer was destroyed"):
        buffer.dispatch(**ARGUMENTS)


def test_domains_and_attributes() -> None:
    def rank(group: LocalGroup) -> None:
        assert get_physical_domain_size(group) == (1, 4)
        assert get_logical_domain_size(group) == (1, 4)
        buffer = ElasticBuffer(
            group, num_max_tokens_per_rank=4096, hidden=7168, num_topk=8, num_scaleup_ranks=2
        )
        assert buffer.get_physical_domain_size() == buffer.get_logical_domain_size() == (2, 2)
        assert (buffer.scaleout_rank_idx, buffer.scaleup_rank_idx) == divmod(group.rank, 2)
        assert buffer.num_allocated_qps == 129
        assert buffer.get_theoretical_num_qps(4) == 65
        flat = ElasticBuffer(group, num_bytes=2 << 20, allow_hybrid_mode=False, num_scaleup_ranks=2)
        assert flat.get_logical_domain_size() == (1, 4)
        assert flat.get_physical_domain_size() == (2, 2)
        assert flat.num_allocated_qps == 17
        assert flat.num_bytes == 2 << 20
        assert flat.get_theoretical_num_sms(256, 8) == 20  # no bandwidth is known
        with pytest.raises(ValueError, match="nvlink_gbs must be positive"):
            flat.get_theoretical_num_sms(256, 8, rdma_gbs=50)
        assert 4 <= flat.get_theoretical_num_sms(256, 8, nvlink_gbs=430) <= 132
        with pytest.raises(ValueError, match="num_scaleout_topk must be 0, got 2"):
            flat.get_theoretical_num_sms(256, 8, 2)

    run_ranks(4, rank)


def test_size_hints() -> None:
    def rank(group: LocalGroup) -> None:
        hint = ElasticBuffer.get_buffer_size_hint(group, 64, 256, 4)
        assert hint == ElasticBuffer(group, None, 0, 64, 256, 4).num_bytes
        session = ElasticBuffer.get_agrs_num_max_session_bytes(group, [(3,), (9,)], torch.int32)
        assert session == 32 + 96
        assert ElasticBuffer.get_agrs_buffer_size_hint(group, session) == 2 << 20

    run_ranks(2, rank)
    assert ElasticBuffer.get_pp_buffer_size_hint(100, 2) == 2 << 20
    assert ElasticBuffer.get_engram_storage_size_hint(10, 10, 10) == (2 << 20, 2 << 20)


def test_without_checks_only_counts_are_compared() -> None:
    def rank(group: LocalGroup) -> str:
        buffer = ElasticBuffer(group, num_max_tokens_per_rank=4, hidden=2, check_ranks=False)
        rows, _, _, handle, _ = buffer.dispatch(**ARGUMENTS)
        buffer.combine(rows, handle)
        with pytest.raises(ValueError, match=f"combine: rank {group.rank}: x must have shape"):
            buffer.combine(rows[:0], handle)
        return str(buffer.dispatch(ARGUMENTS["x"], handle=handle)[3] is handle)

    assert run_ranks(2, rank) == ["True", "True"]


def test_threads_that_wait_in_vain_say_for_whom() -> None:
    def rank(group: LocalGroup) -> str:
        buffer = ElasticBuffer(group, num_bytes=2 << 20, num_cpu_timeout_secs=1)
        if group.rank == 0:
            return ""
        with pytest.raises(RuntimeError) as error:
            buffer.barrier()
        return str(error.value)

    assert (
        run_ranks(2, rank)[1]
        == "rank 1 waited 1 s in ElasticBuffer.barrier (exchange of descriptors) for rank 0"
    )


@pytest.mark.parametrize("offset", [0, 1, 3])
@pytest.mark.parametrize("expand", [False, True], ids=["compact", "expanded"])
def test_tensors_may_begin_anywhere_in_their_storage(offset: int, expand: bool) -> None:
    """Rows of 8 bytes that do not lie on multiples of 8."""

    def rank(group: LocalGroup) -> None:
        buffer = ElasticBuffer(group, num_max_tokens_per_rank=4, hidden=4)
        x = torch.arange(20, dtype=torch.bfloat16)[offset : offset + 16].view(4, 4)
        ids = torch.tensor([[0, 1], [1, -1], [0, -1], [1, 0]])
        weights = torch.arange(12, dtype=torch.float32)[offset : offset + 8].view(4, 2)
        rows, _, found, handle, _ = buffer.dispatch(
            x, ids, weights, num_experts=2, do_expand=expand
        )
        total, back, _ = buffer.combine(rows, handle, found)
        assert_equal(total, x * (ids >= 0).sum(1, keepdim=True) if expand else x)
        assert_equal(back, weights * (ids >= 0))

    run_ranks(1, rank)


# ---- environment --------------------------------------------------------------------------------


def test_environment(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("EP_OVERRIDE_RDMA_SL", "7")
    monkeypatch.setenv("EP_BUFFER_DEBUG", "1")
    monkeypatch.setenv("EP_AVOID_RECORD_STREAM", "1")
    buffer = ElasticBuffer(LocalGroup(), num_bytes=2 << 20, sl_idx=2)
    assert buffer.sl_idx == 7
    assert buffer._keep_tensors
    said = capsys.readouterr().out
    assert said.startswith("ElasticBuffer: rank 0 of 1, engine local, 1 x 1 ranks, 2097152 bytes")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("EP_OVERRIDE_RDMA_SL", "16", "sl_idx must be in 0..15, got 16"),
        ("EP_OVERRIDE_RDMA_SL", "low", "EP_OVERRIDE_RDMA_SL must be a number, got 'low'"),
        ("EP_NUM_TOPK_IDX_BITS", "16", "EP_NUM_TOPK_IDX_BITS must be 32 or 64, got 16"),
    ],
)
def test_environment_errors(
    name: str, value: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"ElasticBuffer: rank 0: {message}"):
        ElasticBuffer(LocalGroup(), num_bytes=2 << 20)


def test_sums_over_ranks_are_of_integers() -> None:
    def rank(group: LocalGroup) -> None:
        buffer = ElasticBuffer(group, num_bytes=2 << 20)
        with pytest.raises(TypeError, match="sum_over_ranks: rank 0: t must be int32 or int64"):
            buffer.sum_over_ranks(torch.ones(3))
        with pytest.raises(ValueError, match="t must be the same on all ranks"):
            buffer.sum_over_ranks(torch.zeros(2 + group.rank, dtype=torch.int32))
        found = buffer.sum_over_ranks(torch.tensor([[group.rank, 5]], dtype=torch.int32))
        assert found.tolist() == [[1, 10]]
        assert found.dtype == torch.int32
        assert buffer.sum_over_ranks(torch.zeros(0, 3, dtype=torch.int64)).shape == (0, 3)

    run_ranks(2, rank)


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        ("numbers", r"rank 1: x\[0\] must be a torch.Tensor, got int"),
        ("combine", "rank 1: x must be on cpu as the handle is, got meta"),
        ("dispatch", "rank 1: x must be on cpu as the handle is, got meta"),
        ("gather", "rank 1: tensor 0 must be a Tensor, got NoneType"),
    ],
)
def test_mistake_of_one_rank_is_told_to_all(mistake: str, said: str) -> None:
    def call(group: LocalGroup) -> None:
        buffer = ElasticBuffer(
            group, num_max_tokens_per_rank=8, hidden=4, num_topk=2, num_cpu_timeout_secs=20
        )
        x, topk_idx = torch.ones(3, 4), torch.tensor([[0, 1], [1, -1], [2, 3]])
        wrong, elsewhere = bool(group.rank), "meta" if group.rank else "cpu"
        rows, _, _, handle, _ = buffer.dispatch(x, topk_idx, num_experts=4)
        buffer.agrs_set_config(1 << 16, 4)
        buffer.create_agrs_session()
        made: dict[str, Callable[[], Any]] = {
            "numbers": lambda: buffer.dispatch(
                (1, 2) if wrong else (x, x), topk_idx, num_experts=4
            ),
            "combine": lambda: buffer.combine(rows.to(elsewhere), handle),
            "dispatch": lambda: buffer.dispatch(x.to(elsewhere), handle=handle),
            "gather": lambda: buffer.all_gather(None if wrong else x),
        }
        with pytest.raises((TypeError, ValueError), match=said):
            made[mistake]()

    run_ranks(2, call)
