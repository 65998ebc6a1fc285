"""Legality rules of the devices and of the stages of a pipeline."""

from __future__ import annotations

import math
from collections.abc import Callable

from autoplan.config.choice import is_count
from autoplan.config.parallel import ParallelConfig
from autoplan.program.facts import Facts, ModelFacts, layer_calls
from autoplan.program.legality.rule import Rule, Scope


def _divides(name: str) -> Callable[[ParallelConfig, Facts], str | None]:
    def found(c: ParallelConfig, f: Facts) -> str | None:
        degree = getattr(c, name)
        return f"{name}={degree} does not divide the {f.devices} devices" if f.devices % degree else None

    return found


def _product(c: ParallelConfig, f: Facts) -> str:
    made = c.num_devices
    cut = f" x cp={c.cp}" if c.cp > 1 else ""
    return f"dp={c.dp}{cut} x tp={c.tp} x pp={c.pp} = {made} devices, but the cluster has {f.devices}"


def _mesh(c: ParallelConfig, f: Facts) -> str | None:
    return _product(c, f) if f.devices % (c.cp * c.tp * c.pp) else None


def _world(c: ParallelConfig, f: Facts) -> str | None:
    return _product(c, f) if c.num_devices != f.devices else None


def _heads(c: ParallelConfig, f: Facts) -> str | None:
    for where, count in f.model.heads if f.model is not None and c.tp > 1 else ():
        if count > 1 and count % c.tp:  # one head is never split: every rank computes it
            return f"tp={c.tp} does not divide the {count} attention heads at {where}"
    return None


def _stage_each(c: ParallelConfig, f: Facts) -> str | None:
    if f.model is None or c.pp <= f.model.num_layers:
        return None
    return _too_few_layers(c, f.model)


def _too_few_layers(c: ParallelConfig, model: ModelFacts) -> str:
    """Say how many layers there are, and why there is but one (`capture.layers.divide`)."""
    why, layers = "", layer_calls(model.graph)
    if model.num_layers == 1:
        why = f", {layers[0]}" if layers else ", since all but one of its parts are too light to be one"
    return f"pp={c.pp} needs at least as many layers, the model has {model.num_layers}{why}"


def _chunks(ends: bool) -> Callable[[ParallelConfig, Facts], str | None]:
    def found(c: ParallelConfig, f: Facts) -> str | None:
        if f.model is None or c.pp * c.virtual_stages <= f.model.num_layers + (f.model.num_ends if ends else 0):
            return None
        if c.virtual_stages == 1:
            return _too_few_layers(c, f.model)
        return (
            f"pp={c.pp} x virtual_stages={c.virtual_stages} = {c.pp * c.virtual_stages} chunks need at least as many "
            f"layers, the model has {f.model.num_layers}"
        )

    return found


_ENDS = "embedding and head as chunks of a pipeline by themselves"


def _stages_devices(c: ParallelConfig, f: Facts) -> str | None:
    if c.stages is None or len(c.stages) == 1 or math.gcd(len(c.stages), f.devices) > 1:
        return None
    return f"stages={list(c.stages)} has {len(c.stages)} stages, which do not divide the {f.devices} devices"


def _stages_pp(c: ParallelConfig, f: Facts) -> str | None:
    if c.stages is None or len(c.stages) % c.pp == 0:
        return None
    return f"stages={list(c.stages)} has {len(c.stages)} entries for pp={c.pp}"


def _stages_chunks(c: ParallelConfig, f: Facts) -> str | None:
    chunks = c.pp * c.virtual_stages
    if c.stages is None or len(c.stages) == chunks:
        return None
    of = f"pp={c.pp}" if c.virtual_stages == 1 else f"pp={c.pp} x virtual_stages={c.virtual_stages}"
    return f"stages={list(c.stages)} has {len(c.stages)} entries for {of}; give {chunks}"


def _stages_sum(c: ParallelConfig, f: Facts) -> str | None:
    if c.stages is None or f.model is None:
        return None
    last = len(c.stages) - 1
    least = [0 if last and k in (0, last) and f.model.num_ends else 1 for k in range(len(c.stages))]
    if sum(c.stages) == f.model.num_layers and all(map(is_count, c.stages, least)):
        return None
    return (
        f"stages={list(c.stages)} must be {len(c.stages)} positive numbers that add up to the model's "
        f"{f.model.num_layers} layers"
    )


def _stages_ends(c: ParallelConfig, f: Facts) -> str | None:
    if c.stages is None or min(c.stages) > 0:
        return None
    return f"stages={list(c.stages)} must be positive numbers"


RULES: tuple[Rule, ...] = (
    Rule("cp does not divide the devices", ("cp",), _divides("cp")),
    *(Rule("pp x tp does not divide the devices", (name,), _divides(name)) for name in ("tp", "pp")),
    Rule("pp x tp does not divide the devices", ("tp", "pp", "cp"), _mesh),
    Rule("another dp is pinned", ("dp",), _divides("dp")),
    Rule("another dp is pinned", ("dp", "tp", "pp", "cp"), _world),
    Rule("tp does not divide the attention heads", ("tp",), _heads),
    Rule("more stages than layers", ("pp",), _stage_each, Scope.SEARCHED, priced=_ENDS),
    Rule("more stages than layers", ("virtual_stages", "pp"), _chunks(ends=True)),
    Rule("more stages than layers", ("virtual_stages", "pp"), _chunks(ends=False), Scope.SEARCHED, priced=_ENDS),
    Rule("another number of stages is pinned", ("stages", "pp", "virtual_stages"), _stages_chunks),
    Rule("another number of stages is pinned", ("stages", "pp"), _stages_pp),
    Rule("another number of stages is pinned", ("stages",), _stages_devices),
    Rule("another number of stages is pinned", ("stages",), _stages_sum),
    Rule("another number of stages is pinned", ("stages",), _stages_ends, Scope.SEARCHED, priced=_ENDS),
)
