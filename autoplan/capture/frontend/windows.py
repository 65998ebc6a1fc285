"""Attention over a sliding window, in chunks or documents, with sinks or capped scores, or with a bias, as one op each.

All of them may also be causal, and drop some of the probabilities. torch has no operation for them that capture could
keep whole.
"""

from __future__ import annotations

import torch

from autoplan.capture.frontend.marker import marker


def _like(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object) -> torch.Tensor:
    return query.new_empty((*query.shape[:-1], value.shape[-1]))


_QKV = "Tensor query, Tensor key, Tensor value"
# a token sees only its own document ([b, s]), of it the last `window` tokens and `ahead` more, or its own chunk;
# `sinks` [h] take part in the softmax; `key_bias` [b or 1, h or 1, 1, t] is added to the scores
_SEEN = (
    "Tensor? documents, Tensor? sinks, Tensor? key_bias, bool causal, float? scale, SymInt? window, SymInt? ahead, "
    "SymInt? chunk, float? softcap, float dropout_p"
)
marker(f"masked_attention({_QKV}, {_SEEN}) -> Tensor", _like)
# the bias is added to the scores, and broadcastable to them
marker(f"biased_attention({_QKV}, Tensor bias, bool causal, float? scale, float dropout_p) -> Tensor", _like)
