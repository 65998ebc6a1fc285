"""The machines of a profile: topology, nodes, clocks before and after."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

from autoplan.profiler.calm import load_average
from autoplan.profiler.clocks import WARNING, DeviceState, clock_warnings, load_warning, read_states
from autoplan.profiler.job import Job
from autoplan.profiler.nodes import MeasuredNodes
from autoplan.profiler.system import System, ThisMachine, Unreadable
from autoplan.profiler.topology import detect

_BUSY_S = {"cpu": 0.02, "cuda": 1.5}  # of products while clocks are read; nvidia-smi takes most of a second
_BUSY_SIZE = {"cpu": 256, "cuda": 4096}
_MAX_QUEUED = 900  # launches that fit the queue of a CUDA stream before the host waits


class Machine:
    """The machines of a job. All methods but `shape` and `data` are collectives over all ranks."""

    def __init__(self, job: Job, nodes: MeasuredNodes, system: System | None = None) -> None:
        self.job = job
        self.nodes = nodes
        self.system: System = ThisMachine() if system is None else system
        self.speaks: bool = nodes.is_first(job.rank)
        self.topology: dict[str, Any] = {}
        self.load: float = 0.0  # average of the busiest node before measuring
        self.before: list[tuple[DeviceState, ...]] = []
        self.after: list[tuple[DeviceState, ...]] = []

    def shape(self) -> dict[str, int]:
        """Return the data for `Profile.hardware`; nothing for a single node, as in older profiles."""
        if len(self.nodes.names) == 1:
            return {}
        return {"nodes": len(self.nodes.names), "ranks_per_node": self.nodes.ranks_per_node}

    def begin(self, hardware: Mapping[str, Any]) -> list[str]:
        """Find the nodes and read their state before measuring; return notes for the profile."""
        topology = detect(self.system).data() if self.speaks else {}
        found = self.job.gather((dict(hardware), load_average(), topology))
        self.topology, self.load = found[0][2], max(load for _, load, _ in found)
        notes = [f"load average of the machine before measuring: {found[0][1]:.1f}"]
        first: Mapping[str, Any] = found[0][0]
        for index, rank in enumerate(range(0, self.job.world, self.nodes.ranks_per_node)):
            other, busy, _ = found[rank]
            differing = [k for k in first if other.get(k) != first[k]]
            if differing:
                what = ", ".join(f"{k} {first[k]} and {other.get(k)}" for k in differing)
                notes.append(f"{WARNING}nodes 0 and {index} differ: {what}; the slower one is what is measured")
            if self.job.device.type == "cpu":
                notes += load_warning(busy, self.nodes.ranks_per_node, int(other.get("cores", 1)))
        self.before, problems = self._states()
        return [*notes, *problems, *self._limits()]

    def _limits(self) -> list[str]:
        """Return notes on what a job of this size cannot measure."""
        if self.job.world == 1:
            return ["one process: collectives, shared links and overlap cannot be measured"]
        if len(self.nodes.names) == 1:
            return ["one node: what crosses nodes cannot be measured; start it on several by torchrun"]
        return []

    def end(self) -> list[str]:
        """Read the state of the nodes after measuring; return warnings for the profile."""
        self.after, problems = self._states()
        many = len(self.nodes.names) > 1
        told = [
            line
            for index, (before, after) in enumerate(zip(self.before, self.after, strict=True))
            for line in clock_warnings(before, after, f" of node {index}" if many else "")
        ]
        return list(dict.fromkeys([*problems, *told]))

    def data(self) -> dict[str, Any]:
        """Return the data for `Profile.machine`. No host names."""
        return {
            "topology": self.topology,
            "nodes": len(self.nodes.names),
            "ranks_per_node": self.nodes.ranks_per_node,
            "clocks_before": [[s.data() for s in node] for node in self.before],
            "clocks_after": [[s.data() for s in node] for node in self.after],
        }

    def _states(self) -> tuple[list[tuple[DeviceState, ...]], list[str]]:
        """Return the device states of every node, read while its devices work, and notes on failures."""
        self._keep_busy()
        states: tuple[DeviceState, ...] = ()
        problem = ""
        if self.speaks:
            try:
                states = read_states(self.system, self.job.device.type)
            except Unreadable as exc:
                problem = f"clocks are not known: {exc}"
        found = self.job.gather((states, problem))
        self.job.synchronize()
        spoken = found[:: self.nodes.ranks_per_node]
        return [s for s, _ in spoken], list(dict.fromkeys(p for _, p in spoken if p))

    def _keep_busy(self) -> None:
        """Work for a while, so that clocks are up. On CUDA the work is queued and goes on; on a CPU it is done at
        once."""
        kind = self.job.device.type
        a = torch.randn(_BUSY_SIZE[kind], _BUSY_SIZE[kind], device=self.job.device)
        torch.mm(a, a)
        self.job.synchronize()
        begin = time.perf_counter()
        torch.mm(a, a)
        self.job.synchronize()
        once = max(1e-6, time.perf_counter() - begin)
        for _ in range(min(_MAX_QUEUED, round(_BUSY_S[kind] / once))):
            torch.mm(a, a)
