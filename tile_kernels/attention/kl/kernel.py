"""The Kullback-Leibler divergence of the indexer's softmax from a target, and its gradient."""

from typing import Any

from tilelang import language as T

from tile_kernels.runtime.device import WARP
from tile_kernels.runtime.kernels.common import EXPLICIT_GUARDS
from tile_kernels.runtime.launch import kernel

THREADS = 128  # of a query; other values were not compared
WARPS = THREADS // WARP


@kernel(access_bits=lambda *_: (32, 32), pass_configs=EXPLICIT_GUARDS)
def divergence() -> Any:
    """A block has a query: the largest logit, then sums, then the gradient."""
    tokens, slots = T.dynamic("tokens slots")

    @T.macro
    def sum_over_block(sums, warp_values):
        """Each of three sums over all threads, in a fixed order, in every thread."""
        tx = T.get_thread_binding()
        for d in T.unroll(5):
            for i in T.unroll(3):
                sums[i] = sums[i] + T.shfl_xor(sums[i], T.shift_left(1, d))
        T.sync_threads()
        if tx % WARP == 0:
            for i in T.unroll(3):
                warp_values[i, tx // WARP] = sums[i]
        T.sync_threads()
        for i in T.unroll(3):
            sums[i] = warp_values[i, 0]
            for w in T.unroll(WARPS - 1):
                sums[i] = sums[i] + warp_values[i, w + 1]

    @T.prim_func
    def divergence_of_queries(
        p: T.Tensor[(tokens, slots), T.float32],
        logits: T.Tensor[(tokens, slots), T.float32],
        loss: T.Tensor[(tokens,), T.float32],
        grad: T.Tensor[(tokens, slots), T.float32],
    ):
        with T.Kernel(tokens, threads=THREADS) as token:
            tx = T.get_thread_binding()
            warp_values = T.alloc_shared((3, WARPS), T.float32)
            largest = T.alloc_var(T.float32, init=-T.infinity(T.float32))
            sums = T.alloc_local((3,), T.float32)  # of exponentials, of p, of the loss
            steps = T.ceildiv(slots, THREADS)
            for i in T.unroll(3):
                sums[i] = T.float32(0)
            for step in T.serial(steps):
                if step * THREADS + tx < slots:
                    first = T.alloc_var(T.float32, init=logits[token, step * THREADS + tx])
                    if first <= T.infinity(T.float32):
                        largest = T.max(largest, first)
                    else:  # NaN, which makes all results NaN
                        largest = T.infinity(T.float32)
            for d in T.unroll(5):
                largest = T.max(largest, T.shfl_xor(largest, T.shift_left(1, d)))
            if tx % WARP == 0:
                warp_values[0, tx // WARP] = largest
            T.sync_threads()
            for w in T.unroll(WARPS):
                largest = T.max(largest, warp_values[0, w])
            for step in T.serial(steps):
                if step * THREADS + tx < slots:
                    own = T.alloc_var(T.float32, init=p[token, step * THREADS + tx])
                    logit = T.alloc_var(T.float32, init=logits[token, step * THREADS + tx])
                    sums[0] = sums[0] + T.exp(logit - largest)
                    sums[1] = sums[1] + own
                    if own != T.float32(0):
                        sums[2] = sums[2] + own * (T.log(own) - (logit - largest))
            sum_over_block(sums, warp_values)
            wanted = T.alloc_var(
                T.bool, init=(largest > -T.infinity(T.float32)) & (sums[1] != T.float32(0))
            )
            if tx == 0:
                loss[token] = T.float32(0)
                if wanted:
                    loss[token] = sums[2] + sums[1] * T.log(sums[0])
            for step in T.serial(steps):
                if step * THREADS + tx < slots:
                    own = T.alloc_var(T.float32, init=p[token, step * THREADS + tx])
                    logit = T.alloc_var(T.float32, init=logits[token, step * THREADS + tx])
                    grad[token, step * THREADS + tx] = T.if_then_else(
                        wanted, T.exp(logit - largest) / sums[0] - own, T.float32(0)
                    )

    return divergence_of_queries
