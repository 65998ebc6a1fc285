"""A fabric as a graph: levels found on it, what groups get, agreement with clusters given by levels, bad input."""

import itertools
import json
import pickle
from collections import defaultdict
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pytest
from command_line import one_line_error, run
from hypothesis import given, settings
from hypothesis import strategies as st

from autoplan.cost_models.hardware.cluster import Cluster, Group
from autoplan.cost_models.hardware.collective_kinds import COLLECTIVE_KINDS, Traffic
from autoplan.cost_models.hardware.fabric_graph import FabricGraph, FabricLink
from autoplan.cost_models.hardware.fabric_routes import Routes
from autoplan.cost_models.hardware.parts import Level
from autoplan.cost_models.network.collectives import group_collective_s
from autoplan.errors import PinError
from autoplan.units import GB, MICRO

DEVICE = "h100-sxm5-80gb"


def on(nodes: int, per_node: int, fabric: dict[str, Any], device: str = DEVICE, **more: Any) -> Cluster:
    top = {"nodes": nodes, "devices_per_node": per_node, "device": device, "fabric": fabric}
    return Cluster.of_mapping({**top, **more})


def written_out(cluster: Cluster) -> FabricGraph:
    """The levels of a cluster as links: at every level of its own, from each device over a switch of the unit below to
    one of the unit, whose uplinks carry as much as the oversubscription leaves; a mesh by a port per device."""
    switches: list[str] = []
    links: list[FabricLink] = []
    below = 1
    for depth, level in enumerate(cluster.levels):
        half, speed, kind = level.latency_s / 2, level.bytes_per_s, level.fabric
        if level.p2p_bytes_per_s is not None:
            ports = [f"port{i}" for i in range(cluster.num_devices)]
            switches += ports
            links += [FabricLink(f"device{i}", p, speed, 0.0, kind) for i, p in enumerate(ports)]
            for i, k in itertools.combinations(range(cluster.num_devices), 2):
                if i // level.size == k // level.size:
                    links.append(FabricLink(ports[i], ports[k], level.p2p_bytes_per_s, level.latency_s, kind))
        else:
            for u in range(cluster.num_devices // below):
                up = [f"l{depth}u{u}d{k}" for k in range(depth + 1)]  # outer levels have more links
                switches += up
                lanes = below * speed / level.oversubscription
                links += [FabricLink(a, b, lanes, 0.0, kind) for a, b in itertools.pairwise(up)]
                links.append(FabricLink(up[-1], f"l{depth}core{u * below // level.size}", lanes, 0.0, kind))
                links += [FabricLink(f"device{i}", up[0], speed, half, kind) for i in range(u * below, (u + 1) * below)]
            switches += [f"l{depth}core{u}" for u in range(cluster.num_devices // level.size)]
        below = level.size
    return FabricGraph(cluster.num_devices, tuple(switches), tuple(links))


RAILS = {
    "nodes": 8,
    "devices_per_node": 8,
    "device": DEVICE,
    "levels": {"rails": {"size": 32, "latency_us": 6}, "network": {"oversubscription": 3}},
}
CLUSTERS = {
    "one node": Cluster.parse(f"1x8x{DEVICE}"),
    "nodes": Cluster.parse(f"4x8x{DEVICE}"),
    "single devices": Cluster.parse(f"4x1x{DEVICE}"),
    "rails": Cluster.of_mapping(RAILS),
    "mesh": Cluster.parse("2x8xmi300x-192gb"),
    "bridged pairs": Cluster.parse("2x4xh100-nvl-94gb@nic=200"),
    "pcie": Cluster.parse("2x8xl40s-48gb@nic=100"),
    "oversubscribed": Cluster.of_mapping(
        {"nodes": 4, "devices_per_node": 4, "device": "a100-sxm4-80gb", "levels": {"network": {"oversubscription": 2}}}
    ),
}


@pytest.mark.parametrize("name", CLUSTERS)
def test_levels_written_out_as_a_fabric_agree(name: str) -> None:
    plain = CLUSTERS[name]
    graph = Cluster.of_nodes(plain.on_fabric(written_out(plain)))
    assert [(v.name, v.size, v.fabric) for v in graph.levels] == [(v.name, v.size, v.fabric) for v in plain.levels]
    assert graph.domain_size == plain.domain_size
    world = plain.num_devices
    powers = [1 << k for k in range(world.bit_length())]
    for size, stride in itertools.product(powers[1:], powers):
        if size * stride > world:
            continue
        for kind in COLLECTIVE_KINDS:
            want, found = (group_collective_s(kind, 1e7, Group(size, stride), c) for c in (plain, graph))
            assert found.tag == want.tag
            for end in ("low", "mid", "high"):  # bandwidths of the graph are rounded to 12 digits
                assert getattr(found, end) == pytest.approx(getattr(want, end), rel=1e-11), (kind, size, stride)


def test_a_cluster_without_a_fabric_asks_no_graph() -> None:
    plain = CLUSTERS["rails"]
    assert plain.levels_of(Group(8), Traffic.RING) is plain.levels


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(3, 7), st.integers(1, 4))
def test_loads_are_those_of_the_shortest_paths(seed: int, devices: int, switches: int) -> None:
    """Against networkx: distances, and flows divided by bandwidth along every shortest path."""
    random = np.random.default_rng(seed)
    nodes = devices + switches
    ends = [(i, int(random.integers(0, i))) for i in range(1, nodes)]
    ends += [(int(a), int(b)) for a, b in random.integers(0, nodes, (nodes, 2)) if a != b]
    ends = sorted({(min(e), max(e)) for e in ends})
    speeds = [float(x) * GB for x in random.integers(1, 5, len(ends))]
    latencies = [float(x) * MICRO for x in random.integers(1, 4, len(ends))]
    graph = nx.DiGraph()
    for (a, b), speed, latency in zip(ends, speeds, latencies, strict=True):
        for x, y in ((a, b), (b, a)):
            graph.add_edge(x, y, speed=speed, far=round(latency / MICRO) * 1000 + 1)
    flows = [(int(a), int(b)) for a, b in random.integers(0, devices, (6, 2)) if a != b] or [(0, 1)]
    loads: dict[tuple[int, int], float] = defaultdict(float)
    longest = 0
    for source, target in flows:
        far = nx.shortest_path_length(graph, target=target, weight="far")
        longest = max(longest, far[source])
        on: dict[int, float] = {source: 1.0}
        for node in sorted(far, key=lambda n: -far[n]):
            amount = on.pop(node, 0.0)
            nearer = [n for n in graph[node] if far[n] + graph[node][n]["far"] == far[node]] if amount else []
            total = sum(graph[node][n]["speed"] for n in nearer)
            for n in nearer:
                part = amount * graph[node][n]["speed"] / total
                loads[node, n] += part
                on[n] = on.get(n, 0.0) + part
    routes = Routes(devices, nodes, ends, speeds, latencies)
    sources, targets = (np.array([flow[k] for flow in flows]) for k in (0, 1))
    found = routes.send(sources, targets, 1.0)
    want = min(graph[a][b]["speed"] / load for (a, b), load in loads.items())
    assert found.bytes_per_s == pytest.approx(want, rel=1e-9)
    assert found.latency_s == pytest.approx(longest // 1000 * MICRO)


TORUS = {
    "links": [
        {"for": {"x": 4, "y": 4}, "between": ["device{4 * y + x}", "device{4 * y + (x + 1) % 4}"]},
        {"for": {"x": 4, "y": 4}, "between": ["device{4 * y + x}", "device{4 * ((y + 1) % 4) + x}"]},
    ]
}
for entry in TORUS["links"]:
    entry |= {"gb_s": 50, "latency_us": 1, "kind": "ici"}


def speeds(cluster: Cluster, group: Group) -> dict[Traffic, float]:
    """GB/s of the outermost level that a group crosses."""
    reach = next(i for i, v in enumerate(cluster.levels) if (group.size - 1) * group.stride < v.size)
    return {t: cluster.levels_of(group, t)[reach].bytes_per_s / GB for t in Traffic}


def test_a_torus_has_one_level_and_both_directions() -> None:
    cluster = on(4, 4, TORUS)
    assert [(v.name, v.size) for v in cluster.levels] == [("scale-up", 16)]
    for group in (Group(4), Group(4, 4)):  # a row, a column: each way half, of 50
        assert speeds(cluster, group) == {Traffic.RING: 100, Traffic.ALL_TO_ALL: 75, Traffic.NEIGHBOURS: 50}
        assert cluster.levels_of(group, Traffic.RING)[0].latency_s == pytest.approx(1e-6)
    # rows are no rings of one link per step where rows do not follow each other: from a row's end to the next row's
    # beginning it is two links
    assert cluster.levels_of(Group(16), Traffic.RING)[0].latency_s == pytest.approx(2e-6)
    # each of 16 devices sends to 15 others over 32 links per device and direction 2 on average: 64 links, 32 hops each
    assert speeds(cluster, Group(16))[Traffic.ALL_TO_ALL] == pytest.approx(50 * 4 / (32 / 15), rel=1e-6)


def fat_tree(uplink_gb_s: float) -> dict[str, Any]:
    return {
        "switches": {"nvswitch": 4, "leaf": 2, "spine": 2},
        "links": [
            {
                "for": {"i": 16},
                "between": ["device{i}", "nvswitch{i // 4}"],
                "gb_s": 450,
                "latency_us": 0.375,
                "kind": "nvlink4",
            },
            {"for": {"i": 16}, "between": ["device{i}", "leaf{i // 8}"], "gb_s": 50, "latency_us": 3},
            {
                "for": {"i": 2, "k": 2},
                "between": ["leaf{i}", "spine{k}"],
                "gb_s": uplink_gb_s,
                "latency_us": 3,
            },
        ],
    }


def test_oversubscribed_uplinks_are_shared_by_what_crosses_them() -> None:
    """Two leaf switches of 8 devices of 50 GB/s: uplinks of 2 x 100 GB/s carry half of what all of them send."""
    thin, whole = on(4, 4, fat_tree(100)), on(4, 4, fat_tree(200))
    for cluster in (thin, whole):
        assert [(v.name, v.size) for v in cluster.levels] == [("scale-up", 4), ("rails", 8), ("network", 16)]
        assert [round(v.latency_s / MICRO, 3) for v in cluster.levels] == [0.75, 6, 12]
        assert cluster.levels[0].bytes_per_s == 450 * GB and cluster.levels[1].bytes_per_s == 50 * GB
    assert (thin.levels[2].bytes_per_s, whole.levels[2].bytes_per_s) == (25 * GB, 50 * GB)
    # groups of two ranks behind one leaf never see the uplinks
    assert speeds(thin, Group(2, 4)) == speeds(whole, Group(2, 4)) == dict.fromkeys(Traffic, 50.0)
    slow, fast = (group_collective_s("all_gather", 1e9, Group(2, 8), c).mid for c in (thin, whole))
    assert 1.9 * fast < slow < 2 * fast  # the latencies are the same


def test_rails_are_found() -> None:
    """Card k of every node on switch k: ranks of one card are one switch apart, others reach it inside the node."""
    links = [
        {"for": {"i": 32}, "between": ["device{i}", "nvswitch{i // 8}"], "gb_s": 450, "latency_us": 0.375},
        {"for": {"i": 32}, "between": ["device{i}", "leaf{i % 8 + 8 * (i // 16)}"], "gb_s": 50, "latency_us": 3},
        {"for": {"i": 16}, "between": ["leaf{i}", "spine0"], "gb_s": 25, "latency_us": 3},
    ]
    links[0]["kind"] = "nvlink4"
    cluster = on(4, 8, {"switches": {"nvswitch": 4, "leaf": 16, "spine": 1}, "links": links})
    assert [(v.name, v.size, v.bytes_per_s / GB) for v in cluster.levels] == [
        ("scale-up", 8, 450),
        ("rails", 16, 50),
        ("network", 32, 12.5),  # two cards behind each leaf share an uplink of 25
    ]


def test_groups_of_switches_as_in_a_dragonfly() -> None:
    """4 groups of 4 devices, one link of 40 GB/s between every two groups: a ring uses one of three, all-to-all all."""
    links = [
        {"for": {"i": 16}, "between": ["device{i}", "router{i // 4}"], "gb_s": 100, "latency_us": 1},
        *(
            {"between": [f"router{a}", f"router{b}"], "gb_s": 40, "latency_us": 2}
            for a, b in itertools.combinations(range(4), 2)
        ),
    ]
    cluster = on(4, 4, {"switches": {"router": 4}, "links": links})
    assert [v.size for v in cluster.levels] == [4, 16]
    found = speeds(cluster, Group(4, 4))
    assert found == {Traffic.RING: 30, Traffic.ALL_TO_ALL: 30, Traffic.NEIGHBOURS: 10}
    assert speeds(cluster, Group(4)) == dict.fromkeys(Traffic, 100.0)


def test_bridged_pairs_in_a_node() -> None:
    links = [
        {"for": {"i": 4}, "between": ["device{2 * i}", "device{2 * i + 1}"], "gb_s": 300, "latency_us": 0.75},
        {"for": {"i": 8}, "between": ["device{i}", "host{i // 4}"], "gb_s": 64, "latency_us": 1.25, "kind": "plain"},
        {"for": {"i": 2}, "between": ["host{i}", "leaf0"], "gb_s": 50, "latency_us": 5},
    ]
    links[0]["kind"] = "nvlink4"
    cluster = on(2, 4, {"switches": {"host": 2, "leaf": 1}, "links": links})
    assert [(v.name, v.size, v.within_node) for v in cluster.levels] == [
        ("scale-up", 2, True),
        ("node", 4, True),
        ("network", 8, False),
    ]
    assert cluster.levels[2].bytes_per_s == 12.5 * GB  # one card for the four devices of a node
    assert cluster.domain_size == 2


def test_units_replace_what_would_be_found() -> None:
    assert [v.size for v in on(4, 4, {**fat_tree(100), "units": [4]}).levels] == [4, 16]
    with pytest.raises(PinError, match=r"fabric: units=\[3\]: each size must divide the next one and the 16 devices"):
        on(4, 4, {**fat_tree(100), "units": [3]})


def test_a_what_if_keeps_the_fabric() -> None:
    cluster = on(4, 4, fat_tree(100), price_usd_per_device_hour=2)
    more = cluster.with_(memory_gb=100, price=3, nodes=4)
    assert more.levels == cluster.levels and more.device.memory_bytes == 100 * GB and more.fabric is cluster.fabric
    assert cluster.with_device("h200-sxm-141gb").levels == cluster.levels
    assert pickle.loads(pickle.dumps(cluster)) == cluster
    for override in ({"nic": 400.0}, {"scaleup": 900.0}, {"nodes": 8}, {"devices_per_node": 8}):
        with pytest.raises(
            PinError, match=r"cannot be overridden: it follows from the fabric .* overridden: memory_gb, .*price"
        ):
            cluster.with_(**override)  # type: ignore[arg-type]


LINK = {"for": {"i": 4}, "between": ["device{i}", "leaf0"], "gb_s": 50, "latency_us": 5}


@pytest.mark.parametrize(
    ("fabric", "message"),
    [
        ({}, "links is missing"),
        ({"links": [LINK], "wires": 1}, "unknown key 'wires'; did you mean 'switches'"),
        ({"links": [LINK]}, "link device0 - leaf0: leaf0 is not a switch; declared: none"),
        (
            {"links": [{**LINK, "for": {"i": 9}}], "switches": {"leaf": 1}},
            "no device4; the cluster has device0",
        ),
        ({"links": [{**LINK, "for": {"i": 3}}], "switches": {"leaf": 1}}, "device3 cannot be reached from device0"),
        ({"links": [{**LINK, "gb_s": 0}], "switches": {"leaf": 1}}, r"links\[0\]: gb_s=0 must be a number from"),
        ({"links": [{**LINK, "speed": 1}]}, r"links\[0\]: unknown key 'speed'"),
        ({"links": [{"between": ["device0", "leaf0"], "gb_s": 1}]}, r"links\[0\]: latency_us is missing"),
        ({"links": [{**LINK, "between": ["device{j}", "leaf0"]}]}, r"\{j\} has an unknown variable j; known: i"),
        (
            {"links": [{**LINK, "between": ["device{i ** 2}", "leaf0"]}]},
            r"\{i \*\* 2\} must compute a whole number from",
        ),
        ({"links": [{**LINK, "between": ["device{i // 0}", "leaf0"]}]}, r"\{i // 0\} divides by 0"),
        ({"links": [{**LINK, "between": ["device{", "leaf0"]}]}, r"link device\{ - leaf0: device\{ is not a switch"),
        ({"links": [{**LINK, "between": "device0"}]}, "between='device0' must be two names"),
        ({"links": [{**LINK, "between": ["device{i}", "device{i}"]}]}, "begins and ends at device0"),
        ({"links": [{**LINK, "kind": "ethernet"}], "switches": {"leaf": 1}}, "unknown kind 'ethernet'; known: plain"),
        ({"links": [LINK], "switches": {"leaf": 0}}, "switches: leaf=0 must be a whole number from 1"),
        ({"links": [LINK], "switches": ["leaf0"]}, "must map kinds of switches to how many there are"),
        ({"links": [LINK], "switches": {"device": 4}}, "'device' cannot name switches"),
        ({"links": [LINK], "switches": {"leaf": 1}, "units": 2}, "units=2 must be a list of whole numbers"),
    ],
)
def test_a_wrong_fabric_names_what_is_wrong(fabric: dict[str, Any], message: str) -> None:
    with pytest.raises(PinError, match=message):
        on(1, 4, fabric)


def test_a_fabric_stands_for_levels_and_cards() -> None:
    whole = {"links": [LINK], "switches": {"leaf": 1}}
    for key, value in (("levels", {"network": {"gb_s": 50}}), ("nic_gbit_s", 400)):
        with pytest.raises(PinError, match=f"{key} follows from the fabric; remove one of the two"):
            on(1, 4, whole, **{key: value})
    graph = FabricGraph(4, ("leaf0",), tuple(FabricLink(f"device{i}", "leaf0", GB, MICRO) for i in range(4)))
    with pytest.raises(PinError, match=r"the fabric has 4 devices, 2 nodes of 4 have 8"):
        Cluster.parse(f"2x4x{DEVICE}").on_fabric(graph)
    with pytest.raises(PinError, match=r"a fabric of 5000 devices: it may have 1 to 4096; .* by levels"):
        FabricGraph(5000, (), ())
    alone = Cluster.of_nodes(Cluster.parse(f"1x1x{DEVICE}").on_fabric(FabricGraph(1, (), ())))
    assert [v.size for v in alone.levels] == [1]


def test_a_device_by_hand_on_a_fabric(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(
        "nodes: 1\ndevices_per_node: 4\n"
        "device: {name: mine, peak_tflops: 100, memory_gb: 32, memory_gb_s: 1000}\n"
        "fabric:\n"
        "  switches: {leaf: 1}\n"
        "  links:\n"
        "    - {for: {i: 4}, between: ['device{i}', leaf0], gb_s: 50, latency_us: 5}\n"
    )
    cluster = Cluster.parse(str(path))
    assert cluster.levels == (Level(1e-5, 50 * GB, "fabric", "network", 4, fabric="network"),)


def step_s(cluster: str) -> float:
    task = ("gpt2", "--cluster", cluster, "--seq-len", "1k", "--global-batch-size", "16", "--tp", "4")
    result = run("estimate", *task, "--micro-batch-size", "16", "--json")  # or the host decides
    assert result.exit_code == 0, result.output
    return float(json.loads(result.stdout)["estimate"]["step_time_s"]["mid"])


def test_an_estimate_on_the_command_line(tmp_path: Path) -> None:
    """The catalog's switch, written as a fabric, has its price; thinner links have a longer step; overrides of links
    are refused, what is proposed next is not one."""
    files = []
    for gb_s in (450, 45):
        path = tmp_path / f"{gb_s}.yaml"
        link = f"{{for: {{i: 4}}, between: ['device{{i}}', s0], gb_s: {gb_s}, latency_us: 0.375, kind: nvlink4}}"
        path.write_text(
            f"nodes: 1\ndevices_per_node: 4\ndevice: {DEVICE}\nfabric:\n  switches: {{s: 1}}\n  links: [{link}]\n"
        )
        files.append(str(path))
    fast, slow = map(step_s, files)
    assert fast == pytest.approx(step_s(f"1x4x{DEVICE}"), rel=1e-9) and slow > 1.2 * fast
    task = ("gpt2", "--cluster", f"{files[0]}@nic=400", "--seq-len", "1k", "--global-batch-size", "16")
    assert "nic cannot be overridden: it follows from the fabric" in one_line_error(run("estimate", *task), 2)
    found = run("plan", *task[:2], files[0], *task[3:], "--pin", "tp=4", "--verbose")
    assert "1 switches, 4 links" in found.stdout.replace("\n", " ") and "--vary memory_gb=" in found.stdout
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(Path(files[0]).read_text().replace("i: 4", "i: 3"))
    task = ("gpt2", "--cluster", str(wrong), "--seq-len", "1k", "--global-batch-size", "16")
    assert "device3 cannot be reached from device0" in one_line_error(run("estimate", *task), 2)


def test_a_ring_in_python() -> None:
    """The example of docs/how_to_add.md."""
    links = tuple(FabricLink(f"device{i}", f"device{(i + 1) % 4}", 50e9, 1e-6, kind="ici") for i in range(4))
    cluster = Cluster.of_nodes(Cluster.parse(f"1x4x{DEVICE}").on_fabric(FabricGraph(4, (), links)))
    assert speeds(cluster, Group(4)) == {Traffic.RING: 100, Traffic.ALL_TO_ALL: 75, Traffic.NEIGHBOURS: 50}
