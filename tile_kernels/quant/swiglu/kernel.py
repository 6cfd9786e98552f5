"""SwiGLU and its gradient with casts along rows, in one pass over the data."""

from typing import Any

from tilelang import language as T

from tile_kernels.quant.primitives import (
    encode_and_store,
    exponent_of,
    fetch_values,
    group_amax,
    local_arrays,
    scale_of,
    scale_of_row,
    store_values,
    widen_values,
    write_group_scales,
)
from tile_kernels.quant.storage import (
    GROUPS,
    LANES,
    PACKED,
    PACKED_ROW,
    ROW,
    access_width,
    is_by_rows,
    is_packed,
    scale_dtype,
    storage,
)
from tile_kernels.quant.swiglu.plan import (
    ALL,
    BY_INDEX,
    CHUNK,
    EXPERTS,
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


# ---- forward ------------------------------------------------------------------------------------


def access_bits(*static: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    plan = Plan(*static)
    loads = {access_width(plan.source, plan.load)}
    if plan.weighted or plan.rows != ALL:
        loads.add(32)
    return tuple(sorted(loads)), tuple(sorted({access_width(FMT, plan.store), 32}))


def resident(plan: Plan) -> int:
    """Threads of a multiprocessor, which bounds the registers of each: as many as do not spill."""
    if plan.source == "float32" or plan.blocks:
        return 1024
    return 1280 if plan.clamped or plan.rows != ALL else 1408


def activation(plan: Any, counted: bool) -> Any:
    """A macro: the weighted SwiGLU of `CHUNK` channels, from `first` on, to `values`.

    With `counted`, the halves that the clamp changes are added to `counts`, and with four counters
    the channels.
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
        if counted and plan.counters == 4:
            counts[3] = counts[3] + T.max(T.min(hidden - first, CHUNK), 0)
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


def add_counts(threads: int, counters: int) -> Any:
    """A macro: the counts of a block's threads to the totals, by one atomic for each that is not 0.

    Integers, so the order of blocks does not matter.
    """
    warps = threads // LANES

    @T.macro
    def added(counts, totals):
        warp_values = T.alloc_shared((counters, warps), T.int32)
        tx = T.get_thread_binding()
        total = T.alloc_var(T.int32, init=0)
        for i in T.unroll(counters):
            total = T.call_extern(T.int32, "__reduce_add_sync", T.uint32(FULL_WARP), counts[i])
            if tx % LANES == 0:
                warp_values[i, tx // LANES] = total
        T.sync_threads()
        if tx < counters:
            total = 0
            for w in T.unroll(warps):
                total = total + warp_values[tx, w]
            if total > 0:
                T.atomic_add(totals[tx], T.cast(total, T.int64))

    return added


def signature(plan: Plan, step: Any, grid: Any) -> Any:
    """The kernel around `step`, a unit of `grid`: buffers as the layouts have them.

    A block takes one unit; when counting, every `blocks`-th.
    """
    rows, aligned, row_stride = T.dynamic("rows aligned row_stride")
    num_weights, num_experts = T.dynamic("num_weights num_experts")
    groups = -(-plan.hidden // plan.group)
    words = -(-groups // 4)
    scales_dtype = scale_dtype(plan.layout)
    columns = words if is_packed(plan.layout) else groups
    shape = (rows, columns) if is_by_rows(plan.layout) else (columns, aligned)
    source_dtype, out_dtype = storage(plan.source)[0], storage(FMT)[0]
    to_write = rows if is_by_rows(plan.layout) else aligned
    blocks = plan.blocks
    units = grid(to_write)
    counters = max(plan.counters, 1)
    added = add_counts(plan.threads, counters)
    # Whole rows stay in registers: those are left to the compiler.
    min_blocks = resident(plan) // plan.threads if plan.group in GROUPS else 1

    @T.prim_func
    def swiglu_rows(
        x: T.StridedTensor[(rows, 2 * plan.hidden), (row_stride, 1), source_dtype],
        index: T.Tensor[(rows,), T.int32],
        weights: T.Tensor[(num_weights,), T.float32],
        experts: T.Tensor[(rows,), T.int32],
        ends: T.Tensor[(num_experts,), T.int32],
        out: T.Tensor[(rows, plan.hidden), out_dtype],
        sf: T.Tensor[shape, scales_dtype],
        totals: T.Tensor[(counters,), T.int64],
        alignment: T.int32,
        factor: T.float32,
        clamp: T.float32,
        clamp_min: T.float32,
    ):
        with T.Kernel(blocks if blocks else units, threads=plan.threads) as block:
            T.annotate_min_blocks_per_sm(min_blocks)
            T.assume(row_stride % plan.load == 0)
            counts = T.alloc_local((counters,), T.int32)
            for i in T.unroll(counters):
                counts[i] = 0
            which = Located(
                plan, rows, index, weights, num_weights, experts, ends, num_experts, alignment,
                factor,
            )  # fmt: skip
            if blocks:
                for i in T.serial(T.ceildiv(units - block, blocks)):
                    step(
                        i * blocks + block, rows, to_write, x, which, out, sf, clamp, clamp_min,
                        counts,
                    )  # fmt: skip
                added(counts, totals)
            else:
                step(block, rows, to_write, x, which, out, sf, clamp, clamp_min, counts)

    return swiglu_rows


class Located:
    """What says which rows exist, and their weights; methods are macros."""

    def __init__(
        self, plan: Plan, rows: Any, index: Any, weights: Any, num_weights: Any, experts: Any,
        ends: Any, num_experts: Any, alignment: Any, factor: Any,
    ) -> None:  # fmt: skip
        @T.macro
        def is_read(row):
            found = T.alloc_var(T.bool, init=row < rows)
            if plan.rows == EXPERTS:
                if found:
                    found = experts[row] >= 0
            elif plan.rows == RANGES:
                if found:
                    found = in_ranges(ends, num_experts, alignment, row)
            return found

        @T.macro
        def weight(row):
            value = T.alloc_var(T.float32, init=T.float32(0))
            if plan.weights == BY_INDEX:
                value = weight_of(index, weights, num_weights, row)
            else:
                value = weights[row]
            return T.ieee_mul(value, factor)

        self.is_read, self.weight = is_read, weight


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

    @T.macro
    def step(unit, rows, to_write, x, which, out, sf, clamp, clamp_min, counts):
        lane = T.get_thread_binding() % LANES
        warp = unit * WARPS + T.get_thread_binding() // LANES
        row = T.alloc_var(T.int32, init=warp // tiles)
        first = T.alloc_var(T.int32, init=(warp % tiles * LANES + lane) * CHUNK)
        values, scale = local_arrays(T.float32, CHUNK, 2)
        scales, inverse = local_arrays(T.float32, per_thread, per_thread)
        weight = T.alloc_var(T.float32, init=T.float32(0))
        if row < to_write:  # the same for the whole warp
            exists = which.is_read(row)
            if exists:
                if plan.weighted:
                    weight = which.weight(row)
                activated(x, row, first, values, 0, weight, clamp, counts)
            else:
                for v in T.unroll(CHUNK):
                    values[v] = T.float32(0)
            for i in T.unroll(per_thread):
                scaled(amax_of(values, i), clamp_min, scale)
                scales[i] = scale[0]
                inverse[i] = scale[1]
            write_scales(sf, row, first, lane, scales, exists)
            written = T.alloc_var(T.bool, init=row < rows)
            if not plan.fill:
                written = exists
            if written:
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

    @T.macro
    def step(row, rows, to_write, x, which, out, sf, clamp, clamp_min, counts):
        tx = T.get_thread_binding()
        values, scale, inverse = local_arrays(T.float32, CHUNK * (steps if keep else 1), 2, 1)
        warp_values = T.alloc_shared((threads // LANES,), T.float32)
        amax = T.alloc_var(T.float32, init=T.float32(0))
        weight = T.alloc_var(T.float32, init=T.float32(0))
        exists = which.is_read(row)  # the same for the whole block
        if exists:
            if plan.weighted:
                weight = which.weight(row)
            for s in T.unroll(steps) if keep else T.serial(steps):
                base = s * CHUNK if keep else 0
                first = (s * threads + tx) * CHUNK
                activated(x, row, first, values, base, weight, clamp, counts)
                for v in T.unroll(CHUNK):
                    amax = T.max(amax, T.abs(values[base + v]))
        else:
            for v in T.unroll(CHUNK * (steps if keep else 1)):
                values[v] = T.float32(0)
        scaled_row(amax, warp_values, clamp_min, scale, sf, row, exists)
        inverse[0] = scale[1]
        written = T.alloc_var(T.bool, init=row < rows)
        if not plan.fill:
            written = exists
        if written:
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
        8 if is_packed(plan.layout) else 32,
        access_width("e4m3", plan.store_codes),
        access_width("bfloat16", plan.store_grad),
    }
    if plan.recompute:
        stores.add(access_width("bfloat16", plan.store))
    if plan.weighted:
        stores.add(32)
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


def write_scale_of_group(layout: str, groups: int) -> Any:
    """A macro: the scale of a row's group; packed, `sf` has bytes, and unused ones become 0."""

    @T.macro
    def write(sf, row, group, scale):
        if layout == ROW:
            sf[row, group] = scale
        elif layout == PACKED_ROW:
            sf[row, group] = T.cast(exponent_of(scale), T.uint8)
            if group == groups - 1:
                for i in T.unroll(-groups % 4):
                    sf[row, groups + i] = T.uint8(0)
        elif layout == PACKED:
            sf[group // 4, row, group % 4] = T.cast(exponent_of(scale), T.uint8)
            if group == groups - 1:
                for i in T.unroll(-groups % 4):
                    sf[group // 4, row, (groups + i) % 4] = T.uint8(0)
        else:
            sf[group, row] = scale

    return write


@kernel(access_bits=backward_access_bits, pass_configs=EXPLICIT_GUARDS)
def swiglu_backward(*static: Any) -> Any:
    """A block per row, then blocks that put zeros where no row has a gradient of its weight.

    A weight belongs to the row that its inverse map names, if that row's index names it back: so
    each has one writer, whatever the maps hold. Without an index every row has its own weight.
    """
    plan = BackwardPlan(*static)
    indexed = plan.rows == INDEXED
    groups = 2 * plan.hidden // plan.group
    write_sf = write_scale_of_group(plan.layout, groups)
    located = weight_of_plain(plan.rows, plan.weighted)
    hidden, group, threads = plan.hidden, plan.group, plan.threads
    steps = -(-hidden // (PART * threads))
    warps = threads // LANES
    lanes = group // PART
    half_groups = hidden // group
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
        def quantised(values, row, first, lane, codes, sf, x_grad, clamp_min, found):
            scale, inverse = local_arrays(T.float32, 2, 1)
            store_grad(values, 0, x_grad, row, first)
            scaled(amax_of(values, 0), clamp_min, scale)
            inverse[0] = scale[1]
            if not indexed:
                if not found[0]:
                    scale[0] = T.float32(0)
            if lane % lanes == 0 and first < hidden:
                write_sf(sf, row, half * half_groups + first // group, scale[0])
            encode(values, 0, inverse, PART, codes, row, first)

        return quantised

    quantise_left, quantise_right = quantise(0), quantise(1)
    rows, aligned, num_weights, num_experts = T.dynamic("rows aligned num_weights num_experts")
    words = -(-groups // 4)
    sf_shape = {
        ROW: (rows, groups), PACKED_ROW: (rows, 4 * words), PACKED: (words, aligned, 4),
    }.get(plan.layout, (groups, aligned))  # fmt: skip
    sf_dtype = "uint8" if is_packed(plan.layout) else "float32"
    to_write = rows if is_by_rows(plan.layout) else aligned
    units = to_write + T.ceildiv(num_weights, threads) if indexed else to_write

    @T.prim_func
    def swiglu_gradient_rows(
        x: T.Tensor[(rows, 2 * hidden), T.float8_e4m3fn],
        x_sf: T.Tensor[(rows, 2 * half_groups), T.float32],
        grad_out: T.Tensor[(rows, hidden), T.bfloat16],
        weights: T.Tensor[(num_weights,), T.float32],
        index: T.Tensor[(rows,), T.int32],
        inverse_index: T.Tensor[(num_weights,), T.int32],
        ends: T.Tensor[(num_experts,), T.int32],
        out: T.Tensor[(rows, hidden), T.bfloat16],
        codes: T.Tensor[(rows, 2 * hidden), T.float8_e4m3fn],
        sf: T.Tensor[sf_shape, sf_dtype],
        x_grad: T.Tensor[(rows, 2 * hidden), T.bfloat16],
        weight_grad: T.Tensor[(num_weights,), T.float32],
        alignment: T.int32,
        factor: T.float32,
        clamp: T.float32,
        clamp_min: T.float32,
    ):
        with T.Kernel(units, threads=threads) as block:
            T.annotate_min_blocks_per_sm(max(1, RESIDENT_BACKWARD // threads))
            tx = T.get_thread_binding()
            lane = tx % LANES
            raw_left, raw_right = local_arrays(T.float8_e4m3fn, PART, PART)
            raw_grad = T.alloc_local((PART,), T.bfloat16)
            left, right, grad = local_arrays(T.float32, PART, PART, PART)
            warp_values = T.alloc_shared((warps,), T.float32)
            total, weight = local_arrays(T.float32, 1, 1)
            found = T.alloc_local((1,), T.bool)
            total[0] = T.float32(0)
            if block < rows:
                if indexed:
                    found[0] = T.bool(True)
                    weight[0] = weight_of(index, weights, num_weights, block)
                else:
                    located(
                        block, index, weights, num_weights, ends, num_experts, alignment, factor,
                        found, weight,
                    )  # fmt: skip
                for s in T.serial(steps):
                    first = (s * threads + tx) * PART
                    left_scale = T.alloc_var(T.float32, init=T.float32(0))
                    right_scale = T.alloc_var(T.float32, init=T.float32(0))
                    for v in T.unroll(PART):
                        left[v] = T.float32(0)
                        right[v] = T.float32(0)
                        grad[v] = T.float32(0)
                    if found[0]:
                        fetch_left(x, block, first, raw_left, 0)
                        fetch_right(x, block, first, raw_right, 0)
                        fetch_grad(grad_out, block, first, raw_grad, 0)
                        if first < hidden:
                            left_scale = x_sf[block, first // group]
                            right_scale = x_sf[block, half_groups + first // group]
                        widen(raw_left, 0, left)
                        widen(raw_right, 0, right)
                        widen_grad(raw_grad, 0, grad)
                        largest = T.alloc_var(T.float32, init=T.float32(0))
                        for v in T.unroll(PART):
                            left[v] = T.ieee_mul(left[v], left_scale)
                            right[v] = T.ieee_mul(right[v], right_scale)
                            largest = T.max(largest, T.abs(left[v]))
                        if largest < NEAR:
                            near(left, right, grad, weight[0], clamp, total)
                        else:
                            general(left, right, grad, weight[0], clamp, total)
                    if plan.recompute:
                        store_out(grad, 0, out, block, first)
                    quantise_left(left, block, first, lane, codes, sf, x_grad, clamp_min, found)
                    quantise_right(right, block, first, lane, codes, sf, x_grad, clamp_min, found)
                if plan.weighted:
                    for d in T.unroll(5):
                        total[0] = T.ieee_add(total[0], T.shfl_xor(total[0], T.shift_left(1, d)))
                    if lane == 0:
                        warp_values[tx // LANES] = total[0]
                    T.sync_threads()
                    if tx == 0:
                        mine = T.alloc_var(T.int32, init=block)
                        if indexed:
                            mine = index[block]
                            if mine >= 0 and mine < num_weights:
                                if inverse_index[mine] != block:
                                    mine = -1
                        if mine >= 0 and mine < num_weights:
                            total[0] = warp_values[0]
                            for w in T.unroll(warps - 1):
                                total[0] = T.ieee_add(total[0], warp_values[w + 1])
                            weight_grad[mine] = T.ieee_mul(total[0], factor)
            elif block < to_write:  # columns of scales are longer than there are rows
                for i in T.serial(T.ceildiv(groups, threads)):
                    if i * threads + tx < groups:
                        write_sf(sf, block, i * threads + tx, T.float32(0))
            elif indexed:
                weight_index = T.alloc_var(T.int32, init=(block - to_write) * threads + tx)
                if weight_index < num_weights:
                    row = T.alloc_var(T.int32, init=inverse_index[weight_index])
                    served = T.alloc_var(T.bool, init=T.bool(False))
                    if row >= 0 and row < rows:
                        served = index[row] == weight_index
                    if not served:
                        weight_grad[weight_index] = T.float32(0)

    return swiglu_gradient_rows


# ---- without a cast -----------------------------------------------------------------------------

# Threads of a multiprocessor, which bounds the registers of each: as for a float32 source above.
# Other numbers were not measured.
RESIDENT_PLAIN = 1024


def weight_of_plain(rows: str, weighted: bool) -> Any:
    """A macro: whether a row exists in `found[0]`, and its weight times the factor in `weight[0]`.

    The weight is 1 without weights, and 0 for a row that does not exist.
    """

    @T.macro
    def located(
        row, index, weights, num_weights, ends, num_experts, alignment, factor, found, weight
    ):
        weight_index = T.alloc_var(T.int32, init=row)
        found[0] = T.bool(True)
        if rows == INDEXED:
            weight_index = index[row]
            found[0] = weight_index >= 0 and weight_index < num_weights
        elif rows == RANGES:
            found[0] = in_ranges(ends, num_experts, alignment, row)
        weight[0] = T.float32(0)
        if found[0]:
            if weighted:
                weight[0] = T.ieee_mul(weights[weight_index], factor)
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
    activated = activation(plan, counted=plan.counters > 0)
    located = weight_of_plain(plan.rows, plan.weighted)
    counters, blocks = max(plan.counters, 1), plan.blocks
    added = add_counts(plan.threads, counters)
    store = store_values(plan.target, hidden, CHUNK, plan.store)
    source_dtype, out_dtype = storage(plan.source)[0], storage(plan.target)[0]
    rows, row_stride, num_weights, num_experts = T.dynamic(
        "rows row_stride num_weights num_experts"
    )
    units = T.ceildiv(rows * tiles, WARPS)

    @T.macro
    def step(unit, x, index, weights, ends, out, alignment, factor, clamp, counts):
        tx = T.get_thread_binding()
        warp = unit * WARPS + tx // LANES
        row = T.alloc_var(T.int32, init=warp // tiles)
        first = T.alloc_var(T.int32, init=(warp % tiles * LANES + tx % LANES) * CHUNK)
        values, weight = local_arrays(T.float32, CHUNK, 1)
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
            written = T.alloc_var(T.bool, init=T.bool(True))
            if not plan.fill:
                written = found[0]
            if written:
                store(values, 0, out, row, first)

    @T.prim_func
    def swiglu_plain_rows(
        x: T.StridedTensor[(rows, 2 * hidden), (row_stride, 1), source_dtype],
        index: T.Tensor[(rows,), T.int32],
        weights: T.Tensor[(num_weights,), T.float32],
        ends: T.Tensor[(num_experts,), T.int32],
        out: T.Tensor[(rows, hidden), out_dtype],
        totals: T.Tensor[(counters,), T.int64],
        alignment: T.int32,
        factor: T.float32,
        clamp: T.float32,
    ):
        with T.Kernel(blocks if blocks else units, threads=plan.threads) as block:
            T.annotate_min_blocks_per_sm(RESIDENT_PLAIN // plan.threads)
            T.assume(row_stride % plan.load == 0)
            counts = T.alloc_local((counters,), T.int32)
            if blocks:
                for i in T.unroll(counters):
                    counts[i] = 0
                for i in T.serial(T.ceildiv(units - block, blocks)):
                    step(
                        i * blocks + block, x, index, weights, ends, out, alignment, factor, clamp,
                        counts,
                    )  # fmt: skip
                added(counts, totals)
            else:
                step(block, x, index, weights, ends, out, alignment, factor, clamp, counts)

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
            warp_values = T.alloc_shared((warps,), T.float32)
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
                        warp_values[tx // LANES] = total[0]
                    T.sync_threads()
                    if tx == 0:
                        weight_index = T.alloc_var(T.int32, init=block)
                        if indexed:
                            weight_index = -1
                            if found[0]:
                                weight_index = index[block]
                                if inverse_index[weight_index] != block:
                                    weight_index = -1
                        if weight_index >= 0:
                            total[0] = warp_values[0]
                            for w in T.unroll(warps - 1):
                                total[0] = T.ieee_add(total[0], warp_values[w + 1])
                            weight_grad[weight_index] = T.ieee_mul(total[0], factor)
            elif indexed:
                weight_index = T.alloc_var(T.int32, init=(block - rows) * threads + tx)
                if weight_index < num_weights:
                    row = T.alloc_var(T.int32, init=inverse_index[weight_index])
                    served = T.alloc_var(T.bool, init=T.bool(False))
                    if row >= 0 and row < rows:
                        served = index[row] == weight_index
                    if not served:
                        weight_grad[weight_index] = T.float32(0)

    return swiglu_plain_gradient_rows
