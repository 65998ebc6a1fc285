"""`autoplan.rehearse`: run chosen ranks of a plan or a program here, and compare them with the plan."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from autoplan.codegen.program import Layouts, compile_program
from autoplan.errors import PinError, RehearsalError
from autoplan.ir.graph import ModelGraph
from autoplan.planning import graph_of_plan, ready_plan
from autoplan.plans.folder import ProgramFolder, buffer_texts, read_program, write_program
from autoplan.plans.layouts import check_executed, layouts_of
from autoplan.plans.record import Plan
from autoplan.rehearsal.compare import RankReport, compared, raise_first
from autoplan.rehearsal.expected import Work, expected
from autoplan.schedules.graph import deadlock
from autoplan.schedules.schedule import actions

_SEED = 0  # of random ranks: the same in every rehearsal


@dataclass(frozen=True)
class Rehearsal:
    """The ranks that were rehearsed, and what holds for all of them.

    Attributes:
        model: name of the model.
        num_ranks: ranks of the whole program.
        actions: actions of all ranks of the pipeline in a whole step, of which every one ends.
        compares_flops: False if the graph of the model is not at hand.
    """

    model: str
    num_ranks: int
    actions: int
    compares_flops: bool
    ranks: tuple[RankReport, ...]

    @property
    def differences(self) -> tuple[str, ...]:
        """The differences from the plan, in words; empty if there are none."""
        return tuple(f"rank {r.rank}: {text}" for r in self.ranks for text in r.differences)


def rehearse(
    plan: Plan | Path | str,
    ranks: str = "0,last",
    *,
    check: bool = True,
    show: Callable[[RankReport], None] = lambda report: None,
    told: Callable[[int, int, str], None] = lambda done, num, what: None,
) -> Rehearsal:
    """Run the program of chosen ranks in this process, without weights or other ranks, and compare them with the plan.

    One step of forward and backward and an update by AdamW run by the runtime's own code on fake tensors, in a fake
    process group of the whole size (autoplan.rehearsal.rank). Compared are every collective with the ledger, what ZeRO
    moves, FLOPs with the price, and the peak of live bytes with the predicted memory (autoplan.rehearsal.compare). The
    action lists of all ranks of the pipeline are checked for deadlocks.

    Args:
        plan: a Plan, the file of one, or the folder of a program (`autoplan.compile`).
        ranks: `0,last,random:4`: numbers, the last one, and so many chosen at random (the same ones every time).
        check: raise at the first difference; False: only report it.
        show: called with every rank's report when it is there.
        told: called with the number of ranks that are done, of how many (0: not yet known), and what comes next.

    Raises:
        RehearsalError: a rank fails, or does something else than its plan says; names the first difference.
        AutoplanError: the plan or the program cannot be read or run.

    Example:
        >>> import autoplan
        >>> plan = autoplan.plan("gpt2", "2xh100", seq_len=512, global_batch_size=2, pins={"tp": 1, "pp": 1})
        >>> [report.rank for report in autoplan.rehearse(plan, "0").ranks]
        [0]
    """
    with tempfile.TemporaryDirectory(prefix="autoplan_rehearsal_") as temporary:
        told(0, 0, "making the program")
        written = None if isinstance(plan, Plan) or not Path(plan).is_dir() else read_program(Path(plan))
        given = written.plan if written is not None else plan if isinstance(plan, Plan) else Plan.read(plan)
        _check_compared(given)
        chosen = read_ranks(ranks, given.num_devices)
        folder, graph, layouts = _program(given, written, Path(temporary))
        return _rehearsed(folder, graph, layouts, chosen, check, show, told)


def _check_compared(plan: Plan) -> None:
    """Raise RehearsalError for a plan without what a rehearsal is compared with, or with parts that do not run."""
    if "seq_len" not in plan.document.get("request", {}):
        raise RehearsalError("the plan does not say its sequence length; plan with autoplan.plan or `autoplan plan`")
    if plan.estimate is None:
        raise RehearsalError("the plan has no price, so that there is nothing to compare its memory with; plan again")
    check_executed(plan)


def _program(
    given: Plan, written: ProgramFolder | None, temporary: Path
) -> tuple[ProgramFolder, ModelGraph | None, Layouts | None]:
    """Return the program of a plan, or the one that was written, with the graph and layouts that it was made from, if
    they are at hand."""
    graph = graph_of_plan(given)
    if written is not None:
        return written, graph, None if graph is None else layouts_of(given, graph)
    if graph is None:
        raise RehearsalError(
            f"the graph of {given.model} is not in the plan, and no model of its name is the same here; compile the "
            "plan where the model is, and rehearse the folder"
        )
    ready, layouts = ready_plan(given, graph)
    program = compile_program(graph, layouts)
    write_program(temporary, ready, program, buffer_texts(graph), {})
    return read_program(temporary), graph, layouts


def _rehearsed(
    folder: ProgramFolder,
    graph: ModelGraph | None,
    layouts: Layouts | None,
    chosen: list[int],
    check: bool,
    show: Callable[[RankReport], None],
    told: Callable[[int, int, str], None],
) -> Rehearsal:
    from autoplan.rehearsal.rank import run_rank

    plan, spec = folder.plan, folder.program.spec
    task, config = plan.document["request"], plan.config
    seq_len, target_len = int(task["seq_len"]), task.get("target_len")
    env = {"b": config.micro_batch_size, "s": seq_len, "t": target_len or seq_len}
    told(0, 0, "pricing the plan")
    work = None if graph is None or layouts is None else Work.of(plan, graph, layouts, env)
    table = actions(config.schedule, config.pp, config.num_micro_batches, config.virtual_stages)
    stuck = deadlock(table) if config.pp > 1 else ""
    if stuck:
        raise RehearsalError(f"the schedule never finishes: {stuck}")
    reports: list[RankReport] = []
    for rank in chosen:

        def now(what: str, rank: int = rank) -> None:
            told(len(reports), len(chosen), f"rank {rank}: {what}")

        observed = run_rank(folder, rank, seq_len, target_len, now)
        said = expected(plan, spec, observed.place, observed.num_micro_batches, env, work)
        mine = spec.stages_of(observed.place.coordinates["pp"])
        trained = all(p.trainable for stage in mine for p in stage.params)
        report = compared(observed, said, tuple(stage.index for stage in mine), trained)
        show(report)
        if check:
            raise_first(report)
        reports.append(report)
    return Rehearsal(plan.model, plan.num_devices, sum(map(len, table)), work is not None, tuple(reports))


def read_ranks(text: str, world: int) -> list[int]:
    """Read `0,last,random:4`. PinError for anything else, or for a rank that does not exist."""
    if not isinstance(text, str):
        raise PinError(f"ranks={text!r} must be a text, for example '0,last,random:4'")
    found: dict[int, None] = {}
    for word in (part.strip() for part in text.split(",")):
        found |= dict.fromkeys(_ranks_of(word, world))
    return list(found)


def _ranks_of(word: str, world: int) -> Iterator[int]:
    name, _, count = word.partition(":")
    if word == "last":
        yield world - 1
    elif name == "random" and count.isdecimal() and int(count) > 0:
        yield from sorted(random.Random(_SEED).sample(range(world), min(int(count), world)))
    elif word.isdecimal() and int(word) < world:
        yield int(word)
    else:
        raise PinError(
            f"ranks {word!r} cannot be read; use numbers from 0 to {world - 1}, last, or random:N, for example "
            "0,last,random:4"
        )
