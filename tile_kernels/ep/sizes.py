"""How large buffers must be, and how many SMs and queue pairs they use: methods over `model`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tile_kernels import config
from tile_kernels.ep import model
from tile_kernels.ep.agreement import agree
from tile_kernels.ep.base import BufferBase
from tile_kernels.ep.domains import Domain, topology_of
from tile_kernels.ep.engines import make_engine
from tile_kernels.ep.topology import Topology
from tile_kernels.runtime import checks
from tile_kernels.utils import align


def buffer_bytes(
    topology: Topology,
    physical: Domain,
    num_max_tokens_per_rank: int,
    hidden: int,
    num_topk: int,
    use_fp8_dispatch: bool,
    allow_multiple_reduction: bool,
) -> int:
    """Bytes that a buffer for this shape needs on each rank of a topology."""
    return model.buffer_bytes(
        topology.num_scaleout_ranks, topology.num_scaleup_ranks, num_max_tokens_per_rank,
        hidden, num_topk, use_fp8_dispatch, allow_multiple_reduction,
        all_nvlink=topology.is_hybrid or physical[0] == 1,
    )  # fmt: skip


def shapes_of(
    shapes: Sequence[int] | Sequence[Sequence[int]],
) -> tuple[list[Sequence[int]], bool]:
    """A list of shapes, and whether several were given rather than one."""
    several = len(shapes) > 0 and not isinstance(shapes[0], int)
    return (list(shapes) if several else [shapes]), several  # type: ignore[arg-type, list-item]


class SizeHints(BufferBase):
    """Sizes and counts of `ElasticBuffer`."""

    @staticmethod
    def get_buffer_size_hint(
        group: Any,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
    ) -> int:
        """Returns the bytes that a buffer for this shape needs on each rank. Collective.

        Args:
            group: As in `ElasticBuffer`.
            num_max_tokens_per_rank: As in `ElasticBuffer`.
            hidden: As in `ElasticBuffer`.
            num_topk: As in `ElasticBuffer`.
            use_fp8_dispatch: As in `ElasticBuffer`.
            allow_hybrid_mode: As in `ElasticBuffer`.
            allow_multiple_reduction: As in `ElasticBuffer`.
        """
        engine = make_engine(group)
        agree(engine, "ElasticBuffer.get_buffer_size_hint", {}, None)
        topology, physical = topology_of(engine, allow_hybrid_mode, None)
        return buffer_bytes(
            topology, physical, num_max_tokens_per_rank, hidden, num_topk, use_fp8_dispatch,
            allow_multiple_reduction,
        )  # fmt: skip

    @staticmethod
    def get_engram_storage_size_hint(
        num_entries: int,
        hidden: int,
        num_max_tokens_per_rank: int,
        dtype: torch.dtype = torch.bfloat16,
    ) -> tuple[int, int]:
        """Returns the bytes on the GPU for fetched rows, and in host memory for the entries.

        Args:
            num_entries: Rows of the table on this rank.
            hidden: Channels of a row.
            num_max_tokens_per_rank: The largest number of rows of a fetch.
            dtype: The dtype of the rows.
        """
        return model.engram_bytes(num_entries, hidden, num_max_tokens_per_rank, dtype)

    @staticmethod
    def get_pp_buffer_size_hint(num_max_tensor_bytes: int, num_max_inflight_tensors: int) -> int:
        """Returns the bytes for tensors in flight to and from both neighbours.

        Args:
            num_max_tensor_bytes: The largest tensor in bytes.
            num_max_inflight_tensors: The largest number of tensors in flight.
        """
        return model.pp_bytes(num_max_tensor_bytes, num_max_inflight_tensors)

    @staticmethod
    def get_agrs_num_max_session_bytes(
        group: Any, shapes: Sequence[int] | Sequence[Sequence[int]], dtype: torch.dtype
    ) -> int:
        """Returns the bytes of a session that gathers a tensor of each shape.

        Args:
            group: As in `ElasticBuffer`.
            shapes: A shape, or a sequence of shapes.
            dtype: The dtype of the tensors.
        """
        return model.all_gather_session_bytes(make_engine(group).size, shapes_of(shapes)[0], dtype)

    @staticmethod
    def get_agrs_buffer_size_hint(group: Any, num_max_session_bytes: int) -> int:
        """Returns the bytes of a buffer for such sessions.

        Args:
            group: As in `ElasticBuffer`.
            num_max_session_bytes: The bytes of a session.
        """
        make_engine(group)
        return align(num_max_session_bytes, model.PAGE)

    def get_theoretical_num_sms(
        self,
        num_experts: int,
        num_topk: int,
        num_scaleout_topk: int = 0,
        rdma_gbs: float = 0,
        nvlink_gbs: float = 0,
        sm_read_gbs: float = 200,
        sm_write_gbs: float = 50,
    ) -> int:
        """Returns how many SMs would keep the links busy: see `model.num_sms`.

        Bandwidths are not detected. Without any, the result is 20, the number that DeepEP's legacy
        buffer uses, or all SMs of a smaller device. If one is given, all that matter for the
        topology must be given. On a machine without a GPU the SMs are those of the default device
        (`config.get_device_num_sms`).

        Args:
            num_experts: The number of experts.
            num_topk: Experts per token.
            num_scaleout_topk: Must be 0.
            rdma_gbs: The bandwidth of RDMA in GB/s.
            nvlink_gbs: The bandwidth of NVLink in GB/s.
            sm_read_gbs: The bandwidth at which an SM reads, in GB/s.
            sm_write_gbs: The bandwidth at which an SM writes, in GB/s.
        """
        if num_scaleout_topk != 0:
            raise ValueError(
                "ElasticBuffer.get_theoretical_num_sms: num_scaleout_topk must be 0, got "
                f"{num_scaleout_topk}"
            )
        if rdma_gbs == 0 and nvlink_gbs == 0:
            return min(model.DEFAULT_NUM_SMS, config.get_device_num_sms())
        with checks.named("ElasticBuffer.get_theoretical_num_sms"):
            return model.num_sms(
                self.num_scaleout_ranks,
                self.num_scaleup_ranks,
                num_experts,
                num_topk,
                rdma_gbs=rdma_gbs,
                nvlink_gbs=nvlink_gbs,
                num_device_sms=config.get_device_num_sms(),
                num_physical_nvlink_ranks=self.num_nvlink_ranks,
                prefer_overlap_with_compute=self.prefer_overlap_with_compute,
                sm_read_gbs=sm_read_gbs,
                sm_write_gbs=sm_write_gbs,
            )

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """Returns how many of the allocated queue pairs a transfer would use.

        Args:
            num_sms: The number of SMs of the transfer.
        """
        return model.num_qps(num_sms, self.num_allocated_qps, self.allow_hybrid_mode)
