"""The hardware catalog: devices and cloud instances that ship with autoplan (profiles/hardware/*.csv).

device("h100-sxm5-80gb")   Device
entry("h100-sxm5-80gb")    the whole row: Device, links, node shape, network, price
entries(), instances()     everything, by id and by instance name

`device_id` reads an id as people write it: `H100`, `a100-80gb`, `mi300`. PinError lists the candidates or the nearest
ids. Every row names its sources and the fields that no source confirms.
Figures are per rank: the rows of packages with several ranks (RANKS_PER_ROW) are divided.
"""

from __future__ import annotations

import csv
import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from types import MappingProxyType
from typing import TypeVar

from autoplan.cost_models.hardware.parts import Device, Host, Level, Price
from autoplan.errors import PinError
from autoplan.names import begins_alike, begins_with, matching, one_of, plain_name
from autoplan.units import GB, GIB, MIB, TERA

# Ranks per row: PyTorch sees both dies (GCD) of a MI250X and both TensorCores of a TPU7x; a Trainium2 chip is 4 logical
# NeuronCores (notes column).
RANKS_PER_ROW: dict[str, int] = {"mi250x-128gb": 2, "tpu-v7x": 2, "trainium2-96gb": 4}

# Usable share of the memory where no source reports it (column mem_reported_mib), assumed: vendors sell GiB as GB; HBM
# shows about 1.5 % less, GDDR with ECC a sixteenth less.
_USABLE_FRACTION = {"HBM": 0.985, "GDDR": 0.9375}

# link name in the catalog -> (fabric of nccl.FABRICS, latency in seconds, which hops are multiples of)
_FABRIC_OF_LINK: tuple[tuple[str, str, float], ...] = (
    ("PCIe (no NVLink", "pcie_host", 1.5e-6),  # devices that reach each other through host memory
    ("PCIe", "pcie", 1.5e-6),
    ("NVLink2 + NVSwitch", "nvlink2_switch", 0.75e-6),
    ("NVLink2", "nvlink2", 0.75e-6),
    ("NVLink3", "nvlink3", 0.75e-6),
    ("NVLink4", "nvlink4", 0.75e-6),
    ("NVLink5", "nvlink5", 0.75e-6),
    ("NVLink", "nvlink", 0.75e-6),
    ("xGMI", "xgmi", 2e-6),
    ("ICI", "ici", 1e-6),
    ("NeuronLink", "ici", 2e-6),
)
# Fabrics inside one host: their domain never reaches another node, however few devices a node has. NVLink (racks) and
# ICI (pods) may reach others, if their domain is larger than the usual node.
_OF_ONE_HOST = frozenset(("pcie", "pcie_host"))
_HOST_LATENCY_S = 2.5e-6
NETWORK_LATENCY_S = 12.5e-6

PEAK_COLUMNS: dict[str, str] = {  # columns of the catalog, by dtype
    "bfloat16": "peak_tflops_bf16_dense",
    "float16": "peak_tflops_fp16_dense",
    "tf32": "peak_tflops_tf32_dense",
    "float32": "peak_tflops_fp32",
    "float8": "peak_tflops_fp8_dense",
    "float4": "peak_tflops_fp4_dense",
    "int8": "peak_tops_int8_dense",
}
_MAKERS = "^((nvidia|geforce|tesla|amd|instinct)-)+"  # words that people and drivers write before a name
PEAK_DTYPES = tuple(PEAK_COLUMNS)  # the dtypes that have a peak


_Row = TypeVar("_Row")


@dataclass(frozen=True)
class CatalogEntry:
    """One row of the catalog: a device, its links, its usual node, network and price.

    `scaleup`: the innermost level. `host`: connects the scale-up domains of one node, if there are several.
    `nic_gbit_s`: Gbit/s of the network per device; None if no source names it. `ranks`: the ranks of one device.
    """

    id: str
    vendor: str
    device: Device
    scaleup: Level
    host: Level | None
    devices_per_node: int
    nic_gbit_s: float | None
    price: Price | None
    memory_gb: float
    notes: str
    ranks: int = 1

    @property
    def compute_capability(self) -> float | None:
        """The compute capability of the device."""
        return self.device.compute_capability

    @property
    def joins_nodes(self) -> bool:
        """True if the scale-up links reach other nodes (NVL72 racks, TPU pods)."""
        return self.scaleup.size > self.devices_per_node and not self.scaleup.within_node


@dataclass(frozen=True)
class Instance:
    """One rentable machine: its devices, network, host memory and price (None if no source is dated)."""

    name: str
    provider: str
    device_id: str
    num_devices: int
    nic_gbit_s_per_node: float | None
    price: Price | None
    region: str
    notes: str
    host_memory_bytes: float | None = None


def _rows(name: str) -> list[dict[str, str]]:
    text = files("autoplan.profiles").joinpath(f"hardware/{name}").read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))


def _number(row: Mapping[str, str], column: str) -> float | None:
    return float(row[column]) if row[column] else None


def _part(row: Mapping[str, str], column: str, ranks: int, unit: float = 1.0) -> float | None:
    """Return the part of one of `ranks` in the figure of a row, in the base unit; None if the row has none."""
    value = _number(row, column)
    return None if value is None else value * unit / ranks


def _required(row: Mapping[str, str], column: str) -> float:
    value = _number(row, column)
    if value is None:
        raise PinError(f"the hardware catalog has no {column} for {row['id']}")
    return value


def _usable_bytes(row: Mapping[str, str]) -> int:
    reported = _number(row, "mem_reported_mib")  # of the driver: NVML, nvidia-smi or torch
    if reported is not None:
        return int(reported * MIB)
    kind = "GDDR" if row["mem_type"].startswith("GDDR") else "HBM"
    return int(_required(row, "mem_gb") * GIB * _USABLE_FRACTION[kind])


def _as_of(source: str) -> str:
    date = re.search(r"\d{4}-\d{2}-\d{2}", source)
    return date.group(0) if date else source


def _entry(row: Mapping[str, str]) -> CatalogEntry:
    ranks = RANKS_PER_ROW.get(row["id"], 1)
    peaks = {d: v * TERA / ranks for d, column in PEAK_COLUMNS.items() if (v := _number(row, column)) is not None}
    train = next(d for d in ("bfloat16", "float16", "float32") if d in peaks)
    mamf = _number(row, "mamf_tflops_bf16_measured")
    host_memory, host_speed = _part(row, "host_mem_gb", ranks, GB), _number(row, "host_mem_gb_s_per_node")
    per_node = int(_required(row, "devices_per_node")) * ranks
    device = Device(
        name=row["id"],
        peak_flops=peaks[train],
        memory_bytes_per_s=_required(row, "mem_bw_gb_s") * GB / ranks,
        memory_bytes=_usable_bytes(row) // ranks,
        source=row["spec_source"],
        peak_flops_by_dtype=peaks,
        achievable_fraction=None if mamf is None else min(1.0, mamf * TERA / (peaks[train] * ranks)),
        power_w=_part(row, "power_w", ranks),
        overlap_fraction=None,
        unverified=tuple(f for f in row["unverified_fields"].split(";") if f),
        host_bytes_per_s=_part(row, "host_gb_s_per_dir", ranks, GB),
        host_memory_bytes=None if host_memory is None else int(host_memory),
        host=None if host_speed is None else Host(host_speed * GB, per_node),
        compute_capability=_number(row, "compute_capability"),
    )
    for prefix, fabric, latency_s in _FABRIC_OF_LINK:  # noqa: B007  the first match is used below
        if row["scaleup_link"].startswith(prefix):
            break
    else:
        raise PinError(f"the hardware catalog has an unknown link {row['scaleup_link']!r} for {row['id']}")
    domain = int(_required(row, "scaleup_domain_devices")) * ranks
    peer = _number(row, "scaleup_p2p_gb_s_per_dir")
    speed = _required(row, "scaleup_gb_s_per_dir_per_device")
    scaleup = Level(
        latency_s,
        speed * GB / ranks,
        row["spec_source"],
        name="scale-up",
        size=domain,
        p2p_bytes_per_s=peer * GB / ranks if peer is not None and peer < speed else None,
        within_node=domain <= per_node or fabric in _OF_ONE_HOST,
        fabric=fabric,
    )
    host = None
    if device.host_bytes_per_s is not None and scaleup.within_node:
        host = Level(
            _HOST_LATENCY_S,
            device.host_bytes_per_s,
            row["spec_source"],
            name="node",
            within_node=True,
            fabric="pcie",
        )
    nic, usd = _number(row, "scaleout_gbit_s_per_device"), _number(row, "usd_per_device_hour_on_demand")
    price = None
    if usd is not None:
        source = f"{row['price_provider_region']} on demand, {row['price_source']}"
        price = Price(usd / ranks, source, _as_of(row["price_source"]))
    return CatalogEntry(
        id=row["id"],
        vendor=row["vendor"],
        device=device,
        scaleup=scaleup,
        host=host,
        devices_per_node=per_node,
        nic_gbit_s=None if nic is None else nic / ranks,
        price=price,
        memory_gb=_required(row, "mem_gb") / ranks,
        notes=row["notes"],
        ranks=ranks,
    )


@lru_cache(maxsize=1)
def entries() -> Mapping[str, CatalogEntry]:
    """Return the whole catalog by id, in file order."""
    return MappingProxyType({row["id"]: _entry(row) for row in _rows("devices.csv")})


def nearest_names(text: str, known: list[str]) -> list[str]:
    """Return at most four names that contain `text`, or else at most three with a similar spelling."""
    plain = text.lower().replace("_", "-")
    inside = [name for name in known if plain in name.lower()]
    first = {name: name.lower().partition("-")[0] for name in known}  # h101 is near h100, of h100-sxm5-80gb
    near = difflib.get_close_matches(plain, dict.fromkeys(first.values()), 2, 0.7)
    alike = [name for part in near for name in known if first[name] == part]
    return inside[:4] or alike[:3] or difflib.get_close_matches(plain, known, 3, 0.4)


def device_ids(text: str) -> list[str]:
    """Return the ids that `text` may mean.

    They have the first part that is written whole, with or without its letters (`h100`, `4090`), and go on with the
    parts of the text in their order (`a100-80gb`) or with its letters and digits (`H100SXM`). The ones of a module for
    a board (SXM) are meant where there is another form (PCIe): `h100` is h100-sxm5-80gb.
    """
    forms = {form: name for name in entries() for form in _forms(name)}
    text = re.sub(_MAKERS, "", plain_name(text))
    found = [form for form in matching(text, forms) if any(begins_alike(text, part) for part in _first_parts(form))]
    found = list(dict.fromkeys(forms[form] for form in found or [f for f in forms if _has_parts(f, text)]))
    boards = [name for name in found if re.search(r"-sxm\d?-", name)]
    return boards or found


def _forms(name: str) -> list[str]:
    """Return an id as it is and as people write it without its brand: an RTX A6000 is an A6000."""
    return list(dict.fromkeys((name, name.removeprefix("rtx-"))))


def _first_parts(name: str) -> list[str]:
    """Return how people write the first part of an id: an AMD MI300X is an MI300 too, an RTX 4090 a 4090."""
    first = name.split("-")[0]
    short = first.removesuffix("x") if re.fullmatch(r"mi3\d\dx", first) else first
    return [first, short, re.sub(r"^[a-z]+(?=\d{4})", "", first)]


def _has_parts(name: str, text: str) -> bool:
    """Return True if parts of the id begin with the parts of the text, in their order, the first with the first."""
    first, *rest = text.split("-")
    left = iter(name.split("-")[1:])
    return first in _first_parts(name) and all(any(begins_with(part, given) for part in left) for given in rest)


def entry(text: str) -> CatalogEntry:
    """Return the row of a device, by its id or as people write it (`device_ids`).

    Raises:
        PinError: lists the candidates if it may be several, else the nearest ids.
    """
    return _found(entries(), text, device_ids(text), "device", "is not in the hardware catalog")


def device(text: str) -> Device:
    """Return the device of an id, as `entry` reads it. Raises PinError that names the candidates or the nearest ids."""
    return entry(text).device


@lru_cache(maxsize=1)
def instances() -> Mapping[str, Instance]:
    """Return cloud instances by name. Their figures count ranks, as Device does."""
    out = {}
    for row in _rows("instances.csv"):
        ranks = RANKS_PER_ROW.get(row["device_id"], 1)
        usd = _number(row, "usd_per_device_hour")
        price = None
        if usd is not None:
            where = " ".join(word for word in (row["provider"], row["instance"], row["region"]) if word)
            price = Price(usd / ranks, f"{where} on demand, {row['source']}", row["as_of"])
        out[row["instance"]] = Instance(
            name=row["instance"],
            provider=row["provider"],
            device_id=row["device_id"],
            num_devices=int(row["devices"]) * ranks,
            nic_gbit_s_per_node=_number(row, "scaleout_gbit_s_per_node"),
            price=price,
            region=row["region"],
            notes=row["notes"],
            host_memory_bytes=_part(row, "host_mem_gib_per_node", 1, GIB),
        )
    return MappingProxyType(out)


def instance(name: str) -> Instance:
    """Return the instance of that name, in any case, or of its unique beginning.

    Raises:
        PinError: lists the candidates if it may be several, else the nearest names.
    """
    return _found(instances(), name, instance_names(name), "instance", "is not in the catalog")


def instance_names(text: str) -> list[str]:
    """Return the names of the instances that `text` may mean."""
    return matching(text, instances())


def _found(known: Mapping[str, _Row], name: str, meant: list[str], what: str, missing: str) -> _Row:
    """Return the one row that is meant. Raises PinError for none or several."""
    if len(meant) > 1:
        raise PinError(f"{what} {name!r} {one_of(meant)}")
    if not meant:
        near = nearest_names(name, list(known))
        raise PinError(f"{what} {name!r} {missing}; {'nearest' if near else 'known'}: {', '.join(near or known)}")
    return known[meant[0]]
