"""Attention: forward, backward, decoding, paging, sparse selections."""

import math

import tilelang
import tilelang.language as T
import torch

from . import case
from .gemm import close, randn

LOG2E = 1.4426950408889634


def reference(q, k, v, causal=False, mask=None):
    """`[batch, heads, length, dim]`; heads of k and v are shared by groups of query heads."""
    group = q.shape[1] // k.shape[1]
    k, v = (t.float().repeat_interleave(group, 1) for t in (k, v))
    scores = q.float() @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if causal:
        n, m = scores.shape[-2:]
        scores = scores.masked_fill(torch.ones(n, m, device="cuda").tril(m - n) == 0, -torch.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return scores.softmax(-1) @ v


def flash(batch, heads, kv_heads, length, dim, causal, window=0, stages=2):
    block = 64
    group = heads // kv_heads
    scale = LOG2E / math.sqrt(dim)

    @T.prim_func
    def forward(
        Q: T.Tensor((batch, heads, length, dim), "float16"),
        K: T.Tensor((batch, kv_heads, length, dim), "float16"),
        V: T.Tensor((batch, kv_heads, length, dim), "float16"),
        Out: T.Tensor((batch, heads, length, dim), "float16"),
        Lse: T.Tensor((batch, heads, length), "float32"),
    ):
        with T.Kernel(T.ceildiv(length, block), heads, batch, threads=128) as (bx, by, bz):
            Q_shared = T.alloc_shared((block, dim), "float16")
            K_shared = T.alloc_shared((block, dim), "float16")
            V_shared = T.alloc_shared((block, dim), "float16")
            S = T.alloc_fragment((block, block), "float32")
            P = T.alloc_fragment((block, block), "float16")
            acc = T.alloc_fragment((block, dim), "float32")
            top = T.alloc_fragment((block,), "float32")
            previous = T.alloc_fragment((block,), "float32")
            rescale = T.alloc_fragment((block,), "float32")
            part = T.alloc_fragment((block,), "float32")
            total = T.alloc_fragment((block,), "float32")
            T.copy(Q[bz, by, bx * block : bx * block + block, 0:dim], Q_shared)
            T.fill(acc, 0)
            T.fill(total, 0)
            T.fill(top, -T.infinity("float32"))
            steps = bx + 1 if causal else T.ceildiv(length, block)
            for k in T.Pipelined(steps, num_stages=stages):
                T.copy(K[bz, by // group, k * block : k * block + block, 0:dim], K_shared)
                for i, j in T.Parallel(block, block):
                    if causal:
                        S[i, j] = T.if_then_else(
                            bx * block + i >= k * block + j, 0, -T.infinity("float32")
                        )
                    elif window:
                        S[i, j] = T.if_then_else(
                            T.abs(bx * block + i - k * block - j) <= window,
                            0,
                            -T.infinity("float32"),
                        )
                    else:
                        S[i, j] = T.if_then_else(k * block + j < length, 0, -T.infinity("float32"))
                T.gemm(Q_shared, K_shared, S, transpose_B=True)
                T.copy(V[bz, by // group, k * block : k * block + block, 0:dim], V_shared)
                T.copy(top, previous)
                T.reduce_max(S, top, dim=1, clear=False)
                for i in T.Parallel(block):
                    rescale[i] = T.if_then_else(
                        top[i] == -T.infinity("float32"),
                        1.0,
                        T.exp2((previous[i] - top[i]) * scale),
                    )
                for i, j in T.Parallel(block, block):
                    S[i, j] = T.if_then_else(
                        S[i, j] == -T.infinity("float32"), 0.0, T.exp2((S[i, j] - top[i]) * scale)
                    )
                T.reduce_sum(S, part, dim=1)
                for i in T.Parallel(block):
                    total[i] = total[i] * rescale[i] + part[i]
                for i, j in T.Parallel(block, dim):
                    acc[i, j] *= rescale[i]
                T.copy(S, P)
                T.gemm(P, V_shared, acc)
            for i, j in T.Parallel(block, dim):
                acc[i, j] /= total[i]
            T.copy(acc, Out[bz, by, bx * block : bx * block + block, 0:dim])
            for i in T.Parallel(block):
                total[i] = T.log2(total[i]) + top[i] * scale
            T.copy(total, Lse[bz, by, bx * block : bx * block + block])

    return tilelang.compile(forward, out_idx=[3, 4])


def inputs(batch, heads, kv_heads, length, dim):
    return (randn(batch, h, length, dim) for h in (heads, kv_heads, kv_heads))


@case(quick=True)
def forward_causal():
    q, k, v = inputs(1, 2, 2, 128, 32)
    close(flash(1, 2, 2, 128, 32, True)(q, k, v)[0], reference(q, k, v, True))


@case()
def forward_full_ragged():
    q, k, v = inputs(1, 1, 1, 100, 32)
    close(flash(1, 1, 1, 100, 32, False)(q, k, v)[0], reference(q, k, v))


@case()
def forward_grouped_queries():
    q, k, v = inputs(2, 4, 2, 64, 64)
    out, lse = flash(2, 4, 2, 64, 64, True)(q, k, v)
    close(out, reference(q, k, v, True))
    scores = q.float() @ k.float().repeat_interleave(2, 1).transpose(-1, -2) / 8
    scores = scores.masked_fill(torch.ones(64, 64, device="cuda").tril() == 0, -torch.inf)
    close(lse / LOG2E, scores.logsumexp(-1), 1e-3, 1e-3)


@case()
def forward_sliding_window():
    q, k, v = inputs(1, 1, 1, 128, 32)
    position = torch.arange(128, device="cuda")
    mask = (position[:, None] - position).abs() <= 20
    close(flash(1, 1, 1, 128, 32, False, window=20)(q, k, v)[0], reference(q, k, v, mask=mask))


@case()
def forward_not_pipelined():
    q, k, v = inputs(1, 1, 1, 64, 64)
    close(flash(1, 1, 1, 64, 64, False, stages=0)(q, k, v)[0], reference(q, k, v))


@case()
def backward():
    """Gradients by recomputation: blocks of keys accumulate dK and dV, dQ by atomics."""
    batch, heads, length, dim, block = 1, 2, 128, 32, 64
    scale = 1 / math.sqrt(dim)

    @T.prim_func
    def delta_kernel(
        Out: T.Tensor((batch, heads, length, dim), "float16"),
        dOut: T.Tensor((batch, heads, length, dim), "float16"),
        Delta: T.Tensor((batch, heads, length), "float32"),
    ):
        with T.Kernel(length // block, heads, batch, threads=128) as (bx, by, bz):
            product = T.alloc_fragment((block, dim), "float32")
            total = T.alloc_fragment((block,), "float32")
            for i, j in T.Parallel(block, dim):
                row = bx * block + i
                product[i, j] = T.cast(Out[bz, by, row, j], "float32") * T.cast(
                    dOut[bz, by, row, j], "float32"
                )
            T.reduce_sum(product, total, dim=1)
            T.copy(total, Delta[bz, by, bx * block : bx * block + block])

    @T.prim_func
    def gradients(
        Q: T.Tensor((batch, heads, length, dim), "float16"),
        K: T.Tensor((batch, heads, length, dim), "float16"),
        V: T.Tensor((batch, heads, length, dim), "float16"),
        dOut: T.Tensor((batch, heads, length, dim), "float16"),
        Lse: T.Tensor((batch, heads, length), "float32"),
        Delta: T.Tensor((batch, heads, length), "float32"),
        dQ: T.Tensor((batch, heads, length, dim), "float32"),
        dK: T.Tensor((batch, heads, length, dim), "float16"),
        dV: T.Tensor((batch, heads, length, dim), "float16"),
    ):
        with T.Kernel(length // block, heads, batch, threads=128) as (bx, by, bz):
            K_shared = T.alloc_shared((block, dim), "float16")
            V_shared = T.alloc_shared((block, dim), "float16")
            Q_shared = T.alloc_shared((block, dim), "float16")
            dO_shared = T.alloc_shared((block, dim), "float16")
            P_shared = T.alloc_shared((block, block), "float16")
            dS_shared = T.alloc_shared((block, block), "float16")
            lse = T.alloc_shared((block,), "float32")
            delta = T.alloc_shared((block,), "float32")
            S = T.alloc_fragment((block, block), "float32")
            dP = T.alloc_fragment((block, block), "float32")
            dk = T.alloc_fragment((block, dim), "float32")
            dv = T.alloc_fragment((block, dim), "float32")
            dq = T.alloc_fragment((block, dim), "float32")
            T.copy(K[bz, by, bx * block : bx * block + block, 0:dim], K_shared)
            T.copy(V[bz, by, bx * block : bx * block + block, 0:dim], V_shared)
            T.clear(dk)
            T.clear(dv)
            for step in T.Pipelined(length // block - bx, num_stages=1):
                at = (bx + step) * block
                T.copy(Q[bz, by, at : at + block, 0:dim], Q_shared)
                T.copy(dOut[bz, by, at : at + block, 0:dim], dO_shared)
                T.copy(Lse[bz, by, at : at + block], lse)
                T.copy(Delta[bz, by, at : at + block], delta)
                T.clear(S)
                T.gemm(Q_shared, K_shared, S, transpose_B=True)
                for i, j in T.Parallel(block, block):
                    S[i, j] = T.if_then_else(
                        at + i >= bx * block + j, T.exp2(S[i, j] * scale * LOG2E - lse[i]), 0.0
                    )
                T.copy(S, P_shared)
                T.gemm(P_shared, dO_shared, dv, transpose_A=True)
                T.clear(dP)
                T.gemm(dO_shared, V_shared, dP, transpose_B=True)
                for i, j in T.Parallel(block, block):
                    dP[i, j] = S[i, j] * (dP[i, j] - delta[i]) * scale
                T.copy(dP, dS_shared)
                T.gemm(dS_shared, Q_shared, dk, transpose_A=True)
                T.clear(dq)
                T.gemm(dS_shared, K_shared, dq)
                for i, j in T.Parallel(block, dim):
                    T.atomic_add(dQ[bz, by, at + i, j], dq[i, j])
            T.copy(dk, dK[bz, by, bx * block : bx * block + block, 0:dim])
            T.copy(dv, dV[bz, by, bx * block : bx * block + block, 0:dim])

    q, k, v = inputs(batch, heads, heads, length, dim)
    out, lse = flash(batch, heads, heads, length, dim, True)(q, k, v)
    d_out = randn(batch, heads, length, dim)
    delta = tilelang.compile(delta_kernel, out_idx=-1)(out, d_out)
    dq = torch.zeros(batch, heads, length, dim, device="cuda")
    dk, dv = tilelang.compile(gradients, out_idx=[7, 8])(q, k, v, d_out, lse, delta, dq)
    leaves = [t.float().requires_grad_() for t in (q, k, v)]
    reference(*leaves, causal=True).backward(d_out.float())
    for got, leaf in zip((dq, dk, dv), leaves, strict=True):
        close(got, leaf.grad, 5e-2, 3e-2)


@case()
def decode_split_kv():
    """One query token: parts of the cache by separate blocks, combined by a second kernel."""
    batch, heads, length, dim, splits = 2, 4, 96, 32, 3
    rows, chunk = 64, 32  # heads padded to the rows of a wgmma

    @T.prim_func
    def decode(
        Q: T.Tensor((batch, heads, dim), "float16"),
        K: T.Tensor((batch, length, dim), "float16"),
        V: T.Tensor((batch, length, dim), "float16"),
        Out: T.Tensor((batch, heads, dim), "float16"),
    ):
        part_out = T.alloc_global((batch, splits, heads, dim), "float32")
        part_lse = T.alloc_global((batch, splits, heads), "float32")
        with T.Kernel(splits, batch, threads=128) as (bx, by):
            Q_shared = T.alloc_shared((rows, dim), "float16")
            K_shared = T.alloc_shared((chunk, dim), "float16")
            V_shared = T.alloc_shared((chunk, dim), "float16")
            S = T.alloc_fragment((rows, chunk), "float32")
            P = T.alloc_fragment((rows, chunk), "float16")
            acc = T.alloc_fragment((rows, dim), "float32")
            top = T.alloc_fragment((rows,), "float32")
            total = T.alloc_fragment((rows,), "float32")
            for i, j in T.Parallel(rows, dim):
                Q_shared[i, j] = T.if_then_else(
                    i < heads, Q[by, T.min(i, heads - 1), j], T.cast(0, "float16")
                )
            T.copy(K[by, bx * chunk : bx * chunk + chunk, 0:dim], K_shared)
            T.copy(V[by, bx * chunk : bx * chunk + chunk, 0:dim], V_shared)
            T.clear(S)
            T.gemm(Q_shared, K_shared, S, transpose_B=True)
            T.reduce_max(S, top, dim=1)
            for i, j in T.Parallel(rows, chunk):
                S[i, j] = T.exp2((S[i, j] - top[i]) * (LOG2E / math.sqrt(dim)))
            T.reduce_sum(S, total, dim=1)
            T.copy(S, P)
            T.clear(acc)
            T.gemm(P, V_shared, acc)
            for i, j in T.Parallel(rows, dim):
                if i < heads:
                    part_out[by, bx, i, j] = acc[i, j] / total[i]
            for i in T.Parallel(rows):
                if i < heads:
                    part_lse[by, bx, i] = T.log2(total[i]) + top[i] * (LOG2E / math.sqrt(dim))
        with T.Kernel(heads, batch, threads=dim) as (bx, by):
            t = T.get_thread_binding()
            top_lse = T.alloc_local((1,), "float32")
            weight = T.alloc_local((1,), "float32")
            out = T.alloc_local((1,), "float32")
            top_lse[0] = -T.infinity("float32")
            weight[0] = 0
            out[0] = 0
            for s in T.serial(splits):
                top_lse[0] = T.max(top_lse[0], part_lse[by, s, bx])
            for s in T.serial(splits):
                weight[0] += T.exp2(part_lse[by, s, bx] - top_lse[0])
                out[0] += T.exp2(part_lse[by, s, bx] - top_lse[0]) * part_out[by, s, bx, t]
            Out[by, bx, t] = out[0] / weight[0]

    q, k, v = randn(batch, heads, dim), randn(batch, length, dim), randn(batch, length, dim)
    got = tilelang.compile(decode, out_idx=-1)(q, k, v)
    close(got, reference(q[:, :, None], k[:, None], v[:, None])[:, :, 0])


@case()
def mla_decode():
    """Latent attention: all heads read one latent cache, with a separate rotary part."""
    batch, heads, length, latent, rope, block = 1, 64, 128, 64, 32, 64
    scale = LOG2E / math.sqrt(latent + rope)

    @T.prim_func
    def decode(
        Q: T.Tensor((batch, heads, latent), "float16"),
        Q_rope: T.Tensor((batch, heads, rope), "float16"),
        KV: T.Tensor((batch, length, latent), "float16"),
        K_rope: T.Tensor((batch, length, rope), "float16"),
        Out: T.Tensor((batch, heads, latent), "float16"),
    ):
        with T.Kernel(batch, threads=128) as b:
            Q_shared = T.alloc_shared((heads, latent), "float16")
            Qr_shared = T.alloc_shared((heads, rope), "float16")
            KV_shared = T.alloc_shared((block, latent), "float16")
            Kr_shared = T.alloc_shared((block, rope), "float16")
            S_shared = T.alloc_shared((heads, block), "float16")
            S = T.alloc_fragment((heads, block), "float32")
            acc = T.alloc_fragment((heads, latent), "float32")
            top = T.alloc_fragment((heads,), "float32")
            previous = T.alloc_fragment((heads,), "float32")
            rescale = T.alloc_fragment((heads,), "float32")
            part = T.alloc_fragment((heads,), "float32")
            total = T.alloc_fragment((heads,), "float32")
            T.copy(Q[b, 0:heads, 0:latent], Q_shared)
            T.copy(Q_rope[b, 0:heads, 0:rope], Qr_shared)
            T.fill(acc, 0)
            T.fill(total, 0)
            T.fill(top, -T.infinity("float32"))
            for k in T.Pipelined(length // block, num_stages=2):
                T.copy(KV[b, k * block : k * block + block, 0:latent], KV_shared)
                T.copy(K_rope[b, k * block : k * block + block, 0:rope], Kr_shared)
                T.clear(S)
                T.gemm(Q_shared, KV_shared, S, transpose_B=True)
                T.gemm(Qr_shared, Kr_shared, S, transpose_B=True)
                T.copy(top, previous)
                T.reduce_max(S, top, dim=1, clear=False)
                for i in T.Parallel(heads):
                    rescale[i] = T.exp2((previous[i] - top[i]) * scale)
                for i, j in T.Parallel(heads, block):
                    S[i, j] = T.exp2((S[i, j] - top[i]) * scale)
                T.reduce_sum(S, part, dim=1)
                T.copy(S, S_shared)
                for i in T.Parallel(heads):
                    total[i] = total[i] * rescale[i] + part[i]
                for i, j in T.Parallel(heads, latent):
                    acc[i, j] *= rescale[i]
                T.gemm(S_shared, KV_shared, acc)
            for i, j in T.Parallel(heads, latent):
                acc[i, j] /= total[i]
            T.copy(acc, Out[b, 0:heads, 0:latent])

    q, qr = randn(batch, heads, latent), randn(batch, heads, rope)
    kv, kr = randn(batch, length, latent), randn(batch, length, rope)
    got = tilelang.compile(decode, out_idx=-1)(q, qr, kv, kr)
    full_q, full_k = torch.cat([q, qr], -1)[:, :, None], torch.cat([kv, kr], -1)[:, None]
    close(got, reference(full_q, full_k, kv[:, None])[:, :, 0])


def selected_blocks(causal_lengths):
    """Queries attend to chosen blocks of keys: block-sparse and native sparse attention."""
    queries, dim, block, chosen, num_blocks = 64, 32, 32, 2, 4
    scale = LOG2E / math.sqrt(dim)

    @T.prim_func
    def forward(
        Q: T.Tensor((queries, dim), "float16"),
        K: T.Tensor((num_blocks * block, dim), "float16"),
        V: T.Tensor((num_blocks * block, dim), "float16"),
        index: T.Tensor((chosen,), "int32"),
        lengths: T.Tensor((queries,), "int32"),
        Out: T.Tensor((queries, dim), "float16"),
    ):
        with T.Kernel(1, threads=128):
            Q_shared = T.alloc_shared((queries, dim), "float16")
            K_shared = T.alloc_shared((block, dim), "float16")
            V_shared = T.alloc_shared((block, dim), "float16")
            S = T.alloc_fragment((queries, block), "float32")
            P = T.alloc_fragment((queries, block), "float16")
            acc = T.alloc_fragment((queries, dim), "float32")
            part = T.alloc_fragment((queries,), "float32")
            total = T.alloc_fragment((queries,), "float32")
            T.copy(Q, Q_shared)
            T.fill(acc, 0)
            T.fill(total, 0)
            for s in T.serial(chosen):
                at = index[s] * block
                if at >= 0:
                    T.copy(K[at : at + block, 0:dim], K_shared)
                    T.copy(V[at : at + block, 0:dim], V_shared)
                    T.clear(S)
                    T.gemm(Q_shared, K_shared, S, transpose_B=True)
                    for i, j in T.Parallel(queries, block):
                        S[i, j] = T.if_then_else(at + j < lengths[i], T.exp2(S[i, j] * scale), 0.0)
                    T.reduce_sum(S, part, dim=1)
                    for i in T.Parallel(queries):
                        total[i] += part[i]
                    T.copy(S, P)
                    T.gemm(P, V_shared, acc)
            for i, j in T.Parallel(queries, dim):
                Out[i, j] = acc[i, j] / T.max(total[i], 1e-20)

    q, k, v = randn(queries, dim), randn(num_blocks * block, dim), randn(num_blocks * block, dim)
    index = torch.tensor([3, 1], dtype=torch.int32, device="cuda")
    position = torch.arange(num_blocks * block, device="cuda")
    lengths = causal_lengths(queries, num_blocks * block)
    mask = torch.isin(position // block, index) & (position < lengths[:, None])
    got = tilelang.compile(forward, out_idx=-1)(q, k, v, index, lengths)
    close(got, reference(q[None, None], k[None, None], v[None, None], mask=mask)[0, 0])


@case()
def native_sparse_selection():
    def lengths(queries, keys):
        return torch.arange(keys - queries + 1, keys + 1, dtype=torch.int32, device="cuda")

    selected_blocks(lengths)


@case()
def block_sparse():
    selected_blocks(lambda n, keys: torch.full((n,), keys, dtype=torch.int32, device="cuda"))


@case()
def paged_decode():
    """The cache lies in pages that a table names; one warp per head, scores by shuffles."""
    batch, heads, dim, page, pages = 2, 2, 32, 16, 8

    @T.prim_func
    def decode(
        Q: T.Tensor((batch, heads, dim), "float32"),
        K: T.Tensor((pages, page, dim), "float32"),
        V: T.Tensor((pages, page, dim), "float32"),
        table: T.Tensor((batch, 4), "int32"),
        lengths: T.Tensor((batch,), "int32"),
        Out: T.Tensor((batch, heads, dim), "float32"),
    ):
        with T.Kernel(heads, batch, threads=dim) as (bx, by):
            t = T.get_thread_binding()
            score = T.alloc_local((1,), "float32")
            top = T.alloc_local((1,), "float32")
            total = T.alloc_local((1,), "float32")
            acc = T.alloc_local((1,), "float32")
            before = T.alloc_local((1,), "float32")
            top[0] = -1e30
            total[0] = 0
            acc[0] = 0
            for n in T.serial(lengths[by]):
                slot = table[by, n // page]
                score[0] = T.warp_reduce_sum(Q[by, bx, t] * K[slot, n % page, t]) / math.sqrt(dim)
                before[0] = top[0]
                top[0] = T.max(top[0], score[0])
                total[0] = total[0] * T.exp(before[0] - top[0]) + T.exp(score[0] - top[0])
                acc[0] = (
                    acc[0] * T.exp(before[0] - top[0])
                    + T.exp(score[0] - top[0]) * V[slot, n % page, t]
                )
            Out[by, bx, t] = acc[0] / total[0]

    q = randn(batch, heads, dim, dtype=torch.float32)
    k, v = (randn(pages, page, dim, dtype=torch.float32) for _ in range(2))
    table = torch.randperm(pages, device="cuda").view(batch, 4).int()
    lengths = torch.tensor([50, 17], dtype=torch.int32, device="cuda")
    got = tilelang.compile(decode, out_idx=-1)(q, k, v, table, lengths)
    for b in range(batch):
        n = int(lengths[b])
        keys, values = (t[table[b].long()].flatten(0, 1)[:n] for t in (k, v))
        want = (q[b] @ keys.T / math.sqrt(dim)).softmax(-1) @ values
        close(got[b], want, 1e-4, 1e-4)


@case()
def variable_lengths():
    """Sequences of a batch behind each other, found by cumulative lengths."""
    dim, block, heads = 32, 64, 1
    starts = [0, 70, 100]
    total_length = starts[-1]
    scale = LOG2E / math.sqrt(dim)
    longest = 2  # blocks

    @T.prim_func
    def forward(
        Q: T.Tensor((total_length, dim), "float16"),
        K: T.Tensor((total_length, dim), "float16"),
        V: T.Tensor((total_length, dim), "float16"),
        offsets: T.Tensor((len(starts),), "int32"),
        Out: T.Tensor((total_length, dim), "float16"),
    ):
        with T.Kernel(longest, len(starts) - 1, threads=128) as (bx, by):
            Q_shared = T.alloc_shared((block, dim), "float16")
            K_shared = T.alloc_shared((block, dim), "float16")
            V_shared = T.alloc_shared((block, dim), "float16")
            S = T.alloc_fragment((block, block), "float32")
            P = T.alloc_fragment((block, block), "float16")
            acc = T.alloc_fragment((block, dim), "float32")
            part = T.alloc_fragment((block,), "float32")
            total = T.alloc_fragment((block,), "float32")
            first = offsets[by]
            length = offsets[by + 1] - first
            for i, j in T.Parallel(block, dim):
                row = bx * block + i
                Q_shared[i, j] = T.if_then_else(
                    row < length, Q[first + row, j], T.cast(0, "float16")
                )
            T.fill(acc, 0)
            T.fill(total, 0)
            for k in T.serial(T.ceildiv(length, block)):
                for i, j in T.Parallel(block, dim):
                    row = k * block + i
                    K_shared[i, j] = T.if_then_else(
                        row < length, K[first + row, j], T.cast(0, "float16")
                    )
                    V_shared[i, j] = T.if_then_else(
                        row < length, V[first + row, j], T.cast(0, "float16")
                    )
                T.clear(S)
                T.gemm(Q_shared, K_shared, S, transpose_B=True)
                for i, j in T.Parallel(block, block):
                    S[i, j] = T.if_then_else(k * block + j < length, T.exp2(S[i, j] * scale), 0.0)
                T.reduce_sum(S, part, dim=1)
                for i in T.Parallel(block):
                    total[i] += part[i]
                T.copy(S, P)
                T.gemm(P, V_shared, acc)
            for i, j in T.Parallel(block, dim):
                if bx * block + i < length:
                    Out[first + bx * block + i, j] = acc[i, j] / total[i]

    q, k, v = (randn(total_length, dim) for _ in range(3))
    offsets = torch.tensor(starts, dtype=torch.int32, device="cuda")
    got = tilelang.compile(forward, out_idx=-1)(q, k, v, offsets)
    for a, b in zip(starts, starts[1:], strict=False):
        want = reference(*(t[a:b][None, None] for t in (q, k, v)))[0, 0]
        close(got[a:b], want)


@case()
def rotary_embedding():
    tokens, heads, dim = 10, 2, 64

    @tilelang.jit
    def build():
        n = T.dynamic("n")

        @T.prim_func
        def rotate(
            x: T.Tensor((n, heads, dim), "bfloat16"), cos: T.Tensor((n, dim // 2), "float32"),
            sin: T.Tensor((n, dim // 2), "float32"),
        ):  # fmt: skip
            with T.Kernel(n, threads=64) as row:
                for h, j in T.Parallel(heads, dim // 2):
                    a = T.cast(x[row, h, j], "float32")
                    b = T.cast(x[row, h, j + dim // 2], "float32")
                    x[row, h, j] = a * cos[row, j] - b * sin[row, j]
                    x[row, h, j + dim // 2] = b * cos[row, j] + a * sin[row, j]

        return rotate

    x = randn(tokens, heads, dim, dtype=torch.bfloat16)
    angle = torch.rand(tokens, dim // 2, device="cuda") * 6
    a, b = x.float().chunk(2, -1)
    cos, sin = angle.cos(), angle.sin()
    want = torch.cat([a * cos[:, None] - b * sin[:, None], b * cos[:, None] + a * sin[:, None]], -1)
    build()(x, cos, sin)
    close(x, want.bfloat16(), 1e-2, 1e-2)
