"""Inputs of stages besides the batch: denominators of the loss, the numbers behind random draws, sizes."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from autoplan.runtime.agree import AgreedValueError
from autoplan.runtime.batch import Counts
from autoplan.runtime.mesh import AxisMesh
from autoplan.runtime.spec import CarriedSpec, ProgramSpec, evaluate_terms
from autoplan.runtime.stages import Carried
from autoplan.units import LossUnit

MicroBatch = dict[str, Any]
"""Name -> tensor: the inputs of every stage. `rng` is None where nothing is drawn."""


class StageInputs:
    """Completes micro-batches.

    Args:
        spec, mesh: the program and its mesh.
        stage: any stage of this rank; its `count` counts what the mean of the loss runs over.
        device: where the stages run.
        loss_dtype: dtype of the loss and of its denominators.
        dtype: a floating dtype to run in instead of the captured one, or None.
    """

    def __init__(
        self,
        spec: ProgramSpec,
        mesh: AxisMesh,
        stage: Any,
        device: torch.device,
        loss_dtype: torch.dtype,
        dtype: torch.dtype | None,
    ) -> None:
        self._spec, self._mesh, self._stage, self._device = spec, mesh, stage, device
        self._loss_dtype, self._dtype = loss_dtype, dtype

    def count(
        self, parts: Sequence[MicroBatch], num_batches: int, seed: int, step: int, data_rank: int
    ) -> float | torch.Tensor:
        """Return what this rank's micro-batches add to the denominators of the loss. Runs in the mesh.

        Args:
            num_batches, seed, step, data_rank: as for `generators`.
        """
        if self._spec.loss_count is LossUnit.NONE or not parts:
            return 0
        given: Sequence[MicroBatch] = [{}] * len(parts)
        if self._spec.draws_counts:  # before ranks have told their numbers of samples: `denominators` compares them
            samples = [sum(map(_num_samples, parts))] * self._mesh.size("dp")
            generators = self.generators(parts, num_batches, seed, step, samples, data_rank)
            given = [{"rng": generator} for generator in generators]
        counts = (self._stage.count(**part, **more) for part, more in zip(parts, given, strict=True))
        counted: torch.Tensor = functools.reduce(operator.add, counts)
        return counted

    def denominators(self, counts: Counts) -> dict[str, torch.Tensor]:
        """Return the denominators of the loss over all ranks: the number of valid labels, of samples, or a total.

        Raises:
            AgreedValueError: (on all ranks) no label is valid, or the loss is also a mean over the samples of a
                micro-batch, or the program divides by their number, and ranks have different numbers of samples.
        """
        unequal = self._spec.loss_share or self._spec.equal_samples or self._spec.draws_counts
        if unequal and not counts.equal:
            why = "the loss is a mean" if self._spec.loss_share else f"{self._spec.model} computes means"
            why += " over drawn elements" if self._spec.draws_counts else " over samples"
            raise AgreedValueError(
                f"{why}, and the {self._mesh.size('dp')} data-parallel ranks have different numbers of "
                "samples; give each the same number"
            )
        out = {}
        for (name, what), number in zip(self._spec.loss_counts, counts.labels, strict=True):
            if number == 0 and what not in (LossUnit.NONE, LossUnit.TOTAL):
                raise AgreedValueError("no label of the global batch is valid, so the mean loss is not defined")
            full = 1.0 if what is LossUnit.NONE else number  # full, not tensor: no copy from the host
            out[name] = torch.full((), full, dtype=self._loss_dtype, device=self._device)
        return out

    def generators(
        self,
        parts: Sequence[MicroBatch],
        num_batches: int,
        seed: int,
        step: int,
        samples: Sequence[int],
        data_rank: int,
    ) -> Sequence[torch.Tensor | None]:
        """Return for each micro-batch what draws are keyed by: seed, step, and the global number of its first sample.

        None for each, if nothing is drawn.

        Samples are numbered batch by batch, within a batch data rank by data rank, of which each has `samples` in all
        `num_batches` batches. One copy to the device for all micro-batches, without synchronisation.
        """
        if not self._spec.draws:
            return [None] * len(parts)
        sizes, each = [_num_samples(part) for part in parts], len(parts) // num_batches
        whole, before = (sum(numbers) // num_batches for numbers in (samples, samples[:data_rank]))
        firsts = [k // each * whole + before + sum(sizes[k - k % each : k]) for k in range(len(parts))]
        numbers = torch.tensor([[seed, step, first] for first in firsts])
        return numbers.to(self._device, non_blocking=True).unbind()

    def complete(
        self,
        parts: Sequence[MicroBatch],
        denominators: Mapping[str, torch.Tensor],
        generators: Sequence[torch.Tensor | None],
    ) -> None:
        """Add to micro-batches what the stages take besides the batch."""
        total = sum(map(_num_samples, parts))
        for part, generator in zip(parts, generators, strict=True):
            share = _num_samples(part) / total
            part |= denominators
            if self._spec.loss_share:
                part["loss_share"] = torch.full((), share, dtype=self._loss_dtype, device=self._device)
            part["rng"] = generator

    def sizes(self, part: MicroBatch) -> dict[str, int]:
        """Return this rank's sizes of a micro-batch, by symbol."""
        env: dict[str, int] = {source.symbol: source.read(part) for source in self._spec.sizes_from}
        if self._mesh.has("cp"):
            env["s"] //= self._mesh.size("cp")
        return env

    def carried(self, specs: Sequence[CarriedSpec], part: MicroBatch) -> tuple[Carried, ...]:
        """Return shapes and dtypes of the tensors that travel between two stages for a micro-batch."""
        env, out = self.sizes(part), []
        for c in specs:
            dtype: torch.dtype = getattr(torch, c.dtype)
            if self._dtype is not None and dtype.is_floating_point and c.requires_grad:  # counts keep their dtype
                dtype = self._dtype
            out.append(Carried(tuple(evaluate_terms(s, env) for s in c.shape), dtype, c.requires_grad))
        return tuple(out)


def _num_samples(part: Mapping[str, torch.Tensor]) -> int:
    return next(iter(part.values())).shape[0]
