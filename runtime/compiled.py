"""torch.compile of the blocks of a stage: each block's `compute`, inside the hooks of ZeRO and recompute.

Equal layers share their compiled code (parameters are its inputs). A dense block is one graph, whatever is sharded.
Attention is traced; attention over a cut sequence, collectives, dropout, losses, experts and the vocabulary-parallel
embedding are nodes that AOTAutograd looks into (functional collectives, plain operations and our kernels), so that a
compiler fuses up to them. A ring, which sends point to point, is one operator to it. Experts are plain operations where
all are on this rank and one kernel computes their products (bfloat16); else counting rows, sending them and the
products are operators (:mod:`autoplan.runtime.expert_operators`). Updates of buffers (not in a recompute)
run between compiled parts, each with a graph break. Assertions of types, which only act while type-checking, are left
out. Another batch size or sequence length compiles once more, then for all sizes. torch compiles nothing while a
dispatch mode is active, such as `record_collectives`: then operations run one by one.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autoplan.runtime.attention import CUTS
from autoplan.runtime.expert_products import IN_GRAPH, begins_well, fit_one_product
from autoplan.runtime.fused import has_triton
from autoplan.runtime.private import share_memory
from autoplan.runtime.program import Block

# names of an emitted module: nodes of a graph, each with its own forward and backward
_NODES = (
    "all_gather all_reduce all_to_all context_part cross_entropy_sum draw dropout extreme own_part reduce_scatter "
    "slice_ to_partial to_replicate vocab_parallel_cross_entropy_sum vocab_parallel_embedding"
).split()
_APART = ("running_statistics", "update_buffer")
_ASSERTIONS = ("typed", "vary")
_SPREADS = ("axes", "dispatch", "inner")  # arguments of experts: axes over which they are spread


def compiles_by_itself(device: torch.device) -> bool:
    """Return True if blocks may be compiled by default: on CUDA with Triton, which inductor needs there."""
    return device.type == "cuda" and has_triton()


def compile_blocks(
    stage: nn.Module,
    backend: str | Callable[..., Any] = "inductor",
    async_groups: Sequence[dist.ProcessGroup] = (),
) -> int:
    """Compile every block of an emitted stage in place, before ZeRO is applied to it.

    Args:
        stage: an instance of the emitted `Stage`.
        backend: backend of torch.compile, by name or as a function; `inductor` needs a C++ compiler on the CPU.
        async_groups: groups whose gathers and reduce-scatters inductor overlaps with pieces of the neighbouring matrix
            products, where it finds them next to each other (Wang et al., Overlap communication with dependent
            computation via decomposition, ASPLOS 2023).

    Returns:
        The number of blocks.
    """
    for group in async_groups:
        share_memory(group)
    options: dict[str, Any] | None = {"_micro_pipeline_tp": True} if async_groups else None
    names = vars(sys.modules[type(stage).__module__])
    for name in _NODES:
        names[name] = torch.compiler.allow_in_graph(names[name])  # type: ignore[no-untyped-call]
    for name in _APART:
        names[name] = torch.compiler.disable(names[name])  # type: ignore[no-untyped-call]
    names["attention"], names["experts"] = _attention(names["attention"]), _experts(names["experts"])
    for name in _ASSERTIONS:
        names[name] = _value
    blocks = [m for m in stage.modules() if isinstance(m, Block)]
    for block in blocks:
        block.compiled = True
        block.compute = torch.compile(block.compute, backend=backend, options=options)  # type: ignore[method-assign]
        evaluate: Callable[..., Any] | None = getattr(block, "evaluate", None)
        if evaluate is not None:
            vars(block)["evaluate"] = torch.compile(evaluate, backend=backend, options=options)
    return len(blocks)


def _attention(attention: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return `attention`, traced if the whole sequence is on this rank, else one node with what it sends inside.

    With dropout it is one node, too: the places of its samples and heads follow from the mesh.
    """

    @torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
    def cut(*args: Any, **how: Any) -> torch.Tensor:
        return attention(*args, **how)

    @functools.wraps(attention)
    def called(*args: Any, **how: Any) -> torch.Tensor:
        whole = all(how.get(name) is None for name in (*CUTS, "rng"))
        out: torch.Tensor = (attention if whole else cut)(*args, **how)
        return out

    return called


def _experts(experts: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return `experts` as one node."""

    @torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
    def counted(*args: torch.Tensor, **how: Any) -> torch.Tensor:
        return experts(*args, **how)

    @torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
    def together(
        hidden: torch.Tensor,
        index: torch.Tensor,
        weights: torch.Tensor,
        *matrices_and_biases: torch.Tensor,
        **how: Any,
    ) -> torch.Tensor:
        given = (x if begins_well(x) else x.clone() for x in matrices_and_biases)
        return experts(hidden, index, weights, *given, **how)

    @functools.wraps(experts)
    def called(
        hidden: torch.Tensor,
        index: torch.Tensor,
        weights: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        *biases: torch.Tensor,
        **how: Any,
    ) -> torch.Tensor:
        here = gate_up.dtype == IN_GRAPH and all(how.get(name) is None for name in _SPREADS)
        run = together if here and fit_one_product(hidden, gate_up, down) else counted
        out: torch.Tensor = run(hidden, index, weights, gate_up, down, *biases, **how)
        return out

    return called


def _value(x: Any, *_: Any, **__: Any) -> Any:
    return x
