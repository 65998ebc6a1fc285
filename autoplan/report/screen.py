"""The first screen of `autoplan plan`: the answer in 80 columns. The rest is behind --verbose and other commands.

Verdict, the plan in words, time, memory of every stage, days and money, other plans as good, what would help most, and
the commands that go on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.text import Text

from autoplan.config import numbers
from autoplan.config.choices import config_label
from autoplan.config.parallel import ParallelConfig
from autoplan.config.recompute import layers_by_choice, layers_text, recompute_kind
from autoplan.cost_models.time.estimate import Estimate
from autoplan.program.facts import layer_calls
from autoplan.report.commands import estimate_command, explain_words, whatif_command
from autoplan.report.task_text import batch_text, settings_text
from autoplan.report.text import (
    TERMS,
    grouped_stages,
    idle_text,
    interval,
    next_commands,
    notes_of,
    paragraph,
    priced_only,
    stage_names,
    title,
    varied_text,
    with_span,
)
from autoplan.report.words import value_text
from autoplan.search.planner import Certificate, Planned, PlanRequest, SearchResult, Status
from autoplan.sweeps.explain import Setting
from autoplan.sweeps.label import plan_label
from autoplan.sweeps.whatif import STEP_ONLY, RunTask, run_of

_LABEL = 9  # columns of the words before a line
_MOST_OTHERS = 2
_AS_GOOD = 1.1  # times the step: errors that all plans share do not make a slower one as good
_MOST_HELP = 3
_MOST_NOTES = 2
_PROVED = 1e-6  # smaller gaps are rounding
_SAYS_LITTLE = 0.5  # a larger gap is that of the bound, not of the plan
_LEAST_SHARE = 0.005  # of a step: smaller terms are left out
_ZERO = (
    "",
    "optimizer state sharded (ZeRO 1)",
    "gradients and optimizer state sharded (ZeRO 2)",
    "parameters, gradients and optimizer state sharded (ZeRO 3)",
)


@dataclass(frozen=True)
class Answer:
    """The contents of a first screen.

    Attributes:
        model, cluster: the words of the command for them.
        whole: those for all nodes, where the plan leaves some idle; "": as `cluster`.
        usual: arguments that were not given, and were taken from the model's usual run.
        run: the whole run, or the usual one of the model; `usual_tokens`: that it is the usual one.
        gains: what other hardware or settings gain with the same plan, best first.
    """

    model: str
    cluster: str
    request: PlanRequest
    result: SearchResult
    run: RunTask = STEP_ONLY
    usual: Sequence[str] = ()
    usual_tokens: bool = False
    gains: Sequence[Setting] = field(default=())
    whole: str = ""

    @property
    def best(self) -> Planned:
        """The chosen plan."""
        return self.result.plans[0]


def first_screen(out: Console, a: Answer) -> None:
    """Print the answer on one screen."""
    e = a.best.estimate
    _task(out, a)
    out.print()
    paragraph(out, f"FITS  {plan_label(a.best.config, e)}", 6, "bold green")
    paragraph(out, words_of_plan(a.best.config, len(layer_calls(a.request.graph))), 6, first=6)
    paragraph(out, verdict(a.result.certificate, a.result), 6, first=6)
    for line in priced_only(a.best.config, a.request):
        paragraph(out, line, 6, first=6)
    out.print()
    for name, text in _figures(a):
        paragraph(out, f"{name:{_LABEL}}{text}", _LABEL)
    _memory(out, e)
    for name, lines in (("as good", list(_others(a))), ("helps", list(_helps(a)))):
        for k, text in enumerate(lines):
            paragraph(out, f"{name if not k else '':{_LABEL}}{text}", _LABEL + 2)
    _notes(out, a)
    next_commands(out, _commands(a))


def _task(out: Console, a: Answer) -> None:
    """Print the model, the cluster and the task; what was not given is said to be usual."""
    r = a.request
    out.print(Text(title(r), style="bold"), soft_wrap=True)
    usual = " (usual for this model)" if a.usual else ""
    c = r.cluster
    idle = f" ({idle_text(c)})" if c.idle_nodes else ""
    paragraph(
        out,
        f"{c.num_devices} x {c.device.name}{idle}, {batch_text(r)}{usual}, {settings_text(r)}",
        2,
        first=2,
    )


def words_of_plan(config: ParallelConfig, layers: int) -> str:
    """Return a plan in words: `tensor parallel over 8 devices, 4 pipeline stages, 2 replicas, ...`."""
    c = config
    words = [f"tensor parallel over {c.tp} devices"] if c.tp > 1 else []
    words += [f"sequences cut over {c.cp}"] if c.cp > 1 else []
    words += [f"{c.pp} pipeline stages"] if c.pp > 1 else []
    if c.virtual_stages > 1:
        words[-1] += f" of {c.virtual_stages} parts each"
    if c.pp > 1:
        words[-1] += f" ({c.schedule})"
    words += [f"{c.dp} replicas" if c.zero_stage < 3 else f"data parallel over {c.dp}"] if c.dp > 1 else []
    words += [f"experts spread over {c.ep}"] if c.ep > 1 else []
    words += [_ZERO[c.zero_stage]] if c.dp * c.cp > 1 and c.zero_stage else []
    plural = "es" if c.num_micro_batches > 1 else ""
    words.append(f"{c.num_micro_batches} micro-batch{plural} of {c.micro_batch_size} per replica")
    words += _backward_words(c, layers)
    words += [f"on the host: {', '.join(c.offload)}"] if c.offload else []
    return "; ".join(words)


def _backward_words(c: ParallelConfig, layers: int) -> Iterator[str]:
    """Yield which layers are recomputed, and which send what the backward needs to the host."""
    choices = layers_by_choice(c.recompute)
    on_host = [how for how in choices if recompute_kind(how).on_host]
    again = ", ".join(
        f"{how} {layers_text(n, layers)}" if n else how for how, n in choices.items() if how not in on_host
    )
    if again:
        yield f"recompute {again} layers" if any(choices.values()) else f"recompute {again}"
    for how in on_host:
        of = f" of {layers_text(choices[how], layers)} layers" if choices[how] else ""
        yield f"activations{of} on the host"


def verdict(c: Certificate, result: SearchResult) -> str:
    """Say how good the plan is. A bound that says little is a weakness of the bound, and is told as one."""
    own, fastest = result.plans[0].estimate.step_time_s.mid, result.fastest_s
    simplest = ""
    if result.equals:
        slower = f", {numbers.percent(own / fastest - 1)} slower than the fastest" if fastest < own else ""
        simplest = f"; the simplest of {len(result.equals) + 1} equally fast ones{slower}"
    among = f"the best of {c.considered:,} candidates"
    if c.gap <= _PROVED:
        return f"proved {among}{simplest}"
    if c.status == Status.NEAR:
        return f"proved to be within {numbers.percent(c.gap)} of {among}{simplest}"
    undecided = f", {c.open:,} undecided" if c.open else ""
    found = f"the best found among {c.considered:,} candidates{undecided} ({c.status}){simplest}"
    if c.gap >= _SAYS_LITTLE:
        return f"{found}; the bounds of this search do not say how close it is to the best"
    return f"{found}; at most {numbers.percent(c.gap)} of the step could be saved"


def _figures(a: Answer) -> Iterator[tuple[str, str]]:
    """Yield step, MFU, terms of the step, and the whole run, each with the word before it."""
    e = a.best.estimate
    speed = f"{numbers.scaled(e.tokens_per_s)} tokens/s, {numbers.scaled(e.tokens_per_s_per_device)} per device"
    yield "step", f"{interval(e.step_time_s)}   {speed}"
    yield "MFU", _mfu(e)
    step = e.step_time_s.mid
    terms = sorted(e.breakdown.items(), key=lambda item: -item[1].mid)
    shares = [f"{TERMS.get(n, n)} {numbers.percent(q.mid / step)}" for n, q in terms if q.mid >= _LEAST_SHARE * step]
    yield "time", "; ".join(shares)
    run = run_of(e, a.request, a.run)
    if run is None:
        yield "run", "no usual number of tokens is known; --tokens 300B adds days and money"
        return
    usual = " (usual)" if a.usual_tokens else ""
    text = f"{numbers.scaled(run.tokens)} tokens{usual}: {with_span(run.days, numbers.days)}"
    text += f", {with_span(run.usd, numbers.dollars)}" if run.usd is not None else ", no price known (@price=2.5)"
    if run.days_with_failures is not None:
        usd = "" if run.usd_with_failures is None else f", {numbers.dollars(run.usd_with_failures.mid)}"
        text += f"; with failures {numbers.days(run.days_with_failures.mid)}{usd}"
    price = a.request.cluster.price
    if price is not None:
        of = "given" if price.source == "given" else price.dated
        text += f" (${price.usd_per_device_hour:g} per device and hour, {of})"
    yield "run", text


def _mfu(e: Estimate) -> str:
    text = f"{100 * e.mfu:.0f} %"
    if e.mfu_causal != e.mfu:
        text += f" (attention in full, as PaLM), {100 * e.mfu_causal:.0f} % (causal, as Megatron Bridge)"
    return text


def _memory(out: Console, e: Estimate) -> None:
    """Print a bar for every group of equal stages: `#` the expected need, `-` up to its high end, `|` the limit."""
    capacity = e.memory_capacity_bytes
    groups = grouped_stages(e.stages)
    names = [stage_names(g, len(e.stages)) for g in groups]
    width = max(map(len, names))
    bar = max(16, min(40, out.width - _LABEL - width - 32))
    for k, (group, name) in enumerate(zip(groups, names, strict=True)):
        q = group[0].memory_bytes
        need, high = (min(bar, round(bar * size / capacity)) for size in (q.mid, q.high))
        drawn = "#" * need + "-" * (high - need) + " " * (bar - high)
        lead = f"{'memory' if not k else '':{_LABEL}}{name:{width}}"
        text = f"{lead} [{drawn}|] {q.mid / 1e9:.1f} of {capacity / 1e9:.1f} GB"
        out.print(Text(text, style="yellow" if q.high > capacity else ""), soft_wrap=True)
    hidden = len(e.stages) - sum(map(len, groups))
    if hidden:
        out.print(Text(f"{'':{_LABEL}}and {hidden} more stages (--verbose)", style="dim"), soft_wrap=True)


def _others(a: Answer) -> Iterator[str]:
    """Yield the plans next to the best whose step is within its interval."""
    own, layers = a.best.estimate.step_time_s, len(layer_calls(a.request.graph))
    found: list[tuple[ParallelConfig, float, Estimate | None]] = [
        (p.config, p.estimate.step_time_s.mid, p.estimate) for p in a.result.plans[1:]
    ]
    known = [config for config, _, _ in found]
    found += [(config, step_s, None) for config, step_s in a.result.equals if config not in known]
    most = min(own.high, _AS_GOOD * own.mid)
    near = [pair for pair in found if own.low <= pair[1] <= most][:_MOST_OTHERS]
    for config, step_s, estimate in near:
        memory = "" if estimate is None else f", {estimate.peak_memory_bytes.mid / 1e9:.1f} GB"
        label = plan_label(config, estimate) if estimate is not None else config_label(config, layers)
        shown = f"{numbers.digits(step_s)} s" if own.high >= 1 else f"{numbers.digits(1e3 * step_s)} ms"  # as the step
        yield f"{label}: {shown}{memory}"
    if not near:
        yield "no other plan that was found is within the error of this one"


def _helps(a: Answer) -> Iterator[str]:
    """Yield what gains most with the same plan."""
    for s in a.gains[:_MOST_HELP]:
        yield f"{s.what} {value_text(s.own)} -> {value_text(s.value)}: {100 * s.best_gain:+.1f} % tokens/s"


def _notes(out: Console, a: Answer) -> None:
    notes = notes_of(a.best.estimate, a.request, a.run)
    for text in notes[:_MOST_NOTES]:
        paragraph(out, f"{'note':{_LABEL}}{text}", _LABEL, "yellow")
    if len(notes) > _MOST_NOTES:
        more = len(notes) - _MOST_NOTES
        paragraph(out, f"{'':{_LABEL}}{more} more note{'s' if more > 1 else ''}: --verbose", _LABEL, "yellow")


def _commands(a: Answer) -> list[list[str]]:
    """Return the commands that go on: the same plan in detail, why it is the best, and on more devices."""
    run = STEP_ONLY if a.usual_tokens else a.run
    return [
        estimate_command(a.model, a.cluster, a.request, a.best.config, run),
        explain_words(a.model, a.cluster, a.request, run),
        whatif_command(a.model, a.whole or a.cluster, a.request, varied_text(a.request), run),
    ]
