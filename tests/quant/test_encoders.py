"""The kernels' encoders on every bfloat16 there is."""

from __future__ import annotations

import pytest
import torch

import tile_kernels
from tests.requirements import GROUNDS, needs_nvcc
from tile_kernels import quant
from tile_kernels.runtime import sources
from tile_kernels.runtime.device import DESCRIBED
from tile_kernels.runtime.warmup import compilations
from tile_kernels.torch import quant as oracles

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
    columns = 257 if fmt == "e4m3" else 258
    x = every_bfloat16(MAX[fmt], 257)
    if columns == 258:
        x = torch.cat((x, torch.zeros(len(x), 1)), 1)
    if fmt == "e5m6":
        x = torch.cat((x, torch.zeros(len(x), 6)), 1)
    x = x.to(dtype)
    width = x.shape[1]
    expected = oracles.per_token_cast(x, fmt, width, None, False, True, False)
    with tile_kernels.backend(backend):
        data, sf = quant.per_token_cast(x.to(device), fmt, width, round_sf=True)
    assert (sf == 1).all()
    assert torch.equal(data.cpu().view(torch.uint8), expected[0].view(torch.uint8))


# ---- the instruction of later architectures -----------------------------------------------------

BLACKWELL = pytest.mark.parametrize("arch", ["sm_100a", "sm_120a"])


@BLACKWELL
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_bfloat16_by_instruction(dtype: torch.dtype, arch: str) -> None:
    x = every_bfloat16(6.0, 257)
    x = torch.cat((x, torch.zeros(len(x), 1)), 1).to(dtype)
    expected = oracles.per_token_cast(x, "e2m1", 258, None, False, True, False)
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
    from tile_kernels.quant.kernels import blocks, tokens

    for module in (blocks, tokens):
        monkeypatch.setattr(module, "way_to_e2m1", lambda *_: "instruction")
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
