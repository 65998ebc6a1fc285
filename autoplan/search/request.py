"""The request for a plan, and what follows from it alone: its candidates, and their kinds of offload."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from autoplan.config.choices import option_data, options_of, read_mode
from autoplan.config.keys import check_count, check_kind
from autoplan.config.numbers import without_numpy
from autoplan.config.offload import ACTIVATIONS, held_on_host, of_states, searched_offload
from autoplan.config.parallel import Mode, ParallelConfig, RunOptions
from autoplan.config.pins import Pins, PinsField
from autoplan.config.planning import DENSE_GAP, EXPERTS_GAP, SearchSettings
from autoplan.config.precision import precision_of
from autoplan.config.recompute import OFFLOAD, RecomputeMix
from autoplan.config.settings import check_setting
from autoplan.cost_models.constants import Constants
from autoplan.cost_models.costs import Costs
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.cost_models.memory.room import Room
from autoplan.cost_models.profile import Profile
from autoplan.errors import PinError
from autoplan.ir.graph import ModelGraph
from autoplan.program.autocast import of_precision
from autoplan.program.facts import Facts, facts_of_model, latent_attention
from autoplan.program.legality import Scope
from autoplan.schedules.schedule import SCHEDULES
from autoplan.search.degrees import Space
from autoplan.search.layout_store import LayoutStore
from autoplan.search.refusals import refusal
from autoplan.search.space import limits_of, space
from autoplan.stacks.like import Like, read_like

# Types of the arguments of a request that texts stand for elsewhere, and what makes one of such a text
_KINDS: Mapping[str, tuple[Any, str]] = {
    "graph": (ModelGraph, "autoplan.load_model(text)"),
    "cluster": (Cluster, "autoplan.Cluster.parse(text)"),
    "profile": (Profile | None, "autoplan.Profile.load(name)"),
    "constants": (Constants, "autoplan.cost_models.constants.Constants.load(path)"),
    "like": (Like | str | None, "a stack's name, megatron-bridge@26.08"),
}

# Arguments that may be numbers of numpy
_NUMBERS = (
    *("seq_len", "global_batch_size", "target_len", "top", "least_tp", "below_s"),
    *("time_limit_s", "memory_risk", "equal_within", "gap"),
)


@dataclass(frozen=True)
class PlanRequest(SearchSettings):
    """The task of a search, with its settings.

    Attributes:
        global_batch_size: sequences per step over all data-parallel ranks.
        pins: fixed choices by name (autoplan.config.choices.PINS), checked here; read as `Pins`.
        precision: a name of autoplan.config.precision.PRECISIONS.
        mode: how blocks run, a Mode or its name.
        options: kernels of attention, how kernels are started, what overlaps; RunOptions or a mapping by name.
        constants: constants of the cost model, as shipped or fitted by `autoplan calibrate` to measured steps.
        constants_file: file that they were read from, for reports.
        profile: measured times that override the cluster's figures.
        like: the stack that will run the plan, `megatron-bridge@26.08`: its settings take the place of the defaults of
            mode, precision and options, and a search looks at what it can do (profiles/stacks). A value that differs
            from its default overrides the stack; a `Like` knows what was given, and decides all three.
        adapters: the adapters that `graph` has (`autoplan.program.adapters`), for reports.
        profile_file: name or file that the profile was read from, for reports.
        top: number of plans to return, best first. Any two differ in a degree, the ZeRO stage, the micro-batch or the
            schedule.
        by_kind: True: these plans differ in kind, too (`autoplan.search.simplicity.kind_of`): each is the best that
            uses just these kinds of parallelism.
        patient: False: a search without a plan at its time limit ends there, and if nothing fits, it looks for no
            change that would.
        executed: True: only plans that the runtime can execute.
        target_len: tokens per target sequence, if the model has one with a length of its own; None: seq_len.
        below_s: seconds of the step of a plan that is known: only shorter ones are searched, and if there is none,
            NotFasterError says so.
        least_tp: candidates with less tp are not looked at.
        layouts: layouts that searches of this request and of its copies (`dataclasses.replace`) share.

    Example:
        >>> from autoplan import Cluster, PlanRequest, load_model
        >>> request = PlanRequest(load_model("gpt2"), Cluster.parse("2xh100"), 1024, 16, pins={"tp": 1})
        >>> request.pins["tp"], request.precision
        (1, 'bf16')
    """

    graph: ModelGraph
    cluster: Cluster
    seq_len: int
    global_batch_size: int
    pins: PinsField = PinsField()  # noqa: RUF009  a descriptor, not a default
    precision: str = "bf16"
    mode: Mode = Mode.EAGER
    profile: Profile | None = None
    options: RunOptions = field(default_factory=RunOptions)
    constants: Constants = field(default_factory=Constants.shipped)
    constants_file: str | None = None
    top: int = 1
    by_kind: bool = False
    patient: bool = True
    executed: bool = False
    target_len: int | None = None
    adapters: str | None = None
    profile_file: str | None = None
    like: Like | str | None = None
    below_s: float = math.inf
    least_tp: int = 1
    layouts: LayoutStore = field(default_factory=LayoutStore, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in _NUMBERS:
            object.__setattr__(self, name, without_numpy(getattr(self, name)))
        for name, (kind, instead) in _KINDS.items():
            check_kind(name, getattr(self, name), kind, instead)
        check_measured_on(self.profile, self.cluster, f"the cluster {self.cluster}")
        object.__setattr__(self, "mode", read_mode(self.mode))
        object.__setattr__(self, "options", options_of(self.options))
        if self.adapters is not None and all(p.trainable for p in self.graph.params.values()):
            raise PinError(
                f"adapters={self.adapters!r} says which adapters the graph has, but all of its parameters are trained; "
                "add them: graph=autoplan.program.adapters.with_adapters(graph, "
                f"autoplan.config.adapters.read_adapters({self.adapters!r}))"
            )
        if self.like is not None:
            self._settle(self.like)
        graph = of_precision(self.graph, precision_of(self.precision), self.cluster.device_type)
        object.__setattr__(self, "graph", graph)
        try:
            object.__setattr__(self, "pins", Pins(self.pins))
        except PinError as error:
            raise refusal(limits_of(self.facts, self.cluster, self.scope), self.pins) or error from None

    def _settle(self, like: Like | str) -> None:
        """Take the settings of the stack, but for what was given."""
        if isinstance(like, str):
            usual = option_data(RunOptions())
            given = {name: v for name, v in option_data(self.options).items() if v != usual[name]}
            given |= {"mode": None if self.mode is Mode.EAGER else self.mode}
            like = read_like(like, {**given, "precision": None if self.precision == "bf16" else self.precision})
        like = like.on(self.cluster.device.name, self.graph.name)
        settled = {
            "like": like,
            "mode": like.mode,
            "precision": like.precision(latent_attention(self.graph)),
            "options": like.options(self.cluster.device.name),
            "executed": self.executed or like.stack.executed,
        }
        for name, value in settled.items():
            object.__setattr__(self, name, value)

    @cached_property
    def facts(self) -> Facts:
        """The facts of model, cluster and run that decide which configurations are legal."""
        return Facts.of(
            self.graph,
            self.cluster,
            self.global_batch_size,
            self.seq_len,
            self.mode,
            self.precision,
            self.options,
            self.target_len,
            self.like if isinstance(self.like, Like) else None,
        )

    @property
    def allowed_gap(self) -> float:
        """The share of a step that may stay unproved."""
        usual = EXPERTS_GAP if facts_of_model(self.graph).num_experts else DENSE_GAP
        return usual if self.gap is None else self.gap

    @property
    def recompute_mix(self) -> RecomputeMix:
        """How the recompute of single layers may differ in a search: as the stack can, anything without one."""
        like = self.facts.like
        return RecomputeMix.ANY if like is None else like.can.recompute_mix.searched

    @property
    def of_framework(self) -> bool:
        """True if a framework will run the plan: the settings are those of a stack, or the kernels are Megatron's."""
        return self.like is not None or self.mode is Mode.FUSED

    @property
    def scope(self) -> Scope:
        """The scope of rules that a search keeps."""
        return Scope.EXECUTED if self.executed else Scope.SEARCHED

    def env(self, size: int, cp: int = 1) -> dict[str, int]:
        """Return the values of size symbols for `size` sequences, cut over `cp` ranks."""
        return {"b": size, "s": self.seq_len // cp, "t": self.target_len or self.seq_len}

    @property
    def costs(self) -> Costs:
        """The prices of operations and collectives in this task."""
        return Costs(self.cluster, self.profile, self.mode, self.options, self.constants)

    @property
    def room(self) -> Room:
        """The room of a device and of its share of the host, at the risk of this task."""
        return Room.guarded(self.cluster.device.memory_bytes, self.cluster.host_memory_bytes, self.memory_risk)


def check_measured_on(profile: Profile | None, cluster: Cluster, called: str) -> None:
    """Raise PinError for a profile of another type of device than the cluster has; `called`: the cluster in words."""
    if profile is not None and profile.device_type != cluster.device_type:
        raise PinError(
            f"profile {profile.name} was measured on {profile.device_type} devices, {called} has "
            f"{cluster.device_type} devices"
        )


def space_of(request: PlanRequest) -> Space:
    """Return the candidates of a request. PinError if the pins, or the least tp, leave none."""
    r = request
    found = space(r.graph, r.cluster, r.global_batch_size, r.pins, seq_len=r.seq_len, facts=r.facts, scope=r.scope)
    if r.least_tp == 1:
        return found
    left = tuple(c for c in found.candidates if c.tp >= r.least_tp)
    if not left:
        raise PinError(f"no tp of at least {r.least_tp} is legal; the largest is {max(c.tp for c in found.candidates)}")
    return replace(found, candidates=left, restrictions=(*found.restrictions, f"tp of at least {r.least_tp}"))


def offloaded(request: PlanRequest, candidate: ParallelConfig) -> list[ParallelConfig]:
    """Return the same degrees with each kind of offload that a search tries; empty if it tries none."""
    return [candidate.but(offload=kind) for kind in offload_kinds(request, candidate)]


def less_offloaded(request: PlanRequest, candidate: ParallelConfig) -> list[ParallelConfig]:
    """Return the same degrees with less on the host. If a candidate does not fit the device, these do not fit either.

    Under a schedule whose cuts are not bounded together, or where layers cannot have a choice of their own, they keep
    activations on the host if the candidate does: activations fetched from the host may take more room than recomputed
    ones.
    """
    held = held_on_host(candidate.offload)
    together = SCHEDULES[candidate.schedule].windows and request.recompute_mix is RecomputeMix.ANY
    less = (c for c in offloaded(request, candidate) if held_on_host(c.offload) < held)
    return [c for c in less if together or (ACTIVATIONS in c.offload) == (ACTIVATIONS in candidate.offload)]


def most_on_host_first(bounds: Mapping[ParallelConfig, float], below_s: float) -> dict[ParallelConfig, float]:
    """Return bounds in whose order a candidate comes before those with less of the state on the host.

    Its own is lowered to the least of theirs, where its plan bounds them, too (`ChunkCutter.less_on_host_s`).

    Args:
        below_s: bounds that are not below it are not looked at.
    """
    out, alike = dict(bounds), dict[object, list[ParallelConfig]]()
    for c, bound in bounds.items():
        if bound < below_s and c.zero_stage <= 1 and not SCHEDULES[c.schedule].windows:
            alike.setdefault((c.but(offload=()), ACTIVATIONS in c.offload), []).append(c)
    for mine in alike.values():
        most = max(mine, key=lambda c: len(held_on_host(c.offload)))
        out[most] = min(bounds[c] for c in mine)
    return out


def offload_kinds(request: PlanRequest, candidate: ParallelConfig) -> tuple[tuple[str, ...], ...]:
    """Return the kinds of offload that a search tries for a candidate."""
    if not request.cluster.offloads:
        return ()
    kinds = searched_offload(request.pins, candidate.zero_stage, candidate.num_shards)
    like = request.facts.like
    if like is not None:
        able = {*like.can.offload, *((ACTIVATIONS,) if OFFLOAD in like.can.recompute else ())}
        kinds = tuple(kind for kind in kinds if able.issuperset(kind))
    return kinds


def without_activations(candidate: ParallelConfig) -> ParallelConfig:
    """Return a candidate without activation offload, which a search treats as a recompute choice."""
    if ACTIVATIONS not in candidate.offload:
        return candidate
    return candidate.but(offload=of_states(candidate.offload))


def least_memory_first(candidate: ParallelConfig) -> tuple[int, ...]:
    """Return the sort key that puts the candidates most likely to fit first."""
    c = candidate
    return c.micro_batch_size, -len(held_on_host(c.offload)), -c.zero_stage, -c.tp, -c.pp


def check_task(request: PlanRequest) -> None:
    """Raise PinError for an impossible sequence length, or a setting by which nothing can be searched."""
    r = request
    check_setting("seq_len", r.seq_len)
    if r.target_len is not None:
        check_setting("target_len", r.target_len)
    check_count("top", r.top)
    check_count("least_tp", r.least_tp)
    r.check()
