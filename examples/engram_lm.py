"""A language model that consists of one Engram layer, trained for a few seconds on a CPU.

    python -m examples.engram_lm

The text is generated so that only n-grams help: the next token is a random function of the last
two, and after a single token all tokens are equally likely. A model of single tokens can therefore
only guess, while the Engram layer learns what follows each pair.
"""

import math
import sys

import torch
from torch import Tensor, nn

from tile_kernels.modeling.engram import EngramHasher, EngramModule

VOCAB, STREAMS, HIDDEN = 32, 2, 64
PAD = 0  # no token of a text: the texts hold 1..31


class TinyModel(nn.Module):
    """Token embeddings as residual streams, one Engram layer or none, and a linear head."""

    def __init__(self, memory: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.engram = None
        if memory:
            hasher = EngramHasher(
                num_layers=1, vocab_size=VOCAB, table_rows=2000, num_tables=2, pad_id=PAD
            )
            self.engram = EngramModule(
                hasher, layer=0, hidden_size=HIDDEN, num_streams=STREAMS, embed_dim=32
            )
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, token_ids: Tensor) -> Tensor:
        """Logits of the next token, `[batch, length, VOCAB]`."""
        streams = self.embedding(token_ids)[:, :, None].expand(-1, -1, STREAMS, -1)
        if self.engram is not None:
            streams = self.engram(streams, token_ids)
        return self.head(streams.mean(dim=2))


def followers() -> Tensor:
    """`[VOCAB, VOCAB]`: what follows two tokens. Each column holds every token once."""
    table = torch.zeros(VOCAB, VOCAB, dtype=torch.int64)
    for last in range(1, VOCAB):
        table[1:, last] = 1 + torch.randperm(VOCAB - 1)
    return table


def texts(batch: int, length: int, follow: Tensor) -> Tensor:
    """Texts `[batch, length]` that start anywhere; one token in twenty is a surprise."""
    tokens = [torch.randint(1, VOCAB, (batch,)) for _ in range(2)]
    while len(tokens) < length:
        surprise = torch.rand(batch) < 0.05
        sure = follow[tokens[-2], tokens[-1]]
        tokens.append(torch.where(surprise, torch.randint(1, VOCAB, (batch,)), sure))
    return torch.stack(tokens, dim=1)


def train(steps: int = 150, memory: bool = True) -> list[float]:
    """The loss of every step, in nats per token."""
    torch.manual_seed(0)
    follow = followers()
    model = TinyModel(memory)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        token_ids = texts(32, 64, follow)
        logits = model(token_ids[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), token_ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    torch.set_num_threads(1)  # tensors are too small for more
    guess = math.log(VOCAB - 1)
    print(f"a guess costs {guess:.2f} nats per token\n")
    without, engram = train(memory=False), train(memory=True)
    print("step    without memory    with Engram")
    for step in (*range(0, len(engram), 25), len(engram) - 1):
        print(f"{step:4}    {without[step]:14.2f}    {engram[step]:11.2f}")
    sys.exit(engram[-1] >= guess / 2)
