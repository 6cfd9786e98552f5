import hashlib
import json

import pytest
import torch

from tile_kernels.testing import pytest_plugin as plugin

PLUGIN = "tile_kernels.testing.pytest_plugin"

RECORDING = """
import pytest

@pytest.mark.parametrize("hidden", [64, 128])
def test_speed(benchmark_record, hidden):
    benchmark_record(
        kernel="transpose",
        operation="fwd",
        params={"num_tokens": 8, "hidden": hidden},
        time_us=hidden / 6.4,
        bandwidth_gbs=1234.56789,
        extras={"speedup": 1.23456, "note": "x"},
    )
"""


XDIST = pytest.mark.parametrize(
    "xdist",
    [
        pytest.param(False, id="one process"),
        pytest.param(True, id="xdist", marks=pytest.mark.multiprocess),
    ],
)


@pytest.fixture
def run(pytester, monkeypatch):
    """Run pytest with the plugin in a directory of its own, as if it were the outermost one."""
    for name in ("WORKER", "WORKER_COUNT", "TESTRUNUID"):
        monkeypatch.delenv(f"PYTEST_XDIST_{name}", raising=False)
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)

    def run(*args, xdist=False):
        workers = ["-n", "2"] if xdist else ["-p", "no:xdist"]
        return pytester.runpytest("-p", PLUGIN, "-p", "no:cacheprovider", *workers, *args)

    return run


@pytest.fixture
def no_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def with_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Fake GPU")


def write_baselines(path, *records, device=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    device = device or plugin.current_device_name()
    lines = []
    for hidden, time_us in records:
        params = {"num_tokens": 8, "hidden": hidden}
        lines.append(plugin.make_record("transpose", "fwd", params, time_us, device=device))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


class TestSeed:
    def test_value(self):
        digest = hashlib.sha256(b"tests/test_a.py::test[x=1]").digest()
        expected = int.from_bytes(digest, "big") % 2**31
        assert plugin.seed_of("tests/test_a.py::test[x=1]", 0) == expected
        assert plugin.seed_of("tests/test_a.py::test[x=1]", 5) == expected + 5

    def test_this_test_is_seeded(self, seed, request):
        drawn = torch.rand(4)
        base = request.config.getoption("--seed")
        assert seed == plugin.seed_of(request.node.nodeid, base)
        torch.manual_seed(seed)
        assert torch.equal(drawn, torch.rand(4))

    def test_every_test_has_its_own_and_repeats_it(self, pytester, run):
        pytester.makepyfile(
            """
            import random, pytest, torch

            @pytest.mark.parametrize("i", range(2))
            def test_draw(i, seed):
                with open("drawn.txt", "a") as file:
                    print(seed, torch.rand(1).item(), random.random(), file=file)
            """
        )
        for args in ((), (), ("--seed=1",)):
            run(*args).assert_outcomes(passed=2)
        drawn = [line.split() for line in (pytester.path / "drawn.txt").read_text().splitlines()]
        assert drawn[0:2] == drawn[2:4]
        assert [int(d[0]) + 1 for d in drawn[0:2]] == [int(d[0]) for d in drawn[4:6]]
        for column in range(3):
            assert len({d[column] for d in (drawn[0], drawn[1], drawn[4], drawn[5])}) == 4


class TestMarkers:
    @pytest.fixture(autouse=True)
    def suite(self, pytester):
        pytester.makepyfile(
            """
            import pytest

            @pytest.mark.gpu
            def test_gpu(): pass

            @pytest.mark.benchmark
            def test_benchmark(): pass

            def test_plain(): pass
            """
        )

    @pytest.mark.usefixtures("no_cuda")
    def test_without_cuda(self, run):
        result = run("-rs", "--strict-markers")
        result.assert_outcomes(passed=1, skipped=2)
        result.stdout.fnmatch_lines_random(
            ["*needs a CUDA device and there is none*", "*runs with --run-benchmark*"]
        )

    @pytest.mark.usefixtures("no_cuda")
    def test_benchmarks_without_cuda(self, run):
        result = run("-rs", "--run-benchmark")
        result.assert_outcomes(passed=1, skipped=2)
        result.stdout.fnmatch_lines(["SKIPPED*:3: needs a CUDA device and there is none"])
        result.stdout.fnmatch_lines(["SKIPPED*:6: needs a CUDA device and there is none"])

    @pytest.mark.usefixtures("with_cuda")
    def test_with_cuda(self, run):
        run().assert_outcomes(passed=2, skipped=1)

    @pytest.mark.usefixtures("with_cuda")
    def test_benchmarks_with_cuda(self, run):
        run("--run-benchmark").assert_outcomes(passed=3)
        run("--run-benchmark", "-m", "benchmark").assert_outcomes(passed=1, deselected=2)

    def test_markers_are_listed(self, run):
        run("--markers").stdout.fnmatch_lines(["*mark.gpu: *", "*mark.benchmark: *"])


class TestTimer:
    SUITE = """
        def test_timer(benchmark_timer):
            assert benchmark_timer(lambda: None, repeats=3) == 12.5
    """

    @pytest.mark.usefixtures("no_cuda")
    def test_skips_without_cuda(self, pytester, run):
        pytester.makepyfile(self.SUITE)
        result = run("-rs")
        result.assert_outcomes(skipped=1)
        result.stdout.fnmatch_lines(["*benchmark_timer needs a CUDA device*"])

    @pytest.mark.usefixtures("with_cuda")
    def test_times_the_device(self, pytester, run, monkeypatch):
        calls = []

        def time_device(fn, **overrides):
            calls.append(overrides)
            return plugin.timing.Timing(12.5, 12.0, 13.0, "cupti")

        monkeypatch.setattr(plugin.timing, "time_device", time_device)
        pytester.makepyfile(self.SUITE)
        run().assert_outcomes(passed=1)
        assert calls == [{"repeats": 3}]


class TestRecord:
    def test_contents(self):
        record = plugin.make_record(
            "topk_gate",
            "fwd",
            {"num_tokens": 4, "block": (1, 128), "bias": None},
            1.23456,
            bandwidth_gbs=7.123456,
            extras={"ratio": 0.123456, "count": 3},
            device="H200",
        )
        assert record == {
            "kernel": "topk_gate",
            "operation": "fwd",
            "params": {"bias": None, "block": [1, 128], "num_tokens": 4},
            "time_us": 1.23,
            "bandwidth_gbs": 7.1235,
            "extras": {"ratio": 0.1235, "count": 3},
            "device": "H200",
        }
        assert list(record["params"]) == sorted(record["params"])
        assert json.loads(json.dumps(record)) == record

    def test_optional_fields_are_left_out(self):
        record = plugin.make_record("k", "fwd", {}, 1.0)
        assert set(record) == {"kernel", "operation", "params", "time_us", "device"}
        assert record["device"] == plugin.current_device_name()

    def test_key_does_not_depend_on_the_order_or_a_round_trip(self):
        one = plugin.make_record("k", "bwd", {"hidden": 64, "t": (1, 2), "a": "x"}, 1.0)
        two = plugin.make_record("k", "bwd", {"a": "x", "t": (1, 2), "hidden": 64}, 2.0)
        assert plugin.record_key(one) == plugin.record_key(two)
        assert plugin.record_key(one) == "k/bwd[a=x,hidden=  64,t=[1, 2]]"

    @pytest.mark.parametrize("time_us", [0.0, -1.0, float("nan"), float("inf")])
    def test_bad_time(self, time_us):
        with pytest.raises(ValueError, match="time_us must be finite and positive"):
            plugin.make_record("k", "fwd", {}, time_us)

    def test_bad_params(self):
        with pytest.raises(TypeError, match=r"must hold JSON values .* dtype"):
            plugin.make_record("k", "fwd", {"dtype": torch.bfloat16}, 1.0)

    def test_bench_line(self, pytester, run):
        pytester.makepyfile(RECORDING)
        run("-s").stdout.fnmatch_lines(
            [
                "*BENCH transpose/fwd[[]hidden=  64,num_tokens=    8[]] 10.00 us 1234.6 GB/s "
                "speedup=1.2346 note=x*"
            ]
        )

    def test_arguments_are_keyword_only(self, pytester, run):
        pytester.makepyfile("def test_x(benchmark_record): benchmark_record('k', 'fwd', {}, 1.0)")
        run().assert_outcomes(failed=1)


class TestReport:
    @pytest.fixture(autouse=True)
    def suite(self, pytester):
        pytester.makepyfile(RECORDING)

    def test_new_records_do_not_fail(self, run):
        result = run()
        assert result.ret == 0
        result.stdout.fnmatch_lines(["*New (no baseline): 2"])
        result.stdout.fnmatch_lines_random(
            ["*  transpose/fwd[[]hidden=  64,*10.00 us  1234.6 GB/s", "*hidden= 128,*20.00 us*"]
        )
        assert "Regressions" not in result.stdout.str()

    @XDIST
    def test_regression_fails(self, pytester, run, xdist):
        write_baselines(
            pytester.path / "tests" / "benchmark_baselines.jsonl", (64, 8.0), (128, 20.0)
        )
        result = run(xdist=xdist)
        result.assert_outcomes(passed=2)
        assert result.ret == 1
        result.stdout.fnmatch_lines(
            [
                "*Regressions: 1",
                "*hidden=  64,*10.00 us*baseline 8.00 us, 1.25x*",
                "*Unchanged: 1",
                "*hidden= 128,*20.00 us*",
            ]
        )

    def test_improvement_is_listed(self, pytester, run):
        write_baselines(pytester.path / "base.jsonl", (64, 12.0), (128, 20.0))
        result = run("--benchmark-baseline=base.jsonl")
        assert result.ret == 0
        result.stdout.fnmatch_lines(
            ["*Improvements: 1", "*hidden=  64,*baseline 12.00 us, 0.83x*", "*Unchanged: 1"]
        )

    def test_other_devices_are_not_compared(self, pytester, run):
        write_baselines(pytester.path / "base.jsonl", (64, 1.0), device="Other GPU")
        result = run("--benchmark-baseline=base.jsonl")
        assert result.ret == 0
        device = plugin.current_device_name()
        result.stdout.fnmatch_lines(
            [
                "*New (no baseline): 1",
                "*Not compared (baseline from another device): 1",
                f"*hidden=  64,*on {device}, baseline on Other GPU",
            ]
        )

    @XDIST
    def test_output(self, pytester, run, xdist):
        assert run("--benchmark-output=out/records.jsonl", xdist=xdist).ret == 0
        path = pytester.path / "out" / "records.jsonl"
        records = sorted(map(json.loads, path.read_text().splitlines()), key=lambda r: r["time_us"])
        assert [r["time_us"] for r in records] == [10.0, 20.0]
        assert records[0] == {
            "kernel": "transpose",
            "operation": "fwd",
            "params": {"hidden": 64, "num_tokens": 8},
            "time_us": 10.0,
            "bandwidth_gbs": 1234.5679,
            "extras": {"speedup": 1.2346, "note": "x"},
            "device": plugin.current_device_name(),
        }


class TestReportDetails:
    def test_threshold(self, pytester, run):
        pytester.makepyfile(RECORDING)
        write_baselines(pytester.path / "base.jsonl", (64, 8.0), (128, 20.0))
        args = ("--benchmark-baseline=base.jsonl", "--benchmark-regression-threshold")
        assert run(*args, "0.3").ret == 0
        assert run(*args, "0.2").ret == 1
        assert run(*args, "-1").ret == pytest.ExitCode.USAGE_ERROR

    def test_bounds_are_exclusive(self):
        def status(time_us, threshold=0.25):
            record = plugin.make_record("k", "fwd", {}, time_us, device="d")
            return plugin.compare(record, {"k/fwd[]": {"d": {"time_us": 8.0}}}, threshold).status

        assert status(10.0) == "unchanged"
        assert status(10.01) == "regression"
        assert status(6.0) == "unchanged"
        assert status(5.99) == "improvement"

    def test_a_regression_does_not_hide_another_status(self, pytester, run):
        stop = "def test_stop():\n    pytest.exit('enough', returncode=7)\n"
        pytester.makepyfile(RECORDING + stop)
        write_baselines(pytester.path / "base.jsonl", (64, 1.0))
        result = run("--benchmark-baseline=base.jsonl")
        assert result.ret == 7

    def test_records_of_failing_tests_are_kept(self, pytester, run):
        pytester.makepyfile(
            """
            def test_x(benchmark_record):
                benchmark_record(kernel="k", operation="fwd", params={}, time_us=1.0)
                assert False
            """
        )
        result = run()
        result.assert_outcomes(failed=1)
        result.stdout.fnmatch_lines(["*New (no baseline): 1", "*k/fwd*1.00 us*"])

    def test_verbose(self, pytester, run):
        pytester.makepyfile(RECORDING)
        write_baselines(pytester.path / "base.jsonl", (64, 10.0))
        device = plugin.current_device_name()
        args = ("--benchmark-baseline=base.jsonl",)
        line = f"*hidden=  64,*baseline 10.00 us, 1.00x*speedup=1.2346 note=x*on {device}"
        run(*args, "--benchmark-verbose").stdout.fnmatch_lines([line])
        run(*args).stdout.no_fnmatch_line(line)

    def test_the_last_baseline_counts(self, pytester, run):
        pytester.makepyfile(RECORDING)
        write_baselines(pytester.path / "base.jsonl", (64, 1.0), (64, 10.0), (128, 20.0))
        assert run("--benchmark-baseline=base.jsonl").ret == 0

    def test_output_may_be_the_baseline(self, pytester, run):
        pytester.makepyfile(RECORDING)
        path = write_baselines(pytester.path / "base.jsonl", (64, 1.0))
        result = run("--benchmark-baseline=base.jsonl", "--benchmark-output=base.jsonl")
        assert result.ret == 1
        assert len(path.read_text().splitlines()) == 3

    def test_output_is_appended_to(self, pytester, run):
        pytester.makepyfile(RECORDING)
        for _ in range(2):
            run("--benchmark-output=out.jsonl")
        assert len((pytester.path / "out.jsonl").read_text().splitlines()) == 4

    def test_no_report_without_records(self, pytester, run):
        pytester.makepyfile("def test_x(): pass")
        result = run()
        assert result.ret == 0
        assert "benchmarks" not in result.stdout.str()

    def test_missing_baseline_file(self, pytester, run):
        pytester.makepyfile("def test_x(): pass")
        result = run("--benchmark-baseline=absent.jsonl")
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        result.stderr.fnmatch_lines(["*cannot read benchmark baselines*absent.jsonl*"])

    @pytest.mark.parametrize(
        "line", ["{", "[]", "3", '{"kernel": "k"}', '{"kernel":"k","operation":"o","params":{}}']
    )
    def test_malformed_baseline(self, tmp_path, line):
        path = write_baselines(tmp_path / "base.jsonl", (64, 1.0))
        path.write_text(path.read_text() + "\n" + line + "\n")
        with pytest.raises(pytest.UsageError, match=r"base\.jsonl:3: not a benchmark record"):
            plugin.load_baselines(path)

    def test_baseline_without_a_device_compares_with_nothing(self, tmp_path):
        path = tmp_path / "base.jsonl"
        path.write_text('{"kernel":"k","operation":"fwd","params":{},"time_us":1.0}\n')
        record = plugin.make_record("k", "fwd", {}, 9.0)
        comparison = plugin.compare(record, plugin.load_baselines(path), 0.15)
        assert comparison.status == "other device"
        assert comparison.baseline_devices == ("an unknown device",)


class TestWorkers:
    @pytest.mark.parametrize(
        ("gpu", "num_workers", "num_gpus", "total_gib", "expected"),
        [
            (0, 1, 1, 100, 0.9),
            (0, 4, 2, 100, 0.45),
            (0, 5, 2, 100, 0.3),
            (1, 5, 2, 100, 0.45),
            (3, 2, 8, 100, 0.9),
            (0, 2, 1, 8, 0.25),
        ],
    )
    def test_memory_fraction(self, gpu, num_workers, num_gpus, total_gib, expected):
        fraction = plugin.worker_memory_fraction(gpu, num_workers, num_gpus, total_gib << 30)
        assert fraction == pytest.approx(expected)

    @pytest.mark.usefixtures("with_cuda")
    def test_binding(self, monkeypatch):
        calls = []
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
        monkeypatch.setattr(torch.cuda, "set_device", calls.append)
        monkeypatch.setattr(
            torch.cuda,
            "set_per_process_memory_fraction",
            lambda fraction, gpu: calls.append((round(fraction, 6), gpu)),
        )
        properties = type("Properties", (), {"total_memory": 100 << 30})
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
        plugin._bind_worker({"workerid": "gw6", "workercount": 8})
        assert calls == [2, (0.45, 2)]

    @pytest.mark.usefixtures("no_cuda")
    def test_no_gpu_is_no_failure(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "set_device", lambda _: pytest.fail("no GPU to set"))
        plugin._bind_worker({"workerid": "gw6", "workercount": 8})
