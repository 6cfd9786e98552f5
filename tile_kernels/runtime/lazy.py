"""Public names of a family, imported at their first use.

`__init__.pyi` of the family imports its public functions, each as itself. Type checkers and editors
read that file; at run time it is the list of the names and of the modules that define them. So a
program that uses one operator does not load the others.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def exports(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of a package with an `__init__.pyi`."""
    module = sys.modules[package]
    stub = Path(module.__file__ or "").with_suffix(".pyi")
    origin = {
        alias.asname or alias.name: statement.module
        for statement in ast.parse(stub.read_text()).body
        if isinstance(statement, ast.ImportFrom) and statement.module
        for alias in statement.names
    }

    def find(name: str) -> Any:
        if name not in origin:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(origin[name]), name)
        setattr(module, name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(module), *origin})

    return find, names, sorted(origin)
