"""The cluster that a program runs on, as plain data.

Cluster.parse("16x8xh100-sxm5-80gb")            16 nodes of 8; network, price and links from the catalog
Cluster.parse("8xh100")                         one node of 8; devices as people write them (`catalog.device_ids`)
Cluster.parse("16xp5.48xlarge")                 16 cloud instances: their own network and price
Cluster.parse("4x8xmi355x-288gb@nic=400")       overrides of the catalog, or figures that it lacks
Cluster.parse("cluster.yaml")                   see autoplan.cost_models.hardware.cluster_file
cluster.on_fabric(FabricGraph(...))             links as a graph, see autoplan.cost_models.hardware.fabric_graph
Cluster.parse("local:4")                        processes of this machine
cluster.with_(nodes=32, nic=800)                a what-if

Devices are numbered node by node. Levels go from the inside out. The scale-up domain is not the node: GB200 has trays
of 4 in a domain of 72, and two bridged cards are a domain inside a node.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path

from autoplan.config.keys import check_names
from autoplan.config.numbers import Range
from autoplan.cost_models.hardware import catalog
from autoplan.cost_models.hardware.cluster_file import nodes_from_data, read_nodes
from autoplan.cost_models.hardware.collective_kinds import Traffic
from autoplan.cost_models.hardware.nodes import Nodes
from autoplan.cost_models.hardware.parts import (
    ASSUMED,
    COUNT,
    COUNT_OR_NONE,
    GB_S,
    GBIT_S,
    MEMORY_GB,
    NETWORK,
    NETWORKS,
    USD,
    WATTS,
    Device,
    Group,
    Level,
    Price,
    unknown_device_type,
)
from autoplan.errors import PinError
from autoplan.units import GB, GIB, MICRO, TERA

__all__ = ["Cluster", "Device", "Group", "Level", "Price"]

_LOCAL_LAUNCH_S = 5e-6
_MOST_IN_ONE_MACHINE = 16  # sockets of the largest servers sold with PCIe cards
# A device's share of its host where the catalog has none; assumed. Servers of eight devices are sold with 1 to 2 TB for
# all; with two sockets of eight channels of DDR4-3200 each (25.6 GB/s a channel) an eighth is 51 GB/s, of which copies
# reach about 80 %.
ASSUMED_HOST_MEMORY_BYTES = 128 * GB
ASSUMED_HOST_BYTES_PER_S = 40.0 * GB
_COPIES_REACH = 0.8  # of the speed of a host's memory by data sheet


@dataclass(frozen=True)
class Override:
    """A figure of a cluster that its user may give, instead of the catalog's.

    Attributes:
        what: its description, with its unit.
        field: the field of Device that it is, in multiples of `factor`; empty for other figures.
        column: the column of the catalog that it replaces.
    """

    what: str
    legal: Range
    field: str = ""
    factor: float = 1
    column: str = ""


OVERRIDES: Mapping[str, Override] = {
    "nodes": Override("number of nodes", COUNT),
    "devices_per_node": Override("devices per node", COUNT),
    "nic": Override("Gbit/s per device and direction between nodes", GBIT_S, column="scaleout_gbit_s_per_device"),
    "scaleup": Override(
        "GB/s per device and direction in the scale-up domain", GB_S, column="scaleup_gb_s_per_dir_per_device"
    ),
    "memory_gb": Override("usable GB (1e9 bytes) per device", MEMORY_GB, "memory_bytes", GB, "mem_gb"),
    "memory_gb_s": Override("GB/s of the memory of a device", GB_S, "memory_bytes_per_s", GB, "mem_bw_gb_s"),
    "host_memory_gb": Override("GB (1e9 bytes) of the host's memory per device", MEMORY_GB, "host_memory_bytes", GB),
    "power": Override("W per device: products slow down under a cap", WATTS, "power_w", column="power_w"),
    "price": Override("US dollars per device and hour", USD),
    "idle": Override("number of further nodes that are paid for and not used", COUNT_OR_NONE),
}
_NODES = ("nodes", "devices_per_node")  # overrides of the number of devices
_IDLE = "idle"
_LINKS = ("nic", "scaleup")  # overrides of links


@dataclass(frozen=True)
class Cluster(Nodes):
    """Nodes, with figures derived from them: levels, host memory, what-ifs.

    Example:
        >>> from autoplan import Cluster
        >>> cluster = Cluster.parse("8x8xh100-sxm5-80gb@nic=800")
        >>> cluster.num_devices, cluster.device.name
        (64, 'h100-sxm5-80gb')
    """

    @property
    def host_memory_bytes(self) -> float:
        """A device's budget in host memory: given, or assumed.

        A CPU process has only one memory: its offloaded data has no separate budget, unless one is given.
        """
        if self.device.host_memory_bytes is not None:
            return float(self.device.host_memory_bytes)
        return math.inf if self.device_type == "cpu" else ASSUMED_HOST_MEMORY_BYTES

    @property
    def host_link_bytes_per_s(self) -> float | None:
        """Bandwidth between a device and host memory in one direction; None if not known.

        On a CPU a copy reads and writes the same memory.
        """
        given = self.device.host_bytes_per_s
        if given is None and self.device_type == "cpu":
            return self.device.memory_bytes_per_s / 2
        return given

    @property
    def host_memory_bytes_per_s(self) -> float:
        """A device's share of the speed at which its host copies memory: given, of its usual host, or assumed.

        The devices of a node that are in use share all of it: the work of one device may run on all cores.
        """
        given, host = self.device.host_memory_bytes_per_s, self.device.host
        if given is not None:
            return given
        if host is None:
            return ASSUMED_HOST_BYTES_PER_S
        return _COPIES_REACH * host.memory_bytes_per_s / min(self.devices_per_node, host.num_devices)

    @property
    def offloads(self) -> bool:
        """True if a search tries offloading: there are two memories, and the speed between them is known."""
        apart = self.device_type != "cpu" or self.device.host_memory_bytes is not None
        return apart and self.host_link_bytes_per_s is not None

    @cached_property
    def levels(self) -> tuple[Level, ...]:
        """The levels that exist at this size, inner to outer; the last spans the whole cluster.

        `size` is the size of a unit here: at most the node for a level within a node, at most the world. Nodes of one
        device have no level within a node; a cluster of one device has one level of size 1, which nothing crosses.
        """
        out: list[Level] = []
        for level in (self.link, *self.outer):
            most = self.devices_per_node if level.within_node else self.num_devices
            size = min(level.size or most, most)
            if size > (out[-1].size if out else 1):
                out.append(replace(level, size=size))
        if not out and self.num_devices == 1:
            return (replace(self.link, size=1),)
        reached = out[-1].size if out else 1
        if reached < self.num_devices:
            name, together = self.device.name, self.num_devices <= _MOST_IN_ONE_MACHINE
            raise PinError(
                f"{self}: what connects more than {reached} of the {self.num_devices} devices is not known: the "
                f"catalog names no network for it; give its Gbit/s per device, for example "
                f"{self.num_nodes}x{self.devices_per_node}x{name}@nic=400"
                + (f", or write 1x{self.num_devices}x{name} if all are in one machine" if together else "")
            )
        return tuple(out)

    def levels_of(self, group: Group, traffic: Traffic) -> tuple[Level, ...]:
        """Return the levels for a group of this shape; on a fabric, with the bandwidth of all such groups at once."""
        return self.levels if self.fabric is None else self.fabric.levels_of(group, traffic, self.levels)

    @property
    def domain_size(self) -> int:
        """The number of devices that reach each other without a network between nodes; 1 for nodes of one device."""
        inner = self.levels[0]
        return 1 if inner.name in NETWORKS else inner.size

    @property
    def peers(self) -> int:
        """The number of devices that read each other's memory over NVLink, or over links that are not known."""
        return self.domain_size if self.levels[0].fabric.startswith(("nvlink", "plain")) else 1

    def shared_level(self, here: int, there: int) -> tuple[Level, int]:
        """Return the innermost level with both ranks in one unit, and the size of a unit of the level below (or 1)."""
        below = 1
        for level in self.levels[:-1]:
            if here // level.size == there // level.size:
                return level, below
            below = level.size
        return self.levels[-1], below

    def __str__(self) -> str:
        return f"{self.num_nodes} x {self.devices_per_node} x {self.device.name}"

    def with_(
        self, *, nodes: int | None = None, devices_per_node: int | None = None, **figures: float | None
    ) -> Cluster:
        """Return the cluster with other figures, for what-ifs; the names and units are those of OVERRIDES.

        Raises:
            PinError: for a name that is not known, and for an illegal value.
        """
        given = {name: value for name, value in figures.items() if value is not None}
        for name, value in given.items():
            _check_override(name, value)
        num_nodes = self.num_nodes if nodes is None else nodes
        per_node = self.devices_per_node if devices_per_node is None else devices_per_node
        if self.fabric is not None:
            same = (num_nodes, per_node) == (self.num_nodes, self.devices_per_node)
            _check_fabric_stays([*(n for n in _LINKS if n in given), *([] if same else ["the number of devices"])])
        device = {o.field: given[n] * o.factor for n, o in OVERRIDES.items() if o.field and n in given}
        device |= {field: int(device[field]) for field in ("memory_bytes", "host_memory_bytes") if field in device}
        link, outer, price = self.link, self.outer, self.price
        if "scaleup" in given:
            link = replace(link.at(given["scaleup"] * GB), source="given")
        if "nic" in given:
            link, outer = _networked(link, outer, given["nic"] * GB / 8)
        if "price" in given:
            price = Price(float(given["price"]), "given", "given")
        return replace(
            self,
            num_nodes=num_nodes,
            devices_per_node=per_node,
            device=replace(self.device, **device),  # type: ignore[arg-type]
            link=link,
            outer=outer,
            price=price,
            idle_nodes=int(given.get(_IDLE, self.idle_nodes)),
            given=tuple(sorted({**dict(self.given), **given}.items())),
        )

    @property
    def unverified(self) -> tuple[str, ...]:
        """Columns of the catalog that no source confirms, without those that given figures replace."""
        given = {OVERRIDES[name].column for name, _ in self.given}
        return tuple(column for column in self.device.unverified if column not in given)

    def with_device(self, device_id: str) -> Cluster:
        """Return the same nodes with another device of the catalog, its links and price; `given` figures stay.

        A given network belongs to the nodes and is kept whole. PinError names the candidates or the nearest ids.
        """
        if device_id == self.device.name or catalog.entry(device_id).id == self.device.name:
            return self
        given = dict(self.given)
        new = Cluster.of_catalog(self.num_nodes, self.devices_per_node, device_id).with_(**given)  # type: ignore[arg-type]
        if self.fabric is not None:
            return replace(new, link=self.link, outer=self.outer, fabric=self.fabric)
        if "nic" not in given:
            return new
        outer = tuple(level for level in new.outer if level.name not in NETWORKS)
        return replace(new, outer=(*outer, *(level for level in self.outer if level.name in NETWORKS)))

    @staticmethod
    def local(num_processes: int, device_type: str = "cpu") -> Cluster:
        """Return a cluster of processes of this machine.

        Its figures are assumed round numbers; a profile of the machine replaces them.
        """
        if num_processes < 1:
            raise PinError(f"a cluster needs at least 1 device, got {num_processes}")
        if device_type == "cuda":
            device = Device(
                "cuda",
                400 * TERA,
                2000.0 * GB,
                64 * GIB,
                ASSUMED,
                overlap_fraction=None,
                host_bytes_per_s=25 * GB,  # PCIe 4 x16 has 31.5
            )
            link = Level(10 * MICRO, 100.0 * GB, ASSUMED)
        elif device_type == "cpu":
            device = Device("cpu", 0.05 * TERA, 10.0 * GB, 4 * GIB, ASSUMED, launch_s=_LOCAL_LAUNCH_S)
            link = Level(200 * MICRO, 1.0 * GB, ASSUMED)
        else:
            raise unknown_device_type(device_type)
        return Cluster(1, num_processes, device, link, device_type)

    @classmethod
    def of_nodes(cls, nodes: Nodes) -> Cluster:
        """Return the cluster of these nodes."""
        return cls(**{f.name: getattr(nodes, f.name) for f in fields(nodes)})

    @classmethod
    def read(cls, path: str | Path) -> Cluster:
        """Return the cluster of a YAML file. PinError names the file and the wrong key."""
        return cls.of_nodes(read_nodes(path))

    @classmethod
    def of(cls, given: Cluster | Path | str, world_size: int = 1, device_type: str = "cpu") -> Cluster:
        """Return a cluster, the one of a text (`parse`) or of a YAML file. Raises PinError for anything else."""
        return given if isinstance(given, Cluster) else cls.parse(given, world_size, device_type)

    @classmethod
    def of_mapping(cls, data: object) -> Cluster:
        """Return the cluster of a mapping with the keys of a YAML file."""
        return cls.of_nodes(nodes_from_data(data, "cluster"))

    @staticmethod
    def parse(text: Path | str, world_size: int = 1, device_type: str = "cpu") -> Cluster:
        """Parse `local` (all processes of this job), `local:N`, `NxMx<device>`, `Nx<instance>` or a YAML file name.

        `Mx<device>` is one node of M devices, or the usual nodes that they fill (`64xh100`: 8 of 8); `<device>` is one
        device.

        All take overrides: `@nic=400,price=2.5` (see OVERRIDES).

        Raises: PinError for any other text, and for what is no text or path.
        """
        if not isinstance(text, Path | str):
            raise PinError(
                f"cluster={text!r:.80} is of type {type(text).__name__}; give a text such as '2x8xh100-sxm5-80gb', the "
                "path of a YAML file, or an autoplan.Cluster (Cluster.of_mapping reads a dict)"
            )
        text = str(text)
        base, overrides = split_overrides(text)
        cluster = _parse_base(base.strip(), world_size, device_type)
        if overrides:
            cluster = cluster.with_(**_read_overrides(text, overrides))  # type: ignore[arg-type]
        _ = cluster.levels  # raises now if there is no network, instead of in the middle of a search
        return cluster


def split_overrides(text: str) -> tuple[str, str]:
    """Return the text of a cluster without its overrides, and these; the path of a file may have an @, too."""
    found = re.match(r"(.*?\.ya?ml)(?:@(.*))?$", text.strip(), re.DOTALL)
    base, overrides = found.groups() if found is not None else text.strip().partition("@")[::2]
    return base, overrides or ""


def in_use_text(text: str, nodes: int, idle: int) -> str:
    """Return the text of a cluster of which only some nodes are used; one that says itself which are idle stays.

    >>> in_use_text("2x8xh100@nodes=13,price=2", 12, 1)
    '2x8xh100@price=2,nodes=12,idle=1'
    """
    base, overrides = split_overrides(text)
    own = _read_overrides(text, overrides) if overrides else {}
    if own.get(_IDLE):
        return text
    changed = {"nodes": nodes, _IDLE: idle}
    kept = [part for part in overrides.split(",") if part and part.partition("=")[0].strip() not in changed]
    return f"{base}@{','.join([*kept, *(f'{name}={value}' for name, value in changed.items())])}"


def _check_override(name: str, value: object) -> None:
    """Raise PinError for an illegal value of an override."""
    check_names((name,), OVERRIDES, "cluster", "override")
    known = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    zero = OVERRIDES[name].legal.least == 0
    if not known or value < 0 or (value == 0 and not zero):  # type: ignore[operator]
        least = "at least" if zero else "above"
        raise PinError(f"{name}={value!r}: {OVERRIDES[name].what} must be {least} 0, and finite")
    OVERRIDES[name].legal.check(value, name)


def _check_fabric_stays(changed: Sequence[str]) -> None:
    """Raise PinError for overrides of figures that the fabric determines."""
    if changed:
        free = ", ".join(name for name in OVERRIDES if name not in (*_NODES, *_LINKS))
        raise PinError(
            f"{changed[0]} cannot be overridden: it follows from the fabric of this cluster; change its links (can be "
            f"overridden: {free})"
        )


def _networked(link: Level, outer: tuple[Level, ...], bytes_per_s: float) -> tuple[Level, tuple[Level, ...]]:
    """Return the levels with network cards of another speed; levels beyond a rail group keep their share of it."""
    networks = tuple(level for level in outer if level.name in NETWORKS)
    last = (link, *outer)[-1]
    if not networks and outer and not (last.size or last.within_node):
        raise PinError(
            f"nic cannot be overridden: no level of this cluster is named {NETWORK}, and {last.name} connects all "
            f"devices; name it {NETWORK}, or change its gb_s"
        )
    networks = networks or (Level(catalog.NETWORK_LATENCY_S, 1.0, "", name=NETWORK, fabric="network"),)
    if not link.size:
        link = replace(link, within_node=True)
    cards = networks[0].bytes_per_s
    speeds = [bytes_per_s * (level.bytes_per_s / cards) for level in networks]
    rest = tuple(level for level in outer if level.name not in NETWORKS)
    pairs = zip(networks, speeds, strict=True)
    return link, (*rest, *(replace(level, bytes_per_s=speed, source="given") for level, speed in pairs))


def _parse_base(text: str, world_size: int, device_type: str) -> Cluster:
    if (match := re.fullmatch(r"local(?::(\d+))?", text)) is not None:
        return Cluster.local(int(match.group(1)) if match.group(1) else world_size, device_type)
    if text.endswith((".yaml", ".yml")):
        return Cluster.read(text)
    if (match := re.fullmatch(r"(\d+)x(\d+)x([A-Za-z0-9].*)", text)) is not None:
        return Cluster.of_catalog(int(match.group(1)), int(match.group(2)), match.group(3))
    if (match := re.fullmatch(r"(\d+)x\s*(\S.*)", text)) is not None:
        count, name = int(match.group(1)), match.group(2)
        if _is_device(name):
            return _one_node(count, name)
        if not catalog.instance_names(name):
            known = [
                *catalog.nearest_names(name, list(catalog.entries())),
                *catalog.nearest_names(name, list(catalog.instances())),
            ]
            raise PinError(
                f"cluster {text!r}: {name!r} is neither a device nor a cloud instance of the catalog; "
                f"nearest: {', '.join(known) or 'none'}; a YAML file describes any other (docs/clusters.md)"
            )
        return Cluster.of_instances(count, name)
    if text and _is_device(text):
        return _one_node(1, text)
    if text and catalog.instance_names(text):
        return Cluster.of_instances(1, text)
    near = catalog.nearest_names(text, list(catalog.entries()))
    example = f"2x{catalog.entry(near[0]).devices_per_node}x{near[0]}" if near else "2x8xh100-sxm5-80gb"
    raise PinError(
        f"cluster {text!r} is not known; use 'local', 'local:N', nodes x devices per node x device ({example}), "
        "devices x device (8xh100, 64xh100), nodes x cloud instance (2xp5.48xlarge), a YAML file or a Cluster"
    )


def _is_device(name: str) -> bool:
    """Return True if a name is that of a device, not of an instance."""
    return name not in catalog.instances() and bool(catalog.device_ids(name))


def _one_node(count: int, device_id: str) -> Cluster:
    """Return one node of `count` devices, or the usual nodes that they fill. Raises PinError if one is not full."""
    usual = catalog.entry(device_id)
    most = usual.devices_per_node
    if count > most and count % most == 0:
        return Cluster.of_catalog(count // most, most, device_id)
    if count > most:
        raise PinError(
            f"cluster '{count}x{device_id}' is one node of {count} devices, but a node of {usual.id} usually has "
            f"{most}; write nodes x devices per node x device, for example {math.ceil(count / most)}x{most}x{usual.id}"
        )
    return Cluster.of_catalog(1, count, device_id)


def _read_overrides(text: str, overrides: str) -> Mapping[str, float]:
    out: dict[str, float] = {}
    for part in overrides.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        check_names((name,), OVERRIDES, f"cluster {text!r}", "override")
        if name in out:
            raise PinError(f"cluster {text!r}: {name} is given twice; remove one of the two")
        try:
            out[name] = int(value) if OVERRIDES[name].legal.whole else float(value)
        except ValueError:
            kind = "a whole number" if name in (*_NODES, _IDLE) else "a number"
            raise PinError(f"cluster {text!r}: {name}{equals}{value} needs {kind} ({OVERRIDES[name].what})") from None
    return out
