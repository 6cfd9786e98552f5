"""Device intrinsics in hand-written kernels, with expected values from their meaning."""

from __future__ import annotations

import ctypes
import dataclasses
import math
import re

import pytest
import torch

from tile_kernels.emulator import Emulated, EmulationError

from .helpers import cuda_source, rand, reports_in_all_orders

LANES = torch.arange(32)


def ints(n: int, value: int = 0) -> torch.Tensor:
    return torch.full((n,), value, dtype=torch.int32)


def test_shuffles_votes_and_reductions() -> None:
    probe = cuda_source(
        """
  int t = threadIdx.x, v = t * t;
  int r[] = {
    __shfl_sync(~0u, v, 5), __shfl_up_sync(~0u, v, 3), __shfl_down_sync(~0u, v, 3), __shfl_xor_sync(~0u, v, 9),
    __shfl_sync(~0u, v, 1, 8), (int)__ballot_sync(~0u, t % 3 == 0), __any_sync(~0u, t == 31), __all_sync(~0u, t < 31),
    (int)__match_any_sync(~0u, t / 4), 0, __reduce_add_sync(~0u, v), __reduce_min_sync(~0u, -t), __reduce_max_sync(~0u, -t),
    (int)__reduce_min_sync(~0u, (unsigned)-t), (int)__reduce_and_sync(~0u, (unsigned)t | 64u), (int)__reduce_or_sync(~0u, (unsigned)t),
    (int)__reduce_xor_sync(~0u, 1u << t), tl::warp_reduce_sum(t), tl::warp_reduce_max(t), tl::warp_reduce_min(t),
  };
  int same;
  r[9] = (int)__match_all_sync(~0u, 7, &same) + same;
  for (int i = 0; i < 20; ++i) y[i * 32 + t] = r[i];
""",  # noqa: E501
        {"y": "int"},
    )
    y = ints(20 * 32)
    probe(y)
    t, v = LANES, LANES * LANES
    third = sum(1 << i for i in range(0, 32, 3))
    third -= 1 << 32 if third >> 31 else 0
    groups = [(0xF << (i // 4 * 4)) for i in range(32)]
    want = [
        v[5].expand(32),
        torch.where(t >= 3, v[(t - 3).clamp_min(0)], v),
        torch.where(t < 29, v[(t + 3).clamp_max(31)], v),
        v[t ^ 9],
        v[t // 8 * 8 + 1],
        torch.tensor(third).expand(32),
        torch.tensor(1).expand(32),
        torch.tensor(0).expand(32),
        torch.tensor([g - (1 << 32) if g >> 31 else g for g in groups]),
        torch.tensor(0).expand(32),  # all lanes match (-1), and the flag is 1
        v.sum().expand(32),
        torch.tensor(-31).expand(32),
        torch.tensor(0).expand(32),
        torch.tensor(0).expand(32),
        torch.tensor(64).expand(32),
        torch.tensor(31).expand(32),
        torch.tensor(-1).expand(32),
        t.sum().expand(32),
        torch.tensor(31).expand(32),
        torch.tensor(0).expand(32),
    ]
    for i, (got, expected) in enumerate(zip(y.view(20, 32), want, strict=True)):
        assert torch.equal(got, expected.int()), i


def test_disjoint_masks_shuffle_independently() -> None:
    probe = cuda_source(
        "int t = threadIdx.x; unsigned m = t < 16 ? 0xffffu : 0xffff0000u;\n"
        "if (t < 16) y[t] = __shfl_sync(m, t, 3); else y[t] = __shfl_sync(m, t, 20);",
        {"y": "int"},
    )
    y = ints(32)
    probe(y, order="random", seed=3)
    assert y.tolist() == [3] * 16 + [20] * 16


def test_block_votes() -> None:
    probe = cuda_source(
        "int t = threadIdx.x;\n"
        "int count = __syncthreads_count(t % 5 == 0), any = __syncthreads_or(t == 70);\n"
        "y[t] = count * 100 + any * 10 + __syncthreads_and(t < 95);",
        {"y": "int"},
        threads=96,
    )
    y = ints(96)
    report = probe(y)
    assert y.tolist() == [20 * 100 + 10 + 0] * 96
    assert report.barriers == 3


def test_named_barriers_order_a_producer_and_a_consumer_warp() -> None:
    body = """
  __shared__ int s[32];
  int t = threadIdx.x;
  if (t < 32) {{ s[t] = t + 1; {arrive} }}
  else {{ tl::__sync_thread_partial(1, 64); y[t - 32] = s[63 - t]; }}
"""
    y = ints(32)
    arrive = "tl::__named_barrier_arrive(1, 64);"
    cuda_source(body.format(arrive=arrive), {"y": "int"}, threads=64)(y, order="reverse")
    assert y.tolist() == list(range(32, 0, -1))
    early = body.replace("s[t] = t + 1; {arrive}", "{arrive} s[t] = t + 1;").format(arrive=arrive)
    with pytest.raises(EmulationError, match="race"):
        cuda_source(early, {"y": "int"}, threads=64)(y)


def test_barrier_with_too_many_threads_and_unknown_number() -> None:
    with pytest.raises(EmulationError, match="waits for 64 threads, the block has 32"):
        cuda_source("emu::bar_sync(1, 64); y[0] = 1;", {"y": "int"})(ints(1))
    with pytest.raises(EmulationError, match="barrier 16 does not exist"):
        cuda_source("emu::bar_sync(16, 32); y[0] = 1;", {"y": "int"})(ints(1))


def test_bits_and_integers() -> None:
    probe = cuda_source(
        """
  y[0] = __popc(0xf0f0u); y[1] = __clz(1); y[2] = __clz(0); y[3] = __ffs(0x10); y[4] = (int)__brev(1u);
  y[5] = (int)__umulhi(0x80000000u, 6u); y[6] = __mulhi(-0x40000000, 8); y[7] = (int)__byte_perm(0x03020100u, 0x07060504u, 0x7016u);
  y[8] = __dp4a(0x01020304, 0x01010101, 5); y[9] = __float_as_int(1.5f); y[10] = __float2int_rn(2.5f); y[11] = __float2int_ru(2.1f);
  y[12] = __popcll(~0ull); y[13] = tl_int4_packed_load((const signed char *)"\\xf7", 1); y[14] = __float2int_rd(-2.1f); y[15] = max(3u, 4);
""",  # noqa: E501
        {"y": "int"},
        threads=1,
    )
    y = ints(16)
    probe(y)
    want = [8, 31, 32, 5, -(1 << 31), 3, -2, 0x07000106, 15, 0x3FC00000, 2, 3, 64, -1, -3, 4]
    assert y.tolist() == want


def test_nan_rules_of_min_max_and_clamp() -> None:
    probe = cuda_source(
        """
  float n = CUDART_NAN_F;
  y[0] = max(n, 1.f); y[1] = min(2.f, n); y[2] = tl::clamp(n, 0.f, 1.f); y[3] = tl::clamp(5.f, 0.f, 1.f);
  y[4] = tl::MaxOp()(n, 3.f); y[5] = float(tl::MaxOpNan()(bfloat16_t(n), bfloat16_t(3.f))); y[6] = float(tl::MaxOp()(bfloat16_t(n), bfloat16_t(3.f)));
""",  # noqa: E501
        {"y": "float"},
        threads=1,
    )
    y = torch.zeros(7)
    probe(y)
    want = torch.tensor([1, 2, torch.nan, 1, 3, torch.nan, 3])
    assert torch.equal(y.isnan(), want.isnan())
    assert torch.equal(y.nan_to_num(-1), want.nan_to_num(-1))


@pytest.mark.parametrize("nan", [0x7F810000, 0xFF810000, 0x7FA00001, 0x7FC00000, 0xFFFFFFFF])
def test_max_and_min_drop_every_nan(nan: int) -> None:
    """Quiet and signalling, on either side, as PTX defines max and min."""
    names = "fmaxf", "fminf", "fmax", "fmin", "max", "min", "tl::fast_max", "tl::fast_min"
    names = *names, "tl::MaxOp()", "tl::MinOp()"
    calls = [call for name in names for call in (f"{name}(n, o)", f"{name}(o, n)")]
    narrow = [f"bfloat16_t({x})" for x in ("n", "o")]
    shims = "tl::MaxOp()", "tl::MinOp()", "tl::max", "tl::min", "max", "min"
    calls += [f"float({name}({a}, {b}))" for name in shims for a, b in (narrow, narrow[::-1])]
    pair = "make_float2(n, o), make_float2(o, n)"
    calls += [f"tl::{name}({pair}).{part}" for name in ("max2", "min2") for part in "xy"]
    probe = cuda_source(
        f"float n = x[0], o = x[1];\n{' '.join(f'y[{i}] = {c};' for i, c in enumerate(calls))}",
        {"x": "float", "y": "float"},
        threads=1,
    )
    x = torch.tensor([nan, 0x40400000]).to(torch.int32).view(torch.float32)
    y = torch.zeros(len(calls))
    probe(x, y)
    assert [call for call, value in zip(calls, y.tolist()) if value != 3.0] == []


def test_max_and_min_of_two_nans_and_of_zeros() -> None:
    probe = cuda_source(
        "float s = x[0], q = x[1], p = x[2], m = x[3];\n"
        "y[0] = fmaxf(s, q); y[1] = fminf(s, s); y[2] = max(q, s); y[3] = tl::MinOp()(q, q);\n"
        "y[4] = fmaxf(p, m); y[5] = max(m, p); y[6] = fminf(p, m); y[7] = min(m, p);",
        {"x": "float", "y": "float"},
        threads=1,
    )
    x = torch.tensor([0x7F810000, 0xFFC00000, 0, 0x80000000]).to(torch.int32).view(torch.float32)
    y = torch.zeros(8)
    probe(x, y)
    bits = [value & 0xFFFFFFFF for value in y.view(torch.int32).tolist()]
    assert bits == [0x7FFFFFFF] * 4 + [0, 0, 0x80000000, 0x80000000]


def test_explicitly_rounded_operations_are_never_fused() -> None:
    """a * b + c with exact product a * b - 1: 2^-46 if fused, 0 if rounded in between."""
    probe = cuda_source(
        "float a = x[0], b = x[1];\n"
        "y[0] = __fadd_rn(__fmul_rn(a, b), -1.f); y[1] = __fmaf_rn(a, b, -1.f);\n"
        "__half2 u = __float2half2_rn(x[2]), h = tl::fma2(u, u, __float2half2_rn(-1.f));\n"
        "y[2] = __half2float(h.x);",
        {"x": "float", "y": "float"},
        threads=1,
    )
    x = torch.tensor([1 + 2**-23, 1 - 2**-23, 1 + 2**-9])
    y = torch.zeros(3)
    probe(x, y)
    assert y[0].item() == 0.0
    assert y[1].item() == -(2**-46)
    assert y[2].item() == 2**-8 + 2**-18  # the product is not rounded to half before the sum


def test_sixteen_bit_atomics_and_orders() -> None:
    probe = cuda_source(
        """
  AtomicAdd(&h[0], half_t(1.f)); AtomicMax(&h[1], half_t(float(threadIdx.x)), 4); AtomicMin(&b[0], bfloat16_t(-float(threadIdx.x)));
  AtomicAddx2(&b[2], make_float2(1.f, 2.f));
  unsigned pair = __pack_half2(half_t(0.5f), half_t(0.25f));
  AtomicAddx2(&h[2], pair);
  AtomicOr(&u[0], 1u << threadIdx.x); AtomicXor(&u[1], 3u); u[2 + threadIdx.x] = atomicExch(&u[40 + threadIdx.x], 7u);
""",  # noqa: E501
        {"h": "half_t", "b": "bfloat16_t", "u": "unsigned"},
    )
    h, b = torch.zeros(4, dtype=torch.float16), torch.zeros(4, dtype=torch.bfloat16)
    u = torch.zeros(80, dtype=torch.uint32)
    probe(h, b, u)
    assert h.tolist() == [32, 31, 16, 8]
    assert b.tolist() == [-31, 0, 32, 64]
    assert u[0].item() == 0xFFFFFFFF
    assert u[1].item() == 0
    assert u[40:72].tolist() == [7] * 32
    assert u[2:34].tolist() == [0] * 32


def test_compare_and_swap_spin_lock_across_blocks() -> None:
    """Ordered loads yield, so a wait for another resident block ends."""
    probe = cuda_source(
        """
  if (threadIdx.x) return;
  while (AtomicLoad(&y[0], 2) != (int)blockIdx.x) {}
  y[1] = y[1] * 10 + (int)blockIdx.x + 1;
  AtomicStore(&y[0], (int)blockIdx.x + 1, 3);
""",
        {"y": "int"},
        blocks=3,
    )
    probe.cooperative = True
    y = ints(2)
    probe(y, order="reverse")
    assert y[1].item() == 123


UNSWIZZLED = """
  __shared__ bfloat16_t sa[1024];
  __shared__ bfloat16_t sb[128];
  int t = threadIdx.x;
  // core matrices of 8 rows x 16 bytes: along k at 128 bytes (LBO), along m or n at 256 bytes (SBO)
  for (int i = t; i < 64 * 16; i += 128) { int m = i / 16, k = i % 16; sa[m / 8 * 128 + m % 8 * 8 + k / 8 * 64 + k % 8] = bfloat16_t(a[i]); }
  if (t < 128) { int n = t / 16, k = t % 16; sb[n / 8 * 128 + n % 8 * 8 + k / 8 * 64 + k % 8] = bfloat16_t(b[t]); }
  tl::fence_proxy_async();
  __syncthreads();
  tl::GmmaDescriptor da, db;
  tl::initialize_wgmma_descriptor<0, 8, 16>(da, &sa[0]);
  tl::initialize_wgmma_descriptor<0, 8, 16>(db, &sb[0]);
  float acc[4];
  tl::wgmma_ss<tl::DataType::kBFloat16, tl::DataType::kBFloat16, tl::DataType::kFloat32, 64, 8, 16, false, false>(
      uint64_t(da), uint64_t(db), (uint32_t *)acc, false);
  tl::warpgroup_commit_batch();
  tl::warpgroup_wait<0>();
  int l = t % 32, row = t / 32 * 16 + l / 4, col = l % 4 * 2;
  for (int i = 0; i < 4; ++i) c[(row + 8 * (i / 2)) * 8 + col + i % 2] = acc[i];
"""  # noqa: E501


def test_unswizzled_wgmma() -> None:
    a, b = torch.randint(-4, 5, (64, 16)).float(), torch.randint(-4, 5, (8, 16)).float()
    c = torch.zeros(64 * 8)
    probe = cuda_source(UNSWIZZLED, {"a": "float", "b": "float", "c": "float"}, threads=128)
    probe(a.flatten(), b.flatten(), c)
    assert torch.equal(c.view(64, 8), a @ b.t())
    for gone, match in (
        ("__syncthreads();", "race"),
        ("tl::warpgroup_wait<0>();", "ends with a wgmma it has not waited for"),
    ):
        broken = UNSWIZZLED.replace(gone, "")
        with pytest.raises(EmulationError, match=match):
            cuda_source(broken, {"a": "float", "b": "float", "c": "float"}, threads=128)(
                a.flatten(), b.flatten(), c
            )


def test_stmatrix_then_ldmatrix_is_the_identity_and_trans_transposes() -> None:
    probe = cuda_source(
        """
  __shared__ unsigned short s[64];
  int t = threadIdx.x;
  unsigned v = 2 * t | (2 * t + 1) << 16, r, q;
  tl::ptx_stmatrix_m8n8_x1(&s[t % 8 * 8], v);
  tl::ptx_ldmatrix_x1(&s[t % 8 * 8], &r);
  tl::ptx_ldmatrix_x1_trans(&s[t % 8 * 8], &q);
  y[t] = r == v; y[32 + 2 * t] = q & 0xffff; y[32 + 2 * t + 1] = q >> 16;
""",
        {"y": "int"},
    )
    y = ints(96)
    probe(y)
    assert y[:32].tolist() == [1] * 32
    m = torch.arange(64).view(8, 8).int()
    assert torch.equal(y[32:].view(8, 8), m.t())


MBARRIER = """
  __shared__ uint64_t mem[2];
  __shared__ float s[64];
  auto bar = reinterpret_cast<Barrier*>(mem);
  int t = threadIdx.x;
  if (t == 0) { bar[0].init(1); bar[1].init(32); }
  __syncthreads();
  if (t < 32) {
    for (int i = 0; i < 3; ++i) {
      if (i) bar[1].wait((i - 1) & 1);
      if (t == 0) {
        bar[0].arrive_and_expect_tx(256);
        tl::tma_load(&s[0], &x[i * 64], bar[0], 256);
      }
    }
  } else {
    for (int i = 0; i < 3; ++i) {
      bar[0].wait(i & 1);
      y[i * 64 + t - 32] = s[t - 32]; y[i * 64 + t] = s[t];
      bar[1].arrive();
    }
  }
"""


@pytest.mark.parametrize("order", ["forward", "reverse", "random"])
@pytest.mark.parametrize("late", [True, False])
def test_mbarrier_pipeline_with_bulk_copies(order: str, late: bool) -> None:
    x, y = rand(192), torch.zeros(192)
    probe = cuda_source(MBARRIER, {"x": "float", "y": "float"}, threads=64)
    probe(x, y, order=order, async_late=late)
    assert torch.equal(x, y)


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        ("bar[0].wait(i & 1);", "", "asynchronous copy|race"),
        ("if (i) bar[1].wait((i - 1) & 1);", "", "race|more arrivals"),
        ("bar[1].init(32);", "bar[1].init(33);", "deadlock"),
        ("bar[1].init(32);", "", "used before any thread has initialised it"),
        ("arrive_and_expect_tx(256)", "arrive_and_expect_tx(512)", "deadlock.*in an mbarrier"),
        ("  __syncthreads();\n", "", "race|initialised"),
        ("bar[1].init(32)", "bar[1].init(31)", "race|more arrivals"),
        ("&s[0], &x[i * 64], bar[0], 256", "&s[1], &x[i * 64], bar[0], 240", "misaligned"),
        ("&x[i * 64], bar[0], 256", "&x[i * 64 + 4], bar[0], 256", "out of bounds"),
    ],
)
def test_broken_mbarrier_pipelines_are_reported(old: str, new: str, match: str) -> None:
    assert old in MBARRIER
    probe = cuda_source(MBARRIER.replace(old, new), {"x": "float", "y": "float"}, threads=64)
    reports = reports_in_all_orders(probe, lambda: [rand(192), torch.zeros(192)])
    assert reports
    assert all(re.search(match, str(e), re.S) for e in reports), reports


@pytest.mark.parametrize(("suffix", "count"), [("_noinc", 32), ("", 0)])
def test_cp_async_arrival_on_an_mbarrier(suffix: str, count: int) -> None:
    """Without noinc the arrival brings its own expectation, so one more plain arrival completes."""
    probe = cuda_source(
        f"""
  __shared__ uint64_t mem[1];
  __shared__ float s[128];
  auto bar = reinterpret_cast<Barrier*>(mem);
  int t = threadIdx.x;
  if (t == 0) bar[0].init({count or 1});
  __syncthreads();
  tl::cp_async_gs<16>(&s[t * 4], &x[t * 4]);
  tl::mbarrier_cp_async_arrive{suffix}(bar[0]);
  __syncthreads();
  {"" if count else "if (t == 0) bar[0].arrive();"}
  bar[0].wait(0);
  for (int i = 0; i < 4; ++i) y[t * 4 + i] = s[127 - t * 4 - i];
""",
        {"x": "float", "y": "float"},
    )
    x, y = rand(128), torch.zeros(128)
    probe(x, y)
    assert torch.equal(y, x.flip(0))


def test_bulk_stores_must_be_waited_for_and_may_add() -> None:
    body = """
  __shared__ float s[64];
  s[threadIdx.x] = x[threadIdx.x]; s[threadIdx.x + 32] = 1;
  tl::fence_proxy_async();
  __syncthreads();
  if (threadIdx.x == 0) {{
    tl::tma_store(&y[0], &s[0], 256); tl::tma_store_add(&s[0], &y[64], 256); tl::tma_store_arrive();
    {wait}
    {after}
  }}
"""
    tensors = {"x": "float", "y": "float"}
    x, y = rand(32), torch.ones(128)
    cuda_source(body.format(wait="tl::tma_store_wait<0>();", after="s[0] = 5;"), tensors)(x, y)
    assert torch.equal(y[:32], x)
    assert torch.equal(y[64:96], x + 1)
    assert torch.equal(y[96:], torch.full((32,), 2.0))
    with pytest.raises(EmulationError, match="ends with a bulk store"):
        cuda_source(body.format(wait="", after=""), tensors)(x, y)
    with pytest.raises(EmulationError, match="the source of an asynchronous copy"):
        cuda_source(body.format(wait="", after="s[0] = 5;"), tensors)(x, y)


def test_printing(capfd: pytest.CaptureFixture[str]) -> None:
    probe = cuda_source('if (threadIdx.x == 2) debug_print_var("v", y[0]);', {"y": "float"})
    probe(torch.tensor([1.5]))
    ctypes.CDLL(None).fflush(None)
    assert "msg='v' BlockIdx=(0, 0, 0), ThreadIdx=(2, 0, 0): value=1.5" in capfd.readouterr().out


SPARSE = """
  unsigned a[4], b[4], meta = {meta};
  for (int i = 0; i < 4; ++i) {{ a[i] = {stored}; b[i] = 0x3c003c00; }}
  float c[4] = {{0, 0, 0, 0}};
  tl::mma_sp_sync<tl::DataType::kFloat16, tl::DataType::kFloat16, tl::DataType::kFloat32, 16, 8, 32,
                  false, true, SM80::MMA::SparseSel::{sel}>(c, a, b, &meta);
  y[threadIdx.x] = c[0];
"""


@pytest.mark.parametrize(
    ("sel", "meta", "stored"),
    [
        ("Zero", "threadIdx.x % 4 < 2 ? 0x44444444 : 0u", "0x3c003c00"),
        ("One", "threadIdx.x % 4 < 2 ? 0u : 0xeeeeeeee", "0x3c003c00"),
        ("Zero", "0u", "0u"),  # no places, but nothing is stored either: rows past the edge
    ],
)
def test_sparse_product_reads_the_selected_lanes(sel: str, meta: str, stored: str) -> None:
    y = torch.full((32,), -1.0)
    cuda_source(SPARSE.format(sel=sel, meta=meta, stored=stored), {"y": "float"})(y)
    assert y.tolist() == [16.0 if stored != "0u" else 0.0] * 32  # 16 stored ones, all of B is one


def test_sparse_product_with_undefined_metadata() -> None:
    source = SPARSE.format(sel="One", meta="threadIdx.x % 4 < 2 ? 0xeeeeeeee : 1u", stored="1u")
    with pytest.raises(EmulationError, match="metadata 0x1 of row 0, elements 0 to 3") as caught:
        cuda_source(source, {"y": "float"})(torch.zeros(32))
    assert caught.value.kind == "metadata"


def test_sparse_product_of_an_unknown_shape_is_refused() -> None:
    body = "unsigned a[2], b[2], c[4]; tl::mma_sp_sync<tl::DataType::kInt8, tl::DataType::kInt8, "
    body += "tl::DataType::kInt32, 16, 8, 32, false, true, SM80::MMA::SparseSel::Zero>(c, a, b, a);"
    with pytest.raises(EmulationError, match="a sparse product of this shape"):
        cuda_source(body, {"y": "int"})


@pytest.mark.parametrize(
    ("body", "kind", "message"),
    [
        ("tl::warpgroup_reg_alloc<220>();", "registers", "220 registers: .* a multiple of 8"),
        ("tl::warpgroup_reg_dealloc<16>();", "registers", "from 24 to 256"),
        (
            "if (threadIdx.x < 96) tl::warpgroup_reg_dealloc<40>();",
            "divergence",
            "threads 0 and 96 of one warpgroup have executed setmaxnreg 1 and 0 times",
        ),
    ],
)
def test_wrong_setmaxnreg(body: str, kind: str, message: str) -> None:
    with pytest.raises(EmulationError, match=message) as caught:
        cuda_source(body, {"y": "int"}, threads=128)(torch.zeros(1, dtype=torch.int32))
    assert caught.value.kind == kind


def test_setmaxnreg_shares_what_min_blocks_leave() -> None:
    """384 threads of which two blocks fit have 80 registers each: 96 + 96 + 48 are the same."""
    body = "if (threadIdx.x < 128) tl::warpgroup_reg_dealloc<48>(); "
    body += "else tl::warpgroup_reg_alloc<{}>();"
    y = torch.zeros(1, dtype=torch.int32)
    for more in (96, 104):
        kernel = cuda_source(body.format(more), {"y": "int"}, threads=384)
        lowered = dataclasses.replace(
            kernel.lowered,
            source=kernel.lowered.source.replace("bounds__(384, 1)", "bounds__(384, 2)"),
        )
        kernel = Emulated.from_lowered(lowered)
        if more == 96:
            kernel(y)
            continue
        with pytest.raises(EmulationError, match="has 384 x 80 = 30720 registers"):
            kernel(y)


def test_unknown_intrinsic_is_named() -> None:
    with pytest.raises(EmulationError, match=r"probe: the kernel uses tl::frobnicate") as caught:
        cuda_source("y[0] = tl::frobnicate(1);", {"y": "int"})
    assert caught.value.kind == "unsupported"
    with pytest.raises(EmulationError, match=r"the kernel uses __unheard_of, .*y\[0\] = __unheard"):
        cuda_source("y[0] = __unheard_of(1);", {"y": "int"})


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('asm volatile("wmma.load.a %0, %1;" : "=r"(y[0]));', "inline PTX"),
        ("tl::tcgen05_ld(y);", "tcgen05"),
        ("tl::clc_try_cancel(y, y);", "cluster launch control"),
        ("y[0] = __tl_cvt_f32x2_to_bf16x2_rs_sat(v, 1);", "stochastic rounding"),
        ("curandStateXORWOW_t state;", "cuRAND other than Philox"),
    ],
)
def test_known_gaps_are_refused_with_a_reason(line: str, why: str) -> None:
    with pytest.raises(EmulationError, match=why):
        cuda_source(line, {"y": "int"})


FLOATS = [math.nan, math.inf, -math.inf, 3e9, -3e9, 5e9, 2.5, -2.5, 3.5, -0.7, 2147483520.0]
INT_MAX, INT_MIN = 2**31 - 1, -(2**31)


def test_float_to_int_saturates() -> None:
    """As cvt does: x86 would give the smallest integer for all that does not fit."""
    n = len(FLOATS)
    body = f"""
      int t = threadIdx.x;
      if (t < {n}) {{
        y[t] = __float2int_rn(x[t]);
        y[{n} + t] = __float2int_rz(x[t]);
        y[2 * {n} + t] = __float2int_ru(x[t]);
        y[3 * {n} + t] = __float2int_rd(x[t]);
        y[4 * {n} + t] = (int)__float2uint_rn(x[t]);
        y[5 * {n} + t] = __double2int_rn(double(x[t]));
        z[t] = __float2ll_rn(x[t]);
      }}
    """
    y, z = torch.zeros(6 * n, dtype=torch.int32), torch.zeros(n, dtype=torch.int64)
    cuda_source(body, {"x": "float", "y": "int", "z": "long long"})(torch.tensor(FLOATS), y, z)
    big = [INT_MAX, INT_MIN, INT_MAX, INT_MIN, INT_MAX]
    fits = 2147483520
    rows = y.view(6, n).tolist()
    assert rows[0] == [0, *big, 2, -2, 4, -1, fits]
    assert rows[1] == [0, *big, 2, -2, 3, 0, fits]
    assert rows[2] == [0, *big, 3, -2, 4, 0, fits]
    assert rows[3] == [0, *big, 2, -3, 3, -1, fits]
    unsigned = [v % 2**32 for v in rows[4]]
    assert unsigned == [0, 2**32 - 1, 0, 3000000000, 0, 2**32 - 1, 2, 0, 4, 0, fits]
    assert rows[5] == [INT_MIN, *big, 2, -2, 4, -1, fits]
    assert z.tolist()[:6] == [-(2**63), 2**63 - 1, -(2**63), 3 * 10**9, -3 * 10**9, 5 * 10**9]


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(
    "condition", ["ifdef __CUDACC__", "ifndef __CUDACC__", "  # if defined(__CUDACC__)"]
)
def test_ptx_with_another_form_for_a_cpu(condition: str, nested: bool) -> None:
    """Conditions are left to the compilers; what follows them is there on both."""
    forms = [
        'asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y[threadIdx.x]) : "f"(x[threadIdx.x]));',
        "y[threadIdx.x] = exp2f(x[threadIdx.x]);",
    ]
    if nested:
        forms = [f"#if 1\n{form}\n  #else\nnonsense\n#endif" for form in forms]
    if "ifndef" in condition:
        forms.reverse()
    hash_mark = "" if "#" in condition else "#"
    probe = cuda_source(
        f"{hash_mark}{condition}\n{forms[0]}\n#else\n{forms[1]}\n  #endif\ny[threadIdx.x] += 1;",
        {"x": "float", "y": "float"},
    )
    x, y = (LANES - 16).float(), torch.zeros(32)
    probe(x, y)
    assert torch.equal(y, torch.exp2(x) + 1)


@pytest.mark.parametrize("condition", ["ifdef __CUDACC__", "if 1", "ifndef __CUDACC__"])
def test_ptx_for_a_cpu_is_refused(condition: str) -> None:
    inside = 'asm("wmma.store.d %0, 2;" : "=r"(y[0]));'
    body = f"#{condition}\ny[0] = 1;\n#endif\n{inside}\n"
    if condition != "ifdef __CUDACC__":
        body = f"#{condition}\n{inside}\n#endif\n"
    with pytest.raises(EmulationError, match=r"inline PTX.*wmma\.store"):
        cuda_source(body, {"y": "int"})


@pytest.mark.parametrize("dtype", ["bfloat16_t", "half_t"])
def test_limits_of_small_floats(dtype: str) -> None:
    """`T.infinity` and `T.max_value` are generated as `std::numeric_limits` of the type."""
    probe = cuda_source(
        f"using L = std::numeric_limits<{dtype}>;\n"
        "if (threadIdx.x == 0) { y[0] = float(L::infinity()); y[1] = float(-L::infinity());\n"
        "y[2] = float(L::max()); y[3] = float(L::lowest()); y[4] = float(L::quiet_NaN()); }",
        {"y": "float"},
    )
    y = torch.zeros(5)
    probe(y)
    most = torch.finfo(torch.bfloat16 if dtype == "bfloat16_t" else torch.float16).max
    assert y[:4].tolist() == [math.inf, -math.inf, most, -most]
    assert math.isnan(y[4])


@pytest.mark.parametrize("lanes", [2, 4, 8, 16, 32])
def test_constructors_of_small_floats(lanes: int) -> None:
    """Lanes in ascending order; generated code of TileLang before 0.1.15 calls these."""

    def vector(kind: str, element: str) -> str:
        made = f"make_{kind}_{lanes}_t({', '.join(map(element.format, range(lanes)))})"
        return f"{{ auto v = {made}; memcpy(out, &v, sizeof v); out += sizeof v; }}"

    e8 = "emu::bit_cast<fp8_e8_t>(uint8_t({} + 64))"
    probe = cuda_source(
        "if (threadIdx.x) return; uchar *out = y;\n"
        + vector("fp8_e4", "fp8_e4_t::bitcast({})")
        + vector("fp8_e5", "fp8_e5_t::bitcast({} + 32)")
        + vector("fp8_e8", e8)
        + vector("fp4_e2", "fp4_e2_t(emu::f4({} % 16))"),
        {"y": "uchar"},
    )
    y = torch.zeros(3 * lanes + lanes // 2, dtype=torch.uint8)
    probe(y)
    steps = torch.arange(lanes)
    fp8 = torch.cat([steps, steps + 32, steps + 64])
    low, high = (steps % 16).view(-1, 2).unbind(1)
    assert torch.equal(y, torch.cat([fp8, low + 16 * high]).byte())


def test_powers_of_two_are_rounded_up() -> None:
    probe = cuda_source(
        """
  if (threadIdx.x) return;
  double2 d; d.x = 1.0; d.y = 1.5;
  auto pair = __tl_cvt_double2_to_e8m0x2(d);
  y[0] = (uchar)pair; y[1] = (uchar)(pair >> 8);
  y[2] = __tl_cvt_bfloat16_to_e8m0(__float2bfloat16(3.0f));
  pair = __tl_cvt_bfloat162_to_e8m0x2(__floats2bfloat162_rn(4.0f, 0.3f));
  y[3] = (uchar)pair; y[4] = (uchar)(pair >> 8);
""",
        {"y": "uchar"},
    )
    y = torch.zeros(5, dtype=torch.uint8)
    probe(y)
    assert torch.equal(y.int() - 127, torch.tensor([0, 1, 2, 2, -1], dtype=torch.int32))
