"""Compression with norm, rotation and cast: many windows per block, short tables."""

from __future__ import annotations

import pytest
import torch

import tile_kernels
from tests.attention.helpers import arguments
from tile_kernels import attention
from tile_kernels import torch as references
from tile_kernels.attention.norm_rope.cases import KV_COMPRESS_NORM_ROPE_CAST
from tile_kernels.runtime.cases import assert_equal_results


def test_blocks_walk_over_windows_to_cast(one_sm: None) -> None:
    given = arguments(1300, 80, 4)
    angle = torch.rand(1300, 8)
    given |= {"weight": torch.rand(80), "cos": angle.cos(), "sin": angle.sin()}
    with tile_kernels.backend("emulate"):
        result = attention.kv_compress_norm_rope_cast(**given)
    KV_COMPRESS_NORM_ROPE_CAST.compare(result, references.kv_compress_norm_rope_cast(**given))


@pytest.mark.parametrize("backend", ["torch", "emulate"])
def test_positions_past_the_tables(backend: str) -> None:
    """Refused where sizes tell, in the checked mode where lengths do; else the last row counts."""
    given = arguments(32, 80, 4)
    angle = torch.rand(29, 8)
    enough = {"weight": torch.rand(80), "cos": angle.cos(), "sin": angle.sin()}
    few = {**enough, "cos": enough["cos"][:28], "sin": enough["sin"][:28]}
    bounds = {"cu_seqlens": torch.tensor([0, 32], dtype=torch.int32)}
    last = [torch.cat((few[name], few[name][-1:])) for name in ("cos", "sin")]
    message = "kv_compress_norm_rope_cast: cos must have at least 29 rows, got 28"
    with tile_kernels.backend(backend):
        whole = attention.kv_compress_norm_rope_cast(**given, **enough)
        assert_equal_results(
            attention.kv_compress_norm_rope_cast(**given, **enough, **bounds), whole
        )
        with pytest.raises(ValueError, match=message):
            attention.kv_compress_norm_rope_cast(**given, **few)
        found = attention.kv_compress_norm_rope_cast(**given, **few, **bounds)
        repeated = {**enough, "cos": last[0], "sin": last[1]}
        assert_equal_results(found, attention.kv_compress_norm_rope_cast(**given, **repeated))
        with tile_kernels.checked(), pytest.raises(ValueError, match=message):
            attention.kv_compress_norm_rope_cast(**given, **few, **bounds)
