"""Counting and forbidding compilations, without a compiler: kernels are stubs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import tile_kernels
from tile_kernels import config
from tile_kernels.runtime import bundles, compilation, logs, warmup
from tile_kernels.runtime.launch import Kernel, KernelDefinition, recording

SCORES = "float32[5,40]"
CALL = ("moe.topk_gate", {"scores": SCORES, "num_topk": 3})


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The static arguments of kernels in the order in which they are compiled; none is."""
    found: list[tuple[Any, ...]] = []

    def compile_nothing(_: Any, static: tuple[Any, ...], arch: str) -> Any:
        found.append((*static, arch))
        return lambda *_: None

    monkeypatch.setattr(KernelDefinition, "compile", compile_nothing)
    monkeypatch.setattr(bundles, "find_cached", lambda _: None)
    monkeypatch.setattr(bundles, "need_compiler", lambda _: None)
    return found


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    with recording() as requests:
        tile_kernels.moe.topk_gate(warmup.tensor_of(SCORES), 3)
    known = requests[0].kernel
    monkeypatch.setattr(known, "_handles", {})
    monkeypatch.setattr(known, "_planned", {})
    return known


@pytest.fixture(autouse=True)
def allowed() -> Iterator[None]:
    yield
    assert not compilation._state.forbidden


def bind(known: Kernel) -> Any:
    """What a call on a GPU does for its launch."""
    device = warmup.planned_device()
    return known.handle(known.static_arguments((40, 3, 16), device), device.arch)


def test_compilations_are_counted(fresh: Kernel, compiled: list[Any]) -> None:
    before, since = config.compilation_count(), config.compilation_count(since_warmup=True)
    bind(fresh)
    bind(fresh)
    assert len(compiled) == 1
    assert config.compilation_count() == before + 1
    assert config.compilation_count(since_warmup=True) == since + 1


def test_a_warm_up_leaves_kernels_in_the_process(fresh: Kernel, compiled: list[Any]) -> None:
    before = config.compilation_count()
    report = tile_kernels.warmup([CALL], progress=False)
    assert list(report.kernels) == ["topk_gate_warp(40, 3, 4, 4)"]
    assert config.compilation_count() == before + 1
    assert config.compilation_count(since_warmup=True) == 0
    with config.forbid_compilation():
        bind(fresh)
    assert len(compiled) == 1


def test_a_forbidden_compilation_names_everything(fresh: Kernel, compiled: list[Any]) -> None:
    prohibition = config.forbid_compilation()
    expected = (
        r"the kernel topk_gate_warp\(num_experts=40, num_topk=3, vector=4, warps=4\) for sm_\w+, "
        r"which this process has not loaded.*warmup\(model=\.\.\.\)"
    )
    with pytest.raises(config.CompilationForbiddenError, match=expected):
        bind(fresh)
    assert not compiled
    prohibition.allow()
    prohibition.allow()  # has no further effect
    bind(fresh)  # the error is not remembered
    assert len(compiled) == 1


def test_the_operator_and_its_arguments_are_named(
    fresh: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call whose backend asks for a handle, as one on a GPU does."""
    monkeypatch.setattr(
        "tile_kernels.runtime.operator._handle", lambda *_: bind(fresh), raising=True
    )
    expected = (
        r"^moe\.topk_gate\(scores=float32\[5,40\] cpu, num_topk=3\) needs the kernel topk_gate_warp"
        r'.*tile_kernels\.warmup\(\[\("moe\.topk_gate", \{\.\.\.\}\)\]\)'
    )
    with (
        tile_kernels.backend("emulate"),
        config.forbid_compilation(),
        pytest.raises(config.CompilationForbiddenError, match=expected),
    ):
        tile_kernels.moe.topk_gate(torch.zeros(5, 40), 3)


def test_prohibitions_nest_and_hold_in_all_threads(fresh: Kernel, compiled: list[Any]) -> None:
    errors: list[BaseException] = []

    def attempt() -> None:
        try:
            bind(fresh)
        except config.CompilationForbiddenError as error:
            errors.append(error)

    with config.forbid_compilation():
        with config.forbid_compilation():
            pass
        threads = [threading.Thread(target=attempt) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(errors) == 4
    assert not compiled


def test_a_warm_up_is_allowed(fresh: Kernel, compiled: list[Any]) -> None:
    with config.forbid_compilation():
        tile_kernels.warmup([CALL], progress=False, jobs=2)
        bind(fresh)
    assert len(compiled) == 1


@pytest.mark.emulated
def test_emulation_is_not_affected() -> None:
    before = config.compilation_count()
    with tile_kernels.backend("emulate"), config.forbid_compilation():
        chosen = tile_kernels.moe.topk_gate(torch.arange(40.0)[None], 3)
    assert chosen.tolist() == [[39, 38, 37]]
    assert config.compilation_count() == before


def test_the_log_counts(
    fresh: Kernel, compiled: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    level = logs.settings.level
    tile_kernels.set_log_level(1)
    logs.logger.addHandler(caplog.handler)
    try:
        with caplog.at_level(logging.INFO, logger="tile_kernels"):
            bind(fresh)
    finally:
        logs.logger.removeHandler(caplog.handler)
        tile_kernels.set_log_level(level)
    since = config.compilation_count(since_warmup=True)
    assert compiled
    assert f"compilation {config.compilation_count()} of this process, {since} since warm-up" in (
        caplog.text
    )
