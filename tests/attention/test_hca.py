"""Attention over windows and all entries."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import tile_kernels
from tests.requirements import CUDA, EMULATED
from tile_kernels import torch as references
from tile_kernels.attention import (
    attention_indices,
    hca_attention,
    hca_attention_bwd,
    sparse_attention,
)
from tile_kernels.attention.attention_bwd.cases import hca_arguments
from tile_kernels.attention.hca.cases import arguments
from tile_kernels.attention.softmax_samples import compare
from tile_kernels.runtime.cases import Sample

CPU = torch.device("cpu")


def all_entries(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `sparse_attention` for the same rows."""
    num_tokens, entries = given["q"].shape[0], given["entries"]
    everything = torch.arange(entries.shape[0], dtype=torch.int32, device=entries.device)
    indices, lengths = attention_indices(
        everything.expand(num_tokens, -1),
        given["cu_seqlens"],
        window=given["window"],
        ratio=given["ratio"],
    )
    return {
        "q": given["q"],
        "kv": torch.cat((given["window_kv"], entries)),
        "indices": indices,
        "topk_length": lengths,
        **{name: given.get(name) for name in ("sm_scale", "sink", "return_stats")},
    }


@pytest.mark.parametrize("ratio", [1, 3, 128])
def test_is_sparse_attention_over_all_entries(ratio: int) -> None:
    given = arguments((1, 30, 31, 300), 310, 2, ratio=ratio, window=20, sink="wild")(CPU)
    compare(hca_attention(**given), sparse_attention(**all_entries(given)))


def test_one_sequence_is_dense_attention_with_a_band() -> None:
    """PyTorch's attention of one key and value head, with the mask written out."""
    given = arguments((0, 200), 200, 3, ratio=0, window=50)(CPU)
    rows = given["window_kv"].float()
    t = torch.arange(200)
    mask = (t[:, None] >= t) & (t[:, None] - t < 50)
    expected = torch.nn.functional.scaled_dot_product_attention(
        given["q"].float().transpose(0, 1), rows.expand(3, -1, -1), rows.expand(3, -1, -1), mask
    )
    out = hca_attention(**{**given, "return_stats": False})
    compare(out, expected.transpose(0, 1).contiguous().bfloat16())


def test_later_tokens_and_other_sequences_do_not_matter() -> None:
    given = arguments((0, 40, 100), 100, 2, ratio=4, window=16)(CPU)
    other = {name: x.clone() if isinstance(x, Tensor) else x for name, x in given.items()}
    other["window_kv"][30:40] = torch.nan
    other["entries"][8:10] = torch.nan  # complete at token 35 and later
    before, after = (references.hca_attention(**each)[0] for each in (given, other))
    assert torch.equal(before[:30], after[:30])
    assert torch.equal(before[40:], after[40:])


def test_full_tiles_are_copied_at_once() -> None:
    """The last of 65 tokens see whole tiles of 64 rows; blocks compute several results."""
    given = arguments((0, 65), 65, 1, ratio=1, window=64, sink="normal")(CPU)
    before = tile_kernels.get_num_sms()
    tile_kernels.set_num_sms(3)
    try:
        with tile_kernels.backend("emulate"):
            results = hca_attention(**given)
    finally:
        tile_kernels.set_num_sms(before)
    compare(results, references.hca_attention(**given))


# Sequences, heads, tokens of an entry, and of a window.
SIZES = {"cpu": ((0, 3, 5), 2, 2, 3), "cuda": ((0, 700, 701, 1500, 4000), 128, 4, 128)}


@pytest.mark.parametrize("ground", [EMULATED, CUDA])
def test_a_sequence_has_the_same_bits_in_any_batch(ground: tuple[str, str]) -> None:
    """Results and gradients of a sequence alone are those beside the others."""
    backend, device = ground
    bounds, heads, ratio, window = SIZES[device]
    build = hca_arguments(bounds, bounds[-1], heads, ratio=ratio, window=window, sink="normal")
    given = Sample("batch", build).build(device)
    counts = [(end - begin) // ratio for begin, end in itertools.pairwise(bounds)]
    firsts = [0, *itertools.accumulate(counts)]
    with tile_kernels.backend(backend):
        results, grads = forward_and_backward(given)
        for i, (begin, end) in enumerate(itertools.pairwise(bounds)):
            tokens, entries = slice(begin, end), slice(firsts[i], firsts[i + 1])
            alone = {
                name: x[tokens] if name in ("q", "window_kv", "grad") else x
                for name, x in given.items()
            }
            alone["entries"] = given["entries"][entries]
            alone["cu_seqlens"] = torch.tensor([0, end - begin], device=device).int()
            found, found_grads = forward_and_backward(alone)
            for one, other in zip(found, results):
                assert torch.equal(one, other[tokens])
            for one, other, rows in zip(found_grads, grads, (tokens, tokens, entries)):
                assert torch.equal(one, other[rows])


def forward_and_backward(given: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Results, and the gradients of queries, rows and entries; that of a sink is a sum."""
    operands = {name: x for name, x in given.items() if name not in ("grad", "out", "lse")}
    out, top, lse = hca_attention(**operands, return_stats=True)
    grads = hca_attention_bwd(**operands, grad=given["grad"], out=out, lse=lse)
    return [out, top, lse], list(grads[:3])


@pytest.mark.gpu
@pytest.mark.parametrize("ratio", [1, 4])
def test_is_sparse_attention_on_a_gpu(ratio: int) -> None:
    given = arguments((0, 1000, 2049), 2049, 128, ratio=ratio, sink="normal")(torch.device("cuda"))
    compare(hca_attention(**given), sparse_attention(**all_entries(given)))


@pytest.mark.gpu
def test_result_does_not_depend_on_the_number_of_sms() -> None:
    given = arguments((0, 1000, 1500), 1500, 64, ratio=2, sink="normal")(torch.device("cuda"))
    whole = hca_attention(**given)
    before = tile_kernels.get_num_sms()
    tile_kernels.set_num_sms(7)
    try:
        few = hca_attention(**given)
    finally:
        tile_kernels.set_num_sms(before)
    for one, other in zip(few, whole):
        assert torch.equal(one, other)
