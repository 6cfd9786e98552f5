"""What an emulated launch did: work executed, and bytes moved per tensor."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Traffic:
    """Bytes of one tensor that the checked accesses of a call touched, summed over its kernels.

    If `read == distinct_read == tensor.nbytes`, every byte was read exactly once.

    Attributes:
        read: Bytes that were read.
        written: Bytes that were written.
        atomic: Bytes that atomics accessed.
        distinct_read: Bytes that were read at least once.
        distinct_written: Bytes that were written at least once.
    """

    read: int
    written: int
    atomic: int
    distinct_read: int
    distinct_written: int


@dataclass(frozen=True)
class KernelRun:
    """One launched device function.

    Attributes:
        name: The name of the function.
        grid: The grid of the launch.
        block: The block size of the launch.
        blocks: The number of blocks that were executed.
        threads: The number of threads that were executed.
        barriers: The number of completed barriers.
        warp_ops: The number of warp operations.
        async_ops: The number of asynchronous copies.
        seconds: The time of the launch.
    """

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
    """Summary of a call.

    Attributes:
        name: The name of the kernel.
        mode: `"check"` or `"fast"`.
        kernels: The device functions that were launched.
        buffers: The traffic of each tensor, or None in fast mode, which does not record accesses.
        seconds: The time of the call.
    """

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
