import enum
import os
import sys
from pathlib import Path

import pytest
import torch

from tile_kernels.testing import bench


def test_dtype_to_str():
    names = {
        torch.float32: "fp32",
        torch.bfloat16: "bf16",
        torch.float8_e4m3fn: "e4m3",
        torch.int8: "e2m1",
    }
    assert {dtype: bench.dtype_to_str(dtype) for dtype in names} == names


@pytest.mark.parametrize("dtype", [torch.float16, torch.uint8, torch.float8_e5m2, "bf16", None])
def test_dtype_to_str_of_others(dtype):
    with pytest.raises(ValueError, match="dtype must be one of"):
        bench.dtype_to_str(dtype)


def test_make_param_id():
    params = {
        "num_tokens": 4001,
        "dtype": torch.bfloat16,
        "in": torch.int8,
        "t": (1, 128),
        "n": None,
        "b": True,
    }
    assert bench.make_param_id(params) == "num_tokens=4001-dtype=bf16-in=e2m1-t=1x128-n=None-b=True"
    assert bench.make_param_id({}) == "default"


def test_make_param_key():
    params = {
        "num_tokens": 4001,
        "num_experts": 32,
        "num_ep_ranks": 8,
        "hidden": 576,
        "use_tma_aligned_col_major_sf": True,
        "use_packed_ue8m0": False,
        "round_sf": True,
        "num_per_channels": 128,
        "nothing": None,
        "dtype": "bf16",
    }
    expected = (
        "num_tokens= 4001,experts= 32,ep= 8,hidden= 576,col=1,ue8m0=0,round=1,"
        "num_per_channels= 128,dtype=bf16"
    )
    assert bench.make_param_key(params) == expected
    params["dtype"] = torch.bfloat16
    assert bench.make_param_key(params) == expected


def test_make_param_key_follows_the_order_of_the_dict():
    assert bench.make_param_key({"b": 1, "a": False}) == "b=1,a=False"
    assert bench.make_param_key({}) == ""
    assert bench.make_param_key({"hidden": None}) == ""


def test_make_param_key_does_not_cut_long_values():
    assert bench.make_param_key({"hidden": 123456, "num_ep_ranks": 256}) == "hidden=123456,ep=256"


def test_labels_take_any_value():
    Kind = enum.Enum("Kind", ["A"])
    assert bench.make_param_id({"kind": Kind.A}) == "kind=Kind.A"
    assert bench.make_param_key({"kind": Kind.A}) == "kind=Kind.A"


def test_print_average_perf(capsys):
    bench.print_average_perf([1, 4], [100, 400], [])
    bench.print_average_perf([2.0], [10.5], [2.0, 8.0])
    assert capsys.readouterr().out.splitlines() == [
        "Average Performance: 2.0 us, 200 GB/s, 1.00x speedup",
        "Average Performance: 2.0 us, 10 GB/s, 4.00x speedup",
    ]


@pytest.mark.parametrize(("latencies", "bandwidths"), [([], [1.0]), ([1.0], []), ([], [])])
def test_print_average_perf_of_nothing(capsys, latencies, bandwidths):
    bench.print_average_perf(latencies, bandwidths, [1.0])
    output = capsys.readouterr().out
    assert output.count("\n") == 1
    assert "us" not in output.split()


def test_print_average_perf_rejects_negative_times():
    with pytest.raises(ValueError, match="must not be negative"):
        bench.print_average_perf([-1.0], [1.0], [])


def emit(tag):
    sys.stdout.write(f"python-out-{tag}\n")
    sys.stderr.write(f"python-err-{tag}\n")
    sys.stdout.flush()
    sys.stderr.flush()
    os.write(1, f"raw-out-{tag}\n".encode())
    os.write(2, f"raw-err-{tag}\n".encode())


def count_open_files():
    descriptors = Path("/proc/self/fd")
    return len(list(descriptors.iterdir())) if descriptors.is_dir() else None


def test_suppress(capfd):
    suppress = bench.suppress_stdout_stderr()
    emit("before")
    with suppress as entered:
        assert entered is suppress
        emit("inside")
        with suppress:
            emit("nested")
        emit("inside-again")
    emit("after")
    out, err = capfd.readouterr()
    for text, stream in ((out, "out"), (err, "err")):
        expected = [
            f"{kind}-{stream}-{tag}" for tag in ("before", "after") for kind in ("python", "raw")
        ]
        assert text.splitlines() == expected


def test_suppress_restores_after_an_exception(capfd):
    streams = sys.stdout, sys.stderr
    open_before = count_open_files()

    def fail():
        emit("inside")
        raise KeyError

    with pytest.raises(KeyError), bench.suppress_stdout_stderr():
        fail()
    assert (sys.stdout, sys.stderr) == streams
    assert count_open_files() == open_before
    emit("after")
    assert capfd.readouterr().out.splitlines() == ["python-out-after", "raw-out-after"]


def test_empty_suppress(capfd):
    suppress = bench.empty_suppress()
    with suppress as entered:
        assert entered is suppress
        emit("inside")
    assert capfd.readouterr().out.splitlines() == ["python-out-inside", "raw-out-inside"]
    with pytest.raises(KeyError), bench.empty_suppress():
        raise KeyError
