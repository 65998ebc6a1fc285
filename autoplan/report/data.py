"""Reports as JSON: plain data, versioned.

Units are seconds, bytes and tokens per second. Every quantity is `{"low", "mid", "high", "evidence"}`; evidence is one
of exact, measured, fitted, assumed.

Schema 1:

    {"schema": 1, "status": "ok", "command": "plan" | "estimate",
     "model": {"name", "num_params", "num_layers", "left_out": [str]},  # left_out: parts without a price
     "cluster": {"name", "num_nodes", "devices_per_node", "num_devices", "device", "memory_bytes", "levels": [...],
                 "price": null | {"usd_per_device_hour", "source", "as_of"}},
     "request": {"seq_len", ["target_len",] "global_batch_size", "pins", "precision", "mode",
                 option of RunOptions: value, ..., "profile", "constants": null | file,
                 "imbalance": null | {"value", "what", "source"}},  # of routing, of models with experts
     "priced_not_executed": [str],      # parts of the plan with a price that autoplan's own runtime does not execute
     "plan": {field of ParallelConfig: value, ..., "offload": [str],
              "recompute": str | {call: str} | [layers per stage], "stages": [layers per stage],
              "context_method": null | str | {block: str}},
              # with virtual stages: layers per chunk, in model order; the schedule says which chunks a rank holds
     "estimate": {"step_time_s", "tokens_per_s", "tokens_per_s_per_device", "mfu", "mfu_causal", "fits",
                  # mfu counts attention in full (as PaLM, NeMo), mfu_causal half of it (as Megatron Bridge)
                  "memory_capacity_bytes", "memory_bytes": [{term: quantity} per stage],
                  "stages": [{"num_layers", "num_recomputed", "in_flight", "forward_s", "backward_s",
                              "fullest", "memory_bytes": quantity}],  # fullest: the moment of memory_bytes
                  "host_memory_capacity_bytes": null | number, "host_memory_bytes": [{term: quantity} per stage],
                  "breakdown_s": {term: quantity}, "run": null | run},
     "alternatives": [{"priced_not_executed", "plan", "estimate"}],                       # plan: the next best ones
     "certificate": {"considered", "illegal", "too_big", "bounded_out", "solved", "open", "gap", "intra_gap",
                     "solve_time_s", "restrictions", "status", "illegal_by_rule", "too_big_by_term", "by_phase_s"}}
                    # considered is the sum of the five; gaps are (found - bound) / found, intra_gap of the layouts

    run: {"tokens", "days", "usd": null | quantity, "kwh": null | quantity, "usd_energy": null | quantity,
          "days_with_failures", "usd_with_failures", "kwh_with_failures", "num_failures",    # null: not known
          "goodput": null | {"share", "mtbf_s", "checkpoint_s", "restart_s", "checkpoint_interval_s"},
          "critical_batch_tokens": null | number, "critical_batch_source", "notes": [str],
          "assumptions": {name: {"value": null | quantity, "given", "what", "source"}}}

    {"schema": 1, "status": "infeasible", "message", "stage", "term", "needed_bytes", "available_bytes", "config",
     "cheapest_change"}                                            # if nothing fits; null for unknown values

    {"schema": 1, "status": "ok" | "interrupted" | "infeasible" | "illegal" | "stopped", "command": "whatif",
     "model", "cluster", "request": as of plan, before anything is varied,
     "vary": {name: [values]}, "rows": [...]}  # not ok if no point has a plan; columns: autoplan.sweeps.whatif.whatif

    {"schema": 1, "status": as of whatif, "command": "capacity", "file", "pins",
     "options": {option of RunOptions: value}, "profile", "constants": null | file, "assumptions": as of run,
     "left_out": {model: [str]}, "rows": [...]}  # columns: autoplan.sweeps.capacity.capacity
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from autoplan.config.choices import config_data, option_data
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.cost_models.quantity import Quantity
from autoplan.cost_models.time.estimate import Estimate
from autoplan.cost_models.whole_run import CRITICAL_BATCH_SOURCE, FIGURES, Assumptions, Run
from autoplan.program.legality import not_executed
from autoplan.program.pins import layer_calls
from autoplan.report.arguments import imbalance_of
from autoplan.search.planner import Certificate, Planned, PlanRequest, SearchResult
from autoplan.sweeps.whatif import critical_batch, run_of

REPORT_SCHEMA_VERSION = 1


def to_text(data: Mapping[str, Any]) -> str:
    """Return JSON text. A number that JSON does not have is an error, never `NaN`."""
    return json.dumps(data, indent=1, allow_nan=False)


def quantity(q: Quantity) -> dict[str, Any]:
    """Return a quantity as plain data."""
    return {"low": q.low, "mid": q.mid, "high": q.high, "evidence": str(q.tag)}


def cluster(c: Cluster) -> dict[str, Any]:
    """Return a cluster as plain data."""
    return {
        "name": str(c),
        "num_nodes": c.num_nodes,
        "devices_per_node": c.devices_per_node,
        "num_devices": c.num_devices,
        "device": c.device.name,
        "memory_bytes": c.device.memory_bytes,
        "levels": [
            {"name": v.name, "size": v.size, "bytes_per_s": v.bytes_per_s, "latency_s": v.latency_s, "source": v.source}
            for v in c.levels
        ],
        "price": None
        if c.price is None
        else {
            "usd_per_device_hour": c.price.usd_per_device_hour,
            "source": c.price.source,
            "as_of": c.price.as_of,
        },
    }


def _maybe(q: Quantity | None) -> dict[str, Any] | None:
    return None if q is None else quantity(q)


def assumptions(assumed: Assumptions | None) -> dict[str, Any]:
    """Return the assumptions about a run, with sources. `value` null: not known, or as the source says."""
    known = assumed if assumed is not None else Assumptions()
    return {
        name: {
            "value": _maybe(known.get(name)),
            "given": name in known.given,
            "what": figure.what,
            "source": "given" if name in known.given else figure.source,
        }
        for name, figure in FIGURES.items()
    }


def run_data(r: Run, request: PlanRequest, assumed: Assumptions | None) -> dict[str, Any]:
    """Return a whole run as plain data."""
    g = r.goodput
    return {
        "tokens": r.tokens,
        "days": quantity(r.days),
        "usd": _maybe(r.usd),
        "kwh": _maybe(r.kwh),
        "usd_energy": _maybe(r.usd_energy),
        "days_with_failures": _maybe(r.days_with_failures),
        "usd_with_failures": _maybe(r.usd_with_failures),
        "kwh_with_failures": _maybe(r.kwh_with_failures),
        "num_failures": r.num_failures,
        "goodput": None
        if g is None
        else {
            "share": quantity(g.share),
            "mtbf_s": quantity(g.mtbf_s),
            "checkpoint_s": quantity(g.checkpoint_s),
            "restart_s": quantity(g.restart_s),
            "checkpoint_interval_s": quantity(g.interval_s),
        },
        "critical_batch_tokens": critical_batch(request.graph, r.tokens),
        "critical_batch_source": CRITICAL_BATCH_SOURCE,
        "notes": list(r.notes),
        "assumptions": assumptions(assumed),
    }


def estimate_data(e: Estimate, whole: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return an estimate as plain data; `whole` becomes its `run`."""
    return {
        "step_time_s": quantity(e.step_time_s),
        "tokens_per_s": e.tokens_per_s,
        "tokens_per_s_per_device": e.tokens_per_s_per_device,
        "mfu": e.mfu,
        "mfu_causal": e.mfu_causal,
        "fits": e.fits,
        "memory_capacity_bytes": e.memory_capacity_bytes,
        "memory_bytes": [{term: quantity(q) for term, q in s.memory.items()} for s in e.stages],
        "host_memory_bytes": [{term: quantity(q) for term, q in s.host_memory.items()} for s in e.stages],
        "host_memory_capacity_bytes": e.host_capacity_bytes if math.isfinite(e.host_capacity_bytes) else None,
        "stages": [
            {
                "num_layers": s.num_layers,
                "num_recomputed": s.num_recomputed,
                "in_flight": s.in_flight,
                "fullest": s.fullest,
                "forward_s": quantity(s.forward_s),
                "backward_s": quantity(s.backward_s),
                "memory_bytes": quantity(s.memory_bytes),
            }
            for s in e.stages
        ],
        "breakdown_s": {term: quantity(q) for term, q in e.breakdown.items()},
        "run": whole,
    }


def certificate(c: Certificate) -> dict[str, Any]:
    """Return a certificate as plain data."""
    return {
        "considered": c.considered,
        "illegal": c.illegal,
        "too_big": c.too_big,
        "bounded_out": c.bounded_out,
        "solved": c.solved,
        "open": c.open,
        "gap": c.gap,
        "intra_gap": c.intra_gap,
        "solve_time_s": c.solve_time_s,
        "restrictions": list(c.restrictions),
        "status": c.status,
        "illegal_by_rule": dict(c.illegal_by_rule),
        "too_big_by_term": dict(c.too_big_by_term),
        "by_phase_s": dict(c.by_phase_s),
    }


def pins(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return pins as plain data."""
    return {k: list(v) if isinstance(v, tuple) else v for k, v in given.items()}


def _head(command: str, request: PlanRequest) -> dict[str, Any]:
    r = request
    return {
        "schema": REPORT_SCHEMA_VERSION,
        "status": "ok",
        "command": command,
        "model": {
            "name": r.graph.name,
            "num_params": r.graph.num_params,
            "num_layers": len(layer_calls(r.graph)),
            "left_out": list(r.graph.left_out),
        },
        "cluster": cluster(r.cluster),
        "request": {
            "seq_len": r.seq_len,
            **({} if r.target_len is None else {"target_len": r.target_len}),
            "global_batch_size": r.global_batch_size,
            "pins": pins(r.pins),
            "precision": r.precision,
            "mode": str(r.mode),
            **option_data(r.options),
            "attention": str(r.options.attention_in(r.mode)),
            "profile": r.profile.name if r.profile is not None else None,
            "constants": r.constants_file,
            "imbalance": imbalance_of(r),
        },
    }


def _planned(p: Planned, request: PlanRequest, tokens: float | None, assumed: Assumptions | None) -> dict[str, Any]:
    whole = run_of(p.estimate, request, tokens, assumed)
    return {
        "priced_not_executed": list(not_executed(p.config, request.facts)),
        "plan": config_data(p.config),
        "estimate": estimate_data(p.estimate, None if whole is None else run_data(whole, request, assumed)),
    }


def plan_report(
    request: PlanRequest, result: SearchResult, tokens: float | None, assumed: Assumptions | None = None
) -> dict[str, Any]:
    """Return the answer of `autoplan plan` as plain data."""
    best, *rest = result.plans
    return {
        **_head("plan", request),
        **_planned(best, request, tokens, assumed),
        "alternatives": [_planned(p, request, tokens, assumed) for p in rest],
        "certificate": certificate(result.certificate),
    }


def estimate_report(
    request: PlanRequest, planned: Planned, tokens: float | None, assumed: Assumptions | None = None
) -> dict[str, Any]:
    """Return the answer of `autoplan estimate` as plain data."""
    return {**_head("estimate", request), **_planned(planned, request, tokens, assumed)}


def whatif_report(
    status: str, request: PlanRequest, vary: Mapping[str, Sequence[Any]], rows: Sequence[Mapping[str, object]]
) -> dict[str, Any]:
    """Return the answer of `autoplan whatif` as plain data; `request`: the task before anything is varied."""
    return {**_head("whatif", request), "status": status, "vary": dict(vary), "rows": list(rows)}


def infeasible_report(error: Exception) -> dict[str, Any]:
    """Return why nothing fits, with the fields of `search.infeasible.InfeasibleReport` if the error carries one."""
    report = getattr(error, "report", None)
    names = ("stage", "term", "needed_bytes", "available_bytes", "config", "cheapest_change")
    return {
        "schema": REPORT_SCHEMA_VERSION,
        "status": "infeasible",
        "message": str(error),
        **{name: getattr(report, name, None) for name in names},
    }
