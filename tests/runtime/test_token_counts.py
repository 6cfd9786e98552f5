"""Kernels for every number of tokens: their enumeration, and that no operator needs many."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tile_kernels import attention, gemm, mhc, transpose
from tile_kernels.runtime import registry
from tile_kernels.runtime.cases import Sample
from tile_kernels.runtime.declaration import Size
from tile_kernels.runtime.device import Device, described
from tile_kernels.runtime.launch import Kernel, Request, recorder, recording
from tile_kernels.runtime.operator import Operator
from tile_kernels.runtime.prepared import sized
from tile_kernels.runtime.token_counts import MAX_TOKENS, Variant, probes, variants

MAX_KERNELS = 4  # of an operator for one configuration, one more for each further launch of a call


# ---- the enumeration ----------------------------------------------------------------------------


def by_threshold(count: int, device: Device) -> tuple[Any, ...]:
    return (count > 77, count > 5000)


def by_remainder(count: int, device: Device) -> tuple[Any, ...]:
    return (math.gcd(16, count),)


def by_sms(count: int, device: Device) -> tuple[Any, ...]:
    return (min(9, count // device.num_sms),)


def by_parts(parts: int, few: bool, device: Device) -> tuple[Any, ...]:
    return (parts // 8, few)


def launched(count: int) -> Iterator[Request]:
    """Launches that differ with the count in every way that operators have."""
    yield Request(KERNELS[0], (count,))
    yield Request(KERNELS[1], (8 * count + 3,))
    if 100 < count <= 131:  # few counts, away from powers of two
        yield Request(KERNELS[2], (7,))
    rounded = -(-(2 * count + 500) // 128) * 128
    yield Request(KERNELS[2], (rounded,))
    yield Request(KERNELS[3], (min(count, 264), count < 900))


PLANS = (by_threshold, by_remainder, by_sms, by_parts)
KERNELS = [Kernel("none", f"kernel_{i}", plan) for i, plan in enumerate(PLANS)]


def run(count: int) -> None:
    assert recorder.requests is not None
    recorder.requests += launched(count)


def test_every_count_is_covered() -> None:
    device = described()
    wanted = {
        (request.kernel, request.kernel.plan(*request.problem, device))
        for count in range(1, MAX_TOKENS + 1)
        for request in launched(count)
    }
    assert set(variants(run, device)) == wanted
    few = {(KERNELS[0], (False, False)), (KERNELS[0], (True, False))}
    assert {v for v in variants(run, device, 4000) if v[0] is KERNELS[0]} == few


def test_a_count_of_one_is_a_limit_too() -> None:
    assert probes(1) == [1]
    assert {kernel.name for kernel, _ in variants(run, described(), 1)} == {
        f"kernel_{i}" for i in range(4)
    }


# ---- the operators ------------------------------------------------------------------------------


def configurations(samples: list[Sample], op: registry.Registered) -> Iterator[list[Request]]:
    """The launches of calls whose kernels depend on the token count, each kind of call once."""
    seen = set()
    for sample in samples:
        with recording() as requests:
            op.function(**sample.build("meta"))
        for _, group in itertools.groupby(requests, lambda each: id(each.call[1])):
            calls = list(group)
            problems = [each.call[2].problem for each in calls]
            if any(type(value) is Size for problem in problems for value in problem):
                key = tuple(
                    (each.kernel.name, *(None if type(x) is Size else x for x in problem))
                    for each, problem in zip(calls, problems)
                )
                if key not in seen:
                    seen.add(key)
                    yield calls


def resized(operator: Operator, record: Any, count: int) -> Any:
    """The record with `count` tokens: leading sizes of dynamic tensors, in their proportion."""
    values: list[Any] = []
    known = 0  # tokens of the record
    for value, static in zip(record, operator._static_dims):
        if static is None or not isinstance(value, torch.Tensor) or not value.numel():
            values.append(value)
            continue
        lead, rest = value.shape[: value.dim() - static], value.shape[value.dim() - static :]
        known = known or lead.numel()
        if len(lead) > 1 and static == 0:  # columns stay
            lead, rest = lead[:1], value.shape[1:]
        size = lead.numel() * count // known if lead.numel() % known == 0 else lead.numel()
        values.append(value.new_empty((*[1] * (len(lead) - 1), size, *rest), device="meta"))
    return operator.arguments(*values)


def of_sizes(requests: list[Request]) -> Callable[[int], None]:
    """Evaluates what the declaration marks as dependent on sizes, as a call with new sizes does."""

    def run(count: int) -> None:
        operator, record, _ = requests[0].call
        other = resized(operator, record, count)
        assert recorder.requests is not None
        recorder.requests += [
            Request(each.kernel, sized(each.call[2].problem, other)) for each in requests
        ]

    return run


def check_few(found: dict[Variant, None], launches: int) -> None:
    most = MAX_KERNELS + launches - 1
    assert len(found) <= most, "\n".join(f"{kernel.name}{static}" for kernel, static in found)


@pytest.mark.parametrize(
    "full", [False, pytest.param(True, marks=pytest.mark.full)], ids=["", "full"]
)
@pytest.mark.parametrize("op", registry.all_ops(), ids=lambda op: op.name)
def test_few_kernels_serve_all_token_counts(op: registry.Registered, full: bool) -> None:
    """Over all counts the plans of a configuration give at most four kernels."""
    assert registry.get(op.name) is op
    cases = op.cases
    samples = [*cases.benchmarks, *cases.large] or list(cases.small)
    if full:
        samples = [*samples, *cases.small]
    for requests in configurations(samples, op):
        check_few(variants(of_sizes(requests), described()), len(requests))


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def operands(fmt: str, num_queries: int, num_keys: int) -> tuple[Any, ...]:
    heads, depth = 64, 128
    if fmt == "e2m1":
        return tuple(
            (empty(*lead, depth // 2, dtype=torch.int8), empty(*lead, 4, dtype=torch.uint8))
            for lead in ((num_queries, heads), (num_keys,))
        )
    dtype = torch.bfloat16 if fmt == "bfloat16" else torch.float8_e4m3fn
    q, k = empty(num_queries, heads, depth, dtype=dtype), empty(num_keys, depth, dtype=dtype)
    return q, k if fmt == "bfloat16" else (k, empty(num_keys))


@pytest.mark.parametrize("topk", [512, 2048, 513])
@pytest.mark.parametrize("num_keys", [1000, 65536, 250000])
@pytest.mark.parametrize("fmt", ["bfloat16", "e4m3", "e2m1"])
def test_few_kernels_select_for_any_number_of_queries(fmt: str, num_keys: int, topk: int) -> None:
    """Nothing is dynamic there: the whole call runs for each count."""

    def run(count: int) -> None:
        weights = empty(count, 64)
        attention.indexer_select(*operands(fmt, count, num_keys), weights, topk=topk)

    launches = 6 if fmt == "e2m1" else 4  # scores, and up to three for few queries
    check_few(variants(run, described()), launches)


def test_few_kernels_of_operators_without_dynamic_sizes() -> None:
    def transposed(count: int) -> None:
        transpose.batched_transpose(empty(4, count, 256, dtype=torch.float8_e4m3fn))

    def masked(count: int) -> None:
        a, b = empty(8, count, 512, dtype=torch.bfloat16), empty(8, 256, 512, dtype=torch.bfloat16)
        d, sizes = empty(8, count, 256, dtype=torch.bfloat16), empty(8, dtype=torch.int32)
        gemm.m_grouped_bf16_gemm_nt_masked(a, b, d, sizes, max(1, count // 2))

    def projected(count: int) -> None:
        residual, fn = empty(count, 4, 1280, dtype=torch.bfloat16), empty(24, 5120)
        grads = empty(count, 24), residual, fn, empty(count, 24), empty(count), 1e-6
        mhc.mhc_norm_fn_bwd(*grads)

    for run, launches in ((transposed, 1), (masked, 1), (projected, 2)):
        check_few(variants(run, described()), launches)
