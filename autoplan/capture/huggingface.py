"""Hugging Face models: classes untouched, attention captured as one op.

Tracing HF attention as it is builds an explicit S x S mask. Registering an attention function and a mask function for
the time of the capture (both: without padding the mask is plain `is_causal`, which flash attention and context
parallelism need) keeps it whole.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from autoplan.capture import windows  # noqa: F401  registers the op
from autoplan.capture.left_out import check_attention_dropout
from autoplan.cost_models.errors import CaptureError

_NAME = "autoplan_capture"
_HIDDEN = -1e30  # added to a score: its share is 0.0 in every dtype, and it is a finite number also in bfloat16


def is_hf_model(model: nn.Module) -> bool:
    """True for a transformers PreTrainedModel, without importing transformers."""
    return any(
        c.__module__.startswith("transformers.") and c.__name__ == "PreTrainedModel" for c in type(model).__mro__
    )


def check_masks(model: nn.Module, example_inputs: Mapping[str, torch.Tensor]) -> None:
    """CaptureError for a padding mask that is not [b, s], or that no Hugging Face model reads."""
    for name, tokens in (
        ("attention_mask", ("input_ids",)),
        ("decoder_attention_mask", ("decoder_input_ids", "labels")),
    ):
        mask = example_inputs.get(name)
        if mask is None:
            continue
        if not is_hf_model(model):
            raise CaptureError(f"{name} is read from Hugging Face models only; give the model an input of another name")
        ids = next((example_inputs[n] for n in tokens if n in example_inputs), None)
        if mask.ndim != 2 or (ids is not None and mask.shape != ids.shape):
            raise CaptureError(
                f"{name} has shape {tuple(mask.shape)}; it must say of every token, [b, s], whether it counts"
            )


@contextmanager
def own_hooks(model: nn.Module) -> Iterator[None]:
    """transformers installs hooks for what a forward is to put aside, for good; those of the capture go with it."""
    mark = "_output_capturing_hooks_installed"
    before = {m: (set(m._forward_hooks), mark in m.__dict__) for m in model.modules()}
    try:
        yield
    finally:
        for module, (hooks, marked) in before.items():
            for key in set(module._forward_hooks) - hooks:
                del module._forward_hooks[key]
            if not marked:
                module.__dict__.pop(mark, None)


def recorded_outputs() -> dict[str, list[Any]]:
    """What the hooks of a Hugging Face model have put aside so far in the forward that runs, by name: with
    `output_router_logits` the logits of every router. They bypass the results of layers.

    `_active_collector` is private to transformers (tried on 5.23); there is no public way to see what hooks collect.
    """
    from transformers.utils.output_capturing import _active_collector

    found = _active_collector.get() or {}
    return {name: kept for name, kept in found.items() if isinstance(kept, list)}


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    if kwargs.get("softcap") is not None:
        raise CaptureError("attention with logit soft-capping is not supported")
    if kwargs.get("s_aux") is not None:
        raise CaptureError("attention with sinks (a learned logit per head) is not supported")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    documents = attention_mask if attention_mask is not None and attention_mask.ndim == 2 else None
    bias = kwargs.get("position_bias")
    if bias is not None and not _adds_zeros(module):
        if (attention_mask is not None and documents is None) or kwargs.get("sliding_window") is not None:
            raise CaptureError("attention with a bias by position is captured where it has no other mask and no window")
        if documents is not None:
            bias = bias.masked_fill((documents <= 0)[:, None, None, :], _HIDDEN)
        check_attention_dropout(dropout, "attention", "set the model's dropout to 0")
        biased = torch.ops.autoplan.biased_attention(query, key, value, bias, bool(causal), scaling)
        return biased.transpose(1, 2).contiguous(), None
    window = None if kwargs.get("sliding_window") is None else int(kwargs["sliding_window"])
    if window is not None and (not causal or (attention_mask is not None and documents is None)):
        raise CaptureError("attention over a sliding window is captured where it is causal and has no other mask")
    if documents is not None and query.shape[2] != key.shape[2]:  # over the tokens of the other sequence that count
        attention_mask, documents = (documents > 0)[:, None, None, :], None
    if documents is not None or window is not None:
        check_attention_dropout(dropout, "attention", "set the model's dropout to 0")
        masked = torch.ops.autoplan.masked_attention(query, key, value, documents, bool(causal), scaling, window)
        return masked.transpose(1, 2).contiguous(), None
    out = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        dropout_p=dropout,
        is_causal=causal and attention_mask is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out.transpose(1, 2).contiguous(), None


def _adds_zeros(module: nn.Module) -> bool:
    """True for attention of T5's kind over the other sequence: the bias by position that it is given is zeros."""
    learned = getattr(module, "has_relative_attention_bias", True)
    return not learned and bool(getattr(module, "is_decoder", False)) and getattr(module, "is_causal", True) is False


def _documents_of(mask: torch.Tensor, causal: bool, window: int | None) -> torch.Tensor:
    """[b, s], for `autoplan.runtime.attention`: to which document every token belongs, from the mask of what counts.

    Tokens that count are document 1. Padding is seen by nobody and sees document 1 (-2), as in transformers; but where
    a causal query would see no token that counts, where transformers' kernels differ, padding sees itself (0).
    """
    counts = (mask != 0).to(torch.int64)
    if not causal:
        return 3 * counts - 2
    so_far = counts.cumsum(-1)
    if window is not None:
        so_far = so_far - F.pad(so_far, (window, 0))[:, :-window]
    return 3 * counts - 2 * (so_far > 0).to(torch.int64)


def _mask_function(packed: list[torch.Tensor], padded: bool, target: bool) -> Callable[..., torch.Tensor | None]:
    from transformers.masking_utils import bidirectional_mask_function

    def documents(
        *args: Any,
        config: Any = None,
        local_size: int | None = None,
        attention_mask: torch.Tensor | None = None,
        mask_function: Any = None,
        **kwargs: Any,
    ) -> torch.Tensor | None:
        """The mask of the layers that ask for one: none, as their attention knows that it is causal, or its window; or
        [b, s], to which document every token belongs.

        Raises: CaptureError for a mask that this would lose.
        """
        if local_size is not None and local_size != getattr(config, "sliding_window", None):
            raise CaptureError(f"attention in chunks of {local_size} tokens is not supported")
        causal = mask_function is not bidirectional_mask_function
        if attention_mask is not None and (target if causal else padded):
            return _documents_of(attention_mask, causal, local_size)
        return packed[-1] if packed and causal else None

    return documents


@contextmanager
def configured(model: nn.Module, attribute: str, value: str) -> Iterator[None]:
    """Every config of the model that has the attribute has this value inside."""
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values()
    before = [(c, getattr(c, attribute)) for c in configs if hasattr(c, attribute)]
    try:
        for config, _ in before:
            setattr(config, attribute, value)
        yield
    finally:
        for config, old in before:
            setattr(config, attribute, old)


@contextmanager
def capture_attention(model: nn.Module, inputs: Collection[str] = ()) -> Iterator[None]:
    """Use the captured form of attention inside; the model's own choice is restored.

    Args:
        inputs: names of what the batch has. `attention_mask` is padding, `decoder_attention_mask` that of the target of
            an encoder-decoder; without them a mask is one that the model makes of nothing. `position_ids`: where they
            do not follow, another document begins.
    """
    from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

    positions, padded = "position_ids" in inputs, "attention_mask" in inputs
    two = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    target = "decoder_attention_mask" in inputs if two else padded

    packed: list[torch.Tensor] = []

    def starts(position_ids: torch.Tensor) -> torch.Tensor | None:
        if positions:
            # as find_packed_sequence_indices of transformers: where a position does not follow the one before
            follows = position_ids[:, 1:] - position_ids[:, :-1] == 1
            packed.append(F.pad((~follows).to(torch.int64), (1, 0)).cumsum(-1))
        return None

    AttentionInterface.register(_NAME, _attention)
    AttentionMaskInterface.register(_NAME, _mask_function(packed, padded, target))
    before = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = starts
    try:
        with configured(model, "_attn_implementation", _NAME):
            yield
    finally:
        masking_utils.find_packed_sequence_indices = before


def default_example(model: nn.Module) -> dict[str, torch.Tensor]:
    """Shapes to capture a language model with when the caller gives none: batch 2, up to 2,048 tokens."""
    limit = getattr(model.config, "max_position_embeddings", None) or 2048
    ids = torch.zeros(2, min(int(limit), 2048), dtype=torch.long)
    return {"input_ids": ids, "labels": ids.clone()}
