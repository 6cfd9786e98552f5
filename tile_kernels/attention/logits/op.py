"""`indexer_logits`: scores of keys for each query; `indexer_logits_bwd`: their gradients."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tile_kernels.attention import indexer
from tile_kernels.attention.indexer_reference import Operand, in_range
from tile_kernels.attention.logits import reference
from tile_kernels.attention.logits.plan import (
    MAX_SCALE_BLOCKS,
    padded_heads,
    plan_counted,
    plan_gradients,
    plan_scale,
)
from tile_kernels.runtime import checks, tickets
from tile_kernels.runtime.cases import Cost
from tile_kernels.runtime.declaration import Host, Launch, Out, Size, Spec
from tile_kernels.runtime.launch import Kernel
from tile_kernels.runtime.operator import Operator

OUT_DTYPES = (torch.float32, torch.bfloat16)
MAX_GRADIENT_ROW = 128 * 128  # heads times channels, whose gradient is in a block's registers
_SUM_BITS = 61  # of the integers that shares of a key's gradient are added as

_MODULE = "tile_kernels.attention.logits.kernel"
_SCALE = Kernel(_MODULE, "gradient_scale", plan_scale)
_GRADIENTS = Kernel(_MODULE, "selected_gradients", plan_gradients)
_COUNTED = Kernel(_MODULE, "counted_gradient", plan_counted)

# ---- indexer_logits -----------------------------------------------------------------------------


class Arguments(NamedTuple):
    q: Tensor
    q_sf: Tensor | None
    k: Tensor
    k_sf: Tensor | None
    weights: Tensor
    start: Tensor
    end: Tensor
    out_dtype: torch.dtype

    def check(self) -> None:
        indexer.check_operands(self.q, self.q_sf, self.k, self.k_sf, self.weights)
        indexer.check_bound("start", self.start, self.q.shape[0])
        indexer.check_bound("end", self.end, self.q.shape[0])
        checks.one_of("out_dtype", self.out_dtype, OUT_DTYPES)

    def outputs(self) -> Out:
        return Out("out", (self.q.shape[0], self.k.shape[0]), self.out_dtype)

    def launches(self, out: Spec, *scratch: Spec) -> list[Launch]:
        sizes = (Size(_share), Size(_queries_per_block), Size(_are_many))
        return indexer.score_all(self[:7], scratch, out, *sizes)


def _share(a: Arguments) -> int:
    return indexer.share_of_keys(a.q.shape[0], a.k.shape[0], _are_many(a), a.q.device)


def _num_shares(a: Arguments) -> int:
    return -(-a.k.shape[0] // _share(a))


def _are_many(a: Arguments) -> bool:
    return indexer.are_many(a.q.shape[0])


def _queries_per_block(a: Arguments) -> int:
    return indexer.queries_per_block(a.q.shape[0], _num_shares(a), a.q.device)


def scratch(a: Arguments) -> tuple[Out, ...]:
    return indexer.score_scratch(a.q, a.k, _num_shares(a))


def cost(q: Operand, k: Operand, out_dtype: torch.dtype = torch.float32, **others: Any) -> Cost:
    queries, num_keys = indexer.pair(q)[0], indexer.pair(k)[0].shape[0]
    written = queries.shape[0] * num_keys * out_dtype.itemsize
    return Cost(
        indexer.operand_bytes(q, k, *others.values()) + written,
        indexer.score_flops(queries, num_keys),
    )


_REFERENCE = indexer.by_field(reference.indexer_logits, "out_dtype")


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    q, _, k, k_sf, weights, start, end, _ = inputs
    ctx.save_for_backward(q, k, k_sf, weights, start, end)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """All keys of a query's range are selected ones."""
    if ctx.needs_input_grad[3]:
        raise RuntimeError("indexer_logits: the scales of k have no gradient; detach them")
    q, k, k_sf, weights, start, end = ctx.saved_tensors
    inside = in_range(start, end, k.shape[0])
    keys = torch.arange(k.shape[0], device=q.device, dtype=torch.int32)
    indices = torch.where(inside, keys, -1)
    grad_q, grad_k, grad_weights = indexer_logits_bwd(
        q, indexer.joined(k, k_sf), weights, indices, grad.float().contiguous()
    )
    return grad_q.to(q.dtype), None, grad_k.to(k.dtype), None, grad_weights, None, None, None


INDEXER_LOGITS = Operator(
    "attention.indexer_logits",
    Arguments,
    scratch=scratch,
    reference=_REFERENCE,
    cost=cost,
    dynamic={"q": 2, "k": 1, "k_sf": 0, "weights": 1, "start": 0, "end": 0},
    backward=_backward,
    setup_context=_save,
)

# For packed queries the number of queries decides whether keys are expanded before.
INDEXER_LOGITS_PACKED = Operator(
    "attention._indexer_logits_packed",
    Arguments,
    scratch=scratch,
    reference=_REFERENCE,
    dynamic={"k": 1, "k_sf": 1},
    backward=_backward,
    setup_context=_save,
    serves="indexer_logits",
)


@INDEXER_LOGITS.public(reference=reference.indexer_logits)
def indexer_logits(
    q: Operand,
    k: Operand,
    weights: Tensor,
    start: Tensor,
    end: Tensor,
    *,
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Computes the logits of the lightning indexer: how much each key matters to each query.

        logits[t, s] = k_sf[s] * sum over h of weights[t, h] * relu(q[t, h] . k[s])

    summed in float32, and -inf outside of the query's range, which is cut to `0..S`. `k_sf` is 1
    where keys have no scales. A NaN in a row makes its logits NaN, and so does the exponent 255;
    the exponent 0 stands for 0. Weights times the scales of e2m1 must be finite numbers of float32.
    An infinity of bfloat16 gives infinities or NaN.

    All tensors are contiguous, and `q` and `k` have one format. `h` is in `1..128`, `D` is 32, 64,
    128 or 256. The result is differentiable with respect to `q`, `k` and `weights`, except in e2m1.

    Args:
        q: `[T, h, D]`, float8_e4m3fn (with its scale folded into `weights`) or bfloat16; or
            `(data, exponents)`: `[T, h, D / 2]`, int8 (packed e2m1), and `[T, h, D / 32]`, uint8
            (ue8m0).
        k: `(data, scales)`: `[S, D]`, float8_e4m3fn, and `[S]`, float32; or `(data, exponents)`:
            `[S, D / 2]`, int8, and `[S, D / 32]`, uint8; or `[S, D]`, bfloat16.
        weights: `[T, h]`, float32.
        start: `[T]`, int32: the first key of each query.
        end: `[T]`, int32: the key after its last one.
        out_dtype: float32 or bfloat16.

    Returns:
        `[T, S]`, `out_dtype`, contiguous.

    Raises:
        TypeError: If an argument has another type or dtype, or scales where its format has none.
        ValueError: If an argument has another shape, or is not contiguous.

    Example:
        >>> q, k = torch.zeros(1, 2, 32).bfloat16(), torch.zeros(3, 32).bfloat16()
        >>> q[0, :, 0], k[:, 0] = torch.tensor([1, -1]), torch.tensor([1, -2, 3])
        >>> weights, ends = torch.tensor([[0.5, 2.0]]), torch.tensor([0, 2]).int()
        >>> indexer_logits(q, k, weights, ends[:1], ends[1:]).tolist()
        [[0.5, 4.0, -inf]]
    """
    (queries, q_sf), (keys, k_sf) = indexer.pair(q), indexer.pair(k)
    operator = INDEXER_LOGITS if q_sf is None else INDEXER_LOGITS_PACKED
    return operator(queries, q_sf, keys, k_sf, weights, start, end, out_dtype)


# ---- indexer_logits_bwd -------------------------------------------------------------------------


class BackwardArguments(NamedTuple):
    q: Tensor
    k: Tensor
    k_sf: Tensor | None
    weights: Tensor
    indices: Tensor
    grad: Tensor

    def check(self) -> None:
        checks.tensor("q", self.q, ("T", "h", "D"), (torch.bfloat16, torch.float8_e4m3fn))
        indexer.check_operands(self.q, None, self.k, self.k_sf, self.weights)
        tokens, heads, depth = self.q.shape
        if padded_heads(heads) * depth > MAX_GRADIENT_ROW:
            raise ValueError(f"q must have up to 64 heads with {depth} channels, got {heads}")
        checks.tensor(
            "indices", self.indices, ("T", "K"), torch.int32, shape=(tokens, None), contiguous=True
        )
        checks.tensor(
            "grad",
            self.grad,
            ("T", "K"),
            torch.float32,
            shape=tuple(self.indices.shape),
            contiguous=True,
        )

    def outputs(self) -> tuple[Out, Out, Out]:
        return (
            Out("grad_q", self.q.shape, torch.float32),
            Out("grad_k", self.k.shape, torch.float32),
            Out("grad_weights", self.weights.shape, torch.float32),
        )

    def launches(
        self,
        grad_q: Spec,
        grad_k: Spec,
        grad_weights: Spec,
        counted: Spec,
        scale: Spec,
        partials: Spec,
    ) -> list[Launch | Host]:
        if 0 in (self.q.numel(), self.indices.numel(), self.k.numel()):
            return [Host(Tensor.zero_, (x,)) for x in (grad_q, grad_k, grad_weights)]
        problem = (indexer.SOURCES[self.q.dtype], self.q.shape[1], self.q.shape[2])
        q, others = indexer.aligned(self.q), (self.k_sf, self.weights, self.indices, self.grad)
        bounds = (
            q, *others, counted, partials, scale, *tickets.counter(q), Size(_share_bits)
        )  # fmt: skip
        gradients = (
            q, indexer.aligned(self.k), *others, scale, grad_q, counted, grad_weights
        )  # fmt: skip
        return [
            Launch(_SCALE, problem, bounds),
            Launch(_GRADIENTS, problem, gradients),
            Launch(_COUNTED, problem[2:], (counted, scale, grad_k)),
        ]

    def scratch(self) -> tuple[Out, ...]:
        """The gradient of k in integers, the inverse of their unit, and what that follows from."""
        return (
            Out("counted", self.k.shape, torch.int64),
            Out("scale", (1,), torch.float32),
            Out("partials", (MAX_SCALE_BLOCKS, 3), torch.int32),
        )

    def check_values(self) -> None:
        checks.in_range("indices", self.indices, -1, self.k.shape[0] - 1)


def _share_bits(a: BackwardArguments) -> int:
    """The bits that the share of one index may have: there are as many as indices."""
    return _SUM_BITS - math.ceil(math.log2(max(2, a.indices.numel())))


def cost_bwd(q: Tensor, k: Operand, indices: Tensor, **_: Any) -> Cost:
    rows = indices.numel() * q.shape[2]
    keys = indexer.pair(k)[0]
    return Cost(
        rows * (q.element_size() + 8) + q.numel() * (q.element_size() + 4) + 4 * keys.numel(),
        6 * rows * q.shape[1],
    )


def _reference_bwd(
    q: Tensor, k: Tensor, k_sf: Tensor | None, weights: Tensor, indices: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return reference.indexer_logits_bwd(q, indexer.joined(k, k_sf), weights, indices, grad)


INDEXER_LOGITS_BWD = Operator(
    "attention.indexer_logits_bwd",
    BackwardArguments,
    reference=_reference_bwd,
    cost=cost_bwd,
    dynamic={"q": 2, "k": 1, "k_sf": 0, "weights": 1, "indices": 0, "grad": 0},
)


@INDEXER_LOGITS_BWD.public(reference=reference.indexer_logits_bwd)
def indexer_logits_bwd(
    q: Tensor, k: Operand, weights: Tensor, indices: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the gradients of `indexer_logits` from those of the logits at selected keys.

    With `d = grad * k_sf` at key `s` of query `t`, and `c = q[t, h] . k[s]`,

        grad_weights[t, h] = sum over s of d * relu(c)
        grad_q[t, h]       = sum over s of d * weights[t, h] * [c > 0] * k[s]
        grad_k[s]          = sum over t, h of d * weights[t, h] * [c > 0] * q[t, h]

    where `d * weights` has 16 bits for the matrix units, sums are in float32, and those over
    queries exact: deterministic, without floating-point atomics. Indices may come twice, and those
    outside of `-1..S-1` count as -1. `q` and `k` must be finite; anything else that is not makes
    all of `grad_k` NaN.

    Args:
        q: As in `indexer_logits`, but not e2m1; with `D` 256 up to 64 heads.
        k: As in `indexer_logits`, but not e2m1.
        weights: As in `indexer_logits`.
        indices: `[T, K]`, int32, contiguous: keys as `indexer_select` gives them, -1 for none.
        grad: `[T, K]`, float32, contiguous: the gradient of the logits at these keys.

    Returns:
        `(grad_q, grad_k, grad_weights)`, float32, contiguous, with the shapes of `q`, of the data
        of `k`, and of `weights`.

    Raises:
        TypeError: If an argument has another type or dtype, or `q` is packed.
        ValueError: If an argument has another shape or is not contiguous, or `q` has too many
            heads.

    Example:
        >>> q, k = torch.zeros(1, 1, 32).bfloat16(), torch.zeros(2, 32).bfloat16()
        >>> q[0, 0, 0], k[:, 0] = 2, torch.tensor([3, -3])
        >>> indices, grad = torch.tensor([[0, 1]]).int(), torch.tensor([[1.0, 10.0]])
        >>> grads = indexer_logits_bwd(q, k, torch.tensor([[0.5]]), indices, grad)
        >>> grads[0][0, 0, 0].item(), grads[1][:, 0].tolist(), grads[2].item()
        (1.5, [1.0, 0.0], 6.0)
    """
    keys, k_sf = indexer.pair(k)
    return INDEXER_LOGITS_BWD(q, keys, k_sf, weights, indices, grad)
