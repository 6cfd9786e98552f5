"""`engram_hash`: the row that each n-gram has in each table of each layer."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tile_kernels.engram.hash import reference
from tile_kernels.engram.hash.plan import plan
from tile_kernels.runtime import checks
from tile_kernels.runtime.cases import Cost
from tile_kernels.runtime.declaration import Launch, Out, Spec, dtype_name
from tile_kernels.runtime.launch import Kernel
from tile_kernels.runtime.operator import Operator

MAX_WINDOW = 64
MAX_LAYERS = 65535  # the grid's second axis

_HASHES = Kernel("tile_kernels.engram.hash.kernel", "hashes", plan)


class Arguments(NamedTuple):
    ngram_token_ids: Tensor
    multipliers: Tensor
    vocab_sizes: Tensor
    offsets: Tensor
    image_token_mask: Tensor | None

    def check(self) -> None:
        checks.tensor(
            "ngram_token_ids",
            self.ngram_token_ids,
            ("num_tokens", "window"),
            torch.int32,
            contiguous=True,
        )
        window = self.ngram_token_ids.shape[1]
        if not 2 <= window <= MAX_WINDOW:
            raise ValueError(f"ngram_token_ids must have 2..{MAX_WINDOW} columns, got {window}")
        checks.tensor(
            "multipliers", self.multipliers, ("num_layers", "window"), torch.int64, shape=(None,
            window), contiguous=True,
        )  # fmt: skip
        layers = self.multipliers.shape[0]
        if layers > MAX_LAYERS:
            raise ValueError(f"multipliers must have at most {MAX_LAYERS} layers, got {layers}")
        checks.tensor(
            "vocab_sizes", self.vocab_sizes, ("num_layers", "orders", "tables"), torch.int32,
            shape=(layers, window - 1, None), contiguous=True,
        )  # fmt: skip
        columns = (window - 1) * self.vocab_sizes.shape[2]
        checks.tensor(
            "offsets", self.offsets, ("num_layers", "columns"), (torch.int32, torch.int64),
            shape=(layers, columns), contiguous=True,
        )  # fmt: skip
        if self.image_token_mask is not None:
            num_tokens = self.ngram_token_ids.shape[0]
            checks.tensor(
                "image_token_mask", self.image_token_mask, ("num_tokens",), torch.bool,
                shape=(num_tokens,), contiguous=True,
            )  # fmt: skip

    def outputs(self) -> Out:
        layers, columns = self.offsets.shape
        return Out("out", (layers, self.ngram_token_ids.shape[0], columns), self.offsets.dtype)

    def launches(self, out: Spec) -> Launch | None:
        if self.offsets.numel() == 0:
            return None
        sizes: Any = self.vocab_sizes
        masked = self.image_token_mask is not None
        problem = (self.ngram_token_ids.shape[1], sizes.shape[2], dtype_name(self.offsets), masked)
        arguments = (
            self.ngram_token_ids,
            self.multipliers,
            sizes.view(*self.offsets.shape),
            self.offsets,
            self.image_token_mask,
            out,
        )
        return Launch(_HASHES, problem, arguments)

    def check_values(self) -> None:
        checks.in_range("vocab_sizes", self.vocab_sizes, 1, 2**31 - 1)


def cost(
    ngram_token_ids: Tensor, multipliers: Tensor, vocab_sizes: Tensor, offsets: Tensor, **_: Any
) -> Cost:
    entries = ngram_token_ids.shape[0] * offsets.numel()
    inputs = (ngram_token_ids, multipliers, vocab_sizes, offsets)
    return Cost(
        sum(x.numel() * x.element_size() for x in inputs) + entries * offsets.element_size()
    )


ENGRAM_HASH = Operator(
    "engram.engram_hash",
    Arguments,
    reference=reference.engram_hash,
    cost=cost,
    dynamic={"ngram_token_ids": 1, "image_token_mask": 0},
    out=("out",),
    differentiable=False,
)


@ENGRAM_HASH.public(reference=reference.engram_hash)
def engram_hash(
    ngram_token_ids: Tensor,
    multipliers: Tensor,
    vocab_sizes: Tensor,
    offsets: Tensor,
    image_token_mask: Tensor | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Computes the row of each n-gram in each table of each layer.

    In 64 bits that wrap, with `p_i = id_i * multiplier_i`, the hash of the last `i + 1` tokens is
    `h_i = p_0 ^ ... ^ p_i`. Column `(i - 1) * num_tables + j` is
    `h_i mod vocab_sizes[l, i - 1, j]`, never negative, plus its offset, which wraps in its dtype.
    Layers with more than 2^31 rows need int64 offsets (`tile_kernels.torch.engram.make_offsets`
    builds them). A table without rows gives its offset.

    Args:
        ngram_token_ids: `[num_tokens, N]`, int32, contiguous, of `ngram_windows`; `N` is in
            `2..64`.
        multipliers: `[num_layers, N]`, int64, contiguous: odd numbers, as a rule.
        vocab_sizes: `[num_layers, N - 1, num_tables]`, int32, contiguous: the rows of each table.
        offsets: `[num_layers, (N - 1) * num_tables]`, int32 or int64, contiguous: the first row of
            each table.
        image_token_mask: `[num_tokens]`, bool, contiguous, or None: tokens that look up nothing
            have -1 in all columns.
        out: A buffer for the result, which is filled and returned.

    Returns:
        `[num_layers, num_tokens, (N - 1) * num_tables]`, dtype of `offsets`, contiguous.

    Raises:
        TypeError: If an argument has another type or dtype.
        ValueError: If an argument has another shape or is not contiguous.

    Example:
        >>> ids = torch.tensor([[5, 7, 11], [-1, 0, 2]], dtype=torch.int32)
        >>> sizes = torch.tensor([[[10, 13], [17, 19]]], dtype=torch.int32)
        >>> offsets = torch.tensor([[0, 10, 23, 40]], dtype=torch.int32)
        >>> engram_hash(ids, torch.tensor([[3, 5, 9]]), sizes, offsets).tolist()
        [[[4, 15, 34, 43], [7, 20, 23, 42]]]
    """
    return ENGRAM_HASH(
        ngram_token_ids, multipliers, vocab_sizes, offsets, image_token_mask, out=out
    )
