"""The op suite: every declared operator on every backend that this machine has.

A new operator joins by its declaration alone. See `docs/architecture.md`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tile_kernels
from tests.requirements import CUDA, EMULATED_IN_FULL, GROUNDS, TORCH
from tests.selection import emulated_by_default, operators
from tile_kernels.runtime import emulation, registry
from tile_kernels.runtime.cases import (
    Arguments,
    Reject,
    Sample,
    assert_equal_results,
    moved,
    tensors_in,
)
from tile_kernels.runtime.operator import Operator
from tile_kernels.testing.poison import poisoned_empty

OPS = operators()
each_op = pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
each_ground = pytest.mark.parametrize("ground", GROUNDS)
on_gpu = pytest.mark.gpu


def samples(kind: str) -> list[Any]:
    return [
        pytest.param(op, sample, id=f"{op.name}-{sample.label}")
        for op in OPS
        for sample in getattr(op.cases, kind)
    ]


def copies(value: Any) -> Any:
    """Clones with the same strides; expanded tensors, which nobody may write, as they are."""
    if isinstance(value, torch.Tensor) and 0 not in value.stride():
        clone = torch.empty_strided(
            value.shape, value.stride(), dtype=value.dtype, device=value.device
        )
        return clone.copy_(value)
    if isinstance(value, dict):
        return {name: copies(item) for name, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(copies(item) for item in value)
    return value


def check_unchanged(op: Operator, arguments: Arguments, before: Arguments) -> None:
    for name, value in arguments.items():
        if name not in op.mutates:
            for now, then in zip(tensors_in(value), tensors_in(before[name])):
                assert_equal_results(now.cpu(), then.cpu())


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`emulated`: small samples for the emulator, those of `tests/selection.py` or all of them."""
    if "emulated" in metafunc.fixturenames:
        full = metafunc.config.getoption("--full")
        chosen = [
            pytest.param((op, sample), id=f"{op.name}-{sample.label}")
            for op in OPS
            for sample in (op.cases.small if full else emulated_by_default(op))
        ]
        metafunc.parametrize("emulated", chosen)


@pytest.mark.emulated
def test_emulated_sample(emulated: tuple[Operator, Sample], request: pytest.FixtureRequest) -> None:
    """The kernel gives the reference's result, with every memory access checked.

    Every byte of the results is written: they hold a pattern before. Inputs stay as they are.
    Threads and blocks take turns in another order in the second run, in two others with `--full`.
    """
    op, sample = emulated
    arguments = sample.build("cpu")
    before = copies(arguments)
    expected = op.outcome(op.public_reference, copies(arguments))
    with tile_kernels.backend("emulate"), poisoned_empty(0xA5):
        op.cases.compare(op.outcome(op.function, arguments), expected)
    check_unchanged(op, arguments, before)
    for order in ("random", "reverse") if request.config.getoption("--full") else ("random",):
        with tile_kernels.backend("emulate", order=order):
            op.cases.compare(op.outcome(op.function, copies(before)), expected)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_small_samples_on_a_cpu(op: Operator) -> None:
    """The function gives what the public reference does, as `tile-kernels check` compares them.

    Samples with a size of 1, whose strides are easily those of something else, if they are cheap.
    """
    for sample in op.cases.small:
        arguments = sample.build("cpu")
        shapes = [tensor.shape for tensor in tensors_in(arguments)]
        if all(1 not in shape for shape in shapes) or sum(map(math.prod, shapes)) > 2**16:
            continue
        before = copies(arguments)
        expected = op.outcome(op.public_reference, copies(arguments))
        with tile_kernels.backend("torch"):
            op.cases.compare(op.outcome(op.function, arguments), expected)
        check_unchanged(op, arguments, before)


@on_gpu
@pytest.mark.parametrize(("op", "sample"), samples("small"))
def test_small_sample(op: Operator, sample: Sample) -> None:
    """On the GPU: the reference's result at the first call, at a cached one, and poisoned."""
    arguments = sample.build("cuda")
    before = copies(arguments)
    expected = op.outcome(op.public_reference, copies(moved(arguments, "cpu")))
    for _ in range(2):
        op.cases.compare(moved(op.outcome(op.function, copies(arguments)), "cpu"), expected)
    with poisoned_empty(0xA5):
        op.cases.compare(moved(op.outcome(op.function, arguments), "cpu"), expected)
    check_unchanged(op, arguments, before)


@on_gpu
@pytest.mark.parametrize(("op", "sample"), samples("large"))
def test_large_sample(op: Operator, sample: Sample) -> None:
    arguments = sample.build("cuda")
    before = copies(arguments)
    expected = op.outcome(op.public_reference, copies(arguments))
    first = op.outcome(op.function, copies(arguments))
    op.cases.compare(first, expected)
    del expected
    for _ in range(2):
        assert_equal_results(op.outcome(op.function, copies(arguments)), first)  # deterministic
    check_unchanged(op, arguments, before)


@pytest.mark.parametrize("ground", [TORCH, EMULATED_IN_FULL, CUDA])
@each_op
def test_vectors(op: Operator, ground: tuple[str, str]) -> None:
    """The reference gives the worked examples; on a GPU and with `--full` so does the kernel.

    Emulated samples are compared with the reference, so that its examples hold for kernels too.
    """
    backend, device = ground
    assert op.cases.vectors, f"{op.name} has no worked example"
    for vector in op.cases.vectors:
        with tile_kernels.backend(backend):
            outcome = op.outcome(op.function, moved(vector.arguments(), device))
        op.cases.compare(moved(outcome, "cpu"), vector.expected())


@each_op
def test_declaration_is_complete(op: Operator) -> None:
    """The suite is only worth something on declarations that cover the edges."""
    assert ">>>" in (op.function.__doc__ or ""), "a docstring with an example"
    assert op.cases.benchmarks
    small = [sample.build("meta") for sample in op.cases.small]
    tensors = [tensors_in(case) for case in small]
    assert any(any(t.numel() == 0 for t in case) for case in tensors), "a sample without tokens"
    assert any(1 in case[0].shape for case in tensors), "one token"
    for kind in ("small", "large", "benchmarks"):
        labels = [sample.label for sample in getattr(op.cases, kind)]
        assert len(labels) == len(set(labels)), f"labels of {kind} repeat"
    for sample in op.cases.benchmarks:
        assert op.cost(**sample.build("meta")).bytes > 0


# ---- buffers for results ------------------------------------------------------------------------

WRITING = [op for op in OPS if op.outputs]
each_writing_op = pytest.mark.parametrize("op", WRITING, ids=lambda op: op.name)


def results_of(op: Operator, arguments: Arguments) -> tuple[torch.Tensor, ...]:
    """Results as buffers, full of ones: their own memory, padding included.

    A result that an option adds, such as `with_scores`, has no buffer.
    """
    results = tuple(tensors_in(op.function(**copies(arguments))))[: op.num_results]
    for result in results:
        (result.view(torch.uint8) if result.itemsize == 1 else result).fill_(1)
    return results


@each_ground
@each_writing_op
def test_results_into_buffers(op: Operator, ground: tuple[str, str]) -> None:
    backend, device = ground
    for sample in emulated_by_default(op)[:8] if backend == "emulate" else op.cases.small:
        arguments = sample.build(device)
        with tile_kernels.backend(backend):
            expected = op.function(**copies(arguments))
            buffers = results_of(op, arguments)
            written = op.function(**copies(arguments), **op.buffers(*buffers))
            assert_equal_results(written, expected)
        for one, other in zip(tensors_in(written), buffers):
            assert one is other


SAME_SIZE = {
    1: (torch.uint8, torch.int8),
    2: (torch.int16, torch.float16),
    4: (torch.int32, torch.float32),
    8: (torch.int64, torch.float64),
}


@pytest.mark.parametrize("backend", ["torch", "emulate"])
@each_writing_op
def test_buffers_that_do_not_fit_are_refused(op: Operator, backend: str) -> None:
    arguments = op.cases.ordinary().build("cpu")
    good = results_of(op, arguments)
    for i, name in enumerate(op.outputs):
        wrongs = [
            good[i].to(torch.complex64),
            good[i].view(next(x for x in SAME_SIZE[good[i].itemsize] if x is not good[i].dtype)),
            good[i][None],
            good[i][:-1],
        ]
        if good[i].shape[-1] > 1:  # the stride of a single element is free
            wrongs.append(good[i].repeat_interleave(2, -1)[..., ::2])
        for wrong in wrongs:
            given = op.buffers(*good[:i], wrong, *good[i + 1 :])
            with (
                tile_kernels.backend(backend),
                pytest.raises((TypeError, ValueError), match=f"^{op.short_name}: .*{name}"),
            ):
                op.function(**arguments, **given)


@each_writing_op
def test_buffers_on_meta(op: Operator) -> None:
    arguments = moved(op.cases.ordinary().build("cpu"), "meta")
    buffers = results_of(op, arguments)
    written = op.function(**arguments, **op.buffers(*buffers))
    for one, other in zip(tensors_in(written), buffers):
        assert one is other


@each_writing_op
def test_buffers_under_compile(op: Operator) -> None:
    arguments = op.cases.ordinary().build("cpu")
    expected = op.function(**copies(arguments))
    buffers = results_of(op, arguments)
    torch._dynamo.reset()
    compiled = torch.compile(op.function, fullgraph=True, backend="aot_eager")
    assert_equal_results(compiled(**arguments, **op.buffers(*buffers)), expected)
    assert_equal_results(buffers, tuple(tensors_in(expected)))


# ---- bad arguments ------------------------------------------------------------------------------


@pytest.fixture
def no_launch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Bad arguments must be refused before anything is launched."""

    def launched(*_: object) -> None:
        raise AssertionError("a kernel was launched")

    monkeypatch.setattr(emulation, "run", launched)
    with tile_kernels.backend("emulate"):
        yield


def wrong_arguments(op: Operator) -> Iterator[tuple[str, str, Arguments]]:
    """(argument, what is wrong, arguments): by kind of parameter, then the declared ones."""
    good = op.cases.ordinary().build("cpu")
    tensors = [name for name in op.tensor_parameters if isinstance(good.get(name), torch.Tensor)]
    for name in tensors:
        value = good[name]
        yield name, "not a tensor", {**good, name: value.tolist()}
        yield name, "dtype", {**good, name: torch.zeros(value.shape, dtype=torch.complex128)}
        if not op.cases.any_rank or name != tensors[0]:
            yield name, "rank", {**good, name: value[None]}
        if len(tensors) > 1:
            yield name, "device", {**good, name: value.to("meta")}
    for name, value in good.items():
        if type(value) is int:
            yield name, "a string", {**good, name: str(value)}
            yield name, "a bool", {**good, name: True}
    for reject in op.cases.rejects:
        yield reject.argument, reject.label, reject.change(good)


@pytest.mark.parametrize(
    ("op", "argument", "arguments"),
    [
        pytest.param(op, argument, arguments, id=f"{op.name}-{argument}-{wrong}")
        for op in OPS
        for argument, wrong, arguments in wrong_arguments(op)
    ],
)
def test_wrong_argument(op: Operator, argument: str, arguments: Arguments, no_launch: None) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        op.function(**arguments)
    assert str(caught.value).startswith(f"{op.short_name}: ")
    assert argument in str(caught.value)


@pytest.mark.parametrize(
    ("op", "bad"),
    [
        pytest.param(op, bad, id=f"{op.name}-{bad.argument}-{bad.label}")
        for op in OPS
        for bad in op.cases.bad_values
    ],
)
@each_ground
def test_bad_values_raise_in_the_checked_mode(
    op: Operator, bad: Reject, ground: tuple[str, str]
) -> None:
    """Without it the result is the reference's: documented, and harmless."""
    backend, device = ground
    arguments = moved(bad.change(op.cases.ordinary().build("cpu")), device)
    with tile_kernels.backend("torch"):
        expected = op.outcome(op.function, copies(moved(arguments, "cpu")))
    good = op.cases.vectors[0].arguments() if backend == "torch" else {}
    with tile_kernels.backend(backend):
        outcome = op.outcome(op.function, copies(arguments))
        op.cases.compare(moved(outcome, "cpu"), expected)
        with tile_kernels.checked():
            if good:
                op.function(**good)
            with pytest.raises(ValueError, match=f"^{op.short_name}: .*{bad.argument}") as caught:
                op.function(**copies(arguments))
    assert "element [" in str(caught.value)


@each_op
def test_wrong_number_of_arguments(op: Operator, no_launch: None) -> None:
    with pytest.raises(TypeError, match=f"^{op.short_name}.*argument"):
        op.function()
    with pytest.raises(TypeError, match=f"^{op.short_name}.*no_such_argument"):
        op.function(**op.cases.ordinary().build("cpu"), no_such_argument=1)


@each_op
def test_scattered_inputs_are_right_or_refused(op: Operator) -> None:
    """A tensor with stride 2 everywhere gives the reference's result or an error with its name."""
    good = op.cases.ordinary().build("cpu")
    for name in op.tensor_parameters:
        if not isinstance(good.get(name), torch.Tensor):
            continue
        scattered = torch.stack([good[name]] * 2, dim=-1)[..., 0]
        expected = op.public_reference(**copies(good))
        try:
            with tile_kernels.backend("emulate"):
                result = op.function(**{**copies(good), name: scattered})
        except ValueError as error:
            refused = str(error)
        else:
            refused = ""
            op.cases.compare(result, expected)
        assert not refused or name in refused


# ---- PyTorch's dispatcher -----------------------------------------------------------------------


class CustomOpCalls(TorchDispatchMode):
    """What a public function asks of the dispatcher: the library's custom ops with arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "tile_kernels":
            self.calls.append((func, copies(args), copies(kwargs)))
        return func(*args, **kwargs)


OPCHECKS = {
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
}


@pytest.mark.parametrize("op", [op for op in OPS if not op.mutates], ids=lambda op: op.name)
def test_no_gradient_is_lost(op: Operator) -> None:
    """What is computed of a tensor in training has this operator as its node, which has a formula
    or raises in `backward`; a reference's own nodes do not show."""
    arguments = op.cases.ordinary().build("cpu")
    trained = (torch.float32, torch.bfloat16)
    wanted = [x.requires_grad_() for x in tensors_in(arguments) if x.dtype in trained]
    results = [x for x in tensors_in(op.function(**arguments)) if x.is_floating_point()]
    nodes = [type(x.grad_fn).__name__ for x in results if x.requires_grad]
    if op.name == "engram.engram_gate_bwd":  # documented to take attached tensors as constants
        assert not nodes
        return
    assert all(name.startswith("GeneratedBackwardFor_tile_kernels_") for name in nodes)
    assert bool(nodes) == (bool(wanted) and bool(results))


# Operators with a gradient: their own formula, or that of an operator that serves them.
TRAINED = [
    op
    for op in OPS
    if any(
        each.custom_op.has_gradient
        for each in registry.operators()
        if op.name in (each.name, each.serves)
    )
]


# Arguments that are documented to have no gradient, although the operator has one.
CONSTANTS = {"attention.indexer_kl": ("p",), "attention.indexer_logits": ("k",)}


def gradients(op: Operator, function: Callable[..., Any]) -> list[torch.Tensor | None]:
    """Of the tensors that are not written, in the ordinary sample, with other gradients for each
    result."""
    arguments = op.cases.ordinary().build("cpu")
    frozen = (*op.mutates, *CONSTANTS.get(op.name, ()))
    read = {name: value for name, value in arguments.items() if name not in frozen}
    trained = (torch.float32, torch.bfloat16)
    leaves = [x.requires_grad_() for x in tensors_in(read) if x.dtype in trained]
    results = [x for x in tensors_in(function(**arguments)) if x.requires_grad]
    assert results
    grads = [torch.randn(x.shape, generator=torch.Generator().manual_seed(1)) for x in results]
    torch.autograd.backward(results, [g.to(x.dtype) for g, x in zip(grads, results)])
    return [leaf.grad for leaf in leaves]


@pytest.mark.parametrize("op", TRAINED, ids=lambda op: op.name)
def test_gradients_under_compile(op: Operator) -> None:
    """The same as without it: the backward passes its dispatcher all that it takes."""
    expected = gradients(op, op.function)
    assert any(grad is not None for grad in expected)
    torch._dynamo.reset()
    found = gradients(op, torch.compile(op.function, fullgraph=True, backend="aot_eager"))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_gpu)])
@each_op
def test_opcheck(op: Operator, device: str) -> None:
    for vector in op.cases.vectors:  # opcheck compares values, so NaN would differ from itself
        arguments = moved(vector.arguments(), device)
        with CustomOpCalls() as asked:
            results = op.function(**arguments)
            if op.outputs and all(t.element_size() > 1 for t in tensors_in(results)):
                written = op.buffers(*results_of(op, arguments))
                op.function(**arguments, **written)  # opcheck cannot do float8
        assert asked.calls
        for func, args, kwargs in asked.calls:
            given = [t.dtype for t in (*tensors_in(args), *tensors_in(kwargs))]
            # Its look at arguments before and after has no comparison of float8.
            left_out = {"test_schema"} if torch.float8_e4m3fn in given else set()
            torch.library.opcheck(func, args, kwargs, test_utils=sorted(OPCHECKS - left_out))


@each_op
def test_small_samples_under_a_dispatch_mode(op: Operator) -> None:
    """The dispatcher refuses references whose results share memory with each other or with inputs:
    `torch.compile` and training would fail, for some arguments only."""
    for sample in op.cases.small:
        with CustomOpCalls() as asked:
            op.function(**sample.build("cpu"))
        assert asked.calls, sample.label


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_gpu)])
@each_op
def test_compiles_without_graph_breaks(op: Operator, device: str) -> None:
    arguments = op.cases.ordinary().build(device)
    expected = moved(op.outcome(op.public_reference, copies(arguments)), "cpu")
    torch._dynamo.reset()
    compiled = torch.compile(op.function, fullgraph=True, backend="aot_eager")
    op.cases.compare(moved(op.outcome(compiled, arguments), "cpu"), expected)


def flat(results: Any) -> list[Any]:
    """Results without the tuples around them."""
    return [r for part in results for r in flat(part)] if isinstance(results, tuple) else [results]


@each_op
def test_meta_tensors_give_shapes(op: Operator) -> None:
    arguments = op.cases.ordinary().build("cpu")
    expected = op.public_reference(**copies(arguments))
    shapes = op.function(**moved(arguments, "meta"))
    for shape, result in zip(flat(shapes), flat(expected)):
        if not isinstance(result, torch.Tensor):  # nothing but in-place results; a list
            assert shape == result
            continue
        assert shape.is_meta
        assert (shape.shape, shape.dtype, shape.stride()) == (
            result.shape,
            result.dtype,
            result.stride(),
        )


# ---- CUDA ---------------------------------------------------------------------------------------


def prepared(op: Operator) -> tuple[Arguments, Any]:
    """Arguments on the GPU, the kernel compiled and the result known."""
    arguments = op.cases.benchmarks[0].build("cuda")
    expected = op.outcome(op.function, copies(arguments))
    torch.cuda.synchronize()
    return arguments, expected


@on_gpu
@each_op
def test_runs_on_the_current_stream(op: Operator) -> None:
    """Work queued before on a side stream is seen: the inputs are filled there, late."""
    arguments, expected = prepared(op)
    late = copies(arguments)
    for value in tensors_in(late):
        value.zero_()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        for empty, value in zip(tensors_in(late), tensors_in(arguments)):
            empty.copy_(value)
        result = op.outcome(op.function, late)
    stream.synchronize()
    assert_equal_results(result, expected)


@on_gpu
@each_op
def test_graph_capture_and_replay(op: Operator) -> None:
    arguments, expected = prepared(op)
    static = copies(arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = op.outcome(op.function, static)
    for value in tensors_in(static):
        value.zero_()
    graph.replay()
    for fixed, value in zip(tensors_in(static), tensors_in(arguments)):
        fixed.copy_(value)
    graph.replay()
    torch.cuda.synchronize()
    assert_equal_results(result, expected)


@on_gpu
@each_op
def test_device_that_is_not_current(op: Operator) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    arguments = op.cases.ordinary().build("cuda:1")
    expected = op.outcome(op.public_reference, copies(moved(arguments, "cpu")))
    outcome = op.outcome(op.function, arguments)
    assert torch.cuda.current_device() == 0
    for result in outcome if isinstance(outcome, tuple) else (outcome,):
        assert result is None or result.device == torch.device("cuda:1")
    op.cases.compare(moved(outcome, "cpu"), expected)


@on_gpu
@pytest.mark.parametrize(
    "op",
    [op for op in OPS if op.cases.compare is not assert_equal_results],
    ids=lambda op: op.name,
)
def test_emulator_agrees_with_the_device(op: Operator) -> None:
    """For operators that are compared to a tolerance; others equal the reference on both."""
    for sample in emulated_by_default(op):
        arguments = sample.build("cuda")
        with tile_kernels.backend("emulate", mode="fast"):
            emulated = op.outcome(op.function, moved(arguments, "cpu"))
        op.cases.compare(moved(op.outcome(op.function, arguments), "cpu"), emulated)


@on_gpu
@each_op
def test_result_does_not_depend_on_the_sm_budget(op: Operator) -> None:
    arguments, expected = prepared(op)
    full = tile_kernels.get_device_num_sms()
    try:
        for budget in (1, full // 2):
            tile_kernels.set_num_sms(budget)
            assert_equal_results(op.outcome(op.function, copies(arguments)), expected)
    finally:
        tile_kernels.set_num_sms(full)


@each_op
def test_public_function_is_reachable_by_its_name(op: Operator) -> None:
    family = getattr(tile_kernels, op.family)
    assert getattr(family, op.short_name) is op.function
    assert op.short_name in family.__all__
