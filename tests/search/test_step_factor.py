"""Bounds of 1F1B over all cuts, of the seconds of the whole model and of whole units: compared with simulated steps."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoplan.cost_models.time.simulation import ChunkTimes, simulate
from autoplan.schedules.schedule import SCHEDULES, actions
from autoplan.search.cuts import step_factor
from autoplan.search.state_bounds import _least_of_cuts
from autoplan.search.windows import between_ends, by_stage, prefix

SHAPES = [(p, m) for p in (1, 2, 3, 4, 5, 8) for m in (1, 2, 3, 4, 5, 7, 8, 9, 10, 12, 16, 21)]
TIMES = st.one_of(st.just(0.0), st.floats(0.01, 10.0))


def step_s(schedule: str, forward: list[float], backward: list[float], m: int) -> float:
    chunks = [ChunkTimes(f, b) for f, b in zip(forward, backward, strict=True)]
    return simulate(actions(schedule, len(chunks), m), chunks, events=False).end_s


@given(st.integers(1, 8), st.integers(1, 20), st.data())
def test_no_cut_is_faster_than_the_spread_of_its_seconds(p: int, m: int, data: st.DataObject) -> None:
    """Whatever the seconds of stages are, if the largest share of a forward is known, or nothing of it."""
    forward, backward = (data.draw(st.lists(TIMES, min_size=p, max_size=p)) for _ in range(2))
    shares = [f / (f + b) for f, b in zip(forward, backward, strict=True) if f + b]
    share, total = max(shares, default=1.0), sum(forward) + sum(backward)
    assert 1.0 <= step_factor(p, m) <= step_factor(p, m, share)
    for name in (name for name, schedule in SCHEDULES.items() if schedule.windows):
        assert total * step_factor(p, m, share) <= step_s(name, forward, backward, m) + 1e-9, (name, share)


def test_it_is_the_step_of_equal_stages_with_few_micro_batches_and_near_it_with_more() -> None:
    """And stronger than the bound that does not tell forwards from backwards."""
    for p, m in SHAPES:
        even = step_s("1F1B", [1.0] * p, [2.0] * p, m) / (3.0 * p)
        plain, found = 1.0 / (1.0 - (1.0 - 1.0 / m) ** p), step_factor(p, m, 1 / 3)
        assert plain <= found * (1 + 1e-12) and found <= even * (1 + 1e-12), (p, m)
        assert found == pytest.approx(even) if m < p else found > 0.88 * even, (p, m)


def test_a_cut_reaches_the_bound_and_a_smaller_share_of_forwards_gives_none() -> None:
    """The negative control: a first stage of twice the seconds, half of which are forwards, waits least."""
    step = step_s("1F1B", [2.0, 1.0], [2.0, 1.0], 2)
    assert 6.0 * step_factor(2, 2, 0.5) == pytest.approx(step)
    assert 6.0 * step_factor(2, 2, 0.4) > 1.02 * step


def test_no_cut_into_whole_units_is_faster_than_their_bound() -> None:
    """All cuts are simulated; the wait for the first backward makes the bound stronger, to within 3 % of most steps."""
    random, near, waits = np.random.default_rng(0), 0, 0
    for _ in range(150):
        units, m = int(random.integers(2, 7)), int(random.integers(1, 10))
        pp = int(random.integers(1, min(4, units) + 1))
        forward, backward = random.uniform(0.1, 2.0, units), random.uniform(0.1, 4.0, units)
        first, both = (between_ends(prefix(each)) for each in (forward, forward + backward))
        both[np.tri(len(both), dtype=bool)] = np.inf
        bound, runs = (_least_of_cuts(by_stage(both, pp), by_stage(first, pp), m, below) for below in (np.inf, 0.0))
        steps = []
        for ends in itertools.combinations(range(1, units), pp - 1):
            stages = list(itertools.pairwise([0, *ends, units]))
            mine, back = ([float(each[i:j].sum()) for i, j in stages] for each in (forward, backward))
            steps.append(step_s("1F1B", mine, back, m))
        assert runs <= bound <= min(steps) * (1 + 1e-12), (pp, m)
        near, waits = near + (bound > 0.97 * min(steps)), waits + (bound > 1.001 * runs)
    assert near > 120 and waits > 30, (near, waits)
