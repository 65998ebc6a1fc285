"""Expert parallelism as one writes it by hand around Hugging Face's Mixtral: what expert_parallel.py compares with.

`spread`: DDP replicates everything but the experts. Every rank keeps a contiguous part of them; tokens travel by
`torch.distributed.nn.functional.all_to_all_single` to the rank of each expert that they chose and back, and each local
expert runs on its rows (the loop of transformers' own `MixtralExperts`).

`cut`: every rank keeps a part of the inside of every expert; DTensor cuts attention and tables (`parallelize_module`;
the linears of a block share one replicated input). All ranks have the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.nn.functional import all_to_all_single
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from experiments.by_hand.dtensor_llama import llama_plan


class SpreadExperts(nn.Module):
    """This rank's experts of a `MixtralExperts`, for the tokens of all ranks."""

    def __init__(self, whole: nn.Module) -> None:
        super().__init__()
        rank, self.world = dist.get_rank(), dist.get_world_size()
        gate_up, down = whole.gate_up_proj, whole.down_proj
        self.num_local = gate_up.shape[0] // self.world
        mine = slice(rank * self.num_local, (rank + 1) * self.num_local)
        self.gate_up_proj = nn.Parameter(gate_up.detach()[mine].clone())
        self.down_proj = nn.Parameter(down.detach()[mine].clone())

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """[t, h], [t, k], [t, k] -> [t, h]."""
        chosen = index.flatten().argsort(stable=True)
        token = chosen // index.shape[1]
        counts = torch.bincount(index.flatten(), minlength=self.world * self.num_local)
        here = torch.empty_like(counts)
        dist.all_to_all_single(here, counts)
        sent = counts.view(self.world, -1).sum(1).tolist()
        come = here.view(self.world, -1).sum(1).tolist()
        rows = hidden[token]
        arrived = all_to_all_single(rows.new_empty(sum(come), rows.shape[1]), rows, come, sent)
        owner = torch.arange(self.num_local).repeat(self.world).repeat_interleave(here)
        made = torch.zeros_like(arrived)
        for e in range(self.num_local):
            places = (owner == e).nonzero()[:, 0]
            gate, up = functional.linear(arrived[places], self.gate_up_proj[e]).chunk(2, dim=-1)
            out = functional.linear(functional.silu(gate) * up, self.down_proj[e])
            made = made.index_add(0, places, out)
        back = all_to_all_single(torch.empty_like(rows), made, sent, come)
        return torch.zeros_like(hidden).index_add(0, token, back * weights.flatten()[chosen].unsqueeze(1))


def spread(model: nn.Module) -> nn.Module:
    """Put `SpreadExperts` in place of the experts of every layer, and DDP around the rest."""
    ignored = []
    for name, module in list(model.named_modules()):
        if type(module).__name__ == "MixtralExperts":
            parent, _, attr = name.rpartition(".")
            setattr(model.get_submodule(parent), attr, SpreadExperts(module))
            ignored += [f"{name}.gate_up_proj", f"{name}.down_proj"]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    return DistributedDataParallel(model)


class _Copied(torch.autograd.Function):
    """Pass on a tensor that is the same on every rank; the backward sums the gradients of the ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


class _Summed(torch.autograd.Function):
    """The sum over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class CutExperts(nn.Module):
    """A `MixtralExperts` with this rank's part of the inside of every expert."""

    def __init__(self, whole: Any) -> None:
        super().__init__()
        rank, world = dist.get_rank(), dist.get_world_size()
        gate, up = (w.chunk(world, dim=1)[rank] for w in whole.gate_up_proj.detach().chunk(2, dim=1))
        whole.gate_up_proj = nn.Parameter(torch.cat([gate, up], dim=1))
        whole.down_proj = nn.Parameter(whole.down_proj.detach().chunk(world, dim=2)[rank].clone())
        self.inside = whole

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """[t, h], [t, k], [t, k] -> [t, h]."""
        out: torch.Tensor = _Summed.apply(self.inside(_Copied.apply(hidden), index, _Copied.apply(weights)))
        return out


def cut(model: nn.Module) -> nn.Module:
    """Cut attention, tables and the inside of the experts of a model over all ranks."""
    layers: Any = model.get_submodule("model.layers")
    plan = {n: s for n, s in llama_plan(len(layers), "TP shared").items() if ".mlp" not in n}
    for layer in layers:
        layer.mlp.experts = CutExperts(layer.mlp.experts)
    return parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), plan)


def cut_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Full gradients of a model of `cut`, by the names of the plain model. A collective."""
    out, world = {}, dist.get_world_size()
    for name, p in model.named_parameters():
        grad: Any = p.grad
        if ".inside." in name:
            parts = [torch.empty_like(grad) for _ in range(world)]
            dist.all_gather(parts, grad.contiguous())
            halves = zip(*(part.chunk(2, dim=1) for part in parts), strict=True)
            grad = torch.cat(parts, dim=2) if "down" in name else torch.cat([x for half in halves for x in half], dim=1)
        out[name.replace(".inside.", ".")] = grad.full_tensor() if isinstance(grad, DTensor) else grad
    return out


def make_step(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> Callable[[], torch.Tensor]:
    """Forward and backward with fresh gradients; the loss of this rank's part of the batch."""

    def step() -> torch.Tensor:
        for p in model.parameters():
            p.grad = None
        loss: torch.Tensor = model(**batch, use_cache=False).loss
        torch.autograd.backward(loss)
        return loss.detach()

    return step


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Full gradients of the mean loss over all ranks, by the names of the plain model. A collective."""
    out, world = {}, dist.get_world_size()
    for name, p in model.module.named_parameters():  # type: ignore[union-attr]
        if p.grad is None:
            continue
        if ".experts." in name and isinstance(model.module.get_submodule(name.rpartition(".")[0]), SpreadExperts):  # type: ignore[union-attr]
            parts = [torch.empty_like(p.grad) for _ in range(world)]
            dist.all_gather(parts, p.grad)
            out[name] = torch.cat(parts) / world  # each holds the sum over the tokens of all ranks
        else:
            out[name] = p.grad
    return out
