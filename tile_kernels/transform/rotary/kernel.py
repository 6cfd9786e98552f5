"""Rotary position embedding of queries and keys, in place or to new tensors."""

from typing import Any

from tilelang import language as T

from tile_kernels.runtime.kernels.common import EXPLICIT_GUARDS
from tile_kernels.runtime.launch import kernel
from tile_kernels.transform.rotary.plan import BITS, THREADS, Plan


def access_bits(*static: Any) -> tuple[tuple[int, ...], int]:
    plan = Plan(*static)
    loads = {plan.vector * BITS[plan.dtype], plan.cache_vector * BITS[plan.cache_dtype]}
    if plan.positions:
        loads.add(int(plan.positions.removeprefix("int")))
    return tuple(sorted(loads)), plan.vector * BITS[plan.dtype]


@kernel(access_bits=access_bits, pass_configs=EXPLICIT_GUARDS)
def rotate(*static: Any) -> Any:
    """Pairs `(a, b)` to `(fma(a, cos, -(b * sin)), fma(a, sin, b * cos))`, in float32.

    Units are counted along the pairs of a head, the heads, the tokens and the batches; those of the
    key have blocks after those of the query. Tokens whose position the cache does not have stay as
    they are.
    """
    plan = Plan(*static)
    dim, vector, batched = plan.dim, plan.vector, plan.batched
    half = dim // 2
    units = half // vector  # of a head
    interleaved, keyed, in_place = plan.interleaved, plan.keyed, plan.in_place
    positioned = bool(plan.positions)
    batches, tokens, heads, key_heads, num_rows = T.dynamic("batches tokens heads key_heads rows")
    names = ("batch", "token", "head")[0 if batched else 1 :]
    strided = tuple(range(len(names)))
    lead = ((batches,) if batched else ()) + (tokens,)

    def tensor(name: str, num_heads: Any) -> Any:
        strides = tuple(T.dynamic(f"{name}_{each}", "int64") for each in names)
        shape = (*lead, num_heads, dim)
        return T.StridedTensor[shape, (*strides, 1), plan.dtype], strides

    query_type, query_strides = tensor("query", heads)
    key_type, key_strides = tensor("key", key_heads)
    out_type, out_strides = tensor("out", heads)
    key_out_type, key_out_strides = tensor("key_out", key_heads)
    position_strides = tuple(T.dynamic(f"position_{each}", "int64") for each in names[:-1])
    positions_type = T.StridedTensor[lead, position_strides, plan.positions or "int32"]
    cache_stride = T.dynamic("cache_stride", "int64")
    # Where the second number of each pair starts: after the first ones of a head, or of a unit.
    second = vector if interleaved else half
    scale = 2 if interleaved else 1

    @T.macro
    def load(source, batch, token, head, column, raw, base):
        for v in T.vectorized(vector):
            if batched:
                raw[base + v] = source[batch, token, head, column + v]
            else:
                raw[base + v] = source[token, head, column + v]

    @T.macro
    def store(target, batch, token, head, column, raw, base):
        for v in T.vectorized(vector):
            if batched:
                target[batch, token, head, column + v] = raw[base + v]
            else:
                target[token, head, column + v] = raw[base + v]

    @T.macro
    def load_cache(cache, row, column, values, base):
        raw = T.alloc_local((plan.cache_vector,), plan.cache_dtype)
        for c in T.unroll(vector // plan.cache_vector):
            for v in T.vectorized(plan.cache_vector):
                raw[v] = cache[row, column + c * plan.cache_vector + v]
            for v in T.vectorized(plan.cache_vector):
                values[base + c * plan.cache_vector + v] = T.cast(raw[v], T.float32)

    @T.macro
    def turned(raw, cos, sin, sign):
        """The pairs of a unit: its first `vector` values, then the others."""
        values = T.alloc_local((2 * vector,), T.float32)
        results = T.alloc_local((2 * vector,), T.float32)
        for v in T.vectorized(2 * vector):
            values[v] = T.cast(raw[v], T.float32)
        for v in T.unroll(vector):
            at = 2 * v if interleaved else v
            other = 2 * v + 1 if interleaved else v + vector
            sine = T.alloc_var(T.float32, init=T.ieee_mul(sin[v], sign))
            results[at] = T.ieee_fmaf(values[at], cos[v], -T.ieee_mul(values[other], sine))
            results[other] = T.ieee_fmaf(values[at], sine, T.ieee_mul(values[other], cos[v]))
        for v in T.vectorized(2 * vector):
            raw[v] = T.cast(results[v], plan.dtype)

    def rotation(num_heads: Any) -> Any:
        """A macro: a unit of a tensor with that many heads."""

        @T.macro
        def rotate_unit(unit, source, target, cache, positions, sign, offset):
            column = unit % units * vector
            head = T.alloc_var(T.int32, init=unit // units % num_heads)
            token = T.alloc_var(T.int32, init=unit // units // num_heads)
            batch = T.alloc_var(T.int32, init=0)
            raw = T.alloc_local((2 * vector,), plan.dtype)
            cos = T.alloc_local((vector,), T.float32)
            sin = T.alloc_local((vector,), T.float32)
            if batched:
                batch = token // tokens
                token = token % tokens
            position = T.alloc_var(T.int64, init=T.cast(token, T.int64) + offset)
            if positioned:
                if batched:
                    position = T.cast(positions[batch, token], T.int64) + offset
                else:
                    position = T.cast(positions[token], T.int64) + offset
            known = position >= 0 and position < num_rows
            if known:
                load_cache(cache, position, column, cos, 0)
                load_cache(cache, position, half + column, sin, 0)
            if known or not in_place:  # after the position: 44.1 us, before it 51.3 (see the plan)
                for part in T.unroll(2):
                    load(
                        source, batch, token, head, column * scale + part * second, raw,
                        part * vector,
                    )  # fmt: skip
            if known:
                turned(raw, cos, sin, sign)
            if known or not in_place:
                for part in T.unroll(2):
                    store(
                        target,
                        batch,
                        token,
                        head,
                        column * scale + part * second,
                        raw,
                        part * vector,
                    )

        return rotate_unit

    rotate_query, rotate_key = rotation(heads), rotation(key_heads)

    @T.prim_func
    def rotate_pairs(
        query: query_type,
        key: key_type,
        cache: T.StridedTensor[(num_rows, dim), (cache_stride, 1), plan.cache_dtype],
        positions: positions_type,
        out: out_type,
        key_out: key_out_type,
        sign: T.float32,
        offset: T.int64,
        count: T.int32,
        key_count: T.int32,
    ):
        with T.Kernel(
            T.ceildiv(count, THREADS) + T.ceildiv(key_count, THREADS), threads=THREADS
        ) as block:
            T.assume(cache_stride % plan.cache_vector == 0)
            for i in strided:
                T.assume(out_strides[i] % vector == 0)
                if not in_place:
                    T.assume(query_strides[i] % vector == 0)
                if keyed:
                    T.assume(key_out_strides[i] % vector == 0)
                if keyed and not in_place:
                    T.assume(key_strides[i] % vector == 0)
            query_blocks = T.ceildiv(count, THREADS)
            unit = T.alloc_var(T.int32, init=block * THREADS + T.get_thread_binding())
            if block < query_blocks:
                if unit < count:
                    rotate_query(
                        unit, out if in_place else query, out, cache, positions, sign,
                        offset,
                    )  # fmt: skip
            elif keyed:
                unit = unit - query_blocks * THREADS
                if unit < key_count:
                    rotate_key(
                        unit, key_out if in_place else key, key_out, cache, positions,
                        sign, offset,
                    )  # fmt: skip

    return rotate_pairs
