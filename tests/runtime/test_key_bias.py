"""A bias by head and key: columns of queries and keys, as exact as the bias itself, in 16 bits too."""

from __future__ import annotations

import math

import pytest
import torch

from autoplan.runtime.attention import attention


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Causal attention written out, in the dtype of the queries but for the softmax, as models write it."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * (1.0 / math.sqrt(q.shape[3])) + bias.to(q.dtype)
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    wide = torch.float32 if q.dtype.itemsize == 2 else q.dtype
    return scores.masked_fill(~seen, torch.finfo(q.dtype).min).softmax(-1, dtype=wide).to(q.dtype) @ v


def alibi(heads: int, length: int) -> torch.Tensor:
    slopes = 2.0 ** (-8.0 / heads * torch.arange(1, heads + 1, dtype=torch.float64))
    return (slopes[:, None] * torch.arange(length))[None, :, None]


@pytest.mark.parametrize("groups", [4, 2])
def test_the_columns_are_the_bias(groups: int) -> None:
    """Result and gradients, of the bias too; a value head of another size, one bias for several samples."""
    torch.manual_seed(0)
    shapes = ((2, 4, 40, 8), (2, groups, 40, 8), (2, groups, 40, 6))
    leaves = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    leaves.append(alibi(4, 40).requires_grad_())
    q, k, v, bias = leaves
    got, want = attention(q, k, v, causal=True, scale=None, key_bias=bias), plain(*leaves)
    grad = torch.randn_like(got)
    found, wanted = (torch.autograd.grad(out, leaves, grad) for out in (got, want))
    for a, b in zip((got, *found), (want, *wanted), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_lose_no_digits_of_large_biases(dtype: torch.dtype) -> None:
    """Biases up to 850, whose numbers of 16 bits are up to 4 apart: where scores are written out, results are wrong."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 4, 1024, 64).to(dtype) for _ in range(3))
    bias = alibi(4, 1024) * 3.3
    want = plain(*(x.double() for x in (q, k, v)), bias)
    errors = [
        (out.double() - want).abs().max().item()
        for out in (attention(q, k, v, causal=True, scale=None, key_bias=bias.float()), plain(q, k, v, bias))
    ]
    assert errors[0] < 2e-2 and errors[1] > 10 * errors[0]


def test_a_bias_of_a_wrong_shape_is_refused() -> None:
    q = torch.zeros(2, 4, 6, 8)
    with pytest.raises(ValueError, match=r"key_bias must have the shape \[b or 1, 4 or 1, 1, 6\], not \(4, 6\)"):
        attention(q, q, q, causal=True, scale=None, key_bias=torch.zeros(4, 6))
    with pytest.raises(ValueError, match=r"softcap=2\.0 with a key_bias"):
        attention(q, q, q, causal=True, scale=None, softcap=2.0, key_bias=torch.zeros(1, 4, 1, 6))
