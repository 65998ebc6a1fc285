"""States of objects that differ by data-parallel rank, as those of data loaders do: each comes back where it was."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import pool
from parity import fake_group

from autoplan.runtime.checkpoint.door import CheckpointError
from autoplan.runtime.model import ParallelModel
from experiments.state.jobs import go_on, scheduler_of
from experiments.state.plans import Job, Training, job_of

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.distributed._functional_collectives.*:FutureWarning")

DROPOUT = Training("dropout")
ALL = 1000  # samples


class Loader:
    """A loader of one data-parallel rank's samples in random order, with a position and a generator of its own."""

    def __init__(self, data_rank: int, data_world: int) -> None:
        self.mine = range(data_rank, ALL, data_world)
        self.generator = torch.Generator().manual_seed(data_rank)
        self.given: list[int] = []
        self.begin = 0

    def __iter__(self) -> Iterator[int]:
        while True:
            self.given.append(self.mine[int(torch.randint(len(self.mine), (), generator=self.generator))])
            yield self.given[-1]

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given, "workers": {0: (len(self.given), None)}, "rng": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["workers"] == {0: (len(state["given"]), None)}
        self.given = list(state["given"])
        self.generator.set_state(state["rng"])

    def start_at(self, sample: int) -> None:
        self.begin = sample


def taken(loader: Loader, num: int) -> list[int]:
    return [sample for sample, _ in zip(iter(loader), range(num), strict=False)][:num]


def save_job(rank: int, world: int, job: Job, folder: str) -> tuple[int, list[int]]:
    """Save after some samples, those of another number on every data-parallel rank; return what comes then."""
    pm = job.program()
    scheduler, loader = scheduler_of(pm), Loader(pm.data_rank, pm.data_world)
    go_on(pm, scheduler, 1)
    taken(loader, 3 + 2 * pm.data_rank)
    states = {"scheduler": scheduler}
    pm.save_checkpoint(folder, states=states, data_states={"loader": loader}, wait=False).wait()
    return pm.data_rank, taken(loader, 5)


def load_job(rank: int, world: int, job: Job, folder: str) -> tuple[int, list[int], list[str], int, int]:
    """Load into a fresh loader, without and with what to do for another number of data-parallel ranks."""
    pm = job.program()
    loader, said = Loader(pm.data_rank, pm.data_world), []
    states = {"scheduler": scheduler_of(pm)}
    for given in ({}, {"data_states": {"loader": loader}}):
        try:
            pm.load_checkpoint(folder, states=states, **given)
        except CheckpointError as exc:
            said.append(str(exc))
    if len(said) == 2:
        more = {"data_states": {"loader": loader}, "on_other_data_ranks": loader.start_at}
        assert pm.load_checkpoint(folder, states=states, **more) is not None
    go_on(pm, states["scheduler"], 1)
    return pm.data_rank, taken(loader, 5), said, loader.begin, pm.progress.num_samples


@pytest.mark.processes
@pytest.mark.parametrize("plan", ["dp2", pytest.param("tp2, ZeRO 3, dp2", marks=pytest.mark.slow)])
def test_each_data_rank_goes_on_with_its_own(plan: str, tmp_path: Path) -> None:
    training = DROPOUT if plan == "dp2" else Training("llama")
    world = 2 if plan == "dp2" else 4
    truth = pool(world).run(save_job, job_of(training, plan), str(tmp_path), timeout_s=120)
    assert dict(truth)[0] != dict(truth)[1]
    for rank, samples, said, begin, _ in pool(world).run(
        load_job, job_of(training, plan), str(tmp_path), timeout_s=120
    ):
        assert samples == dict(truth)[rank] and begin == 0
        assert len(said) == 1 and "it has data_states['loader'], which was not given" in said[0]


@pytest.mark.processes
@pytest.mark.parametrize("plan", ["one rank", "pp2"])
def test_another_number_of_data_ranks_never_gets_one_of_them(plan: str, tmp_path: Path) -> None:
    pool(2).run(save_job, job_of(DROPOUT, "dp2"), str(tmp_path), timeout_s=120)
    for _, samples, said, begin, num_samples in pool(2 if plan == "pp2" else 1).run(
        load_job, job_of(DROPOUT, plan), str(tmp_path), timeout_s=120
    ):
        text = r"\['loader'\] is of 2 data-parallel ranks, and there are 1 here: give on_other_data_ranks="
        assert len(said) == 2 and re.search(text, said[1]), said
        assert samples == taken(Loader(0, 1), 5)  # a fresh loader's
        assert begin > 0 and num_samples == 2 * begin


def differ_job(rank: int, world: int, job: Job, folder: str) -> list[str]:
    """What is said of states that differ between ranks which must have one; the training goes on."""
    pm, said = job.program(), []
    loader = Loader(rank, world)
    nothing: dict[str, Any] = {}
    for given in (
        {"states": {"loader": loader}},
        {"data_states": {"loader": loader}},
        {"data_states": {"loader": loader} if rank else nothing},
        {"states": {"x": loader}, "data_states": {"x": loader}},
    ):
        try:
            pm.save_checkpoint(folder, **given)
        except CheckpointError as exc:
            said.append(str(exc))
    go_on(pm, scheduler_of(pm), 1)
    pm.save_checkpoint(folder, states={"scheduler": scheduler_of(pm)})
    return said


@pytest.mark.processes
def test_states_that_must_be_one_and_differ_are_refused(tmp_path: Path) -> None:
    """Rank 0's was stored, and every rank got it."""
    first, *others = pool(2).run(differ_job, job_of(DROPOUT, "pp2"), str(tmp_path), timeout_s=120)
    assert all(said == first for said in others)
    alike, of_one_rank, names, twice = first
    assert "state of states['loader'] on rank 1 is not that on rank 0" in alike and "data_states=" in alike
    assert "data_states['loader'] differ between ranks with pm.data_rank 0" in of_one_rank
    assert "data_states['loader'] is given on rank 1 and not on rank 0" in names
    assert "'x' is in states and in data_states" in twice


def test_a_checkpoint_without_them_and_what_is_no_function(tmp_path: Path) -> None:
    with fake_group(1):
        pm: ParallelModel = job_of(DROPOUT, "one rank").program()
        pm.save_checkpoint(tmp_path)
        loader = Loader(0, 1)
        with pytest.raises(CheckpointError, match=r"it has no data_states\['loader'\]"):
            pm.load_checkpoint(tmp_path, data_states={"loader": loader})
        with pytest.raises(CheckpointError, match=r"on_other_data_ranks is a int; give a function"):
            pm.load_checkpoint(tmp_path, on_other_data_ranks=3)  # type: ignore[arg-type]
        with pytest.raises(CheckpointError, match=r"data_states is a Loader; give objects by name: data_states=\{'loa"):
            pm.save_checkpoint(tmp_path, data_states=loader)  # type: ignore[arg-type]
        assert pm.load_checkpoint(tmp_path, on_other_data_ranks=loader.start_at) is not None and loader.begin == 0
        pm.save_checkpoint(tmp_path, data_states={"loader": loader})
        with pytest.raises(CheckpointError, match=r"it has data_states\['loader'\], which was not given"):
            pm.load_checkpoint(tmp_path)
        assert pm.load_checkpoint(tmp_path, model_only=True) is not None
