"""Layers for tokens after the next in files of frameworks that have them: their number is the model's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from autoplan.exporters.record import Document, Field, TargetRule, Values
from autoplan.exporters.setup import MTP_SETTING, Setup
from autoplan.names import base_model, mtp_model


def mtp_field(at: Callable[[str], str] = str) -> Field:
    """Return the field of these layers, which `MTP_RULE` compares with the model. `at`: the place of a setting."""

    def write(setup: Setup) -> Values:
        return {at(MTP_SETTING): setup.task.num_mtp} if setup.task.num_mtp else {}

    return Field((), write, lambda document, found: {})


def _other_layers(document: Document, found: Mapping[str, Any]) -> str | None:
    """Return that a file has other layers for tokens after the next than the model; those of a recipe that it leaves to
    functions are as in its stack."""
    task = document.task
    paths = [p for p in (MTP_SETTING, f"model.{MTP_SETTING}") if document.has(p)]
    given = document.get(paths[0]) if paths else document.usual_mtp if document.partial else 0
    given = given or 0
    if not task.model or given == task.num_mtp:
        return None
    base = base_model(task.model)
    named = mtp_model(base, given) if given else base
    said = f"{MTP_SETTING}={given}, but {task.model} has {task.num_mtp}; its own are priced"
    return f"{said}; the file's model is {named}"


MTP_RULE = TargetRule(_other_layers, warns=True)
