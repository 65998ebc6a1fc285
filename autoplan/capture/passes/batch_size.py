"""Means over the batch and uses of the batch size, in a model that is computed micro-batch by micro-batch.

`x.mean()` and `loss.sum() / ids.shape[0]` are means over the samples of one forward. Data-parallel ranks share a
micro-batch, and programs write its whole size (`autoplan.codegen.emit.Context.whole`). Micro-batches are averaged (the
input `loss_share`), as if the gradients of `loss / number` were accumulated. If anything but such a mean uses the batch
size, the batch cannot be split: `autoplan.ops.batch` refuses it by name.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace

from autoplan.capture.trace import Trace
from autoplan.ir.graph import LOSS_SHARE, OF_THE_WHOLE_BATCH, Node, Value, of_the_batch
from autoplan.ir.symbols import Expr
from autoplan.ops.record import Trait
from autoplan.ops.table import op_has
from autoplan.units import HALF


def wide_means(trace: Trace) -> None:
    """Compute means over the batch of 16-bit values in float32.

    torch accumulates such a mean in float32. Here the sum is a value of its own, which would overflow in 16 bits.
    """
    for index, node in enumerate(list(trace.nodes)):
        if _number_of_mean(trace, node) is None:
            continue
        (name,) = node.outputs
        out = trace.values[name]
        if out.dtype not in HALF:
            continue
        wide = f"{node.name}.wide"
        trace.values[wide] = replace(out, name=wide, dtype="float32")
        trace.nodes[index] = replace(node, outputs=(wide,), attrs={**node.attrs, "dtype": "float32"})
        cast = Node(f"{node.name}.narrow", "to", (wide,), (name,), {"dtype": out.dtype}, "", node.source)
        trace.insert_after(index, cast)


def counts_of_others(trace: Trace) -> None:
    """Count directly what is counted as the rest of the batch: `mask.numel() - mask.sum()` is `(~mask).sum()`.

    The difference cannot be added up over micro-batches, since the number of elements is that of one of them. Written
    so in `LabelSmoother` of Hugging Face's Trainer, whose loss divides by it.
    """
    made_by = {out: node for node in trace.nodes for out in node.outputs}
    for node in [n for n in trace.nodes if n.op == "rsub_scalar"]:
        count = made_by.get(node.tensor_inputs[0])
        if count is None or count.op != "sum" or trace.values[count.outputs[0]].shape != ():
            continue
        cast = made_by.get(count.tensor_inputs[0])
        cast = cast if cast is not None and cast.op == "to" else None
        mask = (cast or count).tensor_inputs[0]
        if trace.values[mask].dtype != "bool" or trace.values[mask].num_elements != node.attrs["scalar"]:
            continue
        index = trace.nodes.index(node)
        layer, place = trace.region[node.name], trace.order.index(("node", index))
        names = [f"{node.name}.{part}" for part in ("others", "numbers")]
        steps = [Node(names[0], "logical_not", (mask,), (names[0],), {}, node.scope, node.source)]
        trace.values[names[0]] = replace(trace.values[mask], name=names[0])
        if cast is not None:
            steps.append(replace(cast, name=names[1], inputs=(names[0],), outputs=(names[1],)))
            trace.values[names[1]] = replace(trace.values[cast.outputs[0]], name=names[1])
        trace.nodes[index] = replace(count, name=node.name, inputs=steps[-1].outputs, outputs=node.outputs)
        for step in reversed(steps):
            trace.insert(place, step, layer)


def _number_of_mean(trace: Trace, node: Node) -> Expr | None:
    """Return the number of elements of a mean over the batch outside the layers; None for any other node."""
    if not op_has(node.op, Trait.AVERAGES) or trace.region[node.name]:
        return None
    source, out = trace.values[str(node.inputs[0])], trace.values[node.outputs[0]]
    number = source.num_elements.divide(out.num_elements)
    return number if number is not None and "b" in number.symbols else None


def averages_of_micro_batches(trace: Trace, counted: Set[str]) -> None:
    """Change the trace: means over the batch and sums divided by the batch size get their share; other uses get a mark.

    Args:
        counted: what the denominators of the loss count. It is computed for the whole batch, so it gets no share.
    """
    have_share = [i for i, n in enumerate(trace.nodes) if LOSS_SHARE in n.inputs or counted & set(n.outputs)]
    before = {*have_share, *trace.flow().leading_to(have_share)}
    shared = {out for i in before for out in trace.nodes[i].outputs}
    _means_as_sums(trace, shared)
    flow, nodes = trace.flow(), list(trace.nodes)
    others = shared | _of_whole_micro_batches(trace)
    for index in range(len(trace.nodes)):
        node = trace.nodes[index]
        scalar = node.attrs.get("scalar")
        if not isinstance(scalar, Expr) or "b" not in scalar.symbols or set(node.outputs) & others:
            continue
        (given,) = node.tensor_inputs
        summed = not any("b" in size.symbols for size in trace.values[given].shape)
        rest = scalar.divide(Expr.symbol("b"))
        once = node.op == "div_scalar" and rest is not None and "b" not in rest.symbols
        divided = {given, *(x for i in flow.leading_to([index]) for x in nodes[i].tensor_inputs)}
        again = not all(map(of_the_batch, divided.intersection(trace.inputs)))  # of what is or has a mean already
        if not once or not summed or again or trace.region[node.name]:
            trace.nodes[index] = replace(node, attrs={**node.attrs, OF_THE_WHOLE_BATCH: True})
            continue
        _share(trace, index)


def _of_whole_micro_batches(trace: Trace) -> set[str]:
    """Return the results of nodes that are given sums over all ranks, or that lead to updates of buffers alone.

    Their batch is the whole micro-batch.
    """
    summed = {out for node in trace.nodes if op_has(node.op, Trait.SUMS_RANKS) for out in node.outputs}
    given = [n for n in trace.nodes if set(n.tensor_inputs) & summed or op_has(n.op, Trait.UPDATES)]
    return {out for node in given for out in node.outputs} | trace.of_micro_batches


def _means_as_sums(trace: Trace, but: set[str]) -> None:
    for index, node in enumerate(list(trace.nodes)):
        number = _number_of_mean(trace, node)
        if number is not None and not set(node.outputs) & but:
            mean_as_sum(trace, index, number)


def mean_as_sum(trace: Trace, index: int, number: Expr) -> None:
    """Replace a mean over `number` elements by their sum and a division by `number`, in a node directly after it."""
    node = trace.nodes[index]
    total = f"{node.name}.sum"
    trace.values[total] = replace(trace.values[node.outputs[0]], name=total)
    trace.nodes[index] = replace(node, op="sum", outputs=(total,))
    by = Node(f"{node.name}.by", "div_scalar", (total,), node.outputs, {"scalar": number}, "", node.source)
    trace.insert_after(index, by)


def ask_for_share(trace: Trace) -> None:
    """Make `loss_share` an input, if it is not one yet."""
    if LOSS_SHARE not in trace.values:
        trace.values[LOSS_SHARE] = Value(LOSS_SHARE, (), "float32", False)
        trace.inputs.append(LOSS_SHARE)


def _share(trace: Trace, index: int) -> None:
    """Multiply the output of a node by `loss_share`, one over the number of micro-batches."""
    ask_for_share(trace)
    node = trace.nodes[index]
    (out,) = node.outputs
    part = f"{out}.of_micro_batch"
    trace.values[part] = replace(trace.values[out], name=part)
    trace.nodes[index] = replace(node, outputs=(part,))
    trace.insert_after(index, Node(f"{node.name}.share", "mul", (part, LOSS_SHARE), (out,), {}, "", node.source))
