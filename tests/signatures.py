"""Comparison of functions with signatures that are written as text."""

from __future__ import annotations

import ast
import importlib
import inspect
from typing import Any


def lines_of(signatures: dict[str, str]) -> list[tuple[str, str]]:
    """Module and signature of each line."""
    return [
        (module, line) for module, text in signatures.items() for line in text.split("\n") if line
    ]


def parameters_of(line: str) -> list[tuple[str, Any, str]]:
    """Name, kind and default (or an empty string) of the parameters of a signature in text."""
    ((definition,),) = [ast.parse(f"def {line}: ...").body]
    assert isinstance(definition, ast.FunctionDef)
    given = definition.args
    missing = [None] * (len(given.args) - len(given.defaults))
    kinds = inspect.Parameter
    found: list[tuple[str, Any, str]] = []
    for each, default in zip(given.args, [*missing, *given.defaults], strict=True):
        text = "" if default is None else ast.unparse(default)
        found.append((each.arg, kinds.POSITIONAL_OR_KEYWORD, text))
    if given.vararg is not None:
        found.append((given.vararg.arg, kinds.VAR_POSITIONAL, ""))
    for each, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        found.append(
            (each.arg, kinds.KEYWORD_ONLY, "" if default is None else ast.unparse(default))
        )
    return found


def check_signature(package: str, module: str, line: str) -> None:
    """Every call that is valid for the signature is valid for the function of that name.

    Parameters have the same names, order, kinds and defaults; one without a default may have one.
    More may follow that have defaults.
    """
    name = line.partition("(")[0]
    home = importlib.import_module(f"{package}.{module}".rstrip("."))
    found = list(inspect.signature(getattr(home, name)).parameters.values())
    expected = parameters_of(line)
    for ours, (theirs, kind, default) in zip(found, expected):
        assert (ours.name, ours.kind) == (theirs, kind)
        assert not default or repr(ours.default) == default
    assert len(found) >= len(expected)
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    for more in found[len(expected) :]:
        assert more.default is not more.empty or more.kind in variadic
