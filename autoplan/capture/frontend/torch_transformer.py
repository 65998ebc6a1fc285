"""Capture nn.Transformer and its encoders and decoders with masks.

They look at the values of a mask to learn whether it is causal, which a trace without values cannot do. A mask that
`nn.Transformer.generate_square_subsequent_mask` made is known to be causal, and attention then needs no mask. Any other
mask is a tensor like any other. PyTorch's kernels for inference (nested tensors, a whole layer as one op) stay out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch.nn.modules import transformer


@dataclass
class _Masks:
    """The causal masks of one trace. `make` is PyTorch's function that makes one."""

    make: Callable[..., torch.Tensor]
    made: list[tuple[torch.Tensor, int]] = field(default_factory=list)  # and its version: later in-place ops change it

    def causal(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        mask = self.make(*args, **kwargs)
        self.made.append((mask, mask._version))
        return mask

    def is_causal(self, mask: torch.Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
        """Return what PyTorch's own function returns for the same mask."""
        if is_causal is not None or mask is None:
            return is_causal is True
        known = any(mask is other and mask._version == version for other, version in self.made)
        return known and (size is None or bool(mask.shape[-2] == size))


@contextmanager
def capture_transformers() -> Iterator[None]:
    """Trace PyTorch's transformers without a look at the values of masks inside the context."""
    fast = torch.backends.mha.get_fastpath_enabled()
    masks = _Masks(transformer._generate_square_subsequent_mask)
    made = patch.object(transformer, "_generate_square_subsequent_mask", masks.causal)
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        with made, patch.object(transformer, "_detect_is_causal_mask", masks.is_causal):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
