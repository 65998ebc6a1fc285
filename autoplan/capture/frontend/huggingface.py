"""Capture Hugging Face models without changes to their classes, with attention as one op.

A plain trace of their attention builds an explicit s x s mask. For the time of the capture autoplan registers its own
attention and mask functions, which keep attention whole. Both are needed: without padding the mask is plain
`is_causal`, as flash attention and context parallelism require.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from autoplan.capture.frontend import masks as masks_of
from autoplan.capture.frontend import windows  # noqa: F401  registers the op
from autoplan.capture.frontend.left_out import check_attention_dropout
from autoplan.capture.frontend.masks import Ledger, PendingMask, taken
from autoplan.errors import CaptureError

_HIDDEN = -1e30  # added to a score: its share becomes 0.0 in every dtype, and the number is finite in bfloat16, too


def is_hf_model(model: nn.Module) -> bool:
    """Return True for a transformers PreTrainedModel, without importing transformers."""
    return any(
        c.__module__.startswith("transformers.") and c.__name__ == "PreTrainedModel" for c in type(model).__mro__
    )


def check_masks(model: nn.Module, example_inputs: Mapping[str, torch.Tensor]) -> None:
    """Raise CaptureError for a padding mask that is not [b, s], or whose model is not a Hugging Face model."""
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
    """Remove on exit the hooks that transformers installs for recorded outputs; it would leave them in the model."""
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
    """Return the outputs that hooks of a Hugging Face model have recorded so far in the running forward, by name.

    With `output_router_logits` these are the logits of every router. They bypass the results of layers.

    `_active_collector` is private to transformers (tried on 5.23); there is no public way to see what hooks collect.
    """
    from transformers.utils.output_capturing import _active_collector

    found = _active_collector.get() or {}
    return {name: kept for name, kept in found.items() if isinstance(kept, list)}


# Arguments that models pass to their own attention functions ('eager') and that change no number there.
_NO_NUMBERS = frozenset(
    "position_ids cache_position use_cache output_attentions output_hidden_states output_router_logits return_dict "
    "cu_seq_lens_q cu_seq_lens_k max_length_q max_length_k deterministic labels logits_to_keep".split()
)


def _attention(
    implementation: str,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | PendingMask | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    position_bias: torch.Tensor | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute the attention of `implementation` as one op.

    The mask decides which keys a query sees. Without a mask `is_causal` decides, if the implementation uses it.
    """
    _refuse_unknown(kwargs, implementation)
    flag = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    causal, window, documents = flag and implementation == "sdpa" and attention_mask is None, None, None
    if isinstance(attention_mask, PendingMask):
        asked, documents = taken(attention_mask, query, key)
        attention_mask, causal, window = None, asked.causal, asked.window
        if asked.replaced and not flag:
            raise CaptureError(
                f"{type(module).__name__} is given a causal mask but its is_causal is False: with its attention, "
                "'sdpa', transformers makes it causal or not by whether there is padding; set is_causal to True, or "
                "use attn_implementation='eager'"
            )
        if sliding_window is not None and sliding_window != window:
            raise CaptureError(
                f"{type(module).__name__} has a sliding window of {sliding_window} but its mask one of {window}: "
                "kernels of transformers differ in which of the two they use"
            )
    if position_bias is not None and not _adds_zeros(module):
        if attention_mask is not None or window is not None:
            raise CaptureError("attention with a bias by position is captured where it has no other mask and no window")
        if documents is not None:
            position_bias = position_bias.masked_fill((documents <= 0)[:, None, None, :], _HIDDEN)
        check_attention_dropout(dropout, "attention", "set the model's dropout to 0")
        biased = torch.ops.autoplan.biased_attention(query, key, value, position_bias, causal, scaling)
        return biased.transpose(1, 2).contiguous(), None
    if documents is not None and query.shape[2] != key.shape[2]:  # cross-attention: the other sequence's valid tokens
        attention_mask, documents = (documents > 0)[:, None, None, :], None
    if documents is not None or window is not None:
        check_attention_dropout(dropout, "attention", "set the model's dropout to 0")
        masked = torch.ops.autoplan.masked_attention(query, key, value, documents, causal, scaling, window)
        return masked.transpose(1, 2).contiguous(), None
    out = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        dropout_p=dropout,
        is_causal=causal,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out.transpose(1, 2).contiguous(), None


def _refuse_unknown(given: Mapping[str, Any], implementation: str) -> None:
    """Raise CaptureError for an argument of an attention function that changes its result.

    The function of 'sdpa' is transformers' own and ignores the rest; the function of 'eager' is in every model's file.
    """
    if given.get("softcap") is not None:
        raise CaptureError("attention with logit soft-capping is not supported")
    if given.get("s_aux") is not None or given.get("sinks") is not None:
        raise CaptureError("attention with sinks (a learned logit per head) is not supported")
    unknown = sorted(n for n, x in given.items() if n not in _NO_NUMBERS and x is not None and x is not False)
    if unknown and implementation == "eager":
        raise CaptureError(f"the attention function is given {', '.join(unknown)}, which is not supported")


def _adds_zeros(module: nn.Module) -> bool:
    """Return True for cross-attention as in T5, where the position bias it is given is all zeros."""
    learned = getattr(module, "has_relative_attention_bias", True)
    return not learned and bool(getattr(module, "is_decoder", False)) and getattr(module, "is_causal", True) is False


@contextmanager
def configured(model: nn.Module, attribute: str, value: str) -> Iterator[None]:
    """Set the attribute to this value in every config of the model that has it, and restore it on exit."""
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values()
    before = [(c, getattr(c, attribute)) for c in configs if hasattr(c, attribute)]
    try:
        for config, _ in before:
            setattr(config, attribute, value)
        yield
    finally:
        for config, old in before:
            setattr(config, attribute, old)


_CAPTURED = ("eager", "sdpa")


@contextmanager
def capture_attention(model: nn.Module, ledger: Ledger) -> Iterator[None]:
    """Capture attention as one op inside the context; everything is restored on exit.

    The model keeps the attention implementation of its config, so that it takes its usual branches; the functions
    behind 'eager' and 'sdpa' are replaced (`capture.frontend.masks`). Other implementations (flash attention) count as
    'sdpa'.

    Args:
        ledger: which masks are tensors; one ledger per capture, shared by all its traces.
    """
    from transformers import masking_utils
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    masks = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
    packed: list[torch.Tensor | None] = []
    with ExitStack() as stack:
        make = masks["sdpa"]
        for name in _CAPTURED:
            function = masks_of.mask_function(name, make, ledger, packed)
            stack.enter_context(_overridden(ALL_ATTENTION_FUNCTIONS, name, functools.partial(_attention, name)))
            stack.enter_context(_overridden(masks, name, function))
        before = masking_utils.find_packed_sequence_indices

        def starts(position_ids: torch.Tensor) -> None:
            packed.append(masks_of.document_starts(position_ids))

        masking_utils.find_packed_sequence_indices = starts
        stack.callback(setattr, masking_utils, "find_packed_sequence_indices", before)
        configs: list[Any] = [m.config for m in model.modules() if hasattr(m, "config")]
        for config in {id(c): c for c in configs}.values():
            old = getattr(config, "_attn_implementation", None)
            if old is not None and old not in _CAPTURED:
                config._attn_implementation = "sdpa"
                stack.callback(setattr, config, "_attn_implementation", old)
        yield


@contextmanager
def _overridden(functions: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Replace `functions[name]` of an interface of transformers, and restore it on exit.

    Entries of the instance come before those of its class; deleting one brings the entry of the class back.
    """
    local = functions._local_mapping
    before = dict(local)
    functions[name] = function
    try:
        yield
    finally:
        del functions[name]
        if name in before:
            functions[name] = before[name]


def default_example(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the default example of a language model: batch 2, up to 2,048 tokens."""
    limit = getattr(model.config, "max_position_embeddings", None) or 2048
    ids = torch.zeros(2, min(int(limit), 2048), dtype=torch.long)
    return {"input_ids": ids, "labels": ids.clone()}
