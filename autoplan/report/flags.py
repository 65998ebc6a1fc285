"""Arguments and options that several commands of the command line share."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer

from autoplan.config.choice import Choice, Written, choices_of
from autoplan.config.choices import plain_option, text_of
from autoplan.config.parallel import ParallelConfig, RunOptions
from autoplan.errors import PinError
from autoplan.report.written import WrittenPlan, find_written

PinTexts = Annotated[
    list[str] | None,
    typer.Option("--pin", help="Fix a choice, for example tp=8, recompute=full or stages=10,11,11; may be repeated."),
]
ConstantsFile = Annotated[
    Path | None, typer.Option("--constants", help="Constants of the cost model: a file written by autoplan calibrate.")
]
ProfileName = Annotated[str | None, typer.Option("--profile", help="Measured times: the name or file of a profile.")]
CsvPath = Annotated[Path | None, typer.Option("--csv", help="Also write the rows to this file, one by one.")]
Runnable = Annotated[bool, typer.Option("--runnable", help="Only what autoplan's own runtime can execute.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
TimeLimit = Annotated[float, typer.Option("--time-limit", help="Seconds; then the best plan so far, marked.", min=1)]
MemoryRisk = Annotated[
    float,
    typer.Option(
        "--memory-risk",
        help="Accepted probability that the plan runs out of memory: 0.05 keeps the high end of its memory within the "
        "device, 0.5 the expected need.",
    ),
]
EqualWithin = Annotated[
    float,
    typer.Option(
        "--equal-within",
        help="Plans within this share of the fastest step count as equal, and the simplest of them is taken; 0 takes "
        "the fastest.",
    ),
]
CHOSEN: Mapping[str, Any] = {}  # the default of a parameter that takes several choices


@dataclass(frozen=True)
class TaskWords:
    """The arguments that plan, estimate and whatif share, as they were typed or as a plan file gives them.

    Attributes:
        asked: every argument of the command that says what to answer, by name: what a plan file keeps.
        written: the plan file that was given in place of the model.
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
    seq_len: Annotated[
        str,
        typer.Option(
            "--seq-len", "--seq", help="Tokens per sequence, in powers of 1024: 8k is 8,192, 1M is 1,048,576."
        ),
    ]
    global_batch_size: Annotated[
        str,
        typer.Option("--global-batch-size", "--gbs", help="Sequences per step, over all devices; 1k is 1,024."),
    ]
    precision: Annotated[
        str | None,
        typer.Option(
            help="bf16, fp16, fp32, fp8, mxfp8, fp4, or native (the model's own dtypes); the suffix -grad16 "
            "(bf16-grad16) keeps gradients in 16 bits, -grad32 overrides those of --like.",
            show_default="bf16",
        ),
    ] = None
    mode: Annotated[
        str | None,
        typer.Option(help="How the program runs: eager, fused or compiled; default: that of --like, else eager."),
    ] = None
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
    target_len: Annotated[
        str | None,
        typer.Option(
            "--target-len",
            help="Tokens per target sequence of an encoder-decoder, read as --seq-len; default: the same.",
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
        flags = (record.flag, *([f"--no-{record.flag.removeprefix('--')}"] if default else []))
        return Annotated[bool, typer.Option("/".join(flags), help=record.help)], default
    numbers = {Written.COUNT: int, Written.NUMBER: float}
    kind: Any = str if record.read is not None else numbers.get(record.written, str)
    if kind is str and default is not None:
        default = text_of(record, record.default) or None
    option = typer.Option(*(record.flags or (record.flag,)), help=record.help)
    return Annotated[kind if default is not None else kind | None, option], default


def with_choices(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command an option for every field of its parameter `task`, and for every choice.

    The choices are in place of `degrees` and of `options`; the command gets these parameters as mappings from the
    choices' names to their values, and `task` as TaskWords.
    """
    signature = inspect.signature(command, eval_str=True)
    given, groups = [], {}

    def add(name: str, annotation: Any, default: object) -> None:
        given.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation))

    def expand(name: str, annotation: Any, default: object) -> None:
        """Add a parameter, or the options that it stands for."""
        if name not in _GROUPS:
            return add(name, annotation, default)
        records = [record for record in choices_of(_GROUPS[name]) if record.help]
        groups[name] = [record.name for record in records]
        for record in records:
            kind, value = _open_annotation(record) if name == "options" else _annotation(record)
            add(record.name, kind, value)

    words = [word for word in fields(TaskWords) if word.metadata.get("typed", True)]
    needed = [word.name for word in words if word.default is MISSING and word.default_factory is MISSING]
    for parameter in signature.parameters.values():
        if parameter.annotation is TaskWords:
            types = get_type_hints(TaskWords, include_extras=True)
            for word in words:
                if word.name == "model":
                    add(word.name, types[word.name], inspect.Parameter.empty)
                elif word.name in needed:  # a plan file may bring it
                    expand(word.name, Annotated[str | None, *get_args(types[word.name])[1:]], None)
                else:
                    expand(word.name, types[word.name], word.default)
        else:
            expand(parameter.name, parameter.annotation, parameter.default)

    @functools.wraps(command)
    def called(context: typer.Context, **values: Any) -> None:
        typed = {name for name in values if getattr(context.get_parameter_source(name), "name", "") != "DEFAULT"}
        values, written = _completed(values, typed)
        for name in needed:
            if values[name] is None:
                raise PinError(f"{_FLAG_OF[name]} is missing; only a plan file in place of MODEL brings its own")
        asked = {name: _plain(v) for name, v in values.items() if name not in (*_OUTPUT, *_DEGREES) and v is not None}
        values |= {group: {name: values.pop(name) for name in names} for group, names in groups.items()}
        taken = {word.name: values.pop(word.name) for word in words}
        command(TaskWords(**taken, asked=asked, written=written), **values)

    given.append(inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context))
    called.__signature__ = signature.replace(parameters=given)  # type: ignore[attr-defined]
    called.__annotations__ = {parameter.name: parameter.annotation for parameter in given}
    return called


def words_of(written: WrittenPlan) -> TaskWords:
    """Return the arguments of the task that a plan file answers."""
    options = {record.name: written.asked.get(record.name) for record in choices_of(RunOptions) if record.help}
    taken = {w.name: written.asked[w.name] for w in fields(TaskWords) if w.name in written.asked}
    return TaskWords(**{**taken, "options": options}, asked=written.asked, written=written)


# Arguments that change how an answer is shown or how long it may take, not what is asked
_OUTPUT = frozenset({"as_json", "csv", "timeline", "top", "time_limit", "vary"})
_DEGREES = frozenset(record.name for record in choices_of(ParallelConfig))  # a plan file has all of them as its plan
_FLAG_OF = {"cluster": "--cluster", "seq_len": "--seq-len", "global_batch_size": "--global-batch-size"}


def _plain(value: Any) -> Any:
    """Return an argument as JSON data."""
    return str(value) if isinstance(value, Path) else list(value) if isinstance(value, tuple) else value


def _completed(values: dict[str, Any], typed: set[str]) -> tuple[dict[str, Any], WrittenPlan | None]:
    """Return the arguments, those that were not typed from the plan file in place of the model, and this file.

    Degrees that were not typed become None: the configuration of the file has them.
    """
    written = find_written(values["model"])
    if written is None:
        return values, None
    out = {
        name: value if name in typed else None if name in _DEGREES else written.asked.get(name, value)
        for name, value in values.items()
    }
    return {**out, "model": written.asked["model"]}, written
