"""Start-up and host time of compiled kernels, in a process without TileLang and without nvcc.

    python benchmarks/startup.py [FILE]      writes JSON; needs a GPU, and TileLang and nvcc to pack
    python benchmarks/startup.py --bundle BUNDLE --pack-only         compiles before, then
    python benchmarks/startup.py --bundle BUNDLE [FILE]              only measures

A bundle of the calls below is packed first. Then a process runs them from it. That process sees a
folder of links to every installed package except TileLang, TVM and their FFI, has a PATH without
programs, and reports every process that something in it tries to start. Its results are compared,
bit for bit, with kernels that TileLang itself compiled and launches. Host times are measured beside
those of TileLang's launches in one process with TileLang. Another process, with TileLang and nvcc,
without a bundle and with empty caches, measures the same way to the first result by compiling.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
HIDDEN = ("tilelang", "tvm", "tvm_ffi", "apache_tvm_ffi", "z3", "__editable__")
# Small sizes: host time shows. The product has TMA descriptors, the gate scalars.
CALLS: dict[str, dict[str, Any]] = {
    "moe.topk_gate": {"scores": "float32[64,256]", "num_topk": 8},
    "quant.per_token_cast": {"x": "bfloat16[64,7168]", "fmt": "e4m3", "num_per_channels": 128},
    "transpose.transpose": {"x": "bfloat16[128,1024]"},
    "mhc.sinkhorn_normalize": {"x": "float32[64,4,4]"},
    "gemm.bf16_gemm_nt": {
        "a": "bfloat16[128,512]", "b": "bfloat16[256,512]", "d": "bfloat16[128,256]",
    },
}  # fmt: skip


def arguments(call: dict[str, Any]) -> dict[str, Any]:
    """The same values in every process: counted, so that no generator is involved."""
    import torch

    from tile_kernels.runtime.warmup import tensor_of

    found: dict[str, Any] = {}
    for name, value in call.items():
        if isinstance(value, str) and "[" in value:
            meta = tensor_of(value)
            counted = torch.arange(meta.numel(), device="cuda") * 7919 % 1009 / 512 - 1
            found[name] = counted.reshape(meta.shape).to(meta.dtype)
        else:
            found[name] = value
    return found


def run(name: str, values: dict[str, Any]) -> list[Any]:
    """The results of one call."""
    import tile_kernels

    family, _, function = name.partition(".")
    result = getattr(getattr(tile_kernels, family), function)(**values)
    return list(result) if isinstance(result, tuple) else [result]


# ---- the process without TileLang ---------------------------------------------------------------


def isolated(output: Path) -> None:
    """Runs every call and saves what it measured and the results."""
    import importlib.util
    import shutil

    started: list[str] = []

    def audit(event: str, values: tuple[Any, ...]) -> None:
        if event in {"subprocess.Popen", "os.exec", "os.posix_spawn", "os.system"}:
            started.append(f"{event} {values[0]!r}")

    sys.addaudithook(audit)
    begin = time.perf_counter()
    import torch

    torch_s = time.perf_counter() - begin
    begin = time.perf_counter()
    torch.zeros(1, device="cuda").item()
    context_s = time.perf_counter() - begin
    name, call = next(iter(CALLS.items()))
    scores = torch.rand(64, 256, device="cuda")
    torch.cuda.synchronize()

    begin = time.perf_counter()
    import tile_kernels

    tile_kernels.moe.topk_gate(scores, call["num_topk"])
    torch.cuda.synchronize()
    first_s = time.perf_counter() - begin

    firsts, results, graphs = {}, {}, {}
    for name, call in CALLS.items():
        values = arguments(call)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        found = run(name, values)
        torch.cuda.synchronize()
        firsts[name] = time.perf_counter() - begin
        results[name] = [x.cpu() for x in found]
        graphs[name] = _captured(name, values, found)
    report = {
        "import_torch_s": torch_s,
        "cuda_context_s": context_s,
        "import_to_first_result_s": first_s,
        "first_call_s": firsts,
        "graph_equals": graphs,
        "tilelang_found": importlib.util.find_spec("tilelang") is not None,
        "tvm_ffi_found": importlib.util.find_spec("tvm_ffi") is not None,
        "nvcc_found": shutil.which("nvcc"),
        "tvm_libraries": [x for x in Path("/proc/self/maps").read_text().split() if "tvm" in x],
        "processes_started": started,
        "python": sys.version.split()[0],
        "torch": torch.__version__,
    }
    torch.save(results, output / "results.pt")
    (output / "report.json").write_text(json.dumps(report))


def _captured(name: str, values: dict[str, Any], expected: list[Any]) -> bool:
    """Whether a CUDA graph of the call gives the same bits, with its inputs written anew."""
    import torch

    expected = [x.clone() for x in expected]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(name, values)
    for x in found:
        x.view(torch.uint8).zero_()
    graph.replay()
    torch.cuda.synchronize()
    return all(torch.equal(_bits(a), _bits(b)) for a, b in zip(found, expected, strict=True))


def _bits(x: Any) -> Any:
    import torch

    flat = torch.empty(x.numel(), dtype=x.dtype, device=x.device).copy_(x.flatten())
    return flat.view(torch.uint8)


# ---- the processes with TileLang ----------------------------------------------------------------


def compiling(output: Path) -> None:
    """Measures the time to the first result where the kernel has to be compiled."""
    import torch

    _, call = next(iter(CALLS.items()))
    scores = torch.rand(64, 256, device="cuda")
    torch.cuda.synchronize()
    begin = time.perf_counter()
    import tile_kernels

    tile_kernels.moe.topk_gate(scores, call["num_topk"])
    torch.cuda.synchronize()
    output.write_text(json.dumps(time.perf_counter() - begin))


def _start_compiling(place: Path) -> float:
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); from pathlib import Path; "
        f"from benchmarks import startup; startup.compiling(Path({str(place / 'first.json')!r}))"
    )
    environment = {
        **{name: each for name, each in os.environ.items() if name != "TILE_KERNELS_BUNDLES"},
        "TILE_KERNELS_CACHE": str(place / "compiled"),
        "TILELANG_CACHE_DIR": str(place / "tilelang"),
    }
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    seconds: float = json.loads((place / "first.json").read_text())
    return seconds


def tilelang_handle(definition: Any, static: tuple[Any, ...], arch: str) -> Callable[..., Any]:
    """The kernel as TileLang compiles and launches it, without its wrapper around the launch."""
    import tilelang

    compiled = tilelang.compile(
        definition.prim_func(static),
        target={"kind": "cuda", "arch": arch},
        execution_backend="tvm_ffi",
        pass_configs=definition.pass_configs,
    )
    executable = compiled.adapter.get_exportable_executable()
    module = executable.jit() if hasattr(executable, "jit") else executable
    return module["main"]


def main() -> None:
    """Packs, runs the other process, compares; writes after every step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path, nargs="?", help="default: benchmarks/results")
    parser.add_argument("--bundle", type=Path, help="kernels that were packed before")
    parser.add_argument("--pack-only", action="store_true", help="pack into --bundle, and compile")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        bundle = options.bundle or place / "kernels.zip"
        if options.pack_only or not bundle.exists():
            _pack(bundle)
        if options.pack_only:
            _compile_with_tilelang()
            return
        reports = []
        for _ in range(2):  # the first one reads the disk
            _start_isolated(place, bundle)
            reports.append(json.loads((place / "report.json").read_text()))
            print(json.dumps(reports[-1]), flush=True)
        report = min(reports, key=lambda each: each["import_to_first_result_s"])
        report["all_import_to_first_result_s"] = [r["import_to_first_result_s"] for r in reports]
        report["compiled_first_result_s"] = _start_compiling(place)
        report["bundle_bytes"] = bundle.stat().st_size
        _compare(report, place / "results.pt", bundle, options.output)


def _pack(bundle: Path) -> None:
    from tile_kernels.runtime import packing
    from tile_kernels.runtime.device import current_device

    packing.pack(bundle, arch=current_device().arch, calls=list(CALLS.items()), progress=False)


def _items() -> dict[str, Any]:
    """The kernel of each call; none needs more than one."""
    from tile_kernels.runtime import warmup

    device = warmup.planned_device()
    found = {name: warmup.compilations([(name, call)], device) for name, call in CALLS.items()}
    return {name: item for name, (item,) in found.items()}


def _compile_with_tilelang() -> None:
    """Fills TileLang's own cache, for the comparison."""
    for item in _items().values():
        tilelang_handle(item.kernel.definition, item.static, item.arch)
        print(item.label, flush=True)


def _compare(report: dict[str, Any], saved: Path, bundle: Path, output: Path | None) -> None:
    """Host times here and as TileLang launches, and whether the results are the same bits."""
    import torch

    from tile_kernels.runtime import bundles
    from tile_kernels.testing import benchmark, timing

    results = torch.load(saved)
    content = {"machine": benchmark.machine(), **report}
    name = f"startup.{benchmark.slug(content['machine']['device'])}.json"
    path = output or ROOT / "benchmarks/results" / name
    columns: dict[str, dict[str, Any]] = {
        column: content.setdefault(column, {})
        for column in ("host_us", "host_us_tilelang", "launch_us", "launch_us_tilelang",
                       "equals_tilelang")
    }  # fmt: skip
    bundles.set_bundles([bundle])
    for name, item in _items().items():
        values = arguments(CALLS[name])
        call = functools.partial(run, name, values)
        kept: list[tuple[Any, ...]] = []
        ours = item.kernel.handle(item.static, item.arch)
        theirs = tilelang_handle(item.kernel.definition, item.static, item.arch)
        _use(item, _Keeping(theirs, kept))
        same = [torch.equal(_bits(a.cpu()), _bits(b)) for a, b in zip(call(), results[name])]
        columns["equals_tilelang"][name] = all(same)
        args = kept[0]
        launches = {
            "": functools.partial(ours.fixed(range(len(args))), args),  # as an operator calls it
            "_tilelang": functools.partial(theirs, *args),
        }
        times: dict[str, list[float]] = {}
        for _ in range(4):  # in turns: the machine is not equally busy all the time
            for column, handle in (("", ours), ("_tilelang", theirs)):
                _use(item, handle)
                times.setdefault(f"host_us{column}", []).append(timing.time_host(call))
                launched = timing.time_host(launches[column])
                times.setdefault(f"launch_us{column}", []).append(launched)
        for column, measured in times.items():
            columns[column][name] = round(min(measured), 2)
        print(name, {column: found.get(name) for column, found in columns.items()}, flush=True)
        path.write_text(json.dumps(content, indent=2) + "\n")


def _use(item: Any, handle: Any) -> None:
    """Lets the operators launch a kernel by `handle`."""
    from tile_kernels.runtime import registry

    item.kernel._planned.clear()
    item.kernel._handles[item.arch, item.static] = handle
    for op in registry.operators():
        op.forget()


class _Keeping:
    """A handle that keeps the arguments of its calls."""

    def __init__(self, handle: Any, kept: list[tuple[Any, ...]]) -> None:
        self._handle, self._kept = handle, kept

    def __call__(self, *args: Any) -> None:
        self._kept.append(args)
        self._handle(*args)


def _start_isolated(place: Path, bundle: Path) -> None:
    links = place / "packages"
    links.mkdir(exist_ok=True)
    for found in {*sysconfig.get_paths().values(), *sys.path}:
        folder = Path(found)
        if folder.name not in {"site-packages", "dist-packages"} or not folder.is_dir():
            continue
        for each in folder.iterdir():
            target = links / each.name
            if not each.name.startswith(HIDDEN) and not target.exists():
                target.symlink_to(each)
    code = (
        f"import sys; sys.path[:0] = [{str(ROOT)!r}]; sys.path += [{str(links)!r}]; "
        f"from pathlib import Path; from benchmarks import startup; "
        f"startup.isolated(Path({str(place)!r}))"
    )
    kept = ("LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "HOME")
    environment = {
        **{name: os.environ[name] for name in kept if name in os.environ},
        "PATH": str(place / "no-programs"),
        "TILE_KERNELS_BUNDLES": str(bundle),
        "TILE_KERNELS_CACHE": str(place / "empty-cache"),
    }
    # -I: no PYTHONPATH and no folder of the script; -S: no site-packages.
    subprocess.run([sys.executable, "-I", "-S", "-c", code], env=environment, check=True)


if __name__ == "__main__":
    main()
