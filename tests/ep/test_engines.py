"""Parts of the engines on their own; `symm` on stand-ins for a CUDA stream."""

from __future__ import annotations

import gc
from collections import deque
from typing import Any

import pytest
import torch
from torch import Tensor

from tile_kernels.ep.engines.ring import BUSY, FULL, SLOTS, Rings, Slab, slab_bytes
from tile_kernels.ep.engines.symm import DONE, READY, SymmEngine, SymmWindow, _Work
from tile_kernels.ep.engines.watch import Watch

CHUNK, WIDTH = 64, 24


class Control:
    """The process group of two ranks of which the other one is gone."""

    index, size, rank_ids, timeout = 0, 2, (4, 6), 0.05

    def lost(self, phase: str, reason: str) -> RuntimeError:
        return RuntimeError(f"rank 4 gave up in {phase}: no answer from rank 6 ({reason})")


class Stream:
    """Does what it is given, in order, as far as the words allow: a CUDA stream on the host."""

    def __init__(self, words: dict[int, Tensor]) -> None:
        self.words = words
        self.todo: deque[Any] = deque()

    def run(self) -> bool:
        while self.todo:
            kind, *what = self.todo[0]
            if kind == "wait" and int(self.words[what[0]]) != what[1]:
                return False
            if kind == "write":
                self.words[what[0]].fill_(what[1])
            self.todo.popleft()
        return True


class Driver:
    """libcuda, where stream 0 is the stand-in and any other writes at once."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    def wait(self, _: int, address: int, value: int) -> None:
        self.stream.todo.append(("wait", address, value))

    def write(self, stream: int, address: int, value: int) -> None:
        if stream:
            self.stream.words[address].fill_(value)
        else:
            self.stream.todo.append(("write", address, value))


class Event:
    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    def query(self) -> bool:
        return self.stream.run()


class Side:
    cuda_stream = 1


class Hosted(SymmEngine):
    """`SymmEngine` whose words are waited for and written by a stand-in."""

    def _wait(self, word: Tensor, value: int, peer: int, phase: str) -> None:
        del peer, phase
        self._work.driver.wait(0, word.data_ptr(), value)

    def _write(self, word: Tensor, value: int) -> None:
        self._work.driver.write(0, word.data_ptr(), value)


def engines() -> tuple[Hosted, Stream]:
    size = slab_bytes(2, CHUNK)
    slabs = [Slab(torch.zeros(size, dtype=torch.uint8), 2, CHUNK) for _ in range(2)]
    words = {word.data_ptr(): word for slab in slabs for word in slab.flags.flatten()}
    stream = Stream(words)
    engine = Hosted(Control(), Rings(slabs, 0, CHUNK), range(2))  # type: ignore[arg-type]
    watch = Watch(engine, 0.05)
    engine._work = _Work(Driver(stream), Side(), None, watch)  # type: ignore[arg-type]
    return engine, stream


def test_a_stream_that_waits_in_vain_is_let_go() -> None:
    """Rank 1 never comes: after the timeout the host raises, and the stream ends."""
    engine, stream = engines()
    rows = torch.zeros(12, WIDTH, dtype=torch.uint8)  # more than the slots hold
    engine._through_rings(rows, [2, 10], [2, 10], "a dispatch")
    assert not stream.run()
    engine._work.watch.add(Event(stream), "a dispatch")
    with pytest.raises(RuntimeError, match="rank 4 gave up in a dispatch: no answer from rank 6"):
        engine.settle()
    assert not stream.todo
    assert not engine._work.watch.unfinished()
    with pytest.raises(RuntimeError, match="symm: this buffer broke down before: rank 4 gave up"):
        engine.exchange(rows, [2, 10], [2, 10])
    with pytest.raises(RuntimeError, match="rank 4 gave up in a dispatch"):
        engine.settle()
    # What was being enqueued meanwhile does not wait for ever either.
    engine._through_rings(rows, [2, 10], [2, 10], "a combine")
    assert not stream.run()
    engine._work.watch.add(Event(stream), "a combine")
    assert not stream.todo


def test_words_are_as_before_when_an_exchange_ends() -> None:
    """So that a recorded one can be replayed."""
    engine, stream = engines()
    own, theirs = engine._rings.slabs
    rows = torch.arange(24, dtype=torch.uint8).view(6, 4)  # one chunk
    engine._through_rings(rows, [2, 4], [2, 4], "")
    assert not stream.run()  # waits for rank 1 to send
    assert theirs.flags[0, FULL] == 1
    assert own.flags[1, BUSY] == 1
    own.flags[1, FULL] = 1  # what rank 1 would do: send, take, and say so
    theirs.flags[0, FULL] = 0
    own.flags[1, BUSY] = 0
    assert stream.run()
    assert not own.flags.any()
    assert theirs.flags[0].tolist() == [0] * 8


def test_a_thread_finds_out_about_a_late_transfer() -> None:
    """Nobody waits on the host; the next call raises, and the thread ends."""
    engine, stream = engines()
    stream.todo.append(("wait", engine._rings.slabs[0].flags[1, READY].data_ptr(), 1))
    engine._work.watch.add(Event(stream), "a combine")
    thread = engine._work.watch._thread
    assert thread is not None
    thread.join(10)
    assert not thread.is_alive()
    assert not stream.todo
    with pytest.raises(RuntimeError, match="broke down before: rank 4 gave up in a combine"):
        engine.exchange(torch.zeros(2, 2, dtype=torch.uint8), [1, 1], [1, 1])


def test_the_thread_ends_with_the_engine() -> None:
    engine, stream = engines()
    engine._work.watch.timeout = 100
    engine._work.watch.add(Event(stream), "a combine")
    thread = engine._work.watch._thread
    assert thread is not None
    del engine
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


class HostedWindow(SymmWindow):
    """`SymmWindow` on a stand-in for a stream."""

    def __init__(self, rings: Rings, stream: Stream) -> None:
        super().__init__([0, 0], 256, rings, None, [1 - rings.index])  # type: ignore[arg-type]
        self._work = self  # type: ignore[assignment]
        self.driver, self.stream = Driver(stream), stream

    def _stream(self) -> Any:
        return Side0

    def begin(self, what: Any) -> None:
        if isinstance(what, str):
            super().begin(what)

    def end(self, what: Any, *_: str) -> None:
        if isinstance(what, str):
            super().end(what)


class Side0:
    cuda_stream = 0


@pytest.mark.parametrize("seed", range(8))
def test_ready_and_done_are_never_overtaken(seed: int) -> None:
    """Three transfers on two streams that run in any interleaving: writes lie between the flags."""
    slabs = [Slab(torch.zeros(slab_bytes(2, CHUNK), dtype=torch.uint8), 2, CHUNK) for _ in range(2)]
    words = {word.data_ptr(): word for slab in slabs for word in slab.flags.flatten()}
    streams = [Stream(words), Stream(words)]
    log: list[tuple[str, int, int]] = []
    for rank, stream in enumerate(streams):
        window = HostedWindow(Rings(slabs, rank, CHUNK), stream)
        for step in range(3):
            stream.todo.append(("enter", rank, step))
            window.begin("a dispatch")
            stream.todo.append(("put", rank, step))
            window.end("a dispatch")
            stream.todo.append(("leave", rank, step))
    generator = torch.Generator().manual_seed(seed)
    for _ in range(400):
        stream = streams[int(torch.randint(0, 2, (1,), generator=generator))]
        if not stream.todo:
            continue
        kind, *what = stream.todo[0]
        if kind == "wait" and int(words[what[0]]) != what[1]:
            continue
        if kind == "write":
            words[what[0]].fill_(what[1])
        elif kind != "wait":
            log.append((kind, *what))
        stream.todo.popleft()
    assert not any(stream.todo for stream in streams)
    assert not any(slab.flags.any() for slab in slabs)
    for rank in range(2):
        for step in range(3):
            put = log.index(("put", rank, step))
            assert log.index(("enter", 1 - rank, step)) < put < log.index(("leave", 1 - rank, step))


def test_words_of_one_pair_share_no_line_with_another() -> None:
    slab = Slab(torch.zeros(slab_bytes(3, CHUNK), dtype=torch.uint8), 3, CHUNK)
    assert slab.flags.stride(0) * slab.flags.element_size() == 64
    assert slab.flags.shape[1] > max(BUSY + SLOTS - 1, READY, DONE)
    assert min(READY, DONE) >= BUSY + SLOTS
    assert slab.areas.shape == (3, SLOTS, CHUNK)
