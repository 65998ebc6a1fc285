"""Translate the ATen graph of torch.export into a Trace of IR nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.export.graph_signature import InputKind

from autoplan.capture.decompose import Traces, decomposed, other_form
from autoplan.capture.draws import drawn_in_place, has_generator
from autoplan.capture.frontend.aliases import Aliases, has_tensor, is_mark
from autoplan.capture.frontend.buffers import plain_tensors
from autoplan.capture.frontend.inplace import (
    ALLOCATIONS,
    Assembly,
    Constant,
    ConstantTensor,
    Painted,
    Window,
    changed_in_place,
    cuts_at_fixed_places,
    finish,
    needed_unread,
    new_values,
    out_of_place,
    painted,
    place,
    promoted,
    record_fill,
    window,
)
from autoplan.capture.frontend.inputs import LossModule
from autoplan.capture.frontend.lengths_held import Lengths, error_kind
from autoplan.capture.generic import generic, is_pointwise, why_impure
from autoplan.capture.ops import OPS, SKIP, Arguments, lower
from autoplan.capture.places import calls_of, place_in_model, scope_of, source_of, source_within
from autoplan.capture.positions import one_copy
from autoplan.capture.trace import Repeat, Trace
from autoplan.errors import CaptureError, FormError
from autoplan.ir.fresh import FreshNames
from autoplan.ir.graph import Node, Value
from autoplan.ir.symbols import Expr
from autoplan.ops.arguments import Alias, IrOp, IrResult
from autoplan.ops.generic import has_derivative
from autoplan.ops.record import WITHOUT_AUTOCAST, OpKind, Trait
from autoplan.ops.table import op_has, op_record

_MOST_CONSTANTS = 4096  # elements of a tensor that stands in the program as numbers


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype as graphs write it: `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def _restore_users(module: fx.GraphModule) -> None:
    """Copy the graph if torch.export left a node out of the users of its arguments (Phi-4 multimodal, torch 2.13).

    Erasing such a node would fail.
    """
    if all(node in argument.users for node in module.graph.nodes for argument in node.all_input_nodes):
        return
    whole = fx.Graph()
    whole.output(whole.graph_copy(module.graph, {}))
    module.graph = whole


def _overload(target: str) -> torch._ops.OpOverload | None:
    """Return the op of this name: `aten.relu.default`."""
    namespace, name, overload = target.split(".")
    packet = getattr(getattr(torch.ops, namespace), name, None)
    found = getattr(packet, overload, None)
    return found if isinstance(found, torch._ops.OpOverload) else None


class Translator:
    """A translator of the ATen graph of one exported program into a Trace."""

    def __init__(
        self,
        program: torch.export.ExportedProgram,
        wrapper: LossModule,
        lengths: Lengths,
        names: tuple[str, ...],
    ) -> None:
        self.program = program
        self.wrapper = wrapper
        self.lengths = lengths
        self.names = names
        self.trace: Trace = Trace(changing=wrapper.changing)
        self.env: dict[fx.Node, Any] = {}
        self.layer: list[str] = []
        self.casts: bool = True  # False within a region that turns torch.autocast off
        self.within: tuple[str, ...] | None = None  # the calls of modules that the node at hand is made in
        self.unused: FreshNames = FreshNames(names)
        self.refused: dict[str, CaptureError] = {}
        self.traces: Traces = {}
        self.aliases: Aliases = Aliases()
        self.made: dict[object, IrOp] = {}
        self.buffers: dict[str, str] = {}  # name in the program -> value

    def run(self) -> Trace:
        """Translate the whole graph."""
        module = self.program.graph_module
        _restore_users(module)
        unread = needed_unread(self.program)
        # first: code that the loss does not need may use unsupported ops
        module.graph.eliminate_dead_code(lambda n: n in unread or (n.is_impure() and not is_mark(n)))
        self._placeholders()
        self._graph(module, module.graph)
        out = next(n for n in module.graph.nodes if n.op == "output").args[0]
        outputs = [n for n in out if isinstance(n, fx.Node)] if isinstance(out, (tuple, list)) else [out]
        if self.refused:
            raise self._refusals()
        for target, node in new_values(self.program).items():
            buffer, value = self.buffers[target], self._name_of(node)
            if value != buffer:
                self.trace.update(buffer, value)
        self.trace.output = self._name_of(outputs[-1])
        results = outputs[-1 - len(self.wrapper.results) : -1]
        self.trace.results = dict(zip(self.wrapper.results, map(self._name_of, results), strict=True))
        return self.trace

    def _placeholders(self) -> None:
        targets = {s.arg.name: (s.kind, s.target) for s in self.program.graph_signature.input_specs}
        params = {id(p): n for n, p in reversed(list(self.wrapper.model.named_parameters(remove_duplicate=False)))}
        buffers = {id(p): n for n, p in reversed(list(self.wrapper.model.named_buffers(remove_duplicate=False)))}
        self.plain: dict[str, Any] = plain_tensors(self.wrapper.model)
        users = iter(self.names)
        for node in self.program.graph.nodes:
            if node.op != "placeholder":
                continue
            kind, target = targets[node.name]
            if kind is InputKind.USER_INPUT:
                name = next(users)
                self.trace.inputs.append(name)
            elif kind is InputKind.PARAMETER:
                full = params[id(self.wrapper.get_parameter(target))]
                name = f"param:{full}"
                self.trace.params[name] = full
            elif kind is InputKind.BUFFER:
                full = buffers[id(self.wrapper.get_buffer(target))]
                name = self.buffers[target] = f"buffer:{full}"
                self.trace.buffers[name] = full
            else:
                found = self._constant(str(target), node)
                self.env[node] = found
                if not isinstance(found, str) or found not in self.trace.buffers:
                    continue
                name = found
            self.env[node] = name
            value = node.meta["val"]
            grad = kind is InputKind.PARAMETER and bool(self.wrapper.get_parameter(target).requires_grad)
            self.trace.values[name] = Value(name, self._shape(value), dtype_name(value.dtype), grad)

    def _constant(self, target: str, node: fx.Node) -> Constant | ConstantTensor | str:
        """Return a tensor of the model that is neither a parameter nor a buffer.

        A tensor that is an attribute of a module is a buffer. A small tensor that the forward makes stands in the
        program.
        """
        value, own = self.program.constants.get(target), target.removeprefix("model.")
        if own in self.plain:
            name = f"buffer:{own}"
            self.trace.buffers[name] = own
            return name
        if isinstance(value, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(value):
            raise CaptureError(f"the model makes a constant tensor ({own}) inside torch.vmap; make it outside")
        for user in (user for user in node.users if has_generator(user)):
            op = cast(torch._ops.OpOverload, user.target)
            raise CaptureError(f"{place_in_model(user)}: {op} cannot be captured: it {why_impure(op, user)}")
        if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
            raise CaptureError(f"the model makes a constant tensor ({own}) in its forward; register it as a buffer")
        if value.dim() == 0:
            return Constant(value.item(), dtype_name(value.dtype))
        if value.numel() > _MOST_CONSTANTS:
            raise CaptureError(
                f"the model makes a constant tensor of {value.numel():,} elements ({own}) in its forward; register it "
                "as a buffer"
            )
        return ConstantTensor(tuple(value.flatten().tolist()), node.meta["val"])

    def _graph(self, module: fx.GraphModule, graph: fx.Graph) -> None:
        for node in graph.nodes:
            if node.op == "call_function":
                self.within = calls_of(node)
                try:
                    self._node(module, node)
                except CaptureError as exc:
                    where = source_of(node)
                    named = not where or where in str(exc)
                    self._refused(node, exc if named else error_kind(exc)(f"{place_in_model(node)}: {exc}"))

    def _refused(self, node: fx.Node, why: CaptureError) -> None:
        """Note why a node cannot be captured, and go on as if it could be, to find all such nodes.

        Raises:
            CaptureError: for a node without tensors, behind which nothing could be translated.
        """
        self.refused.setdefault(str(why), why)
        value: Any = node.meta.get("val")
        values = list(value) if isinstance(value, (list, tuple)) else [value]
        try:
            outs = [Value(self.unused.fresh("refused"), self._shape(v), dtype_name(v.dtype), False) for v in values]
        except (AttributeError, CaptureError):
            raise self._refusals() from why
        self.trace.values |= {v.name: v for v in outs}
        self.env[node] = [v.name for v in outs] if isinstance(value, (list, tuple)) else outs[0].name

    def _refusals(self) -> CaptureError:
        """Return one error that lists everything that cannot be captured."""
        if len(self.refused) == 1:
            return next(iter(self.refused.values()))
        lines = [f"  {text}" for text in self.refused]
        return error_kind(*self.refused.values())("\n".join([f"{len(lines)} operations cannot be captured:", *lines]))

    def _node(self, module: fx.GraphModule, node: fx.Node) -> None:
        target = str(node.target)
        if node.target is torch.ops.higher_order.wrap_with_set_grad_enabled:
            enabled, region, *inputs = cast(tuple[Any, ...], node.args)
            self._inline(module, node, region, inputs, without_gradients=not enabled)
        elif node.target is torch.ops.higher_order.wrap_with_autocast:
            self._autocast(module, node)
        elif target in ("autoplan.block_begin.default", "autoplan.block_end.default", "autoplan.block_repeat.default"):
            self._marker(target, node)
        elif getattr(node.target, "__name__", "") == "getitem":
            self._element(node)
        elif target in SKIP or not has_tensor(node):
            return
        elif not self._in_memory(target, node):
            self._op(target, node)

    def _in_memory(self, target: str, node: fx.Node) -> bool:
        """Translate an op that makes, cuts or fills a tensor whose parts are written one by one. False: it is none."""
        if target in ALLOCATIONS:
            self.env[node] = painted(node, _MOST_CONSTANTS) or Assembly(node)
        elif (base := self._painted(node)) is not None and cuts_at_fixed_places(node):
            self.env[node] = base.part(node)
        elif target == "aten.slice.Tensor" and self._unfinished(node) is not None:
            self.env[node] = window(self.env[self._first(node)], node, source_of(node))
        elif target == "aten.select.int" and self._unfinished(node) is not None:
            self.env[node] = place(self.env[self._first(node)], node, source_of(node))
        elif target == "aten.lift_fresh_copy.default" and isinstance(self.env.get(self._first(node)), Constant):
            self.env[node] = self.env[self._first(node)]
        elif target.startswith("aten.fill_.") and isinstance(self.env.get(self._first(node)), (Window, Painted)):
            self._fill(node)
        elif isinstance(self._part_of(node), (Assembly, Window)) and (drawn := drawn_in_place(node)) is not None:
            self._drawn(node, drawn)
        elif target == "aten.copy_.default" and isinstance(self.env.get(self._first(node)), Window):
            self._copy(node, self.env[self._first(node)])
        elif target == "aten.detach.default" and isinstance(whole := self._unfinished(node), Assembly):
            self.env[node], whole.data = whole, True
        else:
            return False
        return True

    def _copy(self, node: fx.Node, written: Window) -> None:
        """Translate a tensor that is written into a slice."""
        value, where = self._name_of(cast(fx.Node, node.args[1])), source_of(node)
        if written.one:
            raise CaptureError(f"{where}: what is written into a slice must have its shape")
        if written.of.data and self.trace.values[value].requires_grad:
            raise CaptureError(f"{where}: a value with a gradient is written into data, past autograd")
        if self.trace.values[value].shape != self._shape(node.meta["val"]):
            expand = IrOp("expand", (value,), {}, dtype="")
            value = self._emit(expand, (value,), [node.meta["val"]], where, scope_of(node))[0]
        record_fill(written, value, where)
        self.env[node] = written

    def _element(self, node: fx.Node) -> None:
        source, index = cast(tuple[fx.Node, int], node.args)
        if (found := self.env[source][index]) is not None:  # no size
            self.env[node] = found

    def _fill(self, node: fx.Node) -> None:
        """Translate a number that is written into a slice."""
        written, value = self.env[self._first(node)], cast(tuple[Any, ...], node.args)[1]
        number = self.env.get(value) if isinstance(value, fx.Node) else value
        scalar = number.value if isinstance(number, Constant) else number
        if not isinstance(scalar, (bool, int, float)):
            raise CaptureError(f"{source_of(node)}: a slice can be filled with a fixed number only")
        if isinstance(written, Painted):
            written.values.fill_(scalar)
            self.env[node] = written
            return
        like = node.meta["val"].unsqueeze(written.dim) if written.one else node.meta["val"]
        item = IrOp("full", (), {"scalar": scalar})
        record_fill(written, self._emit(item, (), [like], source_of(node), scope_of(node))[0], source_of(node))
        self.env[node] = written

    def _part_of(self, node: fx.Node) -> object:
        """Return what the first argument of a node is so far; None without one."""
        return self.env.get(node.args[0]) if node.args and isinstance(node.args[0], fx.Node) else None

    def _drawn(self, node: fx.Node, target: str) -> None:
        """Translate random numbers that are written into an allocation, or into a slice of one.

        Args:
            target: the op that makes them as a new tensor.
        """
        written, parts = self.env[self._first(node)], other_form(target, node, self.traces)
        if isinstance(written, Assembly) and (written.parts or written.name):
            raise CaptureError(f"{source_of(node)}: random numbers are written over a part that has others already")
        if isinstance(written, Window) and written.one:
            raise CaptureError(f"{source_of(node)}: what is written into a slice must have its shape")
        self._replace(node, cast(fx.GraphModule, parts))
        name = cast(str, self.env[node])
        if isinstance(written, Window):
            record_fill(written, name, source_of(node))
            self.env[node] = written
        else:
            written.name = name

    @staticmethod
    def _first(node: fx.Node) -> fx.Node:
        return cast(fx.Node, node.args[0])

    def _painted(self, node: fx.Node) -> Painted | None:
        found = self.env.get(self._first(node)) if node.args and isinstance(node.args[0], fx.Node) else None
        return found if isinstance(found, Painted) else None

    def _unfinished(self, node: fx.Node) -> Assembly | Window | None:
        """Return the tensor being filled of which this node takes a slice; None if there is none."""
        found = self.env.get(self._first(node))
        return found if isinstance(found, Window) or (isinstance(found, Assembly) and not found.complete) else None

    def _autocast(self, module: fx.GraphModule, node: fx.Node) -> None:
        """Inline a torch.autocast region that is off; its products are marked. CaptureError for one that is on."""
        kind, dtype, enabled, _, region, *inputs = node.args
        if enabled:
            where = source_within(module, region) or node.name
            raise CaptureError(
                f"{where}: the model computes in a region of torch.autocast({kind!r}, {dtype}), which casts by the op; "
                "cast there by .to(dtype), or leave it to precision='bf16-autocast' or 'bf16' of autoplan.parallelize"
            )
        before, self.casts = self.casts, False
        self._inline(module, node, region, inputs)
        self.casts = before

    def _inline(
        self,
        module: fx.GraphModule,
        node: fx.Node,
        region: Any,
        inputs: Sequence[Any],
        without_gradients: bool = False,
    ) -> None:
        """Translate the nodes of a region in place. Nodes of a torch.no_grad region compute with detached inputs."""
        sub = cast(fx.GraphModule, module.get_submodule(str(region.target)))
        inner = [n for n in sub.graph.nodes if n.op == "placeholder"]
        for placeholder, actual in zip(inner, inputs, strict=True):
            found = self.env.get(actual)
            if without_gradients and isinstance(found, str) and self.trace.values[found].requires_grad:
                item = IrOp("detach", (found,), {})
                found = self._emit(item, (found,), [actual.meta["val"]], source_of(node), scope_of(node))[0]
            self.env[placeholder] = found
            placeholder.meta.setdefault("val", actual.meta.get("val"))
        self._graph(sub, sub.graph)
        out: Any = next(n for n in sub.graph.nodes if n.op == "output").args[0]
        given = {id(p): self.env.get(actual) for p, actual in zip(inner, inputs, strict=True)}

        def value(o: fx.Node) -> Any:
            if id(o) in given:
                return given[id(o)]  # a value that the region passes through keeps its gradient
            return self.env[o] if has_tensor(o) else None  # a size is read where it is used

        self.env[node] = [value(o) for o in out] if isinstance(out, (tuple, list)) else value(out)

    def _marker(self, target: str, node: fx.Node) -> None:
        args: tuple[Any, ...] = node.args
        tensors = [self._name_of(a) for a in args[0]]
        if "begin" in target:
            layer = args[1]
            self.layer.append(layer)
            self.trace.layer_inputs[layer] = tensors
            self.env[node] = tensors
        elif "end" in target:
            layer = self.layer.pop()
            self.trace.layer_outputs[layer] = tensors
            self.env[node] = tensors
        else:
            _, like, layer, first = args
            outs = []
            for i, theirs in enumerate(like):
                old = self.trace.values[self._name_of(theirs)]
                name = self.unused.fresh(f"{layer}.out{i}" if len(like) > 1 else f"{layer}.out")
                self.trace.values[name] = replace(old, name=name)
                outs.append(name)
            self.env[node] = outs
            self.trace.order.append(("repeat", len(self.trace.repeats)))
            self.trace.repeats.append(Repeat(layer, first, tuple(tensors), tuple(outs)))

    def _op(self, target: str, node: fx.Node) -> None:
        where = source_of(node)
        if not isinstance(node.target, torch._ops.OpOverload):
            name = getattr(node.target, "__name__", target)
            advice = "; write torch.vmap out in operations on the whole batch" if name.endswith("_batch_dim") else ""
            raise CaptureError(f"{where or node.name}: {name} is not a single operation and cannot be captured{advice}")
        if target not in OPS:
            target = out_of_place(target, node, self.aliases) or target
        if (single := one_copy(node)) is not None:
            self.env[node] = self._name_of(single)
            return
        try:
            result = self._lowered(target, node)
        except CaptureError as exc:
            raise error_kind(exc)(f"{place_in_model(node) or node.name}: {exc}") from exc
        if result is None:
            return
        if isinstance(result, Alias) or self._is_noop(result, node):
            self.env[node] = result.of if isinstance(result, Alias) else self._name_of(node.all_input_nodes[0])
            return
        wide = promoted(node) if target != str(node.target) else None
        self._emit_all(result if isinstance(result, list) else [result], node, wide)

    def _emit_all(self, results: list[IrOp], node: fx.Node, wide: torch.dtype | None) -> None:
        """Emit the ops that a node becomes; `wide`: computed in this dtype, and cast."""
        meta = node.meta["val"]
        made, computed, where, scope = list[str](), meta, source_of(node), scope_of(node)
        if wide is not None:
            results, computed = [*results, IrOp("to", ("$0",), {})], meta.to(wide)
        for item in results:
            before = {"$0": made[-1], **{f"#{i}": name for i, name in enumerate(made)}} if made else {}
            tensors = tuple(before.get(t, t) if t else t for t in item.tensors)
            given = meta if item is results[-1] else computed
            metas = list(given) if isinstance(given, (list, tuple)) else [given]
            names = self._emit(item, tensors, metas, where, scope)
            made.append(names[0])
            self.env[node] = names if isinstance(meta, (list, tuple)) else names[0]

    def _lowered(self, target: str, node: fx.Node) -> IrResult | None:
        """Return the IR of an op; None if its decomposition was translated instead."""
        parts = other_form(target, node, self.traces)
        if parts is not None:
            self._replace(node, parts)
            return None
        if target not in OPS:
            return self._without_record(target, node)
        try:
            return lower(target, *self._arguments(node, _overload(target)))
        except FormError as exc:
            try:
                return self._without_record(target, node)
            except CaptureError:
                raise exc from None

    def _without_record(self, target: str, node: fx.Node) -> IrOp | None:
        """Return the node of a pure op without a record; None if its decomposition was translated instead.

        A pointwise op stays whole, for the sake of its derivative.
        """
        op = _overload(target)
        if op is None or op._schema.is_mutable:
            raise self._refusal(target, node)
        if not is_pointwise(op):
            parts = decomposed(node, op, self._known, self.traces)
            if parts is not None:
                self._replace(node, parts)
                return None
        impure = why_impure(op, node)
        if impure:
            raise CaptureError(f"{target} cannot be captured: it {impure}")
        return generic(op, node, self._arguments(node, op)[0], self._size, self.made)

    @staticmethod
    def _known(node: fx.Node) -> bool:
        return str(node.target) in OPS or is_pointwise(node.target)

    def _replace(self, node: fx.Node, parts: fx.GraphModule) -> None:
        """Translate the parts of an op in its place."""
        given = [n for n in parts.graph.nodes if n.op == "placeholder"]
        for inner, actual in zip(given, node.all_input_nodes, strict=True):
            self.env[inner] = self.env.get(actual)
        self._graph(parts, parts.graph)
        out: Any = next(n for n in parts.graph.nodes if n.op == "output").args[0]
        many = isinstance(out, (tuple, list))
        names = [self.env[o] if isinstance(o, fx.Node) else None for o in (out if many else [out])]
        self.env[node] = names if many else names[0]

    def _refusal(self, target: str, node: fx.Node) -> CaptureError:
        """Return the error that says why an op that changes its argument cannot be captured."""
        if isinstance(op := node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in op.tags:
            return CaptureError(f"{target} cannot be captured: it {why_impure(op, node)}")
        if not target.split(".")[1].endswith("_"):
            return CaptureError(f"op {target} is not supported; add its record to autoplan/ops (docs/how_to_add.md)")
        cut = {n.outputs[0]: n.tensor_inputs[0] for n in self.trace.nodes if op_has(n.op, Trait.STOPS_GRADIENT)}
        held = [cut.get(x, x) for n in self.aliases.behind(self._first(node)) if isinstance(x := self.env.get(n), str)]
        for full in sorted(self.trace.buffers[name] for name in held if name in self.trace.buffers):
            return CaptureError(changed_in_place(full))
        for full in (self.trace.params[name] for name in held if name in self.trace.params):
            how = "after the optimizer's step, or do not store it: clamp() for data.clamp_()"
            return CaptureError(f"parameter {full!r} is changed in the forward by {target}; change it {how}")
        return CaptureError(f"in-place op {target} cannot be captured; write x = x + y instead of x += y")

    def _is_noop(self, result: Any, node: fx.Node) -> bool:
        """Return True for a cast to the same dtype, or a view of the same shape that moves nothing."""
        if not isinstance(result, IrOp):
            return False
        record, value = op_record(result.op), node.meta["val"]
        if record.traits.isdisjoint((Trait.CAST, Trait.RESIZES)) and record.kind is not OpKind.VIEW:
            return False
        before = self.trace.values[str(result.tensors[0])]
        if Trait.CAST in record.traits:
            return before.dtype == dtype_name(value.dtype)
        if Trait.RESIZES in record.traits:
            return before.shape == self._shape(value)
        # PyTorch transposes and squeezes tensors of one dim or none, too
        whole = isinstance(value, torch.Tensor) and value.dim() < 2 and before.shape == self._shape(value)
        return whole and Trait.STOPS_GRADIENT not in record.traits

    def _emit(self, item: IrOp, tensors: tuple[str | None, ...], metas: list[Any], where: str, scope: str) -> list[str]:
        base = self.unused.fresh(item.op)
        outs = [base] if len(metas) == 1 else [f"{base}.{i}" for i in range(len(metas))]
        inputs = [self.trace.values[t] for t in tensors if t is not None]
        passes = not op_has(item.op, Trait.STOPS_GRADIENT)
        for k, (name, meta) in enumerate(zip(outs, metas, strict=True)):
            dtype = inputs[0].dtype if item.dtype == "" else item.dtype or dtype_name(meta.dtype)
            grad = passes and any(v.requires_grad and has_derivative(item.attrs, k, i) for i, v in enumerate(inputs))
            grad = grad and ("float" in dtype or "complex" in dtype)
            self.trace.values[name] = Value(name, self._shape(meta) if item.shape is None else item.shape, dtype, grad)
        node = Node(base, item.op, tensors, tuple(outs), self._attributes(item, inputs, metas), scope, where)
        self.trace.append(node, self.layer[-1] if self.layer else "")
        self.trace.within[base] = self.within
        return outs

    def _attributes(self, item: IrOp, inputs: Sequence[Value], metas: Sequence[Any]) -> dict[str, Any]:
        attrs = {**item.attrs, **({WITHOUT_AUTOCAST: True} if op_record(item.op).multiplies and not self.casts else {})}
        if op_has(item.op, Trait.TAKES_DTYPE):
            attrs["dtype"] = item.dtype or dtype_name(metas[0].dtype)
        elif inputs and attrs.get("dtype") == inputs[0].dtype:  # as a cast to the dtype that it has
            attrs["dtype"] = None
        return attrs

    def _arguments(self, node: fx.Node, op: torch._ops.OpOverload | None) -> tuple[Arguments, dict[str, Any]]:
        """Return the given arguments and the defaults of all arguments.

        Args:
            op: the op that the node is, whose names of arguments count: `dropout_` has others than `dropout`.
        """
        schema = (op or node.target)._schema.arguments  # type: ignore[union-attr]
        out = Arguments()
        for argument, value in zip(schema, node.args, strict=False):
            out[argument.name] = self._plain(value)
        for key, value in node.kwargs.items():
            out[key] = self._plain(value)
        if "dtype" in out and isinstance(out["dtype"], torch.dtype):
            out["dtype"] = dtype_name(out["dtype"])
        out.read.clear()
        return out, {argument.name: argument.default_value for argument in schema}

    def _plain(self, value: Any) -> Any:
        if isinstance(value, fx.Node):
            meta = value.meta.get("val")
            if isinstance(meta, (torch.SymInt, torch.SymFloat, int)) and not isinstance(meta, bool):
                return self._size(meta)
            return self._name_of(value)
        if isinstance(value, (torch.SymInt, torch.SymFloat)):
            return self._size(value)
        if isinstance(value, (list, tuple)):
            return [self._plain(v) for v in value]
        return value

    def _name_of(self, node: fx.Node) -> str:
        found = self.env.get(node)
        if isinstance(found, Constant):
            item = IrOp("full", (), {"scalar": found.value})
            self.env[node] = self._emit(item, (), [node.meta["val"]], source_of(node), scope_of(node))[0]
            return cast(str, self.env[node])
        layer = self.layer[-1] if self.layer else ""
        if isinstance(found, Painted):
            key = layer, found.values._version
            if key not in found.names:
                item = IrOp("constant", (), {"values": tuple(found.values.flatten().tolist())})
                found.names[key] = self._emit(item, (), [node.meta["val"]], source_of(node), scope_of(node))[0]
            return found.names[key]
        if isinstance(found, ConstantTensor):
            if layer not in found.names:  # every layer that uses it makes its own
                item = IrOp("constant", (), {"values": found.values})
                found.names[layer] = self._emit(item, (), [found.meta], source_of(node), scope_of(node))[0]
            return found.names[layer]
        if isinstance(found, (Assembly, Window)):
            at = found.node if isinstance(found, Assembly) and not found.parts else node
            like, where, scope = node.meta["val"], source_of(at), scope_of(at)
            return finish(
                found, like, where, lambda item, meta: self._emit(item, item.tensors, [meta], where, scope)[0]
            )
        if not isinstance(found, str):
            raise CaptureError(f"{node.name} ({node.target}) is used as a tensor but is not one")
        return found

    def _shape(self, tensor: torch.Tensor) -> tuple[Expr, ...]:
        return tuple(self._size(d) for d in tensor.shape)

    def _size(self, size: Any) -> Expr:
        return self.lengths.expr(size)
