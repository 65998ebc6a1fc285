"""Attention with sinks or capped scores equals the softmax of all scores at once, in every form."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck

from autoplan.runtime import attention as runtime_attention
from autoplan.runtime import parts
from autoplan.runtime.attention import attention
from autoplan.runtime.in_parts import attention_in_parts, parts_of_queries
from autoplan.runtime.parts import Pattern, same_document

B, H, KV, D = 2, 4, 2, 6


def plainly(
    q, k, v, sinks, *, causal, scale, window=None, documents=None, softcap=None, ahead=None, chunk=None, first=None
):
    """As `eager_attention_forward` of GPT-OSS and of Gemma 2 computes it, with the masks of Llama 4 and ModernBERT."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    s, t = scores.shape[2:]
    query, key = torch.arange(s)[:, None] + (t - s if first is None else first), torch.arange(t)
    distance = query - key
    seen = (distance >= 0) | (not causal)
    seen &= (distance < (t if window is None else window)) & (distance >= -(t if ahead is None else ahead))
    if chunk is not None:
        seen &= query // chunk == key // chunk
    if documents is not None:
        seen = seen & same_document(*documents)[:, None]
    scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
    if sinks is None:
        return scores.softmax(-1) @ v
    shares = torch.cat((scores, sinks.reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)), -1).softmax(-1)
    return shares[..., :-1] @ v


def tensors(s, t, width=D, dtype=torch.float64):
    torch.manual_seed(0)
    shapes = (B, H, s, D), (B, KV, t, D), (B, KV, t, width), (H,)
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


CASES = {
    "causal": dict(s=9, t=9, causal=True),
    "all": dict(s=5, t=9, causal=False),
    "window": dict(s=9, t=9, causal=True, window=3),
    "a long window": dict(s=9, t=9, causal=True, window=20),
    "queries at the end": dict(s=4, t=9, causal=True),
    "queries at the end, window": dict(s=4, t=9, causal=True, window=3),
    "capped": dict(s=9, t=9, causal=True, softcap=0.7),
    "capped, queries at the end, window": dict(s=4, t=9, causal=True, window=3, softcap=0.7),
    "capped, all": dict(s=5, t=9, causal=False, softcap=0.7),
    "wider values": dict(s=9, t=9, causal=True, width=8),
    "two sides": dict(s=9, t=9, causal=False, window=3, ahead=1),
    "two sides, all but few": dict(s=9, t=9, causal=False, window=8, ahead=7),
    "two sides, more before": dict(s=9, t=9, causal=False, window=20, ahead=2),
    "two sides, queries between keys": dict(s=3, t=9, causal=False, window=3, ahead=2, first=3),
    "two sides, documents": dict(s=9, t=9, causal=False, window=3, ahead=2, documents=True),
    "two sides, capped": dict(s=9, t=9, causal=False, window=3, ahead=2, softcap=0.7),
    "chunks": dict(s=9, t=9, causal=True, chunk=3),
    "chunks, the last one short": dict(s=9, t=9, causal=True, chunk=4),
    "chunks of one token": dict(s=9, t=9, causal=True, chunk=1),
    "chunks, queries at the end": dict(s=4, t=9, causal=True, chunk=7),
    "chunks, queries inside": dict(s=5, t=9, causal=True, chunk=3, first=1),
    "chunks, capped": dict(s=9, t=9, causal=True, chunk=4, softcap=0.7),
    "documents": dict(s=9, t=9, causal=True, documents=True),
    "documents, queries at the end, window": dict(s=4, t=9, causal=True, window=5, documents=True),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("block", [2, 512])
@pytest.mark.parametrize("with_sinks", [True, False])
def test_it_is_what_all_scores_at_once_give(name, block, with_sinks, monkeypatch):
    monkeypatch.setattr(parts, "ROW_BLOCK", block)
    case = dict(CASES[name])
    s, t, width = case.pop("s"), case.pop("t"), case.pop("width", D)
    if case.pop("documents", False):
        ids = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1, 1, 2, 2]])
        case["documents"] = ids[:, t - s :], ids
    given = tensors(s, t, width)[: 3 + with_sinks]
    sinks = given[3] if with_sinks else None
    want = plainly(*given[:3], sinks, scale=0.3, **case)
    grad = torch.randn_like(want)
    wanted = torch.autograd.grad(want, given, grad)
    beside = {name: case.pop(name, None) for name in ("documents", "first")}
    got = attention_in_parts(*given[:3], Pattern(scale=0.3, **case), sinks=sinks, **beside)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    for mine, theirs in zip(torch.autograd.grad(got, given, grad), wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-11)


def test_a_query_that_sees_no_key_gives_zero_and_no_gradient():
    """A sample of nothing but padding: all its weight goes to the sink."""
    *given, sinks = tensors(4, 4)
    hidden = torch.arange(4).repeat(B, 1)
    ids = hidden + torch.tensor([[0], [100]])  # no key of the second sample is of a query's document
    out = attention_in_parts(*given, Pattern(True), sinks=sinks, documents=(ids, hidden))
    assert (out[1] == 0).all() and (out[0] != 0).all()
    grads = torch.autograd.grad(out.sum(), [*given, sinks])
    assert all(torch.isfinite(g).all() for g in grads)
    assert all((g[1] == 0).all() and (g[0] != 0).any() for g in grads[:3])


def test_the_gradients_are_those_of_finite_differences():
    given = tensors(4, 4)
    assert gradcheck(lambda *x: attention(*x[:3], causal=True, scale=None, sinks=x[3], softcap=0.7), given)


def test_halves_are_as_close_as_plain_attention():
    given = [x.detach().to(torch.bfloat16) for x in tensors(64, 64)]
    exact = plainly(*(x.double() for x in given), causal=True, scale=0.3)
    got = attention_in_parts(*given[:3], Pattern(True, 0.3), sinks=given[3])
    worst = [(x.double() - exact).abs().max() for x in (got, plainly(*given, causal=True, scale=0.3))]
    assert worst[0] <= 1.05 * worst[1] and worst[0] > 0


@pytest.mark.parametrize(
    ("how", "want"),
    [
        (Pattern(True), [(0, 5), (5, 9)]),
        (Pattern(True, window=3), [(3, 9)]),
        (Pattern(True, chunk=6), [(0, 6), (6, 9)]),
        (Pattern(True, chunk=7), [(0, 5), (5, 7), (7, 9)]),
        (Pattern(False, window=2, ahead=1), [(4, 9)]),
    ],
)
def test_a_block_holds_only_the_scores_that_may_be_seen(how, want):
    pieces = parts_of_queries(5, 4, 9, how)
    assert sorted(p.keys for p in pieces) == want


@pytest.mark.parametrize("length", [5, 8, 9])
@pytest.mark.parametrize("how", [{"causal": True, "chunk": 8}, {"causal": False, "window": 9, "ahead": 8}])
def test_what_a_short_sequence_does_not_show_is_plain_attention(length, how, monkeypatch):
    q, k, v = (torch.randn(2, 2, length, 4, dtype=torch.float64) for _ in range(3))
    want = plainly(q, k, v, None, scale=0.5, **how)
    if length <= 8 or "ahead" in how:
        monkeypatch.setattr(runtime_attention, "attention_in_parts", None)
    torch.testing.assert_close(attention(q, k, v, scale=None, **how), want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("with_documents", [False, True])
@pytest.mark.parametrize(("window", "ahead"), [(3, 2), (1, 0), (1, 1), (2, 5), (20, 3)])
def test_a_window_on_both_sides_in_blocks(window, ahead, with_documents):
    given = tensors(9, 9, 8)[:3]
    ids = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1], [0, 0, 1, 1, -2, 1, 1, 2, 2]]) if with_documents else None
    if ids is not None and window + ahead == 1:
        ids[1, 4] = 1  # what is hidden from all has to see one
    both = None if ids is None else (ids, ids)
    want = plainly(*given, None, causal=False, scale=0.3, window=window, ahead=ahead, documents=both)
    got = attention(*given, causal=False, scale=0.3, window=window, ahead=ahead, documents=ids)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    grad = torch.randn_like(want)
    for mine, theirs in zip(*(torch.autograd.grad(out, given, grad) for out in (got, want)), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"chunk": 0}, "chunk=0 must be at least 1"),
        ({"chunk": 2, "causal": False}, "chunk=2 .* needs causal attention"),
        ({"chunk": 2, "window": 2}, "chunk=2 with window=2, ahead=None; give one of them"),
        ({"ahead": 2, "window": 2}, "ahead=2 .* not window=2 and causal=True"),
        ({"ahead": 2, "causal": False}, "ahead=2 .* not window=None and causal=False"),
        ({"window": 2, "causal": False}, "window=2 .* needs causal attention"),
        ({"window": 0, "ahead": 1, "causal": False}, "window=0 must be at least 1"),
        ({"chunk": 2, "mask": torch.zeros(4, 4)}, "chunk=2 .* without a mask"),
    ],
)
def test_patterns_that_contradict_each_other_are_refused(how, says):
    q, k, v, _ = tensors(4, 4)
    with pytest.raises(ValueError, match=says):
        attention(q, k, v, **{"causal": True, "scale": None} | how)


def test_sinks_of_another_number_of_heads_and_masks_are_refused():
    q, k, v, sinks = tensors(4, 4)
    with pytest.raises(ValueError, match=r"sinks must have the shape \[4\], one per head, not \(3,\)"):
        attention(q, k, v, causal=True, scale=None, sinks=sinks[:3])
    with pytest.raises(ValueError, match="sinks take no mask"):
        attention(q, k, v, causal=False, scale=None, sinks=sinks, mask=torch.zeros(4, 4))
    with pytest.raises(ValueError, match="softcap=0 must be positive"):
        attention(q, k, v, causal=False, scale=None, softcap=0)
    with pytest.raises(ValueError, match="not 4 for 3"):
        attention(q[:, :, :3], k, v, causal=True, scale=None, sinks=sinks)
