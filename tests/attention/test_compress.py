"""Compressed keys and values: gradients, decoding, sequences."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import tile_kernels
from tests.requirements import GROUNDS
from tile_kernels import attention
from tile_kernels import torch as references
from tile_kernels.attention import windows
from tile_kernels.attention.compress.cases import (
    KV_COMPRESS,
    KV_COMPRESS_BWD,
    bounds,
    column,
    example,
    series,
)
from tile_kernels.attention.norm_rope.cases import KV_COMPRESS_NORM_ROPE_CAST
from tile_kernels.runtime.cases import assert_equal_results
from tile_kernels.runtime.device import DESCRIBED

each_ground = pytest.mark.parametrize("ground", GROUNDS)
LENGTHS = (9, 0, 1, 3, 4, 17, 2)
NAMES = ("kv_a", "z_a", "bias_a", "kv_b", "z_b", "bias_b")


def arguments(
    num_tokens: int, channels: int, window: int, device: str = "cpu", **options: Any
) -> dict[str, Any]:
    torch.manual_seed(num_tokens)
    return series(num_tokens, channels, window, **options)(torch.device(device))


# ---- gradients ----------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("lengths", [None, LENGTHS])
def test_gradcheck_of_the_oracle(overlap: bool, lengths: tuple[int, ...] | None) -> None:
    given = arguments(36, 2, 3, overlap=overlap, dtype=torch.float32, lengths=lengths)
    cu_seqlens = given.pop("cu_seqlens", None)
    inputs = [x.double().requires_grad_() for x in given.values()]

    def compress(*inputs: torch.Tensor) -> torch.Tensor:
        return references.kv_compress(*inputs, cu_seqlens=cu_seqlens)

    assert torch.autograd.gradcheck(compress, inputs)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("num_windows", [None, 5, 12])
def test_backward_formula_is_the_oracles_gradient(overlap: bool, num_windows: int | None) -> None:
    given = arguments(36, 3, 4, overlap=overlap, dtype=torch.float32, lengths=LENGTHS)
    cu_seqlens = given.pop("cu_seqlens")
    inputs = [x.double().requires_grad_() for x in given.values()]
    out = references.kv_compress(*inputs, cu_seqlens=cu_seqlens, num_windows=num_windows)
    grad = torch.randn_like(out)
    expected = torch.autograd.grad(out, inputs, grad)
    result = references.kv_compress_bwd(grad, *(x.detach() for x in inputs), cu_seqlens=cu_seqlens)
    for one, other in zip(result, expected):
        assert one is not None
        torch.testing.assert_close(one, other)
    assert all(x is None for x in result[len(inputs) :])


@each_ground
@pytest.mark.parametrize("compiled", [False, True])
def test_worked_gradient(compiled: bool, ground: tuple[str, str]) -> None:
    backend, device = ground
    given = {name: x.to(device) for name, x in example().items()}
    cu_seqlens = given.pop("cu_seqlens")
    inputs = [given[name].requires_grad_() for name in NAMES]

    def compress(*inputs: torch.Tensor) -> torch.Tensor:
        return attention.kv_compress(*inputs, cu_seqlens=cu_seqlens)

    torch._dynamo.reset()
    run = torch.compile(compress, fullgraph=True, backend="aot_eager") if compiled else compress
    with tile_kernels.backend(backend):
        run(*inputs).backward(column(1, 2, -1).to(device))
    expected = {
        "kv_a": column(0.3100255, 0.6899745, 0.1896343, 0.6958245, 0, -0.3100255, -0.6899745),
        "z_a": column(-0.2139097, 0.2139097, 1.6354605, 6.6968144, 0, 0.2139097, -0.2139097),
        "bias_a": column(1.6354605, 6.6968144),
        "kv_b": column(0.7690050, 0.3455362, 0, 0, 0, 0, 0),
        "z_b": column(-3.3649454, -4.9673296, 0, 0, 0, 0, 0),
        "bias_b": column(-3.3649454, -4.9673296),
    }
    for name, x in zip(NAMES, inputs):
        assert x.grad is not None
        torch.testing.assert_close(x.grad.cpu(), expected[name], rtol=1e-5, atol=1e-6)


@each_ground
def test_packed_gradient_is_that_of_its_halves(ground: tuple[str, str]) -> None:
    backend, device = ground
    given = arguments(29, 8, 4, device, dtype=torch.float32)
    apart = [given[name].clone().requires_grad_() for name in NAMES]
    a, b = given, given
    joined = [
        torch.cat((b[f"{name}_b"], a[f"{name}_a"]), 1).requires_grad_()
        for name in ("kv", "z", "bias")
    ]
    with tile_kernels.backend(backend):
        entries = attention.kv_compress_packed(*joined)
        expected = attention.kv_compress(*apart)
        assert torch.equal(entries, expected)
        grad = torch.randn_like(entries)
        entries.backward(grad)
        expected.backward(grad)
    for packed, of_a, of_b in zip(joined, apart[:3], apart[3:]):
        assert packed.grad is not None
        assert of_a.grad is not None
        assert of_b.grad is not None
        assert torch.equal(packed.grad, torch.cat((of_b.grad, of_a.grad), 1))


def test_there_is_no_second_derivative_and_it_says_so() -> None:
    kv, z, bias = column(1, 3).requires_grad_(), column(0, 0), column(0, 0)
    out = attention.kv_compress(kv, z, bias)
    (grad,) = torch.autograd.grad(out.sum(), kv, create_graph=True)
    with pytest.raises(RuntimeError, match="kv_compress: there is no second derivative"):
        grad.sum().backward()


# ---- sequences ----------------------------------------------------------------------------------


@each_ground
@pytest.mark.parametrize("overlap", [True, False])
def test_sequences_are_compressed_as_if_alone(overlap: bool, ground: tuple[str, str]) -> None:
    backend, device = ground
    given = arguments(36, 8, 4, device, overlap=overlap, lengths=LENGTHS)
    cu_seqlens = given.pop("cu_seqlens")
    with tile_kernels.backend(backend):
        together = attention.kv_compress(**given, cu_seqlens=cu_seqlens)
        ends = cu_seqlens.tolist()
        alone = [
            attention.kv_compress(
                **{k: x if k.startswith("bias") else x[start:end] for k, x in given.items()}
            )
            for start, end in itertools.pairwise(ends)
        ]
    count = sum(len(part) for part in alone)
    assert count == sum(length // 4 for length in LENGTHS)
    assert torch.equal(together[:count], torch.cat(alone))
    assert not together[count:].any()


def test_too_few_entries_are_found_in_the_checked_mode() -> None:
    given = example(num_windows=2)
    with (
        tile_kernels.checked(),
        pytest.raises(ValueError, match="num_windows must have room for 3"),
    ):
        attention.kv_compress(**given)


@pytest.fixture
def one_sm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """So few blocks that each walks over many windows."""
    before = tile_kernels.get_num_sms()
    monkeypatch.setattr(windows.config, "get_device_num_sms", lambda _: 1)
    tile_kernels.set_num_sms(1)
    yield
    monkeypatch.undo()
    tile_kernels.set_num_sms(before)


@pytest.mark.parametrize(
    ("num_tokens", "channels", "window", "overlap"),
    [(2107, 24, 4, True), (90, 520, 2, False), (5200, 8, 128, False), (500, 8, 70, True)],
    ids=["threads", "slots", "groups", "chunks"],
)
def test_blocks_walk_over_windows(
    num_tokens: int, channels: int, window: int, overlap: bool, one_sm: None
) -> None:
    given = arguments(num_tokens, channels, window, overlap=overlap)
    count = num_tokens // window
    geo = windows.geometry(channels, window, 1 + overlap, 8)
    parts = windows.count_parts(count, (channels, window, 1 + overlap, 8), torch.device("cpu"))
    assert count > 2 * parts * geo.slots, "several windows for each thread"
    grad = torch.randn(count, channels).bfloat16()
    with tile_kernels.backend("emulate"):
        KV_COMPRESS.compare(attention.kv_compress(**given), references.kv_compress(**given))
        KV_COMPRESS_BWD.compare(
            attention.kv_compress_bwd(grad, **given), references.kv_compress_bwd(grad, **given)
        )


def test_blocks_walk_over_windows_to_cast(one_sm: None) -> None:
    given = arguments(1300, 80, 4)
    angle = torch.rand(1300, 8)
    given |= {"weight": torch.rand(80), "cos": angle.cos(), "sin": angle.sin()}
    with tile_kernels.backend("emulate"):
        result = attention.kv_compress_norm_rope_cast(**given)
    KV_COMPRESS_NORM_ROPE_CAST.compare(result, references.kv_compress_norm_rope_cast(**given))


@pytest.mark.parametrize("backend", ["torch", "emulate"])
def test_positions_past_the_tables(backend: str) -> None:
    """Refused where sizes tell, in the checked mode where lengths do; else the last row counts."""
    given = arguments(32, 80, 4)
    angle = torch.rand(29, 8)
    enough = {"weight": torch.rand(80), "cos": angle.cos(), "sin": angle.sin()}
    few = {**enough, "cos": enough["cos"][:28], "sin": enough["sin"][:28]}
    bounds = {"cu_seqlens": torch.tensor([0, 32], dtype=torch.int32)}
    last = [torch.cat((few[name], few[name][-1:])) for name in ("cos", "sin")]
    message = "kv_compress_norm_rope_cast: cos must have at least 29 rows, got 28"
    with tile_kernels.backend(backend):
        whole = attention.kv_compress_norm_rope_cast(**given, **enough)
        assert_equal_results(
            attention.kv_compress_norm_rope_cast(**given, **enough, **bounds), whole
        )
        with pytest.raises(ValueError, match=message):
            attention.kv_compress_norm_rope_cast(**given, **few)
        found = attention.kv_compress_norm_rope_cast(**given, **few, **bounds)
        repeated = {**enough, "cos": last[0], "sin": last[1]}
        assert_equal_results(found, attention.kv_compress_norm_rope_cast(**given, **repeated))
        with tile_kernels.checked(), pytest.raises(ValueError, match=message):
            attention.kv_compress_norm_rope_cast(**given, **few, **bounds)


def test_geometry_holds_what_a_block_can() -> None:
    """Shared memory fits the smallest supported GPU, threads a block, whatever the shape."""
    from tile_kernels.attention.geometry import geometry

    for window in (1, 2, 3, 4, 5, 8, 9, 31, 64, 65, 100, 128, 129, 1000):
        for channels, vector in ((1, 1), (7, 1), (64, 8), (512, 8), (576, 4), (7168, 8)):
            for count in (1, 2):
                geo = geometry(channels, window, count, vector)
                assert geo.groups * geo.items * geo.chunks >= window
                assert geo.threads <= 128
                assert geo.width * geo.blocks_across >= channels
                biases = count * geo.groups * geo.items * geo.width if geo.chunks == 1 else 1
                exchange = 3 * (geo.groups + 1) * geo.slots * geo.width * (geo.groups > 1)
                sums = geo.rows * geo.vector * geo.threads  # of the gradient
                assert 4 * (biases + exchange + sums) <= 99 << 10


@pytest.mark.parametrize("arch", DESCRIBED)
@pytest.mark.parametrize("gradient", [False, True])
def test_copies_ahead_where_blocks_have_room(arch: str, gradient: bool) -> None:
    from tile_kernels.attention.compress.plan import plan_compress, plan_gradients

    plan = plan_gradients if gradient else plan_compress

    def copies(window: int, vector: int, dtype: str = "bfloat16") -> bool:
        series = 2 if window == 4 else 1
        return plan(512, window, series, False, dtype, dtype, vector, DESCRIBED[arch]).ahead

    large = arch in ("sm_80", "sm_90a", "sm_100a")  # of shared memory
    assert copies(4, 8) == copies(4, 4, "float32") == large
    assert copies(128, 8) == (large and not (arch == "sm_80" and gradient))
    assert not copies(4, 4)  # accesses of 8 bytes
    assert not copies(1000, 8)  # windows in chunks


# ---- decoding -----------------------------------------------------------------------------------


@each_ground
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("window", "overlap"), [(1, True), (3, True), (4, True), (4, False), (10, True), (20, False)]
)
def test_decoding_gives_the_bits_of_prefill(
    window: int, overlap: bool, dtype: torch.dtype, ground: tuple[str, str]
) -> None:
    """From the first token on, and from the middle of a sequence on."""
    backend, device = ground
    num_tokens, channels, start = 3 * window + 2, 24, window + window // 2
    given = arguments(num_tokens, channels, window, device, overlap=overlap, dtype=dtype)
    biases = {name: x for name, x in given.items() if name.startswith("bias")}
    tokens = {name: x for name, x in given.items() if not name.startswith("bias")}
    state = attention.KVCompressorState.empty(
        2, window, channels, overlap=overlap, dtype=dtype, device=device
    )
    with tile_kernels.backend(backend):
        expected = attention.kv_compress(**given)
        state.prefill(*(x[:start] for x in tokens.values()), slots=torch.tensor([1], device=device))
        entries: list[list[torch.Tensor]] = [[], []]
        for t in range(num_tokens):  # slot 0 starts at the first token, slot 1 in the middle
            slots = torch.tensor([0, 1 if t >= start else -1], device=device).int()
            step = {name: x[[t, t]] for name, x in tokens.items()}
            new, completed = attention.kv_compress_step(state, **step, **biases, slots=slots)
            for entry, complete, mine in zip(new, completed.tolist(), entries):
                if complete:
                    mine.append(entry)
    assert torch.equal(torch.stack(entries[0]), expected)
    assert torch.equal(torch.stack(entries[1]), expected[start // window :])
    assert state.lengths.tolist() == [num_tokens, num_tokens]


def test_state_of_several_sequences_after_prefill() -> None:
    """Ragged prefill, with sequences that are empty or shorter than a window, then one step."""
    window, channels = 4, 8
    given = arguments(36, channels, window, lengths=LENGTHS, dtype=torch.float32)
    cu_seqlens = given.pop("cu_seqlens")
    tokens = {name: x for name, x in given.items() if not name.startswith("bias")}
    state = attention.KVCompressorState.empty(7, window, channels, dtype=torch.float32)
    state.prefill(*tokens.values(), cu_seqlens=cu_seqlens)
    assert state.lengths.tolist() == list(LENGTHS)
    step = {name: torch.randn(7, channels) for name in tokens}
    biases = {name: x for name, x in given.items() if name.startswith("bias")}
    entries, completed = attention.kv_compress_step(state, **step, **biases)
    assert completed.tolist() == [(length + 1) % window == 0 for length in LENGTHS]
    starts = cu_seqlens.tolist()
    for i, length in enumerate(LENGTHS):
        whole = {
            name: torch.cat((x[starts[i] : starts[i] + length], step[name][i : i + 1]))
            for name, x in tokens.items()
        }
        expected = attention.kv_compress(**whole, **biases)
        if completed[i]:
            assert torch.equal(entries[i], expected[-1])
        else:
            assert not entries[i].any()


def test_state_is_made_and_reset() -> None:
    state = attention.KVCompressorState.empty(3, 4, 8, overlap=False)
    assert (state.window, state.overlap) == (4, False)
    assert state.kept.shape == (3, 4, 2, 8)
    state.lengths.fill_(7)
    state.reset(torch.tensor([1]))
    assert state.lengths.tolist() == [7, 0, 7]
    state.reset()
    assert state.lengths.tolist() == [0, 0, 0]
    with pytest.raises(ValueError, match="prefill: kv_b and z_b must be given not here"):
        state.prefill(*(torch.zeros(1, 8) for _ in range(4)))
    for dtype in (torch.float16, None):
        with pytest.raises(TypeError, match="dtype must be bfloat16 or float32"):
            attention.KVCompressorState.empty(1, 1, 1, dtype=dtype)  # type: ignore[arg-type]


def test_a_slot_that_comes_twice_is_found_in_the_checked_mode() -> None:
    state = attention.KVCompressorState.empty(3, 2, 1, overlap=False, dtype=torch.float32)
    rows = column(1, 2)
    with tile_kernels.checked(), pytest.raises(ValueError, match="slots must name a sequence once"):
        attention.kv_compress_step(
            state, rows, rows, column(0, 0), slots=torch.tensor([1, 1]).int()
        )


def test_slots_to_prefill_are_found_in_the_checked_mode() -> None:
    state = attention.KVCompressorState.empty(2, 2, 1, overlap=False, dtype=torch.float32)
    rows, cu_seqlens = column(1, 2), torch.tensor([0, 1, 2])
    with tile_kernels.checked():
        state.prefill(rows, rows, cu_seqlens=cu_seqlens, slots=torch.tensor([1, 0]))
        with pytest.raises(ValueError, match=r"slots must hold 0\.\.1, but element \[1\] is -1"):
            state.prefill(rows, rows, cu_seqlens=cu_seqlens, slots=torch.tensor([0, -1]))
        with pytest.raises(ValueError, match="slots must name a sequence once, but 1 comes"):
            state.prefill(rows, rows, cu_seqlens=cu_seqlens, slots=torch.tensor([1, 1]))


def test_bounds() -> None:
    assert bounds((2, 0, 3), "cpu").tolist() == [0, 2, 2, 5]


def test_slots_outside_of_the_state_are_left_out() -> None:
    state = attention.KVCompressorState.empty(3, 4, 8, dtype=torch.float32)
    state.lengths[:] = 5
    state.reset(torch.tensor([-1, 7]))
    assert state.lengths.tolist() == [5, 5, 5]
    state.reset(torch.tensor([2, -1]))
    assert state.lengths.tolist() == [5, 5, 0]
    with pytest.raises(TypeError, match="reset: slots must be int32 or int64, got bool"):
        state.reset(torch.tensor([True, False, True]))

    rows = torch.randn(4, 6, 8, requires_grad=True)
    bounds = torch.tensor([0, 2, 3, 6])
    before = state.kept.clone()
    state.prefill(*rows.unbind(), cu_seqlens=bounds, slots=torch.tensor([-1, 1, 9]))
    assert state.lengths.tolist() == [5, 1, 0]
    assert not state.kept.requires_grad
    assert torch.equal(state.kept[[0, 2]], before[[0, 2]])
    assert torch.equal(state.kept[1, 0], rows[:, 2])
    state.prefill(*rows.unbind(), cu_seqlens=bounds, slots=torch.tensor([-1, -1, 9]))
    assert state.lengths.tolist() == [5, 1, 0]
