"""Layouts inside blocks where the host decides: every collective costs its seconds, too.

The program of layouts (`autoplan.search.intra`) adds up seconds of the device. A block that waits for the host to start
its kernels (`cost_models.time.host`) gets faster by fewer collectives instead, whatever they cost the device. There
another layout is solved, in which the host's seconds of every collective are added, and taken if its passes take less
by the prices of blocks.

Such a layout often has no sequence parallelism, which has twice as many collectives and keeps a tp-th of some
activations (Korthikanti et al., 2022). The layout is chosen before it is known whether memory binds. So it may keep
hardly more than the first; if it does, one is solved in which blocks hand over values as they do in the first, and if
that does, too, with less weight on the host. Where activations go to the host, whose link then decides, the first
layout stays, and for a framework (`PlanRequest.of_framework`): frameworks split layers in one way, or
near to it (`autoplan.program.with_sequence_parallel`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

from autoplan.config.parallel import ParallelConfig
from autoplan.config.precision import Precision
from autoplan.cost_models.costs import Costs
from autoplan.cost_models.time.blocks import BlockPricer
from autoplan.program.choice_kinds import ChoiceKind
from autoplan.program.expert_degrees import ExpertDegrees
from autoplan.search.candidate_layout import CandidateLayout
from autoplan.search.intra import SendWish
from autoplan.search.layout_problem import LayoutCut

# Of the seconds of both passes: less waiting is not worth another layout
_LEAST_WAIT = 0.01
# Share of the device's memory that all layers may keep more, for one micro-batch: in a pipeline, a rank holds about as
# many layers times micro-batches as there are layers
_MORE_KEPT = 0.05
_SHARES = (1.0, 0.5, 0.25)  # of the host's seconds per collective, which count less and less


@dataclass(frozen=True)
class PassPrices:
    """Expected seconds of a forward and a backward of the whole model for one micro-batch.

    Attributes:
        waited_s: the part in which the device waits for the host.
    """

    seconds: float
    waited_s: float

    @property
    def wait(self) -> bool:
        """True if another layout is worth solving."""
        return self.waited_s > _LEAST_WAIT * self.seconds


def passes_of(
    point: CandidateLayout, cut: LayoutCut, experts: ExpertDegrees | None, costs: Costs, precision: Precision
) -> PassPrices:
    """Return the passes under a layout, at the fewest data-parallel ranks that its degrees of experts allow."""
    tp, size, cp, _ = cut
    ep, etp = (1, None) if experts is None else (experts.ep, experts.etp)
    ranks = ep * (tp if etp is None else etp)
    dp = math.lcm(ranks, cp * tp) // (cp * tp) if ep > 1 else 1
    config = ParallelConfig(dp=dp, tp=tp, cp=cp, ep=ep, etp=etp, zero_stage=0, micro_batch_size=size)
    pricer = BlockPricer(point.workload, config, costs, precision)
    seconds = waited = 0.0
    for name, count in Counter(chain.from_iterable(point.workload.units)).items():
        cost = pricer.cost(point.workload.blocks[name], point.times[name])
        seconds += count * (cost.forward_s.mid + cost.backward_s.mid)
        waited += count * sum(q.mid for q in cost.waited.values())
    return PassPrices(seconds, waited)


def with_host(
    first: CandidateLayout,
    send_s: float,
    device_bytes: float,
    made: Callable[[SendWish], CandidateLayout],
    passes: Callable[[CandidateLayout], PassPrices],
) -> CandidateLayout:
    """Return the layout that is the fastest for the device, or one that is faster because of the host.

    Args:
        send_s: seconds of the host for every collective.
        device_bytes: memory of a device.
        made: solves a layout for a wish.
        passes: prices one.
    """
    found = passes(first)
    if not found.wait:
        return first
    most = sum(first.workload.unit_saved) + _MORE_KEPT * device_bytes
    between = {c: o.name for c, o in first.solution.selection.items() if ChoiceKind.BOUNDARY.subject_of(c)}
    fixed = tuple(sorted(between.items()))
    for wish in (SendWish(send_s), *(SendWish(share * send_s, fixed) for share in _SHARES)):
        other = made(wish)
        if sum(other.workload.unit_saved) <= most:
            return other if passes(other).seconds < found.seconds else first
    return first
