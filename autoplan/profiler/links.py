"""Time of every collective the runtime uses, over every group layout of the world, through the runtime's functions.

Wall time of a short run of calls between barriers, divided by their number; the slowest rank counts. The bytes are
those of CommWork: the gathered or reduced tensor on one rank, for all_to_all the local one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from autoplan.cost_models.profile import COLLECTIVES, ErrorStats, LinkRecord, Profile
from autoplan.profiler.job import Job
from autoplan.profiler.ops import timing
from autoplan.runtime.convert import I, all_gather, all_reduce, all_to_all, reduce_scatter
from autoplan.runtime.mesh import AxisMesh, use_mesh

SIZES = tuple(1 << k for k in (6, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28))
HELD_OUT_SIZES = (3 << 12, 3 << 16, 3 << 20)
_WANTED_S = 0.01  # of measuring per sample
_MAX_CALLS = 20


def layouts(world: int) -> list[tuple[int, int]]:
    """(group size, stride) of every group of a grid over the ranks."""
    sizes = [d for d in range(2, world + 1) if world % d == 0]
    return [(size, stride) for size in sizes for stride in range(1, world // size + 1) if world // size % stride == 0]


def _call(kind: str, num_bytes: int, mesh: AxisMesh, device: torch.device) -> Callable[[], object]:
    """One collective over the axis `group`, ready to run."""
    size, group = mesh.size("group"), mesh.group("group")
    rows = max(1, num_bytes // 4 // size)
    whole = torch.zeros(rows * size, device=device)
    if kind == "all_reduce":
        return lambda: all_reduce(whole, "group", dst=I)
    if kind == "all_gather":
        part = torch.zeros(rows, device=device)
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
    """There and back between ranks 2i and 2i + 1 of the group, as a pipeline sends; the caller halves the time."""
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


def _measure(kind: str, num_bytes: int, mesh: AxisMesh, job: Job) -> list[float]:
    """Samples of the slowest rank; every rank gets the same."""
    run = _call(kind, num_bytes, mesh, job.device)
    run()  # the first call over a group connects it
    (once,) = job.slowest([job.wall(run)])
    calls = max(1, min(_MAX_CALLS, int(_WANTED_S / max(once, 1e-7))))
    repeats = 25 if once < 0.01 else 9 if once < 0.2 else 3

    def many() -> None:
        for _ in range(calls):
            run()

    trips = 2 if kind == "send_recv" else 1
    return job.slowest([job.wall(many) / calls / trips for _ in range(repeats)])


def measure_links(
    job: Job, max_bytes: int, sizes: Sequence[int] = SIZES, known: Profile | None = None
) -> tuple[list[LinkRecord], dict[str, ErrorStats], list[str]]:
    """Curves of all collectives over all group layouts, their error on held-out sizes, and what was left out.

    A collective over all ranks of the job.
    """
    records: list[LinkRecord] = []
    errors: dict[str, ErrorStats] = {}
    left_out: list[str] = []
    have = set() if known is None else {(r.kind, r.group_size, r.stride) for r in known.links}
    wanted = [
        (kind, size, stride)
        for size, stride in layouts(job.world)
        for kind in COLLECTIVES
        if (kind, size, stride) not in have
    ]
    wrong: dict[str, list[float]] = {}
    for done, (kind, size, stride) in enumerate(wanted):
        part = job.until(1.0 / (len(wanted) - done))
        axes = [("outer", job.world // (size * stride)), ("group", size), ("inner", stride)]
        mesh = AxisMesh(axes, device_type=job.device.type)
        curve: list[LinkRecord] = []
        held: list[tuple[int, float]] = []
        with use_mesh(mesh), torch.no_grad():
            for num_bytes in sorted((*sizes, *HELD_OUT_SIZES)):
                if num_bytes > max_bytes or not part.goes_on():
                    left_out.append(f"{kind} over {size} ranks (stride {stride}) from {num_bytes} bytes up")
                    break
                found = timing(_measure(kind, num_bytes, mesh, job))
                if num_bytes in HELD_OUT_SIZES:
                    held.append((num_bytes, found.median))
                else:
                    curve.append(LinkRecord(kind, size, stride, num_bytes, found))
                job.bar.advance(f"{kind} {num_bytes} bytes")
        records += curve
        if curve:
            line = Profile("curve", "cpu", job.world, 1, links=tuple(curve))
            for num_bytes, seconds in held:
                predicted = line.collective_s(kind, num_bytes, size, stride)
                if predicted is not None:
                    wrong.setdefault(kind, []).append(abs(predicted.mid / seconds - 1))
    for kind, found_errors in wrong.items():
        errors[kind] = ErrorStats.of(found_errors)
    return records, errors, left_out
