"""Planted bugs must be reported, with the buffer, the place, the thread and the source line."""

from __future__ import annotations

import resource
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from tile_kernels.emulator import Emulated, EmulationError, build, staging
from tile_kernels.emulator.launch import _check_map

from . import sample_kernels as k
from .helpers import cuda_source, fails, rand, replace_nth, run

N = 64


def test_unshifted_copy_is_clean() -> None:
    x, y = rand(N), torch.zeros(N)
    run(k.shifted_copy(N, 0, 0), x, y, configs=k.NO_GUARDS)
    assert torch.equal(x, y)


@pytest.mark.parametrize(
    ("read", "write", "buffer", "element", "thread"),
    [(1, 0, "x", 64, 63), (0, 1, "y", 64, 63), (-1, 0, "x", -1, 0), (100000, 0, "x", 100000, 0)],
    ids=["read past", "write past", "read before", "read far past"],
)
def test_out_of_bounds(read: int, write: int, buffer: str, element: int, thread: int) -> None:
    memory = torch.zeros(5 * N)  # the neighbourhood is addressable: only the checker can object
    y, x = memory[N : 2 * N], memory[3 * N : 4 * N]
    error = fails("out of bounds", k.shifted_copy(N, read, write), x, y, configs=k.NO_GUARDS)
    assert (error.kernel, error.buffer, error.element) == ("shifted_copy_kernel", buffer, element)
    assert error.byte_offset == 4 * element
    assert (error.block, error.thread) == ((0, 0, 0), (thread, 0, 0))
    assert error.source_text is not None
    assert error.source_text.startswith("y[")
    assert "x[" in error.source_text
    assert "shifted_copy_kernel: out of bounds: 4-byte" in str(error)
    assert f"byte {4 * element} (element {element})" in str(error)


def test_out_of_bounds_into_another_argument() -> None:
    """A wrong offset that ends inside another tensor of the call, by allocation or as a slice."""
    memory = torch.zeros(2 * N)
    pairs = [(memory[:N], memory[N:]), (memory[N:], memory[:N])]
    pairs += [(torch.zeros(N), torch.zeros(N)) for _ in range(3)]
    body = "y[threadIdx.x] = x[d[0] + threadIdx.x];"
    probe = cuda_source(body, {"x": "float", "y": "float", "d": "long long"}, threads=N)
    for x, y in pairs:
        offset = (y.data_ptr() - x.data_ptr()) // 4
        probe(x, y, torch.zeros(1, dtype=torch.int64))
        with pytest.raises(EmulationError, match="out of bounds: 4-byte read of x") as caught:
            probe(x, y, torch.tensor([offset]))
        assert (caught.value.buffer, caught.value.element) == ("x", offset)


@pytest.mark.parametrize("threads", [32, 128])
def test_a_write_after_reads_of_several_threads_names_another_one(threads: int) -> None:
    body = "y[threadIdx.x] = x[threadIdx.x % 8];\nif (threadIdx.x < 8)\nx[threadIdx.x] = 2;"
    probe = cuda_source(body, {"x": "float", "y": "float"}, threads=threads)
    with pytest.raises(EmulationError) as caught:
        probe(torch.ones(8), torch.zeros(threads), order="reverse")
    error = caught.value
    assert error.thread == (7, 0, 0)
    assert "write to x byte 28 (element 7), read by another thread of its warp" in error.message
    assert error.other_line == error.source_line - 2


def test_aliases_stay_aliases() -> None:
    x = rand(N)
    before = x.clone()
    report = run(k.shifted_copy(N, 0, 0), x, x, configs=k.NO_GUARDS)  # one tensor, two arguments
    assert torch.equal(x, before)
    assert report.buffers is not None
    assert report.buffers["x"].read == report.buffers["x"].written == 4 * N
    memory = torch.arange(N + 1).float()
    copy = k.shifted_copy(N, 0, 0)
    # Overlapping slices: y[t] is x[t + 1], which the next thread writes.
    error = fails("race", copy, memory[1:], memory[:N], configs=k.NO_GUARDS)
    assert error.buffer in {"x", "y"}


def test_results_return_in_place_also_after_a_failure() -> None:
    probe = cuda_source("y[threadIdx.x] = 7; if (threadIdx.x == 9) y[99] = 1;", {"y": "int"})
    memory = torch.zeros(64, dtype=torch.int32)
    with pytest.raises(EmulationError, match="out of bounds"):
        probe(memory[16:48])
    assert memory.tolist() == [0] * 16 + [7] * 10 + [0] * 38


def test_tensors_that_are_only_read_may_lie_in_read_only_memory(tmp_path: Path) -> None:
    file = tmp_path / "x.bin"
    file.write_bytes(np.arange(N, dtype=np.float32).tobytes())
    mapped = np.memmap(file, dtype=np.float32, mode="r")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that writing would be undefined
        x = torch.from_numpy(mapped)
    y = torch.zeros(N)
    run(k.shifted_copy(N, 0, 0), x, y, configs=k.NO_GUARDS)
    assert torch.equal(x, y)


def test_staging_keeps_the_alignment_and_returns_large_mappings() -> None:
    memory = torch.zeros(40 << 20, dtype=torch.uint8)
    start = memory.data_ptr()
    spans = {"a": (start + 7, 100), "b": (start + 50, 200), "c": (start + 512, memory.nbytes - 512)}
    with staging.staged(spans, lambda _: False) as where:
        assert all(where[n] % 256 == spans[n][0] % 256 for n in spans)
        assert where["b"] - where["a"] == 43  # they overlap
        assert abs(where["c"] - where["a"]) > 1 << 39
    assert sum(room for _, room in staging._slots.values()) < 40 << 20


def test_fast_mode_does_not_check_bounds() -> None:
    memory = torch.arange(3 * N).float()
    run(k.shifted_copy(N, 1, 0), memory[:N], memory[2 * N :], configs=k.NO_GUARDS, mode="fast")
    assert torch.equal(memory[2 * N :], torch.arange(1, N + 1).float())


@pytest.mark.parametrize("order", ["forward", "reverse", "random"])
def test_missing_barrier(order: str) -> None:
    x, y = rand(N), torch.zeros(N)
    error = fails("race", k.reverse(N, sync=False), x, y, configs=k.NO_BARRIERS, order=order)
    assert error.buffer == "s"
    assert error.element is not None
    assert 0 <= error.element < N
    assert error.source_text is not None
    assert "s[" in error.source_text
    assert "no barrier in between" in str(error)
    assert error.other_text is not None
    assert "s[" in error.other_text
    assert error.other_line != error.source_line  # the write and the read are different lines


def test_missing_barrier_changes_the_result_in_fast_mode() -> None:
    x, y = rand(N), torch.zeros(N)
    run(k.reverse(N, sync=False), x, y, configs=k.NO_BARRIERS, mode="fast")
    assert not torch.equal(y, x.flip(0))
    run(k.reverse(N, sync=True), x, y, configs=k.NO_BARRIERS, mode="fast")
    assert torch.equal(y, x.flip(0))


def test_shared_overrun_is_seen_when_split_and_names_the_buffer() -> None:
    x = rand(70, 133, dtype=torch.bfloat16)
    y = torch.zeros(133, 70, dtype=torch.bfloat16)
    wider = replace_nth(r">> 2\) \* 33\)", 0, ">> 2) * 35)")
    error = fails("out of bounds", k.transpose(), x, y, transform=wider)
    assert error.buffer == "s"
    assert "it has 2112 bytes" in str(error)


def test_overrun_into_a_neighbouring_buffer() -> None:
    """Both buffers are in bounds of the launch's shared memory: only splitting can tell."""
    x, w, y = rand(8, 512), rand(512), torch.zeros(8)
    shift = replace_nth(r"\(\(float\*\)ws\) \+ \(", 0, "((float*)ws) + (-4 + ")
    error = fails("out of bounds", k.pipelined_rowsum(512), x, w, y, transform=shift)
    assert error.buffer == "ws"
    assert error.byte_offset == -16


def test_misaligned_vector_access() -> None:
    x, y = rand(4, 512, dtype=torch.bfloat16), torch.zeros(4, 512)
    shift = replace_nth(r"\*\(uint2\*\)\(x \+ \(", 0, "*(uint2*)(x + (1 + ")
    error = fails("misaligned", k.softmax(512), x, y, transform=shift)
    assert error.buffer == "x"
    assert error.byte_offset == 2


def test_misaligned_view() -> None:
    memory = torch.zeros(4 * 512 + 4, dtype=torch.bfloat16)
    x = memory[1 : 1 + 4 * 512].view(4, 512)
    assert fails("misaligned", k.softmax(512), x, torch.zeros(4, 512)).buffer == "x"


def test_misaligned_tensor_map() -> None:
    whole = torch.zeros(70 * 136 + 1, dtype=torch.bfloat16)
    x, y = whole[1:].view(70, 136), torch.zeros(70, 136, dtype=torch.bfloat16)
    error = fails("misaligned", k.tma_copy(70, 136), x, y)
    assert error.buffer == "x"
    assert "tensor map needs multiples of 16 bytes, but x starts at 0x" in str(error)
    with pytest.raises(EmulationError, match="but x has a stride of 264 bytes; the launch would"):
        _check_map("x", 0, [264])


def test_misaligned_explicit_access() -> None:
    """`load_global_128` and friends, which TileLang emits when it lowers accesses to PTX."""
    for bits, width in ((32, 4), (64, 8), (128, 16)):
        probe = cuda_source(
            f"tl::store_global_{bits}(y, tl::load_global_{bits}(x));", {"x": "uchar", "y": "uchar"}
        )
        memory, y = torch.zeros(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
        probe(memory[:32], y)
        with pytest.raises(EmulationError, match=f"misaligned: {width}-byte read of x"):
            probe(memory[width // 2 : 32], y)
        with pytest.raises(EmulationError, match=f"misaligned: {width}-byte write to y"):
            probe(memory[:32], y[width // 2 :])


def test_divergent_barriers_deadlock() -> None:
    x, y = rand(64, 64, dtype=torch.bfloat16), torch.zeros(64, 64, dtype=torch.bfloat16)
    split = "if (threadIdx.x < 40) __syncthreads(); else emu::bar_sync(3, 128);"
    error = fails(
        "deadlock", k.transpose(), x, y, transform=replace_nth(r"__syncthreads\(\);", 0, split)
    )
    assert "128 threads wait for ever: 128 in a block barrier" in str(error)
    assert error.source_text == split


@pytest.mark.parametrize("order", ["forward", "reverse", "random"])
@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "if (threadIdx.x < 40) __syncthreads();\ny[threadIdx.x] = 1;\n__syncthreads();",
            "lanes of warp 1 meet barrier 0 in different places",
        ),
        (
            "if (threadIdx.x < 40) {\n__syncthreads();\n} else {\n__syncthreads();\n}",
            "lanes of warp 1 meet barrier 0 in different places",
        ),
        (
            "if (threadIdx.x < 32) emu::bar_sync(1, 64);\nelse emu::bar_sync(1, 96);",
            "threads meet barrier 1 with different counts",
        ),
        (
            "if (threadIdx.x < 48) tl::__sync_thread_partial(1, 48);\n__syncthreads();",
            "barrier 1 is complete without lane 16 of warp 1",
        ),
    ],
    ids=["skipped", "two branches", "counts", "part of a warp"],
)
def test_barriers_that_split_a_warp(body: str, message: str, order: str) -> None:
    probe = cuda_source(body + "\ny[threadIdx.x] = 2;", {"y": "int"}, threads=96)
    with pytest.raises(EmulationError, match=message) as caught:
        probe(torch.zeros(96, dtype=torch.int32), order=order)
    assert caught.value.kind == "divergence"
    if "places" in message:
        assert caught.value.other_line is not None
        assert caught.value.other_line != caught.value.source_line


@pytest.mark.parametrize("order", ["forward", "reverse", "random"])
def test_barriers_of_whole_warps_in_different_places(order: str) -> None:
    """Warps may meet one barrier from different lines, and exited lanes need not come."""
    body = """
      if (threadIdx.x >= 80) return;
      if (threadIdx.x < 32) {
        __syncthreads();
      } else {
        __syncthreads();
      }
      for (int i = 0; i < 3; ++i) {
        if (i == 1 && threadIdx.x >= 64) return;
        __syncthreads();
      }
      y[threadIdx.x] = 1;
    """
    y = torch.zeros(96, dtype=torch.int32)
    cuda_source(body, {"y": "int"}, threads=96)(y, order=order)
    assert y.tolist() == [1] * 64 + [0] * 32


def test_deadlock_in_fast_mode_is_an_error_not_a_hang() -> None:
    probe = cuda_source(
        "if (threadIdx.x < 5) emu::bar_sync(1, 32); y[threadIdx.x] = 1;", {"y": "int"}, mode="fast"
    )
    with pytest.raises(EmulationError, match="deadlock: 5 threads"):
        probe(torch.zeros(32, dtype=torch.int32))


def test_lanes_in_different_warp_operations() -> None:
    probe = cuda_source(
        "if (threadIdx.x < 16) y[threadIdx.x] = __shfl_xor_sync(~0u, 1, 1);\n"
        "else y[threadIdx.x] = __ballot_sync(~0u, 1);",
        {"y": "int"},
    )
    with pytest.raises(EmulationError, match="different warp operations") as caught:
        probe(torch.zeros(32, dtype=torch.int32))
    assert caught.value.kind == "divergence"


def test_shuffle_from_an_absent_lane() -> None:
    probe = cuda_source(
        "if (threadIdx.x < 8) y[threadIdx.x] = __shfl_xor_sync(0xffu, 1, 8);", {"y": "int"}
    )
    with pytest.raises(EmulationError, match="reads lane 8, which does not take part"):
        probe(torch.zeros(32, dtype=torch.int32))


def test_mask_that_omits_the_caller() -> None:
    probe = cuda_source("__syncwarp(1u); y[threadIdx.x] = 1;", {"y": "int"})
    with pytest.raises(EmulationError, match="mask 0x1 omits it"):
        probe(torch.zeros(32, dtype=torch.int32), order="reverse")


def test_endless_spin_is_an_error() -> None:
    probe = cuda_source("while (AtomicLoad(&y[0]) == 0) {}", {"y": "int"})
    with pytest.raises(EmulationError, match="no progress"):
        probe(torch.zeros(1, dtype=torch.int32))


@pytest.mark.parametrize("order", ["forward", "reverse", "random"])
@pytest.mark.parametrize("mode", ["check", "fast"])
@pytest.mark.parametrize(
    "poll",
    [
        "atomicAdd(&y[0], 0) < 2",
        "AtomicAddRet(&y[0], 0, 2) < 2",
        "atomicCAS(&y[0], 2, 2) != 2",
        "AtomicLoad(&y[0], 2) < 2",
        "atomicAdd(&y[0], 0) < 2 || atomicOr(&y[1], 0) != 0",
    ],
)
def test_blocks_wait_for_each_other_by_polling(poll: str, mode: str, order: str) -> None:
    body = f"if (threadIdx.x == 0) {{ AtomicAdd(&y[0], 1, 3); while ({poll}) {{}} }}"
    probe = cuda_source(body, {"y": "int"}, blocks=2, mode=mode, cooperative=True)
    y = torch.zeros(2, dtype=torch.int32)
    probe(y, order=order)
    assert y.tolist() == [2, 0]


def test_endless_polling_is_an_error() -> None:
    for poll in ("atomicAdd(&y[0], 0)", "atomicCAS(&y[0], 1, 1)"):
        probe = cuda_source(f"while ({poll} == 0) {{}}", {"y": "int"}, mode="fast")
        with pytest.raises(EmulationError, match="no progress") as caught:
            probe(torch.zeros(1, dtype=torch.int32))
        assert caught.value.kind == "deadlock"


def test_many_atomics_that_change_nothing_are_not_a_spin() -> None:
    body = "for (int i = 0; i < 100000; ++i) atomicMax(&y[0], i & 1);"
    y = torch.ones(1, dtype=torch.int32)
    cuda_source(body, {"y": "int"}, mode="fast")(y)
    assert y.item() == 1


def test_spin_on_plain_memory_is_an_error() -> None:
    body = "while (*(volatile int*)&y[0] == 0) {}"
    with pytest.raises(EmulationError, match="no progress") as caught:
        cuda_source(body, {"y": "int"})(torch.zeros(1, dtype=torch.int32))
    assert (caught.value.kind, caught.value.source_text) == ("deadlock", body)


def test_device_assert_and_trap() -> None:
    probe = cuda_source(
        'device_assert_with_msg(y[threadIdx.x] == 0, "zero expected");', {"y": "int"}
    )
    probe(torch.zeros(32, dtype=torch.int32))
    values = torch.zeros(32, dtype=torch.int32)
    values[9] = 1
    with pytest.raises(EmulationError, match="zero expected") as caught:
        probe(values)
    assert caught.value.kind == "assert"
    assert caught.value.thread == (9, 0, 0)
    with pytest.raises(EmulationError, match="__trap"):
        cuda_source("if (y[0]) __trap();", {"y": "int"})(values + 1)


BOTH_MODES = pytest.mark.parametrize("mode", ["check", "fast"])


@BOTH_MODES
@pytest.mark.parametrize("op", ["/", "%"])
@pytest.mark.parametrize(("x", "d"), [(5, 0), (-(2**31), -1)])
def test_integer_division_without_a_result(mode: str, op: str, x: int, d: int) -> None:
    body = f"y[threadIdx.x] = x[0] {op} x[threadIdx.x];"
    probe = cuda_source(body, {"x": "int", "y": "int"}, mode=mode)
    values = torch.full((32,), x, dtype=torch.int32)
    values[9] = d
    if x == 5:
        with pytest.raises(EmulationError, match="integer division by zero") as caught:
            probe(values, torch.zeros(32, dtype=torch.int32))
    else:
        with pytest.raises(EmulationError, match="the smallest integer by -1") as caught:
            probe(values, torch.zeros(32, dtype=torch.int32))
    assert (caught.value.kind, caught.value.thread) == ("arithmetic", (9, 0, 0))
    assert caught.value.source_text == body
    values[9] = 1
    y = torch.zeros(32, dtype=torch.int32)
    probe(values, y)  # nothing of the failure stays behind
    assert y[0].item() == (1 if op == "/" else 0)


@BOTH_MODES
@pytest.mark.parametrize("words", [66000, 70000, 1 << 20])
def test_stack_overrun(mode: str, words: int) -> None:
    """Frames that end in the guard page, and frames that would jump over it."""
    body = (
        f"volatile int a[{words}]; for (int i = 0; i < {words}; ++i) a[i] = i;\n"
        "y[threadIdx.x] = a[5];"
    )
    with pytest.raises(EmulationError, match="overran its emulated stack") as caught:
        cuda_source(body, {"y": "int"}, mode=mode)(torch.zeros(32, dtype=torch.int32))
    assert caught.value.kind == "stack"
    assert caught.value.thread is not None


def test_endless_recursion() -> None:
    body = "struct R { static int f(int n) { volatile int m = n; return f(m + 1) + m; } };\n"
    with pytest.raises(EmulationError, match="overran its emulated stack"):
        cuda_source(body + "y[threadIdx.x] = R::f(0);", {"y": "int"})(
            torch.zeros(32, dtype=torch.int32)
        )


def test_wild_access_in_fast_mode() -> None:
    body = "*(int*)(size_t)(threadIdx.x * 4 + 4096) = y[0];"
    with pytest.raises(EmulationError, match="which is not mapped") as caught:
        cuda_source(body, {"y": "int"}, mode="fast")(torch.zeros(32, dtype=torch.int32))
    assert caught.value.kind == "out of bounds"
    assert caught.value.source_text == body


def test_misaligned_struct_wider_than_a_vector() -> None:
    """A compiler may copy it with instructions that demand the alignment of the type.

    clang calls a function to copy it in check mode, which cannot know the type.
    """
    body = "struct alignas(32) W { int a[8]; };\nif (threadIdx.x == 0) *(W*)(y + 1) = *(W*)(y + 9);"
    for mode in ("fast",) if build.is_clang() else ("check", "fast"):
        with pytest.raises(EmulationError, match="misaligned") as caught:
            cuda_source(body, {"y": "int"}, mode=mode)(torch.zeros(64, dtype=torch.int32))
        assert caught.value.kind == "misaligned"


def test_lack_of_memory_is_an_error() -> None:
    probe = cuda_source("y[threadIdx.x] = 1;", {"y": "int"})
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
    large = torch.zeros(64 << 20, dtype=torch.int32)
    try:
        resource.setrlimit(resource.RLIMIT_AS, (used + (2 << 30), before[1]))
        with pytest.raises(EmulationError, match="no address space") as caught:
            probe(large)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert caught.value.kind == "memory"
    probe(large)
    assert large[:33].tolist() == [1] * 32 + [0]


def test_uninitialised_shared_memory_reads_as_nan_in_fast_mode() -> None:
    body = "__shared__ float s[32];\ny[threadIdx.x] = s[threadIdx.x];"
    y = torch.zeros(32)
    cuda_source(body, {"y": "float"}, mode="fast")(y)
    assert bool(y.isnan().all())
    with pytest.raises(EmulationError, match="uninitialised: 4-byte read of shared s byte 0"):
        cuda_source(body, {"y": "float"})(y)


def test_an_error_does_not_poison_the_next_call() -> None:
    good = Emulated.build(k.reverse(N, sync=True), pass_configs=k.NO_BARRIERS)
    x, y = rand(N), torch.zeros(N)
    fails("race", k.reverse(N, sync=False), x, y, configs=k.NO_BARRIERS)
    for _ in range(3):
        y.zero_()
        good(x, y)
        assert torch.equal(y, x.flip(0))


# ---- global memory -----------------------------------------------------------------------------


def test_unequal_plain_writes_to_one_cell() -> None:
    error = fails("race", k.write_one_cell(64), rand(64), torch.zeros(1))
    assert error.buffer == "y"
    assert "different values" in str(error)
    assert error.source_text is not None
    assert error.source_text.startswith("y[0] =")


@pytest.mark.parametrize("order", ["forward", "reverse", "random"])
def test_equal_plain_writes_are_tolerated(order: str) -> None:
    y = torch.zeros(1)
    run(k.write_one_cell(64), torch.ones(64), y, order=order)
    assert y.item() == 1


def test_unequal_writes_of_different_blocks_only() -> None:
    x = torch.cat([torch.ones(32), torch.full((32,), 2.0)])  # equal inside each block
    error = fails("race", k.write_one_cell(64), x, torch.zeros(1))
    assert "another block" in str(error)
    assert error.block == (1, 0, 0)


@pytest.mark.parametrize("order", ["forward", "reverse", "random"])
def test_block_reads_what_another_block_writes(order: str) -> None:
    error = fails("race", k.neighbour_sum(128), rand(128), torch.zeros(128), order=order)
    assert error.buffer == "y"
    assert "another block" in str(error)


@pytest.mark.parametrize("order", ["forward", "reverse", "random"])
def test_exchange_through_global_memory_inside_a_block(order: str) -> None:
    x, tmp, y = rand(N), torch.zeros(N), torch.zeros(N)
    run(k.global_exchange(N, sync=True), x, tmp, y, configs=k.NO_BARRIERS, order=order)
    assert torch.equal(y, x.flip(0))
    error = fails(
        "race", k.global_exchange(N, sync=False), x, tmp, y, configs=k.NO_BARRIERS, order=order
    )
    assert error.buffer == "tmp"


def test_an_atomic_for_global_memory_on_shared_memory() -> None:
    """TileLang's AtomicOr is `red.global`; a GPU stops with an invalid address space."""
    error = fails("address space", k.or_into_shared(), torch.zeros(1, dtype=torch.int32))
    assert "AtomicOr of shared memory" in str(error)


def test_records_of_wide_accesses_do_not_stick_to_other_bytes() -> None:
    """Warps write far elements in 8 bytes, then other warps near ones in 4: all distinct."""
    body = """
      int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
      if (warp == 1) *(unsigned long long*)&x[64 + 2 * lane] = lane;
      __syncwarp();
      if (warp == 0) x[lane + 32] = lane + 1;
    """
    x = torch.zeros(128, dtype=torch.int32)
    for order in ("forward", "reverse", "random"):
        cuda_source(body, {"x": "int"}, threads=64)(x, order=order)
    assert x[32:64].tolist() == list(range(1, 33))


def test_read_modify_write_without_an_atomic() -> None:
    y = torch.zeros(1, dtype=torch.int32)
    run(k.unguarded_counter(64, atomic=True), y)
    assert y.item() == 128
    error = fails("race", k.unguarded_counter(64, atomic=False), y)
    assert error.buffer == "y"


def test_plain_read_beside_an_atomic_of_another_thread() -> None:
    probe = cuda_source("atomicAdd(&y[0], 1); z[threadIdx.x] = y[0];", {"y": "int", "z": "int"})
    with pytest.raises(EmulationError, match=r"race: 4-byte (read of|atomic on) y"):
        probe(torch.zeros(1, dtype=torch.int32), torch.zeros(32, dtype=torch.int32))


def test_removed_grid_barrier() -> None:
    x = torch.ones(1024, dtype=torch.int32)
    part, out = torch.zeros(4, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    prim = k.grid_sum(1024)
    gone = replace_nth(r"cooperative_groups::this_grid\(\)\.sync\(\);", 0)
    error = fails("race", prim, x, part, out, transform=gone, cooperative=True)
    assert error.buffer == "part"


LAST_BLOCK = """
  int t = threadIdx.x;
  part[blockIdx.x * 32 + t] = 1 + blockIdx.x;
  {fence}
  __syncthreads();
  __shared__ int last[1];
  if (t == 0) last[0] = atomicAdd(&ticket[0], 1) == 3;
  __syncthreads();
  {fence}
  if (last[0]) {{
    int sum = 0;
    for (int b = 0; b < 4; ++b) sum += part[b * 32 + t];
    y[t] = sum;
  }}
"""


@pytest.mark.parametrize("order", ["forward", "reverse", "random"])
def test_last_block_pattern_needs_its_fences(order: str) -> None:
    """Blocks ordered through a fenced ticket are not a race; without the fences they are."""
    tensors = {"part": "int", "ticket": "int", "y": "int"}
    part, ticket, y = (torch.zeros(n, dtype=torch.int32) for n in (128, 1, 32))
    cuda_source(LAST_BLOCK.format(fence="__threadfence();"), tensors, blocks=4)(
        part, ticket, y, order=order
    )
    assert y.tolist() == [10] * 32
    ticket.zero_()
    with pytest.raises(EmulationError, match="race") as caught:
        cuda_source(LAST_BLOCK.format(fence=""), tensors, blocks=4)(part, ticket, y, order=order)
    assert caught.value.buffer == "part"


def test_a_block_fence_does_not_order_blocks() -> None:
    tensors = {"part": "int", "ticket": "int", "y": "int"}
    part, ticket, y = (torch.zeros(n, dtype=torch.int32) for n in (128, 1, 32))
    probe = cuda_source(LAST_BLOCK.format(fence="__threadfence_block();"), tensors, blocks=4)
    with pytest.raises(EmulationError, match="race") as caught:
        probe(part, ticket, y)
    assert caught.value.buffer == "part"


LOCK = """
  if (threadIdx.x % 32 == {lane}) {{
    while (atomicCAS(&y[0], 0, 1) != 0) {{}}
    {fence}
    y[1] = y[1] + 1;
    {fence}
    atomicExch(&y[0], 0);
  }}
"""
ALL_ORDERS = pytest.mark.parametrize("order", ["forward", "reverse", "random"])


@ALL_ORDERS
@pytest.mark.parametrize(("threads", "blocks"), [(64, 1), (32, 3), (96, 3)])
def test_a_lock_orders_what_it_guards(order: str, threads: int, blocks: int) -> None:
    """Between the warps of a block, and between blocks; without its fences it guards nothing."""

    def lock(fence: str) -> Emulated:
        body = LOCK.format(fence=fence, lane=0)
        return cuda_source(body, {"y": "int"}, threads=threads, blocks=blocks)

    y = torch.zeros(2, dtype=torch.int32)
    lock("__threadfence();")(y, order=order)
    assert y.tolist() == [0, threads // 32 * blocks]
    if blocks == 1:
        lock("__threadfence_block();")(y, order=order)
    with pytest.raises(EmulationError, match="race") as caught:
        lock("")(y, order=order)
    assert (caught.value.kind, caught.value.element) == ("race", 1)


@ALL_ORDERS
def test_a_lock_orders_lanes_of_one_warp(order: str) -> None:
    body = LOCK.format(fence="__threadfence();", lane="threadIdx.x % 32")
    y = torch.zeros(2, dtype=torch.int32)
    cuda_source(body, {"y": "int"})(y, order=order)
    assert y.tolist() == [0, 32]


def test_a_barrier_orders_one_reader_and_a_lock_the_other() -> None:
    """Each reader counts with its own time: one is behind a lock, the other behind a barrier."""
    body = """
      int t = threadIdx.x, v = 0;
      if (t == 0) {{ v = y[1]; __threadfence(); AtomicStore(&y[0], 1, 0); }}
      if (t == 64) {{ while (AtomicLoad(&y[0], 2) == 0) {{}} }}
      if (t == 32) v = y[1];
      if (t >= 32) {barrier};
      if (t == 64) y[1] = 5;
      y[2 + t] = v;
    """
    tensors = {"y": "int"}
    fine = cuda_source(body.format(barrier="emu::bar_sync(1, 64)"), tensors, threads=96)
    fine(torch.zeros(98, dtype=torch.int32))
    missing = cuda_source(body.format(barrier="{}"), tensors, threads=96)
    with pytest.raises(EmulationError, match="race"):
        missing(torch.zeros(98, dtype=torch.int32))


@ALL_ORDERS
def test_tickets_with_memory_orders(order: str) -> None:
    body = """
      if (threadIdx.x % 32 == 0) {
        while (AtomicLoad(&y[0], 2) != threadIdx.x / 32) {}
        y[1] = y[1] + 1;
        AtomicAdd(&y[0], 1, 3);
      }
    """
    y = torch.zeros(2, dtype=torch.int32)
    cuda_source(body, {"y": "int"}, threads=96)(y, order=order)
    assert y.tolist() == [3, 3]


def test_message_gives_the_index_of_a_matrix_element() -> None:
    probe = Emulated.build(k.transpose(), pass_configs=k.PLAIN, transform=lambda s: s.replace(
        "__syncthreads();", "__syncthreads(); y[71] = bfloat16_t(float(threadIdx.x));"
    ))  # fmt: skip
    x, y = rand(32, 32, dtype=torch.bfloat16), torch.zeros(32, 32, dtype=torch.bfloat16)
    with pytest.raises(EmulationError, match=r"y\[2, 7\]"):
        probe(x, y)


def test_records_of_large_tensors_move_to_huge_pages() -> None:
    """After some launches they do; results and reports stay the same."""
    n = 1 << 18
    body = "int i = blockIdx.x * 256 + threadIdx.x; ((float4*)y)[i] = ((float4*)x)[i + {}];"
    copy, beyond = (
        cuda_source(body.format(d), {"x": "float", "y": "float"}, threads=256, blocks=n // 1024)
        for d in (0, 1)
    )
    x, y = rand(n), torch.zeros(n)
    for _ in range(6):
        y.zero_()
        buffers = copy(x, y).buffers
        assert torch.equal(x, y)
        assert buffers is not None
        assert buffers["y"].distinct_written == y.nbytes
    with pytest.raises(EmulationError, match=f"read of x byte {4 * n}"):
        beyond(x, y)
