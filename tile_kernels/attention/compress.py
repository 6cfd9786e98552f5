"""Compression of keys and values by windows of tokens."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tile_kernels.attention.adapters import in_order
from tile_kernels.attention.cases.compress import KV_COMPRESS, KV_COMPRESS_PACKED
from tile_kernels.attention.gradients import kv_compress_bwd, kv_compress_packed_bwd
from tile_kernels.attention.windows import (
    Series,
    check_dtype,
    check_packed,
    check_sequences,
    check_series,
    check_windows,
    count_windows,
    place_windows,
)
from tile_kernels.runtime.cases import Cost
from tile_kernels.runtime.launch import Kernel, dtype_name, nonempty
from tile_kernels.runtime.op import face, gradient, last_gradients, op
from tile_kernels.torch import compress as oracles
from tile_kernels.torch.compress import halves, unpacked

_COMPRESS = Kernel("tile_kernels.attention.kernels.compress", "compress")


def launch_compress(series: Series, places: Tensor | None, out: Tensor) -> None:
    """Fill `out` with the entries of windows, which lie one after the other or at `places`."""
    problem = (
        series.kv_a.shape[1], series.bias_a.shape[0], series.number, places is not None,
        dtype_name(series.kv_a), dtype_name(out), series.vector,
    )  # fmt: skip
    _COMPRESS.launch(problem, *series, places, out)


def _entries(
    series: Series,
    cu_seqlens: Tensor | None,
    num_windows: int | None,
    out_dtype: torch.dtype | None,
) -> Tensor:
    num_tokens, channels = series.kv_a.shape
    window = series.bias_a.shape[0]
    count = count_windows(num_tokens, window, num_windows)
    out = series.kv_a.new_empty((count, channels), dtype=out_dtype or series.kv_a.dtype)
    if nonempty(out):
        places = None
        if cu_seqlens is not None:
            _, _, places = place_windows(cu_seqlens, num_tokens, window, count)
        launch_compress(series, places, out)
    return out


def _check_result(
    cu_seqlens: Tensor | None, num_windows: int | None, out_dtype: torch.dtype | None
) -> None:
    check_windows(cu_seqlens, num_windows)
    check_dtype("out_dtype", out_dtype)


def _check_values(*arguments: Any) -> None:
    kv, _, bias, *_, cu_seqlens, num_windows, _ = arguments
    check_sequences(cu_seqlens, kv, bias, num_windows)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    *series_and_bounds, _, _ = inputs
    ctx.save_for_backward(*series_and_bounds)


def _backward(name: str, gradients: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
    """A backward formula by the operator `gradients`, which has none itself."""

    def backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
        *series, cu_seqlens = ctx.saved_tensors
        grads = gradients(grad_out, *series, cu_seqlens=cu_seqlens)
        inputs = [x for x in (grad_out, *series) if x is not None]
        message = f"{name}: there is no second derivative"
        return *last_gradients(message, grads, inputs), None, None, None

    return backward


# ---- two series, or one -------------------------------------------------------------------------

_ORACLE = in_order(oracles.kv_compress)


def _check(*arguments: Any) -> None:
    check_series(*arguments[:6])
    _check_result(*arguments[6:])


def _cost(
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


@op(
    check=_check,
    oracle=_ORACLE,
    cost=_cost,
    cases=KV_COMPRESS,
    values=_check_values,
    name="kv_compress",
    signature=inspect.signature(_ORACLE),
)
def _compress(*arguments: Any) -> Tensor:
    return _entries(Series.of(*arguments[:6]), *arguments[6:])


gradient(_compress, _backward("kv_compress", kv_compress_bwd), setup_context=_save)


@face(_compress, oracle=oracles.kv_compress)
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
    """One entry for each window of tokens: a softmax over them, channel by channel.

    | argument | shape | dtype | meaning |
    |---|---|---|---|
    | `kv_a` | `[num_tokens, channels]` | bfloat16 or float32, `stride(1) == 1` | values |
    | `z_a` | `[num_tokens, channels]` | as `kv_a`, `stride(1) == 1` | scores |
    | `bias_a` | `[window, channels]` | float32, `stride(1) == 1` | by position in the window |
    | `kv_b`, `z_b`, `bias_b` | as those of a | as those of a | the series that overlaps, or None |
    | `cu_seqlens` | `[num_sequences + 1]` | int32, contiguous | bounds; None: one sequence |
    | `num_windows` | | int or None | entries to return, with `cu_seqlens` |
    | `out_dtype` | | bfloat16, float32 | None: that of `kv_a` |
    | returns | `[num_windows, channels]` | `out_dtype`, contiguous | |

    A sequence of `n` tokens has `n // window` windows; what is left over emits nothing. Window `i`
    takes its own tokens from series a and, with series b and unless it is the sequence's first,
    those of window `i - 1` from series b. In float32, over all these tokens together,

        out = sum(softmax(z + bias) * kv)        for each channel by itself

    rounded once. If all scores of a channel are -inf, its entry is 0.

    The entries of sequences follow each other without gaps. How many there are is known on the GPU
    alone, and nothing waits for it: without `num_windows` the result has `num_tokens // window`
    rows, which is always enough; rows past the last window are zeros. With it, the result has
    that many.

    Differentiable with respect to values, scores and biases; see `kv_compress_bwd`. Rows may have
    any stride; fastest when all start at multiples of 16 bytes. `window` is up to 65536.

    Raises `TypeError` or `ValueError` with the argument's name.

    >>> kv, z = torch.tensor([[1.0], [3.0], [5.0], [7.0]]), torch.zeros(4, 1)
    >>> kv_compress(kv, z, torch.zeros(2, 1)).tolist()
    [[2.0], [6.0]]
    >>> kv_compress(kv, z, torch.zeros(2, 1), -kv, z, torch.zeros(2, 1)).tolist()
    [[2.0], [2.0]]
    """
    return _compress(kv_a, z_a, bias_a, kv_b, z_b, bias_b, cu_seqlens, num_windows, out_dtype)


# ---- both series in one tensor ------------------------------------------------------------------

_PACKED_ORACLE = in_order(oracles.kv_compress_packed)


def _check_both(*arguments: Any) -> None:
    check_packed(*arguments[:3])
    _check_result(*arguments[3:])


def _cost_both(kv: Tensor, ape: Tensor, out_dtype: torch.dtype | None = None, **_: Any) -> Cost:
    half, _other = halves(kv)
    return _cost(half, halves(ape)[0], half, out_dtype)


@op(
    check=_check_both,
    oracle=_PACKED_ORACLE,
    cost=_cost_both,
    cases=KV_COMPRESS_PACKED,
    values=_check_values,
    name="kv_compress_packed",
    signature=inspect.signature(_PACKED_ORACLE),
)
def _compress_both(*arguments: Any) -> Tensor:
    return _entries(Series.of(*unpacked(*arguments[:3])), *arguments[3:])


_both_backward = _backward("kv_compress_packed", kv_compress_packed_bwd)
gradient(_compress_both, _both_backward, setup_context=_save)


@face(_compress_both, oracle=oracles.kv_compress_packed)
def kv_compress_packed(
    kv: Tensor,
    gate: Tensor,
    ape: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    num_windows: int | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """`kv_compress` of two series in one tensor, as one projection makes them.

    | argument | shape | dtype | meaning |
    |---|---|---|---|
    | `kv` | `[num_tokens, 2 * channels]` | bfloat16 or float32, `stride(1) == 1` | values |
    | `gate` | `[num_tokens, 2 * channels]` | as `kv`, `stride(1) == 1` | scores |
    | `ape` | `[window, 2 * channels]` | float32, `stride(1) == 1` | biases by position |
    | `cu_seqlens`, `num_windows`, `out_dtype` | as in `kv_compress` | | |
    | returns | `[num_windows, channels]` | `out_dtype`, contiguous | |

    The low half of the channels is series b, which the next window takes, the high half series a,
    which its own window takes. Differentiable with respect to the three tensors; the gradients are
    packed too.

    Raises `TypeError` or `ValueError` with the argument's name.

    >>> kv = torch.tensor([[10.0, 1.0], [20.0, 2.0]])  # windows of one token
    >>> kv_compress_packed(kv, torch.zeros(2, 2), torch.zeros(1, 2)).tolist()
    [[1.0], [6.0]]
    """
    return _compress_both(kv, gate, ape, cu_seqlens, num_windows, out_dtype)
