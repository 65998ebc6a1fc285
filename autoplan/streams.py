"""Which devices have streams: whether what copies or sends can run beside computing there."""

from __future__ import annotations


def has_streams(device_type: str) -> bool:
    """True for accelerators. A CPU computes, copies and sends in the threads that it has, one after the other."""
    return device_type != "cpu"
