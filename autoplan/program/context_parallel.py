"""What a method of context parallelism makes of attention: shapes, collectives, and what is kept for the backward.

The runtime is `autoplan.runtime.context` and `autoplan.runtime.ring`. Shapes are those of one rank, [b, h, s / c, d]
before and [b, h / u, s / r, d] behind the exchange of Ulysses, with c = u r.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from autoplan.config.context_methods import ContextMethod
from autoplan.cost_models.work import CommWork, OpWork
from autoplan.ops.saved import Form, OpFacts, SavedRule, TensorFacts, extra_bytes, kept, workspace_bytes
from autoplan.ops.table import saved_rule
from autoplan.units import DTYPE_BYTES

Shape = tuple[int, ...]


def exchanged(shape: Shape, method: ContextMethod) -> Shape:
    """Local shape of queries, keys or values behind the all-to-all."""
    b, heads, s, d = shape
    u = method.ulysses
    return (b, heads * method.repeats(heads) // u, s * u, d)


def context_comms(work: OpWork, method: ContextMethod) -> list[CommWork]:
    """Collectives of one attention, whose `work` has the shapes behind the exchange and whole keys."""
    u, r = method.ulysses, method.ranks
    query, key, value = work.inputs[:3]
    local = (query.num_bytes, key.num_bytes // r, value.num_bytes // r, work.outputs[0].num_bytes)
    grads = (query.requires_grad, key.requires_grad, value.requires_grad, work.has_backward)
    out: list[CommWork] = []

    def add(name: str, kind: str, size: float, phase: str, part: tuple[int, int], ring: int = 0) -> None:
        out.append(CommWork(name, kind, float(size), "cp", phase, part=part, behind_attention=ring))

    names = ("query", "key", "value", "output")
    if u > 1:
        for name, size, grad in zip(names, local, grads, strict=True):
            for phase in ("forward", "backward")[: 1 + grad]:
                add(name, "all_to_all", size, phase, (u, 1))
    for name, size, grad in list(zip(names, local, grads, strict=True))[1:3]:
        if method.inner == "gather":
            add(name, "all_gather", size * r, "forward", (r, u))
            if grad:
                add(name, "reduce_scatter", size * r, "backward", (r, u))
    if method.inner == "ring":
        size, both = local[1] + local[2], (grads[0] or grads[1] or grads[2]) + (grads[1] or grads[2])
        for _ in range(r - 1):
            add("key and value", "send_recv", size, "forward", (r, u), r)
            for _ in range(both):
                add("key and value", "send_recv", size, "backward", (r, u), r)
    return out


def saved_by(method: ContextMethod, gathered: Callable[[int], SavedRule], fused: bool) -> SavedRule:
    """What attention under `method` keeps, and needs while it runs.

    Args:
        gathered: the rule of attention over keys gathered from so many ranks.
        fused: kernels that gather again for the backward, and know windows.
    """

    def facts_of(f: OpFacts) -> OpFacts:
        shapes = [exchanged(t.shape, method) for t in f.inputs[:3]]
        q, k, v = (replace(t, shape=shape) for t, shape in zip(f.inputs[:3], shapes, strict=True))
        attrs = {**f.attrs, "window": None} if fused else f.attrs
        return replace(f, attrs=attrs, inputs=(q, k, v), outputs=(_like(q, v),))

    def rule_of(f: OpFacts) -> SavedRule:
        if method.inner == "ring":
            return _RING
        return gathered(method.ranks) if method.inner == "gather" and not fused else saved_rule(f)

    def extra(f: OpFacts) -> tuple[int, ...]:
        inner = facts_of(f)
        rule = rule_of(inner)
        sizes = []
        for name in kept(inner, rule):
            tensors = inner.inputs if name[0] == "x" else inner.outputs
            sizes.append(tensors[int(name[1:])].num_bytes)
        return (*sizes, *extra_bytes(inner, rule))

    def workspace(f: OpFacts) -> tuple[int, ...]:
        inner = facts_of(f)
        sizes = workspace_bytes(inner, rule_of(inner))
        sent = 2 * max(t.num_bytes for t in inner.inputs)  # by rank, before and behind the all-to-all
        return tuple(size + sent for size in sizes)

    if method.ulysses == 1:
        return _RING if method.inner == "ring" else gathered(method.ranks)
    return SavedRule((), Form.NEW, extra=extra, workspace=workspace)


def _like(q: TensorFacts, v: TensorFacts) -> TensorFacts:
    return replace(q, shape=(*q.shape[:3], v.shape[3]))


def _wide(f: OpFacts) -> int:
    """Bytes of an element of sums over the steps of a ring."""
    return max(4, DTYPE_BYTES[f.inputs[0].dtype])


def _ring_extra(f: OpFacts) -> tuple[int, ...]:
    q = f.inputs[0]
    return (q.num_elements // q.shape[-1] * _wide(f),)


def _ring_workspace(f: OpFacts) -> tuple[int, ...]:
    """Keys and values here, on their way in and packed; wide sums; in the backward, gradients of them likewise."""
    q, k, v = f.inputs[:3]
    travelling = k.num_bytes + v.num_bytes
    summed = (k.num_elements + v.num_elements) * _wide(f)
    forward = 3 * travelling + q.num_elements // q.shape[-1] * v.shape[-1] * _wide(f)
    return (forward, 5 * travelling + 2 * summed + q.num_elements * _wide(f))


_ALL = (0, 1, 2)
_RING = SavedRule(
    (("x0", _ALL), ("x1", _ALL), ("x2", _ALL), ("y0", _ALL)), Form.NEW, extra=_ring_extra, workspace=_ring_workspace
)


def frozen(chosen: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """A mapping from block to method as a key."""
    return tuple(sorted(chosen.items()))
