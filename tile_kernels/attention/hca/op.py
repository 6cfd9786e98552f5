"""`hca_attention`: attention over a window of tokens and over all compressed entries."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from tile_kernels.attention import softmax
from tile_kernels.attention.attention_bwd.op import hca_backward, save_hca
from tile_kernels.attention.hca import reference
from tile_kernels.attention.hca.plan import plan
from tile_kernels.attention.softmax_plan import HOPPER
from tile_kernels.attention.softmax_reference import VALUE_CHANNELS
from tile_kernels.runtime import checks
from tile_kernels.runtime.cases import Cost
from tile_kernels.runtime.declaration import Launch, Out, Size, Spec
from tile_kernels.runtime.launch import Kernel
from tile_kernels.runtime.operator import Operator

_ATTEND_SEQUENCES = Kernel("tile_kernels.attention.hca.kernel", "attend_sequences", plan)

Results = tuple[Tensor, Tensor, Tensor]


class Arguments(NamedTuple):
    q: Tensor
    window_kv: Tensor
    entries: Tensor | None
    sm_scale: float
    cu_seqlens: Tensor
    ratio: int
    window: int
    sink: Tensor | None

    def check(self) -> None:
        softmax.check_visible(*self)

    def check_values(self) -> None:
        softmax.check_bounds(self.cu_seqlens, self.q.shape[0])

    def outputs(self) -> tuple[Out, Out, Out]:
        return softmax.outputs(self.q)

    def launches(self, out: Spec, max_logits: Spec, lse: Spec) -> Launch | None:
        if out.numel() == 0:
            return None
        entries: Any = self.entries
        if entries is not None:
            entries = softmax.accessible(entries) if entries.numel() else None
        heads = Size(lambda a: a.q.shape[1])
        problem = (self.q.shape[2], entries is not None, self.sink is not None, heads)
        rows = (softmax.accessible(self.q), softmax.accessible(self.window_kv), entries)
        ratio = self.ratio if entries is not None else 0
        scale = self.sm_scale * softmax.LOG2E
        numbers = (self.window, ratio, scale, softmax.num_blocks(out.device))
        tensors = (*rows, self.cu_seqlens, self.sink, out, max_logits, lse)
        return Launch(_ATTEND_SEQUENCES, problem, (*tensors, *numbers))


def cost(
    q: Tensor,
    window_kv: Tensor,
    entries: Tensor | None,
    cu_seqlens: Tensor,
    ratio: int,
    window: int = 128,
    **_: Any,
) -> Cost:
    """Rows are read once; products of all rows that a query sees."""
    heads, channels = q.shape[1:]
    num_entries = 0 if entries is None else entries.shape[0]
    pairs = softmax.visible_pairs(q, entries, cu_seqlens, ratio, window)
    results = q.shape[:2].numel() * (2 * VALUE_CHANNELS + 8)
    return Cost(
        2 * q.numel() + 2 * (window_kv.shape[0] + num_entries) * channels + results,
        2 * heads * pairs * (channels + VALUE_CHANNELS),
    )


HCA_ATTENTION = Operator(
    "attention.hca_attention",
    Arguments,
    reference=reference.attended,
    cost=cost,
    dynamic={"q": 1, "window_kv": 1, "entries": 1, "cu_seqlens": 0, "sink": 0},
    backward=hca_backward,
    setup_context=save_hca,
    archs=(HOPPER,),
)


@HCA_ATTENTION.public(reference=reference.hca_attention)
def hca_attention(
    q: Tensor,
    window_kv: Tensor,
    entries: Tensor | None,
    sm_scale: float,
    *,
    cu_seqlens: Tensor,
    ratio: int,
    window: int = 128,
    sink: Tensor | None = None,
    return_stats: bool = False,
) -> Tensor | Results:
    """Computes attention of each query over the last tokens and over all visible entries.

    The token at position `t` of a sequence attends to the rows of the tokens `t - window + 1..t` of
    its sequence and to the entries `0..(t + 1) // ratio - 1` of its sequence, in one softmax. The
    entries of sequences follow each other, `n // ratio` for a sequence of `n` tokens, as
    `kv_compress` returns them. Tokens before the first sequence or after the last attend to
    nothing. Keys, values, sink and precision are as in `sparse_attention`, which gives the same
    result for lists of the same rows; here no lists are read, and tiles of neighbouring rows are
    copied at once. The result is deterministic and does not depend on other sequences.

    Args:
        q: `[T, h, d]`, bfloat16, as in `sparse_attention`.
        window_kv: `[T, d]`, bfloat16: the rows of tokens; stride 1 over channels, rows on multiples
            of 16 bytes.
        entries: `[E, d]`, bfloat16: the compressed rows, strides as those of `window_kv`; a
            sequence whose entries are missing sees those that are there. None: windows alone.
        sm_scale: The factor of logits, positive and finite.
        cu_seqlens: `[B + 1]`, int32, contiguous: where sequences begin, and the end of the last. It
            is read on its device; the host does not wait for it.
        ratio: Tokens of an entry, at least 1; 0 is allowed without entries.
        window: Tokens of a window, the query's own included, in `1..65536`.
        sink: `[h]`, float32, as in `sparse_attention`.
        return_stats: Whether `max_logits` and `lse` are returned too.

    Returns:
        `out [T, h, 512]`, bfloat16, or `(out, max_logits, lse)` as in `sparse_attention`.

    Raises:
        TypeError: If an argument has another type or dtype.
        ValueError: If an argument has another shape or stride, or a number is out of range.

    Example:
        >>> import torch
        >>> q = torch.zeros(4, 1, 512).bfloat16()
        >>> rows = torch.arange(4.0)[:, None].expand(4, 512).bfloat16()
        >>> entries = torch.full((2, 512), 8.0).bfloat16()
        >>> sequences = torch.tensor([0, 4], dtype=torch.int32)
        >>> out = hca_attention(q, rows, None, 1.0, cu_seqlens=sequences, ratio=0, window=2)
        >>> out[:, 0, 0].tolist()
        [0.0, 0.5, 1.5, 2.5]
        >>> out = hca_attention(q, rows, entries, 1.0, cu_seqlens=sequences, ratio=2, window=1)
        >>> out[:, 0, 0].tolist()
        [0.0, 4.5, 5.0, 6.34375]
    """
    HCA_ATTENTION.require(checks.boolean, "return_stats", return_stats)
    results = HCA_ATTENTION(q, window_kv, entries, sm_scale, cu_seqlens, ratio, window, sink)
    return results if return_stats else results[0]
