"""Hugging Face models inside other modules and under torch.compile, and jobs that train them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import models
import torch
from one_step import errors_of_a_step
from torch import nn

import autoplan

Batch = dict[str, torch.Tensor]


class Inside(nn.Module):
    """A module around a language model, which computes the loss itself."""

    def __init__(self, lm: nn.Module) -> None:
        super().__init__()
        self.lm = lm

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.lm(input_ids=input_ids).logits
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return logits, loss


class Padded(nn.Module):
    """A module that hands a padding mask to the model inside."""

    def __init__(self, lm: nn.Module) -> None:
        super().__init__()
        self.lm = lm

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        return self.lm(input_ids=input_ids, labels=labels, attention_mask=attention_mask)


class Chained(nn.Module):
    """Two language models: what the first makes of the tokens is what the second reads."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        states = self.first.model(input_ids).last_hidden_state
        return self.second(inputs_embeds=states, labels=labels)


class LowRank(nn.Module):
    """A frozen linear layer with a trained update of low rank, as LoRA."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features) * 0.2)
        self.b = nn.Parameter(torch.randn(base.out_features, rank) * 0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + 2.0 * nn.functional.linear(nn.functional.linear(x, self.a), self.b)


def low_rank() -> nn.Module:
    """A frozen Llama inside a module, with updates of low rank for two projections of every layer."""
    model = models.make_llama()
    model.requires_grad_(False)
    for layer in model.model.layers:
        for name in ("q_proj", "v_proj"):
            setattr(layer.self_attn, name, LowRank(getattr(layer.self_attn, name)))
    return Inside(model)


def compiled_layers() -> nn.Module:
    model = models.make_llama()
    for i, layer in enumerate(model.model.layers):
        model.model.layers[i] = torch.compile(layer, backend="eager")
    return model


def compiled_in_place() -> nn.Module:
    model = models.make_llama()
    model.compile(backend="eager")
    for layer in model.model.layers:
        layer.mlp.compile(backend="eager")
    return model


def compiled_forwards() -> nn.Module:
    model = models.make_llama()
    model.forward = torch.compile(model.forward, backend="eager")
    for layer in model.model.layers:
        layer.forward = torch.compile(layer.forward, backend="eager")
    return model


def checkpointed() -> nn.Module:
    """Checkpoints that run under no_grad, by transformers' name of before 6."""
    model = models.make_llama()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    return model.train()


class Prompted(nn.Module):
    """A frozen language model behind trained rows, which every sample begins with, as PEFT makes them."""

    def __init__(self, lm: nn.Module) -> None:
        super().__init__()
        self.lm, self.rows = lm.requires_grad_(False), nn.Embedding(3, lm.config.hidden_size)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        batch = input_ids.shape[0]
        numbers = torch.arange(3).unsqueeze(0).expand(batch, -1)[:1]
        rows = self.rows(numbers).repeat(batch, 1, 1)
        embedded = torch.cat((rows, self.lm.get_input_embeddings()(input_ids)), 1)
        unlabeled = torch.full((batch, 3), -100)
        return self.lm(inputs_embeds=embedded, labels=torch.cat((unlabeled, labels), 1))


MAKERS: Mapping[str, Callable[[], nn.Module]] = {
    "inside": lambda: Inside(models.make_llama()),
    "inside-windowed": lambda: Inside(models.make_windowed()),
    "inside-experts": lambda: Inside(models.make_mixtral()),
    "padded": lambda: Padded(models.make_llama()),
    "chained": lambda: Chained(models.make_llama(), models.make_llama(seed=1)),
    "low-rank": low_rank,
    "checkpointed": checkpointed,
    "prompted": lambda: Prompted(models.make_llama()),
    "compiled": lambda: torch.compile(Inside(models.make_llama()), backend="eager"),
    "compiled-layers": compiled_layers,
    "compiled-in-place": compiled_in_place,
    "compiled-forwards": compiled_forwards,
}


def batch_for(name: str, size: int = 2) -> Batch:
    """Tokens and labels; a padding mask where the model takes one."""
    batch = models.token_batch(size, 16)
    if name == "padded":
        batch["attention_mask"] = torch.ones(size, 16, dtype=torch.long)
        batch["attention_mask"][0, 11:] = 0
    return batch


def errors(rank: int, world: int, name: str, pins: dict[str, Any]) -> tuple[float, float, list[str]]:
    """Relative error of the loss, the worst of a gradient, and the parameters that have one."""
    torch.manual_seed(0)
    model, batch = MAKERS[name]().double(), batch_for(name, 4)
    pm = autoplan.parallelize(model, "local", example_inputs=batch, pins=pins)

    def loss() -> torch.Tensor:
        with torch.compiler.set_stance("force_eager"):
            out = model(**batch)
        found: torch.Tensor = out[1] if isinstance(out, tuple) else out.loss
        return found

    return errors_of_a_step(pm, model, batch, loss)
