"""The benchmark of whole layers runs anywhere, and compares before it times."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from benchmarks import attention_layer, layers, sparse_attention
from benchmarks.plain_layers import PlainMoE
from tests.examples.small import distance


def test_saves_what_the_documents_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["mhc.4096", "moe.4096", "attention.indexer"]
    (path,) = layers.main([*names, "--output", str(tmp_path)])
    assert path.name.startswith(
        "layers_mhc.4096_moe.4096_attention.indexer."
    )  # not the file of all
    content = json.loads(path.read_text())
    assert content["machine"]["torch"] == torch.__version__
    timed = [result for result in content["results"] if "step" in result]
    assert {result["case"] for result in timed} == set(names)
    forms = {(result["form"], result["step"]) for result in timed if result["case"] == "moe.4096"}
    assert forms == {(form, step) for form in ("plain", "bf16", "fp8") for step in layers.STEPS}
    assert all(result["wall_us"] >= result["host_us"] > 0 for result in timed)
    said = capsys.readouterr().out
    assert all(name in said for name in names)


@pytest.mark.parametrize("name", [name for name in layers.CASES if not name.endswith("7168")])
def test_plain_layers_compute_the_same(name: str) -> None:
    torch.manual_seed(0)
    case = layers.CASES[name]
    forms = case.build(**case.small)
    found = layers.compare(case, forms)
    assert found.keys() == forms.ours.keys() == forms.off.keys()


def test_other_results_are_refused() -> None:
    torch.manual_seed(0)
    case = layers.CASES["moe.4096"]
    forms = case.build(**case.small)
    forms.plain.num_topk = 1  # type: ignore[assignment]
    with pytest.raises(ValueError, match="bf16 is off by"):
        layers.compare(case, forms)


def test_gradients_of_plain_experts_are_those_of_indexing() -> None:
    """The gathers of the plain layer against PyTorch's own gradient of `x[token]`."""
    torch.manual_seed(0)
    forms = layers.moe(tokens=20, hidden=128, intermediate=128, experts=4, topk=2)
    layer, (x,) = forms.plain, forms.inputs
    assert isinstance(layer, PlainMoE)
    (found,) = torch.autograd.grad(layer(x).float().square().sum(), x)
    scores = (x.float() @ layer.router.T).sigmoid()
    chosen = scores.topk(2).indices
    weights = scores.gather(-1, chosen)
    weights = weights / weights.sum(-1, keepdim=True)
    rows = []
    for token in range(20):
        gate, value = (x[token] @ layer.w_in[chosen[token]].mT).chunk(2, -1)
        inside = torch.nn.functional.silu(gate) * value
        results = (inside[:, None] @ layer.w_out[chosen[token]].mT)[:, 0]
        rows.append((results * weights[token][:, None]).sum(0))
    (expected,) = torch.autograd.grad(torch.stack(rows).float().square().sum(), x)
    assert distance(expected.float(), found.float()) < 0.02


def test_new_streams_are_the_plain_residual() -> None:
    """Streams that are all alike give nearly what one stream gives, in each of them."""
    torch.manual_seed(0)
    forms = layers.mhc(tokens=5, mult=4, hidden=32)
    plain, (x,) = forms.others["one stream, plain"]
    with torch.no_grad():
        expected = plain(x)[:, None].expand(5, 4, 32)
        found = forms.ours["kernels"](x[:, None].expand(5, 4, 32).contiguous())
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)


def test_training_is_the_whole_backward_pass() -> None:
    forms = layers.mhc(tokens=5, mult=2, hidden=32)
    layer, (x,) = forms.ours["kernels"], forms.inputs
    _, *grads = layers.step_of(layer, "training", forms.inputs)()
    shapes = [x.shape, *(parameter.shape for parameter in layer.parameters())]
    assert [grad.shape for grad in grads] == shapes


def test_traces_have_the_host_and_no_stacks(tmp_path: Path) -> None:
    (path,) = layers.main(["mhc.7168", "--trace", str(tmp_path)])
    assert path.name == "mhc.7168.kernels.json.gz"
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    kinds = {event.get("cat") for event in events if event["ph"] == "X"}
    assert "cpu_op" in kinds
    assert kinds <= layers.KEPT
    started = [event["ts"] for event in events if event["ph"] == "X"]
    assert 0 <= min(started) < max(started)


def test_unknown_cases_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        layers.main(["moe"])
    assert "there is no case moe; cases are mhc.4096" in capsys.readouterr().err


def test_stages_of_attention_are_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = attention_layer.main(["--output", str(tmp_path)])
    content = json.loads(path.read_text())
    by_step = {
        step: [each for each in content["results"] if each["step"] == step]
        for step in attention_layer.STEPS
    }
    for results in by_step.values():
        names = [each["stage"] for each in results]
        assert names[-2:] == [attention_layer.TOTAL, attention_layer.DENSE]
        assert {"selection", "attention", "output"} <= set(names)
        assert all(each["wall_us"] > 0 for each in results)
    assert attention_layer.markdown(content) in capsys.readouterr().out


def test_stages_of_decoding_are_a_step() -> None:
    """The stages, one after the other, give what `step` of the layer gives."""
    torch.manual_seed(0)
    with torch.no_grad():
        stages = attention_layer.decode(attention_layer.SMALL)
        found = [stage() for stage in stages.values()][-1]
        again = [stage() for stage in stages.values()][-1]
    assert found.shape == (2, 32)
    assert torch.equal(found, again)
    assert found.isfinite().all()


def test_sparse_attention(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each case has a row with its time and FLOPs; words choose cases."""
    path = sparse_attention.main(["--output", str(tmp_path), "forward", "decode.b1"])
    content = json.loads(path.read_text())
    names = [row["case"] for row in content["rows"]]
    chosen = [n for n in sparse_attention.cases() if "forward" in n or "decode.b1" in n]
    assert names == chosen
    assert all(row["us"] > 0 and row["gflop"] >= 0 for row in content["rows"])
    assert "\n".join(sparse_attention.markdown(content)) in capsys.readouterr().out
    assert sparse_attention.cases(small=False).keys() == sparse_attention.cases(small=True).keys()
    with pytest.raises(SystemExit):
        sparse_attention.main(["--output", str(tmp_path), "sideways"])
