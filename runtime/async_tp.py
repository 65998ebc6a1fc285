"""Async TP (products in pieces, with their gathers and reduce-scatters beside them) is tried before it is used.

Its operators are torch's (`torch.ops.symm_mem`). They read other ranks' memory, which not every machine allows, and are
an experiment there. So every rank runs both them and the plain way (a collective, then a product), on numbers whose
sums are exact. If any rank fails or gets other numbers, no rank uses them. Else both ways are timed, at the size of the
model's largest product, and the one that is faster on the slowest rank is used.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from autoplan.runtime.agree import AgreedRuntimeError, agree
from autoplan.runtime.mesh import AxisMesh
from autoplan.runtime.params import local_param_shape
from autoplan.runtime.private import share_memory
from autoplan.runtime.spec import ParamSpec

_NONZERO = 16  # elements of a row that are not 0: sums of so many products of 0 and 1 on 16 ranks are exact in bfloat16
_REPEATS = 5
# A kernel that waits for another rank's memory cannot be stopped. Longest wait for the first ones, seconds.
_LONGEST_S = 60.0


@dataclass(frozen=True)
class ProductSize:
    """The largest product beside a collective of tensor parallelism, on one rank.

    Attributes:
        rows: tokens of a micro-batch that a rank has between collectives.
        whole: the dim of the weight that ranks have whole.
        split: this rank's part of its other dim.
    """

    rows: int = 8
    whole: int = 16
    split: int = 8


def largest_product(params: Iterable[ParamSpec], mesh: AxisMesh, rows: int) -> ProductSize:
    """Return the size of the product with the largest weight that tensor parallelism splits; `rows` as `ProductSize`.

    It is the same on every rank of a pipeline stage; without such a weight it is small.
    """
    sizes, of_tp = [ProductSize(rows)], set(mesh.atoms("tp"))
    for p in params:
        over = {s.dim for s in p.shards if set(mesh.atoms(s.axis)) <= of_tp}
        if len(p.shape) == 2 and len(over) == 1:
            local, (dim,) = local_param_shape(p, mesh.size), over
            sizes.append(ProductSize(rows, local[1 - dim], local[dim]))
    return max(sizes, key=lambda s: (s.whole * s.split, s.whole))


def hides_behind_pieces(group: dist.ProcessGroup, device: torch.device, size: ProductSize) -> bool:
    """Return True if both operators work on the ranks of a group and are faster; the same on all ranks.

    All ranks of the job call it, each with its group: they agree by a collective. A warning says why not.

    Raises:
        RuntimeError: an operator does not end. The device is stuck then, so that nothing else can run.
    """
    try:
        trial = _Trial(group, device, size)
        agree(trial.problem(), device, AgreedRuntimeError)
        apart, pieces = _slowest((trial.seconds(trial.apart), trial.seconds(trial.pieces)), device)
        slower = None if pieces < apart else f"they take {1e3 * pieces:.3g} ms where one by one take {1e3 * apart:.3g}"
        agree(slower, device, AgreedRuntimeError)
    except AgreedRuntimeError as error:
        warnings.warn(
            f"collectives of tensor parallelism do not hide behind pieces of products (async TP), as the plan says: "
            f"{error}; compiled blocks send them one by one",
            stacklevel=2,
        )
        return False
    return True


class _Trial:
    """Both ways of a gather with a product behind it, and of a product with a reduce-scatter behind it.

    Numbers are 0 and 1, most of them 0.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, size: ProductSize) -> None:
        self.group, self.device = group, device
        ranks, rank = group.size(), group.rank()

        def numbers(rows: int, columns: int, start: int, most: int | None = None) -> torch.Tensor:
            row, column = (torch.arange(n, device=device) for n in (rows, columns))
            ones = ((row + start) % 3).to(torch.int8)[:, None] == (column * 2 % 3).to(torch.int8)
            if most is not None:  # ones of a row
                ones &= column % -(-columns // most) == 0
            return ones.to(torch.bfloat16)

        self._shard = numbers(size.rows, size.whole, rank, _NONZERO)
        self._first = numbers(size.whole, size.split, 5)
        self._wide = numbers(size.rows * ranks, size.split, rank, _NONZERO)
        self._second = numbers(size.split, size.whole, 5)

    def problem(self) -> str | None:
        """Return what is wrong with the operators on this rank."""
        try:
            want = self.apart()
            share_memory(self.group)
            found = self.pieces()
        except (AttributeError, RuntimeError, ValueError) as error:
            first = str(error).split(". ")[0]
            return f"{type(error).__name__}: {first}"
        self._wait()
        for got, right, what in zip(found, want, ("behind a gather", "before a reduce-scatter"), strict=True):
            if not torch.equal(got, right):
                return f"a product {what} came out wrong"
        return None

    def apart(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the results of one collective and one product after the other."""
        rows = self._shard.shape[0]
        gathered = self._shard.new_empty(self._wide.shape[0], self._shard.shape[1])
        dist.all_gather_into_tensor(gathered, self._shard, group=self.group)
        scattered = self._shard.new_empty(rows, self._second.shape[1])
        dist.reduce_scatter_tensor(scattered, self._wide @ self._second, group=self.group)
        return gathered @ self._first, scattered

    def pieces(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the results of the operators that do both at once."""
        name = self.group.group_name
        _, (gathered,) = torch.ops.symm_mem.fused_all_gather_matmul(self._shard, [self._first], 0, name)
        scattered = torch.ops.symm_mem.fused_matmul_reduce_scatter(self._wide, self._second, "sum", 0, name)
        return gathered, scattered

    def seconds(self, way: Callable[[], object]) -> float:
        """Return the median time of a way on this rank, with the wait for the others."""
        way()
        return statistics.median(self._times(way))

    def _times(self, way: Callable[[], object]) -> Iterator[float]:
        for _ in range(_REPEATS):
            self._wait()
            start = time.perf_counter()
            way()
            self._wait()
            yield time.perf_counter() - start

    def _wait(self) -> None:
        """Wait for the device, but not for ever."""
        if self.device.type != "cuda":
            return
        event: Any = torch.cuda.current_stream(self.device).record_event()
        until = time.monotonic() + _LONGEST_S
        while not event.query():
            if time.monotonic() > until:
                raise RuntimeError(
                    f"operators of async TP have not ended after {_LONGEST_S:.0f} s, so that this rank's device is "
                    "stuck; start the job again with async_tp=False"
                )
            time.sleep(10e-6)


def _slowest(seconds: tuple[float, float], device: torch.device) -> tuple[float, float]:
    """Return the most of each over all ranks of the job."""
    out = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(out, op=dist.ReduceOp.MAX)
    first, second = out.tolist()
    return first, second
