"""The report has its pictures, also for a browser, which asks nobody else for anything."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from examples.tiny_v4 import ran, report
from examples.tiny_v4.model import gate_scores
from examples.tiny_v4.plain import gate
from tests.examples.small import HEADINGS, ids_of, model_of, run
from tile_kernels import transpose

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
# Runs in the page: the size of each picture, and what the page asked for beside itself.
LOOK = """<script>addEventListener("load", () => setTimeout(() => {
  const sizes = [...document.querySelectorAll("figure > svg")].map(svg => {
    const box = svg.getBoundingClientRect(); return [box.width, box.height]; });
  const asked = performance.getEntriesByType("resource").map(entry => entry.name);
  document.body.dataset.seen = JSON.stringify({sizes, asked});
}, 200));</script>"""


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of a run with two layers, so that experts and parts have more than one row."""
    return run(tmp_path_factory.mktemp("run"), "--steps", "3", "--layers", "2")


@pytest.fixture(scope="module")
def page(result: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> str:
    path = report.write_report(result, tmp_path_factory.mktemp("report") / "report.html")
    return path.read_text()


def test_pictures_are_there(page: str) -> None:
    for heading in HEADINGS:
        assert f"<h2>{heading}</h2><figure><svg" in page
    assert page.count("</svg>") == 4


def test_the_same_result_is_the_same_report(result: dict[str, Any], page: str, tmp_path: Path):
    assert report.write_report(result, tmp_path / "again.html").read_text() == page


def test_the_machine_and_what_ran_are_there(result: dict[str, Any], page: str) -> None:
    for title, value in report.machine_rows(result):
        assert f"<td>{title}</td><td>{value or 'not installed'}</td>" in page
    assert f"<td>{torch.__version__}</td>" in page
    assert set(result["operators"]) > {"moe.top2_sum_gate", "attention.sparse_attention"}
    assert all(set(backends) == {"torch"} for backends in result["operators"].values())
    for operator in result["operators"]:
        assert f">{operator}</td><td>reference</td>" in page
    assert "No kernel was emulated: not asked for (--no-emulation)." in page


def test_parts_follow_the_options() -> None:
    everything = [name for name, _ in report.parts_of(model_of().config)]
    assert everything[:2] == ["n-gram memory (Engram)", "4 residual streams (hyper-connections)"]
    plain = model_of(engram=False, mhc=False, moe=False, sparse=False).config
    names = [name for name, _ in report.parts_of(plain)]
    assert names == ["one residual", "dense attention", "feed-forward layer"]


def test_every_curve_has_a_name(page: str) -> None:
    """The names in the legend of the losses, and of the scale of each picture."""
    for name in ("training text of the step", "letter frequencies alone", "% of selections"):
        assert f"<!-- {name}" in page
    assert page.count("<!-- weight -->") == 1


def test_operators_of_a_step_are_counted_and_not_printed(capsys: pytest.CaptureFixture) -> None:
    x = torch.ones(2, 4)
    counted = ran.operators_of(lambda: (transpose.transpose(x), transpose.transpose(x)))
    assert counted == {"transpose.transpose": {"torch": 2}}
    transpose.transpose(x)
    assert capsys.readouterr() == ("", "")


def test_kernels_are_emulated_and_equal() -> None:
    found = ran.emulated(model_of(), ids_of(1, 9))
    assert not isinstance(found, str)
    assert [each.operator for each in found] == ["moe.topk_gate", "quant.per_token_cast"]
    assert all(each.is_equal and each.bytes_read and each.bytes_written for each in found)
    section = report.emulated_section(found)
    assert section.count("equal, bit for bit") == 2
    assert "DIFFERENT" in report.emulated_section([found[0]._replace(is_equal=False)])


def test_what_the_emulator_lacks_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ran.emulation, "missing", lambda: "missing: TileLang")
    lacking = ran.emulated(model_of(), ids_of(1, 9))
    assert report.emulated_section(lacking) == "<p>No kernel was emulated: missing: TileLang.</p>"


def test_gates_are_those_of_the_memory() -> None:
    """What is shown multiplies the value, and lies between 0 and 1."""
    model, ids = model_of(), ids_of(2, 17)
    memory = model.memories["0"]
    with torch.no_grad():
        memory.weight_hidden.add_(torch.randn_like(memory.weight_hidden))
        memory.table.weight.mul_(50)
    inputs: list[Tensor] = []
    hook = memory.register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
    (seen,) = model.looked_at(ids)["gates"]
    hook.remove()
    assert seen.shape == (2, 17, 4)
    assert 0 < seen.min() < 0.4
    assert 0.6 < seen.max() < 1
    with torch.no_grad():
        torch.testing.assert_close(gate_scores(memory, inputs[0], ids), seen)
        keys, value = memory.project(memory.table(memory.hasher(ids)[0]))
        by_hand = gate(memory, inputs[0], keys.bfloat16().float())
        torch.testing.assert_close(seen, by_hand, rtol=1e-4, atol=1e-5)
        added = memory(inputs[0], ids) - inputs[0]  # without the convolution, which starts at zero
    expected = seen[..., None] * value[..., None, :]
    torch.testing.assert_close(added.float(), expected, rtol=2e-2, atol=2e-2)


def seen_by_browser(page: str, folder: Path) -> dict[str, Any]:
    """What `LOOK` finds once a browser has shown the page."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is installed")
    path = folder / "looked_at.html"
    path.write_text(page.replace("</html>", f"{LOOK}</html>"))
    done = subprocess.run(
        [
            browser, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-sync",
            "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={folder / 'profile'}",
            "--window-size=1000,2000", "--virtual-time-budget=5000", "--dump-dom", path.as_uri(),
        ],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    found = re.search(r'data-seen="([^"]*)"', done.stdout)
    assert found, f"{browser} ended with {done.returncode}: {done.stderr[-2000:]}"
    seen: dict[str, Any] = json.loads(html.unescape(found[1]))
    return seen


def test_a_browser_shows_it_and_asks_nobody(page: str, tmp_path: Path) -> None:
    seen = seen_by_browser(page, tmp_path)
    assert len(seen["sizes"]) == 4
    assert all(width > 300 and height > 50 for width, height in seen["sizes"])
    assert seen["asked"] == []


def test_a_request_elsewhere_would_be_noticed(tmp_path: Path) -> None:
    elsewhere = "http://elsewhere.invalid/picture.png"
    page = f'<!doctype html><html><body><figure><svg></svg></figure><img src="{elsewhere}"></html>'
    assert seen_by_browser(page, tmp_path)["asked"] == [elsewhere]
