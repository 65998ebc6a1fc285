"""Jobs for test_offload.py, on every rank."""

from __future__ import annotations

from typing import Any

import torch
from parity import Case, global_batch, model_of, part_of
from torch.distributed.tensor import DTensor

from autoplan.runtime.model import ParallelModel
from autoplan.runtime.params import local_of


def _model(case: Case, spec_json: str, sources: dict[str, str]) -> ParallelModel:
    dtype = torch.float64 if case.precision == "native" else torch.float32
    return model_of(case, spec_json, sources, dtype)


def held(rank: int, world: int, case: Case, spec_json: str, sources: dict[str, str]) -> dict[str, Any]:
    """A loop with an optimizer of the user's own over `pm.parameters()`; bytes on either side after two steps."""
    pm = _model(case, spec_json, sources)
    optimizer = torch.optim.AdamW(pm.parameters(), lr=1e-2, foreach=False)
    found: dict[str, Any] = {"fresh": [], "stale": []}
    for step in range(2):
        pm.step(part_of(global_batch(case, step), pm.data_rank, pm.data_world))
        pairs = [(d, h) for d in pm._trained() if (h := pm._held(d)) is not d]
        there = [(local_of(d), local_of(h)) for d, h in pairs if local_of(d).untyped_storage().nbytes()]
        found["fresh"].append([torch.equal(d, h) for d, h in there if h.numel()])
        found["gradients_here"] = sum(d.grad is not None for d, _ in pairs)
        pm.clip_grad_norm_(1.0)
        optimizer.step()
        found["stale"].append([not torch.equal(d, h) for d, h in there if h.numel()])
    assert not {d.untyped_storage().data_ptr() for d, _ in there} & {
        h.untyped_storage().data_ptr() for _, h in there if h.numel()
    }
    by_policy = [p for p in pm._trained() if isinstance(p, DTensor) and "parameters" in case.offload]
    found["by_policy"] = len(by_policy)
    copies = [] if pm._copies is None else [c.copy.nbytes for c in pm._copies._copies]
    found["device"] = sum(local_of(d).untyped_storage().nbytes() for d, _ in pairs) + sum(copies)
    on_host = [local_of(h) for h in pm.parameters()]
    gradients = [local_of(h.grad) for h in pm.parameters() if h.grad is not None]
    moments = [local_of(t) for s in optimizer.state.values() for t in s.values() if t.numel() > 1]
    found["host"] = sum(t.numel() * t.element_size() for t in (*on_host, *gradients, *moments))
    return found


def without_copying_back(rank: int, world: int, case: Case, spec_json: str, sources: dict[str, str]) -> list[float]:
    """Losses of three steps where nothing brings the new parameters to the device."""
    pm = _model(case, spec_json, sources)
    assert pm._host is not None
    pm._host.give_parameters = lambda: None  # type: ignore[method-assign]
    optimizer = torch.optim.AdamW(pm.parameters(), lr=1e-2, foreach=False)
    losses = []
    for step in range(3):
        losses.append(pm.step(part_of(global_batch(case, step), pm.data_rank, pm.data_world)).item())
        pm.clip_grad_norm_(0.5)
        optimizer.step()
    return losses


def restart(rank: int, world: int, case: Case, spec_json: str, sources: dict[str, str]) -> list[float]:
    """Two steps; model and optimizer into new ones; two more. Then the same four steps without a break."""

    def steps(pm: ParallelModel, optimizer: torch.optim.Optimizer, which: range) -> list[float]:
        out = []
        for step in which:
            out.append(pm.step(part_of(global_batch(case, step), pm.data_rank, pm.data_world)).item())
            optimizer.step()
        return out

    def made() -> tuple[ParallelModel, torch.optim.Optimizer]:
        pm = _model(case, spec_json, sources)
        return pm, torch.optim.AdamW(pm.parameters(), lr=1e-2, foreach=False)

    pm, optimizer = made()
    losses = steps(pm, optimizer, range(2))
    state, moments = pm.state_dict(), optimizer.state_dict()
    pm, optimizer = made()
    pm.load_state_dict(state)
    optimizer.load_state_dict(moments)
    losses += steps(pm, optimizer, range(2, 4))
    return losses + steps(*made(), range(4))
