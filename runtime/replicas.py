"""The ranks that hold the same parameters, and the ranks among them that ZeRO shards over."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

from autoplan.runtime.mesh import AxisMesh
from autoplan.runtime.spec import ParamSpec, ProgramSpec


class Replicas:
    """The replicas of one program.

    Attributes:
        all: the axis of all ranks with the same parameters: the data-parallel ranks, together with the context-parallel
            ones.
        plain: True if ZeRO shards no parameter.
    """

    def __init__(self, spec: ProgramSpec, mesh: AxisMesh) -> None:
        self._spec, self._mesh = spec, mesh
        self._hybrid = "rdp" in mesh.axes
        self.all = "replicas" if "replicas" in mesh.groups else "dp"
        # of experts that tokens travel to there may be copies where there are none of the other parameters
        self._only_experts = mesh.size(self.all) == 1 and mesh.has("edp") and mesh.size("edp") > 1
        self.plain: bool = spec.zero_stage == 0 or (mesh.size(self.all) == 1 and not self._only_experts)
        # the ranks that ZeRO shards over: all replicas, or neighbours among them; and the same for experts under token
        # dispatch
        self._shards, self._expert_shards = self.all, "edp"
        if self._hybrid:
            self._shards, self._expert_shards = "shards" if "shards" in mesh.groups else "sdp", "sedp"

    def submesh(self) -> DeviceMesh:
        """Return the mesh of the ranks that ZeRO shards over; under hybrid ZeRO its first dim is the shards' copies."""
        if self._hybrid:
            return self._mesh.submesh("rdp", self._shards)
        return self._mesh.submesh(self._shards, connected=self._only_experts)

    def submesh_of_experts(self) -> DeviceMesh | None:
        """Return the ranks over which ZeRO shards experts under token dispatch; None if there are none."""
        if not self._mesh.has("edp"):
            return None
        shards = self._expert_shards
        return self._mesh.submesh("redp", shards) if self._hybrid else self._mesh.submesh(shards)

    def counts_here(self, p: ParamSpec) -> bool:
        """Return True on exactly one of the ranks that hold the same elements."""
        for tied in self._spec.tied:
            first = tied.places[0]
            if tied.name == p.name and (first.block, first.attr) != (p.block, p.attr):
                return False
        sharded = {atom for s in p.shards for atom in self._mesh.atoms(s.axis)}
        if self._spec.zero_stage > 0:
            apart = any(s.axis == "ep" for s in p.shards)
            sharded.update(self._mesh.atoms(self._expert_shards if apart else self._shards))
        return all(name in sharded or name == "pp" or self._mesh.coordinate(name) == 0 for name in self._mesh.axes)
