"""How the gate's kernels divide rows.

Blocks are persistent and take whole rows. A thread owns the same vectors of 8 columns of every row:
it copies them ahead into a place of its own in shared memory, so that only the sums over a row need
a barrier. Rows that are too long for that are read where they are used.
"""

from tile_kernels.runtime.kernels.common import EXPLICIT_GUARDS, WARP

VECTOR = 8  # bfloat16 of 16 bytes
MOST_THREADS = 512
MANY_THREADS = 1024  # where rows are long
# Every access stands under the conditions it needs, barriers are written out.
PASS_CONFIGS = {**EXPLICIT_GUARDS, "tl.disable_thread_storage_sync": True}


def cuts(hidden: int) -> list[tuple[int, int]]:
    """Threads of a block and vectors of each in a row, those first that leave the fewest idle."""
    vectors = hidden // VECTOR
    steps = ((t, -(-vectors // t)) for t in range(WARP, MOST_THREADS + 1, WARP))
    return sorted(steps, key=lambda cut: (cut[0] * cut[1], cut[0]))


def long_cut(hidden: int) -> tuple[int, int]:
    """As `cuts`, for rows that are too long for what a block holds."""
    return MANY_THREADS, -(-hidden // (VECTOR * MANY_THREADS))
