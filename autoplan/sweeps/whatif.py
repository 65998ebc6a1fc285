"""What-if: the best plan at every point of a sweep over hardware and task, and the cost of a whole run with it.

    whatif("llama-3.1-8b", "8x8xh100-sxm5-80gb", 8192, 1024, vary={"nodes": [8, 16, 32], "nic": [100, 400]})

Every point is planned by itself: the best plan for 100 Gbit/s is not the best for 1600. A row says how its search ended
and how far its plan may be from the best. Ctrl-C ends a sweep after the current point, whose row says so.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from autoplan.catalog import active_params
from autoplan.config.adapters import Adapters, read_adapters
from autoplan.config.choice import Written
from autoplan.config.choices import CHOICES, PINS, options_of, read_mode
from autoplan.config.keys import check_names
from autoplan.config.numbers import Range, scaled, without_numpy
from autoplan.config.parallel import Mode, RunOptions
from autoplan.config.planning import SearchWords, check_search_words
from autoplan.config.precision import precision_of
from autoplan.config.settings import TASK_SETTINGS
from autoplan.cost_models.constants import Constants
from autoplan.cost_models.hardware.cluster import OVERRIDES, Cluster
from autoplan.cost_models.profile import Profile
from autoplan.cost_models.time.estimate import Estimate
from autoplan.cost_models.whole_run import (
    CRITICAL_BATCH_SOURCE,
    Assumptions,
    Goodput,
    Run,
    critical_batch_tokens,
    whole_run,
)
from autoplan.errors import AutoplanError, InfeasibleError, PinError
from autoplan.ir.graph import ModelGraph
from autoplan.program.adapters import with_adapters
from autoplan.program.legality import not_executed
from autoplan.search.certificate import how_searched
from autoplan.search.planner import Certificate, Planned, PlanRequest, StoppedError, search_plan
from autoplan.search.stack_settings import settings_taken
from autoplan.sweeps.label import evidence_label, plan_label
from autoplan.units import dtype_bytes

if TYPE_CHECKING:
    import pandas as pd

# The names that can be varied, with descriptions. Pins of the search (tp, zero_stage, ...) can be varied too.
TASK = {
    "device": "catalog id of the device, in the same nodes with what was given for them",
    "cluster": "a whole cluster",
    **{record.name: record.varied for record in TASK_SETTINGS if record.varied},
}
VARIED: dict[str, str] = {**{n: o.what for n, o in OVERRIDES.items()}, **TASK, **{name: "pinned" for name in PINS}}
INTERRUPTED = "interrupted"  # the status of a search that Ctrl-C ended, and of a point left without a plan
_MOST_TOKENS = 1e30
_MOST_POINTS = 10_000  # of one sweep; each takes a search of at least a tenth of a second
# Types of values: words, lists of numbers, whole numbers; all others are numbers.
_RECORDS = (*(record for record in TASK_SETTINGS if record.varied), *CHOICES)
TEXTS = ("device", "cluster", *(c.name for c in _RECORDS if c.written is Written.WORD))
LISTS = tuple(c.name for c in CHOICES if c.written is Written.LIST)
WHOLE_NUMBERS = (
    *(name for name, override in OVERRIDES.items() if override.legal.whole),
    *(c.name for c in _RECORDS if c.written is Written.COUNT),
)
# The legal range of each number. The search checks pins further.
RANGES: dict[str, Range] = {
    **{c.name: Range(c.least, c.most, whole=True) for c in _RECORDS if c.written is Written.COUNT},
    **{name: override.legal for name, override in OVERRIDES.items()},
}


# Terms of a step during which a device computes. In the rest it waits, and draws less power.
_BUSY = ("compute", "recompute", "accumulate", "optimizer")


@dataclass(frozen=True)
class RunTask:
    """A whole run to price besides the step: its tokens (None: only the step) and the assumptions about it."""

    tokens: float | None = None
    assumptions: Assumptions = field(default_factory=Assumptions)


STEP_ONLY = RunTask()


def run_of(estimate: Estimate, request: PlanRequest, run: RunTask) -> Run | None:
    """Return the whole run of one plan; None without tokens."""
    if run.tokens is None:
        return None
    busy = sum(q.mid for name, q in estimate.breakdown.items() if name in _BUSY)
    return whole_run(
        estimate.step_time_s,
        estimate.tokens_per_step,
        run.tokens,
        request.cluster,
        state_bytes=checkpoint_bytes(request.graph, request.precision),
        busy=min(1.0, busy / estimate.step_time_s.mid),
        assumptions=run.assumptions,
    )


def checkpoint_bytes(graph: ModelGraph, precision: str) -> float:
    """Return the bytes of a checkpoint: parameters and AdamW's state, each once, over all ranks together."""
    p = precision_of(precision)
    out = 0.0
    for param in graph.params.values():
        width = dtype_bytes(param.dtype if p.compute is None or graph.autocast else p.compute)
        state = (2 * width if p.state_bytes is None else p.state_bytes) if param.trainable else 0
        out += param.num_elements * (width + state)
    return out


def batch_warning(request: PlanRequest, tokens: float | None) -> str | None:
    """Return a warning if the global batch is beyond the critical batch at the end of so many tokens; else None.

    None also for sparse models, for which no law is known here.
    """
    critical = critical_batch(request.graph, tokens)
    batch = request.seq_len * request.global_batch_size
    if critical is None or tokens is None or batch <= critical:
        return None
    return (
        f"a batch of {scaled(batch)} tokens is beyond the critical batch of about {scaled(critical)} after "
        f"{scaled(tokens)} tokens ({CRITICAL_BATCH_SOURCE}; order of magnitude): it needs more tokens for the same loss"
    )


def critical_batch(graph: ModelGraph, tokens: float | None) -> float | None:
    """Return the critical batch in tokens per step (`whole_run.critical_batch_tokens`).

    None without tokens, and for mixtures of experts.
    """
    if tokens is None or active_params(graph) != graph.num_params:
        return None
    return critical_batch_tokens(graph.num_params, tokens)


@dataclass(frozen=True)
class Point:
    """One point of a what-if: the varied values, and the best plan or the reason why there is none.

    Attributes:
        request: what the plan answers; that of the point, but for `settings`.
        status: "ok", "does not fit", "illegal", without a plan yet: "stopped" (by time), "interrupted" (by Ctrl-C).
        settings: options of the stack with which the plan runs, otherwise than asked (`SearchResult.request`).
    """

    varied: Mapping[str, object]
    request: PlanRequest | None
    planned: Planned | None
    status: str
    reason: str = ""
    certificate: Certificate | None = None
    settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The plan in one line, with the settings that it has otherwise than asked; empty without a plan."""
        if self.planned is None:
            return ""
        plan = plan_label(self.planned.config, self.planned.estimate)
        return " ".join([plan, *(f"{name}={value}" for name, value in self.settings.items())])

    def run(self, run: RunTask) -> Run | None:
        """Return the whole run with this plan; None without a plan, or without tokens."""
        if self.planned is None or self.request is None:
            return None
        return run_of(self.planned.estimate, self.request, run)

    @property
    def interrupted(self) -> bool:
        """True if Ctrl-C ended the sweep here."""
        return self.status == INTERRUPTED or (self.certificate is not None and self.certificate.status == INTERRUPTED)


def check_varied(vary: Mapping[str, Sequence[object]]) -> None:
    """Raise PinError for an unknown name, a name without values, a number outside of RANGES, or too many points."""
    for name, values in vary.items():
        check_names((name,), VARIED, "vary", "name")
        if isinstance(values, str) or not isinstance(values, Sequence) or not values:
            raise PinError(f"vary {name}={values!r}: give a list of at least one value")
        for value in values:
            within = RANGES.get(name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if within is not None and number and value > within.most:  # type: ignore[operator]
                raise PinError(f"vary {name}: {value!r} must be {within}; nearest that works: {int(within.most)}")
    check_points({name: len(values) for name, values in vary.items()})


def check_points(counts: Mapping[str, int], what: str = "vary") -> None:
    """Raise PinError if lists of these lengths have more combinations than one sweep may have points."""
    total = math.prod(counts.values())
    if total <= _MOST_POINTS:
        return
    longest = max(counts, key=lambda name: counts[name])
    left = _MOST_POINTS * counts[longest] // total
    product = " x ".join(f"{name} {count:,}" for name, count in counts.items() if count > 1)
    near = f"; nearest that works: {left:,} values of {longest}" if left else ""
    raise PinError(f"{what}: {product} = {total:,} points, and one sweep has at most {_MOST_POINTS:,}{near}")


def check_sweep(seq_len: object, global_batch_size: object) -> None:
    """Raise PinError unless both are whole numbers in the range of a task."""
    for name, value in (("seq_len", seq_len), ("global_batch_size", global_batch_size)):
        RANGES[name].check(value, name)


def check_tokens(tokens: object) -> None:
    """Raise PinError unless `tokens` is a number of tokens or None."""
    if tokens is None:
        return
    number = isinstance(tokens, int | float) and not isinstance(tokens, bool) and math.isfinite(tokens)
    if not number or not 0 < tokens <= _MOST_TOKENS:  # type: ignore[operator]
        raise PinError(f"tokens={tokens!r} must be a number above 0 and at most {_MOST_TOKENS:g}")


def read_constants(given: Constants | Path | str | None) -> tuple[Constants, str | None]:
    """Return the constants and the file that they were read from (None if there is no file).

    None stands for the constants of this version.

    Raises: ProfileError for a file that cannot be read.
    """
    if given is None or isinstance(given, Constants):
        return Constants.shipped() if given is None else given, None
    return Constants.load(given), str(given)


def _at(base: PlanRequest, varied: Mapping[str, Any]) -> PlanRequest:
    """Return the request at one point of a sweep."""
    cluster = base.cluster
    if "cluster" in varied:
        cluster = Cluster.of(varied["cluster"])
    if "device" in varied:
        cluster = cluster.with_device(str(varied["device"]))
    overrides = {name: varied[name] for name in OVERRIDES if name in varied}
    if overrides:
        cluster = cluster.with_(**overrides)
    _ = cluster.levels  # PinError where it has no network
    if base.profile is not None:
        _check_profile(base.profile, base.cluster, cluster)
    mode = read_mode(varied.get("mode", base.mode))
    like = base.facts.like and base.facts.like.but(**{n: varied.get(n) for n in ("mode", "precision")})
    seq_len, batch = (varied.get(name, getattr(base, name)) for name in ("seq_len", "global_batch_size"))
    check_sweep(seq_len, batch)
    return replace(
        base,
        cluster=cluster,
        seq_len=seq_len,
        global_batch_size=batch,
        precision=varied.get("precision", base.precision),
        mode=mode,
        pins={**base.pins, **{name: varied[name] for name in PINS if name in varied}},
        top=1,
        like=like,
    )


def _reached(cluster: Cluster, reach: int) -> tuple[tuple[object, ...], ...] | None:
    """Return the figures of the levels that a group crosses whose last rank is `reach` ranks after its first.

    None if no cluster level reaches that far.
    """
    out: list[tuple[object, ...]] = []
    for level in cluster.levels:
        out.append((level.name, level.latency_s, level.bytes_per_s, level.p2p_bytes_per_s))
        if reach < level.size:
            return tuple(out)
    return None


def _check_profile(profile: Profile, base: Cluster, cluster: Cluster) -> None:
    """Raise PinError if the profile of `base` does not apply to `cluster`: its device or its links are different."""
    figures = [replace(c.device, memory_bytes=1) for c in (base, cluster)]
    if figures[0] != figures[1] or base.device_type != cluster.device_type:
        raise PinError(
            f"profile {profile.name} was measured on {base.device.name} and its times would not change with the "
            f"device of this point, {cluster.device.name}; leave out the profile, or do not vary the device"
        )
    try:
        before = base.with_(nodes=cluster.num_nodes)
        _ = before.levels
    except PinError:
        return  # no network there to have been measured
    for reach in sorted({(link.group_size - 1) * link.stride for link in profile.links}):
        old, new = _reached(before, reach), _reached(cluster, reach)
        if old is not None and new is not None and old != new:
            raise PinError(
                f"profile {profile.name} has collectives measured on {base}, whose times would not change with the "
                "links of this point; leave out the profile, or do not vary its links"
            )


def _listed(values: Sequence[object]) -> str:
    return ", ".join(str(getattr(value, "value", value)) for value in values)


def points(
    base: PlanRequest,
    vary: Mapping[str, Sequence[object]],
    search: Callable[[PlanRequest], Any] = search_plan,
) -> Iterator[Point]:
    """Yield the best plan at every point of the product of `vary`, in its order.

    Ctrl-C during a search ends the sweep with the current point (`Point.interrupted`).

    Args:
        search: Plans one request, as `autoplan.search.planner.search_plan` does.

    Raises: PinError for names and values that cannot be varied, and for a name that is pinned as well.
    """
    vary = {name: without_numpy(values) for name, values in vary.items()}
    check_varied(vary)
    for name in vary.keys() & base.pins.keys():
        raise PinError(f"{name} is pinned to {base.pins[name]} and varied over {_listed(vary[name])}: leave out one")
    known: dict[object, Point] = {}
    for values in itertools.product(*vary.values()):
        varied = dict(zip(vary, values, strict=True))
        try:
            request = _at(base, varied)
        except AutoplanError as error:
            yield Point(varied, None, None, "illegal", str(error))
            continue
        # the price changes no plan
        key = (
            replace(request.cluster, price=None),
            request.seq_len,
            request.global_batch_size,
            request.precision,
            request.mode,
            request.options,
            request.like,
            request.constants,
            tuple((name, str(value)) for name, value in request.pins.items()),
        )
        if key not in known:
            known[key] = point_of(request, search)
        answered = known[key].request or request
        yield replace(known[key], varied=varied, request=replace(answered, cluster=request.cluster))
        if known[key].interrupted:
            return


def point_of(request: PlanRequest, search: Callable[[PlanRequest], Any]) -> Point:
    """Return the best plan of a request, or why there is none; Ctrl-C and errors are states of the point."""
    try:
        result = search(request)
        taken = settings_taken(request, result.request)
        return Point({}, result.request, result.plans[0], "ok", "", result.certificate, taken)
    except KeyboardInterrupt:
        return Point({}, request, None, INTERRUPTED, "interrupted before a plan was found")
    except StoppedError as error:
        return Point({}, request, None, "stopped", str(error))
    except InfeasibleError as error:
        return Point({}, request, None, "does not fit", str(error))
    except AutoplanError as error:
        return Point({}, request, None, "illegal", str(error))


def row(point: Point, run: RunTask = STEP_ONLY) -> dict[str, object]:
    """Return a point as one flat row, with None for unknown values and for points without a plan."""
    planned, request = point.planned, point.request
    estimate = planned.estimate if planned is not None else None
    out: dict[str, object] = {name: getattr(value, "value", value) for name, value in point.varied.items()}
    out |= {"status": point.status, "reason": point.reason}
    out |= how_searched(point.certificate)
    out["num_devices"] = request.cluster.num_devices if request is not None else None
    out |= dict.fromkeys(_ESTIMATED) if estimate is None else _estimate_columns(estimate)
    if run.tokens is not None:
        out |= _run_columns(point.run(run))
    out["plan"] = point.label or None
    out["evidence"] = evidence_label(estimate) if estimate is not None else None
    priced = None if planned is None or request is None else not_executed(planned.config, request.facts)
    out["priced_not_executed"] = None if priced is None else "; ".join(priced)
    if run.tokens is not None:
        out["notes"] = "; ".join(notes(point, run))
    return out


_RATES = ("tokens_per_s", "tokens_per_s_per_device", "mfu", "mfu_causal")
_MEMORY = ("peak_memory_bytes", "memory_margin_bytes")
_ESTIMATED = ("step_time_s", "step_time_low_s", "step_time_high_s", *_RATES, *_MEMORY)


def _estimate_columns(estimate: Estimate) -> dict[str, object]:
    """Return the columns of _ESTIMATED."""
    step, peak = estimate.step_time_s, estimate.peak_memory_bytes.mid
    rates = (getattr(estimate, name) for name in _RATES)
    values = (step.mid, step.low, step.high, *rates, peak, estimate.memory_capacity_bytes - peak)
    return dict(zip(_ESTIMATED, values, strict=True))


def columns(varied: Iterable[str], run: RunTask = STEP_ONLY) -> list[str]:
    """Return the names of the columns of every `row` of a sweep."""
    return list(row(Point(dict.fromkeys(varied), None, None, ""), run))


_OF_RUN = ("days", "usd", "kwh", "goodput", "days_with_failures", "usd_with_failures", "kwh_with_failures")


def _run_columns(run: Run | None) -> dict[str, object]:
    good = run.goodput if run is not None else None
    out: dict[str, object] = {}
    for name in _OF_RUN:
        found = getattr(run, name, None)
        quantity = found.share if isinstance(found, Goodput) else found
        for end, column in (("mid", name), ("low", f"{name}_low"), ("high", f"{name}_high")):
            out[column] = getattr(quantity, end, None)
    out["usd_energy"] = run.usd_energy.mid if run is not None and run.usd_energy is not None else None
    out["checkpoint_interval_s"] = good.interval_s.mid if good is not None else None
    return out


def notes(point: Point, run: RunTask) -> list[str]:
    """Return the unknowns of a planned point's run, and the warning about its batch if there is one."""
    if point.planned is None or point.request is None:
        return []
    whole, warning = run_of(point.planned.estimate, point.request, run), batch_warning(point.request, run.tokens)
    return [*(whole.notes if whole is not None else ()), *([warning] if warning is not None else [])]


def whatif(
    model: ModelGraph | Path | str,
    cluster: Cluster | Path | str,
    seq_len: int,
    global_batch_size: int,
    *,
    vary: Mapping[str, Sequence[object]],
    tokens: float | None = None,
    pins: Mapping[str, Any] | None = None,
    precision: str = "bf16",
    mode: Mode | str = Mode.EAGER,
    profile: Profile | Path | str | None = None,
    options: RunOptions | Mapping[str, Any] | None = None,
    constants: Constants | Path | str | None = None,
    assumptions: Mapping[str, float] | None = None,
    target_len: int | None = None,
    like: str | None = None,
    adapters: Adapters | str | None = None,
    runnable: bool = False,
    **search: Unpack[SearchWords],
) -> pd.DataFrame:
    """Return the best plan at every point of a sweep, one row per point; a point without a plan states the reason.

    Args:
        model: A name of the catalog, a path of a Hugging Face config.json, `package.module:factory`, or a graph.
        cluster: A text for `Cluster.parse`, or a Cluster.
        vary: Lists of values by name (keys of `VARIED`). Rows are their product; the last name varies fastest.
        tokens: Adds days, US dollars (if the cluster has a price), kWh and goodput for so many tokens.
        profile: Measured times, or their name or path.
        options: How the run is set up, for example `RunOptions(launch=Launch.GRAPHS)` or `{"launch": "graphs"}`; None:
            the defaults.
        constants: Constants of the cost model, or a file of `autoplan calibrate`; None: the constants of this version.
        assumptions: Assumptions of the whole run, by the names of `cost_models.whole_run.FIGURES`.
        target_len: Tokens per target sequence of an encoder-decoder; None: as seq_len.
        like: The stack that will run the plan, `megatron-bridge@26.08`; other arguments override it where they differ
            from their defaults.
        adapters: Low-rank products that are trained beside frozen weights, `lora:16` (`autoplan.config.adapters`).
        runnable: True: only plans that autoplan's own runtime can execute.
        **search: Settings of the search of every point: time_limit_s, memory_risk, equal_within, gap, cache
            (`autoplan.config.planning.SearchSettings`).

    Returns: Columns: the varied names; status, reason, search_status (`complete`, or why the search stopped), gap (as
        `planner.Certificate` defines it), num_devices, step_time_s (and low, high), tokens_per_s,
        tokens_per_s_per_device, mfu (attention counted in full), mfu_causal (attention under a causal mask),
        peak_memory_bytes, memory_margin_bytes; with `tokens` also days, usd, kwh (without failures), goodput,
        days_with_failures, usd_with_failures, kwh_with_failures (each also with _low, _high), usd_energy,
        checkpoint_interval_s; plan, evidence, priced_not_executed; with `tokens` also notes. After Ctrl-C: the rows so
        far; the last has `interrupted` as its search_status, or as its status if it has no plan.

    Raises: AutoplanError for an unknown model, cluster or name.

    Example:
        >>> import autoplan
        >>> table = autoplan.whatif("gpt2", "1x2xh100", 1024, 16, vary={"nic": [100, 400]}, pins={"tp": 1, "pp": 1})
        >>> list(table["nic"]), list(table["status"])
        ([100, 400], ['ok', 'ok'])
    """
    import pandas as pd

    from autoplan.catalog import load_model

    check_search_words(search, "whatif")
    tokens = without_numpy(tokens)
    check_tokens(tokens)
    run = RunTask(tokens, Assumptions.of(assumptions))
    known, file = read_constants(constants)
    beside = read_adapters(adapters) if isinstance(adapters, str) else adapters
    graph = model if isinstance(model, ModelGraph) else load_model(model)
    base = PlanRequest(
        graph if beside is None else with_adapters(graph, beside),
        Cluster.of(cluster),
        seq_len,
        global_batch_size,
        dict(pins or {}),
        precision,
        read_mode(mode),
        Profile.of(profile),
        options_of(options),
        known,
        file,
        target_len=target_len,
        executed=runnable,
        like=like,
        adapters=None if beside is None else str(beside),
        **search,
    )
    return pd.DataFrame([row(p, run) for p in points(base, vary)])
