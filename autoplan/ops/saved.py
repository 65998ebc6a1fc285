"""Rules of the bytes that an operation keeps for its backward: how records write them and how they are asked.

Sources: `tools/autograd/derivatives.yaml` of PyTorch 2.13 for its own operations (decomposed as in eager mode),
`autoplan/runtime/{attention,dropout,embedding,loss}.py` for the runtime's.

A rule is written `"x0<1 x1<0 y0<0"`: input 0 is kept if input 1 needs a gradient, input 1 if input 0 does, output 0 if
input 0 does. Functions of the local shapes give further kept bytes (statistics, log-sum-exp, a masked copy of the
indices), and bytes needed only while the operation runs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from autoplan.errors import RuleError
from autoplan.units import DTYPE_BYTES


class Form(Enum):
    """The relation of the outputs to the memory of the inputs."""

    VIEW = "view"  # the same storage (a reshape that torch cannot express as a view copies)
    DENSE = "dense"  # new, in the memory order of the operands (element-wise operations)
    NEW = "new"  # new and contiguous


class Gradient(Enum):
    """The gradient that the backward passes to an input that is not broadcast."""

    NEW = "new"
    PASS = "pass"  # the gradient of the output itself, or a view of it


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """A local tensor: shape, dtype, whether it needs a gradient."""

    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool = False

    @property
    def num_elements(self) -> int:
        """Number of elements."""
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
    """One operation on one rank.

    Attributes:
        special: the sharded form of the strategy (vocab_embedding, ...).
    """

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
    """The rule of what an operation keeps.

    Attributes:
        keeps: (kept tensor, inputs one of which must need a gradient), e.g. ("x0", (1,)).
        extra: bytes of further tensors, each a storage of its own, kept if any input needs a gradient.
        workspace: bytes needed only while it runs: (forward, backward), results not included.
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
    """Return a rule from the short form: `keeps("x0<1 x1<0")`."""
    out = []
    for word in what.split():
        found = re.fullmatch(r"([xy]\d)<([\d,]+)", word)
        if found is None:
            raise RuleError(f"{word!r} is not a kept tensor; write x0<1,2 or y0<0")
        out.append((found.group(1), tuple(int(i) for i in found.group(2).split(","))))
    return SavedRule(tuple(out), form, gradient, extra, workspace)


def statistics_bytes(dtype: str) -> int:
    """Return the bytes of one mean, variance or log-sum-exp, which is float32 for narrower dtypes."""
    return max(4, DTYPE_BYTES[dtype])


def units(forward: int, backward: int) -> SizesOf:
    """Return a function that gives multiples of the first output's bytes."""

    def sizes(f: OpFacts) -> tuple[int, ...]:
        unit = f.outputs[0].num_bytes
        return (forward * unit, backward * unit)

    return sizes


def kept(f: OpFacts, rule: SavedRule) -> list[str]:
    """Return the tensors among x0, x1, ..., y0, ... that an operation keeps, by the inputs that need a gradient."""
    grads = [t.requires_grad for t in f.inputs]
    return [
        name
        for name, needs in rule.keeps
        if any(i < len(grads) and grads[i] for i in needs) and (name[0] == "y" or int(name[1:]) < len(grads))
    ]


def extra_bytes(f: OpFacts, rule: SavedRule) -> tuple[int, ...]:
    """Return the bytes kept besides inputs and outputs, one entry per storage."""
    return rule.extra(f) if rule.extra is not None and f.has_backward else ()


def workspace_bytes(f: OpFacts, rule: SavedRule) -> tuple[int, int]:
    """Return (forward, backward) bytes needed only while it runs, besides its results."""
    if rule.workspace is None:
        return (0, 0)
    forward, backward = rule.workspace(f)
    return (forward, backward if f.has_backward else 0)
