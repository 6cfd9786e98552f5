"""From token ids to rows of the tables: n-gram windows and their hash. All integers."""

from typing import Any, NamedTuple

from tilelang import language as T

from tile_kernels.runtime.device import Device
from tile_kernels.runtime.kernels.common import EXPLICIT_GUARDS
from tile_kernels.runtime.launch import kernel

THREADS = 128


# ---- windows ------------------------------------------------------------------------------------


class WindowsPlan(NamedTuple):
    dtype: str
    window: int
    starts_dtype: str
    map_dtype: str


def windows_plan(
    dtype: str, window: int, starts_dtype: str, map_dtype: str, device: Device
) -> WindowsPlan:
    """`starts_dtype` and `map_dtype` are empty without document starts or map."""
    return WindowsPlan(dtype, window, starts_dtype, map_dtype)


def bits(*dtypes: str) -> tuple[int, ...]:
    """The widths of these integers, which are accessed one by one."""
    return tuple(sorted({64 if dtype == "int64" else 32 for dtype in dtypes if dtype}))


def windows_access_bits(*static: Any) -> tuple[tuple[int, ...], int]:
    plan = WindowsPlan(*static)
    # Without a map, the lower halves of ids are all that counts; likewise of a map's entries.
    return bits(plan.dtype if plan.map_dtype else "int32", plan.starts_dtype), 32


@kernel(plan=windows_plan, access_bits=windows_access_bits, pass_configs=EXPLICIT_GUARDS)
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
    def id_at(token_ids, token_map, place, pad_id):
        found = T.alloc_var(T.int32)
        if map_dtype != "":
            raw = T.alloc_var(dtype, init=token_ids[place])
            found = pad_id
            if raw >= 0 and raw < map_size:
                found = T.cast(token_map[T.cast(raw, T.int32)], T.int32)
        else:
            found = T.cast(token_ids[place], T.int32)
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


# ---- hash ---------------------------------------------------------------------------------------


class HashPlan(NamedTuple):
    window: int
    tables: int
    dtype: str


def hash_plan(window: int, tables: int, dtype: str, device: Device) -> HashPlan:
    return HashPlan(window, tables, dtype)


@T.macro
def floor_modulo(value, divisor):
    """`value mod divisor` with the sign of the divisor, which is not 0: a table without rows has 0.

    A divisor of -1 is left out too: the smallest value has no quotient.
    """
    rest = T.alloc_var(T.int64, init=T.int64(0))
    if divisor > 1 or divisor < -1:
        rest = T.truncmod(value, T.cast(divisor, T.int64))
        if rest != 0 and (rest < 0) != (divisor < 0):
            rest = rest + T.cast(divisor, T.int64)
    return rest


def hash_access_bits(*static: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return (32, 64), bits(HashPlan(*static).dtype)


@kernel(plan=hash_plan, access_bits=hash_access_bits, pass_configs=EXPLICIT_GUARDS)
def hashes(window: int, tables: int, dtype: str) -> Any:
    """A thread per entry of the result, so that a division is all it waits for."""
    columns = (window - 1) * tables
    tokens, layers = T.dynamic("tokens layers")

    @T.prim_func
    def hash_entries(
        ids: T.Tensor[(tokens, window), T.int32],
        multipliers: T.Tensor[(layers, window), T.int64],
        sizes: T.Tensor[(layers, columns), T.int32],
        offsets: T.Tensor[(layers, columns), dtype],
        out: T.Tensor[(layers, tokens, columns), dtype],
    ):
        with T.Kernel(
            T.ceildiv(T.cast(tokens, T.int64) * columns, THREADS), layers, threads=THREADS
        ) as (block, layer):
            entry = T.alloc_var(T.int64)
            entry = T.cast(block, T.int64) * THREADS + T.get_thread_binding()
            token = T.alloc_var(T.int32, init=T.cast(entry // columns, T.int32))
            column = T.alloc_var(T.int32, init=T.cast(entry % columns, T.int32))
            if token < tokens:
                hashed = T.alloc_var(T.int64)
                hashed = T.cast(ids[token, 0], T.int64) * multipliers[layer, 0]
                for i in T.unroll(window - 1):
                    if i * tables <= column:
                        hashed = hashed ^ (
                            T.cast(ids[token, i + 1], T.int64) * multipliers[layer, i + 1]
                        )
                size = T.alloc_var(T.int32, init=sizes[layer, column])
                out[layer, token, column] = T.cast(
                    floor_modulo(hashed, size) + T.cast(offsets[layer, column], T.int64), dtype
                )

    return hash_entries
