"""Both sides of a published ablation, priced with the planner's public API, and how they are compared."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from published_graphs import graph_of
from published_rows import Shape

from autoplan.catalog import load_model
from autoplan.config.parallel import Mode, ParallelConfig, RunOptions
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.cost_models.time.estimate import Estimate
from autoplan.ir.graph import ModelGraph, check
from autoplan.search.estimate import estimate_config
from autoplan.search.layouts import PlanRequest

# Of every ablation alike: a predicted ratio may miss the published one by half of the published effect, but by 5 % at
# least (runs of one configuration differ by that across releases) and by 10 % at most; an effect of 5 % or more has the
# right sign. Fixed for all: not a tolerance to be fitted.
_LEAST, _MOST = 0.05, 0.10


@dataclass(frozen=True)
class Setup:
    """What the two sides of an ablation have in common. `model`: of the catalog, or dimensions of one that it lacks;
    `num_layers`: of it, fewer than it has."""

    model: str | Shape
    cluster: str
    seq_len: int
    precision: str = "bf16"
    mode: Mode = Mode.FUSED
    options: RunOptions = field(default_factory=RunOptions)
    num_layers: int | None = None

    def on(self, cluster: str) -> Setup:
        """The same on another cluster."""
        return replace(self, cluster=cluster)


@lru_cache
def _graph(model: str | Shape, num_layers: int | None) -> ModelGraph:
    graph = load_model(model) if isinstance(model, str) else graph_of(model)
    return graph if num_layers is None else _shallow(graph, num_layers)


def _shallow(graph: ModelGraph, num_layers: int) -> ModelGraph:
    """The graph with its first layers only."""
    layers = [c for c in graph.calls if c.params and re.search(r"\.\d+$", c.name)]
    kept, gone = layers[:num_layers], layers[num_layers:]
    handed = dict(zip(gone[-1].outputs, kept[-1].outputs, strict=True))
    names, lost = {c.name for c in gone}, {v for c in gone for v in c.outputs}
    calls = tuple(
        replace(c, inputs=tuple(handed.get(v, v) for v in c.inputs)) for c in graph.calls if c.name not in names
    )
    bound = {full for c in calls for full in (*c.params.values(), *c.buffers.values())}
    out = replace(
        graph,
        calls=calls,
        values={k: v for k, v in graph.values.items() if k not in lost},
        params={k: v for k, v in graph.params.items() if k in bound},
        buffers={k: v for k, v in graph.buffers.items() if k in bound},
    )
    check(out)
    return out


@lru_cache(maxsize=256)
def _priced(setup: Setup, config: ParallelConfig) -> Estimate:
    batch = config.dp * config.micro_batch_size * config.num_micro_batches
    request = PlanRequest(
        _graph(setup.model, setup.num_layers),
        Cluster.parse(setup.cluster),
        setup.seq_len,
        batch,
        precision=setup.precision,
        mode=setup.mode,
        options=setup.options,
    )
    return replace(estimate_config(request, config).estimate, events=())


def priced(setup: Setup, batch: int, **degrees: Any) -> Estimate:
    """`batch`: sequences per step; the number of micro-batches follows."""
    config = ParallelConfig(**degrees)
    num, rest = divmod(batch, config.dp * config.micro_batch_size)
    if rest:
        raise ValueError(f"{config} does not divide a batch of {batch}")
    return _priced(setup, replace(config, num_micro_batches=num))


def step_s(setup: Setup, batch: int, **degrees: Any) -> float:
    """Expected seconds of a step."""
    return priced(setup, batch, **degrees).step_time_s.mid


def peak_bytes(setup: Setup, batch: int, **degrees: Any) -> float:
    """Expected bytes of the fullest device."""
    return priced(setup, batch, **degrees).peak_memory_bytes.mid


def agrees(predicted: float, published: float) -> bool:
    """True if a predicted ratio is that of the publication, within the tolerance above."""
    effect = abs(published - 1)
    near = abs(predicted / published - 1) <= min(max(effect / 2, _LEAST), _MOST)
    return near and (effect < _LEAST or math.copysign(1, predicted - 1) == math.copysign(1, published - 1))
