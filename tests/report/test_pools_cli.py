"""`autoplan pools`: text at 80 columns, JSON with the same figures, pins that `plan` takes, and clear refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from typer.testing import CliRunner

from autoplan.catalog import load_model
from autoplan.cli import app
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.plans.record import recompute_of_calls
from autoplan.report.pools import pins_of
from autoplan.search.planner import PlanRequest, search_plan
from autoplan.search.pools import search_pools

TASK = (
    "pools",
    "gpt2",
    "--pool",
    "1x4xh100",
    "--pool",
    "1x4xa100-80gb",
    "--seq-len",
    "1k",
    "--gbs",
    "64",
    "--no-alone",
)
PINS = ("--pin", "tp=1", "--pin", "micro_batch_size=4", "--pin", "zero_stage=1")


def run(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, words, env={"COLUMNS": "80", "NO_COLOR": "1", "TERM": "dumb"})
    return result.exit_code, result.output


def test_one_screen_says_the_stages_of_both_pools() -> None:
    code, said = run(*TASK, *PINS)
    assert code == 0
    assert max(map(len, said.splitlines())) <= 80
    assert "h100-sxm5-80gb" in said and "a100-sxm4-80gb" in said and "equally many layers" in said
    assert "Pins of parallelize: {'" in said and "all decided" in said


def test_json_has_the_same_plan() -> None:
    code, said = run(*TASK, *PINS, "--json")
    data = json.loads(said)
    plan = data["plan"]
    assert code == 0 and data["command"] == "pools" and len(data["pools"]) == 2 and "cluster" not in data
    assert sum(plan["stages"]) == 12 == sum(s["num_layers"] for s in plan["per_stage"])
    assert plan["pp"] == len(plan["pools"]) == len(plan["per_stage"])
    assert plan["step_time_s"]["mid"] <= data["equal_layers"]["step_time_s"]["mid"]
    assert data["certificate"]["num_open"] == 0 and data["alone"] == []


def test_the_pins_leave_nothing_to_choose() -> None:
    """A search with them has one candidate, the plan; also where it recomputes some layers of a stage."""
    pins = {"tp": 1, "micro_batch_size": 1, "zero_stage": 1, "dp": 2}
    requests = [
        PlanRequest(load_model("gpt2"), Cluster.parse(text), 1024, 64, pins) for text in ("1x4xh100", "1x4xa100-80gb")
    ]
    best = search_pools(requests).best
    whole = replace(requests[0], cluster=Cluster.parse("1x8xh100"))
    layers = best.config.stages
    assert layers is not None
    for recompute in (best.config.recompute, (1, *(0,) * (len(layers) - 2), layers[-1])):
        plan = replace(best, config=replace(best.config, recompute=recompute))
        found = search_plan(replace(whole, pins=pins_of(plan, whole.graph)))
        assert found.certificate.considered == 1
        config = found.plans[0].config
        assert replace(config, recompute=plan.config.recompute) == plan.config
        assert recompute_of_calls(whole.graph, config) == recompute_of_calls(whole.graph, plan.config)


def test_a_whole_run_is_no_question_of_pools() -> None:
    """What would have no effect is refused, not taken in silence."""
    code, said = run(*TASK, "--tokens", "1B")
    assert code == 2 and "No such option: --tokens" in said


def test_refusals_name_the_value() -> None:
    assert (
        run(*TASK[:4], "--seq-len", "1k", "--gbs", "64")[1]
        .strip()
        .startswith("error: the number of pools, 1, must be from 2")
    )
    code, said = run(*TASK, "--cluster", "4xh100")
    assert code == 2 and "--cluster 4xh100: give every pool with --pool instead" in said
    code, said = run(*TASK, "--pin", "pp=4")
    assert code == 2 and "pp=4 cannot be pinned over pools" in said
    code, said = run("pools", "gpt2", "--pool", "1x4xh100", "--pool", "1x4xnothing", "--seq-len", "1k", "--gbs", "64")
    assert code == 2 and "nothing" in said


def test_the_cluster_of_a_plan_file_is_not_one_that_was_typed(tmp_path: Path) -> None:
    code, said = run("plan", "gpt2", "--cluster", "4xh100", "--seq-len", "1k", "--gbs", "64", *PINS, "--json")
    assert code == 0
    (tmp_path / "plan.json").write_text(said)
    code, said = run("pools", str(tmp_path / "plan.json"), *TASK[2:6], "--no-alone")
    assert code == 0 and "a100-sxm4-80gb" in said, said
