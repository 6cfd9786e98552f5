"""A block of layers that keeps no residuals: they are rebuilt for the backward pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from tile_kernels.mhc import mhc_multilayer_recompute
from tile_kernels.modeling.mhc.functional import Read, mhc_post
from tile_kernels.modeling.mhc.module import HyperConnection


class _Name(NamedTuple):
    """One of the tensors that can be rebuilt: the layer and what it is there."""

    layer: int
    is_residual: bool


class _View(NamedTuple):
    """What autograd keeps instead of such a tensor, or of a view of it."""

    name: _Name
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Saved(NamedTuple):
    """What autograd keeps of all others."""

    tensor: Tensor
    version: int


class _Ledger:
    """What is kept of a block of layers, and what was rebuilt from that.

    `pack` and `unpack` are for autograd: a residual or a layer input that it wants to keep is
    noted, not kept. The first that it wants to have back makes all of them, and each is let go when
    it has been given as often as it was noted.
    """

    def __init__(self, residual: Tensor) -> None:
        # Detached, as all that follow: a graph holds this, which must not hold the graph.
        self.first = _Saved(residual.detach(), residual._version)
        self.pre: list[Tensor] = []
        self.post: list[Tensor] = []
        self.comb: list[Tensor] = []
        self.outputs: list[Tensor] = []
        self.now: dict[int, tuple[_Name, Tensor, int]] = {}  # by the address of its storage
        self.noted: Counter[_Name] = Counter()
        self.left: Counter[_Name] = Counter()
        self.rebuilt: dict[_Name, Tensor] = {}

    def starts(self, layer: int, residual: Tensor) -> None:
        """`layer` reads `residual`, and nothing reads what was before."""
        self.now = {}
        if layer > 0:  # the first is kept
            self._add(_Name(layer, True), residual)

    def reads(self, layer: int, layer_input: Tensor) -> None:
        """`layer` has this input."""
        self._add(_Name(layer, False), layer_input)

    def writes(self, got: Read, output: Tensor) -> None:
        """By these mixes the layer was read, and by these its output is written."""
        if got.pre is not None:
            self.pre.append(got.pre.detach())
        self.post.append(got.post.detach())
        self.comb.append(got.comb.detach())
        self.outputs.append(output.detach())

    def _add(self, name: _Name, tensor: Tensor) -> None:
        if tensor.numel():
            address = tensor.untyped_storage().data_ptr()
            self.now[address] = name, tensor.detach(), tensor._version

    def pack(self, tensor: Tensor) -> _View | _Saved:
        """What autograd keeps of a tensor."""
        if type(tensor) is Tensor and tensor.layout is torch.strided:
            found = self.now.get(tensor.untyped_storage().data_ptr())
            if found is not None:
                name, original, version = found
                if tensor.dtype == original.dtype and tensor._version == version:
                    self.noted[name] += 1
                    offset = int(tensor.storage_offset() - original.storage_offset())
                    return _View(name, tensor.size(), tensor.stride(), offset)
        return _Saved(tensor.detach(), tensor._version)

    def unpack(self, kept: _View | _Saved) -> Tensor:
        """The tensor, as it was."""
        if isinstance(kept, _Saved):
            if kept.tensor._version != kept.version:
                raise RuntimeError(
                    "RecomputedStack: a tensor that the backward pass needs, of shape "
                    f"{list(kept.tensor.shape)}, was written in place after it was used"
                )
            return kept.tensor
        name = kept.name
        if name not in self.rebuilt:
            self.rebuild()
        tensor = self.rebuilt[name]
        self.left[name] -= 1
        if self.left[name] == 0:
            del self.rebuilt[name]
        return tensor.as_strided(kept.size, kept.stride, kept.offset)

    @torch.no_grad()
    def rebuild(self) -> None:
        """Make all layer inputs, and all residuals but the first."""
        layers, first = len(self.pre), self.unpack(self.first)
        inputs = [torch.empty_like(output) for output in self.outputs]
        residuals = [torch.empty_like(first) for _ in range(layers - 1)]
        mhc_multilayer_recompute(
            first, self.pre, self.outputs[: layers - 1], self.post[: layers - 1],
            self.comb[: layers - 1], inputs, residuals,
        )  # fmt: skip
        computed = {_Name(layer, False): tensor for layer, tensor in enumerate(inputs)}
        computed |= {_Name(layer, True): tensor for layer, tensor in enumerate(residuals, start=1)}
        self.rebuilt = {name: tensor for name, tensor in computed.items() if name in self.noted}
        self.left = self.noted.copy()


class RecomputedStack(nn.Module):
    """Layers in sequence whose residuals are recomputed in the backward pass.

    Results and gradients are bit for bit those of the layers without the stack. The stack saves the
    first residual and, for each layer, the mixes and the output of the block, which is a fraction
    `1 / m` of a residual. In the backward pass `mhc_multilayer_recompute` computes the residuals
    and the inputs of all blocks from these in one call. No block runs again, and what blocks save
    for themselves stays saved, except for their input.

    The larger the stack, the less is saved and the more is recomputed at once. Under
    `torch.compile` the layers run without recomputation.

    Args:
        layers: `HyperConnection`s.

    Example:
        >>> layers = [HyperConnection(nn.Identity(), 16, mhc_mult=2) for _ in range(3)]
        >>> residual = torch.ones(3, 2, 16).bfloat16().requires_grad_()
        >>> RecomputedStack(layers)(residual).sum().backward()
        >>> residual.grad.shape
        torch.Size([3, 2, 16])
    """

    def __init__(self, layers: Iterable[HyperConnection]) -> None:
        super().__init__()
        layers = list(layers)
        for layer in layers:
            if not isinstance(layer, HyperConnection):
                raise TypeError(
                    f"RecomputedStack: layers must be HyperConnections, got {type(layer).__name__}"
                )
        self.layers = nn.ModuleList(layers)

    def forward(self, residual: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Applies the layers.

        Args:
            residual: `[..., m, h]`, bfloat16, contiguous.
            args: Further arguments of every block.
            kwargs: Further keyword arguments of every block.

        Returns:
            The last residual, `[..., m, h]`, bfloat16.
        """
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            for layer in self.layers:
                residual = layer(residual, *args, **kwargs)
            return residual
        ledger = _Ledger(residual)
        with saved_tensors_hooks(ledger.pack, ledger.unpack):
            for number, layer in enumerate(self.layers):
                residual = _noted(ledger, number, layer, residual, *args, **kwargs)
        ledger.now = {}
        return residual


def _noted(
    ledger: _Ledger, number: int, layer: Any, residual: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    """A `HyperConnection` as it runs by itself, with notes in the ledger."""
    ledger.starts(number, residual)
    got: Read = layer.read(residual, with_pre=True)
    ledger.reads(number, got.layer_input)
    output = layer.run_block(got.layer_input, *args, **kwargs)
    ledger.writes(got, output)
    return mhc_post(output, residual, got.post, got.comb, got.carried)
