"""DeepSeek's TileKernels beside this package in one run: `python -m benchmarks.tilekernels`.

Calls functions that both have with the same arguments: those of `tile_kernels` for version 1 and of
`tile_kernels.v2` for version 2. Measures the device time with a cold L2 cache on both sides, which
run in turn, in two processes; compares the results. Cases are the benchmarks of our operators whose
arguments the package has too, and hyper-connections through the functions that it has.

`benchmarks/foreign.py` says how to install the package into the folders that are the default of
`--installed`. What is not installed, not accepted or fails is recorded with its reason. The results
are a file `tilekernels.<device>.json`, written again after every case; a run of some cases has a
file with their names. No case is begun after `--seconds`. The table of docs/comparison.md shows the
file of all cases. `--prepare` only compiles, several cases at the same time.

Without a GPU the package's kernels are emulated with small arguments of the same kind, and results
are compared with our references, without times.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import foreign_arguments, preparation
from benchmarks.foreign import INSTALLED, ROOT, Case, Package, call, on, prepared
from tile_kernels.runtime.cases import Sample
from tile_kernels.runtime.operator import Operator
from tile_kernels.testing import benchmark, timing

DEFAULT = (INSTALLED / "1.0.0", INSTALLED / "2.1.0")
LISTED = (
    ROOT / "benchmarks" / "tilekernels.nvidia-h200.json"
)  # cases of an earlier run, measured first
AT_ONCE = 8  # processes that compile, each with the tensors of a case on the GPU


class Planned(NamedTuple):
    """A function of the package, calls of which the first that it accepts is measured, their names.

    The names are those of the arguments, where our operator may have more than the package.
    """

    function: str
    calls: Callable[[], Iterator[Case]]
    names: Callable[[], Iterable[str] | None] = tuple

    def known_to(self, package: Package) -> bool:
        """Whether the package has the function, with all of these arguments."""
        parameters, names = package.parameters(self.function), self.names()
        return parameters is not None and names is not None and set(names) <= set(parameters)


# ---- cases --------------------------------------------------------------------------------------


# Functions of TileKernels 1.0 for hyper-connections, and our operators of their two directions.
STEPS_1_0 = {
    "expand_to_mhc": ("expand_to_mhc", "expand_to_mhc_bwd"),
    "mhc_pre_apply_mix": ("mhc_pre_apply_mix", "mhc_pre_apply_mix_bwd"),
    "mhc_post": ("mhc_post_fwd", "mhc_post_bwd"),
    "mhc_pre_norm_fn": ("mhc_norm_fn_fwd", "mhc_norm_fn_bwd"),
    "sinkhorn_normalize": ("sinkhorn_normalize", "sinkhorn_normalize_bwd"),
    "mhc_head_compute_mix": ("mhc_head_compute_mix", "mhc_head_compute_mix_bwd"),
    "mhc_pre_split_mixes": ("mhc_pre_split_mixes", "mhc_pre_split_mixes_bwd"),
}


class Written(NamedTuple):
    """Calls of `foreign_arguments` in two sizes, and what is added to the names of the cases."""

    make: Callable[..., Iterator[tuple[str, Any, bool]]]
    small: tuple[int, ...]
    full: tuple[int, ...]
    label: str


WRITTEN = {
    "1": [
        Written(foreign_arguments.layers_1_0, (5, 1280), (4096, 7168), "4096x4x7168"),
        Written(foreign_arguments.mixes_1_0, (5,), (4096,), "4096x4"),
        Written(
            partial(foreign_arguments.recomputed, "modeling.mhc.ops"),
            (5, 1280, 3, 2), (4096, 4096, 10, 10), "10.10.4096x4x4096",
        ),
    ],
    "2": [
        Written(foreign_arguments.layers_2_1, (5, 1280, 2), (4096, 7168, 16), "4096x4x7168"),
        Written(foreign_arguments.mixes_2_1, (5,), (4096,), "4096x4"),
        Written(
            partial(foreign_arguments.recomputed, "mhc"),
            (5, 1280, 3, 2), (4096, 4096, 10, 10), "10.10.4096x4x4096",
        ),
        Written(foreign_arguments.swiglu_backward_2_1, (128, 256), (8192, 4096), "8192x4096"),
        Written(foreign_arguments.weight_scales_2_1, (8192, 256), (7168, 4096), "7168x4096"),
    ],
}  # fmt: skip


def planned(major: str, gpu: bool) -> dict[str, Planned]:
    """All cases of a version by name; those of the earlier run come first."""
    cases = {**_benchmarks(major, gpu), **_written(major, gpu)}
    listed = list(json.loads(LISTED.read_text())["us"])
    order = sorted(cases, key=lambda name: listed.index(name) if name in listed else len(listed))
    return {name: cases[name] for name in order}


def _benchmarks(major: str, gpu: bool) -> dict[str, Planned]:
    """The benchmarks of our operators."""
    found = {}
    calls_of = _full if gpu else _like
    for op, function in foreign_arguments.operators(major):
        for sample in op.cases.benchmarks:
            names = partial(foreign_arguments.given, op, sample, "meta", major)
            calls = calls_of(op, function, sample, major)
            found[f"{op.name}.{sample.label}"] = Planned(function, calls, names)
    return found


def _full(op: Operator, function: str, sample: Sample, major: str) -> Callable[[], Iterator[Case]]:
    def calls() -> Iterator[Case]:
        arguments = foreign_arguments.given(op, sample, "cuda", major)
        if arguments is not None:
            yield Case(function, sample.label, arguments)

    return calls


def _like(op: Operator, function: str, sample: Sample, major: str) -> Callable[[], Iterator[Case]]:
    """Small calls, first those with the same dtypes, names and flags."""

    def calls() -> Iterator[Case]:
        wanted = foreign_arguments.given(op, sample, "meta", major) or {}
        small = [c for c in foreign_arguments.written(major) if c.function == function]
        small += foreign_arguments.small(op, function, major)
        kinds = {name: _kind(value) for name, value in wanted.items()}

        def distance(case: Case) -> int:
            others = {name: _kind(value) for name, value in case.arguments.items()}
            return sum(kinds.get(name) != others.get(name) for name in {*kinds, *others})

        yield from sorted(small, key=distance)

    return calls


def _kind(value: Any) -> Any:
    """What is the same in calls of other sizes."""
    if isinstance(value, (tuple, list)):
        return [_kind(item) for item in value]
    if isinstance(value, torch.Tensor):
        return value.dtype
    return value if isinstance(value, (str, bool)) or value is None else type(value)


def _written(major: str, gpu: bool) -> dict[str, Planned]:
    """Hyper-connections, and what the package takes only with other arguments than ours."""
    found = {}
    for make, small, full, label in WRITTEN[major]:
        for function, _, _ in make(*small):
            family, _, step = function.rpartition(".")
            names = STEPS_1_0.get(step, (step,)) if major == "1" else (step,)
            for name, backward in zip(names, (False, True)):
                calls = _one(make, full if gpu else small, function, backward, gpu)
                place = "mhc" if "mhc" in family else family
                found[f"{place}.{name}.{label}"] = Planned(function, calls)
    return found


def _one(
    make: Callable[..., Iterator[tuple[str, Any, bool]]],
    sizes: tuple[int, ...],
    function: str,
    backward: bool,
    gpu: bool,
) -> Callable[[], Iterator[Case]]:
    def calls() -> Iterator[Case]:
        with torch.device("cuda" if gpu else "cpu"):  # and not while the case is used
            arguments = next(found for name, found, _ in make(*sizes) if name == function)
        yield Case(function, "x".join(map(str, sizes)), arguments, backward)

    return calls


# ---- measuring ----------------------------------------------------------------------------------


def measured(package: Package, plan: Planned, device: str) -> dict[str, Any]:
    """What a case gave; the reason in place of times if one side failed."""
    gpu, refusals = device == "cuda", []
    torch.manual_seed(0)
    for case in plan.calls():
        answer = package.ask(case, measure=gpu)
        if answer.outcome != "not accepted":
            break
        refusals.append(answer.value)
    else:
        reason = next(iter(refusals), "no call that both sides define")
        return {"function": plan.function, "error": f"not accepted: {reason}"}
    found: dict[str, Any] = {"function": plan.function, "call": case.label}
    if answer.outcome != "ran":
        return {**found, "error": f"{answer.outcome}: {answer.value}"}
    try:
        ours, theirs = call(package.ours, case, device), on(answer.value, device)
        found["results"] = foreign_arguments.compared(package, case, theirs, ours)
        if gpu:
            del ours, theirs
            us = timing.time_device(prepared(package.ours, case, device)[0]).us
            found |= {"us": round(us, 2), "their_us": round(answer.us or 0, 2)}
    except Exception as error:
        text = " ".join(str(error).split())[:200]
        return {**found, "error": f"tile_kernels: {type(error).__name__}: {text}"}
    return found


def prepare(packages: Sequence[Package], names: Sequence[str], device: str) -> None:
    """Calls both sides once. Errors show when they are measured."""
    for package in packages:
        cases = planned(package.version[0], device == "cuda")
        for name in names:
            if name in cases and cases[name].known_to(package):
                for case in cases[name].calls():
                    with contextlib.suppress(Exception):
                        call(package.ours, case, device)
                    if package.ask(case).outcome != "not accepted":
                        break


def summary(results: dict[str, dict[str, Any]]) -> str:
    """Cases, how many of them are not slower here, and by how much."""
    agreed = sum(r.get("results") in ("exact", "close") for r in results.values())
    text = f"{len(results)} cases, {agreed} with the same results"
    ratios = [r["their_us"] / r["us"] for r in results.values() if "us" in r]
    if ratios:
        mean, faster = statistics.geometric_mean(ratios), sum(r >= 1 for r in ratios)
        text += f"; {len(ratios)} measured, {faster} not slower here, geometric mean {mean:.2f}"
    return text


def installed(folders: Sequence[Path], gpu: bool) -> tuple[list[Package], dict[str, Any]]:
    """The packages that can be imported, and what is known of them all."""
    packages, known = [], {}
    for folder in folders:
        try:
            package = Package(folder, emulated=not gpu)
            package.start()
        except ImportError as error:
            known[folder.name] = {"error": str(error)}
            continue
        packages.append(package)
        known[package.version] = {"tilelang": package.tilelang}
    return packages, known


def main() -> int:
    """Measures the cases and writes the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("cases", nargs="*", metavar="CASE", help="by default all")
    text = "where a version of the package is installed; may be repeated"
    parser.add_argument("--installed", action="append", type=Path, metavar="FOLDER", help=text)
    parser.add_argument("--seconds", type=float, default=900.0, help="after which no case is begun")
    parser.add_argument("--folder", type=Path, default=benchmark.DEFAULT_FOLDER)
    parser.add_argument("--prepare", action="store_true", help="compile only, cases in parallel")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # not in parallel
    options = parser.parse_args()
    began, gpu = time.monotonic(), torch.cuda.is_available()
    device = "cuda" if gpu else "cpu"
    folders = options.installed or DEFAULT
    known_cases = [name for major in ("1", "2") for name in planned(major, gpu)]
    names = options.cases or list(dict.fromkeys(known_cases))
    for name in names:
        if name not in known_cases:
            parser.error(f"there is no case {name}")
    if options.prepare and not options.here:
        groups = [names[i::AT_ONCE] for i in range(min(AT_ONCE, len(names)))]
        words = ["--here", *(f"--installed={folder.absolute()}" for folder in folders)]
        preparation.in_processes("benchmarks.tilekernels", groups, *words)
        return 0
    packages, known = installed(folders, gpu)
    try:
        if options.prepare:
            prepare(packages, names, device)
            return 0
        if not packages:
            print("no package to compare with:", known)
            return 1
        report: dict[str, Any] = {
            "machine": benchmark.machine(),
            "packages": known,
            "copy_gb_per_s": round(timing.copy_bandwidth(), 1) if gpu else None,
            "results": {package.version: {} for package in packages},
            "left_out": [],
        }
        stem = "_".join(("tilekernels", *options.cases))
        path = options.folder / f"{stem}.{benchmark.slug(report['machine']['device'])}.json"
        for package in packages:
            results = report["results"][package.version]
            for name, plan in planned(package.version[0], gpu).items():
                if name not in names or not plan.known_to(package):
                    continue
                if time.monotonic() - began > options.seconds:
                    report["left_out"].append(f"{package.version}: {name}")
                    continue
                results[name] = measured(package, plan, device)
                print(package.version, name, results[name], flush=True)
                path.write_text(json.dumps(report, indent=1) + "\n")
                torch.cuda.empty_cache()
            print(f"{package.version}: {summary(results)}", flush=True)
        path.write_text(json.dumps(report, indent=1) + "\n")
        return 0
    finally:
        for package in packages:
            package.end()


if __name__ == "__main__":
    sys.exit(main())
