"""What tests of layers share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def plain_matrix_products() -> Iterator[None]:
    """oneDNN picks AMX for bfloat16 by a CPU flag that does not say whether AMX may be used."""
    with torch.backends.mkldnn.flags(enabled=False):
        yield


@pytest.fixture
def one_thread() -> Iterator[None]:
    """More of them only wait for each other on tensors this small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
