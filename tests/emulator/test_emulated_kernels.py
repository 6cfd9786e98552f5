"""Generated kernels, run from their own source, against torch."""

from __future__ import annotations

from typing import Any

import pytest
import tilelang
import torch
from tilelang import language as T

from tile_kernels.emulator import emulate

from . import sample_kernels as k
from .helpers import fails, rand, run, unpack_fp4


def check_cast(**options: Any) -> None:
    n, h = 5, 1024
    x = rand(n, h, dtype=torch.bfloat16)
    o, sf = torch.zeros(n, h, dtype=torch.float8_e4m3fn), torch.zeros(n, h // 128)
    run(k.cast_e4m3(h, 128, 2, 128, 16), x, o, sf, **options)
    groups = x.float().view(n, -1, 128)
    amax = groups.abs().amax(-1).clamp_min(1e-4)
    # torch computes 448.0 / amax as a reciprocal and a product; the kernel divides
    q = (groups * (torch.tensor(448.0) / amax)[..., None]).view(n, h).to(torch.float8_e4m3fn)
    assert torch.equal(sf, amax / 448)
    assert torch.equal(o.view(torch.uint8), q.view(torch.uint8))


def check_topk(**options: Any) -> None:
    n, e, top = 9, 64, 4
    s = rand(n, e)
    s[:, 7] = s[:, 3]
    idx, val = torch.zeros(n, top, dtype=torch.int64), torch.zeros(n, top)
    run(k.warp_topk(e, top), s, idx, val, **options)
    want = s.sort(dim=1, descending=True, stable=True)
    assert torch.equal(idx, want.indices[:, :top])
    assert torch.equal(val, want.values[:, :top])


def check_transpose(**options: Any) -> None:
    x = rand(70, 133, dtype=torch.bfloat16)
    y = torch.zeros(133, 70, dtype=torch.bfloat16)
    run(k.transpose(), x, y, **options)
    assert torch.equal(y, x.t())


def check_histogram(**options: Any) -> None:
    ids = torch.randint(0, 257, (5000,), dtype=torch.int32)
    out = torch.zeros(257, dtype=torch.int32)
    run(k.histogram(257), ids, out, **options)
    assert torch.equal(out.long(), torch.bincount(ids, minlength=257))


def check_rowsum(**options: Any) -> None:
    x, w, y = rand(13, 2048), rand(2048, seed=1), torch.zeros(13)
    run(k.pipelined_rowsum(2048), x, w, y, **options)
    torch.testing.assert_close(y.double(), x.double() @ w.double(), rtol=0, atol=1e-4)


def check_softmax(**options: Any) -> None:
    x, y = rand(5, 512, dtype=torch.bfloat16), torch.zeros(5, 512)
    run(k.softmax(512), x, y, **options)
    torch.testing.assert_close(y, x.float().softmax(-1), rtol=1e-6, atol=1e-7)


def check_grid_sum(**options: Any) -> None:
    x = torch.randint(-9, 9, (1024,), dtype=torch.int32)
    part, out = torch.zeros(4, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    run(k.grid_sum(1024), x, part, out, **options)
    assert bool((out == x.sum()).all())


def check_offsets(**options: Any) -> None:
    ids = torch.randint(0, 64, (300,), dtype=torch.int32)
    cnt, off = torch.zeros(64, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
    rank = torch.full((300,), -1, dtype=torch.int32)
    report = run(k.count_and_offsets(64, 128), ids, cnt, off, rank, **options)
    want = torch.bincount(ids, minlength=64)
    assert torch.equal(cnt.long(), want)
    assert torch.equal(off.long(), want.cumsum(0) - want)
    for first in range(0, 300, 128):  # ranks are a permutation within each block and id
        block = slice(first, first + 128)
        for e in ids[block].unique():
            mine = rank[block][ids[block] == e]
            assert sorted(mine.tolist()) == list(range(len(mine)))
    assert [r.name for r in report.kernels] == [
        "count_and_offsets_kernel",
        "count_and_offsets_kernel_1",
    ]


def check_gemm(**options: Any) -> None:
    shape = {n: options.pop(n) for n in ("bk", "trans_b", "tma", "stages") if n in options}
    a = rand(64, 128, dtype=torch.bfloat16)
    b = rand(128, 128, dtype=torch.bfloat16, seed=1)
    c = torch.zeros(64, 128)
    run(k.gemm(64, 128, 128, **shape), a, b, c, **options)
    want = a.double() @ (b.double().t() if shape.get("trans_b", True) else b.double())
    torch.testing.assert_close(c.double(), want, rtol=0, atol=1e-4)


def check_tma_copy(**options: Any) -> None:
    x = rand(70, 136, dtype=torch.bfloat16)
    y = torch.zeros_like(x)
    run(k.tma_copy(70, 136), x, y, **options)
    assert torch.equal(x, y)


def check_bulk_copy(**options: Any) -> None:
    x = rand(3, 512, dtype=torch.bfloat16)
    y = torch.zeros_like(x)
    run(k.bulk_copy(512), x, y, **options)
    assert torch.equal(x, y)


def check_tma_gemm(**options: Any) -> None:
    """Warp-specialised: TMA producer warps, mbarrier pipeline, wgmma consumers."""
    check_gemm(tma=True, stages=3, configs={}, **options)


CASES = [
    check_cast,
    check_topk,
    check_transpose,
    check_histogram,
    check_rowsum,
    check_softmax,
    check_grid_sum,
    check_offsets,
    check_gemm,
    check_tma_copy,
    check_bulk_copy,
    check_tma_gemm,
]


@pytest.mark.parametrize("order", ["forward", "reverse", "random"])
@pytest.mark.parametrize("case", CASES)
def test_correct_kernels_are_right_and_unreported_in_every_order(case: Any, order: str) -> None:
    case(order=order, seed=7)


@pytest.mark.parametrize("case", CASES)
def test_correct_kernels_with_merged_shared_memory(case: Any) -> None:
    case(split_shared=False)


@pytest.mark.parametrize("case", [check_rowsum, check_tma_copy, check_tma_gemm])
def test_asynchronous_copies_may_also_land_at_once(case: Any) -> None:
    case(async_late=False)


@pytest.mark.parametrize("case", [check_cast, check_topk, check_rowsum, check_grid_sum])
def test_fast_mode_gives_the_same_results(case: Any) -> None:
    case(mode="fast", order="reverse")


@pytest.mark.parametrize(
    ("case", "arch"),
    [
        (check_cast, "sm_80"),
        (check_rowsum, "sm_80"),
        (check_offsets, "sm_89"),
        (check_cast, "sm_100a"),
        (check_offsets, "sm_120a"),
        pytest.param(check_cast, "sm_89", marks=pytest.mark.full),
        pytest.param(check_cast, "sm_120a", marks=pytest.mark.full),
        *(
            pytest.param(check_rowsum, arch, marks=pytest.mark.full)
            for arch in ("sm_89", "sm_100a", "sm_120a")
        ),
        *(pytest.param(check_offsets, a, marks=pytest.mark.full) for a in ("sm_80", "sm_100a")),
    ],
)
def test_sources_of_other_architectures(case: Any, arch: str) -> None:
    case(arch=arch)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_explicit_vector_accesses(arch: str) -> None:
    """TileLang can spell loads and stores as PTX: plain and predicated, 16 and 32 bytes wide."""
    configs = {
        **k.PLAIN,
        k.CFG.TL_ENABLE_LOWER_LDGSTG: True,
        k.CFG.TL_ENABLE_LOWER_LDGSTG_PREDICATED: True,
    }
    check_cast(configs=configs, arch=arch)
    check_softmax(configs=configs, arch=arch)


@pytest.mark.parametrize(
    "options",
    [
        {"arch": "sm_80"},
        {"arch": "sm_80", "trans_b": False},
        {"trans_b": False},
        {"bk": 64},
        {"bk": 16},
    ],
    ids=["mma", "mma-nn", "wgmma-nn", "wgmma-128B", "wgmma-32B"],
)
def test_gemm_layouts(options: dict[str, Any]) -> None:
    check_gemm(**options)


def test_gemm_with_a_in_registers() -> None:
    a, b = rand(64, 64, dtype=torch.bfloat16), rand(64, 64, dtype=torch.bfloat16, seed=1)
    c = torch.zeros(64, 64)
    run(k.gemm_a_in_registers(64, 64, 64), a, b, c)
    torch.testing.assert_close(c.double(), a.double() @ b.double().t(), rtol=0, atol=1e-4)


def test_gemm_that_stores_with_stmatrix() -> None:
    a, b = rand(64, 64, dtype=torch.bfloat16), rand(64, 64, dtype=torch.bfloat16, seed=1)
    c = torch.zeros(64, 64, dtype=torch.bfloat16)
    prim = k.gemm_stmatrix(64, 64, 64)
    run(prim, a, b, c)
    want = (a.double() @ b.double().t()).float().to(torch.bfloat16)
    # accumulation order may move a value across one bf16 rounding boundary
    torch.testing.assert_close(c, want, rtol=2**-7, atol=0)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_gemm_makes_one_nan(arch: str) -> None:
    """Whatever the sign and the payload of the NaN that came, or none: infinity times zero."""
    a, b = (torch.ones(64, 64, dtype=torch.bfloat16) for _ in range(2))
    a[3, 5], a[7, 9], a[9, 1], b[2, 1] = float("nan"), -float("nan"), float("inf"), 0.0
    c = torch.zeros(64, 64)
    run(k.gemm(64, 64, 64, bk=64, stages=0), a, b, c, arch=arch)
    assert c.isnan().nonzero().tolist() == [[r, n] for r in (3, 7) for n in range(64)] + [[9, 2]]
    assert set(c[c.isnan()].view(torch.int32).tolist()) == {0x7FFFFFFF}


@pytest.mark.parametrize(
    ("dtype", "acc", "arch", "tolerance"),
    [
        ("int8", "int32", "sm_80", 0.0),
        ("int8", "int32", "sm_90a", 0.0),
        ("float32", "float32", "sm_80", 0.0),  # tf32: the inputs below are exact in it
        ("float8_e4m3fn", "float32", "sm_90a", 1e-3),
        ("float16", "float16", "sm_90a", 0.0),
    ],
)
def test_gemm_element_types(dtype: str, acc: str, arch: str, tolerance: float) -> None:
    g = torch.Generator().manual_seed(0)
    a = torch.randint(-4, 5, (64, 64), generator=g).to(getattr(torch, dtype))
    b = torch.randint(-4, 5, (64, 64), generator=g).to(getattr(torch, dtype))
    c = torch.zeros(64, 64, dtype=getattr(torch, acc))
    run(k.gemm(64, 64, 64, dtype=dtype, acc_dtype=acc, bk=64, stages=0), a, b, c, arch=arch)
    want = a.double() @ b.double().t()
    assert (c.double() - want).abs().max().item() <= tolerance


def test_gemm_of_tf32_tensors() -> None:
    """Their dtype is TileLang's own; PyTorch's is float32."""
    a, b = (torch.arange(4096).view(64, 64) % m - 3.0 for m in (7, 5))
    c = torch.zeros(64, 64)
    kernel = k.gemm(64, 64, 64, dtype=T.tfloat32, acc_dtype="float32", bk=32, stages=0)
    run(kernel, a, b, c, arch="sm_90a")
    assert torch.equal(c, a @ b.t())


@pytest.mark.parametrize("reverse", [False, True])
def test_scan(reverse: bool) -> None:
    x, y = torch.arange(300).float(), torch.zeros(300)
    run(k.scan(300, reverse=reverse), x, y)
    assert torch.equal(y, x.flip(0).cumsum(0).flip(0) if reverse else x.cumsum(0))


@pytest.mark.parametrize(
    ("src", "dst", "body", "want"),
    [
        ("float16", "float16", lambda v: v * v, lambda x: x * x),
        ("bfloat16", "bfloat16", lambda v: T.max(v, v * v), lambda x: torch.maximum(x, x * x)),
        ("float8_e4m3fn", "bfloat16", lambda v: T.cast(v, T.bfloat16), lambda x: x.bfloat16()),
        ("float32", "float8_e5m2", lambda v: v, lambda x: x.to(torch.float8_e5m2)),
        ("float32", "int32", lambda v: T.cast(T.floor(v), T.int32), lambda x: x.floor().int()),
        ("bfloat16", "float8_e4m3fn", lambda v: v, lambda x: x.to(torch.float8_e4m3fn)),
        ("float32", "float32", T.round, lambda x: x.round()),
        ("float32", "float32", lambda v: T.clamp(v, -0.5, 0.5), lambda x: x.clamp(-0.5, 0.5)),
        ("int32", "int32", lambda v: (v >> 3) * 5 + v % 7, lambda x: (x >> 3) * 5 + x.remainder(7)),
    ],
)
def test_elementwise_bit_for_bit(src: str, dst: str, body: Any, want: Any) -> None:
    x = (rand(256) * (3 if src != "int32" else 1000)).to(getattr(torch, src))
    y = torch.zeros(256, dtype=getattr(torch, dst))
    run(k.elementwise(256, src, dst, body), x, y)
    assert torch.equal(y.view(torch.uint8), want(x).view(torch.uint8))


def test_math_functions_are_close() -> None:
    x, y = rand(256), torch.zeros(256)

    def body(v: Any) -> Any:  # every function once, on arguments inside its domain
        a = T.abs(v)
        first = T.sigmoid(v) + T.rsqrt(a + 1.0) + T.log(a + 1.0) + T.sqrt(a)
        return first + T.tanh(v) + T.pow(a, 0.5) + T.exp(v)

    run(k.elementwise(256, "float32", "float32", body), x, y)
    a = x.abs()
    want = x.sigmoid() + (a + 1).rsqrt() + (a + 1).log() + a.sqrt() + x.tanh() + a**0.5 + x.exp()
    torch.testing.assert_close(y, want, rtol=1e-6, atol=2e-6)


def test_reduce_rows() -> None:
    x = torch.randint(-50, 50, (16, 256)).float()  # sums exact in float
    total, least = torch.zeros(16), torch.zeros(16)
    run(k.reduce_rows(16, 256), x, total, least)
    assert torch.equal(total, x.sum(1))
    assert torch.equal(least, x.amin(1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_packed_abs_and_max(dtype: torch.dtype) -> None:
    x, y = rand(4, 512, dtype=dtype), torch.zeros(4, dtype=dtype)
    run(k.absmax_rows(512, str(dtype).removeprefix("torch.")), x, y)
    assert torch.equal(y, x.abs().amax(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_atomics(dtype: torch.dtype) -> None:
    x = torch.randint(0, 2, (256,)).to(dtype)  # small integers: every order gives the same sum
    total, most, pairs = (torch.zeros(n, dtype=dtype) for n in (1, 1, 2))
    run(k.atomics(str(dtype).removeprefix("torch.")), x, total, most, pairs)
    assert total.item() == x[:128].float().sum()
    assert most.item() == x[:128].float().max()
    assert torch.equal(pairs.float(), x.float().view(-1, 2).sum(0))


def test_atomic_quads() -> None:
    x, z = torch.randint(0, 9, (256,)).float(), torch.zeros(4)
    run(k.atomic_quads(), x, z)
    assert torch.equal(z, x.view(-1, 4).sum(0))


def test_e8m0_scales() -> None:
    x = torch.tensor([1.0, 1.5, 2.0, 3.0, 0.25, 0.3, 448.0, 1e-3] * 32)
    scale = torch.zeros(256, dtype=torch.float8_e8m0fnu)
    body = lambda v: T.cast(v, T.float8_e8m0fnu)  # noqa: E731
    run(k.elementwise(256, "float32", "float8_e8m0fnu", body), x, scale)
    want = torch.exp2(torch.log2(x.double()).ceil()).float()  # rounds up to a power of two
    assert torch.equal(scale.float(), want)
    back = torch.zeros(256, dtype=torch.bfloat16)
    body = lambda v: T.cast(v, T.bfloat16)  # noqa: E731
    run(k.elementwise(256, "float8_e8m0fnu", "bfloat16", body), scale, back)
    assert torch.equal(back.float(), want)


@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("order", ["row", "column"])
def test_block_swizzle_visits_every_block_once(order: str, cluster: int) -> None:
    y = torch.full((7, 6), -1, dtype=torch.int32)
    report = run(k.swizzled_grid(7, 6, 4, order, cluster), y)
    rows, cols = torch.meshgrid(torch.arange(7), torch.arange(6), indexing="ij")
    assert torch.equal(y, (rows * 100 + cols).int())
    assert report.blocks == 42


@pytest.mark.parametrize("src", ["float32", "bfloat16", "float16"])
def test_fp4_conversion_rounds_to_nearest_even(src: str) -> None:
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 0.0, 7.0, 100.0]
    x = torch.cat([torch.tensor(ties), -torch.tensor(ties), rand(236) * 3]).to(getattr(torch, src))
    packed, y = torch.zeros(128, dtype=torch.uint8), torch.zeros(256)
    run(k.fp4_round_trip(256, src), x, packed, y)
    assert torch.equal(unpack_fp4(packed), y)
    assert y[:10].tolist() == [0, 1, 1, 2, 2, 4, 4, 0, 6, 6]
    assert y[10:20].tolist() == [0, -1, -1, -2, -2, -4, -4, 0, -6, -6]
    distance = (x.float().clamp(-6, 6)[:, None] - unpack_fp4(torch.arange(256).byte())).abs()
    assert torch.equal((x.float().clamp(-6, 6) - y).abs(), distance.amin(1))


def test_fp4_widening_covers_all_codes() -> None:
    packed = torch.arange(256, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    b, q, h = (
        torch.zeros(512, dtype=d) for d in (torch.bfloat16, torch.float8_e4m3fn, torch.float16)
    )
    run(k.fp4_widen(512), packed, b, q, h)
    want = unpack_fp4(packed)
    for got in (b, q, h):
        assert torch.equal(got.float(), want)
        assert torch.equal(torch.signbit(got.float()), torch.signbit(want))


def test_packed_fp4_matrix() -> None:
    packed = torch.arange(256, dtype=torch.uint8).view(4, 64)
    y = torch.zeros(4, 128)
    run(k.fp4_rows(128), packed, y)
    assert torch.equal(y, unpack_fp4(packed))


def test_scalar_fp4_stores_of_neighbouring_threads_race() -> None:
    """One value per thread makes two threads rewrite the same byte: a real hazard, reported."""
    x, packed, y = rand(32), torch.zeros(16, dtype=torch.uint8), torch.zeros(32)
    error = fails("race", k.fp4_round_trip(32, "float32"), x, packed, y)
    assert error.buffer == "packed"


def test_emulate_accepts_a_jit_factory_a_builder_and_a_prim_func() -> None:
    x, y = rand(4, 512, dtype=torch.bfloat16), torch.zeros(4, 512)
    want = x.float().softmax(-1)
    factory = tilelang.jit(target={"kind": "cuda", "arch": "sm_90a"}, pass_configs=k.PLAIN)(
        k.softmax
    )
    for kernel, static in ((factory, (512,)), (k.softmax, (512,)), (k.softmax(512), ())):
        y.zero_()
        emulate(kernel, static, {"x": x, "y": y}, pass_configs=k.PLAIN)
        torch.testing.assert_close(y, want, rtol=1e-6, atol=1e-7)
