"""Names for emitted modules: the base class of a block, and everything that emitted text uses.

Emitted modules begin with `from autoplan.runtime.program import *`.
"""

from __future__ import annotations

import importlib.util
import linecache
import os
import sys
import uuid
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from spmd_types import I, P, R
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autoplan.runtime.attention import attention
from autoplan.runtime.context import context_length, context_part, context_positions, own_part
from autoplan.runtime.convert import (
    all_gather,
    all_reduce,
    all_to_all,
    extreme,
    reduce_scatter,
    slice_,
    to_partial,
    to_replicate,
    typed,
    vary,
)
from autoplan.runtime.draws import draw
from autoplan.runtime.dropout import dropout
from autoplan.runtime.embedding import vocab_parallel_embedding
from autoplan.runtime.experts import experts
from autoplan.runtime.host_copies import kept_copies
from autoplan.runtime.loss import cross_entropy_sum, vocab_parallel_cross_entropy_sum
from autoplan.runtime.params import without_memory
from autoplan.runtime.recompute import OffloadedActivations, Offloads, Regions
from autoplan.runtime.scans import scan
from autoplan.runtime.side_stream import SideStream
from autoplan.runtime.statistics import running_statistics, update_buffer

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
    "context_positions",
    "cross_entropy_sum",
    "draw",
    "dropout",
    "experts",
    "extreme",
    "nn",
    "own_part",
    "parameter",
    "reduce_scatter",
    "running_statistics",
    "scan",
    "slice_",
    "to_partial",
    "to_replicate",
    "torch",
    "typed",
    "update_buffer",
    "vary",
    "vocab_parallel_cross_entropy_sum",
    "vocab_parallel_embedding",
]


class Block(nn.Module):
    """A unit of recompute and of ZeRO gathering. Sub-classes define `compute`.

    Args:
        recompute: which activations are dropped and recomputed in the backward: `none`; `full`, all inside the block;
            names of its regions joined by `+` (`attention+norms`); `selective`, those inside the attention region,
            except its result. Or `offload`: the activations wait in the memory of the host.
        site: number of the block's first draw (a dropout, random numbers) in the whole program.
        gathered: what happens under ZeRO 3 to parameters gathered for the forward: `again`, they are dropped and
            gathered again for the backward; `keep`, the backward follows at once; `drop`, the backward needs no
            parameter.

    Sub-classes name in `held` the buffers that `compute` takes as arguments: those that it gives new values. So a
    recompute reads what the forward read.
    """

    held: tuple[str, ...] = ()

    def __init__(self, *, recompute: str = "none", site: int = 0, gathered: str = "again") -> None:
        super().__init__()
        self.recompute = recompute
        self.site = site
        self.gathered = gathered
        self.compiled = False
        self.outputs: dict[str, Tensor] | None = None  # while an evaluation asks for them (autoplan.runtime.outputs)
        self._regions: Regions | None = None
        self._ran: weakref.WeakSet[Regions | OffloadedActivations] = weakref.WeakSet()
        self._offloads, self._follows = Offloads(), False

    def compute(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the block's outputs."""
        raise NotImplementedError(f"{type(self).__name__} defines no compute")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run `compute`, with activations treated as `recompute` says."""
        for name in self.held:
            kwargs[name] = self._buffers[name]
        if self.recompute == "none" or not torch.is_grad_enabled():
            return self.compute(*args, **kwargs)
        run: Callable[..., Any] = _RUNS.get(self.recompute, Block._run_regions)
        return run(self, *args, **kwargs)

    def _run_full(self, *args: Any, **kwargs: Any) -> Any:
        # no generator state to restore: random numbers are functions of their positions
        return checkpoint(
            self.compute, *args, use_reentrant=False, preserve_rng_state=False, context_fn=kept_copies, **kwargs
        )

    def _run_offloaded(self, *args: Any, **kwargs: Any) -> Any:
        resident = [x for x in (*self._parameters.values(), *self._buffers.values()) if x is not None]
        with self._offloads.open(resident, self._follows) as moved:
            self._ran.add(moved)
            return self.compute(*args, **kwargs)

    def _run_regions(self, *args: Any, **kwargs: Any) -> Any:
        with Regions() as self._regions:
            self._ran.add(self._regions)
            try:
                return self.compute(*args, **kwargs)
            finally:
                self._regions = None

    def output(self, name: str, value: Tensor) -> None:
        """Keep a result of the model if an evaluation asks for it."""
        if self.outputs is not None:
            self.outputs[name] = value

    @property
    def whole_backward(self) -> bool:
        """True if the two parts of a split backward would each repeat work.

        They repeat a recompute, and compiled code, which has one backward for inputs and parameters together.
        """
        return self.compiled or self.recompute != "none"

    def let_go(self) -> None:
        """Free recomputed and fetched activations after a backward with retain_graph=True."""
        for kept in self._ran:
            kept.let_go()

    def again(self, region: str, fn: Callable[..., Any], *args: Tensor) -> Any:
        """Return `fn(*args)`; recompute it in the backward if `recompute` names its region."""
        if self._regions is not None:
            if self.recompute == "selective" and region == "attention":
                return self._regions.run(fn, args, drop_result=False)
            if region in self.recompute.split("+"):
                return self._regions.run(fn, args, drop_result=True)
        return fn(*args)


# How each kind of recompute runs a block; any other text names regions.
_RUNS: Mapping[str, Callable[..., Any]] = {"full": Block._run_full, "offload": Block._run_offloaded}


def copy_beside_computing(stage: nn.Module, device: torch.device) -> None:
    """Let all blocks of a stage that offload activations from a CUDA device share one stream for the copies."""
    blocks = [m for m in stage.modules() if isinstance(m, Block)]
    if all(block.recompute != "offload" for block in blocks):
        return
    shared = Offloads(SideStream.of(device))
    for before, block in zip([None, *blocks], blocks, strict=False):
        block._offloads = shared
        block._follows = before is not None and before.recompute == block.recompute == "offload"


def parameter(shape: tuple[int, ...], dtype: torch.dtype, trainable: bool) -> nn.Parameter:
    """Return a local shard that has no memory yet: a stage may be larger than the memory of a process."""
    return nn.Parameter(without_memory(shape, dtype), requires_grad=trainable)


def unwritten_folder() -> Path:
    """Return a path that names no folder, another one at each call, for modules that no file holds."""
    return Path(os.sep, f"<autoplan program {uuid.uuid4().hex[:8]}>")


def load_module(path: Path, name: str, text: str) -> ModuleType:
    """Run `text`, the emitted source of the file at `path`, as the module `name`.

    The file is not read and need not exist: `text` runs even if something else writes to the file, and tracebacks,
    `inspect` and debuggers show the lines of `text`. Where there is a file for readers, the caller makes sure that it
    has the same text.

    Raises:
        ValueError: `path` does not end in .py.
    """
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None:
        raise ValueError(f"emitted module {path} has no name that Python imports: it needs to end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    # without a modification time the entry never counts as outdated
    linecache.cache[str(path)] = (len(text), None, text.splitlines(keepends=True), str(path))
    exec(compile(text, str(path), "exec"), module.__dict__)
    return module
