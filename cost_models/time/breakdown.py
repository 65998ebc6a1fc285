"""One plan in all parts: its interval, the terms of its step, time and memory of every stage.

estimated(pricer, chunks, recompute) -> Estimate     # `Pricer.step_s` is its middle
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

from autoplan.config.recompute import SELECTIVE, recompute_kind
from autoplan.cost_models.kernels.gpu import kernels_of
from autoplan.cost_models.quantity import Quantity, Tag, total
from autoplan.cost_models.time.blocks import BlockCost
from autoplan.cost_models.time.estimate import Estimate, StageEstimate, comm_term
from autoplan.cost_models.time.price import Pricer, ranges_of
from autoplan.cost_models.time.simulation import Timeline
from autoplan.cost_models.time.step_class import step_class
from autoplan.schedules.orders import ActionKind
from autoplan.schedules.schedule import actions

# Relative error of a step beyond its parts, either way. With a profile: 37 to 40 of 40 measured plans lie within their
# interval (experiments/plans/plan_accuracy.py). From the catalog, for a device without published timings: assumed.
_MODEL_ERROR, UNPROFILED_ERROR = 0.05, 0.15


def estimated(pricer: Pricer, chunks: Sequence[int], recompute: Sequence[int], *, events: bool = False) -> Estimate:
    """Return time and memory of one plan in all parts.

    Args:
        chunks: the number of units of every chunk, in model order.
        recompute: steps on the recompute frontier, per chunk.
        events: True to keep the actions of the pipeline with their times.
    """
    plan, c, w = _Plan(pricer, chunks, recompute), pricer.config, pricer.workload
    low, mid, high = (pricer.step_s(chunks, recompute, which) for which in ("low", "mid", "high"))
    breakdown = plan.breakdown(mid)
    terms = low, high
    low, high = _interval_s(pricer, low, mid, high, breakdown)
    if "offload" in breakdown or c.offload:  # no published step had offloading
        low, high = min(low, terms[0]), max(high, terms[1])
    step = Quantity(min(low, mid), mid, max(mid, high), max(q.tag for q in breakdown.values() if q.high))
    tokens = w.tokens * c.num_micro_batches * c.dp
    runs = c.num_micro_batches * c.dp
    peak = pricer.peak_flops * c.num_devices
    return Estimate(
        step_time_s=step,
        breakdown=breakdown,
        stages=plan.stages(step),
        tokens_per_step=tokens,
        tokens_per_s=tokens / mid,
        tokens_per_s_per_device=tokens / mid / c.num_devices,
        mfu=w.model_flops * runs / mid / peak,
        mfu_causal=(w.model_flops - w.masked_flops) * runs / mid / peak,
        memory_capacity_bytes=float(pricer.device.memory_bytes),
        events=pricer.timeline(chunks, plan.times, "mid", events=True).events if events else (),
        host_capacity_bytes=pricer.costs.cluster.host_memory_bytes,
    )


def _interval_s(
    pricer: Pricer, low: float, mid: float, high: float, breakdown: Mapping[str, Quantity]
) -> tuple[float, float]:
    """Return the seconds between which a step lies. `low`, `high`: all terms at their low and at their high end.

    If published timings hold the device, the interval is the error of such predictions for runs without a part in any
    fit. Otherwise all terms err in one direction, plus an unexplained error.
    """
    profile, constants = pricer.costs.profile, pricer.costs.constants
    known = kernels_of(pricer.device, constants) if profile is None else None
    if known is not None and known.own_launch:
        found = constants.step_interval(step_class(pricer.workload, pricer.device, breakdown, mid))
        if found is not None:
            return mid * found[0], mid * found[1]
    unexplained = UNPROFILED_ERROR if profile is None else _MODEL_ERROR
    return low / (1 + unexplained), high * (1 + unexplained)


class _Plan:
    """One plan: a cut and a recompute of every chunk, under the prices of its degrees."""

    def __init__(self, pricer: Pricer, chunks: Sequence[int], recompute: Sequence[int]) -> None:
        self.pricer, self.chunks, self.recompute = pricer, chunks, recompute
        self.ranges = ranges_of(chunks)
        self.rank_units = pricer.rank_units(chunks)
        self.times = pricer.chunk_times(chunks, recompute, "mid")

    def _recomputed(self, rank: int) -> list[tuple[int, str]]:
        """Return the units of a rank that do not keep everything, with their recompute choices."""
        p = self.pricer
        return [item for k in p.chunks_of[rank] for item in p.recomputed(self.ranges[k], self.recompute[k]).items()]

    def stages(self, step_s: Quantity) -> tuple[StageEstimate, ...]:
        """Return every pipeline rank. The intervals of its times are as wide as that of the step."""
        p, out = self.pricer, []
        held, layers = p.memory.stages(self.ranges, self.recompute, p.pinned_recompute), p.workload.layers
        for rank, units in enumerate(self.rank_units):
            mine = p.chunks_of[rank]
            f = sum(self.times[k].forward_s for k in mine)
            b = sum(self.times[k].backward_s for k in mine)
            out.append(
                StageEstimate(
                    index=rank,
                    num_layers=sum(layers[u] for u in units) if any(layers) else len(units),
                    num_recomputed=sum(recompute_kind(how).recomputes for _, how in self._recomputed(rank)),
                    forward_s=_as_wide(f, step_s),
                    backward_s=_as_wide(b, step_s),
                    in_flight=held[rank].in_flight,
                    memory=held[rank].terms,
                    fullest=held[rank].moment,
                    host_memory=held[rank].host,
                )
            )
        return tuple(out)

    @cached_property
    def _timeline(self) -> Timeline:
        return self.pricer.timeline(self.chunks, self.times, "mid")

    def breakdown(self, step_s: float) -> dict[str, Quantity]:
        """Return the seconds of a step by term, on the rank with most compute. The remainder is the bubble."""
        p, m = self.pricer, self.pricer.runs
        rank = max(range(p.config.pp), key=lambda r: self._timeline.busy_s[r])
        units, mine = self.rank_units[rank], p.chunks_of[rank]
        blocks, again = p.blocks_of(units), self._recomputed(rank)
        latest = max(self.rank_units, key=lambda units: sum(p.optimizer[u] for u in units))
        updating = p.blocks_of(latest)
        out = {
            "compute": (total([b.forward + b.backward for b in blocks]) + p.free_forward * len(mine)) * m,
            **self._repeated(blocks, again),
            **{comm_term(family): _sent(blocks, family) * m for family in ("tp", "cp", "ep")},
            comm_term("dp"): self._data_parallel(units, blocks),
            "launch": total([q for b in blocks for q in b.waited.values()]) * m
            + (total([b.waited_once for b in blocks]) + p.waits_s([self.ranges[k] for k in mine])),
            comm_term("pp"): self._transfers(rank),
            "accumulate": total([b.accumulate for b in blocks]) * m,
            "optimizer": total([b.optimizer for b in updating]),
        }
        out["offload"] += total([b.moved for b in updating])
        out["overhead"] = self._overhead(rank, [u for u, _ in again])
        rest = step_s - sum(q.mid for q in out.values())
        out["bubble"] = Quantity.spread(max(0.0, rest), 0.0, max(q.tag for q in out.values() if q.high))
        return {k: q for k, q in out.items() if q.mid > 0 or k in ("compute", "bubble")}

    def _repeated(self, blocks: Sequence[BlockCost], again: Sequence[tuple[int, str]]) -> dict[str, Quantity]:
        """Return the seconds that a rank spends in a step on recompute, and on copies to the host and back instead."""
        p, out = self.pricer, {}
        for name, on_host in (("recompute", False), ("offload", True)):
            chosen = [(u, how) for u, how in again if recompute_kind(how).on_host is on_host]
            out[name] = total([b.repeated(how) for u, how in chosen for b in p.layer_blocks(u)]) * p.runs
        if p.config.recompute == SELECTIVE:
            out["recompute"] += total([b.selective for b in blocks]) * p.runs
        return out

    def _data_parallel(self, units: Sequence[int], blocks: Sequence[BlockCost]) -> Quantity:
        """Return the seconds per step of a rank's traffic between ranks with the same parameters or micro-batch."""
        p = self.pricer
        zero = total([b.zero_forward + b.zero_backward for b in blocks]) * p.runs
        reductions = p.all_reduces(units)
        once = [b.zero_first + b.zero_last for b in blocks]
        if not p.chained:
            tag = max((q.tag for b in blocks for q in (b.gather, b.reduce)), default=Tag.EXACT)
            once = [Quantity.spread(p.moved_once_s(units, "mid"), 0.0, tag)]
        coupled = _sent(blocks, "dp") * p.runs
        return zero + coupled + total(once) + total([b.per_step for b in blocks]) + total(reductions)

    def _transfers(self, rank: int) -> Quantity:
        """Return how much earlier a rank would finish if stages sent nothing to each other."""
        p = self.pricer
        unsent = p.timeline(self.chunks, self.times, "mid", sends=False)
        sent = max(0.0, self._timeline.rank_end_s[rank] - unsent.rank_end_s[rank])
        cuts = [p.workload.cut_bytes[r.stop - 1] for r in self.ranges[:-1]]
        hops = zip(cuts, p.boundary_groups, strict=True)
        sends = [p.costs.sent_s(n, group, p.groups["tp"]) for n, group in hops if group is not None]
        return Quantity.spread(sent, 0.0, total(sends).tag)

    def _overhead(self, rank: int, again: Sequence[int]) -> Quantity:
        """Return measured constants of a step, of actions of the pipeline and of split backwards.

        `again`: the units of the rank that do not keep everything.
        """
        p, c = self.pricer, self.pricer.config
        row = actions(c.schedule, c.pp, c.num_micro_batches, c.virtual_stages)[rank]
        split = sum(a.kind is ActionKind.BACKWARD_WEIGHT for a in row) / sum(a.kind is ActionKind.FORWARD for a in row)
        units = self.rank_units[rank]
        whole = p.whole_backwards(units, again)
        layers = sum(p.workload.layers[u] for u in units if u not in whole)
        fixed = p.fixed_s + 2 * p.runs * len(p.chunks_of[rank]) * p.action_s
        return Quantity.spread(fixed + p.costs.overhead_s("split_layer_s") * split * p.runs * layers, 0.0, Tag.MEASURED)


def _as_wide(seconds: float, of: Quantity) -> Quantity:
    """Return seconds with an interval as wide, in proportion, as that of another quantity."""
    return Quantity(seconds * of.low / of.mid, seconds, seconds * of.high / of.mid, of.tag)


def _sent(blocks: Sequence[BlockCost], family: str) -> Quantity:
    """Return the seconds of the collectives of one family of axes, in one micro-batch."""
    return total([q for b in blocks for (f, _), q in b.comm.items() if f == family])
