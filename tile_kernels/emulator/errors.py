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
    """The kernel misbehaved, or the emulator cannot run it.

    `str(error)` is a sentence for people; the fields are for tests and tools.

    | field | meaning |
    |---|---|
    | `kind` | `"out of bounds"`, `"race"`, `"misaligned"`, `"deadlock"`, `"divergence"`, `"barrier"`, `"assert"`, `"uninitialised"`, `"fence"`, `"layout"`, `"metadata"`, `"registers"`, `"shared memory"`, `"stack"`, `"arithmetic"`, `"memory"`, `"launch"`, `"unsupported"`, `"toolchain"`, `"cache"` |
    | `kernel` | name of the device function, if one was running |
    | `buffer`, `byte_offset`, `element` | where in which tensor or shared buffer |
    | `block`, `thread` | indices of the CUDA thread that noticed |
    | `python_file`, `python_line`, `python_text` | the line of the Python kernel, where TileLang kept it |
    | `source_file`, `source_line`, `source_text` | the generated line |
    | `other_python_file`, `other_python_line`, `other_python_text` | of a race: the Python line it conflicts with |
    | `other_line`, `other_text` | the same, in the generated source |
    | `warp` | index of the thread's warp in its block |
    | `barriers`, `shared` | the latest events at barriers of the block, and its shared buffers |
    """  # noqa: E501

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
