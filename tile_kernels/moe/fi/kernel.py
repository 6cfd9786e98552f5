"""The kernel of `aux_fi` is that of `group_count`."""

from tile_kernels.moe.count.kernel import group_count

__all__ = ["group_count"]
