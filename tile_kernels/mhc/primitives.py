"""Device macros of the streams and their mixes, for single operators and for fused ones.

A thread owns some neighbouring columns of all streams of a token (`tiling.py`). Streams stay
bfloat16 in registers, mixes and sums are float32. Each term of a sum is one fused multiply-add,
streams in order, so that every kernel which mixes gives the same bits.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from tilelang import language as T

from tile_kernels.mhc.tiling import GradientPlan, MixPlan, columns_of
from tile_kernels.runtime.device import WARP

# ---- parameters of kernels ----------------------------------------------------------------------


class StreamTypes(NamedTuple):
    """The types of a kernel's parameters, by token: all streams, one row, a mix, a matrix of mixes.

    Each is made anew for each parameter, which would otherwise be one buffer. They have the shapes
    of operators' arguments, so that these need no views; `as_streams` and `as_rows` are views of
    parameters inside of a kernel.
    """

    num_tokens: Any
    streams: Callable[[], Any]
    row: Callable[[], Any]
    mix: Callable[[], Any]
    matrix: Callable[[], Any]
    as_streams: Callable[[Any], Any]  # a row as one stream, `[num_tokens, 1, hidden]`
    as_rows: Callable[[Any], Any]  # mixes or a matrix as a row, `[num_tokens, count]`


def stream_types(streams: int, hidden: int) -> StreamTypes:
    """The types for tokens of `streams` streams of `hidden` columns."""
    num_tokens = T.dynamic("num_tokens")

    def tensor(dtype: Any, *shape: int) -> Callable[[], Any]:
        return lambda: T.Tensor[(num_tokens, *shape), dtype]

    return StreamTypes(
        num_tokens,
        tensor(T.bfloat16, streams, hidden),
        tensor(T.bfloat16, hidden),
        tensor(T.float32, streams, 1),
        tensor(T.float32, streams, streams),
        lambda row: T.reshape(row, (num_tokens, 1, hidden)),
        lambda mixes: T.reshape(mixes, (num_tokens, mixes.shape[1] * mixes.shape[2])),
    )


# ---- columns of a token -------------------------------------------------------------------------


class ColumnMacros(NamedTuple):
    """The number of columns of a thread, and macros on them."""

    columns: int
    load: Any  # as `load_columns`
    store: Any  # as `store_columns`
    widened: Any  # as `widen`


def column_macros(hidden: int, vector: int) -> ColumnMacros:
    """For rows of `hidden` columns, `vector` of them per access."""
    columns = columns_of(hidden)
    return ColumnMacros(
        columns, load_columns(columns, vector), store_columns(columns, vector), widen(columns)
    )


def load_columns(columns: int, vector: int) -> Any:
    """A macro: the `columns` from `first` on of one stream, to row `at` of `raw`."""

    @T.macro
    def load(x, token, stream, first, raw, at):
        for c in T.unroll(columns // vector):
            for v in T.vectorized(vector):
                raw[at, c * vector + v] = x[token, stream, first + c * vector + v]

    return load


class StreamMacros(NamedTuple):
    """What kernels on streams and their mixes are built from."""

    columns: int
    load: Any
    store: Any
    widened: Any
    load_mix: Any  # as `load_mixes`: one for each stream
    load_matrix: Any
    types: StreamTypes


def stream_macros(plan: MixPlan | GradientPlan) -> StreamMacros:
    """`column_macros`, loads of mixes, and the types of parameters."""
    streams, vector = plan.streams, plan.mix_vector
    return StreamMacros(
        *column_macros(plan.hidden, plan.vector), load_mixes(streams, vector),
        load_mixes(streams * streams, vector), stream_types(streams, plan.hidden),
    )  # fmt: skip


def store_columns(columns: int, vector: int) -> Any:
    """A macro: a float32 `total` for each column, rounded, to its place in a stream."""

    @T.macro
    def store(total, out, token, stream, first):
        rounded = T.alloc_local((columns,), T.bfloat16)
        for v in T.vectorized(columns):
            rounded[v] = T.cast(total[v], T.bfloat16)
        for c in T.unroll(columns // vector):
            for v in T.vectorized(vector):
                out[token, stream, first + c * vector + v] = rounded[c * vector + v]

    return store


def load_mixes(count: int, vector: int) -> Any:
    """A macro: the `count` mixes of a token, row `token` of `mixes`, to `values`."""

    @T.macro
    def load(mixes, token, values):
        for c in T.unroll(count // vector):
            for v in T.vectorized(vector):
                values[c * vector + v] = mixes[token, c * vector + v]

    return load


# ---- mixes --------------------------------------------------------------------------------------


@T.macro
def scaled_mix(x, scale, base):
    """`x * scale + base`, rounded once."""
    return T.ieee_fmaf(x, scale, base)


@T.macro
def sigmoid(z):
    """`1 / (1 + exp(-z))`."""
    return T.ieee_frcp(T.ieee_add(T.float32(1), T.exp(-z)))


# ---- weighted sums ------------------------------------------------------------------------------


def widen(columns: int) -> Any:
    """A macro: row `at` of `raw` as float32."""

    @T.macro
    def widened(raw, at, wide):
        for v in T.vectorized(columns):
            wide[v] = T.cast(raw[at, v], T.float32)

    return widened


@T.macro
def add_weighted(weight, wide, total, columns):
    """`total = weight * wide + total` for each column."""
    for v in T.unroll(columns):
        total[v] = T.ieee_fmaf(wide[v], weight, total[v])


def read_streams(streams: int, columns: int) -> Any:
    """A macro: `total = sum_i mix[i] * raw[i]`, what a sublayer reads; starts at +0."""
    widened = widen(columns)

    @T.macro
    def read(mix, raw, total):
        wide = T.alloc_local((columns,), T.float32)
        for v in T.unroll(columns):
            total[v] = T.float32(0)
        for i in T.unroll(streams):
            widened(raw, i, wide)
            add_weighted(mix[i], wide, total, columns)

    return read


def write_stream(streams: int, columns: int) -> Any:
    """A macro: `total = post[j] * output + sum_i comb[i, j] * raw[i]`, stream `j` written.

    `output` is float32; `comb` is flat, row-major.
    """
    widened = widen(columns)

    @T.macro
    def write(j, output, post, comb, raw, total):
        wide = T.alloc_local((columns,), T.float32)
        for v in T.unroll(columns):
            total[v] = T.ieee_mul(output[v], post[j])
        for i in T.unroll(streams):
            widened(raw, i, wide)
            add_weighted(comb[i * streams + j], wide, total, columns)

    return write


@T.macro
def add_products(a, b, total, at, columns):
    """`total[at] += sum of a * b` over a thread's columns, one after the other."""
    for v in T.unroll(columns):
        total[at] = T.ieee_fmaf(a[v], b[v], total[at])


def sum_to_shared(count: int, threads: int) -> Any:
    """A macro: `count` sums of a block's threads, in a fixed order.

    Threads `0 .. count - 1` (or, in turns, more than there are) have theirs by `sum_of_warps`
    afterwards. It is a barrier, and all threads must call it.
    """

    @T.macro
    def summed(values, warp_sums):
        tx = T.get_thread_binding()
        for d in T.unroll(5):  # outside, so that shuffles do not wait for each other
            for i in T.unroll(count):
                values[i] = T.ieee_add(values[i], T.shfl_xor(values[i], T.shift_left(1, d)))
        if tx % WARP == 0:
            for i in T.unroll(count):
                warp_sums[i, tx // WARP] = values[i]
        T.sync_threads()

    return summed


@T.macro
def sum_of_warps(warp_sums, i, warps):
    """Sum `i` over the warps, in order."""
    total = T.alloc_var(T.float32, init=warp_sums[i, 0])
    for w in T.unroll(warps - 1):
        total = T.ieee_add(total, warp_sums[i, w + 1])
    return total
