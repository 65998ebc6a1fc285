"""Nodes that are left idle where the number of devices does not divide."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from enumeration import graph
from typer.testing import CliRunner

from autoplan.catalog import load_model
from autoplan.cli import app
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.cost_models.quantity import Quantity, Tag
from autoplan.cost_models.whole_run import whole_run
from autoplan.errors import PinError
from autoplan.search.best_use import Use, best_use
from autoplan.search.idle import fewer_nodes
from autoplan.search.planner import search_plan
from autoplan.search.request import PlanRequest


def _asked(cluster: str, batch: int, model: str = "llama-3.1-8b") -> PlanRequest:
    return PlanRequest(load_model(model), Cluster.parse(cluster), 8192, batch)


def test_fewer_nodes_are_those_that_do_more() -> None:
    """1,000 devices for 32 layers and a batch of 1,024: 896 are 7 stages of 5 layers or fewer, 768 are 3 of 11."""
    found = fewer_nodes(_asked("125x8xh100-sxm5-80gb", 1024))
    assert [(c.num_devices, c.idle_devices, c.paid_devices) for c in found] == [(896, 104, 1000), (768, 232, 1000)]
    assert not fewer_nodes(_asked("125x8xh100-sxm5-80gb", 1000))  # dp takes the 125
    assert not fewer_nodes(_asked("128x8xh100-sxm5-80gb", 1024))
    assert not fewer_nodes(_asked("3x8xh100-sxm5-80gb", 512))  # 11, 11 and 10 layers
    whole = _asked("125x8xh100-sxm5-80gb", 1024)
    assert not fewer_nodes(replace(whole, executed=True))
    assert not fewer_nodes(replace(whole, cluster=found[0]))


@pytest.mark.parametrize(
    ("nodes", "batch", "model", "tried"),
    [
        (9, 256, "llama-3.2-1b", [8]),  # 16 layers: 64 devices as 9 stages of two at most count as 64 that divide
        (5, 32, "llama-3.2-1b", [4]),
        (7, 64, "llama-3.2-1b", [6, 4]),
        (11, 32, "llama-3.1-8b", [10, 8]),
        (11, 256, "llama-3.1-8b", [10, 8]),
    ],
)
def test_numbers_that_divide_are_tried_before_pipelines_of_unequal_stages(
    nodes: int, batch: int, model: str, tried: list[int]
) -> None:
    asked = PlanRequest(load_model(model), Cluster.parse(f"{nodes}x8xh100-sxm5-80gb"), 2048, batch)
    assert [c.num_nodes for c in fewer_nodes(asked)] == tried


def test_eight_nodes_are_faster_than_nine() -> None:
    """72 devices for 16 layers and a batch of 256 took 509 ms in 9 stages, 64 of them take 219."""
    words = ["plan", "llama-3.2-1b", "--cluster", "9x8xh100-sxm5-80gb", "--seq-len", "2k", "--gbs", "256", "--json"]
    found = json.loads(CliRunner().invoke(app, words).stdout)
    assert found["cluster"]["num_devices"] == 64 and found["plan"]["dp"] == 64


@pytest.mark.parametrize("nodes", [3, 5, 6])
def test_the_best_use_is_the_best_number_of_nodes(nodes: int) -> None:
    """Against a search on every number of nodes above the half, 4 layers and a batch of 8."""
    r = PlanRequest(
        graph(), Cluster.parse(f"{nodes}x1xh100-sxm5-80gb"), 64, 8, time_limit_s=1e9, equal_within=0.0, gap=0.0
    )
    steps = {}
    for n in range(nodes, nodes // 2, -1):
        try:
            steps[n] = search_plan(replace(r, cluster=r.cluster.with_(nodes=n))).fastest_s
        except PinError:
            assert n == 5  # no degree divides both
    found = best_use(r)
    tried = {nodes, *(c.num_nodes for c in fewer_nodes(r))}
    assert found.result.fastest_s == min(step for n, step in steps.items() if n in tried)
    c = found.request.cluster
    assert c.num_nodes + c.idle_nodes == nodes
    text = found.text(f"{nodes}x1xh100-sxm5-80gb")
    assert Cluster.parse(text) == c
    restrictions = found.result.certificate.restrictions
    said = f"{c.num_nodes} of {nodes} devices are used" if c.idle_nodes else "all devices are used"
    assert any(text.startswith(said) for text in restrictions)


def test_no_plan_at_all_is_the_refusal_of_all_nodes() -> None:
    r = PlanRequest(graph(), Cluster.parse("5x1xh100-sxm5-80gb"), 64, 8, pins={"dp": 3})
    with pytest.raises(PinError, match="dp=3"):
        best_use(r)


def test_all_devices_are_paid() -> None:
    used = Cluster.parse("4x8xh100-sxm5-80gb")
    paid = used.with_(idle=1)
    assert (paid.num_devices, paid.paid_devices, paid.levels) == (32, 40, used.levels)
    runs = [whole_run(Quantity(2.0, 2.0, 2.0, Tag.EXACT), 1e6, 1e12, c) for c in (used, paid)]
    usd = [run.usd.mid for run in runs if run.usd is not None]
    assert usd[1] == pytest.approx(usd[0] * 40 / 32)
    assert runs[0].kwh == runs[1].kwh
    assert any("40 devices" in note for note in runs[1].notes)
    assert paid.with_(idle=0) == used.with_(idle=0) and not paid.with_(idle=0).idle_nodes
    with pytest.raises(PinError, match="idle"):
        used.with_(idle=-1)


def test_the_command_says_which_devices_are_idle() -> None:
    """17 nodes of one device, 16 layers: one node is idle, and the plan file is one for this use."""
    words = ["plan", "llama-3.2-1b", "--cluster", "17x1xh100-sxm5-80gb", "--seq-len", "1k", "--gbs", "64"]
    words += ["--pin", "pp=1", "--pin", "tp=1", "--pin", "micro_batch_size=1"]
    shown = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
    assert shown.exit_code == 0, shown.output
    text = " ".join(shown.output.split())
    assert "1 of 17 devices idle" in text and "--cluster 17x1xh100-sxm5-80gb@nodes=16,idle=1" in text
    data = json.loads(CliRunner().invoke(app, [*words, "--json"]).output)
    assert data["cluster"]["num_devices"] == 16 and data["cluster"]["idle_devices"] == 1
    assert data["asked"]["cluster"] == "17x1xh100-sxm5-80gb@nodes=16,idle=1"


def test_a_cluster_that_names_its_idle_nodes_is_kept() -> None:
    r = _asked("16x8xh100-sxm5-80gb@idle=1", 1024)
    assert not fewer_nodes(r)
    assert Use(r, None).text("16x8xh100-sxm5-80gb@idle=1") == "16x8xh100-sxm5-80gb@idle=1"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ("2x8xh100-sxm5-80gb@nodes=17,price=2", "2x8xh100-sxm5-80gb@price=2,nodes=16,idle=1"),
        ("17x8xh100-sxm5-80gb@idle=0", "17x8xh100-sxm5-80gb@nodes=16,idle=1"),
        ("a@b/c.yaml", "a@b/c.yaml@nodes=16,idle=1"),
    ],
)
def test_the_nodes_in_use_replace_those_that_a_cluster_names(given: str, used: str) -> None:
    r = _asked("16x8xh100-sxm5-80gb@idle=1", 1024)
    assert Use(r, None).text(given) == used  # type: ignore[arg-type]


FEW = ("llama-3.2-1b", "--cluster", "17x1xh100-sxm5-80gb", "--seq-len", "1k", "--gbs", "64")
FEW_PINS = ("--pin", "pp=1", "--pin", "tp=1", "--pin", "micro_batch_size=1")


def test_all_doors_leave_the_same_nodes_idle() -> None:
    """`explain` and `fit` are about the plan that `plan` answers."""

    def answer(*words: str) -> dict[str, Any]:
        result = CliRunner().invoke(app, [*words, "--json"])
        assert result.exit_code == 0, result.output
        found: dict[str, Any] = json.loads(result.output)
        return found

    plan = answer("plan", *FEW, *FEW_PINS)
    assert plan["cluster"]["idle_devices"] == 1
    for words in (("explain", *FEW, "--only", "ep", "--no-settings"), ("fit", *FEW, "--no-ways")):
        found = answer(*words, *FEW_PINS)
        assert found["cluster"] == plan["cluster"] and found["plan"] == plan["plan"], words[0]
    versus = answer("explain", *FEW, *FEW_PINS, "--vs", "zero_stage=0")
    assert versus["cluster"] == plan["cluster"] and versus["plan"] == plan["plan"]


def test_a_sweep_that_is_proposed_pays_for_no_idle_node() -> None:
    shown = CliRunner().invoke(app, ["plan", *FEW, *FEW_PINS], env={"COLUMNS": "200"})
    (line,) = re.findall(r"autoplan whatif (.*)", shown.output.replace("\\\n", " "))
    assert "idle=" not in line and "--vary nodes=16..64" in line
