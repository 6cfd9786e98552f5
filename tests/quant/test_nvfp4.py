"""Scales in e4m3, with a factor of all of them; and the least amax of casts."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

import tile_kernels
from tests.requirements import GROUNDS
from tile_kernels import config, quant

each_ground = pytest.mark.parametrize("ground", GROUNDS)


def bytes_of(x: torch.Tensor) -> torch.Tensor:
    return x.cpu().contiguous().view(torch.uint8)


@pytest.mark.parametrize(("tokens", "stride"), [(5, 16), (16, 16), (20, 32)])
@each_ground
def test_columns_are_padded_to_16_bytes(tokens: int, stride: int, ground: tuple[str, str]) -> None:
    backend, device = ground
    x = torch.randn(tokens, 64, device=device)
    flags: dict[str, Any] = {"use_e4m3_sf": True}
    with tile_kernels.backend(backend):
        _, rows = quant.per_token_cast(x, "e2m1", 16, **flags)
        _, columns = quant.per_token_cast(x, "e2m1", 16, **flags, use_tma_aligned_col_major_sf=True)
    assert (tuple(rows.shape), rows.stride()) == ((tokens, 4), (4, 1))
    assert (tuple(columns.shape), columns.stride()) == ((tokens, 4), (1, stride))
    assert torch.equal(bytes_of(rows), bytes_of(columns))


@each_ground
def test_a_global_scale_extends_the_range(ground: tuple[str, str]) -> None:
    """Without it tiny and huge values are lost; with it the error is that of e2m1."""
    backend, device = ground
    torch.manual_seed(0)
    for factor in (1e-6, 1e6):
        x = torch.randn(4, 64, device=device) * factor
        global_sf = x.abs().max() / (6 * 448)
        with tile_kernels.backend(backend):
            pair = quant.per_token_cast(x, "e2m1", 16, use_e4m3_sf=True, global_sf=global_sf)
            back = quant.per_token_cast_back(pair, "fp32", 16, global_sf=global_sf)
            lost = quant.fake_cast(x, "e2m1", 16, use_e4m3_sf=True)
        error = (back - x).norm() / x.norm()
        assert error < 0.15
        assert (lost - x).norm() / x.norm() > 0.5


@pytest.mark.parametrize("factor", [0.0, -1.0, 1e-40, float("nan"), float("inf")])
def test_a_useless_global_scale(factor: float) -> None:
    """Kernels and reference agree on it, bit for bit."""
    x = torch.zeros(2, 16)
    x[1] = 1e-3
    pairs = []
    for backend in ("torch", "emulate"):
        with tile_kernels.backend(backend):
            pairs.append(
                quant.per_token_cast(
                    x, "e2m1", 16, use_e4m3_sf=True, global_sf=torch.tensor(factor)
                )
            )
    for one, other in zip(*pairs):
        assert torch.equal(bytes_of(one), bytes_of(other))


def test_a_global_scale_of_zeros() -> None:
    """As the documents compute it."""
    x = torch.zeros(2, 16)
    global_sf = (x.abs().max() / (6 * 448)).clamp(min=1e-30)
    for fmt in ("e4m3", "e2m1"):
        kind: dict[str, Any] = {"use_e4m3_sf": True, "global_sf": global_sf}
        assert not quant.fake_cast(x, fmt, 16, **kind).any()


@each_ground
def test_requantizing_from_e4m3_scales(ground: tuple[str, str]) -> None:
    backend, device = ground
    x = torch.randn(6, 96, device=device)
    with tile_kernels.backend(backend):
        pair = quant.per_token_cast(x, "e2m1", 16, use_e4m3_sf=True)
        again = quant.per_token_cast(pair, "e4m3", 32, (1, 16))
        expected = quant.per_token_cast(quant.per_token_cast_back(pair, "fp32", 16), "e4m3", 32)
    for one, other in zip(again, expected):
        assert torch.equal(bytes_of(one), bytes_of(other))


@each_ground
def test_in_place(ground: tuple[str, str]) -> None:
    backend, device = ground
    x = torch.randn(5, 96, device=device)
    wide = torch.randn(5, 200, device=device)
    with tile_kernels.backend(backend):
        for y in (x, wide[:, :96], x.bfloat16()):
            expected = quant.fake_cast(y, "e2m1", 16, use_e4m3_sf=True)
            quant.per_token_cast_and_cast_back(y, "e2m1", 16, use_e4m3_sf=True)
            assert torch.equal(y, expected)


def test_in_place_has_no_gradient() -> None:
    x = torch.randn(5, 96, requires_grad=True)
    with pytest.raises(RuntimeError, match="fake_cast"):
        quant.per_token_cast_and_cast_back(x, "e4m3", 32)


# ---- the least amax -----------------------------------------------------------------------------


@each_ground
def test_the_least_amax(ground: tuple[str, str]) -> None:
    backend, device = ground
    x = torch.full((1, 32), 0.5, device=device)
    with tile_kernels.backend(backend):
        data, sf = quant.per_token_cast(x, "e4m3", 32, amax_min=1.0)
        with config.quant_amax_min(1.0, "e4m3"):
            same = quant.per_token_cast(x, "e4m3", 32)
        plain = quant.per_token_cast(x, "e4m3", 32)
    assert sf.item() == pytest.approx(0.0022321430, rel=1e-7)
    assert data.float().unique().tolist() == [224.0]
    assert torch.equal(same[1], sf)
    assert plain[0].float().unique().tolist() == [448.0]


@pytest.mark.parametrize("fmt", ["e4m3", "e2m1"])
@each_ground
def test_a_scale_in_e4m3_is_never_zero(fmt: str, ground: tuple[str, str]) -> None:
    """A least amax that would round to a scale of 0 counts as that of the least scale: a group of
    zeros stays one."""
    backend, device = ground
    x = torch.zeros(2, 32, device=device)
    x[1] = 1e-3
    kind: dict[str, Any] = {"use_e4m3_sf": True}
    with tile_kernels.backend(backend):
        expected = quant.per_token_cast(x, fmt, 16, **kind)
        assert expected[1].float().min() == 2.0**-9
        for value in (1e-10, 0.4 * config.get_amax_clamp_for_quant(fmt, True)):
            given = quant.per_token_cast(x, fmt, 16, **kind, amax_min=value)
            with config.quant_amax_min(value):
                by_setting = quant.per_token_cast(x, fmt, 16, **kind)
                reference = tile_kernels.torch.cast(x, fmt, (1, 16), **kind)
                sf = quant.per_token_cast_with_sf_only(x, fmt, 16, **kind)
                fake = quant.fake_cast(x, fmt, 16, **kind)
            for found in (given, by_setting, reference):
                for one, other in zip(found, expected):
                    assert torch.equal(bytes_of(one), bytes_of(other))
            assert torch.equal(bytes_of(sf), bytes_of(expected[1]))
            assert not fake[0].any()
    with pytest.raises(ValueError, match="amax_min must be in"):
        quant.per_token_cast(x, fmt, 16, **kind, amax_min=0.0)


def test_settings_are_restored() -> None:
    before = config.get_amax_clamp_for_quant("e2m1", True)
    assert before == 0.01171875
    assert config.get_amax_clamp_for_quant("e4m3", True) == 0.875
    with contextlib.suppress(KeyError), config.quant_amax_min(2.0):
        assert config.get_amax_clamp_for_quant("e2m1", True) == 2.0
        raise KeyError
    assert config.get_amax_clamp_for_quant("e2m1", True) == before
    config.set_amax_clamp_for_quant("e2m1", True, 3.0)
    assert config.get_amax_clamp_for_quant("e2m1", True) == 3.0
    config.reset_runtime_config()
    assert config.get_amax_clamp_for_quant("e2m1", True) == before


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan"), 1e-38])
def test_bad_bounds_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match="value must be finite and at least"):
        config.set_amax_clamp_for_quant("e4m3", False, value)
    with pytest.raises(ValueError, match="quant_amax_min: value"), config.quant_amax_min(value):
        pass


def test_other_settings() -> None:
    config.set_token_alignment(64)
    config.set_pdl(True)
    config.use_deterministic_algorithms(True)
    assert tile_kernels.get_token_alignment() == 64
    assert tile_kernels.get_pdl()
    assert tile_kernels.get_deterministic_algorithms()
    config.reset_runtime_config()
    assert tile_kernels.get_token_alignment() == 128
    assert not tile_kernels.get_pdl()
    assert not tile_kernels.get_deterministic_algorithms()
    assert config.get_device() == "cuda"
    assert not config.is_ascend()
    assert config.get_num_vec_cores() == 2 * config.get_num_ai_cores()
    for wrong in (0, -1):
        with pytest.raises(ValueError, match="token_alignment must be at least 1"):
            config.set_token_alignment(wrong)
    with pytest.raises(TypeError, match="must be an int"):
        config.set_token_alignment(True)
    with pytest.raises(TypeError, match="must be a bool"):
        config.set_pdl(1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="fmt must be e4m3 or e2m1"):
        config.get_amax_clamp_for_quant("e5m6", False)


def test_random_numbers_and_names() -> None:
    tile_kernels.rand.set_seed(3)
    one = tile_kernels.rand.randn(2, 3, dtype=torch.bfloat16, device="cpu")
    torch.manual_seed(3)
    assert torch.equal(one, torch.randn((2, 3), dtype=torch.bfloat16))
    assert tile_kernels.rand.randn((4,)).shape == tile_kernels.rand.randn([4]).shape == (4,)
    assert tile_kernels.rand.randn_like(one).dtype == torch.bfloat16
    for name in ("fp32", "bf16", "e4m3", "e2m1"):
        assert tile_kernels.utils.dtype_to_str(tile_kernels.utils.str_to_dtype(name)) == name
    for function, wrong in (
        (tile_kernels.utils.str_to_dtype, "fp16"),
        (tile_kernels.utils.dtype_to_str, torch.float16),
        (tile_kernels.utils.next_power_of_two, 0),
    ):
        with pytest.raises(ValueError, match="must be"):
            function(wrong)  # type: ignore[operator]
