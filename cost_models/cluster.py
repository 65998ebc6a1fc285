"""Cluster: what the program will run on, as plain data.

Catalog hardware comes with a later profile; here are the shapes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from autoplan.cost_models.errors import PinError
from autoplan.cost_models.units import GB, GIB, MICRO, TERA


@dataclass(frozen=True)
class Device:
    """One accelerator (or CPU process).

    `source` says where the figures come from; `assumed` ones only order choices.
    """

    name: str
    peak_flops: float  # dense, of the compute dtype, per second
    memory_bytes_per_s: float
    memory_bytes: int
    source: str


@dataclass(frozen=True)
class Link:
    """Alpha-beta of one level: seconds per collective and bytes per second per device."""

    latency_s: float
    bytes_per_s: float
    source: str


@dataclass(frozen=True)
class Cluster:
    """`num_nodes` nodes of `devices_per_node` equal devices. torch device type is `cpu` or `cuda`."""

    num_nodes: int
    devices_per_node: int
    device: Device
    link: Link
    device_type: str

    @property
    def num_devices(self) -> int:
        """World size."""
        return self.num_nodes * self.devices_per_node

    @staticmethod
    def local(num_processes: int, device_type: str = "cpu") -> Cluster:
        """Processes of this machine. Figures are assumed round numbers: a profile of the machine replaces them."""
        if num_processes < 1:
            raise PinError(f"a cluster needs at least 1 device, got {num_processes}")
        if device_type == "cuda":
            device = Device("cuda", 400 * TERA, 2000.0 * GB, 64 * GIB, "assumed")
            link = Link(10 * MICRO, 100.0 * GB, "assumed")
        elif device_type == "cpu":
            device = Device("cpu", 0.05 * TERA, 10.0 * GB, 4 * GIB, "assumed")
            link = Link(200 * MICRO, 1.0 * GB, "assumed")
        else:
            raise PinError(f"device type {device_type!r} is not supported; use 'cpu' or 'cuda'")
        return Cluster(1, num_processes, device, link, device_type)

    @staticmethod
    def parse(text: str, world_size: int = 1, device_type: str = "cpu") -> Cluster:
        """`local` (all processes of this job) or `local:N`. PinError names anything else."""
        match = re.fullmatch(r"local(?::(\d+))?", text)
        if match is None:
            raise PinError(f"cluster {text!r} is not known; use 'local', 'local:N' or a Cluster")
        return Cluster.local(int(match.group(1)) if match.group(1) else world_size, device_type)
