"""The calls of DeepGEMM that serving engines make: the indexer's logits, paged or not, products of
hyper-connections, and the layouts of scales.

    from tile_kernels.integrations import deep_gemm

    logits = deep_gemm.fp8_mqa_logits(q, (k, k_sf), weights, starts, ends)

Arguments stand in DeepGEMM's order and under its names. Nothing waits for the GPU. The products
themselves (`fp8_gemm_nt` and others) are those of `tile_kernels.gemm`, under the same names here.

A page of keys is `[page, D]` codes followed by `[page]` scales of 4 bytes: a float32 of e4m3 keys,
or the four exponents of e2m1 keys, for which `D` is 128. The shape `[blocks, page, 1, bytes]` of
the cache only counts bytes.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tile_kernels import attention, mhc
from tile_kernels.gemm import (
    bf16_gemm_nt,
    fp8_fp4_gemm_nt,
    fp8_gemm_nn,
    fp8_gemm_nt,
    fp8_gemm_tn,
    fp8_gemm_tt,
    get_k_alignment_for_contiguous_layout,
    get_m_alignment_for_contiguous_layout,
    get_mk_alignment_for_contiguous_layout,
    get_mn_major_tma_aligned_tensor,
    get_tma_aligned_size,
    k_grouped_bf16_gemm_tn_contiguous,
    k_grouped_fp8_gemm_nt_contiguous,
    k_grouped_fp8_gemm_tn_contiguous,
    m_grouped_bf16_gemm_nt_contiguous,
    m_grouped_bf16_gemm_nt_masked,
    m_grouped_fp8_fp4_gemm_nt_contiguous,
    m_grouped_fp8_fp4_gemm_nt_masked,
    m_grouped_fp8_gemm_nt_contiguous,
    m_grouped_fp8_gemm_nt_masked,
)
from tile_kernels.quant import formats
from tile_kernels.runtime import checks
from tile_kernels.utils import ceil_div

__all__ = [
    "bf16_gemm_nt",
    "fp8_fp4_gemm_nt",
    "fp8_fp4_mqa_logits",
    "fp8_fp4_paged_mqa_logits",
    "fp8_gemm_nn",
    "fp8_gemm_nt",
    "fp8_gemm_tn",
    "fp8_gemm_tt",
    "fp8_mqa_logits",
    "fp8_paged_mqa_logits",
    "get_k_alignment_for_contiguous_layout",
    "get_m_alignment_for_contiguous_layout",
    "get_mk_alignment_for_contiguous_layout",
    "get_mn_major_tma_aligned_packed_ue8m0_tensor",
    "get_mn_major_tma_aligned_tensor",
    "get_paged_mqa_logits_metadata",
    "get_tma_aligned_size",
    "k_grouped_bf16_gemm_tn_contiguous",
    "k_grouped_fp8_gemm_nt_contiguous",
    "k_grouped_fp8_gemm_tn_contiguous",
    "m_grouped_bf16_gemm_nt_contiguous",
    "m_grouped_bf16_gemm_nt_masked",
    "m_grouped_fp8_fp4_gemm_nt_contiguous",
    "m_grouped_fp8_fp4_gemm_nt_masked",
    "m_grouped_fp8_gemm_nt_contiguous",
    "m_grouped_fp8_gemm_nt_masked",
    "paged_keys",
    "tf32_hc_prenorm_gemm",
]

Query = Tensor | tuple[Tensor, Tensor | None]

_SCALE_BYTES = 4  # of a key: a float32, or four exponents
_PACKED_DEPTH = 128  # channels of e2m1: four groups of 32, whose exponents fill an int32
_SEGMENT = 256  # keys that a schedule assigns at once
_MOST_LOGITS = 1 << 28  # of a launch whose result is cut to the ranges of its rows
_MOST_OF_SEQUENCES = 1 << 24  # of a launch for several sequences, whose own logits are kept
_PACKED = (torch.int8, torch.uint8)
_LOGITS = (torch.float32, torch.bfloat16)


# ---- operands -----------------------------------------------------------------------------------


def _exponents(name: str, sf: Any, shape: tuple[int, ...]) -> Tensor:
    """uint8 `[..., 4]` of int32 words with four exponents each."""
    dims = tuple(f"size_{i}" for i in range(len(shape)))
    checks.tensor(name, sf, dims, torch.int32, shape=shape)
    return formats.words_to_bytes(sf).unflatten(-1, (-1, _SCALE_BYTES))


def _as_query(q: Query, dims: tuple[str, ...]) -> Any:
    """`q` as `attention.indexer_logits` takes it: e4m3 or bfloat16, or e2m1 with its exponents."""
    data, sf = q if isinstance(q, tuple) else (q, None)
    checks.tensor("q", data, dims, (torch.float8_e4m3fn, torch.bfloat16, *_PACKED))
    if data.dtype not in _PACKED:
        if sf is not None:
            raise TypeError(
                "q must have no scales unless it is packed e2m1: fold them into weights"
            )
        return data.contiguous()
    if data.shape[-1] * 2 != _PACKED_DEPTH:
        raise ValueError(
            f"q in packed e2m1 must have {_PACKED_DEPTH} channels, got {2 * data.shape[-1]}"
        )
    if sf is None:
        raise TypeError("q in packed e2m1 must be a tuple of data and int32 scales")
    exponents = _exponents("q's scales", sf, tuple(data.shape[:-1]))
    return data.contiguous().view(torch.int8), exponents


def _as_keys(kv: Any, packed: bool) -> Any:
    if isinstance(kv, Tensor) and kv.dtype == torch.bfloat16:
        return kv.contiguous()
    if not (isinstance(kv, tuple) and len(kv) == 2):
        raise TypeError(f"kv must be a tuple of data and scales, got {type(kv).__name__}")
    data, sf = kv
    dims = ("N", "D / 2" if packed else "D")
    checks.tensor("kv's data", data, dims, _PACKED if packed else torch.float8_e4m3fn)
    if packed:
        exponents = _exponents("kv's scales", sf, (data.shape[0],))
        return data.contiguous().view(torch.int8), exponents
    return data.contiguous(), sf.contiguous() if isinstance(sf, Tensor) else sf


def _rows(operand: Any, rows: slice) -> Any:
    if isinstance(operand, tuple):
        return tuple(part[rows] for part in operand)
    return operand[rows]


# ---- logits of contiguous keys ------------------------------------------------------------------


@checks.named_errors
def fp8_mqa_logits(
    q: Tensor,
    kv: tuple[Tensor, Tensor],
    weights: Tensor,
    cu_seq_len_k_start: Tensor,
    cu_seq_len_k_end: Tensor,
    clean_logits: bool = True,
    max_seqlen_k: int = 0,
) -> Tensor:
    """`fp8_fp4_mqa_logits` for queries in e4m3, given as a tensor.

    Args:
        q: `[M, h, D]`, float8_e4m3fn, with its scale folded into `weights`.
        kv: `([N, D]` float8_e4m3fn, `[N]` float32`)`.
        weights: `[M, h]`, float32.
        cu_seq_len_k_start: `[M]`, int32: the first key of each query.
        cu_seq_len_k_end: `[M]`, int32: the key after its last one.
        clean_logits, max_seqlen_k: As for `fp8_fp4_mqa_logits`.

    Returns:
        `[M, N]` or `[M, max_seqlen_k]`, float32, contiguous.

    Raises:
        TypeError: If an argument has another type or dtype.
        ValueError: If an argument has another shape.

    Example:
        >>> q, k = torch.zeros(1, 2, 32), torch.zeros(3, 32)
        >>> q[0, :, 0], k[:, 0] = torch.tensor([1, -1]), torch.tensor([1, -2, 3])
        >>> e4m3, bounds = torch.float8_e4m3fn, torch.tensor([0, 2]).int()
        >>> weights = torch.tensor([[0.5, 2.0]])
        >>> keys = k.to(e4m3), torch.ones(3)
        >>> fp8_mqa_logits(q.to(e4m3), keys, weights, bounds[:1], bounds[1:]).tolist()
        [[0.5, 4.0, -inf]]
    """
    return fp8_fp4_mqa_logits(
        q, kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, clean_logits, max_seqlen_k
    )


@checks.named_errors
def fp8_fp4_mqa_logits(
    q: Query,
    kv: tuple[Tensor, Tensor],
    weights: Tensor,
    cu_seq_len_k_start: Tensor,
    cu_seq_len_k_end: Tensor,
    clean_logits: bool = True,
    max_seqlen_k: int = 0,
    logits_dtype: torch.dtype = torch.float32,
    schedule_meta: Tensor | None = None,
) -> Tensor:
    """The indexer's logits of all keys for each query: `attention.indexer_logits`.

    Args:
        q: `(data, None)`, `[M, h, D]` in float8_e4m3fn (its scale is in `weights`); or
            `(data, scales)`: `[M, h, 64]` in int8 or uint8, packed e2m1, and `[M, h]` in int32,
            each with the exponents of four groups of 32 channels. `h` is in `1..128`.
        kv: `([N, D]` float8_e4m3fn, `[N]` float32`)`; or `([N, 64]` int8 or uint8, `[N]` int32`)`.
        weights: `[M, h]`, float32.
        cu_seq_len_k_start: `[M]`, int32: the first key of each query.
        cu_seq_len_k_end: `[M]`, int32: the key after its last one.
        clean_logits: Whether logits outside of a query's range must be -inf. They always are.
        max_seqlen_k: If positive, the number of columns, which count from the first key of each
            query. It must be at least the length of the longest range: later keys are cut.
        logits_dtype: float32 or bfloat16.
        schedule_meta: It has no effect.

    Returns:
        `[M, N]`, or `[M, max_seqlen_k]`, contiguous, in `logits_dtype`.

    Raises:
        TypeError: If an argument has another type or dtype.
        ValueError: If an argument has another shape.
    """
    del schedule_meta
    checks.boolean("clean_logits", clean_logits)
    checks.integer("max_seqlen_k", max_seqlen_k, 0, checks.MOST_SIZE)
    checks.one_of("logits_dtype", logits_dtype, _LOGITS)
    queries = _as_query(q, ("M", "h", "D"))
    keys = _as_keys(kv, isinstance(queries, tuple))
    num_keys = (keys[0] if isinstance(keys, tuple) else keys).shape[0]
    num_queries = (queries[0] if isinstance(queries, tuple) else queries).shape[0]
    checks.tensor("weights", weights, ("M", "h"), torch.float32, shape=(num_queries, None))
    for name, bound in (
        ("cu_seq_len_k_start", cu_seq_len_k_start),
        ("cu_seq_len_k_end", cu_seq_len_k_end),
    ):
        checks.tensor(name, bound, ("M",), torch.int32, shape=(num_queries,))
    start, end = cu_seq_len_k_start.contiguous(), cu_seq_len_k_end.contiguous()
    weights = weights.contiguous()
    if not max_seqlen_k:
        return attention.indexer_logits(queries, keys, weights, start, end, out_dtype=logits_dtype)
    out = weights.new_empty((num_queries, max_seqlen_k), dtype=logits_dtype)
    columns = torch.arange(max_seqlen_k, device=out.device)
    step = max(1, _MOST_LOGITS // max(num_keys, 1))
    for first in range(0, num_queries, step):
        rows = slice(first, first + step)
        of_keys = start[rows, None].clamp(min=0) + columns
        inside = of_keys < end[rows, None].clamp(max=num_keys)
        if num_keys:
            logits = attention.indexer_logits(
                _rows(queries, rows), keys, weights[rows], start[rows], end[rows],
                out_dtype=logits_dtype,
            )  # fmt: skip
            found = logits.gather(1, torch.where(inside, of_keys, 0))
            out[rows] = torch.where(inside, found, -torch.inf)
        else:
            out[rows] = -torch.inf
    return out


# ---- paged keys ---------------------------------------------------------------------------------


@checks.named_errors
def paged_keys(kv_cache: Tensor, block_table: Tensor, packed: bool) -> tuple[Tensor, Tensor]:
    """Copies the pages of each sequence from a paged cache, in order.

    Args:
        kv_cache: `[blocks, page, 1, bytes]`, uint8 or another dtype of one byte: in each block
            `page` rows of `bytes - 4` bytes of codes, then `page` scales of 4 bytes. Blocks may be
            any number of bytes apart.
        block_table: `[B, P]`, int32: the blocks of each sequence. Numbers of no block are read as
            the nearest one, so that entries past the end of a sequence may hold anything.
        packed: Whether codes are e2m1.

    Returns:
        `(codes, scales)`: `[B, P * page, D]` float8_e4m3fn and `[B, P * page]` float32; packed:
        `[B, P * page, D / 2]` int8 and `[B, P * page, 4]` uint8. Contiguous.

    Raises:
        TypeError: If a dtype differs.
        ValueError: If a shape or a stride differs.

    Example:
        >>> cache = torch.zeros(3, 2, 1, 36, dtype=torch.uint8)
        >>> cache.view(3, 72)[1, 64:] = torch.tensor([1.0, 2.0]).view(torch.uint8)
        >>> paged_keys(cache, torch.tensor([[1, 0]]).int(), packed=False)[1].tolist()
        [[1.0, 2.0, 0.0, 0.0]]
    """
    checks.tensor("kv_cache", kv_cache, ("blocks", "page", "1", "bytes"))
    if kv_cache.element_size() != 1:
        raise TypeError(f"kv_cache must have elements of one byte, got {kv_cache.dtype}")
    blocks, page, heads, size = kv_cache.shape
    if blocks < 1 or page < 1 or heads != 1 or size <= _SCALE_BYTES:
        raise ValueError(
            f"kv_cache must have shape [blocks, page, 1, D + {_SCALE_BYTES}], got "
            f"{tuple(kv_cache.shape)}"
        )
    if (page > 1 and kv_cache.stride(1) != size) or kv_cache.stride(3) != 1:
        raise ValueError(
            f"kv_cache must have strides (any, {size}, any, 1), got {tuple(kv_cache.stride())}"
        )
    checks.tensor("block_table", block_table, ("B", "P"), (torch.int32, torch.int64))
    width = size - _SCALE_BYTES
    stored = kv_cache.view(torch.uint8)
    stride, offset = stored.stride(0), stored.storage_offset()
    codes = stored.as_strided((blocks, page, width), (stride, width, 1), offset)
    scales = stored.as_strided((blocks, page * _SCALE_BYTES), (stride, 1), offset + page * width)
    count, pages = block_table.shape
    table = block_table.clamp(0, blocks - 1).reshape(-1)
    of_keys = codes.index_select(0, table).view(count, pages * page, width)
    of_scales = scales.index_select(0, table).view(count, pages * page, _SCALE_BYTES)
    if packed:
        return of_keys.view(torch.int8), of_scales
    return of_keys.view(torch.float8_e4m3fn), of_scales.view(torch.float32).squeeze(-1)


@checks.named_errors
def get_paged_mqa_logits_metadata(
    context_lens: Tensor, block_kv: int, num_sms: int, indices: Tensor | None = None
) -> Tensor:
    """Which part of the keys each SM begins with, as DeepGEMM's schedule states it.

    The keys of each sequence are cut into segments of 256, which are dealt out in order, the same
    number to each SM, the first ones one more. The functions of this module accept the result, and
    do not need it.

    Args:
        context_lens: `[B, n]`, int32: the keys of each query; the largest of a row counts.
        block_kv: Keys of a page: 32 or 64.
        num_sms: The number of SMs.
        indices: Must be None.

    Returns:
        `[num_sms + 1, 2]`, int32: the sequence and its segment with which an SM begins, and, in the
        last row, the end.

    Raises:
        TypeError: If an argument has another type or dtype.
        ValueError: If an argument has another shape, or a number is out of range.

    Example:
        >>> lens = torch.tensor([[600], [0], [256]], dtype=torch.int32)
        >>> get_paged_mqa_logits_metadata(lens, 64, 2).tolist()
        [[0, 0], [0, 2], [3, 0]]
    """
    checks.tensor("context_lens", context_lens, ("B", "n"), torch.int32)
    checks.one_of("block_kv", block_kv, (32, 64))
    checks.integer("num_sms", num_sms, 1, 1 << 16)
    _check_indices(indices)
    if context_lens.numel() == 0:
        return context_lens.new_zeros(num_sms + 1, 2)
    segments = (context_lens.amax(1).clamp(min=0).long() + _SEGMENT - 1) // _SEGMENT
    ends = segments.cumsum(0)
    sms = torch.arange(num_sms + 1, device=ends.device)
    total = ends[-1]
    first = sms * (total // num_sms) + torch.minimum(sms, total % num_sms)
    sequence = torch.searchsorted(ends, first, right=True)
    before = torch.nn.functional.pad(ends, (1, 0))[sequence]
    return torch.stack([sequence, first - before], 1).int()


def _check_indices(indices: object) -> None:
    if indices is not None:
        raise ValueError(
            f"indices must be None: sequences with own numbers of queries are not supported, got "
            f"{checks.shown(indices)}"
        )


@checks.named_errors
def fp8_paged_mqa_logits(
    q: Tensor,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    schedule_meta: Tensor | None,
    max_context_len: int,
    clean_logits: bool = False,
    indices: Tensor | None = None,
) -> Tensor:
    """`fp8_fp4_paged_mqa_logits` for queries in e4m3, given as a tensor.

    Args:
        q: `[B, n, h, D]`, float8_e4m3fn.
        kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len,
            clean_logits: As for `fp8_fp4_paged_mqa_logits`.
        indices: Must be None.

    Returns:
        `[B * n, max_context_len]`, float32.

    Raises:
        TypeError: If an argument has another type or dtype.
        ValueError: If an argument has another shape.
    """
    return fp8_fp4_paged_mqa_logits(
        q, kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len,
        clean_logits, indices=indices,
    )  # fmt: skip


@checks.named_errors
def fp8_fp4_paged_mqa_logits(
    q: Query,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    schedule_meta: Tensor | None,
    max_context_len: int,
    clean_logits: bool = False,
    logits_dtype: torch.dtype = torch.float32,
    indices: Tensor | None = None,
) -> Tensor:
    """The indexer's logits of `n` queries in each sequence, whose keys are in pages.

    The pages of all sequences are copied (`paged_keys`). Then a launch computes the logits of some
    sequences for all of their keys, of which each keeps its own: as many sequences as give 2^24
    logits. To choose keys, `serving.indexer_select_paged` takes all sequences together, and never
    writes more than 256 MiB of logits.

    Args:
        q: `(data, None)`, `[B, n, h, D]` in float8_e4m3fn; or `(data, scales)`: `[B, n, h, 64]` in
            int8 or uint8, packed e2m1, and `[B, n, h]` in int32.
        kv_cache: `[blocks, page, 1, D + 4]`, or with `64 + 4` bytes for e2m1, as for `paged_keys`.
        weights: `[B * n, h]`, float32.
        context_lens: `[B, n]`, int32: how many keys each query has, from the first on.
        block_table: `[B, P]`, int32, with `P * page` at least `max_context_len`.
        schedule_meta: `[num_sms + 1, 2]`, int32, of `get_paged_mqa_logits_metadata`; or None. It
            has no effect.
        max_context_len: The number of columns.
        clean_logits: Whether logits outside of a query's range must be -inf. They always are.
        logits_dtype: float32 or bfloat16.
        indices: Must be None.

    Returns:
        `[B * n, max_context_len]` in `logits_dtype`, rows with stride 1.

    Raises:
        TypeError: If an argument has another type or dtype.
        ValueError: If an argument has another shape.
    """
    _check_indices(indices)
    checks.boolean("clean_logits", clean_logits)
    checks.one_of("logits_dtype", logits_dtype, _LOGITS)
    checks.integer("max_context_len", max_context_len, 0, checks.MOST_SIZE)
    if schedule_meta is not None:
        dims = ("num_sms + 1", "2")
        checks.tensor("schedule_meta", schedule_meta, dims, torch.int32, shape=(None, 2))
    queries, keys, weights, lengths = paged_operands(
        q, kv_cache, weights, context_lens, block_table, max_context_len
    )
    count, each = lengths.shape
    out = weights.new_empty((count, each, max_context_len), dtype=logits_dtype)
    if out.numel() == 0:
        return out.flatten(0, 1)
    num_keys = keys[0].shape[1]
    lengths = lengths.clamp(0, max_context_len)
    weights = weights.unflatten(0, (count, each))
    # Sequences of a launch get logits for each other's keys too: their square is limited.
    step = max(1, math.isqrt(_MOST_OF_SEQUENCES // (each * num_keys)))
    for first in range(0, count, step):
        rows = slice(first, min(first + step, count))
        of_rows = _sequences((queries, keys, weights, lengths), rows)
        flat_queries, flat_keys, flat_weights, ends = of_rows
        start = first_keys(rows.stop - first, each, num_keys, ends)
        logits = attention.indexer_logits(
            flat_queries, flat_keys, flat_weights, start, start + ends, out_dtype=logits_dtype
        )
        by_sequence = logits.view(-1, each, rows.stop - first, num_keys)
        own = by_sequence.diagonal(dim1=0, dim2=2).permute(2, 0, 1)
        out[rows].copy_(own[..., :max_context_len])
    return out.flatten(0, 1)


def paged_operands(
    q: Query,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    max_context_len: int | None = None,
) -> tuple[Any, tuple[Tensor, Tensor], Tensor, Tensor]:
    """Checked operands: queries `[B, n, h, D]`, keys of `paged_keys`, weights and lengths.

    Only the pages that `max_context_len` keys need are copied; None: all of the table.
    """
    queries = _as_query(q, ("B", "n", "h", "D"))
    packed = isinstance(queries, tuple)
    count, each, heads, width = (queries[0] if packed else queries).shape
    if packed and kv_cache.shape[-1] != width + _SCALE_BYTES:
        raise ValueError(
            f"kv_cache must have {width + _SCALE_BYTES} bytes for a key of packed e2m1, got "
            f"{kv_cache.shape[-1]}"
        )
    checks.tensor("weights", weights, ("B * n", "h"), torch.float32, shape=(count * each, heads))
    checks.tensor("context_lens", context_lens, ("B", "n"), torch.int32, shape=(count, each))
    checks.tensor(
        "block_table", block_table, ("B", "P"), (torch.int32, torch.int64), shape=(count, None)
    )
    page = kv_cache.shape[1] if kv_cache.dim() == 4 else 1
    if max_context_len is not None:
        pages = ceil_div(max_context_len, page)
        if pages > block_table.shape[1]:
            raise ValueError(
                f"max_context_len must be at most {block_table.shape[1] * page}, which block_table "
                f"has pages for, got {max_context_len}"
            )
        block_table = block_table[:, :pages]
    keys = paged_keys(kv_cache, block_table, packed)
    return queries, keys, weights.contiguous(), context_lens.contiguous()


def _sequences(operand: Any, rows: slice) -> Any:
    """Sequences of operands, one after another."""
    if isinstance(operand, tuple):
        return tuple(_sequences(part, rows) for part in operand)
    return operand[rows].flatten(0, 1)


def first_keys(count: int, each: int, num_keys: int, like: Tensor) -> Tensor:
    """The first key of each query, where `count` sequences of `num_keys` keys are one."""
    sequences = torch.arange(count, device=like.device, dtype=torch.int32)
    return (sequences * num_keys).repeat_interleave(each, output_size=count * each)


# ---- hyper-connections --------------------------------------------------------------------------


@checks.named_errors
def tf32_hc_prenorm_gemm(
    a: Tensor, b: Tensor, d: Tensor, sqr_sum: Tensor, num_splits: int | None = None
) -> None:
    """Products of rows with the weights of hyper-connections, and the sums of their squares.

    The caller adds up splits; the first one gets everything here, and the others get 0. The sums
    are those of `mhc.mhc_norm_fn_fwd`, whose division is left to the caller.

    Args:
        a: `[T, K]`, bfloat16, contiguous; `K` a multiple of 8.
        b: `[N, K]`, float32, contiguous, up to 128 rows; rounded to TF32.
        d: `[T, N]` or `[S, T, N]`, float32: receives `a @ b.T`.
        sqr_sum: `[T]` or `[S, T]`, float32: receives the sums of the squares of rows of `a`.
        num_splits: `S`; None without this dimension.

    Raises:
        TypeError: If a dtype differs.
        ValueError: If a shape differs.

    Example:
        >>> d, squares = torch.empty(2, 1, 1), torch.empty(2, 1)
        >>> tf32_hc_prenorm_gemm(torch.ones(1, 8).bfloat16(), torch.ones(1, 8), d, squares, 2)
        >>> d.flatten().tolist(), squares.flatten().tolist()
        ([8.0, 0.0], [8.0, 0.0])
    """
    checks.tensor("a", a, ("T", "K"), torch.bfloat16, contiguous=True)
    rows = a.shape[0]
    checks.tensor("b", b, ("N", "K"), torch.float32, shape=(None, a.shape[1]), contiguous=True)
    splits: tuple[int, ...] = ()
    if num_splits is not None:
        splits = (checks.integer("num_splits", num_splits, 1),)
    of_splits = ("S",) * len(splits)
    checks.tensor("d", d, (*of_splits, "T", "N"), torch.float32, shape=(*splits, rows, b.shape[0]))
    checks.tensor("sqr_sum", sqr_sum, (*of_splits, "T"), torch.float32, shape=(*splits, rows))
    _, products, squares = mhc.mhc_norm_fn_fwd(a.unsqueeze(1), b, 0.0)
    for out, value in ((d, products), (sqr_sum, squares)):
        if splits:
            out[1:].zero_()
            out[0].copy_(value)
        else:
            out.copy_(value)


# ---- layouts of scales --------------------------------------------------------------------------


@checks.named_errors
def get_mn_major_tma_aligned_packed_ue8m0_tensor(sf: Tensor) -> Tensor:
    """Scales that are powers of two as packed exponents, in the layout of TMA copies.

    Args:
        sf: `[mn, G]` or `[groups, mn, G]`, float32, powers of two: one for each 128 channels, or
            whatever the product takes.

    Returns:
        `[mn, ceil(G / 4)]` or `[groups, mn, ceil(G / 4)]`, int32, with strides
        `(.., 1, align(mn, 4))`. Byte `i` of word `j` is the exponent of group `4 j + i`, 0 where
        there is none.

    Raises:
        TypeError: If `sf` is not float32.
        ValueError: If `sf` has another number of dimensions.

    Example:
        >>> packed = get_mn_major_tma_aligned_packed_ue8m0_tensor(torch.ones(5, 3))
        >>> packed.shape, packed.stride(), hex(packed[0, 0].item())
        (torch.Size([5, 1]), (1, 8), '0x7f7f7f')
    """
    batched = isinstance(sf, Tensor) and sf.dim() == 3
    checks.tensor("sf", sf, ("groups", "mn", "G") if batched else ("mn", "G"), torch.float32)
    padded = torch.nn.functional.pad(formats.encode_ue8m0(sf.contiguous()), (0, -sf.shape[-1] % 4))
    return get_mn_major_tma_aligned_tensor(formats.bytes_to_words(padded))
