"""The product of two norms' weights."""

from typing import Any

from tilelang import language as T

from tile_kernels.engram.weight.plan import BITS, THREADS, Plan
from tile_kernels.runtime.kernels.common import EXPLICIT_GUARDS
from tile_kernels.runtime.launch import kernel


def access_bits(*static: Any) -> tuple[int, int]:
    plan = Plan(*static)
    return min(128, plan.vector * BITS[plan.dtype]), min(128, 32 * plan.vector)


@kernel(access_bits=access_bits, pass_configs=EXPLICIT_GUARDS)
def product(dtype: str, vector: int) -> Any:
    """The product of two tensors, seen flat, in float32."""
    count = T.dynamic("count")

    @T.prim_func
    def products(
        left: T.Tensor[(count,), dtype],
        right: T.Tensor[(count,), dtype],
        out: T.Tensor[(count,), T.float32],
    ):
        with T.Kernel(T.ceildiv(count, THREADS * vector), threads=THREADS) as block:
            first = (block * THREADS + T.get_thread_binding()) * vector
            lefts = T.alloc_local((vector,), dtype)
            rights = T.alloc_local((vector,), dtype)
            results = T.alloc_local((vector,), T.float32)
            if first < count:
                for e in T.vectorized(vector):
                    lefts[e] = left[first + e]
                for e in T.vectorized(vector):
                    rights[e] = right[first + e]
                for e in T.unroll(vector):
                    results[e] = T.ieee_mul(
                        T.cast(lefts[e], T.float32), T.cast(rights[e], T.float32)
                    )
                for e in T.vectorized(vector):
                    out[first + e] = results[e]

    return products
