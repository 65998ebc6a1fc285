"""All targets by name, and which of them a file is of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from autoplan.errors import PinError
from autoplan.exporters.accelerate import ACCELERATE
from autoplan.exporters.automodel import AUTOMODEL
from autoplan.exporters.deepspeed import DEEPSPEED
from autoplan.exporters.gpt_neox import GPT_NEOX
from autoplan.exporters.lightning import LIGHTNING
from autoplan.exporters.llm_foundry import LLM_FOUNDRY
from autoplan.exporters.maxtext import MAXTEXT
from autoplan.exporters.megatron import MEGATRON_LM
from autoplan.exporters.megatron_bridge import MEGATRON_BRIDGE
from autoplan.exporters.nanotron import NANOTRON
from autoplan.exporters.olmo import OLMO
from autoplan.exporters.python_values import UNKNOWN
from autoplan.exporters.record import Reader, Recognised, Target
from autoplan.exporters.torchtitan import TORCHTITAN
from autoplan.exporters.torchtune import TORCHTUNE
from autoplan.exporters.transformers import TRANSFORMERS
from autoplan.names import did_you_mean
from autoplan.stacks.records import stack, version_of

_ALL = (
    *(MEGATRON_LM, MEGATRON_BRIDGE, TORCHTITAN, AUTOMODEL, DEEPSPEED, ACCELERATE, TRANSFORMERS, LIGHTNING, NANOTRON),
    *(MAXTEXT, GPT_NEOX, TORCHTUNE, LLM_FOUNDRY, OLMO),
)
TARGETS: Mapping[str, Target] = {target.name: target for target in _ALL}


def target_of(text: str) -> tuple[Target, str]:
    """Return the target and the version, YY.MM, of NAME or NAME@VERSION. PinError names the nearest ones."""
    name, at, version = text.partition("@")
    found = TARGETS.get(name)
    if found is None:
        raise PinError(f"{name!r} is not a target; {did_you_mean(name, TARGETS)}")
    if at and not version:
        raise PinError(f"{text!r} has no version after @; write YY.MM, for example {name}@{newest(found)}")
    return found, found.version(version) if at else newest(found)


def newest(target: Target) -> str:
    """Return the version of a target without one: the default of its stack."""
    return stack(target.stack).default_version


_SUFFIXES = {".yml": ".yaml", "": ".sh", ".bash": ".sh", ".txt": ".sh", ".slurm": ".sh", ".sbatch": ".sh"}


def suffix_of(path: str) -> str:
    """Return the suffix of the syntax that a file is read with: `.yaml` for `.yml`, `.sh` for scripts of all names."""
    suffix = Path(path.partition(":")[0] if ".py:" in path else path).suffix
    return _SUFFIXES.get(suffix, suffix)


def _readers(target: Target) -> Iterator[tuple[Reader, str]]:
    """Yield the syntaxes of a target's files, each with its last version."""
    for k, (_, syntax) in enumerate(target.files):
        last = len(target.files) == k + 1
        # the last month of a syntax that a later one replaced
        yield syntax, newest(target) if last else version_of(target.files[k + 1][0] - 1 / 12)
    yield from ((syntax, newest(target)) for syntax in target.also)


def detected(path: str, text: str) -> tuple[Target, str]:
    """Return the target and the version of a file. PinError if it is of none, or of several."""
    suffix = suffix_of(path)
    found: dict[str, tuple[Target, str]] = {}
    refused: list[PinError] = []
    for target in TARGETS.values():
        for syntax, version in _readers(target):
            if syntax.suffix != suffix:
                continue
            try:
                values = {name.removeprefix(UNKNOWN): v for name, v in syntax.read(text, path).items()}
            except PinError as error:  # the file may be of another target
                refused.append(error)
                continue
            marks = target.marks_of(syntax)
            if any(mark in values or any(name.startswith(f"{mark}.") for name in values) for mark in marks):
                told = None if target.version_in is None else target.version_in(values)
                found[target.name] = (target, told or version)
    if len(found) == 1:
        return next(iter(found.values()))
    if found:
        raise PinError(f"{path} may be of {' or '.join(found)}; say which with --format")
    if refused:
        raise next((error for error in refused if isinstance(error, Recognised)), refused[0])
    raise PinError(
        f"{path} is not recognised as the input of a framework; say of which with --format: {', '.join(TARGETS)}"
    )
