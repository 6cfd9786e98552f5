"""The projection: worked examples, the precision it promises, how work is split."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import tile_kernels
from tests.mhc.helpers import BF16, close, grounds, sublayer
from tile_kernels import mhc
from tile_kernels import torch as references
from tile_kernels.emulator import Emulated
from tile_kernels.mhc.norm_fn import kernel as kernels
from tile_kernels.mhc.norm_fn import plan as plans
from tile_kernels.mhc.norm_fn import reference
from tile_kernels.mhc.norm_fn.plan import count_shares, cut_columns, divide
from tile_kernels.runtime.device import DESCRIBED

X = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 1, 2, 2)
FN = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.5, 0.5, 0.5, 0.5]])


def test_norm_fn_example() -> None:
    close(references.mhc_pre_norm_fn_ref(X, FN, None, 1e-6), 0.3651484, 1.8257418)
    weight = torch.tensor([2.0, 1.0, 1.0, 0.0])
    close(references.mhc_pre_norm_fn_ref(X, FN, weight, 1e-6), 0.7302967, 1.2780193)


def test_norm_fn_gradient_example() -> None:
    residual, fn = X.bfloat16().requires_grad_(), FN.clone().requires_grad_()
    mixes = references.mhc_pre_norm_fn_ref(residual, fn, None, 1e-6)
    assert mixes.shape == (1, 1, 2)
    mixes.backward(torch.tensor([1.0, 0.0]).view(1, 1, 2))
    assert fn.grad is not None
    assert residual.grad is not None
    close(fn.grad[0], 0.3651484, 0.7302967, 1.0954452, 1.4605935)
    assert fn.grad[1].tolist() == [0, 0, 0, 0]
    expected = (0.3535156, -0.0242920, -0.0366211, -0.0485840)
    close(residual.grad, *expected, atol=1e-7)


def test_norm_fn_takes_float32_and_no_tokens() -> None:
    with pytest.raises(TypeError, match="mhc_fn must be float32"):
        references.mhc_pre_norm_fn_ref(X, FN.double(), None, 1e-6)
    empty = references.mhc_pre_norm_fn_ref(torch.zeros(2, 0, 2, 2), FN, torch.ones(4), 1e-6)
    assert empty.shape == (2, 0, 2)


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


def test_the_reference_of_the_projection_is_the_gradient() -> None:
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
    before = count_shares(4096, 5120, 128, device)
    tile_kernels.set_num_sms(num_sms // 3)
    try:
        assert count_shares(4096, 5120, 128, device) == before
    finally:
        tile_kernels.set_num_sms(num_sms)
    assert before == (6, 11)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (131072, (1024, 128, 8, 16)),
        (28672, (256, 112, 7, 16)),
        (16384, (256, 64, 4, 16)),
        (10240, (256, 40, 3, 14)),
        (2304, (256, 9, 1, 9)),
        (512, (256, 2, 1, 2)),
        (8, (256, 1, 1, 1)),
    ],
)
def test_columns_are_cut_by_their_number(size: int, expected: tuple[int, ...]) -> None:
    columns = cut_columns(size)
    assert columns == expected
    assert columns.leaf * (columns.leaves - 1) < size <= columns.leaf * columns.leaves
    assert columns.fold * (columns.groups - 1) < columns.leaves <= columns.fold * columns.groups


@pytest.mark.parametrize(
    ("rows", "division"),
    [
        (1, (112, 1, 1)),
        (64, (112, 1, 1)),
        (128, (112, 1, 1)),
        (256, (112, 2, 1)),
        (512, (112, 4, 1)),
        (513, (16, 1, 7)),
        (1024, (16, 1, 7)),
        (2048, (16, 2, 7)),
        (3000, (16, 3, 7)),
        (4096, (16, 4, 7)),
        (8192, (16, 8, 7)),
    ],
)
def test_blocks_fill_the_device(rows: int, division: tuple[int, ...]) -> None:
    """Single leaves for few rows, groups of them for many: parts, parts of a block, leaves."""
    assert divide(rows, 28672, torch.device("cpu")) == division


@pytest.mark.emulated
def test_bits_do_not_depend_on_the_division() -> None:
    """All kinds of kernels; parts that are leaves or groups of them, one or several in a block."""
    mixes, size = 5, 4360
    padded, columns = plans.padded(mixes), cut_columns(size)
    assert columns.fold > 1
    assert size % columns.leaf
    torch.manual_seed(0)
    x, fn = torch.randn(130, size).to(BF16), torch.randn(mixes, size)
    found = []
    leaves, several = (columns.leaves, 1, 1), (columns.leaves, 4, 1)
    groups = (columns.groups, 2, columns.fold)
    single = plans.plan_products(mixes, padded, size, 1, DESCRIBED["sm_90a"])
    streamed = plans.plan_products(mixes, padded, size, 4096, DESCRIBED["sm_90a"])
    copied = plans.plan_products(mixes, padded, size, 1, DESCRIBED["sm_80"])._replace(fenced=True)
    for plan, counts, divisions in (
        (single, (1, 65), [leaves]),
        (streamed, (2, 130), [leaves, several, groups]),
        (copied, (65,), [leaves, groups]),
    ):
        emulated = Emulated.build(
            kernels.products.prim_func(plan), arch="sm_90a",
            pass_configs=kernels.products.pass_configs,
        )  # fmt: skip
        for count in counts:
            for parts, run, fold in divisions:
                mul = torch.full((parts, count, padded), math.nan)
                squares = torch.full((parts, count), math.nan)
                given = {
                    "x": x[:count].contiguous(), "fn": fn, "mul": mul, "squares": squares,
                    "run": run, "fold": fold,
                }  # fmt: skip
                emulated(*(given[p.name] for p in emulated.lowered.params))
                values = torch.cat((mul[..., :mixes], squares[..., None]), -1)
                summed = [sum_in_order(list(g)) for g in values.split(columns.fold // fold)]
                found.append(sum_in_order(summed))
    largest = max(found, key=len)
    expected = x.double() @ reference.tf32(fn).double().T
    for one in found:
        torch.testing.assert_close(one[:, :mixes].double(), expected[: len(one)], atol=1e-3, rtol=0)
        assert torch.equal(one[0], found[0][0])
        assert torch.equal(one, largest[: len(one)])


def sum_in_order(terms: list[Tensor]) -> Tensor:
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


@pytest.mark.parametrize("arch", DESCRIBED)
@pytest.mark.parametrize("mixes", [24, 128])
def test_few_kernels_for_all_token_counts(arch: str, mixes: int) -> None:
    """Two sizes of tiles; what determines the bits of a row is the same for all."""
    plans_of_rows = {
        plans.plan_products(mixes, plans.padded(mixes), 28672, rows, DESCRIBED[arch])
        for rows in range(1, 16385)
    }
    assert len(plans_of_rows) <= 2
    assert len({(plan.leaf, plan.unit, plan.padded) for plan in plans_of_rows}) == 1


@pytest.mark.parametrize("arch", DESCRIBED)
def test_shared_memory_suffices(arch: str) -> None:
    """What the kernels of the projection hold, for every number of mixes, on every device."""
    device = DESCRIBED[arch]
    for padded in range(16, plans.MAX_MIXES + 1, 16):
        for rows in (10, 1000, 4096):
            plan = plans.plan_products(padded, padded, 28672, rows, device)
            weights, streams = 2 * padded * plans.BF16, plan.tile * plans.BF16  # of a column
            if plan.kind == "copied":
                column = plan.stages * (streams + padded * plans.FP32) + weights
            else:
                column = plan.stages * (streams + weights)
            assert plan.stages >= (1 if plan.kind == "single" else 2)
            assert column * plan.depth <= device.smem_per_block
        for accumulate in (False, True):
            stages = plans.plan_product_gradients(padded, padded, 28672, accumulate, device).stages
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
