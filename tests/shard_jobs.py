"""Jobs for test_shards.py: parameters of a program in the hands of PyTorch's own functions."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from parity import Case, global_batch, model_of, part_of
from torch.distributed.tensor import DTensor

from autoplan.runtime.model import ParallelModel
from autoplan.runtime.params import local_of
from autoplan.runtime.shards import ForeignUseError


def program_of(case: Case, spec_json: str, sources: dict[str, str], optimizer: Any = None) -> ParallelModel:
    """The program of a case after one step."""
    pm = model_of(case, spec_json, sources, torch.float64, optimizer)
    pm.step(part_of(global_batch(case), pm.data_rank, pm.data_world))
    return pm


def refusal(work: Callable[[], Any]) -> str:
    """Message of the refusal, or "" if the work is done."""
    try:
        work()
    except ForeignUseError as exc:
        return str(exc)
    return ""


def use(rank: int, world: int, case: Case, spec_json: str, sources: dict[str, str]) -> dict[str, Any]:
    """What torch's functions make of the parameters, beside what the program itself says."""
    pm = program_of(case, spec_json, sources)
    whole, gradients, norm = pm.state_dict(), pm.gradients(), float(pm.grad_norm())
    found: dict[str, Any] = {}
    found["refused"] = refusal(lambda: torch.nn.utils.get_total_norm([p.grad for p in pm.parameters()]))
    for name, p in pm.named_parameters():
        assert isinstance(p, torch.nn.Parameter), name
        full = p.full_tensor() if isinstance(p, DTensor) else p
        grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        assert torch.equal(full.detach(), whole[name]) and torch.equal(grad, gradients[name]), name
    if not found["refused"]:
        before = torch.nn.utils.clip_grad_norm_(pm.parameters(), 0.5 * norm)
        found["norm"] = float(before.full_tensor() if isinstance(before, DTensor) else before), norm
        found["clipped"] = float(pm.grad_norm()), 0.5 * norm
    else:
        pm.clip_grad_norm_(0.5 * norm)
        found["clipped"] = float(pm.grad_norm()), 0.5 * norm
    # a checkpoint of the parameters holds all of them, and comes back
    folder = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(folder, 0)
    dcp.save(dict(pm.named_parameters()), checkpoint_id=folder[0])
    loaded = {n: torch.full_like(t, float("nan")) for n, t in whole.items() if n in gradients}
    dcp.load(loaded, checkpoint_id=folder[0])
    found["saved"] = all(torch.equal(t, whole[n]) for n, t in loaded.items())
    with torch.no_grad():
        for p in pm.parameters():
            local_of(p).zero_()
    dcp.load(dict(pm.named_parameters()), checkpoint_id=folder[0])
    found["loaded"] = all(torch.equal(t, whole[n]) for n, t in pm.state_dict().items())
    by_number = {f"state.{i}": p.detach() * 2 for i, p in enumerate(pm.parameters())}
    found["by_number"] = refusal(lambda: [t.__create_write_items__(n, t) for n, t in by_number.items()])
    return found


def norms(
    rank: int, world: int, case: Case, spec_json: str, sources: dict[str, str], orders: list[float]
) -> tuple[list[tuple[float, float, dict[str, torch.Tensor]]], list[str]]:
    """For each order: the norm, the norm after clipping to the half of it, and the clipped gradients. Then what is said
    of an order that is none, and of one NaN, on the last rank that counts any, in each order; the gradients are as they
    were then."""
    pm = model_of(case, spec_json, sources, torch.float64)
    batch, found, said = part_of(global_batch(case), pm.data_rank, pm.data_world), [], []
    for order in orders:
        pm.step(batch)
        norm = float(pm.grad_norm(order))
        assert float(pm.clip_grad_norm_(0.5 * norm, norm_type=order, error_if_nonfinite=True)) == norm
        found.append((norm, float(pm.grad_norm(order)), pm.gradients()))
    for bad in ({"norm_type": 0.0}, {"norm_type": float("nan")}):
        said.append(_error(lambda bad=bad: pm.clip_grad_norm_(1.0, **bad)))
    counted = [grad for p, grad in pm._gradients() if pm._replicas.counts_here(p) and grad.numel()]
    of_ranks: list[Any] = [None] * world
    dist.all_gather_object(of_ranks, bool(counted))
    if rank == max(r for r in range(world) if of_ranks[r]):
        counted[-1][(0,) * counted[-1].dim()] = float("nan")
    before = [grad.clone() for _, grad in pm._gradients()]
    for order in orders:
        said.append(_error(lambda order=order: pm.clip_grad_norm_(1.0, order, error_if_nonfinite=True)))
    for (_, grad), old in zip(pm._gradients(), before, strict=True):
        torch.testing.assert_close(grad, old, rtol=0, atol=0, equal_nan=True)
    return found, said


def _error(work: Callable[[], Any]) -> str:
    try:
        work()
    except (RuntimeError, ValueError) as exc:
        return f"{type(exc).__name__}: {exc}"
    return ""


def own_optimizer(rank: int, world: int, case: Case, spec_json: str, sources: dict[str, str]) -> float:
    """Largest difference between an optimizer made of `pm.parameters()` and the program's own, two steps."""

    def make(ps: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(ps, lr=1e-2, foreach=False)

    mine, theirs = program_of(case, spec_json, sources), program_of(case, spec_json, sources, make)
    optimizer = make(list(mine.parameters()))
    for step in range(2):
        for pm, own in ((mine, optimizer), (theirs, theirs.optimizer)):
            pm.step(part_of(global_batch(case, step), pm.data_rank, pm.data_world))
            own.step()
    a, b = mine.state_dict(), theirs.state_dict()
    return max(float((a[n] - b[n]).abs().max()) for n in a)


def optimizer_state(rank: int, world: int, case: Case, spec_json: str, sources: dict[str, str]) -> tuple[str, float]:
    """What a checkpoint of `pm.optimizer.state_dict()` by numbers says; with names: the difference of the next steps
    between a program that went on and one that was given its state."""

    def make(ps: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(ps, lr=1e-2, foreach=False)

    one, two = program_of(case, spec_json, sources, make), program_of(case, spec_json, sources, make)
    batch = part_of(global_batch(case), one.data_rank, one.data_world)
    one.optimizer.step()
    state = one.optimizer.state_dict()
    said = refusal(
        lambda: [
            t.__create_write_items__(f"optim.state.{n}.{k}", t)
            for n, values in state["state"].items()
            for k, t in values.items()
            if isinstance(t, DTensor)
        ]
    )
    names = [n for n, p in one.named_parameters() if p.requires_grad]
    moments = {f"{n}.{k}": t for n, i in zip(names, state["state"], strict=True) for k, t in state["state"][i].items()}
    folder = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(folder, 0)
    dcp.save(moments, checkpoint_id=folder[0])
    two.optimizer.step()  # so that it has moments to load into; of another gradient
    for p in two.parameters():
        local_of(p.grad).mul_(3)
    two.optimizer.step()
    theirs = two.optimizer.state_dict()
    into = {f"{n}.{k}": t for n, i in zip(names, theirs["state"], strict=True) for k, t in theirs["state"][i].items()}
    dcp.load(into, checkpoint_id=folder[0])
    two.optimizer.load_state_dict(theirs)
    two.load_state_dict(one.state_dict())
    for pm in (one, two):
        pm.step(batch)
        pm.optimizer.step()
    a, b = one.state_dict(), two.state_dict()
    return said, max(float((a[n] - b[n]).abs().max()) for n in a)


def penalty(rank: int, world: int, case: Case, spec_json: str, sources: dict[str, str]) -> float:
    """A backward of the user's own, of a penalty on the parameters: gradients against those by hand."""
    pm = program_of(case, spec_json, sources)
    before = pm.gradients()
    sum((p * p).sum() for p in pm.parameters()).full_tensor().backward()
    after, whole = pm.gradients(), pm.state_dict()
    return max(float((after[n] - before[n] - 2 * whole[n]).abs().max()) for n in before)


def numbers(rank: int, world: int, case: Case, spec_json: str, sources: dict[str, str]) -> list[tuple[Any, Any]]:
    """Numbers that a training loop reads of parameters and gradients, beside those of the whole tensors."""
    pm = program_of(case, spec_json, sources)
    whole, gradients = pm.state_dict(), pm.gradients()
    out: list[tuple[Any, Any]] = []
    for name, p in pm.named_parameters():
        full, grad = whole[name], gradients[name]
        out.append((p.grad.norm().item(), grad.norm().item()))
        out.append((p.data.pow(2).sum().item(), full.pow(2).sum().item()))
        out.append((float(p.detach().mean()), full.mean().item()))
        out.append((p.grad.abs().max().item(), grad.abs().max().item()))
        out.append((int(torch.count_nonzero(p.detach())), int(torch.count_nonzero(full))))
        cut = isinstance(p, DTensor) and not all(placement.is_replicate() for placement in p.placements)
        if cut and rank == world - 1:
            local_of(p.grad)[(0,) * p.dim()] = float("nan")
        out.append((bool(p.grad.isnan().any()), cut))
    pm.step(part_of(global_batch(case), pm.data_rank, pm.data_world))
    total = torch.nn.utils.clip_grad_norm_(pm.parameters(), 1e9, error_if_nonfinite=True)
    out += [(total.item(), pm.grad_norm().item()), (float(f"{total:.9e}"), pm.grad_norm().item())]
    return out


def parts_of_optimizer(
    rank: int, world: int, case: Case, spec_json: str, sources: dict[str, str]
) -> tuple[list[str], float, int]:
    """What is said of gradients of `pm.optimizer.param_groups`; then how far two updates are from those of another
    program that nobody asked, and the number of plain parameters in an update."""

    def make(ps: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(ps, lr=1e-2, momentum=0.9)

    asked, left = (program_of(case, spec_json, sources, make) for _ in range(2))
    seen: list[int] = []
    parts = [p for group in asked.optimizer.param_groups for p in group["params"]]
    asked.optimizer.register_step_pre_hook(
        lambda *_: seen.append(sum(type(p) is torch.nn.Parameter and p.grad is not None for p in parts))
    )
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    said = [
        refusal(lambda: torch.nn.utils.clip_grad_norm_(parts, 1e-3)),
        refusal(lambda: scaler.unscale_(asked.optimizer)),
        refusal(lambda: setattr(parts[0], "grad", None)),
    ]
    for step in range(2):
        for pm in (asked, left):
            pm.optimizer.zero_grad()
            pm.step(part_of(global_batch(case, step), pm.data_rank, pm.data_world))
            pm.optimizer.step()
    a, b = asked.state_dict(), left.state_dict()
    assert isinstance(parts[0], torch.nn.Parameter) and parts[0].is_leaf
    return said, max(float((a[n] - b[n]).abs().max()) for n in a), min(seen) - len(parts)


def foreign_states(rank: int, world: int, case: Case, spec_json: str, sources: dict[str, str]) -> list[str]:
    """What is said of states that are not of this program: whole moments, and those of another parameter; and of its
    own, by way of a file."""

    def make(ps: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(ps, lr=1e-2)

    pm = program_of(case, spec_json, sources, make)
    pm.optimizer.step()
    state = pm.optimizer.state_dict()
    whole = {
        n: {k: t.full_tensor() if isinstance(t, DTensor) else t for k, t in s.items()}
        for n, s in state["state"].items()
    }
    numbers = list(state["state"])
    turned = dict(zip(numbers, [state["state"][n] for n in reversed(numbers)], strict=True))
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    own = torch.load(file, weights_only=False)
    return [
        refusal(lambda s=s: pm.optimizer.load_state_dict(s))
        for s in ({**state, "state": whole}, {**state, "state": turned}, own)
    ]


def changed_parts(rank: int, world: int, case: Case, spec_json: str, sources: dict[str, str]) -> list[str]:
    """What is said of a change of a row or a column of a gradient; if nothing, the whole gradient has it."""
    found = []
    for p in program_of(case, spec_json, sources).parameters():
        if not isinstance(p, DTensor) or p.dim() != 2:
            continue
        for part in ((slice(0, 1),), (slice(None), slice(1, 2))):
            grad: Any = p.grad
            want = grad.full_tensor().clone()
            said = refusal(lambda grad=grad, part=part: grad[part].mul_(2))  # type: ignore[misc]
            if not said:
                want[part].mul_(2)
            assert torch.equal(grad.full_tensor(), want)
            found.append(said)
    return found
