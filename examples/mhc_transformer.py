"""A small transformer with hyper-connections for residuals, trained for a few seconds on a CPU.

    python -m examples.mhc_transformer

Each token of a text is a function of the token before the last one, so attention has to read one
position back. `HyperConnection` replaces `x + block(norm(x))` of a transformer; the rest is usual.
"""

import math
import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tile_kernels.modeling.mhc import (
    HyperConnection,
    HyperHead,
    RecomputedStack,
    expand_from_embedding,
)

VOCAB, HIDDEN, HEADS, STREAMS, LENGTH = 16, 64, 4, 4, 16


class Attention(nn.Module):
    """Causal self-attention of the normed input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(HIDDEN)
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`[batch, length, HIDDEN]` to the same."""
        heads = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1))
        q, k, v = heads.movedim(-3, 0).transpose(-2, -3)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(-2, -3).flatten(-2))


def feed_forward() -> nn.Module:
    """Two layers on the normed input."""
    return nn.Sequential(
        nn.RMSNorm(HIDDEN), nn.Linear(HIDDEN, 2 * HIDDEN), nn.SiLU(), nn.Linear(2 * HIDDEN, HIDDEN)
    )


class Transformer(nn.Module):
    """Embedding, streams, blocks, head."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, HIDDEN)
        self.places = nn.Embedding(LENGTH, HIDDEN)
        blocks = [block for _ in range(layers) for block in (Attention(), feed_forward())]
        # The streams are bfloat16. Blocks compute in float32, which any CPU can.
        self.layers = RecomputedStack(
            HyperConnection(block, HIDDEN, STREAMS, block_dtype=torch.float32) for block in blocks
        )
        self.leave = HyperHead(HIDDEN, STREAMS)
        self.head = nn.Sequential(nn.RMSNorm(HIDDEN), nn.Linear(HIDDEN, VOCAB))

    def forward(self, token_ids: Tensor) -> Tensor:
        """Logits of the next token, `[batch, length, VOCAB]`."""
        places = torch.arange(token_ids.shape[1], device=token_ids.device)
        x = self.tokens(token_ids) + self.places(places)
        streams = expand_from_embedding(x.bfloat16(), STREAMS)
        return self.head(self.leave(self.layers(streams)).float())


def texts(batch: int, follow: Tensor) -> Tensor:
    """`[batch, LENGTH + 1]`: two random tokens, then each follows from the one before the last."""
    tokens = list(torch.randint(VOCAB, (2, batch)))
    while len(tokens) <= LENGTH:
        tokens.append(follow[tokens[-2]])
    return torch.stack(tokens, dim=1)


def train(steps: int = 60) -> list[float]:
    """The loss of every step, in nats per token."""
    torch.manual_seed(0)
    follow = torch.randperm(VOCAB)
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    losses = []
    for _ in range(steps):
        token_ids = texts(16, follow)
        logits = model(token_ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), token_ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    torch.set_num_threads(1)  # tensors are too small for more
    losses = train()
    print(f"a guess costs {math.log(VOCAB):.2f} nats per token\n")
    for step in (*range(0, len(losses), 10), len(losses) - 1):
        print(f"{step:4}    {losses[step]:.2f}")
    sys.exit(losses[-1] >= losses[0] / 2)
