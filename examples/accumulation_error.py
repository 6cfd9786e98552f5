"""The accumulation error of FP8 products: in the tensor cores alone, and in two levels.

    python -m examples.accumulation_error [NUMBERS]

prints errors against float64 by the length of the sum, and writes them to a JSON file if one is
named. It takes about a minute, and needs no GPU: the tensor cores of Hopper are simulated. An
instruction adds 32 exact products and the accumulator, after it has aligned all of them to the
largest one and truncated each to 14 bits. `docs/pictures.py` draws the numbers.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from torch import Tensor

SIZES = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
ROWS = 48  # of both operands
BITS = 14  # that an addition in the tensor cores keeps
INSTRUCTION = 32  # channels
STEP = 128  # channels, after which float32 takes over with two levels
ONE_LEVEL, TWO_LEVELS = "tensor cores alone", "float32 after 128 channels"


def codes(kind: str, size: int) -> tuple[Tensor, Tensor]:
    """Two matrices of e4m3 values: `normal`, or `positive`, whose sums grow with every channel."""
    draw = torch.Generator().manual_seed(size)
    a, b = (torch.randn(ROWS, size, generator=draw) * 64 for _ in range(2))
    if kind == "positive":
        a, b = a.abs(), b.abs()
    return a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)


def add_in_tensor_cores(total: Tensor, products: Tensor) -> Tensor:
    """`total [M, N]` and `products [M, N, 32]`, aligned to the largest, 14 bits of each added."""
    terms = torch.cat((total[..., None], products), dim=-1)
    _, exponent = terms.abs().amax(-1, keepdim=True).frexp()
    unit = torch.ldexp(torch.ones_like(total[..., None]), exponent - BITS)
    return ((terms / unit).trunc() * unit).sum(-1)


def product(a: Tensor, b: Tensor, channels: int) -> Tensor:
    """`a @ b.T` whose sums stay in the tensor cores for so many channels, then go to float32."""
    a, b = a.double(), b.double()
    result = torch.zeros(len(a), len(b))
    for first in range(0, a.shape[1], channels):
        total = torch.zeros(len(a), len(b), dtype=torch.float64)
        for start in range(first, min(first + channels, a.shape[1]), INSTRUCTION):
            part = slice(start, start + INSTRUCTION)
            total = add_in_tensor_cores(total, a[:, None, part] * b[:, part])
        result = result + total.float()
    return result


def error(found: Tensor, exact: Tensor) -> float:
    """`|found - exact| / |exact|` over all elements."""
    return ((found.double() - exact).norm() / exact.norm()).item()


def errors(kind: str, size: int) -> dict[str, float]:
    """The error of each accumulation for sums of `size` channels."""
    a, b = codes(kind, size)
    exact = a.double() @ b.double().T
    return {
        ONE_LEVEL: error(product(a, b, size), exact),
        TWO_LEVELS: error(product(a, b, STEP), exact),
    }


def main(given: list[str], sizes: tuple[int, ...] = SIZES) -> dict[str, dict[str, list[float]]]:
    """Compute, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "numbers", nargs="?", type=Path, metavar="NUMBERS", help="a JSON file to write"
    )
    options = parser.parse_args(given)
    found: dict[str, dict[str, list[float]]] = {}
    for kind in ("normal", "positive"):
        print(f"{kind} values{'':9}" + "".join(f"{size:>10}" for size in sizes), flush=True)
        by_size = [errors(kind, size) for size in sizes]
        found[kind] = {name: [each[name] for each in by_size] for name in by_size[0]}
        for name, values in found[kind].items():
            print(f"  {name:28}" + "".join(f"{value:10.1e}" for value in values))
    if options.numbers:
        numbers = {"bits": BITS, "sizes": list(sizes), "errors": found}
        options.numbers.write_text(json.dumps(numbers, indent=1) + "\n")
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
