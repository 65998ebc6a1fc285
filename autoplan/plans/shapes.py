"""The kinds of the values in the text of a plan, checked before anything reads them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autoplan.errors import PinError


@dataclass(frozen=True)
class ListOf:
    """A list whose items have one shape."""

    item: _Shape


@dataclass(frozen=True)
class NamesTo:
    """An object with any names, whose values have one shape."""

    value: _Shape


# float: any finite number. A tuple: one of these types. A mapping: an object; those of its names that are there count.
_Shape = type | tuple[type, ...] | Mapping[str, Any] | ListOf | NamesTo
_NULL = type(None)
_QUANTITY: _Shape = {"low": float, "mid": float, "high": float, "evidence": str}
_STAGE: _Shape = {
    "num_layers": int,
    "num_recomputed": int,
    "in_flight": int,
    "fullest": str,
    "forward_s": _QUANTITY,
    "backward_s": _QUANTITY,
}
_ESTIMATE: _Shape = {
    "step_time_s": _QUANTITY,
    **{n: float for n in ("tokens_per_s", "tokens_per_s_per_device", "mfu", "mfu_causal", "memory_capacity_bytes")},
    "host_memory_capacity_bytes": (float, _NULL),
    "stages": ListOf(_STAGE),
    "breakdown_s": NamesTo(_QUANTITY),
    "memory_bytes": ListOf(NamesTo(_QUANTITY)),
    "host_memory_bytes": ListOf(NamesTo(_QUANTITY)),
}
DOCUMENT: _Shape = {
    "model": {"name": str},
    "cluster": {"device": str},
    "made_for": {"autoplan": str, "graph": str},
    "request": {"seq_len": int, "target_len": (int, _NULL), "global_batch_size": int, "precision": str, "mode": str},
    "priced_not_executed": ListOf(str),
    "certificate": NamesTo(object),
    "graph": str,
    "program": {
        "axes": ListOf(ListOf((str, int))),
        "stages": ListOf(ListOf(str)),
        "recompute": NamesTo(str),
        "layout": NamesTo(str),
        "intra_cost_s": float,
        "intra_bound_s": float,
        "precision": str,
        "compiled": bool,
        "notes": ListOf(str),
        "capture": str,
    },
    "estimate": _ESTIMATE,
}
_WORDS = {
    Mapping: "an object",
    list: "a list",
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    _NULL: "null",
}


def check_shape(value: object, shape: _Shape, where: str, way_out: str) -> None:
    """Raise PinError for the first value of another kind than its shape says.

    Args:
        where: the place of the value, with which the message begins.
        way_out: what to do instead, with which it ends.
    """
    if isinstance(shape, Mapping | NamesTo):
        items = _of_kind(value, (Mapping,), where, way_out).items()
        inner = [(n, v, shape.get(n, object) if isinstance(shape, Mapping) else shape.value) for n, v in items]
    elif isinstance(shape, ListOf):
        inner = [(i, v, shape.item) for i, v in enumerate(_of_kind(value, (list, tuple), where, way_out))]
    else:
        kinds = shape if isinstance(shape, tuple) else (shape,)
        inner = []
        if object not in kinds:
            _of_kind(value, kinds, where, way_out)
    for name, item, of in inner:
        check_shape(item, of, f"{where}: {name}", way_out)


def _of_kind(value: Any, kinds: tuple[type, ...], where: str, way_out: str) -> Any:
    """Return a value that is of one of the kinds. Booleans are no numbers, and whole numbers are numbers."""
    for kind in kinds:
        number = kind in (int, float) and not isinstance(value, bool) and isinstance(value, kind | int)
        if (number and math.isfinite(value)) or (kind not in (int, float) and isinstance(value, kind)):
            return value
    words = " or ".join(_WORDS[kind] for kind in kinds if kind is not tuple)
    raise PinError(f"{where} must be {words}, not {json.dumps(value, default=str)[:80]}; {way_out}")
