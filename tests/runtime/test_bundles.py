"""Bundles and the cache of compiled kernels; a process that has neither TileLang nor a compiler."""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tile_kernels
from tests.requirements import needs_nvcc, run_fresh
from tests.runtime.test_launcher import PRODUCT, ROWS
from tile_kernels import config
from tile_kernels.runtime import bundles, packing, warmup
from tile_kernels.runtime.bundles import BundleError, Key, MissingKernelError, Packed
from tile_kernels.runtime.device import described
from tile_kernels.runtime.launch import Kernel, KernelDefinition
from tile_kernels.runtime.launcher import Binary, Launcher

PYPROJECT = Path(__file__).parent.parent.parent / "pyproject.toml"
ARCH = "sm_90a"
KEYS = [Key("tile_kernels.moe.no.kernel", "rows", (64, True, "x"), ARCH)]
KEYS.append(KEYS[0]._replace(name="product"))
BINARIES = [Binary(ROWS, b"\x7fELF rows"), Binary(PRODUCT, b"\x7fELF product")]
KERNELS = [Packed(key, binary) for key, binary in zip(KEYS, BINARIES)]
CALL = ("moe.topk_gate", {"scores": "float32[5,40]", "num_topk": 3})
# Makes a process one without TileLang: the finder of installed modules does not find it.
WITHOUT = """
import sys
from importlib.machinery import PathFinder

find = PathFinder.find_spec
PathFinder.find_spec = lambda name, path=None, target=None: (
    None if name.partition(".")[0] in {"tilelang", "tvm", "tvm_ffi"} else find(name, path, target)
)
"""


@pytest.fixture(autouse=True)
def _own_roots(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.delenv(bundles.VARIABLE, raising=False)
    monkeypatch.setenv("TILE_KERNELS_CACHE", str(tmp_path / "cache"))
    config.set_bundles(None)
    yield
    config.set_bundles(None)


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    path = tmp_path / "kernels.zip"
    bundles.write(path, KERNELS, ARCH, {"nvcc": "13.0"})
    return path


def test_what_was_packed_is_found(bundle: Path) -> None:
    assert bundles.find(KEYS[0]) is None
    config.set_bundles([bundle])
    assert [bundles.find(key) for key in KEYS] == BINARIES
    for other in ({"arch": "sm_100a"}, {"static": (64, 1, "x")}, {"module": "tile_kernels.x"}):
        assert bundles.find(KEYS[0]._replace(**other)) is None


def test_roots_by_variable_folder_and_order(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = tmp_path / "site"
    first.mkdir()
    newer = Binary(ROWS, b"\x7fELF newer")
    bundles.write(first / "a.zip", [Packed(KEYS[0], newer)], ARCH, {})
    monkeypatch.setenv(bundles.VARIABLE, f"{first}{os.pathsep}{bundle}")
    config.set_bundles(None)
    assert [bundles.find(key) for key in KEYS] == [newer, BINARIES[1]]
    monkeypatch.setenv(bundles.VARIABLE, "")
    config.set_bundles(None)
    assert bundles.roots(ARCH) == ()


def test_a_cache_of_another_user_is_a_root(tmp_path: Path) -> None:
    bundles.store(KEYS[0], BINARIES[0])
    assert bundles.find_cached(KEYS[0]) == BINARIES[0]
    folder = tmp_path / "cache" / "kernels"
    (file,) = folder.iterdir()
    file.chmod(0o444)
    folder.chmod(0o555)
    try:
        config.set_bundles([folder])
        assert bundles.find(KEYS[0]) == BINARIES[0]
        assert bundles.find(KEYS[1]) is None
    finally:
        folder.chmod(0o755)


def test_other_users_may_read_the_cache_and_not_write_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    umask = os.umask(0o022)
    try:
        bundles.store(KEYS[0], BINARIES[0])
    finally:
        os.umask(umask)
    folder = tmp_path / "cache" / "kernels"
    (file,) = folder.iterdir()
    assert [each.stat().st_mode & 0o777 for each in (folder, file)] == [0o755, 0o644]
    monkeypatch.setattr(os, "access", lambda path, _: path != folder)
    with pytest.raises(BundleError, match=r"the folder of kernels .*kernels cannot be read by"):
        config.set_bundles([folder])


def test_a_forked_process_reads_by_itself(bundle: Path) -> None:
    """Processes that share an open file share the position in it."""
    opened = bundles.Bundle(bundle)
    number = opened._archive.fp.fileno()
    os.lseek(number, 1, os.SEEK_SET)
    child = os.fork()
    if not child:
        found = [opened.read(key) for key in KEYS]
        os._exit(found != BINARIES)
    assert os.waitpid(child, 0)[1] == 0
    assert os.lseek(number, 0, os.SEEK_CUR) == 1
    assert [opened.read(key) for key in KEYS] == BINARIES


def test_equal_kernels_make_equal_bundles(bundle: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.zip"
    bundles.write(again, KERNELS[::-1], ARCH, {"nvcc": "13.0"})
    assert again.read_bytes() == bundle.read_bytes()


def test_a_failed_write_leaves_the_old_bundle(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = bundle.read_bytes()

    def fail(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(bundles, "add_file", fail)
    with pytest.raises(OSError, match="no space left"):
        bundles.write(bundle, KERNELS, ARCH, {})
    assert bundle.read_bytes() == before
    assert [each.name for each in bundle.parent.iterdir() if each.is_file()] == [bundle.name]


@pytest.mark.parametrize(
    ("field", "value"), [("format", 99), ("version", "0.0.1"), ("sources", "0" * 64)]
)
def test_bundles_of_another_version_are_refused(bundle: Path, field: str, value: Any) -> None:
    with zipfile.ZipFile(bundle) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    manifest = json.loads(files[bundles.MANIFEST]) | {field: value}
    with zipfile.ZipFile(bundle, "w") as archive:
        for name, content in files.items():
            text = json.dumps(manifest).encode()
            archive.writestr(name, text if name == bundles.MANIFEST else content)
    with pytest.raises(BundleError, match=f"{value}.*tile-kernels pack --arch sm_90a -o FILE"):
        config.set_bundles([bundle])


def test_damaged_bundles_are_refused(bundle: Path, tmp_path: Path) -> None:
    content = bytearray(bundle.read_bytes())
    with zipfile.ZipFile(bundle) as archive:
        at = archive.getinfo(f"{KEYS[0].digest}.kernel").header_offset + 100
    content[at] ^= 1
    bundle.write_bytes(content)
    config.set_bundles([bundle])
    with pytest.raises(BundleError, match=r"kernels\.zip is damaged"):
        bundles.find(KEYS[0])
    for name, text in (("no.zip", b"no zip"), ("empty.zip", b"")):
        path = tmp_path / name
        path.write_bytes(text)
        with pytest.raises(BundleError, match="is not a bundle of kernels"):
            config.set_bundles([path])
    with pytest.raises(BundleError, match=r"missing\.zip does not exist"):
        config.set_bundles([tmp_path / "missing.zip"])
    for path in (bundle, str(bundle)):
        with pytest.raises(TypeError, match="set_bundles: paths must be a list of paths, got the"):
            config.set_bundles(path)  # type: ignore[arg-type]


def test_no_damage_of_a_byte_goes_unnoticed(bundle: Path) -> None:
    """Each byte in turn: the kernels are right, or the error is one of bundles."""
    content = bundle.read_bytes()
    for at in range(len(content)):
        for mask in (0x01, 0x06, 0x40, 0xFF):
            bundle.write_bytes(content[:at] + bytes([content[at] ^ mask]) + content[at + 1 :])
            try:
                damaged = bundles.Bundle(bundle)
                found = [damaged.read(key) for key in KEYS]
            except BundleError:
                continue
            assert found == BINARIES, at


@pytest.mark.parametrize("manifest", ["[1]", "null", "[" * 100_000, "\xff"])
def test_a_zip_file_with_another_manifest_is_refused(bundle: Path, manifest: str) -> None:
    with zipfile.ZipFile(bundle, "w") as archive:
        archive.writestr(bundles.MANIFEST, manifest.encode("latin1"))
    with pytest.raises(BundleError, match="is not a bundle of kernels"):
        config.set_bundles([bundle])


@pytest.mark.parametrize("kernels", [None, [], {"x": None}, {"x": {"label": "x"}}])
def test_a_manifest_without_checksums_is_refused(bundle: Path, kernels: Any) -> None:
    with zipfile.ZipFile(bundle) as archive:
        manifest = json.loads(archive.read(bundles.MANIFEST))
    with zipfile.ZipFile(bundle, "w") as archive:
        archive.writestr(bundles.MANIFEST, json.dumps({**manifest, "kernels": kernels}))
    with pytest.raises(BundleError, match="lists none"):
        config.set_bundles([bundle])


@pytest.mark.parametrize("method", [0, 9, 12, 14, 93, 255])  # the entry has 8
def test_an_entry_of_another_compression_is_a_damaged_one(bundle: Path, method: int) -> None:
    """Also where the entry is larger than a decompressor's input, and it gives up by itself."""
    content = bytes(range(256)) * 1024
    with zipfile.ZipFile(bundle) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    name = f"{KEYS[0].digest}.kernel"
    with zipfile.ZipFile(bundle, "w", zipfile.ZIP_DEFLATED) as archive:
        for each, old in files.items():
            archive.writestr(each, content if each == name else old)
        (entry,) = (each for each in archive.infolist() if each.filename == name)
    data = bytearray(bundle.read_bytes())
    listed = data.rindex(name.encode()) - 46 + 10  # of the central directory
    data[entry.header_offset + 8] = data[listed] = method
    bundle.write_bytes(data)
    config.set_bundles([bundle])
    with pytest.raises(BundleError, match="is damaged"):
        bundles.find(KEYS[0])


def test_a_changed_entry_is_noticed_by_its_checksum(bundle: Path) -> None:
    """A zip file whose own checksums are right."""
    with zipfile.ZipFile(bundle) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    files[f"{KEYS[0].digest}.kernel"] += b"x"
    with zipfile.ZipFile(bundle, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    config.set_bundles([bundle])
    with pytest.raises(BundleError, match=r"checksum of rows\(64, True, x\)"):
        bundles.find(KEYS[0])


def test_the_cache_notices_damage_other_versions_and_other_sources(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bundles.store(KEYS[0], BINARIES[0])
    with monkeypatch.context() as patch:
        patch.setattr(bundles, "_tilelang", lambda: "0.1.99")
        assert bundles.find_cached(KEYS[0]) is None
        patch.setattr(bundles, "_tilelang", lambda: "")  # not installed: any will do
        assert bundles.find_cached(KEYS[0]) == BINARIES[0]
    with monkeypatch.context() as patch:
        patch.setattr(bundles, "source_digest", lambda: "1" * 64)
        assert bundles.find_cached(KEYS[0]) is None
    (file,) = (tmp_path / "cache" / "kernels").iterdir()
    content = bytearray(file.read_bytes())
    content[40] ^= 1
    file.write_bytes(content)
    assert bundles.find_cached(KEYS[0]) is None


def test_a_cache_that_cannot_be_written_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "cache" / "kernels"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    bundles.store(KEYS[0], BINARIES[0])
    assert "rows was compiled and is not cached" in caplog.text
    assert "can be written by others" in caplog.text
    assert not list(folder.iterdir())


def test_a_cache_that_others_write_is_not_read(tmp_path: Path) -> None:
    bundles.store(KEYS[0], BINARIES[0])
    folder = tmp_path / "cache" / "kernels"
    folder.chmod(0o775)
    assert bundles.find_cached(KEYS[0]) is None
    folder.chmod(0o755)
    assert bundles.find_cached(KEYS[0]) == BINARIES[0]


def test_kernels_of_other_packages_are_neither_packed_nor_cached(bundle: Path) -> None:
    config.set_bundles([bundle])
    other = KEYS[0]._replace(module="scale.kernel")
    bundles.store(other, BINARIES[0])
    assert bundles.find(other) is None
    assert bundles.find_cached(other) is None


def test_a_kernel_from_a_bundle_is_no_compilation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (item,) = warmup.compilations([CALL], described(ARCH))
    known = Kernel(item.kernel.module, item.kernel.name, item.kernel.plan)
    key = Key(known.module, known.name, item.static, ARCH)
    path = tmp_path / "gate.zip"
    bundles.write(path, [Packed(key, BINARIES[0])], ARCH, {})
    config.set_bundles([path])
    monkeypatch.setattr(KernelDefinition, "compile", lambda *_: pytest.fail("it was compiled"))
    before = config.compilation_count()
    with config.forbid_compilation():
        handle = known.handle(item.static, ARCH)
    assert isinstance(handle, Launcher)
    assert handle.binary == BINARIES[0]
    assert config.compilation_count() == before


def test_a_missing_kernel_is_named_with_both_ways_to_get_it(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda *_: None)
    with pytest.raises(MissingKernelError, match=r"is in no bundle: there is none, and TileLang"):
        bundles.need_compiler(KEYS[0])
    config.set_bundles([bundle])
    expected = (
        r"the kernel lost\(64, True, x\) for sm_90a is in none of the bundles .*kernels\.zip, and "
        r"TileLang is not installed.*tile-kernels pack --arch sm_90a --op .*TILE_KERNELS_BUNDLES.*"
        r"pip install 'moe-tile-kernels\[jit\]'"
    )
    with pytest.raises(MissingKernelError, match=expected):
        bundles.need_compiler(KEYS[0]._replace(name="lost"))


def install_tilelang(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """Lets a TileLang of this version seem to be installed."""
    found = SimpleNamespace(submodule_search_locations=None)
    monkeypatch.setattr("importlib.util.find_spec", lambda *_: found)
    monkeypatch.setattr(bundles, "_installed", lambda: version)


@pytest.mark.parametrize("version", ["0.1.12", "0.1.9.post1"])
def test_an_older_tilelang_compiles_nothing(
    version: str, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other frameworks pin one: what is compiled is used, and what is not is named."""
    bundles.store(KEYS[0], BINARIES[0])
    install_tilelang(monkeypatch, version)
    assert not bundles.has_compiler()
    assert bundles.find_cached(KEYS[0]) == BINARIES[0]
    config.set_bundles([bundle])
    assert bundles.find(KEYS[1]) == BINARIES[1]
    expected = rf"TileLang {version}, which is installed, is older than 0\.1\.15\. Either add it"
    with pytest.raises(MissingKernelError, match=expected):
        bundles.need_compiler(KEYS[0]._replace(name="lost"))


@pytest.mark.parametrize("version", ["0.1.15", "0.1.15.post2", "0.2.0+cu130", "", "unknown"])
def test_other_versions_of_tilelang_compile(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install_tilelang(monkeypatch, version)
    assert bundles.has_compiler()
    bundles.need_compiler(KEYS[0])


def test_the_oldest_tilelang_is_that_of_the_extra() -> None:
    (requirement,) = (
        each
        for each in tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"]["jit"]
        if each.startswith("tilelang")
    )
    assert requirement.startswith(f"tilelang>={'.'.join(map(str, bundles.OLDEST_TILELANG))},")


def test_wheels_are_found_by_architecture(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = packing._write_wheel(tmp_path, bundle.read_bytes(), ARCH)
    assert wheel.name == f"moe_tile_kernels_sm90-{tile_kernels.__version__}-py3-none-any.whl"
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
        metadata = archive.read(
            f"moe_tile_kernels_sm90-{tile_kernels.__version__}.dist-info/METADATA"
        )
    assert f"Requires-Dist: moe-tile-kernels=={tile_kernels.__version__}".encode() in metadata
    monkeypatch.syspath_prepend(str(site))
    config.set_bundles(None)
    assert bundles.find(KEYS[0]) == BINARIES[0]
    assert bundles.roots("sm_100a") == ()
    code = f"import sys; sys.path.append({str(wheel)!r}); import moe_tile_kernels_sm90"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_sources_of_kernels_change_the_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "tile_kernels"
    for name in ("runtime/kernels/common.py", "runtime/arithmetic.py", "runtime/device.py",
                 "runtime/launch.py", "runtime/launcher.py", "runtime/philox.py",
                 "emulator/lowering.py", "moe/gate/kernel.py", "moe/gate/op.py",
                 "moe/gate/plan.py"):  # fmt: skip
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    monkeypatch.setattr(bundles, "__file__", str(root / "runtime/bundles.py"))
    before = bundles.source_digest.__wrapped__()
    (root / "moe/gate/op.py").write_text("changed")
    assert bundles.source_digest.__wrapped__() == before
    (root / "moe/gate/kernel.py").write_text("changed")
    assert bundles.source_digest.__wrapped__() != before


def test_what_kernels_import_is_among_the_sources() -> None:
    root = Path(tile_kernels.__file__).parent.parent
    sources = bundles.sources()
    imported = set()
    for file in sources:
        text = file.read_text()
        if "tilelang" in text and file.parent.name != "runtime" and file.name != "lowering.py":
            for line in ast.walk(ast.parse(text)):
                if isinstance(line, ast.ImportFrom) and str(line.module).startswith("tile_kernels"):
                    module = root.joinpath(*str(line.module).split("."))
                    for name in line.names:
                        part = module / f"{name.name}.py"
                        imported.add(part if part.exists() else module.with_suffix(".py"))
    assert len(imported) > 20
    assert imported <= set(sources)


def test_operators_run_on_a_cpu_without_tilelang() -> None:
    """Every operator: its worked example, by its reference."""
    code = (
        WITHOUT
        + """
import torch, tile_kernels
from tile_kernels.runtime import registry

count = 0
for op in registry.all_ops():
    for vector in op.cases.vectors[:1]:
        op.function(**vector.arguments())
        count += 1
assert count == len(registry.all_ops()), count
assert not {"tilelang", "tvm", "tvm_ffi"} & set(sys.modules)
tile_kernels.warmup([], progress=False)
try:
    tile_kernels.warmup([("moe.topk_gate", {"scores": "float32[5,40]", "num_topk": 3})],
                        arch="sm_90a", progress=False)
except RuntimeError as error:
    print(error)
"""
    )
    message = run_fresh(code)
    assert message.startswith("the kernel topk_gate_warp(num_experts=40")
    assert "pip install 'moe-tile-kernels[jit]'" in message


@pytest.mark.parametrize("words", [["info"], ["ops", "moe"], ["check", "moe", "--references-only"]])
def test_commands_run_without_tilelang(words: list[str]) -> None:
    code = WITHOUT + f"\nfrom tile_kernels.cli import main\nprint(main({words!r}))"
    assert run_fresh(code).splitlines()[-1] == "0"


def test_what_is_compiled_already_is_packed_without_tilelang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (item,) = warmup.compilations([CALL], described(ARCH))
    monkeypatch.setattr(item.kernel, "_handles", {})
    key = Key(item.kernel.module, item.kernel.name, item.static, ARCH)
    bundles.store(key, BINARIES[0])
    install_tilelang(monkeypatch, "0.1.12")
    given: dict[str, Any] = {"arch": ARCH, "calls": [CALL], "progress": False}
    for wheel in (False, True):
        path = tmp_path / "new" / f"folder {wheel}" / "kernels.zip"
        written, _ = packing.pack(path, wheel=wheel, **given)
        assert written.is_file()
        with pytest.raises(
            ValueError, match=r"pack: path must be a (file, got the fol|folder, got)"
        ):
            packing.pack(written if wheel else written.parent, wheel=wheel, **given)
    opened = bundles.Bundle(tmp_path / "new" / "folder False" / "kernels.zip")
    assert opened.read(key) == BINARIES[0]
    assert opened.manifest["tilelang"] == "none"


@needs_nvcc
@pytest.mark.compiled
def test_packed_kernels_are_launched_without_tilelang(tmp_path: Path) -> None:
    """Packs by the command; another process, without TileLang, hands the kernel to a driver."""
    path = tmp_path / "gate.zip"
    words = ["pack", "--arch", ARCH, "--op", "moe.topk_gate", "scores=float32[5,40]", "num_topk=3"]
    command = [sys.executable, "-m", "tile_kernels", *words, "-o", str(path)]
    subprocess.run(command, check=True, capture_output=True)
    code = (
        WITHOUT
        + f"""
import torch
from pathlib import Path
from tests.runtime.fake_driver import FakeDriver, fake, parameters
from tile_kernels.runtime import launcher, warmup
from tile_kernels.runtime.device import described

driver = FakeDriver(Path({str(tmp_path)!r}))
launcher.current_raw_stream = lambda index: 7
(item,) = warmup.compilations([{CALL!r}], described("sm_90a"))
run = item.kernel.handle(item.static, "sm_90a")
run._open_driver = lambda: driver
run = run.fixed((0, 1))
scores, index = fake(torch.zeros(9, 40)), fake(torch.zeros(9, 3, dtype=torch.int64))
run([scores, index])
(launch,) = driver.launches()
assert not {{"tilelang", "tvm", "tvm_ffi"}} & set(sys.modules)
pointers = {{scores.data_ptr(), index.data_ptr()}}
found = parameters(launch, "QQi")
print(launch.name.decode(), list(launch.sizes)[:6], set(found[:2]) == pointers, found[2])
"""
    )
    found = run_fresh(code, **{bundles.VARIABLE: str(path)})
    assert found == "topk_gate_warp_40_3_4_4_kernel [3, 1, 1, 128, 1, 1] True 9"


@pytest.fixture(autouse=True)
def by_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILE_KERNELS_LAUNCHER", "driver")


@needs_nvcc
@pytest.mark.compiled
def test_a_bundle_may_be_for_fewer_multiprocessors(tmp_path: Path) -> None:
    path = tmp_path / "gate.zip"
    arguments: dict[str, Any] = {"arch": "sm_89", "calls": [CALL], "progress": False}
    packing.pack(path, num_sms=58, **arguments)
    assert bundles.Bundle(path).manifest["num_sms"] == 58
    with pytest.raises(ValueError, match="num_sms must be at least 1, got 0"):
        packing.pack(path, num_sms=0, **arguments)
    assert dataclasses.replace(described("sm_89"), num_sms=58).num_sms == 58
