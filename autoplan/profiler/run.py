"""Measure this machine, in processes of its own or inside a running job, and keep the result.

    profile = measure(processes=2, budget_s=120)       spawns 2 processes on this machine
    profile = measure_in_job(tasks, budget_s=60)       on every rank of a running torch.distributed job, of any nodes

All ranks measure the same thing at the same time, as they would train: processes of one machine share its memory
bandwidth. The time is bounded: times that were not measured are interpolated, and the profile's notes say so.
"""

from __future__ import annotations

import datetime
import os
import platform
import re
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from autoplan import devices
from autoplan.config.parallel import ParallelConfig
from autoplan.config.precision import Precision
from autoplan.cost_models.hardware.parts import ASSUMED
from autoplan.cost_models.kernels.operations import has_near, interpolated_s
from autoplan.cost_models.profile import PHASES, ErrorStats, MeasuredOp, Profile, Timing, user_folder
from autoplan.errors import ProfileError
from autoplan.files import read_cached
from autoplan.ir.graph import ModelGraph
from autoplan.ops.table import op_record
from autoplan.profiler.calm import disturbed_parts, merged_by_load, with_loads, without_parts
from autoplan.profiler.clocks import large_product, measure_clock, time_warnings
from autoplan.profiler.interference import measure_interference
from autoplan.profiler.job import Job
from autoplan.profiler.lattice import every_step_tasks, held_out, lattice, spread
from autoplan.profiler.links import measure_links, measure_sharing
from autoplan.profiler.machine import Machine
from autoplan.profiler.nodes import MeasuredNodes, agree_on_nodes, identity, num_nodes
from autoplan.profiler.ops import Clock, MeasureTask, cache_bytes, measure_op, memory_bytes
from autoplan.profiler.overheads import measure_overheads
from autoplan.profiler.processes import RankError, run_ranks
from autoplan.profiler.system import ThisMachine
from autoplan.profiler.tasks import EXPERTS_PART, model_tasks
from autoplan.profiler.topology import cpu_model
from autoplan.program.facts import Facts, ModelFacts
from autoplan.program.legality import Scope, broken
from autoplan.program.op_costs import OpCosts
from autoplan.program.parallel_dims import parallel_dims
from autoplan.runtime.failure import RankFailure, guard
from autoplan.runtime.mesh import AxisMesh, use_mesh

DEFAULT_BUDGET_S = 120.0
_OF_THE_MODEL = "operations of the model"
_NO_TIME = "no time for "  # the first words of notes on missing measurements
ENVIRONMENT = "AUTOPLAN_PROFILE"
# The largest shapes of the lattice: each of them takes well under a second.
_MAX_FLOPS = {"cpu": 2.5e9, "cuda": 2e12}
_MAX_BYTES = {"cpu": 160e6, "cuda": 4e9}
_MAX_LINK_BYTES = {"cpu": 1 << 26, "cuda": 1 << 28}
PROFILE_GRACE_S = 90.0  # beyond the budget: start of the processes, and the phase that is running at its end


# -- which machine -----------------------------------------------------------------------------------------------------


def hardware(device: torch.device) -> dict[str, Any]:
    """Return the facts that times depend on: device model, cores, memory. No host names."""
    cpu = cpu_model(ThisMachine()) or platform.processor() or platform.machine()
    found: dict[str, Any] = {"cpu": cpu, "cores": os.cpu_count() or 1}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {"gpu": properties.name, "gpu_memory_gib": round(properties.total_memory / 2**30)}
        found["gpus"] = torch.cuda.device_count()
    found["cache_bytes"] = cache_bytes(device)
    return found


def software() -> dict[str, str]:
    """Return the versions that times depend on."""
    return {"torch": torch.__version__.split("+")[0]}


# Version of the set of measurements, by type of device: raised when more is measured, or what is measured runs in
# another way, so that older profiles are not used.
_MEASURES = {"cpu": 5, "cuda": 4}


def machine_key(world_size: int, device_type: str, num_threads: int | None = None) -> str:
    """Return the name under which a profile of this machine is kept.

    It has device model, cores, torch, nodes, world size and threads.
    """
    device = torch.device(device_type)
    facts = hardware(device)
    model = str(facts.get("gpu", facts["cpu"]))
    slug = re.sub(r"[^a-z0-9]+", "-", model.lower()).strip("-")
    threads = num_threads or torch.get_num_threads()
    nodes = num_nodes(world_size)
    world = f"n{nodes}-w{world_size}" if nodes > 1 else f"w{world_size}"
    version = ".".join(software()["torch"].split(".")[:2])
    return f"{device_type}-{slug}-{facts['cores']}core-torch{version}-{world}-t{threads}-m{_MEASURES[device_type]}"


def cached_profile(key: str) -> Profile | None:
    """Return the profile kept under this key, or None. A damaged file is removed, so that it is measured again."""
    path = user_folder() / f"{key}.json"
    text = read_cached(path)
    if text is None:
        return None
    try:
        return Profile.from_json(text, f"profile {path.name}")
    except ProfileError:
        path.unlink(missing_ok=True)
        return None


def store_profile(profile: Profile, key: str) -> Path:
    """Keep a profile for this user, merged into the one that is kept under the key."""
    before = cached_profile(key)
    path = user_folder() / f"{key}.json"
    if before is not None:
        profile = merged_by_load(_measured_before(before), profile)
    profile.save(path)
    return path


def keep_profile(profile: Profile, key: str) -> None:
    """Keep a profile for this user, as `store_profile` does; where it cannot be written, warn and go on."""
    try:
        store_profile(profile, key)
    except OSError as error:
        warnings.warn(f"the measured times cannot be kept, so that the next run measures again: {error}", stacklevel=2)


def _measured_before(profile: Profile) -> Profile:
    """Return the profile without the notes on missing measurements: the next measurement writes its own."""
    return replace(profile, notes=tuple(n for n in profile.notes if not n.startswith(_NO_TIME)))


def resolve() -> Profile | Literal["measure"] | None:
    """Return the choice of `AUTOPLAN_PROFILE`: a profile by path or name, None for `assumed`, "measure" if not set.

    Raises:
        ProfileError: for an unknown name.
    """
    wanted = os.environ.get(ENVIRONMENT, "")
    if not wanted:
        return "measure"
    return None if wanted == ASSUMED else Profile.load(wanted)


# -- progress ----------------------------------------------------------------------------------------------------------


class _Shown:
    """A progress line on a terminal, one message otherwise; nothing unless `visible`."""

    def __init__(self, what: str, budget_s: float, visible: bool) -> None:
        self.begin, self.budget_s, self.progress, self.task = time.monotonic(), budget_s, None, None
        if not visible:
            return
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[now]}"),
            )
            self.progress = Progress(*columns, console=Console(stderr=True), transient=True)
            self.task = self.progress.add_task(what, total=budget_s, now="")
            self.progress.start()
        else:
            print(f"autoplan: {what}, at most {budget_s:.0f} s, once", file=sys.stderr, flush=True)

    def advance(self, what: str) -> None:
        """Show the last measurement."""
        if self.progress is not None and self.task is not None:
            self.progress.update(self.task, completed=min(self.budget_s, time.monotonic() - self.begin), now=what[:50])

    def stop(self) -> None:
        """Leave the terminal as it was."""
        if self.progress is not None:
            self.progress.stop()


# -- measuring on the ranks of a job -----------------------------------------------------------------------------------


def _backend(device: torch.device) -> str:
    """Return the backend of the collectives of this device's tensors."""
    return devices.backends_of(dist.get_backend_config())[device.type]


def _merge_ranks(parts: Sequence[list[MeasuredOp]]) -> list[MeasuredOp]:
    """Return one record per operation: the mean of the ranks' medians, the widest spread."""

    def together(given: Iterable[Timing | None]) -> Timing | None:
        times = [t for t in given if t is not None]
        if not times:
            return None
        median = sum(t.median for t in times) / len(times)
        return Timing(median, min(t.low for t in times), max(t.high for t in times), sum(t.repeats for t in times))

    return [
        MeasuredOp(
            records[0].work,
            together(r.forward_s for r in records) or records[0].forward_s,
            together(r.backward_s for r in records),
            *(together(r.host_s(phase) for r in records) for phase in PHASES),
        )
        for records in zip(*parts, strict=True)
    ]


@dataclass
class _Notes:
    """Notes of a measurement beside its times."""

    lines: list[str] = field(default_factory=list)
    no_time: dict[str, str] = field(default_factory=dict)  # what there was no time for -> how much of it
    failed: dict[str, str] = field(default_factory=dict)  # OpWork.key -> problem


def _measure_tasks(job: Job, clock: Clock, tasks: Sequence[MeasureTask], notes: _Notes, what: str) -> list[MeasuredOp]:
    """Measure the tasks that there is time for, on all ranks at once. A task that fails on one rank is skipped."""
    cache = cache_bytes(job.device)
    # the least memory that any rank may use, so that all ranks skip the same tasks
    limit = -job.slowest([-memory_bytes(job.device) / (4 * job.sharing)])[0]
    found: list[MeasuredOp] = []
    with use_mesh(AxisMesh([("all", job.world), (EXPERTS_PART, 1)], device_type=job.device.type)):
        for done, task in enumerate(tasks):
            if not job.goes_on():
                notes.no_time[what] = f"{len(tasks) - done} of {len(tasks)} {what}"
                break
            if 8 * task.num_bytes > limit:
                notes.failed[task.work.key] = "too large for this machine's memory"
                continue
            record, problem = None, ""
            try:
                record = measure_op(task, clock, cache)
            except (RuntimeError, ValueError, TypeError) as exc:
                # operations that cannot run by themselves are interpolated
                problem = f"{type(exc).__name__}: {str(exc)[:120]}"
            if job.anywhere(record is None):
                notes.failed[task.work.key] = next(filter(None, job.gather(problem)))
            elif record is not None:
                found.append(record)
            job.advance(task.work.key)
    return _merge_ranks(job.gather(found))


def _check(profile: Profile, checks: Sequence[MeasuredOp]) -> dict[str, ErrorStats]:
    """Return the error of the interpolation on held-out shapes with measured ones near them, by class and phase."""
    errors: dict[str, list[float]] = {}
    for record in checks:
        for phase in PHASES:
            timing = record.forward_s if phase == "forward" else record.backward_s
            predicted = interpolated_s(record.work, phase, profile)
            if timing is not None and predicted is not None and has_near(record.work, phase, profile):
                name = f"{op_record(record.work.op).measured_as} {phase}"
                errors.setdefault(name, []).append(abs(predicted.mid / timing.median - 1))
    return {name: ErrorStats.of(found) for name, found in errors.items()}


def measure_in_job(
    tasks: Sequence[MeasureTask] = (),
    budget_s: float = DEFAULT_BUDGET_S,
    *,
    name: str | None = None,
    known: Profile | None = None,
    dtypes: Sequence[str] = ("float32",),
    progress: bool = True,
    general: bool = True,
    device: torch.device | str | None = None,
) -> Profile:
    """Measure inside a running torch.distributed job; call it on every rank with the same arguments.

    Args:
        tasks: operations of a model (`autoplan.profiler.tasks`), measured first.
        budget_s: bound of the time; the measurement that is running at its end takes a few seconds more.
        known: an earlier profile: its times are not measured again, and are merged into the result.
        dtypes: of the general shapes: the dtype that the model computes in, then the parameters' if they have another.
        general: also measure collectives, fixed costs and shapes not tied to the model, unless `known` has them.
        device: this rank's device to measure; None: as `autoplan.parallelize` picks it.

    Returns:
        The profile, the same on every rank.

    Raises:
        DeviceError: the same on every rank, as in `autoplan.parallelize`.
        RankFailure: if a rank failed; names its node.
        ProfileError: if the nodes have different numbers of ranks.
    """
    requested = devices.read(device)
    placement = devices.device_place(requested, devices.device_kind(requested, devices.sight()))
    tasks = [t for t in tasks if known is None or t.work.key not in known.settled]
    shown = _Shown(
        f"measuring this machine ({len(tasks)} operations of the model)", budget_s, progress and dist.get_rank() == 0
    )
    try:
        job = Job(placement.device, time.monotonic() + budget_s, shown.advance, sharing=placement.on_device)
        with guard():
            identities = job.gather(identity())
        nodes = agree_on_nodes(identities)
        try:
            with guard(), _default_dtype(torch.float32):  # that of the stages that are timed, whatever a script set
                profile = _measure(job, nodes, tasks, name, known, dtypes, general)
                box = [profile.to_json()]  # the times are the same on every rank, the machines may not be
                dist.broadcast_object_list(box, 0)
                return Profile.from_json(box[0])
        except RankFailure as failure:
            raise nodes.explain(failure) from failure
    finally:
        shown.stop()


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _measure(
    job: Job,
    nodes: MeasuredNodes,
    tasks: Sequence[MeasureTask],
    name: str | None,
    known: Profile | None,
    dtypes: Sequence[str],
    general: bool,
) -> Profile:
    notes, machine = _Notes([]), Machine(job, nodes)
    clock = Clock(job.device, job.timer)
    notes.lines += [f"operations: {clock.name}", *machine.begin(hardware(job.device))]
    profile = Profile(
        name or machine_key(job.world, job.device.type),
        job.device.type,
        job.world,
        torch.get_num_threads(),
        {**hardware(job.device), "backend": _backend(job.device), **machine.shape()},
        software(),
        datetime.date.today().isoformat(),
    )
    if known is not None:
        known = without_parts(known, disturbed_parts(known, machine.load, int(hardware(job.device)["cores"])))
        profile = _measured_before(known).merged(profile)
    # The speed of a shared machine changes by half within minutes: if operations of one size were measured one after
    # another, they would differ from those of another size by that.
    run = _Run(job, clock, spread(tasks), notes, profile)
    if general:
        run.everything(known, dtypes)
    elif tasks:
        run.measure(job.until(1.0), run.tasks, _OF_THE_MODEL)
    notes.lines += [*machine.end(), *time_warnings(run.ops, run.profile.clock)]
    missing = [f"{_NO_TIME}{text}" for text in notes.no_time.values()]
    return replace(
        run.profile,
        machine={**run.profile.machine, **machine.data(), **with_loads(profile, run.profile, machine.load)},
        ops=(*run.profile.ops, *_only(run.ops)),
        failed={**run.profile.failed, **notes.failed},
        notes=tuple(dict.fromkeys((*run.profile.notes, *notes.lines, *missing))),
    )


@dataclass
class _Run:
    """The stages of a measurement, the most needed first: a short budget still has the whole range of every collective.

    Attributes:
        tasks: operations of a model.
        profile: the figures known so far, without `ops`.
        ops: the operations that were measured in this run.
    """

    job: Job
    clock: Clock
    tasks: Sequence[MeasureTask]
    notes: _Notes
    profile: Profile
    ops: list[MeasuredOp] = field(default_factory=list)

    def measure(self, part: Job, tasks: Sequence[MeasureTask], what: str) -> list[MeasuredOp]:
        """Measure operations, as far as there is time in this part."""
        found = _measure_tasks(part, self.clock, tasks, self.notes, what)
        self.ops += found
        return found

    def everything(self, known: Profile | None, dtypes: Sequence[str]) -> None:
        """Measure what any model needs, and the operations of this one."""
        if self.job.world > 1:
            self._links(known)
        if self.tasks:
            self.measure(self.job.until(0.6), self.tasks, _OF_THE_MODEL)
        others = [t for d in dtypes for t in every_step_tasks(d) if t.work.key not in self.profile.by_key]
        self.measure(self.job.until(0.4), others, "operations of every step")
        self._overheads()
        self._left_of_the_model()
        self._sustained_clock()
        if known is None or not known.held_out or self.job.queued:
            self._general_shapes(dtypes)

    def _links(self, known: Profile | None) -> None:
        job, profile = self.job, self.profile
        found = measure_links(job.until(0.25), _MAX_LINK_BYTES[job.device.type], known=known)
        shared = measure_sharing(job.until(0.1), [*profile.links, *found.links])
        self.profile = replace(profile, links=tuple(shared.links), held_out={**profile.held_out, **found.errors})
        self.notes.no_time |= {what: what for what in (*found.left_out, *shared.left_out)}

    def _overheads(self) -> None:
        job = self.job
        if not self.profile.overheads:
            self.profile = replace(self.profile, overheads=measure_overheads(job.until(0.6), self.profile))
        if job.queued and not self.profile.host_overheads:
            of_host = measure_overheads(job.until(0.5), self.profile, host=True)
            self.profile = replace(self.profile, host_overheads=of_host)
        if "overlap_fraction" not in self.profile.overheads and job.goes_on():
            found = {**self.profile.overheads, **measure_interference(job)}
            self.profile = replace(self.profile, overheads=found)

    def _left_of_the_model(self) -> None:
        """Measure the rest of the model's operations, before general shapes."""
        measured = {r.work.key for r in self.ops} | set(self.notes.failed)
        left = [t for t in self.tasks if t.work.key not in measured]
        if left:
            self.notes.no_time.pop(_OF_THE_MODEL, None)
            self.measure(self.job.until(0.9), left, _OF_THE_MODEL)

    def _sustained_clock(self) -> None:
        job = self.job
        if job.queued and not self.profile.clock and job.goes_on():
            self.profile = replace(self.profile, clock=measure_clock(job.until(0.7), large_product(job.device)))
            if not self.profile.clock:
                self.notes.no_time["clock"] = "the clock of sustained load"

    def _general_shapes(self, dtypes: Sequence[str]) -> None:
        """Measure a lattice of shapes, and shapes beside it that show how well it interpolates."""
        job, size = self.job, (_MAX_FLOPS[self.job.device.type], _MAX_BYTES[self.job.device.type])
        missing = [d for d in dtypes if not (job.queued and _has_general(self.profile, held_out(d, *size)))]
        for i, dtype in enumerate(missing):
            part = job.until(1.0 / (len(missing) - i))
            # a quarter of the time that is left for general shapes checks them
            grid = [t for t in lattice(dtype, *size) if t.work.key not in self.profile.by_key]
            self.measure(part.until(0.75), grid, f"general shapes in {dtype}")
            so_far = replace(self.profile, ops=(*self.profile.ops, *_only(self.ops)))
            checks = self.measure(part, held_out(dtype, *size), f"held-out shapes in {dtype}")
            if dtype == dtypes[0]:
                errors = {**self.profile.held_out, **_check(so_far, checks)}
                self.profile = replace(self.profile, held_out=errors)


def _has_general(profile: Profile, checks: Sequence[MeasureTask]) -> bool:
    """Return True if general shapes were measured in the dtype of `checks`; a model may have a few of them itself."""
    return 2 * sum(t.work.key in profile.by_key for t in checks) > len(checks)


def _only(ops: Sequence[MeasuredOp]) -> list[MeasuredOp]:
    """Return the last record of each operation."""
    return list({r.work.key: r for r in ops}.values())


# -- in processes of its own -------------------------------------------------------------------------------------------


def _measured(rank: int, world: int, arguments: Mapping[str, Any]) -> str:
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    return measure_in_job(**arguments, device=device).to_json()


def measure(
    name: str | None = None,
    *,
    processes: int = 1,
    budget_s: float = DEFAULT_BUDGET_S,
    tasks: Sequence[MeasureTask] = (),
    num_threads: int = 1,
    dtypes: Sequence[str] = ("float32",),
    progress: bool = True,
) -> Profile:
    """Measure this machine with `processes` local processes that run concurrently (gloo, or NCCL with a GPU each).

    Args:
        name: of the profile; default: `machine_key`.
        budget_s, tasks, dtypes, progress: as in `measure_in_job`.
        num_threads: of each process, as it will train (torchrun sets 1).

    Raises:
        ProfileError: if a process failed (with its traceback), died or did not end in time, or if `processes` is below
            1 or above the number of GPUs of this machine. No process is left running.
    """
    if processes < 1:
        raise ProfileError(f"measuring needs at least 1 process, got {processes}")
    if torch.cuda.is_available() and processes > torch.cuda.device_count():
        raise ProfileError(
            f"this machine has {torch.cuda.device_count()} GPUs, fewer than the {processes} processes asked for"
        )
    arguments = dict(tasks=list(tasks), budget_s=budget_s, name=name, dtypes=tuple(dtypes), progress=progress)
    timeout_s, gpus = budget_s + PROFILE_GRACE_S, torch.cuda.is_available()
    try:
        texts = run_ranks(_measured, processes, arguments, timeout_s=timeout_s, num_threads=num_threads, gpus=gpus)
    except RankError as exc:
        raise ProfileError(f"measuring failed: {exc}") from exc
    return Profile.from_json(texts[0])


# -- what a model needs ------------------------------------------------------------------------------------------------


def main_dtypes(graph: ModelGraph, precision: Precision) -> tuple[str, ...]:
    """Return the dtypes to measure: what a model computes in, then its parameters' if the optimizer has others."""
    used = [p.dtype for p in graph.params.values()]
    computed = precision.captured or (max(sorted(set(used)), key=used.count) if used else "float32")
    wide = precision.has_masters or precision.autocast is not None
    return tuple(dict.fromkeys((computed, "float32") if wide else (computed,)))


def graph_tasks(graph: ModelGraph, degrees: Sequence[int], env: Mapping[str, int]) -> list[MeasureTask]:
    """Return the operations of a model at several tensor-parallel degrees; degrees that it cannot take are skipped."""
    found: dict[str, MeasureTask] = {}
    for tp in degrees:
        config = ParallelConfig(tp=tp)
        if broken(config, Facts(tp, ModelFacts(graph)), Scope.PRICED) is not None:
            continue
        axes = parallel_dims(graph, config).layout_axes
        for task in model_tasks(OpCosts(graph, axes, env)):
            found.setdefault(task.work.key, task)
    return list(found.values())
