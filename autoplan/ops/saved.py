"""What an operation keeps for its backward: how the rules in the records are written and asked.

Sources: `tools/autograd/derivatives.yaml` of PyTorch 2.13 for its own operations (decomposed as in eager mode),
`autoplan/runtime/{attention,dropout,embedding,loss}.py` for ours.

A rule is written `"x0<1 x1<0 y0<0"`: input 0 is kept if input 1 needs a gradient, input 1 if input 0 does, output 0 if
input 0 does. What an operation keeps besides its inputs and outputs (statistics, log-sum-exp, a masked copy of the
indices), and what it needs only while it runs, are functions of its local shapes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from autoplan.errors import RuleError
from autoplan.units import DTYPE_BYTES

HALF = ("bfloat16", "float16")


class Form(Enum):
    """How the outputs relate to the memory of the inputs."""

    VIEW = "view"  # the same storage (a reshape that torch cannot express as a view copies)
    DENSE = "dense"  # new, in the order of memory of the operands (element-wise operations)
    NEW = "new"  # new and contiguous


class Gradient(Enum):
    """The gradient that the backward hands to an input that is not broadcast."""

    NEW = "new"
    PASS = "pass"  # the gradient of the output itself, or a view of it


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """A local tensor."""

    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool

    @property
    def num_elements(self) -> int:
        """Element count."""
        out = 1
        for size in self.shape:
            out *= size
        return out

    @property
    def num_bytes(self) -> int:
        """Bytes if dense."""
        return self.num_elements * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class OpFacts:
    """One operation on one rank. `special`: the sharded form of the strategy (vocab_embedding, ...)."""

    op: str
    attrs: Mapping[str, Any]
    inputs: tuple[TensorFacts, ...]
    outputs: tuple[TensorFacts, ...]
    special: str | None = None
    device_type: str = "cpu"

    @property
    def has_backward(self) -> bool:
        """True if a gradient flows through it."""
        return any(t.requires_grad for t in self.inputs)


SizesOf = Callable[[OpFacts], tuple[int, ...]]


@dataclass(frozen=True)
class SavedRule:
    """What an operation keeps.

    keeps: (kept tensor, inputs one of which must need a gradient), e.g. ("x0", (1,)).
    extra: bytes of further tensors, each a storage of its own, kept if any input needs a gradient.
    workspace: bytes that are needed only while it runs: (forward, backward), results not included.
    """

    keeps: tuple[tuple[str, tuple[int, ...]], ...]
    form: Form = Form.DENSE
    gradient: Gradient = Gradient.NEW
    extra: SizesOf | None = None
    workspace: SizesOf | None = None


def keeps(
    what: str = "",
    form: Form = Form.DENSE,
    gradient: Gradient = Gradient.NEW,
    extra: SizesOf | None = None,
    workspace: SizesOf | None = None,
) -> SavedRule:
    """A rule in the short form: `keeps("x0<1 x1<0")`."""
    out = []
    for word in what.split():
        found = re.fullmatch(r"([xy]\d)<([\d,]+)", word)
        if found is None:
            raise RuleError(f"{word!r} is not a kept tensor; write x0<1,2 or y0<0")
        out.append((found.group(1), tuple(int(i) for i in found.group(2).split(","))))
    return SavedRule(tuple(out), form, gradient, extra, workspace)


def statistics_bytes(dtype: str) -> int:
    """Bytes of one mean, variance or log-sum-exp: accumulated in float32 below it."""
    return max(4, DTYPE_BYTES[dtype])


def units(forward: int, backward: int) -> SizesOf:
    """Multiples of the first output's bytes."""

    def sizes(f: OpFacts) -> tuple[int, ...]:
        unit = f.outputs[0].num_bytes
        return (forward * unit, backward * unit)

    return sizes


def kept(f: OpFacts, rule: SavedRule) -> list[str]:
    """Which of x0, x1, ..., y0, ... an operation keeps, given who needs a gradient."""
    grads = [t.requires_grad for t in f.inputs]
    return [
        name
        for name, needs in rule.keeps
        if any(i < len(grads) and grads[i] for i in needs) and (name[0] == "y" or int(name[1:]) < len(grads))
    ]


def extra_bytes(f: OpFacts, rule: SavedRule) -> tuple[int, ...]:
    """Bytes of what is kept besides inputs and outputs, one entry per storage."""
    return rule.extra(f) if rule.extra is not None and f.has_backward else ()


def workspace_bytes(f: OpFacts, rule: SavedRule) -> tuple[int, int]:
    """(forward, backward) bytes needed only while it runs, besides its results."""
    if rule.workspace is None:
        return (0, 0)
    forward, backward = rule.workspace(f)
    return (forward, backward if f.has_backward else 0)
