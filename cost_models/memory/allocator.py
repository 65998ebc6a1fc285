"""Memory beyond the bytes of activations: fragmentation of the allocator, and the error of the liveness walk."""

from __future__ import annotations

from autoplan.config.parallel import RunOptions
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.cost_models.quantity import Quantity, Tag

# Fragmentation of the caching allocator: reserved over allocated bytes, of memory that changes within a step. Assumed.
_OF_SEGMENTS = Quantity(0.0, 0.03, 0.10, Tag.ASSUMED)
# The same with segments that grow and shrink by pages of 2 and 20 MiB (torch's CUDA semantics, expandable_segments).
_OF_PAGES = Quantity(0.0, 0.0, 0.03, Tag.ASSUMED)
# relative error of the liveness walk (autoplan.program.activations), compared with measured peaks
ACTIVATION_SPREAD = 0.05
HOST_NEED = Quantity.spread(1.0, ACTIVATION_SPREAD, Tag.FITTED)  # bytes in host memory per byte of activations


def fragmentation_of(cluster: Cluster, options: RunOptions) -> Quantity:
    """Return the bytes that fragmentation adds to a byte of memory that changes within a step."""
    if cluster.device_type == "cpu":
        return Quantity(0.0, 0.0, 0.0, Tag.MEASURED)
    return _OF_PAGES if options.expandable_segments else _OF_SEGMENTS


def activation_need(cluster: Cluster, options: RunOptions) -> Quantity:
    """Return the bytes that a byte of activations takes on the device, held or transient."""
    return Quantity.spread(1.0, ACTIVATION_SPREAD, Tag.FITTED) + fragmentation_of(cluster, options)
