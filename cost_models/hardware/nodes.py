"""Nodes: the data of a cluster, from the catalog, a cloud instance or a file. `Cluster` computes with them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Self

from autoplan.cost_models.hardware import catalog
from autoplan.cost_models.hardware.fabric_graph import FabricGraph
from autoplan.cost_models.hardware.parts import (
    COUNT,
    NETWORK,
    OVERSUBSCRIPTION,
    Device,
    Level,
    Price,
    unknown_device_type,
)
from autoplan.errors import PinError
from autoplan.units import DEVICE_TYPES, GB


@dataclass(frozen=True)
class Nodes:
    """`num_nodes` nodes of `devices_per_node` equal devices.

    Attributes:
        link: The innermost level; a Level with a size if there are `outer` levels.
        device_type: The torch device type, `cpu` or `cuda`.
        outer: The other levels, inner to outer.
        given: Figures from the user instead of the catalog, by the names of OVERRIDES; they stay if the device changes.
        fabric: The graph that the levels were derived from (`on_fabric`), which determines the bandwidth of a group.
            None: the levels determine it.
        idle_nodes: Further nodes of the same kind, which are paid for and not used.
    """

    num_nodes: int
    devices_per_node: int
    device: Device
    link: Level
    device_type: str
    outer: tuple[Level, ...] = ()
    price: Price | None = None
    given: tuple[tuple[str, float], ...] = field(default=(), compare=False, repr=False)
    fabric: FabricGraph | None = field(default=None, hash=False, repr=False)
    idle_nodes: int = 0

    def __post_init__(self) -> None:
        if self.fabric is not None and self.fabric.num_devices != self.num_devices:
            raise PinError(
                f"the fabric has {self.fabric.num_devices} devices, {self.num_nodes} nodes of {self.devices_per_node} "
                f"have {self.num_devices}; give the cluster as many as the fabric"
            )
        for what, count in (("num_nodes", self.num_nodes), ("devices_per_node", self.devices_per_node)):
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise PinError(f"a cluster needs {what} of at least 1, got {count!r}; nearest legal: 1")
            COUNT.check(count, what)
        if self.device_type not in DEVICE_TYPES:
            raise unknown_device_type(self.device_type)
        if self.outer and not (self.link.size or self.link.within_node):
            raise PinError("a cluster with outer levels needs the size of its innermost unit, and its link has none")
        for level in (self.link, *self.outer):
            OVERSUBSCRIPTION.check(level.oversubscription, f"level {level.name}: oversubscription")
            speeds = [s for s in (level.bytes_per_s, level.p2p_bytes_per_s) if s is not None]
            if not (all(0 < s < math.inf for s in speeds) and 0 <= level.latency_s < math.inf):
                raise PinError(
                    f"level {level.name} needs a positive bandwidth and a latency of at least 0, got {min(speeds)} "
                    f"bytes/s and {level.latency_s} s"
                )

    @property
    def num_devices(self) -> int:
        """The world size."""
        return self.num_nodes * self.devices_per_node

    @property
    def idle_devices(self) -> int:
        """The devices that are paid for and not used."""
        return self.idle_nodes * self.devices_per_node

    @property
    def paid_devices(self) -> int:
        """All devices, those that are not used included."""
        return self.num_devices + self.idle_devices

    def on_fabric(self, fabric: FabricGraph) -> Self:
        """Return the same nodes with the links and levels of a graph."""
        link, *outer = fabric.levels(self.devices_per_node)
        return replace(self, link=link, outer=tuple(outer), fabric=fabric)

    @classmethod
    def of_catalog(
        cls,
        num_nodes: int,
        devices_per_node: int,
        device_id: str,
        nic_gbit_s: float | None = None,
        price: Price | None = None,
    ) -> Self:
        """Return nodes of catalog devices. `nic_gbit_s` (per device) and `price` default to the catalog row.

        The catalog's network is the usual one for the device. It belongs to the machine, so check it.
        """
        entry = catalog.entry(device_id)
        outer: list[Level] = [entry.host] if entry.host is not None else []
        nic = nic_gbit_s if nic_gbit_s is not None else entry.nic_gbit_s
        if nic is not None:
            source = "given" if nic_gbit_s is not None else entry.device.source
            network = Level(catalog.NETWORK_LATENCY_S, nic * GB / 8, source, name=NETWORK, fabric="network")
            outer.append(network)
        return cls(
            num_nodes,
            devices_per_node,
            entry.device,
            entry.scaleup,
            "cuda",
            tuple(outer),
            price if price is not None else entry.price,
        )

    @classmethod
    def of_instances(
        cls, num_nodes: int, name: str, nic_gbit_s: float | None = None, price: Price | None = None
    ) -> Self:
        """Return nodes of a cloud instance of the catalog: its network (`nic_gbit_s` per device), memory and price."""
        machine = catalog.instance(name)
        if nic_gbit_s is None and machine.nic_gbit_s_per_node is not None:
            nic_gbit_s = machine.nic_gbit_s_per_node / machine.num_devices
        price = machine.price if price is None else price
        found = cls.of_catalog(num_nodes, machine.num_devices, machine.device_id, nic_gbit_s, price)
        if machine.host_memory_bytes is None:
            return found
        each = int(machine.host_memory_bytes / machine.num_devices)
        return replace(found, device=replace(found.device, host_memory_bytes=each))
