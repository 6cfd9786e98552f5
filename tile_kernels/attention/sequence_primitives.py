"""Where a token is: its sequence, and the entries of compressed keys of that sequence."""

from tilelang import language as T

from tile_kernels.runtime.device import WARP


@T.macro
def visible_rows(cu_seqlens, num_bounds, token, num_tokens, window, ratio, num_entries, found):
    """What a token attends to: `found` gets the first row of its window, the number of rows of the
    window, the first entry and the number of entries.

    All lanes of a warp call it, with the same token. Bounds are cut to the tokens and made to
    increase, as `kv_compress` does. A token outside of all sequences gets nothing. With a `ratio`
    of 0 there are no entries.
    """
    lane = T.get_thread_binding() % WARP
    bound = T.alloc_var(T.int32)
    before = T.alloc_var(T.int32)
    last = T.alloc_var(T.int32, init=0)
    start = T.alloc_var(T.int32, init=-1)
    earlier = T.alloc_var(T.int32, init=0)  # entries of the sequences before
    for step in T.serial(T.ceildiv(num_bounds, WARP)):
        position = step * WARP + lane
        bound = last
        if position < num_bounds:
            bound = T.max(last, T.min(cu_seqlens[position], num_tokens))
        for d in T.unroll(5):
            before = T.shfl_up(bound, T.shift_left(1, d))
            if lane >= T.shift_left(1, d):
                bound = T.max(bound, before)
        before = T.shfl_up(bound, 1)
        if lane == 0:
            before = last
        if position > 0 and position < num_bounds:  # the sequence that ends here
            if bound > token:
                if before <= token:
                    start = before
            elif ratio > 0:
                earlier = earlier + T.truncdiv(bound - before, ratio)
        last = T.shfl_sync(bound, WARP - 1)
    start = T.warp_reduce_max(start)
    earlier = T.warp_reduce_sum(earlier)
    found[0] = 0
    found[1] = 0
    found[2] = 0
    found[3] = 0
    if start >= 0:
        found[0] = T.max(start, token + 1 - window)
        found[1] = token + 1 - found[0]
        if ratio > 0:
            found[2] = T.min(earlier, num_entries)
            found[3] = T.min(T.truncdiv(token + 1 - start, ratio), num_entries - found[2])
