"""Every kernel that the samples ask for: lowered for all architectures, compiled with nvcc.

No GPU is needed. The machine code is read back: no spills, no local memory, products of the tensor
cores that overlap (wgmma), and global accesses as wide as the plan promises.
"""

from __future__ import annotations

import functools
from collections import Counter

import pytest

from tests.requirements import needs_nvcc
from tests.selection import operators
from tile_kernels.runtime import sources
from tile_kernels.runtime.cases import moved
from tile_kernels.runtime.device import DESCRIBED
from tile_kernels.runtime.launch import recording
from tile_kernels.runtime.operator import Operator
from tile_kernels.runtime.warmup import Call, Compilation, compilations

OPS = operators()
# Without --full: lowered for an architecture with little shared memory and for one after Hopper;
# compiled for Hopper.
BY_DEFAULT = {"test_lowers": ["sm_89", "sm_100a"], "test_compiles_well": ["sm_90a"]}
each_op = pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "arch" in metafunc.fixturenames:
        full = metafunc.config.getoption("--full")
        metafunc.parametrize(
            "arch", list(DESCRIBED) if full else BY_DEFAULT[metafunc.function.__name__]
        )


@pytest.fixture
def full(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--full"))


def kernels(op: Operator, arch: str, full: bool) -> list[Compilation]:
    """The first use of each kernel in an operator's benchmarks; with `full` every use, and of the
    small samples those with other access widths. Nothing where an operator has no kernel."""
    if arch not in op.archs:
        return []
    found = compilations(calls(op, "benchmarks"), DESCRIBED[arch])
    assert found, f"{op.name} launches no kernel"
    if not full:
        return list({item.kernel.name: item for item in reversed(found)}.values())
    seen = {kind_of(item) for item in found}
    small = compilations(calls(op, "small"), DESCRIBED[arch])
    others = {kind_of(item): item for item in small if kind_of(item) not in seen}
    return list(dict.fromkeys([*found, *others.values()]))


def calls(op: Operator, kind: str) -> list[Call]:
    return [(op.name, sample.build("meta")) for sample in getattr(op.cases, kind)]


def kind_of(item: Compilation) -> tuple[object, ...]:
    promised = item.kernel.definition.access_bits
    assert promised is not None, f"{item.kernel.name} promises no access width"
    return (item.kernel.name, *promised(*item.static))


# Operators that share a kernel are tested one after the other.
@functools.cache
def source_of(item: Compilation) -> str:
    return sources.cuda_source(item.kernel.definition, item.static, item.arch)


@functools.cache
def functions_of(item: Compilation) -> list[sources.Compiled]:
    return sources.compile_source(source_of(item), item.arch)


@each_op
def test_plans(op: Operator) -> None:
    """Every sample has a plan on every architecture of the operator; others are refused."""
    with recording() as requests:
        for kind in ("benchmarks", "small", "large"):
            for _, arguments in calls(op, kind):
                op.function(**moved(arguments, "meta"))
    assert requests
    for arch, device in DESCRIBED.items():
        if arch in op.archs:
            for request in requests:
                request.kernel.static_arguments(request.problem, device)
        else:
            with pytest.raises(ValueError, match=rf"no kernel for .* \({arch}\)"):
                # The first requests may prepare arguments, which every GPU can.
                [r.kernel.static_arguments(r.problem, device) for r in requests]


@pytest.mark.compiled
@each_op
def test_lowers(op: Operator, arch: str, full: bool) -> None:
    for item in kernels(op, arch, full):
        assert "__global__" in source_of(item), item.label


@needs_nvcc
@pytest.mark.compiled
@each_op
def test_compiles_well(op: Operator, arch: str, full: bool) -> None:
    for item in kernels(op, arch, full):
        functions = functions_of(item)
        for function in functions:
            assert function.spill_bytes == 0, item.label
            assert 0 < function.registers <= 255
            assert not function.serialised, f"{item.label}: ptxas serialises its wgmma"
        if arch in ("sm_80", "sm_89", "sm_90a"):  # the encodings that we can read
            check_accesses(item, sum((f.accesses for f in functions), Counter()))


def check_accesses(item: Compilation, found: Counter[str]) -> None:
    assert not [name for name in found if name.startswith(("LDL", "STL"))], item.label
    _, loads, stores = kind_of(item)
    for prefix, promised in (("LDG", loads), ("STG", stores)):
        bits = promised if isinstance(promised, tuple) else (promised,)
        widths = {name for name in found if name.startswith(prefix)}
        assert widths == {f"{prefix}.{width}" for width in bits}, f"{item.label}: {dict(found)}"
