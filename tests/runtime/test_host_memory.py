"""Memory that is free but not given back: what the C library keeps between the blocks that a start fills and shards."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from parity import Case, compiled, fake_group, full_tensors

from autoplan.runtime import host_memory, model
from autoplan.runtime.model import ParallelModel


def resident_bytes() -> int:
    return int(Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0]) * 1024


@pytest.mark.skipif(host_memory._trim() is None, reason="the C library has no malloc_trim")
def test_freed_memory_below_what_is_kept_is_given_back() -> None:
    """Many small tensors are freed under one that stays at the top of the heap."""
    tensors = [torch.ones(1 << 14) for _ in range(1600)]  # 64 KiB each
    kept = tensors[::100]
    del tensors
    before = resident_bytes()
    host_memory.give_back_freed_memory()
    assert before - resident_bytes() > 50 << 20
    assert all(bool((x == 1).all()) for x in kept)


def test_systems_without_it_do_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    host_memory._trim.cache_clear()
    monkeypatch.setattr(sys, "platform", "darwin")
    try:
        assert host_memory._trim() is None
        host_memory.give_back_freed_memory()
    finally:
        host_memory._trim.cache_clear()


def test_the_peak_of_resident_memory_is_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux counts KiB, macOS bytes (getrusage(2))."""
    counted = SimpleNamespace(ru_maxrss=7)
    monkeypatch.setattr(host_memory.resource, "getrusage", lambda who: counted)  # type: ignore[attr-defined]
    for platform, expected in (("linux", 7 * 1024), ("darwin", 7)):
        monkeypatch.setattr(sys, "platform", platform)
        assert host_memory.peak_resident_bytes() == expected


def test_a_start_gives_back_every_block_before_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    given_back: list[int] = []
    monkeypatch.setattr(model, "give_back_freed_memory", lambda: given_back.append(1))
    case = Case("llama", dp=2, zero=3)
    program = compiled(case)
    with fake_group(2):
        pm = ParallelModel(program.spec, program.sources, *full_tensors(case, torch.float32))
        assert len(given_back) >= len(pm.stage.blocks) > 2
