"""Recompute: what a layer keeps for its backward, computes again, or sends to the host, as people pin it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from autoplan.errors import PinError

RECOMPUTE = ("none", "selective", "full", "offload")
# Groups of regions that a block may compute again by itself, in the order of their names in a plan (`attention+norms`).
GROUPS = ("attention", "mlp", "norms")
# Modules that Megatron computes again (--recompute-modules), as a choice `modules:core_attn,mlp`. Priced, not executed.
MODULES = ("core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts")
_MODULES_PREFIX = "modules:"


def modules_of(how: object) -> tuple[str, ...]:
    """The modules that a choice of recompute names, in the order of MODULES; none of any other choice.

    PinError for an unknown one.
    """
    if not isinstance(how, str) or not how.startswith(_MODULES_PREFIX):
        return ()
    given = how.removeprefix(_MODULES_PREFIX).split(",")
    for name in given:
        if name not in MODULES:
            near = difflib.get_close_matches(name, MODULES, 1, 0.0)[0]
            raise PinError(
                f"recompute={how!r}: {name!r} is no module; use {', '.join(MODULES)}, joined by commas; did you mean "
                f"{near}?",
                ("recompute",),
            )
    return tuple(m for m in MODULES if m in given)


def modules_choice(modules: Iterable[str]) -> str:
    """The choice of recompute that names these modules."""
    named = set(modules)
    return _MODULES_PREFIX + ",".join(m for m in MODULES if m in named)


def groups_of(how: str) -> tuple[str, ...]:
    """The regions that a choice of recompute names: of `attention+norms` two, of `selective` attention."""
    if how == "selective":
        return ("attention",)
    if how.startswith(_MODULES_PREFIX):
        return ()
    return tuple(g for g in GROUPS if g in how.split("+"))


def check_choice(value: object) -> str:
    """A choice of recompute for one block or all: its name, groups in their order. PinError names the legal ones."""
    if isinstance(value, str) and value in RECOMPUTE:
        return value
    if named := modules_of(value):
        return modules_choice(named)
    parts = value.split("+") if isinstance(value, str) else value
    if isinstance(parts, (list, tuple)) and parts and all(isinstance(p, str) for p in parts):
        unknown = [p for p in parts if p not in GROUPS]
        if not unknown and len(set(parts)) == len(parts):
            return "+".join(g for g in GROUPS if g in parts)
    raise PinError(
        f"recompute={value!r} is not supported; use {', '.join(RECOMPUTE)}, or some of {', '.join(GROUPS)} joined by + "
        "(attention+norms), or a mapping block -> one of these; with --mode fused also modules of Megatron's "
        "(modules:core_attn,mlp)",
        ("recompute",),
    )


def read_recompute(value: Any) -> str | dict[str, str]:
    """The pin in one form: a choice for all layers, or one by block."""
    if isinstance(value, Mapping):
        return {name: check_choice(v) for name, v in value.items()}
    return check_choice(value)
