"""Calls that repeat are replayed: the same results, and nothing of the call that was recorded."""

from __future__ import annotations

import dis
import threading
import weakref
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

import tile_kernels
from tests.requirements import GROUNDS
from tests.test_ops import OPS, copies, samples
from tile_kernels.runtime import replay
from tile_kernels.runtime.cases import Arguments, Sample, moved, tensors_in
from tile_kernels.runtime.op import Op
from tile_kernels.runtime.replay import look, remembering, watched
from tile_kernels.runtime.road import repeated

OPS = [op for op in OPS if isinstance(op, Op)]  # the others have a cache of prepared calls
each_op = pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)


def tensors_seen(arguments: Arguments) -> list[Tensor]:
    tensors: list[Tensor] = []
    assert look(arguments.values(), [], tensors)
    return tensors


def overwrite(arguments: Arguments) -> None:
    for tensor in tensors_in(tuple(arguments.values())):
        if 0 not in tensor.stride():  # which `copies` leaves as they are
            tensor.untyped_storage().fill_(0xA5)


def check_replay(op: Op, sample: Sample, device: str) -> None:
    """A replay with other tensors, after the recorded ones were overwritten, is the oracle's."""
    arguments = sample.build(device)
    expected = op.outcome(op.oracle, copies(moved(arguments, "cpu")))
    recorded = copies(arguments)
    tensors = tensors_seen(recorded)
    first, replayed, why = watched(op.function, (), recorded, tensors)
    assert replayed is not None, why
    written = tuple(recorded.get(name) for name in op.mutates)
    op.cases.compare(moved((first, *written) if op.mutates else first, "cpu"), expected)
    overwrite(recorded)
    again = copies(arguments)

    def replay_of(**given: Any) -> Any:
        return replayed(*tensors_seen(given))

    op.cases.compare(moved(op.outcome(replay_of, again), "cpu"), expected)


@pytest.mark.parametrize("ground", GROUNDS[1:])  # those that launch
@each_op
def test_every_operator_can_be_replayed(op: Op, ground: tuple[str, str]) -> None:
    backend, device = ground
    with tile_kernels.backend(backend):
        check_replay(op, op.cases.ordinary(), device)


@pytest.mark.gpu
@pytest.mark.parametrize(("op", "sample"), samples("small"))
def test_fourth_call_is_the_first(op: Op, sample: Sample) -> None:
    """Through the public function; whatever of it was replayed."""
    arguments = sample.build("cuda")
    expected = op.outcome(op.oracle, copies(moved(arguments, "cpu")))
    for _ in range(4):
        given = copies(arguments)
        op.cases.compare(moved(op.outcome(op.function, given), "cpu"), expected)
        overwrite(given)


# ---- what is not replayed -----------------------------------------------------------------------


def why_not(function: Any, *args: Any) -> str:
    tensors: list[Tensor] = []
    assert look(args, [], tensors)
    _, replayed, why = watched(function, args, {}, tensors)
    assert (replayed is None) == bool(why)
    return why


OUTSIDE = torch.ones(3)


def half() -> tuple[float]:
    return (0.5,)


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda x: x.sum().item(), "item gives a float"),
        (lambda x: bool(x.any()), "__bool__ gives a bool"),
        (lambda x: x.storage_offset(), "storage_offset gives a int"),
        (lambda x: x + OUTSIDE, "a tensor comes from elsewhere"),
        (lambda x: OUTSIDE if x.dim() else x, "a tensor comes from elsewhere"),
        (lambda x: {"x": x}, "a dict is part of it"),
        (lambda x: (x, object()), "a object is part of it"),
        (lambda x: x + (repeated(lambda: (3,))[0] + 1), "a value of the host is not used as it is"),
        (
            lambda x: x if repeated(lambda: (3,))[0] else -x,
            "a value of the host is not used as it is",
        ),
        (lambda x: x + repeated(half)[0], "half gives a float"),
    ],
)
def test_what_cannot_be_known_before(function: Any, why: str) -> None:
    assert why_not(function, torch.zeros(3)) == why


def test_a_tensor_that_was_not_given() -> None:
    memory = torch.zeros(4)
    why = why_not(lambda x, y: x._base.add_(y), memory[:2].view(2), memory)
    assert why == "__get__ gives a tensor it was not given"


def test_where_nothing_can_be_watched() -> None:
    """Writes in place would be lost without a word."""
    with torch._C.DisableTorchFunction():
        assert (
            why_not(lambda x: x.zero_(), torch.ones(3)) == "torch functions cannot be watched here"
        )


def test_one_tensor_given_twice() -> None:
    """Its two places could not be told apart."""
    x = torch.zeros(3)
    assert why_not(torch.add, x, x) == "a tensor is given twice"
    assert why_not(torch.add, x, x.clone()) == ""


# ---- what is ------------------------------------------------------------------------------------


def replay_of(function: Any, *args: Any) -> Any:
    tensors: list[Tensor] = []
    assert look(args, [], tensors)
    _, replayed, why = watched(function, args, {}, tensors)
    assert replayed is not None, why
    return replayed


def test_views_slices_tuples_and_writing_in_place() -> None:
    def function(x: Tensor, pair: tuple[Tensor, Tensor]) -> Any:
        out = x.new_empty((2, x.shape[0]), dtype=torch.float64)
        out[0] = pair[0]
        out[1, 1:] = pair[1][..., 1:]
        out[:, :1].zero_()
        first, second = out.unbind()
        return x.mul_(2), (first, second.flip(0)), [None, -0.0, "word", x.shape]

    def given(by: float) -> Any:
        return torch.ones(3), (by * torch.ones(3), by * torch.arange(3.0))

    replayed = replay_of(function, *given(1.0))
    x, pair = given(5.0)
    doubled, (first, second), rest = replayed(x, *pair)
    assert doubled is x
    assert x.tolist() == [2.0, 2.0, 2.0]
    assert first.tolist() == [0.0, 5.0, 5.0]
    assert second.tolist() == [10.0, 5.0, 0.0]
    assert rest == [None, -0.0, "word", (3,)]
    assert str(rest[1]) == "-0.0"


class Pair(NamedTuple):
    data: Tensor
    scale: Any


def test_named_tuples() -> None:
    replayed = replay_of(lambda pair: Pair(pair.data + 1, pair), Pair(torch.zeros(2), 3))
    found = replayed(torch.ones(2))
    assert isinstance(found, Pair)
    assert isinstance(found.scale, Pair)
    assert (found.data.tolist(), found.scale.data.tolist()) == ([2.0, 2.0], [1.0, 1.0])
    assert found.scale.scale == 3


def test_memory_is_free_after_its_last_use() -> None:
    """Neither the watch nor a replay keeps what the call itself has let go."""
    alive: list[Any] = []

    def function(x: Tensor) -> Tensor:
        half = x / 2
        alive.append(weakref.ref(half))
        third = half / 3
        del half
        repeated(lambda: alive.append([each() is not None for each in alive]) or ())
        return third + 1

    replay_of(function, torch.ones(2))
    assert alive[1] == [False]

    chain = replay_of(lambda x: (x / 2) / 3 + 1, torch.ones(2))
    names = [line.argval for line in dis.get_instructions(chain) if line.opname == "DELETE_FAST"]
    assert names == ["v0", "v1"]


def test_state_of_the_host_is_asked_again() -> None:
    states = iter([(10,), (20,)])
    replayed = replay_of(lambda x: x + repeated(lambda: next(states))[0], torch.zeros(1))
    assert replayed(torch.ones(1)).tolist() == [21.0]


def test_sharing_of_memory_is_checked_again() -> None:
    """`topk_gate` does not care; an operator that writes to its argument does."""
    from tile_kernels.runtime.checks import apart

    def function(x: Tensor, y: Tensor) -> Tensor:
        apart([("x", x)], [("y", y)])
        return x.copy_(y)

    replayed = replay_of(function, torch.zeros(3), torch.ones(3))
    assert replayed(torch.zeros(3), torch.ones(3)).tolist() == [1.0, 1.0, 1.0]
    memory = torch.zeros(4)
    with pytest.raises(ValueError, match="x must not share memory with y"):
        replayed(memory[:3], memory[1:])


# ---- looks --------------------------------------------------------------------------------------

MEMORY = torch.zeros(64)
LOOKS: dict[str, tuple[Any, Any]] = {
    "shape": (MEMORY[:6], MEMORY[:7]),
    "strides": (MEMORY[:6].view(2, 3), MEMORY[:6].view(3, 2).T),
    "dtype": (MEMORY[:4], MEMORY[:4].view(torch.int32)),
    "address": (MEMORY[:4], MEMORY[1:5]),
    "bool": (True, 1),
    "float": (1, 1.0),
    "sign of zero": (0.0, -0.0),
    "nesting": ((1, (2,)), (1, 2)),
    "list": ((1,), [1]),
    "none": (None, 0),
    "named": (Pair(1, 2), (1, 2)),
    "sign of another zero": (np.float64(0.0), np.float64(-0.0)),
}


@pytest.mark.parametrize("what", LOOKS)
def test_different_looks(what: str) -> None:
    one, other = LOOKS[what]
    seen: tuple[list[Any], list[Any]] = [], []
    for value, there in zip((one, other), seen):
        assert look([value], there, [])
    assert tuple(seen[0]) != tuple(seen[1])
    again: list[Any] = []
    look([one], again, [])
    assert tuple(again) == tuple(seen[0])


def test_no_look_at_what_autograd_or_pytorch_must_see() -> None:
    wanted = torch.zeros(3, requires_grad=True)
    assert not look([wanted], [], [])
    with torch.no_grad():
        assert look([wanted], [], [])
    negative = torch.zeros(3, dtype=torch.complex64).conj().imag
    assert negative.is_neg()
    for value in (
        object(),
        torch.zeros(3, dtype=torch.complex64).conj(),
        negative,
        torch.zeros(3).to_sparse(),
        torch.zeros(3, dtype=torch.int8).as_subclass(Sub),
    ):
        assert not look([value], [], [])
        assert not look([(1, value)], [], [])


class Sub(Tensor):
    pass


def test_tensors_on_the_cpu_take_the_long_way() -> None:
    calls = []
    function = remembering(lambda x: calls.append(x) or x)
    for _ in range(5):
        function(torch.zeros(3))
    assert len(calls) == 5


# ---- on the GPU ---------------------------------------------------------------------------------


def counted() -> tuple[Any, list[Any]]:
    calls: list[Any] = []

    def function(x: Tensor, y: Any = None) -> Tensor:
        calls.append(x)
        return x.new_zeros(x.shape).add_(x)

    return remembering(function), calls


@pytest.mark.gpu
def test_third_call_is_replayed() -> None:
    function, calls = counted()
    for i in range(6):
        x = torch.full((3,), float(i), device="cuda")
        assert function(x).tolist() == [float(i)] * 3
    assert len(calls) == 2
    function(torch.zeros(4, device="cuda"))
    function(torch.zeros(4, device="cuda")[1:])
    function(torch.zeros(3, device="cuda"), y=1)
    function(torch.zeros(3, device="cuda"), 1)
    assert len(calls) == 6


@pytest.mark.gpu
def test_modes_and_gradients_take_the_long_way() -> None:
    function, calls = counted()
    x = torch.zeros(3, device="cuda")
    for _ in range(4):
        function(x)
    with tile_kernels.checked():
        function(x)
    assert len(calls) == 3
    for _ in range(4):
        function(x.detach().requires_grad_())
    assert len(calls) == 7
    tile_kernels.config.set_num_sms(66)
    try:
        function(x)
    finally:
        tile_kernels.config.set_num_sms(torch.cuda.get_device_properties(0).multi_processor_count)
    assert len(calls) == 8


@pytest.mark.gpu
def test_each_thread_watches_for_itself() -> None:
    function, _ = counted()
    results: list[Any] = []

    def work(i: int) -> None:
        x = torch.full((3,), float(i), device="cuda")
        results.extend((i, function(x).tolist()) for _ in range(20))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 160
    assert all(found == [float(i)] * 3 for i, found in results)


@pytest.mark.gpu
def test_many_looks_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "_MOST_LOOKS", 4)
    function, calls = counted()
    for _ in range(3):
        for n in range(1, 7):
            assert function(torch.ones(n, device="cuda")).tolist() == [1.0] * n
    assert len(calls) > 12
