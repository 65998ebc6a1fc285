"""Listings of the catalogs: models and hardware."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

from rich.console import Console

from autoplan import catalog as models
from autoplan.config import numbers
from autoplan.cost_models.hardware import catalog as hardware
from autoplan.plans.document import chosen, plain
from autoplan.report.data import report, to_text
from autoplan.report.tables import print_fitting
from autoplan.report.text import console, next_commands, plain_table
from autoplan.units import GB, TERA


def models_data() -> list[dict[str, Any]]:
    """Return every model of the catalog, with its usual run (null if it has none)."""
    return [{**plain(models.describe_model(n)), "usual": plain(models.usual_run(n))} for n in models.names()]


_MODEL_COLUMNS = ("model", "parameters", "active", "layers", "hidden", "heads (kv)", "vocabulary", "experts")


def models_rows() -> Iterator[tuple[str, ...]]:
    """Yield the cells of every model of the catalog."""
    for d in models_data():
        experts = f"{d['num_experts']} (top {d['num_experts_per_token']})" if d["num_experts"] else ""
        yield (
            d["name"],
            numbers.scaled(d["num_params"]),
            numbers.scaled(d["num_active_params"]) if d["num_experts"] else "",
            str(d["num_layers"]),
            str(d["hidden_size"]),
            f"{d['num_heads']} ({d['num_kv_heads']})" if d["num_heads"] else "",
            f"{d['vocab_size']:,}",
            experts,
        )


def models_command(as_json: bool) -> None:
    """Write the answer of `autoplan models`."""
    if as_json:
        print(to_text(report("models", models=models_data())))
    else:
        print_fitting(console(), _MODEL_COLUMNS, list(models_rows()), ("vocabulary", "hidden", "heads (kv)"))


def devices_command(as_json: bool) -> None:
    """Write the answer of `autoplan hw list`."""
    if as_json:
        print(to_text(report("hw list", devices=[device_data(d) for d in hardware.entries()])))
    else:
        print_fitting(console(), _DEVICE_COLUMNS, list(devices_rows()), ("reached", "NIC Gbit/s", "HBM GB/s"))


def device_command(name: str, as_json: bool) -> None:
    """Write the answer of `autoplan hw show` for a device, or for that of a cloud instance."""
    device = _device_of(name)
    if as_json:
        print(to_text(report("hw show", device=device_data(device))))
    else:
        show_device(console(), device)


def _device_of(name: str) -> str:
    """Return the id of a device, of its name or of an instance that has it. PinError names the nearest of both."""
    if hardware.device_ids(name) or not hardware.instance_names(name):
        return hardware.entry(name).id
    return hardware.instance(name).device_id


def device_data(device_id: str) -> dict[str, Any]:
    """Return one device: the figures of one rank, and the instances that have it."""
    e = hardware.entry(device_id)
    d = e.device
    return {
        **chosen(e, "id vendor compute_capability"),
        **chosen(d, "memory_bytes memory_bytes_per_s"),
        "peak_flops": dict(d.peak_flops_by_dtype),
        **chosen(d, "achievable_fraction power_w"),
        "scaleup_bytes_per_s": e.scaleup.bytes_per_s,
        "scaleup_p2p_bytes_per_s": e.scaleup.p2p_bytes_per_s,
        "scaleup_devices": e.scaleup.size,
        **chosen(e, "devices_per_node nic_gbit_s price"),
        "source": d.source,
        "unverified": list(d.unverified),
        "notes": e.notes,
        "instances": [
            {
                **chosen(i, "provider name num_devices nic_gbit_s_per_node"),
                "usd_per_device_hour": None if i.price is None else i.price.usd_per_device_hour,
                "as_of": None if i.price is None else i.price.as_of,
            }
            for i in hardware.instances().values()
            if i.device_id == device_id
        ],
    }


_DEVICE_COLUMNS = (
    "device", "memory GB", "HBM GB/s", "bf16 TFLOP/s", "reached", "scale-up GB/s", "NIC Gbit/s", "$/h"
)  # fmt: skip


def devices_rows() -> Iterator[tuple[str, ...]]:
    """Yield the cells of every device. Bandwidths are per device and direction; FLOP are dense."""
    for e in hardware.entries().values():
        d = e.device
        fraction = d.achievable_fraction
        yield (
            e.id,
            f"{d.memory_bytes / GB:.1f}",
            f"{d.memory_bytes_per_s / GB:,.0f}",
            f"{d.peak_flops / TERA:,.0f}{'' if 'bfloat16' in d.peak_flops_by_dtype else ' (fp16)'}",
            "" if fraction is None else numbers.percent(fraction),
            f"{e.scaleup.bytes_per_s / GB:g} over {e.scaleup.size}",
            "" if e.nic_gbit_s is None else f"{e.nic_gbit_s:g}",
            "" if e.price is None else f"{e.price.usd_per_device_hour:.2f}",
        )


def show_device(out: Console, device_id: str) -> None:
    """Print everything that the catalog knows about one device."""
    e = hardware.entry(device_id)
    d = e.device
    peaks = ", ".join(f"{dtype} {flops / TERA:,.4g}" for dtype, flops in d.peak_flops_by_dtype.items())
    fraction = d.achievable
    peer = "" if e.scaleup.p2p_bytes_per_s is None else f", {e.scaleup.p2p_bytes_per_s / GB:g} to one peer"
    lines = [
        ("memory", f"{d.memory_bytes / GB:.1f} GB usable, {d.memory_bytes_per_s / GB:,.0f} GB/s"),
        ("peak TFLOP/s, dense", peaks),
        ("matmuls reach", f"{numbers.percent(fraction.mid)} of the bf16 peak ({fraction.tag})"),
        ("compute capability", "-" if e.compute_capability is None else f"{e.compute_capability:.1f}"),
        ("power", "unknown" if d.power_w is None else f"{d.power_w:g} W"),
        ("scale-up", f"{e.scaleup.bytes_per_s / GB:g} GB/s per direction over {e.scaleup.size} devices{peer}"),
        ("usual node", f"{e.devices_per_node} devices"),
        ("network", "unknown" if e.nic_gbit_s is None else f"{e.nic_gbit_s:g} Gbit/s per device"),
        ("notes", e.notes or "-"),
        ("source", d.source),
        ("not confirmed", ", ".join(d.unverified) or "-"),
    ]
    out.print(f"{e.vendor} {e.id} (figures of one rank)", style="bold")
    for name, text in lines:
        wrapped = textwrap.wrap(text, out.width - 24, break_long_words=False, break_on_hyphens=False)
        for i, line in enumerate(wrapped):
            out.print(f"  {name if i == 0 else '':<21} {line}", soft_wrap=True)
    table = plain_table("instance", "devices", "network Gbit/s", "$/device/h", "as of", left=1)
    for m in (m for m in hardware.instances().values() if m.device_id == device_id):
        table.add_row(
            f"{m.provider} {m.name}",
            str(m.num_devices),
            "" if m.nic_gbit_s_per_node is None else f"{m.nic_gbit_s_per_node:g}",
            "" if m.price is None else f"{m.price.usd_per_device_hour:.2f}",
            "" if m.price is None else m.price.as_of,
        )
    if table.row_count:
        out.print()
        out.print(table)
    nodes = f"2x{e.devices_per_node}x{e.id}" + ("" if e.nic_gbit_s is not None else "@nic=400")
    task = ["--cluster", nodes, "--seq-len", "8k", "--global-batch-size", "256"]
    next_commands(out, [["autoplan", "plan", "llama-3.1-8b", *task]])
