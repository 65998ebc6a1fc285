"""Recompute: what a layer keeps, recomputes or sends to the host for its backward, and how people write it in a pin."""

from __future__ import annotations

import difflib
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Any

from autoplan.config.numbers import read_list
from autoplan.errors import PinError

NONE, SELECTIVE, FULL, OFFLOAD, REGIONS, MODULES_KIND = "none", "selective", "full", "offload", "regions", "modules"
BY_OPERATION = "products"
# Groups of regions that a block can recompute separately, in the order of their names in a plan (`attention+norms`).
GROUPS = ("attention", "mlp", "norms")
# Modules that Megatron recomputes (--recompute-modules), as a choice `modules:core_attn,mlp`. Priced, not executed.
MODULES = ("core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts")
_MODULES_PREFIX = "modules:"


class Searched(Enum):
    """When a search tries a kind for single layers."""

    ALWAYS = "always"
    BY_OPERATION = "where operations are known one by one"
    OFFLOADING = "where it may leave activations on the host"
    NEVER = "only if it is pinned"


class RecomputeMix(StrEnum):
    """How the recompute of single layers may differ in one program."""

    ANY = "any"
    FIRST_LAYERS = "first_layers"
    EVERY_NTH = "every_nth"
    UNIFORM = "uniform"

    @property
    def words(self) -> str:
        """What the mix allows, in words."""
        return _MIX_WORDS[self]

    @property
    def searched(self) -> RecomputeMix:
        """The mix of the candidates of a search: every Nth layer is looked at only if it is pinned."""
        return RecomputeMix.UNIFORM if self is RecomputeMix.EVERY_NTH else self


_MIX_WORDS = {
    RecomputeMix.ANY: "a choice per layer",
    RecomputeMix.FIRST_LAYERS: "one choice for all layers, or full or offload for as many first layers of every stage",
    RecomputeMix.EVERY_NTH: "one choice for all layers, or full for every Nth layer of every rank",
    RecomputeMix.UNIFORM: "one choice for all layers",
}


@dataclass(frozen=True)
class RecomputeKind:
    """One way for a layer to keep fewer activations for its backward than autograd would.

    Attributes:
        name: The choice; for a kind with parts, the word for the parts.
        does: What is kept, recomputed or copied.
        parts: The parts that a choice of this kind combines; empty if the name itself is the choice.
        recomputes: True if the backward reruns some of the forward.
        on_host: True if activations that would be kept wait on the host.
        searched: When a search tries it for single layers.
        executed: True if the runtime executes it.
        modes: The modes in which it is priced; empty: all modes.
    """

    name: str
    does: str
    parts: tuple[str, ...] = ()
    recomputes: bool = False
    on_host: bool = False
    searched: Searched = Searched.NEVER
    executed: bool = True
    modes: tuple[str, ...] = ()


_RECORDS = (
    RecomputeKind(NONE, "everything is kept"),
    RecomputeKind(
        SELECTIVE,
        "the attention core is recomputed and its result kept (Korthikanti et al., 2022)",
        recomputes=True,
    ),
    RecomputeKind(
        FULL,
        "only the inputs of a layer are kept, and all of it is recomputed",
        recomputes=True,
        searched=Searched.ALWAYS,
    ),
    RecomputeKind(
        OFFLOAD,
        "the activations of a layer are copied to the host and back",
        on_host=True,
        searched=Searched.OFFLOADING,
    ),
    RecomputeKind(
        BY_OPERATION,
        "results of attention and of every second product are kept, and the rest is recomputed (torchtitan's selective "
        "checkpointing by operation)",
        recomputes=True,
        executed=False,
        modes=("eager", "compiled"),
    ),
    RecomputeKind(
        REGIONS,
        "groups of regions are recomputed and their results are not kept",
        GROUPS,
        recomputes=True,
        searched=Searched.BY_OPERATION,
    ),
    RecomputeKind(
        MODULES_KIND,
        "modules are Megatron's",
        MODULES,
        recomputes=True,
        executed=False,
        modes=("fused",),
    ),
)
RECOMPUTE_KINDS: Mapping[str, RecomputeKind] = {kind.name: kind for kind in _RECORDS}
RECOMPUTE = tuple(kind.name for kind in _RECORDS if not kind.parts)


def recompute_kind(how: str) -> RecomputeKind:
    """Return the kind of a recompute choice; for example, `attention+norms` is of the kind regions."""
    if how in RECOMPUTE:
        return RECOMPUTE_KINDS[how]
    return RECOMPUTE_KINDS[MODULES_KIND if how.startswith(_MODULES_PREFIX) else REGIONS]


def kinds_in(recompute: str | Mapping[str, str] | tuple[int, ...]) -> set[str]:
    """Return the names of the kinds that a configuration uses. Layers per stage are recomputed in full."""
    if isinstance(recompute, tuple):
        return {FULL if any(recompute) else NONE}
    return {
        recompute_kind(how).name for how in (recompute.values() if isinstance(recompute, Mapping) else (recompute,))
    }


def modules_of(how: object) -> tuple[str, ...]:
    """Return the modules that a recompute choice names, in the order of MODULES; empty for a choice of another kind.

    Raises: PinError for an unknown module.
    """
    if not isinstance(how, str) or not how.startswith(_MODULES_PREFIX):
        return ()
    given = how.removeprefix(_MODULES_PREFIX).split(",")
    for name in given:
        if name not in MODULES:
            near = difflib.get_close_matches(name, MODULES, 1, 0.0)[0]
            raise PinError(
                f"recompute={how!r}: {name!r} is not a module; use {', '.join(MODULES)}, joined by commas; did you "
                f"mean {near}?",
                ("recompute",),
            )
    return tuple(m for m in MODULES if m in given)


def outside_graphs(recompute: Any) -> bool:
    """Return True for recompute that Megatron's CUDA graphs of layers exclude (TransformerConfig.__post_init__)."""
    kinds = recompute.values() if isinstance(recompute, Mapping) else recompute
    kinds = (kinds,) if isinstance(kinds, str) else tuple(kinds or ())
    first = any(isinstance(kind, int) and kind > 0 for kind in kinds)  # as many first layers of a stage, in full
    return first or any(kind in (FULL, OFFLOAD) or "moe" in modules_of(str(kind)) for kind in kinds)


def modules_choice(modules: Iterable[str]) -> str:
    """Return the recompute choice that names these modules."""
    named = set(modules)
    return _MODULES_PREFIX + ",".join(m for m in MODULES if m in named)


def region_groups(how: str) -> tuple[str, ...]:
    """Return the groups that a recompute choice names: two for `attention+norms`, attention for `selective`."""
    if how == SELECTIVE:
        return ("attention",)
    if how == BY_OPERATION:
        return (BY_OPERATION,)
    if how.startswith(_MODULES_PREFIX):
        return ()
    return tuple(g for g in GROUPS if g in how.split("+"))


def check_choice(value: object) -> str:
    """Return a recompute choice for one block or all in canonical form: its name, or groups in the order of GROUPS.

    Raises: PinError that names the legal choices.
    """
    if isinstance(value, str) and value in RECOMPUTE:
        return value
    if named := modules_of(value):
        return modules_choice(named)
    parts = value.split("+") if isinstance(value, str) else value
    if isinstance(parts, (list, tuple)) and parts and all(isinstance(p, str) for p in parts):
        unknown = [p for p in parts if p not in GROUPS]
        if not unknown and len(set(parts)) == len(parts):
            return "+".join(g for g in GROUPS if g in parts)
    raise PinError(
        f"recompute={value!r} is not supported; use {', '.join(RECOMPUTE)}, or some of {', '.join(GROUPS)} joined by + "
        "(attention+norms), or a mapping block -> one of these; with --mode fused also modules of Megatron's "
        "(modules:core_attn,mlp)",
        ("recompute",),
    )


def read_recompute(value: Any) -> str | dict[str, str]:
    """Return the pin in canonical form: one choice for all layers, or a mapping from block to choice."""
    if isinstance(value, Mapping):
        return {name: check_choice(v) for name, v in value.items()}
    return check_choice(value)


_LAYERS = re.compile(r"(\d+)(?:-(\d+))?")  # layers in model order, from 0: `4`, or `0-3`


def recompute_of_text(text: str, layers: Sequence[str]) -> str | tuple[int, ...] | dict[str, str]:
    """Parse recompute from text: a choice for all layers, a number of layers per stage, or a choice per layer.

    Args:
        text: `full`; `3,0` (layers per stage to recompute in full); or per layer `0-3=full,4-31=attention+norms`, also
            with names of blocks. Layers that are not named keep everything.
        layers: The names of the model's layers, in model order.

    Raises: PinError for a layer that the model does not have or that is named twice.
    """
    if re.fullmatch(r"\d+(,\d+)*", text):
        return read_list(f"--recompute {text}", text)
    if "=" not in text:
        return check_choice(text)
    out: dict[str, str] = {}
    for part in text.split(","):
        which, _, how = (piece.strip() for piece in part.partition("="))
        numbers = _LAYERS.fullmatch(which)
        names: Sequence[str] = [which]
        if numbers is not None:
            first, last = int(numbers[1]), int(numbers[2] or numbers[1])
            if not first <= last < len(layers):
                raise PinError(
                    f"--recompute {text}: {which} must be layers from 0 to {len(layers) - 1}; nearest legal: "
                    f"{min(first, len(layers) - 1)}-{len(layers) - 1}={how or 'full'}"
                )
            names = layers[first : last + 1]
        if not how or not which or any(name in out for name in names):
            raise PinError(f"--recompute {text}: {part!r} is not LAYERS=CHOICE (0-3=full), each layer once")
        out |= dict.fromkeys(names, check_choice(how))
    return out


def recompute_text(recompute: str | Mapping[str, str] | Sequence[int], layers: Sequence[str]) -> str:
    """Return a text that `recompute_of_text` reads as `recompute` or an equivalent of it."""
    if isinstance(recompute, str):
        return recompute
    if not isinstance(recompute, Mapping):
        return ",".join(map(str, recompute)) if any(recompute) else NONE
    parts = [f"{name}={how}" for name, how in recompute.items() if name not in layers and how != NONE]
    first = 0
    for how, run in itertools.groupby(layers, key=lambda name: recompute.get(name, NONE)):
        last = first + len(list(run)) - 1
        if how != NONE:
            parts.append(f"{first}={how}" if first == last else f"{first}-{last}={how}")
        first = last + 1
    return ",".join(parts) or NONE


def leading(kinds: Sequence[str], stages: Sequence[int], what: str) -> int | None:
    """Return how many first layers of every stage are of a kind and the others none; None if it is not so.

    Args:
        kinds: the choice of every layer, in model order.
        stages: the numbers of layers of all stages, in model order; a stage with fewer layers may be full of the kind.
    """
    counts, at = set(), 0
    for size in stages:
        part = tuple(kinds[at : at + size])
        count = sum(kind == what for kind in part)
        if part != (what,) * count + (NONE,) * (size - count):
            return None
        counts.add((count, size))
        at += size
    most = max(count for count, _ in counts)
    return most if all(count == min(most, size) for count, size in counts) else None


def layers_on_ranks(stages: Sequence[int], chunks: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the numbers of the layers on every rank, in the order of its chunks.

    Args:
        stages: the numbers of layers of all stages, in model order.
        chunks: the stages of every rank.
    """
    first = [0, *itertools.accumulate(stages)]
    return [[k for stage in held for k in range(first[stage], first[stage + 1])] for held in chunks]


def every_nth(kinds: Sequence[str], ranks: Sequence[Sequence[int]]) -> int | None:
    """Return the N of a program whose ranks recompute every Nth of their layers in full and nothing else; else None.

    Args:
        kinds: the choice of every layer, in model order.
        ranks: the numbers of the layers of every rank, in order: its Nth, 2Nth ... layer is recomputed.
    """
    for n in range(2, max(map(len, ranks), default=0) + 1):
        if all((kinds[k] == FULL) == (at % n == 0) for held in ranks for at, k in enumerate(held, 1)):
            return n if set(kinds) <= {NONE, FULL} else None
    return None


def can_mix(
    mix: RecomputeMix,
    recompute: str | Mapping[str, str] | tuple[int, ...],
    layers: Sequence[str],
    stages: Sequence[int] | None,
    chunks: Sequence[Sequence[int]] | None = None,
) -> bool:
    """Return True if a mix of recompute allows a choice; True also where that depends on stages that are not known.

    Args:
        layers: the names of the model's layers, in model order.
        stages: the numbers of layers of all stages, in model order; None if they are not known.
        chunks: the stages of every rank; None: one stage per rank.
    """
    if mix is RecomputeMix.ANY or isinstance(recompute, str):
        return True
    if isinstance(recompute, tuple):
        if sum(recompute) in (0, len(layers)):
            return True
        if mix in (RecomputeMix.UNIFORM, RecomputeMix.EVERY_NTH):
            return False
        most = max(recompute)
        if stages is None:  # a stage with fewer than the most may have no more layers, but it has one
            return all(count == most or count > 0 for count in recompute)
        return all(count == min(most, size) for count, size in zip(recompute, stages, strict=True))
    kinds = [recompute.get(name, NONE) for name in layers]
    if len(set(kinds)) <= 1:
        return True
    held_by = chunks if chunks is not None else [[k] for k in range(len(stages or ()))]
    return _can_mix_layers(mix, kinds, stages, held_by)


def _can_mix_layers(
    mix: RecomputeMix, kinds: Sequence[str], stages: Sequence[int] | None, chunks: Sequence[Sequence[int]]
) -> bool:
    """Return True if a mix allows choices that differ between layers; True also without stages, on which it depends."""
    some = set(kinds) - {NONE}
    if mix is RecomputeMix.EVERY_NTH and some == {FULL}:
        return stages is None or every_nth(kinds, layers_on_ranks(stages, chunks)) is not None
    if mix is RecomputeMix.FIRST_LAYERS and len(some) == 1 and some <= {FULL, OFFLOAD}:
        return NONE in kinds and (stages is None or leading(kinds, stages, *some) is not None)
    return False


def layers_by_choice(recompute: str | Mapping[str, str] | tuple[int, ...]) -> dict[str, int]:
    """Return the choices that are made besides `none`, each with the number of its layers; 0: all layers."""
    if isinstance(recompute, str):
        return {} if recompute == NONE else {recompute: 0}
    if isinstance(recompute, tuple):
        return {FULL: sum(recompute)} if any(recompute) else {}
    return Counter(how for how in recompute.values() if how != NONE)


def layers_text(number: int, layers: int) -> str:
    """Return a number of layers out of `layers`, such as `22/32`; `22` if `layers` is 0, which stands for unknown."""
    return f"{number}/{layers}" if layers else str(number)


def recompute_label(recompute: str | Mapping[str, str] | tuple[int, ...], layers: int) -> str:
    """Return a label: `none`, `full`, `selective`, or by number of layers `mlp 22/32, full 3/32`.

    `layers`: the number of layers of the model; 0 if unknown, in which case the label omits it.
    """
    parts = (f"{how} {layers_text(n, layers)}" if n else how for how, n in layers_by_choice(recompute).items())
    return ", ".join(parts) or NONE
