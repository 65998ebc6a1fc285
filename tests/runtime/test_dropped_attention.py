"""Attention with dropout: the shares that the runtime's dropout would drop, with no tensor of all pairs kept."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from autoplan.runtime.attention import attention
from autoplan.runtime.dropout import dropout
from autoplan.runtime.mesh import AxisMesh, use_mesh

P, SITE, RNG = 0.3, 11, torch.tensor([3, 5, 7])


@pytest.fixture(autouse=True)
def mesh() -> Iterator[AxisMesh]:
    dist.init_process_group("fake", rank=3, world_size=4)
    try:
        mesh = AxisMesh([("dp", 2), ("tp", 2)], {})
        with use_mesh(mesh):
            yield mesh
    finally:
        dist.destroy_process_group()


def plain(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    window: int | None = None,
    mask: torch.Tensor | None = None,
    documents: torch.Tensor | None = None,
) -> torch.Tensor:
    """Softmax, dropout, product; this rank has the second half of the heads."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    distance = torch.arange(q.shape[2])[:, None] - torch.arange(k.shape[2])
    seen = ((distance >= 0) | (not causal)) & (distance < (window or math.inf))
    if documents is not None:
        seen = seen & (torch.where(documents < 0, ~documents, documents)[:, None, :, None] == documents[:, None, None])
    if mask is not None and mask.dtype == torch.bool:
        seen = seen & mask
    elif mask is not None:
        scores = scores + mask
    shares = scores.masked_fill(~seen, -1e300).softmax(-1).masked_fill(~seen, 0.0)
    b, heads, s, t = shares.shape
    index = ((b, b, "batch"), (heads, 2 * heads, ("tp",)), (s, s, ()), (t, t, ()))
    return dropout(shares, P, RNG, SITE, index) @ v


def beside(kind: str, s: int, t: int) -> dict[str, torch.Tensor]:
    if kind == "documents":
        return {"documents": torch.tensor([[1] * (s - 9) + [-2] * 9, [-2] * 4 + [1] * (s - 4)])}
    if kind == "seen":  # one query sees nothing
        mask = torch.rand(2, 1, s, t) > 0.3
        mask[0, 0, 3] = False
        return {"mask": mask}
    shapes = {"bias": (4, s, t), "of keys": (2, 1, 1, t)}
    return {"mask": torch.randn(shapes[kind], dtype=torch.float64)} if kind in shapes else {}


@pytest.mark.parametrize(
    ("s", "t", "how", "kind"),
    [
        (600, 600, {"causal": True}, ""),
        (40, 40, {"causal": False}, "documents"),
        (600, 600, {"causal": True, "window": 9}, ""),
        (20, 33, {"causal": False}, "seen"),
        (33, 33, {"causal": True}, "bias"),
        (20, 33, {"causal": False}, "of keys"),
    ],
)
def test_the_dropped_shares_are_those_of_dropout(s: int, t: int, how: dict[str, int], kind: str) -> None:
    """Result and gradients, of an added mask too, in float64; fewer key heads, a value head of another size."""
    torch.manual_seed(0)
    shapes = ((2, 4, s, 8), (2, 2, t, 8), (2, 2, t, 6))
    q, k, v = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    more = beside(kind, s, t)
    leaves = [q, k, v, *(x.requires_grad_() for x in more.values() if x.is_floating_point())]
    drawn = {"dropout_p": P, "rng": RNG, "site": SITE, "index": ((2, 2, "batch"), (4, 8, ("tp",)))}
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        got = attention(q, k, v, scale=None, **how, **more, **drawn)
    want = plain(q, k, v, **how, **more)
    grad = torch.randn_like(got)
    found, wanted = (torch.autograd.grad(out, leaves, grad) for out in (got, want))
    for a, b in zip((got, *found), (want, *wanted), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)
    assert max(x.numel() for x in kept) <= max(q.numel(), *(x.numel() for x in more.values()), 0)
    whole = attention(q, k, v, scale=None, **how, **more, **{**drawn, "rng": None})  # an evaluation
    assert (got - whole).abs().max() > 0.1


def test_a_rate_beyond_one_is_refused() -> None:
    q = torch.zeros(1, 1, 2, 4)
    with pytest.raises(ValueError, match=r"dropout_p is 1\.5; it must be in \[0, 1\]"):
        attention(q, q, q, causal=True, scale=None, dropout_p=1.5, rng=RNG, index=((1, 1, "batch"),))
    out = attention(q + 1, q, q + 1, causal=True, scale=None, dropout_p=1.0, rng=RNG, index=((1, 1, "batch"),))
    assert not out.any()
