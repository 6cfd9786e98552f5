"""Models by their sizes: presets, files, and the layers whose kernels a warm-up compiles.

A description names the sizes that kernels depend on. `computations` builds the layers of
`tile_kernels.modeling` from it on the meta device, so that what is compiled is what those layers
launch.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import tomllib
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tile_kernels import attention, moe
from tile_kernels.modeling.attention import (
    CompressedSparseAttention,
    HeavilyCompressedAttention,
    KVCompressor,
)
from tile_kernels.modeling.attention.indexer import FORMATS
from tile_kernels.modeling.attention.state import LAYOUTS
from tile_kernels.modeling.engram import EngramHasher, EngramModule
from tile_kernels.modeling.mhc import (
    HyperConnection,
    HyperHead,
    RecomputedStack,
    expand_from_embedding,
)
from tile_kernels.modeling.moe import MoELayer
from tile_kernels.runtime.token_counts import MAX_TOKENS

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
INDEX_DTYPES = (torch.int32, torch.int64)  # of token ids, and of the starts of documents
INDEX_FORMATS = ("e4m3", "e2m1", "bfloat16")
ALLOWED = {
    "dtype": tuple(DTYPES),
    "format": INDEX_FORMATS,
    "index_format": FORMATS,
    "cache": tuple(LAYOUTS),
}


# ---- descriptions -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Experts:
    """The sizes of a `MoELayer`.

    Attributes:
        intermediate: Channels inside an expert.
        experts: The number of experts.
        topk: Experts per token.
        groups: Groups of experts; 0: none.
        topk_groups: Groups from which experts are selected; 0: none.
        shared_experts: Experts that every token uses.
        scoring: `"sigmoid"`, `"sqrtsoftplus"` or `"softmax"`.
        balancing: `"bias"`, `"loss"` or `"none"`.
        precision: `"bf16"` or `"fp8"`.
        round_activations: The argument `fp8` of `MoELayer`.
        hash_vocab: The number of token ids with fixed experts (`moe.hash_gate`); 0: none.
        dtype: The dtype of the weights.
    """

    intermediate: int
    experts: int
    topk: int
    groups: int = 0
    topk_groups: int = 0
    shared_experts: int = 0
    scoring: str = "sigmoid"
    balancing: str = "bias"
    precision: str = "bf16"
    round_activations: bool = False
    hash_vocab: int = 0  # ids of tokens with a fixed choice of experts; 0: none
    dtype: str = "bfloat16"


@dataclasses.dataclass(frozen=True)
class Streams:
    """The sizes of hyper-connections and of the head at their end.

    Attributes:
        streams: The number of streams.
        norm_weight: Whether the norm before the projection has a weight.
        sinkhorn_repeat: The number of Sinkhorn iterations.
        dtype: The dtype of the parameters.
    """

    streams: int = 4
    norm_weight: bool = False
    sinkhorn_repeat: int = 20
    dtype: str = "float32"


@dataclasses.dataclass(frozen=True)
class Engram:
    """The sizes of Engram layers.

    Attributes:
        vocab: The size of the vocabulary.
        table_rows: The least number of rows of a table.
        tables: Tables for each order of n-grams.
        ngram: N-grams have 2 to `ngram` tokens.
        embed_dim: The width of a table.
        layers: The number of Engram layers.
        dtype: The dtype of the parameters.
    """

    vocab: int
    table_rows: int
    tables: int = 8
    ngram: int = 3
    embed_dim: int = 64
    layers: int = 1
    dtype: str = "bfloat16"


@dataclasses.dataclass(frozen=True)
class Compressor:
    """The sizes of a `KVCompressor`.

    Attributes:
        channels: Channels of an entry.
        window: Tokens of a window.
        overlap: Whether windows overlap.
        rope_dim: Rotated channels; if not 0, entries are also cast for an FP8 cache.
        dtype: The dtype of the projection.
    """

    channels: int
    window: int
    overlap: bool = True
    rope_dim: int = 0
    dtype: str = "bfloat16"


@dataclasses.dataclass(frozen=True)
class Indexer:
    """The sizes of an indexer of compressed keys.

    Attributes:
        heads: The number of heads.
        dim: Channels of a head.
        topk: The number of keys that are selected.
        window: Tokens per key.
        format: `"e4m3"`, `"e2m1"` or `"bfloat16"`.
        max_context: The longest context in tokens.
    """

    heads: int
    dim: int
    topk: int
    window: int = 4
    format: str = "e4m3"
    max_context: int = 131072


@dataclasses.dataclass(frozen=True)
class Attention:
    """The sizes of a `CompressedSparseAttention`, with `topk=0` a `HeavilyCompressedAttention`.

    Attributes:
        heads: The number of heads.
        ratio: Tokens per entry.
        topk: Entries that the indexer selects; 0: no indexer.
        q_rank: The rank of the projection of queries.
        out_groups: Groups of heads in the output projection.
        out_rank: The rank of the output projection.
        window: Tokens that are attended to directly.
        index_heads: Heads of the indexer.
        index_dim: Channels of a head of the indexer.
        index_format: The format of the indexer.
        cache: `"fp8"` or `"bf16"`.
        max_context: The longest context for which decoding has room, in tokens.
        max_sequences: The number of sequences that are decoded together.
        dtype: The dtype of the weights.
    """

    heads: int
    ratio: int
    topk: int = 0
    q_rank: int = 1024
    out_groups: int = 8
    out_rank: int = 1024
    window: int = 128
    index_heads: int = 64
    index_dim: int = 128
    index_format: str = "e2m1"
    cache: str = "fp8"
    max_context: int = 131072
    max_sequences: int = 64
    dtype: str = "bfloat16"


@dataclasses.dataclass(frozen=True)
class Model:
    """The sizes of a model; parts that it does not have are None or empty.

    Attributes:
        hidden: Channels of a token.
        experts: The expert layers.
        streams: The hyper-connections.
        engram: The Engram layers.
        compressors: The compressors of keys and values.
        indexer: The indexer.
        attention: The attention layers.
        max_tokens: The largest number of tokens of a call.
        training: Whether backward passes are included.
    """

    hidden: int
    experts: Experts | None = None
    streams: Streams | None = None
    engram: Engram | None = None
    compressors: tuple[Compressor, ...] = ()
    indexer: Indexer | None = None
    attention: tuple[Attention, ...] = ()
    max_tokens: int = MAX_TOKENS
    training: bool = False


_TINY = {
    "q_rank": 32, "out_groups": 2, "out_rank": 32, "window": 8, "cache": "bf16",
    "max_context": 1024, "max_sequences": 1,
}  # fmt: skip
_V4_EXPERTS = {"scoring": "sqrtsoftplus", "shared_experts": 1, "precision": "fp8"}

# The hidden size, the compressors, the indexer and the attention of V4 are as published, and so are
# all sizes of V3. What is not stated in a public description that we follow is our choice: the
# experts of the V4-like models, and the Engram tables, which no published checkpoint of that size
# has.
PRESETS = {
    "deepseek-v3": Model(
        hidden=7168,
        experts=Experts(2048, 256, 8, groups=8, topk_groups=4, shared_experts=1, precision="fp8"),
    ),
    "v4-flash-like": Model(
        hidden=4096,
        experts=Experts(2048, 256, 6, hash_vocab=129280, **_V4_EXPERTS),  # type: ignore[arg-type]
        streams=Streams(4),
        engram=Engram(vocab=129280, table_rows=646400, embed_dim=64),
        compressors=(
            Compressor(512, 4, rope_dim=64),
            Compressor(512, 128, overlap=False, rope_dim=64),
            Compressor(128, 4),
        ),
        indexer=Indexer(heads=64, dim=128, topk=512),
        attention=(Attention(64, 0), Attention(64, 4, topk=512), Attention(64, 128)),
    ),
    "v4-like": Model(
        hidden=7168,
        experts=Experts(3072, 384, 6, hash_vocab=129280, **_V4_EXPERTS),  # type: ignore[arg-type]
        streams=Streams(4),
        engram=Engram(vocab=129280, table_rows=646400, embed_dim=64),
        compressors=(
            Compressor(512, 4, rope_dim=64),
            Compressor(512, 128, overlap=False, rope_dim=64),
            Compressor(128, 4),
        ),
        indexer=Indexer(heads=64, dim=128, topk=1024),
        attention=(
            Attention(128, 4, topk=1024, q_rank=1536, out_groups=16),
            Attention(128, 128, q_rank=1536, out_groups=16),
        ),
    ),
    # `examples/tiny_v4` with its default options, in training. On a GPU, attention and experts
    # multiply in bfloat16 under autocast.
    "tiny-v4": Model(
        hidden=64,
        experts=Experts(64, 8, 2, shared_experts=1, round_activations=True),
        streams=Streams(4),
        engram=Engram(vocab=128, table_rows=4096, tables=2, embed_dim=16, dtype="float32"),
        attention=(
            Attention(4, 4, topk=8, index_heads=4, index_dim=64, **_TINY),  # type: ignore[arg-type]
            Attention(4, 32, **_TINY),  # type: ignore[arg-type]
        ),
        training=True,
    ),
}


def load_model(source: Model | str | Path | Mapping[str, Any]) -> Model:
    """A description from a preset's name, a JSON or TOML file, or a mapping.

    Args:
        source: One of `PRESETS`; the path of a `.json` or `.toml` file; or what such a file holds.

    Raises:
        ValueError: If a key is not known, is missing, or has a value of another type, or the name
            is neither that of a preset nor of a file.
    """
    if isinstance(source, Model):
        return source
    if isinstance(source, Mapping):
        return _described(Model, source, "model")
    if str(source) in PRESETS:
        return PRESETS[str(source)]
    path = Path(source)
    if not path.is_file():
        near = difflib.get_close_matches(str(source), PRESETS, 1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise ValueError(
            f"model must be one of the presets {', '.join(PRESETS)}, or a .json or .toml file, got "
            f"{str(source)!r}{hint}"
        )
    try:
        text = path.read_text()
        values = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except ValueError as error:  # of either parser
        raise ValueError(f"{path} cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold an object of sizes, got {type(values).__name__}")
    return _described(Model, values, str(path))


def _described(kind: Any, values: Any, where: str) -> Any:
    """A dataclass from a mapping; errors name the key and where it is."""
    if not isinstance(values, Mapping):
        raise ValueError(f"{where} must be an object of sizes, got {values!r}")
    hints = typing.get_type_hints(kind)
    for key in values:
        if key not in hints:
            near = difflib.get_close_matches(str(key), hints, 1, cutoff=0.0)
            raise ValueError(
                f"{where}: {key!r} is not a key; the nearest key is {near[0]!r} of "
                f"{', '.join(hints)}"
            )
    for field in dataclasses.fields(kind):
        if field.default is dataclasses.MISSING and field.name not in values:
            raise ValueError(f"{where}: {field.name!r} is missing")
    return kind(
        **{key: _value(hints[key], value, f"{where}: {key}") for key, value in values.items()}
    )


def _value(hint: Any, value: Any, where: str) -> Any:
    """One value of a description, checked against its annotation."""
    if typing.get_origin(hint) is tuple:
        if not isinstance(value, (list, tuple)):
            raise ValueError(f"{where} must be a list, got {value!r}")
        (kind, _) = typing.get_args(hint)
        return tuple(_described(kind, each, f"{where}[{i}]") for i, each in enumerate(value))
    parts = [part for part in typing.get_args(hint) if part is not type(None)]
    if parts:
        return None if value is None else _described(parts[0], value, where)
    if type(value) is not hint or (hint is int and value < 0):
        wanted = "an integer of at least 0" if hint is int else f"a {hint.__name__}"
        raise ValueError(f"{where} must be {wanted}, got {value!r}")
    allowed = ALLOWED.get(where.rpartition(" ")[2])
    if allowed and value not in allowed:
        raise ValueError(f"{where} must be one of {', '.join(allowed)}, got {value!r}")
    return value


# ---- computations -------------------------------------------------------------------------------


class Computation(NamedTuple):
    """A part of a model.

    Attributes:
        name: The name of the part.
        run: A function that runs the part on meta tensors for a number of tokens.
        max_count: The largest number of tokens.
    """

    name: str
    run: Callable[[int], Any]
    max_count: int


def computations(model: Model) -> Iterator[Computation]:
    """Yields what the layers of a model compute for any number of tokens.

    This is the forward pass, and for training also the backward pass.

    Args:
        model: The sizes of the model.

    Raises:
        ValueError: If a layer does not support the sizes.
    """
    if model.max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, got {model.max_tokens}")
    parts: list[tuple[str, Callable[[int], Any], int]] = []
    if model.experts is not None:
        parts += [(name, run, model.max_tokens) for name, run in _experts(model, model.experts)]
    if model.streams is not None:
        parts.append(("streams", _streams(model, model.streams), model.max_tokens))
    if model.engram is not None:
        parts.append(("engram", _engram(model, model.engram), model.max_tokens))
    for each in model.compressors:
        parts += [(name, run, model.max_tokens) for name, run in _compressor(model, each)]
    if model.indexer is not None:
        parts += _indexer(model, model.indexer)
    for each_layer in model.attention:
        parts += _attention(model, each_layer)
    for name, run, most in parts:
        yield Computation(name, run, most)


def _empty(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=grad)


def _passes(model: Model, forward: Callable[[int, bool], Tensor]) -> Callable[[int], None]:
    """Runs `forward(count, grad)` without gradients, and in training also forward and backward."""

    def run(count: int) -> None:
        with torch.no_grad():
            forward(count, False)
        if model.training:
            with torch.enable_grad():
                y = forward(count, True)
                y.backward(torch.empty_like(y))

    return run


def _experts(model: Model, sizes: Experts) -> Iterator[tuple[str, Callable[[int], Any]]]:
    dtype = DTYPES[sizes.dtype]
    layer = MoELayer(
        model.hidden, sizes.intermediate, sizes.experts, sizes.topk, scoring_func=sizes.scoring,
        num_groups=sizes.groups, num_topk_groups=sizes.topk_groups,
        num_shared_experts=sizes.shared_experts, balancing=sizes.balancing,
        precision=sizes.precision, fp8=sizes.round_activations, device="meta", dtype=dtype,
    )  # fmt: skip
    yield (
        "experts",
        _passes(
            model, lambda count, grad: layer(_empty(count, model.hidden, dtype=dtype, grad=grad))
        ),
    )
    if model.training:
        yield "experts with main_grad", lambda count: _with_main_grads(model, layer, dtype, count)

    def counted_rows(count: int) -> None:
        """With the fewest rows, where the host counts them; the layer above has the most."""
        x, slots = _empty(count, model.hidden, dtype=dtype), (count, sizes.topk)
        positions = _empty(count * sizes.topk, dtype=torch.int32)
        moe.expand_to_fused(x, _empty(*slots, dtype=torch.int32), positions)

    if sizes.precision == "bf16":
        yield "counted rows", counted_rows
    if sizes.hash_vocab:
        table = _empty(sizes.hash_vocab, sizes.topk, dtype=torch.int64)

        def gate(count: int, grad: bool) -> Tensor:
            logits = _empty(count, sizes.experts, grad=grad)
            ids = _empty(count, dtype=torch.int64)
            return moe.hash_gate(logits, ids, table, scoring_func=sizes.scoring)[1]

        yield "hash gate", _passes(model, gate)


def _with_main_grads(model: Model, layer: MoELayer, dtype: torch.dtype, count: int) -> None:
    """Forward and backward with buffers to which gradients of weights are added."""
    for weight in layer.parameters():
        weight.main_grad = torch.empty_like(weight, dtype=torch.float32)  # type: ignore[attr-defined]
    y = layer(_empty(count, model.hidden, dtype=dtype))
    y.backward(torch.empty_like(y))
    for weight in layer.parameters():
        del weight.main_grad  # type: ignore[attr-defined]


def _streams(model: Model, sizes: Streams) -> Callable[[int], None]:
    dtype = DTYPES[sizes.dtype]
    connection = HyperConnection(
        nn.Identity(), model.hidden, sizes.streams, norm_weight=sizes.norm_weight,
        sinkhorn_repeat=sizes.sinkhorn_repeat, device="meta", dtype=dtype,
    )  # fmt: skip
    head = HyperHead(
        model.hidden, sizes.streams, norm_weight=sizes.norm_weight, device="meta", dtype=dtype
    )
    stack = RecomputedStack([connection])

    def forward(count: int, grad: bool) -> Tensor:
        x = _empty(count, model.hidden, dtype=torch.bfloat16, grad=grad)
        y = head(connection(expand_from_embedding(x, sizes.streams)))
        return y + head(stack(expand_from_embedding(x, sizes.streams))) if grad else y

    return _passes(model, forward)


def _engram(model: Model, sizes: Engram) -> Callable[[int], None]:
    hasher = EngramHasher(
        sizes.layers, sizes.vocab, sizes.table_rows, sizes.ngram, sizes.tables, device="meta"
    )
    streams = model.streams.streams if model.streams else 1
    layer = EngramModule(
        hasher, 0, model.hidden, streams, sizes.embed_dim, device="meta", dtype=DTYPES[sizes.dtype]
    )

    def forward(count: int, grad: bool) -> Tensor:
        x = _empty(1, count, streams, model.hidden, dtype=torch.bfloat16, grad=grad)
        for ids in INDEX_DTYPES:
            token_ids = _empty(1, count, dtype=ids)
            y = layer(x, token_ids)
            for starts in INDEX_DTYPES:
                y = layer(x, token_ids, cu_seqlens=_empty(2, dtype=starts))
        return y

    return _passes(model, forward)


def _compressor(model: Model, sizes: Compressor) -> Iterator[tuple[str, Callable[[int], Any]]]:
    dtype = DTYPES[sizes.dtype]
    layer = KVCompressor(
        model.hidden, sizes.channels, sizes.window, overlap=sizes.overlap, device="meta",
        dtype=dtype,
    )  # fmt: skip
    name = f"windows of {sizes.window}"

    def tokens(count: int, grad: bool = False) -> Tensor:
        return _empty(count, model.hidden, dtype=dtype, grad=grad)

    yield name, _passes(model, lambda count, grad: layer(tokens(count, grad)))
    yield f"{name}, packed", _passes(model, lambda count, grad: layer(tokens(count, grad)[None]))

    @torch.no_grad()
    def decode(count: int) -> None:
        state = layer.state(count)
        layer.step(tokens(count), state)
        layer.step(tokens(count), state, _empty(count, dtype=torch.int32))
        layer(tokens(count)[None], state=layer.state(1))

    yield f"{name}, decoding", decode
    if sizes.rope_dim:

        @torch.no_grad()
        def cast(count: int) -> None:
            angles = _empty(count, sizes.rope_dim // 2)
            layer.compress_and_cast(tokens(count), angles, angles)
            layer.compress_and_cast(tokens(count)[None], angles, angles)

        yield f"{name}, cast", cast


def _attention(model: Model, sizes: Attention) -> list[tuple[str, Callable[[int], Any], int]]:
    """Prompts, in one sequence and in several; in training the loss too; and decoding."""
    dtype = DTYPES[sizes.dtype]
    common: dict[str, Any] = {
        "heads": sizes.heads, "q_rank": sizes.q_rank, "out_groups": sizes.out_groups,
        "out_rank": sizes.out_rank, "window": sizes.window, "ratio": sizes.ratio,
        "cache": sizes.cache, "device": "meta", "dtype": dtype,
    }  # fmt: skip
    layer: CompressedSparseAttention | HeavilyCompressedAttention
    if sizes.topk:
        layer = CompressedSparseAttention(
            model.hidden, topk=sizes.topk, index_heads=sizes.index_heads,
            index_dim=sizes.index_dim, index_format=sizes.index_format, **common,
        )  # fmt: skip
    else:
        layer = HeavilyCompressedAttention(model.hidden, **common)
    name = f"attention with entries of {sizes.ratio}" if sizes.ratio else "window attention"

    def tokens(count: int, grad: bool = False) -> Tensor:
        return _empty(count, model.hidden, dtype=dtype, grad=grad)

    def prompts(count: int, grad: bool) -> Tensor:
        if grad and isinstance(layer, CompressedSparseAttention):
            y, loss = layer(tokens(count, grad), indexer_loss=True)
            return y + loss
        return layer(tokens(count, grad))

    rooms = [sizes.max_context]
    while sizes.ratio and rooms[-1] >= 32:  # other kernels choose among few entries
        rooms.append(rooms[-1] // 32)

    @torch.no_grad()
    def decode(count: int) -> None:
        layer.step(tokens(count), layer.state(count, rooms[0]))
        for room in rooms:
            layer.step(tokens(count), layer.state(count, room), _empty(count, dtype=torch.int32))

    @torch.no_grad()
    def start(count: int) -> None:
        layer(tokens(count)[None], state=layer.state(1, max(count, sizes.max_context)))

    return [
        (name, _passes(model, prompts), model.max_tokens),
        (f"{name}, prompts", start, min(model.max_tokens, sizes.max_context)),
        (f"{name}, decoding", decode, sizes.max_sequences),
    ]


def _indexer(model: Model, sizes: Indexer) -> list[tuple[str, Callable[[int], Any], int]]:
    """Queries with the keys of a prompt, with those of the longest context, and one with any."""
    most_keys = max(1, sizes.max_context // sizes.window)

    def keys_of(tokens: int) -> int:
        return max(1, tokens // sizes.window)

    return [
        ("prompts", lambda count: _index(model, sizes, count, keys_of(count)), model.max_tokens),
        ("longest context", lambda count: _index(model, sizes, count, most_keys), model.max_tokens),
        ("contexts", lambda count: _index(model, sizes, 1, count), most_keys),
    ]


@torch.no_grad()
def _index(model: Model, sizes: Indexer, num_queries: int, num_keys: int) -> None:
    def operand(*lead: int) -> Any:
        if sizes.format == "e2m1":
            return (
                _empty(*lead, sizes.dim // 2, dtype=torch.int8),
                _empty(*lead, sizes.dim // 32, dtype=torch.uint8),
            )
        dtype = torch.bfloat16 if sizes.format == "bfloat16" else torch.float8_e4m3fn
        return _empty(*lead, sizes.dim, dtype=dtype)

    q, k = operand(num_queries, sizes.heads), operand(num_keys)
    if sizes.format == "e4m3":
        k = k, _empty(num_keys)
    weights = _empty(num_queries, sizes.heads)
    start, end = (_empty(num_queries, dtype=torch.int32) for _ in range(2))
    logits = attention.indexer_logits(q, k, weights, start, end)
    attention.indexer_topk(logits, sizes.topk, end)
    attention.indexer_select(q, k, weights, start, end, sizes.topk)
    if model.training and sizes.format != "e2m1":
        chosen = _empty(num_queries, sizes.topk, dtype=torch.int32)
        attention.indexer_logits_bwd(q, k, weights, chosen, _empty(num_queries, sizes.topk))
