"""The timeout of collectives, from an argument or the environment."""

from __future__ import annotations

import os
from datetime import timedelta

DEFAULT_TIMEOUT_S = 600.0
TIMEOUT_VARIABLE = "AUTOPLAN_TIMEOUT_S"
_LONGEST_S = 1e9  # 30 years


def timeout_of(timeout_s: float | None = None) -> timedelta:
    """Return the timeout of collectives: the argument, else AUTOPLAN_TIMEOUT_S, else 600; all in seconds.

    Raises:
        ValueError: it is not a positive number, or too many seconds for torch.
    """
    given: object = timeout_s
    text = os.environ.get(TIMEOUT_VARIABLE, "") if given is None else ""
    name = TIMEOUT_VARIABLE if text else "timeout_s"
    if given is None:
        try:
            given = float(text or DEFAULT_TIMEOUT_S)
        except ValueError:
            given = text
    if not isinstance(given, (int, float)) or isinstance(given, bool) or not 0 < given <= _LONGEST_S:
        raise ValueError(
            f"{name}={given!r} must be a positive number of seconds, at most {_LONGEST_S:.0e}; by default it is "
            f"{DEFAULT_TIMEOUT_S:.0f}"
        )
    return timedelta(seconds=given)
