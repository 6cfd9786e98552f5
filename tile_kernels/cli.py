"""`tile-kernels`: what is here, does it work, how fast is it, what does it compile to."""

from __future__ import annotations

import argparse
import copy
import importlib.metadata
import inspect
import json
import math
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import tile_kernels
from tile_kernels.runtime import backends, emulation, sources, terminal
from tile_kernels.runtime import op as ops
from tile_kernels.runtime.cases import Vector, moved
from tile_kernels.runtime.device import DESCRIBED, current_device, described
from tile_kernels.runtime.op import Op


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status is 0 if all is well."""
    options = _parser().parse_args(arguments)
    try:
        return options.run(options)
    except (TypeError, KeyError, ValueError, RuntimeError, OSError, ImportError) as error:
        print(f"tile-kernels {options.command}: {_sentence(error)}", file=sys.stderr)
        return 2


def _sentence(error: BaseException) -> str:
    return str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tile-kernels", description=__doc__)
    parser.add_argument("--version", action="version", version=tile_kernels.__version__)
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, run: Callable[[Any], int], text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text)
        added.set_defaults(run=run)
        return added

    def takes_arch(added: argparse.ArgumentParser) -> None:
        text = "GPU architecture (default: this machine's)"
        added.add_argument("--arch", choices=list(DESCRIBED), help=text)

    command("info", info, "versions, GPU, compilers, caches; what is missing and how to get it")
    command("ops", list_ops, "every operator with its signature, cost and backends").add_argument(
        "which", nargs="*", metavar="FAMILY|OP"
    )
    added = command("check", check, "run every operator against worked examples and its oracle")
    added.add_argument("which", nargs="*", metavar="FAMILY|OP")
    added.add_argument("--backend", choices=backends.BACKENDS, help="default: the best one here")
    added.add_argument("--replay", type=Path, metavar="FILE", help="a call saved by the log")
    added = command("bench", bench, "device time, bandwidth, host time, the oracle beside it")
    added.add_argument("which", nargs="*", metavar="FAMILY|OP")
    added.add_argument("--save", action="store_true", help="write JSON files to --output")
    added.add_argument("--plot", action="store_true", help="write PNG and SVG pictures to --output")
    added.add_argument("--output", type=Path, default=Path("benchmarks/results"), metavar="FOLDER")
    added.add_argument("--load", type=Path, metavar="FOLDER", help="show saved results instead")
    added.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    added.add_argument("--no-oracle", action="store_true", help="on a GPU: leave the oracles out")
    added = command("warmup", warmup, "compile kernels ahead of time into TileLang's disk cache")
    added.add_argument("op", nargs="?", help="an operator; default: the benchmark shapes of all")
    added.add_argument(
        "arguments", nargs="*", metavar="NAME=VALUE", help="as scores=float32[8192,256] num_topk=8"
    )
    added.add_argument("--calls", type=Path, metavar="FILE", help="JSON list of [op, {arguments}]")
    takes_arch(added)
    added.add_argument("--jobs", type=int, metavar="N", help="compiles at a time")
    added = command("source", source, "the generated CUDA of an operator's kernels, without a GPU")
    added.add_argument("op")
    added.add_argument("arguments", nargs="*", metavar="NAME=VALUE", help="as for warmup")
    takes_arch(added)
    text = "run the kernels on this CPU, on random data of these shapes, and say what they did"
    added.add_argument("--emulate", action="store_true", help=text)
    text = "with --emulate: leave source, inputs and a script that steps through them in gdb"
    added.add_argument("--keep", type=Path, metavar="FOLDER", help=text)
    added = command("ep-model", ep_model, "SMs, queue pairs, buffers and times of a topology")
    for name, default, text in (
        ("--nodes", 2, "machines"),
        ("--ranks-per-node", 8, "GPUs of each"),
        ("--experts", 256, "routed experts"),
        ("--topk", 8, "experts of a token"),
        ("--tokens", 4096, "of each rank, at most"),
        ("--hidden", 7168, "channels of a token"),
        ("--sms", 132, "SMs of the GPU"),
    ):
        added.add_argument(name, type=int, default=default, metavar="N", help=f"{text} ({default})")
    for name, gbs, text in (("--rdma-gbs", 50.0, "network"), ("--nvlink-gbs", 430.0, "NVLink")):
        meaning = f"{text} of a rank, GB/s ({gbs:g})"
        added.add_argument(name, type=float, default=gbs, metavar="N", help=meaning)
    text = "one row for each rank instead of each node"
    added.add_argument("--direct", action="store_true", help=text)
    text = "as many SMs as bandwidth wants, at least 64, instead of leaving them to compute"
    added.add_argument("--no-overlap", action="store_true", help=text)
    text = "count the rows of a random balanced routing on every rank"
    added.add_argument("--simulate", action="store_true", help=text)
    text = "with --simulate: rank 0 gets so many times more choices than another rank"
    added.add_argument("--skew", type=float, metavar="RATIO", help=text)
    text = "draw traffic per level and load imbalance of the simulation (.png or .svg)"
    added.add_argument("--plot", type=Path, metavar="FILE", help=text)
    return parser


def select(which: Sequence[str]) -> list[Op]:
    """Operators by family or full name; all of them for none."""
    found = ops.all_ops()
    if not which:
        return found
    for name in which:
        if not any(name in (op.family, op.name) for op in found):
            known = ", ".join(sorted({op.family for op in found} | {op.name for op in found}))
            raise KeyError(f"no family or operator {name!r}; there are {known}")
    return [op for op in found if op.family in which or op.name in which]


# ---- info and ops -------------------------------------------------------------------------------


def info(_: argparse.Namespace) -> int:
    """Show what this machine has."""
    device = current_device()
    if torch.cuda.is_available():
        gpu = f"{device.name}, {device.arch}, {device.num_sms} SMs, CUDA {torch.version.cuda}"
    else:
        gpu = "none: CPU tensors run the oracles; kernels compile, and run emulated"
    rows = [
        ["tile_kernels", tile_kernels.__version__],
        ["Python", sys.version.split()[0]],
        *([name, _version(name)] for name in ("torch", "tilelang", "apache-tvm-ffi", "matplotlib")),
        ["GPU", gpu],
        ["nvcc", _tool(sources.nvcc(), "kernels cannot be compiled: install a CUDA toolkit")],
        ["C++ compiler", _tool(shutil.which("g++"), "kernels cannot be emulated: install g++")],
        ["emulation", emulation.missing() or "ready"],
        ["backend", os.environ.get("TILE_KERNELS_BACKEND", "auto")],
        [
            "kernel cache",
            os.environ.get("TILELANG_CACHE_DIR", str(Path.home() / ".tilelang/cache")),
        ],
    ]
    terminal.show_table("tile-kernels", [("", "left"), ("", "left")], rows)
    return 0


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return f"missing: pip install {package}"


def _tool(path: str | None, missing: str) -> str:
    if path is None:
        return f"missing: {missing}"
    lines = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
    versions = [line for line in lines.splitlines() if "release" in line or "g++" in line]
    return f"{path} ({versions[0].strip() if versions else 'unknown version'})"


def list_ops(options: argparse.Namespace) -> int:
    """Show the registry."""
    rows = [[op.name, _signature(op), _least_work(op)] for op in select(options.which)]
    columns = [("operator", "left"), ("signature", "left"), ("least work", "left")]
    title = f"operators, each on the backends {', '.join(backends.BACKENDS)}"
    terminal.show_table(title, columns, rows)
    return 0


def _signature(op: Op) -> str:
    from rich.markup import escape

    return escape(str(inspect.signature(op.body)).replace("'", ""))


def _least_work(op: Op) -> str:
    case = op.cases.benchmarks[0]
    cost = op.cost(**case.build("meta"))
    flops = f", {cost.flops / 1e9:.1f} GFLOP" if cost.flops else ""
    return f"{cost.bytes / 1e6:.1f} MB{flops} ({case.label})"


# ---- check --------------------------------------------------------------------------------------


def best_backend() -> str:
    """The kernels where they can run: on a GPU, else emulated, else the oracles."""
    if torch.cuda.is_available():
        return "tilelang"
    return "torch" if emulation.missing() else "emulate"


def check(options: argparse.Namespace) -> int:
    """Run the worked examples and small samples of every operator."""
    if options.replay:
        return replay(options.replay, options.backend)
    backend = options.backend or best_backend()
    if backend == "tilelang" and not torch.cuda.is_available():
        raise RuntimeError("the backend 'tilelang' needs a CUDA device, and there is none")
    selected = select(options.which)
    device = "cuda" if backend == "tilelang" else "cpu"
    rows, failures = [], []
    steps = sum(len(op.cases.vectors) + len(op.cases.small) for op in selected)
    with terminal.progress_bar(steps, "checking") as advance, tile_kernels.backend(backend):
        for op in selected:
            passed = {"vectors": 0, "small": 0}
            for kind in passed:
                for case in getattr(op.cases, kind):
                    error = _check_case(op, case, device)
                    passed[kind] += error is None
                    if error is not None:
                        failures.append(f"{op.name} {case.label}: {error}")
                    advance(f"{op.name} {case.label}")
            counts = [f"{passed[kind]}/{len(getattr(op.cases, kind))}" for kind in passed]
            good = all(passed[kind] == len(getattr(op.cases, kind)) for kind in passed)
            rows.append([op.name, *counts, "[green]ok[/]" if good else "[red]FAILED[/]"])
    columns = [("operator", "left"), ("worked examples", "right"), ("samples = oracle", "right")]
    terminal.show_table(f"backend: {backend}", [*columns, ("", "left")], rows)
    for failure in failures:
        print(failure, file=sys.stderr)
    verdict = (
        f"{len(failures)} of {steps} cases failed" if failures else f"all {steps} cases passed"
    )
    terminal.console().print(f"[bold]{verdict}[/] on {backend} ({_where(backend)})")
    return 1 if failures else 0


def _where(backend: str) -> str:
    if backend == "emulate":
        return f"the generated CUDA for {described().arch}, executed on this CPU"
    return current_device().name if backend == "tilelang" else "PyTorch, the oracles themselves"


def _check_case(op: Op, case: Any, device: str) -> str | None:
    if isinstance(case, Vector):
        arguments, expected = moved(case.arguments(), device), case.expected()
    else:
        arguments = case.build(device)
        expected = op.outcome(op.oracle, copy.deepcopy(moved(arguments, "cpu")))
    try:
        op.cases.compare(moved(op.outcome(op.function, arguments), "cpu"), expected)
    except Exception as error:  # whatever goes wrong is the result of the check
        return f"{type(error).__name__}: {error}"
    return None


def _saved_call(path: Path) -> dict[str, Any]:
    """What the log wrote of a call: its operator and its arguments."""
    try:
        saved = torch.load(path, map_location=None if torch.cuda.is_available() else "cpu")
    except (pickle.UnpicklingError, EOFError, RuntimeError) as error:
        raise ValueError(f"{path} is not a call that was saved: {error}") from None
    if not isinstance(saved, dict) or not {"op", "arguments"} <= saved.keys():
        raise ValueError(f"{path} is not a call that was saved: it names no operator")
    return saved


def replay(path: Path, backend: str | None) -> int:
    """Run a call that the log saved (level 3), and compare it with the oracle."""
    saved = _saved_call(path)
    op = ops.get(saved["op"])
    expected = op.outcome(op.oracle, copy.deepcopy(saved["arguments"]))
    with tile_kernels.backend(backend or "auto"):
        outcome = op.outcome(op.function, saved["arguments"])
    try:
        op.cases.compare(outcome, expected)
    except AssertionError as error:
        print(f"{op.name} from {path}: {error}")
        return 1
    print(f"{op.name} from {path}: equal to the oracle")
    return 0


# ---- bench --------------------------------------------------------------------------------------


def bench(options: argparse.Namespace) -> int:
    """Measure, show, save."""
    from tile_kernels.testing import benchmark

    report = benchmark.load_all(options.load) if options.load else _measure(options)
    _show(report)
    if options.save:
        for path in benchmark.save(report, options.output):
            print(f"wrote {path}")
    if options.plot:
        for path in benchmark.plot_families(report, options.output):
            print(f"wrote {path}")
    return 0


def _measure(options: argparse.Namespace) -> Any:
    from tile_kernels.testing import benchmark

    selected = select(options.which)
    if not torch.cuda.is_available():
        print("no GPU here: measuring the host's share of a call and the oracles on the CPU")
    cases = sum(len(op.cases.benchmarks) for op in selected)
    with terminal.progress_bar(cases, "measuring") as advance:
        oracles = {"oracle": not options.no_oracle, "compile_oracle": not options.no_compile}
        return benchmark.run(selected, **oracles, on_case=advance)


def _show(report: Any) -> None:
    def number(value: float | None, digits: int = 1) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    rows = []
    for r in report.results:
        met = r.device_us is not None and r.goal_us is not None and r.device_us <= r.goal_us
        missed = r.device_us is not None and r.goal_us is not None and not met
        color = "green" if met else "red" if missed else "default"
        share = "-" if r.copy_fraction is None else f"{100 * r.copy_fraction:.1f} %"
        times = (r.device_us, r.goal_us, r.gb_per_s)
        others = (r.host_us, r.oracle_us, r.oracle_compiled_us)
        cells = [r.case, f"{r.bytes / 1e6:.1f}", *map(number, times), share, *map(number, others)]
        cells[2] = f"[{color}]{number(r.device_us, 2)}[/]"
        rows.append(cells)
    names = (
        "case",
        "MB",
        "us",
        "goal us",
        "GB/s",
        "of copy",
        "host us",
        "oracle us",
        "compiled us",
    )
    columns = [(name, "left" if name == "case" else "right") for name in names]
    copy = f", copy {report.copy_gb_per_s:.0f} GB/s" if report.copy_gb_per_s else ""
    terminal.show_table(f"{report.machine['device']}{copy}", columns, rows)


# ---- warmup and source --------------------------------------------------------------------------


def _call(op: str, arguments: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """`NAME=VALUE` words as a call; without any, the operator's first benchmark case."""
    declared = ops.get(op)
    if not arguments:
        return op, declared.cases.benchmarks[0].build("meta")
    values: dict[str, Any] = {}
    for word in arguments:
        name, equals, text = word.partition("=")
        if not equals or name not in declared.signature.parameters:
            known = ", ".join(declared.signature.parameters)
            raise ValueError(f"{word!r} is not NAME=VALUE with a name out of {known}")
        values[name] = text if name in declared.tensor_parameters else _plain(text)
    return op, values


def _plain(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def warmup(options: argparse.Namespace) -> int:
    """Compile ahead of time."""
    calls: Any = None
    if options.calls:
        calls = _calls_in(options.calls)
    elif options.op:
        calls = [_call(options.op, options.arguments)]
    report = tile_kernels.warmup(calls, arch=options.arch, jobs=options.jobs)
    rows = [[label, f"{seconds:.1f}"] for label, seconds in report.kernels.items()]
    columns = [("kernel", "left"), ("seconds", "right")]
    terminal.show_table(f"compiled for {report.arch} in {report.seconds:.1f} s", columns, rows)
    return 0


def _calls_in(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """Calls to compile for: `[["family.operator", {"argument": "float32[8,44]", ...}], ...]`."""
    calls = json.loads(path.read_text())
    if not isinstance(calls, list) or not all(
        isinstance(call, list) and [type(part) for part in call] == [str, dict] for call in calls
    ):
        raise ValueError(f'{path} must hold a list of ["family.operator", {{arguments}}]')
    return [(op, values) for op, values in calls]


def source(options: argparse.Namespace) -> int:
    """Print generated CUDA."""
    from tile_kernels.runtime.warmup import compilations

    if options.emulate:
        return emulate(options)
    if options.keep:
        raise ValueError("--keep goes with --emulate")
    device = described(options.arch) if options.arch else current_device()
    for item in compilations([_call(options.op, options.arguments)], device):
        print(f"// {item.label} for {item.arch}")
        print(sources.cuda_source(item.kernel.definition, item.static, item.arch))
    return 0


def emulate(options: argparse.Namespace) -> int:
    """Run an operator's kernels on the CPU and leave them to a debugger."""
    op = ops.get(options.op)
    if options.arguments:
        named = {k: _random(v) for k, v in _call(options.op, options.arguments)[1].items()}
    else:
        named = op.cases.vectors[0].arguments()
    settings = {"arch": options.arch} if options.arch else {}
    try:
        with (
            tile_kernels.backend("emulate", keep=options.keep, **settings),
            emulation.reports() as reports,
        ):
            op.function(**named)
        for report in reports:
            print(report)
    finally:  # a kernel that fails is the one to step through
        for script in sorted(options.keep.glob("*/debug.sh")) if options.keep else ():
            print(f"step through it: {script} -b 0 -t 0")
    return 0


def _random(value: Any) -> Any:
    """A CPU tensor of the words' shape; other values as they are."""
    from tile_kernels.runtime.warmup import tensor_of

    if not isinstance(value, str) or "[" not in value:
        return value
    meta = tensor_of(value)
    data = torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype)
    values = torch.randn(meta.shape) if meta.is_floating_point() else torch.randint(2, meta.shape)
    return data.copy_(values)


# ---- expert parallelism -------------------------------------------------------------------------


def ep_model(options: argparse.Namespace) -> int:
    """Show what a topology needs and how long it would take."""
    from tile_kernels.ep import model
    from tile_kernels.ep.topology import Topology
    from tile_kernels.utils import ceil_div

    physical = Topology(options.nodes, options.ranks_per_node)
    sizes = ("nodes", "ranks_per_node", "topk", "tokens", "hidden", "sms")
    small = [name for name in sizes if getattr(options, name) < 1]
    if small:
        raise ValueError(f"--{small[0].replace('_', '-')} must be at least 1")
    if options.experts % physical.num_ranks or options.topk > options.experts:
        raise ValueError(
            f"--experts must be a multiple of the {physical.num_ranks} ranks and at least --topk, "
            f"got {options.experts}"
        )
    hybrid = physical.is_hybrid and not options.direct
    nodes, per_node = (options.nodes, options.ranks_per_node) if hybrid else (1, physical.num_ranks)
    near = options.ranks_per_node
    sms = model.num_sms(
        nodes, per_node, options.experts, options.topk, rdma_gbs=options.rdma_gbs,
        nvlink_gbs=options.nvlink_gbs, num_device_sms=options.sms, num_physical_nvlink_ranks=near,
        prefer_overlap_with_compute=not options.no_overlap,
    )  # fmt: skip
    qps = model.num_qps(sms, model.default_num_qps(not options.direct), not options.direct)
    rows = [["SMs", f"{sms} of {options.sms}"], ["queue pairs", str(qps)]]
    title = f"{options.nodes} x {options.ranks_per_node} ranks, {'hybrid' if hybrid else 'direct'}"
    terminal.show_table(title, [("count", "left"), ("", "right")], rows)

    rows = []
    for name, fp8, multiple in (
        ("bfloat16 dispatch", False, True),
        ("FP8 dispatch", True, True),
        ("bfloat16 dispatch, one sum at the source", False, False),
    ):
        size = model.buffer_bytes(
            nodes, per_node, options.tokens, options.hidden, options.topk, use_fp8_dispatch=fp8,
            allow_multiple_reduction=multiple, all_nvlink=hybrid or options.nodes == 1,
        )  # fmt: skip
        rows.append([name, f"{size:,}", f"{size / 2**30:.2f}"])
    size = model.WORKSPACE_BYTES
    rows.append(["workspace", f"{size:,}", f"{size / 2**30:.2f}"])
    columns = [("buffer of a rank", "left"), ("bytes", "right"), ("GiB", "right")]
    title = f"{options.tokens} tokens of {options.hidden} channels, {options.topk} experts each"
    terminal.show_table(title, columns, rows)

    received, network, nvlink = model.expected_rows(
        nodes, per_node, options.experts, options.topk, options.tokens, near
    )
    scales = ceil_div(options.hidden, 128)
    row_bytes = {
        "dispatch, bfloat16": model.dispatch_token_bytes(options.hidden, 2, 0, options.topk),
        "dispatch, FP8": model.dispatch_token_bytes(options.hidden, 1, scales, options.topk),
        "combine, bfloat16": model.combine_token_bytes(options.hidden, options.topk),
    }
    traffic = _simulated(options, physical, hybrid) if options.simulate else None
    rows = []
    for name, size in row_bytes.items():
        rates = (size, options.rdma_gbs, options.nvlink_gbs)
        seconds = model.transfer_seconds(network, nvlink, *rates)
        cells = [name, f"{network * size / 1e6:.1f}", f"{nvlink * size / 1e6:.1f}"]
        cells.append(f"{seconds * 1e6:.0f}")
        if traffic is not None:
            cells.append(f"{traffic.seconds(*rates) * 1e6:.0f}")
        rows.append(cells)
    names = ["", "network MB", "NVLink MB", "us at least"] + ["simulated us"] * options.simulate
    columns = [(name, "right" if name else "left") for name in names]
    title = f"{received:.0f} rows received by a rank on average"
    terminal.show_table(title, columns, rows)
    if traffic is not None:
        _show_traffic(traffic)
        if options.plot:
            from tile_kernels.ep import sim

            sim.plot(traffic, row_bytes["combine, bfloat16"], options.plot)
            print(f"wrote {options.plot}")
    elif options.plot or options.skew:
        raise ValueError("--plot and --skew go with --simulate")
    return 0


def _simulated(options: argparse.Namespace, physical: Any, hybrid: bool) -> Any:
    from tile_kernels.ep import sim

    routing = sim.balanced_routing(options.tokens, options.experts, options.topk)
    if options.skew is not None:
        if not 0 < options.skew < math.inf:
            raise ValueError(f"--skew must be a positive number, got {options.skew}")
        routing = sim.skewed_routing(
            options.tokens, options.experts, options.topk, physical.num_ranks, options.skew
        )
    return sim.simulate(physical, options.experts, routing, hybrid=hybrid)


def _show_traffic(traffic: Any) -> None:
    from tile_kernels.ep import sim

    rows = []
    for name in sim.COUNTS:
        counts = getattr(traffic, name)
        cells = [f"{counts.double().mean().item():.1f}", str(int(counts.min()))]
        rows.append([name, *cells, str(int(counts.max())), f"{traffic.imbalance(name):.2f}"])
    columns = [("rows of a rank", "left")]
    columns += [(name, "right") for name in ("average", "least", "most", "most / average")]
    terminal.show_table("simulated", columns, rows)
