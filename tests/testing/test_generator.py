import math
import random

import pytest
import torch

from tile_kernels import config
from tile_kernels.testing import generator

FULL_PAIRS = [
    (9, 8), (72, 1), (1, 72), (32, 8), (4, 64), (256, 1), (1, 256),
    (36, 8), (288, 1), (4, 72), (48, 8), (6, 64), (384, 1),
]  # fmt: skip


@pytest.fixture(autouse=True)
def default_mode(monkeypatch):
    monkeypatch.delenv("TK_FULL_TEST", raising=False)


@pytest.fixture(params=["1", "true", "True"])
def full_mode(request, monkeypatch, default_mode):
    monkeypatch.setenv("TK_FULL_TEST", request.param)


@pytest.mark.parametrize("value", ["0", "", "yes", "TRUE"])
def test_other_values_do_not_enable_full_mode(monkeypatch, value):
    monkeypatch.setenv("TK_FULL_TEST", value)
    assert generator.generate_num_tokens() == [4001, 8001]


def test_num_tokens():
    assert generator.generate_num_tokens() == [4001, 8001]
    assert generator.generate_num_tokens(64) == [4032, 8064]


def test_num_tokens_full(full_mode):
    assert generator.generate_num_tokens(64) == [0, 4032, 8064]
    assert generator.generate_num_tokens(is_benchmark=True) == [4001, 8001]


def test_hidden_sizes():
    all_sizes = [576, 2048, 2560, 3072, 4096, 6144, 7168]
    assert generator.generate_hidden_sizes() == all_sizes
    assert generator.generate_hidden_sizes(128) == all_sizes[1:]
    assert generator.generate_hidden_sizes(align=256) == all_sizes[1:]
    assert generator.generate_hidden_sizes(1024) == [2048, 3072, 4096, 6144, 7168]


@pytest.mark.parametrize(
    ("num_sms", "expected", "expected_full"),
    [
        (132, [112, 132], [1, 112, 132]),
        (22, [2, 22], [1, 2, 22]),
        (21, [1, 21], [1, 21]),
        (20, [10, 20], [1, 10, 20]),
        (2, [1, 2], [1, 2]),
        (1, [1], [1]),
    ],
)
def test_num_sms(monkeypatch, num_sms, expected, expected_full):
    monkeypatch.setattr(config, "get_device_num_sms", lambda: num_sms)
    assert generator.generate_num_sms() == expected
    monkeypatch.setenv("TK_FULL_TEST", "1")
    assert generator.generate_num_sms() == expected_full


def test_num_sms_of_this_machine():
    budgets = generator.generate_num_sms()
    assert budgets[-1] == config.get_device_num_sms()
    assert all(0 < budget <= budgets[-1] for budget in budgets)


def test_moe_params():
    params = list(generator.generate_moe_params())
    assert params == list(generator.generate_moe_params(is_benchmark=True))
    assert len(params) == 12
    keys = ["num_send_tokens", "num_topk", "num_experts", "num_ep_ranks"]
    assert all(list(p) == keys for p in params)
    assert [tuple(p.values()) for p in params] == [
        (4001, k, experts, ranks)
        for k in (2, 6, 8, 9)
        for experts, ranks in ((9, 8), (32, 8), (4, 64))
    ]


def test_moe_params_full(full_mode):
    params = [tuple(p.values()) for p in generator.generate_moe_params()]
    assert len(params) == 79
    assert params[0] == (0, 1, 1, 1)
    expected = [(4001, k, *pair) for k in (2, 6, 8, 9, 1, 7) for pair in FULL_PAIRS]
    assert params[1:] == expected
    benchmark = generator.generate_moe_params(is_benchmark=True)
    assert [tuple(p.values()) for p in benchmark] == expected


def moe(num_send_tokens, num_topk, num_experts, num_ep_ranks):
    return {
        "num_send_tokens": num_send_tokens,
        "num_topk": num_topk,
        "num_experts": num_experts,
        "num_ep_ranks": num_ep_ranks,
        "ignored": "yes",
    }


@pytest.mark.parametrize("num_topk", [1, 2, 9])
def test_topk_idx_structure(num_topk):
    idx = generator.generate_topk_idx(moe(301, num_topk, 4, 8), device="cpu")
    assert idx.dtype == torch.int64
    assert idx.is_contiguous()
    assert idx.shape[1] == num_topk
    assert idx.min() == -1 if num_topk > 1 else idx.min() == 0
    assert idx.max() == 3
    assert (idx >= 0).any(dim=1).all()
    for row in idx.tolist():
        valid = [i for i in row if i >= 0]
        assert len(set(valid)) == len(valid)


def test_topk_idx_padding_stands_anywhere():
    idx = generator.generate_topk_idx(moe(4001, 6, 9, 8), device="cpu")
    assert ((idx == -1).float().mean(dim=0) - 0.78).abs().max() < 0.1


# From the specification: rows expected with tokens routed uniformly, and 4001 * num_topk slots.
@pytest.mark.parametrize(
    ("num_topk", "num_experts", "num_ranks", "rows"),
    [
        (2, 9, 8, 7551), (6, 9, 8, 18088), (8, 9, 8, 21651), (9, 9, 8, 23107),
        (2, 32, 8, 7516), (6, 32, 8, 17765), (8, 32, 8, 21184), (9, 32, 8, 22581),
        (2, 4, 64, 7955), (9, 4, 64, 34345),
    ],
)  # fmt: skip
def test_topk_idx_expected_rows(num_topk, num_experts, num_ranks, rows):
    idx = generator.generate_topk_idx(moe(4001, num_topk, num_experts, num_ranks), device="cpu")
    # Five standard deviations of a binomial count, the slots' being no larger.
    assert abs(idx.shape[0] - rows) < 5 * math.sqrt(rows)
    slots = 4001 * num_topk
    assert abs(int((idx >= 0).sum()) - slots) < 5 * math.sqrt(slots)


def test_topk_idx_without_tokens():
    idx = generator.generate_topk_idx(moe(0, 3, 4, 2), device="cpu")
    assert idx.shape == (0, 3)
    assert idx.dtype == torch.int64


def test_topk_idx_follows_the_seed():
    params = moe(100, 2, 4, 8)
    torch.manual_seed(1)
    first = generator.generate_topk_idx(params, device="cpu")
    other = generator.generate_topk_idx(params, device="cpu")
    torch.manual_seed(1)
    assert torch.equal(first, generator.generate_topk_idx(params, device="cpu"))
    assert not torch.equal(first, other)


def test_topk_idx_in_parts(monkeypatch):
    monkeypatch.setattr(generator, "_SCORES_AT_ONCE", 100)
    idx = generator.generate_topk_idx(moe(50, 3, 16, 1), device="cpu")
    assert idx.shape == (50, 3)
    assert idx.is_contiguous()


def test_topk_idx_rejects_too_many_slots():
    with pytest.raises(ValueError, match=r"num_topk must be at most .* = 8, got 9"):
        generator.generate_topk_idx(moe(10, 9, 4, 2), device="cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_e5m6_inputs(dtype):
    inputs = list(generator.generate_e5m6_inputs(300, 64, dtype, device="cpu"))
    assert [flag for _, flag in inputs] == [False, True, True, True]
    for x, _ in inputs:
        assert x.shape == (300, 64)
        assert x.dtype == dtype
        assert x.device.type == "cpu"
    normal = inputs[0][0].float()
    assert abs(normal.mean()) < 0.05
    assert abs(normal.std() - 1) < 0.05
    for (x, _), value in zip(inputs[1:], (2**-20, 2**-14 * 63 / 64, 2**-14), strict=True):
        assert (x[:, :-1].double() == value).all()
        assert (x[:, -1].double() == 65024).all()


def test_e5m6_inputs_without_tokens():
    shapes = [x.shape for x, _ in generator.generate_e5m6_inputs(0, 8, torch.float32, device="cpu")]
    assert shapes == [(0, 8)] * 4


def test_rand_float_is_finite_and_bounded_at_every_magnitude(monkeypatch):
    limit = torch.finfo(torch.float32).max / 8
    magnitudes = set()
    for exponent in range(-110, 127):
        monkeypatch.setattr(random, "randint", lambda *_, e=exponent: e)
        x = generator.generate_rand_float((40, 5), device="cpu")
        assert x.shape == (40, 5)
        assert x.dtype == torch.float32
        assert x.isfinite().all()
        assert x.abs().max() <= limit
        magnitudes.add(round(math.log2(float(x.abs().median()))))
    assert min(magnitudes) < -105
    assert max(magnitudes) > 118


def test_rand_float_draws_the_exponent_with_python(monkeypatch):
    bounds = []
    monkeypatch.setattr(random, "randint", lambda low, high: bounds.append((low, high)) or 0)
    generator.generate_rand_float((2,), device="cpu")
    assert bounds == [(-110, 126)]


def test_default_device():
    expected = "cuda" if torch.cuda.is_available() else "cpu"
    assert generator.generate_rand_float((2,)).device.type == expected
    assert generator.generate_topk_idx(moe(3, 1, 1, 1)).device.type == expected
    x, _ = next(generator.generate_e5m6_inputs(1, 2, torch.float32))
    assert x.device.type == expected


@pytest.mark.gpu
def test_topk_idx_on_the_gpu():
    idx = generator.generate_topk_idx(moe(4001, 6, 32, 8))
    assert idx.is_cuda
    assert (idx >= 0).any(dim=1).all()
    assert idx.max() == 31
