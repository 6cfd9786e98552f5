"""What goes wrong when a kernel is emulated, as one exception with structured fields."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass


@dataclass(frozen=True)
class BarrierEvent:
    """A warp `arrives` at a barrier or `waits` for it, or the barrier `completes` (warp -1)."""

    what: str
    warp: int
    barrier: str
    python_file: str | None = None
    python_line: int | None = None

    def __str__(self) -> str:
        who = f"barrier {self.barrier}" if self.warp < 0 else f"warp {self.warp}"
        text = f"{who} {self.what}" if self.warp < 0 else f"{who} {self.what}: {self.barrier}"
        return text if self.python_line is None else f"{text} (line {self.python_line})"


@dataclass(frozen=True)
class SharedPart:
    """A shared buffer: where TileLang puts it, in bytes."""

    name: str
    offset: int
    size: int


@dataclass(eq=False, repr=False)
class EmulationError(RuntimeError):
    """The kernel has an error, or the emulator cannot run it.

    `str(error)` is a message for readers. The attributes are for tests and tools; those that do not
    apply are None.

    Attributes:
        message: The message.
        kind: `"out of bounds"`, `"race"`, `"misaligned"`, `"deadlock"`, `"divergence"`,
            `"barrier"`, `"assert"`, `"uninitialised"`, `"fence"`, `"layout"`, `"metadata"`,
            `"registers"`, `"shared memory"`, `"stack"`, `"arithmetic"`, `"memory"`, `"launch"`,
            `"unsupported"`, `"toolchain"` or `"cache"`.
        kernel: The name of the device function, if one was running.
        buffer: The name of the tensor or shared buffer that was accessed.
        byte_offset: The offset of the access in the buffer.
        element: The index of the element that was accessed.
        block: The index of the CUDA block whose thread failed.
        thread: The index of that thread in its block.
        python_file: The file of the Python kernel, where TileLang recorded it.
        python_line: The line in that file.
        python_text: The text of that line.
        other_python_file: For a race or a divergent barrier, the file of the other access.
        other_python_line: The line of the other access.
        other_python_text: The text of that line.
        source_file: The generated file.
        source_line: The line in the generated file.
        source_text: The text of that line.
        other_line: The generated line of the other access.
        other_text: The text of that line.
        warp: The index of the warp of the thread in its block.
        barriers: The latest barrier events of the block.
        shared: The shared buffers of the block.
    """

    message: str
    _: KW_ONLY
    kind: str = "unsupported"
    kernel: str | None = None
    buffer: str | None = None
    byte_offset: int | None = None
    element: int | None = None
    block: tuple[int, int, int] | None = None
    thread: tuple[int, int, int] | None = None
    python_file: str | None = None
    python_line: int | None = None
    python_text: str | None = None
    other_python_file: str | None = None
    other_python_line: int | None = None
    other_python_text: str | None = None
    source_file: str | None = None
    source_line: int | None = None
    source_text: str | None = None
    other_line: int | None = None
    other_text: str | None = None
    warp: int | None = None
    barriers: tuple[BarrierEvent, ...] = ()
    shared: tuple[SharedPart, ...] = ()

    def __str__(self) -> str:
        return self.message
