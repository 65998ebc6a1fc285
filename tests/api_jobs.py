"""Jobs for test_api.py: what a user does, on every rank."""

from __future__ import annotations

import functools
import os
import signal
import warnings
from typing import Any

import models
import torch
import torch.distributed as dist
from small_stacks import Looped, ScaledBlock, Stack, Tupled, TupleStack, UnusedNumber, square_loss

import autoplan
from autoplan import api
from autoplan.errors import AutoplanError


def alone(rank: int, world: int) -> tuple[float, float]:
    """`parallelize(model, cluster)` and nothing else; ranks start with different weights."""
    model = models.make_llama(seed=rank)
    pm = autoplan.parallelize(model, "local", pins={"tp": 2})
    batch = models.token_batch(2, 16)
    loss = pm.step(batch)
    reference = models.make_llama(seed=0)(**batch).loss
    return loss.item(), reference.item()


def values_of_first(rank: int, world: int) -> tuple[list[float], bool, list[tuple[int, ...]]]:
    """Values that differ between ranks, after rank 0's were taken; whether equal ones stayed the tensors that they
    were; shapes of what was sent."""
    same, other, table = torch.ones(5), torch.full((3,), float(rank)), torch.arange(4) + rank
    parameters, buffers = {"same": same, "other": other}, {"table": table}
    sent: list[tuple[int, ...]] = []
    broadcast = dist.broadcast

    def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append(tuple(tensor.shape))
        return broadcast(tensor, *args, **kwargs)

    dist.broadcast = counted
    try:
        api._same_values(parameters, buffers, torch.device("cpu"))
    finally:
        dist.broadcast = broadcast
    found = [*parameters["other"].tolist(), *buffers["table"].tolist()]
    assert other.tolist() == [rank] * 3, "the user's own tensor was written to"
    return found, parameters["same"] is same, sent


def train(rank: int, world: int, pins: dict[str, Any], check: bool) -> list[float]:
    """A user's loop."""
    batch = models.token_batch(8, 16)
    pm = autoplan.parallelize(
        models.make_llama(),
        "local",
        example_inputs={k: v[:4] for k, v in batch.items()},
        optimizer=functools.partial(torch.optim.AdamW, lr=1e-2),
        pins=pins,
        check=check,
    )
    size = 8 // pm.data_world
    mine = {k: v[pm.data_rank * size : (pm.data_rank + 1) * size] for k, v in batch.items()}
    losses = []
    for _ in range(5):
        losses.append(pm.step(mine).item())
        pm.clip_grad_norm_(1.0)
        assert pm.optimizer is not None
        pm.optimizer.step()
    assert (
        pm.plan is not None and pm.plan.config.tp == pins.get("tp", 1) and "class Stage" in "".join(pm.source.values())
    )
    return losses


def refused(rank: int, world: int, kwargs: dict[str, Any], family: str = "llama") -> str:
    """The error every rank gets."""
    model = models.make_llama() if family == "llama" else models.make_gpt()
    try:
        autoplan.parallelize(model, **{"cluster": "local", **kwargs})
    except (AutoplanError, ValueError) as exc:
        return f"{type(exc).__name__}: {exc}"
    return "accepted"


def refused_optimizer(rank: int, world: int) -> str:
    return refused(rank, world, {"optimizer": functools.partial(torch.optim.LBFGS, lr=1.0), "pins": {"tp": 2}})


def bad_batches(rank: int, world: int) -> list[str]:
    """Messages for batches that do not fit."""
    pm = autoplan.parallelize(models.make_llama(), "local", pins={"dp": 2, "num_micro_batches": 3})
    good = models.token_batch(6, 16)
    tries = [
        models.token_batch(4, 16),
        {"input_ids": good["input_ids"]},
        {"input_ids": good["input_ids"], "labels": good["labels"][:3]},
        {"input_ids": good["input_ids"], "labels": torch.full_like(good["labels"], -100)},
    ]
    out = []
    for batch in tries:
        try:
            pm.step(batch)
        except ValueError as exc:
            out.append(str(exc))
    return out


def dies(rank: int, world: int, how: str) -> str:
    """Rank 1 ends in the middle of training."""
    pm = autoplan.parallelize(models.make_llama(), "local", pins={"tp": 2}, timeout_s=8)
    batch = models.token_batch(2, 16)
    pm.step(batch)
    if rank == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        pm._runner = None  # a fault inside one rank's step
        pm._runner_for = None  # type: ignore[assignment, method-assign]
    pm.step(batch)
    return "finished"


def state_round_trip(rank: int, world: int, pins: dict[str, Any]) -> float:
    """state_dict of a trained program into a fresh one of another plan."""
    model = models.make_llama(tie_word_embeddings=True)
    batch = models.token_batch(4, 16)
    pm = autoplan.parallelize(model, "local", optimizer=functools.partial(torch.optim.SGD, lr=0.1), pins=pins)
    size = 4 // pm.data_world
    mine = {k: v[pm.data_rank * size : (pm.data_rank + 1) * size] for k, v in batch.items()}
    pm.step(mine)
    assert pm.optimizer is not None
    pm.optimizer.step()
    state = pm.state_dict()
    loss = pm.step(mine).item()
    model.load_state_dict(state)  # exactly the original names
    other = autoplan.parallelize(models.make_llama(seed=7, tie_word_embeddings=True), "local", pins={"pp": 2})
    other.load_state_dict(state)
    theirs = other.step(batch).item()
    with torch.no_grad():
        eager = model(**batch).loss.item()
    dist.barrier()
    return max(abs(loss - theirs), abs(loss - eager))


def breaks_on_rank_0(rank: int, world: int) -> str:
    """A loss function that fails while rank 0 captures."""

    def loss(output: Any, batch: Any) -> torch.Tensor:
        raise KeyError("mask")

    batch = models.token_batch(2, 16)
    try:
        autoplan.parallelize(models.make_llama(), "local", example_inputs=batch, loss_fn=loss)
    except Exception as exc:
        return f"{type(exc).__name__}: {exc}"
    return "accepted"


def changing_shapes(rank: int, world: int, pins: dict[str, Any]) -> float:
    """Batch size and sequence length differ from step to step."""
    pm = autoplan.parallelize(models.make_llama(), "local", pins=pins)
    model = models.make_llama()
    worst = 0.0
    for samples, length in ((4, 16), (8, 8), (4, 24), (8, 16)):
        batch = models.token_batch(samples, length, seed=length)
        size = samples // pm.data_world
        loss = pm.step({k: v[pm.data_rank * size : (pm.data_rank + 1) * size] for k, v in batch.items()})
        with torch.no_grad():
            worst = max(worst, abs(loss.item() - model(**batch).loss.item()))
    return worst


def odd_models(rank: int, world: int, pins: dict[str, Any]) -> float:
    """Glue between layers, layers used twice, layers that differ: worst relative gradient difference to eager."""
    worst = 0.0
    for build, block in ((Looped, UnusedNumber), (TupleStack, Tupled), (Stack, ScaledBlock)):
        torch.manual_seed(0)
        model = build(block)
        batch = {"ids": torch.randint(0, 16, (4, 6))}
        pm = autoplan.parallelize(model, "local", example_inputs=batch, loss_fn=square_loss, pins=pins)
        square_loss(model(batch["ids"]), batch).backward()
        size = 4 // pm.data_world
        pm.step({"ids": batch["ids"][pm.data_rank * size : (pm.data_rank + 1) * size]})
        for name, got in pm.gradients().items():
            want = model.get_parameter(name).grad
            assert want is not None
            worst = max(worst, ((got - want).abs().max() / want.abs().max()).item())
    return worst


def bfloat16(rank: int, world: int, pins: dict[str, Any]) -> tuple[float, float, float]:
    """A bf16 model: its loss, the eager one's, and the worst gradient error in norm."""
    model = models.make_llama(hidden_size=64).bfloat16()
    batch = models.token_batch(4, 16)
    pm = autoplan.parallelize(model, "local", example_inputs=batch, pins=pins, check=True)
    size = 4 // pm.data_world
    loss = pm.step({k: v[pm.data_rank * size : (pm.data_rank + 1) * size] for k, v in batch.items()})
    want = model(**batch).loss
    want.backward()
    worst = 0.0
    for name, got in pm.gradients().items():
        grad = model.get_parameter(name).grad
        assert grad is not None and got.dtype == torch.bfloat16
        worst = max(worst, ((got.float() - grad.float()).norm() / grad.float().norm()).item())
    return loss.item(), want.item(), worst


def given(rank: int, world: int, kwargs: dict[str, Any]) -> tuple[float, str, str]:
    """Losses of two steps with a given plan or program: their sum, the plan's degrees, and its line on the capture."""
    import autoplan.planning

    search = autoplan.planning.search_plan
    autoplan.planning.search_plan = None  # type: ignore[assignment]  # nothing is searched
    try:
        model, batch = models.make_llama(), models.token_batch(4, 16)
        pm = autoplan.parallelize(model, "local", optimizer=functools.partial(torch.optim.SGD, lr=0.1), **kwargs)
    finally:
        autoplan.planning.search_plan = search
    size = 4 // pm.data_world
    mine = {k: v[pm.data_rank * size : (pm.data_rank + 1) * size] for k, v in batch.items()}
    total = pm.step(mine)
    assert pm.optimizer is not None
    pm.optimizer.step()
    total = total + pm.step(mine)
    return total.item(), str(pm.plan.config.but(recompute="none")), pm.plan.capture


def of_one_device() -> float:
    """The same two steps of the module."""
    model, batch = models.make_llama(), models.token_batch(4, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = model(**batch).loss
    first.backward()
    optimizer.step()
    return float(first.item() + model(**batch).loss.item())


def given_warnings(rank: int, world: int, plan: Any, cluster: Any = "local") -> list[str]:
    """What is said of a given plan."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        autoplan.parallelize(models.make_llama(), cluster, plan=plan, example_inputs=models.token_batch(4, 16))
    return [str(w.message) for w in found if "the plan of" in str(w.message)]


def given_error(rank: int, world: int, kwargs: dict[str, Any], config: dict[str, Any]) -> str:
    """The error of `given`, for a model of another config."""
    try:
        autoplan.parallelize(models.make_llama(**config), "local", **kwargs)
    except AutoplanError as error:
        return str(error)
    return "accepted"
