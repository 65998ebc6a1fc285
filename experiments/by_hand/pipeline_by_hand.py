"""Hugging Face's Llama as pipeline stages, the way one writes it with stock `torch.distributed.pipelining`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

# this project's name of a schedule -> torch's
TORCH_NAMES = {
    "GPipe": "GPipe",
    "1F1B": "1F1B",
    "Interleaved1F1B": "Interleaved1F1B",
    "ZB-H1": "InterleavedZeroBubble",
    "InterleavedZeroBubble": "InterleavedZeroBubble",
    "ZBV": "ZBVZeroBubble",
    "DualPipeV": "DualPipeV",
}


class LlamaStage(nn.Module):
    """Layers `start` to `stop` of a LlamaForCausalLM, with embedding or head where they are the first or last.

    `length`: of the sequence, where hidden states are cut over ranks; None: theirs.
    """

    def __init__(self, whole: Any, start: int, stop: int, length: int | None = None) -> None:
        super().__init__()
        layers = whole.model.layers
        self.length = length
        self.first, self.last = start == 0, stop == len(layers)
        self.rotary = whole.model.rotary_emb
        self.embed = whole.model.embed_tokens if self.first else None
        self.layers = nn.ModuleDict({str(i): layers[i] for i in range(start, stop)})
        self.norm, self.head = (whole.model.norm, whole.lm_head) if self.last else (None, None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Token ids or hidden states to hidden states or logits."""
        h: Any = x if self.embed is None else self.embed(x)
        positions = self.rotary(h, torch.arange(self.length or h.shape[1]).unsqueeze(0))
        for layer in self.layers.values():
            h = layer(h, attention_mask=None, position_embeddings=positions)
            h = h[0] if isinstance(h, tuple) else h
        if self.norm is not None and self.head is not None:
            h = self.head(self.norm(h))
        return h  # type: ignore[no-any-return]  # HF is untyped


def next_token_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """HF's: every token predicts the next one."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())


def make_step(
    whole: nn.Module,
    schedule: str,
    held: Sequence[int],
    num_stages: int,
    num_micro_batches: int,
    batch: Mapping[str, torch.Tensor],
) -> tuple[Callable[[], torch.Tensor], dict[str, nn.Parameter]]:
    """A function that runs forward and backward of this rank's stages and returns the mean loss (0 where the last stage
    is not), and this rank's parameters by their names in `whole`.

    Args:
        held: the stages of this rank; layers are spread evenly.
    """
    num_layers = len(whole.model.layers)  # type: ignore[union-attr,arg-type]
    cuts = [k * num_layers // num_stages for k in range(num_stages + 1)]
    modules = [LlamaStage(whole, cuts[k], cuts[k + 1]) for k in held]
    stages = [PipelineStage(m, k, num_stages, torch.device("cpu")) for m, k in zip(modules, held, strict=True)]
    kind = get_schedule_class(TORCH_NAMES[schedule])
    given: Any = stages[0] if issubclass(kind, PipelineScheduleSingle) else stages
    runner = kind(given, num_micro_batches, loss_fn=next_token_loss)
    names = {id(p): n for n, p in whole.named_parameters()}
    mine = {names[id(p)]: p for m in modules for p in m.parameters()}
    inputs = (batch["input_ids"],) if 0 in held else ()
    target = {"target": batch["labels"]} if num_stages - 1 in held else {}

    def step() -> torch.Tensor:
        for p in mine.values():
            p.grad = None
        losses: list[torch.Tensor] = []
        runner.step(*inputs, **target, losses=losses, return_outputs=False)
        return torch.stack(losses).mean().detach() if losses else torch.zeros(())

    return step, mine
