"""Calls of operators: checks, devices, backends, dispatcher, gradients; on toy operators."""

from __future__ import annotations

import inspect
import threading
from typing import Any, NamedTuple

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from torch import Tensor
from torch._library.custom_ops import CustomOpDef

import tile_kernels
from tile_kernels.runtime import bundles, checks, launch, logs, registry
from tile_kernels.runtime.declaration import Out
from tile_kernels.runtime.operator import Operator
from tile_kernels.runtime.pytorch import LateAutograd, define


class Axpy(NamedTuple):
    x: Tensor
    y: Tensor
    alpha: float
    bias: Tensor | None


def check_axpy(a: Axpy) -> None:
    checks.tensor("x", a.x, ("n",), torch.float32)
    checks.tensor("y", a.y, ("n",), torch.float32, shape=(a.x.shape[0],))
    if a.bias is not None:
        checks.tensor("bias", a.bias, ("n",), torch.float32)


def like_x(a: Any) -> Out:
    return Out("out", a.x.shape, a.x.dtype)


def no_launches(*_: Any) -> None:
    return None


def reference_axpy(x: Tensor, y: Tensor, alpha: float, bias: Tensor | None) -> Tensor:
    result = alpha * x + y
    return result if bias is None else result + bias


AXPY = Operator(
    "tests.axpy",
    Axpy,
    check=check_axpy,
    outputs=like_x,
    launches=no_launches,
    reference=reference_axpy,
    backward=lambda ctx, grad: (ctx.alpha * grad, grad, None, grad if ctx.with_bias else None),
    setup_context=lambda ctx, inputs, output: ctx.__dict__.update(  # noqa: ARG005
        alpha=inputs[2], with_bias=inputs[3] is not None
    ),
)


@AXPY.public()
def axpy(x: Tensor, y: Tensor, alpha: float, bias: Tensor | None = None) -> Tensor:
    """`alpha x + y`."""
    return AXPY(x, y, alpha, bias)


class OneTensor(NamedTuple):
    x: Tensor


def check_one(a: OneTensor) -> None:
    checks.tensor("x", a.x, ("n",))


def no_results(_: OneTensor) -> None:
    return None


def reference_double(x: Tensor) -> None:
    x.mul_(2)


DOUBLE = Operator(
    "tests.double",
    OneTensor,
    check=check_one,
    outputs=no_results,
    launches=no_launches,
    reference=reference_double,
    mutates=("x",),
)
NEGATED = Operator(
    "tests.negated",
    OneTensor,
    check=check_one,
    outputs=like_x,
    launches=no_launches,
    reference=torch.neg,
)


@DOUBLE.public()
def double(x: Tensor) -> None:
    """Double `x` in place."""
    DOUBLE(x)


@NEGATED.public()
def negated(x: Tensor) -> Tensor:
    """`-x`, without a gradient."""
    return NEGATED(x)


def test_cpu_tensors_run_the_reference() -> None:
    result = axpy(torch.ones(3), torch.ones(3), alpha=2.0)
    assert result.tolist() == [3, 3, 3]


def test_mixed_devices_are_named() -> None:
    with pytest.raises(ValueError, match=r"axpy: .*x is on cpu, y is on meta"):
        axpy(torch.ones(3), torch.ones(3, device="meta"), 1.0)


def test_errors_name_operator_argument_and_both_sides() -> None:
    with pytest.raises(ValueError, match=r"^axpy: y must have shape \[3\], got \(4,\)$"):
        axpy(torch.ones(3), torch.ones(4), 1.0)
    with pytest.raises(TypeError, match=r"^axpy: x must be float32, got int64$"):
        axpy(torch.ones(3, dtype=torch.int64), torch.ones(3), 1.0)


def test_sizes_beyond_32_bits_and_sparse_layouts_are_refused() -> None:
    huge = torch.empty(1, device="meta").expand(2**32 + 64, 1)
    with pytest.raises(ValueError, match="transpose: x must have sizes up to 2147418112"):
        tile_kernels.transpose.transpose(huge)
    with pytest.raises(TypeError, match=r"transpose: x must be a dense tensor, got layout"):
        tile_kernels.transpose.transpose(torch.eye(3).to_sparse())


def test_a_declared_name_cannot_be_declared_again() -> None:
    with pytest.raises(ValueError, match="declared twice"):
        Operator(
            "tests.axpy", Axpy, check=check_axpy, outputs=like_x, launches=no_launches,
            reference=reference_axpy,
        )  # fmt: skip


def test_registry_finds_by_function_and_by_name() -> None:
    assert registry.get(tile_kernels.moe.topk_gate) is registry.get("moe.topk_gate")
    with pytest.raises(KeyError, match=r"no operator 'moe\.nothing'"):
        registry.get("moe.nothing")
    assert registry.get(axpy) not in registry.all_ops()  # the library's own only


# ---- gradients ----------------------------------------------------------------------------------


def test_gradient_in_eager_code() -> None:
    x, y = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    axpy(x, y, 3.0).sum().backward()
    assert x.grad is not None
    assert y.grad is not None
    assert x.grad.tolist() == [3, 3, 3]
    assert y.grad.tolist() == [1, 1, 1]


def test_gradient_of_an_optional_argument_under_compile() -> None:
    torch._dynamo.reset()
    x, bias = torch.ones(3), torch.ones(3, requires_grad=True)
    compiled = torch.compile(
        lambda x, b: axpy(x, x, 3.0, bias=b) * 5, fullgraph=True, backend="aot_eager"
    )
    compiled(x, bias).sum().backward()
    assert bias.grad is not None
    assert bias.grad.tolist() == [5, 5, 5]


def test_no_gradient_is_an_error_not_a_silent_cut() -> None:
    x = torch.randn(4, requires_grad=True)
    with torch.no_grad():
        assert negated(x).tolist() == (-x).tolist()
    with pytest.raises(RuntimeError, match=r"^negated has no gradient; call it under"):
        negated(x).sum().backward()
    with fwAD.dual_level(), pytest.raises(RuntimeError, match="forward-mode derivatives"):
        negated(fwAD.make_dual(torch.ones(2), torch.ones(2)))


def test_no_gradient_is_the_same_error_in_older_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch 2.10 to 2.12 build the autograd kernel of a custom op themselves, at once."""
    if hasattr(CustomOpDef, "_register_autograd_dispatcher_impl"):  # what the others always do
        early = CustomOpDef._register_autograd_dispatcher_impl
        monkeypatch.setattr(LateAutograd, "_register_autograd_dispatcher_impl", early)
    name = inspect.Parameter("x", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=Tensor)
    signature = inspect.Signature([name], return_annotation=Tensor)
    plain, doubled = (
        define(
            f"older_{word}", signature, lambda x: 2 * x, torch.empty_like, (), f"{word} has none"
        )
        for word in ("plain", "doubled")
    )
    doubled.register_autograd(lambda _, grad: 2 * grad)
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"^plain has none$"):
        plain._opoverload(x).sum().backward()
    doubled._opoverload(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2, 2, 2]


def test_indices_need_no_gradient_and_skip_the_dispatcher(monkeypatch: pytest.MonkeyPatch) -> None:
    def dispatched(*_: object) -> None:
        raise AssertionError("went through the dispatcher")

    monkeypatch.setattr(torch._ops.OpOverload, "__call__", dispatched)
    scores = torch.randn(4, 8, requires_grad=True)
    assert not tile_kernels.moe.topk_gate(scores, 2).requires_grad


@pytest.mark.parametrize("compiled", [False, True])
def test_gradient_of_the_transposes(compiled: bool) -> None:
    torch._dynamo.reset()
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, 3, dtype=torch.float64)
    function = tile_kernels.transpose.transpose
    if compiled:
        function = torch.compile(function, fullgraph=True, backend="aot_eager")
    (function(x) * weight).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, weight.T)
    batch = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(tile_kernels.transpose.batched_transpose, (batch,))


def test_pending_negation_and_conjugation_are_applied() -> None:
    x = torch.randn(6, 4)
    with tile_kernels.backend("emulate"):
        assert torch.equal(tile_kernels.transpose.transpose(torch._neg_view(x)), -x.T)
        expected = tile_kernels.torch.stable_topk(-x, 2)
        assert torch.equal(tile_kernels.moe.topk_gate(torch._neg_view(x), 2), expected)
        z = torch.complex(x, x)
        assert torch.equal(tile_kernels.transpose.transpose(z.conj()), z.conj().T.resolve_conj())


# ---- dispatcher ---------------------------------------------------------------------------------


def test_mutation_is_declared() -> None:
    x = torch.ones(2)
    double(x)
    assert x.tolist() == [2, 2]
    schema = str(registry.get(double).custom_op._opoverload._schema)
    assert "Tensor(a0!) x" in schema
    torch._dynamo.reset()

    def doubled_twice(x: Tensor) -> Tensor:
        y = x.clone()
        double(y)
        double(y)
        return y

    compiled = torch.compile(doubled_twice, fullgraph=True, backend="aot_eager")
    assert compiled(torch.ones(2)).tolist() == [4, 4]


def test_compile_with_inductor() -> None:
    """The whole way, once: code generation for the CPU around our operators."""
    torch._dynamo.reset()

    def route(scores: Tensor) -> Tensor:
        return tile_kernels.moe.topk_gate(scores.sigmoid(), 2) + 1

    scores = torch.randn(6, 16)
    compiled = torch.compile(route, fullgraph=True)
    assert torch.equal(compiled(scores), route(scores))


def test_dynamic_shapes_compile_once() -> None:
    torch._dynamo.reset()
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(
        lambda s: tile_kernels.moe.topk_gate(s, 2), fullgraph=True, dynamic=True, backend=backend
    )
    for num_tokens in (5, 9, 17):
        scores = torch.randn(num_tokens, 16)
        assert torch.equal(compiled(scores), tile_kernels.moe.topk_gate(scores, 2))
    assert len(graphs) == 1


def test_sizes_known_at_run_time_only() -> None:
    """A boolean mask in front of the gate: common in routing code, and without a graph break."""
    torch._dynamo.reset()

    def route(scores: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        kept = scores[mask]
        return tile_kernels.moe.topk_gate(kept, 2), tile_kernels.transpose.transpose(kept)

    scores = torch.randn(6, 16)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(route, fullgraph=True, backend="aot_eager")
        for kept in (3, 6, 0):
            mask = torch.arange(6) < kept
            for result, expected in zip(compiled(scores, mask), route(scores, mask)):
                assert torch.equal(result, expected)


def test_fake_tensors_and_functorch_go_through_the_dispatcher() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        fake = mode.from_tensor(torch.randn(4, 8))
        assert tile_kernels.moe.topk_gate(fake, 3).shape == (4, 3)
    batch = torch.randn(2, 3, 4)
    mapped = torch.func.vmap(tile_kernels.transpose.transpose)(batch)
    assert torch.equal(mapped, batch.transpose(1, 2))


def test_error_under_compile_keeps_its_sentence() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda s: tile_kernels.moe.topk_gate(s, 99), fullgraph=True, backend="aot_eager"
    )
    with pytest.raises(Exception, match=r"num_topk must be in 1\.\.8"):
        compiled(torch.randn(4, 8))


# ---- backends -----------------------------------------------------------------------------------


def test_backend_override_and_its_limits() -> None:
    scores = torch.randn(2, 8)
    with tile_kernels.backend("torch"):
        assert tile_kernels.moe.topk_gate(scores, 2).shape == (2, 2)
    with (
        tile_kernels.backend("tilelang"),
        pytest.raises(ValueError, match="topk_gate: the backend 'tilelang' needs cuda tensors"),
    ):
        tile_kernels.moe.topk_gate(scores, 2)
    with pytest.raises(ValueError, match="must be one of auto, tilelang, torch, emulate"):
        tile_kernels.backend("cuda").__enter__()


def test_backend_override_is_per_thread() -> None:
    seen = []
    with tile_kernels.backend("tilelang"):
        thread = threading.Thread(
            target=lambda: seen.append(tile_kernels.moe.topk_gate(torch.randn(2, 8), 2).shape)
        )
        thread.start()
        thread.join()
    assert seen == [(2, 2)]


# ---- logs ---------------------------------------------------------------------------------------


@pytest.fixture
def quiet_after() -> Any:
    yield
    tile_kernels.set_log_level(0)


def test_log_levels(
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Any,
    quiet_after: None,
) -> None:
    monkeypatch.setattr(logs.logger, "propagate", True)
    monkeypatch.setattr(logs.settings, "folder", tmp_path)
    scores = torch.randn(2, 8)
    expected = {1: "topk_gate on torch", 2: "scores=float32[2,8] cpu, num_topk=2", 3: ".pt"}
    for level, words in expected.items():
        caplog.clear()
        tile_kernels.set_log_level(level)
        logs.logger.propagate = True
        tile_kernels.moe.topk_gate(scores, 2)
        assert words in caplog.text
    (file,) = tmp_path.iterdir()
    saved = torch.load(file)
    assert saved["op"] == "moe.topk_gate"
    assert torch.equal(saved["arguments"]["scores"], scores)
    with pytest.raises(ValueError, match="level must be 0, 1, 2 or 3"):
        tile_kernels.set_log_level(4)


# ---- kernels ------------------------------------------------------------------------------------


def test_first_compile_happens_once_however_many_threads_ask() -> None:
    kernel = launch.Kernel("no.module", "no_name", tuple)
    compiled, together = [], threading.Barrier(8)
    started = threading.Event()

    def make() -> Any:
        started.wait(5)
        compiled.append(1)
        return lambda: None

    handles = []

    def ask() -> None:
        together.wait(5)
        handles.append(kernel.once(("sm_90a", (1,)), make))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    started.set()
    for thread in threads:
        thread.join()
    assert len(compiled) == 1
    assert len(set(handles)) == 1


def test_each_architecture_has_a_compile_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = launch.Kernel("no.module", "no_name", tuple)
    compiled = []

    class Definition:
        def compile(self, static: Any, arch: str) -> Any:
            compiled.append((static, arch))
            return lambda: None

    monkeypatch.setattr(launch.Kernel, "definition", Definition())
    monkeypatch.setattr(bundles, "need_compiler", lambda _: None)
    asked = [((1,), "sm_90a"), ((1,), "sm_100a"), ((2,), "sm_90a")]
    handles = [kernel.handle(*each) for each in (*asked, *asked)]
    assert compiled == asked
    assert len(set(handles)) == 3


def test_a_failed_compile_reaches_everyone_and_can_be_tried_again() -> None:
    kernel = launch.Kernel("no.module", "no_name", tuple)

    def fail() -> Any:
        raise RuntimeError("no compiler")

    with pytest.raises(RuntimeError, match="no compiler"):
        kernel.once(("sm_90a", ()), fail)
    handle = kernel.once(("sm_90a", ()), lambda: "made")  # type: ignore[arg-type, return-value]
    assert handle == "made"


def test_recording_nests() -> None:
    scores = torch.empty(4, 8, device="meta")
    with launch.recording() as outer:
        tile_kernels.moe.topk_gate(scores, 2)
        with launch.recording() as inner:
            tile_kernels.moe.topk_gate(scores, 3)
    assert [request.problem[:2] for request in inner] == [(8, 3)]
    assert [request.problem[:2] for request in outer] == [(8, 2), (8, 3)]


# ---- what is written in place -------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["torch", "emulate"])
def test_autograd_knows_what_was_overwritten(backend: str) -> None:
    """A gradient that needs it is an error, not a wrong number."""
    idx = torch.tensor([[1, 1, 2]])
    weights = tile_kernels.moe.topk_weights(torch.randn(1, 4, requires_grad=True), idx)
    with tile_kernels.backend(backend):
        tile_kernels.moe.inplace_unique_group_indices(idx, 4)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        weights.sum().backward()

    x, residual = torch.ones(1, 8).bfloat16(), torch.ones(1, 2, 8).bfloat16()
    post, comb = torch.ones(1, 2, 1), torch.ones(1, 2, 2, requires_grad=True)
    next_one = tile_kernels.mhc.mhc_post(x, residual, post, comb)
    with tile_kernels.backend(backend), torch.no_grad():
        tile_kernels.mhc.mhc_post(x, residual.clone(), post, comb, out=residual)
        expected = residual.clone()
        tile_kernels.mhc.mhc_post(x, expected.clone(), post, comb, out=expected)
        tile_kernels.mhc.mhc_post(x, residual, post, comb, out=residual)  # which may be
    assert torch.equal(residual, expected)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        next_one.sum().backward()
    with torch.inference_mode(), tile_kernels.backend(backend):
        tile_kernels.moe.inplace_unique_group_indices(torch.tensor([[1, 1]]), 4)


@pytest.mark.parametrize("backend", ["torch", "emulate"])
def test_buffers_over_arguments_are_refused(backend: str) -> None:
    rows, places = torch.ones(3, 4), torch.tensor([[2, 1], [0, -1], [1, 0]]).int()
    memory = torch.ones(3, 2, 8).bfloat16()
    mix = torch.ones(2, 2, 1)
    with tile_kernels.backend(backend):
        with pytest.raises(ValueError, match=r"reduce_fused: out must not share memory with x"):
            tile_kernels.moe.reduce_fused(rows, None, places, out=rows)
        with pytest.raises(ValueError, match="out must not share memory with x"):
            tile_kernels.mhc.mhc_pre_apply_mix(memory[:2], mix, out=memory[1])
        with pytest.raises(ValueError, match="grad_x must not share memory with x"):
            tile_kernels.mhc.mhc_pre_apply_mix_bwd(memory[0], memory[:2], mix, memory[:2])
        tile_kernels.mhc.mhc_pre_apply_mix(memory[:2], mix, out=memory[2])  # side by side


def test_an_overlap_of_one_element_is_seen() -> None:
    memory = torch.zeros(9)
    checks.apart([("out", memory[5:])], [("x", memory[:5])])
    for out, x in ((memory[4:], memory[:5]), (memory[:5], memory[4:])):
        with pytest.raises(ValueError, match="out must not share memory with x"):
            checks.apart([("out", out)], [("x", x)])
