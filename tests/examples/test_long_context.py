"""The long-context example: its texts, its curriculum, and a short run with picture and numbers."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from examples import long_context
from examples.long_context import CPU, MARKER, NUM_KEYS, batch_of, texts
from tile_kernels.modeling.attention import CompressedSparseAttention

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def one_thread() -> object:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_texts_have_one_key() -> None:
    text, keys = texts(50, 37, torch.Generator().manual_seed(0))
    assert (text[:, -1] == MARKER).all()
    for row, key in zip(text, keys):
        (place,) = (row[:-1] == MARKER).nonzero()[:, 0].tolist()
        assert place % 4 == 0
        assert row[place + 1] == key
        assert ((row > 0) & (row <= NUM_KEYS)).sum() == 1


def test_texts_grow_when_the_loss_has_fallen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert CPU.shortest // 4 <= CPU.topk, "at first all entries are chosen"
    assert batch_of(32, CPU) == 16
    assert batch_of(16384, CPU) == CPU.fewest
    short = dataclasses.replace(CPU, steps=3 * long_context.RECENT)
    never = long_context.train("dense", short, "cpu")
    assert set(never["lengths"]) == {32}
    monkeypatch.setattr(long_context, "LEARNED", 100.0)
    always = long_context.train("dense", short, "cpu")
    assert always["lengths"] == [32] * 8 + [64] * 8 + [128] * 8
    monkeypatch.setattr(long_context, "FINISHED", 100.0)
    ended = long_context.train("dense", dataclasses.replace(short, length=32), "cpu")
    assert len(ended["losses"]) == long_context.RECENT


def test_runs_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--steps", "2", "--length", "32", "--timed", "16", "32", "--device", "cpu"]
    path = long_context.main([*given, "--out", str(tmp_path)])
    assert "% of new texts of 32 tokens" in capsys.readouterr().out
    result = json.loads(path.read_text())
    assert (tmp_path / "long_context.svg").read_text().count("<svg") == 1
    assert {"device", "torch", "date"} <= result["machine"].keys()
    assert result["caches"] == long_context.caches()
    for kind in ("sparse", "dense"):
        assert len(result["trained"][kind]["losses"]) == 2
        assert 0 <= result["trained"][kind]["found"] <= 1
        assert list(result["measured"][kind]) == ["16", "32"]
        assert all(found["ms"] > 0 for found in result["measured"][kind].values())


def test_caches_are_computed_for_a_million_tokens() -> None:
    """A key and a value of 32 heads of 128 in bfloat16, and what a layer's state has."""
    found = long_context.caches((4096, 2**20))
    assert found["dense"] == {"4096": 4096 * 2 * 4096 * 2, str(2**20): 2**20 * 2 * 4096 * 2}
    layer = CompressedSparseAttention(4096, index_heads=1, cache="fp8", device="meta")
    with torch.device("meta"):
        assert found["sparse"]["4096"] == layer.state(1, 4096).num_bytes
    assert 90 * found["sparse"][str(2**20)] < found["dense"][str(2**20)]


@pytest.mark.full
def test_both_find_the_key() -> None:
    """About a minute: the whole of the training on a CPU."""
    for kind in long_context.KINDS:
        result = long_context.train(kind, CPU, "cpu")
        assert result["found"] > 0.9
