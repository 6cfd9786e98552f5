"""What the library tells about its calls: `TILE_KERNELS_LOG` or `tile_kernels.set_log_level`.

| level | says |
|---|---|
| 0 | nothing (default) |
| 1 | every call of an operator with its backend, every compile |
| 2 | also shapes, dtypes, strides and plain arguments |
| 3 | also saves every call's inputs to `TILE_KERNELS_LOG_DIR` (default `tile_kernels_dump`) |

Inputs are saved before the call runs, so that `tile-kernels check --replay FILE` can reproduce a
failure. They are those of the operator that PyTorch's dispatcher sees (`op.dispatched`), since
compiled code calls nothing else.

Lines go to the standard logger `tile_kernels`.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Mapping
from pathlib import Path

import torch

logger = logging.getLogger("tile_kernels")
_numbers = itertools.count()


class _Settings:
    """Read once; a call only looks at the attribute."""

    level: int = 0
    folder: Path = Path(os.environ.get("TILE_KERNELS_LOG_DIR", "tile_kernels_dump"))


settings = _Settings()


def set_log_level(level: int) -> None:
    """Sets how much is logged about calls.

    Args:
        level: 0: nothing; 1: the calls; 2: also their shapes; 3: also, inputs are saved to files.
    """
    if isinstance(level, bool) or not isinstance(level, int) or not 0 <= level <= 3:
        raise ValueError(f"set_log_level: level must be 0, 1, 2 or 3, got {level!r}")
    settings.level = level
    if level and not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[tile_kernels] %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False
    logger.setLevel(logging.INFO if level else logging.WARNING)


def call(op: str, backend: str, arguments: Mapping[str, object]) -> None:
    """Report one call; only reached when the level is above 0."""
    words = [op, f"on {backend}"]
    if settings.level >= 2:
        words.append(", ".join(f"{name}={describe(value)}" for name, value in arguments.items()))
    if settings.level >= 3 and backend != "meta":  # which has no values to save
        words.append(f"-> {dump(op, arguments)}")
    logger.info(" ".join(words))


def describe(value: object) -> str:
    """One argument in short.

    >>> describe(torch.zeros(2, 3)), describe(torch.zeros(4, 4)[:, :2]), describe(8)
    ('float32[2,3] cpu', 'float32[4,2] strides (4, 1) cpu', '8')
    """
    if not isinstance(value, torch.Tensor):
        return repr(value)
    shape = ",".join(str(size) for size in value.shape)
    strides = "" if value.is_contiguous() else f" strides {tuple(value.stride())}"
    return f"{str(value.dtype).removeprefix('torch.')}[{shape}]{strides} {value.device}"


def dump(op: str, arguments: Mapping[str, object]) -> Path:
    """Save a call's inputs, storages and strides included, and return the file."""
    settings.folder.mkdir(parents=True, exist_ok=True)
    path = settings.folder / f"{op}-{os.getpid()}-{next(_numbers):05d}.pt"
    torch.save({"op": op, "arguments": dict(arguments)}, path)
    return path


def _level_from_environment() -> None:
    text = os.environ.get("TILE_KERNELS_LOG", "0")
    if text not in ("0", "1", "2", "3"):
        raise ValueError(f"TILE_KERNELS_LOG must be 0, 1, 2 or 3, got {text!r}")
    set_log_level(int(text))


_level_from_environment()
