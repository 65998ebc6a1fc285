"""Bytes alive while gradients flow back through the statements of a block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import NamedTuple


class MadeGradient(NamedTuple):
    """A gradient that a statement makes in the backward.

    Attributes:
        var: its variable; None for a parameter.
        passes: True if it is the output's gradient itself, which takes no memory of its own.
    """

    var: str | None
    num_bytes: int
    passes: bool


@dataclass(slots=True)
class GradientStep:
    """The memory effects of one statement.

    Attributes:
        saved: storages that it keeps for the backward.
        extra: those of `saved` that are not values of the program.
        fusible: an element-wise kernel may take it in.
        forward, backward: bytes of workspace.
    """

    reads: tuple[str, ...]
    writes: tuple[str, ...]
    saved: frozenset[int] = frozenset()
    extra: tuple[int, ...] = ()
    fusible: bool = False
    forward: int = 0
    backward: int = 0
    gradients: list[MadeGradient] = field(default_factory=list)


def without_parameters(steps: Sequence[GradientStep], chosen: Sequence[bool]) -> list[GradientStep]:
    """Return the steps, the chosen ones without the gradients of their parameters."""
    return [
        replace(step, gradients=[made for made in step.gradients if made.var is not None]) if without else step
        for step, without in zip(steps, chosen, strict=True)
    ]


def spent_bytes(
    steps: Sequence[GradientStep],
    losses: Sequence[bool],
    heads: Sequence[bool],
    storages: Sequence[int],
    counted: Set[int],
) -> int:
    """Return what the first part of a split backward frees of a loss, less the gradient that waits at the heads.

    Args:
        losses, heads: by step: it is a loss, it is a product that makes logits.
        storages, counted: as for `backward_peak`.
    """
    saved: dict[bool, set[int]] = {True: set(), False: set()}
    for step, is_loss in zip(steps, losses, strict=True):
        saved[is_loss] |= step.saved & counted
    made = {var for step, is_head in zip(steps, heads, strict=True) if is_head for var in step.writes}
    waiting = [g.num_bytes for step in steps for g in step.gradients if g.var in made]
    return max(0, sum(storages[s] for s in saved[True] - saved[False]) - sum(waiting)) if waiting else 0


class _Gradients:
    """The gradients of variables; several variables may share one."""

    def __init__(self, live: int) -> None:
        self.live = live  # bytes, with saved storages
        self.of: dict[str, int] = {}  # variable -> gradient
        self.sizes: list[int] = []
        self.holders: list[int] = []

    def make(self, size: int) -> int:
        self.sizes.append(size)
        self.holders.append(0)
        return len(self.sizes) - 1

    def hold(self, var: str, grad: int) -> None:
        self.live += 0 if self.holders[grad] else self.sizes[grad]
        self.holders[grad] += 1
        self.of[var] = grad

    def drop(self, var: str) -> None:
        grad = self.of.pop(var)
        self.holders[grad] -= 1
        self.live -= 0 if self.holders[grad] else self.sizes[grad]

    def add(self, var: str, grad: int) -> None:
        """Add an arriving gradient. A second one is summed with the first, in place unless other variables hold it."""
        if var not in self.of:
            self.hold(var, grad)
        elif self.holders[self.of[var]] > 1:
            size = self.sizes[self.of[var]]
            self.drop(var)
            self.hold(var, self.make(size))

    def through(self, step: GradientStep) -> int:
        """Pass the gradients of a statement's outputs to its inputs. Return the most bytes alive meanwhile."""
        mine = [self.of[v] for v in step.writes if v in self.of]
        if not mine:
            return 0
        new = sum(made.num_bytes for made in step.gradients if not made.passes)
        arriving = [
            (made.var, mine[0] if made.passes else self.make(made.num_bytes))
            for made in step.gradients
            if made.var is not None
        ]
        peak = self.live + new + step.backward
        for var, grad in arriving:
            self.add(var, grad)
        for var in step.writes:
            if var in self.of:
                self.drop(var)
        return peak


def backward_peak(
    steps: Sequence[GradientStep],
    storages: Sequence[int],
    counted: Set[int],
    given: Set[int],
    arriving: Mapping[str, int],
) -> int:
    """Return the most bytes alive in the backward, including gradients of parameters while they are new.

    Args:
        storages: bytes of every storage.
        counted: storages that belong to the block.
        given: storages that the block hands out without a gradient.
        arriving: bytes of the gradient of every variable that the block hands out.
    """
    users: dict[int, int] = dict.fromkeys(given, 1)
    for step in steps:
        for s in step.saved & counted:
            users[s] = users.get(s, 0) + 1
    flow = _Gradients(sum(storages[s] for s in users))
    for var, size in arriving.items():
        flow.hold(var, flow.make(size))
    peak = flow.live
    for step in reversed(steps):
        peak = max(peak, flow.through(step))
        for s in step.saved & counted:
            users[s] -= 1
            flow.live -= 0 if users[s] else storages[s]
    return peak
