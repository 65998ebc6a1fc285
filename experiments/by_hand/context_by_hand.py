"""Context parallelism as one writes it by hand around Hugging Face's Llama: what context_parallel.py compares with.

DDP around the untouched model, every rank with its part of each sequence and the positions of its tokens; attention is
registered with transformers. Three ways: keys and values gathered (`all_gather` with gradients), a ring of
`batch_isend_irecv` with online softmax on PyTorch's own kernel, Ulysses by `all_to_all_single`. The first two cut
zig-zag, Ulysses in contiguous parts. (PyTorch's own `context_parallel` has no kernels for CPUs.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_gather, all_to_all_single
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

ATen = torch.ops.aten


def parts_of(x: torch.Tensor, rank: int, world: int, zigzag: bool) -> torch.Tensor:
    """This rank's tokens of [b, s, ...]."""
    if not zigzag:
        return x.chunk(world, 1)[rank]
    chunks = x.chunk(2 * world, 1)
    return torch.cat((chunks[rank], chunks[2 * world - 1 - rank]), 1)


def _repeated(k: torch.Tensor, heads: int) -> torch.Tensor:
    return k.repeat_interleave(heads // k.shape[1], 1)


def by_gather(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Keys and values of all ranks in order, and a mask of what each query may see."""
    rank, world = dist.get_rank(), dist.get_world_size()
    keys, values = (torch.cat(_in_order(all_gather(x.contiguous())), 2) for x in (k, v))
    length = q.shape[2] // 2
    first = torch.arange(length)
    place = torch.cat((first + rank * length, first + (2 * world - 1 - rank) * length))
    mask = place[:, None] >= torch.arange(keys.shape[2])[None]
    return functional.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)


def _in_order(parts: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    halves = [x.chunk(2, 2) for x in parts]
    return [a for a, _ in halves] + [b for _, b in reversed(halves)]


def by_ulysses(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Heads for parts of the sequence, local attention, and back."""
    world = dist.get_world_size()

    def to_heads(x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] < world:
            x = _repeated(x, world)
        sent = torch.stack(x.chunk(world, 1))
        return torch.cat(all_to_all_single(torch.empty_like(sent), sent).unbind(0), 2)

    out = functional.scaled_dot_product_attention(*map(to_heads, (q, k, v)), is_causal=True, enable_gqa=True)
    sent = torch.stack(out.chunk(world, 2))
    return torch.cat(all_to_all_single(torch.empty_like(sent), sent).unbind(0), 1)


def _pass_on(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    rank, world = dist.get_rank(), dist.get_world_size()
    got, ops = [torch.empty_like(t) for t in tensors], []
    for mine, theirs in zip(tensors, got, strict=True):
        ops.append(dist.P2POp(dist.isend, mine, (rank + 1) % world))
        ops.append(dist.P2POp(dist.irecv, theirs, (rank - 1) % world))
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return got


def _visible(rank: int, source: int, length: int) -> tuple[slice, slice, bool]:
    """Queries, keys, whether causal."""
    everything = slice(0, 2 * length)
    if source == rank:
        return everything, everything, True
    return (everything, slice(0, length), False) if source < rank else (slice(length, 2 * length), everything, False)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        rank, world = dist.get_rank(), dist.get_world_size()
        out = torch.zeros_like(q)
        lse = q.new_full(q.shape[:3], float("-inf"))
        here = [k.contiguous(), v.contiguous()]
        for step in range(world):
            rows, columns, causal = _visible(rank, (rank - step) % world, q.shape[2] // 2)
            part, ends = ATen._scaled_dot_product_flash_attention_for_cpu(
                q[:, :, rows], here[0][:, :, columns], here[1][:, :, columns], 0.0, causal
            )
            new = torch.logaddexp(lse[:, :, rows], ends)
            share, weight = (lse[:, :, rows] - new).exp()[..., None], (ends - new).exp()[..., None]
            out[:, :, rows] = out[:, :, rows] * share + part * weight
            lse[:, :, rows] = new
            if step < world - 1:
                here = _pass_on(here)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        rank, world = dist.get_rank(), dist.get_world_size()
        for_q = torch.zeros_like(q)
        here = [k.contiguous(), v.contiguous(), k.new_zeros(k.shape), v.new_zeros(v.shape)]
        for step in range(world):
            rows, columns, causal = _visible(rank, (rank - step) % world, q.shape[2] // 2)
            one, two, three = ATen._scaled_dot_product_flash_attention_for_cpu_backward(
                grad[:, :, rows], q[:, :, rows], here[0][:, :, columns], here[1][:, :, columns], out[:, :, rows],
                lse[:, :, rows], 0.0, causal,
            )  # fmt: skip
            for_q[:, :, rows] += one
            here[2][:, :, columns] += two
            here[3][:, :, columns] += three
            here = _pass_on(here if step < world - 1 else here[2:])
        return for_q, here[0], here[1]


def by_ring(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Keys and values from rank to rank."""
    out: torch.Tensor = _Ring.apply(q, k, v)  # type: ignore[no-untyped-call]
    return out


METHODS: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "gather": by_gather,
    "ring": by_ring,
    "ulysses": by_ulysses,
}


def cut(model: nn.Module, method: str) -> nn.Module:
    """Register the method as the model's attention, and DDP around the model."""

    def attend(
        module: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: object, **_: object
    ) -> tuple[torch.Tensor, None]:
        return METHODS[method](q, k, v).transpose(1, 2).contiguous(), None

    name = f"by_hand_{method}"
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, lambda *_, **__: None)
    model.set_attn_implementation(name)  # type: ignore[operator]
    return DistributedDataParallel(model)


def make_step(model: nn.Module, batch: dict[str, torch.Tensor], method: str) -> Callable[[], torch.Tensor]:
    """Forward and backward with fresh gradients. The loss is this rank's part of the global mean, times the ranks,
    which DDP divides by; labels are shifted before they are cut."""
    rank, world = dist.get_rank(), dist.get_world_size()
    ids, labels = batch["input_ids"], batch["labels"]
    shifted = functional.pad(labels[:, 1:], (0, 1), value=-100)
    positions = torch.arange(ids.shape[1]).expand(ids.shape[0], -1)
    mine = [parts_of(x, rank, world, method != "ulysses") for x in (ids, shifted, positions)]
    num_valid = int((shifted != -100).sum())

    def step() -> torch.Tensor:
        for p in model.parameters():
            p.grad = None
        logits = model(input_ids=mine[0], position_ids=mine[2], use_cache=False).logits
        total = functional.cross_entropy(logits.flatten(0, 1).float(), mine[1].flatten(), reduction="sum")
        loss = total * (world / num_valid)
        torch.autograd.backward(loss)
        return loss.detach() / world

    return step
