"""`tile-kernels check`: run operators against worked examples and their references."""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import os
import pickle
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import tile_kernels
from tile_kernels.commands import pool
from tile_kernels.emulator import cache
from tile_kernels.runtime import emulation, registry, terminal
from tile_kernels.runtime.cases import Vector, moved, tensors_in
from tile_kernels.runtime.device import current_device, described
from tile_kernels.runtime.operator import Operator
from tile_kernels.runtime.warmup import compilations

KINDS = ("vectors", "small")  # of cases, as `Cases` names them
MAX_DEFAULT_JOBS = 8  # a worker holds PyTorch, TileLang and a compiler, or a CUDA context


def check(options: argparse.Namespace) -> int:
    """Run worked examples and small samples of operators; or one saved call."""
    backend = _backend(options)
    if options.jobs is not None and options.jobs < 1:
        raise ValueError(f"--jobs must be at least 1, got {options.jobs}")
    if options.replay:
        return replay(options.replay, backend)
    selected = registry.select(options.which)
    cases = [case for op in selected for case in _cases(op, backend)]
    planned = cases if options.full or backend == "torch" else _cheapest(cases)
    outcome = _Outcome()
    try:
        _run(planned, backend, options.jobs, outcome)
    except KeyboardInterrupt:
        outcome.interrupted = True
    finally:
        _show(selected, cases, planned, outcome, backend)
    return 130 if outcome.interrupted else 1 if outcome.failures else 0


def _backend(options: argparse.Namespace) -> str:
    """The backend asked for, or one that runs kernels here."""
    backend = "torch" if options.references_only else options.backend
    if options.references_only and options.backend not in (None, "torch"):
        raise ValueError(f"--references-only runs no kernel on the backend {options.backend!r}")
    if backend == "tilelang" and not torch.cuda.is_available():
        raise RuntimeError("the backend 'tilelang' needs a CUDA device, and there is none")
    if backend is None:
        backend = "tilelang" if torch.cuda.is_available() else "emulate"
    lacking = emulation.missing() if backend == "emulate" else ""
    if lacking:
        raise RuntimeError(
            f"no kernel ran: there is no CUDA device, and kernels cannot be emulated ({lacking}). "
            "--references-only checks the PyTorch references alone"
        )
    if backend == "emulate":
        cache.open_cache()  # raises here instead of in every case
    return backend


# ---- cases --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Case:
    """One case by its position in the operator's declaration, which other processes have too."""

    op: str
    kind: str
    index: int
    kernels: frozenset[str] = field(default=frozenset(), compare=False)
    degenerate: bool = field(default=False, compare=False)  # a dimension of 1
    seconds: float = field(default=0.0, compare=False)  # a rough estimate

    @property
    def label(self) -> str:
        return getattr(registry.get(self.op).cases, self.kind)[self.index].label


def _cases(op: Operator, backend: str) -> list[_Case]:
    device = current_device() if backend == "tilelang" else described()
    found = []
    for kind in KINDS:
        for index, case in enumerate(getattr(op.cases, kind)):
            if isinstance(case, Vector):
                arguments = moved(case.arguments(), "meta")
            else:
                arguments = case.build("meta")
            cost = op.cost(**arguments)
            seconds = CASE_SECONDS + (cost.bytes + cost.flops) * SECONDS_PER_UNIT
            sizes = [size for tensor in tensors_in(arguments) for size in tensor.shape]
            kernels: frozenset[str] = frozenset()
            if backend != "torch":
                compiled = compilations([(op.name, arguments)], device)
                seconds += COMPILE_SECONDS * len(compiled)
                if all(sizes):  # else none may run
                    kernels = frozenset(item.kernel.name for item in compiled)
            found.append(_Case(op.name, kind, index, kernels, 1 in sizes, seconds))
    return found


# Rough: for estimates of the time left, and to run cheap cases first.
CASE_SECONDS = 0.05
COMPILE_SECONDS = 1.5
SECONDS_PER_UNIT = 1e-6  # of a byte moved or of a floating-point operation, emulated


def _cheapest(cases: Sequence[_Case]) -> list[_Case]:
    """For every operator a worked example, and for each of its kernels a sample: the cheapest.

    Samples with a dimension of 1 are taken only where no others reach the kernel.
    """
    chosen: dict[tuple[str, str], _Case] = {}
    for case in sorted(cases, key=lambda case: (case.degenerate, case.seconds)):
        for wanted in ("worked example",) if case.kind == "vectors" else case.kernels:
            chosen.setdefault((case.op, wanted), case)
    found = list(dict.fromkeys(chosen.values()))
    samples = [case for case in found if case.kind == "small"]
    for case in samples.copy():
        others = [other.kernels for other in samples if other.op == case.op and other is not case]
        if case.kernels.issubset(frozenset().union(*others)):  # a larger sample reaches them too
            samples.remove(case)
    return [case for case in found if case.kind == "vectors" or case in samples]


# ---- running ------------------------------------------------------------------------------------


@dataclass
class _Outcome:
    """What has been run so far."""

    passed: list[_Case] = field(default_factory=list)
    failures: dict[_Case, str] = field(default_factory=dict)
    interrupted: bool = False


def _run(planned: Sequence[_Case], backend: str, jobs: int | None, outcome: _Outcome) -> None:
    jobs = jobs or min(MAX_DEFAULT_JOBS, len(os.sched_getaffinity(0)))
    cheap_first = sorted(planned, key=lambda case: case.seconds)
    run = functools.partial(_error, backend)
    total = sum(case.seconds for case in planned)
    with (
        terminal.progress_bar(total, "checking") as advance,
        contextlib.closing(pool.each(run, cheap_first, jobs)) as results,
    ):
        for case, error in results:
            if error is None:
                outcome.passed.append(case)
            else:
                outcome.failures[case] = error
            done = len(outcome.passed) + len(outcome.failures)
            advance(f"{done}/{len(planned)} {case.op} {case.label}", case.seconds)


def _error(backend: str, case: _Case) -> str | None:
    """Run a case; what is wrong with it, if anything."""
    op, device = registry.get(case.op), "cuda" if backend == "tilelang" else "cpu"
    declared = getattr(op.cases, case.kind)[case.index]
    try:
        if isinstance(declared, Vector):
            arguments, expected = moved(declared.arguments(), device), declared.expected()
        else:
            arguments = declared.build(device)
            expected = op.outcome(op.public_reference, copy.deepcopy(moved(arguments, "cpu")))
        with tile_kernels.backend(backend):
            result = op.outcome(op.function, arguments)
        op.cases.compare(moved(result, "cpu"), expected)
    except Exception as error:  # whatever goes wrong is the result of the check
        return f"{type(error).__name__}: {error}"
    return None


def _show(
    selected: Sequence[Operator],
    cases: Sequence[_Case],
    planned: Sequence[_Case],
    outcome: _Outcome,
    backend: str,
) -> None:
    rows = []
    for op in selected:
        good = [case.kind for case in outcome.passed if case.op == op.name]
        bad = [case.kind for case in outcome.failures if case.op == op.name]
        counts = [f"{good.count(kind)}/{(good + bad).count(kind)}" for kind in KINDS]
        left = sum(case.op == op.name for case in planned) - len(good) - len(bad)
        verdict = f"[yellow]{left} not run[/]" if left else "[green]ok[/]"
        total = str(sum(case.op == op.name for case in cases))
        rows.append([op.name, *counts, total, "[red]FAILED[/]" if bad else verdict])
    names = ("worked examples", "samples", "of all cases")
    columns = [("operator", "left"), *((name, "right") for name in names), ("", "left")]
    terminal.show_table(f"backend: {backend}; passed / run", columns, rows)
    for case, failure in outcome.failures.items():
        print(f"{case.op} {case.label}: {failure}", file=sys.stderr)
    done = len(outcome.passed) + len(outcome.failures)
    verdict = f"all {done} cases passed"
    if outcome.failures:
        verdict = f"{len(outcome.failures)} of {done} cases failed"
    if done < len(planned):
        failed = len(outcome.failures)
        verdict = f"stopped after {done} of {len(planned)} cases, of which {failed} failed,"
    show = terminal.console().print
    show(f"[bold]{verdict}[/] on {backend} ({_where(backend)})")
    if backend == "torch":
        show("[bold]no kernel ran[/]: worked examples were compared with the references alone")
    if len(planned) < len(cases):
        show(
            f"These are {len(planned)} of {len(cases)} cases: the cheapest that reach every kernel "
            "of an operator, and a worked example of each. --full runs all."
        )


def _where(backend: str) -> str:
    if backend == "emulate":
        return f"the generated CUDA for {described().arch}, executed on this CPU"
    return current_device().name if backend == "tilelang" else "PyTorch, the references themselves"


# ---- saved calls --------------------------------------------------------------------------------


def _saved_call(path: Path) -> dict[str, Any]:
    """What the log wrote of a call: its operator and its arguments."""
    where = None if torch.cuda.is_available() else "cpu"
    try:
        saved = torch.load(path, map_location=where, weights_only=True)
    except (pickle.UnpicklingError, EOFError, RuntimeError) as error:
        raise ValueError(f"{path} is not a call that was saved: {error}") from None
    if not isinstance(saved, dict) or not {"op", "arguments"} <= saved.keys():
        raise ValueError(f"{path} is not a call that was saved: it names no operator")
    if not isinstance(saved["op"], str) or not isinstance(saved["arguments"], dict):
        raise ValueError(f"{path} is not a call that was saved: its arguments have no names")
    return saved


def replay(path: Path, backend: str) -> int:
    """Run a call that the log saved (level 3), and compare it with the reference."""
    saved = _saved_call(path)
    op = registry.get(saved["op"]).dispatched()
    given = saved["arguments"]
    inputs = {name: value for name, value in given.items() if name not in op.outputs}
    inputs = copy.deepcopy(inputs)
    with torch.no_grad():
        with tile_kernels.backend(backend):  # first, because its checks explain bad arguments
            outcome = op.outcome(functools.partial(_by_position, op, op.function), given)
        expected = op.outcome(functools.partial(_by_position, op, op.public_reference), inputs)
    try:
        op.cases.compare(outcome, expected)
    except AssertionError as error:
        print(f"{op.name} from {path}: {error}")
        return 1
    print(f"{op.name} from {path}: equal to the reference on the backend {backend}")
    return 0


def _by_position(op: Operator, function: Callable[..., Any], **arguments: Any) -> Any:
    """Call one of an operator's functions, which agree on the order of their parameters only."""
    try:
        bound = op.signature.bind(**arguments)
    except TypeError as error:
        raise TypeError(f"{op.short_name}: {error}") from None
    return function(*bound.args, **bound.kwargs)
