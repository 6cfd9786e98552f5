"""`attention_indices`: lists of rows for attention, a window and selected entries."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tile_kernels.attention import softmax
from tile_kernels.attention.indices import reference
from tile_kernels.attention.indices.plan import plan
from tile_kernels.runtime import checks
from tile_kernels.runtime.cases import Cost
from tile_kernels.runtime.declaration import Launch, Out, Spec
from tile_kernels.runtime.launch import Kernel
from tile_kernels.runtime.operator import Operator

_LIST_ROWS = Kernel("tile_kernels.attention.indices.kernel", "list_rows", plan)


class Arguments(NamedTuple):
    selected: Tensor | None
    cu_seqlens: Tensor
    window: int
    ratio: int
    num_tokens: int
    entry_offset: int

    def check(self) -> None:
        checks.integer("num_tokens", self.num_tokens, 0, checks.MOST_SIZE)
        if self.selected is not None:
            checks.tensor(
                "selected", self.selected, ("T", "k"), torch.int32,
                shape=(self.num_tokens, None), unit_inner_stride=True,
            )  # fmt: skip
        softmax.check_sequences(
            self.cu_seqlens, self.ratio, self.window, with_entries=self.selected is not None
        )
        checks.integer("entry_offset", self.entry_offset, 0, checks.MOST_SIZE)

    def check_values(self) -> None:
        softmax.check_bounds(self.cu_seqlens, self.num_tokens)

    def outputs(self) -> tuple[Out, Out]:
        width = self.window + (0 if self.selected is None else self.selected.shape[1])
        return (
            Out("indices", (self.num_tokens, width), torch.int32),
            Out("lengths", (self.num_tokens,), torch.int32),
        )

    def launches(self, indices: Spec, lengths: Spec) -> Launch | None:
        if lengths.numel() == 0:
            return None
        selected: Any = self.selected
        if selected is not None and selected.numel() == 0:
            selected = None
        numbers = (self.window, self.ratio if selected is not None else 0, self.entry_offset)
        tensors = (selected, self.cu_seqlens, indices, lengths)
        return Launch(_LIST_ROWS, (selected is not None,), (*tensors, *numbers))


def _reference(
    selected: Tensor | None,
    cu_seqlens: Tensor,
    window: int,
    ratio: int,
    num_tokens: int,
    entry_offset: int,
) -> tuple[Tensor, Tensor]:
    return reference.attention_indices(
        selected, cu_seqlens, window=window, ratio=ratio, num_tokens=num_tokens,
        entry_offset=entry_offset,
    )  # fmt: skip


def cost(
    selected: Tensor | None,
    cu_seqlens: Tensor,
    window: int = 128,
    num_tokens: int | None = None,
    **_: Any,
) -> Cost:
    count = 0 if selected is None else selected.numel()
    if num_tokens is None:
        num_tokens = 0 if selected is None else selected.shape[0]
    return Cost(4 * (2 * count + num_tokens * (window + 1) + cu_seqlens.numel()))


ATTENTION_INDICES = Operator(
    "attention.attention_indices",
    Arguments,
    reference=_reference,
    cost=cost,
    differentiable=False,
)


@ATTENTION_INDICES.public(reference=reference.attention_indices)
def attention_indices(
    selected: Tensor | None,
    cu_seqlens: Tensor,
    *,
    window: int = 128,
    ratio: int = 4,
    num_tokens: int | None = None,
    entry_offset: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Lists the rows that each query attends to: its window of tokens, then its selected entries.

    They are row numbers of one tensor that has the rows of all tokens, and compressed entries from
    row `entry_offset` on, for `sparse_attention`. The window of the token at position `t` of a
    sequence has the tokens `t - window + 1..t` of that sequence. Entries are numbered through all
    sequences, as `indexer_select` returns them with the ranges of `indexer_ranges`. An entry that
    the token may not see is left out: one of another sequence, or whose tokens are not all there,
    and so is -1. Tokens outside of all sequences get nothing. A list has no holes: its
    length is the number of its rows, and the rest of it is -1.

    Args:
        selected: `[T, k]`, int32, any stride between rows: the entries of each query, -1 for none.
            None: windows alone.
        cu_seqlens: `[B + 1]`, int32, contiguous: where sequences begin, and the end of the last. It
            is read on its device; the host does not wait for it.
        window: Tokens of a window, the query's own included, in `1..65536`.
        ratio: Tokens of an entry, at least 1; 0 is allowed without `selected`.
        num_tokens: `T`, needed without `selected`.
        entry_offset: The row of the first entry; by default `T`, right after the tokens.

    Returns:
        `(indices, lengths)`, int32: `[T, window + k]`, the window's rows in ascending order, then
        the entries in the order of `selected`; and `[T]`. These are `indices` and `topk_length` of
        `sparse_attention`.

    Raises:
        TypeError: If an argument has another type or dtype, or `num_tokens` is missing.
        ValueError: If an argument has another shape or stride, or a number is out of range.

    Example:
        >>> selected = torch.tensor([[-1, -1], [0, -1], [0, -1], [0, 1]], dtype=torch.int32)
        >>> sequences = torch.tensor([0, 4], dtype=torch.int32)
        >>> indices, lengths = attention_indices(selected, sequences, window=2, ratio=2)
        >>> indices.tolist()
        [[0, -1, -1, -1], [0, 1, 4, -1], [1, 2, 4, -1], [2, 3, 4, 5]]
        >>> lengths.tolist()
        [1, 3, 3, 4]
    """
    ATTENTION_INDICES.require(_check_count, selected, num_tokens)
    count: Any = selected.shape[0] if num_tokens is None else num_tokens  # type: ignore[union-attr]
    offset = count if entry_offset is None else entry_offset
    return ATTENTION_INDICES(selected, cu_seqlens, window, ratio, count, offset)


def _check_count(selected: Any, num_tokens: Any) -> None:
    """The number of tokens is known: from `selected`, if it has rows."""
    if num_tokens is not None:
        return
    if selected is None:
        raise TypeError("num_tokens must be given without selected")
    checks.tensor("selected", selected, ("T", "k"))
