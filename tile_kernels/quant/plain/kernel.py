"""The cast of single values, to the nearest or stochastically rounded."""

from typing import Any

from tilelang import language as T

from tile_kernels.quant.plain.plan import BITS, CHUNK, THREADS, Plan
from tile_kernels.quant.stochastic import PER_HASH
from tile_kernels.quant.stochastic_primitives import hashed_bits, rounded_code
from tile_kernels.quant.storage import NEAREST, SEEDED
from tile_kernels.runtime.kernels.common import EXPLICIT_GUARDS
from tile_kernels.runtime.kernels.philox import philox
from tile_kernels.runtime.launch import kernel


def access_bits(*static: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Whole chunks take wide accesses; the last values of a tensor are accessed one by one."""
    plan = Plan(*static)
    loads = {plan.load * BITS[plan.source], BITS[plan.source]}
    if plan.rounding == SEEDED:
        loads.add(64)
    return tuple(sorted(loads)), tuple(sorted({plan.store * BITS[plan.target], BITS[plan.target]}))


@kernel(access_bits=access_bits, pass_configs=EXPLICIT_GUARDS)
def cast_values(*static: Any) -> Any:
    """Eight neighbouring values per thread: one counter of the generator, or two hashes."""
    plan = Plan(*static)
    stochastic, seeded = plan.rounding != NEAREST, plan.rounding == SEEDED
    fmt = "bfloat16" if plan.target == "bfloat16" else "e4m3"
    hashed, rounded = hashed_bits(fmt), rounded_code(fmt)
    codes_dtype = "uint16" if fmt == "bfloat16" else "uint8"
    out_dtype = codes_dtype if stochastic else plan.target
    count = T.dynamic("count", "int64")

    @T.macro
    def draw(values, seed, first, bits):
        """The bits of eight values."""
        if seeded:
            words = T.alloc_local((4,), T.uint32)
            philox(seed[0], first // T.int64(CHUNK), words)
            for i in T.unroll(4):
                bits[2 * i] = words[i] & T.uint32(0xFFFF)
                bits[2 * i + 1] = words[i] >> T.uint32(16)
        else:
            four = T.alloc_local((4,), T.uint32)
            for q in T.unroll(CHUNK // PER_HASH):
                index = T.cast(
                    (first // T.int64(PER_HASH) + T.cast(q, T.int64)) & T.int64(0xFFFFFFFF),
                    T.uint32,
                )
                hashed(values, q * PER_HASH, index, four)
                for i in T.unroll(PER_HASH):
                    bits[q * PER_HASH + i] = four[i]

    @T.prim_func
    def cast_flat(
        x: T.Tensor[(count,), plan.source],
        out: T.Tensor[(count,), out_dtype],
        seed: T.Tensor[(1,), T.int64],
    ):
        with T.Kernel(T.ceildiv(count, T.int64(THREADS * CHUNK)), threads=THREADS) as block:
            tx = T.get_thread_binding()
            first = T.alloc_var(
                T.int64,
                init=(T.cast(block, T.int64) * T.int64(THREADS) + T.cast(tx, T.int64))
                * T.int64(CHUNK),
            )
            raw = T.alloc_local((CHUNK,), plan.source)
            values = T.alloc_local((CHUNK,), T.float32)
            bits = T.alloc_local((CHUNK,), T.uint32)
            stored = T.alloc_local((CHUNK,), out_dtype)
            whole = first + T.int64(CHUNK) <= count
            for v in T.unroll(CHUNK):
                values[v] = T.float32(0)
            if whole:
                for c in T.unroll(CHUNK // plan.load):
                    for v in T.vectorized(plan.load):
                        raw[c * plan.load + v] = x[
                            (first // T.int64(plan.load) + T.cast(c, T.int64)) * T.int64(plan.load)
                            + T.cast(v, T.int64)
                        ]
                for v in T.vectorized(CHUNK):
                    values[v] = T.cast(raw[v], T.float32)
            else:
                for v in T.unroll(CHUNK):
                    if first + T.cast(v, T.int64) < count:
                        values[v] = T.cast(x[first + T.cast(v, T.int64)], T.float32)
            if stochastic:
                draw(values, seed, first, bits)
                for v in T.unroll(CHUNK):
                    stored[v] = T.cast(rounded(values[v], bits[v]), out_dtype)
            else:
                for v in T.vectorized(CHUNK):
                    stored[v] = T.cast(values[v], out_dtype)
            if whole:
                for c in T.unroll(CHUNK // plan.store):
                    for v in T.vectorized(plan.store):
                        out[
                            (first // T.int64(plan.store) + T.cast(c, T.int64))
                            * T.int64(plan.store)
                            + T.cast(v, T.int64)
                        ] = stored[c * plan.store + v]
            else:
                for v in T.unroll(CHUNK):
                    if first + T.cast(v, T.int64) < count:
                        out[first + T.cast(v, T.int64)] = stored[v]

    return cast_flat
