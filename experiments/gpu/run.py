"""Everything that only a GPU can show, in one command of at most 10 minutes on one NVIDIA GPU.

    python -m experiments.on_gpu [--only kernels --only step] [--together] [--json FILE] [--folder DIR]
    python -m experiments.on_gpu --device cpu --quick      does it run? The same code with tiny sizes and no GPU

Each part runs in a process of its own, with a time limit: what one of them breaks does not touch the others, and what
it found before is kept. A row either passes or fails (its figures against a stated limit), or is a figure to read. The
folder gets one JSON with all rows, written anew after every part, the log of every part, and the profile, to be kept
in `profiles/` with what it says of where it was measured. The command fails if a row failed or a part did not end.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from experiments.gpu.rows import Row, Run, read_rows
from experiments.shared.measure import environment, make_console, run_command, write_json

TOTAL_S = 570.0  # the command itself starts and ends within 10 minutes
FOLDER = Path("on_gpu_out")
_START_S = 8.0  # of a process: importing torch and transformers, making a CUDA context
_GRACE_S = 2.0  # for the end of a process
_TOGETHER_SHARE = 0.25  # of the time, for the parts that run at once


@dataclass(frozen=True)
class Part:
    """What one process does.

    module, function: called with a `Run`; it writes rows as it finds them.
    expected_s: on an H100 with 16 cores beside the start of the process, by arithmetic (README.md in this folder). Time
        that is left is shared out in these proportions, so that no part spends what the parts after it need.
    timed: its figures are times, so that nothing may run beside it.
    """

    name: str
    module: str
    function: str
    expected_s: float
    about: str
    timed: bool = False


PARTS = (
    Part(
        "kernels",
        "kernels",
        "kernels",
        50.0,
        "every operation of the runtime against float64 on the CPU",
    ),
    Part("masks", "kernels", "masks", 20.0, "attention with masks: peaks, and the ring joined"),
    Part("parity", "training", "parity", 35.0, "one rank against the eager model"),
    Part("sync", "training", "sync", 20.0, "where a step makes the host wait for the device"),
    Part("profile", "training", "profile", 75.0, "the profile of this device", timed=True),
    Part("predicted", "training", "predicted", 110.0, "predicted against measured steps and peaks", timed=True),
    Part("step", "training", "step", 95.0, "the program against eager, torch.compile, torchtitan", timed=True),
    Part("offload", "training", "offload", 20.0, "what waits on the host: parity, peak, time"),
    Part("ranks", "ranks", "ranks", 50.0, "four ranks that share the GPU over gloo"),
    Part("nccl", "communicators", "communicators", 10.0, "a group split off NCCL's, collectives, an abort", timed=True),
)


def run_part(
    part: Part, device: str, quick: bool, folder: Path, limit_s: float, threads: int | None = None
) -> tuple[list[Row], str]:
    """One part in a process of its own; its rows, and why it did not end well (or nothing)."""
    rows, log = folder / f"{part.name}.rows", folder / f"{part.name}.log"
    command = [
        sys.executable,
        "-m",
        "experiments.gpu.run",
        "--child",
        part.name,
        "--device",
        device,
        "--folder",
        str(folder),
    ]
    command += ["--limit-s", str(limit_s)] + ["--quick"] * quick
    begin = time.monotonic()
    with log.open("w") as out:
        limits = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
        child = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True, env={**os.environ, **limits}
        )
        try:
            code = child.wait(limit_s + _START_S + _GRACE_S)
            problem = "" if code == 0 else f"ended with {code}: {_last_line(log)}"
        except subprocess.TimeoutExpired:
            problem = f"did not end within {time.monotonic() - begin:.0f} s"
        finally:
            _end_group(child)
    return read_rows(rows), problem


def _end_group(child: subprocess.Popen[bytes]) -> None:
    """Kill the process with all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no output"


def _child(name: str, run: Run) -> None:
    part = next(p for p in PARTS if p.name == name)
    getattr(importlib.import_module(f"experiments.gpu.{part.module}"), part.function)(run)


def provenance(device: str) -> dict[str, Any]:
    """Return what the figures depend on: device, driver, versions, date. It holds no names of hosts."""
    import torch

    found = {**environment(), "date": datetime.date.today().isoformat(), "device": device}
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found |= {"gpu": properties.name, "gpu_memory_bytes": properties.total_memory, "cuda": torch.version.cuda}
        found |= {"nccl": ".".join(map(str, torch.cuda.nccl.version())), "driver": _driver()}
    return found


def _facts(device: str) -> dict[str, Any]:
    """Ask `provenance` in a process of its own: this one holds no memory of the GPU, and survives what fails."""
    known = {**environment(), "date": datetime.date.today().isoformat(), "device": device}
    try:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            return pool.submit(provenance, device).result(120.0)
    except Exception as exc:  # whatever a driver does; the parts say more
        return {**known, "problem": f"{type(exc).__name__}: {exc}"[:300]}


def _driver() -> str:
    """Return the driver version that nvidia-smi tells; empty where there is none."""
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return ""


def table_of(rows: Sequence[Row], title: str) -> Table:
    """Return a table of all rows, part by part."""
    table = Table(title=title)
    for heading in ("part", "what", "", "figures"):
        table.add_column(heading, overflow="fold")
    before = ""
    for row in rows:
        shown = {None: "", True: "passed", False: "FAILED"}[row.passed]
        figures = ", ".join(f"{k} {_number(v)}" for k, v in row.figures.items())
        if row.part != before:
            table.add_section()
        cells = row.part if row.part != before else "", row.name, shown, f"{figures}{'; ' * bool(row.note)}{row.note}"
        table.add_row(*map(escape, cells))  # brackets of an error are no markup
        before = row.part
    return table


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main(
    only: Annotated[list[str] | None, typer.Option(help=f"parts: {', '.join(p.name for p in PARTS)}")] = None,
    device: Annotated[str, typer.Option(help="cuda, or cpu to see that it runs")] = "cuda",
    quick: Annotated[bool, typer.Option(help="tiny sizes, few repetitions")] = False,
    together: Annotated[
        bool, typer.Option(help="parts whose times do not matter at once, in a quarter of the time")
    ] = False,
    folder: Annotated[Path, typer.Option(help="where the profile, rows and logs are written")] = FOLDER,
    json: Annotated[Path | None, typer.Option(help="all rows; by default a file in the folder")] = None,
    limit_s: Annotated[float, typer.Option(help="time for everything")] = TOTAL_S,
    child: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Run every part, print one table, write one JSON."""
    unknown = sorted(set(only or ()) - {p.name for p in PARTS})
    if unknown:
        raise typer.BadParameter(f"unknown part {unknown[0]!r}; the parts are {', '.join(p.name for p in PARTS)}")
    if child is not None:
        _child(child, Run(child, device, quick, folder, time.monotonic() + limit_s))
        return
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("torch sees no GPU; --device cpu --quick shows whether the command runs")
    folder.mkdir(parents=True, exist_ok=True)
    chosen = [p for p in PARTS if not only or p.name in only]
    # some parts alone do not write over the rows of all
    path = json or folder / ("_".join(("on_gpu", *(p.name for p in chosen if only))) + ".json")
    end, console = time.monotonic() + limit_s, make_console()
    rows: list[Row] = []
    facts = {**_facts(device), "seconds": {}}
    beside = [p for p in chosen if together and not p.timed]
    begin = end - limit_s

    def keep(part: Part, found: list[Row], problem: str) -> None:
        if problem:
            found.append(Row(part.name, part.about, {}, False, problem))
        rows.extend(found)
        facts["seconds"][part.name] = round(time.monotonic() - begin, 1)
        write_json(path, "on_gpu", facts, [asdict(row) for row in rows])  # what comes later cannot lose this
        console.print(f"{part.name}: {_counts(found)}, {facts['seconds'][part.name]:.0f} s")

    for part in chosen:
        (folder / f"{part.name}.rows").unlink(missing_ok=True)
    if beside:
        share = _TOGETHER_SHARE * limit_s if len(beside) < len(chosen) else limit_s - _START_S - _GRACE_S
        threads = max(1, (os.cpu_count() or 1) // len(beside))
        with ThreadPoolExecutor(len(beside)) as pool:
            running = {pool.submit(run_part, p, device, quick, folder, share, threads): p for p in beside}
            for done in as_completed(running):
                keep(running[done], *done.result())
    alone = [p for p in chosen if p not in beside]
    for k, part in enumerate(alone):
        later = sum(p.expected_s for p in alone[k:])
        begin = time.monotonic()
        share = part.expected_s / later * max(0.0, end - begin - (_START_S + _GRACE_S) * len(alone[k:]))
        with console.status(f"{part.name}: {part.about}"):
            found, problem = run_part(part, device, quick, folder, share)
        keep(part, found, problem)
    console.print(table_of(rows, f"{facts.get('gpu', 'CPU')}, torch {facts['torch']}, {facts['date']}"))
    console.print(f"{_counts(rows)}; all rows in {path}")
    if any(row.passed is False for row in rows):
        raise typer.Exit(1)


def _counts(rows: Sequence[Row]) -> str:
    passed, failed = (sum(row.passed is wanted for row in rows) for wanted in (True, False))
    return f"{passed} passed, {failed} failed, {len(rows) - passed - failed} to read"


if __name__ == "__main__":
    run_command(main)
