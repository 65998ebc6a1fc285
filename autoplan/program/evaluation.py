"""The layouts of a model's evaluation, where that is another graph: they follow from those chosen for its training.

Both graphs compute with the same shards of the parameters, so how these are stored is taken over, and so are the
layouts of every operation and boundary that training has too. What is left, such as a batch norm with running
statistics, takes one by one the option that costs least behind what it reads. Nothing here is searched: a plan does not
depend on the evaluation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from itertools import product as cartesian

from autoplan.cost_models.costs import Costs
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.errors import GraphError, LayoutError
from autoplan.ir.fresh import FreshNames
from autoplan.ir.graph import Block, Call, ModelGraph, Node, Value, of_the_batch
from autoplan.ir.layout import Axis, I, Layout, R
from autoplan.ir.symbols import SYMBOLS, Expr, product
from autoplan.ops.batch import batch_obstacle, context_obstacle
from autoplan.ops.table import updated_buffers
from autoplan.program.choice_kinds import ChoiceKind, is_strategy
from autoplan.program.problem import (
    IntraProblem,
    IntraSettings,
    LayoutChoice,
    Option,
    Selection,
    ValueKey,
    build_problem,
    evaluate_selection,
)

_Place = tuple[str, int, Expr]  # R, I, P or S; of a shard its dim, and the size of all factors before the one it cuts


@dataclass(frozen=True)
class EvaluationLayouts:
    """How the evaluation runs beside the training.

    Attributes:
        graph: the evaluation. Blocks with parameters have the names of those of the training that hold them.
        stages: its calls that depend on parameters, per stage.
    """

    graph: ModelGraph
    selection: Selection
    stages: tuple[tuple[str, ...], ...]


def evaluation_layouts(
    graph: ModelGraph,
    selection: Selection,
    axes: Sequence[Axis],
    stages: Sequence[Sequence[str]],
    *,
    cut: bool = False,
) -> EvaluationLayouts:
    """Return the layouts of `graph.evaluation`.

    Args:
        selection, axes, stages: those of the training.
        cut: several ranks share every sequence.

    Raises:
        LayoutError: the evaluation does not fit into what the training has; names where.
    """
    if graph.evaluation is None:
        raise LayoutError(f"{graph.name} has no graph of its evaluation")
    if cut and graph.parts:
        _check_parts(graph, graph.evaluation)
    evaluation = _in_blocks_of_training(graph, graph.evaluation)
    try:
        problem = build_problem(evaluation, IntraSettings(tuple(axes), _prices(axes), _sizes(evaluation, axes)))
    except GraphError as exc:
        raise LayoutError(str(exc)) from exc
    found = _Follow(graph, evaluation, selection, problem).run()
    if math.isinf(evaluate_selection(replace(problem, state_budget_bytes=None), found)):
        raise LayoutError("its layouts do not fit together: a value needs a conversion that does not exist")
    bound = {call.name for call in evaluation.bound_calls()}
    own = tuple(tuple(c.name for c in evaluation.calls if c.name in bound and c.name in names) for names in stages)
    flow = evaluation.flow(own)
    back = [v for v, made in flow.makes.items() if any(reader < made for reader in flow.readers.get(v, ()))]
    if back:
        raise LayoutError(f"its {back[0]} is made on a later pipeline stage than it is used on")
    if batch_obstacle(evaluation) is not None and batch_obstacle(graph) is None:
        raise LayoutError(f"its batch cannot be split: {batch_obstacle(evaluation)}")
    return EvaluationLayouts(evaluation, found, own)


def apart(graph: ModelGraph, selection: Selection) -> tuple[ModelGraph, Selection, Mapping[str, str]]:
    """Return a graph whose layers that are alike in training and differ in evaluation are calls of different blocks.

    The blocks are copies, with the layouts of the block that they are copies of, as far as `selection` has it.

    Returns:
        The graph, the selection, and the block that each copy is made of.
    """
    evaluation = graph.evaluation
    if evaluation is None:
        return graph, selection, {}
    evaluated, names = {call.name: call.block for call in evaluation.calls}, FreshNames(graph.blocks)
    name_of, copied, calls = dict[tuple[str, str], str](), dict[str, str](), list[Call]()
    for call in graph.calls:
        kind = call.block, evaluated.get(call.name, "")
        if kind[1] and kind not in name_of:
            first = all(block != call.block for block, _ in name_of)
            name_of[kind] = call.block if first else names.fresh(call.block)
            if not first:
                copied[name_of[kind]] = call.block
        calls.append(replace(call, block=name_of.get(kind, call.block)))
    blocks = {**graph.blocks, **{new: replace(graph.blocks[old], name=new) for new, old in copied.items()}}
    out = dict(selection)
    for new, old in copied.items():
        for name, option in selection.items():
            if not is_strategy(name):
                out[name] = _also_of(out[name], old, new)
            elif name.startswith(f"{old}/"):
                out[f"{new}{name.removeprefix(old)}"] = _of(option, old, new)
    return replace(graph, blocks=blocks, calls=tuple(calls)), out, copied


def _of(option: Option, old: str, new: str) -> Option:
    """Return the option of a node as that of the same node in a copy of its block."""
    ends = [tuple(((new, key[1]), layout) for key, layout in of) for of in (option.requires, option.provides)]
    return replace(option, requires=ends[0], provides=ends[1])


def _also_of(option: Option, old: str, new: str) -> Option:
    """Return an option that holds for the values of a copy of a block, too."""
    ends = [
        (*of, *(((new, key[1]), layout) for key, layout in of if key[0] == old))
        for of in (option.requires, option.provides)
    ]
    return replace(option, requires=ends[0], provides=ends[1])


def _prices(axes: Sequence[Axis]) -> Costs:
    """Return prices by which options are compared; which machine they are of changes no value."""
    return Costs(Cluster.local(math.prod(axis.size for axis in axes), "cpu"))


def _sizes(graph: ModelGraph, axes: Sequence[Axis]) -> dict[str, int]:
    """Return a batch and lengths for which all sizes are whole numbers, and shards too where that can be."""
    parts = math.prod(axis.size for axis in axes)
    lengths = [16 * parts, 15 * parts, *(16 * parts + k for k in range(1, 8))]
    for s, t in cartesian(lengths, lengths if graph.has_target else lengths[:1]):
        env = dict(zip(SYMBOLS, (16 * parts, s, t), strict=True))
        try:
            graph.factor_sizes(env)
        except GraphError:
            continue
        return env
    raise LayoutError(f"no length of its sequences was found for which the sizes of {graph.name} are whole numbers")


def _in_blocks_of_training(graph: ModelGraph, evaluation: ModelGraph) -> ModelGraph:
    """Return the evaluation with its blocks cut as those of the training: by the calls of equal names."""
    more = [name for name in evaluation.inputs if name not in graph.inputs and of_the_batch(name)]
    if more:
        raise LayoutError(f"it reads the input {more[0]}, which training does not")
    calls, free = {c.name: c for c in graph.calls}, evaluation.free_calls()
    bound, out = {c.name for c in graph.bound_calls()}, list[Call]()
    block_of, blocks = dict[str, str](), dict[str, Block]()
    for call in evaluation.calls:
        _check_buffers(graph, call)
        name = f"evaluated {call.block}"
        if call.name not in free:
            mine = calls.get(call.name)
            if mine is None or call.name not in bound:
                raise LayoutError(f"it computes {call.name}, which training has not as a part of its own")
            more = [full for local, full in call.params.items() if mine.params.get(local) != full]
            if more:
                raise LayoutError(f"it uses the parameter {more[0]} in {call.name}, where training does not")
            name = mine.block
            if block_of.setdefault(name, call.block) != call.block:
                raise LayoutError(f"{call.name} is like other layers in training, and computes something else here")
        blocks[name] = replace(evaluation.blocks[call.block], name=name)
        out.append(replace(call, block=name))
    return replace(evaluation, blocks=blocks, calls=tuple(out))


def _check_buffers(graph: ModelGraph, call: Call) -> None:
    """Raise LayoutError if a call reads a buffer that training updates in another call: its copy would be old."""
    for made in graph.calls:
        block = graph.blocks[made.block]
        updated = {made.buffers[x] for x in updated_buffers(block.nodes, block.buffers)}
        for local, full in call.buffers.items():
            if full in updated and (made.name != call.name or made.buffers.get(local) != full):
                raise LayoutError(f"it reads the buffer {full} in {call.name}, and training updates it in {made.name}")


def _places(value: Value, layout: Layout, factors: Mapping[str, Expr]) -> tuple[_Place, ...]:
    """Return a layout in words that do not depend on the names and the number of a graph's factors."""
    out: list[_Place] = []
    for kind in layout:
        before = (value.dims or ())[kind.dim][: kind.factor] if kind.is_shard else ()
        whole = kind.kind_name if kind != I or value.requires_grad else R.kind_name
        out.append((whole, kind.dim, product([factors[f] for f in before])))
    return tuple(out)


def _key(block: Block, node: Node) -> tuple[object, ...]:
    """Return what makes two nodes of two graphs alike, up to what they are computed of."""
    held = {*block.params, *block.buffers}
    shapes = tuple(str(block.values[x].shape) for x in (*node.tensor_inputs, *node.outputs))
    return node.op, repr(sorted(node.attrs.items())), shapes, tuple(x for x in node.inputs if x in held)


def _check_parts(training: ModelGraph, evaluation: ModelGraph) -> None:
    """Raise LayoutError if ranks cannot share the sequences of the evaluation as they do those of the training."""
    obstacle = context_obstacle(evaluation)
    if obstacle is None and evaluation.bounds.get("s") != training.bounds["s"]:
        obstacle = "its sequences are shared in other parts"
    if obstacle is not None:
        raise LayoutError(obstacle)


class _Follow:
    """Chooses the options of an evaluation, call by call and node by node."""

    def __init__(
        self,
        graph: ModelGraph,
        evaluation: ModelGraph,
        selection: Selection,
        problem: IntraProblem,
    ) -> None:
        self.graph, self.evaluation, self.selection, self.problem = graph, evaluation, selection, problem
        self.found: dict[str, Option] = {}
        self.native: dict[ValueKey, Layout] = {}
        self.given: dict[ValueKey, Layout] = {}  # of the training
        self.wanted: dict[ValueKey, Layout] = {}  # of the training, what boundaries hand out
        for name, option in selection.items():
            self.given.update(option.provides)
            if ChoiceKind.BOUNDARY.subject_of(name) is not None:
                self.wanted.update(option.requires)
        self.like = dict(self._alike())
        self.split = self._split_sizes()

    def run(self) -> Selection:
        """Return the option of every choice."""
        choices = {choice.name: choice for choice in self.problem.choices}
        boundaries: dict[ValueKey, LayoutChoice] = {}
        for choice in self.problem.choices:
            if ChoiceKind.BOUNDARY.subject_of(choice.name) is not None:
                option = choice.options[0]
                boundaries |= dict.fromkeys((k for k, _ in (*option.provides, *option.requires)), choice)
            elif choice.is_store or ChoiceKind.BUFFER.subject_of(choice.name) is not None:
                self._take(choice, self._stored(choice))
        for name in dict.fromkeys(call.block for call in self.evaluation.calls):
            block = self.evaluation.blocks[name]
            for value in block.inputs:
                self._boundary(boundaries[name, value])
            for node in block.nodes:
                choice = choices[f"{name}/{node.name}"]
                self._take(choice, self._of_node(choice, block, node))
            for value in block.outputs:
                self._boundary(boundaries[name, value])
        return self.found

    def _take(self, choice: LayoutChoice, option: Option) -> None:
        self.found[choice.name] = option
        self.native.update(option.provides)

    def _alike(self) -> Iterator[tuple[tuple[str, str], Option]]:
        """Yield (block, node) of the evaluation and the option that training has for the same operation."""
        for name in self.evaluation.blocks.keys() & self.graph.blocks.keys():
            mine, other = self.evaluation.blocks[name], self.graph.blocks[name]
            keys = [[_key(b, n) for n in b.nodes] for b in (mine, other)]
            for a, b, count in SequenceMatcher(None, keys[0], keys[1], autojunk=False).get_matching_blocks():
                for k in range(count):
                    yield (name, mine.nodes[a + k].name), self.selection[f"{name}/{other.nodes[b + k].name}"]

    def _split_sizes(self) -> set[Expr]:
        """Return the sizes that depend on batch or length and that training cuts."""
        out = set[Expr]()
        for option in self.selection.values():
            for (block, name), layout in (*option.requires, *option.provides):
                out |= self._cut(self.graph, self.graph.blocks[block].values[name], layout)
        return out

    def _cut(self, graph: ModelGraph, value: Value, layout: Layout) -> set[Expr]:
        cut = (graph.factors[(value.dims or ())[kind.dim][kind.factor]] for kind in layout if kind.is_shard)
        return {size for size in cut if size.symbols}

    def _value(self, key: ValueKey) -> Value:
        return self.evaluation.blocks[key[0]].values[key[1]]

    def _same(self, key: ValueKey, layout: Layout, given: ValueKey, other: Layout) -> bool:
        """Return True if a value of the evaluation lies on the ranks as one of the training."""
        value = self.graph.blocks[given[0]].values[given[1]]
        return _places(self._value(key), layout, self.evaluation.factors) == _places(value, other, self.graph.factors)

    def _stored(self, choice: LayoutChoice) -> Option:
        """Return how a parameter or buffer is stored: as in training."""
        for option in choice.options:
            held = [(key, layout) for key, layout in option.provides if key in self.given]
            if all(self._same(key, layout, key, self.given[key]) for key, layout in held):
                return option
        raise LayoutError(f"it would have {choice.name} laid out otherwise than training has it")

    def _of_node(self, choice: LayoutChoice, block: Block, node: Node) -> Option:
        like = self.like.get((block.name, node.name))
        if like is not None:
            for option in choice.options:
                if self._alike_options(option, like) and not math.isinf(self._cost_s(option)):
                    return option
        return self._cheapest(choice)

    def _alike_options(self, option: Option, like: Option) -> bool:
        special = [o.strategy.special if o.strategy is not None else None for o in (option, like)]
        pairs = [(option.requires, like.requires), (option.provides, like.provides)]
        return special[0] == special[1] and all(
            len(mine) == len(theirs) and all(self._same(*a, *b) for a, b in zip(mine, theirs, strict=True))
            for mine, theirs in pairs
        )

    def _boundary(self, choice: LayoutChoice) -> None:
        """Decide in which layout a value goes from block to block, once."""
        if choice.name in self.found:
            return
        for option in choice.options:
            ends = [(key, layout, self._outside(key)) for key, layout in (*option.provides, *option.requires)]
            known = [(key, layout, at) for key, layout, at in ends if at is not None]
            like = bool(known) and all(self._same(key, layout, *at) for key, layout, at in known)
            if like and not math.isinf(self._cost_s(option)):
                self._take(choice, option)
                return
        self._take(choice, self._cheapest(choice))

    def _outside(self, key: ValueKey) -> tuple[ValueKey, Layout] | None:
        """Return the value of the training in the place of one that enters or leaves a block, with its layout."""
        block, name = key
        if block not in self.graph.blocks:
            return None
        mine, theirs = self.evaluation.blocks[block], self.graph.blocks[block]
        ends = ((mine.inputs, theirs.inputs, self.given), (mine.outputs, theirs.outputs, self.wanted))
        for of, other, layouts in ends:
            if name in of and len(of) == len(other):
                at = theirs.name, other[of.index(name)]
                same = at in layouts and theirs.values[at[1]].shape == mine.values[name].shape
                return (at, layouts[at]) if same else None
        return None

    def _cheapest(self, choice: LayoutChoice) -> Option:
        allowed = [option for option in choice.options if self._splits_as_training(option)]
        prices = [self._cost_s(option) for option in allowed]
        if not prices or math.isinf(min(prices)):
            raise LayoutError(f"no layout of {choice.name} fits to how training lays out what it reads")
        return allowed[prices.index(min(prices))]

    def _splits_as_training(self, option: Option) -> bool:
        """Return True if it cuts batch and lengths nowhere but where training does, which any batch then allows."""
        ends = (*option.requires, *option.provides)
        return all(self._cut(self.evaluation, self._value(key), layout) <= self.split for key, layout in ends)

    def _cost_s(self, option: Option) -> float:
        """Return the seconds of an option, and of converting what it reads, as far as that is decided."""
        total = option.cost_s
        for key, layout in option.requires:
            given = self.native.get(key)
            if given is not None and given != layout:
                seconds = self.problem.convert_s(key, given, layout)
                total += math.inf if seconds is None else seconds
        return total
