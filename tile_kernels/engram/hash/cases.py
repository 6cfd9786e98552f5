"""Argument sets of the hash of n-grams."""

from __future__ import annotations

import torch

from tile_kernels.engram.hash.reference import make_offsets
from tile_kernels.runtime.cases import Arguments, Benchmark, Cases, Reject, Sample, Vector
from tile_kernels.runtime.sampling import builder, edited, with_value

_INT32, _INT64 = torch.int32, torch.int64


def _rows(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=_INT32)


@builder
def _hash(
    device: torch.device,
    num_tokens: int,
    window: int = 3,
    layers: int = 2,
    tables: int = 8,
    *,
    dtype: torch.dtype = _INT32,
    wild: bool = False,
    most: int = 2**31 - 1,
    image: bool = False,
) -> Arguments:
    """As a model has them, or over the whole range of their types, with `most` rows of a table."""

    def numbers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, device=device)

    ids, factors, sizes = (0, 10**5), (0, 10**5), (10**5, 10**6)
    if wild:
        ids, factors, sizes = (-(2**31), 2**31), (-(2**63), 2**63 - 1), (1, most)
    vocab_sizes = numbers(*sizes, layers, window - 1, tables).to(_INT32)
    mask = torch.arange(num_tokens, device=device) % 3 == 1
    return {
        "ngram_token_ids": numbers(*ids, num_tokens, window).to(_INT32),
        "multipliers": numbers(*factors, layers, window),
        "vocab_sizes": vocab_sizes,
        "offsets": make_offsets(vocab_sizes, dtype),
        **({"image_token_mask": mask} if image else {}),
    }


def _with_an_image() -> Arguments:
    sizes = torch.tensor([[[10, 11], [12, 13]]], dtype=_INT32)
    return {
        "ngram_token_ids": _rows([5, 7, 11], [5, 7, 11]),
        "multipliers": torch.tensor([[3, 5, 7]]),
        "vocab_sizes": sizes,
        "offsets": make_offsets(sizes),
        "image_token_mask": torch.tensor([False, True]),
    }


def _worked(ids: torch.Tensor, multipliers: list[int], size: int, row: int) -> Vector:
    return Vector(
        f"wraps to {row}",
        lambda: {
            "ngram_token_ids": ids,
            "multipliers": torch.tensor([multipliers]),
            "vocab_sizes": torch.tensor([[[size]]], dtype=_INT32),
            "offsets": torch.zeros(1, 1, dtype=_INT32),
        },
        lambda: torch.tensor([[[row]]], dtype=_INT32),
    )


ENGRAM_HASH = Cases(
    small=[
        Sample("37", _hash(37)),
        Sample("none", _hash(0)),
        Sample("no layers", _hash(5, layers=0)),
        Sample("no tables", _hash(5, tables=0)),
        Sample("one", _hash(1, layers=1, tables=1)),
        Sample("wild.40", _hash(40, wild=True)),
        Sample("wild.int64.33.5", _hash(33, 5, 3, 3, dtype=_INT64, wild=True)),
        Sample("pairs.129", _hash(129, 2, 1, 1, wild=True)),
        Sample("wild.40.most 9", _hash(40, wild=True, most=9)),
        Sample("image", _hash(7, image=True)),
    ],
    large=[
        Sample("8001", _hash(8001)),
        Sample("wild.8001", _hash(8001, wild=True)),
        Sample("over 2**31 entries", _hash(2**25 + 9, 3, 1, 33)),
    ],
    benchmarks=[
        Benchmark("8192", _hash(8192), goal_us=2.8),
        Benchmark("8192.int64", _hash(8192, dtype=_INT64)),
        Benchmark("64", _hash(64)),
    ],
    vectors=[
        Vector(
            "an image token",
            _with_an_image,
            lambda: torch.tensor([[[4, 10, 22, 39], [-1] * 4]], dtype=_INT32),
        ),
        Vector(
            "two orders, two tables",
            lambda: {
                "ngram_token_ids": _rows([5, 7, 11], [-1, 0, 2]),
                "multipliers": torch.tensor([[3, 5, 9]]),
                "vocab_sizes": torch.tensor([[[10, 13], [17, 19]]], dtype=_INT32),
                "offsets": _rows([0, 10, 23, 40]),
            },
            lambda: torch.tensor([[[4, 15, 34, 43], [7, 20, 23, 42]]], dtype=_INT32),
        ),
        _worked(_rows([3, 1]), [2**62, 1], 7, 4),
        _worked(_rows([100000, 99999]), [2**62 + 1, 2**40 + 3], 1000003, 105154),
    ],
    rejects=[
        Reject(
            "ngram_token_ids",
            "one column",
            edited("ngram_token_ids", lambda x: x[:, :1].contiguous()),
        ),
        Reject("offsets", "too few", edited("offsets", lambda x: x[:, 1:].contiguous())),
        Reject("multipliers", "int32", edited("multipliers", torch.Tensor.int)),
    ],
    bad_values=[
        Reject("vocab_sizes", "no rows", with_value("vocab_sizes", 0, 0)),
        Reject("vocab_sizes", "negative", with_value("vocab_sizes", -5, 2)),
        Reject("vocab_sizes", "minus one", with_value("vocab_sizes", -1, -1)),
    ],
)

CASES = {"engram_hash": ENGRAM_HASH}
