"""Two plans side by side: what they decide differently, and what that changes, term by term.

found = difference(request, own, other_request, other)
found.decisions["tp"]          # (4, 8)
found.time_s["tp_comm"]        # seconds per step that the other plan needs more; all terms add up to `step_s`
found.memory_bytes["activations"]      # of the fullest stage of each
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from autoplan.config.choices import CHOICES, config_data
from autoplan.config.context_methods import methods_text
from autoplan.config.parallel import ParallelConfig
from autoplan.config.recompute import FULL, NONE, recompute_label
from autoplan.cost_models.quantity import Quantity
from autoplan.cost_models.time.estimate import Estimate, StageEstimate
from autoplan.program.facts import layer_calls
from autoplan.search.planner import Planned, PlanRequest
from autoplan.sweeps.whatif import STEP_ONLY, RunTask, run_of

_FOLLOW = ("num_micro_batches", "state_slack")  # follow from other choices, or are no decision of a plan


@dataclass(frozen=True)
class Pair:
    """A figure of a plan and of another one; None: not known."""

    own: float | None
    other: float | None

    @property
    def more(self) -> float | None:
        """The other plan's figure less the own one."""
        return None if self.own is None or self.other is None else self.other - self.own

    @property
    def share(self) -> float | None:
        """The difference as a share of the own figure."""
        return None if self.own is None or self.other is None or not self.own else self.other / self.own - 1


@dataclass(frozen=True)
class Difference:
    """The changes that another plan makes. Differences are the other plan's figure less the own one.

    Attributes:
        decisions: the choices that differ, by name: (own, other).
        step_s: seconds of a step.
        time_s: seconds of a step by term; they add up to the difference of the steps.
        memory_bytes: bytes by term, each plan on its fullest stage; they add up to the difference of the peaks.
        peak_bytes: bytes of the fullest stage.
        tokens_per_s: of all devices together.
        usd, days: of the whole run without failures, if its tokens are known.
    """

    decisions: Mapping[str, tuple[Any, Any]]
    step_s: Pair
    time_s: Mapping[str, float]
    memory_bytes: Mapping[str, float]
    peak_bytes: Pair
    tokens_per_s: Pair
    mfu: Pair
    num_devices: Pair
    usd_per_hour: Pair
    days: Pair
    usd: Pair


def difference(
    request: PlanRequest,
    own: Planned,
    other_request: PlanRequest,
    other: Planned,
    run: RunTask = STEP_ONLY,
) -> Difference:
    """Return the differences of `other` from `own`. `run`: the whole run that both are for."""
    a, b = own.estimate, other.estimate
    runs = [run_of(p.estimate, r, run) for r, p in ((request, own), (other_request, other))]
    clusters = (request.cluster, other_request.cluster)
    hourly = [None if c.price is None else c.price.usd_per_device_hour * c.paid_devices for c in clusters]
    return Difference(
        decisions=decisions_between(request, own.config, other_request, other.config),
        step_s=Pair(a.step_time_s.mid, b.step_time_s.mid),
        time_s=_by_term(a.breakdown, b.breakdown),
        memory_bytes=_by_term(fullest(a).memory, fullest(b).memory),
        peak_bytes=Pair(a.peak_memory_bytes.mid, b.peak_memory_bytes.mid),
        tokens_per_s=Pair(a.tokens_per_s, b.tokens_per_s),
        mfu=Pair(a.mfu, b.mfu),
        num_devices=Pair(*(float(c.num_devices) for c in clusters)),
        usd_per_hour=Pair(*hourly),
        days=Pair(*(None if r is None else r.days.mid for r in runs)),
        usd=Pair(*(None if r is None or r.usd is None else r.usd.mid for r in runs)),
    )


def fullest(estimate: Estimate) -> StageEstimate:
    """Return the stage with the most memory."""
    return max(estimate.stages, key=lambda s: s.memory_bytes.mid)


def _by_term(own: Mapping[str, Quantity], other: Mapping[str, Quantity]) -> dict[str, float]:
    """Return the differences of all terms, the largest first."""
    found = {name: _mid(other, name) - _mid(own, name) for name in dict.fromkeys((*own, *other))}
    return dict(sorted(found.items(), key=lambda kv: -abs(kv[1])))


def _mid(terms: Mapping[str, Quantity], name: str) -> float:
    return terms[name].mid if name in terms else 0.0


def decisions_between(
    request: PlanRequest, own: ParallelConfig, other_request: PlanRequest, other: ParallelConfig
) -> dict[str, tuple[Any, Any]]:
    """Return the choices of two plans that differ, by name."""
    ours, theirs = (decided(r, c) for r, c in ((request, own), (other_request, other)))
    return {name: (ours[name], theirs[name]) for name in ours if ours[name] != theirs.get(name)}


def decided(request: PlanRequest, config: ParallelConfig) -> dict[str, Any]:
    """Return the decisions of a plan by name, each in its shortest form.

    Recompute that is the same in all layers is the word for it, as is a method of context parallelism that all blocks
    share; stages with as many layers each are None.
    """
    data = config_data(config)
    out = {c.name: data[c.name] for c in CHOICES if c.name in data and c.name not in _FOLLOW}
    out["recompute"] = _recompute(config, len(layer_calls(request.graph)))
    out["stages"] = _uneven(config.stages)
    out["etp"] = out["etp"] if config.spreads_experts else None
    out["context_method"] = None if config.context_method is None else methods_text(config.context_method)
    return {name: tuple(value) if isinstance(value, list) else value for name, value in out.items()}


def _recompute(config: ParallelConfig, layers: int) -> str:
    how = config.recompute
    if isinstance(how, tuple):
        if not any(how):
            return NONE
        if config.stages is not None and how == config.stages:
            return FULL
    return recompute_label(how, layers)


def _uneven(stages: Iterable[int] | None) -> tuple[int, ...] | None:
    """Return the layers of stages if they are not the same."""
    counts = tuple(stages or ())
    return counts if len(set(counts)) > 1 else None
