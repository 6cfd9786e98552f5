"""The table optimizer's loop: norms that it reaches, and rows that no token looked up."""

from __future__ import annotations

import concurrent.futures
import threading
from typing import Any

import pytest
import torch

import tile_kernels
from tests.requirements import GROUNDS
from tile_kernels import engram
from tile_kernels.modeling.engram import SinkhornMomentum


def update(matrix: torch.Tensor, steps: int) -> torch.Tensor:
    """Rows and columns scaled in turn, as a caller's loop has it."""
    rows, columns = matrix.shape
    row_scale, col_scale = matrix.new_ones(rows), matrix.new_ones(columns)
    sums = matrix.new_empty(columns)
    for _ in range(steps):
        _, partial = engram.engram_sinkhorn_step(matrix, row_scale, col_scale, 1e-20)
        engram.engram_sinkhorn_step_reduce(partial, sums)
        col_scale /= sums.sqrt() + 1e-20
    return engram.engram_sinkhorn_finalize(matrix, row_scale, col_scale, 1e-20, columns**0.5)


@pytest.mark.parametrize("ground", GROUNDS)
def test_rows_of_zeros_poison_nothing(ground: tuple[str, str]) -> None:
    """Untouched rows of a table stay 0; the others have the norm asked for, columns equal ones."""
    backend, device = ground
    torch.manual_seed(1)
    matrix = torch.randn(60, 32, device=device)
    matrix[::3] = 0
    with tile_kernels.backend(backend):
        found = update(matrix, steps=8)
    assert found.isfinite().all()
    assert not found[::3].any()
    touched = found[torch.arange(60) % 3 != 0]
    torch.testing.assert_close(touched.norm(dim=1), torch.full((40,), 32**0.5, device=device))
    norms = touched.norm(dim=0)
    assert norms.max() / norms.min() < 1.05


# ---- the optimizer ------------------------------------------------------------------------------


def test_a_table_learns_and_untouched_rows_stay() -> None:
    """Towards a target on some rows, with dense and with sparse gradients alike."""
    torch.manual_seed(3)
    target, start = torch.randn(12, 16), torch.randn(12, 16)
    touched = torch.tensor([1, 4, 7, 8])
    found = []
    for sparse in (False, True):
        table = torch.nn.Embedding(12, 16, sparse=sparse, _weight=start.clone())
        optimizer = SinkhornMomentum(table.parameters(), lr=0.02, num_steps=4)
        for _ in range(90):
            optimizer.zero_grad()
            (table(touched) - target[touched]).square().sum().backward()
            optimizer.step()
        weight = table.weight.detach()
        assert weight.isfinite().all()
        rest = torch.tensor([i for i in range(12) if i not in touched.tolist()])
        assert torch.equal(weight[rest], start[rest])
        before = (start - target)[touched].norm()
        assert (weight - target)[touched].norm() < 0.3 * before
        found.append(weight)
    torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("size", [1e-19, 1e-21, 1e-23, 1e-40, 0.0])
def test_a_column_of_tiny_gradients(size: float) -> None:
    """Their squares are subnormal or 0: the other columns are updated as ever."""
    torch.manual_seed(5)
    table = torch.nn.Parameter(torch.zeros(6, 8))
    optimizer = SinkhornMomentum([table], lr=1.0, beta1=0.0)
    table.grad = torch.randn(6, 8)
    table.grad[:, 3] *= size
    optimizer.step()
    assert table.isfinite().all()
    torch.testing.assert_close(table.detach().norm(dim=1), torch.full((6,), 8**0.5))


def test_ranks_that_share_a_table_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads with half of the rows each make the steps of one that has all of them."""
    torch.manual_seed(4)
    start, grad = torch.randn(6, 16), torch.randn(6, 16)
    together, sums = threading.Barrier(2, timeout=60), {}

    def all_reduce(x: torch.Tensor, group: Any) -> None:
        assert group == "both"
        sums[threading.get_ident()] = x.clone()
        together.wait()
        x.copy_(sum(sums.values()))
        together.wait()

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)

    def train(rows: slice, group: Any) -> torch.Tensor:
        table = torch.nn.Parameter(start[rows].clone())
        optimizer = SinkhornMomentum([table], lr=0.1, process_group=group)
        for _ in range(2):
            table.grad = grad[rows].clone()
            optimizer.step()
        return table.detach()

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        parts = pool.map(train, (slice(0, 2), slice(2, 6)), ("both", "both"))
    expected = train(slice(0, 6), None)
    torch.testing.assert_close(torch.cat([*parts]), expected)
    assert not torch.allclose(train(slice(0, 2), None), expected[:2])  # the sums matter


@pytest.mark.parametrize(
    ("name", "value"), [("lr", -1.0), ("beta1", 2.0), ("num_steps", 0), ("eps", -1.0)]
)
def test_numbers_of_the_optimizer(name: str, value: float) -> None:
    table = torch.nn.Parameter(torch.zeros(2, 4))
    with pytest.raises(ValueError, match=f"SinkhornMomentum: {name} must be"):
        SinkhornMomentum([table], **{"lr": 0.1, name: value})
    with pytest.raises(ValueError, match="params must be matrices"):
        SinkhornMomentum([torch.nn.Parameter(torch.zeros(4))], lr=0.1)
