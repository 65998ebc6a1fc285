"""Offloading to the host, as people pin it: `offload="activations+optimizer"`.

`activations` stands for `recompute="offload"` in all layers. `optimizer` and `parameters` (which includes the optimizer
state) are values of `ParallelConfig.offload`. A pin is complete: whatever it does not name stays on the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from autoplan.config.recompute import OFFLOAD
from autoplan.errors import PinError


@dataclass(frozen=True)
class Offload:
    """A kind of data that may be kept in host memory.

    Attributes:
        name: The name in pins and plans.
        does: The data that is offloaded.
        state: True for training state; False for activations, which `ParallelConfig.recompute` places per layer.
        brings: The kinds that are offloaded with it.
        needs_shards: True if it is offloaded as ZeRO's shards.
    """

    name: str
    does: str
    state: bool = True
    brings: tuple[str, ...] = ()
    needs_shards: bool = False


NOTHING, ACTIVATIONS, OPTIMIZER, PARAMETERS = "none", "activations", "optimizer", "parameters"
OFFLOAD_KINDS: Mapping[str, Offload] = {
    kind.name: kind
    for kind in (
        Offload(ACTIVATIONS, "the activations of all layers (recompute 'offload')", state=False),
        Offload(OPTIMIZER, "the optimizer's state, with the copies of parameters and gradients that it updates"),
        Offload(PARAMETERS, "parameters and gradients", brings=(OPTIMIZER,), needs_shards=True),
    )
}
OFFLOADS = tuple(OFFLOAD_KINDS)
_STATES = tuple((kind.name,) for kind in OFFLOAD_KINDS.values() if kind.state)
# The offloads that a search tries besides none. Activations are tried as a step of recompute, for as many layers as
# needed.
SEARCHED_OFFLOADS = (*_STATES, (ACTIVATIONS,), *((ACTIVATIONS, *state) for state in _STATES))
NEEDS_SHARDS = "parameters on the host need ZeRO 1 to 3 over several ranks"


def of_states(offload: tuple[str, ...]) -> tuple[str, ...]:
    """Return the offloaded kinds without activations, which a search treats as a recompute choice."""
    return tuple(name for name in offload if name != ACTIVATIONS)


def read_offload(value: object) -> tuple[str, ...]:
    """Return the offloaded kinds in canonical order; `optimizer` is dropped if `parameters` is named.

    Empty for `none` and for an empty list.

    Raises: PinError that names the legal kinds.
    """
    parts: Sequence[Any] = value.split("+") if isinstance(value, str) else value if _is_list(value) else ()
    if list(parts) == [NOTHING] or (_is_list(value) and not value):
        return ()
    if not parts or any(p not in OFFLOADS for p in parts) or len(set(parts)) != len(parts):
        raise PinError(
            f"offload={value!r} is not supported; use none, or some of {', '.join(OFFLOADS)} joined by +", ("offload",)
        )
    brought = {name for part in parts for name in OFFLOAD_KINDS[part].brings}
    return tuple(name for name in OFFLOADS if name in parts and name not in brought)


def no_host_link(device: str) -> str:
    """Return the reason why nothing can be offloaded from a device."""
    return f"the catalog has no speed of the host link of {device}, so offloading has no price"


def offload_text(offload: Sequence[str]) -> str:
    """Return a text that `read_offload` reads as these kinds."""
    return "+".join(offload) or NOTHING


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, (list, tuple)) and all(isinstance(p, str) for p in value)


def with_offload(pins: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the pins with offloaded activations copied from the `offload` pin into the `recompute` pin.

    A configuration says once that activations are offloaded, so it cannot hold two pins that contradict each other:
    they are refused here, before there is a configuration that a rule could look at.

    Raises: PinError if the two pins contradict each other.
    """
    if "offload" not in pins or ACTIVATIONS not in read_offload(pins["offload"]):
        return pins
    if pins.get("recompute", OFFLOAD) != OFFLOAD:
        raise PinError(
            f"offload={pins['offload']!r} with recompute={pins['recompute']!r}: activations go to the host by "
            "recompute='offload', and a layer has one kind of recompute",
            ("recompute", "offload"),
        )
    return {**pins, "recompute": OFFLOAD}


def state_offload(pins: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the training state that the pins offload: the value of `ParallelConfig.offload`."""
    return tuple(name for name in read_offload(pins.get("offload", NOTHING)) if OFFLOAD_KINDS[name].state)


def searched_offload(pins: Mapping[str, Any], zero_stage: int, shards: int) -> tuple[tuple[str, ...], ...]:
    """Return the offloads that a search tries besides none, under these pins.

    `shards`: the number of ranks that ZeRO shards over.
    """
    if "offload" in pins:
        return ()
    legal = (kind for kind in SEARCHED_OFFLOADS if not lacks_shards(kind, zero_stage, shards))
    return tuple(kind for kind in legal if ACTIVATIONS not in kind or "recompute" not in pins)


def held_on_host(offload: tuple[str, ...]) -> frozenset[str]:
    """Return all kinds that are on the host, including those that others bring."""
    return frozenset(offload).union(*(OFFLOAD_KINDS[name].brings for name in offload))


def lacks_shards(offload: tuple[str, ...], zero_stage: int, shards: int) -> bool:
    """Return True if a kind that is offloaded as shards is not sharded.

    `shards`: the number of ranks that ZeRO shards over.
    """
    return any(OFFLOAD_KINDS[name].needs_shards for name in offload) and (zero_stage == 0 or shards < 2)
