"""The few global constants of the cost model: what whole steps add to the kernels and collectives they are made of.

    constants = Constants.shipped()                     # profiles/constants.json, fitted to published steps
    constants = Constants.load("mine.json")             # of `autoplan calibrate`
    constants.with_({"host_fused_s": 3e-5})

Kernels and collectives have constants of their own, fitted to published timings of kernels and collectives
(profiles/kernels, profiles/links). These here are what only whole training steps show: how much of a burst's speed a
device keeps, what the host needs per operation, what overlaps. None is of a row, a campaign or a model. Each was fitted
to steps of at least three campaigns, or is assumed; the file says which, with the error of leaving campaigns out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from autoplan.errors import ProfileError

# Families of accelerators and classes of precision with a share of a burst's speed of their own.
_SUSTAINED = {
    ("ampere", "half"): "sustained_ampere",
    ("hopper", "half"): "sustained_hopper",
    ("hopper", "fp8"): "sustained_hopper_fp8",
    ("blackwell", "half"): "sustained_blackwell",
    ("blackwell", "fp8"): "sustained_blackwell_fp8",
    ("blackwell", "fp4"): "sustained_blackwell_fp8",
}

# Waiting for the host beyond this share of a step makes a class of its own: hosts and versions of a framework differ by
# more than devices do.
HOST_SHARE = 0.2
OF_FAMILY = " of "


def class_of_step(experts: bool, host_share: float, family: str = "") -> str:
    """Steps that err alike: `host`, where the device waits for it, `experts` or `dense`; of one family of devices where
    one is given (`dense of blackwell`: software for a new family changes faster), which matters to all but `host`."""
    if host_share > HOST_SHARE:
        return "host"
    kind = "experts" if experts else "dense"
    return f"{kind}{OF_FAMILY}{family}" if family else kind


@dataclass(frozen=True, eq=True)
class Constants:
    """All of them; shares without a unit.

    Attributes:
        sustained_*: share of the speed of short bursts of products and attention that long training keeps (power).
        power_exponent: sustained speed grows with the power of a device to this, among devices of one family.
        memory_share: share of the data sheet's bandwidth that memory-bound kernels reach.
        attention_share: speed of attention in training over that of the fitted timings (of inference runtimes).
        grouped_share: speed of products of experts over plain ones of the same sizes.
        fused_grouped_share: the same where one kernel does products, activation and casts (`RunOptions.fused_experts`):
            of the grouped products of DeepGEMM (README of its first release, 10 rows of 256 to 8192 rows per expert).
        imbalance: rows of the fullest rank's experts over the mean: the one factor for uneven routing.
        host_eager_s: seconds that the host needs per operation and pass, op by op (launch `async` or `blocking`).
        host_fused_s: the same of fused modules of Megatron and Transformer Engine.
        host_blocking_s: seconds per operation and pass where the host waits for every kernel (launch `blocking`).
        host_comm_s: seconds per collective of tp, cp and ep inside a block.
        host_experts_s: the same as `host_fused_s` of one call of experts (routing, sorting, waiting for the sizes).
        host_expert_s: the same per expert of a rank, where each has products of its own.
        host_fp8: factor on `host_fused_s` where products are 8 bits (amax, scales, casts).
        overlap: share of ZeRO's traffic that hides behind compute.
        contention: seconds that computing takes longer per second of ZeRO's traffic beside it: its kernels take
            multiprocessors and bandwidth of the memory (DeepSeek-V3 sets 20 of 132 aside, arXiv 2412.19437, section
            3.2.2).
        tp_hidden, ep_hidden: share of the collectives of tp and ep that hides where the run overlaps them.
        network_share: bandwidth of networks among other traffic over that of collective benchmarks.
        step_intervals: by class of step (`class_of_step`): between which shares of the predicted step 9 of 10
            measured ones are to lie, from campaigns that had no part in the fit; the file says what share of them
            does. No constant of the model; () if not known.
    """

    sustained_ampere: float = 0.96
    sustained_hopper: float = 0.96
    sustained_hopper_fp8: float = 0.96
    sustained_blackwell: float = 0.96
    sustained_blackwell_fp8: float = 0.96
    power_exponent: float = 0.6
    memory_share: float = 0.85
    attention_share: float = 1.0
    grouped_share: float = 0.6344
    fused_grouped_share: float = 0.91
    imbalance: float = 1.0
    host_eager_s: float = 10e-6
    host_fused_s: float = 300e-6
    host_comm_s: float = 100e-6
    host_blocking_s: float = 150e-6
    host_experts_s: float = 3e-3
    host_expert_s: float = 1e-4
    host_fp8: float = 1.2
    overlap: float = 0.8
    contention: float = 0.15
    tp_hidden: float = 0.5
    ep_hidden: float = 0.5
    network_share: float = 1.0
    step_intervals: tuple[tuple[str, float, float], ...] = ()

    def __post_init__(self) -> None:
        for name, value in self.values.items():
            if not (isinstance(value, int | float) and 0 <= value < math.inf):
                raise ProfileError(f"constant {name}={value!r} must be a finite number of at least 0")
            if name.startswith("sustained") or name.endswith("_share"):
                if not 0 < value <= 2:
                    raise ProfileError(f"constant {name}={value!r} is a share; it must lie in (0, 2]")
            elif name in ("overlap", "contention", "tp_hidden", "ep_hidden") and value > 1:
                raise ProfileError(f"constant {name}={value!r} is a share; it must lie in [0, 1]")
            elif name in ("imbalance", "host_fp8") and value < 1:
                raise ProfileError(f"constant {name}={value!r} is a factor of at least 1")

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((tuple(self.values.items()), self.step_intervals))

    @property
    def values(self) -> dict[str, float]:
        """By name."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "step_intervals"}

    def step_interval(self, name: str) -> tuple[float, float] | None:
        """Shares of a predicted step of this class between which a measured one lies: of its family of devices, else of
        all; None if not known."""
        for wanted in (name, name.partition(OF_FAMILY)[0]):
            for known, low, high in self.step_intervals:
                if known == wanted:
                    return low, high
        return None

    def sustained(self, family: str, kind: str) -> float:
        """Share of a burst's speed; that of the family's 16-bit products where the class has none of its own."""
        name = _SUSTAINED.get((family, kind)) or _SUSTAINED.get((family, "half")) or _SUSTAINED["ampere", "half"]
        return float(getattr(self, name))

    def with_(self, values: Mapping[str, float]) -> Constants:
        """Some of them replaced. ProfileError names an unknown one and the known ones."""
        known = self.values
        for name in values:
            if name not in known:
                raise ProfileError(f"constant {name!r} is not known; known are {', '.join(known)}")
        return replace(self, **values)  # type: ignore[arg-type]

    @staticmethod
    @lru_cache(maxsize=1)
    def shipped() -> Constants:
        """Those of this version."""
        text = files("autoplan.profiles").joinpath("constants.json").read_text(encoding="utf-8")
        return constants_of(json.loads(text), "profiles/constants.json", Constants())

    @staticmethod
    def load(path: str | Path) -> Constants:
        """Of a file that `autoplan calibrate` wrote. ProfileError for a file that cannot be read or has other names."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ProfileError(f"constants {path} cannot be read: {error}") from error
        return constants_of(data, f"constants {path}", Constants.shipped())


def constants_of(data: Any, where: str, base: Constants) -> Constants:
    """From the data of a file: `constants` by name, each a number or a mapping with `value`; the rest as in `base`."""
    if not isinstance(data, Mapping) or not isinstance(data.get("constants"), Mapping):
        raise ProfileError(f"{where}: a mapping with the key 'constants' is needed")
    values: dict[str, float] = {}
    for name, entry in data["constants"].items():
        value = entry.get("value") if isinstance(entry, Mapping) else entry
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ProfileError(f"{where}: {name}={value!r} is not a number")
        values[name] = float(value)
    found = base.with_(values)
    if "step_intervals" in data:
        found = replace(found, step_intervals=_intervals(data["step_intervals"], where))
    return found


def _intervals(data: Any, where: str) -> tuple[tuple[str, float, float], ...]:
    out = []
    for name, entry in data.items() if isinstance(data, Mapping) else [("step_intervals", data)]:
        try:
            low, high = float(entry["low"]), float(entry["high"])
        except (TypeError, KeyError, ValueError):
            raise ProfileError(f"{where}: {name}={entry!r} must have low and high") from None
        if not 0 < low <= 1 <= high < math.inf:
            raise ProfileError(f"{where}: {name} from {low} to {high} must hold 1")
        out.append((str(name), low, high))
    return tuple(out)
