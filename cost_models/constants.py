"""Global constants of the cost model: effects that only whole steps show, beyond their kernels and collectives.

    constants = Constants.shipped()                     # profiles/constants.json, fitted to published steps
    constants = Constants.load("mine.json")             # of `autoplan calibrate`
    constants.with_({"host_fused_s": 3e-5})

Kernels and collectives have constants of their own, fitted to published timings of kernels and collectives
(profiles/kernels, profiles/links). The constants here can be seen only in whole training steps: the share of its burst
speed that a device sustains, the host's time per operation, the share of traffic that overlaps. None belongs to a row,
a campaign or a model. Each was fitted to steps of at least three campaigns, or is assumed; the file says which, with
the error of leaving campaigns out.
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
from autoplan.files import json_of

# (family of accelerators, class of precision) -> the constant with its sustained share of burst speed.
_SUSTAINED = {
    ("ampere", "half"): "sustained_ampere",
    ("hopper", "half"): "sustained_hopper",
    ("hopper", "fp8"): "sustained_hopper_fp8",
    ("blackwell", "half"): "sustained_blackwell",
    ("blackwell", "fp8"): "sustained_blackwell_fp8",
    ("blackwell", "fp4"): "sustained_blackwell_fp8",
}

# Steps that wait for the host beyond this share form a class of their own: hosts and versions of a framework differ by
# more than devices do.
HOST_SHARE = 0.2
# Steps of dense models that wait for data-parallel and pipeline traffic beyond this share form a class of their own:
# such traffic leaves the node, over networks that are shared and differ more than devices do.
NETWORK_SHARE = 0.15
OF_FAMILY = " of "


def class_of_step(experts: bool, host_share: float, network_share: float = 0.0, family: str = "") -> str:
    """Return the class of steps that err alike.

    `host` if the device waits for the host, else `experts`, or `network` if it waits for traffic between nodes, or
    `dense`. With a family of devices the class is narrower (`dense of blackwell`), because software for a new family
    changes faster. The class `host` has no families.

    Args:
        host_share: The share of the step that the device waits for the host.
        network_share: The share of the step that it waits for data-parallel and pipeline traffic.
    """
    if host_share > HOST_SHARE:
        return "host"
    kind = "experts" if experts else "network" if network_share > NETWORK_SHARE else "dense"
    return f"{kind}{OF_FAMILY}{family}" if family else kind


@dataclass(frozen=True, eq=True)
class Constants:
    """All global constants. Shares have no unit.

    Attributes:
        sustained_*: Share of the burst speed of products and attention that long training sustains (limited by power).
        power_exponent: Sustained speed grows with a device's power to this exponent, among devices of one family.
        memory_share: Share of the data sheet's bandwidth that memory-bound kernels reach.
        attention_share: Speed of attention in training over the speed in the fitted timings (of inference runtimes).
        grouped_share: Speed of large products of experts over plain products of the same sizes.
        grouped_product_s: Device seconds that each product of experts takes beyond that, if each is a kernel of its own
            (Transformer Engine's GroupedLinear: kernels that start, end and cast by themselves on a few streams), so
            that small products are slow.
        fused_grouped_share: As grouped_share, if one kernel does products, activation and casts
            (`RunOptions.fused_experts`); from the grouped products of DeepGEMM (README of its first release, 10 rows of
            256 to 8192 rows per expert).
        imbalance: Rows of the fullest rank's experts over the mean: the only factor for uneven routing.
        host_eager_s: Host seconds per operation, one operation at a time (launch `async`). No published step waits for
            it; with `host_call_s` it is from the three trainings of experiments/gpu that wait for the host of an H200
            (Llama and Mixtral of hidden size 1,024, and that Llama compiled).
        host_call_s: The same per compiled block and pass: guards, autograd, the launchers of its own kernels.
        host_fused_s: Host seconds per fused module of Megatron and Transformer Engine and pass.
        host_blocking_s: Seconds per kernel if the host waits for each (launch `blocking`).
        host_hook_s: Host seconds per hook of ZeRO 3 around a module, of which a pass has two (DeepSpeed;
            `RunOptions.module_hooks`).
        host_comm_s: Host seconds per collective of tp, cp and ep inside a block.
        host_experts_s: As `host_fused_s`, for one call of experts (routing, sorting, waiting for the sizes).
        host_router_s: The part of host_experts_s that CUDA graphs of the router and of the dispatch's preparation save
            (Megatron-Core's cuda_graph_scope `moe_router, moe_preprocess`).
        host_expert_s: Host seconds per expert of a rank, if each expert has products of its own.
        host_fp8: Factor on `host_fused_s` and the host's time for experts with 8-bit products (amax, scales, casts).
        overlap: Share of compute time behind which ZeRO's traffic can hide.
        contention: Seconds that compute slows down per second of ZeRO's or experts' traffic beside it, whose kernels
            take multiprocessors and memory bandwidth (DeepSeek-V3 reserves 20 of 132, arXiv 2412.19437, section 3.2.2).
        block_contention: The same for what ZeRO 3 sends of every block in every pass, for which parameters are also
            copied into and out of the buffers that are sent (torch.distributed.fsdp, XLA).
        tp_hidden: Share of the collectives of tp that hides if the run overlaps them.
        ep_hidden: Share of a block's compute behind which the exchanges of experts hide if the run overlaps them (with
            that of another micro-batch, as DualPipe and Megatron-Core's 1F1B overlap do).
        network_share: Bandwidth of networks among other traffic over the bandwidth in collective benchmarks.
        step_intervals: By class of step (`class_of_step`): the shares of the predicted step between which 9 of 10
            measured steps should lie, from campaigns that had no part in the fit; the file says what share of them
            does. Not a constant of the model; () if not known.
    """

    sustained_ampere: float = 0.96
    sustained_hopper: float = 0.96
    sustained_hopper_fp8: float = 0.96
    sustained_blackwell: float = 0.96
    sustained_blackwell_fp8: float = 0.96
    power_exponent: float = 0.6
    memory_share: float = 0.85
    attention_share: float = 1.0
    grouped_share: float = 0.85
    grouped_product_s: float = 5e-6
    fused_grouped_share: float = 0.91
    imbalance: float = 1.0
    host_eager_s: float = 16e-6
    host_call_s: float = 500e-6
    host_fused_s: float = 300e-6
    host_hook_s: float = 110e-6
    host_comm_s: float = 100e-6
    host_blocking_s: float = 150e-6
    host_experts_s: float = 3e-3
    host_router_s: float = 2.5e-3
    host_expert_s: float = 1e-4
    host_fp8: float = 1.2
    overlap: float = 0.8
    contention: float = 0.15
    block_contention: float = 0.44
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
            elif name in ("overlap", "contention", "block_contention", "tp_hidden", "ep_hidden") and value > 1:
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
        """The constants by name."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "step_intervals"}

    def step_interval(self, name: str) -> tuple[float, float] | None:
        """Return the shares of a predicted step of this class between which a measured step lies; None if not known.

        The interval of the class within its family of devices is preferred over the interval of the class; a file that
        knows no `network` has it in `dense`.
        """
        kind, of, family = name.partition(OF_FAMILY)
        for wanted in (name, kind, *((f"dense{of}{family}", "dense") if kind == "network" else ())):
            for known, low, high in self.step_intervals:
                if known == wanted:
                    return low, high
        return None

    def sustained(self, family: str, kind: str) -> float:
        """Return the sustained share of burst speed.

        It is the share of the family's 16-bit products if the class of precision has none of its own.
        """
        name = _SUSTAINED.get((family, kind)) or _SUSTAINED.get((family, "half")) or _SUSTAINED["ampere", "half"]
        return float(getattr(self, name))

    def with_(self, values: Mapping[str, float]) -> Constants:
        """Return a copy with some constants replaced. Raises ProfileError for an unknown name, with the known names."""
        known = self.values
        for name in values:
            if name not in known:
                raise ProfileError(f"constant {name!r} is not known; known are {', '.join(known)}")
        return replace(self, **values)  # type: ignore[arg-type]

    @staticmethod
    @lru_cache(maxsize=1)
    def shipped() -> Constants:
        """Return the constants of this version."""
        text = files("autoplan.profiles").joinpath("constants.json").read_text(encoding="utf-8")
        return constants_of(json.loads(text), "profiles/constants.json", Constants())

    @staticmethod
    def load(path: str | Path) -> Constants:
        """Read the constants from a file that `autoplan calibrate` wrote.

        Raises: ProfileError for a file that cannot be read or has unknown names.
        """
        try:
            data = json_of(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ProfileError(f"constants {path} cannot be read: {error}") from error
        return constants_of(data, f"constants {path}", Constants.shipped())


def constants_of(data: Any, where: str, base: Constants) -> Constants:
    """Return the constants in the data of a file; constants that it lacks are as in `base`.

    The data has `constants` by name, each a number or a mapping with `value`.
    """
    if not isinstance(data, Mapping) or not isinstance(data.get("constants"), Mapping):
        raise ProfileError(f"{where} must be a mapping with the key 'constants'")
    values: dict[str, float] = {}
    for name, entry in data["constants"].items():
        value = entry.get("value") if isinstance(entry, Mapping) else entry
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ProfileError(f"{where}: {name}={value!r} is not a number")
        try:
            values[name] = float(value)
        except OverflowError:
            raise ProfileError(f"{where}: {name} is too large for a number") from None
    found = base.with_(values)
    if "step_intervals" in data:
        found = replace(found, step_intervals=_intervals(data["step_intervals"], where))
    return found


def _intervals(data: Any, where: str) -> tuple[tuple[str, float, float], ...]:
    out = []
    for name, entry in data.items() if isinstance(data, Mapping) else [("step_intervals", data)]:
        try:
            low, high = float(entry["low"]), float(entry["high"])
        except (TypeError, KeyError, ValueError, OverflowError):
            raise ProfileError(f"{where}: {name}={entry!r} must have low and high") from None
        if not 0 < low <= 1 <= high < math.inf:
            raise ProfileError(f"{where}: the interval {name}, from {low} to {high}, must contain 1")
        out.append((str(name), low, high))
    return tuple(out)
