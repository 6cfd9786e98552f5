"""TileLang macros that any kernel may use."""

from typing import Any

from tilelang import language as T

from tile_kernels.runtime.device import WARP

KEY_BITS = 32  # a float32 value as an integer of the same order

# For kernels whose accesses all stand under the conditions they need: no second check of positions.
EXPLICIT_GUARDS = {"tl.disable_safe_memory_legalize": True}


@T.macro
def is_last_block(tickets, ticket, blocks):
    """Whether this block is the last of `blocks` to come here; then all their writes are seen.

    `tickets[ticket]` (see `runtime.tickets`) is zero before, and again afterwards. All threads of
    the block must call it; it is a barrier.
    """
    last = T.alloc_shared((1,), T.int32)
    T.call_extern("handle", "__threadfence")
    T.sync_threads()
    if T.get_thread_binding() == 0:
        last[0] = T.atomic_add(tickets[ticket], 1, return_prev=True)
        if last[0] == blocks - 1:
            tickets[ticket] = 0
    T.sync_threads()
    T.call_extern("handle", "__threadfence")
    return last[0] == blocks - 1


# ---- copies that a thread waits for itself -------------------------------------------------------
# A thread that copies what it alone will read needs no barrier: it waits for its own groups of
# copies. The compiler does not see that these touch memory; a warp's own barrier tells it.


@T.macro
def stage(target, source, count):
    """Start the copy of `count` elements, 16 bytes, from global `source` to shared `target`."""
    T.ptx_cp_async(T.access_ptr(target, "w", count), T.access_ptr(source, "r", count), count)


@T.macro
def close_stage():
    """What was started since the last call is one group."""
    T.ptx_commit_group()


@T.macro
def await_stages(pending):
    """Wait until at most the last `pending` groups of this thread are in flight."""
    T.ptx_wait_group(pending)
    T.sync_warp()


@T.macro
def free_stage():
    """What was read of a place is in registers: from here on it may be copied to again."""
    T.sync_warp()


# ---- sums over a block --------------------------------------------------------------------------


def sum_over_block(count: int, threads: int) -> Any:
    """A macro: `count` sums over all threads, in place, in every thread, in a fixed order.

    `warp_sums` is shared memory of shape `(2, count, threads // 32)`; `call` counts the calls, so
    that two calls in a row use different halves and one barrier each is enough.
    """
    warps = threads // WARP
    steps = (warps - 1).bit_length()  # of a butterfly over the warps' sums
    width = 1 << steps
    at_once = WARP // width  # sums that the lanes of a warp finish together

    @T.macro
    def summed(values, warp_sums, call):
        lane = T.get_thread_binding() % WARP
        for i in T.unroll(count):
            for d in T.unroll(5):
                values[i] = values[i] + T.shfl_xor(values[i], T.shift_left(1, d))
        if warps > 1:
            if lane == 0:
                for i in T.unroll(count):
                    warp_sums[call % 2, i, T.get_thread_binding() // WARP] = values[i]
            T.sync_threads()
            for r in T.unroll(-(-count // at_once)):
                total = T.alloc_var(T.float32, init=T.float32(0))
                value = r * at_once + lane // width
                if lane % width < warps and value < count:
                    total = warp_sums[call % 2, value, lane % width]
                for d in T.unroll(steps):
                    total = total + T.shfl_xor(total, T.shift_left(1, d))
                for i in T.unroll(at_once):
                    if r * at_once + i < count:
                        values[r * at_once + i] = T.shfl_sync(total, i * width)

    return summed


# ---- division without a branch ------------------------------------------------------------------


@T.macro
def near_reciprocal(denominator):
    """`1 / d`, rounded once, for a `d` far from overflow and underflow.

    The steps of a division without its branch, which looks for extreme operands first.
    """
    guess = T.alloc_var(T.float32, init=T.fast_rcp(denominator))
    return T.ieee_fmaf(guess, T.ieee_fmaf(-denominator, guess, T.float32(1)), guess)


def near_quotient(steps: int) -> Any:
    """A macro: `l / d`, rounded once, with `1 / d` at hand, where neither is near the extremes.

    Two steps for any operands. Residues are taken negative, which keeps the sign of zero. NaN stays
    NaN.
    """

    @T.macro
    def quotient_of(left, denominator, reciprocal):
        quotient = T.alloc_var(T.float32, init=T.ieee_mul(left, reciprocal))
        for _ in T.unroll(steps):
            quotient = T.ieee_fmaf(-T.ieee_fmaf(denominator, quotient, -left), reciprocal, quotient)
        return quotient

    return quotient_of
