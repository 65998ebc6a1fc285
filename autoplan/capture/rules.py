"""Split rules for operators of a user: one line, stored with the operator.

@autoplan.rule("[*b,i!] -> [*b,i!]")
@torch.library.custom_op("mylib::cumulative_max", mutates_args=())
def cumulative_max(x: torch.Tensor) -> torch.Tensor: ...
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from autoplan.errors import CaptureError, RuleError
from autoplan.ir.symbols import Expr
from autoplan.ops.language import OpRule, Role, bind, parse

_RULE = "_autoplan_rule"
_RELATIVE, _ABSOLUTE = 1e-9, 1e-12
_Op = TypeVar("_Op")
_Run = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]


def rule(line: str) -> Callable[[_Op], _Op]:
    """Return a decorator that says how an operator of torch.library can be split.

    Without a rule the capture finds out by itself what it can on small tensors.

    Args:
        line: a line of the rule language (`autoplan.ops.language`): the dims of every tensor that the operator takes,
            then of every tensor that it returns. A label of an input and of the output can be split; `!` forbids it.

    Raises:
        RuleError: if the line cannot be read, or if what is decorated is not an operator.

    Example:
        >>> import torch, autoplan
        >>> @autoplan.rule("[*b,i!] -> [*b,i!]")
        ... @torch.library.custom_op("example::softsign", mutates_args=())
        ... def softsign(x: torch.Tensor) -> torch.Tensor:
        ...     return x / (1 + x.abs())
    """
    template = parse(line)
    if template.special:
        raise RuleError(f"rule {line!r}: labels with @ are for operators of autoplan; use ! for what cannot be split")

    def mark(op: _Op) -> _Op:
        overload: Any = getattr(op, "_opoverload", op)  # of what torch.library.custom_op returns
        if isinstance(overload, torch._ops.OpOverloadPacket):
            overload = getattr(overload, "default", overload)
        if not isinstance(overload, torch._ops.OpOverload):
            raise RuleError(
                f"autoplan.rule is given {type(op).__name__}, not an operator; decorate what torch.library.custom_op "
                "returns"
            )
        setattr(overload, _RULE, line)
        return op

    return mark


def rule_line(op: torch._ops.OpOverload) -> str | None:
    """Return the line that a user gave for an operator, if any."""
    return getattr(op, _RULE, None)


def check_rule(
    op: torch._ops.OpOverload, line: str, inputs: Sequence[tuple[Expr, ...]], outputs: Sequence[tuple[Expr, ...]]
) -> None:
    """Raise CaptureError if the line does not fit tensors of these shapes."""
    template = parse(line)
    try:
        if len(inputs) != len(template.inputs):
            raise RuleError(f"rule {line!r} is for {len(template.inputs)} tensors; the operator is given {len(inputs)}")
        bind(template, list(inputs), list(outputs))
    except RuleError as exc:
        raise CaptureError(f"{op}: {exc}") from exc


def disproved(line: str, run: _Run, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> str:
    """Run an operator on the halves of small tensors, for every label that a rule splits.

    Returns:
        A label whose halves do not give the whole; empty if there is none.
    """
    given, made = ([tuple(Expr.of(n) for n in x.shape) for x in side] for side in (inputs, outputs))
    bound = bind(parse(line), given, made)
    for label in bound.labels:
        if label not in bound.whole and _splits(bound, label) and not _holds(bound, label, run, inputs, outputs):
            return label
    return ""


def _splits(bound: OpRule, label: str) -> bool:
    """Return True if a rule allows the split of a label that has dims of its own."""
    dims = [dim for operand in (*bound.inputs, *bound.outputs) for dim in operand if label in dim]
    roles = [role for operand, role in zip(bound.inputs, bound.roles, strict=True) if (label,) in operand]
    summed = bound.contracted(label)
    return (
        all(dim == (label,) for dim in dims) and bool(roles) and (not summed or set(roles) <= {Role.MUL, Role.LINEAR})
    )


def half(x: torch.Tensor, dim: int, which: int) -> torch.Tensor:
    """Return a half of a tensor along a dim in memory of its own, which an operator may read past the view of it."""
    return x.chunk(2, dim)[which].clone(memory_format=torch.contiguous_format)


def _holds(
    bound: OpRule, label: str, run: _Run, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
) -> bool:
    parts: list[Sequence[torch.Tensor]] = []
    for k in range(2):
        given: list[Any] = []
        for x, dims in zip(inputs, bound.inputs, strict=True):
            at = [d for d, dim in enumerate(dims) if dim == (label,)]
            if at and x.shape[at[0]] % 2:
                return True  # too small to be cut
            given.append(half(x, at[0], k) if at else x)
        try:
            parts.append(run(given))
        except Exception:  # the operator needs the whole
            return False
    for whole, a, b, dims in zip(outputs, *parts, bound.outputs, strict=True):
        at = [d for d, dim in enumerate(dims) if dim == (label,)]
        joined = torch.cat([a, b], at[0]) if at else a + b
        if joined.shape != whole.shape or not torch.allclose(joined, whole, _RELATIVE, _ABSOLUTE, equal_nan=True):
            return False
    return True
