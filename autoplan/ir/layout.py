"""Layouts as data: the mesh of atomic sub-axes, the type of a value per sub-axis, and the conversions between types.

Types and their gradients (the terms of the PyPI package spmd_types):

    R replicate   same value, each rank uses it differently   gradient P
    I invariant   same value, every rank does the same work   gradient I
    S shard       split                                       gradient S
    P partial     pending sum                                 gradient R

A shard is written `Shard(dim, factor)`: it splits the factor at position `factor` of tensor dim `dim`. A value has one
type per sub-axis; sub-axes that shard the same factor do so in mesh order, major to minor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from autoplan.errors import LayoutError


@dataclass(frozen=True, order=True)
class AxisType:
    """R, I, P, or a shard of factor `factor` of dim `dim`."""

    kind_name: str
    dim: int = -1
    factor: int = -1

    @property
    def is_shard(self) -> bool:
        """True for S."""
        return self.kind_name == "S"

    def gradient(self) -> AxisType:
        """Return the type of the gradient of a value of this type."""
        return {"R": P, "I": I, "P": R}.get(self.kind_name, self)

    def __str__(self) -> str:
        return f"S({self.dim}.{self.factor})" if self.is_shard else self.kind_name


R = AxisType("R")
I = AxisType("I")  # noqa: E741
P = AxisType("P")


def shard(dim: int, factor: int = 0) -> AxisType:
    """Return the shard of one factor of one dim."""
    return AxisType("S", dim, factor)


Layout = tuple[AxisType, ...]  # one type per sub-axis of the intra-op mesh, in mesh order


@dataclass(frozen=True)
class Axis:
    """An atomic sub-axis of the device grid."""

    name: str
    size: int


@dataclass(frozen=True)
class Mesh:
    """The device grid: atomic sub-axes, major to minor over ranks, and named products of adjacent ones."""

    axes: tuple[Axis, ...]
    groups: Mapping[str, tuple[str, ...]]  # e.g. {"tp": ("tp0", "tp1")}

    def has(self, name: str) -> bool:
        """Return True if there is an axis or a named product of this name."""
        return name in self.groups or any(a.name == name for a in self.axes)

    def size(self, name: str) -> int:
        """Return the size of an axis or of a named product. LayoutError names an unknown axis."""
        for axis in self.axes:
            if axis.name == name:
                return axis.size
        if name in self.groups:
            return math.prod(self.size(member) for member in self.groups[name])
        known = [a.name for a in self.axes] + list(self.groups)
        raise LayoutError(f"unknown mesh axis {name!r}; known: {', '.join(known)}")

    @property
    def num_devices(self) -> int:
        """Number of devices: the product of all sub-axes."""
        return math.prod(axis.size for axis in self.axes)

    def atoms(self, name: str) -> tuple[str, ...]:
        """Return the sub-axes of an axis or of a named product."""
        return self.groups.get(name, (name,))

    def canonical(self, name: str) -> str:
        """Return the first axis or group that spans the same ranks, under which the runtime records collectives."""
        sizes = {a.name: a.size for a in self.axes}
        wanted = [a for a in self.atoms(name) if sizes[a] > 1]
        return next(n for n in (*sizes, *self.groups) if [a for a in self.atoms(n) if sizes[a] > 1] == wanted)

    @property
    def communicators(self) -> tuple[tuple[str, ...], ...]:
        """The communicators of a rank: for each, the sub-axes larger than 1 that its ranks differ along.

        As the runtime makes them (`autoplan.runtime.mesh`): one of all ranks, and one for every axis or named product
        that has more than one rank and does not span the ranks of an earlier one.
        """
        sizes = {a.name: a.size for a in self.axes}
        spans = [tuple(sizes), *map(self.atoms, (*sizes, *self.groups))]
        found = dict.fromkeys(tuple(a for a in span if sizes[a] > 1) for span in spans)
        return tuple(span for span in found if span)


class ConversionKind(Enum):
    """The kinds of conversion steps. The value is the runtime function's name."""

    ALL_REDUCE = "all_reduce"  # P -> R | I
    REDUCE_SCATTER = "reduce_scatter"  # P -> S
    ALL_GATHER = "all_gather"  # S -> R | I
    SLICE = "slice_"  # R | I -> S
    TO_REPLICATE = "to_replicate"  # I -> R
    ALL_TO_ALL = "all_to_all"  # S -> S'
    TO_PARTIAL = "to_partial"  # R | I -> P


# collectives in the forward and in the backward; None: nothing is sent
COLLECTIVES: dict[tuple[ConversionKind, str], tuple[str | None, str | None]] = {
    (ConversionKind.ALL_REDUCE, "R"): ("all_reduce", "all_reduce"),
    (ConversionKind.ALL_REDUCE, "I"): ("all_reduce", None),
    (ConversionKind.REDUCE_SCATTER, "S"): ("reduce_scatter", "all_gather"),
    (ConversionKind.ALL_GATHER, "R"): ("all_gather", "reduce_scatter"),
    (ConversionKind.ALL_GATHER, "I"): ("all_gather", None),
    (ConversionKind.SLICE, "R"): (None, None),
    (ConversionKind.SLICE, "I"): (None, "all_gather"),
    (ConversionKind.TO_REPLICATE, "R"): (None, "all_reduce"),
    (ConversionKind.ALL_TO_ALL, "S"): ("all_to_all", "all_to_all"),
    (ConversionKind.TO_PARTIAL, "R"): (None, None),
    (ConversionKind.TO_PARTIAL, "I"): (None, None),
}


@dataclass(frozen=True)
class ConversionStep:
    """One conversion on one or more adjacent sub-axes (indices into the layout) at once."""

    kind: ConversionKind
    axes: tuple[int, ...]
    source: AxisType
    target: AxisType

    @property
    def collectives(self) -> tuple[str | None, str | None]:
        """The (forward, backward) collectives."""
        tag = (
            self.source.kind_name
            if self.kind in (ConversionKind.SLICE, ConversionKind.TO_PARTIAL)
            else self.target.kind_name
        )
        return COLLECTIVES[self.kind, tag]


_KINDS = {  # (source, target) -> kind of the step between them
    ("P", "R"): ConversionKind.ALL_REDUCE,
    ("P", "I"): ConversionKind.ALL_REDUCE,
    ("P", "S"): ConversionKind.REDUCE_SCATTER,
    ("S", "R"): ConversionKind.ALL_GATHER,
    ("S", "I"): ConversionKind.ALL_GATHER,
    ("R", "S"): ConversionKind.SLICE,
    ("I", "S"): ConversionKind.SLICE,
    ("I", "R"): ConversionKind.TO_REPLICATE,
    ("S", "S"): ConversionKind.ALL_TO_ALL,
    ("R", "P"): ConversionKind.TO_PARTIAL,
    ("I", "P"): ConversionKind.TO_PARTIAL,
}


def _kind(source: AxisType, target: AxisType) -> ConversionKind | None:
    return _KINDS.get((source.kind_name, target.kind_name))


def _innermost(layout: Sequence[AxisType], axis: int) -> bool:
    """Return True if no later sub-axis shards the same factor: only the minor one is gathered without a permutation."""
    return all(layout[later] != layout[axis] for later in range(axis + 1, len(layout)))


def _orders(pending: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    if not pending:
        yield ()
    for i, axis in enumerate(pending):
        for rest in _orders(pending[:i] + pending[i + 1 :]):
            yield (axis, *rest)


def conversion(source: Layout, target: Layout) -> tuple[ConversionStep, ...] | None:
    """Return the steps from one layout to another; None if there are none, or only with a permutation.

    Equal neighbouring steps on adjacent sub-axes of one factor become one collective on their product.
    """
    changed = tuple(a for a in range(len(source)) if source[a] != target[a])
    whole = _merge(source, target, changed)
    if whole is not None:
        return whole
    for order in _orders(changed):
        current, steps = list(source), []
        for axis in order:
            kind = _kind(current[axis], target[axis])
            if kind is None or (current[axis].is_shard and not _innermost(current, axis)):
                break
            step = ConversionStep(kind, (axis,), current[axis], target[axis])
            current[axis] = target[axis]
            if target[axis].is_shard and not _innermost(current, axis):
                break
            steps.append(step)
        else:
            return tuple(steps)
    return None


def _merge(source: Layout, target: Layout, changed: tuple[int, ...]) -> tuple[ConversionStep, ...] | None:
    """Return one step over several adjacent sub-axes if all of them convert alike, else None."""
    if len(changed) < 2 or changed != tuple(range(changed[0], changed[-1] + 1)):
        return None
    if len({source[a] for a in changed}) != 1 or len({target[a] for a in changed}) != 1:
        return None
    first = changed[0]
    kind = _kind(source[first], target[first])
    outside = [a for a in range(len(source)) if a not in changed]
    if kind is None or any(source[a].is_shard and source[a] in (source[first], target[first]) for a in outside):
        return None
    return (ConversionStep(kind, changed, source[first], target[first]),)
