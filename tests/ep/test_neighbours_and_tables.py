"""Pipeline sends, all-gather sessions and the Engram table, with threads and with processes."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.ep.processes import run_processes
from tile_kernels.ep import ElasticBuffer, LocalGroup, run_ranks
from tile_kernels.testing.numeric import assert_equal

PAGE = 2 << 20
DTYPES = [torch.float32, torch.bfloat16, torch.int16, torch.float8_e4m3fn, torch.bool]
Body = Callable[..., Any]


def on_ranks(ground: str, num_ranks: int, body: Body) -> list[Any]:
    if ground == "threads":
        return run_ranks(num_ranks, body)
    return run_processes(num_ranks, body, ground)


GROUNDS = [("threads", 2), ("threads", 5), ("collective", 2), ("collective", 3), ("mmap", 3)]
on_grounds = pytest.mark.parametrize(
    ("ground", "num_ranks"), GROUNDS, ids=[f"{n}-{name}" for name, n in GROUNDS]
)


def some(seed: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    width = shape[-1] * dtype.itemsize
    high = 2 if dtype is torch.bool else 256
    data = torch.randint(0, high, (*shape[:-1], width), generator=generator)
    return data.to(torch.uint8).view(dtype)


# ---- pipeline -----------------------------------------------------------------------------------


def ring(group: Any, engine: str = "auto") -> None:
    """Random sends to both neighbours, received later; all ranks follow the same script."""
    buffer = ElasticBuffer(group, engine=engine, num_bytes=PAGE)
    rank, size = buffer.rank_idx, buffer.num_ranks
    buffer.pp_set_config(num_max_tensor_bytes=4096, num_max_inflight_tensors=4)
    dice = random.Random(1)
    waiting: list[tuple[int, int, torch.dtype, int]] = []
    for step in range(40):
        dtype, way, units = dice.choice(DTYPES), dice.choice([1, -1]), dice.randint(1, 4)
        buffer.pp_send(some(step * 100 + rank, dtype, 2, 32 * units), (rank + way) % size)
        waiting.append((step, (rank - way) % size, dtype, units))
        while len(waiting) > dice.randint(0, 3):
            first, peer, dtype, units = waiting.pop(0)
            found = torch.empty(2, 32 * units, dtype=dtype)
            buffer.pp_recv(found, peer)
            assert_equal(found, some(first * 100 + peer, dtype, 2, 32 * units))
    for first, peer, dtype, units in waiting:
        found = torch.empty(2, 32 * units, dtype=dtype)
        buffer.pp_recv(found, peer)
        assert_equal(found, some(first * 100 + peer, dtype, 2, 32 * units))
    buffer.pp_set_config(num_max_tensor_bytes=64, num_max_inflight_tensors=1)


@on_grounds
def test_sends_between_neighbours(ground: str, num_ranks: int) -> None:
    on_ranks(ground, num_ranks, ring)


def wrong_size(group: Any, engine: str = "auto") -> str:
    """The receiver expects less than what comes; the next tensor is fine again."""
    buffer = ElasticBuffer(group, engine=engine, num_bytes=PAGE)
    buffer.pp_set_config(num_max_tensor_bytes=4096, num_max_inflight_tensors=2)
    if buffer.rank_idx == 0:
        buffer.pp_send(torch.zeros(16), 1)
        buffer.pp_send(torch.ones(8), 1)
        return ""
    with pytest.raises(ValueError, match="as large as what rank 0 sent, 64 bytes, got 32") as found:
        buffer.pp_recv(torch.empty(8), 0)
    received = torch.empty(8)
    buffer.pp_recv(received, 0)
    assert received.tolist() == [1] * 8
    return str(found.value)


@pytest.mark.parametrize("ground", ["threads", "collective", "mmap"])
def test_wrong_sizes_are_said(ground: str) -> None:
    _, message = on_ranks(ground, 2, wrong_size)
    assert message.startswith("ElasticBuffer.pp_recv: rank 1: t must be")


def test_pipeline_errors() -> None:
    def rank(group: LocalGroup) -> None:
        buffer = ElasticBuffer(group, num_bytes=PAGE)
        with pytest.raises(RuntimeError, match="pp_set_config must come first"):
            buffer.pp_send(torch.zeros(8), 1)
        buffer.pp_set_config(num_max_tensor_bytes=64, num_max_inflight_tensors=1)
        far = (group.rank + 2) % 4
        with pytest.raises(ValueError, match=f"dst_rank_idx must be a neighbour of .*, got {far}"):
            buffer.pp_send(torch.zeros(8), far)
        with pytest.raises(ValueError, match="a multiple of 32 bytes, at most 64, got 20"):
            buffer.pp_send(torch.zeros(5), (group.rank + 1) % 4)
        with pytest.raises(ValueError, match="a multiple of 32 bytes, at most 64, got 128"):
            buffer.pp_recv(torch.zeros(32), (group.rank + 1) % 4)
        with pytest.raises(ValueError, match="must be contiguous"):
            buffer.pp_send(torch.zeros(4, 4).T, (group.rank + 1) % 4)
        with pytest.raises(ValueError, match="num_max_inflight_tensors must be at least 1, got 0"):
            buffer.pp_set_config(num_max_tensor_bytes=64, num_max_inflight_tensors=0)

    run_ranks(4, rank)


def test_a_failing_rank_ends_the_wait_of_its_neighbour() -> None:
    def rank(group: LocalGroup) -> None:
        buffer = ElasticBuffer(group, num_bytes=PAGE)
        buffer.pp_set_config(num_max_tensor_bytes=64, num_max_inflight_tensors=1)
        if group.rank == 0:
            raise KeyError("lost")
        buffer.pp_recv(torch.zeros(8), 0)

    with pytest.raises(KeyError, match="lost"):
        run_ranks(2, rank)


# ---- sessions -----------------------------------------------------------------------------------


def sessions(group: Any, engine: str = "auto") -> None:
    buffer = ElasticBuffer(group, engine=engine, num_bytes=PAGE)
    rank, size = buffer.rank_idx, buffer.num_ranks
    buffer.agrs_set_config(num_max_session_bytes=1 << 16, num_max_all_gathers_per_session=8)
    dice = random.Random(2)
    for number in range(3):
        with buffer.agrs_new_session():
            kept = []
            for step in range(6):
                shapes = [(dice.randint(1, 3), dice.randint(1, 40)) for _ in range(3)]
                shapes, dtype = shapes[: dice.randint(1, 3)], dice.choice(DTYPES)
                seed = 1000 * number + 100 * step
                tensors = [some(seed + rank, dtype, *shape) for shape in shapes]
                if dice.random() < 0.5:  # in place
                    views = buffer.agrs_get_inplace_tensor(shapes, dtype)
                    for view, tensor in zip(views, tensors):
                        view.copy_(tensor)
                    tensors = list(views)
                *outs, wait = buffer.all_gather(tensors if len(tensors) > 1 else tensors[0])
                wait()
                for out, shape in zip(outs, shapes):
                    wanted = torch.stack([some(seed + each, dtype, *shape) for each in range(size)])
                    kept.append((out, wanted))
            for out, wanted in kept:  # nothing of a session overwrites the rest of it
                assert_equal(out, wanted)
    negative = pytest.raises(ValueError, match=r"sizes of at least 0, got \(2, -1\)")
    with buffer.agrs_new_session(), negative:
        buffer.agrs_get_inplace_tensor((2, -1), torch.float32)
    with buffer.agrs_new_session(enabled=False):
        pass


@on_grounds
def test_all_gather_sessions(ground: str, num_ranks: int) -> None:
    on_ranks(ground, num_ranks, sessions)


def scattered(group: Any, engine: str = "auto") -> None:
    buffer = ElasticBuffer(group, engine=engine, num_bytes=PAGE)
    rank, size = buffer.rank_idx, buffer.num_ranks
    buffer.agrs_set_config(1 << 16, 1)
    inputs = [
        torch.randn(size, 3, 5, generator=torch.Generator().manual_seed(each)).bfloat16()
        for each in range(size)
    ]
    with buffer.agrs_new_session():
        out, wait = buffer.reduce_scatter(inputs[rank])
        wait()
        first, second, _ = buffer.reduce_scatter([inputs[rank].float(), inputs[rank][:, :0]])
    total = torch.zeros(3, 5)
    for each in inputs:
        total = total + each[rank].float()
    assert_equal(out, total.bfloat16())
    assert_equal(first, total)
    assert second.shape == (0, 5)


@on_grounds
def test_reduce_scatter(ground: str, num_ranks: int) -> None:
    on_ranks(ground, num_ranks, scattered)


def test_session_errors() -> None:
    def rank(group: LocalGroup) -> None:
        buffer = ElasticBuffer(group, num_bytes=PAGE)
        t = torch.zeros(4)
        with pytest.raises(RuntimeError, match="agrs_set_config must come first"):
            buffer.all_gather(t)
        with pytest.raises(ValueError, match=r"per_session must be in 1\.\.32, got 33"):
            buffer.agrs_set_config(64, 33)
        buffer.agrs_set_config(64, 2)
        with pytest.raises(ValueError, match="all_gather: rank 0: there is no open session"):
            buffer.all_gather(t)
        buffer.create_agrs_session()
        with pytest.raises(RuntimeError, match="there is an open session"):
            buffer.create_agrs_session()
        with pytest.raises(ValueError, match="must fit num_max_session_bytes = 64, but 96 bytes"):
            buffer.all_gather([t, torch.zeros(8)])
        with pytest.raises(ValueError, match=r"tensors must be the same on all ranks, got float32"):
            buffer.all_gather(t[: 1 + group.rank])
        buffer.all_gather(t)  # there is room: what failed took none
        buffer.all_gather(t)
        with pytest.raises(ValueError, match="a session has at most 2 all-gathers"):
            buffer.all_gather(t)
        with pytest.raises(ValueError, match=r"tensor 0 must have shape \[2, ...\], got \(4,\)"):
            buffer.reduce_scatter(t)
        buffer.destroy_agrs_session()
        with pytest.raises(RuntimeError, match="there is no open session"):
            buffer.destroy_agrs_session()
        with pytest.raises(KeyError), buffer.agrs_new_session():
            raise KeyError
        with buffer.agrs_new_session():
            buffer.all_gather(t)

    run_ranks(2, rank)
    with pytest.raises(ValueError, match="sessions need at least two ranks, got 1"):
        ElasticBuffer(LocalGroup(), num_bytes=PAGE).agrs_set_config(64, 2)


# ---- engram -------------------------------------------------------------------------------------


def fetches(group: Any, engine: str = "auto") -> None:
    """Rows of three dtypes; unequally many tokens, none on the last rank."""
    buffer = ElasticBuffer(group, engine=engine, num_bytes=2 * PAGE, num_cpu_bytes=PAGE)
    rank, size = buffer.rank_idx, buffer.num_ranks
    num_entries, hidden = 37, 12
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float32):
        tables = [some(each, dtype, num_entries, hidden) for each in range(size)]
        whole = torch.cat(tables)
        sf = some(99, torch.int32, size * num_entries, 2) if dtype.itemsize == 1 else None
        buffer.engram_write(tables[rank], sf)
        num_tokens = 0 if rank == size - 1 else 5 + rank
        generator = torch.Generator().manual_seed(rank)
        indices = torch.randint(0, len(whole), (num_tokens, 7), generator=generator).int()
        data, scales = buffer.engram_fetch(indices)()
        assert_equal(data, whole[indices.long()].view(num_tokens, 7 * hidden))
        if sf is None:
            assert scales is None
            continue
        wanted = sf[indices.long()].view(num_tokens, 14)
        assert_equal(scales, wanted)
        _, columns = buffer.engram_fetch(indices, use_tma_aligned_col_major_sf=True)()
        assert torch.equal(columns, wanted)
        assert columns.stride(0) == 1


@on_grounds
def test_engram(ground: str, num_ranks: int) -> None:
    on_ranks(ground, num_ranks, fetches)


def test_engram_errors() -> None:
    def rank(group: LocalGroup) -> None:
        buffer = ElasticBuffer(group, num_bytes=2 * PAGE, num_cpu_bytes=PAGE)
        indices = torch.zeros(1, 1, dtype=torch.int32)
        with pytest.raises(ValueError, match="engram_fetch: rank 0: engram_write must come first"):
            buffer.engram_fetch(indices)
        with pytest.raises(ValueError, match=r"num_entries must be the same .* got 2 on rank 0"):
            buffer.engram_write(torch.zeros(2 + group.rank, 4))
        with pytest.raises(ValueError, match="storage must fit num_cpu_bytes = 2097152, got 4000"):
            buffer.engram_write(torch.zeros(1000, 1000))
        with pytest.raises(ValueError, match="sf must be given for float8 storage, and only then"):
            buffer.engram_write(torch.zeros(2, 4).to(torch.float8_e4m3fn))
        buffer.engram_write(torch.zeros(2, 4))
        with pytest.raises(ValueError, match=r"rank 1: indices must hold 0\.\.3, but .* is 4"):
            buffer.engram_fetch(indices + (4 if group.rank else 0))
        with pytest.raises(ValueError, match="fetched rows must fit the 2097152 bytes"):
            buffer.engram_fetch(indices.expand(1000, 1000))

    run_ranks(2, rank)
