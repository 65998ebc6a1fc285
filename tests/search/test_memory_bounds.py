"""What a search excludes by quick bounds of the memory does not fit, whatever its cut and recompute are."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from functools import lru_cache

import models
import pytest

from autoplan.capture.export import capture
from autoplan.config.parallel import Mode
from autoplan.cost_models.hardware.cluster import Cluster, Device, Level
from autoplan.cost_models.memory.communicators import FixedMemory
from autoplan.cost_models.memory.least import LeastMemory
from autoplan.cost_models.memory.room import Room
from autoplan.ir.graph import ModelGraph
from autoplan.search.layouts import LayoutCache
from autoplan.search.request import PlanRequest, space_of

SEQ = 16


@lru_cache(maxsize=2)
def graph(kind: str) -> ModelGraph:
    make = {"mixtral": models.make_mixtral, "llama": models.make_llama}[kind]
    return capture(make(), models.token_batch(2, SEQ))


def with_more(least: LeastMemory) -> LeastMemory:
    """The same bounds of eight times the activations."""
    out = copy.copy(least)
    out.activations, out.kept, out._active = 8 * least.activations, 8 * least.kept, {}
    more = {there: replace(c, kept=8 * c.kept, transient=8 * c.transient) for there, c in least._choices.items()}
    out._choices = more
    return out


@pytest.mark.parametrize(("kind", "mode"), [("llama", Mode.EAGER), ("mixtral", Mode.FUSED)])
def test_what_is_excluded_does_not_fit(kind: str, mode: Mode) -> None:
    """And of what does not fit, a good part is excluded; with eight times the activations, also some that fits."""
    link = Level(1e-6, 1e9, "made up")
    cluster = Cluster(1, 4, Device("made up", 1e12, 1e9, 1 << 33, "made up"), link, "cuda")
    r = PlanRequest(graph(kind), cluster, SEQ, 8, mode=mode)
    points, excluded, beyond, wrong = LayoutCache(r), 0, 0, 0
    for candidate in space_of(r).candidates[::3]:
        cutter = points.cutter(candidate)
        if cutter is None:
            continue
        points.room = cutter.room = Room(1e15)
        needed = cutter.shortage().needed_bytes  # of one cut with the most recompute
        point = points.of(candidate)
        assert point is not None
        fixed = FixedMemory(point.workload, cluster).of(candidate).mid  # nearly all of it: the models are tiny
        for share in (0.7, 0.95, 1.02):
            points.room = Room(fixed + share * (needed - fixed))
            points._cutters.clear()
            tight = points.cutter(candidate)
            assert tight is not None
            out = points.shortage(candidate) is not None
            fits = tight.search(math.inf, 200).chunks is not None
            assert not (out and fits), candidate
            excluded, beyond = excluded + out, beyond + (not fits)
            least = points.least_memory(point)
            points._least[id(point)] = with_more(least)
            wrong += fits and points.shortage(candidate) is not None
            points._least[id(point)] = least
    assert beyond > 20 and excluded > 0.3 * beyond and wrong, (beyond, excluded, wrong)
