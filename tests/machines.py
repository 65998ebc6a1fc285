"""What five machines say of themselves: outputs of nvidia-smi and files of the kernel, as their documents show them.

Put together from NVIDIA's documents of DGX H100, DGX A100 and GB200 and from the format of the tools; not recorded by
this project, which had no such machine at hand.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from autoplan.profiler.system import Unreadable
from autoplan.profiler.topology import GPU_QUERY, TOPO_QUERY


@dataclass
class Recorded:
    """A System of recorded answers."""

    commands: dict[tuple[str, ...], str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)

    def run(self, *command: str) -> str:
        if command not in self.commands:
            raise Unreadable(f"{command[0]} is not installed")
        return self.commands[command]

    def read(self, path: str) -> str:
        if path not in self.files:
            raise Unreadable(f"{path}: no such file")
        return self.files[path]

    def names(self, folder: str) -> list[str]:
        found = {p.removeprefix(f"{folder}/").split("/")[0] for p in self.files if p.startswith(f"{folder}/")}
        return sorted(found)


def _cpu(model: str, cores: int, memory_kb: int, *cpulists: str) -> dict[str, str]:
    lines = "\n\n".join(f"processor\t: {i}\nmodel name\t: {model}\ncpu MHz\t\t: 2000.000" for i in range(cores))
    out = {"/proc/cpuinfo": lines, "/proc/meminfo": f"MemTotal:       {memory_kb} kB\nMemFree: 1 kB"}
    return out | {f"/sys/devices/system/node/node{i}/cpulist": cpus for i, cpus in enumerate(cpulists)}


def _cards(names: list[str], rate: str, layer: str, numa: list[int], state: str = "4: ACTIVE") -> dict[str, str]:
    out = {}
    for name, node in zip(names, numa, strict=True):
        at = f"/sys/class/infiniband/{name}"
        out[f"{at}/ports/1/rate"], out[f"{at}/ports/1/link_layer"] = rate, layer
        out[f"{at}/ports/1/state"], out[f"{at}/device/numa_node"] = state, str(node)
    return out


def _gpus(name: str, memory_mib: int, buses: list[str]) -> str:
    return "".join(f"{i}, {name}, {memory_mib}, 00000000:{bus}:00.0\n" for i, bus in enumerate(buses))


def _pci(buses: list[str], numa: list[int]) -> dict[str, str]:
    return {f"/sys/bus/pci/devices/0000:{b.lower()}:00.0/numa_node": str(n) for b, n in zip(buses, numa, strict=True)}


def _legend(names: list[str]) -> str:
    kinds = """
Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NODE = Connection traversing PCIe as well as the interconnect between PCIe Host Bridges within a NUMA node
  PHB  = Connection traversing PCIe as well as a PCIe Host Bridge (typically the CPU)
  PXB  = Connection traversing multiple PCIe bridges (without traversing the PCIe Host Bridge)
  PIX  = Connection traversing at most a single PCIe bridge
  NV#  = Connection traversing a bonded set of # NVLinks

NIC Legend:

"""
    return kinds + "".join(f"  NIC{i}: {name}\n" for i, name in enumerate(names)) + "\n"


_TAIL = "CPU Affinity\tNUMA Affinity\tGPU NUMA ID"


def _tabs(text: str) -> str:
    return "\n".join("\t".join(line.split()) for line in text.strip().splitlines()) + "\n"


_H100_NICS = [f"mlx5_{i}" for i in range(12)]
_H100_BUSES = ["1B", "43", "52", "61", "9D", "C3", "D1", "DF"]
_HEAD_12 = "\x1b[4m\t" + "\t".join([*(f"GPU{i}" for i in range(8)), *(f"NIC{i}" for i in range(12))])
DGX_H100 = Recorded(
    {
        GPU_QUERY: _gpus("NVIDIA H100 80GB HBM3", 81559, _H100_BUSES),
        TOPO_QUERY: f"{_HEAD_12}\t{_TAIL}\x1b[0m\n"
        + _tabs("""
GPU0 X NV18 NV18 NV18 NV18 NV18 NV18 NV18 PXB NODE NODE NODE NODE NODE SYS SYS SYS SYS SYS SYS 0-55,112-167 0 N/A
GPU1 NV18 X NV18 NV18 NV18 NV18 NV18 NV18 NODE NODE NODE PXB NODE NODE SYS SYS SYS SYS SYS SYS 0-55,112-167 0 N/A
GPU2 NV18 NV18 X NV18 NV18 NV18 NV18 NV18 NODE NODE NODE NODE PXB NODE SYS SYS SYS SYS SYS SYS 0-55,112-167 0 N/A
GPU3 NV18 NV18 NV18 X NV18 NV18 NV18 NV18 NODE NODE NODE NODE NODE PXB SYS SYS SYS SYS SYS SYS 0-55,112-167 0 N/A
GPU4 NV18 NV18 NV18 NV18 X NV18 NV18 NV18 SYS SYS SYS SYS SYS SYS PXB NODE NODE NODE NODE NODE 56-111,168-223 1 N/A
GPU5 NV18 NV18 NV18 NV18 NV18 X NV18 NV18 SYS SYS SYS SYS SYS SYS NODE NODE NODE PXB NODE NODE 56-111,168-223 1 N/A
GPU6 NV18 NV18 NV18 NV18 NV18 NV18 X NV18 SYS SYS SYS SYS SYS SYS NODE NODE NODE NODE PXB NODE 56-111,168-223 1 N/A
GPU7 NV18 NV18 NV18 NV18 NV18 NV18 NV18 X SYS SYS SYS SYS SYS SYS NODE NODE NODE NODE NODE PXB 56-111,168-223 1 N/A
NIC0 PXB NODE NODE NODE SYS SYS SYS SYS X NODE NODE NODE NODE NODE SYS SYS SYS SYS SYS SYS
NIC1 NODE NODE NODE NODE SYS SYS SYS SYS NODE X PIX NODE NODE NODE SYS SYS SYS SYS SYS SYS
""")
        + _legend(_H100_NICS),
    },
    {
        **_cpu("Intel(R) Xeon(R) Platinum 8480CL", 4, 2113415396, "0-55,112-167", "56-111,168-223"),
        **_cards(_H100_NICS, "400 Gb/sec (4X NDR)", "InfiniBand", [0] * 6 + [1] * 6),
        **_pci(_H100_BUSES, [0] * 4 + [1] * 4),
    },
)

_A100_NICS = [f"mlx5_{i}" for i in range(8)]
A100_NICS = Recorded(
    {
        GPU_QUERY: _gpus("NVIDIA A100-SXM4-80GB", 81920, ["07", "0F", "47", "4E", "87", "90", "B7", "BD"]),
        TOPO_QUERY: "\t"
        + "\t".join([*(f"GPU{i}" for i in range(8)), *(f"NIC{i}" for i in range(8))])
        + "\tCPU Affinity\tNUMA Affinity\n"
        + _tabs("""
GPU0 X NV12 NV12 NV12 NV12 NV12 NV12 NV12 PXB PXB SYS SYS SYS SYS SYS SYS 48-63,176-191 3
GPU1 NV12 X NV12 NV12 NV12 NV12 NV12 NV12 PXB PXB SYS SYS SYS SYS SYS SYS 48-63,176-191 3
GPU2 NV12 NV12 X NV12 NV12 NV12 NV12 NV12 SYS SYS PXB PXB SYS SYS SYS SYS 16-31,144-159 1
GPU3 NV12 NV12 NV12 X NV12 NV12 NV12 NV12 SYS SYS PXB PXB SYS SYS SYS SYS 16-31,144-159 1
GPU4 NV12 NV12 NV12 NV12 X NV12 NV12 NV12 SYS SYS SYS SYS PXB PXB SYS SYS 112-127,240-255 7
GPU5 NV12 NV12 NV12 NV12 NV12 X NV12 NV12 SYS SYS SYS SYS PXB PXB SYS SYS 112-127,240-255 7
GPU6 NV12 NV12 NV12 NV12 NV12 NV12 X NV12 SYS SYS SYS SYS SYS SYS PXB PXB 80-95,208-223 5
GPU7 NV12 NV12 NV12 NV12 NV12 NV12 NV12 X SYS SYS SYS SYS SYS SYS PXB PXB 80-95,208-223 5
""")
        + _legend(_A100_NICS),
    },
    {
        **_cpu("AMD EPYC 7742 64-Core Processor", 4, 2113547556, *(f"{16 * i}-{16 * i + 15}" for i in range(8))),
        **_cards(_A100_NICS, "200 Gb/sec (4X HDR)", "InfiniBand", [3, 3, 1, 1, 7, 7, 5, 5]),
    },
)

L40S = Recorded(
    {
        GPU_QUERY: _gpus("NVIDIA L40S", 46068, ["21", "22", "A1", "A2"]),
        TOPO_QUERY: "\t"
        + "\t".join([*(f"GPU{i}" for i in range(4)), "NIC0", "NIC1"])
        + f"\t{_TAIL}\n"
        + _tabs("""
GPU0 X PIX SYS SYS NODE NODE 0-31 0 N/A
GPU1 PIX X SYS SYS NODE NODE 0-31 0 N/A
GPU2 SYS SYS X PIX SYS SYS 32-63 1 N/A
GPU3 SYS SYS PIX X SYS SYS 32-63 1 N/A
""")
        + _legend(["mlx5_0", "mlx5_1"]),
    },
    {
        **_cpu("AMD EPYC 9354 32-Core Processor", 4, 792000000, "0-31", "32-63"),
        **_cards(["mlx5_0"], "100 Gb/sec (4X EDR)", "Ethernet", [0]),
        **_cards(["mlx5_1"], "40 Gb/sec (4X QDR)", "Ethernet", [0], "1: DOWN"),
    },
)

_GB200_NICS = ["mlx5_0", "mlx5_1", "mlx5_4", "mlx5_5"]
_GB200_TOPO = (
    "\t"
    + "\t".join([*(f"GPU{i}" for i in range(4)), *(f"NIC{i}" for i in range(4))])
    + f"\t{_TAIL}\n"
    + _tabs("""
GPU0 X NV18 NV18 NV18 NODE NODE SYS SYS 0-71 0,2-17 N/A
GPU1 NV18 X NV18 NV18 NODE NODE SYS SYS 0-71 0,2-17 N/A
GPU2 NV18 NV18 X NV18 SYS SYS NODE NODE 72-143 1,18-33 N/A
GPU3 NV18 NV18 NV18 X SYS SYS NODE NODE 72-143 1,18-33 N/A
""")
    + _legend(_GB200_NICS)
)
GB200 = Recorded(
    {
        GPU_QUERY: "".join(f"{i}, NVIDIA GB200, 189471, 0000000{d}:01:00.0\n" for i, d in enumerate((8, 9, 18, 19))),
        TOPO_QUERY: _GB200_TOPO,
    },
    {
        **_cpu("Neoverse-V2", 4, 1000000000, "0-71", "72-143"),
        **_cards(_GB200_NICS, "400 Gb/sec (4X NDR)", "InfiniBand", [0, 0, 1, 1]),
    },
)

CPU_ONLY = Recorded(
    {},
    {
        **_cpu("AMD EPYC", 2, 26000000, "0-1"),
        "/sys/class/net/lo/speed": "",
        "/sys/class/net/lo/operstate": "unknown",
        "/sys/class/net/eth0/device/numa_node": "-1",
        "/sys/class/net/eth0/speed": "10000",
        "/sys/class/net/eth0/operstate": "up",
    },
)
