"""`tile-kernels warmup` and `source`: compile, print and emulate the kernels of one call."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import tile_kernels
from tile_kernels.runtime import emulation, registry, sources, terminal
from tile_kernels.runtime.device import current_device, described


def call_of_words(op: str, arguments: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """`NAME=VALUE` words as a call; without any, the operator's first benchmark case."""
    declared = registry.get(op)
    if not arguments:
        return op, declared.cases.benchmarks[0].build("meta")
    values: dict[str, Any] = {}
    for word in arguments:
        name, equals, text = word.partition("=")
        if not equals or name not in declared.signature.parameters:
            known = ", ".join(declared.signature.parameters)
            raise ValueError(f"{word!r} must be NAME=VALUE, where NAME is one of {known}")
        values[name] = text if name in declared.tensor_parameters else _plain(text)
    return op, values


def _plain(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def warmup(options: argparse.Namespace) -> int:
    """Compile ahead of time."""
    if options.model and (options.op or options.calls):
        raise ValueError("--model cannot be combined with an operator or with --calls")
    if not options.model and (options.training or options.max_tokens is not None):
        raise ValueError("--training and --max-tokens need --model")
    if options.list:
        return _list_kernels(options)
    calls: Any = None
    if options.calls:
        calls = calls_in(options.calls)
    elif options.op:
        calls = [call_of_words(options.op, options.arguments)]
    report = tile_kernels.warmup(
        calls, model=options.model, training=options.training or None,
        max_tokens=options.max_tokens, arch=options.arch, jobs=options.jobs,
    )  # fmt: skip
    rows = [[label, f"{seconds:.1f}"] for label, seconds in report.kernels.items()]
    columns = [("kernel", "left"), ("seconds", "right")]
    terminal.show_table(f"compiled for {report.arch} in {report.seconds:.1f} s", columns, rows)
    return 0


def _list_kernels(options: argparse.Namespace) -> int:
    """Print the kernels of a model, and compile none."""
    from tile_kernels.runtime.warmup import model_compilations, planned_device

    if not options.model:
        raise ValueError("--list needs --model")
    device = described(options.arch) if options.arch else planned_device()
    items = model_compilations(
        options.model, device, training=options.training or None, max_tokens=options.max_tokens
    )
    for item in items:
        print(item.label)
    print(f"{len(items)} kernels for {device.arch} with {device.num_sms} SMs")
    return 0


def calls_in(path: Path) -> list[tuple[str, dict[str, Any]]]:
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
        raise ValueError("--keep needs --emulate")
    device = described(options.arch) if options.arch else current_device()
    for item in compilations([call_of_words(options.op, options.arguments)], device):
        print(f"// {item.label} for {item.arch}")
        print(sources.cuda_source(item.kernel.definition, item.static, item.arch))
    return 0


def emulate(options: argparse.Namespace) -> int:
    """Run an operator's kernels on the CPU and leave them to a debugger."""
    op = registry.get(options.op)
    if options.arguments:
        named = {k: _random(v) for k, v in call_of_words(options.op, options.arguments)[1].items()}
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
