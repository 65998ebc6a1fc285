"""Plan files: what `autoplan plan --json` and `autoplan estimate --json` print, read back.

    plan_file = read_plan_file("plan.json")
    plan_file.request, plan_file.config       # the same request, and the configuration of its plan
    estimate_config(plan_file.request, plan_file.config)      # the price of the file, to the last digit

On the command line a plan file stands in place of MODEL: `autoplan estimate plan.json` prices its plan again,
`autoplan estimate plan.json --tp 4` with another degree, `autoplan whatif plan.json --vary nodes=4,8` varies its task.
Paths in a plan file (of a config.json, a profile, constants) are relative to the folder of the command.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from autoplan.config.parallel import ParallelConfig
from autoplan.config.planning import TOLERANCES
from autoplan.report.degrees import checked_config
from autoplan.report.flags import words_of
from autoplan.report.request import read_request
from autoplan.report.written import WrittenPlan, differences, read_written
from autoplan.search.planner import PlanRequest


@dataclass(frozen=True)
class PlanFile:
    """A plan that was written down, ready to be used."""

    written: WrittenPlan

    @cached_property
    def request(self) -> PlanRequest:
        """The request that the plan answers.

        Raises: AutoplanError, as the command would, for a model, cluster, profile or option that is not there.
        """
        asked = self.written.asked
        names = ("runnable", *(record.name for record in TOLERANCES))
        settings = {name: asked[name] for name in names if name in asked}
        return read_request(words_of(self.written), pins=asked.get("pin"), **settings)

    @cached_property
    def config(self) -> ParallelConfig:
        """The configuration of the plan. Raises: PinError if it is not legal for the request."""
        return checked_config(self.request, self.written.degrees)

    def differences(self) -> list[str]:
        """Return how the request differs from what the plan was made for; empty if it does not."""
        return differences(self.written, self.request)


def read_plan_file(path: Path | str) -> PlanFile:
    """Return the plan file at a path. Raises: PinError that says what is wrong with it."""
    return PlanFile(read_written(Path(path)))
