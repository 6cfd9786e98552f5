"""The lightning indexer: scores of keys for each query, and the best keys without the scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tile_kernels import config
from tile_kernels.attention.adapters import in_order
from tile_kernels.attention.cases.indexer import INDEXER_LOGITS, INDEXER_SELECT
from tile_kernels.attention.indexer_topk import MOST_TOPK, check_bound, merge
from tile_kernels.runtime import checks
from tile_kernels.runtime.cases import Cost
from tile_kernels.runtime.launch import Kernel, alignment, dtype_name, nonempty
from tile_kernels.runtime.op import face, gradient, op
from tile_kernels.torch import indexer as oracles
from tile_kernels.torch.indexer import GROUP, Operand

MOST_HEADS = 128
DEPTHS = (32, 64, 128, 256)
OUT_DTYPES = (torch.float32, torch.bfloat16)
SOURCES = {torch.bfloat16: "bfloat16", torch.float8_e4m3fn: "float8_e4m3fn", torch.int8: "e2m1"}
KEYS = 128  # of a tile; shares of the keys are multiples of it, and expanded ones have marks by it
_MOST_SHARE = 32 * KEYS
_MOST_BLOCKS = 65535  # along a side of a grid
_BLOCKS_PER_SM = 4
_MARK_BLOCKS_PER_SM = 8  # that look for what is marked
_LEAST_TILES = 4  # of keys for a list
MOST_SHORT = 1 << 16  # keys of a block that lists have by 16 bits
_MANY_QUERIES = 64  # that are worth expanding keys once before

_EXPAND_KEYS = Kernel("tile_kernels.attention.kernels.indexer_expand", "expand_keys")
_SCORES = Kernel("tile_kernels.attention.kernels.indexer_logits", "score_tiles")
_BEST_KEYS = Kernel("tile_kernels.attention.kernels.indexer_select", "best_keys")


# ---- checks -------------------------------------------------------------------------------------


def check_operands(
    q: Tensor, q_sf: Tensor | None, k: Tensor, k_sf: Tensor | None, weights: Tensor
) -> None:
    """Queries and keys of one format, with the scales of that format, and weights."""
    formats = tuple(SOURCES)
    checks.tensor("q", q, ("T", "h", "D"), formats, contiguous=True)
    checks.tensor("k", k, ("S", "D"), q.dtype, contiguous=True)
    per = 2 if q.dtype == torch.int8 else 1
    tokens, heads, depth = q.shape[0], q.shape[1], q.shape[2] * per
    if not 1 <= heads <= MOST_HEADS:
        raise ValueError(f"q must have 1..{MOST_HEADS} heads, got {heads}")
    if depth not in DEPTHS:
        listed = ", ".join(map(str, DEPTHS))
        raise ValueError(f"q must have {listed} channels, got {depth}")
    checks.tensor("k", k, ("S", "D"), shape=(None, q.shape[2]))
    checks.tensor(
        "weights", weights, ("T", "h"), torch.float32, shape=(tokens, heads), contiguous=True
    )
    if q.dtype == torch.int8:
        groups = depth // GROUP
        for name, sf, data in (("q", q_sf, q), ("k", k_sf, k)):
            if sf is None:
                raise TypeError(f"{name} in e2m1 must be a tuple of data and exponents")
            dims = ("T", "h", "D / 32")[-data.dim() :]
            checks.tensor(
                f"{name}'s exponents", sf, dims, torch.uint8, shape=(*data.shape[:-1], groups),
                contiguous=True,
            )  # fmt: skip
        return
    if q_sf is not None:
        raise TypeError(f"q in {dtype_name(q)} must be a tensor alone; weights hold its scale")
    if q.dtype == torch.bfloat16:
        if k_sf is not None:
            raise TypeError("k in bfloat16 must be a tensor alone")
        return
    if k_sf is None:
        raise TypeError("k in float8_e4m3fn must be a tuple of data and scales")
    checks.tensor("k's scales", k_sf, ("S",), torch.float32, shape=(k.shape[0],), contiguous=True)


def pair(name: str, value: Any) -> tuple[Tensor, Tensor | None]:
    """The data and the scales of an operand, or a plain one and None."""
    if isinstance(value, Tensor):
        return value, None
    if isinstance(value, tuple) and len(value) == 2 and all(isinstance(t, Tensor) for t in value):
        return value
    parts = value if isinstance(value, tuple) else (value,)
    given = ", ".join(type(part).__name__ for part in parts)
    raise TypeError(f"{name} must be a tensor, or a tuple of data and scales, got ({given})")


def _check_ranged(*arguments: Any) -> None:
    """Operands, and the range of keys of each query."""
    *operands, start, end = arguments
    check_operands(*operands)
    num_queries = operands[0].shape[0]
    check_bound("start", start, num_queries)
    check_bound("end", end, num_queries)


# ---- what kernels see ---------------------------------------------------------------------------


def joined(oracle: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`oracle` with data and scales of operands one after the other, as the dispatcher has them."""

    def split(q: Tensor, q_sf: Tensor | None, k: Tensor, k_sf: Tensor | None, *rest: Any) -> Tensor:
        queries = q if q_sf is None else (q, q_sf)
        return oracle(queries, k if k_sf is None else (k, k_sf), *rest)

    return split


def rows_of(data: Tensor) -> Tensor:
    """Rows, or scales, at a multiple of 16 bytes, eight codes of e2m1 as one word."""
    placed = data if alignment(data) == 16 else data.clone()
    return placed.view(torch.uint32) if data.dtype == torch.int8 else placed


def share_of_keys(num_queries: int, num_keys: int, device: torch.device) -> int:
    """Keys of a block: many, so that its queries are worth loading, but work for all SMs."""
    if isinstance(num_queries, torch.SymInt) or isinstance(num_keys, torch.SymInt):
        return KEYS
    sms = config.get_device_num_sms(device if device.type == "cuda" else None)
    shares = -(-_BLOCKS_PER_SM * sms * 2 // max(1, num_queries))
    tiles = -(-num_keys // KEYS)
    most = max(_MOST_SHARE // KEYS, -(-tiles // _MOST_BLOCKS))
    return KEYS * max(1, min(most, -(-tiles // shares)))


def queries_of_block(num_queries: int, shares: int, device: torch.device) -> int:
    """Queries whose marks a block looks at: many, so that none marked takes no time."""
    if isinstance(num_queries, torch.SymInt) or isinstance(shares, torch.SymInt):
        return 1
    sms = config.get_device_num_sms(device if device.type == "cuda" else None)
    return max(1, num_queries * shares // (_MARK_BLOCKS_PER_SM * sms))


def expanded(k: Tensor, k_sf: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Keys of e2m1 as e4m3, their factors, and the marks of tiles that e4m3 cannot hold."""
    num_keys, depth = k.shape[0], 2 * k.shape[1]
    data = k.new_empty((1, num_keys, depth), dtype=torch.float8_e4m3fn)
    factors = k.new_empty((1, num_keys), dtype=torch.float32)
    marks = k.new_empty((-(-num_keys // KEYS), 1), dtype=torch.int32)
    _EXPAND_KEYS.launch((depth,), rows_of(k), k_sf, data, factors, marks)
    return data[0], factors[0], marks


def score(
    kernel: Kernel,
    problem: Callable[[str, str], tuple[Any, ...]],
    q: Tensor,
    q_sf: Tensor | None,
    k: Tensor,
    k_sf: Tensor | None,
    *rest: Any,
) -> None:
    """Launch `kernel` once; for e2m1 in e4m3, and in bfloat16 for what that cannot do exactly.

    `problem(of_keys, role)` is that of keys in a format and of the blocks that a launch does. All
    are planned before the first, so that what does not fit raises before anything has run.
    """
    source = SOURCES[q.dtype]
    many = not isinstance(q.shape[0], torch.SymInt) and q.shape[0] >= _MANY_QUERIES
    kinds = [(source, "all")]
    if source == "e2m1":
        kinds = [("float8_e4m3fn" if many else source, "marking"), (source, "marked")]
    for kind in kinds:
        kernel.prepare(problem(*kind), q)
    scales = rows_of(k_sf) if source == "float8_e4m3fn" and k_sf is not None else k_sf
    for kind in kinds:
        keys = (rows_of(k), scales, None) if kind[0] == source else expanded(k, k_sf)
        kernel.launch(problem(*kind), rows_of(q), q_sf, *keys, *rest)


def shares_to_select(num_queries: int, num_keys: int, device: torch.device) -> tuple[int, int]:
    """Keys of a block that selects, and how many blocks share the keys.

    One block has all of them, unless there are too few queries for all SMs. The lists that blocks
    leave are then at most those of `_BLOCKS_PER_SM` queries for each SM.
    """
    if isinstance(num_queries, torch.SymInt) or isinstance(num_keys, torch.SymInt):
        return KEYS, 1
    sms = config.get_device_num_sms(device if device.type == "cuda" else None)
    tiles = max(1, -(-num_keys // KEYS))
    shares = min(_BLOCKS_PER_SM * sms // max(1, num_queries), tiles // _LEAST_TILES)
    share = -(-tiles // max(1, shares))
    return KEYS * share, -(-tiles // share)


# ---- logits -------------------------------------------------------------------------------------


def _flops(q: Tensor, num_keys: int) -> int:
    per = 2 if q.dtype == torch.int8 else 1
    return 2 * q.numel() * per * num_keys


def _operand_bytes(*operands: Any) -> int:
    return sum(
        part.numel() * part.element_size()
        for operand in operands
        for part in (operand if isinstance(operand, tuple) else (operand,))
    )


def _cost_logits(
    q: Operand,
    k: Operand,
    weights: Tensor,
    start: Tensor,
    end: Tensor,
    out_dtype: torch.dtype = torch.float32,
) -> Cost:
    queries, keys = pair("q", q)[0], pair("k", k)[0]
    written = queries.shape[0] * keys.shape[0] * out_dtype.itemsize
    return Cost(_operand_bytes(q, k, weights, start, end) + written, _flops(queries, keys.shape[0]))


def _check_logits(*arguments: Any) -> None:
    *ranged, out_dtype = arguments
    _check_ranged(*ranged)
    checks.one_of("out_dtype", out_dtype, OUT_DTYPES)


@op(
    check=_check_logits,
    oracle=joined(in_order(oracles.indexer_logits)),
    cost=_cost_logits,
    cases=INDEXER_LOGITS,
    name="indexer_logits",
)
def _logits(
    q: Tensor,
    q_sf: Tensor | None,
    k: Tensor,
    k_sf: Tensor | None,
    weights: Tensor,
    start: Tensor,
    end: Tensor,
    out_dtype: torch.dtype,
) -> Tensor:
    num_queries, num_keys = q.shape[0], k.shape[0]
    out = weights.new_empty((num_queries, num_keys), dtype=out_dtype)
    if nonempty(out):
        source, heads = SOURCES[q.dtype], q.shape[1]
        depth = q.shape[2] * (2 if source == "e2m1" else 1)
        share = share_of_keys(num_queries, num_keys, q.device)
        shares = -(-num_keys // share)
        marks = end.new_empty((num_queries, shares)) if source == "e2m1" else None
        together = queries_of_block(num_queries, shares, q.device)
        score(
            _SCORES,
            lambda of_keys, role: (source, of_keys, heads, depth, dtype_name(out), role),
            q, q_sf, k, k_sf, weights, start, end, marks, out, share, together,
        )  # fmt: skip
    return out


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    q, _, k, k_sf, weights, start, end, _ = inputs
    ctx.save_for_backward(q, k, k_sf, weights, start, end)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """All keys of a query's range are selected ones."""
    from tile_kernels.attention.indexer_gradient import indexer_logits_bwd  # imports this module

    if ctx.needs_input_grad[3]:
        raise RuntimeError("indexer_logits: the scales of k have no gradient; detach them")
    q, k, k_sf, weights, start, end = ctx.saved_tensors
    inside = oracles.in_range(start, end, k.shape[0])
    keys = torch.arange(k.shape[0], device=q.device, dtype=torch.int32)
    indices = torch.where(inside, keys, -1)
    of_q, of_k, of_weights = indexer_logits_bwd(
        q, k if k_sf is None else (k, k_sf), weights, indices, grad.float().contiguous()
    )
    return of_q.to(q.dtype), None, of_k.to(k.dtype), None, of_weights, None, None, None


gradient(_logits, _backward, setup_context=_save)


@face(_logits, oracle=oracles.indexer_logits)
def indexer_logits(
    q: Operand,
    k: Operand,
    weights: Tensor,
    start: Tensor,
    end: Tensor,
    *,
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """How much each key matters to each query: the logits of the lightning indexer.

    | argument | shape | dtype |
    |---|---|---|
    | `q` | `[T, h, D]` | float8_e4m3fn (its scale folded into `weights`) or bfloat16 |
    | | or `(data [T, h, D / 2], exponents [T, h, D / 32])` | int8 (packed e2m1), uint8 (ue8m0) |
    | `k` | `(data [S, D], scales [S])` | float8_e4m3fn, float32 |
    | | or `(data [S, D / 2], exponents [S, D / 32])` | int8, uint8 |
    | | or `[S, D]` | bfloat16 |
    | `weights` | `[T, h]` | float32 |
    | `start`, `end` | `[T]`: keys `start <= s < end` count | int32 |
    | `out_dtype` | float32 or bfloat16 | |
    | returns | `[T, S]` | `out_dtype` |

    All contiguous, `q` and `k` of one format; `h` in `1..128`, `D` 32, 64, 128 or 256.

        logits[t, s] = k_sf[s] * sum over h of weights[t, h] * relu(q[t, h] . k[s])

    summed in float32, and -inf outside of the query's range, which is cut to `0..S`. `k_sf` is 1
    where keys have no scales of their own. A NaN in a row makes its logits NaN, and so does the
    exponent 255; the exponent 0 stands for 0. Weights times the scales of e2m1 must be finite
    numbers of float32. An infinity of bfloat16 gives infinities or NaN.

    Raises `TypeError` or `ValueError` with the argument's name.

    >>> q, k = torch.zeros(1, 2, 32).bfloat16(), torch.zeros(3, 32).bfloat16()
    >>> q[0, :, 0], k[:, 0] = torch.tensor([1, -1]), torch.tensor([1, -2, 3])
    >>> weights, ends = torch.tensor([[0.5, 2.0]]), torch.tensor([0, 2]).int()
    >>> indexer_logits(q, k, weights, ends[:1], ends[1:]).tolist()
    [[0.5, 4.0, -inf]]
    """
    return _logits(*pair("q", q), *pair("k", k), weights, start, end, out_dtype)


# ---- selection ----------------------------------------------------------------------------------


def _check_select(*arguments: Any) -> None:
    *ranged, topk = arguments
    _check_ranged(*ranged)
    checks.integer("topk", topk, 1, MOST_TOPK)


def _cost_select(q: Operand, k: Operand, weights: Tensor, topk: int, **_: Any) -> Cost:
    queries, keys = pair("q", q)[0], pair("k", k)[0]
    return Cost(
        _operand_bytes(q, k, weights) + 4 * queries.shape[0] * (topk + 2),
        _flops(queries, keys.shape[0]),
    )


@op(
    check=_check_select,
    oracle=joined(oracles.indexer_select),
    cost=_cost_select,
    cases=INDEXER_SELECT,
    differentiable=False,
    name="indexer_select",
)
def _select(
    q: Tensor,
    q_sf: Tensor | None,
    k: Tensor,
    k_sf: Tensor | None,
    weights: Tensor,
    start: Tensor,
    end: Tensor,
    topk: int,
) -> Tensor:
    out = end.new_empty((q.shape[0], topk))
    if not nonempty(k):
        out.fill_(-1)
    elif nonempty(out):
        source, heads, num_queries = SOURCES[q.dtype], q.shape[1], q.shape[0]
        depth = q.shape[2] * (2 if source == "e2m1" else 1)
        share, shares = shares_to_select(num_queries, k.shape[0], q.device)
        marks = end.new_empty((num_queries, shares)) if source == "e2m1" else None
        together = queries_of_block(num_queries, shares, q.device)
        names = out.view(num_queries, 1, topk)
        scores = None
        if shares > 1:
            names = end.new_empty((num_queries, shares, topk))
            scores = torch.empty_like(names, dtype=torch.uint32)
        short, partial = share <= MOST_SHORT, scores is not None
        score(
            _BEST_KEYS,
            lambda of_keys, role: (source, of_keys, heads, depth, topk, short, partial, role),
            q, q_sf, k, k_sf, weights, start, end, marks, names, scores, share, together,
        )  # fmt: skip
        if scores is not None:
            merge(scores.view(num_queries, -1), names.view(num_queries, -1), out)
    return out


@face(_select, oracle=oracles.indexer_select)
def indexer_select(
    q: Operand,
    k: Operand,
    weights: Tensor,
    start: Tensor | None = None,
    end: Tensor | None = None,
    topk: int | None = None,
) -> Tensor:
    """The keys that matter most to each query: `indexer_topk` of `indexer_logits`, without those.

    | argument | shape | dtype |
    |---|---|---|
    | `q`, `k`, `weights` | those of `indexer_logits` | |
    | `start`, `end` | those of `indexer_logits`; by default all keys count | |
    | `topk` | `1..4096`, also above `S`; must be given | int |
    | returns | `[T, topk]` | int32 |

    Indices in ascending order, -1 where a query has fewer keys in its range. Exact for the float32
    logits, of equal ones the smaller index; NaN is -inf. The logits exist a tile at a time, in the
    memory of a multiprocessor: nothing of the size `[T, S]` is allocated. Few queries share the
    keys among blocks, whose lists, some megabytes at most, are merged. Deterministic.

    Raises `TypeError` or `ValueError` with the argument's name.

    >>> q, k = torch.zeros(1, 2, 32).bfloat16(), torch.zeros(3, 32).bfloat16()
    >>> q[0, :, 0], k[:, 0] = torch.tensor([1, -1]), torch.tensor([1, -2, 3])
    >>> weights, ends = torch.tensor([[0.5, 2.0]]), torch.tensor([0, 3]).int()
    >>> indexer_select(q, k, weights, ends[:1], ends[1:], 2).tolist()
    [[1, 2]]
    >>> indexer_select(q, k, weights, topk=1).tolist()
    [[1]]
    """
    data, scales = pair("k", k)
    checks.tensor("k", data, ("S", "D"))
    checks.tensor("weights", weights, ("T", "h"))
    start, end = oracles.bound(start, weights, 0), oracles.bound(end, weights, data.shape[0])
    return _select(*pair("q", q), data, scales, weights, start, end, topk)  # type: ignore[arg-type]
