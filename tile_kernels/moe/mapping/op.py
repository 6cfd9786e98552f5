"""`get_fused_mapping`: where each token's copies lie in the rows of a grouped matrix product."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tile_kernels.moe.arguments import check_slots
from tile_kernels.moe.count.op import chunk_counts
from tile_kernels.moe.mapping import reference
from tile_kernels.moe.mapping.plan import MAX_EXPERTS, MAX_NUMBERS, plan
from tile_kernels.moe.mapping.reference import (
    Mapping,
    finish_mapping,
    fused_mapping,
    max_expanded_tokens,
)
from tile_kernels.runtime import backends, checks
from tile_kernels.runtime.cases import Cost
from tile_kernels.runtime.declaration import Host, Launch, Out, Size, Spec
from tile_kernels.runtime.launch import Kernel
from tile_kernels.runtime.operator import Operator

_KERNEL = Kernel("tile_kernels.moe.mapping.kernel", "fused_mapping", plan)


class Arguments(NamedTuple):
    topk_idx: Tensor
    num_experts: int
    num_expanded_tokens: int
    alignment: int
    force_no_sync: bool

    @property
    def num_rows(self) -> int:
        """Rows of the result: as given, or enough for any choice of experts."""
        if self.num_expanded_tokens or self.force_no_sync:
            return self.num_expanded_tokens
        return max_expanded_tokens(self.topk_idx.numel(), self.num_experts, self.alignment)

    def check(self) -> None:
        check_slots("topk_idx", self.topk_idx)
        if self.topk_idx.shape[1] < 1:
            raise ValueError("topk_idx must have at least one column, got 0")
        checks.integer("num_experts", self.num_experts, 1, MAX_EXPERTS)
        checks.integer("alignment", self.alignment, 1, 2**16)
        checks.integer("num_expanded_tokens", self.num_expanded_tokens, 0)
        checks.boolean("force_no_sync", self.force_no_sync)
        size = _num_numbers(self)
        rows = max_expanded_tokens(self.topk_idx.numel(), self.num_experts, self.alignment)
        if isinstance(size, int) and max(size, rows) > MAX_NUMBERS:
            raise ValueError(
                f"topk_idx and num_expanded_tokens must give at most {MAX_NUMBERS} numbers, got "
                f"{max(size, rows)}"
            )

    def outputs(self) -> Out:
        return Out("flat", (_num_numbers(self),), torch.int32)

    def launches(self, flat: Spec, counts: Spec) -> Launch | Host:
        topk_idx: Any = self.topk_idx
        if topk_idx.numel() == 0:
            return Host(_without_tokens, (flat, 3 * self.num_rows))
        problem = (topk_idx.shape[1], self.num_experts)
        num_rows = Size(lambda a: a.num_rows)
        return Launch(_KERNEL, problem, (topk_idx.view(-1), counts, flat, num_rows, self.alignment))

    def scratch(self) -> tuple[Out, ...]:
        return (chunk_counts(self.num_experts),)

    def check_values(self) -> None:
        checks.in_range("topk_idx", self.topk_idx, -1, self.num_experts - 1)


def _num_numbers(a: Arguments) -> int:
    """Elements of all results together."""
    return 3 * a.num_rows + a.topk_idx.numel() + 3 * a.num_experts + 1


def _without_tokens(flat: Tensor, first_count: int) -> None:
    """Rows of padding, empty ranges, nothing dropped."""
    flat.fill_(-1)
    flat[first_count:] = 0


def cost(topk_idx: Tensor, num_experts: int, num_expanded_tokens: int, **_: Any) -> Cost:
    return Cost(12 * topk_idx.numel() + 12 * num_expanded_tokens + 12 * num_experts)


def _reference(
    topk_idx: Tensor,
    num_experts: int,
    num_expanded_tokens: int,
    alignment: int,
    force_no_sync: bool,
) -> Tensor:
    a = Arguments(topk_idx, num_experts, num_expanded_tokens, alignment, force_no_sync)
    return fused_mapping(topk_idx, num_experts, a.num_rows, alignment)


GET_FUSED_MAPPING = Operator(
    "moe.get_fused_mapping",
    Arguments,
    reference=_reference,
    cost=cost,
    dynamic={"topk_idx": 1},
    differentiable=False,
)


def _check_overflow(overflow: Tensor, topk_idx: Tensor) -> None:
    checks.tensor("overflow", overflow, ("1",), torch.int32, shape=(1,))
    if isinstance(topk_idx, Tensor) and overflow.device != topk_idx.device:
        raise ValueError(
            f"overflow must be on {topk_idx.device} as topk_idx is, got {overflow.device}"
        )
    if not torch.compiler.is_compiling():
        checks.writable("overflow", overflow)


@GET_FUSED_MAPPING.public(reference=reference.get_fused_mapping, mutates=("overflow",))
def get_fused_mapping(
    topk_idx: Tensor,
    num_experts: int,
    num_expanded_tokens: int,
    alignment: int,
    force_no_sync: bool = False,
    overflow: Tensor | None = None,
) -> Mapping:
    """Lays out the rows of a grouped matrix product: the token of each row, the row of each choice.

    Experts follow each other; the rows of one hold its tokens in ascending order, then padding. The
    result does not depend on the SM budget. Choices outside `0..num_experts-1` have no row.

    With `num_expanded_tokens > 0` the host does not wait for the GPU, and CUDA graphs can record
    the call. If that is too few, the rows beyond are dropped: their choices get -1, `expert_start`
    and `expert_end` stop at `N`, and `overflow` counts them; the checked mode raises. All tensors
    but `overflow` are views of one allocation.

    Args:
        topk_idx: `[num_tokens, num_topk]`, int64, contiguous: the chosen experts, -1 for none.
        num_experts: The number of experts, in `1..8192`.
        num_expanded_tokens: The number of rows `N`. With 0 there are as many as needed, and the
            host waits for the GPU to know them. The results have at most 2^31 - 2^20 numbers
            together: `3 N`, the choices and `3 num_experts`.
        alignment: Each expert's rows start and end on a multiple of it; up to 65536.
        force_no_sync: With 0 rows, never wait and return no rows.
        overflow: `[1]`, int32, or None: receives how many choices found no row.

    Returns:
        Seven int32 tensors and a list.

        - `pos_to_expert` `[N]`: the expert of a row, -1 for padding.
        - `pos_to_token` `[N]`: the token of a row, -1 for padding.
        - `pos_to_token_topk` `[N]`: `token * num_topk + k` of a row, -1 for padding.
        - `token_topk_to_pos` `[num_tokens, num_topk]`: the row of a choice, -1 for none.
        - `expert_start` `[num_experts]`: the first row of an expert.
        - `expert_end` `[num_experts]`: one past its rows, padding included.
        - `num_tokens_per_expert` `[num_experts]`: `expert_end - expert_start`.
        - The same numbers on the host as a list of int; empty where the host did not wait.

    Raises:
        TypeError: If an argument has another type or dtype.
        ValueError: If a shape or a number is out of range.

    Example:
        >>> chosen = torch.tensor([[0, 2], [2, -1], [0, 3], [2, 0]])
        >>> pos_to_expert, pos_to_token, *_ = get_fused_mapping(chosen, 4, 0, 4)
        >>> pos_to_token.tolist()
        [0, 2, 3, -1, 0, 1, 3, -1, 2, -1, -1, -1]
    """
    if overflow is not None:
        GET_FUSED_MAPPING.require(_check_overflow, overflow, topk_idx)
    flat = GET_FUSED_MAPPING(topk_idx, num_experts, num_expanded_tokens, alignment, force_no_sync)
    synchronize = num_expanded_tokens == 0 and not force_no_sync
    if not torch.compiler.is_compiling() and backends.is_checked() and not flat.is_meta:
        dropped = int(flat[-1])
        if dropped and not synchronize:
            raise ValueError(
                f"get_fused_mapping: num_expanded_tokens must be large enough, but {dropped} "
                f"choices found no row in {num_expanded_tokens}"
            )
    return finish_mapping(flat, topk_idx, num_experts, synchronize, overflow)
