"""Compression with what follows it in inference: norm, rotation, and the cast to e4m3."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from tile_kernels.attention.adapters import in_order
from tile_kernels.attention.cases.tail import KV_COMPRESS_NORM_ROPE_CAST
from tile_kernels.attention.compress import launch_compress
from tile_kernels.attention.geometry import geometry
from tile_kernels.attention.windows import (
    Series,
    accessible,
    check_sequences,
    check_series,
    check_windows,
    count_windows,
    place_windows,
)
from tile_kernels.runtime import checks
from tile_kernels.runtime.cases import Cost
from tile_kernels.runtime.launch import Kernel, dtype_name, nonempty
from tile_kernels.runtime.op import face, op
from tile_kernels.torch import compress as oracles

GROUP = 64  # channels that share a scale
MOST_THREADS = 1024  # of a row that is too long to be compressed and cast by one block

_FUSED = Kernel("tile_kernels.attention.kernels.tail", "compress_tail")
_TAIL = Kernel("tile_kernels.attention.kernels.tail", "norm_rope_cast")
_ORACLE = in_order(oracles.kv_compress_norm_rope_cast)


def _row_vector(channels: int) -> int:
    """Channels of a thread where a row of entries is cast by itself."""
    return 8 if channels % 8 == 0 else 4 if channels % 4 == 0 else 2


def _check(*arguments: Any) -> None:
    *series, weight, cos, sin, eps, cu_seqlens, num_windows = arguments
    check_series(*series)
    check_windows(cu_seqlens, num_windows)
    kv_a, _, bias_a, *_ = series
    num_tokens, channels = kv_a.shape
    checks.tensor(
        "weight", weight, ("channels",), torch.float32, shape=(channels,), contiguous=True
    )
    dims = ("num_positions", "pairs")
    checks.tensor("cos", cos, dims, torch.float32, contiguous=True)
    checks.tensor("sin", sin, dims, torch.float32, shape=tuple(cos.shape), contiguous=True)
    plain = channels - 2 * cos.shape[1]
    if cos.shape[0] < 1 or cos.shape[1] < 1 or plain < GROUP or plain % GROUP:
        raise ValueError(
            f"cos must have rows, and columns for pairs of channels that leave a multiple of "
            f"{GROUP} out of {channels}, got shape {tuple(cos.shape)}"
        )
    if channels > MOST_THREADS * _row_vector(channels):
        most = MOST_THREADS * _row_vector(channels)
        raise ValueError(f"kv_a must have at most {most} channels here, got {channels}")
    checks.epsilon("eps", eps)
    if cu_seqlens is None:
        _check_positions(cos, num_tokens, bias_a.shape[0])


def _check_positions(cos: Tensor, longest: int, window: int) -> None:
    """The tables have the positions of all windows of a sequence."""
    needed = longest // window * window - window + 1
    if isinstance(needed, int) and cos.shape[0] < needed:
        raise ValueError(f"cos must have at least {needed} rows, got {cos.shape[0]}")


def _check_values(*arguments: Any) -> None:
    kv_a, bias_a, cos = arguments[0], arguments[2], arguments[7]
    cu_seqlens, num_windows = arguments[10:12]
    check_sequences(cu_seqlens, kv_a, bias_a, num_windows)
    if cu_seqlens is not None and cu_seqlens.shape[0] > 1:
        _check_positions(cos, int(cu_seqlens.diff().max()), bias_a.shape[0])


def _cost(kv_a: Tensor, bias_a: Tensor, cos: Tensor, kv_b: Tensor | None = None, **_: Any) -> Cost:
    series = 1 if kv_b is None else 2
    (num_tokens, channels), window = kv_a.shape, bias_a.shape[0]
    rotated = 2 * cos.shape[1]
    plain = channels - rotated
    read = 2 * series * kv_a.numel() * kv_a.element_size() + 4 * series * bias_a.numel()
    entry = plain + plain // GROUP * 4 + 2 * rotated + 4 * rotated
    return Cost(read + num_tokens // window * entry, 8 * series * kv_a.numel())


@op(
    check=_check,
    oracle=_ORACLE,
    cost=_cost,
    cases=KV_COMPRESS_NORM_ROPE_CAST,
    instead="tile_kernels.attention.kv_compress, which neither normalises nor casts",
    values=_check_values,
    name="kv_compress_norm_rope_cast",
    signature=inspect.signature(_ORACLE),
)
def _compress_and_cast(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    *given, weight, cos, sin, eps, cu_seqlens, num_windows = arguments
    series = Series.of(*given)
    kv_a = series.kv_a
    num_tokens, channels = kv_a.shape
    window, rotated = series.bias_a.shape[0], 2 * cos.shape[1]
    plain = channels - rotated
    count = count_windows(num_tokens, window, num_windows)
    codes = kv_a.new_empty((count, plain), dtype=torch.float8_e4m3fn)
    sf = kv_a.new_empty((count, plain // GROUP), dtype=torch.float32)
    turned = kv_a.new_empty((count, rotated), dtype=torch.bfloat16)
    if not nonempty(turned):
        return codes, sf, turned
    places = None
    if cu_seqlens is not None:
        _, _, places = place_windows(cu_seqlens, num_tokens, window, count)
    vector = series.vector
    if vector < 2:  # a thread turns pairs
        series = Series.of(*(None if x is None else accessible(x) for x in series))
        vector = series.vector
    geo = geometry(channels, window, series.number, vector)
    rest = (accessible(weight), cos, sin, codes, sf, turned, float(eps))
    if geo.groups == 1 and geo.blocks_across == 1:
        problem = (
            channels, window, series.number, places is not None, dtype_name(kv_a), vector, rotated,
        )  # fmt: skip
        _FUSED.launch(problem, *series, places, *rest)
    else:
        entries = kv_a.new_empty((count, channels), dtype=torch.float32)
        launch_compress(series, places, entries)
        row_problem = (channels, window, places is not None, _row_vector(channels), rotated)
        _TAIL.launch(row_problem, entries, places, *rest)
    return codes, sf, turned


@face(_compress_and_cast, oracle=oracles.kv_compress_norm_rope_cast)
def kv_compress_norm_rope_cast(
    kv_a: Tensor,
    z_a: Tensor,
    bias_a: Tensor,
    kv_b: Tensor | None = None,
    z_b: Tensor | None = None,
    bias_b: Tensor | None = None,
    *,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float = 1e-6,
    cu_seqlens: Tensor | None = None,
    num_windows: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`kv_compress` for inference: entries normalised, rotated, and cast to e4m3.

    | argument | shape | dtype | meaning |
    |---|---|---|---|
    | `kv_a`, `z_a`, `bias_a`, `kv_b`, `z_b`, `bias_b` | those of `kv_compress` | | |
    | `weight` | `[channels]` | float32, contiguous | of the norm |
    | `cos`, `sin` | `[num_positions, rope_dim / 2]` | float32, contiguous | by position |
    | `eps` | | float | of the norm |
    | `cu_seqlens`, `num_windows` | those of `kv_compress` | | |
    | returns `codes` | `[num_windows, channels - rope_dim]` | float8_e4m3fn, contiguous | |
    | returns `sf` | `[num_windows, (channels - rope_dim) / 64]` | float32, contiguous | |
    | returns `rotated` | `[num_windows, rope_dim]` | bfloat16, contiguous | |

    For each entry `e`, in float32 and rounded once at the end,

        x = e / sqrt(mean(e * e) + eps) * weight
        rotated[2 k], rotated[2 k + 1] = x0 c - x1 s, x0 s + x1 c

    with `x0, x1` the pair `k` of the last `rope_dim` channels and `c, s` those of position
    `i * window` for window `i` of its sequence. The other channels, a multiple of 64, are cast as
    `quant.per_token_cast(x, "e4m3", 64, round_sf=True)` does: `codes * sf`, with powers of two.
    Without a gradient.

    The tables must have the positions of all windows. Without `cu_seqlens` their sizes tell, and
    fewer rows raise. With it, only the device knows the lengths: positions past the tables take
    their last row, and the checked mode raises.

    Windows of up to 4 tokens with two series, or 8 with one, of rows up to 1 KiB, are done in one
    pass; others go through a buffer of entries.

    Raises `TypeError` or `ValueError` with the argument's name.

    >>> x, ones = torch.ones(1, 66), torch.ones(1, 1)
    >>> codes, sf, rotated = kv_compress_norm_rope_cast(
    ...     x, x, x, weight=x[0], cos=ones, sin=0 * ones, eps=0.0
    ... )
    >>> codes[0, 0].item(), sf.item(), rotated.tolist()
    (256.0, 0.00390625, [[1.0, 1.0]])
    """
    return _compress_and_cast(
        kv_a, z_a, bias_a, kv_b, z_b, bias_b, weight, cos, sin, eps, cu_seqlens, num_windows
    )
