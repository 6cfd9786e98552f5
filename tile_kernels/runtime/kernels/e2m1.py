"""TileLang macros that expand packed e2m1."""

from tilelang import language as T

# e2m1's magnitudes 0, .5, 1, 1.5 and 2, 3, 4, 6 as bytes of e4m3; a power of two more adds 8 each.
LOW, LOW_STEP, HIGH, HIGH_STEP = 0x3C383000, 0x08080800, 0x4C484440, 0x08080808
UP, DOWN = 6, -5  # 6 * 2**6 is not above e4m3's largest number, 0.5 * 2**-5 is a normal one


@T.macro
def bytes_of(word, low, high, octets, at):
    """Eight codes as bytes: magnitudes from a table, by three bits each, and signs."""
    evens = T.alloc_var(T.uint32, init=word << T.uint32(4))  # their signs where bytes have them
    for half in (0, 1):
        codes = word >> T.uint32(16 * half)
        four = T.call_extern(T.uint32, "__byte_perm", low, high, codes)
        order = T.uint32(0x5140 + 0x2222 * half)
        signs = T.call_extern(T.uint32, "__byte_perm", evens, word, order)
        octets[at + half] = four | (signs & T.uint32(0x80808080))
