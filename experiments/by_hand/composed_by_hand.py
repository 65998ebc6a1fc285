"""FSDP2, DTensor's tensor parallelism and stock pipelining together, as one writes it by hand: what composed.py
compares with.

The order is PyTorch's own (torchtitan's, too): the model is cut into stages, `parallelize_module` goes over each with
sequence parallelism, `fully_shard` over every layer and the stage, then `PipelineStage` and a schedule.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from experiments.by_hand.dtensor_llama import llama_plan
from experiments.by_hand.pipeline_by_hand import LlamaStage, next_token_loss
from experiments.by_hand.sharded_by_hand import Recipe, accumulate, shard_by_layer
from experiments.shared.training import OPTIMIZER, Trainer, part_of, whole

# name in a LlamaForCausalLM -> in a LlamaStage
STAGE_NAMES = {"model.embed_tokens": "embed", "model.layers": "layers", "model.norm": "norm", "lm_head": "head"}


@dataclass(frozen=True)
class Degrees:
    """Ranks per axis. drops: parameters are sharded again after the forward (without a pipeline)."""

    dp: int
    tp: int
    pp: int
    drops: bool = False

    @property
    def world(self) -> int:
        """All ranks."""
        return self.dp * self.tp * self.pp

    def __str__(self) -> str:
        return " x ".join(f"{n}{k}" for n, k in (("dp", self.dp), ("tp", self.tp), ("pp", self.pp)) if k > 1)


def make_trainer(
    model: Any,
    degrees: Degrees,
    mesh: DeviceMesh,
    variant: str,
    batch: Mapping[str, torch.Tensor],
    num_micro_batches: int,
) -> Trainer:
    """Parallelise a Hugging Face Llama in place.

    Args:
        mesh: (pp, dp, tp).
        variant: of tensor parallelism (dtensor_llama.VARIANTS).
        batch: of this data-parallel rank.
    """
    if degrees.pp == 1:
        return _without_pipeline(model, degrees, mesh, variant, batch, num_micro_batches)
    return _pipeline(model, degrees, mesh, variant, batch, num_micro_batches)


def _optimizer(module: nn.Module) -> torch.optim.Optimizer:
    """Two groups, because one fused kernel takes DTensors or plain tensors (which tp without dp leaves), not both."""
    own = list(module.parameters())
    kinds = [[p for p in own if isinstance(p, DTensor) is sharded] for sharded in (True, False)]
    return OPTIMIZER([{"params": kind} for kind in kinds if kind])


def _without_pipeline(
    model: Any,
    degrees: Degrees,
    mesh: DeviceMesh,
    variant: str,
    batch: Mapping[str, torch.Tensor],
    num_micro_batches: int,
) -> Trainer:
    if degrees.tp > 1:
        parallelize_module(model, mesh["tp"], llama_plan(len(model.model.layers), variant))
    shard_by_layer(model, drops=degrees.drops, mesh=mesh["dp"])
    optimizer = _optimizer(model)
    parts = [part_of(batch, i, num_micro_batches) for i in range(num_micro_batches)]
    recipe = Recipe(shards=True, drops=degrees.drops, reduces_each=degrees.drops)
    # under sequence parallelism HF would count positions of the local part
    positions = torch.arange(batch["input_ids"].shape[1]).unsqueeze(0)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = accumulate(model, parts, recipe, position_ids=positions)
        optimizer.step()
        return loss

    return Trainer(
        step,
        lambda: {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None},
        parameters=lambda: {n: whole(p.detach()) for n, p in model.named_parameters()},
        share=1 / degrees.world,
    )


def _pipeline(
    model: Any,
    degrees: Degrees,
    mesh: DeviceMesh,
    variant: str,
    batch: Mapping[str, torch.Tensor],
    num_micro_batches: int,
) -> Trainer:
    index, num_layers = mesh["pp"].get_local_rank(), len(model.model.layers)
    start, stop = (k * num_layers // degrees.pp for k in (index, index + 1))
    stage = LlamaStage(model, start, stop, length=batch["input_ids"].shape[1])
    if degrees.tp > 1:
        plan = {_in_stage(name): style for name, style in llama_plan(num_layers, variant).items()}
        present = {name for name, _ in stage.named_modules()}
        parallelize_module(stage, mesh["tp"], {name: style for name, style in plan.items() if name in present})
    if degrees.dp > 1:
        for layer in stage.layers.values():
            fully_shard(layer, mesh=mesh["dp"], reshard_after_forward=False)
        fully_shard(stage, mesh=mesh["dp"], reshard_after_forward=False)
    group = mesh["pp"].get_group()
    runner = Schedule1F1B(
        PipelineStage(stage, index, degrees.pp, torch.device("cpu"), group=group),
        num_micro_batches,
        loss_fn=next_token_loss,
    )
    optimizer = _optimizer(stage)
    inputs = (batch["input_ids"],) if stage.first else ()
    target = {"target": batch["labels"]} if stage.last else {}

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        runner.step(*inputs, **target, losses=losses, return_outputs=False)
        optimizer.step()
        return torch.stack(losses).mean().detach() if losses else torch.zeros(())

    return Trainer(
        step,
        lambda: {_in_model(n): whole(p.grad) for n, p in stage.named_parameters() if p.grad is not None},
        parameters=lambda: {_in_model(n): whole(p.detach()) for n, p in stage.named_parameters()},
        share=1 / (degrees.dp * degrees.tp),
    )


def _renamed(name: str, names: Mapping[str, str]) -> str:
    for before, after in names.items():
        if name == before or name.startswith(f"{before}."):
            return after + name[len(before) :]
    raise KeyError(f"{name!r} is not in the table of names")


def _in_stage(name: str) -> str:
    return _renamed(name, STAGE_NAMES)


def _in_model(name: str) -> str:
    return _renamed(name, {stage: model for model, stage in STAGE_NAMES.items()})
