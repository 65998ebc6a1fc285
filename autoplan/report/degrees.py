"""The configuration of degrees as people give them: what is left out follows from the rest. PinError says what would
work."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autoplan.cost_models.config import ParallelConfig
from autoplan.cost_models.errors import PinError
from autoplan.cost_models.schedule import SCHEDULES
from autoplan.search.offload_pins import state_offload, with_offload
from autoplan.search.pins import is_count

DEGREES = (
    "dp tp pp cp ep etp zero_stage micro_batch_size recompute virtual_stages schedule stages context_method "
    "zero_replicas offload state_slack".split()
)  # that may be given
_COUNTS = ("tp", "pp", "cp", "ep", "etp", "micro_batch_size", "virtual_stages")


def config_of(num_devices: int, global_batch_size: int, given: Mapping[str, Any]) -> ParallelConfig:
    """Left out: dp is all remaining devices, etp as tp, other degrees 1, ZeRO 1, no recompute, balanced stages, 1F1B
    (interleaved with virtual stages).

    `given` by DEGREES, None as left out. PinError for an unknown name or a value that cannot be.
    """
    for name in given:
        if name not in DEGREES:
            raise PinError(f"degree {name!r} is not known; use {', '.join(DEGREES)}")
    values = {name: value for name, value in given.items() if value is not None}
    for name in _COUNTS:
        _at_least_one(name, values.get(name, 1))
    tp, pp, cp = (values.get(name, 1) for name in ("tp", "pp", "cp"))
    size, chunks = values.get("micro_batch_size", 1), values.get("virtual_stages", 1)
    dp = _data_parallel(num_devices, values.get("dp"), tp * pp * cp)
    values = {**with_offload({name: v for name, v in values.items() if (name, v) != ("recompute", "none")})}
    recompute, stages = values.get("recompute", "none"), values.get("stages")
    return ParallelConfig(
        dp=dp,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=values.get("ep", 1),
        etp=values.get("etp"),
        zero_stage=values.get("zero_stage", 1),
        zero_replicas=values.get("zero_replicas", 1),
        micro_batch_size=size,
        num_micro_batches=_num_micro_batches(global_batch_size, dp, size),
        schedule=_schedule(values.get("schedule"), chunks, pp),
        virtual_stages=chunks,
        recompute=tuple(recompute) if isinstance(recompute, list) else recompute,
        stages=None if stages is None else tuple(stages),
        context_method=values.get("context_method"),
        offload=state_offload(values),
        state_slack=values.get("state_slack", 1.02),
    )


def _at_least_one(name: str, value: object) -> None:
    if not is_count(value):
        raise PinError(f"{name}={value}: must be a whole number of at least 1; nearest legal: 1")


def _data_parallel(devices: int, dp: int | None, others: int) -> int:
    if devices % others:
        raise PinError(
            f"tp x pp x cp = {others} does not divide the {devices} devices; choose degrees whose product divides them"
        )
    if dp is None:
        return devices // others
    _at_least_one("dp", dp)
    if dp * others != devices:
        raise PinError(
            f"dp={dp} x tp x pp x cp = {dp * others} devices, but the cluster has {devices}; nearest legal: "
            f"dp={devices // others}"
        )
    return dp


def _num_micro_batches(batch: int, dp: int, micro_batch_size: int) -> int:
    at_once = dp * micro_batch_size
    if batch % at_once:
        near = max(1, round(batch / at_once)) * at_once
        raise PinError(
            f"dp={dp} x micro_batch_size={micro_batch_size} = {at_once} does not divide the global batch of {batch}; "
            f"nearest legal: a global batch of {near}"
        )
    return batch // at_once


def _schedule(name: str | None, virtual_stages: int, pp: int) -> str:
    if virtual_stages > 1 and pp == 1:
        raise PinError(f"virtual_stages={virtual_stages} needs a pipeline; use --pp 2 or more, or no virtual stages")
    if name is None:
        return "1F1B" if virtual_stages == 1 else "Interleaved1F1B"
    if name not in SCHEDULES:
        raise PinError(f"schedule {name!r} is not known; use {', '.join(SCHEDULES)}")
    return name
