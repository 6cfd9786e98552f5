"""Train the tiny model: `make demo`, or `python -m examples.tiny_v4.train --help`.

Everything that a step depends on is the seed, the step's number and the parameters, so a run that
was interrupted and goes on (`--resume`) has the losses, and the report, of one that was not.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from examples.tiny_v4 import ran, speed
from examples.tiny_v4.checkpoint import History, ResumeError, restore, save
from examples.tiny_v4.model import Config, TinyV4
from examples.tiny_v4.report import write_report
from examples.tiny_v4.step import TrainingStep, loss_of, optimizer_of, training_loss_of
from examples.tiny_v4.text import Text
from tile_kernels.gemm.tiling import BLOCK
from tile_kernels.modeling.moe import PRECISIONS
from tile_kernels.testing.benchmark import machine

LETTERS_SHOWN = 64  # of the text under the gates: more would not be legible


def positive(text: str) -> int:
    """A number of things of which there must be one."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train a tiny language model.", allow_abbrev=False)
    parser.add_argument("--steps", type=positive, default=150)
    parser.add_argument("--rows", type=positive, default=8, help="texts of a step")
    parser.add_argument("--length", type=positive, default=64, help="letters of a text")
    parser.add_argument("--hidden", type=positive, default=64)
    parser.add_argument("--intermediate", type=positive, default=64, help="channels of an expert")
    parser.add_argument("--layers", type=positive, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--learning-rate", type=float, default=5e-3)
    parser.add_argument("--out", type=Path, default=Path("demo"), help="report and checkpoint")
    parser.add_argument("--every", type=positive, default=100, help="steps between checkpoints")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    parser.add_argument(
        "--attention", choices=("sparse", "dense"), default="sparse",
        help="sparse: over a window and compressed entries; dense: over all tokens",
    )  # fmt: skip
    parser.add_argument("--no-engram", action="store_true", help="without the n-gram memory")
    parser.add_argument("--no-mhc", action="store_true", help="one plain residual stream")
    parser.add_argument("--dense", action="store_true", help="no experts")
    parser.add_argument(
        "--fp8", choices=("on", "off"), default="on", help="activations of experts in e4m3"
    )
    parser.add_argument(
        "--precision", choices=PRECISIONS, default="bf16",
        help="fp8: all products of the experts in FP8, forward and backward",
    )  # fmt: skip
    parser.add_argument(
        "--no-emulation", action="store_true", help="on a CPU: do not emulate any kernel"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(given)
    if options.precision == "fp8":
        for name in ("hidden", "intermediate"):
            if getattr(options, name) % BLOCK:
                parser.error(f"--precision fp8 needs --{name} to be a multiple of {BLOCK}")
    return options


@contextmanager
def interruptible() -> Iterator[list[int]]:
    """A list that is not empty once someone asked the process to stop."""
    asked: list[int] = []
    signals = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in signals}
    for number in signals:
        signal.signal(number, lambda n, _: asked.append(n))
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# ---- training -----------------------------------------------------------------------------------


def config_of(options: argparse.Namespace, vocab: int) -> Config:
    """The model that the command line asks for."""
    return Config(
        vocab, hidden=options.hidden, intermediate=options.intermediate, layers=options.layers,
        engram_layers=(options.layers - 1,), mhc=not options.no_mhc,
        engram=not options.no_engram, moe=not options.dense, precision=options.precision,
        fp8=options.fp8 == "on" and options.precision == "bf16",
        sparse=options.attention == "sparse",
        dtype=torch.float32 if options.device == "cpu" else torch.bfloat16,
    )  # fmt: skip


def train(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Train, checkpoint, and return what there is to report."""
    text = Text()
    torch.manual_seed(options.seed)
    model = TinyV4(config_of(options, len(text.letters))).to(options.device)
    optimizer = optimizer_of(model, options.learning_rate)
    checkpoint, history = options.out / "checkpoint.safetensors", History()
    if options.resume:
        history, planned = restore(checkpoint, model, optimizer, options)
        console.print(f"going on after step {len(history.losses)}")
        if planned != options.steps:
            console.print(
                f"it was to have {planned} steps, not {options.steps}: the learning rate of steps "
                "to come is not what it would have been"
            )

    def keep() -> None:
        save(checkpoint, model, optimizer, history, options)

    parameters = sum(parameter.numel() for parameter in model.parameters())
    console.print(f"a model of {parameters} parameters, {options.steps} steps on {options.device}")
    asked = all_steps(model, optimizer, text, history, options, console, keep)
    keep()
    if asked:
        console.print(f"stopped after step {len(history.losses)}; go on with --resume")
        sys.exit(128 + asked[0])
    if options.device != "cpu":
        console.print("measuring speeds in several modes")
    elif not options.no_emulation:
        console.print("running two kernels in the emulator, which compiles them the first time")
    return results(model, text, history, options)


def all_steps(
    model: TinyV4,
    optimizer: torch.optim.Optimizer,
    text: Text,
    history: History,
    options: argparse.Namespace,
    console: Console,
    keep: Callable[[], None],
) -> list[int]:
    """The steps that `history` does not have yet; the signals, if any, that ended them early."""
    columns = (
        TextColumn("training"), BarColumn(), MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}"), TimeRemainingColumn(),
    )  # fmt: skip
    first, before = len(history.losses), history.seconds
    started = time.perf_counter()
    learn = TrainingStep(model, optimizer)
    with interruptible() as asked, Progress(*columns, console=console) as progress:
        task = progress.add_task(
            "train", total=options.steps, completed=first, loss="not known yet"
        )
        for step in range(first, options.steps):
            if asked:
                break
            batch = text.batch(step, options.seed, options.rows, options.length)
            loss = learn(batch, options.learning_rate * schedule(step, options.steps))
            history.losses.append(loss.item())
            history.loads.append([layer.load.tolist() for layer in model.experts()])
            history.seconds = before + time.perf_counter() - started
            progress.update(task, completed=step + 1, loss=f"{history.losses[-1]:.3f}")
            if (step + 1) % options.every == 0:
                keep()
    return asked


def results(
    model: TinyV4, text: Text, history: History, options: argparse.Namespace
) -> dict[str, Any]:
    """What there is to report of a model and the steps that made it."""
    held_out = text.test[: 8 * (options.length + 1)].view(8, -1).to(options.device)
    with torch.no_grad():
        test_loss = loss_of(model, held_out).item()
    speeds = {}
    batch = text.batch(0, options.seed, options.rows, options.length).to(options.device)
    if options.device != "cpu":
        speeds = speed.compare(model, loss_of, batch)
    operators = ran.operators_of(lambda: training_loss_of(model, batch)[1].backward())  # noqa: PLW0108
    model.zero_grad()
    tokens = len(history.losses) * options.rows * options.length
    shown = min(options.length, LETTERS_SHOWN)
    emulated: list[ran.Emulated] | str = "not asked for (--no-emulation)"
    if options.device != "cpu":
        emulated = "not needed: the kernels ran on the GPU"
    elif not options.no_emulation:
        emulated = ran.emulated(model, held_out[:1, :shown])
    return {
        "config": model.config,
        "machine": machine(),
        "operators": operators,
        "emulated": emulated,
        "losses": history.losses,
        "loads": history.loads,
        "test_loss": test_loss,
        "unigram": text.unigram_entropy(),
        "seconds": history.seconds,
        "tokens_per_second": tokens / history.seconds,
        "speeds": speeds,
        "sample": sample(model, text, "The ", 160),
        "looked_at": model.looked_at(held_out[:1, :shown]),
        "shown": text.decode(held_out[0, :shown].cpu()),
    }


def schedule(step: int, steps: int) -> float:
    """Up for the first twentieth, then down to a tenth."""
    warm = max(1, steps // 20)
    return min(1.0, (step + 1) / warm) * (1 - 0.9 * step / max(1, steps))


@torch.no_grad()
def sample(model: TinyV4, text: Text, start: str, letters: int) -> str:
    """A text that the model writes, the same for the same model."""
    draw = torch.Generator().manual_seed(0)
    device = model.head.weight.device
    ids = text.encode(start)
    for _ in range(letters):
        logits = model(ids[None, -64:].to(device))[0, -1].float().cpu()
        chosen = torch.multinomial((logits / 0.7).softmax(-1), 1, generator=draw)
        ids = torch.cat((ids, chosen))
    return text.decode(ids)


def show(result: dict[str, Any], console: Console) -> None:
    """The result in the terminal."""
    table = Table(title="nats per letter")
    table.add_column("")
    table.add_column("loss", justify="right")
    rows = (
        ("letter frequencies alone", result["unigram"]),
        ("first step", result["losses"][0]),
        ("last ten steps", sum(result["losses"][-10:]) / len(result["losses"][-10:])),
        ("text it has not seen", result["test_loss"]),
    )
    for name, value in rows:
        table.add_row(name, f"{value:.3f}")
    console.print(table)
    for i, load in enumerate(result["loads"][-1] if result["loads"] else []):
        console.print(f"load of the experts, layer {i}: {load}")
    console.print(
        f"{result['tokens_per_second']:.0f} letters per second, {result['seconds']:.0f} s"
    )
    for name, value in result["speeds"].items():
        console.print(f"forward and backward, {name}: {speed.in_words(value)}", markup=False)
    console.print(f"\n{result['sample']}\n", markup=False, highlight=False)


def write_numbers(result: dict[str, Any], options: argparse.Namespace) -> Path:
    """What was measured, with the machine and the options, as `run.json` beside the report."""
    measured = ("losses", "test_loss", "unigram", "seconds", "tokens_per_second", "speeds")
    numbers = {
        "machine": machine(),
        "options": {name: str(value) for name, value in vars(options).items()},
        **{name: result[name] for name in measured},
    }
    path: Path = options.out / "run.json"
    path.write_text(json.dumps(numbers, indent=1) + "\n")
    return path


def main(given: list[str] | None = None) -> None:
    """Train, show and write the report."""
    options = arguments(given)
    console = Console()
    if options.device == "cpu":
        torch.set_num_threads(1)  # tensors are too small for more
    try:
        result = train(options, console)
    except ResumeError as error:
        sys.exit(str(error))
    show(result, console)
    write_numbers(result, options)
    path = write_report(result, options.out / "report.html")
    console.print(f"report: {path}")


if __name__ == "__main__":
    main()
