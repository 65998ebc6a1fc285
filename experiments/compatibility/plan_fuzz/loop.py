"""The training loop, of a program on its ranks and of the module in one process, and the record of what they did."""

from __future__ import annotations

import fnmatch
import functools
import hashlib
import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from experiments.compatibility.plan_fuzz.cases import Case, Step
from experiments.compatibility.plan_fuzz.models import (
    Batch,
    Task,
    decoder,
    perceptron,
    recurrent,
    residual,
    translator,
    vision,
)
from experiments.compatibility.plan_fuzz.stateful_models import divided, drawing, fourier, updating
from experiments.compatibility.plan_fuzz.transformers_models import AUX, causal, encoder_decoder

MODELS: Mapping[str, Callable[..., Task]] = {
    "gpt": decoder,
    "translator": translator,
    "vision": vision,
    "residual": residual,
    "perceptron": perceptron,
    "recurrent": recurrent,
    "causal": causal,
    "encoder_decoder": encoder_decoder,
    "drawing": drawing,
    "updating": updating,
    "fourier": fourier,
    "divided": divided,
}

# An element with a gradient of rounding errors moves by the whole learning rate where eps is small.
OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "nesterov": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "fused sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "adam": functools.partial(torch.optim.Adam, lr=1e-2, eps=1e-3, weight_decay=0.01),
    "adamw": functools.partial(torch.optim.AdamW, lr=1e-2, eps=1e-3),
    "amsgrad": functools.partial(torch.optim.AdamW, lr=1e-2, eps=1e-3, amsgrad=True),
    "foreach adamw": functools.partial(torch.optim.AdamW, lr=1e-2, eps=1e-3, foreach=True),
    "fused adamw": functools.partial(torch.optim.AdamW, lr=1e-2, eps=1e-3, fused=True),
    "plain adamw": functools.partial(torch.optim.AdamW, lr=1e-2, eps=1e-3, foreach=False),
    "rmsprop": functools.partial(torch.optim.RMSprop, lr=1e-3, eps=1e-3, momentum=0.5),
    "adagrad": functools.partial(torch.optim.Adagrad, lr=1e-2, eps=1e-3),
    "nadam": functools.partial(torch.optim.NAdam, lr=1e-2, eps=1e-3),
}
PATTERNS: Mapping[str, Mapping[str, float]] = {"*norm*": {"weight_decay": 0.0, "lr": 0.03}, "*bias": {"lr": 0.02}}
UNREAD = "unread"  # a tensor of a batch
LEFT_OUT = "*norm*"  # parameters that lose their gradient
Made = tuple[tuple[int, ...], int, bool]  # samples of each data-parallel rank, micro-batches, and if it overflowed
SKIPPED: Made = ((), 0, False)
_LARGEST_SCALE = 2.0**12  # of a loss that is float16 itself
SHRUNK = 0.97  # what a state is multiplied by when it is loaded again


def by_size(name: str, shape: torch.Size) -> dict[str, float]:
    """Return the settings of a parameter: those of one dim have no weight decay."""
    return {} if len(shape) > 1 else {"weight_decay": 0.0, "lr": 0.02}


@dataclass
class Log:
    """What a loop did and found.

    Attributes:
        made: of each step; SKIPPED if it was refused.
        numbers: (name, value) of losses and norms, in order.
        gradients: of the first step; parameters: after the last.
        outputs: of evaluations, in order.
        refused: why the rest was not done; "" if all was.
        restarts: True if the rest is for other processes.
        twin: what a second program did.
    """

    made: list[Made] = field(default_factory=list)
    numbers: list[tuple[str, float]] = field(default_factory=list)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    outputs: list[dict[str, torch.Tensor]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    refused: str = ""
    restarts: bool = False
    twin: Log | None = None

    def joined(self, later: Log) -> Log:
        """Return it with what other processes did after it."""
        return Log(
            self.made + later.made,
            self.numbers + later.numbers,
            self.gradients or later.gradients,
            later.parameters,
            self.outputs + later.outputs,
            self.notes + later.notes,
            later.refused,
            later.restarts,
            later.twin,
        )

    def short(self) -> Log:
        """Return it with fingerprints in place of tensors that are the same on every rank."""
        prints = [fingerprint(found) for found in self.outputs]
        kept = Log(
            list(self.made), list(self.numbers), notes=list(self.notes), refused=self.refused, restarts=self.restarts
        )
        kept.twin = None if self.twin is None else self.twin.short()
        kept.notes += [fingerprint(self.gradients), fingerprint(self.parameters), *prints]
        return kept


def fingerprint(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return a hash of names and values."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(name.encode() + tensors[name].detach().contiguous().cpu().double().numpy().tobytes())
    return found.hexdigest()[:12]


def task_of(case: Case) -> Task:
    """Return the task of a case."""
    options = {n: tuple(x) if isinstance(x, list) else x for n, x in case.options.items()}
    return MODELS[case.model](**options)


def dtype_of(case: Case) -> torch.dtype:
    """Return the dtype of the parameters that are given in."""
    native: torch.dtype = getattr(torch, case.dtype)
    return native if case.precision == "native" else torch.float32


def dtype_alone(case: Case) -> torch.dtype:
    """Return the dtype of one process: that of the parameters, but for 16 bits."""
    return torch.float32 if dtype_of(case).itemsize == 2 else dtype_of(case)


def make_model(case: Case, task: Task, seed: int = 0, dtype: torch.dtype | None = None) -> nn.Module:
    """Return the module, in training mode."""
    torch.manual_seed(case.seed + 7919 * seed)
    model = task.make().to(dtype or dtype_of(case)).train()
    for name, parameter in model.named_parameters():
        if name == "gain" and dtype_of(case) == torch.float64:
            parameter.data = parameter.data.float()
    for name, parameter in model.named_parameters():
        if any(fnmatch.fnmatch(name, pattern) for pattern in case.frozen):
            parameter.requires_grad_(False)
    return model


def make_batch(case: Case, task: Task, key: int, samples: int, length: int, dtype: torch.dtype | None = None) -> Batch:
    """Return the whole batch number `key`."""
    generator = torch.Generator().manual_seed(1000 * case.seed + key)
    found = task.batch(samples, length, generator, torch.float64)
    if case.extra:
        found[UNREAD] = torch.arange(3 * samples).view(samples, 3)
    return {n: x.to(dtype or dtype_of(case)) if x.is_floating_point() else x for n, x in found.items()}


def formed(batch: Batch, form: str) -> Batch:
    """Return a batch in other storage: parts of larger tensors, another order of dims, or token ids of 32 bits."""
    if form == "int32":
        return {n: x.int() if n in ("ids", "input_ids", "source") else x for n, x in batch.items()}
    if form == "turned":
        return {n: x.transpose(0, 1).contiguous().transpose(0, 1) if x.dim() > 1 else x for n, x in batch.items()}
    if form == "strided":
        return {n: torch.stack([x, x], -1)[..., 0] for n, x in batch.items()}
    return batch


def part_of(batch: Batch, sizes: Iterable[int], index: int) -> Batch:
    """Return the samples of a data-parallel rank."""
    given = list(sizes)
    first = sum(given[:index])
    return {n: x[first : first + given[index]] for n, x in batch.items()}


def schedule_of(optimizer: torch.optim.Optimizer, case: Case) -> Any:
    """Return what changes the learning rate after each update, or None."""
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7) if case.optimizer.schedule else None


def transient_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that are not part of a state dict."""
    state = model.state_dict()
    return {n: b.detach().clone() for n, b in model.named_buffers() if n not in state}


def shrinks(state: Mapping[str, torch.Tensor], which: str) -> dict[str, torch.Tensor]:
    """Return the part of a state that is multiplied by SHRUNK: all numbers, or those of some names."""
    some = which == "some state"
    return {n: x for n, x in state.items() if x.is_floating_point() and (n.endswith("weight") or not some)}


# -- one process ------------------------------------------------------------------------------------------------------


def _loss_alone(model: nn.Module, task: Task, batch: Batch) -> tuple[torch.Tensor, Any]:
    if task.loss is None:
        out = model(**batch, **({"use_cache": False} if "input_ids" in batch else {}))
        return out.loss, out
    named = _accepted(model, batch)
    out = model(**named)
    return task.loss(out, batch), out


def _accepted(model: nn.Module, batch: Batch) -> dict[str, Any]:
    out: dict[str, Any] = {
        n: x for n, x in batch.items() if n not in ("targets", "others", "weights", "values", UNREAD)
    }
    return {**out, "use_cache": False} if "input_ids" in batch else out


def _backward_coupled(
    model: nn.Module, task: Task, batches: list[Batch], sizes: tuple[int, ...], num_each: int, scale: float = 1.0
) -> float:
    """Run every whole micro-batch in sequence: micro-batch i of all data-parallel ranks, `num_each` of each batch."""
    total, parts, num = 0.0, [], num_each * len(batches)
    for batch, index in itertools.product(batches, range(num_each)):
        rows = []
        for rank, size in enumerate(sizes):
            first = sum(sizes[:rank]) + index * (size // num_each)
            rows += list(range(first, first + size // num_each))
        parts.append({n: x[rows] for n, x in batch.items()})
    labels = [int((p["labels"][:, 1:] != -100).sum()) if "labels" in p else 1 for p in parts]
    for part, count in zip(parts, labels, strict=True):
        loss, out = _loss_alone(model, task, part)
        if task.loss is None:
            aux = AUX * out.aux_loss
            loss = (loss - aux) * count / sum(labels) + aux / num if count else aux / num
        else:
            loss = loss / num
        (loss.to(torch.promote_types(loss.dtype, torch.float32)) * scale).backward()
        total += float(loss.detach())
    return total


def groups_of(named: Iterable[tuple[str, nn.Parameter]], how: str) -> list[Any]:
    """Return the trained parameters as an optimizer takes them."""
    trained = [(n, p) for n, p in named if p.requires_grad]
    if not how:
        return [p for _, p in trained]
    found: dict[str, dict[str, Any]] = {}
    for name, p in trained:
        if how == "function":
            settings: Mapping[str, float] = by_size(name, p.shape)
        else:
            settings = next((s for pattern, s in PATTERNS.items() if fnmatch.fnmatch(name, pattern)), {})
        found.setdefault(repr(settings), {**settings, "params": []})["params"].append(p)
    return list(found.values())


@dataclass
class Alone:
    """The untouched module with an optimizer of torch, in one process, that repeats what a program did.

    Attributes:
        initial: values; None: those of a seed.
        narrow: a dtype of 16 bits of the whole module, which then stops at the first gradients; None: as usual.
    """

    case: Case
    task: Task
    log: Log = field(default_factory=Log)
    initial: Mapping[str, torch.Tensor] | None = None
    narrow: torch.dtype | None = None

    def run(self, made: list[Made]) -> Log:
        """Train as a program did that took these samples with so many micro-batches. The loop has the case's steps."""
        case, log, task = self.case, self.log, self.task
        dtype = self.narrow or dtype_alone(case)
        model = make_model(case, task, dtype=dtype_alone(case))
        if self.initial is not None:
            model.load_state_dict(self.initial)
        model.to(dtype)
        optimizer = self._optimizer(model)
        schedule = schedule_of(optimizer, case)
        scaler = Scaler(case)
        left = iter(made)
        for index, step in enumerate(case.steps):
            sizes, num, overflowed = next(left, SKIPPED)
            scaler.set(step)
            scale = min(scaler.scale, _LARGEST_SCALE) if self.narrow is torch.float16 else 1.0
            if not sizes:
                continue
            total = sum(sizes)
            if step.before:
                self._evaluate(model, index, total, step.before)
            model.train()
            optimizer.zero_grad()
            batches = [make_batch(case, task, 10 * index + k, total, step.length, dtype) for k in range(step.batches)]
            if task.coupled:
                loss = _backward_coupled(model, task, batches, sizes, num, scale)
            else:
                whole = {n: torch.cat([b[n] for b in batches]) for n in batches[0]}
                found, _ = _loss_alone(model, task, whole)
                (found.to(dtype_alone(case)) * scale).backward()
                loss = float(found.detach())
            log.numbers.append((f"loss {index}", loss))
            log.numbers += scaler.numbers(index, overflowed)
            if overflowed:
                optimizer.zero_grad()
            if not log.gradients:
                grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
                log.gradients = {n: g.to(dtype_alone(case), copy=True) / scale for n, g in grads.items()}
            if log.gradients and self.narrow is not None:
                return log
            if step.update == "eval":
                self._evaluate(model, index, total, "")
            self._update(model, optimizer, schedule, index, overflowed)
            if step.after in ("state dict", "some state"):
                state = shrinks(model.state_dict(keep_vars=True), step.after)
                with torch.no_grad():
                    for x in dict.fromkeys(state.values()):
                        x.mul_(SHRUNK)
            if step.after == "weights only":
                optimizer, scaler = self._optimizer(model), Scaler(case)
                schedule = schedule_of(optimizer, case)
            if step.after == "eval":
                self._evaluate(model, index, total, "")
        log.parameters = {n: x.detach().clone() for n, x in model.state_dict().items()}
        log.parameters |= transient_of(model)
        return log

    def _optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        how = self.case.optimizer
        return OPTIMIZERS[how.kind](groups_of(model.named_parameters(), how.groups))

    def _evaluate(self, model: nn.Module, index: int, total: int, what: str) -> None:
        if not self.task.evaluates:
            return
        dtype = next(model.parameters()).dtype
        total = sum(odd_sizes(self.case, index)) if what == "odd" else total
        batch = make_batch(self.case, self.task, 10 * index + 9, total, self.case.example[1], dtype)
        with torch.no_grad():
            loss, out = _loss_alone(model.eval(), self.task, batch)
        self.log.numbers.append((f"evaluation {index}", float(loss)))
        if what not in ("", "eval", "odd"):
            found = _outputs(out)
            self.log.outputs.append(reduced(found) if what == "reduced" else found)

    def _update(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, schedule: Any, index: int, overflowed: bool
    ) -> None:
        step, how = self.case.steps[index], self.case.optimizer
        if step.update in ("skip", "not finite"):
            optimizer.zero_grad()
            return
        if step.update == "leave out":
            for name, p in model.named_parameters():
                if fnmatch.fnmatch(name, LEFT_OUT):
                    p.grad = None
        trained = [p for p in model.parameters() if p.requires_grad]
        if how.clip:
            norm = math.inf if overflowed else float(nn.utils.clip_grad_norm_(trained, how.clip, how.norm_type))
            self.log.numbers.append((f"norm {index}", norm))
        if how.clip_some:
            some = [p for p in trained if p.dim() == 1 and p.grad is not None]
            if some:
                self.log.numbers.append((f"some norm {index}", float(nn.utils.clip_grad_norm_(some, how.clip_some))))
        optimizer.step()
        if schedule is not None:
            schedule.step()


def _outputs(out: Any) -> dict[str, torch.Tensor]:
    """Return the tensors that a module returned, by the names that `eval_outputs` gives them."""
    if isinstance(out, torch.Tensor):
        return {"output": out.detach().clone()}
    items = enumerate(out) if isinstance(out, (tuple, list)) else out.items()
    found: dict[str, torch.Tensor] = {}
    for name, x in items:
        if isinstance(x, torch.Tensor):
            found[str(name)] = x.detach().clone()
        elif isinstance(x, (tuple, list, dict)):
            found |= {f"{name}.{inner}": y for inner, y in _outputs(x).items()}
    return found


def odd_sizes(case: Case, index: int) -> list[int]:
    """Return the samples of eight data-parallel ranks, of which the last takes those of all that are not there."""
    return [1 + (case.seed + index * rank + rank) % 3 for rank in range(8)]


def reduced(outputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return one number of each sample."""
    return {name: x.reshape(x.shape[0], -1).square().mean(1) for name, x in outputs.items() if x.dim()}


class Scaler:
    """The scale of the loss of a float16 program as torch.amp.GradScaler has it, given which steps overflowed."""

    def __init__(self, case: Case) -> None:
        self._in_use = case.precision.startswith("fp16")
        self.scale, self._tracker, self._interval = 2.0**16, 0, case.growth_interval or 2000

    def set(self, step: Step) -> None:
        """Take a scale that a step begins with."""
        self.scale = step.scale or self.scale

    def numbers(self, index: int, overflowed: bool) -> list[tuple[str, float]]:
        """Return what the scale is after a step."""
        if not self._in_use:
            return []
        self._tracker = 0 if overflowed else self._tracker + 1
        if overflowed:
            self.scale *= 0.5
        elif self._tracker == self._interval:
            self.scale, self._tracker = self.scale * 2, 0
        return [(f"scale {index}", self.scale)]
