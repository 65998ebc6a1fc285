"""What the profiler records of machines: topology, clocks, nodes, device timers, and what is made of them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import machines
import pytest
import torch

from autoplan.config.parallel import ParallelConfig
from autoplan.config.precision import Precision
from autoplan.cost_models.costs import Costs
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.cost_models.profile import LinkRecord, MeasuredOp, Profile, Timing
from autoplan.cost_models.time.blocks import BlockPricer
from autoplan.cost_models.work import OpWork, Workload
from autoplan.errors import PinError, ProfileError
from autoplan.ops.saved import TensorFacts
from autoplan.profiler import clocks, command
from autoplan.profiler.clocks import (
    CLOCK_QUERY,
    PROCESS_QUERY,
    clock_warnings,
    load_warning,
    parse_clocks,
    read_states,
    time_warnings,
)
from autoplan.profiler.nodes import MeasuredNodes, agree_on_nodes, num_nodes, under_torchrun
from autoplan.profiler.ops import DeviceTimer
from autoplan.profiler.proposal import catalog_id, cluster_data, write_cluster
from autoplan.profiler.show import summary
from autoplan.profiler.system import ThisMachine, Unreadable
from autoplan.profiler.topology import GPU_QUERY, TOPO_QUERY, LinkKind, Topology, detect, parse_matrix, parse_rate
from autoplan.runtime.failure import RankFailure

# -- topology ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("machine", "pairs", "numa", "nic_gbit_s", "fabric", "cluster"),
    [
        (machines.DGX_H100, {"NVSwitch": 28}, [0] * 4 + [1] * 4, 400, 8, "h100-sxm5-80gb"),
        (machines.A100_NICS, {"NVSwitch": 28}, [3, 3, 1, 1, 7, 7, 5, 5], 200, 8, "a100-sxm4-80gb"),
        (machines.L40S, {"PIX": 2, "SYS": 4}, [0, 0, 1, 1], 25, 1, "l40s-48gb"),
        (machines.GB200, {"NVSwitch": 6}, [0, 0, 1, 1], 400, 4, "gb200-nvl72"),
        (machines.CPU_ONLY, {}, [], 10, 1, None),
    ],
    ids=["dgx-h100", "a100", "l40s", "gb200", "cpu"],
)
def test_topology_of_known_machines(
    machine: machines.Recorded,
    pairs: dict[str, int],
    numa: list[int],
    nic_gbit_s: float,
    fabric: int,
    cluster: str | None,
    tmp_path: Path,
) -> None:
    found = detect(machine)
    kinds = [link.kind.value for link in found.links]
    assert {k: kinds.count(k) for k in kinds} == pairs
    assert [d.numa_node for d in found.devices] == numa
    assert found.nic_gbit_s_per_device == nic_gbit_s and len(found.fabric_nics) == fabric
    assert bool(found.notes) is (cluster is None)  # without nvidia-smi it says so
    assert Topology.of(json.loads(json.dumps(found.data()))) == found
    assert any("Gbit/s" in line for line in found.lines())

    proposed = write_cluster(tmp_path / "cluster.yaml", found, num_nodes=2, processes_per_node=2)
    assert Cluster.read(tmp_path / "cluster.yaml") == proposed == Cluster.parse(str(tmp_path / "cluster.yaml"))
    assert proposed.num_nodes == 2 and proposed.levels[-1].name in ("network", "scale-up")
    if cluster is not None:
        assert proposed.device.name == cluster and proposed.devices_per_node == len(found.devices)
        assert dict(proposed.given)["nic"] == nic_gbit_s
    else:
        assert proposed.device_type == "cpu" and proposed.devices_per_node == 2


def test_cards_know_their_devices() -> None:
    dgx = {n.name: n for n in detect(machines.DGX_H100).nics}
    assert (dgx["mlx5_3"].nearest, dgx["mlx5_3"].distance) == ((1,), LinkKind.PXB)
    assert (dgx["mlx5_1"].nearest, dgx["mlx5_1"].distance) == ((0, 1, 2, 3), LinkKind.NODE)  # storage
    tray = {n.name: n for n in detect(machines.GB200).nics}
    assert tray["mlx5_4"].nearest == (2, 3)
    down = {n.name: n for n in detect(machines.L40S).nics}["mlx5_1"]
    assert not down.active and down.gbit_s == 40


def test_links_between_devices() -> None:
    bridged = parse_matrix("\tGPU0\tGPU1\tmlx5_0\tCPU Affinity\nGPU0\t X \tNV12\tPHB\t0-7\nGPU1\tNV12\t X \tSYS\t0-7\n")
    assert [(x.kind, x.num_links) for x in bridged.links] == [(LinkKind.NVLINK, 12)]
    assert bridged.nics == {"mlx5_0": {0: LinkKind.PHB, 1: LinkKind.SYS}}  # drivers before the legend
    assert detect(machines.L40S).link(3, 0).kind is LinkKind.SYS  # type: ignore[union-attr]
    with pytest.raises(Unreadable, match="'QQQ' between GPU0 and GPU1 is not known"):
        parse_matrix("\tGPU0\tGPU1\nGPU0\tX\tQQQ\n")
    with pytest.raises(Unreadable, match="no matrix"):
        parse_matrix("Failed to initialize NVML")
    assert parse_rate("400 Gb/sec (4X NDR)") == 400 and parse_rate("2.5 Gb/sec (1X SDR)") == 2.5
    assert parse_rate("0 Gb/sec") is None and parse_rate("") is None


def test_what_a_machine_does_not_say_is_noted() -> None:
    broken = machines.Recorded({**machines.L40S.commands, TOPO_QUERY: "no permission"}, machines.L40S.files)
    found = detect(broken)
    assert len(found.devices) == 4 and not found.links and "no matrix" in found.notes[0]
    garbled = machines.Recorded({GPU_QUERY: "0, NVIDIA L40S\n"}, {})
    assert "is not index, name, memory, bus id" in detect(garbled).notes[0]
    here = detect()  # whatever this machine is
    assert here.num_cores >= 1 and here.lines()
    with pytest.raises(Unreadable, match="no-such-command is not installed"):
        ThisMachine().run("no-such-command")
    with pytest.raises(Unreadable, match="exit code 3: said why"):
        ThisMachine().run("sh", "-c", "echo said why >&2; exit 3")


def test_old_gpus_multiply_in_the_16_bits_that_their_matrix_units_have(monkeypatch: pytest.MonkeyPatch) -> None:
    for capability, dtype in ({(7, 5): torch.float16, (8, 0): torch.bfloat16, (12, 0): torch.bfloat16}).items():
        monkeypatch.setattr(clocks, "cuda_capability", lambda device, known=capability: known)
        assert clocks.half_dtype(torch.device("cuda")) is dtype


def test_proposals_refuse_what_no_catalog_has() -> None:
    assert catalog_id("Tesla V100-SXM2-32GB") == "v100-sxm2-32gb" and catalog_id("NVIDIA T40") is None
    assert catalog_id("Tesla T4") == "t4-16gb" and catalog_id("NVIDIA GeForce RTX 3090") == "rtx3090-24gb"
    found = detect(machines.L40S)
    other = dataclasses.replace(found.devices[0], name="NVIDIA T40")
    with pytest.raises(PinError, match="several kinds"):
        cluster_data(dataclasses.replace(found, devices=(other, found.devices[1])))
    with pytest.raises(PinError, match="'NVIDIA T40' is not in the catalog"):
        cluster_data(dataclasses.replace(found, devices=(other,)))
    sxm = tuple(dataclasses.replace(d, name="NVIDIA H100 80GB HBM3") for d in found.devices)
    _, checks = cluster_data(dataclasses.replace(found, devices=sxm, nics=()))
    assert any("joined by NVLink, these devices by PIX, SYS" in c for c in checks)
    assert any("no network card says" in c for c in checks)


def test_a_proposal_that_cannot_be_written_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PinError, match="there is no folder"):
        write_cluster(tmp_path / "missing" / "c.yaml", detect(machines.DGX_H100))

    def measured(*_: object, **__: object) -> None:
        raise AssertionError("measured before the folder was looked at")

    monkeypatch.setattr(command, "measure", measured)
    for path in (tmp_path / "missing" / "c.yaml", tmp_path):
        with pytest.raises(PinError, match=f"cannot write {path}: "):
            command.profile_command(cluster_out=path)


def test_a_cpu_cluster_has_the_links_that_were_measured() -> None:
    second = Timing(1.0, 1.0, 1.0, 3)
    links = (LinkRecord("all_gather", 2, 1, 1 << 30, second), LinkRecord("all_gather", 2, 2, 1 << 28, second))
    data, _ = cluster_data(detect(machines.CPU_ONLY), 2, Profile("p", "cpu", 4, 1, links=links), 2)
    assert [level["gb_s"] for level in data["levels"]] == [0.5369, 0.1342]
    small = tuple(dataclasses.replace(r, num_bytes=64) for r in links)
    data, checks = cluster_data(detect(machines.CPU_ONLY), 2, Profile("p", "cpu", 4, 1, links=small), 2)
    assert [level["gb_s"] for level in data["levels"]] == [1.0, 0.625] and "network: the card's speed" in checks


# -- clocks ------------------------------------------------------------------------------------------------------------

_CLOCKS = "0, GPU-aa, {}, 1980, 2619, 650.12, 61\n1, GPU-bb, 1980, 1980, 2619, [N/A], [Not Supported]\n"


def test_clocks_that_fell_and_company_are_told() -> None:
    before = parse_clocks(_CLOCKS.format(1980), "GPU-aa, 11\nGPU-bb, 12\n")
    assert before[0].clock_mhz == 1980 and before[0].power_w == 650.12 and before[1].power_w is None
    assert clock_warnings(before, before) == []
    assert clock_warnings(before, parse_clocks(_CLOCKS.format(1900))) == []  # 4 %
    (fell,) = clock_warnings(before, parse_clocks(_CLOCKS.format(1755)), " of node 1")
    assert fell.startswith("warning: device 0 of node 1: its clock fell from 1980 to 1755 MHz") and "61 C" in fell
    (shared,) = clock_warnings(before, parse_clocks(_CLOCKS.format(1980), "GPU-aa, 11\nGPU-bb, 12\nGPU-bb, 13\n"))
    assert shared.startswith("warning: device 1 was shared: 2 processes")
    with pytest.raises(Unreadable, match="is not a line of index"):
        parse_clocks("No devices were found")
    assert load_warning(0.2, 2, 2) == [] and "the CPU was shared: load 1.5" in load_warning(1.5, 2, 2)[0]


def product(flops: float, seconds: float, spread: float, dtype: str = "bfloat16") -> MeasuredOp:
    x = TensorFacts((64, 64), dtype, True)
    work = OpWork("linear", (x, x), (x,), (), flops, 1.0)
    return MeasuredOp(work, Timing(seconds, seconds * (1 - spread / 2), seconds * (1 + spread / 2), 7))


def test_times_beside_other_work_are_told() -> None:
    """Half of them spread by more than an idle machine shows; or a product is faster than the large one."""
    steady, uneven = product(1e12, 2e-3, 0.05), product(1e12, 2e-3, 0.6)
    assert time_warnings([], {}) == time_warnings([steady, steady, uneven], {}) == []
    (told,) = time_warnings([steady, uneven, uneven], {})
    assert told.startswith("warning: half of the operations differ by 60 %") and "idle machine" in told
    clock = {"burst_s": 2 * 8192**3 / 500e12, "sustained_s": 1.0}
    assert time_warnings([product(1e12, 1e12 / 600e12, 0.05)], clock) == []  # caches, a shape that fits better
    (told,) = time_warnings([product(1e12, 1e12 / 700e12, 0.05), product(1e12, 1e-4, 0.0, "float8_e4m3fn")], clock)
    assert "ran at 700 TFLOP/s, but one of 8,192 x 8,192 at 500" in told


def test_clocks_of_a_machine() -> None:
    gpus = machines.Recorded({CLOCK_QUERY: _CLOCKS.format(1980)})
    assert [s.num_processes for s in read_states(gpus, "cuda")] == [None, None]
    gpus.commands[PROCESS_QUERY] = "GPU-aa, 11\n"
    assert [s.num_processes for s in read_states(gpus, "cuda")] == [1, None]
    (cpu,) = read_states(machines.CPU_ONLY, "cpu")
    assert cpu.clock_mhz == 2000 and cpu.data() == {"index": 0, "clock_mhz": 2000.0}
    with pytest.raises(Unreadable, match="not installed"):
        read_states(machines.CPU_ONLY, "cuda")


# -- nodes -------------------------------------------------------------------------------------------------------------


def test_ranks_agree_on_nodes() -> None:
    assert agree_on_nodes([("a", "0"), ("a", "0"), ("b", "1"), ("b", "1")]) == MeasuredNodes(("a", "b"), 2)
    assert agree_on_nodes([("a", "0"), ("a", "1")]).names == (
        "a (node rank 0)",
        "a (node rank 1)",
    )  # two agents of one host
    assert agree_on_nodes([("a", "")] * 3) == MeasuredNodes(("a",), 3)
    with pytest.raises(ProfileError, match=r"node b has 1 ranks, a has 2; .*--nproc-per-node 1"):
        agree_on_nodes([("a", "0"), ("a", "0"), ("b", "1")])
    with pytest.raises(ProfileError, match="rank 1 is on node b, between ranks of a"):
        agree_on_nodes([("a", "0"), ("b", "1"), ("a", "0"), ("b", "1")])


def test_failures_name_the_node() -> None:
    nodes = MeasuredNodes(("a", "b"), 2)
    assert str(nodes.explain(RankFailure(3, "killed"))) == "rank 3 failed: on node b: killed"
    several = RankFailure(None, "ranks 2, 3 failed: they are gone", (2, 3))
    assert str(nodes.explain(several)) == "node b: ranks 2, 3 failed: they are gone"
    unknown = RankFailure(None, "a collective broke on every rank")
    assert nodes.explain(unknown) is unknown


def test_number_of_nodes_of_torchrun() -> None:
    env = {"RANK": "0", "WORLD_SIZE": "16", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "8"}
    assert under_torchrun(env) and num_nodes(16, env) == 2
    assert num_nodes(2, env) == 1 and num_nodes(16, {}) == 1  # processes of another job


# -- timing ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Device:
    """A device that does one thing after another, and a host that queues them, each with its clock in seconds."""

    flush_s: float
    launch_s: float
    kernel_s: float
    host: float = 0.0
    device: float = 0.0

    def queue(self, seconds: float) -> None:
        self.host += self.launch_s
        self.device = max(self.device, self.host) + seconds

    def synchronize(self) -> None:
        self.host = self.device = max(self.host, self.device)


class _Event:
    def __init__(self, device: _Device) -> None:
        self.of, self.at = device, 0.0

    def record(self) -> None:
        self.at = max(self.of.device, self.of.host)

    def query(self) -> bool:
        return self.of.host >= self.at

    def elapsed_time(self, other: _Event) -> float:
        return 1e3 * (other.at - self.at)


def test_the_host_is_ahead_of_what_is_timed() -> None:
    device = _Device(flush_s=50e-6, launch_s=10e-6, kernel_s=2e-6)
    timer = DeviceTimer(lambda: _Event(device), lambda: device.queue(device.flush_s), device.synchronize)
    warmed: list[float] = []

    def work() -> None:
        for _ in range(20):
            device.queue(device.kernel_s)

    first, _ = timer.measure(work, None)
    assert timer.late and first > 2 * 20 * device.kernel_s  # the launches were timed
    while timer.late:
        seconds, _ = timer.measure(work, lambda: warmed.append(device.device))
    assert seconds == pytest.approx(20 * device.kernel_s) and timer.lead > 1 and warmed
    slow = _Device(flush_s=1e-6, launch_s=1.0, kernel_s=1e-6)  # one that the host never gets ahead of: it ends
    timer = DeviceTimer(lambda: _Event(slow), lambda: slow.queue(slow.flush_s), slow.synchronize)
    for _ in range(20):
        timer.measure(lambda: slow.queue(slow.kernel_s), None)
    assert not timer.late


# -- what the model makes of it ----------------------------------------------------------------------------------------


_PRECISION = Precision("float32")


def test_a_measured_overlap_overrides_where_there_are_streams() -> None:
    cluster = Cluster.parse("1x8xh100-sxm5-80gb")

    def hides(profile: Profile | None) -> float:
        return BlockPricer(
            Mock(spec=Workload, axes=()), ParallelConfig(), Costs(cluster, profile), _PRECISION
        ).states.hides

    measured = {"overlap_fraction": 0.25}
    assert hides(Profile("p", "cuda", 8, 1, overheads=measured)) == 0.25
    assert hides(Profile("p", "cpu", 8, 1, overheads=measured)) == hides(None) == hides(Profile("p", "cuda", 8, 1))


def test_profiles_keep_what_was_recorded() -> None:
    t = Timing(2.0, 1.5, 2.5, 5)
    alone = LinkRecord("all_reduce", 2, 2, 1 << 22, t, dataclasses.replace(t, median=1.6))
    machine: dict[str, Any] = {
        "topology": detect(machines.DGX_H100).data(),
        "nodes": 2,
        "ranks_per_node": 2,
        "clocks_before": [[{"index": 0, "clock_mhz": 1980.0}]],
        "clocks_after": [[{"index": 0, "clock_mhz": 1700.0}]],
    }
    overheads = {"overlap_fraction": 0.8, "overlap_compute_slowdown": 1.1, "overlap_collective_slowdown": 1.3}
    profile = Profile("p", "cuda", 4, 1, links=(alone,), overheads=overheads, machine=machine)
    again = Profile.from_json(profile.to_json())
    assert again.links == profile.links and again.machine == json.loads(json.dumps(machine))
    assert again.links[0].sharing == 1.25 and again.merged(profile).machine == profile.machine
    assert alone.crosses_nodes(2) and not alone.crosses_nodes(4)
    assert not dataclasses.replace(alone, stride=1).crosses_nodes(2)
    text = rendered(again)
    assert "28 x NVSwitch (18 links)" in text and "80% hidden" in text and "x 1.25" in text and "1700 MHz" in text
    old = Profile("old", "cpu", 2, 1, links=(dataclasses.replace(alone, alone_s=None),)).to_json()
    assert "alone_s" not in old and "machine" not in old and Profile.from_json(old).links[0].alone_s is None


def rendered(profile: Profile) -> str:
    from rich.console import Console

    console = Console(width=200)
    with console.capture() as capture:
        console.print(summary(profile))
    return capture.get()
