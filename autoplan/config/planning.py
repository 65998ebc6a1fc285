"""Settings of a search: its time, how sure a plan must be to fit, which plans are equally fast, what is proved.

Their records are those of all choices (`autoplan.config.choice`). From them follow the options of every command that
searches, the keyword arguments of `plan`, `whatif` and `capacity`, the keys of files, proposed commands and checks.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypedDict, TypeGuard

from autoplan.config.choice import Written, choice, choices_of
from autoplan.config.keys import check_names
from autoplan.errors import PinError

HIGH_END_RISK = 0.05  # intervals are read as 90 %: one need in twenty is above the high end
EXPECTED_RISK = 0.5  # the expected need fits, with as much chance above as below
DEFAULT_RISK = HIGH_END_RISK
# Prices of two runs of one model on one cluster differ from the measured ratio by 2.2 % in the median of 147 published
# ablations (python -m experiments.published.ablation_table).
EQUAL_WITHIN = 0.02
# Shares of a step that a search may leave unproved: both are below the error of a price, and the bounds of models with
# experts are weaker. A full proof takes several times as long.
DENSE_GAP, EXPERTS_GAP = 0.01, 0.05
# Seconds after which `plan` and `explain` take the best plan so far. Most models of the catalog on 64 H100 are answered
# within 10 s on two cores then, and 37 of 39 by the plan of a search of a minute; the worst is 6.9 % slower
# (python -m experiments.plans.answer_time).
SCREEN_LIMIT_S = 8.0
NO_CACHE_VARIABLE = "AUTOPLAN_NO_CACHE"  # if this environment variable is not empty, no search keeps layouts
# If this environment variable is 1, a search has no helper on a second core; if it is 2, also where no core is free.
PROCESSES_VARIABLE = "AUTOPLAN_PROCESSES"


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _time_limit(name: str, value: object) -> str | None:
    return None if _is_number(value) and value >= 0 else f"{name}={value!r} must be a finite number of at least 0"


def _risk(name: str, value: object) -> str | None:
    if _is_number(value) and 0 < value <= EXPECTED_RISK:
        return None
    return (
        f"{name}={value!r}: must be above 0 and at most {EXPECTED_RISK} (the expected need just fits); {DEFAULT_RISK} "
        "keeps the high end of the interval within the memory"
    )


def _equal(name: str, value: object) -> str | None:
    if _is_number(value) and 0 <= value < 1:
        return None
    return (
        f"{name}={value!r}: must be at least 0 (take the fastest) and below 1; {EQUAL_WITHIN} counts plans within "
        f"{EQUAL_WITHIN:.0%} of the fastest as equal"
    )


def _gap(name: str, value: object) -> str | None:
    if value is None or (_is_number(value) and 0 <= value < 1):
        return None
    return (
        f"{name}={value!r}: must be at least 0 (prove that no plan is faster) and below 1; left out, it is "
        f"{DENSE_GAP}, or {EXPERTS_GAP} for a model with experts"
    )


def _switch(name: str, value: object) -> str | None:
    return None if isinstance(value, bool) else f"{name}={value!r} must be true or false"


@dataclass(frozen=True, kw_only=True)
class SearchSettings:
    """How a search is done.

    Attributes:
        time_limit_s: after this time the best plan so far is returned; while there is none, the search goes on for a
            while. Waiting for a core that other processes have counts a third (`autoplan.search.clock`).
        memory_risk: the accepted probability that a plan runs out of memory; 0.05 keeps the high end of every interval
            within the device, 0.5 the expected need.
        equal_within: plans whose step times are at most this share above the fastest count as equal: the simplest is
            taken (`autoplan.search.simplicity`); 0: the fastest.
        gap: the search ends when the best step of the space is proved to be at most this share shorter than the one
            found; None: 0.01, or 0.05 for a model with experts; 0: when nothing is left.
        cache: solved layouts are kept on disk for later searches (`autoplan.search.layout_files`), which find the same
            plan sooner.
    """

    time_limit_s: float = choice(
        60.0,
        "Seconds that a search may take; then the best plan so far is the answer, and said not to be proved.",
        written=Written.NUMBER,
        flags=("--time-limit",),
        obstacle=_time_limit,
        reported=False,
    )
    memory_risk: float = choice(
        DEFAULT_RISK,
        "Accepted probability that the plan runs out of memory: 0.05 keeps the high end of its memory within the "
        "device, 0.5 the expected need.",
        written=Written.NUMBER,
        obstacle=_risk,
    )
    equal_within: float = choice(
        EQUAL_WITHIN,
        "Plans within this share of the fastest step count as equal, and the simplest of them is taken; 0 takes the "
        "fastest.",
        written=Written.NUMBER,
        obstacle=_equal,
    )
    gap: float | None = choice(
        None,
        "The search ends when no plan can have a step shorter by more than this share; 0 proves the best; default: "
        f"{DENSE_GAP}, with experts {EXPERTS_GAP}.",
        written=Written.NUMBER,
        obstacle=_gap,
        may_be_open=True,
    )
    cache: bool = choice(
        True,
        "Keep solved layouts in the user's cache folder for later searches, which find the same plan sooner; "
        f"{NO_CACHE_VARIABLE}=1 turns it off for all commands.",
        written=Written.SWITCH,
        obstacle=_switch,
        reported=False,
    )

    @property
    def uses_cache(self) -> bool:
        """True if solved layouts are read from disk, and written there."""
        return self.cache and not os.environ.get(NO_CACHE_VARIABLE)

    def check(self) -> None:
        """Raise PinError for a value out of its range."""
        for record in SEARCH_SETTINGS:
            reason = record.reason(getattr(self, record.name))
            if reason is not None:
                raise PinError(reason)

    @property
    def search_words(self) -> dict[str, Any]:
        """These settings as keyword arguments."""
        return {record.name: getattr(self, record.name) for record in SEARCH_SETTINGS}


class SearchWords(TypedDict, total=False):
    """The fields of SearchSettings as keyword arguments."""

    time_limit_s: float
    memory_risk: float
    equal_within: float
    gap: float | None
    cache: bool


SEARCH_SETTINGS = choices_of(SearchSettings)
# Those that mean the same in all commands that search: of the time, each has a default of its own
OF_EVERY_COMMAND = tuple(record for record in SEARCH_SETTINGS if record.name != "time_limit_s")
# Those that decide which plan is found, whatever the time: what the file of a plan keeps
TOLERANCES = tuple(record for record in SEARCH_SETTINGS if record.reported)


def check_search_words(given: Mapping[str, Any], caller: str) -> None:
    """Raise PinError for a keyword argument of a function that searches which is no setting of a search."""
    check_names(given, (record.name for record in SEARCH_SETTINGS), f"{caller}()", "argument")


def tolerances_of(settings: SearchSettings) -> dict[str, Any]:
    """Return the tolerances of a search by name."""
    return {record.name: getattr(settings, record.name) for record in TOLERANCES}
