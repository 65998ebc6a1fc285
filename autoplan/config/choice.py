"""The record of a choice: all that commands, files and reports know of one degree, pin or option of a run.

It stands at the field of the dataclass that holds the choice (`ParallelConfig`, `RunOptions`). From the records follow
the options of the command line, what JSON and YAML files hold, `whatif --vary`, labels and proposed commands
(`autoplan.config.records`), so that a new choice is declared at its field and read where it is priced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum, StrEnum
from functools import lru_cache
from typing import Any


class Written(Enum):
    """How a value is written in text."""

    COUNT = "a whole number"
    NUMBER = "a number"
    WORD = "a word"
    LIST = "whole numbers with commas"
    SWITCH = "true or false"
    WORDS = "words with commas"


@dataclass(frozen=True)
class Choice:
    """One choice.

    Attributes:
        name: of the field and the pin, in JSON and YAML, and with `-` for `_` on the command line.
        default: of the field.
        help: of the command line; empty: the command line has no such option.
        about: what a pin of it does, in Markdown, for the README; empty: `help`.
        written: how a value is written in text.
        words: the enum whose words are legal, or the words themselves; none: `obstacle` decides.
        flags: on the command line; none: `--name`, of a switch that is on by default also `--no-name`.
        left_out: True if the command line has no default of its own: the value follows from the others.
        obstacle: returns why a value is legal for no model and no cluster, beginning with `name=value`, or None.
        least: the least number that is legal.
        most: the largest number that can be varied.
        may_be_open: None is no pin of it.
        read: returns the value that a text of the command line names; the second argument: the model's layers.
        text: writes a value as `read` reads it.
        said: True for a configuration whose proposed command names the choice; None: where it is not the default.
        said_as: a template that describes another value than the default in a report; `{}`: the value.
        said_with: the switch without which `said_as` goes without saying.
        label: returns the part of a plan's label, "" for none; the second argument: layers of the model, 0: unknown.
        label_at: parts of a label are ordered by it.
        reported: a plan in JSON has it.
        executed: the runtime executes every value of it, or a rule of its own says which.
    """

    name: str = ""
    default: Any = None
    help: str = ""
    about: str = ""
    written: Written = Written.COUNT
    words: type[StrEnum] | tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    left_out: bool = False
    obstacle: Callable[[str, object], str | None] | None = None
    least: float = 1
    most: float = 10**9
    may_be_open: bool = False
    read: Callable[[str, Sequence[str]], object] | None = None
    text: Callable[[Any, Sequence[str]], str] | None = None
    said: Callable[[Any], bool] | None = None
    said_as: str = ""
    said_with: str = ""
    label: Callable[[Any, int], str] | None = None
    label_at: int = 0
    reported: bool = True
    executed: bool = False

    @property
    def flag(self) -> str:
        """The name on the command line that reports use."""
        return self.flags[0] if self.flags else f"--{self.name.replace('_', '-')}"

    def reason(self, value: object) -> str | None:
        """Return why a value is legal for no model and no cluster, or None."""
        if self.obstacle is not None:
            return self.obstacle(self.name, value)
        if self.written is Written.COUNT and not is_count(value, int(self.least)):
            return f"{self.name}={value!r}: must be a whole number of at least {int(self.least)}"
        return None


def is_count(value: object, least: int = 1) -> bool:
    """True for a whole number of at least `least`; booleans are no numbers."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def choice(default: Any, help: str = "", **record: Any) -> Any:
    """A dataclass field with the record of the choice that it holds (see `Choice`)."""
    return field(default=default, metadata={"choice": Choice(help=help, **record)})


@lru_cache(maxsize=8)
def choices_of(kind: type) -> tuple[Choice, ...]:
    """Return the records of the fields of a dataclass, in their order."""
    return tuple(replace(f.metadata["choice"], name=f.name, default=f.default) for f in fields(kind))
