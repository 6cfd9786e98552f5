"""Compiled kernels on disk: bundles, which are deployed, and the cache, which fills by itself.

A bundle is a zip file of kernels for one architecture (`tile-kernels pack`). Operators look there
first, and need neither TileLang nor a compiler for what they find. Bundles are read from, in this
order:

1. what `config.set_bundles` names, else `TILE_KERNELS_BUNDLES` (separated by `:`): files, or
   folders with bundles or with cached kernels, all read only;
2. the wheel of the architecture (`moe-tile-kernels-sm90`), where neither of these is set.

A bundle belongs to one version of this package, and to its very kernel sources. One that does not
is an error, not a reason to compile.

The cache is a folder of the user (`TILE_KERNELS_CACHE`, by default `~/.cache/tile_kernels`, beside
the emulator's). Files are complete or absent, checksummed, and keyed by the sources of all kernels
of this package. Kernels that other packages define are not cached here.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import threading
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tile_kernels.emulator import cache
from tile_kernels.emulator.errors import EmulationError
from tile_kernels.runtime import logs
from tile_kernels.runtime.compilation import label
from tile_kernels.runtime.launcher import Binary

FORMAT = 1  # of bundles and of cached kernels
VARIABLE = "TILE_KERNELS_BUNDLES"
MANIFEST = "manifest.json"
DISTRIBUTION = "moe-tile-kernels"
OLDEST_TILELANG = (0, 1, 15)  # that compiles all kernels, as the extra `jit` requires
_PACKAGE = "tile_kernels"
_SUFFIX = ".kernel"
# Files that no kernel depends on; all others in the folders of operators count as sources.
_NOT_SOURCES = {"op.py", "cases.py", "reference.py"}
_SOURCES_OF_RUNTIME = ("arithmetic", "device", "launch", "launcher", "philox")
_SOURCE_FOLDERS = (
    "attention",
    "engram",
    "ep",
    "gemm",
    "mhc",
    "moe",
    "quant",
    "transform",
    "transpose",
)


class BundleError(RuntimeError):
    """A bundle cannot be used: damaged, of another version, or not there."""


class MissingKernelError(RuntimeError):
    """No bundle has a kernel, and TileLang is not there to compile it."""


class Key(NamedTuple):
    """What a compiled kernel is found by."""

    module: str
    name: str
    static: tuple[Any, ...]
    arch: str

    @property
    def digest(self) -> str:
        """A name for files."""
        facts = (FORMAT, self.module, self.name, tuple(self.static), self.arch)
        return hashlib.sha256(repr(facts).encode()).hexdigest()[:32]

    @property
    def packaged(self) -> bool:
        """Whether the sources of the kernel are those of this package."""
        return self.module.partition(".")[0] == _PACKAGE


def sources() -> list[Path]:
    """Every file of this package on which the machine code of a kernel may depend."""
    root = Path(__file__).parent.parent
    runtime = [root / "runtime" / f"{name}.py" for name in _SOURCES_OF_RUNTIME]
    files = [*runtime, *(root / "runtime" / "kernels").glob("*.py"), root / "emulator/lowering.py"]
    for folder in _SOURCE_FOLDERS:
        files += [each for each in (root / folder).rglob("*.py") if each.name not in _NOT_SOURCES]
    return sorted(files)


@functools.cache
def source_digest() -> str:
    """A hash of `sources`."""
    root = Path(__file__).parent.parent
    hashed = hashlib.sha256()
    for file in sources():
        content = file.read_bytes()
        hashed.update(f"{file.relative_to(root)} {len(content)}\n".encode())
        hashed.update(content)
    return hashed.hexdigest()


def version() -> str:
    """The version of this package."""
    import tile_kernels

    return tile_kernels.__version__


# ---- bundles ------------------------------------------------------------------------------------


class Bundle:
    """An open bundle.

    Args:
        path: The zip file.

    Raises:
        BundleError: If it is no bundle, or one of another version or other sources.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._open()
            self.manifest = json.loads(self._archive.read(MANIFEST))
            if not isinstance(self.manifest, dict):
                raise ValueError(f"its {MANIFEST} is no JSON object")
        except Exception as error:  # of zipfile, json and every decompressor
            raise BundleError(f"{path} is not a bundle of kernels: {error}") from None
        found = [self.manifest.get(name) for name in ("format", "version", "sources")]
        expected = [FORMAT, version(), source_digest()]
        for name, have, want in zip(("format", "version", "kernel sources"), found, expected):
            if have != want:
                raise BundleError(
                    f"the bundle {path} has the {name} {have}, and this {DISTRIBUTION} {version()} "
                    f"has {want}: install the bundle of this version, or build one with "
                    f"tile-kernels pack --arch {self.manifest.get('arch')} -o FILE"
                )
        kernels = self.manifest.get("kernels")
        if not isinstance(kernels, dict) or not all(
            isinstance(each, dict) and {"label", "sha256"} <= each.keys()
            for each in kernels.values()
        ):
            raise BundleError(f"{path} is not a bundle of kernels: its {MANIFEST} lists none")
        self.kernels: dict[str, Any] = kernels

    def _open(self) -> None:
        self._archive = zipfile.ZipFile(self.path)
        self._lock = threading.Lock()  # one position in one file
        self._process = os.getpid()

    def read(self, key: Key) -> Binary | None:
        """The kernel, if the bundle has it."""
        entry = self.kernels.get(key.digest)
        if entry is None:
            return None
        try:
            if self._process != os.getpid():  # a fork shares the position with its parent
                self._open()
            with self._lock:
                content = self._archive.read(key.digest + _SUFFIX)
        except Exception as error:  # as above
            raise BundleError(f"the bundle {self.path} is damaged: {error}") from None
        if hashlib.sha256(content).hexdigest() != entry["sha256"]:
            raise BundleError(f"the bundle {self.path} is damaged: checksum of {entry['label']}")
        return Binary.from_bytes(content)


@dataclass(frozen=True)
class _Folder:
    """A folder of cached kernels, such as another user's cache, that is only read."""

    path: Path

    def read(self, key: Key) -> Binary | None:
        """The kernel, if the folder has it."""
        return _read_cached(self.path, key)


class _State:
    """Of the process: the roots that a caller set, and what was opened, by architecture."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.paths: tuple[Path, ...] | None = None
        self.opened: dict[str, tuple[Bundle | _Folder, ...]] = {}


_state = _State()


def set_bundles(paths: Iterable[str | Path] | None) -> None:
    """Reads kernels from these bundles, or folders of bundles, before anything is compiled.

    Kernels that the process has already stay in use.

    Args:
        paths: Files and folders; an empty list for none, None for what `TILE_KERNELS_BUNDLES` names
            or else for an installed wheel.

    Raises:
        BundleError: If one does not exist, or belongs to another version.
    """
    if isinstance(paths, (str, os.PathLike)):
        raise TypeError(f"set_bundles: paths must be a list of paths, got the path {paths}")
    found = None if paths is None else tuple([Path(each) for each in paths])
    for path in found or ():
        _open(path)
    with _state.lock:
        _state.paths = found
        _state.opened = {}


def roots(arch: str) -> tuple[Bundle | _Folder, ...]:
    """The open bundles that may have kernels for `arch`."""
    found = _state.opened.get(arch)
    if found is None:
        with _state.lock:
            paths = _state.paths
            if paths is None:
                paths = _named_paths() if VARIABLE in os.environ else _wheels(arch)
            found = tuple([root for path in paths for root in _open(path)])
            _state.opened[arch] = found
    return found


def _named_paths() -> tuple[Path, ...]:
    words = os.environ[VARIABLE].split(os.pathsep)
    return tuple([Path(word).expanduser() for word in words if word])


def wheel_package(arch: str) -> str:
    """The package in a wheel of kernels: `moe_tile_kernels_sm90` for `sm_90a`."""
    return f"{DISTRIBUTION}-{arch}".rstrip("a").replace("-", "_").replace("sm_", "sm")


def _wheels(arch: str) -> tuple[Path, ...]:
    found = importlib.util.find_spec(wheel_package(arch))
    if found is None or not found.submodule_search_locations:
        return ()
    return tuple([Path(folder) for folder in found.submodule_search_locations])


def _open(path: Path) -> list[Bundle | _Folder]:
    if path.is_dir():
        if not os.access(path, os.R_OK | os.X_OK):
            raise BundleError(f"the folder of kernels {path} cannot be read by this user")
        bundles = [Bundle(each) for each in sorted(path.glob("*.zip"))]
        return [*bundles, _Folder(path)]
    if not path.exists():
        raise BundleError(f"the bundle of kernels {path} does not exist")
    return [Bundle(path)]


def find(key: Key) -> Binary | None:
    """A kernel from a bundle; None if none has it."""
    if not key.packaged:
        return None
    for root in roots(key.arch):
        found = root.read(key)
        if found is not None:
            if logs.settings.level:
                logs.logger.info("loaded %s for %s from %s", key.name, key.arch, root.path)
            return found
    return None


def has_compiler() -> bool:
    """Whether a TileLang is installed that compiles these kernels."""
    return importlib.util.find_spec("tilelang") is not None and not too_old(_installed())


def too_old(version: str) -> bool:
    """Whether TileLang of this version lacks what the kernels use; unknown versions do not."""
    numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    return numbers is not None and tuple(map(int, numbers.groups())) < OLDEST_TILELANG


def need_compiler(key: Key) -> None:
    """Raises unless a TileLang is installed that compiles these kernels."""
    if has_compiler():
        return
    lacking = "TileLang is not installed"
    if importlib.util.find_spec("tilelang") is not None:
        oldest = ".".join(map(str, OLDEST_TILELANG))
        lacking = f"TileLang {_installed()}, which is installed, is older than {oldest}"
    paths = ", ".join(str(root.path) for root in roots(key.arch)) if key.packaged else ""
    where = f"none of the bundles {paths}" if paths else "no bundle: there is none"
    raise MissingKernelError(
        f"the kernel {label(key.name, key.static)} for {key.arch} is in {where}, and {lacking}. "
        "Either add it to a bundle, where TileLang is: tile-kernels pack --arch "
        f"{key.arch} --op family.operator name=value ... -o FILE, and name the file in {VARIABLE}; "
        f"or compile it here: pip install '{DISTRIBUTION}[jit]', with a CUDA toolkit."
    )


class Packed(NamedTuple):
    """A kernel for a bundle."""

    key: Key
    binary: Binary


def write(path: Path, kernels: Sequence[Packed], arch: str, facts: dict[str, Any]) -> None:
    """Writes a bundle, completely or not at all.

    Args:
        path: The zip file.
        kernels: What goes in.
        arch: The architecture of all of them.
        facts: What the manifest says besides: versions of the tools.
    """
    entries = {}
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED) as archive:
            for key, binary in sorted(kernels, key=lambda each: each.key.digest):
                content = binary.to_bytes()
                checksum = hashlib.sha256(content).hexdigest()
                entries[key.digest] = {"label": label(key.name, key.static), "sha256": checksum}
                add_file(archive, key.digest + _SUFFIX, content)
            manifest = {
                "format": FORMAT, "version": version(), "sources": source_digest(), "arch": arch,
                **facts, "kernels": entries,
            }  # fmt: skip
            add_file(archive, MANIFEST, json.dumps(manifest, indent=1).encode())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def add_file(archive: zipfile.ZipFile, name: str, content: bytes) -> None:
    """Adds a file without the time of day: equal kernels make equal bundles."""
    entry = zipfile.ZipInfo(name)
    entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
    archive.writestr(entry, content)


# ---- the cache ----------------------------------------------------------------------------------


def _tilelang() -> str:
    """The version of the TileLang that compiles kernels here, or nothing."""
    return "" if too_old(_installed()) else _installed()


@functools.cache
def _installed() -> str:
    """The installed version of TileLang, or nothing."""
    try:
        return importlib.metadata.version("tilelang")
    except importlib.metadata.PackageNotFoundError:
        return ""


def _cached_path(folder: Path, key: Key) -> Path:
    return folder / f"{key.digest}.{source_digest()[:16]}{_SUFFIX}"


def _read_cached(folder: Path, key: Key) -> Binary | None:
    """A cached kernel that the installed TileLang made, or any where there is none."""
    content = cache.read_sealed(_cached_path(folder, key))
    if content is None:
        return None
    made_by, _, rest = content.partition(b"\n")
    if _tilelang() and made_by.decode() != _tilelang():
        return None
    return Binary.from_bytes(rest)


def find_cached(key: Key) -> Binary | None:
    """A kernel from the user's cache, unless others may write there."""
    folder = cache.cache_dir("kernels")
    if not key.packaged or cache.written_by_others(folder):
        return None
    return _read_cached(folder, key)


def store(key: Key, binary: Binary) -> None:
    """Adds a kernel to the user's cache, if that can be written; others may read it."""
    if not key.packaged:
        return
    try:
        folder = cache.open_cache("kernels", 0o755)
        content = f"{_tilelang()}\n".encode() + binary.to_bytes()
        cache.write_atomically(_cached_path(folder, key), cache.sealed(content))
        cache.keep_within_limit(folder)
    except EmulationError as error:
        logs.logger.warning("%s was compiled and is not cached: %s", key.name, error)
