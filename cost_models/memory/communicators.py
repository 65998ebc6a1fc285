"""The memory of a process on its device before it makes a tensor: CUDA context and communicators of NCCL.

The communicators are those of the mesh that the program runs on (`autoplan.config.mesh`, `Mesh.communicators`), and one
for tied parameters of the first and last stage. Each takes

    channels x 12 MiB    one connection per channel to the next rank of a ring, and one from the rank before it
    channels x 16 slots  that all messages over the network share, allocated whether or not there are any; 512 KiB each
                         if all ranks reach each other over NVLink, 128 KiB else
    peers x channels x 12 MiB
                         connections for messages (all-to-all, pipeline, rings of attention) to ranks in reach of NVLink

A connection has 10 MiB on the receiving side (NCCL_BUFFSIZE 4 MiB, 0.5 MiB for LL, 4.7 MiB for LL128, a header, rounded
up to 2 MiB) and 2 MiB on the sending side: NCCL 2.28, src/include/device.h, src/transport/p2p.cc; both sizes are in the
log of issue 1685 of NVIDIA/nccl. Slots: `sharedNetBuffersInit` of src/transport/net.cc, in issue 2363. Trees are not
counted: since NCCL 2.22 what is not used is not connected.

Published figures that the formula meets: 544 MiB for a group of 2 A100 and 688 for one of 3 or 4, of NCCL before 2.22,
which connects trees too (issue 964; 24 channels: 544 here); 3.28 GB for the first all-to-all of 8 H100 (issue 1685; 32
channels for each pair of ranks: 2.82 here); 512 MiB of slots on B300 (issue 2363; 64 channels: the same here).
"""

from __future__ import annotations

import math
from functools import lru_cache
from operator import attrgetter
from typing import NamedTuple

from autoplan.config.mesh import ParallelDims, product_degree, tensor_axes
from autoplan.config.parallel import ParallelConfig
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.cost_models.hardware.collective_kinds import COLLECTIVE_KINDS, Traffic
from autoplan.cost_models.hardware.parts import Group
from autoplan.cost_models.network.groups import mesh_groups
from autoplan.cost_models.quantity import Quantity, Tag
from autoplan.cost_models.work import Workload
from autoplan.ir.layout import Axis
from autoplan.schedules.schedule import num_copies, ranks_of_chunks
from autoplan.units import GIB, MIB

# The CUDA context with the kernels of torch and its libraries. Assumed, not measured here.
_CONTEXT_BYTES = 0.6 * GIB
_CONNECTION_BYTES = 12 * MIB
_NUM_SLOTS = 16
_SLOT_BYTES = {True: MIB // 2, False: MIB // 8}  # if all ranks are in reach of NVLink; if not
_SPREAD = 0.5  # of all of it: the published figures are up to 1.27 times the formula

_DEGREES = attrgetter("pp", "dp", "cp", "tp", "ep", "etp", "zero_replicas")


class Channels(NamedTuple):
    """Channels of a communicator whose ranks are all in reach of each other, and those for messages to one peer."""

    ring: int
    peer: int


# By the fabric between the devices of a node. NVLink: logs of A100 (issue 964) and H100 (1685), of B300 (2363). Others:
# two for each network card or PCIe path (NVIDIA/nccl issue 438), which also holds between nodes.
_BY_FABRIC = {"nvlink5": Channels(64, 64), "nvlink": Channels(24, 32), "plain": Channels(24, 32)}
_ELSE = Channels(2, 2)


@lru_cache(maxsize=64)
def _known(*facts: object) -> dict[object, Quantity]:
    """Return the results by degrees, shared by all workloads that agree in these facts."""
    return {}


class FixedMemory:
    """The bytes that a process needs before it makes a tensor, for one workload at any degrees.

    On CPUs they are 0: gloo's buffers are small and on the host, which tensors are, too.
    """

    def __init__(self, workload: Workload, cluster: Cluster) -> None:
        self.workload = workload
        self._on_cpu = cluster.device_type == "cpu"
        fabric = cluster.levels[0].fabric
        kinds = (channels for prefix, channels in _BY_FABRIC.items() if fabric.startswith(prefix))
        self._domain, self._channels = cluster.domain_size, next(kinds, _ELSE)
        self._ties = any(t.param.trainable and t.first != t.last for t in workload.tied)
        facts = workload.axes, workload.has_expert_parameters, workload.messages, self._ties
        self._known = _known(facts, self._domain, self._channels, self._on_cpu)

    def of(self, config: ParallelConfig) -> Quantity:
        """Return the bytes at the degrees of a configuration."""
        product = product_degree(config) if config.cp > 1 else 1
        key = (*_DEGREES(config), num_copies(config.schedule), product, self._apart(config))
        if key not in self._known:
            num_bytes = 0.0
            if not self._on_cpu:
                num_bytes = _CONTEXT_BYTES + self._shared_bytes(config) + self._message_bytes(config)
            self._known[key] = Quantity.spread(num_bytes, _SPREAD, Tag.ASSUMED)
        return self._known[key]

    def communicators(self, config: ParallelConfig) -> list[tuple[Group, ...]]:
        """Return the communicators of a rank, each as the sub-axes of its mesh that its ranks differ along."""
        w, c = self.workload, config
        tensor = tuple(Axis(name, size) for name, size in w.axes) or tensor_axes(c.tp, c.tp)
        mesh = ParallelDims(c, tensor, w.has_expert_parameters).mesh
        steps, step = dict[str, Group](), 1
        for axis in reversed(mesh.axes):
            steps[axis.name], step = Group(axis.size, step), step * axis.size
        out = [tuple(steps[name] for name in span) for span in mesh.communicators]
        if apart := self._apart(c):
            out.append((Group(2, apart * c.stage_ranks),))
        return out

    def _apart(self, config: ParallelConfig) -> int:
        """Return how many stages the ranks of tied parameters are apart; 0 if they need no own communicator."""
        c = config
        if not self._ties or c.pp <= 2:
            return 0
        homes = ranks_of_chunks(c.schedule, c.pp, c.virtual_stages)
        return abs(homes[-1] - homes[0])

    def _near(self, span: tuple[Group, ...]) -> int:
        """Return the number of ranks of a communicator that reach each other without a network between nodes."""
        return math.prod(min(g.size, max(1, self._domain // g.stride)) for g in span)

    def _shared_bytes(self, config: ParallelConfig) -> float:
        """Return the bytes of rings and of slots."""
        found = 0.0
        for span in self.communicators(config):
            near = self._near(span)
            inside = near == math.prod(g.size for g in span)
            ring = self._channels.ring if inside else min(self._channels.ring, _ELSE.ring * near)
            found += ring * _CONNECTION_BYTES + self._channels.peer * _NUM_SLOTS * _SLOT_BYTES[inside]
        return found

    def _message_bytes(self, config: ParallelConfig) -> float:
        """Return the bytes of connections to single ranks; messages to other nodes use the slots."""
        c, groups = config, mesh_groups(config, self.workload.axes)
        peers = {groups["pp"]: 2} if c.pp > 1 else {}  # the stages before and after it
        for sent in self.workload.messages:
            group, part = groups[sent.axis], sent.part
            group = group if part is None else Group(part[0], part[1] * group.stride)
            most = 1 if COLLECTIVE_KINDS[sent.kind].traffic is Traffic.NEIGHBOURS else group.size - 1
            peers[group] = max(peers.get(group, 0), most)
        found = 0
        for group, most in peers.items():
            near = self._near((group,))
            found += min(most, near - 1) * (self._channels if near == group.size else _ELSE).peer
        return float(found * _CONNECTION_BYTES)
