"""Docstrings of the public interface: every parameter is described, and names no other one."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

# What docs/release.md calls public, and the modules that adapt other packages' interfaces.
MODULES = [
    "tile_kernels",
    "tile_kernels.attention",
    "tile_kernels.config",
    "tile_kernels.emulator",
    "tile_kernels.engram",
    "tile_kernels.ep",
    "tile_kernels.gemm",
    "tile_kernels.integrations.deep_gemm",
    "tile_kernels.integrations.expert_parallel",
    "tile_kernels.integrations.megatron",
    "tile_kernels.integrations.mx",
    "tile_kernels.integrations.plugins",
    "tile_kernels.integrations.serving",
    "tile_kernels.integrations.sglang",
    "tile_kernels.integrations.transformers",
    "tile_kernels.integrations.vllm",
    "tile_kernels.mhc",
    "tile_kernels.modeling.attention",
    "tile_kernels.modeling.engram",
    "tile_kernels.modeling.fp8_experts",
    "tile_kernels.modeling.mhc",
    "tile_kernels.modeling.mhc.ops",
    "tile_kernels.modeling.models",
    "tile_kernels.modeling.moe",
    "tile_kernels.modeling.norm",
    "tile_kernels.modeling.quant",
    "tile_kernels.moe",
    "tile_kernels.quant",
    "tile_kernels.rand",
    "tile_kernels.testing",
    "tile_kernels.torch",
    "tile_kernels.torch.engram",
    "tile_kernels.torch.mhc",
    "tile_kernels.transform",
    "tile_kernels.transpose",
    "tile_kernels.utils",
    "tile_kernels.v2",
]
FAMILIES = ("attention", "engram", "gemm", "mhc", "moe", "quant", "transform", "transpose")
SECTIONS = r"Args|Attributes|Returns|Yields|Raises|Example|Note"


def public(module: Any) -> Iterator[tuple[str, Any]]:
    """Functions and classes that a module exports."""
    names = getattr(module, "__all__", None) or [
        name
        for name, value in vars(module).items()
        if getattr(value, "__module__", "") == module.__name__ and not name.startswith("_")
    ]
    for name in names:
        value = getattr(module, name)
        if callable(value):
            yield name, value


def methods(cls: type) -> Iterator[tuple[str, Any]]:
    """The public methods that a class and its bases in this package define."""
    found: dict[str, Any] = {}
    for each in cls.__mro__:
        if each.__module__.startswith("tile_kernels"):
            found = {**vars(each), **found}
    for name, value in found.items():
        function = getattr(value, "__func__", value)  # of class methods and static methods
        if inspect.isfunction(function) and not name.startswith("_"):
            yield name, function


def described(function: Any) -> set[str]:
    """The names at the head of the entries of `Args` and `Attributes`."""
    text = inspect.getdoc(function) or ""
    found: set[str] = set()
    for section in re.findall(
        rf"^(?:Args|Attributes):\n(.*?)(?=^(?:{SECTIONS}):|\Z)", text, flags=re.M | re.S
    ):
        heads = re.findall(r"^    ((?:\*{0,2}\w+,?\s+)*\*{0,2}\w+):", section, flags=re.M)
        found.update(name.strip("*, ") for head in heads for name in head.split())
    return found


def parameters(function: Any) -> list[str]:
    """The parameters that a caller passes."""
    names = list(inspect.signature(function).parameters)
    return [name for name in names if name not in ("self", "cls")]


def is_called(value: Any) -> bool:
    """Whether its parameters are those of its own: not of `tuple`, nor of an autograd function."""
    try:
        names = inspect.signature(value).parameters
    except ValueError:  # a built-in type
        return False
    return "iterable" not in names and not (
        inspect.isclass(value) and issubclass(value, torch.autograd.Function)
    )


def same_operator(name: str) -> Callable[..., Any] | None:
    """The operator that a reference of that name defines: its docstring describes both."""
    for family in FAMILIES:
        found = getattr(importlib.import_module(f"tile_kernels.{family}"), name, None)
        if inspect.isfunction(found):
            return found
    return None


def cases() -> Iterator[Any]:
    seen = set()
    for path in MODULES:
        for name, value in public(importlib.import_module(path)):
            if not is_called(value):
                continue
            operator = same_operator(name) if path.startswith("tile_kernels.torch") else None
            entries = [(name, value, operator)]
            if inspect.isclass(value):
                entries += [(f"{name}.{key}", method, None) for key, method in methods(value)]
            for label, function, other in entries:
                if id(function) not in seen:
                    seen.add(id(function))
                    yield pytest.param(function, other, id=f"{path.partition('.')[2]}:{label}")


CASES = list(cases())


def test_the_list_is_not_empty() -> None:
    assert len(CASES) > 500


@pytest.mark.parametrize(("function", "operator"), CASES)
def test_every_parameter_is_described(function: Any, operator: Any) -> None:
    """In its own docstring or, for a reference, in that of the operator."""
    assert inspect.getdoc(function), "no docstring"
    names = parameters(function)
    if operator:  # references take the options of the operators and ignore them
        names = [name for name in names if name not in ("_", "ignored")]
    known = described(function) | (described(operator) if operator else set())
    missing = [name for name in names if name not in known]
    assert not missing, missing


@pytest.mark.parametrize(("function", "operator"), CASES)
def test_nothing_else_is_described(function: Any, operator: Any) -> None:
    """A renamed parameter leaves no entry behind."""
    if inspect.isclass(function):
        return  # attributes may be computed
    unknown = described(function) - set(parameters(function))
    assert not unknown, unknown


def test_a_missing_parameter_is_found() -> None:
    def example(x: int, y: int, *others: int) -> None:
        """Does nothing.

        Args:
            x, z: Numbers,
                with y: in a further line.
            *others: More numbers.

        Returns:
            y: Not an argument.
        """

    assert described(example) == {"x", "z", "others"}
    assert parameters(example) == ["x", "y", "others"]
