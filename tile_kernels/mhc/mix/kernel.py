"""Mixes from their projections: scaled, shifted, turned into weights by sigmoids; the gradients.

The mixes of a token are `pre`, `post` and `comb`, or `pre` alone (`head`). A thread takes
neighbouring mixes of one kind; a block has `slots` tokens at a time.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from tilelang import language as T

from tile_kernels.mhc.mix.plan import MAX_CHUNKS
from tile_kernels.mhc.primitives import scaled_mix, sigmoid
from tile_kernels.runtime.kernels.common import is_last_block
from tile_kernels.runtime.launch import kernel

THREADS = 128
BACKWARD_THREADS = 256
TURNS = 2  # tokens of a thread, if there are enough to choose
BATCH = 8  # loads in flight while summing


def access_bits(streams: int, head: bool, vector: int) -> tuple[tuple[int, ...], int]:
    return tuple(sorted({32, 32 * vector})), 32 * vector


def num_mixes(streams: int, head: bool) -> int:
    return streams if head else streams * (streams + 2)


def num_kinds(head: bool) -> int:
    return 1 if head else 3


class MixTypes(NamedTuple):
    """Types of parameters, each made anew: all mixes, scales, the base, `pre` or `post`, `comb`.

    `as_rows` is a parameter inside of a kernel, with one dimension for all of a token.
    """

    num_tokens: Any
    mixes: Callable[[], Any]
    scale: Callable[[], Any]
    base: Callable[[], Any]
    kind: Callable[[], Any]
    comb: Callable[[], Any]
    as_rows: Callable[[Any], Any]


def mix_types(streams: int, head: bool) -> MixTypes:
    """The types for `streams` streams."""
    count, num_tokens = num_mixes(streams, head), T.dynamic("num_tokens")

    def tensor(*shape: Any) -> Callable[[], Any]:
        return lambda: T.Tensor[shape, T.float32]

    def as_rows(mixes: Any) -> Any:
        return T.reshape(mixes, (num_tokens, math.prod(mixes.shape[1:])))

    kind = (streams,) if head else (streams, 1)
    return MixTypes(
        num_tokens, tensor(num_tokens, count), tensor(num_kinds(head)), tensor(count),
        tensor(num_tokens, *kind), tensor(num_tokens, streams, streams), as_rows,
    )  # fmt: skip


def kind_of(streams: int, head: bool) -> Any:
    """A macro: 0, 1 or 2 for a mix of `pre`, `post` or `comb`."""

    @T.macro
    def kind(mix):
        if head:
            return 0
        return T.Select(mix < streams, 0, T.Select(mix < 2 * streams, 1, 2))

    return kind


@kernel(access_bits=access_bits)
def compute_mixes(streams: int, head: bool, vector: int) -> Any:
    """`z = x * scale + base`; `sigmoid(z) + eps`, `sigmoid(z) * mult` and `z` as it is."""
    count = num_mixes(streams, head)
    lanes = count // vector
    slots = THREADS // lanes
    kind = kind_of(streams, head)
    types = mix_types(streams, head)
    num_tokens = types.num_tokens

    @T.prim_func
    def computed(
        mixes: types.mixes(), scale: types.scale(), base: types.base(),
        pre: types.kind(), post: types.kind(), comb: types.comb(),
        post_mult: T.float32, pre_eps: T.float32,
    ):  # fmt: skip
        with T.Kernel(T.ceildiv(num_tokens, slots), threads=THREADS) as block:
            tx = T.get_thread_binding()
            token = block * slots + tx // lanes
            first = tx % lanes * vector
            results = [types.as_rows(each) for each in (pre, post, comb)]
            x = T.alloc_local((vector,), T.float32)
            shift = T.alloc_local((vector,), T.float32)
            z = T.alloc_local((vector,), T.float32)
            weight = T.alloc_local((vector,), T.float32)
            if tx < slots * lanes and token < num_tokens:
                factor = T.alloc_var(T.float32, init=scale[kind(first)])
                for v in T.vectorized(vector):
                    x[v] = mixes[token, first + v]
                for v in T.vectorized(vector):
                    shift[v] = base[first + v]
                for v in T.unroll(vector):
                    z[v] = scaled_mix(x[v], factor, shift[v])
                    weight[v] = sigmoid(z[v])
                if head or first < streams:
                    for v in T.unroll(vector):
                        weight[v] = T.ieee_add(weight[v], pre_eps)
                    for v in T.vectorized(vector):
                        results[0][token, first + v] = weight[v]
                elif first < 2 * streams:
                    for v in T.unroll(vector):
                        weight[v] = T.ieee_mul(weight[v], post_mult)
                    for v in T.vectorized(vector):
                        results[1][token, first - streams + v] = weight[v]
                else:
                    for v in T.vectorized(vector):
                        results[2][token, first - 2 * streams + v] = z[v]

    return computed


# ---- gradients ----------------------------------------------------------------------------------


def sum_columns(columns: int, threads: int) -> Any:
    """A macro: `totals[c]`, the sum of column `c` over `num_rows` rows, in a fixed order.

    Threads beyond the columns take part of the rows, every `parts`-th; `part_sums`, shared, holds
    their sums. It is a barrier before the totals are written.
    """
    parts = threads // columns

    @T.macro
    def summed(rows, num_rows, part_sums, totals):
        tx = T.get_thread_binding()
        column = tx % columns
        part = tx // columns
        loaded = T.alloc_local((BATCH,), T.float32)
        total = T.alloc_var(T.float32, init=T.float32(0))
        if part < parts:
            for batch in T.serial(T.ceildiv(num_rows, BATCH * parts)):
                for i in T.unroll(BATCH):
                    row = (batch * BATCH + i) * parts + part
                    loaded[i] = T.float32(0)
                    if row < num_rows:
                        loaded[i] = rows[row, column]
                for i in T.unroll(BATCH):
                    total = T.ieee_add(total, loaded[i])
            part_sums[part, column] = total
        T.sync_threads()
        if tx < columns:
            total = part_sums[0, tx]
            for p in T.unroll(parts - 1):
                total = T.ieee_add(total, part_sums[p + 1, tx])
            totals[tx] = total

    return summed


def backward_access_bits(
    streams: int, head: bool, vector: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    widths = tuple(sorted({32, 32 * vector}))
    return widths, widths


@kernel(
    access_bits=backward_access_bits,
    pass_configs={"tl.disable_thread_storage_sync": True},  # all barriers are written out
)
def mixes_backward(streams: int, head: bool, vector: int) -> Any:
    """`dz` from the gradients of the three results; `d_x = dz * scale`, and sums over the tokens.

    Each block has its sums of `dz` and of `dz * x` for every mix; the last one adds those of all.
    How many blocks there are follows from the number of tokens alone, and with it the result.
    """
    count = num_mixes(streams, head)
    lanes = count // vector
    slots = BACKWARD_THREADS // lanes
    parts = BACKWARD_THREADS // (2 * count)
    kind = kind_of(streams, head)
    sum_rows = sum_columns(2 * count, BACKWARD_THREADS)
    kinds = [(0, 0, streams)]  # each with its first mix and how many there are
    if not head:
        kinds += [(1, streams, streams), (2, 2 * streams, streams * streams)]
    types, num_tickets = mix_types(streams, head), T.dynamic("num_tickets")
    num_tokens = types.num_tokens

    @T.macro
    def load_grad(grad_pre, grad_post, grad_comb, token, first, grad):
        if head or first < streams:
            for v in T.vectorized(vector):
                grad[v] = grad_pre[token, first + v]
        elif first < 2 * streams:
            for v in T.vectorized(vector):
                grad[v] = grad_post[token, first - streams + v]
        else:
            for v in T.vectorized(vector):
                grad[v] = grad_comb[token, first - 2 * streams + v]

    @T.prim_func
    def gradients(
        mixes: types.mixes(), scale: types.scale(), base: types.base(),
        grad_pre: types.kind(), grad_post: types.kind(), grad_comb: types.comb(),
        d_mixes: types.mixes(), d_scale: types.scale(), d_base: types.base(),
        partials: T.Tensor[(MAX_CHUNKS, 2 * count), T.float32],
        tickets: T.Tensor[(num_tickets,), T.int32], ticket: T.int32, post_mult: T.float32,
    ):  # fmt: skip
        with T.Kernel(
            T.min(T.ceildiv(num_tokens, slots * TURNS), MAX_CHUNKS), threads=BACKWARD_THREADS
        ) as block:
            tx = T.get_thread_binding()
            chunks = T.min(T.ceildiv(num_tokens, slots * TURNS), MAX_CHUNKS)
            slot = tx // lanes
            first = tx % lanes * vector
            grads = [types.as_rows(each) for each in (grad_pre, grad_post, grad_comb)]
            x = T.alloc_local((vector,), T.float32)
            grad = T.alloc_local((vector,), T.float32)
            shift = T.alloc_local((vector,), T.float32)
            sums = T.alloc_local((2, vector), T.float32)
            factor = T.alloc_var(T.float32, init=T.float32(0))
            weight = T.alloc_var(T.float32)
            slot_sums = T.alloc_shared((slots, 2 * count), T.float32)
            part_sums = T.alloc_shared((parts, 2 * count), T.float32)
            totals = T.alloc_shared((2 * count,), T.float32)
            for v in T.unroll(vector):
                sums[0, v] = T.float32(0)
                sums[1, v] = T.float32(0)
            if slot < slots:
                factor = scale[kind(first)]
                for v in T.vectorized(vector):
                    shift[v] = base[first + v]
            for iteration in T.serial(T.ceildiv(num_tokens, slots * chunks)):
                token = T.alloc_var(T.int32, init=(iteration * chunks + block) * slots + slot)
                if slot < slots and token < num_tokens:
                    for v in T.vectorized(vector):
                        x[v] = mixes[token, first + v]
                    load_grad(*grads, token, first, grad)
                    if head or first < 2 * streams:
                        for v in T.unroll(vector):
                            weight = sigmoid(scaled_mix(x[v], factor, shift[v]))
                            if not head:
                                if first >= streams:
                                    grad[v] = T.ieee_mul(grad[v], post_mult)
                            weight = T.ieee_mul(weight, T.ieee_sub(T.float32(1), weight))
                            grad[v] = T.ieee_mul(weight, grad[v])
                    for v in T.unroll(vector):
                        sums[0, v] = T.ieee_add(sums[0, v], grad[v])
                        sums[1, v] = T.ieee_fmaf(grad[v], x[v], sums[1, v])
                        grad[v] = T.ieee_mul(grad[v], factor)
                    for v in T.vectorized(vector):
                        d_mixes[token, first + v] = grad[v]
            if slot < slots:
                for v in T.unroll(vector):
                    slot_sums[slot, first + v] = sums[0, v]
                    slot_sums[slot, count + first + v] = sums[1, v]
            T.sync_threads()
            sum_rows(slot_sums, slots, part_sums, totals)
            T.sync_threads()
            if tx < 2 * count:
                partials[block, tx] = totals[tx]
            if is_last_block(tickets, ticket, chunks):
                sum_rows(partials, chunks, part_sums, totals)
                T.sync_threads()
                if tx < count:
                    d_base[tx] = totals[tx]
                for k, start, size in kinds:
                    if tx == k:
                        factor = T.float32(0)
                        for j in T.serial(size):
                            factor = T.ieee_add(factor, totals[count + start + j])
                        d_scale[k] = factor

    return gradients
