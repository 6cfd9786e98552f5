"""Replaces the forwards of modules of a model by operators of this package, and restores them."""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import nn

from tile_kernels.attention.indexer import DEPTHS, MAX_HEADS
from tile_kernels.integrations.transformers import experts, forwards
from tile_kernels.moe.gates import check_groups
from tile_kernels.moe.plan import MAX_SLOTS
from tile_kernels.moe.topk.plan import MAX_EXPERTS
from tile_kernels.quant.norm.plan import MAX_WIDTH
from tile_kernels.runtime import checks

__all__ = ["KINDS", "Left", "Report", "apply", "revert"]

KINDS = ("router", "experts", "mlp", "norm", "hyper_connections", "indexer")
TESTED = ((5, 17), (5, 23))  # the first and the last release of transformers that was tested
DTYPES = (torch.bfloat16, torch.float32)

WhyNot = Callable[[Any, torch.dtype], str | None]


# ---- what cannot be replaced --------------------------------------------------------------------


def _router(module: Any, dtype: torch.dtype) -> str | None:
    del dtype
    groups = getattr(module, "topk_group", 0), getattr(module, "num_group", 0)
    if not getattr(module, "norm_topk_prob", True):
        return "norm_topk_prob is False: the weights are not normalized"
    if module.top_k > MAX_SLOTS or len(module.weight) > MAX_EXPERTS:
        return f"more than {MAX_SLOTS} of {MAX_EXPERTS} experts"
    try:
        check_groups(len(module.weight), module.top_k, *groups)
    except ValueError as error:
        return str(error)
    score = getattr(module, "score_fn", None)
    if score is not None and type(score).__name__ != "SqrtSoftplusActivation":
        return f"its scoring function is {type(score).__name__}, not sqrtsoftplus"
    return None


def _experts(module: Any, dtype: torch.dtype) -> str | None:
    del dtype
    return experts.why_not(module)


def _mlp(module: Any, dtype: torch.dtype) -> str | None:
    del dtype
    if not experts.is_silu(module.act_fn):
        return f"its activation is {type(module.act_fn).__name__}, not SiLU"
    for name in ("gate_proj", "up_proj", "down_proj"):
        projection = getattr(module, name)
        if type(projection) is not nn.Linear:
            return f"{name} is a {type(projection).__name__}, not a Linear"
        if projection.bias is not None:
            return f"{name} has a bias"
    return None


def _norm(module: Any, dtype: torch.dtype) -> str | None:
    del dtype
    width = module.weight.shape[0]
    return f"{width} channels are more than {MAX_WIDTH}" if width > MAX_WIDTH else None


def _streams(module: Any, dtype: torch.dtype) -> str | None:
    if dtype is not torch.bfloat16:
        return f"hyper-connections are computed for bfloat16 streams only, the model is {dtype}"
    weight = module.fn if hasattr(module, "fn") else module.hc_fn
    hidden = weight.shape[1] // module.hc_mult
    if hidden % 8 or not 1 <= module.hc_mult <= 8:
        return f"{module.hc_mult} streams of {hidden} channels: 1 to 8 of a multiple of 8 are taken"
    return None


def _scorer(module: Any, dtype: torch.dtype) -> str | None:
    if dtype is not torch.bfloat16:
        return f"the indexer's scores are computed for bfloat16 only, the model is {dtype}"
    heads, depth = module.weights_scaling**-2, module.softmax_scale**-2
    if round(depth) not in DEPTHS or round(heads) > MAX_HEADS:
        return f"{heads:.0f} heads of {depth:.0f} channels: up to {MAX_HEADS} of {DEPTHS} are taken"
    return None


def _layer(module: Any, dtype: torch.dtype) -> str | None:
    """The layer writes what its hyper-connections read."""
    for name in ("attn_hc", "ffn_hc"):
        connection = getattr(module, name)
        reason = _streams(connection, dtype)
        if reason is not None:
            return reason
        if _foreign(connection):
            return f"the forward of its {name} was replaced"
    return None


# ---- which classes have which forward -----------------------------------------------------------


class Replacement(NamedTuple):
    """What stands in for the forward of a class."""

    kind: str
    forward: Callable[..., Any]
    why_not: WhyNot


_SIGMOID = Replacement("router", forwards.sigmoid_router, _router)
_SOFTMAX = Replacement("router", forwards.softmax_router, _router)
_EXPERTS = Replacement("experts", experts.experts_forward, _experts)
_MLP = Replacement("mlp", forwards.mlp, _mlp)
_NORM = Replacement("norm", forwards.rms, _norm)
_LIKE_V3 = {"TopkRouter": _SIGMOID, "Experts": _EXPERTS, "MLP": _MLP, "RMSNorm": _NORM}
_V4 = {
    "TopKRouter": Replacement("router", forwards.sqrtsoftplus_router, _router),
    "HashRouter": Replacement("router", forwards.hash_router, _router),
    "Experts": _EXPERTS,
    "MLP": _MLP,
    "RMSNorm": _NORM,
    "HyperConnection": Replacement("hyper_connections", forwards.hyper_connection, _streams),
    "HyperHead": Replacement("hyper_connections", forwards.hyper_head, _streams),
    "DecoderLayer": Replacement("hyper_connections", forwards.hyper_layer, _layer),
    "IndexerScorer": Replacement("indexer", forwards.indexer_scorer, _scorer),
}
# By the name of a model's folder in transformers: the prefix of its classes, and the rest of them.
MODELS: dict[str, tuple[str, dict[str, Replacement]]] = {
    "deepseek_v3": ("DeepseekV3", _LIKE_V3),
    "deepseek_v32": ("DeepseekV32", _LIKE_V3),
    "deepseek_v4": ("DeepseekV4", _V4),
    "glm4_moe": ("Glm4Moe", _LIKE_V3),
    "qwen3_moe": (
        "Qwen3Moe",
        {"TopKRouter": _SOFTMAX, "Experts": _EXPERTS, "MLP": _MLP, "RMSNorm": _NORM},
    ),
    "mixtral": ("Mixtral", {"TopKRouter": _SOFTMAX, "Experts": _EXPERTS, "RMSNorm": _NORM}),
}
_FORWARDS = frozenset(
    [
        forwards.rms_promoted,
        *(r.forward for _, classes in MODELS.values() for r in classes.values()),
    ]
)


def _replacements(folder: str) -> tuple[dict[type, Replacement], list[str]]:
    """The classes of a model that are replaced, and names that its module does not have."""
    prefix, classes = MODELS[folder]
    module = sys.modules.get(f"transformers.models.{folder}.modeling_{folder}")
    found: dict[type, Replacement] = {}
    missing = []
    for suffix, replacement in classes.items():
        cls = getattr(module, prefix + suffix, None)
        if cls is None:
            missing.append(prefix + suffix)
        elif replacement.kind == "norm":
            found[cls] = replacement._replace(forward=forwards.rms_of(cls))
        else:
            found[cls] = replacement
    return found, missing


def _folder(module: nn.Module) -> str | None:
    """The model of transformers that a module's class belongs to, if it is one of `MODELS`."""
    parts = type(module).__module__.split(".")
    known = len(parts) == 4 and parts[:2] == ["transformers", "models"] and parts[2] in MODELS
    return parts[2] if known else None


def _ours(module: nn.Module) -> bool:
    """Whether `apply` replaced the forward of this module."""
    forward = module.__dict__.get("forward")
    return isinstance(forward, MethodType) and forward.__func__ in _FORWARDS


def _foreign(module: nn.Module) -> bool:
    """Whether something else replaced it."""
    return "forward" in module.__dict__ and not _ours(module)


# ---- public -------------------------------------------------------------------------------------


class Left(NamedTuple):
    """A module whose forward stays as it was.

    Attributes:
        name: Its name in the model.
        cls: The name of its class.
        reason: Why it was left.
    """

    name: str
    cls: str
    reason: str


@dataclass
class Report:
    """What `apply` did; `print` shows it.

    Attributes:
        replaced: How many modules of each class run on operators of this package.
        left: Modules of known classes that do not, each with its name, class and reason.
        missing: Classes that this version of transformers does not have.
    """

    replaced: Counter[str] = field(default_factory=Counter)
    left: list[Left] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"replaced {count} {cls}" for cls, count in sorted(self.replaced.items())]
        reasons = Counter((item.cls, item.reason) for item in self.left)
        lines += [f"left {n} {cls}: {reason}" for (cls, reason), n in sorted(reasons.items())]
        lines += [f"not in this version of transformers: {cls}" for cls in self.missing]
        return "\n".join(lines)


def _check_model(function: str, model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{function}: model must be a torch.nn.Module, got {type(model).__name__}")
    if hasattr(model, "_orig_mod"):
        raise TypeError(
            f"{function}: model must be the model itself, got the result of torch.compile: call "
            f"{function} before torch.compile"
        )


def _dtype(model: nn.Module) -> torch.dtype:
    """The dtype of hidden states: that of the first embedding or projection."""
    for module in model.modules():
        if isinstance(module, (nn.Embedding, nn.Linear)) and module.weight.is_floating_point():
            return module.weight.dtype
    return next((p.dtype for p in model.parameters()), torch.float32)


def _warn_of_version() -> None:
    transformers: Any = sys.modules["transformers"]  # which the modules of the model imported
    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if not TESTED[0] <= version <= TESTED[1]:
        first, last = (".".join(map(str, tested)) for tested in TESTED)
        warnings.warn(
            f"apply: tested with transformers {first} to {last}, this is "
            f"{transformers.__version__}",
            stacklevel=3,
        )


def _known(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Modules of models that are known: name, module and model."""
    for name, module in model.named_modules():
        folder = _folder(module)
        if folder is not None:
            yield name, module, folder


def apply(
    model: nn.Module,
    *,
    router: bool = True,
    experts: bool = True,
    mlp: bool = True,
    norm: bool = True,
    hyper_connections: bool = True,
    indexer: bool = True,
) -> Report:
    """Lets modules of a transformers model compute with operators of this package.

    The forward of each module whose class is known is replaced on that instance; parameters,
    buffers, hooks, the state dict and other models stay as they are. Forward, backward,
    `generate` and gradient checkpointing work as before, within rounding. Calling it again is
    harmless. Call it after the model has its dtype and before `torch.compile`.

    | kind | modules | with |
    |---|---|---|
    | `router` | routers of the choice of experts | `moe.top2_sum_gate`, `moe.hash_gate` |
    | `experts` | routed experts | `modeling.bf16_experts` |
    | `mlp` | dense layers and shared experts | `quant.swiglu_forward` |
    | `norm` | RMS norms | `quant.norm_forward` |
    | `hyper_connections` | those of DeepSeek-V4, for bfloat16 streams | `modeling.mhc` |
    | `indexer` | scores of DeepSeek-V4's indexer, in bfloat16 | `attention.indexer_logits` |

    Known are the models `deepseek_v3`, `deepseek_v32`, `deepseek_v4`, `glm4_moe`, `qwen3_moe` and
    `mixtral`. Routers rank float32 scores, also where the model rounds them to bfloat16 first:
    choices differ where scores are that close.

    Args:
        model: A model of transformers, or a part of one, in bfloat16 or float32.
        router: Whether routers are replaced.
        experts: Whether routed experts are replaced.
        mlp: Whether dense feed-forward layers and shared experts are replaced.
        norm: Whether RMS norms are replaced.
        hyper_connections: Whether hyper-connections are replaced.
        indexer: Whether the scores of the indexer are replaced.

    Returns:
        What was replaced, and what was not and why.

    Raises:
        TypeError: If `model` is not a module, is compiled, or has another dtype.
        ValueError: If no module of the model is of a known class.
    """
    _check_model("apply", model)
    flags = (router, experts, mlp, norm, hyper_connections, indexer)
    with checks.named("apply"):
        wanted = {kind for kind, flag in zip(KINDS, flags) if checks.boolean(kind, flag)}
    known = list(_known(model))
    folders = {folder for _, _, folder in known}
    tables = {folder: _replacements(folder) for folder in sorted(folders)}
    report = Report(missing=[cls for _, missing in tables.values() for cls in missing])
    dtype = _dtype(model)
    found = []
    for name, module, folder in known:
        replacement = tables[folder][0].get(type(module))
        if replacement is not None:
            found.append((name, module, replacement))
    if not found:
        kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
        raise ValueError(f"apply: model must be one of {', '.join(MODELS)}, got {kind}")
    if dtype not in DTYPES:
        raise TypeError(f"apply: model must be in bfloat16 or float32, got {dtype}")
    _warn_of_version()
    for name, module, replacement in found:
        if replacement.kind not in wanted:
            continue
        if _foreign(module):
            reason: str | None = "its forward was already replaced by something else"
        else:
            reason = replacement.why_not(module, dtype)
        if reason is None:
            module.forward = MethodType(replacement.forward, module)
            report.replaced[type(module).__name__] += 1
        else:
            report.left.append(Left(name, type(module).__name__, reason))
    return report


def revert(model: nn.Module) -> int:
    """Restores every forward that `apply` replaced.

    Args:
        model: What `apply` was given, a copy of it, or a part of it.

    Returns:
        How many modules were restored; 0 if nothing was replaced.

    Raises:
        TypeError: If `model` is not a module, or is compiled.
    """
    _check_model("revert", model)
    replaced = [module for module in model.modules() if _ours(module)]
    for module in replaced:
        del module.__dict__["forward"]
    return len(replaced)
