"""What a planned step costs at other constants: layout, stages and recompute stay, everything else is priced anew."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from autoplan.cost_models.blocks import op_times
from autoplan.cost_models.config import ParallelConfig, precision_of
from autoplan.cost_models.constants import Constants
from autoplan.cost_models.price import Pricer
from autoplan.cost_models.work import Workload
from autoplan.estimate import estimate_config, recompute_counts
from autoplan.points import PlanRequest


@dataclass(frozen=True)
class Planned:
    """A configuration with its layout, found once: all that a price at other constants needs."""

    request: PlanRequest
    config: ParallelConfig
    workload: Workload

    @staticmethod
    def of(request: PlanRequest, config: ParallelConfig) -> Planned:
        """With the layout that is best at the request's constants. Raises what `estimate_config` raises."""
        found = estimate_config(request, config)
        return Planned(request, found.config, found.point.workload)

    def step_s(self, constants: Constants) -> float:
        """Seconds of one step."""
        request = replace(self.request, constants=constants)
        costs, config = request.costs, self.config
        times = op_times(self.workload, costs)
        pricer = Pricer(self.workload, config, costs, precision_of(request.precision), times)
        chunks = config.stages or ()
        return pricer.step_s(chunks, recompute_counts(pricer, config, chunks))


def functions(planned: list[Planned]) -> list[Callable[[Constants], float]]:
    """The price of each, for `fit.priced_by`."""
    return [p.step_s for p in planned]
