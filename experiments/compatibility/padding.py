"""Padded batches, as users of transformers have them: what they bring, where the padding is, which labels count.

Padding is the padding token among the inputs and, where labels count on it, among the labels. Lengths of the samples:
all of it, a little less, less than half (so that a window ends in padding), and none, which the last side alone has.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

SAMPLES = 4
LEFT, RIGHT = "left", "right"
IGNORED = -100  # the label of a token that does not count
_POSITIONS, _TYPES = "position_ids", "token_type_ids"


@dataclass(frozen=True)
class Inputs:
    """A set of inputs that a batch has besides its tokens and labels. A program is made for every set.

    Attributes:
        names: the inputs; a class whose forward does not take them all is not given this set.
        any_of: inputs of which a class is given those that it takes, if it takes one.
    """

    names: tuple[str, ...]
    any_of: tuple[str, ...] = ()

    def of(self, model: torch.nn.Module) -> tuple[str, ...] | None:
        """Return the inputs of this set for a model; None if the set is not for it."""
        takes = inspect.signature(model.forward).parameters
        more = tuple(n for n in self.any_of if n in takes and (n != _TYPES or _num_types(model) > 1))
        two = bool(getattr(model.config, "is_encoder_decoder", False))
        if any(n not in takes or (n.startswith("decoder_") and not two) for n in self.names):
            return None
        return None if self.any_of and not more else (*self.names, *more)


INPUTS = {
    "tokens alone": Inputs(()),
    "mask": Inputs(("attention_mask",)),
    "mask, positions, types": Inputs(("attention_mask",), (_POSITIONS, _TYPES)),
    "both masks": Inputs(("attention_mask", "decoder_attention_mask")),
    "target mask": Inputs(("decoder_attention_mask",)),
    "mask, target tokens": Inputs(("attention_mask", "decoder_input_ids")),
}


@dataclass(frozen=True)
class Padding:
    """Where the padding of a batch is.

    Attributes:
        source, target: LEFT or RIGHT; only encoder-decoders have a target.
        counts: labels count on padding, too.
        has_empty: one sample is nothing but padding.
    """

    source: str
    target: str
    counts: bool
    has_empty: bool = False

    def __str__(self) -> str:
        sides = self.source if self.source == self.target else f"{self.source} of the source, {self.target}"
        empty = ", a sample of padding alone" if self.has_empty else ""
        return f"padding {sides}{empty}, labels {'count' if self.counts else 'ignored'}"


def paddings(two: bool, has_labels: bool) -> Iterator[Padding]:
    """Yield the ways to pad a batch.

    Args:
        two: the model is an encoder-decoder.
        has_labels: every token has a label.
    """
    sides = [(RIGHT, RIGHT), (LEFT, LEFT)] + [(RIGHT, LEFT), (LEFT, RIGHT)] * two
    for counts in (False, True) if has_labels else (False,):
        for source, target in sides:
            yield Padding(source, target, counts)
    yield Padding(RIGHT, LEFT if two else RIGHT, has_labels, has_empty=True)


def padded(
    model: torch.nn.Module, batch: Mapping[str, torch.Tensor], names: Sequence[str], padding: Padding
) -> dict[str, torch.Tensor]:
    """Return a batch with padding.

    Args:
        batch: input_ids [SAMPLES, length] and labels, of tokens [SAMPLES, length] or of classes [SAMPLES].
        names: the inputs that it has besides them.
    """
    config = model.config.get_text_config()
    two = bool(getattr(model.config, "is_encoder_decoder", False))
    token = _padding_token(config)
    ids, labels = batch["input_ids"], batch["labels"]
    source = mask_of(ids.shape[1], padding.source, padding.has_empty)
    out = {"input_ids": ids.masked_fill(source == 0, token), "labels": labels}
    if two and labels.dim() == 1:  # it classifies by the end of the sequence
        last = ids.shape[1] - 1 - source.flip(1).argmax(1)
        out["input_ids"][torch.arange(SAMPLES), last] = ids[:, -1]
    target = source
    if labels.dim() > 1:
        target = mask_of(labels.shape[1], padding.target, padding.has_empty) if two else source
        out["labels"] = labels.masked_fill(target == 0, token if padding.counts else IGNORED)
    shifted = labels.masked_fill(target == 0, token).roll(1, -1) if labels.dim() > 1 else ids
    made = {
        "attention_mask": source,
        "decoder_attention_mask": target,
        "decoder_input_ids": shifted,
        _POSITIONS: (source.cumsum(1) - 1).clamp(min=0),
        _TYPES: (torch.arange(ids.shape[1]) >= ids.shape[1] // 2).long().expand_as(ids).contiguous(),
    }
    return out | {name: made[name] for name in names}


def mask_of(length: int, side: str, has_empty: bool = False) -> torch.Tensor:
    """Return a mask [SAMPLES, length]: 1 for a valid token, 0 for padding on one side."""
    lengths = torch.tensor([length, length - 3, length // 3, 0 if has_empty else length - 1])
    mask = (torch.arange(length) < lengths[:, None]).long()
    return mask if side == RIGHT else mask.flip(1)


def _padding_token(config: Any) -> int:
    token = getattr(config, "pad_token_id", None)
    token = token[0] if isinstance(token, (list, tuple)) else token
    return token if isinstance(token, int) and token >= 0 else 0


def _num_types(model: torch.nn.Module) -> int:
    """Return the number of token types that a model has embeddings for."""
    return int(getattr(model.config.get_text_config(), "type_vocab_size", 0) or 0)
