"""The ablation runs as a command, and the table of the documents is that of its result."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples.tiny_v4 import ablate
from tests.examples.small import SMALL

ROOT = Path(__file__).parent.parent.parent


def test_parts_can_be_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--steps", "2", "--seeds", "1", *SMALL]
    result = json.loads(ablate.main([*given, "--out", str(tmp_path)]).read_text())
    assert result["command"] == given
    assert {"device", "cpu", "torch", "date"} <= result["machine"].keys()
    found = result["losses"]
    assert list(found) == list(ablate.VARIANTS)
    assert all(len(all_of) == 1 and 0 < all_of[0] < 6 for all_of in found.values())
    assert len({all_of[0] for all_of in found.values()}) == len(found)
    printed = capsys.readouterr().out
    assert all(name in printed for name in found)
    assert f"{found['none of it'][0]:.3f}" in printed


def test_rows_are_means_and_bounds() -> None:
    assert ablate.rows({"a": [1.0, 2.0, 4.5]}) == [("a", "2.500", "1.000 to 4.500")]


def test_a_wrong_option_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for given, words in (
        (["--step", "2"], "unrecognized arguments: --step 2"),
        (["--seed", "2"], "an ablation takes neither --seed nor --resume"),
    ):
        with pytest.raises(SystemExit):
            ablate.main(given)
        assert words in capsys.readouterr().err


def test_the_document_shows_the_result() -> None:
    result = json.loads((ROOT / "examples" / "tiny_v4" / "ablation.json").read_text())
    page = (ROOT / "docs" / "demo.md").read_text()
    assert list(result["losses"]) == list(ablate.VARIANTS)
    assert ablate.markdown(result) in page
    assert f"python -m examples.tiny_v4.ablate {' '.join(result['command'])}\n" in page
