"""The command line: `autoplan plan`, `estimate`, `explain`, `fit`, `size`, `whatif`, `capacity`, `compile` and others.

Exit codes: 0 a plan (also the best so far, after Ctrl-C), 1 a checked file is illegal or does not fit, 2 bad input (one
line on stderr), 3 nothing fits (names the obstacle and the cheapest change), 4 standard output cannot be written, 130
interrupted before an answer or within a sweep, 141 the reader has gone (`| head -1`). Catalog models need no torch;
`--json` is versioned (autoplan.report.data).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from autoplan.config.choices import OPTIONS, PINS
from autoplan.config.planning import OF_EVERY_COMMAND, SCREEN_LIMIT_S, SearchSettings
from autoplan.names import target_names
from autoplan.report.flags import (
    CHOSEN,
    OF_THE_RUN,
    AsJson,
    Cache,
    ConstantsFile,
    CsvPath,
    FileFormat,
    FromFile,
    MemoryRisk,
    PinTexts,
    ProfileName,
    ReportPath,
    Runnable,
    TaskWords,
    TimeLimit,
    with_choices,
)
from autoplan.report.output import EXIT_INTERRUPTED, TOO_EARLY, say_error, written_output
from autoplan.report.waiting import waiting

if TYPE_CHECKING:
    from autoplan.sweeps.whatif import Point

EXIT_BAD_INPUT = 2
EXIT_NOTHING_FITS = 3

# The commands by what they are for, in the order of --help; a command of none of them stands under "Other"
_GROUPS = {
    "Plan": ("plan", "estimate", "fit", "explain", "check", "pools"),
    "Compare hardware, size and money": ("whatif", "size", "capacity"),
    "Run a plan": ("export", "compile", "launch", "rehearse", "compare"),
    "Measure": ("profile", "calibrate"),
    "Look up": ("models", "hw", "stacks"),
}
_EXAMPLES = """\b
Examples:
  autoplan plan llama-3.1-70b --cluster 64xh100
  autoplan fit qwen3-32b --cluster 8xh100
  autoplan whatif llama-3.1-8b --cluster 64xh100 --vary nodes=4,8,16
  autoplan size llama-3.1-70b --devices h100,gb200 --deadline 60d --tokens 1T
  autoplan plan llama-3.1-70b --cluster 64xh100 --json > plan.json
  autoplan export plan.json --to megatron-lm"""


class _Commands(TyperGroup):
    """The commands: the user's errors, and lost output, become one line on stderr and an exit code."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands in groups."""
        told = {name for names in _GROUPS.values() for name in names}
        others = tuple(name for name in self.commands if name not in told)
        for group, names in {**_GROUPS, "Other": others}.items():
            found = [(name, self.commands[name]) for name in names if name in self.commands]
            if found:
                width = formatter.width - 6 - max(map(len, self.commands))
                with formatter.section(group):
                    formatter.write_dl([(name, command.get_short_help_str(width)) for name, command in found])

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
        except KeyboardInterrupt as error:  # says of what there is already, if anything
            raise _stop(str(error) or TOO_EARLY, EXIT_INTERRUPTED) from None


def _stop(message: str, code: int) -> typer.Exit:
    say_error(message)
    return typer.Exit(code)


app: typer.Typer = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    epilog=_EXAMPLES,
    help="Plan how to train a model on a cluster: degrees, stages, recompute and ZeRO, with time, memory and cost.",
)
hw: typer.Typer = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="The hardware catalog.")
app.add_typer(hw, name="hw")


def _version(wanted: bool) -> None:
    if wanted:
        from autoplan.versions import __version__

        typer.echo(f"autoplan {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Options before the command."""


# -- commands ----------------------------------------------------------------------------------------------------------


@app.command()
@with_choices
def plan(
    task: TaskWords,
    pin: PinTexts = None,
    top: Annotated[int, typer.Option(help="How many plans to show, best first.", min=1, max=100)] = 3,
    by_kind: Annotated[
        bool,
        typer.Option(
            "--by-kind",
            help="The plans of --top differ in kind: each is the best with other kinds of parallelism than those "
            "before it (tensor, pipeline, context, expert, sharded parameters, offload).",
        ),
    ] = False,
    time_limit_s: TimeLimit = SCREEN_LIMIT_S,
    search: Mapping[str, Any] = CHOSEN,
    runnable: Runnable = False,
    verbose: Annotated[
        bool,
        typer.Option("--verbose", "-v", help="All figures with their evidence, more plans, the proof and its space."),
    ] = (False),
    report: ReportPath = None,
    as_json: AsJson = False,
) -> None:
    """Find the best plan that fits. Of equally fast plans it is the simplest; its certificate says what is proved."""
    from autoplan.report.answers import Shown, answer_plan

    answer_plan(
        task,
        pin,
        by_kind,
        Shown(as_json, verbose, report),
        top=top,
        runnable=runnable,
        time_limit_s=time_limit_s,
        **search,
    )


@app.command()
@with_choices
def estimate(
    task: TaskWords,
    degrees: Mapping[str, Any] = CHOSEN,
    timeline: Annotated[
        Path | None, typer.Option(help="Write the step to this file as a Chrome trace (ui.perfetto.dev).")
    ] = None,
    from_file: FromFile = None,
    format: FileFormat = None,
    runnable: Runnable = False,
    cache: Cache = SearchSettings.cache,
    report: ReportPath = None,
    as_json: AsJson = False,
) -> None:
    """Price one configuration. Exit code 3 if it does not fit the memory."""
    from autoplan.report.answers import Shown, answer_estimate

    shown = Shown(as_json, report=report)
    if (missing := answer_estimate(task, degrees, timeline, shown, runnable=runnable, cache=cache)) is not None:
        raise _stop(f"does not fit: {missing}", EXIT_NOTHING_FITS)


@app.command()
def export(
    plan_file: Annotated[Path, typer.Argument(help="What autoplan plan --json or estimate --json printed.")],
    to: Annotated[
        str,
        typer.Option(
            "--to",
            help=f"NAME or NAME@VERSION (a month YY.MM or a release) of a framework: {', '.join(target_names())}.",
        ),
    ],
    out: Annotated[Path | None, typer.Option(help="Write the file here; default: standard output.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write a plan as the input of another framework. What that input cannot say is named on stderr."""
    from autoplan.report.exports import export_command

    export_command(plan_file, to, out, as_json)


@app.command()
@partial(with_choices, may_miss=("seq_len", "global_batch_size"))
def check(
    from_file: Annotated[
        str,
        typer.Argument(metavar="FILE", help="The input of another framework; FILE.py:FUNCTION of several functions."),
    ],
    task: TaskWords,
    degrees: Mapping[str, Any] = CHOSEN,
    format: FileFormat = None,
    better: Annotated[bool, typer.Option("--better/--no-better", help="Also search for a better plan.")] = True,
    pin: PinTexts = None,
    seconds: Annotated[float, typer.Option("--seconds", help="Time limit of the search.", min=0)] = 10.0,
    out: Annotated[Path | None, typer.Option(help="Write the better plan to this file, for autoplan export.")] = None,
    search: Mapping[str, Any] = CHOSEN,
    as_json: AsJson = False,
) -> None:
    """Say whether the input of another framework is legal and fits.

    Also how long a step takes, and whether another plan is better. Exit codes: 0 legal and fits, 1 illegal or does not
    fit, 2 bad input. --pin: what a better plan must keep.
    """
    from autoplan.report.check import check_command

    if code := check_command(task, degrees, pin or (), seconds if better else None, out, as_json, search):
        raise typer.Exit(code)


@app.command("explain")
@with_choices
def explain_plan(
    task: TaskWords,
    pin: PinTexts = None,
    vs: Annotated[
        str | None,
        typer.Option("--vs", help="Compare with this instead: tp=8 (the best plan with it), or another plan file."),
    ] = None,
    only: Annotated[list[str] | None, typer.Option("--only", help="Only this choice: tp; may be repeated.")] = None,
    every_value: Annotated[
        bool, typer.Option("--every-value", help="All legal values, not only the next below and above.")
    ] = False,
    settings: Annotated[
        bool, typer.Option("--settings/--no-settings", help="Also what changes of hardware and task would gain.")
    ] = True,
    pareto: Annotated[bool, typer.Option("--pareto", help="Also the front of step time against memory.")] = False,
    seconds: Annotated[float, typer.Option("--seconds", help="Time limit of one alternative.", min=0)] = 10.0,
    time_limit_s: TimeLimit = SCREEN_LIMIT_S,
    search: Mapping[str, Any] = CHOSEN,
    runnable: Runnable = False,
    report: ReportPath = None,
    as_json: AsJson = False,
) -> None:
    """Say why this is the plan, and what other choices cost.

    Other choices are compared term by term; then come the settings that would help most. MODEL with its arguments is
    planned first; a plan file is explained as it is. Each alternative is the best plan with the other value pinned,
    found in a search of its own.
    """
    from autoplan.report.explain import explain_command
    from autoplan.report.request import read_request

    request = read_request(task, pins=pin, time_limit_s=time_limit_s, runnable=runnable, **search)
    asked = {"only": only or (), "every_value": every_value, "settings": settings, "front": pareto}
    explain_command(task, request, vs, seconds, as_json, report, **asked)


@app.command(
    help=f"""Find the best plan at every point of a sweep.

    A sweep varies hardware, task and pins. Names for --vary: nodes, devices_per_node, device, nic (Gbit/s per
    device), scaleup (GB/s), memory_gb, memory_gb_s, host_memory_gb, power (W per device), price, idle (unused
    nodes), cluster, seq_len, global_batch_size, precision, mode, and the pins: {", ".join(PINS)}.
    Values that contain commas are separated by /: stages=8,8/10,6."""
)
@with_choices
def whatif(
    task: TaskWords,
    vary: Annotated[
        list[str],
        typer.Option("--vary", help="name=8,16,32 or name=100..1600 (doubling); repeat it for combinations."),
    ],
    pin: PinTexts = None,
    time_limit_s: TimeLimit = SearchSettings.time_limit_s,
    search: Mapping[str, Any] = CHOSEN,
    runnable: Runnable = False,
    csv: CsvPath = None,
    report: ReportPath = None,
    as_json: AsJson = False,
) -> None:
    """Plan every point of a sweep."""
    from autoplan.report.answers import Shown, answer_whatif

    shown = Shown(as_json, report=report)
    how = {"time_limit_s": time_limit_s, "runnable": runnable, **search}
    _end_sweep(*answer_whatif(task, vary, pin, csv, shown, **how))


def _end_sweep(outcome: str, found: Sequence[Point], count: int) -> None:
    """Stop with the exit code of a sweep, unless a point has a plan."""
    if outcome == "interrupted":
        raise _stop(f"interrupted after {len(found)} of {count} points", EXIT_INTERRUPTED)
    if outcome == "infeasible":
        raise _stop("nothing fits at any point", EXIT_NOTHING_FITS)
    if outcome == "stopped":
        raise _stop(f"no plan was found in time at any point: {found[0].reason}", EXIT_BAD_INPUT)
    if outcome == "illegal":
        raise _stop(f"no point is legal: {found[0].reason}", EXIT_BAD_INPUT)


@app.command("fit")
@partial(with_choices, may_miss=("seq_len", "global_batch_size"), without=OF_THE_RUN)
def fit_model(
    task: TaskWords,
    pin: PinTexts = None,
    ways: Annotated[bool, typer.Option("--ways/--no-ways", help="Also what else would fit, each planned.")] = True,
    seconds: Annotated[float, typer.Option("--seconds", help="Time limit of one search.", min=0)] = 10.0,
    memory_risk: MemoryRisk = SearchSettings.memory_risk,
    cache: Cache = SearchSettings.cache,
    runnable: Runnable = False,
    as_json: AsJson = False,
) -> None:
    """Say whether a model fits, and what would make it fit.

    The answer has all terms of memory. Without --seq-len: 4,096 tokens, or as many as the model has positions. Without
    --global-batch-size: one sequence for every device. Shorter sequences, recompute, the host's memory, LoRA, QLoRA and
    more devices are tried.
    """
    from autoplan.report.fit import fit_command

    how = {"time_limit_s": seconds, "runnable": runnable, "memory_risk": memory_risk, "cache": cache}
    if code := fit_command(task, pin, ways, seconds, as_json, **how):
        raise typer.Exit(code)


@app.command("pools")
@partial(with_choices, may_miss=("cluster",), without=OF_THE_RUN)
def plan_pools(
    task: TaskWords,
    pool: Annotated[
        list[str],
        typer.Option("--pool", help="One kind of devices, as --cluster takes it: 4x8xh100; give two to four of them."),
    ],
    between: Annotated[
        float | None,
        typer.Option(
            "--between", help="Gbit/s per device between pools; default: the slower of their networks.", min=0
        ),
    ] = None,
    alone: Annotated[bool, typer.Option("--alone/--no-alone", help="Also plan each pool by itself.")] = True,
    pin: PinTexts = None,
    time_limit_s: TimeLimit = SearchSettings.time_limit_s,
    search: Mapping[str, Any] = CHOSEN,
    runnable: Runnable = False,
    as_json: AsJson = False,
) -> None:
    """Plan one run over several kinds of devices. Each pipeline stage is on one kind, with the layers it merits."""
    from autoplan.report.pools import pools_command

    how = {"time_limit_s": time_limit_s, "runnable": runnable, **search}
    pools_command(task, pool, pin, between, alone, as_json, **how)


@app.command("size")
@partial(with_choices, may_miss=("cluster",))
def size_run(
    task: TaskWords,
    deadline: Annotated[str, typer.Option("--deadline", help="Time for the run: 30d, 36h or 6w.")],
    budget: Annotated[str | None, typer.Option("--budget", help="US dollars that the run may cost: 2M.")] = None,
    devices: Annotated[
        list[str] | None,
        typer.Option(
            "--devices",
            help="Kinds of devices or cloud instances: h100,gb200,p5.48xlarge, with overrides h100@nic=800,price=2; "
            "default: that of --cluster.",
        ),
    ] = None,
    pin: PinTexts = None,
    seconds: Annotated[float, typer.Option("--seconds", help="Time limit of the search at one size.", min=0)] = 30.0,
    search: Mapping[str, Any] = CHOSEN,
    runnable: Runnable = False,
    report: ReportPath = None,
    as_json: AsJson = False,
) -> None:
    """Find the fewest and the cheapest devices that meet a deadline. The run is that of --tokens."""
    from autoplan.report.size import size_command

    if code := size_command(
        task, pin, deadline, budget, devices, seconds, as_json, report, runnable=runnable, **search
    ):
        raise typer.Exit(code)


@app.command(
    help=f"""Plan many models on many clusters.

    A row for each has step, days, money, energy and goodput. The file holds models, clusters, tokens, seq_len and
    global_batch_size (one or a list of each), and optionally precision, mode, pins, like, runnable, adapters,
    target_len, {", ".join(OPTIONS)}, profile, constants, assumptions (mtbf_device_days, pue, ...),
    {", ".join(r.name for r in OF_EVERY_COMMAND)} and time_limit_s."""
)
def capacity(
    file: Annotated[Path, typer.Argument(help="YAML: models, clusters, tokens, seq_len, global_batch_size, ...")],
    csv: CsvPath = None,
    report: ReportPath = None,
    as_json: AsJson = False,
) -> None:
    """Plan every row of a capacity file."""
    from autoplan.report.answers import Shown, answer_capacity
    from autoplan.report.request import import_from_here

    import_from_here()
    _end_sweep(*answer_capacity(file, csv, Shown(as_json, report=report)))


@app.command()
def launch(
    plan: Annotated[Path, typer.Argument(help="The file of a plan, or the folder that `autoplan compile` wrote.")],
    to: Annotated[
        str,
        typer.Option("--for", help="slurm, trainjob (Kubeflow Trainer), jobset, ray (Ray Train) or skypilot."),
    ],
    script: Annotated[str, typer.Option(help="The training script and its arguments.")] = "train.py",
    name: Annotated[str, typer.Option(help="Name of the job.")] = "autoplan",
    image: Annotated[str | None, typer.Option(help="Image for trainjob and jobset; default: PyTorch's.")] = None,
    max_restarts: Annotated[int, typer.Option(help="How often the job starts again after a failure.")] = 3,
    min_nodes: Annotated[int | None, typer.Option(help="Least number of nodes (slurm, ray); default: all.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the file here; default: standard output.")] = None,
) -> None:
    """Write the job of a plan for a cluster's scheduler. It says nodes, devices, where they meet, and restarts."""
    from autoplan.report.launch import launch_command

    settings = {"script": script, "name": name, "image": image, "max_restarts": max_restarts}
    launch_command(plan, to, out, min_nodes=min_nodes, **settings)


@app.command()
def compile(
    model: Annotated[str, typer.Argument(help="The model, as plan takes it; the one that the plan was made for.")],
    plan: Annotated[Path, typer.Argument(help="The plan: what `autoplan plan --json` or `Plan.to_json` wrote.")],
    out: Annotated[Path, typer.Option(help="Folder of the program: a module per stage, and three JSON files.")],
) -> None:
    """Write the program of every rank of a plan. `parallelize(model, program=FOLDER)` runs it; no cluster is needed."""
    from autoplan.planning import compile_command

    spec = compile_command(model, plan, out)
    typer.echo(f"{out}: {spec.model}, {len(spec.stages)} stages for {math.prod(n for _, n in spec.axes):,} ranks")


@app.command()
def rehearse(
    plan: Annotated[Path, typer.Argument(help="The file of a plan, or the folder that `autoplan compile` wrote.")],
    ranks: Annotated[str, typer.Option(help="Numbers of ranks, `last`, `random:N`, separated by commas.")] = "0,last",
    as_json: AsJson = False,
) -> None:
    """Run chosen ranks of a plan here, without weights. Exit code 2 if they differ from the plan."""
    from autoplan.rehearsal.command import rehearse_command

    if (difference := rehearse_command(plan, ranks, as_json)) is not None:
        raise _stop(difference, EXIT_BAD_INPUT)


@app.command()
def compare(
    plan: Annotated[Path, typer.Argument(help="The plan: what `autoplan plan --json` or `Plan.to_json` wrote.")],
    log: Annotated[
        Path, typer.Argument(help="Its steps: the file of `autoplan.StepLog`, or a trace of torch.profiler.")
    ],
    calibrate: Annotated[
        Path | None, typer.Option(help="Write the measured step to this file, for `autoplan calibrate`.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="The plan's model for --calibrate, as `autoplan plan` takes it.")
    ] = None,
    timeline: Annotated[
        Path | None,
        typer.Option(help="Write the predicted and the traced step to this file as one trace (ui.perfetto.dev)."),
    ] = None,
    report: ReportPath = None,
    as_json: AsJson = False,
) -> None:
    """Show a plan's prediction beside the steps that were run."""
    from autoplan.plans.record import Plan
    from autoplan.report import measured, traced
    from autoplan.report.html import check_report_path, write_report
    from autoplan.report.output import put

    check_report_path(report)
    measured.check_used(log, traced.is_trace(log), calibrate, model, timeline)
    given = Plan.read(plan)
    found = traced.compare_trace(given, log) if traced.is_trace(log) else measured.compare(given, log)
    if timeline is not None:
        traced.write_beside(plan, log, timeline)
    if report is not None:
        write_report(report, measured.comparison_data(found), {"rows": [measured.shown_row(f) for f in found.figures]})
    if calibrate is not None:
        measured.write_calibration(given, found, calibrate, model)
    put(measured.comparison_data(found), as_json, partial(measured.comparison_text, found=found))


@app.command()
def profile(
    name: Annotated[str | None, typer.Argument(help="Name of the profile; default: that of the machine.")] = None,
    processes: Annotated[int, typer.Option(help="Number of processes that measure collectives.", min=1)] = 1,
    budget: Annotated[float, typer.Option("--budget", help="Seconds to measure.", min=1)] = 300.0,
    model: Annotated[str | None, typer.Option(help="Measure the shapes of this model first.")] = None,
    out: Annotated[Path | None, typer.Option(help="File of the profile; default: in the cache folder.")] = None,
    write_cluster: Annotated[Path | None, typer.Option(help="Propose a cluster file of this hardware.")] = None,
) -> None:
    """Measure this machine, or the nodes of a torchrun job. Operations, collectives, overheads, topology, clocks."""
    from autoplan.profiler.command import profile_command
    from autoplan.report.request import import_from_here

    if model is not None and ":" in model:
        import_from_here()
    profile_command(name, processes, budget, model, out, write_cluster)


@app.command()
def calibrate(
    file: Annotated[Path, typer.Argument(help="YAML: a list of measured steps, each with its configuration and time.")],
    profile: ProfileName = None,
    constants: ConstantsFile = None,
    only: Annotated[str | None, typer.Option(help="Fit only these constants, separated by commas.")] = None,
    write: Annotated[Path | None, typer.Option(help="Write the constants to this file, for --constants.")] = None,
) -> None:
    """Fit the cost model's constants to your own training steps.

    Every step of the file has model, cluster, seq_len, global_batch_size and step_time_s, and optionally name, group,
    precision, mode, options (attention, launch, overlap, dispatcher, ...) and degrees (dp, tp, pp, ..., recompute).
    """
    from autoplan.calibration.command import calibrate_command
    from autoplan.report.request import import_from_here

    import_from_here()
    with waiting("fitting", quiet=False, hint=""):
        show = calibrate_command(file, profile, constants, only, write)
    show()


@app.command()
def models(as_json: AsJson = False) -> None:
    """List the models that ship with autoplan."""
    from autoplan.report.catalogs import models_command

    models_command(as_json)


@app.command()
def stacks(
    name: Annotated[str | None, typer.Argument(help="A name of the list; without one, all are listed.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the frameworks of --like. Of one: its settings by version, what it can do, and the sources."""
    from autoplan.report.stacks import stacks_command

    stacks_command(name, as_json)


@hw.command("list")
def hw_list(as_json: AsJson = False) -> None:
    """List all devices. FLOP/s are dense, bandwidths per device and direction."""
    from autoplan.report.catalogs import devices_command

    devices_command(as_json)


@hw.command("show")
def hw_show(
    device: Annotated[str, typer.Argument(help="A device or a cloud instance that has it.")], as_json: AsJson = False
) -> None:
    """Show everything that is known about one device, with its sources."""
    from autoplan.report.catalogs import device_command

    device_command(device, as_json)


def main() -> None:
    """Run the `autoplan` command."""
    app(prog_name="autoplan")
