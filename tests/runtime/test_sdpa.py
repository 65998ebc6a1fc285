"""Kernels of attention: what is chosen for CUDA, and that what they are given is the same attention."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from autoplan.runtime import attention as attention_module
from autoplan.runtime import context, fused, sdpa
from autoplan.runtime.attention import attention
from autoplan.runtime.fused import cuda_capability
from autoplan.runtime.sdpa import choose, flash, refuse_large_scores

HALF, FLOAT, DOUBLE = torch.bfloat16, torch.float32, torch.float64
HOPPER, AMPERE, ADA, TURING = (9, 0), (8, 0), (8, 9), (7, 5)


@pytest.mark.parametrize(
    ("device", "dtype", "capability", "sizes", "asked", "kernel"),
    [
        # a CPU: as torch has it
        ("cpu", HALF, None, (128, 128), {"grouped": True, "masked": True}, "torch"),
        ("cpu", FLOAT, None, (128, 128), {"grouped": True, "masked": False, "causal": "start"}, "torch"),
        ("cpu", HALF, None, (128, 128), {"grouped": True, "masked": False, "causal": "end", "window": True}, "masked"),
        # CUDA without a mask: flash takes fewer key heads
        ("cuda", HALF, HOPPER, (128, 128), {"grouped": True, "masked": False, "causal": "start"}, "torch"),
        ("cuda", HALF, HOPPER, (128, 128), {"grouped": False, "masked": False}, "torch"),
        # with a mask it does not, and the kernel that takes masks wants all heads
        ("cuda", HALF, HOPPER, (128, 128), {"grouped": True, "masked": True}, "repeated"),
        ("cuda", HALF, HOPPER, (128, 128), {"grouped": False, "masked": True}, "torch"),
        # nor 32 bits, other head dims of values, or causal masks that end before the keys do
        ("cuda", FLOAT, HOPPER, (128, 128), {"grouped": True, "masked": False, "causal": "start"}, "repeated"),
        ("cuda", HALF, HOPPER, (192, 128), {"grouped": True, "masked": False, "causal": "start"}, "repeated"),
        ("cuda", HALF, HOPPER, (512, 512), {"grouped": True, "masked": False}, "repeated"),
        ("cuda", HALF, HOPPER, (64, 64), {"grouped": True, "masked": False, "causal": "start", "square": False},
         "repeated"),
        ("cuda", HALF, HOPPER, (64, 64), {"grouped": True, "masked": False, "square": False}, "torch"),
        # nor does a GPU before Ampere have it
        ("cuda", torch.float16, TURING, (128, 128), {"grouped": True, "masked": False, "causal": "start"}, "repeated"),
        ("cuda", torch.float16, TURING, (128, 128), {"grouped": False, "masked": False, "causal": "start"}, "torch"),
        # no fused kernel takes 64 bits
        ("cuda", DOUBLE, HOPPER, (64, 64), {"grouped": True, "masked": True}, "torch"),
        # windows, and causal masks that end with the keys
        ("cuda", HALF, HOPPER, (128, 128), {"grouped": True, "masked": False, "causal": "end", "window": True},
         "flash"),
        ("cuda", HALF, AMPERE, (256, 256), {"grouped": True, "masked": False, "causal": "end", "square": False},
         "flash"),
        ("cuda", HALF, ADA, (192, 128), {"grouped": True, "masked": False, "causal": "end", "square": False}, "flash"),
        ("cuda", HALF, ADA, (256, 256), {"grouped": True, "masked": False, "causal": "end", "square": False},
         "masked"),
        ("cuda", HALF, TURING, (64, 64), {"grouped": False, "masked": False, "causal": "end", "window": True},
         "masked"),
        ("cuda", HALF, None, (64, 64), {"grouped": False, "masked": False, "causal": "end", "window": True}, "masked"),
        ("cuda", FLOAT, HOPPER, (64, 64), {"grouped": False, "masked": False, "causal": "end", "window": True},
         "masked"),
        ("cuda", HALF, HOPPER, (64, 64), {"grouped": True, "masked": True, "causal": "end", "window": True}, "masked"),
        ("cuda", HALF, HOPPER, (64, 64), {"grouped": True, "masked": False, "causal": "end"}, "flash"),
    ],
)  # fmt: skip
def test_what_is_chosen(
    device: str,
    dtype: torch.dtype,
    capability: tuple[int, int] | None,
    sizes: tuple[int, int],
    asked: dict[str, Any],
    kernel: str,
) -> None:
    assert choose(device, dtype, capability, sizes, **asked) == kernel


def tensors(s: int, t: int, d: int = 6, e: int = 5, heads: int = 4, groups: int = 2) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(s + t)
    shapes = ((2, heads, s, d), (2, groups, t, d), (2, groups, t, e))
    return [torch.randn(x, generator=g, dtype=DOUBLE).requires_grad_() for x in shapes]


def same(got: torch.Tensor, want: torch.Tensor, given: list[torch.Tensor]) -> None:
    """Outputs and all gradients."""
    torch.testing.assert_close(got, want, atol=1e-12, rtol=1e-12)
    arrived = torch.linspace(-1, 1, want.numel(), dtype=DOUBLE).view_as(want)
    for a, b in zip(*(torch.autograd.grad(x, given, arrived) for x in (got, want)), strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("masked", [True, False])
def test_repeated_keys_are_grouped_heads(monkeypatch: pytest.MonkeyPatch, masked: bool) -> None:
    given = tensors(7, 9)
    q, k, v = given
    mask = torch.rand(2, 1, 7, 9, generator=torch.Generator().manual_seed(1)) > 0.3 if masked else None
    want = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=not masked, enable_gqa=True)
    seen = []

    def watched(q: torch.Tensor, k: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        seen.append((k.shape[1], kwargs["enable_gqa"]))
        return plain(q, k, *args, **kwargs)

    plain = F.scaled_dot_product_attention
    monkeypatch.setattr(sdpa, "choose_for", lambda *_, **__: "repeated")
    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    same(sdpa.sdpa(q, k, v, mask=mask, causal=not masked, scale=None), want, given)
    assert seen == [(4, False)]


def as_flash_does(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    cum_seq_q: None,
    cum_seq_k: None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float,
    window_size_left: int | None,
    window_size_right: int | None,
) -> tuple[torch.Tensor, ...]:
    """Flash attention 2 as its interface says: [b, s, h, d]; the last query is at the last key; a window counts keys
    to the left of a query's own, and to the right."""
    assert is_causal and dropout_p == 0.0 and not return_debug_mask and (cum_seq_q, cum_seq_k) == (None, None)
    assert queries.shape[3] == keys.shape[3] == values.shape[3] and values.shape[3] % 8 == 0
    assert (max_q, max_k) == (queries.shape[1], keys.shape[1])
    place = torch.arange(max_q)[:, None] + max_k - max_q - torch.arange(max_k)[None]
    seen = place >= 0
    if window_size_left is not None:
        assert window_size_right == 0
        seen = seen & (place <= window_size_left)
    q, k, v = (x.transpose(1, 2) for x in (queries, keys, values))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=True)
    return (out.transpose(1, 2),)


@pytest.fixture
def flash_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """CUDA's choices, and flash written out."""
    chosen: list[str] = []

    def as_on_cuda(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **asked: Any) -> str:
        chosen.append(
            choose("cuda", HALF, HOPPER, (k.shape[3], v.shape[3]), grouped=q.shape[1] != k.shape[1],
                   square=q.shape[2] == k.shape[2], **asked)
        )  # fmt: skip
        return chosen[-1]

    for module in (sdpa, context, attention_module):
        monkeypatch.setattr(module, "choose_for", as_on_cuda)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", as_flash_does)
    return chosen


@pytest.mark.parametrize("window", [1, 3, 4, 11])
def test_windows_by_flash(flash_on_a_cpu: list[str], window: int) -> None:
    given = tensors(12, 12)
    q, k, v = given
    distance = torch.arange(12)[:, None] - torch.arange(12)[None]
    seen = (distance >= 0) & (distance < window)
    want = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
    same(attention(q, k, v, causal=True, scale=None, window=window), want, given)
    assert flash_on_a_cpu == ["flash"]


@pytest.mark.parametrize("window", [None, 3, 7])
@pytest.mark.parametrize("end", [4, 12])
def test_chunks_of_gathered_keys_by_flash(flash_on_a_cpu: list[str], end: int, window: int | None) -> None:
    """Queries that end with the keys, those of the first chunk among them."""
    given = tensors(4, end)
    q, k, v = given
    distance = torch.arange(end - 4, end)[:, None] - torch.arange(end)[None]
    seen = (distance >= 0) & (distance < (window or end))
    want = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
    same(context._of_chunk(q, k, v, None, window, None, None), want, given)
    assert flash_on_a_cpu == ["flash"]


def test_documents_keep_their_mask(flash_on_a_cpu: list[str]) -> None:
    """Packed sequences, with a window and without: keys are repeated, and the mask stays."""
    given = tensors(12, 12)
    q, k, v = given
    ids = torch.tensor([[0] * 5 + [1] * 7, [0] * 2 + [1] * 4 + [2] * 6])
    for window in (None, 3):
        distance = torch.arange(12)[:, None] - torch.arange(12)[None]
        seen = (distance >= 0) & (distance < (window or 12)) & (ids[:, :, None] == ids[:, None])[:, None]
        want = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
        flash_on_a_cpu.clear()
        same(attention(q, k, v, causal=True, scale=None, window=window, documents=ids), want, given)
        assert flash_on_a_cpu == (["repeated"] if window is None else ["masked", "repeated"])


def test_flash_has_shapes_and_a_backward() -> None:
    """On `meta`, where torch's own kernel says what it returns: grouped heads, padded head dims, windows."""
    q, k, v = (
        torch.empty(shape, dtype=HALF, device="meta", requires_grad=True)
        for shape in ((2, 8, 16, 20), (2, 2, 32, 20), (2, 2, 32, 12))
    )
    out = flash(q, k, v, scale=None, window=5)
    assert out.shape == (2, 8, 16, 12)
    assert [g.shape for g in torch.autograd.grad(out.sum(), (q, k, v))] == [q.shape, k.shape, v.shape]


def test_large_scores_are_refused() -> None:
    """Where torch is left with the kernel that holds all scores: refused above a limit, not below."""
    q, k, v = (x.detach() for x in tensors(8, 8, d=8, e=4, heads=2))  # values of another size: no kernel of the CPU
    refuse_large_scores(q, k, v, None, False, 1.0, False, limit_bytes=2 * 2 * 8 * 8 * 8)
    with pytest.raises(ValueError, match=r"attention: no kernel .* takes torch\.float64 queries \(2, 2, 8, 8\), keys"):
        refuse_large_scores(q, k, v, None, False, 1.0, False, limit_bytes=2 * 2 * 8 * 8 * 8 - 1)
    refuse_large_scores(q, k, k, None, False, 1.0, False, limit_bytes=0)  # one takes it


@pytest.mark.filterwarnings("ignore")  # of torch.compile's own modules
def test_the_choice_of_a_kernel_breaks_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's functions for the capability of a GPU and its own choice return no tensors: a compiler stops there."""
    gpu = SimpleNamespace(is_available=lambda: True, get_device_capability=lambda device: (9, 0))
    monkeypatch.setattr(fused, "torch", SimpleNamespace(cuda=gpu))

    def asked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        sdpa.refuse_large_scores(q, k, v, None, True, 0.1, True, limit_bytes=1)
        return q * 2 if cuda_capability(torch.device("cuda", 0)) == (9, 0) else q

    q, k, v = (torch.ones(1, heads, 4, 8) for heads in (4, 2, 2))
    torch._dynamo.reset()
    assert torch.equal(torch.compile(asked, backend="eager", fullgraph=True)(q, k, v), q * 2)
    assert cuda_capability(torch.device("cpu")) is None
