"""A trace of torch.profiler beside a plan: terms that add up to the step, on the CPU and on a GPU."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import one_line_error, run
from torch.profiler import ProfilerActivity, profile, schedule

from autoplan.errors import PinError
from autoplan.plans.record import Plan
from autoplan.report.traced import compare_trace, is_trace, read_trace, step_terms, without

TASK = ("gpt2", "--cluster", "1x4xh100-sxm5-80gb", "--seq-len", "1k", "--global-batch-size", "16", "--dp", "4")


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    path.write_text(run("estimate", *TASK, "--json").stdout)
    return path


def event(cat: str, name: str, start_ms: float, end_ms: float, tid: int = 1) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "pid": 9,
        "tid": tid,
        "ts": start_ms * 1e3,
        "dur": (end_ms - start_ms) * 1e3,
    }


def written(path: Path, events: list[dict[str, Any]]) -> Path:
    text = json.dumps({"traceEvents": events, "distributedInfo": {"rank": 2, "world_size": 4}})
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


ON_CPU = [
    event("user_annotation", "ProfilerStep#5", 0, 100),
    event("cpu_op", "aten::linear", 10, 40),
    event("cpu_op", "aten::addmm", 12, 30),  # inside it: counts once
    event("cpu_op", "AllReduceBackward", 40, 60, tid=2),
    event("cpu_op", "_c10d_functional::wait_tensor", 45, 60, tid=2),  # inside it: waits
    event("user_annotation", "gloo:all_reduce", 35, 58, tid=3),  # 35 to 45 beside computation
    event("user_annotation", "Optimizer.step#SGD.step", 70, 80),
    event("cpu_op", "aten::add_", 71, 79),
    event("cpu_op", "aten::outside", 200, 300),
]
ON_GPU = [
    event("user_annotation", "ProfilerStep#1", 0, 1),
    event("gpu_user_annotation", "ProfilerStep#1", 0, 50),
    event("gpu_user_annotation", "ProfilerStep#2", 50, 100),
    event("cpu_op", "aten::mm", 0, 100),
    event("kernel", "sm90_gemm", 0, 20),
    event("kernel", "ncclDevKernel_AllReduce_Sum_f32", 10, 30, tid=2),
    event("gpu_memcpy", "Memcpy HtoD", 60, 65),
    event("kernel", "multi_tensor_apply", 90, 95),
    event("gpu_user_annotation", "Optimizer.step#AdamW.step", 88, 96),
]


def test_terms_add_up_to_the_step(tmp_path: Path) -> None:
    (row,) = step_terms(read_trace(written(tmp_path / "trace.json", ON_CPU)))
    assert row == pytest.approx(
        {"step_s": 0.1, "compute_s": 0.035, "comm_s": 0.013, "optimizer_s": 0.01, "rest_s": 0.042}
    )
    one, two = step_terms(read_trace(written(tmp_path / "trace.json.gz", ON_GPU)))
    assert one == pytest.approx({"step_s": 0.05, "compute_s": 0.02, "comm_s": 0.01, "optimizer_s": 0.0, "rest_s": 0.02})
    assert two == pytest.approx(
        {"step_s": 0.05, "compute_s": 0.005, "comm_s": 0.0, "optimizer_s": 0.008, "rest_s": 0.037}
    )


def test_parts_that_nothing_covers() -> None:
    assert without([(0, 10), (20, 30)], [(2, 4), (8, 22), (29, 40)]) == [(0, 2), (4, 8), (22, 29)]


def test_a_plan_beside_a_trace(plan: Path, tmp_path: Path) -> None:
    """The predicted terms add up too; the other figures of the trace stand beside them, and both as one trace."""
    made, trace = Plan.read(plan), written(tmp_path / "trace.json", ON_CPU)
    found = compare_trace(made, trace)
    by_name = {f.name: f for f in found.figures}
    step, *terms = found.figures
    assert made.estimate is not None
    assert (
        sum(f.predicted for f in terms) == pytest.approx(step.predicted) == pytest.approx(made.estimate.step_time_s.mid)
    )
    assert sum(f.measured for f in terms) == pytest.approx(step.measured) == pytest.approx(0.1)
    assert by_name["comm_s"].predicted == made.estimate.breakdown["dp_comm"].mid
    assert found.notes == ("the trace is one rank's (rank 2)", *found.unlike)
    assert found.unlike == ("the steps ran on cpu, the plan is for h100-sxm5-80gb",)
    done = run("compare", str(plan), str(trace), "--timeline", str(tmp_path / "both.json"))
    assert done.exit_code == 0 and "exposed comm, s" in done.stdout, done.output
    events = json.loads((tmp_path / "both.json").read_text())["traceEvents"]
    measured = [e for e in events if e["pid"] == 1 and e["ph"] == "X"]
    assert {e["name"] for e in measured} == {"compute", "collectives", "optimizer"}
    assert all(e["ts"] >= 0 and e["ts"] + e["dur"] <= 100_001 for e in measured)
    assert any(e["pid"] == 0 and e["ph"] == "X" for e in events)
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {"predicted", "measured, rank 2"}


def test_a_trace_of_the_profiler(tmp_path: Path) -> None:
    model = torch.nn.Linear(64, 64)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with profile(
        activities=[ProfilerActivity.CPU], schedule=schedule(wait=0, warmup=1, active=2, repeat=1)
    ) as profiler:
        for _ in range(3):
            model(torch.ones(8, 64)).sum().backward()
            sgd.step()
            profiler.step()
    path = tmp_path / "trace.json"
    profiler.export_chrome_trace(str(path))
    rows = step_terms(read_trace(path))
    assert is_trace(path) and len(rows) == 2
    assert all(row["compute_s"] > 0 and row["optimizer_s"] > 0 and row["comm_s"] == 0 for row in rows)
    assert all(row["rest_s"] >= 0 for row in rows)


def test_what_is_no_trace_is_refused(plan: Path, tmp_path: Path) -> None:
    """Negative: no steps, no trace, no file, and a plan without an estimate is said by the comparison of logs alike."""
    with pytest.raises(
        PinError, match=r"has no steps \(ProfilerStep#N\): call prof\.step\(\).*give the profiler a schedule"
    ):
        read_trace(written(tmp_path / "trace.json", ON_CPU[1:]))
    other = tmp_path / "other.json"
    other.write_text("{}")
    assert "neither a log of autoplan.StepLog nor a trace" in one_line_error(run("compare", str(plan), str(other)), 2)
    assert "No such file" in one_line_error(run("compare", str(plan), str(tmp_path / "none.json")), 2)


@pytest.mark.parametrize(
    "changed", [{"name": None}, {"ts": "1"}, {"ts": None}, {"dur": None}, {"dur": float("nan")}], ids=str
)
def test_a_damaged_event_is_named(plan: Path, changed: dict[str, Any], tmp_path: Path) -> None:
    bad = {name: value for name, value in {**ON_CPU[1], **changed}.items() if value is not None}
    file = written(tmp_path / "trace.json", [ON_CPU[0], bad])
    with pytest.raises(PinError, match=r"trace\.json: the event .* has no name, or no time and duration"):
        compare_trace(Plan.read(plan), file)


def test_a_file_that_cannot_be_unpacked_is_named(plan: Path, tmp_path: Path) -> None:
    (tmp_path / "trace.json.gz").write_bytes(b"none")
    with pytest.raises(
        PinError, match=r"trace\.json\.gz cannot be unpacked: .*; give the file that the profiler wrote"
    ):
        compare_trace(Plan.read(plan), tmp_path / "trace.json.gz")
