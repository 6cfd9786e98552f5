"""What an emulated launch did: work executed, and bytes moved per tensor."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Traffic:
    """Bytes of one tensor touched by the checked accesses of a call, summed over its kernels.

    `read == distinct_read == tensor.nbytes` says that every byte was read exactly once.
    """

    read: int
    written: int
    atomic: int
    distinct_read: int
    distinct_written: int


@dataclass(frozen=True)
class KernelRun:
    """One launched device function."""

    name: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    blocks: int
    threads: int
    barriers: int
    warp_ops: int
    async_ops: int
    seconds: float


@dataclass(frozen=True)
class Report:
    """Summary of a call. `buffers` is None in fast mode, which does not watch memory."""

    name: str
    mode: str
    kernels: tuple[KernelRun, ...]
    buffers: dict[str, Traffic] | None
    seconds: float

    @property
    def blocks(self) -> int:
        """Blocks executed by all kernels of the call."""
        return sum(k.blocks for k in self.kernels)

    @property
    def threads(self) -> int:
        """CUDA threads executed by all kernels of the call."""
        return sum(k.threads for k in self.kernels)

    @property
    def barriers(self) -> int:
        """Block, named, grid and mbarrier completions."""
        return sum(k.barriers for k in self.kernels)

    @property
    def warp_ops(self) -> int:
        """Shuffles, votes and matrix operations, counted per warp."""
        return sum(k.warp_ops for k in self.kernels)

    def __str__(self) -> str:
        lines = [f"{self.name} ({self.mode}): {self.seconds * 1e3:.1f} ms"]
        for k in self.kernels:
            grid, block = (" x ".join(map(str, d)) for d in (k.grid, k.block))
            lines.append(
                f"  {k.name}: grid {grid}, block {block}; {k.blocks} blocks, {k.threads} threads, "
                f"{k.barriers} barriers, {k.warp_ops} warp operations, {k.async_ops} async copies"
            )
        for name, t in (self.buffers or {}).items():
            lines.append(
                f"  {name}: {t.read} bytes read ({t.distinct_read} distinct), "
                f"{t.written} written ({t.distinct_written} distinct), {t.atomic} by atomics"
            )
        return "\n".join(lines)
