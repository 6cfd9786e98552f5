"""Launches from a description, with a driver that keeps what it is asked: no GPU, no TileLang."""

from __future__ import annotations

import ctypes
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.requirements import needs_nvcc
from tests.runtime.fake_driver import STREAM, FakeDriver, FakeTensor, fake, parameters
from tile_kernels.emulator.lowering import Kernel, Lowered, Param, TensorMap
from tile_kernels.runtime import launch, launcher, warmup
from tile_kernels.runtime.device import described
from tile_kernels.runtime.driver import attributes
from tile_kernels.runtime.launcher import Binary, Launcher

# 64 channels a row; the second kernel adds up parts of the first.
ROWS = Lowered(
    name="rows",
    arch="sm_90a",
    source="",
    params=(
        Param("x", "bfloat16", ("tokens", "64"), ("stride", "1")),
        Param("bias", "float32", ("64",)),
        Param("y", "float32", ("(tokens * 2)", "64")),
        Param("alpha", "float32"),
        Param("flag", "bool"),
    ),
    kernels=(
        Kernel(
            name="rows_kernel",
            args=(
                ("y", "tensor"), ("tokens", "int32"), ("x", "tensor"), ("alpha", "float32"),
                ("stride", "int64"), ("flag", "bool"),
            ),
            grid=("((tokens + 3) // 4)", "2", "1"),
            block=("128", "1", "1"),
            dyn_bytes="(tokens * 16)",
            shared={},
        ),
        Kernel(
            name="rows_kernel_1",
            args=(("y", "tensor"),),
            grid=("1", "1", "1"),
            block=("32", "4", "1"),
            dyn_bytes="0",
            shared={},
            cluster=(2, 1, 1),
            overlaps=True,
        ),
    ),
    maps={},
    cooperative=False,
    assumptions=("((stride % 8) == 0)",),
)  # fmt: skip
FORMATS = ("Q", "i", "Q", "f", "q", "?")
PRODUCT = Lowered(
    name="product",
    arch="sm_90a",
    source="",
    params=(
        Param("a", "float8_e4m3fn", ("m", "256")),
        Param("sf", "float32", ("2", "m"), ("sf_stride", "1")),
    ),
    kernels=(
        Kernel(
            name="product_kernel",
            args=(("a_map", "map"), ("m", "int32"), ("sf_map", "map")),
            grid=("min(132, (m * 2))", "1", "1"),
            block=("384", "1", "1"),
            dyn_bytes="200000",
            shared={},
        ),
    ),
    maps={
        "a_map": TensorMap("a", 0, ("256", "m"), ("1", "256"), ("128", "64"), 0, 3, 0, promotion=2),
        "sf_map": TensorMap("sf", 7, ("m", "2"), ("4", "(sf_stride * 4)"), ("64", "1"), 0, 0, 0),
    },
    cooperative=False,
)
IMAGE = TensorMap(
    "x", 6, ("64", "8", "8", "1"), ("4", "256", "2048", "16384"), ("64", "32"), 0, 3, 0,
    pixels=((1, 1, 1, 1), (0, 0), (0, 0)),
)  # fmt: skip
CPU_ROWS = torch.zeros(4, 64, dtype=torch.bfloat16)
DESCRIPTOR = "iiQ5Q4Q5I4i4x"  # Described in fake_cuda.c


@pytest.fixture(autouse=True)
def by_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILE_KERNELS_LAUNCHER", "driver")


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> FakeDriver:
    return FakeDriver(tmp_path_factory.mktemp("driver"))


@pytest.fixture
def cuda(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    driver.number("num_launches").value = 0
    monkeypatch.setattr(launcher, "current_raw_stream", lambda index: STREAM + index)
    return driver


def make(lowered: Lowered, cuda: FakeDriver) -> Launcher:
    return Launcher(Binary(lowered, b"\x7fELF"), lambda: cuda)


def fixed(lowered: Lowered, cuda: FakeDriver) -> Callable[..., None]:
    """For calls of one size; the values are the arguments and one more in front."""
    run = make(lowered, cuda).fixed(range(1, 1 + len(lowered.params)))
    return lambda *args: run([None, *args])


def rows(tokens: int, padding: int = 0) -> tuple[Any, ...]:
    x = torch.zeros(tokens, 64 + padding, dtype=torch.bfloat16)[:, :64]
    return fake(x), None, fake(torch.zeros(2 * tokens, 64)), 0.1, True


@pytest.mark.parametrize("repeats", [False, True])
def test_sizes_and_arguments_of_launches(cuda: FakeDriver, repeats: bool) -> None:
    run = fixed(ROWS, cuda) if repeats else make(ROWS, cuda)
    x, bias, y, alpha, flag = rows(9, padding=8)
    run(x, bias, y, alpha, flag)
    first, second = cuda.launches()
    assert first.name == b"rows_kernel"
    assert list(first.sizes)[:7] == [3, 2, 1, 128, 1, 1, 144]
    assert first.stream == STREAM
    assert first.num_attributes == 0
    if repeats:  # else the memory of the launch is gone by now
        rounded = struct.unpack("f", struct.pack("f", 0.1))[0]
        expected = [y.data_ptr(), 9, x.data_ptr(), rounded, 72, True]
        assert parameters(first, FORMATS) == expected
        assert parameters(second, "Q") == [y.data_ptr()]
    assert list(second.sizes)[:7] == [1, 1, 1, 32, 4, 1, 0]
    assert second.num_attributes == 2
    if repeats:
        expected = b"".join(attributes(False, (2, 1, 1), True))
        assert ctypes.string_at(second.attributes, 144) == expected


def test_repeated_calls_pass_new_addresses_and_scalars(cuda: FakeDriver) -> None:
    run = fixed(ROWS, cuda)
    run(*rows(4))
    x, bias, y, _, _ = rows(4)
    run(x, bias, y, 1e300, False)  # too large for float32: infinite, as in C
    last = cuda.launches()[2]
    assert parameters(last, FORMATS) == [y.data_ptr(), 4, x.data_ptr(), float("inf"), 64, False]


def test_descriptors(cuda: FakeDriver) -> None:
    run = fixed(PRODUCT, cuda)
    a = fake(torch.zeros(100, 256).to(torch.float8_e4m3fn))
    sf = fake(torch.zeros(2, 104)[:, :100])
    run(a, sf)
    first = cuda.launches()[0]
    assert list(first.sizes)[:7] == [132, 1, 1, 384, 1, 1, 200000]
    assert cuda.library.dynamic_shared() == 200000
    a_map, m, sf_map = parameters(first, (DESCRIPTOR, "i", DESCRIPTOR))
    strides = (256, 0, 0, 0)
    assert a_map[:3] == (0, 2, a.data_ptr())
    assert a_map[3:] == (256, 100, 0, 0, 0, *strides, 128, 64, 0, 0, 0, 0, 3, 2, 0)
    assert m == 100
    assert sf_map[:3] == (7, 2, sf.data_ptr())
    assert sf_map[3:] == (100, 2, 0, 0, 0, 416, 0, 0, 0, 64, 1, 0, 0, 0, 0, 0, 0, 0)
    moved = fake(torch.zeros(100, 256).to(torch.float8_e4m3fn))
    run(moved, sf)
    a_map, _, sf_map = parameters(cuda.launches()[1], (DESCRIPTOR, "i", DESCRIPTOR))
    assert (a_map[2], sf_map[2]) == (moved.data_ptr(), sf.data_ptr())


def test_no_blocks_launch_nothing(cuda: FakeDriver) -> None:
    only = replace(ROWS, kernels=ROWS.kernels[:1])
    make(only, cuda)(*rows(0))
    assert not cuda.launches()


def test_launch_attributes() -> None:
    assert attributes(False, (1, 1, 1), False) == []
    cooperative, cluster, overlaps = attributes(True, (2, 1, 1), True)
    assert {len(cooperative), len(cluster), len(overlaps)} == {72}
    assert struct.unpack_from("I4xi", cooperative) == (2, 1)
    assert struct.unpack_from("I4x3I", cluster) == (4, 2, 1, 1)
    assert struct.unpack_from("I4xi", overlaps) == (6, 1)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda a: a[:4], TypeError, r"rows takes 5 arguments \(x, bias, y, alpha, flag\), got 4"),
        (lambda a: (CPU_ROWS, *a[1:]), ValueError, "x: expected a CUDA tensor, got one on cpu"),
        (lambda a: (None, *a[1:]), TypeError, "x: expected a tensor, got NoneType"),
        (lambda a: (fake(a[0].float()), *a[1:]), TypeError, "x: expected dtype torch.bfloat16"),
        (lambda a: (*a[:2], fake(a[2][1:]), *a[3:]), ValueError, r"y: dimension 0 must be"),
        (lambda a: (*a[:2], None, *a[3:]), TypeError, "y: expected a tensor, got NoneType"),
        (lambda a: (*a[:3], "1", a[4]), TypeError, "alpha: expected a float32 scalar"),
    ],
)
def test_bad_arguments_are_refused(
    cuda: FakeDriver, change: Callable[..., Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make(ROWS, cuda)(*change(rows(4)))
    assert not cuda.launches()


def test_assumptions_are_checked(cuda: FakeDriver) -> None:
    with pytest.raises(ValueError, match=r"\(stride % 8\) == 0.* does not hold for stride = 68"):
        make(ROWS, cuda)(*rows(4, padding=4))


def test_a_failed_launch_names_the_kernel(cuda: FakeDriver) -> None:
    cuda.number("fail_with").value = 700
    try:
        with pytest.raises(RuntimeError, match=r"launching rows_kernel .*error 700 .*asked to"):
            make(ROWS, cuda)(*rows(4))
    finally:
        cuda.number("fail_with").value = 0


def test_a_missing_driver_is_an_error_of_the_first_call() -> None:
    from tile_kernels.runtime.driver import Driver

    run = Launcher(Binary(ROWS, b"\x7fELF"), lambda: Driver("libno_such_driver.so.1"))
    with pytest.raises(RuntimeError, match="kernels need NVIDIA's driver: libno_such"):
        run(*rows(4))


def test_threads_without_a_context_get_one_and_do_not_share_memory(cuda: FakeDriver) -> None:
    run = fixed(replace(ROWS, kernels=ROWS.kernels[:1]), cuda)
    arguments = [rows(4) for _ in range(4)]
    before = cuda.number("num_contexts").value
    threads = [threading.Thread(target=run, args=each) for each in arguments]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(cuda.launches()) == 4
    assert cuda.number("num_contexts").value >= before + 4  # the fake's contexts are per thread


def test_each_device_has_its_function_and_the_code_is_loaded_once(cuda: FakeDriver) -> None:
    class Second(FakeTensor):
        index = 1

    loaded = cuda.library.loaded()
    run = make(ROWS, cuda)
    x, bias, y, alpha, flag = rows(4)
    run(x, bias, y, alpha, flag)
    run(x.as_subclass(Second), bias, y.as_subclass(Second), alpha, flag)
    assert [launch.stream for launch in cuda.launches()] == [STREAM, STREAM, STREAM + 1, STREAM + 1]
    assert cuda.library.loaded() == loaded + 1
    with pytest.raises(ValueError, match=r"rows: tensors are on the devices \[0, 1\]"):
        run(x, bias, y.as_subclass(Second), alpha, flag)


def test_shared_memory_is_that_of_the_largest_launch(cuda: FakeDriver) -> None:
    """Calls of two sizes, each the first one of its thread, set the attribute in any order."""
    for _ in range(8):
        run = make(replace(ROWS, kernels=ROWS.kernels[:1]), cuda)
        with run._lock:
            threads = [threading.Thread(target=run, args=rows(n)) for n in (40, 4)]
            for thread in threads:
                thread.start()
            time.sleep(0.05)  # both have found no function
        for thread in threads:
            thread.join()
        assert cuda.library.dynamic_shared() == 40 * 16


def test_the_driver_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TILE_KERNELS_LAUNCHER")
    assert launch.uses_driver()
    monkeypatch.setenv("TILE_KERNELS_LAUNCHER", "tilelang")
    assert not launch.uses_driver()
    monkeypatch.setenv("TILE_KERNELS_LAUNCHER", "cuda")
    with pytest.raises(ValueError, match="must be tilelang or driver, got 'cuda'"):
        launch.uses_driver()


def test_descriptions_survive_a_file() -> None:
    for lowered in (ROWS, PRODUCT):
        binary = Binary(lowered, b"\x7fELF and more")
        assert Binary.from_bytes(binary.to_bytes()) == binary


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"workspaces": (Param("w", "float32", ("4",)),)}, "alloc_global.*LAUNCHER=tilelang"),
        ({"maps": {"x_map": IMAGE}}, "im2col.*LAUNCHER=tilelang"),
        ({"params": ROWS.params[1:]}, "no argument is x"),
        ({"params": (*ROWS.params[:3], ROWS.params[4])}, "no argument determines alpha"),
    ],
)
def test_what_cannot_be_launched_is_refused_when_packed(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Launcher(Binary(replace(ROWS, **change), b""))


@pytest.mark.compiled
def test_programmatic_launches_are_seen() -> None:
    """A kernel that waits for the one before it may start early; one that only triggers may not."""
    from tilelang import language as T

    from tile_kernels.runtime.launcher import lower_kernel

    def kernel(waits: bool) -> Any:
        @T.prim_func
        def fill(x: T.Tensor[(128,), T.float32]):
            with T.Kernel(1, threads=128):
                if waits:
                    T.pdl_sync()
                x[T.get_thread_binding()] = 1.0
                T.pdl_trigger()

        return fill

    found = [lower_kernel(kernel(waits), "sm_90a", {}).kernels[0] for waits in (True, False)]
    assert [each.overlaps for each in found] == [True, False]


@needs_nvcc
@pytest.mark.compiled
def test_a_compiled_kernel(cuda: FakeDriver, tmp_path: Path) -> None:
    """A transpose by TileLang: grid, addresses and sizes as its CUDA source takes them."""
    call = ("transpose.transpose", {"x": "bfloat16[256,384]"})
    (item,) = warmup.compilations([call], described("sm_90a"))
    definition = item.kernel.definition
    binary = definition.binary(item.static, item.arch)
    run = Launcher(Binary.from_bytes(binary.to_bytes()), lambda: cuda).fixed((0, 1))
    x, out = (fake(torch.zeros(shape, dtype=torch.bfloat16)) for shape in ((256, 384), (384, 256)))
    run([x, out])
    (launch,) = cuda.launches()
    assert launch.name.startswith(b"batched_transpose_bfloat16")
    tiles = [-(-size // tile) for size, tile in zip((256, 384), (128, 128))]
    assert list(launch.sizes)[:3] == [*tiles, 1]
    assert parameters(launch, "QQiqi") == [out.data_ptr(), x.data_ptr(), 384, 384, 256]
