"""FP8 matrix products beside their rivals: `python -m benchmarks.gemm [--variants] [CASE ...]`.

Device time with a cold L2 cache, all in one run: our products, PyTorch's (`torch._grouped_mm` and
`torch.mm` in bfloat16, `torch._scaled_grouped_mm` and `torch._scaled_mm` in e4m3), and DeepGEMM if
it can be imported. A rival that is missing or raises is recorded with its reason. Our results are
compared with float64 on some rows. The results are a file `gemm.<device>.json`.

`--variants` times other tiles than those that the plans choose, each in a separate process, since
some of them have never run. They are the entry `variants` of the same file; each run replaces what
it has measured and keeps the rest.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tile_kernels import config, gemm
from tile_kernels.gemm import samples, tiling
from tile_kernels.gemm.fp8_fp4.reference import expanded_fp4_weights
from tile_kernels.gemm.product_reference import widened
from tile_kernels.gemm.tiling import Tile
from tile_kernels.runtime import registry
from tile_kernels.runtime.device import current_device
from tile_kernels.runtime.warmup import compilations
from tile_kernels.testing import benchmark, timing
from tile_kernels.testing.numeric import calc_diff

GROUPED, DENSE, MASKED, K_GROUPED = "grouped", "dense", "masked", "k_grouped"
E4M3_WEIGHTS, E2M1_WEIGHTS = "e4m3", "e2m1"
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn


class Case(NamedTuple):
    """`groups` of `rows` rows each; masked: of `max_rows`. `weights`: the format of `b`."""

    kind: str
    groups: int
    rows: int
    n: int
    k: int
    max_rows: int = 0
    weights: str = E4M3_WEIGHTS

    @property
    def label(self) -> str:
        """The name of the case."""
        if self.kind == K_GROUPED:  # d is [groups, n, k]
            return f"{self.kind}.{self.groups}x{self.rows}.m{self.n}.n{self.k}"
        groups = "" if self.kind == DENSE else f"{self.groups}x"
        weights = "" if self.weights == E4M3_WEIGHTS else f".{self.weights}"
        return f"{self.kind}.{groups}{self.rows}.n{self.n}.k{self.k}{weights}"

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        return 2 * self.groups * self.rows * self.n * self.k

    @property
    def bytes(self) -> int:
        """Operands once, and the result."""
        rows = self.groups * self.rows
        if self.kind == K_GROUPED:  # read and written in float32
            return rows * (self.n + self.k) + 8 * self.groups * self.n * self.k
        weights = self.groups * self.n * self.k
        if self.weights == E2M1_WEIGHTS:  # and 4 bits for each 32 channels
            weights = weights // 2 + weights // 64
        return rows * self.k + weights + 2 * rows * self.n


CASES = [
    Case(GROUPED, 8, 4096, 4096, 7168),
    Case(GROUPED, 8, 4096, 7168, 2048),
    Case(GROUPED, 4, 8192, 4096, 7168),
    Case(GROUPED, 4, 8192, 7168, 2048),
    Case(GROUPED, 8, 4096, 6144, 7168),
    Case(GROUPED, 8, 4096, 7168, 3072),
    Case(GROUPED, 8, 4096, 4096, 4096),
    Case(GROUPED, 8, 4096, 4096, 2048),
    Case(GROUPED, 32, 512, 4096, 7168),
    Case(GROUPED, 32, 128, 4096, 7168),
    Case(DENSE, 1, 4096, 4096, 7168),
    Case(DENSE, 1, 4096, 7168, 2048),
    Case(DENSE, 1, 4096, 24576, 1536),
    Case(DENSE, 1, 4096, 7168, 16384),
    Case(DENSE, 1, 128, 4096, 7168),
    Case(DENSE, 1, 1, 4096, 7168),
    Case(MASKED, 32, 16, 4096, 7168, 128),
    Case(MASKED, 32, 20, 7168, 2048, 128),
    Case(MASKED, 6, 20, 4096, 7168, 128),
    Case(MASKED, 32, 192, 4096, 7168, 512),
    Case(K_GROUPED, 4, 8192, 4096, 7168),
    Case(K_GROUPED, 8, 4096, 7168, 2048),
    Case(K_GROUPED, 16, 2048, 4096, 7168),
    Case(MASKED, 32, 16, 4096, 7168, 128, E2M1_WEIGHTS),
    Case(MASKED, 32, 20, 7168, 2048, 128, E2M1_WEIGHTS),
    Case(MASKED, 6, 20, 4096, 7168, 128, E2M1_WEIGHTS),
    Case(MASKED, 32, 192, 4096, 7168, 512, E2M1_WEIGHTS),
    Case(GROUPED, 8, 4096, 4096, 7168, 0, E2M1_WEIGHTS),
    Case(DENSE, 1, 128, 4096, 7168, 0, E2M1_WEIGHTS),
]
# rows, columns, stages, panel, separate, cluster, ahead, alternate, copied_scales
_ROW_TILES = {
    "wide.fp8": tiling.WIDE_FP8,
    "wide.fp8.panel8": tiling.WIDE_FP8_GROUPED,
    "wide.fp8.ahead": Tile(128, 256, 4, 8, True, 1, True, False, True),
    "wide": tiling.WIDE,
    "wide.panel8": Tile(128, 256, 4, 8, True, 1),
    "wide.panel16": Tile(128, 256, 4, 16, True, 1),
    "wide.panel32": Tile(128, 256, 4, 32, True, 1),
    "wide.stages3": Tile(128, 256, 3, 8, True, 1),
    "wide.joint": tiling.WIDE_GROUPED,
    "wide.joint.panel4": Tile(128, 256, 4, 4, False, 1),
    "narrow": tiling.NARROW,
    "narrow.panel16": Tile(128, 128, 5, 16, True, 1),
    "narrow.stages4": Tile(128, 128, 4, 8, True, 1),
    "wide.pairs": Tile(128, 256, 4, 8, True, 2),
    "wide.pairs.panel16": Tile(128, 256, 4, 16, True, 2),
    "narrow.pairs": Tile(128, 128, 5, 8, True, 2),
}
_FEW_ROW_TILES = {
    "few": tiling.FEW_ROWS,
    "few.stages6": Tile(64, 128, 6, 8, True, 1),
    "few.wide": Tile(64, 256, 4, 8, True, 1),
    "narrow": tiling.NARROW,
    "wide": tiling.WIDE,
}
_K_TILES = {
    "wide": Tile(128, 256, 4, 8, True, 1, True),
    "wide.alternate": Tile(128, 256, 4, 8, True, 1, True, True),
    "narrow": tiling.NARROW_FLOAT32,
    "narrow.panel4": Tile(128, 128, 6, 4, True, 1),
    "narrow.panel16": Tile(128, 128, 6, 16, True, 1),
    "narrow.stages4": Tile(128, 128, 4, 8, True, 1),
    "narrow.joint": Tile(128, 128, 6, 8, False, 1),
}
VARIANTS = {
    f"{kind}/{name}": (tile, [case for case in CASES if case in cases])
    for kind, tiles, cases in (
        (GROUPED, _ROW_TILES, [CASES[0], CASES[1], CASES[9]]),
        (DENSE, _ROW_TILES, [CASES[10], CASES[11]]),
        ("dense_few", _FEW_ROW_TILES, [CASES[14], CASES[15]]),
        (MASKED, _FEW_ROW_TILES, [CASES[16], CASES[19]]),
        (K_GROUPED, _K_TILES, [CASES[20], CASES[21]]),
    )
    for name, tile in tiles.items()
}


# ---- arguments ----------------------------------------------------------------------------------


def _cast(x: Tensor, make: Callable[[Tensor], Any]) -> tuple[Tensor, Tensor]:
    """A cast of each matrix of a batch by itself, to save memory."""
    parts = [make(part) for part in x]
    return torch.stack([part[0] for part in parts]), torch.stack([part[1] for part in parts])


def build(case: Case, device: str = "cuda") -> dict[str, Any]:
    """Random normal operands, plain ones and quantized."""
    torch.manual_seed(0)
    groups, rows, n, k = case[1:5]
    make = {"device": device, "dtype": BF16}
    if case.kind == K_GROUPED:
        x, w = (torch.randn(size, groups * rows, **make) for size in (n, k))
        pairs = [samples.by_rows(each, samples.ROW_MAJOR) for each in (x, w)]
        a, b = ((data, sf.T.contiguous()) for data, sf in pairs)
        sizes = torch.full((groups,), rows, dtype=torch.int32, device=device)
        d = torch.zeros(groups, n, k, device=device)
        given = {"a": a, "b": b, "d": d, "ks": None, "grouped_layout": sizes, "c": d}
        return {"x": x, "w": w, "ends": sizes.cumsum(0).int(), "given": given}
    w = torch.randn(groups, n, k, **make)
    b: Any = (
        samples.fp4_weights(w.shape, torch.device(device))
        if case.weights == E2M1_WEIGHTS
        else _cast(w, samples.by_blocks)
    )
    if case.kind == MASKED:
        x = torch.randn(groups, case.max_rows, k, **make)
        data, sf = _cast(x, lambda part: samples.by_rows(part, samples.ROW_MAJOR))
        given = {
            "a": (data, samples.mn_major(sf)), "b": b,
            "d": torch.zeros(groups, case.max_rows, n, **make),
            "masked_m": torch.full((groups,), rows, dtype=torch.int32, device=device),
            "expected_m": rows,
        }  # fmt: skip
        return {"x": x, "w": w, "ends": None, "given": given}
    x = torch.randn(groups * rows, k, **make)
    given = {"a": samples.by_rows(x), "b": b, "d": torch.zeros(groups * rows, n, **make)}
    if case.kind == DENSE:
        given["b"] = tuple(part[0] for part in b)
        return {"x": x, "w": w, "ends": None, "given": given}
    layout, ends = samples.rows_of_groups([rows] * groups)
    given["grouped_layout"] = layout.to(device)
    return {"x": x, "w": w, "ends": ends.to(device), "given": given}


def ours(case: Case) -> Callable[..., Tensor]:
    """Our function for a case."""
    if case.weights == E2M1_WEIGHTS:
        return {
            GROUPED: gemm.m_grouped_fp8_fp4_gemm_nt_contiguous,
            DENSE: gemm.fp8_fp4_gemm_nt,
            MASKED: gemm.m_grouped_fp8_fp4_gemm_nt_masked,
        }[case.kind]
    return {
        GROUPED: gemm.m_grouped_fp8_gemm_nt_contiguous,
        DENSE: gemm.fp8_gemm_nt,
        MASKED: gemm.m_grouped_fp8_gemm_nt_masked,
        K_GROUPED: gemm.k_grouped_fp8_gemm_nt_contiguous,
    }[case.kind]


def _expanded(case: Case, b: Any) -> tuple[Tensor, Tensor]:
    """Weights in e4m3."""
    return expanded_fp4_weights(*b) if case.weights == E2M1_WEIGHTS else b


def difference(case: Case, given: dict[str, Any]) -> float:
    """`calc_diff` of the first and last rows of each group against float64."""
    d, (a, a_sf) = given["d"], given["a"]
    b, b_sf = _expanded(case, given["b"])
    worst = 0.0
    for g in range(case.groups):
        if case.kind == K_GROUPED:
            part = slice(g * case.rows, (g + 1) * case.rows)
            steps = slice(part.start // 128, part.stop // 128)
            left = widened(a[:64, part], a_sf[steps, :64].T, 1)
            right, found = widened(b[:, part], b_sf[steps].T, 1), d[g, :64]
        else:
            chosen = torch.tensor(sorted({0, case.rows // 2, case.rows - 1}), device=d.device)
            chosen = chosen if case.kind in (MASKED, DENSE) else chosen + g * case.rows
            rows = (g, chosen) if case.kind == MASKED else (chosen,)
            left, found = widened(a[rows], a_sf[rows], 1), d[rows]
            right = widened(b if b.dim() == 2 else b[g], b_sf if b.dim() == 2 else b_sf[g], 128)
        worst = max(worst, float(calc_diff(found, left @ right.T)))
    return worst


# ---- rivals -------------------------------------------------------------------------------------


def rivals(case: Case, made: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """Calls by name. Their scales do not matter for the time, so some are ones."""
    x, w, ends, given = made["x"], made["w"], made["ends"], made["given"]
    a, b, device = given["a"], _expanded(case, given["b"]), x.device
    fast: dict[str, Any] = {"out_dtype": BF16, "use_fast_accum": True}
    if case.weights == E2M1_WEIGHTS:  # the same product of weights that were expanded before
        wide, d = case._replace(weights=E4M3_WEIGHTS), torch.empty_like(given["d"])
        return {"tile_kernels, e4m3": lambda: ours(wide)(**{**given, "b": b, "d": d})}

    def ones(*shape: int) -> Tensor:
        return torch.ones(shape, device=device)

    def deep(name: str, **changes: Any) -> Any:
        arguments = {**given, **changes}
        return getattr(importlib.import_module("deep_gemm"), name)(**arguments)

    if case.kind == GROUPED:
        return {
            "torch._grouped_mm bf16": lambda: torch._grouped_mm(x, w.mT, offs=ends),
            "torch._scaled_grouped_mm e4m3, scales by row": lambda: torch._scaled_grouped_mm(
                a[0], b[0].mT, ones(len(x)), ones(case.groups, case.n), offs=ends, **fast
            ),
            "deep_gemm": lambda: deep("m_grouped_fp8_gemm_nt_contiguous"),
        }
    if case.kind == K_GROUPED:
        total = case.groups
        return {
            "torch._grouped_mm bf16": lambda: torch._grouped_mm(x, w.T, offs=ends),
            "torch._scaled_grouped_mm e4m3, scales by row": lambda: torch._scaled_grouped_mm(
                a[0], b[0].T, ones(total * case.n), ones(total * case.k), offs=ends, **fast
            ),
            "deep_gemm": lambda: deep(
                "k_grouped_fp8_gemm_nt_contiguous", ks=[case.rows] * case.groups
            ),
        }
    if case.kind == MASKED:
        few = x[:, : case.rows].contiguous()
        return {
            "torch.bmm bf16": lambda: torch.bmm(few, w.mT),
            "deep_gemm": lambda: deep("m_grouped_fp8_gemm_nt_masked"),
        }
    return {
        "torch.mm bf16": lambda: x @ w[0].T,
        "torch._scaled_mm e4m3, one scale": lambda: torch._scaled_mm(
            a[0], b[0].T, ones(), ones(), **fast
        ),
        "torch._scaled_mm e4m3, scales by row": lambda: torch._scaled_mm(
            a[0], b[0].T, ones(len(x), 1), ones(1, case.n), **fast
        ),
        "torch._scaled_mm e4m3, 1x128 and 128x128": lambda: torch._scaled_mm(
            a[0], b[0].T, a[1], b[1].T, out_dtype=BF16
        ),
        "deep_gemm": lambda: deep("fp8_gemm_nt"),
    }


# ---- measuring ----------------------------------------------------------------------------------


def measured(case: Case, name: str, call: Callable[[], Any], repeats: int) -> dict[str, Any]:
    """One line of results; the reason in place of a time if the call raises."""
    line: dict[str, Any] = {"case": case.label, "name": name}
    try:
        us = timing.time_device(call, repeats=repeats).us
    except Exception as error:
        text = " ".join(str(error).split())
        return {**line, "error": f"{type(error).__name__}: {text[:200]}"}
    return {
        **line, "us": round(us, 2), "tflops": round(case.flops / us / 1e6, 1),
        "gb_per_s": round(case.bytes / us / 1e3, 1),
    }  # fmt: skip


def measure(case: Case, name: str, beside: bool, repeats: int) -> list[dict[str, Any]]:
    """Ours, compared with float64 before, and its rivals."""
    made = build(case)
    given, function = made["given"], ours(case)
    lines = []
    try:
        function(**given)
        diff = difference(case, given)
        line = measured(case, name, lambda: function(**given), repeats)
        lines.append({**line, "diff": diff, "right": bool(diff < 1e-5)})
        if case.kind != K_GROUPED:  # whose result accumulates
            first = given["d"].clone()
            lines[-1]["same_bits"] = bool(torch.equal(first, function(**given)))
    except Exception as error:
        lines.append({"case": case.label, "name": name, "error": repr(error)[:300]})
    if beside:
        lines += [measured(case, each, call, repeats) for each, call in rivals(case, made).items()]
    return lines


def show(line: dict[str, Any]) -> None:
    """One line of text for one of results."""
    if "us" in line:
        flags = [flag for flag in ("right", "same_bits") if line.get(flag) is False]
        wrong = f"  NOT {', NOT '.join(flags)}" if flags else ""
        diff = f"  diff {line['diff']:.1e}" if "diff" in line else ""
        text = f"{line['us']:9.1f} us {line['tflops']:7.0f} TFLOP/s {line['gb_per_s']:6.0f} GB/s"
        print(f"{line['case']:32} {line['name']:46} {text}{diff}{wrong}", flush=True)
    else:
        print(f"{line['case']:32} {line['name']:46} {line['error']}", flush=True)


def requests(case: Case) -> Any:
    """The kernels of a case, with the tile that is set."""
    name = f"gemm.{ours(case).__name__}"
    return compilations([(name, build(case, "meta")["given"])], current_device())


def compile_all(work: Sequence[Any]) -> None:
    """Compiles kernels at the same time; errors are found again when a case runs."""

    def one(item: Any) -> None:
        try:
            item.kernel.handle(item.static, item.arch)
        except Exception as error:
            print(f"{item.label}: {error!r}"[:400], flush=True)

    began = time.perf_counter()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(one, dict.fromkeys(work)))
    print(f"compiled {len(work)} in {time.perf_counter() - began:.0f} s", flush=True)


def test_kernels() -> list[Any]:
    """The kernels of all argument sets of the family, which the tests on a GPU run."""
    calls = [
        (op.name, sample.build("meta"))
        for op in registry.select(["gemm"])
        for kind in ("small", "large", "benchmarks")
        for sample in getattr(op.cases, kind)
    ]
    return compilations(calls, current_device())


def set_tile(tile: Tile | None) -> None:
    """Makes the plans use this tile. What was planned before does not hold any more."""
    tiling.override = tile
    config.generation += 1


def variants(chosen: Sequence[str], seconds: float, repeats: int) -> list[dict[str, Any]]:
    """Each variant in a separate process; one that hangs or fails costs one line."""
    work = []
    for name in chosen:
        set_tile(VARIANTS[name][0])
        for case in VARIANTS[name][1]:
            work += requests(case)
    set_tile(None)
    compile_all(work)
    lines = []
    for name in chosen:
        command = [
            sys.executable,
            "-m",
            "benchmarks.gemm",
            "--variant",
            name,
            "--repeats",
            str(repeats),
        ]
        error, text = "", ""
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=seconds, check=False
            )
            text = done.stdout
            error = f"exit {done.returncode}: {done.stderr[-200:]}" if done.returncode else ""
        except subprocess.TimeoutExpired as late:
            text = late.stdout.decode() if isinstance(late.stdout, bytes) else late.stdout or ""
            error = f"stopped after {seconds} s"
        found = [json.loads(line[1:]) for line in text.splitlines() if line.startswith("@")]
        if error:
            found.append({"case": name, "name": name, "error": " ".join(error.split())})
        for line in found:
            show(line)
        lines += found
    return lines


def run(cases: Sequence[Case], repeats: int) -> list[dict[str, Any]]:
    """Every case with its rivals."""
    compile_all([item for case in cases for item in requests(case)])
    lines = []
    for case in cases:
        found = measure(case, "tile_kernels", True, repeats)
        for line in found:
            show(line)
        lines += found
        gc.collect()
        torch.cuda.empty_cache()
    return lines


def merged(
    kept: dict[str, Any], measured_now: dict[str, list[dict[str, Any]]], machine: dict[str, Any]
) -> dict[str, Any]:
    """The content of the results file: lines of cases that were measured now replace older ones.

    A line that stays from an earlier run has the date of that run.
    """
    content = {
        "machine": machine,
        "method": "device time, cold L2 cache, median",
        "copy_gb_per_s": round(timing.copy_bandwidth(), 1),
        "results": kept.get("results", []),
        "variants": kept.get("variants", []),
    }
    earlier = kept.get("machine", {}).get("date")
    for entry, lines in measured_now.items():
        again = {(line["case"], line["name"]) for line in lines}
        old = [line for line in content[entry] if (line["case"], line["name"]) not in again]
        content[entry] = lines + old
    now = {id(line) for lines in measured_now.values() for line in lines}
    for entry in ("results", "variants"):
        content[entry] = [
            line if id(line) in now else {"date": earlier, **line} for line in content[entry]
        ]
    return content


def main(arguments: Sequence[str] | None = None) -> Path | None:
    """Measures, prints and saves; returns the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", nargs="*", help="parts of names of cases or variants")
    parser.add_argument("--variants", action="store_true")
    parser.add_argument(
        "--compile", action="store_true", help="only compile what the tests and the cases need"
    )
    parser.add_argument("--variant", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=40, help="for one variant")
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--output", type=Path, default=benchmark.DEFAULT_FOLDER, metavar="FOLDER")
    options = parser.parse_args(arguments)
    if options.compile:
        compile_all([*test_kernels(), *(item for case in CASES for item in requests(case))])
        return None
    if options.variant:
        tile, cases = VARIANTS[options.variant]
        set_tile(tile)
        for case in cases:
            for line in measure(case, options.variant, False, options.repeats):
                print("@" + json.dumps(line), flush=True)
        return None

    def wanted(name: str) -> bool:
        return not options.case or any(part in name for part in options.case)

    if options.variants:
        chosen = [each for each in VARIANTS if wanted(each)]
        measured_now = {"variants": variants(chosen, options.seconds, options.repeats)}
    else:
        lines = run([case for case in CASES if wanted(case.label)], options.repeats)
        measured_now = {"results": lines}
    machine = benchmark.machine()
    path: Path = options.output / f"gemm.{benchmark.slug(machine['device'])}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(merged(kept, measured_now, machine), indent=2) + "\n")
    return path


if __name__ == "__main__":
    print(main() or "")
