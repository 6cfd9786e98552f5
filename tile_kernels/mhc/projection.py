"""The projection of a token's streams to its mixes, and the gradients of it."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from tile_kernels import config
from tile_kernels.mhc import shapes
from tile_kernels.mhc.cases.projection import MHC_NORM_FN_BWD, MHC_NORM_FN_FWD
from tile_kernels.runtime import checks
from tile_kernels.runtime.cases import Cost
from tile_kernels.runtime.launch import Kernel, alignment, nonempty
from tile_kernels.runtime.op import face, gradient, op
from tile_kernels.torch import mhc_projection as oracles

MOST_MIXES = 128
VECTOR = 8  # bfloat16 of 16 bytes
DEPTH, MOST_ROWS, FEW_ROWS = 128, 192, 64  # of a step and a tile; the weights are read per tile
GRADIENT_ROWS = 64  # of a tile in the backward pass
LEAST_STEPS = 2  # of a block, so that copies run ahead
MOST_WAVES = 3  # blocks of a multiprocessor, one after the other

_MODULE = "tile_kernels.mhc.kernels.projection"
_PRODUCTS = Kernel(_MODULE, "products")
_MIXES = Kernel(_MODULE, "mixes_of_products")
_MIX_GRADIENTS = Kernel(_MODULE, "mix_gradients")
_GRADIENTS = Kernel(_MODULE, "product_gradients")


def padded(mixes: int) -> int:
    """Rows of the weights for the matrix units: a multiple of 16, the others zero."""
    return -(-mixes // 16) * 16


def _num_sms(device: torch.device) -> int:
    """Of the device itself: what is summed in which order must not depend on the SM budget."""
    return config.get_device_num_sms(device if device.type == "cuda" else None)


def gradient_columns(padded: int) -> int:
    """Columns of a block in the backward pass: fewer, the more mixes it has to hold."""
    return 128 if padded <= 48 else 64


def count_splits(rows: int, size: int, device: torch.device) -> int:
    """Blocks that share the columns of a tile of rows, enough to fill the device.

    One, for sizes that are not known yet: nobody sees the difference in shapes.
    """
    if isinstance(rows, torch.SymInt) or isinstance(size, torch.SymInt):
        return 1
    tiles = max(1, -(-rows // (MOST_ROWS if rows > MOST_ROWS else FEW_ROWS)))
    return _fewest_splits(tiles, -(-size // DEPTH), _num_sms(device))


@functools.cache
def _fewest_splits(tiles: int, steps: int, num_sms: int) -> int:
    """How many blocks share `steps` steps, so that one multiprocessor has as few as possible."""
    most = max(1, min(MOST_WAVES * num_sms // tiles, steps // LEAST_STEPS))
    return min(range(1, most + 1), key=lambda n: (-(-tiles * n // num_sms) * -(-steps // n), n))


def count_shares(rows: int, size: int, columns: int, device: torch.device) -> tuple[int, int]:
    """Blocks that share the rows of `columns` in the backward pass, and tiles of each."""
    if isinstance(rows, torch.SymInt):
        return 1, 1
    tiles = -(-rows // GRADIENT_ROWS)
    chunks = -(-size // columns)
    shares = max(1, min(2 * _num_sms(device) // chunks, tiles))
    return shares, -(-tiles // shares)


def rows_of(residual: Tensor) -> Tensor:
    """`[tokens, m * h]`, at a multiple of 16 bytes."""
    rows = residual.reshape(-1, residual.shape[-2] * residual.shape[-1])
    return rows if alignment(rows) == 16 else rows.clone()


def weights_of(fn: Tensor) -> Tensor:
    """The weights, at a multiple of 16 bytes."""
    return fn if alignment(fn) == 16 else fn.clone()


# ---- checks -------------------------------------------------------------------------------------


def _check_fwd(residual: Tensor, fn: Tensor, eps: float) -> None:
    check_inputs(residual, fn, eps)


def check_inputs(residual: Tensor, fn: Tensor, eps: float, name: str = "eps") -> shapes.Leading:
    """Streams, weights and `eps`, which has this `name`; returns what other arguments share."""
    tokens, streams, hidden = shapes.streams("residual", residual)
    if hidden % VECTOR:
        raise ValueError(f"residual must have a multiple of {VECTOR} columns, got {hidden}")
    checks.tensor(
        "fn", fn, ("J", "m * h"), torch.float32, shape=(None, streams * hidden), contiguous=True
    )
    if not 1 <= fn.shape[0] <= MOST_MIXES:
        raise ValueError(f"fn must have 1..{MOST_MIXES} rows, got {fn.shape[0]}")
    checks.epsilon(name, eps)
    return tokens


def _check_bwd(
    grad_mixes: Tensor,
    residual: Tensor,
    fn: Tensor,
    mul: Tensor,
    s: Tensor,
    eps: float,
    grad_residual: Tensor | None = None,
) -> None:
    tokens = check_inputs(residual, fn, eps)
    fp32, mixes = torch.float32, (fn.shape[0],)
    shapes.tensor(
        "grad_mixes", grad_mixes, ("J",), fp32, like=tokens, sizes=mixes, contiguous=False
    )
    shapes.tensor("mul", mul, ("J",), fp32, like=tokens, sizes=mixes)
    shapes.tensor("s", s, (), fp32, like=tokens, sizes=())
    if grad_residual is not None:
        sizes = tuple(residual.shape[-2:])
        bf16 = torch.bfloat16
        shapes.tensor(
            "grad_residual", grad_residual, shapes.STREAMS, bf16, like=tokens, sizes=sizes
        )
        checks.apart([("grad_residual", grad_residual)], [("residual", residual)])


# ---- forward ------------------------------------------------------------------------------------


def project(residual: Tensor, fn: Tensor) -> tuple[Tensor, Tensor]:
    """Launch the products: `mul` and `s` by share of the columns, for kernels that add them up."""
    rows = rows_of(residual)
    num_rows, size = rows.shape
    splits = count_splits(num_rows, size, rows.device)
    width = padded(fn.shape[0])
    mul = fn.new_empty((splits, num_rows, width))
    squares = fn.new_empty((splits, num_rows))
    problem = (fn.shape[0], width, size, num_rows, splits)
    _PRODUCTS.launch(problem, rows, weights_of(fn), mul, squares)
    return mul, squares


def _cost_fwd(residual: Tensor, fn: Tensor, eps: float) -> Cost:  # noqa: ARG001
    rows, mixes = residual.numel() // fn.shape[1], fn.shape[0]
    return Cost(
        2 * residual.numel() + 4 * fn.numel() + 8 * rows * mixes + 4 * rows,
        2 * residual.numel() * (mixes + 1),
    )


@op(check=_check_fwd, oracle=oracles.mhc_norm_fn_fwd, cost=_cost_fwd, cases=MHC_NORM_FN_FWD)
def mhc_norm_fn_fwd(residual: Tensor, fn: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """The mixes of each token: its streams, projected and divided by their root mean square.

    | argument | shape | dtype |
    |---|---|---|
    | `residual` | `[..., m, h]`, contiguous; `m` in `1..8`, `h` a multiple of 8 | bfloat16 |
    | `fn` | `[J, m * h]`, contiguous; `J` in `1..128` | float32 |
    | `eps` | | float |
    | returns `mixes`, `mul` | `[..., J]` | float32 |
    | returns `s` | `[...]` | float32 |

    With `X` the streams of a token as one row of `K = m * h` numbers and `f` the weights rounded to
    TF32 (to nearest, ties away from zero),

        mul = X . f^T        s = sum of X^2        mixes = mul / sqrt(s / K + eps)

    summed in float32 in an order that depends on sizes and device alone. `mul` and `s` are what the
    gradient needs. A token with NaN or an infinity has mixes that are NaN. Differentiable with
    respect to `residual` and `fn`, through `mixes`.

    Raises `TypeError` or `ValueError` with the argument's name.

    >>> residual = torch.ones(1, 2, 8).bfloat16()
    >>> mixes, mul, s = mhc_norm_fn_fwd(residual, torch.full((3, 16), 0.25), 0.0)
    >>> mixes.tolist(), s.tolist()
    ([[4.0, 4.0, 4.0]], [16.0])
    """
    lead, mixes = residual.shape[:-2], fn.shape[0]
    out, products = (fn.new_empty((*lead, mixes)) for _ in range(2))
    norms = fn.new_empty(lead)
    if nonempty(residual):
        mul, squares = project(residual, fn)
        splits, num_rows, width = mul.shape
        _MIXES.launch(
            (mixes, width, fn.shape[1], splits),
            mul, squares, out.view(num_rows, mixes), products.view(num_rows, mixes),
            norms.view(num_rows), float(eps),
        )  # fmt: skip
    return out, products, norms


# ---- backward -----------------------------------------------------------------------------------


def _launch_bwd(
    grad_mixes: Tensor,
    residual: Tensor,
    fn: Tensor,
    mul: Tensor,
    s: Tensor,
    eps: float,
    grad_residual: Tensor,
    accumulate: bool,
) -> Tensor:
    if not nonempty(residual):
        return torch.zeros_like(fn)
    rows = rows_of(residual)
    num_rows, size = rows.shape
    mixes, width = fn.shape[0], padded(fn.shape[0])
    shares, tiles = count_shares(num_rows, size, gradient_columns(width), rows.device)
    parts = residual.new_empty((2, num_rows, width))
    of_squares = fn.new_empty((num_rows,))
    _MIX_GRADIENTS.launch(
        (mixes, width, size),
        grad_mixes.contiguous().view(num_rows, mixes), mul.view(num_rows, mixes),
        s.view(num_rows), parts, of_squares, float(eps),
    )  # fmt: skip
    grad_fn = fn.new_empty((shares, mixes, size))
    grad_rows = grad_residual.view(num_rows, size)
    placed = grad_rows if alignment(grad_rows) == 16 else grad_rows.clone()
    _GRADIENTS.launch(
        (mixes, width, size, shares, accumulate),
        rows, weights_of(fn)[None], parts, of_squares, placed, grad_fn, tiles,
    )  # fmt: skip
    if placed is not grad_rows:
        grad_rows.copy_(placed)
    return grad_fn[0] if shares == 1 else grad_fn.sum(0)


@op(
    check=_check_bwd,
    oracle=oracles.mhc_norm_fn_bwd,
    cost=lambda residual, fn, mul, grad_residual=None, **_: Cost(
        (4 if grad_residual is None else 6) * residual.numel() + 8 * fn.numel() + 8 * mul.numel(),
        4 * residual.numel() * fn.shape[0],
    ),
    cases=MHC_NORM_FN_BWD,
    name="mhc_norm_fn_bwd",
)
def _bwd(
    grad_mixes: Tensor, residual: Tensor, fn: Tensor, mul: Tensor, s: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    grad_residual = torch.empty_like(residual)
    grad_fn = _launch_bwd(grad_mixes, residual, fn, mul, s, eps, grad_residual, False)
    return grad_residual, grad_fn


def _oracle_adding(*arguments: Any) -> Tensor:
    return oracles.mhc_norm_fn_bwd(*arguments)[1]


@op(
    check=_check_bwd,
    oracle=_oracle_adding,
    mutates=("grad_residual",),
    serves="mhc_norm_fn_bwd",
)
def _bwd_adding(
    grad_mixes: Tensor,
    residual: Tensor,
    fn: Tensor,
    mul: Tensor,
    s: Tensor,
    eps: float,
    grad_residual: Tensor,
) -> Tensor:
    return _launch_bwd(grad_mixes, residual, fn, mul, s, eps, grad_residual, True)


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.eps = inputs[2]
    ctx.save_for_backward(*inputs[:2], *output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _backward(ctx: Any, grad_mixes: Tensor, *_others: Any) -> tuple[Any, ...]:
    residual, fn, mul, s = ctx.saved_tensors
    return *_bwd(grad_mixes, residual, fn, mul, s, ctx.eps), None


gradient(mhc_norm_fn_fwd, _backward, setup_context=_save_inputs)


@face(_bwd, oracle=oracles.mhc_norm_fn_bwd, mutates=("grad_residual",))
def mhc_norm_fn_bwd(
    grad_mixes: Tensor,
    residual: Tensor,
    fn: Tensor,
    mul: Tensor,
    s: Tensor,
    eps: float,
    grad_residual: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The gradients of `mhc_norm_fn_fwd`; that of the streams may be added to another one.

    | argument | shape | dtype |
    |---|---|---|
    | `grad_mixes` | `[..., J]`, any strides | float32 |
    | `residual`, `fn`, `eps` | those of `mhc_norm_fn_fwd` | |
    | `mul`, `s` | its results, `[..., J]` and `[...]`, contiguous | float32 |
    | `grad_residual` | `[..., m, h]`, contiguous, written; or None | bfloat16 |
    | returns `grad_residual` | `[..., m, h]` | bfloat16 |
    | returns `grad_fn` | `[J, m * h]` | float32 |

    With `r = 1 / sqrt(s / K + eps)` and `gm = grad_mixes * r`, rounded to TF32,

        grad_residual = gm . f - X * (sum of grad_mixes * mul) * r / (s + eps * K)
        grad_fn       = gm^T . X

    in float32; a given `grad_residual` is read, added to and rounded once more. Deterministic.

    Raises `TypeError` or `ValueError` with the argument's name.

    >>> residual, fn = torch.ones(1, 2, 8).bfloat16(), torch.full((1, 16), 0.25)
    >>> mixes, mul, s = mhc_norm_fn_fwd(residual, fn, 0.0)
    >>> grad_residual, grad_fn = mhc_norm_fn_bwd(torch.ones(1, 1), residual, fn, mul, s, 0.0)
    >>> grad_residual.abs().max().item(), grad_fn[0, 0].item()
    (0.0, 1.0)
    """
    if grad_residual is None:
        return _bwd(grad_mixes, residual, fn, mul, s, eps)
    return grad_residual, _bwd_adding(grad_mixes, residual, fn, mul, s, eps, grad_residual)
