"""What is offloaded to the host, as people pin it: `offload="activations+optimizer"`.

`activations` is `recompute="offload"` of all layers; `optimizer` and `parameters` (which brings the optimizer's state
with it) are those of `ParallelConfig.offload`. A pin says all that is offloaded: what it does not name stays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from autoplan.errors import PinError

# What may be on the host: what autograd keeps (as recompute "offload", for all layers), the optimizer's state, or
# parameters, gradients and that.
OFFLOADS = ACTIVATIONS, OPTIMIZER, PARAMETERS = ("activations", "optimizer", "parameters")
# What a search looks at beside nothing; activations as a step of recompute, of as many layers as it takes.
SEARCHED = ((OPTIMIZER,), (PARAMETERS,), (ACTIVATIONS,), (ACTIVATIONS, OPTIMIZER), (ACTIVATIONS, PARAMETERS))
NEEDS_SHARDS = "parameters on the host need ZeRO 1 to 3 over several ranks"


def read_offload(value: object) -> tuple[str, ...]:
    """Names in their order, none of `none`; `parameters` goes without `optimizer`. PinError names the legal ones."""
    parts: Sequence[Any] = value.split("+") if isinstance(value, str) else value if _is_list(value) else ()
    if list(parts) == ["none"]:
        return ()
    if not parts or any(p not in OFFLOADS for p in parts) or len(set(parts)) != len(parts):
        raise PinError(
            f"offload={value!r} is not supported; use none, or some of {', '.join(OFFLOADS)} joined by +", ("offload",)
        )
    found = tuple(name for name in OFFLOADS if name in parts)
    return tuple(name for name in found if name != OPTIMIZER or PARAMETERS not in found)


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, (list, tuple)) and all(isinstance(p, str) for p in value)


def with_offload(pins: Mapping[str, Any]) -> Mapping[str, Any]:
    """The same with what a pin of `offload` says of activations in the pin of `recompute`. PinError if both differ."""
    if "offload" not in pins or ACTIVATIONS not in read_offload(pins["offload"]):
        return pins
    if pins.get("recompute", "offload") != "offload":
        raise PinError(
            f"offload={pins['offload']!r} with recompute={pins['recompute']!r}: activations that wait on the host are "
            "not computed again",
            ("recompute", "offload"),
        )
    return {**pins, "recompute": "offload"}


def state_offload(pins: Mapping[str, Any]) -> tuple[str, ...]:
    """What a pin says of state: `ParallelConfig.offload`."""
    return tuple(name for name in read_offload(pins.get("offload", "none")) if name != ACTIVATIONS)


def searched_offload(pins: Mapping[str, Any], zero_stage: int, shards: int) -> tuple[tuple[str, ...], ...]:
    """What a search looks at beside offloading nothing, under these pins. `shards`: ranks that ZeRO shards over."""
    if "offload" in pins:
        return ()
    legal = (kind for kind in SEARCHED if not lacks_shards(kind, zero_stage, shards))
    return tuple(kind for kind in legal if ACTIVATIONS not in kind or "recompute" not in pins)


def on_host(offload: tuple[str, ...]) -> frozenset[str]:
    """All that is there: parameters bring the optimizer's state with them."""
    return frozenset(offload) | ({OPTIMIZER} if PARAMETERS in offload else frozenset())


def lacks_shards(offload: tuple[str, ...], zero_stage: int, shards: int) -> bool:
    """True if parameters are to be on the host and nothing shards them. `shards`: ranks that ZeRO shards over."""
    return PARAMETERS in offload and (zero_stage == 0 or shards < 2)
