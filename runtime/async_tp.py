"""Async TP (products in pieces, with their gathers and reduce-scatters beside them) is tried before it is used.

Its operators are torch's (`torch.ops.symm_mem`). They read other ranks' memory, which not every machine allows, and are
an experiment there. So both run once on small numbers, and if any rank fails or gets other numbers, no rank uses them.
"""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist

from autoplan.runtime.agree import AgreedRuntimeError, agree
from autoplan.runtime.private import share_memory

_ROWS, _INNER, _COLUMNS = 8, 16, 8  # of one rank; sums of 16 products of 0 and 1 are exact in bfloat16 on 16 ranks


def hides_behind_pieces(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return True if both operators work on the ranks of a group; the same on all ranks. Warns why not.

    All ranks of the job call it, each with its group: they agree by a collective.
    """
    try:
        agree(_differs(group, device), device, AgreedRuntimeError)
    except AgreedRuntimeError as error:
        warnings.warn(
            f"collectives of tensor parallelism do not hide behind pieces of products (async TP), as the plan says: "
            f"{error}; compiled blocks send them one by one",
            stacklevel=2,
        )
        return False
    return True


def _differs(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Return what is wrong with the operators on this rank."""
    size, rank, name = group.size(), group.rank(), group.group_name

    def numbers(rows: int, columns: int, start: int) -> torch.Tensor:
        counted = torch.arange(start, start + rows * columns, device=device).view(rows, columns)
        return (counted * 7 % 3 == 0).to(torch.bfloat16)

    shards, wide = ([numbers(rows, _INNER, r) for r in range(size)] for rows in (_ROWS, _ROWS * size))
    weight = numbers(_INNER, _COLUMNS, 5)
    try:
        share_memory(group)
        _, (gathered,) = torch.ops.symm_mem.fused_all_gather_matmul(shards[rank], [weight], 0, name)
        scattered = torch.ops.symm_mem.fused_matmul_reduce_scatter(wide[rank], weight, "sum", 0, name)
    except (AttributeError, RuntimeError, ValueError) as error:
        first = str(error).split(". ")[0]
        return f"{type(error).__name__}: {first}"
    if not torch.equal(gathered, torch.cat(shards) @ weight):
        return "a product behind a gather came out wrong"
    if not torch.equal(scattered, sum(x @ weight for x in wide).chunk(size)[rank]):  # type: ignore[union-attr]
        return "a product before a reduce-scatter came out wrong"
    return None
