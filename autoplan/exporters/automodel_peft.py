"""Adapters of NeMo Automodel: its section `peft`, with patterns of the names of modules."""

from __future__ import annotations

from typing import Any

from autoplan.config.adapters import ALL_LINEAR, Adapters, read_adapters
from autoplan.errors import PinError
from autoplan.exporters.record import Document, Values
from autoplan.exporters.setup import Setup

_EVERY = ("*", "*_proj", "*proj")  # all linear layers of the models whose projections are called so
_USUAL_RANK = 8


def write_peft(setup: Setup) -> Values:
    """Return the section `peft`; nothing for layers that only PEFT chooses."""
    if setup.adapters is None:
        return {}
    adapters = read_adapters(setup.adapters)
    if not adapters.targets:
        return {}
    out: dict[str, Any] = {
        "peft._target_": "nemo_automodel.components._peft.lora.PeftConfig",
        "peft.dim": adapters.rank,
    }
    if adapters.targets == (ALL_LINEAR,):
        out["peft.match_all_linear"] = True
    else:
        out["peft.target_modules"] = [f"*.{name}" for name in adapters.targets]
    return out | ({"quantization.load_in_4bit": True} if adapters.packed else {})


def read_peft(document: Document, found: Values) -> Values:
    """Return the adapters of the section `peft` (PeftConfig of components/_peft/lora.py)."""
    if not document.has("peft") or "peft" in document.values:  # without fields: none
        return {}
    given = document.get("peft.target_modules")
    patterns = [given] if isinstance(given, str) else given or []
    every = not patterns or bool(document.get("peft.match_all_linear")) or any(each in _EVERY for each in patterns)
    names = [str(pattern).rpartition("*.")[2] for pattern in patterns]
    strange = None if every else next((name for name in names if not name.replace("_", "").isalnum()), None)
    if strange is not None:
        said = f"peft.target_modules={strange!r} is not a name"
        raise PinError(f"{said}; give --adapters lora:{_USUAL_RANK}:all-linear or such", ("adapters",))
    packed = bool(document.get("quantization.load_in_4bit"))
    rank = document.count("peft.dim", _USUAL_RANK)
    return {"adapters": str(Adapters(rank, (ALL_LINEAR,) if every else tuple(names), packed))}
