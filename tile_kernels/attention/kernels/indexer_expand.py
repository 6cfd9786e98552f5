"""Keys in packed e2m1 as e4m3 in memory, each with a factor: once for all that score them."""

from typing import Any

from tilelang import language as T

from tile_kernels.attention.indexer import KEYS
from tile_kernels.attention.kernels.indexer_scores import E4M3, GROUP, expansion
from tile_kernels.runtime.device import Device
from tile_kernels.runtime.kernels.common import EXPLICIT_GUARDS
from tile_kernels.runtime.launch import kernel


def plan(depth: int, device: Device) -> tuple[int]:
    return (depth,)


@kernel(plan=plan, access_bits=lambda *_: ((8, 128), (32, 128)), pass_configs=EXPLICIT_GUARDS)
def expand_keys(depth: int) -> Any:
    """A group for a thread. A tile of keys is marked if e4m3 cannot hold one of them exactly."""
    num_keys, tiles = T.dynamic("num_keys tiles")
    groups = depth // GROUP
    threads = KEYS * groups
    expand = expansion(E4M3, groups)

    @T.prim_func
    def expand_tiles(
        k: T.Tensor[(num_keys, depth // 8), T.uint32],
        k_sf: T.Tensor[(num_keys, groups), T.uint8],
        out: T.Tensor[(1, num_keys, depth), E4M3],
        factors: T.Tensor[(1, num_keys), T.float32],
        marks: T.Tensor[(tiles, 1), T.int32],
    ):
        with T.Kernel(tiles, threads=threads) as tile:
            tx = T.get_thread_binding()
            wide = T.alloc_shared((1,), T.int32)
            words = T.alloc_local((4,), T.uint32)
            exponent = T.alloc_var(T.int32, init=0)
            key = tile * KEYS + tx // groups
            group = tx % groups
            if tx == 0:
                wide[0] = 0
            for e in T.unroll(4):
                words[e] = T.uint32(0)
            if key < num_keys:
                for e in T.vectorized(4):
                    words[e] = k[key, group * 4 + e]
                exponent = T.cast(k_sf[key, group], T.int32)
            T.sync_threads()
            expand(words, 0, exponent, out, 0, key, num_keys, group, factors, 0, wide)
            T.sync_threads()
            if tx == 0:
                marks[tile, 0] = wide[0]

    return expand_tiles
