"""Linear attention, chunked scans, state-space models, causal convolutions."""

import tilelang
import tilelang.language as T
import torch

from . import case
from .gemm import close, randn


@case()
def linear_attention_chunks():
    """o_t = q_t S_t with S_t = S_(t-1) + k_t v_t^T, a chunk at a time."""
    length, dim, chunk = 128, 64, 64

    @T.prim_func
    def forward(
        Q: T.Tensor((length, dim), "float16"),
        K: T.Tensor((length, dim), "float16"),
        V: T.Tensor((length, dim), "float16"),
        Out: T.Tensor((length, dim), "float32"),
    ):
        with T.Kernel(1, threads=128):
            q = T.alloc_shared((chunk, dim), "float16")
            k = T.alloc_shared((chunk, dim), "float16")
            v = T.alloc_shared((chunk, dim), "float16")
            s = T.alloc_fragment((chunk, chunk), "float32")
            s_shared = T.alloc_shared((chunk, chunk), "float16")
            state = T.alloc_fragment((dim, dim), "float32")
            state_shared = T.alloc_shared((dim, dim), "float16")
            out = T.alloc_fragment((chunk, dim), "float32")
            T.clear(state)
            for c in T.serial(length // chunk):
                T.copy(Q[c * chunk, 0], q)
                T.copy(K[c * chunk, 0], k)
                T.copy(V[c * chunk, 0], v)
                T.clear(s)
                T.gemm(q, k, s, transpose_B=True)
                for i, j in T.Parallel(chunk, chunk):
                    s_shared[i, j] = T.if_then_else(i >= j, s[i, j], 0.0)
                T.copy(state, state_shared)
                T.clear(out)
                T.gemm(s_shared, v, out)
                T.gemm(q, state_shared, out)
                T.gemm(k, v, state, transpose_A=True)
                T.copy(out, Out[c * chunk, 0])

    q, k, v = (randn(length, dim) * 0.2 for _ in range(3))
    got = tilelang.compile(forward, out_idx=-1)(q, k, v)
    close(got, (q.float() @ k.float().T).tril() @ v.float(), 2e-2, 2e-2)


@case()
def retention_decay():
    """As linear attention, with a decay of the state per token."""
    length, dim, gamma = 64, 32, 0.95

    @T.prim_func
    def forward(
        Q: T.Tensor((length, dim), "float16"),
        K: T.Tensor((length, dim), "float16"),
        V: T.Tensor((length, dim), "float16"),
        Out: T.Tensor((length, dim), "float32"),
    ):
        with T.Kernel(1, threads=128):
            q = T.alloc_shared((length, dim), "float16")
            k = T.alloc_shared((length, dim), "float16")
            v = T.alloc_shared((length, dim), "float16")
            s = T.alloc_fragment((length, length), "float32")
            s_shared = T.alloc_shared((length, length), "float16")
            out = T.alloc_fragment((length, dim), "float32")
            T.copy(Q, q)
            T.copy(K, k)
            T.copy(V, v)
            T.clear(s)
            T.gemm(q, k, s, transpose_B=True)
            for i, j in T.Parallel(length, length):
                s[i, j] = T.if_then_else(
                    i >= j, s[i, j] * T.pow(gamma, T.cast(i - j, "float32")), 0.0
                )
            T.copy(s, s_shared)
            T.clear(out)
            T.gemm(s_shared, v, out)
            T.copy(out, Out)

    q, k, v = (randn(length, dim) * 0.3 for _ in range(3))
    got = tilelang.compile(forward, out_idx=-1)(q, k, v)
    position = torch.arange(length, device="cuda")
    decay = (gamma ** (position[:, None] - position).float()).tril()
    close(got, (q.float() @ k.float().T * decay) @ v.float())


@case()
def state_space_scan():
    """A selective scan: one thread per channel, the states in registers."""
    length, channels, states = 40, 64, 8

    @T.prim_func
    def scan(
        x: T.Tensor((length, channels), "float32"),
        dt: T.Tensor((length, channels), "float32"),
        A: T.Tensor((channels, states), "float32"),
        B: T.Tensor((length, states), "float32"),
        C: T.Tensor((length, states), "float32"),
        y: T.Tensor((length, channels), "float32"),
    ):
        with T.Kernel(channels // 32, threads=32) as b:
            t = T.get_thread_binding()
            h = T.alloc_local((states,), "float32")
            out = T.alloc_local((1,), "float32")
            channel = b * 32 + t
            for s in T.unroll(states):
                h[s] = 0
            for i in T.serial(length):
                out[0] = 0
                for s in T.unroll(states):
                    h[s] = (
                        h[s] * T.exp(dt[i, channel] * A[channel, s])
                        + dt[i, channel] * B[i, s] * x[i, channel]
                    )
                    out[0] += h[s] * C[i, s]
                y[i, channel] = out[0]

    x, dt = (
        randn(length, channels, dtype=torch.float32),
        torch.rand(length, channels, device="cuda"),
    )
    a = -torch.rand(channels, states, device="cuda")
    b, c = (randn(length, states, dtype=torch.float32) for _ in range(2))
    got = tilelang.compile(scan, out_idx=-1)(x, dt, a, b, c)
    h, want = torch.zeros(channels, states), torch.empty(length, channels, device="cuda")
    for i in range(length):
        h = h * torch.exp(dt[i, :, None] * a) + dt[i, :, None] * b[i] * x[i, :, None]
        want[i] = h @ c[i]
    close(got, want, 1e-4, 1e-4)


@case()
def chunk_state():
    """The states at chunk borders of a gated recurrence, weights from a cumulative sum."""
    length, dim, chunk = 128, 64, 64

    @T.prim_func
    def states(
        K: T.Tensor((length, dim), "float16"),
        V: T.Tensor((length, dim), "float16"),
        gate: T.Tensor((length,), "float32"),
        S: T.Tensor((length // chunk, dim, dim), "float32"),
    ):
        with T.Kernel(length // chunk, threads=128) as c:
            k = T.alloc_shared((chunk, dim), "float16")
            v = T.alloc_shared((chunk, dim), "float16")
            g = T.alloc_shared((chunk,), "float32")
            scaled = T.alloc_shared((chunk, dim), "float16")
            out = T.alloc_fragment((dim, dim), "float32")
            T.copy(K[c * chunk, 0], k)
            T.copy(V[c * chunk, 0], v)
            T.copy(gate[c * chunk : c * chunk + chunk], g)
            T.cumsum(g, dim=0)
            for i, j in T.Parallel(chunk, dim):
                scaled[i, j] = k[i, j] * T.exp(g[chunk - 1] - g[i])
            T.clear(out)
            T.gemm(scaled, v, out, transpose_A=True)
            T.copy(out, S[c, 0:dim, 0:dim])

    k, v = randn(length, dim) * 0.3, randn(length, dim) * 0.3
    gate = -torch.rand(length, device="cuda") * 0.1
    got = tilelang.compile(states, out_idx=-1)(k, v, gate)
    for c in range(length // chunk):
        part = slice(c * chunk, (c + 1) * chunk)
        g = gate[part].cumsum(0)
        close(got[c], (k[part].float() * (g[-1] - g).exp()[:, None]).T @ v[part].float())


@case()
def causal_convolution_1d():
    length, channels, taps = 33, 64, 4

    @tilelang.jit(out_idx=-1)
    def build():
        n = T.dynamic("n")

        @T.prim_func
        def convolve(
            x: T.Tensor((n, channels), "float32"), w: T.Tensor((taps, channels), "float32"),
            y: T.Tensor((n, channels), "float32"),
        ):  # fmt: skip
            with T.Kernel(n, threads=channels) as row:
                t = T.get_thread_binding()
                total = T.alloc_local((1,), "float32")
                total[0] = 0
                for k in T.unroll(taps):
                    if row + k >= taps - 1:
                        total[0] += x[row + k - (taps - 1), t] * w[k, t]
                y[row, t] = total[0] / (1 + T.exp(-total[0]))

        return convolve

    x, w = randn(length, channels, dtype=torch.float32), randn(taps, channels, dtype=torch.float32)
    padded = torch.nn.functional.pad(x.T[None], (taps - 1, 0))
    want = torch.nn.functional.conv1d(padded, w.T[:, None], groups=channels)[0].T
    close(build()(x, w), torch.nn.functional.silu(want), 1e-4, 1e-4)


@case()
def delta_rule():
    """S_t = S_(t-1) (I - b k k^T) + b v k^T, one thread per row of the state."""
    length, dim = 24, 32

    @T.prim_func
    def forward(
        Q: T.Tensor((length, dim), "float32"),
        K: T.Tensor((length, dim), "float32"),
        V: T.Tensor((length, dim), "float32"),
        beta: T.Tensor((length,), "float32"),
        Out: T.Tensor((length, dim), "float32"),
    ):
        with T.Kernel(1, threads=dim):
            t = T.get_thread_binding()
            row = T.alloc_local((dim,), "float32")
            k = T.alloc_shared((dim,), "float32")
            dot = T.alloc_local((1,), "float32")
            for j in T.serial(dim):
                row[j] = 0
            for i in T.serial(length):
                T.sync_threads()
                k[t] = K[i, t]
                T.sync_threads()
                dot[0] = 0
                for j in T.serial(dim):
                    dot[0] += row[j] * k[j]
                for j in T.serial(dim):
                    row[j] += beta[i] * (V[i, t] - dot[0]) * k[j]
                dot[0] = 0
                for j in T.serial(dim):
                    dot[0] += row[j] * Q[i, j]
                Out[i, t] = dot[0]

    q, v = (randn(length, dim, dtype=torch.float32) for _ in range(2))
    k = torch.nn.functional.normalize(randn(length, dim, dtype=torch.float32), dim=-1)
    beta = torch.rand(length, device="cuda")
    got = tilelang.compile(forward, out_idx=-1)(q, k, v, beta)
    state = torch.zeros(dim, dim, device="cuda")
    for i in range(length):
        state = state + beta[i] * torch.outer(v[i] - state @ k[i], k[i])
        close(got[i], state @ q[i], 1e-4, 1e-4)
