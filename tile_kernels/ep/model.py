"""How large buffers must be and how many SMs and queue pairs a transfer needs: plain arithmetic.

No function here queries a device. Bandwidths are arguments in GB/s, sizes are in bytes, and a
topology is `num_scaleout_ranks` nodes of `num_scaleup_ranks` ranks each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from tile_kernels.utils import align, ceil_div

PAGE = 2 << 20  # buffers are whole pages of 2 MiB
SECTION = 32  # a token's data, scale factors and metadata each start on a multiple of it
MAX_TOPK = 32
SPARE_SLOTS = 1280  # of a hybrid receive buffer: 8 channels on each of 160 SMs
WORKSPACE_BYTES = 14 << 20  # 12,820,528 bytes of counters, in whole pages
# Limits of DeepEP's kernels, for warnings; the engines here have none of them.
MAX_RANKS, MAX_EXPERTS, MAX_LOCAL_EXPERTS = 1024, 2048, 256
MAX_HYBRID = 128  # ranks of a node plus local experts, in hybrid mode
DEFAULT_NUM_SMS = 20  # where no bandwidth is known


# ---- sizes --------------------------------------------------------------------------------------


def dispatch_token_bytes(hidden: int, element_size: int, num_sf_packs: int, num_topk: int) -> int:
    """Bytes of one dispatched token: data, scale factors, metadata.

    >>> dispatch_token_bytes(7168, 2, 0, 8)
    14464
    """
    return dispatch_row_bytes((hidden * element_size, 4 * num_sf_packs), num_topk)


def dispatch_row_bytes(parts: Sequence[int], num_topk: int) -> int:
    """Bytes of one dispatched token with parts of so many bytes, and its metadata."""
    metadata = 8 * num_topk + 4 * (1 + num_topk)
    return sum(align(size, SECTION) for size in (*parts, metadata))


def combine_token_bytes(hidden: int, num_topk: int, element_size: int = 2) -> int:
    """Bytes of one combined token, by default of bfloat16: data, ids and weights."""
    return align(element_size * hidden, SECTION) + align(8 * num_topk, SECTION)


def buffer_bytes(
    num_scaleout_ranks: int,
    num_scaleup_ranks: int,
    num_max_tokens_per_rank: int,
    hidden: int,
    num_topk: int = 0,
    use_fp8_dispatch: bool = False,
    allow_multiple_reduction: bool = True,
    all_nvlink: bool = True,
) -> int:
    """Bytes that dispatch and combine need on each rank.

    One scale-out rank is direct mode, several are hybrid mode. `num_topk=0` leaves room for 32
    slots. `all_nvlink=False` adds staging for direct peers that loads and stores do not reach.

    >>> buffer_bytes(2, 8, num_max_tokens_per_rank=4096, hidden=7168, num_topk=8)
    1218445312
    """
    slots = num_topk or MAX_TOPK
    tokens = num_max_tokens_per_rank
    num_packs = ceil_div(hidden, SECTION) if use_fp8_dispatch else 0
    out = dispatch_token_bytes(hidden, 1 if use_fp8_dispatch else 2, num_packs, slots)
    back = combine_token_bytes(hidden, slots)
    ranks = (num_scaleout_ranks, num_scaleup_ranks, tokens)
    dispatch = dispatch_slots(*ranks, all_nvlink) * out
    combine = combine_slots(*ranks, slots, allow_multiple_reduction, all_nvlink) * back
    return align(max(dispatch, combine), PAGE)


def dispatch_slots(
    num_scaleout_ranks: int,
    num_scaleup_ranks: int,
    num_max_tokens_per_rank: int,
    all_nvlink: bool = True,
) -> int:
    """How many dispatched tokens the buffer of a rank must have room for."""
    nodes, tokens = num_scaleout_ranks, num_max_tokens_per_rank
    if nodes == 1:
        return (num_scaleup_ranks + (not all_nvlink)) * tokens
    return (num_scaleup_ranks * nodes + 1) * tokens + nodes * (tokens + SPARE_SLOTS)


def combine_slots(
    num_scaleout_ranks: int,
    num_scaleup_ranks: int,
    num_max_tokens_per_rank: int,
    num_topk: int,
    allow_multiple_reduction: bool = True,
    all_nvlink: bool = True,
) -> int:
    """How many combined tokens the buffer of a rank must have room for."""
    nodes, tokens = num_scaleout_ranks, num_max_tokens_per_rank
    copies = 1 if allow_multiple_reduction else num_topk

    def max_copies(ranks: int) -> int:
        return min(ranks, num_topk) if allow_multiple_reduction else num_topk

    if nodes == 1:
        staged = 0 if all_nvlink else num_scaleup_ranks * copies
        return (max_copies(num_scaleup_ranks) + staged) * tokens
    received = max_copies(num_scaleup_ranks) * nodes + max_copies(nodes)
    return received * tokens + copies * nodes * (tokens + SPARE_SLOTS)


def max_expanded_rows(num_rows: int, num_topk: int, num_local_experts: int, alignment: int) -> int:
    """The largest number of rows of the expanded layout for so many received rows."""
    most_slots = num_rows * min(num_topk, num_local_experts)
    return align(most_slots + (alignment - 1) * num_local_experts, alignment)


def limits_exceeded(num_scaleout_ranks: int, num_scaleup_ranks: int, num_experts: int) -> list[str]:
    """The limits of DeepEP's kernels that a configuration exceeds, one sentence each.

    The engines of this package do not have these limits.

    >>> limits_exceeded(2, 8, 256)
    []
    >>> limits_exceeded(32, 64, 4096)[0]
    'DeepEP has at most 1024 ranks, this configuration has 2048'
    """
    ranks = num_scaleout_ranks * num_scaleup_ranks
    local = num_experts // ranks
    limits = [
        (MAX_RANKS, ranks, "ranks"),
        (MAX_EXPERTS, num_experts, "experts"),
        (MAX_LOCAL_EXPERTS, local, "experts on each rank"),
    ]
    if num_scaleout_ranks > 1:
        limits.append((MAX_HYBRID, num_scaleup_ranks + local, "ranks of a node and local experts"))
    return [
        f"DeepEP has at most {limit} {what}, this configuration has {size}"
        for limit, size, what in limits
        if size > limit
    ]


def engram_bytes(
    num_entries: int, hidden: int, num_max_tokens: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[int, int]:
    """Bytes on the GPU for `num_max_tokens` fetched rows and in host memory for the entries."""
    entry = align(hidden * dtype.itemsize, SECTION)
    return align(entry * num_max_tokens, PAGE), align(entry * num_entries, PAGE)


def pp_bytes(num_max_tensor_bytes: int, num_max_inflight_tensors: int) -> int:
    """Bytes of the pipeline rings: sent and received, towards the previous and the next rank."""
    return align(align(num_max_tensor_bytes, SECTION) * num_max_inflight_tensors * 4, PAGE)


def all_gather_session_bytes(
    num_ranks: int, shapes: Sequence[Sequence[int]], dtype: torch.dtype
) -> int:
    """Bytes that gathering a tensor of each shape from all ranks takes in one session."""
    sizes = (num_ranks * math.prod(shape) * dtype.itemsize for shape in shapes)
    return sum(align(size, SECTION) for size in sizes)


# ---- SMs and queue pairs ------------------------------------------------------------------------


def expected_groups(num_groups: int, num_experts: int, num_topk: int) -> float:
    """Into how many of `num_groups` equal groups of experts a token's distinct choices fall.

    On average, each set of experts being as likely as any other.

    >>> round(expected_groups(32, 256, 8), 3)
    7.267
    """
    others = num_experts - num_experts // num_groups
    return num_groups * (1 - math.comb(others, num_topk) / math.comb(num_experts, num_topk))


def num_sms(
    num_scaleout_ranks: int,
    num_scaleup_ranks: int,
    num_experts: int,
    num_topk: int,
    *,
    rdma_gbs: float,
    nvlink_gbs: float,
    num_device_sms: int,
    num_physical_nvlink_ranks: int | None = None,
    prefer_overlap_with_compute: bool = True,
    sm_read_gbs: float = 200.0,
    sm_write_gbs: float = 50.0,
) -> int:
    """How many SMs keep the slower of network and NVLink busy, routing being balanced.

    Traffic is counted per byte that a rank receives over the scale-up fabric. In direct mode
    (`num_scaleout_ranks == 1`) over several machines, `num_physical_nvlink_ranks` is how many
    ranks one machine has; the network never is the bound there.

    >>> num_sms(2, 8, 256, 8, rdma_gbs=50, nvlink_gbs=430, num_device_sms=132)
    12
    """
    ranks = num_scaleout_ranks * num_scaleup_ranks
    nodes = num_scaleout_ranks
    sent = 1 / expected_groups(ranks, num_experts, num_topk)  # once, while a rank receives one
    read, write = sent, 0.0
    rdma = 0.0
    if nodes > 1:
        nodes_hit = expected_groups(nodes, num_experts, num_topk)
        write += sent + sent * nodes_hit / nodes  # staging; own node without the network
        rdma += sent * nodes_hit * (1 - 1 / nodes)
        read += sent * nodes_hit  # forwarding
        write += 1
        nvlink = 1 - 1 / num_scaleup_ranks
    else:
        near = num_physical_nvlink_ranks or ranks
        write += (sent if near < ranks else 0) + near / ranks
        nvlink = near / ranks * (1 - 1 / near)
    if nodes > 1 and not 0 < rdma_gbs < math.inf:
        raise ValueError(f"rdma_gbs must be positive and finite for {nodes} nodes, got {rdma_gbs}")
    if nvlink > 0 and not 0 < nvlink_gbs < math.inf:
        raise ValueError(f"nvlink_gbs must be positive and finite, got {nvlink_gbs}")
    traffic, gbs = nvlink, nvlink_gbs
    if nodes > 1 and (nvlink == 0 or rdma / rdma_gbs > nvlink / nvlink_gbs):
        traffic, gbs = rdma, rdma_gbs
    if traffic == 0:
        return num_device_sms
    rate = gbs / traffic
    needed = max(rate * read / sm_read_gbs, rate * write / sm_write_gbs)
    sms = align(max(4, math.ceil(1.25 * needed)), 2)
    if not prefer_overlap_with_compute:
        sms = max(sms, 64)
    return min(sms, num_device_sms)


def expected_rows(
    num_scaleout_ranks: int,
    num_scaleup_ranks: int,
    num_experts: int,
    num_topk: int,
    num_tokens: int,
    num_physical_nvlink_ranks: int | None = None,
) -> tuple[float, float, float]:
    """Rows that each rank receives of a dispatch, and those of them over network and NVLink.

    On average, every rank having `num_tokens` and routing being balanced. In hybrid mode a row
    crosses the network once for each node and NVLink once for each rank; in direct mode over
    machines of `num_physical_nvlink_ranks` it takes one or the other.

    >>> [round(rows) for rows in expected_rows(4, 8, 256, 8, num_tokens=1000)]
    [7267, 2711, 6358]
    """
    ranks = num_scaleout_ranks * num_scaleup_ranks
    received = num_tokens * expected_groups(ranks, num_experts, num_topk)
    if num_scaleout_ranks > 1:
        nodes = num_tokens * expected_groups(num_scaleout_ranks, num_experts, num_topk)
        network = nodes * (1 - 1 / num_scaleout_ranks)
        return received, network, received * (1 - 1 / num_scaleup_ranks)
    near = num_physical_nvlink_ranks or ranks
    return received, received * (ranks - near) / ranks, received * (near - 1) / ranks


def transfer_seconds(
    network_rows: float, nvlink_rows: float, row_bytes: int, rdma_gbs: float, nvlink_gbs: float
) -> float:
    """How long the slower of the links takes for so many rows, at full speed.

    >>> transfer_seconds(1000, 5000, row_bytes=10_000, rdma_gbs=50, nvlink_gbs=400)
    0.0002
    """
    times = [0.0]
    for rows, gbs, name in (
        (network_rows, rdma_gbs, "rdma_gbs"),
        (nvlink_rows, nvlink_gbs, "nvlink_gbs"),
    ):
        if rows:
            if not 0 < gbs < math.inf:
                raise ValueError(f"{name} must be positive and finite, got {gbs}")
            times.append(rows * row_bytes / (gbs * 1e9))
    return max(times)


def num_qps(sms: int, num_allocated_qps: int, allow_hybrid_mode: bool = True) -> int:
    """How many queue pairs a transfer on `sms` SMs uses, of those that were allocated.

    >>> num_qps(12, 129), num_qps(12, 17, allow_hybrid_mode=False)
    (129, 9)
    """
    wanted = 16 * sms + 1 if allow_hybrid_mode else min(sms, 9)
    return min(wanted, num_allocated_qps)


def default_num_qps(allow_hybrid_mode: bool, fast_rdma_atomics: bool = False) -> int:
    """How many queue pairs a buffer allocates by default."""
    if not allow_hybrid_mode:
        return 17
    return 65 if fast_rdma_atomics else 129
