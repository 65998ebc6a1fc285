"""Jobs for test_precision.py, on every rank."""

from __future__ import annotations

import functools
from typing import Any

import models
import torch
import torch.distributed as dist
from parity import Case, full_tensors, global_batch, part_of

import autoplan
from autoplan.runtime.compression import Compressor, PowerSGD
from autoplan.runtime.model import ParallelModel
from autoplan.runtime.params import local_of
from autoplan.runtime.spec import ProgramSpec


def _model(case: Case, spec_json: str, sources: dict[str, str]) -> ParallelModel:
    params, buffers = full_tensors(case, torch.float32)
    return ParallelModel(
        ProgramSpec.from_json(spec_json),
        sources,
        params,
        buffers,
        num_micro_batches=case.num_micro_batches,
        optimizer=functools.partial(torch.optim.AdamW, lr=1e-2, foreach=False),
    )


def overflow(
    rank: int, world: int, case: Case, spec_json: str, sources: dict[str, str], bad_rank: int
) -> dict[str, Any]:
    """Four steps; in the second one `bad_rank` alone has an infinite element in one of its gradients."""
    pm = _model(case, spec_json, sources)
    scaler, optimizer = pm.loss_scaler, pm.optimizer
    assert scaler is not None and optimizer is not None
    scaler.scale, scaler.growth_interval = 2.0**15, 2
    found: dict[str, Any] = {"scales": [], "skipped": [], "changed": [], "norm_is_inf": []}
    inner = scaler.unscale_
    for step in range(4):

        def spoilt(parameters: Any, *rest: Any, step: int = step) -> None:
            parameters = list(parameters)
            if step == 1 and rank == bad_rank:
                local_of(next(p.grad for p in parameters if p.grad is not None and local_of(p.grad).numel())).view(-1)[
                    0
                ] = float("inf")
            inner(parameters, *rest)

        scaler.unscale_ = spoilt  # type: ignore[method-assign]
        before = [local_of(p).detach().clone() for p in pm.parameters()]
        counts = [float(s["step"]) for s in optimizer.state.values()]
        pm.step(part_of(global_batch(case, step), pm.data_rank, pm.data_world))
        norm = pm.clip_grad_norm_(1.0)
        optimizer.step()
        same = [torch.equal(local_of(p), old) for p, old in zip(pm.parameters(), before, strict=True) if old.numel()]
        assert all(same) or not any(same)
        counted = [float(s["step"]) for s in optimizer.state.values()] != counts
        assert counted != all(same)
        found["scales"].append(scaler.scale)
        found["skipped"].append(scaler.skipped)
        found["changed"].append(not all(same))
        found["norm_is_inf"].append(bool(torch.isinf(norm)))
    found["num_skipped"] = scaler.num_skipped
    return found


def norms(
    rank: int, world: int, case: Case, spec_json: str, sources: dict[str, str], scales: list[float]
) -> list[float]:
    """Norm of the gradient of one batch at several scales of the loss."""
    pm, out = _model(case, spec_json, sources), []
    assert pm.loss_scaler is not None
    for scale in scales:
        pm.loss_scaler.scale = scale
        pm.step(part_of(global_batch(case), pm.data_rank, pm.data_world))
        out.append(float(pm.clip_grad_norm_(1e9)))
    return out


def train(rank: int, world: int, precision: str, pins: dict[str, Any]) -> tuple[list[float], dict[str, list[str]], str]:
    """A user's loop."""
    batch = models.token_batch(8, 16)
    model = models.make_llama()
    pm = autoplan.parallelize(
        model,
        "local",
        example_inputs={k: v[:4] for k, v in batch.items()},
        optimizer=functools.partial(torch.optim.AdamW, lr=1e-2),
        pins=pins,
        precision=precision,
        check=pins.get("tp") == 2,
    )
    seen: set[str] = set()
    layer = next(m for m in pm.stage.modules() if type(m).__name__.removeprefix("FSDP").startswith("Layer"))
    layer.register_forward_pre_hook(
        lambda m, args: seen.update(str(p.dtype) for p in m.parameters())
    )  # gathered by now
    layer.register_forward_hook(lambda m, args, out: seen.add(str(out.dtype)))
    size = 8 // pm.data_world
    mine = {k: v[pm.data_rank * size : (pm.data_rank + 1) * size] for k, v in batch.items()}
    losses = []
    for _ in range(6):
        losses.append(pm.step(mine).item())
        pm.clip_grad_norm_(1.0)
        assert pm.optimizer is not None
        pm.optimizer.step()
    state = pm.state_dict()
    model.load_state_dict(state)
    return losses, {"stored": sorted({str(t.dtype) for t in state.values()}), "computed": sorted(seen)}, str(pm.plan)


def held_bytes(rank: int, world: int, case: Case, spec_json: str, sources: dict[str, str]) -> dict[str, int]:
    """Bytes of the tensors that a rank has after a step: what it stores, copies, gradients, moments."""
    pm = _model(case, spec_json, sources)
    pm.step(part_of(global_batch(case), pm.data_rank, pm.data_world))
    assert pm.optimizer is not None
    pm.optimizer.step()
    stored = {id(p): local_of(p).nbytes for p in pm.parameters()}
    gradients = {id(p): local_of(p.grad).nbytes for p in pm.parameters() if p.grad is not None}
    moments = [local_of(t).nbytes for s in pm.optimizer.state.values() for t in s.values() if t.numel() > 1]
    copies = [] if pm._copies is None else [c.copy.nbytes for c in pm._copies._copies]
    assert not [c for c in ([] if pm._copies is None else pm._copies._copies) if c.copy.grad is not None]
    return {
        "stored": sum(stored.values()) + sum(copies) + sum(moments),
        "gradients": sum(gradients.values()),
    }


def given_in_16_bits(rank: int, world: int, zero: int) -> tuple[list[float], dict[str, str]]:
    """A bf16 checkpoint with frozen layers: masters for what is trained, nothing wider for the rest."""
    model, batch = models.make_llama(), models.token_batch(8, 16)
    for name, p in model.named_parameters():
        p.data = p.data.bfloat16()
        p.requires_grad_("layers.1" not in name and "embed" not in name)
    frozen = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    pm = autoplan.parallelize(
        model,
        "local",
        example_inputs={k: v[:4] for k, v in batch.items()},
        optimizer=functools.partial(torch.optim.AdamW, lr=1e-2),
        pins={"dp": 2, "zero_stage": zero},
        precision="bf16",
    )
    losses = []
    for _ in range(5):
        losses.append(pm.step({k: v[4 * rank : 4 * rank + 4] for k, v in batch.items()}).item())
        assert pm.optimizer is not None
        pm.optimizer.step()
    state = pm.state_dict()
    assert all(torch.equal(state[n], p) for n, p in frozen.items())
    assert all((state[n].dtype == torch.float32) == (n not in frozen) for n, _ in model.named_parameters())
    return losses, {n: str(t.dtype) for n, t in state.items()}


def products_compressed(rank: int, world: int, of_rank: int, dtype_name: str) -> dict[str, Any]:
    """How far the sums of products of two vectors are off under PowerSGD, beside zeros and before and after a NaN."""
    found: dict[str, list[float]] = {"plain": [], "after it": []}
    dtype, bad = getattr(torch, dtype_name), True
    for name in found:
        made = PowerSGD(rank=of_rank, start_step=2, min_compression_rate=0.5, error_feedback=name == "after it")
        compressor = Compressor(made, dist.group.WORLD)
        left, right = torch.linspace(-1, 2, 30, dtype=torch.float64), torch.linspace(3, -1, 20, dtype=torch.float64)
        product = torch.outer(left, right).view(30, 4, 5)
        for step in range(8):
            whole = (product * (1 + step) * (step != 3)).to(dtype)
            mine = (whole * (step > 3 or rank)).mT.contiguous().mT  # its dims are stored in another order
            if name == "after it" and step == 4:
                mine.fill_(torch.nan)
            compressor.reduce([[torch.ones(3, dtype=dtype), mine]])
            want = whole.double() * (world if step > 3 else world - 1)
            error = float((mine.double() - want).norm() / want.norm().clamp(min=1e-9))
            if name == "after it" and step == 4:
                bad = bool(mine.isnan().all())
            elif name == "plain" or step > 4:
                found[name].append(error)
    return {**found, "not finite": bad}


def compressed(
    rank: int,
    world: int,
    case: Case,
    spec_json: str,
    sources: dict[str, str],
    compression: Any,
    num_steps: int,
    dtype_name: str,
    lr: float = 0.1,
) -> dict[str, Any]:
    """Losses, the gradients of the first steps, whether all ranks end alike, and the share that PowerSGD sent."""
    dtype = getattr(torch, dtype_name)
    params, buffers = full_tensors(case, dtype)
    pm = ParallelModel(
        ProgramSpec.from_json(spec_json),
        sources,
        params,
        buffers,
        num_micro_batches=case.num_micro_batches,
        optimizer=functools.partial(torch.optim.SGD, lr=lr),
        dtype=dtype if case.precision == "native" else None,
        gradient_compression=compression,
    )
    losses, gradients = [], []
    for step in range(num_steps):
        batch = global_batch(case, 0 if num_steps > 10 else step)  # many steps: the same batch, to learn it
        losses.append(pm.step(part_of(batch, pm.data_rank, pm.data_world)).item())
        if num_steps <= 10:
            gradients.append(pm.gradients())
        assert pm.optimizer is not None
        pm.optimizer.step()
    mine = torch.stack([local_of(p).detach().double().sum() for p in pm.parameters()])
    highest, lowest = mine.clone(), mine.clone()
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=pm.mesh.group("dp"))
    dist.all_reduce(lowest, dist.ReduceOp.MIN, group=pm.mesh.group("dp"))
    compressors = getattr(next(iter(pm._syncs.values())), "compressors", [])
    return {
        "losses": losses,
        "gradients": gradients if rank == 0 else [],
        "same": case.ep > 1 or torch.equal(highest, lowest),
        "share": compressors[0].sent_share if compressors else 1.0,
    }
