"""The example says what one should know of the formats."""

from __future__ import annotations

from pathlib import Path

from examples import quant_error


def test_errors_and_picture(tmp_path: Path) -> None:
    picture = tmp_path / "errors.svg"
    found = quant_error.main([str(picture)])
    normal, outliers = found["normal"], found["with outliers"]
    assert normal["e5m6, row"] < normal["e4m3, 128"] < normal["e2m1, 32, 2^n"]
    assert normal["e4m3, 128"] < 1 / 16
    # Few bits suffer where an outlier takes the scale; fewer, the fewer values share it.
    assert outliers["e2m1, 32, 2^n"] > normal["e2m1, 32, 2^n"]
    assert outliers["e2m1, 16, 2^n"] <= outliers["e2m1, 32, 2^n"]
    assert "<svg" in picture.read_text()
