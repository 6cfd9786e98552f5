"""Fixtures of the attention tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import tile_kernels
from tile_kernels.attention import windows


@pytest.fixture
def one_sm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """So few blocks that each walks over many windows."""
    before = tile_kernels.get_num_sms()
    monkeypatch.setattr(windows.config, "get_device_num_sms", lambda _: 1)
    tile_kernels.set_num_sms(1)
    yield
    monkeypatch.undo()
    tile_kernels.set_num_sms(before)
