"""What streams cost a layer is measured by a script that runs anywhere."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import mhc_layer
from tile_kernels.testing import benchmark

NAMES = [f"{name}.{kind}" for name in ("plain", "streams") for kind in ("inference", "training")]


def test_saves_what_the_documents_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--tokens", "3", "--streams", "2", "--hidden", "16", "8"]
    path = mhc_layer.main([*sizes, "--output", str(tmp_path)])
    assert path.name == "mhc.layer.json"
    report = benchmark.load(path)
    cases = [f"mhc.layer.3x2x{hidden}.{name}" for hidden in (16, 8) for name in NAMES]
    assert [result.case for result in report.results] == cases
    said = capsys.readouterr().out
    assert all(case in said for case in cases)
    by_case = {result.case: result for result in report.results}
    for hidden in (16, 8):
        plain, streams = (
            by_case[f"mhc.layer.3x2x{hidden}.{name}.training"] for name in ("plain", "streams")
        )
        assert streams.bytes == 2 * plain.bytes == 10 * 2 * 3 * hidden
        assert min(plain.host_us, streams.host_us) > 0


def test_both_layers_are_the_same_at_first() -> None:
    """New streams that are all alike give nearly what the plain layer gives, in each stream."""
    made = mhc_layer.layers(5, 4, 32, "cpu")
    (plain, x), (mixed, residual) = made["plain"], made["streams"]
    given = x.detach()[:, None].expand(residual.shape).contiguous()
    expected = plain(x).detach()[:, None].expand(residual.shape)
    torch.testing.assert_close(mixed(given).detach(), expected, rtol=0.05, atol=0.05)


def test_training_is_the_whole_backward_pass() -> None:
    for layer, x in mhc_layer.layers(5, 2, 32, "cpu").values():
        grads = mhc_layer.steps(layer, x)["training"]()
        shapes = [x.shape, *(parameter.shape for parameter in layer.parameters())]
        assert [grad.shape for grad in grads] == shapes
