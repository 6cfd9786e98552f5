"""Compares `tile_kernels.integrations` and `tile_kernels.ep` with the packages that they serve.

    python tools/check_integrations.py [--cache FOLDER]

Downloads released packages from PyPI, about 100 MB, and installs none of them: signatures are read
from their sources, and single files that need nothing else of the package are executed. Writes
`docs/measured/integrations.json`, of which `docs/tables.py` makes a table. No GPU is needed.

| package | what is compared |
|---|---|
| vllm | signatures; mHC and grouped routing of its PyTorch functions; the plug-in in its registry |
| sglang | signatures; the plug-in in its registry |
| sgl-deep-gemm | signatures |
| torchao | MX and NVFP4 casts, the blocked layout of scales |
| megatron-core, torchtitan | their DeepEP files, unmodified, on 2 processes over gloo |
| megatron-core | its router in PyTorch |
| nemo-automodel | its file that chooses kernels, unmodified: the Sinkhorn normalization |
| transformers | the installed one: tiny models, by the tests of this package |
"""

from __future__ import annotations

import argparse
import ast
import importlib.metadata
import importlib.util
import inspect
import json
import logging
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import types
import typing
import urllib.parse
import urllib.request
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the tests' processes

from tests.ep.processes import run_processes  # noqa: E402
from tile_kernels.integrations import deep_gemm, megatron, mx, plugins, sglang, vllm  # noqa: E402

OUTPUT = ROOT / "docs" / "measured" / "integrations.json"
INDEX = "https://pypi.org/simple/"
PACKAGES = {
    "vllm": ("0.32.0", r"vllm-0\.32\.0\.tar\.gz"),
    "sglang": ("0.5.23", r"sglang-0\.5\.23-cp311-cp311-[^\"#<>]*x86_64\.whl"),
    "sgl-deep-gemm": ("0.2.3.post2", r"sgl_deep_gemm-0\.2\.3\.post2-[^\"#<>]*x86_64\.whl"),
    "torchao": ("0.18.0", r"torchao-0\.18\.0-[^\"#<>]*x86_64\.whl"),
    "megatron-core": ("0.16.1", r"megatron_core-0\.16\.1\.tar\.gz"),
    "torchtitan": ("0.3.0", r"torchtitan-0\.3\.0-py3-none-any\.whl"),
    "nemo-automodel": ("0.7.0", r"nemo_automodel-0\.7\.0-py3-none-any\.whl"),
}
EXPERTS, HIDDEN, TOPK = 8, 256, 3


def fetch(name: str, pattern: str, folder: Path) -> Path:
    """The archive of a package, downloaded unless the folder has it."""
    page_url = f"{INDEX}{name}/"
    with urllib.request.urlopen(page_url, timeout=60) as answer:  # noqa: S310 - of the index
        page = answer.read().decode()
    found = re.search(rf'href="([^"#]*/({pattern}))', page)
    if found is None:
        raise SystemExit(f"{page_url} has no file {pattern}")
    file = folder / found.group(2)
    if not file.exists():
        urllib.request.urlretrieve(urllib.parse.urljoin(page_url, found.group(1)), file)  # noqa: S310
    return file


def sources(archive: Path) -> Iterator[tuple[str, bytes]]:
    """Names and texts of the Python files of an archive."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for name in wheel.namelist():
                if name.endswith(".py"):
                    yield name, wheel.read(name)
        return
    with tarfile.open(archive) as sdist:
        for member in sdist:
            content = sdist.extractfile(member) if member.name.endswith(".py") else None
            if content is not None:
                yield member.name.split("/", 1)[1], content.read()


def source(archive: Path, name: str) -> str:
    """The text of one file."""
    return next(text for found, text in sources(archive) if found == name).decode()


def load(text: str, name: str) -> types.ModuleType:
    """A module of a text."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{name}.py"
        file.write_text(text)
        spec = importlib.util.spec_from_file_location(name, file)
        if spec is None or spec.loader is None:
            raise RuntimeError(f"{name} cannot be loaded")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return module


# ---- signatures ---------------------------------------------------------------------------------

# Where a name is defined, and the name that it has there, if another one.
_TILELANG = "vllm/model_executor/kernels/mhc/tilelang.py"
_MOE = "vllm/model_executor/layers/fused_moe"
_FP8 = "vllm/model_executor/layers/quantization/utils/fp8_utils.py"
SIGNATURES: dict[str, list[tuple[types.ModuleType, str, str, str]]] = {
    "vllm": [
        (vllm, "fused_topk", f"{_MOE}/router/fused_topk_router.py", ""),
        (vllm, "fused_topk_bias", f"{_MOE}/router/fused_topk_bias_router.py", ""),
        (vllm, "grouped_topk", f"{_MOE}/router/grouped_topk_router.py", ""),
        (vllm, "moe_align_block_size", f"{_MOE}/moe_align_block_size.py", ""),
        (vllm, "moe_permute", f"{_MOE}/moe_permute_unpermute.py", ""),
        (vllm, "top_k_per_row_prefill", "vllm/_custom_ops.py", ""),
        (vllm, "top_k_per_row_decode", "vllm/_custom_ops.py", ""),
        (vllm, "per_token_group_quant_fp8", _FP8, ""),
        (vllm, "per_token_group_quant_fp8_packed_for_deepgemm", _FP8, ""),
        (vllm, "mhc_pre", _TILELANG, "mhc_pre_tilelang"),
        (vllm, "mhc_pre_delayed", _TILELANG, "mhc_pre_delayed_tilelang"),
        (vllm, "mhc_post", "vllm/_aiter_ops.py", ""),
        (vllm, "mhc_fused_post_pre", _TILELANG, "mhc_fused_post_pre_tilelang"),
    ],
    "sglang": [
        (sglang, "moe_fused_gate", "kernels/ops/moe/moe_fused_gate.py", ""),
        (sglang, "hash_topk", "kernels/ops/moe/dsv4.py", ""),
        (
            sglang,
            "moe_align_block_size",
            "srt/layers/moe/moe_runner/triton_utils/moe_align_block_size.py",
            "",
        ),
        (sglang, "topk_transform_paged", "kernels/ops/attention/dsv4/topk.py", ""),
        (sglang, "topk_transform_ragged_v2", "kernels/ops/attention/dsv4/topk.py", ""),
        (
            sglang,
            "sglang_per_token_group_quant_fp8",
            "kernels/ops/quantization/fp8_kernel.py",
            "",
        ),
        (sglang, "mhc_pre", "kernels/ops/layernorm/mhc.py", ""),
        (sglang, "mhc_post", "kernels/ops/layernorm/mhc.py", ""),
        (sglang, "mhc_fused_post_pre", "kernels/ops/layernorm/mhc.py", ""),
        (sglang, "fused_hc_head", "kernels/ops/layernorm/mhc_head.py", ""),
    ],
    "sgl-deep-gemm": [
        (deep_gemm, name, "deep_gemm/__init__.py", "")
        for name in (
            "fp8_mqa_logits",
            "fp8_fp4_mqa_logits",
            "fp8_paged_mqa_logits",
            "fp8_fp4_paged_mqa_logits",
            "get_paged_mqa_logits_metadata",
            "tf32_hc_prenorm_gemm",
        )
    ],
}
# By position only: other names of arguments in this fork.
RENAMED = {("sgl-deep-gemm", "fp8_mqa_logits")}


def parameters(text: str, name: str) -> list[str]:
    """Names of the parameters of the last function of that name; `*name` by keyword only."""
    found = [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef) and node.name == name
    ]
    arguments = found[-1].args
    by_keyword = [f"*{each.arg}" for each in arguments.kwonlyargs]
    return [each.arg for each in arguments.posonlyargs + arguments.args] + by_keyword


def check_signatures(package: str, archive: Path) -> str:
    """Raises unless each function takes the parameters of its counterpart, in its order."""
    texts = dict(sources(archive))
    entries = SIGNATURES[package]
    for module, name, file, other in entries:
        match = [text for path, text in texts.items() if path.endswith(file)]
        theirs = parameters(match[0].decode(), other or name)
        ours = [
            f"*{each.name}" if each.kind is each.KEYWORD_ONLY else each.name
            for each in inspect.signature(getattr(module, name)).parameters.values()
        ]
        if (package, name) in RENAMED:
            theirs, ours = ["?"] * len(theirs), ["?"] * len(ours)
        if ours[: len(theirs)] != theirs:
            raise SystemExit(f"{package}: {name} has {theirs}, here {ours}")
    return f"signatures of {len(entries)} functions"


# ---- results ------------------------------------------------------------------------------------


def require(condition: bool, what: str) -> None:
    """Raises if something differs."""
    if not condition:
        raise SystemExit(f"{what} differs")


def check_vllm(archive: Path) -> str:
    """Hyper-connections and grouped routing against its functions in PyTorch."""
    theirs = load(source(archive, "vllm/model_executor/kernels/mhc/torch.py"), "vllm_mhc")
    torch.manual_seed(0)
    residual, fn = torch.randn(6, 4, 512).bfloat16(), 0.03 * torch.randn(24, 2048)
    given = (
        residual,
        fn,
        torch.tensor([0.5, 0.6, 0.7]),
        torch.randn(24),
        1e-6,
        1e-6,
        1e-6,
        2.0,
        20,
    )
    ours = vllm.mhc_pre(*given)
    for one, other, limit in zip(ours, theirs.mhc_pre_torch(*given), (1e-3, 1e-3, 0.04)):
        require(one.dtype == other.dtype and one.shape == other.shape, "vllm: mhc_pre")
        require(bool((one.float() - other.float()).abs().max() < limit), "vllm: mhc_pre")
    x = torch.randn(6, 512).bfloat16()
    after = theirs.mhc_post_torch(x, residual, *ours[:2])
    require(torch.equal(vllm.mhc_post(x, residual, *ours[:2]), after), "vllm: mhc_post")

    text = source(archive, f"{_MOE}/router/grouped_topk_router.py")
    (function,) = (
        node
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef) and node.name == "grouped_topk"
    )
    function.decorator_list = []
    settings = types.SimpleNamespace(
        VLLM_USE_FUSED_MOE_GROUPED_TOPK=False, VLLM_BATCH_INVARIANT=True
    )
    scope: dict[str, Any] = {
        "torch": torch,
        "envs": settings,
        "current_platform": types.SimpleNamespace(is_cuda=lambda: False),
    }
    exec(compile(ast.Module([function], []), "grouped_topk", "exec"), scope)  # noqa: S102
    logits, bias = 2 * torch.randn(2000, 256), torch.rand(256)
    for scoring, given_bias in (("sigmoid", bias), ("sigmoid", None), ("softmax", None)):
        for renormalize in (True, False):
            words = (logits, logits, 8, renormalize, 8, 4, scoring, 2.5, given_bias)
            weights, ids = sorted_by_id(*scope["grouped_topk"](*words))
            own_weights, own_ids = sorted_by_id(*vllm.grouped_topk(*words))
            require(torch.equal(ids, own_ids), f"vllm: experts of grouped_topk, {scoring}")
            close = torch.allclose(weights, own_weights, rtol=1e-5, atol=1e-6)
            require(close, f"vllm: weights of grouped_topk, {scoring}")
    return "results of mHC and grouped routing"


class Stubs(MetaPathFinder, Loader):
    """Modules of a package: some from its sources, others with the given attributes alone.

    An attribute that is not given is an empty class.
    """

    def __init__(
        self, package: str, sources: dict[str, str], given: dict[str, dict[str, Any]]
    ) -> None:
        self.package, self.sources, self.given = package, sources, given

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """A spec for every module of the package."""
        del path, target
        if name.partition(".")[0] != self.package:
            return None
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        """A module whose missing attributes are empty classes."""
        module = types.ModuleType(spec.name)
        if spec.name not in self.sources:
            vars(module).update(self.given.get(spec.name, {}))

            def missing(name: str) -> type:
                if name.startswith("__") or f"{spec.name}.{name}" in {*self.sources, *self.given}:
                    raise AttributeError(name)
                return type(name, (), {})

            vars(module)["__getattr__"] = missing
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Runs the source, if there is one."""
        if module.__name__ in self.sources:
            code = compile(self.sources[module.__name__], module.__name__, "exec")
            exec(code, vars(module))  # noqa: S102


def check_vllm_plugin(archive: Path) -> str:
    """vLLM's classes, registered over by the plug-in, against its functions in PyTorch."""
    config = types.SimpleNamespace(
        custom_ops=["none"], enabled_custom_ops=Counter(), disabled_custom_ops=Counter()
    )
    others = ("is_rocm", "is_cpu", "is_tpu", "is_xpu", "is_out_of_tree")
    platform = types.SimpleNamespace(
        is_cuda=lambda: True, simple_compile_backend="eager", **dict.fromkeys(others, lambda: False)
    )
    given: dict[str, dict[str, Any]] = {
        "vllm.config": {"get_cached_compilation_config": lambda: config},
        "vllm.logger": {"init_logger": logging.getLogger},
        "vllm.platforms": {"current_platform": platform},
        "vllm._aiter_ops": {"is_aiter_found_and_supported": lambda: False},
        "vllm.utils.import_utils": {"has_tilelang": lambda: False},
        "vllm.model_executor.utils": {"maybe_disable_graph_partition": lambda _: {}},
    }
    executor = "vllm/model_executor"
    files = {
        "vllm.model_executor.custom_op": f"{executor}/custom_op.py",
        "vllm.model_executor.layers.mhc": f"{executor}/layers/mhc.py",
        "vllm.model_executor.kernels.mhc": f"{executor}/kernels/mhc/torch.py",
        "vllm.model_executor.layers.fused_moe.router.grouped_topk_router": (
            f"{_MOE}/router/grouped_topk_router.py"
        ),
    }
    stubs = Stubs("vllm", {name: source(archive, file) for name, file in files.items()}, given)
    sys.meta_path.insert(0, stubs)
    names = plugins.register_vllm()
    layers = importlib.import_module("vllm.model_executor.layers.mhc")
    theirs = importlib.import_module("vllm.model_executor.kernels.mhc")
    sys.meta_path.remove(stubs)
    require(len(names) == 6, "vllm: the classes that are replaced")
    torch.manual_seed(0)
    residual, fn = torch.randn(6, 4, 512).bfloat16(), 0.03 * torch.randn(24, 2048)
    more = torch.tensor([0.5, 0.6, 0.7]), torch.randn(24), 1e-6, 1e-6, 1e-6, 2.0, 20
    given_pre = residual, fn, *more
    post, comb, x = theirs.mhc_pre_torch(*given_pre)
    after = theirs.mhc_post_torch(x, residual, post, comb)
    mixes = torch.rand(6, 4)
    delayed = {"sublayer_out": x, "post_layer_mix": post, "comb_res_mix": comb}
    for name, arguments, keywords, expected in (
        ("MHCPreOp", given_pre, {}, (post, comb, x)),
        ("MHCPostOp", (x, residual, post, comb), {}, (after,)),
        (
            "MHCFusedPostPreOp", (x, residual, post, comb, fn, *more), {},
            (after, *theirs.mhc_pre_torch(after, fn, *more)),
        ),
        (
            "MHCPreDelayedOp", (*given_pre, mixes), delayed,
            (after, *theirs.mhc_pre_delayed_torch(after, fn, *more, pre_mix=mixes)),
        ),
    ):  # fmt: skip
        found = getattr(layers, name)()(*arguments, **keywords)
        for one, other in zip(found if isinstance(found, tuple) else (found,), expected):
            close = one.dtype == other.dtype and one.shape == other.shape
            require(close and bool((one.float() - other.float()).abs().max() < 0.04), name)
    return f"{len(names)} classes of the plug-in in its registry"


def check_sglang_plugin(archive: Path) -> str:
    """The plug-in's hooks, applied by SGLang's registry."""
    name = "sglang.srt.plugins.hook_registry"
    text = source(archive, "sglang/srt/plugins/hook_registry.py")

    def original() -> None:
        raise AssertionError("not replaced")

    given: dict[str, dict[str, Any]] = {}
    for target in plugins.SGLANG_TARGETS:
        module, _, function = target.rpartition(".")
        file = f"{module.replace('.', '/')}.py"
        parameters(source(archive, file), function)  # it is there
        given.setdefault(module, {})[function] = types.FunctionType(original.__code__, globals())
    stubs = Stubs("sglang", {name: text}, given)
    sys.meta_path.insert(0, stubs)
    targets = plugins.register_sglang()
    importlib.import_module(name).HookRegistry.apply_hooks()
    for target in targets:
        module, _, function = target.rpartition(".")
        replaced = getattr(importlib.import_module(module), function)
        require(replaced is not given[module][function], f"sglang: {target}")
    topk = importlib.import_module("sglang.kernels.ops.attention.dsv4.topk")
    sys.meta_path.remove(stubs)
    slots = torch.zeros(1, 2, dtype=torch.int32)
    table, length = torch.tensor([[7, 5]]).int(), torch.tensor([3]).int()
    topk.topk_transform_paged(torch.tensor([[1.0, 4.0, 3.0]]), length, table, slots, 2)
    require(slots.tolist() == [[15, 10]], "sglang: topk_transform_paged")
    return f"{len(targets)} hooks of the plug-in in its registry"


def check_nemo(archive: Path) -> str:
    """NeMo finds the Sinkhorn kernels; their results and gradients against its PyTorch function."""
    kernels = "nemo_automodel.components.models.deepseek_v4"
    files = {
        name: source(archive, f"{name.replace('.', '/')}.py")
        for name in (f"{kernels}.optimized_kernels", "nemo_automodel.shared.import_utils")
    }
    given = {f"{kernels}.kernels._tilelang": {"HAS_TILELANG": False}}
    stubs = Stubs("nemo_automodel", files, given)
    sys.meta_path.insert(0, stubs)
    module = importlib.import_module(f"{kernels}.optimized_kernels")
    sys.meta_path.remove(stubs)
    require(module.is_dsv4_kernel_available("sinkhorn"), "nemo-automodel: what it finds")
    x, weights = torch.randn(2, 5, 4, 4, requires_grad=True), torch.randn(2, 5, 4, 4)
    results = []
    for name in ("_tile_kernels_sinkhorn_contiguous_grad", "sinkhorn_normalize_torch"):
        y = getattr(module, name)(x, repeat=20, eps=1e-6)
        # Its layers use the transpose, so that the gradient is not contiguous.
        (grad,) = torch.autograd.grad((y.mT * weights).sum(), x)
        results.append((y, grad))
    for one, other in zip(*results):
        require(torch.allclose(one, other, rtol=1e-5, atol=1e-6), "nemo-automodel: sinkhorn")
    return "`optimized_kernels.py` unmodified: values and gradients of Sinkhorn"


def check_transformers() -> str:
    """The tests of the adapter."""
    file = "tests/integrations/test_transformers.py"
    words = ["-q", "-n", "0", "-m", "not emulated and not compiled", file]
    command = [sys.executable, "-m", "pytest", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    found = re.search(r"^(\d+) passed(?!.*(failed|error))", done.stdout, re.M)
    if done.returncode or found is None:
        raise SystemExit(f"transformers: {done.stdout[-3000:]}")
    return f"{found[1]} tests of `{Path(file).name}`"


def sorted_by_id(weights: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Weights and ids in the order of the ids."""
    order = ids.argsort(1)
    return weights.gather(1, order), ids.gather(1, order)


def check_torchao(archive: Path, folder: Path) -> str:
    """Bits of MX and NVFP4."""
    with zipfile.ZipFile(archive) as wheel:
        wheel.extractall(folder)  # noqa: S202 - of the index
    sys.path.insert(0, str(folder))
    from torchao.prototype.mx_formats import nvfp4_tensor, utils
    from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx

    torch.manual_seed(0)
    x = torch.randn(200, 512) * torch.exp2(torch.randint(-60, 60, (200, 1)).float())
    x[0, :32] = torch.finfo(torch.bfloat16).max
    for fmt, dtype in (("e4m3", torch.float8_e4m3fn), ("e2m1", torch.float4_e2m1fn_x2)):
        for values in (x, x.bfloat16()):
            scales, data = to_mx(values, dtype, 32, ScaleCalculationMode.RCEIL)
            own_data, own_scales = mx.to_mx(values, fmt)
            require(same_bits(scales, own_scales), f"torchao: scales of {fmt}")
            require(same_bits(data, own_data), f"torchao: data of {fmt}")
            blocked = utils.to_blocked(scales.view(torch.float8_e8m0fnu))
            require(same_bits(blocked.flatten(), mx.to_blocked(own_scales)), "torchao: to_blocked")
    y = torch.randn(200, 512)
    of_all = nvfp4_tensor.per_tensor_amax_to_scale(y.abs().max())
    scales, data = nvfp4_tensor.nvfp4_quantize(y, 16, of_all)
    own_data, own_scales, own_of_all = mx.to_nvfp4(y)
    require(torch.equal(of_all.flatten(), own_of_all.flatten()), "torchao: global scale of NVFP4")
    require(same_bits(scales, own_scales), "torchao: scales of NVFP4")
    require(same_bits(data, own_data), "torchao: data of NVFP4")
    return "bits of MXFP8, MXFP4, NVFP4, blocked scales"


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same bytes."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


# ---- on two processes ---------------------------------------------------------------------------


def tokens(rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, their experts and weights; of each rank another number."""
    draw = torch.Generator().manual_seed(rank)
    x = torch.randn(5 + 2 * rank, HIDDEN, generator=draw).bfloat16()
    ids = torch.rand(len(x), EXPERTS, generator=draw).topk(TOPK).indices
    return x, ids, torch.rand(len(x), TOPK, generator=draw)


def errors(y: Tensor, x: Tensor, ids: Tensor, weights: Tensor) -> list[float]:
    """Of the layer in which expert `e` multiplies by `1 + e`, and of gradients of its sum."""
    factor = ((1 + ids) * weights.detach()).sum(1, keepdim=True)
    pairs = [(y.detach(), factor * x.detach().float())]
    y.float().sum().backward()
    pairs.append((x.grad, factor.expand(x.shape)))
    return [float((one.float() - right).norm() / right.norm()) for one, right in pairs]


def run_megatron(group: Any, text: str) -> list[float]:
    """Megatron's dispatch and combine."""
    from tile_kernels.ep import install_as_deep_ep

    install_as_deep_ep()
    utils = types.ModuleType("megatron.core.utils")
    utils.internal_api = lambda function: function  # type: ignore[attr-defined]
    for name in ("megatron", "megatron.core"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["megatron.core.utils"] = utils
    module = load(text, "fused_a2a")
    x, ids, weights = tokens(group.rank())
    x.requires_grad_()
    rows, local, probs, _, handle = module.fused_dispatch(x, ids, weights, EXPERTS, group)
    factors = 1 + local.clamp(min=0) + group.rank() * EXPERTS // 2
    shares = torch.where(local >= 0, probs * factors, 0.0).sum(1, keepdim=True)
    y, _ = module.fused_combine((rows.float() * shares).bfloat16(), group, handle)
    return errors(y, x, ids, weights)


def run_torchtitan(group: Any, text: str) -> list[float]:
    """torchtitan's dispatch and combine, whose operators are registered for CPUs too."""
    from tile_kernels.ep import install_as_deep_ep

    install_as_deep_ep()
    module = load(text, "titan_deepep")
    module._lib.impl("dispatch", module._dispatch_op_impl, "CPU")
    module._lib.impl("combine", module._combine_op_impl, "CPU")
    module.get_buffer(group, hidden=HIDDEN, num_max_tokens_per_rank=16, num_topk=TOPK)
    x, ids, weights = tokens(group.rank())
    x.requires_grad_()
    rows, counts, state = module.dispatch_tokens(
        x, ids, weights, EXPERTS // 2, EXPERTS, num_tokens_per_rank=16
    )
    experts = torch.arange(EXPERTS // 2) + group.rank() * EXPERTS // 2
    factors = 1.0 + torch.repeat_interleave(experts, counts)
    y = module.combine_tokens((rows.float() * factors[:, None]).bfloat16(), state)
    module.sync_combine()
    found = errors(y, x, ids, weights)
    with torch.no_grad():
        rows, _, state = module.dispatch_tokens(
            x, ids, weights, EXPERTS // 2, EXPERTS, num_tokens_per_rank=16, cudagraphable=True
        )
        y = module.combine_tokens(rows, state)
        module.sync_combine()
        right = x.float() * weights.sum(1, keepdim=True)
    return [*found, float((y.float() - right).norm() / right.norm())]


def check_router(archive: Path) -> str:
    """Megatron's router against its function in PyTorch."""
    text = source(archive, "megatron/core/transformer/moe/moe_utils.py")
    names = ("group_limited_topk", "topk_routing_with_score_function")
    functions = [
        node
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef) and node.name in names
    ]
    scope: dict[str, Any] = {"torch": torch, "Optional": typing.Optional, "Tuple": tuple}
    exec(compile(ast.Module(functions, []), "moe_utils", "exec"), scope)  # noqa: S102
    logits, bias = 2 * torch.randn(500, 64), torch.rand(64)
    for given in (
        (8, False, None, None, 2.5, "softmax", None),
        (8, True, 8, 4, None, "softmax", None),
        (8, False, 8, 4, 2.5, "sigmoid", bias),
        (1, False, None, None, None, "sigmoid", bias),
    ):
        expected, chosen = scope["topk_routing_with_score_function"](logits, *given)
        probs, same = megatron.fused_topk_with_score_function(logits, *given)
        require(torch.equal(chosen, same), f"megatron-core: experts of {given[:6]}")
        require(torch.allclose(expected, probs, rtol=1e-5), f"megatron-core: {given[:6]}")
    return "results of its router"


def check_processes(run: Callable[..., list[float]], archive: Path, name: str) -> str:
    """Runs a file of a package on two processes."""
    for found in run_processes(2, run, source(archive, name)):
        require(max(found) < 5e-3, f"{archive.name}: {name}")
    return f"`{Path(name).name}` unmodified, 2 processes"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cache", type=Path, help="a folder that keeps the downloads")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.cache or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        archives = {name: fetch(name, pattern, folder) for name, (_, pattern) in PACKAGES.items()}
        titan = "torchtitan/distributed/deepep/deepep.py"
        results: dict[str, list[str]] = {
            "transformers": [check_transformers()],
            "vllm": [
                check_signatures("vllm", archives["vllm"]),
                check_vllm(archives["vllm"]),
                check_vllm_plugin(archives["vllm"]),
            ],
            "sglang": [
                check_signatures("sglang", archives["sglang"]),
                check_sglang_plugin(archives["sglang"]),
            ],
            "sgl-deep-gemm": [check_signatures("sgl-deep-gemm", archives["sgl-deep-gemm"])],
            "torchao": [check_torchao(archives["torchao"], Path(scratch) / "torchao")],
            "megatron-core": [
                check_processes(
                    run_megatron, archives["megatron-core"],
                    "megatron/core/transformer/moe/fused_a2a.py",
                ),
                check_router(archives["megatron-core"]),
            ],
            "torchtitan": [check_processes(run_torchtitan, archives["torchtitan"], titan)],
            "nemo-automodel": [check_nemo(archives["nemo-automodel"])],
        }  # fmt: skip
    versions = {name: version for name, (version, _) in PACKAGES.items()}
    versions["transformers"] = importlib.metadata.version("transformers")
    found = {
        "machine": {"torch": torch.__version__, "python": sys.version.split()[0]},
        "packages": {
            name: {"version": versions[name], "checked": checked}
            for name, checked in results.items()
        },
    }
    OUTPUT.write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    main()
