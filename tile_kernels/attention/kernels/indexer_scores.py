"""The scores of keys for queries, on tensor cores: a tile of keys for all heads of some queries.

    score[t, s] = k_sf[s] * sum over h of weights[t, h] * relu(q[t, h] . k[s])

A block holds the rows (query, head) of its queries and streams over tiles of keys. Keys are the
rows of the product and (query, head) its columns, so that a thread and its three neighbours hold
all heads of a key: they are weighted and summed in registers.

The matrix units multiply e4m3 or bfloat16. Packed e2m1 is expanded on the way into shared memory:
to e4m3 where all groups of each row are within `2**11` of its largest one, the row's own power of
two apart, which is exact; to bfloat16 otherwise. A launch in e4m3 marks the blocks that it cannot
do exactly, and a second one in bfloat16 does those alone.
"""

from typing import Any, NamedTuple

from tilelang import language as T

from tile_kernels.runtime.device import Device

GROUP = 32  # values of packed e2m1 that share an exponent
MOST_COLUMNS = 128  # of the product: heads of all queries of a block
STAGES = (4, 2)  # tiles of keys, the one in use and those under way
BF16, E4M3, E2M1 = "bfloat16", "float8_e4m3fn", "e2m1"
SIZE = {BF16: 2, E4M3: 1}
# e2m1's magnitudes 0, .5, 1, 1.5 and 2, 3, 4, 6 as bytes of e4m3; a power of two more adds 8 each.
LOW, LOW_STEP, HIGH, HIGH_STEP = 0x3C383000, 0x08080800, 0x4C484440, 0x08080808
UP, DOWN = 6, -5  # 6 * 2**6 is not above e4m3's largest number, 0.5 * 2**-5 is a normal one


class Tile(NamedTuple):
    """What a block holds: `queries` of `padded` heads each, `stages` tiles of `keys` keys.

    `source` is the format of q and k, `unit` what the matrix units take. `fenced`: they read shared
    memory by a way of their own (Hopper's), which must be told.
    """

    source: str
    unit: str
    heads: int
    padded: int
    depth: int
    keys: int
    queries: int
    stages: int
    fenced: bool

    @property
    def columns(self) -> int:
        """Rows (query, head) of the block, columns of the product."""
        return self.queries * self.padded

    @property
    def threads(self) -> int:
        """A warp for 16 keys."""
        return 2 * self.keys

    @property
    def groups(self) -> int:
        """Groups of a row that have an exponent each, in e2m1."""
        return self.depth // GROUP

    @property
    def rounds(self) -> int:
        """Groups of a tile of keys for each thread, at most 4: their exponents fill a word."""
        return -(-self.keys * self.groups // self.threads)

    @property
    def expanded(self) -> bool:
        """Whether tiles change their format between memory and the matrix units."""
        return self.source != self.unit

    @property
    def row(self) -> tuple[int, str]:
        """A row of q or k in memory: its elements, eight codes of e2m1 in one, and their dtype."""
        return (self.depth // 8, "uint32") if self.source == E2M1 else (self.depth, self.source)

    @property
    def slots(self) -> int:
        """Tiles that the matrix units may read from: all stages, or the one that is expanded."""
        return 1 if self.expanded else self.stages

    def bytes(self) -> int:
        """Shared memory that it takes."""
        rows = self.columns + self.slots * self.keys
        raw = self.stages * self.keys * self.depth // (2 if self.source == E2M1 else 1)
        raw = raw if self.expanded else 0
        scales = 4 * (self.columns + self.stages * self.keys + self.queries * self.keys)
        return rows * self.depth * SIZE[self.unit] + raw + scales


def tile_plan(
    source: str, exact: bool, heads: int, depth: int, held: int, most_queries: int, device: Device
) -> Tile:
    """The largest tile that fits; `held` bytes for each query are used otherwise.

    `exact`: in bfloat16, whatever the exponents of e2m1.
    """
    low = exact or source == BF16 or device.arch == "sm_80"  # which has no e4m3
    unit = BF16 if low else E4M3
    padded = max(8, 1 << (heads - 1).bit_length())
    queries = max(1, min(MOST_COLUMNS // padded, most_queries))
    fenced = device.arch == "sm_90a"
    numbers = STAGES[1:] if source != unit else STAGES
    # Rather two blocks of an SM than large ones: one multiplies while the other sums over heads.
    for room in (device.smem_per_sm // 2 - 1024, device.smem_per_block):
        for keys in (128, 64):
            for halved in range(queries.bit_length()):
                for stages in numbers:
                    fewer = queries >> halved
                    tile = Tile(source, unit, heads, padded, depth, keys, fewer, stages, fenced)
                    if tile.bytes() + fewer * held + 2048 <= room:
                        return tile
    less = ", or topk smaller," if held else ""
    raise ValueError(
        f"q must have fewer heads or channels{less} for {device.name}, got {heads} heads of {depth}"
    )


def published(tile: Tile) -> Any:
    """A macro: a barrier, after which the matrix units see what was written to shared memory."""

    @T.macro
    def publish():
        if tile.fenced:
            T.fence_proxy_async()
        T.sync_threads()

    return publish


def dot(tile: Tile) -> Any:
    """A macro: the products of a slot's keys with all columns, relu, weights, sum over heads."""

    @T.macro
    def dotted(of_keys, slot, of_queries, products, by_head, weights, sums):
        T.gemm(
            of_keys[slot, :, :], of_queries[0, :, :], products, transpose_B=True, clear_accum=True,
            policy=T.GemmWarpPolicy.FullRow,
        )  # fmt: skip
        for i, j in T.Parallel(tile.keys, tile.columns):
            # relu as the larger of two integers: NaN, which is positive here, stays.
            positive = T.max(T.reinterpret(products[i, j], T.int32), 0)
            products[i, j] = T.reinterpret(positive, T.float32) * weights[j]
        T.reduce_sum(by_head, sums, dim=2, batch=2 * tile.queries)

    return dotted


def scores_of(tile: Tile) -> Any:
    """A macro: sums over heads, with the factor of each key, to shared memory by query."""

    @T.macro
    def scaled(sums, factors, number, of_scores):
        for i, t in T.Parallel(tile.keys, tile.queries):
            if tile.source == BF16:
                of_scores[t, i] = sums[i, t]
            elif tile.source == E4M3:
                of_scores[t, i] = sums[i, t] * factors[number % tile.stages, i]
            else:
                of_scores[t, i] = sums[i, t] * factors[0, i]

    return scaled


# ---- packed e2m1 --------------------------------------------------------------------------------


def expansion(tile: Tile) -> Any:
    """A macro: the 32 codes of a group into a row of `place`, and the row's own factor.

    The groups of a row are in neighbouring lanes; all lanes come, those of no row with codes 0.
    `wide[0]`, shared, becomes 1 where e4m3 cannot hold all groups of the row.
    """

    @T.macro
    def to_e4m3(words, exponent, place, row, rows, group, factors, wide):
        data = T.alloc_local((GROUP,), T.float8_e4m3fn)
        octets = T.view(data, (GROUP // 4,), T.uint32)
        most = T.alloc_var(T.int32, init=0)
        shift = T.alloc_var(T.int32, init=0)
        low = T.alloc_var(T.uint32, init=T.uint32(0))
        high = T.alloc_var(T.uint32, init=T.uint32(0))
        codes = T.alloc_var(T.uint32)
        some = ((words[0] | words[1] | words[2] | words[3]) & T.uint32(0x77777777)) != T.uint32(0)
        if some and exponent < 255:
            most = exponent
        for d in T.unroll((tile.groups - 1).bit_length()):
            most = T.max(most, T.shfl_xor(most, T.shift_left(1, d)))
        if exponent == 255:
            low = T.uint32(0x7F7F7F7F)
            high = T.uint32(0x7F7F7F7F)
        elif some and exponent > 0:
            shift = exponent - most + UP
            if shift < DOWN:
                wide[0] = 1
                shift = DOWN
            low = T.uint32(LOW) + T.cast(shift, T.uint32) * T.uint32(LOW_STEP)
            high = T.uint32(HIGH) + T.cast(shift, T.uint32) * T.uint32(HIGH_STEP)
        for c in T.unroll(GROUP // 4):
            codes = (words[c // 2] >> T.uint32(c % 2 * 16)) & T.uint32(0xFFFF)
            magnitudes = T.call_extern(T.uint32, "__byte_perm", low, high, codes & T.uint32(0x7777))
            signs = T.call_extern(
                T.uint32, "__byte_perm", codes, codes >> T.uint32(4), T.uint32(0x5140)
            )
            octets[c] = magnitudes | ((signs & T.uint32(0x08080808)) << T.uint32(4))
        if row < rows:
            for c in T.unroll(GROUP // 16):
                for e in T.vectorized(16):
                    place[0, row, group * GROUP + c * 16 + e] = data[c * 16 + e]
        if row < rows and group == 0:
            scale = T.reinterpret(T.cast(most, T.uint32) << T.uint32(23), T.float32)
            factors[0, row] = scale * T.float32(2.0**-UP)

    @T.macro
    def to_bfloat16(words, exponent, place, row, rows, group, factors, wide):
        codes = T.alloc_local((4,), T.float8_e4m3fn)
        octets = T.view(codes, (1,), T.uint32)
        data = T.alloc_local((8,), T.bfloat16)
        four = T.alloc_var(T.uint32)
        scale = T.alloc_var(T.float32)
        scale = T.reinterpret(T.cast(exponent, T.uint32) << T.uint32(23), T.float32)
        if exponent == 255:
            scale = T.reinterpret(T.uint32(0x7FFFFFFF), T.float32)
        for c in T.unroll(GROUP // 8):
            for half in T.unroll(2):
                four = (words[c] >> T.uint32(half * 16)) & T.uint32(0xFFFF)
                magnitudes = T.call_extern(
                    T.uint32, "__byte_perm", T.uint32(LOW), T.uint32(HIGH), four & T.uint32(0x7777)
                )
                signs = T.call_extern(
                    T.uint32, "__byte_perm", four, four >> T.uint32(4), T.uint32(0x5140)
                )
                octets[0] = magnitudes | ((signs & T.uint32(0x08080808)) << T.uint32(4))
                for e in T.unroll(4):
                    data[half * 4 + e] = T.cast(T.cast(codes[e], T.float32) * scale, T.bfloat16)
            if row < rows:
                for e in T.vectorized(8):
                    place[0, row, group * GROUP + c * 8 + e] = data[e]
        if row < rows and group == 0:
            factors[0, row] = T.float32(1)

    return to_e4m3 if tile.unit == E4M3 else to_bfloat16


# ---- queries ------------------------------------------------------------------------------------


def load_queries(tile: Tile) -> Any:
    """A macro: rows (query, head) of the block into `of_queries`, and their weights.

    Heads and queries beyond the last are zero. Has a barrier at its end.
    """
    expand = expansion(tile)
    publish = published(tile)
    threads, groups = tile.threads, tile.groups

    @T.macro
    def load(q, q_sf, weights, first, tokens, of_queries, factors, of_weights, wide):
        if tile.source == E2M1:
            words = T.alloc_local((4,), T.uint32)
            exponent = T.alloc_var(T.int32)
            for c in T.unroll(-(-tile.columns * groups // threads)):
                row = (c * threads + T.get_thread_binding()) // groups
                group = T.get_thread_binding() % groups
                token = first + row // tile.padded
                head = row % tile.padded
                for e in T.unroll(4):
                    words[e] = T.uint32(0)
                exponent = 0
                if row < tile.columns and token < tokens and head < tile.heads:
                    for e in T.vectorized(4):
                        words[e] = q[token, head, group * 4 + e]
                    exponent = T.cast(q_sf[token, head, group], T.int32)
                expand(words, exponent, of_queries, row, tile.columns, group, factors, wide)
        elif tile.expanded:
            # Loaded first, then cast: in one step the load would not wait for the condition.
            loaded = T.alloc_fragment((tile.columns, tile.depth), tile.source)
            for i, j in T.Parallel(tile.columns, tile.depth):
                if first + i // tile.padded < tokens and i % tile.padded < tile.heads:
                    loaded[i, j] = q[first + i // tile.padded, i % tile.padded, j]
                else:
                    loaded[i, j] = T.cast(0, tile.source)
            for i, j in T.Parallel(tile.columns, tile.depth):
                of_queries[0, i, j] = T.cast(loaded[i, j], tile.unit)
        else:
            for i, j in T.Parallel(tile.columns, tile.depth):
                if first + i // tile.padded < tokens and i % tile.padded < tile.heads:
                    of_queries[0, i, j] = q[first + i // tile.padded, i % tile.padded, j]
                else:
                    of_queries[0, i, j] = T.cast(0, tile.unit)
        publish()
        for j in T.Parallel(tile.columns):
            if first + j // tile.padded < tokens and j % tile.padded < tile.heads:
                of_weights[j] = weights[first + j // tile.padded, j % tile.padded]
            else:
                of_weights[j] = T.float32(0)
        if tile.source == E2M1:
            for j in T.Parallel(tile.columns):
                of_weights[j] = of_weights[j] * factors[0, j]

    return load


# ---- keys ---------------------------------------------------------------------------------------


def stream_keys(tile: Tile) -> Any:
    """Macros: `fetch` and `fetch_exponents` of a tile of keys; `arrive`, when it can be multiplied.

    Exponents, those of e2m1, are fetched one tile ahead, after the one before has arrived.
    """
    expand = expansion(tile)
    publish = published(tile)
    threads, groups = tile.threads, tile.groups
    copies = 2 if tile.source == E4M3 else 1
    packed = tile.source == E2M1

    @T.macro
    def fetch(k, k_sf, number, last, of_keys, raw, factors):
        if number < last:
            row = number * tile.keys
            slot = number % tile.stages
            if tile.expanded:
                T.async_copy(k[row : row + tile.keys, 0 : tile.row[0]], raw[slot, :, :])
            else:
                T.async_copy(k[row : row + tile.keys, 0 : tile.depth], of_keys[slot, :, :])
            if tile.source == E4M3:
                T.async_copy(k_sf[row : row + tile.keys], factors[slot, :])
        else:
            for _ in T.unroll(copies):
                T.ptx_commit_group()

    @T.macro
    def fetch_exponents(k_sf, num_keys, number, last, exponents):
        """Of a thread's groups in a tile of e2m1, a byte each."""
        if packed:
            exponents[0] = T.uint32(0)
            if number < last:
                for c in T.unroll(tile.rounds):
                    key = number * tile.keys + (c * threads + T.get_thread_binding()) // groups
                    if key < num_keys:
                        exponent = T.cast(k_sf[key, T.get_thread_binding() % groups], T.uint32)
                        exponents[0] = exponents[0] | (exponent << T.uint32(8 * c))

    @T.macro
    def arrive(number, of_keys, raw, factors, exponents, wide):
        T.ptx_wait_group(copies * (tile.stages - 1))
        publish()
        if tile.expanded:
            slot = number % tile.stages
            if packed:
                words = T.alloc_local((4,), T.uint32)
                exponent = T.alloc_var(T.int32)
                for c in T.unroll(tile.rounds, unroll_factor=1):
                    row = (c * threads + T.get_thread_binding()) // groups
                    group = T.get_thread_binding() % groups
                    for e in T.unroll(4):
                        words[e] = T.uint32(0)
                    if row < tile.keys:
                        for e in T.vectorized(4):
                            words[e] = raw[slot, row, group * 4 + e]
                    exponent = T.cast(
                        (exponents[0] >> T.cast(8 * c, T.uint32)) & T.uint32(255), T.int32
                    )
                    expand(words, exponent, of_keys, row, tile.keys, group, factors, wide)
            else:
                for i, j in T.Parallel(tile.keys, tile.depth):
                    of_keys[0, i, j] = T.cast(raw[slot, i, j], tile.unit)
            publish()

    return fetch, fetch_exponents, arrive
