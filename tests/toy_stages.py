"""Hand-written pipeline stages of the form that codegen emits, their reference in one process, and jobs that run them.

A toy language model of four blocks: embed, two residual MLPs, head. The embedding is carried past the MLPs and added
again before the head, so that several tensors cross a stage boundary. Sizes are odd, so that shards are uneven.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from harness import worker_mesh
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from autoplan.codegen.schedules import schedule_spec
from autoplan.runtime.pipeline import PipelineRunner, PipelineStagePart
from autoplan.runtime.stages import Carried
from autoplan.runtime.zero import apply_zero
from autoplan.schedules.schedule import chunks_of_ranks

VOCAB, DIM, HIDDEN, BATCH, SEQUENCE = 13, 5, 7, 2, 6
NUM_BLOCKS = 4


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCAB, DIM))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.weight)


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM)
        self.scale = nn.Parameter(torch.rand(1))  # one element: on most ranks its shard is empty

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.down(F.gelu(self.up(x)))


class Head(nn.Module):
    """Sum of the losses of the valid tokens over the number of valid tokens in the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB)

    def forward(self, x: torch.Tensor, labels: torch.Tensor, denominator: torch.Tensor) -> torch.Tensor:
        logits = self.out(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum") / denominator


def make_blocks(dtype: torch.dtype = torch.float64) -> dict[str, nn.Module]:
    torch.manual_seed(0)
    blocks = {"embed": Embed(), "mlp0": MLP(), "mlp1": MLP(), "head": Head()}
    return {name: block.to(dtype) for name, block in blocks.items()}


class Stage(nn.Module):
    """The blocks ``names`` of the toy model, called as ``stage(*carried, **inputs)``."""

    def __init__(self, names: Sequence[str], recompute: bool = False, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        made = make_blocks(dtype)
        self.blocks = nn.ModuleDict({name: made[name] for name in names})
        self.recompute = recompute

    def forward(
        self, *carried: torch.Tensor, ids: torch.Tensor, labels: torch.Tensor, denominator: torch.Tensor
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        if "embed" in self.blocks:
            h = self.blocks["embed"](ids)
            embedded, touched = h, torch.zeros(ids.shape, dtype=torch.int64)
        else:
            h, embedded, touched = carried
        for name in ("mlp0", "mlp1"):
            if name in self.blocks:
                block = self.blocks[name]
                h = checkpoint(block, h, use_reentrant=False) if self.recompute else block(h)
                touched = touched + 1
        if "head" in self.blocks:
            assert int(touched.max()) == 2  # an integer tensor crosses the boundary too
            return self.blocks["head"](h + embedded, labels, denominator)
        return h, embedded, touched


CARRIED = (
    Carried((BATCH, SEQUENCE, DIM), torch.float64),
    Carried((BATCH, SEQUENCE, DIM), torch.float64),
    Carried((BATCH, SEQUENCE), torch.int64),
)


def stage_names(index: int, count: int) -> list[str]:
    names = ["embed", "mlp0", "mlp1", "head"]
    return names[index * NUM_BLOCKS // count : (index + 1) * NUM_BLOCKS // count]


@functools.cache
def batch(num_dp: int, num_micro_batches: int, step: int) -> list[list[dict[str, torch.Tensor]]]:
    """The inputs of every rank's micro-batches: [dp rank][micro-batch]. The number of valid tokens differs in each."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * num_dp + num_micro_batches)
    ranks = []
    for rank in range(num_dp):
        micro_batches = []
        for index in range(num_micro_batches):
            ids = torch.randint(0, VOCAB, (BATCH, SEQUENCE), generator=generator)
            labels = torch.randint(0, VOCAB, (BATCH, SEQUENCE), generator=generator)
            labels.view(-1)[: (3 * rank + 2 * index) % (BATCH * SEQUENCE - 1)] = -100
            micro_batches.append({"ids": ids, "labels": labels})
        ranks.append(micro_batches)
    count = sum(int((inputs["labels"] != -100).sum()) for rank in ranks for inputs in rank)
    for inputs in (inputs for rank in ranks for inputs in rank):
        inputs["denominator"] = torch.tensor(float(count), dtype=torch.float64)
    return ranks


def make_optimizer(name: str, module: nn.Module) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, foreach=False)
    return torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.1, foreach=False)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def make_runner(
    shape: tuple[int, int], zero: int, *, recompute: bool = False, schedule: str = "1F1B", virtual: int = 1
) -> tuple[list[PipelineStagePart], PipelineRunner]:
    """This rank's stages on a (pp, dp) mesh, `virtual` of them."""
    mesh = worker_mesh(shape, ("pp", "dp"))
    count = shape[0] * virtual
    parts = []
    for index in chunks_of_ranks(schedule, shape[0], virtual)[mesh["pp"].get_local_rank()]:
        stage = Stage(stage_names(index, count), recompute)
        parts.append(
            PipelineStagePart(
                index,
                stage,
                apply_zero(stage, mesh["dp"], zero, schedule=schedule_spec(schedule)),
                CARRIED if index > 0 else (),
                CARRIED if index < count - 1 else (),
            )
        )
    return parts, PipelineRunner(parts, mesh["pp"], num_stages=count, schedule=schedule_spec(schedule))


def train(
    rank: int,
    world: int,
    shape: tuple[int, int],
    zero: int,
    micro_batches: Sequence[int],
    optimizer: str,
    recompute: bool = False,
    schedule: str = "1F1B",
    virtual: int = 1,
) -> dict[str, float]:
    """Train as many steps as ``micro_batches`` has entries, that many micro-batches in each; the worst differences
    from the reference of this rank's losses, gradients and parameters, relative to the largest reference value."""
    made = make_runner(shape, zero, recompute=recompute, schedule=schedule, virtual=virtual)
    return train_made(shape, micro_batches, optimizer, made)


def train_made(
    shape: tuple[int, int],
    micro_batches: Sequence[int],
    optimizer: str,
    made: tuple[list[PipelineStagePart], PipelineRunner],
) -> dict[str, float]:
    """As ``train``, with what ``make_runner`` gave."""
    parts, runner = made
    stages = nn.ModuleList(part.module for part in parts)
    zero = parts[0].sync.zero
    mesh = worker_mesh(shape, ("pp", "dp"))
    model = Stage(stage_names(0, 1))
    reference_optimizer, optim = make_optimizer(optimizer, model), make_optimizer(optimizer, stages)
    worst = {"loss": 0.0, "grad": 0.0, "value": 0.0}

    def compare(kind: str, found: torch.Tensor, expected: torch.Tensor) -> None:
        assert found.shape == expected.shape
        error = ((found - expected).abs().max() / expected.abs().max()).item()
        worst[kind] = max(worst[kind], error)

    for step, count in enumerate(micro_batches):
        reference_optimizer.zero_grad()
        optim.zero_grad()
        everything = batch(shape[1], count, step)
        expected = []
        for rank_inputs in everything:
            losses = [model(**inputs) for inputs in rank_inputs]
            torch.stack(losses).sum().backward()
            expected.append([loss.detach() for loss in losses])
        own = mesh["dp"].get_local_rank()
        losses = runner.run(everything[own])
        if any("head" in part.module.blocks for part in parts):
            assert len(losses) == count
            compare("loss", torch.stack(losses), torch.stack(expected[own]))
        else:
            assert losses == []
        parameters = dict(model.named_parameters())
        for name, parameter in ((n, p) for part in parts for n, p in part.module.named_parameters()):
            assert parameter.grad is not None, name
            if zero > 0 and shape[1] > 1:
                assert isinstance(parameter, DTensor) and isinstance(parameter.grad, DTensor)
            compare("grad", whole(parameter.grad), parameters[name].grad)
        optim.step()
        reference_optimizer.step()
        for name, parameter in ((n, p) for part in parts for n, p in part.module.named_parameters()):
            compare("value", whole(parameter).detach(), parameters[name].detach())
    return worst
