"""`sparse_attention`: attention of all heads of a query over a list of shared rows."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from tile_kernels.attention import softmax
from tile_kernels.attention.attention_bwd.op import save_sparse, sparse_backward
from tile_kernels.attention.softmax_plan import HOPPER
from tile_kernels.attention.softmax_reference import VALUE_CHANNELS
from tile_kernels.attention.sparse import reference
from tile_kernels.attention.sparse.plan import plan
from tile_kernels.runtime import checks
from tile_kernels.runtime.cases import Cost
from tile_kernels.runtime.declaration import Host, Launch, Out, Spec
from tile_kernels.runtime.launch import Kernel
from tile_kernels.runtime.operator import Operator

_ATTEND_ROWS = Kernel("tile_kernels.attention.sparse.kernel", "attend_rows", plan)

Results = tuple[Tensor, Tensor, Tensor]


class Arguments(NamedTuple):
    q: Tensor
    kv: Tensor
    indices: Tensor
    sm_scale: float
    sink: Tensor | None
    topk_length: Tensor | None

    def check(self) -> None:
        softmax.check_lists(*self)

    def check_values(self) -> None:
        softmax.check_list_values(self.kv, self.indices, self.topk_length)

    def outputs(self) -> tuple[Out, Out, Out]:
        return softmax.outputs(self.q)

    def launches(self, out: Spec, max_logits: Spec, lse: Spec) -> Launch | list[Host] | None:
        if out.numel() == 0:
            return None
        if self.kv.shape[0] == 0 or self.indices.shape[1] == 0:
            return softmax.without_rows(out, max_logits, lse)
        problem = (self.q.shape[2], self.sink is not None, self.topk_length is not None)
        tensors = (softmax.accessible(self.q), softmax.accessible(self.kv), *self[2:3], *self[4:])
        numbers = (self.sm_scale * softmax.LOG2E, softmax.num_blocks(out.device))
        return Launch(_ATTEND_ROWS, problem, (*tensors, out, max_logits, lse, *numbers))


def cost(
    q: Tensor, kv: Tensor, indices: Tensor, topk_length: Tensor | None = None, **_: Any
) -> Cost:
    """Each row that may be needed is read once; products of all indices, or of the lengths."""
    heads, channels = q.shape[1:]
    pairs = indices.numel()
    if topk_length is not None and topk_length.device.type != "meta":
        pairs = int(topk_length.clamp(0, indices.shape[-1]).sum())
    results = q.shape[:2].numel() * (2 * VALUE_CHANNELS + 8)
    return Cost(
        2 * q.numel() + 2 * min(kv.shape[0], pairs) * channels + 4 * indices.numel() + results,
        2 * heads * pairs * (channels + VALUE_CHANNELS),
    )


SPARSE_ATTENTION = Operator(
    "attention.sparse_attention",
    Arguments,
    reference=reference.attended,
    cost=cost,
    dynamic={"q": 1, "kv": 1, "indices": 0, "sink": 0, "topk_length": 0},
    backward=sparse_backward,
    setup_context=save_sparse,
    archs=(HOPPER,),
)


def _attended(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float,
    sink: Tensor | None,
    topk_length: Tensor | None,
) -> Results:
    kv, indices = softmax.without_kv_head(SPARSE_ATTENTION, kv, indices)
    return SPARSE_ATTENTION(q, kv, indices, sm_scale, sink, topk_length)


@SPARSE_ATTENTION.public(reference=reference.sparse_attention)
def sparse_attention(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float,
    *,
    sink: Tensor | None = None,
    topk_length: Tensor | None = None,
    return_stats: bool = False,
) -> Tensor | Results:
    """Computes attention of each query over the rows at its indices; a row is key and value.

    All heads of a query share one list of rows:

        s[j] = sm_scale * q[t, h] . kv[indices[t, j]]
        out[t, h] = sum_j exp(s[j]) * kv[indices[t, j], :512] / (sum_j exp(s[j]) + exp(sink[h]))

    An index outside of `0..N - 1` chooses no row, and nothing is read for it. An index that occurs
    several times counts as often. Products have bfloat16 operands and float32 sums; the weights
    `exp(s)` are rounded to bfloat16 before they multiply values. The result is deterministic and
    does not depend on other queries. Only the indices distinguish sequences;
    `attention_indices` makes lists of a window and selected entries.

    Args:
        q: `[T, h, d]`, bfloat16, any number of heads, `d` 512 or 576; stride 1 over channels, other
            strides multiples of 16 bytes.
        kv: `[N, d]` or `[N, 1, d]`, bfloat16, stride 1 over channels, rows on multiples of 16
            bytes.
        indices: `[T, k]` or `[T, 1, k]`, int32: rows of `kv`; -1 for none. Lists that are valid
            first and have lengths leave out whole tiles of 64 rows.
        sm_scale: The factor of logits, positive and finite.
        sink: `[h]`, float32: one more logit of each head, with a value of zeros. `-inf` is as no
            sink, `inf` gives zeros. It is not multiplied by `sm_scale`.
        topk_length: `[T]`, int32: only so many indices of a query count, from the first on; cut to
            `0..k`.
        return_stats: Whether `max_logits` and `lse` are returned too.

    Returns:
        `out [T, h, 512]`, bfloat16. With `return_stats` the tuple `(out, max_logits, lse)`; the
        latter are float32 `[T, h]`, the maximum and the logarithm of the sum of exponentials of the
        logits, natural, without the sink. They have no gradient. A query without a row has
        `out = 0`, `max_logits = -inf` and `lse = inf`, whatever the sink. A NaN in a row that was
        chosen, or in a head of `q`, gives NaN in `out` and `lse`; so does a logit that overflows,
        and on a GPU one beyond `2**31` may.

    Raises:
        TypeError: If an argument has another type or dtype.
        ValueError: If an argument has another shape or stride, or `sm_scale` is not positive and
            finite.

    Example:
        >>> import torch
        >>> q = torch.zeros(1, 2, 512).bfloat16()
        >>> kv = torch.arange(3.0)[:, None].expand(3, 512).bfloat16()
        >>> indices = torch.tensor([[0, 2, -1]], dtype=torch.int32)
        >>> sparse_attention(q, kv, indices, 512**-0.5)[0, :, 0].tolist()
        [1.0, 1.0]
        >>> sink = torch.tensor([0.0, float("inf")])
        >>> sparse_attention(q, kv, indices, 512**-0.5, sink=sink)[0, :, 0].tolist()
        [0.66796875, 0.0]
    """
    SPARSE_ATTENTION.require(checks.boolean, "return_stats", return_stats)
    results = _attended(q, kv, indices, sm_scale, sink, topk_length)
    return results if return_stats else results[0]


@checks.named_errors
def flash_mla_sparse_fwd(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float,
    d_v: int = VALUE_CHANNELS,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
) -> Results:
    """`sparse_attention` with the arguments and results of FlashMLA's function of this name.

    Args:
        q: As in `sparse_attention`.
        kv: As in `sparse_attention`.
        indices: As in `sparse_attention`.
        sm_scale: As in `sparse_attention`.
        d_v: Channels of a value: 512.
        attn_sink: `sink` of `sparse_attention`.
        topk_length: As in `sparse_attention`.

    Returns:
        `(out, max_logits, lse)` of `sparse_attention`.

    Raises:
        TypeError: If an argument has another type or dtype.
        ValueError: If `d_v` is not 512, or as in `sparse_attention`.

    Example:
        >>> import torch
        >>> q, kv = torch.zeros(1, 1, 512).bfloat16(), torch.ones(4, 1, 512).bfloat16()
        >>> indices = torch.tensor([[[0, 3]]], dtype=torch.int32)
        >>> out, max_logits, lse = flash_mla_sparse_fwd(q, kv, indices, 1.0)
        >>> out[0, 0, 0].item(), max_logits.item(), round(lse.item(), 4)
        (1.0, 0.0, 0.6931)
    """
    if checks.integer("d_v", d_v, 1) != VALUE_CHANNELS:
        raise ValueError(f"d_v must be {VALUE_CHANNELS}, got {d_v}")
    return _attended(q, kv, indices, sm_scale, attn_sink, topk_length)
