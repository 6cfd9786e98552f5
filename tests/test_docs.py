"""The documents say what is so: generated parts are fresh, examples run, numbers have files."""

from __future__ import annotations

import ast
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.requirements import NEEDS_TRANSFORMERS, lacks_transformers
from tile_kernels import cli
from tile_kernels.testing import benchmark

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "nvidia-h200"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
each_page = pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))


TABLES = re.findall(r'^TABLES(?:\["| = {")(\w+)"', (ROOT / "docs" / "tables.py").read_text(), re.M)


def test_tables_are_found() -> None:
    assert {"operators", "benchmarks", "compute", "torch"} < set(TABLES)


@pytest.mark.parametrize("name", TABLES)
def test_generated_tables_are_fresh(name: str) -> None:
    tables = runpy.run_path(str(ROOT / "docs" / "tables.py"))
    assert tables["updated"](name) == tables["TABLES"][name][0].read_text(), "docs/tables.py"


def test_a_layer_is_shown_as_its_last_run_measured_it() -> None:
    tables = runpy.run_path(str(ROOT / "docs" / "tables.py"))

    def run(date: str, *cases: str) -> dict[str, Any]:
        return {"machine": {"date": date}, "results": [{"case": case} for case in cases]}

    late, early, over = run("03", "demo", "moe"), run("02", "demo", "mhc"), run("01", "moe")
    assert tables["newest"]([late, early, over]) == [run("02", "mhc"), late]


def test_kernels_that_changed_are_marked_until_they_are_measured_again() -> None:
    tables = runpy.run_path(str(ROOT / "docs" / "tables.py"))
    has_changed = tables["has_changed"]
    assert has_changed("moe.topk_gate.4096.64", "2026-11-15 20:41 UTC")
    assert not has_changed("moe.topk_gate.4096.64", "2026-11-20 00:00 UTC")
    assert not has_changed("moe.topk_gate.4096.8", "2026-11-15 20:41 UTC")
    known = [f"{op.name}.{case.label}." for op, case in tables["operator_cases"]()]
    for name in tables["CHANGED"]:
        assert any(case.startswith(f"{name}.") for case in known), name


def test_goals_are_those_of_the_cases() -> None:
    """Results keep the goals of their time; the tables and pictures show those of today."""
    tables = runpy.run_path(str(ROOT / "docs" / "tables.py"))
    goals = {f"{op.name}.{case.label}": case.goal_us for op, case in tables["operator_cases"]()}
    text, found = "\n".join(tables["goals"]()), tables["operator_report"]().results
    for result in found:
        assert result.goal_us == goals[result.case]
    for case, goal in goals.items():
        if goal and not case.startswith(tables["MEASURED_APART"]):
            result = next((r for r in found if r.case == case), None)
            near = result is not None and result.device_us <= goal * (1 + tables["NOISE"])
            assert (f"`{case}`" in text) == (not near), case


def test_pictures_show_the_results() -> None:
    """Each case and its time are in the text of the family's picture."""
    for r in benchmark.load_all(RESULTS).results:
        picture = (ROOT / "docs" / "measured" / f"{RESULTS.name}.{r.family}.svg").read_text()
        assert f">{r.case.removeprefix(r.family + '.')}<" in picture
        assert f">{r.device_us:.1f} us" in picture, r.case
    tables = runpy.run_path(str(ROOT / "docs" / "tables.py"))
    picture = (ROOT / "docs" / "measured" / f"{RESULTS.name}.tilekernels.svg").read_text()
    for case, there, here in tables["compared"]():
        assert f">{case}<" in picture
        assert f">{there:.1f} → {here:.1f} us<" in picture, case
    picture = (ROOT / "docs" / "measured" / f"{RESULTS.name}.rivals.svg").read_text()
    for bar in tables["rivals"]():
        name = bar.name.replace("nn.functional.", "")
        assert f">{name} {bar.other_us / bar.us:.2f}x<" in picture, bar
        assert f">{bar.case} ({bar.us:.3g} us)<" in picture, bar


def test_a_run_of_both_packages_replaces_the_record_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The README's numbers and the comparison are those of `benchmarks.tilekernels`."""
    tables = runpy.run_path(str(ROOT / "docs" / "tables.py"))
    results = {
        "1.0.0": {
            "moe.a": {"us": 2.0, "their_us": 8.0, "results": "exact"},
            "moe.b": {"error": "not accepted: too small"},
        },
        "2.1.0": {"moe.a": {"us": 2.0, "their_us": 1.0, "results": "tensor 0: 1 of 2 differ"}},
    }
    run = {
        "machine": {"device": "GPU", "torch": "2", "tilelang": "3", "date": "2027-01-02 03:04 UTC"},
        "packages": {v: {"tilelang": "0"} for v in results},
        "copy_gb_per_s": 5.0,
        "results": results,
    }
    (tmp_path / "tilekernels.gpu.json").write_text(json.dumps(run))
    monkeypatch.setitem(tables["compared"].__globals__, "RESULTS", tmp_path / "gpu")
    assert tables["compared"]() == [("1.0.0 moe.a", 8.0, 2.0), ("2.1.0 moe.a", 1.0, 2.0)]
    ratio = " ".join(tables["ratio_line"]())
    assert ratio.startswith("Of 2 cases that DeepSeek's TileKernels has too, 1 are faster here")
    assert "mean of all ratios is 1.41" in ratio
    assert ratio.endswith("on 2027-01-02).")
    text = "\n".join(tables["provenance"]())
    assert "1.0.0 with TileLang 0, 2.1.0 with TileLang 0" in text
    assert "- `1.0.0 moe.b`: not accepted: too small" in text
    assert "- `2.1.0 moe.a`: results: tensor 0: 1 of 2 differ" in text
    assert "1 are faster here by more than 3 %, 1 are slower" in tables["comparison"]()[0]


# ---- examples -----------------------------------------------------------------------------------


def scripts(path: Path) -> list[str]:
    """The Python examples of a page.

    A block that begins with `# NAME.py, continued` continues the block of that name. Files of a
    folder (`# FOLDER/NAME.py`) have a test of their own.
    """
    blocks = re.findall(r"^```python\n(?!# \w+/)(.*?)^```", path.read_text(), flags=re.S | re.M)
    found: dict[str, str] = {}
    for number, block in enumerate(blocks):
        first = re.match(r"# (\w+\.py)(, continued)?$", block, flags=re.M)
        name = first[1] if first else str(number)
        assert (name in found) == bool(first and first[2]), f"{path.name}: {name}"
        found[name] = found.get(name, "") + block
    return list(found.values())


@each_page
def test_examples_run(path: Path, tmp_path: Path) -> None:
    """Each in a fresh interpreter; one that announces a planted bug must find it."""
    if path.stem == "transformers" and lacks_transformers:
        pytest.skip(NEEDS_TRANSFORMERS)
    for number, text in enumerate(scripts(path)):
        script = tmp_path / f"example_{number}.py"
        script.write_text(text)
        done = subprocess.run(
            [sys.executable, str(script)], cwd=ROOT, capture_output=True, text=True, check=False
        )
        if "the planted bug" in text:
            assert "EmulationError" in done.stderr
            assert "race" in done.stderr
        else:
            assert done.returncode == 0, done.stderr


NEW_OPERATOR = """
import torch

import tile_kernels
from scale.op import SCALE_ROWS, scale_rows
from tile_kernels.runtime import registry, sources
from tile_kernels.runtime.device import described
from tile_kernels.runtime.warmup import compilations

cases = SCALE_ROWS.cases
assert registry.get("family.scale_rows") is SCALE_ROWS
for sample in cases.small:
    given = sample.build("cpu")
    with tile_kernels.backend("emulate"):
        cases.compare(scale_rows(**given), SCALE_ROWS.reference(**given))
for vector in cases.vectors:
    cases.compare(scale_rows(**vector.arguments()), vector.expected())
for reject in cases.rejects:
    try:
        scale_rows(**reject.change(cases.small[-1].build("cpu")))
    except ValueError as error:
        assert str(error).startswith(f"scale_rows: {reject.argument}")
    else:
        raise AssertionError(f"{reject.label} was not refused")
x = torch.randn(3, 8).bfloat16().requires_grad_()
torch.compile(scale_rows, fullgraph=True, backend="aot_eager")(x, 0.5).sum().backward()
assert x.grad.eq(0.5).all()
(item,) = compilations([("family.scale_rows", cases.benchmarks[0].build("meta"))], described())
assert "__global__" in sources.cuda_source(item.kernel.definition, item.static, item.arch)
"""


def test_the_new_operator_of_contributing_runs(tmp_path: Path) -> None:
    """Its files as they are printed, in fewer than 120 lines of code, in a fresh interpreter."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    blocks = re.findall(r"^```python\n# (\w+/\w+\.py)\n(.*?)^```", text, flags=re.S | re.M)
    assert {Path(name).name for name, _ in blocks} == {
        "cases.py", "kernel.py", "op.py", "plan.py", "reference.py",
    }  # fmt: skip
    assert sum(bool(line.strip()) for _, code in blocks for line in code.splitlines()) < 120
    for name, code in blocks:
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(code)
    (tmp_path / "run.py").write_text(NEW_OPERATOR)
    done = subprocess.run(
        [sys.executable, "run.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def commands() -> Iterator[Any]:
    """Lines of consoles that change nothing outside of their folder and need no GPU."""
    lines = {
        line
        for path in PAGES
        for block in re.findall(r"^```console\n(.*?)^```", path.read_text(), flags=re.S | re.M)
        for line in re.findall(r"^\$ tile-kernels (.*)", block, flags=re.M)
    }
    for words in sorted(shlex.split(line, comments=True) for line in lines):
        if words[0] in ("info", "ops", "source", "ep-model") and "family.scale_rows" not in words:
            yield pytest.param(words, id=" ".join(words))


@pytest.mark.parametrize("words", list(commands()))
def test_commands_run(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(words) == 0
    assert capsys.readouterr().out


# ---- messages -----------------------------------------------------------------------------------


def messages() -> Iterator[list[str]]:
    """Texts in the sources: what is fixed of each, between what is filled in."""
    autograd = Path(torch.__file__).parent / "_library" / "autograd.py"
    examples = (ROOT / "examples").rglob("*.py")
    for file in (autograd, *(ROOT / "tile_kernels").rglob("*.py"), *examples):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [v.value if isinstance(v, ast.Constant) else "\0" for v in node.values]
                yield "".join(map(str, parts)).split("\0")
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield [node.value]
    for file in (ROOT / "tile_kernels" / "emulator" / "include").iterdir():
        if file.is_file():
            for text in re.findall(r'"((?:race|out of bounds): .*?)"', file.read_text()):
                yield re.split(r"%\w+", text)


def is_said(quote: str, fixed: list[str]) -> bool:
    """Whether a text of the sources can read like that.

    A quote with `…` has fixed parts of it, in order; one without is the whole text, filled in.
    """
    if "…" not in quote:
        whole = ".+".join(map(re.escape, fixed))
        return len("".join(fixed)) > 8 and any(
            re.fullmatch(whole, text, flags=re.S) for text in (quote, quote.removeprefix("OP: "))
        )
    parts = [part.strip() for part in quote.removeprefix("OP: ").split("…")]
    pattern = ".*".join(re.escape(part) for part in parts if part)
    return any(parts) and re.search(pattern, "\0".join(fixed), flags=re.S) is not None


def test_quoted_messages_are_those_of_the_sources() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    quotes = re.findall(r"^\| `([^`]+)` \|", text, flags=re.M)
    assert len(quotes) > 20
    texts = list(messages())
    for quote in quotes:
        assert any(is_said(quote, fixed) for fixed in texts), quote
    assert not any(is_said("OP: this is not what anybody says", fixed) for fixed in texts)
    assert not any(is_said("… header … not found", fixed) for fixed in texts)


# ---- links and the site -------------------------------------------------------------------------


@each_page
def test_links_to_files_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", path.read_text()):
        assert (path.parent / target).exists(), target


def test_site_builds(tmp_path: Path) -> None:
    """Every page, strictly, with all that it links to; nobody needs a network to read it."""
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for page in (ROOT / "docs").rglob("*.md"):
        place = page.relative_to(ROOT / "docs").with_suffix(".html")
        text = (tmp_path / place).read_text()
        assert not re.search(r'(src|href)="https?://[^"]*\.(css|js)"', text)
    for page in tmp_path.rglob("*.html"):
        for target in re.findall(r'(?:src|href)="(?!https?:)([^"#?]+)', page.read_text()):
            if page.name != "404.html":
                assert (page.parent / target).exists(), f"{page}: {target}"
    reference = (tmp_path / "reference" / "quant.html").read_text()
    assert "per_token_cast" in reference
    assert "<td><code>num_per_channels</code></td>" in reference
    assert "unpack_from_e2m1fn_x2" in reference
    assert '<td>As in <a href="#per_channel_cast_fused"><code>per_channel_cast_fused' in reference
    assert "per_token_cast_to_e5m6" in reference
    for family in ("moe", "quant", "gemm", "engram", "mhc", "attention", "transpose", "ep"):
        text = (tmp_path / f"{family}.html").read_text()
        article = text.split("<article")[1].split("</article>")[0]
        assert f'href="reference/{family}.html"' in article, family
        assert f'href="reference/{family}.html"' in (tmp_path / "index.html").read_text()
    listed = (tmp_path / "operators.html").read_text()
    for family, page, name in (("moe", "moe", "topk_gate"), ("transform", "norm", "apply_rotary")):
        assert f'<h2 id="{family}">' in listed
        assert f'href="reference/{page}.html#{name}"' in listed
        assert f'id="{name}"' in (tmp_path / "reference" / f"{page}.html").read_text()
    assert "gate_scores" in (tmp_path / "reference" / "references.html").read_text()


def test_the_search_works_from_disk() -> None:
    """Browsers start no worker from a file; the script that replaces it is one of this site."""
    config = (ROOT / "mkdocs.yml").read_text()
    assert "  - offline" in config
    assert "    - iframe-worker.js" in config
    assert (ROOT / "docs" / "iframe-worker.js").exists()


def hooks(root: Path) -> dict[str, Any]:
    """What `docs/hooks.py` defines, for a repository elsewhere."""
    found = runpy.run_path(str(ROOT / "docs" / "hooks.py"))
    found["document_of"].__globals__["ROOT"] = root
    return found


def test_the_reference_has_methods_of_base_classes() -> None:
    """A class that is split over modules of the package is documented in one place."""
    page = hooks(ROOT)["reference"]("Expert parallelism", ["tile_kernels.ep"])
    for method in ("dispatch", "pp_send", "all_gather", "engram_fetch", "get_buffer_size_hint"):
        assert page.count(f"#### `ElasticBuffer.{method}` {{ data-toc-label=") == 1, method


def test_pages_of_linked_files(tmp_path: Path) -> None:
    """Root files and folders, linked from pages and from each other; frames within frames."""
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "one.py").write_text('"""Says:\n\n```\n[no link](nowhere.md)\n```\n"""\n')
    (tmp_path / "read").mkdir()
    (tmp_path / "read" / "README.md").write_text("[up](../CONTRIBUTING.md)")
    links = "[a](LICENSE) [b](docs/moe.md#x) [c](made) [d](read/) [e](https://f) [g](#h)"
    (tmp_path / "CONTRIBUTING.md").write_text(links)
    (tmp_path / "LICENSE").write_text("free")
    made = hooks(tmp_path)
    pages = made["file_pages"]({"docs/index.md": "[x](../CONTRIBUTING.md) [y](moe.md)"})
    assert pages["source/contributing-md.md"] == (
        "[a](license.md) [b](../moe.md#x) [c](made.md) [d](read.md) [e](https://f) [g](#h)"
    )
    assert pages["source/read.md"] == "[up](contributing-md.md)"
    assert "[one.py](made-one-py.md)" in pages["source/made.md"]
    assert pages["source/made-one-py.md"].count("````") == 2
    assert len(pages) == 5


@pytest.mark.parametrize("link", ["../missing.md", "../../outside.md", "../picture.png"])
def test_links_that_cannot_be_shown_are_refused_in_words(link: str, tmp_path: Path) -> None:
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\xff")
    made = hooks(tmp_path)
    with pytest.raises(made["PluginError"], match=re.escape(Path(link).name)):
        made["file_pages"]({"docs/index.md": f"[x]({link})"})
