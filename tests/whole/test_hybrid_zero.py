"""Hybrid ZeRO: shards among neighbours, copies of them elsewhere. Float64 against one device, and what it costs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import enumeration
import pytest
from parity import (
    SEQ,
    Case,
    assert_trains_as_one_device,
    cluster_of,
    compiled,
    graph_of,
    spread_out,
)
from typer.testing import CliRunner

from autoplan.catalog import load_model
from autoplan.cli import app
from autoplan.config.parallel import ParallelConfig
from autoplan.cost_models.hardware.cluster import Cluster, Group, Level
from autoplan.cost_models.network.groups import mesh_groups
from autoplan.errors import PinError
from autoplan.program.legality import zero_replica_counts
from autoplan.report.commands import estimate_command
from autoplan.search.estimate import estimate_config
from autoplan.search.planner import search_plan
from autoplan.search.request import PlanRequest, space_of
from autoplan.sweeps.label import plan_label

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.distributed._functional_collectives.*:FutureWarning")

CASES = [
    *[Case("llama", dp=4, zero=zero, zero_replicas=2, num_micro_batches=3, labels="unequal") for zero in (1, 2, 3)],
    Case("llama-tied", dp=2, cp=2, zero=3, zero_replicas=2, num_micro_batches=2, recompute="full"),
    Case("gpt-untied", dp=2, cp=2, zero=1, zero_replicas=2),
    Case("gpt", dp=4, tp=2, zero=2, zero_replicas=2, num_micro_batches=3, prices="latency"),
    Case("llama", dp=4, pp=2, zero=3, zero_replicas=2, num_micro_batches=3, labels="unequal"),
    Case("mixtral", dp=4, zero=2, zero_replicas=2, num_micro_batches=3),
    Case("mixtral", dp=4, ep=2, zero=1, zero_replicas=2, num_micro_batches=3, labels="unequal"),  # experts: copies only
    Case("qwen3-moe", dp=4, tp=2, ep=2, etp=1, zero=3, zero_replicas=2, num_micro_batches=3),  # both
    Case("deepseek", dp=2, cp=2, tp=2, ep=2, etp=2, zero=2, zero_replicas=2, labels="unequal", recompute="full"),
    Case("mixtral", dp=2, cp=4, ep=2, zero=3, zero_replicas=2, context_method="ulysses2xring2"),
    Case("mixtral", dp=4, tp=2, etp=1, zero=2, zero_replicas=2, num_micro_batches=3),
    Case("mixtral", dp=2, cp=2, pp=2, ep=2, zero=2, zero_replicas=2, num_micro_batches=6, schedule="ZBV", virtual=2),
]


@pytest.mark.processes
@pytest.mark.parametrize("case", spread_out(CASES, 8), ids=str)
def test_training_equals_one_device(case: Case) -> None:
    assert_trains_as_one_device(case)


def test_copies_are_far_apart_and_shards_are_neighbours() -> None:
    spec = compiled(Case("llama", dp=4, tp=2, zero=2, zero_replicas=2)).spec
    assert dict(spec.axes) == {"pp": 1, "rdp": 2, "sdp": 2, "tp": 2}
    groups = mesh_groups(ParallelConfig(dp=16, cp=2, tp=4, zero_replicas=4), (("tp", 4),))
    assert groups["replicas"] == Group(8, 4) and groups["zero_replicas"] == Group(4, 32)


def request(devices: int, batch: int, pins: dict[str, Any] | None = None, **kw: Any) -> PlanRequest:
    return PlanRequest(
        graph_of("llama", 0.0), cluster_of(devices, "bandwidth"), SEQ, batch, pins or {}, precision="native", **kw
    )


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_what_it_costs(zero: int) -> None:
    """Sharded state as of the ranks that share it; less time than over all nodes where every micro-batch moves it."""

    def memory(copies: int, dp: int = 8) -> dict[str, float]:
        given = ParallelConfig(dp=dp, zero_stage=zero, num_micro_batches=2, zero_replicas=copies)
        stage = estimate_config(request(dp, 2 * dp), given).estimate.stages[0]
        return {k: q.mid for k, q in stage.memory.items()}

    assert memory(2) == memory(1, dp=4) != memory(1)
    assert memory(4) == memory(1, dp=2)
    nodes = Cluster.parse("4x8xh100-sxm5-80gb")
    seconds = {}
    for copies in (1, 4):
        given = ParallelConfig(dp=32, zero_stage=zero, num_micro_batches=2, zero_replicas=copies)
        asked = PlanRequest(load_model("llama-3.1-8b"), nodes, 1024, 64, precision="bf16")
        seconds[copies] = estimate_config(asked, given).estimate.breakdown["dp_comm"].mid
    # an all-reduce sends twice what a reduce-scatter sends: once per step (ZeRO 1) that is more than sharding over all
    assert 0 < seconds[4] < seconds[1] if zero > 1 else seconds[4] > seconds[1] > 0


def test_a_pin_is_kept_and_the_sum_over_copies_is_priced() -> None:
    pins = {"dp": 4, "zero_stage": 3, "zero_replicas": 2, "num_micro_batches": 1}
    found = search_plan(request(4, 4, pins, executed=True, memory_risk=0.5, equal_within=0.0, gap=0.0))
    assert found.plans[0].config.zero_replicas == 2
    assert "zero_replicas pinned to 2" in found.certificate.restrictions
    alone = search_plan(
        request(2, 2, {**pins, "dp": 2, "zero_replicas": 1}, executed=True, memory_risk=0.5, equal_within=0.0, gap=0.0)
    )
    assert not any("over all replicas" in text for text in alone.certificate.restrictions)  # pinned
    dp_comm = [p.plans[0].estimate.breakdown["dp_comm"].mid for p in (found, alone)]
    assert dp_comm[0] > dp_comm[1]


def test_shards_inside_a_node_are_searched() -> None:
    """Two nodes of two, with a slow link between them: a copy on each where memory allows it, equal to every plan
    priced one by one."""
    inner, outer = Level(1e-6, 1e10, "made up", size=2), Level(1e-6, 1e8, "made up")
    pins = {"tp": 1, "pp": 1, "zero_stage": 3, "num_micro_batches": 2}
    plain = enumeration.request(4, pins=pins)
    nodes = replace(plain.cluster, num_nodes=2, devices_per_node=2, link=inner, outer=(outer,))
    r = replace(plain, cluster=nodes)
    config = replace(search_plan(r).plans[0].config, zero_replicas=1, recompute="full")
    one = estimate_config(r, config).estimate
    small = replace(nodes, device=replace(nodes.device, memory_bytes=int(1.01 * one.peak_memory_bytes.mid)))
    for cluster, copies in ((nodes, 2), (small, 1)):
        r = replace(r, cluster=cluster)
        found = search_plan(r)
        assert found.plans[0].config.zero_replicas == copies
        assert found.plans[0].estimate.step_time_s.mid == pytest.approx(enumeration.brute_force(r), rel=1e-9)
    assert any("or over those in one scale-up domain" in text for text in found.certificate.restrictions)
    counts = {c.zero_replicas for c in space_of(replace(r, pins={})).candidates}
    assert counts == {1, 2}


def test_experts_inside_every_copy_are_searched() -> None:
    """The same with experts over 1, 2 or all 4 of them: only the last are beyond a copy."""
    inner, outer = Level(1e-6, 1e10, "made up", size=2), Level(1e-6, 1e8, "made up")
    pins = {"tp": 1, "pp": 1, "zero_stage": 3, "num_micro_batches": 2, "recompute": "none"}
    r = replace(enumeration.request(4, pins=pins), graph=graph_of("mixtral", 0.0))
    r = replace(r, cluster=replace(r.cluster, num_nodes=2, devices_per_node=2, link=inner, outer=(outer,)))
    plain = replace(search_plan(r).plans[0].config, ep=1, etp=1, zero_replicas=1)
    seconds = {
        (ep, copies): estimate_config(r, replace(plain, ep=ep, zero_replicas=copies)).estimate.step_time_s.mid
        for ep, copies in ((1, 1), (1, 2), (2, 1), (2, 2), (4, 1))
    }
    assert {(c.ep, c.zero_replicas) for c in space_of(r).candidates} == set(seconds)
    found = search_plan(r).plans[0]
    assert found.estimate.step_time_s.mid == pytest.approx(min(seconds.values()), rel=1e-9)
    assert (found.config.ep, found.config.zero_replicas) == min(seconds, key=seconds.__getitem__) == (2, 2)


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        ({"dp": 4, "zero_replicas": 3}, r"pin zero_replicas=3 .*divide"),
        ({"dp": 4, "zero_replicas": 4, "zero_stage": 1}, r"leave several ranks.*nearest legal: (zero_replicas=)?2"),
        ({"dp": 4, "zero_replicas": 2, "zero_stage": 0}, r"zero_replicas=2 with dp=4, zero_stage=0.*nearest legal: "),
        ({"zero_replicas": 0}, r"zero_replicas=0: must be a whole number of at least 1"),
        ({"zero_replica": 2}, r"did you mean 'zero_replicas'"),
    ],
)
def test_refused(pins: dict[str, Any], message: str) -> None:
    with pytest.raises(PinError, match=message):
        search_plan(request(4, 8, pins, executed=True))


def test_refused_with_experts_that_need_more_than_a_copy() -> None:
    asked = PlanRequest(
        graph_of("mixtral", 0.0), cluster_of(4, "bandwidth"), SEQ, 12, {"dp": 4, "ep": 4, "zero_replicas": 2}
    )
    with pytest.raises(PinError, match=r"zero_replicas=2 with ep=4: every copy .*legal: ep=2, or zero_replicas=1"):
        search_plan(asked)


def test_legal_counts() -> None:
    assert zero_replica_counts(8, 1, 1) == [1, 2, 4]
    assert zero_replica_counts(8, 2, 3) == [1, 2, 4, 8]
    assert zero_replica_counts(8, 2, 0) == zero_replica_counts(8, 1, 1, ep=8) == zero_replica_counts(1, 4, 1) == [1]
    assert zero_replica_counts(8, 1, 1, ep=2) == [1, 2, 4] and zero_replica_counts(8, 1, 1, ep=4) == [1, 2]
    with pytest.raises(PinError, match=r"leave several ranks .* this is zero_stage=0"):
        compiled(Case("llama", dp=4, zero=1, zero_replicas=4))
    with pytest.raises(PinError, match=r"with ep=4: every copy .* needs ranks for ep"):
        compiled(Case("mixtral", dp=4, ep=4, zero=1, zero_replicas=2))


def test_on_the_command_line() -> None:
    """Named in the label of a plan, and what the printed command prices again."""
    config = ParallelConfig(dp=32, zero_stage=3, num_micro_batches=2, zero_replicas=4)
    asked = PlanRequest(load_model("llama-3.1-8b"), Cluster.parse("4x8xh100-sxm5-80gb"), 1024, 64)
    assert plan_label(config) == "dp32 zero3-replicas4 mbs1 x2"
    words = estimate_command("llama-3.1-8b", "4x8xh100-sxm5-80gb", asked, config)
    result = CliRunner().invoke(app, [*words[1:], "--json"])
    assert result.exit_code in (0, 3), result.output
    assert '"zero_replicas": 4' in result.output
    wrong = CliRunner().invoke(app, [*words[1:], "--zero-replicas", "5"])
    assert wrong.exit_code == 2 and "nearest legal: zero_replicas=4 or 8" in wrong.output
