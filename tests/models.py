"""Models used by the tests: a plain GPT (learned positions, biases, dropout, tied embeddings) and a small HF Llama."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from autoplan.capture.frontend.experts import experts_forward


class GPTBlock(nn.Module):
    """Pre-norm block with a fused q, k, v projection."""

    def __init__(self, dim: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        q, k, v = (t.view(b, s, self.num_heads, d // self.num_heads).transpose(1, 2) for t in (q, k, v))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, d)
        x = x + self.dropout(self.proj(a))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    """Decoder-only transformer as one would write it by hand."""

    def __init__(
        self,
        vocab: int = 96,
        dim: int = 32,
        num_heads: int = 4,
        num_layers: int = 4,
        max_len: int = 64,
        dropout: float = 0.0,
        tied: bool = True,
    ) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, dim), nn.Embedding(max_len, dim)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(GPTBlock(dim, num_heads, dropout) for _ in range(num_layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        if tied:
            self.head.weight = self.tok.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.tok(ids) + self.pos(torch.arange(ids.shape[1], device=ids.device)))
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


class DetachedHead(nn.Module):
    """A head of the embedding's weight, which it does not train."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight.detach())


def gpt_loss(logits: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Mean cross-entropy over labels that are not -100."""
    return F.cross_entropy(logits.view(-1, logits.size(-1)), batch["labels"].view(-1))


def summed_loss(logits: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Cross-entropy summed over a sequence, its mean over the sequences; and small terms of the logits themselves."""
    entropy = F.cross_entropy(logits.view(-1, logits.size(-1)), batch["labels"].view(-1), reduction="sum")
    penalty = logits.square().sum() / batch["labels"].numel() + logits.abs().mean()
    return entropy / batch["labels"].shape[0] + 0.1 * penalty


def mean_and_penalty(logits: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Mean over valid labels, and over all tokens."""
    return gpt_loss(logits, batch) + 0.01 * logits.square().mean()


def make_gpt(seed: int = 0, **kwargs: object) -> GPT:
    """A GPT with random weights."""
    torch.manual_seed(seed)
    return GPT(**kwargs)  # type: ignore[arg-type]


def make_detached() -> GPT:
    """A GPT whose head shares the embedding's weight and gives it no gradient."""
    model = make_gpt()
    model.head = DetachedHead(model.tok.weight)  # type: ignore[assignment]
    return model


DENSE = dict(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)


def make_llama(seed: int = 0, **kwargs: object) -> nn.Module:
    """A small HF Llama with random weights; keyword arguments override the config."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    model: nn.Module = LlamaForCausalLM(LlamaConfig(**{**DENSE, **kwargs}))
    return model


def make_gemma2(seed: int = 0, **kwargs: Any) -> nn.Module:
    """A small Gemma 2: soft-capped scores, a window of 5 tokens in every second layer."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(seed)
    settings: dict[str, Any] = dict(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, sliding_window=5, attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0, attn_implementation="eager", initializer_range=0.2,
    )  # fmt: skip
    model: nn.Module = Gemma2ForCausalLM(Gemma2Config(**{**settings, **kwargs}))
    return model


def make_bloom(dropout: float = 0.0) -> nn.Module:
    """A small BLOOM, with ALiBi: its file writes attention out."""
    from transformers import BloomConfig, BloomForCausalLM

    torch.manual_seed(0)
    settings = {"attention_dropout": dropout, "hidden_dropout": dropout, "bos_token_id": 1, "eos_token_id": 2}
    model: nn.Module = BloomForCausalLM(BloomConfig(vocab_size=96, hidden_size=32, n_layer=2, n_head=4, **settings))
    return model


def make_mpt() -> nn.Module:
    """A small MPT, with ALiBi made for the longest sequence."""
    from transformers import MptConfig, MptForCausalLM

    torch.manual_seed(0)
    model: nn.Module = MptForCausalLM(MptConfig(d_model=32, n_heads=4, n_layers=2, max_seq_len=64, vocab_size=96))
    return model


def token_batch(batch: int, seq: int, seed: int = 1, vocab: int = 96, ignore: float = 0.0) -> dict[str, torch.Tensor]:
    """Random tokens and labels; a share `ignore` of the labels is -100."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocab, (batch, seq), generator=g)
    labels = torch.randint(0, vocab, (batch, seq), generator=g)
    labels[torch.rand(batch, seq, generator=g) < ignore] = -100
    return {"input_ids": ids, "labels": labels}


def make_windowed(seed: int = 0, mixed: bool = False, **extra: Any) -> nn.Module:
    """A small Mistral whose every layer sees 5 tokens, or a Qwen2 whose first two layers see all and the others 7."""
    from transformers import MistralConfig, MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    model: nn.Module
    if mixed:
        window = dict(use_sliding_window=True, sliding_window=7, max_window_layers=2)
        model = Qwen2ForCausalLM(Qwen2Config(**DENSE, **window, **extra))
    else:
        model = MistralForCausalLM(MistralConfig(**DENSE, sliding_window=5, **extra))
    return model


def make_sinks(seed: int = 0, **extra: Any) -> nn.Module:
    """A small Granite with sinks in its attention: the first layer sees all, the others 5 tokens."""
    from transformers import GraniteSWAConfig, GraniteSWAForCausalLM

    torch.manual_seed(seed)
    config = GraniteSWAConfig(**DENSE, sliding_window=5, attn_implementation="eager", initializer_range=0.2, **extra)
    model: nn.Module = GraniteSWAForCausalLM(config)
    for name, sinks in model.named_parameters():
        if name.endswith("sinks"):
            nn.init.normal_(sinks)
    return model


def make_chunked(seed: int = 0, **extra: Any) -> nn.Module:
    """A small Llama 4 without experts and rotations, whose layers see chunks of 5 tokens or all, with temperatures."""
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    torch.manual_seed(seed)
    kinds = ["chunked_attention", "full_attention"] * 2
    sizes = {**DENSE, "intermediate_size_mlp": 48, "head_dim": 8, "moe_layers": [], "num_local_experts": 2}
    sizes |= {"no_rope_layers": [0] * 4, "attn_temperature_tuning": True, "floor_scale": 3, "use_qk_norm": False}
    chunks = {"attention_chunk_size": 5, "layer_types": kinds, "use_cache": False}
    model: nn.Module = Llama4ForCausalLM(Llama4TextConfig(**sizes | chunks | {"initializer_range": 0.2} | extra))
    return model


def make_two_sided(seed: int = 0, **extra: Any) -> nn.Module:
    """A small ModernBERT, whose layers see two tokens on either side, or all."""
    from transformers import ModernBertConfig, ModernBertForMaskedLM

    torch.manual_seed(seed)
    kinds = ["full_attention", "sliding_attention"] * 2
    settings: dict[str, Any] = dict(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        max_position_embeddings=64, local_attention=4, layer_types=kinds, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, cls_token_id=1, sep_token_id=2, initializer_range=0.2,
    )  # fmt: skip
    model: nn.Module = ModernBertForMaskedLM(ModernBertConfig(**settings | extra))
    return model


def with_documents(batch: dict[str, torch.Tensor], packed: bool, left: bool = False) -> dict[str, torch.Tensor]:
    """Of every sample the first tokens (`left`: the last) alone, padding elsewhere; packed: two documents each."""
    b, s = batch["input_ids"].shape
    place = torch.arange(s).expand(b, -1)
    length = (3 + 5 * torch.arange(b) % (s - 3))[:, None]
    if packed:
        return {**batch, "position_ids": torch.where(place < length, place, place - length)}
    mask = (place >= s - length if left else place < length).long()
    out = {**batch, "attention_mask": mask, "labels": batch["labels"].masked_fill(mask == 0, -100)}
    return {**out, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)} if left else out


MOE = dict(vocab_size=96, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, max_position_embeddings=64)


def make_mixtral(num_experts: int = 4, **extra: Any) -> nn.Module:
    """A small HF Mixtral, 2 experts per token."""
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {**MOE, "num_key_value_heads": 2, "intermediate_size": 24, "num_experts_per_tok": 2}
    config = MixtralConfig(**sizes, num_local_experts=num_experts, **extra)
    torch.manual_seed(0)
    return MixtralForCausalLM(config)


# a loss of the routers as large as the cross entropy of these small models, so that its errors are seen
ROUTER_LOSS = dict(output_router_logits=True, router_aux_loss_coef=0.5)


def make_qwen3_moe(**extra: Any) -> nn.Module:
    """A small HF Qwen3-MoE: 8 experts, 2 per token, routing weights normalised."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        **MOE, num_key_value_heads=2, head_dim=8, intermediate_size=48, moe_intermediate_size=24, num_experts=8,
        num_experts_per_tok=2, norm_topk_prob=True, **extra,
    )  # fmt: skip
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(config)


@experts_forward(gate_up="up", down="down", gated=False, activation="relu")
class CapacityExperts(nn.Module):
    """Two products per expert; every expert for every token, of which its share is taken."""

    def __init__(self, dim: int, inner: int, num_experts: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(num_experts, inner, dim) / dim**0.5)
        self.down = nn.Parameter(torch.randn(num_experts, dim, inner) / inner**0.5)

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(hidden)
        for e in range(self.up.shape[0]):
            share = (weights * (index == e)).sum(-1, keepdim=True)
            out = out + share * (F.relu(hidden @ self.up[e].T) @ self.down[e].T)
        return out


class SwitchRouter(nn.Module):
    """One expert per token, and per sequence and expert only the first `capacity` tokens, as transformers'
    SwitchTransformersTop1Router: the others get nothing from any expert. `flat`: first in the whole batch."""

    def __init__(self, dim: int, num_experts: int, capacity: int, flat: bool) -> None:
        super().__init__()
        self.num_experts, self.capacity, self.flat = num_experts, capacity, flat
        self.classifier = nn.Linear(dim, num_experts, bias=False)

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        probabilities = self.classifier(hidden).softmax(-1)  # [b, s, experts]
        if self.flat:
            probabilities = probabilities.flatten(0, 1)
        index = probabilities.argmax(-1)
        chosen = F.one_hot(index, self.num_experts)
        chosen = chosen * (chosen.cumsum(-2) <= self.capacity)
        weights = probabilities.max(-1).values * chosen.sum(-1).to(probabilities.dtype)
        return index.reshape(-1, 1), weights.reshape(-1, 1)


class SwitchBlock(nn.Module):
    def __init__(self, dim: int, num_experts: int, capacity: int, flat: bool) -> None:
        super().__init__()
        self.attention = GPTBlock(dim, 4, 0.0)
        self.norm = nn.LayerNorm(dim)
        self.router = SwitchRouter(dim, num_experts, capacity, flat)
        self.experts = CapacityExperts(dim, 24, num_experts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.attention(x)
        hidden = self.norm(x)
        index, weights = self.router(hidden)
        return x + self.experts(hidden.reshape(-1, hidden.shape[-1]), index, weights).view_as(x)


class SwitchGPT(GPT):
    """A decoder whose layers end in experts of limited capacity."""

    def __init__(self, capacity: int = 5, flat: bool = False) -> None:
        super().__init__(num_layers=0, tied=False)
        self.blocks = nn.ModuleList(SwitchBlock(32, 4, capacity, flat) for _ in range(4))


class BalancedBlock(SwitchBlock):
    """Hands out what its router thought, as well."""

    def __init__(self) -> None:
        super().__init__(32, 4, capacity=0, flat=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # type: ignore[override]
        x = self.attention(x)
        hidden = self.norm(x).flatten(0, 1)
        probabilities = self.router.classifier(hidden).softmax(-1)
        weights, index = probabilities.topk(1, -1)
        return x + self.experts(hidden, index, weights).view_as(x), probabilities, index


class BalancedGPT(GPT):
    """Logits, and of every layer the probabilities of all experts and the chosen ones."""

    def __init__(self) -> None:
        super().__init__(num_layers=0, tied=False)
        self.blocks = nn.ModuleList(BalancedBlock() for _ in range(4))

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:  # type: ignore[override]
        x, routes = self.tok(ids) + self.pos(torch.arange(ids.shape[1], device=ids.device)), []
        for block in self.blocks:
            x, *route = block(x)
            routes.append(tuple(route))
        return self.head(self.norm(x)), routes


def balanced_loss(out: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """As Switch Transformers write it (Fedus et al., 2022, equations 4 to 6): layer by layer, of means."""
    logits, routes = out
    balance = torch.zeros((), dtype=logits.dtype)
    for probabilities, index in routes:
        count = probabilities.shape[-1]
        shares = F.one_hot(index.squeeze(-1), count).to(probabilities.dtype).mean(0)
        balance = balance + count * (shares * probabilities.mean(0)).sum()
    return gpt_loss(logits, batch) + 0.3 * balance


def make_balanced() -> nn.Module:
    """A BalancedGPT with random weights."""
    torch.manual_seed(0)
    return BalancedGPT()


def make_switch(**kwargs: Any) -> nn.Module:
    """A SwitchGPT with random weights: 4 experts, at most 5 of the tokens of a sequence each."""
    torch.manual_seed(0)
    return SwitchGPT(**kwargs)


def make_deepseek() -> nn.Module:
    """A small HF DeepSeek-V3: latent attention, a shared expert, groups of experts, one dense layer."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(
        **MOE, num_key_value_heads=4, intermediate_size=48, moe_intermediate_size=24, n_routed_experts=8, n_group=4,
        topk_group=2, num_experts_per_tok=2, n_shared_experts=1, first_k_dense_replace=1, q_lora_rank=16,
        kv_lora_rank=12, qk_rope_head_dim=4, qk_nope_head_dim=6, v_head_dim=10, attention_dropout=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = DeepseekV3ForCausalLM(config)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.randn_like(buffer))
    return model


class Attention(nn.Module):
    """Attention with projections of its own: over itself, or over another sequence."""

    def __init__(self, dim: int, num_heads: int, causal: bool = False) -> None:
        super().__init__()
        self.num_heads, self.causal = num_heads, causal
        # a bias of the keys adds the same to all scores of a query: its gradient is zero but for rounding
        self.q, self.k, self.v, self.out = (nn.Linear(dim, dim, bias=which != 1) for which in range(4))

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        def heads(t: torch.Tensor) -> torch.Tensor:
            return t.view(t.shape[0], t.shape[1], self.num_heads, -1).transpose(1, 2)

        q, k, v = heads(self.q(x)), heads(self.k(memory)), heads(self.v(memory))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(a.transpose(1, 2).reshape(x.shape))


class EncoderLayer(nn.Module):
    """Pre-norm, bidirectional."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = Attention(dim, num_heads)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class DecoderLayer(nn.Module):
    """Pre-norm: causal over itself, then over all of the encoder's output."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2, self.norm3 = nn.LayerNorm(dim), nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention, self.cross = Attention(dim, num_heads, causal=True), Attention(dim, num_heads)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y)
        x = x + self.cross(self.norm2(x), memory)
        return x + self.down(F.gelu(self.up(self.norm3(x))))


class EncoderDecoder(nn.Module):
    """Encoder-decoder transformer as one would write it by hand (Vaswani et al., 2017, pre-norm)."""

    def __init__(
        self, vocab: int = 96, dim: int = 32, num_heads: int = 4, num_layers: int = 2, max_len: int = 64
    ) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, dim), nn.Embedding(max_len, dim)
        self.encoder = nn.ModuleList(EncoderLayer(dim, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(dim)
        self.target_tok, self.target_pos = nn.Embedding(vocab, dim), nn.Embedding(max_len, dim)
        self.decoder = nn.ModuleList(DecoderLayer(dim, num_heads) for _ in range(num_layers))
        self.target_norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        x = self.tok(source) + self.pos(torch.arange(source.shape[1], device=source.device))
        for layer in self.encoder:
            x = layer(x)
        memory = self.norm(x)
        y = self.target_tok(target) + self.target_pos(torch.arange(target.shape[1], device=target.device))
        for layer in self.decoder:
            y = layer(y, memory)
        logits: torch.Tensor = self.head(self.target_norm(y))
        return logits


def make_encoder_decoder(seed: int = 0, **kwargs: Any) -> EncoderDecoder:
    """An EncoderDecoder with random weights; its loss is `gpt_loss`."""
    torch.manual_seed(seed)
    return EncoderDecoder(**kwargs)


def encoder_decoder_task() -> tuple[nn.Module, dict[str, torch.Tensor], Any]:
    """A factory for the command line."""
    return make_encoder_decoder(), translation_batch(2, 16, 12), gpt_loss


def translation_batch(batch: int, source: int, target: int, seed: int = 1, vocab: int = 96) -> dict[str, torch.Tensor]:
    """Random source and target tokens and labels."""
    g = torch.Generator().manual_seed(seed)
    shapes = {"source": source, "target": target, "labels": target}
    return {name: torch.randint(0, vocab, (batch, length), generator=g) for name, length in shapes.items()}


class SkipGPT(GPT):
    """U-Net-like: what layer i gives is added to what goes into layer n - 1 - i, scaled by a parameter."""

    def __init__(self, num_layers: int = 5, **kwargs: Any) -> None:
        super().__init__(num_layers=num_layers, **kwargs)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.0, num_layers // 2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tok(ids) + self.pos(torch.arange(ids.shape[1], device=ids.device))
        half, skips = len(self.blocks) // 2, []
        for index, block in enumerate(self.blocks):
            if index >= len(self.blocks) - half:
                x = x + self.scale[len(self.blocks) - 1 - index] * skips.pop()
            x = block(x)
            if index < half:
                skips.append(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def make_skips(seed: int = 0, **kwargs: Any) -> SkipGPT:
    """A SkipGPT with random weights; its loss is `gpt_loss`."""
    torch.manual_seed(seed)
    return SkipGPT(**kwargs)


def make_t5(seed: int = 0, **kwargs: Any) -> nn.Module:
    """A small HF T5: one tied embedding, biases by relative position shared by the layers of a stack."""
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(seed)
    settings: dict[str, Any] = dict(
        vocab_size=96, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_decoder_layers=2, num_heads=4,
        relative_attention_num_buckets=8, relative_attention_max_distance=12, dropout_rate=0.0,
        decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    model: nn.Module = T5ForConditionalGeneration(T5Config(**{**settings, **kwargs}))
    return model


def make_bert(seed: int = 0, **kwargs: Any) -> nn.Module:
    """A small HF BERT with its masked language model: every token sees all."""
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(seed)
    settings: dict[str, Any] = dict(
        vocab_size=96, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model: nn.Module = BertForMaskedLM(BertConfig(**{**settings, **kwargs}))
    for name, parameter in model.named_parameters():
        if name.endswith("key.bias"):  # its gradient is zero but for rounding
            parameter.requires_grad_(False)
    return model


def make_bart(seed: int = 0, **kwargs: Any) -> nn.Module:
    """A small HF BART: learned positions, one tied embedding, a bias of the logits that is not trained."""
    from transformers import BartConfig, BartForConditionalGeneration

    torch.manual_seed(seed)
    settings: dict[str, Any] = dict(
        vocab_size=96, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=64, dropout=0.0,
        attention_dropout=0.0, activation_dropout=0.0, pad_token_id=1, bos_token_id=0, eos_token_id=2,
        decoder_start_token_id=2,
    )  # fmt: skip
    model: nn.Module = BartForConditionalGeneration(BartConfig(**{**settings, **kwargs}))
    model.final_logits_bias.copy_(torch.randn(1, 96))
    for name, parameter in model.named_parameters():
        if name.endswith("k_proj.bias"):  # its gradient is zero but for rounding
            parameter.requires_grad_(False)
    return model


def alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if two random tensors may have one distribution; without randomness they are equal."""
    one, other = one.double(), other.double()
    if torch.equal(one, other):
        return True
    spread, error = float(one.std(correction=0)), 6 * float(one.std(correction=0)) / one.numel() ** 0.5
    within = float(other.max() - other.min()) <= 2 * float(one.max() - one.min())
    return bool(
        spread > 0
        and within
        and abs(float(other.mean() - one.mean())) <= 2 * error
        and abs(float(other.std(correction=0)) - spread) <= 2 * error
    )
