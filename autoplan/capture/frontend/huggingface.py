"""Capture Hugging Face models without changes to their classes, with attention as one op.

A plain trace of their attention builds an explicit s x s mask. For the time of the capture autoplan registers its own
attention and mask functions, which keep attention whole. Both are needed: without padding the mask is plain
`is_causal`, as flash attention and context parallelism require.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from autoplan.capture.frontend import masks as masks_of
from autoplan.capture.frontend.hf_attention import AttentionCall
from autoplan.capture.frontend.masks import Ledger
from autoplan.errors import CaptureError


def is_hf_model(model: nn.Module) -> bool:
    """Return True for a transformers PreTrainedModel, without importing transformers."""
    return any(
        c.__module__.startswith("transformers.") and c.__name__ == "PreTrainedModel" for c in type(model).__mro__
    )


def holds_hf_model(model: nn.Module) -> bool:
    """Return True for a module of a class of transformers, and for one that has such a module inside (PEFT)."""
    return any(c.__module__.startswith("transformers.") for m in model.modules() for c in type(m).__mro__)


def check_masks(model: nn.Module, example_inputs: Mapping[str, torch.Tensor]) -> None:
    """Raise CaptureError for a padding mask that is not [b, s], or whose model is not a Hugging Face model."""
    for name, tokens in (
        ("attention_mask", ("input_ids",)),
        ("decoder_attention_mask", ("decoder_input_ids", "labels", "input_ids")),
    ):
        mask = example_inputs.get(name)
        if mask is None:
            continue
        if not holds_hf_model(model):
            raise CaptureError(f"{name} is read from Hugging Face models only; give the model an input of another name")
        ids = next((example_inputs[n] for n in tokens if n in example_inputs and example_inputs[n].dim() > 1), None)
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


@contextmanager
def configured(model: nn.Module, attribute: str, value: Any) -> Iterator[None]:
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
_COMPILING = "is_torchdynamo_compiling"  # a function of transformers that model files import


def files_with_branches(model: nn.Module) -> list[types.ModuleType]:
    """Return the files of Hugging Face models that ask whether they are compiled, as torch.export says they are."""
    if not holds_hf_model(model):
        return []
    names = {type(m).__module__ for m in model.modules()}
    return [sys.modules[name] for name in sorted(names) if hasattr(sys.modules.get(name), _COMPILING)]


@contextmanager
def capture_attention(model: nn.Module, ledger: Ledger) -> Iterator[None]:
    """Capture attention as one op inside the context; everything is restored on exit.

    The model keeps the attention implementation of its config, so that it takes its usual branches; the functions
    behind 'eager' and 'sdpa' are replaced (`capture.frontend.hf_attention`, `capture.frontend.masks`). Other
    implementations (flash attention) count as 'sdpa'.

    Args:
        ledger: which masks are tensors; one ledger per capture, shared by all its traces.
    """
    from transformers import masking_utils
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    masks = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
    configs: dict[int, Any] = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    implementations = {key: getattr(config, "_attn_implementation", None) for key, config in configs.items()}
    kernels = {key: name for key, name in implementations.items() if name is not None and name not in _CAPTURED}
    functions = {name: AttentionCall(name, ledger, kernels) for name in _CAPTURED}
    get = ALL_ATTENTION_FUNCTIONS.get_interface

    def get_interface(name: str | None, default: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function of an implementation; `default`: that of the model's file, which is 'eager'."""
        return replace(functions["eager"], own=default) if name == "eager" else get(name, default)

    make = masks["sdpa"]
    with ExitStack() as stack:
        for name, function in functions.items():
            stack.enter_context(_overridden(ALL_ATTENTION_FUNCTIONS, name, function))
            stack.enter_context(_overridden(masks, name, masks_of.mask_function(name, make, ledger)))
        stack.enter_context(patch.object(ALL_ATTENTION_FUNCTIONS, "get_interface", get_interface))
        stack.enter_context(patch.object(masking_utils, "find_packed_sequence_indices", masks_of.document_starts))
        if ledger.as_run:
            for file in files_with_branches(model):
                stack.enter_context(patch.object(file, _COMPILING, lambda: False))
        for key, kernel in kernels.items():
            configs[key]._attn_implementation = "sdpa"
            stack.callback(setattr, configs[key], "_attn_implementation", kernel)
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
