"""Compressed all-reduce of gradients (ZeRO 0): in 16 bits, or of low rank (PowerSGD).

In 16 bits the arithmetic is in PyTorch's own communication hooks (torch.distributed.algorithms.ddp_comm_hooks), which
take any object with the interface of a bucket; DDP itself is not needed. They average, but our gradients are sums: the
result is multiplied by the number of ranks.

PowerSGD is written here. PyTorch's hook makes columns orthogonal one by one (rank 1 and 2, and 16 bits), in which a
factor that was zero once stays zero, so that its matrix is never trained again, and columns that are nearly dependent
become any but orthogonal. Here a QR decomposition in at least 32 bits gives an orthonormal basis of any factor.

Every data-parallel group has its own state, and under tp every rank compresses its shard. The state of PowerSGD (this
rank's accumulated compression error) is not in any checkpoint.

Sources: default_hooks.py (fp16_compress_hook, bf16_compress_hook); Vogels et al., PowerSGD: Practical Low-Rank Gradient
Compression for Distributed Optimization, 2019, algorithms 1 and 2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks


@dataclass(frozen=True)
class PowerSGD:
    """Matrices are sent as two factors of low rank; the compression error is added to the next step's gradient.

    For a gradient [n, ...], seen as a matrix of n rows and m columns, (n + m) * rank numbers are sent instead of n * m.
    Vectors, and matrices for which that saves too little, are sent whole.

    Attributes:
        rank: rank of the approximation; 1 to 4 is common, up to 32 for language models.
        start_step: gradients are sent whole before this step, counted from 0 (the first ones matter most); at least 2.
        min_compression_rate: a matrix is sent whole unless (n + m) * rank * this is less than n * m.
        error_feedback: True to keep the compression error. Without it training may not converge.
        warm_start: True to begin with the factors of the previous step.

    Raises:
        ValueError: a value is out of range.

    Example:
        >>> from autoplan import PowerSGD
        >>> PowerSGD(rank=2).start_step  # parallelize(..., gradient_compression=PowerSGD(rank=2))
        10
    """

    rank: int = 4
    start_step: int = 10
    min_compression_rate: float = 2.0
    error_feedback: bool = True
    warm_start: bool = True

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"PowerSGD(rank={self.rank}): rank must be at least 1")
        if self.start_step < 2:
            raise ValueError(f"PowerSGD(start_step={self.start_step}): start_step must be at least 2")
        if self.min_compression_rate < 0:
            rate = self.min_compression_rate
            raise ValueError(f"PowerSGD(min_compression_rate={rate}): min_compression_rate must be at least 0")


Compression = str | PowerSGD  # "bf16", "fp16", or PowerSGD
_Hook = Callable[[Any, Any], torch.futures.Future[torch.Tensor]]
_NARROW: Mapping[str, _Hook] = {"bf16": default_hooks.bf16_compress_hook, "fp16": default_hooks.fp16_compress_hook}


def check_compression(compression: Compression) -> None:
    """Raise ValueError if `compression` is neither PowerSGD nor a known name."""
    if not isinstance(compression, PowerSGD) and compression not in _NARROW:
        raise ValueError(
            f"gradient_compression={compression!r} is not known; use {', '.join(map(repr, _NARROW))} or "
            "PowerSGD(rank=4)"
        )


class _Bucket:
    """The part of `torch.distributed.GradBucket` that PyTorch's hooks of 16 bits read."""

    def __init__(self, gradients: Sequence[torch.Tensor]) -> None:
        self._flat = torch.cat([g.reshape(-1) for g in gradients])
        parts = torch.split(self._flat, [g.numel() for g in gradients])
        self._views = [part.view(g.shape) for part, g in zip(parts, gradients, strict=True)]

    def buffer(self) -> torch.Tensor:
        return self._flat

    def gradients(self) -> list[torch.Tensor]:
        return self._views


class Compressor:
    """Sums gradients over a group of ranks with compression, bucket by bucket."""

    def __init__(self, compression: Compression, group: dist.ProcessGroup) -> None:
        check_compression(compression)
        self.group = group
        self._low_rank = _LowRank(compression, group) if isinstance(compression, PowerSGD) else None
        self._hook = _NARROW.get(compression) if isinstance(compression, str) else None

    @property
    def sent_share(self) -> float:
        """The numbers that were sent, as a share of those of the gradients."""
        return 1.0 if self._low_rank is None else self._low_rank.num_sent / max(self._low_rank.num_given, 1)

    def reduce(self, buckets: Sequence[Sequence[torch.Tensor]]) -> None:
        """Sum in place. PowerSGD needs the same buckets in every step, and a larger exponent range than float16 has."""
        if self._low_rank is not None:
            self._low_rank.reduce(buckets)
            return
        assert self._hook is not None
        for gradients in buckets:
            bucket = _Bucket(gradients)
            self._hook(self.group, bucket).wait()
            for gradient, view in zip(gradients, bucket.gradients(), strict=True):
                torch.mul(view, self.group.size(), out=gradient)


@dataclass
class _Memory:
    """What PowerSGD keeps of the matrices of one shape in a bucket, from step to step.

    Attributes:
        start: random numbers [matrices, columns, rank], the same on all ranks: the first factors.
        right: the right factors of the last step, summed over the ranks.
        error: what this rank's gradients had that was not sent, for each matrix.
    """

    start: torch.Tensor
    right: torch.Tensor
    error: list[torch.Tensor]


@dataclass
class _LowRank:
    """PowerSGD over a group: every matrix is sent as the product of a left factor and the transpose of a right one."""

    settings: PowerSGD
    group: dist.ProcessGroup
    num_given: int = 0
    num_sent: int = 0
    _step: int = 0
    _memories: dict[tuple[int, torch.Size], _Memory] = field(default_factory=dict)
    _random: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))

    def reduce(self, buckets: Sequence[Sequence[torch.Tensor]]) -> None:
        """Sum the gradients of every bucket in place."""
        for index, gradients in enumerate(buckets):
            if any(g.dtype == torch.float16 for g in gradients):
                raise ValueError("PowerSGD of float16 gradients: their squares underflow; use bf16")
            compressed: dict[torch.Size, list[torch.Tensor]] = {}
            whole, copies = [], []
            for g in gradients:
                rows = g.shape[0] if g.dim() else 1
                matrix = g.reshape(rows, g.numel() // max(rows, 1))
                if self._step >= self.settings.start_step and self._saves(matrix):
                    compressed.setdefault(matrix.shape, []).append(matrix)
                    if not g.is_contiguous():
                        copies.append((g, matrix))
                else:
                    whole.append(g)
            waiting, flat = None, None
            if whole:
                flat = torch.cat([g.reshape(-1) for g in whole])
                self.num_sent += flat.numel()
                waiting = dist.all_reduce(flat, group=self.group, async_op=True)
            if compressed:
                self._compress({(index, shape): matrices for shape, matrices in compressed.items()})
            for g, matrix in copies:
                g.copy_(matrix.view(g.shape))
            if waiting is not None and flat is not None:
                waiting.wait()
                for g, part in zip(whole, torch.split(flat, [g.numel() for g in whole]), strict=True):
                    g.copy_(part.view(g.shape))
            self.num_given += sum(g.numel() for g in gradients)
        self._step += 1

    def _rank_of(self, shape: torch.Size) -> int:
        n, m = shape
        return min(n, m, self.settings.rank)

    def _saves(self, matrix: torch.Tensor) -> bool:
        n, m = matrix.shape
        return (n + m) * self._rank_of(matrix.shape) * self.settings.min_compression_rate < n * m

    def _compress(self, given: Mapping[tuple[int, torch.Size], list[torch.Tensor]]) -> None:
        """Replace every matrix by the approximation of its sum over the group."""
        memories = [self._memory(key, matrices) for key, matrices in given.items()]
        rights = [_orthonormal(torch.where((m.right == 0).all(1, keepdim=True), m.start, m.right)) for m in memories]
        lefts = [
            torch.stack([x @ q for x, q in zip(matrices, right, strict=True)])
            for matrices, right in zip(given.values(), rights, strict=True)
        ]
        lefts = [_orthonormal(p) for p in self._summed(lefts)]
        rights = self._summed(
            [
                torch.stack([x.T @ p for x, p in zip(matrices, left, strict=True)])
                for matrices, left in zip(given.values(), lefts, strict=True)
            ]
        )
        for memory, matrices, left, right in zip(memories, given.values(), lefts, rights, strict=True):
            for index, (x, p, q) in enumerate(zip(matrices, left, right, strict=True)):
                sent = p @ q.T
                if self.settings.error_feedback:  # of a gradient that is not finite nothing is kept
                    torch.sub(x, sent, alpha=1 / self.group.size(), out=memory.error[index])
                    memory.error[index].nan_to_num_(0.0, 0.0, 0.0)
                x.copy_(sent)
            memory.right = right.nan_to_num(0.0, 0.0, 0.0)

    def _memory(self, key: tuple[int, torch.Size], matrices: list[torch.Tensor]) -> _Memory:
        """Return what is kept of the matrices of a shape; their errors have been added to them."""
        found = self._memories.get(key)
        if found is None or not self.settings.warm_start:
            size = len(matrices), key[1][1], self._rank_of(key[1])
            start = torch.randn(size, generator=self._random).to(matrices[0])
            found = _Memory(start, start, [] if found is None else found.error)
            self._memories[key] = found
        for x, error in zip(matrices, found.error, strict=bool(found.error)):
            x.add_(error)
        if self.settings.error_feedback and not found.error:
            found.error = [torch.zeros_like(x) for x in matrices]
        return found

    def _summed(self, factors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the sums over the group, by one collective."""
        flat = torch.cat([x.reshape(-1) for x in factors])
        self.num_sent += flat.numel()
        dist.all_reduce(flat, group=self.group)
        parts = torch.split(flat, [x.numel() for x in factors])
        return [part.view(x.shape) for part, x in zip(parts, factors, strict=True)]


def _orthonormal(columns: torch.Tensor) -> torch.Tensor:
    """Return an orthonormal basis of the space of the columns of every matrix, filled up where they are dependent."""
    wide = columns.float() if columns.dtype.itemsize == 2 else columns
    basis: torch.Tensor = torch.linalg.qr(wide).Q
    return basis.to(columns.dtype)
