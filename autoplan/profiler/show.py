"""A profile as tables: measurements with their units, their spread, and how well they interpolate."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from rich.console import Group
from rich.table import Table

from autoplan.cost_models.kernels.products import phase_flops
from autoplan.cost_models.profile import CLOCK, PHASES, MeasuredOp, Profile, Timing
from autoplan.ops.table import op_record
from autoplan.profiler.topology import Topology
from autoplan.units import GB, MIB, MICRO


def _spread(times: Sequence[Timing]) -> str:
    """Return half the distance of the quartiles over the median, of the middle shape."""
    values = sorted((t.high - t.low) / 2 / t.median for t in times)
    return f"{values[len(values) // 2]:.0%}"


def _operations(profile: Profile) -> Table:
    table = Table(title="operations: seconds of one call, all ranks at once", title_justify="left")
    host = ("host",) if profile.has_host else ()
    for name in ("class", "phase", "shapes", "from", "to", *host, "best GFLOP/s", "spread", "held-out error"):
        table.add_column(name, justify="left" if name in ("class", "phase") else "right")
    classes: dict[str, list[MeasuredOp]] = {}
    for record in profile.ops:
        classes.setdefault(op_record(record.work.op).measured_as, []).append(record)
    for name, records in sorted(classes.items()):
        for phase in PHASES:
            found = [(r, t) for r in records if (t := r.forward_s if phase == "forward" else r.backward_s) is not None]
            if not found:
                continue
            times = [t for _, t in found]
            best = max(phase_flops(r.work, phase) / t.median for r, t in found) / 1e9
            error = profile.held_out.get(f"{name} {phase}")
            low, high = min(t.median for t in times), max(t.median for t in times)
            table.add_row(
                name,
                phase,
                str(len(found)),
                f"{low / MICRO:.1f} us",
                f"{high / MICRO:,.0f} us",
                *(_host(records, phase) for _ in host),
                f"{best:.1f}" if name in ("linear", "attention") else "",
                _spread(times),
                "not checked" if error is None else f"{error.median:.0%} (p90 {error.p90:.0%})",
            )
    return table


def _host(records: Sequence[MeasuredOp], phase: str) -> str:
    """Return the median time of the host to queue one operation."""
    found = [t.median for r in records if (t := r.host_s(phase)) is not None]
    return f"{statistics.median(found) / MICRO:.1f} us" if found else ""


def _links(profile: Profile) -> Table:
    table = Table(title="collectives: the slowest rank", title_justify="left")
    per_node = int(profile.machine.get("ranks_per_node", profile.world_size))
    for name in (
        *("collective", "ranks", "stride", "between", "latency", "largest", "bandwidth", "shared", "spread"),
        "held-out error",
    ):
        table.add_column(name, justify="left" if name in ("collective", "between") else "right")
    for kind, size, stride in sorted({(r.kind, r.group_size, r.stride) for r in profile.links}):
        records = [r for r in profile.links if (r.kind, r.group_size, r.stride) == (kind, size, stride)]
        smallest, largest = records[0], records[-1]
        shared = [r.sharing for r in records if r.sharing is not None]
        error = profile.held_out.get(kind)
        table.add_row(
            kind,
            str(size),
            str(stride),
            "nodes" if smallest.crosses_nodes(per_node) else "ranks of a node",
            f"{smallest.time_s.median / MICRO:.0f} us",
            f"{largest.num_bytes / MIB:.3g} MiB",
            f"{largest.num_bytes / largest.time_s.median / GB:.2f} GB/s",
            f"x {shared[-1]:.2f}" if shared else "",
            _spread([r.time_s for r in records]),
            "not checked" if error is None else f"{error.median:.0%} (p90 {error.p90:.0%})",
        )
    return table


def _overhead(name: str, value: float) -> str:
    if name == "overlap_fraction":
        return f"{value:.0%} hidden"
    if name.endswith("_slowdown"):
        return f"x {value:.2f}"
    if name.endswith("_byte_s"):
        return f"{value * MIB / MICRO:.1f} us per MiB"
    if name.endswith("_sqrt_s"):
        return f"{value * 1e-3**0.5 / MICRO:.1f} us after computing 1 ms, more as its square root"
    return f"{value / MICRO:.1f} us"


def _machine(profile: Profile) -> list[str]:
    """Return topology and clocks, a line each."""
    found = profile.machine
    lines = Topology.of(found["topology"]).lines() if found.get("topology") else []
    if found.get("nodes", 1) > 1:
        lines.append(f"{found['nodes']} nodes of {found['ranks_per_node']} ranks; this is the first")
    for when in ("before", "after"):
        clocks = [f"{s['clock_mhz']:.0f}" for node in found.get(f"clocks_{when}", ()) for s in node if "clock_mhz" in s]
        if clocks:
            lines.append(f"clocks {when} measuring: {' '.join(clocks)} MHz")
    if profile.clock:
        burst, sustained = (profile.clock[name] / MICRO for name in CLOCK)
        lines.append(
            f"a large product: {burst:,.0f} us in short bursts, {sustained:,.0f} us under sustained load, which is "
            "what products and attention are priced at"
        )
    return lines


def summary(profile: Profile) -> Group:
    """Return the tables and lines about a profile, for a rich console."""
    where = ", ".join(f"{k} {v}" for k, v in {**profile.hardware, **profile.software}.items())
    parts: list[Table | str] = [
        f"{profile.name}: {profile.world_size} processes of {profile.num_threads} thread(s), {where}, {profile.date}"
    ]
    parts += [f"machine: {line}" for line in _machine(profile)]
    if profile.ops:
        parts.append(_operations(profile))
    if profile.links:
        parts.append(_links(profile))
    if profile.overheads:
        table = Table(title="fixed costs of a step", title_justify="left")
        table.add_column("what")
        table.add_column("time", justify="right")
        both = (profile.overheads, *((profile.host_overheads,) if profile.host_overheads else ()))
        if len(both) > 1:
            table.add_column("of the host", justify="right")
        for name in dict.fromkeys(name for found in both for name in found):
            times = (_overhead(name, found[name]) if name in found else "" for found in both)
            table.add_row(name.removesuffix("_s"), *times)
        parts.append(table)
    parts += [f"note: {note}" for note in profile.notes]
    return Group(*parts)
