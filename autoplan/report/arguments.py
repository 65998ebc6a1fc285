"""Read the text arguments of the command line: pins, assumptions, degrees, varied values.

Every PinError says what would work.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from autoplan.config.choice import choices_of
from autoplan.config.keys import check_names
from autoplan.config.numbers import read_list, read_series
from autoplan.config.parallel import ParallelConfig
from autoplan.cost_models.whole_run import Assumptions
from autoplan.errors import PinError
from autoplan.plans.document import tuples
from autoplan.program.facts import facts_of_model
from autoplan.search.request import PlanRequest
from autoplan.sweeps.whatif import LISTS, RANGES, TEXTS, VARIED, WHOLE_NUMBERS

_COMMA = re.compile(r",(?!\s*[A-Za-z_]+\s*=)")  # not the commas of `@nic=400,price=2`
_PIN = re.compile(r",(?=\s*[A-Za-z_]+\s*=)")
_SHORT = {"gbs": "global_batch_size", "seq": "seq_len"}


def import_from_here() -> None:
    """Let Python find `package.module:factory` in the current folder, as `python -m` would."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def read_pin_words(texts: Sequence[str] | Mapping[str, Any]) -> dict[str, Any]:
    """Read pins: `tp=8`, `stages=10,11,11`, or several in one text: `tp=8,pp=2`. A mapping has values by name."""
    if isinstance(texts, Mapping):
        return {name: tuples(value) for name, value in texts.items()}
    pins: dict[str, Any] = {}
    for text in texts:
        for part in _PIN.split(text):
            name, equals, value = (piece.strip() for piece in part.partition("="))
            if not equals or not name or not value:
                raise PinError(f"pin {part!r} is not name=value, for example --pin tp=8")
            if name in pins:
                raise PinError(f"pin {name} is given twice")
            pins[name] = _read_value(name, value)
    return pins


def _read_value(name: str, value: str) -> object:
    if name == "stages":
        return read_list(f"pin stages={value}", value)
    if re.fullmatch(r"[+-]?\d+", value):
        return int(value)
    return float(value) if re.fullmatch(r"[+-]?\d+\.\d*", value) else value


def read_degrees(given: Mapping[str, Any], layers: Sequence[str]) -> dict[str, Any]:
    """Return the values of typed degrees by name; None (omitted) stays None. `layers`: of the model, in order."""
    out = dict(given)
    for record in choices_of(ParallelConfig):
        text = given.get(record.name)
        if record.read is not None and text is not None:
            out[record.name] = record.read(text, layers)
    return out


def read_assumptions(texts: Sequence[str]) -> Assumptions:
    """Read assumptions: `mtbf_device_days=2000`, or several in one text: `pue=1.1,usd_per_kwh=0.08`."""
    given: dict[str, object] = {}
    for text in texts:
        for part in text.split(","):
            name, _, value = (piece.strip() for piece in part.partition("="))
            if name in given:
                raise PinError(f"--assume {name} is given twice")
            try:
                given[name] = float(value)
            except ValueError:
                raise PinError(f"--assume {part!r} is not name=number, for example --assume pue=1.1") from None
    return Assumptions.of(given, "--assume")


def read_vary(texts: Sequence[str]) -> dict[str, list[Any]]:
    """Read lists of values by name.

    Forms: `nodes=8,16`, `nic=100..1600` (doubled), `device=h100-sxm5-80gb,h200-sxm-141gb`, `stages=8,8/10,6`.
    """
    out: dict[str, list[Any]] = {}
    for text in texts:
        name, equals, values = (piece.strip() for piece in text.partition("="))
        name = _SHORT.get(name, name.replace("-", "_"))
        if not equals or not values:
            raise PinError(f"vary {text!r} is not name=values, for example --vary nodes=8,16,32")
        if name in out:
            raise PinError(f"vary {name} is given twice; write all values with commas")
        check_names((name,), VARIED, "vary", "name")
        if name in TEXTS or name in LISTS:
            parts = _values(name, values)
            out[name] = [read_list(f"vary {name}={part}", part) for part in parts] if name in LISTS else parts
        else:
            whole = name in WHOLE_NUMBERS
            out[name] = list(read_series(values, f"vary {name}", whole=whole, binary=whole, within=RANGES.get(name)))
    return out


def _values(name: str, text: str) -> list[str]:
    """Split values at commas, or at `/` if a value has commas itself: `stages=8,8/10,6`."""
    if "/" not in text and (name in LISTS or re.search(r"modules:[^,]*,", text)):
        if name in LISTS:
            return [text]
        raise PinError(f"vary {name}={text}: write / between values, for example recompute=full/modules:core_attn,mlp")
    parts = text.split("/") if "/" in text and name not in ("device", "cluster") else _COMMA.split(text)
    return [part.strip() for part in parts if part.strip()]


def imbalance_of(request: PlanRequest) -> dict[str, Any] | None:
    """Return the assumed imbalance of routing: `{"value", "what", "source"}`; None for a model without experts."""
    if not facts_of_model(request.graph).num_experts:
        return None
    shipped = "stated, not fitted: published runs with experts force balance; to change: --constants FILE"
    return {
        "value": request.constants.imbalance,
        "what": "rows of the fullest rank's experts over the mean",
        "source": shipped if request.constants_file is None else f"constants of {request.constants_file}",
    }
