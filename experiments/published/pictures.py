"""Predicted against measured as pictures: SVG files without a library, and the Markdown that shows them.

    python -m experiments.published.validate --data FILE.csv --trust A --readme docs/accuracy.md

writes them beside the page, in `images/`. One row of dots per campaign shows predicted / measured of every step, with
the worst ones named below; one picture has predicted against measured seconds of all of them. Dense models are filled
circles, models with experts open diamonds, in two colours that colour-blind readers tell apart (Okabe and Ito, 2008).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from xml.sax.saxutils import escape

from autoplan.report.files import write_text
from experiments.published.results import Result

_DENSE, _EXPERTS, _GREY = "#0072B2", "#D55E00", "#666666"
_LEAST, _MOST = 0.4, 1.6  # predicted / measured at the edges; what is beyond stands at the edge
_WORST = 8
NAMES = ("accuracy_campaigns.svg", "accuracy_steps.svg")


@dataclass(frozen=True)
class Picture:
    """An SVG and what it shows in words."""

    name: str
    svg: str
    alt: str


def shown(results: Sequence[Result]) -> list[Result]:
    """Return the rows with a measured and a predicted step."""
    return [r for r in results if r.measured_s > 0 and r.predicted_s > 0]


def worst(results: Sequence[Result]) -> list[Result]:
    """Return the rows with the largest errors, the worst first."""
    return sorted(shown(results), key=lambda r: -abs(_error(r)))[:_WORST]


def _error(row: Result) -> float:
    return row.predicted_s / row.measured_s - 1


def pictures(results: Sequence[Result]) -> list[Picture]:
    """Return the pictures of some results."""
    rows = shown(results)
    return [_campaigns(rows), _steps(rows)] if rows else []


def _mark(x: float, y: float, row: Result) -> str:
    if row.experts:
        return f'<path d="M{x:.1f} {y - 4:.1f}l4 4l-4 4l-4-4z" class="e"/>'
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" class="d"/>'


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, strong: bool = False) -> str:
    return f'<path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" class="{"s" if strong else "g"}"/>'


def _svg(name: str, width: int, height: int, alt: str, parts: Sequence[str]) -> Picture:
    style = (
        f"text{{font:13px sans-serif;fill:#222}}.d{{fill:{_DENSE};fill-opacity:.45}}"
        f".e{{fill:none;stroke:{_EXPERTS}}}.g{{stroke:#ddd}}.s{{stroke:{_GREY};stroke-dasharray:4 3}}"
    )
    key = [
        f'<circle cx="{width - 230}" cy="18" r="3" class="d"/>',
        _text(width - 220, 22, "dense"),
        f'<path d="M{width - 150} 14l4 4l-4 4l-4-4z" class="e"/>',
        _text(width - 140, 22, "with experts"),
    ]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">'
    body = "\n".join([f"<title>{escape(alt)}</title>", f"<style>{style}</style>", *key, *parts])
    return Picture(name, f'{head}\n<rect width="100%" height="100%" fill="#fff"/>\n{body}\n</svg>\n', alt)


def _campaigns(rows: Sequence[Result]) -> Picture:
    """Return a row of dots for each campaign, the largest first: predicted / measured of its steps."""
    by_name: dict[str, list[Result]] = {}
    for row in rows:
        by_name.setdefault(row.campaign, []).append(row)
    names = sorted(by_name, key=lambda name: -len(by_name[name]))
    left, right, top, each, width = 150, 90, 50, 26, 900
    height = top + each * len(names) + 40

    def x(ratio: float) -> float:
        inside = min(max(ratio, _LEAST), _MOST)
        return left + (inside - _LEAST) / (_MOST - _LEAST) * (width - left - right)

    parts = []
    for ratio in (0.4, 0.6, 0.8, 1.0, 1.2, 1.4, 1.6):
        parts += [_line(x(ratio), top - 8, x(ratio), height - 40, ratio == 1.0)]
        parts += [_text(x(ratio), height - 22, f"{ratio:.1f}", "middle")]
    parts += [
        _text(x(1.0), height - 5, "predicted / measured step time", "middle"),
        _text(width - 6, 40, "mean error", "end"),
    ]
    for i, name in enumerate(names):
        mine = by_name[name]
        y = top + each * (i + 0.5)
        parts += [_text(left - 10, y + 4, f"{name} ({len(mine)})", "end")]
        for k, row in enumerate(mine):
            parts.append(_mark(x(row.predicted_s / row.measured_s), y + (k % 5 - 2) * 3, row))
        parts.append(_text(width - 6, y + 4, f"{fmean(abs(_error(r)) for r in mine):.1%}", "end"))
    alt = (
        f"Predicted over measured step time of {len(rows)} published training steps, a row for each of {len(names)} "
        f"campaigns. {sum(abs(_error(r)) <= 0.1 for r in rows) / len(rows):.0%} are within 10 %, "
        f"{sum(abs(_error(r)) <= 0.2 for r in rows) / len(rows):.0%} within 20 %."
    )
    return _svg(NAMES[0], width, height, alt, parts)


def _steps(rows: Sequence[Result]) -> Picture:
    """Predicted against measured seconds, both on logarithmic scales, with lines at a tenth more and less."""
    seconds = [s for r in rows for s in (r.measured_s, r.predicted_s)]
    low, high = math.floor(math.log10(min(seconds))), math.ceil(math.log10(max(seconds)))
    side, left, top = 560, 70, 40

    def place(value: float) -> float:
        return (math.log10(value) - low) / (high - low) * side

    parts = []
    for power in range(low, high + 1):
        at = place(10.0**power)
        parts += [
            _line(left + at, top, left + at, top + side),
            _line(left, top + side - at, left + side, top + side - at),
        ]
        label = f"{10.0**power:g} s"
        parts += [_text(left + at, top + side + 18, label, "middle")]
        parts += [_text(left - 8, top + side - at + 4, label, "end")]
    for factor in (0.9, 1.0, 1.1):
        shift = math.log10(factor) / (high - low) * side
        start, end = max(0.0, -shift), min(side, side - shift)
        x1, y1, x2, y2 = left + start, top + side - start - shift, left + end, top + side - end - shift
        parts.append(_line(x1, y1, x2, y2, strong=True))
    parts += [_mark(left + place(r.measured_s), top + side - place(r.predicted_s), r) for r in rows]
    parts += [_text(left + side / 2, top + side + 38, "measured", "middle"), _text(8, 22, "predicted")]
    most = float(f"{max(seconds):.2g}")
    alt = (
        f"Predicted against measured seconds of {len(rows)} published training steps, from {min(seconds):.2g} to "
        f"{most:g} s, on logarithmic scales; the dashed lines are equality and 10 % to either side."
    )
    return _svg(NAMES[1], left + side + 20, top + side + 50, alt, parts)


def write(results: Sequence[Result], page: Path) -> str:
    """Write the pictures into `images/` beside a page; the Markdown that shows them and names the worst rows."""
    found = pictures(results)
    if not found:
        return ""
    folder = page.parent / "images"
    folder.mkdir(exist_ok=True)
    for picture in found:
        write_text(folder / picture.name, picture.svg)
    lines = [f"![{picture.alt}](images/{picture.name})\n" for picture in found]
    lines += ["The worst steps:", "", "| row | model | devices | layout | measured s | predicted s | error |"]
    lines += ["|---|---|---|---|---:|---:|---:|"]
    for r in worst(results):
        layout = (
            " ".join(f"{n}{v}" for n, v in (("tp", r.tp), ("pp", r.pp), ("cp", r.cp), ("ep", r.ep)) if v > 1) or "dp"
        )
        cells = (r.id, r.model, f"{r.num_devices} {r.device}", f"{layout}, {r.precision}")
        lines.append(f"| {' | '.join(cells)} | {r.measured_s:.3g} | {r.predicted_s:.3g} | {_error(r):+.0%} |")
    return "\n".join(lines)
