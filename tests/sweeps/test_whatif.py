"""What-ifs: sweeps over hardware and task. Small catalog models, so that a search takes a second."""

import csv
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from command_line import PLAIN, TASK, one_line_error, run
from made_up_plans import CERTIFICATE, OWN, REQUEST, shown
from typer.testing import CliRunner

import autoplan
from autoplan.catalog import load_model
from autoplan.cli import app
from autoplan.config.kernels import Launch
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.cost_models.profile import LinkRecord, Profile, Timing
from autoplan.cost_models.quantity import Quantity, Tag
from autoplan.errors import InfeasibleError, PinError
from autoplan.report.sweep_text import whatif_text
from autoplan.search.planner import PlanRequest, StoppedError, estimate_config, search_plan
from autoplan.sweeps.whatif import Point, RunTask, points, row, whatif, whole_run


def test_whatif_is_a_table_of_plans(tmp_path: Path) -> None:
    path = tmp_path / "w.csv"
    words = ("whatif", *TASK, "--vary", "devices_per_node=2,4", "--vary", "price=1..4", "--tokens", "1T")
    result = run(*words, "--csv", str(path))
    assert result.exit_code == 0, result.output
    with path.open() as handle:
        rows = list(csv.DictReader(handle))
    assert [(r["devices_per_node"], float(r["price"])) for r in rows] == [
        (n, p) for n in ("2", "4") for p in (1.0, 2.0, 4.0)
    ]
    assert all(r["status"] == "ok" and r["plan"] for r in rows)
    assert float(rows[0]["step_time_s"]) > float(rows[3]["step_time_s"])  # 4 devices are faster than 2
    assert float(rows[2]["usd"]) == pytest.approx(4 * float(rows[0]["usd"]))
    assert float(rows[0]["usd"]) == pytest.approx(float(rows[0]["days"]) * 24 * 2)
    assert float(rows[0]["days_with_failures"]) > float(rows[0]["days"]) and float(rows[0]["kwh"]) > 0
    assert "cost" in result.stdout and rows[0]["plan"].split()[0] in result.stdout


@pytest.mark.parametrize("width", [60, 80, 100])
def test_the_table_cuts_no_figure_off(width: int) -> None:
    """Where a line is too short, whole columns are left out and named, or figures go on in the next line."""
    found = [Point({"nodes": n, "nic": 100.0 * n}, REQUEST, OWN, "ok", certificate=CERTIFICATE) for n in (1, 2)]
    text = shown(lambda out: whatif_text(out, REQUEST, found, RunTask(1e11)), width)
    head, _, *rows = text.split("\n\n")[1].splitlines()
    assert max(map(len, text.splitlines())) <= width
    cells = "".join("".join(rows).split())
    assert "zero2" in cells and "mbs16" in cells
    if width >= 80:
        assert all(word in rows[0].split() for word in ("100", "0.100", "dp4")), text
        assert ("low to high" in head) == (width > 80) == ("left out at this width" not in " ".join(text.split()))


def test_whatif_keeps_points_without_a_plan() -> None:
    result = run(
        "whatif", *TASK, "--vary", "devices_per_node=1", "--vary", "memory_gb=1,80", "--vary", "tp=1,3", "--json"
    )
    assert result.exit_code == 0, result.stderr
    rows = json.loads(result.stdout)["rows"]
    assert [r["status"] for r in rows] == ["does not fit", "illegal", "ok", "illegal"]
    assert rows[0]["step_time_s"] is None and "nothing fits" in rows[0]["reason"]
    assert "pin tp=3 does not divide" in rows[1]["reason"] and rows[2]["memory_margin_bytes"] > 0


def test_whatif_without_any_plan_says_so() -> None:
    result = run("whatif", *TASK, "--vary", "devices_per_node=1", "--vary", "memory_gb=1")
    assert result.exit_code == 3 and "nothing fits at any point" in result.stderr
    assert "does not fit [1]" in result.stdout and "[1] nothing fits" in result.stdout
    result = run("whatif", *TASK, "--vary", "tp=3")
    assert result.exit_code == 2 and "no point is legal" in result.stderr and "[1] pin tp=3" in result.stdout


def test_what_is_pinned_is_not_varied_without_a_word() -> None:
    line = one_line_error(run("whatif", *TASK, "--pin", "tp=2", "--vary", "tp=1,4"), 2)
    assert "tp is pinned to 2 and varied over 1, 4: leave out one" in line
    with pytest.raises(PinError, match="zero_stage is pinned"):
        whatif("gpt2", TASK[2], 1024, 16, vary={"zero_stage": [0]}, pins={"zero_stage": 1})


COMPLETE = SimpleNamespace(status="complete", gap=0.0)


def test_whatif_keeps_what_was_given_when_the_device_varies() -> None:
    base = PlanRequest(load_model("gpt2"), Cluster.parse("2x8xh100-sxm5-80gb@nic=50,price=9"), 1024, 64)
    found = list(points(base, {"device": ["h100-sxm5-80gb", "h200-sxm-141gb"], "price": [9, 1]}, fake_search))
    clusters = [p.request.cluster for p in found if p.request is not None]
    assert [c.device.name for c in clusters] == ["h100-sxm5-80gb"] * 2 + ["h200-sxm-141gb"] * 2
    assert all(c.levels[-1].bytes_per_s == 50 / 8 * 1e9 for c in clusters)
    assert [c.price.usd_per_device_hour for c in clusters if c.price is not None] == [9, 1, 9, 1]
    plain = replace(base, cluster=Cluster.parse("2x8xh100-sxm5-80gb"))
    (other,) = points(plain, {"device": ["h200-sxm-141gb"]}, fake_search)
    assert other.request is not None and other.request.cluster == Cluster.parse("2x8xh200-sxm-141gb")


def fake_search(request: PlanRequest) -> Any:
    return SimpleNamespace(plans=[None], certificate=COMPLETE, request=request)


def test_whatif_never_lets_a_profile_stand_for_other_hardware() -> None:
    links = tuple(LinkRecord("all_reduce", n, 1, 1024, Timing(1e-3, 1e-3, 1e-3, 3)) for n in (4, 16))
    profile = Profile("mine", "cuda", 16, 1, links=links)
    base = PlanRequest(load_model("gpt2"), Cluster.parse("2x8xh100-sxm5-80gb"), 1024, 64, profile=profile)

    def reasons(vary: dict[str, Sequence[object]], of: Profile = profile) -> list[str]:
        return [p.reason for p in points(replace(base, profile=of), vary, fake_search)]

    same, other = reasons({"device": ["h100-sxm5-80gb", "h200-sxm-141gb"]})
    assert not same and "profile mine was measured on h100-sxm5-80gb" in other and "point, h200-sxm-141gb;" in other
    same, other = reasons({"nic": [400, 100]})
    assert not same and "collectives" in other and "would not change with the links" in other
    assert "would not change with the links" in reasons({"devices_per_node": [2]})[0]  # 4 ranks were in one node
    # what was measured inside a node says nothing of the network, and memory, price and nodes leave times as they are
    inside = replace(profile, links=links[:1])
    assert reasons({"nic": [100]}, inside) == reasons({"nic": [100]}, replace(profile, links=())) == [""]
    assert "would not change with the links" in reasons({"scaleup": [100]}, inside)[0]
    assert reasons({"memory_gb": [40], "nodes": [2, 4], "price": [1]}) == ["", ""]


def test_whatif_labels_and_ends_a_stopped_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    base = PlanRequest(load_model("gpt2"), Cluster.parse("1x4xh100-sxm5-80gb"), 1024, 16, gap=0.0)
    real = search_plan(base)
    for status, gap in (("stopped by time limit", 0.2), ("interrupted", 1.0)):
        result = replace(real, certificate=replace(real.certificate, status=status, gap=gap))
        found = list(points(base, {"memory_gb": [80, 70]}, lambda r, result=result: result))  # type: ignore[misc]
        assert all((row(p)["search_status"], row(p)["gap"]) == (status, gap) for p in found)
        assert (len(found), found[-1].interrupted) == ((1, True) if status == "interrupted" else (2, False))

    def late(request: PlanRequest) -> Any:
        raise StoppedError("no plan was found within 1 s")

    assert [(p.status, p.reason) for p in points(base, {"tp": [1]}, late)] == [
        ("stopped", "no plan was found within 1 s")
    ]

    def stopped(request: PlanRequest) -> Any:
        if request.cluster.device.memory_bytes < 75e9:
            raise KeyboardInterrupt
        return real

    for door in ("autoplan.report.answers", "autoplan.sweeps.whatif"):  # the command line's, and Python's
        monkeypatch.setattr(f"{door}.points", lambda base, vary: points(base, vary, stopped))
    result = CliRunner().invoke(app, ["whatif", *TASK, "--vary", "memory_gb=80,70,60", "--json"], env=PLAIN)
    assert result.exit_code == 130 and "interrupted after 2 of 3 points" in result.stderr
    data = json.loads(result.stdout)
    assert data["status"] == "interrupted" and [r["status"] for r in data["rows"]] == ["ok", "interrupted"]
    assert [r["search_status"] for r in data["rows"]] == ["complete", None]
    frame = whatif("gpt2", TASK[2], 1024, 16, vary={"memory_gb": [80, 70, 60]})
    assert list(frame["status"]) == ["ok", "interrupted"]


def test_whatif_plans_each_hardware_once() -> None:
    """A price changes no plan; everything else is planned anew, with exactly what was varied."""
    seen: list[PlanRequest] = []

    def search(request: PlanRequest) -> Any:
        seen.append(request)
        if request.cluster.num_nodes == 4:
            raise InfeasibleError("too big")
        plan = SimpleNamespace(nodes=request.cluster.num_nodes)
        return SimpleNamespace(plans=[plan], certificate=COMPLETE, request=request)

    base = PlanRequest(load_model("gpt2"), Cluster.parse("2x8xh100-sxm5-80gb"), 1024, 64, {"pp": 2}, top=5)
    vary: dict[str, Sequence[object]] = {"nodes": [2, 4], "nic": [100, 400], "price": [1, 2], "seq_len": [1024, 2048]}
    found: list[Point] = list(points(base, vary, search))
    assert len(found) == 16 and len(seen) == 8
    assert {(r.cluster.num_nodes, r.cluster.levels[1].bytes_per_s * 8 / 1e9, r.seq_len) for r in seen} == {
        (n, nic, s) for n in (2, 4) for nic in (100, 400) for s in (1024, 2048)
    }
    assert all(r.pins == {"pp": 2} and r.top == 1 for r in seen)
    assert [p.status for p in found] == ["ok"] * 8 + ["does not fit"] * 8
    prices = [p.request.cluster.price for p in found if p.request is not None]
    assert [p.usd_per_device_hour for p in prices if p is not None] == [1, 1, 2, 2] * 4
    device = list(points(base, {"device": ["h200-sxm-141gb", "h201"]}, search))
    assert device[0].request is not None and device[0].request.cluster.device.name == "h200-sxm-141gb"
    assert device[1].status == "illegal" and "h200-sxm-141gb" in device[1].reason


def test_whatif_in_python_is_a_data_frame() -> None:
    assert autoplan.whatif is whatif
    graphs = {"launch": "full_graphs"}  # else the host decides: fused modules cost it more than what they replace
    frame = whatif("gpt2", TASK[2], 1024, 16, vary={"mode": ["eager", "fused"]}, tokens=1e9, options=graphs)
    assert list(frame["mode"]) == ["eager", "fused"] and list(frame["status"]) == ["ok", "ok"]
    assert frame["step_time_s"][1] <= frame["step_time_s"][0] and (frame["usd"] > 0).all()
    table = whatif("gpt2", "2xh100", 1024, 16, vary={"tp": np.array([1, 2])}, pins={"pp": 1}, tokens=np.int64(10**9))
    assert list(table["status"]) == ["ok", "ok"]
    with pytest.raises(PinError, match="vary: unknown name 'nick'; did you mean 'nic'"):
        whatif("gpt2", "local:1", 1024, 64, vary={"nick": [1]})
    with pytest.raises(PinError, match="at least one value"):
        whatif("gpt2", "local:1", 1024, 64, vary={"nic": []})


def test_time_and_money_by_hand() -> None:
    cluster = Cluster.parse("2x8xh100-sxm5-80gb@price=2")
    run_ = whole_run(Quantity(5.0, 10.0, 20.0, Tag.FITTED), 1e6, 8.64e9, cluster)
    assert (run_.days.low, run_.days.mid, run_.days.high) == pytest.approx((0.5, 1.0, 2.0))
    assert run_.usd is not None and run_.usd.mid == pytest.approx(16 * 24 * 2) and run_.usd.tag is Tag.FITTED
    assert whole_run(Quantity(1, 1, 1, Tag.FITTED), 1.0, 1.0, Cluster.local(1)).usd is None


def test_a_sweep_says_what_its_points_leave_unknown() -> None:
    """The notes of all points: a batch beyond the critical one, a price or an energy that is not known."""
    large = replace(REQUEST, global_batch_size=2**20)
    found = [Point({"global_batch_size": r.global_batch_size}, r, OWN, "ok") for r in (REQUEST, large)]
    said = " ".join(shown(lambda out: whatif_text(out, REQUEST, found, RunTask(1e9))).split())
    assert said.count("is beyond the critical batch") == 1
    long = replace(REQUEST, graph=load_model("llama-2-7b"), seq_len=8192)
    points_ = [Point({"seq_len": r.seq_len}, r, OWN, "ok") for r in (replace(long, seq_len=4096), long)]
    said = " ".join(shown(lambda out: whatif_text(out, long, points_)).split())
    assert said.count("llama-2-7b: its config names 4,096 positions, and sequences have 8,192 tokens") == 1


def test_a_point_runs_within_the_graphs_of_its_stack() -> None:
    """Long sequences on one device, where something has to be recomputed: as `plan`, the point goes without graphs."""
    base = PlanRequest(load_model("llama-3.1-8b"), Cluster.parse("1x1xgb300-nvl72"), 32768, 16)
    base = replace(base, like="megatron-bridge@25.09")
    (point,) = points(base, {"global_batch_size": [16]})
    assert point.request is not None and point.request.options.launch is Launch.ASYNC
    assert point.settings == {"launch": "async"} and str(row(point)["plan"]).endswith(" launch=async")
    again = estimate_config(point.request, point.planned.config)  # type: ignore[union-attr]
    assert again.estimate.step_time_s == point.planned.estimate.step_time_s  # type: ignore[union-attr]


def test_only_what_runs_is_swept_where_that_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[PlanRequest] = []

    def search(request: PlanRequest) -> Any:
        seen.append(request)
        raise InfeasibleError("not searched")

    for door in ("autoplan.report.answers", "autoplan.sweeps.whatif"):
        monkeypatch.setattr(f"{door}.points", lambda base, vary: points(base, vary, search))
    for more in ((), ("--runnable",)):
        CliRunner().invoke(app, ["whatif", *TASK, "--vary", "memory_gb=80", *more], env=PLAIN)
        whatif("gpt2", TASK[2], 1024, 16, vary={"memory_gb": [80]}, runnable=bool(more))
    assert [r.executed for r in seen] == [False, False, True, True]


def test_a_run_of_less_than_a_step_is_told() -> None:
    """`--tokens 15` where 15T was meant."""
    cluster, step = Cluster.parse("2x8xh100-sxm5-80gb"), Quantity(5.0, 10.0, 20.0, Tag.FITTED)
    assert "15 tokens are less than one step, which has 1 M tokens" in whole_run(step, 1e6, 15, cluster).notes
    assert not any("one step" in note for note in whole_run(step, 1e6, 1e6, cluster).notes)
