"""Inline PTX: translated instructions give the values that the PTX manual defines."""

from __future__ import annotations

import pytest
import torch

from tile_kernels.emulator import EmulationError, ptx

from .helpers import cuda_source

LANES = torch.arange(32)


def results(body: str, count: int) -> torch.Tensor:
    """A kernel of one warp that fills `unsigned r[count]`; `[count, 32]` as signed integers."""
    text = f"  unsigned t = threadIdx.x, r[{count}] = {{}};\n{body}\n"
    text += f"  for (int i = 0; i < {count}; ++i) y[i * 32 + t] = r[i];"
    y = torch.zeros(count * 32, dtype=torch.uint32)
    cuda_source(text, {"y": "unsigned"})(y)
    return y.view(torch.int32).view(count, 32).long()


def test_logic_and_integers() -> None:
    got = results(
        """
  asm("lop3.b32 %0, %1, %2, %3, 0xCA;" : "=r"(r[0]) : "r"(t), "r"(0xffu), "r"(0x100u));
  asm volatile("prmt.b32 %0, %1, %2, 0x0123;\\n" : "=r"(r[1]) : "r"(0x11223344u + t), "r"(0u));
  asm("prmt.b32 %0, %1, 0, 0x888a;" : "=r"(r[2]) : "r"(0x00800000u));
  asm("mad.lo.s32 %0, %1, %2, 7;" : "=r"(r[3]) : "r"(t), "r"(-3));
  asm("mul.hi.u32 %0, %1, %2;" : "=r"(r[4]) : "r"(t << 28), "n"(32));
  asm("{\\n\\t.reg .pred p;\\n\\t.reg .b32 a;\\n\\tsetp.lt.u32 p, %1, 5;\\n\\t"
      "mov.b32 a, 10;\\n\\t@p mov.b32 a, 20;\\n\\tselp.b32 %0, a, 1, p;\\n\\t}" : "=r"(r[5]) : "r"(t));
  asm("shr.s32 %0, %1, 40;" : "=r"(r[6]) : "r"(-5));
  asm("bfe.s32 %0, %1, 4, 4;" : "=r"(r[7]) : "r"(t << 4));
  asm("popc.b32 %0, %1;" : "=r"(r[8]) : "r"(t));
  asm("mov.u32 %0, %%laneid;" : "=r"(r[9]));
  asm("shl.b32 %[out], %[in], 2;" : [out] "=r"(r[10]) : [in] "r"(t));
  unsigned long long wide;
  asm("mov.b64 %0, {%1, %2};" : "=l"(wide) : "r"(t), "r"(9u));
  asm("{ .reg .b32 low; mov.b64 {low, %0}, %1; }" : "=r"(r[11]) : "l"(wide));
""",
        12,
    )
    t = LANES
    want = [
        (t & 0xFF) | (~t & 0x100),
        torch.tensor([(0x44 + i) << 24 | 0x332211 for i in range(32)]),
        torch.full((32,), 255),
        t * -3 + 7,
        (t << 28 & 0xFFFFFFFF) * 32 >> 32,
        torch.where(t < 5, 20, 1),
        torch.full((32,), -1),
        ((t & 15) ^ 8) - 8,
        torch.tensor([i.bit_count() for i in range(32)]),
        t,
        t * 4,
        torch.full((32,), 9),
    ]
    want[1] = torch.where(want[1] >= 2**31, want[1] - 2**32, want[1])
    assert torch.equal(got, torch.stack(want))


def test_conversions_and_floats() -> None:
    got = results(
        """
  float x = t * 0.7f - 3.f, z;
  asm("cvt.rni.s32.f32 %0, %1;" : "=r"(r[0]) : "f"(x));
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r[1]) : "f"(1.5f), "f"(float(t)));
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r[2]) : "f"(1.00048828125f));
  asm("cvt.sat.u8.s32 %0, %1;" : "=r"(r[3]) : "r"(int(t) * 100 - 300));
  asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(z) : "f"(x), "f"(2.f), "f"(1.f));
  asm("max.f32 %0, %1, 0f00000000;" : "=f"(z) : "f"(z));
  r[4] = __float_as_uint(z);
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(z) : "f"(float(t)));
  r[5] = __float_as_uint(z);
  asm("{ .reg .b32 kept; and.b32 kept, %1, 0b10000000000000001111; and.b32 kept, kept, 077; add.u32 %0, kept, 0; }"
      : "=r"(r[6]) : "r"(t * 5));
  asm("mul.bf16x2 %0, %1, 0x40004080;" : "=r"(r[7]) : "r"(0x3f803f80 + t));
""",
        8,
    )
    x = LANES.float() * torch.tensor(0.7) - 3
    assert torch.equal(got[0], x.round().long())
    assert torch.equal(got[1] & 0xFFFF, LANES.bfloat16().view(torch.int16).long() & 0xFFFF)
    assert torch.all(got[1] >> 16 == 0x3FC0)
    assert torch.all(got[2] == torch.tensor(1.0009765625).view(torch.int32))
    assert torch.equal(got[3], (LANES * 100 - 300).clamp(0, 255))
    assert torch.equal(got[4], (x * 2 + 1).clamp_min(0).view(torch.int32).long())
    assert torch.equal(got[5], LANES.float().exp2().view(torch.int32).long())
    assert torch.equal(got[6], (LANES * 5) & 15)
    pair = (0x3F803F80 + LANES).int().view(torch.bfloat16) * torch.tensor([4.0, 2.0]).repeat(32)
    assert torch.equal(got[7], pair.bfloat16().view(torch.int32).long())


def test_memory_and_copies() -> None:
    body = """
  __shared__ unsigned tile[256];
  unsigned t = threadIdx.x, a, b, c, d;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "l"(x + 4 * t));
  unsigned at = (unsigned)__cvta_generic_to_shared(tile + 4 * t);
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(at), "l"(x + 4 * t));
  asm volatile("cp.async.commit_group;");
  asm volatile("cp.async.wait_group 0;");
  asm volatile("bar.sync 0;");
  unsigned mine;
  asm volatile("ld.shared.u32 %0, [%1+4];" : "=r"(mine) : "r"(at));
  asm volatile("st.global.cs.v2.b32 [%0], {%1, %2};" :: "l"(y + 2 * t), "r"(a + b + c + d), "r"(mine));
"""
    probe = cuda_source(body, {"x": "unsigned", "y": "unsigned"})
    x = torch.arange(128, dtype=torch.int64).to(torch.uint32)
    y = torch.zeros(64, dtype=torch.uint32)
    report = probe(x, y)
    rows = x.long().view(32, 4)
    assert torch.equal(y.long().view(32, 2), torch.stack([rows.sum(1), rows[:, 1]], 1))
    assert report.kernels[0].async_ops == 32
    outside = cuda_source(
        body.replace("x + 4 * t)", "x + 4 * t + 4)", 1), {"x": "unsigned", "y": "unsigned"}
    )
    with pytest.raises(EmulationError, match="out of bounds"):
        outside(x, y)


def test_warp_operations() -> None:
    got = results(
        """
  asm volatile("shfl.sync.bfly.b32 %0, %1, 1, 0x1f, 0xffffffff;" : "=r"(r[0]) : "r"(t));
  asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(r[1]) : "r"(t * 3));
  asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.b32 %0, 1, 0, p; }" : "=r"(r[2]));
  asm volatile("{ .reg .pred p; setp.gt.u32 p, %1, 29; vote.sync.ballot.b32 %0, p, 0xffffffff; }"
               : "=r"(r[3]) : "r"(t));
""",
        4,
    )
    ballot = torch.full((32,), (3 << 30) - 2**32)
    assert torch.equal(
        got, torch.stack([LANES ^ 1, torch.full((32,), 93), (LANES == 0).long(), ballot])
    )


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (
            "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], %1;",
            "the PTX instruction tcgen05",
        ),
        ("mov.u32 %0, %%envreg3;", "special register %envreg3"),
        ("ld.local.u32 %0, [%1];", "state space .local"),
        ("cvt.rz.f16.f32 %0, %1;", "directed rounding"),
    ],
)
def test_other_instructions_are_refused_by_name(text: str, what: str) -> None:
    body = f'  unsigned a; asm volatile("{text}" : "=r"(a) : "r"(y[0]));'
    with pytest.raises(EmulationError, match=what) as caught:
        cuda_source(body, {"y": "unsigned"})
    assert caught.value.kind == "unsupported"


def test_lines_stay_and_other_code_is_left_alone() -> None:
    source = 'int a;\nasm volatile(\n    "mov.u32 %0,"\n    " %1;"\n    : "=r"(a) : "r"(b(1, 2)));\nint c;\n'
    out = ptx.translate(source)
    assert out.count("\n") == source.count("\n")
    assert "emu::ptx_set((a), (b(1, 2)));" in out
    assert ptx.translate("int asmodeus(int); // asm\n") == "int asmodeus(int); // asm\n"


def test_philox_is_the_published_generator() -> None:
    """The counter and key of zeros, from the paper's table of known answers."""
    got = results(
        """
  curandStatePhilox4_32_10_t s;
  curand_init(0, 0, 0, &s);
  for (int i = 0; i < 4; ++i) r[i] = curand(&s);
  curand_init(0, 0, 2, &s);
  r[4] = curand(&s);
  curand_init(5, t, 0, &s);
  r[5] = curand(&s);
""",
        6,
    )
    words = [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert (got[:4, 0] & 0xFFFFFFFF).tolist() == words
    assert int(got[4, 0]) & 0xFFFFFFFF == words[2]
    assert got[5].unique().numel() == 32
