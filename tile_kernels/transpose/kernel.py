"""Transpose of a batch of matrices through a swizzled tile in shared memory."""

from typing import Any

from tilelang import language as T

from tile_kernels.runtime.launch import kernel

LANES = 32
WORD_BYTES = 4  # one bank of shared memory
BANK_BYTES = LANES * WORD_BYTES  # all banks


def access_bits(
    dtype: str, width: int, batched: bool, load: int, store: int, *_: int
) -> tuple[int, int]:
    return 8 * width * load, 8 * width * store


@kernel(access_bits=access_bits)
def batched_transpose(
    dtype: str,
    width: int,
    batched: bool,
    load: int,
    store: int,
    tile_rows: int,
    tile_cols: int,
    threads: int,
    blocks: int,
    rows_on_x: bool,
) -> Any:
    """`out[b, j, i] = x[b, i, j]`; without `batched` the tensors are single matrices.

    A thread loads `word` rows of `load` columns, so that for each column it holds one 4-byte word
    of the transposed tile. There, chunk `c` of column `j` is kept at chunk `c ^ (j // load)`
    (within 128 bytes): lanes with neighbouring columns then write different banks. A chunk is what
    one thread reads back, or what the lanes of a warp with the same columns write, if that is more.
    """
    word = max(WORD_BYTES // width, 1)
    in_lanes = tile_cols // load  # threads along a row of x
    out_lanes = tile_rows // store  # threads along a row of out
    chunk = max(store, word * max(1, LANES // in_lanes))
    chunks = max(1, min(BANK_BYTES // width, tile_rows) // chunk)
    in_steps = tile_rows // word * in_lanes // threads
    out_steps = tile_cols * out_lanes // threads
    batch, rows, cols = T.dynamic("batch rows cols")
    batch_stride, row_stride = T.dynamic("batch_stride row_stride", "int64")

    if batched:
        x_type = T.StridedTensor[(batch, rows, cols), (batch_stride, row_stride, 1), dtype]
        out_type = T.Tensor[(batch, cols, rows), dtype]
    else:
        x_type = T.StridedTensor[(rows, cols), (row_stride, 1), dtype]
        out_type = T.Tensor[(cols, rows), dtype]

    @T.prim_func
    def transpose(x: x_type, out: out_type):
        tiles_down = T.ceildiv(rows, tile_rows)
        tiles_across = T.ceildiv(cols, tile_cols)
        with T.Kernel(
            tiles_down if rows_on_x else tiles_across,
            tiles_across if rows_on_x else tiles_down,
            batch if batched else 1,
            threads=threads,
        ) as (bx, by, b):
            if batched:
                T.assume(batch_stride % load == 0)
            T.assume(row_stride % load == 0)
            T.assume(cols % load == 0)
            T.assume(rows % store == 0)
            first_row = (bx if rows_on_x else by) * tile_rows
            first_col = (by if rows_on_x else bx) * tile_cols
            T.annotate_min_blocks_per_sm(blocks)
            tx = T.get_thread_binding()
            tile = T.alloc_shared((tile_cols, tile_rows), dtype)
            loaded = T.alloc_local((in_steps, word, load), dtype)
            turned = T.alloc_local((word,), dtype)
            line = T.alloc_local((store,), dtype)

            for step in T.unroll(in_steps):
                col = tx % in_lanes * load
                row = (step * threads + tx) // in_lanes * word
                for w in T.unroll(word):
                    if first_row + row + w < rows and first_col + col < cols:
                        i, j = first_row + row + w, first_col + col
                        for v in T.vectorized(load):
                            loaded[step, w, v] = x[b, i, j + v] if batched else x[i, j + v]
            for step in T.unroll(in_steps):
                col = tx % in_lanes * load
                row = (step * threads + tx) // in_lanes * word
                swizzle = row // chunk ^ (col // load % chunks)
                for v in T.unroll(load):
                    for w in T.unroll(word):
                        turned[w] = loaded[step, w, v]
                    for w in T.vectorized(word):
                        tile[col + v, swizzle * chunk + row % chunk + w] = turned[w]
            T.sync_threads()
            for step in T.unroll(out_steps):
                col = (step * threads + tx) // out_lanes
                row = tx % out_lanes * store
                swizzle = row // chunk ^ (col // load % chunks)
                if first_col + col < cols and first_row + row < rows:
                    for v in T.vectorized(store):
                        line[v] = tile[col, swizzle * chunk + row % chunk + v]
                    for v in T.vectorized(store):
                        if batched:
                            out[b, first_col + col, first_row + row + v] = line[v]
                        else:
                            out[first_col + col, first_row + row + v] = line[v]

    return transpose
