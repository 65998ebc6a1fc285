"""Rows of published collective measurements as samples that the cost model can price.

The file has the columns collective, algo, gpu, n_ranks, nodes, link, message_bytes, time_us, source. Rows without a
time or a size (asymptotic bandwidths, fractions of a simulator), of other libraries, and of devices or networks that no
table below names are counted by reason and left out.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from autoplan.cost_models.hardware.catalog import NETWORK_LATENCY_S
from autoplan.cost_models.hardware.parts import Group, Level
from autoplan.units import GB

KINDS = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "sendrecv": "send_recv",
    "ep_dispatch": "ep_dispatch",
    "ep_combine": "ep_combine",
    "ep_alltoall_dispatch": "ep_dispatch",
    "ep_alltoall_combine": "ep_combine",
}
_EXPERT_COPIES = 8  # the rows give one copy of the tokens; each goes to 8 experts
# start of the name of the device -> (fabric, seconds of a hop, GB/s per device and direction, GB/s to one peer)
_LINKS: Mapping[str, tuple[str, float, float, float | None]] = {
    "v100": ("nvlink2", 0.75e-6, 150.0, None),
    "a100-pcie": ("pcie", 1.5e-6, 31.0, None),
    "a100": ("nvlink3", 0.75e-6, 300.0, None),
    "a40": ("pcie", 1.5e-6, 31.0, None),
    "h100": ("nvlink4", 0.75e-6, 450.0, None),
    "h200": ("nvlink4", 0.75e-6, 450.0, None),
    "b200": ("nvlink5", 0.75e-6, 900.0, None),
    "b300": ("nvlink5", 0.75e-6, 900.0, None),
    "gb200": ("nvlink5", 0.75e-6, 900.0, None),
    "gb300": ("nvlink5", 0.75e-6, 900.0, None),
    "l40s": ("pcie_host", 1.5e-6, 31.0, None),
    "rtx_pro_6000": ("pcie", 1.5e-6, 63.0, None),
    "mi300x": ("xgmi", 2e-6, 448.0, 64.0),
}
# part of the link column of rows over several nodes -> GB/s of the network per device and direction
_NETWORKS: Mapping[str, float] = {
    "EFA": 50.0,
    "400 Gb/s per GPU": 50.0,
    "IB NDR 8x400": 50.0,
    "4x HDR 200 Gb/s per node": 12.5,
    "4 NICs, 1 GPU per node": 50.0,
    "single IB NIC": 12.5,  # assumed 200 Gbit/s, shared by two devices
    "InfiniBand (HDR assumed)": 25.0,
    "NVLink + IB": 50.0,  # H100 and H200 with 400 Gbit/s each
}
_NVLINK_DOMAIN = "NVL72"  # part of the link column: nodes of one scale-up domain
# Kernels for experts over 8 nodes have half the speed of 4 in the one table that holds them, however many units work on
# it, where DeepEP's authors publish the same for both (README: 44 and 46 GB/s): the fabric of that machine.
_ODD_EXPERT_NODES = 8
# same measurements twice: the H200 table of expert kernels repeats that of H100
_REPEATED = ("h200_sxm/comm/sglang",)


@dataclass(frozen=True)
class Sample:
    """One measured collective. `source` is what is left out as a whole in cross-validation."""

    kind: str
    device: str
    ranks: int
    nodes: int
    num_bytes: float
    seconds: float
    source: str
    levels: tuple[Level, ...]

    @property
    def group(self) -> Group:
        """Ranks are numbered node by node and all take part."""
        return Group(self.ranks)

    @property
    def fabric(self) -> str:
        """The outermost kind of link that is crossed: the one whose constants matter most."""
        return self.levels[-1].fabric


def _source(text: str) -> str:
    """The table or plot that a row is from: what was measured at once, by one party on one machine."""
    match = re.search(r"systems/data/(\w+)/comm/(\w+)", text)
    if match:
        return f"aiconfigurator {match.group(1)} {match.group(2)}"
    match = re.match(r"VIA-Research/vTrain trace/(\w+)", text)
    if match:
        return f"vTrain {match.group(1)}"
    return re.sub(r"(:\d+.*| \(.*|, digitised.*| row \d+.*)$", "", text)


def _levels(gpu: str, ranks: int, nodes: int, link: str) -> tuple[Level, ...] | None:
    names = [name for name in _LINKS if gpu.lower().startswith(name)]
    if not names:
        return None
    fabric, latency_s, speed, peer = _LINKS[max(names, key=len)]
    p2p = None if peer is None else peer * GB
    per_unit = ranks if _NVLINK_DOMAIN in link else ranks // nodes
    inner = Level(latency_s, speed * GB, "data sheet", "scale-up", per_unit, p2p, True, fabric)
    if nodes == 1 or _NVLINK_DOMAIN in link:
        return (inner,)
    nics = [speed for part, speed in _NETWORKS.items() if part in link]
    if not nics:
        return None
    outer = "efa" if "EFA" in link else "network"
    return (inner, Level(NETWORK_LATENCY_S, nics[0] * GB, "link column", "network", ranks, fabric=outer))


def _sample(row: Mapping[str, str]) -> Sample | str:
    """The sample of one row, or why it is none."""
    if row["collective"] not in KINDS:
        return f"collective {row['collective']}"
    if "SimAI" in row["source"] or not row["time_us"]:
        return "no time (asymptotic bandwidth or a fraction)"
    if "low-latency" in row["algo"] or "UCC" in row["algo"]:
        return f"another library: {row['algo']}"
    if "NVLS off" in row["algo"] or (row["algo"] == "Ring" and row["nodes"] == "1" and int(row["n_ranks"]) > 4):
        return "not what the library chooses: NVLS switched off"
    if any(part in row["source"] for part in _REPEATED):
        return "repeats another table"
    if not (row["message_bytes"] and row["n_ranks"] and row["nodes"]) or int(row["n_ranks"]) < 2:
        return "no size"
    ranks, nodes = int(row["n_ranks"]), int(row["nodes"])
    levels = _levels(row["gpu"], ranks, nodes, row["link"])
    if levels is None:
        return f"device or network not known: {row['gpu']}, {row['link']}"
    kind = KINDS[row["collective"]]
    if kind.startswith("ep_") and nodes == _ODD_EXPERT_NODES and _NVLINK_DOMAIN not in row["link"]:
        return f"kernels for experts over {nodes} nodes: contradicted by the kernels' authors"
    copies = _EXPERT_COPIES if kind.startswith("ep_") else 1
    num_bytes = float(row["message_bytes"]) * copies
    seconds = float(row["time_us"]) * 1e-6
    return Sample(kind, row["gpu"], ranks, nodes, num_bytes, seconds, _source(row["source"]), levels)


def read_samples(path: Path) -> tuple[list[Sample], Counter[str]]:
    """All samples of a file, and how many rows are none, by reason."""
    with path.open(encoding="utf-8", newline="") as file:
        return samples_of(csv.DictReader(file))


def samples_of(rows: Iterable[Mapping[str, str]]) -> tuple[list[Sample], Counter[str]]:
    """Return the samples of rows that were read, and the number of rows left out by reason."""
    out, left_out = [], Counter[str]()
    for row in rows:
        made = _sample(row)
        if isinstance(made, Sample):
            out.append(made)
        else:
            left_out[made] += 1
    return out, left_out
