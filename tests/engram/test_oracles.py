"""The oracles of Engram against worked vectors, Python's integers and numerical derivatives."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tile_kernels.testing.numeric import assert_equal, calc_diff
from tile_kernels.torch import engram

INT32, INT64 = torch.int32, torch.int64
NAN, INF = float("nan"), float("inf")
EPS, CLAMP = 1e-20, 1e-6


def int32(values: list) -> Tensor:
    return torch.tensor(values, dtype=INT32)


def wrapped(value: int, bits: int) -> int:
    """`value` modulo 2^bits, as a signed number."""
    value %= 1 << bits
    return value - (1 << bits) if value >> (bits - 1) else value


# ---- windows -----------------------------------------------------------------------------------


def plain_windows(
    rows: list[list[int]], window: int, pad: int, starts: list[int], token_map: list[int] | None
) -> list[list[int]]:
    """Window after window, place after place."""

    def canonical(token: int) -> int:
        if token_map is None:
            return token
        return token_map[token] if 0 <= token < len(token_map) else pad

    windows, place = [], 0
    for row in rows:
        for column, token in enumerate(row):
            out = [canonical(token)]
            while len(out) < window:
                distance = len(out)
                ended = out[-1] == pad or distance > column or place - distance + 1 in starts
                out.append(pad if ended else canonical(row[column - distance]))
            windows.append(out)
            place += 1
    return windows


@st.composite
def texts(draw: st.DrawFn) -> tuple:
    batch, length = draw(st.integers(1, 3)), draw(st.integers(0, 9))
    token = st.integers(-2, 6)
    row = st.lists(token, min_size=length, max_size=length)
    rows = draw(st.lists(row, min_size=batch, max_size=batch))
    window, pad = draw(st.integers(1, 5)), draw(st.integers(-1, 6))
    boundaries = st.lists(st.integers(0, batch * length), max_size=4).map(sorted)
    cu_seqlens = draw(st.none() | boundaries)
    token_map = draw(st.none() | st.lists(st.integers(-1, 4), max_size=6))
    return rows, window, pad, cu_seqlens, token_map, draw(st.sampled_from([INT32, INT64]))


@settings(max_examples=300, deadline=None)
@given(texts())
def test_windows_are_those_of_a_plain_loop(text: tuple) -> None:
    rows, window, pad, cu_seqlens, token_map, dtype = text
    token_ids = torch.tensor(rows, dtype=dtype)
    found = engram.ngram_windows(
        token_ids, window, pad,
        None if cu_seqlens is None else torch.tensor(cu_seqlens, dtype=dtype),
        None if token_map is None else torch.tensor(token_map, dtype=dtype),
    )  # fmt: skip
    assert found.dtype == INT32
    assert found.is_contiguous()
    assert found.shape == (*token_ids.shape, window)
    expected = plain_windows(rows, window, pad, cu_seqlens or [], token_map)
    assert found.view(-1, window).tolist() == expected
    if len(rows) == 1:
        flat = engram.ngram_windows(
            token_ids[0], window, pad,
            None if cu_seqlens is None else torch.tensor(cu_seqlens, dtype=dtype),
            None if token_map is None else torch.tensor(token_map, dtype=dtype),
        )  # fmt: skip
        assert_equal(flat, found[0])


def test_windows_of_documents() -> None:
    ids = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    found = engram.ngram_windows(ids, 3, 0, cu_seqlens=torch.tensor([2, 7]))
    assert found.tolist() == [
        [[1, 0, 0], [2, 1, 0], [3, 0, 0], [4, 3, 0]],
        [[5, 0, 0], [6, 5, 0], [7, 6, 5], [8, 0, 0]],
    ]


def test_boundaries_outside_of_the_tokens_do_nothing() -> None:
    ids = torch.tensor([1, 2, 3])
    expected = engram.ngram_windows(ids, 2, 0)
    for boundary in (-7, 3, 2**40):
        cu_seqlens = torch.tensor([0, boundary, 3])
        assert_equal(engram.ngram_windows(ids, 2, 0, cu_seqlens), expected)


@pytest.mark.parametrize("shape", [(0,), (0, 5), (3, 0)])
def test_windows_of_no_tokens(shape: tuple[int, ...]) -> None:
    token_ids = torch.empty(shape, dtype=INT64)
    found = engram.ngram_windows(token_ids, 3, 0, torch.tensor([0, 0]), torch.tensor([1, 2]))
    assert found.shape == (*shape, 3)


def test_windows_have_a_token() -> None:
    with pytest.raises(ValueError, match="max_ngram_size must be at least 1, got 0"):
        engram.ngram_windows(torch.tensor([1]), 0, 0)


# ---- hash --------------------------------------------------------------------------------------


def test_offsets_vector() -> None:
    sizes = int32([[[3, 4], [5, 6]], [[7, 8], [9, 10]]])
    assert_equal(engram.make_offsets(sizes), int32([[0, 3, 7, 12], [0, 7, 15, 24]]))


def test_offsets_wrap_in_their_dtype() -> None:
    sizes = int32([[[2**31 - 1, 2**31 - 1, 5]]])
    assert engram.make_offsets(sizes).tolist() == [[0, 2**31 - 1, -2]]
    assert_equal(engram.make_offsets(sizes, INT64), torch.tensor([[0, 2**31 - 1, 2**32 - 2]]))


@pytest.mark.parametrize("hashes", [engram.engram_hash, engram.engram_hash_ref])
@pytest.mark.parametrize(
    ("ids", "multipliers", "sizes", "expected"),
    [
        (
            [[5, 7, 11], [-1, 0, 2]], [3, 5, 9], [[10, 13], [17, 19]],
            [[4, 15, 34, 43], [7, 20, 23, 42]],
        ),
        ([[3, 1]], [2**62, 1], [[7]], [[4]]),
        ([[100000, 99999]], [2**62 + 1, 2**40 + 3], [[1000003]], [[105154]]),
    ],
)  # fmt: skip
def test_hash_vectors(
    hashes: object, ids: list, multipliers: list, sizes: list, expected: list
) -> None:
    assert callable(hashes)
    vocab_sizes = int32([sizes])
    offsets = engram.make_offsets(vocab_sizes)
    found = hashes(int32(ids), torch.tensor([multipliers]), vocab_sizes, offsets)
    assert_equal(found, int32([expected]))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_hash_is_that_of_python_integers(data: st.DataObject) -> None:
    layers, tokens, window, tables = (
        data.draw(st.integers(low, high)) for low, high in ((1, 3), (0, 4), (2, 5), (1, 4))
    )

    def fill(numbers: st.SearchStrategy, *shape: int) -> list:
        if not shape:
            return data.draw(numbers)
        return [fill(numbers, *shape[1:]) for _ in range(shape[0])]

    wide = data.draw(st.booleans())
    bits = 63 if wide else 31
    ids = fill(st.integers(-(2**31), 2**31 - 1), tokens, window)
    multipliers = fill(st.integers(-(2**63), 2**63 - 1), layers, window)
    sizes = fill(st.integers(1, 2**31 - 1), layers, window - 1, tables)
    offsets = fill(st.integers(-(2**bits), 2**bits - 1), layers, (window - 1) * tables)

    found = engram.engram_hash(
        int32(ids).view(tokens, window), torch.tensor(multipliers), int32(sizes),
        torch.tensor(offsets, dtype=INT64 if wide else INT32),
    )  # fmt: skip
    assert found.dtype == (INT64 if wide else INT32)
    assert found.is_contiguous()
    assert found.shape == (layers, tokens, (window - 1) * tables)
    for layer in range(layers):
        for token in range(tokens):
            hashed = wrapped(ids[token][0] * multipliers[layer][0], 64)
            for order in range(1, window):
                hashed ^= wrapped(ids[token][order] * multipliers[layer][order], 64)
                for table in range(tables):
                    column = (order - 1) * tables + table
                    row = hashed % sizes[layer][order - 1][table] + offsets[layer][column]
                    assert found[layer, token, column] == wrapped(row, bits + 1)


def test_tables_without_rows_give_their_offset() -> None:
    sizes = int32([[[7, 0]]])
    found = engram.engram_hash(int32([[3, 1]]), torch.tensor([[2**62, 1]]), sizes, int32([[0, 5]]))
    assert found.tolist() == [[[4, 5]]]


def test_hash_needs_two_tokens() -> None:
    with pytest.raises(ValueError, match="at least 2 tokens, got 1"):
        engram.engram_hash(int32([[1]]), torch.tensor([[1]]), int32([[]]), int32([[]]))


# ---- the gate ----------------------------------------------------------------------------------

X = [[1, 2, -1, 0.5], [0.5, -0.5, 1, 1]]
K = [[1, 0, 1, 2], [-1, 1, 0.5, 0]]
V = [1, -2, 0.5, 4]
WEIGHT_HIDDEN = [[1, 0.5, 2, 1], [1, 1, 1, 1]]
WEIGHT_EMBED = [[1, 1, 0.5, 2], [2, 1, 1, 1]]


def worked() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    x, k, v = (torch.tensor([values]).bfloat16() for values in (X, K, V))
    return x, k, v, torch.tensor(WEIGHT_HIDDEN).bfloat16(), torch.tensor(WEIGHT_EMBED).bfloat16()


def close_to(found: Tensor, expected: list) -> None:
    """To the seven digits that the vectors give."""
    torch.testing.assert_close(found, torch.tensor(expected).to(found), rtol=3e-7, atol=5e-8)


def test_fused_weight_vector() -> None:
    found = engram.fused_weight(torch.tensor([[1.5]]).bfloat16(), torch.tensor([[-2.25]]).float())
    assert_equal(found, torch.tensor([[-3.375]]))


def test_forward_vector() -> None:
    x, k, v, weight_hidden, weight_embed = worked()
    fused = engram.fused_weight(weight_hidden, weight_embed)
    from_fused = engram.engram_gate_fwd(x, k, v, fused, EPS, CLAMP)
    reference = engram.engram_gate_ref(x, k, v, weight_hidden, weight_embed, CLAMP, EPS, True)
    for output, dot, gate_score, rstd_x, rstd_k in (from_fused, reference):
        assert all(part is not None for part in (dot, gate_score, rstd_x, rstd_k))
        assert_equal(dot, torch.tensor([[2.0, -1.0]]))
        close_to(rstd_x, [[0.8, 1.2649111]])
        close_to(rstd_k, [[0.8164966, 1.3333334]])
        close_to(gate_score, [[0.6917271, 0.2853045]])
        assert output.dtype == torch.bfloat16
        assert output.tolist() == [
            [[1.6953125, 0.6171875, -0.65234375, 3.265625],
             [0.78515625, -1.0703125, 1.140625, 2.140625]]
        ]  # fmt: skip


def test_backward_vector() -> None:
    x, k, v, weight_hidden, weight_embed = worked()
    fused = engram.fused_weight(weight_hidden, weight_embed)
    saved = engram.engram_gate_fwd(x, k, v, fused, EPS, CLAMP)[1:]
    grad_x, grad_k, grad_v, partial = engram.engram_gate_bwd(
        torch.ones_like(x), x, k, v, fused, *saved, CLAMP, num_parts=3
    )
    assert grad_x.tolist() == [
        [[1.1015625, 0.90234375, 1.1953125, 1.578125],
         [0.41015625, 1.265625, 1.296875, 1.1328125]]
    ]  # fmt: skip
    expected_k = [
        [[0.1005859, 0.1503906, -0.2011719, 0.0502930],
         [0.1816406, -0.0181885, 0.4003906, 0.3281250]]
    ]  # fmt: skip
    assert_equal(grad_k, torch.tensor(expected_k).bfloat16())
    assert grad_v.tolist() == [[0.9765625] * 4]
    assert partial.dtype == torch.float32
    close_to(
        partial[2],
        [[0.1507997, 0, -0.1507997, 0.1507997], [-0.1638408, -0.1638408, 0.1638408, 0]],
    )
    assert not partial[:2].any()


def test_reduce_vector() -> None:
    partial = torch.tensor([[1.0, 2], [3, -1], [0.5, 0.5], [0, 1]])[:, None]
    of_hidden, of_embed = torch.tensor([[10.0, 10]]), torch.zeros(1, 2)
    weights = torch.tensor([[2.0, 1]]).bfloat16(), torch.tensor([[0.5, 4]]).bfloat16()
    assert engram.grad_w_reduce(partial, *weights, of_hidden, of_embed) is None
    assert of_hidden.tolist() == [[12.25, 20]]
    assert of_embed.tolist() == [[9, 2.5]]


def test_reduce_adds_in_order() -> None:
    """2^25 swallows each 1 that comes after it, and not what comes before."""
    parts = torch.tensor([2.0, 2, 2**25, 1, 1])[:, None, None]
    one, found = torch.ones(1, 1), torch.zeros(2, 1, 1)
    engram.grad_w_reduce(parts, one, one, found[0], found[1])
    assert found.flatten().tolist() == [2**25 + 4, 2**25 + 4]


def inputs(
    tokens: int, streams: int, hidden: int, dtype: torch.dtype, seed: int = 0
) -> tuple[Tensor, ...]:
    torch.manual_seed(seed)
    shapes = ((tokens, streams, hidden), (tokens, streams, hidden), (tokens, hidden))
    weights = ((streams, hidden), (streams, hidden))
    return tuple(torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes + weights)


@pytest.mark.parametrize("hidden", [1, 64, 256])
def test_fused_weights_change_little(hidden: int) -> None:
    x, k, v, weight_hidden, weight_embed = inputs(257, 4, hidden, torch.bfloat16)
    reference = engram.engram_gate_ref(x, k, v, weight_hidden, weight_embed, CLAMP, EPS, True)
    fused = engram.fused_weight(weight_hidden, weight_embed)
    found = engram.engram_gate_fwd(x, k, v, fused, EPS, CLAMP)
    for part, expected in zip(found, reference):
        assert calc_diff(part, expected) < 2e-10
    alone = engram.engram_gate_fwd(x, k, v, fused, EPS, CLAMP, save_for_backward=False)
    assert_equal(alone[0], found[0])
    assert alone[1:] == (None, None, None, None)


@pytest.mark.parametrize("add_residual", [True, False])
def test_residual(add_residual: bool) -> None:
    """The output is the residual plus the gated value, or that value alone."""
    x, k, v, weight_hidden, weight_embed = inputs(33, 2, 32, torch.float64)
    fused = engram.fused_weight(weight_hidden, weight_embed)
    output, _, gate, _, _ = engram.engram_gate_fwd(
        x, k, v, fused, EPS, CLAMP, add_residual=add_residual
    )
    expected = gate[..., None] * v[:, None]
    torch.testing.assert_close(output, x + expected if add_residual else expected)


@pytest.mark.parametrize("add_residual", [True, False])
@pytest.mark.parametrize("clamp", [0.0, 1e-6, 0.1])
@pytest.mark.parametrize("num_parts", [1, 3, 8, 40])
def test_backward_is_autograd(add_residual: bool, clamp: float, num_parts: int) -> None:
    x, k, v, weight_hidden, weight_embed = inputs(33, 3, 16, torch.float64)
    fused = engram.fused_weight(weight_hidden, weight_embed)
    leaves = [tensor.requires_grad_() for tensor in (x, k, v, fused)]
    output, *saved = engram.engram_gate_fwd(*leaves, 1e-6, clamp, add_residual=add_residual)
    grad = torch.randn_like(output)
    expected = torch.autograd.grad(output, leaves, grad, retain_graph=True)
    *found, partial = engram.engram_gate_bwd(grad, *leaves, *saved, clamp, num_parts, add_residual)
    assert partial.shape == (num_parts, *fused.shape)
    assert not any(part.requires_grad for part in (*found, partial))
    for part, wanted in zip((*found, partial.sum(0)), expected):
        torch.testing.assert_close(part, wanted, rtol=1e-9, atol=1e-11)


class _Gate(torch.autograd.Function):
    """The two oracles as one differentiable function."""

    @staticmethod
    def forward(ctx, add_residual: bool, x: Tensor, k: Tensor, v: Tensor, fused: Tensor) -> Tensor:
        output, *saved = engram.engram_gate_fwd(
            x, k, v, fused, 1e-6, 0.01, add_residual=add_residual
        )
        ctx.save_for_backward(x, k, v, fused, *saved)
        ctx.add_residual = add_residual
        return output

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple:
        *grads, partial = engram.engram_gate_bwd(
            grad, *ctx.saved_tensors, 0.01, 2, ctx.add_residual
        )
        return None, *grads, partial.sum(0)


@pytest.mark.parametrize("add_residual", [True, False])
def test_gradients_are_numerical_derivatives(add_residual: bool) -> None:
    x, k, v, weight_hidden, weight_embed = inputs(3, 2, 4, torch.float64, seed=3)
    leaves = [part.requires_grad_() for part in (x, k, v, weight_hidden * weight_embed)]
    assert torch.autograd.gradcheck(lambda *args: _Gate.apply(add_residual, *args), leaves)


def test_backward_in_bf16_is_close_to_autograd() -> None:
    x, k, v, weight_hidden, weight_embed = inputs(129, 4, 256, torch.bfloat16)
    weights = [weight.float().requires_grad_() for weight in (weight_hidden, weight_embed)]
    leaves = [tensor.requires_grad_() for tensor in (x, k, v)]
    reference = engram.engram_gate_ref(*leaves, *weights, CLAMP, EPS, True)
    output, *saved = reference
    grad = torch.randn_like(output)
    output.backward(grad)
    fused = engram.fused_weight(weight_hidden, weight_embed)
    *found, partial = engram.engram_gate_bwd(grad, *leaves, fused, *saved, CLAMP, 12)
    for part, leaf in zip(found, leaves):
        assert part.dtype == torch.bfloat16
        assert calc_diff(part, leaf.grad) < 1e-8
    of_weights = torch.zeros(2, 4, 256)
    engram.grad_w_reduce(partial, weight_hidden, weight_embed, *of_weights)
    for part, weight in zip(of_weights, weights):
        assert calc_diff(part, weight.grad) < 1e-8


def test_zero_dot_has_half_a_gate_and_no_slope() -> None:
    x = torch.tensor([[[1.0, 0.0]], [[-1.0, 0.0]]])
    k = torch.tensor([[[0.0, 1.0]], [[0.0, 1.0]]])
    v, fused = torch.ones(2, 2), torch.tensor([[1.0, -1.0]])
    for clamp in (0.0, 1e-6):
        output, *saved = engram.engram_gate_fwd(x, k, v, fused, EPS, clamp)
        assert saved[0].tolist() == [[0.0], [0.0]]
        assert saved[1].tolist() == [[0.5], [0.5]]
        assert_equal(output, x + 0.5)
        grads = engram.engram_gate_bwd(torch.ones_like(x), x, k, v, fused, *saved, clamp, 1)
        assert_equal(grads[0], torch.ones_like(x))
        assert not grads[1].any()
        assert not grads[3].any()


def test_clamp_is_strict() -> None:
    """At `|s|` equal to the clamp value the gradient passes, below it does not."""
    x = torch.ones(1, 1, 1)
    v, fused = torch.ones(1, 1), torch.full((1, 1), 0.25)
    for clamp, passes in ((0.25, True), (0.2500001, False)):
        saved = engram.engram_gate_fwd(x, x, v, fused, 0.0, clamp)[1:]
        partial = engram.engram_gate_bwd(x, x, x, v, fused, *saved, clamp, 1)[3]
        assert bool(partial.any()) == passes


def test_nan_and_infinity_stay_in_their_stream() -> None:
    x, k, v, weight_hidden, weight_embed = inputs(4, 2, 8, torch.bfloat16)
    fused = engram.fused_weight(weight_hidden, weight_embed)
    clean = engram.engram_gate_fwd(x, k, v, fused, EPS, CLAMP)[0]
    x[0, 1, 3], k[1, 0, 2], x[2, 0, 0] = NAN, NAN, INF
    output, *saved = engram.engram_gate_fwd(x, k, v, fused, EPS, CLAMP)
    gate = saved[1]
    spoilt = torch.zeros(4, 2, dtype=torch.bool)
    spoilt[0, 1] = spoilt[1, 0] = spoilt[2, 0] = True
    assert torch.equal(gate.isnan(), spoilt)
    assert torch.equal(output.isnan().all(-1), spoilt)
    assert_equal(output[~spoilt], clean[~spoilt])
    grad_x = engram.engram_gate_bwd(torch.ones_like(x), x, k, v, fused, *saved, CLAMP, 1)[0]
    assert torch.equal(grad_x.isnan().any(-1), spoilt)


def test_zero_rows_need_eps() -> None:
    x, v, fused = torch.zeros(1, 1, 4), torch.ones(1, 4), torch.ones(1, 4)
    assert engram.engram_gate_fwd(x, x, v, fused, 0.0, CLAMP)[0].isnan().all()
    assert engram.engram_gate_fwd(x, x, v, fused, EPS, CLAMP)[0].tolist() == [[[0.5] * 4]]


def test_reference_takes_any_leading_dimensions() -> None:
    x, k, v, weight_hidden, weight_embed = inputs(6, 2, 8, torch.bfloat16)
    flat = engram.engram_gate_ref(x, k, v, weight_hidden, weight_embed, CLAMP, EPS)
    found = engram.engram_gate_ref(
        x.view(2, 3, 2, 8), k.view(2, 3, 2, 8), v.view(2, 3, 8), weight_hidden, weight_embed,
        CLAMP, EPS,
    )  # fmt: skip
    assert_equal(found.view(6, 2, 8), flat)


def test_no_tokens() -> None:
    x, k, v, weight_hidden, weight_embed = inputs(0, 4, 8, torch.bfloat16)
    fused = engram.fused_weight(weight_hidden, weight_embed)
    output, *saved = engram.engram_gate_fwd(x, k, v, fused, EPS, CLAMP)
    assert output.shape == (0, 4, 8)
    assert all(part.shape == (0, 4) for part in saved)
    grad_x, grad_k, grad_v, partial = engram.engram_gate_bwd(
        output, x, k, v, fused, *saved, CLAMP, 5
    )
    assert grad_x.shape == grad_k.shape == (0, 4, 8)
    assert grad_v.shape == (0, 8)
    assert_equal(partial, torch.zeros(5, 4, 8))
    sizes = int32([[[3, 4], [5, 6]]])
    found = engram.engram_hash(
        torch.empty(0, 3, dtype=INT32), torch.tensor([[1, 2, 3]]), sizes, engram.make_offsets(sizes)
    )
    assert_equal(found, torch.empty(1, 0, 4, dtype=INT32))
