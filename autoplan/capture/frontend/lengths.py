"""Inputs that are sequences, and the symbol of their length: `s` (the first input's) or `t` (a target's).

The names of the inputs of a Hugging Face encoder-decoder say which sequence they belong to, unless it is a classifier
whose target is as long as its source. In any other model an input starts a second sequence if it is a tensor of whole
numbers [batch, length] whose length differs from the first input's in the example. The first such input sets the length
`t`; every input of this length belongs to the second sequence. Sequences that have equal lengths in the example must
have equal lengths in every batch.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from autoplan.capture.frontend.huggingface import is_hf_model
from autoplan.errors import CaptureError
from autoplan.ir.graph import ModelGraph

_DECODER_INPUTS = frozenset(("labels", "decoder_input_ids", "decoder_attention_mask", "decoder_inputs_embeds"))


def is_encoder_decoder(model: nn.Module) -> bool:
    """Return True for a Hugging Face model whose config says so."""
    return is_hf_model(model) and bool(getattr(model.config, "is_encoder_decoder", False))


def target_inputs(model: nn.Module) -> frozenset[str]:
    """Return the names of inputs that belong to the target sequence whatever their length in the example."""
    return _DECODER_INPUTS if is_encoder_decoder(model) else frozenset()


def length_symbols(example_inputs: Mapping[str, torch.Tensor], targets: frozenset[str]) -> dict[str, str]:
    """Return `s` or `t` for every input that has a sequence in dim 1.

    Args:
        example_inputs: name -> tensor [batch, ...].
        targets: inputs that belong to the target sequence by their names, unless labels are classes.

    Raises:
        CaptureError: if inputs of one sequence have different lengths.
    """
    tensors = {n: x for n, x in example_inputs.items() if x.dim() > 1 and x.shape[1] > 1}
    first = next(iter(example_inputs.values()))
    if first.dim() < 2 or first.shape[1] < 2:
        return {}
    if targets:
        same = _length_of_both(example_inputs, first.shape[1])
        symbols = {n: "t" if n in targets and x.shape[1] != same else "s" for n, x in tensors.items()}
        if "s" in symbols.values():  # else the model takes the target only
            _check_lengths(tensors, symbols)
            return symbols
    source, found = first.shape[1], {}
    target = next((x.shape[1] for x in tensors.values() if x.shape[1] != source and _is_tokens(x)), None)
    for name, x in tensors.items():
        if x.shape[1] == source:
            found[name] = "s"
        elif x.shape[1] == target and (x.dim() > 2 or _is_tokens(x)):
            found[name] = "t"
    return found


def _length_of_both(example_inputs: Mapping[str, torch.Tensor], source: int) -> int | None:
    """Return the length of the source if a target of this length is as long in every batch: that of a classifier.

    It makes its target of the source, and reads classes where the source ends.
    """
    labels = example_inputs.get("labels")
    return source if labels is not None and labels.dim() < 2 else None


def _is_tokens(tensor: torch.Tensor) -> bool:
    """Return True for whole numbers [batch, length]."""
    return tensor.dim() == 2 and not tensor.is_floating_point()


def _check_lengths(tensors: Mapping[str, torch.Tensor], symbols: Mapping[str, str]) -> None:
    found: dict[str, str] = {}
    for name, symbol in symbols.items():
        other = found.setdefault(symbol, name)
        if tensors[other].shape[1] != tensors[name].shape[1]:
            raise CaptureError(
                f"inputs {other} {tuple(tensors[other].shape)} and {name} {tuple(tensors[name].shape)} belong to one "
                "sequence and must have one length"
            )


def lengths_of(
    graph: ModelGraph, model: nn.Module, example_inputs: Mapping[str, torch.Tensor]
) -> tuple[int, int | None]:
    """Return the lengths of the example as `example_lengths` does, or the one length of a graph that has no other."""
    length, target = example_lengths(model, example_inputs)
    return (graph.bounds["s"][0] if graph.parts else length), target


def example_lengths(model: nn.Module, example_inputs: Mapping[str, torch.Tensor]) -> tuple[int, int | None]:
    """Return the tokens of the sequence (1 without one), and of the target if it has a length of its own, else None."""
    symbols = length_symbols(example_inputs, target_inputs(model))
    sizes = {symbol: int(example_inputs[name].shape[1]) for name, symbol in symbols.items()}
    shape = next(iter(example_inputs.values())).shape
    return sizes.get("s", int(shape[1]) if len(shape) > 1 else 1), sizes.get("t")
