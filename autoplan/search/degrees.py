"""Enumeration of degrees under pins: every way to spread devices over pp, dp and tp, cut the batch, choose a stage."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autoplan.cost_models.schedule import SCHEDULES, takes
from autoplan.search.offload_pins import NEEDS_SHARDS, lacks_shards, state_offload
from autoplan.search.pins import ZERO_STAGES, dispatch_degrees, divisors, schedule_of, zero_replica_counts

MAX_ACTIONS = 10_000  # of a schedule that is looked at beside 1F1B: with more micro-batches the bubble is small anyway
ONE_DOMAIN = "tp within one scale-up domain"


@dataclass(frozen=True, order=True)
class Candidate:
    """Degrees of one plan. What is left open is where the pipeline is cut and what is computed again."""

    pp: int
    dp: int
    tp: int
    zero_stage: int
    micro_batch_size: int
    num_micro_batches: int
    ep: int = 1  # over how many ranks experts are spread, tokens travelling to them; folded from dp, cp and tp
    cp: int = 1  # over how many ranks every sequence is cut
    schedule: str = "1F1B"
    virtual_stages: int = 1  # stages per rank of the pipeline
    methods: tuple[tuple[str, str], ...] = ()  # (block, how its attention sees a cut sequence); none: not decided
    etp: int = 1  # over how many ranks each expert is split; as tp where no token travels
    zero_replicas: int = 1  # copies of what ZeRO shards
    offload: tuple[str, ...] = ()  # what is on the host, if that is searched; activations: of some layers

    @property
    def num_shards(self) -> int:
        """Ranks that ZeRO shards over."""
        return self.dp * self.cp // self.zero_replicas

    @property
    def num_actions(self) -> int:
        """About how many actions a simulation of its pipeline has."""
        return 2 * self.pp * self.num_micro_batches * self.virtual_stages


@dataclass(frozen=True)
class Space:
    """All legal candidates, and how many others each rule excluded."""

    candidates: tuple[Candidate, ...]
    illegal: Mapping[str, int] = field(default_factory=dict)
    restrictions: tuple[str, ...] = ()

    @property
    def num_considered(self) -> int:
        """Legal and illegal together."""
        return len(self.candidates) + sum(self.illegal.values())


@dataclass(frozen=True)
class Limits:
    """What of devices, batch and model decides which degrees are legal.

    Attributes:
        batch: sequences per step, over all data-parallel ranks.
        domain: the largest tp that is looked at without a pin.
        heads: (where, number of attention heads) of every attention.
        num_units: layers that a pipeline may be cut between.
        obstacle: why the batch cannot be split, or None.
        experts: number of experts of every mixture; inner: their inner sizes.
        contexts: values of cp that are looked at.
        schedules: (name, stages per rank) that are looked at beside 1F1B.
        units: devices of one unit of every level but the outermost (scale-up domain, node, rail group).
    """

    devices: int
    batch: int
    domain: int
    heads: tuple[tuple[str, int], ...]
    num_units: int
    obstacle: str | None
    experts: tuple[int, ...] = ()
    contexts: tuple[int, ...] = (1,)
    schedules: tuple[tuple[str, int], ...] = ()
    inner: tuple[int, ...] = ()
    units: tuple[int, ...] = ()


def candidates(limits: Limits, pins: Mapping[str, Any]) -> Space:
    """All candidates under pins whose values were checked; perhaps none."""
    illegal: Counter[str] = Counter()
    found: list[Candidate] = []
    limited = False
    for cp in [pins["cp"]] if "cp" in pins else limits.contexts:
        if limits.devices % cp:
            illegal["cp does not divide the devices"] += 1
        else:
            limited |= _candidates_at(cp, limits, pins, found, illegal)
    return Space(tuple(found), dict(illegal), (ONE_DOMAIN,) if limited else ())


def _candidates_at(
    cp: int, limits: Limits, pins: Mapping[str, Any], found: list[Candidate], illegal: Counter[str]
) -> bool:
    """Those with one cp, added to `found`. True if some were left out because tp is beyond the scale-up domain."""
    devices, limited = limits.devices // cp, False
    for pp in _degrees(pins, "pp", devices):
        for tp in _degrees(pins, "tp", devices // pp if devices % pp == 0 else devices):
            if devices % (pp * tp):
                illegal["pp x tp does not divide the devices"] += 1
                continue
            dp = devices // (pp * tp)
            rule = _illegal(pp, dp, tp, pins, limits)
            if rule is None and tp > limits.domain and "tp" not in pins:
                limited, rule = True, "tp beyond the scale-up domain"
            if rule is not None:
                illegal[rule] += 1
                continue
            spread = [
                (ep, etp)
                for ep, etp in _spread(dp, tp, cp, limits, pins)
                if pins.get("ep", ep) == ep and pins.get("etp", etp) == etp
            ]
            if not spread:
                illegal["another ep or etp is pinned"] += 1
                continue
            for size in divisors(limits.batch // dp):
                num = limits.batch // dp // size
                if pins.get("micro_batch_size", size) != size or pins.get("num_micro_batches", num) != num:
                    continue
                if num > 1 and limits.obstacle is not None:
                    illegal["the batch cannot be split"] += 1
                    continue
                stages = [pins["zero_stage"]] if "zero_stage" in pins else ZERO_STAGES if dp * cp > 1 else [0]
                for zero, (ep, etp) in itertools.product(stages, spread):
                    plain = Candidate(pp, dp, tp, zero, size, num, ep, cp, etp=etp)
                    for copies in _copies(plain, limits, pins):
                        if copies not in zero_replica_counts(dp, cp, zero, tp, ep, etp):
                            illegal["ZeRO cannot have as many replicas"] += 1
                        elif lacks_shards(state_offload(pins), zero, dp * cp // copies):
                            illegal[NEEDS_SHARDS] += 1
                        else:
                            found += _schedules(replace(plain, zero_replicas=copies), pins, limits, illegal)
    return limited


def _copies(c: Candidate, limits: Limits, pins: Mapping[str, Any]) -> list[int]:
    """Copies of what ZeRO shards: one, or as few as leave the ranks that share it in one unit of a level."""
    if "zero_replicas" in pins:
        return [pins["zero_replicas"]]
    legal = zero_replica_counts(c.dp, c.cp, c.zero_stage, c.tp, c.ep, c.etp)
    ranks = c.dp * c.cp * c.tp
    return sorted({1, *(next((n for n in legal if ranks <= n * unit), 1) for unit in limits.units)})


def _schedules(plain: Candidate, pins: Mapping[str, Any], limits: Limits, illegal: Counter[str]) -> Iterator[Candidate]:
    """The candidate under every schedule that takes its degrees."""
    pinned = "schedule" in pins or "virtual_stages" in pins
    stages = pins.get("stages")
    for schedule, virtual_stages in [schedule_of(pins)] if pinned else [("1F1B", 1), *limits.schedules]:
        if not pinned and schedule != "1F1B" and (plain.pp == 1 or stages is not None):
            continue
        candidate = replace(plain, schedule=schedule, virtual_stages=virtual_stages)
        broken = _not_scheduled(candidate, stages, limits)
        if broken is None and (pinned or schedule == "1F1B" or candidate.num_actions <= MAX_ACTIONS):
            yield candidate
        elif broken is not None and (pinned or schedule == "1F1B"):
            illegal[broken] += 1


def _not_scheduled(c: Candidate, stages: Sequence[int] | None, limits: Limits) -> str | None:
    """The rule that the schedule of a candidate breaks, or None."""
    if c.pp * c.virtual_stages > limits.num_units:
        return "more stages than layers"
    if stages is not None and len(stages) != c.pp * c.virtual_stages:
        return "another number of stages is pinned"
    if c.virtual_stages > 1 and c.pp == 1:
        return "several stages per rank without a pipeline"
    if SCHEDULES[c.schedule].split_backward and c.zero_stage == 3:
        return "a split backward with ZeRO 3"
    if not takes(c.schedule, c.pp, c.num_micro_batches, c.virtual_stages):
        return "the schedule does not take that many micro-batches"
    return None


def _spread(dp: int, tp: int, cp: int, limits: Limits, pins: Mapping[str, Any]) -> list[tuple[int, int]]:
    """(ep, etp): experts where tp has them; tokens travelling to whole ones, or to some that tp splits.

    Two more are legal and looked at if pinned: all experts whole on every rank beside tp, and experts that tp splits
    although there are enough to give ep x tp ranks whole ones.
    """
    found = [(1, tp)]
    if tp > 1 and limits.experts and pins.get("ep") == 1 and pins.get("etp") == 1:
        found.append((1, 1))
    found += [(ep, 1) for ep in dispatch_degrees(dp, tp, limits.experts, cp) if ep > 1]
    if tp > 1 and all(size % tp == 0 for size in limits.inner):
        few = math.gcd(*limits.experts)
        several = (ep for ep in dispatch_degrees(dp, tp, limits.experts, cp, tp) if ep > 1)
        found += [(ep, tp) for ep in several if few % (ep * tp) or "etp" in pins]
    return found


def _degrees(pins: Mapping[str, Any], name: str, limit: int) -> list[int]:
    return [pins[name]] if name in pins else divisors(limit)


def _illegal(pp: int, dp: int, tp: int, pins: Mapping[str, Any], limits: Limits) -> str | None:
    """The rule that a mesh breaks, or None."""
    if pins.get("dp", dp) != dp:
        return "another dp is pinned"
    if any(count % tp for _, count in limits.heads):
        return "tp does not divide the attention heads"
    if pp > limits.num_units:
        return "more stages than layers"
    if pins.get("stages") is not None and len(pins["stages"]) % pp:
        return "another number of stages is pinned"
    if limits.batch % dp:
        return "dp does not divide the global batch"
    if dp > 1 and limits.obstacle is not None:
        return "the batch cannot be split"
    return None
