"""Fused and single operators give the same bits; the projection to the precision it promises."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tile_kernels
from tile_kernels import mhc
from tile_kernels.mhc.norm_fn import plan as plans
from tile_kernels.mhc.norm_fn import reference
from tile_kernels.mhc.norm_fn.plan import count_shares, count_splits
from tile_kernels.runtime import registry
from tile_kernels.runtime.cases import assert_equal_results
from tile_kernels.runtime.device import DESCRIBED
from tile_kernels.runtime.launch import recording

BF16 = torch.bfloat16
ON_CPU = ("emulate", "cpu")
ON_GPU = ("tilelang", "cuda")


def grounds(small: list[Any], large: list[Any]) -> list[Any]:
    return [
        *(pytest.param(*ON_CPU, *x, id=f"emulate-{x}") for x in small),
        *(pytest.param(*ON_GPU, *x, id=f"cuda-{x}", marks=pytest.mark.gpu) for x in large),
    ]


def sublayer(n: int, m: int, h: int, device: str) -> tuple[Tensor, ...]:
    torch.manual_seed(3)
    count = m * (m + 2)
    residual = torch.randn(1, n, m, h, device=device).to(BF16)
    fn = (0.5 / (m * h)) ** 0.5 * torch.randn(count, m * h, device=device)
    return residual, fn, torch.randn(3, device=device), torch.randn(count, device=device)


@pytest.mark.parametrize(
    ("backend", "device", "n", "m", "h"),
    grounds(
        [(5, 4, 72), (3, 3, 64), (70, 2, 24), (2, 8, 264)],
        [(n, 4, h) for n in (1, 512, 8192) for h in (1280, 2560, 7168)] + [(300, 7, 1288)],
    ),
)
def test_the_fused_operators_are_the_chain(
    backend: str, device: str, n: int, m: int, h: int
) -> None:
    residual, fn, scale, base = sublayer(n, m, h, device)
    numbers = 1e-6, 1e-6, 1e-6, 1.0, 10
    with tile_kernels.backend(backend):
        post, comb, read = mhc.mhc_pre_big_fuse(residual, fn, scale, base, *numbers)
        trained = mhc.mhc_pre_fwd(residual, fn, scale, base, *numbers)
        mixes, mul, s = mhc.mhc_norm_fn_fwd(residual, fn, 1e-6)
        pre, post_alone, logits = mhc.mhc_pre_split_mixes(mixes, scale, base, m, 1.0, 1e-6)
        comb_alone = mhc.sinkhorn_normalize(logits, 10, 1e-6)
        read_alone = mhc.mhc_pre_apply_mix(residual, pre)
    chain = read_alone, post_alone, comb_alone, pre, mixes, mul, s, logits
    for one, other in zip((read, post, comb), chain):
        assert torch.equal(one, other)
    for one, other in zip(trained, chain):
        assert torch.equal(one, other)


def chain_with_gradients(
    residual: Tensor, fn: Tensor, scale: Tensor, base: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """By the single operators, to which autograd adds up the gradient of the residual."""
    mixes = mhc.mhc_norm_fn_fwd(residual, fn, 1e-6)[0]
    pre, post, logits = mhc.mhc_pre_split_mixes(mixes, scale, base, residual.shape[-2], 2.0, 0.01)
    return mhc.mhc_pre_apply_mix(residual, pre), post, mhc.sinkhorn_normalize(logits, 10, 1e-6)


@pytest.mark.parametrize(
    ("backend", "device", "n", "m", "h"),
    grounds([(5, 4, 72), (2, 3, 64)], [(1, 4, 1280), (4096, 4, 7168), (300, 7, 1288)]),
)
@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_of_the_fused_operator(
    backend: str, device: str, n: int, m: int, h: int, compiled: bool
) -> None:
    """Those of the parameters to the bit; two parts of the residual's are added before rounding."""

    def fused(*given: Tensor) -> tuple[Tensor, ...]:
        return mhc.mhc_pre_fwd(*given, 1e-6, 0.01, 1e-6, 2.0, 10)[:3]

    if compiled:
        torch._dynamo.reset()
        fused = torch.compile(fused, fullgraph=True, backend="aot_eager")
    inputs = [tensor.requires_grad_() for tensor in sublayer(n, m, h, device)]
    with tile_kernels.backend(backend):
        results = fused(*inputs)
        grads = [torch.randn_like(result) for result in results]
        found = torch.autograd.grad(results, inputs, grads)
        expected = torch.autograd.grad(chain_with_gradients(*inputs), inputs, grads)
    torch.testing.assert_close(found[0], expected[0], rtol=2**-6, atol=2**-6)
    for one, other in zip(found[1:], expected[1:]):
        assert torch.equal(one, other)


def test_what_is_kept_has_no_gradient() -> None:
    inputs = [tensor.requires_grad_() for tensor in sublayer(3, 2, 24, "cpu")]
    results = mhc.mhc_pre_fwd(*inputs, 1e-6, 0.01, 1e-6, 2.0, 10)
    assert [result.requires_grad for result in results] == [True] * 3 + [False] * 5


@pytest.mark.parametrize(
    ("function", "launches"),
    [(mhc.mhc_norm_fn_fwd, 2), (mhc.mhc_pre_big_fuse, 2), (mhc.mhc_pre_fwd, 2)],
)
def test_launches(function: Any, launches: int) -> None:
    """As documented: of the projection, of all before a sublayer, and of that in training."""
    arguments = [tensor.to("meta") for tensor in sublayer(4096, 4, 64, "cpu")]
    numbers = 1e-6, 1e-6, 1e-6, 1.0, 10
    given = (*arguments[:2], 1e-6) if function is mhc.mhc_norm_fn_fwd else (*arguments, *numbers)
    with recording() as requests:
        function(*given)
    assert len(requests) == launches


@pytest.mark.parametrize(
    ("backend", "device", "reads", "writes", "h"),
    grounds(
        [(3, 2, 40), (12, 12, 8)],
        [(1, 1, 2560), (3, 3, 2560), (10, 9, 4096), (10, 10, 7168), (25, 25, 1280)],
    ),
)
def test_recompute_is_the_chain(backend: str, device: str, reads: int, writes: int, h: int) -> None:
    n, m = (3, 4) if device == "cpu" else (8192, 4)
    torch.manual_seed(5)

    def normal(count: int, *last: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        return [torch.randn(1, n, *last, device=device).to(dtype) for _ in range(count)]

    (first,) = normal(1, m, h, dtype=BF16)
    pre, outputs = normal(reads, m, 1), normal(writes, h, dtype=BF16)
    post, comb = normal(writes, m, 1), normal(writes, m, m)
    reading, residuals = normal(reads, h, dtype=BF16), normal(writes, m, h, dtype=BF16)
    with tile_kernels.backend(backend):
        mhc.mhc_multilayer_recompute(first, pre, outputs, post, comb, reading, residuals)
        residual = first
        for i in range(reads):
            assert torch.equal(reading[i], mhc.mhc_pre_apply_mix(residual, pre[i]))
            if i < writes:
                residual = mhc.mhc_post(outputs[i], residual, post[i], comb[i])
                assert torch.equal(residuals[i], residual)


@pytest.mark.parametrize(
    ("backend", "device", "n", "h"),
    grounds([(33, 72)], [(n, h) for n in (4096, 8192) for h in (1280, 2560, 7168)]),
)
def test_projection_against_the_reference(backend: str, device: str, n: int, h: int) -> None:
    """As training code compares them: the reference multiplies in TF32 where the device can."""
    residual, fn, *_ = sublayer(n, 4, h, device)
    residual = (
        residual * torch.tensor([1.0, 1.01, 1.02, 1.03], device=device).to(BF16)[:, None]
    ).to(BF16)
    fn = 1e-4 * fn / fn.std()
    grad = torch.randn(1, n, 24, device=device)
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        leaves = residual.clone().requires_grad_(), fn.clone().requires_grad_()
        expected = reference.mhc_pre_norm_fn_ref(*leaves, None, 1e-6)
        expected_grads = torch.autograd.grad(expected, leaves, grad)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed
    with tile_kernels.backend(backend):
        leaves = residual.clone().requires_grad_(), fn.clone().requires_grad_()
        mixes = mhc.mhc_norm_fn_fwd(*leaves, 1e-6)[0]
        grads = torch.autograd.grad(mixes, leaves, grad)
    torch.testing.assert_close(mixes, expected, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(grads[0], expected_grads[0])
    torch.testing.assert_close(grads[1], expected_grads[1], atol=3e-2, rtol=1e-3)


def test_the_oracle_of_the_projection_is_the_gradient() -> None:
    torch.manual_seed(0)
    residual = torch.randn(2, 3, 2, 4, dtype=torch.float64, requires_grad=True)
    fn = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    mixes, mul, s = reference.mhc_norm_fn_fwd(residual, fn, 1e-3)
    grad = torch.randn_like(mixes)
    expected = torch.autograd.grad(mixes, (residual, fn), grad)
    found = reference.mhc_norm_fn_bwd(grad, residual, fn, mul.detach(), s.detach(), 1e-3)
    for one, other in zip(found, expected):
        torch.testing.assert_close(one, other)
    there = torch.ones_like(residual).detach()
    added = reference.mhc_norm_fn_bwd(grad, residual, fn, mul.detach(), s.detach(), 1e-3, there)
    assert added[0] is there
    torch.testing.assert_close(there, 1 + expected[0])


def test_definitions_are_not_rounded_by_autocast() -> None:
    residual, fn, *_ = sublayer(3, 2, 64, "cpu")
    expected = mhc.mhc_norm_fn_fwd(residual, fn, 1e-6)
    with torch.autocast("cpu", torch.bfloat16):
        found = mhc.mhc_norm_fn_fwd(residual, fn, 1e-6)
    for one, other in zip(found, expected):
        assert torch.equal(one, other)


def test_tf32() -> None:
    bits = reference.round_to_tf32(torch.tensor([1.0, 0.1])).view(torch.int32).tolist()
    assert bits == [0x3F801000, 0x3DCCDCCD]
    values = torch.tensor([1.0, 0.1, 1 + 2**-11, 1 + 2**-11 - 2**-23, float("inf"), -0.0])
    expected = [1.0, 0.0999755859375, 1 + 2**-10, 1.0, float("inf"), 0]
    assert reference.tf32(values).tolist() == expected
    assert reference.tf32(torch.tensor([float("nan")])).isnan().all()


def test_what_is_shared_does_not_depend_on_the_budget() -> None:
    device, num_sms = torch.device("cpu"), tile_kernels.get_num_sms()
    before = count_splits(4096, 28672, device), count_shares(4096, 5120, 128, device)
    tile_kernels.set_num_sms(num_sms // 3)
    try:
        assert (count_splits(4096, 28672, device), count_shares(4096, 5120, 128, device)) == before
    finally:
        tile_kernels.set_num_sms(num_sms)
    assert before == (6, (6, 11))


@pytest.mark.parametrize(
    ("rows", "splits"), [(1, 112), (192, 38), (193, 56), (4096, 6), (16384, 3), (2**20, 1)]
)
def test_blocks_fill_the_device(rows: int, splits: int) -> None:
    assert count_splits(rows, 28672, torch.device("cpu")) == splits


@pytest.mark.parametrize("arch", DESCRIBED)
def test_shared_memory_suffices(arch: str) -> None:
    """What the kernels of the projection hold, for every number of mixes, on every device."""
    device = DESCRIBED[arch]
    for padded in range(16, plans.MAX_MIXES + 1, 16):
        for rows in (10, 4096):
            plan = plans.plan_products(padded, padded, 28672, rows, 8, device)
            stage = plan.tile * plans.BF16 + padded * plans.FP32
            parts = 2 * padded * plans.BF16
            assert plan.stages >= 2
            assert (plan.stages * stage + parts) * plan.depth <= device.smem_per_block
        for accumulate in (False, True):
            stages = plans.plan_product_gradients(
                padded, padded, 28672, 1, accumulate, device
            ).stages
            width = plans.gradient_columns(padded)
            tile = 64 * (2 * width * (1 + accumulate) + 4 * padded + 4)
            assert 4 * padded * width + stages * tile <= device.smem_per_block


def test_one_graph_for_many_token_counts() -> None:
    """Compiled once for all numbers of tokens, one that depends on data included."""

    def step(residual: Tensor, keep: Tensor, fn: Tensor) -> Tensor:
        chosen = residual[keep.nonzero()[:, 0]]
        return mhc.mhc_norm_fn_fwd(chosen, fn, 1e-6)[0].sum()

    fn = torch.randn(8, 2 * 64)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, recompile_limit=2):
        compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
        for n in (5, 70, 300, 700, 2000):
            residual = torch.randn(n, 2, 64).to(BF16).requires_grad_()
            keep = torch.arange(n) % 3
            (grad,) = torch.autograd.grad(compiled(residual, keep, fn), residual)
            (expected,) = torch.autograd.grad(step(residual, keep, fn), residual)
            assert torch.equal(grad, expected)


def test_what_is_written_is_apart_from_what_is_read() -> None:
    first, shared = torch.zeros(1, 2, 8).to(BF16), torch.zeros(1, 8).to(BF16)
    mix, comb = torch.ones(1, 2, 1), torch.ones(1, 2, 2)
    with pytest.raises(
        ValueError, match=r"layer_input_list\[0\] must not share memory with layer_o"
    ):
        mhc.mhc_multilayer_recompute(
            first, [mix], [shared], [mix], [comb], [shared], [torch.zeros_like(first)]
        )


@pytest.mark.parametrize("backend", ["torch", "emulate"])
def test_layers_in_tuples(backend: str) -> None:
    op = registry.get("mhc.mhc_multilayer_recompute")
    given = op.cases.small[0].build("cpu")
    expected = op.cases.small[0].build("cpu")
    op.reference(*expected.values())
    with tile_kernels.backend(backend):
        op.function(**{k: tuple(v) if isinstance(v, list) else v for k, v in given.items()})
    assert_equal_results(list(given.values()), list(expected.values()))


def test_doubly_stochastic() -> None:
    """The kernel's own matrices: columns to the last bits, rows with enough steps."""
    logits = torch.empty(40, 4, 4).uniform_(-3, 3)
    with tile_kernels.backend("emulate"):
        found = mhc.sinkhorn_normalize(logits, 200, 1e-8)
        extreme = mhc.sinkhorn_normalize(80 * logits.sign(), 20, 1e-6)
    for dim in (-1, -2):
        torch.testing.assert_close(found.sum(dim), torch.ones(40, 4), rtol=0, atol=1e-6)
    assert extreme.isfinite().all()
    torch.testing.assert_close(extreme.sum(-2), torch.ones(40, 4), rtol=0, atol=3e-6)


def test_second_import_paths() -> None:
    from tile_kernels.mhc import multilayer_recompute_kernel, norm_fn_kernel, post_kernel

    assert norm_fn_kernel.round_to_tf32 is reference.round_to_tf32
    from tile_kernels.modeling.mhc import ops

    assert post_kernel.mhc_post_fwd is ops.mhc_post_fwd
    assert post_kernel.mhc_post_bwd is ops.mhc_post_bwd
    assert multilayer_recompute_kernel.mhc_multilayer_recompute is mhc.mhc_multilayer_recompute
