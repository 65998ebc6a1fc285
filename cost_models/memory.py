"""Memory of every pipeline rank, by term. Activations come from the captured graph (what autograd saves).

With P parameter bytes on a rank (after tp and ep), of which L is the largest block, and n data-parallel ranks:

| ZeRO | parameters | gathered parameters | gradients | optimizer |
|---|---|---|---|---|
| 0 | P | - | G | O |
| 1 | P / n | P, from the first forward to the last backward | G | O / n |
| 2 | P / n | P | G / n + one block's | O / n |
| 3 | P / n | two blocks (one in use, one on its way) | G / n + one block's | O / n |

(autoplan.runtime.zero does it like this; Rajbhandari et al., ZeRO, 2020, keep P instead of P / n + P under 1 and 2.)
Activations are held for every micro-batch in flight, which the schedule's own actions count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autoplan.cost_models.cluster import Cluster
from autoplan.cost_models.config import ParallelConfig, Precision
from autoplan.cost_models.quantity import Quantity, Tag
from autoplan.cost_models.schedule import in_flight
from autoplan.cost_models.units import GIB, MIB, dtype_bytes
from autoplan.cost_models.work import Workload

_BUCKETS_BYTES = 2 * 25 * MIB  # two flat buffers of the gradient all-reduce of ZeRO 0 (autoplan.runtime.zero)
# On a GPU: the CUDA context with its kernels, and the buffers of a communicator (NCCL_BUFFSIZE 4 MiB x channels x
# peers comes to some hundred MiB per group; NCCL documentation, NCCL_BUFFSIZE). Assumed, not measured here.
_CONTEXT_BYTES = 0.6 * GIB
_GROUP_BYTES = 0.25 * GIB
# Fragmentation of the caching allocator: reserved over allocated, of what changes within a step. Assumed.
_FRAGMENTATION = Quantity(0.0, 0.03, 0.10, Tag.ASSUMED)
_ACTIVATION_SPREAD = 0.05  # of the liveness walk (autoplan.search.activations), held against measured peaks


@dataclass(frozen=True)
class RankMemory:
    """Bytes by term of one pipeline rank, and the most micro-batches it holds at one time (over all its chunks)."""

    terms: dict[str, Quantity]
    in_flight: int


class MemoryModel:
    """Memory of any split of a workload into chunks, at the degrees of `config`."""

    def __init__(self, workload: Workload, config: ParallelConfig, precision: Precision, cluster: Cluster) -> None:
        self.workload, self.config, self.precision, self.cluster = workload, config, precision, cluster
        c = config
        self.shares = {False: c.dp * c.cp, True: max(1, c.dp * c.cp * c.tp // (c.ep * _etp(c)))}
        self.sharded = c.zero_stage > 0 and c.dp > 1
        blocks = {name: self._states(name) for name in workload.blocks}
        self.stored, self.gathered, self.grads, self.states = (
            [sum(blocks[b][k] for b in unit) for unit in workload.units] for k in range(4)
        )
        self.largest = [max(blocks[b][1] for b in unit) for unit in workload.units]
        self.largest_grad = [max(blocks[b][4] for b in unit) for unit in workload.units]
        saved = workload.unit_selective if c.recompute == "selective" else workload.unit_saved
        self.saved, self.kept = saved, workload.unit_kept
        self.transient, self.transient_again = workload.unit_transient, workload.unit_transient_again
        self.in_flight = in_flight(c.schedule, c.pp, c.num_micro_batches, c.virtual_stages)
        gpu = cluster.device_type != "cpu"
        groups = sum(n > 1 for n in (c.dp, c.tp, c.pp, c.cp, c.ep))
        self.fixed = _CONTEXT_BYTES + groups * _GROUP_BYTES if gpu else 0.0
        self.fragmentation = _FRAGMENTATION if gpu else Quantity(0.0, 0.0, 0.0, Tag.MEASURED)
        replicas = self.shares[False] > 1 and not self.sharded
        self.buckets = _BUCKETS_BYTES if replicas else 0

    def _states(self, name: str) -> tuple[float, float, float, float, float]:
        """Stored and gathered parameters, gradients, optimizer state, and the whole gradient, of one block."""
        stored = gathered = grads = states = whole = 0.0
        for p in self.workload.blocks[name].params:
            n, width = float(p.num_elements), dtype_bytes(p.dtype)
            share = self.shares[p.expert] if self.sharded else 1
            stored += n * width / share
            gathered += n * width if self.sharded else 0.0
            if p.trainable:
                grad = n * (width if self.precision.grad_bytes is None else self.precision.grad_bytes)
                state = n * (2 * width if self.precision.state_bytes is None else self.precision.state_bytes)
                whole += grad
                grads += grad / share if self.config.zero_stage >= 2 else grad
                states += state / share
        return stored, gathered, grads, states, whole

    def stages(
        self, chunks: Sequence[range], recompute: Sequence[int], pinned: frozenset[int] = frozenset()
    ) -> list[RankMemory]:
        """Every pipeline rank.

        Args:
            chunks: units of every chunk, in model order.
            recompute: how many layers of each, its first ones, are computed again.
            pinned: units that are computed again instead of those.
        """
        return [self.rank(r, chunks, recompute, pinned) for r in range(self.config.pp)]

    def rank(
        self, rank: int, chunks: Sequence[range], recompute: Sequence[int], pinned: frozenset[int] = frozenset()
    ) -> RankMemory:
        """One pipeline rank, by term; arguments as for `stages`."""
        pp, w = self.config.pp, self.workload
        held, transient = 0.0, 0.0
        mine = range(rank, len(chunks), pp)
        units: list[int] = []
        for position, k in enumerate(mine):
            again = pinned or frozenset([u for u in chunks[k] if w.layers[u]][: recompute[k]])
            first, last = chunks[k].start, chunks[k].stop
            # the pipeline holds what was received and what was sent until the backward has passed
            one = w.free_saved + (w.cut_bytes[first - 1] if first else 0.0)
            one += w.cut_bytes[last - 1] if last < len(w.units) else 0.0
            peak = 0.0
            for u in chunks[k]:
                repeated = u in again
                one += self.kept[u] if repeated else self.saved[u]
                waiting = sum(size for a, b, size in w.tied if a <= u < b and a >= first and b < last)
                # while a unit's backward runs, what later ones kept is gone already
                peak = max(peak, one + (self.transient_again[u] if repeated else self.transient[u]) + waiting)
            held += self.in_flight[rank][position] * one
            transient = max(transient, peak - one)
            units += chunks[k]
        stored = sum(self.stored[u] for u in units)
        gathered = sum(self.gathered[u] for u in units)
        grads = sum(self.grads[u] for u in units)
        if self.sharded and self.config.zero_stage >= 2:
            grads += max(self.largest_grad[u] for u in units)
        if self.sharded and self.config.zero_stage == 3:
            gathered = min(gathered, 2 * max(self.largest[u] for u in units))
        exact = {
            "parameters": stored,
            "gathered parameters": gathered,
            "gradients": grads,
            "optimizer": sum(self.states[u] for u in units),
        }
        terms = {name: Quantity(size, size, size, Tag.EXACT) for name, size in exact.items() if size}
        terms["activations"] = Quantity.spread(held, _ACTIVATION_SPREAD, Tag.FITTED)
        terms["transient"] = Quantity.spread(transient, _ACTIVATION_SPREAD, Tag.FITTED)
        if self.buckets:
            terms["communication buffers"] = Quantity(
                0.0, float(min(self.buckets, 2 * grads)), float(self.buckets), Tag.FITTED
            )
        if self.fixed:
            terms["context and communicators"] = Quantity.spread(self.fixed, 0.5, Tag.ASSUMED)
            moving = held + transient
            terms["fragmentation"] = self.fragmentation * moving
        return RankMemory(terms, sum(self.in_flight[rank]))


def _etp(config: ParallelConfig) -> int:
    return config.tp if config.etp is None else config.etp
