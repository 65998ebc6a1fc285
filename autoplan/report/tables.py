"""Tables that fit the width of the terminal: names stay whole, and the least needed columns go first."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from autoplan.report.text import paragraph, plain_table

_GAP = 3  # spaces between columns
_LAST_WIDTH = 20  # of a last column of words, if it has as many


def fitting_table(
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    width: int,
    less_needed: Sequence[str] = (),
    *,
    left: int = 0,
    folds_heads: bool = False,
) -> tuple[Table, list[str]]:
    """Return a table of this width, and the columns that it does without.

    All cells but those of the last column stay on one line where that is possible.

    Args:
        less_needed: the columns that may be left out, the first to go first.
        left: the columns of text before those of numbers. The last column is text.
        folds_heads: a head may take several lines.
    """
    words = {head: max(map(len, head.split() if folds_heads else [head]), default=0) for head in heads}
    widest = {head: max(words[head], *map(len, cells)) for head, *cells in zip(heads, *rows, strict=True)}
    left_out: list[str] = []
    for name in (*less_needed, None):
        kept = [head for head in heads if head not in left_out]
        rest = width - sum(widest[head] + _GAP for head in kept[:-1])  # what is left to the last column
        if name is None or rest >= min(_LAST_WIDTH, widest[kept[-1]]):
            break
        if name in kept:
            left_out.append(name)
    table = plain_table(*kept, left=left)
    table.columns[-1].justify = "left"
    if rest >= min(_LAST_WIDTH, widest[kept[-1]]) // 2:
        for column, head in zip(table.columns, kept, strict=True):
            column.width = min(rest, widest[head]) if head == kept[-1] else widest[head]
    for cells in rows:
        table.add_row(*(cell for head, cell in zip(heads, cells, strict=True) if head in kept))
    return table, left_out


def print_fitting(
    out: Console, heads: Sequence[str], rows: Sequence[Sequence[str]], less_needed: Sequence[str], left: int = 1
) -> None:
    """Print a listing, and which of its columns this width leaves out."""
    table, left_out = fitting_table(heads, rows, out.width, less_needed, left=left, folds_heads=True)
    out.print(table)
    if left_out:
        paragraph(out, f"Left out at this width: {', '.join(left_out)}. All: --json", 2)
