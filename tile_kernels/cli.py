"""`tile-kernels`: list, check, benchmark, compile and emulate the kernels of `tile_kernels`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tile_kernels
from tile_kernels.commands.bench import bench
from tile_kernels.commands.check import check
from tile_kernels.commands.emulate import emulate
from tile_kernels.commands.ep_model import ep_model
from tile_kernels.commands.info import info, list_ops
from tile_kernels.commands.kernels import source, warmup
from tile_kernels.commands.pack import add_arguments as add_pack_arguments
from tile_kernels.commands.pack import pack
from tile_kernels.emulator import runner
from tile_kernels.runtime import backends
from tile_kernels.runtime.device import DESCRIBED


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status is 0 if all is well."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help(sys.stderr)
        return 2
    try:
        return options.run(options)
    except KeyboardInterrupt:
        print(f"tile-kernels {options.command}: interrupted", file=sys.stderr)
        return 130  # as a shell reports a command that SIGINT ended
    except (TypeError, KeyError, ValueError, RuntimeError, OSError, ImportError) as error:
        sentence = _sentence(error).removeprefix(f"{options.command}: ")
        print(f"tile-kernels {options.command}: {sentence}", file=sys.stderr)
        return 2


def _sentence(error: BaseException) -> str:
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tile-kernels",
        description="List, check, benchmark, compile and emulate the kernels of tile_kernels.",
        epilog="`tile-kernels COMMAND --help` describes the options of a command.",
    )
    parser.add_argument("--version", action="version", version=tile_kernels.__version__)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    def command(name: str, run: Callable[[Any], int], text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text)
        added.set_defaults(run=run)
        return added

    def takes_arch(added: argparse.ArgumentParser) -> None:
        text = "GPU architecture (default: this machine's; without a GPU sm_90a)"
        added.add_argument("--arch", choices=list(DESCRIBED), help=text)

    def takes_operators(added: argparse.ArgumentParser) -> None:
        text = "a family such as moe, or an operator such as moe.topk_gate (default: all)"
        added.add_argument("which", nargs="*", metavar="FAMILY|OP", help=text)

    command("info", info, "versions, GPU, compilers, caches; what is missing and how to get it")
    text = "every operator with its signature, and the bytes and FLOPs of a benchmark case"
    takes_operators(command("ops", list_ops, text))
    text = "run operators against worked examples and references: the cheapest cases, or --full"
    added = command("check", check, text)
    takes_operators(added)
    text = (
        "run every case instead of the cheapest tenth, which reach every kernel of every operator"
    )
    added.add_argument("--full", action="store_true", help=text)
    text = "default: tilelang on a GPU, else emulate"
    added.add_argument("--backend", choices=backends.BACKENDS, help=text)
    text = "run no kernel: only the PyTorch references, against worked examples"
    added.add_argument("--references-only", action="store_true", help=text)
    text = "processes to use (default: one per core, at most 8); 1 stays in this process"
    added.add_argument("--jobs", type=int, metavar="N", help=text)
    added.add_argument("--replay", type=Path, metavar="FILE", help="a call saved by the log")
    added = command("bench", bench, "device time, bandwidth, host time, time of the reference")
    added.epilog = (
        "Columns: MB must be moved at least; us is the device time of a call with a cold L2 "
        "cache; of copy is the share of the copy bandwidth; host us is the time of a call on the "
        "host, and new size us that of the first call with another number of tokens; reference us "
        "and compiled us are the times of the PyTorch reference, eager and under torch.compile. "
        "Without a GPU, only host times are measured, and the reference runs on the CPU."
    )
    takes_operators(added)
    added.add_argument("--save", action="store_true", help="write JSON files to --output")
    added.add_argument("--plot", action="store_true", help="write PNG and SVG pictures to --output")
    folder = Path("benchmarks/results")
    text = f"folder of the files that --save and --plot write (default: {folder})"
    added.add_argument("--output", type=Path, default=folder, metavar="FOLDER", help=text)
    added.add_argument("--load", type=Path, metavar="FOLDER", help="show saved results instead")
    added.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    added.add_argument(
        "--no-reference", action="store_true", help="on a GPU: do not measure the references"
    )
    added = command("warmup", warmup, "compile kernels ahead of time into the disk cache")
    text = "an operator such as moe.topk_gate (default: the benchmark cases of all)"
    added.add_argument("op", nargs="?", metavar="OP", help=text)
    added.add_argument(
        "arguments", nargs="*", metavar="NAME=VALUE",
        help="as scores=float32[8192,256] num_topk=8 (default: the first benchmark case)",
    )  # fmt: skip
    added.add_argument("--calls", type=Path, metavar="FILE", help="JSON list of [op, {arguments}]")
    text = (
        "all kernels that the layers of a model need, for any number of tokens: deepseek-v3, "
        "v4-flash-like, v4-like, tiny-v4, or a .json or .toml file with its sizes"
    )
    added.add_argument("--model", metavar="PRESET|FILE", help=text)
    text = "with --model: also the backward pass"
    added.add_argument("--training", action="store_true", help=text)
    text = "with --model: the most tokens of a call (16384)"
    added.add_argument("--max-tokens", type=int, metavar="N", help=text)
    text = "with --model: print the kernels and compile none"
    added.add_argument("--list", action="store_true", help=text)
    takes_arch(added)
    added.add_argument("--jobs", type=int, metavar="N", help="kernels that are compiled at a time")
    text = "compile kernels into a bundle, for machines without TileLang and compiler"
    added = command("pack", pack, text)
    takes_arch(added)
    add_pack_arguments(added)
    added = command("source", source, "the generated CUDA of an operator's kernels, without a GPU")
    added.add_argument("op", metavar="OP", help="an operator such as moe.topk_gate")
    text = "as scores=float32[8192,256] num_topk=8 (default: the first benchmark case)"
    added.add_argument("arguments", nargs="*", metavar="NAME=VALUE", help=text)
    takes_arch(added)
    text = "run the kernels on this CPU, on random data of these shapes, and say what they did"
    added.add_argument("--emulate", action="store_true", help=text)
    text = "with --emulate: leave source, inputs and a script that steps through them in gdb"
    added.add_argument("--keep", type=Path, metavar="FOLDER", help=text)
    text = "run a TileLang script or test file, unmodified, on this CPU; every access is checked"
    added = command("emulate", emulate, text)
    added.allow_abbrev = False  # an abbreviation might be the script's option
    runner.add_arguments(added)
    text = "expert parallelism: SMs, queue pairs, buffers and estimated times of a cluster"
    added = command("ep-model", ep_model, text)
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
