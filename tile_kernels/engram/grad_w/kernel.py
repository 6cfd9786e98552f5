"""The gradients of two norms' weights, from partial sums of the gradient of their product."""

from typing import Any

from tilelang import language as T

from tile_kernels.engram.grad_w.plan import Plan
from tile_kernels.engram.weight.plan import BITS
from tile_kernels.runtime.kernels.common import EXPLICIT_GUARDS, WARP
from tile_kernels.runtime.launch import kernel


def access_bits(*static: Any) -> tuple[tuple[int, ...], int]:
    plan = Plan(*static)
    return tuple(sorted({32, BITS[plan.dtype], 32 * plan.vector})), 32


@kernel(
    access_bits=access_bits,
    pass_configs={**EXPLICIT_GUARDS, "tl.disable_thread_storage_sync": True},
)
def reduce_gradients(dtype: str, vector: int, warps: int, max_at_once: int) -> Any:
    """With `S` the sum of parts, `S` times either weight is added to the other's gradient.

    The first `used` warps of a block have parts, `at_once` of them at a time. What others add is
    +0, which changes no sum: these start at +0, and are never -0.
    """
    parts, columns = T.dynamic("parts columns")
    iterations = -(-vector // warps)  # columns of a thread at the end

    @T.prim_func
    def reduce_columns(
        partial: T.Tensor[(parts, columns), T.float32],
        weight_hidden: T.Tensor[(columns,), dtype],
        weight_embed: T.Tensor[(columns,), dtype],
        grad_hidden: T.Tensor[(columns,), T.float32],
        grad_embed: T.Tensor[(columns,), T.float32],
        used: T.int32,
        at_once: T.int32,
    ):
        with T.Kernel(T.ceildiv(columns, WARP * vector), threads=warps * WARP) as block:
            T.assume(columns % vector == 0)
            lane = T.get_thread_binding() % WARP
            warp = T.get_thread_binding() // WARP
            first = (block * WARP + lane) * vector
            warp_sums = T.alloc_shared((warps, WARP * vector), T.float32)
            read = T.alloc_local((max_at_once * vector,), T.float32)
            sums = T.alloc_local((vector,), T.float32)
            # What a thread needs of its columns at the end is loaded first.
            old = T.alloc_local((iterations, 2), T.float32)
            weights = T.alloc_local((iterations, 2), dtype)
            for i in T.unroll(iterations):
                index = i * warps * WARP + T.get_thread_binding()
                column = block * WARP * vector + index
                if index < WARP * vector and column < columns:
                    weights[i, 0] = weight_embed[column]
                    weights[i, 1] = weight_hidden[column]
                    old[i, 0] = grad_hidden[column]
                    old[i, 1] = grad_embed[column]
            for e in T.unroll(vector):
                sums[e] = T.float32(0)
            if first < columns and warp < used:
                for iteration in T.serial(T.ceildiv(parts, used * at_once)):
                    for i in T.unroll(max_at_once):
                        part = (iteration * used + warp) * at_once + i
                        if i < at_once and part < parts:
                            for e in T.vectorized(vector):
                                read[i * vector + e] = partial[part, first + e]
                        else:
                            for e in T.unroll(vector):
                                read[i * vector + e] = T.float32(0)
                    for i in T.unroll(max_at_once):
                        for e in T.unroll(vector):
                            sums[e] = sums[e] + read[i * vector + e]
            for e in T.unroll(vector):
                warp_sums[warp, lane * vector + e] = sums[e]
            T.sync_threads()
            # A thread per column: the sums of warps in their order, then the products.
            for i in T.unroll(iterations):
                index = i * warps * WARP + T.get_thread_binding()
                column = block * WARP * vector + index
                if index < WARP * vector and column < columns:
                    total = T.alloc_var(T.float32, init=warp_sums[0, index])
                    for w in T.unroll(warps - 1):
                        total = total + warp_sums[w + 1, index]
                    hidden_product = T.ieee_mul(total, T.cast(weights[i, 0], T.float32))
                    embed_product = T.ieee_mul(total, T.cast(weights[i, 1], T.float32))
                    grad_hidden[column] = T.ieee_add(old[i, 0], hidden_product)
                    grad_embed[column] = T.ieee_add(old[i, 1], embed_product)

    return reduce_columns
