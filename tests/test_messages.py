"""What all operators say of arguments that cannot be: scalars, inference tensors, gradients."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from typing import Any, get_args, get_origin

import numpy as np
import pytest
import torch

import tile_kernels
from tests.selection import operators
from tile_kernels.runtime import checks, emulation
from tile_kernels.runtime.cases import tensors_in
from tile_kernels.runtime.operator import Operator

OPS = operators()
WRONG: dict[type, tuple[Any, ...]] = {
    int: (
        "3",
        [],
        object(),
        1.5,
        float("nan"),
        2**70,
        -(2**70),
        10**400,
        True,
        torch.tensor([1, 2]),
    ),
    float: ("3", [], object(), 10**400, -(10**400), True, torch.tensor([1.0, 2.0])),
    bool: ("3", [], object(), 1, 0.0, torch.tensor([True, True])),
}
WRONG_EPS = (-1, -1.0, float("nan"), float("inf"))
NUMPY: dict[type, tuple[Any, ...]] = {
    int: (np.int64, np.int32),
    float: (np.float64, np.float32),
    bool: (np.bool_,),
}


def scalars(op: Operator) -> Iterator[tuple[str, type, bool]]:
    """Name and type of parameters that take a number, and whether they take several."""
    for name, parameter in op.signature.parameters.items():
        annotation = parameter.annotation
        for kind in get_args(annotation) if type(None) in get_args(annotation) else (annotation,):
            if kind in WRONG:
                yield name, kind, False
            elif get_origin(kind) in (tuple, list) and set(get_args(kind)) == {int}:
                yield name, int, True


CASES = [(op, *scalar) for op in OPS for scalar in scalars(op)]
each_scalar = pytest.mark.parametrize(
    ("op", "name", "kind", "several"),
    [pytest.param(*case, id=f"{case[0].name}-{case[1]}") for case in CASES],
)


def test_the_list_is_not_empty() -> None:
    assert {kind for _, _, kind, _ in CASES} == {int, float, bool}
    assert any(several for *_, several in CASES)


@each_scalar
def test_wrong_scalars_are_refused(
    op: Operator, name: str, kind: type, several: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launched(*_: object) -> None:
        raise AssertionError("a kernel was launched")

    monkeypatch.setattr(emulation, "run", launched)
    good = op.cases.ordinary().build("cpu")
    wrong = WRONG[kind] + (WRONG_EPS if kind is float and name.endswith("eps") else ())
    for value in wrong:
        for given in [(value, 1), [1, value], value, (1, 1, 1)] if several else [value]:
            with (
                tile_kernels.backend("emulate"),
                pytest.raises(
                    (TypeError, ValueError), match=rf"^{op.short_name}: .*\b{name}\b"
                ) as caught,
            ):
                op.function(**{**good, name: given})
            assert len(str(caught.value)) < 300


def with_numpy(op: Operator, arguments: dict[str, Any], choice: int) -> dict[str, Any]:
    """All numbers as NumPy's."""
    changed = dict(arguments)
    for name, kind, several in scalars(op):
        value, numpy = arguments[name], NUMPY[kind][choice % len(NUMPY[kind])]
        if value is not None:
            changed[name] = type(value)(map(numpy, value)) if several else numpy(value)
    return changed


@pytest.mark.parametrize("op", [op for op in OPS if list(scalars(op))], ids=lambda op: op.name)
def test_numpy_scalars_are_numbers(op: Operator) -> None:
    for choice in (0, 1):
        good, same = (op.bind(**op.cases.ordinary().build("cpu")) for _ in range(2))
        given = with_numpy(op, good, choice)
        plain = checks.plain(tuple(with_numpy(op, same, choice).values()))
        expected = op.outcome(op.function, dict(zip(given, plain)))
        result = op.outcome(op.function, given)
        for one, other in zip(tensors_in(result), tensors_in(expected), strict=True):
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def test_numpy_scalars_under_compile() -> None:
    """They break the graph, as their value is not part of it, and give the same result."""
    x, block = torch.randn(128, 128), (np.int64(128), np.int64(128))
    eps, logits = np.float32(1e-6), torch.randn(2, 4, 4)

    def cast(x: torch.Tensor, block: Any, logits: torch.Tensor) -> Any:
        normalized = tile_kernels.mhc.sinkhorn_normalize(logits, np.int32(10), eps)
        return tile_kernels.quant.per_block_cast(x + 1, "e4m3", block)[1], normalized

    torch._dynamo.reset()
    compiled = torch.compile(cast, backend="aot_eager")
    for one, other in zip(compiled(x, block, logits), cast(x, block, logits), strict=True):
        assert torch.equal(one, other)


# ---- what is written ----------------------------------------------------------------------------

WRITING = [(op, name) for op in OPS for name in op.mutates]


def as_inference(value: Any) -> Any:
    with torch.inference_mode():
        if isinstance(value, torch.Tensor):
            return value.clone()
        return type(value)(each.clone() for each in value)


@pytest.mark.parametrize("backend", ["torch", "emulate"])
@pytest.mark.parametrize(
    ("op", "name"), [pytest.param(*each, id=f"{each[0].name}-{each[1]}") for each in WRITING]
)
def test_inference_tensors_are_written_in_inference_mode_only(
    op: Operator, name: str, backend: str
) -> None:
    built = (sample.build("cpu") for sample in op.cases.small)
    arguments = next(given for given in built if tensors_in(given.get(name)))
    arguments[name] = as_inference(arguments[name])
    words = rf"^{op.short_name}: {name} must not be an inference tensor"
    with tile_kernels.backend(backend):
        with pytest.raises(ValueError, match=words):
            op.function(**arguments)
        with torch.inference_mode():
            op.function(**arguments)


@pytest.mark.parametrize("op", [op for op in OPS if op.outputs], ids=lambda op: op.name)
def test_inference_tensors_as_buffers(op: Operator) -> None:
    arguments = op.cases.ordinary().build("cpu")
    buffers = [as_inference(x) for x in tensors_in(op.function(**arguments))]
    with pytest.raises(ValueError, match=rf"^{op.short_name}: out must not be an inference tensor"):
        op.function(**arguments, **op.buffers(*buffers))


# ---- gradients ----------------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_a_missing_gradient_says_what_to_do(op: Operator) -> None:
    arguments = op.cases.ordinary().build("cpu")
    for x in tensors_in({key: x for key, x in arguments.items() if key not in op.mutates}):
        if x.dtype in (torch.float32, torch.bfloat16):
            x.requires_grad_()
    results = [x for x in tensors_in(op.function(**arguments)) if x.requires_grad]
    if not results:
        return
    try:
        results[0].float().sum().backward()
    except RuntimeError as error:
        message = str(error)
    else:
        assert any(x.is_leaf and x.grad is not None for x in tensors_in(arguments))
        return
    assert re.match(rf"{op.short_name}(:.*| has) no gradient; ", message)
    for path in re.findall(r"tile_kernels\.[\w.]*\w", message):
        module, _, function = path.rpartition(".")
        assert callable(getattr(importlib.import_module(module), function))


def test_the_gradient_of_a_cast_names_fake_cast() -> None:
    x = torch.randn(2, 128, requires_grad=True)
    data, _ = tile_kernels.quant.per_token_cast(x, "e4m3", 128)
    with pytest.raises(RuntimeError, match=r"use tile_kernels\.quant\.fake_cast, whose gradient"):
        data.float().sum().backward()


# ---- functions behind others --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (tile_kernels.quant.cast, (1, torch.bfloat16), "x must be a torch.Tensor, got int"),
        (
            tile_kernels.quant.per_token_cast_and_cast_back,
            (torch.ones(1, 4), "e4m3", 3),
            "num_per_channels must be",
        ),
        (
            tile_kernels.moe.moe_topk_gate,
            (torch.ones(1, 4), 9, False, 0, 1.0, 0),
            "num_topk must be",
        ),
        (
            tile_kernels.moe.moe_topk_gate_forward,
            (torch.ones(1, 4), 9, False, 0, 1.0, 0),
            "num_topk must be",
        ),
        (
            tile_kernels.attention.flash_mla_sparse_fwd,
            (torch.ones(1), None, None, 1.0),
            "q must be bfloat16",
        ),
        (
            tile_kernels.attention.flash_mla_sparse_fwd,
            (None, None, None, 1.0, 64),
            "d_v must be 512, got 64",
        ),
        (
            tile_kernels.v2.engram.engram_gate_fwd,
            (None, None, None, 1e-6, 1e-6),
            "hidden_states must",
        ),
        (tile_kernels.v2.engram.engram_gate_bwd, (None,) * 8 + (1e-6,), "hidden_states must"),
        (
            tile_kernels.engram.engram_gate,
            (None, None, None, torch.ones(1), None, 1e-6, 1e-6),
            "weight_hidden must",
        ),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_errors_name_the_function_that_was_called(
    function: Any, arguments: tuple[Any, ...], message: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{function.__name__}: {message}"):
        function(*arguments)
    with pytest.raises(TypeError, match=r"^\w+\(\) missing 1 required"):
        tile_kernels.quant.cast(1)
