"""The answers of `autoplan pools`: a plan over several kinds of devices, as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from rich.console import Console
from rich.text import Text

from autoplan.config import numbers
from autoplan.config.choices import config_data, config_label
from autoplan.config.offload import offload_text
from autoplan.config.recompute import NONE
from autoplan.errors import PinError
from autoplan.ir.graph import ModelGraph
from autoplan.plans.document import chosen, plain
from autoplan.plans.record import recompute_of_calls
from autoplan.report.data import cluster, head
from autoplan.report.flags import TaskWords
from autoplan.report.output import put
from autoplan.report.request import read_request
from autoplan.report.task_text import batch_text, settings_text
from autoplan.report.text import interval, paragraph, plain_table, title
from autoplan.report.waiting import waiting
from autoplan.search.planner import PlanRequest
from autoplan.search.pools import RESTRICTIONS, PooledPlan
from autoplan.sweeps.label import plan_label
from autoplan.sweeps.pools import Alone, Pools, pools


def pools_command(
    task: TaskWords,
    pool: Sequence[str],
    pin: Sequence[str] | None,
    nic: float | None,
    alone: bool,
    as_json: bool,
    **search: Any,
) -> None:
    """Plan over the pools and print the answer."""
    if task.__dict__["cluster"] is not None and (
        task.written is None or task.cluster != task.written.asked.get("cluster")
    ):
        raise PinError(f"--cluster {task.cluster}: give every pool with --pool instead")
    requests = [read_request(replace(task, cluster=text), pins=list(pin or ()), **search) for text in pool]
    with waiting("searching", as_json) as status:
        found = pools(requests, nic_gbit_s=nic, alone=alone, told=lambda text: status.update(f"searching: {text}"))
    put(pools_report(found), as_json, partial(pools_text, found=found))


# -- text --------------------------------------------------------------------------------------------------------------


def pools_text(out: Console, found: Pools) -> None:
    """Print the plan, its stages, what it is compared with, and how far it is proved."""
    requests, best = found.search.requests, found.search.best
    out.print(Text(title(requests[0]), style="bold"), soft_wrap=True)
    paragraph(out, "on " + " and ".join(str(r.cluster) for r in requests), 5, first=2)
    r = requests[0]
    paragraph(out, f"{batch_text(r)} per step, {settings_text(r)}", 5, first=2)
    out.print()
    out.print(Text(f" {_label(best)}", style="bold green"), soft_wrap=True)
    paragraph(
        out,
        f"step {interval(best.step_time_s)}, {numbers.scaled(best.tokens_per_s)} tokens/s, MFU "
        f"{numbers.percent(best.mfu)} of all devices",
        1,
        first=1,
    )
    out.print()
    _stages(out, best, requests)
    out.print()
    _compared(out, found)
    out.print()
    for line in (*_proof(found), *(f"Restricted to: {text}." for text in RESTRICTIONS)):
        paragraph(out, line, 1, first=1)
    out.print()
    paragraph(out, f"Pins of parallelize: {pins_of(best, r.graph)!r}", 2, first=1)
    counts = ", ".join(f"{r.cluster.num_devices} of {r.cluster.device.name}" for r in _in_order(best, requests))
    paragraph(out, f"Ranks in the order of the stages: {counts}.", 1, first=1)


_DEGREES = ("tp", "pp", "cp", "dp", "ep", "zero_stage", "zero_replicas", "micro_batch_size", "schedule", "stages")


def pins_of(plan: PooledPlan, graph: ModelGraph) -> dict[str, Any]:
    """Return the plan as pins that leave nothing for a search to choose."""
    c, data = plan.config, config_data(plan.config)
    recomputed = {name: how for name, how in recompute_of_calls(graph, c).items() if how != NONE}
    pins = {name: data[name] for name in _DEGREES}
    pins |= {"etp": c.expert_tp} if c.spreads_experts else {}
    pins |= {"context_method": data["context_method"]} if c.context_method is not None else {}
    return {**pins, "recompute": recomputed or NONE, "offload": offload_text(c.offload)}


def _label(plan: PooledPlan) -> str:
    return config_label(plan.config, sum(s.num_layers for s in plan.stages))


def _in_order(plan: PooledPlan, requests: Sequence[PlanRequest]) -> list[PlanRequest]:
    return [requests[pool] for pool in dict.fromkeys(plan.pools)]


def _stages(out: Console, plan: PooledPlan, requests: Sequence[PlanRequest]) -> None:
    table = plain_table("stage", "device", "layers", "recomputed", "ms fwd + bwd", "busy", "memory GB", left=2)
    for index, stage in enumerate(plan.stages):
        table.add_row(
            str(index),
            requests[stage.pool].cluster.device.name,
            str(stage.num_layers),
            str(stage.num_recomputed),
            f"{1e3 * stage.forward_s:.1f} + {1e3 * stage.backward_s:.1f}",
            numbers.percent(stage.busy_share),
            f"{stage.memory_bytes.mid / 1e9:.1f} of {stage.capacity_bytes / 1e9:.1f}",
        )
    out.print(table)


def _compared(out: Console, found: Pools) -> None:
    best = found.search.best.step_time_s.mid
    table = plain_table("compared with", "step", "times as long", "plan", left=1)
    table.columns[-1].justify = "left"
    equal = found.search.equal
    if equal is None:
        table.add_row("equally many layers on all stages", "-", "-", "does not fit")
    else:
        step = equal.step_time_s.mid
        table.add_row("equally many layers on all stages", *_ratio(step, best), _label(equal))
    for alone in found.alone:
        name = f"{alone.request.cluster} alone"
        if alone.planned is None:
            table.add_row(name, "-", "-", alone.reason)
        else:
            e = alone.planned.estimate
            table.add_row(name, *_ratio(e.step_time_s.mid, best), plan_label(alone.planned.config, e))
    out.print(table)


def _ratio(step_s: float, best_s: float) -> tuple[str, str]:
    return f"{numbers.digits(step_s)} s", f"{step_s / best_s:.2f}"


def _proof(found: Pools) -> list[str]:
    s = found.search
    text = f"{s.num_candidates:,} candidates (degrees and orders of the pools)"
    if s.num_open:
        shorter = f"; a step may be {numbers.percent(s.gap)} shorter" if s.gap < 0.5 else ""
        return [f"{text}, {s.num_open:,} undecided when the search ended{shorter}: raise --time-limit."]
    shorter = "none has a shorter step" if s.gap < 1e-6 else f"a step may be {numbers.percent(s.gap)} shorter"
    best = found.best_alone_s
    worth = []
    if best is not None and best <= s.best.step_time_s.mid:
        worth = ["One pool alone is as fast: the others are better used for something else."]
    return [*worth, f"{text}, all decided; {shorter}."]


# -- JSON --------------------------------------------------------------------------------------------------------------


def pools_report(found: Pools) -> dict[str, Any]:
    """Return the answer of `autoplan pools` as plain data."""
    s = found.search
    of_all = {name: value for name, value in head("pools", s.requests[0]).items() if name != "cluster"}
    return {
        **of_all,
        "pools": [cluster(r.cluster) for r in s.requests],
        "plan": _plan(s.best),
        "equal_layers": None if s.equal is None else _plan(s.equal),
        "alone": [_alone(a) for a in found.alone],
        "certificate": {**chosen(s, "num_candidates num_open bound_s gap"), "restrictions": list(RESTRICTIONS)},
    }


def _plan(plan: PooledPlan) -> dict[str, Any]:
    return {
        **config_data(plan.config),
        "pools": list(plan.pools),
        **chosen(plan, "step_time_s tokens_per_s mfu"),
        "per_stage": plain(plan.stages),
    }


def _alone(alone: Alone) -> dict[str, Any]:
    return {
        "cluster": str(alone.request.cluster),
        "plan": None if alone.planned is None else config_data(alone.planned.config),
        "step_time_s": None if alone.planned is None else plain(alone.planned.estimate.step_time_s),
        "reason": alone.reason,
    }
