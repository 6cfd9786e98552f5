"""Arguments of modules: constructors and calls refuse what cannot be, with the argument's name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tile_kernels.modeling.attention import (
    CompressedSparseAttention,
    HeavilyCompressedAttention,
    KVCompressor,
)
from tile_kernels.modeling.engram import (
    CausalConvolution,
    EngramHasher,
    EngramModule,
    EngramTable,
)
from tile_kernels.modeling.mhc import HyperConnection, HyperHead
from tile_kernels.modeling.moe import MoELayer

NAN, INF = float("nan"), float("inf")
BAD: tuple[Any, ...] = ("3", None, -1, 0, 1.5, NAN, INF, -INF, 10**30, 10**400, [], object(), True)

# What is right: each parameter of each module with the values of `BAD` that it takes.
NONE, BOOL, ANY_NUMBER, SEED = (None,), (True,), (-1, 0, 1.5, 10**30), (-1, 0)
EPS = (0, 1.5, 10**30)
EPS_OR_NONE = (*EPS, None)
HASHER = EngramHasher(num_layers=2, vocab_size=50, table_rows=100, num_tables=2)
MODULES: list[tuple[type[nn.Module], dict[str, Any], dict[str, tuple[Any, ...]]]] = [
    (
        MoELayer,
        {"hidden": 16, "intermediate": 32, "num_experts": 4, "num_topk": 2},
        {
            "num_groups": (0,), "num_topk_groups": (0,), "routed_scaling_factor": ANY_NUMBER,
            "num_shared_experts": (0,), "fp8": BOOL, "ep": NONE,
        },
    ),
    (
        HyperConnection,
        {"block": nn.Identity(), "hidden_size": 16},
        {
            "norm_weight": BOOL, "post_mult_value": ANY_NUMBER, "norm_eps": EPS, "pre_eps": EPS,
            "sinkhorn_eps": EPS, "block_dtype": NONE,
        },
    ),
    (HyperHead, {"hidden_size": 16}, {"norm_weight": BOOL, "norm_eps": EPS, "pre_eps": EPS}),
    (
        EngramHasher,
        {"num_layers": 2, "vocab_size": 50, "table_rows": 100},
        {"pad_id": SEED, "seed": SEED, "token_map": NONE},
    ),
    (
        EngramModule,
        {"hasher": HASHER, "layer": 1, "hidden_size": 16},
        {
            "layer": (0,), "clamp_value": EPS, "eps": EPS, "sparse": BOOL, "host_resident": BOOL,
        },
    ),
    (EngramTable, {"num_rows": 9, "embed_dim": 4}, {"sparse": BOOL, "host_resident": BOOL}),
    (CausalConvolution, {"num_streams": 2, "hidden_size": 8}, {"eps": EPS}),
    (
        KVCompressor,
        {"hidden": 16, "channels": 8, "window": 4},
        {"overlap": BOOL, "norm_eps": EPS_OR_NONE},
    ),
    (
        CompressedSparseAttention,
        {"hidden": 16, "heads": 2, "q_rank": 8, "out_groups": 1, "out_rank": 8, "index_heads": 2},
        {"rope": NONE, "norm_eps": EPS},
    ),
    (
        HeavilyCompressedAttention,
        {"hidden": 16, "heads": 2, "q_rank": 8, "out_groups": 1, "out_rank": 8},
        {"ratio": (0,), "rope": NONE, "norm_eps": EPS},
    ),
]  # fmt: skip
CASES = [
    pytest.param(module, good, name, taken, id=f"{module.__name__}-{name}")
    for module, good, right in MODULES
    for name in inspect.signature(module).parameters
    for taken in [{"device": NONE, "dtype": NONE, **right}.get(name, ())]
]


def same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and one == other)


@pytest.mark.parametrize(("module", "good", "name", "taken"), CASES)
def test_wrong_arguments_of_constructors(
    module: type[nn.Module], good: dict[str, Any], name: str, taken: tuple[Any, ...]
) -> None:
    for value in BAD:
        given = {**good, name: value}
        if any(same(value, right) for right in taken):
            module(**given)
            continue
        if name == "device" and value == 0 and value is not None:
            continue  # the first GPU
        with pytest.raises((TypeError, ValueError)) as caught:
            module(**given)
        words = str(caught.value)
        assert words.startswith(f"{module.__name__}: ")
        assert f" {name} must" in words
        assert len(words) < 300


@pytest.mark.parametrize(
    ("module", "good"),
    [case[:2] for case in MODULES],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_numpy_numbers_are_numbers(module: type[nn.Module], good: dict[str, Any]) -> None:
    given = {key: np.int64(x) if isinstance(x, int) else x for key, x in good.items()}
    for one, other in zip(
        module(**given).state_dict().values(), module(**good).state_dict().values(), strict=True
    ):
        assert one.shape == other.shape
    assert not any(isinstance(x, np.generic) for x in vars(module(**given)).values())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"num_topk": 3, "num_groups": 2, "num_topk_groups": 1},
            "num_topk must be at most the experts of 1",
        ),
        ({"num_groups": 2, "num_topk_groups": 3}, r"num_topk_groups must be in 0\.\.2"),
        ({"num_groups": 2}, "num_topk_groups must be at least 1 with 2 groups"),
        ({"num_experts": 9000}, r"num_experts must be in 1\.\.8192, got 9000"),
        ({"num_experts": 64, "num_topk": 33}, r"num_topk must be in 1\.\.32"),
    ],
)
def test_routing_that_the_operators_refuse(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"^MoELayer: {words}"):
        MoELayer(**{"hidden": 16, "intermediate": 32, "num_experts": 4, "num_topk": 2, **change})


@pytest.mark.parametrize(
    ("token_map", "words"),
    [
        (torch.zeros(3), "token_map must be int32 or int64, got float32"),
        (torch.zeros(2, 2).int(), "token_map must have 1 dimensions"),
        (torch.zeros(0).int(), "token_map must hold the id of each token"),
        (torch.tensor([0, -2]), r"token_map must hold 0\.\.2147483647, but element \[1\] is -2"),
    ],
)
def test_maps_of_tokens(token_map: Tensor, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^EngramHasher: {words}"):
        EngramHasher(1, 0, 10, token_map=token_map)


def test_rows_of_tables() -> None:
    for rows in ([10, -1], [10, "3"], (10, 10**30), [10, 1.5]):
        with pytest.raises((TypeError, ValueError), match=r"^EngramHasher: table_rows must"):
            EngramHasher(1, 50, rows)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^EngramHasher: .*table_rows must leave primes"):
        EngramHasher(1, 50, 2**31 - 1)
    hasher = EngramHasher(1, 50, [np.int64(10), 20])
    assert hasher.rows_per_layer == EngramHasher(1, 50, (10, 20)).rows_per_layer


# ---- calls --------------------------------------------------------------------------------------


def kv_step(x: Any) -> Any:
    layer = KVCompressor(16, 8, 4)
    return layer.step(x, layer.state(2))


def engram(name: str) -> Callable[[Any], Any]:
    layer = EngramModule(HASHER, 1, 16)
    given = {"hidden_states": torch.randn(2, 3, 4, 16), "token_ids": torch.ones(2, 3).long()}
    if name == "indices":
        given["token_ids"] = None  # type: ignore[assignment]

    def call(value: Any) -> Any:
        return layer(**{**given, name: value})

    return call


ROWS, FLOAT, IDS = torch.randn(2, 3, 16), torch.bfloat16, torch.ones(2, 3).long()
STREAMS = torch.ones(3, 4, 16).bfloat16()
CALLS: list[tuple[str, str, Callable[..., Any], Tensor, torch.dtype, str]] = [
    ("MoELayer", "x", MoELayer(16, 32, 4, 2), ROWS, FLOAT, "float32 like the weights"),
    ("KVCompressor", "x", KVCompressor(16, 8, 4), ROWS, FLOAT, "float32 like the weights"),
    ("KVCompressor", "x", kv_step, ROWS[:, 0], FLOAT, "float32 like the weights"),
    ("HyperConnection", "residual", HyperConnection(nn.Identity(), 16), STREAMS, torch.float32,
     "bfloat16, got float32"),
    ("HyperHead", "residual", HyperHead(16), STREAMS, torch.float32, "bfloat16, got float32"),
    ("EngramModule", "hidden_states", engram("hidden_states"), torch.randn(2, 3, 4, 16),
     torch.int64, "float32 or bfloat16"),
    ("EngramModule", "token_ids", engram("token_ids"), IDS, torch.float32, "int32 or int64"),
    ("EngramModule", "indices", engram("indices"), torch.ones(2, 3, 4).int(), torch.float32,
     "int32 or int64"),
    ("EngramTable", "indices", EngramTable(9, 4), IDS, torch.float32, "int32 or int64"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("module", "name", "call", "good", "dtype", "words"),
    [pytest.param(*each, id=f"{each[0]}-{each[1]}-{i}") for i, each in enumerate(CALLS)],
)
def test_wrong_inputs(
    module: str, name: str, call: Callable[..., Any], good: Tensor, dtype: torch.dtype, words: str
) -> None:
    call(good)
    with pytest.raises(TypeError, match=f"^{module}: {name} must be {words}"):
        call(good.to(dtype))
    with pytest.raises(TypeError, match=f"^{module}: {name} must be a torch.Tensor, got list"):
        call(good.tolist())
    with pytest.raises(ValueError, match=f"^{module}: {name} must be on cpu like the weights"):
        call(good.to("meta"))
    with pytest.raises(ValueError, match=f"^{module}: {name} must "):
        call(good[..., :1] if good.is_floating_point() else good.reshape(-1)[0])


def test_a_hasher_takes_tensors_only() -> None:
    with pytest.raises(TypeError, match=r"^EngramHasher: token_ids must be a torch\.Tensor"):
        HASHER([1, 2])
    with pytest.raises(TypeError, match=r"^KVCompressor: state must be a KVCompressorState"):
        KVCompressor(16, 8, 4)(ROWS, state=(1, 2))
    with pytest.raises(TypeError, match=r"^EngramModule: cu_seqlens must be a torch.Tensor"):
        EngramModule(HASHER, 1, 16)(torch.randn(2, 3, 4, 16), IDS, cu_seqlens=[0, 6])


@pytest.mark.parametrize("layer", [MoELayer(16, 32, 4, 2), KVCompressor(16, 8, 2)])
def test_autocast_and_compiled_layers_take_other_dtypes(layer: nn.Module) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for dtype in (torch.float32, torch.bfloat16):
            layer(ROWS.to(dtype))
        with pytest.raises(TypeError, match="x must be float32 like the weights"):
            layer(ROWS.int())
    assert layer.to(torch.bfloat16)(ROWS.bfloat16()).dtype == torch.bfloat16
    layer.float()


def test_checks_need_no_graph_break() -> None:
    torch._dynamo.reset()
    for layer, x in ((KVCompressor(16, 8, 2), ROWS), (HyperHead(16), STREAMS)):
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x), layer(x))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(compiled(x), layer(x))
