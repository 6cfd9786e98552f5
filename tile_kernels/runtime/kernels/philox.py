"""Philox 4x32-10 in kernels: the words of `tile_kernels.runtime.philox`."""

from tilelang import language as T

from tile_kernels.runtime.philox import KEY_STEPS, MULTIPLIERS, ROUNDS


@T.macro
def philox(seed, sequence, words):
    """Four random words of a sequence (int64) for a seed (int64), to `words` (uint32)."""
    key = T.alloc_local((2,), T.uint32)
    products = T.alloc_local((2,), T.uint64)
    key[0] = T.cast(seed & T.int64(0xFFFFFFFF), T.uint32)
    key[1] = T.cast(T.shift_right(seed, T.int64(32)) & T.int64(0xFFFFFFFF), T.uint32)
    words[0] = T.uint32(0)
    words[1] = T.uint32(0)
    words[2] = T.cast(sequence & T.int64(0xFFFFFFFF), T.uint32)
    words[3] = T.cast(T.shift_right(sequence, T.int64(32)) & T.int64(0xFFFFFFFF), T.uint32)
    for _ in T.unroll(ROUNDS):
        products[0] = T.cast(words[0], T.uint64) * T.uint64(MULTIPLIERS[0])
        products[1] = T.cast(words[2], T.uint64) * T.uint64(MULTIPLIERS[1])
        words[0] = high_word(products[1]) ^ words[1] ^ key[0]
        words[1] = T.cast(products[1] & T.uint64(0xFFFFFFFF), T.uint32)
        words[2] = high_word(products[0]) ^ words[3] ^ key[1]
        words[3] = T.cast(products[0] & T.uint64(0xFFFFFFFF), T.uint32)
        key[0] = key[0] + T.uint32(KEY_STEPS[0])
        key[1] = key[1] + T.uint32(KEY_STEPS[1])


@T.macro
def high_word(product):
    """The upper 32 bits of a 64-bit product."""
    return T.cast(T.shift_right(product, T.uint64(32)), T.uint32)


@T.macro
def below(word, limit):
    """An int32 in `0..limit-1` from a random word: the high word of their product."""
    product = T.cast(word, T.uint64) * T.cast(limit, T.uint64)
    return T.cast(high_word(product), T.int32)


@T.macro
def uniform(word):
    """A float32 in `(0, 1]` from a random word, with the roundings of `curand_uniform`."""
    scaled = T.ieee_mul(T.cast(word, T.float32), T.float32(2.0**-32))
    return T.ieee_add(scaled, T.float32(2.0**-33))
