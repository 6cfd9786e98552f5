"""Tensors to and from the neighbours in a ring of ranks, as pipeline parallelism uses them."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from tile_kernels.ep.base import BufferBase
from tile_kernels.ep.engines import Engine, Pending
from tile_kernels.ep.model import SECTION, pp_bytes
from tile_kernels.ep.requests import Limits
from tile_kernels.ep.rows import as_bytes
from tile_kernels.runtime import checks


class Pipeline:
    """Sends and receives between neighbours, first in, first out, without tags.

    A send returns at once until `num_max_inflight` tensors to that neighbour have not been
    received; then it waits for the oldest.
    """

    def __init__(self, engine: Engine, num_max_tensor_bytes: int, num_max_inflight: int) -> None:
        self._engine = engine
        self._max_bytes = num_max_tensor_bytes
        self._max_inflight = num_max_inflight
        self._inflight: dict[int, deque[list[Pending]]] = {}

    def _check(self, tensor: object, peer: object, name: str) -> Tensor:
        rank, size = self._engine.index, self._engine.size
        checks.integer(name, peer, 0, size - 1)
        if peer not in ((rank - 1) % size, (rank + 1) % size):
            raise ValueError(
                f"{name} must be a neighbour of rank {rank}, {(rank - 1) % size} or "
                f"{(rank + 1) % size}, got {peer}"
            )
        if not isinstance(tensor, Tensor):
            raise TypeError(f"t must be a torch.Tensor, got {type(tensor).__name__}")
        if not tensor.is_contiguous():
            raise ValueError(f"t must be contiguous, got strides {tensor.stride()}")
        num_bytes = tensor.numel() * tensor.element_size()
        if num_bytes > self._max_bytes or num_bytes % SECTION:
            raise ValueError(
                f"t must have a multiple of {SECTION} bytes, at most {self._max_bytes}, got "
                f"{num_bytes}"
            )
        return tensor

    def send(self, tensor: object, peer: int) -> None:
        """Send a copy of a contiguous tensor to a neighbour."""
        data = as_bytes(self._check(tensor, peer, "dst_rank_idx").view(1, -1))[0].clone()
        waiting = self._inflight.setdefault(peer, deque())
        while len(waiting) >= self._max_inflight:
            _wait_for_oldest(waiting)
        size = torch.tensor([data.numel()]).view(torch.uint8)
        waiting.append([self._engine.send(size, peer), self._engine.send(data, peer)])

    def receive(self, tensor: object, peer: int) -> None:
        """Fill a contiguous tensor with the next one that a neighbour sent."""
        out = self._check(tensor, peer, "src_rank_idx")
        size = torch.empty(8, dtype=torch.uint8)
        self._engine.receive(size, peer)
        announced = int(size.view(torch.int64))
        data = torch.empty(announced, dtype=torch.uint8, device=out.device)
        self._engine.receive(data, peer)
        num_bytes = out.numel() * out.element_size()
        if announced != num_bytes:
            raise ValueError(
                f"t must be as large as what rank {peer} sent, {announced} bytes, got {num_bytes}"
            )
        out.view(1, -1).view(torch.uint8).copy_(data.view(1, -1))

    def finish(self) -> None:
        """Wait until everything that was sent has been received."""
        for waiting in self._inflight.values():
            while waiting:
                _wait_for_oldest(waiting)


def _wait_for_oldest(waiting: deque[list[Pending]]) -> None:
    for pending in waiting.popleft():
        pending.wait()


def check_config(num_max_tensor_bytes: int, num_max_inflight_tensors: int, limits: Limits) -> None:
    """The arguments of `pp_set_config`."""
    checks.integer("num_max_tensor_bytes", num_max_tensor_bytes, 1)
    checks.integer("num_max_inflight_tensors", num_max_inflight_tensors, 1)
    limits.check_size(pp_bytes(num_max_tensor_bytes, num_max_inflight_tensors))


class PipelineMethods(BufferBase):
    """The pipeline methods of `ElasticBuffer`."""

    _pipeline: Pipeline | None = None

    def pp_set_config(self, num_max_tensor_bytes: int, num_max_inflight_tensors: int) -> None:
        """Prepares for sends between ring neighbours. Collective.

        Args:
            num_max_tensor_bytes: The largest tensor in bytes.
            num_max_inflight_tensors: The largest number of tensors in flight.
        """
        self._configure(
            "ElasticBuffer.pp_set_config",
            lambda: check_config(num_max_tensor_bytes, num_max_inflight_tensors, self._limits),
            {
                "num_max_tensor_bytes": num_max_tensor_bytes,
                "num_max_inflight_tensors": num_max_inflight_tensors,
            },
        )
        if self._pipeline is not None:
            self._pipeline.finish()
        world = self._fabric.world
        self._pipeline = Pipeline(world, num_max_tensor_bytes, num_max_inflight_tensors)

    def pp_send(self, t: Tensor, dst_rank_idx: int, num_sms: int = 0) -> None:
        """Sends a tensor to the next or the previous rank.

        It returns before the tensor is received, unless too many tensors are in flight.

        Args:
            t: A contiguous tensor of a multiple of 32 bytes.
            dst_rank_idx: The rank that receives it.
            num_sms: Recorded; has no effect on these engines.
        """
        pipeline = self._configured_pipeline("pp_send", num_sms)
        with checks.named(f"ElasticBuffer.pp_send: rank {self.rank_idx}"):
            pipeline.send(t, dst_rank_idx)

    def pp_recv(self, t: Tensor, src_rank_idx: int, num_sms: int = 0) -> None:
        """Receives the next tensor from the next or the previous rank; tensors arrive in order.

        Args:
            t: The tensor that is filled.
            src_rank_idx: The rank that sends it.
            num_sms: Recorded; has no effect on these engines.
        """
        pipeline = self._configured_pipeline("pp_recv", num_sms)
        with checks.named(f"ElasticBuffer.pp_recv: rank {self.rank_idx}"):
            pipeline.receive(t, src_rank_idx)

    def _configured_pipeline(self, call: str, num_sms: int) -> Pipeline:
        checks.integer("num_sms", num_sms, 0)
        self._check_alive(f"ElasticBuffer.{call}")
        if self._pipeline is None:
            raise RuntimeError(f"ElasticBuffer.{call}: pp_set_config must come first")
        return self._pipeline
