"""Checks of a step's batch: that it fits the program, and that ranks which must have the same batch have it.

Every rank checks its own part before any collective. Then one all-reduce over all ranks settles it for all of them
(`Batches.settle`), together with the settings that must be the same everywhere (`autoplan.runtime.settings`). For each
data-parallel rank it carries a fingerprint of the batch and the numbers of valid labels and of samples. With MAX, a
fingerprint and its negative together tell whether the tensor, context and pipeline ranks of one data-parallel rank have
the same batch. Names, shapes and dtypes are compared in every step, contents in the first after a start or a load, and
in every `CONTENTS_EVERY`-th one from there.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from autoplan.runtime.agree import LEAST, AgreedValueError, digest_of_entries, fingerprint, raise_agreed, ranks_text
from autoplan.runtime.mesh import AxisMesh
from autoplan.runtime.precision import active_autocast
from autoplan.runtime.settings import different_settings
from autoplan.runtime.spec import ProgramSpec, evaluate_terms
from autoplan.units import LossUnit

CONTENTS_EVERY = 100  # steps
_NO_SAMPLES = "the batch has no samples"


@dataclass(frozen=True)
class Counts:
    """The loss denominators over all ranks' batches, and the number of samples of each data-parallel rank."""

    labels: tuple[float, ...]
    samples: tuple[int, ...]

    @property
    def equal(self) -> bool:
        """True if all data-parallel ranks have the same number of samples."""
        return len(set(self.samples)) == 1


def _as_integer(number: float | torch.Tensor) -> torch.Tensor:
    """Return the bits of a float64 as an int64, so that it travels with fingerprints. Its inverse is `_as_number`."""
    return torch.as_tensor(number, dtype=torch.float64).detach().view(torch.int64)


def _as_number(bits: int) -> float:
    number: float = struct.unpack("=d", struct.pack("=q", bits))[0]
    return number


def _named(batches: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return the tensors of several batches under one name each."""
    return {f"{name} {i}": tensor for i, batch in enumerate(batches) for name, tensor in batch.items()}


Shapes = tuple[tuple[tuple[str, torch.Size, torch.dtype, torch.layout, bool], ...], ...]
"""Names, shapes and dtypes of several batches, and how their tensors are stored."""


def _shapes_of(batches: Sequence[Any]) -> Shapes | None:
    """Return what a `problem` of batches depends on; None if they are not all mappings to tensors."""
    for batch in batches:
        if not isinstance(batch, Mapping) or not all(_has_shape(x) for x in batch.values()):
            return None
    return tuple(tuple((name, x.shape, x.dtype, x.layout, x.is_meta) for name, x in batch.items()) for batch in batches)


def _has_shape(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.is_nested


def _storage_fault(tensor: torch.Tensor) -> str | None:
    """Return what a tensor is whose values are not stored one by one in memory; None if they are."""
    if tensor.is_nested:
        return "a nested tensor; pad it"
    if tensor.layout is not torch.strided:
        return f"a tensor of {tensor.layout}; give to_dense() of it"
    return "on the meta device and has no values" if tensor.is_meta else None


def _of_inference(batches: Sequence[Any]) -> str | None:
    """Return the problem of a step with a tensor that was made in inference mode; None if there is none."""
    for batch in batches:
        for name, x in batch.items() if isinstance(batch, Mapping) else ():
            if isinstance(x, torch.Tensor) and x.is_inference():
                return (
                    f"{name} was made in torch.inference_mode(), and no backward can keep it; give its clone(), made "
                    "outside of that, or make it in torch.no_grad()"
                )
    return None


def _counts_alone(problem: str | None, labels: float | torch.Tensor, samples: int) -> Counts:
    """Return what `Batches.settle` does on a job of one rank."""
    if problem is not None:
        raise AgreedValueError(problem)
    numbers = labels.tolist() if isinstance(labels, torch.Tensor) else labels
    return Counts(tuple(map(float, numbers if isinstance(numbers, list) else [numbers])), (samples,))


class Batches:
    """Checks the batches of a program.

    Args:
        spec, mesh: the program and its mesh.
        num_micro_batches: the number of equal parts into which a batch is cut.
        device: where the program runs.
        given: the counts of every global batch, if ranks need not agree on them.
        dtype: a floating dtype that the program runs in instead of the captured one, or None.
    """

    def __init__(
        self,
        spec: ProgramSpec,
        mesh: AxisMesh,
        num_micro_batches: int,
        device: torch.device,
        given: Counts | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._given = given
        self._spec, self._mesh, self._num, self._device = spec, mesh, num_micro_batches, device
        # Counting labels and agreeing on them wait for the device, and so for earlier copies to it.
        self._waited_for = spec.loss_count is not LossUnit.NONE or mesh.world_size > 1
        floats = {n for n, wanted in spec.input_dtypes if dtype is not None and "float" in wanted}
        self._limits = {n: allowed for n, allowed in spec.dtype_limits if n not in floats}
        longs = {n for n, wanted in spec.input_dtypes if wanted == "int64"}
        self._numbers = [n for n, _ in spec.dtype_limits if n in longs]  # rows or classes, in any width
        self._fits: Shapes | None = None  # of the last batches without a problem, which need no second look
        self._settings: tuple[dict[str, str], int] | None = None  # of the last step, and their fingerprint
        self._printed: tuple[Shapes | None, int] = None, 0  # shapes, and their fingerprint without contents

    def cut(self, batch: Mapping[str, torch.Tensor], num: int | None = None) -> list[dict[str, torch.Tensor]]:
        """Cut a batch without a `problem` into micro-batches, which are on the device once `settle` has returned.

        `num`: the number of parts, whose sizes differ by at most one sample; None: that of a step.
        """
        whole = {n: batch[n].to(self._device, non_blocking=self._waited_for) for n in self._spec.inputs}
        for name in self._numbers:
            whole[name] = whole[name].long()
        if (num or self._num) == 1:
            return [whole]
        cuts = {n: torch.tensor_split(x, num or self._num) for n, x in whole.items()}
        return [dict(zip(cuts, parts, strict=True)) for parts in zip(*cuts.values(), strict=True)]

    def problem(self, batches: Sequence[Any]) -> str | None:
        """Return why this rank cannot run a step on these batches; None if it can."""
        if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            return "step() runs a backward; call it outside torch.no_grad() and torch.inference_mode()"
        if (problem := active_autocast()) is not None:
            return problem
        if not batches:
            return "step() was given no batch"
        if (problem := _of_inference(batches) or self._asks_gradient(batches)) is not None:
            return problem
        shapes = _shapes_of(batches)
        if shapes is None or shapes != self._fits:
            found = self._problem(batches)
            if found is not None:
                return found
            self._fits = shapes
        return next((text for batch in batches if (text := self._indices(batch)) is not None), None)

    def _asks_gradient(self, batches: Sequence[Any]) -> str | None:
        """Return which input requires a gradient where ranks share the work on a sample; None if there is none.

        Under data parallelism alone it gets its gradient, that of the loss of the whole batch. Other ranks would have
        a part of it each, or none.
        """
        if self._mesh.world_size == self._mesh.size("dp"):
            return None
        for name, x in (entry for batch in batches if isinstance(batch, Mapping) for entry in batch.items()):
            if isinstance(x, torch.Tensor) and x.requires_grad:
                return (
                    f"{name} requires a gradient, and the ranks that share a sample would have parts of it: detach() "
                    "it, put the module that makes it into the model, or split the batch alone, "
                    "pins={'tp': 1, 'pp': 1, 'cp': 1}"
                )
        return None

    def _problem(self, batches: Sequence[Any]) -> str | None:
        if len(batches) > 1 and self._spec.one_part:
            return f"{self._spec.one_part}, so a step takes one batch; it was given {len(batches)}"
        for index, batch in enumerate(batches):
            found = self._form(batch) or self._divides(batch) or self._shapes(batch, {self._length(batch) // self._num})
            if found is not None:
                return found if len(batches) == 1 else f"batch {index}: {found}"
            for name in self._spec.inputs:
                first, other = tuple(batches[0][name].shape), tuple(batch[name].shape)
                if other != first:
                    return f"batches of one step must have the same shapes, but {name} is {first}, then {other}"
        return None

    def problem_of_evaluation(self, batch: Any, num: int | None = None) -> str | None:
        """Return why this rank cannot evaluate this batch, cut into `num` parts if given; None if it can."""
        found = active_autocast() or self._form(batch)
        if found is not None and found.startswith(_NO_SAMPLES):
            return f"{_NO_SAMPLES}; where there are fewer than data-parallel ranks, give all of them to every rank"
        if found is None and num is not None:
            total = self._length(batch)
            found = self._shapes(batch, {total // num, -(-total // num)})
        return self._indices(batch) if found is None else found

    def num_parts(self, batch: Any, problem: str | None) -> int:
        """Agree with all ranks on the number of parts of an evaluation: that of a step, or fewer for few samples.

        A collective over all ranks. 0 if a rank has a problem.
        """
        mine = 0 if problem is not None else min(self._num, self._length(batch))
        if self._mesh.world_size == 1:
            return mine
        number = torch.tensor(mine, dtype=torch.int64, device=self._device)
        dist.all_reduce(number, op=dist.ReduceOp.MIN)
        return int(number)

    def _form(self, batch: Any) -> str | None:
        """Return the fault of a batch that does not depend on how it is cut; None if it has none."""
        if not isinstance(batch, Mapping):
            return f"the batch is a {type(batch).__name__}; give a mapping of {', '.join(self._spec.inputs)} to tensors"
        return self._names(batch) or self._kinds(batch) or self._samples(batch)

    def _length(self, batch: Mapping[str, torch.Tensor]) -> int:
        return batch[self._spec.inputs[0]].shape[0]

    def _names(self, batch: Mapping[str, Any]) -> str | None:
        if set(batch) == set(self._spec.inputs):
            return None
        given = ", ".join(map(str, batch)) or "nothing"
        return f"the batch has {given}; this program takes {', '.join(self._spec.inputs)}"

    def _kinds(self, batch: Mapping[str, Any]) -> str | None:
        for name in self._spec.inputs:
            if not isinstance(batch[name], torch.Tensor):
                return f"{name} is a {type(batch[name]).__name__}, not a tensor"
            if (fault := _storage_fault(batch[name])) is not None:
                return f"{name} is {fault}"
        for name, shape in self._spec.input_shapes:
            if batch[name].dim() != len(shape):
                return f"{name} has shape {tuple(batch[name].shape)}; this program takes {len(shape)} dims"
        return self._dtypes(batch)

    def _dtypes(self, batch: Mapping[str, Any]) -> str | None:
        """Return which input has a dtype that PyTorch would refuse in the module, too; None if none has.

        Where sums and products of several dtypes are all that an input meets, it may have another than the example.
        """
        limits = self._limits
        for name, wanted in self._spec.input_dtypes:
            found = batch[name].dtype
            other = str(found)[6:] not in limits.get(name, (str(found)[6:],))
            if other or found.is_floating_point != getattr(torch, wanted).is_floating_point:
                more = [f"torch.{each}" for each in limits.get(name, ()) if each != wanted]
                also = f" and takes {' or '.join(more)}, too" if more else ""
                return (
                    f"{name} is {found}; the program was captured with {wanted}{also}: give {name}.to(torch.{wanted})"
                )
        return None

    def _samples(self, batch: Mapping[str, torch.Tensor]) -> str | None:
        sizes = {n: batch[n].shape[0] for n in self._spec.inputs}
        total = sizes[self._spec.inputs[0]]
        if len(set(sizes.values())) != 1:
            return f"the tensors of the batch have different batch sizes: {sizes}"
        if total == 0:
            return f"{_NO_SAMPLES}; give {self._num} or a multiple"
        return None

    def _indices(self, batch: Mapping[str, torch.Tensor]) -> str | None:
        """Return which number of an input is outside of its table or classes; None if none is, or a GPU has it.

        To look there would make the host wait; what PyTorch says on a GPU is an assertion of the device.
        """
        for limit in self._spec.index_limits if self._given is None else ():
            x = batch[limit.input]
            if x.device.type != "cpu" or not x.numel():
                continue
            low, high = torch.aminmax(x)
            if int(low) >= 0 and int(high) < limit.size:
                continue
            wrong = (x < 0) | (x >= limit.size)
            if limit.ignored is not None:
                wrong &= x != limit.ignored
            if wrong.any():
                where = tuple(torch.nonzero(wrong)[0].tolist())
                besides = "" if limit.ignored is None else f", or {limit.ignored} to ignore one"
                return (
                    f"{limit.input} has {int(x[where])} at {list(where)}, but {limit.of}: give 0 to "
                    f"{limit.size - 1}{besides}"
                )
        return None

    def _divides(self, batch: Mapping[str, torch.Tensor]) -> str | None:
        total = self._length(batch)
        if total % self._num:
            lower = total - total % self._num
            nearest = f"{lower} or {lower + self._num}" if lower else str(self._num)
            return f"a batch of {total} cannot be cut into {self._num} micro-batches; use {nearest} samples"
        return None

    def _shapes(self, batch: Mapping[str, torch.Tensor], sizes: Set[int]) -> str | None:
        """Return why the sequence lengths do not match each other or the program; None if they do.

        `sizes`: samples of the micro-batches that the batch is cut into.
        """
        env = {source.symbol: source.read(batch) for source in self._spec.sizes_from}
        for name, shape in self._spec.input_shapes:
            wanted, found = tuple(evaluate_terms(size, env) for size in shape), tuple(batch[name].shape)
            if found != wanted:
                with_sizes = ", ".join(f"{symbol}={size}" for symbol, size in env.items())
                return f"{name} has shape {found}; with {with_sizes} this program takes {wanted}"
        for symbol, low, high in self._spec.bounds:
            if not low <= env[symbol] <= (env[symbol] if high is None else high):
                allowed = f"{low} or more" if high is None else f"{low} to {high}"
                return (
                    f"sequences of {env[symbol]} tokens: the forward of {self._spec.model} depends on the length, and "
                    f"this program is valid for {allowed}; capture the model with an example of that length"
                )
        texts = (self._split({**env, "b": size} if "b" in env else env, env) for size in sorted(sizes))
        return next((text for text in texts if text is not None), None)

    def _split(self, part: Mapping[str, int], env: Mapping[str, int]) -> str | None:
        """Return why the ranks cannot share a micro-batch of sizes `part` evenly; None if they can."""
        if self._shared_evenly(part):
            return None
        split = " ".join(f"{n}={self._mesh.size(n)}" for n in ("cp", "tp", "ep") if self._mesh.has(n))
        for symbol in ("s", "t"):
            near = self._nearest(part, symbol) if symbol in part else None
            if near is not None:
                return f"a sequence of {env[symbol]} tokens cannot be cut evenly over {split}; nearest: {near}"
        return f"a batch with {', '.join(f'{k}={v}' for k, v in env.items())} cannot be cut evenly over {split}"

    def _shared_evenly(self, part: Mapping[str, int]) -> bool:
        """Return True if every local size of a micro-batch is a whole number."""
        local = dict(part)
        cp = self._mesh.size("cp") if self._mesh.has("cp") else 1
        if cp > 1:
            if local["s"] % (self._spec.sequence_chunks * cp):  # two of a sequence with an order (zig-zag)
                return False
            local["s"] //= cp
        try:
            for size in self._spec.whole:
                evaluate_terms(size, local)
        except ValueError:
            return False
        return True

    def _nearest(self, part: Mapping[str, int], symbol: str) -> str | None:
        """Return the nearest shorter and longer lengths that can be shared evenly; None if none is near."""
        length = part[symbol]
        ways = range(length - 1, 0, -1), range(length + 1, 2 * length + 4096)
        found = [next((n for n in way if self._shared_evenly({**part, symbol: n})), None) for way in ways]
        return " or ".join(str(n) for n in found if n is not None) or None

    # -- over all ranks ---------------------------------------------------------------------------------------------

    def settle(
        self,
        batches: Sequence[Any],
        problem: str | None,
        count: Callable[[], float | torch.Tensor],
        *,
        data_rank: int,
        step: int,
        settings: Callable[[], dict[str, str]] = dict,
    ) -> Counts:
        """Agree with all ranks on this step's batches. Waits for the device once.

        Args:
            batches: this rank's batches.
            problem: their problem, or None.
            count: counts its valid labels, or gives its part of another denominator; called if there is no problem.
                Returns a number, or a tensor on the device, of shape [] or with one number per denominator.
            data_rank: index of its part of the global batch.
            step: the number of the step, counted from the start of the job or its last load.
            settings: returns what all ranks must be given alike; called if ranks exchange anything.

        Returns:
            The counts of the global batch.

        Raises:
            AgreedValueError: a problem on any rank, different batches in one data rank, or different settings; on every
                rank alike.
        """
        if self._given is not None and problem is None:
            return self._given
        contents = step % CONTENTS_EVERY == 0
        labels, samples = (0, 0) if problem is not None else (count(), sum(map(self._length, batches)))
        if self._mesh.world_size == 1:
            return _counts_alone(problem, labels, samples)
        mine = 0 if problem is not None else self._fingerprint(batches, contents)
        given = settings()
        alike = self._fingerprint_of(given)
        num, width, head = self._mesh.size("dp"), 3 + len(self._spec.loss_counts), 3
        entries = [int(problem is not None), alike, -alike, *[LEAST] * (width * num)]
        begin = head + width * data_rank
        if problem is None:
            entries[begin : begin + 3] = [mine, -mine, samples]
        sent = torch.tensor(entries, dtype=torch.int64).to(self._device, non_blocking=True)
        if problem is None:  # counted on the device; the host waits once, below
            sent[begin + 3 : begin + width] = _as_integer(labels)
        dist.all_reduce(sent, op=dist.ReduceOp.MAX)
        found = sent.tolist()
        if found[1] != -found[2]:
            raise AgreedValueError(different_settings(given, self._device))
        if found[0]:
            raise_agreed(problem)
        by_rank = [found[head + width * d : head + width * (d + 1)] for d in range(num)]
        own = by_rank[data_rank]  # a fake process group has no other entry: there all ranks are as this one
        by_rank = [own if seen[0] == LEAST else seen for seen in by_rank]
        sizes = tuple(seen[2] for seen in by_rank)
        if any(high != -low for high, low, *_ in by_rank):
            raise AgreedValueError(self._who_differs(mine, data_rank, contents))
        totals = tuple(
            math.fsum(map(_as_number, column)) for column in zip(*(seen[3:] for seen in by_rank), strict=True)
        )
        return Counts(totals, sizes)

    def _fingerprint_of(self, settings: dict[str, str]) -> int:
        """Return the fingerprint of settings, which seldom change."""
        if self._settings is None or self._settings[0] != settings:
            self._settings = settings, digest_of_entries(settings)
        return self._settings[1]

    def _fingerprint(self, batches: Sequence[Mapping[str, torch.Tensor]], contents: bool) -> int:
        """Return the fingerprint of batches; that of their outline (without `contents`) is kept with their shapes."""
        if contents:
            return fingerprint(_named(batches))
        shapes = _shapes_of(batches)
        if shapes is None or shapes != self._printed[0]:
            self._printed = shapes, fingerprint(_named(batches), 0)
        return self._printed[1]

    def _who_differs(self, mine: int, data_rank: int, contents: bool) -> str:
        """Describe the ranks whose batch differs from that of most ranks that must have the same. A collective."""
        everybody: list[Any] = [None] * self._mesh.world_size
        dist.all_gather_object(everybody, (data_rank, mine))
        parts = []
        for d in range(self._mesh.size("dp")):
            ranks = {rank: seen for rank, (at, seen) in enumerate(everybody) if at == d}
            values = list(ranks.values())
            usual = max(dict.fromkeys(values), key=values.count)
            others = [rank for rank, seen in ranks.items() if seen != usual]
            if others:
                alike = [rank for rank in ranks if rank not in others]
                parts.append(f"{ranks_text(others)} than {ranks_text(alike)} (data rank {d})")
        what = "batch (its contents)" if contents else "batch (its names, shapes or dtypes)"
        return (
            f"another {what} on {'; '.join(parts)}: ranks with the same pm.data_rank must be given the same batch, in "
            "the same order"
        )
