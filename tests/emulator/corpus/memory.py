"""Memory movement and stencils: element-wise, transposes, gathers, convolutions, optimisers."""

import tilelang
import tilelang.language as T
import torch

from . import case
from .gemm import close, randn

F32 = torch.float32


@case(quick=True)
def vector_add_dynamic():
    @tilelang.jit(out_idx=-1)
    def build():
        n = T.dynamic("n")

        @T.prim_func
        def kernel(
            x: T.Tensor((n,), "float32"), y: T.Tensor((n,), "float32"), z: T.Tensor((n,), "float32")
        ):
            with T.Kernel(T.ceildiv(n, 256), threads=64) as b:
                for i in T.Parallel(256):
                    if b * 256 + i < n:
                        z[b * 256 + i] = x[b * 256 + i] + y[b * 256 + i]

        return kernel

    kernel = build()
    for n in (1, 256, 1000):
        x, y = randn(n, dtype=F32), randn(n, dtype=F32)
        assert torch.equal(kernel(x, y), x + y)


@case()
def swiglu_with_scalars():
    rows, columns = 6, 64

    @tilelang.jit(out_idx=-1)
    def build():
        @T.prim_func
        def kernel(
            x: T.Tensor((rows, 2 * columns), "bfloat16"), limit: T.float32, alpha: T.float32,
            y: T.Tensor((rows, columns), "bfloat16"),
        ):  # fmt: skip
            with T.Kernel(rows, threads=64) as r:
                for j in T.Parallel(columns):
                    gate = T.min(T.cast(x[r, j], "float32"), limit)
                    up = T.clamp(T.cast(x[r, columns + j], "float32"), -limit, limit)
                    y[r, j] = gate / (1 + T.exp(-alpha * gate)) * (up + 1)

        return kernel

    x = randn(rows, 2 * columns, dtype=torch.bfloat16) * 3
    gate, up = x.float().chunk(2, 1)
    gate, up = gate.clamp(max=2.5), up.clamp(-2.5, 2.5)
    close(build()(x, 2.5, 1.7), gate * torch.sigmoid(1.7 * gate) * (up + 1), 1e-2, 1e-2)


@case()
def transpose_through_shared():
    rows, columns, tile = 96, 64, 32

    @tilelang.jit(out_idx=-1)
    def build():
        @T.prim_func
        def kernel(
            x: T.Tensor((rows, columns), "float16"), y: T.Tensor((columns, rows), "float16")
        ):
            with T.Kernel(columns // tile, rows // tile, threads=128) as (bx, by):
                here = T.alloc_shared((tile, tile + 1), "float16")
                for i, j in T.Parallel(tile, tile):
                    here[i, j] = x[by * tile + i, bx * tile + j]
                for i, j in T.Parallel(tile, tile):
                    y[bx * tile + i, by * tile + j] = here[j, i]

        return kernel

    x = randn(rows, columns)
    assert torch.equal(build()(x), x.T)


@case()
def permute_four_dimensions():
    shape = (2, 3, 8, 16)

    @tilelang.jit(out_idx=-1)
    def build():
        @T.prim_func
        def kernel(x: T.Tensor(shape, "float32"), y: T.Tensor((2, 8, 3, 16), "float32")):
            with T.Kernel(2, 3, threads=128) as (b, h):
                for i, j in T.Parallel(8, 16):
                    y[b, i, h, j] = x[b, h, i, j]

        return kernel

    x = randn(*shape, dtype=F32)
    assert torch.equal(build()(x), x.transpose(1, 2))


@case()
def strided_input():
    rows, columns = 8, 32

    @tilelang.jit
    def build():
        stride = T.dynamic("stride")

        @T.prim_func
        def kernel(
            x: T.StridedTensor((rows, columns), (stride, 1), "float32"),
            y: T.Tensor((rows, columns), "float32"),
        ):
            with T.Kernel(rows, threads=32) as r:
                for j in T.Parallel(columns):
                    y[r, j] = x[r, j] * 2

        return kernel

    x, y = randn(rows, 50, dtype=F32)[:, 5:37], torch.empty(rows, columns, device="cuda")
    build()(x, y)
    assert torch.equal(y, x * 2)


@case(quick=True)
def reshape_of_global_tensor():
    rows, columns = 16, 64

    @T.prim_func
    def kernel(x: T.Tensor((rows, columns), "float32"), y: T.Tensor((rows * columns,), "float32")):
        flat = T.view(x, (rows * columns,))
        with T.Kernel(rows, threads=columns) as b:
            t = T.get_thread_binding()
            y[b * columns + t] = flat[b * columns + t] + 1

    x = randn(rows, columns, dtype=F32)
    assert torch.equal(tilelang.compile(kernel, out_idx=-1)(x), x.flatten() + 1)


@case()
def embedding_gather():
    vocabulary, dim, tokens = 50, 64, 12

    @T.prim_func
    def kernel(
        table: T.Tensor((vocabulary, dim), "bfloat16"),
        index: T.Tensor((tokens,), "int64"),
        out: T.Tensor((tokens, dim), "bfloat16"),
    ):
        with T.Kernel(tokens, threads=32) as b:
            for j in T.Parallel(dim):
                out[b, j] = table[index[b], j]

    table = randn(vocabulary, dim, dtype=torch.bfloat16)
    index = torch.randint(0, vocabulary, (tokens,), device="cuda")
    assert torch.equal(tilelang.compile(kernel, out_idx=-1)(table, index), table[index])


@case()
def embedding_gradient_atomics():
    vocabulary, dim, tokens = 10, 32, 40

    @tilelang.jit
    def build():
        @T.prim_func
        def kernel(
            grad: T.Tensor((tokens, dim), "float32"),
            index: T.Tensor((tokens,), "int32"),
            out: T.Tensor((vocabulary, dim), "float32"),
        ):
            with T.Kernel(tokens, threads=dim) as b:
                t = T.get_thread_binding()
                T.atomic_add(out[index[b], t], grad[b, t])

        return kernel

    grad = randn(tokens, dim, dtype=F32)
    index = torch.randint(0, vocabulary, (tokens,), dtype=torch.int32, device="cuda")
    out = torch.zeros(vocabulary, dim, device="cuda")
    build()(grad, index, out)
    close(out, torch.zeros(vocabulary, dim, device="cuda").index_add(0, index, grad), 1e-4, 1e-4)


@case()
def convolution_2d():
    """Implicit matrix product: patches are gathered into shared memory."""
    N, H, W, C, F, R = 1, 8, 8, 16, 64, 3
    rows, K = N * H * W, R * R * C

    @T.prim_func
    def kernel(
        x: T.Tensor((N, H, W, C), "float16"), w: T.Tensor((R, R, C, F), "float16"),
        y: T.Tensor((N, H, W, F), "float16"),
    ):  # fmt: skip
        with T.Kernel(T.ceildiv(F, 64), T.ceildiv(rows, 64), threads=128) as (bx, by):
            patches = T.alloc_shared((64, 16), "float16")
            weights = T.alloc_shared((16, 64), "float16")
            acc = T.alloc_fragment((64, 64), "float32")
            w_flat = T.Tensor((K, F), "float16", w.data)
            y_flat = T.Tensor((rows, F), "float16", y.data)
            T.clear(acc)
            for k in T.Pipelined(K // 16, num_stages=2):
                for i, j in T.Parallel(64, 16):
                    at, m = k * 16 + j, by * 64 + i
                    h = m % (H * W) // W + at // (R * C) - 1
                    v = m % W + at // C % R - 1
                    inside = (h >= 0) and (v >= 0) and (h < H) and (v < W)
                    patches[i, j] = T.if_then_else(
                        inside, x[m // (H * W), h, v, at % C], T.cast(0, "float16")
                    )
                T.copy(w_flat[k * 16, bx * 64], weights)
                T.gemm(patches, weights, acc)
            T.copy(acc, y_flat[by * 64, bx * 64])

    x, w = randn(N, H, W, C), randn(R, R, C, F) * 0.2
    want = torch.nn.functional.conv2d(
        x.float().permute(0, 3, 1, 2), w.float().permute(3, 2, 0, 1), padding=1
    )
    close(tilelang.compile(kernel, out_idx=-1)(x, w), want.permute(0, 2, 3, 1), 2e-2, 5e-2)


@case(quick=True)
def convolution_2d_im2col():
    """The same with the copy engine's im2col mode."""
    N, H, W, C, F, R = 1, 8, 8, 64, 64, 3
    rows, K = N * H * W, R * R * C

    @T.prim_func
    def kernel(
        x: T.Tensor((N, H, W, C), "float16"), w: T.Tensor((R, R, C, F), "float16"),
        y: T.Tensor((N, H, W, F), "float16"),
    ):  # fmt: skip
        with T.Kernel(T.ceildiv(F, 64), T.ceildiv(rows, 64), threads=128) as (bx, by):
            patches = T.alloc_shared((64, 64), "float16")
            weights = T.alloc_shared((64, 64), "float16")
            acc = T.alloc_fragment((64, 64), "float32")
            w_flat = T.Tensor((K, F), "float16", w.data)
            y_flat = T.Tensor((rows, F), "float16", y.data)
            T.clear(acc)
            for k in T.Pipelined(K // 64, num_stages=2):
                T.im2col(x, patches, by, k, R, 1, 1, 1)
                T.copy(w_flat[k * 64, bx * 64], weights)
                T.gemm(patches, weights, acc)
            T.copy(acc, y_flat[by * 64, bx * 64])

    x, w = randn(N, H, W, C) * 0.5, randn(R, R, C, F) * 0.1
    want = torch.nn.functional.conv2d(
        x.float().permute(0, 3, 1, 2), w.float().permute(3, 2, 0, 1), padding=1
    )
    close(tilelang.compile(kernel, out_idx=-1)(x, w), want.permute(0, 2, 3, 1), 2e-2, 5e-2)


@case()
def max_pooling():
    H, W, C = 8, 8, 32

    @T.prim_func
    def kernel(x: T.Tensor((H, W, C), "float32"), y: T.Tensor((H // 2, W // 2, C), "float32")):
        with T.Kernel(W // 2, H // 2, threads=C) as (bx, by):
            t = T.get_thread_binding()
            best = T.alloc_local((1,), "float32")
            best[0] = -T.infinity("float32")
            for i, j in T.grid(2, 2):
                best[0] = T.max(best[0], x[by * 2 + i, bx * 2 + j, t])
            y[by, bx, t] = best[0]

    x = randn(H, W, C, dtype=F32)
    want = torch.nn.functional.max_pool2d(x.permute(2, 0, 1), 2).permute(1, 2, 0)
    assert torch.equal(tilelang.compile(kernel, out_idx=-1)(x), want)


@case()
def stencil_with_halo():
    n, block = 130, 64

    @T.prim_func
    def kernel(x: T.Tensor((n,), "float32"), y: T.Tensor((n,), "float32")):
        with T.Kernel(T.ceildiv(n, block), threads=block) as b:
            t = T.get_thread_binding()
            tile = T.alloc_shared((block + 2,), "float32")
            at = b * block + t
            tile[t + 1] = T.if_then_else(at < n, x[T.min(at, n - 1)], 0.0)
            if t == 0:
                tile[0] = T.if_then_else(at > 0, x[T.max(at - 1, 0)], 0.0)
            if t == block - 1:
                tile[block + 1] = T.if_then_else(at + 1 < n, x[T.min(at + 1, n - 1)], 0.0)
            T.sync_threads()
            if at < n:
                y[at] = 0.25 * tile[t] + 0.5 * tile[t + 1] + 0.25 * tile[t + 2]

    x = randn(n, dtype=F32)
    padded = torch.nn.functional.pad(x, (1, 1))
    want = 0.25 * padded[:-2] + 0.5 * padded[1:-1] + 0.25 * padded[2:]
    close(tilelang.compile(kernel, out_idx=-1)(x), want, 1e-5, 1e-6)


@case()
def adam_step():
    n = 500

    @tilelang.jit
    def build():
        @T.prim_func
        def kernel(
            p: T.Tensor((n,), "float32"), g: T.Tensor((n,), "bfloat16"), m: T.Tensor((n,), "float32"),
            v: T.Tensor((n,), "float32"), step: T.int32, rate: T.float32,
        ):  # fmt: skip
            with T.Kernel(T.ceildiv(n, 128), threads=128) as b:
                for i in T.Parallel(128):
                    at = b * 128 + i
                    if at < n:
                        grad = T.cast(g[at], "float32")
                        m[at] = 0.9 * m[at] + 0.1 * grad
                        v[at] = 0.99 * v[at] + 0.01 * grad * grad
                        m_hat = m[at] / (1 - T.pow(T.float32(0.9), T.cast(step, "float32")))
                        v_hat = v[at] / (1 - T.pow(T.float32(0.99), T.cast(step, "float32")))
                        p[at] = p[at] - rate * m_hat / (T.sqrt(v_hat) + 1e-8)

        return kernel

    p, g = randn(n, dtype=F32), randn(n, dtype=torch.bfloat16)
    m, v = torch.zeros(n, device="cuda"), torch.zeros(n, device="cuda")
    parameter = torch.nn.Parameter(p.clone())
    optimizer = torch.optim.Adam([parameter], lr=0.01, betas=(0.9, 0.99))
    kernel = build()
    for step in range(1, 4):
        parameter.grad = g.float()
        optimizer.step()
        kernel(p, g, m, v, step, 0.01)
    close(p, parameter.detach(), 1e-4, 1e-5)


@case()
def hadamard_transform():
    rows, n = 4, 64

    @T.prim_func
    def kernel(x: T.Tensor((rows, n), "float32"), y: T.Tensor((rows, n), "float32")):
        with T.Kernel(rows, threads=32) as r:
            lane = T.get_thread_binding()
            a = T.alloc_local((2,), "float32")
            other = T.alloc_local((1,), "float32")
            keep = T.alloc_local((1,), "float32")
            for i in T.unroll(2):
                a[i] = x[r, lane * 2 + i]
            keep[0] = a[0]
            a[0] = keep[0] + a[1]
            a[1] = keep[0] - a[1]
            for step in T.unroll(5):
                for i in T.unroll(2):
                    other[0] = T.shfl_xor(a[i], 1 << step)
                    a[i] = T.if_then_else(
                        T.bitwise_and(lane, 1 << step) == 0, a[i] + other[0], other[0] - a[i]
                    )
            for i in T.unroll(2):
                y[r, lane * 2 + i] = a[i]

    x = randn(rows, n, dtype=F32)
    h = torch.ones(1, 1)
    while h.shape[0] < n:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    close(tilelang.compile(kernel, out_idx=-1)(x), x @ h.cuda(), 1e-4, 1e-4)


@case(quick=True)
def dropout_philox():
    """Random numbers of cuRAND's Philox generator: the share of zeros, and repeatability."""
    n = 512

    @tilelang.jit(out_idx=-1)
    def build():
        @T.prim_func
        def kernel(x: T.Tensor((n,), "float32"), seed: T.int32, y: T.Tensor((n,), "float32")):
            with T.Kernel(n // 64, threads=64) as b:
                t = T.get_thread_binding()
                T.rng_init(seed, b * 64 + t)
                y[b * 64 + t] = T.if_then_else(T.rng_rand_float() < 0.25, 0.0, x[b * 64 + t] / 0.75)

        return kernel

    x = torch.ones(n, device="cuda")
    kernel = build()
    y = kernel(x, 7)
    assert torch.equal(y, kernel(x, 7))
    assert not torch.equal(y, kernel(x, 8))
    assert 0.15 < (y == 0).float().mean() < 0.35
