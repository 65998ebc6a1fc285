"""Data parallelism as one writes it by hand, with state on every rank or sharded: what fully_sharded.py compares with.

DDP, DDP with ZeroRedundancyOptimizer, and `fully_shard` on every layer and on the whole, around an untouched Hugging
Face model; micro-batches are a loop that adds gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from experiments.shared.training import OPTIMIZER, Trainer, part_of, whole


@dataclass(frozen=True)
class Recipe:
    """What is sharded and when.

    shards: `fully_shard`, else DDP. optimizer: DDP with ZeroRedundancyOptimizer. drops: parameters after the forward
    (reshard_after_forward). reduces_each: gradients after every micro-batch, else whole ones are added up and reduced
    after the last. copies: of what is sharded, each on neighbours (a mesh of two axes). on_host: what is sharded, by
    torch's CPUOffloadPolicy. saves_on_host: what autograd keeps of every layer, by torch's save_on_cpu, which moves
    nothing where the host is the device. saves_copies: the same with a copy of every tensor, as save_on_cpu makes of
    those of a GPU. compiled: every layer, by torch.compile.
    """

    shards: bool
    optimizer: bool = False
    drops: bool = False
    reduces_each: bool = False
    copies: int = 1
    on_host: bool = False
    saves_on_host: bool = False
    saves_copies: bool = False
    compiled: bool = False


RECIPES = {
    "DDP": Recipe(shards=False),
    "DDP, ZeroRedundancyOptimizer": Recipe(shards=False, optimizer=True),
    "fully_shard kept, reduced once": Recipe(shards=True),
    "fully_shard kept": Recipe(shards=True, reduces_each=True),
    "fully_shard": Recipe(shards=True, drops=True, reduces_each=True),
    "fully_shard, reduced once": Recipe(shards=True, drops=True),
    "fully_shard kept, 2 copies": Recipe(shards=True, reduces_each=True, copies=2),
    "fully_shard, 2 copies": Recipe(shards=True, drops=True, reduces_each=True, copies=2),
    "fully_shard, on the host": Recipe(shards=True, drops=True, reduces_each=True, on_host=True),
    "DDP, save_on_cpu": Recipe(shards=False, saves_on_host=True),
    "DDP, saved tensors copied": Recipe(shards=False, saves_copies=True),
    "DDP, compiled layers": Recipe(shards=False, compiled=True),
}


def make_trainer(
    model: nn.Module, recipe: Recipe, batch: Mapping[str, torch.Tensor], num_micro_batches: int
) -> Trainer:
    """Wrap `model` (in place) and its optimizer; `batch` is this rank's part, its labels equally many on every rank."""
    parts = [part_of(batch, i, num_micro_batches) for i in range(num_micro_batches)]
    layers: Any = model.get_submodule("model.layers")
    for layer in layers if recipe.saves_on_host or recipe.saves_copies else ():
        layer.forward = _saving(layer.forward, save_on_cpu if recipe.saves_on_host else _copied)
    for layer in layers if recipe.compiled else ():
        layer.compile()
    wrapped = _sharded(model, recipe) if recipe.shards else DistributedDataParallel(model)
    optimizer: torch.optim.Optimizer
    if recipe.optimizer:
        optimizer = ZeroRedundancyOptimizer(wrapped.parameters(), optimizer_class=OPTIMIZER.func, **OPTIMIZER.keywords)
    else:
        optimizer = OPTIMIZER(wrapped.parameters())

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = accumulate(wrapped, parts, recipe)
        optimizer.step()
        return loss

    plain: Any = wrapped.module if isinstance(wrapped, DistributedDataParallel) else wrapped
    return Trainer(
        step,
        lambda: {n: whole(p.grad) for n, p in plain.named_parameters() if p.grad is not None},
        parameters=lambda: {n: whole(p.detach()) for n, p in plain.named_parameters()},
        share=1 / dist.get_world_size(),
    )


def _copied() -> saved_tensors_hooks:
    return saved_tensors_hooks(lambda x: (x.device, x.to("cpu", copy=True)), lambda kept: kept[1].to(kept[0]))


def _saving(forward: Callable[..., Any], how: Callable[[], AbstractContextManager[None]]) -> Callable[..., Any]:
    def saving(*args: Any, **kwargs: Any) -> Any:
        with how():
            return forward(*args, **kwargs)

    return saving


def _sharded(model: nn.Module, recipe: Recipe) -> FSDPModule:
    if recipe.on_host:
        return shard_by_layer(model, drops=recipe.drops, offload_policy=CPUOffloadPolicy(pin_memory=False))
    if recipe.copies == 1:
        return shard_by_layer(model, drops=recipe.drops)
    shape = recipe.copies, dist.get_world_size() // recipe.copies
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("copies", "shards"))
    return shard_by_layer(model, drops=recipe.drops, mesh=mesh)


def shard_by_layer(model: Any, *, drops: bool, **options: Any) -> FSDPModule:
    """`fully_shard` as in PyTorch's tutorial: every layer, then the rest with the root (which keeps its parameters from
    the forward to the backward either way)."""
    for layer in model.model.layers:
        fully_shard(layer, reshard_after_forward=drops, **options)
    return fully_shard(model, **({} if drops else {"reshard_after_forward": False}), **options)


def accumulate(
    model: nn.Module, parts: Sequence[Mapping[str, torch.Tensor]], recipe: Recipe, **inputs: torch.Tensor
) -> torch.Tensor:
    """Forward and backward of all micro-batches, each also given `inputs`; their mean loss."""
    total = torch.zeros(())
    for index, part in enumerate(parts):
        last = index == len(parts) - 1
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(last or recipe.reduces_each)
            model.set_reshard_after_backward(last or recipe.drops)
        waits = isinstance(model, DistributedDataParallel) and not last
        with model.no_sync() if waits else nullcontext():
            loss = model(**part, **inputs, use_cache=False).loss / len(parts)
            torch.autograd.backward(loss)
        total += loss.detach()
    return total
