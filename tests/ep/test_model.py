"""Sizes and counts against published figures and figures worked out apart from this code."""

from __future__ import annotations

import pytest
import torch

from tile_kernels.ep import model

HOPPER = {"rdma_gbs": 50, "nvlink_gbs": 430, "num_device_sms": 132}
BLACKWELL = {"rdma_gbs": 50, "nvlink_gbs": 810, "num_device_sms": 148}


@pytest.mark.parametrize(
    ("nodes", "ranks", "device", "overlap", "expected"),
    [
        (1, 8, HOPPER, True, 14),
        (2, 8, HOPPER, True, 12),
        (4, 8, HOPPER, True, 6),
        (8, 8, HOPPER, True, 4),
        (1, 8, BLACKWELL, True, 24),
        (1, 8, BLACKWELL, False, 64),
        (1, 1, HOPPER, True, 132),
    ],
)
def test_sms(nodes: int, ranks: int, device: dict, overlap: bool, expected: int) -> None:
    found = model.num_sms(nodes, ranks, 256, 8, prefer_overlap_with_compute=overlap, **device)
    assert found == expected


def test_sms_in_direct_mode_over_two_machines() -> None:
    found = model.num_sms(1, 16, 256, 8, num_physical_nvlink_ranks=8, **HOPPER)
    assert found == 18


def test_sms_need_the_bandwidths_that_decide() -> None:
    with pytest.raises(ValueError, match="rdma_gbs must be positive and finite for 2 nodes, got 0"):
        model.num_sms(2, 8, 256, 8, rdma_gbs=0, nvlink_gbs=430, num_device_sms=132)
    with pytest.raises(ValueError, match="nvlink_gbs must be positive"):
        model.num_sms(1, 8, 256, 8, rdma_gbs=50, nvlink_gbs=0, num_device_sms=132)


def test_sms_with_one_rank_per_node_are_bound_by_the_network() -> None:
    assert model.num_sms(4, 1, 256, 8, rdma_gbs=50, nvlink_gbs=0, num_device_sms=132) >= 4


@pytest.mark.parametrize(
    ("sms", "allocated", "hybrid", "expected"),
    [(12, 129, True, 129), (4, 129, True, 65), (12, 65, True, 65), (4, 17, False, 4),
     (24, 17, False, 9), (24, 5, False, 5)],
)  # fmt: skip
def test_qps(sms: int, allocated: int, hybrid: bool, expected: int) -> None:
    assert model.num_qps(sms, allocated, hybrid) == expected


def test_allocated_qps() -> None:
    assert model.default_num_qps(False) == 17
    assert model.default_num_qps(True) == 129
    assert model.default_num_qps(True, fast_rdma_atomics=True) == 65


@pytest.mark.parametrize(
    ("nodes", "ranks", "tokens", "topk", "fp8", "expected"),
    [
        (2, 8, 4096, 8, False, 1_218_445_312),
        (1, 8, 8192, 8, True, 943_718_400),
    ],
)
def test_buffer_bytes(
    nodes: int, ranks: int, tokens: int, topk: int, fp8: bool, expected: int
) -> None:
    found = model.buffer_bytes(nodes, ranks, tokens, 7168, topk, use_fp8_dispatch=fp8)
    assert found == expected


@pytest.mark.parametrize(("nodes", "ranks", "gib"), [(8, 8, 4.53), (32, 64, 65.3)])
def test_large_buffers(nodes: int, ranks: int, gib: float) -> None:
    found = model.buffer_bytes(nodes, ranks, 4096, 7168, 8, use_fp8_dispatch=True)
    assert found / 2**30 == pytest.approx(gib, abs=0.05)


def test_buffers_without_topk_have_room_for_32_slots() -> None:
    assert model.buffer_bytes(1, 8, 64, 256) == model.buffer_bytes(1, 8, 64, 256, 32)


def test_single_reduction_and_staging_need_more() -> None:
    """Hidden 64 and 8 slots: 256 bytes on the way out, 192 on the way back."""
    assert model.dispatch_token_bytes(64, 2, 0, 8) == 128 + 128
    assert model.combine_token_bytes(64, 8) == 128 + 64
    page, tokens = 2 << 20, 65536
    found = model.buffer_bytes(1, 4, tokens, 64, 8)
    assert found == 4 * tokens * 256
    found = model.buffer_bytes(1, 4, tokens, 64, 8, allow_multiple_reduction=False)
    assert found == 8 * tokens * 192
    found = model.buffer_bytes(1, 4, tokens, 64, 8, all_nvlink=False)
    assert found == (4 + 4) * tokens * 192
    found = model.buffer_bytes(2, 2, tokens, 64, 8, allow_multiple_reduction=False)
    exact = 192 * (8 * 2 * tokens + 8 * tokens + 8 * 2 * (tokens + 1280))
    assert found == (exact + page - 1) // page * page


def test_other_sizes() -> None:
    assert model.engram_bytes(1000, 100, 1, torch.bfloat16) == (2 << 20, 2 << 20)
    assert model.engram_bytes(2**16, 128, 2**13) == (2 << 20, 16 << 20)
    assert model.pp_bytes(2**20 - 5, 2) == 8 << 20
    assert model.all_gather_session_bytes(2, [(3,), (4, 5)], torch.float32) == 32 + 160
