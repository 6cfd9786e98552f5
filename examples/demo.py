"""Every operator on this machine: the kernels on a GPU, or their generated CUDA on the CPU.

Run it with `make demo`. Small inputs, compared with the PyTorch oracles and worked examples.
"""

import sys

import torch

import tile_kernels
from tile_kernels import cli


def show_one_call() -> None:
    """What using the library looks like."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    scores = torch.randn(4, 64, device=device)
    chosen = tile_kernels.moe.topk_gate(scores, num_topk=4)
    print("tile_kernels.moe.topk_gate(scores, num_topk=4), scores [4, 64]:")
    print(chosen, end="\n\n")


if __name__ == "__main__":
    show_one_call()
    sys.exit(cli.main(["check", *sys.argv[1:]]))
