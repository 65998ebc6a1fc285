"""Arguments and options that several commands of the command line share."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer

from autoplan.config.choice import Choice, Written, choices_of
from autoplan.config.choices import plain_option, text_of
from autoplan.config.parallel import ParallelConfig, RunOptions
from autoplan.config.planning import OF_EVERY_COMMAND, SEARCH_SETTINGS
from autoplan.config.settings import setting
from autoplan.errors import PinError
from autoplan.report.written import WrittenPlan, find_written

PinTexts = Annotated[
    list[str] | None,
    typer.Option("--pin", help="Fix a choice, for example tp=8, recompute=full or stages=10,11,11; may be repeated."),
]
ConstantsFile = Annotated[
    Path | None, typer.Option("--constants", help="Constants of the cost model: a file written by autoplan calibrate.")
]


def _of_setting(name: str) -> Any:
    """Return the option of a setting of a task; its default is that of the record."""
    record = setting(name)
    shown = None if record.left_out or record.default is None else text_of(record, record.default)
    return typer.Option(*(record.flags or (record.flag,)), help=record.help, show_default=shown or True)


_SEARCH = {record.name: record for record in SEARCH_SETTINGS}


def _flags(record: Choice) -> tuple[str, ...]:
    """Return the flags of a choice; a switch that is on by default has one to turn it off."""
    if record.written is Written.SWITCH and record.default:
        return (f"{record.flag}/--no-{record.flag.removeprefix('--')}",)
    return record.flags or (record.flag,)


def _of_search(name: str, **limits: Any) -> Any:
    """Return the option of a setting of a search; its default is that of the command."""
    record = _SEARCH[name]
    return typer.Option(*_flags(record), help=record.help, **limits)


ProfileName = Annotated[str | None, _of_setting("profile")]
CsvPath = Annotated[Path | None, typer.Option("--csv", help="Also write the rows to this file, one by one.")]
Runnable = Annotated[bool, typer.Option("--runnable", help="Only what autoplan's own runtime can execute.")]
FromFile = Annotated[
    str | None,
    typer.Option(
        "--from",
        help="The input of another framework (autoplan export --help lists them): its degrees and settings are taken "
        "where they are not typed, those of its stack as with --like. FILE.py:FUNCTION of a Python file with several.",
    ),
]
FileFormat = Annotated[
    str | None, typer.Option("--format", help="NAME or NAME@VERSION of the framework of the file; default: detected.")
]
ReportPath = Annotated[
    Path | None,
    typer.Option("--report", help="Also write the answer as one HTML file that opens offline; needs autoplan[report]."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
TimeLimit = Annotated[float, _of_search("time_limit_s", min=0)]
MemoryRisk = Annotated[float, _of_search("memory_risk")]
Cache = Annotated[bool, _of_search("cache")]
CHOSEN: Mapping[str, Any] = {}  # the default of a parameter that takes several choices


@dataclass(frozen=True)
class TaskWords:
    """The arguments that plan, estimate and whatif share, as they were typed or as a plan file gives them.

    Attributes:
        asked: every argument of the command that says what to answer, by name: what a plan file keeps.
        written: the plan file that was given in place of the model.
        usual: the arguments that were not given, and that the model's usual run says (autoplan.catalog.Usual).
    """

    model: Annotated[
        str,
        typer.Argument(
            help="Catalog name (autoplan models), a Hugging Face config.json, package.module:factory, or a plan file: "
            "what `autoplan plan --json` or `estimate --json` printed, with all of its arguments."
        ),
    ]
    cluster: Annotated[
        str,
        typer.Option(
            "--cluster",
            "-c",
            help="Nodes x devices per node x device (8x8xh100-sxm5-80gb), nodes x cloud instance (8xp5.48xlarge), "
            "local:N, or a YAML file; overrides are appended: @nic=400,price=2.5.",
        ),
    ]
    seq_len: Annotated[str, _of_setting("seq_len")]
    global_batch_size: Annotated[str, _of_setting("global_batch_size")]
    precision: Annotated[str | None, _of_setting("precision")] = None
    mode: Annotated[str | None, _of_setting("mode")] = None
    like: Annotated[
        str | None,
        typer.Option(
            "--like",
            help="Settings of the stack that will run the plan, NAME or NAME@YY.MM (autoplan stacks); other options "
            "override them.",
        ),
    ] = None
    options: Mapping[str, Any] = field(default_factory=dict)
    profile: ProfileName = None
    constants: ConstantsFile = None
    target_len: Annotated[str | None, _of_setting("target_len")] = None
    adapters: Annotated[
        str | None,
        typer.Option(
            "--adapters",
            help="Fine-tuning: all weights are frozen, and low-rank products beside linear layers trained: lora:16, "
            "lora:16:q_proj,v_proj, or with frozen weights in 4 bits qlora:16:all-linear.",
        ),
    ] = None
    tokens: Annotated[
        str | None,
        typer.Option(
            help="Tokens of the whole run, in powers of 1000 (300B is 300,000,000,000); adds days, money and energy."
        ),
    ] = None
    assume: Annotated[
        list[str] | None,
        typer.Option("--assume", help="Assume mtbf_device_days=2000 or pue=1.1 of the whole run; may be repeated."),
    ] = None
    asked: Mapping[str, Any] = field(default_factory=dict, metadata={"typed": False})
    written: WrittenPlan | None = field(default=None, metadata={"typed": False})
    usual: tuple[str, ...] = field(default=(), metadata={"typed": False})

    @property
    def holder(self) -> WrittenPlan | None:
        """The plan file that holds the graph of the model, for which no name stands; None if a name does."""
        written = self.written
        holds = written is not None and written.graph is not None and self.model == written.asked["model"]
        return written if holds else None

    @property
    def named(self) -> str:
        """The word for the model in a command: its name, or the plan file that holds its graph."""
        return self.model if self.holder is None else str(self.holder.path)


# Parameters that take several choices as one mapping -> the class of these choices
_GROUPS: Mapping[str, type] = {"degrees": ParallelConfig, "options": RunOptions}


def _open_annotation(record: Choice) -> tuple[Any, object]:
    """Return the type with the option of a choice that is None unless it is given, so that a stack may set it."""
    default = "" if record.default is None else text_of(record, record.default)
    if record.written is Written.SWITCH:
        flags: tuple[str, ...] = (f"{record.flag}/--no-{record.flag.removeprefix('--')}",)
        default = "yes" if record.default else "no"
    else:
        flags = record.flags or (record.flag,)
    option = typer.Option(*flags, help=record.help, show_default=default or False)
    return Annotated[(bool if record.written is Written.SWITCH else str) | None, option], None


def _annotation(record: Choice) -> tuple[Any, object]:
    """Return the type with the option, and the default, of a choice on the command line."""
    default = None if record.left_out or record.default is None else plain_option(record.default)
    if record.written is Written.SWITCH:
        return Annotated[bool, typer.Option(*_flags(record), help=record.help)], default
    numbers = {Written.COUNT: int, Written.NUMBER: float}
    kind: Any = str if record.read is not None else numbers.get(record.written, str)
    if kind is str and default is not None:
        default = text_of(record, record.default) or None
    option = typer.Option(*(record.flags or (record.flag,)), help=record.help)
    return Annotated[kind if default is not None else kind | None, option], default


# Fields of TaskWords that are about the whole run, not about a step
OF_THE_RUN = ("tokens", "assume")


def with_choices(
    command: Callable[..., None], may_miss: Sequence[str] = (), without: Sequence[str] = ()
) -> Callable[..., None]:
    """Give a command an option for every field of its parameter `task`, every choice and every setting of a search.

    The choices are in place of `degrees` and of `options`, the settings of a search but its time in place of `search`;
    the command gets these parameters as mappings from names to values, and `task` as TaskWords.

    Args:
        may_miss: arguments that every other task has, and that are None here if they are not given.
        without: fields of TaskWords that the answer does not depend on: there is no option for them.
    """
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, list[str]] = {}
    given = [made for parameter in signature.parameters.values() for made in _parameters(parameter, groups, may_miss)]
    given = [made for made in given if made.name not in without]

    @functools.wraps(command)
    def called(context: typer.Context, **values: Any) -> None:
        typed = {name for name in values if getattr(context.get_parameter_source(name), "name", "") != "DEFAULT"}
        values, written = _completed(values, typed)
        usual = _usual(values, written, may_miss)
        values |= usual
        asked = _asked(values, written, may_miss)
        values |= {group: {name: values.pop(name) for name in names} for group, names in groups.items()}
        taken = {word.name: values.pop(word.name) for word in _typed_words() if word.name not in without}
        command(task=TaskWords(**taken, asked=asked, written=written, usual=tuple(usual)), **values)

    given.append(_option("context", typer.Context))
    called.__signature__ = signature.replace(parameters=given)  # type: ignore[attr-defined]
    called.__annotations__ = {parameter.name: parameter.annotation for parameter in given}
    return called


def _option(name: str, annotation: Any, default: object = inspect.Parameter.empty) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _parameters(
    parameter: inspect.Parameter, groups: dict[str, list[str]], may_miss: Sequence[str] = ()
) -> Iterator[inspect.Parameter]:
    """Return the parameter, or the options that it stands for; these are added to `groups` by its name."""
    name = parameter.name
    if parameter.annotation is TaskWords:
        for word, kind in _typed_words().items():
            default = word.default
            if word.name in _FLAG_OF:  # a plan file may bring it
                option = copy.copy(get_args(kind)[1])
                if word.name in _USUAL and word.name not in may_miss:
                    option.help += _OF_USUAL_RUN
                kind, default = Annotated[str | None, option], None
            yield from _parameters(
                _option(word.name, kind, inspect.Parameter.empty if default is MISSING else default), groups
            )
    elif name == "search":
        groups[name] = [record.name for record in OF_EVERY_COMMAND]
        for record in OF_EVERY_COMMAND:
            yield _option(record.name, *_annotation(record))
    elif name in _GROUPS:
        records = [record for record in choices_of(_GROUPS[name]) if record.help]
        groups[name] = [record.name for record in records]
        for record in records:
            yield _option(record.name, *(_open_annotation(record) if name == "options" else _annotation(record)))
    else:
        yield _option(name, parameter.annotation, parameter.default)


@lru_cache(maxsize=1)
def _typed_words() -> Mapping[Field[Any], Any]:
    """Return the fields of TaskWords that are typed, with their types."""
    types = get_type_hints(TaskWords, include_extras=True)
    return {word: types[word.name] for word in fields(TaskWords) if word.metadata.get("typed", True)}


def _asked(values: Mapping[str, Any], written: WrittenPlan | None, may_miss: Sequence[str]) -> dict[str, Any]:
    """Return the arguments that a plan file keeps. Raises: PinError if one is missing that every task has."""
    for name, flag in _FLAG_OF.items():
        if values[name] is None and name not in may_miss:
            if written is not None:
                written.check_taken()
                raise PinError(f"{written.path} does not say for which {name} it was planned; give {flag}")
            if values["model"].endswith(".json") and not Path(values["model"]).exists():
                raise PinError(f"model {values['model']!r}: there is no such file")
            raise PinError(
                f"{flag} is missing{', for example --cluster 8xh100' if name == 'cluster' else ''}; only a plan file "
                "in place of MODEL brings its own"
                f"{', and a catalog model its usual one' if name in _USUAL else ''}"
            )
    return {name: _plain(v) for name, v in values.items() if name not in (*_OUTPUT, *_DEGREES) and v is not None}


def _usual(values: Mapping[str, Any], written: WrittenPlan | None, may_miss: Sequence[str]) -> dict[str, str]:
    """Return the arguments that are not given, as the usual run of a catalog model says them."""
    missing = [name for name in _USUAL if values[name] is None and name not in may_miss]
    if not missing or written is not None or (values["cluster"] is None and "cluster" not in may_miss):
        return {}
    from autoplan.catalog import usual_run

    run = usual_run(values["model"])
    return {} if run is None else {name: str(getattr(run, name)) for name in missing}


def words_of(written: WrittenPlan) -> TaskWords:
    """Return the arguments of the task that a plan file answers."""
    options = {record.name: written.asked.get(record.name) for record in choices_of(RunOptions) if record.help}
    taken = {w.name: written.asked[w.name] for w in fields(TaskWords) if w.name in written.asked}
    for name in ("model", *_FLAG_OF):
        if name not in taken:
            raise PinError(f"{written.path} does not say for which {name} it was planned; plan again")
    return TaskWords(**{**taken, "options": options}, asked=written.asked, written=written)


# Arguments that change how an answer is shown or how long it may take, not what is asked
_OUTPUT = frozenset(
    {
        "vs",
        "only",
        "every_value",
        "settings",
        "pareto",
        "seconds",
        "cache",
        "ways",
        "deadline",
        "budget",
        "devices",
        "as_json",
        "verbose",
        "by_kind",
        "csv",
        "timeline",
        "top",
        "time_limit_s",
        "vary",
        "from_file",
        "format",
        "report",
        "better",
        "out",
    }
)
_DEGREES = frozenset(record.name for record in choices_of(ParallelConfig))  # a plan file has all of them as its plan
_USUAL = ("seq_len", "global_batch_size")
_OF_USUAL_RUN = " Default: that of the catalog model's usual run."
_FLAG_OF = {"cluster": "--cluster", "seq_len": "--seq-len", "global_batch_size": "--global-batch-size"}


def _plain(value: Any) -> Any:
    """Return an argument as JSON data."""
    return str(value) if isinstance(value, Path) else list(value) if isinstance(value, tuple) else value


def _completed(values: dict[str, Any], typed: set[str]) -> tuple[dict[str, Any], WrittenPlan | None]:
    """Return the arguments, those that were not typed from the plan file in place of the model, and this file.

    Degrees that were not typed become None: the configuration of the file has them.
    """
    written = find_written(values["model"] or "")
    if values.get("from_file") is not None:
        if written is not None:
            raise PinError(f"--from {values['from_file']} with the plan file {values['model']}: give one of them")
        from autoplan.report.config_file import written_config

        written = written_config(values, typed)
    elif values.get("format") is not None:
        raise PinError(f"--format {values['format']} is of the file of --from, which is missing")
    if written is None:
        return values, None
    out = {
        name: value if name in typed else None if name in _DEGREES else written.asked.get(name, value)
        for name, value in values.items()
    }
    if "model" not in written.asked:
        raise PinError(f"{written.path} does not say for which model it was planned; plan again")
    return {**out, "model": written.asked["model"]}, written
