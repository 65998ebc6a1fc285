"""Paths of least latency through a fabric, and the load that flows put on its links.

Distances are whole numbers (picoseconds, then links), so that paths of equal length compare equal. All computations use
arrays: a fabric of 1,024 devices has a million pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_PICO = 1e12
_LINKS = 1024  # a path has fewer links than this
_DIGITS = 12
_FAR = np.iinfo(np.int64).max // 4


@dataclass(frozen=True)
class Load:
    """The speed of a set of flows that a fabric carries at once.

    Attributes:
        latency_s: Latency of the longest path.
        bytes_per_s: Speed of a flow of size 1.
        slowest: Number of the slowest link used.
    """

    latency_s: float
    bytes_per_s: float
    slowest: int


class Routes:
    """The shortest paths to every device.

    Args:
        num_devices: Nodes 0 to num_devices - 1 are devices.
        num_nodes: The other nodes up to this number are switches.
        ends, speeds, latencies: The links, full duplex: pairs of nodes, bytes/s per direction, seconds.
    """

    def __init__(
        self,
        num_devices: int,
        num_nodes: int,
        ends: Sequence[tuple[int, int]],
        speeds: Sequence[float],
        latencies: Sequence[float],
    ) -> None:
        link = np.tile(np.arange(len(ends)), 2)
        both = np.array([*ends, *((b, a) for a, b in ends)], dtype=np.int64).reshape(-1, 2)
        order = np.argsort(both[:, 0], kind="stable")
        self._link, (self._source, self._target) = link[order], both[order].T
        self._speed = np.array(speeds, dtype=np.float64)[self._link]
        self._weight = np.round(np.array(latencies) * _PICO).astype(np.int64)[self._link] * _LINKS + 1
        self._first = np.searchsorted(self._source, np.arange(num_nodes + 1))
        self.distance: np.ndarray = self._distances(num_devices, num_nodes)  # node -> device

    def _distances(self, num_devices: int, num_nodes: int) -> np.ndarray:
        """Return the distance from every node to every device (Bellman-Ford for all devices at once).

        It takes as many rounds as the longest path has links.
        """
        distance = np.full((num_nodes, num_devices), _FAR, dtype=np.int64)
        distance[np.arange(num_devices), np.arange(num_devices)] = 0
        linked = np.unique(self._source)
        starts = self._first[linked]
        while len(linked):
            through = distance[self._target] + self._weight[:, None]
            best = distance.copy()
            best[linked] = np.minimum(distance[linked], np.minimum.reduceat(through, starts, axis=0))
            if np.array_equal(best, distance):
                break
            distance = best
        return distance

    def send(self, sources: np.ndarray, targets: np.ndarray, size: float) -> Load:
        """Return the load of one flow of `size` from each source to its target, all at once, none to itself."""
        load = np.zeros(len(self._link))
        distance = self.distance
        flow, at, amount = np.arange(len(sources)), sources, np.full(len(sources), size)
        while len(flow):
            degree = self._first[at + 1] - self._first[at]
            entry = np.repeat(np.arange(len(flow)), degree)
            arc = np.arange(len(entry)) - np.repeat(np.cumsum(degree) - degree, degree) + self._first[at][entry]
            to = targets[flow[entry]]
            nearer = self._weight[arc] + distance[self._target[arc], to] == distance[at[entry], to]
            entry, arc = entry[nearer], arc[nearer]
            shares = self._speed[arc] / np.bincount(entry, self._speed[arc], len(flow))[entry]
            moved = amount[entry] * shares
            load += np.bincount(arc, moved, len(load))
            flow, at, amount = self._merged(flow[entry], self._target[arc], moved)
            on = at != targets[flow]
            flow, at, amount = flow[on], at[on], amount[on]
        used = np.flatnonzero(load)
        seconds = (load[used] / self._speed[used]).max()
        latency = int(distance[sources, targets].max()) // _LINKS
        speed = float(f"{1.0 / seconds:.{_DIGITS}g}")  # sums of shares have rounding errors
        return Load(latency / _PICO, speed, int(self._link[used[self._speed[used].argmin()]]))

    def _merged(
        self, flow: np.ndarray, at: np.ndarray, amount: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Merge parts of one flow that meet at a node."""
        keys, index = np.unique(flow * len(self._first) + at, return_inverse=True)
        return keys // len(self._first), keys % len(self._first), np.bincount(index, amount, len(keys))
