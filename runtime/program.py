"""What emitted modules are made of: the base of a block, and everything their text names.

`from autoplan.runtime.program import *`.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autoplan.runtime.attention import attention
from autoplan.runtime.context import context_length, context_part
from autoplan.runtime.convert import (
    I,
    P,
    R,
    all_gather,
    all_reduce,
    all_to_all,
    reduce_scatter,
    slice_,
    to_partial,
    to_replicate,
    typed,
    vary,
)
from autoplan.runtime.dropout import dropout
from autoplan.runtime.embedding import vocab_parallel_embedding
from autoplan.runtime.experts import experts
from autoplan.runtime.loss import cross_entropy_sum, vocab_parallel_cross_entropy_sum

__all__ = [
    "Block",
    "F",
    "I",
    "P",
    "R",
    "Tensor",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "attention",
    "context_length",
    "context_part",
    "cross_entropy_sum",
    "dropout",
    "experts",
    "nn",
    "parameter",
    "reduce_scatter",
    "slice_",
    "to_partial",
    "to_replicate",
    "torch",
    "typed",
    "vary",
    "vocab_parallel_cross_entropy_sum",
    "vocab_parallel_embedding",
]


class Block(nn.Module):
    """A unit of recompute and of ZeRO gathering. Sub-classes define `compute`.

    Args:
        recompute: drop the activations inside the block and compute them again in the backward.
        site: number of the block's first dropout in the whole program.
    """

    def __init__(self, *, recompute: bool = False, site: int = 0) -> None:
        super().__init__()
        self.recompute, self.site = recompute, site

    def compute(self, *args: Any, **kwargs: Any) -> Any:
        """The block itself."""
        raise NotImplementedError(f"{type(self).__name__} defines no compute")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """`compute`, checkpointed if `recompute`."""
        if self.recompute and torch.is_grad_enabled():
            # no generator state to restore: dropout here is a function of its position
            return checkpoint(self.compute, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
        return self.compute(*args, **kwargs)


def parameter(shape: tuple[int, ...], dtype: torch.dtype, trainable: bool) -> nn.Parameter:
    """An uninitialised local shard."""
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=trainable)


def load_module(path: Path, name: str) -> ModuleType:
    """Import an emitted file under `name`."""
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(f"emitted module {path} cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
