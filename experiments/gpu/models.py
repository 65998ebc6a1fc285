"""A Llama as torchtitan writes it, plain modules and the fused calls of torch, to compare a step with."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from experiments.shared.models import Size


class PlainAttention(nn.Module):
    """Grouped heads with rotary embeddings in the interleaved layout."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads, self.groups, self.head = size.num_heads, size.num_kv_heads, size.hidden // size.num_heads
        self.wq = nn.Linear(size.hidden, self.heads * self.head, bias=False)
        self.wk = nn.Linear(size.hidden, self.groups * self.head, bias=False)
        self.wv = nn.Linear(size.hidden, self.groups * self.head, bias=False)
        self.wo = nn.Linear(self.heads * self.head, size.hidden, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        b, s, _ = x.shape
        q = _rotated(self.wq(x).view(b, s, self.heads, self.head), cos, sin).transpose(1, 2)
        k = _rotated(self.wk(x).view(b, s, self.groups, self.head), cos, sin).transpose(1, 2)
        v = self.wv(x).view(b, s, self.groups, self.head).transpose(1, 2)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.groups)
        out: torch.Tensor = self.wo(a.transpose(1, 2).reshape(b, s, -1))
        return out


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class PlainLayer(nn.Module):
    """Pre-norm attention and SwiGLU."""

    def __init__(self, size: Size, inner: int) -> None:
        super().__init__()
        self.attention, self.norm1, self.norm2 = PlainAttention(size), nn.RMSNorm(size.hidden), nn.RMSNorm(size.hidden)
        self.w1, self.w3 = nn.Linear(size.hidden, inner, bias=False), nn.Linear(size.hidden, inner, bias=False)
        self.w2 = nn.Linear(inner, size.hidden, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x), cos, sin)
        y = self.norm2(x)
        out: torch.Tensor = x + self.w2(F.silu(self.w1(y)) * self.w3(y))
        return out


class PlainLlama(nn.Module):
    """Decoder with an untied head; `forward` returns the mean loss of the next token."""

    def __init__(self, size: Size, inner: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(size.vocab, size.hidden)
        self.layers = nn.ModuleList(PlainLayer(size, inner) for _ in range(size.num_layers))
        self.norm, self.head = nn.RMSNorm(size.hidden), nn.Linear(size.hidden, size.vocab, bias=False)
        head = size.hidden // size.num_heads
        angle = torch.outer(torch.arange(size.seq), 10000.0 ** (-torch.arange(0, head, 2) / head))
        self.register_buffer("cos", angle.cos()[None, :, None], persistent=False)
        self.register_buffer("sin", angle.sin()[None, :, None], persistent=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        cos, sin = self.cos.to(x.dtype), self.sin.to(x.dtype)  # type: ignore[operator]
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
