"""One step of training; on a GPU a CUDA graph of it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.tiny_v4.model import TinyV4

INDEXER_WEIGHT = 0.1  # of the loss of indexers; other values were not compared
BIAS_STEP = 0.01  # by which the bias of an expert moves
EAGER_STEPS = 2  # before the capture: kernels are compiled, moments and caches exist


def loss_of(model: nn.Module, token_ids: Tensor) -> Tensor:
    """Nats per letter of `[rows, length + 1]`."""
    logits = model(token_ids[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), token_ids[:, 1:].flatten())


def training_loss_of(model: TinyV4, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Nats per letter; and what is minimised, which has the loss of indexers added.

    The two have no parameter in common, so that the weight of the second does not matter to the
    first, but for the norm to which gradients are clipped.
    """
    logits, indexer_loss = model.with_indexer_loss(token_ids[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1).float(), token_ids[:, 1:].flatten())
    return loss, loss + INDEXER_WEIGHT * indexer_loss


def optimizer_of(model: nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    """AdamW; on a GPU its step count and its learning rate are tensors there."""
    cuda = next(model.parameters()).is_cuda
    rate = torch.tensor(learning_rate, device="cuda") if cuda else learning_rate
    return torch.optim.AdamW(
        model.parameters(), lr=rate, weight_decay=0.01, capturable=cuda, fused=cuda or None
    )


class TrainingStep:
    """Learns from a batch; a call returns the loss before that, a tensor.

    On a GPU the first steps run as they are and later ones replay a CUDA graph: forward, backward,
    clipping, optimizer and the bias of the experts, without any work of the host in between. The
    bits are the same. The graph reads the batch and the learning rate from fixed tensors.

    The tensor that a call returns is overwritten by the next one.
    """

    def __init__(self, model: TinyV4, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.graph: torch.cuda.CUDAGraph | None = None
        self.steps = 0
        self.batch: Tensor | None = None
        self.loss: Tensor | None = None

    def __call__(self, batch: Tensor, learning_rate: float) -> Tensor:
        """Learn from int64 `[rows, length + 1]`, on the host or the device of the model."""
        self._set_rate(learning_rate)
        self.steps += 1
        if not self.model.head.weight.is_cuda:
            return self._run(batch)
        if self.batch is None:
            self.batch = batch.cuda()
        self.batch.copy_(batch, non_blocking=True)
        if self.steps <= EAGER_STEPS:
            return self._on_side_stream(self.batch)
        if self.graph is None:
            self._capture(self.batch)
        if self.graph is None or self.loss is None:
            raise RuntimeError("unreachable: the graph was captured")
        self.graph.replay()
        return self.loss

    def _set_rate(self, learning_rate: float) -> None:
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(learning_rate)
            else:
                group["lr"] = learning_rate

    def _run(self, batch: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss, minimised = training_loss_of(self.model, batch)
        minimised.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        for layer in self.model.experts():
            layer.update_bias(BIAS_STEP)
        return loss.detach()

    def _on_side_stream(self, batch: Tensor) -> Tensor:
        """A step that prepares a capture must not use the default stream."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            loss = self._run(batch)
        torch.cuda.current_stream().wait_stream(stream)
        return loss

    def _capture(self, batch: Tensor) -> None:
        self.optimizer.zero_grad()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.loss = self._run(batch)
