"""DeepGEMM's calls against their definitions, written out in plain PyTorch."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import tile_kernels
from tests.requirements import CUDA, EMULATED_IN_FULL, TORCH
from tile_kernels import quant
from tile_kernels.integrations import deep_gemm
from tile_kernels.quant.formats import decode_e2m1

each_ground = pytest.mark.parametrize("ground", [TORCH, EMULATED_IN_FULL, CUDA])
E4M3 = torch.float8_e4m3fn
HEADS = 8


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def logits_of(q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
    """`sum over h of weights[t, h] * relu(q[t, h] . k[s])`, in float64."""
    products = torch.einsum("thd,sd->ths", q.double(), k.double()).relu()
    return torch.einsum("th,ths->ts", weights.double(), products)


def outside(start: Tensor, end: Tensor, columns: int) -> Tensor:
    numbers = torch.arange(columns)
    return (numbers < start[:, None]) | (numbers >= end[:, None])


def close(found: Tensor, expected: Tensor) -> None:
    """The same where -inf, and within 1 % of the typical logit elsewhere."""
    found, expected = found.double().cpu(), expected.cpu()
    hidden = expected == -torch.inf
    assert torch.equal(found == -torch.inf, hidden)
    typical = expected[~hidden].std() if (~hidden).sum() > 1 else 1.0
    assert (found - expected)[~hidden].abs().max() < 0.02 * typical


def packed(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """e2m1 of rows of 128 channels: data, an int32 of four exponents for each row, and values."""
    rows = x.reshape(-1, 128)
    data, sf = quant.per_token_cast(rows, "e2m1", 32, round_sf=True)
    exponents = (torch.log2(sf) + 127).to(torch.uint8)
    values = decode_e2m1(data) * sf.repeat_interleave(32, 1)
    words = exponents.view(torch.int32).reshape(x.shape[:-1])
    return data.reshape(*x.shape[:-1], 64), words, values.view(x.shape)


def scaled(x: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 and a scale for each row."""
    sf = x.abs().amax(-1) / 448
    return (x / sf[..., None]).to(E4M3), sf


def operands(fmt: str, queries: tuple[int, ...], keys: int) -> tuple[Any, Any, Tensor, Tensor]:
    """`q` and `kv` as DeepGEMM takes them, and their values."""
    q, k = draw(*queries, HEADS, 128), draw(keys, 128, seed=1)
    if fmt == "e4m3":
        data, sf = scaled(k)
        return (q.to(E4M3), None), (data, sf), q.to(E4M3).float(), data.float() * sf[:, None]
    q_data, q_words, q_values = packed(q)
    k_data, k_words, k_values = packed(k)
    return (q_data.view(torch.uint8), q_words), (k_data, k_words), q_values, k_values


def moved(value: Any, device: str) -> Any:
    if isinstance(value, tuple):
        return tuple(moved(part, device) for part in value)
    return value.to(device) if isinstance(value, Tensor) else value


@pytest.mark.parametrize("fmt", ["e4m3", "e2m1"])
@each_ground
def test_logits(fmt: str, ground: tuple[str, str]) -> None:
    backend, device = ground
    q, kv, q_values, k_values = operands(fmt, (7,), 200)
    weights = draw(7, HEADS, seed=2)
    start = torch.tensor([0, 0, 3, 50, 199, 90, 5], dtype=torch.int32)
    end = torch.tensor([200, 1, 3, 130, 260, 120, 100], dtype=torch.int32)
    expected = logits_of(q_values, k_values, weights)
    expected[outside(start, end, 200)] = -torch.inf
    given = moved((q, kv, weights, start, end), device)
    with tile_kernels.backend(backend):
        found = deep_gemm.fp8_fp4_mqa_logits(*given)
        narrow = deep_gemm.fp8_fp4_mqa_logits(*given, logits_dtype=torch.bfloat16)
        cut = deep_gemm.fp8_fp4_mqa_logits(*given, clean_logits=False, max_seqlen_k=110)
    close(found, expected)
    close(narrow, expected)
    assert narrow.dtype == torch.bfloat16
    for row, (first, last) in enumerate(zip(start.tolist(), end.tolist())):
        count = min(110, max(0, min(last, 200) - first))
        assert torch.equal(cut[row, :count], found[row, first : first + count])
        assert (cut[row, count:] == -torch.inf).all()


@each_ground
def test_logits_of_e4m3_alone(ground: tuple[str, str]) -> None:
    backend, device = ground
    (q, _), kv, q_values, k_values = operands("e4m3", (3,), 70)
    bounds = torch.zeros(3, dtype=torch.int32), torch.full((3,), 70, dtype=torch.int32)
    weights = draw(3, HEADS, seed=2)
    with tile_kernels.backend(backend):
        found = deep_gemm.fp8_mqa_logits(*moved((q, kv, weights, *bounds), device))
    close(found, logits_of(q_values, k_values, weights))


# ---- pages --------------------------------------------------------------------------------------


def cache_of(kv: tuple[Tensor, Tensor], table: Tensor, page: int, blocks: int) -> Tensor:
    """A cache in which the keys of sequence `b` are in the blocks `table[b]`, one after another.

    Blocks are 64 bytes farther apart than they are long; all other bytes are 255.
    """
    data, sf = (part.contiguous().view(torch.uint8) for part in kv)
    data, sf = data.view(len(data), -1), sf.view(len(data), 4)
    row = data.shape[1] + 4
    memory = torch.full((blocks, page * row + 64), 255, dtype=torch.uint8)
    for number, block in enumerate(table.flatten().tolist()):
        if block >= 0:
            part = slice(number * page, (number + 1) * page)
            memory[block, : page * (row - 4)] = data[part].flatten()
            memory[block, page * (row - 4) : page * row] = sf[part].flatten()
    return memory[:, : page * row].unflatten(1, (page, 1, row))


def paged(fmt: str) -> tuple[Any, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """3 sequences, 2 queries each, pages of 64; the last page of two sequences is unused."""
    table = torch.tensor([[5, 0, -1], [2, 6, 1], [4, 3, 99]], dtype=torch.int32)
    lengths = torch.tensor([[100, 101], [191, 192], [0, 1]], dtype=torch.int32)
    q, kv, q_values, k_values = operands(fmt, (3, 2), 9 * 64)
    weights = draw(6, HEADS, seed=2)
    known = torch.where(table < 7, table, -1)
    cache = cache_of(kv, known, 64, 7)
    of_all = logits_of(q_values.flatten(0, 1), k_values, weights)
    expected = torch.full((6, 192), -torch.inf, dtype=torch.float64)
    for row, length in enumerate(lengths.flatten().tolist()):
        first = row // 2 * 192
        expected[row, :length] = of_all[row, first : first + length]
    return q, cache, weights, lengths, table, expected


@pytest.mark.parametrize("fmt", ["e4m3", "e2m1"])
@each_ground
def test_paged_logits(fmt: str, ground: tuple[str, str]) -> None:
    backend, device = ground
    *given, expected = paged(fmt)
    q, cache, weights, lengths, table = moved(tuple(given), device)
    with tile_kernels.backend(backend):
        schedule = deep_gemm.get_paged_mqa_logits_metadata(lengths, 64, 132)
        found = deep_gemm.fp8_fp4_paged_mqa_logits(
            q, cache, weights, lengths, table, schedule, 192, clean_logits=True
        )
        short = deep_gemm.fp8_fp4_paged_mqa_logits(
            q, cache, weights, lengths, table, None, 70, logits_dtype=torch.bfloat16
        )
    close(found, expected)
    assert short.shape == (6, 70)
    close(short, expected[:, :70])
    assert short.dtype == torch.bfloat16


@each_ground
def test_several_sequences_in_a_launch(
    ground: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All in one launch, two and one, or one at a time: the same logits, of kernels bit for bit."""
    backend, device = ground
    (q, _), cache, weights, lengths, table, _ = moved(paged("e4m3"), device)
    call = deep_gemm.fp8_paged_mqa_logits
    calls: list[int] = []
    logits = deep_gemm.attention.indexer_logits

    def counted(*given: Any, **named: Any) -> Tensor:
        calls.append(len(given[0]))
        return logits(*given, **named)

    with tile_kernels.backend(backend):
        together = call(q, cache, weights, lengths, table, None, 150)
        monkeypatch.setattr(deep_gemm.attention, "indexer_logits", counted)
        for sequences in (2, 1):
            monkeypatch.setattr(deep_gemm, "_MOST_OF_SEQUENCES", sequences**2 * 2 * 192)
            found = call(q, cache, weights, lengths, table, None, 150)
            if backend == "torch":  # whose matrix products round by their sizes
                close(found, together.double())
            else:
                assert torch.equal(found, together)
    assert calls == [4, 2, 2, 2, 2]


def test_paged_logits_of_e4m3_alone() -> None:
    (q, _), cache, weights, lengths, table, expected = paged("e4m3")
    found = deep_gemm.fp8_paged_mqa_logits(q, cache, weights, lengths, table, None, 192)
    close(found, expected)


def test_no_sequence_and_no_key() -> None:
    (q, _), cache, weights, lengths, table, _ = paged("e4m3")
    none = deep_gemm.fp8_paged_mqa_logits(
        q[:0], cache, weights[:0], lengths[:0], table[:0], None, 192
    )
    assert none.shape == (0, 192)
    no_key = deep_gemm.fp8_paged_mqa_logits(q, cache, weights, lengths, table, None, 0)
    assert no_key.shape == (6, 0)
    start = torch.zeros(6, dtype=torch.int32)
    keys = torch.zeros(0, 128).to(E4M3), torch.zeros(0)
    empty = deep_gemm.fp8_mqa_logits(q.flatten(0, 1), keys, weights, start, start, True, 5)
    assert (empty == -torch.inf).all()
    assert empty.shape == (6, 5)


def test_schedule() -> None:
    """Every segment of 256 keys belongs to one SM, in order, and shares differ by one at most."""
    lengths = torch.tensor([[700, 701], [0, 0], [256, 255], [257, 300], [1, 1]], dtype=torch.int32)
    counts = (3, 0, 1, 2, 1)
    segments = [(b, s) for b, count in enumerate(counts) for s in range(count)]
    for num_sms in (1, 2, 3, 7, 12):
        found = deep_gemm.get_paged_mqa_logits_metadata(lengths, 64, num_sms)
        assert found.dtype == torch.int32
        assert found.shape == (num_sms + 1, 2)
        ordered = [*segments, (len(counts), 0)]
        at = [ordered.index(tuple(pair)) for pair in found.tolist()]
        assert at[0] == 0
        assert at[-1] == len(segments)
        shares = [b - a for a, b in itertools.pairwise(at)]
        assert sorted(shares, reverse=True) == shares
        assert shares[0] - shares[-1] <= 1
    assert deep_gemm.get_paged_mqa_logits_metadata(lengths[:0], 64, 4).eq(0).all()


# ---- hyper-connections and layouts --------------------------------------------------------------


@each_ground
def test_products_before_the_norm(ground: tuple[str, str]) -> None:
    backend, device = ground
    a, b = draw(5, 512).bfloat16(), draw(24, 512, seed=1)
    product, squares = a.double() @ b.double().T, a.double().square().sum(1)
    for splits in (None, 1, 3):
        sizes = () if splits is None else (splits,)
        d = torch.full((*sizes, 5, 24), torch.nan, device=device)
        sums = torch.full((*sizes, 5), torch.nan, device=device)
        with tile_kernels.backend(backend):
            deep_gemm.tf32_hc_prenorm_gemm(a.to(device), b.to(device), d, sums, splits)
        total, of_rows = (d, sums) if splits is None else (d.sum(0), sums.sum(0))
        assert (total.cpu() - product).abs().max() < 2e-3 * product.std()
        torch.testing.assert_close(of_rows.cpu(), squares.float(), rtol=1e-5, atol=0)


def test_packed_scales() -> None:
    """The layout that the cast itself writes."""
    x = draw(9, 128 * 6).bfloat16()
    _, sf = quant.per_token_cast(x, "e4m3", 128, round_sf=True)
    flags = {"use_tma_aligned_col_major_sf": True, "use_packed_ue8m0": True}
    _, expected = quant.per_token_cast(x, "e4m3", 128, round_sf=True, **flags)
    found = deep_gemm.get_mn_major_tma_aligned_packed_ue8m0_tensor(sf)
    assert torch.equal(found, expected)
    assert found.stride() == expected.stride() == (1, 12)
    batch = deep_gemm.get_mn_major_tma_aligned_packed_ue8m0_tensor(torch.stack([sf, 2 * sf]))
    assert torch.equal(batch[0], expected)
    assert batch.stride()[1:] == (1, 12)
    exponents = batch[1].contiguous().view(torch.uint8)[:, :6]
    assert torch.equal(torch.exp2(exponents.float() - 127), 2 * sf)


def test_the_products_have_the_names_of_the_family() -> None:
    for name in tile_kernels.gemm.__all__:
        if name not in ("Fp4Weights", "prepare_fp4_weights"):
            assert getattr(deep_gemm, name) is getattr(tile_kernels.gemm, name)
            assert name in deep_gemm.__all__


# ---- errors -------------------------------------------------------------------------------------


def test_mistakes_are_named() -> None:
    (q, none), cache, weights, lengths, table, _ = paged("e4m3")
    rows = q.flatten(0, 1)
    keys, bounds = (torch.zeros(5, 128).to(E4M3), torch.ones(5)), torch.zeros(6, dtype=torch.int32)
    words = torch.zeros(6, HEADS, dtype=torch.int32)
    e2m1 = torch.zeros(6, HEADS, 64, dtype=torch.int8)
    call = deep_gemm.fp8_fp4_mqa_logits
    for arguments, message in (
        (((rows, words), keys), r"^fp8_fp4_mqa_logits: q must have no scales unless it is packed"),
        (((e2m1, None), keys), "q in packed e2m1 must be a tuple of data and int32 scales"),
        (((e2m1[:, :, :32], words), keys), "q in packed e2m1 must have 128 channels, got 64"),
        (((e2m1, words), keys), "kv's data must be int8 or uint8, got float8_e4m3fn"),
        (((rows, none), keys[0]), "kv must be a tuple of data and scales, got Tensor"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            call(*arguments, weights, bounds, bounds)
    with pytest.raises(TypeError, match="cu_seq_len_k_end must be int32, got int64"):
        call((rows, none), keys, weights, bounds, bounds.long())
    with pytest.raises(ValueError, match="logits_dtype must be one of"):
        call((rows, none), keys, weights, bounds, bounds, logits_dtype=torch.float16)
    given = [(q, none), cache, weights, lengths, table, None, 192]
    for index, value, message in (
        (1, cache.float(), "kv_cache must have elements of one byte, got torch.float32"),
        (1, cache[..., :4], r"kv_cache must have shape \[blocks, page, 1, D \+ 4\]"),
        (1, cache[..., ::2], "kv_cache must have strides"),
        (3, lengths[:, :1], r"context_lens must have shape \[3, 2\], got \(3, 1\)"),
        (4, table[:, :2], "max_context_len must be at most 128, which block_table has pages for"),
        (5, table, r"schedule_meta must have shape \[num_sms \+ 1, 2\]"),
        (6, -1, "max_context_len must be in 0..*, got -1"),
    ):
        changed = [*given[:index], value, *given[index + 1 :]]
        with pytest.raises((TypeError, ValueError), match=f"^fp8_fp4_paged_mqa_logits: {message}"):
            deep_gemm.fp8_fp4_paged_mqa_logits(*changed)
    with pytest.raises(ValueError, match="indices must be None"):
        deep_gemm.fp8_fp4_paged_mqa_logits(*given, indices=table)
    with pytest.raises(ValueError, match="block_kv must be one of 32, 64, got 16"):
        deep_gemm.get_paged_mqa_logits_metadata(lengths, 16, 4)
    with pytest.raises(ValueError, match=r"tf32_hc_prenorm_gemm: d must have shape \[2, 1, 1\]"):
        deep_gemm.tf32_hc_prenorm_gemm(
            torch.zeros(1, 8).bfloat16(), torch.zeros(1, 8), torch.zeros(1, 1, 1), bounds, 2
        )
    with pytest.raises(TypeError, match="sf must be float32, got int32"):
        deep_gemm.get_mn_major_tma_aligned_packed_ue8m0_tensor(words)
