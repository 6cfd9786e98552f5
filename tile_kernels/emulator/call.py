"""`emulate`: one call from a TileLang function and tensors to a checked run."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Unpack

from .cuda_api import Patches
from .launch import Emulated, Options
from .lowering import DEFAULT_ARCH
from .report import Report


def emulate(
    factory: Any,
    static_args: Sequence[Any] = (),
    tensors: Mapping[str, Any] | None = None,
    scalars: Mapping[str, Any] | None = None,
    *,
    static_kwargs: Mapping[str, Any] | None = None,
    order: str = "forward",
    seed: int = 0,
    arch: str | None = None,
    pass_configs: Mapping[Any, Any] | None = None,
    async_late: bool = True,
    fresh: Sequence[str] = (),
    **options: Unpack[Options],
) -> Report:
    """Runs every kernel of a TileLang function on CPU tensors, in place.

    To run the same kernel more than once, keep an `Emulated`.

    Args:
        factory: A `@tilelang.jit` factory, a function that returns a prim_func, or a prim_func.
        static_args: Positional arguments with which the factory is called.
        tensors: CPU tensors by parameter name. An optional tensor that is not used may be omitted.
        scalars: Scalar arguments by parameter name.
        static_kwargs: Keyword arguments with which the factory is called.
        order: Order of threads and blocks: `"forward"`, `"reverse"` or `"random"`.
        seed: Seed of the random order.
        arch: Architecture of the generated source; by default that of the factory, else sm_90a.
        pass_configs: Pass configurations of TileLang; by default those of the factory.
        async_late: Whether asynchronous copies complete as late as possible.
        fresh: Names of tensors whose contents are undefined.
        options: The fields of `tile_kernels.emulator.Options`, such as `mode` and `report`.

    Returns:
        A `Report` with the kernels that ran and, in check mode, the bytes that they moved.

    Raises:
        EmulationError: If the kernel has an error, or needs something that is not supported.
        TypeError, ValueError: If an argument does not match the signature of the kernel.
    """
    prim_func, configs, own_arch = resolve(factory, static_args, static_kwargs)
    emulated = Emulated.build(
        prim_func,
        arch=arch or own_arch or DEFAULT_ARCH,
        pass_configs=configs if pass_configs is None else pass_configs,
        **options,
    )
    given = {**(tensors or {}), **(scalars or {})}
    names = [p.name for p in emulated.lowered.params]
    unknown = [n for n in given if n not in names]
    if unknown:
        raise TypeError(
            f"{emulated.name} has no parameter {', '.join(unknown)}; it has {', '.join(names)}"
        )
    values = [given.get(n) for n in names]
    return emulated(*values, order=order, seed=seed, async_late=async_late, fresh=fresh)


def resolve(
    factory: Any, static_args: Sequence[Any] = (), static_kwargs: Mapping[str, Any] | None = None
) -> tuple[Any, Mapping[Any, Any] | None, str | None]:
    """The prim_func of a factory call, with the factory's pass configs and architecture."""
    kwargs = dict(static_kwargs or {})
    if hasattr(factory, "get_tir"):
        target = getattr(factory, "target", None)
        arch = target.get("arch") if isinstance(target, Mapping) else None
        with device_asserts():
            prim_func = factory.get_tir(*static_args, **kwargs)
        return prim_func, getattr(factory, "pass_configs", None), arch
    if callable(factory) and not hasattr(factory, "buffer_map"):
        with device_asserts():
            return factory(*static_args, **kwargs), None, None
    if static_args or kwargs:
        raise TypeError("static arguments were given, but the kernel is a finished prim_func")
    return factory, None, None


@contextlib.contextmanager
def device_asserts() -> Iterator[None]:
    """Keeps `T.device_assert` in kernels built inside, also on a machine without a CUDA toolkit.

    TileLang omits it there.
    """
    patches = Patches()
    try:
        # The second is the module of TileLang 0.1.11.
        for name in ("tilelang.cuda.debug", "tilelang.language.print_op"):
            with contextlib.suppress(ImportError):
                patches.set(importlib.import_module(name), "_IS_CUDA_AVAILABLE", True)
        yield
    finally:
        patches.restore()
