"""Models by their sizes: presets, files with errors, and the kernels that their layers need."""

from __future__ import annotations

import dataclasses
import functools
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tile_kernels
from examples.tiny_v4.model import Config, TinyV4
from tests import host_cost
from tile_kernels import config
from tile_kernels.modeling import bf16_experts
from tile_kernels.modeling.attention import CompressedSparseAttention, HeavilyCompressedAttention
from tile_kernels.modeling.engram import EngramHasher, EngramModule
from tile_kernels.modeling.mhc import HyperConnection, RecomputedStack
from tile_kernels.modeling.models import (
    PRESETS,
    Attention,
    Compressor,
    Engram,
    Model,
    Streams,
    computations,
    load_model,
)
from tile_kernels.modeling.moe import MoELayer
from tile_kernels.runtime import prepared
from tile_kernels.runtime.device import described
from tile_kernels.runtime.launch import Kernel, recording
from tile_kernels.runtime.warmup import Compilation, model_compilations

BF16 = torch.bfloat16
SIZES = {"hidden": 256, "experts": {"intermediate": 128, "experts": 8, "topk": 2}}
# What each part of a model launches at least.
KERNELS = {
    "experts": {"top2_sum_gate", "group_count", "fused_mapping", "expand", "reduce"},
    "streams": {"expand", "products", "post", "apply_mix"},
    "engram": {"windows", "hashes", "product", "gate"},
    "compressors": {"compress", "append", "place_windows", "compress_tail"},
    "indexer": {"score_tiles", "best_of_rows", "best_keys"},
    "attention": {
        "attend_rows",
        "attend_sequences",
        "attend_pages",
        "list_rows",
        "append_rows",
        "rotate",
        "compress",
        "best_keys",
    },
}
FP8 = {"cast_groups", "swiglu_groups", "masked_gemm_nt", "m_grouped_gemm_nt"}
BACKWARD = {"swiglu_backward", "gate_gradients", "reduce_gradients", "post_backward"}


@functools.cache
def demo_kernels() -> list[Compilation]:
    return model_compilations("tiny-v4", described(), max_tokens=1024)


def names(items: list[Compilation]) -> set[str]:
    return {item.kernel.name for item in items}


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_name_their_kernels(preset: str) -> None:
    """Without a GPU or a compiler; training adds kernels."""
    model = PRESETS[preset]
    items = model_compilations(preset, described(), training=False, max_tokens=300)
    expected = set().union(*(KERNELS[part] for part in KERNELS if getattr(model, part)))
    if model.experts is not None and model.experts.precision == "fp8":
        expected |= FP8
    assert expected <= names(items)
    assert not names(items) & BACKWARD
    assert len(set(items)) == len(items)
    if preset == "tiny-v4":
        assert names(demo_kernels()) >= BACKWARD  # it trains


def test_fewer_tokens_need_fewer_kernels() -> None:
    most = model_compilations(SIZES, described())
    few = model_compilations(SIZES, described(), max_tokens=1)
    assert set(few) < set(most)


def requested(run: Any) -> set[Compilation]:
    device = described()
    with recording() as requests:
        run()
    return {
        Compilation(each.kernel, each.kernel.static_arguments(each.problem, device), device.arch)
        for each in requests
    }


SMALL = Model(
    hidden=256,
    compressors=(Compressor(128, 4, rope_dim=64),),
    experts=dataclasses.replace(PRESETS["deepseek-v3"].experts, intermediate=256),  # type: ignore[type-var]
    attention=(Attention(4, 4, topk=8, q_rank=32, out_groups=2, out_rank=32, max_context=1024),),
    training=True,
)


@pytest.mark.parametrize(
    ("number", "max_tokens"), [(8, 1500), pytest.param(400, 16384, marks=pytest.mark.full)]
)
def test_the_layers_need_nothing_else(number: int, max_tokens: int) -> None:
    """At counts drawn at random, among them those that no enumeration ran at."""
    draw = random.Random(number)
    model = dataclasses.replace(SMALL, max_tokens=max_tokens)
    covered = set(model_compilations(model, described()))
    for part in computations(model):
        for tokens in [draw.randrange(1, part.max_count + 1) for _ in range(number)]:
            missing = requested(lambda part=part, tokens=tokens: part.run(tokens)) - covered
            assert not missing, f"{part.name} with {tokens} tokens"


DECODING = Attention(4, 4, topk=8, q_rank=32, out_groups=2, out_rank=32)


@pytest.mark.parametrize("ratio", [4, 128])
@torch.no_grad()
def test_decoding_needs_nothing_else(ratio: int) -> None:
    """Of fewer tokens than sequences, and with a state for shorter contexts than the longest."""
    draw = random.Random(0)
    sizes = dataclasses.replace(DECODING, ratio=ratio, topk=DECODING.topk if ratio == 4 else 0)
    covered = set(model_compilations(Model(256, attention=(sizes,)), described(), max_tokens=1))
    common: dict[str, Any] = {
        "heads": 4, "q_rank": 32, "out_groups": 2, "out_rank": 32, "cache": "fp8", "device": "meta",
        "dtype": BF16,
    }  # fmt: skip
    layer = (
        CompressedSparseAttention(256, topk=sizes.topk, **common)
        if sizes.topk
        else HeavilyCompressedAttention(256, ratio=ratio, **common)
    )
    most = sizes.max_sequences
    for sequences in (1, most - 1, most, *(draw.randrange(2, most) for _ in range(3))):
        for context in (sizes.max_context >> i for i in range(0, 17, 4)):
            state = layer.state(sequences, context)
            for count in {1, sequences, draw.randrange(1, sequences + 1)}:
                x, slots = torch.empty(count, 256), torch.empty(count, dtype=torch.int32)
                x, slots = x.to("meta", BF16), slots.to("meta")
                missing = requested(lambda x=x, s=state, at=slots: layer.step(x, s, at)) - covered
                assert not missing, f"{count} of {sequences} sequences of {context} tokens"


def test_streams_and_engram_need_nothing_else() -> None:
    """Layers that keep no residuals; token ids and documents of both integers; `main_grad`."""
    model = dataclasses.replace(
        SMALL, attention=(), compressors=(), streams=Streams(4), training=True,
        engram=Engram(vocab=50, table_rows=100, tables=2), max_tokens=100,
    )  # fmt: skip
    covered = set(model_compilations(model, described()))
    connection = HyperConnection(torch.nn.Identity(), 256, 4, device="meta")
    hasher = EngramHasher(1, 50, 100, num_tables=2, device="meta")
    engram = EngramModule(hasher, 0, 256, 4, device="meta", dtype=BF16)
    experts: Any = model.experts
    moe = MoELayer(
        256, experts.intermediate, experts.experts, experts.topk, precision="fp8", device="meta",
        num_groups=experts.groups, num_topk_groups=experts.topk_groups, num_shared_experts=1,
        dtype=BF16,
    )  # fmt: skip
    for weight in (*connection.parameters(), *engram.parameters(), *moe.parameters()):
        weight.main_grad = torch.empty_like(weight, dtype=torch.float32)  # type: ignore[attr-defined]

    def streams() -> Tensor:
        return torch.empty(1, 70, 4, 256, dtype=BF16, device="meta", requires_grad=True)

    def text(dtype: torch.dtype, starts: torch.dtype | None) -> Tensor:
        bounds = None if starts is None else torch.empty(3, dtype=starts, device="meta")
        return engram(streams(), torch.empty(1, 70, dtype=dtype, device="meta"), None, bounds)

    integers = torch.int32, torch.int64
    forms: dict[str, Any] = {
        "recomputed": lambda: RecomputedStack([connection, connection])(streams()),
        "experts": lambda: moe(torch.empty(70, 256, dtype=BF16, device="meta")),
        **{
            f"{dtype} with documents in {starts}": lambda d=dtype, s=starts: text(d, s)
            for dtype in integers
            for starts in (None, *integers)
        },
    }
    for name, form in forms.items():

        def passes(form: Any = form) -> None:
            y = form()
            y.backward(torch.empty_like(y))

        assert not requested(passes) - covered, name


def tiny(device: str) -> TinyV4:
    """The model of `examples/tiny_v4` as it is on a GPU."""
    return TinyV4(Config(vocab=96, dtype=BF16)).to(device)


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[Compilation]]:
    """The kernels of calls on CPU tensors, which are prepared as on a GPU.

    Kernels do nothing, and their results are zeros. Autocast changes no products of meta tensors,
    so that these cannot stand for the model.
    """
    found, device = set(), described()

    def bind(kernel: Kernel, problem: Any, index: int) -> Any:
        found.add(Compilation(kernel, kernel.static_arguments(problem, device), device.arch))
        return lambda *_: None

    def product(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        if weight.dim() == 3:
            return rows.new_zeros(len(rows), weight.shape[2])
        return rows.new_zeros(len(ends), len(rows), weight.shape[1])

    def zeros(shape: Any, strides: Any, dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(shape, strides, dtype=dtype).zero_()

    monkeypatch.setattr(bf16_experts, "grouped_mm_is_available", lambda x: x.dtype == BF16)
    monkeypatch.setattr(bf16_experts, "grouped_product", product)
    with host_cost.counting():
        monkeypatch.setattr(Kernel, "bound", bind)
        monkeypatch.setattr(prepared, "empty_strided_cuda", lambda _: zeros)
        yield found
        monkeypatch.undo()


@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (8, 64), (3, 171)])
def test_the_demo_needs_nothing_else(shape: tuple[int, int], bound: set[Compilation]) -> None:
    """The model of `examples/tiny_v4` and its losses, forward and backward."""
    model, token_ids = tiny("cpu"), torch.randint(96, shape)
    logits, loss = model.with_indexer_loss(token_ids)
    (logits.sum() + loss).backward()
    with torch.no_grad():
        model(token_ids)
    assert len(bound) > 40
    assert bound <= set(demo_kernels())


def test_the_demo_routes_on_tensor_cores() -> None:
    """Only on a GPU, or on meta tensors in its place: products of the router in three parts."""
    assert {"gemm_nt", "split"} <= names(demo_kernels())


@pytest.mark.gpu
def test_the_demo_compiles_nothing_after_warm_up() -> None:
    """Forward and backward with any number of tokens, compilation forbidden."""
    tile_kernels.warmup(model="tiny-v4", max_tokens=4096, progress=False)
    model = tiny("cuda")
    with config.forbid_compilation():
        for rows, length in ((1, 1), (1, 7), (1, 64), (1, 513), (8, 512)):
            token_ids = torch.randint(96, (rows, length), device="cuda")
            model(token_ids).float().square().mean().backward()
            with torch.no_grad():
                assert model(token_ids).isfinite().all()
    assert config.compilation_count(since_warmup=True) == 0


# ---- files --------------------------------------------------------------------------------------


def test_the_file_of_the_document_is_read(tmp_path: Path) -> None:
    """The page on serving shows a file with every part of a model but Engram, and names all."""
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    (example,) = re.findall(r"```toml\n(.*?)```", page, re.S)
    path = tmp_path / "model.toml"
    path.write_text(example)
    model = load_model(path)
    fields = {field.name for field in dataclasses.fields(Model)}
    parts = fields - {"hidden", "max_tokens", "training"}
    assert all(getattr(model, part) for part in parts - {"engram"})
    assert all(f"| `{part}` |" in page for part in parts)
    assert all(f"| `{preset}` |" in page for preset in PRESETS)
    assert any(each.name.endswith("decoding") for each in computations(model))


def test_files_of_both_kinds(tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text(json.dumps(SIZES))
    toml = "hidden = 256\n[experts]\nintermediate = 128\nexperts = 8\ntopk = 2\n"
    toml += "[[compressors]]\nchannels = 64\nwindow = 4\n"
    (tmp_path / "model.toml").write_text(toml)
    plain = load_model(tmp_path / "model.json")
    assert plain == load_model(SIZES)
    both = load_model(str(tmp_path / "model.toml"))
    assert both == dataclasses.replace(plain, compressors=(Compressor(64, 4),))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hiden": 4}, "'hiden' is not a key; the nearest key is 'hidden' of hidden, experts"),
        ({"hidden": "many"}, "hidden must be an integer of at least 0, got 'many'"),
        ({"hidden": True}, "hidden must be an integer of at least 0, got True"),
        ({"hidden": -1}, "hidden must be an integer of at least 0, got -1"),
        ({"training": 1}, "training must be a bool, got 1"),
        ({"experts": 8}, "experts must be an object of sizes, got 8"),
        ({"experts": {"experts": 8, "topk": 2}}, "experts: 'intermediate' is missing"),
        ({"compressors": {"window": 4}}, "compressors must be a list"),
        (
            {"compressors": [{"windows": 4}]},
            r"compressors\[0\]: 'windows' is not a key; .*'window'",
        ),
        (
            {"compressors": [{"channels": 8, "window": 4, "dtype": "float16"}]},
            r"compressors\[0\]: dtype must be one of bfloat16, float32, got 'float16'",
        ),
        (
            {"indexer": {"heads": 8, "dim": 64, "topk": 4, "format": "fp8"}},
            "indexer: format must be one of e4m3, e2m1, bfloat16, got 'fp8'",
        ),
    ],
)
def test_wrong_files_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "model.json"
    path.write_text(json.dumps({**SIZES, **change}))
    with pytest.raises(ValueError, match=message) as error:
        load_model(path)
    assert str(path) in str(error.value)


def test_other_errors_are_sentences(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    for text, message in (
        ("{", "cannot be read"),
        ("[1]", "must hold an object of sizes, got list"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            load_model(path)
    with pytest.raises(ValueError, match=r"one of the presets deepseek-v3.*did you mean v4-like\?"):
        load_model("v4-lik")
    wrong = {**SIZES, "experts": {**SIZES["experts"], "topk": 9}}  # type: ignore[dict-item]
    with pytest.raises(ValueError, match=r"warmup: MoELayer: num_topk must be in 1\.\.8"):
        tile_kernels.warmup(model=wrong)
    with pytest.raises(ValueError, match="max_tokens must be at least 1, got 0"):
        tile_kernels.warmup(model=SIZES, max_tokens=0)
    with pytest.raises(ValueError, match="calls and model cannot both be given"):
        tile_kernels.warmup([], model=SIZES)
    with pytest.raises(ValueError, match="training and max_tokens need a model"):
        tile_kernels.warmup(training=True)
