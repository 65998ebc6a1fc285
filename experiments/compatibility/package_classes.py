"""Every model class of diffusers and every model file of timm: does its program compute what the module computes?

    pip install --no-deps --target FOLDER diffusers timm torchvision pillow importlib_metadata zipp ftfy wcwidth \\
        requests urllib3 idna certifi charset_normalizer
    PYTHONPATH=FOLDER:. python -m experiments.compatibility.model_zoo packages --write

torchvision has the version that goes with torch. Where its wheel is for another build of torch, its compiled operations
do not load; these models do not use them, but its import asks for them, so `with_torchvision` declares them.

diffusers: the classes of `diffusers.models` with a config and inputs in `diffusers_classes.json`, as small as they
build. timm: of every file of `timm.models` the smallest architecture, made smaller by arguments where it takes them. A
module in float64 is captured with a loss (the mean square of its first result's difference to a target, and of its
other results); the programs of one device and of some degrees are compared with it, loss and gradients.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from autoplan.capture.export import capture
from autoplan.errors import AutoplanError
from autoplan.ir.graph import ModelGraph
from experiments.compatibility import families
from experiments.compatibility.one_by_one import (
    CRASHED,
    EQUAL,
    NOT_RUN,
    OUTCOMES,
    REFUSED,
    WRONG,
    Row,
    Task,
    crash,
    short,
    table,
)

DATA, TIMM = (Path(__file__).with_name(f"{name}_classes.json") for name in ("diffusers", "timm"))
KINDS = ("transformers", "unets", "autoencoders", "controlnets", "others", "timm")
DEGREES = (families.ONE_DEVICE, *families.DEGREES)
_NUMBERS = re.compile(r"([b\d ]*)(?:: ?(.+))?")  # "b 16 4", "b 12: 0..9", "b 4: true", "b: 0.5"


@dataclass
class Result:
    """What a module under `Trained` returns."""

    loss: torch.Tensor


class Trained(nn.Module):
    """A module with its loss, as a user would write it: takes tensors by name, and holds what has no samples.

    Args:
        arguments: makes the arguments of the module from the tensors of a batch.
        fixed: tensors that are the same in every batch, such as positions.
    """

    def __init__(
        self,
        module: nn.Module,
        arguments: Callable[[Mapping[str, torch.Tensor]], dict[str, Any]],
        fixed: Mapping[str, torch.Tensor],
    ) -> None:
        super().__init__()
        self.module = module
        self._arguments = arguments
        for name, tensor in fixed.items():
            self.register_buffer(name, tensor, persistent=False)

    def results(self, batch: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors that a gradient flows to."""
        found = self.module(**self._arguments(dict(self.named_buffers(recurse=False)) | dict(batch)))
        return [x for x in tree_leaves(found) if isinstance(x, torch.Tensor) and x.requires_grad]

    def forward(self, target: torch.Tensor, **batch: torch.Tensor) -> Result:
        """Return the loss of a batch."""
        first, *others = self.results(batch)
        loss = (first - target.reshape(first.shape)).square().mean()
        return Result(sum((x.square().mean() for x in others), loss))


def with_torchvision() -> None:
    """Declare the operations that the import of torchvision describes, if its own library cannot define them."""
    if importlib.util.find_spec("torchvision") is None:
        return
    try:
        importlib.import_module("torchvision")
    except RuntimeError:  # operator torchvision::nms does not exist
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        for name in [n for n in sys.modules if n.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        importlib.import_module("torchvision")


def tensor_of(text: str, samples: int, generator: torch.Generator) -> torch.Tensor:
    """Return the tensor of a description: sizes (`b` for samples), and perhaps a number, a range or a truth value."""
    match = _NUMBERS.fullmatch(text)
    assert match is not None, text
    shape = tuple(samples if n == "b" else int(n) for n in match[1].split())
    what = match[2]
    if what in ("true", "false"):
        return torch.full(shape, what == "true")
    if what is None:
        return torch.randn(shape, generator=generator, dtype=torch.float64)
    low, is_range, high = what.partition("..")
    if is_range:
        return torch.randint(int(low), int(high) + 1, shape, generator=generator)
    return torch.full(shape, float(what), dtype=torch.float64)


def _fixed(values: list[Any] | None = None, arange: int = 0, grid: list[int] | None = None) -> torch.Tensor:
    """Return a tensor of these values, the first whole numbers, or the places of a grid [places, dims]."""
    if grid is not None:
        axes = torch.meshgrid(*(torch.arange(n, dtype=torch.float64) for n in grid), indexing="ij")
        return torch.stack(axes, dim=-1).flatten(0, -2)
    return torch.arange(arange) if values is None else torch.tensor(values)


def _is_description(value: Any) -> bool:
    return isinstance(value, str) and bool(value) and _NUMBERS.fullmatch(value) is not None


def _inputs(value: Any, path: str, generator: torch.Generator, found: dict[str, torch.Tensor]) -> Callable[..., Any]:
    """Return a function from tensors by name to an argument; tensors of a batch and fixed ones are put into `found`."""
    if _is_description(value) or (isinstance(value, dict) and value.keys() <= {"values", "arange", "grid"}):
        if isinstance(value, str):
            found[path] = tensor_of(value, families.BATCH, generator)
        else:
            found[path] = _fixed(**value)
        return lambda tensors: tensors[path]
    if isinstance(value, list):
        parts = [_inputs(x, f"{path}_{i}", generator, found) for i, x in enumerate(value)]
        return lambda tensors: [part(tensors) for part in parts]
    if isinstance(value, dict):
        named = {k: _inputs(x, f"{path}_{k}", generator, found) for k, x in value.items()}
        return lambda tensors: {k: part(tensors) for k, part in named.items()}
    return lambda tensors: value


def diffusers_class(name: str) -> families.Made:
    """Return a class of diffusers, small, in float64, and its batch."""
    with_torchvision()
    of = json.loads(DATA.read_text())[name]
    torch.manual_seed(0)
    module = getattr(importlib.import_module("diffusers"), name)(**of["config"])
    return with_inputs(module, of["inputs"])


def with_inputs(module: nn.Module, inputs: Mapping[str, Any]) -> families.Made:
    """Return a module with its loss, and a batch of the inputs that are described."""
    generator = torch.Generator().manual_seed(1)
    tensors: dict[str, torch.Tensor] = {}
    makers = {k: _inputs(v, f"given_{k}", generator, tensors) for k, v in inputs.items()}
    plain = {"return_dict": False} if "return_dict" in inspect.signature(module.forward).parameters else {}
    batched = {k for k in tensors if _has_samples(inputs, k)}
    fixed = {k: x for k, x in tensors.items() if k not in batched}
    return _made(
        module,
        lambda given: {k: make(given) for k, make in makers.items()} | plain,
        fixed,
        {k: tensors[k] for k in tensors if k in batched},
    )


def _has_samples(inputs: Mapping[str, Any], path: str) -> bool:
    def descriptions(value: Any, at: str) -> list[tuple[str, str]]:
        if _is_description(value):
            return [(at, value)]
        items = enumerate(value) if isinstance(value, list) else value.items() if isinstance(value, dict) else ()
        return [found for k, x in items for found in descriptions(x, f"{at}_{k}")]

    return any(
        text.startswith("b") for k, v in inputs.items() for at, text in descriptions(v, f"given_{k}") if at == path
    )


def timm_model(file: str) -> families.Made:
    """Return the model of a file of timm, in float64, and its batch of images."""
    with_torchvision()
    of = json.loads(TIMM.read_text())[file]
    torch.manual_seed(0)
    module = importlib.import_module("timm").create_model(of["name"], num_classes=4, **of.get("arguments", {}))
    images = torch.randn(families.BATCH, *of["image"], generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return _made(module, lambda given: {"x": given["images"]}, {}, {"images": images})


def _made(
    module: nn.Module,
    arguments: Callable[[Mapping[str, torch.Tensor]], dict[str, Any]],
    fixed: Mapping[str, torch.Tensor],
    batch: Mapping[str, torch.Tensor],
) -> families.Made:
    model = Trained(families.filled(module), arguments, fixed).train()
    first = model.results(batch)[0]
    rows = families.BATCH, first.shape[0] // families.BATCH
    shape = rows[:1] + (rows[1:] if rows[1] > 1 else ()) + tuple(first.shape[1:])
    target = torch.randn(shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return model, {**batch, "target": target}


@dataclass(frozen=True)
class Class:
    """A model to examine: `make` returns it with its batch."""

    kind: str
    name: str
    make: Callable[[], families.Made]


def classes() -> list[Class]:
    """Return every model of the table."""
    of_diffusers = json.loads(DATA.read_text()).items()
    return [Class(of["kind"], name, partial(diffusers_class, name)) for name, of in of_diffusers] + [
        Class("timm", f"timm {file}: {of['name']}", partial(timm_model, file))
        for file, of in json.loads(TIMM.read_text()).items()
    ]


def examine(of: Class, degrees: tuple[str, ...]) -> Row:
    """Return what became of one class at these degrees."""
    try:
        model, batch = of.make()
        truth = families.Truth(model, batch, *families.eager(None, model, batch))
        again, _ = families.eager(None, model, batch)
        if again != truth.loss:  # dropped labels and paths
            model = model.eval()
            truth = families.Truth(model, batch, *families.eager(None, model, batch))
            again, _ = families.eager(None, model, batch)
    except Exception as exc:  # whatever the package says
        return Row(of.kind, of.name, NOT_RUN, short(exc))
    if again != truth.loss:
        return Row(of.kind, of.name, NOT_RUN, f"its loss is random: {truth.loss:.6f}, then {again:.6f}")
    model.zero_grad()
    start = time.perf_counter()
    try:
        graph = capture(model, batch)
    except AutoplanError as exc:
        return Row(of.kind, of.name, REFUSED, short(exc), capture_s=time.perf_counter() - start)
    except Exception as exc:
        return Row(of.kind, of.name, CRASHED, crash(exc), truth.loss)
    capture_s = time.perf_counter() - start
    parity, reasons, errors = [], [shape_of(graph)], [0.0]
    for degree in degrees:
        outcome, why = EQUAL, ""
        try:
            why, error = families.of_parts(truth, None, degree).compared(*families.run(truth, graph, degree))
            outcome = WRONG if why else EQUAL
            errors.append(error)
        except AutoplanError as exc:
            outcome, why = REFUSED, short(exc)
        except Exception as exc:
            outcome, why = CRASHED, crash(exc)
        parity.append((degree, outcome))
        if why:
            reasons.append(f"{degree}: {why}")
    found = {o for d, o in parity if d in (families.ONE_DEVICE, *families.NEEDED) or o in (WRONG, CRASHED)}
    worst = next(o for o in (WRONG, CRASHED, REFUSED, EQUAL) if o in found)
    return Row(
        of.kind, of.name, worst, "; ".join(reasons), truth.loss, max(errors), capture_s=capture_s, parity=tuple(parity)
    )


def shape_of(graph: ModelGraph) -> str:
    """Return the numbers of calls and blocks, and of attentions and softmaxes in the blocks."""
    ops = [n.op for b in graph.blocks.values() for n in b.nodes]
    counts = ", ".join(f"{ops.count(op)} {op}" for op in ("attention", "softmax"))
    return f"{len(graph.calls)} calls of {len(graph.blocks)} blocks, {counts}, {len(ops)} nodes"


def tasks(only: str, degrees: tuple[str, ...] = DEGREES) -> list[Task]:
    """Return the examination of every model whose name matches `only`."""
    return [Task(c.kind, c.name, partial(examine, c, degrees)) for c in classes() if re.search(only, c.name)]


_INTRODUCTION = """Generated by `python -m experiments.compatibility.model_zoo packages --write` ({versions}, CPU).

Model classes of diffusers, with the sizes of `experiments/compatibility/diffusers_classes.json`, and a small
architecture of every file of timm.models, as they are, in float64. The loss is the mean square of the first result's
difference to a target, and of the other results. `1 device`: the captured program in one process. tp 2, dp 2 ZeRO 3 and
pp 2 (two micro-batches) run with all ranks in one process, cp 2 on two gloo processes. `equal`: loss (relative 1e-6)
and every gradient (1e-4, since many modules compute parts in float32) are the module's. A model is `equal` if it is so
at those of the first four at which it was compared; other cells are empty. `not run`: the package is not installed, or
its own module does not run from these sizes alone, or there was no answer in time. A model whose loss is random in
training mode is in evaluation mode. A run goes on where the last one stopped, so that lines may come from different
states of the code.

`calls of blocks` counts the layers and the pieces between them, and how many of them are planned; `attention` the
attentions that are one operation in them, `softmax` others (attention written out, routers).
"""


def page(rows: Sequence[Row], names: Sequence[str], versions: str) -> str:
    """Return the text of docs/package_classes.md. `names`: of all models."""
    rows = [replace(r, outcome=NOT_RUN) if r.why.startswith("no answer in") else r for r in rows]
    ran = [r for r in rows if r.outcome != NOT_RUN]
    equal, worst = sum(r.outcome == EQUAL for r in ran), max((r.error or 0.0 for r in ran), default=0.0)
    absent = len(set(names) - {r.name for r in rows})
    lines = ["# Classes of diffusers and timm", "", *_INTRODUCTION.format(versions=versions).splitlines(), ""]
    lines += [f"Equal: {equal} of the {len(ran)} models that run. The worst gradient is off by {worst:.0e}."]
    further = "1 further model was" if absent == 1 else f"{absent} further models were"
    lines += ["", f"{further} not tried."] if absent else []
    lines += ["", "| kind | " + " | ".join(OUTCOMES) + " |", "|---" * (len(OUTCOMES) + 1) + "|"]
    for kind in (*KINDS, "all"):
        counts = Counter(r.outcome for r in rows if kind in ("all", r.group))
        lines += [f"| {kind} | " + " | ".join(str(counts[o]) for o in OUTCOMES) + " |"]
    in_order = sorted(rows, key=lambda r: (KINDS.index(r.group), r.name.lower()))
    return "\n".join([*lines, "", *table(in_order, DEGREES)]) + "\n"
