"""The weights of the gate: the product of two norms' weights, and its rule backwards."""

from typing import Any, NamedTuple

from tilelang import language as T

from tile_kernels.runtime.device import Device
from tile_kernels.runtime.kernels.common import EXPLICIT_GUARDS, WARP
from tile_kernels.runtime.launch import kernel

THREADS = 256


class ProductPlan(NamedTuple):
    dtype: str
    vector: int


def product_plan(dtype: str, vector: int, device: Device) -> ProductPlan:
    return ProductPlan(dtype, vector)


def bits_of(dtype: str) -> int:
    """The width of one weight."""
    return 16 if dtype == "bfloat16" else 32


def product_access_bits(*static: Any) -> tuple[int, int]:
    plan = ProductPlan(*static)
    return min(128, plan.vector * bits_of(plan.dtype)), min(128, 32 * plan.vector)


@kernel(plan=product_plan, access_bits=product_access_bits, pass_configs=EXPLICIT_GUARDS)
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


# ---- sums of partial gradients ------------------------------------------------------------------

AT_ONCE = (1, 3, 6, 9, 12)  # parts that a thread reads at once
FEW_PARTS, MOST_PARTS = 8, AT_ONCE[-1]
MOST_WARPS = 16
MANY_WARPS = 4096  # enough for any device


class ReducePlan(NamedTuple):
    """Each warp of a block adds up a share of the parts, `at_once` at a time, for some columns."""

    dtype: str
    vector: int
    warps: int
    at_once: int


def reduce_plan(dtype: str, columns: int, parts: int, vector: int, device: Device) -> ReducePlan:
    """More warps, the fewer the columns and the more parts there are, whatever the SM budget."""
    blocks = max(1, -(-columns // (WARP * vector)))
    warps = max(1, min(MOST_WARPS, -(-parts // FEW_PARTS), MANY_WARPS // blocks))
    warps = 1 << (warps.bit_length() - 1)
    turns = max(1, -(-parts // (warps * MOST_PARTS)))
    at_once = -(-parts // (warps * turns))
    return ReducePlan(dtype, vector, warps, next(n for n in AT_ONCE if n >= at_once))


def reduce_access_bits(*static: Any) -> tuple[tuple[int, ...], int]:
    plan = ReducePlan(*static)
    return tuple(sorted({32, bits_of(plan.dtype), 32 * plan.vector})), 32


@kernel(
    plan=reduce_plan,
    access_bits=reduce_access_bits,
    pass_configs={**EXPLICIT_GUARDS, "tl.disable_thread_storage_sync": True},
)
def reduce_gradients(dtype: str, vector: int, warps: int, at_once: int) -> Any:
    """With `S` the sum of parts, `S` times either weight is added to the other's gradient."""
    parts, columns = T.dynamic("parts columns")
    turns = -(-vector // warps)  # columns of a thread at the end

    @T.prim_func
    def reduce_columns(
        partial: T.Tensor[(parts, columns), T.float32],
        weight_hidden: T.Tensor[(columns,), dtype],
        weight_embed: T.Tensor[(columns,), dtype],
        grad_hidden: T.Tensor[(columns,), T.float32],
        grad_embed: T.Tensor[(columns,), T.float32],
    ):
        with T.Kernel(T.ceildiv(columns, WARP * vector), threads=warps * WARP) as block:
            T.assume(columns % vector == 0)
            lane = T.get_thread_binding() % WARP
            warp = T.get_thread_binding() // WARP
            first = (block * WARP + lane) * vector
            of_warps = T.alloc_shared((warps, WARP * vector), T.float32)
            read = T.alloc_local((at_once * vector,), T.float32)
            sums = T.alloc_local((vector,), T.float32)
            # What a thread will need of its columns at the end, on the way already.
            old = T.alloc_local((turns, 2), T.float32)
            weights = T.alloc_local((turns, 2), dtype)
            for i in T.unroll(turns):
                place = i * warps * WARP + T.get_thread_binding()
                column = block * WARP * vector + place
                if place < WARP * vector and column < columns:
                    weights[i, 0] = weight_embed[column]
                    weights[i, 1] = weight_hidden[column]
                    old[i, 0] = grad_hidden[column]
                    old[i, 1] = grad_embed[column]
            for e in T.unroll(vector):
                sums[e] = T.float32(0)
            if first < columns:
                for turn in T.serial(T.ceildiv(parts, warps * at_once)):
                    for i in T.unroll(at_once):
                        part = (turn * warps + warp) * at_once + i
                        if part < parts:
                            for e in T.vectorized(vector):
                                read[i * vector + e] = partial[part, first + e]
                        else:
                            for e in T.unroll(vector):
                                read[i * vector + e] = T.float32(0)
                    for i in T.unroll(at_once):
                        for e in T.unroll(vector):
                            sums[e] = sums[e] + read[i * vector + e]
            for e in T.unroll(vector):
                of_warps[warp, lane * vector + e] = sums[e]
            T.sync_threads()
            # A thread per column: the sums of warps in their order, then the products.
            for i in T.unroll(turns):
                place = i * warps * WARP + T.get_thread_binding()
                column = block * WARP * vector + place
                if place < WARP * vector and column < columns:
                    total = T.alloc_var(T.float32, init=of_warps[0, place])
                    for w in T.unroll(warps - 1):
                        total = total + of_warps[w + 1, place]
                    of_hidden = T.ieee_mul(total, T.cast(weights[i, 0], T.float32))
                    of_embed = T.ieee_mul(total, T.cast(weights[i, 1], T.float32))
                    grad_hidden[column] = T.ieee_add(old[i, 0], of_hidden)
                    grad_embed[column] = T.ieee_add(old[i, 1], of_embed)

    return reduce_columns
