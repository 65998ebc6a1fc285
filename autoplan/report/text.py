"""Reports as text for people: the answer first, warnings last, at most 110 columns, every number with its unit.

Numbers are followed by their source: exact (follows from the model and the plan), measured, fitted (to measurements of
others, or between measured points), assumed.
"""

from __future__ import annotations

import math
import os
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from autoplan.config import numbers
from autoplan.config.choices import config_label
from autoplan.config.parallel import ParallelConfig
from autoplan.config.planning import HIGH_END_RISK
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.cost_models.hardware.parts import NETWORKS
from autoplan.cost_models.quantity import Quantity
from autoplan.cost_models.time.estimate import Estimate, StageEstimate
from autoplan.cost_models.whole_run import FIGURES, Assumptions, Run
from autoplan.program.facts import layer_calls
from autoplan.program.legality import not_executed
from autoplan.report.arguments import imbalance_of
from autoplan.report.commands import estimate_command, plan_command, whatif_command, wrapped
from autoplan.report.plots import pipeline_plot, show_plot
from autoplan.report.task_text import task_line
from autoplan.search.planner import Certificate, Planned, PlanRequest, SearchResult, Status
from autoplan.sweeps.label import evidence_label, plan_label
from autoplan.sweeps.whatif import STEP_ONLY, RunTask, batch_warning, run_of

TEXT_WIDTH = 110
_MAX_STAGE_COLUMNS = 5
_MOST_EQUALS = 4  # plans named as equal
_TIGHT = 0.03  # of a device's memory: less free memory is a warning
_PROVED, _PROVED_INSIDE = 1e-6, 1e-4  # smaller gaps are rounding; the gap from the solver's tie-breaking is larger
TERMS = {  # of a step, in words
    "tp_comm": "communication inside layers",
    "cp_comm": "context-parallel communication",
    "ep_comm": "expert-parallel communication",
    "dp_comm": "data-parallel communication, exposed",
    "pp_comm": "pipeline communication, exposed",
    "bubble": "pipeline bubble",
    "recompute": "recompute",
    "offload": "copies to the host and back, not hidden",
    "launch": "waiting for the host",
    "accumulate": "adding up gradients",
    "optimizer": "optimizer",
}


def priced_only(config: ParallelConfig, request: PlanRequest) -> Iterator[str]:
    """Yield a line on what of a configuration is only priced; nothing if autoplan's own runtime executes all of it."""
    priced = not_executed(config, request.facts)
    if priced:
        yield f"autoplan's own runtime does not run this plan: {'; '.join(priced)}"


def console(stderr: bool = False) -> Console:
    """Return a console of at most TEXT_WIDTH columns, or COLUMNS; colours only on a terminal and without NO_COLOR."""
    probe = Console(stderr=stderr)
    width = min(TEXT_WIDTH, probe.width) if probe.is_terminal or os.environ.get("COLUMNS") else TEXT_WIDTH
    return Console(stderr=stderr, width=width, highlight=False, markup=False, emoji=False, soft_wrap=False)


def paragraph(out: Console, text: str, indent: int = 0, style: str = "", first: int = 0) -> None:
    """Print `text` in lines of the console's width; nothing if it is empty."""
    lines = textwrap.wrap(
        text.replace(" %", "\u00a0%"),  # no line begins with the unit
        max(40, out.width),
        initial_indent=" " * first,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    for line in lines:
        out.print(Text(line.replace("\u00a0", " "), style=style), soft_wrap=True)


def plain_table(*columns: str, left: int = 1) -> Table:
    """Return a plain table with `left` columns of text and the others of numbers."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i < left else "right", overflow="fold")
    return table


def interval(q: Quantity) -> str:
    """Return seconds with their interval: `1.70 s (1.06 to 2.72)`."""
    unit, factor = ("s", 1.0) if q.high >= 1 else ("ms", 1e3)
    low, mid, high = (numbers.digits(v * factor) for v in (q.low, q.mid, q.high))
    return f"{mid} {unit} ({low} to {high})"


def title(request: PlanRequest) -> str:
    """Return the version and the model: `autoplan 0.1.0 - gpt2 (124 M parameters, 12 layers)`."""
    from autoplan.versions import __version__

    layers = len(layer_calls(request.graph))
    model = f"{request.graph.name} ({numbers.scaled(request.graph.num_params)} parameters, {layers} layers)"
    return f"autoplan {__version__} - {model}"


def heading(out: Console, request: PlanRequest) -> None:
    """Print the model, the cluster and the task of a request."""
    out.print(Text(title(request), style="bold"), soft_wrap=True)
    for line in (f"on {cluster_line(request.cluster)}", task_line(request)):
        paragraph(out, line, 5, first=2)


def idle_text(c: Cluster) -> str:
    """Return how many devices are paid for and not used, for example `1 of 17 devices idle`."""
    return f"{c.idle_devices} of {c.paid_devices:,} devices idle"


def cluster_line(c: Cluster) -> str:
    """Return a cluster in one line, for example

    `64 x h100-sxm5-80gb (8 nodes of 8; per device and direction: scale-up 450 GB/s over 8, network 400 Gbit/s over
    64)`.
    """
    links = []
    for level in c.levels:
        speed = level.bytes_per_s
        text = f"{speed * 8 / 1e9:g} Gbit/s" if level.name in NETWORKS else f"{speed / 1e9:g} GB/s"
        links.append(f"{level.name} {text} over {level.size}")
    nodes = f"{c.num_nodes} node{'s' if c.num_nodes > 1 else ''} of {c.devices_per_node}"
    nodes += "" if c.fabric is None else f", {len(c.fabric.switches)} switches, {len(c.fabric.links)} links"
    nodes += f", {idle_text(c)}" if c.idle_nodes else ""
    return f"{c.num_devices} x {c.device.name} ({nodes}; per device and direction: {', '.join(links)})"


def _stack(request: PlanRequest) -> str:
    """Return whose settings a price assumes."""
    like = request.facts.like
    if like is None:
        return f"of PyTorch ({request.mode}) and the options given; --like NAME takes a framework's (autoplan stacks)"
    against = like.texts(request.cluster.device.name)
    return f"of {like.name}, {like.stack.about}" + (f"; given instead: {', '.join(against)}" if against else "")


def evidence(out: Console, request: PlanRequest, estimate: Estimate) -> None:
    """Print whose settings are assumed, and which numbers are measured, fitted or assumed."""
    paragraph(out, f"Settings: {_stack(request)}", 10, "dim")
    source = f"profile {request.profile.name}" if request.profile is not None else "catalog figures, no profile"
    paragraph(out, f"Evidence: {evidence_label(estimate)} ({source}; times are low to high)", 10, "dim")
    imbalance = imbalance_of(request)
    if imbalance is not None:
        paragraph(
            out,
            f"Experts: the fullest rank has {numbers.digits(imbalance['value'])} times the mean number of rows "
            f"(imbalance, one factor for all models; {imbalance['source']})",
            10,
            "dim",
        )


def _run_text(run: Run) -> str:
    text = f"{numbers.scaled(run.tokens)} tokens: {with_span(run.days, numbers.days)}"
    if run.usd is None:
        return f"{text}, no price known (cluster@price=USD per device and hour)"
    return f"{text}, {with_span(run.usd, numbers.dollars)}"


def with_span(q: Quantity, shown: Callable[[float], str]) -> str:
    """Return a quantity with its interval: `$562k ($402k to $850k)`."""
    return f"{shown(q.mid)} ({shown(q.low)} to {shown(q.high)})"


def _failures_text(run: Run) -> str:
    """Return days, cost and goodput with failures, restarts and checkpoints."""
    days, good = run.days_with_failures, run.goodput
    if days is None or good is None:
        return ""
    text = f"with failures: {with_span(days, numbers.days)}"
    if run.usd_with_failures is not None:
        text += f", {with_span(run.usd_with_failures, numbers.dollars)}"
    every = numbers.days(good.interval_s.mid / 86400)
    share = with_span(good.share, numbers.uptime)
    return f"{text}; goodput {share}, a checkpoint every {every}"


def _energy_text(run: Run) -> str:
    if run.kwh is None:
        return ""
    text = f"energy: {with_span(run.kwh, numbers.energy)}"
    if run.kwh_with_failures is not None:
        text += f", with failures {with_span(run.kwh_with_failures, numbers.energy)}"
    return text if run.usd_energy is None else f"{text}; {with_span(run.usd_energy, numbers.dollars)} of electricity"


def answer(out: Console, title: str, planned: Planned, request: PlanRequest, run: RunTask) -> None:
    """Print a plan: step, MFU, memory and the run, each with its interval."""
    e = planned.estimate
    out.print()
    out.print(Text(f" {title}  {plan_label(planned.config, e)}", style="bold green" if e.fits else "bold red"))
    peak, capacity = e.peak_memory_bytes, e.memory_capacity_bytes
    stage = max(e.stages, key=lambda s: s.memory_bytes.mid).index
    where = f" (stage {stage})" if len(e.stages) > 1 else ""
    line = (
        f" step {interval(e.step_time_s)}   {numbers.scaled(e.tokens_per_s)} tokens/s   "
        f"{numbers.scaled(e.tokens_per_s_per_device)} tokens/s per device"
    )
    out.print(Text(line), soft_wrap=True)
    paragraph(out, mfu_text(e), 2, first=1)
    over = max(0.0, peak.mid - capacity)
    verdict = f"DOES NOT FIT: {numbers.gigabytes(over)} too much" if over else "fits"
    text = (
        f" memory {peak.mid / 1e9:.1f} GB ({peak.low / 1e9:.1f} to {peak.high / 1e9:.1f}) of {capacity / 1e9:.1f} GB"
        f"{where}: {verdict}"
    )
    out.print(Text(text, style="bold red" if over else ""), soft_wrap=True)
    if any(s.host_memory for s in e.stages):
        out.print(Text(_host_text(e), style="" if e.fits_host else "bold red"), soft_wrap=True)
    for line in priced_only(planned.config, request):
        paragraph(out, line, 1, first=1)
    if (whole := run_of(e, request, run)) is not None:
        for text in (_run_text(whole), _failures_text(whole), _energy_text(whole)):
            paragraph(out, text, 1, first=1)


def mfu_text(e: Estimate) -> str:
    """Return both forms of MFU.

    `MFU 46 % (attention counted in full, as PaLM and NeMo do), 43 % (causal: half of it, as Megatron Bridge)`.
    """
    text = f"MFU {100 * e.mfu:.0f} %"
    if e.mfu_causal == e.mfu:
        return text  # no attention here is causal
    causal = f"{100 * e.mfu_causal:.0f} % (causal: half of it, as Megatron Bridge)"
    return f"{text} (attention counted in full, as PaLM and NeMo do), {causal}"


def _host_text(e: Estimate) -> str:
    host, capacity = e.peak_host_bytes, e.host_capacity_bytes
    verdict = "fits" if e.fits_host else f"DOES NOT FIT: {numbers.gigabytes(host.mid - capacity)} too much"
    of = f" of {capacity / 1e9:.1f} GB" if math.isfinite(capacity) else ""
    return f" host memory {host.mid / 1e9:.1f} GB{of} per device: {verdict}"


def grouped_stages(stages: Sequence[StageEstimate]) -> list[list[StageEstimate]]:
    """Group neighbouring stages with the same figures into one column; at most _MAX_STAGE_COLUMNS, the fullest kept."""

    def shown(s: StageEstimate) -> tuple[object, ...]:
        sizes = [f"{q.mid / 1e9:.1f}" for q in (*s.memory.values(), *s.host_memory.values())]
        return (s.num_layers, s.num_recomputed, s.in_flight, sizes)

    groups: list[list[StageEstimate]] = []
    for stage in stages:
        if groups and shown(groups[-1][-1]) == shown(stage):
            groups[-1].append(stage)
        else:
            groups.append([stage])
    if len(groups) <= _MAX_STAGE_COLUMNS:
        return groups
    fullest = max(groups, key=lambda g: g[0].memory_bytes.mid)
    wanted = {id(g): g for g in (fullest, groups[0], groups[-1], *groups[1:])}
    chosen = list(wanted)[:_MAX_STAGE_COLUMNS]
    return [g for g in groups if id(g) in chosen]


_SHOWN_BYTES = 5e6  # a term below it on every stage would be 0.00 GB


def memory_table(out: Console, e: Estimate) -> None:
    """Print the memory of every group of equal stages, by term."""
    groups = grouped_stages(e.stages)
    stages = [group[0] for group in groups]
    out.print()
    table = plain_table("memory per device, GB", *(stage_names(g, len(e.stages)) for g in groups), "evidence", left=1)
    _terms(table, "{}", [s.memory for s in stages], _SHOWN_BYTES)
    totals = [s.memory_bytes for s in stages]
    table.add_section()
    table.add_row("total", *(f"{q.mid / 1e9:.1f}" for q in totals), "")
    table.add_row("low to high", *(f"{q.low / 1e9:.1f}-{q.high / 1e9:.1f}" for q in totals), "")
    table.add_row("of the device", *(numbers.percent(q.mid / e.memory_capacity_bytes) for q in totals), "")
    _terms(table, "{} on the host", [s.host_memory for s in stages])
    table.add_row("layers", *(str(s.num_layers) for s in stages), "")
    if any(s.num_recomputed for s in e.stages):
        table.add_row("layers recomputed", *(str(s.num_recomputed) for s in stages), "")
    if len(e.stages) > 1:
        table.add_row("micro-batches in flight", *(str(s.in_flight) for s in stages), "")
    table.add_row("fullest in the", *(s.fullest for s in stages), "")
    out.print(table)
    hidden = len(e.stages) - sum(len(g) for g in groups)
    if hidden:
        out.print(Text(f"and {hidden} more stages: --json has all", style="dim"))


def stage_names(group: Sequence[StageEstimate], num_stages: int) -> str:
    """Name a group of neighbouring stages in the head of a table."""
    first, last = group[0].index, group[-1].index
    if num_stages == 1:
        return "all"
    return f"stage {first}" if first == last else f"stages {first}-{last}"


def _terms(table: Table, name: str, stages: Sequence[Mapping[str, Quantity]], least: float = 0.0) -> None:
    """Add a row for every term that has at least `least` bytes on some stage; `name` is the row's name with {}."""
    for term in dict.fromkeys(term for memory in stages for term in memory):
        found = [memory.get(term) for memory in stages]
        there = [q for q in found if q is not None]
        if any(q.high >= least for q in there):
            cells = ("" if q is None else f"{q.mid / 1e9:.2f}" for q in found)
            table.add_row(name.format(term), *cells, str(max(q.tag for q in there)))


def _breakdown(out: Console, e: Estimate) -> None:
    out.print()
    table = plain_table("step time", "seconds", "share", "low to high", "evidence", left=1)
    step = e.step_time_s
    for term, q in e.breakdown.items():
        if q.mid < 1e-4 * step.mid:
            continue
        span = f"{numbers.digits(q.low)} to {numbers.digits(q.high)}" if q.high > q.low else ""
        table.add_row(TERMS.get(term, term), numbers.digits(q.mid), numbers.percent(q.mid / step.mid), span, str(q.tag))
    table.add_section()
    table.add_row(
        "step",
        numbers.digits(step.mid),
        "100 %",
        f"{numbers.digits(step.low)} to {numbers.digits(step.high)}",
        str(step.tag),
    )
    out.print(table)
    if len(e.stages) > 1:
        show_plot(out, pipeline_plot(e.events, out.width))


def _equals(out: Console, result: SearchResult, request: PlanRequest) -> None:
    """Say which plans are as fast within the error, and why they were not taken."""
    if not result.equals:
        return
    own, fastest = result.plans[0].estimate.step_time_s.mid, result.equals[0][1]
    layers, shown = len(layer_calls(request.graph)), result.equals[:_MOST_EQUALS]
    named = "; ".join(f"{config_label(config, layers)} {numbers.digits(step)} s" for config, step in shown)
    more = f" and {len(result.equals) - len(shown)} more" if len(result.equals) > len(shown) else ""
    slower = f"{numbers.percent(own / fastest - 1)} slower than the fastest (of which the certificate speaks)"
    out.print()
    paragraph(
        out,
        f"the simplest of {len(result.equals) + 1} plans that are equal within {numbers.percent(request.equal_within)}"
        f"{f', {slower}' if fastest < own else ''}; the others: {named}{more}",
        1,
    )


def _ranking(out: Console, result: SearchResult, request: PlanRequest, run: RunTask) -> None:
    if len(result.plans) < 2:
        return
    out.print()
    heads = ["", "plan", "step s", "MFU %", "causal %", "memory GB", "tokens/s"]
    if run.tokens is not None:
        heads += ["days", "with failures", "cost"]
    table = plain_table(*heads, left=2)
    for i, p in enumerate(result.plans, 1):
        e = p.estimate
        cells = [
            str(i),
            plan_label(p.config, e),
            numbers.digits(e.step_time_s.mid),
            f"{100 * e.mfu:.0f}",
            f"{100 * e.mfu_causal:.0f}",
            f"{e.peak_memory_bytes.mid / 1e9:.1f}",
            numbers.scaled(e.tokens_per_s),
        ]
        cells += run_cells(run_of(e, request, run))
        table.add_row(*cells)
    out.print(table)


def run_cells(run: Run | None) -> list[str]:
    """Return days, days with failures, and cost (without failures); nothing without a run."""
    if run is None:
        return []
    failing = run.days_with_failures
    return [
        numbers.digits(run.days.mid),
        numbers.digits(failing.mid) if failing is not None else "-",
        numbers.dollars(run.usd.mid) if run.usd is not None else "-",
    ]


def _title(c: Certificate) -> str:
    if c.stopped_far:
        return "BEST KNOWN, not proved:"
    return f"WITHIN {numbers.percent(c.gap)} OF THE BEST:" if c.status == Status.NEAR and c.gap > _PROVED else "BEST"


def proof_text(gap: float, intra_gap: float) -> str:
    """Say in words what a certificate proves. Both gaps are (found - bound) / found."""
    if gap >= 1:
        proof = "no bound on the best of this space"
    elif gap > _PROVED:
        proof = f"the best step of this space is at most {numbers.percent(gap)} shorter"
    else:
        proof = "the best of this space"
    if intra_gap >= 1:
        return f"{proof}, no bound on the layouts inside layers"
    if intra_gap > _PROVED_INSIDE:
        return f"{proof}, layouts inside layers at most {numbers.percent(intra_gap)} shorter"
    return proof


def proof_of(c: Certificate) -> str:
    """Say in words what a search proved, and how it ended if it was not complete."""
    return f"{proof_text(c.gap, c.intra_gap)}, at these prices{'' if c.status == 'complete' else f' ({c.status})'}"


def certificate_text(out: Console, c: Certificate) -> None:
    """Print the certificate and the space."""
    out.print()
    undecided = f", {c.open:,} left open" if c.open else ""
    paragraph(
        out,
        f"{c.considered:,} candidates: {c.illegal:,} illegal, {c.too_big:,} too big, {c.bounded_out:,} bounded out, "
        f"{c.solved:,} solved{undecided} in {c.solve_time_s:.1f} s: {proof_of(c)}",
        1,
    )
    for what, counts in (("illegal", c.illegal_by_rule), ("too big", c.too_big_by_term)):
        if counts:
            listed = ", ".join(f"{name} {count:,}" for name, count in sorted(counts.items(), key=lambda kv: -kv[1]))
            paragraph(out, f"{what}: {listed}", 2, "dim")
    phases = ", ".join(f"{name} {s:.1f} s" for name, s in sorted(c.by_phase_s.items(), key=lambda kv: -kv[1]))
    paragraph(out, f"time: {phases}", 2, "dim")
    paragraph(out, f"the space: {'; '.join(c.restrictions)}", 2, "dim")


def notes_of(e: Estimate, request: PlanRequest, run: RunTask) -> list[str]:
    """Return sentences on surprises in a plan: tight memory, unverified figures, unusual batches."""
    peak, capacity = e.peak_memory_bytes, e.memory_capacity_bytes
    found = task_notes([request])
    if e.fits and peak.high > capacity:
        found.append(
            f"memory may reach {peak.high / 1e9:.1f} GB of {capacity / 1e9:.1f} GB; autoplan plan keeps within it "
            f"unless --memory-risk is above {HIGH_END_RISK}"
        )
    elif e.fits and capacity - peak.mid < _TIGHT * capacity:
        found.append(f"memory is tight: {numbers.gigabytes(capacity - peak.mid)} left")
    found += figure_notes(e, request)
    whole, warning = run_of(e, request, run), batch_warning(request, run.tokens)
    found += whole.notes if whole is not None else ()
    found += [warning] if warning is not None else []
    return found


def figure_notes(e: Estimate, request: PlanRequest) -> list[str]:
    """Return sentences on figures of the hardware that no source confirms and that a plan depends on."""
    found = []
    assumed_host = request.cluster.device.host_memory_bytes is None and math.isfinite(e.host_capacity_bytes)
    if assumed_host and any(s.host_memory for s in e.stages):
        found.append(
            f"{e.host_capacity_bytes / 1e9:.0f} GB of host memory per device are assumed, not verified; "
            "to change: @host_memory_gb=..."
        )
    if request.cluster.unverified:
        found.append(
            f"no source confirms these catalog fields of {request.cluster.device.name}: "
            f"{', '.join(request.cluster.unverified)}"
        )
    return found


def say_warnings(out: Console, e: Estimate, request: PlanRequest, run: RunTask) -> None:
    """Print what a reader of an estimate must know besides its figures."""
    for text in notes_of(e, request, run):
        paragraph(out, f"Note: {text}", 6, "yellow")


def task_notes(requests: Sequence[PlanRequest]) -> list[str]:
    """Return the notes of tasks (`Facts.notes`), each after the name of the model."""
    return list(dict.fromkeys(f"{r.graph.name}: {note}" for r in requests for note in r.facts.notes))


def assumptions_text(known: Assumptions) -> str:
    """Return the known assumptions: `mtbf_device_days 2,112 (567 to 3,419), ..., pue 1.1 (given)`."""
    parts = []
    for name in FIGURES:
        q = known.get(name)
        if q is not None:
            span = "given" if name in known.given else f"{numbers.digits(q.low)} to {numbers.digits(q.high)}"
            parts.append(f"{name} {numbers.digits(q.mid)} ({span})")
    return ", ".join(parts)


_PLAIN_RUN = "days and cost are without failures unless stated otherwise, and"


def prices(out: Console, requests: Sequence[PlanRequest], run: RunTask, of: str = _PLAIN_RUN) -> None:
    """Print the prices and the assumptions about the run. `of`: what never includes idle time, and more about it."""
    if run.tokens is None:
        return
    lines = []
    for request in requests:
        price = request.cluster.price
        if price is None or price.source == "given":
            continue
        name = request.cluster.device.name
        text = f"Price: {name} ${price.usd_per_device_hour:g} per device and hour, {price.source}"
        lines.append(text if price.as_of in price.source else f"{text}, {price.dated}")
    for text in dict.fromkeys(lines):
        paragraph(out, text, 7, "dim")
    paragraph(
        out,
        f"Run: {of} never include idle time. Assumed (sources: --json; to change: --assume NAME=VALUE): "
        f"{assumptions_text(run.assumptions)}",
        5,
        "dim",
    )


def varied_text(request: PlanRequest) -> str:
    """Return a variation to propose for `whatif`: `nodes=8..32`, or the memory if a fabric fixes the devices."""
    nodes, memory_gb = request.cluster.num_nodes, round(request.cluster.device.memory_bytes / 1e9)
    fixed = request.cluster.fabric is not None
    return f"memory_gb={memory_gb},{2 * memory_gb}" if fixed else f"nodes={nodes}..{4 * nodes}"


def next_commands(out: Console, commands: Sequence[Sequence[str]]) -> None:
    """Print command lines that go on from an answer, broken with backslashes so that they can be copied."""
    out.print()
    for i, command in enumerate(commands):
        for j, line in enumerate(wrapped(command, out.width - 12)):
            lead = "Next: " if i == j == 0 else "      " if j == 0 else "          "
            out.print(Text(lead + line, style="cyan"), soft_wrap=True)


def plan_text(
    out: Console,
    model: str,
    cluster: str,
    request: PlanRequest,
    result: SearchResult,
    run: RunTask = STEP_ONLY,
    whole: str = "",
) -> None:
    """Print the answer of `autoplan plan --verbose`: every figure with its evidence, and the proof.

    Args:
        whole: the words for all nodes, where the plan leaves some idle; "": as `cluster`.
    """
    best = result.plans[0]
    heading(out, request)
    evidence(out, request, best.estimate)
    answer(out, _title(result.certificate), best, request, run)
    memory_table(out, best.estimate)
    _breakdown(out, best.estimate)
    _ranking(out, result, request, run)
    _equals(out, result, request)
    certificate_text(out, result.certificate)
    prices(out, [request], run)
    say_warnings(out, best.estimate, request, run)
    next_commands(
        out,
        [
            estimate_command(model, cluster, request, best.config, run),
            whatif_command(model, whole or cluster, request, varied_text(request), run),
        ],
    )


def estimate_text(
    out: Console,
    model: str,
    cluster: str,
    request: PlanRequest,
    planned: Planned,
    run: RunTask = STEP_ONLY,
) -> None:
    """Print the answer of `autoplan estimate`."""
    heading(out, request)
    evidence(out, request, planned.estimate)
    answer(out, "PLAN", planned, request, run)
    memory_table(out, planned.estimate)
    _breakdown(out, planned.estimate)
    prices(out, [request], run)
    say_warnings(out, planned.estimate, request, run)
    next_commands(out, [plan_command(model, cluster, request, run)])
