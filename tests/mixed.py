"""Mixed precision by hand, on one device and in plain torch: what programs in 16 bits are compared with.

Float32 parameters, a 16-bit model that is loaded from them before every step, gradients of every micro-batch added in
float32 (or left to add up in 16 bits), AdamW on float32. None of it is the runtime's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from parity import Case, full_tensors, global_batch, is_hf, make_model, part_of
from torch import nn

from autoplan.config.precision import executed_precision
from autoplan.runtime.model import ParallelModel
from autoplan.runtime.spec import ProgramSpec

CLIP = 0.5


@dataclass(frozen=True)
class ByHand:
    """What a hand-written run reports, as `parity.Trained` does."""

    losses: tuple[float, ...]
    gradients: dict[str, torch.Tensor]
    norm: float
    parameters: dict[str, torch.Tensor]


def plain_model(case: Case) -> nn.Module:
    """Of the case's family; experts one after the other (their fused products know no float64)."""
    model = make_model(case.family, 0.0)
    if hasattr(getattr(model, "config", None), "_experts_implementation"):
        model.config._experts_implementation = "eager"
    return model


def loss_of(model: nn.Module, family: str, batch: Mapping[str, torch.Tensor], count: int) -> torch.Tensor:
    """The sum of the cross entropies of a micro-batch, over the number of labels of the whole batch."""
    labels = batch["labels"]
    if is_hf(family):  # as transformers: in float32, the label of a position is the next token
        logits = model(input_ids=batch["input_ids"], use_cache=False).logits.float()
        labels = F.pad(labels, (0, 1), value=-100)[:, 1:]
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    else:  # in what the model computes, each token; the sum over tokens in float32
        logits = model(batch["ids"])
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").float().sum()
    return total / count


def region_of(precision: str) -> torch.autocast:
    """PyTorch's own autocast, on if the precision has it."""
    dtype = executed_precision(precision).autocast
    return torch.autocast("cpu", getattr(torch, dtype or "bfloat16"), enabled=dtype is not None)


def count_of(family: str, batch: Mapping[str, torch.Tensor]) -> int:
    labels = batch["labels"][:, 1:] if is_hf(family) else batch["labels"]
    return int((labels != -100).sum())


def by_hand(
    case: Case,
    num_steps: int = 3,
    *,
    accumulate: torch.dtype | None = None,
    samples: int = 12,
    scale: float = 1.0,
    lr: float = 1e-2,
) -> ByHand:
    """Train one device on the micro-batches of all data-parallel ranks of a case.

    Float32 sums of two ranks are the same in any order; those of micro-batches are added first where a rank keeps its
    own sum (ZeRO 0 and 1), else those of ranks.

    Args:
        accumulate: what gradients of micro-batches are added in; None: as the case's precision says.
        scale: of the loss, taken out of the gradients.
    """
    precision = executed_precision(case.precision)
    compute = getattr(torch, str(precision.compute))
    accumulate = accumulate or getattr(torch, str(precision.gradients))
    model = plain_model(case)
    for p in model.parameters():
        p.data = p.data.to(compute)
    start, _ = full_tensors(case, torch.float32)
    masters = {n: nn.Parameter(start[n].clone(), p.requires_grad) for n, p in model.named_parameters()}
    names = {n: n for n in masters}
    if case.zero and case.dp > 1 and case.family == "llama-tied":  # a copy for every block
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
        names["lm_head.weight"] = "model.embed_tokens.weight"
    optimizer = torch.optim.AdamW([m for m in masters.values() if m.requires_grad], lr=lr, foreach=False)
    losses, first, norm = [], {}, 0.0
    for step in range(num_steps):
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(masters[names[name]])
        batch = global_batch(case, step, samples)
        count, parts = count_of(case.family, batch), case.dp * case.num_micro_batches
        found: list[dict[str, torch.Tensor]] = []
        total = 0.0
        for index in range(parts):
            model.zero_grad()
            with region_of(case.precision):
                loss = loss_of(model, case.family, part_of(batch, index, parts), count)
            (loss * scale).backward()
            total += float(loss.detach())
            found.append({n: p.grad.to(accumulate) for n, p in model.named_parameters() if p.grad is not None})
        of_rank = [found[r * case.num_micro_batches :][: case.num_micro_batches] for r in range(case.dp)]
        groups = [list(g) for g in zip(*of_rank, strict=True)] if case.zero >= 2 else of_rank
        if case.zero >= 2:  # shards are float32 between micro-batches
            groups = [[{n: g.float() for n, g in added(group).items()}] for group in groups]
        sums = added([added(g) for g in groups])
        for name in [n for n in sums if names[n] != n]:
            sums[names[name]] += sums.pop(name)
        for name, grad in sums.items():
            masters[name].grad = grad.float() / scale
        if step == 0:
            first = {n: masters[n].grad.clone() for n in sums}
        norm_now = torch.stack([masters[n].grad.double().square().sum() for n in sums]).sum().sqrt()
        for name in sums:
            masters[name].grad *= torch.clamp(CLIP / (norm_now + 1e-6), max=1.0).float()
        norm = float(norm_now) if step == 0 else norm
        optimizer.step()
        losses.append(total)
    return ByHand(tuple(losses), first, norm, {n: m.detach() for n, m in masters.items()})


def added(gradients: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Sum, one after the other, in their dtype."""
    out = dict(gradients[0])
    for more in gradients[1:]:
        for name, grad in more.items():
            out[name] = out[name] + grad
    return out


def gradients_by_hand(case: Case, step: int) -> dict[str, torch.Tensor]:
    """Of one batch and the first parameters, in the case's precision on one device."""
    compute = getattr(torch, str(executed_precision(case.precision).compute))
    model = plain_model(case)
    for p in model.parameters():
        p.data = p.data.to(compute)
    batch = global_batch(case, step)
    count, parts = count_of(case.family, batch), case.dp * case.num_micro_batches
    scale = 2.0**16 if case.precision.startswith("fp16") else 1.0
    found = []
    for index in range(parts):
        model.zero_grad()
        with region_of(case.precision):
            loss = loss_of(model, case.family, part_of(batch, index, parts), count)
        (loss * scale).backward()
        found.append({n: p.grad.float() / scale for n, p in model.named_parameters() if p.grad is not None})
    return added(found)


def exact_gradients(case: Case, step: int = 0) -> dict[str, torch.Tensor]:
    """The gradients of the same parameters in float64, all at once."""
    model = plain_model(case).double()
    batch = global_batch(case, step)
    loss = loss_of_exact(model, case.family, batch, count_of(case.family, batch))
    loss.backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def loss_of_exact(model: nn.Module, family: str, batch: Mapping[str, torch.Tensor], count: int) -> torch.Tensor:
    """As `loss_of`, nothing cast."""
    labels = batch["labels"]
    if is_hf(family):
        logits = model(input_ids=batch["input_ids"], use_cache=False).logits
        labels = F.pad(labels, (0, 1), value=-100)[:, 1:]
    else:
        logits = model(batch["ids"])
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / count


def gradient_job(
    rank: int, world: int, case: Case, spec_json: str, sources: dict[str, str], num_batches: int
) -> list[dict[str, torch.Tensor]] | None:
    """Gradients of several batches at the first parameters; rank 0 reports."""
    params, buffers = full_tensors(case, torch.float32)
    spec = ProgramSpec.from_json(spec_json)
    pm = ParallelModel(spec, sources, params, buffers, num_micro_batches=case.num_micro_batches)
    out = []
    for step in range(num_batches):
        pm.step(part_of(global_batch(case, step), pm.data_rank, pm.data_world))
        out.append(pm.gradients())
    return out if rank == 0 else None


def errors_of(got: Mapping[str, torch.Tensor], exact: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Of every parameter the norm of the difference of gradients, over that of the exact one."""
    assert set(got) == set(exact), set(got) ^ set(exact)
    return {n: float((got[n].double() - g).norm() / g.norm()) for n, g in exact.items()}


def error_of(got: Mapping[str, torch.Tensor], exact: Mapping[str, torch.Tensor]) -> float:
    """The same of all gradients together."""
    off = sum(float((got[n].double() - g).square().sum()) for n, g in exact.items())
    return float((off / sum(float(g.square().sum()) for g in exact.values())) ** 0.5)


def largest_factor(errors: Mapping[str, float], others: Mapping[str, float]) -> tuple[float, str]:
    """How many times the error is that of the others, at most, and of which parameter."""
    return max((errors[n] / others[n], n) for n in others)
