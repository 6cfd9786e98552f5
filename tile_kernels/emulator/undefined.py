"""Does a result depend on memory that nobody has written?

The runtime notes the instructions that read undefined bytes. Many such reads are harmless: a padded
tile, a lane whose result is discarded. So a launch that has any is repeated, once per instruction,
with another value for what that instruction reads. If the results or the failure change, the value
matters, and the read is reported. A launch without such reads is run once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .errors import EmulationError

if TYPE_CHECKING:
    from .launch import CLaunch

UNDEFINED = 0xFF  # what undefined bytes are at first: NaN, -1

# Failures that a wild value may have caused. A race is not one: the other thread's write came late.
CONSEQUENCES = frozenset({"out of bounds", "misaligned", "deadlock", "assert", "arithmetic"})


class Rerun:
    """Repeats a launch with other undefined values.

    Args:
        spans: name of a tensor -> address and bytes of the caller's memory.
        addresses: where the kernels see it.
        fresh: the tensors that are undefined at first.
    """

    def __init__(
        self,
        spans: Mapping[str, tuple[int, int]],
        addresses: Mapping[str, int],
        fresh: Sequence[str],
    ) -> None:
        self.spans, self.addresses, self.fresh = spans, addresses, fresh

    def blame(
        self, launch: CLaunch, again: Callable[[], Any], error: EmulationError | None
    ) -> EmulationError | None:
        """The error of the read that matters, else the one of the first run.

        Args:
            launch: as the first run has left it.
            again: runs it once more.
            error: how the first run failed, or None.
        """
        if error is not None and error.kind not in CONSEQUENCES:
            return error
        sites = launch.sites[: launch.num_sites]
        results = self._contents()
        try:
            for site in sites:
                launch.blamed, launch.strict = site, 0
                other = self._attempt(again)
                if str(other) == str(error) and self._contents() == results:
                    continue
                launch.strict = 1
                failed = self._attempt(again)
                if failed is not None and failed.kind == "uninitialised":
                    return failed
        finally:
            launch.blamed = launch.strict = 0
            for name, content in results.items():
                ctypes.memmove(self.addresses[name], content, len(content))
        return error

    def _contents(self) -> dict[str, bytes]:
        return {n: ctypes.string_at(self.addresses[n], size) for n, (_, size) in self.spans.items()}

    def _attempt(self, again: Callable[[], Any]) -> EmulationError | None:
        """Run from the tensors of the caller, which the first run has not changed yet."""
        for name, (address, size) in self.spans.items():
            if name in self.fresh:
                ctypes.memset(self.addresses[name], UNDEFINED, size)
            else:
                ctypes.memmove(self.addresses[name], address, size)
        try:
            again()
        except EmulationError as error:
            return error
        return None
