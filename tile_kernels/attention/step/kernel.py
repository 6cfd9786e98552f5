"""Decoding: one token more for each sequence, into the rows that its state keeps."""

from typing import Any

from tilelang import language as T

from tile_kernels.attention.geometry import bits_of, power_of_two
from tile_kernels.attention.primitives import PASS_CONFIGS, series_types
from tile_kernels.attention.step.plan import MAX_THREADS, Plan
from tile_kernels.runtime.launch import kernel


def access_bits(*static: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    p = Plan(*static)
    vector = p.vector * bits_of(p.dtype)
    return tuple(sorted({32, vector})), tuple(sorted({8, 32, vector}))


@kernel(access_bits=access_bits, pass_configs=PASS_CONFIGS)
def append(*static: Any) -> Any:
    """A block per token: it writes the token's rows, and says which window they complete.

    A state keeps the last window, with two series the last two in turns; `starts` is as
    `place_windows` makes it, -1 where the window is not complete.
    """
    p = Plan(*static)
    vectors, ring = 2 * p.series, p.series * p.window
    threads = max(32, min(MAX_THREADS, power_of_two(-(-p.channels // p.vector))))
    tokens, num_sequences = T.dynamic("tokens num_sequences")
    given = series_types(p, tokens)

    @T.macro
    def copied(source, token, kept, slot, position, which):
        regs = T.alloc_local((p.vector,), p.dtype)
        for step in T.serial(-(-p.channels // (threads * p.vector))):
            channel = (step * threads + T.get_thread_binding()) * p.vector
            if channel < p.channels:
                for v in T.vectorized(p.vector):
                    regs[v] = source[token, channel + v]
                for v in T.vectorized(p.vector):
                    kept[slot, position, which, channel + v] = regs[v]

    @T.prim_func
    def append_tokens(
        kept: T.Tensor[(num_sequences, ring, vectors, p.channels), p.dtype],
        lengths: T.Tensor[(num_sequences,), T.int32],
        slots: T.Tensor[(tokens,), T.int32],
        kv_a: given.rows(0),
        z_a: given.rows(1),
        kv_b: given.rows(2),
        z_b: given.rows(3),
        starts: T.Tensor[(tokens, 3), T.int32],
        completed: T.Tensor[(tokens,), T.bool],
    ):
        with T.Kernel(tokens, threads=threads) as token:
            given.assume_rows()
            slot = T.alloc_var(T.int32, init=token)
            length = T.alloc_var(T.int32, init=0)
            first = T.alloc_local((3,), T.int32)
            if p.slotted:
                slot = slots[token]
            for i in T.unroll(3):
                first[i] = -1
            known = slot >= 0 and slot < num_sequences  # the same for the whole block
            if known:
                length = T.max(lengths[slot], 0)
                copied(kv_a, token, kept, slot, length % ring, 0)
                copied(z_a, token, kept, slot, length % ring, 1)
                if p.series == 2:
                    copied(kv_b, token, kept, slot, length % ring, 2)
                    copied(z_b, token, kept, slot, length % ring, 3)
                if length % p.window == p.window - 1:
                    index = T.alloc_var(T.int32, init=length // p.window)
                    first[0] = slot * ring + index % p.series * p.window
                    if index > 0:
                        first[1] = slot * ring + (index - 1) % p.series * p.window
                    first[2] = index * p.window
            T.sync_threads()  # all have read the length
            if T.get_thread_binding() == 0:
                if known:
                    lengths[slot] = length + 1
                completed[token] = first[0] >= 0
                for i in T.unroll(3):
                    starts[token, i] = first[i]

    return append_tokens
