"""The ScheduleSpec that the runtime gets of a pipeline schedule."""

from __future__ import annotations

from autoplan.errors import PinError
from autoplan.runtime.spec import ScheduleSpec
from autoplan.schedules.schedule import SCHEDULES


def schedule_spec(name: str) -> ScheduleSpec:
    """Return the part of a schedule's record that a program needs.

    Raises: PinError for a schedule that is not executed. The rules of legality refuse it earlier, in a search; this is
        for a configuration that is compiled without one.
    """
    record = SCHEDULES[name]
    if record.torch_class is None:
        executed = ", ".join(s.name for s in SCHEDULES.values() if s.torch_class is not None)
        raise PinError(f"schedule {name!r} is priced, but not executed; use {executed}", ("schedule",))
    return ScheduleSpec(name, record.torch_class, record.split_backward)
