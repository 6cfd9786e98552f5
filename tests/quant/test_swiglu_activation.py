"""The quick way to SwiGLU's values gives the bits of the long one."""

from __future__ import annotations

import pytest
import tilelang
import torch
from tilelang import language as T

import tile_kernels
from tests.requirements import GROUNDS
from tile_kernels.quant.swiglu.primitives import NEAR, near_swiglu, swiglu_value

KERNEL_GROUNDS = [ground for ground in GROUNDS if ground.values[0][0] != "torch"]
THREADS = 128


def both_values(steps, count):
    value_of = near_swiglu(steps)

    @T.prim_func
    def values(
        gates: T.Tensor[(count,), T.float32],
        factors: T.Tensor[(count,), T.float32],
        quick: T.Tensor[(count,), T.float32],
        long: T.Tensor[(count,), T.float32],
    ):
        with T.Kernel(T.ceildiv(count, THREADS), threads=THREADS) as block:
            place = block * THREADS + T.get_thread_binding()
            if place < count:
                quick[place] = value_of(gates[place], factors[place])
                long[place] = swiglu_value(gates[place], factors[place])

    return values


def run(steps: int, gates: torch.Tensor, factors: torch.Tensor, ground: tuple[str, str]):
    backend, device = ground
    tensors = {
        "gates": gates.to(device),
        "factors": factors.to(device),
        "quick": torch.empty_like(gates, device=device),
        "long": torch.empty_like(gates, device=device),
    }
    if backend == "emulate":
        tile_kernels.emulate(both_values, (steps, len(gates)), tensors, mode="fast")
    else:
        tilelang.compile(both_values(steps, len(gates)))(*tensors.values())
    return tensors["quick"], tensors["long"]


@pytest.mark.parametrize("ground", KERNEL_GROUNDS)
def test_one_step_for_every_gate_in_bfloat16(ground: tuple[str, str]) -> None:
    gates = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).float()
    gates = gates[gates.abs() < NEAR]
    assert len(gates) > 1 << 15
    for factor in (1.0, 1.5703125, -0.3359375):
        found, expected = run(1, gates, torch.full_like(gates, factor), ground)
        assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("ground", KERNEL_GROUNDS)
def test_two_steps_for_any_gate(ground: tuple[str, str]) -> None:
    gates = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)) * 8
    gates = gates[gates.abs() < NEAR]
    found, expected = run(2, gates, torch.ones_like(gates), ground)
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("ground", KERNEL_GROUNDS)
def test_not_a_number_stays(steps: int, ground: tuple[str, str]) -> None:
    gates = torch.tensor([float("nan"), 1.0] * 16)
    found, _ = run(steps, gates, torch.ones_like(gates), ground)
    assert torch.equal(found.isnan(), gates.isnan().to(found.device))
