"""Windows: memory of each rank that the others write into, row by row.

The receiver announces a free part of its window, senders write rows to where they finally belong,
and tensors are views of that part until nobody uses them any more. In contrast to the areas of a
ring, rows are neither packed nor copied out.

```
 receiver                                  sender
 ready = 1  ---------------------------->  wait until ready = 1, ready = 0
                                           write rows
 wait until done = 1, done = 0  <--------  done = 1
```

Flags are zero again at the end. A rank sets `ready` for the next transfer after it waited for
`done` of this one, which a peer sets after it took `ready` back, so flags are never overtaken.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tile_kernels.utils import align

ALIGNMENT = 256  # bytes, of the parts of a window


class Region:
    """Some bytes of this rank's window. They are free again once the object is gone.

    Tensors that `Window.tensor` makes keep it alive.
    """

    def __init__(self, window: Window, start: int, num_bytes: int) -> None:
        self.window, self.start, self.num_bytes = window, start, num_bytes

    def __del__(self) -> None:
        self.window.released.append((self.start, self.num_bytes, self.window.mark()))


class Window(ABC):
    """The windows of all ranks; those of peers by their addresses in this process."""

    def __init__(self, addresses: Sequence[int], index: int, num_bytes: int) -> None:
        self.addresses, self.index, self.num_bytes = list(addresses), index, num_bytes
        self.released: deque[tuple[int, int, Any]] = deque()  # by threads that collect garbage
        self._free = [(0, num_bytes)]  # by start; neighbours are merged
        self._marks: list[Any] = []
        self._lock = threading.Lock()

    def announced(self) -> tuple[int, int]:
        """The start and the size of the largest free part."""
        with self._lock:
            self._collect()
            return max(self._free, key=lambda part: part[1], default=(0, 0))

    def take(self, start: int, num_bytes: int) -> Region:
        """The first bytes of a free part."""
        size = align(max(num_bytes, 1), ALIGNMENT)
        with self._lock:
            at = next(i for i, part in enumerate(self._free) if part[0] == start)
            room = self._free[at][1]
            if size > room:
                raise ValueError(f"window: {size} bytes do not fit into {room}")
            self._free[at : at + 1] = [(start + size, room - size)] if room > size else []
        return Region(self, start, size)

    def _collect(self) -> None:
        while self.released:
            start, size, mark = self.released.popleft()
            self._free.append((start, size))
            if mark is not None:
                self._marks.append(mark)
        merged: list[tuple[int, int]] = []
        for start, size in sorted(self._free):
            if merged and sum(merged[-1]) == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + size)
            else:
                merged.append((start, size))
        self._free = merged

    def take_marks(self) -> list[Any]:
        """What must be over before peers write: the last uses of parts that became free."""
        marks, self._marks = self._marks, []
        return marks

    def mark(self) -> Any:
        """The present point of the current stream, if there are streams."""
        return None

    def tensor(
        self, region: Region, start: int, shape: Sequence[int], dtype: torch.dtype
    ) -> Tensor:
        """A tensor over a part of a region, from byte `start` of it on."""
        num_bytes = dtype.itemsize
        for size in shape:
            num_bytes *= size
        if num_bytes == 0:
            return torch.empty(tuple(shape), dtype=dtype, device=self.device)
        return self.memory(region, start, num_bytes).view(dtype).view(tuple(shape))

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where the window is."""

    @abstractmethod
    def memory(self, region: Region, start: int, num_bytes: int) -> Tensor:
        """Bytes of a region as a tensor that keeps it alive."""

    @abstractmethod
    def begin(self, phase: str) -> None:
        """Peers may write from here on, and so may this rank."""

    @abstractmethod
    def end(self, phase: str) -> None:
        """What this rank wrote is announced, and what peers wrote is here."""
