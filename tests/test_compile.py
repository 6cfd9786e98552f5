"""Every kernel that the samples ask for: lowered for all architectures, compiled with nvcc.

No GPU is needed. The machine code is read back: no spills, no local memory, and global accesses
as wide as the plan promises.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest

from tests.requirements import needs_nvcc
from tile_kernels.runtime import op as ops
from tile_kernels.runtime import sources
from tile_kernels.runtime.device import DESCRIBED
from tile_kernels.runtime.op import Op
from tile_kernels.runtime.warmup import Call, Compilation, compilations

OPS = ops.all_ops()
EVERY_ARCH = "TILE_KERNELS_TEST_ARCHES" in os.environ
each_op = pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)


def one_of_each(op: Op, arch: str) -> list[Compilation]:
    """For each kernel of an operator's benchmarks its first use."""
    found = compilations(calls(op, "benchmarks"), DESCRIBED[arch])
    assert found, f"{op.name} launches no kernel"
    return list({item.kernel.name: item for item in reversed(found)}.values())


def kernels(op: Op, arch: str) -> list[Compilation]:
    """The kernels of the benchmarks, and of the small samples those with other access widths.

    The latter for sm_90a only, where emulation has lowered them anyway; for every architecture in
    the slow run.
    """
    found = compilations(calls(op, "benchmarks"), DESCRIBED[arch])
    seen = {kind_of(item) for item in found}
    small = calls(op, "small") if EVERY_ARCH or arch == "sm_90a" else []
    for item in compilations(small, DESCRIBED[arch]):
        if kind_of(item) not in seen:
            seen.add(kind_of(item))
            found.append(item)
    return list(dict.fromkeys(found))


def calls(op: Op, kind: str) -> list[Call]:
    return [(op.name, sample.build("meta")) for sample in getattr(op.cases, kind)]


def kind_of(item: Compilation) -> tuple[object, ...]:
    promised = item.kernel.definition.access_bits
    assert promised is not None, f"{item.kernel.name} promises no access width"
    return (item.kernel.name, *promised(*item.static))


@pytest.mark.parametrize("arch", DESCRIBED)
@each_op
def test_lowers(op: Op, arch: str) -> None:
    for item in kernels(op, arch) if EVERY_ARCH else one_of_each(op, arch):
        source = sources.cuda_source(item.kernel.definition, item.static, arch)
        assert "__global__" in source, item.label


def arches() -> list[str]:
    return list(DESCRIBED) if EVERY_ARCH else ["sm_90a"]


@needs_nvcc
@pytest.mark.parametrize("arch", arches())
@each_op
def test_compiles_well(op: Op, arch: str) -> None:
    for item in kernels(op, arch):
        definition = item.kernel.definition
        source = sources.cuda_source(definition, item.static, arch)
        functions = sources.compile_source(source, arch)
        for function in functions:
            assert function.spill_bytes == 0, item.label
            assert 0 < function.registers <= 255
        if arch in ("sm_80", "sm_89", "sm_90a"):  # the encodings that we can read
            check_accesses(item, sum((f.accesses for f in functions), Counter()))


def check_accesses(item: Compilation, found: Counter[str]) -> None:
    assert not [name for name in found if name.startswith(("LDL", "STL"))], item.label
    _, loads, stores = kind_of(item)
    for prefix, promised in (("LDG", loads), ("STG", stores)):
        bits = promised if isinstance(promised, tuple) else (promised,)
        widths = {name for name in found if name.startswith(prefix)}
        assert widths == {f"{prefix}.{width}" for width in bits}, f"{item.label}: {dict(found)}"
