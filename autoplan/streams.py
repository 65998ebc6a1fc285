"""Streams: whether copies and collectives can run beside computation on a device, the size of such messages, and how
ZeRO sends its reductions there."""

from __future__ import annotations

# The gradients of ZeRO 0 are all-reduced in buckets of this size, two at a time. It is DDP's bucket size: large enough
# to reach the links' bandwidth, small enough to overlap copying with sending.
BUCKET_BYTES = 25 * 2**20


def has_streams(device_type: str) -> bool:
    """Return True for accelerators. A CPU computes, copies and sends with the same threads, one after the other."""
    return device_type != "cpu"


def reduces_by_exchange(device_type: str) -> bool:
    """Return True if ZeRO reduces by an exchange (all-to-all) and a sum, as gloo is faster (`runtime.exchange`)."""
    return device_type == "cpu"
