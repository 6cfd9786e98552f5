"""Give every tensor of a checked call memory of its own, far from all others.

Bounds are checked by address. Where torch's allocator puts tensors side by side, a wrong offset may
land inside another argument and look legal; a terabyte apart, no realistic offset does.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from .errors import EmulationError

_PAGE = 4096
# Between the kernel's usual places for programs and for libraries nothing is ever mapped, so hints
# in there are honoured. No round distance: a power of two is a plausible wrong offset.
_FIRST = 16 << 40
_DISTANCE = (700 << 30) + 0x6B5D * _PAGE
_SLOTS = 64
_KEPT = 32 << 20  # a larger mapping is given back after the call
_ALIGN = 256
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FAILED = ctypes.c_void_p(-1).value

_slots: dict[int, tuple[int, int]] = {}  # slot -> address, bytes


def _reserve(slot: int, size: int) -> int:
    """Address of a slot with room for `size` bytes; the caller holds the emulator's lock."""
    address, room = _slots.get(slot, (0, 0))
    if room >= size:
        return address
    _release(slot)
    room = (size + _PAGE - 1) // _PAGE * _PAGE
    protection, kind = (
        mmap.PROT_READ | mmap.PROT_WRITE,
        mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE,
    )
    hint = _FIRST + slot * _DISTANCE if slot < _SLOTS else None
    mapped = _libc.mmap(hint, room, protection, kind, -1, 0)
    if mapped is None or mapped == _FAILED:
        raise EmulationError(
            f"no memory for a copy of {size} bytes of tensors (check mode keeps one)", kind="memory"
        )
    _slots[slot] = (mapped, room)
    return int(mapped)


def _release(slot: int) -> None:
    if slot in _slots:
        _libc.munmap(*_slots.pop(slot))


@contextmanager
def staged(
    spans: Mapping[str, tuple[int, int]], written: Callable[[str], bool]
) -> Iterator[dict[str, int]]:
    """Copy tensors (name -> address, bytes) apart for the duration; yields their new addresses.

    Tensors that overlap are one copy, so aliases stay aliases. Afterwards, also after a failure,
    what the kernels have `written` is copied back; the rest may be read-only memory.
    """
    where = {name: address for name, (address, size) in spans.items() if not size}
    copies: list[tuple[int, int, int, list[str]]] = []  # original, copy, bytes, names
    try:
        for slot, (start, end, names) in enumerate(_groups(spans)):
            copy = _reserve(slot, end - start + _ALIGN) + start % _ALIGN
            ctypes.memmove(copy, start, end - start)
            copies.append((start, copy, end - start, names))
            where.update((n, copy + spans[n][0] - start) for n in names)
        yield where
    finally:
        for start, copy, size, names in copies:
            if any(map(written, names)):
                ctypes.memmove(start, copy, size)
        for slot in [s for s, (_, room) in _slots.items() if room > _KEPT]:
            _release(slot)


def _groups(spans: Mapping[str, tuple[int, int]]) -> list[tuple[int, int, list[str]]]:
    """Overlapping tensors together: start, end, names."""
    groups: list[tuple[int, int, list[str]]] = []
    for start, size, name in sorted((a, n, name) for name, (a, n) in spans.items() if n):
        if groups and start < groups[-1][1]:
            first, end, names = groups[-1]
            groups[-1] = (first, max(end, start + size), [*names, name])
        else:
            groups.append((start, start + size, [name]))
    return groups
