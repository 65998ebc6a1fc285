"""`--report FILE`: the answer of a command as one HTML file (autoplan.pages)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autoplan.report.files import check_writable, write_text
from autoplan.report.output import say_note


def check_report_path(path: Path | None) -> None:
    """Refuse a report that cannot be written, before the work. Raises AutoplanError, also if the extra is missing."""
    if path is not None:
        from autoplan.pages.page import check_extra

        check_writable(path)
        check_extra()


def write_report(path: Path, answer: Mapping[str, Any], drawn: Mapping[str, Any] | None = None) -> None:
    """Write the report of a JSON answer, whole or not at all. `drawn`: what it draws beside (autoplan.report.drawn)."""
    from autoplan.pages.page import page

    text = page({**answer, "drawn": dict(drawn or {})})
    write_text(path, text)
    say_note(f"wrote {path}, {len(text.encode()) / 1e6:.1f} MB; open it in a browser, offline too")
