"""Bytes that calls of blocks keep from the forward to the backward, one by one and together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from autoplan.ir.graph import Call
from autoplan.ops.strides import Ints
from autoplan.program.regions import Region


class Ends(NamedTuple):
    """Bytes of the inputs and outputs of a block that it keeps, by position; an input that it hands out is an input."""

    inputs: Ints
    outputs: Ints


@dataclass(frozen=True)
class Activations:
    """Bytes of one call of a block on one rank and micro-batch.

    Attributes:
        saved_bytes: kept from forward to backward without recompute (`autoplan.program.activations`: who counts what).
        kept_bytes: kept instead under full recompute of the block: its inputs, and outputs without a gradient.
        transient_bytes: the most that is alive at once beyond `saved_bytes` while the block runs forward or backward.
        without_expert_gradients: `transient_bytes` if the gradients of experts' parameters took no memory.
        spent_bytes: what the first part of a split backward frees of the logits of a loss, less the gradient that then
            waits for the second part. Of all else as much waits as was kept (experiments/plans/split_backward.py).
        recompute_transient_bytes: the most beyond `kept_bytes` under full recompute: its saved set comes back.
        selective_bytes: kept if the attention core is recomputed in the backward (Korthikanti et al., Reducing
            Activation Recomputation in Large Transformer Models, 2022). With fused attention this frees only the
            log-sum-exp: the projection that follows keeps the output.
        selective_ops: positions of the statements that selective recompute reruns.
        num_rerun: statements, from the first, that full recompute reruns if it ends with the last tensor that is kept.
        saved_inputs: the part of `saved_bytes` that are inputs of the block, by position, 0 if not kept.
        saved_outputs: the part that are outputs of the block with a gradient, by position.
        group_ops: positions of the statements in each group of regions (`autoplan.program.regions`).
        choice_bytes: kept under every other recompute choice: one or several of those groups (their results are dropped
            too), the requested modules, or `offload`.
        ends: the inputs and outputs among what is kept, by recompute choice.
        modules: the requested modules, by name (`program.megatron_modules`).
    """

    saved_bytes: int
    kept_bytes: int
    transient_bytes: int
    selective_bytes: int
    selective_ops: tuple[int, ...]
    recompute_transient_bytes: int
    saved_inputs: Ints
    saved_outputs: Ints
    without_expert_gradients: int = 0
    spent_bytes: int = 0
    num_rerun: int = 0
    group_ops: Mapping[str, Ints] = field(default_factory=dict)
    choice_bytes: Mapping[str, int] = field(default_factory=dict)
    ends: Mapping[str, Ends] = field(default_factory=dict)
    modules: Mapping[str, tuple[Region, ...]] = field(default_factory=dict)

    @property
    def figures(self) -> Ints:
        """All byte counts that memory is added up from."""
        return (
            *(self.saved_bytes, self.kept_bytes, self.transient_bytes, self.selective_bytes),
            self.recompute_transient_bytes,
            *(self.choice_bytes[choice] for choice in sorted(self.choice_bytes)),
        )


def ends_of(
    kept: Mapping[str, Set[int]], inputs: Sequence[int], outputs: Sequence[int], sizes: Sequence[int]
) -> dict[str, Ends]:
    """Return the inputs and outputs among what is kept, by recompute choice.

    Args:
        kept: storages by recompute choice.
        inputs, outputs: the storage of each.
        sizes: bytes of all storages.
    """
    out = {}
    for how, mine in kept.items():
        made = mine - set(inputs)
        out[how] = Ends(
            tuple(sizes[s] if s in mine else 0 for s in inputs), tuple(sizes[s] if s in made else 0 for s in outputs)
        )
    return out


def common_choices(layers: Sequence[Activations]) -> list[str]:
    """Return the recompute choices that all of some layers know, besides none, full and selective."""
    names = [a.choice_bytes.keys() for a in layers]
    return [n for n in names[0] if all(n in other for other in names)] if names else []


def saved_bytes_of(calls: Sequence[Call], blocks: Mapping[str, Activations]) -> int:
    """Return the bytes that a stage keeps of one micro-batch; a value that several calls keep counts once.

    Args:
        calls: calls of the stage, with the parameter-free ones it needs.
        blocks: activations by block.
    """
    total, seen = 0, set()
    for call in calls:
        mine = blocks[call.block]
        total += mine.saved_bytes
        for names, sizes in ((call.inputs, mine.saved_inputs), (call.outputs, mine.saved_outputs)):
            for name, size in zip(names, sizes, strict=True):
                if size and name in seen:
                    total -= size
                elif size:
                    seen.add(name)
    return total


def peak_bytes_of(
    calls: Sequence[Call],
    blocks: Mapping[str, Activations],
    recomputed: Set[str] = frozenset(),
    gradient_bytes: Mapping[str, int] | None = None,
) -> int:
    """Return the most bytes of activations and passing gradients of one micro-batch while it runs through a stage.

    While a call's backward runs, the activations of later calls are already free, so this is less than all saved bytes
    plus the largest transient. Other micro-batches in flight add the bytes that each keeps.

    Args:
        calls: calls of the stage in order, with the parameter-free ones it needs.
        blocks: activations by block.
        recomputed: names of the calls under full recompute.
        gradient_bytes: local gradient of a parameter by its full name. If several calls use it (a tied embedding), the
            gradient waits from the backward of the last call to that of the first.
    """
    uses: dict[str, list[int]] = {}
    for i, call in enumerate(calls):
        for name in call.params.values():
            uses.setdefault(name, []).append(i)
    tied = [(at[0], at[-1], size) for name, size in (gradient_bytes or {}).items() if len(at := uses.get(name, [])) > 1]
    peak = held = 0
    for i, call in enumerate(calls):
        mine = blocks[call.block]
        rerun = call.name in recomputed
        held += mine.kept_bytes if rerun else mine.saved_bytes
        extra = mine.recompute_transient_bytes if rerun else mine.transient_bytes
        peak = max(peak, held + extra + sum(size for first, last, size in tied if first <= i < last))
    return peak
