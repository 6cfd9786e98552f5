"""The matrix product of the family: a persistent kernel for Hopper, fed by the copy engine (TMA).

    d[m, n] = c[m, n] + sum over steps s of  p_s * (sfa[m, s] * sfb[n, s])

where `p_s` is the product of 128 channels, from the tensor cores (wgmma), which start at zero in
each step: they keep about 14 bits of a sum of e4m3 products. The outer sum is in float32, steps in
ascending order, and all of it in one block. So the bits of an element depend on its row of `a`,
its row of `b` and `c` alone.

A block for each SM iterates over tiles of the result. One warp copies operand tiles and scales into
a ring of stages in shared memory; each stage has an mbarrier that counts its bytes (`full`) and one
at which the warps that have read it arrive (`empty`). Warpgroups of 64 rows multiply and promote:
while one adds to its float32 sums, the tensor cores work for another.

Weights in packed e2m1 come into the ring as they are. One more warpgroup expands each stage to
e4m3, into a second, shorter ring, which the tensor cores read. `ready` and `free` are the mbarriers
of its stages.
"""

from typing import Any

from tilelang import language as T

from tile_kernels.gemm.tiling import (
    BLOCK,
    CONTIGUOUS,
    DENSE,
    GROUP,
    K_GROUPED,
    LEAST_SHIFT,
    MASKED,
    NAN_SHIFT,
    NONE,
    PSUM,
    ROW,
    ROW_UE8M0,
    SQUARE_E2M1,
    SQUARE_TRANSPOSED,
    SQUARE_TRANSPOSED_UE8M0,
    ZERO_SHIFT,
    Plan,
)
from tile_kernels.runtime.kernels.common import EXPLICIT_GUARDS
from tile_kernels.runtime.kernels.e2m1 import HIGH, HIGH_STEP, LOW, LOW_STEP, bytes_of

# All barriers are written out. TileLang would add one before each store to shared memory.
PASS_CONFIGS = {**EXPLICIT_GUARDS, "tl.disable_thread_storage_sync": True}

WARPGROUP = 128  # threads
WARPGROUP_ROWS = 64
WIDTH = 128  # columns of one product
PACKED = 4  # exponents in a word
COPY_REGISTERS, MATH_REGISTERS = 40, 232  # of a thread; 384 threads have 65,536
# Where a warpgroup expands e2m1: 512 threads have 65,536.
EXPAND_REGISTERS, MATH_REGISTERS_E2M1 = 96, 184
EXPANDED_STAGES = 4  # of 128 columns
TURN = 8  # named barriers, one for each warpgroup that waits for its turn; TileLang uses low ones


def access_bits(*static: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Group data and scales of blocks are single words; results leave by TMA, or as pairs."""
    p = Plan(*static)
    words: set[int] = set()
    if p.layout != DENSE or p.b_scale not in (ROW, ROW_UE8M0, NONE):
        words.add(32)
    if p.addend:
        words.add(64 if p.out_dtype == "float32" else 32)
    return tuple(sorted(words)), (64,) if p.out_dtype == "float32" else ()


def build_product(*static: Any) -> Any:
    """The prim_func `product(a, sfa, b, sfb, layout, c, d)` of a `Plan`.

    | layout | a | b | d | `layout` |
    |---|---|---|---|---|
    | dense | `[m, k]` | `[n, k]` | `[m, n]` | None |
    | contiguous | `[m, k]` | `[groups, n, k]` | `[m, n]` | `[m]`, the group of a row |
    | psum | `[m, k]` | `[groups, n, k]` | `[m, n]` | `[groups]`, ends of groups |
    | masked | `[groups, m, k]` | `[groups, n, k]` | `[groups, m, n]` | `[groups]`, sizes |
    | k_grouped | `[m, r]` | `[n, r]` | `[groups, m, n]` | `[groups]`, sizes |

    Scales of rows are `[steps, rows]`, after the dimension of groups where the operand has one.
    With e2m1 weights it is `product_e2m1(a, sfa, b, shifts, sfb, layout, c, d)`, with eight codes
    in a word of `b`, and four shifts of a row in an element of `shifts` `[steps, n]`.
    """
    p = Plan(*static)
    grouped_rows = p.layout in (CONTIGUOUS, PSUM)
    masked, k_grouped = p.layout == MASKED, p.layout == K_GROUPED
    b_has_groups, d_has_groups = grouped_rows or masked, masked or k_grouped
    promoted = p.a_scale != NONE
    sfb_by_row = p.b_scale in (ROW, ROW_UE8M0)
    sfb_transposed = p.b_scale in (SQUARE_TRANSPOSED, SQUARE_TRANSPOSED_UE8M0)
    a_packed, b_packed = p.a_scale.endswith("ue8m0"), p.b_scale.endswith("ue8m0")
    packed = p.b_scale == SQUARE_E2M1
    pairs = p.cluster == 2
    alternate, ahead = p.alternate, p.ahead
    scales_by_copier = p.copied_scales and promoted and not sfb_by_row
    # Scales of the rows of `b` are read before a product starts, so that no load of a stage is
    # in flight when it is released. A tile of 128 x 256 has no registers for that: it reads them
    # after the product, and releases a stage when the products of the next one have started. They
    # overwrite `part`, so that the promotion before has its scales.
    deferred = sfb_by_row and (p.rows, p.columns) == (BLOCK, 2 * WIDTH)
    read_before = sfb_by_row and not deferred
    column_span = p.columns * p.cluster
    expanders = 2 if (p.rows, p.columns) == (WARPGROUP_ROWS, WIDTH) else 1
    depth, stages, columns = p.depth, p.stages, p.columns
    halves = columns // WIDTH
    expanded_stages = EXPANDED_STAGES // halves
    n = p.n
    column_tiles = -(-n // column_span)  # of all blocks of a cluster
    clusters = p.blocks // p.cluster
    square_rows = -(-n // BLOCK)
    has_addend = p.addend != ""
    direct = p.out_dtype == "float32"  # results leave from registers
    scale_dtype = {True: T.int32, False: T.float32}
    dtype = getattr(T, p.dtype)

    dynamic_m, groups, num_blocks, channels, sfa_stride, sfb_stride = T.dynamic(
        "m groups num_blocks channels sfa_stride sfb_stride"
    )
    m = p.m or dynamic_m
    k = p.k or (num_blocks * depth if promoted else channels)
    max_steps = num_blocks if promoted else T.floordiv(channels, depth)  # of all groups
    static_steps = -(-p.k // depth)
    sfa_steps = -(-static_steps // PACKED) if a_packed else static_steps
    sfb_steps = -(-static_steps // PACKED) if b_packed else static_steps

    # ---- types of the arguments ----
    if masked:
        a_type = T.Tensor[(groups, m, k), dtype]
        sfa_type = T.StridedTensor[
            (groups, sfa_steps, m), (sfa_steps * sfa_stride, sfa_stride, 1), scale_dtype[a_packed]
        ]
    elif k_grouped:
        a_type = T.Tensor[(m, k), dtype]
        sfa_type = T.Tensor[(num_blocks, m), T.float32]
    else:
        a_type = T.StridedTensor[(m, k), (p.a_stride, 1), dtype]
        sfa_type = T.StridedTensor[(sfa_steps, m), (sfa_stride, 1), scale_dtype[a_packed]]
    b_type = T.Tensor[(groups, n, k) if b_has_groups else (n, k), dtype]
    if k_grouped:
        sfb_type = T.Tensor[(num_blocks, n), T.float32]
    elif sfb_by_row and b_has_groups:
        strides = (sfb_steps * sfb_stride, sfb_stride, 1)
        sfb_type = T.StridedTensor[(groups, sfb_steps, n), strides, scale_dtype[b_packed]]
    elif sfb_by_row:
        sfb_type = T.StridedTensor[(sfb_steps, n), (sfb_stride, 1), scale_dtype[b_packed]]
    else:
        shape = (sfb_steps, square_rows) if sfb_transposed else (square_rows, sfb_steps)
        shape = (groups, *shape) if b_has_groups else shape
        sfb_type = T.Tensor[shape, scale_dtype[b_packed]]
    if packed:
        b_type = T.Tensor[(groups, n, k // 8) if b_has_groups else (n, k // 8), T.uint32]
    shifts_shape = (groups, static_steps, n) if b_has_groups else (static_steps, n)
    shifts_type = T.Tensor[shifts_shape, T.int16]
    if not promoted:
        sfa_type = sfb_type = T.Tensor[(1,), T.float32]
    d_shape = (groups, m, n) if d_has_groups else (m, n)
    d_strides = (m * n, n, 1) if d_has_groups else (p.d_stride, 1)
    c_type = T.StridedTensor[d_shape, d_strides, p.out_dtype]
    d_type = T.StridedTensor[d_shape, d_strides, p.out_dtype]
    layout_type = T.Tensor[(m,) if p.layout == CONTIGUOUS else (groups,), T.int32]

    # ---- warpgroup roles: first row, rows, first half of the columns, halves ----
    if p.rows == BLOCK and not p.separate:
        roles = [(0, BLOCK, 0, halves)]
    elif p.rows == BLOCK:
        roles = [(first, WARPGROUP_ROWS, 0, halves) for first in (0, WARPGROUP_ROWS)]
    else:
        roles = [(0, WARPGROUP_ROWS, half, 1) for half in range(halves)]
    role_threads = [rows // WARPGROUP_ROWS * WARPGROUP for _, rows, _, _ in roles]
    threads = sum(role_threads)  # that multiply; after them one warp copies and three idle

    sfb_ring_width = halves if scales_by_copier else columns
    # Static shared memory has room beside the barriers; the dynamic part is full.
    sfb_ring_scope = "shared" if scales_by_copier else "shared.dyn"
    sfb_ring_dtype = T.float32 if scales_by_copier else scale_dtype[b_packed]

    # ---- regions ----
    def a_tile(a: Any, g: Any, row: Any, channel: Any) -> Any:
        region = (slice(row, row + p.rows), slice(channel, channel + depth))
        return a[(g, *region)] if masked else a[region]

    def b_tile(b: Any, g: Any, column: Any, channel: Any) -> Any:
        width = depth
        if packed:  # eight codes in a word
            channel, width = channel // 8, depth // 8
        region = (slice(column, column + columns), slice(channel, channel + width))
        return b[(g, *region)] if b_has_groups else b[region]

    def row_scales(
        sf: Any, has_groups: bool, packed: bool, g: Any, step: Any, row: Any, num: int
    ) -> Any:
        region = (step // PACKED if packed else step, slice(row, row + num))
        return sf[(g, *region)] if has_groups else sf[region]

    def square_scale(sfb: Any, g: Any, block: Any, step: Any) -> Any:
        position = step // PACKED if b_packed else step
        where = (position, block) if sfb_transposed else (block, position)
        return number(sfb[(g, *where)] if b_has_groups else sfb[where], step, b_packed)

    def square(column: Any, side: int) -> Any:
        """The block of 128 columns; the last tile may reach beyond the last one."""
        return T.min(column // WIDTH + side, square_rows - 1)

    def number(word: Any, step: Any, packed: bool) -> Any:
        if not packed:
            return word
        return T.reinterpret((word >> (step % PACKED * 8) & 255) << 23, T.float32)

    def result_tile(d: Any, g: Any, row: Any, rows: int, column: Any) -> Any:
        region = (slice(row, row + rows), slice(column, column + WIDTH))
        return d[(g, *region)] if d_has_groups else d[region]

    def first_column(at: Any, rank: Any) -> Any:
        return at[1] * column_span + rank * columns

    def column_of(at: Any, rank: Any, half: int) -> Any:
        """An expression, not a variable: its divisibility is what allows wide accesses."""
        return first_column(at, rank) + half * WIDTH

    def launch(num_tiles: Any) -> Any:
        if pairs:
            return T.ClusterKernel(p.blocks, threads=threads + WARPGROUP, cluster_dims=2)
        return T.Kernel(num_tiles, threads=threads + WARPGROUP)

    def stage_readers() -> Any:
        make = T.alloc_cluster_barrier if pairs else T.alloc_barrier
        return make([threads // 32 * p.cluster] * stages)

    def b_stage(slot: Any, done: Any) -> Any:
        """The stage of `b` that the tensor cores read in this step."""
        return done[0] % expanded_stages if packed else slot

    # ---- which tile is next ----
    @T.macro
    def count_tiles(layout, tiles):
        """The number of tiles, in `tiles[0]`."""
        if masked:
            tiles[0] = 0
            for g in T.serial(groups):
                tiles[0] += T.ceildiv(T.min(T.max(layout[g], 0), m), p.rows) * column_tiles
        elif k_grouped:
            tiles[0] = groups * T.ceildiv(m, p.rows) * column_tiles
        else:
            tiles[0] = T.ceildiv(m, p.rows) * column_tiles

    @T.macro
    def in_panel(tile, tiles_m, at):
        """Row and column of tile number `tile`, in panels of rows."""
        panel = tile // (p.panel * column_tiles)
        inside = tile % (p.panel * column_tiles)
        height = T.min(p.panel, tiles_m - panel * p.panel)
        at[0] = panel * p.panel + inside % height
        at[1] = inside // height

    @T.macro
    def locate(tile, layout, at, rank):
        """Row, column, group, first step and number of steps of a tile; no steps: no product.

        `at[5]`: the row after the last one of the group, where rows belong to groups by their end.
        """
        at[2] = 0
        at[3] = 0
        at[4] = static_steps
        at[5] = 0
        if masked:
            at[6] = 0  # tiles of the groups before
            for g in T.serial(groups):
                tiles_m = T.ceildiv(T.min(T.max(layout[g], 0), m), p.rows)
                inside = tile - at[6]
                if inside >= 0 and inside < tiles_m * column_tiles:
                    at[0] = inside % tiles_m
                    at[1] = inside // tiles_m
                    at[2] = g
                at[6] += tiles_m * column_tiles
        elif k_grouped:
            tiles_m = T.ceildiv(m, p.rows)
            at[2] = tile // (tiles_m * column_tiles)
            in_panel(tile % (tiles_m * column_tiles), tiles_m, at)
            for g in T.serial(at[2]):
                at[3] += T.max(layout[g], 0) // depth
            at[3] = T.min(at[3], max_steps)
            at[4] = T.min(T.max(layout[at[2]], 0) // depth, max_steps - at[3])
        else:
            in_panel(tile, T.ceildiv(m, p.rows), at)
            if p.layout == CONTIGUOUS:
                at[2] = layout[at[0] * p.rows]
                if at[2] < 0 or at[2] >= groups:
                    at[4] = 0
            elif p.layout == PSUM:
                at[6] = groups  # the first group that ends behind the tile's first row
                for _ in T.serial(32 - T.clz(groups)):
                    middle = (at[2] + at[6]) // 2
                    if at[2] < at[6]:
                        if layout[middle] > at[0] * p.rows:
                            at[6] = middle
                        else:
                            at[2] = middle + 1
                if at[2] < groups:
                    at[5] = layout[at[2]]
                else:
                    at[4] = 0

    # ---- roles ----
    @T.macro
    def copy_tiles(
        a, sfa, b, sfb, layout, first, rank, a_ring, b_ring, sfa_ring, sfb_ring, full, empty, tiles,
        at, done, shifts=None, shift_ring=None,
    ):  # fmt: skip
        copied_scale = T.alloc_local((2,), T.float32)
        for iteration in T.serial(T.ceildiv(tiles[0] - first, clusters)):
            locate(iteration * clusters + first, layout, at, rank)
            row = at[0] * p.rows
            column = first_column(at, rank)
            g = at[2]
            if scales_by_copier:
                side = T.get_thread_binding() % halves
                if at[4] > 0:
                    copied_scale[1] = square_scale(sfb, g, square(column, side), at[3])
            for i in T.serial(at[4]):
                step = at[3] + i
                slot = done[0] % stages
                if scales_by_copier:  # loaded one step ahead
                    following = at[3] + T.min(i + 1, at[4] - 1)
                    copied_scale[0] = copied_scale[1]
                    copied_scale[1] = square_scale(
                        sfb, g, square(column, T.get_thread_binding() % halves), following
                    )
                T.mbarrier_wait_parity(empty[slot], done[0] // stages % 2 ^ 1)
                if scales_by_copier:
                    lane = T.get_thread_binding() % 32
                    if lane < halves:
                        sfb_ring[slot, lane] = copied_scale[0]
                T.tma_copy(
                    a_tile(a, g, row, step * depth), a_ring[slot, :, :], barrier=full[slot],
                    cluster_mask=3 if pairs else None,
                )  # fmt: skip
                T.tma_copy(
                    b_tile(b, g, column, step * depth), b_ring[slot, :, :], barrier=full[slot]
                )
                if promoted:
                    T.tma_copy(
                        row_scales(sfa, masked, a_packed, g, step, row, p.rows),
                        sfa_ring[slot, :], barrier=full[slot],
                    )  # fmt: skip
                if sfb_by_row:
                    T.tma_copy(
                        row_scales(sfb, b_has_groups, b_packed, g, step, column, columns),
                        sfb_ring[slot, :], barrier=full[slot],
                    )  # fmt: skip
                if packed:
                    T.tma_copy(
                        row_scales(shifts, b_has_groups, False, g, step, column, columns),
                        shift_ring[slot, :], barrier=full[slot],
                    )  # fmt: skip
                T.mbarrier_arrive(full[slot])  # all 32 lanes, the one that copies among them
                done[0] += 1

    @T.macro
    def expand_tiles(
        layout, first, packed_ring, shift_ring, b_ring, full, empty, ready, free, tiles, at, done
    ):
        """Each stage from e2m1 to e4m3, by the threads after those that multiply."""
        pieces = columns * depth // GROUP // WARPGROUP  # of a thread, one group of channels each
        words = T.alloc_local((pieces * 4,), T.uint32)
        row_shifts = T.alloc_local((pieces,), T.uint32)
        data = T.alloc_local((16,), T.float8_e4m3fn)
        octets = T.view(data, (4,), T.uint32)
        low = T.alloc_var(T.uint32, init=T.uint32(0))
        high = T.alloc_var(T.uint32, init=T.uint32(0))
        shift = T.alloc_var(T.uint32, init=T.uint32(0))
        expander = (T.get_thread_binding() - threads) // WARPGROUP
        thread = (T.get_thread_binding() - threads) % WARPGROUP
        group = thread % (depth // GROUP)
        for iteration in T.serial(T.ceildiv(tiles[0] - first, clusters)):
            locate(iteration * clusters + first, layout, at, 0)
            for _ in T.serial(at[4]):
                if done[0] % expanders == expander:
                    slot = done[0] % stages
                    target = done[0] % expanded_stages
                    T.mbarrier_wait_parity(full[slot], done[0] // stages % 2)
                    T.mbarrier_wait_parity(free[target], done[0] // expanded_stages % 2 ^ 1)
                    # All loads first: the compiler cannot move them across the stores.
                    for c in T.unroll(pieces):
                        row = (c * WARPGROUP + thread) // (depth // GROUP)
                        row_shifts[c] = T.cast(shift_ring[slot, row], T.uint32)
                        for e in T.vectorized(4):
                            words[c * 4 + e] = packed_ring[slot, row, group * 4 + e]
                    for c in T.unroll(pieces):
                        row = (c * WARPGROUP + thread) // (depth // GROUP)
                        shift = row_shifts[c] >> T.cast(group * 4, T.uint32) & T.uint32(15)
                        low = T.uint32(LOW + LEAST_SHIFT * LOW_STEP) + shift * T.uint32(LOW_STEP)
                        high = T.uint32(HIGH + LEAST_SHIFT * HIGH_STEP) + shift * T.uint32(
                            HIGH_STEP
                        )
                        if shift == T.uint32(ZERO_SHIFT):
                            low = T.uint32(0)
                            high = T.uint32(0)
                        if shift == T.uint32(NAN_SHIFT):
                            low = T.uint32(0x7F7F7F7F)
                            high = T.uint32(0x7F7F7F7F)
                        for half in T.unroll(2):
                            bytes_of(words[c * 4 + half * 2], low, high, octets, 0)
                            bytes_of(words[c * 4 + half * 2 + 1], low, high, octets, 2)
                            for e in T.vectorized(16):
                                b_ring[target, row, group * GROUP + half * 16 + e] = data[e]
                    T.fence_proxy_async()  # the tensor cores read what these threads wrote
                    T.sync_warp()
                    if thread % 32 == 0:
                        T.mbarrier_arrive(ready[target])
                        T.mbarrier_arrive(empty[slot])
                done[0] += 1

    def element(tensor: Any, g: Any, row: Any, column: Any) -> Any:
        return tensor[(g, row, column) if d_has_groups else (row, column)]

    @T.macro
    def release(empty, slot):
        """The warp gives a stage back, in all blocks of the cluster."""
        if promoted:
            T.sync_warp()  # all lanes have read their scales
        lane = T.get_thread_binding() % 32
        if pairs:
            if lane < 2:
                T.mbarrier_arrive(empty[slot], cta_id=lane)
        elif lane == 0:
            T.mbarrier_arrive(empty[slot])

    def multiplier(number_of_role: int) -> Any:
        """A macro: what the threads of one role do."""
        first_row, rows, first_half, num_halves = roles[number_of_role]
        own_threads = role_threads[number_of_role]
        barrier = 1 + number_of_role
        sides = tuple(range(num_halves))  # products of a step, 128 columns each

        @T.macro
        def multiply(
            sfb, layout, c, d, first, rank, a_ring, b_ring, sfa_ring, sfb_ring, d_tile, full,
            empty, tiles, at, done, ready=None, free=None,
        ):  # fmt: skip
            totals = [T.alloc_fragment((rows, WIDTH), T.float32) for _ in sides]
            part = T.alloc_fragment((rows, WIDTH), T.float32)
            a_scale = T.alloc_fragment((rows,), T.float32)
            b_scales = T.alloc_fragment((WIDTH,), T.float32)
            b_scale = T.alloc_local((num_halves,), T.float32)
            next_scale = T.alloc_local((num_halves,), T.float32)
            kept = T.alloc_fragment((rows,), T.int32)
            now = T.alloc_local((7,), T.int32)
            fragment_registers = rows * WIDTH // own_threads
            if alternate and number_of_role == 1:
                T.named_barrier_arrive(TURN, 2 * WARPGROUP)  # the first warpgroup begins
            num_tiles = T.ceildiv(tiles[0] - first, clusters)
            if num_tiles > 0:
                locate(first, layout, at, rank)
            for iteration in T.serial(num_tiles):
                for e in T.unroll(7):
                    now[e] = at[e]
                row = now[0] * p.rows + first_row
                column = first_column(now, rank) + first_half * WIDTH
                g = now[2]
                if p.layout == CONTIGUOUS:  # loaded long before they are compared
                    for r in T.Parallel(rows):
                        kept[r] = layout[row + r]
                for side in sides:
                    T.clear(totals[side])
                if promoted and not sfb_by_row and not scales_by_copier:
                    if now[4] > 0:
                        for side in sides:
                            next_scale[side] = square_scale(sfb, g, square(column, side), now[3])
                if ahead:
                    if now[4] > 0:
                        T.mbarrier_wait_parity(full[done[0] % stages], done[0] // stages % 2)
                for i in T.serial(now[4]):
                    step = now[3] + i
                    slot = done[0] % stages
                    if promoted and not sfb_by_row and not scales_by_copier:
                        # Loaded one step ahead: the compiler multiplies scales between the
                        # instructions of a product, which would wait for a load of this step.
                        following = now[3] + T.min(i + 1, now[4] - 1)
                        for side in sides:
                            b_scale[side] = next_scale[side]
                            next_scale[side] = square_scale(sfb, g, square(column, side), following)
                    if not ahead:
                        T.mbarrier_wait_parity(full[slot], done[0] // stages % 2)
                    if packed:
                        T.mbarrier_wait_parity(
                            ready[b_stage(slot, done)], done[0] // expanded_stages % 2
                        )
                    for side in sides:
                        if promoted and side == 0 and read_before:
                            for r in T.Parallel(rows):
                                a_scale[r] = number(sfa_ring[slot, first_row + r], step, a_packed)
                            if scales_by_copier:
                                for each in sides:
                                    b_scale[each] = sfb_ring[slot, first_half + each]
                        if sfb_by_row and read_before:
                            for j in T.Parallel(WIDTH):
                                b_scales[j] = number(
                                    sfb_ring[slot, (first_half + side) * WIDTH + j], step, b_packed
                                )
                        if alternate:
                            T.sync_threads(TURN + number_of_role, 2 * WARPGROUP)
                        T.wgmma_gemm(
                            a_ring[slot, first_row : first_row + rows, :],
                            b_ring[
                                b_stage(slot, done),
                                (first_half + side) * WIDTH : (first_half + side + 1) * WIDTH,
                                :,
                            ],
                            part if promoted else totals[side], transpose_B=True,
                            clear_accum=promoted, policy=T.GemmWarpPolicy.FullRow,
                        )  # fmt: skip
                        if alternate:
                            T.named_barrier_arrive(TURN + 1 - number_of_role, 2 * WARPGROUP)
                        if deferred and side == 0:
                            if done[0] > 0:
                                release(empty, (done[0] + stages - 1) % stages)
                        if promoted and side == 0 and not read_before:
                            for r in T.Parallel(rows):
                                a_scale[r] = number(sfa_ring[slot, first_row + r], step, a_packed)
                            if scales_by_copier:
                                for each in sides:
                                    b_scale[each] = sfb_ring[slot, first_half + each]
                        if ahead and side == num_halves - 1:
                            if i + 1 < now[4]:
                                T.mbarrier_wait_parity(
                                    full[(done[0] + 1) % stages], (done[0] + 1) // stages % 2
                                )
                        T.wait_wgmma(0)
                        if promoted:
                            T.warpgroup_fence_operand(part, num_regs=fragment_registers)
                        else:
                            T.warpgroup_fence_operand(totals[side], num_regs=fragment_registers)
                        if sfb_by_row and not read_before:
                            for j in T.Parallel(WIDTH):
                                b_scales[j] = number(
                                    sfb_ring[slot, (first_half + side) * WIDTH + j], step, b_packed
                                )
                        if promoted and sfb_by_row and not read_before:
                            for r, j in T.Parallel(rows, WIDTH):
                                totals[side][r, j] += part[r, j] * (a_scale[r] * b_scales[j])
                        if side == num_halves - 1 and not deferred:
                            # The warp has read what it needs of the stage.
                            release(empty, slot)
                            if packed:
                                if T.get_thread_binding() % 32 == 0:
                                    T.mbarrier_arrive(free[b_stage(slot, done)])
                        if promoted and sfb_by_row and read_before:
                            for r, j in T.Parallel(rows, WIDTH):
                                totals[side][r, j] += part[r, j] * (a_scale[r] * b_scales[j])
                        if promoted and not sfb_by_row:
                            for r, j in T.Parallel(rows, WIDTH):
                                totals[side][r, j] += part[r, j] * (a_scale[r] * b_scale[side])
                    done[0] += 1
                # Its loads take as long as the results of this tile need to leave.
                if iteration + 1 < num_tiles:
                    locate((iteration + 1) * clusters + first, layout, at, rank)
                if grouped_rows:
                    for r in T.Parallel(rows):
                        if p.layout == CONTIGUOUS:
                            kept[r] = T.if_then_else(kept[r] == g, 1, 0)
                        else:
                            kept[r] = T.if_then_else(row + r < now[5], 1, 0)
                    for side in sides:
                        for r, j in T.Parallel(rows, WIDTH):
                            if kept[r] == 0:
                                totals[side][r, j] = 0.0
                for side in sides:
                    here = column + side * WIDTH
                    if has_addend:
                        # All loads first, into registers that are free now; then the sum.
                        for r, j, e in T.Parallel(rows, WIDTH // 2, 2):  # pairs of a thread
                            if row + r < m and here + j * 2 < n:
                                to = column_of(now, rank, first_half + side) + j * 2 + e
                                addend = element(c if p.addend == "c" else d, g, row + r, to)
                                part[r, j * 2 + e] = T.cast(addend, T.float32)
                        for r, j in T.Parallel(rows, WIDTH):
                            totals[side][r, j] += part[r, j]
                    if direct:
                        for r, j, e in T.Parallel(rows, WIDTH // 2, 2):
                            if row + r < m and here + j * 2 < n:
                                to = column_of(now, rank, first_half + side) + j * 2 + e
                                where = (g, row + r, to) if d_has_groups else (row + r, to)
                                d[where] = totals[side][r, j * 2 + e]
                    else:
                        T.tma_store_wait()  # the previous tile has left shared memory
                        T.sync_threads(barrier, own_threads)
                        T.copy(totals[side], d_tile)
                        T.fence_proxy_async()
                        T.sync_threads(barrier, own_threads)
                        T.tma_copy(d_tile, result_tile(d, g, row, rows, column + side * WIDTH))
            if alternate and number_of_role == 0:
                T.sync_threads(TURN, 2 * WARPGROUP)
            if not direct:
                T.tma_store_wait()

        return multiply

    first_role, second_role = multiplier(0), multiplier(len(roles) - 1)
    d_tile_shapes = [(rows, WIDTH) for _, rows, _, _ in roles]
    max_tiles = T.ceildiv(m, p.rows) * column_tiles * (groups if d_has_groups else 1)

    if packed:

        @T.prim_func
        def product_e2m1(
            a: a_type,
            sfa: sfa_type,
            b: b_type,
            shifts: shifts_type,
            sfb: sfb_type,
            layout: layout_type,
            c: c_type,
            d: d_type,
        ):
            with T.Kernel(
                T.min(p.blocks, max_tiles), threads=threads + (1 + expanders) * WARPGROUP
            ) as block:
                tx = T.get_thread_binding()
                a_ring = T.alloc_shared((stages, p.rows, depth), dtype)
                packed_ring = T.alloc_shared((stages, columns, depth // 8), T.uint32)
                b_ring = T.alloc_shared((expanded_stages, columns, depth), dtype)
                sfa_ring = T.alloc_shared((stages, p.rows), scale_dtype[a_packed])
                shift_ring = T.alloc_shared((stages, columns), T.int16)
                full = T.alloc_barrier([32] * stages)
                empty = T.alloc_barrier([threads // 32 + WARPGROUP // 32] * stages)
                ready = T.alloc_barrier([WARPGROUP // 32] * expanded_stages)
                free = T.alloc_barrier([threads // 32] * expanded_stages)
                tiles = T.alloc_local((1,), T.int32)
                at = T.alloc_local((7,), T.int32)
                done = T.alloc_local((1,), T.int32)  # steps, of all tiles
                done[0] = 0
                count_tiles(layout, tiles)
                if tx >= threads + expanders * WARPGROUP:
                    T.dec_max_nreg(COPY_REGISTERS)
                    if tx < threads + expanders * WARPGROUP + 32:
                        copy_tiles(
                            a, sfa, b, sfb, layout, block, 0, a_ring, packed_ring, sfa_ring, None,
                            full, empty, tiles, at, done, shifts, shift_ring,
                        )  # fmt: skip
                elif tx >= threads:
                    T.dec_max_nreg(EXPAND_REGISTERS)
                    expand_tiles(
                        layout, block, packed_ring, shift_ring, b_ring, full, empty, ready, free,
                        tiles, at, done,
                    )  # fmt: skip
                elif tx < WARPGROUP:
                    T.inc_max_nreg(MATH_REGISTERS_E2M1)
                    d_tile_0 = T.alloc_shared(d_tile_shapes[0], p.out_dtype)
                    first_role(
                        sfb, layout, c, d, block, 0, a_ring, b_ring, sfa_ring, None, d_tile_0,
                        full, empty, tiles, at, done, ready, free,
                    )  # fmt: skip
                else:
                    T.inc_max_nreg(MATH_REGISTERS_E2M1)
                    d_tile_1 = T.alloc_shared(d_tile_shapes[-1], p.out_dtype)
                    second_role(
                        sfb, layout, c, d, block, 0, a_ring, b_ring, sfa_ring, None, d_tile_1,
                        full, empty, tiles, at, done, ready, free,
                    )  # fmt: skip

        return product_e2m1

    @T.prim_func
    def product(
        a: a_type,
        sfa: sfa_type,
        b: b_type,
        sfb: sfb_type,
        layout: layout_type,
        c: c_type,
        d: d_type,
    ):
        with launch(T.min(p.blocks, max_tiles)) as block:
            tx = T.get_thread_binding()
            a_ring = T.alloc_shared((stages, p.rows, depth), dtype)
            b_ring = T.alloc_shared((stages, columns, depth), dtype)
            sfa_ring = T.alloc_shared((stages, p.rows), scale_dtype[a_packed])
            sfb_ring = T.alloc_shared(
                (stages, sfb_ring_width), sfb_ring_dtype, scope=sfb_ring_scope
            )
            full = T.alloc_barrier([32] * stages)
            empty = stage_readers()
            first = block // p.cluster
            rank = block % p.cluster
            tiles = T.alloc_local((1,), T.int32)
            at = T.alloc_local((7,), T.int32)
            done = T.alloc_local((1,), T.int32)  # steps, of all tiles
            done[0] = 0
            count_tiles(layout, tiles)
            if pairs:
                T.cluster_sync()
            if tx >= threads:
                T.dec_max_nreg(COPY_REGISTERS)
                if tx < threads + 32:
                    copy_tiles(
                        a, sfa, b, sfb, layout, first, rank, a_ring, b_ring, sfa_ring, sfb_ring,
                        full, empty, tiles, at, done,
                    )  # fmt: skip
            elif len(roles) == 1:
                T.inc_max_nreg(MATH_REGISTERS)
                d_tile = T.alloc_shared(d_tile_shapes[0], p.out_dtype)
                first_role(
                    sfb, layout, c, d, first, rank, a_ring, b_ring, sfa_ring, sfb_ring, d_tile,
                    full, empty, tiles, at, done,
                )  # fmt: skip
            elif tx < WARPGROUP:
                T.inc_max_nreg(MATH_REGISTERS)
                d_tile_0 = T.alloc_shared(d_tile_shapes[0], p.out_dtype)
                first_role(
                    sfb, layout, c, d, first, rank, a_ring, b_ring, sfa_ring, sfb_ring, d_tile_0,
                    full, empty, tiles, at, done,
                )  # fmt: skip
            else:
                T.inc_max_nreg(MATH_REGISTERS)
                d_tile_1 = T.alloc_shared(d_tile_shapes[-1], p.out_dtype)
                second_role(
                    sfb, layout, c, d, first, rank, a_ring, b_ring, sfa_ring, sfb_ring, d_tile_1,
                    full, empty, tiles, at, done,
                )  # fmt: skip
            if pairs:
                T.cluster_sync()  # no block leaves while the other may still signal it

    return product
