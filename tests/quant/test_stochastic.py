"""Stochastic rounding: its bits, its mean, and that all devices agree."""

from __future__ import annotations

import pytest
import torch

import tile_kernels
from tests.requirements import GROUNDS
from tile_kernels import quant
from tile_kernels.quant import formats, stochastic

each_ground = pytest.mark.parametrize("ground", GROUNDS)
FOUR = torch.tensor([1.1, -0.3, 2.7, 0.05])
GRID = {
    "e4m3": torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float(),
    "e2m1": formats.decode_e2m1(formats.pack_e2m1(torch.arange(8, dtype=torch.uint8))),
    "bfloat16": torch.arange(0x7F80, dtype=torch.int16).view(torch.bfloat16).float(),
}


def values_of(codes: torch.Tensor, fmt: str) -> torch.Tensor:
    if fmt == "bfloat16":
        return codes.to(torch.int16).view(torch.bfloat16).float()
    codes = codes.to(torch.uint8)
    if fmt == "e4m3":
        return codes.view(torch.float8_e4m3fn).float()
    return formats.decode_e2m1(formats.pack_e2m1(codes))


@pytest.mark.parametrize(
    ("index", "words", "e4m3", "bfloat16", "e2m1"),
    [
        (
            0,
            (0xD2AB238D, 0x06EF05F4),
            [1, -0.3125, 2.75, 0.05078125],
            [1.09375, -0.30078125, 2.6875, 0.0498046875],
            [1, -0.5, 3, 0],
        ),
        (
            7,
            (0x4D2709AC, 0xC6559256),
            [1, -0.28125, 2.75, 0.05078125],
            [1.09375, -0.298828125, 2.703125, 0.050048828125],
            [1, -0.0, 3, 0],
        ),
    ],
)
def test_the_published_rule(
    index: int,
    words: tuple[int, int],
    e4m3: list[float],
    bfloat16: list[float],
    e2m1: list[float],
) -> None:
    patterns = FOUR.view(torch.int32).long() & 0xFFFFFFFF
    assert [int(w) for w in stochastic.hash_words(patterns, torch.tensor(index))] == [*words]
    row = torch.zeros(1, 32)
    row[0, 4 * index : 4 * index + 4] = FOUR
    for fmt, expected in (("e4m3", e4m3), ("bfloat16", bfloat16), ("e2m1", e2m1)):
        codes = stochastic.rounded_codes(row, stochastic.hashed_bits(row, fmt), fmt)
        found = values_of(codes, fmt)[0, 4 * index : 4 * index + 4]
        assert torch.equal(found, torch.tensor(expected))
        assert torch.equal(found.signbit(), torch.tensor(expected).signbit())


@pytest.mark.parametrize("fmt", ["e4m3", "e2m1", "bfloat16"])
def test_neighbours_and_their_probability(fmt: str) -> None:
    """Up exactly where `frac + R / 65536 >= 1`, on grids with subnormal numbers too."""
    torch.manual_seed(0)
    grid = GRID[fmt].double()
    x = torch.cat((torch.rand(200) * 8, torch.rand(200) / 64, torch.rand(50) * 448))[:, None]
    x = x.clamp(max=float(grid[-1]))
    bits = torch.randint(65536, (450, 64), dtype=torch.int32)
    bits[:, 0], bits[:, 1] = 0, 65535
    found = values_of(stochastic.rounded_codes(x.expand(450, 64), bits, fmt), fmt).double()
    below = torch.searchsorted(grid, x.double(), right=True) - 1
    low, high = grid[below], grid[(below + 1).clamp(max=len(grid) - 1)]
    step = (high - low).clamp(min=1e-300)
    up = ((x.double() - low) / step * 65536).floor() + bits >= 65536
    assert torch.equal(found, torch.where(up, high, low))
    assert torch.equal(found[:, :1], low)


@pytest.mark.parametrize("fmt", ["e4m3", "e2m1", "bfloat16"])
def test_extremes(fmt: str) -> None:
    x = torch.tensor(
        [[float("inf"), -float("inf"), float("nan"), -float("nan"), -0.0, 0.0, 3e38, -1e-45]]
    )
    for bits in (0, 65535):
        codes = stochastic.rounded_codes(x, torch.full((1, 8), bits).int(), fmt)
        found = values_of(codes, fmt)[0]
        largest = float(GRID[fmt][-1])
        assert found[:2].tolist() == [largest, -largest]
        assert found[2:4].isnan().all() or found[2:4].tolist() == [6.0, 6.0]
        assert found[4:6].signbit().tolist() == [True, False]
        assert found[4:6].tolist() == [0.0, 0.0]
        assert found[7] <= 0


@pytest.mark.parametrize("fmt", ["e4m3", "e2m1"])
def test_the_mean_over_seeds_is_the_value(fmt: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 64)
    plain = quant.per_token_cast(x, fmt, 32)
    total = torch.zeros(1, 64, dtype=torch.float64)
    count = 400
    for seed in range(count):
        data, sf = quant.per_token_cast(x, fmt, 32, stochastic_cast=True, seed=seed)
        assert torch.equal(sf, plain[1])
        total += quant.per_token_cast_back((data, sf), "fp32", 32).double()
    steps = (2.0**-3 if fmt == "e4m3" else 0.5) * x.abs().clamp(min=float(x.abs().max()) / 8)
    assert ((total / count - x).abs() < 4 * steps / count**0.5).all()


def test_seeds_rows_and_columns_differ() -> None:
    """Equal values in equal rows are rounded independently with a seed, and alike by the hash."""
    x = torch.full((64, 64), 1.3)
    x[:, ::32] = 6.0  # the scale of every group is 1
    seeded = {"stochastic_cast": True, "amax_min": 6.0}
    one = quant.per_token_cast(x, "e2m1", 32, **seeded, seed=1)[0]
    assert torch.equal(one, quant.per_token_cast(x, "e2m1", 32, **seeded, seed=1)[0])
    assert not torch.equal(one, quant.per_token_cast(x, "e2m1", 32, **seeded, seed=2)[0])
    values = formats.decode_e2m1(one)
    assert values.unique(dim=0).shape[0] > 60
    assert values.T.unique(dim=0).shape[0] > 50
    share = (values == 1.5).float().mean() / (values != 6.0).float().mean()
    assert abs(share - 0.6) < 0.03  # 1.3 lies there between 1 and 1.5
    hashed = quant.per_token_cast(x, "e2m1", 32, **seeded)[0]
    assert (hashed == hashed[:1]).all()


@each_ground
def test_a_seed_in_a_tensor(ground: tuple[str, str]) -> None:
    backend, device = ground
    x = torch.randn(5, 64, device=device)
    with tile_kernels.backend(backend):
        for seed in (0, -1, 2**62):
            kept = torch.tensor([seed], device=device)
            one = quant.per_token_cast(x, "e4m3", 32, stochastic_cast=True, seed=seed)
            other = quant.per_token_cast(x, "e4m3", 32, stochastic_cast=True, seed=kept)
            assert torch.equal(one[0].view(torch.uint8), other[0].view(torch.uint8))
            expected = tile_kernels.torch.per_token_cast(
                x.cpu(), "e4m3", 32, stochastic_cast=True, seed=seed
            )
            assert torch.equal(one[0].cpu().view(torch.uint8), expected[0].view(torch.uint8))


def test_codes_are_at_most_one_step_from_the_nearest() -> None:
    x = torch.randn(33, 128)
    nearest = quant.per_token_cast(x, "e4m3", 32)[0].view(torch.uint8).int()
    rounded = quant.per_token_cast(x, "e4m3", 32, stochastic_cast=True)[0].view(torch.uint8).int()
    step = (nearest & 127) - (rounded & 127)
    assert step.abs().max() == 1
    assert torch.equal(nearest >> 7, rounded >> 7)
