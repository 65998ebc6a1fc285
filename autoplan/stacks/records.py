"""Stacks as data: what a framework does by default, version by version, what it can do, and where that is written.

    stack("megatron-bridge").era_at(2026.6).options       # profiles/stacks/megatron-bridge.json

A version is a date, YY.MM, as NVIDIA's containers have it; a default holds from its `since` (a year with decimals)
until a later one changes it. Files are read strictly: an unknown key or value is an error that names the nearest known
one.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import lru_cache
from importlib.resources import files
from typing import Any

from autoplan.config.choices import options_of
from autoplan.config.keys import check_names
from autoplan.config.offload import OFFLOADS
from autoplan.config.parallel import ZERO_STAGES, Dispatcher, Launch, Mode, RunOptions
from autoplan.config.precision import PRECISIONS, PrecisionName
from autoplan.config.recompute import NONE, OFFLOAD, RECOMPUTE, RECOMPUTE_KINDS, RecomputeMix, modules_of
from autoplan.errors import PinError
from autoplan.names import did_you_mean
from autoplan.schedules.schedule import SCHEDULES
from autoplan.stacks.limits import Limit


class Framework(StrEnum):
    """The framework that trained the model, as far as it changes how kernels, stages and blank fields are read."""

    COMPOSER = "Composer FSDP"
    JAX = "MaxText, Pax"
    MEGATRON_DEEPSPEED = "Megatron-DeepSpeed"
    BIGSCIENCE = "Megatron-DeepSpeed of BigScience"
    MEGATRON = "Megatron-LM"
    NEMO = "NeMo, Megatron Bridge"  # the recipes that performance is published with
    MEGATRON_TESTS = "Megatron-LM, functional tests"
    BRIDGE_LIBRARY = "Megatron Bridge, library recipes"
    AUTOMODEL = "NeMo Automodel"
    INTERNEVO = "InternEvo"
    TORCHTITAN = "torchtitan"
    TRANSFORMERS = "Hugging Face Trainer"
    ALEPH_ALPHA = "Aleph Alpha scaling"
    KEMPNER = "KempnerForge"
    FSDP = "PyTorch FSDP"
    OTHER = "other"


class Gradients16(StrEnum):
    """When gradients are kept and reduced in 16 bits: never, in fp16, or always."""

    NEVER = "never"
    FP16 = "fp16"
    ALWAYS = "always"


class KeptGathered(StrEnum):
    """Programs in which fully_shard keeps gathered parameters to the end of a step, which sends as much as ZeRO 1."""

    PIPELINES = "pipelines"
    EXPERTS = "experts"


_DEGREES = ("dp", "tp", "pp", "cp", "ep", "etp")


@dataclass(frozen=True)
class StackKernels:
    """The kernels of a stack. The first of each is the default, the others are what it may also be."""

    modes: tuple[Mode, ...]
    recompute: tuple[str, ...]
    zero_stages: tuple[int, ...]
    source: str


@dataclass(frozen=True)
class Abilities:
    """The abilities of a stack: the values of each choice that it supports; it supports no others.

    `degrees`: those that may be above 1; `recompute`: names of RECOMPUTE_KINDS; `offload`: state on the host.
    `recompute_mix`: how the recompute of single layers may differ.
    `dispatcher`, `launch`: values of these options that a search tries beside the default; empty: only the default.
    `limits`: what it cannot of what it can each alone.
    """

    modes: tuple[Mode, ...]
    degrees: tuple[str, ...]
    schedules: tuple[str, ...]
    recompute: tuple[str, ...]
    zero_stages: tuple[int, ...]
    offload: tuple[str, ...]
    precisions: tuple[str, ...]
    dispatcher: tuple[Dispatcher, ...] = ()
    launch: tuple[Launch, ...] = ()
    recompute_mix: RecomputeMix = RecomputeMix.ANY
    limits: tuple[Limit, ...] = ()
    source: str = ""


@dataclass(frozen=True)
class Era:
    """Defaults since a year; `can`: abilities that differ from those of the newest version."""

    since: float
    options: RunOptions
    source: str
    can: Abilities

    @property
    def version(self) -> str:
        """The first version of the era, YY.MM."""
        return version_of(self.since)


@dataclass(frozen=True)
class Change:
    """A change of settings since a year, for some devices, precisions or models.

    Attributes:
        matches: A pattern of "DEVICE PRECISION MODEL" in capitals, the model as letters and digits (QWEN3235BA22B).
        recompute: What is recomputed if nothing is said, as `recompute_of_text` reads it; () where that is as in the
            stack.
        zero_stage: The only ZeRO stage at which it holds; None: at all of them.
    """

    since: float
    matches: str
    options: Mapping[str, Any] = field(hash=False)
    source: str
    recompute: tuple[str, ...] = ()
    zero_stage: int | None = None


@dataclass(frozen=True)
class Packed:
    """Fine-tuning recipes that pack short documents, until a year."""

    until: float
    tokens: int
    source: str


@dataclass(frozen=True)
class Remainders:
    """When the optimizer keeps of masters only what bfloat16 parameters lack of them, in years.

    Attributes:
        precisions: The precisions that leave parameters in bfloat16.
        with_moments: True if only where moments are kept in 16 bits.
    """

    since: float
    until: float
    precisions: tuple[str, ...]
    source: str
    with_moments: bool = False


@dataclass(frozen=True)
class AdapterDefaults:
    """Adapters of fine-tuning recipes: their rank, and the layers that have them."""

    rank: int
    layers: tuple[str, ...]
    source: str = ""


@dataclass(frozen=True)
class Vocab:
    """The vocabulary of examples and mock data, and what it is padded to a multiple of, times tp."""

    vocab_size: int
    vocab_multiple: int
    source: str


@dataclass(frozen=True)
class Predicting:
    """Layers for tokens after the next that a stack adds to a model whose capitals and digits match, since a year."""

    since: float
    matches: str
    layers: int
    source: str


@dataclass(frozen=True)
class Stack:
    """One stack.

    Attributes:
        frameworks: The names under which published rows are read as this stack.
        default_version: The version that a name without one stands for.
        executed: True if autoplan's own runtime executes it, whose rules then hold too.
        equal_stages: True if pipeline stages are cut into equal numbers of layers.
        chunks: Stages per rank of an interleaved schedule if nothing is said; None: as many as given.
        whole_experts_since: Year since which tensor parallelism does not split experts (etp = 1); None: it does.
        kept_gathered: Where parameters stay gathered until the end of the step.
        gradients_32_since: Year since which gradients of bfloat16 parameters are summed in 32 bits all the same.
        native_since: Year since which runs in bfloat16 keep parameters, gradients and moments in bfloat16, without
            masters; None: they have masters.
        moments_16: True if models with latent attention keep the moments in 16 bits.
        sources: The sources of the keys that have one of their own.
    """

    name: str
    about: str
    frameworks: tuple[Framework, ...]
    default_version: str
    kernels: StackKernels
    eras: tuple[Era, ...]
    changes: tuple[Change, ...] = ()
    executed: bool = False
    equal_stages: bool = False
    chunks: int | None = None
    whole_experts_since: float | None = None
    kept_gathered: tuple[KeptGathered, ...] = ()
    gradients_16: Gradients16 = Gradients16.NEVER
    gradients_32_since: float = math.inf
    native_since: float | None = None
    moments_16: bool = False
    vocab: Vocab | None = None
    adapters: AdapterDefaults | None = None
    packed: Packed | None = None
    remainders: tuple[Remainders, ...] = ()
    mtp: tuple[Predicting, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)

    def era_at(self, year: float) -> Era:
        """Return the era of a year with decimals."""
        return next(era for era in reversed(self.eras) if year >= era.since)

    def changes_at(
        self, year: float, device: str, precision: str, model: str = "", zero_stage: int | None = None
    ) -> tuple[Change, ...]:
        """Return the changes that hold in a year for a device, a precision, a model and a ZeRO stage, later ones last.

        A `zero_stage` of None leaves out those of one stage alone.
        """
        words = f"{device} {precision} {_capitals(model)}"
        known = (c for c in self.changes if c.zero_stage in (None, zero_stage))
        return tuple(c for c in known if year >= c.since and re.search(c.matches, words))

    def options_at(self, year: float, device: str, precision: str, model: str = "") -> RunOptions:
        """Return the default options in a year; device and precision as words in capitals, the model by its name."""
        options = self.era_at(year).options
        for change in self.changes_at(year, device, precision, model):
            options = replace(options, **change.options)
        return options

    def recompute_at(
        self, year: float, device: str, precision: str, model: str = "", zero_stage: int | None = None
    ) -> tuple[str, ...]:
        """Return what is recomputed if nothing is said, the likeliest first; arguments as for `changes_at`."""
        stated = [c.recompute for c in self.changes_at(year, device, precision, model, zero_stage) if c.recompute]
        return stated[-1] if stated else self.kernels.recompute

    def mtp_layers_at(self, year: float, model: str) -> int:
        """Return the number of layers for tokens after the next that are added to a model, by its name."""
        found = [each.layers for each in self.mtp if year >= each.since and re.search(each.matches, _capitals(model))]
        return found[-1] if found else 0

    def in_16_bits(self, precision: str, latent: bool, year: float) -> str:
        """Return a precision without suffixes with those of what the stack keeps in 16 bits beside it.

        Args:
            latent: True for a model with latent attention, of which some stacks keep the moments in 16 bits.
        """
        if PRECISIONS[precision].grad_bytes is None or PRECISIONS[precision].compute == "float32":
            return precision
        if precision == "bf16" and self.native_since is not None and year >= self.native_since:
            return "native"
        usual, fp16 = self.gradients_16, precision == "fp16"
        always = usual is Gradients16.ALWAYS and (fp16 or year < self.gradients_32_since)
        narrow = always or (usual is Gradients16.FP16 and fp16)
        moments = narrow and latent and self.moments_16
        split = any(
            r.since <= year < r.until and precision in r.precisions and (moments or not r.with_moments)
            for r in self.remainders
        )
        return PrecisionName(precision, narrow, moments, split).name

    def experts_whole(self, year: float) -> bool:
        """Return True if experts are not split by tensor parallelism in a year."""
        return self.whole_experts_since is not None and year >= self.whole_experts_since


def version_of(year: float) -> str:
    """Return the first version whose month's middle is not before a year, YY.MM; the beginning of time as `oldest`."""
    if year < 1:
        return "oldest"
    months = math.ceil(year * 12 - 0.5 - 1e-6)
    return f"{months // 12 % 100:02d}.{months % 12 + 1:02d}"


def year_of(version: str) -> float:
    """Return the middle of the month of a version, in years. PinError for another text."""
    match = re.fullmatch(r"(?:20)?([12]\d)\.(0?[1-9]|1[0-2])", version)
    if match is None:
        raise PinError(f"version {version!r} of a stack is not a date; write YY.MM, for example 26.08")
    return 2000 + int(match.group(1)) + (int(match.group(2)) - 0.5) / 12


# -- reading -----------------------------------------------------------------------------------------------------------


class _Reader:
    """One mapping of a file, whose keys are all known."""

    def __init__(self, data: object, where: str, needed: Sequence[str], optional: Sequence[str] = ()) -> None:
        if not isinstance(data, Mapping):
            raise PinError(f"{where} must be a mapping with {', '.join(needed)}")
        check_names(data, (*needed, *optional), where)
        for key in needed:
            if key not in data:
                raise PinError(f"{where}: {key} is missing")
        self.data, self.where = data, where

    def one(self, key: str, kind: type | tuple[type, ...], default: object = None) -> Any:
        """Return a value of a type."""
        value = self.data.get(key, default)
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if value is not default and (not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds)):
            raise PinError(f"{self.where}: {key}={value!r} must be of type {' or '.join(k.__name__ for k in kinds)}")
        return value

    def some(self, key: str, known: Sequence[Any]) -> tuple[Any, ...]:
        """Return a list of known values."""
        values = self.one(key, list)
        for value in values:
            if value not in known:
                raise PinError(
                    f"{self.where}: {key} of {value!r} is not known; {did_you_mean(value, [str(k) for k in known])}"
                )
        return tuple(known[known.index(value)] for value in values)

    def inner(self, key: str, needed: Sequence[str], optional: Sequence[str] = ()) -> _Reader | None:
        """Return a mapping in this one; None without it."""
        if key not in self.data:
            return None
        return _Reader(self.data[key], f"{self.where}: {key}", needed, optional)


_NEEDED = ("name", "about", "frameworks", "default_version", "kernels", "can", "eras")
_OPTIONAL = (
    *("changes", "executed", "equal_stages", "chunks", "whole_experts", "kept_gathered", "gradients_16"),
    *("native", "moments_16", "vocab", "adapters", "packed", "remainders", "mtp"),
)
_ABLE: Mapping[str, Sequence[Any]] = {
    "modes": tuple(Mode),
    "degrees": _DEGREES,
    "schedules": tuple(SCHEDULES),
    "recompute": tuple(RECOMPUTE_KINDS),
    "zero_stages": ZERO_STAGES,
    "offload": tuple(name for name in OFFLOADS if name != "activations"),
    "precisions": tuple(PRECISIONS),
}

_MIX, _LIMITS = "recompute_mix", "limits"

SETTINGS: Mapping[str, Sequence[Any]] = {"dispatcher": tuple(Dispatcher), "launch": tuple(Launch)}  # of Abilities


def _options(read: _Reader, values: Mapping[str, Any]) -> RunOptions:
    try:
        return options_of(values)
    except PinError as error:
        raise PinError(f"{read.where}: options: {error}") from error


def _mix(read: _Reader) -> RecomputeMix:
    value, known = read.one(_MIX, str), [str(mix) for mix in RecomputeMix]
    if value not in known:
        raise PinError(f"{read.where}: {_MIX} of {value!r} is not known; {did_you_mean(value, known)}")
    return RecomputeMix(value)


def _eras(read: _Reader, can: Abilities) -> tuple[Era, ...]:
    """Return the eras, each of which states the options that differ from the one before; null: as if never stated."""
    out, stated = [], dict[str, Any]()
    for k, data in enumerate(read.one("eras", list)):
        each = _Reader(data, f"{read.where}: eras[{k}]", ("since", "source", "options"), ("can",))
        known = {**_ABLE, **SETTINGS}
        changed = each.inner("can", (), (*known, _MIX))
        given: dict[str, Any] = {}
        if changed is not None:
            given = {n: _mix(changed) if n == _MIX else changed.some(n, known[n]) for n in changed.data}
        abilities = replace(can, **given)
        stated = _stated(each, stated)
        options = _options(each, stated)
        out.append(Era(float(each.one("since", (int, float))), options, each.one("source", str), abilities))
    years = [era.since for era in out]
    if not years or years[0] != 0 or years != sorted(set(years)):
        raise PinError(f"{read.where}: eras must begin with since=0.0 and be in order, got {years}")
    return tuple(out)


def _stated(read: _Reader, before: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options stated up to an era, given those of the one before."""
    changed = read.one("options", dict)
    for name, value in changed.items():
        if value == before.get(name):  # also null for what no era stated
            raise PinError(f"{read.where}: options: {name} is {json.dumps(value)} in the era before; state what is new")
    return {name: value for name, value in {**before, **changed}.items() if value is not None}


_OF_LAYERS = re.compile(rf"\d+-\d+=({'|'.join(RECOMPUTE)})")  # of the layers with these numbers


def within_layers(how: str, number: int) -> str:
    """Return the recompute of a record for a model with this number of layers.

    A record counts the layers of the model that it was written for: `0-39=offload` of 40 layers is of the first 39 of a
    model with 40 or fewer, since Megatron keeps the last on the device.
    """
    if _OF_LAYERS.fullmatch(how) is None:
        return how
    place, _, kind = how.partition("=")
    first, last = map(int, place.split("-"))
    last = min(last, number - 2 if kind == OFFLOAD else number - 1)
    return f"{first}-{last}={kind}" if last >= first else NONE


def _changes(read: _Reader) -> tuple[Change, ...]:
    out = []
    for k, data in enumerate(read.one("changes", list, ())):
        needed = ("since", "matches", "options", "source")
        each = _Reader(data, f"{read.where}: changes[{k}]", needed, ("recompute", "zero_stage"))
        values, since = _options(each, each.one("options", dict)), float(each.one("since", (int, float)))
        changed = {name: getattr(values, name) for name in each.data["options"]}
        again = tuple(map(str, each.one("recompute", list, ())))
        for how in again:
            if not modules_of(how) and how not in RECOMPUTE and _OF_LAYERS.fullmatch(how) is None:
                raise PinError(
                    f"{each.where}: recompute of {how!r} is not known; {did_you_mean(how, RECOMPUTE)}, modules:... or "
                    "0-9=offload"
                )
        stage = each.one("zero_stage", int)
        out.append(Change(since, each.one("matches", str), changed, each.one("source", str), again, stage))
    return tuple(out)


def _remainders(read: _Reader) -> tuple[Remainders, ...]:
    out = []
    for k, data in enumerate(read.one("remainders", list, ())):
        needed = ("since", "until", "precisions", "source")
        each = _Reader(data, f"{read.where}: remainders[{k}]", needed, ("with_moments",))
        since, until = (float(each.one(name, (int, float))) for name in ("since", "until"))
        known = tuple(name for name, p in PRECISIONS.items() if p.compute == "bfloat16")
        precisions, with_moments = each.some("precisions", known), each.one("with_moments", bool, False)
        out.append(Remainders(since, until, precisions, each.one("source", str), with_moments))
    return tuple(out)


def _predicting(read: _Reader) -> tuple[Predicting, ...]:
    out = []
    for k, data in enumerate(read.one("mtp", list, ())):
        each = _Reader(data, f"{read.where}: mtp[{k}]", ("since", "matches", "layers", "source"))
        since = float(each.one("since", (int, float)))
        out.append(Predicting(since, each.one("matches", str), each.one("layers", int), each.one("source", str)))
    return tuple(out)


def _capitals(model: str) -> str:
    """Return the capitals and digits of a model's name, which records are matched with."""
    return re.sub(r"[^A-Z0-9]", "", model.upper())


def stack_of(data: object, where: str) -> Stack:
    """Return the stack of a mapping, as a file of profiles/stacks holds it.

    Raises: PinError that names `where`, the key, and the nearest known one.
    """
    read = _Reader(data, where, _NEEDED, _OPTIONAL)
    kernels = _Reader(read.data["kernels"], f"{where}: kernels", ("modes", "recompute", "zero_stages", "source"))
    can = _Reader(read.data["can"], f"{where}: can", (*_ABLE, _MIX, "source"), (*SETTINGS, _LIMITS))
    known = tuple(name for name in RECOMPUTE_KINDS if name in RECOMPUTE)
    chunks = read.inner("chunks", ("default", "source"))
    whole = read.inner("whole_experts", ("since", "source"))
    kept = read.inner("kept_gathered", ("in", "source"))
    narrow = read.inner("gradients_16", ("when", "source"), ("in_32_since",))
    native = read.inner("native", ("since", "source"))
    moments = read.inner("moments_16", ("source",))
    vocab = read.inner("vocab", ("vocab_size", "vocab_multiple", "source"))
    adapters = read.inner("adapters", ("rank", "layers", "source"))
    packed = read.inner("packed", ("until", "tokens", "source"))
    inner: dict[str, _Reader | None] = {
        "kernels": kernels,
        "can": can,
        "chunks": chunks,
        "whole_experts": whole,
        "kept_gathered": kept,
    }
    inner |= {
        "gradients_16": narrow,
        "native": native,
        "moments_16": moments,
        "vocab": vocab,
        "adapters": adapters,
        "packed": packed,
    }
    words = {**_ABLE, **{name: values for name, values in SETTINGS.items() if name in can.data}}
    lists = {name: can.some(name, values) for name, values in words.items()}
    limits = can.some(_LIMITS, tuple(Limit)) if _LIMITS in can.data else ()
    able = Abilities(**lists, recompute_mix=_mix(can), limits=limits, source=can.one("source", str))
    when = Gradients16.NEVER if narrow is None else narrow.one("when", str)
    if when not in tuple(Gradients16):
        known_16 = [str(each) for each in Gradients16]
        raise PinError(f"{where}: gradients_16: when={when!r} is not known; {did_you_mean(when, known_16)}")
    version = read.one("default_version", str)
    year_of(version)
    return Stack(
        name=read.one("name", str),
        about=read.one("about", str),
        frameworks=read.some("frameworks", tuple(Framework)),
        default_version=version,
        kernels=StackKernels(
            kernels.some("modes", tuple(Mode)),
            kernels.some("recompute", known),
            kernels.some("zero_stages", ZERO_STAGES),
            kernels.one("source", str),
        ),
        eras=_eras(read, able),
        changes=_changes(read),
        executed=read.one("executed", bool, False),
        equal_stages=read.one("equal_stages", bool, False),
        chunks=None if chunks is None else chunks.one("default", int),
        whole_experts_since=None if whole is None else float(whole.one("since", (int, float))),
        kept_gathered=() if kept is None else kept.some("in", tuple(KeptGathered)),
        gradients_16=Gradients16(when),
        gradients_32_since=math.inf if narrow is None else float(narrow.one("in_32_since", (int, float), math.inf)),
        native_since=None if native is None else float(native.one("since", (int, float))),
        moments_16=moments is not None,
        vocab=None if vocab is None else Vocab(**vocab.data),
        adapters=None
        if adapters is None
        else AdapterDefaults(**{**adapters.data, "layers": tuple(adapters.data["layers"])}),
        packed=None if packed is None else Packed(**packed.data),
        remainders=_remainders(read),
        mtp=_predicting(read),
        sources={key: each.one("source", str) for key, each in inner.items() if each is not None},
    )


@lru_cache(maxsize=1)
def stacks() -> Mapping[str, Stack]:
    """Return every stack by name, in alphabetical order. PinError for a file that is not a record."""
    out: dict[str, Stack] = {}
    for path in sorted(
        files("autoplan.profiles").joinpath("stacks").iterdir(), key=lambda p: p.name.removesuffix(".json")
    ):
        if path.name.endswith(".json"):
            read = stack_of(json.loads(path.read_text(encoding="utf-8")), f"profiles/stacks/{path.name}")
            if f"{read.name}.json" != path.name:
                raise PinError(f"profiles/stacks/{path.name}: name={read.name!r} must be that of the file")
            out[read.name] = read
    return out


@lru_cache(maxsize=1)
def stacks_of_frameworks() -> Mapping[Framework, Stack]:
    """Return the stack that rows of each framework are read as. PinError if a framework has none or two."""
    out: dict[Framework, Stack] = {}
    for each in stacks().values():
        for framework in each.frameworks:
            if framework in out:
                raise PinError(f"profiles/stacks: {framework!r} is in {out[framework].name} and {each.name}")
            out[framework] = each
    missing = [framework for framework in Framework if framework not in out]
    if missing:
        raise PinError(f"profiles/stacks: no record has the framework {missing[0]!r}")
    return out


def stack(name: str) -> Stack:
    """Return the stack with this name. PinError names the nearest one."""
    found = stacks().get(name)
    if found is None:
        raise PinError(f"stack {name!r} is not known; {did_you_mean(name, tuple(stacks()))}")
    return found
