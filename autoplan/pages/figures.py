"""Figures as plain data of plotly: `{"data": [...], "layout": {...}}`. No import of plotly.

Sources are JSON answers (autoplan.report.data) and what a report draws beside them (autoplan.report.drawn). The
colours are those of Okabe and Ito (2008) with a dark grey, which colour-blind readers tell apart; hatches and labels
say the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from autoplan.config import numbers
from autoplan.cost_models.whole_run import useful_share

Spec = dict[str, Any]
BLUE, ORANGE, GREEN, RED, PURPLE, SKY, YELLOW, GREY = (
    "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442", "#4d4d4d"
)  # fmt: skip
COLOURS = (BLUE, ORANGE, GREEN, PURPLE, SKY, RED, YELLOW, GREY)
_HATCHES = ("", "/", "\\", "x", "-", "|", "+", ".")
INK = "#1b1f24"  # of letters
# from little to much, light enough for dark letters
SHADES = ((0.0, "#f7fbff"), (0.5, "#b5d4ea"), (1.0, "#6baed6"))
_LIMIT = {"color": RED, "width": 2, "dash": "dash"}
_MOST_RANKS = 4096  # drawn in a mesh
_WIDE = 2  # times the limit: candidates beyond it need a logarithmic axis
_MOST_EVENTS = 6000  # drawn in a timeline

_UNITS = {  # of what a sweep may vary, where its name does not say it
    "nic": "Gbit/s per device",
    "scaleup": "GB/s per device",
    "power": "W per device",
    "price": "US dollars per device and hour",
    "seq_len": "tokens",
    "global_batch_size": "sequences",
}
_ACTIONS = {  # of a pipeline: colour, and hatch
    "FORWARD": (BLUE, ""),
    "BACKWARD": (ORANGE, ""),
    "BACKWARD_INPUT": (ORANGE, "/"),
    "BACKWARD_WEIGHT": (GREEN, "\\"),
}


def figure(data: Sequence[Mapping[str, Any]], **layout: Any) -> Spec:
    """Return a figure with the layout that all of them share."""
    shared = {
        "font": {"family": "system-ui, sans-serif", "size": 13},
        "margin": {"l": 10, "r": 16, "t": 28, "b": 10},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "colorway": list(COLOURS),
        "hoverlabel": {"align": "left"},
        "legend": {
            "orientation": "h",
            "yref": "container",
            "y": 0,
            "yanchor": "bottom",
            "x": 0,
            "traceorder": "normal",
        },
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": "rgba(128,128,128,0.6)", "activecolor": BLUE},
    }
    return {"data": [dict(trace) for trace in data], "layout": {**shared, **layout}}


def axis(title: str, **more: Any) -> Spec:
    """Return an axis with a title and a light grid."""
    return {"title": {"text": title, "standoff": 8}, "gridcolor": "rgba(128,128,128,0.25)", "automargin": True, **more}


_DOWNWARDS = {"autorange": "reversed", "automargin": True}  # an axis whose first row is on top


def _line_at(place: float, direction: str = "x", line: Mapping[str, Any] = _LIMIT) -> Spec:
    """Return a line through the whole figure at a place of one of its axes."""
    across = "y" if direction == "x" else "x"
    ends = {f"{direction}0": place, f"{direction}1": place, f"{across}0": 0, f"{across}1": 1}
    return {"type": "line", **ends, f"{across}ref": "paper", "line": line}


def _error(mid: Sequence[float], low: Sequence[float], high: Sequence[float], colour: str = GREY) -> Spec:
    """Return error bars from `low` to `high` around `mid`."""
    up = [top - value for top, value in zip(high, mid, strict=True)]
    down = [value - bottom for bottom, value in zip(low, mid, strict=True)]
    return {"type": "data", "symmetric": False, "array": up, "arrayminus": down, "color": colour}


def _filled(colour: str, hatch: str) -> Spec:
    return {"color": colour, "pattern": {"shape": hatch, "fgcolor": "white", "fillmode": "overlay"}}


def memory(estimate: Mapping[str, Any]) -> Spec:
    """Draw the memory of every stage by term, its high end, and the limit of the device."""
    stages = estimate["memory_bytes"]
    names = [f"stage {k}" for k in range(len(stages))] if len(stages) > 1 else ["every device"]
    limit = estimate["memory_capacity_bytes"] / 1e9
    terms = list(dict.fromkeys(term for stage in stages for term in stage))
    data: list[Spec] = []
    for k, term in enumerate(terms):
        sizes = [stage[term]["mid"] / 1e9 if term in stage else 0.0 for stage in stages]
        tags = [stage[term]["evidence"] if term in stage else "" for stage in stages]
        colour = COLOURS[k % len(COLOURS)]
        hatch = _HATCHES[(k // len(COLOURS)) % len(_HATCHES)]
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": term,
                "y": names,
                "x": sizes,
                "customdata": tags,
                "marker": _filled(colour, hatch),
                "hovertemplate": f"%{{y}}, {term}: %{{x:.2f}} GB (%{{customdata}})<extra></extra>",
            }
        )
    whole = [stage["memory_bytes"] for stage in estimate["stages"]]
    low, mid, high = ([q[end] / 1e9 for q in whole] for end in ("low", "mid", "high"))
    data.append(
        {
            "type": "scatter",
            "mode": "markers",
            "name": "expected, and up to the high end",
            "y": names,
            "x": mid,
            "error_x": _error(mid, low, high, "#444"),
            "marker": {"color": "#444", "size": 6},
            "customdata": [[stage["fullest"] or "the step", stage["num_layers"]] for stage in estimate["stages"]],
            "hovertemplate": "%{y}: %{x:.1f} GB in the %{customdata[0]}, %{customdata[1]} layers<extra></extra>",
        }
    )
    note = {"x": limit, "y": 0.5, "yref": "paper", "xanchor": "left", "showarrow": False, "align": "left"}
    note["text"] = f"{limit:.1f} GB<br>limit"
    most = max(limit, *high)
    return figure(
        data,
        barmode="stack",
        xaxis=axis("GB per device", range=[0, max(1.05 * most, 1.18 * limit)]),
        yaxis={**_DOWNWARDS, "type": "category"},
        shapes=[_line_at(limit)],
        annotations=[note],
    )


def terms_of(estimate: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the terms of a step, the largest first, without those below 0.01 % of it."""
    least = 1e-4 * estimate["step_time_s"]["mid"]
    found = [(name, q) for name, q in estimate["breakdown_s"].items() if q["mid"] >= least]
    return sorted(found, key=lambda pair: -pair[1]["mid"])


def step(estimate: Mapping[str, Any], words: Mapping[str, str]) -> Spec:
    """Draw the step as a waterfall of its terms. `words`: terms in words."""
    terms = [(words.get(name, name), q) for name, q in terms_of(estimate)]
    whole = estimate["step_time_s"]
    names = [name for name, _ in terms] + ["step"]
    values = [q["mid"] for _, q in terms] + [whole["mid"]]
    spans = [
        f"{numbers.digits(q['low'])} to {numbers.digits(q['high'])} s, {q['evidence']}"
        for _, q in [*terms, ("", whole)]
    ]
    trace = {
        "type": "waterfall",
        "orientation": "h",
        "measure": ["relative"] * len(terms) + ["total"],
        "y": names,
        "x": values,
        "text": [f"{numbers.digits(v)} s" for v in values],
        "textposition": "outside",
        "cliponaxis": False,
        "customdata": spans,
        "hovertemplate": "%{y}: %{customdata}<extra></extra>",
        "increasing": {"marker": {"color": BLUE}},
        "totals": {"marker": {"color": GREY}},
        "connector": {"line": {"color": "rgba(128,128,128,0.5)"}},
    }
    seconds = axis("seconds", rangemode="tozero", range=[0, 1.18 * whole["mid"]])
    return figure([trace], xaxis=seconds, yaxis=_DOWNWARDS, showlegend=False)


def timeline(events: Sequence[Sequence[Any]]) -> Spec:
    """Draw the actions of a step, a row per pipeline rank.

    An event is rank, chunk, micro-batch, action, start and end in seconds.
    """
    kept = _drawn_ranks(events)
    shown = [e for e in events if e[0] in set(kept)]
    data = [_actions(shown, action, len(kept)) for action in dict.fromkeys(e[3] for e in shown)]
    names = [f"rank {rank}" for rank in kept]
    whole = [len(names) - 0.5, -0.5]
    buttons = [{"label": "all ranks", "method": "relayout", "args": [{"yaxis.range": whole}]}]
    for k, name in enumerate(names):
        buttons.append({"label": name, "method": "relayout", "args": [{"yaxis.range": [k + 0.5, k - 0.5]}]})
    menu = {"buttons": buttons, "x": 0, "xanchor": "left", "y": 1.0, "yanchor": "bottom", "showactive": True}
    rows = {"type": "category", "categoryorder": "array", "categoryarray": names, "range": whole, "automargin": True}
    return figure(
        data,
        barmode="overlay",
        xaxis=axis("seconds", rangemode="tozero"),
        yaxis=rows,
        updatemenus=[menu] if len(names) > 1 else [],
        dragmode="zoom",
    )


def _drawn_ranks(events: Sequence[Sequence[Any]]) -> list[int]:
    """Return the ranks that are drawn: all, or evenly chosen ones where they have too many events."""
    ranks = sorted({e[0] for e in events})
    if len(events) <= _MOST_EVENTS:
        return ranks
    share = max(2, _MOST_EVENTS * len(ranks) // len(events))
    return sorted({ranks[round(k * (len(ranks) - 1) / (share - 1))] for k in range(share)})


def _actions(shown: Sequence[Sequence[Any]], action: str, num_ranks: int) -> Spec:
    """Return the bars of one action; those of every second chunk of a rank are lighter."""
    chunks: dict[int, list[int]] = {}
    for e in shown:
        if e[1] not in chunks.setdefault(e[0], []):
            chunks[e[0]].append(e[1])
    own = [e for e in shown if e[3] == action]
    colour, hatch = _ACTIONS.get(action, (PURPLE, ""))
    return {
        "type": "bar",
        "orientation": "h",
        "name": action.lower().replace("_", " "),
        "y": [f"rank {e[0]}" for e in own],
        "base": [e[4] for e in own],
        "x": [e[5] - e[4] for e in own],
        "customdata": [[e[2], e[1], e[4], e[5]] for e in own],
        "marker": {
            **_filled(colour, hatch),
            "opacity": [0.55 if sorted(chunks[e[0]]).index(e[1]) % 2 else 1.0 for e in own],
            "line": {"color": "white", "width": 0.5 if len(shown) < 100 * num_ranks else 0},  # thin bars would vanish
        },
        "hovertemplate": "%{y}, micro-batch %{customdata[0]}, chunk %{customdata[1]}: "
        "%{customdata[2]:.4g} to %{customdata[3]:.4g} s<extra>" + action.lower() + "</extra>",
    }


_KINDS = {  # of a candidate: colour and symbol
    "best": (GREEN, "star"),
    "as fast": (BLUE, "circle"),
    "slower": (ORANGE, "diamond"),
    "pinned": (GREY, "square-open"),  # what was given rules it out
    "too big": (RED, "x"),
}


def candidates(found: Sequence[Mapping[str, Any]], limit_bytes: float | None) -> Spec:
    """Draw plans by step time and memory, with the limit, and why each was not taken."""
    priced = [c for c in found if c["step_s"] is not None]
    data = []
    for kind, (colour, symbol) in _KINDS.items():
        own = [c for c in priced if c["kind"] == kind]
        if own:
            data.append(
                {
                    "type": "scatter",
                    "mode": "markers",
                    "name": kind,
                    "x": [c["memory_bytes"] / 1e9 for c in own],
                    "y": [c["step_s"] for c in own],
                    "customdata": [[c["label"], c["why"]] for c in own],
                    "marker": {"color": colour, "symbol": symbol, "size": 15 if kind == "best" else 10},
                    "hovertemplate": "%{customdata[0]}<br>%{y:.4g} s, %{x:.1f} GB<br>%{customdata[1]}<extra></extra>",
                }
            )
    front = _front([(c["memory_bytes"] / 1e9, c["step_s"]) for c in priced if c["kind"] not in ("too big", "pinned")])
    data.append(
        {
            "type": "scatter",
            "mode": "lines",
            "name": "front",
            "x": [x for x, _ in front],
            "y": [y for _, y in front],
            "line": {"color": GREY, "dash": "dot", "shape": "hv"},
            "hoverinfo": "skip",
        }
    )
    lines = [] if limit_bytes is None else [_line_at(limit_bytes / 1e9)]
    across = _memory_axis([c["memory_bytes"] for c in priced], limit_bytes)
    return figure(data, xaxis=across, yaxis=axis("seconds per step"), shapes=lines)


def _memory_axis(sizes: Sequence[float], limit_bytes: float | None) -> Spec:
    """Return the axis of the memory of candidates; logarithmic if one is much too big."""
    wide = limit_bytes is not None and max(sizes, default=0.0) > _WIDE * limit_bytes
    marks = [digit * 10**power for power in range(6) for digit in (1, 2, 5)]
    return axis("GB of the fullest device", **({"type": "log", "tickvals": marks} if wide else {}))


def _front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points that no other equals or beats in both, by rising memory."""
    out: list[tuple[float, float]] = []
    for x, y in sorted(points):
        if not out or y < out[-1][1]:
            out.append((x, y))
    return out


def mesh(drawn: Mapping[str, Any]) -> Spec:
    """Draw the ranks on their nodes, coloured by pipeline stage (or by the outermost axis), all coordinates as text."""
    axes = [(a["name"], a["size"]) for a in drawn["axes"]]
    per_node, total = drawn["devices_per_node"], min(drawn["num_devices"], _MOST_RANKS)
    coloured = _coloured(axes)
    steps = [math.prod(size for _, size in axes[k + 1 :]) for k in range(len(axes))]

    def where(rank: int) -> list[int]:
        return [rank // step % size for step, (_, size) in zip(steps, axes, strict=True)]

    rows = range(0, total, per_node)
    ranks = [list(range(start, min(start + per_node, total))) for start in rows]
    size = axes[coloured][1] if axes else 1
    labelled = total <= 256
    trace = {
        "type": "heatmap",
        "z": [[where(rank)[coloured] for rank in row] for row in ranks],
        "x": [str(k) for k in range(per_node)],
        "y": [f"node {k}" for k in range(len(ranks))],
        "hovertext": [["rank " + str(rank) + ": " + _place(where(rank), axes) for rank in row] for row in ranks],
        "hovertemplate": "%{y}, device %{x}<br>%{hovertext}<extra></extra>",
        "colorscale": list(map(list, SHADES)) if size > len(COLOURS) else _steps(size),
        "zmin": -0.5,
        "zmax": size - 0.5,
        "xgap": 2,
        "ygap": 2,
        "showscale": size > 1,
        "colorbar": {"title": {"text": axes[coloured][0] if axes else ""}, "tickformat": "d", "thickness": 12},
    }
    if labelled:
        trace |= {"text": [[str(r) for r in row] for row in ranks], "texttemplate": "%{text}"}
        trace["textfont"] = {"size": 10} | ({"color": INK} if size > len(COLOURS) else {})
    return figure(
        [trace],
        xaxis={"automargin": True, "side": "top", "showgrid": False, "type": "category", "title": {"text": "device"}},
        yaxis={"automargin": True, "autorange": "reversed", "showgrid": False},
    )


def _coloured(axes: Sequence[tuple[str, int]]) -> int:
    """Return the number of the axis that gives ranks their colours: pp, or the outermost with several ranks."""
    several = [k for k, (_, size) in enumerate(axes) if size > 1]
    return next((k for k in several if axes[k][0] == "pp"), several[0] if several else 0)


def _place(coordinates: Sequence[int], axes: Sequence[tuple[str, int]]) -> str:
    return " ".join(f"{name}={k}" for k, (name, size) in zip(coordinates, axes, strict=True) if size > 1) or "all alone"


def _steps(size: int) -> list[list[Any]]:
    """Return a colour scale of `size` flat colours."""
    scale: list[list[Any]] = []
    for k in range(size):
        scale += [[k / size, COLOURS[k]], [(k + 1) / size, COLOURS[k]]]
    return scale


def gains(found: Sequence[Mapping[str, Any]]) -> Spec:
    """Draw what changes of hardware and settings gain, the largest first."""
    rows = [g for g in found if g["gain"] is not None][:12]
    trace = {
        "type": "bar",
        "orientation": "h",
        "y": [f"{g['what']}: {g['own']} to {g['value']}" for g in rows],
        "x": [100 * g["gain"] for g in rows],
        "text": [f"{100 * g['gain']:+.1f} %" for g in rows],
        "textposition": "auto",
        "marker": {"color": [BLUE if g["gain"] >= 0 else ORANGE for g in rows]},
        "hovertemplate": "%{y}: %{x:+.1f} %<extra></extra>",
    }
    return figure([trace], xaxis=axis("tokens per second, % more"), yaxis=_DOWNWARDS)


def tornado(found: Sequence[Mapping[str, Any]]) -> Spec:
    """Draw how the cost of the tokens changes with a figure that is 20 % lower or higher, the largest first."""
    rows = sorted(found, key=lambda g: -max(abs(g["low"]), abs(g["high"])))
    data = []
    for end, name, colour, hatch in (("low", "20 % lower", ORANGE, "/"), ("high", "20 % higher", BLUE, "")):
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": name,
                "y": [g["what"] for g in rows],
                "x": [100 * g[end] for g in rows],
                "marker": _filled(colour, hatch),
                "hovertemplate": f"%{{y}} {name}: %{{x:+.1f}} %<extra></extra>",
            }
        )
    change = axis("cost of the same tokens, % more", zeroline=True)
    return figure(data, barmode="overlay", xaxis=change, yaxis=_DOWNWARDS)


def goodput(good: Mapping[str, Any]) -> Spec:
    """Draw the share of the time that is kept against the interval of checkpoints (Daly 2006, equation 20)."""
    best = good["checkpoint_interval_s"]["mid"]
    cost, restart, mtbf = (good[n]["mid"] for n in ("checkpoint_s", "restart_s", "mtbf_s"))
    points = [best * 10 ** (k / 20 - 1.5) for k in range(61)]
    share = [100 * useful_share(s, cost, restart, mtbf) for s in points]
    curve = {"type": "scatter", "mode": "lines", "x": [s / 3600 for s in points], "y": share, "name": "goodput"}
    curve["hovertemplate"] = "a checkpoint every %{x:.2g} h: %{y:.2f} %<extra></extra>"
    optimum = {
        "type": "scatter",
        "mode": "markers",
        "name": f"best interval, {numbers.days(best / 86400)}",
        "x": [best / 3600],
        "y": [100 * useful_share(best, cost, restart, mtbf)],
        "marker": {"size": 12, "symbol": "star", "color": GREEN},
    }
    return figure(
        [curve, optimum], xaxis=axis("hours between checkpoints", type="log"), yaxis=axis("% of the time kept")
    )


def heatmap(rows: Sequence[Mapping[str, Any]], across: str, down: str, value: str, title: str) -> Spec:
    """Draw one column of a sweep over two varied ones; points without a plan stay empty."""
    words = numbers.plain_number  # 400 for 400.0
    xs, ys = (list(dict.fromkeys(words(row[name]) for row in rows)) for name in (across, down))
    cells = {(words(row[across]), words(row[down])): row for row in rows}
    z = [[cells.get((x, y), {}).get(value) for x in xs] for y in ys]
    text = [[_cell(cells.get((x, y), {}), value, title) for x in xs] for y in ys]
    labels = [[_short(cells.get((x, y), {}).get(value)) for x in xs] for y in ys]
    trace = {
        "type": "heatmap",
        "x": xs,
        "y": ys,
        "z": z,
        "text": labels,
        "texttemplate": "%{text}",
        "hovertext": text,
        "hovertemplate": f"{across} %{{x}}, {down} %{{y}}<br>%{{hovertext}}<extra></extra>",
        "colorscale": list(map(list, SHADES)),
        "showscale": False,  # the cells say it
        "textfont": {"color": INK},
        "xgap": 2,
        "ygap": 2,
    }
    category = {"type": "category", "automargin": True}
    rows_axis = {**_varied(down), **category, "autorange": "reversed"}  # as in the table: the first on top
    return figure([trace], xaxis={**_varied(across), **category}, yaxis=rows_axis)


def _short(value: object) -> str:
    return "" if not isinstance(value, int | float) else numbers.digits(value)


def _varied(name: str) -> Spec:
    """Return an axis of what a sweep varied, with its unit."""
    return axis(f"{name}, {_UNITS[name]}" if name in _UNITS else name)


def _cell(row: Mapping[str, Any], value: str, title: str) -> str:
    if row.get(value) is None:
        return str(row.get("status", "not planned"))
    return f"{title}: {numbers.digits(row[value])}<br>{row.get('plan', '')}"


def curve(
    rows: Sequence[Mapping[str, Any]], across: str, value: str, title: str, low: str = "", high: str = ""
) -> Spec:
    """Draw one column of a sweep against the one that was varied, with its interval."""
    found = [row for row in rows if row.get(value) is not None]
    trace: Spec = {
        "type": "scatter",
        "mode": "lines+markers",
        "x": [row[across] for row in found],
        "y": [row[value] for row in found],
        "customdata": [str(row.get("plan") or "") for row in found],
        "hovertemplate": f"{across} %{{x}}: %{{y:.4g}}<br>%{{customdata}}<extra></extra>",
    }
    if low and found and all(row.get(low) is not None for row in found):
        middle, least, greatest = ([row[name] for row in found] for name in (value, low, high))
        trace["error_y"] = _error(middle, least, greatest)
    words = any(isinstance(row[across], str) for row in found)
    return figure(
        [trace], xaxis=_varied(across) | ({"type": "category"} if words else {}), yaxis=axis(title, rangemode="tozero")
    )


def sizes(rows: Sequence[Mapping[str, Any]], deadline_days: float, budget_usd: float | None) -> Spec:
    """Draw cost against days, a line per kind of device, with the deadline and the budget."""
    data = []
    for k, kind in enumerate(dict.fromkeys(row["kind"] for row in rows)):
        own = sorted(
            (r for r in rows if r["kind"] == kind and r["days"] is not None and r["usd"] is not None),
            key=lambda row: row["days"],
        )
        if own:
            data.append(
                {
                    "type": "scatter",
                    "mode": "lines+markers",
                    "name": kind,
                    "x": [row["days"] for row in own],
                    "y": [row["usd"] for row in own],
                    "customdata": [[row["num_devices"], row["nodes"]] for row in own],
                    "marker": {"symbol": k % 8, "size": 9},
                    "hovertemplate": "%{customdata[0]} devices, %{customdata[1]} nodes: %{x:.1f} d, $%{y:,.0f}"
                    f"<extra>{kind}</extra>",
                }
            )
    lines = [_line_at(deadline_days), *([] if budget_usd is None else [_line_at(budget_usd, "y")])]
    notes = [
        {"x": deadline_days, "y": 1, "yref": "paper", "text": "deadline", "xanchor": "left", "yanchor": "bottom"},
        {"x": 1, "xref": "paper", "y": budget_usd, "text": "budget", "xanchor": "right", "yanchor": "bottom"},
    ]
    return figure(
        data,
        xaxis=axis("days, failures included", rangemode="tozero"),
        yaxis=axis("US dollars", rangemode="tozero"),
        shapes=lines,
        annotations=[{**note, "showarrow": False} for note in notes[: len(lines)]],
    )


def measured(figures: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Spec:
    """Draw predicted over measured of every figure; 1 is right. `names`: of the figures, with units."""
    named = {f["name"]: name for f, name in zip(figures, names, strict=True)}
    rows = [f for f in figures if f["measured"]]
    low, high = ([(f[end] or f["predicted"]) / f["measured"] for f in rows] for end in ("low", "high"))
    ratios = [f["ratio"] for f in rows]
    trace = {
        "type": "scatter",
        "mode": "markers",
        "x": ratios,
        "y": [named[f["name"]] for f in rows],
        "marker": {"size": 12, "color": [GREEN if f["inside"] in (True, None) else RED for f in rows]},
        "error_x": _error(ratios, low, high),
        "hovertemplate": "%{y}: %{x:.3f}<extra></extra>",
    }
    line = _line_at(1, line={"dash": "dash"})
    return figure([trace], xaxis=axis("predicted over measured"), yaxis=_DOWNWARDS, shapes=[line])
