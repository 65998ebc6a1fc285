"""Seconds from `autoplan plan MODEL --cluster 8x8xh100` to its first screen, and what a search of a minute finds.

    python -m experiments.plans.answer_time [--only gemma] [--cluster 8x8xh100] [--longer 60] [--json FILE]

Every answer is one of a process of its own, cold. That nothing fits is an answer, too. The second search, with a longer
time limit, shows how much slower the plan of the first screen is than the best that is known; `--longer 0` leaves it
out.
"""

from __future__ import annotations

import json as text
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from autoplan import catalog
from autoplan.config.planning import SCREEN_LIMIT_S
from experiments.shared.measure import describe, environment, make_console, run_command, write_json

_PATIENCE_S = 120.0  # beyond the longer time limit
_NOTHING_FITS = 3  # exit code
_FLAGS = {
    "whisper-large-v3": ("--seq-len", "1500", "--target-len", "448", "--global-batch-size", "256")
}  # no usual run


def answered(model: str, cluster: str, limit_s: float, *flags: str) -> tuple[float, str | None]:
    """Return the seconds of one command, and what it printed; None if nothing fits. RuntimeError if it fails."""
    command = [sys.executable, "-m", "autoplan", "plan", model, "--cluster", cluster, "--time-limit", str(limit_s)]
    began = time.perf_counter()
    done = subprocess.run(
        [*command, *_FLAGS.get(model, ()), *flags],
        capture_output=True,
        text=True,
        timeout=limit_s + _PATIENCE_S,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    seconds = time.perf_counter() - began
    if done.returncode == _NOTHING_FITS:
        return seconds, None
    if done.returncode:
        raise RuntimeError(f"{model} on {cluster} failed:\n{done.stderr[-2000:]}")
    return seconds, done.stdout


def _searched(model: str, cluster: str, limit_s: float) -> dict[str, Any]:
    said = answered(model, cluster, limit_s, "--json")[1]
    if said is None:
        return {"step_s": None, "gap": 0.0, "status": "nothing fits"}
    data = text.loads(said)
    certificate = data["certificate"]
    step_s = data["estimate"]["step_time_s"]["mid"]
    return {"step_s": step_s, "gap": certificate["gap"], "status": certificate["status"]}


def measured(model: str, cluster: str, longer_s: float) -> dict[str, Any]:
    """Return the figures of one model; `error` if it is refused."""
    try:
        seconds, _ = answered(model, cluster, SCREEN_LIMIT_S)
        row = {"model": model, "seconds": seconds, **_searched(model, cluster, SCREEN_LIMIT_S)}
        return row | ({"longer": _searched(model, cluster, longer_s)} if longer_s else {})
    except RuntimeError as error:
        return {"model": model, "error": str(error)}


def _compared(first: dict[str, Any], later: dict[str, Any]) -> tuple[str, ...]:
    """Return the cells of two answers: the step and the gap of both, and how much slower the first one is."""
    cells = []
    for each in (first, later):
        fits = each["step_s"] is not None
        cells += [f"{each['step_s']:.4g}" if fits else "nothing fits", f"{each['gap']:.1%}" if fits else ""]
    if None in (first["step_s"], later["step_s"]):
        return (*cells, "")
    return (*cells, f"{first['step_s'] / later['step_s'] - 1:.2%}")


def main(
    only: Annotated[str, typer.Option(help="models whose name contains this")] = "",
    cluster: Annotated[str, typer.Option(help="machines")] = "8x8xh100",
    longer: Annotated[float, typer.Option(help="time limit in seconds of the second search; 0: none")] = 60.0,
    json: Annotated[Path | None, typer.Option(help="also write the results here")] = None,
) -> None:
    """Plan every model of the catalog twice."""
    env, console = environment(), make_console()
    table = Table(title=f"first screen of `autoplan plan MODEL --cluster {cluster}`; {describe(env)}")
    for heading in ("model", "seconds", "step s", "gap", f"step s of {longer:g} s", "gap", "slower"):
        table.add_column(heading, justify="left" if heading == "model" else "right", no_wrap=True)
    cases, errors = [], []
    for model in catalog.names():
        if only not in model:
            continue
        with console.status(model):
            row = measured(model, cluster, longer)
        cases.append(row)
        if "error" in row:
            errors.append(row["error"])
        else:
            table.add_row(model, f"{row['seconds']:.1f}", *_compared(row, row.get("longer", row)))
    console.print(table)
    for error in errors:
        console.print(error)
    write_json(json, "answer_time", env, cases)


if __name__ == "__main__":
    run_command(main)
