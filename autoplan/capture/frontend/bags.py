"""Capture nn.EmbeddingBag of equal bags as a lookup and a sum, which split over samples and over the table."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

_SIGNATURE = inspect.signature(F.embedding_bag)
_PLAIN = {"offsets": None, "max_norm": None, "scale_grad_by_freq": False, "sparse": False, "padding_idx": None}


class CaptureBags(TorchFunctionMode):
    """Replace bags of equal sizes, a row of indices each. Other forms stay PyTorch's own op."""

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is not F.embedding_bag:
            return function(*args, **(kwargs or {}))
        bound = _SIGNATURE.bind(*args, **(kwargs or {}))
        bound.apply_defaults()
        given = bound.arguments
        plain = all(given[name] is value for name, value in _PLAIN.items())
        if not plain or given["input"].dim() != 2 or given["mode"] not in ("sum", "mean"):
            return function(*args, **(kwargs or {}))
        rows, weights = F.embedding(given["input"], given["weight"]), given["per_sample_weights"]
        rows = rows if weights is None else rows * weights.unsqueeze(-1)
        out: torch.Tensor = rows.sum(1) if given["mode"] == "sum" else rows.mean(1)
        return out
