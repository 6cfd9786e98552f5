"""The `emulate` backend: real kernels on CPU tensors, and what it can tell about them."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

import tile_kernels
from tests.requirements import run_fresh
from tile_kernels.runtime import emulation, registry

SCORES = torch.randn(6, 72, generator=torch.Generator().manual_seed(0))
MATRIX = torch.arange(136.0 * 200).view(136, 200)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("moe.topk_gate", {"scores": SCORES, "num_topk": 6}),
        ("transpose.transpose", {"x": MATRIX}),
        ("transpose.batched_transpose", {"x": MATRIX.view(2, 68, 200)}),
    ],
)
def test_kernels_read_and_write_every_byte_once(name: str, arguments: dict[str, Any]) -> None:
    op = registry.get(name)
    with tile_kernels.backend("emulate"), emulation.reports() as reports:
        op.function(**arguments)
    (report,) = reports
    assert report.buffers is not None
    moved = sum(traffic.read + traffic.written for traffic in report.buffers.values())
    assert moved == op.cost(**arguments).bytes
    for traffic in report.buffers.values():
        assert traffic.read == traffic.distinct_read
        assert traffic.written == traffic.distinct_written


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_100a"])
def test_sources_of_other_architectures_run_too(arch: str) -> None:
    expected = tile_kernels.torch.stable_topk(SCORES, 6)
    with tile_kernels.backend("emulate", arch=arch):
        assert torch.equal(tile_kernels.moe.topk_gate(SCORES, 6), expected)
        assert torch.equal(tile_kernels.transpose.transpose(MATRIX), MATRIX.T)


def test_fast_mode_and_merged_shared_memory() -> None:
    for options in ({"mode": "fast"}, {"split_shared": False}):
        with tile_kernels.backend("emulate", **options), emulation.reports() as reports:
            assert torch.equal(tile_kernels.transpose.transpose(MATRIX), MATRIX.T)
        assert (reports[0].buffers is None) == (options.get("mode") == "fast")


def test_options_are_checked_and_nest() -> None:
    with pytest.raises(ValueError, match="mode must be one of fast, check, got 'slow'"):
        tile_kernels.backend("emulate", mode="slow").__enter__()
    with pytest.raises(TypeError, match="'torch' takes no options, got mode"):
        tile_kernels.backend("torch", mode="fast").__enter__()
    with (
        tile_kernels.backend("emulate", mode="fast"),
        tile_kernels.backend("emulate", order="reverse"),
        emulation.emulating() as options,
    ):
        assert (options.mode, options.order) == ("fast", "reverse")


def test_environment_variable_selects_the_backend() -> None:
    code = (
        "import torch, tile_kernels; from tile_kernels.runtime import emulation\n"
        "with emulation.reports() as r: tile_kernels.transpose.transpose(torch.ones(4, 8))\n"
        "print(len(r))"
    )
    for choice, launches in (("emulate", "1"), ("torch", "0")):
        assert run_fresh(code, TILE_KERNELS_BACKEND=choice) == launches
    done = subprocess.run(
        [sys.executable, "-c", "import tile_kernels; tile_kernels.backend"],
        env={**os.environ, "TILE_KERNELS_BACKEND": "cuda"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "TILE_KERNELS_BACKEND must be one of auto, tilelang, torch, emulate" in done.stderr
