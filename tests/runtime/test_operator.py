"""Cached calls, on a machine without a GPU: compiled handles are emulated kernels.

`Tensor.get_device` answers 0, so that CPU tensors are cached like CUDA tensors. Results are
compared with the reference.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.selection import emulated_by_default, operators
from tests.test_ops import copies
from tile_kernels import attention, config, mhc, moe, transpose
from tile_kernels.mhc.pre import reference as pre_reference
from tile_kernels.mhc.pre.op import pre_gradients
from tile_kernels.runtime import emulation, launch, operator, prepared, registry
from tile_kernels.runtime.cases import assert_equal_results, moved, tensors_in
from tile_kernels.runtime.declaration import Launch, Size, Spec
from tile_kernels.runtime.device import described
from tile_kernels.runtime.operator import Operator
from tile_kernels.torch import mhc as mhc_references
from tile_kernels.transpose import reference

OPERATORS = registry.operators()
_GENERATIONS = itertools.count(1)
PUBLIC = operators()  # the library's own: other tests declare operators too
each_operator = pytest.mark.parametrize("op", PUBLIC, ids=lambda each: each.name)


@pytest.fixture
def evaluated(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of operators whose `launches` were evaluated; calls on the CPU are cached."""

    def handle(self: Any, static: Any, arch: str) -> Any:
        options = emulation.Options()  # those of other tests, whose kernels are compiled already
        build = lambda: emulation._build(self, static, options)  # noqa: E731
        return self.once(("emulate", options, static), build)

    monkeypatch.setattr(Tensor, "get_device", lambda _: 0)
    monkeypatch.setattr(operator, "current_device", int)
    monkeypatch.setattr(operator.backends, "choose", lambda _: "tilelang")
    monkeypatch.setattr(config, "planned_device", lambda _: described())
    monkeypatch.setattr(launch.Kernel, "handle", handle)
    # Kernels remember handles by problem: none of other tests may be found.
    monkeypatch.setattr(config, "generation", -next(_GENERATIONS))
    found: list[str] = []
    prepare = Operator._prepare
    monkeypatch.setattr(
        Operator, "_prepare", lambda self, *args: found.append(self.name) or prepare(self, *args)
    )
    for each in OPERATORS:
        each.forget()
    yield found
    for each in OPERATORS:
        each.forget()


def first_samples(op: Operator) -> list[Any]:
    """A few samples: their call runs three times each."""
    samples = emulated_by_default(op)
    return samples[:: max(1, len(samples) // 3)]


@pytest.mark.emulated
@each_operator
def test_repeated_calls_give_the_reference(op: Operator, evaluated: list[str]) -> None:
    """The arguments of earlier calls are overwritten, so that nothing of them can be kept."""
    samples = first_samples(op)
    evaluated.clear()  # choosing the samples plans their kernels
    for sample in samples:
        arguments = sample.build("cpu")
        expected = op.outcome(op.public_reference, copies(arguments))
        for _ in range(3):
            given = copies(arguments)
            op.cases.compare(op.outcome(op.function, given), expected)
            for tensor in tensors_in(given):
                if 0 not in tensor.stride():
                    tensor.untyped_storage().fill_(0xA5)
    assert len(evaluated) <= 2 * len(samples)


@pytest.mark.emulated
@pytest.mark.parametrize("adding", [False, True])
def test_repeated_gradients_before_a_sublayer(adding: bool, evaluated: list[str]) -> None:
    """An operator with scratch that passes from launch to launch, and one written argument."""
    for seed in range(3):
        torch.manual_seed(seed)
        residual, fn = torch.randn(5, 2, 16).bfloat16(), torch.randn(8, 32) / 6
        given = (residual, fn, torch.randn(3), torch.randn(8))
        results = pre_reference.mhc_pre_fwd(*given, 1e-6, 0.0, 1e-6, 2.0, 3)
        grads = [torch.randn_like(each) for each in results[:3]]
        saved, numbers = (*given, *results[3:]), (1e-6, 1e-6, 2.0, 3)
        totals = [torch.ones_like(residual) if adding else None for _ in range(2)]
        found = pre_gradients(saved, (grads[0], grads[1], grads[2]), totals[0], numbers)
        expected = pre_reference.mhc_pre_bwd(*grads, *saved, *numbers, totals[1])
        assert not adding or found[0] is totals[0]
        for one, other in zip(found, expected):
            torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)
    assert len(evaluated) == 1


@each_operator
def test_dynamic_declaration_is_honest(op: Operator, evaluated: list[str]) -> None:
    """Calls with equal keys have equal launches, apart from `Size`."""
    launches: dict[Any, Any] = {}
    call_key, launched = Operator._call_key, Operator._launched
    current: list[Any] = []

    def key(self: Any, args: Any, values: Any) -> Any:
        found = call_key(self, args, values)
        plan = None if found is None else self._keys(found, values, len(self._flat(args))).plan
        current[:] = [(self.name, plan)]
        return None  # so that launches are evaluated every time

    def launch_all(self: Any, record: Any, specs: Any) -> Any:
        found = launched(self, record, specs)
        words = [
            (each.kernel.name if isinstance(each, Launch) else each.function,
             tuple("size" if isinstance(x, Size) else x for x in getattr(each, "problem", ())),
             [described_argument(x) for x in each.arguments])
            for each in found
        ]  # fmt: skip
        if current and current[0][1] is not None:
            assert launches.setdefault(current[0], words) == words
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Operator, "_call_key", key)
        patch.setattr(Operator, "_launched", launch_all)
        patch.setattr(launch.Kernel, "bound", lambda *_: None)  # nothing is compiled or launched
        patch.setattr(prepared.Plan, "run", lambda *_: None)
        for sample in op.cases.small:
            # A public function may unpack the result, which is None here.
            with contextlib.suppress(TypeError, AttributeError):
                op.function(**sample.build("cpu"))


def described_argument(x: Any) -> Any:
    """A launch argument without what depends on sizes."""
    if isinstance(x, Size):
        return "size"
    if not isinstance(x, Spec):
        return x
    if isinstance(x.source, int):
        return x.source
    spec, function, operands = x.source
    return described_argument(spec), function, operands


@each_operator
def test_public_function_passes_every_argument(op: Operator) -> None:
    """`Operator.__call__` takes all fields by position."""
    assert all(
        parameter.kind is not inspect.Parameter.VAR_POSITIONAL
        for parameter in op.signature.parameters.values()
    )


def test_new_sizes_reuse_the_plan(evaluated: list[str]) -> None:
    for rows in (5, 9, 1, 300, 7, 9):
        x = torch.randn(rows, 32).bfloat16()
        assert_equal_results(transpose.transpose(x), reference.transpose(x))
    assert len(evaluated) == 1
    transpose.transpose(torch.empty(0, 32).bfloat16())
    assert len(evaluated) == 2  # no elements: nothing to launch


def test_a_dynamic_size_of_one_is_not_special(evaluated: list[str]) -> None:
    """`[5, 1, h]` viewed as `[tokens, 1, h]` is itself, other sizes of the same plan are not."""
    for leading in ((5, 1), (5, 2), (1, 1), (3, 4)):
        hidden = torch.randn(*leading, 16).bfloat16()
        expected = mhc_references.expand_to_mhc(hidden, 2)
        assert_equal_results(mhc.expand_to_mhc(hidden, 2), expected)
    assert len(evaluated) == 1


def test_sizes_without_results_launch_nothing(
    evaluated: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty grid cannot be launched; fewer tokens than a window have no entry."""
    launched: list[int] = []
    monkeypatch.setattr(launch.Kernel, "bound", lambda *_: lambda *_: launched.append(1))
    for tokens, count in ((8, 1), (3, 1), (9, 2)):
        x = torch.ones(tokens, 8)
        assert attention.kv_compress(x, x, torch.zeros(4, 8)).shape == (tokens // 4, 8)
        assert len(launched) == count
    assert len(evaluated) == 1


def test_misaligned_and_strided_tensors_have_other_plans(evaluated: list[str]) -> None:
    wide = torch.randn(6, 64).bfloat16()
    for x in (wide[:, :32], wide[:1, :32], wide[:, 1:33], wide[:, :32].clone()):
        for _ in range(2):
            assert_equal_results(transpose.transpose(x), reference.transpose(x))
    assert len(evaluated) == 3  # the first row is contiguous, like the clone


def test_numbers_that_are_equal_but_not_the_same_have_other_plans(
    evaluated: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch.Kernel, "bound", lambda *_: lambda *_: None)
    logits, chosen = torch.zeros(4, 32), torch.zeros(4, 4, dtype=torch.int64)
    for factor in (0.0, -0.0, 0.0, -0.0):
        moe.topk_weights(logits, chosen, "sigmoid", factor)
    assert len(evaluated) == 2
    moe.topk_gate(logits, 1)
    with pytest.raises(TypeError, match=r"^topk_gate: num_topk must be an int, got bool"):
        moe.topk_gate(logits, True)


def test_errors_after_a_hit(evaluated: list[str]) -> None:
    transpose.transpose(torch.ones(4, 4))
    with pytest.raises(ValueError, match=r"^transpose: x must have 2 dimensions"):
        transpose.transpose(torch.ones(4, 4, 4))


def test_a_changed_sm_budget_is_a_new_plan(
    evaluated: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    transpose.transpose(torch.ones(4, 4))
    monkeypatch.setattr(config, "generation", config.generation + 1)
    transpose.transpose(torch.ones(4, 4))
    assert len(evaluated) == 2


def test_caches_are_bounded_and_threads_agree(
    evaluated: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operator, "MAX_PLANS", 4)
    monkeypatch.setattr(operator, "MAX_SIZES", 4)
    monkeypatch.setattr(operator, "MAX_CALLS", 4)
    wrong: list[int] = []

    def work(seed: int) -> None:
        for size in range(1, 40):  # 13 widths, each with up to 12 numbers of rows
            x = torch.randn(size + seed, 4 + size % 13)
            if not torch.equal(transpose.transpose(x), x.T):
                wrong.append(size)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not wrong
    declared = registry.get("transpose.transpose")
    plans = declared._plans
    assert len(declared._calls) <= 8
    assert len(plans) <= 4 + 4  # a thread may be between the bound and its insertion
    assert all(len(plan.sizes) <= 8 for plan in plans.values())


@each_operator
def test_warm_up_sees_what_a_call_launches(
    op: Operator, evaluated: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = op.cases.ordinary()
    asked: list[Any] = []

    def bound(self: Any, problem: Any, index: int) -> Any:
        asked.append((self.name, problem))
        return lambda *_: None

    monkeypatch.setattr(launch.Kernel, "bound", bound)
    op.function(**sample.build("cpu"))
    monkeypatch.undo()
    with launch.recording() as requests:
        op.function(**moved(sample.build("cpu"), "meta"))
    assert [(each.kernel.name, each.problem) for each in requests] == asked


def test_stack_depth_on_a_hit(evaluated: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """At most four Python frames from the public function to the launch."""
    depths: list[int] = []
    monkeypatch.setattr(
        launch.Kernel, "bound", lambda *_: lambda *_: depths.append(len(inspect.stack(0)))
    )
    here = len(inspect.stack(0))
    x = torch.ones(4, 4)
    transpose.transpose(x)
    transpose.transpose(x)
    assert depths[-1] - here - 1 <= 4


def test_schemas_are_those_that_pytorch_infers() -> None:
    for op in registry.operators():
        implemented = op.custom_op._init_fn
        inferred = torch.library.infer_schema(implemented, mutates_args=op._schema_mutates)
        assert str(op.custom_op._opoverload._schema).partition("(")[2] == inferred[1:]
