"""`tile-kernels pack`: compiled kernels for machines that have neither TileLang nor a compiler."""

from __future__ import annotations

import argparse
from typing import Any

from tile_kernels.commands.kernels import call_of_words, calls_in
from tile_kernels.runtime import packing, terminal
from tile_kernels.runtime.warmup import Call


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command, besides the architecture."""
    parser.epilog = (
        "Without --model, --op and --calls, the benchmark cases of all operators are compiled."
    )
    text = "all kernels that the layers of a model need, as for warmup; may be repeated"
    parser.add_argument("--model", action="append", default=[], metavar="PRESET|FILE", help=text)
    text = "the kernels of one call, as scores=float32[8192,256] num_topk=8; may be repeated"
    parser.add_argument(
        "--op", action="append", nargs="+", default=[], metavar=("OP", "NAME=VALUE"), help=text
    )
    text = "JSON list of [op, {arguments}]"
    parser.add_argument("--calls", metavar="FILE", help=text)
    parser.add_argument("--training", action="store_true", help="with --model: also the backward")
    text = "with --model: the most tokens of a call (16384)"
    parser.add_argument("--max-tokens", type=int, metavar="N", help=text)
    text = "multiprocessors of the GPUs that run them (default: those of the described device)"
    parser.add_argument("--num-sms", type=int, metavar="N", help=text)
    text = "write a wheel into the folder that -o names, instead of a bare bundle"
    parser.add_argument("--wheel", action="store_true", help=text)
    parser.add_argument("--jobs", type=int, metavar="N", help="kernels that are compiled at a time")
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="what to write")


def pack(options: argparse.Namespace) -> int:
    """Compile into a bundle."""
    from pathlib import Path

    from tile_kernels.runtime.device import current_device

    if not options.model and (options.training or options.max_tokens is not None):
        raise ValueError("--training and --max-tokens need --model")
    calls: list[Call] = [call_of_words(op, words) for op, *words in options.op]
    if options.calls:
        calls += calls_in(Path(options.calls))
    settings: dict[str, Any] = {
        "training": options.training or None, "max_tokens": options.max_tokens,
        "num_sms": options.num_sms, "wheel": options.wheel, "jobs": options.jobs,
    }  # fmt: skip
    arch = options.arch or current_device().arch
    path, report = packing.pack(
        Path(options.output), arch=arch, calls=calls, models=options.model, **settings
    )
    rows = [[label, f"{seconds:.1f}"] for label, seconds in report.kernels.items()]
    title = f"{len(rows)} kernels for {arch}, {path.stat().st_size / 1e6:.1f} MB: {path}"
    terminal.show_table(title, [("kernel", "left"), ("seconds", "right")], rows)
    return 0
