"""Lists of rows: the window of a token, and what was selected for it, without holes."""

from typing import Any

from tilelang import language as T

from tile_kernels.attention.indices.plan import UNROLLED, WARPS, Plan
from tile_kernels.attention.sequence_primitives import visible_rows
from tile_kernels.runtime.device import WARP
from tile_kernels.runtime.kernels.common import EXPLICIT_GUARDS
from tile_kernels.runtime.launch import kernel


@kernel(access_bits=lambda *_: (32, 32), pass_configs=EXPLICIT_GUARDS)
def list_rows(*static: Any) -> Any:
    """A warp for a token. Ballots count the entries that are kept, in their order."""
    (with_selected,) = Plan(*static)
    tokens, k, stride, width, num_bounds = T.dynamic("tokens k stride width num_bounds")

    @T.macro
    def append_entries(selected, token, first, end, offset, indices, count):
        """Append the entries of `first..end - 1`; `count` entries are in the list."""
        lane = T.get_thread_binding() % WARP
        loaded = T.alloc_local((UNROLLED,), T.int32)
        for step in T.serial(T.ceildiv(k, UNROLLED * WARP)):
            for e in T.unroll(UNROLLED):
                position = (step * UNROLLED + e) * WARP + lane
                loaded[e] = -1
                if position < k:
                    loaded[e] = selected[token, position]
            for e in T.unroll(UNROLLED):
                kept = (loaded[e] >= first) & (loaded[e] < end)
                bits = T.alloc_var(T.uint32, init=T.cast(T.ballot(kept), T.uint32))
                lower = (T.uint32(1) << T.cast(lane, T.uint32)) - T.uint32(1)
                if kept:
                    indices[token, count[0] + T.cast(T.popcount(bits & lower), T.int32)] = (
                        loaded[e] + offset
                    )
                count[0] = count[0] + T.cast(T.popcount(bits), T.int32)

    @T.prim_func
    def listed_rows(
        selected: T.StridedTensor[(tokens, k), (stride, 1), T.int32],
        cu_seqlens: T.Tensor[(num_bounds,), T.int32],
        indices: T.Tensor[(tokens, width), T.int32],
        lengths: T.Tensor[(tokens,), T.int32],
        window: T.int32,
        ratio: T.int32,
        offset: T.int32,
    ):
        with T.Kernel(T.ceildiv(tokens, WARPS), threads=WARPS * WARP) as block:
            lane = T.get_thread_binding() % WARP
            token = T.alloc_var(T.int32, init=block * WARPS + T.get_thread_binding() // WARP)
            found = T.alloc_local((4,), T.int32)
            count = T.alloc_local((1,), T.int32)
            if token < tokens:
                visible_rows(cu_seqlens, num_bounds, token, tokens, window, ratio, 2**31 - 1, found)
                for step in T.serial(T.ceildiv(found[1], WARP)):
                    if step * WARP + lane < found[1]:
                        indices[token, step * WARP + lane] = found[0] + step * WARP + lane
                count[0] = found[1]
                if with_selected:
                    append_entries(
                        selected, token, found[2], found[2] + found[3], offset, indices, count
                    )
                for step in T.serial(T.ceildiv(width - count[0], WARP)):
                    if count[0] + step * WARP + lane < width:
                        indices[token, count[0] + step * WARP + lane] = -1
                if lane == 0:
                    lengths[token] = count[0]

    return listed_rows
