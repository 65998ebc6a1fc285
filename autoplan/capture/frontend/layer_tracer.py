"""Find the repeated layers of a model and delimit them while it is traced.

Every element of an outermost `nn.ModuleList` is a layer. During the export its forward is wrapped. The first of several
identical layers is traced in full between two marker ops; each of the others becomes one opaque op. The cost of a
capture then does not grow with depth, while everything outside the layers (loops, per-layer glue) is traced as it is.

Identity is proved, not assumed: same module classes, parameter and buffer shapes, and plain attributes. An attribute
that differs (`layer_idx`) is watched while the first layer runs. If it was read, the layers are traced one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

_INTERNAL = frozenset(nn.Module().__dict__)


@torch.library.custom_op("autoplan::block_begin", mutates_args=())
def block_begin(xs: list[torch.Tensor], layer: str) -> list[torch.Tensor]:
    """Mark the tensors that enter a layer."""
    return [x.clone() for x in xs]


@torch.library.custom_op("autoplan::block_end", mutates_args=())
def block_end(xs: list[torch.Tensor], layer: str) -> list[torch.Tensor]:
    """Mark the tensors that leave a layer."""
    return [x.clone() for x in xs]


@torch.library.custom_op("autoplan::block_repeat", mutates_args=())
def block_repeat(xs: list[torch.Tensor], like: list[torch.Tensor], layer: str, first: str) -> list[torch.Tensor]:
    """Stand for a layer identical to `first`. Output i has the shape and dtype of `like[i]`, an output of `first`."""
    raise RuntimeError("autoplan::block_repeat is a capture marker and cannot be run")


@block_begin.register_fake
def _(xs: list[torch.Tensor], layer: str) -> list[torch.Tensor]:
    return [torch.empty_like(x) for x in xs]


@block_end.register_fake
def _(xs: list[torch.Tensor], layer: str) -> list[torch.Tensor]:
    return [torch.empty_like(x) for x in xs]


@block_repeat.register_fake
def _(xs: list[torch.Tensor], like: list[torch.Tensor], layer: str, first: str) -> list[torch.Tensor]:
    return [torch.empty_like(x) for x in like]


def layer_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers by full name: the elements with parameters of the outermost ModuleLists."""
    found: dict[str, nn.Module] = {}

    def visit(module: nn.Module, path: str) -> None:
        for name, child in module.named_children():
            full = f"{path}.{name}" if path else name
            if isinstance(child, nn.ModuleList):
                for index, element in child.named_children():
                    if any(True for _ in element.parameters()):
                        found[f"{full}.{index}"] = element
            else:
                visit(child, full)

    visit(model, "")
    return found


def _same(a: object, b: object) -> bool:
    if a is b:
        return True
    if type(a) is not type(b) or isinstance(a, (nn.Module, torch.Tensor)):
        return False
    try:
        return bool(a == b)
    except Exception:  # an attribute whose comparison fails counts as different, hence is watched
        return False


def differing_attributes(a: nn.Module, b: nn.Module) -> set[tuple[str, str]] | None:
    """Return the (submodule path, attribute) pairs that differ; None if the modules differ in structure."""
    left, right = dict(a.named_modules()), dict(b.named_modules())
    if list(left) != list(right):
        return None
    out: set[tuple[str, str]] = set()
    for path, m in left.items():
        n = right[path]
        if type(m) is not type(n) or m.training != n.training:
            return None
        for tensors in ("_parameters", "_buffers"):
            p, q = getattr(m, tensors), getattr(n, tensors)
            if list(p) != list(q):
                return None
            for key in p:
                if (p[key] is None) != (q[key] is None):
                    return None
                if p[key] is not None and (
                    p[key].shape != q[key].shape
                    or p[key].dtype != q[key].dtype
                    or p[key].requires_grad != q[key].requires_grad
                ):
                    return None
        keys = (set(m.__dict__) | set(n.__dict__)) - _INTERNAL
        for key in keys:
            if key not in m.__dict__ or key not in n.__dict__ or not _same(m.__dict__[key], n.__dict__[key]):
                out.add((path, key))
    return out


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

            def reader(key: str, path: str = path) -> property:
                def read(self: nn.Module) -> Any:
                    reads.add((path, key))
                    return self.__dict__[key]

                return property(read)

            cls = type(target)
            changed.append((target, cls))
            target.__class__ = type(cls.__name__, (cls,), {key: reader(key) for key in keys})
        yield
    finally:
        for target, cls in changed:
            target.__class__ = cls


def _metadata(tensors: list[torch.Tensor]) -> list[tuple[Any, ...]]:
    return [(tuple(str(d) for d in t.shape), t.dtype, t.requires_grad) for t in tensors]


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

    `like`: the tensors that left it, first those of its result, then those that hooks recorded under the names `aside`.
    """

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
        same = self.metadata == _metadata(call.tensors) and call.spec == self.spec and len(rest) == len(self.rest)
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
    """A wrapper of layer forwards during one export. `unproved` collects layers whose identity the trace disproved.

    `recorded` returns the tensors that hooks inside the layers recorded (router logits); they leave a layer beside its
    result.
    """

    model: nn.Module
    merge: bool = True
    recorded: Callable[[], Recorded] = dict
    unproved: set[str] = field(default_factory=set)
    _first: dict[str, str] = field(default_factory=dict)
    _known: dict[str, _FirstCall] = field(default_factory=dict)
    _called: set[str] = field(default_factory=set)
    _watched: dict[str, set[tuple[str, str]]] = field(default_factory=dict)

    def reset(self) -> None:
        """Forget all calls, before the model is traced once more."""
        self._known.clear()
        self._called.clear()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Patch the layers, and restore them on exit."""
        layers = layer_modules(self.model)
        names = list(layers)
        if self.merge:
            heads: list[str] = []
            for name in names:
                for head in heads:
                    found = differing_attributes(layers[head], layers[name])
                    if found is not None:
                        self._first[name] = head
                        self._watched[head] |= found
                        break
                else:
                    heads.append(name)
                    self._watched[name] = set()
        with ExitStack() as stack:
            for name in names:
                stack.enter_context(self._patched(name, layers[name]))
            yield

    @contextmanager
    def _patched(self, name: str, layer: nn.Module) -> Iterator[None]:
        original = layer.forward
        layer.forward = self._wrapper(name, layer, original)
        try:
            yield
        finally:
            del layer.forward

    def _wrapper(self, name: str, layer: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if name in self._called:
                return forward(*args, **kwargs)  # a layer used twice: later uses belong to the code around it
            self._called.add(name)
            call = _Call(*pytree.tree_flatten((args, kwargs)))
            known = self._known.get(self._first.get(name, ""))
            recorded = self.recorded()
            before = {key: len(found) for key, found in recorded.items()}
            if known is not None and known.fits(call):
                outs = torch.ops.autoplan.block_repeat(call.tensors, known.like, name, self._first[name])
                return known.rebuild(list(outs), recorded, before)
            new_args, new_kwargs = call.with_tensors(torch.ops.autoplan.block_begin(call.tensors, name))
            reads: set[tuple[str, str]] = set()
            with _watch(layer, self._watched.get(name, set()), reads):
                out = forward(*new_args, **new_kwargs)
            first, plain = _first_call(call, name, out, _put_aside(recorded, before))
            if reads:
                self.unproved.add(name)
            elif plain:
                self._known[name] = first
            return first.rebuild(first.like, recorded, before)

        return run


def _put_aside(recorded: Recorded, before: Mapping[str, int]) -> list[tuple[str, Any]]:
    """Return the records of hooks since there were `before` entries of each name."""
    return [(key, x) for key, found in recorded.items() for x in found[before.get(key, 0) :]]


def _first_call(call: _Call, name: str, out: Any, aside: list[tuple[str, Any]]) -> tuple[_FirstCall, bool]:
    """Return the record of a layer's call that ended with the result `out`, and whether other layers may repeat it.

    They may if its result and the records of hooks are tensors and plain values.
    """
    leaves, out_spec = pytree.tree_flatten(out)
    template = [_TENSOR if isinstance(x, torch.Tensor) else x for x in leaves]
    plain = all(x is _TENSOR or isinstance(x, (bool, int, float, str, type(None))) for x in template)
    if not all(isinstance(x, torch.Tensor) for _, x in aside):
        aside, plain = [], False
    results = [*(x for x in leaves if isinstance(x, torch.Tensor)), *(x for _, x in aside)]
    ended = list(torch.ops.autoplan.block_end(results, name))
    names = [key for key, _ in aside]
    return _FirstCall(_metadata(call.tensors), call.spec, call.rest, ended, out_spec, template, names), plain
