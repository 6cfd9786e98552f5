"""Other people's scripts and test files, unmodified, on the emulator."""

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest
import tilelang
import torch
from tilelang import language as T
from tilelang.cuda import debug

from tile_kernels.emulator import EmulationError, emulate, runner
from tile_kernels.emulator.cuda_api import cuda_on_cpu
from tile_kernels.emulator.jit import Settings, _architecture, emulated_tilelang

SCRIPTS = Path(__file__).parent / "scripts"
ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


def start(*arguments: Any, cwd: Path | None = None) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tile_kernels.emulator", *map(str, arguments)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env=ENVIRONMENT, text=True, cwd=cwd, **pipes)


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def test_script_with_every_entry_point() -> None:
    status, out, err = finish(start("--config", 1, SCRIPTS / "gpu_script.py", "--m", 64))
    assert status == 0, err
    assert "All checks pass on tile_kernels emulator (sm_90a), m = 64." in out
    assert "config {'rows': 32, 'threads': 64}" in out
    assert "the autotuner's configuration 1 of 2 is used" in err
    assert err.count("do_bench calls the function once") == 1
    assert "4 kernels, 7 launches" in err


def test_endless_loop_ends_with_its_position() -> None:
    status, _, err = finish(start("--time-limit", 8, SCRIPTS / "endless_loop.py"))
    assert status == 124, err
    # Threads run one after the other; some may have ended by then.
    assert re.search(r"the time limit was reached while this thread was running; \d+ of its", err)
    assert "[block (0, 0, 0) thread (" in err
    assert "endless_loop.py" in err
    assert "1.000100e+00" in err  # the line of the loop's body


def test_ctrl_c_ends_a_kernel_that_is_running() -> None:
    process = start("--mode", "fast", SCRIPTS / "endless_loop.py")
    assert process.stdout is not None
    assert process.stdout.readline() == "compiled\n"
    time.sleep(0.5)  # until the kernel has started; before that Ctrl-C works anyway
    process.send_signal(signal.SIGINT)
    status, _, err = finish(process)
    assert status == 130, err
    assert "emulator: interrupted" in err


def test_memory_limit(tmp_path: Path) -> None:
    script = tmp_path / "large.py"
    script.write_text("import time\nx = b'1' * 500_000_000\ntime.sleep(60)\n")
    status, _, err = finish(start("--memory-limit", 0.4, script))
    assert status == 137
    assert "the limit is 0.4 GB" in err


FAULTY = """
import tilelang, torch
from tilelang import language as T

@tilelang.jit(out_idx=[1])
def shifted(n):
    @T.prim_func
    def shifted(x: T.Tensor[(n,), T.float32], y: T.Tensor[(n,), T.float32]):
        with T.Kernel(1, threads=n):
            t = T.get_thread_binding()
            if t < n - 1:
                y[t] = x[t]
            y[t] += 1.0
    return shifted

try:
    shifted(32)(torch.ones(32, device="cuda"))
except Exception:
    print("never mind")
"""


@pytest.mark.parametrize("name", ["tile_kernels.emulator", "renamed"])
def test_module_and_a_renamed_copy(tmp_path: Path, name: str) -> None:
    package = tmp_path / "pack"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "sizes.py").write_text("import sys\nwords = sys.argv[1:]\n")
    script = FAULTY.partition("try:")[0] + "from .sizes import words\nprint(words, __name__)\n"
    (package / "kernel.py").write_text(script + "shifted(32)(torch.ones(32, device='cuda'))\n")
    shutil.copytree(ROOT / "tile_kernels" / "emulator", tmp_path / "renamed")
    command = [sys.executable, "-m", name, "-m", "pack.kernel", "--m", "3"]
    done = subprocess.run(
        command, env=ENVIRONMENT, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stdout == "['--m', '3'] __main__\n", done.stderr
    trace = done.stderr.partition("Traceback (most recent call last):\n")[2]
    assert trace.startswith(f'  File "{package}/kernel.py", line 18, in <module>'), trace
    assert "4-byte read of y byte 124 (element 31)" in trace


def test_failures_that_a_script_swallows_are_reported(tmp_path: Path) -> None:
    """A result of `out_idx` is undefined at first, so adding to it is an error."""
    script = tmp_path / "careless.py"
    script.write_text(FAULTY)
    status, out, err = finish(start("--report", "html", script, cwd=tmp_path))
    assert status == 1
    assert out == "never mind\n"
    assert "a failure that the script did not report: shifted_kernel: uninitialised" in err
    assert "4-byte read of y byte 124 (element 31)" in err
    assert "careless.py:13: y[t] += 1.0" in err
    text = (tmp_path / "shifted_kernel-uninitialised.html").read_text()
    assert "<tr class='bad'><td>13</td>" in text


def test_missing_script_is_named() -> None:
    status, _, err = finish(start("nowhere.py"))
    assert status == 1
    assert err == "emulator: script: nowhere.py is not a file\n"


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("--arch", "hopper", "an architecture such as sm_90a"),
        ("--time-limit", "-1", "a number of at least 0"),
        ("--memory-limit", "much", "a number of at least 0.1"),
        ("--sms", "0", "an integer of at least 1"),
        ("--config", "-1", "an integer of at least 0"),
    ],
)
def test_options_are_checked(
    option: str, value: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        runner.main([f"{option}={value}", "script.py"])
    assert f"argument {option}: expected {expected}, got {value!r}" in capsys.readouterr().err


def test_an_unknown_architecture() -> None:
    expected = "arch must be an architecture such as 'sm_90a', got '90'"
    with pytest.raises(ValueError, match=expected), cuda_on_cpu("90"):
        pass


def test_pytest_emulate(tmp_path: Path) -> None:
    options = ["-q", "-p", "no:cacheprovider", "-p", "tile_kernels.pytest_emulate", "--emulate"]
    options += ["--emulate-report", "html"]
    (tmp_path / "test_theirs.py").write_text((SCRIPTS / "gpu_tests.py").read_text())
    command = [sys.executable, "-m", "pytest", *options, "test_theirs.py"]
    done = subprocess.run(
        command, env=ENVIRONMENT, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert "1 failed, 2 passed" in done.stdout, done.stdout
    assert "reverse_kernel: race: 4-byte write to shared tile" in done.stdout
    assert "3 kernels, 2 launches" in done.stdout
    assert re.search(
        r"\n>       kernel\(torch.randn.*\nE .* race: ", done.stdout
    )  # no frames below
    assert "<tr class='bad'>" in (tmp_path / "reverse_kernel-race.html").read_text()


# ---- in this process ---------------------------------------------------------------------------


def test_tensors_on_the_gpu_are_cpu_tensors_that_behave() -> None:
    before = (torch.cuda.is_available(), torch.cuda.Event, torch.Generator, torch.compile)
    with cuda_on_cpu("sm_80", num_sms=7):
        a = torch.ones(3)
        b = a.cuda()
        b[0] = 5
        assert a[0] == 1  # another memory, as on a GPU
        assert b.cuda() is b
        assert not b.cpu().is_cuda
        assert not a.is_cuda
        c = b.cpu()
        c[1] = 7
        assert b[1] == 1
        assert (b + 1).device == torch.device("cuda:0")
        assert b.to(torch.float16).is_cuda
        assert torch.zeros(2).to("cuda:0", torch.int32).dtype == torch.int32
        assert torch.empty_like(b).is_cuda
        assert torch.empty(2, device=b.device).is_cuda
        assert torch.cat([b, b]).is_cuda
        assert not torch.empty(2, device="cpu").is_cuda
        with torch.device("cuda"):
            assert torch.rand(2).is_cuda
        assert torch.randn(2, generator=torch.Generator("cuda"), device="cuda").is_cuda
        with torch.random.fork_rng(devices=[0]):
            drawn = torch.rand(2, device="cuda")
        assert torch.equal(torch.rand(2, device="cuda"), drawn)
        torch.manual_seed(3)  # of the CPU and of the GPU, whose states are separate
        drawn = torch.rand(2)
        torch.manual_seed(3)
        first = torch.randn(4, device="cuda")
        with torch.device("cuda"):
            torch.randint(9, (3,))
        torch.empty(2, device="cuda").normal_()
        torch.rand_like(first)
        assert torch.equal(torch.rand(2), drawn)
        torch.cuda.manual_seed(3)
        assert torch.equal(torch.randn(4, device="cuda"), first)
        assert not torch.equal(torch.randn(4, device="cuda"), first)
        assert torch.cuda.get_device_capability() == (8, 0)
        assert torch.cuda.get_device_properties(0).multi_processor_count == 7
        whole = torch.arange(1, 100, device="cuda")
        for x in (whole.float(), whole.double(), whole.bfloat16()):  # by a number as GPUs do
            wide = torch.promote_types(x.dtype, torch.float32)
            inverse = torch.ones((), dtype=wide) / torch.tensor(448, dtype=wide)
            assert torch.equal(x / 448, (x.to(wide) * inverse).to(x.dtype))
            assert torch.equal(x.clone().div_(448), x / 448)
            assert (x / 448).is_cuda
        assert torch.equal(whole / 448, whole.float() / 448)
        with pytest.raises(RuntimeError, match="can't be cast"):
            whole.div_(448)
        assert not torch.equal(whole / 448, whole.cpu() / 448)
        assert torch.equal(whole.div(448, rounding_mode="floor"), whole // 448)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            whole.add(1)
        assert "aten::add" in profile.key_averages().table(sort_by="cuda_time_total")
        with pytest.raises(RuntimeError, match="no CUDA graphs"):
            torch.cuda.CUDAGraph()
    assert (torch.cuda.is_available(), torch.cuda.Event, torch.Generator, torch.compile) == before
    assert not torch.ones(1).is_cuda


class Doubled(torch.autograd.Function):
    """Notes where its backward sees its tensors, and allocates there as kernels' callers do."""

    places: ClassVar[list[torch.device]] = []

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = 2 * x
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        allocated = torch.empty(grad.shape, device=grad.device)
        Doubled.places = [t.device for t in (grad, allocated, *ctx.saved_tensors)]
        return torch.mul(grad, 2, out=allocated)


@pytest.mark.parametrize("device", ["cuda:0", "cpu"])
@pytest.mark.parametrize("run", ["method", "backward", "grad"])
def test_backward_sees_the_device(run: str, device: str) -> None:
    with cuda_on_cpu():
        x = torch.ones(3, device=device, requires_grad=True)
        y = Doubled.apply(x).sum()
        Doubled.places.clear()
        if run == "method":
            y.backward()
        elif run == "backward":
            torch.autograd.backward(y)
        else:
            torch.autograd.grad(y, x)
    assert Doubled.places == [torch.device(device)] * 4
    assert "saved_tensors" not in vars(torch.autograd.function.BackwardCFunction)


def test_random_numbers_in_backward_advance_the_state() -> None:
    drawn: list[torch.Tensor] = []
    with cuda_on_cpu():
        x = torch.ones(2, device="cuda", requires_grad=True)
        x.register_hook(lambda _grad: drawn.append(torch.rand(2, device="cuda")))
        for _ in range(2):
            torch.autograd.backward(x.sum())
        drawn.append(torch.rand(2, device="cuda"))
    assert len({tuple(t.tolist()) for t in drawn}) == 3


def test_modules_threads_and_autocast() -> None:
    with cuda_on_cpu():
        created = torch.nn.Linear(4, 4, device="cuda")
        moved = torch.nn.Linear(4, 4).to("cuda", torch.bfloat16)
        assert created.weight.is_cuda
        assert moved.weight.is_cuda
        assert moved.weight.dtype == torch.bfloat16
        assert not moved.cpu().weight.is_cuda
        assert torch.nn.Parameter(torch.ones(2, device="cuda")).is_cuda
        assert torch.accelerator.current_accelerator() == torch.device("cuda")
        found: list[torch.Tensor] = []
        thread = threading.Thread(target=lambda: found.append(torch.ones(2, device="cuda")))
        thread.start()
        thread.join()
        assert [t.is_cuda for t in found] == [True]
        x = torch.ones(4, 4, device="cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            assert torch.is_autocast_enabled("cuda")
            assert (x @ x).dtype == torch.bfloat16
            with torch.autocast("cuda", enabled=False):
                assert (x @ x).dtype == torch.float32
        with torch.autocast("cuda"):
            assert (x @ x).dtype == torch.float16
        assert (x @ x).dtype == torch.float32
    assert not torch.is_autocast_enabled("cpu")


def test_the_carver_finds_a_device() -> None:
    from tilelang.carver.arch import CUDA

    with emulated_tilelang(Settings(arch="sm_80", num_sms=7)):
        device = CUDA(tilelang.tvm.target.Target({"kind": "cuda", "arch": "sm_80"}))
    assert (device.compute_max_core, device.warp_size) == (7, 32)
    assert device.compute_capability == "80"
    assert not tilelang.tvm.runtime.cuda(0).exist or torch.cuda.is_available()


def test_autotuner_skips_configurations_that_do_not_compile() -> None:
    @tilelang.autotune(configs=[{"width": 1 << 20}, {"width": 64}])
    @tilelang.jit(out_idx=-1)
    def copy(width: int = 0) -> Any:
        @T.prim_func
        def kernel(x: T.Tensor((64,), "float32"), y: T.Tensor((64,), "float32")):
            with T.Kernel(1, threads=width):  # a million threads do not fit
                for i in T.Parallel(64):
                    y[i] = x[i]

        return kernel

    x = torch.randn(64)
    with emulated_tilelang() as session:
        kernel = copy()
        assert kernel.config == {"width": 64}
        assert torch.equal(kernel(x), x)
        assert copy(width=32).config is None  # given, so nothing is tuned
    assert not session.failures
    assert any("configuration 0 of the autotuner does not compile" in n for n in session.notes)
    copy._tuner_cache.clear()
    with emulated_tilelang(Settings(config=5)), pytest.raises(ValueError, match="has 0 to 1"):
        copy()


def test_targets_other_than_cuda_are_refused() -> None:
    @T.prim_func
    def kernel(y: T.Tensor((32,), "float32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(32):
                y[i] = 1

    with emulated_tilelang(), pytest.raises(EmulationError, match="not for the target 'hip'"):
        tilelang.compile(kernel, target="hip")


def test_a_target_that_found_no_gpu_is_the_emulated_one() -> None:
    """TVM takes `Target("cuda")` for the oldest GPU that it knows where there is none."""
    oldest, named = (
        tilelang.tvm.target.Target({"kind": "cuda", "arch": a}) for a in ("sm_50", "sm_89")
    )
    assert _architecture(oldest, "sm_90a") == "sm_90a"
    assert _architecture(named, "sm_90a") == "sm_89"
    assert _architecture("cuda -arch=sm_80", "sm_90a") == "sm_80"


def test_device_asserts_without_a_cuda_toolkit(monkeypatch: pytest.MonkeyPatch) -> None:
    """TileLang omits them then; the emulator does not."""
    monkeypatch.setattr(debug, "_IS_CUDA_AVAILABLE", False)

    def build() -> Any:
        @T.prim_func
        def kernel(x: T.Tensor((32,), "float32"), y: T.Tensor((32,), "float32")):
            with T.Kernel(1, threads=32):
                t = T.get_thread_binding()
                T.print(x[t])
                T.device_assert(x[t] < 5, "too large")
                y[t] = x[t]

        return kernel

    x = torch.zeros(32)
    x[7] = 6
    with emulated_tilelang(), pytest.raises(EmulationError) as caught:
        tilelang.compile(build())(x.cuda(), x.cuda())
    with pytest.raises(EmulationError, match="device assert failed"):
        emulate(build, (), {"x": x, "y": x})
    error = caught.value
    assert error.message.startswith(
        "kernel_kernel: device assert failed: too large [block (0, 0, 0) thread (7, 0, 0)]\n"
    )
    assert error.python_text == 'T.device_assert(x[t] < 5, "too large")'
    assert not debug._IS_CUDA_AVAILABLE


def test_results_that_no_argument_determines() -> None:
    n = T.dynamic("n")

    @T.prim_func
    def kernel(x: T.Tensor((32,), "float32"), y: T.Tensor((n,), "float32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(32):
                y[i] = x[i]

    with emulated_tilelang():
        compiled = tilelang.compile(kernel, out_idx=-1)
        with pytest.raises(ValueError, match="y: the size n of this result follows from no"):
            compiled(torch.zeros(32))
        with pytest.raises(ValueError, match="expected 1 inputs, but 2"):
            compiled(torch.zeros(32), torch.zeros(32))
