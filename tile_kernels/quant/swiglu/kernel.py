"""SwiGLU and its gradient with casts along rows, in one pass over the data."""

from typing import Any

from tilelang import language as T

from tile_kernels.quant.primitives import (
    encode_and_store,
    fetch_values,
    group_amax,
    local_arrays,
    scale_of,
    scale_of_row,
    store_values,
    widen_values,
    write_group_scales,
)
from tile_kernels.quant.storage import GROUPS, LANES, PACKED, ROW, access_width, storage
from tile_kernels.quant.swiglu.plan import (
    ALL,
    CHUNK,
    FMT,
    INDEXED,
    MAX_KEPT,
    PART,
    RANGES,
    SEARCH_STEPS,
    WARPS,
    BackwardPlan,
    PlainBackwardPlan,
    PlainPlan,
    Plan,
)
from tile_kernels.quant.swiglu.primitives import (
    NEAR,
    near_swiglu,
    swiglu_clamp,
    swiglu_gradients,
    swiglu_value,
)
from tile_kernels.runtime.kernels.common import EXPLICIT_GUARDS
from tile_kernels.runtime.launch import kernel

RESIDENT_BACKWARD = 1152  # threads of a multiprocessor, which bounds the registers of each
FULL_WARP = 0xFFFFFFFF


@T.macro
def weight_of(index, weights, num_weights, row):
    """The weight of a row, 0 if its index is outside of the weights."""
    position = T.alloc_var(T.int32, init=index[row])
    weight = T.alloc_var(T.float32, init=T.float32(0))
    if position >= 0 and position < num_weights:
        weight = weights[position]
    return weight


# ---- forward ------------------------------------------------------------------------------------


def access_bits(*static: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    plan = Plan(*static)
    loads = {access_width(plan.source, plan.load)}
    if plan.weighted or plan.padded:
        loads.add(32)
    return tuple(sorted(loads)), tuple(sorted({access_width(FMT, plan.store), 32}))


def resident(plan: Plan) -> int:
    """Threads of a multiprocessor, which bounds the registers of each: as many as do not spill."""
    if plan.source == "float32" or plan.blocks:
        return 1024
    return 1280 if plan.clamped or plan.padded else 1408


def activation(plan: Plan, counted: bool) -> Any:
    """A macro: the weighted SwiGLU of `CHUNK` channels, from `first` on, to `values`.

    With `counted`, the halves that the clamp changes are added to `counts`.
    """
    hidden = plan.hidden
    fetch_left = fetch_values(plan.source, hidden, CHUNK, plan.load)
    fetch_right = fetch_values(plan.source, hidden, CHUNK, plan.load, offset=hidden)
    widen = widen_values(plan.source, CHUNK, plan.load)
    near_value = near_swiglu(1 if plan.source == "bfloat16" and not plan.clamped else 2)

    @T.macro
    def activated(x, row, first, values, base, weight, clamp, counts):
        raw_left, raw_right = local_arrays(storage(plan.source)[0], CHUNK, CHUNK)
        left, right, gate, value = local_arrays(T.float32, CHUNK, CHUNK, 1, 1)
        largest = T.alloc_var(T.float32, init=T.float32(0))
        fetch_left(x, row, first, raw_left, 0)
        fetch_right(x, row, first, raw_right, 0)
        widen(raw_left, 0, left)
        widen(raw_right, 0, right)
        for v in T.unroll(CHUNK):
            gate[0] = left[v]
            value[0] = right[v]
            if counted:
                if gate[0] > clamp:
                    counts[0] = counts[0] + 1
                if value[0] > clamp:
                    counts[1] = counts[1] + 1
                if value[0] < -clamp:
                    counts[2] = counts[2] + 1
            if plan.clamped:
                swiglu_clamp(gate, value, clamp)
                left[v] = gate[0]
                right[v] = value[0]
            largest = T.max(largest, T.abs(left[v]))
        if largest < NEAR:
            for v in T.unroll(CHUNK):
                values[base + v] = near_value(left[v], right[v])
        else:
            for v in T.unroll(CHUNK):
                values[base + v] = swiglu_value(left[v], right[v])
        if plan.weighted:
            for v in T.unroll(CHUNK):
                values[base + v] = T.ieee_mul(values[base + v], weight)

    return activated


def add_counts(threads: int) -> Any:
    """A macro: the counts of a block's threads to the totals, by one atomic for each that is not 0.

    Integers, so the order of blocks does not matter.
    """
    warps = threads // LANES

    @T.macro
    def added(counts, totals):
        of_warps = T.alloc_shared((3, warps), T.int32)
        tx = T.get_thread_binding()
        total = T.alloc_var(T.int32, init=0)
        for i in T.unroll(3):
            total = T.call_extern(T.int32, "__reduce_add_sync", T.uint32(FULL_WARP), counts[i])
            if tx % LANES == 0:
                of_warps[i, tx // LANES] = total
        T.sync_threads()
        if tx < 3:
            total = 0
            for w in T.unroll(warps):
                total = total + of_warps[tx, w]
            if total > 0:
                T.atomic_add(totals[tx], T.cast(total, T.int64))

    return added


def signature(plan: Plan, step: Any, grid: Any) -> Any:
    """The kernel around `step`, a unit of `grid`: buffers as the layouts have them.

    A block takes one unit; when counting, every `blocks`-th.
    """
    rows, aligned, row_stride, num_weights = T.dynamic("rows aligned row_stride num_weights")
    groups = -(-plan.hidden // plan.group)
    words = -(-groups // 4)
    scales_dtype = "int32" if plan.layout == PACKED else "float32"
    shape = {ROW: (rows, groups), PACKED: (words, aligned)}.get(plan.layout, (groups, aligned))
    source_dtype, out_dtype = storage(plan.source)[0], storage(FMT)[0]
    to_write = rows if plan.layout == ROW else aligned
    blocks = plan.blocks
    units = grid(to_write)
    added = add_counts(plan.threads)
    # Whole rows stay in registers: those are left to the compiler.
    min_blocks = resident(plan) // plan.threads if plan.group in GROUPS else 1

    @T.prim_func
    def swiglu_rows(
        x: T.StridedTensor[(rows, 2 * plan.hidden), (row_stride, 1), source_dtype],
        index: T.Tensor[(rows,), T.int32],
        weights: T.Tensor[(num_weights,), T.float32],
        experts: T.Tensor[(rows,), T.int32],
        out: T.Tensor[(rows, plan.hidden), out_dtype],
        sf: T.Tensor[shape, scales_dtype],
        totals: T.Tensor[(3,), T.int64],
        clamp: T.float32,
        clamp_min: T.float32,
    ):
        with T.Kernel(blocks if blocks else units, threads=plan.threads) as block:
            T.annotate_min_blocks_per_sm(min_blocks)
            T.assume(row_stride % plan.load == 0)
            counts = T.alloc_local((3,), T.int32)
            for i in T.unroll(3):
                counts[i] = 0
            if blocks:
                for i in T.serial(T.ceildiv(units - block, blocks)):
                    step(
                        i * blocks + block, rows, to_write, num_weights, x, index, weights,
                        experts, out, sf, clamp, clamp_min, counts,
                    )  # fmt: skip
                added(counts, totals)
            else:
                step(
                    block, rows, to_write, num_weights, x, index, weights, experts, out, sf, clamp,
                    clamp_min, counts,
                )  # fmt: skip

    return swiglu_rows


def is_read(padded: bool) -> Any:
    """A macro: whether a row exists and belongs to an expert."""

    @T.macro
    def read(row, rows, experts):
        found = T.alloc_var(T.bool, init=row < rows)
        if padded:
            if found:
                found = experts[row] >= 0
        return found

    return read


@kernel(access_bits=access_bits, pass_configs=EXPLICIT_GUARDS)
def swiglu_groups(*static: Any) -> Any:
    """Groups of 16 to 128 channels: a warp takes 512 neighbouring channels of a row."""
    plan = Plan(*static)
    tiles = -(-plan.hidden // (LANES * CHUNK))
    group = plan.group
    per_thread = max(1, CHUNK // group)  # groups of one thread
    activated = activation(plan, counted=plan.blocks > 0)
    amax_of = group_amax(CHUNK, group)
    scaled = scale_of(FMT, plan.round_sf)
    encode = encode_and_store(FMT, plan.hidden, CHUNK, plan.store)
    write_scales = write_group_scales(plan.layout, plan.hidden, CHUNK, group)
    row_is_read = is_read(plan.padded)

    @T.macro
    def step(
        unit, rows, to_write, num_weights, x, index, weights, experts, out, sf, clamp, clamp_min,
        counts,
    ):  # fmt: skip
        lane = T.get_thread_binding() % LANES
        warp = unit * WARPS + T.get_thread_binding() // LANES
        row = T.alloc_var(T.int32, init=warp // tiles)
        first = T.alloc_var(T.int32, init=(warp % tiles * LANES + lane) * CHUNK)
        values, scale = local_arrays(T.float32, CHUNK, 2)
        scales, inverse = local_arrays(T.float32, per_thread, per_thread)
        weight = T.alloc_var(T.float32, init=T.float32(0))
        if row < to_write:  # the same for the whole warp
            exists = row_is_read(row, rows, experts)
            if exists:
                if plan.weighted:
                    weight = weight_of(index, weights, num_weights, row)
                activated(x, row, first, values, 0, weight, clamp, counts)
            else:
                for v in T.unroll(CHUNK):
                    values[v] = T.float32(0)
            for i in T.unroll(per_thread):
                scaled(amax_of(values, i), clamp_min, scale)
                scales[i] = scale[0]
                inverse[i] = scale[1]
            write_scales(sf, row, first, lane, scales, exists)
            if row < rows:
                encode(values, 0, inverse, CHUNK // per_thread, out, row, first)

    return signature(plan, step, lambda count: T.ceildiv(count * tiles, WARPS))


@kernel(access_bits=access_bits, pass_configs=EXPLICIT_GUARDS)
def swiglu_whole_rows(*static: Any) -> Any:
    """One scale per row: a block per row, which stays in registers if it is not too long."""
    plan = Plan(*static)
    threads, hidden = plan.threads, plan.hidden
    steps = -(-hidden // (CHUNK * threads))
    keep = steps * CHUNK <= MAX_KEPT
    activated = activation(plan, counted=plan.blocks > 0)
    again = activation(plan, counted=False)
    scaled_row = scale_of_row(FMT, plan.round_sf, plan.layout, threads, written=True)
    encode = encode_and_store(FMT, hidden, CHUNK, plan.store)
    row_is_read = is_read(plan.padded)

    @T.macro
    def step(
        row, rows, to_write, num_weights, x, index, weights, experts, out, sf, clamp, clamp_min,
        counts,
    ):  # fmt: skip
        tx = T.get_thread_binding()
        values, scale, inverse = local_arrays(T.float32, CHUNK * (steps if keep else 1), 2, 1)
        of_warps = T.alloc_shared((threads // LANES,), T.float32)
        amax = T.alloc_var(T.float32, init=T.float32(0))
        weight = T.alloc_var(T.float32, init=T.float32(0))
        exists = row_is_read(row, rows, experts)  # the same for the whole block
        if exists:
            if plan.weighted:
                weight = weight_of(index, weights, num_weights, row)
            for s in T.unroll(steps) if keep else T.serial(steps):
                base = s * CHUNK if keep else 0
                first = (s * threads + tx) * CHUNK
                activated(x, row, first, values, base, weight, clamp, counts)
                for v in T.unroll(CHUNK):
                    amax = T.max(amax, T.abs(values[base + v]))
        else:
            for v in T.unroll(CHUNK * (steps if keep else 1)):
                values[v] = T.float32(0)
        scaled_row(amax, of_warps, clamp_min, scale, sf, row, exists)
        inverse[0] = scale[1]
        if row < rows:
            for s in T.unroll(steps) if keep else T.serial(steps):
                base = s * CHUNK if keep else 0
                first = (s * threads + tx) * CHUNK
                if not keep:
                    if exists:
                        again(x, row, first, values, base, weight, clamp, counts)
                encode(values, base, inverse, CHUNK, out, row, first)

    return signature(plan, step, lambda count: count)


# ---- backward -----------------------------------------------------------------------------------


def backward_access_bits(*static: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    plan = BackwardPlan(*static)
    loads = {32, access_width("e4m3", plan.load), access_width("bfloat16", plan.load_grad)}
    stores = {
        32,
        access_width("bfloat16", plan.store),
        access_width("e4m3", plan.store_codes),
        access_width("bfloat16", plan.store_grad),
    }
    return tuple(sorted(loads)), tuple(sorted(stores))


def gradients_of_part(clamped: bool, near: bool) -> Any:
    """A macro: `PART` channels, `left` and `right` to their gradients, `grad` to the result.

    Adds what they have of the weight's gradient to `total[0]`.
    """
    gradients = swiglu_gradients(clamped, near)

    @T.macro
    def computed(left, right, grad, weight, clamp, total):
        gate, value, act = local_arrays(T.float32, 1, 1, 1)
        for v in T.unroll(PART):
            gate[0] = left[v]
            value[0] = right[v]
            gradients(gate, value, grad[v], weight, clamp, act)
            total[0] = T.ieee_fmaf(grad[v], act[0], total[0])
            grad[v] = T.ieee_mul(act[0], weight)
            left[v] = gate[0]
            right[v] = value[0]

    return computed


@kernel(access_bits=backward_access_bits, pass_configs=EXPLICIT_GUARDS)
def swiglu_backward(*static: Any) -> Any:
    """A block per row, then blocks that put zeros where no row has a gradient of its weight.

    A weight belongs to the row that its inverse map names, if that row's index names it back: so
    each has one writer, whatever the maps hold.
    """
    plan = BackwardPlan(*static)
    hidden, group, threads = plan.hidden, plan.group, plan.threads
    steps = -(-hidden // (PART * threads))
    warps = threads // LANES
    lanes = group // PART
    of_half = hidden // group
    fetch_left = fetch_values("e4m3", hidden, PART, plan.load)
    fetch_right = fetch_values("e4m3", hidden, PART, plan.load, offset=hidden)
    fetch_grad = fetch_values("bfloat16", hidden, PART, plan.load_grad)
    widen = widen_values("e4m3", PART, plan.load)
    widen_grad = widen_values("bfloat16", PART, plan.load_grad)
    store_out = store_values("bfloat16", hidden, PART, plan.store)
    amax_of = group_amax(PART, group)
    scaled = scale_of(FMT, plan.round_sf)

    near = gradients_of_part(plan.clamped, near=True)
    general = gradients_of_part(plan.clamped, near=False)

    def quantise(half: int) -> Any:
        """A macro: the gradients of a half of the row, in bfloat16 and in e4m3 with scales."""
        store_grad = store_values("bfloat16", hidden, PART, plan.store_grad, offset=half * hidden)
        encode = encode_and_store(FMT, hidden, PART, plan.store_codes, offset=half * hidden)

        @T.macro
        def quantised(values, row, first, lane, codes, sf, x_grad, clamp_min):
            scale, inverse = local_arrays(T.float32, 2, 1)
            store_grad(values, 0, x_grad, row, first)
            scaled(amax_of(values, 0), clamp_min, scale)
            inverse[0] = scale[1]
            if lane % lanes == 0 and first < hidden:
                sf[row, half * of_half + first // group] = scale[0]
            encode(values, 0, inverse, PART, codes, row, first)

        return quantised

    quantise_left, quantise_right = quantise(0), quantise(1)
    rows, num_weights = T.dynamic("rows num_weights")

    @T.prim_func
    def swiglu_gradient_rows(
        x: T.Tensor[(rows, 2 * hidden), T.float8_e4m3fn],
        x_sf: T.Tensor[(rows, 2 * of_half), T.float32],
        grad_out: T.Tensor[(rows, hidden), T.bfloat16],
        weights: T.Tensor[(num_weights,), T.float32],
        index: T.Tensor[(rows,), T.int32],
        inverse_index: T.Tensor[(num_weights,), T.int32],
        out: T.Tensor[(rows, hidden), T.bfloat16],
        codes: T.Tensor[(rows, 2 * hidden), T.float8_e4m3fn],
        sf: T.Tensor[(rows, 2 * of_half), T.float32],
        x_grad: T.Tensor[(rows, 2 * hidden), T.bfloat16],
        weight_grad: T.Tensor[(num_weights,), T.float32],
        clamp: T.float32,
        clamp_min: T.float32,
    ):
        with T.Kernel(rows + T.ceildiv(num_weights, threads), threads=threads) as block:
            T.annotate_min_blocks_per_sm(max(1, RESIDENT_BACKWARD // threads))
            tx = T.get_thread_binding()
            lane = tx % LANES
            raw_left, raw_right = local_arrays(T.float8_e4m3fn, PART, PART)
            raw_grad = T.alloc_local((PART,), T.bfloat16)
            left, right, grad = local_arrays(T.float32, PART, PART, PART)
            of_warps = T.alloc_shared((warps,), T.float32)
            total = T.alloc_local((1,), T.float32)
            total[0] = T.float32(0)
            if block < rows:
                weight = T.alloc_var(T.float32, init=weight_of(index, weights, num_weights, block))
                for s in T.serial(steps):
                    first = (s * threads + tx) * PART
                    left_scale = T.alloc_var(T.float32, init=T.float32(0))
                    right_scale = T.alloc_var(T.float32, init=T.float32(0))
                    fetch_left(x, block, first, raw_left, 0)
                    fetch_right(x, block, first, raw_right, 0)
                    fetch_grad(grad_out, block, first, raw_grad, 0)
                    if first < hidden:
                        left_scale = x_sf[block, first // group]
                        right_scale = x_sf[block, of_half + first // group]
                    widen(raw_left, 0, left)
                    widen(raw_right, 0, right)
                    widen_grad(raw_grad, 0, grad)
                    largest = T.alloc_var(T.float32, init=T.float32(0))
                    for v in T.unroll(PART):
                        left[v] = T.ieee_mul(left[v], left_scale)
                        right[v] = T.ieee_mul(right[v], right_scale)
                        largest = T.max(largest, T.abs(left[v]))
                    if largest < NEAR:
                        near(left, right, grad, weight, clamp, total)
                    else:
                        general(left, right, grad, weight, clamp, total)
                    store_out(grad, 0, out, block, first)
                    quantise_left(left, block, first, lane, codes, sf, x_grad, clamp_min)
                    quantise_right(right, block, first, lane, codes, sf, x_grad, clamp_min)
                for d in T.unroll(5):
                    total[0] = T.ieee_add(total[0], T.shfl_xor(total[0], T.shift_left(1, d)))
                if lane == 0:
                    of_warps[tx // LANES] = total[0]
                T.sync_threads()
                if tx == 0:
                    mine = T.alloc_var(T.int32, init=index[block])
                    if mine >= 0 and mine < num_weights:
                        if inverse_index[mine] == block:
                            total[0] = of_warps[0]
                            for w in T.unroll(warps - 1):
                                total[0] = T.ieee_add(total[0], of_warps[w + 1])
                            weight_grad[mine] = total[0]
            else:
                place = T.alloc_var(T.int32, init=(block - rows) * threads + tx)
                if place < num_weights:
                    row = T.alloc_var(T.int32, init=inverse_index[place])
                    served = T.alloc_var(T.bool, init=T.bool(False))
                    if row >= 0 and row < rows:
                        served = index[row] == place
                    if not served:
                        weight_grad[place] = T.float32(0)

    return swiglu_gradient_rows


# ---- without a cast -----------------------------------------------------------------------------

# Threads of a multiprocessor, which bounds the registers of each: as for a float32 source above.
# Other numbers were not measured.
RESIDENT_PLAIN = 1024


@T.macro
def in_ranges(ends, num_experts, alignment, row):
    """Whether a row lies in the range of an expert, which starts at the next aligned row.

    The expert is the first whose range ends behind the row; ends ascend.
    """
    low = T.alloc_var(T.int32, init=0)
    high = T.alloc_var(T.int32, init=num_experts)
    for _ in T.serial(SEARCH_STEPS):
        if low < high:
            middle = T.alloc_var(T.int32, init=(low + high) // 2)
            if ends[middle] <= row:
                low = middle + 1
            else:
                high = middle
    start = T.alloc_var(T.int32, init=0)
    if low > 0 and low < num_experts:
        start = T.ceildiv(ends[low - 1], alignment) * alignment
    return low < num_experts and row >= start


def weight_of_plain(rows: str, weighted: bool) -> Any:
    """A macro: whether a row exists in `found[0]`, and its weight times the factor in `weight[0]`.

    The weight is 1 without weights, and 0 for a row that does not exist.
    """

    @T.macro
    def located(
        row, index, weights, num_weights, ends, num_experts, alignment, factor, found, weight
    ):
        place = T.alloc_var(T.int32, init=row)
        found[0] = T.bool(True)
        if rows == INDEXED:
            place = index[row]
            found[0] = place >= 0 and place < num_weights
        elif rows == RANGES:
            found[0] = in_ranges(ends, num_experts, alignment, row)
        weight[0] = T.float32(0)
        if found[0]:
            if weighted:
                weight[0] = T.ieee_mul(weights[place], factor)
            else:
                weight[0] = T.float32(1)

    return located


def small_loads(plan: Any) -> set[int]:
    """The bits of loads of indices, ends and weights."""
    return {32} if plan.weighted or plan.rows != ALL else set()


def plain_access_bits(*static: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    plan = PlainPlan(*static)
    loads = {access_width(plan.source, plan.load)} | small_loads(plan)
    return tuple(sorted(loads)), (access_width(plan.target, plan.store),)


@kernel(access_bits=plain_access_bits, pass_configs=EXPLICIT_GUARDS)
def swiglu_plain(*static: Any) -> Any:
    """A warp takes 512 neighbouring channels of a row."""
    plan = PlainPlan(*static)
    hidden = plan.hidden
    tiles = -(-hidden // (LANES * CHUNK))
    activated = activation(plan, counted=False)
    located = weight_of_plain(plan.rows, plan.weighted)
    store = store_values(plan.target, hidden, CHUNK, plan.store)
    source_dtype, out_dtype = storage(plan.source)[0], storage(plan.target)[0]
    rows, row_stride, num_weights, num_experts = T.dynamic(
        "rows row_stride num_weights num_experts"
    )

    @T.prim_func
    def swiglu_plain_rows(
        x: T.StridedTensor[(rows, 2 * hidden), (row_stride, 1), source_dtype],
        index: T.Tensor[(rows,), T.int32],
        weights: T.Tensor[(num_weights,), T.float32],
        ends: T.Tensor[(num_experts,), T.int32],
        out: T.Tensor[(rows, hidden), out_dtype],
        alignment: T.int32,
        factor: T.float32,
        clamp: T.float32,
    ):
        with T.Kernel(T.ceildiv(rows * tiles, WARPS), threads=plan.threads) as block:
            T.annotate_min_blocks_per_sm(RESIDENT_PLAIN // plan.threads)
            T.assume(row_stride % plan.load == 0)
            tx = T.get_thread_binding()
            warp = block * WARPS + tx // LANES
            row = T.alloc_var(T.int32, init=warp // tiles)
            first = T.alloc_var(T.int32, init=(warp % tiles * LANES + tx % LANES) * CHUNK)
            values, weight = local_arrays(T.float32, CHUNK, 1)
            counts = T.alloc_local((3,), T.int32)  # not used
            found = T.alloc_local((1,), T.bool)
            if row < rows:  # the same for the whole warp
                located(
                    row, index, weights, num_weights, ends, num_experts, alignment, factor, found,
                    weight,
                )  # fmt: skip
                if found[0]:
                    activated(x, row, first, values, 0, weight[0], clamp, counts)
                else:
                    for v in T.unroll(CHUNK):
                        values[v] = T.float32(0)
                store(values, 0, out, row, first)

    return swiglu_plain_rows


def plain_backward_access_bits(*static: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    plan = PlainBackwardPlan(*static)
    loads = {access_width(plan.source, plan.load), access_width(plan.source, plan.load_grad)}
    stores = {access_width(plan.target, plan.store_grad)}
    if plan.recompute:
        stores.add(access_width(plan.target, plan.store))
    if plan.weighted:
        stores.add(32)
    return tuple(sorted(loads | small_loads(plan))), tuple(sorted(stores))


@kernel(access_bits=plain_backward_access_bits, pass_configs=EXPLICIT_GUARDS)
def swiglu_plain_backward(*static: Any) -> Any:
    """A block per row; with indices, then blocks for the weights without a row, as above."""
    plan = PlainBackwardPlan(*static)
    hidden, threads = plan.hidden, plan.threads
    steps = -(-hidden // (PART * threads))
    warps = threads // LANES
    indexed = plan.rows == INDEXED
    fetch_left = fetch_values(plan.source, hidden, PART, plan.load)
    fetch_right = fetch_values(plan.source, hidden, PART, plan.load, offset=hidden)
    fetch_grad = fetch_values(plan.source, hidden, PART, plan.load_grad)
    widen = widen_values(plan.source, PART, plan.load)
    widen_grad = widen_values(plan.source, PART, plan.load_grad)
    store_out = store_values(plan.target, hidden, PART, plan.store)
    store_left = store_values(plan.target, hidden, PART, plan.store_grad)
    store_right = store_values(plan.target, hidden, PART, plan.store_grad, offset=hidden)
    near = gradients_of_part(plan.clamped, near=True)
    general = gradients_of_part(plan.clamped, near=False)
    located = weight_of_plain(plan.rows, plan.weighted)
    source_dtype, out_dtype = storage(plan.source)[0], storage(plan.target)[0]
    rows, num_weights, num_experts = T.dynamic("rows num_weights num_experts")
    units = rows + T.ceildiv(num_weights, threads) if indexed else rows

    @T.prim_func
    def swiglu_plain_gradient_rows(
        x: T.Tensor[(rows, 2 * hidden), source_dtype],
        grad_out: T.Tensor[(rows, hidden), source_dtype],
        index: T.Tensor[(rows,), T.int32],
        inverse_index: T.Tensor[(num_weights,), T.int32],
        weights: T.Tensor[(num_weights,), T.float32],
        ends: T.Tensor[(num_experts,), T.int32],
        x_grad: T.Tensor[(rows, 2 * hidden), out_dtype],
        weight_grad: T.Tensor[(num_weights,), T.float32],
        out: T.Tensor[(rows, hidden), out_dtype],
        alignment: T.int32,
        factor: T.float32,
        clamp: T.float32,
    ):
        with T.Kernel(units, threads=threads) as block:
            T.annotate_min_blocks_per_sm(max(1, RESIDENT_BACKWARD // threads))
            tx = T.get_thread_binding()
            raw_left, raw_right, raw_grad = local_arrays(source_dtype, PART, PART, PART)
            left, right, grad = local_arrays(T.float32, PART, PART, PART)
            of_warps = T.alloc_shared((warps,), T.float32)
            total, weight = local_arrays(T.float32, 1, 1)
            found = T.alloc_local((1,), T.bool)
            total[0] = T.float32(0)
            if block < rows:
                located(
                    block, index, weights, num_weights, ends, num_experts, alignment, factor, found,
                    weight,
                )  # fmt: skip
                for s in T.serial(steps):
                    first = (s * threads + tx) * PART
                    for v in T.unroll(PART):
                        left[v] = T.float32(0)
                        right[v] = T.float32(0)
                        grad[v] = T.float32(0)
                    if found[0]:
                        fetch_left(x, block, first, raw_left, 0)
                        fetch_right(x, block, first, raw_right, 0)
                        fetch_grad(grad_out, block, first, raw_grad, 0)
                        widen(raw_left, 0, left)
                        widen(raw_right, 0, right)
                        widen_grad(raw_grad, 0, grad)
                        largest = T.alloc_var(T.float32, init=T.float32(0))
                        for v in T.unroll(PART):
                            largest = T.max(largest, T.abs(left[v]))
                        if largest < NEAR:
                            near(left, right, grad, weight[0], clamp, total)
                        else:
                            general(left, right, grad, weight[0], clamp, total)
                    store_left(left, 0, x_grad, block, first)
                    store_right(right, 0, x_grad, block, first)
                    if plan.recompute:
                        store_out(grad, 0, out, block, first)
                if plan.weighted:
                    for d in T.unroll(5):
                        total[0] = T.ieee_add(total[0], T.shfl_xor(total[0], T.shift_left(1, d)))
                    if tx % LANES == 0:
                        of_warps[tx // LANES] = total[0]
                    T.sync_threads()
                    if tx == 0:
                        place = T.alloc_var(T.int32, init=block)
                        if indexed:
                            place = -1
                            if found[0]:
                                place = index[block]
                                if inverse_index[place] != block:
                                    place = -1
                        if place >= 0:
                            total[0] = of_warps[0]
                            for w in T.unroll(warps - 1):
                                total[0] = T.ieee_add(total[0], of_warps[w + 1])
                            weight_grad[place] = T.ieee_mul(total[0], factor)
            elif indexed:
                place = T.alloc_var(T.int32, init=(block - rows) * threads + tx)
                if place < num_weights:
                    row = T.alloc_var(T.int32, init=inverse_index[place])
                    served = T.alloc_var(T.bool, init=T.bool(False))
                    if row >= 0 and row < rows:
                        served = index[row] == place
                    if not served:
                        weight_grad[place] = T.float32(0)

    return swiglu_plain_gradient_rows
