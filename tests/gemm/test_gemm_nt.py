"""The dense products: exact sums, bits, transposed forms, in-place addition."""

from __future__ import annotations

import pytest
import torch

import tile_kernels
from tests.gemm.operands import (
    E4M3,
    TILES,
    TILES_OF_ROW_SCALES,
    dense,
    each_ground,
    integers,
    on,
    set_tile,
)
from tile_kernels import gemm
from tile_kernels.gemm import samples
from tile_kernels.gemm.gemm_nt.op import FP8_GEMM_NT
from tile_kernels.gemm.product_reference import widened
from tile_kernels.runtime import emulation
from tile_kernels.testing.numeric import calc_diff

BF16 = torch.bfloat16
BY_ROW = (1, 1, 128)


def sizes(ground: tuple[str, str]) -> tuple[int, int, int]:
    return (130, 320, 256) if ground[1] == "cpu" else (1030, 2112, 1536)


@pytest.mark.parametrize("by_row", [False, True])
@each_ground
def test_exact_sums(ground: tuple[str, str], by_row: bool) -> None:
    """Small integers and scales that are powers of two: float32 has every sum."""
    m, n, k = sizes(ground)
    a, b, d = dense(m, n, k, ground[1], exact=True, by_row=by_row)
    expected = widened(*a, 1) @ widened(*b, 1 if by_row else 128).T
    with on(ground):
        gemm.fp8_gemm_nt(a, b, d, recipe=BY_ROW if by_row else None)
    assert torch.equal(d.double(), expected)


@each_ground
def test_identity_weights_give_back_the_rows(ground: tuple[str, str]) -> None:
    """A wrong swizzle moves channels."""
    k, device = 256, ground[1]
    a = integers(192, k, device=device, low=-8, high=8), torch.ones(192, 2, device=device)
    b = torch.eye(k, device=device).to(E4M3), torch.ones(2, 2, device=device)
    with on(ground):
        d = gemm.fp8_gemm_nt(a, b, torch.empty(192, k, device=device))
    assert torch.equal(d, a[0].float())


@pytest.mark.parametrize("by_row", [False, True])
@each_ground
def test_tiles_have_the_same_bits(
    ground: tuple[str, str], by_row: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    m, n, k = (130, 320, 256) if ground[1] == "cpu" else (1000, 2112, 7168)
    a, b, _ = dense(m, n, k, ground[1], by_row=by_row)
    found = []
    for tile in TILES_OF_ROW_SCALES if by_row else TILES:
        set_tile(monkeypatch, tile)
        with on(ground):
            d = torch.full((m, n), torch.nan, device=ground[1])
            found.append(gemm.fp8_gemm_nt(a, b, d, recipe=BY_ROW if by_row else None))
    assert not found[0].isnan().any()
    assert all(torch.equal(found[0], each) for each in found)


@each_ground
def test_a_row_has_the_same_bits_in_any_company(ground: tuple[str, str]) -> None:
    m, n, k = (150, 320, 256) if ground[1] == "cpu" else (32768, 4096, 2048)
    a, b, d = dense(m, n, k, ground[1])
    with on(ground):
        gemm.fp8_gemm_nt(a, b, d)
        for count in (1, 65, m - 3):
            part = (a[0][:count], a[1][:count].contiguous())
            alone = gemm.fp8_gemm_nt(part, b, torch.empty_like(d[:count]))
            assert torch.equal(alone, d[:count])


@each_ground
def test_adds_in_place(ground: tuple[str, str]) -> None:
    m, n, k = sizes(ground)
    for dtype in (torch.float32, BF16):
        a, b, _ = dense(m, n, k, ground[1], exact=True)
        c = torch.randint(-9, 9, (m, n), device=ground[1]).to(dtype)
        d = c.clone()
        with on(ground):
            expected = gemm.fp8_gemm_nt(a, b, torch.empty_like(d), c)
            assert gemm.fp8_gemm_nt(a, b, d, c=d) is d
        assert torch.equal(d, expected)


def test_partial_overlap_is_refused() -> None:
    a, b, _ = dense(8, 16, 128, "cpu")
    wide = torch.zeros(9, 16, dtype=BF16)
    with pytest.raises(ValueError, match=r"^fp8_gemm_nt: d must not share memory with c"):
        gemm.fp8_gemm_nt(a, b, wide[1:], wide[:8])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_transposed_forms(device: str) -> None:
    a, b, d = dense(132, 264, 256, device)
    expected = gemm.fp8_gemm_nt(a, b, d.clone())
    for copied in (False, True):
        transposed_a, transposed_b = (
            (data.T.contiguous() if copied else data.T, sf.T) for data, sf in (a, b)
        )
        assert torch.equal(gemm.fp8_gemm_nn(a, transposed_b, d.clone()), expected)
        assert torch.equal(gemm.fp8_gemm_tn(transposed_a, transposed_b, d.clone()), expected)
        assert torch.equal(gemm.fp8_gemm_tt(transposed_a, b, d.clone()), expected)
    with pytest.raises(TypeError, match=r"^fp8_gemm_nn: b must be a pair"):
        gemm.fp8_gemm_nn(a, b[0], d)


def test_recipes_by_operand() -> None:
    a, b, d = dense(8, 16, 256, "cpu", exact=True, by_row=True)
    expected = gemm.fp8_gemm_nt(a, b, d.clone(), recipe=BY_ROW)
    found = gemm.fp8_gemm_nt(a, b, d, recipe_a=(1, 128), recipe_b=(1, 128), compiled_dims="nk")
    assert torch.equal(found, expected)


def test_what_the_casts_return_fits() -> None:
    x, w = torch.randn(70, 256).bfloat16(), torch.randn(200, 256).bfloat16()
    b = tile_kernels.quant.per_block_cast(w, "e4m3", (128, 128))
    exact = x.double() @ w.double().T
    for flags in (
        {},
        {"use_tma_aligned_col_major_sf": True},
        {"use_tma_aligned_col_major_sf": True, "round_sf": True, "use_packed_ue8m0": True},
    ):
        a = tile_kernels.quant.per_token_cast(x, "e4m3", 128, **flags)
        d = gemm.fp8_gemm_nt(a, b, torch.empty(70, 200, dtype=BF16))
        assert calc_diff(d, exact) < 1e-3


@pytest.mark.emulated
def test_row_major_scales_take_one_launch_more() -> None:
    a, b, d = dense(8, 16, 256, "cpu")
    with tile_kernels.backend("emulate"), emulation.reports() as reports:
        gemm.fp8_gemm_nt(a, b, d)
        assert len(reports) == 1
        gemm.fp8_gemm_nt((a[0], a[1].contiguous()), b, d)
    assert len(reports) == 3


@each_ground
def test_special_values_stay_in_their_row(ground: tuple[str, str]) -> None:
    """Scales far apart, zero, a NaN code, a NaN scale, an infinite one."""
    a, b, d = dense(136, 264, 256, ground[1])
    a = (a[0].clone(), a[1].contiguous())
    with on(ground):
        plain = gemm.fp8_gemm_nt(a, b, d.float())
        a[1][3], a[1][4], a[1][5] = 2.0**-100, 2.0**100, 0
        a[0].view(torch.uint8)[7, 130] = 0x7F
        a[1][9, 1], a[1][10, 0] = torch.nan, torch.inf
        d = gemm.fp8_gemm_nt(a, b, d.float())
    special = [3, 4, 5, 7, 9, 10]
    others = [i for i in range(136) if i not in special]
    assert torch.equal(d[others], plain[others])
    assert d[5].eq(0).all()
    assert d[[7, 9]].isnan().all()
    assert not d[10].isfinite().any()
    assert d[3].abs().max() < 2.0**-80
    assert d[4].abs().min() > 2.0**80


@pytest.mark.gpu
def test_largest_codes_over_many_channels() -> None:
    """448 everywhere: the tensor cores must not carry a sum of 16384 channels."""
    m, n, k = 256, 512, 16384
    codes = [torch.full((rows, k), 448.0, device="cuda").to(E4M3) for rows in (m, n)]
    scales = torch.ones(m, k // 128, device="cuda"), torch.ones(n // 128, k // 128, device="cuda")
    d = gemm.fp8_gemm_nt(
        (codes[0], scales[0]), (codes[1], scales[1]), torch.empty(m, n, device="cuda")
    )
    assert d.sub(448.0 * 448.0 * k).abs().max() < 2.0**-12 * 448 * 448 * k


@pytest.mark.gpu
def test_accuracy() -> None:
    """Within the rounding of bfloat16 and 2^-12 of the product of absolute values."""
    a, b, d = dense(512, 4096, 7168, "cuda")
    gemm.fp8_gemm_nt(a, b, d)
    left, right = widened(*a, 1), widened(*b, 128)
    exact, size = left @ right.T, left.abs() @ right.abs().T
    assert calc_diff(d, exact) < 1e-5
    assert ((d.double() - exact).abs() <= 2**-8 * exact.abs() + 2**-12 * size).all()


@pytest.mark.gpu
def test_result_of_more_than_2_31_elements() -> None:
    m, n, k = (1 << 18) + 5, 8200, 128
    a, b, d = dense(m, n, k, "cuda")
    gemm.fp8_gemm_nt(a, b, d)
    rows = torch.tensor([0, 1, m // 2, m - 129, m - 1], device="cuda")
    exact = widened(a[0][rows], a[1][rows], 1) @ widened(*b, 128).T
    assert calc_diff(d[rows], exact) < 1e-5
    assert not d.isnan().any()


@pytest.mark.gpu
def test_new_token_counts_compile_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from tile_kernels.runtime.launch import KernelDefinition

    a, b, d = dense(4000, 4096, 512, "cuda")
    gemm.fp8_gemm_nt(a, b, d)

    def compiled(*_: object) -> None:
        raise AssertionError("a kernel was compiled")

    monkeypatch.setattr(KernelDefinition, "compile", compiled)
    for m in (3999, 3001, 2500):
        part = samples.mn_major(a[1][:m])
        gemm.fp8_gemm_nt((a[0][:m], part), b, d[:m])
    assert FP8_GEMM_NT.archs == ("sm_90a",)


def test_other_architectures_are_refused() -> None:
    a, b, d = dense(8, 16, 128, "cpu")
    with (
        tile_kernels.backend("emulate", arch="sm_80"),
        pytest.raises(ValueError, match=r"^fp8_gemm_nt: no kernel for NVIDIA A100 \(sm_80\)"),
    ):
        gemm.fp8_gemm_nt(a, b, d)


def test_data_off_16_bytes_is_refused() -> None:
    a, b, d = dense(8, 16, 128, "cpu")
    shifted = torch.zeros(8 * 128 + 1, dtype=torch.uint8)[1:].view(E4M3).view(8, 128)
    with (
        tile_kernels.backend("emulate"),
        pytest.raises(ValueError, match=r"^fp8_gemm_nt: a must start at a multiple of 16 bytes"),
    ):
        gemm.fp8_gemm_nt((shifted, a[1]), b, d)


def test_sizes_of_layouts() -> None:
    assert gemm.get_m_alignment_for_contiguous_layout() == 128
    assert gemm.get_k_alignment_for_contiguous_layout() == 128
    assert gemm.get_mk_alignment_for_contiguous_layout() == 128
    assert gemm.get_tma_aligned_size(5, 4) == 8
    with pytest.raises(ValueError, match=r"^get_tma_aligned_size: element_size"):
        gemm.get_tma_aligned_size(5, 3)
