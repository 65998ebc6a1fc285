"""Words of PyTorch's FullyShardedDataParallel for what it shards, in files of trainers around it."""

from __future__ import annotations

from collections.abc import Mapping

from autoplan.errors import PinError
from autoplan.exporters.record import Document, Values, near_parts
from autoplan.exporters.setup import Setup

_STAGES: Mapping[str, int] = {
    **{"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0},
    **{"HYBRID_SHARD": 3, "_HYBRID_SHARD_ZERO2": 2},
}
SHARDING_CANNOT: Mapping[str, str] = {
    "tp": "it has data parallelism alone",
    "pp": "it has no pipelines",
    "schedule": "it has no pipelines",
    "virtual_stages": "it has no pipelines",
    "cp": "it has no context parallelism",
    "ep": "it has no expert parallelism",
    "etp": "it has no expert parallelism",
    "zero_stage": "FSDP shards everything (3), gradients and optimizer (2), or nothing (0)",
    "recompute": "a layer is checkpointed whole or not at all",
    "precision": "parameters and gradients stay in 32 bits beside computing in 16",
    "sequence_parallel": "it has no tensor parallelism",
    "overlap": "it has no tensor parallelism",
}


def strategy_word(setup: Setup) -> str:
    """Return the word for the ZeRO stage and the replicas of a setup."""
    c = setup.config
    if c.zero_stage == 0:
        return "NO_SHARD"
    hybrid = {3: "HYBRID_SHARD", 2: "_HYBRID_SHARD_ZERO2"} if c.zero_replicas > 1 else {}
    return {3: "FULL_SHARD", 2: "SHARD_GRAD_OP", **hybrid}.get(c.zero_stage, "FULL_SHARD")


def _strategy(document: Document, path: str, usual: str) -> str:
    given = str(document.get(path) or usual).upper()
    if given not in _STAGES:
        raise PinError(f"{path}={given} is not known; use {', '.join(_STAGES)}", ("zero_stage",))
    return given


def read_strategy(document: Document, path: str, usual: str = "FULL_SHARD") -> Values:
    """Return the ZeRO stage. PinError for another word."""
    return {"zero_stage": _STAGES[_strategy(document, path, usual)]}


def read_hybrid(document: Document, found: Values, path: str, replicas: str) -> Values:
    """Return how often shards are replicated; a hybrid strategy shards inside nodes if nothing else is said.

    Raises: PinError for replicas that do not divide the ranks.
    """
    if not str(document.get(path)).upper().lstrip("_").startswith("HYBRID"):
        return {"zero_replicas": 1}
    copies, dp = document.count(replicas, 0) or document.task.num_nodes, found.get("dp", 0)
    if dp and copies and dp % copies:
        raise PinError(f"{replicas}={copies} does not divide dp={dp}; nearest: {near_parts(dp, copies)}", ("dp",))
    return {"zero_replicas": max(1, copies)}
