"""Our operators beside others that do the same: `python -m benchmarks.rivals [CASE ...]`.

Device time with a cold L2 cache, all in one run, with the copy bandwidth measured in it: RMS norm,
rotary embedding, SwiGLU, gates and the choice of experts, casts to e4m3, hyper-connections and an
e4m3 product. Rivals are `torch.compile` of plain PyTorch, PyTorch's own functions, and Liger-Kernel
and torchao if they can be imported. A rival that is missing or raises is recorded with its reason.
The results are a file `rivals.<device>.json`, which is written again after every case; a run stops
after `--seconds`. The figure of the README and the table of docs/comparison.md show this file.

Compilers take most of the time. `--prepare` only compiles, one process per case, so that a run
after it finds what it needs in the caches on disk.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config
import torch.nn.functional as F
from torch import Tensor

from benchmarks import preparation
from tile_kernels import attention, gemm, mhc, moe, quant, transform
from tile_kernels.gemm import samples
from tile_kernels.testing import benchmark, timing

BF16 = torch.bfloat16
TOKENS, HIDDEN = 8192, 7168
REPEATS = 10
Calls = dict[str, Callable[[], Any]]


def randn(*shape: int) -> Tensor:
    """Normal numbers in bfloat16."""
    return torch.randn(shape, device="cuda", dtype=BF16)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function under `torch.compile`."""
    return torch.compile(function, fullgraph=True)


def liger(module: str, name: str) -> Any:
    """A function or module of Liger-Kernel; raises ImportError where it is missing."""
    return getattr(importlib.import_module(f"liger_kernel.{module}"), name)


def torchao(name: str) -> Any:
    """A function of torchao's blockwise casts; raises ImportError where it is missing."""
    return getattr(importlib.import_module("torchao.kernel.blockwise_quantization"), name)


# ---- cases: bytes that must be moved, and calls by name ------------------------------------------


def _plain_norm(x: Tensor, weight: Tensor) -> Tensor:
    values = x.float()
    scaled = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + 1e-6)
    return (scaled * weight).to(BF16)


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """To e4m3 with scales of 128 channels, in plain PyTorch."""
    values = x.float().unflatten(-1, (-1, 128))
    scale = values.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448
    return (values / scale).to(torch.float8_e4m3fn).flatten(-2), scale.squeeze(-1)


def norm() -> tuple[int, Calls]:
    """RMS norm."""
    x, weight = randn(TOKENS, HIDDEN), randn(HIDDEN)
    plain = compiled(_plain_norm)

    def of_liger() -> Tensor:
        return liger("ops.rms_norm", "LigerRMSNormFunction").apply(
            x, weight, 1e-6, 0.0, "llama", False
        )

    return 2 * x.nbytes, {
        "tile_kernels": lambda: quant.norm_forward(x, weight, 1e-6),
        "torch.compile": lambda: plain(x, weight),
        "torch.nn.functional.rms_norm": lambda: F.rms_norm(x, (HIDDEN,), weight, 1e-6),
        "liger_kernel": of_liger,
    }


def norm_residual() -> tuple[int, Calls]:
    """RMS norm of a sum, which is returned too."""
    x, residual, weight = randn(TOKENS, HIDDEN), randn(TOKENS, HIDDEN), randn(HIDDEN)

    def added(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        return _plain_norm(total, weight), total

    plain = compiled(added)

    def of_liger() -> Any:
        return liger("ops.fused_add_rms_norm", "LigerFusedAddRMSNormFunction").apply(
            x, residual, weight, 1e-6, 0.0, "llama", False
        )

    return 4 * x.nbytes, {
        "tile_kernels": lambda: quant.norm_forward(x, weight, 1e-6, residual),
        "torch.compile": lambda: plain(x, residual, weight),
        "liger_kernel": of_liger,
    }


def norm_cast() -> tuple[int, Calls]:
    """RMS norm to e4m3 with scales of 128 channels."""
    x, weight = randn(TOKENS, HIDDEN), randn(HIDDEN)

    def cast(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return quantized(_plain_norm(x, weight))

    plain = compiled(cast)
    return x.nbytes * 3 // 2, {
        "tile_kernels": lambda: quant.norm_forward_and_per_token_cast(x, weight, 1e-6, "e4m3", 128),
        "torch.compile": lambda: plain(x, weight),
    }


def _backward(calls: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], Any]:
    """The backward pass of a norm alone."""
    x, weight = randn(TOKENS, HIDDEN).requires_grad_(), randn(HIDDEN).requires_grad_()
    out = calls(x, weight)
    grad = randn(TOKENS, HIDDEN)
    return lambda: torch.autograd.grad(out, (x, weight), grad, retain_graph=True)


def norm_backward() -> tuple[int, Calls]:
    """The gradients of RMS norm."""

    def lazily(make: Callable[[], Callable[[], Any]]) -> Callable[[], Any]:
        made: list[Callable[[], Any]] = []

        def call() -> Any:
            if not made:
                made.append(make())
            return made[0]()

        return call

    def of_liger() -> Callable[[], Any]:
        function = liger("ops.rms_norm", "LigerRMSNormFunction")
        return _backward(lambda x, w: function.apply(x, w, 1e-6, 0.0, "llama", False))

    return 3 * TOKENS * HIDDEN * 2, {
        "tile_kernels": lazily(lambda: _backward(lambda x, w: quant.norm_forward(x, w, 1e-6)[0])),
        "torch.compile": lazily(lambda: _backward(compiled(_plain_norm))),
        "torch.nn.functional.rms_norm": lazily(
            lambda: _backward(lambda x, w: F.rms_norm(x, (HIDDEN,), w, 1e-6))
        ),
        "liger_kernel": lazily(of_liger),
    }


def _rotary() -> tuple[tuple[Tensor, Tensor], Tensor, tuple[Tensor, Tensor]]:
    """A query and a key, our cache, and the cosines and sines of others."""
    heads, key_heads, dim = 32, 8, 128
    query, key = randn(1, TOKENS, heads, dim), randn(1, TOKENS, key_heads, dim)
    angles = torch.arange(TOKENS, device="cuda")[:, None] * 10000.0 ** -(
        torch.arange(0, dim, 2, device="cuda") / dim
    )
    cache = torch.cat((angles.cos(), angles.sin()), -1)
    cos, sin = (torch.cat((part, part), -1)[None].to(BF16) for part in cache.chunk(2, -1))
    return (query, key), cache, (cos, sin)


def rotary() -> tuple[int, Calls]:
    """Rotary embedding of a query and a key."""
    (query, key), cache, (cos, sin) = _rotary()

    def rotated(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        def one(x: Tensor) -> Tensor:
            a, b = x.chunk(2, -1)
            return x * cos[:, :, None] + torch.cat((-b, a), -1) * sin[:, :, None]

        return one(query), one(key)

    plain = compiled(rotated)

    return 2 * (query.nbytes + key.nbytes), {
        "tile_kernels": lambda: transform.rotary_embedding(query, cache, key),
        "torch.compile": lambda: plain(query, key, cos, sin),
    }


def rotary_in_place() -> tuple[int, Calls]:
    """Rotary embedding in place."""
    (query, key), cache, (cos, sin) = _rotary()

    def of_liger() -> Any:
        function = liger("ops.rope", "LigerRopeFunction")
        return function.apply(query.transpose(1, 2), key.transpose(1, 2), cos, sin)

    return 2 * (query.nbytes + key.nbytes), {
        "tile_kernels": lambda: transform.apply_rotary(query, cache, key),
        "liger_kernel": of_liger,
    }


def swiglu() -> tuple[int, Calls]:
    """SwiGLU of two halves of a row."""
    x = randn(TOKENS, 2 * HIDDEN)
    gate, value = (half.contiguous() for half in x.chunk(2, -1))

    def activated(x: Tensor) -> Tensor:
        gate, value = x.chunk(2, -1)
        return (F.silu(gate.float()) * value).to(BF16)

    plain = compiled(activated)
    return x.nbytes * 3 // 2, {
        "tile_kernels": lambda: quant.swiglu_forward(x, "bf16"),
        "torch.compile": lambda: plain(x),
        "liger_kernel": lambda: liger("ops.swiglu", "LigerSiLUMulFunction").apply(gate, value),
    }


def swiglu_cast() -> tuple[int, Calls]:
    """SwiGLU to e4m3 with scales of 128 channels."""
    x = randn(TOKENS, 2 * HIDDEN)

    def activated(x: Tensor) -> tuple[Tensor, Tensor]:
        gate, value = x.chunk(2, -1)
        return quantized((F.silu(gate.float()) * value).to(BF16))

    plain = compiled(activated)
    return x.nbytes * 5 // 4, {
        "tile_kernels": lambda: quant.swiglu_forward_and_per_token_cast(x, "e4m3", 128),
        "torch.compile": lambda: plain(x),
    }


def _weights(scores: Tensor, chosen: Tensor) -> Tensor:
    """The weights of chosen experts."""
    weights = scores.gather(1, chosen)
    return weights / (weights.sum(1, keepdim=True) + 1e-20) * 1.5


def gate() -> tuple[int, Calls]:
    """Gate: 6 of 256 experts, square root of softplus."""
    logits, bias = torch.randn(TOKENS, 256, device="cuda"), torch.randn(256, device="cuda")

    def chosen(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        scores = F.softplus(logits).sqrt()
        found = (scores + bias).topk(6).indices
        return found, _weights(scores, found)

    plain = compiled(chosen)
    return logits.nbytes + TOKENS * 6 * 12, {
        "tile_kernels": lambda: moe.moe_topk_gate_forward(
            logits, 6, False, 0, 1.5, 0, "sqrtsoftplus", bias=bias
        ),
        "torch.compile": lambda: plain(logits, bias),
    }


def gate_groups() -> tuple[int, Calls]:
    """Gate: 8 of 256 experts in 4 of 8 groups, sigmoid."""
    logits, bias = torch.randn(TOKENS, 256, device="cuda"), torch.randn(256, device="cuda")

    def chosen(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        scores = logits.sigmoid()
        ranks = (scores + bias).unflatten(1, (8, -1))
        groups = ranks.topk(2).values.sum(2).topk(4).indices
        kept = torch.zeros_like(ranks[..., 0], dtype=torch.bool).scatter(1, groups, True)
        found = ranks.masked_fill(~kept[..., None], -torch.inf).flatten(1).topk(8).indices
        return found, _weights(scores, found)

    plain = compiled(chosen)
    return logits.nbytes + TOKENS * 8 * 12, {
        "tile_kernels": lambda: moe.top2_sum_gate(
            logits, bias, 8, 4, 8, False, 0, 1.5, 0, 1, 0, 1, "sigmoid"
        ),
        "torch.compile": lambda: plain(logits, bias),
    }


def mapping() -> tuple[int, Calls]:
    """The rows of 8 choices among 256 experts."""
    chosen = torch.rand(TOKENS, 256, device="cuda").topk(8).indices
    short = chosen.int()
    return 2 * chosen.nbytes, {
        "tile_kernels": lambda: moe.get_fused_mapping(chosen, 256, 8 * TOKENS, 1, True),
        "liger_kernel": lambda: liger("ops.fused_moe", "compute_routing_metadata")(short, 256),
    }


def topk_keys() -> tuple[int, Calls]:
    """The 2048 largest of 65536 logits, 4096 queries."""
    logits = torch.randn(4096, 65536, device="cuda")
    return logits.nbytes + 4096 * 2048 * 4, {
        "tile_kernels": lambda: attention.indexer_topk(logits, 2048),
        "torch.topk": lambda: torch.topk(logits, 2048, sorted=False),
    }


def _chosen(num_experts: int, count: int) -> tuple[int, Calls]:
    scores = torch.rand(TOKENS, num_experts, device="cuda")
    return scores.nbytes + TOKENS * count * 8, {
        "tile_kernels": lambda: moe.topk_gate(scores, count),
        "torch.topk": lambda: torch.topk(scores, count),
    }


def topk() -> tuple[int, Calls]:
    """The 8 largest of 256 scores."""
    return _chosen(256, 8)


def topk_many() -> tuple[int, Calls]:
    """The 64 largest of 4096 scores."""
    return _chosen(4096, 64)


def cast() -> tuple[int, Calls]:
    """To e4m3 with scales of 128 channels."""
    x = randn(TOKENS, HIDDEN)
    plain = compiled(quantized)
    return x.nbytes * 3 // 2, {
        "tile_kernels": lambda: quant.per_token_cast(x, "e4m3", 128),
        "torch.compile": lambda: plain(x),
        "torchao": lambda: torchao("fp8_blockwise_act_quant")(x),
    }


def cast_blocks() -> tuple[int, Calls]:
    """To e4m3 with scales of 128 x 128 values."""
    x = randn(TOKENS, HIDDEN)

    def blocks(x: Tensor) -> tuple[Tensor, Tensor]:
        values = x.float().view(TOKENS // 128, 128, HIDDEN // 128, 128)
        scale = values.abs().amax((1, 3), keepdim=True).clamp(min=1e-4) / 448
        codes = (values / scale).to(torch.float8_e4m3fn).view(TOKENS, HIDDEN)
        return codes, scale.squeeze((1, 3))

    plain = compiled(blocks)
    return x.nbytes * 3 // 2, {
        "tile_kernels": lambda: quant.per_block_cast(x, "e4m3", (128, 128)),
        "torch.compile": lambda: plain(x),
        "torchao": lambda: torchao("fp8_blockwise_weight_quant")(x),
    }


# ---- hyper-connections: 4096 tokens, 4 streams ---------------------------------------------------

MHC_TOKENS, STREAMS = 4096, 4
MIXES = STREAMS * (STREAMS + 2)


def _streams() -> tuple[Tensor, Tensor]:
    """Streams, and the weights of their projection."""
    fn = 1e-4 * torch.randn(MIXES, STREAMS * HIDDEN, device="cuda")
    return randn(MHC_TOKENS, STREAMS, HIDDEN), fn


def mhc_projection() -> tuple[int, Calls]:
    """The projection of the streams to mixes."""
    streams, fn = _streams()
    rows, phi = streams.view(MHC_TOKENS, -1), fn.T.to(BF16).contiguous()

    def projected(streams: Tensor, fn: Tensor) -> Tensor:
        x = streams.flatten(-2).float()
        return F.linear(x, fn) * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)

    plain = compiled(projected)
    return streams.nbytes + fn.nbytes, {
        "tile_kernels": lambda: mhc.mhc_norm_fn_fwd(streams, fn, 1e-6),
        "torch.compile": lambda: plain(streams, fn),
        # Its weights have 8 bits, not the 11 of TF32.
        "liger_kernel": lambda: liger("ops.mhc", "mhc_mm_norm_fwd")(rows, phi, 1e-6),
    }


def _mixed() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The output of a sublayer, streams, and the mixes of `mhc_post`."""
    post = torch.rand(MHC_TOKENS, STREAMS, 1, device="cuda")
    comb = torch.rand(MHC_TOKENS, STREAMS, STREAMS, device="cuda")
    return randn(MHC_TOKENS, HIDDEN), _streams()[0], post, comb


def _plain_post(x: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    mixed = torch.einsum("tij,tih->tjh", comb, streams.float())
    return (x.float().unsqueeze(1) * post + mixed).to(BF16)


def mhc_post() -> tuple[int, Calls]:
    """The next streams."""
    x, streams, post, comb = _mixed()
    out = torch.empty_like(streams)
    plain = compiled(_plain_post)
    transposed, rows = comb.mT.contiguous(), post.squeeze(-1)

    def of_liger() -> Tensor:
        return liger("ops.mhc", "mhc_post_res_fwd")(streams, x, rows, transposed, out=out)

    return x.nbytes + 2 * streams.nbytes, {
        "tile_kernels": lambda: mhc.mhc_post_fwd(x, streams, post, comb),
        "torch.compile": lambda: plain(x, streams, post, comb),
        "liger_kernel": of_liger,
    }


def mhc_projection_backward() -> tuple[int, Calls]:
    """The gradients of the projection of the streams."""
    streams, fn = _streams()
    rows, phi = streams.view(MHC_TOKENS, -1), fn.T.to(BF16).contiguous()
    grad = torch.randn(MHC_TOKENS, MIXES, device="cuda")
    mixes, mul, squares = mhc.mhc_norm_fn_fwd(streams, fn, 1e-6)
    inverse = torch.rsqrt(squares / rows.shape[1] + 1e-6)
    mixes = mixes.view(MHC_TOKENS, MIXES)

    def of_liger() -> Any:
        return liger("ops.mhc", "mhc_mm_norm_bwd")(rows, phi, mixes, inverse, grad)

    return 2 * streams.nbytes + 2 * fn.nbytes, {
        "tile_kernels": lambda: mhc.mhc_norm_fn_bwd(grad, streams, fn, mul, squares, 1e-6),
        "liger_kernel": of_liger,
    }


def mhc_post_backward() -> tuple[int, Calls]:
    """The gradients of the next streams."""
    x, streams, post, comb = _mixed()
    grad = torch.randn_like(streams)
    transposed, rows = comb.mT.contiguous(), post.squeeze(-1)

    def of_liger() -> Any:
        return liger("ops.mhc", "mhc_post_res_bwd")(streams, x, rows, transposed, grad)

    return 2 * x.nbytes + 3 * streams.nbytes, {
        "tile_kernels": lambda: mhc.mhc_post_bwd(x, streams, post, comb, grad),
        "liger_kernel": of_liger,
    }


def mhc_between() -> tuple[int, Calls]:
    """All between two sublayers, with an RMS norm."""
    x, streams, post, comb = _mixed()
    fn = _streams()[1]
    scale, base = torch.randn(3, device="cuda"), torch.randn(MIXES, device="cuda")
    weight = randn(HIDDEN)

    def between(
        x: Tensor, streams: Tensor, post: Tensor, comb: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        written = _plain_post(x, streams, post, comb)
        flat = written.flatten(-2).float()
        mixes = F.linear(flat, fn) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + 1e-6)
        before, after, logits = mixes.split((STREAMS, STREAMS, STREAMS * STREAMS), -1)
        before = torch.sigmoid(before * scale[0] + base[:STREAMS])
        after = 2 * torch.sigmoid(after * scale[1] + base[STREAMS : 2 * STREAMS])
        matrix = (logits * scale[2] + base[2 * STREAMS :]).unflatten(-1, (STREAMS, STREAMS))
        matrix = matrix.softmax(-1)
        for _ in range(20):
            matrix = matrix / matrix.sum(-1, keepdim=True)
            matrix = matrix / matrix.sum(-2, keepdim=True)
        read = torch.einsum("ti,tih->th", before, written.float()).to(BF16)
        return written, after, matrix, _plain_norm(read, weight)

    plain = compiled(between)
    numbers = (1e-6, 1e-6, 1e-6, 2.0, 20)
    return 2 * x.nbytes + 3 * streams.nbytes, {
        "tile_kernels": lambda: mhc.mhc_post_pre(
            x, streams, post, comb, fn, scale, base, *numbers, weight, 1e-6
        ),
        "torch.compile": lambda: plain(x, streams, post, comb),
    }


def product() -> tuple[int, Calls]:
    """An e4m3 product with scales of 1 x 128 and 128 x 128."""
    x, weight = randn(4096, HIDDEN), randn(4096, HIDDEN)
    a, b, d = samples.by_rows(x), samples.by_blocks(weight), randn(4096, 4096)
    return x.numel() + weight.numel() + d.nbytes, {
        "tile_kernels": lambda: gemm.fp8_gemm_nt(a, b, d),
        "torch._scaled_mm": lambda: torch._scaled_mm(a[0], b[0].T, a[1], b[1].T, out_dtype=BF16),
        "torch.mm bfloat16": lambda: x @ weight.T,
    }


CASES = {
    "rms_norm": norm,
    "rms_norm_residual": norm_residual,
    "rms_norm_cast": norm_cast,
    "rms_norm_backward": norm_backward,
    "rotary": rotary,
    "rotary_in_place": rotary_in_place,
    "swiglu": swiglu,
    "swiglu_cast": swiglu_cast,
    "moe_topk_gate": gate,
    "top2_sum_gate": gate_groups,
    "topk_gate": topk,
    "topk_gate_64": topk_many,
    "get_fused_mapping": mapping,
    "indexer_topk": topk_keys,
    "per_token_cast": cast,
    "per_block_cast": cast_blocks,
    "mhc_post": mhc_post,
    "mhc_post_backward": mhc_post_backward,
    "mhc_post_pre": mhc_between,
    "fp8_gemm": product,
    # The last ones, because compiling a rival takes longer than a minute.
    "mhc_projection": mhc_projection,
    "mhc_projection_backward": mhc_projection_backward,
}


OTHERS = ("triton", "liger_kernel", "torchao")


# ---- measuring -----------------------------------------------------------------------------------


def measured(name: str, bytes_moved: int, call: Callable[[], Any], copy: float) -> dict[str, Any]:
    """One line of results; the reason in place of a time if the call raises."""
    try:
        us = timing.time_device(call, repeats=REPEATS).us
    except Exception as error:
        text = " ".join(str(error).split())
        return {"name": name, "error": f"{type(error).__name__}: {text[:200]}"}
    fraction = bytes_moved / us / 1e3 / copy
    return {"name": name, "us": round(us, 2), "copy_fraction": round(fraction, 4)}


def prepare(names: Sequence[str], without: Sequence[str]) -> None:
    """Runs each call once; several cases in separate processes. Errors show when it is measured."""
    if len(names) > 1:
        options = [f"--without={name}" for name in without]
        preparation.in_processes("benchmarks.rivals", [[name] for name in names], *options)
        return
    for rival, call in CASES[names[0]]()[1].items():
        if rival not in without:
            with contextlib.suppress(Exception):
                call()


def title_of(name: str) -> str:
    """What a case is called in documents."""
    return (CASES[name].__doc__ or name).rstrip(".")


def main() -> None:
    """Measures the cases and writes the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("cases", nargs="*", choices=[[], *CASES], help="by default all")
    parser.add_argument("--seconds", type=float, default=110.0, help="after which no case is begun")
    parser.add_argument("--folder", type=Path, default=benchmark.DEFAULT_FOLDER)
    text = "a rival that is not run, as torch.compile, which compiles for seconds; may be repeated"
    parser.add_argument("--without", action="append", default=[], metavar="NAME", help=text)
    parser.add_argument("--prepare", action="store_true", help="compile only, cases in parallel")
    options = parser.parse_args()
    began = time.monotonic()
    torch.set_float32_matmul_precision("high")  # TF32, to which the kernels of streams round too
    torch._inductor.config.compile_threads = 1  # the cases are compiled in parallel
    names = options.cases or list(CASES)
    if options.prepare:
        prepare(names, options.without)
        return
    machine = {**benchmark.machine(), **{name: benchmark.installed(name) for name in OTHERS}}
    copy = timing.copy_bandwidth()
    report: dict[str, Any] = {
        "machine": machine,
        "copy_gb_per_s": round(copy, 1),
        "shape": [TOKENS, HIDDEN],
        "results": {},
        "left_out": list(options.without),
    }
    path = options.folder / f"rivals.{benchmark.slug(machine['device'])}.json"
    print(f"copy {copy:.0f} GB/s", flush=True)
    for name in names:
        if time.monotonic() - began > options.seconds:
            report["left_out"].append(name)
            path.write_text(json.dumps(report, indent=1) + "\n")
            continue
        bytes_moved, calls = CASES[name]()
        lines = []
        for rival, call in calls.items():
            if rival in options.without:
                continue
            lines.append(measured(rival, bytes_moved, call, copy))
            shown = {key: value for key, value in lines[-1].items() if key != "name"}
            print(f"{name:20} {rival:32} {shown} {time.monotonic() - began:.0f} s", flush=True)
        title = title_of(name)
        report["results"][name] = {"title": title, "bytes": bytes_moved, "lines": lines}
        path.write_text(json.dumps(report, indent=1) + "\n")
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
