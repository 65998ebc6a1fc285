"""Jobs for test_loop.py: what an ordinary training loop does, on every rank, in float64."""

from __future__ import annotations

import copy
import functools
import io
import pickle
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any

import models
import torch
from torch import nn

import autoplan
from autoplan.runtime.model import ParallelModel

SEQ = 16
Batch = dict[str, torch.Tensor]


def make(family: str) -> nn.Module:
    """A model in float64, in training mode."""
    kinds = {
        "llama": models.make_llama,
        "mixtral": models.make_mixtral,
        "gpt": functools.partial(models.make_gpt, dropout=0.25),  # tied
    }
    model: nn.Module = kinds[family]().double()
    if family == "mixtral":
        model.config._experts_implementation = "eager"  # type: ignore[union-attr]  # grouped products take no float64
    return model


def batch_of(family: str, num: int, seed: int = 1) -> Batch:
    found = models.token_batch(num, SEQ, seed=seed, ignore=0.2)
    return found if family != "gpt" else {"ids": found["input_ids"], "labels": found["labels"]}


def loss_alone(model: nn.Module, family: str, batch: Batch) -> torch.Tensor:
    """The loss of the module itself on the whole batch."""
    if family == "gpt":
        return models.gpt_loss(model(batch["ids"]), batch)
    loss: torch.Tensor = model(**batch).loss
    return loss


def program(
    family: str, pins: Mapping[str, Any], frozen: Collection[str] = (), **settings: Any
) -> tuple[nn.Module, ParallelModel]:
    """The module, with these parameters frozen, and its program."""
    model = make(family)
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    dp = pins.get("dp", 1)
    pm = autoplan.parallelize(
        model,
        "local",
        example_inputs=batch_of(family, 4),
        loss_fn=models.gpt_loss if family == "gpt" else None,
        global_batch_size=4 * dp,
        pins={"tp": 1, "pp": 1, "dp": 1, **pins},
        verify=False,
        **settings,
    )
    return model, pm


def part(pm: ParallelModel, batch: Batch, sizes: list[int]) -> Batch:
    """This data rank's samples, of a batch that data ranks share unequally."""
    begin = sum(sizes[: pm.data_rank])
    return {n: x[begin : begin + sizes[pm.data_rank]] for n, x in batch.items()}


def outputs_alone(model: nn.Module, family: str, batch: Batch) -> torch.Tensor:
    """The logits of the module itself on the whole batch."""
    out: torch.Tensor = model(batch["ids"]) if family == "gpt" else model(**batch).logits
    return out


def evaluate(
    rank: int, world: int, family: str, pins: dict[str, Any], sizes: list[int]
) -> tuple[list[float], list[tuple[int, ...]]]:
    """Errors of loss, own logits, all logits and guesses of a batch against the module's, and the shapes.

    The batch has `sizes` samples on each data rank.
    """
    model, pm = program(family, pins)
    batch, name = batch_of(family, sum(sizes), seed=7), "output" if family == "gpt" else "logits"
    mine = part(pm, batch, sizes)
    with torch.no_grad():
        wanted, loss = outputs_alone(model.eval(), family, batch), loss_alone(model, family, batch)
    found_loss, own = pm.eval_outputs(mine)
    _, every = pm.eval_outputs(mine, rows="all")
    _, guesses = pm.eval_outputs(mine, rows="all", each=lambda out: {"guess": out[name].argmax(-1)})
    assert own.keys() == every.keys() == {name} and guesses.keys() == {"guess"}
    of_mine = part(pm, {"": wanted}, sizes)[""]
    errors = [
        abs(found_loss.item() / loss.item() - 1),
        (own[name] - of_mine).abs().max().item(),
        (every[name] - wanted).abs().max().item(),
        float((guesses["guess"] != wanted.argmax(-1)).sum()),
        abs(pm.eval_step(mine).item() - found_loss.item()),
    ]
    return errors, [tuple(x.shape) for x in (own[name], every[name], guesses["guess"])]


def between_steps(rank: int, world: int, family: str, pins: dict[str, Any], ask: bool) -> list[float]:
    """Losses of steps; with `ask`, batches are evaluated before each update and after it."""
    sgd = functools.partial(torch.optim.SGD, lr=0.5)
    _, pm = program(family, pins, optimizer=sgd)
    sizes = [4] * pm.data_world
    out = []
    for step in range(3):
        batch = part(pm, batch_of(family, sum(sizes), seed=step), sizes)
        out.append(pm.step(batch).item())
        if ask:
            pm.eval_step(batch)
        assert pm.optimizer is not None
        pm.optimizer.step()
        if ask:
            pm.eval_step({n: x[:3] for n, x in batch.items()})
    return out


def accumulate(rank: int, world: int, family: str, pins: dict[str, Any]) -> tuple[float, float]:
    """Relative errors of loss and gradients: three batches in one step against the module on all of them."""
    model, pm = program(family, pins)
    sizes = [4] * pm.data_world
    batches = [batch_of(family, sum(sizes), seed=k) for k in range(3)]
    loss = pm.step([part(pm, batch, sizes) for batch in batches]).item()
    got = pm.gradients()
    wanted = loss_alone(model, family, {n: torch.cat([b[n] for b in batches]) for n in batches[0]})
    wanted.backward()
    worst = max(
        ((got[n] - p.grad).norm() / p.grad.norm()).item() for n, p in model.named_parameters() if p.grad is not None
    )
    return abs(loss / wanted.item() - 1), worst


def unequal(rank: int, world: int, pins: dict[str, Any], sizes: list[int]) -> tuple[list[float], int]:
    """Losses of two steps with dropout on two batches each, and the samples seen; `sizes` by data rank."""
    _, pm = program("gpt", pins, optimizer=functools.partial(torch.optim.SGD, lr=0.5))
    losses = []
    for step in range(2):
        batches = [batch_of("gpt", sum(sizes), seed=2 * step + k) for k in range(2)]
        losses.append(pm.step([part(pm, batch, sizes) for batch in batches]).item())
        assert pm.optimizer is not None
        pm.optimizer.step()
    return losses, pm.progress.num_samples


def no_decay(name: str, shape: torch.Size) -> dict[str, Any]:
    return {} if len(shape) > 1 else {"weight_decay": 0.0, "lr": 0.02}


PATTERNS = {"*norm*": {"weight_decay": 0.0, "lr": 0.02}}


def groups(rank: int, world: int, pins: dict[str, Any], by_pattern: bool) -> tuple[float, list[int], list[int]]:
    """Worst error of a parameter after steps with groups and a scheduler, and the groups' sizes on both sides."""
    family = "llama"
    adamw = functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.3)
    _, pm = program(family, pins, optimizer=adamw, param_groups=PATTERNS if by_pattern else no_decay)
    reference = make(family)
    kinds = {True: [], False: []}  # type: dict[bool, list[nn.Parameter]]
    for p in reference.parameters():
        kinds[p.dim() > 1].append(p)
    alone = adamw([{"params": kinds[True]}, {"params": kinds[False], **no_decay("", torch.Size([1]))}])
    assert pm.optimizer is not None
    rates = [lambda step: 1 / (step + 1), lambda step: 0.5**step]
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, rates) for o in (pm.optimizer, alone)]
    sizes = [4] * pm.data_world
    for step in range(3):
        batch = batch_of(family, sum(sizes), seed=step)
        pm.step(part(pm, batch, sizes))
        pm.optimizer.step()
        alone.zero_grad()
        loss_alone(reference, family, batch).backward()
        alone.step()
        for schedule in schedules:
            schedule.step()
    state = pm.state_dict()
    error = max(((state[n] - p).norm() / p.norm()).item() for n, p in reference.named_parameters())
    return error, [len(g["params"]) for g in pm.optimizer.param_groups], [len(g["params"]) for g in alone.param_groups]


def whole_tensors(rank: int, world: int, pins: dict[str, Any]) -> tuple[float, float]:
    """Worst error of a parameter after updates that need whole tensors, and how far the largest one went."""
    adafactor = functools.partial(torch.optim.Adafactor, lr=0.01)
    _, pm = program("llama", pins, optimizer=adafactor)
    reference, before = make("llama"), make("llama").state_dict()
    alone, sizes = adafactor(reference.parameters()), [4] * pm.data_world
    assert pm.optimizer is not None
    for step in range(3):
        batch = batch_of("llama", sum(sizes), seed=step)
        pm.step(part(pm, batch, sizes))
        pm.optimizer.step()
        alone.zero_grad()
        loss_alone(reference, "llama", batch).backward()
        alone.step()
    state, moved = pm.state_dict(), reference.state_dict()
    error = max(((state[n] - p).norm() / p.norm()).item() for n, p in reference.named_parameters())
    return error, max((moved[n] - t).abs().max().item() for n, t in before.items())


def dropped_by_the_optimizer(rank: int, world: int, pins: dict[str, Any]) -> list[float]:
    """How far an update moves parameters whose gradients the optimizer has dropped, or set to zero."""
    _, pm = program("llama", pins, optimizer=functools.partial(torch.optim.SGD, lr=0.5))
    before, out = pm.state_dict(), []
    for set_to_none in (True, False):
        pm.step(part(pm, batch_of("llama", 8), [4, 4]))
        assert pm.optimizer is not None
        pm.optimizer.zero_grad(set_to_none)
        pm.optimizer.step()
        after = pm.state_dict()
        out.append(max((after[name] - t).abs().max().item() for name, t in before.items()))
    return out


def groups_after_a_load(rank: int, world: int, folder: str) -> list[list[float]]:
    """Learning rates of the groups, two of them empty on a rank: at a save, after a load, a step on."""
    _, pm = program(
        "llama",
        {"pp": 2, "num_micro_batches": 2},
        optimizer=functools.partial(torch.optim.AdamW, lr=0.01),
        param_groups={"model.embed_tokens*": {"lr": 0.02}, "model.norm*": {"lr": 0.04}},
    )
    assert pm.optimizer is not None
    groups = pm.optimizer.param_groups
    assert [not g["params"] for g in groups] == [rank == 1, False, rank == 0]
    schedule = torch.optim.lr_scheduler.ExponentialLR(pm.optimizer, 0.5)
    out = []

    def step() -> None:
        pm.step(batch_of("llama", 4))
        assert pm.optimizer is not None
        pm.optimizer.step()
        schedule.step()
        out.append([g["lr"] for g in groups])

    step()
    pm.save_checkpoint(folder, states={"schedule": schedule})
    for group in groups:
        group["lr"] = group["initial_lr"] = 1.0
    pm.load_checkpoint(folder, states={"schedule": schedule})
    out.append([g["lr"] for g in groups])
    step()
    return out


def give_back(rank: int, world: int, family: str, pins: dict[str, Any]) -> dict[str, Any]:
    """What `to_module` gives back after a step, and what the module that was given in says."""
    model, pm = program(family, pins, optimizer=functools.partial(torch.optim.SGD, lr=0.5))
    batch, sizes = batch_of(family, 4 * pm.data_world), [4] * pm.data_world
    with warnings.catch_warnings(record=True) as early:
        warnings.simplefilter("always")
        loss_alone(model, family, batch)
    pm.step(part(pm, batch, sizes))
    assert pm.optimizer is not None
    pm.optimizer.step()
    trained = pm.to_module()
    evaluated = pm.eval_step(part(pm, batch, sizes)).item()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        loss_alone(model, family, batch)
        loss_alone(model, family, batch)
    if trained is None:
        return {"rank": rank, "trained": None}
    same = dict(trained.named_parameters())
    with torch.no_grad():
        loss = loss_alone(trained.eval(), family, batch).item()
    return {
        "rank": rank,
        "trained": type(trained).__name__,
        "error": abs(loss / evaluated - 1),
        "num_parameters": (len(dict(model.named_parameters())), len(same)),
        "early": [str(w.message) for w in early],
        "said": [str(w.message) for w in said],
        "trainable": all(p.requires_grad and p.device.type == "cpu" for p in same.values()),
    }


def read_old_values(rank: int, world: int) -> dict[str, list[str]]:
    """What the module that was given in says when it is read before and after a step, and what copies of it say."""
    model, pm = program("llama", {"dp": 2}, optimizer=functools.partial(torch.optim.SGD, lr=0.5))

    def said(*calls: Callable[[], Any]) -> list[str]:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            for call in calls:
                call()
        return [str(w.message) for w in found if "has the values" in str(w.message)]

    def trained() -> None:
        pm.step(part(pm, batch_of("llama", 8), [4, 4]))
        assert pm.optimizer is not None
        pm.optimizer.step()

    reads = model.state_dict, model.state_dict, lambda: torch.save(model, io.BytesIO())
    out = {"early": said(*reads)}
    trained()
    out["own"] = said(pm.state_dict, pm.to_module, lambda: [m.state_dict() for m in (pm.to_module(None),) if m])
    out["copied"] = said(lambda: copy.deepcopy(model).state_dict())
    out["read"] = said(*reads)
    out["pickled"] = said(lambda: pickle.loads(pickle.dumps(model)).state_dict())
    state = pm.state_dict()
    out["renewed"] = said(lambda: model.load_state_dict(state), *reads)
    trained()
    out["again"] = said(*reads)
    return out


def refused(rank: int, world: int) -> list[str]:
    """Messages of calls that cannot be done; the program goes on after each."""
    _, pm = program("llama", {"dp": 2})
    good = batch_of("llama", 4)
    other = {n: x[:, :8] for n, x in good.items()}
    calls = [
        lambda: pm.eval().step(good),
        lambda: pm.train().step([]),
        lambda: pm.step([good, other]),
        lambda: pm.step([good, {n: x[:3] for n, x in good.items()}]),
        lambda: pm.eval_step({n: x[:0] for n, x in good.items()} if rank else good),
        lambda: pm.eval_step({"input_ids": good["input_ids"]}),
        lambda: pm.zero_grad(set_to_none=False),
        lambda: program("llama", {"dp": 2}, optimizer=torch.optim.SGD, param_groups={"*.bais": {"lr": 0.1}}),
    ]  # type: list[Any]
    out = []
    for call in calls:
        try:
            call()
            out.append("accepted")
        except ValueError as exc:
            out.append(str(exc))
    pm.step(good)
    return out


class Values:
    """What a writer of TensorBoard's form was given."""

    def __init__(self) -> None:
        self.found: list[tuple[str, int]] = []

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.found.append((tag, global_step))


def logged(rank: int, world: int, folder: str) -> tuple[str, list[str], list[tuple[str, int]], int]:
    """The plan, what was shown and given to a writer on this rank, and the number of rows; the file is in `folder`."""
    _, pm = program("llama", {"dp": 2}, optimizer=functools.partial(torch.optim.SGD, lr=0.1))
    shown: list[str] = []
    values = Values()
    log = autoplan.StepLog(pm, f"{folder}/train.jsonl", every=2, writer=values, show=shown.append)
    rows = 0
    for step in range(8):
        loss = pm.step(part(pm, batch_of("llama", 8, seed=step), [4, 4]))
        assert pm.optimizer is not None
        pm.optimizer.step()
        rows += log(loss) is not None
    return pm.plan.to_json(), shown, values.found, rows


def regrouped(rank: int, world: int, pins: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Errors of adding parameters to the optimizer, and the parameters that stay in a group with a rate of 0."""
    _, pm = program("llama", pins, optimizer=functools.partial(torch.optim.SGD, lr=0.1))
    assert pm.optimizer is not None
    texts = []
    for parameter in (next(pm.parameters()), nn.Parameter(torch.zeros(2))):
        try:
            pm.optimizer.add_param_group({"params": [parameter]})
        except ValueError as error:
            texts.append(str(error))
    last = pm.optimizer.param_groups[0]["params"].pop()
    pm.optimizer.add_param_group({"params": [last], "lr": 0.0})
    before = pm.state_dict()
    pm.step(batch_of("llama", 4))
    pm.optimizer.step()
    after = pm.state_dict()
    return texts, [name for name, value in after.items() if torch.equal(value, before[name])]


def saved_in_inference_mode(rank: int, world: int, folder: str) -> tuple[list[float], list[float]]:
    """Losses after a load and those that went on."""
    adam = functools.partial(torch.optim.AdamW, lr=0.1)
    (_, pm), (_, other) = (program("llama", {"dp": 2, "zero_stage": 2}, optimizer=adam) for _ in range(2))

    def losses(trained: ParallelModel) -> list[float]:
        out = []
        for seed in range(2):
            out.append(trained.step(batch_of("llama", 4, seed=seed)).item())
            assert trained.optimizer is not None
            trained.optimizer.step()
        return out

    losses(pm)
    with torch.inference_mode():
        pm.save_checkpoint(folder)
        other.load_checkpoint(folder)
    return losses(other), losses(pm)
