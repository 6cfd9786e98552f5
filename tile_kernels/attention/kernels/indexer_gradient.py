"""The gradients of the scores at selected keys: a block per query, over tiles of its keys.

What comes through relu is a sum of two bfloat16, its rounding and the rest, so that products with
queries and keys lose nothing that matters.

A key has been selected by many queries. Their shares of its gradient are added as integers, in
units of a power of two that the host chooses so that nothing overflows: integers add up to the same
sum in any order.
"""

from typing import Any, NamedTuple

from tilelang import language as T

from tile_kernels.runtime.device import Device
from tile_kernels.runtime.kernels.common import EXPLICIT_GUARDS
from tile_kernels.runtime.launch import kernel

KEYS, THREADS = 64, 256


class Plan(NamedTuple):
    """`padded`: heads, at least as many as rows of a matrix instruction."""

    source: str
    heads: int
    padded: int
    depth: int
    fenced: bool


def plan(source: str, heads: int, depth: int, device: Device) -> Plan:
    return Plan(source, heads, 64 if heads <= 64 else 128, depth, device.arch == "sm_90a")


@kernel(
    plan=plan,
    access_bits=lambda *_: ((32, 64, 128), 64),
    pass_configs=EXPLICIT_GUARDS,
)
def selected_gradients(source: str, heads: int, padded: int, depth: int, fenced: bool) -> Any:
    """`grad_k` in units of `1 / scale[0]`; what is not there, and padding, has no share."""
    tokens, num_keys, chosen = T.dynamic("tokens num_keys chosen")
    scaled = source != "bfloat16"

    @T.macro
    def publish():
        """A barrier, after which the matrix units see what was written to shared memory."""
        if fenced:
            T.fence_proxy_async()
        T.sync_threads()

    @T.prim_func
    def gradients_of_query(
        q: T.Tensor[(tokens, heads, depth), source],
        k: T.Tensor[(num_keys, depth), source],
        k_sf: T.Tensor[(num_keys,), T.float32],
        weights: T.Tensor[(tokens, heads), T.float32],
        indices: T.Tensor[(tokens, chosen), T.int32],
        grad: T.Tensor[(tokens, chosen), T.float32],
        scale: T.Tensor[(1,), T.float32],
        grad_q: T.Tensor[(tokens, heads, depth), T.float32],
        grad_k: T.Tensor[(num_keys, depth), T.int64],
        grad_weights: T.Tensor[(tokens, heads), T.float32],
    ):
        with T.Kernel(tokens, threads=THREADS) as token:
            tx = T.get_thread_binding()
            of_q = T.alloc_shared((padded, depth), T.bfloat16)
            of_k = T.alloc_shared((KEYS, depth), T.bfloat16)
            passed = T.alloc_shared((KEYS, padded), T.bfloat16)
            rest = T.alloc_shared((KEYS, padded), T.bfloat16)
            ids = T.alloc_shared((KEYS,), T.int32)
            incoming = T.alloc_shared((KEYS,), T.float32)
            loaded_q = T.alloc_fragment((padded, depth), source)
            loaded_k = T.alloc_fragment((KEYS, depth), source)
            of_weights = T.alloc_fragment((padded,), T.float32)
            products = T.alloc_fragment((KEYS, padded), T.float32)
            weighted = T.alloc_fragment((KEYS, padded), T.float32)
            of_heads = T.alloc_fragment((padded,), T.float32)
            new_q = T.alloc_fragment((padded, depth), T.float32)
            new_k = T.alloc_fragment((KEYS, depth), T.float32)
            factor = T.alloc_var(T.float32, init=scale[0])
            T.clear(new_q)
            T.clear(weighted)
            for i, j in T.Parallel(padded, depth):
                # Loaded first, then cast: in one step the load would not wait for the condition.
                if i < heads:
                    loaded_q[i, j] = q[token, i, j]
                else:
                    loaded_q[i, j] = T.cast(0, source)
            for i, j in T.Parallel(padded, depth):
                of_q[i, j] = T.cast(loaded_q[i, j], T.bfloat16)
            for j in T.Parallel(padded):
                if j < heads:
                    of_weights[j] = weights[token, j]
                else:
                    of_weights[j] = T.float32(0)
            for tile in T.serial(T.ceildiv(chosen, KEYS)):
                T.sync_threads()
                if tx < KEYS:
                    ids[tx] = -1
                    incoming[tx] = T.float32(0)
                    if tile * KEYS + tx < chosen:
                        key = T.alloc_var(T.int32, init=indices[token, tile * KEYS + tx])
                        if key >= 0 and key < num_keys:
                            ids[tx] = key
                            incoming[tx] = grad[token, tile * KEYS + tx]
                            if scaled:
                                incoming[tx] = incoming[tx] * k_sf[key]
                T.sync_threads()
                for i, j in T.Parallel(KEYS, depth):
                    if ids[i] >= 0:
                        loaded_k[i, j] = k[ids[i], j]
                    else:
                        loaded_k[i, j] = T.cast(0, source)
                for i, j in T.Parallel(KEYS, depth):
                    of_k[i, j] = T.cast(loaded_k[i, j], T.bfloat16)
                publish()
                T.gemm(
                    of_k, of_q, products, transpose_B=True, clear_accum=True,
                    policy=T.GemmWarpPolicy.FullCol,
                )  # fmt: skip
                for i, j in T.Parallel(KEYS, padded):
                    weighted[i, j] = weighted[i, j] + incoming[i] * T.max(products[i, j], 0)
                for i, j in T.Parallel(KEYS, padded):
                    products[i, j] = T.if_then_else(
                        products[i, j] > 0, incoming[i] * of_weights[j], T.float32(0)
                    )
                for i, j in T.Parallel(KEYS, padded):
                    passed[i, j] = T.cast(products[i, j], T.bfloat16)
                    rest[i, j] = T.cast(
                        products[i, j] - T.cast(passed[i, j], T.float32), T.bfloat16
                    )
                publish()
                T.clear(new_k)
                for part in (passed, rest):
                    T.gemm(part, of_k, new_q, transpose_A=True, policy=T.GemmWarpPolicy.FullCol)
                    T.gemm(part, of_q, new_k, policy=T.GemmWarpPolicy.FullCol)
                for i, j in T.Parallel(KEYS, depth):
                    if ids[i] >= 0:
                        T.atomic_add(grad_k[ids[i], j], T.cast(new_k[i, j] * factor, T.int64))
            T.reduce_sum(weighted, of_heads, dim=0)
            for j in T.Parallel(padded):
                if j < heads:
                    grad_weights[token, j] = of_heads[j]
            for i, j in T.Parallel(padded, depth):
                if i < heads:
                    grad_q[token, i, j] = new_q[i, j]

    return gradients_of_query
