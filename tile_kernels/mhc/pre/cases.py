"""Argument sets of `mhc_pre_big_fuse` and `mhc_pre_fwd`."""

from __future__ import annotations

import torch

from tile_kernels.mhc.samples import LEADING, MIX_REJECTS, StreamCases, compare_sums
from tile_kernels.runtime.cases import Arguments, Benchmark, Reject, Sample, Vector
from tile_kernels.runtime.sampling import BF16, builder, changed, edited, misaligned


@builder
def _big_fuse(
    device: torch.device,
    *shape: int,
    scale: float = 1e-2,
    eps: float = 1e-6,
    repeat: int = 10,
    shift: bool = False,
) -> Arguments:
    m, h = shape[-2:]
    count = m * (m + 2)
    residual = torch.randn(shape, device=device).to(BF16)
    return {
        "residual": misaligned(residual) if shift else residual,
        "fn": scale * torch.randn(count, m * h, device=device),
        "mhc_scale": torch.randn(3, device=device),
        "mhc_base": torch.randn(count, device=device),
        "rms_eps": 1e-6,
        "mhc_pre_eps": 1e-2,
        "mhc_sinkhorn_eps": eps,
        "mhc_post_mult_value": 2.0,
        "sinkhorn_repeat": repeat,
    }


_MHC_PRE_BIG_FUSE = StreamCases(
    small=[
        Sample("leading.2x40", _big_fuse(*LEADING, 2, 40)),
        Sample("none", _big_fuse(0, 4, 64)),
        Sample("one.1x1x8", _big_fuse(1, 1, 8)),
        *(Sample(f"7x{m}x72", _big_fuse(7, m, 72)) for m in range(1, 9)),
        Sample("wide.3x4x1064", _big_fuse(3, 4, 1064)),
        Sample("many.270x2x24", _big_fuse(270, 2, 24)),
        Sample("no eps.5x4x64", _big_fuse(5, 4, 64, eps=0.0, repeat=1)),
        Sample("misaligned.5x4x64", _big_fuse(5, 4, 64, shift=True)),
    ],
    large=[
        *(Sample(f"{n}x4x{h}", _big_fuse(n, 4, h)) for n in (13, 4096) for h in (1280, 7168)),
        Sample("1000x8x1288", _big_fuse(1000, 8, 1288)),
    ],
    benchmarks=[
        Benchmark("4096x4x7168", _big_fuse(4096, 4, 7168, scale=1e-4), goal_us=100.0),
        Benchmark("16x4x7168", _big_fuse(16, 4, 7168, scale=1e-4)),
    ],
    vectors=[
        Vector(
            "weights of zero",
            lambda: {
                "residual": torch.tensor([1.0, 2.0, 3.0, 4.0] * 4).view(1, 2, 8).to(BF16),
                "fn": torch.zeros(8, 16),
                "mhc_scale": torch.ones(3),
                # ln 3 and 0: sigmoids of 3/4 and 1/2; and the logits of the Sinkhorn example
                "mhc_base": torch.tensor(
                    [1.0986123, 0.0, 0.0, 1.0986123, 0.0, 1.0986123, 0.0, 0.0]
                ),
                "rms_eps": 1e-6,
                "mhc_pre_eps": 0.0,
                "mhc_sinkhorn_eps": 1e-6,
                "mhc_post_mult_value": 2.0,
                "sinkhorn_repeat": 2,
            },
            lambda: (
                torch.tensor([[[1.0], [1.5]]]),
                torch.tensor([[[0.3636363, 0.6315780], [0.6363627, 0.3684211]]]),
                torch.tensor([1.25, 2.5, 3.75, 5.0] * 2)[None].to(BF16),
            ),
        )
    ],
    rejects=[
        Reject("residual", "columns", edited("residual", lambda x: x[..., :4].contiguous())),
        Reject("fn", "a row less", edited("fn", lambda x: x[1:])),
        *MIX_REJECTS,
        Reject("n_splits", "none", changed(n_splits=0)),
    ],
    compare=compare_sums,
)


_MHC_PRE_FWD = StreamCases(
    small=[
        *(sample for sample in _MHC_PRE_BIG_FUSE.small if not sample.label.startswith("7x")),
        *(Sample(f"7x{m}x72", _big_fuse(7, m, 72)) for m in (3, 4, 8)),
    ],
    large=_MHC_PRE_BIG_FUSE.large,
    benchmarks=[Benchmark("4096x4x7168", _big_fuse(4096, 4, 7168, scale=1e-4))],
    vectors=[
        Vector(
            "weights of zero",
            _MHC_PRE_BIG_FUSE.vectors[0].arguments,
            # s = 4 * 30; no product, so mixes of zero and logits that are the base
            lambda: (
                torch.tensor([1.25, 2.5, 3.75, 5.0] * 2)[None].to(BF16),
                *_MHC_PRE_BIG_FUSE.vectors[0].expected()[:2],
                torch.tensor([[[0.75], [0.5]]]),
                torch.zeros(1, 8),
                torch.zeros(1, 8),
                torch.tensor([120.0]),
                torch.tensor([[[0.0, 1.0986123], [0.0, 0.0]]]),
            ),
        )
    ],
    rejects=[reject for reject in _MHC_PRE_BIG_FUSE.rejects if reject.argument != "n_splits"],
    compare=compare_sums,
)


CASES = {"mhc_pre_big_fuse": _MHC_PRE_BIG_FUSE, "mhc_pre_fwd": _MHC_PRE_FWD}
