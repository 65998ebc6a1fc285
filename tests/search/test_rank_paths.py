"""No step is shorter than the paths through the actions of its ranks, which are what the simulation finds where stages
are equal."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from autoplan.cost_models.time.simulation import ChunkTimes, simulate
from autoplan.schedules.schedule import SCHEDULES, SEARCHED_SCHEDULES, actions, obstacle, warm_ups
from autoplan.search.rank_paths import PassSeconds, RankPaths, rank_paths

ORDERS = [*SEARCHED_SCHEDULES, ("Interleaved1F1B", 3), ("InterleavedZeroBubble", 3), ("1F1B", 1)]


def shapes(stages: tuple[int, ...], numbers: tuple[int, ...]) -> Iterator[tuple[str, int, int, int]]:
    """Schedule, stages, micro-batches, and stages per rank."""
    for (schedule, virtual), pp, m in itertools.product(ORDERS, stages, numbers):
        if obstacle(schedule, pp, m, virtual) is None:
            yield schedule, pp, m, virtual


def test_warm_ups_are_the_same_with_fewer_micro_batches() -> None:
    found = list(shapes((1, 2, 3, 4, 8), (1, 2, 3, 4, 5, 7, 8, 9, 12, 16, 20, 24, 30, 40, 64)))
    for schedule, pp, m, virtual in found:
        assert warm_ups(schedule, pp, m, virtual) == actions(schedule, pp, m, virtual).warm_ups, (schedule, pp, m)
    assert len(found) > 300


def test_a_warm_up_is_what_comes_before_the_first_backward() -> None:
    """Of two ranks with two chunks each, as Megatron's interleaved schedule has it; no action follows a backward."""
    first, second = warm_ups("Interleaved1F1B", 2, 8, 2)
    assert first == ((3, 2), 2, 0) and second == ((2, 1), 3, 1)
    assert [each.last for each in warm_ups("ZB-H1", 4, 8)] == [0] * 4  # a gradient of weights comes last


def test_no_step_is_shorter_than_its_paths() -> None:
    """Whatever passes and chunks take; both paths are needed, and often they are most of the step."""
    random = np.random.default_rng(5)
    filled = turned = checked = near = 0
    for schedule, pp, m, virtual in shapes((1, 2, 3, 4), (1, 2, 4, 6, 9, 12)):
        for _ in range(4):
            cut = tuple(random.integers(1, 4, pp * virtual).tolist())
            kinds = (*random.integers(0, 3, sum(cut) - 1).tolist(), 2)
            forward, inputs, weight = random.uniform(0.1, 1.0, (3, 3)) ** random.choice([0.2, 1.0, 3.0], (3, 1))
            each = PassSeconds(forward, inputs + weight, inputs, tuple(random.choice([0.0, 0.3], 2)))
            paths = rank_paths(schedule, pp, virtual, m, cut, kinds)
            end = simulated_s(schedule, m, virtual, cut, kinds, each)
            own, waits = paths.seconds(each)
            assert (m * own + waits).max() <= end * (1 + 1e-9), (schedule, pp, m, virtual)
            first, second = bounds_s(paths, each)
            filled, turned = filled + bool((first > second).any()), turned + bool((second > first).any())
            checked, near = checked + 1, near + bool((m * own + waits).max() > 0.95 * end)
    assert min(filled, turned) > checked / 5 and near > checked / 2, (filled, turned, near, checked)


def test_with_equal_stages_paths_are_exact() -> None:
    """The last rank knows the bubble; the first one knows how long it waits for its first backward: 8 F and 3 B, of
    which 11 forwards of its own (Megatron's warm-up of 4 ranks with 2 chunks) take 11 F."""
    each = PassSeconds(np.ones(1), 2 * np.ones(1), np.ones(1))
    cut, kinds = (1,) * 8, (0,) * 8
    own, waits = rank_paths("Interleaved1F1B", 4, 2, 16, cut, kinds).seconds(each)
    assert own.tolist() == [6.0] * 4 and waits[0] == 8 + 3 * 2 - 11 and waits[-1] == 3 * (1 + 2)
    assert (16 * own + waits).max() == simulated_s("Interleaved1F1B", 16, 2, cut, kinds, each)


def simulated_s(
    schedule: str, m: int, virtual: int, cut: tuple[int, ...], kinds: tuple[int, ...], each: PassSeconds
) -> float:
    ends = np.cumsum([0, *cut])
    units = [np.bincount(kinds[a:b], minlength=len(each.forward)) for a, b in itertools.pairwise(ends)]
    times = [
        ChunkTimes(
            float(count @ each.forward) + each.beside[0],
            float(count @ each.backward) + each.beside[1],
            float(count @ (each.backward - each.inputs)) if SCHEDULES[schedule].split_backward else 0.0,
        )
        for count in units
    ]
    return simulate(actions(schedule, len(cut) // virtual, m, virtual), times, events=False).end_s


def bounds_s(paths: RankPaths, each: PassSeconds) -> tuple[np.ndarray, np.ndarray]:
    """What both paths take by rank besides its own passes."""
    forward, backward = np.append(each.forward, each.beside[0]), np.append(each.backward, each.beside[1])
    inputs = np.append(each.inputs, each.beside[1]) if paths.split else backward
    return (
        paths.fill_forward @ forward + paths.fill_backward @ backward,
        paths.turn_forward @ forward + paths.turn_inputs @ inputs,
    )
