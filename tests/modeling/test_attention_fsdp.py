"""Attention layers under FSDP2: two processes with half of the parameters each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from tests.ep.processes import run_processes
from tests.modeling.test_attention_layers import HIDDEN, csa, tokens
from tile_kernels.modeling.attention import CompressedSparseAttention

PROCESSES = 2


def _whole(x: Any) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def _process(group: dist.ProcessGroup, dtype: torch.dtype) -> None:
    rank = group.rank()
    torch.backends.mkldnn.enabled = False  # see `plain_matrix_products`
    layer, alone = csa().to(dtype), csa().to(dtype)
    fully_shard(layer, mesh=init_device_mesh("cpu", (PROCESSES,)))
    texts = [tokens(1, 17, seed=seed).to(dtype) for seed in range(PROCESSES)]
    y, loss = layer(texts[rank], indexer_loss=True)
    (y.float().square().mean() + loss).backward()
    for text in texts:  # FSDP averages the gradients of all processes
        expected, expected_loss = alone(text, indexer_loss=True)
        ((expected.float().square().mean() + expected_loss) / PROCESSES).backward()
    for (name, one), other in zip(layer.named_parameters(), alone.parameters()):
        assert isinstance(one, DTensor), name
        assert one.to_local().numel() <= -(-other.shape[0] // PROCESSES) * other[0].numel()
        assert one.grad is not None
        torch.testing.assert_close(_whole(one.grad), other.grad, rtol=0.02, atol=1e-4)
    state = {name: _whole(x) for name, x in layer.state_dict().items()}
    whole = CompressedSparseAttention(
        HIDDEN, heads=4, q_rank=24, out_groups=2, out_rank=16, window=8, topk=3, index_heads=2,
        index_dim=64, dtype=dtype,
    )  # fmt: skip
    whole.load_state_dict(state)


@pytest.mark.skipif(not dist.is_gloo_available(), reason="PyTorch was built without gloo")
def test_parameters_are_sharded_and_gradients_averaged() -> None:
    run_processes(PROCESSES, _process, torch.float32)


def _in_bfloat16(group: dist.ProcessGroup) -> None:
    torch.backends.mkldnn.enabled = False  # see `plain_matrix_products`
    layer, alone = csa(), csa().bfloat16()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(layer, mesh=init_device_mesh("cpu", (PROCESSES,)), mp_policy=policy)
    x = tokens(1, 17, seed=group.rank()).bfloat16()
    y = layer(x)
    assert torch.equal(y, alone(x))
    y.float().square().mean().backward()
    for name, one in layer.named_parameters():
        assert one.dtype == torch.float32
        if not name.startswith("indexer"):  # which only its own loss trains
            assert _whole(one.grad).float().norm() > 0, name


@pytest.mark.skipif(not dist.is_gloo_available(), reason="PyTorch was built without gloo")
def test_parameters_of_float32_compute_in_bfloat16() -> None:
    run_processes(PROCESSES, _in_bfloat16)
