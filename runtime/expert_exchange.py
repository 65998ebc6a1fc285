"""Rows on their way to the ranks of their experts: how many go where, and the all-to-all that moves them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from autoplan.runtime.host_copies import to_host


def exchange(rows: torch.Tensor, sent: list[int], come: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Send rows to every rank of a group and return those that come, by rank. Numbers of rows are by rank, too."""
    out = rows.new_empty(sum(come), *rows.shape[1:])
    dist.all_to_all_single(out, rows.contiguous(), come, sent, group=group)
    return out


class Route(Protocol):
    """A way that rows take to other ranks, and back."""

    def move(self, rows: torch.Tensor, back: bool) -> torch.Tensor:
        """Return the rows that come."""


@dataclass(frozen=True)
class RowsByRank:
    """The way to the ranks of a group: numbers of rows by rank."""

    sent: list[int]
    come: list[int]
    group: dist.ProcessGroup

    def move(self, rows: torch.Tensor, back: bool) -> torch.Tensor:
        """Exchange the rows; a collective."""
        there, here = (self.come, self.sent) if back else (self.sent, self.come)
        return exchange(rows, there, here, self.group)


@dataclass(frozen=True)
class Counted:
    """The rows of a token dispatch.

    Attributes:
        chosen: [t k], the places in [t, k] by expert.
        theirs: rows by (source, local expert) of what this rank's experts get, on the device; `known`: on the host.
        sent, come: rows to and from every rank.
        parts: rows from every part, if experts are split over `inner`.
    """

    chosen: torch.Tensor
    theirs: torch.Tensor
    known: list[int]
    sent: list[int]
    come: list[int]
    parts: list[int]


def count_rows(
    index: torch.Tensor,
    num_local: int,
    ranks: int,
    group: dist.ProcessGroup | None,
    ways: int = 1,
    inner: dist.ProcessGroup | None = None,
) -> Counted:
    """Sort the rows of all choices [t, k] by expert, and tell the ranks how many come. Copied to the host once.

    Args:
        group: the ranks of the experts; None: `ranks` is 1.
        inner: the parts of every expert; None: `ways` is 1.

    Raises:
        ValueError: an index beyond the experts.
    """
    total = ranks * num_local
    by_expert, chosen = index.flatten().sort(stable=True)
    here = torch.searchsorted(by_expert, torch.arange(total + 1, device=index.device)).diff()
    there = theirs = here  # there: rows by (source rank, local expert); theirs: the same for every part
    if group is not None:
        there = theirs = exchange(here, [num_local] * ranks, [num_local] * ranks, group)
    if inner is not None:
        theirs = exchange(there.repeat(ways), [total] * ways, [total] * ways, inner)
    known = to_host(torch.cat((here, there, theirs)), chosen.numel(), total)
    if sum(known[:total]) != chosen.numel():
        raise ValueError(f"experts: an index is beyond the {total} experts of {ranks} ranks")
    sent, come = _sums(known[:total], num_local), _sums(known[total : 2 * total], num_local)
    return Counted(chosen, theirs, known[2 * total :], sent, come, _sums(known[2 * total :], total))


def _sums(counts: list[int], size: int) -> list[int]:
    return [sum(counts[i : i + size]) for i in range(0, len(counts), size)]
