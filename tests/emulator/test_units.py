"""The emulator's parts on their own: rewrite, expressions, header search, cache, binding."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tilelang import tvm

from tile_kernels.emulator import Emulated, EmulationError, build, cache, emulate
from tile_kernels.emulator.lowering import (
    Lowered,
    SharedBuffer,
    compile_expressions,
    lower,
    to_python,
)
from tile_kernels.emulator.rewrite import rewrite

from . import sample_kernels as k
from .helpers import cuda_source, rand, run

KERNEL = 'extern "C" __global__ void __launch_bounds__(128, 1) {name}(float* x) {{\n{body}\n}}\n'


# ---- rewrite -----------------------------------------------------------------------------------


def rewritten(body: str, split: bool = True, **sizes: SharedBuffer) -> str:
    return rewrite(KERNEL.format(name="f", body=body), {"f": sizes}, ["f"], split_shared=split)


def test_rewrite_replaces_includes_and_exports_the_kernel() -> None:
    source = "#include <tl_templates/cuda/reduce.h>\n#include <math_constants.h>\n" + KERNEL.format(
        name="f", body="  x[0] = 1;"
    )
    text = rewrite(source, {}, ["f", "f"])
    assert text.startswith('#include "emu.h"\n')
    assert "tl_templates" not in text
    assert "math_constants" not in text
    assert text.count("EMU_EXPORT(f)") == 1
    assert "  x[0] = 1;" in text


def test_rewrite_keeps_expressions_as_they_are() -> None:
    line = "  x[((((int)blockIdx.x) * 64) + 3)] = (x[0]*x[1]) + __expf(x[2]);"
    assert line in rewritten(line)


def test_rewrite_of_a_single_dynamic_buffer() -> None:
    text = rewritten("  extern __shared__ __align__(1024) float s[];", s=SharedBuffer(256, 32))
    assert 'float* s = (float*)emu::dyn_shared("s", 256, 8 * sizeof(float));' in text


def test_rewrite_of_two_word_types() -> None:
    text = rewritten(
        "  extern __shared__ __align__(1024) signed char s[];\n  __shared__ long long t[4];"
    )
    assert (
        'signed char* s = (signed char*)emu::dyn_shared("s", 0, 8 * sizeof(signed char));' in text
    )
    assert 'long long (&t)[4] = emu::static_shared<long long, 4>("t");' in text


ARENA = """  extern __shared__ __align__(1024) uchar buf_dyn_shmem[];
  void* a = ((void*)((char*)buf_dyn_shmem + 0));
  void* b = ((void*)((char*)buf_dyn_shmem + 512));"""


def test_rewrite_splits_buffers_of_known_size_and_drops_the_empty_arena() -> None:
    text = rewritten(ARENA, a=SharedBuffer(512, 16), b=SharedBuffer(128, 32))
    assert 'void* a = emu::shared_buf("a", 512, 16, 1024, 0);' in text
    assert 'void* b = emu::shared_buf("b", 128, 32, 1024, 512);' in text
    assert "buf_dyn_shmem" not in text


def test_rewrite_leaves_buffers_of_unknown_size_in_the_arena_but_names_them() -> None:
    text = rewritten(ARENA, b=SharedBuffer(128, 32))
    assert 'emu::name_shared("a", a, 512, 8);' in text
    assert 'emu::dyn_shared("dynamic shared memory", 0' in text
    assert 'void* b = emu::shared_buf("b", 128, 32, 1024, 512);' in text


def test_rewrite_merged_keeps_tilelangs_offsets() -> None:
    text = rewritten(ARENA, split=False, a=SharedBuffer(512, 16), b=SharedBuffer(128, 32))
    assert "((char*)buf_dyn_shmem + 512)" in text
    assert 'emu::name_shared("b", b, 128, 32);' in text


def test_rewrite_uses_the_sizes_of_the_right_kernel() -> None:
    body = "  extern __shared__ __align__(1024) float s[];"
    source = KERNEL.format(name="f", body=body) + KERNEL.format(name="g", body=body)
    sizes = {"f": {"s": SharedBuffer(64, 32)}, "g": {"s": SharedBuffer(128, 32)}}
    text = rewrite(source, sizes, ["f", "g"])
    first, second = text.split("__launch_bounds__")[1:]
    assert '"s", 64,' in first
    assert '"s", 128,' in second


def test_rewrite_refuses_a_declaration_it_does_not_know() -> None:
    with pytest.raises(EmulationError, match=r"cannot place.*__shared__ float s\[N\]"):
        rewritten("  __shared__ float s[N];")
    with pytest.raises(EmulationError, match="no kernel"):
        rewrite("int x;", {}, [])


# ---- expressions and lowering ------------------------------------------------------------------


def test_expressions_follow_c_and_floor_semantics() -> None:
    tirx = tvm.tirx
    n, m = tirx.Var("n", "int32"), tirx.Var("m", "int32")
    exprs: list[Any] = [
        (n + 1) * 2 - m,
        tirx.floordiv(n + 127, 128),
        tirx.floormod(n - m, 7),
        tirx.truncdiv(n - m, 3),
        tirx.truncmod(n - m, 3),
        tirx.min(n, m) + tirx.max(n, 9),
        tirx.Cast("int64", n),
        tirx.Select(n < m, n, m),
        n >> 1,
    ]
    values = compile_expressions([to_python(e) for e in exprs])({"n": 5, "m": 13})
    assert values == (-1, 1, 6, -2, -2, 14, 5, 5, 2)


def test_an_expression_without_a_meaning_is_refused() -> None:
    with pytest.raises(EmulationError, match="cannot evaluate"):
        to_python(tvm.tirx.Var("f", "float32") + tvm.tirx.FloatImm("float32", 1.0))


def test_lowering_survives_its_own_cache(tmp_path: Path) -> None:
    prim = k.tma_copy(70, 136)
    fresh = lower(prim, pass_configs=k.PLAIN, cache_dir=tmp_path)
    assert len(list(tmp_path.glob("*.json"))) == 1
    assert lower(prim, pass_configs=k.PLAIN, cache_dir=tmp_path) == fresh
    assert Lowered.from_json(fresh.to_json()) == fresh
    assert fresh.maps["x_desc"].box == ("64", "32")
    assert fresh.maps["x_desc"].swizzle == 3
    other = lower(prim, pass_configs=k.PLAIN, arch="sm_100a", cache_dir=tmp_path)
    assert other.arch == "sm_100a"
    assert len(list(tmp_path.glob("*.json"))) == 2


def test_lowering_describes_parameters_and_launches() -> None:
    low = lower(k.scale_rows(64, with_bias=False), pass_configs=k.PLAIN)
    assert [p.name for p in low.params] == ["x", "bias", "y", "alpha"]
    assert low.params[0].strides == ("s0", "1")
    assert low.params[3].shape is None
    (kernel,) = low.kernels
    assert kernel.grid == ("n", "1", "1")
    assert kernel.block == ("32", "1", "1")
    assert "bias" not in dict(kernel.args)


@pytest.mark.parametrize(
    ("prim_func", "kernels"),
    [
        (k.host_loop, "host_loop_kernel under `for i`"),
        (k.host_branch, "host_branch_kernel, host_branch_kernel_1 under `"),
    ],
)
def test_launches_under_host_control_flow_are_refused(prim_func: Any, kernels: str) -> None:
    """Each launch would run once, whatever the loop or the branch says."""
    with pytest.raises(EmulationError, match="under host control flow are not supported") as caught:
        lower(prim_func(), pass_configs=k.PLAIN)
    assert caught.value.kind == "unsupported"
    assert kernels in str(caught.value)


def test_lowering_wants_a_prim_func() -> None:
    with pytest.raises(TypeError, match="expected a TileLang prim_func, got int"):
        Emulated.build(3)


def test_importing_the_emulator_imports_neither_tilelang_nor_torch() -> None:
    code = (
        "import sys; from tile_kernels.emulator import EmulationError, runner; "
        "sys.exit('tilelang' in sys.modules or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ---- building ----------------------------------------------------------------------------------


@pytest.fixture
def fresh_search(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Run the compiler and header searches again, and forget the answers afterwards."""
    for f in (build.compiler, build.cuda_include):
        monkeypatch.setattr(build, f.__name__, f.__wrapped__)
    return monkeypatch


def test_missing_compiler_is_explained(fresh_search: pytest.MonkeyPatch) -> None:
    fresh_search.delenv("TILE_KERNELS_CXX", raising=False)
    fresh_search.setenv("PATH", "/nonexistent")
    with pytest.raises(EmulationError, match=r"needs g\+\+.*TILE_KERNELS_CXX") as caught:
        build.compiler()
    assert caught.value.kind == "toolchain"


def test_missing_headers_are_explained(fresh_search: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fresh_search.setattr(build, "_include_candidates", lambda: iter(["", str(tmp_path)]))
    with pytest.raises(EmulationError, match="nvidia-cuda-runtime, nvidia-cuda-crt") as caught:
        build.cuda_include()
    assert caught.value.kind == "toolchain"


def test_headers_from_packages_are_found(fresh_search: pytest.MonkeyPatch, tmp_path: Path) -> None:
    include = tmp_path / "nvidia" / "cu13" / "include"
    (include / "crt").mkdir(parents=True)
    (include / "cccl" / "nv").mkdir(parents=True)
    for name in ("cuda_fp8.h", "cuda_fp4.h", "crt/host_defines.h", "cccl/nv/target"):
        (include / name).touch()
    for variable in ("CUDA_HOME", "CUDA_PATH", "TILE_KERNELS_CUDA_INCLUDE"):
        fresh_search.delenv(variable, raising=False)
    fresh_search.setattr(build.sysconfig, "get_paths", lambda: {"purelib": str(tmp_path)})
    assert build.cuda_include() == (str(include), str(include / "cccl"))


def test_a_wrong_include_folder_is_an_error(
    fresh_search: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fresh_search.setenv("TILE_KERNELS_CUDA_INCLUDE", str(tmp_path))
    with pytest.raises(EmulationError, match=r"_CUDA_INCLUDE names .* lacks") as caught:
        build.cuda_include()
    assert caught.value.kind == "toolchain"
    (tmp_path / "crt").mkdir()
    for name in ("cuda_fp8.h", "cuda_fp4.h", "crt/host_defines.h"):
        (tmp_path / name).touch()
    with pytest.raises(EmulationError, match="nv/target"):
        build.cuda_include()
    (tmp_path / "nv").mkdir()  # where CUDA 12 has it
    (tmp_path / "nv" / "target").touch()
    assert build.cuda_include()[0] == str(tmp_path)


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TILE_KERNELS_CACHE", str(tmp_path))
    assert cache.cache_dir() == tmp_path / "emulator"
    monkeypatch.delenv("TILE_KERNELS_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache.cache_dir() == Path("/somewhere/tile_kernels/emulator")


def test_a_cache_of_others_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It holds code that is executed."""
    monkeypatch.setenv("TILE_KERNELS_CACHE", str(tmp_path))
    folder = cache.open_cache()
    assert folder.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
    problem = rf"belongs to another user \(uid {folder.stat().st_uid}\); set TILE_KERNELS_CACHE to"
    with pytest.raises(EmulationError, match=problem) as caught:
        reverse_works()
    assert caught.value.kind == "cache"
    monkeypatch.undo()
    monkeypatch.setenv("TILE_KERNELS_CACHE", str(tmp_path))
    for mode in (0o770, 0o702):
        folder.chmod(mode)
        with pytest.raises(EmulationError, match=f"can be written by others .* mode is {mode:o}"):
            reverse_works()
    folder.chmod(0o755)
    assert cache.open_cache() == folder


def test_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither a folder that cannot be created, nor one in which no file can be."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("TILE_KERNELS_CACHE", str(tmp_path / "file"))
    with pytest.raises(EmulationError, match=r"cannot be created: .*; set TILE_KERNELS_CACHE to"):
        reverse_works()
    monkeypatch.setenv("TILE_KERNELS_CACHE", str(tmp_path))
    monkeypatch.setattr(os, "access", lambda *_: False)  # permissions do not bind root
    with pytest.raises(EmulationError, match=r"cannot be written; set TILE_KERNELS_CACHE to"):
        reverse_works()


def test_the_least_recently_used_kernels_are_evicted(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, limit = time.time(), 100 * 10**6
    monkeypatch.setenv("TILE_KERNELS_CACHE_MB", "100")

    def entry(name: str, size: int, age: float) -> Path:
        path = own_cache / name
        path.write_bytes(bytes(size))
        os.utime(path, (now - age, now - age))
        return path

    oldest = [entry("oldest.so", limit // 2, 9000), entry("oldest.cpp", 10, 9000)]
    half_old = [entry("half.so", limit // 2, 5000), entry("half.cpp", 10, 50)]  # used recently
    old = entry("old.json", limit // 4, 4000)
    recent = entry("recent.so", limit // 4, 60)
    abandoned = entry(".killed.so.1", 10, 2 * 24 * 3600)
    reverse_works()  # a new kernel: what it adds is more than allowed
    assert not any(path.exists() for path in (*oldest, abandoned, old))
    assert all(path.exists() for path in (*half_old, recent))
    assert build._header_is_intact(next(own_cache.glob("header-*")))
    late = entry("late.so", limit, 9000)
    cache.keep_within_limit(own_cache)
    assert late.exists()  # the size was checked less than a minute ago
    monkeypatch.setattr(cache, "CHECK_SECONDS", 0)
    cache.keep_within_limit(own_cache)
    assert not late.exists()
    monkeypatch.setenv("TILE_KERNELS_CACHE_MB", "much")
    with pytest.raises(EmulationError, match=r"CACHE_MB must be a whole number .*, got 'much'"):
        cache.limit_bytes()


def test_second_build_runs_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = rand(64), torch.zeros(64)
    run(k.reverse(64, sync=True), x, y, configs=k.NO_BARRIERS)
    monkeypatch.setattr(build, "run_compiler", lambda _: pytest.fail("the compiler ran"))
    run(k.reverse(64, sync=True), x, y, configs=k.NO_BARRIERS)


def test_failed_compilation_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Even when g++ has already written some of its output, as when a disk is full."""

    def half_done(arguments: list[object]) -> None:
        Path(str(arguments[-1])).write_bytes(b"half")
        raise EmulationError("g++ stopped")

    output = tmp_path / "x.so"
    monkeypatch.setattr(build, "run_compiler", half_done)
    with pytest.raises(EmulationError, match=r"g\+\+ stopped"):
        build._compile(output, ["-shared", tmp_path / "x.cpp"])
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A cache of this test's own that starts with the compiled runtime and header."""
    options = build.flags("check")
    runtime, header = build.runtime_library(), build._precompiled_header(options)
    monkeypatch.setenv("TILE_KERNELS_CACHE", str(tmp_path))
    folder = cache.open_cache()
    shutil.copy(runtime, folder)
    shutil.copytree(header, folder / header.name)
    return folder


def reverse_works() -> None:
    x, y = rand(64), torch.zeros(64)
    run(k.reverse(64, sync=True), x, y, configs=k.NO_BARRIERS)
    assert torch.equal(y, x.flip(0))


def damage(path: Path, content: bytes) -> None:
    path.unlink()  # a new file: the old one may be loaded in this process
    path.write_bytes(content)


def test_a_damaged_cache_is_rebuilt(own_cache: Path) -> None:
    reverse_works()
    files = {p.suffix: p for p in own_cache.iterdir() if not p.name.startswith(("runtime", "head"))}
    assert set(files) == {".json", ".so", ".cpp"}
    files["runtime"] = next(own_cache.glob("runtime-*.so"))
    for path in files.values():
        whole = path.read_bytes()
        middle = len(whole) // 2
        broken = [b"", whole[:middle], whole[:middle] + b"?!" + whole[middle + 2 :]]
        for content in broken[1:2] if path is files["runtime"] else broken:  # 3 s to compile
            damage(path, content)
            reverse_works()
            assert path.suffix == ".so" or path.read_bytes() == whole
            assert path.suffix != ".so" or cache.read_sealed(path) is not None
    assert not [p.name for p in own_cache.iterdir() if p.name.startswith(".")]


@pytest.mark.parametrize("kind", ["shorter", "other bytes"])
def test_a_damaged_header_is_rebuilt(own_cache: Path, kind: str) -> None:
    header = next(own_cache.glob("header-*/emu.h.gch"))
    whole = header.read_bytes()
    middle = len(whole) // 2
    rest = b"" if kind == "shorter" else bytes(len(whole) - middle)
    damage(header, whole[:middle] + rest)
    reverse_works()
    assert header.read_bytes() != whole[:middle] + rest
    assert build._header_is_intact(header.parent)


def test_a_cache_may_move(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The libraries of a kernel find the runtime beside them, and errors still quote their line."""
    prim_func = k.shifted_copy(64, 1, 0)
    lowered = lower(prim_func, pass_configs=k.NO_GUARDS)
    Emulated.from_lowered(lowered)
    moved = own_cache.parent / "moved"
    moved.mkdir()
    own_cache.rename(moved / "emulator")
    monkeypatch.setenv("TILE_KERNELS_CACHE", str(moved))
    monkeypatch.setattr(build, "run_compiler", lambda _: pytest.fail("the compiler ran"))
    with pytest.raises(EmulationError, match="out of bounds") as caught:
        Emulated.from_lowered(lowered)(torch.zeros(64), torch.zeros(64))
    assert caught.value.source_file is not None
    assert caught.value.source_file.startswith(str(moved))


def test_threads_may_build_the_same_kernel(own_cache: Path) -> None:
    lowered = lower(k.reverse(64, sync=True), pass_configs=k.NO_BARRIERS)
    x, outputs = rand(64), [torch.zeros(64) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        builds = [pool.submit(Emulated.from_lowered, lowered) for _ in outputs]
    for future, y in zip(builds, outputs, strict=True):
        future.result()(x, y)
        assert torch.equal(y, x.flip(0))
    assert not [p.name for p in own_cache.iterdir() if p.name.startswith(".")]


def test_a_new_kernel_is_ready_within_seconds(own_cache: Path) -> None:
    """Lowering and compiling, with the runtime and the header at hand: usually half a second."""
    started = time.perf_counter()
    reverse_works()
    assert time.perf_counter() - started < 5


def test_unknown_mode() -> None:
    with pytest.raises(ValueError, match="mode must be one of fast, check; got 'slow'"):
        build.flags("slow")


@pytest.mark.parametrize(
    ("stderr", "sentence"),
    [
        (
            "k.cpp:3:5: error: 'frob' was not declared in this scope\n    3 |   frob(1);\n",
            "the kernel uses frob, which the emulator does not provide: frob(1);",
        ),
        (
            "k.cpp:3:5: error: 'frob' is not a member of 'tl'\n",
            "the kernel uses tl::frob, which the emulator does not provide",
        ),
        (
            "k.cpp:3:5: error: use of undeclared identifier 'frob'\n    3 |   frob(1);\n",
            "the kernel uses frob, which the emulator does not provide: frob(1);",
        ),
        (
            "k.cpp:3:5: error: no member named 'frob' in namespace 'tl'\n",
            "the kernel uses tl::frob, which the emulator does not provide",
        ),
        (
            "mma.h:1: error: static assertion failed: no such mma\n",
            "the kernel uses something the emulator does not provide (no such mma)",
        ),
    ],
)
def test_compiler_errors_become_sentences(stderr: str, sentence: str) -> None:
    assert build.explain(stderr) == sentence


# ---- binding -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scale() -> Emulated:
    return Emulated.build(k.scale_rows(64, with_bias=False), pass_configs=k.PLAIN)


def test_strides_scalars_and_an_absent_optional_tensor(scale: Emulated) -> None:
    wide = rand(5, 96)
    y = torch.zeros(5, 64)
    scale(wide[:, :64], None, y, 2.0)
    assert torch.equal(y, wide[:, :64] * 2)
    scale(wide[:, :64], torch.zeros(64), y, 3.0)
    assert torch.equal(y, wide[:, :64] * 3)


def test_no_rows_launches_nothing(scale: Emulated) -> None:
    report = scale(torch.zeros(0, 64), None, torch.zeros(0, 64), 1.0)
    assert report.blocks == 0
    assert report.threads == 0


def test_a_used_optional_tensor_is_required() -> None:
    full = Emulated.build(k.scale_rows(64, with_bias=True), pass_configs=k.PLAIN)
    x, y, bias = rand(2, 64), torch.zeros(2, 64), rand(64)
    full(x, bias, y, 1.0)
    torch.testing.assert_close(y, x + bias)
    with pytest.raises(TypeError, match="bias: expected a tensor, got NoneType"):
        full(x, None, y, 1.0)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"x": torch.zeros(5, 64).double()}, TypeError, "x: expected dtype torch.float32, got"),
        ({"x": torch.zeros(5, 63)}, ValueError, "x: dimension 1 must be 64, got 63"),
        ({"x": torch.zeros(5)}, ValueError, r"x: expected 2 dimensions \(n, 64\), got 1"),
        ({"y": torch.zeros(4, 64)}, ValueError, r"y: dimension 0 \(n\) is 4, elsewhere n is 5"),
        ({"y": torch.zeros(64, 5).t()}, ValueError, "y: stride 0 must be 64, got 1"),
        ({"x": torch.zeros(64, 5).t()}, ValueError, "x: stride 1 must be 1"),
        ({"y": 3}, TypeError, "y: expected a tensor, got int"),
        ({"y": torch.zeros(5, 64, device="meta")}, ValueError, "y: expected a CPU tensor"),
        ({"alpha": torch.tensor(1.0)}, TypeError, "alpha: expected a float32 scalar, got Tensor"),
        ({"alpha": None}, TypeError, "alpha: expected a float32 scalar, got NoneType"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_named(
    scale: Emulated, change: dict[str, Any], error: type[Exception], match: str
) -> None:
    given = {"x": torch.zeros(5, 64), "bias": None, "y": torch.zeros(5, 64), "alpha": 1.0}
    with pytest.raises(error, match=match):
        scale(*{**given, **change}.values())


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"b": 2**40}, ValueError, "b: 1099511627776 is out of range for int32"),
        ({"b": -(2**31) - 1}, ValueError, "b: -2147483649 is out of range for int32"),
        ({"b": 1.5}, TypeError, "b: expected a int32 scalar, got float"),
        ({"u": -1}, ValueError, "u: -1 is out of range for uint8"),
        ({"c": 0.5}, TypeError, "c: expected a bool scalar, got float"),
        ({"a": "1"}, TypeError, "a: expected a float32 scalar, got str"),
    ],
)
def test_scalars_must_fit_their_type(
    change: dict[str, Any], error: type[Exception], match: str
) -> None:
    kernel = Emulated.build(k.scalars(), pass_configs=k.PLAIN)
    given = {"a": 1, "b": 2**31 - 1, "c": True, "h": 0.5, "u": 255}
    y = torch.zeros(32)
    kernel(y, *given.values())
    assert abs(y[0].item() - (2**31 + 256.5)) < 512  # float32 at that size
    with pytest.raises(error, match=match):
        kernel(y, *{**given, **change}.values())


def test_wrong_number_of_arguments_and_order(scale: Emulated) -> None:
    with pytest.raises(TypeError, match=r"expected 4 arguments \(x, bias, y, alpha\), got 1"):
        scale(torch.zeros(5, 64))
    with pytest.raises(ValueError, match="order must be one of forward, reverse, random; got 'up'"):
        scale(torch.zeros(5, 64), None, torch.zeros(5, 64), 1.0, order="up")


def test_derived_dimensions_are_checked() -> None:
    low = lower(k.cast_e4m3(256, 128, 2, 128, 4), pass_configs=k.PLAIN)
    assert low.params[2].shape == ("n", "2")
    x, o = torch.zeros(3, 256, dtype=torch.bfloat16), torch.zeros(3, 256, dtype=torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="sf: dimension 1 must be 2, got 3"):
        Emulated.from_lowered(low)(x, o, torch.zeros(3, 3))


def test_unknown_names_and_static_arguments_of_a_prim_func() -> None:
    prim = k.reverse(64, sync=True)
    x, y = torch.zeros(64), torch.zeros(64)
    with pytest.raises(TypeError, match="reverse has no parameter z; it has x, y"):
        emulate(prim, (), {"x": x, "y": y, "z": y}, pass_configs=k.NO_BARRIERS)
    with pytest.raises(TypeError, match="finished prim_func"):
        emulate(prim, (1,), {"x": x, "y": y})


@pytest.mark.parametrize(
    ("grid", "block", "dyn", "match"),
    [
        (("1", "1", "1"), ("2048", "1", "1"), "0", "2048 threads per block"),
        (("1", "65536", "1"), ("32", "1", "1"), "0", "a grid of"),
        (("1", "1", "1"), ("32", "1", "1"), "240000", "240000 bytes .* has 232448"),
    ],
)  # fmt: skip
def test_launches_the_gpu_would_refuse(
    grid: tuple[str, str, str], block: tuple[str, str, str], dyn: str, match: str
) -> None:
    probe = cuda_source("y[0] = 1;", {"y": "int"})
    kernel = replace(probe.lowered.kernels[0], grid=grid, block=block, dyn_bytes=dyn)
    changed = Emulated.from_lowered(replace(probe.lowered, kernels=(kernel,)))
    with pytest.raises(EmulationError, match=match) as caught:
        changed(torch.zeros(1, dtype=torch.int32))
    assert caught.value.kind == "launch"
