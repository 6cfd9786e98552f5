"""Scales of weights for products with block scales."""

from __future__ import annotations

import pytest
import torch

from tile_kernels import quant

ROWS = torch.tensor([[1.0, 2, 4, 8], [0.5, 0.25, 1, 1], [1, 1, 1, 1], [2, 2, 2, 2]])


def words(x: torch.Tensor) -> list[int]:
    return [int(word) & 0xFFFFFFFF for word in x.flatten()]


def test_worked_example() -> None:
    ((sf0, sf1),) = quant.batched_transpose_weight_sf([ROWS], 32, [False], [None])
    assert (tuple(sf0.shape), sf0.stride()) == ((128, 1), (1, 128))
    assert set(words(sf0[:32])) == {0x8281807F}
    assert set(words(sf0[32:64])) == {0x7F7F7D7E}
    assert set(words(sf1[:32])) == {0x807F7E7F}
    assert set(words(sf1[96:])) == {0x807F7F82}


@pytest.mark.parametrize("block", [32, 128])
def test_every_byte(block: int) -> None:
    torch.manual_seed(0)
    n, k = 256 // block, 640 // block
    sf = torch.exp2(torch.randint(-20, 20, (3, n, k)).float())
    exponents = (sf.view(torch.int32) >> 23).tolist()
    buffers = (
        torch.zeros(3, -(-k // 4), 256, dtype=torch.int32).transpose(1, 2),
        torch.zeros(3, -(-n // 4), 640, dtype=torch.int32),
    )
    results = quant.batched_transpose_weight_sf([sf, sf[0]], block, [True, False], [buffers, None])
    (sf0, sf1), (plain0, plain1) = results
    assert sf0 is buffers[0]
    assert sf1 is buffers[1]
    assert sf0.stride()[1:] == (1, 256)
    assert torch.equal(sf0[0], plain0)
    assert torch.equal(sf1[0].T, plain1)
    assert plain1.stride() == (1, 640)
    for g in range(3):
        for row in (0, 31, 128, 255):
            found = sf0[g, row].contiguous().view(torch.uint8).tolist()
            assert found[:k] == exponents[g][row // block]
            assert not any(found[k:])
        for column in (0, 33, 639):
            found = torch.tensor(sf1[g, :, column].tolist()).int().view(torch.uint8).tolist()
            assert found[:n] == [exponents[g][i][column // block] for i in range(n)]


def test_bad_arguments() -> None:
    assert quant.batched_transpose_weight_sf([], 32, []) == []
    with pytest.raises(ValueError, match="must hold powers of two"):
        quant.batched_transpose_weight_sf([ROWS * 3], 32, [False])
    with pytest.raises(ValueError, match="multiples of 128"):
        quant.batched_transpose_weight_sf([ROWS[:3]], 32, [False])
    with pytest.raises(ValueError, match="block_size must be one of 32, 128"):
        quant.batched_transpose_weight_sf([ROWS], 64, [False])
    with pytest.raises(ValueError, match="an entry for each of 1 weights"):
        quant.batched_transpose_weight_sf([ROWS], 32, [])


def test_bad_buffers() -> None:
    sf0, sf1 = torch.zeros(128, 1, dtype=torch.int32), torch.zeros(128, 1, dtype=torch.int32)
    for wrong, error, message in (
        (sf0, TypeError, r"outs\[0\] must be two tensors, or None, got Tensor"),
        ((sf0,), TypeError, r"outs\[0\] must be two tensors, or None, got 1"),
        ((sf0.float(), sf1), TypeError, r"outs\[0\]\[0\] must be int32"),
        ((sf0, sf1.T), ValueError, r"outs\[0\]\[1\] must have shape \[128, 1\], got \(1, 128\)"),
        ((sf0[None], sf1), ValueError, r"outs\[0\]\[0\] must"),
        ((sf0, sf1.to("meta")), ValueError, r"outs\[0\]\[1\] must be on cpu like sf, got meta"),
    ):
        with pytest.raises(error, match=message):
            quant.batched_transpose_weight_sf([ROWS], 32, [False], [wrong])  # type: ignore[list-item]
    assert not sf0.any()
    assert not sf1.any()


def test_without_graph_breaks() -> None:
    torch._dynamo.reset()
    run = torch.compile(quant.batched_transpose_weight_sf, fullgraph=True, backend="aot_eager")
    outs = tuple(torch.zeros(128, 1, dtype=torch.int32) for _ in range(2))
    pairs = run([ROWS, ROWS[None]], 32, [False, True], [outs, None])
    expected = quant.batched_transpose_weight_sf([ROWS, ROWS[None]], 32, [False, True])
    for pair, wanted in zip(pairs, expected):
        for one, other in zip(pair, wanted):
            assert torch.equal(one, other)
    assert torch.equal(outs[0], expected[0][0])


def test_blocked_order() -> None:
    torch.manual_seed(0)
    sf = torch.randint(1, 256, (200, 6), dtype=torch.uint8)
    found = quant.blocked_scales(sf)
    assert found.shape == (256 * 8,)
    for row in (0, 33, 127, 128, 199):
        for column in range(6):
            tile = (row // 128 * 2 + column // 4) * 512
            at = tile + row % 32 * 16 + row % 128 // 32 * 4 + column % 4
            assert found[at] == sf[row, column]
    assert (found == 0).sum() == 256 * 8 - 1200
    e4m3 = quant.blocked_scales(torch.ones(3, 3).to(torch.float8_e4m3fn))
    assert e4m3.dtype == torch.float8_e4m3fn
