"""The quick bound of the memory is never above the memory model, and close to it where states fill the device."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from parity import spread_out

from autoplan.catalog import load_model
from autoplan.config.parallel import Mode, ParallelConfig
from autoplan.config.precision import precision_of
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.cost_models.memory.least import LeastMemory, _most_held, most_held
from autoplan.cost_models.memory.room import Room
from autoplan.errors import AutoplanError
from autoplan.schedules.schedule import SCHEDULES, actions, num_copies, takes, waits
from autoplan.search.planner import PlanRequest, estimate_config

DEVICES = 16
PIPELINES = (("1F1B", 1), ("GPipe", 1), ("Interleaved1F1B", 2), ("ZB-H1", 1), ("ZBV", 2), ("DualPipe", 1))


def configs() -> Iterator[ParallelConfig]:
    for tp, zero, (schedule, v) in itertools.product((1, 4), (0, 1, 2, 3), PIPELINES):
        pp, recompute = (1 if schedule in ("1F1B", "GPipe") and zero == 3 else 4), "full" if tp == 4 else "none"
        for m in (1, 8) if schedule in ("1F1B", "GPipe") else (1, 4, 8, 24):
            offload = ("optimizer",) if zero == 1 and m == 8 else ()
            yield ParallelConfig(
                dp=DEVICES // tp // pp, tp=tp, pp=pp, zero_stage=zero, num_micro_batches=m, schedule=schedule,
                virtual_stages=v, recompute=recompute, offload=offload, ep=2 if tp == 1 and zero > 1 else 1,
            )  # fmt: skip


@pytest.mark.parametrize("mode", spread_out([Mode.EAGER, Mode.FUSED], 2))
@pytest.mark.parametrize("model", spread_out(["mixtral-8x7b", "gpt2"], 2))
def test_it_is_a_bound_and_a_useful_one(model: str, mode: Mode) -> None:
    cluster, nearest, tried = Cluster.parse(f"{DEVICES // 8}x8xh100-sxm5-80gb"), 0.0, 0
    nearest_cut, no_cut = 0.0, 0
    for config in configs():
        r = PlanRequest(load_model(model), cluster, 1024, config.dp * config.num_micro_batches, mode=mode)
        try:
            found = estimate_config(r, config)
        except AutoplanError:  # illegal for this model
            continue
        tried += 1
        bound = LeastMemory(found.point.workload, precision_of(r.precision), cluster, mode, r.options)
        for guard in (0.0, 1.0):
            room = Room(0.0, guard=guard)
            least = sum(bound.terms(found.config, room).values())
            fullest = max(room.total_bytes(stage.memory) for stage in found.estimate.stages)
            assert least <= fullest * (1 + 1e-9), config
            assert bound.shortage(found.config, Room(fullest * 1.0001, guard=guard)) is None
            assert bound.shortage(found.config, Room(least * 0.9999, guard=guard)) is not None
            nearest = max(nearest, least / fullest)
            if num_copies(config.schedule) > 1:
                continue
            chunks = tuple(found.config.stages or ())
            of_cut = sum(bound.cut_terms(found.config, room, chunks).values())
            assert of_cut <= fullest * (1 + 1e-9), config
            assert bound.shortage(found.config, Room(fullest * 1.0001, guard=guard), [chunks]) is None
            if of_cut > least:
                assert bound.shortage(found.config, Room(of_cut * 0.9999, guard=guard), [chunks]) is not None
            nearest_cut = max(nearest_cut, of_cut / fullest)
            if config.virtual_stages == 1:
                assert not bound.no_cut_fits(found.config, Room(fullest * 1.0001, guard=guard)), config
                no_cut += bound.no_cut_fits(found.config, Room(fullest * 0.7, guard=guard))
    assert tried > 30 and nearest > 0.7 and nearest_cut > 0.85 and no_cut > 5


def test_what_a_rank_holds_settles() -> None:
    """Many micro-batches are counted by few; GPipe holds all of them."""
    settled = 0
    for name, pp, v, m in itertools.product(SCHEDULES, (1, 2, 3, 4, 8), (1, 2, 3, 4), (1, 2, 3, 5, 8, 12, 24, 35, 64)):
        if not takes(name, pp, m, v):
            continue
        found, wanted = most_held(name, pp, m, v), _most_held(name, pp, m, v)
        same = np.array_equal(found.held, wanted.held) and np.array_equal(found.running, wanted.running)
        flags = [(x.of_all, x.with_gradients, x.meet) for x in (found, wanted)]
        assert same and flags[0] == flags[1], (name, pp, v, m)
        assert waits(name, pp, m, v) == actions(name, pp, m, v).waits, (name, pp, v, m)
        settled += SCHEDULES[name].settles and m > (v + 3) * pp
    assert settled > 100 and most_held("GPipe", 2, 64, 1).held.max() > 60
