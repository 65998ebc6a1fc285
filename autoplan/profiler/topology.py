"""The topology of this machine: devices, the links between them, NUMA nodes, network cards.

    topology = detect()
    topology.link(0, 1).kind              LinkKind.NVSWITCH
    write_cluster("cluster.yaml", topology, 2)

Sources: `nvidia-smi --query-gpu`, the matrix of `nvidia-smi topo -m` (its legend names the kinds), and the kernel's
/sys/class/infiniband, /sys/class/net, /sys/bus/pci and /sys/devices/system/node. A fact that none of them gives is
None, and `notes` says why. The parsers are pure functions of these texts.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from autoplan.profiler.system import System, ThisMachine, Unreadable, number_in, rows_of
from autoplan.units import MIB


class LinkKind(Enum):
    """The path between two devices, or a device and a network card; nearest first. Words of `nvidia-smi topo`."""

    NVSWITCH = "NVSwitch"  # NVLinks into a switch: every pair has the bandwidth of all links of a device
    NVLINK = "NVLink"  # NVLinks from device to device
    PIX = "PIX"  # one PCIe switch
    PXB = "PXB"  # several PCIe switches
    PHB = "PHB"  # the host bridge of a CPU
    NODE = "NODE"  # host bridges of one NUMA node
    SYS = "SYS"  # the link between sockets

    @property
    def rank(self) -> int:
        """The position in this order, 0 for the nearest."""
        return list(LinkKind).index(self)


@dataclass(frozen=True)
class Accelerator:
    """One device as the driver numbers it; `bus_id` as in /sys/bus/pci/devices."""

    index: int
    name: str
    memory_bytes: int
    bus_id: str
    numa_node: int | None = None


@dataclass(frozen=True)
class PairLink:
    """The link between devices `a` < `b`; `num_links` NVLinks, 0 for PCIe."""

    a: int
    b: int
    kind: LinkKind
    num_links: int = 0


@dataclass(frozen=True)
class Nic:
    """A network card (an active port). `gbit_s` is per direction; `nearest` are all devices at `distance`."""

    name: str
    gbit_s: float | None
    protocol: str  # InfiniBand or Ethernet
    active: bool
    numa_node: int | None = None
    nearest: tuple[int, ...] = ()
    distance: LinkKind | None = None


@dataclass(frozen=True)
class NumaNode:
    """CPUs and memory that are near each other; `cpus` as the kernel lists them, `0-31,64-95`."""

    index: int
    cpus: str


@dataclass(frozen=True)
class Topology:
    """One machine. Without accelerators its device type is `cpu`."""

    cpu: str
    num_cores: int
    memory_bytes: int | None
    devices: tuple[Accelerator, ...] = ()
    links: tuple[PairLink, ...] = ()
    numa_nodes: tuple[NumaNode, ...] = ()
    nics: tuple[Nic, ...] = ()
    notes: tuple[str, ...] = ()

    def link(self, a: int, b: int) -> PairLink | None:
        """Return the link between two devices; None if the driver did not say."""
        low, high = min(a, b), max(a, b)
        return next((x for x in self.links if (x.a, x.b) == (low, high)), None)

    @property
    def fabric_nics(self) -> tuple[Nic, ...]:
        """The cards that devices train over: the fastest active ones behind a PCIe switch with a device.

        If there are none, the fastest active ones of all (storage and management have cards of their own).
        """
        active = [n for n in self.nics if n.active and n.gbit_s]
        near = [n for n in active if n.distance in (LinkKind.PIX, LinkKind.PXB)]
        fastest = max((n.gbit_s or 0.0 for n in near or active), default=0.0)
        return tuple(n for n in near or active if n.gbit_s == fastest)

    @property
    def nic_gbit_s_per_device(self) -> float | None:
        """The network of one device when all of them send, Gbit/s per direction; None if no card says."""
        total = sum(n.gbit_s or 0.0 for n in self.fabric_nics)
        return total / max(1, len(self.devices)) if total else None

    def data(self) -> dict[str, Any]:
        """Return plain data for JSON; enums by value."""
        return dataclasses.asdict(self, dict_factory=_plain)

    @staticmethod
    def of(data: Mapping[str, Any]) -> Topology:
        """Read plain data, as `data` gives it and JSON keeps it."""
        nics = [
            {**n, "nearest": tuple(n["nearest"]), "distance": n["distance"] and LinkKind(n["distance"])}
            for n in data["nics"]
        ]
        return Topology(
            data["cpu"],
            data["num_cores"],
            data["memory_bytes"],
            tuple(Accelerator(**d) for d in data["devices"]),
            tuple(PairLink(**{**x, "kind": LinkKind(x["kind"])}) for x in data["links"]),
            tuple(NumaNode(**n) for n in data["numa_nodes"]),
            tuple(Nic(**n) for n in nics),
            tuple(data["notes"]),
        )

    def lines(self) -> list[str]:
        """Return the main facts for a person, a line each."""
        out = [f"{self.num_cores} cores of {self.cpu}, {len(self.numa_nodes) or 'unknown'} NUMA node(s)"]
        if self.devices:
            names = sorted({d.name for d in self.devices})
            out.append(f"{len(self.devices)} x {', '.join(names)}, NUMA {_grouped(self.devices)}")
        counts: dict[str, int] = {}
        for link in self.links:
            kind = f"{link.kind.value} ({link.num_links} links)" if link.num_links else link.kind.value
            counts[kind] = counts.get(kind, 0) + 1
        if counts:
            out.append("pairs of devices: " + ", ".join(f"{n} x {kind}" for kind, n in counts.items()))
        for nic in self.nics:
            speed = "speed unknown" if nic.gbit_s is None else f"{nic.gbit_s:g} Gbit/s"
            near = f", nearest devices {', '.join(map(str, nic.nearest))}" if nic.nearest else ""
            kind = f" ({nic.distance.value})" if nic.distance is not None else ""
            out.append(f"{nic.name}: {nic.protocol} {speed}{'' if nic.active else ', not active'}{near}{kind}")
        return [*out, *(f"not known: {note}" for note in self.notes)]


def _plain(items: list[tuple[str, Any]]) -> dict[str, Any]:
    return {k: v.value if isinstance(v, Enum) else v for k, v in items}


def _grouped(devices: tuple[Accelerator, ...]) -> str:
    nodes = ["?" if d.numa_node is None else str(d.numa_node) for d in devices]
    return " ".join(nodes)


# -- parsers -----------------------------------------------------------------------------------------------------------

GPU_QUERY = ("nvidia-smi", "--query-gpu=index,name,memory.total,pci.bus_id", "--format=csv,noheader,nounits")
TOPO_QUERY = ("nvidia-smi", "topo", "-m")
_ANSI = re.compile(r"\x1b\[[0-9;]*m")  # the header is underlined, also in a pipe
_LEGEND = re.compile(r"^\s*(NIC\d+):\s*(\S+)\s*$", re.MULTILINE)
# Columns after the matrix, in this order, as far as present.
_TAIL = ("CPU Affinity", "NUMA Affinity", "GPU NUMA ID")
# More NVLinks than any device has (H100, B200: 18; NVIDIA's data sheets): a device with more links to its peers in
# total has the same links to all of them, through a switch.
_MOST_NVLINKS = 18


def parse_gpus(text: str) -> tuple[Accelerator, ...]:
    """Return the devices of `GPU_QUERY`. Raises Unreadable for other lines."""
    out = []
    for parts in rows_of(text, 4, "index, name, memory, bus id"):
        memory = int(float(parts[2]) * MIB) if re.fullmatch(r"[\d.]+", parts[2]) else 0
        out.append(Accelerator(int(parts[0]), parts[1], memory, _sysfs_bus(parts[3])))
    return tuple(out)


def _sysfs_bus(bus_id: str) -> str:
    """Return a bus id as in sysfs, with four digits of the PCI domain instead of nvidia-smi's eight.

    00000000:1B:00.0 becomes 0000:1b:00.0.
    """
    domain, _, rest = bus_id.lower().partition(":")
    return f"{domain[-4:]}:{rest}"


@dataclass(frozen=True)
class Matrix:
    """`nvidia-smi topo -m`: links of devices, distance of (card, device), NUMA node of each device."""

    links: tuple[PairLink, ...]
    nics: Mapping[str, Mapping[int, LinkKind]]
    numa: Mapping[int, int]


_Pair = tuple[int, int]  # devices, the lower number first


def _link(cell: str, where: str) -> tuple[LinkKind, int]:
    """Return the kind of link that a cell names, and its number of NVLinks."""
    nvlinks = re.fullmatch(r"NV(\d+)", cell)
    if nvlinks is not None:
        return LinkKind.NVLINK, int(nvlinks.group(1))
    if cell not in LinkKind.__members__:
        raise Unreadable(f"nvidia-smi topo -m: {cell!r} {where} is not known")
    return LinkKind[cell], 0


def _numa_node(tail: Sequence[str], cells: Sequence[str]) -> int | None:
    """Return the first NUMA node that the cells behind the matrix name, by the columns `tail`."""
    place = tail.index("NUMA Affinity") if "NUMA Affinity" in tail else len(cells)
    first = re.match(r"\d+", cells[place]) if place < len(cells) else None
    return int(first.group()) if first else None


def parse_matrix(text: str) -> Matrix:
    """Read the matrix. Cards are named as in its legend; older drivers name them in the matrix itself.

    Raises:
        Unreadable: if there is no matrix.
    """
    text = _ANSI.sub("", text)
    lines = [line for line in text.splitlines() if line.strip()]
    header = next((i for i, line in enumerate(lines) if re.match(r"\s+GPU0\b", line)), None)
    if header is None:
        raise Unreadable("nvidia-smi topo -m: no matrix that begins with GPU0")
    head = lines[header]
    tail = [name for name in _TAIL if name in head]
    columns = (head[: head.index(tail[0])] if tail else head).split()
    legend = dict(_LEGEND.findall(text))
    counts: dict[_Pair, int] = {}
    kinds: dict[_Pair, LinkKind] = {}
    nics: dict[str, dict[int, LinkKind]] = {}
    numa: dict[int, int] = {}
    for line in lines[header + 1 :]:
        name, *cells = line.split()
        if not re.fullmatch(r"GPU\d+", name) or len(cells) < len(columns):
            continue
        row = int(name[3:])
        for column, cell in zip(columns, cells, strict=False):
            if cell == "X":
                continue
            kind, count = _link(cell, f"between {name} and {column}")
            if re.fullmatch(r"GPU\d+", column):
                key = min(row, int(column[3:])), max(row, int(column[3:]))
                counts[key], kinds[key] = count, kind
            else:
                nics.setdefault(legend.get(column, column), {})[row] = kind
        node = _numa_node(tail, cells[len(columns) :])
        if node is not None:
            numa[row] = node
    return Matrix(_pair_links(kinds, counts), nics, numa)


def _pair_links(kinds: Mapping[_Pair, LinkKind], counts: Mapping[_Pair, int]) -> tuple[PairLink, ...]:
    """Return the links of pairs of devices. A device with more NVLinks than any has is connected to a switch."""
    links = []
    for (a, b), kind in sorted(kinds.items()):
        total = max(sum(n for pair, n in counts.items() if end in pair) for end in (a, b))
        if kind is LinkKind.NVLINK and total > _MOST_NVLINKS:
            kind = LinkKind.NVSWITCH
        links.append(PairLink(a, b, kind, counts[a, b]))
    return tuple(links)


def parse_rate(text: str) -> float | None:
    """Return Gbit/s of an InfiniBand port's `rate`: `400 Gb/sec (4X NDR)`; None for anything else."""
    match = re.match(r"([\d.]+)\s*Gb/sec", text)
    return float(match.group(1)) if match and float(match.group(1)) > 0 else None


# -- this machine ------------------------------------------------------------------------------------------------------


def detect(system: System | None = None) -> Topology:
    """Detect the topology of this machine, or of a recorded one. Never fails: unreadable facts are in `notes`."""
    system = ThisMachine() if system is None else system
    notes: list[str] = []
    devices: tuple[Accelerator, ...] = ()
    matrix = Matrix((), {}, {})
    try:
        devices = parse_gpus(system.run(*GPU_QUERY))
        if devices:
            matrix = parse_matrix(system.run(*TOPO_QUERY))
    except Unreadable as exc:
        notes.append(str(exc))
    placed = []
    for d in devices:
        numa = number_in(system, f"/sys/bus/pci/devices/{d.bus_id}/numa_node")
        placed.append(dataclasses.replace(d, numa_node=matrix.numa.get(d.index) if numa is None else numa))
    nics = _infiniband(system) or _ethernet(system)
    return Topology(
        cpu_model(system) or "an unnamed CPU",
        _num_cores(system),
        _memory_bytes(system),
        tuple(placed),
        matrix.links,
        tuple(
            NumaNode(int(name[4:]), cpus)
            for name in sorted(system.names("/sys/devices/system/node"), key=lambda n: (len(n), n))
            if re.fullmatch(r"node\d+", name) and (cpus := _text(system, f"/sys/devices/system/node/{name}/cpulist"))
        ),
        tuple(_near(nic, matrix, placed) for nic in nics),
        tuple(notes),
    )


def _text(system: System, path: str) -> str:
    try:
        return system.read(path)
    except Unreadable:
        return ""


def cpu_model(system: System) -> str | None:
    """Return the name of the CPU's model; None if the kernel does not give it."""
    match = re.search(r"^model name\s*: (.*)$", _text(system, "/proc/cpuinfo"), re.MULTILINE)
    return match.group(1).strip() if match else None


def _num_cores(system: System) -> int:
    return max(1, len(re.findall(r"^processor\s*:", _text(system, "/proc/cpuinfo"), re.MULTILINE)))


def _memory_bytes(system: System) -> int | None:
    match = re.search(r"^MemTotal:\s*(\d+) kB", _text(system, "/proc/meminfo"), re.MULTILINE)
    return int(match.group(1)) * 1024 if match else None


def _infiniband(system: System) -> list[Nic]:
    """Return the ports of InfiniBand, RoCE and EFA cards: those that NCCL calls IB or that its plugins use."""
    base, out = "/sys/class/infiniband", []
    for card in system.names(base):
        ports = system.names(f"{base}/{card}/ports")
        for port in ports:
            at = f"{base}/{card}/ports/{port}"
            name = card if len(ports) == 1 else f"{card}:{port}"
            out.append(
                Nic(
                    name,
                    parse_rate(_text(system, f"{at}/rate")),
                    _text(system, f"{at}/link_layer") or "InfiniBand",
                    "ACTIVE" in _text(system, f"{at}/state"),
                    number_in(system, f"{base}/{card}/device/numa_node"),
                )
            )
    return out


def _ethernet(system: System) -> list[Nic]:
    """Return the cards with a device behind them: no loopback, no bridges.

    `speed` is in Mbit/s; -1 or an error means not known.
    """
    base, out = "/sys/class/net", []
    for card in system.names(base):
        if not system.names(f"{base}/{card}/device"):
            continue
        mbit_s = number_in(system, f"{base}/{card}/speed")
        out.append(
            Nic(
                card,
                mbit_s / 1e3 if mbit_s else None,
                "Ethernet",
                _text(system, f"{base}/{card}/operstate") == "up",
                number_in(system, f"{base}/{card}/device/numa_node"),
            )
        )
    return out


def _near(nic: Nic, matrix: Matrix, devices: list[Accelerator]) -> Nic:
    distances = matrix.nics.get(nic.name.partition(":")[0])
    if distances:
        nearest = min(distances.values(), key=lambda k: k.rank)
        return dataclasses.replace(
            nic, nearest=tuple(sorted(d for d, k in distances.items() if k is nearest)), distance=nearest
        )
    same = tuple(d.index for d in devices if nic.numa_node is not None and d.numa_node == nic.numa_node)
    return dataclasses.replace(nic, nearest=same, distance=LinkKind.NODE if same else None)
