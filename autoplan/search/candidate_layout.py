"""A layout inside blocks with the work that it makes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from autoplan.cost_models.time.blocks import BlockPricer, OpTimes
from autoplan.cost_models.work import Workload
from autoplan.search.interleaved_cuts import LeastPass
from autoplan.search.intra import IntraSolution
from autoplan.search.rank_paths import PassSeconds


@dataclass(frozen=True)
class CandidateLayout:
    """The layout inside blocks for one (tp, micro-batch size), and the workload it makes."""

    solution: IntraSolution
    workload: Workload
    times: Mapping[str, OpTimes]


def least_pass_of(point: CandidateLayout, pricer: BlockPricer) -> LeastPass:
    """Return the seconds of the units of a workload that pp, dp and ZeRO do not change."""
    times, w = point.times, point.workload
    each = {n: (*pricer.least_s(b, times[n]), times[n].weight.mid) for n, b in w.blocks.items()}
    units = [[each[name] for name in unit] for _, unit in sorted({*zip(w.unit_kinds, w.units, strict=True)})]
    forward, backward, weight = (np.array([sum(s[i] for s in unit) for unit in units]) for i in range(3))
    return LeastPass(w.unit_kinds, PassSeconds(forward, backward, np.maximum(0.0, backward - weight)))
