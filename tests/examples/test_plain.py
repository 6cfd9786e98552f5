"""The tiny model in plain PyTorch computes what the model computes, and is what is timed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tile_kernels
from examples.tiny_v4 import speed, train
from examples.tiny_v4.model import TinyV4
from examples.tiny_v4.plain import PlainTinyV4
from tests.examples.small import distance, gradients, ids_of, model_of
from tile_kernels.mhc.norm_fn.reference import tf32

# The results of sparse attention are bfloat16, which dense attention is not on a CPU.
DENSE = {"sparse": False}
WITHOUT_STREAMS = {"mhc": False, "fp8": False, **DENSE}


def stirred(**changes: Any) -> TinyV4:
    """A model whose parts all do something: at the start gates and taps are nearly idle.

    The projections of the streams are numbers of TF32, to which the kernels round them.
    """
    model = model_of(layers=2, engram_layers=(1,), **changes)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
            if name.endswith(".fn"):
                parameter.copy_(tf32(parameter))
        for layer in model.experts():
            layer.expert_bias.copy_(0.1 * torch.randn_like(layer.expert_bias))
    return model


# Streams are bfloat16: a sum in another order is rounded to the neighbour now and then, which is
# 2^-8 of a number. With e4m3 such a neighbour can be 2^-4 away; and there the layer computes its
# gradients from inputs kept in e4m3, which are off by up to 2^-4 each, the plain one from all bits.
@pytest.mark.parametrize(
    ("changes", "logits_off", "gradients_off", "each_off"),
    [
        ({}, 5e-3, 5e-2, 0.2),
        ({"fp8": False}, 3e-3, 2e-2, 5e-2),
        ({"mhc": False, "engram": False, "moe": False}, 3e-3, 1e-2, 2e-2),
        ({"fp8": False, **DENSE}, 1e-3, 5e-3, 5e-2),
        (WITHOUT_STREAMS, 1e-5, 1e-3, 1e-3),
        ({"moe": False, **DENSE}, 1e-3, 5e-3, 5e-2),
        ({"engram": False, "fp8": False, **DENSE}, 1e-3, 5e-3, 5e-2),
        ({"mhc": False, "engram": False, "moe": False, **DENSE}, 1e-5, 1e-5, 1e-5),
    ],
    ids=str,
)
def test_is_the_model(
    changes: dict[str, Any], logits_off: float, gradients_off: float, each_off: float
) -> None:
    model = stirred(**changes)
    compare_with_plain(model, ids_of(4, 33), logits_off, gradients_off, each_off)


def compare_with_plain(
    model: TinyV4, ids: Tensor, logits_off: float, gradients_off: float, each_off: float
) -> None:
    """Logits, all gradients together, and those of each parameter, by relative distance.

    Where streams are nearly equal, the gradient of what mixes them is a difference that rounding
    decides, and next to nothing: errors below a 500th of all gradients are measured by that.
    """
    plain = PlainTinyV4(model)
    given = ids.to(model.head.weight.device)
    assert distance(model(given), plain(given)) < logits_off
    expected = gradients(model, ids)
    found = {name.removeprefix("model."): grad for name, grad in gradients(plain, ids).items()}
    assert found.keys() == expected.keys()
    every = torch.cat([grad.flatten() for grad in expected.values()])
    assert distance(every, torch.cat([grad.flatten() for grad in found.values()])) < gradients_off
    least = every.norm() / 500
    errors = {
        name: ((grad - found[name]).norm() / grad.norm().clamp(min=least)).item()
        for name, grad in expected.items()
    }
    assert not {name: error for name, error in errors.items() if error > each_off}


def test_rounding_is_that_of_the_model() -> None:
    """Without e4m3 the logits are farther from the model's than the tolerance with it."""
    ids, rounded, exact = ids_of(4, 33), stirred(), stirred(fp8=False)
    assert distance(rounded(ids), PlainTinyV4(exact)(ids)) > 1e-2


@pytest.mark.parametrize("length", [1, 2, 5])
def test_texts_shorter_than_the_convolution(length: int) -> None:
    model, ids = stirred(**WITHOUT_STREAMS), ids_of(3, length)
    torch.testing.assert_close(PlainTinyV4(model)(ids), model(ids), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("length", [1, 3, 4, 5])
def test_texts_shorter_than_an_entry(length: int) -> None:
    model, ids = stirred(mhc=False, fp8=False), ids_of(3, length)
    assert distance(model(ids), PlainTinyV4(model)(ids)) < 3e-3


def test_no_operator_of_the_package_runs() -> None:
    """Where every operator would refuse tensors of the CPU, the plain model runs both ways."""
    model, ids = model_of(hidden=32), ids_of(2, 9)
    with tile_kernels.backend("tilelang"):
        with pytest.raises(ValueError, match="tilelang"):
            train.loss_of(model, ids)
        train.loss_of(PlainTinyV4(model), ids).backward()
    assert model.head.weight.grad is not None


def test_compiles_as_one_graph() -> None:
    plain, ids = PlainTinyV4(model_of(hidden=32)), ids_of(2, 9)
    expected = gradients(plain, ids)
    torch._dynamo.reset()
    compiled = torch.compile(plain, backend="aot_eager", fullgraph=True)
    plain.zero_grad()
    train.loss_of(compiled, ids).backward()
    for name, parameter in plain.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-3, atol=1e-5)


# ---- speed --------------------------------------------------------------------------------------


def test_speed_of_each_way() -> None:
    model = model_of(hidden=32, fp8=False)
    found = speed.compare(model, train.loss_of, ids_of(2, 9), repeats=1, compiled=False)
    assert list(found) == ["kernels", "plain PyTorch"]
    assert all(isinstance(value, float) and value > 0 for value in found.values())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_compiler_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_compiler(*_: Any, **__: Any) -> None:
        raise RuntimeError("no compiler found\nand a long story")

    monkeypatch.setattr(torch, "compile", no_compiler)
    found = speed.compare(model_of(hidden=32), train.loss_of, ids_of(2, 9), repeats=1)
    compiled = f"{speed.PLAIN}, {speed.COMPILED}"
    assert list(found) == ["kernels", speed.PLAIN, compiled]
    assert found[compiled] == "failed: RuntimeError: no compiler found"
    assert speed.in_words(found[compiled]).startswith("failed")
    assert speed.in_words(12.3) == "12 letters per second"


@pytest.mark.gpu
def test_speed_of_each_way_on_cuda() -> None:
    model = model_of(dtype=torch.bfloat16).cuda()
    found = speed.compare(model, train.loss_of, ids_of(8, 65).cuda(), repeats=3)
    ways = ("", f", {speed.COMPILED}", f", {speed.REDUCED}", f", {speed.GRAPH}")
    assert list(found) == [form + way for form in ("kernels", speed.PLAIN) for way in ways]
    assert all(isinstance(value, float) and value > 0 for value in found.values()), found


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("changes", "logits_off", "gradients_off", "each_off"),
    [({}, 2e-2, 0.1, 0.3), ({"fp8": False}, 5e-3, 2e-2, 0.1), (WITHOUT_STREAMS, 1e-3, 5e-3, 5e-3)],
    ids=str,
)
def test_is_the_model_on_cuda(
    changes: dict[str, Any], logits_off: float, gradients_off: float, each_off: float
) -> None:
    """Wider than on the CPU: kernels add in an order of their own, and so does cuBLAS."""
    model = stirred(**changes).cuda()
    compare_with_plain(model, ids_of(4, 33), logits_off, gradients_off, each_off)
