"""Plan: the decisions of a search as plain data, with the certificate of the layout."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from autoplan.codegen.program import Layouts
from autoplan.config.parallel import ParallelConfig
from autoplan.cost_models.quantity import Quantity
from autoplan.cost_models.time.estimate import Estimate
from autoplan.ir.graph import ModelGraph
from autoplan.program.context_pins import chosen_methods
from autoplan.program.facts import layer_calls, pipeline_units, stage_calls
from autoplan.program.parallel_dims import ParallelDims
from autoplan.search.intra import IntraSolution
from autoplan.search.planner import Certificate, Planned

PLAN_VERSION = 1


@dataclass(frozen=True)
class Plan:
    """The degrees, stages and layouts of a program, and a bound on how much better a layout could be.

    The bound holds at the stated prices and restrictions.
    """

    model: str
    graph_hash: str
    config: ParallelConfig
    num_devices: int
    axes: tuple[tuple[str, int], ...]
    stages: tuple[tuple[str, ...], ...]
    recompute: Mapping[str, str]
    layout: Mapping[str, str]  # choice -> option
    intra_cost_s: float
    intra_bound_s: float
    certificate: Mapping[str, Any]
    estimate: Estimate | None = None  # None if the degrees were given, not searched
    version: int = PLAN_VERSION
    precision: str = "native"
    compiled: bool = False  # blocks run through torch.compile
    async_tp: bool = False  # collectives of tp hide behind pieces of products
    notes: tuple[str, ...] = ()  # what a user may not expect of the graph
    capture: str = ""  # whether the captured graph is the module (autoplan.verify); empty for a given graph

    def to_json(self) -> str:
        """Return the JSON text, without the events of the estimate's timeline."""
        data = asdict(replace(self, estimate=None))
        if self.estimate is not None:
            data["estimate"] = estimate_json(self.estimate)
        return json.dumps(data, indent=1)

    def __str__(self) -> str:
        c = self.config
        more = [("cp", c.cp > 1, c.cp), ("ep", c.ep > 1, c.ep), ("etp", c.spreads_experts and c.tp > 1, c.expert_tp)]
        more.append(("virtual_stages", c.virtual_stages > 1, c.virtual_stages))
        spread = "".join(f" {name}={n}" for name, shown, n in more if shown)
        given = c.context_method
        if given is not None:
            methods = sorted(set(given.values())) if isinstance(given, Mapping) else [given]
            spread = spread.replace(f"cp={c.cp}", f"cp={c.cp} ({', '.join(methods)})")
        copies = f" zero-replicas={c.zero_replicas}" if c.zero_replicas > 1 else ""
        held = f" offload={'+'.join(c.offload)}" if c.offload else ""
        lines = [
            f"{self.model} on {self.num_devices} devices: dp={c.dp} tp={c.tp} pp={c.pp}{spread} zero={c.zero_stage}"
            f"{copies}{held} micro-batches={c.num_micro_batches} schedule={c.schedule}"
            f"{'' if self.precision == 'native' else f' precision={self.precision}'}{' compiled' * self.compiled}"
            f"{' async-tp' * self.async_tp}"
        ]
        if self.estimate is not None:
            step, peak = self.estimate.step_time_s, self.estimate.peak_memory_bytes
            lines.append(
                f"  predicted: step {step.mid:.4g} s ({step.low:.3g} to {step.high:.3g}, {step.tag}), "
                f"memory {peak.mid / 1e6:,.0f} MB of {self.estimate.memory_capacity_bytes / 1e6:,.0f}"
            )
        if self.capture:
            lines.append(f"  {self.capture}")
        for i, names in enumerate(self.stages):
            lines.append(f"  stage {i}: {', '.join(names)}")
        stored = [(k.removeprefix("store "), v) for k, v in self.layout.items() if k.startswith("store ")]
        if any("S(" in v for _, v in stored):
            lines.append("  stored in shards: " + ", ".join(f"{k} {v}" for k, v in stored if "S(" in v))
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)


def estimate_json(estimate: Estimate) -> dict[str, Any]:
    """Return an estimate as plain data, without its timeline."""

    def quantity(q: Quantity) -> dict[str, Any]:
        return {"low": q.low, "mid": q.mid, "high": q.high, "tag": str(q.tag)}

    return {
        "step_time_s": quantity(estimate.step_time_s),
        "breakdown_s": {name: quantity(q) for name, q in estimate.breakdown.items()},
        "tokens_per_s": estimate.tokens_per_s,
        "mfu": estimate.mfu,
        "mfu_causal": estimate.mfu_causal,
        "memory_bytes": [{name: quantity(q) for name, q in s.memory.items()} for s in estimate.stages],
        "memory_capacity_bytes": estimate.memory_capacity_bytes,
    }


def searched_plan(
    graph: ModelGraph, planned: Planned, certificate: Certificate, evidence: str, precision: str = "native"
) -> tuple[Plan, Layouts]:
    """Return the plan and layouts of a search result. `evidence`: the source of the prices."""
    config, units = planned.config, pipeline_units(graph)
    stages = stage_calls(units, config.stages or (len(units),))
    proof = {**asdict(certificate), "prices": evidence}
    return plan_of(graph, config, planned.point.solution, stages, proof, planned.estimate, precision)


def plan_of(
    graph: ModelGraph,
    config: ParallelConfig,
    solution: IntraSolution,
    stages: tuple[tuple[str, ...], ...],
    certificate: dict[str, Any],
    estimate: Estimate | None = None,
    precision: str = "native",
) -> tuple[Plan, Layouts]:
    """Return the decisions as a record, and in the form that codegen takes."""
    dims = ParallelDims.of(graph, config)
    recompute = _recompute(graph, config)
    layouts = Layouts(
        dims.mesh,
        dims.layout_axes,
        solution.selection,
        stages,
        config.zero_stage,
        config.schedule,
        recompute,
        config.virtual_stages,
        chosen_methods(graph, config),
        precision,
        config.offload,
    )
    plan = Plan(
        model=graph.name,
        graph_hash=graph.content_hash,
        config=config,
        num_devices=config.num_devices,
        axes=tuple((a.name, a.size) for a in dims.mesh.axes),
        stages=stages,
        recompute=recompute,
        layout={k: o.name for k, o in solution.selection.items()},
        intra_cost_s=solution.cost_s,
        intra_bound_s=solution.bound_s,
        certificate=certificate,
        estimate=estimate,
        precision=precision,
        notes=graph.notes,
    )
    return plan, layouts


def _recompute(graph: ModelGraph, config: ParallelConfig) -> dict[str, str]:
    calls = [call.name for call in graph.bound_calls()]
    layers = set(layer_calls(graph))
    if isinstance(config.recompute, str):
        return {n: config.recompute if n in layers else "none" for n in calls}
    if isinstance(config.recompute, tuple):  # the first layers of each stage
        full: set[str] = set()
        units = pipeline_units(graph)
        at = 0
        for size, count in zip(config.stages or (len(units),), config.recompute, strict=True):
            mine = [unit for unit in units[at : at + size] if layers & set(unit)]
            full |= {n for unit in mine[:count] for n in unit if n in layers}
            at += size
        return {n: "full" if n in full else "none" for n in calls}
    return {n: config.recompute.get(n, "none") for n in calls}
