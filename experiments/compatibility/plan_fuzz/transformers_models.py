"""Small models of transformers, with their own loss (float32) or one of ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from experiments.compatibility.plan_fuzz.models import Batch, LossFn, Task, tokens_of

VOCAB = 48
_SIZES = dict(vocab_size=VOCAB, hidden_size=24, max_position_embeddings=64)
_STACK = dict(**_SIZES, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
DROPS = ("resid_pdrop", "embd_pdrop", "attn_pdrop", "attention_dropout", "hidden_dropout")  # rates of dropout
EAGER = ("GptOss", "Gemma2", "Bloom")  # their attention has sinks, capped scores or a bias by key
AUX = 0.5  # the weight of the routers' loss


def _of(name: str, sizes: Mapping[str, Any], options: Mapping[str, Any]) -> nn.Module:
    import transformers

    config = getattr(transformers, f"{name}Config")
    kind = {"GPT2": "GPT2LMHeadModel", "T5": "T5ForConditionalGeneration", "Bart": "BartForConditionalGeneration"}
    made = getattr(transformers, kind.get(name, f"{name}ForCausalLM"))(config(**{**sizes, **options}))
    if hasattr(made.config, "_experts_implementation"):
        made.config._experts_implementation = "eager"  # grouped products take no float64
    model: nn.Module = made
    return model


def _token(out: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(out.logits.flatten(0, 1), batch["targets"].flatten())


def _documents(found: Batch, kind: str) -> Batch:
    """Padding to the right or left, or two documents per sample."""
    samples, length = found["input_ids"].shape
    place = torch.arange(length).expand(samples, -1)
    size = (3 + 5 * torch.arange(samples) % (length - 3))[:, None]
    if kind == "packed":
        return {**found, "position_ids": torch.where(place < size, place, place - size)}
    labels = "labels" if "labels" in found else "targets"
    mask = (place < size if kind == "padded" else place >= length - size).long()
    return {**found, "attention_mask": mask, labels: found[labels].masked_fill(mask == 0, -100)}


def _task(
    make: Callable[[], nn.Module], own: bool, documents: str, loss: LossFn, coupled: bool = False, draws: bool = False
) -> Task:
    def batch(samples: int, length: int, generator: torch.Generator, dtype: torch.dtype) -> Batch:
        found = tokens_of(samples, length, VOCAB, generator)
        named = {"input_ids": found["ids"], ("labels" if own else "targets"): found["targets"]}
        return _documents(named, documents) if documents else named

    return Task(make, batch, None if own else loss, exact=False, coupled=coupled, evaluates=not coupled, draws=draws)


def causal(kind: str, own: bool = False, documents: str = "", aux: bool = False, **options: Any) -> Task:
    """A causal language model of transformers.

    Args:
        own: True: the model's own loss, which it computes in float32.
        documents: "", "padded", "left" (padding stands there) or "packed".
        aux: the routers' loss belongs to the model's own.
    """
    sizes: dict[str, Any] = {
        "Llama": dict(**_STACK, intermediate_size=44),
        "Mistral": dict(**_STACK, intermediate_size=44, sliding_window=5),
        "Qwen2": dict(**_STACK, intermediate_size=44, use_sliding_window=True, sliding_window=7, max_window_layers=1),
        "GPT2": dict(
            vocab_size=VOCAB, n_embd=24, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0, bos_token_id=1, eos_token_id=1,
        ),
        "Mixtral": dict(**_STACK, intermediate_size=20, num_local_experts=4, num_experts_per_tok=2),
        "Qwen3Moe": dict(
            **_STACK, head_dim=6, intermediate_size=44, moe_intermediate_size=20, num_experts=8,
            num_experts_per_tok=2, norm_topk_prob=True,
        ),
        "DeepseekV3": dict(
            **{**_STACK, "num_key_value_heads": 4}, intermediate_size=44, moe_intermediate_size=20, n_routed_experts=8,
            n_group=4, topk_group=2, num_experts_per_tok=2, n_shared_experts=1, first_k_dense_replace=1,
            q_lora_rank=16, kv_lora_rank=12, qk_rope_head_dim=4, qk_nope_head_dim=6, v_head_dim=10,
        ),
        "GptOss": dict(
            **_STACK, head_dim=6, intermediate_size=20, num_local_experts=4, num_experts_per_tok=2, sliding_window=5
        ),
        "Gemma2": dict(
            **_STACK, head_dim=6, intermediate_size=44, sliding_window=5, attn_logit_softcapping=2.0,
            final_logit_softcapping=5.0,
        ),
        "Bloom": dict(vocab_size=VOCAB, hidden_size=24, n_layer=2, n_head=4),
    }[kind]  # fmt: skip
    more = dict(output_router_logits=True, router_aux_loss_coef=AUX) if aux else {}
    draws = any(rate for name, rate in options.items() if name in DROPS)
    return _task(lambda: _of(kind, sizes, {**options, **more}), own or aux, documents, _token, aux, draws)


def encoder_decoder(kind: str, documents: str = "", **options: Any) -> Task:
    """T5 or BART with its own loss; the target is three quarters as long as the source.

    `documents`: "", "padded" (sources to the right), "left" (sources to the left) or "both" (targets, too).
    """
    sizes: dict[str, Any] = {
        "T5": dict(
            vocab_size=VOCAB, d_model=24, d_kv=6, d_ff=44, num_layers=2, num_decoder_layers=2, num_heads=4,
            relative_attention_num_buckets=8, relative_attention_max_distance=12, dropout_rate=0.0,
            decoder_start_token_id=0, pad_token_id=0,
        ),
        "Bart": dict(
            vocab_size=VOCAB, d_model=24, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
            decoder_attention_heads=4, encoder_ffn_dim=44, decoder_ffn_dim=44, max_position_embeddings=64, dropout=0.0,
            attention_dropout=0.0, activation_dropout=0.0, pad_token_id=1, bos_token_id=0, eos_token_id=2,
            decoder_start_token_id=2,
        ),
    }[kind]  # fmt: skip

    def batch(samples: int, length: int, generator: torch.Generator, dtype: torch.dtype) -> Batch:
        found = tokens_of(samples, length, VOCAB, generator)
        short = length * 3 // 4
        targets = found["targets"][:, :short].contiguous()
        out = {"input_ids": found["ids"], "labels": targets}
        if documents:
            place = torch.arange(length).expand(samples, -1)
            size = (3 + 5 * torch.arange(samples) % (length - 3))[:, None]
            out["attention_mask"] = (place >= length - size if documents == "left" else place < size).long()
        if documents == "both":
            mask = (place < 2 + 7 * torch.arange(samples)[:, None] % (short - 2))[:, :short]
            out["decoder_attention_mask"] = mask.long()
            out["labels"] = targets.masked_fill(~mask, -100)
        return out

    return Task(lambda: _of(kind, sizes, options), batch, None, exact=False)
