"""Products with e2m1 weights: preparation, bits of the e4m3 product, all codes, shifts and NaN."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tile_kernels
from tests.gemm.operands import E4M3, each_ground, integers, on, set_tile
from tile_kernels import gemm, quant
from tile_kernels.gemm import samples, tiling
from tile_kernels.gemm.fp8_fp4.cases import e2m1
from tile_kernels.gemm.m_grouped.cases import fp8 as contiguous
from tile_kernels.gemm.masked.cases import fp8 as masked
from tile_kernels.quant import formats, scales
from tile_kernels.testing.numeric import calc_diff
from tile_kernels.torch import expanded_fp4_weights

BF16 = torch.bfloat16
TILES = [tiling.FEW_ROWS, tiling.NARROW, tiling.Tile(128, 128, 4, 4, separate=True, cluster=1)]


def cast(n: int, k: int, device: str = "cpu", **more: Any) -> Any:
    """Random normal weights as e2m1 with 1 x 32 scales."""
    torch.manual_seed(n + k)
    w = torch.randn(n, k, device=device)
    return w, quant.per_token_cast(w, "e2m1", 32, round_sf=True, **more)


# ---- preparation --------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("n", "k"), [(8, 128), (136, 256), (264, 640)])
def test_preparation_keeps_values(n: int, k: int, packed: bool) -> None:
    flags = {"use_packed_ue8m0": True, "use_tma_aligned_col_major_sf": True} if packed else {}
    _, (data, sf) = cast(n, k, **flags)
    prepared = gemm.prepare_fp4_weights((data, sf))
    assert prepared.data is data
    codes, blocks = expanded_fp4_weights(*prepared)
    exact = formats.decode_e2m1(data) * scales.read_sf(sf).repeat_interleave(32, -1)[:, :k]
    wide = blocks.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)
    assert torch.equal(codes.float() * wide, exact)
    lossless = quant.per_block_cast_lossless((data, sf), "e4m3", (1, 32), (128, 128))
    assert torch.equal(codes.view(torch.uint8), lossless[0].view(torch.uint8))
    assert torch.equal(blocks, lossless[1])


def test_groups_are_prepared_one_by_one() -> None:
    parts = [cast(16, 256)[1] for _ in range(3)]
    parts[1][1][3, 2] *= 4
    data, sf = (torch.stack([part[i] for part in parts]) for i in (0, 1))
    prepared = gemm.prepare_fp4_weights((data, sf))
    for g, part in enumerate(parts):
        alone = gemm.prepare_fp4_weights(part)
        assert torch.equal(prepared.shifts[g], alone.shifts)
        assert torch.equal(prepared.scales[g], alone.scales)


def test_groups_of_zeros_do_not_count() -> None:
    data = torch.full((8, 64), 0x22, dtype=torch.int8)
    data[0, :16] = 0
    data[1, :16] = -0x78  # 0x88: zeros with a sign
    sf = torch.ones(8, 4)
    sf[:2, 0] = 2.0**-100
    sf[2, 1] = 0.0
    codes, blocks = expanded_fp4_weights(*gemm.prepare_fp4_weights((data, sf)))
    exact = torch.ones(8, 128)
    exact[:2, :32] = 0
    exact[2, 32:64] = 0
    assert torch.equal(codes.float() * blocks, exact)


def test_the_whole_range_of_a_block_and_no_more() -> None:
    data = torch.full((8, 64), 0x22, dtype=torch.int8)
    sf = torch.ones(8, 4)
    sf[5, 3] = 2.0**-11
    assert gemm.prepare_fp4_weights((data, sf)).shifts[0, 5].item() & 0xFFFF == 0x0BBB
    sf[5, 3] = 2.0**-12
    match = r"^prepare_fp4_weights: the scales of weights .* 2\*\*11 .* \[5, 3\] is 2\*\*-12"
    with pytest.raises(ValueError, match=match):
        gemm.prepare_fp4_weights((data, sf))


GOOD = torch.zeros(8, 64, dtype=torch.int8), torch.ones(8, 4)


@pytest.mark.parametrize(
    ("weights", "error", "match"),
    [
        (GOOD[0], TypeError, "weights must be a pair"),
        ((GOOD[0], 1.0), TypeError, "weights must be a pair of tensors"),
        ((GOOD[0].int(), GOOD[1]), TypeError, "weights must be int8"),
        ((GOOD[0][:5], GOOD[1][:5]), ValueError, "weights must have a multiple of 8 rows"),
        ((GOOD[0][:, :32].contiguous(), GOOD[1]), ValueError, "multiple of 8 rows and of 128"),
        ((GOOD[0], GOOD[1].double()), TypeError, "the scales of weights must be"),
        ((GOOD[0], GOOD[1][:, :3]), ValueError, "the scales of weights must have shape"),
        ((GOOD[0], GOOD[1] * 3), ValueError, "the scales of weights must be powers of two"),
        ((GOOD[0], -GOOD[1]), ValueError, "the scales of weights must be powers of two"),
    ],
)
def test_what_cannot_be_prepared(weights: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=f"^prepare_fp4_weights: .*{match}"):
        gemm.prepare_fp4_weights(weights)


# ---- products -----------------------------------------------------------------------------------


@each_ground
def test_every_code_with_every_shift(ground: tuple[str, str]) -> None:
    """One channel for each row: a wrong table, swizzle or order of codes changes the result."""
    device, k = ground[1], 256
    n = k
    codes = torch.zeros(n, k, dtype=torch.uint8)
    channels = torch.arange(k)
    codes[channels, channels] = (channels % 16).to(torch.uint8)
    shift = channels // 16 % 12
    packed = torch.zeros(k // 128, n, dtype=torch.int32)
    packed[channels // 128, channels] = shift.int() << (channels % 128 // 32 * 4).int()
    b = (
        formats.pack_e2m1(codes).to(device),
        packed.to(torch.int16).to(device),
        torch.ones(2, 2, device=device),
    )
    a = integers(70, k, device=device, low=-8, high=8), torch.ones(70, 2, device=device)
    with on(ground):
        d = gemm.fp8_fp4_gemm_nt(a, b, torch.empty(70, n, device=device))
    table = formats.decode_e2m1(formats.pack_e2m1(codes)).diagonal()
    factors = (table * (shift - 5).float().exp2()).to(device)
    assert torch.equal(d, a[0].float() * factors)


@each_ground
def test_dense_bits_are_those_of_the_expanded_weights(
    ground: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = ground[1]
    shapes = [(7, 136, 1280), (130, 264, 256)]
    if device == "cuda":
        shapes = [(1, 4096, 7168), (128, 4096, 7168), (1030, 2112, 7168), (4096, 4096, 2048)]
    for m, n, k in shapes:
        torch.manual_seed(m + n + k)
        a = samples.by_rows(torch.randn(m, k, device=device))
        b = samples.fp4_weights((n, k), torch.device(device))
        wide = expanded_fp4_weights(*b)
        for dtype in (BF16, torch.float32):
            with on(ground):
                expected = gemm.fp8_gemm_nt(a, wide, torch.empty(m, n, dtype=dtype, device=device))
                for tile in (None, *TILES[: 1 if device == "cpu" else None]):
                    set_tile(monkeypatch, tile)
                    d = torch.full_like(expected, torch.nan)
                    assert torch.equal(gemm.fp8_fp4_gemm_nt(a, b, d), expected)
                set_tile(monkeypatch, None)


@each_ground
def test_contiguous_bits_are_those_of_the_expanded_weights(ground: tuple[str, str]) -> None:
    device = ground[1]
    small = device == "cpu"
    counts, n, k = ([130, 0, 1, 128], 264, 640) if small else ([1300, 1, 640, 0, 900], 4096, 2048)
    for psum in (False, True):
        torch.manual_seed(0)
        given = e2m1(contiguous(counts, n, k, 1, psum))(torch.device(device))
        wide = {**given, "b": expanded_fp4_weights(*given["b"])}
        with on(ground):
            found = gemm.m_grouped_fp8_fp4_gemm_nt_contiguous(**given).clone()
            expected = gemm.m_grouped_fp8_gemm_nt_contiguous(**wide)
        assert not found.isnan().any()
        assert torch.equal(found, expected)


@each_ground
def test_masked_bits_are_those_of_the_expanded_weights(ground: tuple[str, str]) -> None:
    device = ground[1]
    small = device == "cpu"
    sizes, max_m, n, k = (
        ([20, 0, 130], 130, 264, 640) if small else ([0, 1, 20, 64, 65, 192, 512], 512, 4096, 7168)
    )
    for hint in (1, 100):
        torch.manual_seed(0)
        given = e2m1(masked(sizes, max_m, n, k, hint))(torch.device(device))
        wide = {**given, "b": expanded_fp4_weights(*given["b"])}
        wide["d"] = torch.full_like(given["d"], torch.nan)
        with on(ground):
            found = gemm.m_grouped_fp8_fp4_gemm_nt_masked(**given)
            expected = gemm.m_grouped_fp8_gemm_nt_masked(**wide)
        for g, size in enumerate(sizes):
            assert not found[g, :size].isnan().any()
            assert torch.equal(found[g, :size], expected[g, :size])


@each_ground
def test_nan_stays_in_its_column(ground: tuple[str, str]) -> None:
    device = ground[1]
    data = torch.full((136, 64), 0x22, dtype=torch.int8, device=device)
    sf = torch.ones(136, 4, device=device)
    sf[130, 2] = torch.inf
    a = integers(3, 128, device=device), torch.ones(3, 1, device=device)
    with on(ground):
        b = gemm.prepare_fp4_weights((data, sf))
        d = gemm.fp8_fp4_gemm_nt(a, b, torch.empty(3, 136, device=device))
    assert d[:, 130].isnan().all()
    assert torch.equal(d.isnan().sum(1), torch.ones(3, dtype=torch.int64, device=device))


@each_ground
def test_accuracy_of_cast_weights(ground: tuple[str, str]) -> None:
    """One operand in e2m1: DeepGEMM asks for 1e-2 against the product before the casts."""
    device = ground[1]
    w, pair = cast(264, 640, device)
    x = torch.randn(40, 640, device=device)
    a = samples.by_rows(x)
    with on(ground):
        d = gemm.fp8_fp4_gemm_nt(
            a, pair, torch.empty(40, 264, dtype=BF16, device=device), recipe_a=(1, 128),
            recipe_b=(1, 32),
        )  # fmt: skip
    assert calc_diff(d, x.double() @ w.double().T) < 1e-2


def test_e4m3_weights_are_accepted() -> None:
    """The names with `fp8_fp4` are those of DeepGEMM for both formats."""
    torch.manual_seed(0)
    given = masked([3, 2], 4, 16, 128)(torch.device("cpu"))
    expected = gemm.m_grouped_fp8_gemm_nt_masked(**{**given, "d": given["d"].clone()})
    found = gemm.m_grouped_fp8_fp4_gemm_nt_masked(**given)
    assert torch.equal(found.nan_to_num(), expected.nan_to_num())
    given = contiguous([3, 2], 16, 128)(torch.device("cpu"))
    expected = gemm.m_grouped_fp8_gemm_nt_contiguous(**{**given, "d": given["d"].clone()})
    assert torch.equal(gemm.m_grouped_fp8_fp4_gemm_nt_contiguous(**given), expected)
    a, b = given["a"], (torch.ones(8, 128).to(E4M3), torch.ones(8, 1))
    rows = tuple(part[:3].contiguous() for part in a)
    expected = gemm.fp8_gemm_nt(rows, b, torch.empty(3, 8), recipe=(1, 1, 128))
    assert torch.equal(
        gemm.fp8_fp4_gemm_nt(rows, b, torch.empty(3, 8), None, (1, 1, 128)), expected
    )


@pytest.mark.gpu
def test_a_graph_is_replayed_with_other_sizes() -> None:
    torch.manual_seed(0)
    given = e2m1(masked([40, 3, 64, 0], 64, 1024, 1024))(torch.device("cuda"))
    given["a"][0].view(torch.uint8).bitwise_and_(0xBF)  # no NaN
    given["a"][1].nan_to_num_(1.0)
    product = gemm.m_grouped_fp8_fp4_gemm_nt_masked
    product(**given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        product(**given)
    for sizes in ([0, 0, 0, 64], [1, 2, 3, 4], [100, -5, 7, 0]):
        given["masked_m"].copy_(torch.tensor(sizes))
        given["d"].zero_()
        graph.replay()
        expected = product(**{**given, "d": torch.zeros_like(given["d"])})
        torch.cuda.synchronize()
        assert torch.equal(given["d"], expected)


@pytest.mark.gpu
def test_sm_budgets_have_the_same_bits() -> None:
    torch.manual_seed(0)
    given = e2m1(contiguous([1300, 0, 640, 900], 4096, 2048))(torch.device("cuda"))
    product = gemm.m_grouped_fp8_fp4_gemm_nt_contiguous
    expected = product(**given).clone()
    full = tile_kernels.get_device_num_sms()
    try:
        for budget in (1, 20, full - 1):
            tile_kernels.set_num_sms(budget)
            assert torch.equal(product(**{**given, "d": torch.empty_like(expected)}), expected)
    finally:
        tile_kernels.set_num_sms(full)
