"""The tolerances of a search: how sure a plan must be to fit, which plans are equally fast, what is proved.

All are settings of `plan`, `whatif` and `capacity`, on the command line and in Python under the same names.
"""

from __future__ import annotations

import math

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
# Seconds after which `plan` and `explain` take the best plan so far. All models of the catalog on 64 H100 are answered
# within 10 s on two cores then, none by a plan more than 2 % slower than that of a search of a minute
# (python -m experiments.plans.answer_time).
SCREEN_LIMIT_S = 8.0


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def check_planning(memory_risk: float, equal_within: float, gap: float | None) -> None:
    """Raise PinError for a risk that no plan can be chosen by, or a share that says nothing about plans."""
    if not _is_number(memory_risk) or not 0 < memory_risk <= EXPECTED_RISK:
        raise PinError(
            f"memory_risk={memory_risk!r}: must be above 0 and at most {EXPECTED_RISK} (the expected need just fits); "
            f"{DEFAULT_RISK} keeps the high end of the interval within the memory"
        )
    if not _is_number(equal_within) or not 0 <= equal_within < 1:
        raise PinError(
            f"equal_within={equal_within!r}: must be at least 0 (take the fastest) and below 1; {EQUAL_WITHIN} counts "
            f"plans within {EQUAL_WITHIN:.0%} of the fastest as equal"
        )
    if gap is not None and (not _is_number(gap) or not 0 <= gap < 1):
        raise PinError(
            f"gap={gap!r}: must be at least 0 (prove that no plan is faster) and below 1; left out, it is "
            f"{DENSE_GAP}, or {EXPERTS_GAP} for a model with experts"
        )
