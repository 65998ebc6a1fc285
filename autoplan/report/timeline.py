"""The predicted step as Chrome trace events, for chrome://tracing and ui.perfetto.dev: a row per pipeline rank.

    write(estimate, Path("step.json"))      # an Estimate made with its events: `estimate_config(...).estimate`

Format: "Trace Event Format", Google 2016: complete events (`ph: X`) and names of rows (`ph: M`), in microseconds.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from autoplan.cost_models.time.estimate import Estimate
from autoplan.report.files import write_text

_MICROSECONDS = 1e6


def trace(estimate: Estimate | None) -> dict[str, Any]:
    """Return every action of every rank as an event, and last for each rank the time after the pipeline.

    Event names are torch's (chunk, kind, micro-batch: `3F0`), categories are the kinds. Without an estimate or its
    events the trace is empty.
    """
    events: list[dict[str, Any]] = []
    if estimate is None:
        return {"traceEvents": events, "displayTimeUnit": "ms"}
    ends: dict[int, float] = {}
    for e in estimate.events:
        name = f"{e.chunk}{e.kind.value}{e.micro_batch}"
        args = {"chunk": e.chunk, "micro_batch": e.micro_batch}
        events.append(_event(name, e.kind.name.lower(), e.rank, e.start_s, e.end_s, args))
        ends[e.rank] = max(ends.get(e.rank, 0.0), e.end_s)
    step_s = estimate.step_time_s.mid
    for rank, end_s in sorted(ends.items()):
        events.append(_event("reductions, optimizer, waiting", "rest", rank, end_s, max(end_s, step_s), {}))
        row = {"name": f"pipeline rank {rank}"}
        events.append({"ph": "M", "name": "thread_name", "pid": 0, "tid": rank, "args": row})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write(estimate: Estimate, path: Path) -> None:
    """Write the trace as a JSON file, whole or not at all. Raises PinError if it cannot be written."""
    write_text(path, json.dumps(trace(estimate)))


def _event(name: str, category: str, rank: int, start_s: float, end_s: float, args: dict[str, int]) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": 0,
        "tid": rank,
        "ts": _MICROSECONDS * start_s,
        "dur": _MICROSECONDS * (end_s - start_s),
        "args": args,
    }
