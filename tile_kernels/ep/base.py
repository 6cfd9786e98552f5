"""The ranks, the topology and the lifetime of a buffer, which all of its methods share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from tile_kernels.ep.agreement import Agreed, Settings, checked, propose
from tile_kernels.ep.events import EventHandle, Finish, comm_stream, on_comm_stream
from tile_kernels.ep.requests import Limits
from tile_kernels.ep.transport import Fabric


class BufferBase:
    """Attributes that the constructor of `ElasticBuffer` sets, and methods about the ranks."""

    group: Any
    engine: str
    rank_idx: int
    num_ranks: int
    num_bytes: int
    num_cpu_bytes: int
    num_max_tokens_per_rank: int
    num_allocated_qps: int
    num_cpu_timeout_secs: int
    num_gpu_timeout_secs: int
    num_rdma_ranks: int
    num_nvlink_ranks: int
    num_scaleout_ranks: int
    num_scaleup_ranks: int
    scaleout_rank_idx: int
    scaleup_rank_idx: int
    sl_idx: int
    deterministic: bool
    allow_hybrid_mode: bool
    allow_multiple_reduction: bool
    prefer_overlap_with_compute: bool
    explicitly_destroy: bool
    _fabric: Fabric
    _check_ranks: bool
    _keep_tensors: bool
    _destroyed: bool = False
    _limits: Limits
    _identity: Settings  # tells the buffers of a group apart

    def destroy(self) -> None:
        """Wait for all ranks and end the use of the buffer; needs `explicitly_destroy=True`."""
        if not self.explicitly_destroy:
            raise RuntimeError(
                "ElasticBuffer.destroy: the buffer was made with explicitly_destroy=False"
            )
        if not self._destroyed:
            self._fabric.settle()
            self._agree("ElasticBuffer.destroy", {}, None)
            self._destroyed = True

    def barrier(
        self, use_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True
    ) -> None:
        """Waits for all ranks.

        Args:
            use_comm_stream: Has no effect: the host waits, so that streams need not.
            with_cpu_sync: Whether the host waits for the devices of all ranks too.
            sequential: Has no effect.
        """
        del use_comm_stream, sequential  # the host waits, so streams have nothing to order
        if with_cpu_sync and torch.cuda.is_available():
            torch.cuda.synchronize()
        self._agree("ElasticBuffer.barrier", {}, None)

    @staticmethod
    def capture() -> EventHandle:
        """An event on the current stream."""
        return EventHandle()

    def get_comm_stream(self) -> torch.cuda.Stream:
        """The stream that communication on the current CUDA device uses."""
        if not torch.cuda.is_available():
            raise RuntimeError("ElasticBuffer.get_comm_stream: there is no CUDA device")
        return comm_stream(torch.device("cuda"))

    def get_physical_domain_size(self) -> tuple[int, int]:
        """`(nodes, ranks of each)`."""
        return self.num_rdma_ranks, self.num_nvlink_ranks

    def get_logical_domain_size(self) -> tuple[int, int]:
        """`(nodes, ranks of each)` as tokens travel."""
        return self.num_scaleout_ranks, self.num_scaleup_ranks

    def _on_comm_stream(
        self, device: torch.device, previous_event: EventHandle | None
    ) -> AbstractContextManager[Finish]:
        return on_comm_stream(device, previous_event, self._keep_tensors)

    def _configure(self, call: str, check: Callable[[], None], settings: Settings) -> None:
        """The agreement check of a call that needs all ranks to be active."""
        _, error = checked(lambda: self._check_all_active(check))
        self._agree(call, settings, error)

    def _check_all_active(self, check: Callable[[], None] = lambda: None) -> None:
        if len(self._fabric.world.active) < self.num_ranks:
            raise ValueError(
                f"all ranks must be active, but only {list(self._fabric.world.active)} of "
                f"{self.num_ranks} are"
            )
        check()

    def _check_alive(self, call: str) -> None:
        if self._destroyed:
            raise RuntimeError(f"{call}: the buffer was destroyed")

    def _agree(self, call: str, settings: Settings, error: Exception | None) -> Agreed:
        """The agreement check."""
        return self._propose(call, settings, error)()

    def _propose(
        self,
        call: str,
        settings: Settings,
        error: Exception | None,
        counts: Sequence[int] | None = None,
        numbers: Sequence[int] = (),
        needs_counts: bool = True,
    ) -> Callable[[], Agreed]:
        """The agreement check, for whose end the result waits.

        Without `needs_counts`, ranks only agree on a buffer with `check_ranks`.
        """
        self._check_alive(call)
        if needs_counts or self._check_ranks:
            settings = {**self._identity, **settings}
            return propose(self._fabric.world, call, settings, error, counts, numbers)
        if error is not None:
            raise type(error)(f"{call}: rank {self.rank_idx}: {error}") from error
        alone = Agreed(list(counts or [0] * self.num_ranks), [], [])
        return lambda: alone
