"""Save and load checkpoints: all ranks together, at once or beside the training."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from autoplan.files import fresh_folder, move_folder, remove_folder
from autoplan.runtime.agree import AgreedRuntimeError, agree, listed
from autoplan.runtime.checkpoint.contents import (
    Content,
    Return,
    StateFacts,
    Training,
    content_of,
    merged_facts,
    returned,
)
from autoplan.runtime.checkpoint.folders import (
    MARKER,
    Damaged,
    damage_of,
    folder_of,
    foreign_in,
    incomplete_in,
    misplaced,
    older_than,
    read_manifest,
    recover,
    remove_old,
    steps_in,
    write_manifest,
    writing_folder,
)
from autoplan.runtime.checkpoint.states import Given, differing_state
from autoplan.runtime.checkpoint.storage import FolderReader, FolderWriter
from autoplan.runtime.connections import noted
from autoplan.runtime.failure import guard
from autoplan.runtime.private import OWN

logger: logging.Logger = logging.getLogger(__name__)


class CheckpointError(AgreedRuntimeError):
    """A checkpoint that could not be written or used, on all ranks alike; the training can go on.

    Example:
        >>> import autoplan
        >>> def save(pm, folder):
        ...     try:
        ...         pm.save_checkpoint(folder)
        ...     except autoplan.CheckpointError as error:  # the disk is full, say: older checkpoints are kept
        ...         print(error)
    """


@dataclass(frozen=True)
class Resumed:
    """A checkpoint that was loaded.

    Attributes:
        step: the number of its step: the next is `step + 1`.
        num_samples: samples of the data that were seen, over all data-parallel ranks; the next sample has this index.
        folder: the folder of the checkpoint.
        same_data_ranks: False if the number of data-parallel ranks changed, so that their random generators begin new
            streams.
    """

    step: int
    num_samples: int
    folder: Path
    same_data_ranks: bool


class Saving:
    """A checkpoint that is being written, or was."""

    def __init__(self, step: int, folder: Path, future: Future[None]) -> None:
        self.step: int = step
        self.folder: Path = folder
        self._future = future
        self._told = False  # that it could not be written

    def done(self) -> bool:
        """Return True if it was written on this rank, or failed."""
        return self._future.done()

    def wait(self) -> Path:
        """Wait until it is complete; return its folder.

        Raises:
            CheckpointError: it could not be written; on all ranks alike.
        """
        with guard(call="save_checkpoint"):
            try:
                self._future.result()
            except CheckpointError:
                self._told = True
                raise
        return self.folder

    def untold(self) -> str | None:
        """Wait until it is complete; return why it could not be written if `wait` has not told this rank already."""
        told = self._told
        try:
            self.wait()
        except CheckpointError as error:
            return None if told else str(error)
        return None


class Checkpoints:
    """Saves and loads the checkpoints of one program; every call is made on all ranks."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._group: dist.ProcessGroup | None = None
        self._threads: ThreadPoolExecutor | None = None
        self._last: Saving | None = None

    def save(self, training: Training, root: Path, given: Given, keep: int | None, wait: bool) -> Saving:
        """Write the checkpoint of the present step, after the one before is complete."""
        last, self._last = self._last, None
        untold = None if last is None else last.untold()
        step = training.progress.num_steps
        final, temporary = folder_of(root, step), writing_folder(root, step)
        content = None
        problem = untold or _no_number(keep) or given.problem()
        if problem is None:
            try:
                content = content_of(training, given, _rank())
            except TypeError as exc:
                problem = str(exc)
        agree(problem, self._device, CheckpointError)
        assert content is not None
        ranks = training.data_rank, training.data_world
        if (differs := differing_state(content.alike, content.of_data_rank, *ranks, self._device)) is not None:
            raise CheckpointError(_failed(step, root, differs))
        if _rank() == 0:
            try:
                recover(root)
                fresh_folder(temporary)
            except OSError as exc:
                problem = _failed(step, root, f"{exc.filename}: {exc.strerror}")
        agree(problem, self._device, CheckpointError)
        group = self._own_group()
        if wait:
            done: Future[None] = Future()
            _write(content, group, step, root, keep)
            done.set_result(None)
            return Saving(step, final, done)
        self._threads = self._threads or ThreadPoolExecutor(1, "autoplan-checkpoint")
        written = self._threads.submit(_write, content.staged(), group, step, root, keep)
        written.add_done_callback(_log_failure)
        self._last = Saving(step, final, written)
        return self._last

    def load(
        self,
        training: Training,
        root: Path,
        given: Given,
        step: int | None,
        model_only: bool,
        older: bool,
    ) -> Resumed | None:
        """Load a checkpoint; None if there is none and no step was named."""
        if older and step is not None:
            raise CheckpointError(f"step={step} and older=True: the one names a checkpoint, the other takes the newest")
        last, self._last = self._last, None
        untold = None if last is None else last.untold()
        agree(untold or given.problem(), self._device, CheckpointError)
        group = self._own_group()
        there: list[Any] = [(_found(root), misplaced(root))] if _rank() == 0 else [None]
        if group is not None:
            dist.broadcast_object_list(there, 0, group=group)
        steps: list[int]
        steps, elsewhere = there[0]
        if not steps and elsewhere is not None:
            raise CheckpointError(elsewhere)
        if step is None and _rank() == 0:
            _warn_of_incomplete(root, steps)
        if step is None and not steps:
            return None
        if step is not None and step not in steps:
            have = f"it has the steps {', '.join(map(str, reversed(steps)))}" if steps else "it has none"
            if step in incomplete_in(root):
                have += f", and {folder_of(root, step).name} without its {MARKER}"
            raise CheckpointError(f"there is no complete checkpoint of step {step!r} in {root}; {have}")
        if older:
            step, manifest = self._newest(root, steps)
        else:
            step = steps[0] if step is None else step
            manifest = self._checked(root, folder_of(root, step), step)
        folder = folder_of(root, step)
        tensors, facts = manifest["tensors"], manifest["facts"]
        asked = returned(training, given, tensors, facts, model_only)
        misfit = f"the checkpoint {folder} does not fit: {'; '.join(asked.problems)}" if asked.problems else None
        agree(misfit, self._device, CheckpointError)
        self._read(asked, folder, tensors, step, root, group)
        self._put(asked, folder)
        same = facts["data_world"] == training.data_world
        return Resumed(step, int(facts["progress"]["num_samples"]), folder, same)

    def _newest(self, root: Path, steps: list[int]) -> tuple[int, dict[str, Any]]:
        """Return the newest checkpoint that is not damaged and its manifest; warn of those passed over."""
        for step in steps[:-1]:
            try:
                return step, self._checked(root, folder_of(root, step), step)
            except CheckpointError as exc:
                if _rank() == 0:
                    warnings.warn(f"{exc}; it is passed over (older=True)", RuntimeWarning, stacklevel=2)
        return steps[-1], self._checked(root, folder_of(root, steps[-1]), steps[-1])

    def _checked(self, root: Path, folder: Path, step: int) -> dict[str, Any]:
        """Return the manifest after every file was read once by one of the ranks; raise on all ranks for damage."""
        manifest: dict[str, Any] = {}
        problem = None
        try:
            manifest = read_manifest(folder)
            files = manifest["files"]
            problem = damage_of(folder, files, list(files)[_rank() :: _world()])
        except Damaged as exc:
            problem = str(exc)
        text = None if problem is None else f"{folder} is damaged: {problem}; {older_than(root, step)}"
        agree(text, self._device, CheckpointError)
        return manifest

    def _read(
        self,
        asked: Return,
        folder: Path,
        tensors: Mapping[str, Any],
        step: int,
        root: Path,
        group: dist.ProcessGroup | None,
    ) -> None:
        reader = FolderReader(folder, tensors, asked.copies)
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        try:
            with _quietly():
                load(
                    dict(asked.targets),
                    storage_reader=reader,
                    planner=planner,
                    process_group=group,
                    no_dist=group is None,
                )
        except CheckpointException as exc:
            raise CheckpointError(
                f"{folder} could not be read: {_reasons(exc)}; the parameters may be partly loaded; "
                f"{older_than(root, step)}"
            ) from None

    def _put(self, asked: Return, folder: Path) -> None:
        problem = None
        for action in asked.then:
            try:
                action()
            except Exception as exc:  # of load_state_dict of the caller's objects: raised on all ranks
                problem = f"{folder} was loaded, but a state was not taken: {type(exc).__name__}: {exc}"
        agree(problem, self._device, CheckpointError)

    def _own_group(self) -> dist.ProcessGroup | None:
        """Return a group of all ranks for checkpoints alone, over gloo, or None for one rank.

        A checkpoint that is written beside the training must not meet its collectives.
        """
        if _world() > 1 and self._group is None:
            with noted():
                self._group = dist.new_group(backend="gloo", group_desc=OWN + "checkpoint")
        return self._group


def _no_number(keep: Any) -> str | None:
    """Return why `keep` is no number of checkpoints; None if it is, or all are kept."""
    if keep is None or (isinstance(keep, int) and keep >= 1):
        return None
    return f"keep={keep!r}: at least one checkpoint is kept; give a number, or None for all"


def _found(root: Path) -> list[int]:
    """Return the steps of the complete checkpoints, the newest first, after an interrupted replacement is undone."""
    try:
        recover(root)
    except OSError as error:
        logger.warning("an interrupted replacement in %s could not be undone: %s", root, error)
    return steps_in(root)


def _warn_of_incomplete(root: Path, steps: list[int]) -> None:
    """Warn of folders of later steps than the newest complete checkpoint, which is taken in their place."""
    later = [step for step in incomplete_in(root) if not steps or step > steps[0]]
    if later:
        names = ", ".join(folder_of(root, step).name for step in later)
        taken = f"step {steps[0]} is the newest complete one" if steps else "there is no complete one"
        text = f"{names} in {root} without {MARKER}: copied in part, or changed; passed over, and {taken}"
        warnings.warn(text, RuntimeWarning, stacklevel=3)
    elif not steps and (others := foreign_in(root)):
        text = (
            f"{root} has no checkpoint of pm.save_checkpoint, but {', '.join(others[:3])}: nothing is loaded. Weights "
            "are read by pm.load_state_dict(state), or by weights= of autoplan.parallelize"
        )
        warnings.warn(text, RuntimeWarning, stacklevel=3)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _write(content: Content, group: dist.ProcessGroup | None, step: int, root: Path, keep: int | None) -> None:
    """Write a checkpoint on all ranks, in this thread."""
    everybody: list[StateFacts | None] | None = [content.facts]
    if group is not None:
        everybody = [None] * _world() if _rank() == 0 else None
        dist.gather_object(content.facts, everybody, 0, group=group)
    facts = [each for each in everybody or () if each is not None]
    final, temporary = folder_of(root, step), writing_folder(root, step)

    def finish(tensors: dict[str, Any], files: dict[str, Any]) -> None:
        about = {"torch": torch.__version__, "step": step, "world_size": _world()}
        write_manifest(temporary, {**about, "facts": merged_facts(facts), "files": files, "tensors": tensors})
        move_folder(temporary, final)

    writer = FolderWriter(temporary, _rank(), finish)
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        with _quietly():
            save(
                dict(content.tensors),
                storage_writer=writer,
                planner=planner,
                process_group=group,
                no_dist=group is None,
            )
    except CheckpointException as exc:
        if _rank() == 0:
            try:
                recover(root)
                remove_folder(temporary)
            except OSError as error:
                logger.warning("%s could not be removed: %s", temporary, error)
        raise CheckpointError(_failed(step, root, _reasons(exc))) from None
    if _rank() == 0:
        try:
            remove_old(root, keep)
        except OSError as error:
            logger.warning("an old checkpoint in %s could not be removed: %s", root, error)


def _log_failure(written: Future[None]) -> None:
    """Log why a checkpoint was not written: the script may end before anybody waits for it."""
    error = written.exception()
    if error is not None and (_rank() == 0 or not isinstance(error, CheckpointError)):
        logger.error("%s", error)


def _failed(step: int, root: Path, reason: str) -> str:
    return f"the checkpoint of step {step} in {root} was not written: {reason}; {older_than(root, step)}"


def _reasons(exc: CheckpointException) -> str:
    """Return the failures and their ranks, without tracebacks."""
    texts: list[str | None] = [None] * _world()
    for rank, (error, _) in exc.failures.items():
        reason = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.strerror else str(error)
        texts[rank] = reason if isinstance(error, OSError) else f"{type(error).__name__}: {reason}"
    return listed(texts)


@contextmanager
def _quietly() -> Iterator[None]:
    """Leave out torch's remark that one process saves alone."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


def root_of(folder: str | os.PathLike[str]) -> Path:
    """Return the folder of all checkpoints as a path that does not depend on the working folder."""
    return Path(folder).absolute()
