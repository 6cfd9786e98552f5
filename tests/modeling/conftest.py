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
