"""The number of nodes, and of ranks on each."""

from __future__ import annotations

from tile_kernels.ep.agreement import agree
from tile_kernels.ep.engines import Engine, make_engine
from tile_kernels.ep.topology import Topology

Domain = tuple[int, int]


def _physical(engine: Engine) -> Domain:
    hosts = engine.hosts()
    per_host = hosts.count(hosts[0])
    regular = len(hosts) % per_host == 0 and all(
        len(set(hosts[start : start + per_host])) == 1 and hosts.count(hosts[start]) == per_host
        for start in range(0, len(hosts), per_host)
    )
    if not regular:
        raise ValueError(
            "ElasticBuffer: ranks must be numbered host by host with equally many on each, got "
            f"{', '.join(hosts)}; num_scaleup_ranks=1 treats every rank as a node"
        )
    return len(hosts) // per_host, per_host


def topology_of(
    engine: Engine, allow_hybrid_mode: bool, num_scaleup_ranks: int | None
) -> tuple[Topology, Domain]:
    """The topology that tokens are sent in, and the physical one.

    A node is a host unless `num_scaleup_ranks` is given. Collective.
    """
    if num_scaleup_ranks is None:
        physical = _physical(engine)
    else:
        if num_scaleup_ranks < 1 or engine.size % num_scaleup_ranks:
            raise ValueError(
                f"ElasticBuffer: num_scaleup_ranks must divide the {engine.size} ranks, got "
                f"{num_scaleup_ranks}"
            )
        physical = (engine.size // num_scaleup_ranks, num_scaleup_ranks)
    return Topology(*physical) if allow_hybrid_mode else Topology(1, engine.size), physical


def get_physical_domain_size(group: object) -> Domain:
    """Returns `(nodes, ranks per node)`, where a node is a host. Collective.

    Args:
        group: A process group or a `LocalGroup`.

    Example:
        >>> from tile_kernels.ep import LocalGroup
        >>> get_physical_domain_size(LocalGroup())
        (1, 1)
    """
    engine = make_engine(group)
    agree(engine, "get_physical_domain_size", {}, None)
    return _physical(engine)


def get_logical_domain_size(group: object, allow_hybrid_mode: bool = True) -> Domain:
    """Returns `(nodes, ranks per node)` as tokens are sent. Collective with `allow_hybrid_mode`.

    Args:
        group: A process group or a `LocalGroup`.
        allow_hybrid_mode: If False, all ranks count as one node.
    """
    engine = make_engine(group)
    if not allow_hybrid_mode:
        return 1, engine.size
    agree(engine, "get_logical_domain_size", {}, None)
    return _physical(engine)
