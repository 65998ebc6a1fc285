"""Recompute of NeMo Automodel: its field `activation_checkpointing`."""

from __future__ import annotations

from autoplan.config.recompute import BY_OPERATION, FULL, NONE
from autoplan.exporters.record import Document, Values
from autoplan.exporters.setup import Setup

_PATH = "distributed.activation_checkpointing"
# selective keeps results of attention and of every second product, as torchtitan does
# (components/distributed/activation_checkpointing.py)
_RECOMPUTE = {NONE: False, BY_OPERATION: "selective", FULL: True}
_BY_RECOMPUTE = {
    **dict.fromkeys((False, "false", "off", "none", "disabled", "no"), NONE),
    **dict.fromkeys((True, "true", "on", "full", "enabled", "yes"), FULL),
    "selective": BY_OPERATION,
}


def write_layer_checkpoints(setup: Setup) -> Values:
    """Return the field of one choice for all layers."""
    return {_PATH: _RECOMPUTE.get(setup.any_recompute, True)}


def stated_recompute(document: Document) -> str:
    """Return the kind that a file states."""
    return str(document.word(_PATH, _BY_RECOMPUTE, NONE))


def _of_transformer_engine(found: Values) -> bool:
    return bool(found.get("mode", "fused") == "fused")


def read_layer_checkpoints(document: Document, found: Values) -> Values:
    """Return the recompute; of layers of Transformer Engine, whose kernels are no operations of PyTorch, `selective`
    keeps nothing."""
    kind = stated_recompute(document)
    return {"recompute": FULL if kind == BY_OPERATION and _of_transformer_engine(found) else kind}


def keeps_nothing(document: Document, found: Values) -> str | None:
    """Return a warning where `selective` is full recompute."""
    if stated_recompute(document) != BY_OPERATION or not _of_transformer_engine(found):
        return None
    return (
        "activation_checkpointing: selective keeps results of operations of PyTorch, and kernels of Transformer Engine "
        "are none: priced as full recompute (with model.backend.linear: torch it keeps some)"
    )
