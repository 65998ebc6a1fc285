"""Measure every collective the runtime uses, over every group layout of the world, through the runtime's functions.

A sample is the time of a short run of calls after a barrier, divided by their number (on CUDA by events with the host
ahead, else by the wall clock); the slowest rank counts. On CPUs the ranks compute before every call, as they do in a
step, and that time is subtracted: threads of gloo that must wake up and caches with other contents make a collective in
a step two to four times as long as one in a tight loop. Bytes are those of CommWork: the gathered or reduced tensor on
one rank, for all_to_all the local one.

All groups of a layout run at once, as a mesh runs them: eight groups with a rank on each node share the cards of the
nodes. `measure_sharing` also times one group alone, which gives the cost of sharing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from spmd_types import I

from autoplan.cost_models.hardware.collective_kinds import MEASURED_COLLECTIVES
from autoplan.cost_models.profile import LINK_WORK_S, ErrorStats, LinkRecord, Profile, Timing
from autoplan.profiler.job import Job
from autoplan.profiler.ops import timing
from autoplan.runtime.convert import all_gather, all_reduce, all_to_all, reduce_scatter
from autoplan.runtime.mesh import AxisMesh, use_mesh

SIZES = tuple(1 << k for k in (6, 10, 12, 13, 14, 16, 18, 19, 20, 22, 24, 26, 28))
SHARED_SIZES = (1 << 22, 1 << 16)  # sizes at which one group alone is measured: bandwidth first, then latency
COARSE_SIZES = tuple(1 << k for k in (6, 22, 16, 19, 24, 13))  # measured first, in this order
HELD_OUT_SIZES = (3 << 12, 3 << 16, 3 << 20)
_WANTED_S = 0.006  # of measuring per sample
_MAX_CALLS = 20
_WORKED_CALLS = 4
_LONG_S = 0.04  # longer calls are measured alone
_LEAST_S = 1e-6


def layouts(world: int) -> list[tuple[int, int]]:
    """Return (group size, stride) of every group of a grid over the ranks."""
    sizes = [d for d in range(2, world + 1) if world % d == 0]
    return [(size, stride) for size in sizes for stride in range(1, world // size + 1) if world // size % stride == 0]


def _call(kind: str, num_bytes: int, mesh: AxisMesh, device: torch.device) -> Callable[[], object]:
    """Return one collective over the axis `group`, ready to run."""
    size, group = mesh.size("group"), mesh.group("group")
    rows = max(1, num_bytes // 4 // size)
    whole = torch.randn(rows * size, device=device)  # equal numbers would draw less power
    if kind == "all_reduce":
        return lambda: all_reduce(whole, "group", dst=I)
    if kind == "all_gather":
        part = torch.randn(rows, device=device)
        return lambda: all_gather(part, "group", dim=0, dst=I)
    if kind == "reduce_scatter":
        return lambda: reduce_scatter(whole, "group", dim=0)
    if kind == "all_to_all":
        local = whole.reshape(rows, size)
        return lambda: all_to_all(local, "group", src_dim=0, dst_dim=1)
    if kind == "broadcast":
        source = dist.get_global_rank(group, 0)
        return lambda: dist.broadcast(whole, source, group=group)
    return _neighbours(whole, mesh, group)


def _neighbours(tensor: torch.Tensor, mesh: AxisMesh, group: dist.ProcessGroup) -> Callable[[], object]:
    """Return a send there and back between ranks 2i and 2i + 1 of the group, as in a pipeline.

    The caller halves the time.
    """
    index, size = mesh.coordinate("group"), mesh.size("group")
    other = index ^ 1
    if other >= size:
        return lambda: None
    peer = dist.get_global_rank(group, other)

    def one(op: Callable[..., object]) -> None:
        for work in dist.batch_isend_irecv([dist.P2POp(op, tensor, peer, group=group)]):
            work.wait()

    def both() -> None:
        for op in (dist.isend, dist.irecv) if index < other else (dist.irecv, dist.isend):
            one(op)

    return both


def computation(job: Job, seconds: float = LINK_WORK_S) -> Callable[[], object]:
    """Return about `seconds` of forwards and backwards of a small feed-forward layer on one CPU thread."""
    x = torch.randn(128, 256, requires_grad=True)
    up, down = (torch.randn(shape, requires_grad=True) for shape in ((704, 256), (256, 704)))

    def one() -> None:
        with torch.enable_grad():
            y = torch.nn.functional.linear(torch.nn.functional.silu(torch.nn.functional.linear(x, up)), down)
            torch.autograd.grad(y.sum(), (x, up, down))

    one()
    once = min(job.slowest([job.wall(one) for _ in range(5)]))
    count = max(1, round(seconds / once))

    def work() -> None:
        for _ in range(count):
            one()

    return work


def measure_stragglers(job: Job) -> float:
    """Return `straggler_sqrt_s`: how much longer a collective waits after a long computation than after a short one."""
    mesh = AxisMesh([("group", job.world)], device_type=job.device.type)
    lengths = (LINK_WORK_S, 8 * LINK_WORK_S)
    with use_mesh(mesh), torch.no_grad():
        waits = [
            statistics.fmean(_measure("all_gather", 4096, mesh, job, computation(job, seconds))) for seconds in lengths
        ]
    return max(0.0, (waits[1] - waits[0]) / (math.sqrt(lengths[1]) - math.sqrt(lengths[0])))


def _measure(
    kind: str,
    num_bytes: int,
    mesh: AxisMesh,
    job: Job,
    between: Callable[[], object] | None = None,
    rests: bool = False,
) -> list[float]:
    """Return samples of the slowest rank; every rank gets the same.

    Args:
        between: computation of the ranks before every call; its time is subtracted.
        rests: True if this rank's group takes no part; it computes nevertheless.
    """
    run: Callable[[], object] = (lambda: None) if rests else _call(kind, num_bytes, mesh, job.device)
    run()  # the first call over a group connects it
    (once,) = job.slowest([job.wall(run)])
    repeats = 15 if once < 0.01 else 7 if once < 0.2 else 3
    trips = 2 if kind == "send_recv" else 1
    if between is None or once > _LONG_S:
        calls = max(1, min(_MAX_CALLS, int(_WANTED_S / max(once, 1e-7))))

        def many() -> None:
            for _ in range(calls):
                run()

        return job.slowest([job.wall(many) / calls / trips for _ in range(repeats)])

    def alone() -> None:
        for _ in range(_WORKED_CALLS):
            between()

    def both() -> None:
        for _ in range(_WORKED_CALLS):
            between()
            run()

    pairs = [(job.wall(both), job.wall(alone)) for _ in range(repeats)]
    together, work = job.slowest([b for b, _ in pairs]), job.slowest([a for _, a in pairs])
    usual = statistics.median(work)
    return [max(_LEAST_S, (b - usual) / _WORKED_CALLS / trips) for b in together]


@dataclass(frozen=True)
class _Point:
    """One measurement: a collective of a size over a group layout."""

    kind: str
    size: int
    stride: int
    num_bytes: int

    @property
    def curve(self) -> tuple[str, int, int]:
        """The curve of the point; values between points of one curve are interpolated."""
        return self.kind, self.size, self.stride


def _points(world: int, max_bytes: int, sizes: Sequence[int], known: Profile | None) -> list[_Point]:
    """Return the unknown points: first the whole range of every curve coarsely, then the sizes in between."""
    have = set() if known is None else {(r.kind, r.group_size, r.stride, r.num_bytes) for r in known.links}
    rest = [b for b in sizes if b not in COARSE_SIZES]
    order = [b for b in COARSE_SIZES if b in sizes] + rest + list(HELD_OUT_SIZES)
    return [
        _Point(kind, size, stride, num_bytes)
        for num_bytes in order
        if num_bytes <= max_bytes
        for size, stride in layouts(world)
        for kind in MEASURED_COLLECTIVES
        if (kind, size, stride, num_bytes) not in have
    ]


@dataclass(frozen=True)
class MeasuredLinks:
    """Measured curves of collectives, what there was no time for, and the errors of the curves on held-out sizes."""

    links: Sequence[LinkRecord]
    left_out: Sequence[str]
    errors: Mapping[str, ErrorStats] = field(default_factory=dict)


def measure_links(
    job: Job, max_bytes: int, sizes: Sequence[int] = SIZES, known: Profile | None = None
) -> MeasuredLinks:
    """Measure the curves of all collectives over all group layouts, coarsely first, as long as there is time.

    A collective over all ranks of the job.
    """
    points = _points(job.world, max_bytes, sizes, known)
    found = _measured(job, points)
    records = {p: LinkRecord(p.kind, p.size, p.stride, p.num_bytes, t) for p, t in found.items()}
    return MeasuredLinks([*records.values()], _left_out(points, found), _held_out_errors(records, known, job))


def measure_sharing(job: Job, links: Sequence[LinkRecord], sizes: Sequence[int] = SHARED_SIZES) -> MeasuredLinks:
    """Measure `alone_s` of those of these links where several groups share the machine. A collective."""
    shared = {_Point(r.kind, r.group_size, r.stride, r.num_bytes): r for r in links}
    wanted = [
        p for size in sizes for p, r in shared.items()
        if p.num_bytes == size and p.size < job.world and r.alone_s is None
    ]  # fmt: skip
    found = _measured(job, wanted, alone=True)
    left = len(wanted) - len(found)
    notes = [f"{left} of {len(wanted)} collectives of one group alone"] if left else []
    return MeasuredLinks([replace(r, alone_s=found.get(p, r.alone_s)) for p, r in shared.items()], notes)


def _measured(job: Job, points: Sequence[_Point], alone: bool = False) -> dict[_Point, Timing]:
    """Return the times of the points that there is time for. `alone`: one group runs and the others rest."""
    between = computation(job) if points and job.device.type == "cpu" else None
    found: dict[_Point, Timing] = {}
    with _Meshes(job) as meshes:
        for p in points:
            if not job.goes_on():
                break
            mesh = meshes.over(p.size, p.stride)
            rests = alone and (job.rank % p.stride != 0 or job.rank // p.stride >= p.size)
            with use_mesh(mesh), torch.no_grad():
                found[p] = timing(_measure(p.kind, p.num_bytes, mesh, job, between, rests))
            job.advance(f"{p.kind} {p.num_bytes} bytes{', one group alone' if alone else ''}")
    return found


class _Meshes:
    """Group layouts of the ranks, made on demand and given back at the end, since communicators take memory."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._made: dict[tuple[int, int], AxisMesh] = {}

    def over(self, size: int, stride: int) -> AxisMesh:
        """Return the mesh whose axis `group` has this size and stride. The first time a collective over all ranks."""
        if (size, stride) not in self._made:
            axes = [("outer", self._job.world // (size * stride)), ("group", size), ("inner", stride)]
            mesh = self._made[size, stride] = AxisMesh(axes, only=["group"], device_type=self._job.device.type)
            mesh.connect(self._job.device)
        return self._made[size, stride]

    def __enter__(self) -> _Meshes:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:  # after an error the others may not come
            self._job.barrier()
            for mesh in self._made.values():
                mesh.close()


def _held_out_errors(records: dict[_Point, LinkRecord], known: Profile | None, job: Job) -> dict[str, ErrorStats]:
    """Return the errors of the curves through all other sizes, by collective."""
    others = [r for p, r in records.items() if p.num_bytes not in HELD_OUT_SIZES]
    if known is not None:
        others += [r for r in known.links if r.num_bytes not in HELD_OUT_SIZES]
    line = Profile("curves", job.device.type, job.world, 1, links=tuple(others))
    wrong: dict[str, list[float]] = {}
    for p, record in records.items():
        if p.num_bytes in HELD_OUT_SIZES:
            predicted = line.collective_s(p.kind, p.num_bytes, p.size, p.stride)
            if predicted is not None:
                wrong.setdefault(p.kind, []).append(abs(predicted.mid / record.time_s.median - 1))
    return {kind: ErrorStats.of(errors) for kind, errors in wrong.items()}


def _left_out(points: Sequence[_Point], found: Mapping[_Point, Timing]) -> list[str]:
    """Return the sizes that there was no time for, a text per curve."""
    missing: dict[tuple[str, int, int], list[int]] = {}
    for p in points:
        if p not in found:
            missing.setdefault(p.curve, []).append(p.num_bytes)
    return [
        f"{kind} over {size} ranks (stride {stride}) of {', '.join(map(str, sorted(sizes)))} bytes"
        for (kind, size, stride), sizes in missing.items()
    ]
