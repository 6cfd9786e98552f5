"""What the indexer's operators share: checks of queries and keys, and launches that score them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tile_kernels import config
from tile_kernels.attention.indexer_plan import (
    ALL,
    E2M1,
    E4M3,
    GROUP,
    KEYS,
    MARKED,
    MARKING,
    plan_expand,
)
from tile_kernels.attention.logits.plan import plan as plan_logits
from tile_kernels.attention.topk.plan import PART, plan_parts
from tile_kernels.attention.topk.plan import plan as plan_topk
from tile_kernels.runtime import checks
from tile_kernels.runtime.declaration import (
    ALIGNMENT,
    Launch,
    Out,
    Spec,
    alignment,
    dtype_name,
    row_alignment,
)
from tile_kernels.runtime.launch import Kernel

MAX_HEADS = 128
MAX_TOPK = 4096
DEPTHS = (32, 64, 128, 256)
SOURCES = {torch.bfloat16: "bfloat16", torch.float8_e4m3fn: E4M3, torch.int8: E2M1}
MAX_SHARE = 32 * KEYS
MAX_BLOCKS = 65535  # along a side of a grid
BLOCKS_PER_SM = 4
MANY_QUERIES = 64
BLOCK_QUERIES = 8  # of 64 heads, in a pipelined block
MAX_SHARES = 16  # that are tried where queries alone fill all SMs
# In tiles of 128 keys. A CUDA prototype on an H200, 4096 queries x 65536 keys: 8 shares of the keys
# take 50 us longer than 4, of 3800.
BEGIN_TILES = 2
MARK_BLOCKS_PER_SM = 8  # that search for marks
MIN_TILES = 4  # of keys for a list
MIN_QUERIES_TO_EXPAND = 64  # that are worth expanding keys once before

_EXPAND_KEYS = Kernel("tile_kernels.attention.score_primitives", "expand_keys", plan_expand)
_SCORES = Kernel("tile_kernels.attention.logits.kernel", "score_tiles", plan_logits)
BEST_OF_ROWS = Kernel("tile_kernels.attention.topk.kernel", "best_of_rows", plan_topk)
_BEST_OF_PARTS = Kernel("tile_kernels.attention.topk.kernel", "best_of_parts", plan_parts)

# ---- arguments ----------------------------------------------------------------------------------


def by_field(formula: Callable[..., Tensor], *names: str) -> Callable[..., Tensor]:
    """A reference that takes operands in two fields each; the last ones go to it by `names`."""

    def call(q: Tensor, q_sf: Any, k: Tensor, k_sf: Any, *rest: Any) -> Tensor:
        count = len(rest) - len(names)
        by_name = dict(zip(names, rest[count:]))
        return formula(joined(q, q_sf), joined(k, k_sf), *rest[:count], **by_name)

    return call


def pair(value: Any) -> tuple[Any, Any]:
    """The data and the scales of an operand, or a plain one and None; `check_operands` raises."""
    if isinstance(value, tuple) and len(value) == 2 and value[1] is not None:
        return value
    return value, None


def joined(data: Tensor, sf: Tensor | None) -> Tensor | tuple[Tensor, Tensor]:
    """The operand that `pair` took apart."""
    return data if sf is None else (data, sf)


def _check_pair(name: str, data: Any, sf: Any) -> None:
    if isinstance(data, Tensor) and (sf is None or isinstance(sf, Tensor)):
        return
    parts = data if isinstance(data, tuple) else (data,) if sf is None else (data, sf)
    given = ", ".join(type(part).__name__ for part in parts)
    raise TypeError(f"{name} must be a tensor, or a tuple of data and scales, got ({given})")


def check_operands(
    q: Tensor, q_sf: Tensor | None, k: Tensor, k_sf: Tensor | None, weights: Tensor
) -> None:
    """Queries and keys of one format, with the scales of that format, and weights."""
    _check_pair("q", q, q_sf)
    _check_pair("k", k, k_sf)
    checks.tensor("k", k, ("S", "D"))  # its dtype follows from q
    checks.tensor("q", q, ("T", "h", "D"), tuple(SOURCES), contiguous=True)
    checks.tensor("k", k, ("S", "D"), q.dtype, contiguous=True)
    tokens, heads, _ = q.shape
    depth = num_channels(q)
    if not 1 <= heads <= MAX_HEADS:
        raise ValueError(f"q must have 1..{MAX_HEADS} heads, got {heads}")
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


def check_bound(name: str, value: object, num_queries: int) -> None:
    """The first key of each query, or the one after its last."""
    checks.tensor(name, value, ("T",), torch.int32, shape=(num_queries,), contiguous=True)


# ---- cost ---------------------------------------------------------------------------------------


def num_channels(q: Any) -> int:
    """Channels of a query, of which packed e2m1 has two in a byte."""
    return q.shape[2] * (2 if q.dtype == torch.int8 else 1)


def score_flops(q: Tensor, num_keys: int) -> int:
    """Operations of all products of queries and keys."""
    return 2 * q.shape[0] * q.shape[1] * num_channels(q) * num_keys


def operand_bytes(*operands: Any) -> int:
    """Bytes of tensors, and of pairs of them."""
    return sum(
        part.numel() * part.element_size()
        for operand in operands
        for part in (operand if isinstance(operand, tuple) else (operand,))
    )


# ---- how blocks share the work ------------------------------------------------------------------


def _num_sms(device: torch.device) -> int:
    return config.get_device_num_sms(device if device.type == "cuda" else None)


def are_many(num_queries: int) -> bool:
    """Whether pipelined blocks score the queries, where there are such."""
    return num_queries >= MANY_QUERIES


def share_of_keys(num_queries: int, num_keys: int, many: bool, device: torch.device) -> int:
    """Keys of a block: many, so that its queries are worth loading, but work for all SMs.

    `many`: blocks are pipelined, where there are such.
    """
    if many:
        return _balanced_share(num_queries, num_keys, device)
    shares = -(-BLOCKS_PER_SM * _num_sms(device) * 2 // max(1, num_queries))
    tiles = -(-num_keys // KEYS)
    most = max(MAX_SHARE // KEYS, -(-tiles // MAX_BLOCKS))
    return KEYS * max(1, min(most, -(-tiles // shares)))


def _balanced_share(num_queries: int, num_keys: int, device: torch.device) -> int:
    """Keys of a block that has an SM to itself: of the shares with which blocks fill all SMs about
    equally often, the one with the least time, where a block begins in that of some tiles."""
    blocks, sms = -(-num_queries // BLOCK_QUERIES), _num_sms(device)
    tiles = max(1, -(-num_keys // KEYS))
    fewest = -(-tiles // MAX_BLOCKS)
    most = max(fewest, min(tiles, max(MAX_SHARES, 2 * sms // blocks)))

    def time(shares: int) -> int:
        return -(-blocks * shares // sms) * (-(-tiles // shares) + BEGIN_TILES)

    return KEYS * -(-tiles // min(range(fewest, most + 1), key=time))


def queries_per_block(num_queries: int, shares: int, device: torch.device) -> int:
    """Queries whose marks a block reads: many, so that it takes no time if none is marked."""
    return max(1, num_queries * shares // (MARK_BLOCKS_PER_SM * _num_sms(device)))


def shares_to_select(num_queries: int, num_keys: int, device: torch.device) -> tuple[int, int]:
    """Keys of a block that selects, and how many blocks share the keys.

    One block has all of them, unless there are too few queries for all SMs. The lists that blocks
    leave are then at most those of `BLOCKS_PER_SM` queries for each SM.
    """
    tiles = max(1, -(-num_keys // KEYS))
    shares = min(BLOCKS_PER_SM * _num_sms(device) // max(1, num_queries), tiles // MIN_TILES)
    share = -(-tiles // max(1, shares))
    return KEYS * share, -(-tiles // share)


# ---- launches -----------------------------------------------------------------------------------


def aligned(data: Any) -> Any:
    """Data or scales at a multiple of 16 bytes, eight codes of e2m1 as one word."""
    placed = data if alignment(data) == 16 else data.clone()
    return placed.view(torch.uint32) if data.dtype == torch.int8 else placed


def score_scratch(q: Any, k: Any, shares: int) -> tuple[Out, ...]:
    """What `score` needs for packed e2m1, where `shares` blocks share the keys.

    These are marks of blocks that are not exact and, for many queries, keys as e4m3, their factors,
    and the marks of tiles that e4m3 cannot hold.
    """
    if q.dtype != torch.int8:
        return ()
    num_queries, num_keys = q.shape[0], k.shape[0]
    marks = Out("marks", (num_queries, shares), torch.int32)
    if num_queries < MIN_QUERIES_TO_EXPAND:
        return (marks,)
    return (
        marks,
        Out("keys", (1, num_keys, 2 * k.shape[1]), torch.float8_e4m3fn),
        Out("factors", (1, num_keys), torch.float32),
        Out("key_marks", (-(-num_keys // KEYS), 1), torch.int32),
    )


def score(
    kernel: Kernel,
    problem: tuple[Any, ...],
    operands: Sequence[Any],
    scratch: Sequence[Spec],
    results: Sequence[Any],
) -> list[Launch]:
    """Launches `kernel`; for e2m1 in e4m3, and in bfloat16 for what e4m3 cannot compute exactly.

    `problem` is the part of the kernel's problem between formats and sizes of the operands, and the
    role of the launch. `operands` are q, q_sf, k, k_sf, weights, start and end; `scratch` is that
    of `score_scratch`; `results` are the other arguments of the kernel.
    """
    q, q_sf, k, k_sf, *rest = operands
    source, heads, depth = SOURCES[q.dtype], q.shape[1], num_channels(q)
    scales = aligned(k_sf) if source == E4M3 else k_sf
    keys = (aligned(k), scales, None)
    marks, *expanded = scratch or (None,)

    def launch(key_format: str, role: str, keys: tuple[Any, ...]) -> Launch:
        arguments = (aligned(q), q_sf, *keys, *rest, marks, *results)
        return Launch(kernel, (source, key_format, heads, depth, *problem, role), arguments)

    if source != E2M1:
        return [launch(source, ALL, keys)]
    exact = launch(source, MARKED, keys)
    if not expanded:
        return [launch(source, MARKING, keys), exact]
    data, factors, key_marks = expanded
    expand = Launch(_EXPAND_KEYS, (depth,), (aligned(k), k_sf, data, factors, key_marks))
    e4m3_keys = (data.view(-1, depth), factors.view(-1), key_marks)
    return [expand, launch(E4M3, MARKING, e4m3_keys), exact]


def score_all(
    operands: Sequence[Any],
    scratch: Sequence[Spec],
    logits: Spec,
    share: Any,
    block_queries: Any,
    many: Any,
) -> list[Launch]:
    """Writes the logits of all keys; the first two arguments are those of `score`, and `many` is
    that of `share_of_keys`."""
    results = (logits, share, block_queries)
    return score(_SCORES, (dtype_name(logits), many), operands, scratch, results)


def parts_scratch(num_rows: int, num_columns: int, topk: int) -> tuple[Out, ...]:
    """The lists that `best_of_parts` leaves between its launches: names and keys of each."""
    lists: list[Out] = []
    while (parts := -(-num_columns // PART)) > 1:
        shape = (num_rows, parts, topk)
        lists += [Out("names", shape, torch.int32), Out("keys", shape, torch.uint32)]
        num_columns = parts * topk
    return tuple(lists)


def best_of_parts(
    logits: Spec, start: Spec, end: Spec, out: Spec, scratch: Sequence[Spec]
) -> list[Launch]:
    """Chooses the best of few long rows of logits; `scratch` is that of `parts_scratch`."""
    num_rows, topk = out.shape
    last = out.view(num_rows, 1, topk)
    launches = []
    names: Spec | None = None
    for i in range(0, len(scratch) + 2, 2):
        lists = (*scratch, last, last.view(torch.uint32))[i : i + 2]
        problem = (topk, dtype_name(logits), row_alignment(logits) == ALIGNMENT)
        launches.append(Launch(_BEST_OF_PARTS, problem, (logits, start, end, names, *lists)))
        names, logits = (part.view(num_rows, -1) for part in lists)
    return launches


def merge(keys: Spec, names: Spec, out: Spec) -> Launch:
    """Chooses the best of `keys`, 0 for none, `[T, n]`; writes their `names` into `out`."""
    topk = out.shape[1]  # which divides the columns, whatever the number of lists
    problem = (topk, dtype_name(keys), keys.element_size(), topk, topk, 16, False, False)
    return Launch(BEST_OF_ROWS, problem, (keys, None, None, names, out))
