"""One HTML file with everything in it: text, style, figures as data, and the library that draws them.

    text = page(answer)          # of a command's JSON answer; needs the extra [report]

The file opens offline: its policy forbids every request. The library is packed (gzip, base64) and unpacked by the
browser (DecompressionStream, in browsers since 2023), which keeps the file at about 2 MB. Without JavaScript the tables
and texts can still be read.
"""

from __future__ import annotations

import base64
import datetime
import gzip
import importlib.util
import json
from collections.abc import Mapping
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

from autoplan.errors import AutoplanError
from autoplan.pages import EXTRA
from autoplan.pages.sections import sections
from autoplan.versions import __version__

_COMMANDS = {
    "plan": "plan",
    "estimate": "price of a configuration",
    "explain": "explanation",
    "whatif": "sweep",
    "capacity": "capacity",
    "size": "size of a run",
    "compare": "predicted and measured",
}


def check_extra() -> None:
    """Raise AutoplanError if what a page needs is not installed."""
    missing = [name for name in ("jinja2", "plotly") if importlib.util.find_spec(name) is None]
    if missing:
        which = "which are" if len(missing) > 1 else "which is"
        raise AutoplanError(f"a report needs {' and '.join(missing)}, {which} not installed: {EXTRA}")


@lru_cache(maxsize=1)
def library() -> str:
    """Return the drawing library (plotly.js, MIT licence), packed, as the installed package ships it."""
    check_extra()
    found = importlib.util.find_spec("plotly")
    folder = Path(next(iter(found.submodule_search_locations or ()))) if found is not None else Path()
    script = folder / "package_data" / "plotly.min.js"
    if not script.is_file():
        raise AutoplanError(f"the installed plotly has no {script.name}; install it again: {EXTRA}")
    return base64.b64encode(gzip.compress(script.read_bytes(), 9, mtime=0)).decode()


def page(answer: Mapping[str, Any], today: datetime.date | None = None) -> str:
    """Return the report of a command's JSON answer as one HTML file.

    Args:
        today: the date in its heading.

    Raises:
        AutoplanError: the extra [report] is not installed.
    """
    check_extra()
    import jinja2

    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["data"] = _data
    template = environment.from_string((resources.files("autoplan.pages") / "page.html").read_text(encoding="utf-8"))
    return template.render(
        title=_title(answer),
        task=answer.get("drawn", {}).get("task", ""),
        evidence=answer.get("drawn", {}).get("evidence", ""),
        version=__version__,
        date=(today or datetime.date.today()).isoformat(),
        sections=sections(answer),
        library=library(),
    )


def _title(answer: Mapping[str, Any]) -> str:
    """Return the title of a report: `plan: llama-3.1-70b on 8x8xh100-sxm5-80gb`."""
    what = _COMMANDS.get(answer.get("command", ""), "report")
    model, cluster = answer.get("model"), answer.get("cluster")
    name = model["name"] if isinstance(model, Mapping) else model or Path(answer.get("file", "")).name
    varied = {"nodes", "cluster", "device", "devices_per_node"} & set(answer.get("vary", ()))
    on = f" on {cluster['name']}" if isinstance(cluster, Mapping) and "kinds" not in answer and not varied else ""
    return f"{what}: {name}{on}"


def _data(value: Any) -> str:
    """Return JSON that may stand in a script element."""
    import markupsafe

    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return markupsafe.Markup(text)
