"""A backward in two parts: first the gradients that the previous stage waits for, then the parameters' gradients.

Zero-bubble schedules (Qi et al., Zero Bubble Pipeline Parallelism, 2023) put the second part where a rank would
otherwise wait. The first part follows the graph only to the inputs, and remembers the gradients that arrive where
parameters branch off. The second part continues from there, with one call of autograd per branch. torch's own version
(torch.distributed.pipelining._backward) does the same, but fails or computes too much in three cases: a parameter
branches off at several places; a parameter lies on no way to an input (stages with several inputs, as in
encoder-decoders); a block is recomputed, because `torch.utils.checkpoint` repeats its forward in every call of
autograd, which would be once per matrix product. Here such parameters get their gradients in the first part.

Between the parts, a graph that autograd kept whole would hold more memory than before the first part, because the
arrived gradients come on top (57 % of a Llama layer). `Kept` frees the tensors that only the first part needs while it
goes on, which leaves about as much as a forward does (the paper's M_W and M_B), also during the first part.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge, saved_tensors_hooks


class _Slot:
    """Holds a tensor that an operation saved for its backward."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor: torch.Tensor | None = tensor


class Kept:
    """Tensors saved for the backward, in slots that can be emptied before autograd frees them.

    with kept.forward():
        outputs = module(*inputs)
    backward_input(outputs, gradients, inputs, module.parameters(), kept=kept)
    """

    def __init__(self) -> None:
        self._spent: list[_Slot] | None = None  # during a first part: slots that were used and are not needed later
        self._branch = False  # inside an operation that the second part repeats

    def forward(self) -> saved_tensors_hooks:
        """Return a context for a forward."""
        return saved_tensors_hooks(_Slot, self._get)

    def _get(self, slot: _Slot) -> torch.Tensor:
        if slot.tensor is None:
            raise RuntimeError("the second part of a backward needs a value that its first part has freed")
        if self._spent is not None and not self._branch:
            self._spent.append(slot)
        return slot.tensor

    def enter(self, _: object) -> None:
        """Hook that runs before an operation that the second part repeats. The operations before it have ended."""
        self._empty()
        self._branch = True

    def leave(self, *_: object) -> None:
        """Hook that runs after it."""
        self._branch = False

    def _empty(self) -> None:
        for slot in self._spent or ():
            slot.tensor = None
        self._spent = []

    @contextmanager
    def spending(self) -> Iterator[None]:
        """Context of a first part: empties the slots that it used, each once its operation has ended."""
        self._spent = []
        try:
            yield
            self._empty()
        finally:
            self._spent, self._branch = None, False


@dataclass
class Deferred:
    """Parameters that branch off at exactly one node of the graph.

    Attributes:
        node: the node, on the way from the outputs to the inputs.
        params: the parameters that it leads to beside that way.
        arrived: gradients of the node's results, filled in by the first part.
    """

    node: Node
    params: list[nn.Parameter]
    arrived: tuple[torch.Tensor | None, ...] = field(default=())

    def remember(self, gradients: tuple[torch.Tensor | None, ...]) -> None:
        """Hook that runs before the node's own backward."""
        self.arrived = gradients


# Where a backward starts: an output, or the graph edge of an output that was freed (None: it has no gradient).
Root = torch.Tensor | GradientEdge | None


def _starts(
    outputs: Sequence[Root], gradients: Sequence[torch.Tensor | None] | None
) -> list[tuple[torch.Tensor | GradientEdge, torch.Tensor | None]]:
    """Return the outputs that receive a gradient, each with it. `gradients` None: a loss, whose gradient is 1."""
    arrived = [None] * len(outputs) if gradients is None else gradients
    return [
        (t, g)
        for t, g in zip(outputs, arrived, strict=True)
        if (isinstance(t, GradientEdge) or (t is not None and t.requires_grad)) and (g is not None or gradients is None)
    ]


def backward_whole(
    outputs: Sequence[Root], gradients: Sequence[torch.Tensor | None] | None, inputs: Sequence[object]
) -> tuple[torch.Tensor | None, ...]:
    """Run a backward in one part: return the gradients of the inputs, and add those of parameters to `.grad`.

    Args:
        outputs: outputs of a stage, or its loss.
        gradients: gradients of the outputs, None for an output without one. None instead of the list: ones, for a loss.
        inputs: everything the stage was called with; an input that needs no gradient gets None.
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
    """Return the gradients of the inputs; add the gradients of parameters that cannot wait to `.grad`.

    Args:
        outputs: outputs of a stage, or its loss. Their graph is freed: they must not be differentiated again.
        gradients: gradients of the outputs, None for an output without one. None instead of the list: ones, for a loss.
        inputs: everything the stage was called with; an input that needs no gradient gets None.
        params: parameters of the stage.
        at_once: the parameters among them that never wait.
        kept: the Kept whose context was open around the forward, if any.

    Returns:
        One gradient per input, and the work for `backward_weight`.
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
    """Free the graph between the outputs and the first branch; outputs that are inputs (`held`, by id) keep theirs."""
    for t in outputs:
        if isinstance(t, torch.Tensor) and t.requires_grad and id(t) not in held and not t._is_view():
            t.detach_()


def _first_part(
    made: Sequence[tuple[Root, torch.Tensor | None]],
    wanted: Sequence[torch.Tensor],
    deferred: Sequence[Deferred],
    kept: Kept | None,
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of `wanted`, and remember the gradients that arrive where parameters branch off."""
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
    """Run the second part: add to `.grad` of the parameters, and free their part of the graph."""
    for d in deferred:
        edges = [GradientEdge(d.node, i) for i, g in enumerate(d.arrived) if g is not None]
        if edges:
            arrived = [g for g in d.arrived if g is not None]
            _add(d.params, torch.autograd.grad(edges, d.params, arrived, allow_unused=True))
        d.arrived = ()


def _add(params: Sequence[nn.Parameter], gradients: Sequence[torch.Tensor | None]) -> None:
    """Add to `.grad` as autograd's accumulation does, and run the hooks that follow it."""
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
    """Find where parameters branch off the ways from `roots` to `inputs`.

    A parameter can wait if exactly one node of those ways reaches it. If several do, the second part would have to
    repeat the ways between them. If none does, there is nothing to remember. If a parameter beside the way cannot wait,
    those that share operations with it cannot either.

    Returns:
        The deferred parameters, and the parameters that cannot wait.
    """
    walk = _walked(roots, inputs, leaves)
    ways = [node for node in walk.followed if walk.on_way[node]]
    waits = {n for n, times in _times(walk, roots, leaves).items() if times == 1 and id(leaves[n]) not in at_once}
    now = {n for node in walk.followed for n in walk.reached[node]} - waits
    for node in ways:
        for beside in [walk.reached[n] for n in walk.followed[node] if not walk.on_way[n]]:
            if beside & now:  # the first part frees what they share, as in a penalty on several parameters
                now |= beside
    deferred = []
    for node in ways:
        params = [leaves[n] for n in walk.reached[node] if n not in now]
        if params:
            deferred.append(Deferred(node, params))
    return deferred, [p for n, p in leaves.items() if n in now]


def _times(walk: _Walk, roots: Sequence[Node], leaves: Iterable[Node]) -> dict[Node, int]:
    """Return how many nodes of the ways reach each leaf; 2 and more if a root reaches it that leads to no input."""
    times = dict.fromkeys(leaves, 0)
    counted = [(node, 1) for node in walk.followed if walk.on_way[node]]
    counted += [(root, 2) for root in set(roots) if not walk.on_way[root]]
    for node, count in counted:
        for leaf in walk.reached[node]:
            times[leaf] += count
    return times


@dataclass
class _Walk:
    """The graph from the roots on.

    Attributes:
        followed: node -> the nodes after it; keeps the nodes' Python objects alive, and so their identity.
        on_way: node -> True if it leads to an input.
        reached: node -> the leaves that it leads to; for a node on the way: only the leaves beside the way.
    """

    followed: dict[Node, list[Node]] = field(default_factory=dict)
    on_way: dict[Node, bool] = field(default_factory=dict)
    reached: dict[Node, frozenset[Node]] = field(default_factory=dict)


def _walked(roots: Sequence[Node], inputs: set[Node], leaves: Mapping[Node, nn.Parameter]) -> _Walk:
    """Visit every node once, after all nodes that follow it. Uses its own stack: graphs are deeper than Python's.

    Plain dicts for speed: the graph is that of autograd, a new one in every micro-batch.
    """
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
        # mostly there is one set or none: shared, not copied
        walk.reached[node] = own.union(*beside) if own or len(beside) > 1 else beside[0] if beside else own
    return walk
