"""Argument checks. Each raises `TypeError` or `ValueError` with the argument's name, what was
expected and what came. The operator's name is put in front by the caller (`runtime/operator.py`).

They run on every call, so the good path is a few attribute reads; sentences are built on failure.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType
from typing import Any, TypeVar, cast

import torch
from torch.compiler import is_dynamo_compiling

F = TypeVar("F", bound=Callable[..., Any])

# Kernels count along a dimension in 32 bits, tiles past its end included. Offsets have 64.
MOST_SIZE = 2**31 - 2**16
_INT64_MAX = 2**63 - 1
_FLOAT_MAX = int(sys.float_info.max)
PARAMETER_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGERS = (torch.int32, torch.int64)
# Asked once: PyTorch 2.11 cannot trace `is_autocast_available`.
_AUTOCAST_DEVICES = tuple(
    kind for kind in ("cpu", "cuda", "xpu", "mps") if torch.amp.is_autocast_available(kind)
)
_OWNER = re.compile(r"\A\w+: ")  # in front of a message
_NUMPY_IN_GRAPH = "an operator takes a NumPy scalar; a Python int or float needs no graph break"


def tensor(
    name: str,
    value: object,
    dims: tuple[str, ...],
    dtype: torch.dtype | tuple[torch.dtype, ...] | None = None,
    *,
    shape: tuple[int | None, ...] | None = None,
    contiguous: bool = False,
    unit_inner_stride: bool = False,
) -> None:
    """`value` is a tensor with the dimensions named `dims`.

    `shape` fixes sizes (None: any); `dtype` is one or several; `unit_inner_stride` asks for
    stride 1 in the last dimension, unless that has one element and the stride no meaning.
    """
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    if value.layout is not torch.strided:
        raise TypeError(f"{name} must be a dense tensor, got layout {value.layout}")
    if dtype is not None and value.dtype is not dtype:
        allowed = dtype if isinstance(dtype, tuple) else (dtype,)
        if value.dtype not in allowed:
            raise TypeError(f"{name} must be {_dtypes(allowed)}, got {_dtypes((value.dtype,))}")
    if value.dim() != len(dims):
        wanted = f"[{', '.join(dims)}]"
        raise ValueError(
            f"{name} must have {len(dims)} dimensions {wanted}, got shape {tuple(value.shape)}"
        )
    if shape is not None:
        for expected, size in zip(shape, value.shape):
            if expected is not None and expected != size:
                sizes = (dim if fixed is None else str(fixed) for dim, fixed in zip(dims, shape))
                wanted = f"[{', '.join(sizes)}]"
                raise ValueError(f"{name} must have shape {wanted}, got {tuple(value.shape)}")
    count = value.numel()  # symbolic under torch.compile; then the real call looks
    if isinstance(count, int) and count > MOST_SIZE and max(value.shape) > MOST_SIZE:
        raise ValueError(f"{name} must have sizes up to {MOST_SIZE}, got {tuple(value.shape)}")
    if contiguous and not value.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous, got strides {tuple(value.stride())} for shape "
            f"{tuple(value.shape)}"
        )
    if unit_inner_stride and value.stride(-1) != 1 and value.shape[-1] > 1:
        raise ValueError(f"{name} must have stride 1 in its last dimension, got {value.stride(-1)}")


def countable(name: str, value: torch.Tensor) -> None:
    """All elements of `value` together can be counted in 32 bits, for kernels that see it flat."""
    count = value.numel()
    if isinstance(count, int) and count > MOST_SIZE:
        raise ValueError(f"{name} must have at most {MOST_SIZE} elements, got {count}")


def buffer(
    name: str,
    given: object,
    shape: Sequence[int],
    dtype: torch.dtype,
    strides: Sequence[int] | None = None,
) -> None:
    """`given` can hold a result. Strides default to contiguous; those of sizes of 1 are free."""
    if not isinstance(given, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(given).__name__}")
    if given.dtype is not dtype:
        raise TypeError(f"{name} must be {_dtypes((dtype,))}, got {_dtypes((given.dtype,))}")
    if tuple(given.shape) != tuple(shape):
        raise ValueError(f"{name} must have shape {list(shape)}, got {list(given.shape)}")
    if strides is None:
        if not given.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {tuple(given.stride())}")
    elif given.numel() and any(
        size > 1 and mine != wanted for size, mine, wanted in zip(shape, given.stride(), strides)
    ):
        raise ValueError(f"{name} must have strides {tuple(strides)}, got {given.stride()}")


Named = Sequence[tuple[str, torch.Tensor]]


def apart(written: Named, read: Named = ()) -> None:
    """Tensors that are written share memory with no other, written or read, and none in themselves.

    What counts is the memory from a tensor's first element to its last."""
    spans = []
    for is_written, tensors in ((True, written), (False, read)):
        for name, tensor in tensors:
            start, count = tensor.storage_offset(), tensor.numel()
            if not (isinstance(start, int) and isinstance(count, int)):
                return  # symbolic under torch.compile; then the real call checks
            repeated = any(n > 1 and not s for n, s in zip(tensor.shape, tensor.stride()))
            if is_written and repeated and count:
                raise ValueError(
                    f"{name} must not have elements that share memory, got strides "
                    f"{tensor.stride()} for shape {tuple(tensor.shape)}"
                )
            if count:
                size, storage = tensor.element_size(), tensor.untyped_storage()._cdata
                reach_of = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride()))
                end = start + reach_of + 1
                spans.append((storage, start * size, end * size, is_written, name))
    spans.sort()
    storage, reach, last = None, {True: 0, False: 0}, {True: "", False: ""}
    for there, start, end, is_written, name in spans:
        if there != storage:
            storage, reach = there, {True: 0, False: 0}
        for other_written in (True, False):
            if (is_written or other_written) and start < reach[other_written]:
                one, other = name, last[other_written]
                if not is_written:
                    one, other = other, one
                raise ValueError(f"{one} must not share memory with {other}")
        if end > reach[is_written]:
            reach[is_written], last[is_written] = end, name


def writable(name: str, value: object) -> None:
    """`value` may be written; an inference tensor may be in inference mode only."""
    if not isinstance(value, torch.Tensor) or is_dynamo_compiling():
        return  # the checks of its type report it; Dynamo cannot ask a tensor
    if value.is_inference() and not torch.is_inference_mode_enabled():
        raise ValueError(
            f"{name} must not be an inference tensor outside of torch.inference_mode(), where it "
            "cannot be written; pass a clone"
        )


def plain(value: Any) -> Any:
    """The Python number for a NumPy scalar, also inside of a tuple or a list; else `value`.

    Operators call this before anything else sees an argument. For `torch.compile` a NumPy scalar
    that comes from outside of the graph is an array of unknown value, so that the graph breaks.
    """
    kind = type(value)
    if kind is tuple or kind is list:
        return kind([plain(each) for each in value])
    if kind.__module__ == "numpy" and value.ndim == 0:
        if is_dynamo_compiling() and kind.__name__ == "ndarray":
            torch._dynamo.graph_break(msg=_NUMPY_IN_GRAPH)
        return value.item()
    return value


def integer(name: str, value: Any, low: int, high: int | None = None, *, because: str = "") -> int:
    """`value`, an int in `low..high`; `because` explains the bound, e.g. `(the experts)`.

    Without `high` the bound is what 64 bits can hold.
    """
    value = plain(value)
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    bound = _INT64_MAX if high is None else high
    if value < low or value > bound:
        bounds = f"at least {low}" if high is None and value < low else f"in {low}..{bound}"
        raise ValueError(f"{name} must be {bounds}{because and ' ' + because}, got {shown(value)}")
    return value  # type: ignore[return-value]  # a SymInt under torch.compile


def number(name: str, value: Any) -> float:
    """`value`, an int or a float."""
    value = plain(value)
    if isinstance(value, bool) or not isinstance(value, (int, float, torch.SymInt, torch.SymFloat)):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    if isinstance(value, int) and not -_FLOAT_MAX <= value <= _FLOAT_MAX:
        raise ValueError(f"{name} must be a number that a float can hold, got {shown(value)}")
    return value  # type: ignore[return-value]


def finite(name: str, value: Any) -> float:
    """`value`, a number that is neither infinite nor NaN."""
    value = number(name, value)
    if not -math.inf < value < math.inf:
        raise ValueError(f"{name} must be finite, got {shown(value)}")
    return value


def epsilon(name: str, value: Any) -> float:
    """`value`, a number that keeps a divisor from 0: finite and not negative."""
    value = number(name, value)
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} must be finite and at least 0, got {shown(value)}")
    return value


def boolean(name: str, value: Any) -> bool:
    """`value`, a bool."""
    value = plain(value)
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be a bool, got {type(value).__name__}")
    return value


def one_of(name: str, value: Any, allowed: Sequence[Any]) -> None:
    """`value` is one of a few."""
    value = plain(value)
    is_array = (
        isinstance(value, torch.Tensor) or type(value).__module__ == "numpy"
    )  # no truth value
    if is_array or value not in allowed:
        listed = ", ".join(str(item) for item in allowed)
        raise ValueError(f"{name} must be one of {listed}, got {shown(value)}")


def shown(value: Any) -> str:
    """`value` for a message; what has many digits by its size."""
    if type(value) is int and abs(value) >= 10**40:
        return f"an int of {value.bit_length()} bits"
    if isinstance(value, (tuple, list)) and len(value) < 4:
        return f"({', '.join(map(shown, value))})"
    if isinstance(value, (bool, int, float, str, type(None), torch.dtype, torch.SymInt)):
        return repr(value)
    return f"a value of type {type(value).__name__}"


# ---- of modules ---------------------------------------------------------------------------------


@contextlib.contextmanager
def named(owner: str) -> Iterator[None]:
    """Errors of the checks inside start with `owner`, the name of a module or function."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise type(error)(f"{owner}: {error}") from None


def named_errors(function: F, name: str = "", module: str = "") -> F:
    """`function`, whose errors start with its own name instead of that of a function behind it.

    Args:
        function: What may raise, with such a name in front of the message or with none.
        name: Another name for the function; empty: its own.
        module: The module that has this other name.
    """
    owner = name or function.__name__
    function = inspect.unwrap(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except (TypeError, ValueError) as error:
            if error.__traceback__ is None or error.__traceback__.tb_next is None:
                raise  # arguments that the signature does not have
            raise type(error)(f"{owner}: {_OWNER.sub('', str(error))}") from None

    call.__name__ = call.__qualname__ = owner
    if module not in ("", function.__module__):
        call.__module__ = module  # where pickle looks for it
        call.__doc__ = (function.__doc__ or "").replace(f"{function.__name__}(", f"{owner}(")
    # Dynamo counts recompilations by code object, of which all wrappers would share one.
    wrapper = cast(FunctionType, call)
    wrapper.__code__ = wrapper.__code__.replace(co_name=owner)
    return cast(F, wrapper)


def device(name: str, value: Any) -> None:
    """`value` is what PyTorch takes for a device, or None."""
    if value is None or isinstance(value, torch.device):
        return
    if not isinstance(value, (str, int)) or isinstance(value, bool):
        raise TypeError(f"{name} must be a torch.device, a str or None, got {shown(value)}")
    try:
        torch.device(value)
    except (RuntimeError, OverflowError, TypeError, ValueError):
        raise ValueError(f"{name} must be a device, such as 'cuda', got {shown(value)}") from None


def parameter_dtype(
    name: str, value: Any, allowed: Sequence[torch.dtype] = PARAMETER_DTYPES
) -> None:
    """`value` is a dtype for parameters, or None."""
    if value is None:
        return
    if not isinstance(value, torch.dtype):
        raise TypeError(f"{name} must be a torch.dtype or None, got {shown(value)}")
    if value not in allowed:
        raise ValueError(f"{name} must be {_dtypes(tuple(allowed))}, got {_dtypes((value,))}")


def tensor_for(name: str, value: Any, weight: torch.Tensor) -> None:
    """`value` is a tensor that can be multiplied by `weight`: on its device, of its dtype.

    Under `torch.autocast`, which converts both, any floating-point dtype will do.
    """
    tensor_on(name, value, weight.device)
    if value.dtype == weight.dtype:
        return
    kind = value.device.type
    autocast = kind in _AUTOCAST_DEVICES and torch.is_autocast_enabled(kind)
    if not (autocast and value.is_floating_point()):
        raise TypeError(
            f"{name} must be {_dtypes((weight.dtype,))} like the weights, or be given under "
            f"torch.autocast, got {_dtypes((value.dtype,))}"
        )


def tensor_on(
    name: str,
    value: Any,
    device: torch.device | None,
    dtypes: tuple[torch.dtype, ...] | None = None,
) -> None:
    """`value` is a tensor on `device`, of one of the `dtypes`; None: any."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    if dtypes is not None and value.dtype not in dtypes:
        raise TypeError(f"{name} must be {_dtypes(dtypes)}, got {_dtypes((value.dtype,))}")
    if device is not None and value.device != device:
        raise ValueError(f"{name} must be on {device} like the weights, got {value.device}")


def in_range(name: str, value: torch.Tensor | None, low: int, high: int) -> None:
    """Every element is in `low..high`. This waits for the GPU: for the checked mode only."""
    if value is None:
        return
    bad = (value < low) | (value > high)
    if bad.any():
        where = bad.nonzero()[0].tolist()
        found = value[tuple(where)].item()
        raise ValueError(f"{name} must hold {low}..{high}, but element {where} is {found}")


def distinct(name: str, value: torch.Tensor) -> None:
    """No element that is not negative comes twice. For the checked mode only."""
    named, counts = value[value >= 0].unique(return_counts=True)
    if (counts > 1).any():
        found = named[counts > 1][0].item()
        raise ValueError(
            f"{name} must contain each position at most once, but {found} occurs more than once"
        )


def _dtypes(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
