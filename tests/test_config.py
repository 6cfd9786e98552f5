"""The SM budget, with and without a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import tile_kernels
from tile_kernels import config
from tile_kernels.runtime.device import described


@pytest.fixture
def lifted() -> Iterator[int]:
    full = config.get_device_num_sms()
    yield full
    tile_kernels.set_num_sms(full)


def test_budget_is_all_until_set_and_persists(lifted: int) -> None:
    assert tile_kernels.get_num_sms() == tile_kernels.get_device_num_sms() == lifted
    before = config.generation
    tile_kernels.set_num_sms(lifted - 1)
    assert tile_kernels.get_num_sms() == lifted - 1
    assert config.with_budget(described("sm_80")).num_sms == min(lifted - 1, 108)
    assert config.generation > before  # plans made before no longer hold


def test_bad_budgets_are_refused(lifted: int) -> None:
    for wrong in (0, -1, lifted + 1):
        with pytest.raises(ValueError, match=rf"num_sms must be in 1\.\.{lifted}, got {wrong}"):
            tile_kernels.set_num_sms(wrong)
    for wrong in (True, 1.0, "1"):
        with pytest.raises(TypeError, match="num_sms must be an int"):
            tile_kernels.set_num_sms(wrong)  # type: ignore[arg-type]
    assert tile_kernels.get_num_sms() == lifted


def test_shared_memory_of_a_multiprocessor() -> None:
    assert config.get_max_smem_per_sm() >= 64 << 10
