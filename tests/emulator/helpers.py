"""Shared by the emulator's tests: build and run in one call, hand-written sources, mutations."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from tile_kernels.emulator import Emulated, EmulationError, Report
from tile_kernels.emulator.lowering import Kernel, Lowered, Param, SharedBuffer

from .sample_kernels import PLAIN


def run(
    prim_func: Any,
    *args: Any,
    configs: dict[Any, Any] | None = None,
    order: str = "forward",
    seed: int = 0,
    async_late: bool = True,
    **options: Any,
) -> Report:
    """Build a prim_func (plain pass configs) and call it once."""
    emulated = Emulated.build(
        prim_func, pass_configs=PLAIN if configs is None else configs, **options
    )
    return emulated(*args, order=order, seed=seed, async_late=async_late)


def fails(kind: str, prim_func: Any, *args: Any, **options: Any) -> EmulationError:
    """Run a kernel that must fail with this kind of error."""
    with pytest.raises(EmulationError) as caught:
        run(prim_func, *args, **options)
    assert caught.value.kind == kind, str(caught.value)
    return caught.value


def reports_in_all_orders(
    emulated: Emulated, make_args: Callable[[], Sequence[Any]]
) -> list[EmulationError]:
    """What the emulator says about fresh arguments in each of the three orders."""
    reports: list[EmulationError] = []
    for order in ("forward", "reverse", "random"):
        try:
            emulated(*make_args(), order=order)
        except EmulationError as e:
            reports.append(e)
    return reports


def cuda_source(
    body: str,
    tensors: dict[str, str],
    *,
    threads: int = 32,
    blocks: int = 1,
    shared: dict[str, SharedBuffer] | None = None,
    mode: str = "check",
    cooperative: bool | None = None,
) -> Emulated:
    """A hand-written kernel `probe` over 1-D tensors (name -> C element type), for intrinsics."""
    dtypes = {
        "int": "int32",
        "unsigned": "uint32",
        "float": "float32",
        "half_t": "float16",
        "bfloat16_t": "bfloat16",
        "uchar": "uint8",
        "long long": "int64",
        "unsigned long long": "uint64",
    }
    names = sorted(tensors)
    signature = ", ".join(f"{tensors[n]}* __restrict__ {n}" for n in names)
    head = f'extern "C" __global__ void __launch_bounds__({threads}, 1) probe({signature})'
    source = f"{head} {{\n{body}\n}}\n"
    kernel = Kernel(
        name="probe",
        args=tuple((n, "tensor") for n in names),
        grid=(str(blocks), "1", "1"),
        block=(str(threads), "1", "1"),
        dyn_bytes="0",
        shared=shared or {},
    )
    params = tuple(Param(n, dtypes[t], (f"size_{n}",)) for n, t in tensors.items())
    lowered = Lowered("probe", "sm_90a", source, params, (kernel,), {}, "this_grid" in source)
    return Emulated.from_lowered(lowered, mode=mode, cooperative=cooperative)


def replace_nth(pattern: str, n: int, new: str = "") -> Callable[[str], str]:
    """A source transform that replaces the n-th match and nothing else."""

    def transform(source: str) -> str:
        matches = list(re.finditer(pattern, source))
        m = matches[n]
        return source[: m.start()] + new + source[m.end() :]

    return transform


def rand(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Normal values from a generator of its own."""
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g).to(dtype)


E2M1 = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def unpack_fp4(packed: torch.Tensor) -> torch.Tensor:
    """Values of packed E2M1 bytes, low half first."""
    b = packed.view(torch.uint8).long()
    return torch.stack([E2M1[b & 15], E2M1[b >> 4]], dim=-1).flatten(-2)
