"""Divide a trace where a model has no lists of layers: into blocks that are attributes, or parts with heavy operations.

What is divided is the order in which operations run. Two or more calls of modules of one kind that are made of modules
are blocks, each a part; equal ones become calls of one block when blocks are made. A module that holds a large share of
the model is opened, for the blocks inside it or, where there are none, for its operations. Operations in no such block
form parts, each of which ends before the next heavy operation, as a convolution. What is lighter than a part stays
around the parts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from autoplan.capture.trace import Trace
from autoplan.errors import RuleError
from autoplan.ir.fresh import FreshNames
from autoplan.ir.graph import Node, is_around_layers
from autoplan.ops.table import flops, op_record, rule_for

_OPENED = 1 / 8  # share of the model from which on a module is opened; blocks of one kind have it together
_LEAST = 1 / 32  # share of the model that a part of unlike operations has
_HEAVY = 1 / 10  # a heavy operation weighs this much of the heaviest of the part before it
_SIZES = {"b": 1, "s": 64, "t": 64}  # of the batch; the share of an operation in the arithmetic hardly depends on them


@dataclass(frozen=True)
class _Entry:
    """An operation of the trace. `calls`: of the modules that make it; `share`: its part of the model, of 1."""

    node: Node
    calls: tuple[str, ...]
    share: float
    has_params: bool


@dataclass(frozen=True)
class _Piece:
    """Operations that stay together. `path`: of their module; `is_block`: they are a part by themselves."""

    entries: tuple[_Entry, ...]
    path: str
    is_block: bool = False

    @cached_property
    def share(self) -> float:
        return sum(e.share for e in self.entries)

    @cached_property
    def has_params(self) -> bool:
        return any(e.has_params for e in self.entries)

    @cached_property
    def begins(self) -> bool:
        """True if a part may begin here: a bias belongs to the product before it."""
        return self.has_params and not all(op_record(e.node.op).fuses for e in self.entries)


_Part = Sequence[_Piece]


def divide(trace: Trace, pure: Set[str], kinds: Mapping[str, Hashable]) -> None:
    """Give operations outside layers to parts, which are like layers; changes `region` and `roots` of the trace.

    Where there are layers, what is around them is divided only if the blocks there weigh more than the layers.

    Args:
        pure: values that depend on no parameter. What makes them is in no part: every stage of a pipeline computes it.
        kinds: path -> kind, of the modules that are made of modules with parameters.
    """
    layers = {*filter(None, trace.region.values()), *(r.layer for r in trace.repeats)}
    if layers and not _has_blocks(trace, kinds):
        return
    shares = _shares(trace)
    pieces = [_opened(stretch, 0, kinds) for stretch in _stretches(trace, pure, shares)]
    if layers and sum(p.share for found in pieces for p in found if p.is_block) <= _share_of_layers(trace, shares):
        return
    parts = [part for found in pieces for part in _parts(found)]
    if len(layers) + len(parts) > 1 and not _divides_updates(trace, parts):
        _mark(trace, parts, layers)


def _path(call: str) -> str:
    return call.rpartition("@")[0]


def _has_blocks(trace: Trace, kinds: Mapping[str, Hashable]) -> bool:
    """Return True if modules outside the layers are of one kind."""
    outside = [node.name for node in trace.nodes if not trace.region[node.name]]
    paths = {_path(call) for name in outside for call in trace.within.get(name) or ()} & kinds.keys()
    without = [path for path in paths if not any(layer.startswith(f"{path}.") for layer in trace.layer_inputs)]
    alike = Counter((path.rpartition(".")[0], kinds[path]) for path in without)
    return any(count > 1 for count in alike.values())


def _shares(trace: Trace) -> dict[str, float]:
    """Return the share of every node in the model: the mean of its shares in the arithmetic and in the parameters."""
    arithmetic, stored, seen = dict[str, float](), dict[str, float](), set[str]()
    for node in trace.nodes:
        try:
            count = flops(node, trace.values, rule_for(node, trace.values)).evaluate(_SIZES)
        except RuleError:  # nothing is wrong yet: what cannot be split may run unsplit
            count = trace.values[node.outputs[0]].num_elements.evaluate(_SIZES)
        mine = {x for x in node.tensor_inputs if x in trace.params} - seen
        seen |= mine
        arithmetic[node.name] = float(count)
        stored[node.name] = float(sum(trace.values[x].num_elements.evaluate(_SIZES) for x in mine))
    totals = [(found, total) for found in (arithmetic, stored) if (total := sum(found.values()))]
    return {n.name: sum(found[n.name] / total for found, total in totals) / len(totals) for n in trace.nodes}


def _share_of_layers(trace: Trace, shares: Mapping[str, float]) -> float:
    found: dict[str, float] = {}
    for name, layer in trace.region.items():
        found[layer] = found.get(layer, 0.0) + shares.get(name, 0.0)
    found.pop("", None)
    return sum(found.values()) + sum(found[r.first] for r in trace.repeats)


def _stretches(trace: Trace, pure: Set[str], shares: Mapping[str, float]) -> Iterator[list[_Entry]]:
    """Yield the operations of the model between its layers, in their order."""
    stretch: list[_Entry] = []
    calls: tuple[str, ...] | None = ()
    for kind, index in trace.order:
        node = trace.nodes[index] if kind == "node" else None
        if node is not None and not trace.region[node.name]:
            calls = trace.within.get(node.name, calls)  # what a pass added belongs where it stands
            if set(node.outputs) <= pure:
                continue
            if calls is not None:
                has_params = any(x in trace.params for x in node.tensor_inputs)
                stretch.append(_Entry(node, calls, shares[node.name], has_params))
                continue
        if stretch:
            yield stretch
        stretch = []
    if stretch:
        yield stretch


def _opened(entries: Iterable[_Entry], depth: int, kinds: Mapping[str, Hashable]) -> list[_Piece]:
    """Return the pieces of what one module makes, `depth` modules inside the model."""
    runs = [
        (call, _Piece(tuple(run), _path(call)))
        for call, run in groupby(entries, lambda e: e.calls[depth] if len(e.calls) > depth else "")
    ]
    count, share = Counter[Hashable](), Counter[Hashable]()
    for _, run in runs:
        if run.path in kinds:
            count[kinds[run.path]] += 1
            share[kinds[run.path]] += run.share  # type: ignore[assignment]
    found: list[_Piece] = []
    for call, run in runs:
        if not call:
            found += [_Piece((e,), _path(e.calls[-1]) if e.calls else "") for e in run.entries]
        elif run.path not in kinds:
            found.append(run)
        else:
            kind = kinds[run.path]
            is_block = count[kind] > 1 and share[kind] >= _OPENED and run.has_params
            inside = _opened(run.entries, depth + 1, kinds) if run.share >= _OPENED else []
            if inside and (not is_block or any(p.is_block for p in inside)):
                found += inside
            else:
                found.append(_Piece(run.entries, run.path, is_block))
    return found


def _parts(pieces: Iterable[_Piece]) -> Iterator[_Part]:
    """Yield the blocks, and the parts that the pieces between them form."""
    part: list[_Piece] = []
    for piece in pieces:
        begins = piece.begins and piece.share >= _HEAVY * max((p.share for p in part), default=0.0)
        if piece.is_block or (begins and _is_part(part)):
            if _is_part(part):
                yield part
            part = []
        if piece.is_block:
            yield [piece]
        else:
            part.append(piece)
    if _is_part(part):
        yield part


def _is_part(pieces: Sequence[_Piece]) -> bool:
    return sum(p.share for p in pieces) >= _LEAST and any(p.has_params for p in pieces)


def _divides_updates(trace: Trace, parts: Sequence[_Part]) -> bool:
    """Return True if a buffer that is changed would be used in two places: each would have a copy of its own."""
    of_part = {e.node.name: i for i, part in enumerate(parts) for piece in part for e in piece.entries}
    changed = trace.updated_buffers()
    places, place, before = dict[str, set[int]](), 0, -1
    for kind, index in trace.order:
        node = trace.nodes[index] if kind == "node" else None
        here = -2 if node is None else of_part.get(node.name, -1)
        place += here != before
        before = here
        for name in changed & set(node.tensor_inputs if node is not None else ()):
            places.setdefault(name, set()).add(place)
    return any(len(found) > 1 for found in places.values())


def _mark(trace: Trace, parts: Iterable[_Part], layers: Set[str]) -> None:
    """Give the operations to their parts. A part has the name of its heaviest module with parameters."""
    unused = FreshNames(name.replace(".", "_") for name in layers)
    for part in parts:
        main = max((p for p in part if p.has_params), key=lambda p: p.share)
        base = main.path or main.entries[0].node.op
        fresh = unused.fresh(base.replace(".", "_"))
        while is_around_layers(fresh):
            fresh = unused.fresh(base.replace(".", "_"))
        name = base + fresh[len(base) :]
        trace.roots[name] = _common([p.path for p in part])
        for piece in part:
            trace.region |= dict.fromkeys((e.node.name for e in piece.entries), name)


def _common(paths: Sequence[str]) -> str:
    """Return the module that holds all of these modules."""
    names = [path.split(".") if path else [] for path in paths]
    shared = [found[0] for found in zip(*names, strict=False) if len(set(found)) == 1]
    depth = next((k for k, found in enumerate(zip(*names, strict=False)) if len(set(found)) > 1), len(shared))
    return ".".join(shared[:depth])
