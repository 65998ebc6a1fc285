"""torch.compile of the blocks of a stage: each block's `compute`, inside what ZeRO and recompute hang on the block.

Equal layers share their compiled code (parameters are inputs of it). What communicates, or has a backward of its own,
runs as it is between compiled parts: a graph break at each. Assertions of types, which do nothing but while
type-checking, are left out. Another batch size or sequence length compiles again, from then on for all sizes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from autoplan.runtime.program import Block

__all__ = ["compile_blocks"]

# names of an emitted module that are run as they are: collectives, and autograd functions of the runtime
_APART = (
    "all_gather all_reduce all_to_all attention context_part cross_entropy_sum dropout experts reduce_scatter slice_ "
    "to_partial to_replicate vocab_parallel_cross_entropy_sum vocab_parallel_embedding"
).split()
_ASSERTIONS = ("typed", "vary")


def compile_blocks(stage: nn.Module, backend: str | Callable[..., Any] = "inductor") -> int:
    """Compile every block of an emitted stage in place, before ZeRO is applied to it.

    Args:
        stage: an instance of the emitted `Stage`.
        backend: of torch.compile, by name or as a function; `inductor` needs a C++ compiler on the CPU.

    Returns: how many blocks there are.
    """
    names = vars(sys.modules[type(stage).__module__])
    for name in _APART:
        names[name] = torch.compiler.disable(names[name])  # type: ignore[no-untyped-call]
    for name in _ASSERTIONS:
        names[name] = _value
    blocks = [m for m in stage.modules() if isinstance(m, Block)]
    for block in blocks:
        block.compiled = True
        block.compute = torch.compile(block.compute, backend=backend)  # type: ignore[method-assign]
    return len(blocks)


def _value(x: Any, *_: Any, **__: Any) -> Any:
    return x
