"""Decoders as others write them, after the published sources: the same operations in the same order, small.

MetaLlama       Meta's llama3 reference: complex rotary embeddings (view_as_complex), repeated key-value heads,
                attention by matmul and softmax, a mask made with triu and hstack
TorchtitanLlama torchtitan's llama3: the same embeddings reshaped for broadcasting, fused attention
GptFast         gpt-fast: one projection for q, k and v split by sizes, rotary embeddings as pairs of reals, stack
LitGemma        litgpt's Gemma 2: soft-capped attention and logits, norms before and after, sliding windows by layer
LitMixtral      litgpt's LLaMAMoE: experts one by one under a mask of tokens (torch.where)
XTransformer    x-transformers: einsum attention with ALiBi, gated feed-forward
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

VOCAB, DIM, HEADS, KV_HEADS, LAYERS, INNER, LONGEST = 96, 32, 4, 2, 2, 48, 64
HEAD = DIM // HEADS


class RMSNorm(nn.Module):
    """Meta's norm: normalise, cast back with type_as, scale."""

    def __init__(self, dim: int = DIM, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.ones(dim))

    def _norm(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._norm(x).type_as(x) * self.weight


class SwiGLU(nn.Module):
    """w2(silu(w1 x) * w3 x)."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(DIM, INNER, bias=False), nn.Linear(DIM, INNER, bias=False)
        self.w2 = nn.Linear(INNER, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return out


def complex_angles(theta: float = 10000.0) -> torch.Tensor:
    """Return exp(i m theta_j) of every position m and pair j, complex [LONGEST, HEAD / 2]."""
    freqs = 1.0 / (theta ** (torch.arange(0, HEAD, 2)[: HEAD // 2].double() / HEAD))
    angles = torch.outer(torch.arange(LONGEST).double(), freqs)
    return torch.polar(torch.ones_like(angles), angles)


def complex_rotary(xq: torch.Tensor, xk: torch.Tensor, angles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate queries and keys [b, s, heads, HEAD] by complex multiplication."""
    xq_ = torch.view_as_complex(xq.reshape(*xq.shape[:-1], -1, 2))
    xk_ = torch.view_as_complex(xk.reshape(*xk.shape[:-1], -1, 2))
    shape = [d if i == 1 or i == xq_.ndim - 1 else 1 for i, d in enumerate(xq_.shape)]
    angles = angles.view(*shape)
    xq_out = torch.view_as_real(xq_ * angles).flatten(3)
    xk_out = torch.view_as_real(xk_ * angles).flatten(3)
    return xq_out.type_as(xq), xk_out.type_as(xk)


def repeat_kv(x: torch.Tensor, times: int) -> torch.Tensor:
    """Repeat key-value heads, [b, s, heads, HEAD] -> [b, s, heads * times, HEAD]."""
    b, s, heads, width = x.shape
    return x[:, :, :, None, :].expand(b, s, heads, times, width).reshape(b, s, heads * times, width)


class MetaAttention(nn.Module):
    """Attention of Meta's and torchtitan's sources; `fused`: by scaled_dot_product_attention."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.wq, self.wo = nn.Linear(DIM, HEADS * HEAD, bias=False), nn.Linear(HEADS * HEAD, DIM, bias=False)
        self.wk, self.wv = (nn.Linear(DIM, KV_HEADS * HEAD, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor, angles: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        b, s, _ = x.shape
        xq, xk, xv = self.wq(x), self.wk(x), self.wv(x)
        xq, xk, xv = xq.view(b, s, -1, HEAD), xk.view(b, s, -1, HEAD), xv.view(b, s, -1, HEAD)
        xq, xk = complex_rotary(xq, xk, angles)
        keys, values = repeat_kv(xk, HEADS // KV_HEADS), repeat_kv(xv, HEADS // KV_HEADS)
        xq, keys, values = xq.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2)
        if self.fused:
            out = F.scaled_dot_product_attention(xq, keys, values, is_causal=True)
        else:
            scores = torch.matmul(xq, keys.transpose(2, 3)) / math.sqrt(HEAD)
            if mask is not None:
                scores = scores + mask
            scores = F.softmax(scores, dim=-1).type_as(xq)
            out = torch.matmul(scores, values)
        done: torch.Tensor = self.wo(out.transpose(1, 2).contiguous().view(b, s, -1))
        return done


class MetaBlock(nn.Module):
    """Pre-norm block."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.attention, self.feed_forward = MetaAttention(fused), SwiGLU()
        self.attention_norm, self.ffn_norm = RMSNorm(), RMSNorm()

    def forward(self, x: torch.Tensor, angles: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        h = x + self.attention(self.attention_norm(x), angles, mask)
        out: torch.Tensor = h + self.feed_forward(self.ffn_norm(h))
        return out


class MetaLlama(nn.Module):
    """Llama 3 as in Meta's reference, without its cache (start_pos 0): the mask is made in the forward."""

    fused = False

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(MetaBlock(self.fused) for _ in range(LAYERS))
        self.norm, self.output = RMSNorm(), nn.Linear(DIM, VOCAB, bias=False)
        self.freqs_cis = complex_angles()  # a plain attribute, as there

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        _, s = tokens.shape
        h = self.tok_embeddings(tokens)
        angles = self.freqs_cis.to(h.device)[0:s]
        mask = torch.full((s, s), float("-inf"), device=tokens.device)
        mask = torch.triu(mask, diagonal=1)
        mask = torch.hstack([torch.zeros((s, 0), device=tokens.device), mask]).type_as(h)
        for layer in self.layers:
            h = layer(h, angles, mask)
        out: torch.Tensor = self.output(self.norm(h))
        return out


class TorchtitanLlama(nn.Module):
    """Llama 3 as in torchtitan: angles in a buffer that is not saved, layers in a ModuleDict, fused attention."""

    freqs_cis: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB, DIM)
        self.register_buffer("freqs_cis", complex_angles(), persistent=False)
        self.layers = nn.ModuleDict({str(i): MetaBlock(True) for i in range(LAYERS)})
        self.norm, self.output = nn.RMSNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            h = layer(h, self.freqs_cis[: tokens.shape[1]], None)
        out: torch.Tensor = self.output(self.norm(h))
        return out


def real_angles(theta: float = 10000.0) -> torch.Tensor:
    """Return cosine and sine, [LONGEST, HEAD / 2, 2]."""
    angles = complex_angles(theta)
    return torch.stack([angles.real, angles.imag], dim=-1)


def real_rotary(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """gpt-fast's apply_rotary_emb: pairs of reals and stack."""
    pairs = x.reshape(*x.shape[:-1], -1, 2)
    angles = angles.view(1, pairs.size(1), 1, pairs.size(3), 2)
    out = torch.stack(
        [
            pairs[..., 0] * angles[..., 0] - pairs[..., 1] * angles[..., 1],
            pairs[..., 1] * angles[..., 0] + pairs[..., 0] * angles[..., 1],
        ],
        -1,
    )
    return out.flatten(3).type_as(x)


class GptFastBlock(nn.Module):
    """gpt-fast's block: wqkv split by sizes, keys repeated with repeat_interleave."""

    def __init__(self) -> None:
        super().__init__()
        self.wqkv = nn.Linear(DIM, (HEADS + 2 * KV_HEADS) * HEAD, bias=False)
        self.wo, self.feed_forward = nn.Linear(DIM, DIM, bias=False), SwiGLU()
        self.ffn_norm, self.attention_norm = RMSNorm(), RMSNorm()

    def attend(self, x: torch.Tensor, angles: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        b, s, _ = x.shape
        kv = KV_HEADS * HEAD
        q, k, v = self.wqkv(x).split([DIM, kv, kv], dim=-1)
        q, k, v = q.view(b, s, HEADS, HEAD), k.view(b, s, KV_HEADS, HEAD), v.view(b, s, KV_HEADS, HEAD)
        q, k = real_rotary(q, angles), real_rotary(k, angles)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.0)
        out: torch.Tensor = self.wo(y.transpose(1, 2).contiguous().view(b, s, DIM))
        return out

    def forward(self, x: torch.Tensor, angles: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        h = x + self.attend(self.attention_norm(x), angles, mask)
        out: torch.Tensor = h + self.feed_forward(self.ffn_norm(h))
        return out


class GptFast(nn.Module):
    """gpt-fast's Transformer, without its cache: the causal mask is a buffer indexed by positions."""

    freqs_cis: torch.Tensor
    causal_mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(GptFastBlock() for _ in range(LAYERS))
        self.norm, self.output = RMSNorm(), nn.Linear(DIM, VOCAB, bias=False)
        self.register_buffer("freqs_cis", real_angles())
        self.register_buffer("causal_mask", torch.tril(torch.ones(LONGEST, LONGEST, dtype=torch.bool)))

    def forward(self, idx: torch.Tensor) -> torch.Tensor:
        s = idx.shape[1]
        mask = self.causal_mask[None, None, :s, :s]
        x, angles = self.tok_embeddings(idx), self.freqs_cis[:s]
        for layer in self.layers:
            x = layer(x, angles, mask)
        out: torch.Tensor = self.output(self.norm(x))
        return out


def half_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """litgpt's apply_rope: halves, with a batch dim of one in cos and sin."""
    half = x.size(-1) // 2
    rotated = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return (x * cos.unsqueeze(-3)) + (rotated * sin.unsqueeze(-3))


class LitAttention(nn.Module):
    """litgpt's CausalSelfAttention. `cap`: of the attention's logits; `window`: tokens that a token sees."""

    def __init__(self, cap: float | None = None, window: int | None = None) -> None:
        super().__init__()
        self.cap, self.window = cap, window
        self.qkv = nn.Linear(DIM, (HEADS + 2 * KV_HEADS) * HEAD, bias=False)
        self.proj = nn.Linear(DIM, DIM, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.size()
        q, k, v = self.qkv(x).split((DIM, KV_HEADS * HEAD, KV_HEADS * HEAD), dim=-1)
        q = q.view(b, t, HEADS, HEAD).transpose(1, 2)
        k, v = (z.view(b, t, KV_HEADS, HEAD).transpose(1, 2) for z in (k, v))
        q, k = half_rotary(q, cos, sin), half_rotary(k, cos, sin)
        k, v = (z.repeat_interleave(HEADS // KV_HEADS, dim=1) for z in (k, v))
        mask = None
        if self.window is not None:
            mask = torch.ones(t, t, dtype=q.dtype, device=q.device).triu(diagonal=1)
            mask.masked_fill_(mask.bool(), float("-inf"))
            bias = torch.ones_like(mask).tril(diagonal=-self.window)
            bias.masked_fill_(bias.bool(), float("-inf"))
            mask = (mask + bias).view(1, 1, t, t)
        if self.cap is None:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        else:
            scores = (q * HEAD**-0.5) @ k.mT
            scores = torch.tanh(scores / self.cap) * self.cap
            if mask is None:
                mask = torch.ones(t, t, dtype=q.dtype, device=q.device).triu(diagonal=1)
                mask.masked_fill_(mask.bool(), torch.finfo(q.dtype).min)
            y = F.softmax(scores + mask, dim=-1) @ v
        out: torch.Tensor = self.proj(y.transpose(1, 2).reshape(b, t, DIM))
        return out


class LitMoE(nn.Module):
    """litgpt's LLaMAMoE: two of four experts, each on the tokens that chose it."""

    def __init__(self, num_experts: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(DIM, num_experts, bias=False)
        self.experts = nn.ModuleList(SwiGLU() for _ in range(num_experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.size()
        x = x.view(-1, c)
        probs, indices = torch.topk(self.gate(x), 2)
        probs = probs.softmax(dim=1)
        masks = indices.unsqueeze(-1) == torch.arange(len(self.experts), device=x.device)
        y = torch.zeros_like(x)
        for mask, expert in zip(masks.permute(2, 0, 1), self.experts, strict=True):
            token_idx, expert_idx = torch.where(mask)
            y[token_idx] += probs[token_idx, expert_idx, None] * expert(x[token_idx])
        return y.view(b, t, c)


class LitBlock(nn.Module):
    """litgpt's Block, Gemma 2 style if `post`: norms before and after attention and feed-forward."""

    def __init__(self, attn: nn.Module, mlp: nn.Module, post: bool) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = RMSNorm(), RMSNorm()
        self.attn, self.mlp = attn, mlp
        self.post_attention_norm = RMSNorm() if post else nn.Identity()
        self.post_mlp_norm = RMSNorm() if post else nn.Identity()

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = self.post_attention_norm(self.attn(self.norm_1(x), cos, sin)) + x
        out: torch.Tensor = self.post_mlp_norm(self.mlp(self.norm_2(x))) + x
        return out


class LitGPT(nn.Module):
    """litgpt's GPT: embedding scaled, cosine and sine in buffers with a batch dim. `cap`: of the logits."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, blocks: list[nn.Module], cap: float | None = None) -> None:
        super().__init__()
        self.cap = cap
        self.lm_head = nn.Linear(DIM, VOCAB, bias=False)
        self.transformer = nn.ModuleDict(
            {"wte": nn.Embedding(VOCAB, DIM), "h": nn.ModuleList(blocks), "ln_f": RMSNorm()}
        )
        angles = torch.cat([complex_angles()] * 2, dim=-1)
        self.register_buffer("cos", angles.real.clone(), persistent=False)
        self.register_buffer("sin", angles.imag.clone(), persistent=False)

    def forward(self, idx: torch.Tensor) -> torch.Tensor:
        t = idx.size(1)
        cos, sin = self.cos[:t].unsqueeze(0), self.sin[:t].unsqueeze(0)
        x = self.transformer["wte"](idx) * torch.tensor(DIM**0.5, dtype=cos.dtype)
        for block in self.transformer["h"]:  # type: ignore[union-attr]
            x = block(x, cos, sin)
        logits: torch.Tensor = self.lm_head(self.transformer["ln_f"](x))
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap


def lit_gemma() -> nn.Module:
    """Return Gemma 2 as litgpt writes it: windows of 4 tokens in every other layer, caps of 50 and 30."""
    layers: list[nn.Module] = [
        LitBlock(LitAttention(50.0, 4 if i % 2 == 0 else None), SwiGLU(), post=True) for i in range(LAYERS)
    ]
    return LitGPT(layers, cap=30.0)


def lit_mixtral() -> nn.Module:
    """Return Mixtral as litgpt writes it."""
    return LitGPT([LitBlock(LitAttention(), LitMoE(), post=False) for _ in range(LAYERS)])


class XAttention(nn.Module):
    """x-transformers' Attend, without flash: einsum, ALiBi added to the logits, masked by the largest negative."""

    slopes: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v = (nn.Linear(DIM, DIM, bias=False) for _ in range(3))
        self.to_out = nn.Linear(DIM, DIM, bias=False)
        self.register_buffer(
            "slopes", torch.tensor([2.0 ** (-8 * (i + 1) / HEADS) for i in range(HEADS)])[:, None, None]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (f(x).unflatten(-1, (HEADS, HEAD)).permute(0, 2, 1, 3) for f in (self.to_q, self.to_k, self.to_v))
        sim = torch.einsum("b h i d, b h j d -> b h i j", q, k) * HEAD**-0.5
        i, j = sim.shape[-2:]
        positions = torch.arange(j, device=x.device)
        distance = (positions[None, :] - positions[:, None]).abs().neg()
        sim = sim + distance[None] * self.slopes
        causal = torch.ones((i, j), dtype=torch.bool, device=x.device).triu(j - i + 1)
        sim = sim.masked_fill(causal, -torch.finfo(sim.dtype).max)
        out = torch.einsum("b h i j, b h j d -> b h i d", sim.softmax(dim=-1), v)
        done: torch.Tensor = self.to_out(out.permute(0, 2, 1, 3).flatten(2))
        return done


class XFeedForward(nn.Module):
    """x-transformers' GLU: one projection, chunked."""

    def __init__(self) -> None:
        super().__init__()
        self.proj, self.out = nn.Linear(DIM, 2 * INNER), nn.Linear(INNER, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, gate = self.proj(x).chunk(2, dim=-1)
        out: torch.Tensor = self.out(x * F.gelu(gate))
        return out


class XTransformer(nn.Module):
    """x-transformers' TransformerWrapper around a Decoder: a flat list of attention and feed-forward layers."""

    def __init__(self) -> None:
        super().__init__()
        self.token_emb, self.pos_emb = nn.Embedding(VOCAB, DIM), nn.Embedding(LONGEST, DIM)
        self.norms = nn.ModuleList(nn.LayerNorm(DIM, bias=False) for _ in range(2 * LAYERS + 1))
        self.layers = nn.ModuleList(m for _ in range(LAYERS) for m in (XAttention(), XFeedForward()))
        self.to_logits = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.token_emb(x) + self.pos_emb(torch.arange(x.shape[1], device=x.device)) * DIM**-0.5
        for norm, layer in zip(self.norms, self.layers, strict=False):
            x = x + layer(norm(x))
        out: torch.Tensor = self.to_logits(self.norms[-1](x))
        return out
