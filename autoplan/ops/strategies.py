"""Strategies: every legal way to run one op on the intra-op sub-axes, derived from its rule.

On one sub-axis an op runs replicated (R), invariant (I), split along one factor of one of its labels, or passes a
pending sum (P). Over several sub-axes a strategy is one choice per sub-axis; mixed choices are kept only where a factor
is too small for the whole product (few key-value heads), which keeps the space small without losing replicated KV
heads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product as cartesian

from autoplan.ir.graph import Node, Value
from autoplan.ir.layout import Axis, AxisType, I, Layout, P, R, shard
from autoplan.ir.symbols import Expr
from autoplan.ops.factors import occurrences
from autoplan.ops.language import OpRule, Role
from autoplan.ops.table import PASSES_PARTIAL, rule_for

# what a split of a marked label makes of the output; the runtime module of that name does the work
SPECIAL_OUTPUT: dict[str, AxisType] = {"vocab_embedding": P, "vocab_cross_entropy": I, "expert_parallel": P}


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
    """One way to run an op: a layout per tensor input and output. `num_shards` divides its work."""

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
    """Split one factor of a label; None where the rule does not allow it. `where` lists (operand, dim, position)."""
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
    rule: OpRule | None = None,
    pending_counts: bool = False,
) -> list[AxisChoice]:
    """Every way to run `node` on one sub-axis, whatever its size.

    `pending_counts`: pending sums of what has no gradient as well.
    """
    rule = rule or rule_for(node, values)
    tensors = [values[n] for n in (*node.tensor_inputs, *node.outputs)]
    num_inputs, num_outputs = len(node.tensor_inputs), len(node.outputs)
    grad = [t.requires_grad for t in tensors]
    choices = [AxisChoice("R", (R,) * num_inputs, (R,) * num_outputs)]
    if any(grad):
        # without a gradient R and I are the same thing; R is the one written
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
    if node.op in PASSES_PARTIAL and (pending_counts or any(grad[num_inputs:])):
        choices += _partial_choices(node, rule, num_inputs, num_outputs)
    return choices


def _partial_choices(node: Node, rule: OpRule, num_inputs: int, num_outputs: int) -> list[AxisChoice]:
    if not num_inputs:
        return []
    outs = (P,) * num_outputs
    if all(role in (Role.ADD, Role.LINEAR) for role in rule.roles):
        return [AxisChoice("P", (P,) * num_inputs, outs)]
    if all(role is Role.MUL for role in rule.roles):
        carriers = range(1) if node.op == "div" else range(num_inputs)  # 1/x is not linear in x
        return [AxisChoice(f"P{k}", tuple(P if i == k else R for i in range(num_inputs)), outs) for k in carriers]
    return []


def divisible(choice: AxisChoice, num_shards: int, sizes: Mapping[str, int]) -> bool:
    """True if the split factor has `num_shards` equal parts."""
    return choice.factor is None or sizes[choice.factor] % num_shards == 0


def strategies(
    node: Node,
    values: Mapping[str, Value],
    factors: Mapping[str, Expr],
    axes: Sequence[Axis],
    sizes: Mapping[str, int],
) -> list[Strategy]:
    """Every strategy of `node` over `axes`; `sizes` gives the factor sizes as numbers.

    The batch is never split here: it belongs to the data-parallel sub-axes.
    """
    if not axes:
        none: Layout = ()
        return [Strategy("R", (none,) * len(node.tensor_inputs), (none,) * len(node.outputs), (), 1)]
    per_axis = [
        c for c in axis_choices(node, values, factors) if c.factor is None or "b" not in factors[c.factor].symbols
    ]
    total = 1
    for axis in axes:
        total *= axis.size
    out = []
    for combo in cartesian(per_axis, repeat=len(axes)):
        split: dict[AxisChoice, int] = {}
        legal = True
        for axis, choice in zip(axes, combo, strict=True):
            if choice.factor is not None:
                split[choice] = split.get(choice, 1) * axis.size
                legal &= divisible(choice, split[choice], sizes)
            if choice.special and any(other.special != choice.special for other in combo):
                legal = False  # a special form works on the whole product
        mixed = len(set(combo)) > 1
        if mixed and not all(c is combo[0] or _too_small(combo[0], total, sizes) for c in combo):
            legal = False
        if not legal:
            continue
        shards = 1
        for axis, choice in zip(axes, combo, strict=True):
            shards *= axis.size if choice.factor is not None else 1
        num_inputs, num_outputs = len(node.tensor_inputs), len(node.outputs)
        out.append(
            Strategy(
                name="x".join(dict.fromkeys(c.name for c in combo)) if mixed else combo[0].name,
                inputs=tuple(tuple(c.inputs[k] for c in combo) for k in range(num_inputs)),
                outputs=tuple(tuple(c.outputs[k] for c in combo) for k in range(num_outputs)),
                choices=tuple(combo),
                num_shards=shards,
            )
        )
    return out


def _too_small(choice: AxisChoice, total: int, sizes: Mapping[str, int]) -> bool:
    return choice.factor is not None and sizes[choice.factor] % total != 0
