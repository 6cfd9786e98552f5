"""Gradients of attention over gathered rows that are key and value at once (sm_90a).

A block has one query and 64 of its heads. Per tile of 64 rows it computes five products: scores and
`grad . value` (each by one of two consumer warpgroups), then the gradients of the queries and of
the rows, of which each warpgroup has half of the channels. A third warpgroup gathers rows with
16-byte cp.async.

A row is selected by many queries. A block does not add to its gradient: it stores its piece, in
bfloat16, where no other block writes. A second kernel adds the pieces of a row in the order of
queries, indices and heads, so that equal inputs give equal bits without atomics.
"""

from typing import Any

from tilelang import language as T

from tile_kernels.attention.attention_bwd.plan import HEADS, TILE, VALUE_DIM, VECTOR
from tile_kernels.runtime.device import WARP
from tile_kernels.runtime.kernels.common import EXPLICIT_GUARDS
from tile_kernels.runtime.launch import kernel

LOG2E = 1.4426950408889634
RIGHT = 256  # channels of the second warpgroup; the first has the others
THREADS = 256  # of the kernels around the products
# Of a thread, after the producer has given up some: 2 * 232 + 40 is 3 * 168, what a block has.
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 232, 40
# Channels of a row's gradient in the registers of a warpgroup. H200, 128 heads, 1152 indices: 422
# TFLOP/s of the products with 64 and with 128, which spills where lengths are read; 680 without the
# stores. With the scores computed before the other product, not beside it, 406.
WIDTH = 64
# Pieces that a thread loads before it adds them, 16 bytes each. H200, two groups of heads: 3.59
# TB/s with 8, 3.67 with 4, 3.15 with 16; long lists need several.
PIECES_AT_ONCE = 8


@T.macro
def gather_half(kv, tile, at, ok, first, width):
    """Starts copies of channels from `first` on of 64 rows; rows that are not `ok` become zero.

    Threads of a warpgroup: 8 have 16 bytes each of a row, and every 16th row.
    """
    row = T.get_thread_binding() % 128 // 8
    col = T.get_thread_binding() % 8 * VECTOR
    for r in T.unroll(4):
        for c in T.unroll(width // 64):
            T.ptx_cp_async(
                T.access_ptr(tile[r * 16 + row, c * 64 + col], "w", VECTOR),
                T.access_ptr(kv[at[r], first + c * 64 + col], "r", VECTOR),
                VECTOR,
                ok[r] != 0,
            )


# ---- before the products -------------------------------------------------------------------------


@kernel(access_bits=lambda *_: ((32, 128), 32), pass_configs=EXPLICIT_GUARDS)
def prepare_gradients(heads: int, with_sink: bool) -> Any:
    """`L * log2(e)`, `D` and the sink's share of each query and head; a warp has one of them."""
    rows = T.dynamic("rows")  # queries times heads
    steps = VALUE_DIM // (WARP * VECTOR)

    @T.prim_func
    def prepare(
        grad: T.Tensor[(rows, VALUE_DIM), T.bfloat16],
        out: T.Tensor[(rows, VALUE_DIM), T.bfloat16],
        lse: T.Tensor[(rows,), T.float32],
        sink: T.Tensor[(heads,), T.float32],
        full: T.Tensor[(rows,), T.float32],
        delta: T.Tensor[(rows,), T.float32],
        share: T.Tensor[(rows,), T.float32],
    ):
        with T.Kernel(T.ceildiv(rows, THREADS // WARP), threads=THREADS) as block:
            tx = T.get_thread_binding()
            row = block * (THREADS // WARP) + tx // WARP
            g_regs = T.alloc_local((steps, VECTOR), T.bfloat16)
            o_regs = T.alloc_local((steps, VECTOR), T.bfloat16)
            total = T.alloc_var(T.float32, init=T.float32(0))
            joint = T.alloc_var(T.float32, init=T.float32(0))
            if row < rows:
                for s in T.unroll(steps):
                    for v in T.vectorized(VECTOR):
                        g_regs[s, v] = grad[row, (s * WARP + tx % WARP) * VECTOR + v]
                    for v in T.vectorized(VECTOR):
                        o_regs[s, v] = out[row, (s * WARP + tx % WARP) * VECTOR + v]
                for s in T.unroll(steps):
                    for v in T.unroll(VECTOR):
                        total = total + T.cast(g_regs[s, v], T.float32) * T.cast(
                            o_regs[s, v], T.float32
                        )
            for d in T.unroll(5):
                total = total + T.shfl_xor(total, T.shift_left(1, d))
            if row < rows and tx % WARP == 0:
                joint = lse[row]
                if with_sink:
                    own = T.alloc_var(T.float32, init=sink[row % heads])
                    larger = T.alloc_var(T.float32, init=T.max(joint, own))
                    smaller = T.alloc_var(T.float32, init=T.min(joint, own))
                    if joint <= T.infinity(T.float32):  # not a NaN
                        joint = larger
                        if larger < T.infinity(T.float32) and smaller > -T.infinity(T.float32):
                            joint = larger + T.log(1.0 + T.exp(smaller - larger))
                    share[row] = T.float32(0)
                    if joint != T.infinity(T.float32):  # otherwise no key, or nothing but the sink
                        share[row] = -T.exp(own - joint) * total
                full[row] = joint * LOG2E
                delta[row] = total

    return prepare


@kernel(access_bits=lambda *_: (32, 32), pass_configs=EXPLICIT_GUARDS)
def sink_gradient(heads: int) -> Any:
    """The sum over queries: 32 threads have a head, each every 32nd query, in order."""
    tokens = T.dynamic("tokens")
    columns, lanes = 32, 32

    @T.prim_func
    def sum_shares(
        share: T.Tensor[(tokens, heads), T.float32], grad_sink: T.Tensor[(heads,), T.float32]
    ):
        with T.Kernel(T.ceildiv(heads, columns), threads=columns * lanes) as block:
            tx = T.get_thread_binding()
            head = block * columns + tx % columns
            lane = tx // columns
            partial = T.alloc_shared((lanes, columns), T.float32)
            total = T.alloc_var(T.float32, init=T.float32(0))
            if head < heads:
                for step in T.serial(T.ceildiv(tokens, lanes)):
                    if step * lanes + lane < tokens:
                        total = total + share[step * lanes + lane, head]
            partial[lane, tx % columns] = total
            T.sync_threads()
            if tx < columns and head < heads:
                total = T.float32(0)
                for i in T.serial(lanes):
                    total = total + partial[i, tx]
                grad_sink[head] = total

    return sum_shares


# ---- products ------------------------------------------------------------------------------------


def packed(channel: Any) -> Any:
    """Where a channel is in a piece: a thread's eight of 32 channels of a wgmma result are
    neighbours, so that it stores 16 bytes at a time."""
    return channel // 32 * 32 + channel % 8 // 2 * 8 + channel % 32 // 8 * 2 + channel % 2


@T.macro
def store_piece(acc, packed_acc, pieces, row, first, width):
    """Rounds 64 rows of `width` channels and stores them, in the order of `packed`."""
    for j, c in T.Parallel(TILE, width):
        packed_acc[j, packed(c)] = T.cast(acc[j, c], T.bfloat16)
    for j, c in T.Parallel(TILE, width):
        pieces[row + j, first + c] = packed_acc[j, c]


@kernel(
    access_bits=lambda *_: (32, 128),
    pass_configs={
        **EXPLICIT_GUARDS,
        "tl.enable_fast_math": True,
        "tl.disable_thread_storage_sync": True,  # mbarriers order everything
    },
)
def token_gradients(dim: int, heads: int, with_length: bool) -> Any:
    """`grad_q`, and the pieces of the gradients of rows."""
    tokens, num_rows, slots, num_pieces = T.dynamic("tokens num_rows slots num_pieces")
    groups = -(-heads // HEADS)
    left = dim - RIGHT
    value_right = VALUE_DIM - left  # channels of values on the right
    f32, bf16 = T.float32, T.bfloat16

    @T.prim_func
    def gradients_of_token(
        q: T.Tensor[(tokens, heads, dim), T.bfloat16],
        kv: T.Tensor[(num_rows, dim), T.bfloat16],
        indices: T.Tensor[(tokens, slots), T.int32],
        length: T.Tensor[(tokens,), T.int32],
        grad: T.Tensor[(tokens, heads, VALUE_DIM), T.bfloat16],
        full: T.Tensor[(tokens, heads), T.float32],
        delta: T.Tensor[(tokens, heads), T.float32],
        grad_q: T.Tensor[(tokens, heads, dim), T.bfloat16],
        pieces: T.Tensor[(num_pieces, dim), T.bfloat16],
        first_token: T.int32,
        num_tokens: T.int32,
        sm_scale: T.float32,
    ):
        with T.Kernel(num_tokens * groups, threads=384) as block:
            token = first_token + block // groups
            head = block % groups * HEADS
            first_piece = T.alloc_var(T.int32, init=block * (T.ceildiv(slots, TILE) * TILE))
            tx = T.get_thread_binding()

            qs = T.alloc_shared([HEADS, dim], bf16)  # at the end: grad_q
            gs = T.alloc_shared([HEADS, VALUE_DIM], bf16)
            k_l = T.alloc_shared([TILE, left], bf16)
            k_r = T.alloc_shared([TILE, RIGHT], bf16)
            ps = T.alloc_shared([HEADS, TILE], bf16)
            dss = T.alloc_shared([HEADS, TILE], bf16)
            valid = T.alloc_shared([TILE], "bool")

            q_ready = T.alloc_barrier(384)
            k_l_ready = T.alloc_barrier(128)
            k_r_ready = T.alloc_barrier(128)
            valid_ready = T.alloc_barrier(128)
            k_l_free = T.alloc_barrier(128)
            k_r_free = T.alloc_barrier(128)
            p_ready = T.alloc_barrier(128)
            ds_ready = T.alloc_barrier(128)
            p_free = T.alloc_barrier(256)

            s0 = T.alloc_fragment([HEADS, TILE], f32)
            full0 = T.alloc_fragment([HEADS], f32)
            dq0 = T.alloc_fragment([HEADS, left], f32)
            acc0 = T.alloc_fragment([TILE, WIDTH], f32)
            piece0 = T.alloc_fragment([TILE, WIDTH], bf16)

            s1 = T.alloc_fragment([HEADS, TILE], f32)
            p1 = T.alloc_fragment([HEADS, TILE], bf16)
            delta1 = T.alloc_fragment([HEADS], f32)
            dq1 = T.alloc_fragment([HEADS, RIGHT], f32)
            acc1 = T.alloc_fragment([TILE, WIDTH], f32)
            piece1 = T.alloc_fragment([TILE, WIDTH], bf16)

            limit = T.alloc_var(T.int32, init=slots)
            if with_length:
                limit = T.max(0, T.min(slots, length[token]))
            tiles = (limit + TILE - 1) // TILE

            T.tma_copy(q[token, head : head + HEADS, :], qs, barrier=q_ready)
            T.tma_copy(grad[token, head : head + HEADS, :], gs, barrier=q_ready)
            T.barrier_arrive(q_ready)

            if tx < 128:
                T.set_max_nreg(CONSUMER_REGISTERS, 1)
                T.fill(dq0, 0)
                for h in T.Parallel(HEADS):
                    full0[h] = T.infinity(f32)
                    if head + h < heads:
                        full0[h] = full[token, head + h]
                T.barrier_wait(q_ready, 0)
                for i in T.serial(tiles):
                    T.barrier_wait(k_l_ready, i & 1)
                    T.wgmma_gemm(qs[:, :left], k_l, s0, transpose_B=True, clear_accum=True)
                    T.barrier_wait(k_r_ready, i & 1)
                    T.wgmma_gemm(qs[:, left:], k_r, s0, transpose_B=True)
                    T.wait_wgmma(0)
                    # Those of rows that are none are in no sum: nobody reads their pieces.
                    for h, j in T.Parallel(HEADS, TILE):
                        s0[h, j] = T.exp2(s0[h, j] * (sm_scale * LOG2E) - full0[h])
                    T.barrier_wait(p_free, (i & 1) ^ 1)
                    T.copy(s0, ps)
                    T.fence_proxy_async()
                    T.barrier_arrive(p_ready)
                    T.barrier_wait(p_ready, i & 1)  # of all warps
                    T.wgmma_gemm(ps, gs[:, :WIDTH], acc0, transpose_A=True, clear_accum=True)
                    T.barrier_wait(ds_ready, i & 1)
                    T.wgmma_gemm(dss, k_l, dq0)
                    T.wgmma_gemm(dss, qs[:, :WIDTH], acc0, transpose_A=True)
                    T.wait_wgmma(1)
                    T.barrier_arrive(k_l_free)
                    T.wait_wgmma(0)
                    store_piece(acc0, piece0, pieces, first_piece + i * TILE, 0, WIDTH)
                    for c in range(WIDTH, left, WIDTH):
                        T.wgmma_gemm(
                            ps, gs[:, c : c + WIDTH], acc0, transpose_A=True, clear_accum=True
                        )
                        T.wgmma_gemm(dss, qs[:, c : c + WIDTH], acc0, transpose_A=True)
                        T.wait_wgmma(0)
                        store_piece(acc0, piece0, pieces, first_piece + i * TILE, c, WIDTH)
                    T.barrier_arrive(p_free)
                T.sync_threads(3, 128)  # all warps have read qs
                T.copy(dq0, qs[:, :left])
                T.fence_proxy_async()
                T.sync_threads(3, 128)
                T.copy(qs[:, :left], grad_q[token, head : head + HEADS, :left])

            elif tx < 256:
                T.set_max_nreg(CONSUMER_REGISTERS, 1)
                T.fill(dq1, 0)
                for h in T.Parallel(HEADS):
                    delta1[h] = 0.0
                    if head + h < heads:
                        delta1[h] = delta[token, head + h]
                T.barrier_wait(q_ready, 0)
                for i in T.serial(tiles):
                    T.barrier_wait(k_l_ready, i & 1)
                    T.wgmma_gemm(gs[:, :left], k_l, s1, transpose_B=True, clear_accum=True)
                    T.barrier_wait(k_r_ready, i & 1)
                    T.wgmma_gemm(gs[:, left:], k_r[:, :value_right], s1, transpose_B=True)
                    T.wait_wgmma(0)
                    T.barrier_wait(valid_ready, i & 1)
                    T.barrier_wait(p_ready, i & 1)
                    T.copy(ps, p1)
                    for h, j in T.Parallel(HEADS, TILE):
                        s1[h, j] = T.if_then_else(
                            valid[j],
                            T.cast(p1[h, j], f32) * (s1[h, j] - delta1[h]) * sm_scale,
                            0.0,
                        )
                    T.copy(s1, p1)
                    T.copy(p1, dss)
                    T.fence_proxy_async()
                    T.barrier_arrive(ds_ready)
                    T.barrier_wait(ds_ready, i & 1)
                    T.wgmma_gemm(p1, k_r, dq1)
                    T.wgmma_gemm(
                        ps, gs[:, left : left + WIDTH], acc1, transpose_A=True, clear_accum=True
                    )
                    T.wgmma_gemm(dss, qs[:, left : left + WIDTH], acc1, transpose_A=True)
                    T.wait_wgmma(2)
                    T.barrier_arrive(k_r_free)
                    T.wait_wgmma(0)
                    store_piece(acc1, piece1, pieces, first_piece + i * TILE, left, WIDTH)
                    for c in range(left + WIDTH, VALUE_DIM, WIDTH):
                        T.wgmma_gemm(
                            ps, gs[:, c : c + WIDTH], acc1, transpose_A=True, clear_accum=True
                        )
                        T.wgmma_gemm(dss, qs[:, c : c + WIDTH], acc1, transpose_A=True)
                        T.wait_wgmma(0)
                        store_piece(acc1, piece1, pieces, first_piece + i * TILE, c, WIDTH)
                    if dim > VALUE_DIM:
                        for c in range(VALUE_DIM, dim, WIDTH):  # channels of keys alone
                            T.wgmma_gemm(
                                dss, qs[:, c : c + WIDTH], acc1, transpose_A=True, clear_accum=True
                            )
                            T.wait_wgmma(0)
                            store_piece(acc1, piece1, pieces, first_piece + i * TILE, c, WIDTH)
                    T.barrier_arrive(p_free)
                T.sync_threads(4, 128)
                T.copy(dq1, qs[:, left:])
                T.fence_proxy_async()
                T.sync_threads(4, 128)
                T.copy(qs[:, left:], grad_q[token, head : head + HEADS, left:])

            else:
                T.set_max_nreg(PRODUCER_REGISTERS, 0)
                row = (tx - 256) // 8
                at = T.alloc_local([4], T.int32)
                ok = T.alloc_local([4], T.int32)
                ahead = T.alloc_local([4], T.int32)
                for r in T.unroll(4):
                    ahead[r] = -1
                    if r * 16 + row < limit:
                        ahead[r] = indices[token, r * 16 + row]
                for i in T.serial(tiles):
                    for r in T.unroll(4):
                        ok[r] = T.cast((ahead[r] >= 0) & (ahead[r] < num_rows), T.int32)
                        at[r] = ahead[r] * ok[r]
                    for r in T.unroll(4):  # the indices of the next step arrive meanwhile
                        ahead[r] = -1
                        if (i + 1) * TILE + r * 16 + row < limit:
                            ahead[r] = indices[token, (i + 1) * TILE + r * 16 + row]
                    T.barrier_wait(k_l_free, (i & 1) ^ 1)
                    gather_half(kv, k_l, at, ok, 0, left)
                    T.cp_async_barrier_noinc(k_l_ready)
                    T.barrier_wait(k_r_free, (i & 1) ^ 1)
                    gather_half(kv, k_r, at, ok, left, RIGHT)
                    T.cp_async_barrier_noinc(k_r_ready)
                    # Warpgroup 1 has masked the step before: it freed what was just loaded.
                    if (tx - 256) % 8 == 0:
                        for r in T.unroll(4):
                            valid[r * 16 + row] = ok[r] != 0
                    T.barrier_arrive(valid_ready)

    return gradients_of_token


# ---- after the products --------------------------------------------------------------------------


@kernel(access_bits=lambda *_: ((32, 64, 128), (32, 64)), pass_configs=EXPLICIT_GUARDS)
def add_pieces(dim: int, groups: int) -> Any:
    """Adds the pieces of some queries to the gradient of each row, one after another.

    `order` lists indices by row, then by query and slot; `starts[n]` is the first of row `n`, and
    `cursor[n]` the first that no launch has added. 8 channels of a row belong to one thread.
    """
    num_rows, num_order, num_pieces = T.dynamic("num_rows num_order num_pieces")
    columns = dim // VECTOR
    rows = 4  # of a block; other values were not compared
    at_once = max(1, PIECES_AT_ONCE // groups)

    @T.prim_func
    def pieces_to_rows(
        order: T.Tensor[(num_order,), T.int64],
        starts: T.Tensor[(num_rows + 1,), T.int32],
        cursor: T.Tensor[(num_rows,), T.int32],
        pieces: T.Tensor[(num_pieces, dim), T.bfloat16],
        grad_kv: T.Tensor[(num_rows, dim), T.float32],
        slots: T.int32,
        first_token: T.int32,
        num_tokens: T.int32,
    ):
        with T.Kernel(T.ceildiv(num_rows, rows), threads=rows * columns) as block:
            tx = T.get_thread_binding()
            row = block * rows + tx // columns
            offset = tx % columns * VECTOR  # in a packed piece
            channel = offset // 32 * 32 + offset % 32 // 4
            padded = T.ceildiv(slots, TILE) * TILE
            total = T.alloc_local((VECTOR,), T.float32)
            loaded = T.alloc_local((at_once, groups, VECTOR), T.bfloat16)
            token = T.alloc_local((at_once,), T.int32)
            slot = T.alloc_local((at_once,), T.int32)
            entry = T.alloc_var(T.int64, init=T.int64(0))
            at = T.alloc_var(T.int32, init=0)
            last = T.alloc_var(T.int32, init=0)
            for v in T.unroll(VECTOR):
                total[v] = T.float32(0)
            if row < num_rows:
                at = starts[row]
                last = starts[row + 1]
                if first_token > 0:
                    at = cursor[row]
                    for u in T.unroll(VECTOR // 2):
                        for v in T.vectorized(2):
                            total[u * 2 + v] = grad_kv[row, channel + u * 8 + v]
            T.sync_threads()  # all have read the cursor
            more = T.alloc_var(T.bool, init=at < last)
            while more:
                for p in T.unroll(at_once):
                    token[p] = num_tokens
                    if at + p < last:
                        entry = order[at + p]
                        token[p] = T.cast(entry // slots, T.int32) - first_token
                        slot[p] = T.cast(entry % slots, T.int32)
                for p in T.unroll(at_once):
                    if token[p] < num_tokens:
                        for g in T.unroll(groups):
                            for v in T.vectorized(VECTOR):
                                loaded[p, g, v] = pieces[
                                    (token[p] * groups + g) * padded + slot[p], offset + v
                                ]
                for p in T.unroll(at_once):
                    if token[p] < num_tokens:
                        at = at + 1
                        for g in T.unroll(groups):
                            for v in T.unroll(VECTOR):
                                total[v] = total[v] + T.cast(loaded[p, g, v], T.float32)
                more = (token[at_once - 1] < num_tokens) & (at < last)
            if row < num_rows:
                for u in T.unroll(VECTOR // 2):
                    for v in T.vectorized(2):
                        grad_kv[row, channel + u * 8 + v] = total[u * 2 + v]
                if offset == 0:
                    cursor[row] = at

    return pieces_to_rows
