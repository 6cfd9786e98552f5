"""Matrix products: layouts, number formats, split and persistent schedules, epilogues."""

import tilelang
import tilelang.language as T
import torch

from . import case

AMPERE = {"kind": "cuda", "arch": "sm_80"}
NO_WARP_SPECIALIZATION = {tilelang.PassConfigKey.TL_DISABLE_WARP_SPECIALIZED: True}


def randn(*shape, dtype=torch.float16):
    return torch.randn(*shape, device="cuda").to(dtype)


def close(got, want, rtol=2e-2, atol=2e-2):
    torch.testing.assert_close(got.float(), want.float(), rtol=rtol, atol=atol)


def matmul(
    M, N, K, block_M, block_N, block_K, dtype="float16", out="float16", acc="float32",
    trans_A=False, trans_B=False, stages=2, threads=128, swizzle=0, target=None, configs=None,
):  # fmt: skip
    A_shape = (K, M) if trans_A else (M, K)
    B_shape = (N, K) if trans_B else (K, N)
    A_block = (block_K, block_M) if trans_A else (block_M, block_K)
    B_block = (block_N, block_K) if trans_B else (block_K, block_N)

    @T.prim_func
    def gemm(A: T.Tensor(A_shape, dtype), B: T.Tensor(B_shape, dtype), C: T.Tensor((M, N), out)):
        with T.Kernel(T.ceildiv(N, block_N), T.ceildiv(M, block_M), threads=threads) as (bx, by):
            A_shared = T.alloc_shared(A_block, dtype)
            B_shared = T.alloc_shared(B_block, dtype)
            C_local = T.alloc_fragment((block_M, block_N), acc)
            if swizzle:
                T.use_swizzle(swizzle)
            T.clear(C_local)
            for k in T.Pipelined(T.ceildiv(K, block_K), num_stages=stages):
                if trans_A:
                    T.copy(A[k * block_K, by * block_M], A_shared)
                else:
                    T.copy(A[by * block_M, k * block_K], A_shared)
                if trans_B:
                    T.copy(B[bx * block_N, k * block_K], B_shared)
                else:
                    T.copy(B[k * block_K, bx * block_N], B_shared)
                T.gemm(A_shared, B_shared, C_local, transpose_A=trans_A, transpose_B=trans_B)
            T.copy(C_local, C[by * block_M, bx * block_N])

    return tilelang.compile(gemm, out_idx=-1, target=target, pass_configs=configs)


@case(quick=True)
def fp16_pipelined():
    a, b = randn(128, 96), randn(96, 64)
    close(matmul(128, 64, 96, 64, 64, 32, stages=3)(a, b), a @ b)


@case()
def bf16_nt():
    a, b = randn(64, 64, dtype=torch.bfloat16), randn(128, 64, dtype=torch.bfloat16)
    kernel = matmul(64, 128, 64, 64, 64, 32, "bfloat16", "bfloat16", trans_B=True)
    close(kernel(a, b), a @ b.T, 3e-2, 3e-2)


@case()
def fp16_tn():
    a, b = randn(64, 128), randn(64, 64)
    close(matmul(128, 64, 64, 64, 64, 32, trans_A=True)(a, b), a.T @ b)


@case()
def fp8_e4m3():
    a, b = randn(64, 128, dtype=torch.float8_e4m3fn), randn(64, 128, dtype=torch.float8_e4m3fn)
    kernel = matmul(64, 64, 128, 64, 64, 64, "float8_e4m3", "float32", trans_B=True)
    close(kernel(a, b), a.float() @ b.float().T)


@case()
def fp8_e5m2_mixed_tiles():
    a, b = randn(128, 64, dtype=torch.float8_e5m2), randn(64, 64, dtype=torch.float8_e5m2)
    kernel = matmul(128, 64, 64, 64, 32, 32, "float8_e5m2", "bfloat16", trans_B=True)
    close(kernel(a, b), a.float() @ b.float().T, 3e-2, 3e-2)


@case()
def int8_accumulates_int32():
    a = torch.randint(-8, 8, (64, 64), dtype=torch.int8, device="cuda")
    b = torch.randint(-8, 8, (64, 64), dtype=torch.int8, device="cuda")
    kernel = matmul(64, 64, 64, 64, 64, 32, "int8", "int32", "int32", trans_B=True)
    assert torch.equal(kernel(a, b), a.int() @ b.int().T)


@case()
def tf32():
    a, b = randn(64, 64, dtype=torch.float32), randn(64, 64, dtype=torch.float32)
    kernel = matmul(64, 64, 64, 64, 64, 32, "float32", "float32", trans_B=True)
    close(kernel(a, b), a @ b.T, 2e-2, 6e-2)


@case()
def fp16_accumulates_fp16():
    a, b = randn(64, 32), randn(32, 64)
    close(matmul(64, 64, 32, 64, 64, 32, acc="float16")(a, b), a @ b, 5e-2, 1e-1)


@case()
def ragged_sizes():
    a, b = randn(100, 80), randn(80, 72)
    close(matmul(100, 72, 80, 64, 64, 32)(a, b), a @ b)


@case()
def ampere_mma():
    a, b = randn(64, 64), randn(64, 64)
    close(matmul(64, 64, 64, 64, 64, 32, target=AMPERE)(a, b), a @ b)


@case()
def ampere_mma_int8():
    a = torch.randint(-8, 8, (64, 64), dtype=torch.int8, device="cuda")
    kernel = matmul(64, 64, 64, 64, 64, 64, "int8", "int32", "int32", trans_B=True,
                    target=AMPERE)  # fmt: skip
    assert torch.equal(kernel(a, a), a.int() @ a.int().T)


@case()
def block_swizzle():
    a, b = randn(256, 32), randn(32, 192)
    close(matmul(256, 192, 32, 64, 64, 32, swizzle=2)(a, b), a @ b)


@case()
def without_warp_specialization():
    a, b = randn(128, 128), randn(128, 64)
    close(matmul(128, 64, 128, 64, 64, 32, stages=3, configs=NO_WARP_SPECIALIZATION)(a, b), a @ b)


@case()
def two_warp_groups():
    a, b = randn(128, 64), randn(64, 128)
    close(matmul(128, 128, 64, 128, 128, 32, threads=256)(a, b), a @ b)


@case()
def split_k_atomic():
    M, N, K, splits, block = 64, 64, 128, 4, 64

    @tilelang.jit
    def build():
        @T.prim_func
        def gemm(
            A: T.Tensor((M, K), "float16"),
            B: T.Tensor((K, N), "float16"),
            C: T.Tensor((M, N), "float32"),
        ):
            with T.Kernel(N // block, M // block, splits, threads=128) as (bx, by, bz):
                A_shared = T.alloc_shared((block, 32), "float16")
                B_shared = T.alloc_shared((32, block), "float16")
                C_local = T.alloc_fragment((block, block), "float32")
                T.clear(C_local)
                for k in T.Pipelined(K // splits // 32, num_stages=0):
                    at = bz * (K // splits) + k * 32
                    T.copy(A[by * block, at], A_shared)
                    T.copy(B[at, bx * block], B_shared)
                    T.gemm(A_shared, B_shared, C_local)
                for i, j in T.Parallel(block, block):
                    T.atomic_add(C[by * block + i, bx * block + j], C_local[i, j])

        return gemm

    a, b, c = randn(M, K), randn(K, N), torch.zeros(M, N, device="cuda")
    build()(a, b, c)
    close(c, a.float() @ b.float())


@case(quick=True)
def split_k_workspace():
    M, N, K, splits, block = 64, 64, 128, 2, 64

    @T.prim_func
    def gemm(
        A: T.Tensor((M, K), "float16"),
        B: T.Tensor((K, N), "float16"),
        C: T.Tensor((M, N), "float32"),
    ):
        parts = T.alloc_global((splits, M, N), "float32")
        with T.Kernel(N // block, M // block, splits, threads=128) as (bx, by, bz):
            A_shared = T.alloc_shared((block, 32), "float16")
            B_shared = T.alloc_shared((32, block), "float16")
            C_local = T.alloc_fragment((block, block), "float32")
            T.clear(C_local)
            for k in T.Pipelined(K // splits // 32, num_stages=1):
                T.copy(A[by * block, bz * (K // splits) + k * 32], A_shared)
                T.copy(B[bz * (K // splits) + k * 32, bx * block], B_shared)
                T.gemm(A_shared, B_shared, C_local)
            T.copy(
                C_local, parts[bz, by * block : by * block + block, bx * block : bx * block + block]
            )
        with T.Kernel(M, threads=N) as row:
            t = T.get_thread_binding()
            total = T.alloc_local((1,), "float32")
            total[0] = 0
            for s in T.serial(splits):
                total[0] += parts[s, row, t]
            C[row, t] = total[0]

    a, b = randn(M, K), randn(K, N)
    close(tilelang.compile(gemm, out_idx=-1)(a, b), a.float() @ b.float())


@case()
def stream_k():
    """Each block takes an equal share of all k-steps and adds partial tiles atomically."""
    M, N, K, block, block_K, blocks = 128, 128, 96, 64, 32, 3
    tiles_n, steps = N // block, K // block_K
    total = (M // block) * tiles_n * steps
    share = (total + blocks - 1) // blocks

    @tilelang.jit
    def build():
        @T.prim_func
        def gemm(
            A: T.Tensor((M, K), "float16"),
            B: T.Tensor((N, K), "float16"),
            C: T.Tensor((M, N), "float32"),
        ):
            with T.Kernel(blocks, threads=128) as worker:
                A_shared = T.alloc_shared((block, block_K), "float16")
                B_shared = T.alloc_shared((block, block_K), "float16")
                C_local = T.alloc_fragment((block, block), "float32")
                first = worker * share
                last = T.min(first + share, total)
                for step in T.serial(share):
                    at = first + step
                    if at < last:
                        tile, k = at // steps, at % steps
                        if step == 0 or k == 0:
                            T.clear(C_local)
                        T.copy(A[tile // tiles_n * block, k * block_K], A_shared)
                        T.copy(B[tile % tiles_n * block, k * block_K], B_shared)
                        T.gemm(A_shared, B_shared, C_local, transpose_B=True)
                        if k == steps - 1 or at == last - 1:
                            for i, j in T.Parallel(block, block):
                                T.atomic_add(
                                    C[tile // tiles_n * block + i, tile % tiles_n * block + j],
                                    C_local[i, j],
                                )

        return gemm

    a, b, c = randn(M, K), randn(N, K), torch.zeros(M, N, device="cuda")
    build()(a, b, c)
    close(c, a.float() @ b.float().T)


@case()
def persistent():
    M, N, K, block, block_K = 192, 128, 64, 64, 32
    sms = 4

    @tilelang.jit(out_idx=-1)
    def build():
        @T.prim_func
        def gemm(
            A: T.Tensor((M, K), "float16"),
            B: T.Tensor((K, N), "float16"),
            C: T.Tensor((M, N), "float16"),
        ):
            with T.Kernel(sms, threads=128) as worker:
                A_shared = T.alloc_shared((block, block_K), "float16")
                B_shared = T.alloc_shared((block_K, block), "float16")
                C_local = T.alloc_fragment((block, block), "float32")
                for by, bx in T.Persistent([M // block, N // block], sms, worker):
                    T.clear(C_local)
                    for k in T.Pipelined(K // block_K, num_stages=2):
                        T.copy(A[by * block, k * block_K], A_shared)
                        T.copy(B[k * block_K, bx * block], B_shared)
                        T.gemm(A_shared, B_shared, C_local)
                    T.copy(C_local, C[by * block, bx * block])

        return gemm

    a, b = randn(M, K), randn(K, N)
    close(build()(a, b), a @ b)


@case()
def batched():
    G, M, N, K = 3, 64, 64, 32

    @tilelang.jit(out_idx=-1)
    def build():
        @T.prim_func
        def gemm(
            A: T.Tensor((G, M, K), "float16"),
            B: T.Tensor((G, K, N), "float16"),
            C: T.Tensor((G, M, N), "float16"),
        ):
            with T.Kernel(N // 64, M // 64, G, threads=128) as (bx, by, bz):
                A_shared = T.alloc_shared((64, 32), "float16")
                B_shared = T.alloc_shared((32, 64), "float16")
                C_local = T.alloc_fragment((64, 64), "float32")
                T.clear(C_local)
                for k in T.Pipelined(K // 32, num_stages=2):
                    T.copy(A[bz, by * 64 : by * 64 + 64, k * 32 : k * 32 + 32], A_shared)
                    T.copy(B[bz, k * 32 : k * 32 + 32, bx * 64 : bx * 64 + 64], B_shared)
                    T.gemm(A_shared, B_shared, C_local)
                T.copy(C_local, C[bz, by * 64 : by * 64 + 64, bx * 64 : bx * 64 + 64])

        return gemm

    a, b = randn(G, M, K), randn(G, K, N)
    close(build()(a, b), a @ b)


@case()
def a_in_registers():
    """relu(A) @ B with A converted in registers before the product."""
    M = N = K = 64

    @tilelang.jit(out_idx=-1)
    def build():
        @T.prim_func
        def gemm(
            A: T.Tensor((M, K), "float16"),
            B: T.Tensor((K, N), "float16"),
            C: T.Tensor((M, N), "float16"),
        ):
            with T.Kernel(1, threads=128):
                A_regs = T.alloc_fragment((M, K), "float16")
                B_shared = T.alloc_shared((K, N), "float16")
                C_local = T.alloc_fragment((M, N), "float32")
                T.copy(A, A_regs)
                T.copy(B, B_shared)
                for i, j in T.Parallel(M, K):
                    A_regs[i, j] = T.max(A_regs[i, j], T.cast(0, "float16"))
                T.clear(C_local)
                T.gemm(A_regs, B_shared, C_local)
                T.copy(C_local, C)

        return gemm

    a, b = randn(M, K), randn(K, N)
    close(build()(a, b), a.relu() @ b)


@case()
def bias_and_gelu():
    M, N, K = 64, 128, 32

    @tilelang.jit(out_idx=-1)
    def build():
        @T.prim_func
        def gemm(
            A: T.Tensor((M, K), "float16"),
            B: T.Tensor((K, N), "float16"),
            bias: T.Tensor((N,), "float32"),
            C: T.Tensor((M, N), "float16"),
        ):
            with T.Kernel(N // 64, threads=128) as bx:
                A_shared = T.alloc_shared((M, K), "float16")
                B_shared = T.alloc_shared((K, 64), "float16")
                C_local = T.alloc_fragment((M, 64), "float32")
                T.copy(A, A_shared)
                T.copy(B[0, bx * 64], B_shared)
                T.clear(C_local)
                T.gemm(A_shared, B_shared, C_local)
                for i, j in T.Parallel(M, 64):
                    C_local[i, j] = C_local[i, j] + bias[bx * 64 + j]
                for i, j in T.Parallel(M, 64):
                    C_local[i, j] = C_local[i, j] * 0.5 * (1 + T.erf(C_local[i, j] * 0.70710678))
                T.copy(C_local, C[0, bx * 64])

        return gemm

    a, b, bias = randn(M, K), randn(K, N), randn(N, dtype=torch.float32)
    close(build()(a, b, bias), torch.nn.functional.gelu(a.float() @ b.float() + bias))


@case()
def dynamic_rows_eager():
    @tilelang.jit
    def gemm(A, B, block: int = 64):
        M = T.dynamic("M")
        N, K = T.const("N K")
        A: T.Tensor[[M, K], "float16"]
        B: T.Tensor[[K, N], "float16"]
        C = T.empty([M, N], "float16")
        with T.Kernel(T.ceildiv(N, block), T.ceildiv(M, block), threads=128) as (bx, by):
            A_shared = T.alloc_shared((block, 32), "float16")
            B_shared = T.alloc_shared((32, block), "float16")
            C_local = T.alloc_fragment((block, block), "float32")
            T.clear(C_local)
            for k in T.Pipelined(T.ceildiv(K, 32), num_stages=2):
                T.copy(A[by * block, k * 32], A_shared)
                T.copy(B[k * 32, bx * block], B_shared)
                T.gemm(A_shared, B_shared, C_local)
            T.copy(C_local, C[by * block, bx * block])
        return C

    b = randn(64, 64)
    for rows in (40, 130):
        a = randn(rows, 64)
        close(gemm(a, b), a @ b)


@case(quick=True)
def gemv():
    N, K, per_block, lanes, width = 32, 256, 4, 32, 8

    @tilelang.jit(out_idx=-1)
    def build():
        @T.prim_func
        def kernel(
            x: T.Tensor((K,), "float16"),
            W: T.Tensor((N, K), "float16"),
            y: T.Tensor((N,), "float16"),
        ):
            with T.Kernel(N // per_block, threads=(lanes, per_block)) as b:
                tk = T.get_thread_binding(0)
                tn = T.get_thread_binding(1)
                x_regs = T.alloc_local((width,), "float16")
                w_regs = T.alloc_local((width,), "float16")
                total = T.alloc_local((1,), "float32")
                total[0] = 0
                for step in T.serial(K // (lanes * width)):
                    for v in T.vectorized(width):
                        x_regs[v] = x[(step * lanes + tk) * width + v]
                        w_regs[v] = W[b * per_block + tn, (step * lanes + tk) * width + v]
                    for v in T.unroll(width):
                        total[0] += T.cast(x_regs[v], "float32") * T.cast(w_regs[v], "float32")
                total[0] = T.warp_reduce_sum(total[0])
                if tk == 0:
                    y[b * per_block + tn] = total[0]

        return kernel

    x, w = randn(K), randn(N, K)
    close(build()(x, w), w @ x)


@case()
def gemv_split_over_threads():
    N, K, threads = 16, 512, 64

    @tilelang.jit(out_idx=-1)
    def build():
        @T.prim_func
        def kernel(
            x: T.Tensor((K,), "float32"),
            W: T.Tensor((N, K), "float32"),
            y: T.Tensor((N,), "float32"),
        ):
            with T.Kernel(N, threads=threads) as n:
                products = T.alloc_fragment((1, K), "float32")
                total = T.alloc_fragment((1,), "float32")
                for i, k in T.Parallel(1, K):
                    products[i, k] = x[k] * W[n, k]
                T.reduce_sum(products, total, dim=1)
                for i in T.Parallel(1):
                    y[n] = total[i]

        return kernel

    x, w = randn(K, dtype=torch.float32), randn(N, K, dtype=torch.float32)
    close(build()(x, w), w @ x, 1e-4, 1e-4)


@case()
def grouped_by_expert():
    """Rows sorted by expert; each block looks up the expert of its rows."""
    experts, N, K, block = 3, 64, 32, 32
    counts = [40, 0, 70]
    padded = [(c + block - 1) // block * block for c in counts]
    M = sum(padded)
    owner = torch.tensor(
        [e for e, p in enumerate(padded) for _ in range(p // block)], dtype=torch.int32
    )

    @tilelang.jit(out_idx=-1)
    def build():
        @T.prim_func
        def gemm(
            A: T.Tensor((M, K), "float16"),
            B: T.Tensor((experts, N, K), "float16"),
            expert: T.Tensor((M // block,), "int32"),
            C: T.Tensor((M, N), "float16"),
        ):
            with T.Kernel(M // block, threads=128) as by:
                A_shared = T.alloc_shared((block, K), "float16")
                B_shared = T.alloc_shared((N, K), "float16")
                C_local = T.alloc_fragment((block, N), "float32")
                T.copy(A[by * block, 0], A_shared)
                T.copy(B[expert[by], 0:N, 0:K], B_shared)
                T.clear(C_local)
                T.gemm(A_shared, B_shared, C_local, transpose_B=True)
                T.copy(C_local, C[by * block, 0])

        return gemm

    a, b = randn(M, K), randn(experts, N, K)
    want = torch.cat(
        [a[i * block : (i + 1) * block] @ b[e].T for i, e in enumerate(owner.tolist())]
    )
    close(build()(a, b, owner.cuda()), want)


@case()
def gathered_tokens():
    """Fused MoE: rows are gathered by token index, results scattered with their weight."""
    tokens, rows, N, K = 20, 32, 64, 32

    @tilelang.jit
    def build():
        @T.prim_func
        def gemm(
            X: T.Tensor((tokens, K), "float16"),
            W: T.Tensor((N, K), "float16"),
            index: T.Tensor((rows,), "int32"),
            weight: T.Tensor((rows,), "float32"),
            Y: T.Tensor((tokens, N), "float32"),
        ):
            with T.Kernel(1, threads=128):
                A_shared = T.alloc_shared((rows, K), "float16")
                W_shared = T.alloc_shared((N, K), "float16")
                C_local = T.alloc_fragment((rows, N), "float32")
                for i, j in T.Parallel(rows, K):
                    A_shared[i, j] = T.if_then_else(
                        index[i] >= 0, X[index[i], j], T.cast(0, "float16")
                    )
                T.copy(W, W_shared)
                T.clear(C_local)
                T.gemm(A_shared, W_shared, C_local, transpose_B=True)
                for i, j in T.Parallel(rows, N):
                    if index[i] >= 0:
                        T.atomic_add(Y[index[i], j], C_local[i, j] * weight[i])

        return gemm

    x, w = randn(tokens, K), randn(N, K)
    index = torch.randint(-1, tokens, (rows,), dtype=torch.int32, device="cuda")
    weight = torch.rand(rows, device="cuda")
    y = torch.zeros(tokens, N, device="cuda")
    build()(x, w, index, weight, y)
    want = torch.zeros(tokens, N, device="cuda")
    for i, token in enumerate(index.tolist()):
        if token >= 0:
            want[token] += (x[token].float() @ w.float().T) * weight[i]
    close(y, want)


@case(quick=True)
def bmm_pointer_table():
    """One matrix per group, found through a table of addresses."""
    G, M, N, K = 3, 64, 64, 32

    @T.prim_func
    def gemm(
        tables: T.Tensor((G,), T.ptr),
        B: T.Tensor((N, K), "float16"),
        C: T.Tensor((G, M, N), "float16"),
    ):
        with T.Kernel(G, threads=128) as g:
            A = T.make_tensor(tables[g], (M, K), "float16")
            A_shared = T.alloc_shared((M, K), "float16")
            B_shared = T.alloc_shared((N, K), "float16")
            C_local = T.alloc_fragment((M, N), "float32")
            for i, j in T.Parallel(M, K):
                A_shared[i, j] = A[i, j]
            T.copy(B, B_shared)
            T.clear(C_local)
            T.gemm(A_shared, B_shared, C_local, transpose_B=True)
            T.copy(C_local, C[g, 0:M, 0:N])

    a, b = [randn(M, K) for _ in range(G)], randn(N, K)
    table = torch.tensor([t.data_ptr() for t in a], dtype=torch.int64, device="cuda")
    close(tilelang.compile(gemm, out_idx=-1)(table, b), torch.stack([t @ b.T for t in a]))


def compress(a, group, meta):
    """The stored half of a matrix with structured zeros, and its metadata.

    Of a group of four neighbours two are stored, of a group of two (float32) one; 4 bits per group
    say which. For float32 they are the places of two 16-bit halves: 0 and 1, or 2 and 3.
    """
    rows, columns = a.shape
    groups = a.reshape(rows, columns // group, group)
    order = (groups != 0).int().argsort(dim=-1, descending=True, stable=True)
    places = order[..., : group // 2].sort(dim=-1).values
    stored = groups.gather(-1, places).reshape(rows, columns // 2)
    if group == 2:
        codes = torch.where(places[..., 0] == 1, 0b1110, 0b0100)
    else:
        codes = places[..., 0] | places[..., 1] << 2
    per_word = meta.itemsize * 2
    shifts = 4 * torch.arange(per_word, device=a.device)
    words = (codes.reshape(rows, -1, per_word) << shifts).sum(-1)
    return stored, words.to(meta)  # the upper half of the values wraps to negative words


def structured_zeros(*shape, dtype=torch.float16):
    """Random values of which two of every four (one of every two) are zero, anywhere."""
    group = 2 if dtype == torch.float32 else 4
    values = torch.randint(1, 5, shape, device="cuda") * (
        torch.randint(0, 2, shape, device="cuda") * 2 - 1
    )
    rank = torch.rand(*shape, device="cuda").reshape(shape[0], -1, group).argsort(-1).argsort(-1)
    return torch.where((rank < group // 2).reshape(shape), values, 0).to(dtype)


def sparse_matmul(M, N, K, dtype, acc, meta, trans_B=True, in_registers=False, target=None):
    block_M, block_N, block_K = 64, 64, 64
    per_word = {"int8": 2, "int16": 4, "int32": 8}[meta] * (2 if dtype == "float32" else 4)
    B_shape, B_block = ((N, K), (block_N, block_K)) if trans_B else ((K, N), (block_K, block_N))

    @T.prim_func
    def sparse(
        A: T.Tensor((M, K // 2), dtype),
        E: T.Tensor((M, K // per_word), meta),
        B: T.Tensor(B_shape, dtype),
        C: T.Tensor((M, N), acc),
    ):
        with T.Kernel(T.ceildiv(N, block_N), T.ceildiv(M, block_M), threads=128) as (bx, by):
            A_shared = T.alloc_shared((block_M, block_K // 2), dtype)
            A_local = T.alloc_fragment((block_M, block_K // 2), dtype)
            E_shared = T.alloc_shared((block_M, block_K // per_word), meta)
            B_shared = T.alloc_shared(B_block, dtype)
            C_local = T.alloc_fragment((block_M, block_N), acc)
            T.clear(C_local)
            for k in T.Pipelined(T.ceildiv(K, block_K), num_stages=2):
                T.copy(A[by * block_M, k * (block_K // 2)], A_shared)
                T.copy(E[by * block_M, k * (block_K // per_word)], E_shared)
                if trans_B:
                    T.copy(B[bx * block_N, k * block_K], B_shared)
                else:
                    T.copy(B[k * block_K, bx * block_N], B_shared)
                if in_registers:
                    T.copy(A_shared, A_local)
                    T.gemm_sp(A_local, E_shared, B_shared, C_local, transpose_B=trans_B)
                else:
                    T.gemm_sp(A_shared, E_shared, B_shared, C_local, transpose_B=trans_B)
            T.copy(C_local, C[by * block_M, bx * block_N])

    return tilelang.compile(sparse, out_idx=-1, target=target)


def check_sparse(dtype, acc, meta, torch_dtype, torch_meta, **options):
    a = structured_zeros(64, 128, dtype=torch_dtype)
    b = torch.randint(-4, 5, (64, 128), device="cuda").to(torch_dtype)
    stored, words = compress(a.float(), 2 if dtype == "float32" else 4, torch_meta)
    stored = stored.to(torch_dtype)
    kernel = sparse_matmul(64, 64, 128, dtype, acc, meta, **options)
    product = kernel(stored, words, b if options.get("trans_B", True) else b.T.contiguous())
    assert torch.equal(product.float(), a.float() @ b.float().T)  # small integers: exact


@case(quick=True)
def sparse_fp16():
    check_sparse("float16", "float32", "int16", torch.float16, torch.int16, trans_B=False)


@case()
def sparse_bf16():
    check_sparse("bfloat16", "float32", "int8", torch.bfloat16, torch.int8)


@case()
def sparse_int8():
    check_sparse("int8", "int32", "int32", torch.int8, torch.int32)


@case()
def sparse_fp8():
    check_sparse("float8_e4m3", "float32", "int16", torch.float8_e4m3fn, torch.int16)


@case()
def sparse_tf32():
    check_sparse("float32", "float32", "int16", torch.float32, torch.int16)


@case()
def sparse_a_in_registers():
    check_sparse("float16", "float32", "int16", torch.float16, torch.int16, in_registers=True)


@case()
def sparse_ampere_fp16():
    check_sparse("float16", "float32", "int16", torch.float16, torch.int16, target=AMPERE)


@case()
def sparse_ampere_int8():
    check_sparse("int8", "int32", "int16", torch.int8, torch.int16, target=AMPERE)


@case()
def sparse_ampere_tf32():
    check_sparse("float32", "float32", "int16", torch.float32, torch.int16, target=AMPERE)
