"""The seconds of every unit by kind of work, from the costs of blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

from autoplan.cost_models.quantity import Quantity
from autoplan.cost_models.time.blocks import BlockCost
from autoplan.cost_models.work import Workload

# Columns of a table of units: the seconds of a block, and True if only those of layers count.
_COLUMNS: Mapping[str, tuple[Callable[[BlockCost], Quantity], bool]] = {
    "forward": (lambda b: b.forward_s, False),
    "backward": (lambda b: b.backward_s, False),
    "weight": (lambda b: b.weight + b.accumulate, False),
    "weight_of_layers": (lambda b: b.weight + b.accumulate, True),
    "recompute_s": (lambda b: b.recompute_s, True),
    "selective": (lambda b: b.selective, False),
    "gather": (lambda b: b.gather, False),
    "reduce": (lambda b: b.reduce, False),
    "first": (lambda b: b.zero_first, False),
    "last": (lambda b: b.zero_last, False),
    "per_step": (lambda b: b.per_step, False),
    "waited_once": (lambda b: b.waited_once, False),
    "waited_split": (lambda b: b.waited_split, True),
    "optimizer": (lambda b: b.optimizer + b.moved, False),
}


class Table:
    """The seconds of every unit in one scenario, by kind of work (`_COLUMNS`). Chunks are sums over units."""

    def __init__(self, workload: Workload, blocks: Mapping[str, BlockCost], which: str) -> None:
        self._workload, self._units, self._blocks, self._which = workload, workload.units, blocks, which
        self._repeated: dict[tuple[tuple[str, ...], str], float] = {}  # cached, because layers are calls of few blocks

    def __getattr__(self, name: str) -> list[float]:
        """Return a column: the sum over every unit's blocks, or over those of its layers; made when it is asked for."""
        if name not in _COLUMNS:
            raise AttributeError(name)
        of, layers_only = _COLUMNS[name]
        each = {block: float(getattr(of(cost), self._which)) for block, cost in self._blocks.items()}
        known: dict[int, float] = {}  # equal units are summed once
        w, kinds = self._workload, self._workload.unit_kinds
        for kind, units, layers in zip(kinds, w.units, w.is_layer, strict=True):
            if kind not in known:
                known[kind] = sum(each[n] for n, layer in zip(units, layers, strict=True) if layer or not layers_only)
        out = self.__dict__[name] = [known[kind] for kind in kinds]
        return out

    @cached_property
    def _names(self) -> list[tuple[str, ...]]:
        """The blocks of every unit that are layers."""
        marked = zip(self._units, self._workload.is_layer, strict=True)
        return [tuple(n for n, layer in zip(unit, layers, strict=True) if layer) for unit, layers in marked]

    def slack(self, units: Sequence[int], *phases: str) -> float:
        """Return the host's idle seconds in `phases` of units: the more, the shorter the step."""
        which = {"low": "high", "mid": "mid", "high": "low"}[self._which]
        names = [n for u in units for n in self._units[u]]
        return sum(float(getattr(self._blocks[n].slack[phase], which)) for phase in phases for n in names)

    def repeated(self, unit: int, how: str) -> float:
        """Return the seconds that a recompute choice adds to the backward of a unit."""
        key = self._names[unit], how
        if key not in self._repeated:
            costs = (self._blocks[name] for name in self._names[unit])
            self._repeated[key] = sum(float(getattr(b.repeated(how), self._which)) for b in costs)
        return self._repeated[key]
