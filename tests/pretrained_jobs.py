"""Jobs of test_pretrained.py: models on the meta device."""

from __future__ import annotations

import ctypes
import os
import resource
from pathlib import Path
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


class Drawn(torch.nn.Module):
    """Weights of initialisations that torch does not run on the meta device, and numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(16, 32, bias=False), torch.nn.Linear(32, 16, bias=False)
        self.scale = torch.nn.Parameter(torch.empty(16))

    def reset_parameters(self) -> None:
        torch.nn.init.trunc_normal_(self.up.weight, std=0.02)
        torch.nn.init.orthogonal_(self.down.weight)
        with torch.no_grad():
            self.scale.copy_(torch.tensor([float(i) for i in range(16)], device=self.scale.device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(x * self.scale)))


def drawn() -> torch.nn.Module:
    with torch.device("meta"):
        return torch.nn.Sequential(Drawn(), Drawn())


def drawn_state(rank: int, world: int, pins: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The state that a plan starts with."""
    pm = autoplan.parallelize(
        drawn(),
        "local",
        example_inputs={"input": torch.ones(2, 16)},
        loss_fn=lambda out, batch: out.square().mean(),
        pins=pins,
        seed=5,
        init=None,
        verify=False,
    )
    return pm.state_dict()


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
        "empty folder": said(made("llama", "meta"), weights=os.path.dirname(os.path.abspath(__file__))),
        "none on one rank": said(made("llama", "meta"), weights=only_here),
        "other weights": said(made("mixtral", "meta"), weights=folder),
        "half an init": said(made("llama", "meta"), init=half),
    }


M_MMAP_THRESHOLD = -3  # of mallopt(3)
WIDTH, NUM_LAYERS = 1024, 96  # 403 MB of parameters in float32; means of equal numbers are exact


class Means(torch.nn.Module):
    """Layers that return the mean of their input, if their weights are 1 / WIDTH."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def limited(rank: int, world: int, share: float) -> dict[str, Any]:
    """Start a model while this process may have no more private memory than a share of the model beside what it has.

    Returns: bytes of the parameters, private and resident memory before and after, the loss of an evaluation of threes,
    and what a model that is built whole under the same limit says.
    """

    def made(device: str) -> torch.nn.Module:
        with torch.device(device):
            return Means()

    def has(field: str) -> int:
        return int(Path("/proc/self/status").read_text().split(f"{field}:")[1].split()[0]) * 1024

    total = sum(p.nbytes for p in made("meta").parameters())
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, 1 << 17)  # a freed tensor leaves no hole in a heap, which the limit counts
    before, (soft, hard) = has("VmData"), resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (before + int(share * total), hard))
    try:
        try:
            whole = str(made("cpu"))
        except RuntimeError as exc:
            whole = str(exc)
        threes = {"x": torch.full((2, WIDTH), 3.0), "target": torch.zeros(2, WIDTH)}
        pm = autoplan.parallelize(
            made("meta"),
            "local",
            example_inputs=threes,
            loss_fn=lambda out, batch: torch.nn.functional.mse_loss(out, batch["target"]),
            pins={"dp": world, "zero_stage": 3},
            init=lambda model: [p.fill_(1 / WIDTH) for p in model.parameters()],
            verify=False,
        )
        loss = pm.eval_step({name: x[:1] for name, x in threes.items()}).item()
        return {"total": total, "private": has("VmData") - before, "loss": loss, "whole": whole}
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
        libc.mallopt(M_MMAP_THRESHOLD, 1 << 25)
