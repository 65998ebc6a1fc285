"""Jobs of test_pretrained.py: models on the meta device."""

from __future__ import annotations

from typing import Any

import models
import torch

import autoplan
from autoplan.errors import AutoplanError


def made(family: str, device: str) -> Any:
    with torch.device(device):
        if family == "mixtral":
            return models.make_mixtral()
        return models.make_llama(num_hidden_layers=2, tie_word_embeddings=family == "tied")


def start(rank: int, world: int, family: str, pins: dict[str, Any], weights: str, saved: str) -> dict[str, Any]:
    """The state with the model's own initialisation, and with weights; the loss with them, and a copy saved."""
    batch = models.token_batch(2, 16)
    own = autoplan.parallelize(made(family, "meta"), "local", example_inputs=batch, pins=pins, seed=5, verify=False)
    pm = autoplan.parallelize(
        made(family, "meta"), "local", example_inputs=batch, pins=pins, weights=weights, verify=False
    )
    size = 2 // pm.data_world
    loss = pm.step({k: v[pm.data_rank * size :][:size] for k, v in batch.items()})
    pm.save_pretrained(saved)
    return {"own": own.state_dict(), "weights": pm.state_dict(), "loss": loss.item()}


def refusals(rank: int, world: int, folder: str) -> dict[str, str]:
    """What is said of models that get no values, and of weights that do not fit."""
    batch = models.token_batch(2, 16)

    def said(model: Any, **arguments: Any) -> str:
        try:
            autoplan.parallelize(model, "local", example_inputs=batch, pins={"tp": 2}, verify=False, **arguments)
        except AutoplanError as exc:
            return str(exc)
        return ""

    def half(model: torch.nn.Module) -> None:
        model.model.embed_tokens.weight.zero_()  # type: ignore[union-attr, operator]

    only_here = folder if rank == 0 else f"{folder}/none"
    return {
        "no weights": said(made("llama", "meta"), weights=f"{folder}/none"),
        "none on one rank": said(made("llama", "meta"), weights=only_here),
        "other weights": said(made("mixtral", "meta"), weights=folder),
        "half an init": said(made("llama", "meta"), init=half),
    }
