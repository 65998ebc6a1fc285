"""Strategies: every legal way to run one op on the intra-op sub-axes, derived from its rule.

On one sub-axis an op runs replicated (R), invariant (I), split along one factor of one of its labels, or passes a
pending sum (P). Over several sub-axes a strategy is one choice per sub-axis. Mixed choices are kept only if a factor is
too small for the whole product (few key-value heads), which keeps the space small without losing replicated KV heads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product as cartesian
from math import prod

from autoplan.ir.graph import Node, Value
from autoplan.ir.layout import Axis, AxisType, I, Layout, P, R, shard
from autoplan.ir.symbols import Expr
from autoplan.ops.factors import occurrences
from autoplan.ops.language import OpRule, Role
from autoplan.ops.record import Linear
from autoplan.ops.table import SPECIAL_OUTPUT, op_record, rule_for


@dataclass(frozen=True)
class AxisChoice:
    """One way to run an op on one sub-axis."""

    name: str
    inputs: tuple[AxisType, ...]
    outputs: tuple[AxisType, ...]
    factor: str | None = None  # the split factor
    special: str | None = None


@dataclass(frozen=True)
class Strategy:
    """One way to run an op.

    Attributes:
        inputs, outputs: a layout per tensor.
        num_shards: divides the work of the op.
    """

    name: str
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    choices: tuple[AxisChoice, ...]
    num_shards: int

    @property
    def special(self) -> str | None:
        """Name of the special form it needs, if any."""
        return next((c.special for c in self.choices if c.special), None)


def _split_choice(
    rule: OpRule, label: str, where: Sequence[tuple[int, int, int]], factor: str, num_inputs: int, num_outputs: int
) -> AxisChoice | None:
    """Return the split of one factor of a label; None if the rule does not allow it.

    Args:
        where: (operand, dim, position) of the factor in every tensor.
    """
    types: list[AxisType] = [R] * (num_inputs + num_outputs)
    for operand, dim, position in where:
        if types[operand] is not R:
            return None  # the label occurs twice in one tensor
        types[operand] = shard(dim, position)
    special = rule.special.get(label)
    if rule.contracted(label):
        if special is None:
            holders = [rule.roles[k] for k in range(num_inputs) if types[k].is_shard]
            if not all(role in (Role.MUL, Role.LINEAR, Role.INDEX) for role in holders):
                return None
        out = SPECIAL_OUTPUT[special] if special else P
        types[num_inputs:] = [out] * num_outputs
    elif not all(types[num_inputs + k].is_shard for k in range(num_outputs)):
        return None
    return AxisChoice(f"S({factor})", tuple(types[:num_inputs]), tuple(types[num_inputs:]), factor, special)


def axis_choices(
    node: Node,
    values: Mapping[str, Value],
    factors: Mapping[str, Expr],
    pending_counts: bool = False,
) -> list[AxisChoice]:
    """Return every way to run `node` on one sub-axis, whatever its size.

    Args:
        pending_counts: also allow pending sums of values without a gradient.
    """
    rule = rule_for(node, values)
    tensors = [values[n] for n in (*node.tensor_inputs, *node.outputs)]
    num_inputs, num_outputs = len(node.tensor_inputs), len(node.outputs)
    grad = [t.requires_grad for t in tensors]
    choices = [AxisChoice("R", (R,) * num_inputs, (R,) * num_outputs)]
    if any(grad):
        # without a gradient R and I mean the same; R is written
        types = tuple(I if g else R for g in grad)
        choices.append(AxisChoice("I", types[:num_inputs], types[num_inputs:]))
    for label, places in occurrences(rule, tensors, factors).items():
        if label in rule.whole:
            continue
        first = places[0]
        names = (tensors[first.operand].dims or ())[first.dim][first.start : first.start + first.count]
        for j, factor in enumerate(names):
            if j and label in rule.special:
                break  # a special form counts on one contiguous chunk, which only the major factor gives
            where = [(o.operand, o.dim, o.start + j) for o in places]
            choice = _split_choice(rule, label, where, factor, num_inputs, num_outputs)
            if choice is not None:
                if choice.name in {c.name for c in choices}:  # one factor in two labels: a square weight
                    choice = replace(choice, name=f"S({factor}:{label})")
                choices.append(choice)
    linear = op_record(node.op).linear
    if linear is not Linear.NO and (pending_counts or any(grad[num_inputs:])):
        choices += _partial_choices(linear, num_inputs, num_outputs)
    return choices


def _partial_choices(linear: Linear, num_inputs: int, num_outputs: int) -> list[AxisChoice]:
    """Return how pending sums pass through an op that is linear in some of its inputs."""
    outs = (P,) * num_outputs
    if linear is Linear.ALL:
        return [AxisChoice("P", (P,) * num_inputs, outs)]
    carriers = range(num_inputs) if linear is Linear.ONE else range(1)
    return [AxisChoice(f"P{k}", tuple(P if i == k else R for i in range(num_inputs)), outs) for k in carriers]


def divisible(choice: AxisChoice, num_shards: int, sizes: Mapping[str, int]) -> bool:
    """Return True if the split factor has `num_shards` equal parts."""
    return choice.factor is None or sizes[choice.factor] % num_shards == 0


def strategies(
    node: Node,
    values: Mapping[str, Value],
    factors: Mapping[str, Expr],
    axes: Sequence[Axis],
    sizes: Mapping[str, int],
) -> list[Strategy]:
    """Return every strategy of `node` over `axes`.

    The batch is never split here: it belongs to the data-parallel sub-axes.

    Args:
        sizes: factor sizes as numbers.
    """
    if not axes:
        none: Layout = ()
        return [Strategy("R", (none,) * len(node.tensor_inputs), (none,) * len(node.outputs), (), 1)]
    per_axis = [
        c for c in axis_choices(node, values, factors) if c.factor is None or "b" not in factors[c.factor].symbols
    ]
    combos = cartesian(per_axis, repeat=len(axes))
    return [_together(node, combo, axes) for combo in combos if _legal(combo, axes, sizes)]


def _legal(combo: Sequence[AxisChoice], axes: Sequence[Axis], sizes: Mapping[str, int]) -> bool:
    """Return True if the choices, one per sub-axis, are compatible and their split factors have enough parts."""
    split: dict[AxisChoice, int] = {}
    for axis, choice in zip(axes, combo, strict=True):
        if choice.factor is not None:
            split[choice] = split.get(choice, 1) * axis.size
            if not divisible(choice, split[choice], sizes):
                return False
        if choice.special and any(other.special != choice.special for other in combo):
            return False  # a special form works on the whole product
    total = prod(axis.size for axis in axes)
    return all(c is combo[0] for c in combo) or _too_small(combo[0], total, sizes)


def _together(node: Node, combo: tuple[AxisChoice, ...], axes: Sequence[Axis]) -> Strategy:
    num_inputs, num_outputs = len(node.tensor_inputs), len(node.outputs)
    return Strategy(
        name="x".join(dict.fromkeys(c.name for c in combo)),
        inputs=tuple(tuple(c.inputs[k] for c in combo) for k in range(num_inputs)),
        outputs=tuple(tuple(c.outputs[k] for c in combo) for k in range(num_outputs)),
        choices=combo,
        num_shards=prod(axis.size for axis, c in zip(axes, combo, strict=True) if c.factor is not None),
    )


def _too_small(choice: AxisChoice, total: int, sizes: Mapping[str, int]) -> bool:
    return choice.factor is not None and sizes[choice.factor] % total != 0
