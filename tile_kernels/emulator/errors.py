"""What goes wrong when a kernel is emulated, as one exception with structured fields."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass


@dataclass(eq=False, repr=False)
class EmulationError(RuntimeError):
    """The kernel misbehaved, or the emulator cannot run it.

    `str(error)` is a sentence for people; the fields are for tests and tools.

    | field | meaning |
    |---|---|
    | `kind` | `"out of bounds"`, `"race"`, `"misaligned"`, `"deadlock"`, `"divergence"`, `"barrier"`, `"assert"`, `"shared memory"`, `"stack"`, `"arithmetic"`, `"memory"`, `"launch"`, `"unsupported"`, `"toolchain"`, `"cache"` |
    | `kernel` | name of the device function, if one was running |
    | `buffer`, `byte_offset`, `element` | where in which tensor or shared buffer |
    | `block`, `thread` | indices of the CUDA thread that noticed |
    | `python_file`, `python_line`, `python_text` | the line of the Python kernel, where TileLang kept it |
    | `source_file`, `source_line`, `source_text` | the generated line |
    | `other_python_file`, `other_python_line`, `other_python_text` | of a race: the Python line it conflicts with |
    | `other_line`, `other_text` | the same, in the generated source |
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

    def __str__(self) -> str:
        return self.message
