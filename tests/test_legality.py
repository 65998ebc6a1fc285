"""One legality: estimate, plan's pins and what-ifs take and refuse the same, and every suggestion is taken.

Configurations are drawn by a seeded generator over dense, grouped-query, expert and encoder-decoder models on several
clusters; most are made to fit devices and batch, since those drawn without that are nearly all refused.
"""

from __future__ import annotations

import functools
import math
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import models
import pytest

from autoplan.capture.export import capture
from autoplan.catalog import load_model
from autoplan.cost_models.cluster import Cluster
from autoplan.cost_models.config import Mode
from autoplan.cost_models.errors import AutoplanError, PinError
from autoplan.cost_models.graph import ModelGraph
from autoplan.cost_models.schedule import SCHEDULES
from autoplan.estimate import check_config
from autoplan.planner import PlanRequest
from autoplan.points import check_task, space_of
from autoplan.report.degrees import DEGREES, checked_config
from autoplan.search.facts import divisors
from autoplan.search.legality import Scope, broken, not_executed
from autoplan.sweep import points

CATALOG = ("gpt2", "llama-3.1-8b", "mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3")  # 12 heads; GQA; experts
CLUSTERS = ("1x8xh100-sxm5-80gb", "2x8xh100-sxm5-80gb", "3x4xh100-sxm5-80gb", "1x1xh100-sxm5-80gb")


@functools.cache
def graph_of(name: str) -> ModelGraph:
    if name == "encoder-decoder":
        return capture(models.make_encoder_decoder(), models.translation_batch(2, 9, 9), models.gpt_loss)
    return load_model(name)


def drawn(rng: random.Random, names: tuple[str, ...] = CATALOG) -> tuple[PlanRequest, dict[str, Any]]:
    """A task, and all choices of a configuration for it; any of them may be illegal."""
    graph = graph_of(rng.choice(names))
    cluster = Cluster.parse(rng.choice(CLUSTERS))
    batch, seq_len = rng.choice((8, 12, 16, 13, 64)), rng.choice((512, 1024, 1020, 1018, 13))
    if rng.random() < 0.05:
        cluster = replace(cluster, device=replace(cluster.device, host_bytes_per_s=None))
    r = PlanRequest(graph, cluster, seq_len, batch, mode=rng.choice((Mode.EAGER, Mode.EAGER, Mode.FUSED)))
    devices = cluster.num_devices
    odd = rng.random() < 0.15  # anything, not only what divides

    def degree(of: int) -> int:
        return rng.randint(1, 2 * of) if odd and rng.random() < 0.4 else rng.choice(divisors(max(1, of)))

    cp = 1 if rng.random() < 0.7 else degree(devices)
    pp = degree(devices // math.gcd(devices, cp))
    tp = degree(max(1, devices // (cp * pp)))
    dp = max(1, devices // (cp * pp * tp)) if rng.random() < 0.9 else degree(devices)
    ranks, experts = dp * cp * tp, r.facts.model.num_experts if r.facts.model is not None else 0
    ep = rng.choice(divisors(ranks)) if rng.random() < (0.6 if experts else 0.05) else 1
    etp = tp if rng.random() < 0.6 else rng.choice((1, tp, degree(ranks)))
    size = degree(max(1, batch // dp))
    schedule = "1F1B" if rng.random() < 0.5 else rng.choice(list(SCHEDULES))
    chunks = SCHEDULES[schedule].virtual_stages[0] if rng.random() < 0.8 else rng.randint(1, 4)
    given: dict[str, Any] = {
        "dp": dp, "tp": tp, "pp": pp, "cp": cp, "ep": ep, "etp": etp, "zero_stage": rng.randint(0, 3),
        "micro_batch_size": size, "schedule": schedule, "virtual_stages": chunks,
        "num_micro_batches": max(1, batch // (dp * size)) if rng.random() < 0.95 else degree(batch),
    }  # fmt: skip
    if rng.random() < 0.2:
        given["zero_replicas"] = degree(dp)
    if rng.random() < 0.2:
        given["offload"] = rng.choice(("none", "optimizer", "parameters", "activations", "activations+optimizer"))
    if rng.random() < 0.3:
        given["recompute"] = rng.choice(("none", "full", "selective", "attention+norms", "modules:mlp", "offload"))
    if cp > 1 and rng.random() < 0.5:
        given["context_method"] = rng.choice(("ring", "gather", "ulysses", "ulysses2xring2", "ulysses4xring2"))
    if rng.random() < 0.15:
        layers, parts = r.facts.model.num_layers if r.facts.model is not None else 1, pp * chunks
        cut = [layers // parts + (k < layers % parts) for k in range(parts)]
        if parts > 1 and rng.random() < 0.4:
            cut[0], cut[-1] = cut[0] + cut[-1], 0
        given["stages"] = tuple(cut)
    return r, given


def by_estimate(r: PlanRequest, given: Mapping[str, Any]) -> PinError | None:
    """What `autoplan estimate` and `estimate_config` say of legality."""
    num = given.get("num_micro_batches")
    try:
        config = checked_config(r, {name: value for name, value in given.items() if name in DEGREES})
        if num is not None and num != config.num_micro_batches:
            config = replace(config, num_micro_batches=num)
        check_config(r, config)
    except PinError as error:
        return error
    return None


def by_plan(r: PlanRequest, pins: Mapping[str, Any]) -> PinError | None:
    """What `autoplan plan` says before it searches."""
    try:
        asked = replace(r, pins=pins)
        check_task(asked)
        space_of(asked)
    except PinError as error:
        return error
    return None


def by_whatif(r: PlanRequest, pins: Mapping[str, Any]) -> str:
    """What `autoplan whatif` says of the point, all choices varied; empty: legal."""

    def search(request: PlanRequest) -> Any:
        check_task(request)
        space_of(request)
        return SimpleNamespace(plans=[None], certificate=None)

    try:
        (point,) = points(r, {name: [value] for name, value in pins.items()}, search)
    except AutoplanError as error:
        return str(error)
    return point.reason


def compare(r: PlanRequest, given: dict[str, Any]) -> str:
    """One configuration at all doors. AssertionError where they differ. What became of it."""
    estimated, planned = by_estimate(r, given), by_plan(r, given)
    assert (planned is None) == (by_whatif(r, given) == ""), given
    if estimated is None and planned is not None:
        config = checked_config(r, {name: value for name, value in given.items() if name in DEGREES})
        why = not_executed(config, r.facts)
        assert why and broken(config, r.facts, Scope.SEARCHED) is not None, (given, str(planned))
        return "priced only"
    assert (estimated is None) == (planned is None), (r.graph.name, r.cluster.num_devices, given, estimated)
    return "legal" if estimated is None else "refused"


def changed(r: PlanRequest, given: Mapping[str, Any], changes: Mapping[str, Any]) -> tuple[PlanRequest, dict[str, Any]]:
    """As a person would type what a refusal suggests."""
    run_facts = {name: value for name, value in changes.items() if name in ("global_batch_size", "seq_len")}
    made = {**given, **{name: value for name, value in changes.items() if name not in run_facts}}
    return replace(r, **run_facts), {name: value for name, value in made.items() if value is not None}


def suggested(r: PlanRequest, given: dict[str, Any], error: PinError, door: Any) -> int:
    """Type every suggestion; AssertionError if one is refused. How many there were."""
    assert "nearest legal" not in str(error) or error.suggestions, str(error)
    for changes in error.suggestions:
        again = door(*changed(r, given, changes))
        assert again is None, (r.graph.name, r.cluster.num_devices, given, str(error), changes, str(again))
        for name, value in changes.items():
            text = str(list(value)) if isinstance(value, tuple) else str(value)
            assert name in str(error) and (text in str(error) or value is None), (str(error), changes)
    return len(error.suggestions)


def compare_many(seed: int, count: int, names: tuple[str, ...] = CATALOG) -> tuple[Counter[str], int]:
    rng, seen, tried = random.Random(seed), Counter[str](), 0
    for _ in range(count):
        r, given = drawn(rng, names)
        outcome = compare(r, given)
        seen[outcome] += 1
        if outcome == "refused":
            estimated = by_estimate(r, {n: v for n, v in given.items() if n in DEGREES})
            doors = ((by_estimate, estimated), (by_plan, by_plan(r, given)))
            for door, error in doors:
                if error is not None:
                    asked = {n: v for n, v in given.items() if door is by_plan or n in DEGREES}
                    tried += suggested(r, asked, error, door)
    return seen, tried


def test_all_doors_take_and_refuse_the_same() -> None:
    seen, tried = compare_many(1, 700)
    assert min(seen[outcome] for outcome in ("legal", "refused", "priced only")) > 20, seen
    assert tried > 300


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(2, 12))
def test_all_doors_take_and_refuse_the_same_many_times(seed: int) -> None:
    compare_many(seed, 2000, (*CATALOG, "encoder-decoder"))
