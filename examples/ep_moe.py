"""An expert-parallel mixture-of-experts layer, forward and backward, on several processes.

    torchrun --nproc-per-node 4 examples/ep_moe.py      four processes: gloo, or NCCL with 4 GPUs
    python examples/ep_moe.py                           four threads of one process

The number of processes has to divide 24, the number of experts. Every rank has its own tokens (a
different number on each) and its part of the experts. The result is compared with that of one rank
that has all tokens and all experts: the output bit for bit, the gradients up to the order of sums.
"""

import os

import torch
import torch.distributed as dist
from torch import Tensor

from tile_kernels import moe
from tile_kernels.ep import ElasticBuffer, LocalGroup, run_ranks

NUM_RANKS, NUM_EXPERTS, NUM_TOPK, HIDDEN, MOST_TOKENS, ALIGNMENT = 4, 24, 3, 64, 40, 8


def tokens_of(rank: int) -> Tensor:
    """The tokens of a rank; the second has none."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn([40, 0, 17, 23][rank % 4], HIDDEN, generator=generator)


def parameters() -> tuple[Tensor, Tensor]:
    """The router `[E, H]` and the experts `[E, H, H]`, the same on every rank."""
    generator = torch.Generator().manual_seed(100)
    router = torch.randn(NUM_EXPERTS, HIDDEN, generator=generator)
    return router, torch.randn(NUM_EXPERTS, HIDDEN, HIDDEN, generator=generator) / HIDDEN**0.5


def layer(buffer: ElasticBuffer, x: Tensor, router: Tensor, experts: Tensor) -> Tensor:
    """`x` `[T, H]` through the experts that the router chooses, weighted. `experts` are local."""
    logits = x @ router.T
    topk_idx = moe.topk_gate(logits.detach(), NUM_TOPK)
    weights = logits.gather(1, topk_idx).softmax(dim=1)
    rows, _, row_weights, handle, _ = buffer.dispatch(
        x, topk_idx, weights, num_experts=NUM_EXPERTS, expert_alignment=ALIGNMENT, do_expand=True
    )
    parts = rows.split(handle.num_recv_tokens_per_expert_list)
    results = torch.cat([part @ expert for part, expert in zip(parts, experts)])
    combined, _, _ = buffer.combine(results * row_weights[:, None], handle)
    return combined


def forward_and_backward(
    group: object, x: Tensor, most_tokens: int, device: str
) -> dict[str, Tensor]:
    """The output of this rank's tokens, and gradients of them, of the router, of its experts."""
    x, router, experts = (each.to(device) for each in (x, *parameters()))
    shape = {"num_max_tokens_per_rank": most_tokens, "hidden": HIDDEN, "num_topk": NUM_TOPK}
    # With one sum at the source, the output does not depend on how experts are spread over ranks.
    exact = ElasticBuffer(group, allow_multiple_reduction=False, **shape)
    count = NUM_EXPERTS // exact.num_ranks
    experts = experts[exact.rank_idx * count :][:count].clone()
    with torch.no_grad():
        out = layer(exact, x, router, experts)
    # With sums on each rank, less is sent, and the gradients of the weights come back as well.
    staged = ElasticBuffer(group, **shape)
    for leaf in (x, router, experts):
        leaf.requires_grad_()
    layer(staged, x, router, experts).square().sum().backward()
    found = {"out": out, "x": x.grad, "router": router.grad, "experts": experts.grad}
    return {name: each.cpu() for name, each in found.items()}


def run(group: object, device: str = "cpu") -> dict[str, Tensor]:
    """One rank of the group."""
    rank = group.rank if isinstance(group, LocalGroup) else group.rank()
    return forward_and_backward(group, tokens_of(rank), MOST_TOKENS, device)


def compare(results: list[dict[str, Tensor]], device: str = "cpu") -> None:
    """What the ranks found against one rank alone."""
    tokens = torch.cat([tokens_of(rank) for rank in range(len(results))])
    alone = forward_and_backward(LocalGroup(), tokens, len(tokens), device)
    found = {name: torch.cat([each[name] for each in results]) for name in ("out", "x", "experts")}
    found["router"] = sum(each["router"] for each in results)
    assert torch.equal(found["out"], alone["out"])
    print(f"{len(results)} ranks, {len(tokens)} tokens: the output is the same bit for bit")
    for name in ("x", "experts", "router"):
        torch.testing.assert_close(found[name], alone[name], rtol=1e-4, atol=1e-4)
        difference = (found[name] - alone[name]).abs().max().item()
        print(f"gradient of {name}: differs by at most {difference:.1e}")


def main() -> None:
    """Under torchrun as one of its processes; else with threads."""
    torch.set_num_threads(1)
    if "LOCAL_RANK" not in os.environ:
        compare(run_ranks(NUM_RANKS, run))
        return
    device, backend = "cpu", "gloo"
    if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        device, backend = f"cuda:{os.environ['LOCAL_RANK']}", "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
    dist.init_process_group(backend)
    results = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(run(dist.group.WORLD, device), results)
    if results is not None:
        compare(results, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
