"""What a compiled block keeps for its backward: the least set that the rest is recomputed from.

torch.compile traces forward and backward of a block together and cuts the graph in two where the fewest bytes pass
(`torch/_functorch/partitioners.py`, `min_cut_rematerialization_partition`, with the defaults of
`torch/_functorch/config.py` of PyTorch 2.13). What crosses the cut is kept, what lies behind it is computed again in
the backward. The same graph is made here of the statements of a block, and cut likewise. The facts taken from there:

- Element-wise operations, views, sums and norms may be computed again. Products, attention, collectives, tables,
  concatenations, experts and random numbers may not.
- A value that an operation which is not fused reads in the backward is written to memory there in any case: it is kept.
- A sum of less than a quarter of its operand is kept, so that the backward repeats no sums.
- An operation that reads a value far from the value's first use, with one that is not fused in between, is not
  computed again.
- A value costs its bytes times 1.1 for every step between it and the backward, and twice that if all that read it are
  fused with it, because it would not be written otherwise. Parameters cost nothing.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

_FARTHER, _FARTHEST = 1.1, 100
_NOT_WRITTEN = 2.0
_SUM = 4  # a result this many times smaller than its operands is a sum


@dataclass(frozen=True, slots=True)
class Traced:
    """A statement as the partition sees it.

    Attributes:
        reads, writes: numbers of variables.
        needs: storages that its backward reads.
        fused: a kernel may take it in, with its neighbours.
        again: the backward may compute it again.
    """

    reads: tuple[int, ...]
    writes: tuple[int, ...]
    needs: tuple[int, ...]
    fused: bool
    again: bool


@dataclass(frozen=True, slots=True)
class TracedBlock:
    """The statements of a block and the memory of its variables.

    Attributes:
        storages: the storage of every variable.
        sizes: bytes of every storage.
        given: storages of inputs, buffers and parameters; the latter cost nothing to keep.
        free: storages of parameters.
        outputs: variables that the block hands out.
    """

    statements: tuple[Traced, ...]
    storages: tuple[int, ...]
    sizes: tuple[int, ...]
    given: frozenset[int]
    free: frozenset[int]
    outputs: tuple[int, ...]


@functools.lru_cache(maxsize=4096)
def least_kept(block: TracedBlock) -> frozenset[int]:
    """Return the storages that cross from the forward to the backward, those given included."""
    return _Partition(block).cut()


class _Partition:
    def __init__(self, block: TracedBlock) -> None:
        self.block = block
        self.readers: dict[int, list[int]] = {}
        self.maker: dict[int, int] = {}  # storage -> the statement that makes it
        self.makes: dict[int, int] = {}  # variable -> statement
        for k, statement in enumerate(block.statements):
            for v in statement.reads:
                self.readers.setdefault(v, []).append(k)
            viewed = {block.storages[v] for v in statement.reads}
            for v in statement.writes:
                self.makes[v] = k
                if block.storages[v] not in viewed:
                    self.maker.setdefault(block.storages[v], k)
        self.needed = {s for statement in block.statements for s in statement.needs}

    def cut(self) -> frozenset[int]:
        if not self.needed:
            return frozenset()
        import networkx as nx  # 0.2 s, which plans without compiled blocks do not need

        t, banned, network = self.block, self._banned(), nx.DiGraph()
        distance, written = self._distances(), self._written()
        for s in {*t.storages, *self.needed}:
            weight = 0.0 if s in t.free else t.sizes[s] * _FARTHER ** min(distance.get(s, _FARTHEST), _FARTHEST)
            network.add_edge((s, "in"), (s, "out"), capacity=weight * (1.0 if s in written else _NOT_WRITTEN))
            if s in banned:
                network.add_edge("given", (s, "in"))  # no capacity: without limit
            if s in self.needed:
                network.add_edge((s, "out"), "backward")
            if s in self.maker:
                for v in t.statements[self.maker[s]].reads:
                    network.add_edge((t.storages[v], "out"), (s, "in"))
        _, (before, _) = nx.minimum_cut(network, "given", "backward")
        return frozenset(node[0] for node in before if node[1] == "in" and (node[0], "out") not in before)

    def _banned(self) -> set[int]:
        """Return the storages that the backward cannot compute again."""
        t = self.block
        out = {s for statement in t.statements if not statement.fused for s in statement.needs}
        for s in {*t.storages, *self.needed}:
            made = t.statements[self.maker[s]] if s in self.maker else None
            if made is None or not made.again or t.sizes[s] * _SUM < sum(t.sizes[t.storages[v]] for v in made.reads):
                out.add(s)
        return out | self._far_apart()

    def _far_apart(self) -> set[int]:
        """Return the results of statements that read a value again after one that is not fused."""
        t, out = self.block, set[int]()
        for v, users in self.readers.items():
            made = self.makes.get(v)
            if made is None or not t.statements[made].fused or len(users) < 2:
                continue
            first = self._first_not_fused(users)
            for k in users:
                if k > first and t.statements[k].fused:
                    out |= {t.storages[w] for w in t.statements[k].writes if self.maker.get(t.storages[w]) == k}
        return out

    def _first_not_fused(self, users: Sequence[int]) -> int:
        """Return the first statement that is not fused among those that follow from these, up to the last of them."""
        t, last = self.block, max(users)
        queue, seen = list(users), set(users)
        heapq.heapify(queue)
        while queue:
            k = heapq.heappop(queue)
            if not t.statements[k].fused:
                return k
            further = {u for v in t.statements[k].writes for u in self.readers.get(v, ()) if u <= last} - seen
            seen |= further
            for u in further:
                heapq.heappush(queue, u)
        return last

    def _distances(self) -> Mapping[int, int]:
        """Return how many statements are between a storage and the backward, 1 if the backward reads it itself."""
        t, out = self.block, dict.fromkeys(self.needed, 1)
        for statement in reversed(t.statements):
            near = min((out[t.storages[v]] for v in statement.writes if t.storages[v] in out), default=None)
            if near is None:
                continue
            for v in statement.reads:
                s = t.storages[v]
                out[s] = min(out.get(s, near + 1), near + 1)
        return out

    def _written(self) -> Set[int]:
        """Return the storages that are in memory because something that is not fused with their maker reads them."""
        t = self.block
        out = {*t.given, *(t.storages[v] for v in t.outputs)}
        for statement in t.statements:
            if not statement.fused:
                out |= {t.storages[v] for v in (*statement.reads, *statement.writes)}
        return out
