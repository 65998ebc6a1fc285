"""Enumeration of degrees under pins: every way to spread devices over pp, dp and tp, cut the batch, choose a stage."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autoplan.search.pins import ZERO_STAGES, dispatch_degrees, divisors, zero_replica_counts

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
    ep: int = 1  # over how many of the dp ranks experts are spread, tokens travelling to them
    cp: int = 1  # over how many ranks every sequence is cut
    zero_replicas: int = 1  # copies of what ZeRO shards


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
        experts: number of experts of every mixture.
        contexts: values of cp that are looked at.
    """

    devices: int
    batch: int
    domain: int
    heads: tuple[tuple[str, int], ...]
    num_units: int
    obstacle: str | None
    experts: tuple[int, ...] = ()
    contexts: tuple[int, ...] = (1,)


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
    devices, limited, copies = limits.devices // cp, False, pins.get("zero_replicas", 1)
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
            legal = dispatch_degrees(dp, tp, limits.experts) if cp == 1 else [1]
            spread = [ep for ep in legal if pins.get("ep", ep) == ep]
            if not spread:
                illegal["another ep is pinned"] += 1
                continue
            for size in divisors(limits.batch // dp):
                num = limits.batch // dp // size
                if pins.get("micro_batch_size", size) != size or pins.get("num_micro_batches", num) != num:
                    continue
                if num > 1 and limits.obstacle is not None:
                    illegal["the batch cannot be split"] += 1
                    continue
                stages = [pins["zero_stage"]] if "zero_stage" in pins else ZERO_STAGES if dp * cp > 1 else [0]
                for zero, ep in itertools.product(stages, spread):
                    if copies not in zero_replica_counts(dp, cp, ep, zero):
                        illegal["ZeRO cannot have as many replicas"] += 1
                        continue
                    found.append(Candidate(pp, dp, tp, zero, size, num, ep, cp, copies))
    return limited


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
    if pins.get("stages") is not None and len(pins["stages"]) != pp:
        return "another number of stages is pinned"
    if limits.batch % dp:
        return "dp does not divide the global batch"
    if dp > 1 and limits.obstacle is not None:
        return "the batch cannot be split"
    return None
