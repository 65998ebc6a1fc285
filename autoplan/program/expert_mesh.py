"""The device grid of one pipeline stage, divided twice: dp x cp x tp for all, replicas x ep x etp for experts.

Ranks are numbered pp, dp, cp, tp, major to minor; experts divide the ranks of a stage again as edp, ep, etp (Liu et
al., MoE Parallel Folding, arXiv 2504.14960), so that ep takes neighbours: first what etp leaves of tp, then cp, then
dp. Both divisions are products of the same sub-axes, which exist where every size of the one divides, or is a multiple
of, what the other leaves at that place:

    dp=4 cp=1 tp=2, ep=4 etp=1:   edp 2 | dp1 2 | tp 2     dp = edp x dp1, ep = dp1 x tp
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from autoplan.config.parallel import ParallelConfig
from autoplan.ir.layout import Axis, Mesh
from autoplan.program.context_pins import product_degree

_Cut = tuple[str, str, int]  # dense axis, axis of experts, size of what they share


def folds(dp: int, cp: int, tp: int, ep: int, etp: int, neighbours: int = 1, copies: int = 1) -> bool:
    """True if experts over ep x etp can be made of the sub-axes of dp, cp and tp.

    Args:
        neighbours: ranks of cp that are an axis of their own, in a product of methods.
        copies: of the sharded state (hybrid ZeRO), of each of which experts take ranks.
    """
    ranks = dp * cp * tp
    if ranks % (ep * etp * copies) or dp % copies:
        return False
    dense = [*data_axes(dp, copies), *sequence_axes(cp, neighbours), ("tp", tp)]
    return _cuts(dense, _expert_axes(ranks // (ep * etp), ep, etp, copies)) is not None


def data_axes(dp: int, copies: int) -> list[tuple[str, int]]:
    """The axes of data parallelism: dp, or copies of the sharded state, far apart, and its shards, neighbours."""
    return [("rdp", copies), ("sdp", dp // copies)] if copies > 1 else [("dp", dp)]


def _expert_axes(replicas: int, ep: int, etp: int, copies: int) -> list[tuple[str, int]]:
    own = [("redp", copies), ("sedp", replicas // copies)] if copies > 1 else [("edp", replicas)]
    return [*own, ("ep", ep), ("etp", etp)]


def sequence_axes(cp: int, neighbours: int) -> list[tuple[str, int]]:
    """The axes that sequences are cut over: cp, or groups and neighbours in them for a product of two methods."""
    return [("cpr", cp // neighbours), ("cpu", neighbours)] if neighbours > 1 else [("cp", cp)]


def _cuts(left: Sequence[tuple[str, int]], right: Sequence[tuple[str, int]]) -> list[_Cut] | None:
    """Common sub-axes of two products of equal size, major to minor; None if there are none."""
    a, b = ([(name, size) for name, size in side if size > 1] for side in (left, right))
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


def folded_mesh(config: ParallelConfig, tensor: Sequence[Axis]) -> Mesh:
    """Sub-axes and groups where experts are spread: `ep` and `edp` (their replicas; `redp` and `sedp` where copies of
    the sharded state and its shards are two), `etp` if that is not 1.

    Args:
        config: degrees for which `folds`.
        tensor: the sub-axes of tp that layouts are chosen on, major to minor.
    """
    c, etp = config, config.expert_tp
    sequence = sequence_axes(c.cp, product_degree(c))
    data = data_axes(c.dp, c.zero_replicas)
    left = [*data, *sequence, *((a.name, a.size) for a in tensor)]
    right = _expert_axes(c.dp * c.cp * c.tp // (c.ep * etp), c.ep, etp, c.zero_replicas)
    cuts = _cuts(left, right)
    if cuts is None:
        raise ValueError(f"ep={c.ep} x etp={etp} do not fold into dp={c.dp} x cp={c.cp} x tp={c.tp}")
    names = _names(cuts)
    axes, groups = [Axis("pp", c.pp)], {}
    present = {a for a, _, _ in cuts} | {b for _, b, _ in cuts}
    axes += [Axis(n, 1) for n, _ in (*left, *right) if n not in present and n not in ("cp", "etp")]
    axes += [Axis(name, size) for name, (_, _, size) in zip(names, cuts, strict=True)]
    known = {a.name for a in axes}

    def group(name: str, members: tuple[str, ...]) -> None:
        if name not in known and members:
            groups[name] = members

    def atoms(*of: str) -> tuple[str, ...]:
        return tuple(n for n, cut in zip(names, cuts, strict=True) if cut[0] in of or cut[1] in of)

    of_data, parts = [name for name, _ in data], [name for name, _ in sequence]
    for name in (*of_data, *parts, *(a.name for a in tensor)):
        group(name, atoms(name))
    group("dp", atoms(*of_data))
    group("tp", atoms(*(a.name for a in tensor)))
    if c.cp > 1:
        group("cp", atoms(*parts))
        group("replicas", atoms(*of_data, *parts))
        if c.zero_replicas > 1:
            group("shards", atoms("sdp", *parts))
    own = [name for name, _ in right[:-2]]
    for name in ("ep", *own, "etp"):
        group(name, atoms(name))
    group("edp", atoms(*own))
    return Mesh(tuple(axes), groups)


def _names(cuts: Sequence[_Cut]) -> list[str]:
    """A sub-axis that is a whole axis has its name, where it is two the dense one's; but `ep`, and `edp` beside it,
    within dp alone."""
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


def canonical(mesh: Mesh, name: str) -> str:
    """The first axis or group of the mesh that spans the same ranks: under which the runtime records collectives."""
    sizes = {a.name: a.size for a in mesh.axes}
    wanted = [a for a in mesh.atoms(name) if sizes[a] > 1]
    return next(n for n in (*sizes, *mesh.groups) if [a for a in mesh.atoms(n) if sizes[a] > 1] == wanted)
