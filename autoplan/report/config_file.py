"""Inputs of other frameworks on the command line: what a file says becomes the arguments that were not typed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autoplan.catalog import load_model
from autoplan.config.choices import OPTIONS, PINS, plain_option
from autoplan.config.numbers import read_count
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.errors import PinError
from autoplan.exporters.door import ConfigFile, read_config
from autoplan.ir.graph import ModelGraph
from autoplan.program.facts import expert_counts
from autoplan.report.arguments import import_from_here
from autoplan.report.output import say_note
from autoplan.report.written import FOLLOWS, WrittenPlan

_NAMED = 12  # names of a note; the others are counted
_RUN = {"seq_len": "--seq-len", "global_batch_size": "--global-batch-size"}


def read_for(values: Mapping[str, Any], typed: set[str]) -> tuple[ConfigFile, ModelGraph]:
    """Return the config file of a command, read for its model and its cluster, and the model.

    Args:
        values: the arguments of the command; `from_file` and `format` name the file.
        typed: names of those that were typed.

    Raises: PinError for a missing model or cluster, and if the file cannot be read.
    """
    path = str(values["from_file"])
    for name, flag in (("model", "MODEL"), ("cluster", "--cluster")):
        if values.get(name) is None:
            raise PinError(f"{flag} is missing: {path} does not say it")
    if ":" in values["model"]:
        import_from_here()
    given = {name: values[name] for name in PINS if name in typed}
    given |= {name: read_count(values[name], flag) for name, flag in _RUN.items() if values.get(name) is not None}
    given |= {"adapters": values["adapters"]} if values.get("adapters") is not None else {}
    graph, cluster = load_model(values["model"]), Cluster.parse(values["cluster"])
    return read_config(path, values.get("format"), graph=graph, cluster=cluster, given=given, lenient=True), graph


def written_config(values: Mapping[str, Any], typed: set[str]) -> WrittenPlan:
    """Return the values of a config file for arguments that were not typed; print on stderr what it leaves open.

    What the target itself would refuse is in `WrittenPlan.config` (`WrittenPlan.check_taken`).
    """
    read, graph = read_for(values, typed)
    for line in _notes(read, typed):
        say_note(line)
    return as_written(read, graph, values)


def as_written(read: ConfigFile, graph: ModelGraph, values: Mapping[str, Any]) -> WrittenPlan:
    """Return a config file as a plan file: the arguments and the degrees that it stands for."""
    says = read.says
    asked: dict[str, Any] = {"model": values["model"], "cluster": values["cluster"], "like": read.like}
    for name, flag in _RUN.items():
        if name in says:
            asked[name] = str(says[name])
        elif values.get(name) is None and not read.faults:  # a fault is said first
            raise PinError(f"{read.path} does not say {name}; give {flag}")
    asked |= {name: plain_option(says[name]) for name in (*OPTIONS, "precision", "mode", "adapters") if name in says}
    asked |= {name: ",".join(value) for name, value in asked.items() if isinstance(value, list)}
    degrees = {name: says[name] for name in PINS if says.get(name) is not None and name not in FOLLOWS}
    degrees = {name: tuple(value) if isinstance(value, list) else value for name, value in degrees.items()}
    if not max(expert_counts(graph), default=0):
        degrees.pop("etp", None)
    return WrittenPlan(Path(read.path), asked, degrees, {}, config=read)


def _notes(read: ConfigFile, typed: set[str]) -> list[str]:
    """Return notes on a file that was read: its target, what it leaves open, what was not read."""
    out = [f"{read.path} is read as {read.target}@{read.version}; what it does not say is as in {read.like}"]
    left = [f"{name} ({where})" for name, where in read.open.items() if name not in typed and name not in FOLLOWS]
    if left:
        out.append(f"{read.path} does not say {', '.join(left)}: flags or defaults are taken")
    number = len(read.idle)
    others = f"{number} other value{'s' if number > 1 else ''} of no weight for time and memory" if number else ""
    if read.not_read:
        out.append(f"{read.path}: not read: {', '.join(read.not_read)}{others and f'; {others}'}")
    if read.foreign:
        shown, more = read.foreign[:_NAMED], len(read.foreign) - _NAMED
        names = ", ".join(shown) + (f" and {more} more (check --json has all)" if more > 0 else "")
        out.append(f"{read.path}: not read, since autoplan does not know what it does: {names}")
    return [*out, *(f"{read.path}: {line}" for line in read.warnings)]
