"""What a search with `--like` looks at, the target of that name can say: its framework refuses no plan."""

from __future__ import annotations

import random

import pytest

from autoplan.catalog import load_model
from autoplan.config.parallel import ParallelConfig
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.exporters.door import export_setup
from autoplan.exporters.setup import Setup
from autoplan.exporters.targets import TARGETS
from autoplan.program.legality import broken
from autoplan.search.request import PlanRequest, space_of
from autoplan.stacks.limits import Limit, beyond
from autoplan.stacks.records import stacks

STACKS = [name for name in TARGETS if name in stacks()]


@pytest.mark.parametrize("model", ["llama-3.1-8b", "mixtral-8x7b"])
@pytest.mark.parametrize("name", STACKS)
def test_every_candidate_can_be_written(name: str, model: str) -> None:
    """32 layers, which any number of stages divides: uneven stages are decided later."""
    r = PlanRequest(load_model(model), Cluster.parse("2x8xh100-sxm5-80gb"), 4096, 256, like=name)
    candidates = space_of(r).candidates
    for config in random.Random(name + model).sample(candidates, min(40, len(candidates))):
        export_setup(Setup.of(r, config), name)  # raises for what the target cannot say


def config(**degrees: object) -> ParallelConfig:
    return ParallelConfig(dp=4, tp=2, num_micro_batches=4, zero_stage=0).but(**degrees)


@pytest.mark.parametrize(
    ("limit", "within", "outside", "words"),
    [
        (Limit.ETP_IS_TP, {"ep": 2}, {"ep": 2, "etp": 1}, "etp=1: experts are split as everything else, with tp=2"),
        (Limit.WHOLE_EXPERTS, {"etp": 1}, {}, "etp=2: experts are not split"),
        (Limit.EP_OR_ETP, {"ep": 2, "etp": 1}, {"ep": 2}, "etp=2: with ep=2 experts are not split"),
        (Limit.EP_WITHIN_DP, {"ep": 4}, {"ep": 8}, "ep=8: experts are spread over data-parallel ranks, and dp=4"),
        (Limit.EP_AND_CP_SHARD, {"cp": 2, "zero_stage": 3}, {"cp": 2}, "zero_stage=0: with ep=1 and cp=2 it has"),
        (Limit.ZERO_0_DP_ALONE, {"tp": 1}, {"pp": 2}, "zero_stage=0: states are whole with dp alone, not with tp=2"),
        (Limit.REPLICAS_OF_ZERO_3, {"zero_stage": 3, "zero_replicas": 2}, {"zero_stage": 1, "zero_replicas": 2},
         "zero_replicas=2: only ZeRO 3 shards over fewer ranks, not ZeRO 1"),
        (Limit.SHARDS_OVER_ALL, {"zero_stage": 3}, {"zero_stage": 3, "zero_replicas": 2}, "zero_replicas=2: ZeRO"),
        (Limit.BF16_SHARDS, {"zero_stage": 1}, {}, "zero_stage=0: states of bfloat16 parameters are sharded"),
        (Limit.ZERO_0_1_IN_PIPELINES, {"pp": 2, "zero_stage": 1}, {"pp": 2, "zero_stage": 2},
         "zero_stage=2: pipelines have ZeRO 0 and 1, and pp=2"),
        (Limit.FULL_PIPELINE, {"pp": 4}, {"pp": 8}, "num_micro_batches=4: fewer than the stages of pp=8"),
        (Limit.WHOLE_ROUNDS, {"pp": 2}, {"pp": 3}, "num_micro_batches=4: no multiple of the stages of pp=3"),
    ],
    ids=lambda value: str(value) if isinstance(value, Limit) else "",
)  # fmt: skip
def test_a_limit_names_what_exceeds_it(
    limit: Limit, within: dict[str, object], outside: dict[str, object], words: str
) -> None:
    assert beyond(limit, config(**within), 8, "bf16") is None
    assert (beyond(limit, config(**outside), 8, "bf16") or "").startswith(words)


def test_each_limit_is_one_of_some_stack_and_legality_asks_it() -> None:
    used = {limit for each in stacks().values() for era in each.eras for limit in era.can.limits}
    assert used == set(Limit)
    assert beyond(Limit.WHOLE_EXPERTS, config(), 0) is None  # a model without experts
    assert beyond(Limit.BF16_SHARDS, config(), 0, "fp16") is None
    r = PlanRequest(load_model("mixtral-8x7b"), Cluster.parse("1x8xh100-sxm5-80gb"), 4096, 256, like="maxtext")
    spread = config(dp=4, ep=8, etp=1, zero_stage=3, num_micro_batches=64)
    found = broken(spread, r.facts, r.scope)
    assert found is not None and found.reason.endswith("as everything else, with tp=2 (maxtext@26.08)")
    assert broken(spread.but(tp=1, dp=8, num_micro_batches=32), r.facts, r.scope) is None
