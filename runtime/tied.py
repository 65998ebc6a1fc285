"""Tied parameters: one tensor if all uses see it alike, else copies with one summed gradient."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import nn

from autoplan.runtime import private
from autoplan.runtime.convert import OTHER_GROUP
from autoplan.runtime.mesh import AxisMesh
from autoplan.runtime.params import all_reduce_flat, local_of
from autoplan.runtime.spec import ProgramSpec, StageSpec, TiedPlace, TiedSpec

_GROUP = "tied"
RECORDED = f"{OTHER_GROUP}{private.OWN}{_GROUP}"  # as `record_collectives` names the group of some pipeline ranks


def share_tied(stage: nn.Module, spec: StageSpec, tied: Iterable[TiedSpec]) -> None:
    """Use one tensor for the uses of a parameter that see it alike, tied or frozen. Under ZeRO each block gathers its
    own copy."""
    specs = {(p.block, p.attr): p for p in spec.params}
    several = [[(place.block, place.attr) for place in each.places if place.stage == spec.index] for each in tied]
    frozen: dict[str, list[tuple[str, str]]] = {}
    for p in spec.params:
        if not p.trainable:  # it has no gradients to sum, and is in no TiedSpec
            frozen.setdefault(p.name, []).append((p.block, p.attr))
    for mine in (*several, *frozen.values()):
        for block, attr in mine[1:]:
            if specs[block, attr].used_as == specs[mine[0]].used_as:
                first = stage.get_submodule(f"blocks.{mine[0][0]}").get_parameter(mine[0][1])
                setattr(stage.get_submodule(f"blocks.{block}"), attr, first)


_Place = tuple[nn.Module, str]
"""A block, and the name of its parameter."""


def _place(stage: nn.Module, place: TiedPlace) -> _Place:
    return stage.get_submodule(f"blocks.{place.block}"), place.attr


class TiedGradients:
    """This rank's copies of each tied parameter, and the group of pipeline ranks that hold one.

    Args:
        stages: this rank's stages, by index.
    """

    def __init__(self, spec: ProgramSpec, mesh: AxisMesh, stages: Mapping[int, nn.Module]) -> None:
        self._groups: list[tuple[list[_Place], dist.ProcessGroup | None]] = []
        per_stage = mesh.world_size // mesh.size("pp")  # the pipeline is the outermost axis
        groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        for tied in spec.tied:
            homes = sorted({spec.rank_of(place.stage) for place in tied.places})
            mine = [_place(stages[place.stage], place) for place in tied.places if place.stage in stages]
            group: dist.ProcessGroup | None = None
            if len(homes) > 1:
                if tuple(homes) not in groups:
                    columns = [[home * per_stage + i for home in homes] for i in range(per_stage)]
                    groups[tuple(homes)] = mesh.group_of_some(columns, _GROUP)
                group = groups[tuple(homes)]
            if mine and (group is not None or len({id(block._parameters[attr]) for block, attr in mine}) > 1):
                self._groups.append((mine, group))

    def sum_tied(self, device: torch.device) -> None:
        """Give every copy the sum of the gradients of all copies.

        A copy without a gradient (its use is detached from the loss) counts as zero: some other copy has one, or the
        parameter would not be trained, and the ranks that hold that copy wait for this one.
        """
        for mine, group in self._groups:
            copies = {id(p): p for block, attr in mine if (p := block._parameters[attr]) is not None}
            for p in copies.values():
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
            gradients = [local_of(p.grad) for p in copies.values() if p.grad is not None]
            total = gradients[0]
            for other in gradients[1:]:
                total += other
            if group is not None:
                all_reduce_flat([total], group, device=device)
            for other in gradients[1:]:
                other.copy_(total)
