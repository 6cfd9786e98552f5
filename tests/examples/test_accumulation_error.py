"""The error of two levels of accumulation does not grow; the document shows these numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from examples import accumulation_error
from examples.accumulation_error import ONE_LEVEL, TWO_LEVELS

DOCS = Path(__file__).parents[2] / "docs"
SIZES = (128, 512, 2048)


def test_errors_are_those_of_the_picture(tmp_path: Path) -> None:
    found = accumulation_error.main([str(tmp_path / "numbers.json")], SIZES)
    assert json.loads((tmp_path / "numbers.json").read_text())["errors"] == found
    shown = json.loads((DOCS / "measured" / "accumulation_error.json").read_text())
    for kind, by_level in found.items():
        for name, values in by_level.items():
            expected = dict(zip(shown["sizes"], shown["errors"][kind][name]))
            assert values == pytest.approx([expected[size] for size in SIZES], rel=1e-3)
        one, two = by_level[ONE_LEVEL], by_level[TWO_LEVELS]
        assert one[0] == two[0]  # 128 channels are one step
        assert one[-1] > 4 * two[-1]
        assert two[-1] < 1.2 * two[0]


def test_an_addition_keeps_14_bits() -> None:
    total, products = torch.full((1, 1), 2.0**13).double(), torch.zeros(1, 1, 32).double()
    products[0, 0, :3] = torch.tensor([0.75, 1.75, -1.75])
    assert accumulation_error.add_in_tensor_cores(total, products).item() == 2**13
    products[0, 0, 2] = 3.5
    assert accumulation_error.add_in_tensor_cores(total, products).item() == 2**13 + 4
