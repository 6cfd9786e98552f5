"""Parts of the engines on their own; `symm` on stand-ins for a CUDA stream."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch
from torch import Tensor

from tile_kernels.ep import EventHandle, EventOverlap
from tile_kernels.ep.engines.ring import BUSY, FULL, SLOTS, Rings, Slab, slab_bytes
from tile_kernels.ep.engines.symm import SymmEngine, _Work

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
    engine._work = _Work(Driver(stream), Side(), None, 0.05)  # type: ignore[arg-type]
    return engine, stream


def test_a_stream_that_waits_in_vain_is_let_go() -> None:
    """Rank 1 never comes: after the timeout the host raises, and the stream ends."""
    engine, stream = engines()
    rows = torch.zeros(12, WIDTH, dtype=torch.uint8)  # more than the slots hold
    engine._through_rings(rows, [2, 10], [2, 10], "a dispatch")
    assert not stream.run()
    engine._work.in_flight.append((Event(stream), "a dispatch"))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="rank 4 gave up in a dispatch: no answer from rank 6"):
        engine.settle()
    assert not stream.todo
    assert not engine._work.in_flight
    with pytest.raises(RuntimeError, match="symm: this buffer broke down before: rank 4 gave up"):
        engine.exchange(rows, [2, 10], [2, 10])
    engine.settle()  # nothing more to wait for


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


def test_words_of_one_pair_share_no_line_with_another() -> None:
    slab = Slab(torch.zeros(slab_bytes(3, CHUNK), dtype=torch.uint8), 3, CHUNK)
    assert slab.flags.stride(0) * slab.flags.element_size() == 64
    assert slab.flags.shape[1] >= BUSY + SLOTS
    assert slab.areas.shape == (3, SLOTS, CHUNK)


def test_an_event_settles_once() -> None:
    """What the host must wait for comes after the stream, before the hook, and only once."""
    seen: list[str] = []
    event = EventOverlap(EventHandle(), settle=lambda: seen.append("settled"))
    event.register_hook_after_wait(lambda: seen.append("hook"))
    event.current_stream_wait()
    event.current_stream_wait()
    assert seen == ["settled", "hook"]
