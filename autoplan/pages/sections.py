"""The sections of a report: each is declared once, with the part of an answer that it needs.

A section is made from a JSON answer (autoplan.report.data) alone; under `drawn` the answer has what only a report shows
(autoplan.report.drawn). A maker returns no blocks where the answer has nothing for it, and the section is left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autoplan.config import numbers
from autoplan.pages import figures
from autoplan.pages.blocks import CodeBlock, Fact, FactsBlock, FigureBlock, PageBlock, Section, TableBlock, WordsBlock

_Answer = Mapping[str, Any]
_VALUES = {"step_time_s": "step, s", "tokens_per_s": "tokens/s", "days": "days", "usd": "US dollars"}  # of sweeps
_ROW_HEIGHT = 26  # pixels of a row in a figure


@dataclass(frozen=True)
class _Part:
    """A section of all reports: its title, what it says about itself, and its maker."""

    title: str
    make: Callable[[_Answer], Iterator[PageBlock]]
    about: str = ""


def sections(answer: _Answer) -> list[Section]:
    """Return the sections that an answer fills, in their order."""
    found = [Section(p.title, tuple(p.make(answer)), p.about, p.title.lower().replace(" ", "-")) for p in PARTS]
    return [section for section in found if section.blocks]


def _drawn(answer: _Answer, name: str) -> Any:
    return answer.get("drawn", {}).get(name)


def _span(q: Mapping[str, Any], shown: Callable[[float], str]) -> str:
    return f"{shown(q['low'])} to {shown(q['high'])}"


# -- the answer --------------------------------------------------------------------------------------------------------


def _verdict(answer: _Answer) -> Iterator[PageBlock]:
    said = _drawn(answer, "verdict")
    if said:
        good = _drawn(answer, "good")
        good = answer.get("estimate", {}).get("fits", True) if good is None else good
        yield WordsBlock(said, "good" if good else "bad")
    answers = _drawn(answer, "answers")
    if answers and answers["rows"]:
        yield TableBlock(answers["heads"], answers["rows"], left=len(answers["heads"]))
    estimate = answer.get("estimate")
    if estimate is None:
        return
    step, peak = estimate["step_time_s"], max((s["memory_bytes"] for s in estimate["stages"]), key=lambda q: q["mid"])
    capacity = estimate["memory_capacity_bytes"]
    facts = [
        Fact("step", f"{numbers.digits(step['mid'])} s", _span(step, numbers.digits)),
        Fact(
            "tokens per second",
            numbers.scaled(estimate["tokens_per_s"]),
            f"{numbers.scaled(estimate['tokens_per_s_per_device'])} per device",
        ),
        Fact("MFU", f"{100 * estimate['mfu']:.0f} %", f"causal {100 * estimate['mfu_causal']:.0f} %"),
        Fact("memory", numbers.gigabytes(peak["mid"]), f"of {numbers.gigabytes(capacity)}, fullest stage"),
    ]
    run = estimate.get("run") or _drawn(answer, "usual_run")
    if run is not None:
        facts.append(
            Fact(
                f"{numbers.scaled(run['tokens'])} tokens",
                numbers.days(run["days"]["mid"]),
                _span(run["days"], numbers.days),
            )
        )
        if run["usd"] is not None:
            facts.append(Fact("money", numbers.dollars(run["usd"]["mid"]), _span(run["usd"], numbers.dollars)))
        if run["kwh"] is not None:
            facts.append(Fact("energy", numbers.energy(run["kwh"]["mid"]), _span(run["kwh"], numbers.energy)))
        if run["goodput"] is not None:
            share = run["goodput"]["share"]
            facts.append(Fact("goodput", numbers.uptime(share["mid"]), "failures and checkpoints"))
    yield FactsBlock(facts)


def _plan(answer: _Answer) -> Iterator[PageBlock]:
    if _drawn(answer, "label"):
        yield WordsBlock(_drawn(answer, "label"), "plan")
        yield WordsBlock(_drawn(answer, "words"))
    for note in _drawn(answer, "notes") or ():
        yield WordsBlock(f"Note: {note}", "note")
    for title, command in _drawn(answer, "commands") or ():
        yield CodeBlock(title, command)


def _mesh(answer: _Answer) -> Iterator[PageBlock]:
    drawn = _drawn(answer, "mesh")
    if not drawn:
        return
    rows = -(-min(drawn["num_devices"], 4096) // drawn["devices_per_node"])
    yield FigureBlock("Ranks on nodes", figures.mesh(drawn), max(190, min(1200, 110 + 26 * rows)))
    if drawn["num_devices"] > 4096:
        yield WordsBlock(f"The first 4,096 of {drawn['num_devices']:,} ranks are drawn.")
    heads = ("group", "ranks", "apart", "its collectives run over")
    found = [(g["name"], str(g["size"]), str(g["stride"]), g["link"]) for g in drawn["groups"]]
    yield TableBlock(
        heads,
        found,
        ends_in_words=True,
        note="Apart: the difference between the numbers of neighbouring ranks of a group.",
    )


def _memory(answer: _Answer) -> Iterator[PageBlock]:
    estimate = answer.get("estimate")
    if not estimate:
        return
    stages = estimate["memory_bytes"]
    yield FigureBlock("Memory of every stage by term", figures.memory(estimate), 190 + _ROW_HEIGHT * len(stages))
    shown = stages[:16]
    terms = dict.fromkeys(term for stage in shown for term in stage)
    rows = []
    for term in terms:
        cells = [f"{stage[term]['mid'] / 1e9:.2f}" if term in stage else "" for stage in shown]
        rows.append((term, *cells, max(stage[term]["evidence"] for stage in shown if term in stage)))
    heads = ("GB", *(f"stage {k}" if len(stages) > 1 else "all" for k in range(len(shown))), "evidence")
    yield TableBlock(
        heads,
        rows,
        ends_in_words=True,
        note="" if len(shown) == len(stages) else f"The first 16 of {len(stages)} stages.",
        cards=False,
    )


def _step(answer: _Answer) -> Iterator[PageBlock]:
    estimate = answer.get("estimate")
    if not estimate:
        return
    words = answer.get("drawn", {}).get("terms", {})
    count = len(figures.terms_of(estimate))
    yield FigureBlock("The step of the busiest rank, term by term", figures.step(estimate, words), 130 + 32 * count)


def _timeline(answer: _Answer) -> Iterator[PageBlock]:
    events = _drawn(answer, "events")
    if not events:
        return
    ranks = len({e[0] for e in events})
    yield FigureBlock("The pipeline of one step", figures.timeline(events), min(900, 190 + 30 * ranks))
    menu = "; the menu shows one rank or all" if ranks > 1 else ""
    yield WordsBlock(f"Drag to zoom, double-click to see the whole{menu}.")


def _candidates(answer: _Answer) -> Iterator[PageBlock]:
    found = _drawn(answer, "candidates")
    if not found:
        return
    limit = answer["estimate"]["memory_capacity_bytes"]
    yield FigureBlock("Plans by time and memory", figures.candidates(found, limit), 420)
    heads = ("plan", "step s", "GB", "why it was not taken")
    rows = [
        (
            c["label"],
            "" if c["step_s"] is None else numbers.digits(c["step_s"]),
            "" if c["memory_bytes"] is None else f"{c['memory_bytes'] / 1e9:.1f}",
            c["why"],
        )
        for c in found
    ]
    yield TableBlock(heads, rows, ends_in_words=True)


def _sensitivity(answer: _Answer) -> Iterator[PageBlock]:
    gains, tornado = _drawn(answer, "gains"), _drawn(answer, "tornado")
    if gains:
        yield FigureBlock(
            "What would help most, with the same plan", figures.gains(gains), 110 + 30 * min(12, len(gains))
        )
    if tornado:
        yield FigureBlock(
            "Cost of the tokens if a figure is 20 % off", figures.tornado(tornado), 150 + 30 * len(tornado)
        )


# -- sweeps ------------------------------------------------------------------------------------------------------------


def _sweep(answer: _Answer) -> Iterator[PageBlock]:
    rows = answer.get("rows") if answer.get("command") in ("whatif", "capacity") else None
    if not rows:
        return
    varied = list(answer["vary"]) if "vary" in answer else ["model", "cluster"]
    several = [name for name in varied if len({str(row[name]) for row in rows}) > 1] or varied[:1]
    shown = [name for name in _VALUES if any(row.get(name) is not None for row in rows)]
    yield from (_sweep_figure(rows, several, value) for value in shown)
    yield from _sweep_tables(rows, varied)


def _sweep_tables(rows: Sequence[Mapping[str, Any]], varied: Sequence[str]) -> Iterator[TableBlock]:
    """Yield the rows of a sweep as a table; where they have whole runs, as two."""
    stated = ["status"] if any(row["status"] != "ok" for row in rows) else []
    used = {head: of for head, of in _CELLS.items() if any(of(row) for row in rows)}
    found = [
        (
            *(numbers.plain_number(row[n]) for n in varied),
            *(str(row[n]) for n in stated),
            *(of(row) for of in used.values()),
            str(row.get("plan") or row.get("reason") or ""),
        )
        for row in rows
    ]
    left = len(varied) + len(stated)
    heads = (*varied, *stated, *used, "plan")
    if "days" in used:  # too wide for one table
        cut = left + sum(name not in _BESIDE_THE_PLAN for name in used)
        yield TableBlock(heads[:cut], [row[:cut] for row in found], left=left, names=True, note=_COST_WORDS)
        heads, found = (*heads[:left], *heads[cut:]), [(*row[:left], *row[cut:]) for row in found]
    yield TableBlock(heads, found, left=left, ends_in_words=True, note=_PLAN_WORDS, names=True)


def _sweep_figure(rows: Sequence[Mapping[str, Any]], varied: Sequence[str], value: str) -> FigureBlock:
    """Return one column of a sweep as a heatmap over the first two things that were varied, or as a curve over one."""
    title = _VALUES[value]
    if len(varied) < 2:
        return FigureBlock(title, figures.curve(rows, varied[0], value, title, *_ends(value)), 320)
    height = 170 + 34 * len({str(row[varied[0]]) for row in rows})
    return FigureBlock(title, figures.heatmap(rows, varied[1], varied[0], value, title), height)


def _shown(name: str, form: Callable[[float], str] = numbers.digits) -> Callable[[Mapping[str, Any]], str]:
    """Return what writes a value of a row; "" where it is not known."""
    return lambda row: "" if row.get(name) is None else form(row[name])


def _step_span(row: Mapping[str, Any]) -> str:
    ends = [row.get(name) for name in _ends("step_time_s")]
    return "" if None in ends else " to ".join(numbers.digits(end) for end in ends if end is not None)


_CELLS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {  # columns of a sweep's table; empty ones are left out
    "step, s": _shown("step_time_s"),
    "low to high": _step_span,
    "tokens/s": _shown("tokens_per_s", numbers.scaled),
    "days": _shown("days"),
    "with failures": _shown("days_with_failures"),
    "cost": _shown("usd", numbers.dollars),
    "energy": _shown("kwh", numbers.energy),
    "goodput": _shown("goodput", numbers.uptime),
    "GB left": _shown("memory_margin_bytes", lambda size: f"{size / 1e9:.1f}"),
}
_BESIDE_THE_PLAN = ("energy", "goodput", "GB left")  # in the second table of a sweep over whole runs
_PLAN_WORDS = (
    "A plan: dp, tp, pp, cp, ep are the degrees of data, tensor, pipeline, context and expert parallelism, zero is the "
    "ZeRO stage, vpp the stages per rank; mbs1 x32 are 32 micro-batches of 1 sequence; recompute full 60/80 is that of "
    "60 of 80 layers."
)
_COST_WORDS = "Days and cost are without failures and idle time, if the column does not say otherwise."


def _ends(value: str) -> tuple[str, str]:
    """Return the columns of the low and the high end of a value of a sweep."""
    return {"step_time_s": ("step_time_low_s", "step_time_high_s"), "tokens_per_s": ("", "")}.get(
        value, (f"{value}_low", f"{value}_high")
    )


def _sizes(answer: _Answer) -> Iterator[PageBlock]:
    if answer.get("command") != "size":
        return
    rows, days, usd = answer["rows"], answer["deadline_days"], answer["budget_usd"]
    facts = []
    for name in ("fewest", "cheapest"):
        found = answer[name]
        if found is not None:
            money = "" if found["usd"] is None else numbers.dollars(found["usd"])
            devices = f"{found['num_devices']:,} x {found['kind']}"
            facts.append(Fact(f"{name} in time", devices, f"{numbers.days(found['days'])}, {money}"))
    yield FactsBlock(facts) if facts else WordsBlock("Nothing that was tried meets the deadline and the budget.", "bad")
    yield FigureBlock("Cost against days", figures.sizes(rows, days, usd), 400)
    points = _drawn(answer, "points") or [{"span": "", "plan": ""}] * len(rows)
    heads = ("kind", "devices", "days", "low to high", "cost", "MFU %", "meets", "plan")
    yield TableBlock(
        heads,
        [
            (
                row["kind"],
                f"{row['num_devices']:,}" if row["num_devices"] is not None else "",
                "" if row["days"] is None else numbers.digits(row["days"]),
                point["span"],
                "" if row["usd"] is None else numbers.dollars(row["usd"]),
                "" if row["mfu"] is None else f"{100 * row['mfu']:.0f}",
                "yes" if row["meets"] else "no",
                point["plan"],
            )
            for row, point in zip(rows, points, strict=True)
        ],
        ends_in_words=True,
        names=True,
        note=f"Days and cost are with failures and checkpoints where they are known. {_PLAN_WORDS}",
    )


# -- explanations ------------------------------------------------------------------------------------------------------


def _decisions(answer: _Answer) -> Iterator[PageBlock]:
    rows = [
        (d["name"], _value(d["value"]), _value(a["value"]), _cost(a), a["sentence"])
        for d in answer.get("decisions", ())
        for a in d["alternatives"]
    ]
    if rows:
        yield TableBlock(("choice", "now", "instead", "step", "what changes"), rows, left=3, ends_in_words=True)


def _value(value: Any) -> str:
    return value if isinstance(value, str) else "none" if value is None or value == [] else json.dumps(value)


def _cost(a: Mapping[str, Any]) -> str:
    return a["status"] if a["cost"] is None else _percent(a["cost"])


def _percent(share: float) -> str:
    return f"{100 * share:+.1f} %"


def _settings(answer: _Answer) -> Iterator[PageBlock]:
    found = _drawn(answer, "gains") if answer.get("settings") else None
    if found:
        yield FigureBlock(
            "What other hardware and settings would gain", figures.gains(found), 110 + 30 * min(12, len(found))
        )
        yield WordsBlock("Each is planned anew where that gains more than the same plan.")


def _front(answer: _Answer) -> Iterator[PageBlock]:
    front = answer.get("front")
    if not front:
        return
    labels = _drawn(answer, "front") or [f"searched within {numbers.gigabytes(p['capacity_bytes'])}" for p in front]
    found = [
        {
            "kind": "best" if k == 0 else "slower",
            "step_s": p["step_s"],
            "memory_bytes": p["peak_bytes"],
            "label": label,
            "why": p["search_status"] or "given, not searched",
        }
        for k, (p, label) in enumerate(zip(front, labels, strict=True))
    ]
    yield FigureBlock("The front of time against memory", figures.candidates(found, None), 380)
    least = front[0]["step_s"]
    rows = [
        (f"{p['peak_bytes'] / 1e9:.1f}", numbers.digits(p["step_s"]), _percent(p["step_s"] / least - 1), label)
        for p, label in zip(front, labels, strict=True)
    ]
    yield TableBlock(("GB", "step, s", "more", "plan"), rows, left=0, ends_in_words=True, note=_PLAN_WORDS)
    if answer.get("front_end"):
        yield WordsBlock(f"It ends here: {answer['front_end']}.")


def _versus(answer: _Answer) -> Iterator[PageBlock]:
    changed = answer.get("difference")
    if not changed:
        return
    words, name = _drawn(answer, "terms") or {}, answer["vs"]["name"]
    choices = [(name, _value(v["own"]), _value(v["other"])) for name, v in changed["decisions"].items()]
    yield TableBlock(("choice", "plan", name), choices, left=3, cards=False)
    own, other = answer["estimate"], answer["vs"]["estimate"]
    terms = {term: [_mid(e["breakdown_s"], term) for e in (own, other)] for term in changed["time_s"]}
    seconds = [
        (words.get(term, term), *map(numbers.digits, pair), numbers.signed(pair[1] - pair[0]))
        for term, pair in terms.items()
        if max(pair) >= 1e-4 * own["step_time_s"]["mid"]
    ]
    whole = [e["step_time_s"]["mid"] for e in (own, other)]
    seconds.append(("step", *map(numbers.digits, whole), numbers.signed(whole[1] - whole[0])))
    yield TableBlock(("seconds", "plan", name, "difference"), seconds)
    stages = [_fullest(e) for e in (own, other)]
    sizes = [
        (term, f"{a / 1e9:.2f}", f"{b / 1e9:.2f}", f"{(b - a) / 1e9:+.2f}")
        for term in changed["memory_bytes"]
        for a, b in [[_mid(stage, term) for stage in stages]]
        if max(a, b) >= 5e-3 * 1e9
    ]
    peaks = [max(s["memory_bytes"]["mid"] for s in e["stages"]) / 1e9 for e in (own, other)]
    sizes.append(("total", f"{peaks[0]:.2f}", f"{peaks[1]:.2f}", f"{peaks[1] - peaks[0]:+.2f}"))
    yield TableBlock(("GB of the fullest stage", "plan", name, "difference"), sizes)


def _mid(terms: Mapping[str, Any], name: str) -> float:
    return float(terms[name]["mid"]) if name in terms else 0.0


def _fullest(estimate: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the memory by term of the stage that needs most."""
    most = [stage["memory_bytes"]["mid"] for stage in estimate["stages"]]
    found: Mapping[str, Any] = estimate["memory_bytes"][most.index(max(most))]
    return found


def _measured(answer: _Answer) -> Iterator[PageBlock]:
    rows = _drawn(answer, "rows") if answer.get("command") == "compare" else None
    if not rows:
        return
    found = answer["figures"]
    names = [name for name, *_ in rows]
    yield FigureBlock("Predicted over measured", figures.measured(found, names), 130 + 40 * len(found))
    heads = ("figure", "predicted", "interval", "measured", "quartiles", "ratio", "inside")
    yield TableBlock(heads, rows, ends_in_words=True)
    yield from (WordsBlock(f"Note: {note}.", "note") for note in answer["notes"])


# -- sources and exports -----------------------------------------------------------------------------------------------


def _reliability(answer: _Answer) -> Iterator[PageBlock]:
    run = answer.get("estimate", {}).get("run") or _drawn(answer, "usual_run")
    if run is None:
        return
    if run["goodput"] is None:
        yield from (WordsBlock(note) for note in run["notes"])
        return
    yield FigureBlock("Goodput against the checkpoint interval", figures.goodput(run["goodput"]), 340)
    days, usd = run["days_with_failures"], run["usd_with_failures"]
    money = "" if usd is None else f" and costs {numbers.dollars(usd['mid'])}"
    yield WordsBlock(f"With failures the run takes {numbers.days(days['mid'])} ({_span(days, numbers.days)}){money}.")


def _assumptions(answer: _Answer) -> Iterator[PageBlock]:
    rows = [(s["what"], s["value"], s["source"]) for s in _drawn(answer, "sources") or ()]
    if rows:
        yield TableBlock(("figure", "value", "source"), rows, left=3)


def _exports(answer: _Answer) -> Iterator[PageBlock]:
    for e in _drawn(answer, "exports") or ():
        if "refused" in e:
            yield WordsBlock(f"{e['target']}: {e['refused']}", "note")
        else:
            yield CodeBlock(
                f"{e['target']}@{e['version']}: {e['file']}", e["text"], (*e["launch"], *e["not_said"]), folded=True
            )


def _data(answer: _Answer) -> Iterator[PageBlock]:
    kept = {name: value for name, value in answer.items() if name not in ("drawn", "graph")}
    yield CodeBlock("JSON of this answer", json.dumps(kept, indent=1, allow_nan=False), folded=True)


PARTS: Sequence[_Part] = (
    _Part("Answer", _verdict),
    _Part("Sizes", _sizes),
    _Part("Sweep", _sweep),
    _Part("Predicted and measured", _measured),
    _Part("Plan", _plan),
    _Part("Choices", _decisions, "What every other choice would cost; each is the best plan with it."),
    _Part("Two plans", _versus),
    _Part("Mesh", _mesh, "Which rank is where, and which links each group uses."),
    _Part("Memory", _memory, "Expected memory at the fullest moment of the step; the dashed line is the device's."),
    _Part("Step", _step),
    _Part("Pipeline", _timeline),
    _Part("Other plans", _candidates, "Plans that were found or tried next to this one, and why each lost."),
    _Part("Front", _front),
    _Part("Sensitivity", _sensitivity),
    _Part("Settings", _settings),
    _Part("Failures", _reliability),
    _Part("Assumptions", _assumptions, "Every figure that is not exact, with its source and date."),
    _Part("Exports", _exports, "The plan as the input of other frameworks."),
    _Part("Data", _data),
)
