"""Plots in the terminal, in ASCII: the pipeline of a step, points of time and memory, bars of a sweep.

Each function returns lines of at most `width` columns. Nothing depends on colour or on the terminal's letters.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from rich.console import Console
from rich.text import Text

from autoplan.config import numbers
from autoplan.cost_models.time.simulation import TimelineEvent

_MOST_ROWS = 16  # ranks of a pipeline that are drawn
_GAP = " ~ "  # between the beginning and the end of a long step
_WAITS = "."
_LETTERS = {"FORWARD": "F", "BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
_WORDS = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights", _WAITS: "waits"}
_FEWEST_POINTS = 3  # of fewer a table says as much
MOST_BARS = 40
_HEIGHT = 12  # rows of a scatter plot


def show_plot(out: Console, lines: Sequence[str]) -> None:
    """Print the lines of a plot below an empty one; nothing if there are none."""
    if lines:
        out.print()
    for line in lines:
        out.print(Text(line), soft_wrap=True)


def pipeline_plot(events: Sequence[TimelineEvent], width: int) -> list[str]:
    """Draw the actions of every rank over time; of a step too long for the width, its beginning and its end.

    A column shows what takes most of its time, in capitals for even micro-batches. The whole step is drawn if a column
    is then no longer than the median action, else both ends at half of that.
    """
    if not events:
        return []
    ranks = sorted({e.rank for e in events})
    shown = ranks if len(ranks) <= _MOST_ROWS else [*ranks[: _MOST_ROWS // 2], *ranks[-_MOST_ROWS // 2 :]]
    labels = {rank: f"rank {rank} " for rank in shown}
    columns = width - max(map(len, labels.values()))
    end, usual = max(e.end_s for e in events), median(e.end_s - e.start_s for e in events)
    slot, spans = end / columns, [(0.0, columns)]
    if slot > usual:  # actions would share columns: show both ends, where the pipeline waits
        half, slot = (columns - len(_GAP)) // 2, usual / 2
        spans = [(0.0, half), (end - half * slot, half)]
    lines: list[str] = []
    for rank in shown:
        mine = [e for e in events if e.rank == rank]
        parts = [_row([e for e in mine if _overlap(e, at, n * slot) > 0], at, slot, n) for at, n in spans]
        lines.append(f"{labels[rank]:>{width - columns}}{_GAP.join(parts)}")
    drawn = "".join(line[width - columns :] for line in lines).upper()
    if len(shown) < len(ranks):
        lines.insert(_MOST_ROWS // 2, f"... {len(ranks) - len(shown)} more ranks")
    words = ", ".join(f"{sign} {word}" for sign, word in _WORDS.items() if sign in drawn)
    left_out = f"; ~ leaves out {numbers.digits(end - 2 * spans[0][1] * slot)} s" if len(spans) > 1 else ""
    return [*lines, f"{words} (small: odd micro-batches); a column is {numbers.digits(slot)} s{left_out}"]


def _overlap(e: TimelineEvent, at: float, length: float) -> float:
    return max(0.0, min(e.end_s, at + length) - max(e.start_s, at))


def _row(events: Sequence[TimelineEvent], at: float, slot: float, num: int) -> str:
    signs = []
    for k in range(num):
        busy = {_WAITS: slot / 2}  # less than half of the column at work is waiting
        for e in events:
            sign = _LETTERS[e.kind.name]
            sign = sign.lower() if e.micro_batch % 2 else sign
            busy[sign] = busy.get(sign, 0.0) + _overlap(e, at + k * slot, slot)
        signs.append(max(busy, key=lambda sign: busy[sign]))
    return "".join(signs)


def scatter_plot(points: Sequence[tuple[float, float]], across: str, up: str, width: int) -> list[str]:
    """Draw points (x, y) by their place in the list: the first is `1`, the tenth and later are `+`. Axes have ends."""
    if len(points) < _FEWEST_POINTS:
        return []
    xs, ys = [p[0] for p in points], [p[1] for p in points]
    top, bottom = numbers.digits(max(ys)), numbers.digits(min(ys))
    margin = max(len(top), len(bottom)) + 2
    columns = width - margin
    grid = [[" "] * columns for _ in range(_HEIGHT)]
    for k, (x, y) in reversed(list(enumerate(points))):  # the first stay on top
        column = round(_share(x, xs) * (columns - 1))
        grid[round((1 - _share(y, ys)) * (_HEIGHT - 1))][column] = str(k + 1) if k < 9 else "+"
    names = [top, *[""] * (_HEIGHT - 2), bottom]
    lines = [f"{name:>{margin - 2}} |{''.join(row).rstrip()}" for name, row in zip(names, grid, strict=True)]
    left, right = numbers.digits(min(xs)), numbers.digits(max(xs))
    axis = f"{left}{across:^{max(0, columns - len(left) - len(right))}}{right}"
    return [f"{'':>{margin - 1}}{up}", *lines, f"{'':>{margin - 1}}+{'-' * columns}", f"{'':>{margin}}{axis}"]


def _share(value: float, values: Sequence[float]) -> float:
    low, high = min(values), max(values)
    return (value - low) / (high - low) if high > low else 0.5


def bar_plot(rows: Sequence[tuple[str, float]], unit: str, width: int) -> list[str]:
    """Draw a bar from 0 for every (name, value), longest the largest value."""
    texts = [numbers.scaled(value) for _, value in rows]
    left, right = max(len(name) for name, _ in rows), max(map(len, texts))
    room, most = width - left - right - 3, max(value for _, value in rows)
    found = [f"{'':{left}}  {unit}"]
    for (name, value), text in zip(rows, texts, strict=True):
        found.append(f"{name:<{left}}  {'#' * max(1, round(room * value / most))} {text}")
    return found
