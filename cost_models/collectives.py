"""Bytes and time of collectives: alpha-beta for a ring, per collective kind.

An unknown collective is an error, never free.
"""

from __future__ import annotations

from autoplan.cost_models.cluster import Link
from autoplan.cost_models.errors import LayoutError

# share of the full (gathered or reduced) tensor that each device sends over its link, times n/(n-1).
# Ring algorithms: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH", 2005.
_VOLUME: dict[str, float] = {
    "all_reduce": 2.0,
    "all_gather": 1.0,
    "reduce_scatter": 1.0,
    "all_to_all": 1.0,
    "broadcast": 1.0,
    "send_recv": 1.0,
}


def wire_bytes(kind: str, full_bytes: float, group_size: int) -> float:
    """Bytes each device sends. `full_bytes`: the gathered or reduced tensor (all_to_all: the local tensor)."""
    if kind not in _VOLUME:
        raise LayoutError(f"unknown collective {kind!r}; known: {', '.join(_VOLUME)}")
    if group_size == 1:
        return 0.0
    if kind == "send_recv":
        return full_bytes
    return _VOLUME[kind] * full_bytes * (group_size - 1) / group_size


def collective_s(kind: str, full_bytes: float, group_size: int, link: Link) -> float:
    """Seconds of one collective: a latency per ring step plus the wire bytes over the link's bandwidth."""
    if group_size == 1:
        return 0.0
    steps = 2 * (group_size - 1) if kind == "all_reduce" else 1 if kind == "send_recv" else group_size - 1
    return steps * link.latency_s + wire_bytes(kind, full_bytes, group_size) / link.bytes_per_s
