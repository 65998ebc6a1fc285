"""The command line: `autoplan plan | estimate | whatif | capacity | profile | calibrate | models | hw`.

Exit codes: 0 a plan, 2 bad input (one line on stderr), 3 nothing fits (names the obstacle and the cheapest change), 4
standard output cannot be written, 130 interrupted, 141 the reader has gone (`| head -1`). Catalog models need no torch;
`--json` is versioned (autoplan.report.data).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from autoplan.config.choices import OPTIONS, PINS
from autoplan.report.flags import (
    CHOSEN,
    AsJson,
    Assumed,
    BatchSize,
    ClusterText,
    ConstantsFile,
    CsvPath,
    Model,
    ModeName,
    PinTexts,
    PrecisionName,
    ProfileName,
    Runnable,
    SeqLen,
    TargetLen,
    TimeLimit,
    Tokens,
    with_choices,
)
from autoplan.report.output import say_error, written_output
from autoplan.report.waiting import waiting

if TYPE_CHECKING:
    from autoplan.config.parallel import ParallelConfig
    from autoplan.cost_models.whole_run import Assumptions
    from autoplan.search.planner import PlanRequest
    from autoplan.sweeps.whatif import Point

EXIT_BAD_INPUT = 2
EXIT_NOTHING_FITS = 3
EXIT_INTERRUPTED = 130


class _Commands(TyperGroup):
    """The commands: the user's errors, and lost output, become one line on stderr and an exit code."""

    def main(self, *args: Any, **settings: Any) -> Any:
        with written_output():
            return super().main(*args, **settings)

    def invoke(self, ctx: Any) -> Any:
        from autoplan.errors import AutoplanError, InfeasibleError

        try:
            return super().invoke(ctx)
        except InfeasibleError as error:
            raise _stop(str(error), EXIT_NOTHING_FITS) from error
        except AutoplanError as error:
            raise _stop(str(error), EXIT_BAD_INPUT) from error
        except OSError as error:  # a file or folder of the user: a cache on a full disk, a missing input
            where = f"{error.filename}: " if error.filename else ""
            raise _stop(f"{where}{error.strerror or error}", EXIT_BAD_INPUT) from error
        except KeyboardInterrupt:
            raise _stop("interrupted", EXIT_INTERRUPTED) from None


def _stop(message: str, code: int) -> typer.Exit:
    say_error(message)
    return typer.Exit(code)


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Plan how to train a model on a cluster: degrees, stages, recompute, ZeRO; time, memory, money.",
)
hw = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="The hardware catalog.")
app.add_typer(hw, name="hw")


def _version(wanted: bool) -> None:
    if wanted:
        from autoplan import __version__

        typer.echo(f"autoplan {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Options before the command."""


# -- reading -----------------------------------------------------------------------------------------------------------


def _read_tokens(text: str | None) -> float | None:
    from autoplan.config.numbers import read_number

    return None if text is None else read_number(text, "--tokens")


def _read_assumed(texts: Sequence[str] | None, tokens: float | None) -> Assumptions:
    from autoplan.errors import PinError
    from autoplan.report.arguments import read_assumptions

    if texts and tokens is None:
        raise PinError(f"--assume {texts[0]} is about a whole run; give its size too, for example --tokens 300B")
    return read_assumptions(texts or ())


def _print_json(data: dict[str, Any]) -> None:
    from autoplan.report.data import to_text

    typer.echo(to_text(data))


# -- commands ----------------------------------------------------------------------------------------------------------


@app.command()
@with_choices
def plan(
    model: Model,
    cluster: ClusterText,
    seq_len: SeqLen,
    global_batch_size: BatchSize,
    pin: PinTexts = None,
    top: Annotated[int, typer.Option(help="How many plans to show, best first.", min=1, max=100)] = 3,
    precision: PrecisionName = "bf16",
    mode: ModeName = "eager",
    options: Mapping[str, Any] = CHOSEN,
    profile: ProfileName = None,
    constants: ConstantsFile = None,
    target_len: TargetLen = None,
    tokens: Tokens = None,
    assume: Assumed = None,
    time_limit: TimeLimit = 60.0,
    runnable: Runnable = False,
    as_json: AsJson = False,
) -> None:
    """The fastest plan that fits, with its certificate."""
    from autoplan.errors import InfeasibleError
    from autoplan.report.request import read_request
    from autoplan.search.planner import search_plan

    total = _read_tokens(tokens)
    assumed = _read_assumed(assume, total)
    request = read_request(
        model,
        cluster,
        seq_len,
        global_batch_size,
        pins=pin,
        precision=precision,
        mode=mode,
        profile=profile,
        options=options,
        constants=constants,
        top=top,
        time_limit=time_limit,
        runnable=runnable,
        target_len=target_len,
    )
    try:
        with waiting("searching", as_json):
            result = search_plan(request)
    except InfeasibleError as error:
        if as_json:
            from autoplan.report.data import infeasible_report

            _print_json(infeasible_report(error))
        raise
    if as_json:
        from autoplan.report.data import plan_report

        _print_json(plan_report(request, result, total, assumed))
    else:
        from autoplan.report.text import console, plan_text

        plan_text(console(), model, cluster, request, result, total, assumed)


@app.command()
@with_choices
def estimate(
    model: Model,
    cluster: ClusterText,
    seq_len: SeqLen,
    global_batch_size: BatchSize,
    degrees: Mapping[str, Any] = CHOSEN,
    timeline: Annotated[
        Path | None, typer.Option(help="Write the step to this file, as a Chrome trace (ui.perfetto.dev).")
    ] = None,
    precision: PrecisionName = "bf16",
    mode: ModeName = "eager",
    options: Mapping[str, Any] = CHOSEN,
    profile: ProfileName = None,
    constants: ConstantsFile = None,
    target_len: TargetLen = None,
    tokens: Tokens = None,
    assume: Assumed = None,
    runnable: Runnable = False,
    as_json: AsJson = False,
) -> None:
    """Price one configuration. Exit code 3 if it does not fit the memory."""
    from autoplan.program.pins import layer_calls
    from autoplan.report.arguments import read_degrees
    from autoplan.report.degrees import checked_config
    from autoplan.report.files import check_writable
    from autoplan.report.request import read_request
    from autoplan.search.planner import estimate_config

    total = _read_tokens(tokens)
    assumed = _read_assumed(assume, total)
    if timeline is not None:
        check_writable(timeline)
    request = read_request(
        model,
        cluster,
        seq_len,
        global_batch_size,
        precision=precision,
        mode=mode,
        profile=profile,
        options=options,
        constants=constants,
        runnable=runnable,
        target_len=target_len,
    )
    config = checked_config(request, read_degrees(degrees, layer_calls(request.graph)))
    _estimate(model, cluster, request, config, total, assumed, as_json, estimate_config, timeline)


def _estimate(
    model: str,
    cluster: str,
    request: PlanRequest,
    config: ParallelConfig,
    tokens: float | None,
    assumed: Assumptions,
    as_json: bool,
    price: Any,
    timeline: Path | None,
) -> None:
    with waiting("pricing", as_json):
        planned = price(request, config)
    if timeline is not None:
        from autoplan.report.timeline import write

        write(planned.estimate, timeline)
    if as_json:
        from autoplan.report.data import estimate_report

        _print_json(estimate_report(request, planned, tokens, assumed))
    else:
        from autoplan.report.text import console, estimate_text

        estimate_text(console(), model, cluster, request, planned, tokens, assumed)
    e = planned.estimate
    if not e.fits:
        fullest = max(e.stages, key=lambda s: s.memory_bytes.mid)
        term = max(fullest.memory, key=lambda t: fullest.memory[t].mid)
        over = (fullest.memory_bytes.mid - e.memory_capacity_bytes) / 1e9
        if over <= 0:
            held = max(e.stages, key=lambda s: s.host_bytes.mid)
            raise _stop(
                f"does not fit: what stage {held.index} offloads needs {held.host_bytes.mid / 1e9:.1f} GB of its host, "
                f"a device's share is {e.host_capacity_bytes / 1e9:.1f} GB (@host_memory_gb)",
                EXIT_NOTHING_FITS,
            )
        raise _stop(
            f"does not fit: stage {fullest.index} needs {fullest.memory_bytes.mid / 1e9:.1f} GB, {over:.1f} GB more "
            f"than a device has; its largest term is {term} ({fullest.memory[term].mid / 1e9:.1f} GB)",
            EXIT_NOTHING_FITS,
        )


@app.command(
    help=f"""The best plan at every point of a sweep over hardware and task.

    Names: nodes, devices_per_node, device, nic (Gbit/s per device), scaleup (GB/s), memory_gb, memory_gb_s,
    host_memory_gb, power (W per device), price, cluster, seq_len, global_batch_size, precision, mode, and the pins:
    {", ".join(PINS)}. Values with commas of their own have / between them: stages=8,8/10,6."""
)
@with_choices
def whatif(
    model: Model,
    cluster: ClusterText,
    seq_len: SeqLen,
    global_batch_size: BatchSize,
    vary: Annotated[
        list[str],
        typer.Option("--vary", help="name=8,16,32 or name=100..1600 (doubled); repeated: all combinations."),
    ],
    pin: PinTexts = None,
    precision: PrecisionName = "bf16",
    mode: ModeName = "eager",
    options: Mapping[str, Any] = CHOSEN,
    profile: ProfileName = None,
    constants: ConstantsFile = None,
    target_len: TargetLen = None,
    tokens: Tokens = None,
    assume: Assumed = None,
    time_limit: TimeLimit = 60.0,
    csv: CsvPath = None,
    as_json: AsJson = False,
) -> None:
    """Plan every point of a sweep."""
    from autoplan.report.arguments import read_vary
    from autoplan.report.files import check_writable, csv_rows
    from autoplan.report.request import read_request
    from autoplan.sweeps.whatif import check_varied, columns, points, row

    total = _read_tokens(tokens)
    assumed = _read_assumed(assume, total)
    values = read_vary(vary)
    check_varied(values)
    if csv is not None:
        check_writable(csv)
    request = read_request(
        model,
        cluster,
        seq_len,
        global_batch_size,
        pins=pin,
        precision=precision,
        mode=mode,
        profile=profile,
        options=options,
        constants=constants,
        time_limit=time_limit,
        target_len=target_len,
    )
    found: list[Point] = []
    rows: list[dict[str, object]] = []
    interrupted = False  # between two searches; during a search, its last point says so
    with csv_rows(csv, columns(values, total)) as file, waiting("planning", as_json) as status:
        count = math.prod(map(len, values.values()))
        try:
            for point in points(request, values):
                found.append(point)
                rows.append(row(point, total, assumed))
                file.add(rows[-1])
                status.update(f"planning: {len(found)} of {count} points")
        except KeyboardInterrupt:
            interrupted = True
    interrupted = interrupted or (bool(found) and found[-1].interrupted)
    outcome = _outcome(found, interrupted)
    if as_json:
        from autoplan.report.data import whatif_report

        _print_json(whatif_report(outcome, request, values, rows))
    else:
        from autoplan.report.text import console, whatif_text

        whatif_text(console(), request, found, total, assumed)
    _end_sweep(outcome, found, count)


# The outcome of a sweep, by the best state among its points
_OUTCOMES = {"ok": "ok", "stopped": "stopped", "does not fit": "infeasible"}


def _outcome(found: Sequence[Point], interrupted: bool) -> str:
    states = {point.status for point in found}
    return "interrupted" if interrupted else next((n for s, n in _OUTCOMES.items() if s in states), "illegal")


def _end_sweep(outcome: str, found: Sequence[Point], count: int) -> None:
    """Return the exit code of a sweep: 0 if any point has a plan."""
    if outcome == "interrupted":
        raise _stop(f"interrupted after {len(found)} of {count} points", EXIT_INTERRUPTED)
    if outcome == "infeasible":
        raise _stop("nothing fits at any point", EXIT_NOTHING_FITS)
    if outcome == "stopped":
        raise _stop(f"no plan was found in time at any point: {found[0].reason}", EXIT_BAD_INPUT)
    if outcome == "illegal":
        raise _stop(f"no point is legal: {found[0].reason}", EXIT_BAD_INPUT)


@app.command(
    help=f"""Many models on many clusters: plan, days, money, energy and goodput, a row each.

    The file holds models, clusters, tokens, seq_len and global_batch_size (one or a list of each), and if wanted
    precision, mode, pins, {", ".join(OPTIONS)}, profile, constants, assumptions (mtbf_device_days, pue, ...) and
    time_limit_s."""
)
def capacity(
    file: Annotated[Path, typer.Argument(help="YAML: models, clusters, tokens, seq_len, global_batch_size, ...")],
    csv: CsvPath = None,
    as_json: AsJson = False,
) -> None:
    """Plan every row of a capacity file."""
    from autoplan.report.files import check_writable, csv_rows
    from autoplan.report.request import import_from_here
    from autoplan.sweeps.capacity import Cell, cell_columns, cell_row, cells, read_task

    import_from_here()
    if csv is not None:
        check_writable(csv)
    found: list[Cell] = []
    interrupted = False
    with waiting("reading", as_json):
        task = read_task(file)
    count = task.num_searches * len(task.tokens)
    with csv_rows(csv, cell_columns()) as table, waiting("planning", as_json) as status:
        try:
            for cell in cells(task):
                found.append(cell)
                table.add(cell_row(cell, task.assumptions))
                status.update(f"planning: {len(found)} of {count} rows")
        except KeyboardInterrupt:
            interrupted = True
    found_points = [cell.point for cell in found]
    interrupted = interrupted or (bool(found) and found[-1].point.interrupted)
    outcome = _outcome(found_points, interrupted)
    from autoplan.report.capacity import capacity_report, capacity_text

    if as_json:
        _print_json(capacity_report(str(file), outcome, task, found))
    else:
        from autoplan.report.text import console

        capacity_text(console(), str(file), task, found)
    _end_sweep(outcome, found_points, count)


@app.command()
def profile(
    name: Annotated[str | None, typer.Argument(help="Name of the profile; left out: made from this machine.")] = None,
    processes: Annotated[int, typer.Option(help="Processes to measure collectives with.", min=1)] = 1,
    budget: Annotated[float, typer.Option("--budget", help="Seconds to spend.", min=1)] = 300.0,
    model: Annotated[str | None, typer.Option(help="Measure the shapes of this model first.")] = None,
    out: Annotated[Path | None, typer.Option(help="Where to write it; left out: the cache folder.")] = None,
    write_cluster: Annotated[Path | None, typer.Option(help="Also propose a cluster file of what was found.")] = None,
) -> None:
    """Measure this machine, or the nodes of a torchrun job: operations, collectives, overheads, topology, clocks."""
    from autoplan.profiler.command import profile_command
    from autoplan.report.request import import_from_here

    if model is not None and ":" in model:
        import_from_here()
    profile_command(name, processes, budget, model, out, write_cluster)


@app.command()
def calibrate(
    file: Annotated[Path, typer.Argument(help="YAML: a list of measured steps, what ran and how long it took.")],
    profile: ProfileName = None,
    constants: ConstantsFile = None,
    only: Annotated[str | None, typer.Option(help="Fit only these constants, by comma.")] = None,
    write: Annotated[Path | None, typer.Option(help="Write the constants here, for --constants.")] = None,
) -> None:
    """Fit the cost model's constants to your own training steps.

    Every step of the file has model, cluster, seq_len, global_batch_size and step_time_s, and if wanted name, group,
    precision, mode, options (attention, launch, overlap, dispatcher, ...) and degrees (dp, tp, pp, ..., recompute).
    """
    from autoplan.calibration.command import calibrate_command
    from autoplan.report.request import import_from_here

    import_from_here()
    with waiting("fitting", quiet=False):
        show = calibrate_command(file, profile, constants, only, write)
    show()


@app.command()
def models(as_json: AsJson = False) -> None:
    """The models that ship with autoplan."""
    from autoplan.report.catalogs import models_data, models_table
    from autoplan.report.text import console

    if as_json:
        _print_json({"schema": 1, "status": "ok", "command": "models", "models": models_data()})
    else:
        console().print(models_table())


@hw.command("list")
def hw_list(as_json: AsJson = False) -> None:
    """All devices: per device and direction, dense FLOP/s."""
    from autoplan.cost_models.hardware.catalog import entries
    from autoplan.report.catalogs import device_data, devices_table
    from autoplan.report.text import console

    if as_json:
        _print_json({"schema": 1, "status": "ok", "command": "hw list", "devices": [device_data(d) for d in entries()]})
    else:
        console().print(devices_table())


@hw.command("show")
def hw_show(
    device: Annotated[str, typer.Argument(help="A device of autoplan hw list.")], as_json: AsJson = False
) -> None:
    """Everything that is known about one device, with its sources."""
    from autoplan.report.catalogs import device_data, show_device
    from autoplan.report.text import console

    if as_json:
        _print_json({"schema": 1, "status": "ok", "command": "hw show", "device": device_data(device)})
    else:
        show_device(console(), device)


def main() -> None:
    """Run the `autoplan` command."""
    app(prog_name="autoplan")
