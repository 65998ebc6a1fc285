"""Clusters: reading them, their levels, the hardware catalog, what-ifs, YAML files."""

from dataclasses import replace
from pathlib import Path

import pytest

from autoplan.cost_models import catalog
from autoplan.cost_models.cluster import Cluster, Device, Group, Level, Link
from autoplan.cost_models.errors import PinError
from autoplan.cost_models.quantity import Tag
from autoplan.cost_models.units import GB, MIB, TERA


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


def test_the_network_and_the_price_belong_to_the_instance() -> None:
    a100 = Cluster.parse("4xp4d.24xlarge")
    assert a100.devices_per_node == 8 and a100.levels[-1].bytes_per_s == 50 / 8 * GB
    assert a100.price is not None and a100.price.as_of == "2026-11-09" and "AWS" in a100.price.source
    azure = Cluster.parse("4xStandard_ND96isr_H100_v5")
    assert azure.price is not None and azure.price.usd_per_device_hour == 12.29
    assert len(catalog.instances()) == 38


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h100", "2x8xh100-sxm5-80gb"),
        ("2x8xh100", "nearest: h100-sxm5-80gb, h100-pcie-80gb, h100-nvl-94gb"),
        ("2x8xh100-smx5-80gb", "nearest: h100-sxm5-80gb"),
        ("2xh100-sxm5-80gb", "usually comes as 2x8xh100-sxm5-80gb"),
        ("8xh100", "for example 8x8xh100-sxm5-80gb; nearest devices: h100-sxm5-80gb"),
        ("2xp5", "nearest: p5.4xlarge, p5.48xlarge"),
        ("0x8xh100-sxm5-80gb", "num_nodes of at least 1"),
        ("4x8xmi355x-288gb", "names no network for it.*@nic=400"),
        ("2x8xh100-sxm5-80gb@nik=2", "unknown override 'nik'; known: nodes, devices_per_node, nic"),
        ("2x8xh100-sxm5-80gb@nic=fast", "nic=fast needs a number"),
        ("2x8xh100-sxm5-80gb@nic=0", "must be above 0"),
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
    assert Cluster.local(2, "cuda").device.overlap_fraction > 0


def test_a_cluster_made_by_hand() -> None:
    device, link = Device("d", 1e12, 1e9, 2**30, "made up"), Link(1e-6, 1e9, "made up")
    flat = Cluster(2, 4, device, link, "cuda")
    assert shape(flat) == [("all", 8)] and flat.device.flops("float8") == 1e12
    assert replace(flat, link=Link(0.0, 5.0, "made up")).levels[0].bytes_per_s == 5.0
    with pytest.raises(PinError, match="needs a Level"):
        Cluster(2, 4, device, link, "cuda", (Level(1e-6, 1e8, "", "network"),))
    with pytest.raises(PinError, match="positive bandwidth"):
        Cluster(2, 4, device, Link(0.0, 0.0, ""), "cuda")
    with pytest.raises(PinError, match="'tpu' is not supported"):
        Cluster(2, 4, device, link, "tpu")
    with pytest.raises(PinError, match="stride of at least 1"):
        Group(2, 0)


def test_what_if() -> None:
    base = Cluster.parse("16x8xh100-sxm5-80gb")
    assert base.with_() == base and base.with_(nodes=16, nic=400).levels[1].bytes_per_s == 50 * GB
    more = base.with_(nodes=32, nic=800, scaleup=900, memory_gb=141, price=1)
    assert shape(more) == [("scale-up", 8), ("network", 256)] and more.num_devices == 256
    assert [level.bytes_per_s for level in more.levels] == [900 * GB, 100 * GB]
    assert more.device.memory_bytes == 141 * GB and more.price is not None and more.price.usd_per_device_hour == 1
    # fewer devices and back is where one started: the domain is remembered
    assert base.with_(nodes=1, devices_per_node=4).with_(nodes=16, devices_per_node=8) == base
    assert shape(Cluster.local(4).with_(nodes=2, nic=100)) == [("all", 4), ("network", 8)]
    mesh = Cluster.parse("1x8xmi300x-192gb").with_(scaleup=896).levels[0]
    assert mesh.p2p_bytes_per_s == 128 * GB
    with pytest.raises(PinError, match="memory_gb=-1"):
        base.with_(memory_gb=-1)


YAML = """
nodes: 4
devices_per_node: 8
device: h100-sxm5-80gb
device_overrides: {memory_gb: 79, launch_us: 3, peak_tflops: {bfloat16: 900}}
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
    assert cluster.device.memory_bytes == 79 * GB and cluster.device.peak_flops == 900 * TERA
    assert cluster.device.flops("float8") == 1979 * TERA  # what is not overridden stays
    assert cluster.price is not None and cluster.price.usd_per_device_hour == 2.5
    path.write_text(OWN)
    own = Cluster.parse(str(path))
    assert shape(own) == [("pair", 2), ("node", 4), ("network", 8)] and own.device.name == "toy"
    assert own.levels[2].fabric == "network"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (YAML.replace("nic_gbit_s", "nic"), "unknown key 'nic'; known: nodes, .*nic_gbit_s"),
        (YAML.replace("launch_us", "launch_ms"), "device_overrides: unknown key 'launch_ms'; known: .*launch_us"),
        (YAML.replace("scale-up", "nvlink"), "levels: unknown key 'nvlink'; known: scale-up, node, network"),
        (YAML.replace("nodes: 4", "nodes: four"), "nodes='four' must be a whole number"),
        (YAML.replace("79", "-79"), "memory_gb=-79 must be a number"),
        ("nodes: 2", "devices_per_node is missing"),
        ("[1, 2]", "must be a mapping"),
        ("nodes: [", "cannot be read"),
        (OWN.replace("size: 2, ", ""), "pair is not the last level and needs its size"),
        (OWN.replace("memory_gb: 10, ", ""), "memory_gb is missing"),
        (OWN.replace("latency_us: 1", "fabric: magic"), "unknown fabric 'magic'; known: plain, nvlink"),
        (OWN.split("levels")[0], "needs a list of levels"),
    ],
)
def test_a_wrong_cluster_file_names_the_key(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(PinError, match=message):
        Cluster.parse(str(path))
