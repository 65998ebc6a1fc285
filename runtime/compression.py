"""Compressed all-reduce of gradients (ZeRO 0): in 16 bits, or of low rank (PowerSGD).

The arithmetic is in PyTorch's own communication hooks (torch.distributed.algorithms.ddp_comm_hooks), which take any
object with the interface of a bucket; DDP itself is not needed. The hooks average, but our gradients are sums: the
result is multiplied by the number of ranks. Every data-parallel group has its own state, and under tp every rank
compresses its shard. The state of PowerSGD (this rank's accumulated compression error) is not in any checkpoint.

Sources: default_hooks.py (fp16_compress_hook, bf16_compress_hook); powerSGD_hook.py, after Vogels et al., PowerSGD:
Practical Low-Rank Gradient Compression for Distributed Optimization, 2019, algorithms 1 and 2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook


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
# A matrix of zeros (of experts that no token chose) has no direction, and torch's own default divides by its norm, 0.
# The value is far below the norm of any gradient, so that directions keep their length.
_EPSILON = 1e-20


def check_compression(compression: Compression) -> None:
    """Raise ValueError if `compression` is neither PowerSGD nor a known name."""
    if not isinstance(compression, PowerSGD) and compression not in _NARROW:
        raise ValueError(
            f"gradient_compression={compression!r} is not known; use {', '.join(map(repr, _NARROW))} or "
            "PowerSGD(rank=4)"
        )


class _Bucket:
    """The part of `torch.distributed.GradBucket` that PyTorch's hooks read."""

    def __init__(self, gradients: Sequence[torch.Tensor], index: int, last: bool) -> None:
        self._flat = torch.cat([g.reshape(-1) for g in gradients])
        parts = torch.split(self._flat, [g.numel() for g in gradients])
        # PyTorch's hooks read the first of the dims, which a single number has not
        self._views = [part.view(g.shape or (1,)) for part, g in zip(parts, gradients, strict=True)]
        self._index, self._last = index, last

    def buffer(self) -> torch.Tensor:
        return self._flat

    def gradients(self) -> list[torch.Tensor]:
        return self._views

    def index(self) -> int:
        return self._index

    def is_last(self) -> bool:
        return self._last


class Compressor:
    """Sums gradients over a group of ranks with compression, bucket by bucket."""

    def __init__(self, compression: Compression, group: dist.ProcessGroup) -> None:
        check_compression(compression)
        self.group = group
        self._hook: _Hook
        self._state: Any = group
        if isinstance(compression, PowerSGD):
            self._hook = powerSGD_hook.powerSGD_hook
            self._state = powerSGD_hook.PowerSGDState(
                group,
                matrix_approximation_rank=compression.rank,
                start_powerSGD_iter=compression.start_step,
                min_compression_rate=compression.min_compression_rate,
                use_error_feedback=compression.error_feedback,
                warm_start=compression.warm_start,
                orthogonalization_epsilon=_EPSILON,
            )
        else:
            self._hook = _NARROW[compression]

    def reduce(self, buckets: Sequence[Sequence[torch.Tensor]]) -> None:
        """Sum in place. PowerSGD needs the same buckets in every step, and a larger exponent range than float16 has."""
        for index, gradients in enumerate(buckets):
            bucket = _Bucket(gradients, index, index == len(buckets) - 1)
            if bucket.buffer().dtype == torch.float16 and self._hook is powerSGD_hook.powerSGD_hook:
                raise ValueError("PowerSGD of float16 gradients: their squares underflow; use bf16")
            self._hook(self._state, bucket).wait()
            for gradient, view in zip(gradients, bucket.gradients(), strict=True):
                torch.mul(view.view(gradient.shape), self.group.size(), out=gradient)
