"""How long does it take to capture models of real size, and to price one from its config? Every family, no weights.

    python -m experiments.plans.capture_time [--only gemma] [--json FILE]

The configs of the catalog, and of a model that is not in it (capture_time_configs). Every row is two processes of their
own, with an empty cache: one builds the model on fake tensors and captures it, one runs `autoplan estimate` on the
config file. Aims: a capture within 3 s and 2 GB, an estimate (or a refusal) within 10 s.
"""

from __future__ import annotations

import json as text
import os
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from autoplan import catalog
from autoplan.profiler.processes import run_ranks
from autoplan.runtime.host_memory import peak_resident_bytes
from experiments.plans.capture_time_configs import NOT_IN_THE_CATALOG
from experiments.shared.measure import describe, environment, make_console, run_command, write_json

FAMILIES = (
    "bert-large deepseek-v3 falcon-7b falcon-180b gemma-3-27b gpt-oss-120b gpt3-175b llama-3.1-405b llama-4-maverick "
    "llama-4-scout mixtral-8x22b nemotron-4-340b nemotron-h-8b phi-3-medium qwen3-235b-a22b t5-11b whisper-large-v3"
).split()
CLUSTER = "64x8xh100-sxm5-80gb"
TOKENS = {"bert-large": 512, "vit-22b": 1, "whisper-large-v3": 448}  # the longest; of an image its place in the batch
USUAL_TOKENS = 2048


def configs() -> dict[str, Mapping[str, Any]]:
    """Return the config of every row."""
    known = catalog.configs()
    return {**{name: known[name]["config"] for name in FAMILIES}, **NOT_IN_THE_CATALOG}


def measure_capture(rank: int, world: int, name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Seconds of processor time (one thread) and of wall time of one capture, in a process of its own."""
    warnings.filterwarnings("ignore")
    from autoplan.capture.export import capture
    from autoplan.capture.frontend.config_file import model_from_config
    from autoplan.capture.source import _example
    from autoplan.errors import CaptureError

    torch.set_num_threads(1)
    begun, model = _now(), model_from_config(config, name)
    example = _example(model)
    built = _now()
    row: dict[str, Any] = {"build_s": _between(begun, built)}
    try:
        graph = capture(model, example)
        row |= {"params": graph.num_params, "blocks": len(graph.blocks), "calls": len(graph.calls), "refused": ""}
    except CaptureError as exc:
        row |= {"params": sum(p.numel() for p in model.parameters()), "blocks": 0, "calls": 0, "refused": str(exc)}
    row["capture_s"] = _between(built, _now())
    row["peak_rss_bytes"] = peak_resident_bytes()
    return row


def _now() -> tuple[float, float]:
    return time.process_time(), time.perf_counter()


def _between(begin: tuple[float, float], end: tuple[float, float]) -> tuple[float, float]:
    return end[0] - begin[0], end[1] - begin[1]


def measure_estimate(name: str, config: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
    """Measure `autoplan estimate` on the config file, from the start of Python, and say how it ended."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(text.dumps(config))
        tokens = str(TOKENS.get(name, USUAL_TOKENS))
        command = [sys.executable, "-m", "autoplan", "estimate", str(path), "-c", CLUSTER, "--seq", tokens]
        command += ["--gbs", "1024", "--zero", "3", "--recompute", "full"]
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "AUTOPLAN_CACHE": folder}
        before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, env=variables, check=False)
        wall, after = time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    if done.returncode not in (0, 2, 3):  # priced, refused, too big
        raise RuntimeError(f"{name}: exit code {done.returncode}\n{done.stderr[-4000:]}")
    outcome = {0: "priced", 2: "refused", 3: "too big"}[done.returncode]
    return {"estimate_s": (cpu, wall), "outcome": outcome, "message": done.stderr.strip()[-400:]}


def table_of(rows: list[dict[str, Any]], title: str) -> Table:
    """Return the results as a table."""
    table = Table(title=f"processor seconds (wall): {title}")
    for heading in ("model", "B params", "blocks", "calls", "build s", "capture s", "MB", "estimate s", "outcome"):
        table.add_column(heading, justify="left" if heading in ("model", "outcome") else "right", no_wrap=True)
    for r in rows:
        build, capture, estimate = (f"{r[n][0]:.1f} ({r[n][1]:.1f})" for n in ("build_s", "capture_s", "estimate_s"))
        counts = [str(r["blocks"]), str(r["calls"])] if r["blocks"] else ["", ""]
        megabytes = f"{r['peak_rss_bytes'] / 1e6:.0f}"
        table.add_row(
            r["model"], f"{r['params'] / 1e9:.1f}", *counts, build, capture, megabytes, estimate, r["outcome"]
        )
    return table


def main(
    only: Annotated[str, typer.Option(help="rows whose model contains this")] = "",
    limit_s: Annotated[float, typer.Option(help="give up on a process after this long")] = 300.0,
    json: Annotated[Path | None, typer.Option(help="also write the results here")] = None,
) -> None:
    """Time the capture and an estimate of every model."""
    env = {**environment(), "threads": 1}
    console, rows = make_console(), []
    for name, config in configs().items():
        if only in name:
            with console.status(name):
                found = run_ranks(measure_capture, 1, name, config, timeout_s=limit_s)[0]
                rows.append({"model": name, **found, **measure_estimate(name, config, limit_s)})
    console.print(table_of(rows, describe(env)))
    for row in rows:
        if row["message"]:
            console.print(f"{row['model']}: {row['message']}", highlight=False)
    write_json(json, "capture_time", env, rows)


if __name__ == "__main__":
    run_command(main)
