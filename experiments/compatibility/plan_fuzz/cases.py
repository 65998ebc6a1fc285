"""A case: a model, the plans that train it, and the loop that they run. Plain data, which a line of JSON holds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class Step:
    """One turn of the training loop.

    Attributes:
        batches: the number of batches that one step takes.
        units: samples of a batch, as a multiple of the least that all data-parallel ranks can cut.
        unequal: True if data-parallel ranks bring different numbers of samples.
        length: tokens of a sequence.
        form: of the tensors of a batch: "", "strided" (parts of larger ones), "turned" (dims are stored in another
            order) or "int32" (token ids).
        before: what happens first: "", "eval", "outputs", "own outputs", "reduced" (outputs of each micro-batch)
            or "odd" (an evaluation on numbers of samples that nothing divides).
        update: "step", "skip" (the gradients are dropped), "leave out" (some parameters lose their gradient), "eval"
            (an evaluation between the gradients and the update) or "not finite" (a gradient becomes infinite, which
            clipping refuses, and all are dropped).
        after: what happens last: "", "eval", "state dict", "some state" (of some names), "optimizer state", "dcp"
            (parameters are written and read by torch.distributed.checkpoint), "checkpoint" (the training goes on in a
            new program of the same plan), "move" (in one of another plan), "weights only" (in one of the same plan
            with the parameters alone) or "restart" (in one on other processes, from a checkpoint that is written
            beside what comes next).
        scale: of the loss of a float16 program, set before the step; 0: as it is.
    """

    batches: int = 1
    units: int = 1
    unequal: bool = False
    length: int = 16
    form: str = ""
    before: str = ""
    update: str = "step"
    after: str = ""
    scale: float = 0.0


@dataclass(frozen=True)
class Optimizer:
    """An optimizer of torch.

    Attributes:
        kind: a name in `loop.OPTIMIZERS`.
        groups: "" (one group), "patterns" or "function".
        clip: the largest norm of all gradients; 0: none. norm_type: of which order; finite: True if another norm is an
            error.
        clip_some: the largest norm of the gradients of parameters of one dim; 0: none.
        schedule: True if a scheduler changes the learning rate after each update.
        own: True if it is made from `pm.parameters()` by the loop, not by `parallelize`.
    """

    kind: str = "sgd"
    groups: str = ""
    clip: float = 0.0
    norm_type: float = 2.0
    finite: bool = False
    clip_some: float = 0.0
    schedule: bool = False
    own: bool = False


@dataclass(frozen=True)
class Plan:
    """How a model is split.

    Attributes:
        pins: of `parallelize`.
        latency_s, bytes_per_s: of the made-up links, so that layouts differ from case to case.
        door: how the plan reaches the program: "search", "plan" (a Plan), "file" (that of a plan) or "program".
        compile: a backend of torch.compile; "": none.
        batch: samples per micro-batch that are planned for where `micro_batch_size` is not pinned.
    """

    pins: Mapping[str, Any] = field(default_factory=dict)
    latency_s: float = 0.0
    bytes_per_s: float = 1e9
    door: str = "search"
    compile: str = ""
    batch: int = 1


@dataclass(frozen=True)
class Case:
    """A model, how it is trained, and the plans under which it is.

    Attributes:
        seed: of weights and data.
        model: a name in `models.MODELS`; `options`: its arguments.
        example: samples and tokens of the batch that it is captured with; example_form: as that of a step.
        frozen: patterns of parameters that are not trained.
        other: the plan of "move"; next_plan: that of every second start, on `next_world` processes ("restart").
        start: "" (every rank has the module), "unequal" (with other values on every rank, of which those of rank 0
            count), "meta" (it is on the meta device, and its values are loaded as a state dict), "init" (they are made
            by the model's own initialisation) or "weights" (they are read from a folder that transformers wrote).
        dtype: of the module that is given in, where `precision` is native.
        twin: True if a second program, under `other`, takes turns with the first in the same job.
        compression: of gradients: "", "bf16", "fp16" or "powersgd" (of full rank, which loses nothing).
        extra: True if batches have a tensor that nobody reads.
        growth_interval: steps after which the scale of a float16 program's loss grows; 0: as by default.
    """

    seed: int = 0
    world: int = 2
    model: str = "gpt"
    options: Mapping[str, Any] = field(default_factory=dict)
    example: tuple[int, int] = (4, 16)
    example_form: str = ""
    frozen: tuple[str, ...] = ()
    start: str = ""
    precision: str = "native"
    dtype: str = "float64"
    twin: bool = False
    compression: str = ""
    verify: bool = False
    optimizer: Optimizer = Optimizer()
    plan: Plan = Plan()
    other: Plan = Plan()
    next_plan: Plan = Plan()
    next_world: int = 1
    extra: bool = False
    growth_interval: int = 0
    steps: tuple[Step, ...] = (Step(),)

    def to_json(self) -> str:
        """Return one line of JSON, without what is as by default."""
        return json.dumps(_changed(self))

    @classmethod
    def from_json(cls, text: str) -> Case:
        """Return the case of a line that `to_json` wrote."""
        found = json.loads(text)
        parts: dict[str, Any] = {n: tuple(found.pop(n)) for n in ("frozen", "example") if n in found}
        for name, kind in (("optimizer", Optimizer), ("plan", Plan), ("other", Plan), ("next_plan", Plan)):
            parts[name] = kind(**found.pop(name, {}))
        parts["steps"] = tuple(Step(**s) for s in found.pop("steps", [{}]))
        return cls(**found, **parts)


def _changed(one: Any) -> dict[str, Any]:
    default, out = type(one)(), {}
    for f in fields(one):
        value = getattr(one, f.name)
        if value == getattr(default, f.name):
            continue
        if f.name == "steps":
            out[f.name] = [_changed(s) for s in value]
        else:
            out[f.name] = _changed(value) if isinstance(value, (Optimizer, Plan)) else value
    return out


def as_dict(case: Case) -> dict[str, Any]:
    """Return all fields of a case."""
    return asdict(case)
