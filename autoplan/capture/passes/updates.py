"""New values of buffers that are made of a whole micro-batch: sums and means over all ranks that share it.

A buffer is the same on every rank, so its new value must be too, and be what one process computes that runs each whole
micro-batch: `sizes.mul_(0.9).add_(chosen.sum(0), alpha=0.1)`. A sum over samples or tokens is a pending sum on every
rank. Behind each one that leads to an update, this pass adds up over the ranks (op `batch_sum`), and what follows is
computed of the whole sum, as in batch norm. A loss may need the same sum as a pending one, since its parts are added
up with those of other micro-batches; it keeps it. A maximum or minimum is that over all ranks (op `batch_extreme`).
What is neither (a median) stays as it is: `autoplan.ops.batch` refuses to split such a batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from autoplan.capture.passes.live import drop_dead, live_entries, pure_values
from autoplan.capture.trace import Trace
from autoplan.errors import CaptureError
from autoplan.ir.fresh import FreshNames
from autoplan.ir.graph import OF_PARTS, Node
from autoplan.ops.generic import FUNCTION
from autoplan.ops.record import Linear, OpKind, Trait
from autoplan.ops.statistics import SPLIT, UPDATE
from autoplan.ops.table import op_has, op_kind, op_record
from autoplan.units import HALF

_ADDS_UP = frozenset((OpKind.COUNT, OpKind.REDUCTION, OpKind.PRODUCT))


def whole_updates(trace: Trace) -> bool:
    """Make the new values of buffers those of whole micro-batches.

    Returns:
        False if a sum leaves a layer that other layers repeat: then the layers have to be traced one by one.
    """
    updates = [i for i, node in enumerate(trace.nodes) if node.op == UPDATE]
    if not updates:
        return True
    made = _Cone(trace)
    if not made.run(updates):
        return False
    drop_dead(trace, set())
    _without_gradients(trace)
    return True


@dataclass
class _Cone:
    """The nodes that lead to updates of buffers.

    Attributes:
        whole: value -> the same of whole micro-batches, where it is another.
        pending: values of the trace that are pending sums over samples, which a loss can add up.
    """

    trace: Trace
    whole: dict[str, str] = field(default_factory=dict)
    pending: set[str] = field(default_factory=set)

    def run(self, updates: list[int]) -> bool:
        """Change the trace; False if a sum leaves a layer that others repeat."""
        trace, flow = self.trace, self.trace.flow()
        self.pure = pure_values(trace)
        self.names = FreshNames((*trace.values, *trace.region))
        cone = {*updates, *flow.leading_to(updates)}
        order = [i for kind, i in trace.order if kind == "node"]
        for i in order:
            if self._stays_pending(trace.nodes[i]):
                self.pending |= set(trace.nodes[i].outputs)
        for i in order:
            if i in cone:
                self._node(i)
        if not self._repeats_are_whole({x for i in cone for x in trace.nodes[i].tensor_inputs}):
            return False
        for i in order:
            if i not in cone:
                self._use(i)
        self._rename()
        return True

    def _reduced(self, node: Node) -> tuple[str, ...]:
        """Return the symbols that a node adds up over, or takes an extreme over."""
        if op_kind(node.op) not in _ADDS_UP and _extreme(node) is None:
            return ()
        before, after = (self._symbols(names) for names in (node.tensor_inputs, node.outputs))
        # every rank has the whole sequence of what is computed of inputs alone
        pure = set(node.outputs) <= self.pure and not self.whole.keys() & set(node.tensor_inputs)
        whole = {"s"} if pure else set[str]()
        return tuple(s for s in SPLIT if s in before - after - whole)

    def _symbols(self, names: tuple[str, ...]) -> set[str]:
        return {s for name in names for size in self.trace.values[name].shape for s in size.symbols}

    def _node(self, index: int) -> None:
        """Add what a node computes for whole micro-batches, if that is something else."""
        node, values = self.trace.nodes[index], self.trace.values
        given = tuple(self.whole.get(x, x) if x else x for x in node.inputs)
        over = self._reduced(node)
        if op_kind(node.op) is OpKind.LOSS:
            raise CaptureError(
                f"{node.source}: a buffer gets a value made of {node.op}, whose mean is over all micro-batches; write "
                "it out there (log_softmax, gather, mean), or track what pm.step returns"
            )
        if node.op == UPDATE:
            self.trace.nodes[index] = replace(node, inputs=given)
            return
        if not over and given == node.inputs:
            if "b" not in self._symbols(node.outputs):
                self.trace.of_micro_batches |= set(node.outputs)
            return
        if not over:
            names = tuple(self.names.fresh(f"{name}.whole") for name in node.outputs)
            values |= {new: replace(values[old], name=new) for old, new in zip(node.outputs, names, strict=True)}
            self.whole |= zip(node.outputs, names, strict=True)
            self.trace.insert_after(index, replace(node, name=names[0], inputs=given, outputs=names))
            return
        self._sum(index, replace(node, inputs=given), over)

    def _sum(self, index: int, node: Node, over: tuple[str, ...]) -> None:
        """Add the sum or mean over all ranks behind a node that computes one of this rank's rows."""
        (out,), attrs = node.outputs, dict(node.attrs)
        given = self.trace.values[out]
        steps = [replace(node, op="sum")] if op_has(node.op, Trait.AVERAGES) else [node]
        largest = _extreme(node)
        if largest is None:
            steps.append(replace(node, op="batch_sum", attrs={"over": over}))
        else:
            steps = [replace(node, attrs={**attrs, OF_PARTS: over})]
            steps.append(replace(node, op="batch_extreme", attrs={"over": over, "largest": largest}))
        dtype = given.dtype
        if op_has(node.op, Trait.AVERAGES):
            number = self.trace.values[str(node.inputs[0])].num_elements.divide(given.num_elements)
            steps.append(replace(node, op="div_scalar", attrs={"scalar": number}))
            if dtype in HALF:  # torch adds up a mean in float32
                dtype = "float32"
                steps[0] = replace(steps[0], attrs={**attrs, "dtype": dtype})
                steps.append(replace(node, op="to", attrs={"dtype": given.dtype}))
        place, inputs = self.trace.order.index(("node", index)) + 1, node.inputs
        for step in steps:
            name = self.names.fresh(f"{out}.whole")
            self.trace.values[name] = replace(given, name=name, dtype=given.dtype if step.op == "to" else dtype)
            made = replace(step, name=name, inputs=inputs, outputs=(name,))
            self.trace.insert(place, made, self.trace.region[node.name])
            self.whole[out], inputs, place = name, (name,), place + 1

    def _stays_pending(self, node: Node) -> bool:
        """Return True if a node makes a pending sum over samples, or hands on such sums as one."""
        inputs = node.tensor_inputs
        carriers = [k for k, x in enumerate(inputs) if x in self.pending]
        if "b" in self._symbols(node.outputs):
            return False
        if not carriers:
            return _extreme(node) is None and "b" in self._reduced(node)
        match op_record(node.op).linear:
            case Linear.ALL:
                return len(carriers) == len(inputs)
            case Linear.ONE:
                return len(carriers) == 1
            case Linear.FIRST:
                return carriers == [0]
            case _:
                return False

    def _use(self, index: int) -> None:
        """Let a node that leads to no update read whole sums, unless it hands on pending ones."""
        node = self.trace.nodes[index]
        if not set(node.outputs) <= self.pending:
            inputs = tuple(self.whole.get(x, x) if x else x for x in node.inputs)
            self.trace.nodes[index] = replace(node, inputs=inputs)

    def _rename(self) -> None:
        """Let layers and results have whole sums, unless a result is a pending one."""
        trace = self.trace
        final = {old: new for old, new in self.whole.items() if old not in self.pending}
        trace.repeats = [replace(r, inputs=tuple(self.whole.get(x, x) for x in r.inputs)) for r in trace.repeats]
        for layer, values in trace.layer_inputs.items():
            trace.layer_inputs[layer] = [self.whole.get(x, x) for x in values]
        for layer, values in trace.layer_outputs.items():
            trace.layer_outputs[layer] = [final.get(x, x) for x in values]
        trace.output = final.get(trace.output, trace.output)
        trace.results = {name: final.get(x, x) for name, x in trace.results.items()}
        trace.of_micro_batches |= set(self.whole.values())

    def _repeats_are_whole(self, used: set[str]) -> bool:
        """Return False if a repeated layer hands a value to an update that is a sum in the layer that it repeats."""
        for repeat in self.trace.repeats:
            for mine, theirs in zip(repeat.outputs, self.trace.layer_outputs[repeat.first], strict=True):
                if mine in used and "b" not in self._symbols((theirs,)):
                    return False
        return True


def _extreme(node: Node) -> bool | None:
    """Return True for a node that takes the largest elements along dims, False for the smallest, None for any other."""
    call = str(node.attrs["call"]) if node.op == FUNCTION else ""
    return next((largest for start, largest in _EXTREMES.items() if call.startswith(start)), None)


_EXTREMES = {
    "torch.ops.aten.amax.": True,
    "torch.ops.aten.max.default": True,
    "torch.ops.aten.amin.": False,
    "torch.ops.aten.min.default": False,
}


def _without_gradients(trace: Trace) -> None:
    """Cut off the gradients of what leads to updates alone, where it begins."""
    live = set(live_entries(trace, {trace.output}, updates=False))
    cut: dict[tuple[str, str], str] = {}
    for entry in list(trace.order):
        kind, index = entry
        if kind == "repeat":
            continue
        node = trace.nodes[index]
        if entry in live:
            if op_has(node.op, Trait.EXTREME_OF_RANKS) and trace.values[node.outputs[0]].requires_grad:
                raise CaptureError(
                    f"{node.source}: a buffer and the loss are both made of an extreme over the batch, through which "
                    "gradients flow; detach what it is taken of: x.detach().amax(0)"
                )
            continue
        layer, inputs = trace.region[node.name], list(node.inputs)
        trace.of_micro_batches |= set(node.outputs)
        for out in node.outputs:
            trace.values[out] = replace(trace.values[out], requires_grad=False)
        for k, x in enumerate(inputs):
            if x is None or not trace.values[x].requires_grad or op_has(node.op, Trait.STOPS_GRADIENT):
                continue
            if (x, layer) not in cut:
                cut[x, layer] = name = f"{x}.value:{layer}"
                trace.values[name] = replace(trace.values[x], name=name, requires_grad=False)
                made = Node(name, "detach", (x,), (name,), {}, node.scope, node.source)
                trace.insert(trace.order.index(entry), made, layer)
            inputs[k] = cut[x, layer]
        trace.nodes[index] = replace(node, inputs=tuple(inputs))
