"""Cut the flat trace into blocks and calls: layers, the glue before, between and after them, and parameter-free tables.

Values that depend on no parameter (rotary tables, masks, shifted labels) go into blocks of their own. Every pipeline
stage recomputes them instead of receiving them.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from autoplan.capture.layers.divide import divide
from autoplan.capture.layers.segments import Segment, segments_of
from autoplan.capture.passes.batch_size import averages_of_micro_batches, counts_of_others, wide_means
from autoplan.capture.passes.coupled import penalties, routed_nodes, router_terms
from autoplan.capture.passes.hoist import hoist, simplify
from autoplan.capture.passes.live import asked_of_first, drop_dead, pure_values, used_by_repeat
from autoplan.capture.passes.updates import whole_updates
from autoplan.capture.trace import Trace
from autoplan.errors import CaptureError
from autoplan.ir.fresh import FreshNames
from autoplan.ir.graph import (
    LOSS_DENOMINATOR,
    Block,
    Call,
    LossCount,
    ModelGraph,
    Node,
    Parameter,
    Result,
    Value,
    denominator,
)
from autoplan.ir.symbols import Expr
from autoplan.ops.generic import FUNCTION
from autoplan.ops.record import OpKind, Trait
from autoplan.ops.table import op_has, op_kind, op_record, updated_buffers
from autoplan.units import LossUnit


@dataclass(frozen=True)
class _Loss:
    """The denominators of the loss of a model.

    Attributes:
        counts: of every denominator: its unit, the value with the labels or the total, and the label that does not
            count.
        mains: the values of the counted terms; empty if no term is counted.
    """

    counts: tuple[LossCount, ...]
    mains: frozenset[str] = frozenset()

    @property
    def targets(self) -> set[str]:
        """The values that are counted."""
        return {count.target for count in self.counts if count.target is not None}


def assemble(
    trace: Trace,
    name: str,
    params: dict[str, Parameter],
    buffers: dict[str, Parameter],
    kinds: Mapping[str, Hashable],
) -> ModelGraph | None:
    """Return the ModelGraph of a trace (without factors); None if merged layers are not self-contained.

    Args:
        kinds: of the modules that are made of modules with parameters, which can be layers (`divide`).
    """
    simplify(trace)
    if not whole_updates(trace):
        return None
    wide_means(trace)
    counts_of_others(trace)
    loss = _normalise_loss(trace)
    drop_dead(trace, loss.targets)
    hoist(trace, pure_values(trace))
    if loss.mains:
        router_terms(trace, loss.mains)
    penalties(trace)
    averages_of_micro_batches(trace, loss.targets)
    pure = pure_values(trace)
    divide(trace, pure, kinds)
    segments = segments_of(trace, pure)
    return _Builder(trace, segments, loss, pure).graph(name, params, buffers)


def _normalise_loss(trace: Trace) -> _Loss:
    """Replace means over the batch by sums divided by the global counts."""
    trace.values[LOSS_DENOMINATOR] = Value(LOSS_DENOMINATOR, (), "float32", False)
    trace.inputs.append(LOSS_DENOMINATOR)
    counts: list[LossCount] = []
    mains, sums = set[str](), list[LossCount]()
    for node in [n for n in trace.nodes if op_kind(n.op) is OpKind.LOSS]:
        index = trace.nodes.index(node)
        attrs = {k: v for k, v in node.attrs.items() if k != "mean"}
        total, out = f"{node.name}.sum", node.outputs[0]
        ignore, target = int(node.attrs["ignore_index"]), str(node.inputs[1])
        if len(trace.values[str(node.inputs[0])].shape) != 2:
            raise CaptureError(
                f"{node.source}: cross_entropy needs logits [tokens, classes]; flatten batch and sequence first"
            )
        mains.add(out)
        if not node.attrs["mean"]:
            trace.nodes[index] = replace(node, op="cross_entropy_sum", attrs=attrs)
            sums.append(LossCount(LossUnit.NONE, target, ignore))
            continue
        trace.values[total] = replace(trace.values[out], name=total)
        trace.nodes[index] = replace(node, op="cross_entropy_sum", attrs=attrs, outputs=(total,))
        by = _denominator_of(trace, counts, LossCount(LossUnit.TOKENS, target, ignore))
        trace.insert_after(index, Node(f"{node.name}.mean", "div", (total, by), (out,), {}, "", node.source))
    _normalise_totals(trace, counts, mains)
    if counts or sums:
        return _Loss(tuple(counts or sums[:1]), frozenset(mains))
    return _normalise_mean(trace)


def _denominator_of(trace: Trace, counts: list[LossCount], count: LossCount) -> str:
    """Return the input with the denominator that counts this, a new one if there is none yet."""
    if count not in counts:
        counts.append(count)
    name = denominator(counts.index(count))
    if name not in trace.values:
        trace.values[name] = Value(name, (), "float32", False)
        trace.inputs.append(name)
    return name


def _normalise_totals(trace: Trace, counts: list[LossCount], mains: Set[str]) -> None:
    """Let the loss divide by totals of the global batch, in place of those of a micro-batch: `mask.sum()`.

    A total depends on the batch alone, so that it is known before the first backward. Those of routers' terms stay.
    """
    pure, divides, routed = pure_values(trace), _denominators(trace), routed_nodes(trace, mains)
    for at, node in enumerate(list(trace.nodes)):
        out = node.outputs[0]
        if out not in pure & divides or op_kind(node.op) is not OpKind.REDUCTION or op_has(node.op, Trait.AVERAGES):
            continue
        source = trace.values[node.tensor_inputs[0]]
        if at in routed or trace.values[out].shape != () or not any("b" in size.symbols for size in source.shape):
            continue
        total = f"{node.name}.total"
        trace.values[total] = replace(trace.values[out], name=total)
        by = _denominator_of(trace, counts, LossCount(LossUnit.TOTAL, total))
        for i, other in enumerate(trace.nodes):
            inputs = tuple(by if x == out else x for x in other.inputs)
            trace.nodes[i] = replace(other, inputs=inputs, outputs=(total,) if i == at else other.outputs)


def _denominators(trace: Trace) -> set[str]:
    """Return the values that lead to the second operand of a division, through values without dims."""
    found: set[str] = set()
    for node in reversed(trace.nodes):
        if op_has(node.op, Trait.DIVIDES):
            found |= {str(node.inputs[1])}
        elif found & set(node.outputs):
            found |= {x for x in node.tensor_inputs if trace.values[x].shape == ()}
            if op_kind(node.op) is OpKind.REDUCTION:
                found |= set(node.outputs)
    return found


def _normalise_mean(trace: Trace) -> _Loss:
    """Replace mean(x) over everything by sum(x) / (elements per sample) / (number of samples)."""
    for i, node in enumerate(trace.nodes):
        source = trace.values[str(node.inputs[0])] if node.inputs else None
        if (
            not op_has(node.op, Trait.AVERAGES)
            or source is None
            or trace.values[node.outputs[0]].shape != ()
            or trace.region[node.name]
        ):
            continue
        per_sample = source.num_elements.divide(Expr.symbol("b"))
        if per_sample is None:
            continue
        total, part, out = f"{node.name}.sum", f"{node.name}.part", node.outputs[0]
        for fresh in (total, part):
            trace.values[fresh] = replace(trace.values[out], name=fresh)
        trace.nodes[i] = replace(node, op="sum", outputs=(total,))
        trace.insert_after(i, Node(part, "div_scalar", (total,), (part,), {"scalar": per_sample}, "", node.source))
        at = next(k for k, n in enumerate(trace.nodes) if n.name == part)
        trace.insert_after(at, Node(f"{node.name}.mean", "div", (part, LOSS_DENOMINATOR), (out,), {}, "", node.source))
        return _Loss((LossCount(LossUnit.SAMPLES),), frozenset({out}))
    return _Loss((LossCount(LossUnit.NONE),))


def _with_gradient(block: Block, outputs: Iterable[str]) -> set[str]:
    """Return the values of a block that get a gradient if these outputs do."""
    found = set(outputs)
    for node in reversed(block.nodes):
        flows = any(o in found and block.values[o].requires_grad for o in node.outputs)
        if flows and not op_has(node.op, Trait.STOPS_GRADIENT):
            found |= set(node.tensor_inputs)
    return found


def _untrained_note(names: Sequence[str]) -> tuple[str, ...]:
    """Return the sentence that says which parameters get no gradient."""
    if not names:
        return ()
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    what = "do not influence the loss, so they get" if len(names) > 1 else "does not influence the loss, so it gets"
    return (f"{shown} {what} no gradient and no update, as in PyTorch",)


def _unsplit_notes(blocks: Iterable[Block]) -> tuple[str, ...]:
    """Return a sentence for every function without a record whose dims cannot be split, unless all are of size 1."""
    found = []
    for block in blocks:
        for node in block.nodes:
            if node.op != FUNCTION:
                continue
            tensors = [block.values[x] for x in (*node.tensor_inputs, *node.outputs)]
            dims = re.findall(r"[^\[\], ]+", re.sub(r"#|->", " ", node.attrs["rule"]))
            if all(dim.endswith("!") for dim in dims) and any(d.value != 1 for x in tensors for d in x.shape):
                op = node.attrs["call"].partition("(")[0].removeprefix("torch.ops.")
                where = f" ({node.source})" if node.source else ""
                found.append(f"{op}{where} cannot be split: it runs unsplit on every tensor-parallel rank")
    return tuple(dict.fromkeys(found))


class _Builder:
    """The builder of blocks and calls from the segments of a trace; not `ok` once a layer is not self-contained."""

    def __init__(self, trace: Trace, segments: list[Segment], loss: _Loss, pure: set[str]) -> None:
        self.trace, self.segments, self.loss, self.pure = trace, segments, loss, pure
        self.blocks: dict[str, Block] = {}
        # layer -> its block, actual inputs and actual outputs, for first layers
        self.by_layer: dict[str, tuple[Block, list[str], list[str]]] = {}
        self.calls: list[Call] = []
        self.places: dict[str, tuple[str, str]] = {}  # value -> its call, and its name in the block
        self.rename: dict[str, str] = {}
        self.aliases: dict[str, tuple[str, ...]] = {}  # first name of a parameter or buffer -> its other names
        self.ok = True

    def graph(self, name: str, params: dict[str, Parameter], buffers: dict[str, Parameter]) -> ModelGraph | None:
        self.aliases = {p.name: p.aliases for p in (*params.values(), *buffers.values()) if p.aliases}
        for index, segment in enumerate(self.segments):
            if segment.kind == "repeat":
                self._repeat(segment)
            else:
                self._segment(segment, self._needed_after(index))
            if not self.ok:
                return None
        self._refuse_shared_updates(buffers)
        untrained = self._untrained(params)
        used = {x for c in self.calls for x in (*c.inputs, *c.outputs)} | set(self.trace.inputs)
        used_params = {full for c in self.calls for full in c.params.values()}
        used_buffers = {full for c in self.calls for full in c.buffers.values()}
        count, *more = self.loss.counts
        return ModelGraph(
            name=name,
            inputs=tuple(self.trace.inputs),
            output=self.trace.output,
            values={n: v for n, v in self.trace.values.items() if n in used},
            blocks=self.blocks,
            calls=tuple(self.calls),
            params={
                n: replace(p, trainable=p.trainable and n not in untrained)
                for n, p in params.items()
                if n in used_params
            },
            buffers={n: p for n, p in buffers.items() if n in used_buffers},
            loss_count=count.what,
            loss_target=count.target,
            ignore_index=count.ignore_index,
            more_counts=tuple(more),
            results=self._results(),
            notes=(*_untrained_note(untrained), *_unsplit_notes(self.blocks.values())),
        )

    def _results(self) -> tuple[Result, ...]:
        """Return what the model returns besides the loss, as far as a call makes it and it has a batch dim."""
        found = ((name, self.rename.get(value, value)) for name, value in self.trace.results.items())
        return tuple(
            Result(name, *self.places[value])
            for name, value in found
            if value in self.places and any("b" in size.symbols for size in self.trace.values[value].shape)
        )

    def _refuse_shared_updates(self, buffers: Mapping[str, Parameter]) -> None:
        """Raise CaptureError for a buffer that is changed and has two places: each would have a copy of its own."""
        for name in sorted(call.buffers[x] for call in self.calls for x in self._written(call)):
            places = [call.name for call in self.calls for full in call.buffers.values() if full == name]
            if len(places) > 1 or buffers[name].aliases:
                raise CaptureError(
                    f"buffer {name!r} is changed in the forward of a module and used in {max(len(places), 2)} places "
                    f"({', '.join(places)}), which may be on different pipeline stages, each with a copy of its own; "
                    "hand on its value from where it is changed, or give each place a module of its own"
                )

    def _written(self, call: Call) -> frozenset[str]:
        """Return the buffers of a call that change between forwards, by their names in its block."""
        block = self.blocks[call.block]
        elsewhere = {name for name, full in call.buffers.items() if full in self.trace.changing}
        return updated_buffers(block.nodes, block.buffers) | elsewhere

    def _untrained(self, params: Mapping[str, Parameter]) -> list[str]:
        """Return the trainable parameters that get no gradient, as they do not influence the loss.

        Raises:
            CaptureError: if that is all of them.
        """
        trained, reached = set[str](), {self.trace.output}
        for call in reversed(self.calls):
            block = self.blocks[call.block]
            mine = zip(block.outputs, call.outputs, strict=True)
            local = _with_gradient(block, [inside for inside, outside in mine if outside in reached])
            trained |= {full for name, full in call.params.items() if name in local}
            reached |= {outside for inside, outside in zip(block.inputs, call.inputs, strict=True) if inside in local}
        trainable = sorted(n for n, p in params.items() if p.trainable)
        untrained = [n for n in trainable if n not in trained]
        if untrained == trainable and trainable:
            raise CaptureError(
                f"no trainable parameter influences the loss (not {trainable[0]!r}, for one), so there is nothing to "
                "train; does the forward run under torch.no_grad() or detach its results?"
            )
        return untrained

    def _needed_after(self, index: int) -> set[str]:
        needed = {self.trace.output} | self.loss.targets
        for segment in self.segments[index + 1 :]:
            if segment.kind == "repeat":
                needed |= used_by_repeat(self.trace, segment.repeat)
            for node in segment.nodes:
                needed |= set(node.tensor_inputs)
        for segment in self.segments[index + 1 :]:
            if segment.kind == "repeat":
                needed |= asked_of_first(self.trace, segment.repeat, needed)
        return needed

    def _local(self, layer: str, full: str) -> str:
        """Return the name of a parameter inside a block: relative to the layer, or full if another module holds it."""
        return full.removeprefix(f"{layer}.") if layer and full.startswith(f"{layer}.") else full

    def _segment(self, segment: Segment, needed: set[str]) -> None:
        layer = segment.name if segment.kind == "layer" else ""
        nodes = [replace(n, inputs=tuple(self.rename.get(x, x) if x else x for x in n.inputs)) for n in segment.nodes]
        made = list(dict.fromkeys(x for n in nodes for x in n.outputs))
        used = list(dict.fromkeys(x for n in nodes for x in n.tensor_inputs))
        params = [x for x in used if x in self.trace.params]
        buffers = [x for x in used if x in self.trace.buffers]
        given = self._in_order_of_layer(layer, [x for x in used if x not in {*made, *params, *buffers}])
        if given is None:
            self.ok = False
            return
        outs = list(filter(needed.__contains__, made)) or made[-1:]  # of what leads to buffers, a value that none reads
        root = self.trace.roots.get(layer, layer)
        block = self._intern(self._block(segment.name, root, nodes, given, params, buffers, outs), layer)
        names = self._names(nodes, given, root)
        self.by_layer[segment.name] = (block, given, outs)
        self._place(segment.name, names)
        self.calls.append(
            Call(
                segment.name,
                block.name,
                tuple(given),
                tuple(outs),
                {names[x]: self.trace.params[x] for x in params},
                {names[x]: self.trace.buffers[x] for x in buffers},
            )
        )

    def _place(self, call: str, names: Mapping[str, str]) -> None:
        """Note the call that makes or first takes each of these values, and its name in the block."""
        for value, name in names.items():
            self.places.setdefault(value, (call, name))

    def _in_order_of_layer(self, layer: str, ins: list[str]) -> list[str] | None:
        """Return the inputs of a layer in the order of its arguments.

        None if other layers repeat this one and it uses a tensor that is not among its arguments.
        """
        if not layer:
            return ins
        entering = list(dict.fromkeys(self.rename.get(x, x) for x in self.trace.layer_inputs.get(layer, ())))
        if set(ins) - set(entering) and any(r.first == layer for r in self.trace.repeats):
            return None
        return [x for x in entering if x in ins] + [x for x in ins if x not in entering]

    def _block(
        self,
        name: str,
        layer: str,
        nodes: list[Node],
        ins: list[str],
        params: list[str],
        buffers: list[str],
        outs: list[str],
    ) -> Block:
        names = self._names(nodes, ins, layer)

        def local(values: list[str]) -> tuple[str, ...]:
            return tuple(names[x] for x in values)

        return Block(
            name=name,
            inputs=local(ins),
            params=local(params),
            buffers=local(buffers),
            outputs=local(outs),
            nodes=tuple(self._rewrite(n, names, self._relative(n.scope, layer)) for n in nodes),
            values={new: replace(self.trace.values[old], name=new) for old, new in names.items()},
        )

    def _intern(self, block: Block, layer: str) -> Block:
        """Return the equal block if there is one, else this one under a fresh name."""
        for old in self.blocks.values():
            if replace(block, name=old.name) == old:
                return old
        base = "layer" if layer else block.name
        name, k = base, 1
        while name in self.blocks:
            name, k = f"{base}{k}", k + 1
        block = replace(block, name=name)
        self.blocks[name] = block
        return block

    def _names(self, nodes: list[Node], ins: list[str], layer: str) -> dict[str, str]:
        """Return short canonical names inside a block: equal blocks get equal names."""
        names: dict[str, str] = {}
        state = {**self.trace.params, **self.trace.buffers}
        held = {x: self._local(layer, state[x]) for node in nodes for x in node.tensor_inputs if x in state}
        unused = FreshNames(held.values())  # an input of the batch may be called as a parameter is
        for x in ins:
            value = self.trace.values[x]
            plain = (x if x in self.trace.inputs else x.rsplit("_", 1)[0]).split(".")[0]
            plain = plain if x in self.pure or x in self.trace.inputs else "count"  # the same name behind every layer
            names[x] = unused.fresh("hidden" if value.requires_grad else plain)
        for node in nodes:
            for x in node.tensor_inputs:
                if x in held:
                    names.setdefault(x, held[x])
            base = unused.fresh(self._base(node, layer))
            for i, x in enumerate(node.outputs):
                names[x] = base if len(node.outputs) == 1 else unused.fresh(f"{base}_{'abcdefghijklmnop'[i]}")
        return names

    @staticmethod
    def _base(node: Node, layer: str) -> str:
        """Return a name for a node's output: the module's name for projections, norms and tables, else the op's."""
        leaf = node.scope.removeprefix(f"{layer}.").rsplit(".", 1)[-1] if layer else node.scope.rsplit(".", 1)[-1]
        op = op_record(node.op)
        module = op.kind in (OpKind.NORM, OpKind.EMBEDDING) or (op.kind is OpKind.PRODUCT and op.weights)
        named = module and leaf.isidentifier()
        return leaf if named else node.op

    def _relative(self, scope: str, layer: str) -> str:
        return scope.removeprefix(layer).removeprefix(".") if layer and scope.startswith(layer) else scope

    @staticmethod
    def _rewrite(node: Node, names: Mapping[str, str], scope: str) -> Node:
        outs = tuple(names[x] for x in node.outputs)
        return replace(
            node,
            name=outs[0],
            scope=scope,
            inputs=tuple(names[x] if x is not None else None for x in node.inputs),
            outputs=outs,
        )

    def _repeat(self, segment: Segment) -> None:
        repeat = self.trace.repeats[segment.repeat]
        layer, first, outs = repeat.layer, repeat.first, repeat.outputs
        ins = [self.rename.get(x, x) for x in repeat.inputs]
        block, first_ins, first_outs = self.by_layer[first]
        given = [self.rename.get(x, x) for x in self.trace.layer_inputs[first]]
        leaving = [self.rename.get(x, x) for x in self.trace.layer_outputs[first]]
        actual: dict[str, str] = {}
        for mine, theirs in zip(ins, given, strict=True):
            if actual.setdefault(theirs, mine) != mine:
                self.ok = False  # the first layer got one tensor twice, this one two tensors
                return
        results: dict[str, str] = {}
        for mine, theirs in zip(outs, leaving, strict=True):
            if theirs in given:
                self.rename[mine] = actual[theirs]  # passed through unchanged
            elif theirs in first_outs:
                if theirs in results:
                    self.rename[mine] = results[theirs]
                results.setdefault(theirs, mine)
            else:
                self.rename[mine] = mine  # computed, but unused
        if set(first_outs) - set(results) or set(first_ins) - set(actual):
            self.ok = False  # a value leaves or enters the layer past its arguments
            return
        for theirs, mine in results.items():
            self.trace.values[mine] = replace(self.trace.values[theirs], name=mine)
            self.places[mine] = layer, self.places[theirs][1]
        call = next(c for c in self.calls if c.name == first)

        self.calls.append(
            Call(
                layer,
                block.name,
                tuple(actual[x] for x in first_ins),
                tuple(results[x] for x in first_outs),
                {local: self._moved(full, first, layer) for local, full in call.params.items()},
                {local: self._moved(full, first, layer) for local, full in call.buffers.items()},
            )
        )

    def _moved(self, full: str, first: str, layer: str) -> str:
        """Return the tensor of a layer that stands where tensor `full` of layer `first` does, by its first name."""
        inside = next((x for x in (full, *self.aliases.get(full, ())) if x.startswith(f"{first}.")), None)
        if inside is None:
            return full
        mine = layer + inside.removeprefix(first)
        return next((name for name, others in self.aliases.items() if mine in others), mine)
