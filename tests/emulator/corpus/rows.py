"""Row-wise work: norms, softmax, losses, reductions, scans, top-k, sorting."""

import tilelang
import tilelang.language as T
import torch

from . import case
from .gemm import close, randn

F32 = torch.float32


def per_row(rows, columns, body, dtype="float32", out="float32"):
    """A kernel with a block per 4 rows; `body(tile, result)` fills the result's tile."""

    @T.prim_func
    def kernel(x: T.Tensor((rows, columns), dtype), y: T.Tensor((rows, columns), out)):
        with T.Kernel(T.ceildiv(rows, 4), threads=128) as b:
            tile = T.alloc_fragment((4, columns), "float32")
            result = T.alloc_fragment((4, columns), "float32")
            T.copy(x[b * 4, 0], tile)
            body(tile, result)
            T.copy(result, y[b * 4, 0])

    return tilelang.compile(kernel, out_idx=-1)


@case(quick=True)
def rms_norm():
    @T.macro
    def body(tile, result):
        square = T.alloc_fragment((4, 256), "float32")
        total = T.alloc_fragment((4,), "float32")
        for i, j in T.Parallel(4, 256):
            square[i, j] = tile[i, j] * tile[i, j]
        T.reduce_sum(square, total, dim=1)
        for i, j in T.Parallel(4, 256):
            result[i, j] = tile[i, j] * T.rsqrt(total[i] / 256 + 1e-6)

    x = randn(9, 256, dtype=torch.bfloat16)
    want = torch.nn.functional.rms_norm(x.float(), (256,), eps=1e-6)
    close(per_row(9, 256, body, "bfloat16", "bfloat16")(x), want)


@case()
def layer_norm():
    @T.macro
    def body(tile, result):
        mean = T.alloc_fragment((4,), "float32")
        variance = T.alloc_fragment((4,), "float32")
        T.reduce_sum(tile, mean, dim=1)
        for i, j in T.Parallel(4, 128):
            result[i, j] = (tile[i, j] - mean[i] / 128) * (tile[i, j] - mean[i] / 128)
        T.reduce_sum(result, variance, dim=1)
        for i, j in T.Parallel(4, 128):
            result[i, j] = (tile[i, j] - mean[i] / 128) * T.rsqrt(variance[i] / 128 + 1e-5)

    x = randn(8, 128, dtype=F32)
    close(per_row(8, 128, body)(x), torch.nn.functional.layer_norm(x, (128,)), 1e-4, 1e-4)


@case()
def softmax():
    @T.macro
    def body(tile, result):
        top = T.alloc_fragment((4,), "float32")
        total = T.alloc_fragment((4,), "float32")
        T.reduce_max(tile, top, dim=1)
        for i, j in T.Parallel(4, 128):
            result[i, j] = T.exp(tile[i, j] - top[i])
        T.reduce_sum(result, total, dim=1)
        for i, j in T.Parallel(4, 128):
            result[i, j] = result[i, j] / total[i]

    x = randn(6, 128, dtype=F32)
    close(per_row(6, 128, body)(x), x.softmax(-1), 1e-4, 1e-5)


@case()
def online_softmax_long_rows():
    rows, columns, block = 3, 1000, 256

    @T.prim_func
    def kernel(x: T.Tensor((rows, columns), "float16"), y: T.Tensor((rows, columns), "float32")):
        with T.Kernel(rows, threads=128) as r:
            tile = T.alloc_fragment((1, block), "float32")
            top = T.alloc_fragment((1,), "float32")
            before = T.alloc_fragment((1,), "float32")
            part = T.alloc_fragment((1,), "float32")
            total = T.alloc_fragment((1,), "float32")
            T.fill(top, -T.infinity("float32"))
            T.fill(total, 0)
            for b in T.serial(T.ceildiv(columns, block)):
                for i, j in T.Parallel(1, block):
                    tile[i, j] = T.if_then_else(
                        b * block + j < columns,
                        T.cast(x[r, b * block + j], "float32"),
                        -T.infinity("float32"),
                    )
                T.copy(top, before)
                T.reduce_max(tile, top, dim=1, clear=False)
                for i, j in T.Parallel(1, block):
                    tile[i, j] = T.exp(tile[i, j] - top[i])
                T.reduce_sum(tile, part, dim=1)
                for i in T.Parallel(1):
                    total[i] = total[i] * T.exp(before[i] - top[i]) + part[i]
            for b in T.serial(T.ceildiv(columns, block)):
                for i, j in T.Parallel(1, block):
                    if b * block + j < columns:
                        y[r, b * block + j] = (
                            T.exp(T.cast(x[r, b * block + j], "float32") - top[i]) / total[i]
                        )

    x = randn(rows, columns)
    close(tilelang.compile(kernel, out_idx=-1)(x), x.float().softmax(-1), 1e-4, 1e-6)


@case()
def cross_entropy():
    rows, vocabulary = 8, 512

    @T.prim_func
    def kernel(
        logits: T.Tensor((rows, vocabulary), "bfloat16"),
        labels: T.Tensor((rows,), "int64"),
        loss: T.Tensor((rows,), "float32"),
    ):
        with T.Kernel(rows, threads=128) as r:
            tile = T.alloc_fragment((1, vocabulary), "float32")
            top = T.alloc_fragment((1,), "float32")
            total = T.alloc_fragment((1,), "float32")
            T.copy(logits[r, 0], tile)
            T.reduce_max(tile, top, dim=1)
            for i, j in T.Parallel(1, vocabulary):
                tile[i, j] = T.exp(tile[i, j] - top[i])
            T.reduce_sum(tile, total, dim=1)
            for i in T.Parallel(1):
                loss[r] = T.log(total[i]) + top[i] - T.cast(logits[r, labels[r]], "float32")

    x = randn(rows, vocabulary, dtype=torch.bfloat16)
    labels = torch.randint(0, vocabulary, (rows,), device="cuda")
    want = torch.nn.functional.cross_entropy(x.float(), labels, reduction="none")
    close(tilelang.compile(kernel, out_idx=-1)(x, labels), want, 1e-3, 1e-3)


@case()
def norm_and_residual_in_place():
    rows, columns = 5, 128

    @tilelang.jit
    def build():
        n = T.dynamic("n")

        @T.prim_func
        def kernel(
            x: T.Tensor((n, columns), "bfloat16"),
            residual: T.Tensor((n, columns), "bfloat16"),
            weight: T.Tensor((columns,), "float32"),
        ):
            with T.Kernel(n, threads=64) as r:
                total = T.alloc_fragment((1,), "float32")
                tile = T.alloc_fragment((1, columns), "float32")
                square = T.alloc_fragment((1, columns), "float32")
                for i, j in T.Parallel(1, columns):
                    tile[i, j] = T.cast(x[r, j], "float32") + T.cast(residual[r, j], "float32")
                for i, j in T.Parallel(1, columns):
                    residual[r, j] = tile[i, j]
                for i, j in T.Parallel(1, columns):
                    square[i, j] = tile[i, j] * tile[i, j]
                T.reduce_sum(square, total, dim=1)
                for i, j in T.Parallel(1, columns):
                    x[r, j] = tile[i, j] * T.rsqrt(total[i] / columns + 1e-6) * weight[j]

        return kernel

    x, residual = (randn(rows, columns, dtype=torch.bfloat16) for _ in range(2))
    weight = torch.rand(columns, device="cuda")
    total = x.float() + residual.float()
    want = torch.nn.functional.rms_norm(total, (columns,), weight, 1e-6)
    build()(x, residual, weight)
    close(residual, total.bfloat16(), 0, 0)
    close(x, want)


def reduction(name, want):
    rows, columns = 64, 64
    reduce = getattr(T, name)

    @T.prim_func
    def kernel(x: T.Tensor((rows, columns), "float32"), y: T.Tensor((rows,), "float32")):
        with T.Kernel(1, threads=128):
            tile = T.alloc_fragment((rows, columns), "float32")
            out = T.alloc_fragment((rows,), "float32")
            T.copy(x, tile)
            reduce(tile, out, dim=1)
            T.copy(out, y)

    x = randn(rows, columns, dtype=F32)
    close(tilelang.compile(kernel, out_idx=-1)(x), want(x), 1e-4, 1e-4)


@case()
def reductions_over_columns():
    reduction("reduce_sum", lambda x: x.sum(1))
    reduction("reduce_min", lambda x: x.amin(1))
    reduction("reduce_abssum", lambda x: x.abs().sum(1))


@case()
def reduction_over_rows():
    rows, columns = 64, 32

    @T.prim_func
    def kernel(x: T.Tensor((rows, columns), "float32"), y: T.Tensor((columns,), "float32")):
        with T.Kernel(1, threads=128):
            tile = T.alloc_fragment((rows, columns), "float32")
            out = T.alloc_fragment((columns,), "float32")
            T.copy(x, tile)
            T.reduce_sum(tile, out, dim=0)
            T.copy(out, y)

    x = randn(rows, columns, dtype=F32)
    close(tilelang.compile(kernel, out_idx=-1)(x), x.sum(0), 1e-4, 1e-4)


@case(quick=True)
def cumulative_sum():
    rows, columns = 4, 100

    def build(reverse):
        @T.prim_func
        def kernel(
            x: T.Tensor((rows, columns), "float32"), y: T.Tensor((rows, columns), "float32")
        ):
            with T.Kernel(1, threads=128):
                tile = T.alloc_shared((rows, columns), "float32")
                T.copy(x, tile)
                T.cumsum(src=tile, dim=1, reverse=reverse)
                T.copy(tile, y)

        return tilelang.compile(kernel, out_idx=-1)

    x = randn(rows, columns, dtype=F32)
    close(build(False)(x), x.cumsum(1), 1e-4, 1e-4)
    close(build(True)(x), x.flip(1).cumsum(1).flip(1), 1e-4, 1e-4)


@case()
def top_k_gating():
    """Softmax scores, then the largest k by repeated maxima with the lowest index first."""
    tokens, experts, k = 7, 32, 4

    @T.prim_func
    def kernel(
        scores: T.Tensor((tokens, experts), "float32"),
        values: T.Tensor((tokens, k), "float32"),
        index: T.Tensor((tokens, k), "int32"),
    ):
        with T.Kernel(tokens, threads=32) as row:
            lane = T.get_thread_binding()
            score = T.alloc_local((1,), "float32")
            best = T.alloc_local((1,), "float32")
            who = T.alloc_local((1,), "int32")
            score[0] = scores[row, lane]
            for i in T.serial(k):
                best[0] = T.warp_reduce_max(score[0])
                who[0] = T.warp_reduce_min(T.if_then_else(score[0] == best[0], lane, experts))
                if lane == who[0]:
                    values[row, i] = best[0]
                    index[row, i] = lane
                    score[0] = -T.infinity("float32")

    x = randn(tokens, experts, dtype=F32)
    values, index = tilelang.compile(kernel, out_idx=[1, 2])(x)
    want = x.topk(k)
    assert torch.equal(values, want.values)
    assert torch.equal(index.long(), want.indices)


@case()
def top_k_by_shared_histogram():
    """The threshold of the largest k integers from a histogram, as radix selection does."""
    count, bins, k = 500, 64, 100

    @T.prim_func
    def kernel(x: T.Tensor((count,), "int32"), threshold: T.Tensor((1,), "int32")):
        with T.Kernel(1, threads=bins):
            t = T.get_thread_binding()
            histogram = T.alloc_shared((bins,), "int32")
            histogram[t] = 0
            T.sync_threads()
            for i in T.serial(T.ceildiv(count, bins)):
                if i * bins + t < count:
                    T.atomic_add(histogram[x[i * bins + t]], 1)
            T.sync_threads()
            T.cumsum(src=histogram, dim=0, reverse=True)
            T.sync_threads()
            if histogram[t] >= k:
                if t == bins - 1 or histogram[t + 1] < k:
                    threshold[0] = t

    x = torch.randint(0, bins, (count,), dtype=torch.int32, device="cuda")
    got = tilelang.compile(kernel, out_idx=-1)(x)
    assert int(got) == int(x.sort(descending=True).values[k - 1])


@case()
def bitonic_sort():
    rows, columns = 3, 128

    @T.prim_func
    def kernel(x: T.Tensor((rows, columns), "float32"), y: T.Tensor((rows, columns), "float32")):
        with T.Kernel(rows, threads=columns) as r:
            t = T.get_thread_binding()
            keys = T.alloc_shared((columns,), "float32")
            low = T.alloc_local((1,), "float32")
            high = T.alloc_local((1,), "float32")
            keys[t] = x[r, t]
            T.sync_threads()
            for stage in T.serial(7):
                for step in T.serial(stage + 1):
                    distance = T.shift_left(1, stage - step)
                    partner = T.bitwise_xor(t, distance)
                    if partner > t:
                        low[0] = T.min(keys[t], keys[partner])
                        high[0] = T.max(keys[t], keys[partner])
                        if T.bitwise_and(t, T.shift_left(2, stage)) == 0:
                            keys[t] = low[0]
                            keys[partner] = high[0]
                        else:
                            keys[t] = high[0]
                            keys[partner] = low[0]
                    T.sync_threads()
            y[r, t] = keys[t]

    x = randn(rows, columns, dtype=F32)
    assert torch.equal(tilelang.compile(kernel, out_idx=-1)(x), x.sort(1).values)


@case()
def argmax_over_threads():
    rows, columns = 4, 200

    @T.prim_func
    def kernel(x: T.Tensor((rows, columns), "float32"), y: T.Tensor((rows,), "int32")):
        with T.Kernel(rows, threads=64) as r:
            t = T.get_thread_binding()
            best = T.alloc_shared((64,), "float32")
            where = T.alloc_shared((64,), "int32")
            best[t] = -T.infinity("float32")
            where[t] = 0
            for i in T.serial(T.ceildiv(columns, 64)):
                if i * 64 + t < columns:
                    if x[r, i * 64 + t] > best[t]:
                        best[t] = x[r, i * 64 + t]
                        where[t] = i * 64 + t
            for step in T.serial(6):
                T.sync_threads()
                half = T.shift_right(32, step)
                if t < half:
                    if best[t + half] > best[t]:
                        best[t] = best[t + half]
                        where[t] = where[t + half]
            if t == 0:
                y[r] = where[0]

    x = randn(rows, columns, dtype=F32)
    assert torch.equal(tilelang.compile(kernel, out_idx=-1)(x).long(), x.argmax(1))
