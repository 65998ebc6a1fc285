"""Arguments and options that several commands of the command line share."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from autoplan.config.choice import Choice, Written, choices_of
from autoplan.config.choices import plain_option, text_of
from autoplan.config.parallel import ParallelConfig, RunOptions

Model = Annotated[
    str, typer.Argument(help="Catalog name (autoplan models), a Hugging Face config.json, or package.module:factory.")
]
ClusterText = Annotated[
    str,
    typer.Option(
        "--cluster",
        "-c",
        help="Nodes x devices per node x device (8x8xh100-sxm5-80gb), nodes x cloud instance (8xp5.48xlarge), local:N, "
        "or a YAML file; with overrides @nic=400,price=2.5.",
    ),
]
SeqLen = Annotated[
    str,
    typer.Option("--seq-len", "--seq", help="Tokens per sequence, in powers of 1024: 8k is 8,192, 1M is 1,048,576."),
]
TargetLen = Annotated[
    str | None,
    typer.Option(
        "--target-len",
        help="Tokens per target sequence of an encoder-decoder, read as --seq-len; without it as that.",
    ),
]
BatchSize = Annotated[
    str,
    typer.Option("--global-batch-size", "--gbs", help="Sequences per step, over all devices; 1k is 1,024."),
]
PinTexts = Annotated[
    list[str] | None,
    typer.Option("--pin", help="Fix a choice, for example tp=8, recompute=full or stages=10,11,11; may be repeated."),
]
PrecisionName = Annotated[
    str,
    typer.Option(
        help="bf16, fp16, fp32, fp8, mxfp8, fp4, or native (the model's own dtypes); with -grad16 behind it "
        "(bf16-grad16), gradients are 16 bits."
    ),
]
ModeName = Annotated[str, typer.Option(help="How the program runs: eager, fused or compiled.")]
ConstantsFile = Annotated[
    Path | None, typer.Option("--constants", help="Constants of the cost model: a file of autoplan calibrate.")
]
ProfileName = Annotated[str | None, typer.Option("--profile", help="Measured times: a profile's name or file.")]
Tokens = Annotated[
    str | None,
    typer.Option(
        help="Tokens of the whole run, in powers of 1000 (300B is 300,000,000,000): adds days, money, energy."
    ),
]
Assumed = Annotated[
    list[str] | None,
    typer.Option("--assume", help="Of the whole run: mtbf_device_days=2000, pue=1.1; may be repeated."),
]
CsvPath = Annotated[Path | None, typer.Option("--csv", help="Write the rows to this file too, each when it is there.")]
Runnable = Annotated[bool, typer.Option("--runnable", help="Only what autoplan's own runtime runs today.")]
AsJson = Annotated[bool, typer.Option("--json", help="JSON instead of text.")]
TimeLimit = Annotated[float, typer.Option("--time-limit", help="Seconds; then the best so far, labelled.", min=1)]


# Parameters of commands that take several choices as one mapping -> the class of these choices
_GROUPS: Mapping[str, type] = {"degrees": ParallelConfig, "options": RunOptions}
CHOSEN: Mapping[str, Any] = {}  # the default of such a parameter


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
    """Give a command an option for every choice, in place of its parameters `degrees` and `options`.

    The command gets these parameters as mappings from the choices' names to their values.
    """
    signature = inspect.signature(command, eval_str=True)
    given, groups = [], {}
    for parameter in signature.parameters.values():
        if parameter.name not in _GROUPS:
            given.append(parameter)
            continue
        records = [record for record in choices_of(_GROUPS[parameter.name]) if record.help]
        groups[parameter.name] = [record.name for record in records]
        for record in records:
            kind, default = _annotation(record)
            given.append(inspect.Parameter(record.name, parameter.kind, default=default, annotation=kind))

    @functools.wraps(command)
    def called(**values: Any) -> None:
        chosen = {group: {name: values.pop(name) for name in names} for group, names in groups.items()}
        command(**chosen, **values)

    called.__signature__ = signature.replace(parameters=given)  # type: ignore[attr-defined]
    called.__annotations__ = {parameter.name: parameter.annotation for parameter in given}
    return called
