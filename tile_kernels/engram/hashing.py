"""From token ids to rows of the embedding tables."""

from __future__ import annotations

import torch
from torch import Tensor

from tile_kernels.engram.cases.hashing import ENGRAM_HASH, NGRAM_WINDOWS
from tile_kernels.runtime import checks
from tile_kernels.runtime.cases import Cost
from tile_kernels.runtime.launch import Kernel, dtype_name, nonempty
from tile_kernels.runtime.op import op
from tile_kernels.torch import engram as oracles

MOST_WINDOW = 64
MOST_LAYERS = 65535  # the grid's second axis
_IDS = (torch.int32, torch.int64)
_INT32 = (-(2**31), 2**31 - 1)

_WINDOWS = Kernel("tile_kernels.engram.kernels.hashing", "windows")
_HASHES = Kernel("tile_kernels.engram.kernels.hashing", "hashes")


# ---- windows ------------------------------------------------------------------------------------


def _check_windows(
    token_ids: Tensor,
    max_ngram_size: int,
    pad_id: int,
    cu_seqlens: Tensor | None = None,
    token_map: Tensor | None = None,
) -> None:
    texts = isinstance(token_ids, Tensor) and token_ids.dim() == 2
    dims = ("num_texts", "num_tokens") if texts else ("num_tokens",)
    checks.tensor("token_ids", token_ids, dims, _IDS, contiguous=True)
    checks.countable("token_ids", token_ids)
    checks.integer("max_ngram_size", max_ngram_size, 1, MOST_WINDOW)
    checks.integer("pad_id", pad_id, *_INT32)
    if cu_seqlens is not None:
        checks.tensor("cu_seqlens", cu_seqlens, ("num_starts",), _IDS, contiguous=True)
    if token_map is not None:
        checks.tensor("token_map", token_map, ("vocabulary",), _IDS, contiguous=True)


def _check_windows_values(
    token_ids: Tensor,
    max_ngram_size: int,  # noqa: ARG001
    pad_id: int,  # noqa: ARG001
    cu_seqlens: Tensor | None = None,
    token_map: Tensor | None = None,
) -> None:
    if cu_seqlens is not None:
        checks.in_range("cu_seqlens", cu_seqlens, 0, token_ids.numel())
        falls = (cu_seqlens.diff() < 0).nonzero()
        if len(falls):
            raise ValueError(f"cu_seqlens must not decrease, but element {falls[0].tolist()} does")
    if token_map is not None:
        checks.in_range("token_ids", token_ids, 0, token_map.shape[0] - 1)
        checks.in_range("token_map", token_map, *_INT32)


@op(
    check=_check_windows,
    oracle=oracles.ngram_windows,
    cost=lambda token_ids, max_ngram_size, **_: Cost(
        token_ids.numel() * (token_ids.element_size() + 4 * max_ngram_size)
    ),
    cases=NGRAM_WINDOWS,
    values=_check_windows_values,
    differentiable=False,
)
def ngram_windows(
    token_ids: Tensor,
    max_ngram_size: int,
    pad_id: int,
    cu_seqlens: Tensor | None = None,
    token_map: Tensor | None = None,
) -> Tensor:
    """For each token the token itself and those before it in its document.

    | argument | shape | dtype | meaning |
    |---|---|---|---|
    | `token_ids` | `[num_tokens]` or `[num_texts, num_tokens]` | int32, int64 | a row is a text |
    | `max_ngram_size` | | int in `1..64` | columns of a window |
    | `pad_id` | | int of 32 bits | stands before a document |
    | `cu_seqlens` | `[num_starts]` | int32, int64 | where documents start, increasing, flattened |
    | `token_map` | `[vocabulary]` | int32, int64 | the id that stands for each id |
    | returns | `[*token_ids.shape, max_ngram_size]` | int32, contiguous | |

    Column 0 is the token, column `i` the one `i` places before it. From the first column on that
    would lie before the document, or that is `pad_id`, all columns are `pad_id`; so a `pad_id`
    within a text ends a document too. `token_map` applies first (vocabulary compression: several
    ids share one); ids outside of it become `pad_id`. Without it ids keep their lower 32 bits.

    Raises `TypeError` or `ValueError` with the argument's name.

    >>> ngram_windows(torch.tensor([5, 6, 0, 7, 8]), 3, pad_id=0).tolist()
    [[5, 0, 0], [6, 5, 0], [0, 0, 0], [7, 0, 0], [8, 7, 0]]
    """
    out = token_ids.new_empty((*token_ids.shape, max_ngram_size), dtype=torch.int32)
    if nonempty(out):
        # A tensor without elements has no address to give.
        starts = None if cu_seqlens is None or not nonempty(cu_seqlens) else cu_seqlens
        size = 0 if token_map is None else token_map.shape[0]
        if token_map is not None and size == 0:
            return out.fill_(pad_id)
        _WINDOWS.launch(
            (dtype_name(token_ids), max_ngram_size, dtype_name(starts), dtype_name(token_map)),
            token_ids.view(-1), starts, token_map, out.view(-1, max_ngram_size),
            token_ids.shape[-1], pad_id,
        )  # fmt: skip
    return out


# ---- hash ---------------------------------------------------------------------------------------


def _check_hash(
    ngram_token_ids: Tensor, multipliers: Tensor, vocab_sizes: Tensor, offsets: Tensor
) -> None:
    checks.tensor(
        "ngram_token_ids", ngram_token_ids, ("num_tokens", "window"), torch.int32, contiguous=True
    )
    window = ngram_token_ids.shape[1]
    if not 2 <= window <= MOST_WINDOW:
        raise ValueError(f"ngram_token_ids must have 2..{MOST_WINDOW} columns, got {window}")
    checks.tensor(
        "multipliers", multipliers, ("num_layers", "window"), torch.int64, shape=(None, window),
        contiguous=True,
    )  # fmt: skip
    layers = multipliers.shape[0]
    if layers > MOST_LAYERS:
        raise ValueError(f"multipliers must have at most {MOST_LAYERS} layers, got {layers}")
    checks.tensor(
        "vocab_sizes", vocab_sizes, ("num_layers", "orders", "tables"), torch.int32,
        shape=(layers, window - 1, None), contiguous=True,
    )  # fmt: skip
    columns = (window - 1) * vocab_sizes.shape[2]
    checks.tensor(
        "offsets", offsets, ("num_layers", "columns"), _IDS, shape=(layers, columns),
        contiguous=True,
    )  # fmt: skip


def _check_hash_values(
    ngram_token_ids: Tensor,  # noqa: ARG001
    multipliers: Tensor,  # noqa: ARG001
    vocab_sizes: Tensor,
    offsets: Tensor,  # noqa: ARG001
) -> None:
    checks.in_range("vocab_sizes", vocab_sizes, 1, 2**31 - 1)


def _cost_hash(
    ngram_token_ids: Tensor, multipliers: Tensor, vocab_sizes: Tensor, offsets: Tensor
) -> Cost:
    entries = ngram_token_ids.shape[0] * offsets.numel()
    inputs = (ngram_token_ids, multipliers, vocab_sizes, offsets)
    return Cost(
        sum(x.numel() * x.element_size() for x in inputs) + entries * offsets.element_size()
    )


@op(
    check=_check_hash,
    oracle=oracles.engram_hash,
    cost=_cost_hash,
    cases=ENGRAM_HASH,
    values=_check_hash_values,
    differentiable=False,
)
def engram_hash(
    ngram_token_ids: Tensor, multipliers: Tensor, vocab_sizes: Tensor, offsets: Tensor
) -> Tensor:
    """The row that each n-gram has in each table of each layer.

    | argument | shape | dtype | meaning |
    |---|---|---|---|
    | `ngram_token_ids` | `[num_tokens, N]` | int32 | of `ngram_windows`; `N` in `2..64` |
    | `multipliers` | `[num_layers, N]` | int64 | odd numbers, as a rule |
    | `vocab_sizes` | `[num_layers, N - 1, num_tables]` | int32 | rows of each table |
    | `offsets` | `[num_layers, (N - 1) * num_tables]` | int32, int64 | first row of each table |
    | returns | `[num_layers, num_tokens, (N - 1) * num_tables]` | that of `offsets` | |

    All are contiguous. In 64 bits that wrap, with `p_i = id_i * multiplier_i`, the hash of the last
    `i + 1` tokens is `h_i = p_0 ^ ... ^ p_i`. Column `(i - 1) * num_tables + j` is
    `h_i mod vocab_sizes[l, i - 1, j]`, never negative, plus its offset, which wraps in its dtype.
    Take int64 offsets for layers with more than 2^31 rows (`tile_kernels.torch.engram.make_offsets`
    builds them). A table without rows gives its offset.

    Raises `TypeError` or `ValueError` with the argument's name.

    >>> ids = torch.tensor([[5, 7, 11], [-1, 0, 2]], dtype=torch.int32)
    >>> sizes = torch.tensor([[[10, 13], [17, 19]]], dtype=torch.int32)
    >>> offsets = torch.tensor([[0, 10, 23, 40]], dtype=torch.int32)
    >>> engram_hash(ids, torch.tensor([[3, 5, 9]]), sizes, offsets).tolist()
    [[[4, 15, 34, 43], [7, 20, 23, 42]]]
    """
    num_tokens, window = ngram_token_ids.shape
    layers, _, tables = vocab_sizes.shape
    out = offsets.new_empty((layers, num_tokens, (window - 1) * tables))
    if nonempty(out):
        _HASHES.launch(
            (window, tables, dtype_name(offsets)),
            ngram_token_ids, multipliers, vocab_sizes.flatten(1), offsets, out,
        )  # fmt: skip
    return out
