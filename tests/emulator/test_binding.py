"""Views, workspaces and tables of addresses as arguments; clusters; machines that are refused."""

import platform
from typing import Any

import pytest
import torch
from tilelang import language as T

from tile_kernels.emulator import Emulated, EmulationError, build
from tile_kernels.emulator.lowering import Lowered

from .helpers import run


def doubled_through_view(n: int) -> Any:
    @T.prim_func
    def kernel(x: T.Tensor((n, 64), T.float32), y: T.Tensor((n * 64,), T.float32)):
        flat = T.view(x, (n * 64,))
        with T.Kernel(n, threads=64) as b:
            t = T.get_thread_binding()
            y[b * 64 + t] = flat[b * 64 + t] * 2

    return kernel


def through_workspace() -> Any:
    n = T.dynamic("n")

    @T.prim_func
    def kernel(x: T.Tensor((n, 64), T.float32), y: T.Tensor((n, 64), T.float32)):
        w = T.alloc_global((n, 64), T.float32)
        with T.Kernel(n, threads=64) as b:
            t = T.get_thread_binding()
            w[b, t] = x[b, t] * 2
        with T.Kernel(n, threads=64) as b:
            t = T.get_thread_binding()
            y[b, t] = w[b, t] + 1

    return kernel


def gather(n: int) -> Any:
    @T.prim_func
    def kernel(table: T.Tensor((n,), T.ptr), y: T.Tensor((n, 64), T.float32)):
        with T.Kernel(n, threads=64) as b:
            t = T.get_thread_binding()
            source = T.make_tensor(table[b], (64,), T.float32)
            y[b, t] = source[t] + 1

    return kernel


def test_view_of_a_global_tensor_reports_the_parameter() -> None:
    x, y = torch.randn(3, 64), torch.zeros(192)
    report = run(doubled_through_view(3), x, y)
    assert torch.equal(y, 2 * x.flatten())
    assert report.buffers is not None
    assert report.buffers["x"].distinct_read == x.nbytes


def test_workspaces_of_dynamic_size_live_between_the_kernels() -> None:
    kernel = Emulated.build(through_workspace())
    assert Lowered.from_json(kernel.lowered.to_json()) == kernel.lowered
    for n in (1, 5):
        x, y = torch.randn(n, 64), torch.zeros(n, 64)
        report = kernel(x, y)
        assert torch.equal(y, 2 * x + 1)
        assert report.buffers is not None
        assert report.buffers["w"].distinct_written == x.nbytes


def test_tables_of_addresses() -> None:
    rows = [torch.randn(64) for _ in range(3)]
    y = torch.zeros(3, 64)
    kernel = Emulated.build(gather(3))
    assert kernel.lowered.tables == ("table",)

    def table() -> torch.Tensor:
        return torch.tensor([r.data_ptr() for r in rows])

    kernel(table(), y)
    assert torch.equal(y, torch.stack(rows) + 1)
    rows[1] = rows[2][:0].new_empty(32)  # too short
    with pytest.raises(EmulationError, match=r"4-byte read of table\[1\] byte 128") as caught:
        kernel(table(), y)
    assert caught.value.kind == "out of bounds"
    with pytest.raises(
        EmulationError, match=r"table\[0\] is the address 0x10, which lies in no tensor"
    ):
        kernel(torch.tensor([16, 0, 0]), y)


def test_a_table_may_point_into_an_argument() -> None:
    both = torch.randn(6, 64)
    table = torch.tensor([both[i].data_ptr() for i in (3, 4, 5)])
    Emulated.build(gather(3))(table, both[:3])
    assert torch.equal(both[:3], both[3:] + 1)
    table = torch.tensor([both[2].data_ptr()] * 3)  # which block 2 writes while others read
    with pytest.raises(EmulationError, match="race: 4-byte write to y"):
        Emulated.build(gather(3))(table, both[:3])


def swap(width: int, dims: tuple[int, int, int], rank: int, first_sync: bool = True) -> Any:
    @T.prim_func
    def kernel(x: T.Tensor((4, width), T.float32), y: T.Tensor((4, width), T.float32)):
        with T.Kernel(4, threads=width, cluster_dims=dims) as b:
            t = T.get_thread_binding()
            mine = T.alloc_shared((width,), T.float32)
            theirs = T.alloc_shared((width,), T.float32)
            mine[t] = x[b, t]
            if first_sync:
                T.cluster_sync()
            T.copy_cluster(mine, theirs, dst_block=(b % 2) ^ rank)
            T.cluster_sync()
            y[b, t] = theirs[t]

    return kernel


@pytest.mark.parametrize("order", ["forward", "reverse", "random"])
def test_clusters_exchange_shared_memory(order: str) -> None:
    x, y = torch.randn(4, 64), torch.zeros(4, 64)
    report = run(swap(64, (2, 1, 1), 1), x, y, order=order)
    assert torch.equal(y, x.view(2, 2, 64).flip(1).reshape(4, 64))
    assert report.blocks == 4


def test_cluster_errors() -> None:
    x, y = torch.randn(4, 64), torch.zeros(4, 64)
    with pytest.raises(EmulationError, match="out of bounds: block 2 of a cluster of 2"):
        run(swap(64, (2, 1, 1), 2), x, y)
    with pytest.raises(
        EmulationError, match="a grid of 4 x 1 x 1 does not consist of clusters of 3"
    ):
        run(swap(64, (3, 1, 1), 1), x, y)


def test_a_block_of_a_cluster_must_have_started() -> None:
    x, y = torch.randn(4, 64), torch.zeros(4, 64)
    with pytest.raises(EmulationError, match="block 1 of the cluster, which may not have started"):
        run(swap(64, (2, 1, 1), 1, first_sync=False), x, y)


def test_other_machines_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    build.compiler.cache_clear()
    try:
        with pytest.raises(EmulationError, match="this is Linux on aarch64"):
            build.compiler()
    finally:
        build.compiler.cache_clear()
