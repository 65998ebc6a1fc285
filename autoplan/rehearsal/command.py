"""`autoplan rehearse`: the lines of every rank as text or JSON, and an exit code for the first difference."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer
from rich.table import Table

from autoplan.config.numbers import percent
from autoplan.plans.document import plain
from autoplan.rehearsal.compare import MEMORY_TOLERANCE, UNKNOWN_KERNELS_TOLERANCE, RankReport, Row
from autoplan.rehearsal.rehearse import rehearse
from autoplan.report.data import report, to_text
from autoplan.report.request import import_from_here
from autoplan.report.text import console
from autoplan.report.waiting import INCOMPLETE, Countdown, waiting
from autoplan.units import bytes_text

_SHOWN = 0.005  # of a peak: smaller differences between kernels are not shown


def rehearse_command(plan: Path, ranks: str, as_json: bool) -> str | None:
    """Rehearse, print each rank when it is there, or everything as JSON; return the first difference."""
    import_from_here()
    done: list[RankReport] = []
    with waiting("rehearsing", quiet=False, hint="") as status:

        def show(report: RankReport) -> None:
            done.append(report)
            if not as_json:
                status.stop()
                show_rank(report)
                status.start()

        try:
            found = rehearse(plan, ranks, check=False, show=show, told=_told(status))
        except KeyboardInterrupt:
            raise KeyboardInterrupt(INCOMPLETE if done and not as_json else "") from None
    if as_json:
        status = "differs" if found.differences else "ok"
        typer.echo(to_text(report("rehearse", status, rehearsal=plain(found))))
    else:
        flops = "" if found.compares_flops else "; FLOPs were not compared, since the graph of the model is not here"
        console().print(
            f"{found.model}: {len(found.ranks)} of {found.num_ranks:,} ranks rehearsed; all {found.actions:,} actions "
            f"of the schedule end{flops}"
        )
    return next(iter(found.differences), None)


def _told(status: Any) -> Callable[[int, int, str], None]:
    """Return a function that shows how many ranks are done, the time that is left, and what is done now."""
    left: list[Countdown] = []  # from the first rank on

    def told(done: int, num: int, what: str) -> None:
        if num and not left:
            left.append(Countdown(num, "ranks" if num > 1 else "rank"))
        status.update(f"rehearsing: {f'{left[0].text(done)}; ' if left else ''}{what}")

    return told


def show_rank(rank: RankReport) -> None:
    """Print one rank."""
    out = console()
    place = " ".join(f"{name}={i}" for name, i in rank.coordinates.items())
    held = ", ".join(map(str, rank.stages))
    plural = "es" if rank.num_micro_batches > 1 else ""
    ran = f"{rank.num_micro_batches} micro-batch{plural} in {rank.seconds:.0f} s"
    out.print(f"rank {rank.rank} ({place}), stage {held}: {ran}")
    table = Table("", "plan", "rehearsed", box=None, pad_edge=False)
    for row in rank.rows:
        table.add_row(row.name, *(_shown(value, row) for value in (row.expected, row.observed)))
    out.print(table)
    out.print(_memory_text(rank))
    for text in rank.differences:
        out.print(f"DIFFERS: {text}")


def _memory_text(rank: RankReport) -> str:
    """Return the predicted memory by term, and what it is compared with."""
    low, _, high = rank.predicted_bytes
    terms = ", ".join(f"{name} {bytes_text(size)}" for name, size in rank.predicted_terms.items())
    here = {name: size for name, size in (rank.kernels or {}).items() if abs(size) > rank.peak_bytes * _SHOWN}
    signed = (f"{name} {'-' if size < 0 else '+'}{bytes_text(abs(size))}" for name, size in here.items())
    kernels = f" ({', '.join(signed)})" if here else ""
    tolerance = UNKNOWN_KERNELS_TOLERANCE if rank.kernels is None else MEMORY_TOLERANCE
    return (
        f"memory of tensors predicted from {bytes_text(low)} to {bytes_text(high)} on the device: {terms}; the peak "
        f"above is of the kernels of a CPU{kernels}, and {percent(tolerance)} are tolerated"
    )


def _shown(value: float | None, row: Row) -> str:
    if value is None:
        return "-"
    if row.unit == "bytes":
        return bytes_text(value)
    return f"{value:,.0f} time{'s' if value != 1 else ''}" if row.unit == "times" else f"{value:.6g}"
