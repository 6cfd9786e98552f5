"""What NVIDIA's compute-sanitizer says about the planted bugs of the emulator's tests.

    python benchmarks/sanitizer.py prepare FOLDER       needs TileLang and nvcc
    python benchmarks/sanitizer.py run FOLDER [FILE]    writes JSON; needs a GPU, compute-sanitizer

`prepare` compiles each kernel with nvcc from the source that TileLang generates, once with its bug
and once without. `run` launches them under each of the four tools, with tensors that are allocated
one by one: a caching allocator, as PyTorch's, hides accesses past the end of a tensor.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.emulator.planted_bugs import Bug

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
# The tool made for a kind of report, if there is one; such runs come first.
MADE_FOR = {
    "out of bounds": "memcheck", "misaligned": "memcheck", "race": "racecheck",
    "fence": "racecheck", "divergence": "synccheck", "deadlock": "synccheck",
    "barrier": "synccheck", "uninitialised": "initcheck",
}  # fmt: skip
HANG_SECONDS = 8  # a kernel of 128 threads that is not done by then never is
WORKERS = 3  # processes at a time
# The lines of the tools' output that name a finding.
FINDING = re.compile(
    r"^========= (?:Error: |Warning: )?((?:Invalid|Uninitialized|Race reported|Barrier error|"
    r"Divergent|Potential|Misaligned|Program hit|Illegal|Device not supported).*)$",
    re.M,
)


# ---- prepare -------------------------------------------------------------------------------------


def write_case(folder: Path, name: str, bug: Bug, planted: bool) -> None:
    """The source, the tensors and the launch of one variant."""
    import torch

    from tile_kernels.emulator.lowering import compile_expressions, lower

    folder.mkdir(parents=True)
    lowered = lower(bug.kernel(planted), pass_configs=bug.configs)
    source = bug.edit(lowered.source) if planted and bug.edit else lowered.source
    if planted and bug.edit and source == lowered.source:
        raise ValueError(f"{name}: the edit changes nothing")
    (folder / "kernel.cu").write_text(source)
    args = list(bug.args())
    if not planted and bug.kind == "misaligned":
        args[0] = args[0].clone()
    tensors = {}
    for param, tensor in zip(lowered.params, args, strict=True):
        offset = tensor.storage_offset() * tensor.element_size()
        whole = torch.as_strided(tensor, (tensor.numel() + tensor.storage_offset(),), (1,), 0)
        (folder / f"{param.name}.bin").write_bytes(whole.view(torch.uint8).numpy().tobytes())
        tensors[param.name] = {"offset": offset, "fresh": param.name in bug.fresh}
    (kernel,) = lowered.kernels
    *sizes, dyn = compile_expressions([*kernel.grid, *kernel.block, kernel.dyn_bytes])({})
    maps = {}
    for map_name, m in lowered.maps.items():
        parts = ("dims", "strides", "box")
        maps[map_name] = asdict(m) | {
            n: list(compile_expressions(getattr(m, n))({})) for n in parts
        }
    launch = {
        "bug": name, "kind": bug.kind, "planted": planted, "name": kernel.name,
        "grid": sizes[:3], "block": sizes[3:], "dyn_bytes": dyn, "cluster": kernel.cluster,
        "args": kernel.args, "tensors": tensors, "maps": maps,
    }  # fmt: skip
    (folder / "launch.json").write_text(json.dumps(launch))


def compile_case(folder: Path) -> None:
    """Compile the source of a folder with line information."""
    import tilelang

    package = Path(tilelang.__file__).parent
    includes = [f"-I{package / 'src'}", f"-I{package / '3rdparty' / 'cutlass' / 'include'}"]
    command = ["nvcc", "-cubin", "-arch=sm_90a", "-std=c++17", "-lineinfo", *includes]
    command += [str(folder / "kernel.cu"), "-o", str(folder / "kernel.cubin")]
    subprocess.run(command, check=True)


def prepare(root: Path) -> None:
    """Write and compile both variants of every planted bug."""
    from tests.emulator.planted_bugs import BUGS

    folders = []
    for number, (name, bug) in enumerate(BUGS.items()):
        for planted in (True, False):
            folders.append(root / f"{number}-{'planted' if planted else 'without'}")
            write_case(folders[-1], name, bug, planted)
    with ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(compile_case, folders))
    print(f"{len(folders)} kernels in {root}")


# ---- run -----------------------------------------------------------------------------------------


def find_sanitizer() -> str:
    """The program, on the path or in a CUDA toolkit."""
    folders = [os.environ.get("CUDA_HOME", ""), *map(str, Path("/usr/local").glob("cuda*"))]
    places = [Path(f) / part for f in folders if f for part in ("bin", "compute-sanitizer")]
    found = [str(p / "compute-sanitizer") for p in places if (p / "compute-sanitizer").is_file()]
    first = shutil.which("compute-sanitizer") or (found[0] if found else None)
    if first is None:
        raise SystemExit("compute-sanitizer was not found: it is part of the CUDA toolkit")
    return first


def output_of(command: Sequence[str]) -> str:
    """The last line that a program prints."""
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.strip().splitlines()[-1]


def run_tool(sanitizer: str, tool: str, folder: Path) -> dict[str, Any]:
    """How a launch ended under a tool: number of findings, first message, whether it hangs."""
    script = Path(__file__).parent / "sanitizer_launch.py"
    command = [sanitizer, "--tool", tool, "--print-limit", "3", sys.executable, str(script)]
    process = subprocess.Popen(
        [*command, str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=HANG_SECONDS)
        hangs = False
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        hangs = True
    found = FINDING.search(output)
    summary = re.search(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", output)
    ended = "the kernel has ended" in output
    explained = found is not None or hangs or (ended and summary is not None and summary[1] == "0")
    return {
        "hangs": hangs,
        "ended": ended,
        "findings": int(summary[1]) if summary else None,
        "message": found[1].strip() if found else "",
        "tail": "" if explained else output[-600:],
    }


def ordered_runs(root: Path) -> list[tuple[dict[str, Any], str, Path]]:
    """Launch, tool, folder: first the tool made for each bug, kernels that may hang last."""
    runs = []
    for folder in sorted(p.parent for p in root.glob("*/launch.json")):
        launch = json.loads((folder / "launch.json").read_text())
        runs += [(launch, tool, folder) for tool in TOOLS]

    def rank(run: tuple[dict[str, Any], str, Path]) -> tuple[bool, bool, bool]:
        launch, tool, _ = run
        made_for = MADE_FOR.get(launch["kind"], "memcheck") == tool
        return not launch["planted"], launch["kind"] == "deadlock", not made_for

    return sorted(runs, key=rank)


def run_all(root: Path, path: Path, seconds: float, workers: int) -> None:
    """Run as much as fits into `seconds`; the file always has what is known so far."""
    deadline = time.monotonic() + seconds
    sanitizer = find_sanitizer()
    content: dict[str, Any] = {
        "compute_sanitizer": output_of([sanitizer, "--version"]),
        "device": output_of(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv"]),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "seconds_until_it_hangs": HANG_SECONDS,
        "planted": {},
        "without": {},
    }

    def one(run: tuple[dict[str, Any], str, Path]) -> dict[str, Any] | None:
        return run_tool(sanitizer, *run[1:]) if time.monotonic() < deadline else None

    runs = ordered_runs(root)
    with ThreadPoolExecutor(workers) as pool:
        for (launch, tool, _), result in zip(runs, pool.map(one, runs), strict=True):
            if result is None:
                continue
            group = content["planted" if launch["planted"] else "without"]
            group.setdefault(launch["bug"], {})[tool] = result
            kind = "planted" if launch["planted"] else "without"
            print(f"{kind} | {launch['bug']} | {tool} | {shown(result)}", flush=True)
            path.write_text(json.dumps(content, indent=1) + "\n")
            if "Device not supported" in result["message"]:
                raise SystemExit("compute-sanitizer does not support this machine's device")


def shown(result: dict[str, Any]) -> str:
    """A line about a run."""
    if result["message"]:
        return f"{result['findings']} {result['message'][:80]}"
    state = "hangs" if result["hangs"] else f"findings {result['findings']}"
    return state if not result["tail"] else f"{state}: {result['tail'][-160:]!r}"


def main() -> None:
    """`prepare` or `run`."""
    sys.path.insert(0, str(ROOT))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("step", choices=("prepare", "run"))
    parser.add_argument("folder", type=Path)
    default = RESULTS / "sanitizer.nvidia-h200.json"
    parser.add_argument("file", nargs="?", type=Path, default=default)
    parser.add_argument("--seconds", type=float, default=600, help="stop starting runs after that")
    parser.add_argument("--workers", type=int, default=WORKERS, help="processes at a time")
    options = parser.parse_args()
    if options.step == "prepare":
        prepare(options.folder)
    else:
        run_all(options.folder, options.file, options.seconds, options.workers)


if __name__ == "__main__":
    main()
