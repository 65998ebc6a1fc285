"""How long the points of a sweep take, beside the same searches alone, and whether they find the same plans.

    python -m experiments.plans.sweep_time [--only 70b] [--sweep batches] [--alone] [--json FILE]

Every sweep runs in a process of its own without cached layouts: what-ifs over NICs, batches, nodes and devices, and the
sizes that `autoplan size` tries. Its points share what they can (autoplan/search/layout_store.py). With `--alone` every
point is searched again with nothing shared, and a plan that differs is an error. Seconds are those of the processor, of
the search alone: reading the model and its graph is not in them.
"""

from __future__ import annotations

import json as text
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from autoplan.config.planning import NO_CACHE_VARIABLE
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.search.layout_store import LayoutStore
from autoplan.search.planner import PlanRequest, SearchResult, search_plan
from autoplan.sweeps.label import plan_label
from autoplan.sweeps.size import size
from autoplan.sweeps.whatif import points
from experiments.shared.measure import describe, environment, make_console, run_command, write_json

MODELS = {  # nodes of 8 H100, and sequences of 8,192 tokens per step
    "llama-3.1-8b": (8, 512),
    "llama-3.1-70b": (128, 1024),
    "llama-3.1-405b": (2048, 2048),
    "qwen3-235b-a22b": (32, 512),
}
SIZED = {"llama-3.1-8b": (15e12, 60.0), "llama-3.1-70b": (15e12, 60.0)}  # tokens, days
Search = Callable[[PlanRequest], SearchResult]


@dataclass(frozen=True)
class Sweep:
    """One sweep: the name that varies, and its values in units of the model's own task."""

    name: str
    times: Sequence[float] = ()
    values: Sequence[Any] = ()

    def of(self, nodes: int, batch: int) -> Mapping[str, Sequence[Any]]:
        """Return what varies for a model with these nodes and sequences."""
        base = {"nodes": nodes, "global_batch_size": batch}.get(self.name, 1)
        return {self.name: self.values or [max(1, int(base * factor)) for factor in self.times]}


SWEEPS = {
    "nic": Sweep("nic", values=(400, 200, 800)),
    "batches": Sweep("global_batch_size", (1, 2, 4)),
    "fewer sequences": Sweep("global_batch_size", (1, 0.5, 0.25)),
    "nodes": Sweep("nodes", (1, 0.5, 0.25, 2)),
    "devices": Sweep("device", values=("h100-sxm5-80gb", "h200-sxm-141gb", "b200-sxm-180gb")),
}
SIZES = "sizes"


def run(model: str, sweep: str, alone: bool) -> list[dict[str, Any]]:
    """Return the points of a sweep in this process. RuntimeError if a plan differs from that of a search alone."""
    from autoplan.catalog import load_model

    nodes, batch = MODELS[model]
    request = PlanRequest(load_model(model), Cluster.parse(f"{nodes}x8xh100-sxm5-80gb"), 8192, batch)
    rows: list[dict[str, Any]] = []

    def timed(asked: PlanRequest) -> SearchResult:
        result, seconds = _timed(asked)
        own, own_s = _timed(replace(asked, layouts=LayoutStore())) if alone else (None, None)
        rows.append({"point": str(asked.cluster), "seconds": seconds, "alone_s": own_s, **_plan(result)})
        if own is not None and _plan(own) != _plan(result):
            raise RuntimeError(f"{model}, {rows[-1]}: alone {_plan(own)}")
        return result

    if sweep == SIZES:
        tokens, days = SIZED[model]
        size(request, tokens, days, search=timed)
    else:
        for point in points(request, SWEEPS[sweep].of(nodes, batch), timed):
            if point.status != "ok":
                raise RuntimeError(f"{model}, {point.varied}: {point.status}, {point.reason}")
            rows[-1]["point"] = " ".join(f"{name}={value}" for name, value in point.varied.items())
    return rows


def _timed(request: PlanRequest) -> tuple[SearchResult, float]:
    before = time.process_time()
    result = search_plan(request)
    return result, time.process_time() - before


def _plan(result: SearchResult) -> dict[str, Any]:
    best = result.plans[0]
    return {"plan": plan_label(best.config, best.estimate), "step_time_s": best.estimate.step_time_s.mid}


def in_a_process(model: str, sweep: str, alone: bool) -> list[dict[str, Any]]:
    """Run a sweep in a new process without cached layouts. RuntimeError with its output if it fails."""
    called = f"run({model!r}, {sweep!r}, {alone})"
    code = f"import json; from experiments.plans.sweep_time import run; print(json.dumps({called}))"
    env = {**os.environ, "OMP_NUM_THREADS": "1", NO_CACHE_VARIABLE: "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)
    if done.returncode:
        raise RuntimeError(f"{model}, {sweep} failed:\n{done.stderr[-4000:]}")
    rows: list[dict[str, Any]] = text.loads(done.stdout.splitlines()[-1])
    return rows


def main(
    only: Annotated[str, typer.Option(help="models whose name contains this")] = "70b",
    sweep: Annotated[str, typer.Option(help=f"sweeps whose name contains this: {', '.join((*SWEEPS, SIZES))}")] = "",
    alone: Annotated[bool, typer.Option("--alone", help="also search every point with nothing shared")] = False,
    json: Annotated[Path | None, typer.Option(help="also write the results here")] = None,
) -> None:
    """Time the points of sweeps."""
    env = environment()
    console = make_console()
    table = Table(title=f"processor seconds of the points of a sweep; {describe(env)}")
    for heading in ("model", "sweep", "point", "s", "alone, s", "step, s", "plan"):
        table.add_column(heading, justify="right" if heading.endswith("s") else "left")
    cases = []
    for model in (name for name in MODELS if only in name):
        for name in (*SWEEPS, *([SIZES] if model in SIZED else [])):
            if sweep not in name:
                continue
            with console.status(f"{model}, {name}"):
                found = in_a_process(model, name, alone)
            cases += [{"model": model, "sweep": name, **row} for row in found]
            for row in found:
                own = "" if row["alone_s"] is None else f"{row['alone_s']:.2f}"
                shown = f"{row['seconds']:.2f}", own, f"{row['step_time_s']:.3f}", row["plan"]
                table.add_row(model, name, row["point"], *shown)
    console.print(table)
    write_json(json, "sweep_time", env, cases)


if __name__ == "__main__":
    run_command(main)
