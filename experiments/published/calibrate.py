"""The cost model's global constants, fitted to published training steps.

    python -m experiments.published.calibrate --data FILE.csv [--trust A] [--write FILE] [--json FILE]

Rows are read as in validate.py; layouts are found once, at the constants as shipped, and every further price
keeps them. A campaign counts once, a constant is fitted only if rows of three campaigns depend on it, and every
campaign is predicted by constants fitted without it (autoplan/calibration/fit.py). `--write profiles/constants.json`
makes them those of this version.
"""

from __future__ import annotations

import datetime
import json
import math
import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console

from autoplan.calibration.fit import (
    LEAST_GROUPS,
    HeldOut,
    MeasuredStep,
    Question,
    StepPrice,
    fit_constants,
    held_out_errors,
)
from autoplan.calibration.steps import PlannedStep
from autoplan.calibration.tables import constants_table, stored
from autoplan.cost_models.arrays import Array
from autoplan.cost_models.constants import OF_FAMILY, Constants
from autoplan.cost_models.kernels.gpu import family_of
from autoplan.errors import AutoplanError
from autoplan.report.files import write_text
from experiments.published.intervals import Interval, groups_table, interval, interval_text, stored_intervals
from experiments.published.rows import Case, Row, Shapes, Task, interpret, read_rows
from experiments.published.validate import chosen, request_of

AIMED = (0.5, 0.8, 0.9)  # shares of steps that intervals are made for
STATED = 0.9  # of those that the planner states
# A step that is this many times off says that something is missing, not how large a constant is: it has no part in the
# fit and the intervals, and counts fully in `unseen` and in validate.py.
BEYOND = 2.0


@lru_cache(maxsize=4096)
def planned(task: Task) -> PlannedStep | None:
    """With its layout, found once; None where the planner refuses it."""
    setting = task.settings[0]
    try:
        return PlannedStep.of(request_of(task, setting), setting.config)
    except AutoplanError:
        return None  # validate.py says why


def priceable(tasks: Sequence[Task]) -> list[bool]:
    """Which of them have a price. What finds the layouts."""
    return [planned(task) is not None for task in tasks]


def seconds(questions: Sequence[tuple[Constants, Sequence[Task]]]) -> list[list[float]]:
    """Of tasks at constants."""
    return [
        [p.step_s(constants) for task in tasks if (p := planned(task)) is not None] for constants, tasks in questions
    ]


def classes(constants: Constants, tasks: Sequence[Task]) -> list[str]:
    """Of tasks at constants, with their families of devices."""
    return [p.step_class(constants) for task in tasks if (p := planned(task)) is not None]


class Workers:
    """Processes with tasks of their own, so that each keeps its layouts. `tasks`: those with a price."""

    def __init__(self, tasks: Sequence[Task], pools: Sequence[Executor]) -> None:
        self.pools = pools
        # tasks of one model stay together, for what its graph keeps; the process with the fewest takes the next
        models: dict[object, list[int]] = defaultdict(list)
        for i, task in enumerate(tasks):
            models[task.shape].append(i)
        shares: list[list[int]] = [[] for _ in pools]
        for group in sorted(models.values(), key=len, reverse=True):
            min(shares, key=len).extend(group)
        asked = [pool.submit(priceable, [tasks[i] for i in share]) for pool, share in zip(pools, shares, strict=True)]
        self.home: dict[int, int] = {}
        for k, (share, future) in enumerate(zip(shares, asked, strict=True)):
            self.home |= {i: k for i, found in zip(share, future.result(), strict=True) if found}
        self.tasks = tasks

    def price(self, indices: Sequence[int], questions: Sequence[Question]) -> list[list[float]]:
        """Answers in order. `indices`: the tasks of the steps that questions name."""
        out = [[0.0] * len(steps) for _, steps in questions]
        places: list[list[list[int]]] = [[[] for _ in questions] for _ in self.pools]
        for q, (_, steps) in enumerate(questions):
            for place, step in enumerate(steps):
                places[self.home[indices[step]]][q].append(place)
        asked = []
        for pool, mine in zip(self.pools, places, strict=True):
            named = [
                (constants, [self.tasks[indices[steps[place]]] for place in found])
                for (constants, steps), found in zip(questions, mine, strict=True)
            ]
            asked.append(pool.submit(seconds, named))
        for mine, future in zip(places, asked, strict=True):
            for q, (found, answers) in enumerate(zip(mine, future.result(), strict=True)):
                for place, value in zip(found, answers, strict=True):
                    out[q][place] = value
        return out

    def classes(self, indices: Sequence[int], constants: Constants) -> list[str]:
        """Of steps of these tasks, in order."""
        found: dict[int, str] = {}
        asked = []
        for k, pool in enumerate(self.pools):
            mine = sorted({i for i in indices if self.home[i] == k})
            asked.append((mine, pool.submit(classes, constants, [self.tasks[i] for i in mine])))
        for mine, future in asked:
            found |= dict(zip(mine, future.result(), strict=True))
        return [found[i] for i in indices]


def cases_of(rows: Sequence[Row], everything: Sequence[Row]) -> list[Case]:
    """Those that can be read."""
    shapes, out = Shapes(everything), []
    for row in rows:
        try:
            out.append(interpret(row, shapes))
        except AutoplanError:
            continue  # validate.py says why
    return out


def unseen_errors(steps: Sequence[MeasuredStep], held: HeldOut, constants: Constants, price: StepPrice) -> Array:
    """log(predicted / measured) of every step by constants fitted without its campaign.

    A campaign of which no step had a part in the fit is priced with `constants`, those of all.
    """
    groups = sorted({s.group for s in steps})
    of_group = [[i for i, s in enumerate(steps) if s.group == g] for g in groups]
    answers = price([(held.constants.get(g, constants), mine) for g, mine in zip(groups, of_group, strict=True)])
    out = np.zeros(len(steps))
    for mine, seconds in zip(of_group, answers, strict=True):
        for i, value in zip(mine, seconds, strict=True):
            out[i] = math.log(value / steps[i].measured_s)
    return out


def mean_errors(groups: Sequence[str], logs: Array) -> dict[str, float]:
    """Mean |predicted / measured - 1| by group of every step."""
    found: dict[str, list[float]] = defaultdict(list)
    for group, value in zip(groups, logs, strict=True):
        found[group].append(abs(math.exp(value) - 1))
    return {name: float(np.mean(found[name])) for name in sorted(found)}


def stated_interval(of_step: Sequence[str], steps: Sequence[MeasuredStep], errors: Array, name: str) -> Interval | None:
    """Of steps of a class, over all families where it names none; None for too few campaigns of them: two, of a family
    as many as a constant needs."""
    mine = [i for i, found in enumerate(of_step) if name in (found, found.partition(OF_FAMILY)[0])]
    if len({steps[i].group for i in mine}) < (LEAST_GROUPS if OF_FAMILY in name else 2):
        return None
    return interval([steps[i] for i in mine], errors[mine], STATED)


def origin(source: str) -> str:
    """Return the repository or paper that a row names first, without files and lines."""
    repository = re.match(r"[A-Za-z0-9][\w.-]*/[\w.-]+", source)
    return repository.group(0) if repository else re.split(r";| \(|,? (?:Table|Fig|p\.|section)", source)[0].strip()


def part_of(cases: Sequence[Case], experts: bool, family: str) -> tuple[list[Case], set[str]]:
    """Return the cases of models with experts, or of dense models on a family of devices, and the others' campaigns.

    Raises: AutoplanError for both at once, and for a family that no case has, with those that there are.
    """
    if experts and family:
        raise AutoplanError(f"--experts and --family {family}: one part of the steps is fitted at a time")
    if not experts and not family:
        return list(cases), set()
    families = [family_of(case.task.cluster.device) or "none" for case in cases]
    if family and family not in families:
        raise AutoplanError(f"--family {family!r}: there is only {', '.join(sorted(set(families)))}")
    dense = [not case.task.shape.num_experts for case in cases]
    mine = [not d if experts else d and f == family for d, f in zip(dense, families, strict=True)]
    left = {case.row["campaign"] for case, own in zip(cases, mine, strict=True) if not own}
    return [case for case, own in zip(cases, mine, strict=True) if own], left


def merged_constants(before: Mapping[str, Any], now: Mapping[str, Any], mixed: Collection[str]) -> dict[str, Any]:
    """Return the data of a constants file after a fit of some of its constants to some of the steps.

    Constants that were not fitted now stay as they were, and so do errors of groups without a step in this fit.

    Args:
        mixed: groups that have other steps, too: their held-out error (`unseen`) is not known and is left out.
    """
    fitted = {n: e for n, e in now["constants"].items() if e["fitted"] or n not in before["constants"]}
    old, new = before.get("errors", {}), now["errors"]
    return {
        **before,
        "constants": {n: fitted.get(n, before["constants"].get(n, e)) for n, e in now["constants"].items()},
        "errors": {g: new.get(g, old.get(g)) for g in sorted({*old, *new})},
        "step_intervals": {**before.get("step_intervals", {}), **now.get("step_intervals", {})},
        "unseen": {g: e for g, e in {**before.get("unseen", {}), **now.get("unseen", {})}.items() if g not in mixed},
        "unseen_models": {**before.get("unseen_models", {}), **now.get("unseen_models", {})},
        "sources": sorted({*before.get("sources", ()), *now.get("sources", ())}),
        "fitted_apart": {key: now[key] for key in ("error", "intervals", "date") if key in now}
        | {"constants": sorted(n for n, e in fitted.items() if e["fitted"]), "groups": sorted(new)},
    }


def main(
    data: Annotated[Path, typer.Option(help="CSV of published measurements")],
    trust: Annotated[str, typer.Option(help="only rows of this trust (A, B or C); empty: all")] = "A",
    small: Annotated[
        Path | None, typer.Option(help="a second CSV, every row of it: runs so small that the host decides")
    ] = None,
    only: Annotated[str, typer.Option(help="constants to fit, by comma; all by default")] = "",
    without: Annotated[str, typer.Option(help="constants not to fit, by comma")] = "",
    start: Annotated[Path | None, typer.Option(help="constants to start from; by default the assumed ones")] = None,
    write: Annotated[Path | None, typer.Option(help="store the constants here")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="store the same and every row here")] = None,
    limit: Annotated[int, typer.Option(min=0, help="at most so many rows, spread over the file; 0: all")] = 0,
    rounds: Annotated[int, typer.Option(min=1, help="of the fit")] = 4,
    experts: Annotated[
        bool, typer.Option("--experts", help="only steps of models with experts; the rest of --start stays as it is")
    ] = False,
    family: Annotated[
        str, typer.Option(help="only dense steps on this family of devices; the rest of --start stays as it is")
    ] = "",
    looseness: Annotated[float, typer.Option(help="factor on the widths of all priors")] = 1.0,
    jobs: Annotated[int, typer.Option(min=1, help="processes")] = 2,
    date: Annotated[str, typer.Option(help="stored with the constants; today by default")] = "",
) -> None:
    """Fit the constants, and say what they are worth."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    try:
        everything = read_rows(data)
        cases = cases_of(chosen(everything, trust, "", limit), everything)
        if small is not None:
            more_rows = read_rows(small)
            cases += cases_of(chosen(more_rows, "", "", limit), more_rows)
        apart = "--experts" if experts else "--family" if family else "--only" if only and start else ""
        if apart and start is None:
            raise AutoplanError(f"{apart} fits some of the constants: --start with the others is needed")
        cases, left = part_of(cases, experts, family)
        # not those as shipped: priors around values of an earlier fit would count its steps twice
        begin = Constants() if start is None else Constants.load(start)
        begin.with_(dict.fromkeys(filter(None, (only + "," + without).split(",")), 1.0))  # names are known
        if apart:  # from assumed values, for the same reason
            begin = begin.with_({n: Constants().values[n] for n in only.split(",") if n})
        wanted = [n for n in begin.values if begin.values[n] and (not only or n in only.split(","))]
        wanted = [n for n in wanted if n not in without.split(",")]
        with ExitStack() as stack:
            kind = ProcessPoolExecutor if jobs > 1 else ThreadPoolExecutor  # one alone: here
            pools = [stack.enter_context(kind(1)) for _ in range(jobs)]
            tasks = list(dict.fromkeys(case.task for case in cases))
            workers = Workers(tasks, pools)
            number = {task: i for i, task in enumerate(tasks)}
            timed = [case for case in cases if not math.isnan(case.measured_s)]  # others ran out of memory
            cases = [case for case in timed if number[case.task] in workers.home]
            indices = [number[case.task] for case in cases]
            steps = [MeasuredStep(c.row["id"], c.row["campaign"], c.measured_s) for c in cases]

            def price(questions: Sequence[Question]) -> list[list[float]]:
                return workers.price(indices, questions)

            (first,) = price([(begin, range(len(steps)))])
            near = [max(p / s.measured_s, s.measured_s / p) <= BEYOND for p, s in zip(first, steps, strict=True)]
            console.print(f"{near.count(False)} of {len(steps)} steps are more than {BEYOND:g} times off and left out")
            everywhere, all_steps = indices, steps
            models = ["experts" if c.task.shape.num_experts else "dense" for c in cases]
            cases, indices, steps = (
                [x for x, ok in zip(values, near, strict=True) if ok] for values in (cases, indices, steps)
            )
            fitted = fit_constants(steps, price, begin, names=wanted, rounds=rounds, looseness=looseness)
            held = held_out_errors(fitted, steps, price)
            of_step = workers.classes(indices, fitted.constants)
            # what the constants are worth: every step with them, those that had no part in the fit included
            indices = everywhere
            unseen = unseen_errors(all_steps, held, fitted.constants, price)
        # intervals are for steps that the model is meant for: those far off would stretch them over orders of magnitude
        intervals = [interval(steps, held.errors, aimed) for aimed in AIMED]
        kinds = {"--experts": ("experts",), "--family": ()}.get(apart, ("dense", "network", "experts", "host"))
        names = (*kinds, *sorted({name for name in of_step if OF_FAMILY in name}))
        stated = {name: stated_interval(of_step, steps, held.errors, name) for name in names}
    except AutoplanError as exc:
        raise typer.BadParameter(str(exc)) from exc
    console.print(constants_table(fitted, held, "campaign"))
    console.print(groups_table(steps, fitted, held, "campaign"))
    for found in intervals:
        console.print(interval_text(found), soft_wrap=True)
    console.print(f"{fitted.rounds} rounds; constants of fewer than {LEAST_GROUPS} campaigns stay")
    for name, known in stated.items():
        if known is not None:
            console.print(f"{name}: {interval_text(known)}", soft_wrap=True)
    more = {
        "intervals": stored_intervals(intervals),
        # measured / predicted of an interval holds 1: what is predicted is within what is stated
        "step_intervals": {
            name: {"low": min(1.0, found.low), "high": max(1.0, found.high), "covered": found.covered}
            for name, found in stated.items()
            if found is not None
        },
        # of all steps of a campaign, with constants fitted without it
        # of one family: a part of most campaigns and of all dense models, whose figures are those of a fit of all
        "unseen": {} if family else mean_errors([step.group for step in all_steps], unseen),
        "unseen_models": {} if family else mean_errors(models, unseen),
        "date": date or datetime.date.today().isoformat(),
        "sources": sorted({origin(case.row["source"]) for case in cases}),
    }
    result = stored(steps, fitted, held, more)
    if apart and start is not None:
        mixed = set() if family else left & {step.group for step in all_steps}
        result = merged_constants(json.loads(start.read_text(encoding="utf-8")), result, mixed)
    if write is not None:
        write_text(write, json.dumps(result, indent=1) + "\n")
    if json_path is not None:
        logs = zip(steps, fitted.before, fitted.after, held.errors, strict=True)
        keys = ("before", "in_sample", "held_out")
        result["rows"] = {step.name: dict(zip(keys, map(float, values), strict=True)) for step, *values in logs}
        json_path.parent.mkdir(parents=True, exist_ok=True)
        write_text(json_path, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
