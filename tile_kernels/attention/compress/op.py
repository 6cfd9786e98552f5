"""Compression of keys and values by windows of tokens, and its gradients."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tile_kernels.attention.compress import reference
from tile_kernels.attention.compress.plan import plan_gradients
from tile_kernels.attention.compress.reference import Gradients, halves
from tile_kernels.attention.windows import (
    DTYPES,
    Series,
    accessible,
    as_specs,
    check_dtype,
    check_packed,
    check_sequences,
    check_series,
    check_windows,
    compress_windows,
    count_parts,
    count_windows,
    place_windows,
    places_scratch,
)
from tile_kernels.runtime import checks
from tile_kernels.runtime.autograd import last_gradients
from tile_kernels.runtime.cases import Cost
from tile_kernels.runtime.declaration import Host, Launch, Out, Size, Spec, dtype_name
from tile_kernels.runtime.launch import Kernel
from tile_kernels.runtime.operator import Operator

_GRADIENTS = Kernel("tile_kernels.attention.compress.kernel", "gradients", plan_gradients)

# Sizes that follow from the number of tokens, of windows and of sequences.
_DYNAMIC = {
    "grad_out": 1, "kv_a": 1, "z_a": 1, "kv_b": 1, "z_b": 1, "kv": 1, "gate": 1, "cu_seqlens": 0
}  # fmt: skip


# ---- forward ------------------------------------------------------------------------------------


class Arguments(NamedTuple):
    kv_a: Tensor
    z_a: Tensor
    bias_a: Tensor
    kv_b: Tensor | None
    z_b: Tensor | None
    bias_b: Tensor | None
    cu_seqlens: Tensor | None
    num_windows: int | None
    out_dtype: torch.dtype | None

    def check(self) -> None:
        check_series(*self[:6])
        _check_result(self)

    def outputs(self) -> Out:
        return _result(self, self.kv_a.shape[1])

    def launches(self, out: Spec, *places: Spec) -> list[Launch]:
        return _launches(self, Series.of(*self[:6]), out, places)


class PackedArguments(NamedTuple):
    """Both series in one tensor."""

    kv: Tensor
    gate: Tensor
    ape: Tensor
    cu_seqlens: Tensor | None
    num_windows: int | None
    out_dtype: torch.dtype | None

    def check(self) -> None:
        check_packed(*self[:3])
        _check_result(self)

    def outputs(self) -> Out:
        return _result(self, self.kv.shape[1] // 2)

    def launches(self, out: Spec, *places: Spec) -> list[Launch]:
        return _launches(self, Series.of(*_unpacked(*self[:3])), out, places)


AnyArguments = Arguments | PackedArguments  # the first field has the values, the third the biases


def _check_result(a: AnyArguments) -> None:
    check_windows(a.cu_seqlens, a.num_windows)
    check_dtype("out_dtype", a.out_dtype)


def _num_windows(a: AnyArguments) -> int:
    return count_windows(a[0].shape[0], a[2].shape[0], a.num_windows)


def _result(a: AnyArguments, channels: int) -> Out:
    return Out("out", (_num_windows(a), channels), a.out_dtype or a[0].dtype)


def _launches(a: AnyArguments, series: Series, out: Spec, places: Sequence[Spec]) -> list[Launch]:
    placed = place_windows(a.cu_seqlens, series.window, Size(lambda a: a[0].shape[0]), places)
    return [*placed, compress_windows(series, places[-1] if places else None, out)]


def scratch(a: AnyArguments) -> tuple[Out, ...]:
    return places_scratch(a.cu_seqlens, _num_windows(a))


def check_values(a: AnyArguments) -> None:
    check_sequences(a.cu_seqlens, a[0], a[2], a.num_windows)


def _columns(x: Spec, first: int, count: int) -> Spec:
    aligned = math.gcd(x.alignment, first * x.element_size())
    like = Spec((x.shape[0], count), x.stride(), x.dtype, x.device, aligned)
    return x.apply(Tensor.narrow, 1, first, count, like=like)


def _unpacked(*tensors: Any) -> list[Spec]:
    """Values, scores and biases of series a, the high halves, then those of series b."""
    width = tensors[0].shape[1] // 2
    return [_columns(x, first, width) for first in (width, 0) for x in tensors]


def cost(
    kv_a: Tensor,
    bias_a: Tensor,
    kv_b: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    **_: Any,
) -> Cost:
    series = 1 if kv_b is None else 2
    (num_tokens, channels), window = kv_a.shape, bias_a.shape[0]
    read = 2 * series * num_tokens * kv_a.element_size() + 4 * series * window
    written = num_tokens // window * (out_dtype or kv_a.dtype).itemsize
    return Cost((read + written) * channels, 8 * series * kv_a.numel())


def packed_cost(kv: Tensor, ape: Tensor, out_dtype: torch.dtype | None = None, **_: Any) -> Cost:
    half, _other = halves(kv)
    return cost(half, halves(ape)[0], half, out_dtype)


def _by_field(formula: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A reference that takes the fields of a record by position."""

    def call(*fields: Any) -> Tensor:
        *given, cu_seqlens, num_windows, out_dtype = fields
        return formula(*given, cu_seqlens=cu_seqlens, num_windows=num_windows, out_dtype=out_dtype)

    return call


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    *series_and_bounds, _, _ = inputs
    ctx.save_for_backward(*series_and_bounds)


def _gradients(
    name: str, formula: Callable[..., Any], ctx: Any, grad_out: Tensor
) -> tuple[Any, ...]:
    """Of all arguments, by an operator `formula` that has no gradient itself."""
    *series, cu_seqlens = ctx.saved_tensors
    grads = formula(grad_out, *series, cu_seqlens=cu_seqlens)
    inputs = [x for x in (grad_out, *series) if x is not None]
    message = f"{name}: there is no second derivative"
    return *last_gradients(message, grads, inputs), None, None, None


def _backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
    return _gradients("kv_compress", kv_compress_bwd, ctx, grad_out)


def _packed_backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
    return _gradients("kv_compress_packed", kv_compress_packed_bwd, ctx, grad_out)


_declare = functools.partial(
    Operator, scratch=scratch, check_values=check_values, dynamic=_DYNAMIC, setup_context=_save
)
KV_COMPRESS = _declare(
    "attention.kv_compress",
    Arguments,
    reference=_by_field(reference.kv_compress),
    cost=cost,
    backward=_backward,
)
KV_COMPRESS_PACKED = _declare(
    "attention.kv_compress_packed",
    PackedArguments,
    reference=_by_field(reference.kv_compress_packed),
    cost=packed_cost,
    backward=_packed_backward,
)


@KV_COMPRESS.public(reference=reference.kv_compress)
def kv_compress(
    kv_a: Tensor,
    z_a: Tensor,
    bias_a: Tensor,
    kv_b: Tensor | None = None,
    z_b: Tensor | None = None,
    bias_b: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    num_windows: int | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Compresses each window of tokens to one entry: a softmax over them, channel by channel.

    A sequence of `n` tokens has `n // window` windows; what is left over emits nothing. Window `i`
    takes its own tokens from series a and, with series b and unless it is the sequence's first,
    those of window `i - 1` from series b. In float32, over all these tokens together and for each
    channel by itself,

        out = sum(softmax(z + bias) * kv)

    rounded once. If all scores of a channel are -inf, its entry is 0.

    The entries of sequences follow each other without gaps. Their number is known on the GPU alone,
    and the host does not wait for it: without `num_windows` the result has `num_tokens // window`
    rows, which is always enough. Rows past the last window are zeros.

    The result is differentiable with respect to values, scores and biases; see `kv_compress_bwd`.
    It is fastest when all rows start at multiples of 16 bytes.

    Args:
        kv_a: `[num_tokens, channels]`, bfloat16 or float32, any row stride, stride 1 in the last
            dimension. The values.
        z_a: `[num_tokens, channels]`, dtype of `kv_a`, any row stride, stride 1 in the last
            dimension. The scores.
        bias_a: `[window, channels]`, float32, stride 1 in the last dimension: added to the scores
            by position in the window. `window` is in `1..65536`.
        kv_b: Values of the series that overlaps, like `kv_a`; None for one series.
        z_b: Scores of that series, like `z_a`.
        bias_b: Biases of that series, like `bias_a`.
        cu_seqlens: `[num_sequences + 1]`, int32, contiguous: the bounds of sequences. None: all
            tokens are one sequence.
        num_windows: The number of entries to return, which `cu_seqlens` allows to choose. None:
            `num_tokens // window`.
        out_dtype: bfloat16 or float32; None: the dtype of `kv_a`.

    Returns:
        `[num_windows, channels]`, `out_dtype`, contiguous.

    Raises:
        TypeError: If an argument has another type or dtype.
        ValueError: If an argument has another shape or stride, if series b is given in part, or
            `num_windows` without `cu_seqlens`.

    Example:
        >>> kv, z = torch.tensor([[1.0], [3.0], [5.0], [7.0]]), torch.zeros(4, 1)
        >>> kv_compress(kv, z, torch.zeros(2, 1)).tolist()
        [[2.0], [6.0]]
        >>> kv_compress(kv, z, torch.zeros(2, 1), -kv, z, torch.zeros(2, 1)).tolist()
        [[2.0], [2.0]]
    """
    return KV_COMPRESS(kv_a, z_a, bias_a, kv_b, z_b, bias_b, cu_seqlens, num_windows, out_dtype)


@KV_COMPRESS_PACKED.public(reference=reference.kv_compress_packed)
def kv_compress_packed(
    kv: Tensor,
    gate: Tensor,
    ape: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    num_windows: int | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Computes `kv_compress` of two series in one tensor, as one projection computes them.

    The low half of the channels is series b, which the next window takes; the high half is series
    a, which its own window takes. The result is differentiable with respect to the three tensors,
    and the gradients are packed too.

    Args:
        kv: `[num_tokens, 2 * channels]`, bfloat16 or float32, any row stride, stride 1 in the last
            dimension. The values.
        gate: `[num_tokens, 2 * channels]`, dtype of `kv`, any row stride, stride 1 in the last
            dimension. The scores.
        ape: `[window, 2 * channels]`, float32, stride 1 in the last dimension: biases by position
            in the window. `window` is in `1..65536`.
        cu_seqlens: As in `kv_compress`.
        num_windows: As in `kv_compress`.
        out_dtype: As in `kv_compress`.

    Returns:
        `[num_windows, channels]`, `out_dtype`, contiguous.

    Raises:
        TypeError: If an argument has another type or dtype.
        ValueError: If an argument has another shape or stride, an odd number of channels, or
            `num_windows` comes without `cu_seqlens`.

    Example:
        >>> kv = torch.tensor([[10.0, 1.0], [20.0, 2.0]])  # windows of one token
        >>> kv_compress_packed(kv, torch.zeros(2, 2), torch.zeros(1, 2)).tolist()
        [[1.0], [6.0]]
    """
    return KV_COMPRESS_PACKED(kv, gate, ape, cu_seqlens, num_windows, out_dtype)


# ---- gradients ----------------------------------------------------------------------------------


class BackwardArguments(NamedTuple):
    grad_out: Tensor
    kv_a: Tensor
    z_a: Tensor
    bias_a: Tensor
    kv_b: Tensor
    z_b: Tensor
    bias_b: Tensor
    cu_seqlens: Tensor | None

    def outputs(self) -> tuple[Out, Out, Out, Out, Out, Out]:
        return *_outputs("_a", *self[1:4]), *_outputs("_b", *self[4:7])


class OneSeriesBackwardArguments(NamedTuple):
    grad_out: Tensor
    kv_a: Tensor
    z_a: Tensor
    bias_a: Tensor
    cu_seqlens: Tensor | None

    def outputs(self) -> tuple[Out, Out, Out]:
        return _outputs("_a", *self[1:4])


class PackedBackwardArguments(NamedTuple):
    grad_out: Tensor
    kv: Tensor
    gate: Tensor
    ape: Tensor
    cu_seqlens: Tensor | None

    def outputs(self) -> tuple[Out, Out, Out]:
        return _outputs("", *self[1:4])


OneOrTwo = BackwardArguments | OneSeriesBackwardArguments
AnyBackwardArguments = OneOrTwo | PackedBackwardArguments


def _outputs(name: str, kv: Tensor, z: Tensor, bias: Tensor) -> tuple[Out, Out, Out]:
    return (
        Out(f"grad_kv{name}", kv.shape, kv.dtype),
        Out(f"grad_z{name}", z.shape, z.dtype),
        Out(f"grad_bias{name}", bias.shape, bias.dtype),
    )


def _check_grad(a: AnyBackwardArguments, channels: int) -> None:
    check_windows(a.cu_seqlens, None)
    entries = a[1].shape[0] // a[3].shape[0] if a.cu_seqlens is None else None
    checks.tensor(
        "grad_out", a.grad_out, ("num_windows", "channels"), DTYPES, shape=(entries, channels)
    )


def check_bwd(a: OneOrTwo) -> None:
    check_series(*a[1:-1])
    _check_grad(a, a.kv_a.shape[1])


def check_packed_bwd(a: PackedBackwardArguments) -> None:
    check_packed(*a[1:-1])
    _check_grad(a, a.kv.shape[1] // 2)


def check_bwd_values(a: AnyBackwardArguments) -> None:
    check_sequences(a.cu_seqlens, a[1], a[3], a.grad_out.shape[0], "grad_out")


def _series(a: AnyBackwardArguments, tensors: Sequence[Any]) -> Series:
    """Those of `tensors`, which are packed if the arguments are."""
    return Series(*(_unpacked(*tensors) if isinstance(a, PackedBackwardArguments) else tensors))


def scratch_bwd(a: AnyBackwardArguments) -> tuple[Out, ...]:
    """The sums of bias gradients of each block, and where windows lie."""
    if a.grad_out.numel() == 0:
        return ()
    series = Series.of(*_series(a, as_specs(a)[1:-1]))
    number, window, channels = series.number, series.window, series.channels
    num_windows = a.grad_out.shape[0]
    problem = (channels, window, number, series.vector)
    parts = count_parts(num_windows, problem, a.grad_out.device)
    partial = Out("partial", (parts, number, window, channels), torch.float32)
    return partial, *places_scratch(a.cu_seqlens, num_windows)


def launches_bwd(a: AnyBackwardArguments, *outs: Spec) -> list[Launch | Host]:
    num_results = len(a) - 2
    series, grads = Series.of(*_series(a, a[1:-1])), _series(a, outs[:num_results])
    grad_out: Any = a.grad_out
    if grad_out.numel() == 0:
        return [Host(Tensor.zero_, (x,)) for x in (*grads.rows, *grads.biases)]
    partial, *places = outs[num_results:]
    problem = (
        series.channels, series.window, series.number, a.cu_seqlens is not None,
        dtype_name(series.kv_a), dtype_name(grad_out), series.vector,
    )  # fmt: skip
    arguments = (
        accessible(grad_out), *series, *(places or (None, None, None)),
        grads.kv_a, grads.z_a, grads.kv_b, grads.z_b, grads.bias_a, grads.bias_b, partial,
    )  # fmt: skip
    placed = place_windows(a.cu_seqlens, series.window, Size(lambda a: a[1].shape[0]), places)
    return [*placed, Launch(_GRADIENTS, problem, arguments)]


def cost_bwd(
    grad_out: Tensor, kv_a: Tensor, bias_a: Tensor, kv_b: Tensor | None = None, **_: Any
) -> Cost:
    series = 1 if kv_b is None else 2
    rows = 4 * series * kv_a.numel() * kv_a.element_size()
    biases = 8 * series * bias_a.numel()
    return Cost(
        rows + biases + grad_out.numel() * grad_out.element_size(), 16 * series * kv_a.numel()
    )


def packed_cost_bwd(grad_out: Tensor, kv: Tensor, ape: Tensor, **_: Any) -> Cost:
    return cost_bwd(grad_out, halves(kv)[0], halves(ape)[0], halves(kv)[1])


def _reference_bwd(*fields: Any) -> tuple[Tensor, ...]:
    *given, cu_seqlens = fields
    grads = reference.kv_compress_bwd(*given, cu_seqlens=cu_seqlens)
    return tuple(grad for grad in grads if grad is not None)


def _packed_reference_bwd(*fields: Any) -> tuple[Tensor, Tensor, Tensor]:
    *given, cu_seqlens = fields
    return reference.kv_compress_packed_bwd(*given, cu_seqlens=cu_seqlens)


_declare_bwd = functools.partial(
    Operator,
    launches=launches_bwd,
    scratch=scratch_bwd,
    check_values=check_bwd_values,
    dynamic=_DYNAMIC,
)
KV_COMPRESS_BWD = _declare_bwd(
    "attention.kv_compress_bwd",
    BackwardArguments,
    check=check_bwd,
    reference=_reference_bwd,
    cost=cost_bwd,
)
KV_COMPRESS_BWD_ONE_SERIES = _declare_bwd(
    "attention._kv_compress_bwd_one_series",
    OneSeriesBackwardArguments,
    check=check_bwd,
    reference=_reference_bwd,
    serves="kv_compress_bwd",
)
KV_COMPRESS_PACKED_BWD = _declare_bwd(
    "attention.kv_compress_packed_bwd",
    PackedBackwardArguments,
    check=check_packed_bwd,
    reference=_packed_reference_bwd,
    cost=packed_cost_bwd,
)


@KV_COMPRESS_BWD.public(reference=reference.kv_compress_bwd)
def kv_compress_bwd(
    grad_out: Tensor,
    kv_a: Tensor,
    z_a: Tensor,
    bias_a: Tensor,
    kv_b: Tensor | None = None,
    z_b: Tensor | None = None,
    bias_b: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
) -> Gradients:
    """Computes the gradients of `kv_compress`; the softmax weights are recomputed, not saved.

    With `p` the weight of a token in its window and `g` the gradient of the entry, in float32,

        grad_kv = p * g        grad_z = p * g * (kv - out)        grad_bias = sum(grad_z)

    the last over windows, by position in the window. A token counts in one window through each
    series, so only the biases' gradients are sums over threads. Their order is fixed: the same
    input gives the same bits. Tokens that no window takes have zeros.

    Args:
        grad_out: `[num_windows, channels]`, bfloat16 or float32; copied if it is not contiguous.
        kv_a: As in `kv_compress`, and so are the others.
        z_a: As in `kv_compress`.
        bias_a: As in `kv_compress`.
        kv_b: As in `kv_compress`.
        z_b: As in `kv_compress`.
        bias_b: As in `kv_compress`.
        cu_seqlens: As in `kv_compress`.

    Returns:
        `(grad_kv_a, grad_z_a, grad_bias_a, grad_kv_b, grad_z_b, grad_bias_b)`, all contiguous. The
        gradients of values and scores are `[num_tokens, channels]` with the dtype of `kv_a`, those
        of biases `[window, channels]` in float32. The last three are None without series b.

    Raises:
        TypeError: If an argument has another type or dtype.
        ValueError: If an argument has another shape or stride, or series b is given in part.

    Example:
        >>> kv, z = torch.tensor([[1.0], [3.0], [5.0]]), torch.zeros(3, 1)
        >>> grads = kv_compress_bwd(torch.ones(1, 1), kv, z, torch.zeros(2, 1))
        >>> grads[0].tolist(), grads[1].tolist()
        ([[0.5], [0.5], [0.0]], [[-0.5], [0.5], [0.0]])
    """
    if kv_b is None and z_b is None and bias_b is None:
        grads = KV_COMPRESS_BWD_ONE_SERIES(grad_out, kv_a, z_a, bias_a, cu_seqlens)
        return *grads, None, None, None
    return KV_COMPRESS_BWD(grad_out, kv_a, z_a, bias_a, kv_b, z_b, bias_b, cu_seqlens)


@KV_COMPRESS_PACKED_BWD.public(reference=reference.kv_compress_packed_bwd)
def kv_compress_packed_bwd(
    grad_out: Tensor,
    kv: Tensor,
    gate: Tensor,
    ape: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the gradients of `kv_compress_packed`, packed like its arguments.

    The formulas and the guarantees are those of `kv_compress_bwd`.

    Args:
        grad_out: `[num_windows, channels]`, bfloat16 or float32; copied if it is not contiguous.
        kv: As in `kv_compress_packed`, and so are the others.
        gate: As in `kv_compress_packed`.
        ape: As in `kv_compress_packed`.
        cu_seqlens: As in `kv_compress_packed`.

    Returns:
        `(grad_kv, grad_gate, grad_ape)`, all contiguous: `[num_tokens, 2 * channels]` with the
        dtype of `kv` twice, and `[window, 2 * channels]` in float32.

    Raises:
        TypeError: If an argument has another type or dtype.
        ValueError: If an argument has another shape or stride, or an odd number of channels.

    Example:
        >>> kv, gate = torch.tensor([[10.0, 1.0], [20.0, 2.0]]), torch.zeros(2, 2)
        >>> grads = kv_compress_packed_bwd(torch.ones(2, 1), kv, gate, torch.zeros(1, 2))
        >>> grads[0].tolist()
        [[0.5, 1.0], [0.0, 0.5]]
    """
    return KV_COMPRESS_PACKED_BWD(grad_out, kv, gate, ape, cu_seqlens)
