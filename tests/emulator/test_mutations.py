"""The checker itself under test: delete one synchronisation at a time and expect a report.

A deletion that changes nothing observable is listed in `REDUNDANT` with the reason; the test fails
if such a deletion is reported after all, so the list cannot rot.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tile_kernels.emulator import Emulated
from tile_kernels.emulator.cache import open_cache
from tile_kernels.emulator.lowering import Lowered, lower

from . import sample_kernels as k
from .helpers import rand, replace_nth, reports_in_all_orders

SYNC = r"__syncthreads\(\);"
CP_WAIT = r"tl::cp_async_wait<\d+>\(\);"
MBAR_WAIT = r"\w+\[[^;]*\]\.wait\([^;]*\);"
STORE_WAIT = r"tl::tma_store_wait<[^;]*>\(\);"
WGMMA_WAIT = r"tl::(?:warpgroup_wait|wait_wgmma)<\d+>\(\);"
BF16 = torch.bfloat16


def _ids() -> torch.Tensor:
    return torch.arange(5000, dtype=torch.int32) % 257


KERNELS: dict[str, tuple[Callable[[], Any], dict[Any, Any], str, Callable[[], list[Any]]]] = {
    "transpose": (
        k.transpose,
        k.PLAIN,
        "sm_90a",
        lambda: [rand(70, 133, dtype=BF16), torch.zeros(133, 70, dtype=BF16)],
    ),
    "histogram": (
        lambda: k.histogram(257),
        k.PLAIN,
        "sm_90a",
        lambda: [_ids(), torch.zeros(257, dtype=torch.int32)],
    ),
    "softmax": (
        lambda: k.softmax(512),
        k.PLAIN,
        "sm_90a",
        lambda: [rand(3, 512, dtype=BF16), torch.zeros(3, 512)],
    ),
    "pipelined_rowsum": (
        lambda: k.pipelined_rowsum(2048),
        k.PLAIN,
        "sm_90a",
        lambda: [rand(13, 2048), rand(2048, seed=1), torch.zeros(13)],
    ),
    "gemm_mma": (
        lambda: k.gemm(64, 128, 128),
        k.PLAIN,
        "sm_80",
        lambda: [rand(64, 128, dtype=BF16), rand(128, 128, dtype=BF16), torch.zeros(64, 128)],
    ),
    "gemm_wgmma": (
        lambda: k.gemm(64, 128, 128),
        k.PLAIN,
        "sm_90a",
        lambda: [rand(64, 128, dtype=BF16), rand(128, 128, dtype=BF16), torch.zeros(64, 128)],
    ),
    "gemm_tma": (
        lambda: k.gemm(64, 128, 256, tma=True, stages=3),
        {},
        "sm_90a",
        lambda: [rand(64, 256, dtype=BF16), rand(128, 256, dtype=BF16), torch.zeros(64, 128)],
    ),
    "tma_copy": (
        lambda: k.tma_copy(70, 136),
        k.PLAIN,
        "sm_90a",
        lambda: [rand(70, 136, dtype=BF16), torch.zeros(70, 136, dtype=BF16)],
    ),
    "bulk_copy": (
        lambda: k.bulk_copy(512),
        k.PLAIN,
        "sm_90a",
        lambda: [rand(3, 512, dtype=BF16), torch.zeros(3, 512, dtype=BF16)],
    ),
    "count_and_offsets": (
        lambda: k.count_and_offsets(64, 128),
        k.PLAIN,
        "sm_90a",
        lambda: [
            torch.arange(300, dtype=torch.int32) % 64,
            *(torch.zeros(n, dtype=torch.int32) for n in (64, 64, 300)),
        ],
    ),
}

# (kernel, pattern, index) -> why deleting it is harmless
REDUNDANT: dict[tuple[str, str, int], str] = {
    ("softmax", SYNC, 0): "the reduction that follows starts with a barrier of its own",
    ("pipelined_rowsum", SYNC, 4): "the reduction that follows starts with a barrier of its own",
    ("tma_copy", SYNC, 1): "the thread that stores the tile has itself waited for the mbarrier",
    ("bulk_copy", SYNC, 1): "the thread that stores the row has itself waited for the mbarrier",
}
# Their first effect is an mbarrier used before it is initialised, or too often in one phase.
BREAKS_AN_MBARRIER = {
    ("gemm_tma", SYNC, 0),
    ("gemm_tma", MBAR_WAIT, 0),
    ("tma_copy", SYNC, 0),
    ("bulk_copy", SYNC, 0),
}


def _lowered(name: str) -> Lowered:
    prim, configs, arch, _ = KERNELS[name]
    return lower(prim(), arch=arch, pass_configs=configs, cache_dir=open_cache())


def _mutations() -> list[tuple[str, str, int]]:
    """Counted by hand in the generated sources; `test_counts` keeps this honest."""
    counts = {
        "transpose": {SYNC: 1},
        "histogram": {SYNC: 2},
        "softmax": {SYNC: 1},
        "pipelined_rowsum": {SYNC: 5, CP_WAIT: 3},
        "gemm_mma": {SYNC: 3, CP_WAIT: 2},
        "gemm_wgmma": {SYNC: 3, CP_WAIT: 2, WGMMA_WAIT: 2},
        "gemm_tma": {SYNC: 1, MBAR_WAIT: 2, WGMMA_WAIT: 1},
        "tma_copy": {SYNC: 2, MBAR_WAIT: 1, STORE_WAIT: 1},
        "bulk_copy": {SYNC: 2, MBAR_WAIT: 1, STORE_WAIT: 1},
        "count_and_offsets": {SYNC: 4},
    }
    return [(n, p, i) for n, by in counts.items() for p, c in by.items() for i in range(c)]


PATTERN_NAMES = {
    SYNC: "syncthreads",
    CP_WAIT: "cp_async_wait",
    MBAR_WAIT: "mbarrier_wait",
    STORE_WAIT: "store_wait",
    WGMMA_WAIT: "wgmma_wait",
}


@pytest.mark.parametrize("name", KERNELS)
def test_counts(name: str) -> None:
    """Every synchronisation of every listed kernel is mutated."""
    source = _lowered(name).source
    for pattern, label in PATTERN_NAMES.items():
        found = len(re.findall(pattern, source))
        listed = len([m for m in _mutations() if m[:2] == (name, pattern)])
        assert found == listed, f"{label}: {found} in the source"


@pytest.mark.parametrize(
    "mutation", _mutations(), ids=lambda m: f"{m[0]}-{PATTERN_NAMES[m[1]]}-{m[2]}"
)
def test_deleted_synchronisation_is_reported(mutation: tuple[str, str, int]) -> None:
    name, pattern, index = mutation
    emulated = Emulated.from_lowered(_lowered(name), transform=replace_nth(pattern, index))
    reports = reports_in_all_orders(emulated, KERNELS[name][3])
    if mutation in REDUNDANT:
        assert not reports, REDUNDANT[mutation]
    else:
        kinds = {e.kind for e in reports}
        expected = "barrier" if mutation in BREAKS_AN_MBARRIER else "race"
        assert kinds == {expected}, [str(e) for e in reports]
