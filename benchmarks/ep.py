"""Dispatch and combine of expert parallelism, beside other implementations of the same.

    python benchmarks/ep.py symm [--json FILE]      processes that share one GPU
    python benchmarks/ep.py gloo [--json FILE]      processes on CPUs

`symm`: device time of the kernels of a dispatch and a combine along a handle, one rank at a time,
for the kernels that write into the windows of the peers, and for the steps of the ring (pack, copy
to the peer, copy out, unpack, expand). `share` is the bandwidth as a part of that of a copy in the
same run. `tilings_us` are variants of the kernel. `call_us` is the time of whole calls of all ranks
together; processes that share a GPU take turns on it, so that this says little about several GPUs.
`python -m benchmarks.ep_overlap` measures communication beside computation.

`gloo`: whole dispatches and combines of `ElasticBuffer`, and the same exchange written with
`all_to_all_single`: `plain` sends a row for each choice of an expert, `dedup` one for each rank.
`ratio` is the time of `ElasticBuffer` over that of `plain`, of runs that alternate.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tile_kernels.ep import ElasticBuffer, direct
from tile_kernels.ep.peers.op import put_rows
from tile_kernels.ep.plan import plan_hop
from tile_kernels.ep.rows import field_of, pack, scatter_rows, unpack
from tile_kernels.ep.transport import staged_sum
from tile_kernels.testing import benchmark

NUM_EXPERTS, NUM_TOPK = 64, 8
SYMM_TOKENS, SYMM_HIDDEN = 8192, 7168
GLOO_TOKENS, GLOO_HIDDEN = (512, 4096), 2048
RANKS = (2, 4)
CALLS = 10
REPEATS, FLUSH_BYTES, COPY_BYTES = 7, 256 << 20, 1 << 30
DEVICE = "cuda"


def routing(num_tokens: int, rank: int) -> tuple[Tensor, Tensor]:
    """Choices of experts and weights."""
    generator = torch.Generator().manual_seed(rank)
    scores = torch.rand(num_tokens, NUM_EXPERTS, generator=generator)
    weights, topk_idx = scores.topk(NUM_TOPK)
    return topk_idx, weights


# ---- symmetric memory ---------------------------------------------------------------------------


def in_turn(action: Callable[[], Any]) -> Any:
    """`action` of one rank after the other."""
    result = None
    for rank in range(dist.get_world_size()):
        torch.cuda.synchronize()
        dist.barrier()
        if rank == dist.get_rank():
            result = action()
    dist.barrier()
    return result


def timed(action: Callable[[], Any]) -> float:
    """Median device time with a cold L2 cache, from events around the call."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=DEVICE)
    events = []
    for _ in range(1 + REPEATS):
        flush.zero_()
        events.append([torch.cuda.Event(enable_timing=True) for _ in range(2)])
        events[-1][0].record()
        action()
        events[-1][1].record()
    torch.cuda.synchronize()
    return statistics.median(1e3 * begin.elapsed_time(end) for begin, end in events[1:])


def device_us(action: Callable[[], Any]) -> float:
    """Device time of an action of this rank, while the other ranks are idle."""
    return float(in_turn(lambda: timed(action)))


def copy_gbs() -> float:
    """Bandwidth of a copy, read plus write, measured in the same way."""
    source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2e-3 * COPY_BYTES / device_us(lambda: target.copy_(source))


def call_us(action: Callable[[], Any]) -> float:
    """Median time of whole calls that all ranks make together."""
    times = []
    for _ in range(CALLS):
        torch.cuda.synchronize()
        dist.barrier()
        start = time.perf_counter()
        action()
        torch.cuda.synchronize()
        times.append(1e6 * (time.perf_counter() - start))
    return statistics.median(times)


def symm_rank(group: Any) -> list[dict[str, Any]]:
    """The measurements of one rank, in both layouts."""
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    torch.cuda.set_device(0)
    row_bytes = 2 * SYMM_HIDDEN
    num_bytes = 3 * SYMM_TOKENS * NUM_TOPK * row_bytes >> 21 << 21
    buffer = ElasticBuffer(
        group, num_bytes=num_bytes, num_max_tokens_per_rank=SYMM_TOKENS, engine="symm"
    )
    topk_idx, weights = (each.to(DEVICE) for each in routing(SYMM_TOKENS, buffer.rank_idx))
    x = torch.randn(SYMM_TOKENS, SYMM_HIDDEN, device=DEVICE).bfloat16()
    bandwidth = copy_gbs()
    rows = []
    for expand in (False, True):
        rows += symm_layout(buffer, x, topk_idx, weights, expand, bandwidth)
        if buffer.rank_idx == 0:
            for row in rows[-2:]:
                print(json.dumps(rounded(row)), flush=True)
    return rows


def symm_layout(
    buffer: ElasticBuffer, x: Tensor, topk_idx: Tensor, weights: Tensor, expand: bool, copy: float
) -> list[dict[str, Any]]:
    """Dispatch and combine in one layout."""
    fabric, layout = buffer._fabric, "expanded" if expand else "compact"
    window = fabric.window
    received, _, _, handle, _ = buffer.dispatch(
        x, topk_idx, num_experts=NUM_EXPERTS, do_expand=expand
    )
    plan, topk_to_pos = handle.routing.plan, handle.routing.topk_to_pos
    hop, traffic, written = plan.hops[0], plan.traffic, plan.layout
    if window is None or traffic is None or written is None:
        raise RuntimeError("the dispatch did not take the windows")
    y = received.clone()
    del received

    parts = [window.announced()] * buffer.num_ranks

    def begun(transfer: Any) -> Any:
        """A transfer without its flags: only one rank is at work."""
        need = transfer.sections.starts(*transfer.sizes[buffer.rank_idx])[3]
        transfer.region = window.take(parts[0][0], need)
        return transfer

    words = direct.routing_words(topk_idx, weights, 0)
    out = begun(direct.dispatch_transfer(fabric, written, [x], words.shape[1], parts))
    peers = torch.tensor(out.table(), device=DEVICE).view(3, -1)
    sent = (x, written.slots)
    put_us = device_us(
        lambda: direct._put(out, peers, written.ranks, sent, None, (words, written.items))
    )
    tilings_us = {
        name: device_us(
            lambda wide=wide: put_rows(
                x, written.ranks, written.slots, peers, direct.ALIGNMENT, out.capacity,
                items=written.items, words=words, wide=wide,
            )
        )
        for name, wide in (("split", False), ("wide", True))
    }  # fmt: skip
    num_rows = int((written.slots >= 0).sum())
    row_bytes = x[0].nbytes
    put_bytes = (x.shape[0] + num_rows) * row_bytes + (x.shape[0] + sum(hop.send_counts)) * words[
        0
    ].nbytes
    out.region = None

    window.announced()  # collects what is free
    back = begun(direct.combine_transfer(fabric, plan, y, 0, parts))
    back_peers = torch.tensor(back.table(), device=DEVICE).view(3, -1)
    ranks, slots = direct.return_slots(plan, traffic, buffer.rank_idx)
    one = slots[:, None]
    values = y[: len(one)]

    def send() -> None:
        if topk_to_pos is None:
            rows = (values, one)
            direct._put(back, back_peers, ranks[:, None], rows, None, (None, one))
        else:
            direct.put_sums(
                y, topk_to_pos, ranks, slots, back_peers, direct.ALIGNMENT, back.capacity
            )

    return_us = device_us(send)
    return_bytes = (y.shape[0] + len(one)) * row_bytes
    items = back.received(y.dtype, y.shape[1])[0]
    sum_us = device_us(lambda: staged_sum(items, hop.items))
    sum_bytes = (items.shape[0] + x.shape[0]) * row_bytes
    back.region = None

    steps = ring_steps(buffer, x, topk_idx, weights, handle, y, items.clone())
    times = {name: {k: device_us(step) for k, step in each.items()} for name, each in steps.items()}
    measured = {
        "dispatch": ({"put": put_us}, put_bytes),
        "combine": ({"return": return_us, "sum": sum_us}, return_bytes + sum_bytes),
    }
    calls = {
        "dispatch": lambda: buffer.dispatch(x, handle=handle)[0],
        "combine": lambda: buffer.combine(y, handle)[0],
    }
    rows = []
    for name, (kernels, num_bytes) in measured.items():
        result, whole = calls[name](), call_us(calls[name])
        fabric.world.window = None
        by_ring, ring = calls[name](), call_us(calls[name])
        fabric.world.window = window
        if not torch.equal(result, by_ring):
            raise RuntimeError(f"{name}: the results of window and ring differ")
        del result, by_ring
        us, ring_us = sum(kernels.values()), sum(times[name].values())
        rows.append(
            {
                "what": name, "layout": layout, "us": us, "kernels_us": kernels,
                "copy_gbs": copy, "share": num_bytes / us / 1e3 / copy, "ring_us": ring_us,
                "ring_steps_us": times[name], "speedup": ring_us / us, "call_us": whole,
                "ring_call_us": ring,
                "tilings_us": tilings_us if name == "dispatch" else {},
            }
        )  # fmt: skip
    return rows


def ring_steps(
    buffer: ElasticBuffer,
    x: Tensor,
    topk_idx: Tensor,
    weights: Tensor,
    handle: Any,
    y: Tensor,
    items: Tensor,
) -> dict[str, dict[str, Callable[[], Any]]]:
    """What the device does for a dispatch and a combine over the ring."""
    hop, topk_to_pos = handle.routing.plan.hops[0], handle.routing.topk_to_pos
    num_items, num_arrived = sum(hop.send_counts), sum(hop.recv_counts)
    sources = torch.arange(x.shape[0], device=DEVICE)[:, None]
    parts = [x, weights, sources, topk_idx]
    packed = pack(parts)
    area = packed.new_empty((max(num_items, num_arrived), packed.shape[1]))
    sent, arrived = torch.empty_like(area[:num_items]), torch.empty_like(area[:num_arrived])
    fields = [field_of(each) for each in parts]
    dispatch: dict[str, Callable[[], Any]] = {
        "pack": lambda: scatter_rows(pack(parts), hop.items, num_items),
        "copy": lambda: area[:num_items].copy_(sent),
        "copy out": lambda: arrived.copy_(area[:num_arrived]),
        "unpack": lambda: unpack(arrived, fields),
    }
    values = y[:num_arrived] if topk_to_pos is None else staged_sum(y, topk_to_pos)
    combine: dict[str, Callable[[], Any]] = {
        "copy": lambda: area.view(y.dtype)[:num_arrived, : y.shape[1]].copy_(values),
        "copy out": lambda: items.copy_(area.view(y.dtype)[:num_items, : y.shape[1]]),
        "sum": lambda: staged_sum(items, hop.items),
    }
    if topk_to_pos is not None:
        first = unpack(arrived, fields)[0]
        dispatch["expand"] = lambda: scatter_rows(first, topk_to_pos, y.shape[0])
        combine["reduce"] = lambda: staged_sum(y, topk_to_pos)
    del buffer
    return {"dispatch": dispatch, "combine": combine}


# ---- gloo ---------------------------------------------------------------------------------------


class Plain:
    """Expert parallelism as it is written by hand, with one row for each choice of an expert.

    With `dedup` a token is sent once to each rank, and the ranks expand it.
    """

    def __init__(self, topk_idx: Tensor, dedup: bool) -> None:
        self.size, self.dedup = dist.get_world_size(), dedup
        self.local = NUM_EXPERTS // self.size
        self.topk_idx = topk_idx

    def _exchange(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        out = rows.new_empty((sum(received), *rows.shape[1:]))
        dist.all_to_all_single(out, rows, received, sent)
        return out

    def dispatch(self, x: Tensor, weights: Tensor) -> Tensor:
        """Rows by local expert."""
        topk_idx = self.topk_idx
        if self.dedup:
            hop = plan_hop(topk_idx // self.local, self.size)
            self.items, counts = hop.items, torch.tensor(hop.send_counts)
            token = torch.empty(sum(hop.send_counts), dtype=torch.int64)
            where = hop.items >= 0
            token[hop.items[where].long()] = where.nonzero()[:, 0]
            self.order = token
            ids, carried = topk_idx[token], weights[token]
        else:
            self.order = topk_idx.flatten().argsort(stable=True)
            counts = torch.bincount(topk_idx.flatten() // self.local, minlength=self.size)
            ids, carried = topk_idx.flatten()[self.order], weights.flatten()[self.order]
            token = self.order // NUM_TOPK
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts)
        self.sent, self.received = counts.tolist(), received.tolist()
        rows = self._exchange(x[token], self.sent, self.received)
        ids = self._exchange(ids, self.sent, self.received) - dist.get_rank() * self.local
        self.weights = self._exchange(carried, self.sent, self.received)
        if self.dedup:
            self.row, self.slot = ((ids >= 0) & (ids < self.local)).nonzero(as_tuple=True)
            ids = ids[self.row, self.slot]
            by_expert = ids.argsort(stable=True)
            self.row, self.slot = self.row[by_expert], self.slot[by_expert]
            return rows[self.row]
        self.by_expert = ids.argsort(stable=True)
        return rows[self.by_expert]

    def combine(self, y: Tensor) -> Tensor:
        """Sums over the choices of a token."""
        num_tokens = self.topk_idx.shape[0]
        if self.dedup:
            sums = torch.zeros(sum(self.received), y.shape[1])
            sums.index_add_(0, self.row, y.float())
            back = self._exchange(sums.to(y.dtype), self.received, self.sent)
        else:
            rows = torch.empty_like(y)
            rows[self.by_expert] = y
            back = self._exchange(rows, self.received, self.sent)
        total = torch.zeros(num_tokens, y.shape[1])
        token = self.order if self.dedup else self.order // NUM_TOPK
        return total.index_add_(0, token, back.float()).to(y.dtype)


def gloo_rank(group: Any) -> list[dict[str, Any]]:
    """The measurements of one rank."""
    return [row for num_tokens in GLOO_TOKENS for row in gloo_tokens(group, num_tokens)]


def gloo_tokens(group: Any, num_tokens: int) -> list[dict[str, Any]]:
    """Dispatch and combine of so many tokens on each rank."""
    topk_idx, weights = routing(num_tokens, group.rank())
    x = torch.randn(num_tokens, GLOO_HIDDEN).bfloat16()
    buffer = ElasticBuffer(
        group, num_max_tokens_per_rank=num_tokens, hidden=GLOO_HIDDEN, num_topk=NUM_TOPK
    )
    rows: dict[str, Any] = {}
    plain, dedup = Plain(topk_idx, dedup=False), Plain(topk_idx, dedup=True)

    def our_dispatch() -> None:
        rows["ours"], _, _, rows["handle"], _ = buffer.dispatch(
            x, topk_idx, weights, num_experts=NUM_EXPERTS, do_expand=True
        )

    calls: dict[str, dict[str, Callable[[], Any]]] = {
        "dispatch": {
            "ours": our_dispatch,
            "plain": lambda: rows.update(plain=plain.dispatch(x, weights)),
            "dedup": lambda: rows.update(dedup=dedup.dispatch(x, weights)),
        },
        "combine": {
            "ours": lambda: buffer.combine(rows["ours"], rows["handle"])[0],
            "plain": lambda: plain.combine(rows["plain"]),
            "dedup": lambda: dedup.combine(rows["dedup"]),
        },
    }
    found = []
    for what, ways in calls.items():
        results = [call() for call in ways.values()]
        if what == "combine":
            for result in results:
                torch.testing.assert_close(result, NUM_TOPK * x, rtol=2e-2, atol=2e-2)
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(2 * CALLS if num_tokens < 1000 else CALLS):
            for name, call in ways.items():
                dist.barrier()
                start = time.perf_counter()
                call()
                dist.barrier()
                times[name].append(1e3 * (time.perf_counter() - start))
        ms = {name: statistics.median(each) for name, each in times.items()}
        found.append(
            {
                "what": what, "tokens": num_tokens, "hidden": GLOO_HIDDEN, "ms": ms["ours"],
                "plain_ms": ms["plain"], "dedup_ms": ms["dedup"],
                "ratio": ms["ours"] / ms["plain"], "dedup_ratio": ms["dedup"] / ms["plain"],
            }
        )  # fmt: skip
    return found


# ---- processes ----------------------------------------------------------------------------------


def _process(rank: int, size: int, file: str, body: Callable[[Any], Any], pipe: Any) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=size)
    pipe.send(body(dist.group.WORLD))
    dist.barrier()
    dist.destroy_process_group()


def run(size: int, body: Callable[[Any], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """What rank 0 of `size` processes measures, each with `body(group)`."""
    context = multiprocessing.get_context("fork")  # nothing is imported again
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            file = str(Path(folder) / "meet")
            processes.append(
                context.Process(target=_process, args=(rank, size, file, body, theirs))
            )
            processes[-1].start()
            theirs.close()
            pipes.append(ours)
        results = [pipe.recv() for pipe in pipes]
        for process in processes:
            process.join()
    return [{"ranks": size, **row} for row in results[0]]


def rounded(value: Any) -> Any:
    """Numbers with three digits after the point."""
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return round(value, 3) if isinstance(value, float) else value


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("mode", choices=("symm", "gloo"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    arguments = parser.parse_args()
    body = symm_rank if arguments.mode == "symm" else gloo_rank
    rows: list[Any] = []
    for size in arguments.ranks:
        rows += [rounded(row) for row in run(size, body)]
        for row in rows if arguments.mode == "gloo" else []:
            print(json.dumps(row), flush=True)
        if arguments.json:
            # In a separate process: one that has initialized CUDA cannot be forked.
            with multiprocessing.get_context("fork").Pool(1) as pool:
                machine = pool.apply(benchmark.machine)
            found = {"machine": machine, "mode": arguments.mode, "rows": rows}
            arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
