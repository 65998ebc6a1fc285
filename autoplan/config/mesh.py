"""The device grid of a configuration: its mesh, and every axis and group in it.

Ranks are numbered pp, dp, cp, tp, major to minor. Experts divide the ranks of a stage a second time as edp, ep, etp
(Liu et al., MoE Parallel Folding, arXiv 2504.14960). ep takes neighbours: first the part of tp that etp does not use,
then cp, then dp. Both divisions are products of the same sub-axes. These exist if, at every place, one of the two
remaining sizes divides the other:

    dp=4 cp=1 tp=2, ep=4 etp=1:   edp 2 | dp1 2 | tp 2     dp = edp x dp1, ep = dp1 x tp

The layouts, the emitted programs and the price of communicators read their axes and groups here. Rank counts that need
no mesh are properties of `ParallelConfig` (num_shards, expert_tp, ...).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from autoplan.config.context_methods import neighbours_of
from autoplan.config.parallel import ParallelConfig
from autoplan.errors import PinError
from autoplan.ir.layout import Axis, Mesh

_Cut = tuple[str, str, int]  # dense axis, axis of experts, size of their common sub-axis


@dataclass(frozen=True)
class ParallelDims:
    """The device grid of a configuration.

    Attributes:
        tensor: the sub-axes of tp, major to minor: two if there are fewer key-value heads than tp.
        has_experts: the model has experts, which a configuration may spread.
    """

    config: ParallelConfig
    tensor: tuple[Axis, ...]
    has_experts: bool = False

    @property
    def layout_axes(self) -> tuple[Axis, ...]:
        """The sub-axes that layouts are chosen on, major to minor."""
        return self.tensor if self.config.tp > 1 else ()

    @cached_property
    def data(self) -> list[Axis]:
        """The axes of data parallelism: dp, or copies of the sharded state (far apart) and its shards (neighbours)."""
        return _data_axes(self.config.dp, self.config.zero_replicas)

    @cached_property
    def sequence(self) -> list[Axis]:
        """The axes that sequences are cut over: cp, or groups and neighbours in them for a product of two methods."""
        return _sequence_axes(self.config.cp, product_degree(self.config))

    @cached_property
    def mesh(self) -> Mesh:
        """pp, dp, cp and tp, major to minor over ranks, as sub-axes and named products of them.

        If experts are spread, also the axes of experts: `ep`, `edp` (their replicas; as `redp` and `sedp` for copies of
        the sharded state and its shards), and `etp` if it is not 1.

        Raises:
            PinError: experts cannot be spread over the axes.
        """
        c = self.config
        if self.has_experts and c.spreads_experts:
            return self._folded()
        cut = self.sequence if c.cp > 1 else []
        groups = _named("dp", self.data) | _named("cp", cut) | _named("tp", self.tensor)
        if cut:
            groups["replicas"] = tuple(a.name for a in (*self.data, *cut))
            if c.zero_replicas > 1:
                groups["shards"] = ("sdp", *(a.name for a in cut))
        return Mesh((Axis("pp", c.pp), *self.data, *cut, *self.tensor), groups)

    def _folded(self) -> Mesh:
        c = self.config
        left = [*self.data, *self.sequence, *self.tensor]
        right = _expert_axes(c.stage_ranks // (c.ep * c.expert_tp), c.ep, c.expert_tp, c.zero_replicas)
        cuts = _cuts(left, right)
        if cuts is None:
            groups_of = f" with cp={c.cp} as groups of {self.sequence[-1].size}" if len(self.sequence) > 1 else ""
            raise PinError(f"ep={c.ep} does not fold into dp x cp x tp{groups_of}", ("context_method", "ep"))
        names = _names(cuts)
        present = {a for a, _, _ in cuts} | {b for _, b, _ in cuts}
        axes = [Axis("pp", c.pp)]
        axes += [Axis(a.name, 1) for a in (*left, *right) if a.name not in present and a.name not in ("cp", "etp")]
        axes += [Axis(name, size) for name, (_, _, size) in zip(names, cuts, strict=True)]
        known, groups = {a.name for a in axes}, dict[str, tuple[str, ...]]()
        for name, of in self._groups([a.name for a in right[:-2]]):
            members = tuple(n for n, cut in zip(names, cuts, strict=True) if cut[0] in of or cut[1] in of)
            if name not in known and members:
                groups[name] = members
        return Mesh(tuple(axes), groups)

    def _groups(self, own: list[str]) -> list[tuple[str, list[str]]]:
        """Return the named products of a folded mesh, with the axes that they are made of.

        Args:
            own: axes of the experts' replicas.
        """
        data, parts, tensor = ([a.name for a in each] for each in (self.data, self.sequence, self.tensor))
        out = [*((name, [name]) for name in (*data, *parts, *tensor)), ("dp", data), ("tp", tensor)]
        if self.config.cp > 1:
            out += [("cp", parts), ("replicas", [*data, *parts])]
            out += [("shards", ["sdp", *parts])] if self.config.zero_replicas > 1 else []
        return [*out, *((name, [name]) for name in ("ep", *own, "etp")), ("edp", own)]


def tensor_axes(tp: int, kv_ranks: int) -> tuple[Axis, ...]:
    """Return the sub-axes of tp, major to minor, with key-value heads split over `kv_ranks` of its ranks."""
    if 1 < kv_ranks < tp:
        return Axis("tp0", kv_ranks), Axis("tp1", tp // kv_ranks)
    return (Axis("tp", tp),)


def product_degree(config: ParallelConfig) -> int:
    """Return the ranks of Ulysses in the products of a configuration's methods; 1 if there is none."""
    given = config.context_method
    return neighbours_of(given.values() if isinstance(given, Mapping) else () if given is None else (given,), config.cp)


def _named(name: str, axes: Sequence[Axis]) -> dict[str, tuple[str, ...]]:
    """Return the group of several sub-axes; none for one sub-axis, which has its own name."""
    return {name: tuple(a.name for a in axes)} if len(axes) > 1 else {}


def _data_axes(dp: int, copies: int) -> list[Axis]:
    return [Axis("rdp", copies), Axis("sdp", dp // copies)] if copies > 1 else [Axis("dp", dp)]


def _sequence_axes(cp: int, neighbours: int) -> list[Axis]:
    return [Axis("cpr", cp // neighbours), Axis("cpu", neighbours)] if neighbours > 1 else [Axis("cp", cp)]


def _expert_axes(replicas: int, ep: int, etp: int, copies: int) -> list[Axis]:
    own = [Axis("redp", copies), Axis("sedp", replicas // copies)] if copies > 1 else [Axis("edp", replicas)]
    return [*own, Axis("ep", ep), Axis("etp", etp)]


def folds(dp: int, cp: int, tp: int, ep: int, etp: int, neighbours: int = 1, copies: int = 1) -> bool:
    """Return True if experts over ep x etp can be made of the sub-axes of dp, cp and tp.

    Args:
        neighbours: ranks of cp that are an axis of their own, in a product of methods.
        copies: copies of the sharded state (hybrid ZeRO); experts take ranks of each.
    """
    ranks = dp * cp * tp
    if ranks % (ep * etp * copies) or dp % copies:
        return False
    dense = [*_data_axes(dp, copies), *_sequence_axes(cp, neighbours), Axis("tp", tp)]
    return _cuts(dense, _expert_axes(ranks // (ep * etp), ep, etp, copies)) is not None


def _cuts(left: Sequence[Axis], right: Sequence[Axis]) -> list[_Cut] | None:
    """Return the common sub-axes of two products of equal size, major to minor; None if there are none."""
    a, b = ([(axis.name, axis.size) for axis in side if axis.size > 1] for side in (left, right))
    out: list[_Cut] = []
    while a and b:
        (name_a, size_a), (name_b, size_b) = a.pop(), b.pop()
        common = min(size_a, size_b)
        if math.gcd(size_a, size_b) != common:
            return None
        out.append((name_a, name_b, common))
        a += [(name_a, size_a // common)] * (size_a > common)
        b += [(name_b, size_b // common)] * (size_b > common)
    return out[::-1]


def _names(cuts: Sequence[_Cut]) -> list[str]:
    """Name the sub-axes after their dense axis, with a number if it has several.

    Exception: a sub-axis of dp that is all of `ep`, or all of `edp` beside other parts of dp, has the experts' name.
    """
    dense, expert = [a for a, _, _ in cuts], [b for _, b, _ in cuts]
    out, seen = [], dict.fromkeys(dense, 0)
    for a, b, _ in cuts:
        whole = expert.count(b) == 1
        if a == "dp" and whole and (b == "ep" or (b == "edp" and dense.count(a) > 1)):
            out.append(b)
        else:
            out.append(a if dense.count(a) == 1 else f"{a}{seen[a]}")
        seen[a] += 1
    return out
