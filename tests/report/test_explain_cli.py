"""`autoplan explain`: sentences, tables and JSON. The text is compared at made-up prices, which nothing moves."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from command_line import TASK, one_line_error, run
from rich.console import Console

from autoplan.catalog import load_model
from autoplan.config.parallel import ParallelConfig
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.cost_models.quantity import Quantity, Tag
from autoplan.cost_models.time.estimate import Estimate, StageEstimate
from autoplan.report.explain import explain_text, versus_text
from autoplan.search.infeasible import InfeasibleReport
from autoplan.search.planner import Certificate, Planned, PlanRequest
from autoplan.sweeps.difference import difference
from autoplan.sweeps.explain import Alternative, Decision, Explanation, FrontPoint, Setting
from autoplan.sweeps.whatif import RunTask

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
REQUEST = PlanRequest(load_model("gpt2"), Cluster.parse("1x4xh100-sxm5-80gb@price=2"), 1024, 64)
CERTIFICATE = Certificate(1362, 0, 0, 1352, 10, 0, 0.0, 0.0, 1.0, (), "complete", {}, {}, {})
STOPPED = Certificate(1362, 0, 0, 0, 1, 1361, 0.25, 0.0, 1.0, (), "stopped by time limit", {}, {}, {})


def planned(config: ParallelConfig, terms: dict[str, float], memory: dict[str, float]) -> Planned:
    """A plan with a made-up price. `memory`: GB by term."""

    def exact(value: float) -> Quantity:
        return Quantity(value, value, value, Tag.ASSUMED)

    step = sum(terms.values())
    stage = StageEstimate(0, 12, 0, exact(0.1), exact(0.2), 1, {n: exact(v * 1e9) for n, v in memory.items()})
    estimate = Estimate(
        exact(step), {n: exact(v) for n, v in terms.items()}, (stage,), 65536, 65536 / step, 16384 / step, 0.04 / step,
        0.03 / step, 80e9,
    )  # fmt: skip
    return Planned(config, estimate, None)  # type: ignore[arg-type]


OWN = planned(
    ParallelConfig(dp=4, zero_stage=2, micro_batch_size=16), {"compute": 0.096, "dp_comm": 0.004}, {"activations": 20.0}
)
SPLIT = planned(
    ParallelConfig(dp=2, tp=2, zero_stage=2, micro_batch_size=32),
    {"compute": 0.090, "dp_comm": 0.002, "tp_comm": 0.03},
    {"activations": 12.0, "gathered parameters": 1.5},
)


def shown(print_it: object) -> str:
    out = io.StringIO()
    print_it(Console(file=out, width=110, highlight=False, markup=False, emoji=False))  # type: ignore[operator]
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def golden(name: str, text: str) -> None:
    assert text == (GOLDEN / name).read_text(), text


def test_an_explanation_in_words() -> None:
    def against(value: object, certificate: Certificate, other: Planned = SPLIT) -> Alternative:
        changed = difference(REQUEST, OWN, REQUEST, other)
        return Alternative(value, {"tp": value}, "ok", other, changed, certificate)

    short = InfeasibleReport(1, "activations", 95.2e9, 80e9, "pp=2", "")
    decisions = (
        Decision("tp", 1, (against(2, CERTIFICATE), Alternative(4, {}, "stopped", reason="no plan"))),
        Decision("recompute", "none", (Alternative("full", {}, "does not fit", shortage=short),)),
        Decision("stages", (4, 8), (against((6, 6), STOPPED),)),
        Decision("zero_stage", 2, (against(3, CERTIFICATE, OWN),)),
    )
    settings = (
        Setting("nic", "network", 400.0, 800.0, 0.031, 0.06, SPLIT, STOPPED),
        Setting("memory_gb", "memory", 80.0, 160.0, 0.0, 0.021, OWN, CERTIFICATE),
        Setting("launch", "launch", "async", "graphs", 0.0102),
        Setting("overlap", "overlap", frozenset(), frozenset(("tp", "pp")), 0.004),
    )
    front = (FrontPoint(80e9, OWN, CERTIFICATE), FrontPoint(40e9, SPLIT, CERTIFICATE))
    found = Explanation(REQUEST, OWN, CERTIFICATE, decisions, settings, front, "nothing fits into 24.0 GB")
    golden("explain.txt", shown(lambda out: explain_text(out, found)))


def test_two_plans_in_words() -> None:
    changed = difference(REQUEST, OWN, REQUEST, SPLIT, RunTask(1e9))
    other = (REQUEST, SPLIT, "tp=2")
    golden("explain_vs.txt", shown(lambda out: versus_text(out, REQUEST, OWN, other, changed)))


def test_explain_on_the_command_line(tmp_path: Path) -> None:
    data = json.loads(run("explain", *TASK, "--only", "tp", "--no-settings", "--json").stdout)
    assert data["schema"] == 1 and data["command"] == "explain" and data["settings"] == data["front"] == []
    (decision,) = data["decisions"]
    first = decision["alternatives"][0]
    pinned = json.loads(run("plan", *TASK, "--pin", "tp=2", "--json").stdout)
    assert first["pins"] == {"tp": 2} and first["plan"] == pinned["plan"]
    steps = first["difference"]["step_s"]
    assert steps["other"] == pinned["estimate"]["step_time_s"]["mid"] and first["cost"] > 0
    assert first["sentence"].startswith("tp 2 instead of 1 costs ")
    plan, other = tmp_path / "plan.json", tmp_path / "other.json"
    plan.write_text(run("plan", *TASK, "--json").stdout)
    other.write_text(json.dumps(pinned))
    versus = json.loads(run("explain", str(plan), "--vs", str(other), "--json").stdout)
    assert versus["plan"] == data["plan"] and versus["vs"]["plan"] == pinned["plan"]
    assert versus["difference"] == first["difference"]
    same = json.loads(run("explain", str(plan), "--vs", "tp=2", "--json").stdout)
    assert same["difference"] == first["difference"]
    assert "tp 1 -> 2" in run("explain", str(plan), "--vs", str(other)).stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--vs", "tp4"), "--vs 'tp4' is neither name=value, for example --vs tp=4, nor a plan file"),
        (("--vs", "missing.json"), "missing.json: No such file"),
        (("--vs", "tp=3"), "tp=3"),
        (("--only", "dp"), "'dp' is no choice that can be explained; known: tp, pp, cp"),
    ],
)
def test_bad_questions_are_one_line(words: tuple[str, ...], message: str) -> None:
    assert message in one_line_error(run("explain", *TASK, *words), 2)
