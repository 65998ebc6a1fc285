"""Sizes of runs against brute force over numbers of nodes, and against made-up step times."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from command_line import one_line_error, run
from made_up_plans import shown

from autoplan.catalog import load_model
from autoplan.config.numbers import read_days
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.errors import InfeasibleError, PinError
from autoplan.report.size import size_text
from autoplan.search.planner import PlanRequest, StoppedError, search_plan
from autoplan.sweeps.size import nodes_of, read_kinds, size, size_rows
from autoplan.sweeps.whatif import RunTask, run_of

REQUEST = PlanRequest(load_model("gpt2"), Cluster.parse("1x2xh100-sxm5-80gb@price=2"), 1024, 96, {"pp": 1, "tp": 1})
TOKENS = 20e9


def test_the_fewest_nodes_are_those_of_brute_force() -> None:
    brute: dict[int, tuple[float, float]] = {}
    for nodes in range(1, 13):
        request = replace(REQUEST, cluster=REQUEST.cluster.with_(nodes=nodes))
        try:
            best = search_plan(request).plans[0]
        except PinError:
            continue  # dp does not divide the batch
        whole = run_of(best.estimate, request, RunTask(TOKENS))
        assert whole is not None and whole.days_with_failures is not None and whole.usd_with_failures is not None
        brute[nodes] = (whole.days_with_failures.mid, whole.usd_with_failures.mid)
    assert {1, 2, 3, 4, 6, 8, 12} == set(brute)
    for deadline in (brute[6][0] * 1.001, brute[4][0] * 1.001, brute[1][0] * 2):
        found = size(REQUEST, TOKENS, deadline, seconds=600)
        assert found.fewest is not None and found.cheapest is not None
        assert found.fewest.nodes == min(n for n, (days, _) in brute.items() if days <= deadline)
        assert found.kinds[0].adjacent
        for p in found.kinds[0].points:
            if p.nodes in brute:
                assert (p.days, p.usd) == pytest.approx(brute[p.nodes])
        assert found.cheapest.usd == min(p.usd or math.inf for p in found.kinds[0].points if p.meets(deadline, None))


@dataclass(frozen=True)
class _Made:
    """What a search returns, with a made-up step time."""

    plans: tuple[Any, ...]
    request: PlanRequest
    certificate: Any = None


def made_up(step_s: Callable[[int], float]) -> tuple[Callable[[PlanRequest], _Made], list[int]]:
    """A search whose step time is a function of the devices, and the devices that it was asked for."""
    real = search_plan(REQUEST).plans[0]
    asked: list[int] = []

    def search(request: PlanRequest) -> _Made:
        devices = request.cluster.num_devices
        asked.append(devices)
        seconds = step_s(devices)
        if not seconds < math.inf:
            raise InfeasibleError("nothing fits")
        step = real.estimate.step_time_s * (seconds / real.estimate.step_time_s.mid)
        return _Made((replace(real, estimate=replace(real.estimate, step_time_s=step)),), request)

    return search, asked


FREE = replace(REQUEST, pins={}, global_batch_size=2**20)  # every number of nodes is legal for some degrees


def days_of(step_s: float) -> float:
    """The days of a run of TOKENS without failures; with few devices failures hardly matter."""
    return step_s * TOKENS / (1024 * 96) / 86400


def test_every_number_is_searched_once_and_few_are() -> None:
    search, asked = made_up(lambda devices: 64.0 / devices)
    found = size(REQUEST, TOKENS, days_of(64.0 / 16) * 1.02, search=search)
    assert found.fewest is not None and found.fewest.num_devices == 16
    assert len(asked) == len(set(asked)) <= 6 and found.kinds[0].adjacent


def test_what_does_not_fit_is_too_few() -> None:
    search, _ = made_up(lambda devices: 0.01 if devices >= 12 else math.inf)
    found = size(REQUEST, TOKENS, 30, search=search)
    assert found.fewest is not None and found.fewest.num_devices == 12
    states = {p.num_devices: p.point.status for p in found.kinds[0].points}
    assert states[12] == "ok" and states[8] == "does not fit"


def test_a_deadline_that_cannot_be_met_says_what_can() -> None:
    search, asked = made_up(lambda devices: max(4.0, 64.0 / devices))
    found = size(REQUEST, TOKENS, days_of(1.0), search=search)
    (kind,) = found.kinds
    assert found.fewest is None and kind.fewest is None
    assert kind.reason == f"the fewest days found are {kind.points[-1].days:.1f}, with {max(asked):,} devices" or (
        "the fewest days found are" in kind.reason
    )
    assert max(asked) <= 2**18 and len(asked) < 12


def test_a_budget_limits_what_meets_the_deadline() -> None:
    search, _ = made_up(lambda devices: 64.0 / devices**0.5)  # more devices are faster and cost more
    free = size(REQUEST, TOKENS, days_of(64.0), search=search)
    assert free.cheapest is not None and free.cheapest.usd is not None
    dear = size(REQUEST, TOKENS, days_of(64.0), search=search, budget_usd=0.9 * free.cheapest.usd)
    assert dear.fewest is None and dear.kinds[0].reason.startswith("in time it costs at least $")
    enough = size(REQUEST, TOKENS, days_of(64.0), search=search, budget_usd=1.01 * free.cheapest.usd)
    assert enough.fewest is not None and enough.fewest.usd == free.cheapest.usd
    unpriced = replace(REQUEST, cluster=replace(REQUEST.cluster, price=None))
    unknown = size(unpriced, TOKENS, days_of(64.0), search=search, budget_usd=1e6)
    assert unknown.fewest is None and "no price is known" in unknown.kinds[0].reason


def test_kinds_are_compared() -> None:
    search, _ = made_up(lambda devices: 64.0 / devices)
    found = size(REQUEST, TOKENS, 1.0, kinds=["h100@price=2", "gb200@price=1"], search=search)
    assert found.fewest is not None and found.cheapest is not None
    assert [k.name for k in found.kinds] == ["h100@price=2", "gb200@price=1"]
    assert found.cheapest in found.kinds[1].points
    table = size_rows(found)
    assert {row["kind"] for row in table} == {"h100@price=2", "gb200@price=1"}
    assert [row["in_time"] for row in table] == [row["days"] <= 1.0 for row in table]  # type: ignore[operator]


def test_kinds_as_people_write_them() -> None:
    assert read_kinds("h100@nic=400,price=2, gb200") == ["h100@nic=400,price=2", "gb200"]
    assert str(nodes_of("gb200")) == "1 x 4 x gb200-nvl72" and str(nodes_of("h100", 3)) == "3 x 8 x h100-sxm5-80gb"
    assert nodes_of("p5.48xlarge").num_devices == 8 and nodes_of("h100@price=2").price.usd_per_device_hour == 2  # type: ignore[union-attr]
    with pytest.raises(PinError):
        nodes_of("h1000")


def test_times_as_people_write_them() -> None:
    assert [read_days(text, "x") for text in ("30d", "36h", "2w", "1.5")] == [30, 1.5, 14, 1.5]
    for text in ("0d", "-1d", "soon", "30 years"):
        with pytest.raises(PinError, match="hours, days or weeks, for example 36h"):
            read_days(text, "--deadline")


TASK = (
    "gpt2",
    "--seq-len",
    "1k",
    "--global-batch-size",
    "64",
    "--pin",
    "pp=1,tp=1,zero_stage=1,recompute=none,offload=none",
)


def test_size_on_the_command_line() -> None:
    words = ("size", *TASK, "--tokens", "20B", "--deadline", "2d", "--devices", "h100@price=2,h100@price=3")
    data = json.loads(run(*words, "--json").stdout)
    assert data["command"] == "size" and data["fewest"]["num_devices"] == 8 and len(data["kinds"]) == 2
    assert data["fewest"]["kind"] == "h100@price=2" and data["deadline_days"] == 2
    assert data["rows"][0]["days"] == data["fewest"]["days"] and data["rows"][0]["meets"] is True
    text = run(*words).stdout
    assert " FEWEST   8 devices (1 node of h100@price=2): " in text and "fewest" in text
    assert "eager, pinned pp=1 tp=1 zero_stage=1" in " ".join(text.split())
    late = run("size", *TASK, "--tokens", "20B", "--deadline", "1h", "--cluster", "1x2xh100@price=2", "--budget", "1")
    assert late.exit_code == 3 and "NOT POSSIBLE" in late.stdout


def test_with_a_budget_the_number_below_the_fewest_is_planned() -> None:
    """8 devices are in time and too dear, 12 too slow, 16 meet both: bisecting by time alone never looks at 12."""
    steps = {16: 4.0, 12: 20.0, 8: 12.0}
    search, asked = made_up(lambda devices: steps.get(devices, 4.0 if devices > 16 else 99.0))
    at_16 = size(REQUEST, TOKENS, days_of(5.0), search=search).fewest
    assert at_16 is not None and at_16.num_devices == 16 and at_16.usd is not None
    asked.clear()
    found = size(REQUEST, TOKENS, days_of(13.0), search=search, budget_usd=1.05 * at_16.usd)
    assert found.fewest is not None and found.fewest.num_devices == 16
    assert {8, 12} <= set(asked) and found.kinds[0].adjacent
    assert "too slow or too dear" in " ".join(shown(lambda out: size_text(out, found)).split())


def test_endless_failures_rule_a_number_out() -> None:
    """What stopped no search is not said to have been stopped."""
    found = size(REQUEST, TOKENS, 1.0, assumptions={"mtbf_device_days": 0.001})
    assert found.fewest is None and all(p.is_ruled_out(1.0, None) for p in found.kinds[0].points)
    assert "searches were stopped" not in " ".join(shown(lambda out: size_text(out, found)).split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--deadline", "2d"), "--devices is missing"),
        (("--deadline", "2d", "--devices", "h100", "--no-tokens"), "--tokens is missing"),
        (("--deadline", "soon", "--devices", "h100"), "--deadline 'soon' must be a time above 0"),
        (("--deadline", "2d", "--devices", "h1000"), "h1000"),
        (("--deadline", "2d", "--devices", "h100", "--cluster", "4xa100"), "--cluster 4xa100 and --devices h100"),
        (("--deadline", "2d", "--devices", "h100", "--budget", "much"), "--budget 'much'"),
    ],
)
def test_what_is_missing_or_wrong_is_named(words: tuple[str, ...], message: str) -> None:
    rest = () if "--no-tokens" in words else ("--tokens", "20B")
    assert message in one_line_error(run("size", *TASK, *rest, *(w for w in words if w != "--no-tokens")), 2)


def test_ctrl_c_keeps_the_points_that_were_found() -> None:
    made, asked = made_up(lambda devices: 64.0 / devices)

    def search(request: PlanRequest) -> Any:
        if len(asked) == 2:
            raise KeyboardInterrupt
        return made(request)

    found = size(REQUEST, TOKENS, days_of(64.0 / 16) * 1.02, kinds=["h100@price=2", "gb200@price=1"], search=search)
    assert found.interrupted and len(found.kinds) == 1
    assert sum(p.run is not None for p in found.kinds[0].points) == 2


@pytest.mark.parametrize(("gap", "proved"), [(0.0, True), (0.2, True), (0.6, False)])
def test_a_search_that_was_stopped_proves_nothing(gap: float, proved: bool) -> None:
    """With 8 devices it takes 1.5 times the deadline: a gap of 0.6 leaves room for a plan that is in time."""
    made, _ = made_up(lambda devices: 64.0 / devices)
    real = search_plan(REQUEST)

    def search(request: PlanRequest) -> Any:
        return replace(made(request), certificate=replace(real.certificate, gap=gap, status="stopped by time limit"))

    found = size(REQUEST, TOKENS, days_of(64.0 / 12) * 1.02, search=search)
    assert found.fewest is not None and found.fewest.num_devices == 12
    assert found.kinds[0].proved is found.proved is proved


def test_the_fewest_of_all_kinds_is_proved_against_all_kinds() -> None:
    """A kind whose search of 8 devices was stopped may need fewer than the 12 of another kind, which is proved."""
    made, _ = made_up(lambda devices: 64.0 / devices)
    real = search_plan(REQUEST)

    def search(request: PlanRequest) -> Any:
        if request.cluster.device.name.startswith("gb200") and request.cluster.num_devices == 8:
            raise StoppedError("no plan was found within 30 s")
        return replace(made(request), certificate=real.certificate)

    kinds = [Cluster.parse("1x2xh100-sxm5-80gb@price=2"), Cluster.parse("1x4xgb200-nvl72@price=1")]
    found = size(REQUEST, TOKENS, days_of(64.0 / 12) * 1.02, kinds=kinds, search=search)
    assert found.fewest is not None and found.fewest.num_devices == 12
    assert [kind.proved for kind in found.kinds] == [True, False] and not found.proved
    assert "FEWEST KNOWN, not proved" in shown(lambda out: size_text(out, found))


def test_a_budget_that_no_plan_can_keep_is_proved() -> None:
    made, _ = made_up(lambda devices: 64.0 / devices)
    real = search_plan(REQUEST)

    def search(request: PlanRequest) -> Any:
        return replace(made(request), certificate=replace(real.certificate, gap=0.01))

    found = size(REQUEST, TOKENS, days_of(64.0), search=search, budget_usd=1.0)
    assert found.fewest is None and found.proved
    assert "NOT POSSIBLE with these devices" in shown(lambda out: size_text(out, found))


def test_numbers_that_are_no_power_of_two_are_planned_where_those_are_illegal() -> None:
    """dp divides 96 sequences: of 2 devices per node, 24 and 48 nodes are legal, 32 and 64 are not."""
    search, asked = made_up(lambda devices: 64.0 / devices)
    legal = {2 * n for n in range(1, 49) if 96 % (2 * n) == 0}

    def refused(request: PlanRequest) -> Any:
        if request.cluster.num_devices not in legal:
            raise PinError("dp does not divide the global batch")
        return search(request)

    for devices in (96, 48, 32):
        found = size(REQUEST, TOKENS, days_of(64.0 / devices) * 1.02, search=refused)
        assert found.fewest is not None and found.fewest.num_devices == devices and found.kinds[0].adjacent
    late = size(REQUEST, TOKENS, days_of(64.0 / 96) * 0.9, search=refused)
    assert late.fewest is None and "with 96 devices" in late.kinds[0].reason
    assert max(asked) == 96


def test_what_was_left_out_below_the_fewest_is_not_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the legal numbers between 512 devices, which are late, and 1,024, one is planned."""
    monkeypatch.setattr("autoplan.sweeps.size._MOST_BISECTED", 1)
    search, _ = made_up(lambda devices: 1e3 / devices)
    found = size(FREE, TOKENS, days_of(1e3 / 1024) * 1.02, search=search)
    assert found.fewest is not None and not found.kinds[0].adjacent and not found.proved
    text = " ".join(shown(lambda out: size_text(out, found)).split())
    assert "FEWEST KNOWN, not proved" in text and "smaller numbers that were not planned may be fast enough" in text


def test_devices_without_a_price_per_hour_are_the_cheapest() -> None:
    search, _ = made_up(lambda devices: 64.0 / devices)
    found = size(REQUEST, TOKENS, 1.0, kinds=["h100@price=2", "gb200@price=0"], search=search)
    assert found.cheapest is not None and found.cheapest.usd == 0
    assert found.cheapest in found.kinds[1].points


def test_a_deadline_that_only_the_expected_time_meets_is_told() -> None:
    """The high end of the interval of 8 devices is beyond it, that of 16 is not."""
    search, _ = made_up(lambda devices: 64.0 / devices)
    found = size(REQUEST, TOKENS, days_of(64.0 / 8) * 1.02, search=search)
    fewest, surest = found.fewest, found.surest
    assert fewest is not None and fewest.num_devices == 8 and fewest.whole_days is not None
    assert fewest.whole_days.high > found.deadline_days and not fewest.meets_surely(found.deadline_days, None)
    assert surest is not None and surest.num_devices == 16
    text = " ".join(shown(lambda out: size_text(out, found)).split())
    assert "This is as expected; the high end of the interval is " in text
    assert "of those that were planned, 16 devices (8 nodes of h100-sxm5-80gb) are the fewest" in text
    rows = {row["num_devices"]: row for row in size_rows(found)}
    assert [rows[n]["meets_surely"] for n in (8, 16)] == [False, True]
    assert rows[8]["days_low"] < rows[8]["days"] < rows[8]["days_high"]  # type: ignore[operator]
    easy = size(REQUEST, TOKENS, days_of(64.0 / 8) * 2, search=search)
    assert easy.surest is easy.fewest and "as expected" not in shown(lambda out: size_text(out, easy))
    dear = size(REQUEST, TOKENS, days_of(64.0), search=search, budget_usd=1.01 * (fewest.usd or 0.0))
    assert "meets the deadline and the budget there" in " ".join(shown(lambda out: size_text(out, dear)).split())


def test_failures_without_end_meet_no_deadline() -> None:
    """A device that fails every two minutes: a run has no bound, and so no number of devices is in time."""
    search, _ = made_up(lambda devices: 64.0 / devices)
    found = size(REQUEST, TOKENS, 30, search=search, assumptions={"mtbf_device_days": 1e-3, "restart_s": 7200})
    assert found.fewest is None and "failures may come faster than progress" in found.kinds[0].reason
    assert all(p.days is None for p in found.kinds[0].points)
    assert "failures without end" in shown(lambda out: size_text(out, found))


def test_a_batch_beyond_the_critical_one_is_told() -> None:
    search, _ = made_up(lambda devices: 64.0 / devices)
    large = replace(REQUEST, global_batch_size=96 * 1024)
    found = size(large, 1e9, 30, search=search)
    assert "is beyond the critical batch" in " ".join(shown(lambda out: size_text(out, found)).split())


def test_a_kind_has_no_number_of_nodes() -> None:
    with pytest.raises(PinError, match="the number of nodes follows from the deadline"):
        nodes_of("h100@nodes=4,price=2")
    with pytest.raises(PinError, match="this machine"):
        size(replace(REQUEST, cluster=Cluster.local(2)), TOKENS, 1.0)


def test_a_deadline_is_a_number_of_days() -> None:
    with pytest.raises(PinError, match=r"deadline_days='30d' must be a number above 0"):
        size(REQUEST, TOKENS, "30d")  # type: ignore[arg-type]
