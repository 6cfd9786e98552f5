"""The products of all experts as one operator: values, gradients, `torch.compile`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tile_kernels.modeling.grouped_product import grouped_product
from tile_kernels.modeling.moe import MoELayer

ENDS = [3, 3, 7, 8]  # the second group is empty; rows behind the last end belong to no group
ROWS, K, N = 10, 4, 6


def operands(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    a, c = torch.randn(ROWS, K, dtype=dtype), torch.randn(ROWS, N, dtype=dtype)
    return a, torch.randn(len(ENDS), K, N, dtype=dtype), c, torch.tensor(ENDS, dtype=torch.int32)


def ranges() -> list[slice]:
    return [slice(start, end) for start, end in zip([0, *ENDS], ENDS)]


def test_values() -> None:
    a, b, c, ends = operands()
    found, sums = grouped_product(a, b, ends), grouped_product(a.t(), c, ends)
    for group, rows in enumerate(ranges()):
        torch.testing.assert_close(found[rows], a[rows] @ b[group])
        torch.testing.assert_close(sums[group], a[rows].t() @ c[rows])
    assert sums[1].eq(0).all()


def test_bfloat16_is_rounded_once() -> None:
    a, b, _, ends = operands(torch.bfloat16)
    exact = grouped_product(a.float(), b.float(), ends)
    torch.testing.assert_close(grouped_product(a, b, ends), exact.bfloat16(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("kind", ["rows", "sums"])
def test_operator(kind: str) -> None:
    """Registration, shapes and gradients, as `torch.library.opcheck` tests them."""
    a, b, c, ends = operands()
    inputs = (a, b, ends) if kind == "rows" else (a.t(), c, ends)
    given = tuple(x.requires_grad_() if x.is_floating_point() else x for x in inputs)
    op = torch.ops.tile_kernels.grouped_product
    torch.library.opcheck(op.default, given)

    def used(*tensors: Tensor) -> Tensor:
        result: Tensor = op(*tensors, ends)
        return result[: ENDS[-1]] if kind == "rows" else result

    assert torch.autograd.gradcheck(used, [x.detach().clone().requires_grad_() for x in given[:2]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_layer_has_no_sizes_that_depend_on_data(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = MoELayer(32, 32, 4, 2, dtype=dtype)
    x = torch.randn(12, 32, dtype=dtype, requires_grad=True)
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    y = torch.compile(layer, fullgraph=True, backend=backend)(x)
    assert len(graphs) == 1
    torch.testing.assert_close(y, layer(x), rtol=2e-2, atol=2e-2)
    values = [node.meta.get("example_value") for node in graphs[0].graph.nodes]
    shapes = [value.shape for value in values if isinstance(value, Tensor)]
    assert shapes
    assert all(isinstance(size, int) for shape in shapes for size in shape)
