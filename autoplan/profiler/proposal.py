"""Propose a cluster file for this machine: `autoplan profile --write-cluster FILE`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from autoplan.cost_models.hardware import catalog
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.cost_models.network.collectives import wire_bytes
from autoplan.cost_models.profile import BANDWIDTH_BYTES, Profile
from autoplan.errors import PinError
from autoplan.profiler.topology import LinkKind, Topology
from autoplan.report.files import write_text
from autoplan.units import GB, MICRO, TERA

# The driver's names without "NVIDIA" or "Tesla" -> id in the catalog.
_CATALOG: tuple[tuple[str, str], ...] = (
    (r"V100-SXM2-16GB", "v100-sxm2-16gb"),
    (r"V100-SXM2-32GB", "v100-sxm2-32gb"),
    (r"V100-SXM3-32GB(-H)?", "v100-sxm3-32gb"),
    (r"A100-SXM4-40GB", "a100-sxm4-40gb"),
    (r"A100-SXM4-80GB", "a100-sxm4-80gb"),
    (r"A100-PCIE-40GB", "a100-pcie-40gb"),
    (r"A100 80GB PCIe", "a100-pcie-80gb"),
    (r"H100 80GB HBM3", "h100-sxm5-80gb"),
    (r"H100 PCIe", "h100-pcie-80gb"),
    (r"H100 NVL", "h100-nvl-94gb"),
    (r"H200", "h200-sxm-141gb"),
    (r"H800", "h800-sxm-80gb"),
    (r"B200", "b200-sxm-180gb"),
    (r"B300.*", "b300-sxm-288gb"),
    (r"GB200", "gb200-nvl72"),
    (r"GB300", "gb300-nvl72"),
    (r"L40S", "l40s-48gb"),
    (r"GeForce RTX 4090", "rtx4090-24gb"),
    (r"A800-SXM4-80GB", "a800-sxm4-80gb"),
    (r"A800 80GB PCIe", "a800-pcie-80gb"),
    (r"H20", "h20-sxm-96gb"),
    (r"GH200 (120|480)GB", "gh200-96gb"),
    (r"GH200 144G HBM3e", "gh200-144gb"),
    (r"T4", "t4-16gb"),
    (r"A10", "a10-24gb"),
    (r"A10G", "a10g-24gb"),
    (r"A40", "a40-48gb"),
    (r"L4", "l4-24gb"),
    (r"L40", "l40-48gb"),
    (r"GeForce RTX 3080", "rtx3080-10gb"),
    (r"GeForce RTX 3090", "rtx3090-24gb"),
    (r"GeForce RTX 4080", "rtx4080-16gb"),
    (r"GeForce RTX 5090", "rtx5090-32gb"),
    (r"RTX A5000", "rtx-a5000-24gb"),
    (r"RTX A6000", "rtx-a6000-48gb"),
    (r"RTX 6000 Ada Generation", "rtx-6000-ada-48gb"),
    (r"RTX PRO 6000 Blackwell Workstation Edition", "rtx-pro-6000-workstation-96gb"),
    (r"RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000-server-96gb"),
    (r"GB10", "gb10-128gb"),
)
_NVLINKS = (LinkKind.NVSWITCH, LinkKind.NVLINK)
_CPU_MEMORY_SHARE = 0.9  # of the machine: the rest is for the system and the interpreters


def catalog_id(name: str) -> str | None:
    """Return the catalog's id of a device by its driver's name; None if the catalog lacks it."""
    plain = re.sub(r"^(NVIDIA|Tesla)\s+", "", re.sub(r"^NVIDIA\s+", "", name.strip()))
    return next((found for pattern, found in _CATALOG if re.fullmatch(pattern, plain)), None)


def cluster_data(
    topology: Topology, num_nodes: int = 1, profile: Profile | None = None, processes_per_node: int = 1
) -> tuple[dict[str, Any], list[str]]:
    """Return the contents of a cluster file, and lines that say what to check in it.

    Args:
        topology: one node of the cluster.
        num_nodes: the number of equal nodes.
        profile: of the machine; if links were measured on a CPU, their bandwidth is used.
        processes_per_node: number of devices of a machine without accelerators.

    Raises:
        PinError: for devices that differ, or that the catalog lacks; it names them and what to write instead.
    """
    if not topology.devices:
        return _of_cpus(topology, num_nodes, profile, processes_per_node)
    names = sorted({d.name for d in topology.devices})
    if len(names) > 1:
        raise PinError(f"this machine has devices of several kinds ({', '.join(names)}); a cluster must have one kind")
    found = catalog_id(names[0])
    if found is None:
        near = catalog.nearest_names(names[0].lower().replace(" ", "-"), list(catalog.entries()))
        raise PinError(
            f"device {names[0]!r} is not in the catalog{'; nearest: ' + ', '.join(near) if near else ''}; write a "
            "cluster file with device: {name, peak_tflops, memory_gb, memory_gb_s}"
        )
    entry, checks = catalog.entry(found), []
    data: dict[str, Any] = {"nodes": num_nodes, "devices_per_node": len(topology.devices), "device": found}
    nic = topology.nic_gbit_s_per_device
    if nic is not None:
        data["nic_gbit_s"] = round(nic, 3)
        cards = ", ".join(n.name for n in topology.fabric_nics)
        checks.append(f"nic_gbit_s: the sum of {cards} over the devices")
    else:
        checks.append("no network card says how fast it is: the network is the catalog's")
    joined = any(link.kind in _NVLINKS for link in topology.links)
    if entry.scaleup.fabric.startswith("nvlink") and topology.links and not joined:
        kinds = ", ".join(sorted({link.kind.value for link in topology.links}))
        checks.append(f"the catalog's {found} is joined by NVLink, these devices by {kinds}: give levels: scale-up")
    return data, checks


def _of_cpus(
    topology: Topology, num_nodes: int, profile: Profile | None, processes: int
) -> tuple[dict[str, Any], list[str]]:
    assumed = Cluster.local(1, "cpu")
    device = assumed.device
    memory = device.memory_bytes if topology.memory_bytes is None else topology.memory_bytes
    nic = topology.nic_gbit_s_per_device
    inside = _measured_bytes_per_s(profile, processes, across=False) or assumed.link.bytes_per_s
    levels: list[dict[str, Any]] = [
        {"name": "node", "gb_s": _short(inside / GB), "latency_us": assumed.link.latency_s / MICRO, "within_node": True}
    ]
    checks = ["peak_tflops, memory_gb_s and latencies are assumed: plan with the profile, which overrides them"]
    if num_nodes > 1:
        across = _measured_bytes_per_s(profile, processes, across=True)
        if across is None:
            across = (nic * GB / 8 / processes) if nic is not None else assumed.link.bytes_per_s
            checks.append("network: " + ("the card's speed" if nic is not None else "assumed, no card says its speed"))
        levels.append({"name": "network", "gb_s": _short(across / GB), "latency_us": assumed.link.latency_s / MICRO})
    data = {
        "nodes": num_nodes,
        "devices_per_node": processes,
        "device_type": "cpu",
        "device": {
            "name": "cpu",
            "peak_tflops": device.peak_flops / TERA,
            "memory_gb": _short(_CPU_MEMORY_SHARE * memory / processes / GB),
            "memory_gb_s": device.memory_bytes_per_s / GB,
            "source": "assumed",
        },
        "levels": levels,
    }
    return data, checks


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def _measured_bytes_per_s(profile: Profile | None, per_node: int, across: bool) -> float | None:
    """Return the bytes per second that a rank sends in the largest measured all-gather inside or across nodes."""
    records = [
        r
        for r in (profile.links if profile is not None else ())
        if r.kind == "all_gather" and r.num_bytes >= BANDWIDTH_BYTES and r.crosses_nodes(per_node) is across
    ]
    if not records:
        return None
    largest = max(records, key=lambda r: (r.num_bytes, r.group_size))
    return wire_bytes(largest.kind, largest.num_bytes, largest.group_size) / largest.time_s.median


def write_cluster(
    path: Path | str,
    topology: Topology,
    num_nodes: int = 1,
    profile: Profile | None = None,
    processes_per_node: int = 1,
) -> Cluster:
    """Write the proposal as YAML for `Cluster.read`, and return its cluster.

    Raises:
        PinError: for devices as `cluster_data` does, and for a file that cannot be written.
    """
    import yaml

    data, checks = cluster_data(topology, num_nodes, profile, processes_per_node)
    cluster = Cluster.of_mapping(data)
    lines = [
        "# proposed by autoplan profile from what the machine says of itself; check it",
        *(f"# {c}" for c in checks),
    ]
    write_text(path, "\n".join(lines) + "\n" + yaml.safe_dump(data, sort_keys=False))
    return cluster
