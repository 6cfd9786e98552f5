"""The plug-ins of serving engines, with modules that have the parts of vLLM and SGLang they use.

`tools/check_integrations.py` registers the same plug-ins in the engines' own files.
"""

from __future__ import annotations

import enum
import importlib.metadata
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tile_kernels.integrations import plugins, sglang, vllm

ROOT = Path(__file__).parent.parent.parent
NUMBERS = (1e-6, 1e-6, 1e-6, 2.0, 20)


def module(monkeypatch: pytest.MonkeyPatch, name: str, **attributes: Any) -> ModuleType:
    """A module in `sys.modules`, beside the packages that hold it."""
    parts = name.split(".")
    for i in range(1, len(parts)):
        package = ".".join(parts[:i])
        if package not in sys.modules:
            monkeypatch.setitem(sys.modules, package, ModuleType(package))
    made = ModuleType(name)
    made.__dict__.update(attributes)
    monkeypatch.setitem(sys.modules, name, made)
    monkeypatch.setattr(sys.modules[".".join(parts[:-1])], parts[-1], made, raising=False)
    return made


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> dict[str, type]:
    """vLLM's registry, on a machine with CUDA, and the classes that are replaced."""
    registry: dict[str, type] = {}

    class CustomOp(torch.nn.Module):
        def __new__(cls, *_args: Any, **_kwargs: Any) -> Any:
            return super().__new__(registry.get(cls.__name__, cls))

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.forward_cuda(*args, **kwargs)

        def forward_cuda(self, *_args: Any, **_kwargs: Any) -> Any:
            return "vLLM"

        @classmethod
        def enabled(cls) -> bool:
            return False

        @classmethod
        def register_oot(cls, decorated: type | None = None, name: str | None = None) -> Any:
            assert decorated is not None
            assert name is not None
            assert name not in registry, f"Duplicate op name: {name}"
            registry[name] = decorated
            return decorated

    class MHCPreOp(CustomOp):
        pass

    class MHCPostOp(CustomOp):
        pass

    class MHCFusedPostPreOp(CustomOp):
        pass

    class HCHeadOp(CustomOp):
        pass

    class MHCPreDelayedOp(CustomOp):
        def __init__(self) -> None:
            super().__init__()
            self._post = MHCPostOp()

        def _maybe_post(self, residual: Any, x: Any, post: Any, comb: Any) -> Any:
            return residual if x is None else self._post(x, residual, post, comb)

    class GroupedTopk(CustomOp):
        def __init__(
            self, topk: int, renormalize: bool, num_expert_group: int = 0, topk_group: int = 0,
            scoring_func: str = "softmax", routed_scaling_factor: float = 1.0,
            num_fused_shared_experts: int = 0,
        ) -> None:  # fmt: skip
            super().__init__()
            self.topk, self.renormalize, self.scoring_func = topk, renormalize, scoring_func
            self.num_expert_group, self.topk_group = num_expert_group, topk_group
            self.routed_scaling_factor = routed_scaling_factor
            self.num_fused_shared_experts = num_fused_shared_experts

    classes: dict[str, type] = {
        cls.__name__: cls
        for cls in (
            MHCPreOp, MHCPostOp, MHCFusedPostPreOp, HCHeadOp, MHCPreDelayedOp, GroupedTopk, CustomOp
        )
    }  # fmt: skip
    layers = "vllm.model_executor.layers"
    module(
        monkeypatch, "vllm.model_executor.custom_op", CustomOp=CustomOp, op_registry_oot=registry
    )
    module(monkeypatch, f"{layers}.mhc", **classes)
    module(monkeypatch, f"{layers}.fused_moe.router.grouped_topk_router", GroupedTopk=GroupedTopk)
    return classes


def streams() -> tuple[Any, ...]:
    torch.manual_seed(0)
    return (
        torch.randn(5, 4, 64).bfloat16(), 0.05 * torch.randn(24, 256),
        torch.tensor([0.5, 0.7, 0.9]), 0.3 * torch.randn(24),
    )  # fmt: skip


def equal(found: Any, expected: Any) -> bool:
    pairs = zip(found, expected) if isinstance(expected, tuple) else [(found, expected)]
    return all(torch.equal(one, other) for one, other in pairs)


def test_operators_of_vllm(engine: dict[str, Any]) -> None:
    """vLLM instantiates its classes; what it gets computes as the functions of `vllm`."""
    names = ["MHCPreOp", "MHCPreDelayedOp", "MHCPostOp", "MHCFusedPostPreOp", "HCHeadOp"]
    assert plugins.register_vllm() == [*names, "GroupedTopk"]
    assert plugins.register_vllm() == []
    given = streams()
    post, comb, x = expected = vllm.mhc_pre(*given, *NUMBERS)
    assert equal(engine["MHCPreOp"]()(*given, *NUMBERS), expected)
    written = vllm.mhc_post(x, given[0], post, comb)
    assert equal(engine["MHCPostOp"]()(x, given[0], post, comb), written)
    expected = vllm.mhc_fused_post_pre(x, given[0], post, comb, *given[1:], *NUMBERS)
    assert equal(
        engine["MHCFusedPostPreOp"]()(x, given[0], post, comb, *given[1:], *NUMBERS), expected
    )
    small = given[0], given[1][:4].contiguous(), given[2][:1], given[3][:4].contiguous(), 1e-6, 1e-3
    assert equal(engine["HCHeadOp"]()(*small), vllm.hc_head(*small))

    delayed = engine["MHCPreDelayedOp"]()
    residual, *rest = delayed(*given, *NUMBERS)
    assert residual is given[0]
    assert equal(tuple(rest), vllm.mhc_pre_delayed(*given, *NUMBERS))
    write = {"sublayer_out": x, "post_layer_mix": post, "comb_res_mix": comb}
    residual, *rest = delayed(*given, *NUMBERS, rest[-1], **write)
    assert equal(residual, written)
    first = vllm.mhc_pre_delayed(*given, *NUMBERS)[-1]
    assert equal(tuple(rest), vllm.mhc_pre_delayed(residual, *given[1:], *NUMBERS, first))


def test_the_gate_of_vllm(engine: dict[str, Any]) -> None:
    plugins.register_vllm()
    logits, bias = torch.randn(6, 16), torch.rand(16)
    gate = engine["GroupedTopk"](4, True, 4, 2, "sigmoid", 2.5)
    assert gate.enabled()
    expected = vllm.grouped_topk(logits, logits, 4, True, 4, 2, "sigmoid", 2.5, bias)
    assert equal(gate(logits, logits, bias), expected)
    softmax = engine["GroupedTopk"](4, True, 4, 2)
    assert equal(softmax(logits, logits), vllm.grouped_topk(logits, logits, 4, True, 4, 2))
    assert softmax(logits, logits, bias) == "vLLM"
    assert engine["GroupedTopk"](4, True, 4, 2, "sigmoid", 2.5, 1)(logits, logits) == "vLLM"
    assert engine["GroupedTopk"](33, True, 4, 2, "sigmoid")(logits, logits) == "vLLM"


def test_another_plugin_came_first(engine: dict[str, Any]) -> None:
    custom_op = sys.modules["vllm.model_executor.custom_op"]
    theirs = type("Theirs", (engine["MHCPreOp"],), {})
    custom_op.CustomOp.register_oot(theirs, name="MHCPreOp")
    assert "MHCPreOp" not in plugins.register_vllm()
    assert type(engine["MHCPreOp"]()) is theirs


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Callable[..., Any], str]]:
    """What is registered with SGLang."""
    found: list[tuple[str, Callable[..., Any], str]] = []

    class HookType(enum.Enum):
        REPLACE = "replace"

    class HookRegistry:
        @classmethod
        def register(cls, target: str, hook: Any, hook_type: HookType) -> None:
            found.append((target, hook, hook_type.value))

    module(
        monkeypatch, "sglang.srt.plugins.hook_registry", HookRegistry=HookRegistry,
        HookType=HookType,
    )  # fmt: skip
    monkeypatch.setattr(plugins, "_registered", set())
    return found


def test_functions_of_sglang(hooks: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    targets = plugins.register_sglang()
    assert [(target, kind) for target, _, kind in hooks] == [(name, "replace") for name in targets]
    for target, hook, _ in hooks:
        assert hook is getattr(sglang, target.rpartition(".")[2])
    assert plugins.register_sglang() == []
    assert len(hooks) == len(targets) == 6
    monkeypatch.setattr(plugins, "_registered", set())
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert plugins.register_sglang() == []


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (None, False),
        ("", False),
        ("other", False),
        ("tile_kernels", True),
        ("a, tile_kernels", True),
    ],
)
def test_nothing_is_replaced_unless_named(
    words: str | None, named: bool, engine: dict[str, Any], hooks: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """An installed package alone changes no engine."""
    for variable in ("VLLM_PLUGINS", "SGLANG_PLUGINS"):
        monkeypatch.delenv(variable, raising=False)
        if words is not None:
            monkeypatch.setenv(variable, words)
    plugins.vllm_plugin()
    plugins.sglang_plugin()
    assert bool(sys.modules["vllm.model_executor.custom_op"].op_registry_oot) is named
    assert bool(hooks) is named


def test_entry_points() -> None:
    """Both engines find the function under the name that their lists of plug-ins take."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    for group, function in (
        ("vllm.general_plugins", plugins.vllm_plugin),
        ("sglang.srt.plugins", plugins.sglang_plugin),
    ):
        ((name, value),) = declared[group].items()
        assert name == plugins.NAME
        assert importlib.metadata.EntryPoint(name, value, group).load() is function


def test_what_replaces_vllms_operators_is_traced_whole() -> None:
    """vLLM compiles its models with `fullgraph=True`."""
    residual, fn, scale, base = streams()
    post, comb, x = vllm.mhc_pre(residual, fn, scale, base, *NUMBERS)
    norm, logits = torch.ones(64), torch.randn(5, 16)
    small = fn[:4].contiguous(), scale[:1], base[:4].contiguous(), 1e-6, 1e-3

    def layer(residual: Any, x: Any) -> tuple[Any, ...]:
        more = (fn, scale, base, *NUMBERS)
        first = vllm.mhc_pre(residual, *more, norm_weight=norm, norm_eps=1e-6)
        second = vllm.mhc_fused_post_pre(x, residual, post, comb, *more)
        third = vllm.mhc_pre_delayed(vllm.mhc_post(x, residual, post, comb), *more)
        gate = vllm.grouped_topk(logits, logits, 4, True, 4, 2, "sigmoid", 2.5, torch.ones(16))
        return *first, *second, *third, *gate, vllm.hc_head(residual, *small)

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    assert equal(compiled(residual, x), layer(residual, x))
