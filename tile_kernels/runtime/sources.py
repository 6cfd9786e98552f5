"""Looking at a kernel without a GPU: its generated CUDA, and what nvcc makes of it."""

from __future__ import annotations

import os
import re
import shutil
import struct
import subprocess
import sysconfig
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tile_kernels.runtime.launch import KernelDefinition

# The low 12 bits of a SASS instruction (sm_80 to sm_90) that name a memory access, and the
# meaning of its size field (bits 73 to 75), in bits.
_ACCESSES = {
    0x381: "LDG", 0x981: "LDG", 0x386: "STG", 0x986: "STG", 0x983: "LDL", 0x387: "STL",
    0x984: "LDS", 0x388: "STS", 0x988: "STS",
}  # fmt: skip
_ACCESS_BITS = (8, 8, 16, 16, 32, 64, 128, 128)
_INSTRUCTION_BYTES = 16


@dataclass(frozen=True)
class Compiled:
    """One device function of a cubin, as ptxas reports it and as its machine code reads."""

    name: str
    registers: int
    spill_bytes: int
    instructions: int
    serialised: bool  # ptxas waits after each wgmma (its messages C75xx)
    accesses: Counter[str] = field(compare=False)  # "LDG.128" -> how many


def cuda_source(definition: KernelDefinition, static: tuple[Any, ...], arch: str) -> str:
    """The CUDA C++ that TileLang generates. Runs no compiler and needs no GPU."""
    from tile_kernels.runtime.launcher import lower_kernel

    return lower_kernel(definition.prim_func(static), arch, definition.pass_configs).source


def nvcc() -> str | None:
    """The CUDA compiler: on the path, in CUDA_HOME, or from a wheel; None if there is none."""
    homes = [os.environ.get("CUDA_HOME", ""), os.environ.get("CUDA_PATH", ""), "/usr/local/cuda"]
    homes += map(str, Path(sysconfig.get_paths()["purelib"]).glob("nvidia/cu1*"))
    folders = [os.environ.get("PATH", ""), *(f"{home}/bin" for home in homes if home)]
    return shutil.which("nvcc", path=os.pathsep.join(folders))


def compile_source(source: str, arch: str) -> list[Compiled]:
    """Compile generated CUDA with nvcc as TileLang does, and read the result."""
    import tilelang

    compiler = nvcc()
    if compiler is None:
        raise RuntimeError("nvcc was not found: install a CUDA toolkit, or tilelang[nvcc]")
    package = Path(tilelang.__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        text, cubin = Path(folder) / "kernel.cu", Path(folder) / "kernel.cubin"
        text.write_text(source)
        command = [
            compiler, "-std=c++20", "-O3", "-w", f"-arch={arch}", f"-I{package / 'src'}",
            f"-I{package / '3rdparty/cutlass/include'}", "-cubin", "-Xptxas", "-v",
            str(text), "-o", str(cubin),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"nvcc failed for {arch}:\n{done.stderr[-4000:]}")
        return _read(done.stderr, cubin.read_bytes())


def _read(report: str, cubin: bytes) -> list[Compiled]:
    codes = _text_sections(cubin)
    found = []
    for part in report.split("Compiling entry function ")[1:]:
        name = part.split("'")[1]
        registers = re.search(r"Used (\d+) registers", part)
        spills = re.findall(r"(\d+) bytes spill", part)
        code = codes[name]
        found.append(
            Compiled(
                name=name,
                registers=int(registers[1]) if registers else 0,
                spill_bytes=sum(int(count) for count in spills),
                instructions=len(code) // _INSTRUCTION_BYTES,
                serialised="(C75" in report,
                accesses=_accesses(code),
            )
        )
    return found


def _text_sections(cubin: bytes) -> dict[str, bytes]:
    """The machine code of each device function of an ELF file."""
    (headers_at,) = struct.unpack_from("<Q", cubin, 0x28)
    header_bytes, count, names_index = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [
        struct.unpack_from("<IIQQQQIIQQ", cubin, headers_at + i * header_bytes)
        for i in range(count)
    ]
    names_at = headers[names_index][4]
    found = {}
    for header in headers:
        name_at, at, size = header[0], header[4], header[5]
        name = cubin[names_at + name_at :].split(b"\0", 1)[0].decode()
        if name.startswith(".text."):
            found[name.removeprefix(".text.")] = cubin[at : at + size]
    return found


def _accesses(code: bytes) -> Counter[str]:
    found: Counter[str] = Counter()
    for low, high in struct.iter_unpack("<QQ", code):
        access = _ACCESSES.get(low & 0xFFF)
        if access:
            found[f"{access}.{_ACCESS_BITS[high >> 9 & 7]}"] += 1
    return found
