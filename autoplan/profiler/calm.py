"""Times that other programs disturbed are measured again once the machine is calmer.

Collectives and fixed costs are timed by the wall clock. On CPUs that other programs use they come out several times as
long, and not even growing with the size; a plan made from them is wrong for as long as the profile is kept. Operations
are timed by the processor time of their thread, which others disturb less, and a GPU's by its own clock.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from autoplan.cost_models.profile import Profile

LINKS, OVERHEADS = "links", "overheads"
_LOADS = "loads"  # in Profile.machine: load averages before the parts were measured, the highest of the nodes
_CALMER = 0.5  # of the load of before: still shared, but worth the time


def load_average() -> float:
    """Return the load average of this machine over a minute; 0 where the system has none."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


def loads_of(profile: Profile) -> dict[str, float]:
    """Return the load before each part was measured, as far as it is known."""
    return {str(part): float(load) for part, load in profile.machine.get(_LOADS, {}).items()}


def disturbed_parts(profile: Profile, load: float, num_cores: int) -> list[str]:
    """Return the parts that were measured beside much other work, if there is much less now.

    Args:
        load: the load average now, of the busiest node.
        num_cores: of a node.
    """
    if profile.device_type != "cpu":
        return []
    return [p for p, then in loads_of(profile).items() if then > num_cores / 2 and load <= _CALMER * then]


def without_parts(profile: Profile, parts: list[str]) -> Profile:
    """Return the profile without these parts, so that they are measured again."""
    kept = {part: load for part, load in loads_of(profile).items() if part not in parts}
    return replace(
        profile,
        links=() if LINKS in parts else profile.links,
        overheads={} if OVERHEADS in parts else profile.overheads,
        machine={**profile.machine, _LOADS: kept},
    )


def merged_by_load(before: Profile, after: Profile) -> Profile:
    """Return both together, without what `after` measured anew: loads only grow where a part is added to."""
    then, now = loads_of(before), loads_of(after)
    out = without_parts(before, [p for p in then if p in now and now[p] < then[p]]).merged(after)
    return replace(out, machine={**out.machine, _LOADS: {**then, **now}})


def with_loads(before: Profile, after: Profile, load: float) -> Mapping[str, Any]:
    """Return the data for `Profile.machine` of a measurement that began at this load."""
    found = loads_of(before)
    for part, changed in ((LINKS, before.links != after.links), (OVERHEADS, before.overheads != after.overheads)):
        if changed:
            found[part] = max(load, found.get(part, 0.0))
    return {_LOADS: {part: round(value, 1) for part, value in found.items()}}
