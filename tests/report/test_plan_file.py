"""A plan that was written down prices the same when it is read, and what it cannot say is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import one_line_error, run
from test_next_command import GIVEN, ONE

from autoplan.errors import PinError
from autoplan.report import commands
from autoplan.report.plan_file import read_plan_file
from autoplan.search.planner import estimate_config

PLAN = ("plan", "llama-3.2-1b", "--cluster", ONE, "--seq-len", "4k", "--global-batch-size", "64", "--pin", "tp=1")


def answer(*words: str) -> dict[str, Any]:
    result = run(*words, "--json")
    assert result.exit_code in (0, 3), result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def kept(data: object, folder: Path) -> str:
    file = folder / f"plan{len(list(folder.iterdir()))}.json"  # `run` keeps the answers of equal words
    file.write_text(json.dumps(data))
    return str(file)


@pytest.mark.parametrize(("older", "loss"), [(False, "no"), (True, "flash"), ("online", "online")])
def test_the_loss_of_an_older_file_was_a_switch(older: object, loss: str, tmp_path: Path) -> None:
    given = () if loss == "no" else ("--fused-loss", loss)
    data = answer("estimate", "llama-3.2-1b", *PLAN[2:-2], "--tp", "1", *given)
    data["request"]["fused_loss"] = older
    if given:
        data["asked"]["fused_loss"] = older
    result = run("estimate", kept(data, tmp_path), "--json")
    assert json.loads(result.stdout)["request"]["fused_loss"] == loss and "fused_loss" not in result.stderr


@pytest.mark.parametrize("name", GIVEN)
def test_an_estimate_is_read_back_to_the_last_digit(name: str, tmp_path: Path) -> None:
    request, config = GIVEN[name]
    words = commands.estimate_command(
        request.graph.name, ONE if request.cluster.num_nodes == 1 else f"2x{ONE[2:]}", request, config
    )
    first = answer(*words[1:])
    assert first["plan"].get("state_slack", 1.02) == config.state_slack
    again = answer("estimate", kept(first, tmp_path))
    assert again == first


def test_a_plan_is_priced_from_its_file(tmp_path: Path) -> None:
    first = answer(*PLAN, "--memory-risk", "0.2", "--precision", "bf16-grad16")
    file = kept(first, tmp_path)
    again = answer("estimate", file)
    assert (again["plan"], again["estimate"]) == (first["plan"], first["estimate"])
    written = read_plan_file(file)
    assert written.request.memory_risk == 0.2 and written.request.pins == {"tp": 1}
    step = estimate_config(written.request, written.config).estimate.step_time_s.mid
    assert step == first["estimate"]["step_time_s"]["mid"] and written.differences() == []
    planned = answer("plan", file)  # the task again, with its pin and its risk
    assert (planned["plan"], planned["asked"]) == (first["plan"], first["asked"])


def test_what_is_typed_overrides_the_file(tmp_path: Path) -> None:
    first = answer(*PLAN)
    file = kept(first, tmp_path)
    other = answer("estimate", file, "--tp", "2")
    assert (other["plan"]["tp"], other["plan"]["dp"], first["plan"]["dp"]) == (2, 4, 8)
    assert answer("estimate", kept(other, tmp_path), "--tp", "1")["plan"]["tp"] == 1  # also where it is the default
    more = answer("estimate", file, "--cluster", "2x" + ONE[2:], "--global-batch-size", "128")
    assert more["plan"]["dp"] == 16 and more["cluster"]["num_nodes"] == 2
    sweep = answer("whatif", file, "--vary", "nodes=1,2")
    assert [row["num_devices"] for row in sweep["rows"]] == [8, 16] and sweep["request"]["pins"] == {"tp": 1}
    pinned = answer("whatif", file, "--vary", "tp=1,2")["rows"]
    assert [row["plan"].startswith("tp2") for row in pinned] == [False, True]
    assert "leave out one" in run("whatif", file, "--pin", "tp=4", "--vary", "tp=1,2").stderr


def test_a_sweep_of_nodes_has_no_idle_ones_of_the_file(tmp_path: Path) -> None:
    """They are those that its search left idle of its own number of nodes."""
    first = answer("estimate", "llama-3.2-1b", "--cluster", "2x8xh100-sxm5-80gb@idle=1,price=2", *PLAN[4:-2])
    file = kept(first, tmp_path)
    rows = answer("whatif", file, "--vary", "nodes=2", "--tokens", "1T")["rows"]
    given = answer("whatif", file, "--vary", "nodes=2", "--vary", "idle=0,1", "--tokens", "1T")["rows"]
    assert rows[0]["usd"] == given[0]["usd"] < given[1]["usd"]


def test_what_no_longer_holds_is_said(tmp_path: Path) -> None:
    first = answer(*PLAN)
    assert "note:" not in run("estimate", kept(first, tmp_path)).stderr
    first["made_for"] |= {"parameters": 7, "cluster_figures": "0"}
    shown = run("estimate", kept(first, tmp_path)).stderr
    assert "its model had 7 parameters, now 1,235,814,400" in shown
    assert "the figures of its cluster are other ones now" in shown
    staged = answer("estimate", *PLAN[1:-2], "--pp", "2", "--recompute", "3,0", "--stages", "9,7")
    shown = run("estimate", kept(staged, tmp_path), "--pp", "4").stderr
    assert "recompute=[3, 0]" in shown and "was made for other degrees and is left out" in " ".join(shown.split())


@pytest.mark.parametrize(
    ("section", "name", "value", "said"),
    [
        ("request", "seq_len", 2048, "its request says seq_len=2048, and what was asked gives 4096, which is priced"),
        ("request", "attention", "unfused", "its request says attention=unfused"),
        ("asked", "mode", "compiled", "its request says mode=eager, and what was asked gives compiled"),
    ],
)
def test_a_request_that_is_not_what_was_asked_is_told(
    section: str, name: str, value: object, said: str, tmp_path: Path
) -> None:
    first = answer(*PLAN)
    assert "its request says" not in run("estimate", kept(first, tmp_path)).stderr
    first[section][name] = value
    file = kept(first, tmp_path)
    assert said in " ".join(run("estimate", file).stderr.split())
    assert "its request says" not in run("estimate", file, "--seq-len", "2k").stderr  # another task was asked for


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schema": 99}, "schema 99 cannot be read by this version, only 1"),
        ({"plan": None}, "holds no plan: it is the answer of 'plan'"),
        ({"asked": None}, "asked must be an object, not null"),
        ({"asked": {"model": "llama-3.2-1b"}}, "does not say for which cluster it was planned"),
        ({"plan": {"tp": 1, "pipes": 4}}, "plan: unknown choice 'pipes'"),
        ({"plan": {"tp": 3}}, "tp=3"),
        ({"plan": {"tp": "two"}}, "tp='two'"),
        ({"plan": {"tp": 10**400}}, "tp=1000"),
        ({"asked": {"model": "llama-3.2-1b", "tokens": 5}}, "asked: tokens must be a text or null, not 5"),
        ({"graph_hash": "ab", "config": {}}, "unknown section 'graph_hash'"),
    ],
)
def test_a_file_that_is_not_a_plan_is_refused_by_name(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    data = {**answer(*PLAN), **change}
    assert said in one_line_error(run("estimate", kept(data, tmp_path)), 2)


def test_what_is_no_plan_file_in_python(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{ torn")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    wrong = {"config.json": "is not JSON", "missing.json": "No such file", "deep.json": "nested too deep"}
    for file, said in wrong.items():
        with pytest.raises(PinError, match=said):
            read_plan_file(tmp_path / file)


def test_a_model_without_a_plan_file_needs_its_task() -> None:
    said = one_line_error(run("estimate", "llama-3.2-1b", "--tp", "2"), 2)
    assert "--cluster is missing, for example --cluster 8xh100; only a plan file" in said


def test_a_plan_file_that_is_not_there_is_named() -> None:
    assert "model 'missing.json': there is no such file" in one_line_error(run("explain", "missing.json"), 2)
