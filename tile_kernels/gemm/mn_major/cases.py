"""Argument sets of the layout of scales."""

from __future__ import annotations

import torch

from tile_kernels.runtime.cases import Arguments, Benchmark, Build, Cases, Reject, Sample, Vector


def _scales(*shape: int, dtype: torch.dtype = torch.float32) -> Build:
    def make(device: torch.device) -> Arguments:
        values = torch.randint(1, 1 << 30, shape, dtype=torch.int32, device=device)
        return {"sf": values if dtype == torch.int32 else values.float()}

    return make


CASES = {
    "get_mn_major_tma_aligned_tensor": Cases(
        small=[
            Sample("5x3", _scales(5, 3)),
            Sample("0x3", _scales(0, 3)),
            Sample("1x3", _scales(1, 3)),
            Sample("130x33", _scales(130, 33)),
            Sample("64x32", _scales(64, 32)),
            Sample("2x66x5", _scales(2, 66, 5)),
            Sample("7x2.int32", _scales(7, 2, dtype=torch.int32)),
        ],
        large=[Sample("32769x56", _scales(32769, 56))],
        benchmarks=[
            Benchmark("32768x56", _scales(32768, 56)),
            Benchmark("32x128x56", _scales(32, 128, 56)),
        ],
        vectors=[
            Vector(
                "2x2",
                lambda: {"sf": torch.tensor([[1.0, 2.0], [3.0, 4.0]])},
                lambda: torch.tensor([[1.0, 3.0, 0.0, 0.0], [2.0, 4.0, 0.0, 0.0]]).mT[:2],
            )
        ],
        rejects=[Reject("sf", "strides", lambda a: {"sf": a["sf"].repeat(1, 2)[:, ::2]})],
        any_rank=True,
    )
}
