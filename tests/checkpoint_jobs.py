"""Jobs of test_checkpoints.py: a training that is broken off in different ways."""

from __future__ import annotations

import os
import random
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from autoplan.runtime.checkpoint import storage
from autoplan.runtime.checkpoint.door import CheckpointError
from experiments.state.jobs import STEPS, go_on, scheduler_of
from experiments.state.plans import BATCH, Job, samples


@contextmanager
def files_up_to(num_bytes: int) -> Iterator[None]:
    """A disk that takes no more: every write beyond this size of a file fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def full_disk_of_one_rank(rank: int, world: int, job: Job, folder: str) -> tuple[str, list[float], list[str]]:
    """What all ranks say when rank 1 cannot write, the losses after it, and what is left in the folder."""
    pm = job.program()
    scheduler = scheduler_of(pm)
    go_on(pm, scheduler, 1)
    pm.save_checkpoint(folder)
    go_on(pm, scheduler, 1)
    said = ""
    try:
        with files_up_to(4096 if rank == 1 else 1 << 30):
            pm.save_checkpoint(folder)
    except CheckpointError as exc:
        said = str(exc)
    losses = go_on(pm, scheduler, 1)
    pm.save_checkpoint(folder)
    return said, losses, sorted(os.listdir(folder))


def killed_while_writing(rank: int, world: int, job: Job, folder: str, where: str) -> None:
    """Save, train on, and die with SIGKILL on rank 1 while the next checkpoint is written."""
    pm = job.program()
    scheduler = scheduler_of(pm)
    go_on(pm, scheduler, STEPS)
    pm.save_checkpoint(folder, states={"scheduler": scheduler})
    go_on(pm, scheduler, STEPS)
    if rank == 1:
        write = storage.write_tensors

        def die(*args: object, **kwargs: object) -> object:
            if where == "after its file":
                write(*args, **kwargs)  # type: ignore[arg-type]
            os.kill(os.getpid(), signal.SIGKILL)
            return None

        storage.write_tensors = die  # type: ignore[assignment]
    pm.save_checkpoint(folder, states={"scheduler": scheduler})


def beside(rank: int, world: int, job: Job, folder: str) -> list[str]:
    """Save twice at one step, once beside further steps: the names of the tensors that differ."""
    from pathlib import Path

    from experiments.state.jobs import differing

    pm = job.program()
    scheduler = scheduler_of(pm)
    go_on(pm, scheduler, STEPS)
    one = pm.save_checkpoint(f"{folder}/at_once", states={"scheduler": scheduler}).wait()
    saving = pm.save_checkpoint(f"{folder}/beside", states={"scheduler": scheduler}, wait=False)
    go_on(pm, scheduler, STEPS)
    other = saving.wait()
    assert saving.done() and other == saving.folder
    torch.distributed.barrier()
    return differing(Path(one), Path(other))


def ranks_that_differ(
    rank: int, world: int, job: Job, folder: str
) -> tuple[tuple[float, ...], tuple[float, ...], str, str]:
    """Ranks of one data rank whose generators differ: what each draws after it saved, and after it loaded.

    Then what the first step after a load says of another batch on rank 1, and what saving says of an optimizer whose
    parts are given as a state.
    """

    def drawn() -> tuple[float, ...]:
        return float(torch.rand(())), random.random(), np.random.rand(), np.random.standard_normal()

    pm = job.program()
    go_on(pm, scheduler_of(pm), STEPS)
    torch.manual_seed(rank)
    random.seed(rank)
    np.random.seed(rank)
    np.random.rand(5 + 3 * rank)
    pm.save_checkpoint(folder)
    before = drawn()
    pm.load_checkpoint(folder)
    after = drawn()
    batch = samples(0, BATCH)
    if rank == 1:
        batch = {name: x.roll(1, 0) for name, x in batch.items()}
    said = refused = ""
    try:
        pm.step(batch)
    except ValueError as exc:
        said = str(exc)
    assert pm.optimizer is not None
    try:
        pm.save_checkpoint(f"{folder}/parts", states={"other": pm.optimizer})
    except CheckpointError as exc:
        refused = str(exc)
    return before, after, said, refused
