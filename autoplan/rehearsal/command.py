"""`autoplan rehearse`: the lines of every rank as text or JSON, and an exit code for the first difference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.table import Table

from autoplan.plans.document import plain
from autoplan.rehearsal.compare import MEMORY_TOLERANCE, RankReport, Row
from autoplan.rehearsal.rehearse import Rehearsal, rehearse
from autoplan.report.text import console


def rehearse_command(plan: Path, ranks: str, as_json: bool) -> tuple[Rehearsal, dict[str, Any]]:
    """Rehearse, print each rank as text when it is there (nothing for JSON), and return everything as data."""
    shown = (lambda report: None) if as_json else show_rank
    found = rehearse(plan, ranks, check=False, show=shown)
    if not as_json:
        flops = "" if found.compares_flops else "; FLOPs were not compared, since the graph of the model is not here"
        console().print(
            f"{found.model}: {len(found.ranks)} of {found.num_ranks:,} ranks rehearsed; all {found.actions:,} actions "
            f"of the schedule end{flops}"
        )
    return found, plain(found)


def show_rank(report: RankReport) -> None:
    """Print one rank."""
    out = console()
    place = " ".join(f"{name}={i}" for name, i in report.coordinates.items())
    held = ", ".join(map(str, report.stages))
    ran = f"{report.num_micro_batches} micro-batches in {report.seconds:.0f} s"
    out.print(f"rank {report.rank} ({place}), stage {held}: {ran}")
    table = Table("", "plan", "rehearsed", box=None, pad_edge=False)
    for row in report.rows:
        table.add_row(row.name, *(_shown(value, row) for value in (row.expected, row.observed)))
    out.print(table)
    low, _, high = (size / 1e9 for size in report.predicted_bytes)
    out.print(f"memory of tensors predicted from {low:.2f} to {high:.2f} GB; {MEMORY_TOLERANCE:.0%} more are tolerated")
    for text in report.differences:
        out.print(f"DIFFERS: {text}")


def _shown(value: float | None, row: Row) -> str:
    if value is None:
        return "-"
    if row.unit == "bytes":
        return f"{value / 1e9:.4g} GB" if value >= 1e6 else f"{value:,.0f} bytes"
    return f"{value:,.0f} times" if row.unit == "times" else f"{value:.6g}"
