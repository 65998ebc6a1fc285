"""Find the repeated layers of a model and delimit them while it is traced.

Every element of an outermost `nn.ModuleList` is a layer. So are the blocks of an `nn.Sequential` or `nn.ModuleDict`,
two or more modules of one class that have modules of their own; single operations between them (a convolution, a norm)
are not layers. Where no two of the elements are alike, but those inside them are (stages of a vision model), the
layers are those inside. A model without any is divided after its trace (`capture.layers.divide`).

During the export a layer's forward is wrapped. The first of several identical layers is traced in full between two
marker ops; each of the others becomes one opaque op. The cost of a capture then does not grow with depth, while
everything outside the layers (loops, per-layer glue) is traced as it is.

Identity is proved, not assumed: same module classes, parameter and buffer shapes, tensors that are one tensor, hooks of
the modules inside (those of the layer itself run around its forward), and plain attributes. Attributes that differ
among such layers (`layer_idx`, `sliding_window`) are watched while one of them runs. Another layer is identical to it
if the attributes that were read have the same values there. Layers of alternating kinds are so traced once each.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autoplan.capture.frontend.hidden import Hidden
from autoplan.capture.frontend.hooks import same_hooks
from autoplan.capture.frontend.inputs import without_compile
from autoplan.capture.frontend.marker import empty_like_each, marker
from autoplan.capture.frontend.opened import opened

_INTERNAL = frozenset((*nn.Module().__dict__, "_compiled_call_impl"))  # a capture runs without torch.compile


# the tensors that enter a layer, and that leave it; a layer that repeats `first`, of which `like` are the results
marker("block_begin(Tensor[] xs, str layer) -> Tensor[]", empty_like_each)
marker("block_end(Tensor[] xs, str layer) -> Tensor[]", empty_like_each)
marker(
    "block_repeat(Tensor[] xs, Tensor[] like, str layer, str first) -> Tensor[]",
    lambda xs, like, layer, first: empty_like_each(like),
)
for mark in ("block_begin", "block_end", "block_repeat"):  # a layer may update buffers and return what nothing reads
    torch.fx.node.has_side_effect(getattr(torch.ops.autoplan, mark).default)


def layer_modules(model: nn.Module, lists_only: bool = False) -> dict[str, nn.Module]:
    """Return the layers by full name, in the order of the modules. Of one that torch.compile wraps, what it wraps.

    Args:
        lists_only: look for them in `nn.ModuleList` alone.
    """
    found: dict[str, nn.Module] = {}

    def visit(module: nn.Module, path: str) -> None:
        if isinstance(module, nn.ModuleList):
            elements = {name: without_compile(element) for name, element in _elements(module, path, _LISTS)}
            found.update(_repeated_inside(elements, lists_only) or elements)
        elif isinstance(module, _SEQUENCES) and not lists_only:
            inside = [(name, child, without_compile(child)) for name, child in _elements(module, path, _SEQUENCES)]
            kinds = Counter(type(element) for _, _, element in inside if _is_block(element))
            blocks = {name: element for name, _, element in inside if kinds[type(element)] > 1}
            deeper = _repeated_inside(blocks, lists_only)
            for name, child, _ in inside:
                if name not in blocks:
                    visit(child, name)
                elif deeper:
                    found.update((n, layer) for n, layer in deeper.items() if n.startswith(f"{name}."))
                else:
                    found[name] = blocks[name]
        else:
            for name, child in module.named_children():
                visit(child, f"{path}.{name}" if path else name)

    visit(model, "")
    return found


def _repeated_inside(elements: Mapping[str, nn.Module], lists_only: bool) -> dict[str, nn.Module]:
    """Return the layers that modules of one class each hold in a list, if no two of the modules are alike.

    One of the modules at least holds layers that are alike. The attention and the feed-forward of a T5 block are not:
    its blocks are layers, also where there are but two, of which only the first has the table of positions.
    """
    if len({type(element) for element in elements.values()}) != 1 or _some_alike(elements.values()):
        return {}
    found: dict[str, nn.Module] = {}
    repeated = False
    for name, element in elements.items():
        inside = layer_modules(element, lists_only)
        if not inside or any(path.count(".") > 1 for path in inside):  # a list deeper inside may be one of experts
            return {}
        found.update((f"{name}.{path}", layer) for path, layer in inside.items())
        repeated = repeated or _some_alike(inside.values())
    return found if repeated else {}


def _some_alike(modules: Iterable[nn.Module]) -> bool:
    seen = set[tuple[Any, ...]]()
    for structure in map(_structure, modules):  # mostly the second is like the first
        if structure in seen:
            return True
        seen.add(structure)
    return False


def _structure(module: nn.Module) -> tuple[Any, ...]:
    """Return what equal modules have in common: classes, and the names and kinds of their parameters and buffers.

    Of a tensor with several names, each says which one is its first.
    """
    first: dict[int, str] = {}

    def kind(tensor: torch.Tensor | None, name: str) -> Any:
        if tensor is None:
            return None
        return tensor.shape, tensor.dtype, tensor.requires_grad, first.setdefault(id(tensor), name)

    def tensors(path: str, held: Mapping[str, torch.Tensor | None]) -> tuple[Any, ...]:
        return tuple((name, kind(tensor, f"{path}.{name}")) for name, tensor in held.items())

    return tuple(
        (path, type(m), m.training, tensors(path, m._parameters), tensors(path, m._buffers))
        for path, m in module.named_modules()
    )


_LISTS = (nn.ModuleList, nn.ModuleDict)  # lists in lists are never called: their elements stand for them
_SEQUENCES = (nn.Sequential, nn.ModuleDict)


def _elements(module: nn.Module, path: str, kinds: tuple[type, ...]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules with parameters in a list or sequence, and in those nested inside it."""
    for name, child in _children(module, path):
        if isinstance(child, kinds):
            yield from _elements(child, name, kinds)
        else:
            yield name, child


def _children(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        if any(True for _ in child.parameters()):
            yield f"{path}.{name}" if path else name, child


def _is_block(module: nn.Module) -> bool:
    """Return True for a module that is made of modules with parameters, and no list of layers."""
    if isinstance(module, nn.ModuleList):
        return False
    return any(any(True for _ in child.parameters()) for child in module.children())


def block_kinds(model: nn.Module) -> dict[str, Hashable]:
    """Return the kinds of the modules that are made of modules with parameters, by path.

    The kind is the class; sequences are of one kind if their modules are of the same classes.
    """
    made = [(path, m) for path, m in model.named_modules(remove_duplicate=False) if path and _is_block(m)]
    return {path: (type(m), *map(type, m.children() if type(m) is nn.Sequential else ())) for path, m in made}


_MADE_BY_A_CLASS_STATEMENT = 1 << 9  # Py_TPFLAGS_HEAPTYPE


def _same(a: object, b: object, within: frozenset[tuple[int, int]] = frozenset()) -> bool:
    """Return True for values that are alike. `within`: the ids of the objects that hold them."""
    pair = id(a), id(b)
    if a is b or pair in within:
        return True
    if isinstance(a, nn.Module) and isinstance(b, nn.Module):
        return vars(a) is vars(b)  # torch.export makes a new object for a module whenever it is read
    if type(a) is not type(b) or isinstance(a, (nn.Module, torch.Tensor)):
        return False
    if isinstance(a, functools.partial) and isinstance(b, functools.partial):
        return all(map(_same, (a.func, a.args, a.keywords), (b.func, b.args, b.keywords)))
    if _is_plain(a):
        mine, theirs = vars(a), vars(b)
        return mine.keys() == theirs.keys() and all(_same(x, theirs[k], within | {pair}) for k, x in mine.items())
    try:
        return bool(a == b)
    except Exception:  # an attribute whose comparison fails counts as different, hence is watched
        return False


class _Plain:
    """An object whose attributes are all that there is to it."""


def _is_plain(value: object) -> bool:
    """Return True for an object of a class written in Python that has attributes alone and defines no equality.

    An example is the processor of an attention in diffusers, of which every layer has its own. Slots, and what a
    class written in C holds, make an object larger.
    """
    kind = type(value)
    in_python = bool(kind.__flags__ & _MADE_BY_A_CLASS_STATEMENT) and kind.__basicsize__ == _Plain.__basicsize__
    return in_python and kind.__eq__ is object.__eq__ and hasattr(value, "__dict__")


def _same_attribute(a: object, b: object) -> bool:
    """Return True for equal values, and for methods of the two modules that torch.compile made of one function."""
    given = [getattr(x, "_torchdynamo_orig_callable", None) for x in (a, b)]
    functions = [getattr(x, "__func__", None) for x in given]
    return _same(a, b) or (functions[0] is not None and functions[0] is functions[1])


def differing_attributes(a: nn.Module, b: nn.Module) -> set[tuple[str, str]] | None:
    """Return the (submodule path, attribute) pairs that differ; None if the modules differ in structure or hooks."""
    if _structure(a) != _structure(b) or not same_hooks(a, b):
        return None
    out: set[tuple[str, str]] = set()
    for (path, m), n in zip(a.named_modules(), b.modules(), strict=True):
        keys = (set(m.__dict__) | set(n.__dict__)) - _INTERNAL
        for key in keys:
            if key not in m.__dict__ or key not in n.__dict__ or not _same_attribute(m.__dict__[key], n.__dict__[key]):
                out.add((path, key))
    return out


def _agree(a: nn.Module, b: nn.Module, attributes: Iterable[tuple[str, str]]) -> bool:
    """Return True if these attributes, (submodule path, name), have the same values in both modules."""
    for path, key in attributes:
        left, right = a.get_submodule(path).__dict__, b.get_submodule(path).__dict__
        if (key in left) != (key in right) or (key in left and not _same(left[key], right[key])):
            return False
    return True


def _reader(watched: type, path: str, key: str, reads: set[tuple[str, str]]) -> property:
    """Return the property of class `watched` that records a read, and returns what the attribute would be without."""

    def read(self: nn.Module) -> Any:
        reads.add((path, key))
        return self.__dict__[key] if key in self.__dict__ else getattr(super(watched, self), key)

    def write(self: nn.Module, value: Any) -> None:
        self.__dict__[key] = value

    return property(read, write)


@contextmanager
def _watch(module: nn.Module, attributes: set[tuple[str, str]], reads: set[tuple[str, str]]) -> Iterator[None]:
    """Record reads of instance attributes by shadowing them with properties on a temporary subclass."""
    by_path: dict[str, set[str]] = {}
    for path, key in attributes:
        by_path.setdefault(path, set()).add(key)
    changed: list[tuple[nn.Module, type]] = []
    try:
        for path, keys in by_path.items():
            target = module.get_submodule(path)
            cls = type(target)
            changed.append((target, cls))
            watched = type(cls.__name__, (cls,), {})
            for key in keys:
                setattr(watched, key, _reader(watched, path, key, reads))
            target.__class__ = watched
        yield
    finally:
        for target, cls in changed:
            target.__class__ = cls


def _metadata(tensors: list[torch.Tensor]) -> list[tuple[Any, ...]]:
    return [(t.shape, t.dtype, t.requires_grad) for t in tensors]


def _as_text(metadata: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Return metadata with the sizes as they are by now: a model may have fixed one since."""
    return [(tuple(map(str, shape)), *rest) for shape, *rest in metadata]


_TENSOR = object()  # stands for a tensor in a layer's result

Recorded = Mapping[str, list[Any]]  # name -> tensors that hooks inside layers have recorded so far


@dataclass(frozen=True)
class _Call:
    """The arguments of a layer, flattened."""

    flat: list[Any]
    spec: Any

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [x for x in self.flat if isinstance(x, torch.Tensor)]

    @property
    def rest(self) -> list[Any]:
        return [x for x in self.flat if not isinstance(x, torch.Tensor)]

    def with_tensors(self, tensors: Iterable[torch.Tensor]) -> Any:
        """Return positional and named arguments with these tensors in place of the old ones."""
        new = iter(tensors)
        return pytree.tree_unflatten([next(new) if isinstance(x, torch.Tensor) else x for x in self.flat], self.spec)


@dataclass(frozen=True)
class _FirstCall:
    """The call of the first of several identical layers, and the form of its result.

    `reads`: the watched attributes that it read.
    `like`: the tensors that left it, first those of its result, then those that hooks recorded under the names `aside`.
    """

    layer: str
    reads: frozenset[tuple[str, str]]
    metadata: list[tuple[Any, ...]]
    spec: Any
    rest: list[Any]
    like: list[torch.Tensor]
    out_spec: Any
    template: list[Any]
    aside: list[str]

    def fits(self, call: _Call) -> bool:
        """Return True if another call differs from this one in nothing but the values of tensors."""
        rest = call.rest
        metadata = _as_text(self.metadata), _as_text(_metadata(call.tensors))
        same = metadata[0] == metadata[1] and call.spec == self.spec and len(rest) == len(self.rest)
        return same and all(map(_same, self.rest, rest))

    def rebuild(self, tensors: list[torch.Tensor], recorded: Recorded, keep: Mapping[str, int]) -> Any:
        """Return the layer's result with these tensors; the last ones replace hooks' records from entry `keep` on."""
        rest = iter(tensors)
        out = pytree.tree_unflatten([next(rest) if x is _TENSOR else x for x in self.template], self.out_spec)
        for name in dict.fromkeys(self.aside):
            del recorded[name][keep.get(name, 0) :]
        for name, tensor in zip(self.aside, rest, strict=True):
            recorded[name].append(tensor)
        return out


@dataclass
class LayerTracer:
    """A wrapper of layer forwards during one export.

    Attributes:
        recorded: returns the tensors that hooks inside the layers recorded (router logits); they leave a layer beside
            its result.
        lists_only: layers are elements of `nn.ModuleList` alone.
        expected: layers that repeat an earlier one in all likelihood. Their parameters are hidden from the trace.
        repeats: layers that did so in the last trace.
    """

    model: nn.Module
    merge: bool = True
    recorded: Callable[[], Recorded] = dict
    lists_only: bool = False
    expected: frozenset[str] = frozenset()
    repeats: set[str] = field(default_factory=set)
    hidden: Hidden = field(default_factory=Hidden)
    _kind: dict[str, str] = field(default_factory=dict)  # layer -> the first one of the same structure
    _watched: dict[str, set[tuple[str, str]]] = field(default_factory=dict)  # by kind: the attributes that differ
    _known: dict[str, list[_FirstCall]] = field(default_factory=dict)  # by kind
    _called: set[str] = field(default_factory=set)

    def reset(self) -> None:
        """Forget all calls, before the model is traced once more."""
        self._known.clear()
        self._called.clear()
        self.repeats.clear()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Patch the layers, and restore them on exit."""
        layers = layer_modules(self.model, self.lists_only)
        if self.merge:
            self._find_kinds(layers)
        with ExitStack() as stack:
            for name, layer in layers.items():
                stack.enter_context(self._patched(name, layer))
            stack.enter_context(self.hidden.layers(layers[name] for name in self.expected))
            yield

    def _find_kinds(self, layers: Mapping[str, nn.Module]) -> None:
        for name, layer in layers.items():
            for head in self._watched:
                found = differing_attributes(layers[head], layer)
                if found is not None:
                    self._kind[name] = head
                    self._watched[head] |= found
                    break
            else:
                self._kind[name] = name
                self._watched[name] = set()

    def _like(self, name: str, layer: nn.Module, call: _Call) -> _FirstCall | None:
        """Return the call of an earlier layer that this one repeats; None if it repeats none."""
        for known in self._known.get(self._kind.get(name, ""), ()):
            if known.fits(call) and _agree(self.model.get_submodule(known.layer), layer, known.reads):
                return known
        return None

    @contextmanager
    def _patched(self, name: str, layer: nn.Module) -> Iterator[None]:
        own = layer.__dict__.get("forward")  # of the instance, as torch.compile(layer.forward) makes
        layer.forward = self._wrapper(name, layer, layer.forward)
        try:
            yield
        finally:
            del layer.forward
            if own is not None:
                layer.forward = own

    def _wrapper(self, name: str, layer: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if name in self._called:
                if name in self.expected:
                    self.hidden.refuse()
                return forward(*args, **kwargs)  # a layer used twice: later uses belong to the code around it
            self._called.add(name)
            call = _Call(*pytree.tree_flatten((args, kwargs)))
            recorded = self.recorded()
            before = {key: len(found) for key, found in recorded.items()}
            known = self._like(name, layer, call)
            if known is not None:
                self.repeats.add(name)
                outs = torch.ops.autoplan.block_repeat(call.tensors, known.like, name, known.layer)
                return known.rebuild(list(outs), recorded, before)
            if name in self.expected:
                self.hidden.refuse()
            new_args, new_kwargs = call.with_tensors(torch.ops.autoplan.block_begin(call.tensors, name))
            reads: set[tuple[str, str]] = set()
            kind = self._kind.get(name, "")
            with _watch(layer, self._watched.get(kind, set()), reads):
                out = forward(*new_args, **new_kwargs)
            first, plain = _first_call(call, name, out, _put_aside(recorded, before), frozenset(reads))
            if plain and kind:
                self._known.setdefault(kind, []).append(first)
            return first.rebuild(first.like, recorded, before)

        return run


def _put_aside(recorded: Recorded, before: Mapping[str, int]) -> list[tuple[str, Any]]:
    """Return the records of hooks since there were `before` entries of each name."""
    return [(key, x) for key, found in recorded.items() for x in found[before.get(key, 0) :]]


def _first_call(
    call: _Call, name: str, out: Any, aside: list[tuple[str, Any]], reads: frozenset[tuple[str, str]]
) -> tuple[_FirstCall, bool]:
    """Return the record of a layer's call that ended with the result `out`, and whether other layers may repeat it.

    They may if its result and the records of hooks are tensors and plain values.
    """
    leaves, out_spec = pytree.tree_flatten(opened(out))
    template = [_TENSOR if isinstance(x, torch.Tensor) else x for x in leaves]
    plain = all(x is _TENSOR or isinstance(x, (bool, int, float, str, type(None))) for x in template)
    if not all(isinstance(x, torch.Tensor) for _, x in aside):
        aside, plain = [], False
    results = [*(x for x in leaves if isinstance(x, torch.Tensor)), *(x for _, x in aside)]
    ended = list(torch.ops.autoplan.block_end(results, name))
    names = [key for key, _ in aside]
    form = _metadata(call.tensors), call.spec, call.rest
    return _FirstCall(name, reads, *form, ended, out_spec, template, names), plain
