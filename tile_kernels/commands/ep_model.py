"""`tile-kernels ep-model`: what expert parallelism needs on a topology, and its times."""

from __future__ import annotations

import argparse
import math
import sys
from typing import Any

from tile_kernels.runtime import terminal


def ep_model(options: argparse.Namespace) -> int:
    """Show what a topology needs and how long it would take."""
    from tile_kernels.ep import model
    from tile_kernels.ep.topology import Topology
    from tile_kernels.utils import ceil_div

    if (options.plot or options.skew) and not options.simulate:
        raise ValueError("--plot and --skew need --simulate")
    if options.plot:
        terminal.need_matplotlib()
    physical = Topology(options.nodes, options.ranks_per_node)
    sizes = ("nodes", "ranks_per_node", "topk", "tokens", "hidden", "sms")
    small = [name for name in sizes if getattr(options, name) < 1]
    if small:
        raise ValueError(f"--{small[0].replace('_', '-')} must be at least 1")
    if options.experts % physical.num_ranks or options.topk > options.experts:
        raise ValueError(
            f"--experts must be a multiple of the {physical.num_ranks} ranks and at least --topk, "
            f"got {options.experts}"
        )
    hybrid = physical.is_hybrid and not options.direct
    nodes, per_node = (options.nodes, options.ranks_per_node) if hybrid else (1, physical.num_ranks)
    near = options.ranks_per_node
    for sentence in model.limits_exceeded(nodes, per_node, options.experts):
        sys.stderr.write(f"warning: {sentence}\n")
    sms = model.num_sms(
        nodes, per_node, options.experts, options.topk, rdma_gbs=options.rdma_gbs,
        nvlink_gbs=options.nvlink_gbs, num_device_sms=options.sms, num_physical_nvlink_ranks=near,
        prefer_overlap_with_compute=not options.no_overlap,
    )  # fmt: skip
    qps = model.num_qps(sms, model.default_num_qps(not options.direct), not options.direct)
    rows = [["SMs", f"{sms} of {options.sms}"], ["queue pairs", str(qps)]]
    title = f"{options.nodes} x {options.ranks_per_node} ranks, {'hybrid' if hybrid else 'direct'}"
    terminal.show_table(title, [("count", "left"), ("", "right")], rows)

    rows = []
    for name, fp8, multiple in (
        ("bfloat16 dispatch", False, True),
        ("FP8 dispatch", True, True),
        ("bfloat16 dispatch, one sum at the source", False, False),
    ):
        size = model.buffer_bytes(
            nodes, per_node, options.tokens, options.hidden, options.topk, use_fp8_dispatch=fp8,
            allow_multiple_reduction=multiple, all_nvlink=hybrid or options.nodes == 1,
        )  # fmt: skip
        rows.append([name, f"{size:,}", f"{size / 2**30:.2f}"])
    size = model.WORKSPACE_BYTES
    rows.append(["workspace", f"{size:,}", f"{size / 2**30:.2f}"])
    columns = [("buffer of a rank", "left"), ("bytes", "right"), ("GiB", "right")]
    title = f"{options.tokens} tokens of {options.hidden} channels, {options.topk} experts each"
    terminal.show_table(title, columns, rows)

    received, network, nvlink = model.expected_rows(
        nodes, per_node, options.experts, options.topk, options.tokens, near
    )
    scales = ceil_div(options.hidden, 128)
    row_bytes = {
        "dispatch, bfloat16": model.dispatch_token_bytes(options.hidden, 2, 0, options.topk),
        "dispatch, FP8": model.dispatch_token_bytes(options.hidden, 1, scales, options.topk),
        "combine, bfloat16": model.combine_token_bytes(options.hidden, options.topk),
    }
    traffic = _simulated(options, physical, hybrid) if options.simulate else None
    rows = []
    for name, size in row_bytes.items():
        rates = (size, options.rdma_gbs, options.nvlink_gbs)
        seconds = model.transfer_seconds(network, nvlink, *rates)
        cells = [name, f"{network * size / 1e6:.1f}", f"{nvlink * size / 1e6:.1f}"]
        cells.append(f"{seconds * 1e6:.0f}")
        if traffic is not None:
            cells.append(f"{traffic.seconds(*rates) * 1e6:.0f}")
        rows.append(cells)
    names = ["", "network MB", "NVLink MB", "us at least"] + ["simulated us"] * options.simulate
    columns = [(name, "right" if name else "left") for name in names]
    title = f"{received:.0f} rows received by a rank on average"
    terminal.show_table(title, columns, rows)
    if traffic is not None:
        _show_traffic(traffic)
        if options.plot:
            from tile_kernels.ep import sim

            sim.plot(traffic, row_bytes["combine, bfloat16"], options.plot)
            print(f"wrote {options.plot}")
    return 0


def _simulated(options: argparse.Namespace, physical: Any, hybrid: bool) -> Any:
    from tile_kernels.ep import sim

    routing = sim.balanced_routing(options.tokens, options.experts, options.topk)
    if options.skew is not None:
        if not 0 < options.skew < math.inf:
            raise ValueError(f"--skew must be a positive number, got {options.skew}")
        routing = sim.skewed_routing(
            options.tokens, options.experts, options.topk, physical.num_ranks, options.skew
        )
    return sim.simulate(physical, options.experts, routing, hybrid=hybrid)


def _show_traffic(traffic: Any) -> None:
    from tile_kernels.ep import sim

    rows = []
    for name in sim.COUNTS:
        counts = getattr(traffic, name)
        cells = [f"{counts.double().mean().item():.1f}", str(int(counts.min()))]
        rows.append([name, *cells, str(int(counts.max())), f"{traffic.imbalance(name):.2f}"])
    columns = [("rows of a rank", "left")]
    columns += [(name, "right") for name in ("average", "least", "most", "most / average")]
    terminal.show_table("simulated", columns, rows)
