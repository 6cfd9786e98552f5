"""`mhc_multilayer_recompute`: the inputs of several layers and their residuals again."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tile_kernels.mhc import shapes
from tile_kernels.mhc.recompute import reference
from tile_kernels.mhc.recompute.plan import LAYERS, plan_recompute
from tile_kernels.runtime import checks
from tile_kernels.runtime.cases import Cost, tensors_in
from tile_kernels.runtime.declaration import Launch, Out, Spec, alignment
from tile_kernels.runtime.launch import Kernel
from tile_kernels.runtime.operator import Operator

_RECOMPUTE = Kernel("tile_kernels.mhc.recompute.kernel", "recompute", plan_recompute)


class Arguments(NamedTuple):
    initial_residual: Tensor
    pre_mix_list: list[Tensor]
    layer_output_list: list[Tensor]
    post_mix_list: list[Tensor]
    comb_mix_list: list[Tensor]
    layer_input_list: list[Tensor]
    residual_list: list[Tensor]

    def check(self) -> None:
        tokens, m, h = shapes.streams("initial_residual", self.initial_residual)
        fp32, bf16 = torch.float32, torch.bfloat16
        described: tuple[tuple[str, Any, torch.dtype, tuple[int, ...]], ...] = (
            ("pre_mix_list", shapes.STREAMS, fp32, (m, 1)),
            ("layer_output_list", ("hidden",), bf16, (h,)),
            ("post_mix_list", shapes.STREAMS, fp32, (m, 1)),
            ("comb_mix_list", shapes.STREAMS, fp32, (m, m)),
            ("layer_input_list", ("hidden",), bf16, (h,)),
            ("residual_list", shapes.STREAMS, bf16, (m, h)),
        )
        device = self.initial_residual.device
        for name, last, dtype, sizes in described:
            tensors = getattr(self, name)
            if not isinstance(tensors, (list, tuple)):
                raise TypeError(f"{name} must be a list of tensors, got {type(tensors).__name__}")
            for each, tensor in _named(self, name):
                shapes.tensor(each, tensor, last, dtype, like=tokens, sizes=sizes)
                if tensor.device != device:
                    raise ValueError(f"{each} must be on {device}, got {tensor.device}")
        reads, writes = len(self.pre_mix_list), len(self.layer_output_list)
        if reads < 1:
            raise ValueError("pre_mix_list must have at least one layer, got 0")
        if writes not in (reads - 1, reads):
            raise ValueError(
                f"layer_output_list must have {reads - 1} or {reads} layers, got {writes}"
            )
        for name, count in (
            ("post_mix_list", writes),
            ("comb_mix_list", writes),
            ("layer_input_list", reads),
            ("residual_list", writes),
        ):
            if len(getattr(self, name)) != count:
                raise ValueError(f"{name} must have {count} layers, got {len(getattr(self, name))}")
        read = _named(self, "pre_mix_list", "layer_output_list", "post_mix_list", "comb_mix_list")
        checks.apart(
            _named(self, "layer_input_list", "residual_list"),
            [*read, ("initial_residual", self.initial_residual)],
        )

    def outputs(self) -> None:
        return None

    def launches(self, *stand_in: Spec) -> list[Launch]:
        m, h = self.initial_residual.shape[-2:]
        residual = shapes.rows(self.initial_residual, m, h)
        if residual.numel() == 0:
            return []
        lists = (
            _rows(self.pre_mix_list, m, 1), _rows(self.layer_output_list, h),
            _rows(self.post_mix_list, m, 1), _rows(self.comb_mix_list, m, m),
            _rows(self.layer_input_list, h), _rows(self.residual_list, m, h),
        )  # fmt: skip
        pre, layer_outputs, post, comb, layer_inputs, residuals = lists
        problem = (
            m, h, residual.shape[0], alignment(residual, *layer_outputs, *layer_inputs, *residuals),
            alignment(*pre, *post, *comb),
        )  # fmt: skip
        # Tensors of layers that are not there are never read or written.
        spare = (
            pre[0],
            layer_inputs[0],
            pre[0],
            *(comb[:1] or stand_in),
            layer_inputs[0],
            residual,
        )
        found = []
        for first in range(0, len(pre), LAYERS):
            layers = [tensors[first : first + LAYERS] for tensors in lists]
            filled = (
                [*tensors, *[other] * (LAYERS - len(tensors))]
                for tensors, other in zip(layers, spare)
            )
            counts = len(layers[0]), len(layers[1])
            found.append(
                Launch(_RECOMPUTE, problem, (residual, *counts, *itertools.chain(*filled)))
            )
            if layers[5]:
                residual = layers[5][-1]
        return found

    def scratch(self) -> tuple[Out, ...]:
        """A stand-in for `comb` where no layer has one: kernels take all tensors."""
        *leading, m, _ = self.initial_residual.shape
        shape = (math.prod(leading), m, m)
        return () if self.comb_mix_list else (Out("comb", shape, torch.float32),)


def _named(a: Arguments, *lists: str) -> list[tuple[str, Tensor]]:
    return [(f"{name}[{i}]", x) for name in lists for i, x in enumerate(getattr(a, name))]


def _rows(tensors: Sequence[Any], *last: int) -> list[Spec]:
    return [shapes.rows(tensor, *last) for tensor in tensors]


def cost(initial_residual: Tensor, **others: Any) -> Cost:
    tensors = tensors_in((initial_residual, others))
    return Cost(sum(x.numel() * x.element_size() for x in tensors))


MHC_MULTILAYER_RECOMPUTE = Operator(
    "mhc.mhc_multilayer_recompute",
    Arguments,
    reference=reference.mhc_multilayer_recompute,
    cost=cost,
    mutates=("layer_input_list", "residual_list"),
    differentiable=False,
)


def _as_list(tensors: Any) -> Any:
    return list(tensors) if isinstance(tensors, tuple) else tensors


@MHC_MULTILAYER_RECOMPUTE.public()
def mhc_multilayer_recompute(
    initial_residual: Tensor,
    pre_mix_list: list[Tensor],
    layer_output_list: list[Tensor],
    post_mix_list: list[Tensor],
    comb_mix_list: list[Tensor],
    layer_input_list: list[Tensor],
    residual_list: list[Tensor],
) -> None:
    """Computes the inputs of layers and the residuals between them again, from mixes and outputs.

    With `R` the initial residual, for each layer `layer_input = mhc_pre_apply_mix(R, pre)`, and for
    the first `B` of them `R = mhc_post(layer_output, R, post, comb)`, which is stored; the next
    layer continues with the rounded value. The results have the bits of those operators. Ten layers
    take one launch, in which the residual stays in registers. The host does nothing else, so calls
    can be recorded in CUDA graphs.

    All tensors are contiguous and have the same tokens; those that are written share no memory with
    any other. There are `A` layers, of which `B = A` or `B = A - 1` write a residual.

    Args:
        initial_residual: `[..., m, h]`, bfloat16, `m` from 1 to 8.
        pre_mix_list: `A` tensors `[..., m, 1]`, float32.
        layer_output_list: `B` tensors `[..., h]`, bfloat16.
        post_mix_list: `B` tensors `[..., m, 1]`, float32.
        comb_mix_list: `B` tensors `[..., m, m]`, float32.
        layer_input_list: `A` tensors `[..., h]`, bfloat16, which are written.
        residual_list: `B` tensors `[..., m, h]`, bfloat16, which are written.

    Raises:
        TypeError: If a dtype or a type differs.
        ValueError: If a shape, a layout or the number of layers differs, or memory is shared.

    Example:
        >>> streams = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).bfloat16()
        >>> layer_input = torch.empty(2).bfloat16()
        >>> mix = torch.tensor([[0.25], [0.5]])
        >>> mhc_multilayer_recompute(streams, [mix], [], [], [], [layer_input], [])
        >>> layer_input.tolist()
        [1.75, 2.5]
    """
    read = pre_mix_list, layer_output_list, post_mix_list, comb_mix_list
    written = layer_input_list, residual_list
    return MHC_MULTILAYER_RECOMPUTE(initial_residual, *map(_as_list, (*read, *written)))
