"""The mixture-of-experts layer against every expert on every token."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tile_kernels
from tile_kernels.modeling.moe import MoELayer, grouped_linear
from tile_kernels.runtime import emulation


def activated(rows: Tensor, fp8: bool) -> Tensor:
    """`silu(gate) * value`, with `fp8` in e4m3, and the gradient of an input in e4m3."""
    if not fp8:
        return swiglu(rows)
    group = 128 if rows.shape[-1] % 256 == 0 else 32
    given = rows.detach().bfloat16().float()
    kept = rows + (in_e4m3(given, group) - rows).detach()
    y = swiglu(kept)
    return y + (in_e4m3(swiglu(given), group) - y).detach()


def swiglu(rows: Tensor) -> Tensor:
    gate, value = rows.chunk(2, -1)
    return F.silu(gate) * value


def in_e4m3(x: Tensor, group: int) -> Tensor:
    """What e4m3 keeps of float32, with a scale for each group of channels."""
    groups = x.unflatten(-1, (-1, group))
    scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448
    return ((groups / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2)


def plain(layer: MoELayer, x: Tensor) -> Tensor:
    """The layer's formula, with the layer's parameters, without routing."""
    tokens = x.reshape(-1, x.shape[-1])
    logits = tokens.float() @ layer.router.T
    scores = {
        "sigmoid": torch.sigmoid,
        "softmax": lambda z: z.softmax(-1),
        "sqrtsoftplus": lambda z: F.softplus(z).sqrt(),
    }[layer.scoring_func](logits)
    ranks = (logits if layer.scoring_func == "softmax" else scores) + layer.expert_bias
    chosen = ranks.topk(layer.num_topk).indices
    weights = scores.gather(1, chosen)
    weights = layer.routed_scaling_factor * weights / weights.sum(1, keepdim=True)
    inside = activated(torch.einsum("th,eoh->teo", tokens, layer.w_in), layer.fp8)
    every = torch.einsum("tei,ehi->teh", inside, layer.w_out)
    picked = every.gather(1, chosen[:, :, None].expand(-1, -1, every.shape[-1]))
    y = (picked * weights[:, :, None]).sum(1)
    if layer.shared_in is not None and layer.shared_out is not None:
        y = y + activated(tokens @ layer.shared_in.T, layer.fp8) @ layer.shared_out.T
    return y.view(x.shape)


def layer_of(**changes: Any) -> MoELayer:
    torch.manual_seed(1)
    settings = {"hidden": 24, "intermediate": 32, "num_experts": 6, "num_topk": 2, **changes}
    layer = MoELayer(**settings)
    layer.expert_bias.copy_(0.1 * torch.randn(layer.num_experts))
    return layer


def values_and_gradients(layer: MoELayer, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """The output and all gradients, of the layer and of its formula."""
    leaves = [x, *layer.parameters()]
    found, expected = layer(x), plain(layer, x)
    grad = torch.randn_like(found)
    return (
        [found, *torch.autograd.grad(found, leaves, grad)],
        [expected, *torch.autograd.grad(expected, leaves, grad)],
    )


def distance(one: Tensor, other: Tensor) -> float:
    return ((one - other).float().norm() / other.float().norm()).item()


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scoring_func", ["sigmoid", "sqrtsoftplus", "softmax"])
@pytest.mark.parametrize("shared", [0, 2])
def test_is_the_formula(scoring_func: str, shared: int, device: str) -> None:
    layer = layer_of(
        scoring_func=scoring_func, num_shared_experts=shared, routed_scaling_factor=1.5
    ).to(device)
    x = torch.randn(3, 7, 24).to(device).requires_grad_()
    for one, other in zip(*values_and_gradients(layer, x)):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scoring_func", ["sigmoid", "sqrtsoftplus", "softmax"])
@pytest.mark.parametrize("intermediate", [32, 128])
def test_fp8_is_the_formula(scoring_func: str, intermediate: int, device: str) -> None:
    """Groups of 32 and of 128 channels.

    The formula rounds where the layer rounds, so that they differ only where the sums before are in
    another order and a number goes to the next code, 2^-4 of it away. That is rare; without any
    rounding the distance is that of e4m3, some hundredths (`test_fp8_is_near`).
    """
    layer = layer_of(
        scoring_func=scoring_func, num_shared_experts=1, intermediate=intermediate, fp8=True
    ).to(device)
    x = torch.randn(100, 24).to(device).requires_grad_()
    found, expected = values_and_gradients(layer, x)
    assert max(map(distance, found, expected)) < 1e-2
    layer.fp8 = False
    assert distance(layer(x), expected[0]) > 1e-2


@pytest.mark.usefixtures("plain_matrix_products")
@pytest.mark.parametrize(
    ("device", "engine"),
    [
        ("cpu", "loop"),
        pytest.param("cuda", "loop", marks=pytest.mark.gpu),
        pytest.param("cuda", "grouped_mm", marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("scoring_func", ["sigmoid", "sqrtsoftplus", "softmax"])
def test_bfloat16_is_near_the_formula(
    scoring_func: str, fp8: bool, device: str, engine: str
) -> None:
    """The formula in float32, from the same numbers of bfloat16.

    Every result and gradient on the way is rounded to bfloat16, 2^-9 of it at most; there are a few
    of these in a row.
    """
    wide = layer_of(
        hidden=64, intermediate=128, scoring_func=scoring_func, fp8=fp8, engine=engine
    ).to(device)
    layer = copy.deepcopy(wide)
    for name in ("w_in", "w_out"):
        rounded = getattr(wide, name).data.bfloat16()
        getattr(layer, name).data, getattr(wide, name).data = rounded, rounded.float()
    x = torch.randn(300, 64).to(device, torch.bfloat16).requires_grad_()
    exact = x.detach().float().requires_grad_()
    y, expected = layer(x), plain(wide, exact)
    grad = torch.randn_like(y)
    found = torch.autograd.grad(y, [x, *layer.parameters()], grad)
    wanted = torch.autograd.grad(expected, [exact, *wide.parameters()], grad.float())
    assert distance(y, expected) < 1e-2
    assert max(map(distance, found, wanted)) < 2e-2


def test_groups_are_honoured() -> None:
    layer = layer_of(num_experts=8, num_groups=4, num_topk_groups=2)
    idx, weights = layer.route(torch.randn(50, 24))
    assert all(len(set((row // 2).tolist())) <= 2 for row in idx)
    torch.testing.assert_close(weights.sum(1), torch.ones(50))


@pytest.mark.parametrize("groups", [(0, 0), (4, 2)])
def test_no_tokens(groups: tuple[int, int]) -> None:
    layer = layer_of(num_experts=8, num_groups=groups[0], num_topk_groups=groups[1])
    assert layer(torch.empty(0, 24)).shape == (0, 24)


def test_one_token() -> None:
    layer = layer_of(num_shared_experts=1)
    x = torch.randn(24)
    torch.testing.assert_close(layer(x), plain(layer, x), rtol=1e-4, atol=1e-5)


def test_load_and_bias() -> None:
    layer = layer_of(num_topk=1)
    with torch.no_grad():
        layer.router.zero_()
        layer.expert_bias.zero_()
    x = torch.randn(40, 24)
    layer(x)
    assert layer.load.tolist() == [40, 0, 0, 0, 0, 0]  # ties go to the first
    layer.update_bias(0.25)
    assert layer.expert_bias.tolist() == [-0.25, 0.25, 0.25, 0.25, 0.25, 0.25]
    layer(x)
    assert layer.load.tolist() == [0, 40, 0, 0, 0, 0]
    assert "expert_bias" in layer.state_dict()
    assert "load" not in layer.state_dict()


@pytest.mark.parametrize("scoring_func", ["sigmoid", "sqrtsoftplus", "softmax"])
def test_balance_loss(scoring_func: str) -> None:
    layer = layer_of(balancing="loss", scoring_func=scoring_func, num_topk=1)
    with pytest.raises(ValueError, match="balance_loss needs a call first"):
        layer.balance_loss()
    with pytest.raises(ValueError, match="update_bias needs"):
        layer.update_bias()
    x = torch.randn(60, 24)
    optimizer = torch.optim.SGD([layer.router], lr=0.3)
    with torch.no_grad():
        layer.expert_bias.zero_()
        layer.router[0] += 0.5 * x.mean(0) + 1.0
    layer(x)
    before = float(layer.balance_loss())
    for _ in range(40):
        layer(x)
        optimizer.zero_grad()
        layer.balance_loss().backward()
        optimizer.step()
    layer(x)
    assert float(layer.balance_loss()) < before
    assert before > 1.0


def test_fp8_is_near() -> None:
    exact, rounded = layer_of(), layer_of(fp8=True)
    rounded.load_state_dict(exact.state_dict())
    x = torch.randn(30, 24, requires_grad=True)
    grads = []
    for layer in (exact, rounded):
        y = layer(x)
        grads.append((y, *torch.autograd.grad(y.square().sum(), [x, layer.w_in, layer.router])))
    for one, other in zip(*grads):
        error = (one - other).norm() / one.norm()
        assert 0 < error < 0.08


@pytest.mark.slow
def test_trains() -> None:
    """It learns a function that no single expert of this size can."""
    layer = layer_of(num_shared_experts=1)
    x = torch.randn(256, 24)
    target = torch.where(x[:, :1] > 0, x.roll(1, 1), -x.flip(1))
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-2)
    losses = []
    for _ in range(60):
        loss = F.mse_loss(layer(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        layer.update_bias()
        losses.append(float(loss))
    assert losses[-1] < 0.3 * losses[0]


def test_kernels_and_references_agree() -> None:
    layer = layer_of()
    x = torch.randn(5, 24)
    with tile_kernels.backend("emulate"):
        emulated = layer(x)
    torch.testing.assert_close(emulated, layer(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scoring_func", ["sqrtsoftplus", "softmax"])
def test_kernels_and_references_agree_backwards(scoring_func: str) -> None:
    """The same with e4m3, and the gradients of all parameters through emulated kernels."""
    layer = layer_of(scoring_func=scoring_func, fp8=True)
    x = torch.randn(5, 24, requires_grad=True)
    leaves, grad = [x, *layer.parameters()], torch.randn(5, 24)
    with tile_kernels.backend("emulate"), emulation.reports() as launches:
        emulated = layer(x)
        found = torch.autograd.grad(emulated, leaves, grad)
    assert len(launches) > 5
    y = layer(x)
    torch.testing.assert_close(emulated, y, rtol=1e-4, atol=1e-5)
    for one, other in zip(found, torch.autograd.grad(y, leaves, grad)):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_meta_initialisation() -> None:
    with torch.device("meta"):
        layer = MoELayer(24, 32, 6, 2, num_shared_experts=1)
    layer = layer.to_empty(device="cpu")
    layer.reset_parameters()
    assert layer(torch.randn(4, 24)).isfinite().all()


@pytest.mark.gpu
def test_engines_agree_on_cuda() -> None:
    layer = layer_of(hidden=64, intermediate=128).to("cuda", torch.bfloat16)
    layer.router.data, layer.expert_bias = layer.router.data.float(), layer.expert_bias.float()
    x = torch.randn(300, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    results = []
    for engine in ("loop", "grouped_mm"):
        layer.engine = engine
        y = layer(x)
        results.append((y, *torch.autograd.grad(y.float().square().sum(), [x, layer.w_in])))
    for one, other in zip(*results):
        torch.testing.assert_close(one, other, rtol=3e-2, atol=3e-2)


def test_wrong_arguments_in_words() -> None:
    for change, words in (
        ({"num_topk": 7}, "num_topk must be in 1..6"),
        ({"scoring_func": "tanh"}, "scoring_func must be one of sigmoid"),
        ({"balancing": "hope"}, "balancing must be one of bias, loss, none, got 'hope'"),
        ({"engine": "fast"}, "engine must be one of auto"),
        ({"num_shared_experts": -1}, "num_shared_experts must be in 0"),
        ({"fp8": True, "intermediate": 24}, "intermediate must be a multiple of 32 with fp8"),
    ):
        with pytest.raises(ValueError, match=f"MoELayer: {words}"):
            layer_of(**change)
    with pytest.raises(ValueError, match="x must have 24 channels"):
        layer_of()(torch.randn(3, 25))
    with pytest.raises(ValueError, match="engine grouped_mm needs bfloat16"):
        grouped_linear(
            torch.ones(1, 2), torch.ones(1, 2, 2), [1], torch.ones(1).int(), "grouped_mm"
        )


# ---- as a module --------------------------------------------------------------------------------


@pytest.mark.parametrize("scoring_func", ["sigmoid", "sqrtsoftplus", "softmax"])
def test_under_autocast(scoring_func: str) -> None:
    """The router computes in float32 all the same, so the same experts are chosen."""
    torch.manual_seed(0)
    layer = MoELayer(16, 32, 4, 2, scoring_func=scoring_func, num_shared_experts=1)
    x = torch.randn(5, 16)
    expected = layer(x)
    chosen = layer.route(x)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
        assert torch.equal(layer.route(x)[0], chosen)
    y.float().sum().backward()
    assert layer.router.grad is not None
    torch.testing.assert_close(y.float(), expected, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_converted(dtype: torch.dtype) -> None:
    """All parameters, but not the bias, whose steps are too small for most dtypes."""
    layer = MoELayer(16, 32, 4, 2, num_shared_experts=1).to(dtype)
    layer(torch.randn(3, 16, dtype=dtype)).sum().backward()
    before = layer.expert_bias.clone()
    layer.update_bias(1e-4)
    assert layer.expert_bias.dtype == torch.float32
    assert torch.allclose((layer.expert_bias - before).abs().max(), torch.tensor(1e-4))


def test_default_dtype_does_not_reach_the_router() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        layer = MoELayer(16, 32, 4, 2)
        assert layer(torch.randn(3, 16)).dtype == torch.bfloat16
    finally:
        torch.set_default_dtype(torch.float32)
    assert layer.router.dtype == layer.expert_bias.dtype == torch.float32


@pytest.mark.parametrize(
    "x", [torch.randn(16, 3).T, torch.randn(1, 16).expand(5, 16)], ids=["transposed", "expanded"]
)
def test_any_strides(x: torch.Tensor) -> None:
    layer = MoELayer(16, 32, 4, 2)
    assert torch.equal(layer(x), layer(x.contiguous()))


def test_balance_loss_without_tokens_and_copies() -> None:
    layer = MoELayer(16, 32, 4, 2, balancing="loss")
    layer(torch.randn(0, 16))
    assert layer.balance_loss() == 0
    layer(torch.randn(3, 16))
    copied = copy.deepcopy(layer)
    with pytest.raises(ValueError, match="needs a call first"):
        copied.balance_loss()
    assert layer.balance_loss() > 0
    assert torch.equal(copied.w_in, layer.w_in)


def test_groups_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="num_groups must divide the 4 experts, got 3"):
        MoELayer(16, 32, 4, 2, num_groups=3, num_topk_groups=1)
    with pytest.raises(ValueError, match=r"x must have 16 channels, got shape \(\)"):
        MoELayer(16, 32, 4, 2)(torch.tensor(1.0))
