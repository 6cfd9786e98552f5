"""How the gate's backward pass divides the tokens."""

from __future__ import annotations

import torch

from tile_kernels import config

MOST_PER_SM = 4
PER_SM = 16384  # columns of all streams, for which a block takes a multiprocessor or its share


def blocks_per_sm(streams: int, hidden: int) -> int:
    """Blocks of the backward pass that share a multiprocessor: several where rows are short."""
    return max(1, min(MOST_PER_SM, PER_SM // (streams * hidden)))


def count_parts(num_tokens: int, streams: int, hidden: int, device: torch.device) -> int:
    """Parts of the tokens, each with its own sum of weight gradients; at least one.

    As many as blocks fit on the device, whatever the SM budget is, so that results do not depend
    on it. Part `p` of `n` has the tokens from `p * num_tokens // n` up to where the next starts.
    """
    sms = config.get_device_num_sms(device if device.type == "cuda" else None)
    # Without a look at a number of tokens that is only known at run time.
    return torch.sym_max(1, torch.sym_min(num_tokens, sms * blocks_per_sm(streams, hidden)))
