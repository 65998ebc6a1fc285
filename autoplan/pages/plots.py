"""Figures of a plan in notebooks: `plan.plot.memory()`. They are those of the reports, as figures of plotly."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autoplan.errors import PinError
from autoplan.pages import EXTRA, figures


@dataclass(frozen=True)
class Plots:
    """The figures of one plan. Each is a `plotly.graph_objects.Figure`, which a notebook shows.

    Attributes:
        answer: the plan as JSON data (`Plan.to_data`).
        events: the actions of a step, as `autoplan.pages.figures.timeline` takes them; empty if they were not kept.
        candidates: this plan and others that were found with it, as `figures.candidates` takes them.

    Every method raises PinError if plotly is not installed, or if the plan does not hold what the figure shows.
    """

    answer: Mapping[str, Any]
    events: Sequence[Sequence[Any]] = ()
    candidates: Sequence[Mapping[str, Any]] = ()

    def memory(self) -> Any:
        """Draw the memory of every stage by term, against the limit of the device."""
        return _shown(figures.memory(self._estimate()))

    def step(self) -> Any:
        """Draw the step as a waterfall of its terms."""
        return _shown(figures.step(self._estimate(), {}))

    def timeline(self) -> Any:
        """Draw the pipeline of one step, a row per rank."""
        if not self.events:
            raise PinError("this plan has no events of its step: a file does not keep them; plan it again")
        return _shown(figures.timeline(self.events))

    def pareto(self) -> Any:
        """Draw the plans that were found by time and memory."""
        if len(self.candidates) < 2:
            raise PinError("this plan was searched alone; plan with top=10, or see autoplan.explain(..., front=True)")
        return _shown(figures.candidates(self.candidates, self._estimate()["memory_capacity_bytes"]))

    def mesh(self) -> Any:
        """Draw which rank is where, coloured by pipeline stage."""
        cluster, axes = self.answer.get("cluster"), self.answer.get("program", {}).get("axes")
        if cluster is None or not axes:
            raise PinError("this plan does not say its cluster or its mesh; plan it again")
        per_node, total = cluster["devices_per_node"], cluster["num_devices"]
        named = [{"name": name, "size": size} for name, size in axes]
        return _shown(figures.mesh({"axes": named, "devices_per_node": per_node, "num_devices": total}))

    def _estimate(self) -> Any:
        if "estimate" not in self.answer:
            raise PinError("this plan has no estimate: its degrees were given, not searched")
        return self.answer["estimate"]


def _shown(spec: Mapping[str, Any]) -> Any:
    """Return a figure of plotly."""
    if importlib.util.find_spec("plotly") is None:
        raise PinError(f"a figure needs plotly, which is not installed: {EXTRA}")
    return importlib.import_module("plotly.graph_objects").Figure(spec)
