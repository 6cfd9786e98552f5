"""Histograms of indices: one per block in shared memory, then their sum, in one host call."""

from typing import Any, NamedTuple

from tilelang import language as T

from tile_kernels.runtime.device import Device
from tile_kernels.runtime.launch import kernel

COUNT_THREADS = 512
SUM_THREADS = 64


class Plan(NamedTuple):
    num_groups: int
    blocks: int


def plan(num_groups: int, blocks: int, device: Device) -> Plan:
    return Plan(num_groups, blocks)


def access_bits(*_: int) -> tuple[tuple[int, int], int]:
    return (32, 64), 32  # indices are read one by one, as neighbours fill whole sectors


@T.macro
def block_histogram(indices, partial, block, num_groups, blocks, count):
    """Count the indices of one block into its row of `partial`."""
    tx = T.get_thread_binding()
    histogram = T.alloc_shared((num_groups,), T.int32)
    for step in T.serial(T.ceildiv(num_groups, COUNT_THREADS)):
        if step * COUNT_THREADS + tx < num_groups:
            histogram[step * COUNT_THREADS + tx] = 0
    T.sync_threads()
    for step in T.serial(T.ceildiv(count, blocks * COUNT_THREADS)):
        i = (step * blocks + block) * COUNT_THREADS + tx
        if i < count:
            group = T.alloc_var(T.int64, init=indices[i])
            if group >= 0 and group < num_groups:
                T.atomic_add(histogram[group], 1)
    T.sync_threads()
    for step in T.serial(T.ceildiv(num_groups, COUNT_THREADS)):
        if step * COUNT_THREADS + tx < num_groups:
            partial[block, step * COUNT_THREADS + tx] = histogram[step * COUNT_THREADS + tx]


@T.macro
def sum_of_blocks(partial, group, blocks, total):
    """`total[0]` = the count of one group over all blocks."""
    total[0] = 0
    for b in T.unroll(blocks):
        total[0] = total[0] + partial[b, group]


@kernel(plan=plan, access_bits=access_bits)
def group_count(num_groups: int, blocks: int) -> Any:
    """Counts as they are."""
    count = T.dynamic("count")

    @T.prim_func
    def counted(
        indices: T.Tensor[(count,), T.int64],
        partial: T.Tensor[(blocks, num_groups), T.int32],
        counts: T.Tensor[(num_groups,), T.int32],
    ):
        with T.Kernel(blocks, threads=COUNT_THREADS) as block:
            block_histogram(indices, partial, block, num_groups, blocks, count)
        with T.Kernel(T.ceildiv(num_groups, SUM_THREADS), threads=SUM_THREADS) as block:
            group = block * SUM_THREADS + T.get_thread_binding()
            total = T.alloc_local((1,), T.int32)
            if group < num_groups:
                sum_of_blocks(partial, group, blocks, total)
                counts[group] = total[0]

    return counted


@kernel(plan=plan, access_bits=access_bits)
def aux_fi(num_experts: int, blocks: int) -> Any:
    """Counts times the number of experts over `slots`, the tokens times their choices."""
    count = T.dynamic("count")

    @T.prim_func
    def fraction_of(
        indices: T.Tensor[(count,), T.int64],
        partial: T.Tensor[(blocks, num_experts), T.int32],
        fraction: T.Tensor[(num_experts,), T.float32],
        slots: T.float32,
    ):
        with T.Kernel(blocks, threads=COUNT_THREADS) as block:
            block_histogram(indices, partial, block, num_experts, blocks, count)
        with T.Kernel(T.ceildiv(num_experts, SUM_THREADS), threads=SUM_THREADS) as block:
            expert = block * SUM_THREADS + T.get_thread_binding()
            total = T.alloc_local((1,), T.int32)
            if expert < num_experts:
                sum_of_blocks(partial, expert, blocks, total)
                scaled = T.ieee_mul(T.cast(total[0], T.float32), T.float32(num_experts))
                fraction[expert] = T.ieee_fdiv(scaled, slots)

    return fraction_of
