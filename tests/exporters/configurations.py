"""Many setups for every target, and what a target runs for a file."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from autoplan.catalog import load_model
from autoplan.config.parallel import ParallelConfig
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.errors import PinError
from autoplan.exporters.door import read_config, setup_of
from autoplan.exporters.setup import Setup, Task, values
from autoplan.exporters.targets import TARGETS, target_of
from autoplan.ir.graph import ModelGraph
from autoplan.search.planner import PlanRequest
from autoplan.stacks.like import read_like

CLUSTER = "2x8xh100-sxm5-80gb"
DEVICES, BATCH = 16, 64
# Versions of which names or files differ
VERSIONS = (
    *("megatron-lm", "megatron-bridge", "torchtitan", "torchtitan@0.2.2", "torchtitan@0.2.0", "torchtitan@0.1.0"),
    "deepspeed",
    *("accelerate", "accelerate@1.9.0", "accelerate@25.01", "transformers", "lightning", "nanotron", "maxtext"),
    *("automodel", "gpt-neox", "torchtune", "llm-foundry", "olmo"),
)


@cache
def graph_of(model: str) -> ModelGraph:
    return load_model(model)


@cache
def request(model: str, to: str, **given: Any) -> PlanRequest:
    """The request whose settings are those of the target's stack."""
    target, version = target_of(to)
    return PlanRequest(
        graph_of(model),
        Cluster.parse(CLUSTER),
        4096,
        BATCH,
        like=read_like(f"{target.stack}@{version}", dict(given)),
    )


def degrees() -> Iterator[ParallelConfig]:
    """Degrees, ZeRO and batches of 16 devices."""
    for tp, pp, cp, zero, micro in itertools.product((1, 2, 4), (1, 2, 4), (1, 2), (0, 1, 2, 3), (1, 2)):
        dp = DEVICES // (tp * pp * cp)
        if not dp or dp * micro * pp > BATCH or (zero == 0 and dp * cp == 1):
            continue
        made = ParallelConfig(
            dp=dp, tp=tp, pp=pp, cp=cp, zero_stage=zero, micro_batch_size=micro, num_micro_batches=BATCH // (dp * micro)
        )
        yield made


def setups(to: str) -> Iterator[Setup]:
    """Setups of a dense model and of one with experts, of which the target can some."""
    dense, experts = request("llama-3.1-8b", to), request("mixtral-8x7b", to)
    for k, c in enumerate(degrees()):
        yield Setup.of(dense, c)
        kind = ("full", "selective", "none")[k % 3]
        yield Setup.of(
            dense, c.but(recompute=kind, context_method=("ring", "gather", "ulysses")[k % 3] if c.cp > 1 else None)
        )
        if c.cp > 1:  # a searched plan names the method of each block
            methods = {"layer": "ring"}, {"layer": "ulysses"}, {"layer": "ring", "layer1": "gather"}
            yield Setup.of(dense, c.but(context_method=methods[k % 3]))
        if c.pp > 1:
            schedule, v = (("Interleaved1F1B", 2), ("GPipe", 1), ("ZBV", 2), ("ZB-H1", 1))[k % 4]
            yield Setup.of(dense, c.but(schedule=schedule, virtual_stages=v))
            each = 32 // c.pp
            stages = (each + 1, *(each,) * (c.pp - 2), each - 1)
            yield Setup.of(dense, c.but(stages=stages, recompute=tuple(min(3, n) for n in stages)))
        if c.zero_stage and c.dp % 2 == 0 and c.dp > 2:
            yield Setup.of(dense, c.but(zero_replicas=2))
        if c.zero_stage:
            yield Setup.of(dense, c.but(offload=(("optimizer",), ("parameters",))[k % 2]))
        for ep, etp in ((2, 1), (4, c.tp)):
            if (c.dp * c.cp * c.tp) % (ep * etp) == 0:
                yield Setup.of(experts, c.but(ep=ep, etp=etp))


def given_of(setup: Setup, to: str) -> dict[str, Any]:
    """What a user gives with a file of the target: what it says elsewhere."""
    wanted = values(setup)
    return {name: wanted[name] for name in TARGETS[to.partition("@")[0]].elsewhere}


def runs(path: Path | str, to: str, model: str, given: dict[str, Any]) -> dict[str, Any]:
    """The values that the target runs for a file, as it is read from the disk."""
    graph, cluster = graph_of(model), Cluster.parse(CLUSTER)
    read = read_config(path, to, graph=graph, cluster=cluster, given=given)
    if read.faults:
        raise PinError("; ".join(read.faults))
    return values(setup_of(read, Task.known(graph, cluster), given))
