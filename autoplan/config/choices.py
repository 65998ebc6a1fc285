"""Reading and writing choices through their records: as data, as words of a command, as a label.

`plan --pin`, `whatif --vary`, capacity files, `estimate` and calibration files take exactly the choices of
`ParallelConfig`, under the names of the pins. `autoplan.program.legality` checks whether a value is legal for a given
model, cluster and run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

from autoplan.config.choice import Choice, choices_of
from autoplan.config.keys import check_names
from autoplan.config.parallel import Mode, ParallelConfig, RunOptions
from autoplan.config.precision import precision_of
from autoplan.config.settings import setting
from autoplan.errors import PinError

CHOICES: tuple[Choice, ...] = choices_of(ParallelConfig)
PINS: tuple[str, ...] = tuple(c.name for c in CHOICES)
OPTIONS: tuple[str, ...] = tuple(c.name for c in choices_of(RunOptions))  # keys of files


def check_values(values: Mapping[str, Any], known: Sequence[str] = PINS, what: str = "pin") -> None:
    """Raise PinError for unknown names, and for values that no cluster or model could make legal.

    Args:
        values: The values by name.
        known: The accepted names, a subset of PINS.
        what: The word for one choice in messages.
    """
    check_names(values, known, what=what)
    for record in CHOICES:
        value = values.get(record.name)
        left_open = record.name not in values or (value is None and record.may_be_open)
        reason = None if left_open else record.reason(value)
        if reason is not None:
            raise PinError(reason, (record.name,))


# -- data --------------------------------------------------------------------------------------------------------------


def plain_option(value: Any) -> Any:
    """Return the value of a choice as JSON data: lists, mappings, words and numbers."""
    if isinstance(value, StrEnum):
        return str(value)
    if isinstance(value, frozenset):
        return sorted(value)
    return list(value) if isinstance(value, tuple) else dict(value) if isinstance(value, Mapping) else value


def config_data(config: ParallelConfig) -> dict[str, Any]:
    """Return a plan as plain data."""
    values = {c: getattr(config, c.name) for c in CHOICES}
    out = {c.name: plain_option(value) for c, value in values.items() if c.reported or value != c.default}
    return {**out, "etp": config.tp if config.etp is None else config.etp}


def option_data(options: RunOptions) -> dict[str, Any]:
    """Return all options of a run as plain data, which `options_of` reads."""
    return {name: plain_option(getattr(options, name)) for name in OPTIONS}


def options_of(data: object) -> RunOptions:
    """Read run options from a mapping by name, as a file or the command line holds it.

    None, and keys that are missing or None, give the defaults.

    Raises: PinError that names the key, its value and a value that works.
    """
    if data is None or isinstance(data, RunOptions):
        return RunOptions() if data is None else data
    if not isinstance(data, Mapping):
        raise PinError(f"options={data!r} must be a mapping, for example {{launch: graphs}}")
    check_names(data, OPTIONS, what="option")
    return RunOptions(**{name: value for name, value in data.items() if value is not None})


def read_mode(name: object) -> Mode:
    """Return the mode with this name. Raises PinError that names the known modes."""
    mode: Mode = setting("mode").value_of(name)
    return mode


# -- words and labels --------------------------------------------------------------------------------------------------


def text_of(record: Choice, value: Any, layers: Sequence[str] = ()) -> str:
    """Write a value as the command line takes it. `layers`: the names of the model's layers."""
    if record.text is not None:
        return record.text(value, layers)
    if isinstance(value, tuple | frozenset):
        return ",".join(map(str, sorted(value) if isinstance(value, frozenset) else value))
    return str(value)


def choice_words(
    chosen: ParallelConfig | RunOptions, layers: Sequence[str] = (), against: RunOptions | None = None
) -> list[str]:
    """Return the command-line words for every choice that differs from its default or that must always be given.

    Args:
        layers: The names of the model's layers.
        against: Options that hold if nothing is given; None: the defaults.
    """
    words: list[str] = []
    for record in CHOICES if isinstance(chosen, ParallelConfig) else choices_of(RunOptions):
        value = getattr(chosen, record.name)
        default = value == record.default or (
            value is not None and text_of(record, value, layers) == _default_text(record)
        )
        if against is not None:
            default = value == getattr(against, record.name)
        if not record.help or default if record.said is None else not record.said(chosen):
            continue
        if isinstance(value, bool):
            words.append(record.flag if value else f"--no-{record.flag.removeprefix('--')}")
        else:
            words += [record.flag, text_of(record, value, layers)]
    return words


def _default_text(record: Choice) -> str | None:
    return None if record.default is None else text_of(record, record.default)


def option_texts(options: RunOptions, precision: str = "") -> list[str]:
    """Return a short phrase for every option that differs from its default and matters in a precision (empty: any)."""
    out, wide = [], bool(precision) and precision_of(precision).matmul is None
    for record in choices_of(RunOptions):
        value = getattr(options, record.name)
        if wide and record.of_narrow:
            continue
        if value != record.default and (not record.said_with or getattr(options, record.said_with)):
            out.append(record.said_as.format(" and ".join(sorted(value)) if isinstance(value, frozenset) else value))
    return out


def config_label(config: ParallelConfig, layers: int = 0) -> str:
    """Return a plan as one line: `pp2 dp8 tp4 zero1 mbs1 x128 recompute 3/32`.

    Degrees of 1 and the 1F1B schedule are omitted. `layers`: the number of layers of the model, or 0 if unknown.
    """
    labelled = sorted((c for c in CHOICES if c.label is not None), key=lambda c: c.label_at)
    return " ".join(filter(None, (c.label(config, layers) for c in labelled if c.label is not None)))
