"""Expert parallelism: tokens to the ranks of their experts and back, over one or many processes."""

from tile_kernels.ep.buffer import ElasticBuffer
from tile_kernels.ep.domains import get_logical_domain_size, get_physical_domain_size
from tile_kernels.ep.engines import LocalGroup, run_ranks
from tile_kernels.ep.events import EventHandle, EventOverlap
from tile_kernels.ep.handle import EPHandle
from tile_kernels.ep.legacy import Buffer, Config, install_as_deep_ep
from tile_kernels.ep.requests import topk_idx_t
from tile_kernels.ep.reshard import even_owners, move_experts

__all__ = [
    "Buffer",
    "Config",
    "EPHandle",
    "ElasticBuffer",
    "EventHandle",
    "EventOverlap",
    "LocalGroup",
    "even_owners",
    "get_logical_domain_size",
    "get_physical_domain_size",
    "install_as_deep_ep",
    "move_experts",
    "run_ranks",
    "topk_idx_t",
]
