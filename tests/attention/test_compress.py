"""Compressed keys and values: gradients, sequences, how blocks cover windows."""

from __future__ import annotations

import itertools

import pytest
import torch

import tile_kernels
from tests.attention.helpers import LENGTHS, arguments, each_ground
from tile_kernels import attention
from tile_kernels import torch as references
from tile_kernels.attention import windows
from tile_kernels.attention.compress.cases import (
    KV_COMPRESS,
    KV_COMPRESS_BWD,
    bounds,
    column,
    example,
)
from tile_kernels.runtime.device import DESCRIBED

NAMES = ("kv_a", "z_a", "bias_a", "kv_b", "z_b", "bias_b")


# ---- gradients ----------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("lengths", [None, LENGTHS])
def test_gradcheck_of_the_reference(overlap: bool, lengths: tuple[int, ...] | None) -> None:
    given = arguments(36, 2, 3, overlap=overlap, dtype=torch.float32, lengths=lengths)
    cu_seqlens = given.pop("cu_seqlens", None)
    inputs = [x.double().requires_grad_() for x in given.values()]

    def compress(*inputs: torch.Tensor) -> torch.Tensor:
        return references.kv_compress(*inputs, cu_seqlens=cu_seqlens)

    assert torch.autograd.gradcheck(compress, inputs)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("num_windows", [None, 5, 12])
def test_backward_formula_is_the_references_gradient(
    overlap: bool, num_windows: int | None
) -> None:
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


def test_bounds() -> None:
    assert bounds((2, 0, 3), "cpu").tolist() == [0, 2, 2, 5]
