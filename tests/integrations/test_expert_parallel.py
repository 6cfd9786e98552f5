"""Adapters for torchtitan's and Megatron's interfaces, and experts that move to other ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from tests.ep.processes import run_processes
from tile_kernels.ep import ElasticBuffer, LocalGroup, even_owners, move_experts, run_ranks
from tile_kernels.integrations.expert_parallel import (
    TokenDispatcher,
    fused_combine,
    fused_dispatch,
)
from tile_kernels.testing.numeric import assert_equal

EXPERTS, HIDDEN, TOPK = 4, 8, 2


def tokens(rank: int, count: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(count, HIDDEN, generator=generator)
    ids = torch.rand(count, EXPERTS, generator=generator).argsort(1)[:, :TOPK].contiguous()
    return x, ids, torch.rand(count, TOPK, generator=generator)


def experts() -> Tensor:
    return torch.randn(EXPERTS, HIDDEN, generator=torch.Generator().manual_seed(9))


def alone(x: Tensor, ids: Tensor, scores: Tensor) -> Tensor:
    """The sum that both adapters compute, with all experts on one rank."""
    return (x[:, None] * experts()[ids] * scores[..., None]).sum(1)


def with_gradients(run: Any, rank: int) -> list[Tensor]:
    x, ids, scores = tokens(rank)
    x.requires_grad_()
    scores.requires_grad_()
    y = run(x, ids, scores)
    y.square().sum().backward()
    return [y.detach(), x.grad, scores.grad]


def check(run: Any, rank: int) -> None:
    for found, wanted in zip(with_gradients(run, rank), with_gradients(alone, rank)):
        torch.testing.assert_close(found, wanted)


def torchtitan(group: Any) -> None:
    """By a device mesh of two processes, as torchtitan wires it."""
    rank, size = group.rank(), group.size()
    dispatcher = TokenDispatcher.Config(
        num_experts=EXPERTS, top_k=TOPK, num_max_tokens_per_rank=8
    ).build()
    with pytest.raises(RuntimeError, match="wire_meshes must be called before dispatch"):
        dispatcher.dispatch(*tokens(rank)[::2], tokens(rank)[1])
    dispatcher.wire_meshes(ep_mesh=init_device_mesh("cpu", (size,), mesh_dim_names=("ep",))["ep"])
    dispatcher.init_buffer()
    local = experts().chunk(size)[rank]

    def run(x: Tensor, ids: Tensor, scores: Tensor) -> Tensor:
        loads = torch.bincount(ids.flatten(), minlength=EXPERTS)
        rows, counts, metadata = dispatcher.dispatch(x, scores, ids, loads)
        total = loads.clone()
        dist.all_reduce(total)
        assert counts.tolist() == total.chunk(size)[rank].tolist()
        assert rows.shape == (int(counts.sum()), HIDDEN)
        return dispatcher.combine(rows * local.repeat_interleave(counts, 0), metadata, x)

    check(run, rank)


@pytest.mark.multiprocess
def test_a_dispatcher_over_a_mesh() -> None:
    run_processes(2, torchtitan, timeout=100)


def megatron(group: Any, **options: bool) -> None:
    rank = group.rank() if callable(group.rank) else group.rank
    size = group.size()
    local = experts().chunk(size)[rank]

    def run(x: Tensor, ids: Tensor, scores: Tensor) -> Tensor:
        rows, found, probs, counts, handle = fused_dispatch(
            x, ids, scores, EXPERTS, group, **options
        )
        assert counts.tolist() == [int((found == e).sum()) for e in range(len(local))]
        assert not probs[found < 0].any()
        weighted = (local[found.clamp(min=0)] * probs[..., None]).sum(1)
        total, nothing = fused_combine(rows * weighted, group, handle, **options)
        assert nothing is None
        return total

    check(run, rank)


@pytest.mark.parametrize("async_finish", [False, True])
def test_the_fused_functions(async_finish: bool) -> None:
    options = {"async_finish": async_finish, "allocate_on_comm_stream": async_finish}
    run_ranks(2, lambda group: megatron(group, **options))


@pytest.mark.multiprocess
def test_the_fused_functions_over_processes() -> None:
    run_processes(2, megatron, timeout=100)


# ---- experts on other ranks ---------------------------------------------------------------------


def test_experts_move_to_the_ranks_that_remain() -> None:
    """Rank 1 of three is lost; its experts have replicas on rank 2. The layer goes on."""
    first = even_owners(6, [True] * 3)
    owners = [[rank, 2] if rank == 1 else [rank] for rank in first]
    active = [True, False, True]
    weights = torch.arange(6.0)[:, None] + torch.tensor([0.0, 0.25])

    def rank(group: LocalGroup) -> Any:
        if not active[group.rank]:
            return None
        held = [expert for expert, ranks in enumerate(owners) if group.rank in ranks]
        mine = move_experts(group, weights[held], owners, even_owners(6, active), active)
        alone = ElasticBuffer(group, num_max_tokens_per_rank=4, hidden=2, active_ranks=active)
        assert alone.num_ranks == 3
        return mine

    results = run_ranks(3, rank)
    assert_equal(results[0], weights[:3])
    assert results[1] is None
    assert_equal(results[2], weights[3:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int64])
def test_any_placement(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = torch.randint(0, 100, (7, 3, 2), generator=generator).to(dtype)
    owners = torch.randint(0, 3, (7,), generator=generator).tolist()
    new = torch.randint(0, 3, (7,), generator=generator).tolist()

    def rank(group: LocalGroup) -> Tensor:
        held = [expert for expert, owner in enumerate(owners) if owner == group.rank]
        return move_experts(group, weights[held], owners, new)

    for me, found in enumerate(run_ranks(3, rank)):
        wanted = weights[[expert for expert, owner in enumerate(new) if owner == me]]
        assert found.dtype == dtype
        assert_equal(found, wanted)


def mistakes(group: Any) -> list[str]:
    weights = torch.zeros(2, 3)
    found = []
    for owners, new, given in (
        ([0, 0, 1, 1], [0, 0, 1], weights),
        ([0, 0, 1, 1], [0, 0, 1, 2], weights),
        ([0, 0, 1, 1], [0, 0, 1, 1], weights[: 1 + group.rank]),
        ([0, 0, 1, 1], [0, 0, 1, group.rank], weights),
    ):
        with pytest.raises(ValueError, match="move_experts: ") as error:
            move_experts(group, given, owners, new)
        found.append(str(error.value))
    return found


def test_mistakes_are_errors_of_all_ranks() -> None:
    both = run_ranks(2, mistakes)
    assert both[0] == both[1]
    for message, part in zip(
        both[0],
        ("the length of new_owners", "a rank of owners", "weights must have the 2 experts of rank",
         "new_owners must be the same on all ranks"),
        strict=True,
    ):  # fmt: skip
        assert part in message
    with pytest.raises(ValueError, match="num_experts must be a multiple of the 2 active ranks"):
        even_owners(3, [True, True])
