"""Between public functions, with parameters by keyword alone, and what the dispatcher calls."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

R = TypeVar("R")


def in_order(oracle: Callable[..., R]) -> Callable[..., R]:
    """`oracle` with all arguments in order and none left out, as operators behind a face have them.

    Its signature is that of such an operator.

    >>> def scaled(x: int, *, factor: int = 1) -> int:
    ...     return x * factor
    >>> in_order(scaled)(2, 3)
    6
    >>> inspect.signature(in_order(scaled))
    <Signature (x: int, factor: int) -> int>
    """
    public = inspect.signature(oracle, eval_str=True)
    kinds = {name: parameter.kind for name, parameter in public.parameters.items()}
    by_name = [name for name, kind in kinds.items() if kind is inspect.Parameter.KEYWORD_ONLY]

    @functools.wraps(oracle)
    def ordered(*arguments: Any) -> R:
        first = len(arguments) - len(by_name)
        return oracle(*arguments[:first], **dict(zip(by_name, arguments[first:])))

    ordered.__signature__ = public.replace(  # type: ignore[attr-defined]
        parameters=[
            inspect.Parameter(
                name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=parameter.annotation
            )
            for name, parameter in public.parameters.items()
        ]
    )
    return ordered
