"""Kernels for every number of tokens: their enumeration, and that no operator needs many."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch

from tests.test_batch_invariance import OTHERS, ROW_WISE, count_rows, over_rows, with_rows
from tile_kernels import attention, gemm, mhc, transpose
from tile_kernels.runtime import registry
from tile_kernels.runtime.cases import Arguments, Sample, tensors_in
from tile_kernels.runtime.declaration import Size
from tile_kernels.runtime.device import Device, described
from tile_kernels.runtime.launch import Kernel, Request, recorder, recording
from tile_kernels.runtime.operator import Operator
from tile_kernels.runtime.prepared import sized
from tile_kernels.runtime.token_counts import MAX_TOKENS, Variant, probes, variants

SAMPLES = 2  # of an operator, whose whole calls are enumerated
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


# ---- whole calls --------------------------------------------------------------------------------


class Tokens(NamedTuple):
    """The arguments that grow with the tokens, and in which dimension.

    The first has a row for each token. The others keep their proportion to it, rounded up, or down
    with `floor`. Token counts are multiples of `step`.
    """

    dims: dict[str, int]
    step: int = 1
    floor: bool = False


def _tokens(*arguments: str, dim: int = 0, **how: Any) -> Tokens:
    return Tokens(dict.fromkeys(arguments, dim), **how)


_WINDOWS = _tokens("kv_a", "z_a", "kv_b", "z_b", "grad_out", "cos", "sin", floor=True)
_PACKED = _tokens("kv", "gate", "grad_out", floor=True)
_VISIBLE = _tokens("q", "window_kv", "grad", "out", "lse")
_PAGES = _tokens("slots", "codes", "sf", "rotated")
_BLOCKS = _tokens("x", "sf")
_COLUMNS = _tokens("x", "pos_to_token", step=128)
_EXPERTS = _tokens("a", "d", dim=1)
# Operators that are not in `ROW_WISE`. Those without tokens have none to count.
TOKENS = {
    "attention.attention_indices": _tokens("selected"),
    "attention.decode_plan": _tokens(
        "q", "indices", "topk_length", "extra_indices", "extra_topk_length"
    ),
    "attention.hca_attention": _VISIBLE,
    "attention.hca_attention_bwd": _VISIBLE,
    "attention.kv_cache_append": _PAGES,
    "attention.kv_compress": _WINDOWS,
    "attention.kv_compress_bwd": _WINDOWS,
    "attention.kv_compress_norm_rope_cast": _WINDOWS,
    "attention.kv_compress_packed": _PACKED,
    "attention.kv_compress_packed_bwd": _PACKED,
    "engram.engram_convolution_bwd": _tokens("grad_out", "y", "rstd", "starts"),
    "engram.engram_convolution_fwd": _tokens("y", "starts", "residual"),
    "engram.ngram_windows": _tokens("token_ids"),
    "gemm.get_mn_major_tma_aligned_tensor": _tokens("sf"),
    "gemm.k_grouped_bf16_gemm_tn_contiguous": _tokens("a", "b", step=128),
    "gemm.m_grouped_bf16_gemm_nt_masked": _EXPERTS,
    "gemm.m_grouped_fp8_fp4_gemm_nt_masked": _EXPERTS,
    "gemm.m_grouped_fp8_gemm_nt_masked": _EXPERTS,
    "mhc.mhc_pre_from_partials": Tokens({"residual": 0, "gemm_out_mul": 1, "gemm_out_sqrsum": 1}),
    "mhc.mhc_reduce_partials": _tokens("mul", "sqrsum", dim=1),
    "moe.aux_fi": _tokens("topk_idx"),
    "moe.expand_to_fused": _tokens("x", "token_topk_to_pos", "pos_to_expert"),
    "moe.expand_to_fused_with_sf": _tokens("x", "token_topk_to_pos", "pos_to_expert"),
    "moe.get_fused_mapping": _tokens("topk_idx"),
    "moe.group_count": _tokens("group_idx"),
    "quant.per_block_cast": _BLOCKS,
    "quant.per_block_cast_lossless": _BLOCKS,
    "quant.per_block_cast_with_precomputed_sf": _BLOCKS,
    "quant.per_block_cast_with_sf_only": _BLOCKS,
    "quant.per_channel_cast": _COLUMNS,
    "quant.per_channel_cast_and_transpose": _COLUMNS,
    "quant.per_channel_cast_fused": _COLUMNS,
    "quant.per_channel_cast_fused_and_transpose": _COLUMNS,
    "quant.plain_cast": _tokens("x"),
    "quant.swiglu_backward": _tokens(
        "x", "act_x_grad", "pos_to_token_topk", "token_topk_to_pos", "topk_weights"
    ),
    "quant.swiglu_backward_and_per_token_cast": _tokens(
        "x", "grad_out", "weight", "pos_to_token_topk", "token_topk_to_pos"
    ),
    "quant.swiglu_forward_and_per_channel_cast_and_transpose": _COLUMNS,
    "transpose.batched_transpose": _tokens("x", dim=1),
    "transpose.transpose": _tokens("x"),
}


# Kernels of one configuration beyond the limit. Up to 1024 tokens these operators launch the
# kernels of `mhc_post` and `mhc_pre`, which have variants, and above that kernels of their own.
COMPOSED = {"mhc.mhc_post_pre": 2, "mhc.mhc_post_pre_and_per_token_cast": 2}


def test_tokens_of_every_operator_are_known() -> None:
    without = {name for name, reason in OTHERS.items() if reason == "has no tokens"}
    without |= {
        "engram.grad_w_reduce",  # its rows are partial sums, one for each block
        "gemm.k_grouped_fp8_gemm_nt_contiguous",  # columns of data and rows of scales
    }
    assert not TOKENS.keys() & (ROW_WISE.keys() | without)
    assert {op.name for op in registry.all_ops()} == TOKENS.keys() | ROW_WISE.keys() | without


def with_tokens(name: str, arguments: Arguments, count: int) -> Arguments | None:
    """The arguments with `count` tokens, or steps of them; None if they cannot be resized."""
    if name in ROW_WISE:
        rows = ROW_WISE[name]
        if not count_rows(rows, arguments):
            return None
        return with_rows(rows, arguments, lambda t: t.new_empty((count * rows.step, *t.shape[1:])))
    tokens = TOKENS[name]
    first = next(iter(tokens.dims))
    given = tensors_in(arguments.get(first))
    known = given[0].shape[tokens.dims[first]] if given else 0
    if not known:
        return None

    def resized_in(dim: int) -> Callable[[torch.Tensor], torch.Tensor]:
        def resize(tensor: torch.Tensor) -> torch.Tensor:
            size, wanted = tensor.shape[dim], count * tokens.step
            if tokens.floor:
                size = wanted // max(known // max(size, 1), 1)
            else:
                size = -(-size * wanted // known)
            return tensor.new_empty((*tensor.shape[:dim], size, *tensor.shape[dim + 1 :]))

        return resize

    return {
        argument: over_rows(value, resized_in(tokens.dims[argument]))
        if argument in tokens.dims
        else value
        for argument, value in arguments.items()
    }


@pytest.mark.parametrize("name", sorted(TOKENS | ROW_WISE))
def test_few_kernels_serve_whole_calls(name: str) -> None:
    """As above, with calls of the public function: for operators without declared sizes too."""
    op = registry.get(name)
    samples = [*op.cases.benchmarks, *op.cases.large, *op.cases.small]
    given = (sample.build("meta") for sample in samples)
    fitting = (arguments for arguments in given if with_tokens(name, arguments, 1) is not None)
    launched = 0
    for arguments in itertools.islice(fitting, SAMPLES):
        calls: list[int] = []

        def run(count: int, arguments: Arguments = arguments, calls: list[int] = calls) -> None:
            assert recorder.requests is not None
            before = len(recorder.requests)
            op.function(**with_tokens(name, arguments, count))
            calls.append(len(recorder.requests) - before)

        check_few(variants(run, described()), max(calls) + COMPOSED.get(name, 0))
        launched += max(calls)
    assert launched


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
