"""Write a setup as the input of a target, and read such an input back.

export = export_setup(Setup.of(request, config), "torchtitan@26.08")
export.text, export.launch, export.elsewhere, export.not_said

config_file = read_config("ds_config.json", graph=load_model("llama-3.1-8b"), cluster="2x8xh100-sxm5-80gb")
config_file.says, config_file.faults
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from autoplan.config.choices import OPTIONS, PINS, options_of, plain_option
from autoplan.config.keys import check_names
from autoplan.config.parallel import ParallelConfig
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.errors import PinError
from autoplan.exporters.python_file import functions_of
from autoplan.exporters.python_values import BY_FUNCTION, MORE, UNKNOWN
from autoplan.exporters.record import Document, Target
from autoplan.exporters.scripts import Code, Name
from autoplan.exporters.setup import ESSENTIAL, MTP_SETTING, SETUP_NAMES, Setup, Task, values
from autoplan.exporters.syntax import values_of_named
from autoplan.exporters.targets import detected, suffix_of, target_of
from autoplan.ir.graph import ModelGraph
from autoplan.stacks.like import Like, read_like
from autoplan.stacks.records import year_of


@dataclass(frozen=True)
class Export:
    """A setup as the input of a target.

    Attributes:
        text: the file.
        launch: the command that starts a run of it.
        elsewhere: what is said in another place than the file, as `name=value: where`.
        not_said: what the target does not say, as `name=value: why; what it runs`.
    """

    target: str
    version: str
    file: str
    text: str
    launch: tuple[str, ...]
    elsewhere: tuple[str, ...]
    not_said: tuple[str, ...]


@dataclass(frozen=True)
class ConfigFile:
    """The input of a target, read.

    Attributes:
        values: what the file says, by path.
        says: the choices of ParallelConfig and RunOptions, the precision, mode, seq_len, global_batch_size and adapters
            that the file decides, by name. What it leaves to the target has the target's default.
        like: the stack that runs it, NAME@YY.MM.
        open: choices that the file does not decide: name -> where they are decided.
        not_read: fields of the target that the file has and that were not used, though they may change time or memory,
            and values that are not known. Not those that an export of the same setup writes as well.
        idle: other values of the file: fields that change neither time nor memory, and defaults.
        foreign: names that the file has and that are no fields of the target as far as autoplan knows it.
        faults: what the target itself would refuse, with the nearest that works.
        warnings: what it takes, but is seldom meant.
    """

    path: str
    target: str
    version: str
    values: Mapping[str, Any] = field(repr=False)
    says: Mapping[str, Any]
    like: str
    open: Mapping[str, str]
    not_read: tuple[str, ...]
    faults: tuple[str, ...]
    warnings: tuple[str, ...]
    idle: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()


def read_config(
    path: str | Path,
    format: str | None = None,
    *,
    graph: ModelGraph | None = None,
    cluster: Cluster | Path | str | None = None,
    given: Mapping[str, Any] | None = None,
    lenient: bool = False,
) -> ConfigFile:
    """Read the input of another framework.

    Args:
        path: the file; of a Python file with several functions `FILE.py:FUNCTION`.
        format: NAME or NAME@VERSION of the target; None: detected.
        graph: the model, without which stages and recomputed layers are not known.
        cluster: the devices, without which dp may not be known.
        given: choices that the file does not say, for example micro_batch_size.
        lenient: True: a value that a field refuses is one of the `faults`, and its choices are not in `says`.

    Raises: PinError if the file cannot be read, is of no known target, or has a value that a field refuses; for an
        unknown name in `given`.

    Example:
        >>> from autoplan import read_config
        >>> with open("zero.json", "w") as file:
        ...     _ = file.write('{"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 2}')
        >>> read_config("zero.json", "deepspeed").says["zero_stage"]
        3
    """
    check_names(given or (), (*SETUP_NAMES, "adapters"), "given", "choice")
    name = str(path)
    file = name.rpartition(":")[0] if ".py:" in name else name
    try:
        text = Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise PinError(f"{file}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise PinError(f"{file} is not a text file") from None
    target, version = target_of(format) if format else detected(name, text)
    where = None if cluster is None else Cluster.of(cluster)
    return read_text(text, name, target, version, Task.known(graph, where), given or {}, lenient)


def read_text(
    text: str,
    path: str,
    target: Target,
    version: str,
    task: Task,
    given: Mapping[str, Any],
    lenient: bool = False,
) -> ConfigFile:
    """Return the input of a target that this text is; the arguments are those of `read_config`."""
    year = year_of(version)
    found = _values(text, path, target, year)
    functions = functions_of(found)
    unknown = {name.removeprefix(UNKNOWN): v for name, v in found.items() if name.startswith(UNKNOWN)}
    unknown = {name: v for name, v in unknown.items() if name not in found or target.schema.is_section(name)}
    found = {name: value for name, value in found.items() if not name.startswith(UNKNOWN)}
    document = Document(found, target.schema, year, task, bool(functions), unknown)
    read = _read(target, document, given)
    says, vague, refused = read.says, read.vague, read.refused
    _check_known(vague, given, path)
    _check_degrees(target, document, given, path)
    if refused and not lenient:
        raise refused[0]
    of_schema = target.schema.faults({name: v for name, v in found.items() if name not in read.overridden}, year)
    faults = _refusals(of_schema, refused)
    broken = _broken(target, document, read, warns=False) if not refused else []
    faults += [] if functions else broken
    warnings = [f"{text}; unless {functions[0]} says otherwise" for text in broken if functions]
    warnings += [*_broken(target, document, read, warns=True), *_misspelt(target, found)]
    stack = target.stack_of(document) if target.stack_of is not None else target.stack
    open_ = {name: where for name, where in {**target.elsewhere, **vague}.items() if name not in says}
    rest = ((), tuple(faults), tuple(warnings))
    out = ConfigFile(path, target.name, version, found, says, f"{stack}@{version}", open_, *rest)
    return _with_rest(out, target, document, given)


def _values(text: str, path: str, target: Target, year: float) -> dict[str, Any]:
    """Return the values of a file and of those that it names, by the paths of the schema."""
    readers = target.readers(suffix_of(path), year)
    found = next((values for reader in readers if (values := reader.read(text, path))), {})
    if not found and readers[0] in target.also:
        raise PinError(f"{path} has nothing that {target.name} takes: {target.about}")
    renamed = target.renamed or dict
    found = dict(renamed(found))
    for name in target.named_files:
        found = dict(renamed({**found, **values_of_named(name, found.get(name), path)}))
    return found


def _refusals(of_schema: list[str], refused: list[PinError]) -> list[str]:
    """Return the faults of the schema, and of fields; of both for one path=value that of the field."""
    said = tuple(str(error).partition(" ")[0] for error in refused)
    return [*(text for text in of_schema if text.partition(" ")[0] not in said), *map(str, refused)]


def _with_rest(out: ConfigFile, target: Target, document: Document, given: Mapping[str, Any]) -> ConfigFile:
    """Return a file with what was not read: by name what may change time or memory, and what does not."""
    unused = _not_used(out, target, document, given)
    left = {**{name: document.values[name] for name in unused}, **document.unknown}
    idle = tuple(name for name, value in left.items() if _is_idle(target, name, value))
    listed = (name if name in unused else f"{name} = {value}" for name, value in left.items() if name not in idle)
    return replace(out, not_read=tuple(listed), idle=idle, foreign=_foreign(target, document))


_NOTHING: tuple[Any, ...] = (None, "", "none", "null", "None", [], {})  # values that leave a field out
# Paths of a script that are no arguments of the target
_OF_SCRIPT = ("env.", "launch.", "own.", "$")


def _foreign(target: Target, document: Document) -> tuple[str, ...]:
    """Return the names of a file that are no fields of the target, and were not read for something else.

    A section of which no field is known is one name, `section.*`.
    """
    schema = target.schema
    out: dict[str, None] = {}
    for name, value in {**document.values, **document.unknown}.items():
        if (
            value in _NOTHING
            or name.startswith(_OF_SCRIPT)
            or not schema.is_foreign(name)
            or _seen(name, document.seen)
        ):
            continue
        first = name.partition(".")[0]
        shown = f"{first}.*" if "." in name and not schema.is_section(first) else name
        out[shown] = None
    return tuple(out)


def _is_idle(target: Target, name: str, value: Any) -> bool:
    """Return True for a value that changes neither time nor memory; calls of functions and more arguments may."""
    return value not in (BY_FUNCTION, MORE) and target.schema.is_idle(name, value)


# Names of degrees in the files of any framework -> the degree. `model` alone is tensor parallelism, as in GPT-NeoX
_DEGREES = {
    "tp": r"(tensor|model)(_model)?_parallel(ism)?(_size|_degree|_dim)?|tp(_size|_degree)?",
    "pp": r"(pipe|pipeline)(_model)?_parallel(ism)?(_size|_degree|_dim)?|pp(_size|_degree)?",
    "cp": r"(context|sequence)(_model)?_parallel(ism)?_(size|degree|dim)|(cp|sp)(_size|_degree)?",
    "ep": r"experts?(_model)?_parallel(ism)?(_size|_degree|_dim)?|ep(_size|_degree)?",
}


def _check_degrees(target: Target, document: Document, given: Mapping[str, Any], path: str) -> None:
    """Raise PinError if a file has a degree above 1 that is no field of the target: it is of another framework."""
    for name, value in document.values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value <= 1:
            continue
        last = name.rpartition(".")[2].lower().replace("-", "_")
        degree = next((each for each, words in _DEGREES.items() if re.fullmatch(words, last)), None)
        read = not target.schema.is_foreign(name) or _seen(name, document.seen)
        if degree is None or read or name.startswith(_OF_SCRIPT) or given.get(degree) is not None:
            continue
        if target.schema.faults({name: value}, document.year):  # a section whose fields are all known: said there
            continue
        raise PinError(
            f"{path}: {name}={value} is a degree, which autoplan does not read from files of {target.name}; give "
            f"--{degree}, or --format with the framework that takes the file",
            (degree,),
        )


def _check_known(vague: Mapping[str, str], given: Mapping[str, Any], path: str) -> None:
    """Raise PinError if a file takes choices without which it is another configuration from elsewhere."""
    told = {vague[name] for name in vague if given.get(name) is not None}
    needed: dict[str, str] = {}  # what is not known -> the first choice that it decides
    essential = (*ESSENTIAL, "adapters")
    for name in essential:
        if name in vague and vague[name] not in told:
            first = next(each for each in vague if vague[each] == vague[name] and each in essential)
            needed.setdefault(vague[name], first)
    if needed:
        flags = " ".join(f"--{name.replace('_', '-')}" for name in needed.values())
        said = "; ".join(needed)
        raise PinError(f"{path} does not decide {said}; give {flags}", tuple(needed.values()))


def _not_used(read: ConfigFile, target: Target, document: Document, given: Mapping[str, Any]) -> list[str]:
    """Return the fields of a file that were not used, but for those that an export of the same setup writes as well."""
    found, seen = read.values, document.seen | set(target.base) | _IDLE
    known = (name for name in found if name in target.schema.entries and not _seen(name, seen))
    left = [name for name in known if not any(other.startswith(f"{name}.") for other in found)]  # no sections
    fixed = _written(read, target, document.task, given) if left else {}
    return [name for name in left if name not in fixed or _checked(fixed[name]) != found[name]]


def _written(read: ConfigFile, target: Target, task: Task, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an export of the setup of a file writes: values that say no more than the rest of the file.

    Empty if the setup is not known or is one that the target cannot say; then every field that was not used is named.
    """
    try:
        setup = setup_of(read, task, {"seq_len": 1, "global_batch_size": 1, **given})
        return target.written(setup, year_of(read.version))
    except PinError:
        return {}


def _seen(path: str, seen: Set[str]) -> bool:
    return any(path == each or path.startswith(f"{each}.") for each in seen)


def _misspelt(target: Target, found: Mapping[str, Any]) -> list[str]:
    """Return the names that are almost those of fields, which the target may ignore."""
    near = {
        n: difflib.get_close_matches(n, target.schema.entries, 1, 0.92) for n in found if not target.schema.knows(n)
    }
    return [
        f"{name} is not a field of {target.name}; did you mean {close[0]!r}?" for name, close in near.items() if close
    ]


# Paths that an export may have without reading them
_IDLE = frozenset(("compute_environment", "machine_rank", "base_config", "hardware", "env", "env_vars", "launch"))


@dataclass(frozen=True)
class _Read:
    """What the fields of a target read.

    Attributes:
        says: the choices that they decide.
        vague: choices that are not known -> where they are decided.
        refused: the errors of fields that refuse the file.
        typed: choices that are given, and count instead of those of the file.
        overridden: paths that decide nothing but such choices.
    """

    says: Mapping[str, Any]
    vague: Mapping[str, str]
    refused: list[PinError]
    typed: Mapping[str, Any]
    overridden: Set[str]


def _read(target: Target, document: Document, given: Mapping[str, Any]) -> _Read:
    """Return what the fields of a target read.

    Args:
        given: choices that the file cannot hold or does not know, or that count instead of those of the file. What is
            wrong with the field of such a choice is not said.
    """
    typed = {name: value for name, value in given.items() if value is not None}
    says: dict[str, Any] = {}
    vague: dict[str, str] = {}
    refused: list[PinError] = []
    overridden: set[str] = set()
    for each in target.fields_at(document.year):
        asked = replace(document, seen=set())
        try:
            read = each.read(asked, _Found({**says, **typed}, target.name))
        except PinError as error:
            if {*each.names} & typed.keys():
                overridden |= asked.seen
                vague |= {name: str(error) for name in each.names if name not in typed}
            else:
                refused.append(error)
        else:
            unsaid = document.partial and asked.seen and not any(map(asked.has, set(asked.seen)))
            if asked.vague:
                vague |= dict.fromkeys(each.names, ", ".join(asked.vague))
            elif not unsaid:
                says |= read
            overridden |= asked.seen if each.names and {*each.names} <= typed.keys() else set()
        document.seen.update(asked.seen)
    return _Read(says, vague, refused, typed, overridden)


class _Found(dict[str, Any]):
    """The values read so far. A degree that the target has no field for is 1. `asked`: the names that were used."""

    def __init__(self, read: Mapping[str, Any], target: str) -> None:
        super().__init__(read)
        self._target = target
        self.asked: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.asked.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """Return a value, or the default."""
        self.asked.add(name)
        return super().get(name, default)

    def __missing__(self, name: str) -> Any:
        default = {"tp": 1, "pp": 1, "cp": 1, "ep": 1, "virtual_stages": 1, "zero_stage": 0}
        if name in default:
            return default[name]
        raise PinError(f"{name} is not known from the file; give the cluster, which decides it")


def _broken(target: Target, document: Document, read: _Read, warns: bool) -> list[str]:
    """Return what rules of the target are broken, but for those about choices that are given: autoplan has its own."""
    out = []
    for rule in (rule for rule in target.rules if rule.warns is warns):
        asked, found = replace(document, seen=set()), _Found({**read.says, **read.typed}, target.name)
        text = rule.broken(asked, found)
        changed = {n: v for n, v in read.typed.items() if n in read.says and read.says[n] != v}
        given = {*changed, *(name for name in read.typed if name in read.vague)}
        about = bool(found.asked & given) or bool(asked.seen & read.overridden)
        document.seen.update(asked.seen)
        if text is not None and not about:
            out.append(text)
    return out


def setup_of(read: ConfigFile, task: Task, given: Mapping[str, Any]) -> Setup:
    """Return the setup that a target runs for its input.

    Args:
        given: what the file does not say: at least seq_len and global_batch_size where it has none.
    """
    says = {**given, **read.says}
    like = _like(read, says)
    choices = {name: _plain(value) for name, value in says.items() if name in PINS and value is not None}
    config = ParallelConfig(**choices)
    options = options_of({**_options(like, task), **{n: says[n] for n in OPTIONS if n in says}})
    run = (int(says["seq_len"]), int(says["global_batch_size"]))
    return Setup(task, config, options, like.mode, like.precision(task.latent), *run)


def _like(read: ConfigFile, says: Mapping[str, Any]) -> Like:
    """Return the stack with the mode and the precision of a file; one that the stack has no price for is left out."""
    said = {name: says[name] for name in ("mode", "precision") if says.get(name) is not None}
    for given in (said, *({name: value} for name, value in said.items())):
        with suppress(PinError):
            return read_like(read.like, given)
    return read_like(read.like)


def _options(like: Like, task: Task) -> dict[str, Any]:
    return {name: plain_option(getattr(like.options(task.device), name)) for name in OPTIONS}


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def export_setup(setup: Setup, to: str, file: str = "") -> Export:
    """Write a setup as the input of a target, NAME or NAME@VERSION.

    What is written is read back: what comes back as another value is in `not_said`, with what the target runs instead.

    Args:
        file: the name of the file, for its launch command; empty: `plan` with the suffix of the target.

    Raises:
        PinError: for an unknown target, and if the target cannot say a degree, the ZeRO stage, the schedule, the batch
            or what is on the host: the input would be another configuration.
    """
    target, version = target_of(to)
    year, label = year_of(version), f"{target.name}@{version}"
    written = target.written(setup, year)
    target.schema.check({path: _checked(value) for path, value in written.items()}, year)
    syntax = target.syntax(year)
    path = file or f"plan{syntax.suffix}"
    if suffix_of(path) != syntax.suffix:
        near = Path(path).with_suffix(syntax.suffix)
        raise PinError(f"{path}: a file of {label} ends in {syntax.suffix}, by which it is found; nearest: {near}")
    text = syntax.write(written, (), setup)
    elsewhere, lost, runs = _differences(setup, target, version, text, path)
    if setup.task.num_mtp and not any(path.endswith(MTP_SETTING) for path in written):
        elsewhere.append((f"mtp={setup.task.num_mtp}", "the model"))
    essential = [name for name in ESSENTIAL if name in lost]
    if essential:
        name = essential[0]
        pin = f" --pin {name}={runs[name]}" if isinstance(runs[name], int | str) and name in PINS else ""
        nearest = f"nearest: a plan of what it can (--like {target.stack}@{version}{pin})"
        raise PinError(f"{name}={lost[name]}; {nearest}", tuple(essential))
    not_said = [f"{name}={why}" for name, why in lost.items()]
    heading = [f"Written by autoplan for {label}: {setup.task.model} on {setup.config.num_devices} devices"]
    heading += [f"set in {where}: {said}" for said, where in elsewhere]
    heading += [f"not said here: {line}" for line in not_said]
    text = syntax.write(written, heading, setup)
    launch = tuple(target.launch(setup, path, year))
    return Export(target.name, version, path, text, launch, tuple(map(": ".join, elsewhere)), tuple(not_said))


def _checked(value: Any) -> Any:
    return value.text if isinstance(value, Name | Code) else list(value) if isinstance(value, tuple) else value


def _differences(
    setup: Setup, target: Target, version: str, text: str, path: str
) -> tuple[list[tuple[str, str]], dict[str, str], dict[str, Any]]:
    """Return what a file leaves to other places, what the target runs otherwise, and all that it runs.

    Returns:
        (name=value, place) of each value that is said elsewhere; name -> text of those that the target runs otherwise;
        name -> value of all that it runs.
    """
    wanted = values(setup)
    given = {name: wanted[name] for name in target.elsewhere}
    try:
        read = read_text(text, path, target, version, setup.task, given)
        runs = values(setup_of(read, setup.task, given))
        left = read_text(text, path, target, version, setup.task, {}).open
    except PinError as error:
        name = error.names[0] if error.names else "this plan"
        raise PinError(
            f"{target.name}@{version} cannot say {name}={wanted.get(name)!r}: {error}", error.names
        ) from None
    if read.faults:
        raise PinError(f"{target.name}@{version} cannot run this plan: {'; '.join(read.faults)}")
    lost: dict[str, str] = {}
    for name in SETUP_NAMES:
        if wanted[name] == runs[name] or (name in _WITHOUT and wanted[name] is None):
            continue
        why = target.why_not(name)
        runs_it = "the file does not say what it runs" if runs[name] is None else f"it runs {_said(runs[name])}"
        lost[name] = f"{_said(wanted[name])}: {target.name}@{version} cannot ({why}); {runs_it}"
        if name == "recompute" and isinstance(runs[name], str):
            lost[name] += f", which autoplan plan --pin recompute={runs[name]} prices"
    set_there = {n: where for n, where in left.items() if n not in lost and wanted[n] != _DEFAULTS.get(n)}
    elsewhere = [(f"{n}={_said(wanted[n])}", where) for n, where in set_there.items()]
    told = {f"{name}={value}" for name, value in read.says.items()}
    elsewhere += [(said, where) for said, where in setup.left if said not in told]
    return elsewhere, lost, runs


_WITHOUT = ("context_method", "reruns")  # None where a plan has no ring, or recomputes no whole layer: nothing is lost
_DEFAULTS: Mapping[str, Any] = {"recompute": "none", "mode": "eager", "offload": (), "zero_replicas": 1}


def _said(value: Any) -> str:
    """Return a value in words, with the equal neighbours of a long list counted: `full x8, none x12`."""
    if not isinstance(value, tuple | list):
        return str(value)
    if value and isinstance(value[0], str) and len(value) < 4:
        return "+".join(value)
    runs = [(text, len(list(equal))) for text, equal in groupby(map(str, value))]
    if len(runs) < len(value) - 1:
        return ", ".join(text if count == 1 else f"{text} x{count}" for text, count in runs)
    return ",".join(map(str, value)) or "none"
