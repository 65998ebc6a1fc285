"""Lines of the user's code in a stack of calls, for errors."""

from __future__ import annotations

import traceback
from collections.abc import Sequence


def place_of_frame(stack: Sequence[traceback.FrameSummary]) -> str:
    """Return the innermost frame outside torch and numpy, as 'file:line (text): '."""
    for frame in reversed(stack):
        named = not frame.filename.startswith("<")  # text that Python made
        if named and not any(part in frame.filename for part in ("/torch/", "/numpy/", "autoplan/capture")):
            return f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno} ({frame.line}): "
    return ""
