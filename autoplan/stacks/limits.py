"""What stacks cannot of choices that they can each alone: named in their records, with a rule here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum

from autoplan.config.parallel import ParallelConfig


class Limit(StrEnum):
    """A combination of choices that a stack cannot.

    ETP_IS_TP: experts are split as everything else.
    EP_WITHIN_DP: experts are spread over data-parallel ranks alone.
    EP_AND_CP_SHARD: ranks that spread experts or cut sequences shard parameters, which is ZeRO 3.
    ZERO_0_DP_ALONE: states are whole with dp as the only degree above 1.
    """

    ETP_IS_TP = "etp_is_tp"
    EP_WITHIN_DP = "ep_within_dp"
    EP_AND_CP_SHARD = "ep_and_cp_shard"
    ZERO_0_DP_ALONE = "zero_0_dp_alone"


def _etp_is_tp(c: ParallelConfig) -> str | None:
    return f"etp={c.etp}: experts are split as everything else, with tp={c.tp}" if c.expert_tp != c.tp else None


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


_RULES: Mapping[Limit, Callable[[ParallelConfig], str | None]] = {
    Limit.ETP_IS_TP: _etp_is_tp,
    Limit.EP_WITHIN_DP: _ep_within_dp,
    Limit.EP_AND_CP_SHARD: _ep_and_cp_shard,
    Limit.ZERO_0_DP_ALONE: _zero_0_dp_alone,
}


def beyond(limit: Limit, config: ParallelConfig) -> str | None:
    """Return the choice by which a configuration exceeds a limit, and why; None if it does not."""
    return _RULES[limit](config)
