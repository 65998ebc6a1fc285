"""A lower bound of the memory of the fullest rank, without a cut and without a schedule.

All ranks of a pipeline together hold every parameter with its state, and at some moment the activations of one
micro-batch on all of their layers: the fullest rank holds at least its share. It costs some microseconds where a
`MemoryModel` costs milliseconds, so a search excludes with it what has no chance.

With one micro-batch and one stage per rank, gradients appear while activations go, and do not count. With stages in
both directions the two stages of a rank may hold activations at different moments, which do not count either.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from autoplan.config.offload import ACTIVATIONS
from autoplan.config.parallel import Mode, ParallelConfig, Precision
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.cost_models.memory.parameters import ParameterMemory, States
from autoplan.cost_models.memory.ranks import activation_need, fixed_need
from autoplan.cost_models.memory.room import Room
from autoplan.cost_models.work import ParamWork, Workload
from autoplan.schedules.schedule import num_copies
from autoplan.units import dtype_bytes

_Kind = tuple[str, bool, bool, bool]  # dtype, trainable, of experts, packed


class LeastMemory:
    """The bound of the module for one workload at many degrees."""

    def __init__(self, workload: Workload, precision: Precision, cluster: Cluster, mode: Mode) -> None:
        self.precision, self.cluster, self.megatron = precision, cluster, mode is Mode.FUSED
        self.elements = _elements(workload)
        self.activations = _least_kept(workload)
        self._states: dict[object, States] = {}

    def terms(self, config: ParallelConfig, room: Room) -> Mapping[str, float]:
        """Return the bytes of the terms that have to fit into the fullest rank, at least."""
        c = config
        states, share = self._total(c), num_copies(c.schedule) / c.pp
        whole = c.num_micro_batches > 1 or c.virtual_stages > 1 or num_copies(c.schedule) > 1
        whole = whole or (self.megatron and c.zero_stage < 2)
        once = num_copies(c.schedule) == 1 and ACTIVATIONS not in c.offload
        held = self.activations / c.pp if once else 0.0
        return {
            "parameters": states.stored * share,
            "gathered parameters": states.gathered * share if c.zero_stage < 3 else 0.0,
            "gradients": states.gradients * share if whole else 0.0,
            "optimizer": states.optimizer * share,
            "activations": held * room.bytes_of(activation_need(self.cluster)),
            "context and communicators": room.bytes_of(fixed_need(c, self.cluster)),
        }

    def shortage(self, config: ParallelConfig, room: Room) -> str | None:
        """Return the largest term of a configuration that cannot fit; None if it may."""
        terms = self.terms(config, room)
        return max(terms, key=lambda name: terms[name]) if sum(terms.values()) > room.device_bytes else None

    def _total(self, config: ParallelConfig) -> States:
        memory = ParameterMemory(config, self.precision, self.megatron)
        key = (*memory.shares.values(), config.zero_stage, config.offload, config.num_micro_batches == 1)
        if key not in self._states:
            parts = (ParamWork("", n, *kind) for kind, n in self.elements.items())
            self._states[key] = States.total(map(memory.of, parts))
        return self._states[key]


def _elements(workload: Workload) -> Mapping[_Kind, int]:
    """Return the number of elements of all parameters by kind; those that several units use count once."""
    w, found = workload, Counter[_Kind]()
    for name, count in Counter(name for unit in w.units for name in unit).items():
        for p in w.blocks[name].params:
            found[p.dtype, p.trainable, p.expert, p.packed] += count * p.num_elements
    for t in w.tied:
        if t.first != t.last:
            dtype = next(p.dtype for name in w.units[t.last] for p in w.blocks[name].params)
            found[dtype, True, False, False] -= round(t.num_bytes / dtype_bytes(dtype))
    return found


def _least_kept(workload: Workload) -> float:
    """Return the bytes of the activations of one micro-batch, each unit under the choice that keeps least."""
    w = workload
    least = map(min, w.unit_saved, w.unit_selective, w.unit_kept)
    choices = w.unit_choices or ({},) * len(w.units)
    return sum(min(size, *each.values()) if each else size for size, each in zip(least, choices, strict=True))
