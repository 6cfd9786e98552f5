"""`ngram_windows`: for each token the token itself and those before it in its document."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tile_kernels.engram.ngram import reference
from tile_kernels.engram.ngram.plan import plan
from tile_kernels.runtime import checks
from tile_kernels.runtime.cases import Cost
from tile_kernels.runtime.declaration import Host, Launch, Out, Size, Spec, dtype_name
from tile_kernels.runtime.launch import Kernel
from tile_kernels.runtime.operator import Operator

MAX_WINDOW = 64
_DTYPES = (torch.int32, torch.int64)
_INT32_RANGE = (-(2**31), 2**31 - 1)

_WINDOWS = Kernel("tile_kernels.engram.ngram.kernel", "windows", plan)


class Arguments(NamedTuple):
    token_ids: Tensor
    max_ngram_size: int
    pad_id: int
    cu_seqlens: Tensor | None
    token_map: Tensor | None

    def check(self) -> None:
        texts = isinstance(self.token_ids, Tensor) and self.token_ids.dim() == 2
        dims = ("num_texts", "num_tokens") if texts else ("num_tokens",)
        checks.tensor("token_ids", self.token_ids, dims, _DTYPES, contiguous=True)
        checks.countable("token_ids", self.token_ids)
        checks.integer("max_ngram_size", self.max_ngram_size, 1, MAX_WINDOW)
        checks.integer("pad_id", self.pad_id, *_INT32_RANGE)
        if self.cu_seqlens is not None:
            checks.tensor("cu_seqlens", self.cu_seqlens, ("num_starts",), _DTYPES, contiguous=True)
        if self.token_map is not None:
            checks.tensor("token_map", self.token_map, ("vocabulary",), _DTYPES, contiguous=True)

    def outputs(self) -> Out:
        return Out("out", (*self.token_ids.shape, self.max_ngram_size), torch.int32)

    def launches(self, out: Spec) -> Launch | Host:
        if self.token_map is not None and self.token_map.numel() == 0:
            return Host(Tensor.fill_, (out, self.pad_id))
        # A tensor without elements has no address to give.
        starts = (
            None if self.cu_seqlens is None or self.cu_seqlens.numel() == 0 else self.cu_seqlens
        )
        window = self.max_ngram_size
        problem = (
            dtype_name(self.token_ids),
            window,
            dtype_name(starts),
            dtype_name(self.token_map),
        )
        row_length = Size(lambda a: a.token_ids.shape[-1])
        ids, windows = self.token_ids.view(-1), out.view(-1, window)
        return Launch(
            _WINDOWS, problem, (ids, starts, self.token_map, windows, row_length, self.pad_id)
        )

    def check_values(self) -> None:
        if self.cu_seqlens is not None:
            checks.in_range("cu_seqlens", self.cu_seqlens, 0, self.token_ids.numel())
            falls = (self.cu_seqlens.diff() < 0).nonzero()
            if len(falls):
                raise ValueError(
                    f"cu_seqlens must not decrease, but element {falls[0].tolist()} does"
                )
        if self.token_map is not None:
            checks.in_range("token_ids", self.token_ids, 0, self.token_map.shape[0] - 1)
            checks.in_range("token_map", self.token_map, *_INT32_RANGE)


def cost(token_ids: Tensor, max_ngram_size: int, **_: Any) -> Cost:
    return Cost(token_ids.numel() * (token_ids.element_size() + 4 * max_ngram_size))


NGRAM_WINDOWS = Operator(
    "engram.ngram_windows",
    Arguments,
    reference=reference.ngram_windows,
    cost=cost,
    dynamic={"token_ids": 0, "cu_seqlens": 0, "token_map": 0},
    differentiable=False,
)


@NGRAM_WINDOWS.public()
def ngram_windows(
    token_ids: Tensor,
    max_ngram_size: int,
    pad_id: int,
    cu_seqlens: Tensor | None = None,
    token_map: Tensor | None = None,
) -> Tensor:
    """Returns each token together with those before it in its document.

    Column 0 is the token, column `i` the one `i` positions before it. From the first column on that
    would lie before the document, or that is `pad_id`, all columns are `pad_id`; so a `pad_id`
    within a text ends a document too. `token_map` applies first (vocabulary compression: several
    ids share one); ids outside of it become `pad_id`. Without it ids keep their lower 32 bits.

    Args:
        token_ids: `[num_tokens]` or `[num_texts, num_tokens]`, int32 or int64, contiguous: a row
            is a text.
        max_ngram_size: Columns of a window, in `1..64`.
        pad_id: Stands before a document; an int of 32 bits.
        cu_seqlens: `[num_starts]`, int32 or int64, contiguous: where documents start in the
            flattened tokens, increasing.
        token_map: `[vocabulary]`, int32 or int64, contiguous: the id that stands for each id.

    Returns:
        `[*token_ids.shape, max_ngram_size]`, int32, contiguous.

    Raises:
        TypeError: If an argument has another type or dtype.
        ValueError: If an argument has another shape, is not contiguous, or is out of range.

    Example:
        >>> ngram_windows(torch.tensor([5, 6, 0, 7, 8]), 3, pad_id=0).tolist()
        [[5, 0, 0], [6, 5, 0], [0, 0, 0], [7, 0, 0], [8, 7, 0]]
    """
    return NGRAM_WINDOWS(token_ids, max_ngram_size, pad_id, cu_seqlens, token_map)
