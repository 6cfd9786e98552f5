"""Quantisation, and products with quantised weights."""

import tilelang
import tilelang.language as T
import torch

from . import case
from .gemm import close, randn

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def dequantised_product(dtype, unpack, per_byte, values):
    """`X @ W.T` where W is stored as bytes; `unpack(byte, position)` gives a float16 value."""
    M, N, K = 64, 64, 64

    @T.prim_func
    def gemm(
        X: T.Tensor((M, K), "float16"),
        W: T.Tensor((N, K // per_byte), dtype),
        scale: T.Tensor((N,), "float32"),
        Y: T.Tensor((M, N), "float16"),
    ):
        with T.Kernel(1, threads=128):
            X_shared = T.alloc_shared((M, 32), "float16")
            W_packed = T.alloc_shared((N, 32 // per_byte), dtype)
            W_regs = T.alloc_fragment((N, 32), "float16")
            W_shared = T.alloc_shared((N, 32), "float16")
            Y_local = T.alloc_fragment((M, N), "float32")
            T.clear(Y_local)
            for k in T.Pipelined(K // 32, num_stages=1):
                T.copy(X[0, k * 32], X_shared)
                T.copy(W[0, k * (32 // per_byte)], W_packed)
                for i, j in T.Parallel(N, 32):
                    W_regs[i, j] = unpack(W_packed[i, j // per_byte], j % per_byte)
                T.copy(W_regs, W_shared)
                T.gemm(X_shared, W_shared, Y_local, transpose_B=True)
            for i, j in T.Parallel(M, N):
                Y[i, j] = Y_local[i, j] * scale[j]

    packed, dense = values(N, K)
    x, scale = randn(M, K), torch.rand(N, device="cuda") + 0.5
    got = tilelang.compile(gemm, out_idx=-1)(x, packed, scale)
    close(got, x.float() @ dense.T * scale, 2e-2, 5e-2)


def nibbles(n, k):
    codes = torch.randint(0, 16, (n, k), device="cuda")
    return (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8), codes


@case()
def w4a16_integer():
    def unpack(byte, position):
        code = (byte >> T.cast(position * 4, "uint8")) & T.cast(15, "uint8")
        return T.cast(T.cast(code, "int32") - 8, "float16")

    def values(n, k):
        packed, codes = nibbles(n, k)
        return packed, codes.float() - 8

    dequantised_product("uint8", unpack, 2, values)


@case()
def w4a16_fp4():
    def unpack(byte, position):
        code = T.cast((byte >> T.cast(position * 4, "uint8")) & T.cast(15, "uint8"), "int32")
        exponent, mantissa = (code >> 1) & 3, T.cast(code & 1, "float32")
        magnitude = T.if_then_else(
            exponent == 0,
            mantissa * 0.5,
            (1 + mantissa * 0.5) * T.cast(1 << (exponent - 1 & 3), "float32"),
        )
        return T.cast(T.if_then_else(code >= 8, -magnitude, magnitude), "float16")

    def values(n, k):
        packed, codes = nibbles(n, k)
        table = torch.tensor(E2M1 + tuple(-v for v in E2M1), device="cuda")
        return packed, table[codes]

    dequantised_product("uint8", unpack, 2, values)


@case()
def w8a16_integer():
    def values(n, k):
        codes = torch.randint(-128, 128, (n, k), dtype=torch.int8, device="cuda")
        return codes, codes.float()

    dequantised_product("int8", lambda byte, _: T.cast(byte, "float16"), 1, values)


@case()
def w2a16_integer():
    def unpack(byte, position):
        code = (byte >> T.cast(position * 2, "uint8")) & T.cast(3, "uint8")
        return T.cast(T.cast(code, "int32") - 2, "float16")

    def values(n, k):
        codes = torch.randint(0, 4, (n, k), device="cuda")
        parts = [codes[:, i::4] << 2 * i for i in range(4)]
        return sum(parts).to(torch.uint8), codes.float() - 2

    dequantised_product("uint8", unpack, 4, values)


@case()
def fp8_block_scales():
    """FP8 operands with a scale per 64 channels, accumulated in float32 per block."""
    M, N, K, group = 64, 64, 128, 64

    @tilelang.jit(out_idx=-1)
    def build():
        @T.prim_func
        def gemm(
            A: T.Tensor((M, K), "float8_e4m3"),
            B: T.Tensor((N, K), "float8_e4m3"),
            A_scale: T.Tensor((M, K // group), "float32"),
            B_scale: T.Tensor((K // group,), "float32"),
            C: T.Tensor((M, N), "bfloat16"),
        ):
            with T.Kernel(1, threads=128):
                A_shared = T.alloc_shared((M, group), "float8_e4m3")
                B_shared = T.alloc_shared((N, group), "float8_e4m3")
                part = T.alloc_fragment((M, N), "float32")
                total = T.alloc_fragment((M, N), "float32")
                T.clear(total)
                for k in T.Pipelined(K // group, num_stages=2):
                    T.copy(A[0, k * group], A_shared)
                    T.copy(B[0, k * group], B_shared)
                    T.clear(part)
                    T.gemm(A_shared, B_shared, part, transpose_B=True)
                    for i, j in T.Parallel(M, N):
                        total[i, j] += part[i, j] * A_scale[i, k] * B_scale[k]
                T.copy(total, C)

        return gemm

    a, b = randn(M, K, dtype=torch.float8_e4m3fn), randn(N, K, dtype=torch.float8_e4m3fn)
    sa, sb = torch.rand(M, K // group, device="cuda"), torch.rand(K // group, device="cuda")
    wide_a = a.float() * sa.repeat_interleave(group, 1)
    wide_b = b.float() * sb.repeat_interleave(group)
    close(build()(a, b, sa, sb), wide_a @ wide_b.T, 2e-2, 1e-1)


@case(quick=True)
def per_token_fp8():
    tokens, hidden, group = 9, 256, 128

    @tilelang.jit(out_idx=[1, 2])
    def build():
        n = T.dynamic("n")

        @T.prim_func
        def cast(
            x: T.Tensor((n, hidden), "bfloat16"),
            y: T.Tensor((n, hidden), "float8_e4m3"),
            scale: T.Tensor((n, hidden // group), "float32"),
        ):
            with T.Kernel(T.ceildiv(n, 4), hidden // group, threads=128) as (bx, by):
                tile = T.alloc_fragment((4, group), "float32")
                amax = T.alloc_fragment((4,), "float32")
                for i, j in T.Parallel(4, group):
                    tile[i, j] = x[bx * 4 + i, by * group + j]
                T.reduce_absmax(tile, amax, dim=1)
                for i in T.Parallel(4):
                    amax[i] = T.max(amax[i], 1e-4) / 448.0
                for i in T.Parallel(4):
                    scale[bx * 4 + i, by] = amax[i]
                for i, j in T.Parallel(4, group):
                    y[bx * 4 + i, by * group + j] = T.clamp(tile[i, j] / amax[i], -448.0, 448.0)

        return cast

    x = randn(tokens, hidden, dtype=torch.bfloat16)
    y, scale = build()(x)
    want = x.float().view(tokens, -1, group).abs().amax(-1).clamp_min(1e-4) / 448.0
    close(scale, want, 1e-6, 0)
    close(y.float() * want.repeat_interleave(group, 1), x, 7e-2, 1e-2)


@case()
def per_block_int8():
    M, N, block = 64, 128, 64

    @tilelang.jit(out_idx=[1, 2])
    def build():
        @T.prim_func
        def cast(
            x: T.Tensor((M, N), "float32"),
            q: T.Tensor((M, N), "int8"),
            scale: T.Tensor((M // block, N // block), "float32"),
        ):
            with T.Kernel(N // block, M // block, threads=128) as (bx, by):
                tile = T.alloc_fragment((block, block), "float32")
                rows = T.alloc_fragment((block,), "float32")
                amax = T.alloc_fragment((1,), "float32")
                T.copy(x[by * block, bx * block], tile)
                T.reduce_absmax(tile, rows, dim=1)
                T.reduce_max(rows, amax, dim=0)
                for i in T.Parallel(1):
                    scale[by, bx] = amax[i] / 127.0
                for i, j in T.Parallel(block, block):
                    q[by * block + i, bx * block + j] = T.cast(
                        T.round(tile[i, j] / (amax[0] / 127.0)), "int8"
                    )

        return cast

    x = randn(M, N, dtype=torch.float32)
    q, scale = build()(x)
    want = x.view(M // block, block, N // block, block).abs().amax((1, 3)) / 127
    close(scale, want, 1e-6, 0)
    close(q * want.repeat_interleave(block, 0).repeat_interleave(block, 1), x, 0, float(want.max()))


@case()
def dequantise_fp8_to_bf16():
    rows, columns = 32, 64

    @tilelang.jit(out_idx=-1)
    def build():
        @T.prim_func
        def cast(
            x: T.Tensor((rows, columns), "float8_e5m2"),
            scale: T.Tensor((rows,), "float32"),
            y: T.Tensor((rows, columns), "bfloat16"),
        ):
            with T.Kernel(rows // 8, threads=64) as b:
                for i, j in T.Parallel(8, columns):
                    y[b * 8 + i, j] = T.cast(x[b * 8 + i, j], "float32") * scale[b * 8 + i]

        return cast

    x, scale = randn(rows, columns, dtype=torch.float8_e5m2), torch.rand(rows, device="cuda")
    assert torch.equal(build()(x, scale), (x.float() * scale[:, None]).bfloat16())


@case()
def power_of_two_scales():
    """Scales rounded up to a power of two by integer arithmetic on the bits of the float."""
    rows, columns = 16, 128

    @tilelang.jit(out_idx=-1)
    def build():
        @T.prim_func
        def scales(x: T.Tensor((rows, columns), "float32"), s: T.Tensor((rows,), "float32")):
            with T.Kernel(rows, threads=32) as r:
                tile = T.alloc_fragment((1, columns), "float32")
                amax = T.alloc_fragment((1,), "float32")
                T.copy(x[r, 0], tile)
                T.reduce_absmax(tile, amax, dim=1)
                bits = T.alloc_local((1,), "uint32")
                bits[0] = T.reinterpret(amax[0] / 448.0, "uint32")
                bits[0] = (bits[0] + T.cast(0x7FFFFF, "uint32")) & T.cast(0xFF800000, "uint32")
                for i in T.Parallel(1):
                    s[r] = T.reinterpret(bits[0], "float32")

        return scales

    x = randn(rows, columns, dtype=torch.float32)
    want = torch.exp2(torch.ceil(torch.log2(x.abs().amax(1) / 448)))
    assert torch.equal(build()(x), want)


@case()
def packed_fp4_cast():
    rows, columns = 8, 64

    @tilelang.jit(out_idx=-1)
    def build():
        @T.prim_func
        def cast(
            x: T.Tensor((rows, columns), "float32"), y: T.Tensor((rows, columns), "float4_e2m1fn")
        ):
            with T.Kernel(rows, threads=32) as r:
                for j in T.Parallel(columns):
                    y[r, j] = x[r, j]

        return cast

    table = torch.tensor(E2M1 + tuple(-v for v in E2M1), device="cuda")
    codes = torch.randint(0, 16, (rows, columns), device="cuda")
    got = build()(table[codes]).view(torch.uint8).long()
    values = torch.stack([table[got & 15], table[got >> 4]], -1).flatten(1)
    assert torch.equal(values, table[codes])


@case(quick=True)
def int4_operands():
    """Packed int4 operands of an integer product (mma.sync of sm_80)."""
    M = N = K = 64

    @T.prim_func
    def gemm(
        A: T.Tensor((M, K), "int4"), B: T.Tensor((N, K), "int4"), C: T.Tensor((M, N), "int32")
    ):
        with T.Kernel(1, threads=128):
            A_shared = T.alloc_shared((M, K), "int4")
            B_shared = T.alloc_shared((N, K), "int4")
            C_local = T.alloc_fragment((M, N), "int32")
            T.copy(A, A_shared)
            T.copy(B, B_shared)
            T.clear(C_local)
            T.gemm(A_shared, B_shared, C_local, transpose_B=True)
            T.copy(C_local, C)

    values = torch.randint(-8, 8, (2, M, K), device="cuda")
    packed = (
        ((values[..., ::2] & 15) | (values[..., 1::2] & 15) << 4).to(torch.uint8).view(torch.int8)
    )
    kernel = tilelang.compile(gemm, out_idx=-1, target={"kind": "cuda", "arch": "sm_80"})
    want = values[0].float() @ values[1].float().T
    assert torch.equal(kernel(packed[0], packed[1]).float(), want)
