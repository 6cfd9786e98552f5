"""Write the generated tables of the documents: `python docs/tables.py [--check]`.

The list of operators comes from the registry, the arguments on the page of routing from docstrings,
the numbers of the benchmark page, of the comparison, of whole layers and of the demo from the
results files.
"""

import dataclasses
import functools
import inspect
import itertools
import json
import re
import statistics
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tile_kernels import moe
from tile_kernels.runtime.cases import Benchmark, tensors_in
from tile_kernels.runtime.operator import Operator
from tile_kernels.runtime.registry import all_ops
from tile_kernels.testing import benchmark

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT))  # where the benchmarks are, whose cases the tables name
RESULTS = ROOT / "benchmarks" / "results" / "nvidia-h200"
OTHERS = ROOT / "benchmarks" / f"tilekernels.{RESULTS.name}.json"  # written by hand
NOISE = 0.03  # two runs of the same kernel differ by up to this share
# Dense peaks of the H200's tensor cores from NVIDIA's data sheet, in TFLOP/s, by bytes of a value.
PEAK_TFLOPS = {1: 1979, 2: 989, 4: 494}


# The page of each family, in the list of operators.
FAMILY_PAGES = {
    "attention": "attention.md",
    "engram": "engram.md",
    "gemm": "gemm.md",
    "mhc": "mhc.md",
    "moe": "moe.md",
    "quant": "quant.md",
    "transform": "norm.md",
    "transpose": "transpose.md",
}


def operators() -> list[str]:
    """For each family a table: operators, arguments, and the first sentence of the docstring."""
    lines = []
    for family, ops in itertools.groupby(all_ops(), lambda op: op.name.split(".")[0]):
        page = FAMILY_PAGES[family]
        title = (ROOT / "docs" / page).read_text().splitlines()[0].removeprefix("# ")
        lines += [f"## {family}", "", f"`tile_kernels.{family}`: [{title}]({page})", ""]
        lines += ["| operator | arguments | what it does |", "|---|---|---|"]
        for op in ops:
            name, arguments = op.name.split(".")[1], ", ".join(op.signature.parameters)
            summary = (inspect.getdoc(op.function) or "").split("\n\n")[0].replace("\n", " ")
            lines.append(f"| `{name}` | `{arguments}` | {summary} |")
        lines.append("")
    return lines[:-1]


def sections(function: Callable[..., Any]) -> dict[str, str]:
    """The sections of a docstring (`Args:`, `Returns:`, ...) by title, without indentation."""
    text = inspect.getdoc(function) or ""
    parts = re.split(r"^(\w+):\n", text, flags=re.M)
    return {title: textwrap.dedent(body) for title, body in zip(parts[1::2], parts[2::2])}


def arguments() -> list[str]:
    """The main operators of routing: what they take and return, from their docstrings."""
    lines = []
    for function in (
        moe.top2_sum_gate,
        moe.get_fused_mapping,
        moe.expand_to_fused,
        moe.reduce_fused,
    ):
        found = sections(function)
        entries = re.findall(r"^(\w+): (.*(?:\n .*)*)", found["Args"], flags=re.M)
        rows = [f"| `{name}` | {' '.join(text.split())} |" for name, text in entries]
        lines += [f"### `{function.__name__}`", "", "| argument | |", "|---|---|", *rows, ""]
        lines += ["Returns:", "", *found["Returns"].strip().splitlines(), ""]
    return lines[:-1]


# Cases, or all of an operator, whose machine code is not what it was when they were measured last,
# and since when (UTC). An entry has no effect any more when newer results replace the old ones.
# Enter here what you change.
CHANGED = {
    "attention.indexer_logits": "2026-11-18 20:36",
    "attention.indexer_logits_bwd": "2026-11-18 04:25",
    "attention.indexer_select": "2026-11-18 20:36",
    "attention.kv_compress_norm_rope_cast": "2026-11-18 11:28",
    "engram.engram_hash": "2026-11-19 02:35",
    "engram.grad_w_reduce": "2026-11-18 04:59",
    "mhc.mhc_norm_fn_bwd": "2026-11-18 04:22",
    "mhc.mhc_norm_fn_fwd": "2026-11-18 06:30",
    "mhc.mhc_pre_big_fuse": "2026-11-18 06:30",
    "mhc.mhc_pre_fwd": "2026-11-18 06:30",
    "moe.aux_fi": "2026-11-18 20:20",
    "moe.expand_to_fused.bf16.576": "2026-11-15 22:23",
    "moe.expand_to_fused_with_sf": "2026-11-15 22:23",
    "moe.get_fused_mapping": "2026-11-18 20:20",
    "moe.group_count": "2026-11-18 20:20",
    "moe.topk_gate.4096.64": "2026-11-19 02:35",
    "quant.fake_cast.e2m1": "2026-11-18 11:28",
    "quant.per_block_cast": "2026-11-18 11:28",
    "quant.per_block_cast_with_sf_only": "2026-11-18 11:28",
    "quant.per_channel_cast_fused": "2026-11-18 11:28",
    "quant.per_token_cast.e2m1.32.ue8m0": "2026-11-18 11:28",
    "quant.per_token_cast.e4m3.128.ue8m0": "2026-11-18 11:28",
    "quant.swiglu_backward_and_per_token_cast": "2026-11-18 11:28",
    "quant.swiglu_forward_and_per_token_cast.128.counted": "2026-11-18 11:28",
}
CHANGED_MARK = " \N{DAGGER}"
# Scripts of their own measure these, and other pages show what they found.
MEASURED_APART = ("gemm.", "attention.sparse_attention", "attention.hca_attention")


@functools.cache
def operator_report() -> benchmark.Report:
    """All results of operators, with the goals that their cases have today."""
    report = benchmark.load_all(RESULTS)
    goals = {f"{op.name}.{case.label}": case.goal_us for op, case in operator_cases()}
    results = [dataclasses.replace(r, goal_us=goals.get(r.case, r.goal_us)) for r in report.results]
    return dataclasses.replace(report, results=results)


def operator_cases() -> list[tuple[Operator, Benchmark]]:
    """All cases that `tile-kernels bench` measures."""
    return [(op, case) for op in all_ops() for case in op.cases.benchmarks]


def has_changed(case: str, measured: str) -> bool:
    """Whether the kernel of a case is another one than on a date."""
    return any(
        measured < date and f"{case}.".startswith(f"{name}.") for name, date in CHANGED.items()
    )


@functools.cache
def changed_cases() -> frozenset[str]:
    """The cases whose kernels have changed since they were measured."""
    reports = [benchmark.load(path) for path in RESULTS.glob("*.json")]
    return frozenset(
        r.case
        for report in reports
        for r in report.results
        if has_changed(r.case, report.machine["date"])
    )


def device_time(result: benchmark.Result) -> str:
    """The device time of a case, marked if its kernel is another one today."""
    return f"{result.device_us}" + CHANGED_MARK * (result.case in changed_cases())


def goals() -> list[str]:
    """How many goals of operators are met, and those that are missed by more than noise."""
    report = operator_report()
    with_goal = [(r, r.device_us / r.goal_us) for r in report.results if r.goal_us and r.device_us]
    met = sum(ratio <= 1 for _, ratio in with_goal)
    missed = [(r, ratio) for r, ratio in with_goal if ratio > 1 + NOISE]
    measured = {r.case for r in report.results}
    without = [
        f"`{op.name}.{case.label}` ({case.goal_us:g} us)"
        for op, case in operator_cases()
        if case.goal_us and f"{op.name}.{case.label}" not in measured
        and not op.name.startswith(MEASURED_APART)
    ]  # fmt: skip
    changed = sum(r.case in changed_cases() for r, _ in with_goal)
    return [
        f"Of {len(with_goal)} goals that were measured, {met} are met, "
        f"{len(with_goal) - met - len(missed)} are missed by up to {100 * NOISE:.0f} %, and "
        f"{len(missed)} by more:",
        "",
        "| case | goal, us | us | over the goal |",
        "|---|---|---|---|",
        *(
            f"| `{r.case}` | {r.goal_us:g} | {device_time(r)} | {100 * (ratio - 1):.0f} % |"
            for r, ratio in missed
        ),
        "",
        f"{CHANGED_MARK.strip()} marks times of kernels that have changed since then, which are "
        f"{changed} of the {len(with_goal)}: whether these meet their goals today has not been "
        "measured.",
        "",
        f"Goals that have not been measured at all: {', '.join(without)}.",
    ]


HOST_US, HOST_US_PER_RESULT, NEW_SIZE_US = 15, 5, 10  # goals of the host


def host_times() -> list[str]:
    """The operators whose repeated calls cost the host more than their goal; new token counts."""
    run = json.loads((RESULTS.parent / f"host_times.{RESULTS.name}.json").read_text())
    times = run["host_us"]
    rows = []
    for op in all_ops():
        if op.name in times:
            written = tensors_in(op.outcome(op.function, op.cases.ordinary().build("meta")))
            goal = HOST_US + HOST_US_PER_RESULT * len(written)
            if times[op.name]["repeated_us"] > goal:
                rows.append(f"| `{op.name}` | {goal} | {times[op.name]['repeated_us']} |")
    new = {name: each["new_size_us"] - each["repeated_us"] for name, each in times.items()}
    slowest = max(new, key=new.__getitem__)
    return [
        f"{machine_line(run['machine'])} Of {len(times)} operators, {len(times) - len(rows)} meet "
        f"the goal of {HOST_US} us plus {HOST_US_PER_RESULT} us for each tensor that they write. "
        "The others:",
        "",
        "| operator | goal, us | us |",
        "|---|---|---|",
        *rows,
        "",
        "A call with a token count that was not seen before evaluates the checks and the shapes of "
        f"the results again. The goal of {NEW_SIZE_US} us more than a repeated call is met by "
        f"{sum(us <= NEW_SIZE_US for us in new.values())} operators and **missed** by the others: "
        f"the median of all is {statistics.median(new.values()):.0f} us more, and "
        f"`{slowest}` takes {new[slowest]:.0f} us more.",
    ]


def benchmarks() -> list[str]:
    """For each family a picture, and a table with one row per measured case.

    A column of references that nobody measured is left out.
    """
    report = operator_report()
    columns = {"eager us": "reference_us", "compiled us": "reference_compiled_us"}
    columns = {
        title: field
        for title, field in columns.items()
        if any(getattr(r, field) for r in report.results)
    }
    machine = report.machine
    versions = ", ".join(f"{name} {machine[name]}" for name in ("torch", "tilelang", "cuda"))
    lines = [
        f"{machine['device']} beside {machine['cpu']}; {versions}; copy bandwidth "
        f"{report.copy_gb_per_s:.0f} GB/s; newest file of {machine['date']}.",
    ]
    family = ""
    for r in report.results:
        if r.family != family:
            family = r.family
            lines += [
                "",
                f"### {family}",
                "",
                f"![times of {family}](measured/{RESULTS.name}.{family}.svg)",
                "",
                f"| {' | '.join(['case', 'us', 'goal', 'of copy', 'host us', *columns])} |",
                "|---" * (5 + len(columns)) + "|",
            ]
        goal = "-" if r.goal_us is None else f"{r.goal_us}"
        met = " (missed)" if r.goal_us and r.device_us and r.device_us > r.goal_us else ""
        share = f"{100 * (r.copy_fraction or 0):.1f} %"
        references = (getattr(r, field) or "-" for field in columns.values())
        times = " | ".join(map(str, (r.host_us, *references)))
        case = r.case.removeprefix(f"{family}.")
        lines.append(f"| `{case}` | {device_time(r)} | {goal}{met} | {share} | {times} |")
    return lines


def compute_bound() -> list[str]:
    """Operators whose arithmetic takes longer than their memory traffic, and what they reach."""
    report = operator_report()
    rows = []
    for op, case in operator_cases():
        result = next((r for r in report.results if r.case == f"{op.name}.{case.label}"), None)
        if result is None or not result.device_us or "causal" in case.label:
            continue  # the cost of a causal case counts products that are masked
        arguments = case.build("meta")
        cost = op.cost(**arguments)
        if not cost.flops:
            continue
        peak = PEAK_TFLOPS[min(x.element_size() for x in tensors_in(arguments))]
        if cost.flops / peak / 1e12 > cost.bytes / report.copy_gb_per_s / 1e9:
            rate = cost.flops / result.device_us / 1e6
            rows.append((result.case, device_time(result), rate, peak))
    gemm = json.loads((RESULTS.parent / f"gemm.{RESULTS.name}.json").read_text())
    for line in gemm["results"]:
        peak = PEAK_TFLOPS[2 if "bf16" in line["case"] else 1]
        ours = line["name"] == "tile_kernels" and "us" in line
        if ours and line["tflops"] / peak > line["gb_per_s"] / gemm["copy_gb_per_s"]:
            rows.append((f"gemm.{line['case']}", str(line["us"]), line["tflops"], peak))
    return [
        "| case | us | TFLOP/s | peak | of peak |",
        "|---|---|---|---|---|",
        *(
            f"| `{case}` | {us} | {rate:.0f} | {peak} | {100 * rate / peak:.0f} % |"
            for case, us, rate, peak in rows
        ),
    ]


def both_packages() -> dict[str, Any] | None:
    """What `benchmarks.tilekernels` wrote; None before a run has measured times."""
    path = RESULTS.parent / f"tilekernels.{RESULTS.name}.json"
    run = json.loads(path.read_text()) if path.exists() else {"results": {}}
    timed = any("us" in found for each in run["results"].values() for found in each.values())
    return run if timed else None


def record() -> dict[str, Any]:
    """An earlier run of both packages, which was copied by hand."""
    return json.loads(OTHERS.read_text())


def compared() -> list[tuple[str, float, float]]:
    """Cases of a run of both packages: TileKernels' device time and ours, in microseconds."""
    run = both_packages()
    if run is None:
        here = record()["here_us"]
        return [(case, there, here[case]) for case, there in record()["us"].items()]
    return [
        (f"{version} {case}", found["their_us"], found["us"])
        for version, results in run["results"].items()
        for case, found in results.items()
        if "us" in found
    ]


def _balance(cases: list[tuple[str, float, float]]) -> str:
    """How many cases differ by more than noise, and the mean ratio."""
    ratios = [there / here for _, there, here in cases]
    faster = sum(ratio > 1 + NOISE for ratio in ratios)
    slower = sum(ratio < 1 - NOISE for ratio in ratios)
    return (
        f"{faster} are faster here by more than {100 * NOISE:.0f} %, {slower} are slower by more "
        f"than that, and {len(ratios) - faster - slower} are equally fast within it. The geometric "
        f"mean of all ratios is {statistics.geometric_mean(ratios):.2f}"
    )


def ratio_line() -> list[str]:
    """What the README says of the run of both packages."""
    run, cases = both_packages(), compared()
    date = run["machine"]["date"][:10] if run else record()["date"]
    text = (
        f"Of {len(cases)} cases that DeepSeek's TileKernels has too, {_balance(cases)} "
        f"([one run of both packages](docs/comparison.md#times) on {date})."
    )
    return textwrap.wrap(text, 140, break_long_words=False, break_on_hyphens=False)


def provenance() -> list[str]:
    """The run of both packages, and what was not measured or differs."""
    run = both_packages()
    if run is None:
        found = record()
        return textwrap.wrap(
            f"Both packages were measured in one run on {found['date']} on one {found['device']} "
            f"with a copy bandwidth of {found['copy_gb_per_s']} GB/s: {found['package']}, and this "
            f"package ({found['method']}). The numbers were {found['source']}. The last column has "
            "what this package's [benchmark](benchmarks.md) measured in later runs; \N{DAGGER} "
            "marks kernels that have changed since then.",
            120,
            break_long_words=False,
            break_on_hyphens=False,
        )
    machine, versions, others = run["machine"], [], []
    for version, results in run["results"].items():
        versions.append(f"{version} with TileLang {run['packages'][version]['tilelang']}")
        for case, found in results.items():
            why = found.get("error") or f"results: {found['results']}"
            if why not in ("results: exact", "results: close"):
                others.append(f"- `{version} {case}`: {why}")
    return [
        "`python -m benchmarks.tilekernels` measured both packages in one run: TileKernels "
        f"{', '.join(versions)}; here torch {machine['torch']}, TileLang {machine['tilelang']}; "
        f"{machine['device']}, copy bandwidth {run['copy_gb_per_s']:.0f} GB/s; {machine['date']}.",
        *(["", "Not measured, or with other results:", "", *others] if others else []),
    ]


def comparison() -> list[str]:
    """One row per case that both were measured with, and how many differ by more than noise."""
    cases = compared()
    later = {} if both_packages() else {r.case: r for r in operator_report().results}
    lines = [
        f"Of {len(cases)} cases, {_balance(cases)}.",
        "",
        "| case | TileKernels, us | here, us | TileKernels / here |"
        + " here, later, us |" * bool(later),
        "|---" * (4 + bool(later)) + "|",
    ]
    for case, there, here in cases:
        line = f"| `{case}` | {there} | {here} | {there / here:.2f} |"
        if later:
            line += f" {device_time(later[case]) if case in later else '-'} |"
        lines.append(line)
    return lines


class Rival(NamedTuple):
    """A case of `benchmarks.rivals`, our time in microseconds, another library and its time."""

    case: str
    us: float
    name: str
    other_us: float


def rival_results() -> dict[str, Any] | None:
    """What `benchmarks.rivals` wrote; None before its first run."""
    path = RESULTS.parent / f"rivals.{RESULTS.name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def rivals() -> list[Rival]:
    """The times of other libraries beside ours, measured in one run."""
    found = []
    for case in (rival_results() or {"results": {}})["results"].values():
        times = {line["name"]: line["us"] for line in case["lines"] if "us" in line}
        found += [
            Rival(case["title"], times["tile_kernels"], name, us)
            for name, us in times.items()
            if "tile_kernels" in times and not name.startswith("tile_kernels")
        ]
    return found


def rival_table() -> list[str]:
    """One row for each case and library of `benchmarks.rivals`."""
    run = rival_results()
    if run is None:
        return ["Not measured yet: `python -m benchmarks.rivals`."]
    machine = run["machine"]
    names = ("torch", "liger_kernel", "torchao", "triton")
    versions = ", ".join(f"{name} {machine[name]}" for name in names if machine.get(name))
    from benchmarks.rivals import CASES, title_of

    missing = [title_of(name) for name in CASES if name not in run["results"]]
    without = ", ".join(name for name in run["left_out"] if name not in CASES)
    return [
        f"{machine['device']}; {versions}; copy bandwidth {run['copy_gb_per_s']:.0f} GB/s; "
        f"{machine['date']}{f'; without {without}' if without else ''}.",
        *(["", "The run did not reach these cases: " + "; ".join(missing) + "."] * bool(missing)),
        "",
        "| case | here, us | other | its time, us | other / here |",
        "|---|---|---|---|---|",
        *(
            f"| {r.case} | {r.us} | `{r.name}` | {r.other_us} | {r.other_us / r.us:.2f} |"
            for r in rivals()
        ),
    ]


def layer_runs() -> list[dict[str, Any]]:
    """What `benchmarks.layers` wrote, run by run: the last run of each case."""
    paths = sorted(RESULTS.parent.glob(f"layers*.{RESULTS.name}.json"))
    return newest([json.loads(path.read_text()) for path in paths])


def newest(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The runs by date, each with the cases that no later one has, so that none mixes two runs."""
    runs = sorted(runs, key=lambda run: run["machine"]["date"])
    kept = []
    for i, run in enumerate(runs):
        later = {result["case"] for other in runs[i + 1 :] for result in other["results"]}
        results = [result for result in run["results"] if result["case"] not in later]
        if results:
            kept.append({**run, "results": results})
    return kept


def layer_times(runs: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, dict[str, Any]]]:
    """The results of forms by name, for each case and kind of step."""
    found: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for result in (result for run in runs for result in run["results"]):
        if "wall_us" in result:
            found.setdefault((result["case"], result["step"]), {})[result["form"]] = result
    return found


def machine_line(machine: dict[str, str], *others: str) -> str:
    """Machine, versions, also of other packages, and date of a run."""
    names = (*others, "torch", "tilelang", "cuda")
    versions = ", ".join(f"{name} {machine[name]}" for name in names)
    return f"{machine['device']} beside {machine['cpu']}; {versions}; {machine['date']}."


def in_graphs(forms: dict[str, dict[str, Any]], name: str) -> dict[str, Any] | None:
    """The fastest variant of a form as a CUDA graph or compiled, itself not counted."""
    others = [result for form, result in forms.items() if form.startswith(f"{name}, ")]
    return min(others, key=lambda result: result["wall_us"], default=None)


# What compiled PyTorch's wall time is to be, as a multiple of that with kernels.
LAYER_GOALS = {"mhc": 3.0, "moe": 1.5, "engram": 3.0, "block": 1.7, "demo": 1.0}
# And the host time of a step with kernels, in milliseconds.
LAYER_HOST_GOALS_MS = {("mhc", "training"): 0.25, ("moe", "training"): 0.3}
OURS = ("kernels", "bf16", "fp8")  # forms with the kernels of this package
PLAIN = ("plain", "compiled")  # and those without


def layers() -> list[str]:
    """One row per layer, precision and step: wall times, and what they are to compiled PyTorch."""
    runs = layer_runs()
    if not runs:
        return ["Not measured yet: `python -m benchmarks.layers`."]
    lines = ["Each layer was measured in one run:", ""]
    for run in runs:
        names = ", ".join(f"`{name}`" for name in dict.fromkeys(r["case"] for r in run["results"]))
        lines.append(f"- {names}: {machine_line(run['machine'])}")
    times = layer_times(runs)
    measured = {case for case, _ in times}
    without = [
        f"`{case}`" + (f" (goal {goal:g}x)" if goal else "")
        for case, goal in ((case, layer_goal(case)) for case in layer_cases())
        if case not in measured
    ]
    if without:
        lines.append(f"- not measured yet: {', '.join(without)}.")
    lines += [
        "",
        "| layer | step | plain | compiled | graph | kernels | graph | speedup | best/best "
        "| goal |",
        "|---" * 10 + "|",
    ]
    for (case, step), forms in times.items():
        rivals = [result for form, result in forms.items() if form.split(", ")[0] in PLAIN]
        rival = min(result["wall_us"] for result in rivals)
        for name in OURS:
            if name not in forms:
                continue
            columns = [forms.get("plain"), forms.get("compiled"), in_graphs(forms, "compiled")]
            columns += [forms[name], in_graphs(forms, name)]
            best = min(result["wall_us"] for result in columns[3:] if result)
            compiled = forms.get("compiled", forms["plain"])["wall_us"]
            label = f"`{case}`" if name == "kernels" else f"`{case}`, {name}"
            shown = " | ".join(f"{r['wall_us'] / 1e3:.2f}" if r else "-" for r in columns)
            speedups = compiled / forms[name]["wall_us"], rival / best
            ratios = " | ".join(f"{ratio:.2f}x" for ratio in speedups)
            goal = marked(max(speedups), layer_goal(case), "x", lower_is_better=False)
            lines.append(f"| {label} | {step} | {shown} | {ratios} | {goal} |")
    lines += [
        "",
        "| layer | step | compiled: host, device, MiB | kernels: host, device, MiB | goal of the "
        "host, ms |",
        "|---|---|---|---|---|",
    ]
    for (case, step), forms in times.items():
        for name in OURS:
            if name in forms:
                label = f"`{case}`" if name == "kernels" else f"`{case}`, {name}"
                pair = " | ".join(costs(forms.get(form)) for form in ("compiled", name))
                wanted = LAYER_HOST_GOALS_MS.get((case.partition(".")[0], step))
                goal = marked(forms[name]["host_us"] / 1e3, wanted, lower_is_better=True)
                lines.append(f"| {label} | {step} | {pair} | {goal} |")
    return lines


def layer_goal(case: str) -> float | None:
    """The goal of a case of `benchmarks.layers`, if it has one."""
    return LAYER_GOALS.get(case.partition(".")[0])


def layer_cases() -> list[str]:
    """The cases of `benchmarks.layers`."""
    from benchmarks.layers import CASES

    return list(CASES)


def costs(result: dict[str, Any] | None) -> str:
    """Host and device time in milliseconds, and memory."""
    if result is None:
        return "-"
    times = (f"{result[key] / 1e3:.2f}" for key in ("host_us", "device_us"))
    return ", ".join((*times, f"{result['memory_mib']:.0f}"))


def transformers_blocks() -> list[str]:
    """One row per block and step: as transformers has it, compiled, and with our operators."""
    path = RESULTS.parent / f"transformers.{RESULTS.name}.json"
    if not path.exists():
        return ["Not measured yet: `python -m benchmarks.transformers_block`."]
    content = json.loads(path.read_text())
    names = ("plain", "compiled", "kernels", "kernels, compiled")
    lines = [
        machine_line(content["machine"], "transformers"),
        "",
        "| block | step | before, ms | before, compiled | after `apply` | after, compiled "
        "| before/after | both compiled | MiB: before, after |",
        "|---" * 9 + "|",
    ]
    steps: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for result in content["results"]:
        if "wall_us" in result:
            steps.setdefault((result["case"], result["step"]), {})[result["form"]] = result
    for (case, step), forms in steps.items():
        if "plain" not in forms or "kernels" not in forms:
            continue
        walls = [forms[name]["wall_us"] if name in forms else None for name in names]
        shown = " | ".join(f"{wall / 1e3:.2f}" if wall else "-" for wall in walls)
        pairs = zip(walls[:2], walls[2:])
        ratios = " | ".join(f"{w / ours:.2f}x" if w and ours else "-" for w, ours in pairs)
        memory = ", ".join(f"{forms[name]['memory_mib']:.0f}" for name in ("plain", "kernels"))
        lines.append(f"| `{case}` | {step} | {shown} | {ratios} | {memory} |")
    sizes = {result["case"]: result["sizes"] for result in content["results"]}
    lines.append("")
    for case, size in sizes.items():
        lines.append(f"- `{case}`: " + ", ".join(f"{name} {n}" for name, n in size.items()))
    return lines


def streams() -> list[str]:
    """One row per size: a layer with streams beside the plain one, device times."""
    times = layer_times(layer_runs())
    cases = [case for case, step in times if case.startswith("mhc.") and step == "training"]
    if not cases:
        return ["Not measured yet: `python -m benchmarks.layers`."]
    lines = [
        "| tokens, streams, columns | plain, us | streams, us | plain in training | streams |",
        "|---|---|---|---|---|",
    ]
    for case in cases:
        forms = [
            times[case, step][form]
            for step in ("forward", "training")
            for form in ("one stream, plain", "kernels")
        ]
        size = ", ".join(str(size) for size in forms[0]["sizes"].values())
        lines.append(f"| {size} | {' | '.join(str(form['device_us']) for form in forms)} |")
    return lines


def fp8() -> list[str]:
    """The expert layer in both precisions beside plain PyTorch: wall times and memory."""
    times = {
        key: forms for key, forms in layer_times(layer_runs()).items() if key[0].startswith("moe.")
    }
    names = ("plain", "compiled", "bf16", "bf16, CUDA graph", "fp8", "fp8, CUDA graph")
    lines = [
        "| tokens, hidden, intermediate, experts, top | step | plain | compiled | `bf16` | graph "
        "| `fp8` | graph | MiB: compiled, `bf16`, `fp8` | |",
        "|---" * 10 + "|",
    ]
    for (_, step), forms in times.items():
        size = ", ".join(str(size) for size in forms["plain"]["sizes"].values())
        shown = " | ".join(f"{forms[name]['wall_us'] / 1e3:.2f}" for name in names)
        memory = ", ".join(
            f"{forms[name]['memory_mib']:.0f}" for name in ("compiled", "bf16", "fp8")
        )
        ratio = forms["compiled"]["wall_us"] / forms["fp8"]["wall_us"]
        lines.append(f"| {size} | {step} | {shown} | {memory} | {ratio:.2f}x |")
    return lines if times else ["Not measured yet: `python -m benchmarks.layers`."]


def demo() -> list[str]:
    """A training step of the small model, of its own size and a larger one, in every form."""
    lines: list[str] = []
    found = ((run, *each) for run in layer_runs() for each in layer_times([run]).items())
    for run, (case, _), forms in found:
        if case.partition(".")[0] != "demo":
            continue
        sizes = next(iter(forms.values()))["sizes"]
        letters = sizes["rows"] * sizes["length"]
        lines += [
            *([""] if lines else []),
            f"`{case}`: {sizes['rows']} texts of {sizes['length']} letters, {sizes['hidden']} "
            f"channels. {machine_line(run['machine'])}",
            "",
            "| training step | ms | host, ms | letters per second |",
            "|---|---|---|---|",
        ]
        for form, result in forms.items():
            speed = round(1e6 * letters / result["wall_us"])
            times = " | ".join(f"{result[key] / 1e3:.2f}" for key in ("wall_us", "host_us"))
            lines.append(f"| {form} | {times} | {speed} |")
    return lines


def torch_versions() -> list[str]:
    """What `tools/torch_versions.py` wrote: versions of PyTorch, and what ran with each."""
    run = json.loads((ROOT / "docs" / "measured" / "torch_versions.json").read_text())
    rows = []
    for name in sorted(run, key=lambda each: [int(n) for n in re.findall(r"\d+", each)]):
        each = run[name]
        said = each.get("reason", "")
        if each["result"] == "passed":
            said = f"{each['references']} cases of references, {each['tests']} tests"
        rows.append(f"| {name} | {each['result']} | {said} |")
    return ["| PyTorch | here | |", "|---|---|---|", *rows]


def integrations() -> list[str]:
    """What `tools/check_integrations.py` wrote: packages, and what of them was compared."""
    run = json.loads((ROOT / "docs" / "measured" / "integrations.json").read_text())
    machine = run["machine"]
    return [
        f"With PyTorch {machine['torch']}, Python {machine['python']}:",
        "",
        "| package | version | compared |",
        "|---|---|---|",
        *(
            f"| {name} | {each['version']} | {'; '.join(each['checked'])} |"
            for name, each in run["packages"].items()
        ),
    ]


def startup() -> list[str]:
    """What `benchmarks/startup.py` wrote: a process without TileLang, and host times beside its."""
    file = RESULTS.parent / f"startup.{RESULTS.name}.json"
    if not file.exists():
        return ["Not measured yet."]
    run = json.loads(file.read_text())
    machine, calls = run["machine"], run["first_call_s"]
    graphs = sum(run["graph_equals"].values())
    equal = run["equals_tilelang"]
    rows = [
        f"| `{name}` | {1e3 * calls[name]:.1f} | "
        + " | ".join(
            f"{run[column][name]:.1f}" if name in run[column] else ""
            for column in ("host_us", "host_us_tilelang", "launch_us", "launch_us_tilelang")
        )
        + " |"
        for name in calls
    ]
    seconds = run["all_import_to_first_result_s"]
    slower = [
        run["host_us"][name] - run["host_us_tilelang"][name]
        for name in calls
        if run["host_us"][name] > run["host_us_tilelang"][name]
    ]
    goals = [
        f"Goal of at most 0.3 s to the first result: **{'met' if max(seconds) <= 0.3 else 'missed'}"
        f"** ({', '.join(f'{each:.2f}' for each in seconds)} s in the processes in turn).",
        f"Goal of no more host time than with TileLang's launches: **missed**: {len(slower)} of "
        f"{len(calls)} calls take more, by {min(slower):.1f} to {max(slower):.1f} us."
        if slower
        else "Goal of no more host time than with TileLang's launches: **met**.",
    ]
    if "compiled_first_result_s" in run:
        before = run["compiled_first_result_s"]
        goals.append(
            f"With TileLang and nvcc, without any cache, the first result takes {before:.1f} s."
        )
    return [
        f"{machine['device']}, {machine['cpu']}; PyTorch {machine['torch']}, Python "
        f"{machine['python']}; {machine['date']}. From `import tile_kernels` to the first result: "
        f"**{run['import_to_first_result_s']:.2f} s**, after `import torch` "
        f"({run['import_torch_s']:.1f} s) and the creation of a CUDA context "
        f"({run['cuda_context_s']:.1f} s), in a process without TileLang and nvcc. CUDA graphs of "
        f"{graphs} of {len(calls)} calls gave the same bits; {sum(equal.values())} of {len(equal)} "
        "results were bit for bit those of TileLang's own launches.",
        "",
        "| call | first call, ms | host time, us | launched by TileLang | launch alone, us "
        "| by TileLang |",
        "|---|---|---|---|---|---|",
        *rows,
        "",
        *(f"- {goal}" for goal in goals),
    ]


def emulator() -> list[str]:
    """What `benchmarks/emulator.py` wrote: planted bugs, Python lines, times beside Triton's."""
    run = json.loads((RESULTS.parent / "emulator.json").read_text())
    machine, planted, found = run["machine"], run["planted"], run["python_lines"]
    right = sum(bug["diagnosed"] for bug in planted.values())
    versions = ", ".join(f"{name} {machine[name]}" for name in ("torch", "tilelang", "triton"))
    statements = sum(found.values())
    rows = [
        f"| {name} | `{bug['message'].split(' [block')[0]}` | `{bug['line']}` |"
        for name, bug in planted.items()
    ]
    times = [
        f"| {name} | {t['check_ms']:.0f} | {t['fast_ms']:.1f} | {t['triton_ms']:.0f} | "
        f"{t['triton_ms'] / t['check_ms']:.1f} | {t['build_check_ms'] / 1e3:.1f} |"
        for name, t in run["times"].items()
    ]
    return [
        f"{right} of {len(planted)} classes are diagnosed. Of {statements} generated statements of "
        f"these kernels {found['exact']} lead to their Python line, {found['near']} (inserted "
        f"barriers and the like) to the line before, {found['none']} to none.",
        "",
        "| planted | message | Python line |",
        "|---|---|---|",
        *rows,
        "",
        "Times of warm calls in milliseconds of processor time, and the build of a new kernel in "
        f"seconds ({machine['cpu']}; {versions}; {machine['date']}):",
        "",
        "| | check | fast | Triton's interpreter | Triton / check | build, s |",
        "|---|---|---|---|---|---|",
        *times,
        "",
        *_scaling(run),
    ]


def _scaling(run: dict[str, Any]) -> list[str]:
    """Cost of the checks by the amount of data."""
    after = run["scaling"]
    smallest, *_, largest = list(after)[1:]
    data = int(largest) / int(smallest)
    growth = after[largest]["check_ms"] / after[smallest]["check_ms"]
    return [
        f"The cost of the checks grows with the data: a vector add of {data:.0f} times as many "
        f"elements ({smallest} to {largest}) takes {growth:.1f} times as long. Processor time, "
        f"{run['dates']['scaling']}:",
        "",
        "| elements | check, ms | ns per element | first call, ms |",
        "|---|---|---|---|",
        *(
            f"| {n} | {t['check_ms']:.1f} | {t['ns_per_element']:.0f} | {t['first_ms']:.0f} |"
            for n, t in after.items()
        ),
    ]


def corpus() -> list[str]:
    """How the kernels of `tests/emulator/corpus` end, by version of TileLang."""
    runs = json.loads((RESULTS.parent / "emulator_corpus.json").read_text())
    newest, *older = sorted(runs, key=lambda v: [int(part) for part in v.split(".")], reverse=True)
    families = Counter(name.partition(".")[0] for name in runs[newest]["outcomes"])
    rows = []
    for version in (newest, *older):
        n = runs[version]["summary"]
        rows.append(
            f"| {version} | {n['kernels']} | {n['right']} | {n['refused']} | {n['wrong']} | "
            f"{n['reported']} | {n['error']} |"
        )
    reasons: dict[str, list[str]] = {}
    for version in older:
        for name, message in runs[version]["messages"].items():
            text = re.sub(r" \(\w+\.\w+:\d+\)$", "", message)
            reasons.setdefault(f"`{name}`: {text.partition(' [block')[0]}", []).append(version)
    return [
        "Families: " + ", ".join(f"{name} {count}" for name, count in families.items()) + ". Check "
        f"mode, torch {runs[newest]['settings']['torch']}, {runs[newest]['settings']['date']}.",
        "",
        "| TileLang | kernels | right | refused | wrong | reported | other error |",
        "|---|---|---|---|---|---|---|",
        *rows,
        "",
        "What is not right with the older versions: arguments that their `T.Kernel` or other "
        "functions do not take, and code that they generate with a mistake:",
        "",
        *(f"- {reason} ({', '.join(versions)})" for reason, versions in reasons.items()),
    ]


def _short(message: str) -> str:
    """A message of the emulator without the kernel's name and the place in the launch."""
    text = message.partition("\n")[0].partition(" [block")[0]
    return re.sub(r"^\w*kernel\w*: ", "", text)


def elsewhere() -> list[str]:
    """How kernels of other projects end (`emulator_foreign.py`, `emulator_examples.py`)."""
    ends = ("right", "reported", "refused", "wrong", "too slow", "other error")
    packages = json.loads((RESULTS.parent / "emulator_foreign.json").read_text())
    examples = json.loads((RESULTS.parent / "emulator_examples.json").read_text())
    counted, rows, others = Counter[str](), [], []

    def row(name: str, version: str, counts: Mapping[str, int]) -> None:
        counted.update({end: counts.get(end, 0) for end in ends})
        called = sum(counts.get(end, 0) for end in ends)
        cells = [name, version, called, *(counts.get(end, 0) for end in ends)]
        rows.append("| " + " | ".join(map(str, cells)) + " |")

    for version, package in sorted(packages.items(), reverse=True):
        runs = {o["run"]["tilelang"]: o["run"] for o in package["operators"].values()}
        row(f"operators of TileKernels {version}", ", ".join(runs), package["summary"]["operators"])
        for name, operator in sorted(package["operators"].items()):
            texts = {f"{c['outcome']}: {_short(c['text'])}" for c in operator["calls"]
                     if c["outcome"] != "right"}  # fmt: skip
            others += [f"- `{name}` of {version}, {text}" for text in sorted(texts)]
    run = examples["run"]
    row("tests of TileLang's examples", run["tilelang"], examples["summary"])
    for file, tests in sorted(examples["files"].items()):
        for test, entry in sorted(tests.items()):
            if entry["outcome"] in ends[1:]:
                name = f"{file.partition('/')[0]}: {test.rpartition('::')[2]}"
                others.append(f"- `{name}`, {entry['outcome']}: {_short(entry['text'])}")
    total, slow = counted.total(), counted["too slow"]
    right, summary = counted["right"], examples["summary"]
    left_out = summary["skipped"] + summary["needs more"]
    share = f"{100 * right / total:.1f} %"
    if slow:
        share += f", and {100 * right / (total - slow):.1f} % of those that ended"
    return [
        f"Check mode, torch {run['torch']}, {run['time']}: {right} of {total} ran right ({share}). "
        f"Of the tests of examples, {left_out} are left out and {summary['no kernel']} launch no "
        "kernel.",
        "",
        "| kernels | TileLang | run | " + " | ".join(ends) + " |",
        "|---" * (3 + len(ends)) + "|",
        *rows,
        "",
        "Those that did not run right:",
        "",
        *others,
    ]


def sanitizer() -> list[str]:
    """What compute-sanitizer says about the planted bugs (`benchmarks/sanitizer.py`)."""
    run = json.loads((RESULTS.parent / "sanitizer.nvidia-h200.json").read_text())

    def said(tools: dict[str, Any]) -> str:
        found = [f"{tool}: `{r['message']}`" for tool, r in tools.items() if r["message"]]
        if found:
            return "; ".join(re.sub(r" (at|in) .*`", "`", text) for text in found)
        hanging = [tool for tool, r in tools.items() if r["hangs"]]
        if len(hanging) == len(tools):
            return "nothing: the kernel hangs"
        return "nothing" + (f"; hangs under {' and '.join(hanging)}" if hanging else "")

    planted, without = run["planted"], run["without"]
    texts = {name: said(tools) for name, tools in planted.items()}
    named = sum(not text.startswith("nothing") for text in texts.values())
    hang = sum(text.startswith("nothing: ") for text in texts.values())
    false = sum(bool(r["message"]) for tools in without.values() for r in tools.values())
    runs = sum(len(tools) for tools in without.values())
    version = run["compute_sanitizer"].split(" (")[0].removeprefix("Version ")
    return [
        f"compute-sanitizer {version} on an {run['device'].split(',')[0]}, {run['date']}, each "
        f"kernel under each of the four tools: it reports {named} of {len(planted)} planted bugs, "
        f"{hang} hang until they are killed, and {false} of {runs} runs of correct kernels have a "
        "report.",
        "",
        "| planted | compute-sanitizer |",
        "|---|---|",
        *(f"| {name} | {text} |" for name, text in texts.items()),
    ]


def marked(value: float, goal: float | None, unit: str = "", *, lower_is_better: bool) -> str:
    """A goal, and whether a measurement misses it; empty without one."""
    if goal is None:
        return ""
    missed = value > goal if lower_is_better else value < goal
    return f"{goal:g}{unit}" + " (missed)" * missed


def sparse_attention() -> list[str]:
    """Attention over chosen rows, forward and backward (`benchmarks/sparse_attention.py`)."""
    run = json.loads((RESULTS.parent / "sparse_attention.nvidia-h200.json").read_text())
    machine = run["machine"]
    rows = []
    for r in run["rows"]:
        direction, _, name = r["case"].partition(".")
        if direction == "decode":  # on the page on serving, by splits
            continue
        goal = marked(r["tflops"], r["goal_tflops"], lower_is_better=False)
        rows.append(f"| {direction} | {name} | {r['us']:.0f} | {r['tflops']:.0f} | {goal} |")
    return [
        f"{machine['device']}, torch {machine['torch']}, tilelang {machine['tilelang']}, "
        f"{machine['date']}; 4096 queries, with `hca` 8192 in one sequence; time of the kernels:",
        "",
        "| | heads and rows | us | TFLOP/s | goal |",
        "|---|---|---|---|---|",
        *rows,
    ]


# The goal of decoding is the larger of two times: of the products at this rate, and of a copy of
# the bytes at 85 % of the bandwidth with this added.
DECODE_TFLOPS, DECODE_LATENCY_US = 400.0, 10.0
SPLITS: dict[str | int, str] = {"fixed": "default", "plan": '`"balanced"`'}
SPLITS |= {keys: str(keys) for keys in (640, 384, 256, 128)}
LAYOUT_NAMES = {"bf16": "bfloat16 pages", "v3.2": '`"v3.2"`'}


def decode() -> list[str]:
    """Decoding by splits (`benchmarks/decode.py`): times, and the best of a row beside a goal."""
    run = json.loads((RESULTS.parent / f"decode.{RESULTS.name}.json").read_text())
    machine = run["machine"]
    cases: dict[str, dict[Any, dict[str, Any]]] = {}
    for r in run["rows"]:
        # Splits of this length leave a list in one piece, as the default does.
        whole = r["splits"] == (2048 if r["case"].endswith("v3.2") else 1152)
        name = "fixed" if whole and not r["case"].endswith("+8192") else r["splits"]
        cases.setdefault(r["case"], {}).setdefault(name, r)
    rows = []
    for case, found in cases.items():
        requests, queries, heads, rest = case.split(".", 3)
        layout = next((name for name in LAYOUT_NAMES if rest.endswith(name)), "")
        keys = rest.removesuffix(layout).strip(".") or "128+1024"
        best = min(found.values(), key=lambda r: r["us"])
        products = best["us"] * best["tflops"] / DECODE_TFLOPS
        goal = max(products, best["copy_us"] + DECODE_LATENCY_US)
        times = [f"{found[name]['us']:.1f}" if name in found else "" for name in SPLITS]
        label = f"{requests[1:]} x {queries[1:]}, {heads[1:]} heads, {keys}"
        label += f", {LAYOUT_NAMES[layout]}" if layout else ""
        shown = marked(best["us"], round(goal, 1), lower_is_better=True)
        rows.append(f"| {label} | {' | '.join(times)} | {best['tflops']:.0f} | {shown} |")
    return [
        f"{machine['device']}, torch {machine['torch']}, tilelang {machine['tilelang']}, "
        f"{machine['date']}; microseconds of a call inside a CUDA graph, TFLOP/s of the fastest, "
        "and the goal in microseconds:",
        "",
        f"| requests x queries, heads, keys | {' | '.join(SPLITS.values())} | TFLOP/s | goal |",
        "|---" * (len(SPLITS) + 3) + "|",
        *rows,
    ]


def long_context() -> list[str]:
    """What `examples/long_context.py` found: keys in new texts, and sizes of caches."""
    run = json.loads((ROOT / "docs" / "measured" / "long_context.json").read_text())
    machine, sizes, kinds = run["machine"], run["sizes"], list(run["measured"])
    lines = [
        f"{machine['device']}, torch {machine['torch']}, {machine['date']}; texts of up to "
        f"{sizes['length']} tokens, models of {sizes['hidden']} channels; caches of a layer of "
        "4096 channels:",
        "",
    ]
    lines += ["| | " + " | ".join(kinds) + " |", "|---" * (1 + len(kinds)) + "|"]

    def row(name: str, values: list[str]) -> None:
        lines.append(f"| {name} | {' | '.join(values)} |")

    trained = [run["trained"][kind] for kind in kinds]
    row("keys found in new texts", [f"{100 * each['found']:.0f} %" for each in trained])
    row("steps of training", [str(len(each["losses"])) for each in trained])
    for length in run["caches"]["dense"]:
        if int(length) >= 2**14 and int(length).bit_length() % 2 == 1:
            values = [f"{run['caches'][kind][length] / 2**20:.1f}" for kind in kinds]
            row(f"cache of {length} tokens, MiB", values)
    return lines


def ep_on_hosts() -> list[str]:
    """Calls of `ElasticBuffer` over gloo beside the same exchange by hand (`benchmarks/ep.py`)."""
    run = json.loads((RESULTS.parent / "ep.amd-epyc.json").read_text())
    machine = run["machine"]
    lines = [
        f"{machine['cpu']}, torch {machine['torch']}, {machine['date']}:",
        "",
        "| processes | tokens | call | `ElasticBuffer`, ms | row per choice, ms | row per rank, ms "
        "| ratio to row per choice (goal 1.2) | ratio to row per rank |",
        "|---" * 8 + "|",
    ]
    for row in run["rows"]:
        times = " | ".join(f"{row[name]:.1f}" for name in ("ms", "plain_ms", "dedup_ms"))
        lines.append(
            f"| {row['ranks']} | {row['tokens']} | {row['what']} | {times} | {row['ratio']:.2f} "
            f"| {row['ms'] / row['dedup_ms']:.2f} |"
        )
    return lines


TABLES = {"operators": (ROOT / "docs" / "operators.md", operators)}
TABLES["arguments"] = (ROOT / "docs" / "moe.md", arguments)
TABLES["layer"] = (ROOT / "docs" / "mhc.md", streams)
TABLES["fp8"] = (ROOT / "docs" / "fp8-layer.md", fp8)
TABLES["layers"] = (ROOT / "docs" / "layers.md", layers)
TABLES["transformers"] = (ROOT / "docs" / "integrations" / "transformers.md", transformers_blocks)
TABLES["demo"] = (ROOT / "docs" / "demo.md", demo)
TABLES["comparison"] = (ROOT / "docs" / "comparison.md", comparison)
TABLES["ratio"] = (ROOT / "README.md", ratio_line)
TABLES["provenance"] = (ROOT / "docs" / "comparison.md", provenance)
TABLES["rivals"] = (ROOT / "docs" / "comparison.md", rival_table)
TABLES["goals"] = (ROOT / "docs" / "benchmarks.md", goals)
TABLES["benchmarks"] = (ROOT / "docs" / "benchmarks.md", benchmarks)
TABLES["host"] = (ROOT / "docs" / "benchmarks.md", host_times)
TABLES["compute"] = (ROOT / "docs" / "benchmarks.md", compute_bound)
TABLES["torch"] = (ROOT / "docs" / "release.md", torch_versions)
TABLES["integrations"] = (ROOT / "docs" / "integrations" / "index.md", integrations)
TABLES["startup"] = (ROOT / "docs" / "precompiled.md", startup)
TABLES["emulator"] = (ROOT / "docs" / "finding-bugs.md", emulator)
TABLES["sanitizer"] = (ROOT / "docs" / "finding-bugs.md", sanitizer)
TABLES["sparse_attention"] = (ROOT / "docs" / "attention.md", sparse_attention)
TABLES["elsewhere"] = (ROOT / "docs" / "finding-bugs.md", elsewhere)
TABLES["decode"] = (ROOT / "docs" / "serving.md", decode)
TABLES["long_context"] = (ROOT / "docs" / "attention.md", long_context)
TABLES["ep_on_hosts"] = (ROOT / "docs" / "ep.md", ep_on_hosts)
TABLES["corpus"] = (ROOT / "docs" / "finding-bugs.md", corpus)


def updated(name: str) -> str:
    """The page of a table with the part between its marks made anew."""
    page, make = TABLES[name]
    begin, end = (f"<!-- {name}: {mark} -->" for mark in ("begin", "end"))
    before, rest = page.read_text().split(begin)
    return before + "\n".join([begin, *make(), end]) + rest.split(end)[1]


def main() -> int:
    """Write the tables, or with `--check` only compare."""
    stale = [name for name, (page, _) in TABLES.items() if page.read_text() != updated(name)]
    if "--check" in sys.argv:
        for name in stale:
            sys.stderr.write(f"the table of {name} is stale: python docs/tables.py\n")
        return len(stale)
    for name in stale:
        TABLES[name][0].write_text(updated(name))
    return 0


if __name__ == "__main__":
    sys.exit(main())
