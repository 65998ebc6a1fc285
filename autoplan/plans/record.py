"""Plan: the decisions of a search as plain data, with the certificate of the layout."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from autoplan.codegen.program import Layouts
from autoplan.config.choices import config_data, config_label
from autoplan.config.html import table
from autoplan.config.offload import offload_text
from autoplan.config.parallel import Mode, ParallelConfig
from autoplan.config.recompute import FULL, NONE
from autoplan.cost_models.time.estimate import Estimate
from autoplan.errors import PinError
from autoplan.ir.graph import ModelGraph
from autoplan.pages.plots import Plots
from autoplan.plans.document import (
    check_complete,
    checked_document,
    config_of_data,
    data_of_text,
    estimate_data,
    estimate_of_data,
    plain,
    read_json,
    tuples,
)
from autoplan.plans.sections import PROGRAM, SCHEMA_VERSION, SECTIONS
from autoplan.program.choice_kinds import ChoiceKind
from autoplan.program.context_pins import chosen_methods
from autoplan.program.facts import layer_calls, pipeline_units, stage_calls
from autoplan.program.parallel_dims import parallel_dims
from autoplan.program.problem import Selection
from autoplan.search.intra import IntraSolution
from autoplan.search.planner import Certificate, Planned
from autoplan.versions import __version__


@dataclass(frozen=True)
class Plan:
    """The degrees, stages and layouts of a program, and a bound on how much better a layout could be.

    The bound holds at the stated prices and restrictions.

    Attributes:
        axes, stages, layout: empty in a plan whose text leaves the layouts open (an older `autoplan plan --json`).
        document: the other sections of its text (autoplan.plans.document): model, cluster, request, `asked`,
            `made_for`, alternatives, and the graph itself if no name stands for the model.

    Example:
        >>> import autoplan
        >>> plan = autoplan.plan("gpt2", "2xh100", seq_len=1024, global_batch_size=16, pins={"tp": 2})
        >>> plan.config.tp, plan.estimate.fits
        (2, True)
        >>> autoplan.Plan.from_json(plan.to_json()).config == plan.config
        True
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
    precision: str = "native"
    compiled: bool = False  # blocks run through torch.compile
    notes: tuple[str, ...] = ()  # what a user may not expect of the graph
    capture: str = ""  # whether the captured graph is the module (autoplan.verify); empty for a given graph
    document: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def pins(self) -> dict[str, Any]:
        """The choices of this plan as pins, for a search that keeps them."""
        data = config_data(self.config)
        stages = {} if self.config.stages is None else {"stages": tuple(self.config.stages)}
        recompute: Any = self.config.recompute
        if isinstance(recompute, tuple):  # layers per stage: a search takes a choice per layer
            recompute = {name: how for name, how in self.recompute.items() if how != NONE} or NONE
        pinned = {name: data[name] for name in data if name not in ("stages", "recompute", "context_method", "offload")}
        if self.config.context_method is not None:
            pinned["context_method"] = self.config.context_method
        pinned |= {"offload": offload_text(self.config.offload)}
        return {**pinned, **stages, "recompute": recompute}

    @property
    def rows(self) -> int:
        """Return the tokens of a micro-batch that a rank of tensor parallelism has between collectives."""
        c, seq_len = self.config, int(self.document.get("request", {}).get("seq_len", 1))
        return max(1, c.micro_batch_size * seq_len // (c.cp * c.tp))

    @property
    def async_tp(self) -> bool:
        """True if collectives of tensor parallelism hide behind pieces of products, in compiled blocks."""
        overlap = self.document.get("request", {}).get("overlap") or ()
        return self.compiled and self.config.tp > 1 and "tp" in overlap

    @property
    def global_batch_size(self) -> int:
        """Sequences per step over all data-parallel ranks."""
        c = self.config
        return c.dp * c.micro_batch_size * c.num_micro_batches

    def priced(self) -> Estimate:
        """Return the estimate. Raises PinError for a plan whose degrees were given, which has none."""
        if self.estimate is None:
            raise PinError(
                "the plan has no estimate: its degrees were given, not searched; compare one of `autoplan plan`"
            )
        return self.estimate

    def to_json(self) -> str:
        """Return its JSON text (autoplan.plans.document), without the events of the estimate's timeline."""
        return json.dumps(self.to_data(), indent=1, allow_nan=False)

    def to_data(self) -> dict[str, Any]:
        """Return its sections as JSON data, in their order."""
        sections = {
            "schema": SCHEMA_VERSION,
            "status": "ok",
            "command": "plan",
            "model": {"name": self.model},
            "made_for": {"autoplan": __version__, "graph": self.graph_hash},
            **self.document,
            "plan": config_data(self.config),
            "certificate": plain(dict(self.certificate)),
            "program": self.program_data(),
        }
        if self.estimate is not None:
            sections.setdefault("estimate", estimate_data(self.estimate))
        return {name: sections[name] for name in SECTIONS if name in sections}

    def program_data(self) -> dict[str, Any]:
        """Return the decisions that follow from the configuration and the graph, as JSON data."""
        return {name: plain(getattr(self, name)) for name in PROGRAM}

    @staticmethod
    def from_json(text: str, where: str = "the plan") -> Plan:
        """Return the plan of a text that `to_json`, `autoplan plan --json` or `autoplan estimate --json` wrote.

        Args:
            where: its file, for errors.

        Raises:
            PinError: it is not such a text; names the wrong key and the nearest known one, or the wrong value.
        """
        return plan_of_data(data_of_text(text, where), where)

    @staticmethod
    def read(path: Path | str) -> Plan:
        """Return the plan in a file (see `from_json`)."""
        return plan_of_data(read_json(Path(path)), str(path))

    @property
    def plot(self) -> Plots:
        """The figures of the plan, for notebooks: `plan.plot.memory()`. They need the extra [report]."""
        events = [] if self.estimate is None else self.estimate.events
        drawn = [[e.rank, e.chunk, e.micro_batch, e.kind.name, e.start_s, e.end_s] for e in events]
        return Plots(self.to_data(), drawn, self._candidates())

    def _candidates(self) -> list[dict[str, Any]]:
        """Return this plan and the others that its search returned, by time and memory."""
        data = self.to_data()
        found = [("best", data), *(("slower", other) for other in data.get("alternatives", ()))]
        out = []
        for kind, one in found:
            if "estimate" in one:
                estimate = estimate_of_data(one["estimate"], self.model)
                label = config_label(config_of_data(one["plan"]), sum(s.num_layers for s in estimate.stages))
                step, peak = estimate.step_time_s.mid, estimate.peak_memory_bytes.mid
                out.append({"kind": kind, "label": label, "step_s": step, "memory_bytes": peak, "why": ""})
        return out

    def _repr_html_(self) -> str:
        """Return tables for a notebook: the choices, the estimate and the certificate."""
        rows = [(name, value) for name, value in config_data(self.config).items() if value not in (None, [], "none")]
        parts = [table(f"{self.model} on {self.num_devices} devices", ("choice", "value"), rows)]
        if self.estimate is not None:
            parts.append(self.estimate._repr_html_())
        if self.certificate:
            counted = [(n, v) for n, v in self.certificate.items() if isinstance(v, int | float | str)]
            parts.append(table("certificate", ("", "value"), counted))
        return "".join(parts)

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
        stored = [(name, v) for k, v in self.layout.items() if (name := ChoiceKind.STORE.subject_of(k)) is not None]
        if any("S(" in v for _, v in stored):
            lines.append("  stored in shards: " + ", ".join(f"{k} {v}" for k, v in stored if "S(" in v))
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)


def plan_of_data(data: object, where: str) -> Plan:
    """Return the plan of a document. PinError says what is wrong with it."""
    document = checked_document(data, where)
    made, program = document.get("made_for", {}), document.get("program", {})
    config = config_of_data(document["plan"])
    check_complete(document["plan"], where)
    kept = {n: v for n, v in document.items() if n not in ("schema", "status", "command", "plan", "program")}
    estimate = document.get("estimate")
    given = {name: tuples(program[name]) for name in PROGRAM if name in program}
    if given and set(PROGRAM) - set(given):
        raise PinError(f"{where}: its program lacks {', '.join(sorted(set(PROGRAM) - set(given)))}; plan again")
    empty = {"axes": (), "stages": (), "recompute": {}, "layout": {}, "intra_cost_s": 0.0, "intra_bound_s": 0.0}
    if not given:
        empty |= {"precision": document.get("request", {}).get("precision", "native")}
        empty |= {"compiled": document.get("request", {}).get("mode") == Mode.COMPILED}
    return Plan(
        model=document.get("model", {}).get("name", ""),
        graph_hash=made.get("graph", ""),
        config=config,
        num_devices=config.num_devices,
        certificate=document.get("certificate", {}),
        estimate=None if estimate is None else estimate_of_data(estimate, where),
        document={name: value for name, value in kept.items() if name != "certificate"},
        **{**empty, **given},
    )


def searched_plan(
    graph: ModelGraph, planned: Planned, certificate: Certificate, evidence: str, precision: str = "native"
) -> tuple[Plan, Layouts]:
    """Return the plan and layouts of a search result. `evidence`: the source of the prices."""
    return plan_of_planned(graph, planned, asdict(certificate), evidence, precision)


def plan_of_planned(
    graph: ModelGraph, planned: Planned, certificate: Mapping[str, Any], evidence: str, precision: str = "native"
) -> tuple[Plan, Layouts]:
    """Return the plan and layouts of a configuration that was priced."""
    config, units = planned.config, pipeline_units(graph)
    stages = stage_calls(units, config.stages or (len(units),))
    proof = plain({**certificate, "prices": evidence})
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
    layouts = layouts_for(graph, config, solution.selection, stages, precision)
    plan = Plan(
        model=graph.name,
        graph_hash=graph.content_hash,
        config=config,
        num_devices=config.num_devices,
        axes=tuple((a.name, a.size) for a in layouts.mesh.axes),
        stages=stages,
        recompute=layouts.recompute,
        layout={k: o.name for k, o in solution.selection.items()},
        intra_cost_s=solution.cost_s,
        intra_bound_s=solution.bound_s,
        certificate=certificate,
        estimate=estimate,
        precision=precision,
        notes=graph.notes,
    )
    return plan, layouts


def layouts_for(
    graph: ModelGraph,
    config: ParallelConfig,
    selection: Selection,
    stages: tuple[tuple[str, ...], ...],
    precision: str,
) -> Layouts:
    """Return the layouts that codegen takes: from a configuration and the options chosen for a graph."""
    dims = parallel_dims(graph, config)
    return Layouts(
        dims.mesh,
        dims.layout_axes,
        selection,
        stages,
        config.zero_stage,
        config.schedule,
        recompute_of_calls(graph, config),
        config.virtual_stages,
        chosen_methods(graph, config),
        precision,
        config.offload,
    )


def recompute_of_calls(graph: ModelGraph, config: ParallelConfig) -> dict[str, str]:
    """Return the recompute choice of every call of the model, by its name."""
    calls = [call.name for call in graph.bound_calls()]
    layers = set(layer_calls(graph))
    if isinstance(config.recompute, str):
        return {n: config.recompute if n in layers else NONE for n in calls}
    if isinstance(config.recompute, tuple):  # the first layers of each stage
        full: set[str] = set()
        units = pipeline_units(graph)
        at = 0
        for size, count in zip(config.stages or (len(units),), config.recompute, strict=True):
            mine = [unit for unit in units[at : at + size] if layers & set(unit)]
            full |= {n for unit in mine[:count] for n in unit if n in layers}
            at += size
        return {n: FULL if n in full else NONE for n in calls}
    return {n: config.recompute.get(n, NONE) for n in calls}
