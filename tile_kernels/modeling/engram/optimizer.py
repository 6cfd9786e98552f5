"""An optimizer of embedding tables: momentum with rows and columns scaled to a norm in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from tile_kernels import engram
from tile_kernels.runtime import checks


class SinkhornMomentum(torch.optim.Optimizer):
    """Updates matrices by their momentum, whose rows and columns are normalized alternately.

    A step is, for each parameter `[rows, columns]`,

    1. `M`, the momentum of the gradient (`engram_sinkhorn_momentum_update`);
    2. `num_steps` times: rows of `x = (r M) c` to norm 1 by `r` (`engram_sinkhorn_step`), then
       columns to the norm of a column of equal entries by `c`;
    3. `p -= lr * u`, with `u` the rows of `x` at norm `sqrt(columns)` (`engram_sinkhorn_finalize`).

    Rows that have had no gradient do not change: they are zeros in `M` and in `u`. With a sparse
    gradient, only its rows take part, and only their momentum changes. If the rows of a table are
    distributed over ranks, the squares of columns are summed over `process_group`; all ranks must
    then take the same steps.

    Args:
        params: Parameters of two dimensions, or groups of them.
        lr: The size of the step, at least 0.
        beta1: The share of the old momentum, in 0 to 1.
        nesterov: Whether the momentum is taken a step ahead.
        num_steps: How often rows and columns are scaled, at least 1.
        eps: Added to norms; finite and not negative.
        momentum_dtype: bfloat16 or float32; by default that of the parameter.
        process_group: Ranks that share tables by rows, or None.

    Raises:
        TypeError: If an argument has another type.
        ValueError: If a number is out of range, or a parameter is no matrix.

    Example:
        >>> table = nn.Parameter(torch.zeros(4, 8))
        >>> optimizer = SinkhornMomentum([table], lr=0.1)
        >>> table.grad = torch.zeros(4, 8).index_fill(0, torch.tensor([1, 2]), 3.0)
        >>> optimizer.step()
        >>> table[:, 0].tolist()
        [0.0, -0.10000000149011612, -0.10000000149011612, 0.0]
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        beta1: float = 0.95,
        nesterov: bool = True,
        num_steps: int = 3,
        eps: float = 1e-20,
        momentum_dtype: torch.dtype | None = None,
        process_group: Any = None,
    ) -> None:
        with checks.named("SinkhornMomentum"):
            if not checks.finite("lr", lr) >= 0:
                raise ValueError(f"lr must be at least 0, got {lr}")
            if not 0 <= checks.number("beta1", beta1) <= 1:
                raise ValueError(f"beta1 must be in 0..1, got {beta1}")
            checks.boolean("nesterov", nesterov)
            checks.integer("num_steps", num_steps, 1)
            checks.epsilon("eps", eps)
            checks.parameter_dtype(
                "momentum_dtype", momentum_dtype, (torch.float32, torch.bfloat16)
            )
        settings = {
            "lr": lr, "beta1": beta1, "nesterov": nesterov, "num_steps": num_steps, "eps": eps,
            "momentum_dtype": momentum_dtype,
        }  # fmt: skip
        super().__init__(params, settings)
        for parameter in (p for group in self.param_groups for p in group["params"]):
            if parameter.dim() != 2:
                raise ValueError(
                    f"SinkhornMomentum: params must be matrices, got shape {tuple(parameter.shape)}"
                )
        self.process_group = process_group

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates all parameters that have a gradient, once.

        Args:
            closure: A function that computes the loss and gradients first, or None.

        Returns:
            The result of `closure`.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, parameter: nn.Parameter, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if "momentum" not in state:
            dtype = group["momentum_dtype"] or parameter.dtype
            state["momentum"] = torch.zeros_like(parameter, dtype=dtype)
        momentum: Tensor = state["momentum"]
        if not grad.is_sparse:
            update = self._scaled(grad.contiguous(), momentum, group)
            parameter.add_(update.to(parameter.dtype), alpha=-group["lr"])
            return
        grad = grad.coalesce()
        rows = grad.indices()[0]
        touched = momentum.index_select(0, rows)
        update = self._scaled(grad.values().contiguous(), touched, group)
        momentum.index_copy_(0, rows, touched)
        parameter.index_add_(0, rows, update.to(parameter.dtype), alpha=-group["lr"])

    def _scaled(self, grad: Tensor, momentum: Tensor, group: dict[str, Any]) -> Tensor:
        matrix = engram.engram_sinkhorn_momentum_update(
            grad, momentum, group["beta1"], group["nesterov"]
        )
        rows, columns = matrix.shape
        row_scale, col_scale = matrix.new_ones(rows), matrix.new_ones(columns)
        squares = matrix.new_empty(columns)
        for _ in range(group["num_steps"]):
            _, partial = engram.engram_sinkhorn_step(matrix, row_scale, col_scale, group["eps"])
            engram.engram_sinkhorn_step_reduce(partial, squares)
            if self.process_group is not None:
                torch.distributed.all_reduce(squares, group=self.process_group)
            # Columns to the norm that equal ones have; a column of zeros keeps its scale. Squares
            # may be subnormal, and the quotient of two of them infinite.
            wanted = squares.mean().sqrt()
            col_scale *= torch.where(squares == 0, 1.0, wanted / squares.sqrt())
        return engram.engram_sinkhorn_finalize(
            matrix, row_scale, col_scale, group["eps"], columns**0.5, out=matrix
        )
