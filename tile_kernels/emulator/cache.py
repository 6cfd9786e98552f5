"""The folder of compiled kernels: where it is, whom it trusts, how large it grows.

It holds code that is executed, so it must belong to the user and be writable by nobody else. Any
number of that user's processes may share it: every file is written under a private name and renamed
into place, and its name is a hash of everything that went into it. A file ends with a hash of its
content, so that a damaged one is noticed and built again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import time
import uuid
from pathlib import Path

from .errors import EmulationError

DEFAULT_LIMIT_MB = 2048  # all operators' kernels for one architecture take about a tenth
IN_USE_SECONDS = 600  # what was used so recently stays: a process may be about to load it
ABANDONED_SECONDS = 24 * 3600  # after which a private file is one that a killed process left
CHECK_SECONDS = 60  # listing a full cache takes longer than compiling a small kernel

_SEAL = b"tile_kernels emulator"
_OTHERS_WRITE = 0o022


def cache_dir(kind: str = "emulator") -> Path:
    """Where compiled kernels are kept: `TILE_KERNELS_CACHE`, or the user's cache folder."""
    root = os.environ.get("TILE_KERNELS_CACHE")
    if root:
        return Path(root).expanduser().absolute() / kind
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base).absolute() / "tile_kernels" / kind


def open_cache(kind: str = "emulator", mode: int = 0o700) -> Path:
    """The cache folder, created with `mode` if need be; an error unless code in it may be run."""
    folder = cache_dir(kind)
    try:
        folder.mkdir(mode=mode, parents=True, exist_ok=True)
        found = folder.stat()
    except OSError as error:
        raise _unusable(folder, f"cannot be created: {error.strerror}") from None
    if found.st_uid != os.getuid():
        raise _unusable(folder, f"belongs to another user (uid {found.st_uid})")
    if found.st_mode & _OTHERS_WRITE:
        shown = f"{found.st_mode & 0o777:o}"
        raise _unusable(folder, f"can be written by others (its mode is {shown})")
    return folder


def written_by_others(folder: Path) -> bool:
    """Whether the folder exists and others than its owner may write into it."""
    try:
        return bool(folder.stat().st_mode & _OTHERS_WRITE)
    except OSError:
        return False


def _unusable(folder: Path, problem: str) -> EmulationError:
    return EmulationError(
        f"the cache of compiled kernels {folder} {problem}; set TILE_KERNELS_CACHE to a folder "
        "that you own and that nobody else can write",
        kind="cache",
    )


# ---- files --------------------------------------------------------------------------------------


def private(path: Path) -> Path:
    """A name beside `path` that no other thread or process uses."""
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise _unusable(path.parent, "cannot be written")
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}")


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that other processes see all of it or nothing."""
    part = private(path)
    try:
        part.write_bytes(content)
        part.replace(path)
    except OSError as error:
        raise _unusable(path.parent, f"cannot be written: {error.strerror}") from None
    finally:
        part.unlink(missing_ok=True)


def sealed(content: bytes) -> bytes:
    """`content` with its hash behind it; the loader ignores what follows a library's sections."""
    return content + _SEAL + hashlib.sha256(content).digest()


def read_sealed(path: Path) -> bytes | None:
    """The content of a sealed file; None where there is none, or a damaged one."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    content = data[: len(data) - len(sealed(b""))]
    if sealed(content) != data:
        return None
    mark_used(path)
    return content


def mark_used(path: Path) -> None:
    """Note that a file was used now; the least recently used ones are evicted first."""
    with contextlib.suppress(OSError):  # of a cache that can only be read
        os.utime(path)


# ---- size ---------------------------------------------------------------------------------------


def limit_bytes() -> int:
    """How large the cache may grow: `TILE_KERNELS_CACHE_MB`."""
    text = os.environ.get("TILE_KERNELS_CACHE_MB") or str(DEFAULT_LIMIT_MB)
    if not text.isdecimal() or int(text) < 1:
        raise EmulationError(
            f"TILE_KERNELS_CACHE_MB must be a whole number of megabytes from 1 on, got {text!r}",
            kind="cache",
        )
    return int(text) * 10**6


_checked: dict[Path, float] = {}  # when this process last looked at the size of a folder


def keep_within_limit(folder: Path) -> None:
    """Calls `evict`, at most once a minute in a process."""
    now = time.monotonic()
    if now - _checked.get(folder, -CHECK_SECONDS) >= CHECK_SECONDS:
        _checked[folder] = now
        evict(folder)


def evict(folder: Path) -> None:
    """Remove what was not used for longest, down to nine tenths of the limit if that is exceeded.

    The files of one kernel go together. What was used in the last ten minutes stays.
    """
    limit, now = limit_bytes(), time.time()
    entries: dict[str, list[Path]] = {}
    for path in folder.iterdir():
        stem = path.name if path.name.startswith(".") else path.name.partition(".")[0]
        entries.setdefault(stem, []).append(path)
    measured = sorted((*_measure(paths), stem) for stem, paths in entries.items())
    total = sum(size for _, size, _ in measured)
    target = limit if total <= limit else limit * 9 // 10
    for used, size, stem in measured:
        abandoned = stem.startswith(".") and now - used > ABANDONED_SECONDS
        if abandoned or (total > target and now - used > IN_USE_SECONDS):
            for path in entries[stem]:
                remove(path)
            total -= size


def remove(path: Path) -> None:
    """Remove a file or a folder; another process may have been faster."""
    with contextlib.suppress(OSError):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _measure(paths: list[Path]) -> tuple[float, int]:
    """When one of these was last used, and the bytes of all."""
    used, size = 0.0, 0
    for path in paths:
        with contextlib.suppress(OSError):  # it is gone
            for file in path.iterdir() if path.is_dir() else (path,):
                found = file.stat()
                used, size = max(used, found.st_mtime), size + found.st_size
    return used, size
