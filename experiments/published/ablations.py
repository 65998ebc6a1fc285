"""Both sides of a published ablation, priced with the planner's public API, and how they are compared.

A claim is a function that yields ratios (predicted, published) and conditions that hold, for each of its cases. Cases
that the cost models are known to get wrong say what they are off by (`missed`). ablation_table.py prints all of them.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from autoplan.catalog import load_model
from autoplan.config.parallel import Mode, ParallelConfig, RunOptions
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.cost_models.time.estimate import Estimate
from autoplan.ir.graph import ModelGraph, check
from autoplan.search.estimate import estimate_config
from autoplan.search.request import PlanRequest
from experiments.published.graphs import graph_of
from experiments.published.shapes import Shape

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
        """Return this setup on another cluster."""
        return replace(self, cluster=cluster)


@lru_cache
def _graph(model: str | Shape, num_layers: int | None) -> ModelGraph:
    graph = load_model(model) if isinstance(model, str) else graph_of(model)
    return graph if num_layers is None else _shallow(graph, num_layers)


def _shallow(graph: ModelGraph, num_layers: int) -> ModelGraph:
    """Return the graph with its first layers only."""
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


@dataclass(frozen=True)
class Ratio:
    """A predicted ratio of two runs and the published one. `of`: which of several of one case."""

    predicted: float
    published: float
    of: object = ""

    @property
    def right_sign(self) -> bool:
        """Whether an effect of 5 % or more has the published direction; smaller ones have none."""
        effect = abs(self.published - 1)
        return effect < _LEAST or math.copysign(1, self.predicted - 1) == math.copysign(1, self.published - 1)

    @property
    def right_size(self) -> bool:
        """Whether the ratio is that of the publication, within the tolerance above."""
        effect = abs(self.published - 1)
        return abs(self.predicted / self.published - 1) <= min(max(effect / 2, _LEAST), _MOST)

    @property
    def right(self) -> bool:
        """Both."""
        return self.right_sign and self.right_size


@dataclass(frozen=True)
class Holds:
    """A condition beside the ratios: a direction that needs no size, or a bound of an absolute figure."""

    right: bool
    of: object = ""


Rows = Iterator[Ratio | Holds]


@dataclass(frozen=True)
class Case:
    """Arguments of a claim. `missed`: what the cost models get wrong in it, empty if nothing."""

    arguments: tuple[Any, ...]
    missed: str = ""


@dataclass(frozen=True)
class Claim:
    """What one or several publications measured."""

    name: str
    about: str
    cases: tuple[Case, ...]
    compare: Callable[..., Rows]

    def rows(self, case: Case) -> list[Ratio | Holds]:
        """Return what is predicted in a case."""
        return list(self.compare(*case.arguments))


def missed(because: str, *arguments: Any) -> Case:
    """A case that is predicted wrongly, and what is said instead."""
    return Case(arguments, because)


def claim(cases: Sequence[Any] = ((),), because: str = "") -> Callable[[Callable[..., Rows]], Claim]:
    """Makes a claim of a function of a case: a tuple of its arguments, its only one, or what `missed` gives.

    Args:
        because: all cases are predicted wrongly, and this is what is said instead.
    """

    def made(compare: Callable[..., Rows]) -> Claim:
        given = [c if isinstance(c, Case) else Case(c if isinstance(c, tuple) else (c,), because) for c in cases]
        return Claim(compare.__name__, inspect.getdoc(compare) or "", tuple(given), compare)

    return made


def claims(names: Mapping[str, object]) -> tuple[Claim, ...]:
    """Return the claims of a module, in its order."""
    return tuple(value for value in names.values() if isinstance(value, Claim))
