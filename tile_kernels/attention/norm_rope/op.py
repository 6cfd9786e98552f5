"""Compression with what follows it in inference: norm, rotation, and the cast to e4m3."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tile_kernels.attention.geometry import geometry
from tile_kernels.attention.norm_rope import reference
from tile_kernels.attention.norm_rope.plan import (
    GROUP,
    MAX_THREADS,
    plan_fused,
    plan_rows,
    row_vector,
)
from tile_kernels.attention.windows import (
    Series,
    accessible,
    as_specs,
    check_sequences,
    check_series,
    check_windows,
    compress_windows,
    count_windows,
    place_windows,
    places_scratch,
)
from tile_kernels.runtime import checks
from tile_kernels.runtime.cases import Cost
from tile_kernels.runtime.declaration import Launch, Out, Size, Spec, dtype_name
from tile_kernels.runtime.launch import Kernel
from tile_kernels.runtime.operator import Operator

_FUSED = Kernel("tile_kernels.attention.norm_rope.kernel", "compress_tail", plan_fused)
_ROWS = Kernel("tile_kernels.attention.norm_rope.kernel", "norm_rope_cast", plan_rows)


class Arguments(NamedTuple):
    kv_a: Tensor
    z_a: Tensor
    bias_a: Tensor
    kv_b: Tensor | None
    z_b: Tensor | None
    bias_b: Tensor | None
    weight: Tensor
    cos: Tensor
    sin: Tensor
    eps: float
    cu_seqlens: Tensor | None
    num_windows: int | None

    def check(self) -> None:
        check_series(*self[:6])
        check_windows(self.cu_seqlens, self.num_windows)
        num_tokens, channels = self.kv_a.shape
        checks.tensor(
            "weight", self.weight, ("channels",), torch.float32, shape=(channels,), contiguous=True
        )
        dims = ("num_positions", "pairs")
        checks.tensor("cos", self.cos, dims, torch.float32, contiguous=True)
        checks.tensor(
            "sin", self.sin, dims, torch.float32, shape=tuple(self.cos.shape), contiguous=True
        )
        positions, pairs = self.cos.shape
        plain = channels - 2 * pairs
        if positions < 1 or pairs < 1 or plain < GROUP or plain % GROUP:
            raise ValueError(
                f"cos must have rows, and columns for pairs of channels that leave a multiple of "
                f"{GROUP} out of {channels}, got shape {tuple(self.cos.shape)}"
            )
        most = MAX_THREADS * row_vector(channels)
        if channels > most:
            raise ValueError(f"kv_a must have at most {most} channels here, got {channels}")
        checks.epsilon("eps", self.eps)
        if self.cu_seqlens is None:
            _check_positions(self.cos, num_tokens, self.bias_a.shape[0])

    def outputs(self) -> tuple[Out, Out, Out]:
        count, rotated = _count(self), 2 * self.cos.shape[1]
        plain = self.kv_a.shape[1] - rotated
        return (
            Out("codes", (count, plain), torch.float8_e4m3fn),
            Out("sf", (count, plain // GROUP), torch.float32),
            Out("rotated", (count, rotated), torch.bfloat16),
        )

    def launches(self, codes: Spec, sf: Spec, rotated: Spec, *scratch: Spec) -> list[Launch]:
        series = _series(self)
        num_places = 0 if self.cu_seqlens is None else 3
        places = scratch[num_places - 1] if num_places else None
        placed = place_windows(
            self.cu_seqlens, series.window, Size(lambda a: a.kv_a.shape[0]), scratch[:num_places]
        )
        tables: tuple[Any, ...] = (self.weight, self.cos, self.sin)
        rest = (accessible(tables[0]), *tables[1:], codes, sf, rotated, float(self.eps))
        channels, ragged, num_rotated = series.channels, places is not None, rotated.shape[1]
        if _is_fused(series):
            dtype, vector = dtype_name(series.kv_a), series.vector
            problem = (channels, series.window, series.number, ragged, dtype, vector, num_rotated)
            return [*placed, Launch(_FUSED, problem, (*series, places, *rest))]
        entries = scratch[-1]
        row_problem = (channels, series.window, ragged, row_vector(channels), num_rotated)
        return [
            *placed,
            compress_windows(series, places, entries),
            Launch(_ROWS, row_problem, (entries, places, *rest)),
        ]

    def check_values(self) -> None:
        check_sequences(self.cu_seqlens, self.kv_a, self.bias_a, self.num_windows)
        if self.cu_seqlens is not None and self.cu_seqlens.shape[0] > 1:
            _check_positions(self.cos, int(self.cu_seqlens.diff().max()), self.bias_a.shape[0])


def _check_positions(cos: Tensor, longest: int, window: int) -> None:
    """The tables have the positions of all windows of a sequence."""
    needed = longest // window * window - window + 1
    if isinstance(needed, int) and cos.shape[0] < needed:
        raise ValueError(f"cos must have at least {needed} rows, got {cos.shape[0]}")


def _count(a: Arguments) -> int:
    return count_windows(a.kv_a.shape[0], a.bias_a.shape[0], a.num_windows)


def _series(a: Arguments) -> Series:
    """The series, copied where threads could not load pairs of channels, which they rotate."""
    series = Series.of(*a[:6])
    if series.vector >= 2:
        return series
    return Series.of(*(None if x is None else accessible(x) for x in series))


def _is_fused(series: Series) -> bool:
    """Whether one thread has a window and one block a row."""
    geo = geometry(series.channels, series.window, series.number, series.vector)
    return geo.groups == 1 and geo.blocks_across == 1


def scratch(a: Arguments) -> tuple[Out, ...]:
    count = _count(a)
    places = places_scratch(a.cu_seqlens, count)
    if _is_fused(_series(as_specs(a))):
        return places
    return *places, Out("entries", (count, a.kv_a.shape[1]), torch.float32)


def cost(kv_a: Tensor, bias_a: Tensor, cos: Tensor, kv_b: Tensor | None = None, **_: Any) -> Cost:
    series = 1 if kv_b is None else 2
    (num_tokens, channels), window = kv_a.shape, bias_a.shape[0]
    rotated = 2 * cos.shape[1]
    plain = channels - rotated
    read = 2 * series * kv_a.numel() * kv_a.element_size() + 4 * series * bias_a.numel()
    entry = plain + plain // GROUP * 4 + 2 * rotated + 4 * rotated
    return Cost(read + num_tokens // window * entry, 8 * series * kv_a.numel())


def _reference(*fields: Any) -> tuple[Tensor, Tensor, Tensor]:
    by_name = dict(zip(Arguments._fields[6:], fields[6:]))
    return reference.kv_compress_norm_rope_cast(*fields[:6], **by_name)


KV_COMPRESS_NORM_ROPE_CAST = Operator(
    "attention.kv_compress_norm_rope_cast",
    Arguments,
    scratch=scratch,
    reference=_reference,
    cost=cost,
    dynamic={"kv_a": 1, "z_a": 1, "kv_b": 1, "z_b": 1, "cos": 1, "sin": 1, "cu_seqlens": 0},
    instead="tile_kernels.attention.kv_compress, which neither normalizes nor casts",
)


@KV_COMPRESS_NORM_ROPE_CAST.public(reference=reference.kv_compress_norm_rope_cast)
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
    """Computes `kv_compress` for inference: entries are normalized, rotated, and cast to e4m3.

    For each entry `e`, in float32 and rounded once at the end,

        x = e / sqrt(mean(e * e) + eps) * weight
        rotated[2 k], rotated[2 k + 1] = x0 c - x1 s, x0 s + x1 c

    with `x0, x1` the pair `k` of the last `rope_dim` channels and `c, s` those of position
    `i * window` for window `i` of its sequence. The other channels, a multiple of 64, are cast as
    `quant.per_token_cast(x, "e4m3", 64, round_sf=True)` does: `codes * sf`, with powers of two.
    The results have no gradient.

    The tables must have the positions of all windows. Without `cu_seqlens` the sizes show whether
    they do, and too few rows raise. With it, the lengths are known on the device alone: positions
    past the tables take their last row, and the checked mode raises.

    Windows of up to 4 tokens with two series, or 8 with one, of rows up to 1 KiB, take one pass;
    others go through a buffer of entries.

    Args:
        kv_a: As in `kv_compress`.
        z_a: As in `kv_compress`.
        bias_a: As in `kv_compress`.
        kv_b: As in `kv_compress`.
        z_b: As in `kv_compress`.
        bias_b: As in `kv_compress`.
        weight: `[channels]`, float32, contiguous: of the norm.
        cos: `[num_positions, rope_dim / 2]`, float32, contiguous: by position.
        sin: `[num_positions, rope_dim / 2]`, float32, contiguous: by position.
        eps: Of the norm; finite and not negative.
        cu_seqlens: As in `kv_compress`.
        num_windows: As in `kv_compress`.

    Returns:
        `(codes, sf, rotated)`, all contiguous: `[num_windows, channels - rope_dim]` in
        float8_e4m3fn, `[num_windows, (channels - rope_dim) / 64]` in float32, and
        `[num_windows, rope_dim]` in bfloat16.

    Raises:
        TypeError: If an argument has another type or dtype.
        ValueError: If an argument has another shape or stride, if the channels without rotation
            are no multiple of 64, or if the tables are too short.

    Example:
        >>> x, ones = torch.ones(1, 66), torch.ones(1, 1)
        >>> codes, sf, rotated = kv_compress_norm_rope_cast(
        ...     x, x, x, weight=x[0], cos=ones, sin=0 * ones, eps=0.0
        ... )
        >>> codes[0, 0].item(), sf.item(), rotated.tolist()
        (256.0, 0.00390625, [[1.0, 1.0]])
    """
    return KV_COMPRESS_NORM_ROPE_CAST(
        kv_a, z_a, bias_a, kv_b, z_b, bias_b, weight, cos, sin, eps, cu_seqlens, num_windows
    )
