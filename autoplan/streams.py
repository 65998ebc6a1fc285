"""Streams: whether copies and collectives can run beside computation on a device."""

from __future__ import annotations


def has_streams(device_type: str) -> bool:
    """Return True for accelerators. A CPU computes, copies and sends with the same threads, one after the other."""
    return device_type != "cpu"
