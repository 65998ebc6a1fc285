"""Clusters: reading them, their levels, the hardware catalog, what-ifs, YAML files."""

import math
import pickle
from dataclasses import replace
from pathlib import Path

import pytest

from autoplan.config.parallel import Mode, RunOptions
from autoplan.cost_models.constants import Constants
from autoplan.cost_models.costs import Costs
from autoplan.cost_models.hardware import catalog
from autoplan.cost_models.hardware.cluster import Cluster, Device, Group, Level
from autoplan.cost_models.hardware.parts import Price
from autoplan.cost_models.kernels.operations import roofline_s
from autoplan.cost_models.quantity import Tag
from autoplan.cost_models.time.host import host_s
from autoplan.cost_models.work import BlockWork, OpWork
from autoplan.errors import PinError
from autoplan.ops.saved import TensorFacts
from autoplan.units import GB, MIB, TERA


def shape(cluster: Cluster) -> list[tuple[str, int]]:
    return [(level.name, level.size) for level in cluster.levels]


@pytest.mark.parametrize("name", catalog.entries())
def test_every_row_of_the_catalog_is_usable(name: str) -> None:
    entry = catalog.entry(name)
    device = entry.device
    assert device.name == name and device.source
    # usable memory is what is sold, less what the driver keeps: never more than the GiB of that number
    assert 0.85 * entry.memory_gb * GB < device.memory_bytes <= entry.memory_gb * 2**30
    assert 1e11 < device.memory_bytes_per_s < 1e14 and 1e13 < device.peak_flops < 1e16
    assert device.peak_flops in device.peak_flops_by_dtype.values()
    assert 0.4 < device.achievable.low <= device.achievable.mid <= device.achievable.high < 1.1
    assert Cluster.of_catalog(1, entry.devices_per_node, name).levels[-1].size == entry.devices_per_node
    if entry.price is not None:
        assert entry.price.usd_per_device_hour > 0 and entry.price.source and entry.price.as_of


def test_catalog_figures_against_the_data_sheets() -> None:
    h100 = catalog.device("h100-sxm5-80gb")  # NVIDIA H100 data sheet, dense
    assert h100.flops("bfloat16") == h100.peak_flops == 989 * TERA and h100.flops("float8") == 1979 * TERA
    assert h100.memory_bytes_per_s == 3350 * GB and h100.power_w == 700
    assert h100.achievable.mid == pytest.approx(794.5 / 989) and h100.achievable.tag is Tag.FITTED
    assert catalog.device("h800-sxm-80gb").achievable.tag is Tag.ASSUMED
    v100 = catalog.device("v100-sxm2-16gb")
    assert v100.peak_flops == 125 * TERA == v100.flops("float16")
    with pytest.raises(PinError, match=r"no figure for bfloat16; it has float16, float32"):
        v100.flops("bfloat16")
    assert catalog.device("gb200-nvl72").memory_bytes == 189_471 * MIB
    assert "peak_tflops_fp8_dense" in catalog.device("h100-nvl-94gb").unverified


def test_cards_on_which_people_fine_tune() -> None:
    """Peaks without sparsity, with float32 accumulation (half the rate on a GeForce), and the memory torch reports."""
    peaks = {name: catalog.device(name).peak_flops / TERA for name in ("rtx3090-24gb", "rtx5090-32gb", "l4-24gb")}
    assert peaks == {"rtx3090-24gb": 71, "rtx5090-32gb": 209.5, "l4-24gb": 121}
    assert (catalog.device("a10-24gb").peak_flops, catalog.device("a10g-24gb").peak_flops) == (125 * TERA, 70 * TERA)
    assert catalog.device("rtx-pro-6000-workstation-96gb").flops("float4") == 2015.2 * TERA
    assert catalog.device("a10g-24gb").memory_bytes == 22_587 * MIB
    assert {catalog.entry(name).scaleup.fabric for name in ("a10g", "t4", "3090", "5090")} == {"pcie_host"}
    assert {catalog.entry(name).scaleup.fabric for name in ("a6000", "rtx-pro-6000-server")} == {"pcie"}
    gh200 = Cluster.parse("2x4xgh200-96gb")
    assert shape(gh200) == [("scale-up", 4), ("network", 8)] and gh200.levels[0].p2p_bytes_per_s == 150 * GB
    assert Cluster.parse("2xgb10").num_nodes == 2  # one per box


def test_a_precision_that_a_device_lacks_names_those_it_has() -> None:
    """Turing has no bfloat16, Ampere no 8-bit floats."""
    others = "fp16, fp32, fp16-autocast"
    with pytest.raises(PinError, match=rf"^t4-16gb has no figure for bfloat16; .*choose a precision .*: {others}$"):
        catalog.device("t4").flops("bfloat16")
    others = "bf16, fp16, fp32, bf16-autocast, fp16-autocast"
    with pytest.raises(PinError, match=rf"^a10g-24gb has no figure for float8; .*a precision .*: {others}$"):
        catalog.device("a10g").flops("float8_block32")


def test_a_rank_of_mi250x_is_one_die() -> None:
    entry = catalog.entry("mi250x-128gb")
    assert entry.devices_per_node == 8 and entry.device.peak_flops == 191.5 * TERA
    assert entry.device.memory_bytes_per_s == 1640 * GB and entry.nic_gbit_s == 100


def test_levels_of_a_node_with_a_switch() -> None:
    cluster = Cluster.parse("16x8xh100-sxm5-80gb")
    assert cluster.num_devices == 128 and shape(cluster) == [("scale-up", 8), ("network", 128)]
    assert [level.bytes_per_s for level in cluster.levels] == [450 * GB, 50 * GB]
    assert shape(Cluster.parse("2x4xh100-sxm5-80gb")) == [("scale-up", 4), ("network", 8)]
    assert shape(Cluster.parse("1x8xh100-sxm5-80gb")) == [("scale-up", 8)]
    assert cluster.link.bytes_per_s == 450 * GB and cluster.device_type == "cuda"


def test_the_scale_up_domain_is_not_the_node() -> None:
    assert shape(Cluster.parse("4x4xgb200-nvl72")) == [("scale-up", 16)]
    assert shape(Cluster.parse("36x4xgb200-nvl72")) == [("scale-up", 72), ("network", 144)]
    bridged = Cluster.parse("2x8xh100-nvl-94gb@nic=200")
    assert shape(bridged) == [("scale-up", 2), ("node", 8), ("network", 16)]
    assert [level.bytes_per_s / GB for level in bridged.levels] == [300, 63, 25]
    mesh = Cluster.parse("1x8xmi300x-192gb").levels[0]
    assert (mesh.bytes_per_s, mesh.p2p_bytes_per_s) == (448 * GB, 64 * GB)
    assert mesh.group_bytes_per_s(2) == 64 * GB and mesh.group_bytes_per_s(8) == 448 * GB


_REACH_BEYOND_A_NODE = ("gb200", "gb300", "tpu")  # NVLink racks and ICI pods


@pytest.mark.parametrize("name", catalog.entries())
def test_nodes_of_one_device_have_no_links_inside(name: str) -> None:
    """Whatever connects the devices of a node: with one device each, nodes are connected by the network alone."""
    cluster = Cluster.of_catalog(8, 1, name, nic_gbit_s=100.0)
    inside = [level for level in cluster.levels if level.name != "network"]
    if name.startswith(_REACH_BEYOND_A_NODE):
        assert shape(cluster) == [("scale-up", 8)] and cluster.domain_size == 8
    else:
        assert shape(cluster) == [("network", 8)] and not inside and cluster.domain_size == 1
        with pytest.raises(PinError, match="names no network"):  # and without one it is refused
            _ = replace(cluster, outer=()).levels
    assert shape(Cluster.of_catalog(1, 1, name)) == [("scale-up", 1)]
    several = Cluster.of_catalog(8, 2, name, nic_gbit_s=100.0)
    assert several.levels[0].name == "scale-up" and several.domain_size >= 2  # negative: nodes of two have theirs


def test_a_collective_between_nodes_of_one_device_goes_over_their_network() -> None:
    def all_reduce_s(text: str) -> float:
        cluster = Cluster.parse(text)
        return (
            Costs(cluster, None, Mode.EAGER, RunOptions(), Constants.shipped())
            .collective_s("all_reduce", 1e9, Group(8, 1))
            .mid
        )

    slow = all_reduce_s("8x1xrtx4090-24gb@nic=10")
    assert slow > 5 * all_reduce_s("8x1xrtx4090-24gb@nic=100") > 0
    assert slow > all_reduce_s("1x8xrtx4090-24gb")


def test_the_network_and_the_price_belong_to_the_instance() -> None:
    a100 = Cluster.parse("4xp4d.24xlarge")
    assert a100.devices_per_node == 8 and a100.levels[-1].bytes_per_s == 50 / 8 * GB
    assert a100.price is not None and a100.price.as_of == "2026-11-09" and "AWS" in a100.price.source
    azure = Cluster.parse("4xStandard_ND96isr_H100_v5")
    assert azure.price is not None and azure.price.usd_per_device_hour == 12.29
    g5 = Cluster.parse("2xg5.12xlarge")
    assert (g5.num_devices, g5.device.name, g5.levels[-1].bytes_per_s) == (8, "a10g-24gb", 10 / 8 * GB)
    assert g5.price is not None and g5.price.usd_per_device_hour == 1.418
    assert len(catalog.instances()) == 78


def test_host_memory_belongs_to_the_instance() -> None:
    """A g5.xlarge has 16 GiB, which no optimizer of 8 B parameters fits; of other nodes it is assumed."""
    assert Cluster.parse("1xg5.xlarge").host_memory_bytes == 16 * 2**30
    assert Cluster.parse("1xg5.48xlarge").host_memory_bytes == 768 * 2**30 / 8
    assert Cluster.parse("1xa10g").host_memory_bytes == Cluster.parse("1xp4d.24xlarge").host_memory_bytes == 128 * GB


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("8xh100", "1x8xh100-sxm5-80gb"),
        ("h100", "1x1xh100-sxm5-80gb"),
        ("2x8xH100", "2x8xh100-sxm5-80gb"),
        ("2x8xh100_sxm5", "2x8xh100-sxm5-80gb"),
        ("2x8xH100-PCIe", "2x8xh100-pcie-80gb"),
        ("8xa100-80gb", "1x8xa100-sxm4-80gb"),  # the module, not the card
        ("4xgb200", "1x4xgb200-nvl72"),
        ("8xmi300@price=2", "1x8xmi300x-192gb@price=2"),
        ("2xP5.48XLARGE", "2xp5.48xlarge"),
        ("2xp5en", "2xp5en.48xlarge"),
        ("g5.xlarge", "1xg5.xlarge"),
        ("2xstandard_nd96isr", "2xStandard_ND96isr_H100_v5"),
        ("8xH100SXM", "1x8xh100-sxm5-80gb"),
        ("1x4090", "1x1xrtx4090-24gb"),
        ("8xa100-80", "1x8xa100-sxm4-80gb"),
        ("8xMI325", "1x8xmi325x-256gb"),
        ("8xa10g", "1x8xa10g-24gb"),
        ("1xt4", "1x1xt4-16gb"),
        ("8xl40", "1x8xl40-48gb"),  # not an L40S
        ("l4", "1x1xl4-24gb"),
        ("2x3090", "1x2xrtx3090-24gb"),
        ("RTX 3090", "1x1xrtx3090-24gb"),
        ("4xA6000", "1x4xrtx-a6000-48gb"),
        ("4xrtx6000ada", "1x4xrtx-6000-ada-48gb"),
        ("8xh20", "1x8xh20-sxm-96gb"),  # not an H200
        ("NVIDIA GeForce RTX 5090", "1x1xrtx5090-32gb"),
    ],
)
def test_names_as_people_write_them(text: str, same: str) -> None:
    assert Cluster.parse(text) == Cluster.parse(same)


def test_every_id_means_itself() -> None:
    for name in catalog.entries():
        assert catalog.entry(name).id == name and catalog.entry(name.upper()).id == name
    for name in catalog.instances():
        assert catalog.instance(name).name == name
    assert Cluster.parse("8xh100").with_device("H100") == Cluster.parse("8xh100")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h1000", "2x8xh100-sxm5-80gb"),
        ("a100", "device 'a100' may be a100-sxm4-40gb or a100-sxm4-80gb; write one of them"),
        ("2x8xtpu-v5", "device 'tpu-v5' may be tpu-v5e or tpu-v5p; write one of them"),
        ("2x8xh100-smx5-80gb", "nearest: h100-sxm5-80gb"),
        ("12xh100", "a node of h100-sxm5-80gb usually has 8; .* for example 2x8xh100-sxm5-80gb"),
        ("g5", r"instance 'g5' may be g5\.xlarge, g5\.2xlarge, g5\.12xlarge or g5\.48xlarge; write one of them"),
        ("2xp5", r"instance 'p5' may be p5\.4xlarge, p5\.48xlarge or p5en\.48xlarge"),
        ("2xp6-b400", "'p6-b400' is neither a device nor a cloud instance of the catalog; nearest: .*p6-b"),
        ("8xb20", "'b20' is neither a device nor a cloud instance of the catalog; nearest: .*b200-sxm"),  # not a B200
        ("l20", "cluster 'l20' is not known"),
        ("8xl400", "nearest: l40"),
        ("a1", "cluster 'a1' is not known"),
        ("pro-6000", "may be rtx-pro-6000-workstation-96gb or rtx-pro-6000-server-96gb; write one of them"),
        ("8xmi250", "'mi250' is neither a device.*nearest: mi250x-128gb"),  # a slower one
        ("0x8xh100-sxm5-80gb", "num_nodes of at least 1"),
        ("4x8xmi355x-288gb", "names no network for it.*@nic=400$"),
        ("8x4090", "more than 4 of the 8 .*@nic=400, or write 1x8xrtx4090-24gb if all are in one machine$"),
        ("2x8xh100-sxm5-80gb@nik=2", "unknown override 'nik'; did you mean 'nic'.*known: nodes"),
        ("2x8xh100-sxm5-80gb@nic=fast", "nic=fast needs a number"),
        ("2x8xh100-sxm5-80gb@nic=0", "must be above 0"),
        ("2x8xh100-sxm5-80gb@nic=nan", "nic=nan: Gbit/s .* must be above 0"),
        ("2x8xh100-sxm5-80gb@price=inf", "price=inf: US dollars .* must be at least 0, and finite"),
        ("2x8xh100-sxm5-80gb@memory_gb=1e308", r"memory_gb=1e\+308 must be a number from 1e-09 to 1e\+06 GB"),
        ("2x8xh100-sxm5-80gb@nodes=99999999", "num_nodes=99999999 must be a whole number from 1"),
        ("local:0", "at least 1"),
        ("nowhere.yaml", "nowhere.yaml does not exist"),
        ("", "is not known"),
    ],
)
def test_what_cannot_be_read_says_what_can(text: str, message: str) -> None:
    with pytest.raises(PinError, match=message):
        Cluster.parse(text)


def test_local_clusters() -> None:
    assert Cluster.parse("local", 4) == Cluster.local(4) and Cluster.parse("local:2", 8).num_devices == 2
    assert shape(Cluster.local(4)) == [("all", 4)] and Cluster.local(4).device.overlap_fraction == 0
    assert Cluster.local(2, "cuda").device.overlap_fraction is None


def test_a_cluster_made_by_hand() -> None:
    device, link = Device("d", 1e12, 1e9, 2**30, "made up"), Level(1e-6, 1e9, "made up")
    flat = Cluster(2, 4, device, link, "cuda")
    assert shape(flat) == [("all", 8)] and flat.device.flops("float8") == 1e12
    assert replace(flat, link=Level(0.0, 5.0, "made up")).levels[0].bytes_per_s == 5.0
    with pytest.raises(PinError, match="innermost unit"):
        Cluster(2, 4, device, link, "cuda", (Level(1e-6, 1e8, "", "network"),))
    with pytest.raises(PinError, match="positive bandwidth"):
        Cluster(2, 4, device, Level(0.0, 0.0, ""), "cuda")
    with pytest.raises(PinError, match="'tpu' is not supported"):
        Cluster(2, 4, device, link, "tpu")
    with pytest.raises(PinError, match="stride of at least 1"):
        Group(2, 0)
    for wrong in ({"memory_bytes": 0}, {"peak_flops": math.nan}, {"achievable_fraction": 0.0}, {"launch_s": math.inf}):
        with pytest.raises(PinError, match=f"device d: {next(iter(wrong))}="):
            replace(device, **wrong)  # type: ignore[arg-type]


def test_what_is_said_of_a_device_is_what_it_costs() -> None:
    """Launch and achievable share of a cluster file or of one made by hand, not the constants behind them."""
    device = Device("d", 1e14, 1e12, 2**30, "made up")
    view = OpWork("reshape", (), (), (), 0.0, 0.0)
    tensors = tuple(TensorFacts((8192, 8192), "bfloat16") for _ in range(3))
    product = OpWork("linear", tensors[:2], tensors[2:], (), 2 * 8192.0**3, 3 * 2 * 8192.0**2)

    def seconds(work: OpWork, mode: Mode = Mode.EAGER, **said: float) -> float:
        return roofline_s(work, "forward", replace(device, **said), mode).mid  # type: ignore[arg-type]

    cpu = {"peak_flops": 1e12}
    assert seconds(view, launch_s=3e-6, **cpu) == 3e-6 and seconds(view, launch_s=0.0, **cpu) == 0.0
    assert seconds(view, **cpu) == 6e-6  # where nothing is said
    assert seconds(view, Mode.COMPILED, launch_s=3e-6, **cpu) == 0.0
    half, full = (seconds(product, launch_s=0.0, achievable_fraction=f) for f in (0.4, 0.8))
    assert half == pytest.approx(2 * full, rel=1e-5)  # but for its traffic
    assert seconds(product, launch_s=0.0) == pytest.approx(full * 0.8 / 0.75)
    h100 = Cluster.parse("1x8xh100-sxm5-80gb")  # there the host runs ahead of the device
    assert roofline_s(view, "forward", h100.device, Mode.EAGER).mid == 0.0
    slow = replace(h100, device=replace(h100.device, launch_s=3e-6))
    one, two = (BlockWork("b", ops, (), ()) for ops in ((product,), (product, view)))
    assert host_s(one, "forward", Costs(slow)).mid == 3e-6
    assert host_s(two, "forward", Costs(h100)).mid == Costs(h100).constants.host_eager_s


def test_what_if() -> None:
    base = Cluster.parse("16x8xh100-sxm5-80gb")
    assert base.with_() == base and base.with_(nodes=16, nic=400).levels[1].bytes_per_s == 50 * GB
    more = base.with_(nodes=32, nic=800, scaleup=900, memory_gb=141, memory_gb_s=4800, price=1)
    assert shape(more) == [("scale-up", 8), ("network", 256)] and more.num_devices == 256
    assert [level.bytes_per_s for level in more.levels] == [900 * GB, 100 * GB]
    assert more.device.memory_bytes_per_s == 4800 * GB
    assert more.device.memory_bytes == 141 * GB and more.price is not None and more.price.usd_per_device_hour == 1
    # fewer devices and back is where one started: the domain is remembered
    assert base.with_(nodes=1, devices_per_node=4).with_(nodes=16, devices_per_node=8) == base
    assert shape(Cluster.local(4).with_(nodes=2, nic=100)) == [("all", 4), ("network", 8)]
    mesh = Cluster.parse("1x8xmi300x-192gb").with_(scaleup=896).levels[0]
    assert mesh.p2p_bytes_per_s == 128 * GB
    with pytest.raises(PinError, match="memory_gb=-1"):
        base.with_(memory_gb=-1)


def test_another_device_keeps_what_was_given(tmp_path: Path) -> None:
    more = Cluster.parse("2x8xh100-sxm5-80gb@nic=50,scaleup=100,memory_gb=60,memory_gb_s=900,price=9")
    assert more.with_device("h100-sxm5-80gb") == more
    other = more.with_device("h200-sxm-141gb")
    assert other == Cluster.parse("2x8xh200-sxm-141gb@nic=50,scaleup=100,memory_gb=60,memory_gb_s=900,price=9")
    plain = Cluster.parse("2x8xh100-sxm5-80gb").with_(nodes=3)
    assert plain.with_device("h200-sxm-141gb") == Cluster.parse("3x8xh200-sxm-141gb")
    path = tmp_path / "c.yaml"
    path.write_text(YAML)
    filed = Cluster.parse(str(path)).with_device("h200-sxm-141gb")
    assert [level.bytes_per_s for level in filed.levels] == [300 * GB, 25 * GB]
    assert filed.levels[1].latency_s == pytest.approx(30e-6)  # the network is that of the nodes
    assert filed.price is not None and filed.price.usd_per_device_hour == 2.5
    assert filed.device == catalog.device("h200-sxm-141gb")  # overrides of a device are its own


YAML = """
nodes: 4
devices_per_node: 8
device: h100-sxm5-80gb
device_overrides: {memory_gb: 79, host_memory_gb: 256, host_gb_s: 55, host_memory_gb_s: 70,
  launch_us: 3, peak_tflops: {bfloat16: 900}}
nic_gbit_s: 200
price_usd_per_device_hour: 2.5
levels: {scale-up: {gb_s: 300}, network: {latency_us: 30}}
"""
OWN = """
nodes: 2
devices_per_node: 4
device: {name: toy, peak_tflops: 100, memory_gb: 10, memory_gb_s: 1000}
levels:
- {name: pair, size: 2, gb_s: 100, latency_us: 1}
- {name: node, within_node: true, gb_s: 10}
- {name: network, gb_s: 1}
"""


def test_a_cluster_file(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(YAML)
    cluster = Cluster.parse(str(path))
    assert shape(cluster) == [("scale-up", 8), ("network", 32)]
    assert [level.bytes_per_s for level in cluster.levels] == [300 * GB, 25 * GB]
    assert cluster.levels[1].latency_s == pytest.approx(30e-6) and cluster.device.launch_s == pytest.approx(3e-6)
    device = cluster.device
    assert (device.host_memory_bytes, device.host_bytes_per_s, device.host_memory_bytes_per_s) == (256e9, 55e9, 70e9)
    assert cluster.device.memory_bytes == 79 * GB and cluster.device.peak_flops == 900 * TERA
    assert cluster.device.flops("float8") == 1979 * TERA  # what is not overridden stays
    assert cluster.price is not None and cluster.price.usd_per_device_hour == 2.5
    path.write_text(OWN)
    own = Cluster.parse(str(path))
    assert shape(own) == [("pair", 2), ("node", 4), ("network", 8)] and own.device.name == "toy"
    assert own.levels[2].fabric == "network"


INSTANCES = """
nodes: 16
instance: p5.48xlarge
device_overrides: {memory_gb: 79}
price_usd_per_device_hour: 2.5
price_source: our contract
price_as_of: 2026-11-01
levels:
  network: {latency_us: 30}
"""


def test_a_cluster_file_of_instances(tmp_path: Path) -> None:
    path, named = tmp_path / "c.yaml", Cluster.parse("16xp5.48xlarge")
    path.write_text("nodes: 16\ninstance: p5.48xlarge\n")
    assert Cluster.parse(str(path)) == named
    path.write_text(INSTANCES)
    cluster = Cluster.parse(str(path))
    assert shape(cluster) == shape(named) and cluster.levels[1].bytes_per_s == named.levels[1].bytes_per_s
    assert cluster.levels[1].latency_s == pytest.approx(30e-6) and cluster.device.memory_bytes == 79 * GB
    assert cluster.price == Price(2.5, "our contract", "2026-11-01")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (INSTANCES.replace("p5.48", "p5.49"), "instance 'p5.49xlarge' is not in the catalog.*p5.48xlarge"),
        (INSTANCES + "device: h100-sxm5-80gb", "device follows from the instance 'p5.48xlarge'; remove one of the two"),
        (
            INSTANCES.replace("price_usd_per_device_hour: 2.5", ""),
            "price_source belongs to a price, but price_usd_.* missing",
        ),
        (YAML.replace("nic_gbit_s", "nic"), "unknown key 'nic'; did you mean 'nic_gbit_s'"),
        (YAML.replace("launch_us", "launch_ms"), "device_overrides: unknown key 'launch_ms'; did you mean 'launch_us'"),
        (YAML.replace("scale-up", "nvlink"), "levels: unknown key 'nvlink'; known: scale-up, node, network"),
        (YAML.replace("nodes: 4", "nodes: four"), "nodes='four' must be a whole number"),
        (YAML.replace("79", "-79"), "memory_gb=-79 must be a number"),
        ("nodes: 2", "devices_per_node is missing"),
        ("[1, 2]", "must be a mapping"),
        ("nodes: [", "cannot be read"),
        ("price_as_of: 2026-13-45", "cannot be read: month must be in"),
        ("nodes: " + "9" * 5000, "cannot be read: Exceeds the limit"),
        ("[" * 3000, "cannot be read: it is nested too deep"),
        (OWN.replace("size: 2, ", ""), "pair is not the last level and needs its size"),
        (OWN.replace("memory_gb: 10, ", ""), "memory_gb is missing"),
        (OWN.replace("latency_us: 1", "fabric: magic"), "unknown fabric 'magic'; known: plain, nvlink"),
        (OWN.split("levels")[0], "needs a list of levels"),
        (YAML.replace("79", ".nan"), r"c.yaml, device_overrides: memory_gb=nan must be a number from 1e-09 to .* GB"),
        (YAML.replace("79", ".inf"), "memory_gb=inf must be a number from"),
        (YAML.replace("79", "1.0e+300"), r"memory_gb=1e\+300 must be a number from"),
        (YAML.replace("launch_us: 3", "launch_us: .inf"), "launch_us=inf must be a number from 0"),
        (YAML.replace("launch_us: 3", "achievable_fraction: 0"), "achievable_fraction=0 must be a number from 0.01"),
        (YAML.replace("launch_us: 3", "overlap_fraction: 7"), "overlap_fraction=7 must be a number from 0 to 1"),
        (YAML.replace("launch_us: 3", "memory_gb_s: .nan"), "memory_gb_s=nan must be .* GB/s"),
        (YAML.replace("900}", ".nan}"), "peak_tflops: bfloat16=nan must be"),
        (YAML.replace("{bfloat16", "{bf16"), "peak_tflops: unknown key 'bf16'; did you mean 'bfloat16'"),
        (YAML.replace("gb_s: 300", "gb_s: 0"), "levels, scale-up: gb_s=0 must be"),
        (YAML.replace("latency_us: 30", "latency_us: .nan"), "levels, network: latency_us=nan must be"),
        (YAML.replace("nic_gbit_s: 200", "nic_gbit_s: 0"), "nic_gbit_s=0 must be a number from 1e-09"),
        (YAML.replace("hour: 2.5", "hour: .nan"), "price_usd_per_device_hour=nan must be"),
        (YAML.replace("nodes: 4", "nodes: 10000000"), "nodes=10000000 must be a whole number from 1"),
        (OWN.replace("size: 2", "size: 2.5"), "size=2.5 must be a whole number"),
        (OWN.replace("within_node: true", "within_node: 1"), "within_node=1 must be true or false"),
        (YAML + "nodes: 8", "the key 'nodes' is given twice"),
        (YAML.replace("gb_s: 300", "gb_s: 300, gb_s: 450"), "the key 'gb_s' is given twice"),
        (YAML + "device_type: cpu", "device_type follows from the device 'h100-sxm5-80gb'; remove it"),
        (YAML.replace("latency_us: 30", "gb_s: 50"), "gb_s and nic_gbit_s are both the speed of the network cards"),
        (
            YAML.replace("network: {", "rails: {size: 16, gb_s: 50}, network: {"),
            "gb_s and nic_gbit_s are both the speed of the network cards",
        ),
        (OWN + "nic_gbit_s: 100", r"levels\[2\]: gb_s and nic_gbit_s are both the speed of the network cards"),
        (OWN.replace("network", "fabric") + "nic_gbit_s: 100", "the levels are pair, node, fabric; name one network"),
        (OWN.replace("within_node: true", "size: 2"), "size=2 of node is not several units of pair.* legal: 4"),
        (OWN.replace("within_node: true", "size: 1"), "size=1 of node is not several units of pair"),
        (OWN.replace("within_node: true", "size: 7"), "size=7 of node is not several units of pair.* legal: 8"),
    ],
)
def test_a_wrong_cluster_file_names_the_key(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(PinError, match=message):
        Cluster.parse(str(path))


def test_keys_of_a_merge_may_be_given_again(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    base = "levels: {scale-up: &fast {gb_s: 300, latency_us: 1}, network: {<<: *fast, gb_s: 20}}"
    path.write_text(f"nodes: 2\ndevices_per_node: 8\ndevice: h100-sxm5-80gb\n{base}\n")
    assert [level.bytes_per_s for level in Cluster.read(path).levels] == [300 * GB, 20 * GB]


def test_the_network_of_a_file_may_be_faster_beyond_its_rails() -> None:
    levels = {"rails": {"size": 16}, "network": {"gb_s": 5}}
    data = {"nodes": 4, "devices_per_node": 8, "device": "h100-sxm5-80gb", "nic_gbit_s": 200, "levels": levels}
    assert [level.bytes_per_s for level in Cluster.of_mapping(data).levels[1:]] == [25 * GB, 5 * GB]


def test_cards_need_a_network_that_has_their_speed(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(OWN.replace("network", "fabric"))
    with pytest.raises(PinError, match="nic cannot be overridden: no level of this cluster is named network"):
        Cluster.parse(f"{path}@nic=100")
    path.write_text(OWN)
    assert Cluster.parse(f"{path}@nic=100").levels[-1].bytes_per_s == 12.5 * GB


def test_the_path_of_a_file_may_have_an_at(tmp_path: Path) -> None:
    folder = tmp_path / "me@home"
    folder.mkdir()
    (folder / "c.yaml").write_text(YAML)
    for text in (folder / "c.yaml", f"{folder}/c.yaml", f"{folder}/c.yaml@price=3"):
        assert Cluster.of(text).num_devices == 32
    price = Cluster.parse(f"{folder}/c.yaml@price=3").price
    assert price is not None and price.usd_per_device_hour == 3


@pytest.mark.parametrize("device", ["mi300x-192gb", "h100-sxm5-80gb", "gb200-nvl72", "rtx4090-24gb"])
def test_a_file_says_the_same_as_overrides(device: str) -> None:
    data = {
        "nodes": 2,
        "devices_per_node": 4,
        "device": device,
        "nic_gbit_s": 100,
        "device_overrides": {"memory_gb": 64, "memory_gb_s": 1500, "power_w": 300, "host_memory_gb": 99},
        "levels": {catalog.entry(device).scaleup.name: {"gb_s": 12}},
    }
    figures = "nic=100,memory_gb=64,memory_gb_s=1500,power=300,host_memory_gb=99,scaleup=12"
    filed, named = Cluster.of_mapping(data), Cluster.parse(f"2x4x{device}@{figures}")
    assert filed.levels == named.levels and filed.given == tuple(
        (n, v) for n, v in named.given if n in ("nic", "scaleup")
    )
    assert replace(filed.device, unverified=()) == replace(named.device, unverified=())


def test_an_override_is_given_once() -> None:
    with pytest.raises(PinError, match="nic is given twice"):
        Cluster.parse("2x8xh100-sxm5-80gb@nic=400,nic=200")
    with pytest.raises(PinError, match="needs a whole number"):
        Cluster.parse("2x8xh100-sxm5-80gb@nodes=1.5")


def test_clusters_travel_between_processes() -> None:
    for text in ("2x8xh100-sxm5-80gb@nic=400,price=2", "16xp5.48xlarge", "local:2"):
        cluster = Cluster.parse(text)
        assert pickle.loads(pickle.dumps(cluster)) == cluster
