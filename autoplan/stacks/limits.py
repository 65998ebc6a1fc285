"""What stacks cannot of choices that they can each alone: named in their records, with a rule here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum

from autoplan.config.parallel import ParallelConfig
from autoplan.config.precision import precision_of


class Limit(StrEnum):
    """A combination of choices that a stack cannot.

    ETP_IS_TP: experts are split as everything else.
    WHOLE_EXPERTS: experts are not split.
    EP_OR_ETP: experts that are spread are not split.
    EP_WITHIN_DP: experts are spread over data-parallel ranks alone.
    EP_AND_CP_SHARD: ranks that spread experts or cut sequences shard parameters, which is ZeRO 3.
    ZERO_0_DP_ALONE: states are whole with dp as the only degree above 1.
    REPLICAS_OF_ZERO_3: only ZeRO 3 shards over some of the ranks.
    SHARDS_OVER_ALL: ZeRO shards over all ranks.
    BF16_SHARDS: states of bfloat16 parameters are sharded, which is ZeRO 1 at least.
    ZERO_0_1_IN_PIPELINES: ZeRO 2 and 3 are without a pipeline.
    FULL_PIPELINE: a step has at least as many micro-batches as stages.
    WHOLE_ROUNDS: it has a multiple of them.
    """

    ETP_IS_TP = "etp_is_tp"
    WHOLE_EXPERTS = "whole_experts"
    EP_OR_ETP = "ep_or_etp"
    EP_WITHIN_DP = "ep_within_dp"
    EP_AND_CP_SHARD = "ep_and_cp_shard"
    ZERO_0_DP_ALONE = "zero_0_dp_alone"
    REPLICAS_OF_ZERO_3 = "replicas_of_zero_3"
    SHARDS_OVER_ALL = "shards_over_all"
    BF16_SHARDS = "bf16_shards"
    ZERO_0_1_IN_PIPELINES = "zero_0_1_in_pipelines"
    FULL_PIPELINE = "full_pipeline"
    WHOLE_ROUNDS = "whole_rounds"


def _etp_is_tp(c: ParallelConfig) -> str | None:
    return f"etp={c.etp}: experts are split as everything else, with tp={c.tp}" if c.expert_tp != c.tp else None


def _whole_experts(c: ParallelConfig) -> str | None:
    return f"etp={c.expert_tp}: experts are not split" if c.expert_tp > 1 else None


def _ep_or_etp(c: ParallelConfig) -> str | None:
    return f"etp={c.expert_tp}: with ep={c.ep} experts are not split" if c.ep > 1 and c.expert_tp > 1 else None


def _ep_within_dp(c: ParallelConfig) -> str | None:
    if c.dp % c.ep == 0:
        return None
    return f"ep={c.ep}: experts are spread over data-parallel ranks, and dp={c.dp} is no multiple"


def _ep_and_cp_shard(c: ParallelConfig) -> str | None:
    if c.ep == c.cp == 1 or c.zero_stage == 3:
        return None
    return f"zero_stage={c.zero_stage}: with ep={c.ep} and cp={c.cp} it has ZeRO 3"


def _zero_0_dp_alone(c: ParallelConfig) -> str | None:
    others = [f"{name}={size}" for name in ("tp", "pp", "cp", "ep") if (size := getattr(c, name)) > 1]
    if c.zero_stage or not others or c.dp * c.cp == 1:
        return None
    return f"zero_stage=0: states are whole with dp alone, not with {', '.join(others)}"


def _replicas_of_zero_3(c: ParallelConfig) -> str | None:
    if c.zero_replicas == 1 or c.zero_stage == 3:
        return None
    return f"zero_replicas={c.zero_replicas}: only ZeRO 3 shards over fewer ranks, not ZeRO {c.zero_stage}"


def _shards_over_all(c: ParallelConfig) -> str | None:
    return f"zero_replicas={c.zero_replicas}: ZeRO shards over all ranks" if c.zero_replicas > 1 else None


def _bf16_shards(c: ParallelConfig) -> str | None:
    if c.zero_stage or c.dp * c.cp == 1:
        return None
    return "zero_stage=0: states of bfloat16 parameters are sharded"


def _zero_0_1_in_pipelines(c: ParallelConfig) -> str | None:
    if c.pp == 1 or c.zero_stage < 2:
        return None
    return f"zero_stage={c.zero_stage}: pipelines have ZeRO 0 and 1, and pp={c.pp}"


def _full_pipeline(c: ParallelConfig) -> str | None:
    if c.num_micro_batches >= c.pp:
        return None
    return f"num_micro_batches={c.num_micro_batches}: fewer than the stages of pp={c.pp}"


def _whole_rounds(c: ParallelConfig) -> str | None:
    if c.num_micro_batches % c.pp == 0:
        return None
    return f"num_micro_batches={c.num_micro_batches}: no multiple of the stages of pp={c.pp}"


_OF_EXPERTS = frozenset((Limit.ETP_IS_TP, Limit.WHOLE_EXPERTS, Limit.EP_OR_ETP))
_OF_BF16 = frozenset((Limit.BF16_SHARDS,))
_RULES: Mapping[Limit, Callable[[ParallelConfig], str | None]] = {
    Limit.ETP_IS_TP: _etp_is_tp,
    Limit.WHOLE_EXPERTS: _whole_experts,
    Limit.EP_OR_ETP: _ep_or_etp,
    Limit.EP_WITHIN_DP: _ep_within_dp,
    Limit.EP_AND_CP_SHARD: _ep_and_cp_shard,
    Limit.ZERO_0_DP_ALONE: _zero_0_dp_alone,
    Limit.REPLICAS_OF_ZERO_3: _replicas_of_zero_3,
    Limit.SHARDS_OVER_ALL: _shards_over_all,
    Limit.BF16_SHARDS: _bf16_shards,
    Limit.ZERO_0_1_IN_PIPELINES: _zero_0_1_in_pipelines,
    Limit.FULL_PIPELINE: _full_pipeline,
    Limit.WHOLE_ROUNDS: _whole_rounds,
}


def beyond(limit: Limit, config: ParallelConfig, num_experts: int, precision: str = "fp32") -> str | None:
    """Return the choice by which a configuration of a model exceeds a limit, and why; None if it does not."""
    if limit in _OF_EXPERTS and not num_experts:
        return None
    if limit in _OF_BF16 and precision_of(precision).compute != "bfloat16":
        return None
    return _RULES[limit](config)
