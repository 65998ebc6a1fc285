"""Models the experiments measure: Hugging Face Llama from a config, and a plain GPT written as one would by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Size:
    """Shape of a model and its batch."""

    hidden: int
    num_layers: int
    seq: int
    batch: int = 2
    vocab: int = 1024
    num_heads: int = 4
    num_kv_heads: int = 2

    def __str__(self) -> str:
        return f"h{self.hidden} x{self.num_layers} b{self.batch} s{self.seq}"


class GPTBlock(nn.Module):
    """Pre-norm block with biases and a fused q, k, v projection."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, d = x.shape
        q, k, v = (
            t.view(b, s, self.num_heads, d // self.num_heads).transpose(1, 2)
            for t in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, d)
        x = x + self.proj(a)
        out: torch.Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return out


class GPT(nn.Module):
    """Decoder with learned positions and an embedding tied to the head. No dropout: torch draws other masks."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(size.vocab, size.hidden), nn.Embedding(size.seq, size.hidden)
        self.blocks = nn.ModuleList(GPTBlock(size.hidden, size.num_heads) for _ in range(size.num_layers))
        self.norm = nn.LayerNorm(size.hidden)
        self.head = nn.Linear(size.hidden, size.vocab, bias=False)
        self.head.weight = self.tok.weight

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.tok(input_ids) + self.pos(torch.arange(input_ids.shape[1], device=input_ids.device))
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def gpt_loss(logits: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Mean cross-entropy over the labels that are not -100."""
    return F.cross_entropy(logits.view(-1, logits.size(-1)), batch["labels"].view(-1))


def make_gpt(size: Size, seed: int = 0) -> GPT:
    """Return a GPT with random weights."""
    torch.manual_seed(seed)
    return GPT(size)


def llama_config(size: Size) -> object:
    """Hugging Face config of a Llama of this size, with PyTorch's fused attention."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        intermediate_size=size.hidden * 11 // 4 // 16 * 16,
        num_hidden_layers=size.num_layers,
        num_attention_heads=size.num_heads,
        num_key_value_heads=size.num_kv_heads,
        max_position_embeddings=size.seq,
        attn_implementation="sdpa",
    )


def make_llama(size: Size, seed: int = 0) -> nn.Module:
    """Return a Hugging Face Llama with random weights."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(seed)
    model: nn.Module = LlamaForCausalLM(llama_config(size))
    return model


def make_mixtral(size: Size, num_experts: int, top_k: int, seed: int = 0) -> nn.Module:
    """Return a Hugging Face Mixtral with random weights; experts twice as wide as the model."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        intermediate_size=2 * size.hidden,
        num_hidden_layers=size.num_layers,
        num_attention_heads=size.num_heads,
        num_key_value_heads=size.num_kv_heads,
        num_local_experts=num_experts,
        num_experts_per_tok=top_k,
        max_position_embeddings=size.seq,
    )
    torch.manual_seed(seed)
    model: nn.Module = MixtralForCausalLM(config)
    return model


def token_batch(size: Size, seed: int = 1) -> dict[str, torch.Tensor]:
    """Random tokens and labels."""
    generator = torch.Generator().manual_seed(seed)
    shape = (size.batch, size.seq)
    return {name: torch.randint(0, size.vocab, shape, generator=generator) for name in ("input_ids", "labels")}
