"""The lives of a job under torchrun: each has its own part of the agents' store, and goes on from its checkpoint."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from autoplan.runtime.lives import of_this_life
from experiments.state.restarts import LOST, Cell, Outcome, check, run_job, truth_of, verdict

SHORT = timedelta(seconds=20)


def live(store: dist.TCPStore, ranks: list[int], world: int = 3, timeout: timedelta = SHORT) -> list[dist.Store]:
    """The stores of these ranks of one life."""

    def of(rank: int) -> dist.Store:
        client = dist.TCPStore("127.0.0.1", store.port, is_master=False, timeout=timeout)
        return of_this_life(client, rank, world, timeout)

    with ThreadPoolExecutor(world) as threads:
        return list(threads.map(of, ranks))


@pytest.fixture
def agents(monkeypatch: pytest.MonkeyPatch) -> dist.TCPStore:
    """The store that torchrun's agents keep for all lives."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def test_every_life_has_its_own_part_of_the_store(agents: dist.TCPStore) -> None:
    """Also after a life in which ranks died half way, and with fewer ranks."""
    first = live(agents, [0, 1, 2])
    first[1].set("address", "first")
    assert [s.get("address") for s in first] == [b"first"] * 3
    live(agents, [0, 2], timeout=timedelta(seconds=0.5))  # rank 1 never came
    live(agents, [1], timeout=timedelta(seconds=0.5))
    second = live(agents, [2, 1, 0])
    assert not any(s.check(["address"]) for s in second)
    second[0].set("address", "second")
    assert second[2].get("address") == b"second" and first[0].get("address") == b"first"
    assert not live(agents, [0, 1], world=2)[1].check(["address"])


def test_without_torchrun_the_store_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    store = dist.HashStore()  # type: ignore[attr-defined]  # torch's stubs lack it
    assert of_this_life(store, 1, 2, SHORT) is store


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(400)
def test_a_job_goes_on_under_torchrun(tmp_path: Path) -> None:
    """Samples of docs/restarts.md: a rank is killed while it writes a checkpoint; an agent is lost."""
    truth = truth_of("ZeRO 3, dp 2")
    assert check(Cell("ZeRO 3, dp 2", "checkpoint: after its file", 1), truth) == []
    lost = Cell("ZeRO 3, dp 2", LOST, 1)
    found = run_job(lost, tmp_path)
    assert verdict(lost, truth, found) == [], found.text[-4000:]
    assert "1 data-parallel ranks go on after step 4" in found.text


def test_a_job_that_went_wrong_is_seen() -> None:
    """Negative: another loss in one step, a step that is missing, no kill, a failed job."""
    good = tuple((step, 1.0 / step) for step in range(1, 13))
    truth, cell = Outcome(0, good, 0, ""), Cell("pp 2", "forward", 0)
    assert verdict(cell, truth, Outcome(0, (*good[:5], *good[3:]), 1, "")) == []
    assert verdict(cell, truth, Outcome(0, (*good, (3, 0.1)), 1, "")) == ["other losses in steps [3]"]
    assert verdict(cell, truth, Outcome(0, good[:-1], 1, ""))[0].startswith("steps [1, 2")
    assert verdict(cell, truth, Outcome(0, good, 0, "")) == ["0 kills instead of 1"]
    assert verdict(cell, truth, Outcome(1, good, 1, "")) == ["exit code 1"]
