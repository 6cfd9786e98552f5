"""Wrappers that put the name of the called function in front of errors."""

from __future__ import annotations

import pickle

import pytest
import torch

from tile_kernels import v2
from tile_kernels.integrations import vllm
from tile_kernels.runtime import checks


def _doubled(x: torch.Tensor, by: float = 2.0) -> torch.Tensor:
    if by < 0:
        raise ValueError(f"_behind: by must not be negative, got {by}")
    return by * x


def test_errors_have_the_name_that_was_called() -> None:
    named = checks.named_errors(_doubled, "doubled", __name__)
    for function in (named, checks.named_errors(named, "doubled")):
        with pytest.raises(ValueError, match=r"\Adoubled: by must not be negative, got -1"):
            function(torch.ones(1), -1)
        with pytest.raises(TypeError, match=r"\A_doubled\(\) missing 1 required positional"):
            function()


def test_many_functions_can_be_compiled_alone() -> None:
    """Dynamo limits the recompilations of one code object, which are 8."""
    torch._dynamo.reset()
    for i in range(2 * torch._dynamo.config.recompile_limit):
        function = checks.named_errors(_doubled, f"times_{i}")
        compiled = torch.compile(function, fullgraph=True, backend="eager")
        assert compiled(torch.ones(3), float(i)).tolist() == [i] * 3


@pytest.mark.parametrize(
    "function",
    [vllm.mhc_pre, vllm.mhc_pre_delayed, v2.engram.engram_gate_fwd, v2.moe.moe_topk_gate],
    ids=lambda function: function.__name__,
)
def test_named_functions_can_be_pickled(function: object) -> None:
    assert pickle.loads(pickle.dumps(function)) is function
