"""The session's processes, for cases of experiments.compatibility.plan_fuzz."""

from __future__ import annotations

from typing import Any

import harness

from autoplan.profiler.processes import ProcessOutcome


class Processes:
    """The session's processes, which all tests use."""

    def __init__(self, world: int) -> None:
        self._world = world

    def run_each(self, fn: Any, *args: Any, timeout_s: float) -> list[ProcessOutcome]:
        found = harness.pool(self._world).run_each(fn, *args, timeout_s=timeout_s * harness.PATIENCE, grace_s=8.0)
        if any(one.status != "ok" for one in found):
            harness.pool(self._world).kill()
        return found
