"""The capacity table: many models on many clusters, each planned by itself, with the days, money and energy of a run.

    capacity(["llama-3.1-8b", "llama-3.1-70b"], ["8x8xh100-sxm5-80gb", "8x8xb200-sxm-180gb"], "1T", "8k", 512)

or a YAML file (`autoplan capacity FILE.yaml`) with the same names. `models` to `mode` take one value or a list:

    models: [llama-3.1-8b, llama-3.1-70b]       # required
    clusters: 8x8xh100-sxm5-80gb                # required; as on the command line
    tokens: 1T                                  # required; in powers of 1000
    seq_len: 8k                                 # required; in powers of 1024
    global_batch_size: [256, 512]               # required; sequences, in powers of 1024
    precision: bf16
    mode: eager
    pins: {tp: 8}                               # of all rows
    like: megatron-bridge@26.08                 # settings of the stack that will run them (autoplan stacks)
    runnable: true                              # only plans that autoplan's own runtime can execute
    adapters: lora:16                           # fine-tuning: low-rank products beside frozen weights
    target_len: 512                             # of encoder-decoders; in powers of 1024
    launch: graphs                              # how runs are set up: the names of RunOptions
    overlap: [tp, pp]
    fused_loss: online
    profile: NAME                               # measured times
    constants: FILE                             # of the cost model, written by `autoplan calibrate`
    assumptions: {mtbf_device_days: 2000}       # of a run: autoplan.cost_models.whole_run.FIGURES
    time_limit_s: 60                            # of one search
    memory_risk: 0.05                           # accepted probability that a plan runs out of memory
    equal_within: 0.02                          # plans this close to the fastest are equal, the simplest is taken
    gap: 0.01                                   # share of a step that a search may leave unproved
    cache: false                                # solved layouts are not kept for later searches

Paths in a file are relative to its folder. Rows that do not fit or are illegal stay, with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from autoplan.catalog import load_model
from autoplan.config.adapters import Adapters, read_adapters
from autoplan.config.choices import OPTIONS, PINS, option_data, options_of, read_mode
from autoplan.config.keys import check_keys, check_names
from autoplan.config.numbers import read_count, read_number
from autoplan.config.parallel import Mode, RunOptions
from autoplan.config.planning import SEARCH_SETTINGS, SearchSettings, SearchWords
from autoplan.config.precision import precision_of
from autoplan.config.settings import VARIED_SETTINGS, check_setting, setting
from autoplan.cost_models.constants import Constants
from autoplan.cost_models.hardware.cluster import Cluster, split_overrides
from autoplan.cost_models.hardware.cluster_file import read_yaml
from autoplan.cost_models.profile import Profile
from autoplan.cost_models.whole_run import Assumptions
from autoplan.errors import AutoplanError, PinError
from autoplan.ir.graph import ModelGraph
from autoplan.program.adapters import with_adapters
from autoplan.search.planner import PlanRequest, search_plan
from autoplan.search.request import check_measured_on
from autoplan.stacks.like import Like, read_like
from autoplan.sweeps.whatif import (
    RANGES,
    Point,
    RunTask,
    check_points,
    check_tokens,
    critical_batch,
    points,
    read_constants,
    row,
)

if TYPE_CHECKING:
    import pandas as pd

_NEEDED = ("models", "clusters", "tokens", "seq_len", "global_batch_size")
_LISTED = tuple(dict.fromkeys((*_NEEDED, *VARIED_SETTINGS)))  # one value or a list: rows are their product
_OPTIONAL = (
    *(name for name in _LISTED if name not in _NEEDED),
    "pins",
    "like",
    "runnable",
    "adapters",
    "target_len",
    *OPTIONS,
    "profile",
    "constants",
    "assumptions",
    *(record.name for record in SEARCH_SETTINGS),
)


@dataclass(frozen=True)
class CapacityTask(SearchSettings):
    """The request for a capacity table, with the settings of every search.

    Rows are the product of the lists; tokens vary fastest.
    `models` and `clusters` are pairs of the name in the table and the object. `constants_file` is the file that the
    constants were read from; None: the constants of this version, or given as an object.
    """

    models: tuple[tuple[str, ModelGraph], ...]
    clusters: tuple[tuple[str, Cluster], ...]
    tokens: tuple[float, ...]
    seq_len: tuple[int, ...]
    global_batch_size: tuple[int, ...]
    precision: tuple[str, ...]
    mode: tuple[Mode, ...]
    pins: Mapping[str, Any]
    options: RunOptions
    profile: Profile | None
    constants: Constants
    constants_file: str | None
    assumptions: Assumptions
    like: Like | None = None
    runnable: bool = False
    adapters: Adapters | None = None
    target_len: int | None = None

    @property
    def num_searches(self) -> int:
        """The number of searches; different tokens share one."""
        lists = (self.models, self.clusters, *(getattr(self, name) for name in VARIED_SETTINGS))
        return math.prod(map(len, lists))


@dataclass(frozen=True)
class Cell:
    """One row: a model on a cluster, its plan or the reason why there is none, and its run."""

    model: str
    cluster: str
    tokens: float
    point: Point
    assumptions: Assumptions = field(default_factory=Assumptions)

    @property
    def run(self) -> RunTask:
        """The run to price."""
        return RunTask(self.tokens, self.assumptions)


def task_of(data: Mapping[str, Any], where: str, folder: Path | None = None) -> CapacityTask:
    """Return the task of a mapping as the file holds it; values may also be model, cluster and profile objects.

    Args:
        where: The start of every error message, for example the file.
        folder: The folder of relative paths; None: the working directory.

    Raises: PinError that names `where`, the field, its value and what would work.
    """
    given = _given(data, where)

    def read(name: str, one: Callable[[Any], Any], default: object = None) -> tuple[Any, ...]:
        value = given.get(name, default)
        many = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
        if not many:
            raise PinError(f"{where}: {name} is an empty list; give at least one value")
        out = []
        for i, item in enumerate(many):
            at = f"{where}: {name}[{i}]" if many is value else f"{where}: {name}"
            out.append(_read(at, one, item))
        return tuple(out)

    lists = {name: given[name] for name in _LISTED if isinstance(given.get(name), list | tuple)}
    check_points({name: len(values) for name, values in lists.items()}, where)  # before any model is read
    pins = _mapping(given, "pins", "{tp: 8}", where)
    check_names(pins, PINS, where, "pin")
    assumptions = _mapping(given, "assumptions", "{pue: 1.1}", where)
    option_given = {name: given[name] for name in OPTIONS if name in given}
    options = _read(where, options_of, option_given)
    like = None
    if "like" in given:
        like = _read(f"{where}: like", lambda v: read_like(v, option_given), given["like"])
    adapters = _read(f"{where}: adapters", _adapters, given.get("adapters"))
    known, file = _read(f"{where}: constants", lambda v: _constants(v, folder), given.get("constants"))
    task = CapacityTask(
        # the slowest reads come last
        tokens=read("tokens", _tokens),
        seq_len=read("seq_len", lambda v: _count("seq_len", v)),
        global_batch_size=read("global_batch_size", lambda v: _count("global_batch_size", v)),
        precision=read("precision", lambda v: _precision(v, like), setting("precision").default),
        mode=read("mode", read_mode, Mode.EAGER if like is None else like.mode),
        like=like,
        runnable=_switched(given, "runnable", where),
        adapters=adapters,
        target_len=None if "target_len" not in given else read("target_len", lambda v: _count("target_len", v))[0],
        pins={name: tuple(value) if isinstance(value, list) else value for name, value in pins.items()},
        options=options,
        constants=known,
        constants_file=file,
        assumptions=Assumptions.of(assumptions, f"{where}: assumptions"),
        **_search_words(given, where),
        clusters=read("clusters", lambda v: _cluster(v, folder)),
        profile=read("profile", lambda v: _profile(v, folder))[0],
        models=read("models", lambda v: _model(v, folder, adapters)),
    )
    for name, cluster in task.clusters:
        _read(where, partial(check_measured_on, task.profile, cluster), f"cluster {name}")
    return task


def _given(data: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the keys that have a value. PinError for an unknown key and for one that is missing."""
    check_keys(data, _NEEDED, _OPTIONAL, where)
    return {name: value for name, value in data.items() if value is not None}


def _mapping(given: Mapping[str, Any], name: str, example: str, where: str) -> Mapping[str, Any]:
    value = given.get(name, {})
    if not isinstance(value, Mapping):
        raise PinError(f"{where}: {name}={value!r} must be a mapping, for example {example}")
    return value


def _switched(given: Mapping[str, Any], name: str, where: str) -> bool:
    value = given.get(name, False)
    if not isinstance(value, bool):
        raise PinError(f"{where}: {name}={value!r} must be true or false")
    return value


def _adapters(value: object) -> Adapters | None:
    return value if value is None or isinstance(value, Adapters) else read_adapters(str(value))


def _precision(value: object, like: Like | None) -> str:
    """Return the name of a precision, which with a stack is one that it can do."""
    if like is None:
        return precision_of(str(value)).name
    like.but(precision=str(value))
    return str(value)


def _search_words(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    found = {record.name: given[record.name] for record in SEARCH_SETTINGS if record.name in given}
    _read(where, SearchSettings.check, SearchSettings(**found))
    return found


def read_task(path: str | Path) -> CapacityTask:
    """Return the task of a YAML file. Raises PinError that names the file, the field and the wrong value."""
    where = f"capacity file {path}"
    data = read_yaml(path, where)
    if not isinstance(data, Mapping):
        raise PinError(f"{where} must be a mapping with the keys {', '.join(_NEEDED)}")
    return task_of(data, where, Path(path).parent)


def _read(where: str, one: Callable[[Any], Any], value: object) -> Any:
    try:
        return one(value)
    except AutoplanError as error:
        raise PinError(f"{where}: {error}") from error


def _tokens(value: object) -> float:
    number = read_number(value, "tokens") if isinstance(value, str) else value
    check_tokens(number)
    return float(number)  # type: ignore[arg-type]


def _count(name: str, value: object) -> int:
    number = read_count(value, name) if isinstance(value, str) else value
    if name in RANGES:
        RANGES[name].check(number, name)
    check_setting(name, number)
    return int(number)  # type: ignore[call-overload,no-any-return]


def beside(text: str, folder: Path | None, endings: tuple[str, ...]) -> str:
    """Return the path of a file that a task names, relative to `folder`; other texts are returned unchanged."""
    isfile = split_overrides(text)[0].endswith(endings)
    return str(folder / text) if folder is not None and isfile else text


def _cluster(value: object, folder: Path | None) -> tuple[str, Cluster]:
    if isinstance(value, Cluster):
        return str(value), value
    if not isinstance(value, str):
        raise PinError(f"{value!r} is not a cluster; write it as text, for example 8x8xh100-sxm5-80gb")
    return value, Cluster.parse(beside(value, folder, (".yaml", ".yml")))


def _profile(value: object, folder: Path | None) -> Profile | None:
    if value is None or isinstance(value, Profile):
        return value
    return Profile.load(beside(str(value), folder, (".json",)))


def _constants(value: object, folder: Path | None) -> tuple[Constants, str | None]:
    if value is not None and not isinstance(value, Constants | Path | str):
        raise PinError(f"{value!r} is not a file; name one that `autoplan calibrate --write` has written")
    return read_constants(folder / value if folder is not None and isinstance(value, str) else value)


def _model(value: object, folder: Path | None, adapters: Adapters | None) -> tuple[str, ModelGraph]:
    label, graph = _named_model(value, folder)
    return label, graph if adapters is None else with_adapters(graph, adapters)


def _named_model(value: object, folder: Path | None) -> tuple[str, ModelGraph]:
    if isinstance(value, ModelGraph):
        return value.name, value
    if not isinstance(value, str):
        raise PinError(f"{value!r} is not a model; write a name of `autoplan models` or a config.json, as text")
    return value, load_model(beside(value, folder, (".json",)))


# The order in which `whatif.points` varies the lists; tokens need no search of their own.
_SEARCHED = ("cluster", *VARIED_SETTINGS)


def cells(task: CapacityTask, search: Callable[[PlanRequest], Any] = search_plan) -> Iterator[Cell]:
    """Yield the rows of the table. Ctrl-C during a search ends them with the current row (`Point.interrupted`).

    Args:
        search: Plans one request, as `autoplan.search.planner.search_plan` does.
    """
    labels = {id(cluster): label for label, cluster in task.clusters}
    clusters = [cluster for _, cluster in task.clusters]
    vary: dict[str, Sequence[Any]] = {"cluster": clusters, **{name: getattr(task, name) for name in VARIED_SETTINGS}}
    for name, graph in task.models:
        base = PlanRequest(
            graph,
            task.clusters[0][1],
            task.seq_len[0],
            task.global_batch_size[0],
            task.pins,
            profile=task.profile,
            options=task.options,
            constants=task.constants,
            constants_file=task.constants_file,
            like=task.like,
            executed=task.runnable,
            adapters=None if task.adapters is None else str(task.adapters),
            target_len=task.target_len,
            **task.search_words,
        )
        for point in points(base, vary, search):
            for tokens in task.tokens:
                yield Cell(name, labels[id(point.varied["cluster"])], tokens, point, task.assumptions)
            if point.interrupted:
                return


def cell_row(cell: Cell) -> dict[str, object]:
    """Return a cell as one flat row, with None for unknown values and for cells without a plan."""
    out: dict[str, object] = {"model": cell.model, "cluster": cell.cluster, "tokens": cell.tokens}
    rest = row(cell.point, cell.run)
    out |= {name: value for name, value in rest.items() if name != "cluster"}
    graph = cell.point.request.graph if cell.point.request is not None else None
    out["critical_batch_tokens"] = critical_batch(graph, cell.tokens) if graph is not None else None
    return out


def cell_columns() -> list[str]:
    """Return the names of the columns of every `cell_row`."""
    return list(cell_row(Cell("", "", 0.0, Point(dict.fromkeys(_SEARCHED), None, None, ""))))


def capacity(
    models: str | ModelGraph | Sequence[str | ModelGraph],
    clusters: str | Cluster | Sequence[str | Cluster],
    tokens: float | str | Sequence[float | str],
    seq_len: int | str | Sequence[int | str],
    global_batch_size: int | str | Sequence[int | str],
    *,
    pins: Mapping[str, Any] | None = None,
    precision: str | Sequence[str] = "bf16",
    mode: Mode | str | Sequence[Mode | str] = Mode.EAGER,
    options: RunOptions | Mapping[str, Any] | None = None,
    profile: Profile | Path | str | None = None,
    constants: Constants | Path | str | None = None,
    assumptions: Mapping[str, float] | None = None,
    like: str | None = None,
    runnable: bool = False,
    adapters: Adapters | str | None = None,
    target_len: int | str | None = None,
    **search: Unpack[SearchWords],
) -> pd.DataFrame:
    """Return the best plan of every model on every cluster, with the cost of its run, one row each.

    A row without a plan states the reason.

    Args:
        models: Names for `autoplan.load_model`, or graphs; one or a list.
        clusters: Texts for `Cluster.parse`, or Clusters; one or a list.
        tokens: Tokens of the whole run; also as text, `1T`; one or a list.
        seq_len: Tokens per sequence; also `8k` (8192); one or a list.
        global_batch_size: Sequences per step; one or a list.
        pins: Choices that are fixed in all rows.
        precision: One or a list.
        mode: One or a list.
        options: How all runs are set up, for example `RunOptions(launch=Launch.GRAPHS)` or `{"launch": "graphs"}`.
        constants: Constants of the cost model, or a file of `autoplan calibrate`; None: the constants of this version.
        assumptions: Failures, power and storage of the run, by the names of `autoplan.cost_models.whole_run.FIGURES`.
        like: The stack that will run the plans, `megatron-bridge@26.08`; other arguments override it where they differ
            from their defaults.
        runnable: True: only plans that autoplan's own runtime can execute.
        adapters: Low-rank products that are trained beside frozen weights, `lora:16` (`autoplan.config.adapters`).
        target_len: Tokens per target sequence of encoder-decoders; None: as seq_len.
        **search: Settings of every search: time_limit_s, memory_risk, equal_within, gap, cache
            (`autoplan.config.planning.SearchSettings`).

    Returns: model, cluster, tokens, seq_len, global_batch_size, precision, mode, then the columns of
        `autoplan.sweeps.whatif` with tokens (seconds, bytes, days, US dollars, kWh; shares from 0 to 1), then
        critical_batch_tokens. After Ctrl-C: the rows so far.

    Raises: AutoplanError for an unknown model, cluster, name or value.

    Example:
        >>> import autoplan
        >>> table = autoplan.capacity("gpt2", ["1xh100", "2xh100"], "10B", "1k", 16, pins={"tp": 1, "pp": 1})
        >>> list(table["num_devices"]), bool(table["days"][1] < table["days"][0])
        ([1, 2], True)
    """
    import pandas as pd

    usual = option_data(RunOptions())
    task = task_of(
        {
            "models": models,
            "clusters": clusters,
            "tokens": tokens,
            "seq_len": seq_len,
            "global_batch_size": global_batch_size,
            "pins": pins,
            "precision": precision,
            "mode": None if like is not None and mode is Mode.EAGER else mode,
            "like": like,
            **{name: value for name, value in option_data(options_of(options)).items() if value != usual[name]},
            "profile": profile,
            "constants": constants,
            "assumptions": assumptions,
            "runnable": runnable,
            "adapters": adapters,
            "target_len": target_len,
            **search,
        },
        "capacity",
    )
    return pd.DataFrame([cell_row(cell) for cell in cells(task)])
