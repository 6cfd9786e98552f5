"""The step between two sublayers gives the bits of the operators that it joins."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tile_kernels
from tests.mhc.helpers import BF16, grounds, sublayer
from tile_kernels import config, mhc, quant
from tile_kernels.mhc.post_pre import op
from tile_kernels.mhc.post_pre.plan import FEW_TOKENS, divide, fits
from tile_kernels.runtime.cases import misaligned
from tile_kernels.runtime.declaration import Spec
from tile_kernels.runtime.device import described
from tile_kernels.runtime.launch import recording

NUMBERS = 1e-6, 1e-6, 1e-6, 2.0, 5


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams are projected while they are written, however few tokens there are."""
    monkeypatch.setattr(op, "FEW_TOKENS", 0)


def arguments(n: int, m: int, h: int, device: str) -> tuple[Tensor, ...]:
    """The tensors of `mhc_post_pre`."""
    residual, fn, scale, base = sublayer(n, m, h, device)
    x = torch.randn(1, n, h, device=device).to(BF16)
    post, comb = (torch.randn(1, n, m, last, device=device) for last in (1, m))
    return x, residual, post, comb, fn, scale, base


def chain(
    x: Tensor, residual: Tensor, post: Tensor, comb: Tensor, *parameters: Tensor
) -> tuple[Tensor, ...]:
    written = mhc.mhc_post(x, residual, post, comb)
    return written, *mhc.mhc_pre_big_fuse(written, *parameters, *NUMBERS)


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize(
    ("backend", "device", "n", "m", "h"),
    grounds(
        [(5, 4, 72), (2, 8, 64), (66, 2, 256), (3, 3, 512), (65, 4, 256)],
        [(n, 4, h) for n in (1, 64, 65, 512, 4096, 8192) for h in (1280, 2560, 7168)]
        + [(300, 7, 1288), (2049, 2, 4096), (1000, 3, 1024), (1000, 1, 7168)],
    ),
)
def test_the_bits_of_post_and_pre(backend: str, device: str, n: int, m: int, h: int) -> None:
    given = arguments(n, m, h, device)
    with tile_kernels.backend(backend):
        results = mhc.mhc_post_pre(*given, *NUMBERS)
        for result, expected in zip(results, chain(*given)):
            assert torch.equal(result, expected)


@pytest.mark.parametrize(
    ("backend", "device", "n", "m", "h"),
    grounds([(66, 4, 256)], [(n, 4, 7168) for n in (1, 64, FEW_TOKENS)]),
)
@pytest.mark.parametrize("group", [0, 32])
def test_few_tokens_have_the_same_bits(
    backend: str, device: str, n: int, m: int, h: int, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streams may be projected while they are written or afterwards."""
    given = arguments(n, m, h, device)
    weight = (1 + 0.1 * torch.randn(h, device=device)).to(BF16)

    def run(few: int) -> list[Tensor]:
        monkeypatch.setattr(op, "FEW_TOKENS", few)
        with tile_kernels.backend(backend):
            if group == 0:
                return list(mhc.mhc_post_pre(*given, *NUMBERS, weight, 1e-6))
            *streams, (data, sf) = mhc.mhc_post_pre_and_per_token_cast(
                *given, *NUMBERS, weight, 1e-6, group
            )
        return [*streams, data.view(torch.uint8), sf]

    for one, other in zip(run(0), run(n), strict=True):
        assert torch.equal(one, other)


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize(
    ("backend", "device", "n", "m", "h"),
    grounds([(3, 2, 1096), (5, 4, 256)], [(4096, 4, 7168), (13, 4, 2560)]),
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_norm_and_cast_follow_the_read(
    backend: str, device: str, n: int, m: int, h: int, dtype: torch.dtype
) -> None:
    """The norm is that of `norm_forward` but for the order of its sum: a step of bfloat16."""
    given = arguments(n, m, h, device)
    weight = (1 + 0.1 * torch.randn(h, device=device)).to(dtype)
    with tile_kernels.backend(backend):
        plain = mhc.mhc_post_pre(*given, *NUMBERS)
        normed = mhc.mhc_post_pre(*given, *NUMBERS, weight, 1e-6)
        cast = mhc.mhc_post_pre_and_per_token_cast(*given, *NUMBERS, weight, 1e-6, 32, True)
        alone = quant.norm_forward(plain[3][0], weight, 1e-6)[0]
        codes, scales = quant.per_token_cast(normed[3][0], "e4m3", 32, round_sf=True)
    for one, two, three in zip(plain[:3], normed[:3], cast[:3]):
        assert torch.equal(one, two)
        assert torch.equal(one, three)
    torch.testing.assert_close(normed[3][0], alone, rtol=2**-7, atol=0)
    assert (normed[3][0] != alone).float().mean() < 0.01
    assert torch.equal(cast[3][0][0].view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(cast[3][1][0], scales)


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize(
    ("backend", "device", "n", "m", "h"), grounds([(66, 2, 256)], [(66, 2, 256)])
)
def test_addresses_that_bulk_copies_do_not_take(
    backend: str, device: str, n: int, m: int, h: int
) -> None:
    given = arguments(n, m, h, device)
    with tile_kernels.backend(backend):
        expected = mhc.mhc_post_pre(*given, *NUMBERS)
        results = mhc.mhc_post_pre(*map(misaligned, given), *NUMBERS)
    for result, wanted in zip(results, expected, strict=True):
        assert torch.equal(result, wanted)


def test_launches() -> None:
    """Three kernels; the first two at once for many tokens, where the projection fits."""

    def kernels(n: int, m: int, h: int) -> list[Any]:
        tensors = [x.to("meta") for x in arguments(n, m, h, "cpu")]
        with recording() as launched:
            mhc.mhc_post_pre(*tensors, *NUMBERS)
        return [request.kernel.name for request in launched]

    at_once = ["cut_weights", "write_and_project", "read_from_products"]
    in_turn = ["post", "products", "read_from_products"]
    many = FEW_TOKENS + 1
    assert kernels(many, 4, 256) == kernels(10 * many, 4, 256) == at_once
    assert kernels(1, 4, 256) == kernels(FEW_TOKENS, 4, 256) == in_turn
    assert kernels(many, 4, 264) == kernels(many, 8, 256) == in_turn


def test_other_gpus_than_hopper_write_and_project_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [x.to("meta") for x in arguments(FEW_TOKENS + 1, 4, 256, "cpu")]
    cuda = torch.device("cuda", 0)
    residual = Spec(tuple(tensors[1].shape), tensors[1].stride(), BF16, cuda)
    record = op.Arguments(tensors[0], residual, *tensors[2:], *NUMBERS, None, 0.0, 0, False, 0.0)  # type: ignore[arg-type]
    for arch, sizes in (("sm_90a", ["mul", "squares", "weights"]), ("sm_100a", ["mul", "squares"])):
        device = described(arch)
        monkeypatch.setattr(config, "planned_device", lambda _, device=device: device)
        assert [out.name for out in record.scratch()] == sizes


def test_divisions_are_whole_parts_of_a_stream() -> None:
    for m, h in ((1, 256), (2, 4096), (3, 1024), (4, 1280), (4, 2560), (4, 7168)):
        assert fits(m, h)
        for n in (1, 64, 65, 300, 1024, 4096, 8192, 100_000):
            parts, run, fold = divide(n, m, h, 132)
            assert 1 <= run <= parts
            assert parts * fold * 256 >= h > (parts - 1) * fold * 256
    assert not fits(4, 7168 + 8)
    assert not fits(5, 7168)
    # 4096 tokens on an H200 are one block for each multiprocessor but four.
    parts, run, _ = divide(4096, 4, 7168, 132)
    assert 4096 // 64 * -(-parts // run) == 128


def test_no_gradient_is_lost() -> None:
    given = list(arguments(2, 2, 64, "cpu"))
    given[0].requires_grad_()
    with pytest.raises(RuntimeError, match=r"mhc_post_pre.*mhc_pre_fwd"):
        mhc.mhc_post_pre(*given, *NUMBERS)[0].sum().backward()
