"""What an operator's declaration says for tests, benchmarks and warm-up: argument sets."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Arguments = dict[str, Any]
Build = Callable[[torch.device], Arguments]


def assert_equal_results(result: Any, expected: Any) -> None:
    """Byte for byte, strides included; tuples by element."""
    from tile_kernels.testing.numeric import assert_equal

    if type(result) is not type(expected):
        raise AssertionError(f"expected {type(expected).__name__}, got {type(result).__name__}")
    if isinstance(expected, torch.Tensor):
        assert_equal(result, expected)
    elif isinstance(expected, (tuple, list)):
        if len(result) != len(expected):
            raise AssertionError(f"{len(result)} results, expected {len(expected)}")
        for one, other in zip(result, expected):
            assert_equal_results(one, other)
    elif result != expected:
        raise AssertionError(f"{result!r} != {expected!r}")


def close_results(
    rtol: float, atol: float, rtol_bfloat16: float | None = None, strays: float = 0
) -> Callable[[Any, Any], None]:
    """A comparison for `Cases`: floating-point tensors to a tolerance, the rest to the bit.

    bfloat16 to one of its own, if given; `atol` counts in units of the root mean square of what is
    expected, where that is above 1, as sums of many terms have it. NaN equals NaN, of any bits;
    dtypes, shapes and strides count as always. `strays` is the share of elements that may be
    anywhere: where the sign of a sum decides, rounding flips some.
    """
    tolerances = {} if rtol_bfloat16 is None else {torch.bfloat16: rtol_bfloat16}

    def compare(result: Any, expected: Any) -> None:
        if isinstance(expected, (tuple, list)) and type(result) is type(expected):
            assert_equal_results(len(result), len(expected))
            for one, other in zip(result, expected):
                compare(one, other)
        elif isinstance(expected, torch.Tensor) and expected.is_floating_point():
            assert_equal_results(torch.zeros_like(result), torch.zeros_like(expected))
            relative = tolerances.get(expected.dtype, rtol)
            size = expected.double().nan_to_num(0, 0, 0).square().mean().sqrt().nan_to_num(0)
            absolute = atol * max(1.0, size.item())
            if strays:
                far = ~torch.isclose(result, expected, relative, absolute, equal_nan=True)
                if 0 < far.sum().item() <= strays * far.numel():
                    result = torch.where(far, expected, result)
            torch.testing.assert_close(
                result, expected, rtol=relative, atol=absolute, equal_nan=True
            )
        else:
            assert_equal_results(result, expected)

    return compare


def changed(**changes: Any) -> Callable[[Arguments], Arguments]:
    """An edit of good arguments, for `Reject`: these instead."""
    return lambda arguments: {**arguments, **changes}


def edited(name: str, edit: Callable[[Any], Any]) -> Callable[[Arguments], Arguments]:
    """An edit of one good argument, for `Reject`."""
    return lambda arguments: {**arguments, name: edit(arguments[name])}


def with_value(name: str, value: int, place: int = -1) -> Callable[[Arguments], Arguments]:
    """An edit that puts `value` at a place of a tensor, by default the last."""

    def edit(arguments: Arguments) -> Arguments:
        tensor = arguments[name].clone()
        tensor.view(-1)[place] = value
        return {**arguments, name: tensor}

    return edit


def misaligned(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, one element into their storage."""
    flat = torch.zeros(x.numel() + 1, dtype=x.dtype, device=x.device)
    return flat[1:].view(x.shape).copy_(x)


def moved(value: Any, device: torch.device | str) -> Any:
    """Arguments or results with every tensor on `device`; strides and padding are kept."""
    if isinstance(value, torch.Tensor):
        device = torch.device(device)
        if device.type in (value.device.type, "meta"):
            return value.to(device)
        storage = value.untyped_storage().to(device=device)
        view = (value.storage_offset(), value.shape, value.stride())
        return torch.empty(0, dtype=value.dtype, device=device).set_(storage, *view)
    if isinstance(value, dict):
        return {name: moved(item, device) for name, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(moved(item, device) for item in value)
    return value


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors of arguments or results, those inside tuples included."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = tuple(value.values())
    return (
        [t for item in value for t in tensors_in(item)] if isinstance(value, (tuple, list)) else []
    )


@dataclass(frozen=True)
class Cost:
    """What a call must do at least: bytes through device memory, floating-point operations."""

    bytes: int
    flops: int = 0


@dataclass(frozen=True)
class Sample:
    """One argument set. `make(device)` builds it; the random state follows from the label."""

    label: str
    make: Build

    def build(self, device: torch.device | str) -> Arguments:
        """The arguments on `device`; same label, same device type: same values."""
        device = torch.device(device)
        if device.type == "meta":
            return self.make(device)
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(zlib.crc32(self.label.encode()))
            return self.make(device)


@dataclass(frozen=True)
class Benchmark(Sample):
    """A sample worth timing; `goal_us` is the device time we hold ourselves to on an H200."""

    goal_us: float | None = None


@dataclass(frozen=True)
class Vector:
    """A worked example from the specification: arguments and the result, by hand."""

    label: str
    arguments: Callable[[], Arguments]
    expected: Callable[[], Any]


@dataclass(frozen=True)
class Reject:
    """A wrong argument that must raise with its name in the message; `change` edits good ones."""

    argument: str
    label: str
    change: Callable[[Arguments], Arguments]


@dataclass(frozen=True)
class Cases:
    """All argument sets of one operator.

    `small` cross every guard of the kernel at sizes that an emulator runs quickly, zero and one
    token included; `large` are for GPUs; `benchmarks` are timed. `rejects` are refused always,
    `bad_values` in the checked mode. `compare(result, expected)` raises `AssertionError` where they
    differ; by default every bit and stride counts. `any_rank`: one dimension more is no error.
    """

    small: Sequence[Sample]
    large: Sequence[Sample] = ()
    benchmarks: Sequence[Benchmark] = ()
    vectors: Sequence[Vector] = ()
    rejects: Sequence[Reject] = ()
    bad_values: Sequence[Reject] = ()
    compare: Callable[[Any, Any], None] = assert_equal_results
    any_rank: bool = False

    def ordinary(self) -> Sample:
        """A small sample in which no dimension of a tensor is 0 or 1."""
        for sample in self.small:
            tensors = tensors_in(sample.build("meta"))
            if all(size > 1 for tensor in tensors for size in tensor.shape):
                return sample
        raise ValueError("every small sample has a dimension of 0 or 1")
