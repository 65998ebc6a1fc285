"""The intra-op problem as plain data, built from a ModelGraph: choices, options, and the conversions between layouts.

    minimise   sum over choices  weight * cost(option chosen)
             + sum over values v and required target layouts t
                                 weight(v) * conversion(native layout of v -> t)

* a *choice* is an op (its strategies), a parameter (its storage), or a boundary (the layout in which a block hands
  a value to the next); exactly one option is taken;
* an option *requires* values in given layouts and *provides* the native layout of others;
* a value is converted once per target layout however many consumers share it (Megatron's one gather for q, k and v).

Layers that are calls of one block share their choices (the restriction `uniform layers`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

from autoplan.config.precision import PRECISIONS, Precision
from autoplan.cost_models.costs import Costs
from autoplan.cost_models.work import OpWork
from autoplan.errors import InfeasibleError
from autoplan.ir.dataflow import Classes
from autoplan.ir.graph import Block, ModelGraph, Node, Value
from autoplan.ir.layout import Axis, ConversionKind, ConversionStep, I, Layout, R, conversion, shard
from autoplan.ops.record import OpKind, Trait
from autoplan.ops.saved import TensorFacts
from autoplan.ops.strategies import Strategy, strategies
from autoplan.ops.table import op_has, op_kind
from autoplan.program.autocast import weights_of
from autoplan.program.choice_kinds import ChoiceKind
from autoplan.program.op_costs import OpCosts
from autoplan.units import DTYPE_BYTES, ORDER_OF_SUMS

ValueKey = tuple[str, str]  # block, value

_RESTRICTIONS = (
    "uniform layers per block",
    "weights gathered over data-parallel sub-axes only",
    "one choice for all tensor-parallel sub-axes unless its factor is too small for them",
    "blocks hand over whole or evenly split values, no pending sums",
    "values without a gradient but counts are computed whole",
)


@dataclass(frozen=True)
class Option:
    """One way to settle a choice.

    Attributes:
        requires, provides: layouts of the values that it reads, and of those that it makes.
        cost_s: seconds of every micro-batch.
        once_s: seconds once per step, such as the update of a stored parameter.
        parts: the options that a merged option stands for, with the names of their choices.
        num_sends: collectives inside it, in both passes of every micro-batch.
    """

    name: str
    requires: tuple[tuple[ValueKey, Layout], ...]
    provides: tuple[tuple[ValueKey, Layout], ...]
    cost_s: float
    state_bytes: float = 0.0
    strategy: Strategy | None = None
    parts: tuple[tuple[str, Option], ...] = ()
    once_s: float = 0.0
    num_sends: int = 0


@dataclass(frozen=True)
class LayoutChoice:
    """A choice of which exactly one option is taken; its cost counts `weight` times.

    Attributes:
        follows: it is element-wise or a view, so that a conversion just before it rarely pays.
    """

    name: str
    options: tuple[Option, ...]
    weight: float = 1.0
    follows: bool = False

    @property
    def is_store(self) -> bool:
        """True if it decides how a parameter is stored."""
        return ChoiceKind.STORE.subject_of(self.name) is not None


def _nothing_s(key: ValueKey, source: Layout, target: Layout) -> float:
    """Return the seconds once per step where no conversion takes any."""
    return 0.0


def _no_sends(key: ValueKey, source: Layout, target: Layout) -> int:
    """Return the collectives of a conversion where none has any."""
    return 0


@dataclass(frozen=True)
class IntraProblem:
    """The choices of a model, and the prices of converting its values.

    Attributes:
        convert_s: seconds to convert a value from one layout to another, of every micro-batch; None if no such
            conversion exists.
        state_budget_bytes: limit of parameters, gradients and optimizer state of one rank, all layers.
        convert_once_s: seconds of a conversion once per step.
        num_micro_batches: micro-batches per step, which share what is once per step. Nothing else depends on it.
        num_sends: collectives of a conversion, in both passes of every micro-batch.
        send_s: seconds of the host for each of these and of `Option.num_sends`; 0 where only the device counts.
    """

    choices: tuple[LayoutChoice, ...]
    weights: Mapping[ValueKey, float]
    convert_s: Callable[[ValueKey, Layout, Layout], float | None]
    restrictions: tuple[str, ...] = ()
    state_budget_bytes: float | None = None
    convert_once_s: Callable[[ValueKey, Layout, Layout], float] = _nothing_s
    num_micro_batches: int = 1
    num_sends: Callable[[ValueKey, Layout, Layout], int] = _no_sends
    send_s: float = 0.0

    def filtered(self, allowed: Callable[[LayoutChoice, Option], bool]) -> IntraProblem:
        """Return the problem with only the allowed options. InfeasibleError names a choice left without any."""
        choices = []
        for choice in self.choices:
            options = tuple(o for o in choice.options if allowed(choice, o))
            if not options:
                raise InfeasibleError(
                    f"no layout of {choice.name} is allowed; tried were {', '.join(o.name for o in choice.options)}"
                )
            choices.append(replace(choice, options=options))
        return replace(self, choices=tuple(choices))


Selection = Mapping[str, Option]  # choice name -> option


def evaluate_selection(problem: IntraProblem, selection: Selection) -> float:
    """Return the seconds of a selection per micro-batch; inf if it breaks the budget or lacks a conversion."""
    total = state = 0.0
    native: dict[ValueKey, Layout] = {}
    needed: dict[ValueKey, set[Layout]] = {}
    number, send_s = problem.num_micro_batches, problem.send_s
    for choice in problem.choices:
        option = selection[choice.name]
        total += choice.weight * (option.cost_s + option.once_s / number + option.num_sends * send_s)
        state += choice.weight * option.state_bytes
        native.update(option.provides)
        for key, layout in option.requires:
            needed.setdefault(key, set()).add(layout)
    if problem.state_budget_bytes is not None and state > problem.state_budget_bytes * (1 + ORDER_OF_SUMS):
        return float("inf")
    for key, layouts in needed.items():
        for layout in layouts:
            if layout != native[key]:
                cost = problem.convert_s(key, native[key], layout)
                if cost is None:
                    return float("inf")
                cost += problem.convert_once_s(key, native[key], layout) / number
                total += problem.weights[key] * (cost + problem.num_sends(key, native[key], layout) * send_s)
    return total


@dataclass(frozen=True)
class IntraSettings:
    """The settings that the intra-op problem is priced for."""

    axes: tuple[Axis, ...]  # tensor-parallel sub-axes to choose layouts on
    costs: Costs
    env: Mapping[str, int]  # b (micro-batch per data-parallel rank) and s
    num_micro_batches: int = 1
    # Stored state is limited to this multiple of the least possible; None: no limit. A pinned degree is a wish to save
    # memory: without a limit a small model is cheapest replicated.
    state_slack: float | None = 1.02
    precision: Precision = PRECISIONS["native"]
    context: int = 1  # context-parallel degree; `s` in `env` is the part of one rank


class _Send(NamedTuple):
    """A collective of a conversion. `once`: it runs once per step, not for every micro-batch."""

    kind: str
    num_bytes: float
    axes: tuple[int, ...]
    once: bool


@dataclass(frozen=True)
class Unpriced:
    """What problems that differ in prices alone share. A build adds what is not known yet.

    Attributes:
        strategies: by block and node.
        works: by block, node and name of the strategy.
        conversions: by value, its layout and the wanted one; None if there is no such conversion.
    """

    strategies: dict[tuple[str, str], Sequence[Strategy]] = field(default_factory=dict)
    works: dict[tuple[str, str, str], OpWork] = field(default_factory=dict)
    conversions: dict[tuple[ValueKey, Layout, Layout], tuple[_Send | OpWork, ...] | None] = field(default_factory=dict)


class _Build:
    def __init__(self, graph: ModelGraph, settings: IntraSettings, known: Unpriced) -> None:
        self.graph, self.settings, self.costs, self.known = graph, settings, settings.costs, known
        self.op_costs = OpCosts(
            graph, settings.axes, settings.env, context=settings.context, precision=settings.precision
        )
        self.sizes = self.op_costs.sizes
        self.counts = graph.call_counts()
        self.rank = len(settings.axes)
        self.all_r: Layout = (R,) * self.rank
        self.all_i: Layout = (I,) * self.rank
        self.choices: list[LayoutChoice] = []
        self.params: set[ValueKey] = {(b.name, p) for b in graph.blocks.values() for p in b.params}

    def value(self, key: ValueKey) -> Value:
        return self.graph.blocks[key[0]].values[key[1]]

    def local_bytes(self, key: ValueKey, layout: Layout) -> float:
        return self.op_costs.num_bytes(key[0], self.value(key), layout)

    def canonical(self, key: ValueKey, layout: Layout) -> Layout:
        """Return the layout with I written as R if the value has no gradient: then both mean the same."""
        return layout if self.value(key).requires_grad else tuple(R if t is I else t for t in layout)

    def run(self) -> IntraProblem:
        for block in self.graph.blocks.values():
            for node in block.nodes:
                self._node(block, node)
        self._storage()
        self._buffers()
        self._boundaries()
        weights = {(b.name, v): float(self.counts[b.name]) for b in self.graph.blocks.values() for v in b.values}
        budget, restrictions = None, list(_RESTRICTIONS)
        if self.settings.state_slack is not None and self.rank:
            least = self._least_state()
            vectors = sum(c.weight * max(o.state_bytes for o in c.options) for c in self.choices if self._is_vector(c))
            budget = self.settings.state_slack * (least + vectors)
            restrictions.append(f"stored state within {self.settings.state_slack} of the least possible")
        found = lru_cache(maxsize=None)(self._conversion_s)

        def convert_s(key: ValueKey, source: Layout, target: Layout) -> float | None:
            seconds = found(key, source, target)
            return None if seconds is None else seconds[0]

        def convert_once_s(key: ValueKey, source: Layout, target: Layout) -> float:
            seconds = found(key, source, target)
            return 0.0 if seconds is None else seconds[1]

        return IntraProblem(
            tuple(self.choices),
            weights,
            convert_s,
            tuple(restrictions),
            budget,
            convert_once_s,
            self.settings.num_micro_batches,
            self._num_sends,
        )

    def _least_state(self) -> float:
        """Return the least stored bytes: of every parameter the smallest part with which all its readers can do."""
        wanted: dict[ValueKey, set[tuple[Layout, ...]]] = {}
        for choice in self.choices:
            if not choice.is_store:
                for key in {key for option in choice.options for key, _ in option.requires} & self.params:
                    layouts = dict.fromkeys(at for o in choice.options for k, at in o.requires if k == key)
                    wanted.setdefault(key, set()).add(tuple(layouts))

        def usable(option: Option) -> bool:
            readers = ((key, at, layouts) for key, at in option.provides for layouts in wanted.get(key, ()))
            return all(any(_as_stored(at, layout) for layout in layouts) for _, at, layouts in readers)

        total = 0.0
        for choice in self.choices:
            sizes = [o.state_bytes for o in choice.options if not choice.is_store or usable(o)]
            total += choice.weight * min(sizes or (o.state_bytes for o in choice.options))
        return total

    def _is_vector(self, choice: LayoutChoice) -> bool:
        """Return True for a stored parameter of one dim: it is small, and cheaper to keep whole."""
        return choice.is_store and len(self.value(choice.options[0].provides[0][0]).shape) < 2

    def _node(self, block: Block, node: Node) -> None:
        found = self._strategies(block, node)
        options = []
        for s in found:
            requires = tuple(((block.name, v), layout) for v, layout in zip(node.tensor_inputs, s.inputs, strict=True))
            provides = tuple(((block.name, v), layout) for v, layout in zip(node.outputs, s.outputs, strict=True))
            cost = self._work_s(block, node, s) + self._special_s(node, block, s)
            num_sends = len(self._reductions(s))
            options.append(Option(s.name, requires, provides, cost, strategy=s, num_sends=num_sends))
        weight = float(self.counts[block.name])
        self.choices.append(
            LayoutChoice(f"{block.name}/{node.name}", tuple(options), weight, follows=op_has(node.op, Trait.FOLLOWS))
        )

    def _strategies(self, block: Block, node: Node) -> Sequence[Strategy]:
        """Return the strategies of a node that are options."""
        key = block.name, node.name
        if key in self.known.strategies:
            return self.known.strategies[key]
        found = strategies(node, block.values, self.graph.factors, self.settings.axes, self.sizes)
        # a frozen table is split too
        frozen = not weights_of(self.graph, block).isdisjoint(node.tensor_inputs)
        # summing the counts of parts of the tokens sends less than gathering the expert indices of all tokens
        counts = op_kind(node.op) is OpKind.COUNT
        if not frozen and not counts and not any(block.values[o].requires_grad for o in node.outputs):
            found = [s for s in found if s.name == "R"]  # slicing it is free
        self.known.strategies[key] = found
        return found

    def _work_s(self, block: Block, node: Node, s: Strategy) -> float:
        """Return the seconds of forward and backward on this shard."""
        key = block.name, node.name, s.name
        if key not in self.known.works:
            self.known.works[key] = self.op_costs.op_work(block, node, s)
        work = self.known.works[key]
        return self.costs.forward_s(work).mid + self.costs.backward_s(work).mid

    def _collective_s(self, kind: str, num_bytes: float, axes: tuple[int, ...]) -> float:
        return self.costs.collective_s(kind, num_bytes, self.op_costs.groups[axes]).mid

    @staticmethod
    def _reductions(s: Strategy, sums: int = 1) -> tuple[int, ...]:
        """Return of every collective inside a strategy the numbers that it reduces per token: a maximum, and `sums`."""
        return (1, sums) if s.special == "vocab_cross_entropy" else ()

    def _special_s(self, node: Node, block: Block, s: Strategy) -> float:
        """Return the seconds of collectives inside a strategy.

        A loss over a split vocabulary reduces a maximum and sums per token.
        """
        reductions = self._reductions(s, 3 if node.attrs.get("label_smoothing") else 2)
        if not reductions:
            return 0.0
        target = block.values[node.tensor_inputs[1]]
        tokens = self.op_costs.num_bytes(block.name, target, s.inputs[1]) / self.op_costs.width(target)
        width = max(4, self.op_costs.width(block.values[node.tensor_inputs[0]]))  # half precision is summed in float32
        everywhere = tuple(range(self.rank))
        return sum(self._collective_s("all_reduce", n * tokens * width, everywhere) for n in reductions)

    def _storage(self) -> None:
        """Add the storage choice of each parameter: invariant, or a shard of one factor. Tied uses share one choice."""
        uses: dict[str, ValueKey] = {}
        classes = Classes[ValueKey]()
        for call in self.graph.calls:
            for local, full in call.params.items():
                classes.join((call.block, local), uses.setdefault(full, (call.block, local)))
        counts: dict[tuple[ValueKey, ...], int] = {}
        members = classes.members()
        for key in uses.values():  # once per parameter, however often it is used
            keys = tuple(members[classes.find(key)])
            counts[keys] = counts.get(keys, 0) + 1
        for keys, count in counts.items():
            value = self.value(keys[0])
            layouts = [self.canonical(keys[0], self.all_i)]
            for dim, factors in enumerate(value.dims or () if self.rank else ()):
                for position in range(len(factors)):
                    layouts += self._shards_of(keys[0], dim, position)
            options = []
            for layout in layouts:
                size = self.local_bytes(keys[0], layout)
                elements = size / self.op_costs.width(value)
                state = _state_bytes(self.settings.precision, self.op_costs.width(value))
                copies = 4.0 if value.requires_grad else 1.0  # parameter, gradient, two moments
                dtype = self.op_costs.dtype(value)
                update = self.costs.optimizer_s(elements, dtype, state).mid if value.requires_grad else 0.0
                options.append(
                    Option(
                        _show(layout, value),
                        (),
                        tuple((k, layout) for k in keys),
                        0.0,
                        copies * size,
                        once_s=update,
                    )
                )
            name = f"{keys[0][0]}/{keys[0][1]}"
            self.choices.append(LayoutChoice(ChoiceKind.STORE.name_of(name), tuple(options), float(count)))

    def _shards_of(self, key: ValueKey, dim: int, position: int) -> list[Layout]:
        """Return shards by one factor over all sub-axes, or over the leading ones if it is too small (few KV heads)."""
        size = self.sizes[(self.value(key).dims or ())[dim][position]]
        out, total = [], 1
        for used in range(1, self.rank + 1):
            total *= self.settings.axes[used - 1].size
            if size % total == 0:
                out.append((shard(dim, position),) * used + self.canonical(key, (I,) * (self.rank - used)))
        full = [layout for layout in out if all(t.is_shard for t in layout)]
        mixed = [layout for layout in out if not all(t.is_shard for t in layout)]
        for layout in list(mixed):  # the remaining sub-axes may split another factor
            used = sum(t.is_shard for t in layout)
            for d, factors in enumerate(self.value(key).dims or ()):
                for p, factor in enumerate(factors):
                    rest = math.prod(axis.size for axis in self.settings.axes[used:])
                    if (d, p) != (dim, position) and self.sizes[factor] % rest == 0:
                        mixed.append(layout[:used] + (shard(d, p),) * (self.rank - used))
        return full if full else mixed

    def _buffers(self) -> None:
        for block in self.graph.blocks.values():
            for name in block.buffers:
                key = (block.name, name)
                self.choices.append(
                    LayoutChoice(
                        ChoiceKind.BUFFER.name_of(f"{block.name}/{name}"), (Option("R", (), ((key, self.all_r),), 0.0),)
                    )
                )

    def _boundaries(self) -> None:
        """Add one layout choice per class of values that blocks hand to each other.

        Inputs are R, the loss is I, and what the denominator of the loss counts is R: every rank counts all of it. So
        are whole sequences, of which context parallelism cuts a rank's part before tensor parallelism does.
        """
        links = Classes[ValueKey]()
        for call in self.graph.calls:
            block = self.graph.blocks[call.block]
            for actual, formal in [
                *zip(call.inputs, block.inputs, strict=True),
                *zip(call.outputs, block.outputs, strict=True),
            ]:
                links.join(("", actual), (block.name, formal))
        classes = links.members()
        whole = [*self.graph.inputs, *([self.graph.loss_target] if self.graph.loss_target is not None else [])]
        whole += self._cut_later()
        fixed = {links.find(("", n)): self.all_r for n in whole if ("", n) in links}
        fixed[links.find(("", self.graph.output))] = self.all_i
        for root, keys in classes.items():
            provides = [k for k in keys if k[0] and k[1] in self.graph.blocks[k[0]].inputs]
            requires = [k for k in keys if k[0] and k[1] in self.graph.blocks[k[0]].outputs and k not in provides]
            probe = (provides + requires)[0]
            candidates = [fixed[root]] if root in fixed else self._boundary_layouts(probe)
            options = tuple(
                Option(
                    _show(layout, self.value(probe)),
                    tuple((k, layout) for k in requires),
                    tuple((k, layout) for k in provides),
                    0.0,
                )
                for layout in candidates
            )
            self.choices.append(LayoutChoice(ChoiceKind.BOUNDARY.name_of(f"{probe[0]}/{probe[1]}"), options))

    def _cut_later(self) -> list[str]:
        """Return the whole sequences that calls without parameters make, if ranks share sequences."""
        if not self.graph.parts and self.settings.context == 1:
            return []
        free = self.graph.free_calls()
        made = (name for call in self.graph.calls if call.name in free for name in call.outputs)
        return [name for name in made if any("s" in size.symbols for size in self.graph.values[name].shape)]

    def _boundary_layouts(self, key: ValueKey) -> list[Layout]:
        value = self.value(key)
        out = [self.all_r]
        if not self.rank:
            return out
        if value.requires_grad:
            out.append(self.all_i)
        total = math.prod(axis.size for axis in self.settings.axes)
        for dim, factors in enumerate(value.dims or ()):
            for position, factor in enumerate(factors):
                if "b" not in self.graph.factors[factor].symbols and self.sizes[factor] % total == 0:
                    out.append((shard(dim, position),) * self.rank)
        return out

    def step_bytes(self, key: ValueKey, layout: Layout, step: ConversionStep) -> float:
        """Return the payload of one conversion step: the gathered or reduced tensor (all_to_all: the local one)."""
        size = self.local_bytes(key, layout)
        if step.kind is ConversionKind.ALL_GATHER:
            size *= math.prod(self.settings.axes[axis].size for axis in step.axes)
        return size

    def _parts(self, key: ValueKey, source: Layout, target: Layout) -> tuple[_Send | OpWork, ...] | None:
        """Return the collectives and copies of a conversion; None if it does not exist."""
        at = key, source, target
        if at not in self.known.conversions:
            self.known.conversions[at] = self._conversion(*at)
        return self.known.conversions[at]

    def _num_sends(self, key: ValueKey, source: Layout, target: Layout) -> int:
        """Return the collectives of a conversion in every micro-batch."""
        parts = self._parts(key, source, target) or ()
        return sum(isinstance(part, _Send) and not part.once for part in parts)

    def _conversion_s(self, key: ValueKey, source: Layout, target: Layout) -> tuple[float, float] | None:
        """Return the seconds of a conversion for every micro-batch, and once per step; None if it does not exist."""
        parts = self._parts(key, source, target)
        if parts is None:
            return None
        each = once = 0.0
        for part in parts:
            if isinstance(part, OpWork):
                each += self.costs.forward_s(part).mid
            elif part.once:
                once += self._collective_s(part.kind, part.num_bytes, part.axes)
            else:
                each += self._collective_s(part.kind, part.num_bytes, part.axes)
        return each, once

    def _conversion(self, key: ValueKey, source: Layout, target: Layout) -> tuple[_Send | OpWork, ...] | None:
        steps = conversion(source, target)
        if steps is None:
            return None
        if key in self.params and not _as_stored(source, target):
            return None  # ZeRO gathers them over the data-parallel sub-axes
        grad = self.value(key).requires_grad
        parts: list[_Send | OpWork] = []
        current = list(source)
        for step in steps:
            size = self.step_bytes(key, tuple(current), step)
            forward, backward = step.collectives
            if forward:
                parts.append(_Send(forward, size, step.axes, once=False))
            if backward and grad:
                # the gradient of a parameter used as R is reduced once per step, not once per micro-batch
                once = key in self.params and step.kind is ConversionKind.TO_REPLICATE
                parts.append(_Send(backward, size, step.axes, once))
            if step.kind in COPIES:
                parts.append(copy_work(size, self.op_costs.dtype(self.value(key))))
            for axis in step.axes:
                current[axis] = step.target
        return tuple(parts)


def _as_stored(stored: Layout, used: Layout) -> bool:
    """Return True if a parameter can be used in a layout without a gather: only ZeRO gathers weights."""
    steps = conversion(stored, used)
    return steps is not None and all(step.kind is ConversionKind.TO_REPLICATE for step in steps)


COPIES = frozenset(ConversionKind) - {ConversionKind.ALL_REDUCE, ConversionKind.TO_REPLICATE}


def copy_work(num_bytes: float, dtype: str) -> OpWork:
    """Return the work of copying `num_bytes`, which some conversions do besides sending."""
    elements = max(1, round(num_bytes / DTYPE_BYTES[dtype]))
    tensor = TensorFacts((elements,), dtype)
    return OpWork("clone", (tensor,), (tensor,), (), 0.0, 2.0 * num_bytes)


def _state_bytes(precision: Precision, width: int) -> float:
    """Return the bytes of optimizer state per parameter element."""
    return 2.0 * width if precision.state_bytes is None else precision.state_bytes


def _show(layout: Layout, value: Value) -> str:
    """Return the text of a layout: `S(kv)`, `I`, or `S(kv)xI` per sub-axis if they differ.

    `S(hidden:1)` names the dim too if two dims have the factor.
    """
    names = [f for dim in value.dims or () for f in dim]
    texts = []
    for kind in layout:
        factor = (value.dims or ())[kind.dim][kind.factor] if kind.is_shard else ""
        where = f":{kind.dim}" if names.count(factor) > 1 else ""
        texts.append(f"S({factor}{where})" if kind.is_shard else str(kind))
    return "x".join(texts) if len(set(texts)) > 1 else texts[0] if texts else "-"


def build_problem(graph: ModelGraph, settings: IntraSettings, known: Unpriced | None = None) -> IntraProblem:
    """Return the intra-op problem of a whole model. RuleError for an op without a rule.

    Args:
        known: of problems with the same graph and settings but for `costs`; added to.
    """
    return _Build(graph, settings, Unpriced() if known is None else known).run()
