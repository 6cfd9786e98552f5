"""What ran on kernels and what on references, and kernels emulated on a machine without a GPU."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

import tile_kernels
from examples.tiny_v4.model import TinyV4
from tile_kernels import moe, quant
from tile_kernels.runtime import emulation, logs

GROUP = 32  # channels that share a scale in the emulated cast


class Emulated(NamedTuple):
    """An operator whose kernel ran in the emulator."""

    operator: str
    given: str  # what it was applied to
    kernel: str
    blocks: int
    threads: int
    bytes_read: int
    bytes_written: int
    is_equal: bool  # to the reference, bit for bit


# ---- operators of a step ------------------------------------------------------------------------


class _Calls(logging.Handler):
    """Collects the calls of operators that the package logs."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[tuple[str, str]] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        found = re.match(r"(\w+\.\w+) on (\w+)", record.getMessage())
        if found:
            self.calls[found[1], found[2]] += 1


@contextmanager
def _logged() -> Iterator[_Calls]:
    """Calls inside are collected instead of printed."""
    handler, before, level = _Calls(), logs.logger.handlers[:], logs.settings.level
    logs.logger.handlers[:] = [handler]
    propagates, logs.logger.propagate = logs.logger.propagate, False
    tile_kernels.set_log_level(1)
    try:
        yield handler
    finally:
        tile_kernels.set_log_level(level)
        logs.logger.handlers[:] = before
        logs.logger.propagate = propagates


def operators_of(step: Callable[[], object]) -> dict[str, dict[str, int]]:
    """How often `step` calls each operator, by backend: `tilelang` (kernels) or `torch`."""
    with _logged() as collected:
        step()
    found: dict[str, dict[str, int]] = {}
    for (operator, backend), count in sorted(collected.calls.items()):
        found.setdefault(operator, {})[backend] = count
    return found


# ---- emulated kernels ---------------------------------------------------------------------------


@torch.no_grad()
def emulated(model: TinyV4, token_ids: Tensor) -> list[Emulated] | str:
    """Two operators on data of the model, their kernels emulated with every access checked.

    Without TileLang, a C++ compiler or CUDA's headers: what is missing.
    """
    if lacking := emulation.missing():
        return lacking
    logits = model(token_ids)[0].float().contiguous()
    embeddings = model.tokens(token_ids)[0].bfloat16()
    calls: tuple[tuple[str, str, Callable[[], Any]], ...] = (
        ("moe.topk_gate", "the logits of a text", lambda: moe.topk_gate(logits, 8)),
        (
            "quant.per_token_cast",
            "the embeddings of a text",
            lambda: quant.per_token_cast(embeddings, "e4m3", GROUP),
        ),
    )
    found = []
    for operator, given, call in calls:
        expected = _bytes(call())
        with tile_kernels.backend("emulate"), emulation.reports() as reports:
            equal = _bytes(call()) == expected
        for report in reports:
            traffic = (report.buffers or {}).values()
            found.append(
                Emulated(
                    operator, given, report.name, report.blocks, report.threads,
                    sum(each.read for each in traffic), sum(each.written for each in traffic),
                    equal,
                )
            )  # fmt: skip
    return found


def _bytes(result: Any) -> list[bytes]:
    """The bits of a tensor, or of several."""
    tensors = result if isinstance(result, tuple) else (result,)
    return [bytes(x.contiguous().view(torch.uint8).flatten().tolist()) for x in tensors]
