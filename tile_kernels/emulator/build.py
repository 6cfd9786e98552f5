"""Compile kernels with g++: header search, runtime library, precompiled header."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

from . import cache
from .errors import EmulationError

INCLUDE = Path(__file__).parent / "include"
MODES = ("fast", "check")

_BASE = [
    *("-std=c++17", "-fPIC", "-w", "-fno-strict-aliasing", "-fwrapv", "-fvisibility=hidden"),
    "-fstack-clash-protection",  # a large frame touches every page, so also the guard page
]
# Line tables cost nothing at run time and let a failure quote its source line.
_OPTIMISE = ["-O1", "-g1", "-ffp-contract=off"]
# g++ contracts a * b + c only from -O2 on, and only with the instruction available.
_CONTRACT = ["-O2", "-g1", "-mfma", "-ffp-contract=fast"]
# Accesses and calls stay where they are written. Otherwise stores that follow each other would be
# reported as one, and a barrier at a kernel's end would return to the kernel's caller, whose line
# it is not.
_AS_WRITTEN = ["-fno-tree-vectorize", "-fno-tree-slp-vectorize", "-fno-optimize-sibling-calls"]
# g++ would move reads from functions that are not checked into their callers.
_GCC = ["-fno-ipa-sra"]
# Only the compiler half of the sanitizer: each access calls a hook that runtime.cpp defines.
_CHECK = ["-fsanitize=thread"]
# clang would merge equal calls of different source lines; failures name the line of a call, which
# addr2line finds in version 4 of the debug information.
_CLANG = ["-gdwarf-4"] + [
    part
    for option in ("simplifycfg-sink-common=false", "simplifycfg-hoist-common=false",
                   "enable-tail-merge=false")
    for part in ("-mllvm", f"-{option}")
]  # fmt: skip
_LINK = ["-Wl,-rpath,$ORIGIN"]


@functools.lru_cache(maxsize=1)
def compiler() -> str:
    """The g++ to use, or an error that says what to install."""
    system, machine = platform.system(), platform.machine()
    if (system, machine) not in {("Linux", "x86_64"), ("Linux", "AMD64")}:
        raise EmulationError(
            "running kernels on a CPU needs Linux on x86-64 (the switch between CUDA threads is "
            f"written for it); this is {system} on {machine}",
            kind="toolchain",
        )
    cxx = os.environ.get("TILE_KERNELS_CXX") or shutil.which("g++")
    if not cxx or not shutil.which(cxx):
        raise EmulationError(
            "running kernels on a CPU needs g++ (any version from 11 on); install it, or name one "
            "in TILE_KERNELS_CXX",
            kind="toolchain",
        )
    return cxx


@functools.lru_cache(maxsize=1)
def _compiler_version() -> str:
    out = subprocess.run([compiler(), "--version"], capture_output=True, text=True, check=False)
    return out.stdout


def is_clang() -> bool:
    """Whether the compiler is clang, which takes other options in places."""
    return "clang" in _compiler_version().lower()


@functools.lru_cache(maxsize=1)
def cuda_include() -> tuple[str, ...]:
    """Folders of CUDA's headers: from a toolkit, or from NVIDIA's three header packages."""
    named = os.environ.get("TILE_KERNELS_CUDA_INCLUDE")
    if named and not _has_headers(Path(named)):
        raise EmulationError(
            f"TILE_KERNELS_CUDA_INCLUDE names {named}, which lacks CUDA's headers "
            f"({', '.join(_HEADERS)} and nv/target)",
            kind="toolchain",
        )
    found = next((Path(p) for p in _include_candidates() if _has_headers(Path(p))), None)
    if found is None:
        raise EmulationError(
            "running kernels on a CPU needs CUDA's header files (not the compiler): install "
            "nvidia-cuda-runtime, nvidia-cuda-crt and nvidia-cuda-cccl (pip install "
            "'moe-tile-kernels[emulate]'), or a CUDA 13 toolkit, or name an include folder in "
            "TILE_KERNELS_CUDA_INCLUDE",
            kind="toolchain",
        )
    return (str(found), str(found / "cccl"))


def _include_candidates() -> Iterator[str]:
    yield os.environ.get("TILE_KERNELS_CUDA_INCLUDE", "")
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if variable in os.environ:
            yield str(Path(os.environ[variable]) / "include")
    site = Path(sysconfig.get_paths()["purelib"])
    yield from (str(p) for p in sorted(site.glob("nvidia/cu1*/include"), reverse=True))
    yield "/usr/local/cuda/include"
    nvcc = shutil.which("nvcc")
    if nvcc:  # last, because it takes a while; it may be a wrapper script, so ask it
        command = [nvcc, "--dryrun", "-E", "-x", "cu", os.devnull]
        answer = subprocess.run(command, capture_output=True, text=True, check=False).stderr
        yield from re.findall(r'"-I(.*?)"', answer)
        yield from (str(Path(t) / "include") for t in re.findall(r"#\$ TOP=(.*)", answer))


_HEADERS = ("cuda_fp8.h", "cuda_fp4.h", "crt/host_defines.h")  # one of each package but cccl


def _has_headers(folder: Path) -> bool:
    if folder == Path() or not all((folder / n).exists() for n in _HEADERS):
        return False
    return any((folder / part / "nv" / "target").exists() for part in ("cccl", ""))


def flags(mode: str, *, contract: bool = False) -> list[str]:
    """Compiler flags of a mode."""
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}; got {mode!r}")
    if contract and not _cpu_has_fma():
        raise EmulationError("contract=True needs a CPU with fused multiply-add", kind="toolchain")
    checks = [*_CHECK, *_no_entry_hooks()] if mode == "check" else []
    own = _CLANG if is_clang() else _GCC
    return [*_BASE, *(_CONTRACT if contract else _OPTIMISE), *_AS_WRITTEN, *checks, *own]


def _no_entry_hooks() -> list[str]:
    """Spare the calls at function entry, which g++ can leave out from version 12 on."""
    if is_clang():
        return [  # and report a read also where the same place is written next
            *("-mllvm", "-tsan-instrument-func-entry-exit=0"),
            *("-mllvm", "-tsan-instrument-read-before-write"),
        ]
    version = re.search(r"\b(\d+)\.\d+\.\d+", _compiler_version())
    new = version is not None and int(version[1]) >= 12
    return ["--param=tsan-instrument-func-entry-exit=0"] if new else []


def _observed_copies(options: Sequence[str]) -> list[str]:
    """Link options for checks with clang, which calls the C library to copy structures."""
    if not (is_clang() and set(_CHECK) <= set(options)):
        return []
    return [f"-Wl,--wrap={name}" for name in ("memcpy", "memmove", "memset")]


@functools.lru_cache(maxsize=1)
def _cpu_has_fma() -> bool:
    info = Path("/proc/cpuinfo")
    return info.exists() and re.search(r"^flags\b.*\bfma\b", info.read_text(), re.M) is not None


@functools.lru_cache(maxsize=1)
def _shim_hash() -> str:
    text = b"".join(p.read_bytes() for p in sorted(INCLUDE.iterdir()) if p.is_file())
    return hashlib.sha256(text + _compiler_version().encode()).hexdigest()


def _hash(*parts: object) -> str:
    text = repr((_shim_hash(), cuda_include(), parts))
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def includes() -> list[str]:
    """Include options for the emulator's and CUDA's headers."""
    return [f"-I{INCLUDE}", *(f"-isystem{p}" for p in cuda_include())]


def run_compiler(arguments: Sequence[str | Path]) -> None:
    """Run g++; a failure becomes an EmulationError that names what is missing."""
    command = [compiler(), *map(str, arguments)]
    plain = {**os.environ, "LC_ALL": "C"}  # English messages with ASCII quotes, for explain()
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=plain)
    if done.returncode:
        raise EmulationError(explain(done.stderr), kind="unsupported")


_MISSING = [
    re.compile(r"error: '([\w:]+)' was not declared"),
    re.compile(r"error: '([\w:]+)' is not a member of '(\w+)'"),
    re.compile(r"error: '([\w:]+)' does not name a type"),
    re.compile(r"error: use of undeclared identifier '([\w:]+)'"),  # these two are clang's
    re.compile(r"error: no member named '([\w:]+)' in namespace '(\w+)'"),
    re.compile(r"error: no matching function for call to '(.*?)'\n"),
    re.compile(r"error: static assertion failed: (.*)"),
]
# g++ numbers the line that it quotes, clang before version 16 does not.
_QUOTED = re.compile(r"^\s*\d+ \| (.*)$", re.M)
_QUOTED_BELOW = re.compile(r".*\n(.*)\n[ ~]*\^")


def explain(stderr: str) -> str:
    """One sentence from the compiler's output: which name the emulator lacks."""
    for pattern in _MISSING:
        m = pattern.search(stderr)
        if not m:
            continue
        name = m[1] if m.lastindex == 1 else f"{m[2]}::{m[1]}"
        quoted = _QUOTED.search(stderr, m.start()) or _QUOTED_BELOW.match(stderr, m.start())
        line = f": {quoted[1].strip()}" if quoted else ""
        if "static assertion" in m[0]:
            return f"the kernel uses something the emulator does not provide ({name}){line}"
        return f"the kernel uses {name}, which the emulator does not provide{line}"
    return "the C++ compiler failed on the generated kernel:\n" + stderr[-3000:]


def runtime_library() -> Path:
    """The emulator's runtime as a shared library, compiled once."""
    options = [*_BASE, "-O2", "-g1", "-shared"]
    library = cache.open_cache() / f"runtime-{_hash(options)}.so"
    if cache.read_sealed(library) is None:
        soname = f"-Wl,-soname,{library.name}"  # else kernels would look for its absolute path
        _compile(library, [*options, soname, *includes(), INCLUDE / "runtime.cpp"])
    return library


def _precompiled_header(options: list[str]) -> Path:
    """Folder with the precompiled emu.h for these flags; g++ uses it only when all flags match."""
    folder = cache.open_cache() / f"header-{_hash(options, 'sha256')}"
    if _header_is_intact(folder):
        cache.mark_used(folder / "sha256")
        return folder
    cache.remove(folder)
    part = cache.private(folder)
    part.mkdir()
    try:
        header = part / "emu.h.gch"
        run_compiler([*options, *includes(), "-x", "c++-header", INCLUDE / "emu.h", "-o", header])
        (part / "sha256").write_text(hashlib.sha256(header.read_bytes()).hexdigest())
        with contextlib.suppress(OSError):  # another process was faster
            part.rename(folder)
    finally:
        cache.remove(part)
    return folder


def _header_is_intact(folder: Path) -> bool:
    """Whether the header is what g++ wrote."""
    header = folder / "emu.h.gch"
    try:
        found = header.stat()
        digest = _digest(header, found.st_ino, found.st_mtime_ns, found.st_size)
        return digest == (folder / "sha256").read_text()
    except OSError:
        return False


@functools.lru_cache(maxsize=16)
def _digest(path: Path, *_stat: int) -> str:
    """The hash of a large file, computed once for as long as the file stays as it is."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _compile(output: Path, arguments: Sequence[str | Path]) -> None:
    """Compile to a sealed file that appears under its name only when complete."""
    part = cache.private(output)
    try:
        run_compiler([*arguments, "-o", part])
        cache.write_atomically(output, cache.sealed(part.read_bytes()))
    finally:
        part.unlink(missing_ok=True)


def compile_kernel(source: str, options: list[str]) -> Path:
    """Compile a rewritten source to a shared library; its .cpp lies beside it."""
    runtime = runtime_library()
    library = runtime.parent / f"{_hash(source, options, runtime.name)}.so"
    cpp = library.with_suffix(".cpp")
    if not cpp.exists() or cpp.read_bytes() != source.encode():
        cache.write_atomically(cpp, source.encode())
    if cache.read_sealed(library) is not None:
        return library
    # Linked in a second step: the link must not know of the sanitizer, or it would add its library.
    unit = cache.private(library.with_suffix(".o"))
    try:
        header = _precompiled_header(options)
        run_compiler([*options, f"-I{header}", *includes(), "-c", cpp, "-o", unit])
        _compile(library, ["-shared", unit, runtime, *_LINK, *_observed_copies(options)])
    finally:
        unit.unlink(missing_ok=True)
    cache.keep_within_limit(library.parent)
    return library
