"""`autoplan explain`: sentences, tables and JSON. The text is compared at made-up prices, which nothing moves."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import TASK, one_line_error, run
from made_up_plans import CERTIFICATE, OWN, REQUEST, SPLIT, STOPPED, golden, planned, shown

from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.report.explain import OtherPlan, explain_text, versus_report, versus_text
from autoplan.search.infeasible import InfeasibleReport
from autoplan.search.planner import Certificate, Planned
from autoplan.sweeps.difference import difference
from autoplan.sweeps.explain import Alternative, Decision, Explanation, FrontPoint, Setting
from autoplan.sweeps.whatif import STEP_ONLY, RunTask


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
        Decision("ep", 1, ()),
    )
    settings = (
        Setting("nic", "network", 400.0, 800.0, 0.031, 0.06, SPLIT, STOPPED),
        Setting("memory_gb", "memory", 80.0, 160.0, 0.0, 0.021, OWN, CERTIFICATE),
        Setting("launch", "launch", "async", "graphs", 0.0102),
        Setting("overlap", "overlap", frozenset(), frozenset(("tp", "pp")), 0.004),
    )
    front = (FrontPoint(80e9, OWN, None), FrontPoint(40e9, SPLIT, STOPPED))
    found = Explanation(REQUEST, OWN, CERTIFICATE, decisions, settings, front, "nothing fits into 24.0 GB")
    golden("explain.txt", shown(lambda out: explain_text(out, found)))


def test_two_plans_in_words() -> None:
    changed = difference(REQUEST, OWN, REQUEST, SPLIT, RunTask(1e9))
    other = OtherPlan(REQUEST, SPLIT, "tp=2")
    golden("explain_vs.txt", shown(lambda out: versus_text(out, REQUEST, OWN, other, changed)))


def test_what_weakens_a_comparison_is_told() -> None:
    def verdict(own: Planned, other: OtherPlan) -> str:
        found = difference(REQUEST, own, other.request, other.planned)
        assert versus_report(REQUEST, own, other, found, STEP_ONLY)["vs"]["gap"] == (
            None if other.certificate is None else other.certificate.gap
        )
        return " ".join(shown(lambda out: versus_text(out, REQUEST, own, other, found)).split())

    stopped = "; its search was stopped, the best step of this space is at most 25 % shorter."
    assert stopped in verdict(OWN, OtherPlan(REQUEST, SPLIT, "tp=2", STOPPED))
    assert "its search was stopped" not in verdict(OWN, OtherPlan(REQUEST, SPLIT, "tp=2", CERTIFICATE))
    near = planned(OWN.config, {"compute": 0.097, "dp_comm": 0.004}, {"activations": 90.0})
    said = verdict(OWN, OtherPlan(REQUEST, near, "near.json"))
    assert "costs 1.0 % more per step: computing +0.00100 s; equal within the error." in said
    assert "DOES NOT FIT: stage 0 needs 90.0 GB, 10.0 GB more than a device has" in said
    hardly = planned(OWN.config, {"compute": 0.097, "dp_comm": 0.004}, {"activations": 80.002})
    assert "stage 0 needs 80.0 GB, 2.0 MB more than a device has" in verdict(OWN, OtherPlan(REQUEST, hardly, "x.json"))
    larger = replace(REQUEST, global_batch_size=128)
    assert "equal within" not in verdict(OWN, OtherPlan(larger, near, "larger.json"))


def test_the_other_task_is_told_where_it_is_another() -> None:
    """Steps of two batches, or on two kinds of devices, are no comparison of plans alone."""
    cluster = Cluster.parse("4xh200@price=3")
    there = replace(REQUEST, cluster=cluster, global_batch_size=128, pins={"tp": 2})
    said = shown(
        lambda out: versus_text(
            out, REQUEST, OWN, OtherPlan(there, SPLIT, "other.json"), difference(REQUEST, OWN, there, SPLIT)
        )
    )
    assert "\n on 4 x h200" in said and "\n for 1,024 tokens x 128 sequences" in said and "\n model" not in said


def test_explain_on_the_command_line(tmp_path: Path) -> None:
    exact = (*TASK, "--gap", "0")  # a search of several plans ends later
    data = json.loads(run("explain", *exact, "--only", "tp", "--no-settings", "--json").stdout)
    assert data["schema"] == 1 and data["command"] == "explain" and data["settings"] == data["front"] == []
    (decision,) = data["decisions"]
    first = decision["alternatives"][0]
    pinned = json.loads(run("plan", *exact, "--pin", "tp=2", "--json").stdout)
    assert first["pins"] == {"tp": 2} and first["plan"] == pinned["plan"]
    steps = first["difference"]["step_s"]
    assert steps["other"] == pinned["estimate"]["step_time_s"]["mid"] and first["cost"] > 0
    assert first["sentence"].startswith("tp 2 instead of 1 costs ")
    plan, other = tmp_path / "plan.json", tmp_path / "other.json"
    plan.write_text(run("plan", *exact, "--json").stdout)
    other.write_text(json.dumps(pinned))
    versus = json.loads(run("explain", str(plan), "--vs", str(other), "--json").stdout)
    assert versus["plan"] == data["plan"] and versus["vs"]["plan"] == pinned["plan"]
    assert versus["difference"] == first["difference"]
    same = json.loads(run("explain", str(plan), "--vs", "tp=2", "--json").stdout)
    assert same["difference"] == first["difference"]
    assert "tp 1 -> 2" in run("explain", str(plan), "--vs", str(other)).stdout
    for pin, own in (("tp=2", "tp=1"), ("recompute=full", "recompute=none"), ("offload=optimizer", "offload=none")):
        line = one_line_error(run("explain", str(plan), "--pin", pin), 2)
        assert f"pin {pin}: the plan of {plan} has {own}; compare it with --vs {pin}" in line
    kept = run("explain", str(plan), "--pin", "recompute=none", "--only", "ep", "--no-settings").stdout
    assert "ep 1\n    no other value is legal beside the other choices of this plan" in kept


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--vs", "tp4"), "--vs 'tp4' is neither name=value, for example --vs tp=4, nor a plan file"),
        (("--vs", "missing.json"), "missing.json: No such file"),
        (("--vs", "tp=3"), "tp=3"),
        (("--vs", "tp=2", "--only", "pp"), "--only is about the choices of one plan, --vs tp=2 compares two"),
        (("--vs", "tp=2", "--every-value"), "--every-value is about"),
        (("--vs", "tp=2", "--no-settings"), "--no-settings is about"),
        (("--vs", "tp=2", "--pareto"), "--pareto is about"),
        (("--only", "dp"), "explain: unknown choice 'dp'; known: tp, pp, cp"),
    ],
)
def test_bad_questions_are_one_line(words: tuple[str, ...], message: str) -> None:
    assert message in one_line_error(run("explain", *TASK, *words), 2)


def test_a_method_of_context_parallelism_is_one_choice_in_all_its_forms(tmp_path: Path) -> None:
    """A pin that the plan has is kept; another one is refused, as for every other choice."""
    words = ("llama-3.2-1b", "--cluster", "1x4xh100-sxm5-80gb", "--seq-len", "16k", "--gbs", "4")
    pins = ("--pin", "cp=4", "--pin", "context_method=ring")
    plan = tmp_path / "plan.json"
    plan.write_text(run("plan", *words, *pins, "--json").stdout)
    assert "ring" in json.loads(plan.read_text())["plan"]["context_method"].values()
    line = one_line_error(run("explain", str(plan), "--pin", "cp=4", "--pin", "context_method=gather"), 2)
    assert f"pin context_method=gather: the plan of {plan} has context_method=ring" in line
    data = json.loads(run("explain", str(plan), "--only", "context_method", "--no-settings", "--json").stdout)
    (decision,) = data["decisions"]
    assert decision["value"] == "ring"
    assert {a["value"] for a in decision["alternatives"]} == {"gather", "ulysses"}
