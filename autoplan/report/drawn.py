"""Figures of a report that a JSON answer does not hold: mesh, events, other plans, sensitivity, exports, sources."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from autoplan.catalog import Usual
from autoplan.config import numbers
from autoplan.config.parallel import ParallelConfig
from autoplan.config.recompute import FULL, NONE
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.cost_models.hardware.parts import NETWORKS, Level
from autoplan.errors import AutoplanError
from autoplan.exporters.targets import TARGETS
from autoplan.program.facts import layer_calls
from autoplan.program.parallel_dims import parallel_dims
from autoplan.report.commands import estimate_command, explain_words, whatif_command
from autoplan.report.data import assumptions, run_data
from autoplan.report.degrees import checked_config
from autoplan.report.exports import export_plan
from autoplan.report.screen import Answer, verdict, words_of_plan
from autoplan.report.task_text import batch_text, settings_text
from autoplan.report.text import TERMS, cluster_line, notes_of, title, varied_text
from autoplan.report.words import value_text
from autoplan.search.planner import Planned, PlanRequest, SearchResult, estimate_config
from autoplan.sweeps.label import evidence_label, plan_label
from autoplan.sweeps.whatif import STEP_ONLY, RunTask, run_of
from autoplan.units import GB

_MOST_EQUALS = 12  # equally fast plans that are priced for the scatter
_COMPARED = ("dp", "tp", "pp", "cp", "ep", "micro_batch_size", "zero_stage", "schedule", "virtual_stages")  # with pins
_ROUNDING = 1e-9
_OFF = 0.2  # by which a figure is wrong in the tornado


def drawn_plan(a: Answer, usual: Usual | None = None) -> dict[str, Any]:
    """Return the data that the report of a plan draws. `usual`: the model's usual run, if the tokens are from it."""
    out = drawn_of(a.request, a.best, a.result)
    run = run_of(a.best.estimate, a.request, a.run)
    given = STEP_ONLY if a.usual_tokens else a.run
    commands = {
        "Price this plan": estimate_command(a.model, a.cluster, a.request, a.best.config, given),
        "Why this plan": explain_words(a.model, a.cluster, a.request, given),
        "More devices": whatif_command(a.model, a.cluster, a.request, varied_text(a.request), given),
    }
    out |= {
        "verdict": f"Fits: {verdict(a.result.certificate, a.result)}.",
        "notes": notes_of(a.best.estimate, a.request, a.run),
        "commands": [[name, shlex.join(words)] for name, words in commands.items()],
        "gains": [gain_data(g) for g in a.gains],
        "tornado": list(_tornado(a.request, a.best, a.run)),
        "usual_run": None if run is None or not a.usual_tokens else run_data(run, a.request, a.run.assumptions),
        "exports": list(_exports(a.request, a.best.config)),
        "sources": list(sources(a.request, a.run, usual if a.usual or a.usual_tokens else None)),
    }
    return out


def drawn_estimate(request: PlanRequest, planned: Planned, run: RunTask) -> dict[str, Any]:
    """Return the data that the report of one configuration draws."""
    e = planned.estimate
    return {
        **drawn_of(request, planned),
        "verdict": "Fits." if e.fits else f"Does not fit: {e.missing()}.",
        "notes": notes_of(e, request, run),
        "tornado": list(_tornado(request, planned, run)),
        "exports": list(_exports(request, planned.config)),
        "sources": list(sources(request, run, None)),
    }


def request_text(request: PlanRequest) -> str:
    """Return the model, the cluster and the batch of a request in one line."""
    return f"{title(request)}; {cluster_line(request.cluster)}; {batch_text(request)}, {settings_text(request)}"


def drawn_of(request: PlanRequest, planned: Planned, result: SearchResult | None = None) -> dict[str, Any]:
    """Return the data to draw of any planned configuration: head, mesh, events, and other plans of its search."""
    layers = len(layer_calls(request.graph))
    return {
        "task": request_text(request),
        "evidence": evidence_label(planned.estimate),
        "terms": {"compute": "computing", **TERMS},
        "label": plan_label(planned.config, planned.estimate),
        "words": words_of_plan(planned.config, layers),
        "mesh": mesh_data(request, planned.config),
        "events": events_data(planned),
        "candidates": [] if result is None else candidates_data(request, result),
    }


def events_data(planned: Planned) -> list[list[Any]]:
    """Return the actions of the pipeline: rank, chunk, micro-batch, action, start and end in seconds."""
    return [[e.rank, e.chunk, e.micro_batch, e.kind.name, e.start_s, e.end_s] for e in planned.estimate.events]


def mesh_data(request: PlanRequest, config: ParallelConfig) -> dict[str, Any]:
    """Return the axes of the mesh, major to minor, and its groups with the links that each uses."""
    mesh, cluster = parallel_dims(request.graph, config).mesh, request.cluster
    strides, stride = {}, 1
    for axis in reversed(mesh.axes):
        strides[axis.name] = stride
        stride *= axis.size
    sizes = {axis.name: axis.size for axis in mesh.axes}
    members = {axis.name: (axis.name,) for axis in mesh.axes} | dict(mesh.groups)
    groups = []
    for name, axes in members.items():
        size = math.prod(sizes[a] for a in axes)
        if size > 1:
            used = [a for a in axes if sizes[a] > 1]
            reach = max(strides[a] * sizes[a] for a in used)
            near = min(strides[a] for a in used)
            groups.append(
                {"name": name, "size": size, "stride": near, "reach": reach, "link": link_text(cluster, reach)}
            )
    return {
        "axes": [{"name": a.name, "size": a.size} for a in mesh.axes],
        "groups": groups,
        "num_devices": cluster.num_devices,
        "devices_per_node": cluster.devices_per_node,
    }


def link_text(cluster: Cluster, reach: int) -> str:
    """Return the slowest link of a group that lies within `reach` consecutive devices."""
    level = next((lv for lv in cluster.levels if lv.size == 0 or lv.size >= reach), cluster.levels[-1])
    return f"{level.name}, {_speed(level)}"


def _speed(level: Level) -> str:
    """Return the bandwidth of a link, in the unit of its kind."""
    if level.name in NETWORKS:
        return f"{level.bytes_per_s * 8 / GB:g} Gbit/s per device"
    return f"{level.bytes_per_s / GB:g} GB/s per device and direction"


def candidates_data(request: PlanRequest, result: SearchResult) -> list[dict[str, Any]]:
    """Return the chosen plan, those found beside it, and single changes of it, each with why it was not taken."""
    best = result.plans[0]
    own = best.estimate.step_time_s.mid
    seen = [best.config]
    out = [_candidate(best, "best", "it is the plan")]
    pending = list(result.plans[1:])
    for config, _ in result.equals[:_MOST_EQUALS]:
        if config not in seen and all(config != p.config for p in pending):
            pending.append(estimate_config(request, config))
    for what, changed in _changed(request, best.config):
        if isinstance(changed, str):
            out.append(_illegal(what, changed))
        elif changed not in seen and all(changed != p.config for p in pending):
            try:
                pending.append(estimate_config(request, changed))
            except AutoplanError as error:
                out.append(_illegal(what, str(error)))
    out += [_lost(request, p, own, result.fastest_s) for p in pending]
    for c in out:
        if c["stages"] and sum(c["label"] == other["label"] for other in out) > 1:
            c["label"] += f" stages {c['stages']}"
    order = {"best": 0, "as fast": 1, "slower": 1, "pinned": 2, "too big": 3, "illegal": 4}
    return sorted(out, key=lambda c: (order[c["kind"]], c["step_s"] or 0.0))


def _lost(request: PlanRequest, planned: Planned, own_s: float, fastest_s: float) -> dict[str, Any]:
    """Return a plan that was not taken, with the reason; `own_s`: the step of the plan that was."""
    step = planned.estimate.step_time_s.mid
    than_own = _percent(step / own_s - 1)
    pins = {name: request.pins[name] for name in _COMPARED if request.pins.get(name) is not None}
    given = [f"{name}={value}" for name, value in pins.items() if getattr(planned.config, name) != value]
    if not planned.estimate.fits:
        return _candidate(planned, "too big", planned.estimate.missing())
    if given:
        return _candidate(planned, "pinned", f"{than_own}; not searched, since {', '.join(given)} was given")
    if step < fastest_s * (1 - _ROUNDING):
        return _candidate(planned, "as fast", f"{than_own}; the search did not come to it")
    if step <= fastest_s * (1 + request.equal_within):
        why = f"{than_own}, within the {request.equal_within:.0%} that count as equal; less simple"
        return _candidate(planned, "as fast", why)
    return _candidate(planned, "slower", than_own)


def _percent(share: float) -> str:
    return f"{100 * share:+.1f} % step time"


def _candidate(planned: Planned, kind: str, why: str) -> dict[str, Any]:
    e = planned.estimate
    return {
        "label": plan_label(planned.config, e),
        "stages": ",".join(map(str, planned.config.stages or ())),
        "kind": kind,
        "step_s": e.step_time_s.mid,
        "memory_bytes": e.peak_memory_bytes.mid,
        "why": why,
    }


def _illegal(what: str, why: str) -> dict[str, Any]:
    return {"label": what, "stages": "", "kind": "illegal", "step_s": None, "memory_bytes": None, "why": why}


def _changed(request: PlanRequest, config: ParallelConfig) -> Iterator[tuple[str, ParallelConfig | str]]:
    """Yield single changes of a plan, in words: a configuration, or why it is illegal."""
    given: dict[str, Any] = {
        **{n: getattr(config, n) for n in ("tp", "pp", "cp", "ep", "micro_batch_size", "zero_stage")},
        "recompute": _recompute_kind(config.recompute),
    }
    changes: list[dict[str, Any]] = []
    for name in ("tp", "pp", "micro_batch_size"):
        changes += [{name: value} for value in (getattr(config, name) // 2, 2 * getattr(config, name)) if value >= 1]
    changes += [{"zero_stage": stage} for stage in range(4) if stage != config.zero_stage]
    changes += [{"recompute": kind} for kind in (NONE, FULL)]
    for change in changes:
        what = ", ".join(f"{name}={value}" for name, value in change.items())
        try:
            yield what, checked_config(request, {**given, **change})
        except AutoplanError as error:
            yield what, str(error)


def _recompute_kind(recompute: str | Mapping[str, str] | tuple[int, ...]) -> str:
    """Return the kind for all layers that is nearest to a plan's recompute."""
    if isinstance(recompute, str):
        return recompute
    return FULL if isinstance(recompute, Mapping) or any(recompute) else NONE


def gain_data(gain: Any) -> dict[str, Any]:
    """Return a change of hardware or task with what it gains, in words."""
    return {"what": gain.what, "own": value_text(gain.own), "value": value_text(gain.value), "gain": gain.best_gain}


def _tornado(request: PlanRequest, planned: Planned, run: RunTask) -> Iterator[dict[str, Any]]:
    """Yield by how much the cost of the same tokens changes if a figure of the hardware is 20 % lower or higher."""
    step = planned.estimate.step_time_s
    yield {"what": "MFU", "low": 1 / (1 - _OFF) - 1, "high": 1 / (1 + _OFF) - 1}
    yield {"what": "price of a device hour", "low": -_OFF, "high": _OFF}
    for name, what, own in _figures_of(request.cluster):
        shares = []
        for factor in (1 - _OFF, 1 + _OFF):
            changed = request.cluster.with_(**{name: own * factor})  # type: ignore[arg-type]
            try:
                priced = estimate_config(replace(request, like=None, cluster=changed), planned.config)
            except AutoplanError:  # the fabric of the cluster fixes it
                break
            shares.append(priced.estimate.step_time_s.mid / step.mid - 1)
        if len(shares) == 2:
            yield {"what": what, "low": shares[0], "high": shares[1]}
    whole = run_of(planned.estimate, request, run)
    if whole is not None and whole.days_with_failures is not None:
        shares = []
        mtbf = run.assumptions.value("mtbf_device_days").mid
        for factor in (1 - _OFF, 1 + _OFF):
            given = replace(run.assumptions, given={**run.assumptions.given, "mtbf_device_days": mtbf * factor})
            other = run_of(planned.estimate, request, replace(run, assumptions=given))
            if other is not None and other.days_with_failures is not None:
                shares.append(other.days_with_failures.mid / whole.days_with_failures.mid - 1)
        if len(shares) == 2:
            yield {"what": "days between failures of a device", "low": shares[0], "high": shares[1]}


def _figures_of(cluster: Cluster) -> Iterator[tuple[str, str, float]]:
    networks = [level for level in cluster.levels if level.name in NETWORKS]
    if cluster.fabric is None and networks:
        yield "nic", "network between nodes", networks[0].bytes_per_s * 8 / GB
    if cluster.fabric is None and cluster.domain_size > 1:
        yield "scaleup", "links inside a domain", cluster.levels[0].bytes_per_s / GB
    yield "memory_gb_s", "bandwidth of the memory", cluster.device.memory_bytes_per_s / GB


def _exports(request: PlanRequest, config: ParallelConfig) -> Iterator[dict[str, Any]]:
    """Yield the plan as the input of every other framework, or why the framework cannot say it."""
    for name in TARGETS:
        try:
            found = export_plan(request, name, config=config)
        except AutoplanError as error:
            yield {"target": name, "refused": str(error)}
            continue
        yield {
            "target": found.target,
            "version": found.version,
            "file": found.file,
            "text": found.text,
            "launch": [f"run it: {line}" for line in found.launch],
            "not_said": [f"not said: {line}" for line in (*found.elsewhere, *found.not_said)],
        }


def sources(request: PlanRequest, run: RunTask, usual: Usual | None) -> Iterator[dict[str, str]]:
    """Yield every figure that is not exact, with its value, source and date."""
    yield from hardware_sources([request.cluster])
    if request.profile is not None:
        yield _source("times of operations", request.profile.name, "measured profile")
    if usual is not None:
        text = f"{usual.global_batch_size:,} x {usual.seq_len:,} tokens"
        text += "" if usual.tokens is None else f", {numbers.scaled(usual.tokens)} in all"
        yield _source("usual run of the model", text, usual.source)
    yield from run_sources(run)


def run_sources(run: RunTask) -> Iterator[dict[str, str]]:
    """Yield the assumptions about a whole run; nothing without one."""
    if run.tokens is not None:
        for name, figure in run_figures(run).items():
            yield _source(f"{name}: {figure['what']}", figure["value"], figure["source"])


def hardware_sources(clusters: Sequence[Cluster]) -> list[dict[str, str]]:
    """Return the figures of devices, links and prices of these clusters, each once."""
    several = len({cluster.device.name for cluster in clusters}) > 1
    found = [source for cluster in clusters for source in _hardware(cluster, several)]
    return list({(s["what"], s["value"], s["source"]): s for s in found}.values())


def _hardware(cluster: Cluster, several: bool) -> Iterator[dict[str, str]]:
    """Yield the figures of one cluster. `several`: other kinds of devices are beside it, so links name theirs."""
    device = cluster.device
    of = f"{device.name}, " if several else ""
    yield _source(f"{device.name}, memory", numbers.gigabytes(device.memory_bytes), device.source)
    yield _source(
        f"{device.name}, bandwidth of the memory", f"{device.memory_bytes_per_s / GB:,.0f} GB/s", device.source
    )
    peaks = [f"{name} {flops / 1e12:,.0f}" for name, flops in device.peak_flops_by_dtype.items() if flops]
    yield _source(f"{device.name}, dense TFLOP/s", ", ".join(peaks), device.source)
    for level in cluster.levels:
        yield _source(f"{of}link {level.name}", _speed(level), level.source)
    if cluster.price is not None:
        dated = f"{cluster.price.source}; {cluster.price.dated}"
        yield _source(f"{of}price of a device and hour", f"${cluster.price.usd_per_device_hour:g}", dated)


def _source(what: str, value: str, source: str) -> dict[str, str]:
    return {"what": what, "value": value, "source": source}


def run_figures(run: RunTask) -> Mapping[str, Mapping[str, str]]:
    """Return the assumptions about a whole run, in words."""
    out = {}
    for name, figure in assumptions(run.assumptions).items():
        q = figure["value"]
        value = "as the source says" if q is None else numbers.digits(q["mid"])
        if q is not None and q["high"] > q["low"]:
            value += f" ({numbers.digits(q['low'])} to {numbers.digits(q['high'])})"
        out[name] = {"what": figure["what"], "value": value, "source": figure["source"]}
    return out
