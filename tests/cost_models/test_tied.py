"""Parameters that two uses share: held once by a stage, summed over the stages that have them. And prices by stage of
ZeRO that another schedule, another order of questions or 4 bits must not mix up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import pytest
import torch

from autoplan.capture.export import capture
from autoplan.catalog import load_model
from autoplan.config.adapters import Adapters
from autoplan.config.parallel import Mode, ParallelConfig, RunOptions
from autoplan.config.precision import precision_of
from autoplan.cost_models.costs import Costs
from autoplan.cost_models.hardware.cluster import Cluster, Group
from autoplan.cost_models.time.blocks import op_times
from autoplan.cost_models.time.least import LeastTime
from autoplan.cost_models.time.price import Pricer
from autoplan.cost_models.time.states import StatePricer
from autoplan.cost_models.work import Workload
from autoplan.program.adapters import with_adapters
from autoplan.search.estimate import Planned, estimate_config
from autoplan.search.request import PlanRequest


class Repeated(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok, self.head = torch.nn.Embedding(128, 32), torch.nn.Linear(32, 128)
        layer = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32))
        self.layers = torch.nn.ModuleList([layer])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.tok(ids)
        for _ in range(3):
            h = h + self.layers[0](h)
        return self.head(h)


def loss_of(out: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(out.view(-1, 128), batch["labels"].view(-1))


CLUSTER = Cluster.parse("4x8xh100-sxm5-80gb@nic=50")


@cache
def planned(model: str, adapters: bool = False, pp: int = 1) -> Planned:
    graph = load_model(model)
    if adapters:
        graph = with_adapters(graph, Adapters(16, ("q_proj", "v_proj")))
    request = PlanRequest(graph, Cluster.parse(f"1x{pp}xh100-sxm5-80gb"), 2048, 8)
    return estimate_config(request, ParallelConfig(pp=pp, num_micro_batches=8))


def work_of(model: str) -> Workload:
    return planned(model).point.workload


def seconds(workload: Workload, config: ParallelConfig, mode: Mode = Mode.EAGER) -> float:
    pricer = Pricer(workload, config, Costs(CLUSTER, None, mode), precision_of("native"))
    stages = config.pp * config.virtual_stages
    each, rest = divmod(pricer.num_units, stages)
    return pricer.step_s([each + (k < rest) for k in range(stages)], [0] * stages)


@pytest.mark.parametrize(
    ("mode", "zero", "share"), [(Mode.EAGER, 0, 1), (Mode.EAGER, 2, 8), (Mode.FUSED, 0, 1), (Mode.FUSED, 1, 1)]
)
def test_the_gradient_of_a_tied_parameter_is_summed_over_its_stages(mode: Mode, zero: int, share: int) -> None:
    """What ZeRO leaves of it here; whole as Megatron does."""
    workload = work_of("llama-3.2-1b")
    (tied,) = workload.tied
    config = ParallelConfig(pp=4, dp=8, zero_stage=zero, num_micro_batches=4)
    added = seconds(workload, config, mode) - seconds(replace(workload, tied=()), config, mode)
    sent = Costs(CLUSTER).collective_s("all_reduce", tied.num_bytes / share, Group(2, 3 * 8)).mid
    assert added == pytest.approx(sent, rel=1e-6) and sent > 0


def test_a_rank_that_has_both_uses_sends_nothing() -> None:
    workload = work_of("llama-3.2-1b")
    for config in (
        ParallelConfig(pp=2, dp=8, num_micro_batches=4, schedule="ZBV", virtual_stages=2),
        ParallelConfig(dp=8, num_micro_batches=4),
    ):
        assert seconds(workload, config) == seconds(replace(workload, tied=()), config)


@pytest.mark.parametrize(
    ("mode", "zero", "dp", "pp", "copies"),
    [
        (Mode.EAGER, 0, 8, 1, 1),
        (Mode.EAGER, 1, 1, 1, 1),  # no copies to shard over
        (Mode.FUSED, 1, 8, 1, 1),
        (Mode.FUSED, 3, 8, 1, 1),
        (Mode.EAGER, 1, 8, 1, 2),  # blocks of fully_shard
        (Mode.EAGER, 0, 8, 2, 2),
    ],
)
def test_a_parameter_is_updated_once_where_it_is_held_once(
    mode: Mode, zero: int, dp: int, pp: int, copies: int
) -> None:
    workload = work_of("llama-3.2-1b")
    (tied,) = workload.tied
    config = ParallelConfig(dp=dp, pp=pp, zero_stage=zero, num_micro_batches=4)
    pricer = Pricer(workload, config, Costs(CLUSTER, None, mode), precision_of("native"))
    states, blocks = StatePricer(config, pricer.costs, pricer.precision, pricer.groups), workload.blocks.values()
    found = [p for b in blocks for p in states.updated(b) if p.num_elements == tied.param.num_elements]
    assert len(found) == copies
    sent = [states.gathered_bytes(mine) for b in blocks for _, _, mine in states.sharded(b)]
    if dp == 1:
        assert not sent
    elif zero:
        assert sum(size >= tied.num_bytes for size in sent) == (2 if zero == 3 else copies)
    else:
        assert sum(states.reduced(b).get("replicas", 0.0) >= tied.num_bytes for b in blocks) == copies


def test_a_parameter_of_two_blocks_of_one_unit_is_held_once() -> None:
    """As ALBERT calls its one layer over and over: the last call is in the block of the head."""
    ids = torch.zeros(2, 16, dtype=torch.long)
    graph = capture(Repeated(), {"ids": ids, "labels": ids.clone()}, loss_of)
    request = PlanRequest(graph, Cluster.parse("1x1xh100-sxm5-80gb"), 16, 2, precision="fp32")
    found = estimate_config(request, ParallelConfig(num_micro_batches=2))
    assert any(t.first == t.last for t in found.point.workload.tied)
    assert found.estimate.stages[0].memory["parameters"].mid == 4.0 * graph.num_params


def test_a_frozen_tied_parameter_is_held_once() -> None:
    """Adapters on a model whose head is its embedding."""
    found = planned("llama-3.2-1b", adapters=True)
    base = sum(p.num_elements for p in load_model("llama-3.2-1b").params.values())
    held = found.estimate.stages[0].memory["parameters"].mid
    assert 2.0 * base <= held < 2.02 * base  # the adapters are small


@pytest.mark.parametrize("schedule", ["Interleaved1F1B", "GPipe", "ZB-H1"])
def test_another_schedule_has_its_own_gathers(schedule: str) -> None:
    """The head is gathered again where its backward does not follow its forward."""
    workload, costs, precision = work_of("llama-3.1-8b"), Costs(CLUSTER), precision_of("bf16")
    config = ParallelConfig(dp=8, pp=4, zero_stage=3, num_micro_batches=8)
    virtual = 2 if schedule == "Interleaved1F1B" else 1
    mine = replace(config, schedule=schedule, virtual_stages=virtual)
    stages = 4 * virtual
    chunks, none = [len(workload.units) // stages] * stages, [0] * stages
    got = Pricer(workload, config, costs, precision).under(schedule, virtual)
    assert got.step_s(chunks, none) == Pricer(workload, mine, costs, precision).step_s(chunks, none)


def test_a_bound_does_not_depend_on_what_was_asked_before() -> None:
    """Whole sums are all-reduced by ZeRO 1 and scattered by ZeRO 2 and 3."""
    workload = work_of("llama-3.1-8b")
    costs, precision = Costs(CLUSTER, options=RunOptions(whole_sums=True)), precision_of("bf16")
    config = ParallelConfig(dp=32, zero_stage=1, num_micro_batches=2)

    def bounds(order: tuple[int, ...]) -> dict[int, float]:
        least = LeastTime(workload, op_times(workload, costs), costs, precision, {})
        out = {}
        for zero in order:
            of = least.of(replace(config, zero_stage=zero))
            out[zero] = float(least.counts @ (of.forward + of.backward)) * 2 + of.once + of.update
        return out

    found = bounds((1, 2, 3))
    assert found == bounds((3, 2, 1)) == bounds((2, 3, 1))
    for zero, bound in found.items():
        pricer = Pricer(workload, replace(config, zero_stage=zero), costs, precision)
        assert bound <= pricer.step_s([len(workload.units)], [0]) * (1 + 1e-9)


def test_parameters_of_4_bit_products_are_gathered_in_16() -> None:
    cluster = Cluster.parse("4x8xb200-sxm-180gb")
    request = PlanRequest(load_model("llama-3.2-1b"), cluster, 2048, 32, mode=Mode.FUSED)
    config = ParallelConfig(dp=32, zero_stage=1)

    def gathers(precision: str, narrow: bool) -> float:
        options = replace(request.options, narrow_gather=narrow)
        found = estimate_config(replace(request, precision=precision, options=options), config)
        costs = Costs(cluster, None, Mode.FUSED, options)
        pricer = Pricer(found.point.workload, config, costs, precision_of(precision))
        return sum(pricer._tables["mid"].gather)

    assert gathers("fp4", narrow=True) == gathers("fp4", narrow=False)
    assert gathers("fp8", narrow=True) < 0.8 * gathers("fp8", narrow=False)
