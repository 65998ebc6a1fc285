"""Terms of the loss that are not sums over tokens: those that couple all tokens of a batch, and penalties.

A term of routers such as `experts * sum(counts / rows * probability / rows)` is a product of two sums over the tokens.
Every rank and micro-batch has a part of the tokens, so the product of its own sums would be another loss. This pass
sums one factor over the ranks that share a micro-batch (op `batch_sum`) before it is multiplied by the other, which
stays a pending sum with the loss. Only a few numbers are sent, and no gradient flows through counts. Where nothing
stays pending, every rank has the whole term, and one of them counts it (op `batch_part`); so with a penalty on
parameters, which does not depend on the batch. Micro-batches are averaged (the input `loss_share`, one over their
number), as if the gradients of `loss / number` were accumulated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, field, replace
from typing import Any

from autoplan.capture.passes.batch_size import ask_for_share, mean_as_sum
from autoplan.capture.trace import Trace
from autoplan.ir.graph import LOSS_SHARE, Node
from autoplan.ops.record import Linear, OpKind, Trait
from autoplan.ops.table import op_has, op_kind, op_record

SUMMED_SYMBOLS = ("b", "s")  # symbols that are split over data- and context-parallel ranks
Kinds = tuple[str, ...]  # per symbol of SUMMED_SYMBOLS: "S" has the dim, "P" pending sum over it, "R" neither


def router_terms(trace: Trace, mains: Set[str]) -> None:
    """Make the terms of the loss that count the routers' choices computable in parts.

    Any other term that couples the batch stays as it is (`autoplan.ops.batch` refuses it by name).

    Args:
        trace: its nodes and order are changed.
        mains: the values of the terms that are sums over tokens or samples.
    """
    for term, cone in _routed(trace, mains):
        _Term(trace, cone, term).run()


def routed_nodes(trace: Trace, mains: Set[str]) -> set[int]:
    """Return the nodes of the terms of the loss that count the routers' choices."""
    return {i for _, cone in _routed(trace, mains) for i in cone}


def _routed(trace: Trace, mains: Set[str]) -> Iterator[tuple[str, list[int]]]:
    maker = {out: i for i, node in enumerate(trace.nodes) if not trace.region[node.name] for out in node.outputs}
    flow, learned = trace.flow(), _reached(trace, trace.params)
    for term in _terms(trace, maker, trace.output):
        # the nodes outside the layers that lead to the term, in program order
        last = [maker[term]] if term in maker else []
        found = {*last, *flow.leading_to(last, {*maker.values()}.__contains__)}
        cone = [i for kind, i in trace.order if kind == "node" and i in found]
        chosen = {x for i in cone if op_has(trace.nodes[i].op, Trait.CHOOSES) for x in trace.nodes[i].outputs}
        counted = any(mains & set(trace.nodes[i].outputs) for i in cone)
        if not counted and chosen & learned:  # targets that are made of the batch alone are no choices
            yield term, cone


def _adds_up(op: str) -> bool:
    """Return True for sums and counts: over parts of the tokens they are pending sums."""
    return op_kind(op) is OpKind.COUNT or (op_kind(op) is OpKind.REDUCTION and not op_has(op, Trait.AVERAGES))


def _terms(trace: Trace, maker: dict[str, int], value: str) -> list[str]:
    """Return the values whose sum is `value`."""
    node = trace.nodes[maker[value]] if value in maker else None
    if node is None or node.op != "add":
        return [value]
    return [term for x in node.tensor_inputs for term in _terms(trace, maker, x)]


@dataclass
class _Term:
    """A term of the loss that is made computable in parts of the tokens."""

    trace: Trace
    cone: list[int]
    value: str
    kinds: dict[str, Kinds] = field(default_factory=dict)
    free: set[str] = field(default_factory=set)  # depends on no parameter: computed from whole sequences on every rank
    summed: dict[str, str] = field(default_factory=dict)
    before: dict[int, list[Node]] = field(default_factory=dict)  # nodes to insert before a node of the trace, by index
    inputs: dict[int, tuple[str | None, ...]] = field(default_factory=dict)

    def run(self) -> None:
        """Change the trace, or leave it if some operation on a sum cannot be computed in parts."""
        self._means_as_sums()
        self.free = set(self.trace.inputs) | set(self.trace.buffers)
        for i in self.cone:
            node = self.trace.nodes[i]
            if all(x in self.free for x in node.tensor_inputs):
                self.free |= set(node.outputs)
            if not self._node(i, node):
                return
        self._rewrite()
        self._share()

    def _means_as_sums(self) -> None:
        """Replace a mean over tokens by their sum, divided by their number over all parts."""
        cone = []
        for i in self.cone:
            cone.append(i)
            node = self.trace.nodes[i]
            if not op_has(node.op, Trait.AVERAGES):
                continue
            source, out = self.trace.values[str(node.inputs[0])], self.trace.values[node.outputs[0]]
            number = source.num_elements.divide(out.num_elements)
            if number is None or not number.symbols:
                continue
            cone.append(len(self.trace.nodes))
            mean_as_sum(self.trace, i, number)
        self.cone = cone

    def _places(self, value: str) -> Kinds:
        symbols = {s for size in self.trace.values[value].shape for s in size.symbols}
        return tuple("S" if s in symbols else "R" for s in SUMMED_SYMBOLS)

    def _kinds(self, value: str) -> Kinds:
        return self.kinds.setdefault(value, self._places(value))

    def _node(self, index: int, node: Node) -> bool:
        inputs = [self._kinds(x) for x in node.tensor_inputs]
        if any("P" in kinds for kinds in inputs):
            self._sum_all_but(index, node, self._stays(node, inputs))
            inputs = [self._kinds(x) for x in self._inputs(index) if x is not None]
        out = []
        for k, place in enumerate(self._places(node.outputs[0])):
            mine = {kinds[k] for kinds in inputs}
            whole = SUMMED_SYMBOLS[k] == "s" and node.outputs[0] in self.free
            if "P" in mine:
                out.append("P")
            elif "S" in mine and place == "R" and not whole:
                if not _adds_up(node.op):
                    return False
                out.append("P")
            else:
                out.append(place)
        self.kinds |= dict.fromkeys(node.outputs, tuple(out))
        return True

    def _inputs(self, index: int) -> tuple[str | None, ...]:
        return self.inputs.get(index, self.trace.nodes[index].inputs)

    def _stays(self, node: Node, inputs: list[Kinds]) -> set[int]:
        """Return the pending inputs that may stay pending: all of an addition or linear op, one factor of a product."""
        pending = {k for k, kinds in enumerate(inputs) if "P" in kinds}
        op = op_record(node.op)
        if op.linear is Linear.NO:
            return set()
        if Trait.SCALES in op.traits:  # sum counts while they are whole numbers, which is exact in any order
            pending = {k for k in pending if self.trace.values[node.tensor_inputs[k]].requires_grad}
        if op.linear is Linear.ALL:
            return pending if len(set(inputs)) == 1 else set()
        if op.linear is Linear.ONE:  # prefer the factor with a gradient, which then need not be sent
            grads = {k for k in pending if self.trace.values[node.tensor_inputs[k]].requires_grad}
            return set(sorted(grads or pending)[:1])
        return pending & {0}

    def _sum_all_but(self, index: int, node: Node, stays: set[int]) -> None:
        given = list(node.inputs)
        for k, name in enumerate(node.tensor_inputs):
            kinds = self._kinds(name)
            if k in stays or "P" not in kinds:
                continue
            if name not in self.summed:
                over = tuple(s for s, kind in zip(SUMMED_SYMBOLS, kinds, strict=True) if kind == "P")
                total = f"{name}.whole"
                self.trace.values[total] = replace(self.trace.values[name], name=total)
                made = Node(total, "batch_sum", (name,), (total,), {"over": over}, "", node.source)
                self.before.setdefault(index, []).append(made)
                self.summed[name] = total
                self.kinds[total] = tuple("R" if kind == "P" else kind for kind in kinds)
            given = [self.summed[name] if x == name else x for x in given]
        self.inputs[index] = tuple(given)

    def _rewrite(self) -> None:
        for index, inputs in self.inputs.items():
            self.trace.nodes[index] = replace(self.trace.nodes[index], inputs=inputs)
        for index, nodes in self.before.items():
            for node in nodes:
                self.trace.insert(self.trace.order.index(("node", index)), node)

    def _share(self) -> None:
        kinds = self._kinds(self.value)
        _count_once(
            self.trace, self.value, tuple(s for s, kind in zip(SUMMED_SYMBOLS, kinds, strict=True) if kind == "R")
        )


def _count_once(trace: Trace, term: str, over: tuple[str, ...], users: Set[int] | None = None) -> None:
    """Divide a term of the loss by the number of micro-batches, and let one rank count it if all have it.

    Args:
        over: the symbols whose ranks all have the whole term.
        users: the nodes that add the term to others; None: all that are given it.
    """
    ask_for_share(trace)
    given = {i for i, n in enumerate(trace.nodes) if term in n.tensor_inputs}
    users = given if users is None else users
    made = [i for i, node in enumerate(trace.nodes) if term in node.outputs]
    places = [trace.order.index(("node", i)) for i in made or sorted(users)]
    source, place = trace.nodes[(made or sorted(users))[0]].source, places[0] + 1 if made else min(places)
    steps: list[tuple[str, str, tuple[str, ...], dict[str, Any]]] = [("mul", f"{term}.share", (LOSS_SHARE,), {})]
    if over:
        steps.append(("batch_part", f"{term}.part", (), {"over": over}))
    last = term
    for op, name, more, attrs in steps:
        trace.values[name] = replace(trace.values[term], name=name)
        trace.insert(place, Node(name, op, (last, *more), (name,), attrs, "", source))
        last, place = name, place + 1
    for i in users:
        node = trace.nodes[i]
        trace.nodes[i] = replace(node, inputs=tuple(last if x == term else x for x in node.inputs))


def penalties(trace: Trace) -> None:
    """Count the terms of the loss that do not depend on the batch once: a penalty on parameters, a parameter, a number.

    Every rank has the whole term in every micro-batch. What is added to every sample or token is no such term. Such a
    value may also stand elsewhere in the loss, as in `exp(-s) * error + s`, where it stays as it is.
    """
    _numbers_as_terms(trace)
    dependent = _reached(trace, trace.inputs)
    maker = {out: i for i, node in enumerate(trace.nodes) if not trace.region[node.name] for out in node.outputs}

    def symbols(name: str) -> set[str]:
        return {symbol for size in trace.values[name].shape for symbol in size.symbols}

    found, wanted = dict[str, set[int]](), [trace.output]
    added = dict[str, set[int]]()  # value -> the nodes that add it to others
    while wanted:
        value = wanted.pop()
        node = trace.nodes[maker[value]] if value in maker else None
        if value not in dependent and (node is not None or value in trace.params):
            found[value] = added.get(value, set())
        elif node is not None and op_record(node.op).linear is Linear.ALL:
            terms = [name for name in node.tensor_inputs if symbols(name) >= symbols(value)]
            for name in terms:
                added.setdefault(name, set()).add(maker[value])
            wanted += terms
    if trace.output not in found:
        for value, users in found.items():
            _count_once(trace, value, SUMMED_SYMBOLS, users)


def _numbers_as_terms(trace: Trace) -> None:
    """Make terms of the numbers that are added to the loss: `1 - dice` becomes the sum of `-dice` and 1."""
    maker = {out: i for i, node in enumerate(trace.nodes) if not trace.region[node.name] for out in node.outputs}
    wanted = [trace.output]
    while wanted:
        index = maker.get(wanted.pop())
        node = None if index is None else trace.nodes[index]
        if index is None or node is None or trace.values[node.outputs[0]].shape:
            continue
        if node.op in _WITH_A_NUMBER and isinstance(node.attrs["scalar"], (int, float)):
            _apart(trace, index)
        if node.op in _WITH_A_NUMBER or op_record(node.op).linear is Linear.ALL:
            wanted += node.tensor_inputs


# Operations that add a number, and what is left of them without it (None: nothing).
_WITH_A_NUMBER = {"add_scalar": None, "rsub_scalar": "neg"}


def _apart(trace: Trace, index: int) -> None:
    """Write a node that adds a number as a sum of two terms, the second of which is the number."""
    node = trace.nodes[index]
    (out,), left, place = node.outputs, _WITH_A_NUMBER[node.op], trace.order.index(("node", index))
    terms, number = list(node.tensor_inputs), f"{node.name}.number"
    made = {"scalar": node.attrs["scalar"], "dtype": trace.values[out].dtype}
    steps: list[tuple[str, str, tuple[str, ...], dict[str, Any]]] = [(number, "full", (), made)]
    if left is not None:
        steps.append((f"{node.name}.{left}", left, tuple(terms), {}))
        terms = [f"{node.name}.{left}"]
    for name, op, inputs, attrs in steps:
        trace.values[name] = replace(trace.values[out], name=name, requires_grad=op != "full")
        trace.insert(place, Node(name, op, inputs, (name,), attrs, "", node.source))
        place += 1
    trace.nodes[index] = replace(node, op="add", inputs=(*terms, number), attrs={})


def _reached(trace: Trace, given: Iterable[str]) -> set[str]:
    """Return the values that may depend on the given ones: all that come out of repeated layers, too."""
    found = set(given)
    for kind, index in trace.order:
        if kind == "repeat":
            found |= set(trace.repeats[index].outputs)
        elif found & set(trace.nodes[index].tensor_inputs):
            found |= set(trace.nodes[index].outputs)
    return found
