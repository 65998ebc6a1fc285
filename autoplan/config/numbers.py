"""Numbers as people write and read them.

Reading: `8k`, `300B`, `16..128`, `10,11,11`. Writing: seconds, GB, days and dollars.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from autoplan.errors import PinError

_DECIMAL = {"": 1, "k": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_BINARY = {suffix: 1024**power for power, suffix in enumerate(_DECIMAL)}


@dataclass(frozen=True)
class Range:
    """The legal values of a figure: a finite number from `least` to `most`, in `unit`; whole numbers only if `whole`.

    The bounds lie far beyond any hardware. They catch mistaken units and values that would overflow.
    """

    least: float
    most: float
    unit: str = ""
    whole: bool = False

    def __str__(self) -> str:
        kind = "a whole number" if self.whole else "a number"
        ends = (f"{end:,}" if self.whole else f"{end:g}" for end in (self.least, self.most))
        return f"{kind} from {' to '.join(ends)}{' ' * bool(self.unit)}{self.unit}"

    def nearest(self, value: float) -> float:
        """Return the value in the range that is nearest to `value`."""
        return min(max(value, self.least), self.most)

    def check(self, value: object, what: str) -> float:
        """Return `value` as a number. Raises PinError with `what`=value and the range if it is illegal."""
        known = int if self.whole else int | float
        if isinstance(value, bool) or not isinstance(value, known) or not self.least <= value <= self.most:
            raise PinError(f"{what}={value!r} must be {self}")
        return value


def is_finite(value: float) -> bool:
    """Return True for a number that a float can hold; a whole number of Python may be too large for one."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def without_numpy(value: Any) -> Any:
    """Return a number of numpy as Python's, an array as a list, and everything else as it is; in a list likewise."""
    if type(value) in (list, tuple):
        return type(value)(map(without_numpy, value))
    return value.tolist() if hasattr(value, "tolist") else value


def read_number(text: str, what: str, *, binary: bool = False) -> float:
    """Return a positive number with an optional suffix k, M, B, T. PinError names `what`.

    Args:
        binary: True if suffixes are powers of 1024, as in lengths and batches: 8k tokens of a sequence are 8,192, 1M
            are 1,048,576. False if they are powers of 1000, as in the size of a run: 300B tokens are 300,000,000,000.
    """
    match = re.fullmatch(r"(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?)([kKMBGT]?)", text.strip().replace("_", ""))
    if match is None or not 0 < float(match.group(1)) < 1e30:
        units = "powers of 1024" if binary else "thousands to trillions"
        raise PinError(f"{what} {text!r} must be a number above 0, with k, M, B or T for {units}")
    suffix = {"K": "k", "G": "B"}.get(match.group(2), match.group(2))
    return float(match.group(1)) * (_BINARY if binary else _DECIMAL)[suffix]


def read_count(text: str, what: str, *, binary: bool = True) -> int:
    """Return a positive whole number, read as `read_number` does. PinError names `what`."""
    value = read_number(text, what, binary=binary)
    if value != int(value):
        raise PinError(f"{what} {text!r} must be a whole number")
    return int(value)


def read_series(text: str, what: str, *, whole: bool, binary: bool, within: Range | None = None) -> list[float]:
    """Return the values of `8,16,32`, or of `100..1600`, which doubles the first value up to and including the last.

    Raises: PinError for a value outside of `within`, before any range is expanded.
    """

    def read(part: str) -> float:
        if part == "0" and within is not None and within.least == 0:
            return 0
        number = read_count(part, what, binary=binary) if whole else read_number(part, what, binary=binary)
        if within is not None and not within.least <= number <= within.most:
            near = f"{within.nearest(number):g}" if not whole else str(int(within.nearest(number)))
            nearest = near.join(text.rsplit(part, 1))
            raise PinError(f"{what}={text}: {part} must be {within}; nearest that works: {nearest}")
        return number

    out: list[float] = []
    for part in text.split(","):
        first, dots, last = (piece.strip() for piece in part.partition(".."))
        value = read(first)
        if not dots:
            out.append(value)
            continue
        if not value:
            raise PinError(f"{what} {part!r}: 0 cannot be doubled; write the values with commas")
        end = read(last)
        if end < value:
            raise PinError(f"{what} {part!r}: the range ends before it starts; write {last}..{first}")
        while value < end:
            out.append(value)
            value *= 2
        out.append(end)
    return list(dict.fromkeys(out))


def read_list(what: str, text: str) -> tuple[int, ...]:
    """Return the numbers of `10,11,11`. PinError names `what`."""
    if re.fullmatch(r"\d+(,\d+)*", text.replace(" ", "")) is None:
        raise PinError(f"{what} {text!r} must be whole numbers separated by commas, for example 10,11,11")
    return tuple(int(part) for part in text.split(","))


_HOURS = {"h": 1, "d": 24, "w": 168, "": 24}


def read_days(text: str, what: str) -> float:
    """Return the days of `30d`, `36h`, `6w` or `30`. PinError names `what`."""
    match = re.fullmatch(r"(\d+(?:\.\d*)?)\s*([hdw]?)", text.strip())
    if match is None or not float(match.group(1)) > 0:
        raise PinError(f"{what} {text!r} must be a time above 0: hours, days or weeks, for example 36h, 30d or 6w")
    return float(match.group(1)) * _HOURS[match.group(2)] / 24


def scaled(value: float) -> str:
    """Format a number as `8.03 B` or `131 k`: three digits and a suffix."""
    for suffix in ("T", "B", "M", "k"):
        if value >= 0.9995 * _DECIMAL[suffix]:
            return f"{value / _DECIMAL[suffix]:.3g} {suffix}"
    return f"{value:.3g}"


def digits(value: float) -> str:
    """Format a number with three digits: `1.70`, `63.5`, `1,234`, `0.0123`."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    places = 2 - math.floor(math.log10(abs(float(f"{value:.2e}"))))
    return f"{value:,.{min(6, max(0, places))}f}"


def signed(value: float) -> str:
    """Format a difference: `+0.818`, `-1.61`; `0` where it is nothing."""
    text = digits(abs(value))
    return "0" if not float(text.replace(",", "")) else f"{'-' if value < 0 else '+'}{text}"


def gigabytes(num_bytes: float) -> str:
    """Format bytes as `63.5 GB`; GB is 1e9 bytes."""
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 5e7 else f"{num_bytes / 1e6:.1f} MB"


def percent(share: float) -> str:
    """Format a share as `47 %` or `0.3 %`."""
    value = 100 * share
    return f"{value:.0f} %" if value >= 9.95 or value == 0 else f"{value:.1f} %" if value >= 0.05 else "<0.1 %"


def uptime(share: float) -> str:
    """Format a share as `92.6 %` or `99.96 %`; a share below 1 is never rounded up to 100 %."""
    places = next((n for n in (1, 2, 3, 4) if round(100 * share, n) < 100), 1)
    return f"{100 * share:.{places}f} %"


def days(value: float) -> str:
    """Format days as `26.6 d` or `5.1 h`."""
    if value * 24 < 1:
        return f"{value * 1440:.2g} min"
    if value < 2:
        return f"{value * 24:.1f} h"
    return f"{value:.1f} d" if value < 1000 else f"{value:,.0f} d"


def energy(kwh: float) -> str:
    """Format energy in kWh as `812 kWh`, `12.3 MWh` or `1.21 GWh`."""
    for unit, factor in (("GWh", 1e6), ("MWh", 1e3)):
        if kwh >= 0.9995 * factor:
            return f"{digits(kwh / factor)} {unit}"
    return f"{digits(kwh)} kWh"


def dollars(value: float) -> str:
    """Format US dollars as `$562k`, `$1.24M` or `$87`."""
    if value >= 999_500:
        return f"${value / 1e6:,.3g}M" if value < 999.5e6 else f"${value / 1e9:,.3g}B"
    return f"${value / 1e3:.3g}k" if value >= 9995 else f"${value:,.0f}" if value >= 10 else f"${value:.2f}"


def plain_number(value: object) -> str:
    """Format a value of a table: whole numbers without a decimal point."""
    if isinstance(value, float):
        return f"{value:,.0f}" if value == int(value) else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
