"""Enumeration of degrees under pins: every way to spread devices over pp, dp and tp, cut the batch, choose a ZeRO.

Everything left out is illegal (`autoplan.program.legality`): each rule is checked as soon as its choices are decided. A
search looks at a part of the legal space (`Limits`); `legal` goes through all of it.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from autoplan.config.choices import CHOICES
from autoplan.config.mesh import folds
from autoplan.config.parallel import ZERO_STAGES, ParallelConfig
from autoplan.config.pins import Pins
from autoplan.errors import PinError
from autoplan.program.facts import Facts, divisors
from autoplan.program.legality import RULES, Rule, Scope, zero_replica_counts
from autoplan.schedules.schedule import PLAIN_SCHEDULE, SCHEDULES

MAX_ACTIONS = 10_000  # limit for schedules other than 1F1B: with more micro-batches the bubble is small anyway
_SIMULATED = 100_000  # actions that the cuts of one candidate may cost
_FAR_APART = 16  # ratio of two numbers of copies of ZeRO 3 from which on one between them is searched, too
ONE_DOMAIN = "tp within one scale-up domain"
BEYOND = "degrees outside the usual search space, because no others are legal under these pins"


def search_order(config: ParallelConfig) -> tuple[Any, ...]:
    """Return the sort key of the configurations of a search: of equally fast ones the first is taken."""
    c = config
    degrees = (c.pp, c.dp, c.tp, c.zero_stage, c.micro_batch_size, c.num_micro_batches, c.ep, c.cp)
    return (*degrees, c.schedule, c.virtual_stages, c.methods, c.expert_tp, c.zero_replicas, c.offload)


@dataclass(frozen=True)
class Space:
    """All legal candidates, and how many others each rule excluded."""

    candidates: tuple[ParallelConfig, ...]
    illegal: Mapping[str, int] = field(default_factory=dict)
    restrictions: tuple[str, ...] = ()

    @property
    def num_considered(self) -> int:
        """Number of candidates, legal and illegal together."""
        return len(self.candidates) + sum(self.illegal.values())


@dataclass(frozen=True)
class Limits:
    """The facts that decide which degrees are legal, and the part of them that a search looks at without a pin.

    Attributes:
        scope: scope of the rules to keep.
        domain: the largest tp.
        contexts: values of cp.
        schedules: (name, stages per rank) besides 1F1B.
        units: devices of one unit of every level but the outermost (scale-up domain, node, rail group).
    """

    facts: Facts
    scope: Scope
    domain: int
    contexts: tuple[int, ...] = (1,)
    schedules: tuple[tuple[str, int], ...] = ()
    units: tuple[int, ...] = ()


def _between(counts: list[int], low: int, high: int) -> int:
    """Return the count that is nearest to the geometric mean of two others."""
    return min(counts, key=lambda n: abs(math.log(n * n / (low * high))))


# the step at which an enumerated choice is decided; other choices are pinned or at their default from the start
_START, _CONTEXT, _MESH, _EXPERTS, _BATCH, _ZERO, _COPIES, _SCHEDULE = range(8)
DECIDED_AT = {
    "cp": _CONTEXT, "pp": _MESH, "tp": _MESH, "dp": _MESH, "ep": _EXPERTS, "etp": _EXPERTS,
    "micro_batch_size": _BATCH, "num_micro_batches": _BATCH, "zero_stage": _ZERO, "zero_replicas": _COPIES,
    "schedule": _SCHEDULE, "virtual_stages": _SCHEDULE,
}  # fmt: skip
_UNDECIDED = {record.name: record.default for record in CHOICES if record.name in DECIDED_AT}


@lru_cache(maxsize=256)
def _levels(scope: Scope, pinned: frozenset[str] | None) -> tuple[tuple[Rule, ...], ...]:
    """Return the rules by the step at which all their choices are decided.

    Args:
        pinned: choices that are decided from the start; None: no choices are, and the pins themselves are not checked.
    """
    found: list[list[Rule]] = [[] for _ in range(_SCHEDULE + 1)]
    for rule in RULES:
        if rule.of_pins:
            found[_START] += [rule] if pinned is not None else []
        elif rule.scope <= scope:
            left = (DECIDED_AT.get(name, _START) for name in rule.names if name not in (pinned or ()))
            found[max(left, default=_START)].append(rule)
    return tuple(map(tuple, found))


# Choices whose values in the plainest configuration nobody has to ask for: what is wrong with others is of no help.
_UNASKED = ("cp", "ep", "zero_stage", "zero_replicas", "schedule", "virtual_stages")
_PLAINEST = ParallelConfig(zero_stage=ZERO_STAGES[0])


class _Walk:
    """The enumeration, in an order that decides the choices of rules as early as possible.

    Args:
        early: pinned choices count as decided from the start, so that illegal branches end early, and the rule that
            comes closest to a candidate is kept as `error`; else every candidate is counted under the rule it breaks.
    """

    def __init__(self, limits: Limits, pins: Pins, early: bool) -> None:
        self.limits, self.facts, self.early = limits, limits.facts, early
        self.pins, self.order = dict(pins), pins.schedule
        self.levels = _levels(limits.scope, frozenset(pins) if early else None)
        self.base = pins.config if early else pins.config.but(**_UNDECIDED)
        self.illegal: Counter[str] = Counter()
        self.limited = False
        self.error: tuple[tuple[int, int, int], PinError] | None = None

    def _broken(self, level: int, draft: ParallelConfig) -> str | None:
        """Return the name of the first rule of a level that a draft breaks; the draft is decided up to that level."""
        for rule in self.levels[level]:
            reason = rule.broken(draft, self.facts)
            if reason is not None:
                if self.early:
                    self._blame(rule, reason, level, draft)
                return rule.name
        return None

    def _blame(self, rule: Rule, reason: str, level: int, draft: ParallelConfig) -> None:
        """Keep the rule that the plainest draft breaks; of several that of the fewest unpinned choices, or the last."""
        asked = {*self.pins, *(["virtual_stages"] if "schedule" in self.pins else [])}  # it follows from the schedule
        unasked = (name for name in _UNASKED if name not in asked)
        odd = sum(getattr(draft, name) != getattr(_PLAINEST, name) for name in unasked)
        rank = (-odd, -sum(name in DECIDED_AT and name not in self.pins for name in rule.names), level)
        if self.error is None or self.error[0] < rank:
            self.error = (rank, PinError(reason, rule.names))

    def _left_out(self, level: int, draft: ParallelConfig) -> bool:
        name = self._broken(level, draft)
        if name is not None:
            self.illegal[name] += 1
        return name is not None

    def candidates(self) -> Iterator[ParallelConfig]:
        """Yield all candidates."""
        if self._left_out(_START, self.base):
            return
        for cp in [self.pins["cp"]] if "cp" in self.pins else self.limits.contexts:
            draft = self.base.but(cp=cp)
            if not self._left_out(_CONTEXT, draft):
                yield from self._meshes(draft)

    def _meshes(self, draft: ParallelConfig) -> Iterator[ParallelConfig]:
        devices, pins = self.facts.devices // draft.cp, self.pins
        for pp in self._degrees("pp", devices):
            for tp in self._degrees("tp", devices // pp if devices % pp == 0 else devices):
                dp = max(1, devices // (pp * tp))
                if self.early:
                    dp = pins.get("dp", dp)
                elif dp * pp * tp == devices and pins.get("dp", dp) != dp:
                    self.illegal["another dp is pinned"] += 1
                    continue
                mesh = draft.but(pp=pp, tp=tp, dp=dp)
                if self._left_out(_MESH, mesh):
                    continue
                if tp > self.limits.domain and "tp" not in pins:
                    self.limited = True
                    self.illegal["tp beyond the scale-up domain"] += 1
                    continue
                spread = self._spread(mesh)
                if not spread:
                    self.illegal["another ep or etp is pinned"] += 1
                    continue
                yield from self._batches(mesh, spread)

    def _batches(self, mesh: ParallelConfig, spread: list[tuple[int, int | None]]) -> Iterator[ParallelConfig]:
        pins = self.pins
        several = self.early or mesh.dp * mesh.cp > 1
        stages = [pins["zero_stage"]] if "zero_stage" in pins else ZERO_STAGES if several else [0]
        for size, num in self._micro_batches(mesh.dp):
            draft = mesh.but(micro_batch_size=size, num_micro_batches=num)
            if self._left_out(_BATCH, draft):
                continue
            for zero, (ep, etp) in itertools.product(stages, spread):
                plain = draft.but(zero_stage=zero, ep=ep, etp=etp)
                if self._left_out(_ZERO, plain):
                    continue
                for copies in self._copies(plain):
                    copied = plain if copies == 1 else plain.but(zero_replicas=copies)
                    if not self._left_out(_COPIES, copied):
                        yield from self._schedules(copied)

    def _micro_batches(self, dp: int) -> Iterator[tuple[int, int]]:
        """Yield (size, number) of the micro-batches of a data-parallel rank."""
        pins, batch = self.pins, self.facts.batch or 1
        if self.early and batch % dp:
            return
        for size in divisors(batch // dp):
            num = batch // dp // size
            if pins.get("micro_batch_size", size) == size and pins.get("num_micro_batches", num) == num:
                yield size, num

    def _copies(self, draft: ParallelConfig) -> list[int]:
        """Return the numbers of copies of the state that ZeRO shards.

        These are one, and for every level the fewest copies whose shards stay within one unit of it. ZeRO 3 gathers in
        every pass, which takes long over thousands of ranks, and its shards take much memory within a node: where two
        of these numbers are far apart, it also has one between.
        """
        c = draft
        if "zero_replicas" in self.pins:
            return [self.pins["zero_replicas"]]
        if self.early:
            return divisors(c.dp)
        legal = zero_replica_counts(c.dp, c.cp, c.zero_stage, c.tp, c.ep, c.expert_tp)
        ranks = c.stage_ranks
        found = sorted({1, *(next((n for n in legal if ranks <= n * unit), 1) for unit in self.limits.units)})
        if c.zero_stage < ZERO_STAGES[-1]:
            return found
        far = [(low, high) for low, high in itertools.pairwise(found) if high >= _FAR_APART * low]
        return sorted({*found, *(_between(legal, low, high) for low, high in far)})

    def _schedules(self, plain: ParallelConfig) -> Iterator[ParallelConfig]:
        """Yield the candidate under every schedule that takes its degrees."""
        pinned = "schedule" in self.pins or "virtual_stages" in self.pins
        for schedule, virtual_stages in self._orders(pinned, plain.pp):
            others = not self.early and not pinned and schedule != PLAIN_SCHEDULE
            if others and (plain.pp == 1 or plain.stages is not None):
                continue
            candidate = plain
            if (schedule, virtual_stages) != (plain.schedule, plain.virtual_stages):
                candidate = plain.but(schedule=schedule, virtual_stages=virtual_stages)
            broken = self._broken(_SCHEDULE, candidate)
            if broken is None:
                if not others or candidate.num_actions <= MAX_ACTIONS:
                    yield candidate
            elif not others:
                self.illegal[broken] += 1

    def _orders(self, pinned: bool, pp: int) -> Iterator[tuple[str, int]]:
        if not self.early:
            yield from [self.order] if pinned else [(PLAIN_SCHEDULE, 1), *self.limits.schedules]
            return
        model, pins = self.facts.model, self.pins
        most = 16 if model is None else (model.num_layers + model.num_ends) // pp
        for schedule in [pins["schedule"]] if "schedule" in pins else SCHEDULES:
            fewest, highest = SCHEDULES[schedule].virtual_stages
            some = range(fewest, (most if highest is None else highest) + 1)
            for virtual_stages in [pins["virtual_stages"]] if "virtual_stages" in pins else some or [fewest]:
                yield schedule, virtual_stages

    def _spread(self, mesh: ParallelConfig) -> list[tuple[int, int | None]]:
        """Return the (ep, etp) that break no rule; etp None means tp."""
        pins = self.pins
        found = self._all_spread(mesh) if self.early else self._searched_spread(mesh)
        out: list[tuple[int, int | None]] = []
        for ep, etp in found:
            if pins.get("ep", ep) == ep and pins.get("etp", etp) == etp:
                inner = None if etp == mesh.tp else etp
                if self._broken(_EXPERTS, mesh.but(ep=ep, etp=inner)) is None:
                    out.append((ep, inner))
        return out

    def _all_spread(self, mesh: ParallelConfig) -> list[tuple[int, int]]:
        model = self.facts.model
        experts = 0 if model is None else model.num_experts
        parts = [self.pins["ep"]] if "ep" in self.pins else divisors(experts) if experts else [1]
        whole = dict.fromkeys((mesh.tp, 1, *divisors(mesh.stage_ranks))) if experts else [mesh.tp]
        return list(itertools.product(parts, [self.pins["etp"]] if "etp" in self.pins else whole))

    def _searched_spread(self, mesh: ParallelConfig) -> list[tuple[int, int]]:
        """Return the (ep, etp) that a search looks at.

        Experts are split over tp as the rest, or tokens travel to whole experts, or to experts that tp splits. Two more
        are legal, and looked at if pinned: all experts whole on every rank beside tp, and experts that tp splits
        although there are enough to give ep x tp ranks whole ones.
        """
        d, model, pins = mesh, self.facts.model, self.pins
        experts = 0 if model is None else model.num_experts
        found = [(1, d.tp)]
        if model is None or not experts:
            return found
        if d.tp > 1 and pins.get("ep") == 1 and pins.get("etp") == 1:
            found.append((1, 1))

        def travelling(etp: int) -> list[int]:
            return [ep for ep in divisors(experts) if ep > 1 and folds(d.dp, d.cp, d.tp, ep, etp)]

        found += [(ep, 1) for ep in travelling(1)]
        if d.tp > 1 and model.inner_size % d.tp == 0:
            found += [(ep, d.tp) for ep in travelling(d.tp) if experts % (ep * d.tp) or "etp" in pins]
        return found

    def _degrees(self, name: str, limit: int) -> list[int]:
        return [self.pins[name]] if name in self.pins else divisors(limit)


def legal_candidates(limits: Limits, pins: Pins) -> Space:
    """Return the candidates of a search under checked pins; if there are none, all legal ones."""
    walk = _Walk(limits, pins, early=False)
    found = tuple(walk.candidates())
    restrictions = (ONE_DOMAIN,) if walk.limited else ()
    if not found:
        found, restrictions = tuple(legal(limits, pins)), (BEYOND,)
        orders = {(PLAIN_SCHEDULE, 1), *limits.schedules}
        usual = (c for c in found if c.zero_replicas == 1 and (c.schedule, c.virtual_stages) in orders)
        found = tuple(usual) or found
    return Space(found, dict(walk.illegal), restrictions)


def legal(limits: Limits, pins: Pins) -> Iterator[ParallelConfig]:
    """Return all legal candidates under checked pins, whether or not a search looks at them."""
    return _Walk(_all_of(limits), pins, early=True).candidates()


def fault(limits: Limits, pins: Pins) -> PinError | None:
    """Return why there is no legal candidate: the rule that the closest one breaks; None if there is a candidate."""
    walk = _Walk(_all_of(limits), pins, early=True)
    if next(walk.candidates(), None) is not None:
        return None
    return walk.error[1] if walk.error is not None else PinError("the pins contradict each other", tuple(pins))


def _all_of(limits: Limits) -> Limits:
    devices = limits.facts.devices
    return replace(limits, domain=devices, contexts=tuple(divisors(devices)))


def num_cuts(candidate: ParallelConfig, patient: bool = False) -> int:
    """Return how many cuts of a candidate are simulated before its open bound counts as a gap.

    Unlike a time limit this is deterministic. `patient`: for a search that has no plan yet.
    """
    if patient:
        return max(64, 20 * _SIMULATED // candidate.num_actions)
    return max(2, min(2000, _SIMULATED // candidate.num_actions))
