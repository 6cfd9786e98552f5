"""Sizes and inputs that tests and benchmarks share.

The environment variable `TK_FULL_TEST` (`1`, `true` or `True`, read at every call) widens the
grids. Tensors are made on `device`; without it on the current CUDA device, or on the CPU where
there is none.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import torch

from tile_kernels import config
from tile_kernels.utils import align

__all__ = [
    "align",
    "generate_e5m6_inputs",
    "generate_hidden_sizes",
    "generate_moe_params",
    "generate_num_sms",
    "generate_num_tokens",
    "generate_rand_float",
    "generate_topk_idx",
]

_HIDDEN_SIZES = (576, 2048, 2560, 3072, 4096, 6144, 7168)
_NUM_SEND_TOKENS = 4001
_RESERVED_SMS = 20

# The largest finite value of the 12-bit format with 5 exponent and 6 mantissa bits (bias 15).
_E5M6_MAX = 65024.0
# The smallest subnormal, the largest subnormal and the smallest normal value of that format.
_E5M6_FILLS = (2.0**-20, 2.0**-14 * 63 / 64, 2.0**-14)

# Scores of `generate_topk_idx` drawn at once. Bounds its memory; changing it changes the data.
_SCORES_AT_ONCE = 1 << 25


def _is_full_test() -> bool:
    return os.environ.get("TK_FULL_TEST", "") in ("1", "true", "True")


def _resolve_device(device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def generate_num_tokens(alignment: int = 1, is_benchmark: bool = False) -> list[int]:
    """Token counts, each rounded up to `alignment`; full tests (not benchmarks) start at 0.

    >>> generate_num_tokens(64, is_benchmark=True)
    [4032, 8064]
    """
    num_tokens = [4001, 8001]
    if _is_full_test() and not is_benchmark:
        num_tokens.insert(0, 0)
    return [align(n, alignment) for n in num_tokens]


def generate_hidden_sizes(align: int = 64) -> list[int]:
    """The hidden sizes of models in use that are multiples of `align`, ascending.

    >>> generate_hidden_sizes(2560)
    [2560]
    """
    return [hidden for hidden in _HIDDEN_SIZES if hidden % align == 0]


def generate_num_sms() -> list[int]:
    """SM budgets to try, ascending, each valid for `config.set_num_sms`, the last all SMs.

    With `D` SMs on the device these are `[D - 20, D]`, and 1 before them in full tests. On a
    device with 20 SMs or fewer half of them (at least one) stand in for `D - 20`. A budget is
    listed once, so a device with one SM gives `[1]`.
    """
    num_sms = config.get_device_num_sms()
    fewer = num_sms - _RESERVED_SMS if num_sms > _RESERVED_SMS else max(1, num_sms // 2)
    budgets = {fewer, num_sms}
    if _is_full_test():
        budgets.add(1)
    return sorted(budgets)


def generate_moe_params(is_benchmark: bool = False) -> Iterator[dict[str, int]]:
    """Mixture-of-experts settings: dicts for `generate_topk_idx` and for parametrised tests.

    Keys, in order: `num_send_tokens` (tokens each rank sends), `num_topk`, `num_experts` (experts
    *per rank*) and `num_ep_ranks`. Full tests (not benchmarks) start with a set without tokens.

    >>> next(generate_moe_params(is_benchmark=True))
    {'num_send_tokens': 4001, 'num_topk': 2, 'num_experts': 9, 'num_ep_ranks': 8}
    """
    full = _is_full_test()

    def params(num_send_tokens: int, num_topk: int, total: int, num_ranks: int) -> dict[str, int]:
        return {
            "num_send_tokens": num_send_tokens,
            "num_topk": num_topk,
            "num_experts": total // num_ranks,
            "num_ep_ranks": num_ranks,
        }

    if full and not is_benchmark:
        yield params(0, 1, 1, 1)
    for num_topk in (2, 6, 8, 9) + ((1, 7) if full else ()):
        for total in (72, 256) + ((288, 384) if full else ()):
            for num_ranks in (8, 64) + ((1, 72, 256) if full else ()):
                if total % num_ranks == 0:
                    yield params(_NUM_SEND_TOKENS, num_topk, total, num_ranks)


def generate_topk_idx(
    params: dict[str, Any], *, device: torch.device | str | None = None
) -> torch.Tensor:
    """The expert indices one rank receives when every rank routes its tokens at random.

    Args:
        params: `num_send_tokens`, `num_topk`, `num_experts` (per rank) and `num_ep_ranks`, as from
            `generate_moe_params`; other keys are ignored.
        device: where the result lives.

    Returns:
        int64 `[rows, num_topk]`, contiguous. An index is in `[0, num_experts)`, or -1 where the
        token chose an expert of another rank. Tokens that chose no expert of this rank are left
        out, so the number of rows depends on the data; no tokens sent give `[0, num_topk]`.
        Indices of a row are distinct and in no particular order, -1 stands anywhere.

    The data follows torch's seed on that device.

    >>> _ = torch.manual_seed(0)
    >>> params = {"num_send_tokens": 5, "num_topk": 3, "num_experts": 4, "num_ep_ranks": 1}
    >>> idx = generate_topk_idx(params, device="cpu")
    >>> idx.shape, int(idx.min()) >= 0, int(idx.max()) < 4
    (torch.Size([5, 3]), True, True)
    """
    num_topk, num_experts = params["num_topk"], params["num_experts"]
    num_tokens = params["num_send_tokens"] * params["num_ep_ranks"]
    num_all_experts = num_experts * params["num_ep_ranks"]
    if num_topk > num_all_experts:
        raise ValueError(
            f"generate_topk_idx: num_topk must be at most num_experts * num_ep_ranks = "
            f"{num_all_experts}, got {num_topk}"
        )
    device = _resolve_device(device)
    received = [torch.empty((0, num_topk), dtype=torch.int64, device=device)]
    step = max(1, _SCORES_AT_ONCE // max(1, num_all_experts))
    for start in range(0, num_tokens, step):
        rows = min(step, num_tokens - start)
        # Not bf16: its 256 random values tie often, and top-k settles ties in favour of the first
        # experts, which are this rank's.
        scores = torch.rand((rows, num_all_experts), dtype=torch.float32, device=device)
        idx = torch.topk(scores, num_topk, dim=1, sorted=False).indices
        idx = idx.masked_fill(idx >= num_experts, -1)
        received.append(idx[(idx >= 0).any(dim=1)])
    return torch.cat(received)


def generate_e5m6_inputs(
    num_tokens: int,
    hidden: int,
    dtype: torch.dtype,
    *,
    device: torch.device | str | None = None,
) -> Iterator[tuple[torch.Tensor, bool]]:
    """Inputs of casts to E5M6: one random tensor, then three of its smallest values.

    Yields:
        Four pairs of a `dtype` tensor `[num_tokens, hidden]` and a flag. First a standard normal
        one with False. Then, with True, tensors filled with `2**-20`, `2**-14 * 63/64` and `2**-14`
        whose last column is 65024, the largest finite E5M6 value: no scaling moves the others.

    >>> _, *edges = generate_e5m6_inputs(1, 2, torch.float32, device="cpu")
    >>> [x[0].tolist() for x, _ in edges]
    [[9.5367431640625e-07, 65024.0], [6.008148193359375e-05, 65024.0], [6.103515625e-05, 65024.0]]
    """
    device = _resolve_device(device)
    yield torch.randn((num_tokens, hidden), dtype=torch.float32, device=device).to(dtype), False
    for value in _E5M6_FILLS:
        x = torch.full((num_tokens, hidden), value, dtype=dtype, device=device)
        x[:, -1:] = _E5M6_MAX
        yield x, True


def generate_rand_float(
    shape: tuple[int, ...], *, device: torch.device | str | None = None
) -> torch.Tensor:
    """A float32 tensor whose overall magnitude is itself random; every element is finite.

    A standard normal sample times `2**e`, with one `e` drawn from -110..126 by Python's `random`.
    What overflows is drawn anew at magnitude 1, and all is clamped to a magnitude of at most an
    eighth of the largest float32, which leaves a few operations room before they overflow.

    >>> x = generate_rand_float((2, 3), device="cpu")
    >>> x.shape, x.dtype, bool(x.isfinite().all())
    (torch.Size([2, 3]), torch.float32, True)
    """
    device = _resolve_device(device)
    scale = 2.0 ** random.randint(-110, 126)
    x = torch.randn(shape, dtype=torch.float32, device=device) * scale
    fresh = torch.randn(shape, dtype=torch.float32, device=device)
    limit = torch.finfo(torch.float32).max / 8
    return torch.where(x.isfinite(), x, fresh).clamp(-limit, limit)
