"""Examine many models, each in a process of its own with a time limit, and keep what became of every one."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import time
import traceback
import warnings
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import cast

from autoplan.errors import AutoplanError

EQUAL, REFUSED, WRONG, CRASHED, NOT_RUN = OUTCOMES = ("equal", "refused", "wrong", "crashed", "not run")
_LONGEST = 300  # characters of a reason
_ADVICE = 'For more information, run with TORCH_LOGS="+dynamic". '  # of torch.export, before the reason


@dataclass(frozen=True)
class Row:
    """What became of one model.

    Attributes:
        group: the mapping or the kind of model that it belongs to.
        error: the largest difference of a gradient, relative to the gradient's largest element.
        seconds: of the whole examination.
        capture_s: of the capture alone.
        parity: degrees, such as "tp 2", or inputs of padded batches, and what became of the program that has them.
    """

    group: str
    name: str
    outcome: str
    why: str = ""
    loss: float | None = None
    error: float | None = None
    seconds: float = 0.0
    capture_s: float | None = None
    parity: tuple[tuple[str, str], ...] = ()

    @property
    def is_defect(self) -> bool:
        """Return True if the model, or one of its cases, is wrong or crashed."""
        return bool({WRONG, CRASHED} & {self.outcome, *(outcome for _, outcome in self.parity)})


@dataclass(frozen=True)
class Task:
    """A model to examine. `work` runs in a process forked from this one."""

    group: str
    name: str
    work: Callable[[], Row]


def short(exc: BaseException) -> str:
    """Return the message of an exception on one line; its type too unless it is an error of autoplan."""
    text = " ".join(str(exc).split()).replace(_ADVICE, "")
    text = text if isinstance(exc, AutoplanError) else f"{type(exc).__name__}: {text}"
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def crash(exc: BaseException) -> str:
    """Return `short`, and the last line of autoplan on the way to the exception."""
    where = [f for f in traceback.extract_tb(exc.__traceback__) if "/autoplan/" in f.filename][-1:]
    return short(exc) + "".join(f" ({Path(f.filename).name}:{f.lineno})" for f in where)


def _child(pipe: Connection, task: Task) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    warnings.simplefilter("ignore")
    try:
        row = task.work()
    except BaseException as exc:
        row = Row(task.group, task.name, CRASHED, crash(exc))
    pipe.send(row)
    pipe.close()
    os._exit(0)


def run_all(
    tasks: Sequence[Task],
    workers: int,
    timeout_s: float,
    budget_s: float | None,
    done: Callable[[Row], None],
) -> None:
    """Call `done` with the row of every task as soon as it is known.

    Args:
        workers: processes at a time.
        timeout_s: of one task, which is then ended and counts as crashed.
        budget_s: no task starts after these seconds. None: all run.
    """
    context = multiprocessing.get_context("fork")
    began = time.monotonic()
    waiting = list(tasks)[::-1]
    running: dict[Connection, tuple[Task, multiprocessing.process.BaseProcess, float]] = {}
    while waiting or running:
        if budget_s is not None and time.monotonic() - began > budget_s:
            waiting = []
        while waiting and len(running) < workers:
            task = waiting.pop()
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(there, task))  # not daemonic: it may have ranks
            process.start()
            there.close()
            running[here] = (task, process, time.monotonic())
        for pipe in cast(list[Connection], wait(list(running), timeout=0.5)):
            task, process, start = running.pop(pipe)
            try:
                row: Row = pipe.recv()
            except EOFError:
                row = Row(task.group, task.name, CRASHED, "its process died")
            process.join()
            done(replace(row, seconds=time.monotonic() - start))
        for pipe, (task, process, start) in list(running.items()):
            if time.monotonic() - start > timeout_s:
                del running[pipe]
                process.kill()
                process.join()
                done(Row(task.group, task.name, CRASHED, f"no answer in {timeout_s:g} s", seconds=timeout_s))


def show(row: Row) -> None:
    """Print a row."""
    degrees = ", ".join(f"{name}: {what}" for name, what in row.parity)
    print(f"{row.outcome:8s} {row.name:45s} {row.seconds:5.1f} s  {row.why} {degrees}".rstrip(), flush=True)


def read_rows(path: Path) -> dict[str, Row]:
    """Return the rows of a file, by name. Empty if there is no file."""
    if not path.exists():
        return {}
    rows = (Row(**{**fields, "parity": tuple(map(tuple, fields["parity"]))}) for fields in json.loads(path.read_text()))
    return {row.name: row for row in rows}


def write_rows(path: Path, rows: Mapping[str, Row]) -> None:
    """Write the rows where `read_rows` finds them."""
    path.write_text(json.dumps([asdict(r) for r in rows.values()], indent=1))


_COLUMNS = ("class", "mapping", "outcome")


def escaped(text: str) -> str:
    """Return text for a cell of a Markdown table."""
    return re.sub(r"(?<!\\)\|", r"\\|", text).replace("<", "&lt;")


def table(rows: Iterable[Row], cases: Sequence[str], marked: Container[str] = ()) -> list[str]:
    """Return the lines of a table of models that `read_page` reads.

    Args:
        cases: the cases of `Row.parity` that have a column.
        marked: names of the models whose reason begins with an asterisk.
    """
    lines = ["| " + " | ".join((*_COLUMNS, *cases, "why")) + " |", "|---" * (len(_COLUMNS) + len(cases) + 1) + "|"]
    for row in rows:
        why = " ".join(filter(None, ["*" * (row.name in marked), escaped(row.why)]))
        found = dict(row.parity)
        lines.append(
            "| " + " | ".join([row.name, row.group, row.outcome, *(found.get(c, "") for c in cases), why]) + " |"
        )
    return lines


def read_page(path: Path) -> dict[str, Row]:
    """Return the rows of a page with one `table`. Empty if there is no page."""
    lines = (path.read_text() if path.exists() else "").splitlines()
    cells = [[c.strip() for c in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines if line.startswith("|")]
    found, cases = {}, None
    for name, *more in cells:
        if (name, *more[:2]) == _COLUMNS:
            cases = more[2:-1]
        elif cases is not None and len(more) == len(cases) + 3 and more[1] in OUTCOMES:
            group, outcome, *each, why = more
            parity = tuple((case, what) for case, what in zip(cases, each, strict=True) if what)
            found[name] = Row(group, name, outcome, why.removeprefix("*").lstrip(), parity=parity)
    return found
