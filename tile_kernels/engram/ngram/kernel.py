"""N-gram windows of token ids."""

from typing import Any

from tilelang import language as T

from tile_kernels.engram.ngram.plan import THREADS, Plan
from tile_kernels.runtime.kernels.common import EXPLICIT_GUARDS
from tile_kernels.runtime.launch import kernel


def bits(*dtypes: str) -> tuple[int, ...]:
    """The widths of these integers, which are accessed one by one."""
    return tuple(sorted({64 if dtype == "int64" else 32 for dtype in dtypes if dtype}))


def access_bits(*static: Any) -> tuple[tuple[int, ...], int]:
    plan = Plan(*static)
    # Without a map, the lower halves of ids are all that counts; likewise of a map's entries.
    return bits(plan.dtype if plan.map_dtype else "int32", plan.starts_dtype), 32


@kernel(access_bits=access_bits, pass_configs=EXPLICIT_GUARDS)
def windows(dtype: str, window: int, starts_dtype: str, map_dtype: str) -> Any:
    """A thread per token: it walks back until its document starts."""
    tokens, num_starts, map_size = T.dynamic("tokens num_starts map_size")
    starts_type = T.Tensor[(num_starts,), starts_dtype or "int32"]
    map_type = T.Tensor[(map_size,), map_dtype or "int32"]

    @T.macro
    def last_start(starts, token):
        """The last document start up to `token`, 0 if there is none; starts increase."""
        low = T.alloc_var(T.int32, init=0)
        high = T.alloc_var(T.int32, init=num_starts)
        found = T.alloc_var(T.int32, init=0)
        while low < high:
            middle = T.alloc_var(T.int32)
            middle = low + (high - low) // 2
            if starts[middle] <= token:
                low = middle + 1
            else:
                high = middle
        if low > 0:
            if starts[low - 1] > 0:
                found = T.cast(starts[low - 1], T.int32)
        return found

    @T.macro
    def id_at(token_ids, token_map, position, pad_id):
        found = T.alloc_var(T.int32)
        if map_dtype != "":
            raw = T.alloc_var(dtype, init=token_ids[position])
            found = pad_id
            if raw >= 0 and raw < map_size:
                found = T.cast(token_map[T.cast(raw, T.int32)], T.int32)
        else:
            found = T.cast(token_ids[position], T.int32)
        return found

    @T.prim_func
    def window_rows(
        token_ids: T.Tensor[(tokens,), dtype],
        starts: starts_type,
        token_map: map_type,
        out: T.Tensor[(tokens, window), T.int32],
        row_length: T.int32,
        pad_id: T.int32,
    ):
        with T.Kernel(T.ceildiv(tokens, THREADS), threads=THREADS) as block:
            token = block * THREADS + T.get_thread_binding()
            if token < tokens:
                start = T.alloc_var(T.int32, init=token - token % row_length)
                if starts_dtype != "":
                    start = T.max(start, last_start(starts, token))
                known = T.alloc_var(T.bool)
                current = T.alloc_var(T.int32)
                current = id_at(token_ids, token_map, token, pad_id)
                known = current != pad_id
                out[token, 0] = current
                for i in T.serial(1, window):
                    known = known and token - i >= start
                    current = pad_id
                    if known:
                        current = id_at(token_ids, token_map, token - i, pad_id)
                        known = current != pad_id
                    out[token, i] = current

    return window_rows
