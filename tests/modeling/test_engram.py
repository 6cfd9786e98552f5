"""The Engram layer and its parts against plain autograd and plain loops."""

from __future__ import annotations

import copy
import math
import pickle
import re
import runpy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import tile_kernels
from tests.requirements import GROUNDS
from tile_kernels.modeling.engram import (
    CausalConvolution,
    EngramGateFn,
    EngramHasher,
    EngramModule,
    EngramTable,
    compression_map,
    engram_gate,
    odd_multipliers,
    prime_table_sizes,
)
from tile_kernels.modeling.engram.hashing import normalized_text
from tile_kernels.testing.numeric import assert_equal, calc_diff
from tile_kernels.torch.engram import engram_gate_ref, engram_hash, ngram_windows

CLAMP, EPS = 1e-6, 1e-6
pytestmark = [
    pytest.mark.usefixtures("plain_matrix_products"),
    pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN"),
]


# ---- the gate ----------------------------------------------------------------------------------


def gate_inputs(*lead: int, device: str = "cpu", hc: int = 4, hidden: int = 64) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(*lead, hc, hidden), (*lead, hc, hidden), (*lead, hidden), (hc, hidden), (hc, hidden)]
    return [torch.randn(shape, device=device).bfloat16() for shape in shapes]


def trained(inputs: list[Tensor]) -> list[Tensor]:
    return [tensor.detach().clone().requires_grad_() for tensor in inputs]


def plain_gradients(inputs: list[Tensor], grad: Tensor, add_residual: bool) -> list[Tensor]:
    """Of the reference by autograd, weights in float32."""
    leaves = [tensor.detach().float().requires_grad_() for tensor in inputs]
    out = engram_gate_ref(*leaves, CLAMP, EPS)
    assert isinstance(out, Tensor)
    out = out if add_residual else out - leaves[0]
    return list(torch.autograd.grad(out, leaves, grad.float()))


@pytest.mark.parametrize("ground", GROUNDS)
@pytest.mark.parametrize("add_residual", [True, False])
def test_gate_is_close_to_plain_autograd(ground: tuple[str, str], add_residual: bool) -> None:
    backend, device = ground
    inputs = trained(gate_inputs(7, device=device))
    grad = torch.randn_like(inputs[0])
    with tile_kernels.backend(backend):
        out = engram_gate(*inputs, CLAMP, EPS, add_residual)
        out.backward(grad)
    assert out.dtype == torch.bfloat16
    expected = plain_gradients(inputs, grad, add_residual)
    for leaf, wanted in zip(inputs, expected):
        assert leaf.grad is not None
        assert leaf.grad.dtype == leaf.dtype == torch.bfloat16
        assert calc_diff(leaf.grad.float(), wanted) < 1e-5


@pytest.mark.parametrize("lead", [(), (6,), (2, 3), (1, 2, 3)])
def test_any_leading_dimensions(lead: tuple[int, ...]) -> None:
    inputs = trained(gate_inputs(*lead))
    out = engram_gate(*inputs, CLAMP, EPS)
    assert_equal(out, engram_gate_ref(*inputs, CLAMP, EPS))
    out.sum().backward()  # the gradient has strides of 0
    flat = [tensor.reshape(-1, *tensor.shape[len(lead) :]) for tensor in inputs[:3]]
    same = trained([*flat, *inputs[3:]])
    engram_gate(*same, CLAMP, EPS).sum().backward()
    for leaf, other in zip(inputs, same):
        assert_equal(leaf.grad.reshape(other.shape), other.grad)


def test_strided_inputs_and_gradients() -> None:
    x, k, v, *weights = gate_inputs(2, 3)
    both = torch.cat((k.flatten(-2), v), dim=-1).requires_grad_()
    key, value = both.split((4 * 64, 64), dim=-1)
    streams_first = x.movedim(-2, 0).contiguous().requires_grad_()
    out = engram_gate(
        streams_first.movedim(0, -2), key.unflatten(-1, (4, 64)), value, *weights, CLAMP, EPS
    )
    out.mT.contiguous().sum().backward()
    same = trained([x, k, v])
    engram_gate(*same, *weights, CLAMP, EPS).backward(torch.ones_like(x))
    assert_equal(streams_first.grad.movedim(0, -2).contiguous(), same[0].grad)
    assert_equal(both.grad, torch.cat((same[1].grad.flatten(-2), same[2].grad), dim=-1))


def test_only_what_needs_a_gradient_gets_one() -> None:
    inputs = gate_inputs(5)
    everything = trained(inputs)
    engram_gate(*everything, CLAMP, EPS).sum().backward()
    for place in range(5):
        some = [tensor.clone() for tensor in inputs]
        some[place].requires_grad_()
        some[3].main_grad = some[4].main_grad = torch.zeros(4, 64)
        if place >= 3:
            del some[place].main_grad
        engram_gate(*some, CLAMP, EPS).sum().backward()
        for index, tensor in enumerate(some):
            assert (tensor.grad is None) == (index != place)
            assert not getattr(tensor, "main_grad", torch.zeros(1)).any()  # frozen: not added to
        assert_equal(some[place].grad, everything[place].grad)
    assert engram_gate(*inputs, CLAMP, EPS).grad_fn is None
    with torch.no_grad():
        assert engram_gate(*everything, CLAMP, EPS).grad_fn is None


def test_apply_with_seven_arguments() -> None:
    """What the autograd function takes where it comes from: no residual flag, all positional."""
    inputs = trained(gate_inputs(5))
    out = EngramGateFn.apply(*inputs, CLAMP, EPS)
    assert_equal(out, engram_gate(*inputs, CLAMP, EPS))
    out.sum().backward()
    assert all(tensor.grad is not None for tensor in inputs)


def test_apply_checks_shapes() -> None:
    x, k, v, *weights = trained(gate_inputs(2, 3))
    with pytest.raises(ValueError, match=r"k must be \[2, 3, 4, 64\] for hidden_states of"):
        EngramGateFn.apply(x, k.transpose(0, 1), v, *weights, CLAMP, EPS)
    with pytest.raises(ValueError, match=r"v must be \[2, 3, 64\] for hidden_states of"):
        EngramGateFn.apply(x, k, v.flatten(0, 1), *weights, CLAMP, EPS)


@pytest.mark.parametrize("add_residual", [True, False])
def test_weights_of_float32(add_residual: bool) -> None:
    inputs = trained([*gate_inputs(5)[:3], *torch.randn(2, 4, 64)])
    inputs[4].main_grad = torch.zeros(4, 64)
    grad = torch.randn_like(inputs[0])
    engram_gate(*inputs, CLAMP, EPS, add_residual).backward(grad)
    expected = plain_gradients(inputs, grad, add_residual)
    assert inputs[3].grad.dtype == torch.float32
    assert inputs[4].grad is None
    for found, wanted in zip((inputs[3].grad, inputs[4].main_grad), expected[3:]):
        assert calc_diff(found, wanted) < 1e-9


def test_nan_in_the_value() -> None:
    """It spoils its column and what flows through gates that are not clamped."""
    x, k, v, *weights = gate_inputs(2)
    k[0, 1] = 0  # a gate below the clamp
    v[0, 5] = math.nan
    inputs = trained([x, k, v, *weights])
    out = engram_gate(*inputs, CLAMP, EPS)
    out.sum().backward()
    spoiled = torch.zeros(2, 4, 64, dtype=torch.bool)
    spoiled[0, :, 5] = True
    assert_equal(out.isnan(), spoiled)
    streams = torch.tensor([[True, False, True, True], [False] * 4])
    for leaf in inputs[:2]:
        assert_equal(leaf.grad.isnan(), streams[..., None].repeat(1, 1, 64))
    assert inputs[2].grad.isfinite().all()
    for leaf in inputs[3:]:
        assert_equal(leaf.grad.isnan(), streams[0, :, None].repeat(1, 64))


@pytest.mark.parametrize("which", [(3,), (4,), (3, 4)])
def test_main_grad_takes_the_gradient(which: tuple[int, ...]) -> None:
    plain, inputs = trained(gate_inputs(5)), trained(gate_inputs(5))
    grad = torch.randn_like(inputs[0])
    engram_gate(*plain, CLAMP, EPS).backward(grad)
    expected = plain_gradients(inputs, grad, True)
    out = engram_gate(*inputs, CLAMP, EPS)
    for place in which:  # looked up when the gradient is computed
        inputs[place].main_grad = torch.full((4, 64), 3.0)
    buffers = {place: inputs[place].main_grad for place in which}
    out.backward(grad)
    for place in (3, 4):
        if place in which:
            assert inputs[place].grad is None
            assert inputs[place].main_grad is buffers[place]
            assert calc_diff(buffers[place] - 3, expected[place]) < 1e-5
        else:
            assert_equal(inputs[place].grad, plain[place].grad)
    first = {place: buffer.clone() for place, buffer in buffers.items()}
    engram_gate(*inputs, CLAMP, EPS).backward(grad)
    for place, buffer in buffers.items():
        torch.testing.assert_close(buffer - first[place], first[place] - 3, rtol=1e-4, atol=1e-5)


def test_none_as_main_grad_is_no_main_grad() -> None:
    inputs = trained(gate_inputs(5))
    inputs[3].main_grad = inputs[4].main_grad = None
    engram_gate(*inputs, CLAMP, EPS).sum().backward()
    assert inputs[3].grad is not None
    assert inputs[4].grad is not None


def test_one_weight_for_both_norms() -> None:
    x, k, v, weight, _ = gate_inputs(5)
    grad = torch.randn_like(x)
    expected = plain_gradients([x, k, v, weight, weight], grad, True)
    shared = weight.clone().requires_grad_()
    shared.main_grad = torch.zeros(4, 64)
    engram_gate(x, k, v, shared, shared, CLAMP, EPS).backward(grad)
    assert shared.grad is None
    assert calc_diff(shared.main_grad, expected[3] + expected[4]) < 1e-5
    both = trained([weight, weight])
    both[0].main_grad = torch.zeros(4, 64)
    both[1].main_grad = both[0].main_grad[:]  # the same memory in another tensor
    engram_gate(x, k, v, *both, CLAMP, EPS).backward(grad)
    assert_equal(both[0].main_grad, shared.main_grad)


def test_main_grad_survives_hooks_on_saved_tensors() -> None:
    inputs = trained(gate_inputs(5))
    inputs[3].main_grad = torch.zeros(4, 64)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.detach().clone(), lambda x: x):
        out = engram_gate(*inputs, CLAMP, EPS)
    out.sum().backward()
    assert inputs[3].grad is None
    assert inputs[3].main_grad.any()


def test_gate_without_tokens() -> None:
    inputs = trained(gate_inputs(0))
    engram_gate(*inputs, CLAMP, EPS).sum().backward()
    assert inputs[0].grad.shape == (0, 4, 64)
    assert not inputs[3].grad.any()


def test_no_second_derivative() -> None:
    inputs = trained(gate_inputs(2))
    (grad,) = torch.autograd.grad(
        engram_gate(*inputs, CLAMP, EPS).sum(), inputs[:1], create_graph=True
    )
    with pytest.raises(RuntimeError, match="engram_gate: there is no second derivative"):
        grad.sum().backward()


def test_words_of_the_gate() -> None:
    x, k, v, *weights = gate_inputs(2, 3)
    with pytest.raises(ValueError, match=r"engram_gate: v must be \[2, 3, 64\] for hidden_states"):
        engram_gate(x, k, v[:1], *weights, CLAMP, EPS)
    with pytest.raises(ValueError, match=r"engram_gate: k must be \[2, 3, 4, 64\]"):
        engram_gate(x, k[0], v, *weights, CLAMP, EPS)
    with pytest.raises(ValueError, match=r"engram_gate: hidden_states must be \[\*, hc, H\]"):
        engram_gate(x[0, 0, 0], k, v, *weights, CLAMP, EPS)
    weight = weights[0].requires_grad_()
    for wrong, error, words in (
        (torch.zeros(4, 64).bfloat16(), ValueError, "must be packed float32 [4, 64], got torch.b"),
        (torch.zeros(64, 4).T, ValueError, "with strides (1, 4)"),
        ([0.0], TypeError, "main_grad of weight_hidden must be a tensor, got list"),
    ):
        weight.main_grad = wrong
        with pytest.raises(error, match=re.escape(words)):
            engram_gate(x, k, v, *weights, CLAMP, EPS).sum().backward()


@pytest.mark.parametrize("add_residual", [True, False])
def test_gate_compiles(add_residual: bool) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(engram_gate, fullgraph=True, backend="aot_eager")
    inputs, same = trained(gate_inputs(2, 3)), trained(gate_inputs(2, 3))
    out, expected = (
        function(*tensors, CLAMP, EPS, add_residual)
        for function, tensors in ((compiled, inputs), (engram_gate, same))
    )
    assert_equal(out, expected)
    for result in (out, expected):
        result.square().sum().backward()
    for leaf, other in zip(inputs, same):
        assert_equal(leaf.grad, other.grad)


def test_compiled_gate_does_not_forget_main_grad() -> None:
    inputs = trained(gate_inputs(2, 3))
    inputs[4].main_grad = torch.zeros(4, 64)
    torch._dynamo.reset()
    compiled = torch.compile(engram_gate, backend="aot_eager")
    compiled(*inputs, CLAMP, EPS).sum().backward()
    assert inputs[4].grad is None
    assert inputs[4].main_grad.any()
    torch._dynamo.reset()
    compiled = torch.compile(engram_gate, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="weight_embed has a main_grad"):
        compiled(*inputs, CLAMP, EPS)


# ---- vocabulary, sizes, multipliers, hashes ----------------------------------------------------


def test_normalized_text() -> None:
    for text, expected in {
        "Apple": "apple", " apple": "apple", "\uff21pple": "apple", "Café": "cafe", "①": "1",
        "a\n\tb": "a b", " ": " ", "\n\n": " ", "": "", "\u0301": "\u0301", "Ab\ufffd": "Ab\ufffd",
    }.items():  # fmt: skip
        assert normalized_text(text) == expected


def test_compression_map_shares_ids_of_equal_texts() -> None:
    tokens = ["<pad>", "Apple", " apple", "pear", "APPLE", "Pear ", "\ufffd", "\ufffdA"]
    found = compression_map(tokens)
    assert found.dtype == torch.int32
    assert found.tolist() == [0, 1, 1, 2, 1, 2, 3, 4]


def is_prime(number: int) -> bool:
    return number > 1 and all(number % d for d in range(2, math.isqrt(number) + 1))


@pytest.mark.parametrize("rows", [1, 90, [100, 110], 1_000_000])
def test_sizes_are_distinct_primes_and_none_is_left_out(rows: int | list[int]) -> None:
    sizes = prime_table_sizes(3, 3, 8, rows)
    assert sizes.shape == (3, 2, 8)
    assert sizes.dtype == torch.int32
    flat = sizes.flatten().tolist()
    least = min(rows) if isinstance(rows, list) else rows
    assert len(set(flat)) == len(flat)
    assert sorted(flat) == [n for n in range(least, max(flat) + 1) if is_prime(n)]
    for order, wanted in enumerate(rows if isinstance(rows, list) else [rows] * 2):
        assert sizes[:, order].min() >= wanted


def test_words_of_sizes() -> None:
    with pytest.raises(ValueError, match="table_rows must be one number or 2, one for each order"):
        prime_table_sizes(1, 3, 8, [1, 2, 3])
    with pytest.raises(ValueError, match="must leave primes below 2"):
        prime_table_sizes(1, 2, 1, 2**31)
    with pytest.raises(ValueError, match="vocab_size must be at least 1, got 0"):
        odd_multipliers(1, 3, 0, 0)
    with pytest.raises(ValueError, match=r"max_ngram_size must be in 2\.\.64, got 1"):
        EngramHasher(1, 10, 10, max_ngram_size=1)
    with pytest.raises(ValueError, match=r"layer must be in 0\.\.0, got 1"):
        EngramHasher(1, 10, 10).layer(1)


@pytest.mark.parametrize("vocab_size", [1, 2, 129280, 2**31 - 1])
def test_multipliers(vocab_size: int) -> None:
    found = odd_multipliers(64, 3, vocab_size, seed=5)
    assert found.dtype == torch.int64
    numbers = found.flatten().tolist()
    assert all(number % 2 == 1 and number > 0 for number in numbers)
    assert all(number * (vocab_size - 1) < 2**63 for number in numbers)
    assert len(set(numbers)) > 0.9 * len(numbers)
    assert max(numbers) > 0.9 * 2**63 / vocab_size  # all of the bits are used
    assert_equal(odd_multipliers(2, 3, vocab_size, seed=5), found[:2])  # whatever the layers
    assert not torch.equal(odd_multipliers(2, 3, vocab_size, seed=6), found[:2])


TOKENS = ["<pad>", "the", "The", "cat", "Cat", "dog", "runs", "RUNS", "and", "a", "A", "b"]


def hasher_for(layers: int = 2, **options: object) -> EngramHasher:
    arguments = {
        "vocab_size": 40, "table_rows": 50, "num_tables": 2, "pad_id": 0, **options,
    }  # fmt: skip
    return EngramHasher(layers, **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("compressed", [False, True])
def test_hasher_is_windows_and_hash(compressed: bool) -> None:
    token_map = compression_map(TOKENS) if compressed else None
    hasher = hasher_for(token_map=token_map, pad_id=0)
    ids = torch.randint(1, len(TOKENS), (2, 6))[:, :-1]
    cu_seqlens = torch.tensor([0, 3, 10])
    windows = ngram_windows(ids, 3, 0, cu_seqlens, token_map)
    expected = engram_hash(
        windows.flatten(0, 1), hasher.multipliers, hasher.vocab_sizes, hasher.offsets
    )
    found = hasher(ids, cu_seqlens)
    assert_equal(found, expected.view(2, 2, 5, 4))
    for layer in range(2):
        one = hasher.layer(layer)
        assert_equal(one(ids, cu_seqlens)[0], found[layer])
        first = one.offsets[0]
        assert (found[layer] >= first).all()
        assert (found[layer] < first + one.vocab_sizes.flatten()).all()
        assert one.rows_per_layer == [int(one.vocab_sizes.sum())]
    if compressed:
        assert_equal(hasher(torch.tensor([1, 3])), hasher(torch.tensor([2, 4])))  # The Cat


def test_pad_id_is_mapped_too() -> None:
    assert hasher_for(token_map=torch.tensor([7, 5, 5]), pad_id=1).pad_id == 5
    assert hasher_for(token_map=torch.tensor([7, 5, 5]), pad_id=-1).pad_id == -1
    assert hasher_for(pad_id=3).pad_id == 3


def test_tables_beyond_31_bits_have_wide_offsets() -> None:
    hasher = EngramHasher(2, 1000, [2**30, 2**29], num_tables=2)
    assert hasher.offsets.dtype == torch.int64
    assert hasher(torch.tensor([1, 2])).dtype == torch.int64
    assert hasher.offsets[0, -1] + hasher.vocab_sizes[0, -1, -1] == hasher.rows_per_layer[0]
    assert hasher.layer(1).offsets.dtype == torch.int64
    assert EngramHasher(1, 1000, 2**28, num_tables=3).offsets.dtype == torch.int32


def assert_equal_states(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert_equal(value, other[name])


def test_layers_share_no_memory_with_their_hasher() -> None:
    hasher = hasher_for(token_map=compression_map(TOKENS))
    before = copy.deepcopy(hasher.state_dict())
    one = hasher.layer(1)
    for buffer in one.buffers():
        buffer.zero_()
    assert_equal_states(hasher.state_dict(), before)


MAP = torch.tensor([7, 5, 5, 6, 0, 3], dtype=torch.int32)  # the pad token 1 becomes 5


def test_a_state_brings_its_pad_token() -> None:
    hasher = hasher_for(token_map=MAP, pad_id=1)
    other = hasher_for(token_map=torch.arange(6, dtype=torch.int32), pad_id=1, seed=3)
    ids = torch.tensor([0, 3, 1, 4, 5])
    assert other.pad_id == 1
    other.load_state_dict(hasher.state_dict())
    assert other.pad_id == 5
    assert_equal(other(ids), hasher(ids))
    assert all(isinstance(value, Tensor) for value in hasher.state_dict().values())


def test_a_state_brings_its_table_sizes() -> None:
    hasher, other = hasher_for(), hasher_for(table_rows=70)
    assert other.rows_per_layer != hasher.rows_per_layer
    other.load_state_dict(hasher.state_dict())
    assert other.rows_per_layer == hasher.rows_per_layer
    assert other.layer(1).rows_per_layer == hasher.rows_per_layer[1:]


def test_host_ids_need_no_buffers_on_the_device() -> None:
    """Buffers that cannot be read stand for those of a GPU, which would have to be waited for."""
    ids = torch.tensor([[0, 3, 1], [4, 5, 2]])
    hasher, other = (hasher_for(token_map=MAP, pad_id=1, seed=seed) for seed in (1, 2))
    expected = other(ids)
    assert not torch.equal(hasher(ids), expected)
    hasher.load_state_dict(other.state_dict())
    away = copy.deepcopy(hasher).to("meta")
    assert away.multipliers.is_meta
    assert_equal(away(ids), expected)
    assert_equal(pickle.loads(pickle.dumps(away)).layer(1)(ids)[0], expected[1])
    for name, buffer in list(hasher.named_buffers()):  # moved behind the back of the module
        setattr(hasher, name, buffer.to("meta"))
    assert_equal(hasher(ids), expected)


@pytest.mark.gpu
def test_host_ids_do_not_wait_for_the_device() -> None:
    source = hasher_for(token_map=MAP, pad_id=1, seed=1)
    hasher = hasher_for(token_map=MAP, pad_id=1, seed=2).cuda()
    hasher.load_state_dict(source.state_dict())
    module = module_for(hasher, host_resident=True, dtype=torch.bfloat16).cuda()
    ids, cu_seqlens = torch.randint(0, 6, (2, 9)), torch.tensor([0, 4, 18])
    x = torch.randn(2, 9, 4, 32, device="cuda").bfloat16()
    with torch.no_grad():
        expected = module(x, ids.cuda(), cu_seqlens=cu_seqlens.cuda())  # and kernels are compiled
        torch.cuda.set_sync_debug_mode("error")
        try:
            indices = hasher(ids)
            module.prefetch(ids, cu_seqlens=cu_seqlens)
            found = module(x, ids, cu_seqlens=cu_seqlens)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert_equal(found, expected)
    assert_equal(indices, source(ids))


def test_reset_gives_the_hasher_its_constants_back() -> None:
    expected = hasher_for(token_map=MAP, pad_id=1, seed=4)
    hasher = copy.deepcopy(expected)
    hasher.load_state_dict(hasher_for(token_map=MAP.flip(0), pad_id=1).state_dict())
    assert hasher.pad_id == 0
    hasher.reset_parameters()
    assert_equal_states(hasher.state_dict(), expected.state_dict())


# ---- the table ---------------------------------------------------------------------------------


def gradient_of(table: EngramTable, indices: Tensor, grad: Tensor) -> Tensor:
    table.weight.grad = None
    table(indices).backward(grad)
    assert table.weight.grad is not None
    return table.weight.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tables_of_all_kinds_agree(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    indices = torch.randint(30, (2, 5, 3), dtype=torch.int32)
    grad = torch.randn(2, 5, 12).to(dtype)
    plain = EngramTable(30, 4, dtype=dtype)
    expected = plain(indices)
    assert_equal(expected.detach(), plain.weight.detach()[indices.long()].flatten(-2))
    wanted = gradient_of(plain, indices, grad)
    for sparse in (False, True):
        for host_resident in (False, True):
            table = EngramTable(30, 4, sparse, host_resident, dtype=dtype)
            table.load_state_dict(plain.state_dict())
            assert_equal(table(indices), expected)
            found = gradient_of(table, indices, grad)
            assert found.is_sparse == sparse
            dense = found.coalesce().to_dense() if sparse else found
            torch.testing.assert_close(dense, wanted, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("host_resident", [False, True], ids=["", "host"])
def test_masked_rows_are_zeros_without_a_gradient(sparse: bool, host_resident: bool) -> None:
    """Also in sparse gradients, whose rows optimizers update whatever their values are."""
    table = EngramTable(30, 4, sparse, host_resident)
    indices = torch.tensor([[7, 3], [-1, -1], [3, 21]])
    found = table(indices, masked=True)
    assert not found[1].any()
    assert torch.equal(found[[0, 2]], table(indices[[0, 2]]))
    found.sum().backward()
    grad = table.weight.grad
    assert grad is not None
    if sparse:
        assert grad.coalesce().indices()[0].tolist() == [3, 7, 21]
    dense = grad.to_dense()
    assert dense[[3, 7, 21], 0].tolist() == [2.0, 1.0, 1.0]
    assert dense.sum() == 16
    assert not table(torch.full((2, 3), -1), masked=True).any()
    assert table(indices[:0], masked=True).shape == (0, 8)


def test_prefetched_rows_serve_once_and_only_their_ids() -> None:
    table = EngramTable(30, 4, host_resident=True)
    indices, others = torch.tensor([[1, 2]]), torch.tensor([[1, 2]])
    device = torch.device("cpu")

    def marked() -> None:
        """Prefetched rows that can be told from those of the table."""
        table.prefetch(indices, device)
        assert table._fetched is not None
        table._fetched.rows.fill_(7)

    expected = table.weight.detach()[[1, 2]].view(1, 8)
    marked()
    assert (table(indices) == 7).all()
    assert_equal(table(indices).detach(), expected)
    marked()
    assert_equal(table(others).detach(), expected)  # other ids: not used, and gone
    assert_equal(table(indices).detach(), expected)
    marked()
    indices[0, 0] = 3  # written since
    assert_equal(table(indices).detach(), table.weight.detach()[[3, 2]].view(1, 8))
    marked()
    with torch.no_grad():
        table.weight.mul_(2)  # an optimizer's step
    assert_equal(table(indices).detach(), table.weight.detach()[[3, 2]].view(1, 8))


def test_prefetched_rows_are_not_used_where_writes_do_not_count() -> None:
    table, device = EngramTable(30, 4, host_resident=True), torch.device("cpu")
    with torch.inference_mode():
        indices = torch.tensor([[1, 2]])
        table.prefetch(indices, device)
        table._fetched.rows.fill_(7)
        assert (table(indices) == 7).all()
        table.prefetch(indices, device)
        indices[0, 0] = 3
        assert_equal(table(indices), table.weight[[3, 2]].view(1, 8))
        table.prefetch(indices, device)
        table.weight.mul_(2)  # counted, since the table was not made in inference mode
        assert_equal(table(indices), table.weight[[3, 2]].view(1, 8))
        other = EngramTable(30, 4, host_resident=True)
        other.prefetch(indices, device)
        other.weight.mul_(2)
        assert_equal(other(indices), other.weight[[3, 2]].view(1, 8))


def test_rows_prefetched_from_another_weight_are_not_used() -> None:
    table, other = (EngramTable(30, 4, host_resident=True) for _ in range(2))
    indices = torch.tensor([[1, 2]])
    table.prefetch(indices, torch.device("cpu"))
    table.load_state_dict(other.state_dict(), assign=True)
    assert_equal(table(indices), other(indices))


def test_prefetched_rows_can_be_discarded() -> None:
    module = module_for(hasher_for(), host_resident=True)
    ids, x = torch.randint(1, 40, (9,)), torch.randn(9, 4, 32)
    module.prefetch(ids)
    module.table.weight.data.mul_(2)  # not counted
    module.discard_prefetched()
    assert_equal(module(x, ids), module(x, ids.clone()))


def test_prefetched_rows_have_a_gradient() -> None:
    table = EngramTable(30, 4, host_resident=True)
    indices = torch.tensor([[1, 2]])
    with torch.no_grad():
        table.prefetch(indices, torch.device("cpu"))
    assert table._fetched is not None
    table(indices).sum().backward()
    assert table.weight.grad is not None
    assert table.weight.grad.sum() == 8


def test_host_tables_do_not_move() -> None:
    table = EngramTable(30, 4, host_resident=True)
    weight = table.weight
    table.to("cpu")
    assert table.weight is weight
    table.to(torch.bfloat16)
    assert table.weight.dtype == torch.bfloat16
    assert_equal(table.weight.detach(), weight.detach().bfloat16())
    empty = EngramTable(30, 4, host_resident=True, device="meta")
    assert empty.weight.is_meta
    with torch.device("meta"):
        assert EngramTable(30, 4, host_resident=True).weight.is_meta
    empty.to_empty(device="cpu")
    assert empty.weight.device.type == "cpu"


@pytest.mark.gpu
def test_host_tables_stay_when_the_module_goes() -> None:
    hasher = hasher_for()
    on_host = module_for(hasher, host_resident=True, dtype=torch.bfloat16).cuda()
    on_device = module_for(hasher, dtype=torch.bfloat16).cuda()
    on_device.load_state_dict(on_host.state_dict())
    assert on_host.table.weight.device.type == "cpu"
    assert on_host.projection.weight.is_cuda
    ids = torch.randint(1, 40, (2, 9))
    x = torch.randn(2, 9, 4, 32, device="cuda").bfloat16()
    expected = on_device(x, ids.cuda())
    for given in (ids, ids.cuda()):
        on_host.prefetch(given)
        assert_equal(on_host(x, given), expected)
        assert_equal(on_host(x, given), expected)
    for module in (on_host, on_device):
        module.zero_grad()
        module(x, ids.to(module.table.weight.device)).float().sum().backward()
    found, wanted = on_host.table.weight.grad, on_device.table.weight.grad
    torch.testing.assert_close(found, wanted.cpu(), rtol=2e-2, atol=1e-2)


# ---- the convolution ---------------------------------------------------------------------------


def shaken(module: nn.Module, seed: int = 0) -> None:
    """Random values for all parameters, so that none hides as a one or a zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * 0.5)


@pytest.mark.parametrize(("kernel_size", "dilation"), [(4, 3), (1, 2), (3, 1)])
def test_convolution_is_that_of_pytorch(kernel_size: int, dilation: int) -> None:
    convolution = CausalConvolution(2, 8, kernel_size, dilation, EPS)
    shaken(convolution)
    y = torch.randn(3, 7, 2, 8)
    normed = nn.functional.rms_norm(y, (8,), eps=EPS) * convolution.norm_weight
    channels = nn.functional.pad(normed.flatten(-2).mT, ((kernel_size - 1) * dilation, 0))
    taps = convolution.taps.flatten(1).T[:, None].flip(-1)
    expected = nn.functional.silu(
        nn.functional.conv1d(channels, taps, dilation=dilation, groups=16)
    )
    torch.testing.assert_close(convolution(y), expected.mT.unflatten(-1, (2, 8)))
    torch.testing.assert_close(convolution(y[0]), convolution(y)[0])


def test_convolution_stays_in_its_document() -> None:
    convolution = CausalConvolution(2, 8, dilation=2)
    shaken(convolution)
    y = torch.randn(2, 6, 2, 8)
    found = convolution(y, torch.tensor([0, 2, 9, 12]))
    parts = [y[0, :2], y[0, 2:], y[1, :3], y[1, 3:]]
    expected = torch.cat([convolution(part) for part in parts]).view_as(y)
    torch.testing.assert_close(found, expected)


# ---- the module --------------------------------------------------------------------------------


def module_for(hasher: EngramHasher, layer: int = 0, **options: object) -> EngramModule:
    arguments = {"hidden_size": 32, "num_streams": 4, "embed_dim": 8, **options}
    module = EngramModule(hasher, layer, **arguments)  # type: ignore[arg-type]
    shaken(module)
    return module


def plain_module(
    p: dict[str, Tensor], hasher: EngramHasher, x: Tensor, ids: list[list[int]], starts: list[int]
) -> Tensor:
    """The layer from its description, token after token, on the parameters `p`."""
    num_tables = hasher.vocab_sizes.shape[2]
    hidden = x.shape[-1]
    out = []
    place = 0
    for row, texts in enumerate(ids):
        gated: list[Tensor] = []
        begins: list[int] = []
        for t, token in enumerate(texts):
            begins.append(t if t == 0 or place in starts else begins[-1])
            place += 1
            hashed = token * int(hasher.multipliers[0, 0])
            found = []
            ended = token == hasher.pad_id
            for order in range(1, hasher.max_ngram_size):
                ended = ended or t - order < begins[-1] or texts[t - order] == hasher.pad_id
                other = hasher.pad_id if ended else texts[t - order]
                hashed ^= other * int(hasher.multipliers[0, order])
                for table in range(num_tables):
                    column = (order - 1) * num_tables + table
                    size = int(hasher.vocab_sizes[0, order - 1, table])
                    found.append(p["table.weight"][hashed % size + int(hasher.offsets[0, column])])
            projected = p["projection.weight"] @ torch.cat(found)
            k, v = projected[:-hidden].view(-1, hidden), projected[-hidden:]
            x_normed = nn.functional.rms_norm(x[row, t], (hidden,), eps=EPS) * p["weight_hidden"]
            k_normed = nn.functional.rms_norm(k, (hidden,), eps=EPS) * p["weight_embed"]
            score = (x_normed * k_normed).sum(-1, keepdim=True) / hidden**0.5
            gate = torch.sigmoid(score.abs().clamp(min=CLAMP).sqrt() * score.sign())
            gated.append(gate * v)
        for t, y in enumerate(gated):
            total = torch.zeros_like(y)
            for tap, weight in enumerate(p["convolution.taps"]):
                earlier = t - tap * hasher.max_ngram_size
                if earlier >= begins[t]:
                    normed = nn.functional.rms_norm(gated[earlier], (hidden,), eps=EPS)
                    total = total + weight * normed * p["convolution.norm_weight"]
            out.append(x[row, t] + y + nn.functional.silu(total))
    return torch.stack(out).view_as(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("documents", [False, True])
def test_module_is_its_description(dtype: torch.dtype, documents: bool) -> None:
    torch.manual_seed(1)
    hasher = hasher_for()
    module = module_for(hasher, layer=1, dtype=dtype)
    ids = torch.randint(0, 40, (2, 12))
    ids[0, 5] = hasher.pad_id
    cu_seqlens = torch.tensor([0, 7, 20, 24]) if documents else None
    x = torch.randn(2, 12, 4, 32).to(dtype).requires_grad_()
    grad = torch.randn(2, 12, 4, 32).to(dtype)
    out = module(x, ids, cu_seqlens=cu_seqlens)
    assert out.dtype == dtype
    out.backward(grad)

    p = {name: leaf.detach().double().requires_grad_() for name, leaf in module.named_parameters()}
    same = x.detach().double().requires_grad_()
    starts = [] if cu_seqlens is None else cu_seqlens.tolist()
    expected = plain_module(p, hasher.layer(1), same, ids.tolist(), starts)
    expected.backward(grad.double())
    assert calc_diff(out.detach(), expected.detach()) < 1e-5
    # The slope of the gate grows without bound towards 0, and with it what rounding does there:
    # streams and keys are rounded to bfloat16, also where parameters are float32.
    bound = 1e-4 if dtype == torch.bfloat16 else 2e-3
    assert calc_diff(x.grad, same.grad) < bound
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None
        assert calc_diff(parameter.grad, p[name].grad) < bound, name


@pytest.mark.parametrize("ground", GROUNDS)
def test_module_on_all_grounds(ground: tuple[str, str]) -> None:
    backend, device = ground
    torch.manual_seed(2)
    plain = module_for(hasher_for(), dtype=torch.bfloat16)
    ids, x = torch.randint(0, 40, (2, 5)), torch.randn(2, 5, 4, 32).bfloat16()
    cu_seqlens = torch.tensor([0, 3, 10])
    expected = plain(x, ids, cu_seqlens=cu_seqlens)
    expected.sum().backward()
    module = copy.deepcopy(plain).to(device)
    module.zero_grad()
    with tile_kernels.backend(backend):
        out = module(x.to(device), ids.to(device), cu_seqlens=cu_seqlens.to(device))
        out.sum().backward()
    assert calc_diff(out.detach().cpu(), expected.detach()) < 1e-5
    for parameter, other in zip(module.parameters(), plain.parameters()):
        assert calc_diff(parameter.grad.cpu(), other.grad) < 1e-4


def test_one_text_is_a_row() -> None:
    module = module_for(hasher_for())
    ids, x = torch.randint(1, 40, (9,)), torch.randn(9, 4, 32)
    torch.testing.assert_close(module(x, ids), module(x[None], ids[None])[0])


def test_layers_share_one_hash() -> None:
    hasher = hasher_for(3)
    ids, x = torch.randint(1, 40, (2, 9)), torch.randn(2, 9, 4, 32)
    indices = hasher(ids)
    outputs = []
    for layer in range(3):
        module = module_for(hasher, layer)
        outputs.append(module(x, ids))
        assert_equal(module(x, indices=indices[layer]), outputs[-1])
    assert not torch.equal(outputs[0], outputs[1])


def test_no_token_changes_the_past() -> None:
    module = module_for(hasher_for())
    ids, x = torch.randint(1, 40, (1, 20)), torch.randn(1, 20, 4, 32)
    out = module(x, ids)
    for t in range(20):
        other_ids, other_x = ids.clone(), x.clone()
        other_ids[0, t] = other_ids[0, t] % 39 + 1
        other_x[0, t] += 1
        changed = (module(other_x, other_ids) != out).flatten(2).any(-1)[0]
        assert not changed[:t].any()
        assert changed[t]
    # windows of 3, then taps at 3, 6 and 9 tokens behind them
    assert not changed_by(module, x, ids, 2)[14:].any()
    assert changed_by(module, x, ids, 2)[13]


def changed_by(module: EngramModule, x: Tensor, ids: Tensor, t: int) -> Tensor:
    """Which tokens of one row differ if the id of token `t` does."""
    others = ids.clone()
    others[0, t] = others[0, t] % 39 + 1
    return (module(x, others) != module(x, ids)).flatten(2).any(-1)[0]


def test_documents_do_not_see_each_other() -> None:
    module = module_for(hasher_for())
    ids, x = torch.randint(1, 40, (2, 10)), torch.randn(2, 10, 4, 32)
    cu_seqlens = torch.tensor([0, 4, 13, 20], dtype=torch.int32)
    found = module(x, ids, cu_seqlens=cu_seqlens)
    parts = [(0, 0, 4), (0, 4, 10), (1, 0, 3), (1, 3, 10)]
    alone = [module(x[row, a:b], ids[row, a:b]) for row, a, b in parts]
    torch.testing.assert_close(found.flatten(0, 1), torch.cat(alone))


@pytest.mark.parametrize("sparse", [False, True])
def test_host_table_gives_the_same(sparse: bool) -> None:
    hasher = hasher_for()
    on_device = module_for(hasher)
    on_host = module_for(hasher, sparse=sparse, host_resident=True)
    ids, x = torch.randint(1, 40, (2, 9)), torch.randn(2, 9, 4, 32)
    expected = on_device(x, ids)
    expected.sum().backward()
    indices = hasher(ids)[0]
    for given in ({"token_ids": ids}, {"indices": indices}):
        on_host.prefetch(**given)
        assert on_host.table._fetched is not None
        on_host.zero_grad()
        out = on_host(x, **given)
        assert on_host.table._fetched is None
        assert_equal(out, expected)
        out.sum().backward()
        grad = on_host.table.weight.grad
        assert grad.is_sparse == sparse
        dense = grad.coalesce().to_dense() if sparse else grad
        torch.testing.assert_close(dense, on_device.table.weight.grad)
    on_device.prefetch(ids)
    assert on_device.table._fetched is None


def test_rows_prefetched_for_other_documents_are_not_used() -> None:
    module = module_for(hasher_for(), host_resident=True)
    ids, x = torch.randint(1, 40, (9,)), torch.randn(9, 4, 32)
    starts, others = torch.tensor([0, 4]), torch.tensor([0, 5])
    expected = module(x, ids, cu_seqlens=others)
    for given in (None, starts):
        module.prefetch(ids, cu_seqlens=given)
        assert_equal(module(x, ids, cu_seqlens=others), expected)
    module.prefetch(ids, cu_seqlens=others)
    module.table._fetched.rows.zero_()
    assert not torch.equal(module(x, ids, cu_seqlens=others), expected)


def test_prefetch_in_inference_mode() -> None:
    module = module_for(hasher_for(), host_resident=True)
    with torch.inference_mode():
        ids, x = torch.randint(1, 40, (9,)), torch.randn(9, 4, 32)
        expected = module(x, ids)
        module.prefetch(ids)
        assert_equal(module(x, ids), expected)


def test_state_goes_round() -> None:
    token_map = compression_map(TOKENS)
    ids, x = torch.randint(1, len(TOKENS), (2, 9)), torch.randn(2, 9, 4, 32)
    module = module_for(hasher_for(token_map=token_map, pad_id=3, seed=1))
    other = module_for(hasher_for(token_map=torch.zeros_like(token_map), seed=2))
    assert module.hasher.pad_id == 2
    names = {"hasher." + name for name in ("multipliers", "vocab_sizes", "offsets", "token_map")}
    assert names <= set(module.state_dict())
    assert not torch.equal(other(x, ids), module(x, ids))
    other.load_state_dict(module.state_dict())
    assert_equal(other(x, ids), module(x, ids))
    for clone in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert_equal(clone(x, ids), module(x, ids))


def test_meta_module_takes_a_state() -> None:
    hasher = hasher_for()
    module = module_for(hasher)
    with torch.device("meta"):
        empty = EngramModule(hasher_for(), 0, 32, embed_dim=8)
    assert empty.table.weight.is_meta
    empty.to_empty(device="cpu").load_state_dict(module.state_dict())
    ids, x = torch.randint(1, 40, (2, 9)), torch.randn(2, 9, 4, 32)
    assert_equal(empty(x, ids), module(x, ids))


@pytest.mark.parametrize("host_resident", [False, True])
def test_meta_module_can_be_initialised(host_resident: bool) -> None:
    def made() -> EngramModule:
        hasher = hasher_for(token_map=MAP, pad_id=1, seed=5)
        return EngramModule(hasher, 1, 32, embed_dim=8, host_resident=host_resident)

    plain = made()
    with torch.device("meta"):
        module = made()
    assert module.hasher.multipliers.is_meta
    module.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.fill_(99)  # what memory happens to hold
    for part in module.modules():
        part.reset_parameters()  # type: ignore[operator]
    assert_equal_states(module.hasher.state_dict(), plain.hasher.state_dict())
    assert module.hasher.rows_per_layer == plain.hasher.rows_per_layer
    for name in ("weight_hidden", "weight_embed", "convolution.norm_weight", "convolution.taps"):
        assert_equal(module.get_parameter(name), plain.get_parameter(name))
    assert 0.01 < module.table.weight.std() < 0.03
    assert module.projection.weight.abs().max() < 1


def test_a_new_convolution_adds_nothing() -> None:
    module = EngramModule(hasher_for(), 0, 32, embed_dim=8)
    ids, x = torch.randint(1, 40, (2, 9)), torch.randn(2, 9, 4, 32)
    k, v = module.project(module.table(module.hasher(ids)[0]))
    gated = engram_gate_ref(
        x.bfloat16(), k, v.bfloat16(), module.weight_hidden, module.weight_embed, CLAMP, EPS
    )
    torch.testing.assert_close(module(x, ids), gated.float(), rtol=2e-2, atol=2e-2)
    assert not module.convolution(x).any()


@pytest.mark.parametrize("documents", [False, True])
def test_module_compiles(documents: bool) -> None:
    module = module_for(hasher_for())
    ids, x = torch.randint(1, 40, (2, 9)), torch.randn(2, 9, 4, 32)
    cu_seqlens = torch.tensor([0, 4, 18]) if documents else None
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    expected = module(x, ids, cu_seqlens=cu_seqlens)
    expected.square().sum().backward()
    grads = {name: parameter.grad for name, parameter in module.named_parameters()}
    module.zero_grad()
    out = compiled(x, ids, cu_seqlens=cu_seqlens)
    assert_equal(out, expected)
    out.square().sum().backward()
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(parameter.grad, grads[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_main_grad_in_the_module(dtype: torch.dtype) -> None:
    module = module_for(hasher_for(), dtype=dtype)
    for weight in (module.weight_hidden, module.weight_embed):
        weight.main_grad = torch.zeros(4, 32)  # type: ignore[attr-defined]
    ids, x = torch.randint(1, 40, (2, 9)), torch.randn(2, 9, 4, 32).to(dtype)
    module(x, ids).float().square().sum().backward()
    assert module.weight_hidden.grad is None
    assert module.weight_hidden.main_grad.any()  # type: ignore[attr-defined]
    assert module.projection.weight.grad is not None


def test_small_steps_of_the_norms_count() -> None:
    torch.manual_seed(0)
    module = module_for(hasher_for())
    module.reset_parameters()
    ids, x = torch.randint(1, 40, (2, 9)), torch.randn(2, 9, 4, 32)
    before = module(x, ids)
    with torch.no_grad():
        module.weight_hidden += 2**-10  # a quarter of what bfloat16 can tell from one
    assert not torch.equal(module(x, ids), before)


def test_norms_of_other_dtypes() -> None:
    module = module_for(hasher_for())
    ids, x = torch.randint(1, 40, (2, 9)), torch.randn(2, 9, 4, 32)
    expected = module(x, ids)
    module.weight_hidden.data = module.weight_hidden.data.double()
    assert_equal(module(x, ids), expected)


def test_the_sum_has_the_precision_of_the_streams() -> None:
    module = module_for(hasher_for())
    ids, x = torch.randint(1, 40, (2, 9)), torch.randn(2, 9, 4, 32)
    k, v = (part.bfloat16() for part in module.project(module.table(module.hasher(ids)[0])))
    weights = module.weight_hidden, module.weight_embed
    y = engram_gate(x.bfloat16(), k, v, *weights, CLAMP, EPS, add_residual=False)
    assert_equal(module(x, ids), x + (y.float() + module.convolution(y).float()))
    assert module(x.half(), ids).dtype == torch.float16


def test_words_of_the_module() -> None:
    module = module_for(hasher_for())
    ids, x = torch.randint(1, 40, (2, 9)), torch.randn(2, 9, 4, 32)
    with pytest.raises(ValueError, match="EngramModule: give token_ids or indices, and not both"):
        module(x)
    with pytest.raises(ValueError, match="and not both"):
        module(x, ids, module.hasher(ids)[0])
    with pytest.raises(ValueError, match=r"token_ids must be \[2, 9\] for hidden_states of"):
        module(x, ids[0])
    with pytest.raises(ValueError, match=r"indices must be \[2, 9, 4\] for hidden_states of"):
        module(x, indices=ids)
    with pytest.raises(ValueError, match=r"hidden_states must be \[B, S, 4, 32\] or \[S, 4, 32\]"):
        module(x.flatten(-2), ids)
    text = repr(module)
    for part in ("hidden=32, streams=4", "rows=", "tables=4", "kernel_size=4, dilation=3"):
        assert part in text


@pytest.mark.parametrize("host_resident", [False, True])
def test_no_tokens(host_resident: bool) -> None:
    module = module_for(hasher_for(), host_resident=host_resident)
    out = module(torch.randn(2, 0, 4, 32), torch.empty(2, 0, dtype=torch.int64))
    assert out.shape == (2, 0, 4, 32)


# ---- the example -------------------------------------------------------------------------------


@pytest.mark.usefixtures("one_thread")
def test_the_example_learns() -> None:
    """What follows two tokens, and not because one would do."""
    path = Path(__file__).parents[2] / "examples" / "engram_lm.py"
    train = runpy.run_path(str(path))["train"]
    without, engram = train(steps=40, memory=False), train(steps=40)
    assert engram[-1] < 0.3 * engram[0]
    assert without[-1] > 0.9 * without[0]
