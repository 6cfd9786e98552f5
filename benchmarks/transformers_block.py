"""Blocks of Hugging Face transformers before and after `apply`.

Run it as `python -m benchmarks.transformers_block [CASE ...]`. Each case is a block of a DeepSeek
model of transformers with random weights, as it is and with the operators of
`tile_kernels.integrations.transformers`; both have the same parameters and inputs. They are
compared and timed as `benchmarks.layers` does it.

Without a GPU sizes are tiny and nothing is compiled.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import DeepseekV3Config, DeepseekV4Config
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as v4

from benchmarks.layers import BF16, COMPILED, CUDA, DEVICE, Case, Forms, parser_of, run_all, streams
from tile_kernels.integrations.transformers import apply

STD = 0.02  # of weights
# Results and gradients may be this far apart. On a GPU transformers' routers compute scores in TF32
# (DeepSeek-V3) or round them to bfloat16 (V4), and of many tokens some take another expert of
# nearly the same score. The file has the distances.
OFF = 0.3 if CUDA else 0.02


def forms_of(build: Callable[[], nn.Module], inputs: tuple[Tensor, ...], off: float) -> Forms:
    """A block with random weights in bfloat16, and the same with our operators."""
    with torch.device(DEVICE):
        block = build()
    with torch.no_grad():
        for name, parameter in block.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=STD)
            elif name.endswith(("base", "sinks")):
                parameter.zero_()
            else:
                parameter.fill_(1.0)
    for name, parameter in block.named_parameters():
        if "_hc." not in name:  # which transformers keeps in float32
            parameter.data = parameter.data.to(BF16)
    ours = copy.deepcopy(block, {id(p): p for p in block.parameters()})  # the same parameters
    apply(ours)
    return Forms(block, {"kernels": ours}, inputs, {"kernels": off})


def moe_config(hidden: int, intermediate: int, experts: int, topk: int, **sizes: Any) -> Any:
    """DeepSeek-V3 with experts in 8 groups, of which a token takes from 4."""
    config = DeepseekV3Config(
        hidden_size=hidden, moe_intermediate_size=intermediate, n_routed_experts=experts,
        num_experts_per_tok=topk, n_group=8, topk_group=4, n_shared_experts=1,
        first_k_dense_replace=0, **sizes,
    )  # fmt: skip
    config._experts_implementation = "grouped_mm"  # what a model of transformers chooses
    return config


def moe(tokens: int, **sizes: int) -> Forms:
    """The mixture of experts of DeepSeek-V3: router, routed experts, a shared one."""
    config = moe_config(**sizes)
    return forms_of(
        lambda: v3.DeepseekV3MoE(config), (streams(1, tokens, config.hidden_size),), OFF
    )


class V3Layer(nn.Module):
    """A decoder layer of DeepSeek-V3 with causal attention."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.layer = v3.DeepseekV3DecoderLayer(config, 0)
        self.rotary = v3.DeepseekV3RotaryEmbedding(config)

    def forward(self, x: Tensor) -> Tensor:
        """`[batch, length, hidden]` to the same."""
        positions = torch.arange(x.shape[1], device=x.device)[None]
        return self.layer(x, position_ids=positions, position_embeddings=self.rotary(x, positions))


def v3_layer(batch: int, length: int, heads: int, **sizes: int) -> Forms:
    """A decoder layer of DeepSeek-V3: attention and mixture of experts, between norms."""
    config = moe_config(num_attention_heads=heads, num_key_value_heads=heads, **sizes)
    config._attn_implementation = "sdpa"
    return forms_of(lambda: V3Layer(config), (streams(batch, length, config.hidden_size),), OFF)


class V4Layer(nn.Module):
    """A decoder layer of DeepSeek-V4 with attention in a sliding window."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.layer = v4.DeepseekV4DecoderLayer(config, 0)
        self.rotary = v4.DeepseekV4RotaryEmbedding(config)
        self.window = config.sliding_window

    def forward(self, x: Tensor) -> Tensor:
        """Streams, `[batch, length, m, hidden]`, to the same."""
        positions = torch.arange(x.shape[1], device=x.device)
        distance = positions[:, None] - positions
        hidden = (distance < 0) | (distance >= self.window)
        mask = torch.zeros(distance.shape, device=x.device, dtype=x.dtype)
        mask = mask.masked_fill(hidden, torch.finfo(x.dtype).min)[None, None]
        rotations = {
            kind: self.rotary(x, position_ids=positions[None], layer_type=kind)
            for kind in ("main", "compress")
        }
        return self.layer(
            x, position_embeddings=rotations, position_ids=positions[None], attention_mask=mask
        )


def v4_layer(
    batch: int, length: int, hidden: int, heads: int, head_dim: int, intermediate: int,
    experts: int, topk: int,
) -> Forms:  # fmt: skip
    """A decoder layer of DeepSeek-V4: attention and experts between four residual streams."""
    config = DeepseekV4Config(
        hidden_size=hidden, moe_intermediate_size=intermediate, n_routed_experts=experts,
        num_experts_per_tok=topk, num_attention_heads=heads, head_dim=head_dim,
        q_lora_rank=hidden // 4, o_groups=heads // 8 or 1, o_lora_rank=hidden // 4,
        sliding_window=128, num_hidden_layers=1, layer_types=["sliding_attention"],
        mlp_layer_types=["moe"],
    )  # fmt: skip
    config._experts_implementation = "grouped_mm"
    config._attn_implementation = "eager"  # transformers has no other for it
    inputs = (streams(batch, length, config.hc_mult, hidden),)
    return forms_of(lambda: V4Layer(config), inputs, OFF)


CASES = {
    "v3.moe": Case(
        moe,
        {"tokens": 4096, "hidden": 4096, "intermediate": 1536, "experts": 64, "topk": 6},
        {"tokens": 40, "hidden": 64, "intermediate": 32, "experts": 16, "topk": 2},
        modes=(COMPILED,),
    ),
    "v3.layer": Case(
        v3_layer,
        {"batch": 4, "length": 1024, "heads": 32, "hidden": 4096, "intermediate": 1536,
         "experts": 64, "topk": 6},
        {"batch": 2, "length": 10, "heads": 2, "hidden": 64, "intermediate": 32, "experts": 16,
         "topk": 2},
        modes=(COMPILED,),
    ),
    "v4.layer": Case(
        v4_layer,
        {"batch": 4, "length": 1024, "hidden": 4096, "heads": 32, "head_dim": 128,
         "intermediate": 1536, "experts": 64, "topk": 6},
        {"batch": 2, "length": 10, "hidden": 64, "heads": 2, "head_dim": 32, "intermediate": 32,
         "experts": 16, "topk": 2},
        modes=(COMPILED,),
    ),
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> list[Path]:
    """Measures; returns the files that were written."""
    parser = parser_of(__doc__, CASES)
    return run_all(
        "benchmarks.transformers_block", "transformers", CASES, parser,
        parser.parse_args(arguments), transformers=transformers.__version__,
    )  # fmt: skip


if __name__ == "__main__":
    for written_path in main():
        print(written_path)
