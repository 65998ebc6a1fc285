"""The record of a choice: everything that commands, files and reports know of one degree, pin or run option.

The record is attached to the dataclass field that holds the choice (`ParallelConfig`, `RunOptions`). The command-line
options, the keys of JSON and YAML files, `whatif --vary`, labels and proposed commands are derived from the records
(`autoplan.config.choices`). A choice is therefore declared once, at its field, and read where it is priced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum, StrEnum
from functools import lru_cache
from typing import Any

from autoplan.config.kernels import Mode
from autoplan.errors import PinError


class Written(Enum):
    """The text form of a value."""

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
        name: The name of the field and of the pin, in JSON and YAML; on the command line with `-` for `_`.
        default: The default of the field.
        help: The help text of the command line; empty if the command line has no such option.
        about: The effect, in Markdown, for the tables of docs; empty: `help`. Of a switch that is on by default: of
            turning it off.
        written: How a value is written as text.
        words: The enum of the legal words, or the words themselves; empty if `obstacle` decides.
        former: The words for false and true, which older files have for a choice that was a switch.
        flags: The flags on the command line. Empty: `--name`, and `--no-name` for a switch that is on by default.
        left_out: True if the command line has no default of its own, because the value follows from other choices.
        obstacle: Returns the reason why a value is illegal for every model and cluster, starting with `name=value`, or
            None if it is legal for some.
        least: The smallest legal number.
        most: The largest number that can be varied.
        varied: The description under which a sweep varies it; empty for pins, and for what no sweep varies.
        may_be_open: True if None means that the choice is not pinned.
        read: Parses the text of the command line. The second argument is the names of the model's layers.
        text: Writes a value in the form that `read` parses.
        said: Returns True for a configuration whose proposed command names the choice. None: the command names every
            value other than the default.
        said_as: A template by which a report describes a value other than the default; `{}` stands for the value.
        said_with: A switch; if it is off, the report omits `said_as`.
        of_narrow: True if the option changes only runs whose products take 8 or 4 bits.
        of_step: True if the option changes whole steps only, and the price of no single operation.
        label: Returns this choice's part of a plan's label, or "". The second argument is the number of layers of the
            model, or 0 if unknown.
        label_at: The sort key of the parts of a label.
        word: The name in reports; empty: `name`.
        open_word: The value None in reports.
        reported: True if a plan in JSON contains the choice.
        executed: True if the runtime executes every value, or if a separate rule says which. Otherwise the values
            other than the default that it executes, each with the modes in which it does. The default is always
            executed.
    """

    name: str = ""
    default: Any = None
    help: str = ""
    about: str = ""
    written: Written = Written.COUNT
    words: type[StrEnum] | tuple[str, ...] = ()
    former: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    left_out: bool = False
    obstacle: Callable[[str, object], str | None] | None = None
    least: float = 1
    most: float = 10**9
    varied: str = ""
    may_be_open: bool = False
    read: Callable[[str, Sequence[str]], object] | None = None
    text: Callable[[Any, Sequence[str]], str] | None = None
    said: Callable[[Any], bool] | None = None
    said_as: str = ""
    said_with: str = ""
    of_narrow: bool = False
    of_step: bool = False
    label: Callable[[Any, int], str] | None = None
    label_at: int = 0
    word: str = ""
    open_word: str = "default"
    reported: bool = True
    executed: bool | tuple[tuple[Any, tuple[Mode, ...]], ...] = False

    @property
    def flag(self) -> str:
        """The flag that reports use."""
        return self.flags[0] if self.flags else f"--{self.name.replace('_', '-')}"

    def runs(self, value: object, mode: Mode) -> bool:
        """Return True if autoplan's own runtime executes `value` in `mode`."""
        if isinstance(self.executed, bool):
            return self.executed or value == self.default
        return value == self.default or any(value == one and mode in modes for one, modes in self.executed)

    def executed_in(self, mode: Mode) -> Any:
        """Return a value that the runtime executes in `mode`: the default, or what a default of None stands for."""
        named = () if isinstance(self.executed, bool) else self.executed
        return next((one for one, modes in named if self.default is None and mode in modes), self.default)

    def reason(self, value: object) -> str | None:
        """Return the reason why `value` is illegal for every model and cluster, or None if it is legal for some."""
        if self.obstacle is not None:
            return self.obstacle(self.name, value)
        if self.written is Written.COUNT and not is_count(value, int(self.least)):
            return f"{self.name}={value!r}: must be a whole number of at least {int(self.least)}"
        if self.written is Written.COUNT and value > self.most:  # type: ignore[operator]
            return f"{self.name}={value!r}: must be a whole number of at most {int(self.most):,}"
        return None

    def value_of(self, given: Any) -> Any:
        """Return the value that a text or plain value stands for.

        Raises: PinError for a word that is not known, and for another type.
        """
        if self.written is Written.SWITCH and not isinstance(given, bool):
            raise PinError(f"{self.name}={given!r} must be true or false")
        if self.written is Written.WORD:
            if isinstance(given, bool) and self.former:
                given = self.former[given]
            if given not in tuple(self.words):
                raise PinError(f"{self.name} {given!r} is not known; use {', '.join(self.words)}")
            return self.words(given) if isinstance(self.words, type) else given
        if self.written is Written.WORDS:
            parts = given.split(",") if isinstance(given, str) else given
            if not isinstance(parts, Sequence | frozenset | set):
                raise PinError(f"{self.name}={given!r} must be a list of {', '.join(self.words)}")
            return frozenset(part.strip() for part in map(str, parts) if part.strip())
        return self.read(given, ()) if self.read is not None and isinstance(given, str) else given


def is_count(value: object, least: int = 1) -> bool:
    """Return True for a whole number of at least `least`. Booleans do not count as numbers."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def choice(default: Any, help: str = "", **record: Any) -> Any:
    """Return a dataclass field with the record of the choice that it holds (see `Choice`)."""
    return field(default=default, metadata={"choice": Choice(help=help, **record)})


@lru_cache(maxsize=8)
def choices_of(kind: type) -> tuple[Choice, ...]:
    """Return the records of the fields of a dataclass, in field order."""
    return tuple(replace(f.metadata["choice"], name=f.name, default=f.default) for f in fields(kind))
