"""The adapter for transformers, against its own models: tiny ones with random weights."""

from __future__ import annotations

import copy
import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from tests.examples.small import distance
from tests.requirements import NEEDS_TRANSFORMERS, lacks_transformers

if lacks_transformers:
    pytest.skip(NEEDS_TRANSFORMERS, allow_module_level=True)

import transformers
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as v4

import tile_kernels
from benchmarks import transformers_block
from tile_kernels import moe
from tile_kernels.integrations import transformers as adapter
from tile_kernels.integrations.transformers import (
    EXPERTS,
    KINDS,
    apply,
    kernels,
    register_experts,
    register_kernels,
    revert,
)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
VOCABULARY, LENGTH = 96, 24
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "num_attention_heads": 4,
    "max_position_embeddings": 128,
}  # fmt: skip
LIKE_V3 = {
    **SIZES, "moe_intermediate_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16, "v_head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "n_shared_experts": 1,
}  # fmt: skip
LIKE_QWEN = {
    **SIZES, "num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 16,
    "num_experts_per_tok": 2,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "deepseek_v3": LIKE_V3,
    "deepseek_v32": {**LIKE_V3, "index_n_heads": 2, "index_head_dim": 32, "index_topk": 4},
    "glm4_moe": {**LIKE_QWEN, "moe_intermediate_size": 32, "intermediate_size": 48,
                 "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1,
                 "norm_topk_prob": True},
    "qwen3_moe": {**LIKE_QWEN, "moe_intermediate_size": 32, "intermediate_size": 48,
                  "num_experts": 8, "norm_topk_prob": True, "mlp_only_layers": [0]},
    "mixtral": {**LIKE_QWEN, "intermediate_size": 32, "num_local_experts": 8},
    "deepseek_v4": {
        **SIZES, "moe_intermediate_size": 32, "num_hidden_layers": 3, "head_dim": 32,
        "q_lora_rank": 32, "num_experts_per_tok": 2, "n_routed_experts": 8, "o_groups": 2,
        "o_lora_rank": 16, "index_n_heads": 4, "index_head_dim": 32, "index_topk": 4,
        "sliding_window": 8, "hc_mult": 4, "partial_rotary_factor": 0.5,
        "layer_types": ["sliding_attention", "compressed_sparse_attention",
                        "heavily_compressed_attention"],
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    },
}  # fmt: skip
# All experts, or entries, are chosen: no choice can differ.
ALL_CHOSEN = {
    "deepseek_v3": {"num_experts_per_tok": 8, "n_group": 1, "topk_group": 1},
    "deepseek_v32": {
        "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1, "index_topk": LENGTH,
    },
    "glm4_moe": {"num_experts_per_tok": 8, "n_group": 1, "topk_group": 1},
    "qwen3_moe": {"num_experts_per_tok": 8},
    "mixtral": {"num_experts_per_tok": 8},
    "deepseek_v4": {"num_experts_per_tok": 8, "index_topk": LENGTH},
}  # fmt: skip
# Kept in float32 by `from_pretrained`, beside norms.
FLOAT32 = ("_hc.", "hc_head", "sinks", "position_bias", "e_score_correction_bias", "inv_freq")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """More of them only wait for each other on tensors this small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def build(name: str, dtype: torch.dtype = torch.float32, device: str = "cpu", **more: Any) -> Any:
    """A model with random weights, which are bfloat16 numbers in any dtype."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **{**MODELS[name], **more})
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config)
    tensors = (*model.named_parameters(), *model.named_buffers())
    for key, tensor in tensors:
        if key.endswith((".base", "hc_base", "position_bias", "sinks")):
            tensor.data.normal_()
        elif key.endswith("e_score_correction_bias"):
            tensor.data.normal_(std=0.1)
        elif key.endswith("tid2eid"):
            tensor.data = torch.rand(len(tensor), 8).topk(tensor.shape[1]).indices
        elif tensor.is_floating_point() and "inv_freq" not in key:
            tensor.data = tensor.data.bfloat16().float()
    for key, tensor in tensors:
        if tensor.is_floating_point() and not any(part in key for part in FLOAT32):
            tensor.data = tensor.data.to(dtype)
    return model.to(device)


def tokens(device: str = "cpu") -> Tensor:
    return torch.randint(1, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(1)).to(
        device
    )


def results(model: Any, ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits, and the gradients of a loss by parameter, in float64."""
    model.zero_grad(set_to_none=True)
    logits = model(ids).logits
    F.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten()).backward()
    grads = {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}
    return logits.detach().double(), grads


def joined(grads: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gradients by parameter, but those of hyper-connections together by their kind.

    Single ones are differences of nearly equal sums: behind the streams follows a norm, so that
    what the mixes change in common has no effect, and the streams are still alike in the first
    layers. Against the norms of what is subtracted they are as exact as others; the scale of the
    last ones, for example, has a gradient 1e-5 of that of a projection, of which nothing is left
    in bfloat16, with the operators and without.
    """
    kinds: dict[str, list[Tensor]] = {}
    for name, grad in grads.items():
        mixes = "_hc." in name or ".hc_head." in name
        kind = name.replace("hc_head.hc_", "").rsplit(".", 1)[1] if mixes else name
        kinds.setdefault(kind, []).append(grad.flatten())
    return {kind: torch.cat(parts) for kind, parts in kinds.items()}


def worst(found: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, str]:
    found, expected = joined(found), joined(expected)
    assert found.keys() == expected.keys()
    return max((distance(expected[name], found[name]), name) for name in expected)


# ---- whole models -------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MODELS)
def test_models_in_float32_compute_the_same(name: str, device: str) -> None:
    model, ids = build(name, device=device), tokens(device)
    logits, grads = results(model, ids)
    report = apply(model)
    assert {cls.removeprefix(adapter.adapter.MODELS[name][0]) for cls in report.replaced} >= {
        "Experts", "RMSNorm",
    }  # fmt: skip
    assert not report.missing
    found, found_grads = results(model, ids)
    assert 0 < distance(logits, found) < 2e-6
    assert worst(found_grads, grads)[0] < 5e-5


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MODELS)
def test_models_in_bfloat16_are_near_float32(name: str, device: str) -> None:
    """With the same choices; transformers' own models are as far from float32."""
    exact, ids = build(name, device=device, **ALL_CHOSEN[name]), tokens(device)
    model = build(name, torch.bfloat16, device, **ALL_CHOSEN[name])
    logits, grads = results(exact, ids)
    theirs, their_grads = results(model, ids)
    report = apply(model)
    assert not report.left
    assert {r.kind for r in adapter.adapter.MODELS[name][1].values()} == {
        adapter.adapter.MODELS[name][1][cls.removeprefix(adapter.adapter.MODELS[name][0])].kind
        for cls in report.replaced
    }
    ours, our_grads = results(model, ids)
    assert distance(logits, ours) < 0.015
    assert distance(logits, ours) < 1.2 * distance(logits, theirs)
    assert worst(our_grads, grads)[0] < 0.05, worst(our_grads, grads)
    assert worst(their_grads, grads)[0] < 0.05  # the limit says something about both


def test_gradients_differ_by_choices_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two experts of eight: with the choices of the float32 model, gradients are near its own.

    A token that takes another expert changes the gradients of both by a whole term.
    """
    ids = tokens()
    exact = build("deepseek_v4", index_topk=LENGTH)
    model = build("deepseek_v4", torch.bfloat16, index_topk=LENGTH)
    apply(model)
    choices: list[Tensor] = []
    for layer in exact.model.layers[1:]:
        layer.mlp.gate.register_forward_hook(lambda _m, _a, out: choices.append(out[2]))
    logits, grads = results(exact, ids)
    assert [choice.shape for choice in choices] == [(ids.numel(), 2)] * 2

    def pinned(x: Tensor, weight: Tensor, _bias: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        scores = x.reshape(-1, 64).float() @ weight.float().t()
        chosen = choices.pop(0)
        return scores, moe.topk_weights(scores, chosen, rest[-1], rest[-2]), chosen

    monkeypatch.setattr(adapter.forwards, "_route", pinned)
    ours, our_grads = results(model, ids)
    assert not choices
    assert distance(logits, ours) < 0.015
    assert worst(our_grads, grads)[0] < 0.05, worst(our_grads, grads)


@pytest.mark.full
@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v4"])
def test_emulated_kernels_and_references_agree(name: str) -> None:
    """Gradients of weights of norms are summed in another order, the rest has the same bits."""
    model, ids = build(name, torch.bfloat16, **ALL_CHOSEN[name]), tokens()[:1, :12]
    apply(model)
    logits, grads = results(model, ids)
    with tile_kernels.backend("emulate"):
        found, found_grads = results(model, ids)
    assert torch.equal(found, logits)
    assert worst(found_grads, grads)[0] < 0.02


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v4"])
def test_generation_gives_the_same_tokens(name: str) -> None:
    """Prefill and decoding, with the cache."""
    model, ids = build(name).eval(), tokens()[:, :9]
    settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(ids, **settings)
    apply(model)
    assert torch.equal(model.generate(ids, **settings), expected)


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v4"])
def test_gradient_checkpointing(name: str) -> None:
    model, ids = build(name, torch.bfloat16), tokens()
    apply(model)
    logits, grads = results(model, ids)
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    found, found_grads = results(model, ids)
    assert torch.equal(found, logits)
    assert all(torch.equal(found_grads[name], grads[name]) for name in grads)


def test_compiles_as_one_graph() -> None:
    model, ids = build("deepseek_v3").eval(), tokens()
    apply(model)
    torch._dynamo.reset()
    compiled = torch.compile(model.model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        expected = model.model(ids, use_cache=False).last_hidden_state
        found = compiled(ids, use_cache=False).last_hidden_state
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_compiled_layers_share_a_graph() -> None:
    """Dynamo guards on the function of a forward, not on the method of each layer."""
    torch._dynamo.reset()
    model = build("mixtral", num_hidden_layers=3)
    apply(model)
    counter = CompileCounterWithBackend("eager")
    for layer in model.model.layers:
        layer.compile(backend=counter)
    with torch.no_grad():
        model(tokens(), use_cache=False)
    assert counter.frame_count == 1


def test_router_logits_are_recorded() -> None:
    model, ids = build("mixtral"), tokens()
    expected = model(ids, output_router_logits=True)
    apply(model)
    found = model(ids, output_router_logits=True)
    assert len(found.router_logits) == 2
    for a, b in zip(found.router_logits, expected.router_logits, strict=True):
        torch.testing.assert_close(a, b)
    torch.testing.assert_close(found.aux_loss, expected.aux_loss)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_revert_restores_the_model_exactly(dtype: torch.dtype) -> None:
    model, ids = build("deepseek_v4", dtype), tokens()
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    keys = list(model.state_dict())
    logits, grads = results(model, ids)
    report = apply(model)
    assert list(model.state_dict()) == keys
    assert not torch.equal(results(model, ids)[0], logits)
    other = copy.deepcopy(model)
    assert revert(model) == report.replaced.total()
    assert {name: module.__dict__.keys() for name, module in model.named_modules()} == {
        name: attributes.keys() for name, attributes in before.items()
    }
    found, found_grads = results(model, ids)
    assert torch.equal(found, logits)
    assert all(torch.equal(found_grads[name], grads[name]) for name in grads)
    assert revert(model) == 0
    assert revert(other) == report.replaced.total()  # a copy is its own
    assert torch.equal(results(other, ids)[0], logits)


def test_apply_twice_and_by_kinds() -> None:
    model = build("deepseek_v4", torch.bfloat16)
    parts = [apply(model, **{other: other == kind for other in KINDS}) for kind in KINDS]
    assert all(part.replaced for part in parts)
    whole = apply(model)
    assert sum((part.replaced for part in parts), start=type(whole.replaced)()) == whole.replaced
    assert revert(model.model.layers[0]) > 0  # a part
    assert apply(model) == whole


# ---- modules ------------------------------------------------------------------------------------


def near(found: Any, expected: Any, limit: float) -> None:
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    assert distance(expected.double(), found.double()) < limit


def test_the_router_of_v4_ranks_in_float32() -> None:
    """Its own ranks scores that are rounded to bfloat16: ours is its formula in float32."""
    model = build("deepseek_v4", torch.bfloat16, num_experts_per_tok=3)
    gate = model.model.layers[1].mlp.gate
    exact = copy.deepcopy(gate).float()
    x = torch.randn(500, 64).bfloat16()
    rounded = gate(x)[2].sort(-1).values
    apply(gate)
    (logits, weights, chosen), (_, expected_weights, expected) = gate(x), exact(x.float())
    assert logits.dtype == torch.bfloat16
    order, expected_order = chosen.argsort(-1), expected.argsort(-1)
    assert torch.equal(chosen.gather(1, order), expected.gather(1, expected_order))
    assert not torch.equal(rounded, chosen.gather(1, order))  # which is why gradients differ
    near(weights.gather(1, order), expected_weights.gather(1, expected_order), 1e-6)


@pytest.mark.parametrize("keys", [0, 1, 9])
def test_the_scores_of_the_indexer(keys: int) -> None:
    """Both sum in float32: nothing but the order of sums differs."""
    model = build("deepseek_v4", torch.bfloat16)
    (scorer,) = (m for m in model.modules() if type(m) is v4.DeepseekV4IndexerScorer)
    given = (
        torch.randn(2, 7, 4, 32).bfloat16(), torch.randn(2, keys, 32).bfloat16(),
        torch.randn(2, 7, 64).bfloat16(),
    )  # fmt: skip
    expected = scorer(*given)
    report = apply(scorer)
    assert report.replaced.total() == 1
    found = scorer(*given)
    assert (found.shape, found.dtype) == ((2, 7, keys), torch.float32)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    mixed = given[0].float(), given[1].float(), given[2]  # left to the class
    assert torch.equal(scorer(*mixed), v4.DeepseekV4IndexerScorer.forward(scorer, *mixed))


def test_an_indexer_of_other_sizes_is_left() -> None:
    model = build("deepseek_v4", torch.bfloat16, index_head_dim=48)
    left = [item for item in apply(model).left if item.cls == "DeepseekV4IndexerScorer"]
    assert [item.reason for item in left] == [
        "4 heads of 48 channels: up to 128 of (32, 64, 128, 256) are taken"
    ]


def test_hyper_connections_of_v4() -> None:
    """Read, mixes and head, with constants that are large enough to be seen."""
    settings = {"hc_eps": 0.05, "hc_sinkhorn_iters": 3, "rms_norm_eps": 0.5}
    model = build("deepseek_v4", torch.bfloat16, **settings)
    x = torch.randn(2, 9, 4, 64).bfloat16().requires_grad_()
    for module in (model.model.layers[0].attn_hc, model.model.hc_head):
        for parameter in module.parameters():
            parameter.data.normal_(std=0.5)
        exact = module(x.float())
        exact = exact if isinstance(exact, tuple) else (exact,)
        leaves = [x, *module.parameters()]
        directions = [torch.randn_like(y).bfloat16().float() for y in exact]
        expected = torch.autograd.grad(exact, leaves, directions)
        apply(model)
        found = module(x)
        found = found if isinstance(found, tuple) else (found,)
        for one, other in zip(found, exact, strict=True):
            assert distance(other.double(), one.double()) < 5e-3
        grads = torch.autograd.grad(
            found, leaves, [d.to(y.dtype) for d, y in zip(directions, found)]
        )
        for one, other in zip(grads, expected, strict=True):
            assert distance(other.double(), one.double()) < 0.02
        revert(model)


@pytest.mark.parametrize("limit", [0.02, 10.0])
def test_clamps_of_v4(limit: float) -> None:
    """Experts and shared experts, with a limit that most values exceed, and one that none does."""
    model = build("deepseek_v4", swiglu_limit=limit)
    block = model.model.layers[1].mlp
    block.gate.weight.data.normal_(std=0.3)
    x = torch.randn(2, 9, 64)
    inputs = [x.requires_grad_(), *block.parameters()]
    expected = block(x)
    expected_grads = torch.autograd.grad(expected.square().sum(), inputs)
    apply(block)
    found = block(x)
    near(found, expected, 1e-6)
    for a, b in zip(torch.autograd.grad(found.square().sum(), inputs), expected_grads, strict=True):
        near(a, b, 2e-5)


def test_experts_of_other_ranks_add_nothing() -> None:
    """Expert parallelism of transformers marks their slots with the number of experts."""
    experts = build("deepseek_v3").model.layers[1].mlp.experts
    apply(experts)
    x, index = torch.randn(5, 64), torch.tensor([[0, 8], [8, 8], [3, 1], [8, 2], [7, 7]])
    weights = torch.rand(5, 2)
    found = experts(x, index, weights)
    assert not found[1].any()
    alone = experts(x, index.clamp(max=7), weights.masked_fill(index == 8, 0))
    torch.testing.assert_close(found, alone)


def test_norms_keep_the_dtype() -> None:
    """A float32 weight and bfloat16 rows: float32 in DeepSeek-V3, whatever it is in V4."""
    for cls in (v3.DeepseekV3RMSNorm, v4.DeepseekV4RMSNorm):
        norm = cls(64)
        nn.init.normal_(norm.weight)
        for x in (torch.randn(3, 5, 64).bfloat16(), torch.randn(3, 5, 64)):
            expected = norm(x)
            apply(norm)
            near(norm(x), expected, 5e-3)
            revert(norm)
    assert v3.DeepseekV3RMSNorm(4)(torch.ones(4).bfloat16()).dtype == torch.float32


def test_autocast() -> None:
    """Products in bfloat16, like those of the module itself; results in the dtype it returns."""
    block = build("deepseek_v3").model.layers[1].mlp
    x = torch.randn(2, 9, 64, requires_grad=True)
    exact = block(x)
    apply(block)
    with torch.autocast("cpu", torch.bfloat16):
        found = block(x)
        routed = block.experts(x.detach().view(-1, 64), *reversed(block.gate(x)[1:]))
    assert routed.dtype == torch.float32
    assert 1e-4 < distance(exact.double(), found.double()) < 0.02
    found.sum().backward()
    assert block.shared_experts.gate_proj.weight.grad.dtype == torch.float32


# ---- what is left, and errors -------------------------------------------------------------------


def reasons(model: Any, **kinds: bool) -> dict[str, str]:
    return {item.cls: item.reason for item in apply(model, **kinds).left}


def test_what_cannot_be_replaced_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    found = reasons(build("deepseek_v4"))
    assert "bfloat16 streams only, the model is torch.float32" in found["DeepseekV4HyperHead"]
    assert "bfloat16 streams only" in found["DeepseekV4DecoderLayer"]
    model = build("deepseek_v3", norm_topk_prob=False, hidden_act="gelu")
    assert reasons(model) == {
        "DeepseekV3TopkRouter": "norm_topk_prob is False: the weights are not normalized",
        "DeepseekV3Experts": "its activation is GELUActivation, not SiLU",
        "DeepseekV3MLP": "its activation is GELUActivation, not SiLU",
    }
    assert reasons(model, router=False, experts=False, mlp=False) == {}
    model = build("deepseek_v4", torch.bfloat16, mlp_bias=True)
    connection = model.model.layers[0].attn_hc
    connection.forward = connection.forward  # as accelerate does
    report = apply(model)
    assert "left 3 DeepseekV4MLP: gate_proj has a bias" in str(report)
    left = {item.name: item.reason for item in report.left}
    assert left["model.layers.0.attn_hc"] == "its forward was already replaced by something else"
    assert left["model.layers.0"] == "the forward of its attn_hc was replaced"
    assert "replaced 2 DeepseekV4DecoderLayer" in str(report)
    monkeypatch.delattr(v4, "DeepseekV4HashRouter")
    report = apply(model)
    assert report.missing == ["DeepseekV4HashRouter"]
    assert "not in this version of transformers: DeepseekV4HashRouter" in str(report)


def test_changed_projections_are_refused() -> None:
    """An adapter such as LoRA that replaces a projection after `apply` would not take part."""
    model = build("deepseek_v3")
    apply(model)
    model.model.layers[0].mlp.up_proj = nn.Sequential(model.model.layers[0].mlp.up_proj)
    with pytest.raises(RuntimeError, match=r"a projection became a Sequential .* call revert"):
        model(tokens())


def test_bad_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match=r"apply: model must be a torch\.nn\.Module, got str"):
        apply("deepseek-ai/DeepSeek-V3")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"revert: model must be a torch\.nn\.Module, got NoneType"):
        revert(None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"apply: model must be one of deepseek_v3.*, got Linear"):
        apply(nn.Linear(2, 2))
    config = transformers.AutoConfig.for_model(
        "llama", **SIZES, num_hidden_layers=1, intermediate_size=32
    )
    with pytest.raises(ValueError, match=r"apply: model must be one of .*, got llama"):
        apply(transformers.AutoModelForCausalLM.from_config(config))
    model = build("deepseek_v3")
    with pytest.raises(TypeError, match="apply: norm must be a bool, got str"):
        apply(model, norm="yes")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"apply: model must be in .*, got torch\.float16"):
        apply(build("deepseek_v3", torch.float16))
    with pytest.raises(TypeError, match=r"call apply before torch\.compile"):
        apply(torch.compile(model))
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "5.99.1")
    with pytest.warns(UserWarning, match=r"tested with transformers 5\.17 to 5\.\d+, this is 5.99"):
        apply(model)


# ---- the benchmark ------------------------------------------------------------------------------


def test_benchmark_compares_and_writes(tmp_path: Path) -> None:
    (path,) = transformers_block.main(["--output", str(tmp_path)])
    content = json.loads(path.read_text())
    assert content["machine"]["transformers"] == transformers.__version__
    compared = {result["case"]: result["off"] for result in content["results"] if "off" in result}
    assert compared.keys() == transformers_block.CASES.keys()
    assert all(0 < distance < 0.02 for pair in compared.values() for distance in pair)
    timed = {
        (each["case"], each["form"], each["step"]) for each in content["results"] if "step" in each
    }
    assert timed == {
        (case, form, step)
        for case in transformers_block.CASES
        for form in ("plain", "kernels")
        for step in ("forward", "training")
    }


# ---- the experts implementation -----------------------------------------------------------------


def test_experts_implementation() -> None:
    """Chosen by its name, for a model that `apply` does not know as well."""
    assert register_experts() == EXPERTS == "tile_kernels"
    model, ids = build("qwen3_moe"), tokens()
    logits, grads = results(model, ids)
    model.set_experts_implementation(EXPERTS)
    found, found_grads = results(model, ids)
    assert 0 < distance(logits, found) < 2e-6
    assert worst(found_grads, grads)[0] < 5e-5
    assert revert(model) == 0
    config = transformers.AutoConfig.for_model(
        "olmoe", **LIKE_QWEN, intermediate_size=32, num_experts=8
    )
    torch.manual_seed(0)
    other = transformers.AutoModelForCausalLM.from_config(config, experts_implementation=EXPERTS)
    found = other(ids).logits
    other.set_experts_implementation("eager")
    near(found, other(ids).logits, 2e-6)


def test_experts_with_biases_are_refused() -> None:
    register_experts()
    config = transformers.AutoConfig.for_model(
        "gpt_oss", **LIKE_QWEN, intermediate_size=32, num_local_experts=4
    )
    model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation=EXPERTS)
    with pytest.raises(ValueError, match=r"GptOssExperts is not supported: .* \(has_bias=True"):
        model(tokens())


# ---- the mechanism for kernels of the hub -------------------------------------------------------


def test_the_layer_keeps_the_rules_of_kernels() -> None:
    """`kernels` takes layers without state and members, whose forward has the same arguments."""
    layer = kernels.RMSNormLayer
    assert layer.__init__ is nn.Module.__init__
    assert {name for name in vars(layer) if not name.startswith("__")} == {
        "forward", "can_torch_compile", "has_backward",
    }  # fmt: skip
    norms = v3.DeepseekV3RMSNorm, transformers.models.mixtral.modeling_mixtral.MixtralRMSNorm
    for norm in norms:
        kinds = [
            [p.kind for p in inspect.signature(cls.forward).parameters.values()]
            for cls in (layer, norm)
        ]
        assert kinds[0] == kinds[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_layer_computes_the_norm(dtype: torch.dtype) -> None:
    norm = v3.DeepseekV3RMSNorm(48).to(dtype)
    with torch.no_grad():
        norm.weight.copy_(torch.rand(48) + 0.5)
    x = torch.randn(2, 5, 48, dtype=dtype)
    expected = copy.deepcopy(norm).double()(x.double())
    found = kernels.RMSNormLayer.forward(norm, x)
    assert found.dtype == dtype
    assert distance(found, expected) < (1e-6 if dtype == torch.float32 else 4e-3)
    for other in (torch.float16, torch.float64):  # left to the class of the module
        assert torch.equal(kernels.RMSNormLayer.forward(norm, x.to(other)), norm(x.to(other)))


def test_kernels_of_the_hub() -> None:
    """A model that is told to use kernels has these norms, and its results."""
    if not transformers.utils.is_kernels_available():
        with pytest.raises(
            ImportError, match="register_kernels: needs transformers and the version"
        ):
            register_kernels()
        return
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model("deepseek_v3", **LIKE_V3)
    ).eval()
    ids = torch.randint(1, VOCABULARY, (2, LENGTH))
    expected = model(ids).logits
    assert register_kernels(("cpu",)) == kernels.LAYER
    model.set_use_kernels(True)
    norms = [module for module in model.modules() if isinstance(module, v3.DeepseekV3RMSNorm)]
    assert norms
    for norm in norms:
        assert norm.forward.__func__ is kernels.RMSNormLayer.forward
    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-5, atol=1e-6)


def test_kernels_for_other_devices() -> None:
    with pytest.raises(ValueError, match="register_kernels: devices must be one of cuda, cpu"):
        register_kernels(("mps",))
