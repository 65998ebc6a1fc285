"""A backward in two parts: first what the stage before waits for, then the gradients of parameters.

Zero-bubble schedules (Qi et al., Zero Bubble Pipeline Parallelism, 2023) put the second part where a rank would wait.
The first follows the graph to the inputs only and remembers the gradients that arrive where parameters branch off; the
second continues from there, one call of autograd per place. Torch's own (torch.distributed.pipelining._backward) does
the same, and fails or computes too much where a parameter branches off at several places or where no input leads
(stages with several inputs, as in encoder-decoders), and where a block is computed again: `torch.utils.checkpoint`
repeats its forward in every call of autograd, here once for every product. Here such parameters get their gradients in
the first part.

Between the parts, a graph that autograd kept as a whole would hold more than before the first: the gradients that
arrived come on top (of a Llama layer 57 %). `Kept` lets go of what only the first part needed, which leaves about as
much as a forward does (the paper's M_W and M_B).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge, saved_tensors_hooks


class _Slot:
    """Place of a tensor that an operation keeps."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor: torch.Tensor | None = tensor


class Kept:
    """What operations keep for their backward, in places that can be emptied before autograd lets go of them.

    with kept.forward():
        outputs = module(*inputs)
    backward_input(outputs, gradients, inputs, module.parameters(), kept=kept)
    """

    def __init__(self) -> None:
        self._spent: list[_Slot] | None = None  # during a first part: what was used and is not needed again
        self._branch = False  # inside an operation that the second part runs again

    def forward(self) -> saved_tensors_hooks:
        """Open around a forward."""
        return saved_tensors_hooks(_Slot, self._get)

    def _get(self, slot: _Slot) -> torch.Tensor:
        if slot.tensor is None:
            raise RuntimeError("a second part of a backward needs what its first part gave up")
        if self._spent is not None and not self._branch:
            self._spent.append(slot)
        return slot.tensor

    def enter(self, _: object) -> None:
        """A hook before an operation that the second part runs again."""
        self._branch = True

    def leave(self, *_: object) -> None:
        """A hook after it."""
        self._branch = False

    @contextmanager
    def spending(self) -> Iterator[None]:
        """Around a first part: empties what it used."""
        self._spent = []
        try:
            yield
            for slot in self._spent:
                slot.tensor = None
        finally:
            self._spent, self._branch = None, False


@dataclass
class Deferred:
    """Parameters that branch off at one node of the graph only.

    Attributes:
        node: of the way from the outputs to the inputs.
        params: what it leads to beside that way.
        arrived: gradients of what the node made, filled in by the first part.
    """

    node: Node
    params: list[nn.Parameter]
    arrived: tuple[torch.Tensor | None, ...] = field(default=())

    def remember(self, gradients: tuple[torch.Tensor | None, ...]) -> None:
        """A hook before the node's own backward."""
        self.arrived = gradients


# Where a backward starts: an output, or the place in the graph of one that has been let go (None: it has no gradient).
Root = torch.Tensor | GradientEdge | None


def _starts(
    outputs: Sequence[Root], gradients: Sequence[torch.Tensor | None] | None
) -> list[tuple[torch.Tensor | GradientEdge, torch.Tensor | None]]:
    """The outputs that a gradient arrives at, each with it. `gradients` None: of a loss, whose gradient is one."""
    arrived = [None] * len(outputs) if gradients is None else gradients
    return [
        (t, g)
        for t, g in zip(outputs, arrived, strict=True)
        if (isinstance(t, GradientEdge) or (t is not None and t.requires_grad)) and (g is not None or gradients is None)
    ]


def backward_whole(
    outputs: Sequence[Root], gradients: Sequence[torch.Tensor | None] | None, inputs: Sequence[object]
) -> tuple[torch.Tensor | None, ...]:
    """A backward in one part: returns the gradients of the inputs; those of parameters are added to `.grad`.

    Args:
        outputs: of a stage, or its loss.
        gradients: of the outputs; None for one without. None instead of them all: ones, of a loss.
        inputs: whatever the stage was called with; what needs no gradient gets None.
    """
    starts = _starts(outputs, gradients)
    if starts:
        torch.autograd.backward([t for t, _ in starts], [g for _, g in starts])  # type: ignore[arg-type]  # a mixture
    found: list[torch.Tensor | None] = []
    for x in inputs:
        found.append(x.grad if isinstance(x, torch.Tensor) else None)
        if isinstance(x, torch.Tensor):
            x.grad = None
    return tuple(found)


def backward_input(
    outputs: Sequence[Root],
    gradients: Sequence[torch.Tensor | None] | None,
    inputs: Sequence[object],
    params: Iterable[nn.Parameter],
    at_once: Collection[nn.Parameter] = (),
    kept: Kept | None = None,
) -> tuple[tuple[torch.Tensor | None, ...], list[Deferred]]:
    """Gradients of the inputs; those of parameters that cannot wait are added to `.grad`.

    Args:
        outputs: of a stage, or its loss. Their graph is let go: they must not be differentiated again.
        gradients: of the outputs; None for one without. None instead of them all: ones, of a loss.
        inputs: whatever the stage was called with; what needs no gradient gets None.
        params: of the stage. at_once: those of them that do not wait, whatever the graph is.
        kept: what was open around the forward, if anything.

    Returns:
        One gradient per input, and what `backward_weight` does.
    """
    made = _starts(outputs, gradients)
    given = [(i, t) for i, t in enumerate(inputs) if isinstance(t, torch.Tensor) and t.requires_grad]
    out: list[torch.Tensor | None] = [None] * len(inputs)
    leaves = {get_gradient_edge(p).node: p for p in params if p.requires_grad}
    deferred, now = _branches(
        [t.node if isinstance(t, GradientEdge) else get_gradient_edge(t).node for t, _ in made],
        {get_gradient_edge(t).node for _, t in given},
        leaves,
        {id(p) for p in at_once},
    )
    if made and (given or now):
        found = _first_part(made, [*(t for _, t in given), *now], deferred, kept)
        for (i, _), gradient in zip(given, found, strict=False):
            out[i] = gradient
        _add(now, found[len(given) :])
    _let_go(outputs, {id(t) for _, t in given})
    return tuple(out), deferred


def _let_go(outputs: Sequence[Root], held: Set[int]) -> None:
    """Free the graph between the outputs and the first branch; outputs that are inputs, `held` by id, keep theirs."""
    for t in outputs:
        if isinstance(t, torch.Tensor) and t.requires_grad and id(t) not in held and not t._is_view():
            t.detach_()


def _first_part(
    made: Sequence[tuple[Root, torch.Tensor | None]],
    wanted: Sequence[torch.Tensor],
    deferred: Sequence[Deferred],
    kept: Kept | None,
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of `wanted`; those that arrive where parameters branch off are remembered."""
    handles = [d.node.register_prehook(d.remember) for d in deferred]
    if kept is not None:
        handles += [d.node.register_prehook(kept.enter) for d in deferred]
        handles += [d.node.register_hook(kept.leave) for d in deferred]
    try:
        with kept.spending() if kept is not None else nullcontext():
            return torch.autograd.grad(
                [t for t, _ in made],  # type: ignore[arg-type]  # torch takes a mixture
                wanted,
                [g for _, g in made],
                retain_graph=bool(deferred),
                allow_unused=True,
            )
    finally:
        for handle in handles:
            handle.remove()


def backward_weight(deferred: Iterable[Deferred]) -> None:
    """The rest: adds to `.grad` of the parameters, and frees their part of the graph."""
    for d in deferred:
        edges = [GradientEdge(d.node, i) for i, g in enumerate(d.arrived) if g is not None]
        if edges:
            arrived = [g for g in d.arrived if g is not None]
            _add(d.params, torch.autograd.grad(edges, d.params, arrived, allow_unused=True))
        d.arrived = ()


def _add(params: Sequence[nn.Parameter], gradients: Sequence[torch.Tensor | None]) -> None:
    """To `.grad`, as autograd's accumulation does, with what is registered to follow it."""
    for p, gradient in zip(params, gradients, strict=True):
        if gradient is None:
            continue
        if p.grad is None:
            p.grad = gradient
        else:
            p.grad += gradient
        for hook in (p._post_accumulate_grad_hooks or {}).values():
            hook(p)


def _branches(
    roots: Sequence[Node], inputs: set[Node], leaves: Mapping[Node, nn.Parameter], at_once: set[int]
) -> tuple[list[Deferred], list[nn.Parameter]]:
    """Where parameters branch off the ways from `roots` to `inputs`: what can wait, and the parameters that cannot.

    A parameter can wait if it is reached from one node of those ways only. From several, the second part would have to
    follow the ways between them again; and beside all ways there is nothing to remember.
    """
    walk = _walked(roots, inputs, leaves)
    times = {n: 2 if id(p) in at_once else 0 for n, p in leaves.items()}
    counted = [(node, 1) for node in walk.followed if walk.on_way[node]]
    counted += [(root, 2) for root in set(roots) if not walk.on_way[root]]
    for node, count in counted:
        for leaf in walk.reached[node]:
            times[leaf] += count
    deferred = []
    for node in walk.followed:
        params = [leaves[n] for n in walk.reached[node] if times[n] == 1] if walk.on_way[node] else []
        if params:
            deferred.append(Deferred(node, params))
    return deferred, [p for n, p in leaves.items() if times[n] > 1]


@dataclass
class _Walk:
    """The graph from the roots on.

    Attributes:
        followed: node -> what follows; keeps the nodes' Python objects, and with them their identity.
        on_way: node -> whether it leads to an input.
        reached: node -> leaves that it leads to; from a node on the way: those beside it.
    """

    followed: dict[Node, list[Node]] = field(default_factory=dict)
    on_way: dict[Node, bool] = field(default_factory=dict)
    reached: dict[Node, frozenset[Node]] = field(default_factory=dict)


def _walked(roots: Sequence[Node], inputs: set[Node], leaves: Mapping[Node, nn.Parameter]) -> _Walk:
    """Every node once, after all that follow it. A stack of our own: graphs are deeper than Python's."""
    walk = _Walk()
    stack = list(roots)
    while stack:
        node = stack[-1]
        if node not in walk.followed:
            walk.followed[node] = [n for n, _ in node.next_functions if n is not None]
            stack += [n for n in walk.followed[node] if n not in walk.on_way]
            continue
        stack.pop()
        if node in walk.on_way:
            continue
        after = walk.followed[node]
        walk.on_way[node] = node in inputs or any(walk.on_way[n] for n in after)
        beside = [walk.reached[n] for n in after if not walk.on_way[n]]
        own = frozenset({node}) if node in leaves else frozenset()
        # mostly one set or none: shared, not copied
        walk.reached[node] = own.union(*beside) if own or len(beside) > 1 else beside[0] if beside else own
    return walk
