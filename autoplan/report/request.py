"""Read the options of `plan`, `estimate` and `whatif` into a PlanRequest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, Unpack

from autoplan.catalog import load_model
from autoplan.config.adapters import Adapters, read_adapters
from autoplan.config.choices import options_of, read_mode
from autoplan.config.numbers import read_count, read_number
from autoplan.config.planning import TOLERANCES, SearchSettings, SearchWords
from autoplan.config.settings import check_setting, setting
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.cost_models.profile import Profile
from autoplan.errors import PinError
from autoplan.ir.graph import ModelGraph
from autoplan.plans.document import graph_of_text
from autoplan.program.adapters import with_adapters
from autoplan.report.arguments import import_from_here as import_from_here
from autoplan.report.arguments import read_assumptions, read_pin_words
from autoplan.report.data import request_data
from autoplan.report.flags import TaskWords, words_of
from autoplan.report.output import say_note
from autoplan.report.written import differences
from autoplan.search.planner import PlanRequest
from autoplan.search.request import check_measured_on
from autoplan.stacks.like import read_like
from autoplan.sweeps.whatif import RunTask, check_sweep, read_constants

# What the request in a plan file says of the search, which another command may do otherwise, and what follows from it
_NOT_COMPARED = frozenset(("pins", "gap", "imbalance", *(record.name for record in TOLERANCES)))


def read_run(task: TaskWords) -> RunTask:
    """Return the whole run that a command asks for."""
    if task.assume and task.tokens is None:
        raise PinError(f"--assume {task.assume[0]} is about a whole run; give its size too, for example --tokens 300B")
    tokens = None if task.tokens is None else read_number(task.tokens, "--tokens")
    return RunTask(tokens, read_assumptions(task.assume or ()))


def say_differences(task: TaskWords, request: PlanRequest) -> None:
    """Print on stderr what no longer holds of a plan file, unless the command names another cluster."""
    written = task.written
    if written is not None and task.cluster == written.asked.get("cluster", task.cluster):
        for line in (*differences(written, request), *_changed(task, request)):
            say_note(f"{written.path}: {line}")


def _changed(task: TaskWords, request: PlanRequest) -> Iterator[str]:
    """Yield what the request in a plan file says otherwise than its arguments, if the command gives no other ones."""
    written = task.written
    if written is None or written.config is not None:  # the input of a framework has no request
        return
    own, names = words_of(written), {f.name for f in fields(TaskWords)} - {"asked", "usual"}
    if any(getattr(task, name) != getattr(own, name) for name in names):
        return
    now = request_data(request)
    for name, value in written.request.items():
        if name not in _NOT_COMPARED and (priced := now.get(name)) != value:
            said = f"its request says {name}={value}, and what was asked gives {priced}"
            yield f"{said}, which is priced; a flag changes it"


def _graph(task: TaskWords, adapters: Adapters | None) -> ModelGraph:
    """Return the graph of the model: of a plan file, or by its name; with the adapters."""
    written = task.holder
    if written is not None:
        before = written.asked.get("adapters")  # the graph of the file has these
        if before not in (None, task.adapters):
            raise PinError(
                f"{written.path} holds the graph of its model with adapters={before}, to which no others can be added; "
                "give a plan file that was made without adapters"
            )
        graph = graph_of_text(str(written.graph), str(written.made_for.get("graph")), str(written.path))
        if before is not None:
            return graph
    else:
        if ":" in task.model:
            import_from_here()
        graph = load_model(task.model)
    return graph if adapters is None else with_adapters(graph, adapters)


def read_request(
    task: TaskWords,
    *,
    pins: Sequence[str] | Mapping[str, Any] | None = None,
    top: int = 1,
    runnable: bool = False,
    **search: Unpack[SearchWords],
) -> PlanRequest:
    """Return the request. Everything else is read and checked before the model is loaded, which may take long."""
    SearchSettings(**search).check()
    where = Cluster.parse(task.cluster)
    like = None
    if task.like is not None:
        like = read_like(task.like, {**task.options, "mode": task.mode, "precision": task.precision})
    mode = read_mode(setting("mode").default if task.mode is None else task.mode)
    precision = setting("precision").default if task.precision is None else task.precision
    if like is None or not precision:  # a stack also knows precisions of its own
        check_setting("precision", precision)
    tokens = read_count(task.seq_len, "--seq-len")
    batch = read_count(task.global_batch_size, "--global-batch-size")
    check_sweep(tokens, batch)
    fixed, run_options = read_pin_words(pins or ()), options_of(task.options)
    known, file = read_constants(task.constants)
    measured = Profile.load(task.profile) if task.profile is not None else None
    check_measured_on(measured, where, f"the cluster {where}")
    adapters = None if task.adapters is None else read_adapters(task.adapters)
    request = PlanRequest(
        graph=_graph(task, adapters),
        cluster=where,
        seq_len=tokens,
        global_batch_size=batch,
        pins=fixed,
        precision=precision,
        mode=mode,
        profile=measured,
        profile_file=task.profile,
        options=run_options,
        constants=known,
        constants_file=file,
        top=top,
        executed=runnable,
        target_len=None if task.target_len is None else read_count(task.target_len, "--target-len"),
        like=like,
        adapters=None if adapters is None else str(adapters),
        **search,
    )
    say_differences(task, request)
    return request
