"""`autoplan profile`: measure this machine, or the nodes of a torchrun job, write the profile, print its contents.

    autoplan profile --processes 8 --model llama-3.1-8b --write-cluster cluster.yaml
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:PORT -m autoplan profile mine

Under torchrun every rank measures; rank 0 writes and prints. All ranks name a node that fails. A node that hangs is
named after the budget and a grace period, or after `AUTOPLAN_TIMEOUT_S`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from autoplan import devices
from autoplan.config.precision import precision_of
from autoplan.cost_models.profile import Profile
from autoplan.errors import AutoplanError, ProfileError
from autoplan.profiler.nodes import under_torchrun
from autoplan.profiler.ops import MeasureTask
from autoplan.profiler.run import (
    DEFAULT_BUDGET_S,
    PROFILE_GRACE_S,
    graph_tasks,
    main_dtypes,
    measure,
    measure_in_job,
    store_profile,
)
from autoplan.report.files import check_writable
from autoplan.report.output import say_note
from autoplan.runtime.failure import RankFailure, guard
from autoplan.runtime.timeouts import TIMEOUT_VARIABLE

_COMMAND_DEGREES = (1, 2, 4, 8)
_COMMAND_SEQUENCE = 1024
_FILE_WIDTH = 140  # of tables if the output is not a terminal


def profile_command(
    name: str | None = None,
    processes: int = 1,
    budget_s: float = DEFAULT_BUDGET_S,
    model: str | None = None,
    out: Path | str | None = None,
    cluster_out: Path | str | None = None,
) -> Profile:
    """Measure, write, print.

    Args:
        processes: number of processes on this machine; must be 1 under torchrun, whose ranks measure.
        model: a model of the catalog, a `config.json` or `package.module:factory`. Its operations at tensor-parallel
            degrees 1 to 8, one sequence of 1024 tokens, are measured first.
        out: a `.json` file; default: the user's cache, where `parallelize` finds it.
        cluster_out: file for a proposed cluster file of these nodes.

    Raises:
        AutoplanError: for an unknown model, more processes than this machine can run, a cluster file that cannot be
            written (before anything is measured), or a failure while measuring.
    """
    alone = not under_torchrun()
    if alone and cluster_out is not None:
        check_writable(cluster_out)
    tasks: list[MeasureTask] = []
    dtypes: tuple[str, ...] = ("float32",)
    if model is not None:
        from autoplan.catalog import load_model

        graph = load_model(model)
        tasks = graph_tasks(graph, _COMMAND_DEGREES, {"b": 1, "s": _COMMAND_SEQUENCE, "t": _COMMAND_SEQUENCE})
        dtypes = main_dtypes(graph, precision_of("native"))
    if alone:
        if sys.stderr.isatty():
            say_note(f"measuring for at most {budget_s:.0f} s")
        profile = measure(name, processes=processes, budget_s=budget_s, tasks=tasks, dtypes=dtypes)
        _hand_out(profile, out, cluster_out)
        return profile
    if processes != 1:
        raise ProfileError(f"--processes {processes} under torchrun: leave it out, --nproc-per-node is the number")
    device = _join(budget_s)
    try:
        if cluster_out is not None:
            _on_first(lambda: check_writable(cluster_out))
        profile = measure_in_job(tasks, budget_s, name=name, dtypes=dtypes, device=device)
        _on_first(lambda: _hand_out(profile, out, cluster_out))
    except RankFailure as failure:
        raise ProfileError(f"measuring failed: {failure}") from failure
    dist.destroy_process_group()
    return profile


def _on_first(work: Callable[[], None]) -> None:
    """Run `work` on rank 0 while the others wait. Its AutoplanError is raised on every rank."""
    box: list[AutoplanError | None] = [None]
    with guard():
        if dist.get_rank() == 0:
            try:
                work()
            except AutoplanError as error:
                box[0] = error
        dist.broadcast_object_list(box, 0)
    if box[0] is not None:
        dist.destroy_process_group()
        raise box[0]


def _join(budget_s: float) -> torch.device:
    """Join the process group of torchrun's ranks, and return this rank's device.

    Raises:
        ProfileError: if some ranks do not come.
        DeviceError: if a rank has no device.
    """
    timeout_s = None if os.environ.get(TIMEOUT_VARIABLE) else budget_s + PROFILE_GRACE_S
    try:
        return devices.start(None, devices.device_kind(None, devices.sight()), timeout_s).device
    except (dist.DistError, RuntimeError) as exc:
        raise ProfileError(
            f"rank {os.environ['RANK']} did not meet the {os.environ['WORLD_SIZE']} ranks of the job: "
            f"{' '.join(str(exc).split())}"
        ) from exc


def _hand_out(profile: Profile, out: Path | str | None, cluster_out: Path | str | None) -> None:
    """Print and write the profile; once per job."""
    from rich.console import Console

    from autoplan.profiler.show import summary

    console = Console()
    if not console.is_terminal:
        console = Console(width=_FILE_WIDTH)
    console.print(summary(profile))
    try:
        if out is not None:
            profile.save(out)
            path = Path(out)
        else:
            path = store_profile(profile, profile.name)
    except OSError as error:
        raise ProfileError(f"cannot write profile {out or profile.name}: {error}") from error
    console.print(f"written to {path}")
    if cluster_out is not None:
        from autoplan.profiler.proposal import write_cluster
        from autoplan.profiler.topology import Topology

        topology = Topology.of(profile.machine["topology"])
        per_node = profile.machine["ranks_per_node"]
        write_cluster(cluster_out, topology, profile.machine["nodes"], profile, per_node)
        console.print(f"cluster written to {cluster_out}")
