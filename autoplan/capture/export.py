"""Capture: nn.Module + example inputs -> ModelGraph, by torch.export (non-strict, pre-dispatch ATen, fake tensors).

The chain, in order (`capture`): wrap model and loss -> export with symbolic batch and sequence, layers marked -> inline
no_grad regions -> translate ATen to IR ops -> cut into blocks and merge identical ones -> normalise the loss -> infer
factors -> check.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, cast

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor

from autoplan.capture.assemble import assemble
from autoplan.capture.blocks import LayerTracer
from autoplan.capture.experts import capture_experts, capture_hf_experts, refuse_separate_experts
from autoplan.capture.huggingface import capture_attention, check_masks, is_hf_model, own_hooks, recorded_outputs
from autoplan.capture.inplace import (
    ALLOCATIONS,
    FILLED,
    Assembly,
    Constant,
    Window,
    fill,
    out_of_place,
    place,
    window,
)
from autoplan.capture.ops import OPS, SKIP, Alias, Arguments, Lowered, lower
from autoplan.capture.sizes import bounds_of, export_symbolic
from autoplan.cost_models.errors import CaptureError
from autoplan.cost_models.graph import ModelGraph, Node, Parameter, Value
from autoplan.cost_models.symbols import Expr
from autoplan.rules.factors import infer_factors

LossFn = Callable[[Any, Mapping[str, torch.Tensor]], torch.Tensor]


class LossModule(nn.Module):
    """Model and loss as one module: tensors in (in the order of `names`), scalar loss out."""

    def __init__(self, model: nn.Module, names: tuple[str, ...], loss_fn: LossFn | None) -> None:
        super().__init__()
        self.model = model
        self._names, self._loss_fn = names, loss_fn
        self._model_names = model_input_names(model, names)
        self._extra: dict[str, Any] = {"use_cache": False} if is_hf_model(model) else {}

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        """The scalar loss of one micro-batch."""
        batch = dict(zip(self._names, tensors, strict=True))
        out = self.model(**{n: batch[n] for n in self._model_names}, **self._extra)
        if self._loss_fn is not None:
            return self._loss_fn(out, batch)
        loss = getattr(out, "loss", None)
        loss = out["loss"] if loss is None and isinstance(out, Mapping) and "loss" in out else loss
        loss = out if loss is None and isinstance(out, torch.Tensor) and out.dim() == 0 else loss
        if loss is None:
            raise CaptureError(
                f"{type(self.model).__name__} returned no loss; pass loss_fn=(outputs, batch) -> scalar, or labels in "
                "example_inputs"
            )
        return loss


def model_input_names(model: nn.Module, names: tuple[str, ...]) -> tuple[str, ...]:
    """Which of the batch's tensors the model's forward takes; the rest go to the loss only."""
    import inspect

    accepted = inspect.signature(model.forward).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values()):
        return names
    chosen = tuple(n for n in names if n in accepted)
    if not chosen:
        raise CaptureError(
            f"none of the inputs {', '.join(names)} is an argument of "
            f"{type(model).__name__}.forward({', '.join(accepted)})"
        )
    return chosen


@dataclass
class Trace:
    """The translated flat graph, before it is cut into blocks."""

    values: dict[str, Value] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)
    region: dict[str, str] = field(default_factory=dict)  # node name -> layer, "" outside
    inputs: list[str] = field(default_factory=list)
    params: dict[str, str] = field(default_factory=dict)  # value -> full parameter name
    buffers: dict[str, str] = field(default_factory=dict)
    layer_inputs: dict[str, list[str]] = field(default_factory=dict)  # layer -> values that enter it
    layer_outputs: dict[str, list[str]] = field(default_factory=dict)
    repeats: list[tuple[str, str, list[str], list[str]]] = field(default_factory=list)  # layer, first, in, out
    order: list[tuple[str, int]] = field(default_factory=list)  # ("node", i) | ("repeat", i), program order
    output: str = ""


def capture(
    model: nn.Module,
    example_inputs: Mapping[str, torch.Tensor],
    loss_fn: LossFn | None = None,
) -> ModelGraph:
    """Capture `model` and its loss.

    Args:
        model: an ordinary module (its classes untouched; parameters may be on any device, also fake or meta).
        example_inputs: name -> tensor; dim 0 is the batch, dim 1 the sequence where it equals the first input's, or a
            second sequence with a length of its own (`autoplan.capture.lengths`). Only shapes and dtypes matter.
        loss_fn: `(model output, batch) -> scalar`; not needed if the model returns a loss (Hugging Face with `labels`).

    Returns: a checked ModelGraph with factors; its loss is a sum over valid tokens divided by the input
        `loss_denominator`.
    Raises: CaptureError naming the op and the source line that cannot be captured.
    """
    check_masks(model, example_inputs)
    if is_hf_model(model):
        refuse_separate_experts(model)
    graph = _capture(model, example_inputs, loss_fn, merge=True)
    if graph is None:  # a layer read an attribute in which it differs from the others: trace them one by one
        graph = _capture(model, example_inputs, loss_fn, merge=False)
    if graph is None:
        raise CaptureError(f"{type(model).__name__}: layers could not be delimited")
    return infer_factors(graph).in_order()


def _capture(
    model: nn.Module, example_inputs: Mapping[str, torch.Tensor], loss_fn: LossFn | None, *, merge: bool
) -> ModelGraph | None:
    names = tuple(example_inputs)
    wrapper = LossModule(model, names, loss_fn)
    tracer = LayerTracer(model, merge, recorded_outputs if is_hf_model(model) else dict)
    with ExitStack() as stack:
        stack.enter_context(tracer.active())  # first: what is patched below differs from layer to layer
        stack.enter_context(capture_experts(model))
        if is_hf_model(model):
            stack.enter_context(capture_attention(model, names))
            stack.enter_context(capture_hf_experts(model))
            stack.enter_context(own_hooks(model))
        program, symbols = export_symbolic(wrapper, example_inputs, tracer)
    bounds = bounds_of(program, symbols, type(model).__name__)
    if tracer.unproved and merge:
        return None
    trace = _Translator(program, wrapper, symbols, names).run()
    graph = assemble(trace, type(model).__name__, *_parameters(model))
    return graph if graph is None else replace(graph, bounds=bounds)


def _parameters(model: nn.Module) -> tuple[dict[str, Parameter], dict[str, Parameter]]:
    """Parameters and buffers by their first name; further names of the same tensor are aliases."""

    def collect(pairs: Any) -> dict[str, Parameter]:
        names: dict[int, list[str]] = {}
        tensors: dict[int, torch.Tensor] = {}
        for name, tensor in pairs:
            names.setdefault(id(tensor), []).append(name)
            tensors[id(tensor)] = tensor
        out = {}
        for key, mine in names.items():
            t = tensors[key]
            out[mine[0]] = Parameter(mine[0], tuple(t.shape), _dtype(t.dtype), bool(t.requires_grad), tuple(mine[1:]))
        return out

    return (
        collect(model.named_parameters(remove_duplicate=False)),
        collect(model.named_buffers(remove_duplicate=False)),
    )


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def source_of(node: fx.Node) -> str:
    """'file:line' of the user's code that made the node (base name only)."""
    found = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    if found and found[-1][0] == __file__:
        return "the loss function"  # torch records no frame inside it, only our call of it
    return f"{found[-1][0].rsplit('/', 1)[-1]}:{found[-1][1]}" if found else ""


def _scope_of(node: fx.Node) -> str:
    """Path of the module whose forward made the node, relative to the user's model."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return str(stack[-1][0]).removeprefix("model").removeprefix(".") if stack else ""


class _Translator:
    """ATen graph -> Trace."""

    def __init__(
        self,
        program: torch.export.ExportedProgram,
        wrapper: LossModule,
        symbols: dict[str, str],
        names: tuple[str, ...],
    ) -> None:
        self.program, self.wrapper, self.symbols, self.names = program, wrapper, symbols, names
        self.trace = Trace()
        self.env: dict[fx.Node, Any] = {}
        self.layer: list[str] = []
        self.no_grad = False
        self.cut: set[str] = set()  # made without gradients, though of values that have them
        self.counter: dict[str, int] = {}

    def run(self) -> Trace:
        """Translate the whole graph."""
        module = self.program.graph_module
        module.graph.eliminate_dead_code()  # first: what the loss does not need also need not be supported
        self._placeholders()
        self._graph(module, module.graph)
        out = next(n for n in module.graph.nodes if n.op == "output").args[0]
        outputs = [n for n in out if isinstance(n, fx.Node)] if isinstance(out, (tuple, list)) else [out]
        if self.program.graph_signature.buffers_to_mutate:
            raise CaptureError(self._mutated(min(self.program.graph_signature.buffers_to_mutate.values())))
        self.trace.output = self._name_of(outputs[-1])
        return self.trace

    @staticmethod
    def _mutated(name: str) -> str:
        return (
            f"buffer {name!r} is changed in the forward (BatchNorm statistics?); its value would depend on the split: "
            "use LayerNorm, GroupNorm or eval() mode for that module"
        )

    def _placeholders(self) -> None:
        from torch.export.graph_signature import InputKind

        targets = {s.arg.name: (s.kind, s.target) for s in self.program.graph_signature.input_specs}
        params = {id(p): n for n, p in reversed(list(self.wrapper.model.named_parameters(remove_duplicate=False)))}
        buffers = {id(p): n for n, p in reversed(list(self.wrapper.model.named_buffers(remove_duplicate=False)))}
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
                name = f"buffer:{full}"
                self.trace.buffers[name] = full
            else:
                self.env[node] = self._constant(str(target))
                continue
            self.env[node] = name
            value = node.meta["val"]
            grad = kind is InputKind.PARAMETER and bool(self.wrapper.get_parameter(target).requires_grad)
            self.trace.values[name] = Value(name, self._shape(value), _dtype(value.dtype), grad)

    def _constant(self, target: str) -> Constant:
        value = self.program.constants.get(target)
        if not isinstance(value, torch.Tensor) or value.dim() > 0 or isinstance(value, FakeTensor):
            raise CaptureError(f"the model makes a constant tensor ({target}) in its forward; register it as a buffer")
        return Constant(value.item(), _dtype(value.dtype))

    def _graph(self, module: fx.GraphModule, graph: fx.Graph) -> None:
        for node in graph.nodes:
            if node.op == "call_function":
                self._node(module, node)

    def _node(self, module: fx.GraphModule, node: fx.Node) -> None:
        target = str(node.target)
        if node.target is torch.ops.higher_order.wrap_with_set_grad_enabled:
            self._inline(module, node)
        elif target in ("autoplan.block_begin.default", "autoplan.block_end.default", "autoplan.block_repeat.default"):
            self._marker(target, node)
        elif getattr(node.target, "__name__", "") == "getitem":
            source, index = cast(tuple[fx.Node, int], node.args)
            self.env[node] = self.env[source][index]
        elif target in SKIP or not self._has_tensor(node):
            return
        elif target in ALLOCATIONS:
            self.env[node] = Assembly(node)
        elif target == "aten.slice.Tensor" and self._unfinished(node) is not None:
            self.env[node] = window(self.env[self._first(node)], node, source_of(node))
        elif target == "aten.select.int" and self._unfinished(node) is not None:
            self.env[node] = place(self.env[self._first(node)], node, source_of(node))
        elif target == "aten.lift_fresh_copy.default" and isinstance(self.env.get(self._first(node)), Constant):
            self.env[node] = self.env[self._first(node)]
        elif target.startswith("aten.fill_.") and isinstance(self.env.get(self._first(node)), Window):
            self._fill(node)
        elif target == "aten.copy_.default" and isinstance(self.env.get(self._first(node)), Window):
            value = self._name_of(cast(fx.Node, node.args[1]))
            target_place = self.env[self._first(node)]
            if target_place.one or self.trace.values[value].shape != self._shape(node.meta["val"]):
                raise CaptureError(f"{source_of(node)}: what is written into a slice must have its shape")
            fill(target_place, value, source_of(node))
            self.env[node] = target_place
        else:
            self._op(target, node)

    def _fill(self, node: fx.Node) -> None:
        """A number written into a slice."""
        written, value = self.env[self._first(node)], cast(tuple[Any, ...], node.args)[1]
        number = self.env.get(value) if isinstance(value, fx.Node) else value
        scalar = number.value if isinstance(number, Constant) else number
        if not isinstance(scalar, (bool, int, float)):
            raise CaptureError(f"{source_of(node)}: a slice can be filled with a fixed number only")
        like = node.meta["val"].unsqueeze(written.dim) if written.one else node.meta["val"]
        item = Lowered("full", (), {"scalar": scalar})
        fill(written, self._emit(item, (), [like], source_of(node), _scope_of(node))[0], source_of(node))
        self.env[node] = written

    @staticmethod
    def _first(node: fx.Node) -> fx.Node:
        return cast(fx.Node, node.args[0])

    def _unfinished(self, node: fx.Node) -> Assembly | Window | None:
        """The tensor that is being filled of which this node takes a slice, if it does."""
        found = self.env.get(self._first(node))
        return found if isinstance(found, Window) or (isinstance(found, Assembly) and not found.complete) else None

    @staticmethod
    def _has_tensor(node: fx.Node) -> bool:
        value = node.meta.get("val")
        if isinstance(value, (list, tuple)):
            return any(isinstance(v, torch.Tensor) for v in value)
        return isinstance(value, torch.Tensor)

    def _inline(self, module: fx.GraphModule, node: fx.Node) -> None:
        """A torch.no_grad region: its nodes in place, without gradients."""
        args: tuple[Any, ...] = node.args
        enabled, sub = args[0], cast(fx.GraphModule, module.get_submodule(str(args[1].target)))
        before, self.no_grad = self.no_grad, self.no_grad or not enabled
        inner = [n for n in sub.graph.nodes if n.op == "placeholder"]
        for placeholder, actual in zip(inner, args[2:], strict=True):
            self.env[placeholder] = self.env.get(actual)
            placeholder.meta.setdefault("val", actual.meta.get("val"))
        self._graph(sub, sub.graph)
        out: Any = next(n for n in sub.graph.nodes if n.op == "output").args[0]
        several = isinstance(out, (tuple, list))
        results = [self._without_gradient(o) for o in (out if several else (out,))]
        self.env[node] = results if several else results[0]
        self.no_grad = before

    def _without_gradient(self, node: fx.Node) -> Any:
        """What leaves a region without gradients: detached, where the program would have one."""
        found = self.env[node]
        value = self.trace.values.get(found) if isinstance(found, str) else None
        if value is None or not self.no_grad or not (found in self.cut or value.requires_grad):
            return found
        if "float" not in value.dtype:
            return found
        item = Lowered("detach", (found,), {})
        return self._emit(item, item.tensors, [node.meta["val"]], source_of(node), _scope_of(node))[0]

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
                name = self._fresh(f"{layer}.out{i}" if len(like) > 1 else f"{layer}.out")
                self.trace.values[name] = replace(old, name=name)
                outs.append(name)
                if self._name_of(theirs) in self.cut:
                    self.cut.add(name)
            self.env[node] = outs
            self.trace.order.append(("repeat", len(self.trace.repeats)))
            self.trace.repeats.append((layer, first, tensors, outs))

    def _op(self, target: str, node: fx.Node) -> None:
        where = source_of(node)
        if target not in OPS:
            changed = self.env.get(node.args[0]) if node.args and isinstance(node.args[0], fx.Node) else None
            done = isinstance(changed, Assembly) and changed.complete
            windows = {n for n, v in self.env.items() if done and isinstance(v, Window) and v.of is changed}
            whole = {n for n, v in self.env.items() if done and v is changed and n is not node.args[0]}
            target = out_of_place(target, node, windows | whole) or target
        if target not in OPS:
            if target.split(".")[1].endswith("_"):
                changed = self.env.get(cast(fx.Node, node.args[0]))
                if changed in self.trace.buffers:
                    raise CaptureError(self._mutated(self.trace.buffers[changed]))
                raise CaptureError(
                    f"in-place op {target} at {where} cannot be captured; write x = x + y instead of x += y"
                )
            raise CaptureError(
                f"op {target} at {where or node.name} is not supported; add it to autoplan.capture.ops.OPS and its "
                "rule to autoplan.rules.table"
            )
        try:
            result = lower(target, *self._arguments(node))
        except CaptureError as exc:
            raise CaptureError(f"{where or node.name}: {exc}") from exc
        meta = node.meta["val"]
        if isinstance(result, Alias) or self._is_noop(result, node):
            self.env[node] = result.of if isinstance(result, Alias) else self._name_of(node.all_input_nodes[0])
            return
        results = result if isinstance(result, list) else [result]
        previous = ""
        for item in results:
            tensors = tuple(previous if t == "$0" else t for t in item.tensors)
            metas = list(meta) if isinstance(meta, (list, tuple)) else [meta]
            names = self._emit(item, tensors, metas, where, _scope_of(node))
            previous = names[0]
            self.env[node] = names if isinstance(meta, (list, tuple)) else names[0]

    def _is_noop(self, result: Any, node: fx.Node) -> bool:
        """A cast to the same dtype, or a reshape/expand to the same shape."""
        if not isinstance(result, Lowered) or result.op not in ("to", "reshape", "expand"):
            return False
        before = self.trace.values[str(result.tensors[0])]
        value = node.meta["val"]
        if result.op == "to":
            return before.dtype == _dtype(value.dtype)
        return before.shape == self._shape(value)

    def _emit(
        self, item: Lowered, tensors: tuple[str | None, ...], metas: list[Any], where: str, scope: str
    ) -> list[str]:
        base = self._fresh(item.op)
        outs = [base] if len(metas) == 1 else [f"{base}.{i}" for i in range(len(metas))]
        inputs = [self.trace.values[t] for t in tensors if t is not None]
        for name, meta in zip(outs, metas, strict=True):
            dtype = _dtype(meta.dtype)
            grad = (
                any(v.requires_grad for v in inputs) and not self.no_grad and item.op != "detach" and "float" in dtype
            )
            self.trace.values[name] = Value(name, self._shape(meta), dtype, grad)
        if self.no_grad and item.op != "detach" and any(v.requires_grad or v.name in self.cut for v in inputs):
            self.cut.update(outs)
        attrs = {k: v for k, v in item.attrs.items()}
        if item.op in ("to", "arange", "full"):
            attrs["dtype"] = _dtype(metas[0].dtype)
        elif inputs and attrs.get("dtype") == inputs[0].dtype:  # as a cast to the dtype that it has
            attrs["dtype"] = None
        node = Node(base, item.op, tensors, tuple(outs), attrs, scope, where)
        self.trace.order.append(("node", len(self.trace.nodes)))
        self.trace.nodes.append(node)
        self.trace.region[base] = self.layer[-1] if self.layer else ""
        return outs

    def _fresh(self, base: str) -> str:
        count = self.counter.get(base, 0)
        self.counter[base] = count + 1
        return base if count == 0 else f"{base}_{count}"

    def _arguments(self, node: fx.Node) -> tuple[Arguments, dict[str, Any]]:
        """Those given, and the defaults of all."""
        schema = node.target._schema.arguments  # type: ignore[union-attr]
        out = Arguments()
        for argument, value in zip(schema, node.args, strict=False):
            out[argument.name] = self._plain(value)
        for key, value in node.kwargs.items():
            out[key] = self._plain(value)
        if "dtype" in out and isinstance(out["dtype"], torch.dtype):
            out["dtype"] = _dtype(out["dtype"])
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
            item = Lowered("full", (), {"scalar": found.value})
            self.env[node] = self._emit(item, (), [node.meta["val"]], source_of(node), _scope_of(node))[0]
            return cast(str, self.env[node])
        if isinstance(found, Assembly):
            filler = FILLED.get(str(found.node.target))
            if not found.name and not found.parts and filler is not None:
                item = Lowered("full", (), {"scalar": filler})
                meta = found.node.meta["val"]
                found.name = self._emit(item, (), [meta], source_of(found.node), _scope_of(found.node))[0]
            if not found.name:
                pieces = found.pieces()
                if pieces is None:
                    raise CaptureError(f"{source_of(node)}: a tensor is used before all of it is written")
                parts = tuple(pieces)
                item = Lowered("cat", parts, {"dim": found.dim})
                found.name = self._emit(item, parts, [node.meta["val"]], source_of(node), _scope_of(node))[0]
            return found.name
        if not isinstance(found, str):
            raise CaptureError(f"{node.name} ({node.target}) is used as a tensor but is not one")
        return found

    def _shape(self, tensor: torch.Tensor) -> tuple[Expr, ...]:
        return tuple(self._size(d) for d in tensor.shape)

    def _size(self, size: Any) -> Expr:
        if isinstance(size, int):
            return Expr.of(size)
        return self._sympy(size.node.expr)

    def _sympy(self, expr: Any) -> Expr:
        if expr.is_Integer:
            return Expr.of(int(expr))
        if expr.is_Rational:
            return Expr.of(Fraction(int(expr.p), int(expr.q)))
        if expr.is_Float:
            return Expr.of(Fraction(float(expr)))
        if type(expr).__name__ == "ToFloat":  # torch's float(size)
            return self._sympy(expr.args[0])
        if expr.is_Symbol:
            if str(expr) not in self.symbols:
                raise CaptureError(f"size {expr} depends on the data, not only on batch and sequence lengths")
            return Expr.symbol(self.symbols[str(expr)])
        if expr.is_Add or expr.is_Mul:
            total = Expr.of(0 if expr.is_Add else 1)
            for part in expr.args:
                total = total + self._sympy(part) if expr.is_Add else total * self._sympy(part)
            return total
        if expr.is_Pow and expr.exp.is_Integer and int(expr.exp) > 0:
            total = Expr.of(1)
            for _ in range(int(expr.exp)):
                total = total * self._sympy(expr.base)
            return total
        raise CaptureError(f"size {expr} is not a polynomial in batch and sequence")
