"""Activation memory of a lowered block: bytes that autograd keeps, that remain under recompute, and transient bytes.

Everything derives from the emitted statements and the table `autoplan.ops.saved`. Memory is counted in storages: a view
keeps its whole base alive and counts once with it. A tensor that crosses from block to block is counted as follows:

- a tensor with a gradient belongs to the block that makes it if that block keeps it, and to the block that takes it if
  that one keeps it. If both do, `saved_inputs` and `saved_outputs` show it, and `saved_bytes_of` counts it once;
- a tensor without a gradient (positions, tables, masks) belongs to the block that makes it, counts once however
  many layers use it, and is assumed to be used. The batch itself, parameters and buffers do not count.

So the sum of `saved_bytes` over the calls of a stage is what it keeps of a micro-batch (exact by `saved_bytes_of`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import gcd, prod

from autoplan.config.recompute import BY_OPERATION, FULL, NONE, OFFLOAD, SELECTIVE, modules_choice
from autoplan.errors import LayoutError
from autoplan.ir.dataflow import last_uses
from autoplan.ir.graph import Value
from autoplan.ir.layout import ConversionKind, Layout
from autoplan.ir.symbols import Expr
from autoplan.ops.record import OpKind, Trait
from autoplan.ops.saved import (
    Form,
    Gradient,
    OpFacts,
    SavedRule,
    TensorFacts,
    extra_bytes,
    kept,
    workspace_bytes,
)
from autoplan.ops.strides import Ints, broadcast, contiguous, elementwise, reshaped
from autoplan.ops.table import op_kind, op_record, saved_rule
from autoplan.program import compiled_kernels, megatron_kernels
from autoplan.program.activation_bytes import Activations, ends_of
from autoplan.program.by_operation import by_operation
from autoplan.program.gradients import GradientStep, MadeGradient, backward_peak, spent_bytes, without_parameters
from autoplan.program.megatron_kernels import Kernels, of_op
from autoplan.program.megatron_modules import DISCARDING, modules
from autoplan.program.partition import Traced, TracedBlock, least_kept
from autoplan.program.regions import Flow, Region, choices, logits, regions, statements_by_group
from autoplan.program.statements import Convert, LoweredBlock, Op
from autoplan.program.stored_tensors import StoredTensor
from autoplan.units import DTYPE_BYTES

_Out = tuple[int, Value]  # a storage that a block hands out, and its value
# kinds that fused kernels take in besides element-wise operations and views
_FUSED = (OpKind.REDUCTION, OpKind.JOIN, OpKind.NORM)
_SENDS_NOTHING = (ConversionKind.SLICE, ConversionKind.TO_REPLICATE, ConversionKind.TO_PARTIAL)


def activations(
    lowered: LoweredBlock,
    env: Mapping[str, int],
    *,
    dtypes: Mapping[str, str] | None = None,
    device_type: str = "cpu",
    kernels: Kernels | None = None,
) -> Activations:
    """Return the activation memory of one call of a block on one rank.

    Args:
        env: numbers for `b` (micro-batch of this rank) and `s`.
        dtypes: dtype in the graph -> dtype that it is computed in, where they differ.
        device_type: device whose kernels run; the tests measure "cpu".
        kernels: None runs op by op. Otherwise element-wise operations, copies and norms may share kernels with their
            neighbours, made by a compiler or written by hand (Megatron, Transformer Engine): see `_Walk.fuse` and
            `autoplan.program.megatron_kernels`.

    The transient is an estimate from a walk over the statements: forward with the variables that the text holds, and in
    reverse with the gradients that flow. The walk assumes that an op makes all its gradients at once, and that the
    gradient of a parameter is new beside the one it is added to (true from the second micro-batch on).

    Raises:
        RuleError: an op without a line in `autoplan.ops.saved`.
        LayoutError: a size that does not divide.
    """
    return _Walk(lowered, env, dtypes or {}, device_type, kernels or Kernels()).run()


class _Walk:
    def __init__(
        self,
        lowered: LoweredBlock,
        env: Mapping[str, int],
        dtypes: Mapping[str, str],
        device_type: str,
        kernels: Kernels,
    ) -> None:
        self.lowered, self.env, self.dtypes, self.device_type = lowered, env, dtypes, device_type
        self.kernels = kernels
        self.sizes: dict[str, int] = {}
        self.shapes: dict[tuple[int, Layout], Ints] = {}
        self.storages: list[int] = []  # bytes
        self.tensors: dict[str, StoredTensor] = {}
        self.steps: list[GradientStep] = []
        self.params: set[str] = set()
        self.given: frozenset[str] = frozenset()  # inputs, parameters and buffers
        self.sums: dict[int, int] = {}  # storage of a softmax -> that of its sums, which computing it again needs
        self.cheap: set[int] = set()  # storages that a compiler computes again from what is kept
        self.parts: list[tuple[bool, bool]] = []  # of every statement: fused and computed again by a compiler
        self.logits = logits(lowered.statements) if kernels.narrow_logits else frozenset[str]()
        self.narrow: dict[int, int] = {}  # storage -> storage of its 8-bit copy
        self.copies: dict[int, set[int]] = {}  # storage -> its 8-bit copies; for a shard, those of the gathered value

    # -- sizes ---------------------------------------------------------------------------------------------------------

    def number(self, size: Expr) -> int:
        value = size.evaluate(self.env)
        if value.denominator != 1:
            raise LayoutError(f"{size} is {value}, not a whole number, for {dict(self.env)}")
        return int(value)

    def factor(self, name: str) -> int:
        if name not in self.sizes:
            self.sizes[name] = self.number(self.lowered.factors[name])
        return self.sizes[name]

    def opened(self, value: Value, layout: Layout) -> list[list[int]]:
        """Return the local size of every factor of every dim."""
        out = [[self.factor(f) for f in dim] for dim in value.dims or ()]
        for axis, kind in zip(self.lowered.axes, layout, strict=True):
            if kind.is_shard:
                size = out[kind.dim][kind.factor]
                if size % axis.size:
                    raise LayoutError(f"{value.name}: {size} cannot be cut into {axis.size} parts over {axis.name}")
                out[kind.dim][kind.factor] = size // axis.size
        return out

    def local(self, value: Value, layout: Layout) -> Ints:
        key = (id(value), layout)
        if key not in self.shapes:
            self.shapes[key] = tuple(prod(dim) for dim in self.opened(value, layout))
        return self.shapes[key]

    def dtype(self, value: Value) -> str:
        return self.dtypes.get(value.dtype, value.dtype)

    def width(self, value: Value) -> int:
        return DTYPE_BYTES[self.dtype(value)]

    def new(self, num_bytes: int) -> int:
        self.storages.append(num_bytes)
        return len(self.storages) - 1

    def fresh(self, value: Value, shape: Ints, strides: Ints | None = None) -> StoredTensor:
        return StoredTensor(self.new(prod(shape) * self.width(value)), shape, strides or contiguous(shape))

    # -- the block -----------------------------------------------------------------------------------------------------

    def run(self) -> Activations:
        low = self.lowered
        inputs = []
        for given in low.inputs:
            self.tensors[given.var] = self.fresh(given.value, self.local(given.value, given.layout))
            inputs.append(self.tensors[given.var].storage)
        for p in low.params:
            self.tensors[f"self.{p.attr}"] = self.fresh(p.value, self.local(p.value, p.stored))
            self.params.add(f"self.{p.attr}")
        for attr, value in low.buffers:
            shape = tuple(prod(self.factor(f) for f in dim) for dim in value.dims or ())
            self.tensors[f"self.{attr}"] = self.fresh(value, shape)
        first = len(self.storages)
        self.given = frozenset(self.tensors)
        for statement in low.statements:
            self.steps.append(self._convert(statement) if isinstance(statement, Convert) else self._op(statement))
        self.num_rerun: int = self.last_kept()
        if self.kernels.megatron:
            self.keep_shards()
        if self.kernels.compiled:
            self.partition()
        elif self.kernels.fused:
            self.fuse()
        elif self.kernels.fused_norms:
            for k in Flow.of(low.statements).norms():
                self.steps[k].fusible = True
            self.fuse()
        return self._summary(inputs, first)

    def last_kept(self) -> int:
        """Return the statements up to the last tensor that is kept; torch hands over what a product keeps before it."""
        keeps = [k for k, step in enumerate(self.steps) if step.saved]
        if not keeps:
            return 0
        last, statement = self.steps[keeps[-1]], self.lowered.statements[keeps[-1]]
        inputs = {self.tensors[var].storage for var in last.reads}
        plain = isinstance(statement, Op) and op_kind(statement.node.op) in (OpKind.PRODUCT, OpKind.ELEMENTWISE)
        return keeps[-1] + (not plain or not last.saved <= inputs)

    def keep_shards(self) -> None:
        """Let products keep the shard of a gathered input, which the backward gathers (Korthikanti et al., 2022)."""
        shards: dict[int, tuple[int, int]] = {}
        for step, statement in zip(self.steps, self.lowered.statements, strict=True):
            if isinstance(statement, Convert) and statement.step.kind is ConversionKind.ALL_GATHER:
                whole, shard = (self.tensors[var].storage for var in (*step.writes, *step.reads))
                shards[whole] = (whole, shard)
                if whole in self.narrow:
                    size = self.storages[self.narrow[whole]] * self.storages[shard] // self.storages[whole]
                    shards[self.narrow[whole]] = (whole, self.new(size))
                    self.copies.setdefault(shard, set()).add(shards[self.narrow[whole]][1])
        for step in self.steps:
            for s in step.saved & shards.keys() if not step.fusible else ():
                whole, shard = shards[s]
                step.saved = step.saved - {s} | {shard}
                step.backward += self.storages[s]

    def fuse(self) -> None:
        """Let fused operations keep smaller values that the rest can be recomputed from.

        Values that products, attention and collectives keep are there anyway. In program order, a value that a fused
        operation keeps is replaced by the nearest values that it follows from through fused operations alone, if the
        ones not kept yet take fewer bytes. So a norm keeps its input in the dtype of the model instead of float32, and
        a gated activation its two halves (as Transformer Engine's kernels do). Transients remain those of single
        operations: an upper bound.
        """
        makers = self.makers()
        free = {self.tensors[var].storage for var in self.params}
        there = free.union(*(step.saved for step in self.steps if not step.fusible))

        def sources(storage: int) -> frozenset[int]:
            maker = makers.get(storage)
            if storage in there or maker is None or not maker.fusible:
                return frozenset((storage,))
            found = frozenset[int]().union(*(sources(self.tensors[v].storage) for v in maker.reads)) - {storage}
            return found if self._bytes(set(found - there)) < self.storages[storage] else frozenset((storage,))

        for step in self.steps:
            if step.fusible:
                step.saved = frozenset[int]().union(*(sources(s) for s in sorted(step.saved)))
                there |= step.saved

    def makers(self) -> dict[int, GradientStep]:
        """Return the statement that makes each storage."""
        out: dict[int, GradientStep] = {}
        for step in self.steps:
            views = {self.tensors[var].storage for var in step.reads}
            for var in step.writes:
                if self.tensors[var].storage not in views:
                    out[self.tensors[var].storage] = step
        return out

    def partition(self) -> None:
        """Let every statement keep what a compiler keeps for it (:mod:`autoplan.program.partition`).

        Transients remain those of single operations: an upper bound.
        """
        makers, there = self.makers(), least_kept(self._traced())

        def sources(storage: int) -> frozenset[int]:
            maker = makers.get(storage)
            if storage in there or maker is None:
                return frozenset((storage,))
            sums = frozenset(s for s in (self.sums.get(storage),) if s is not None)
            return sums.union(*(sources(self.tensors[v].storage) for v in maker.reads))

        for step in self.steps:
            extra = frozenset(step.extra)
            step.saved = extra.union(*(sources(s) for s in sorted(step.saved - extra)))

    def _traced(self) -> TracedBlock:
        """Return the statements as the partition sees them, with sizes relative to their greatest common divisor."""
        number = {var: i for i, var in enumerate(self.tensors)}
        traced = tuple(
            Traced(
                tuple(number[v] for v in step.reads),
                tuple(number[v] for v in step.writes),
                tuple(sorted(step.saved - set(step.extra))),
                *part,
            )
            for step, part in zip(self.steps, self.parts, strict=True)
        )
        unit = gcd(*self.storages) or 1
        given = (self.tensors[var].storage for var in self.given)
        return TracedBlock(
            traced,
            tuple(t.storage for t in self.tensors.values()),
            tuple(size // unit for size in self.storages),
            frozenset(given),
            frozenset(self.tensors[var].storage for var in self.params),
            tuple(number[v] for v in self.lowered.outputs),
        )

    def _convert(self, c: Convert) -> GradientStep:
        source, value = self.tensors[c.source], c.value
        shape, width = self.local(value, c.result), self.width(value)
        step = GradientStep((c.source,), (c.target,))
        own = prod(source.shape) * width
        if c.step.kind is ConversionKind.TO_REPLICATE:
            self.tensors[c.target] = source
        else:
            self.tensors[c.target] = self.fresh(value, shape)
            # a scatter or gather along a dim other than the first is copied into place
            copies = c.step.kind in (ConversionKind.ALL_GATHER, ConversionKind.REDUCE_SCATTER)
            sent = own if c.step.kind is ConversionKind.REDUCE_SCATTER else prod(shape) * width
            if c.step.kind is ConversionKind.ALL_TO_ALL:
                step.forward = step.backward = 2 * own
            elif copies:
                step.forward = step.backward = sent
        self.parts.append((c.step.kind in _SENDS_NOTHING, c.step.kind in _SENDS_NOTHING))
        passes = c.step.kind is ConversionKind.ALL_REDUCE and c.step.target.kind_name == "I"
        if value.requires_grad:
            step.gradients.append(MadeGradient(self._name(c.source), own, passes))
        return step

    def _name(self, var: str) -> str | None:
        return None if var in self.params else var

    def _op(self, op: Op) -> GradientStep:
        args = [a for a in op.args if a is not None]
        ins = [self.tensors[a] for a in args]
        shapes = [self.local(v, layout) for v, layout in zip(op.values, op.strategy.outputs, strict=True)]
        facts = OpFacts(
            op.node.op,
            op.node.attrs,
            tuple(TensorFacts(t.shape, self.dtype(v), v.requires_grad) for t, v in zip(ins, op.inputs, strict=True)),
            tuple(TensorFacts(s, self.dtype(v), v.requires_grad) for s, v in zip(shapes, op.values, strict=True)),
            op.strategy.special,
            self.device_type,
        )
        rule = megatron_kernels.rule_of(facts, of_op(op, self.lowered.block, self.kernels)) or saved_rule(facts)
        self.parts.append((compiled_kernels.fused(facts), compiled_kernels.again(facts)))
        saved: set[int] = set()
        forward, backward = workspace_bytes(facts, rule)
        outs = self._outputs(op, rule, ins, shapes)
        for var, out in zip(op.targets, outs, strict=True):
            self.tensors[var] = out
        known = op_record(op.node.op)
        if known.kind is OpKind.PRODUCT:
            ins, copied = self._folded(op, ins, facts)
            forward += copied
        if known.kind is OpKind.SOFTMAX and self.kernels.compiled:
            self.sums[outs[0].storage] = self.new(compiled_kernels.softmax_sums(facts))
        for name in kept(facts, rule):
            k = int(name[1:])
            tensor = (ins if name[0] == "x" else outs)[k]
            saved.add(self._float8(op, tensor) if name == "x0" else tensor.storage)
        extra = tuple(self.new(size) for size in extra_bytes(self._read(known.kind, ins, facts), rule))
        if compiled_kernels.again(facts):
            self.cheap |= {out.storage for out in outs} - {t.storage for t in ins}
        fusible = rule.form is not Form.NEW or known.kind in _FUSED
        step = GradientStep(tuple(args), op.targets, frozenset((*saved, *extra)), extra, fusible, forward, backward)
        self._gradients(step, op, rule, facts, args)
        return step

    def _read(self, kind: OpKind, ins: list[StoredTensor], facts: OpFacts) -> OpFacts:
        """Return an operation as it is compiled: a loss knows whether its logits are computed again."""
        if kind is not OpKind.LOSS or not self.kernels.compiled:
            return facts
        return replace(facts, attrs={**facts.attrs, "again": ins[0].storage in self.cheap})

    def _float8(self, op: Op, tensor: StoredTensor) -> int:
        """Return the storage that a product keeps its input in.

        The head's product is not one of Transformer Engine's, which take 8 bits.
        """
        linear = op_kind(op.node.op) is OpKind.PRODUCT and op_record(op.node.op).weights
        if not linear or not self.kernels.float8_inputs or op.targets[0] in self.logits:
            return tensor.storage
        if tensor.storage not in self.narrow:
            self.narrow[tensor.storage] = self.new(megatron_kernels.float8_bytes(tensor.shape))
            self.copies.setdefault(tensor.storage, set()).add(self.narrow[tensor.storage])
        return self.narrow[tensor.storage]

    def _gradients(self, step: GradientStep, op: Op, rule: SavedRule, facts: OpFacts, args: list[str]) -> None:
        out = facts.outputs[0]
        for var, fact in zip(args, facts.inputs, strict=True):
            if not fact.requires_grad or (var in self.params and self._accumulates(op)):
                continue
            passes = rule.gradient is Gradient.PASS or self._is_few(var)
            if op_kind(op.node.op) is OpKind.ELEMENTWISE and fact.num_elements != out.num_elements:
                # the gradient has the size of the result and is summed to the size of the operand
                passes = False
                step.backward += out.num_bytes if rule.gradient is Gradient.NEW else 0
            step.gradients.append(MadeGradient(self._name(var), fact.num_bytes, passes))
        if op.bias is not None:
            step.gradients.append(MadeGradient(None, out.shape[-1] * DTYPE_BYTES[out.dtype], False))

    def _accumulates(self, op: Op) -> bool:
        """Return True if the operation adds the gradients of its weights to the gradient buffer itself."""
        return self.kernels.adds_gradients and bool(op_record(op.node.op).weights)

    def _is_few(self, var: str) -> bool:
        return self.kernels.few_logits and var in self.logits

    def _outputs(self, op: Op, rule: SavedRule, ins: list[StoredTensor], shapes: list[Ints]) -> list[StoredTensor]:
        known = op_record(op.node.op)
        if known.kind is OpKind.ELEMENTWISE and Trait.DROPS in known.traits and not op.node.attrs["p"]:
            return [ins[0]]
        same = Trait.CAST in known.traits and self.dtype(op.inputs[0]) == self.dtype(op.values[0])
        if same or (Trait.CAST in known.traits and op.targets[0] in self.logits):
            return [ins[0]]  # the loss keeps the cast logits itself
        if known.strides is not None:
            views = known.strides(op.node.attrs, ins[0].shape, ins[0].strides, shapes)
            return [
                StoredTensor(ins[0].storage, shape, strides) if strides is not None else self.fresh(value, shape)
                for value, shape, strides in zip(op.values, shapes, views, strict=True)
            ]
        if rule.form is Form.DENSE:
            return [self.fresh(op.values[0], shapes[0], elementwise([(t.shape, t.strides) for t in ins], shapes[0]))]
        if known.kind is OpKind.PRODUCT and self._is_few(op.targets[0]):
            hidden = prod(ins[0].shape) * self.width(op.inputs[0])
            return [StoredTensor(self.new(hidden), shapes[0], contiguous(shapes[0]))]
        outs = [self.fresh(value, shape) for value, shape in zip(op.values, shapes, strict=True)]
        if known.kind is OpKind.ATTENTION:
            _, h, s, d = shapes[0]
            # in memory, the CPU's kernel and Transformer Engine put heads inside the sequence; PyTorch's CUDA kernels
            # follow the queries
            inside = (s * h * d, d, h * d, 1)
            own = self.device_type == "cpu" or self.kernels.megatron
            strides = inside if own else elementwise([(ins[0].shape, ins[0].strides)], ins[0].shape)
            if strides != inside:
                strides = contiguous(shapes[0])
            outs[0] = StoredTensor(outs[0].storage, shapes[0], strides)
        return outs

    def _folded(self, op: Op, ins: list[StoredTensor], facts: OpFacts) -> tuple[list[StoredTensor], int]:
        """Return operands as the matrix product sees them, and bytes of copies.

        Batch dims are folded into rows or expanded, as in `at::native::_matmul_impl` and `should_fold`.
        """
        a, b = ins[:2]
        if op_record(op.node.op).weights:
            b = StoredTensor(b.storage, b.shape[::-1], b.strides[::-1])
        copied = 0

        def as_shape(t: StoredTensor, which: int, new: Ints) -> StoredTensor:
            nonlocal copied
            found = reshaped(t.shape, t.strides, new)
            if found is not None:
                return StoredTensor(t.storage, new, found)
            size = prod(new) * self.width(op.inputs[which])
            copied += size
            return StoredTensor(self.new(size), new, contiguous(new))

        first, second = (a, b) if len(a.shape) >= len(b.shape) else (b.transposed(), a.transposed())
        swapped = len(a.shape) < len(b.shape)
        if len(first.shape) <= 2:
            return [a, b], 0
        if len(second.shape) <= 2:
            other = facts.inputs[0 if swapped else 1]
            if other.requires_grad or first.folds():
                rows = as_shape(first, 1 if swapped else 0, (prod(first.shape[:-1]), first.shape[-1]))
                return ([second, rows] if swapped else [rows, second]), copied
        batch = facts.outputs[0].shape[:-2]
        outs = []
        for which, t in enumerate((a, b)):
            wide = (*batch, *t.shape[-2:])
            expanded = StoredTensor(t.storage, wide, broadcast(t.shape, t.strides, wide))
            outs.append(as_shape(expanded, which, (prod(batch), *t.shape[-2:])))
        return outs, copied

    # -- the sums ------------------------------------------------------------------------------------------------------

    def _summary(self, inputs: list[int], first: int) -> Activations:
        low = self.lowered
        with_grad = [s for s, given in zip(inputs, low.inputs, strict=True) if given.value.requires_grad]
        counted = {*with_grad, *range(first, len(self.storages))}
        # outputs without a gradient (tables and indices) are assumed to be used
        outs = [(self._storage(v), low.block.values[n]) for v, n in zip(low.outputs, low.block.outputs, strict=True)]
        given = {s for s, value in outs if not value.requires_grad} & counted
        saved = given.union(*(step.saved & counted for step in self.steps))
        flow, asked = Flow.of(low.statements), self.kernels.modules
        core, found = sorted(flow.attention_core()), regions(flow, low.outputs)
        there = modules(flow, low.outputs) if asked else {}
        kept = self._choices(found, there, given, counted)
        again = by_operation(low.statements, self.steps, self.tensors)
        kept |= {} if self.kernels.megatron else {BY_OPERATION: {*given, *with_grad, *(again.kept & counted)}}
        chosen = {how: self._bytes(which) for how, which in kept.items()}
        kept |= {NONE: saved, SELECTIVE: self._without_core(core, given, counted), FULL: {*given, *with_grad}}
        saved_bytes, kept_bytes = self._bytes(saved), self._bytes(kept[FULL])
        peak, least = self._peaks(counted, with_grad, given, outs)
        transient = max(0, peak - saved_bytes)
        return Activations(
            saved_bytes=saved_bytes,
            kept_bytes=kept_bytes,
            transient_bytes=transient,
            without_expert_gradients=max(0, least - saved_bytes),
            spent_bytes=0 if self.kernels.compiled else self._spent(counted),
            selective_bytes=min(self._bytes(kept[SELECTIVE]), saved_bytes),
            selective_ops=tuple(core),
            recompute_transient_bytes=max(0, self._bytes({*saved, *with_grad}) + transient - kept_bytes),
            saved_inputs=tuple(self.storages[s] if s in saved and s in with_grad else 0 for s in inputs),
            saved_outputs=self._saved_outputs(outs, saved.difference(with_grad)),
            num_rerun=self.num_rerun,
            group_ops={**statements_by_group(found), BY_OPERATION: again.rerun},
            choice_bytes=chosen,
            ends=ends_of(kept, inputs, [s for s, _ in outs], self.storages),
            modules={name: there[name] for name in asked if name in there},
        )

    def _saved_outputs(self, outs: Sequence[tuple[int, Value]], saved: set[int]) -> Ints:
        return tuple(self.storages[s] if value.requires_grad and s in saved else 0 for s, value in outs)

    def _choices(
        self, found: Sequence[Region], there: Mapping[str, Sequence[Region]], given: set[int], counted: set[int]
    ) -> dict[str, set[int]]:
        """Return the storages kept under every choice of recompute except none, full and selective."""
        out = {name: self._left(found, name, counted) | given for name in choices(found)}
        if self.kernels.modules:
            mine = [m for name in self.kernels.modules for m in there.get(name, ())]
            out[modules_choice(self.kernels.modules)] = self._without_modules(mine, counted) | given
        return {**out, OFFLOAD: given}

    def _are(self, kind: OpKind) -> list[bool]:
        return [isinstance(s, Op) and op_kind(s.node.op) is kind for s in self.lowered.statements]

    def _spent(self, counted: set[int]) -> int:
        made = logits(self.lowered.statements)
        products = zip(self._are(OpKind.PRODUCT), self.steps, strict=True)
        heads = [is_product and not made.isdisjoint(step.writes) for is_product, step in products]
        return spent_bytes(self.steps, self._are(OpKind.LOSS), heads, self.storages, counted)

    def _storage(self, var: str) -> int:
        return self.tensors[var].storage

    def _without_core(self, core: Sequence[int], given: set[int], counted: set[int]) -> set[int]:
        """Return the storages that are kept if the attention core is recomputed."""
        kept = set(given)
        for i, step in enumerate(self.steps):
            kept |= ({self._storage(v) for v in step.reads} if i in core else step.saved) & counted
        inside = {self._storage(v) for i in core for v in self.steps[i].writes}
        return kept - (inside - {s for i, step in enumerate(self.steps) if i not in core for s in step.saved})

    def _peaks(self, counted: set[int], inputs: list[int], given: set[int], outs: Sequence[_Out]) -> tuple[int, int]:
        """Return the most bytes alive at once in forward and backward, and without the gradients of experts."""
        arriving = {
            var: prod(self.tensors[var].shape) * self.width(value)
            for var, (_, value) in zip(self.lowered.outputs, outs, strict=True)
            if value.requires_grad
        }
        experts = self._are(OpKind.EXPERTS)
        each, forward = (self.steps, without_parameters(self.steps, experts)), self._forward_peak(counted, inputs)
        peak, least = (max(forward, backward_peak(s, self.storages, counted, given, arriving)) for s in each)
        return peak, least

    def _without_modules(self, found: Sequence[Region], counted: set[int]) -> set[int]:
        """Return the storages that are kept if modules are recomputed."""
        activations = {i for m in found if m.group == "moe_act" for i in m.statements}
        inside = {i for m in found for i in m.statements} - activations
        kept: set[int] = set()
        for i, step in enumerate(self.steps):
            if i not in inside:
                rerun = {step.extra[megatron_kernels.EXPERTS_ACTIVATION]} if i in activations else set[int]()
                kept |= (step.saved & counted) - rerun
        for m in sorted(found, key=lambda m: m.statements[-1], reverse=True):
            if m.group == "moe_act":
                continue
            given = {self.tensors[v].storage for v in m.reads}
            made = {self.tensors[v].storage for i in m.statements for v in self.steps[i].writes} - given
            made |= {copy for s in made for copy in self.copies.get(s, ())}
            if made & kept or any(self.steps[i].saved for i in m.statements):
                kept |= given & counted
            kept -= made if m.group in DISCARDING else set()
        return kept

    def _left(self, found: Sequence[Region], choice: str, counted: set[int]) -> set[int]:
        """Return the storages that are kept if the regions of `choice` are recomputed."""
        chosen = [r for r in found if r.group in choice.split("+")]
        inside = {i for r in chosen for i in r.statements}
        kept: set[int] = set()
        for i, step in enumerate(self.steps):
            kept |= set[int]() if i in inside else step.saved & counted
        dropped: set[int] = set()
        for r in reversed(chosen):
            given = {self.tensors[v].storage for v in r.reads}
            made = {self.tensors[v].storage for i in r.statements for v in self.steps[i].writes} - given
            if made & kept or any(self.steps[i].saved for i in r.statements):  # else it is not needed
                kept |= given & counted
            dropped |= made
        return kept - dropped

    def _bytes(self, storages: set[int]) -> int:
        return sum(self.storages[s] for s in storages)

    def _forward_peak(self, counted: set[int], inputs: list[int]) -> int:
        """Return the most bytes alive while the emitted text runs forward."""
        ends = last_uses([(i, step.reads, step.writes) for i, step in enumerate(self.steps)], self.lowered.outputs)
        holders: dict[int, int] = dict.fromkeys(inputs, 1)
        live = peak = sum(self.storages[s] for s in inputs)
        dead: list[str] = []
        for i, (step, statement) in enumerate(zip(self.steps, self.lowered.statements, strict=True)):
            dead += ends.get(i - 1, [])
            if isinstance(statement, Convert) or op_record(statement.node.op).heavy:
                for var in dead:
                    s = self.tensors[var].storage
                    holders[s] -= 1
                    if not holders[s] and s in counted:
                        live -= self.storages[s]
                dead = []
            for s in (*step.saved, *(self.tensors[v].storage for v in step.writes)):
                if s in counted and not holders.get(s):
                    live += self.storages[s]
                holders[s] = holders.get(s, 0) + 1
            peak = max(peak, live + step.forward)
        return peak
