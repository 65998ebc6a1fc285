"""What is typed on the command line as values: pins, lists, what is varied. PinError says what would work."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from autoplan.cost_models.config import RECOMPUTE, Attention, Dispatcher, Launch, RunOptions
from autoplan.cost_models.errors import PinError
from autoplan.cost_models.run import Assumptions
from autoplan.report.numbers import read_count, read_series
from autoplan.sweep import TEXTS, VARIED, WHOLE

_COMMA = re.compile(r",(?!\s*[A-Za-z_]+\s*=)")  # not that of `@nic=400,price=2`
_PIN = re.compile(r",(?=\s*[A-Za-z_]+\s*=)")
_SHORT = {"gbs": "global_batch_size", "seq": "seq_len"}


def read_pins(texts: Sequence[str]) -> dict[str, Any]:
    """`tp=8`, `stages=10,11,11`, and several of them in one text: `tp=8,pp=2`."""
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


def read_assumptions(texts: Sequence[str]) -> Assumptions:
    """`mtbf_device_days=2000`, and several of them in one text: `pue=1.1,usd_per_kwh=0.08`."""
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


def read_list(what: str, text: str) -> tuple[int, ...]:
    """`10,11,11`."""
    if re.fullmatch(r"\d+(,\d+)*", text.replace(" ", "")) is None:
        raise PinError(f"{what}: must be whole numbers with commas, for example 10,11,11")
    return tuple(int(part) for part in text.split(","))


def read_vary(texts: Sequence[str]) -> dict[str, list[Any]]:
    """`nodes=8,16`, `nic=100..1600` (doubled), `device=h100-sxm5-80gb,h200-sxm-141gb`: lists of values by name."""
    out: dict[str, list[Any]] = {}
    for text in texts:
        name, equals, values = (piece.strip() for piece in text.partition("="))
        name = _SHORT.get(name, name.replace("-", "_"))
        if not equals or not values:
            raise PinError(f"vary {text!r} is not name=values, for example --vary nodes=8,16,32")
        if name in out:
            raise PinError(f"vary {name} is given twice; write all values with commas")
        if name not in VARIED:
            raise PinError(f"cannot vary {name!r}; what can be varied: {', '.join(VARIED)}")
        if name in TEXTS:
            out[name] = [part.strip() for part in _COMMA.split(values) if part.strip()]
        elif name == "zero_stage":  # may be 0
            out[name] = [
                0 if part.strip() == "0" else read_count(part, "vary zero_stage") for part in values.split(",")
            ]
        else:
            out[name] = list(read_series(values, f"vary {name}", whole=name in WHOLE, binary_k=name in WHOLE))
    return out


def read_recompute(text: str) -> str | tuple[int, ...]:
    """`none`, `selective`, `full`, or layers per stage."""
    if text in RECOMPUTE:
        return text
    if re.fullmatch(r"\d+(,\d+)*", text):
        return read_list(f"--recompute {text}", text)
    raise PinError(f"recompute {text!r} is not known; use {', '.join(RECOMPUTE)}, or layers per stage: 3,0,0,0")


def read_options(attention: str | None, launch: str, overlap: str | None, dispatcher: str | None = None) -> RunOptions:
    """The kernel of attention, how kernels start, what overlaps, by comma: `tp,ep`, and how rows travel to experts."""
    if dispatcher is not None and dispatcher not in tuple(Dispatcher):
        raise PinError(f"dispatcher {dispatcher!r} is not known; use {', '.join(Dispatcher)}")
    if attention is not None and attention not in tuple(Attention):
        raise PinError(f"attention {attention!r} is not known; use {', '.join(Attention)}")
    if launch not in tuple(Launch):
        raise PinError(f"launch {launch!r} is not known; use {', '.join(Launch)}")
    beside = frozenset(part.strip() for part in (overlap or "").split(",") if part.strip())
    kernel = None if attention is None else Attention(attention)
    return RunOptions(kernel, Launch(launch), beside, Dispatcher(dispatcher or Dispatcher.ALL_TO_ALL))
