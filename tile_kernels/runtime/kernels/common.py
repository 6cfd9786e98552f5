"""TileLang macros that any kernel may use."""

from tilelang import language as T


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
