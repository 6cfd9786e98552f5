"""All before a sublayer in one launch: the bits of the chain, whichever block does what, when."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import tile_kernels
from tests.mhc.test_fused import grounds, sublayer
from tests.requirements import needs_nvcc
from tile_kernels import mhc
from tile_kernels.mhc import projection
from tile_kernels.mhc.kernels import one_launch
from tile_kernels.mhc.kernels.projection import UNIT, product_plan
from tile_kernels.runtime import emulation, sources, tickets
from tile_kernels.runtime.device import DESCRIBED
from tile_kernels.runtime.emulator import Emulated
from tile_kernels.runtime.launch import recording

NUMBERS = (1e-6, 1e-6, 1e-6, 1.0, 10)


@pytest.fixture(autouse=True)
def in_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(projection, "ONE_LAUNCH_ROWS", 1)


@pytest.fixture
def few_sms() -> Iterator[None]:
    """Blocks that fit into the emulator all at once."""
    before = tile_kernels.get_num_sms()
    tile_kernels.set_num_sms(3)
    yield
    tile_kernels.set_num_sms(before)


def assert_chain(given: tuple[Tensor, ...]) -> None:
    """The fused operators give what the single ones give."""
    residual, fn, scale, base = given
    post, comb, read = mhc.mhc_pre_big_fuse(*given, *NUMBERS)
    trained = mhc.mhc_pre_fwd(*given, *NUMBERS)
    mixes, mul, s = mhc.mhc_norm_fn_fwd(residual, fn, 1e-6)
    pre, post_alone, logits = mhc.mhc_pre_split_mixes(
        mixes, scale, base, residual.shape[-2], 1.0, 1e-6
    )
    comb_alone = mhc.sinkhorn_normalize(logits, 10, 1e-6)
    chain = mhc.mhc_pre_apply_mix(residual, pre), post_alone, comb_alone, pre, mixes, mul, s, logits
    for found in ((read, post, comb), trained):
        for one, other in zip(found, chain):
            assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("backend", "device", "n", "m", "h"),
    grounds(
        [(5, 4, 72), (300, 3, 264), (2, 8, 264)],
        [(n, 4, h) for n in (1, 300, 4096, 20000) for h in (1280, 7168)] + [(1000, 8, 1288)],
    ),
)
def test_bits_of_the_chain(backend: str, device: str, n: int, m: int, h: int) -> None:
    with tile_kernels.backend(backend):
        assert_chain(sublayer(n, m, h, device))


@pytest.mark.gpu
def test_again_and_again_on_streams_and_in_graphs() -> None:
    given = sublayer(4096, 4, 1280, "cuda")
    expected = mhc.mhc_pre_big_fuse(*given, *NUMBERS)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = [mhc.mhc_pre_big_fuse(*given, *NUMBERS) for _ in range(3)]
    streams = [torch.cuda.Stream() for _ in range(3)]
    results = []
    torch.cuda.synchronize()
    for _ in range(50):
        with torch.cuda.stream(streams[0]):
            graph.replay()
        for stream in streams[1:]:
            with torch.cuda.stream(stream):
                results.append(mhc.mhc_pre_big_fuse(*given, *NUMBERS))
    torch.cuda.synchronize()
    for found in (*results, *recorded):
        assert all(torch.equal(one, other) for one, other in zip(found, expected))


@pytest.mark.usefixtures("few_sms")
@pytest.mark.parametrize("order", ["forward", "random"])
def test_blocks_that_run_together(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks are resident, so that items wait for items that others have drawn."""

    def resident(kernel: Any, static: tuple[Any, ...], options: emulation.Options) -> Any:
        definition = kernel.definition
        return Emulated.build(
            definition.prim_func(static), pass_configs=definition.pass_configs,
            cooperative=kernel.name == "pre_in_one", split_shared=options.split_shared,
        )  # fmt: skip

    monkeypatch.setattr(emulation, "_build", resident)
    taken = []
    take = tickets.take
    monkeypatch.setattr(tickets, "take", lambda *given: taken.append(take(*given)) or taken[-1])
    with tile_kernels.backend("emulate"), emulation.emulating(order=order, seed=3):
        assert_chain(sublayer(390, 2, 264, "cpu"))
    assert len(taken) == 2
    assert not any(counters.any() for counters, _ in taken)


@pytest.mark.parametrize("function", [mhc.mhc_pre_big_fuse, mhc.mhc_pre_fwd])
def test_it_is_one(function: Any) -> None:
    with recording() as requests:
        function(*(tensor.to("meta") for tensor in sublayer(300, 4, 64, "cpu")), *NUMBERS)
    assert [request.kernel.name for request in requests] == ["pre_in_one"]


def test_which_sizes_it_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The projection alone has the sums of spans for the same sizes, and for no others."""
    device = torch.device("cpu")
    monkeypatch.setattr(projection, "ONE_LAUNCH_ROWS", 1024)
    assert projection.count_splits(4096, 28672, device) == (6, 10)
    for rows in (1023, 2**24 + 1):
        assert not projection.in_one_launch(rows, 28672)
        assert projection.count_splits(rows, 28672, device).spans == 1


@pytest.mark.parametrize("arch", DESCRIBED)
def test_plans_fit_and_multiply_as_the_projection_does(arch: str) -> None:
    device = DESCRIBED[arch]
    for m in range(1, 9):
        count, width = m * (m + 2), projection.padded(m * (m + 2))
        plan = one_launch.plan(m, 7168, 16, 10, True, True, device)
        alone = product_plan(count, width, m * 7168, 4096, 6, 10, device)
        assert plan.unit == min(alone.depth, UNIT)
        assert plan.depth % plan.unit == 0
        assert plan.stages >= 2
        column = 2 * one_launch.TILE + 4 * count
        groups = -(-projection.count_spans(m * 7168) // 10)
        held = (plan.stages * column + 4 * width) * plan.depth
        held += 4 * (1 + plan.tokens * (m * (m + 1) + groups * (count + 1)))
        assert held <= device.smem_per_block
        assert plan.resident * (held + 1024) <= device.smem_per_sm


@needs_nvcc
@pytest.mark.parametrize(("m", "h"), [(4, 7168), (8, 1288)])
def test_compiles_without_spills(m: int, h: int) -> None:
    device = DESCRIBED["sm_90a"]
    static = one_launch.plan(m, h, 16, 10, True, True, device)
    source = sources.cuda_source(one_launch.pre_in_one, static, "sm_90a")
    for function in sources.compile_source(source, "sm_90a"):
        assert function.spill_bytes == 0
        assert not [name for name in function.accesses if name.startswith(("LDL", "STL"))]
