"""Jobs for test_batch.py and test_state.py: batches and states that do not fit, on one rank or on all."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import models
import torch
from parity import Case, global_batch, make_model, model_of, part_of

import autoplan
from autoplan.errors import AutoplanError

Batch = dict[str, Any]


def _other_length(batch: Batch, length: int) -> Batch:
    return {n: x[:, :length].contiguous() for n, x in batch.items()}


FAULTS: dict[str, Callable[[Batch], Any]] = {
    "keys": lambda b: {"input_ids": b["input_ids"]},
    "no tensor": lambda b: {**b, "labels": b["labels"].tolist()},
    "dtype": lambda b: {**b, "input_ids": b["input_ids"].float()},
    "no mapping": lambda b: (b["input_ids"], b["labels"]),
    "samples": lambda b: part_of(b, 0, len(b["labels"])),
    "shapes": lambda b: {**b, "labels": b["labels"][:, :-2].contiguous()},
    "dims": lambda b: {**b, "labels": b["labels"][0]},
    "odd length": lambda b: _other_length(b, 15),
    "nothing": lambda b: {n: x[:0] for n, x in b.items()},
    "unlike its peers": lambda b: {**b, "input_ids": b["input_ids"].flip(0)},
    "another length than its peers": lambda b: _other_length(b, 8),
    "row": lambda b: {**b, "input_ids": b["input_ids"].clone().fill_(-7)},
    "no_grad": lambda b: b,
}


def batches(
    rank: int, world: int, case: Case, spec_json: str, sources: dict[str, str], faulty: int | None
) -> tuple[dict[str, str], list[float]]:
    """What a step with each fault says, on rank `faulty` or on all; losses of the good steps in between."""
    pm = model_of(case, spec_json, sources, torch.float32)
    good = part_of(global_batch(case), pm.data_rank, pm.data_world)
    said, losses = {}, []
    for name, fault in FAULTS.items():
        here = faulty is None or rank == faulty
        if faulty is None and name in ("unlike its peers", "another length than its peers"):
            continue
        pm._num_own_steps = 0  # contents are compared in the first step, and in every hundredth
        try:
            with torch.no_grad() if here and name == "no_grad" else nullcontext():
                pm.step(fault(good) if here else good)
            said[name] = "accepted"
        except ValueError as exc:
            said[name] = f"{type(exc).__name__}: {exc}"
        pm._num_own_steps = 0
        losses.append(pm.step(good).item())
    pm.step(FAULTS["unlike its peers"](good) if rank == faulty else good)
    said["unlike its peers, between two comparisons"] = "accepted"
    return said, losses


def _moved(state: Mapping[str, Any]) -> dict[str, Any]:
    return {n: t + 1 if torch.is_tensor(t) else t for n, t in state.items()}


def states(
    rank: int, world: int, case: Case, spec_json: str, sources: dict[str, str]
) -> tuple[dict[str, str], bool, float]:
    """What wrong states say; whether nothing of them was loaded, and a good one altogether; the loss with it."""
    pm = model_of(case, spec_json, sources, torch.float32)
    state = pm.state_dict()
    name, buffer = next(iter(state)), next(n for n in state if n.endswith("e_score_correction_bias"))
    last = rank == world - 1
    tries: dict[str, dict[str, Any]] = {
        "missing": {n: t for n, t in state.items() if n != name},
        "missing buffer": {n: t for n, t in state.items() if n != buffer},
        "unexpected": {**state, "lm_haed.weight": torch.zeros(1)},
        "shape": {**state, name: torch.zeros(3)},
        "shape on one rank": {**state, name: torch.zeros(3)} if last else state,
        "no tensor": {**state, name: [1.0]},
        "another state on one rank": _moved(state) if last else state,
        "another buffer on one rank": {**state, buffer: state[buffer] + 1} if last else state,
    }
    said = {}
    for what, wrong in tries.items():
        try:
            pm.load_state_dict(wrong)
            said[what] = "accepted"
        except (ValueError, RuntimeError) as exc:
            said[what] = f"{type(exc).__name__}: {exc}"
    untouched = all(torch.equal(t, state[n]) for n, t in pm.state_dict().items())
    keys = pm.load_state_dict({buffer: state[buffer], "more": torch.zeros(1)}, strict=False)
    said["loose"] = f"{len(keys.missing_keys)} of {len(state)} missing, unexpected {keys.unexpected_keys}"
    moved = {n: t + 0.25 * torch.randn(t.shape, generator=torch.Generator().manual_seed(1)) for n, t in state.items()}
    pm.load_state_dict(moved)
    loaded = all(torch.allclose(t, moved[n]) for n, t in pm.state_dict().items())
    # routing follows the buffer: the loss is that of the module with the same state
    loss = pm.step(part_of(global_batch(case), pm.data_rank, pm.data_world)).item()
    model = make_model(case.family, 0.0)
    model.load_state_dict(moved)
    with torch.no_grad():
        want = model(**global_batch(case)).loss.item()
    return said, untouched and loaded, abs(loss - want)


def other_models(rank: int, world: int) -> list[str]:
    """What `parallelize` says of models that differ between ranks, and of the same one then."""
    said = []
    for hidden in (32 if rank == world - 1 else 64, 64):
        model = models.make_llama(hidden_size=hidden)
        try:
            pm = autoplan.parallelize(
                model, "local", pins={"tp": 2}, optimizer=functools.partial(torch.optim.SGD, lr=0.1)
            )
            said.append(f"{pm.step(models.token_batch(2, 16)).item():.4f}")
        except AutoplanError as exc:
            said.append(f"{type(exc).__name__}: {exc}")
    return said


def settings(rank: int, world: int, case: Case, spec_json: str, sources: dict[str, str]) -> dict[str, tuple[str, ...]]:
    """What settings of rank 1, or of all ranks, say: in the call itself, in the next step, in the one after."""
    make = functools.partial(torch.optim.AdamW, lr=0.1)
    pm = model_of(case, spec_json, sources, torch.float32, make)
    good = part_of(global_batch(case), pm.data_rank, pm.data_world)
    here, group = rank == 1, pm.optimizer.param_groups[0]

    def said(call: Callable[[], Any]) -> str:
        try:
            call()
        except ValueError as exc:
            return f"{type(exc).__name__}: {exc}"
        return "accepted"

    calls: dict[str, Callable[[], Any]] = {
        "alike": lambda: pm.clip_grad_norm_(1.0),
        "no number": lambda: pm.clip_grad_norm_(math.nan if here else 1.0),
        "no order": lambda: pm.clip_grad_norm_(1.0, norm_type=-1 if here else math.inf),
        "another number": lambda: pm.clip_grad_norm_(0.5 if here else 1.0),
        "another order": lambda: pm.clip_grad_norm_(1.0, norm_type=math.inf if here else 3),
        "no number anywhere": lambda: pm.clip_grad_norm_(math.nan),
        "learning rate": lambda: group.update(lr=0.2 if here else 0.1),
        "momentum": lambda: group.update(betas=(0.8, 0.99) if here else (0.9, 0.999)),
        "seed": lambda: setattr(pm.progress, "seed", rank),
        "last bits": lambda: group.update(lr=math.nextafter(0.1, 1) if here else 0.1),
    }
    found = {}
    for name, call in calls.items():
        pm.step(good)
        first = said(call)
        second = said(lambda: pm.step(good))
        group.update(lr=0.1, betas=(0.9, 0.999))
        pm.progress.seed = 0
        found[name] = first, second, said(lambda: pm.step(good))
    return found
