"""What is offloaded to the host, as people pin it: `offload="activations+optimizer"`.

`activations` is `recompute="offload"` of all layers; `optimizer` and `parameters` (which brings the optimizer's state
with it) are those of `ParallelConfig.offload`. A pin says all that is offloaded: what it does not name stays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from autoplan.config.recompute import OFFLOAD
from autoplan.errors import PinError


@dataclass(frozen=True)
class Offload:
    """Something that may be in the memory of the host.

    Attributes:
        name: in pins and plans.
        does: what is there.
        state: it is state of the training; else what autograd keeps, which `ParallelConfig.recompute` says by layer.
        brings: what goes there with it.
        needs_shards: it is there as ZeRO's shards.
    """

    name: str
    does: str
    state: bool = True
    brings: tuple[str, ...] = ()
    needs_shards: bool = False


ACTIVATIONS, OPTIMIZER, PARAMETERS = "activations", "optimizer", "parameters"
OFFLOAD_KINDS: Mapping[str, Offload] = {
    kind.name: kind
    for kind in (
        Offload(ACTIVATIONS, "what autograd keeps, of all layers (recompute 'offload')", state=False),
        Offload(OPTIMIZER, "the optimizer's state, with a copy of parameters and gradients as it takes them"),
        Offload(PARAMETERS, "parameters and gradients", brings=(OPTIMIZER,), needs_shards=True),
    )
}
OFFLOADS = tuple(OFFLOAD_KINDS)
_STATES = tuple((kind.name,) for kind in OFFLOAD_KINDS.values() if kind.state)
# What a search looks at beside nothing; activations as a step of recompute, of as many layers as it takes.
SEARCHED_OFFLOADS = (*_STATES, (ACTIVATIONS,), *((ACTIVATIONS, *state) for state in _STATES))
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
    brought = {name for part in parts for name in OFFLOAD_KINDS[part].brings}
    return tuple(name for name in OFFLOADS if name in parts and name not in brought)


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, (list, tuple)) and all(isinstance(p, str) for p in value)


def with_offload(pins: Mapping[str, Any]) -> Mapping[str, Any]:
    """The same with what a pin of `offload` says of activations in the pin of `recompute`. PinError if both differ."""
    if "offload" not in pins or ACTIVATIONS not in read_offload(pins["offload"]):
        return pins
    if pins.get("recompute", OFFLOAD) != OFFLOAD:
        raise PinError(
            f"offload={pins['offload']!r} with recompute={pins['recompute']!r}: activations that wait on the host are "
            "not computed again",
            ("recompute", "offload"),
        )
    return {**pins, "recompute": OFFLOAD}


def state_offload(pins: Mapping[str, Any]) -> tuple[str, ...]:
    """What a pin says of state: `ParallelConfig.offload`."""
    return tuple(name for name in read_offload(pins.get("offload", "none")) if OFFLOAD_KINDS[name].state)


def searched_offload(pins: Mapping[str, Any], zero_stage: int, shards: int) -> tuple[tuple[str, ...], ...]:
    """What a search looks at beside offloading nothing, under these pins. `shards`: ranks that ZeRO shards over."""
    if "offload" in pins:
        return ()
    legal = (kind for kind in SEARCHED_OFFLOADS if not lacks_shards(kind, zero_stage, shards))
    return tuple(kind for kind in legal if ACTIVATIONS not in kind or "recompute" not in pins)


def held_on_host(offload: tuple[str, ...]) -> frozenset[str]:
    """All that is there, with what each brings."""
    return frozenset(offload).union(*(OFFLOAD_KINDS[name].brings for name in offload))


def lacks_shards(offload: tuple[str, ...], zero_stage: int, shards: int) -> bool:
    """True if what is to be on the host as shards is not sharded. `shards`: ranks that ZeRO shards over."""
    return any(OFFLOAD_KINDS[name].needs_shards for name in offload) and (zero_stage == 0 or shards < 2)
