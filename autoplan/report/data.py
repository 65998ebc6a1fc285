"""Reports as JSON: plain data, versioned.

Units are seconds, bytes and tokens per second. Every quantity is `{"low", "mid", "high", "evidence"}`; evidence is one
of exact, measured, fitted, assumed.

Schema 1:

    {"schema": 1, "status": "ok", "command": "plan" | "estimate",
     "model": {"name", "num_params", "num_layers", "notes": [str]},  # notes: what a user may not expect of it
     "cluster": {"name", "num_nodes", "devices_per_node", "num_devices", "device", "memory_bytes", "levels": [...],
                 "price": null | {"usd_per_device_hour", "source", "as_of"}},
     "request": {"seq_len", ["target_len",] "global_batch_size", "pins", "precision", "memory_risk",
                 "equal_within", "gap", "mode",
                 "like": null | str,   # the stack whose settings are taken, NAME@YY.MM
                 option of RunOptions: value, ..., "profile", "constants": null | file, "adapters": null | str,
                 "imbalance": null | {"value", "what", "source"}},  # of routing, of models with experts
     "asked": {argument: value},   # of the command, as typed; with "plan" it makes a plan file (report.plan_file)
     "made_for": {"autoplan", "parameters", "graph", "cluster", "cluster_figures", "profile"},  # version, hashes
     "priced_not_executed": [str],      # parts of the plan with a price that autoplan's own runtime does not execute
     "plan": {field of ParallelConfig: value, ..., "offload": [str],
              "recompute": str | {call: str} | [layers per stage], "stages": [layers per stage],
              "context_method": null | str | {block: str}},
              # with virtual stages: layers per chunk, in model order; the schedule says which chunks a rank holds
     "estimate": {"step_time_s", "tokens_per_s", "tokens_per_s_per_device", "mfu", "mfu_causal", "fits",
                  # mfu counts attention in full (as PaLM, NeMo), mfu_causal half of it (as Megatron Bridge) where the
                  # graph says that it is causal: not where the model makes its mask itself
                  "memory_capacity_bytes", "memory_bytes": [{term: quantity} per stage],
                  "stages": [{"num_layers", "num_recomputed", "in_flight", "forward_s", "backward_s",
                              "fullest", "memory_bytes": quantity}],  # fullest: the moment of memory_bytes
                  "host_memory_capacity_bytes": null | number, "host_memory_bytes": [{term: quantity} per stage],
                  "breakdown_s": {term: quantity}, "run": null | run},
     "alternatives": [{"priced_not_executed", "plan", "estimate"}],                       # plan: the next best ones
     "equals": [{"plan", "step_time_s"}],  # as fast as the fastest within equal_within, less simple than "plan"
     "certificate": {"considered", "illegal", "too_big", "bounded_out", "solved", "open", "gap", "intra_gap",
                     "solve_time_s", "restrictions", "status", "illegal_by_rule", "too_big_by_term", "by_phase_s",
                     "prices": str},   # where the prices are from
                    # considered is the sum of the five; gaps are (found - bound) / found, intra_gap of the layouts
     "program": {"axes", "stages": [[call]], "recompute": {call: str}, "layout": {choice: option}, "intra_cost_s",
                 "intra_bound_s", "precision", "compiled", "notes", "capture"},  # of a plan that is executed
     "graph": str}  # if no name stands for the model: its ModelGraph, compressed; answers about the file keep it

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

    {"schema": 1, "status": "ok" | "interrupted", "command": "explain", "model", "cluster", "request",
     "priced_not_executed", "plan", "estimate": as of plan,
     "certificate": null | as of plan without "prices",   # null: the plan was given, not searched
     "decisions": [{"name", "value",            # what matters most first; no alternatives: none is legal
                    "alternatives": [{"value", "pins", "status": "ok" | "does not fit" | "illegal" | "stopped",
                                      "cost": null | share of the step, "sentence", "plan",
                                      "difference": null | difference, "search_status", "gap", "reason",
                                      "shortage": null | {"stage", "term", "needed_bytes", "available_bytes"}}]}],
     "settings": [{"name", "what", "own", "value", "same_gain", "gain",   # shares of tokens per second; null: not known
                   "plan", "search_status"}],   # gain: of a new plan, as far as it comes from the setting
     "front": [{"capacity_bytes", "step_s", "peak_bytes", "plan",
                "search_status", "gap"}],       # null: the plan was given, not searched
     "front_end": str}   # why the front has no plan with less memory
    # with --vs: "vs": {"name", "plan", "estimate", "search_status", "gap", ...} and "difference" in place of all from
    # certificate on
    difference: {"decisions": {name: {"own", "other"}}, "time_s": {term: other - own},
                 "memory_bytes": {term: other - own},
                 "step_s" | "peak_bytes" | "tokens_per_s" | "mfu" | "num_devices" | "usd_per_hour" | "days" | "usd":
                     {"own": null | number, "other": null | number}}

    {"schema": 1, "status": "ok" | "infeasible" | "stopped", "command": "fit", "model", "cluster", "request",
     "fits": null | bool,   # null: not decided in time, "stopped"
     "plan", "estimate",   # of the best plan; if nothing fits, of one with little memory, or null
     "shortage": null | {"stage", "term", "needed_bytes", "available_bytes"},
     "ways": [{"name", "status": "fits" | "does not fit" | "stopped", "priced_not_executed", "plan",
               "peak_memory_bytes", "tokens_per_s", "shortage", "search_status"}]}

    {"schema": 1, "status": "ok" | "infeasible", "command": "size", "model", "cluster": of the first kind, "request",
     "tokens", "deadline_days", "budget_usd", "fewest" | "cheapest" | "surest": null | {"kind", "nodes", "num_devices",
     "days", "usd", "plan"},   # surest: the fewest planned that meet both at the high ends of their intervals, too
     "kinds": [{"name", "fewest_nodes", "cheapest_nodes", "adjacent", "proved", "reason"}],
     "rows": [{"kind", "nodes", "num_devices", "status", "days", "usd", "days_low", "days_high", "usd_low", "usd_high",
               "mfu", "step_time_s", "tokens_per_s", "goodput", "in_time", "meets", "meets_surely", "search_status",
               "gap", "reason"}],   # days and usd with failures where known
     "assumptions": as of run}

    {"schema": 1, "status": "ok", "command": "pools", "model", "request": as of plan, "pools": [as "cluster" of plan],
     "plan": {as of plan, "pools": [index of the pool of every stage], "step_time_s", "tokens_per_s", "mfu",
              "per_stage": [...]}, "equal_layers": null | as "plan",
     "alone": [{"cluster", "plan", "step_time_s", "reason"}],
     "certificate": {"num_candidates", "num_open", "bound_s", "gap", "restrictions"}}

    {"schema": 1, "status": "ok", "command": "compare", "model", "num_rows",
     "figures": [{"name", "predicted", "low", "high", "measured", "quartiles", "ratio", "inside"}],  # null: no interval
     "notes": [str], "unlike": [str],   # unlike: those of the notes that say that the log is of another run
     "predicted_s": {term: seconds}}

    {"schema": 1, "status": as of whatif, "command": "capacity", "file", "pins", "like": null | str,
     "runnable", "adapters": null | str, "target_len": null | tokens,
     "options": {option of RunOptions: value}, "profile", "constants": null | file, "assumptions": as of run,
     "notes": {model: [str]}, "rows": [...]}  # columns: autoplan.sweeps.capacity.capacity
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autoplan.config.choices import config_data, option_data
from autoplan.config.parallel import Mode
from autoplan.config.planning import tolerances_of
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.cost_models.whole_run import CRITICAL_BATCH_SOURCE, FIGURES, Assumptions, Run
from autoplan.plans.document import chosen, estimate_data, graph_text, plain
from autoplan.plans.record import plan_of_planned
from autoplan.plans.sections import SCHEMA_VERSION
from autoplan.program.facts import layer_calls
from autoplan.program.legality import not_executed
from autoplan.report.arguments import imbalance_of
from autoplan.report.written import request_fingerprint
from autoplan.search.infeasible import InfeasibleReport
from autoplan.search.planner import Planned, PlanRequest, SearchResult
from autoplan.sweeps.whatif import STEP_ONLY, RunTask, critical_batch, run_of


def to_text(data: Mapping[str, Any]) -> str:
    """Return JSON text. A number that JSON does not have is an error, never `NaN`."""
    return json.dumps(data, indent=1, allow_nan=False)


def report(command: str, status: str = "ok", **contents: Any) -> dict[str, Any]:
    """Return the answer of a command: the schema, the outcome, and its contents."""
    return {"schema": SCHEMA_VERSION, "status": status, "command": command, **contents}


def cluster(c: Cluster) -> dict[str, Any]:
    """Return a cluster as plain data."""
    return {
        "name": str(c),
        **chosen(c, "num_nodes devices_per_node num_devices"),
        **({"idle_devices": c.idle_devices} if c.idle_nodes else {}),
        "device": c.device.name,
        "memory_bytes": c.device.memory_bytes,
        "levels": [chosen(level, "name size bytes_per_s latency_s source") for level in c.levels],
        "price": plain(c.price),
    }


def assumptions(known: Assumptions) -> dict[str, Any]:
    """Return the assumptions about a run, with sources. `value` null: not known, or as the source says."""
    return {
        name: {
            "value": plain(known.get(name)),
            "given": name in known.given,
            "what": figure.what,
            "source": "given" if name in known.given else figure.source,
        }
        for name, figure in FIGURES.items()
    }


_RUN = "tokens days usd kwh usd_energy days_with_failures usd_with_failures kwh_with_failures num_failures"


def run_data(r: Run, request: PlanRequest, assumed: Assumptions) -> dict[str, Any]:
    """Return a whole run as plain data."""
    good = plain(r.goodput)
    if good is not None:
        good["checkpoint_interval_s"] = good.pop("interval_s")
    return {
        **chosen(r, _RUN),
        "goodput": good,
        "critical_batch_tokens": critical_batch(request.graph, r.tokens),
        "critical_batch_source": CRITICAL_BATCH_SOURCE,
        "notes": list(r.notes),
        "assumptions": assumptions(assumed),
    }


def head(command: str, request: PlanRequest, status: str = "ok") -> dict[str, Any]:
    """Return the beginning of an answer: schema, outcome, model, cluster and request."""
    r = request
    return report(
        command,
        status,
        model={
            **chosen(r.graph, "name num_params"),
            "num_layers": len(layer_calls(r.graph)),
            "notes": list(r.facts.notes),
        },
        cluster=cluster(r.cluster),
        request=request_data(r),
    )


def request_data(r: PlanRequest) -> dict[str, Any]:
    """Return a request as plain data."""
    return {
        "seq_len": r.seq_len,
        **({} if r.target_len is None else {"target_len": r.target_len}),
        **chosen(r, "global_batch_size pins precision"),
        **tolerances_of(r),
        "gap": r.allowed_gap,
        "mode": str(r.mode),
        "like": None if r.facts.like is None else r.facts.like.name,
        **option_data(r.options),
        "attention": str(r.options.attention_in(r.mode)),
        "profile": r.profile.name if r.profile is not None else None,
        "constants": r.constants_file,
        "adapters": r.adapters,
        "imbalance": imbalance_of(r),
    }


def shortage_data(shortage: InfeasibleReport | None) -> dict[str, Any] | None:
    """Return why nothing fits as plain data; None if something does."""
    return None if shortage is None else chosen(shortage, "stage term needed_bytes available_bytes")


def planned_data(p: Planned, request: PlanRequest, run: RunTask) -> dict[str, Any]:
    """Return a plan with its estimate as plain data."""
    whole = run_of(p.estimate, request, run)
    return {
        "priced_not_executed": list(not_executed(p.config, request.facts)),
        "plan": config_data(p.config),
        "estimate": estimate_data(p.estimate, None if whole is None else run_data(whole, request, run.assumptions)),
    }


@dataclass(frozen=True)
class Unnamed:
    """A model for which no name stands: an answer about it holds its graph. `capture`: the line on its capture."""

    capture: str = ""


def _with_task(request: PlanRequest, asked: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the keys that make the answer a plan file; none if it was not asked on the command line."""
    return {} if asked is None else {"asked": dict(asked), "made_for": request_fingerprint(request)}


def _graph(request: PlanRequest, unnamed: Unnamed | None) -> dict[str, Any]:
    """Return the section with the graph of a model that has no name."""
    return {} if unnamed is None else {"graph": graph_text(request.graph)}


def evidence_of(request: PlanRequest) -> str:
    """Return where the prices of a request are from, in words."""
    profile, device = request.profile, request.cluster.device
    return f"profile {profile.name}" if profile is not None else f"{device.source} device and link figures"


def plan_report(
    request: PlanRequest,
    result: SearchResult,
    run: RunTask = STEP_ONLY,
    asked: Mapping[str, Any] | None = None,
    unnamed: Unnamed | None = None,
) -> dict[str, Any]:
    """Return the answer of `autoplan plan` as plain data.

    Args:
        asked: the arguments of the command.
        unnamed: given if no name stands for the model.
    """
    best, *rest = result.plans
    return {
        **head("plan", request),
        **_with_task(request, asked),
        **planned_data(best, request, run),
        "alternatives": [planned_data(p, request, run) for p in rest],
        "equals": [{"plan": config_data(config), "step_time_s": step_s} for config, step_s in result.equals],
        "certificate": {**plain(result.certificate), "prices": evidence_of(request)},
        **_program(best, request, unnamed),
        **_graph(request, unnamed),
    }


def _program(p: Planned, request: PlanRequest, unnamed: Unnamed | None) -> dict[str, Any]:
    """Return the stages and layouts of a plan that autoplan's own runtime executes; nothing of another plan."""
    if not_executed(p.config, request.facts):
        return {}
    made = replace(
        plan_of_planned(request.graph, p, {}, "", request.precision)[0],
        compiled=request.mode is Mode.COMPILED,
        capture="" if unnamed is None else unnamed.capture,
    )
    return {"program": made.program_data()}


def estimate_report(
    request: PlanRequest,
    planned: Planned,
    run: RunTask = STEP_ONLY,
    asked: Mapping[str, Any] | None = None,
    unnamed: Unnamed | None = None,
) -> dict[str, Any]:
    """Return the answer of `autoplan estimate` as plain data. Args: as of `plan_report`."""
    return {
        **head("estimate", request),
        **_with_task(request, asked),
        **planned_data(planned, request, run),
        **_program(planned, request, unnamed),
        **_graph(request, unnamed),
    }


def whatif_report(
    status: str, request: PlanRequest, vary: Mapping[str, Sequence[Any]], rows: Sequence[Mapping[str, object]]
) -> dict[str, Any]:
    """Return the answer of `autoplan whatif` as plain data; `request`: the task before anything is varied."""
    return {**head("whatif", request, status), "vary": dict(vary), "rows": list(rows)}


def infeasible_report(error: Exception) -> dict[str, Any]:
    """Return why nothing fits, with the fields of `search.infeasible.InfeasibleReport` if the error carries one."""
    found = getattr(error, "report", None)
    names = ("stage", "term", "needed_bytes", "available_bytes", "config", "cheapest_change")
    about = {name: getattr(found, name, None) for name in names}
    return {"schema": SCHEMA_VERSION, "status": "infeasible", "message": str(error), **about}
