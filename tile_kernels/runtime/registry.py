"""The registry of operators, which tests, benchmarks, documents and the command line read."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable
from typing import Any, get_args

from torch import Tensor

_registry: dict[str, Any] = {}


class Registered:
    """What every registered operator offers. `function` is what users call."""

    name: str  # family.function
    function: Callable[..., Any]
    signature: inspect.Signature  # of the public function
    mutates: tuple[str, ...]
    outputs: tuple[str, ...]

    @property
    def short_name(self) -> str:
        """The public function's name."""
        return self.name.rpartition(".")[2]

    @property
    def family(self) -> str:
        """The package it belongs to."""
        return self.name.partition(".")[0]

    @property
    def tensor_parameters(self) -> list[str]:
        """The parameters that take tensors, optional ones included."""
        return [
            name
            for name, parameter in self.signature.parameters.items()
            if parameter.annotation is Tensor or Tensor in get_args(parameter.annotation)
        ]

    def outcome(self, function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        """What `function` returns for `arguments`, and with it the arguments written in place."""
        result = function(**arguments)
        written = tuple(arguments.get(name) for name in self.mutates)
        return (result, *written) if self.mutates else result

    def buffers(self, *values: Tensor) -> dict[str, Any]:
        """Buffers for the results as arguments: by name, or several as one tuple `out`."""
        if len(values) == 1 or self.outputs[-1] in self.signature.parameters:
            return dict(zip(self.outputs, values))
        return {"out": values}

    def bind(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The arguments by name, defaults filled in."""
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return dict(bound.arguments)


def register(operator: Any) -> None:
    """Enters an operator; names are unique."""
    if operator.name in _registry:
        raise ValueError(f"the operator {operator.name} is declared twice")
    _registry[operator.name] = operator


def get(function: str | Callable[..., Any]) -> Any:
    """The declaration of an operator, by its public function or by name, `family.name`.

    The name alone is enough where only one family has it.
    """
    if not isinstance(function, str):
        plain = inspect.unwrap(function)  # an alias has the function behind it
        for declared in _registry.values():
            if declared.function is plain:
                return declared
        raise KeyError(f"{function!r} is not a declared operator")
    load_all()
    return _registry[_full_name(function)]


_LEAST_LIKENESS = 0.6  # of a name that is suggested instead of an unknown one


def _full_name(name: str, families: Iterable[str] = ()) -> str:
    """The registered name for `name`, which may lack the family where that is unambiguous."""
    if name in _registry:
        return name
    public = [known for known in sorted(_registry) if "._" not in known]
    meant = [known for known in public if known.partition(".")[2] == name]
    if len(meant) == 1:
        return meant[0]

    def likeness(known: str) -> float:
        words = (known, known.rpartition(".")[2])
        return max(difflib.SequenceMatcher(None, name, word).ratio() for word in words)

    closest = meant or sorted((*families, *public), key=likeness, reverse=True)[:3]
    similar = [known for known in closest if meant or likeness(known) > _LEAST_LIKENESS]
    hint = f"did you mean {' or '.join(similar)}?" if similar else "tile-kernels ops lists them"
    kind = "family or operator" if families else "operator"
    raise KeyError(f"no {kind} {name!r}; {hint}")


def select(which: Iterable[str]) -> list[Any]:
    """Public operators by family or name; all of them for none."""
    found = all_ops()
    families = {declared.family for declared in found}
    names = [name if name in families else _full_name(name, sorted(families)) for name in which]
    return [op for op in found if not names or op.family in names or op.name in names]


def all_ops() -> list[Any]:
    """Every public operator of the library, by name; those declared elsewhere are left out."""
    load_all()
    found = [_registry[name] for name in sorted(_registry) if "._" not in name]
    return [each for each in found if each.function.__module__.startswith("tile_kernels.")]


def operators() -> list[Any]:
    """Every operator, those that serve others included."""
    load_all()
    return list(_registry.values())


def load_all() -> None:
    """Imports every operator, so that the registry is complete."""
    import tile_kernels

    for family in tile_kernels.FAMILIES:
        package = getattr(tile_kernels, family)
        for name in package.__all__:
            getattr(package, name)
