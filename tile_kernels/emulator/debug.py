"""Leave a kernel behind as files that gdb can step through, without Python or TileLang.

`write_sources` puts the C++ text and a `debug.sh` into a folder; `write_launch` stores the inputs
of each call. `debug.sh` compiles everything with -g into one program that replays the launch.
"""

from __future__ import annotations

import ctypes
import shlex
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import build as _build

if TYPE_CHECKING:
    from .launch import CLaunch

MAGIC = b"tkemu001"
_SCRIPT = """\
#!/bin/sh
# Step through {kernel} in gdb, one CUDA thread at a time:
#   ./debug.sh [-b X[,Y[,Z]]] [-t X[,Y[,Z]]] [-k KERNEL] [gdb options]
# stops at the first line of the kernel in that block and thread (default 0,0,0). `next` steps over
# barriers: the other threads run until this one may go on. Extra options go to gdb, for example
#   ./debug.sh -t 5 -batch -ex next -ex 'info locals'
set -e
cd "$(dirname "$0")"
kernel={kernel} block=0,0,0 thread=0,0,0
while :; do
  case "$1" in
    -b) block=$2,0,0; shift 2 ;;
    -t) thread=$2,0,0; shift 2 ;;
    -k) kernel=$2; shift 2 ;;
    *) break ;;
  esac
done
part() {{ echo "$1" | cut -d, -f"$2"; }}
if [ ! -x replay ] || [ kernel.cpp -nt replay ]; then
  {compile}
fi
same() {{ echo "$1.x == $(part $2 1) && $1.y == $(part $2 2) && $1.z == $(part $2 3)"; }}
exec gdb -q \\
  -ex "break $kernel if $(same threadIdx $thread) && $(same blockIdx $block)" \\
  -ex run "$@" --args ./replay "$kernel.launch"
"""


def write_sources(
    folder: Path, text: str, cuda: str, options: Sequence[str], kernels: Sequence[str]
) -> None:
    """Put the C++ source, the CUDA source and `debug.sh` into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "kernel.cpp").write_text(text)
    (folder / "kernel.cu").write_text(cuda)
    plain = [o for o in options if o not in {"-O1", "-O2", "-g1", "-fPIC", "-fvisibility=hidden"}]
    # The runtime must not be instrumented: its hooks would call themselves.
    bare = [o for o in plain if "san" not in o]
    entries = " ".join(f"EMU_ENTRY({k})" for k in dict.fromkeys(kernels))
    units: list[tuple[str, list[object]]] = [
        ("runtime.o", [*bare, "-O1", "-g", _build.INCLUDE / "runtime.cpp"]),
        (
            "replay.o",
            [*bare, "-O0", "-g", f"-DEMU_KERNELS={entries}", _build.INCLUDE / "replay.cpp"],
        ),
        ("kernel.o", [*plain, "-O0", "-g", "kernel.cpp"]),
    ]
    cxx, includes = _build.compiler(), _build.includes()
    lines = [_command([cxx, *includes, "-c", *words, "-o", unit]) for unit, words in units]
    lines.append(_command([cxx, *(unit for unit, _ in units), "-o", "replay"]))
    script = folder / "debug.sh"
    script.write_text(_SCRIPT.format(kernel=kernels[0], compile="\n  ".join(lines)))
    script.chmod(0o755)


def _command(words: Sequence[object]) -> str:
    return " ".join(shlex.quote(str(w)) for w in words)


def write_launch(
    folder: Path, kernel: str, launch: CLaunch, values: Sequence[Any], tensors: Mapping[str, Any]
) -> None:
    """Store one launch: sizes, tensors as they are now, and the kernel's arguments.

    Layout (little endian), read by include/replay.cpp: magic; 6 sizes; dynamic bytes; order, seed,
    cooperative, check, async_late; tensors (name, element bits, address, bytes, data); arguments
    (size, bytes), in which the address of a stored tensor is replaced by where it is loaded.
    """
    out = [MAGIC, struct.pack("<6I", *launch.grid, *launch.block)]
    out.append(struct.pack("<Q", launch.dyn_bytes))
    flags = (launch.order, launch.seed, launch.cooperative, launch.check, launch.async_late)
    out.append(struct.pack("<iIiii", *flags))
    out.append(struct.pack("<I", len(tensors)))
    for i, name in enumerate(tensors):
        r = launch.ranges[i]
        label = name.encode()
        data = ctypes.string_at(r.base, r.size) if r.size else b""
        out.append(struct.pack("<I", len(label)) + label)
        out.append(struct.pack("<IQQ", r.elem_bits, r.base or 0, r.size) + data)
    out.append(struct.pack("<I", len(values)))
    for v in values:
        raw = bytes(v)
        out.append(struct.pack("<I", len(raw)) + raw)
    folder.mkdir(parents=True, exist_ok=True)  # it may have been deleted since
    (folder / f"{kernel}.launch").write_bytes(b"".join(out))
