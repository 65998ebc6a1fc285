"""Nodes: the data of a cluster, as the catalog, a cloud instance or a file gives them; `Cluster` computes with them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Self

from autoplan.cost_models.hardware import catalog
from autoplan.cost_models.hardware.fabric_graph import FabricGraph
from autoplan.cost_models.hardware.parts import COUNT, NETWORK, OVERSUBSCRIPTION, Device, Level, Link, Price
from autoplan.errors import PinError
from autoplan.units import GB


@dataclass(frozen=True)
class Nodes:
    """`num_nodes` nodes of `devices_per_node` equal devices. torch device type is `cpu` or `cuda`.

    `link` is the innermost level; give a Level with its size if there are `outer` ones (inner to outer). `given`: which
    figures are not the catalog's but the user's, by the names of OVERRIDES; they stay when the device is another.
    `fabric`: the graph that the levels were found on (`on_fabric`), which says what a group gets; None: the levels do.
    """

    num_nodes: int
    devices_per_node: int
    device: Device
    link: Link
    device_type: str
    outer: tuple[Level, ...] = ()
    price: Price | None = None
    given: tuple[tuple[str, float], ...] = field(default=(), compare=False, repr=False)
    fabric: FabricGraph | None = field(default=None, hash=False, repr=False)

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
        if self.device_type not in ("cpu", "cuda"):
            raise PinError(f"device type {self.device_type!r} is not supported; use 'cpu' or 'cuda'")
        if self.outer and not isinstance(self.link, Level):
            raise PinError("a cluster with outer levels needs a Level as its link: the size of its unit is not known")
        for level in (self.link, *self.outer):
            if isinstance(level, Level):
                OVERSUBSCRIPTION.check(level.oversubscription, f"level {level.name}: oversubscription")
            peer = level.p2p_bytes_per_s if isinstance(level, Level) else None
            speeds = (level.bytes_per_s, level.bytes_per_s if peer is None else peer)
            if not (all(0 < s < math.inf for s in speeds) and 0 <= level.latency_s < math.inf):
                raise PinError(
                    f"{level.name if isinstance(level, Level) else 'the link'} needs a positive bandwidth and a "
                    f"latency of at least 0, got {min(speeds)} bytes/s and {level.latency_s} s"
                )

    @property
    def num_devices(self) -> int:
        """World size."""
        return self.num_nodes * self.devices_per_node

    def on_fabric(self, fabric: FabricGraph) -> Self:
        """The same nodes, linked as a graph says; its levels take the place of theirs."""
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
        """Nodes of catalog devices. `nic_gbit_s` per device and `price`: None takes those of the catalog row.

        The catalog's network is the usual one for the device; it belongs to the machine, so check it.
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
        """Nodes of a cloud instance of the catalog, with its network (`nic_gbit_s` per device) and price."""
        machine = catalog.instance(name)
        if nic_gbit_s is None and machine.nic_gbit_s_per_node is not None:
            nic_gbit_s = machine.nic_gbit_s_per_node / machine.num_devices
        price = machine.price if price is None else price
        return cls.of_catalog(num_nodes, machine.num_devices, machine.device_id, nic_gbit_s, price)
