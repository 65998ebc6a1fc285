"""Devices of published rows: the catalog's, however people write their names; and clusters of them.

    match = device_of("NVIDIA H100 80GB HBM3", 80.0)       # DeviceMatch: id, overrides, other candidates, notes
    found = clusters_of(row)                               # ClusterMatch: what the row ran on, and what else it may be

Names and sizes are the catalog's own (`cost_models.hardware.catalog`), so that a device that is added there is known
here. Only what has no row of its own, and what people call differently, is a table.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from autoplan.cost_models.hardware.catalog import RANKS_PER_ROW, entries, entry, nearest_names
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.errors import AutoplanError
from autoplan.units import GB
from experiments.published import reading
from experiments.published.defaults import find
from experiments.published.table import Row, Unpriced, Unstated

# Form factors in the catalog's ids, the usual one of training clusters first: that of a row which names none.
FORMS = ("sxm", "oam", "", "nvl72", "pcie", "nvl")
_TITLES = {"sxm": "SXM", "oam": "OAM", "nvl72": "NVL72", "pcie": "PCIe", "nvl": "NVL"}
_FORM = r"SXM\d?|PCI-?E|NVL\d*|OAM"
_FORMS_OF_RACKS = "nvl72"

# Words of vendors, products and memories, which tell no two devices apart.
_NOT_NAMES = (
    r"\b(NVIDIA|NVDA|AMD|GOOGLE|CLOUD|AWS|AMAZON|INSTINCT|TESLA|TENSOR ?CORES?|GEFORCE|RADEON|GPUS?|CHIPS?|HGX|DGX"
    r"|HBM\d?E?|GDDR\d\w?|(?:NVIDIA )?(?:GRACE )?SUPERCHIP|\d+ ?X(?= ))\b"
)
_MEMORY = r"\b(\d+) ?-?GI?B?\b"

# What people call the catalog's devices.
_ALIASES: tuple[tuple[str, str], ...] = (
    (r"\b(TPU[ -]?)?TRILLIUM\b", "TPU V6E"),
    (r"\b(TPU[ -]?)?IRONWOOD\b|\bTPU[ -]?V?7X?\b", "TPU V7X"),
    (r"\bTPU[ -]?V5[ -]?LITE(POD)?\b|\bV5[ -]?LITE(POD)?\b", "TPU V5E"),
    (r"^V(\d[A-Z]?)$", r"TPU V\1"),
    (r"\bTRN2\b", "TRAINIUM2"),
    (r"(?<!RTX )(?<!RTX-)(?<!RTX)\b([345]0[89]0|A[56]000)\b", r"RTX \1"),
    (r"(?<=RTX PRO 6000) BLACKWELL\b", ""),
)


@dataclass(frozen=True)
class Variant:
    """A device: id of the catalog with overrides of `Cluster.parse`. `name`: letters and digits only, in capitals.

    `form`: of FORMS. `sizes_gb`: its memory, as makers and drivers count it; the first is the one to speak of. `note`:
    what it is instead. `of_one_site`: meant only where its memory is stated.
    """

    name: str
    form: str
    sizes_gb: tuple[float, ...]
    device_id: str
    overrides: str = ""
    note: str = ""
    of_one_site: bool = False

    def off(self, memory_gb: float) -> float:
        """Return how far a stated size is from the nearest of its own, relative."""
        return min(abs(memory_gb / size - 1) for size in self.sizes_gb)

    @property
    def text(self) -> str:
        """Its memory and form, for messages."""
        return f"{self.sizes_gb[0]:g} GB" + (f" ({_TITLES[self.form]})" if self.form else "")


# Devices that are others with something changed.
_OTHERS = (
    # an A100 with NVLink cut to 400 GB/s both ways (NVIDIA A800 data sheet)
    Variant("A800", "sxm", (40.0,), "a100-sxm4-40gb", "scaleup=200"),
    # Meta's: HBM2e of 96 GB and 2.4 TB/s, 500 W (pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md)
    Variant("H100", "sxm", (94.0, 96.0), "h100-sxm5-80gb", "memory_gb=94,memory_gb_s=2400,power=500"),
    # custom devices of supercomputers
    Variant("A100", "sxm", (64.0,), "leonardo-a100-64gb", of_one_site=True),
    Variant("H100", "sxm", (64.0,), "marenostrum5-h100-64gb", of_one_site=True),
    # a MI355X for air cooling: 1,000 W (AMD Instinct MI350X data sheet)
    Variant("MI350X", "oam", (288.0,), "mi355x-288gb", "power=1000", "a MI355X of 1,000 W"),
)
SAME_MEMORY = 0.07  # relative: sources count GB or GiB, with or without what the driver keeps
NEAR_MEMORY = 0.1  # up to here it is the nearest device of that name, and said


@dataclass(frozen=True)
class DeviceMatch:
    """The device of a row. `others`: (id, overrides) of what it may be, too; `assumed`: the row leaves it open.

    `notes`: in which way it is not what the row says.
    """

    device_id: str
    overrides: str = ""
    others: tuple[tuple[str, str], ...] = ()
    assumed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@lru_cache(maxsize=1)
def variants() -> tuple[Variant, ...]:
    """All of the catalog and what is made of them."""
    out = []
    for device_id, found in entries().items():
        words = device_id.split("-")
        form = next((re.sub(r"(?<=^sxm)\d$", "", w) for w in words if re.fullmatch(_FORM, w, re.IGNORECASE)), "")
        names = [w for w in words if not re.fullmatch(rf"{_FORM}|\d+gb", w, re.IGNORECASE)]
        ranks = RANKS_PER_ROW.get(device_id, 1)
        # of the package, of a rank, and what the driver reports
        package, rank = found.memory_gb * ranks, found.memory_gb
        sizes = dict.fromkeys((package, rank, found.device.memory_bytes * ranks / GB))
        if found.vendor == "AMD" and not form:
            form = "oam"
        out.append(Variant("".join(names).upper(), form, tuple(sizes), device_id))
    return tuple(out) + _OTHERS


def device_of(text: str, memory_gb: float | None) -> DeviceMatch:
    """The device that a row calls `text`, with the memory that it states or that stands in its name.

    Of one name it is the form that the row names, else the usual one (FORMS), and the memory that is nearest. Where
    the memory is not stated and the name has several, the usual form's largest is taken, and the others may be meant.
    Raises: Unstated without a name; Unpriced, with what there is, for a name or a size that the catalog lacks.
    """
    if not text.strip():
        raise Unstated("gpu is not stated")
    name, form, in_name = _read(text)
    known = [v for v in variants() if v.name == name]
    if not known:
        near = nearest_names(text, list(entries()))
        hint = f"nearest: {', '.join(near)}" if near else f"it has {', '.join(entries())}"
        raise Unpriced(f"no device {text} in the catalog; {hint}")
    memory = in_name if memory_gb is None else memory_gb
    notes: list[str] = []
    of_form = [v for v in known if v.form == form] if form else []
    if form and not of_form and any(v.form for v in known) and form != _FORMS_OF_RACKS:
        there = " or ".join(dict.fromkeys(_TITLES.get(v.form, "") for v in known))
        notes.append(f"gpu={text} is priced as {there}: the catalog has no {_TITLES.get(form, form.upper())} of it")
    usual = min((v.form for v in known), key=FORMS.index)
    candidates = of_form or [v for v in known if v.form == usual]
    socket = re.search(r"SXM\d", text.upper())  # a device may come in two that differ
    candidates = [v for v in candidates if socket and socket[0].lower() in v.device_id.split("-")] or candidates
    if memory is None:
        candidates, known = ([v for v in some if not v.of_one_site] for some in (candidates, known))
        return _without_memory(text, candidates, known, stated_form=bool(of_form), notes=notes)
    best = min(candidates, key=lambda v: v.off(memory))
    if best.off(memory) > SAME_MEMORY and not form:  # another form has that size
        best = min((best, *known), key=lambda v: v.off(memory))
    if best.off(memory) > NEAR_MEMORY:
        there = ", ".join(v.text for v in known)
        raise Unpriced(f"no device {text} with {memory:g} GB is known; {name} is known with {there}")
    if best.off(memory) > SAME_MEMORY:
        notes.append(f"gpu_mem_gb={memory:g} is priced as the nearest {name}, of {best.text}")
    notes += [f"gpu={text} is priced as {best.note}"] if best.note else []
    assumed = ("gpu",) if notes else ()
    return DeviceMatch(best.device_id, best.overrides, (), assumed, tuple(notes))


def _without_memory(
    text: str, candidates: Sequence[Variant], known: Sequence[Variant], stated_form: bool, notes: Sequence[str]
) -> DeviceMatch:
    plain = [v for v in candidates if not v.overrides] or list(candidates)  # the catalog's own first
    best = max(plain, key=lambda v: v.sizes_gb[0])
    others = [v for v in (candidates if stated_form else known) if v != best]
    assumed = ("gpu_mem_gb",) if others else ()
    said = [f"gpu={text} without its memory is priced as {best.device_id}"] if others else []
    said += [f"gpu={text} is priced as {best.note}"] if best.note else []
    assumed += ("gpu",) if notes or best.note else ()
    return DeviceMatch(
        best.device_id,
        best.overrides,
        tuple((v.device_id, v.overrides) for v in others),
        assumed,
        (*notes, *said),
    )


def _read(text: str) -> tuple[str, str, float | None]:
    """Name, form and memory in what a row calls its device. The name is the longest of the catalog's in it."""
    words = re.sub(r"[\s_,;()/]+", " ", text.upper()).strip()
    words = re.sub(rf"(?<=[A-Z\d])({_FORM})(?=$|[ -])", r" \1", words) if not _known(words) else words
    memory = re.search(_MEMORY, words)
    form = re.search(rf"\b({_FORM})\b", words)
    words = re.sub(_MEMORY, " ", words)
    words = re.sub(rf"\b({_FORM})\b", " ", words)
    words = re.sub(r"\s+", " ", re.sub(_NOT_NAMES, " ", words)).strip(" -")
    for pattern, name in _ALIASES:
        words = re.sub(pattern, name, words)
    tokens = [t for t in re.split(r"[ \-]+", words) if t]
    runs = ["".join(tokens[i:j]) for i in range(len(tokens)) for j in range(i + 1, len(tokens) + 1)]
    found = max((run for run in runs if _known(run)), key=len, default="".join(tokens))
    kind = ""
    if form is not None:
        word = form.group(1).lower().replace("-", "")
        kind = "sxm" if word.startswith("sxm") else word
    return found, kind, float(memory.group(1)) if memory else None


def _known(name: str) -> bool:
    return any(v.name == name for v in variants())


# -- clusters ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ClusterMatch:
    """What a row ran on. `others`: what it may be, too; `assumed`, `notes`: as of a device."""

    cluster: Cluster
    others: tuple[Cluster, ...] = ()
    assumed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def cluster_of(row: Row) -> Cluster:
    """Catalog hardware, with the network that the row states. Unpriced for a device that the catalog lacks."""
    return clusters_of(row).cluster


def clusters_of(row: Row) -> ClusterMatch:
    """Return the cluster of a row, and the others that it may mean.

    Devices that equal nodes cannot hold are on more, smaller nodes.

    Raises: Unstated, Unpriced: a device that is not stated, or that the catalog lacks.
    """
    found = device_of(row["gpu"], row.positive("gpu_mem_gb"))
    assumed, notes = list(found.assumed), list(found.notes)
    count = row.num_devices
    stated = row.count("gpus_per_node")
    found = replace(found, device_id=_of_nodes(found.device_id, stated))
    usual = stated or entry(found.device_id).devices_per_node
    nodes = math.ceil(count / usual)
    if count % nodes:
        per_node = max(n for n in range(1, usual + 1) if count % n == 0)
        nodes = count // per_node
        assumed.append("gpus_per_node")
        notes.append(f"{count} devices are not spread evenly over nodes of {usual}: priced as {nodes} of {per_node}")
    per_node = count // nodes
    nic = _nic_gbit_s(row["internode"], per_node)
    if nodes > 1 and nic is None and entry(found.device_id).nic_gbit_s is None:
        assumed.append("internode")
    others = []
    for device_id, overrides in found.others:
        try:
            others.append(_parse(device_id, overrides, nodes, per_node, nic))
        except AutoplanError:
            continue  # one that cannot be in such nodes is not meant
    cluster = _parse(found.device_id, found.overrides, nodes, per_node, nic)
    return ClusterMatch(cluster, tuple(others), tuple(assumed), tuple(notes))


def _of_nodes(device_id: str, per_node: int | None) -> str:
    """The device, or that of its name and memory whose usual node is of the size that a row states."""
    if per_node is None or entry(device_id).devices_per_node == per_node:
        return device_id
    own = next(v for v in variants() if v.device_id == device_id)
    for other in variants():
        alike = (other.name, other.form, other.sizes_gb) == (own.name, own.form, own.sizes_gb)
        if alike and not other.overrides and entry(other.device_id).devices_per_node == per_node:
            return other.device_id
    return device_id


def _parse(device_id: str, overrides: str, nodes: int, per_node: int, nic: float | None) -> Cluster:
    parts = [overrides] if overrides else []
    if nic is None and entry(device_id).nic_gbit_s is None:
        nic = reading.USUAL_NIC
    if nic is not None and nodes > 1:
        parts.append(f"nic={nic:g}")
    text = f"{nodes}x{per_node}x{device_id}"
    return Cluster.parse(f"{text}@{','.join(parts)}" if parts else text)


def _nic_gbit_s(text: str, per_node: int) -> float | None:
    """Gbit/s per device, or None where a row does not say."""
    reached = find(reading.REACHED, text) or 1.0
    if (match := re.search(reading.NIC_PER_DEVICE, text)) is not None:
        return float(match.group(1)) * reached
    if (match := re.search(reading.NIC_PER_NODE, text)) is not None:
        return float(match.group(1)) * float(match.group(2)) / per_node * reached
    return None
