"""Normalising the weights of the chosen experts: one thread per token."""

import math
from typing import Any, NamedTuple

from tilelang import language as T

from tile_kernels.runtime.device import Device
from tile_kernels.runtime.launch import kernel

MOST_IN_REGISTERS = 64


class Plan(NamedTuple):
    num_topk: int
    vector: int
    threads: int


def plan(num_topk: int, alignment: int, device: Device) -> Plan:
    return Plan(num_topk, math.gcd(num_topk, 4, max(alignment // 4, 1)), threads=128)


def access_bits(num_topk: int, vector: int, threads: int) -> tuple[int, tuple[int, int]]:
    return 32 * vector, (32, 32 * vector)  # the denominator is a single number


@kernel(plan=plan, access_bits=access_bits)
def normalize_weight(num_topk: int, vector: int, threads: int) -> Any:
    """The order of the sum and its roundings are the oracle's, so the bits are too.

    A row is kept in registers between the two passes; a long one is read again instead.
    """
    chunks = num_topk // vector
    keep = num_topk <= MOST_IN_REGISTERS
    num_tokens = T.dynamic("num_tokens")

    @T.prim_func
    def normalize(
        weights: T.Tensor[(num_tokens, num_topk), T.float32],
        denominator: T.Tensor[(num_tokens,), T.float32],
        normalized: T.Tensor[(num_tokens, num_topk), T.float32],
    ):
        with T.Kernel(T.ceildiv(num_tokens, threads), threads=threads) as block:
            token = block * threads + T.get_thread_binding()
            row = T.alloc_local((chunks if keep else 1, vector), T.float32)
            quotient = T.alloc_local((vector,), T.float32)
            total = T.alloc_var(T.float32, init=T.float32(1e-20))
            if token < num_tokens:
                for c in T.unroll(chunks) if keep else T.serial(chunks):
                    for v in T.vectorized(vector):
                        row[c if keep else 0, v] = weights[token, c * vector + v]
                    for v in T.unroll(vector):
                        total = T.ieee_add(total, row[c if keep else 0, v])
                denominator[token] = total
                for c in T.unroll(chunks) if keep else T.serial(chunks):
                    if not keep:
                        for v in T.vectorized(vector):
                            row[0, v] = weights[token, c * vector + v]
                    for v in T.unroll(vector):
                        quotient[v] = T.ieee_fdiv(row[c if keep else 0, v], total)
                    for v in T.vectorized(vector):
                        normalized[token, c * vector + v] = quotient[v]

    return normalize
