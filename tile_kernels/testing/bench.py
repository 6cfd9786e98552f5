"""Labels of parametrised tests and benchmark records, and small printing helpers."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import torch

__all__ = [
    "dtype_to_str",
    "empty_suppress",
    "make_param_id",
    "make_param_key",
    "print_average_perf",
    "suppress_stdout_stderr",
]

_DTYPE_NAMES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "e4m3",
    torch.int8: "e2m1",  # two 4-bit floats per byte
}
_KEY_NAMES = {
    "num_ep_ranks": "ep",
    "num_experts": "experts",
    "use_tma_aligned_col_major_sf": "col",
    "use_packed_ue8m0": "ue8m0",
    "round_sf": "round",
}
_KEY_WIDTHS = {
    "num_tokens": 5,
    "num_ep_ranks": 2,
    "num_experts": 3,
    "hidden": 4,
    "num_per_channels": 4,
    "use_tma_aligned_col_major_sf": 1,
    "use_packed_ue8m0": 1,
    "round_sf": 1,
}


def dtype_to_str(dtype: torch.dtype) -> str:
    """The short name of a dtype that kernels take; int8 stands for packed e2m1.

    >>> dtype_to_str(torch.bfloat16), dtype_to_str(torch.int8)
    ('bf16', 'e2m1')
    """
    try:
        return _DTYPE_NAMES[dtype]
    except (KeyError, TypeError):
        known = ", ".join(str(known) for known in _DTYPE_NAMES)
        raise ValueError(f"dtype_to_str: dtype must be one of {known}, got {dtype}") from None


def make_param_id(params: Mapping[str, Any]) -> str:
    """A pytest id of one set of parameters: `key=value` joined by `-`, in the order of the dict.

    >>> make_param_id({"num_tokens": 4001, "dtype": torch.bfloat16, "block": (1, 128)})
    'num_tokens=4001-dtype=bf16-block=1x128'
    >>> make_param_id({})
    'default'
    """

    def show(value: Any) -> str:
        if isinstance(value, torch.dtype):
            return dtype_to_str(value)
        if isinstance(value, tuple):
            return "x".join(map(str, value))
        return str(value)

    return "-".join(f"{key}={show(value)}" for key, value in params.items()) or "default"


def make_param_key(params: Mapping[str, Any]) -> str:
    """A label of one set of parameters for reports: short names, columns aligned, no None.

    `key=value` joined by `,`, in the order of the dict. Flags print as 1 and 0.

    >>> make_param_key({"num_tokens": 4001, "num_experts": 32, "round_sf": True, "bias": None})
    'num_tokens= 4001,experts= 32,round=1'
    """

    def show(key: str, value: Any) -> str:
        if isinstance(value, torch.dtype):
            value = _DTYPE_NAMES.get(value, str(value))
        if key not in _KEY_WIDTHS:
            return str(value)
        if isinstance(value, bool):
            value = int(value)
        return str(value).rjust(_KEY_WIDTHS[key])

    return ",".join(
        f"{_KEY_NAMES.get(key, key)}={show(key, value)}"
        for key, value in params.items()
        if value is not None
    )


def _geometric_mean(values: Sequence[float]) -> float:
    if any(not value >= 0 for value in values):
        raise ValueError(f"print_average_perf: values must not be negative or NaN, got {values}")
    if 0 in values:
        return 0.0
    return math.exp(sum(map(math.log, values)) / len(values))


def print_average_perf(
    latency_list: Sequence[float],
    bandwidth_list: Sequence[float],
    relative_speed_list: Sequence[float],
) -> None:
    """Print the geometric means of latencies (us), bandwidths (GB/s) and speed-ups.

    An empty list of speed-ups counts as 1; without latencies or bandwidths a notice is printed.

    >>> print_average_perf([1, 4], [100, 400], [])
    Average Performance: 2.0 us, 200 GB/s, 1.00x speedup
    """
    if not latency_list or not bandwidth_list:
        print("Average Performance: nothing was measured")
        return
    latency = _geometric_mean(latency_list)
    bandwidth = _geometric_mean(bandwidth_list)
    speedup = _geometric_mean(relative_speed_list) if relative_speed_list else 1.0
    print(
        f"Average Performance: {latency:.1f} us, {bandwidth:.0f} GB/s, {speedup:.2f}x speedup",
        flush=True,
    )


class suppress_stdout_stderr:  # noqa: N801
    """Send stdout and stderr to the null device: Python's streams and file descriptors 1 and 2.

    The descriptors silence C++ libraries and child processes too. Both are restored on exit, also
    after an exception. Redirection is process-wide, so other threads fall silent as well.

    >>> with suppress_stdout_stderr():
    ...     print("not seen")
    """

    def __init__(self) -> None:
        self._entered: list[contextlib.ExitStack] = []

    def __enter__(self) -> suppress_stdout_stderr:
        _flush_standard_streams()
        with contextlib.ExitStack() as stack:
            null = stack.enter_context(Path(os.devnull).open("w"))
            for descriptor in (1, 2):
                try:
                    saved = os.dup(descriptor)
                except OSError:  # closed: nothing to silence
                    continue
                stack.callback(os.close, saved)
                stack.callback(os.dup2, saved, descriptor)
                os.dup2(null.fileno(), descriptor)
            stack.enter_context(contextlib.redirect_stdout(null))
            stack.enter_context(contextlib.redirect_stderr(null))
            self._entered.append(stack.pop_all())
        return self

    def __exit__(self, *exception: object) -> None:
        _flush_standard_streams()
        self._entered.pop().close()


def _flush_standard_streams() -> None:
    streams: tuple[TextIO | None, ...] = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    for stream in streams:
        # A stream may be absent (pythonw) or closed already.
        with contextlib.suppress(AttributeError, ValueError, OSError):
            if stream is not None:
                stream.flush()


class empty_suppress:  # noqa: N801
    """The counterpart of `suppress_stdout_stderr` that lets everything through.

    >>> with empty_suppress():
    ...     print("seen")
    seen
    """

    def __enter__(self) -> empty_suppress:
        return self

    def __exit__(self, *exception: object) -> None:
        return None
