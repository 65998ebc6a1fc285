"""Why this plan: what every other choice would cost, and which settings of the task would help most.

    found = explain(PlanRequest(graph, cluster, 8192, 1024))
    found.decisions[0].name, found.decisions[0].alternatives[0].difference    # the most expensive choice to change
    found.settings[0].name, found.settings[0].gain                            # what would help most

Each alternative is the best plan with another value pinned: what `autoplan plan --pin tp=8` answers. Each search has
its own time limit, and says so if it was stopped. A setting is priced with the plan as it is; the best few, and memory,
are planned anew.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autoplan.config.choice import Choice, Written, choices_of
from autoplan.config.choices import PINS, option_data
from autoplan.config.context_methods import INNER, ULYSSES
from autoplan.config.keys import check_names
from autoplan.config.offload import NOTHING, OPTIMIZER
from autoplan.config.parallel import Mode, ParallelConfig, RunOptions
from autoplan.config.precision import precision_of
from autoplan.config.recompute import RECOMPUTE, RECOMPUTE_KINDS
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.cost_models.hardware.parts import NETWORKS
from autoplan.errors import AutoplanError, InfeasibleError, PinError
from autoplan.search.best_use import best_use
from autoplan.search.degrees import DECIDED_AT
from autoplan.search.infeasible import InfeasibleReport
from autoplan.search.planner import (
    Certificate,
    Planned,
    PlanRequest,
    SearchResult,
    Status,
    StoppedError,
    estimate_config,
    search_plan,
)
from autoplan.search.request import check_task, space_of
from autoplan.stacks.records import SETTINGS
from autoplan.sweeps.difference import Difference, decided, difference
from autoplan.sweeps.whatif import STEP_ONLY, RunTask
from autoplan.units import GB

ALTERNATIVE_S = 10.0  # seconds for one alternative
_LEAST_GAIN = 0.001  # smaller gains of a setting are not named
_NUM_SEARCHED = 3  # settings that are planned anew, after all were priced
_LEAST_SAVED = 0.01  # share of its memory that a slower plan of the front saves
# Shares of a device's memory at which the front of time against memory is searched
_FRONT = (1.0, 0.85, 0.7, 0.55, 0.4, 0.3, 0.2, 0.1)

Told = Callable[[int, int, str], None]  # pieces done, pieces in all, what comes next


@dataclass(frozen=True)
class Alternative:
    """The best plan with another value of a choice, or why there is none.

    Attributes:
        pins: what was pinned for it, besides the pins of the request that it does not contradict.
        planned: None unless `status` is "ok".
        status: "ok", "does not fit", "illegal", or "stopped": no plan was found in time, so one may fit.
        difference: what it changes in comparison with the plan.
        shortage: the stage and the term of memory at fault, if it does not fit.
    """

    value: Any
    pins: Mapping[str, Any]
    status: str
    planned: Planned | None = None
    difference: Difference | None = None
    certificate: Certificate | None = None
    shortage: InfeasibleReport | None = None
    reason: str = ""

    @property
    def cost(self) -> float:
        """How much longer a step takes, as a share; inf if it does not fit, nan if that is not known."""
        if self.difference is not None:
            return self.difference.step_s.share or 0.0
        return math.inf if self.status == "does not fit" else math.nan

    @property
    def gap(self) -> float:
        """The share by which the best plan with this value may be faster than the one that was found."""
        return 0.0 if self.certificate is None else self.certificate.gap


@dataclass(frozen=True)
class Decision:
    """A choice of the plan, its value, and its alternatives, cheapest first; none if no other value is legal."""

    name: str
    value: Any
    alternatives: tuple[Alternative, ...]

    @property
    def cost(self) -> float:
        """Return the cost of the cheapest other choice, which says how much this choice matters."""
        known = [a.cost for a in self.alternatives if not math.isnan(a.cost)]
        return min(known, default=math.nan)


@dataclass(frozen=True)
class Setting:
    """One change of the task around a plan, and what it gains.

    Attributes:
        name: what is changed, as `whatif --vary` and the options of commands call it.
        value: its new value; `own`: its value now.
        same_gain: tokens per second more with the same plan, as a share; None: this plan is illegal or too big there.
        gain: the same with a new plan, in comparison with the faster of the plan and, where it fits without the change,
            the new plan there; None: not planned anew.
        planned: the new plan.
    """

    name: str
    what: str
    own: Any
    value: Any
    same_gain: float | None
    gain: float | None = None
    planned: Planned | None = None
    certificate: Certificate | None = None

    @property
    def best_gain(self) -> float:
        """The larger gain; a new plan may not have been found as good as the same one."""
        return max((g for g in (self.gain, self.same_gain) if g is not None), default=-math.inf)


@dataclass(frozen=True)
class FrontPoint:
    """A plan of the front: no other plan that was found is as fast with as little memory.

    Attributes:
        capacity_bytes: the memory per device under which it was searched.
        certificate: None of a plan that was given, not searched.
    """

    capacity_bytes: float
    planned: Planned
    certificate: Certificate | None

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.planned.estimate.step_time_s.mid

    @property
    def peak_bytes(self) -> float:
        """Bytes of the fullest stage."""
        return self.planned.estimate.peak_memory_bytes.mid


@dataclass(frozen=True)
class Explanation:
    """A plan and why it was chosen.

    Attributes:
        decisions: what matters most first.
        settings: what would help most first.
        front: fastest first; empty unless it was asked for. `front_end`: why it has no plan with less memory.
        interrupted: True if Ctrl-C ended it, so that some of it is missing.
    """

    request: PlanRequest
    planned: Planned
    certificate: Certificate | None
    decisions: tuple[Decision, ...]
    settings: tuple[Setting, ...] = ()
    front: tuple[FrontPoint, ...] = ()
    front_end: str = ""
    interrupted: bool = False


def explain(
    request: PlanRequest,
    config: ParallelConfig | None = None,
    *,
    only: Sequence[str] = (),
    every_value: bool = False,
    settings: bool = True,
    front: bool = False,
    seconds: float = ALTERNATIVE_S,
    run: RunTask = STEP_ONLY,
    told: Told = lambda done, num, what: None,
) -> Explanation:
    """Return why a plan is what it is.

    Args:
        config: the plan; None: the best one, which is searched as `autoplan plan` does: it may leave nodes idle or take
            other settings of the stack, and the explanation is about this request (`Explanation.request`).
        only: names of the choices to explain; empty: all.
        every_value: all values that are legal, not only the next ones below and above.
        settings: True to look at changes of the task.
        front: True to search the front of step time against memory.
        seconds: time limit of the search of one alternative.
        run: the whole run that the plan is for.
        told: called before each piece of work.

    Raises: AutoplanError as `search_plan`; PinError for a choice that is not known, or pinned to another value than the
        configuration has.

    Example:
        >>> from autoplan import Cluster, PlanRequest, explain, load_model
        >>> request = PlanRequest(load_model("gpt2"), Cluster.parse("2xh100"), 1024, 16, pins={"pp": 1})
        >>> found = explain(request, only=["tp"], settings=False)
        >>> [decision.name for decision in found.decisions]
        ['tp']
    """
    check_names(only, (*_FROM_SPACE, *_OTHER), "explain", "choice")
    check_task(replace(request, time_limit_s=seconds))
    certificate = None
    told(0, 0, "the plan")
    if config is None:
        use = best_use(replace(request, top=1))
        request, own, certificate = use.request, use.result.plans[0], use.result.certificate
    else:
        _check_pinned(request, config)
        own = estimate_config(request, config)
    if certificate is not None and certificate.status is Status.INTERRUPTED:
        return Explanation(request, own, certificate, (), interrupted=True)
    quick = replace(request, time_limit_s=seconds, top=1, patient=False)
    asked = list(_alternatives(quick, own.config, only, every_value))
    changes = list(_changes(request)) if settings else []
    num = len(asked) + len(changes) + min(len(changes), _NUM_SEARCHED) + len(_FRONT) * front
    found: dict[str, list[Alternative]] = {name: [] for name in only}
    priced: list[Setting] = []
    points: list[FrontPoint] = []
    ended, interrupted = "", False
    try:
        for done, (name, value, pins) in enumerate(asked):
            told(done, num, f"{name}={value}")
            found.setdefault(name, []).append(alternative(quick, own, value, pins, run))
        priced = _settings(quick, own, changes, lambda k, what: told(len(asked) + k, num, what))
        if front:
            points, ended = _front(
                quick,
                _known_points(request, own, certificate, found),
                lambda k, what: told(num - len(_FRONT) + k, num, what),
            )
    except KeyboardInterrupt:
        interrupted = True
    values = decided(request, own.config)
    decisions = [Decision(name, values[name], tuple(sorted(each, key=_by_cost))) for name, each in found.items()]
    decisions.sort(key=lambda d: (math.isnan(d.cost), -d.cost if not math.isnan(d.cost) else 0.0))
    return Explanation(request, own, certificate, tuple(decisions), tuple(priced), tuple(points), ended, interrupted)


def _check_pinned(request: PlanRequest, config: ParallelConfig) -> None:
    """Raise PinError for a number that is pinned to another value than that of the configuration."""
    for name, value in request.pins.items():
        own = getattr(config, name, None)
        if name in _COMPARED and value != own:
            raise PinError(f"pin {name}={value!r}: the configuration has {name}={own!r}; leave out the pin", (name,))


_COMPARED = ("dp", "tp", "pp", "cp", "ep", "zero_stage", "micro_batch_size", "num_micro_batches", "schedule")


def _by_cost(a: Alternative) -> tuple[bool, float]:
    return (math.isnan(a.cost), 0.0 if math.isnan(a.cost) else a.cost)


def _searched(request: PlanRequest) -> SearchResult:
    """Return the best plan. Raises: KeyboardInterrupt also where a search answers it with the best plan so far."""
    result = search_plan(request)
    if result.certificate.status is Status.INTERRUPTED:
        raise KeyboardInterrupt
    return result


# -- alternatives ------------------------------------------------------------------------------------------------------


def alternative(
    request: PlanRequest, own: Planned, value: Any, pins: Mapping[str, Any], run: RunTask = STEP_ONLY
) -> Alternative:
    """Return the best plan of a request with further pins, in comparison with a plan."""
    try:
        result = _searched(replace(request, pins={**request.pins, **pins}))
    except StoppedError as error:
        return Alternative(value, pins, "stopped", reason=str(error))
    except InfeasibleError as error:
        return Alternative(value, pins, "does not fit", shortage=getattr(error, "report", None), reason=str(error))
    except AutoplanError as error:
        return Alternative(value, pins, "illegal", reason=str(error))
    best = result.plans[0]
    changed = difference(request, own, result.request, best, run)
    return Alternative(value, pins, "ok", best, changed, result.certificate)


def _alternatives(
    request: PlanRequest, config: ParallelConfig, only: Sequence[str], every_value: bool
) -> Iterator[tuple[str, Any, Mapping[str, Any]]]:
    """Yield (choice, other value, pins) for what is worth trying."""
    values = decided(request, config)
    makers: dict[str, _Maker] = {**dict.fromkeys(_FROM_SPACE, _spaced), **_OTHER}
    free = {name: value for name, value in request.pins.items() if name not in makers}
    legal = space_of(replace(request, pins=free)).candidates if set(free) != set(request.pins) else None
    found = legal if legal is not None else space_of(request).candidates
    for name, maker in makers.items():
        if only and name not in only:
            continue
        for value in maker(name, values[name], config, request, found, every_value):
            yield name, value, _pins_for(name, value, config)


# Choices whose other values are those of the space; dp and the number of micro-batches follow from the others
_FROM_SPACE = tuple(name for name in PINS if name in DECIDED_AT and name not in ("dp", "num_micro_batches"))
_OF_PIPELINE = ("schedule", "virtual_stages")


def _spaced(
    name: str,
    own: Any,
    config: ParallelConfig,
    request: PlanRequest,
    found: Sequence[ParallelConfig],
    every_value: bool,
) -> list[Any]:
    """Return the values of the space: all words and ZeRO stages, of numbers the next ones below and above."""
    if config.pp == 1 and name in _OF_PIPELINE:
        return []  # another value needs a pipeline, whose cost `pp` says
    if name == "etp" and own is None:
        return []  # experts follow tp; another value needs experts over ranks, whose cost `ep` says
    there = {c.expert_tp if name == "etp" else getattr(c, name) for c in found if name != "etp" or c.ep > 1}
    values: list[Any] = sorted(there - {own})
    if every_value or name in ("schedule", "zero_stage"):
        return values
    below, above = [v for v in values if v < own], [v for v in values if v > own]
    return [*below[-1:], *above[:1]]


_RECOMPUTE = tuple(name for name in RECOMPUTE if not RECOMPUTE_KINDS[name].on_host)  # of all layers
_Maker = Callable[[str, Any, ParallelConfig, PlanRequest, Sequence[ParallelConfig], bool], list[Any]]
_OTHER: Mapping[str, _Maker] = {
    "recompute": lambda name, own, *rest: [v for v in _RECOMPUTE if v != own],
    "offload": lambda name, own, config, request, *rest: _offloads(own, request),
    "context_method": lambda name, own, config, *rest: (
        [v for v in (*INNER, ULYSSES) if v != own] if config.cp > 1 else []
    ),
    "stages": lambda name, own, config, *rest: _even(own),
}


def _offloads(own: Any, request: PlanRequest) -> list[Any]:
    if own:
        return [NOTHING]
    return [OPTIMIZER] if request.cluster.offloads else []


def _even(own: Any) -> list[Any]:
    """Return the even stages in place of uneven ones, if the layers divide."""
    if own is None or sum(own) % len(own):
        return []
    return [(sum(own) // len(own),) * len(own)]


def _pins_for(name: str, value: Any, config: ParallelConfig) -> dict[str, Any]:
    """Return the pins for a value: even stages are those of the plan's own pipeline."""
    pins = {name: value}
    if name == "stages":
        pins |= {"pp": config.pp, "schedule": config.schedule, "virtual_stages": config.virtual_stages}
    return pins


# -- settings ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Change:
    name: str
    what: str
    own: Any
    value: Any
    request: PlanRequest
    replans: bool = False  # it can only help a new plan
    searched: PlanRequest | None = None  # what a new plan answers, with the abilities of a stack; None: it cannot


def _changes(request: PlanRequest) -> Iterator[_Change]:
    """Yield single changes of a task, each with the request that has it."""
    for maker in (_of_cluster, _of_task, _of_options):
        for change in maker(_settled(request)):
            yield replace(change, searched=_as_stack(request, change))


def _settled(request: PlanRequest) -> PlanRequest:
    """Return a request with the settings of its stack as what they are, so that one of them can change."""
    return replace(request, like=None)


def _as_stack(request: PlanRequest, change: _Change) -> PlanRequest | None:
    """Return the request of a change for the stack of the plan; None for a setting that the stack does not have."""
    like, r = request.facts.like, change.request
    if like is None:
        return r
    given = {"mode": str(r.mode), "precision": r.precision, **option_data(r.options)}
    if change.name not in given:
        return replace(request, cluster=r.cluster, global_batch_size=r.global_batch_size)
    if change.name in SETTINGS and change.value not in getattr(like.can, change.name):
        return None
    try:
        return replace(request, like=like.but(**{change.name: given[change.name]}))
    except PinError:
        return None


def _of_cluster(r: PlanRequest) -> Iterator[_Change]:
    c = r.cluster
    networks = [level for level in c.levels if level.name in NETWORKS]
    figures: list[tuple[str, str, float]] = []
    if c.fabric is None and networks:
        figures.append(("nic", "network between nodes, Gbit/s per device", networks[0].bytes_per_s * 8 / GB))
    if c.fabric is None and c.domain_size > 1:
        figures.append(("scaleup", "links inside a domain, GB/s per device", c.levels[0].bytes_per_s / GB))
    figures.append(("memory_gb", "memory per device, GB", c.device.memory_bytes / GB))
    figures.append(("memory_gb_s", "bandwidth of the memory, GB/s", c.device.memory_bytes_per_s / GB))
    for name, what, own in figures:
        changed: Cluster = c.with_(**{name: 2 * own})  # type: ignore[arg-type]
        yield _Change(name, what, own, 2 * own, replace(r, cluster=changed), name == "memory_gb")


def _of_task(r: PlanRequest) -> Iterator[_Change]:
    batch = 2 * r.global_batch_size
    yield _Change(
        "global_batch_size", "sequences per step", r.global_batch_size, batch, replace(r, global_batch_size=batch)
    )
    if precision_of(r.precision).matmul is None and r.cluster.device.peak_flops_by_dtype.get("float8", 0):
        yield _Change("precision", "precision", r.precision, "fp8", replace(r, precision="fp8"))
    for mode in Mode:
        if mode is not r.mode:
            yield _Change("mode", "kernels", str(r.mode), str(mode), replace(r, mode=mode))


def _of_options(r: PlanRequest) -> Iterator[_Change]:
    for record in choices_of(RunOptions):
        own = getattr(r.options, record.name)
        for value in _other_values(record, own):
            try:
                changed = replace(r, options=replace(r.options, **{record.name: value}))
            except AutoplanError:
                continue  # not with the other options
            yield _Change(record.name, record.name.replace("_", " "), own, value, changed)


def _other_values(record: Choice, own: Any) -> list[Any]:
    if record.written is Written.SWITCH:
        return [not own]
    if record.written is Written.WORDS:
        whole = frozenset(record.words)
        return [whole] if whole != own else []
    if record.written is Written.WORD:
        return [word for word in record.words if word != own]
    return []


def quick_gains(request: PlanRequest, own: Planned) -> list[Setting]:
    """Price a plan with twice of every figure of the hardware, and other settings of the task, without a search.

    Return those that gain, best first.
    """
    changes = [change for maker in (_of_cluster, _of_task) for change in maker(_settled(request))]
    found = _priced(own, changes, lambda k, what: None)
    return sorted((s for s in found if s.best_gain >= _LEAST_GAIN), key=lambda s: -s.best_gain)


def _settings(
    request: PlanRequest, own: Planned, changes: Sequence[_Change], told: Callable[[int, str], None]
) -> list[Setting]:
    """Price every change with the same plan, plan the best of them anew, and return those that gain, best first."""
    found = list(zip(_priced(own, changes, told), changes, strict=True))
    found.sort(key=lambda pair: (not pair[1].replans, -pair[0].best_gain))
    out = []
    for k, (setting, change) in enumerate(found):
        if k < _NUM_SEARCHED:
            told(len(changes) + k, f"{change.name}={change.value}, planned anew")
            setting = _planned_anew(setting, change, request, own)
        out.append(setting)
    return sorted((s for s in out if s.best_gain >= _LEAST_GAIN), key=lambda s: -s.best_gain)


def _priced(own: Planned, changes: Sequence[_Change], told: Callable[[int, str], None]) -> list[Setting]:
    """Price every change with the same plan."""
    found = []
    for k, change in enumerate(changes):
        told(k, f"{change.name}={change.value}")
        priced = _same_plan(change, own)
        gain = None if priced is None else priced.estimate.tokens_per_s / own.estimate.tokens_per_s - 1
        found.append(Setting(change.name, change.what, change.own, change.value, gain))
    return found


def _same_plan(change: _Change, own: Planned) -> Planned | None:
    """Return the price of the plan under a change; None if it is illegal or too big there."""
    config = own.config
    if change.name == "global_batch_size":
        config = config.but(num_micro_batches=config.num_micro_batches * 2)
    try:
        # without sequence parallelism the layouts of the plan are not legal
        priced = estimate_config(change.request, config, None if change.name == "sequence_parallel" else own)
    except AutoplanError:
        return None
    return priced if priced.estimate.fits else None


def _planned_anew(setting: Setting, change: _Change, request: PlanRequest, own: Planned) -> Setting:
    """Return a setting with the gain of a new plan, as far as it comes from the change."""
    if change.searched is None:
        return setting
    try:
        result = _searched(replace(change.searched, top=1, time_limit_s=request.time_limit_s, patient=False))
    except AutoplanError:
        return setting
    best = result.plans[0]
    now = max(own.estimate.tokens_per_s, _tokens_per_s_without(change, request, best))
    gain = best.estimate.tokens_per_s / now - 1
    return replace(setting, gain=gain, planned=best, certificate=result.certificate)


def _tokens_per_s_without(change: _Change, request: PlanRequest, planned: Planned) -> float:
    """Return the tokens per second of a plan without the change that it was made for; 0 if it cannot be run then."""
    config, settled = planned.config, _settled(request)
    if change.name == "global_batch_size":
        config = config.but(num_micro_batches=config.num_micro_batches // 2)
    try:
        before = estimate_config(settled, config)
    except AutoplanError:  # illegal
        return 0.0
    return before.estimate.tokens_per_s if _fits(settled, before) else 0.0


# -- the front of time against memory ----------------------------------------------------------------------------------


def _known_points(
    request: PlanRequest, own: Planned, certificate: Certificate | None, found: Mapping[str, Sequence[Alternative]]
) -> list[FrontPoint]:
    """Return the plan and the alternatives that keep its pins, where they fit: they may stand on the front, too."""
    free = (a for name, each in found.items() if name not in request.pins for a in each)
    plans = [(own, certificate), *((a.planned, a.certificate) for a in free if a.planned is not None)]
    return [FrontPoint(request.cluster.device.memory_bytes, *each) for each in plans if _fits(request, each[0])]


def _front(
    request: PlanRequest, known: Sequence[FrontPoint], told: Callable[[int, str], None]
) -> tuple[list[FrontPoint], str]:
    """Search the best plan under less and less memory per device. Return those not dominated, and why it ended.

    Args:
        known: plans of the same task that were found before, which stand beside those found here.
    """
    found: list[FrontPoint] = []
    whole = request.cluster.device.memory_bytes
    ended = f"less than {_FRONT[-1] * whole / GB:.1f} GB was not tried"
    for k, share in enumerate(_FRONT):
        told(k, f"{share:.0%} of the memory")
        if found and _need_bytes(request, found[-1].planned) <= share * whole:
            continue  # the last plan fits there, too
        cluster = request.cluster.with_(memory_gb=share * whole / GB)
        try:
            result = _searched(replace(request, cluster=cluster))
        except StoppedError:
            ended = f"in time no plan was found for {share * whole / GB:.1f} GB and less"
            break
        except InfeasibleError:
            ended = f"nothing fits into {share * whole / GB:.1f} GB"
            break
        found.append(FrontPoint(share * whole, result.plans[0], result.certificate))
    return undominated([*found, *known]), ended


def _need_bytes(request: PlanRequest, planned: Planned) -> float:
    """Return the memory that a device must have for a plan, at the risk of the request."""
    room = request.room
    return max(room.bytes_of(s.memory_bytes) for s in planned.estimate.stages)


def _fits(request: PlanRequest, planned: Planned) -> bool:
    """Return True if a plan fits devices and host at the risk of the request."""
    on_device = _need_bytes(request, planned) <= request.cluster.device.memory_bytes
    return on_device and planned.estimate.fits_host


def undominated(points: Sequence[FrontPoint]) -> list[FrontPoint]:
    """Return the points that no other one equals or beats in both time and memory, the fastest first.

    A slower one with hardly less memory is left out.
    """
    out: list[FrontPoint] = []
    for p in sorted(points, key=lambda p: (p.step_s, p.peak_bytes)):
        if not out or p.peak_bytes < out[-1].peak_bytes * (1 - _LEAST_SAVED):
            out.append(p)
    return out
