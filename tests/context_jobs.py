"""Jobs for processes of tests/whole/test_context.py: attention over cut sequences beside the whole of it."""

from __future__ import annotations

from typing import Any

import torch

from autoplan.runtime.attention import attention
from autoplan.runtime.context import context_part
from autoplan.runtime.mesh import AxisMesh, use_mesh


def drawn(heads: int) -> dict[str, Any]:
    """Arguments by which attention of two samples finds its mask."""
    index = ((2, 2, "batch"), (heads, heads, ()))
    return {"rng": torch.tensor([3, 5, 7]), "site": 11, "index": index}


def attention_job(
    rank: int,
    world: int,
    axes: tuple[tuple[str, int], ...],
    how: dict[str, str],
    sizes: tuple[int, int, int, int, int],
    pattern: dict[str, Any],
    dtype: str,
) -> tuple[float, float, float, float]:
    """Largest differences of the output and of the gradients of q, k and v from those of whole sequences.

    Args:
        axes: of the mesh; those of the cut sequence, product ``cp``.
        how: keywords of ``attention``.
        pattern: ``causal``, windows, chunks and the rate of dropout.
        sizes: sequence, query heads, key-value heads, head dims of keys and of values.
    """
    s, heads, groups, d, e = sizes
    g = torch.Generator().manual_seed(7)
    kind = getattr(torch, dtype)
    q, k, v, grad = (
        torch.randn(2, h, s, size, generator=g, dtype=torch.float64).to(kind)
        for h, size in ((heads, d), (groups, d), (groups, e), (heads, e))
    )
    mesh = AxisMesh(axes, {"cp": [name for name, _ in axes]} if len(axes) > 1 else {}, device_type="cpu")
    whole = [x.double().clone().requires_grad_() for x in (q, k, v)]
    given = {**pattern, "scale": 0.3, **drawn(heads)}
    with use_mesh(AxisMesh([("alone", world)], {}, device_type="cpu")):
        want = attention(*whole, **given)
    want.backward(grad.double())
    with use_mesh(mesh):
        mine = [context_part(x, "cp", 2).clone().requires_grad_() for x in (q, k, v)]
        got = attention(*mine, **given, **how)
        got.backward(context_part(grad, "cp", 2))
        pairs = [(got.detach(), want.detach()), *((m.grad, w.grad) for m, w in zip(mine, whole, strict=True))]
        return tuple((a.double() - context_part(b, "cp", 2)).abs().max().item() for a, b in pairs)  # type: ignore[return-value]


def saved_job(
    rank: int, world: int, axes: tuple[tuple[str, int], ...], how: dict[str, str], sizes: tuple[int, ...], p: float
) -> int:
    """Bytes that autograd is given of one causal attention, every storage once."""
    s, heads, groups, d, e = sizes
    q, k, v = (torch.randn(2, h, s // world, n) for h, n in ((heads, d), (groups, d), (groups, e)))
    mesh = AxisMesh(axes, {"cp": [name for name, _ in axes]} if len(axes) > 1 else {}, device_type="cpu")
    seen: dict[int, torch.UntypedStorage] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        seen[x.untyped_storage().data_ptr()] = x.untyped_storage()
        return x

    with use_mesh(mesh), torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = attention(
            *(x.requires_grad_() for x in (q, k, v)), causal=True, scale=None, dropout_p=p, **drawn(heads), **how
        )
    out.sum().backward()
    return sum(storage.nbytes() for storage in seen.values())
