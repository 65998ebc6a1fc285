"""Enumeration of degrees under pins: every way to spread devices over pp, dp and tp, cut the batch, choose a stage.

What is left out of it is illegal (`autoplan.program.legality`): each rule is tried as soon as the choices that it names
are decided. A search looks at a part of what is legal (`Limits`); `legal` goes through all of it.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from autoplan.config.offload import state_offload
from autoplan.config.parallel import ZERO_STAGES
from autoplan.config.recompute import read_recompute
from autoplan.errors import PinError
from autoplan.program.expert_mesh import folds
from autoplan.program.facts import Facts, divisors
from autoplan.program.legality import RULES, Rule, Scope, zero_replica_counts
from autoplan.program.pins import schedule_of
from autoplan.schedules.schedule import SCHEDULES

MAX_ACTIONS = 10_000  # of a schedule that is looked at beside 1F1B: with more micro-batches the bubble is small anyway
ONE_DOMAIN = "tp within one scale-up domain"
BEYOND = "degrees that are else not looked at, since no others are legal under these pins"


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
    """The facts that decide which degrees are legal, and what a search looks at of them without a pin.

    Attributes:
        scope: of the rules that are kept.
        domain: the largest tp.
        contexts: values of cp.
        schedules: (name, stages per rank) beside 1F1B.
        units: devices of one unit of every level but the outermost (scale-up domain, node, rail group).
    """

    facts: Facts
    scope: Scope
    domain: int
    contexts: tuple[int, ...] = (1,)
    schedules: tuple[tuple[str, int], ...] = ()
    units: tuple[int, ...] = ()


@dataclass
class _Draft:
    """A configuration that is decided choice by choice, as rules read it."""

    pp: int = 1
    dp: int = 1
    tp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    zero_stage: int = 0
    micro_batch_size: int = 1
    num_micro_batches: int = 1
    schedule: str = "1F1B"
    virtual_stages: int = 1
    recompute: str | Mapping[str, str] | tuple[int, ...] = "none"
    stages: tuple[int, ...] | None = None
    context_method: str | Mapping[str, str] | None = None
    zero_replicas: int = 1
    offload: tuple[str, ...] = ()


# When a choice is decided; the others are pinned or at their default from the start.
_START, _CONTEXT, _MESH, _EXPERTS, _BATCH, _ZERO, _COPIES, _SCHEDULE = range(8)
_DECIDED = {
    "cp": _CONTEXT, "pp": _MESH, "tp": _MESH, "dp": _MESH, "ep": _EXPERTS, "etp": _EXPERTS,
    "micro_batch_size": _BATCH, "num_micro_batches": _BATCH, "zero_stage": _ZERO, "zero_replicas": _COPIES,
    "schedule": _SCHEDULE, "virtual_stages": _SCHEDULE,
}  # fmt: skip


@lru_cache(maxsize=256)
def _levels(scope: Scope, pinned: frozenset[str]) -> tuple[tuple[Rule, ...], ...]:
    """The rules by when all that they name is decided. `pinned`: decided from the start."""
    found: list[list[Rule]] = [[] for _ in range(_SCHEDULE + 1)]
    for rule in RULES:
        if rule.scope <= scope:
            left = (_DECIDED.get(name, _START) for name in rule.names if name not in pinned)
            found[max(left, default=_START)].append(rule)
    return tuple(map(tuple, found))


class _Walk:
    """The enumeration, in an order that decides what rules are about as early as possible.

    Args:
        early: pinned choices count as decided from the start, so that what is illegal is left early, and the rule that
            comes closest to a candidate is kept as `error`; else every candidate is counted under the rule it breaks.
    """

    def __init__(self, limits: Limits, pins: Mapping[str, Any], early: bool) -> None:
        self.limits, self.facts, self.pins, self.early = limits, limits.facts, pins, early
        stages = pins.get("stages")
        self.draft = _Draft(
            recompute=read_recompute(pins.get("recompute", "none")),
            stages=None if stages is None else tuple(stages),
            context_method=pins.get("context_method"),
            offload=state_offload(pins),
        )
        self.levels = _levels(limits.scope, frozenset(pins) if early else frozenset())
        if early:
            for name in set(pins) & set(_DECIDED):
                setattr(self.draft, name, pins[name])
        self.illegal: Counter[str] = Counter()
        self.limited = False
        self.error: tuple[tuple[int, int], PinError] | None = None

    def _broken(self, level: int) -> str | None:
        """The name of the first rule of a level that the draft breaks."""
        for rule in self.levels[level]:
            reason = rule.broken(self.draft, self.facts)
            if reason is not None:
                if self.early:
                    self._blame(rule, reason, level)
                return rule.name
        return None

    def _blame(self, rule: Rule, reason: str, level: int) -> None:
        """Keep the rule that is most about what is pinned; of several the one that is met last."""
        rank = (-sum(name in _DECIDED and name not in self.pins for name in rule.names), level)
        if self.error is None or self.error[0] < rank:
            self.error = (rank, PinError(reason, rule.names))

    def _left_out(self, level: int) -> bool:
        name = self._broken(level)
        if name is not None:
            self.illegal[name] += 1
        return name is not None

    def candidates(self) -> Iterator[Candidate]:
        """All of them."""
        if self._left_out(_START):
            return
        for cp in [self.pins["cp"]] if "cp" in self.pins else self.limits.contexts:
            self.draft.cp = cp
            if not self._left_out(_CONTEXT):
                yield from self._meshes(cp)

    def _meshes(self, cp: int) -> Iterator[Candidate]:
        devices, d, pins = self.facts.devices // cp, self.draft, self.pins
        for pp in self._degrees("pp", devices):
            for tp in self._degrees("tp", devices // pp if devices % pp == 0 else devices):
                d.pp, d.tp = pp, tp
                d.dp = max(1, devices // (d.pp * d.tp))
                if self.early:
                    d.dp = pins.get("dp", d.dp)
                elif d.dp * d.pp * d.tp == devices and pins.get("dp", d.dp) != d.dp:
                    self.illegal["another dp is pinned"] += 1
                    continue
                if self._left_out(_MESH):
                    continue
                if d.tp > self.limits.domain and "tp" not in pins:
                    self.limited = True
                    self.illegal["tp beyond the scale-up domain"] += 1
                    continue
                spread = self._spread()
                if not spread:
                    self.illegal["another ep or etp is pinned"] += 1
                    continue
                yield from self._batches(spread)

    def _batches(self, spread: list[tuple[int, int]]) -> Iterator[Candidate]:
        d, pins = self.draft, self.pins
        degrees = (d.pp, d.dp, d.tp)
        for size, num in self._micro_batches():
            d.micro_batch_size, d.num_micro_batches = size, num
            if self._left_out(_BATCH):
                continue
            several = self.early or d.dp * d.cp > 1
            stages = [pins["zero_stage"]] if "zero_stage" in pins else ZERO_STAGES if several else [0]
            for zero, (ep, etp) in itertools.product(stages, spread):
                d.zero_stage, d.ep, d.etp = zero, ep, etp
                if self._left_out(_ZERO):
                    continue
                plain = Candidate(*degrees, zero, size, num, ep, d.cp, etp=etp)
                for copies in self._copies():
                    d.zero_replicas = copies
                    if not self._left_out(_COPIES):
                        yield from self._schedules(replace(plain, zero_replicas=copies))

    def _micro_batches(self) -> Iterator[tuple[int, int]]:
        """(size, number) of the micro-batches of a data-parallel rank."""
        pins, batch, dp = self.pins, self.facts.batch or 1, self.draft.dp
        if self.early and batch % dp:
            return
        for size in divisors(batch // dp):
            num = batch // dp // size
            if pins.get("micro_batch_size", size) == size and pins.get("num_micro_batches", num) == num:
                yield size, num

    def _copies(self) -> list[int]:
        """Copies of what ZeRO shards: one, or as few as leave the ranks that share it in one unit of a level."""
        d = self.draft
        if "zero_replicas" in self.pins:
            return [self.pins["zero_replicas"]]
        if self.early:
            return divisors(d.dp)
        legal = zero_replica_counts(d.dp, d.cp, d.zero_stage, d.tp, d.ep, d.etp)
        ranks = d.dp * d.cp * d.tp
        return sorted({1, *(next((n for n in legal if ranks <= n * unit), 1) for unit in self.limits.units)})

    def _schedules(self, plain: Candidate) -> Iterator[Candidate]:
        """The candidate under every schedule that takes its degrees."""
        pinned = "schedule" in self.pins or "virtual_stages" in self.pins
        for schedule, virtual_stages in self._orders(pinned):
            others = not self.early and not pinned and schedule != "1F1B"
            if others and (plain.pp == 1 or self.draft.stages is not None):
                continue
            self.draft.schedule, self.draft.virtual_stages = schedule, virtual_stages
            broken = self._broken(_SCHEDULE)
            if broken is None:
                candidate = replace(plain, schedule=schedule, virtual_stages=virtual_stages)
                if not others or candidate.num_actions <= MAX_ACTIONS:
                    yield candidate
            elif not others:
                self.illegal[broken] += 1

    def _orders(self, pinned: bool) -> Iterator[tuple[str, int]]:
        if not self.early:
            yield from [schedule_of(self.pins)] if pinned else [("1F1B", 1), *self.limits.schedules]
            return
        model, pins = self.facts.model, self.pins
        most = 16 if model is None else (model.num_layers + model.num_ends) // self.draft.pp
        for schedule in [pins["schedule"]] if "schedule" in pins else SCHEDULES:
            fewest, highest = SCHEDULES[schedule].virtual_stages
            some = range(fewest, (most if highest is None else highest) + 1)
            for virtual_stages in [pins["virtual_stages"]] if "virtual_stages" in pins else some or [fewest]:
                yield schedule, virtual_stages

    def _spread(self) -> list[tuple[int, int]]:
        """(ep, etp) that break no rule."""
        d, pins = self.draft, self.pins
        found = self._all_spread() if self.early else self._searched_spread()
        out = []
        for ep, etp in found:
            if pins.get("ep", ep) == ep and pins.get("etp", etp) == etp:
                d.ep, d.etp = ep, etp
                if self._broken(_EXPERTS) is None:
                    out.append((ep, etp))
        return out

    def _all_spread(self) -> list[tuple[int, int]]:
        d, model = self.draft, self.facts.model
        experts = 0 if model is None else model.num_experts
        parts = [self.pins["ep"]] if "ep" in self.pins else divisors(experts) if experts else [1]
        whole = dict.fromkeys((d.tp, 1, *divisors(d.dp * d.cp * d.tp))) if experts else [d.tp]
        return list(itertools.product(parts, [self.pins["etp"]] if "etp" in self.pins else whole))

    def _searched_spread(self) -> list[tuple[int, int]]:
        """Experts where tp has them; tokens travelling to whole ones, or to some that tp splits.

        Two more are legal and looked at if pinned: all experts whole on every rank beside tp, and experts that tp
        splits although there are enough to give ep x tp ranks whole ones.
        """
        d, model, pins = self.draft, self.facts.model, self.pins
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


def candidates(limits: Limits, pins: Mapping[str, Any]) -> Space:
    """What a search looks at, under pins whose values were checked; where that is nothing, what is legal beside it."""
    walk = _Walk(limits, pins, early=False)
    found = tuple(walk.candidates())
    restrictions = (ONE_DOMAIN,) if walk.limited else ()
    if not found:
        found, restrictions = tuple(legal(limits, pins)), (BEYOND,)
        orders = {("1F1B", 1), *limits.schedules}
        usual = (c for c in found if c.zero_replicas == 1 and (c.schedule, c.virtual_stages) in orders)
        found = tuple(usual) or found
    return Space(found, dict(walk.illegal), restrictions)


def legal(limits: Limits, pins: Mapping[str, Any]) -> Iterator[Candidate]:
    """All legal candidates under pins whose values were checked, whether a search would look at them or not."""
    return _Walk(_all_of(limits), pins, early=True).candidates()


def fault(limits: Limits, pins: Mapping[str, Any]) -> PinError | None:
    """Why there is no legal candidate: the rule that the one closest to legal breaks; None if there is one."""
    walk = _Walk(_all_of(limits), pins, early=True)
    if next(walk.candidates(), None) is not None:
        return None
    return walk.error[1] if walk.error is not None else PinError("the pins exclude each other", tuple(pins))


def _all_of(limits: Limits) -> Limits:
    devices = limits.facts.devices
    return replace(limits, domain=devices, contexts=tuple(divisors(devices)))
