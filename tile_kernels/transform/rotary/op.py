"""Rotary position embedding: in place, and as a function with a gradient."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tile_kernels.runtime import checks
from tile_kernels.runtime.autograd import no_gradient_message
from tile_kernels.runtime.cases import Cost
from tile_kernels.runtime.declaration import ALIGNMENT, Launch, Out, Size, Spec, dtype_name
from tile_kernels.runtime.launch import Kernel
from tile_kernels.runtime.operator import Operator
from tile_kernels.transform.rotary import reference
from tile_kernels.transform.rotary.plan import plan

_KERNEL = Kernel("tile_kernels.transform.rotary.kernel", "rotate", plan)

_DTYPES = (torch.bfloat16, torch.float32)
_DYNAMIC = {"query": 2, "key": 2, "positions": 0, "cos_sin_cache": 1}


class Arguments(NamedTuple):
    query: Tensor
    cos_sin_cache: Tensor
    key: Tensor | None
    positions: Tensor | None
    interleaved: bool
    conjugate: bool
    seqlen_offset: int

    def check(self) -> None:
        query = self.query
        batched = isinstance(query, Tensor) and query.dim() == 4
        dims: tuple[str, ...] = ("num_tokens", "num_heads", "head_dim")
        dims = ("batch", *dims) if batched else dims
        checks.tensor("query", query, dims, _DTYPES, unit_inner_stride=True)
        dim = query.shape[-1]
        if dim < 2 or dim % 2:
            raise ValueError(f"query must have an even head_dim, got {dim}")
        if self.key is not None:
            shape = (*query.shape[:-2], None, dim)
            checks.tensor("key", self.key, dims, query.dtype, shape=shape, unit_inner_stride=True)
        checks.tensor(
            "cos_sin_cache", self.cos_sin_cache, ("num_positions", "head_dim"), _DTYPES,
            shape=(None, dim), unit_inner_stride=True,
        )  # fmt: skip
        if self.positions is not None:
            tokens = tuple(query.shape[:-2])
            checks.tensor("positions", self.positions, dims[:-2], checks.INTEGERS, shape=tokens)
        checks.boolean("interleaved", self.interleaved)
        checks.boolean("conjugate", self.conjugate)
        checks.integer("seqlen_offset", self.seqlen_offset, -checks.MOST_SIZE, checks.MOST_SIZE)
        pairs = (query.numel() + (0 if self.key is None else self.key.numel())) // 2
        if isinstance(pairs, int) and pairs > checks.MOST_SIZE:
            raise ValueError(
                f"query and key must have at most {2 * checks.MOST_SIZE} elements, got {2 * pairs}"
            )

    def outputs(self) -> tuple[Out, Out]:
        shape = (0,) if self.key is None else self.key.shape
        dtype = self.query.dtype
        return Out("out", self.query.shape, dtype), Out("key_out", shape, dtype)

    def launches(self, out: Spec, key_out: Spec) -> Launch | None:
        return _launch(self, out, None if self.key is None else key_out, in_place=False)


def _outputs_in_place(a: Arguments) -> None:  # noqa: ARG001
    return None


def _launches_in_place(a: Arguments) -> Launch | None:
    return _launch(a, a.query, a.key, in_place=True)


def _alignment(*tensors: Any) -> int:
    """The bytes, at most 16, that divide the address of every head."""
    found = ALIGNMENT
    for x in tensors:
        if x is not None:
            size = x.element_size()
            strides = (stride * size for n, stride in zip(x.shape, x.stride()[:-1]) if n != 1)
            found = math.gcd(found, x.alignment, *strides)
    return found


def _launch(a: Any, out: Any, key_out: Any, in_place: bool) -> Launch | None:
    heads = a.query.shape[-2] + (0 if a.key is None else a.key.shape[-2])
    if math.prod(a.query.shape[:-2]) * heads == 0:
        return None
    dim = a.query.shape[-1]
    given = (out, key_out) if in_place else (a.query, a.key, out, key_out)
    alignment = _alignment(*given)
    problem = (
        dtype_name(out), dtype_name(a.cos_sin_cache), dim, a.interleaved, a.key is not None,
        dtype_name(a.positions), a.query.dim() == 4, in_place, alignment,
        _alignment(a.cos_sin_cache),
    )  # fmt: skip
    vector = plan(*problem, None).vector  # type: ignore[arg-type]
    units = dim // 2 // vector
    count = Size(lambda a: math.prod(a.query.shape[:-1]) * units)
    key_count = Size(lambda a: 0 if a.key is None else math.prod(a.key.shape[:-1]) * units)
    arguments = (
        None if in_place else a.query, None if in_place else a.key, a.cos_sin_cache, a.positions,
        out, key_out, -1.0 if a.conjugate else 1.0, a.seqlen_offset, count, key_count,
    )  # fmt: skip
    return Launch(_KERNEL, problem, arguments)


def check_values(a: Arguments) -> None:
    """Every token has a position that the cache has."""
    rows = a.cos_sin_cache.shape[0]
    if a.positions is not None:
        low, high = -a.seqlen_offset, rows - 1 - a.seqlen_offset
        checks.in_range("positions", a.positions, low, high)
    elif a.query.numel() and not (
        a.seqlen_offset >= 0 and a.query.shape[-3] + a.seqlen_offset <= rows
    ):
        raise ValueError(f"seqlen_offset must be such that {rows} positions suffice")


def cost(query: Tensor, cos_sin_cache: Tensor, key: Tensor | None = None, **_: Any) -> Cost:
    elements = query.numel() + (0 if key is None else key.numel())
    tokens = math.prod(query.shape[:-2])
    cache = tokens * cos_sin_cache.shape[1] * cos_sin_cache.element_size()
    return Cost(2 * elements * query.element_size() + cache, 3 * elements)


# ---- as a function ------------------------------------------------------------------------------


def _reference(*fields: Any) -> tuple[Tensor, Tensor]:
    results = reference.rotary_embedding(*fields)
    return results if isinstance(results, tuple) else (results, results.new_empty(0))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:  # noqa: ARG001
    _, cache, key, positions, ctx.interleaved, ctx.conjugate, ctx.offset = inputs
    ctx.has_key = key is not None
    ctx.save_for_backward(cache, positions)


def _backward(ctx: Any, grad: Tensor, key_grad: Tensor) -> tuple[Any, ...]:
    cache, positions = ctx.saved_tensors
    grads = [g if g.stride(-1) == 1 else g.contiguous() for g in (grad, key_grad)]
    found = ROTARY_EMBEDDING(
        grads[0], cache, grads[1] if ctx.has_key else None, positions, ctx.interleaved,
        not ctx.conjugate, ctx.offset,
    )  # fmt: skip
    return found[0], None, found[1] if ctx.has_key else None, None, None, None, None


ROTARY_EMBEDDING = Operator(
    "transform.rotary_embedding",
    Arguments,
    check_values=check_values,
    reference=_reference,
    cost=cost,
    dynamic=_DYNAMIC,
    out=("out", "key_out"),
    backward=_backward,
    setup_context=_save,
)


@ROTARY_EMBEDDING.public(reference=reference.rotary_embedding)
def rotary_embedding(
    query: Tensor,
    cos_sin_cache: Tensor,
    key: Tensor | None = None,
    positions: Tensor | None = None,
    interleaved: bool = False,
    conjugate: bool = False,
    seqlen_offset: int = 0,
    *,
    out: Tensor | tuple[Tensor, Tensor] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Rotates pairs of channels by the angles of each token's position.

    With `c` and `s` the cosine and the sine of a pair `(a, b)`, in float32 and rounded once,

        a' = fma(a, c, -(b * s))
        b' = fma(a, s, b * c)

    The gradient with respect to the query and the key is the rotation by the opposite angles; the
    cache gets none. `apply_rotary` does the same in place.

    Args:
        query: `[num_tokens, num_heads, head_dim]` or `[batch, num_tokens, num_heads, head_dim]`,
            bfloat16 or float32, any strides but 1 in the last dimension; `head_dim` is even. To
            rotate some of the channels pass a slice, such as `q[..., -64:]`.
        cos_sin_cache: `[num_positions, head_dim]`, bfloat16 or float32: `head_dim / 2` cosines,
            then as many sines, of each position; any row stride.
        key: Like the query, with any number of heads; or None.
        positions: `[num_tokens]` or `[batch, num_tokens]`, int32 or int64, any strides: the row of
            the cache for each token. By default tokens have the positions 0, 1, 2...
        interleaved: Whether pairs are neighbours, `(2 i, 2 i + 1)`, and not halves of a head,
            `(i, i + head_dim / 2)`.
        conjugate: Whether to rotate by the opposite angles.
        seqlen_offset: Added to every position.
        out: A buffer for the result, with a key two, that are filled and returned; not with
            gradients.

    Returns:
        The rotated query, contiguous; with a key `(query, key)`. A token whose position the cache
        does not have is not rotated on a GPU; on a CPU, and in the checked mode, it raises.

    Raises:
        TypeError: If an argument has another type or dtype.
        ValueError: If an argument has another shape or stride, or a position is out of range.

    Example:
        >>> cache = torch.tensor([[0.0, 1.0]])  # a quarter turn at position 0
        >>> rotary_embedding(torch.tensor([[[1.0, 2.0]]]), cache).tolist()
        [[[-2.0, 1.0]]]
    """
    arguments = (query, cos_sin_cache, key, positions, interleaved, conjugate, seqlen_offset)
    if out is None:
        result, key_result = ROTARY_EMBEDDING(*arguments)
    else:
        result, key_result = ROTARY_EMBEDDING.fill(arguments, out, (True, key is not None))
    return result if key is None else (result, key_result)


# ---- in place -----------------------------------------------------------------------------------

_INSTEAD = "tile_kernels.transform.rotary_embedding"


def _in_place(name: str, mutates: tuple[str, ...], **more: Any) -> Operator:
    return Operator(
        name,
        Arguments,
        outputs=_outputs_in_place,
        launches=_launches_in_place,
        check_values=check_values,
        reference=reference.apply_rotary,
        cost=cost,
        dynamic=_DYNAMIC,
        mutates=mutates,
        instead=_INSTEAD,
        **more,
    )


APPLY_ROTARY = _in_place("transform.apply_rotary", ("query",))
# With a key: the dispatcher has no optional argument that is written.
_APPLY_ROTARY_PAIR = _in_place(
    "transform._apply_rotary_pair", ("query", "key"), serves="apply_rotary"
)


@APPLY_ROTARY.public(mutates=("query", "key"))
def apply_rotary(
    query: Tensor,
    cos_sin_cache: Tensor,
    key: Tensor | None = None,
    positions: Tensor | None = None,
    interleaved: bool = False,
    conjugate: bool = False,
    seqlen_offset: int = 0,
) -> None:
    """Applies `rotary_embedding` in place, to query and key in one launch.

    Args:
        query: As in `rotary_embedding`; written.
        cos_sin_cache: As in `rotary_embedding`.
        key: As in `rotary_embedding`; written. It must not share memory with the query.
        positions: As in `rotary_embedding`.
        interleaved: As in `rotary_embedding`.
        conjugate: As in `rotary_embedding`.
        seqlen_offset: As in `rotary_embedding`.

    Raises:
        TypeError: If an argument has another type or dtype.
        ValueError: If an argument has another shape or stride, or a position is out of range on a
            CPU.
        RuntimeError: If a gradient would be lost: `rotary_embedding` has one.

    Example:
        >>> x, cache = torch.tensor([[[1.0, 2.0]]]), torch.tensor([[0.0, 1.0]])
        >>> apply_rotary(x, cache)
        >>> x.tolist()
        [[[-2.0, 1.0]]]
    """
    if torch.is_grad_enabled() and any(
        isinstance(x, Tensor) and x.requires_grad for x in (query, key)
    ):
        raise RuntimeError(no_gradient_message("apply_rotary", _INSTEAD))
    operator = APPLY_ROTARY if key is None else _APPLY_ROTARY_PAIR
    operator(query, cos_sin_cache, key, positions, interleaved, conjugate, seqlen_offset)
