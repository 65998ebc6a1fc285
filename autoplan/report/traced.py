"""A plan beside a trace of torch.profiler (Chrome trace events): `autoplan compare PLAN TRACE`. No torch.

A step is an event ProfilerStep#N, so the loop calls `prof.step()`. Its time is cut into terms that add up to it:

    compute     some operation runs, on the GPU a kernel; on the CPU not while it only waits for a collective
    comm        a collective runs and nothing is computed: what computation does not hide
    optimizer   the optimizer's step
    rest        the remainder: bubbles, launches, Python, waiting for data

The plan's terms are added up in the same way.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoplan.cost_models.time.estimate import COMM_TERMS
from autoplan.errors import PinError
from autoplan.files import json_of
from autoplan.plans.record import Plan
from autoplan.report import timeline
from autoplan.report.files import write_text
from autoplan.report.measured import Comparison, figure_of, on_another_device
from autoplan.report.plan_file import read_plan_file
from autoplan.search.planner import estimate_config

Spans = list[tuple[float, float]]
_TERMS = ("compute", "comm", "optimizer", "rest")
_STEP, _OPTIMIZER = "ProfilerStep#", "Optimizer.step#"
_ON_GPU = frozenset(("kernel", "gpu_memcpy", "gpu_memset"))
_WAITS = ("c10d::", "_c10d_functional::", "record_param_comms")  # operations that send, or wait for what is sent


def is_trace(path: Path) -> bool:
    """Return True for a file of one JSON mapping with trace events, gzipped or not; False for a log of steps."""
    if path.suffix == ".gz":
        return True
    try:
        with path.open(encoding="utf-8") as file:
            return '"autoplan_step_log"' not in file.readline()
    except (OSError, UnicodeDecodeError):
        return False


@dataclass(frozen=True)
class StepTrace:
    """One rank's trace, in seconds.

    Attributes:
        steps: the recorded steps. compute, comm, optimizer: when an operation, a collective, the optimizer runs.
        rank, world: as torch noted them, or None. device: `cuda` or `cpu`.
    """

    steps: Spans
    compute: Spans
    comm: Spans
    optimizer: Spans
    rank: int | None
    world: int | None
    device: str


def read_trace(path: Path) -> StepTrace:
    """Return a trace. Raises PinError if the file is none, or has no steps."""
    events, about = _read(path)
    kinds = {str(e.get("cat")) for e in events}
    mark = "gpu_user_annotation" if "gpu_user_annotation" in kinds else "user_annotation"
    marks = [e for e in events if e.get("cat") == mark]
    steps = sorted(_span(e) for e in marks if e["name"].startswith(_STEP))
    if not steps:
        raise PinError(
            f"{path} has no steps (ProfilerStep#N): call prof.step() after each step of the loop, "
            "and give the profiler a schedule, such as torch.profiler.schedule(wait=1, warmup=1, active=5, repeat=1)"
        )
    optimizer = _union(_span(e) for e in marks if e["name"].startswith(_OPTIMIZER))
    compute, comm = _on_gpu(events) if kinds & _ON_GPU else _on_cpu(events)
    device = "cuda" if kinds & _ON_GPU else "cpu"
    return StepTrace(steps, compute, comm, optimizer, about.get("rank"), about.get("world_size"), device)


def _read(path: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the complete events of a trace, and what torch notes of the job."""
    try:
        data = path.read_bytes()
        found = json_of(gzip.decompress(data) if path.suffix == ".gz" else data)
        events, about = [e for e in found["traceEvents"] if e.get("ph") == "X"], found.get("distributedInfo") or {}
        damaged = next((e for e in events if not _whole(e)), None)
    except gzip.BadGzipFile as error:
        raise PinError(f"{path} cannot be unpacked: {error}; give the file that the profiler wrote") from None
    except OSError as error:
        raise PinError(f"{path}: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, EOFError, zlib.error):
        raise PinError(f"{path} is neither a log of autoplan.StepLog nor a trace of torch.profiler") from None
    if damaged is not None:
        raise PinError(
            f"{path}: the event {json.dumps(damaged)[:120]} has no name, or no time and duration in microseconds; give "
            "the file that the profiler wrote"
        )
    return events, about if isinstance(about, dict) else {}


def _whole(event: Mapping[str, Any]) -> bool:
    """Return True for an event with a name, a time and a duration."""
    numbers = [event.get(key) for key in ("ts", "dur")]
    numeric = all(isinstance(n, int | float) and not isinstance(n, bool) and math.isfinite(n) for n in numbers)
    return numeric and isinstance(event.get("name"), str)


def _on_gpu(events: Sequence[dict[str, Any]]) -> tuple[Spans, Spans]:
    """Return when kernels compute, and when those of NCCL run."""
    spans: dict[bool, Spans] = {True: [], False: []}
    for e in events:
        if e.get("cat") in _ON_GPU:
            spans["nccl" in e["name"].lower()].append(_span(e))
    return _union(spans[False]), _union(spans[True])


def _on_cpu(events: Sequence[dict[str, Any]]) -> tuple[Spans, Spans]:
    """Return when operations compute, and when collectives run."""
    comm = _union(_span(e) for e in events if str(e["name"]).startswith(("gloo:", "mpi:")))
    return _union(span for thread in _threads(events) for span in _busy(thread)), comm


def _span(event: dict[str, Any]) -> tuple[float, float]:
    start = float(event["ts"]) * 1e-6
    return start, start + max(0.0, float(event["dur"])) * 1e-6  # clocks of host and device may disagree


def _threads(events: Iterable[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    out: dict[Any, list[dict[str, Any]]] = {}
    for e in events:
        if e.get("cat") == "cpu_op":
            out.setdefault((e.get("pid"), e.get("tid")), []).append(e)
    return list(out.values())


def _busy(thread: Sequence[dict[str, Any]]) -> Spans:
    """Return when a thread of the CPU computes: inside an operation, but not inside one that waits."""
    waits = [_span(e) for e in thread if e["name"].startswith(_WAITS)]
    works = [_span(e) for e in thread if not e["name"].startswith(_WAITS)]
    return without(_union(works), _union(waits))


def _union(spans: Iterable[tuple[float, float]]) -> Spans:
    """Return the times that some span covers, in order and apart."""
    out: Spans = []
    for start, end in sorted(spans):
        if out and start <= out[-1][1]:
            out[-1] = out[-1][0], max(out[-1][1], end)
        else:
            out.append((start, end))
    return out


def without(spans: Spans, others: Spans) -> Spans:
    """Return the parts of spans that no other span covers. Both are in order and apart."""
    out: Spans = []
    for start, end in spans:
        for low, high in others:
            if high <= start or low >= end:
                continue
            if low > start:
                out.append((start, low))
            start = high
            if start >= end:
                break
        if start < end:
            out.append((start, end))
    return out


def within(spans: Spans, start: float, end: float) -> Spans:
    """Return the parts of spans inside a window."""
    return [(max(a, start), min(b, end)) for a, b in spans if b > start and a < end]


def step_terms(trace: StepTrace) -> list[dict[str, float]]:
    """Return the seconds of every step and of its terms, which add up to it."""
    rows = []
    for start, end in trace.steps:
        optimizer = within(trace.optimizer, start, end)
        compute = without(within(trace.compute, start, end), optimizer)
        comm = without(without(within(trace.comm, start, end), optimizer), compute)
        parts = {"compute_s": compute, "comm_s": comm, "optimizer_s": optimizer}
        row = {name: sum(b - a for a, b in spans) for name, spans in parts.items()}
        rows.append({"step_s": end - start, **row, "rest_s": end - start - sum(row.values())})
    return rows


def predicted_terms(plan: Plan) -> dict[str, float]:
    """Return the predicted seconds of the terms. Raises PinError for a plan without an estimate."""
    out = dict.fromkeys(_TERMS, 0.0)
    for name, seconds in plan.priced().breakdown.items():
        term = "comm" if name in COMM_TERMS else name
        term = {"recompute": "compute", "accumulate": "compute"}.get(term, term)
        out[term if term in _TERMS else "rest"] += seconds.mid
    return out


def compare_trace(plan: Plan, path: Path) -> Comparison:
    """Return a plan's prediction beside the steps of a trace, term by term.

    Raises:
        PinError: the plan has no estimate, or the file is not a trace with steps.
    """
    expected, trace = predicted_terms(plan), read_trace(path)
    assert plan.estimate is not None
    step, rows = plan.estimate.step_time_s, step_terms(trace)
    figures = [figure_of("step_s", step.mid, (step.low, step.high), rows)]
    figures += [figure_of(f"{term}_s", expected[term], None, rows) for term in _TERMS]
    whose = "the trace is one rank's" + ("" if trace.rank is None else f" (rank {trace.rank})")
    unlike = on_another_device(plan, trace.device)
    if trace.world is not None and trace.world != plan.num_devices:
        unlike = (*unlike, f"the trace is of {trace.world} ranks, the plan for {plan.num_devices} devices")
    terms = {name: q.mid for name, q in plan.estimate.breakdown.items()}
    return Comparison(plan.model, len(rows), tuple(figures), (whose, *unlike), terms, unlike)


def write_beside(plan: Path, path: Path, out: Path) -> None:
    """Write one trace with the predicted step and the first recorded one, for ui.perfetto.dev.

    The predicted step is priced again from the plan file. Raises PinError for a file that cannot be used.
    """
    known, trace = read_plan_file(plan), read_trace(path)
    events = timeline.trace(estimate_config(known.request, known.config).estimate)["traceEvents"]
    start, end = trace.steps[0]
    events += [_name("process_name", 0, 0, "predicted"), _name("process_name", 1, 0, f"measured, rank {trace.rank}")]
    for row, (name, spans) in enumerate(
        (("compute", trace.compute), ("collectives", trace.comm), ("optimizer", trace.optimizer))
    ):
        events.append(_name("thread_name", 1, row, name))
        events += [
            {"ph": "X", "name": name, "pid": 1, "tid": row, "ts": (a - start) * 1e6, "dur": (b - a) * 1e6}
            for a, b in within(spans, start, end)
        ]
    write_text(out, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def _name(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}
