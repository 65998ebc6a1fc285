"""What each rank does: train and save, or load and go on."""

from __future__ import annotations

import math
import random
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autoplan.runtime.checkpoint.folders import read_manifest
from autoplan.runtime.model import ParallelModel
from autoplan.runtime.params import local_of
from autoplan.runtime.tensor_files import DTYPES, TensorFile
from experiments.state.plans import BATCH, Job, samples

STEPS = 2  # before a checkpoint, and after it
SCALER = "the loss scaler begins anew"  # a control for fp16 alone


@dataclass(frozen=True)
class After:
    """What the steps after a checkpoint gave: losses, a draw of this rank's generators, and where the data ended.

    scaler: of fp16, the scale of the loss, the steps since it changed, and the number of skipped steps.
    """

    data_rank: int
    losses: tuple[float, ...]
    draw: tuple[float, float]
    num_samples: int
    learning_rates: tuple[float, ...]
    scaler: tuple[float, ...] = ()


@dataclass(frozen=True)
class Loaded:
    """What a rank reports of one cell. `changed`: tensors that are not bit-equal when they are saved again at once."""

    after: After
    changed: tuple[str, ...]


def scheduler_of(pm: ParallelModel) -> Any:
    """Return a scheduler whose rate changes with every step."""
    assert pm.optimizer is not None
    return torch.optim.lr_scheduler.ExponentialLR(pm.optimizer, 0.9)


def go_on(pm: ParallelModel, scheduler: Any, num_steps: int) -> list[float]:
    """Train on the samples that come next."""
    assert pm.optimizer is not None
    losses = []
    for _ in range(num_steps):
        part = BATCH // pm.data_world
        batch = samples(pm.progress.num_samples + pm.data_rank * part, part)
        losses.append(pm.step(batch).item())
        pm.clip_grad_norm_(0.5)
        pm.optimizer.step()
        scheduler.step()
    return losses


def _after(pm: ParallelModel, scheduler: Any) -> After:
    losses = go_on(pm, scheduler, STEPS)
    draw = float(torch.rand(())), random.random()
    rates, scaler = tuple(map(float, scheduler.get_last_lr())), pm.loss_scaler
    scaled = () if scaler is None else (scaler.scale, scaler.growth_tracker, scaler.num_skipped)
    return After(pm.data_rank, tuple(losses), draw, pm.progress.num_samples, rates, scaled)


def save_and_go_on(rank: int, world: int, job: Job, folder: str) -> After:
    """Train, save, and train on: what an uninterrupted training does."""
    pm = job.program()
    scheduler = scheduler_of(pm)
    torch.manual_seed(100 + pm.data_rank)
    random.seed(200 + pm.data_rank)
    go_on(pm, scheduler, STEPS)
    torch.rand(3)
    saving = pm.save_checkpoint(folder, states={"scheduler": scheduler}, wait=not job.training.beside)
    out = _after(pm, scheduler)
    saving.wait()
    return out


def load_and_go_on(rank: int, world: int, job: Job, folders: Iterable[str], spoiled: str = "") -> list[Loaded]:
    """Of each of these checkpoints: load it into one program, save it again, and train on.

    `spoiled`: what is broken after loading (CONTROLS).
    """
    out = []
    pm = job.program()
    scheduler = scheduler_of(pm)
    for folder in folders:
        with torch.no_grad():
            for p in pm.parameters():
                p.add_(1.0)
        resumed = pm.load_checkpoint(folder, states={"scheduler": scheduler})
        assert resumed is not None and resumed.step == STEPS
        changed: tuple[str, ...] = ()
        if spoiled:
            CONTROLS[spoiled](pm)
        with _shared_folder() as again:
            saved = pm.save_checkpoint(again, states={"scheduler": scheduler})
            if rank == 0:
                changed = tuple(differing(resumed.folder, saved.folder))
        out.append(Loaded(_after(pm, scheduler), changed))
    return out


def save_all(rank: int, world: int, jobs: list[Job], folders: list[str]) -> list[After]:
    """`save_and_go_on` for several plans, one after the other."""
    return [save_and_go_on(rank, world, job, folder) for job, folder in zip(jobs, folders, strict=True)]


def load_all(rank: int, world: int, jobs: list[Job], folders: list[list[str]]) -> list[list[Loaded]]:
    """`load_and_go_on` for several plans, one after the other."""
    return [load_and_go_on(rank, world, job, some) for job, some in zip(jobs, folders, strict=True)]


def _drop_moment(pm: ParallelModel) -> None:
    assert pm.optimizer is not None
    entries = [kept for kept in pm.optimizer.state.values() if "exp_avg" in kept and kept["exp_avg"].numel()]
    entries[0]["exp_avg"].zero_()


def _forget_steps(pm: ParallelModel) -> None:
    pm.progress.num_steps -= 1


def _other_seed(pm: ParallelModel) -> None:
    pm.progress.seed += 1


def _forget_data(pm: ParallelModel) -> None:
    pm.progress.num_samples = 0


def _other_rate(pm: ParallelModel) -> None:
    assert pm.optimizer is not None
    pm.optimizer.param_groups[0]["lr"] *= 1.0 + 1e-6


def _older_optimizer(pm: ParallelModel) -> None:
    assert pm.optimizer is not None
    for kept in pm.optimizer.state.values():
        kept["step"].sub_(1)


def _other_generator(pm: ParallelModel) -> None:
    torch.manual_seed(0)


def _other_element(pm: ParallelModel) -> None:
    """Change the lowest bits of one element of one parameter on one rank."""
    with torch.no_grad():
        for p in pm.parameters():
            local = local_of(p)
            if dist.get_rank() == 0 and local.numel():
                local.view(-1)[0] *= 1.0 + 1e-15
                return


def _new_scaler(pm: ParallelModel) -> None:
    assert pm.loss_scaler is not None
    pm.loss_scaler.growth_tracker = 0


# What is broken after loading, to show that the comparison sees it.
CONTROLS: Mapping[str, Callable[[ParallelModel], None]] = {
    "one moment of the optimizer is zero": _drop_moment,
    "the optimizer's steps are one too few": _older_optimizer,
    "a learning rate is off by 1e-6": _other_rate,
    "one element of one parameter is off by an ulp": _other_element,
    "dropout's counter is one too low": _forget_steps,
    "dropout's seed is another": _other_seed,
    "the data begin anew": _forget_data,
    "the generator is another": _other_generator,
    SCALER: _new_scaler,
}


class _shared_folder:
    """A temporary folder that all ranks see."""

    def __enter__(self) -> str:
        self._mine = tempfile.TemporaryDirectory() if dist.get_rank() == 0 else None
        box = [self._mine.name if self._mine is not None else ""]
        dist.broadcast_object_list(box, 0)
        return box[0]

    def __exit__(self, *_: object) -> None:
        dist.barrier()
        if self._mine is not None:
            self._mine.cleanup()


def whole_tensors(folder: Path, tensors: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return whole tensors of a checkpoint, in this process alone.

    Args:
        tensors: of the index, those that are wanted.

    Raises:
        OSError, TensorFileError: a file cannot be read.
    """
    files: dict[str, TensorFile] = {}
    out = {}
    for name, about in tensors.items():
        whole = out[name] = torch.empty(tuple(about["shape"]), dtype=DTYPES[about["dtype"]])
        for chunk in about["chunks"]:
            if chunk["file"] not in files:
                files[chunk["file"]] = TensorFile(folder / chunk["file"])
            at = tuple(slice(a, a + n) for a, n in zip(chunk["offsets"], chunk["sizes"], strict=True))
            files[chunk["file"]].read_into(chunk["entry"], whole[at])
    return out


def differing(one: Path, other: Path) -> list[str]:
    """Names of tensors of two checkpoints that are not bit-equal, apart from the states of generators."""
    a, b = (whole_tensors(path, read_manifest(path)["tensors"]) for path in (one, other))
    keys = sorted({*a, *b})
    return [
        k
        for k in keys
        if not k.startswith("random/") and not (k in a and k in b and a[k].dtype == b[k].dtype and _equal(a[k], b[k]))
    ]


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and bool(torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)))


def error_of(found: After, truth: After) -> float:
    """Return the largest relative difference of a loss."""
    return max(
        abs(a - b) / abs(b) if math.isfinite(a) else math.inf for a, b in zip(found.losses, truth.losses, strict=True)
    )
