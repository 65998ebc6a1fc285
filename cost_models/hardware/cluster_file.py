"""A cluster as a YAML file. Unknown keys are errors that name the known ones.

    nodes: 16
    instance: p5.48xlarge               # a cloud instance of the catalog; or without one
    devices_per_node: 8
    device: h100-sxm5-80gb              # a catalog id, or a mapping: name, peak_tflops (one number, or by dtype),
                                        # memory_gb, memory_gb_s, and known fields of those below
    device_overrides:                   # of a catalog id, or of the instance's device
      memory_gb: 79.6                   # usable, 1e9 bytes
      memory_gb_s: 3350
      host_memory_gb: 256               # host memory per device (default 128, assumed)
      host_memory_gb_s: 60              # its speed for one device (default: its part of the usual host, or 40, assumed)
      host_gb_s: 63                     # speed of the link to it
      peak_tflops: {bfloat16: 989}
      achievable_fraction: 0.8
      power_w: 700
      launch_us: 5
      overlap_fraction: 0.8
      source: data sheet
    nic_gbit_s: 400                     # per device and direction
    price_usd_per_device_hour: 2.5
    price_source: our contract          # source and date of the price, for people
    price_as_of: 2026-11-01
    levels:                             # overrides by name for a catalog id or instance; else a list, inner to outer
      scale-up: {gb_s: 450, latency_us: 0.75}
      rails: {size: 256}                # a rail group (8 rails of 32 nodes): devices behind one layer of switches, at
                                        # the speed of their cards; not in the catalog
      network: {latency_us: 10, oversubscription: 2}   # beyond the rail group

Levels of a list have the keys name, gb_s, latency_us, and, except for the last, size (devices in one unit). All take
p2p_gb_s (to one peer, in a mesh), oversubscription (default 1; 3: the level carries a third of what all devices send)
and fabric (a row of nccl.FABRICS).

In place of levels and nic_gbit_s, `fabric` gives all links as a graph (`fabric_file`): rails, fat trees, tori, groups
of switches, pairs of bridged devices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from autoplan.config.keys import as_mapping, as_number
from autoplan.config.numbers import Range
from autoplan.cost_models.hardware import parts as hardware
from autoplan.cost_models.hardware.catalog import PEAK_COLUMNS, PEAK_DTYPES
from autoplan.cost_models.hardware.fabric_file import fabric_of_mapping
from autoplan.cost_models.hardware.nccl import FABRICS
from autoplan.cost_models.hardware.nodes import Nodes
from autoplan.cost_models.hardware.parts import NETWORK, NETWORKS, RAILS, Device, Level, Price
from autoplan.errors import PinError
from autoplan.units import GB, MICRO, TERA

_TOP = (
    "nodes",
    "instance",
    "devices_per_node",
    "device",
    "device_overrides",
    "levels",
    "fabric",
    "nic_gbit_s",
    "price_usd_per_device_hour",
    "price_source",
    "price_as_of",
    "device_type",
)
_MERGE = "tag:yaml.org,2002:merge"  # `<<: *base`: its keys may be given again
_Table = Mapping[str, tuple[str, float, Range]]
# key of the file -> (field of Device, factor, legal range)
_DEVICE: _Table = {
    "memory_gb": ("memory_bytes", GB, hardware.MEMORY_GB),
    "memory_gb_s": ("memory_bytes_per_s", GB, hardware.GB_S),
    "host_memory_gb": ("host_memory_bytes", GB, hardware.MEMORY_GB),
    "host_memory_gb_s": ("host_memory_bytes_per_s", GB, hardware.GB_S),
    "host_gb_s": ("host_bytes_per_s", GB, hardware.GB_S),
    "achievable_fraction": ("achievable_fraction", 1, hardware.ACHIEVABLE),
    "power_w": ("power_w", 1, hardware.WATTS),
    "launch_us": ("launch_s", MICRO, hardware.MICROSECONDS),
    "overlap_fraction": ("overlap_fraction", 1, hardware.SHARE),
}
# The catalog's columns of these keys, if it has one.
_COLUMNS: Mapping[str, str] = {
    "memory_gb": "mem_gb",
    "memory_gb_s": "mem_bw_gb_s",
    "host_gb_s": "host_gb_s_per_dir",
    "power_w": "power_w",
}
_LEVEL: _Table = {
    "gb_s": ("bytes_per_s", GB, hardware.GB_S),
    "latency_us": ("latency_s", MICRO, hardware.MICROSECONDS),
    "p2p_gb_s": ("p2p_bytes_per_s", GB, hardware.GB_S),
    "oversubscription": ("oversubscription", 1, hardware.OVERSUBSCRIPTION),
    "size": ("size", 1, hardware.COUNT),
}


def read_yaml(path: str | Path, where: str) -> Any:
    """Return the content of a YAML file. Raises PinError that calls the file `where` if it cannot be read."""
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        """YAML whose mappings have every key once; PyYAML takes the last one."""

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            keys = [self.construct_object(key, deep=True) for key, _ in node.value if key.tag != _MERGE]
            for i, key in enumerate(keys):
                if key in keys[:i]:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key!r} is given twice", node.start_mark
                    )
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(Path(path).read_text(encoding="utf-8"), Loader)
    except FileNotFoundError:
        raise PinError(f"{where} does not exist") from None
    except RecursionError:
        raise PinError(f"{where} cannot be read: it is nested too deep") from None
    except (OSError, ValueError, yaml.YAMLError) as error:  # ValueError: of a date or number that PyYAML cannot make
        raise PinError(f"{where} cannot be read: {' '.join(str(error).split())}") from error


def read_nodes(path: str | Path) -> Nodes:
    """Return the nodes of a YAML file. Raises PinError that names the file and the wrong key."""
    where = f"cluster file {path}"
    return nodes_from_data(read_yaml(path, where), where)


def nodes_from_data(data: object, where: str) -> Nodes:
    """Return the nodes of a mapping with the keys of a YAML file."""
    top = as_mapping(data, where, _TOP)
    for key in ("nodes",) if "instance" in top else ("nodes", "devices_per_node", "device"):
        if key not in top:
            raise PinError(f"{where}: {key} is missing; needed are nodes and instance, or devices_per_node and device")
    if "fabric" not in top:
        return _nodes(top, where)
    for key in ("levels", "nic_gbit_s"):
        if key in top:
            raise PinError(f"{where}: {key} follows from the fabric; remove one of the two")
    nodes = _nodes(top, where)
    return nodes.on_fabric(fabric_of_mapping(top["fabric"], nodes.num_devices, f"{where}, fabric"))


def _nodes(top: Mapping[str, Any], where: str) -> Nodes:
    """Return the nodes of a file without its fabric."""
    nodes = int(as_number(top, "nodes", where, hardware.COUNT))
    given: dict[str, float] = {}
    nic = None
    price = _price(top, where)
    if price is not None:
        given["price"] = price.usd_per_device_hour
    if "nic_gbit_s" in top:
        nic = given["nic"] = as_number(top, "nic_gbit_s", where, hardware.GBIT_S)
    if "instance" in top:
        for key in ("devices_per_node", "device", "device_type"):
            if key in top:
                raise PinError(f"{where}: {key} follows from the instance {top['instance']!r}; remove one of the two")
        cluster = Nodes.of_instances(nodes, str(top["instance"]), nic, price)
        return _overridden(cluster, top, given, where)
    per_node = int(as_number(top, "devices_per_node", where, hardware.COUNT))
    if isinstance(top["device"], str):
        if "device_type" in top:
            raise PinError(f"{where}: device_type follows from the device {top['device']!r}; remove it")
        cluster = Nodes.of_catalog(nodes, per_node, top["device"], nic, price)
        return _overridden(cluster, top, given, where)
    if "device_overrides" in top:
        raise PinError(f"{where}: device_overrides is for a catalog id; write the fields into device")
    kind = top.get("device_type", "cuda")
    # a hand-made accelerator has the overlap that whole steps show, unless its file states another
    device = _device(top["device"], f"{where}, device", None if kind == "cuda" else 0.0)
    if "fabric" in top:
        return Nodes(nodes, per_node, device, Level(0.0, 1.0, "fabric"), kind, (), price, tuple(sorted(given.items())))
    levels = _levels(top.get("levels"), nic, f"{where}, levels")
    networks = [level for level in levels[1:] if level.name in NETWORKS]
    if networks:
        given["nic"] = networks[0].bytes_per_s * 8 / GB
    kept = tuple(sorted(given.items()))
    return Nodes(nodes, per_node, device, levels[0], kind, tuple(levels[1:]), price, kept)


def _price(top: Mapping[str, Any], where: str) -> Price | None:
    told = [key for key in ("price_source", "price_as_of") if key in top]
    if "price_usd_per_device_hour" not in top:
        if told:
            raise PinError(f"{where}: {told[0]} belongs to a price, but price_usd_per_device_hour is missing")
        return None
    usd = as_number(top, "price_usd_per_device_hour", where, hardware.USD)
    return Price(usd, str(top.get("price_source", where)), str(top.get("price_as_of", "given")))


def _overridden(cluster: Nodes, top: Mapping[str, Any], given: Mapping[str, float], where: str) -> Nodes:
    """Return a cluster of the catalog with the overrides of its file."""
    if "device_overrides" in top:
        own = top["device_overrides"]
        fields = _device_fields(own, f"{where}, device_overrides", cluster.device)
        fields["unverified"] = tuple(f for f in cluster.device.unverified if f not in _columns(own))
        cluster = replace(cluster, device=replace(cluster.device, **fields))
    nic = "nic_gbit_s" in top
    cluster, levels_given = _override_levels(cluster, top.get("levels", {}), nic, f"{where}, levels")
    return replace(cluster, given=tuple(sorted({**given, **levels_given}.items())))


def _fields(data: Mapping[str, Any], table: _Table, where: str) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, (name, factor, legal) in table.items():
        if key in data:
            out[name] = as_number(data, key, where, legal) * factor
    for whole in ("memory_bytes", "host_memory_bytes", "size"):
        if whole in out:
            out[whole] = int(out[whole])
    return out


def _device_fields(data: object, where: str, base: Device | None) -> dict[str, Any]:
    given = as_mapping(data, where, ("name", "peak_tflops", "source", *_DEVICE))
    out = _fields(given, _DEVICE, where)
    for key in ("name", "source"):
        if key in given:
            out[key] = str(given[key])
    if "peak_tflops" in given:
        peaks = given["peak_tflops"]
        if isinstance(peaks, Mapping):
            at = f"{where}, peak_tflops"
            peaks = as_mapping(peaks, at, PEAK_DTYPES)
            table = {k: as_number(peaks, k, at, hardware.TFLOPS) * TERA for k in peaks}
            table = {**(base.peak_flops_by_dtype if base is not None else {}), **table}
            train = next((d for d in ("bfloat16", "float16", "float32") if d in table), None)
            if train is None:
                raise PinError(f"{where}: peak_tflops needs one of bfloat16, float16, float32; got {', '.join(table)}")
            out["peak_flops_by_dtype"], out["peak_flops"] = table, table[train]
        else:
            out["peak_flops"] = as_number(given, "peak_tflops", where, hardware.TFLOPS) * TERA
            out["peak_flops_by_dtype"] = {}
    return out


def _columns(own: Mapping[str, Any]) -> frozenset[str]:
    """Return the columns of the catalog that the fields of a file replace."""
    out = {_COLUMNS[key] for key in own if key in _COLUMNS}
    peaks = own.get("peak_tflops")
    if isinstance(peaks, Mapping):
        return frozenset(out | {PEAK_COLUMNS[dtype] for dtype in peaks if dtype in PEAK_COLUMNS})
    return frozenset(out | ({*PEAK_COLUMNS.values(), "peak_tflops_*"} if peaks is not None else set()))


def _device(data: object, where: str, overlap_fraction: float | None) -> Device:
    fields = _device_fields(data, where, None)
    for key, name in (("peak_tflops", "peak_flops"), ("memory_gb", "memory_bytes"), ("memory_gb_s", None)):
        if (name or _DEVICE[key][0]) not in fields:
            raise PinError(f"{where}: {key} is missing; needed are peak_tflops, memory_gb and memory_gb_s")
    return Device(**{"name": "device", "source": "given", "overlap_fraction": overlap_fraction, **fields})


def _level_fields(data: object, where: str, known: tuple[str, ...]) -> dict[str, Any]:
    given = as_mapping(data, where, known)
    out = _fields(given, _LEVEL, where)
    for key in ("name", "fabric", "source"):
        if key in given:
            out[key] = str(given[key])
    if "fabric" in out and out["fabric"] not in FABRICS:
        raise PinError(f"{where}: unknown fabric {out['fabric']!r}; known: {', '.join(FABRICS)}")
    if "within_node" in given:
        out["within_node"] = given["within_node"]
        if not isinstance(out["within_node"], bool):
            raise PinError(f"{where}: within_node={out['within_node']!r} must be true or false")
    return out


def _override_levels(cluster: Nodes, data: object, nic: bool, where: str) -> tuple[Nodes, dict[str, float]]:
    """Return the cluster with the overrides of its levels, and the given figures for `Nodes.given`."""
    figures: dict[str, float] = {}
    levels = [cluster.link, *cluster.outer]
    names = [level.name for level in levels]
    given = as_mapping(data, where, (*names, RAILS) if NETWORK in names else tuple(names))
    for i, name in enumerate(names):
        if name in given:
            fields = _level_fields(given[name], f"{where}, {name}", (*_LEVEL, "fabric", "source"))
            fabric = fields.get("fabric", levels[i].fabric)
            if "p2p_bytes_per_s" in fields and FABRICS[fabric].by_ranks:
                raise PinError(f"{where}, {name}: p2p_gb_s is not for {fabric}, whose groups are measured by size")
            level = levels[i].at(fields["bytes_per_s"]) if "bytes_per_s" in fields else levels[i]
            levels[i] = replace(level, **{"source": "given", **fields})
            if name == NETWORK:
                figures["nic"] = levels[i].bytes_per_s * 8 / GB
            elif name == "scale-up" and "bytes_per_s" in fields:
                figures["scaleup"] = levels[i].bytes_per_s / GB
    _check_one_speed(nic and "gb_s" in given.get(RAILS if RAILS in given else NETWORK, {}), where)
    outer = levels[1:]
    if RAILS in given:
        at = next(i for i, level in enumerate(outer) if level.name == NETWORK)
        rails = _rails(given[RAILS], cluster.outer[at], cluster, f"{where}, {RAILS}")
        figures["nic"] = rails.bytes_per_s * 8 / GB  # speed of the cards
        outer.insert(at, rails)
    _check_nested([levels[0], *outer], where)
    return replace(cluster, link=levels[0], outer=tuple(outer)), figures


def _rails(data: object, network: Level, cluster: Nodes, where: str) -> Level:
    """Return the level of the nodes of one rail group.

    It has the speed of the cards, which the network has without overrides, and by default no oversubscription.
    """
    fields = _level_fields(data, where, (*_LEVEL, "fabric", "source"))
    size, inner = fields.get("size"), cluster.link
    unit, of = cluster.devices_per_node, "nodes"
    if inner.size > unit:
        unit, of = inner.size, "scale-up domains"
    if size is None:
        raise PinError(f"{where}: size is missing: the devices of one rail group, for example {8 * unit} of 8 {of}")
    if size % unit:
        near = max(1, round(size / unit)) * unit
        raise PinError(f"{where}: size={size} is not a whole number of {of} of {unit}; nearest legal: {near}")
    return replace(network, **{"name": RAILS, "oversubscription": 1.0, "source": "given", **fields})


def _levels(data: object, nic: float | None, where: str) -> list[Level]:
    if not isinstance(data, list) or not data:
        raise PinError(f"{where}: a device of your own needs a list of levels, inner to outer, each with name and gb_s")
    out = []
    for i, item in enumerate(data):
        at = f"{where}[{i}]"
        fields = _level_fields(item, at, ("name", *_LEVEL, "fabric", "source", "within_node"))
        network = fields.get("name") in NETWORKS
        if network and nic is not None:
            _check_one_speed("bytes_per_s" in fields, at)
            fields["bytes_per_s"] = nic * GB / 8
        if "name" not in fields or "bytes_per_s" not in fields:
            raise PinError(f"{at}: name and gb_s are needed")
        if i < len(data) - 1 and not (fields.get("size") or fields.get("within_node")):
            raise PinError(f"{at}: {fields['name']} is not the last level and needs its size")
        default = {"latency_s": 0.0, "source": "given", "fabric": "network" if network else "plain"}
        out.append(Level(**{**default, **fields}))
    if nic is not None and not any(level.name in NETWORKS for level in out):
        names = ", ".join(level.name for level in out)
        raise PinError(
            f"{where}: nic_gbit_s is the speed of a level named {NETWORK}, and the levels are {names}; name one "
            f"{NETWORK}, or remove nic_gbit_s"
        )
    _check_nested(out, where)
    return out


def _check_one_speed(given: bool, where: str) -> None:
    """Raise PinError if the speed of the network cards is given twice: as nic_gbit_s, and by a level."""
    if given:
        raise PinError(f"{where}: gb_s and nic_gbit_s are both the speed of the network cards; remove one of the two")


def _check_nested(levels: Sequence[Level], where: str) -> None:
    """Raise PinError unless every unit of a level is some units of the level below it."""
    sized = [level for level in levels if level.size]
    for inner, outer in pairwise(sized):
        if outer.size % inner.size or outer.size == inner.size:
            near = max(2, round(outer.size / inner.size)) * inner.size
            raise PinError(
                f"{where}: size={outer.size} of {outer.name} is not several units of {inner.name}, which have "
                f"{inner.size} devices; levels go from inner to outer; nearest legal: {near}"
            )
