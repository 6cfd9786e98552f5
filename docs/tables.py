"""Write the generated tables of the documents: `python docs/tables.py [--check]`.

The README's operators come from the registry, the arguments on the page of routing from docstrings,
the numbers of the benchmark page, of the comparison, of a layer with streams and of the demo from
the results files.
"""

import inspect
import json
import re
import statistics
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tile_kernels import moe
from tile_kernels.runtime.operator import Operator
from tile_kernels.runtime.registry import all_ops
from tile_kernels.testing import benchmark

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "nvidia-h200"
OTHERS = ROOT / "benchmarks" / f"tilekernels.{RESULTS.name}.json"  # written by hand


def operators() -> list[str]:
    """One row per operator: its call, and the first sentence of its docstring."""

    def row(op: Operator) -> str:
        summary = (inspect.getdoc(op.function) or "").split("\n\n")[0].replace("\n", " ")
        return f"| `{op.name}({', '.join(op.signature.parameters)})` | {summary} |"

    return ["| operator | what it does |", "|---|---|", *(row(op) for op in all_ops())]


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


def benchmarks() -> list[str]:
    """For each family a picture, and a table with one row per measured case.

    A column of oracles that nobody measured is left out.
    """
    report = benchmark.load_all(RESULTS)
    columns = {"eager us": "oracle_us", "compiled us": "oracle_compiled_us"}
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
        oracles = (getattr(r, field) or "-" for field in columns.values())
        times = " | ".join(map(str, (r.host_us, *oracles)))
        case = r.case.removeprefix(f"{family}.")
        lines.append(f"| `{case}` | {r.device_us} | {goal}{met} | {share} | {times} |")
    return lines


def compared() -> list[tuple[str, float, float]]:
    """Cases that TileKernels was measured with: its device time and ours, in microseconds."""
    here = {r.case: r.device_us or 0 for r in benchmark.load_all(RESULTS).results}
    there = json.loads(OTHERS.read_text())["us"]
    return [(case, there[case], here[case]) for case in here if case in there]


def comparison() -> list[str]:
    """One row per case that both were measured with, and how often which is faster."""
    cases = compared()
    ratios = [there / here for _, there, here in cases]
    faster = sum(ratio >= 1 for ratio in ratios)
    return [
        f"{faster} of {len(cases)} cases are faster here; all of them together, by the geometric "
        f"mean, {statistics.geometric_mean(ratios):.2f} times as fast.",
        "",
        "| case | TileKernels, us | here, us | TileKernels / here |",
        "|---|---|---|---|",
        *(f"| `{case}` | {there} | {here} | {there / here:.2f} |" for case, there, here in cases),
    ]


def layer() -> list[str]:
    """One row per size: a layer with streams beside the plain one."""
    path = RESULTS / "mhc.layer.json"
    if not path.exists():
        return ["Not measured yet: `python -m benchmarks.mhc_layer`."]
    times = {r.case.removeprefix("mhc.layer."): r.device_us for r in benchmark.load(path).results}
    lines = [
        "| tokens, streams, columns | plain, us | streams, us | plain in training | streams |",
        "|---|---|---|---|---|",
    ]
    kinds = [
        f"{name}.{kind}" for kind in ("inference", "training") for name in ("plain", "streams")
    ]
    for size in dict.fromkeys(case.split(".")[0] for case in times):
        row = " | ".join(str(times[f"{size}.{kind}"]) for kind in kinds)
        lines.append(f"| {size.replace('x', ', ')} | {row} |")
    return lines


def demo() -> list[str]:
    """What a run of the small model reported: each way to train it, and its loss."""
    run = json.loads((RESULTS.parent / f"demo.{RESULTS.name}.json").read_text())
    machine = run["machine"]
    versions = ", ".join(f"{name} {machine[name]}" for name in ("torch", "tilelang", "cuda"))
    return [
        f"{machine['device']}; {versions}; {machine['date']}. {len(run['losses'])} steps, "
        f"{run['test_loss']:.3f} nats per letter on text it has not seen.",
        "",
        "| forward and backward | letters per second |",
        "|---|---|",
        *(f"| {way} | {speed:.0f} |" for way, speed in run["speeds"].items()),
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
    ]


TABLES = {"operators": (ROOT / "README.md", operators)}
TABLES["arguments"] = (ROOT / "docs" / "moe.md", arguments)
TABLES["layer"] = (ROOT / "docs" / "mhc.md", layer)
TABLES["demo"] = (ROOT / "docs" / "demo.md", demo)
TABLES["comparison"] = (ROOT / "docs" / "comparison.md", comparison)
TABLES["benchmarks"] = (ROOT / "docs" / "benchmarks.md", benchmarks)
TABLES["emulator"] = (ROOT / "docs" / "finding-bugs.md", emulator)


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
