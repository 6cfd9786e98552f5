"""The kernels' encoders on every bfloat16 there is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tile_kernels
from tests.requirements import GROUNDS, needs_nvcc
from tile_kernels import quant
from tile_kernels import torch as references
from tile_kernels.quant import formats
from tile_kernels.quant.back import reference as back_references
from tile_kernels.runtime import emulation, sources
from tile_kernels.runtime.device import DESCRIBED
from tile_kernels.runtime.warmup import compilations

MAX = {"e4m3": 448.0, "e2m1": 6.0, "e5m6": 65024.0}


def every_bfloat16(largest: float, columns: int) -> torch.Tensor:
    """All patterns up to `largest`, NaN among them, in rows whose factor is 1."""
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    x = torch.where(x.abs() > largest, largest, x).view(-1, columns - 1)
    return torch.cat((torch.full((len(x), 1), largest), x), 1).to(torch.bfloat16)


@pytest.mark.parametrize("ground", GROUNDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("fmt", MAX)
def test_every_bfloat16(fmt: str, dtype: torch.dtype, ground: tuple[str, str]) -> None:
    backend, device = ground
    x = every_bfloat16(MAX[fmt], 257)
    if fmt != "e4m3":  # whole vectors of 8: e5m6 packs them, the fast conversion to e2m1 takes them
        x = torch.cat((x, torch.zeros(len(x), 7)), 1)
    x = x.to(dtype)
    width = x.shape[1]
    expected = references.per_token_cast(x, fmt, width, None, False, True, False)
    with tile_kernels.backend(backend):
        data, sf = quant.per_token_cast(x.to(device), fmt, width, round_sf=True)
    assert (sf == 1).all()
    assert torch.equal(data.cpu().view(torch.uint8), expected[0].view(torch.uint8))


@pytest.mark.parametrize("ground", GROUNDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("fmt", ["e4m3", "e2m1"])
def test_every_bfloat16_by_a_given_scale(
    fmt: str, dtype: torch.dtype, ground: tuple[str, str]
) -> None:
    """All of them as they are: both infinities, NaN of every kind, and what saturates."""
    backend, device = ground
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    x, sf = x.view(-1, 128).to(dtype), torch.ones(512, 1)
    expected = references.per_token_cast_with_precomputed_sf(x, fmt, 128, sf)
    with tile_kernels.backend(backend):
        data = quant.per_token_cast_with_precomputed_sf(x.to(device), fmt, 128, sf.to(device))
    assert torch.equal(data.cpu().view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("ground", GROUNDS)
@pytest.mark.parametrize("fmt", ["e4m3", "e2m1", "e5m6"])
def test_every_code(fmt: str, ground: tuple[str, str]) -> None:
    """Back to float32 and to bfloat16, NaN where the format has it."""
    backend, device = ground
    codes = torch.arange(4096, dtype=torch.int32).view(8, 512)
    data, block, special = {
        "e4m3": ((codes % 256).to(torch.uint8).view(torch.float8_e4m3fn), (1, 128), None),
        "e2m1": (formats.pack_e2m1((codes % 16).to(torch.uint8)), (1, 128), None),
        "e5m6": (formats.pack_e5m6(codes), (1, 512), "e5m6"),
    }[fmt]
    sf = torch.ones(8, 512 // block[1])
    for target in ("fp32", "bf16"):
        expected = back_references.cast_back((data, sf), target, block, special)
        with tile_kernels.backend(backend):
            quantised = (data.to(device), sf.to(device))
            found = quant.cast_back(quantised, target, block, special).cpu()
        assert torch.equal(found.isnan(), expected.isnan())
        assert torch.equal(found.nan_to_num(), expected.nan_to_num())


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.floats(0, 2.0**127, width=32), min_size=2, max_size=2),
    st.sampled_from(sorted(MAX)),
    st.booleans(),
)
def test_larger_values_have_no_smaller_scale(values: list[float], fmt: str, round_sf: bool) -> None:
    small, large = sorted(values)
    x = torch.zeros(2, 16)
    x[0, 3], x[1, 5] = small, -large
    _, sf = quant.per_token_cast(x, fmt, 16, round_sf=round_sf)
    assert 0 < sf[0] <= sf[1] < torch.inf


@pytest.mark.parametrize(
    "scales",
    [
        lambda x: quant.per_token_cast_with_sf_only(x, "e4m3", 128),
        lambda x: quant.per_block_cast_with_sf_only(x, "e4m3", (128, 128)),
    ],
    ids=["rows", "blocks"],
)
def test_scales_alone_allocate_no_data(
    scales: Callable[[torch.Tensor], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel gets `x` and a place for the scales, and nothing else."""
    launched: list[Any] = []
    monkeypatch.setattr(emulation, "run", lambda _, __, *given: launched.extend(given))
    x = torch.ones(256, 1024, dtype=torch.bfloat16)
    with tile_kernels.backend("emulate"):
        sf = scales(x)
    tensors = [given for given in launched if isinstance(given, torch.Tensor)]
    assert {given.data_ptr() for given in tensors} == {x.data_ptr(), sf.data_ptr()}


# ---- the instruction of later architectures -----------------------------------------------------

BLACKWELL = pytest.mark.parametrize("arch", ["sm_100a", "sm_120a"])


@BLACKWELL
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_bfloat16_by_instruction(dtype: torch.dtype, arch: str) -> None:
    x = every_bfloat16(6.0, 257)
    x = torch.cat((x, torch.zeros(len(x), 1)), 1).to(dtype)
    expected = references.per_token_cast(x, "e2m1", 258, None, False, True, False)
    with tile_kernels.backend("emulate", arch=arch):
        data, _ = quant.per_token_cast(x, "e2m1", 258, round_sf=True)
    assert torch.equal(data, expected[0])


@pytest.mark.parametrize("ground", GROUNDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("round_sf", [False, True])
def test_casts_by_instruction(
    round_sf: bool,
    dtype: torch.dtype,
    ground: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A GPU that has no such instruction does the same by CUDA's own long way round."""
    from tile_kernels.quant.per_block import plan as per_block_plan
    from tile_kernels.quant.per_token import plan as per_token_plan

    for module in (per_block_plan, per_token_plan):
        monkeypatch.setattr(module, "e2m1_conversion", lambda *_: "instruction")
    backend, device = ground
    torch.manual_seed(0)
    x = torch.randn(70, 88) * torch.randn(70, 1).exp()
    x[3, 5], x[4, 6], x[5, 7], x[6, 9] = torch.nan, torch.inf, -0.0, -torch.inf
    x = x.to(dtype)

    def cast(x: torch.Tensor) -> list[torch.Tensor]:
        rows = quant.per_token_cast(x, "e2m1", 32, round_sf=round_sf)
        blocks = quant.per_block_cast(x, "e2m1", (32, 32), round_sf=round_sf)
        back = quant.fake_cast(x, "e2m1", 16, round_sf=round_sf)
        return [part.contiguous().view(torch.uint8) for part in (*rows, *blocks, back)]

    with tile_kernels.backend(backend):
        found = cast(x.to(device))
    for one, other in zip(found, cast(x), strict=True):
        assert torch.equal(one.cpu(), other)


@needs_nvcc
@BLACKWELL
def test_the_instruction_is_one(arch: str) -> None:
    """The same source is compiled to a long way round where the architecture has none."""
    x = torch.empty(8, 256, device="meta")
    call = ("quant.per_token_cast", {"x": x, "fmt": "e2m1", "num_per_channels": 32})
    (item,) = compilations([call], DESCRIBED[arch])
    assert "instruction" in item.static
    source = sources.cuda_source(item.kernel.definition, item.static, arch)
    (there,), (without,) = (sources.compile_source(source, a) for a in (arch, "sm_90a"))
    assert 3 * there.instructions < without.instructions
