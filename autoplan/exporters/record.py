"""The record of a target: its fields, its files, and what it cannot say.

A field says which choices it decides, how they are written, and how they are read back. An export is read back at once;
whatever comes back as another value is named, so that nothing can be lost silently.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from autoplan.config.context_methods import GATHER, RING
from autoplan.config.precision import AUTOCAST, PRECISIONS, PrecisionName, read_precision
from autoplan.errors import PinError
from autoplan.exporters.schema import Schema
from autoplan.exporters.setup import Setup, Task
from autoplan.stacks.like import GRADIENTS_32, Like, read_like
from autoplan.stacks.records import version_of, year_of


class Recognised(PinError):
    """A file that is of a target for certain, and of a kind that is not read."""


Values = Mapping[str, Any]  # of a target's file: path with dots -> value; of a setup: name -> value


@dataclass(frozen=True)
class Document:
    """The values of a target's file that are read.

    Attributes:
        values: what the file says, by path.
        year: the version of the target, in years.
        task: the model and the devices, as far as they are known.
        partial: True if functions that are not read set values, too: what the file does not say is not the target's
            default, but as in its stack.
        unknown: paths whose value the file takes from elsewhere -> its expression.
        seen: the paths that were asked for.
    """

    values: Values
    schema: Schema
    year: float
    task: Task
    partial: bool = False
    unknown: Values = field(default_factory=dict)
    seen: set[str] = field(default_factory=set, compare=False)

    def has(self, path: str) -> bool:
        """Return True if the file says something at a path, or below it."""
        self.seen.add(path)
        return path in self.values or any(name.startswith(f"{path}.") for name in self.values)

    @property
    def usual_overlap(self) -> frozenset[str]:
        """The overlaps of the target's stack, which hold for a file that leaves them to functions."""
        return frozenset(self._like.options(self.task.device).overlap)

    @property
    def usual_mtp(self) -> int:
        """The layers for tokens after the next that the target's stack adds to the model."""
        return self._like.mtp_layers

    @property
    def _like(self) -> Like:
        return read_like(f"{self.schema.name}@{version_of(self.year)}").on(self.task.device, self.task.model)

    @property
    def vague(self) -> list[str]:
        """The paths that were asked for whose value is not known, as `path=expression`."""
        asked = sorted(path for path in self.seen if path not in self.values)
        found = (self._unknown_at(path) for path in asked)
        return list(dict.fromkeys(text for text in found if text is not None))

    def _unknown_at(self, path: str) -> str | None:
        """Return a path with the expression that decides it, or a section that it is in; None if the file does."""
        place = path
        while place and place not in self.unknown and not self.partial:
            place = place.rpartition(".")[0]
        return f"{path}={self.unknown[place]}" if place in self.unknown else None

    def get(self, path: str) -> Any:
        """Return the value of the file at a path, else the target's default; None if that does not hold."""
        self.seen.add(path)
        if path in self.values:
            return self.values[path]
        return None if self.partial else self.schema.default(path)

    def count(self, path: str, default: int = 1, also: tuple[int, ...] = ()) -> int:
        """Return a whole number of at least 1 at a path; `default` if it is not said. PinError for anything else.

        Args:
            also: Smaller numbers that the target takes; `default` is one of them.
        """
        value = self.get(path)
        if value is None or value == "auto":
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise PinError(f"{path}={value!r} must be a whole number, for example {path}={default}")
        if value < 1 and value not in (default, *also):
            raise PinError(f"{path}={value} must be at least 1; nearest: {path}={max(1, default)}")
        return value

    def word(self, path: str, words: Mapping[Any, Any], default: Any = None) -> Any:
        """Return the meaning of a word of the target. PinError names the known words."""
        value = self.get(path)
        if value is None:
            return default
        if isinstance(value, str) and value not in words:
            value = value.lower()
        if value not in words:
            raise PinError(f"{path}={value!r} is not known; use {', '.join(map(str, words))}")
        return words[value]


def section(document: Document, prefix: str, schema: Schema) -> Document:
    """Return a section of a file as the input of another target, whose paths have no prefix."""
    below = (
        {p.removeprefix(prefix): v for p, v in of.items() if p.startswith(prefix)}
        for of in (document.values, document.unknown)
    )
    values, unknown = below
    seen = _SeenBelow(document.seen, prefix)
    return Document(values, schema, document.year, document.task, document.partial, unknown, seen)


class _SeenBelow(set[str]):
    """Paths of a section that were asked for; the whole file knows them with their prefix."""

    def __init__(self, whole: set[str], prefix: str) -> None:
        super().__init__()
        self._whole, self._prefix = whole, prefix

    def add(self, element: str) -> None:
        self._whole.add(self._prefix + element)
        super().add(element)


@dataclass(frozen=True)
class Field:
    """One field of a target, or a few that belong together.

    Attributes:
        names: the choices that it decides.
        write: returns what is written for a setup, by path; nothing for what is the target's default.
        read: returns the choices by name, from the file and from what was read before; nothing if it does not say.
        since, until: years between which the field exists.
    """

    names: tuple[str, ...]
    write: Callable[[Setup], Values]
    read: Callable[[Document, Mapping[str, Any]], Values]
    since: float = 0.0
    until: float = 9999.0

    def at(self, year: float) -> bool:
        """Return True if the field exists in a year."""
        return self.since <= year < self.until


class Reader(Protocol):
    """A text form in which the values of a target are read."""

    @property
    def suffix(self) -> str:
        """The suffix of its files."""

    def read(self, text: str, where: str) -> dict[str, Any]:
        """Return the values by path. PinError if the text is not of this syntax."""


class Syntax(Reader, Protocol):
    """The text form of the values of a target."""

    def write(self, values: Values, heading: Sequence[str], about: Setup) -> str:
        """Return the text of the values; `heading`: lines about them."""


@dataclass(frozen=True)
class TargetRule:
    """Something that the target itself refuses: returns what is wrong and what would work, or None."""

    broken: Callable[[Document, Mapping[str, Any]], str | None]
    warns: bool = False


def of_model(size: str, *paths: str) -> TargetRule:
    """Return the rule that a file is for the model that it is read for.

    Args:
        size: the name of a size in Task; 0 there if it is not known.
        paths: where a file may name it.
    """

    def found(document: Document, found: Values) -> str | None:
        known, path = getattr(document.task, size), next((path for path in paths if document.has(path)), None)
        given = None if path is None else document.get(path)
        if not known or isinstance(given, bool) or not isinstance(given, int) or given == known:
            return None
        return f"{path}={given}, but {document.task.model} has {known}; its own are priced"

    return TargetRule(found, warns=True)


_OF_NOBODY = {  # choices that the files of most targets lack
    "state_slack": "a setting of autoplan's layouts",
    "expandable_segments": "PYTORCH_CUDA_ALLOC_CONF in the environment of the run says so",
}


@dataclass(frozen=True)
class Target:
    """A framework whose input can be written and read.

    Attributes:
        about: what is written.
        stack: the stack whose settings hold for what a file does not say.
        files: the syntax by the year since which it holds, in order.
        fields: read in this order, so that a field may build on those before it.
        marks: paths of which a file of this target has at least one, and no other target.
        elsewhere: choice -> where it is said instead of the file.
        cannot: choice -> why the target cannot say it.
        launch: returns the command that starts a run of the written file.
        stack_of: returns another stack that runs a file, for targets that drive others.
        rules: what the target itself refuses.
        also: syntaxes that are read beside that of its own files.
        marks_also: as `marks`, for these syntaxes; () for the marks that are in a section.
        version_in: returns the version that the values of a file are of, if they tell.
        base: path -> value that is written where no field writes another, for targets whose file changes a
            configuration that has values of its own.
        named_files: fields whose value may be the name of a file of JSON or YAML, which is then read below them.
        renamed: returns the values of a file by the paths of the schema; called again with those of each named file.
    """

    name: str
    about: str
    stack: str
    files: tuple[tuple[float, Syntax], ...]
    fields: tuple[Field, ...]
    marks: tuple[str, ...]
    launch: Callable[[Setup, str, float], list[str]]
    elsewhere: Mapping[str, str] = field(default_factory=dict, hash=False)
    cannot: Mapping[str, str] = field(default_factory=dict, hash=False)
    stack_of: Callable[[Document], str] | None = None
    rules: tuple[TargetRule, ...] = ()
    also: tuple[Reader, ...] = ()
    marks_also: tuple[str, ...] = ()
    version_in: Callable[[Values], str | None] | None = None
    base: Mapping[str, Any] = field(default_factory=dict, hash=False)
    named_files: tuple[str, ...] = ()
    renamed: Callable[[Values], Values] | None = None

    def why_not(self, name: str) -> str:
        """Return why the target cannot say a choice."""
        return self.cannot.get(name, _OF_NOBODY.get(name, "no field of it says so"))

    @cached_property
    def schema(self) -> Schema:
        """The fields of the target as its source has them."""
        return Schema.load(self.name)

    def syntax(self, year: float) -> Syntax:
        """Return the syntax of the target's files in a year."""
        return next(syntax for since, syntax in reversed(self.files) if year >= since)

    def marks_of(self, syntax: Reader) -> Sequence[str]:
        """Return the marks by which a file of a syntax is of this target."""
        if syntax not in self.also:
            return self.marks
        return self.marks_also or [mark for mark in self.marks if "." in mark]

    def readers(self, suffix: str, year: float) -> tuple[Reader, ...]:
        """Return the syntaxes by which a file with a suffix may be read in a year; the first with values counts."""
        return tuple(syntax for syntax in self.also if syntax.suffix == suffix) or (self.syntax(year),)

    def fields_at(self, year: float) -> tuple[Field, ...]:
        """Return the fields that exist in a year."""
        return tuple(f for f in self.fields if f.at(year))

    def written(self, setup: Setup, year: float) -> dict[str, Any]:
        """Return what an export of a setup writes, by path. PinError for a setup that it cannot say."""
        out = {path: value for path, value in self.base.items() if self.schema.exists(path, year)}
        for each in self.fields_at(year):
            out |= each.write(setup)
        return out

    def version(self, text: str) -> str:
        """Return the version YY.MM of a month or of a release that the schema knows. PinError names the known ones."""
        found = self.schema.releases.get(text.removeprefix("v"), text)
        try:
            year_of(found)
        except PinError:
            known = ", ".join(self.schema.releases)
            hint = f" or a release: {known}" if known else ""
            raise PinError(
                f"version {text!r} of {self.name} is not known; write YY.MM, for example 26.08{hint}"
            ) from None
        return found


def same(path: str, name: str, *, always: bool = False, least: int = 1, **when: float) -> Field:
    """Return the field of a whole number that the target calls by another name; written unless it is `least`."""

    def write(setup: Setup) -> Values:
        value = getattr(setup.config, name)
        return {path: value} if always or value != least else {}

    def read(document: Document, found: Values) -> Values:
        return {name: document.count(path, least)}

    return Field((name,), write, read, **when)


def renamed(path: str, old: str, name: str) -> Field:
    """Return the field of a whole number that had an older name, under which it is read, too."""

    def read(document: Document, found: Values) -> Values:
        document.seen.add(path)
        return {name: document.count(old if path not in document.values and document.has(old) else path)}

    return Field((name,), lambda setup: {path: getattr(setup.config, name)}, read)


def run_number(path: str, name: str, **when: float) -> Field:
    """Return the field of a number of the run, which a file may leave open."""

    def read(document: Document, found: Values) -> Values:
        return {} if document.get(path) is None else {name: document.count(path)}

    return Field((name,), lambda setup: {path: getattr(setup, name)}, read, **when)


def words(path: str, name: str, known: Mapping[str, Any], of: Callable[[Setup], Any], **when: float) -> Field:
    """Return the field of a choice that the target has words for: value -> word. Other values are not written.

    A value of None of the target is the first of them that is written as None.
    """
    meaning = {word: value for value, word in reversed(list(known.items()))}

    def write(setup: Setup) -> Values:
        value = of(setup)
        return {path: known[value]} if value in known and known[value] is not None else {}

    def read(document: Document, found: Values) -> Values:
        value = document.get(path)
        if value is None and None not in meaning:
            return {}
        return {name: document.word(path, meaning, meaning.get(None))}

    return Field((name,), write, read, **when)


def switch(path: str, name: str, of: Callable[[Setup], bool], *, reverse: bool = False, **when: float) -> Field:
    """Return the field of a choice that is true or false; `reverse`: the target says the opposite."""

    def write(setup: Setup) -> Values:
        return {path: bool(of(setup)) is not reverse}

    def read(document: Document, found: Values) -> Values:
        value = document.get(path)
        return {} if value is None else {name: bool(value) is not reverse}

    return Field((name,), write, read, **when)


def constant(path: str, value: Any, where: Callable[[Setup], bool] = lambda setup: True, **when: float) -> Field:
    """Return a field that decides nothing but must be there."""
    return Field((), lambda setup: {path: value} if where(setup) else {}, lambda document, found: {}, **when)


def precision_word(base: str, narrow: bool, moments: bool = False, remainders: bool = False) -> str:
    """Return the name of a precision with suffixes for what is in 16 bits, which override a stack's default."""
    if base in ("fp32", "native"):
        return base
    return PrecisionName(base if narrow else base + GRADIENTS_32, narrow, moments and narrow, remainders).name


def base_of(precision: str) -> str:
    """Return the name of a precision without its suffixes for gradients and moments, and without autocast."""
    return read_precision(precision.replace(GRADIENTS_32, "")).base.removesuffix(AUTOCAST)


def of_replicas(precision: str, document: Document, replicas: bool) -> str:
    """Return the precision of a mixed precision, which is torch.autocast if DistributedDataParallel runs the file.

    Parameters are then what the model was made with: float32, unless it was loaded in 16 bits, which no file says. FSDP
    and DeepSpeed make 16-bit copies of float32 parameters. The casts of experts are not known.

    Args:
        replicas: True if DistributedDataParallel, or a single process, runs the file.
    """
    mixed = replicas and precision + AUTOCAST in PRECISIONS and not document.task.num_experts
    return precision + AUTOCAST if mixed else precision


# Words of `torch.distributed.tensor.experimental.context_parallel` (set_rotate_method) for how keys reach other ranks
ROTATE_METHODS = {GATHER: "allgather", RING: "alltoall"}
METHODS_BY_ROTATE = {word: method for method, word in ROTATE_METHODS.items()}


def derived(read: Callable[[Document, Values], Values], *names: str) -> Field:
    """Return a field that is not written, because it follows from others."""
    return Field(names, lambda setup: {}, read)


def near_parts(number: int, value: int) -> str:
    """Return the numbers next to a value into which a number can be cut equally, in words: `4 or 8`."""
    parts = [n for n in range(1, number + 1) if number % n == 0]
    near = [max((n for n in parts if n < value), default=None), min((n for n in parts if n >= value), default=None)]
    return " or ".join(dict.fromkeys(str(n) for n in near if n is not None))


def near_multiples(part: int, value: int) -> str:
    """Return the multiples of a number next to a value, in words: `16 or 24`; `8` if there is none below."""
    below = value // part * part
    return f"{below} or {below + part}" if below else str(part)


def data_parallel(document: Document, found: Values, *other: str) -> Values:
    """Return dp as what the devices leave, nothing if these are not known. `other`: degrees that divide them too.

    Raises: PinError with the nearest number of devices.
    """
    devices = document.task.num_devices
    if not devices:
        return {}
    used = 1
    for name in ("tp", "pp", "cp", *other):
        used *= int(found.get(name, 1))
    if devices % used:
        raise PinError(
            f"tp x pp x cp = {used} does not divide the {devices} devices; nearest: "
            f"{near_multiples(used, devices)} devices",
            ("tp", "pp", "cp"),
        )
    return {"dp": devices // used}


def micro_batches(document: Document, found: Values) -> Values:
    """Return the number of micro-batches that follows from the batch; nothing if that is not known."""
    batch, at_once = found.get("global_batch_size"), found.get("dp", 0) * found.get("micro_batch_size", 0)
    if not batch or not at_once:
        return {}
    if batch % at_once:
        near = near_multiples(at_once, batch)
        raise PinError(
            f"global_batch_size={batch} is not a multiple of micro_batch_size x dp = {at_once}; nearest: {near}",
            ("global_batch_size", "micro_batch_size", "dp"),
        )
    return {"num_micro_batches": batch // at_once}
