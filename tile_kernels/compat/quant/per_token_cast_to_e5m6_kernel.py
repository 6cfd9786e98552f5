"""`per_token_cast_to_e5m6` at its second import path."""

from tile_kernels.quant.per_token.op import per_token_cast_to_e5m6

__all__ = ["per_token_cast_to_e5m6"]
