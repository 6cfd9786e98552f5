"""Scale factors of quantized tensors: which block has which, and how they lie in memory.

Data of `T` rows and `H` channels in blocks of `rows x channels` has `M x G` scale factors, with
`M = ceil(T / rows)` and `G = ceil(H / channels)`; the last ones may belong to smaller blocks.

| column-major, packed | dtype | shape | strides |
|---|---|---|---|
| no, no | float32 | `[M, G]` | `(G, 1)` |
| yes, no | float32 | `[M, G]` | `(1, align(M, 4))` |
| yes, yes | int32 | `[M, ceil(G / 4)]` | `(1, align(M, 4))` |
| no, yes | int32 | `[M, ceil(G / 4)]` | `(ceil(G / 4), 1)` |
| no | float8_e4m3fn | `[M, G]` | `(G, 1)` |
| yes | float8_e4m3fn | `[M, G]` | `(1, align(M, 16))` |

Column-major factors are the transpose of a `[columns, align(M, 4)]` buffer, so that each column
starts at a multiple of 16 bytes, as the tensor memory accelerator (TMA) wants it. A packed word
holds the ue8m0 exponents of four neighbouring groups, the first in its low byte. Rows that pad a
column and bytes of groups that do not exist are zero.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tile_kernels import utils
from tile_kernels.quant import formats
from tile_kernels.runtime.arithmetic import row_chunks

_GROUPS_PER_WORD = 4
_ROW_ALIGNMENT = 4


def num_blocks(shape: Sequence[int], block_size: Sequence[int]) -> tuple[int, int]:
    """How many blocks, partial ones included, cover the rows and the columns of `shape`.

    >>> num_blocks((300, 576), (128, 128))
    (3, 5)
    """
    num_rows, num_columns = shape
    return utils.ceil_div(num_rows, block_size[0]), utils.ceil_div(num_columns, block_size[1])


def alloc_sf(
    num_rows: int,
    num_groups: int,
    use_tma_aligned_col_major_sf: bool,
    use_packed_ue8m0: bool,
    device: torch.device | str,
) -> torch.Tensor:
    """Zeros in the layout of `num_rows x num_groups` scale factors, padding included.

    >>> sf = alloc_sf(5, 5, True, True, "cpu")
    >>> sf.dtype, tuple(sf.shape), sf.stride()
    (torch.int32, (5, 2), (1, 8))
    """
    dtype = torch.int32 if use_packed_ue8m0 else torch.float32
    columns = utils.ceil_div(num_groups, _GROUPS_PER_WORD) if use_packed_ue8m0 else num_groups
    if not use_tma_aligned_col_major_sf:
        return torch.zeros((num_rows, columns), dtype=dtype, device=device)
    padded_rows = utils.align(num_rows, _ROW_ALIGNMENT)
    return torch.zeros((columns, padded_rows), dtype=dtype, device=device).T[:num_rows]


def lay_out_sf(
    sf: torch.Tensor, use_tma_aligned_col_major_sf: bool, use_packed_ue8m0: bool
) -> torch.Tensor:
    """float32 `[M, G]` scale factors in the layout that the flags ask for.

    Packing keeps only the exponents.

    >>> sf = lay_out_sf(torch.tensor([[1.0, 2.0, 4.0, 8.0, 16.0]]), True, True)
    >>> [hex(word & 0xFFFFFFFF) for word in sf[0].tolist()]
    ['0x8281807f', '0x83']
    """
    num_rows, num_groups = sf.shape
    flags = use_tma_aligned_col_major_sf, use_packed_ue8m0
    laid_out = alloc_sf(num_rows, num_groups, *flags, sf.device)
    values = _packed(formats.encode_ue8m0(sf)) if use_packed_ue8m0 else sf
    return laid_out.copy_(values)


def lay_out_e4m3_sf(sf: torch.Tensor, use_tma_aligned_col_major_sf: bool) -> torch.Tensor:
    """float8_e4m3fn `[M, G]` scale factors by rows, or by columns that are padded to 16 bytes.

    >>> lay_out_e4m3_sf(torch.ones(5, 4).to(torch.float8_e4m3fn), True).stride()
    (1, 16)
    """
    if not use_tma_aligned_col_major_sf:
        return sf.contiguous()
    num_rows, num_groups = sf.shape
    padded = torch.zeros(
        (num_groups, utils.align(num_rows, 16)), dtype=torch.uint8, device=sf.device
    )
    padded[:, :num_rows] = sf.view(torch.uint8).T
    return padded.view(torch.float8_e4m3fn).T[:num_rows]


def read_sf(sf: torch.Tensor) -> torch.Tensor:
    """The scale factors `[M, G]` of any layout as float32; of packed ones `G` is a multiple of 4.

    >>> read_sf(torch.tensor([[0x8281807F, 0x83]]).int()).tolist()
    [[1.0, 2.0, 4.0, 8.0, 16.0, 0.0, 0.0, 0.0]]
    """
    if sf.dtype == torch.float8_e4m3fn:
        return sf.float()
    return formats.decode_ue8m0(formats.words_to_bytes(sf)) if _is_packed(sf) else sf


def pack_along_tokens(sf: torch.Tensor) -> torch.Tensor:
    """Powers of two `[M, H]` to int32 `[ceil(M / 4), H]`: four rows of exponents in a word.

    >>> pack_along_tokens(torch.full((5, 1), 2.0**-7)).tolist() == [[0x78787878], [0x78]]
    True
    """
    num_rows, width = sf.shape
    missing = -num_rows % _GROUPS_PER_WORD
    exponents = torch.nn.functional.pad(formats.encode_ue8m0(sf), (0, 0, 0, missing))
    fours = exponents.unflatten(0, (-1, _GROUPS_PER_WORD)).transpose(1, 2)
    return formats.bytes_to_words(fours.reshape(-1, _GROUPS_PER_WORD * width))


def unpack_along_tokens(words: torch.Tensor, num_rows: int) -> torch.Tensor:
    """int32 `[ceil(M / 4), H]` to powers of two `[M, H]`; inverse of `pack_along_tokens`.

    >>> unpack_along_tokens(torch.tensor([[0x78787878], [0x78]]).int(), 5).log2().tolist()
    [[-7.0], [-7.0], [-7.0], [-7.0], [-7.0]]
    """
    fours = formats.words_to_bytes(words).unflatten(1, (-1, _GROUPS_PER_WORD)).transpose(1, 2)
    return formats.decode_ue8m0(fours.reshape(-1, words.shape[1])[:num_rows])


def is_packed_along_tokens(
    sf: torch.Tensor, shape: Sequence[int], block_size: Sequence[int]
) -> bool:
    """Whether scale factors of `shape` values are those of `pack_along_tokens`, by their shape.

    >>> is_packed_along_tokens(torch.zeros(2, 64).int(), (256, 64), (32, 1))
    True
    """
    rows, columns = num_blocks(shape, block_size)
    packed = (utils.ceil_div(rows, _GROUPS_PER_WORD), columns)
    by_channels = (rows, utils.ceil_div(columns, _GROUPS_PER_WORD))
    found = tuple(sf.shape)
    return (
        sf.dtype == torch.int32 and block_size[1] == 1 and found == packed and found != by_channels
    )


def read_exponents(sf: torch.Tensor) -> torch.Tensor:
    """The biased exponents `[M, G]` of the scale factors of any layout as uint8.

    >>> read_exponents(torch.tensor([[1.0, 4.0]])).tolist()
    [[127, 129]]
    """
    return formats.words_to_bytes(sf) if _is_packed(sf) else formats.encode_ue8m0(sf)


def expand_blocks(
    per_block: torch.Tensor, block_size: tuple[int, int], shape: Sequence[int]
) -> torch.Tensor:
    """Values of blocks, `[M, G]` or more, repeated over their elements: a tensor of `shape`.

    >>> expand_blocks(torch.tensor([[1, 2]]), (2, 3), (2, 5)).tolist()
    [[1, 1, 1, 2, 2], [1, 1, 1, 2, 2]]
    """
    rows, columns = num_blocks(shape, block_size)
    if per_block.shape[0] < rows or per_block.shape[1] < columns:
        raise ValueError(
            f"sf must hold the scale factors of {rows} x {columns} blocks of {block_size} "
            f"for data of {tuple(shape)}, got {tuple(per_block.shape)}"
        )
    by_rows = per_block[:rows, :columns].repeat_interleave(block_size[0], dim=0)[: shape[0]]
    return by_rows.repeat_interleave(block_size[1], dim=1)[:, : shape[1]]


def times_blocks(
    values: torch.Tensor, per_block: torch.Tensor, block_size: tuple[int, int]
) -> torch.Tensor:
    """`values` `[T, H]` times the factors of their blocks, `[M, G]` or more: a new tensor.

    >>> times_blocks(torch.ones(2, 5), torch.tensor([[1.0, 2.0]]), (2, 3)).tolist()
    [[1.0, 1.0, 1.0, 2.0, 2.0], [1.0, 1.0, 1.0, 2.0, 2.0]]
    """
    rows, columns = num_blocks(values.shape, block_size)
    if tuple(values.shape) != (rows * block_size[0], columns * block_size[1]):
        return values * expand_blocks(per_block, block_size, values.shape)
    scaled = _in_blocks(values, block_size) * per_block[:rows, None, :columns, None]
    return scaled.reshape(values.shape)


def block_max(values: torch.Tensor, block_size: tuple[int, int]) -> torch.Tensor:
    """The largest magnitude of the values in each block of `[T, H]`: `[M, G]`.

    >>> block_max(torch.tensor([[1, 2, 3], [4, 0, -5]]), (2, 2)).tolist()
    [[4, 5]]
    """
    block_rows, block_columns = block_size
    rows, columns = num_blocks(values.shape, block_size)
    missing = columns * block_columns - values.shape[1], rows * block_rows - values.shape[0]
    if any(missing):
        values = torch.nn.functional.pad(values, (0, missing[0], 0, missing[1]))
    out = values.new_empty((rows, columns))
    blocks = _in_blocks(values, block_size)
    chunks = row_chunks(rows, block_rows * columns * block_columns)
    for some in chunks if values.is_cpu else [slice(rows)]:
        out[some] = blocks[some].abs().amax(dim=(1, 3))
    return out


def _in_blocks(values: torch.Tensor, block_size: tuple[int, int]) -> torch.Tensor:
    """A view `[M, rows, G, channels]` of whole blocks."""
    rows, columns = num_blocks(values.shape, block_size)
    return values.unflatten(1, (columns, block_size[1])).unflatten(0, (rows, block_size[0]))


def _is_packed(sf: torch.Tensor) -> bool:
    if sf.dtype not in (torch.float32, torch.int32):
        raise TypeError(
            f"sf must be float32, float8_e4m3fn or int32 of packed exponents, got {sf.dtype}"
        )
    return sf.dtype == torch.int32


def _packed(exponents: torch.Tensor) -> torch.Tensor:
    """uint8 `[M, G]` to int32 words `[M, ceil(G / 4)]`."""
    num_rows, num_groups = exponents.shape
    padded = exponents.new_zeros((num_rows, utils.align(num_groups, _GROUPS_PER_WORD)))
    padded[:, :num_groups] = exponents
    return formats.bytes_to_words(padded)
