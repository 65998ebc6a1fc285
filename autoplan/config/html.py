"""Tables for notebooks: `_repr_html_` of plans, estimates and certificates. Plain HTML, without a library."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

_CELL = "padding: 2px 10px; text-align: {}; border-bottom: 1px solid #d0d7de"


def table(title: str, heads: Sequence[str], rows: Sequence[Sequence[object]], note: str = "") -> str:
    """Return a table with a title. The first column holds words, the others numbers; every text is escaped."""
    styles = [_CELL.format("left" if k == 0 else "right") for k in range(len(heads))]
    head = "".join(f'<th style="{style}">{escape(text)}</th>' for text, style in zip(heads, styles, strict=True))
    body = "".join(
        "<tr>" + "".join(f'<td style="{s}">{escape(str(c))}</td>' for c, s in zip(row, styles, strict=True)) + "</tr>"
        for row in rows
    )
    below = f"<p>{escape(note)}</p>" if note else ""
    inner = f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
    return f'<div><b>{escape(title)}</b><table style="border-collapse: collapse">{inner}</table>{below}</div>'
