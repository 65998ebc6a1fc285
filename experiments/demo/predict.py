"""What the demo's rank 0 knows before the first step: the plans, why they were chosen, and what they should cost."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autoplan.capture.export import capture
from autoplan.capture.frontend.cache import cached
from autoplan.cost_models.costs import Costs
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.cost_models.profile import Profile, user_folder
from autoplan.cost_models.quantity import Quantity
from autoplan.cost_models.time.estimate import Estimate
from autoplan.plans.document import estimate_data
from autoplan.plans.record import Plan
from autoplan.profiler.run import cached_profile, machine_key, resolve
from autoplan.report.files import write_text
from autoplan.report.timeline import trace
from autoplan.search.planner import Planned, PlanRequest, search_plan
from autoplan.sweeps.label import plan_label

TOP = 6


def used_profile(world: int) -> Profile | None:
    """The profile that `parallelize` uses in this job; None where only assumed figures are known."""
    given = resolve()
    return cached_profile(machine_key(world, "cpu")) if given == "measure" else given


def write_json(path: Path, data: Any) -> None:
    """In one go, or not at all."""
    write_text(path, json.dumps(data, indent=1) + "\n")


def timeline(plan: Plan) -> dict[str, Any]:
    """Return the predicted step as Chrome trace events."""
    return trace(plan.estimate)


def _quantity(q: Quantity) -> dict[str, Any]:
    return {"low": q.low, "mid": q.mid, "high": q.high, "tag": str(q.tag)}


class Prediction:
    """Collects what predicted.json holds.

    Args:
        profile: what the prices rest on.
        before: what was known of this machine before `parallelize` was called.
        seconds: that `parallelize` took.
    """

    def __init__(self, profile: Profile | None, before: Profile | None, seconds: float) -> None:
        self.profile, self.before, self.seconds = profile, before, seconds
        self.plans: dict[str, Any] = {}
        self.refused: dict[str, str] = {}
        self.why: dict[str, Any] = {}

    def explain(self, plan: Plan, model: nn.Module, batch: Mapping[str, torch.Tensor], size: int) -> None:
        """Search once more, for the runners-up and what the compute of the best plan rests on."""
        assert plan.estimate is not None
        graph = cached(model, batch, lambda: capture(model, batch))
        cluster = Cluster.local(plan.num_devices).with_(memory_gb=plan.estimate.memory_capacity_bytes / 1e9)
        seq_len = next(iter(batch.values())).shape[1]
        request = PlanRequest(
            graph, cluster, seq_len, size, precision="native", profile=self.profile, top=TOP, executed=True
        )
        found = search_plan(request)
        costs = request.costs
        self.why = {
            "model": graph.name,
            "num_params": graph.num_params,
            "tokens_per_step": plan.estimate.tokens_per_step,
            "top": [_row(p.config, p.estimate) for p in found.plans],
            "agrees": found.plans[0].config == plan.config,
            "compute_s_by_tag": _by_tag(found.plans[0], costs),
        }

    def add(self, name: str, pins: Mapping[str, Any], plan: Plan) -> None:
        """One plan that will be run."""
        assert plan.estimate is not None
        overheads = {} if self.profile is None else self.profile.overheads
        estimate = plan.estimate
        optimizer = estimate.breakdown.get("optimizer")
        update_s = (0.0 if optimizer is None else optimizer.mid) + overheads.get("optimizer_step_s", 0.0)
        self.plans[name] = {
            "pins": dict(pins),
            **_row(plan.config, estimate),
            "degrees": {axis: getattr(plan.config, axis) for axis in ("dp", "tp", "pp")},
            "program_s": estimate.step_time_s.mid - update_s,
            "optimizer_s": update_s,
            "estimate": estimate_data(estimate),
            "certificate": dict(plan.certificate),
        }

    def line(self, name: str) -> str:
        """One plan in a line."""
        plan = self.plans[name]
        step, peak = plan["step_time_s"], plan["peak_memory_bytes"]
        return f"{plan['label']}: predicted step {1e3 * step['mid']:.1f} ms, memory {peak['mid'] / 1e6:.1f} MB"

    def data(self) -> dict[str, Any]:
        """Everything."""
        return {
            "version": 1,
            "profile": self._profile(),
            "why": self.why,
            "plans": self.plans,
            "refused": self.refused,
        }

    def _profile(self) -> dict[str, Any]:
        p = self.profile
        if p is None:
            return {"name": None, "new_ops": 0, "seconds": self.seconds}
        mine = resolve() == "measure"
        known = set() if self.before is None else set(self.before.by_key)
        return {
            "name": p.name,
            "path": str(user_folder() / f"{p.name}.json") if mine else os.environ.get("AUTOPLAN_PROFILE", ""),
            "date": p.date,
            "num_ops": len(p.ops),
            "new_ops": len(set(p.by_key) - known) if mine else 0,
            "num_links": len(p.links),
            "seconds": self.seconds,
            "overheads": dict(p.overheads),
            "held_out": {name: {"median": e.median, "p90": e.p90} for name, e in p.held_out.items()},
            "notes": list(p.notes),
        }


def _row(config: Any, estimate: Estimate) -> dict[str, Any]:
    return {
        "label": plan_label(config, estimate),
        "step_time_s": _quantity(estimate.step_time_s),
        "peak_memory_bytes": _quantity(estimate.peak_memory_bytes),
    }


def _by_tag(planned: Planned, costs: Costs) -> dict[str, float]:
    """Seconds of the operations of one micro-batch of the whole model, by where their price comes from."""
    out: dict[str, float] = {}
    work = planned.point.workload
    for name in [block for unit in work.units for block in unit]:
        for op in work.blocks[name].ops:
            for q in (costs.forward_s(op), costs.backward_s(op)):
                if q.mid:
                    out[str(q.tag)] = out.get(str(q.tag), 0.0) + q.mid
    return out
