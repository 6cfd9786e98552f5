"""Row-major scales to the layout that the copy engine reads."""

from typing import Any

from tilelang import language as T

from tile_kernels.runtime.launch import kernel

TILE_ROWS, TILE_STEPS, THREADS = 64, 32, 256


@kernel(access_bits=lambda *_: (32, 32))
def mn_major(dtype: str, batched: bool, steps: int) -> Any:
    """`out[g, s, i] = sf[g, i, s]`, and 0 for rows `i` of `out` that `sf` does not have."""
    groups, rows, out_rows, out_stride = T.dynamic("groups rows out_rows out_stride")
    num_loads = TILE_ROWS * TILE_STEPS // THREADS
    if batched:
        sf_type = T.Tensor[(groups, rows, steps), dtype]
        out_type = T.StridedTensor[
            (groups, steps, out_rows), (steps * out_stride, out_stride, 1), dtype
        ]
    else:
        sf_type = T.Tensor[(rows, steps), dtype]
        out_type = T.StridedTensor[(steps, out_rows), (out_stride, 1), dtype]

    @T.prim_func
    def swapped(sf: sf_type, out: out_type):
        with T.Kernel(
            T.ceildiv(out_rows, TILE_ROWS),
            -(-steps // TILE_STEPS),
            groups if batched else 1,
            threads=THREADS,
        ) as (row_tile, step_tile, g):
            tx = T.get_thread_binding()
            tile = T.alloc_shared((TILE_STEPS, TILE_ROWS + 1), dtype)
            for i in T.unroll(num_loads):
                row = (i * THREADS + tx) // TILE_STEPS
                step = tx % TILE_STEPS
                from_row = row_tile * TILE_ROWS + row
                from_step = step_tile * TILE_STEPS + step
                value = T.alloc_var(dtype)
                value = T.cast(0, dtype)
                if from_row < rows and from_step < steps:
                    value = sf[g, from_row, from_step] if batched else sf[from_row, from_step]
                tile[step, row] = value
            T.sync_threads()
            for i in T.unroll(num_loads):
                step = (i * THREADS + tx) // TILE_ROWS
                row = tx % TILE_ROWS
                to_step = step_tile * TILE_STEPS + step
                to_row = row_tile * TILE_ROWS + row
                if to_step < steps and to_row < out_rows:
                    if batched:
                        out[g, to_step, to_row] = tile[step, row]
                    else:
                        out[to_step, to_row] = tile[step, row]

    return swapped
