"""Of experiments/gpu: what one rank can show of NCCL: a group split off the default one, its memory, an abort."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from autoplan.runtime import functional, private
from autoplan.runtime.failure import is_broken_collective
from autoplan.runtime.mesh import AxisMesh
from experiments.gpu.rows import Run

_WITHIN_S = 20.0  # an abort that takes longer counts as one that hangs


def communicators(run: Run) -> None:
    """Collectives of a split group give what they got; the watch's way to end communicators ends them."""
    device = run.device if run.cuda else None
    dist.init_process_group(
        "nccl" if run.cuda else "gloo", rank=0, world_size=1, store=dist.HashStore(), device_id=device,  # type: ignore[attr-defined]
        timeout=timedelta(seconds=_WITHIN_S),
    )  # fmt: skip
    mesh = AxisMesh([("all", 1)], device_type=run.device_type)
    before = _used_bytes(run)
    group = private.form_groups([[0]], "split")
    assert group is not None
    mesh.connect(run.device)
    x = torch.randn(1 << 10, device=run.device)
    calls: dict[str, Callable[[], torch.Tensor]] = {
        "all-reduce": lambda: functional.raw_all_reduce(x, "sum", group),
        "all-gather": lambda: functional.raw_all_gather(x, group, 1),
        "reduce-scatter": lambda: functional.raw_reduce_scatter(x, group, 1),
        "all-to-all": lambda: functional.raw_all_to_all(x, group),
    }
    for name, call in calls.items():
        with run.case(f"{name} of one rank"):
            right = torch.equal(call(), x)
            run.write(f"{name} of one rank", right, us=1e6 * run.median_s(call), mb=(_used_bytes(run) - before) / 1e6)
    if not run.cuda:
        run.write("abort", not private.nccl_groups(), "there is no NCCL: the watch would abort nothing")
        dist.destroy_process_group()
        return
    with run.case("abort"):
        _abort(run, x, group)


def _used_bytes(run: Run) -> int:
    """Bytes in use on the device, by whatever uses it."""
    if not run.cuda:
        return 0
    free, total = torch.cuda.mem_get_info(run.device)
    return int(total - free)


def _abort(run: Run, x: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Abort from another thread, while the device is busy; the next collective must raise, as of a broken peer."""
    groups = private.nccl_groups()
    busy = torch.randn(4096, 4096, device=run.device)
    for _ in range(50):
        busy = busy @ busy * 1e-3
    dist.all_reduce(x, group=group)
    thread = threading.Thread(target=private.abort_communicators, args=(groups,), daemon=True)
    thread.start()
    thread.join(_WITHIN_S)
    raised: BaseException | None = None
    try:
        dist.all_reduce(x, group=group)
        run.wait()
    except Exception as exc:  # which one it is, is what the row says
        raised = exc
    private.abort_process_groups()
    run.write(
        "abort", not thread.is_alive() and len(groups) == 2 and is_broken_collective(raised),
        f"{type(raised).__name__}: {' '.join(str(raised).split())[:200]}", groups=len(groups),
    )  # fmt: skip
