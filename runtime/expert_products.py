"""Products of rows sorted by expert: one kernel for all experts if there is one, else one product per expert."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.nn import functional

from autoplan.runtime.fused import cuda_capability
from autoplan.runtime.host_copies import to_host
from autoplan.torch_kernels import GROUPED_BYTES, grouped_kernel

IN_GRAPH = torch.bfloat16  # what a compiler takes in the product of all experts


def in_one_product(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> bool:
    """Apply `grouped_kernel` to these operands."""
    return all(begins_well(m) for m in (gate_up, down)) and fit_one_product(x, gate_up, down)


def begins_well(matrices: torch.Tensor) -> bool:
    """Return True if matrices begin where the kernel can read them: not in the midst of some other tensor."""
    return matrices.storage_offset() * matrices.dtype.itemsize % GROUPED_BYTES == 0


def fit_one_product(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> bool:
    """Apply `grouped_kernel` to these operands, wherever they begin in memory."""
    known = None if torch.version.hip is not None else cuda_capability(x.device)
    plain = gate_up.dtype == down.dtype == x.dtype and gate_up.is_contiguous() and down.is_contiguous()
    sizes = (*gate_up.shape[1:], *down.shape[1:])
    return plain and grouped_kernel(
        x.device.type, str(x.dtype).removeprefix("torch."), None if known is None else known[0], sizes, gate_up.shape[0]
    )


@dataclass(frozen=True)
class Groups:
    """Rows sorted by expert.

    Attributes:
        ends: int32, index after the last row of each expert; None: one product per expert.
        counts: rows of each expert, if the host knows them.
    """

    ends: torch.Tensor | None
    counts: list[int] | None

    def products(self, x: torch.Tensor, matrices: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply rows by the matrix of their expert and add its bias: [rows, i], [e, i, o], [e, o] -> [rows, o]."""
        if self.ends is not None and (x.device.type != "cuda" or x.shape[0]):
            out = functional.grouped_mm(x, matrices, offs=self.ends)
            return out if bias is None else out.add_(self.by_row(bias, x.shape[0]))
        out = x.new_empty(x.shape[0], matrices.shape[2])
        added = (None,) * matrices.shape[0] if bias is None else bias
        for rows, matrix, to, more in zip(self._split(x), matrices, self._split(out), added, strict=True):
            if more is None:
                torch.mm(rows, matrix, out=to)
            else:
                torch.addmm(more, rows, matrix, out=to)
        return out

    def by_row(self, bias: torch.Tensor, num_rows: int) -> torch.Tensor:
        """Return the bias of the expert of every row: [e, o] -> [rows, o]."""
        if self.ends is None:
            return torch.cat([b.expand(rows, -1) for b, rows in zip(bias, self.counts or (), strict=True)])
        rows = torch.arange(num_rows, device=bias.device)
        return bias.index_select(0, torch.searchsorted(self.ends, rows, right=True))

    def sums(self, x: torch.Tensor) -> torch.Tensor:
        """Sum the rows of every expert: [rows, o] -> [e, o]."""
        if self.ends is None:
            return torch.stack([rows.sum(0) for rows in self._split(x)])
        ones = x.new_ones(x.shape[0], GROUPED_BYTES // x.dtype.itemsize)  # rows of the least length of a kernel
        return self.outer(ones, x)[:, 0].contiguous()

    def outer(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Sum the outer products over the rows of every expert: [rows, i], [rows, o] -> [e, i, o]."""
        if self.ends is not None and (a.device.type != "cuda" or a.shape[0]):
            return self._without_garbage(functional.grouped_mm(a.T, b, offs=self.ends))
        left, right = self._split(a), self._split(b)
        out = a.new_empty(len(left), a.shape[1], b.shape[1])
        for x, y, to in zip(left, right, out, strict=True):
            torch.mm(x.T, y, out=to)  # zeros if it has no rows
        return out

    def _split(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if self.counts is not None:
            return torch.split(x, self.counts)
        if self.ends is None:
            raise RuntimeError("experts: some rows belong to no known expert")
        return (x,) * self.ends.shape[0]  # there are no rows

    def _without_garbage(self, out: torch.Tensor) -> torch.Tensor:
        """Zero the results of experts without rows, which Blackwell's kernel does not initialise (pytorch issue
        172439).
        """
        if out.device.type != "cuda" or self.ends is None:
            return out
        if self.counts is None:
            return out.masked_fill_((self.ends.diff(prepend=self.ends.new_zeros(1)) == 0)[:, None, None], 0.0)
        for matrix, count in zip(out, self.counts, strict=True):
            if count == 0:
                matrix.zero_()
        return out


@dataclass(frozen=True)
class TracedGroups(Groups):
    """Rows of a graph that is being traced: their counts are a tensor on the host, known when the graph runs.

    Attributes:
        held: int64 [e], rows of each expert.
    """

    held: torch.Tensor = field(default_factory=lambda: torch.empty(0))


def by_expert(
    index: torch.Tensor, num_local: int, first: torch.Tensor | int | None, ranks: int, grouped: bool
) -> tuple[torch.Tensor, Groups]:
    """Sort the places in [t, k] by local expert, then by token; places of experts on other ranks are left out.

    If experts are sharded, the host waits for the number of rows even if one kernel does all products: otherwise every
    rank would hold rows for all t k choices instead of for its share of them.

    Args:
        first: the first expert of this rank; None: all experts are here.
        ranks: number of ranks that share the experts.
        grouped: one kernel does the products of all experts.
    """
    places, ends = _sorted(index, num_local, first)
    if grouped and first is None:
        torch._assert_async(ends[-1] == index.numel(), _BEYOND.format(num_local))  # without a host wait
        return places, Groups(ends, None)
    counts = _counted(index, ends, first, ranks)
    return places[: sum(counts)], Groups(ends if grouped else None, counts)


def by_expert_counted(
    index: torch.Tensor, num_local: int, first: int | None, ranks: int
) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Return the places of `by_expert`, the ends of the experts' rows, int32 on the device, and their counts."""
    places, ends = _sorted(index, num_local, first)
    counts = _counted(index, ends, first, ranks)
    return places[: sum(counts)], ends, counts


_BEYOND = "experts: an index is beyond the {} experts"


def _sorted(index: torch.Tensor, num_local: int, first: torch.Tensor | int | None) -> tuple[torch.Tensor, torch.Tensor]:
    local = index.flatten() if first is None else index.flatten() - first
    local = local.masked_fill((local < 0) | (local >= num_local), num_local)  # other ranks' experts sort last
    by_expert, places = local.sort(stable=True)
    experts_ = torch.arange(num_local, device=index.device)
    return places, torch.searchsorted(by_expert, experts_, right=True, out_int32=True)


def _counted(index: torch.Tensor, ends: torch.Tensor, first: torch.Tensor | int | None, ranks: int) -> list[int]:
    counts = to_host(ends.diff(prepend=ends.new_zeros(1)), index.numel(), ends.numel() * ranks)
    if first is None and sum(counts) != index.numel():
        raise ValueError(_BEYOND.format(ends.numel()))
    return counts


def of_sources(counts: torch.Tensor, known: list[int], num_local: int, grouped: bool) -> tuple[torch.Tensor, Groups]:
    """Sort rows by expert that are already sorted by expert within each source.

    Args:
        counts: rows per (source, expert), the experts of one source after another.
        known: `counts` on the host.
    """
    sources, num_rows = counts.numel() // num_local, sum(known)
    experts_ = torch.arange(num_local, device=counts.device).repeat(sources)
    order = experts_.repeat_interleave(counts, output_size=num_rows).argsort(stable=True)
    ends = counts.view(sources, -1).sum(0).cumsum(0).to(torch.int32) if grouped else None
    return order, Groups(ends, [sum(known[e::num_local]) for e in range(num_local)])
