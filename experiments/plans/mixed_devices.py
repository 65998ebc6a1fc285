"""One run over two kinds of devices: against each kind alone, and against equally many layers on all stages.

    python -m experiments.plans.mixed_devices [--only llama] [--time-limit 120] [--json FILE]

Predictions of `autoplan pools` from the catalog; nothing here was measured on such devices. `together` is the step if
both kinds did their own share of the batch at their own speed and nothing else cost anything: 1 / (1 / a + 1 / b).
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from autoplan import Cluster, PlanRequest, load_model
from autoplan.config.parallel import Mode
from autoplan.errors import AutoplanError
from autoplan.search.planner import search_plan
from autoplan.search.pools import search_pools
from experiments.shared.measure import describe, environment, make_console, run_command, write_json

ROWS = (
    ("llama-3.1-8b", ("2x8xh100", "2x8xa100-80gb"), 256),
    ("llama-3.1-8b", ("1x8xh200", "2x8xl40s@nic=100"), 128),
    ("mixtral-8x7b", ("4x8xh100", "4x8xa100-80gb"), 256),
    ("llama-3.1-70b", ("4x8xh100", "8x8xa100-80gb"), 512),
    ("llama-3.1-70b", ("8x8xb200", "8x8xh100"), 512),
)


def row(model: str, texts: tuple[str, ...], batch: int, limit_s: float) -> dict[str, Any]:
    """Return the steps in seconds of one task: over both pools, of each alone, and with equal stages."""
    graph = load_model(model)
    requests = [PlanRequest(graph, Cluster.parse(t), 4096, batch, mode=Mode.FUSED, time_limit_s=limit_s) for t in texts]
    began = time.process_time()
    found = search_pools(requests)
    seconds = time.process_time() - began
    alone = [_alone_s(request) for request in requests]
    rates = [1 / s for s in alone if s is not None]
    best, equal = found.best, found.equal
    return {
        "model": model,
        "pools": texts,
        "step_s": best.step_time_s.mid,
        "layers": [sum(s.num_layers for s in best.stages if s.pool == pool) for pool in range(len(texts))],
        "equal_s": None if equal is None else equal.step_time_s.mid,
        "alone_s": alone,
        "together_s": 1 / sum(rates) if rates else None,
        "processor_s": seconds,
        "num_candidates": found.num_candidates,
        "gap": found.gap,
    }


def _alone_s(request: PlanRequest) -> float | None:
    try:
        return search_plan(request).plans[0].estimate.step_time_s.mid
    except AutoplanError:  # nothing fits
        return None


def main(
    only: Annotated[str, typer.Option(help="Only models whose name contains this.")] = "",
    time_limit: Annotated[float, typer.Option(help="Seconds for each search.", min=1)] = 120.0,
    json: Annotated[Path | None, typer.Option(help="Also write the figures to this file.")] = None,
) -> None:
    """Print the table."""
    out = make_console()
    env = environment()
    out.print(describe(env))
    heads = (
        "model",
        "pools",
        "layers",
        "step s",
        "equal stages",
        "alone s",
        "together s",
        "candidates",
        "proof",
        "CPU s",
    )
    table, rows = Table(*heads), []
    for model, texts, batch in ROWS:
        if only not in model:
            continue
        found = row(model, texts, batch, time_limit)
        rows.append(found)
        table.add_row(
            model,
            " + ".join(texts),
            " + ".join(map(str, found["layers"])),
            f"{found['step_s']:.2f}",
            _seconds(found["equal_s"]),
            ", ".join(map(_seconds, found["alone_s"])),
            _seconds(found["together_s"]),
            f"{found['num_candidates']:,}",
            f"{100 * found['gap']:.0f} %",
            f"{found['processor_s']:.0f}",
        )
    out.print(table)
    write_json(json, "experiments.plans.mixed_devices", env, rows)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


if __name__ == "__main__":
    run_command(main)
