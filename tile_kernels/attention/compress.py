"""Compression of keys and values by windows of tokens, and its gradients."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tile_kernels.attention.cases.compress import KV_COMPRESS
from tile_kernels.runtime import checks
from tile_kernels.runtime.cases import Cost
from tile_kernels.runtime.launch import Kernel, dtype_name, nonempty, row_alignment
from tile_kernels.runtime.op import face, op
from tile_kernels.torch import compress as oracles

MOST_WINDOW = 65536
_DTYPES = (torch.bfloat16, torch.float32)

_COMPRESS = Kernel("tile_kernels.attention.kernels.compress", "compress")
_PLACES = Kernel("tile_kernels.attention.kernels.compress", "place_windows")


def _check_series(
    names: tuple[str, str, str], kv: Tensor, z: Tensor, bias: Tensor, like: Tensor | None = None
) -> None:
    """One series; of the sizes and the dtype of `like`, the values of another one, if given."""
    dims = ("num_tokens", "channels")
    dtype = _DTYPES if like is None else like.dtype
    shape = None if like is None else tuple(like.shape)
    checks.tensor(names[0], kv, dims, dtype, shape=shape, unit_inner_stride=True)
    if kv.shape[1] < 1:
        raise ValueError(f"{names[0]} must have at least one channel, got 0")
    shape = tuple(kv.shape)
    checks.tensor(names[1], z, dims, kv.dtype, shape=shape, unit_inner_stride=True)
    checks.tensor(
        names[2], bias, ("window", "channels"), torch.float32, shape=(None, shape[1]),
        unit_inner_stride=True,
    )  # fmt: skip
    if not 1 <= bias.shape[0] <= MOST_WINDOW:
        raise ValueError(f"{names[2]} must have 1..{MOST_WINDOW} rows, got {bias.shape[0]}")


def check_series(
    kv_a: Tensor,
    z_a: Tensor,
    bias_a: Tensor,
    kv_b: Tensor | None,
    z_b: Tensor | None,
    bias_b: Tensor | None,
) -> None:
    """Series a, and series b like it or not at all."""
    _check_series(("kv_a", "z_a", "bias_a"), kv_a, z_a, bias_a)
    given = [name for name, x in (("kv_b", kv_b), ("z_b", z_b), ("bias_b", bias_b)) if x is not None]
    if kv_b is None or z_b is None or bias_b is None:
        if given:
            raise ValueError(f"kv_b, z_b and bias_b must be given together, got {', '.join(given)}")
        return
    _check_series(("kv_b", "z_b", "bias_b"), kv_b, z_b, bias_b, like=kv_a)
    if bias_b.shape[0] != bias_a.shape[0]:
        rows = f"{bias_a.shape[0]} rows as bias_a has"
        raise ValueError(f"bias_b must have {rows}, got {bias_b.shape[0]}")


def check_windows(cu_seqlens: Tensor | None, num_windows: int | None) -> None:
    """Sequences, and the number of entries."""
    if cu_seqlens is not None:
        checks.tensor("cu_seqlens", cu_seqlens, ("num_bounds",), torch.int32, contiguous=True)
        if cu_seqlens.shape[0] < 1:
            raise ValueError("cu_seqlens must have at least one element, got 0")
    if num_windows is not None:
        checks.integer("num_windows", num_windows, 0, checks.MOST_SIZE)


def check_sequences(cu_seqlens: Tensor | None, num_tokens: int, window: int, entries: int) -> None:
    """For the checked mode: bounds are in order, and all windows have an entry."""
    if cu_seqlens is None:
        return
    checks.in_range("cu_seqlens", cu_seqlens, 0, num_tokens)
    falls = (cu_seqlens.diff() < 0).nonzero()
    if len(falls):
        raise ValueError(f"cu_seqlens must not decrease, but element {falls[0].tolist()} does")
    needed = int((cu_seqlens.diff() // window).sum())
    if needed > entries:
        raise ValueError(f"num_windows must be at least {needed}, got {entries}")


def vector_of(channels: int, rows: list[Tensor], biases: list[Tensor]) -> int:
    """Channels that a thread loads at once: 16 bytes where all rows start at a multiple of that."""
    size = rows[0].element_size()
    vector = math.gcd(channels, 16 // size, *(max(row_alignment(x) // size, 1) for x in rows))
    part = math.gcd(vector, 4, *(row_alignment(x) // 4 for x in biases))
    return vector if part == min(vector, 4) else part


def unit_stride(x: Tensor) -> Tensor:
    """`x` with stride 1 in its last dimension also where that has one element."""
    if x.stride(1) == 1:
        return x
    return x.as_strided(x.shape, (x.stride(0), 1))


def count_windows(
    num_tokens: int, window: int, cu_seqlens: Tensor | None, num_windows: int | None
) -> int:
    """Entries of a result: as given, else as many as the tokens could have."""
    if num_windows is not None:
        return num_windows
    return num_tokens // window


def place_windows(
    cu_seqlens: Tensor, num_tokens: int, window: int, num_windows: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Bounds inside the tokens, windows before each of them, and where each window lies."""
    bounds, counted = torch.empty_like(cu_seqlens), torch.empty_like(cu_seqlens)
    places = cu_seqlens.new_empty((num_windows, 3))
    _PLACES.launch((window,), cu_seqlens, bounds, counted, places, num_tokens)
    return bounds, counted, places


def _check(
    kv_a: Tensor,
    z_a: Tensor,
    bias_a: Tensor,
    kv_b: Tensor | None,
    z_b: Tensor | None,
    bias_b: Tensor | None,
    cu_seqlens: Tensor | None,
    num_windows: int | None,
    out_dtype: torch.dtype | None,
) -> None:
    check_series(kv_a, z_a, bias_a, kv_b, z_b, bias_b)
    check_windows(cu_seqlens, num_windows)
    if cu_seqlens is None and num_windows is not None:
        raise ValueError("num_windows is for sequences: it needs cu_seqlens")
    if out_dtype is not None and out_dtype not in _DTYPES:
        raise TypeError(f"out_dtype must be bfloat16 or float32, got {out_dtype}")


def _check_values(*arguments: Any) -> None:
    kv_a, bias_a, cu_seqlens, num_windows = arguments[0], arguments[2], *arguments[6:8]
    window = bias_a.shape[0]
    entries = count_windows(kv_a.shape[0], window, cu_seqlens, num_windows)
    check_sequences(cu_seqlens, kv_a.shape[0], window, entries)


def _oracle(
    kv_a: Tensor,
    z_a: Tensor,
    bias_a: Tensor,
    kv_b: Tensor | None,
    z_b: Tensor | None,
    bias_b: Tensor | None,
    cu_seqlens: Tensor | None,
    num_windows: int | None,
    out_dtype: torch.dtype | None,
) -> Tensor:
    return oracles.kv_compress(
        kv_a, z_a, bias_a, kv_b, z_b, bias_b,
        cu_seqlens=cu_seqlens, num_windows=num_windows, out_dtype=out_dtype,
    )  # fmt: skip


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
    oracle=_oracle,
    cost=_cost,
    cases=KV_COMPRESS,
    values=_check_values,
    name="kv_compress",
)
def _compress(
    kv_a: Tensor,
    z_a: Tensor,
    bias_a: Tensor,
    kv_b: Tensor | None,
    z_b: Tensor | None,
    bias_b: Tensor | None,
    cu_seqlens: Tensor | None,
    num_windows: int | None,
    out_dtype: torch.dtype | None,
) -> Tensor:
    num_tokens, channels = kv_a.shape
    window = bias_a.shape[0]
    entries = count_windows(num_tokens, window, cu_seqlens, num_windows)
    out = kv_a.new_empty((entries, channels), dtype=out_dtype or kv_a.dtype)
    if nonempty(out):
        places = None
        if cu_seqlens is not None:
            _, _, places = place_windows(cu_seqlens, num_tokens, window, entries)
        launch_compress(kv_a, z_a, bias_a, kv_b, z_b, bias_b, places, out)
    return out


def launch_compress(
    kv_a: Tensor,
    z_a: Tensor,
    bias_a: Tensor,
    kv_b: Tensor | None,
    z_b: Tensor | None,
    bias_b: Tensor | None,
    places: Tensor | None,
    out: Tensor,
) -> None:
    """Fill `out` with the entries of windows, which lie one after the other or at `places`."""
    rows = [unit_stride(x) for x in (kv_a, z_a, kv_b, z_b) if x is not None]
    biases = [unit_stride(x) for x in (bias_a, bias_b) if x is not None]
    vector = vector_of(kv_a.shape[1], rows, biases)
    problem = (
        kv_a.shape[1], bias_a.shape[0], len(biases), places is not None,
        dtype_name(kv_a), dtype_name(out), vector,
    )  # fmt: skip
    of_b = (None, None, None) if kv_b is None else (rows[2], rows[3], biases[1])
    _COMPRESS.launch(problem, rows[0], rows[1], biases[0], *of_b, places, out)


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
