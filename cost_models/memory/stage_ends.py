"""What a pipeline stage holds of the values that cross its ends, besides what its units keep.

A stage holds what it received until the backward of its micro-batch is over, as an input of that backward: torch's
PipelineStage (`fwd_cache`) and Megatron-LM (`input_tensors` of core/pipeline_parallel/schedules.py) alike. torch holds
what was sent as long (from 2.15 on only until it is sent), Megatron frees it (`deallocate_output_tensor`). A first
layer that keeps its input, for a norm or to be computed again, keeps the same tensor, which counts once. A stage behind
another one of the same rank takes the output that the other one holds, the same tensor, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autoplan.cost_models.arrays import Array
from autoplan.cost_models.work import Workload


@dataclass(frozen=True)
class Beyond:
    """Bytes that a stage holds at an end beyond what its units keep, by how many units are before that end.

    received: of a stage that begins there. turned: likewise, behind a stage of the same rank; may be negative. sent: of
    a stage that ends there.
    """

    received: Array
    turned: Array
    sent: Array


class StageEnds:
    """The bytes of a micro-batch at the ends of stages, for any cut. Values that several units share do not count.

    Args:
        sends: what was sent is held.

    Attributes:
        sizes: by cut, the bytes that cross.
        sends: as given.
    """

    def __init__(self, workload: Workload, sends: bool) -> None:
        w = workload
        self.sends: bool = sends
        self.sizes: tuple[float, ...] = w.cut_bytes
        if w.shared:
            self.sizes = tuple(
                size - sum(v.num_bytes for v in w.shared if v.crosses(u + 1)) for u, size in enumerate(w.cut_bytes)
            )
        nothing: tuple[Mapping[str, float], ...] = ({},) * len(self.sizes)
        self._after = tuple(kept.after for kept in w.kept_at_cuts) or nothing
        self._before = tuple(kept.before for kept in w.kept_at_cuts) or nothing

    def held(self, start: int, stop: int, received: bool) -> float:
        """Return the bytes that a stage of units start .. stop - 1 holds at its ends until its backward is over.

        Args:
            received: its input is not the output of a stage of the same rank.
        """
        out = self.sizes[start - 1] if start and (received or not self.sends) else 0.0
        return out + (self.sizes[stop - 1] if self.sends and stop <= len(self.sizes) else 0.0)

    def kept_twice(self, unit: int, how: str, start: int, stop: int) -> float:
        """Return the bytes that a unit keeps under a recompute choice, of those that its stage holds at its ends."""
        out = self._after[unit - 1].get(how, 0.0) if unit == start and unit else 0.0
        if unit == stop - 1 and self.sends and stop <= len(self.sizes):
            out += self._before[unit].get(how, 0.0)
        return out

    def beyond(self, choices: Sequence[str] | None = None) -> Beyond:
        """Return the bytes at every end under recompute choices of all units; None: the fewest under any choice."""

        def twice(kept: Mapping[str, float], unit: int) -> float:
            return max(kept.values(), default=0.0) if choices is None else kept.get(choices[unit], 0.0)

        after, before = (
            np.array([0.0, *(twice(kept, u + step) for u, kept in enumerate(each)), 0.0])
            for step, each in ((1, self._after), (0, self._before))
        )
        sizes = np.array([0.0, *self.sizes, 0.0])
        received = sizes - after
        sent = sizes - before if self.sends else np.zeros(len(sizes))
        return Beyond(received, -after if self.sends else received, sent)
