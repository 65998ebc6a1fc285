"""The door: `autoplan.parallelize(model, cluster, ...)` turns a module into this rank's part of a parallel program."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from autoplan import devices
from autoplan.capture.frontend.buffers import all_buffers
from autoplan.capture.frontend.huggingface import is_hf_model
from autoplan.capture.frontend.inputs import LossFn, check_arguments
from autoplan.capture.frontend.lengths import example_lengths, lengths_of
from autoplan.captured import capture_verified, examples, outline_of
from autoplan.codegen.program import Program, compile_program
from autoplan.config.kernels import ASYNC_TP, AUTO, COMPILE
from autoplan.config.pins import Pins
from autoplan.config.precision import executed_precision, precision_of
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.cost_models.profile import Profile
from autoplan.errors import AutoplanError, CaptureError, LayoutError, PinError
from autoplan.ir.graph import ModelGraph
from autoplan.planning import (
    SoFar,
    cheapest_program,
    check_as_planned,
    check_kinds,
    check_world,
    global_batch,
    graph_for_plan,
    plan_program,
    ready_plan,
    ways_to_run,
)
from autoplan.plans.differences import warn_of_changes
from autoplan.plans.folder import check_model, read_program, write_program
from autoplan.plans.record import Plan
from autoplan.pretrained.export import Exporter
from autoplan.pretrained.weights import Init, check_init, is_empty, values_of
from autoplan.program.autocast import of_precision
from autoplan.program.facts import Facts
from autoplan.program.legality import check_pins
from autoplan.runtime.agree import AgreedValueError, agree, agreed, different, fingerprint, first_difference
from autoplan.runtime.compiled import compiles_by_itself
from autoplan.runtime.compression import Compression, PowerSGD, check_compression
from autoplan.runtime.failure import guarded, work_of_first
from autoplan.runtime.given_module import GivenModule, forget_stale_warning, warn_when_stale
from autoplan.runtime.model import OptimizerFactory, ParallelModel
from autoplan.runtime.param_groups import ParamGroups
from autoplan.runtime.spec import ProgramSpec
from autoplan.runtime.values import joined
from autoplan.runtime.whole import broadcast_whole
from autoplan.search.space import space
from autoplan.verify.door import check_verify

if TYPE_CHECKING:
    from autoplan.profiler.ops import MeasureTask as ProfilerTask

_T = TypeVar("_T")
_BACKEND = "inductor"


@guarded("parallelize", passing=(AutoplanError,))
def parallelize(
    model: nn.Module,
    cluster: Cluster | Path | str = "local",
    *,
    optimizer: OptimizerFactory | None = None,
    param_groups: ParamGroups | None = None,
    example_inputs: Mapping[str, torch.Tensor] | None = None,
    loss_fn: LossFn | None = None,
    global_batch_size: int | None = None,
    pins: Mapping[str, Any] | None = None,
    profile: Profile | Path | str | None = None,
    folder: str | Path | None = None,
    seed: int = 0,
    timeout_s: float | None = None,
    check: bool = False,
    compile: bool | str = COMPILE,
    async_tp: bool | str = ASYNC_TP,
    precision: str = "native",
    gradient_compression: Compression | None = None,
    verify: bool | str = True,
    device: torch.device | str | None = None,
    plan: Plan | Path | str | None = None,
    program: Path | str | None = None,
    weights: str | Path | None = None,
    init: Init | None = None,
) -> ParallelModel:
    """Plan for `cluster` and parallelise `model`. Call it on every rank (under torchrun), with the same model on each.

    With `plan` or `program` nothing is searched or measured; `cluster` then only says on which kind of device to run.

    Args:
        model: an ordinary module on the CPU or on this rank's device. All ranks use rank 0's values. On the meta
            device (built under `torch.device("meta")`) it has none: they come from `weights`, or from the model's own
            initialisation, and a rank never has more of the model than its part and one block.
        cluster: 'local' for all processes of this job, priced by measurements on them; or a Cluster, priced by its
            figures (and by `profile`).
        optimizer: `parameters -> Optimizer`, e.g. `functools.partial(torch.optim.AdamW, lr=3e-4)`. None: memory is
            planned for AdamW, and you make your own from `pm.parameters()`.
        param_groups: settings of groups of parameters, by patterns of their names (`{"*.bias": {"weight_decay": 0.0}}`,
            the first that fits counts) or by a function of name and full shape. The optimizer then gets these groups,
            the same on every rank, in the order of the model's parameters.
        example_inputs: name -> tensor [batch, sequence, ...], one data-parallel rank's part of a batch. If source and
            target of an encoder-decoder may differ in length, give them different lengths here. Not needed for a
            Hugging Face language model.
        loss_fn: `(model output, batch) -> scalar loss`; not needed if the model returns its loss.
        global_batch_size: samples per step over all data-parallel ranks. None: the number of examples times the number
            of devices that may be data-parallel ranks. A rank's part is `global_batch_size / pm.data_world`.
        pins: fixed choices: tp, pp, dp, ep, cp, zero_stage (0-3), micro_batch_size, num_micro_batches, schedule, stages
            (layers per pipeline stage), recompute ('none', 'full', 'selective', regions as in 'attention+mlp+norms',
            'offload', or a mapping from block to one of these), offload ('none', or the tensors to keep on the host:
            'activations', 'optimizer', 'parameters', joined by '+'; the training loop stays the same). The rest is
            searched.
        profile: measured times: a Profile, or the name or path of one. None with 'local': the profile of this machine,
            which is measured first (bounded, once) if there is none; AUTOPLAN_PROFILE names another or says 'assumed'.
        folder: where to write the emitted program (`stageN.py`, `program.json`) and `plan.json`; by default they are
            not written, and tracebacks, debuggers and `pm.source` have the text.
        seed: seed of dropout and all other random numbers of a forward.
        timeout_s: seconds that a collective may wait before the job fails; None: AUTOPLAN_TIMEOUT_S, or 10 minutes.
        check: True: type-check the emitted program with spmd_types in another process before it runs (some seconds).
        compile: whether every block runs through torch.compile. True: by its default backend (inductor, which needs a
            C++ compiler on the CPU); a name: by that backend. False: no. 'auto': on CUDA if a plan with compiled blocks
            has the lower price (`pm.plan.compiled` says so), not on the CPU. A compiled block itself decides which
            activations it keeps: its recompute is none, full or offload, and it is priced with fused kernels.
        async_tp: True: hide the gathers and reduce-scatters of tensor parallelism behind pieces of the adjacent
            products (torch's async TP, an experiment of inductor). Needs compiled blocks on CUDA and tp ranks joined by
            NVLink. False: no. 'auto': where a plan with it has the lower price (`pm.plan.async_tp`); never on the CPU.
            It has not been run on GPUs. Its operators are first tried at the size of the largest product. Where any
            rank gets other values, or they are not faster, a warning says so and collectives are sent one by one.
        precision: 'native' computes in the dtypes of the model. 'bf16' and 'fp16' keep parameters, gradients and the
            optimizer in float32 and compute in 16 bits; fp16 has a dynamic loss scale (`pm.loss_scaler`). 'bf16-grad16'
            also sums gradients in 16 bits. 'fp32' keeps and computes everything in float32.
        gradient_compression: compression of the all-reduce of ZeRO 0 (which it pins): 'bf16', 'fp16', or
            `autoplan.PowerSGD(rank=4)`. Not priced: the plan counts uncompressed gradients.
        verify: whether rank 0 runs the captured graph and compares its loss and gradients with the module's. True: if
            that takes some seconds at most (a large Hugging Face model with fewer layers of its config);
            `pm.plan.capture` says what was compared. 'required': at any cost, and an error if it cannot be done. False:
            never.
        device: 'cpu', 'cuda', 'cuda:1' or a torch.device. None: the first of these that exists: the GPU that the
            process group is bound to, the model's GPU, the choice of `torch.cuda.set_device`, the only visible GPU, the
            GPU with this rank's number on its host (LOCAL_RANK, SLURM_LOCALID, OMPI_COMM_WORLD_LOCAL_RANK). It is the
            CPU if no GPU is visible, or if the process group has gloo alone. NCCL takes one rank per GPU; several ranks
            can share one in a group of gloo that you make, with device='cuda'.
        plan: a plan for as many processes as this job has: a Plan (`autoplan.plan`), or the file of one, which rank 0
            reads (of `Plan.to_json` or `autoplan plan --json`). The captured graph is compared with its own; degrees,
            layouts and precision are the plan's. Another version or cluster than it was made for is a warning.
        program: the folder of a program for as many processes, which rank 0 reads (of `autoplan.compile`, or an earlier
            `folder`). The model is not captured, but compared by its parameters, buffers and config
            (autoplan.plans.folder); verify='required' captures it and compares the graph too.
        weights: a folder of safetensors files, as `save_pretrained` writes it, whose values replace the model's. Each
            rank reads what it holds.
        init: `model -> None`: gives all parameters and buffers of a model on the meta device their values, in place.
            None: `initialize_weights` of Hugging Face models, `reset_parameters` of all modules of others. `seed` is
            the seed; the values do not depend on the plan or the number of ranks.

    Returns:
        A ParallelModel: `loss = pm.step(batch)`, `pm.optimizer`, `pm.clip_grad_norm_`, `pm.eval_step`,
        `pm.state_dict()`, `pm.to_module()`, `pm.plan`, `pm.source`.

    Raises:
        AutoplanError: DeviceError, PinError, CaptureError, NothingFits and others, the same on every rank.

    Example (on one device; under torchrun the same on all of them):
        >>> import torch, autoplan
        >>> batch, loss_fn = {"input": torch.ones(4, 8)}, lambda output, batch: output.square().mean()
        >>> pm = autoplan.parallelize(torch.nn.Linear(8, 8), example_inputs=batch, loss_fn=loss_fn)
        >>> loss = pm.step(batch)
    """
    measured, given = not isinstance(cluster, Cluster), plan if plan is not None else program
    _check_given(plan, program, pins, profile)
    check_kinds(plan, {"folder": folder, "program": program, "weights": weights}, param_groups, check, timeout_s)
    cluster = _cluster_of_job(cluster, model, device)
    verify = check_verify(verify)
    pins = {**({} if gradient_compression is None else {"zero_stage": 0}), **Pins(pins)}
    _check_run(cluster, pins, precision, gradient_compression, async_tp, compile)
    if program is None or verify == "required":
        example_inputs = examples(model, example_inputs)
        check_arguments(model, example_inputs, loss_fn)
    _check_optimizer(optimizer)
    check_init(model, weights, init, seed)
    if param_groups is not None and optimizer is None:
        raise PinError("param_groups needs optimizer=, a function from parameter groups to an optimizer")
    forget_stale_warning(model)
    compile = True if async_tp is True else compile
    known = Profile.of(profile)
    placement = devices.start(device, cluster.device_type, timeout_s, model)
    device = placement.device
    if measured:
        cluster = _with_memory(cluster, placement)
    _check_same_model(model, device)
    task = _Task(
        model, cluster, example_inputs or {}, loss_fn, global_batch_size, pins, precision, verify, compile, async_tp
    )
    if given is None:
        made, ready = _searched(task, known, measured, device, check)
    else:
        how = None if measured else cluster, gradient_compression, async_tp, check
        made, ready = _agree(lambda: _given_program(task, plan, program, *how), "the plan")
    parameters, buffers = _values(model, weights, init, seed, device)
    path = None if folder is None else _written(Path(folder), made, ready, task)
    pm = ParallelModel(
        ready.spec,
        ready.sources,
        parameters,
        buffers,
        num_micro_batches=made.config.num_micro_batches,
        optimizer=optimizer,
        param_groups=param_groups,
        device=device,
        folder=path,
        seed=seed,
        aliases=_aliases(model),
        extra_state=_not_in(ready.spec, model, joined(parameters, buffers)),
        async_tp=_rows_in_pieces(made, given is not None, async_tp),
        compile=None if not made.compiled else _BACKEND if compile in (True, AUTO) else str(compile),
        gradient_compression=gradient_compression,
    )
    pm.plan, pm.given = made, GivenModule(model, buffers, loss_fn)
    pm.exporter = Exporter(model) if is_hf_model(model) else None
    warn_when_stale(model, pm)
    return pm


@dataclass(frozen=True)
class _Task:
    """The arguments of `parallelize` that planning reads, checked."""

    model: nn.Module
    cluster: Cluster
    example_inputs: Mapping[str, torch.Tensor]
    loss_fn: LossFn | None
    global_batch_size: int | None
    pins: Mapping[str, Any]
    precision: str
    verify: bool | str
    compile: bool | str
    async_tp: bool | str

    def captured(self, precision: str) -> tuple[ModelGraph, str]:
        """Return the graph of the model as it computes in a precision, and the line on its verification."""
        dtype = executed_precision(precision).captured
        computed = None if dtype is None else getattr(torch, dtype)
        graph, verified = capture_verified(self.model, self.example_inputs, self.loss_fn, computed, self.verify)
        return of_precision(graph, precision_of(precision), self.cluster.device_type), verified


def _searched(
    task: _Task, known: Profile | None, measured: bool, device: torch.device, check: bool
) -> tuple[Plan, Program]:
    """Capture, measure what the profile lacks, search and compile, on rank 0; every rank gets the result."""
    graph, verified = _on_first(lambda: task.captured(task.precision), "capture") or (None, "")
    cluster, pins, precision = task.cluster, task.pins, task.precision
    given = task.model, task.example_inputs
    seq_len, target_len = example_lengths(*given) if graph is None else lengths_of(graph, *given)  # rank 0 plans
    first = next(iter(task.example_inputs.values()))
    batch = global_batch(task.global_batch_size, pins, cluster.num_devices, first.shape[0])
    if known is None and measured:
        known = _machine_profile(graph, cluster, batch, seq_len, pins, target_len, device, precision)

    def planned(compiled: bool, pieces: bool, best: SoFar) -> tuple[Plan, Program]:
        if graph is None:
            raise AutoplanError("only rank 0 plans")
        return plan_program(graph, cluster, pins, batch, seq_len, known, compiled, target_len, precision, pieces, best)

    def chain() -> tuple[Plan, Program]:
        ways = ways_to_run(task.compile, task.async_tp, device.type, compiles_by_itself(device), cluster.peers)
        plan, program = cheapest_program(planned, ways)
        if check:
            _type_check(program)
        return replace(plan, capture=verified), program

    return _agree(chain, "planning")


def _check_given(plan: object, program: object, pins: Mapping[str, Any] | None, profile: object) -> None:
    """Raise PinError for a plan or program together with arguments that a search alone takes."""
    if plan is None and program is None:
        return
    if plan is not None and program is not None:
        raise PinError("plan= and program= were both given; a program brings its plan, so leave out plan=")
    what = "plan" if plan is not None else "program"
    for name, value in (("pins", pins), ("profile", profile)):
        if value is not None:
            raise PinError(f"{name}= is for a search, and {what}= leaves nothing to search; leave one of them out")


def _given_program(
    task: _Task,
    plan: Plan | Path | str | None,
    program: Path | str | None,
    cluster: Cluster | None,
    compression: Compression | None,
    async_tp: bool | str,
    check: bool,
) -> tuple[Plan, Program]:
    """Return a plan that was given, or the plan of a program that was, with the program, checked against the model.

    `cluster`: that of this job, if it has the figures of a text; None: the plan's is compared with its own.
    """
    folder = None if program is None else read_program(Path(program))
    made = folder.plan if folder is not None else plan if isinstance(plan, Plan) else Plan.read(plan or "")
    check_world(made, task.cluster.num_devices)
    check_as_planned(made, task.global_batch_size, task.precision, task.compile)
    _check_run(task.cluster, made.pins, made.precision, compression, async_tp, made.compiled)
    ready = None
    if folder is not None:
        check_model(folder, outline_of(task.model, task.loss_fn))
        ready = folder.program
    if ready is None or task.verify == "required":
        graph, verified = task.captured(made.precision)
        graph = graph_for_plan(made, graph)
        made, layouts = ready_plan(made, graph)
        made = replace(made, capture=verified)
        ready = ready or compile_program(graph, layouts)
    if check:
        _type_check(ready)
    warn_of_changes(made, cluster)
    return made, ready


def _cluster_of_job(cluster: Cluster | Path | str, model: nn.Module, device: torch.device | str | None) -> Cluster:
    """Return the cluster to plan for. Raises PinError unless it has one device for each process of this job."""
    world = dist.get_world_size() if dist.is_initialized() else devices.size_of_job(os.environ)
    if not isinstance(cluster, Cluster):
        own = model if isinstance(model, nn.Module) else None
        cluster = Cluster.of(cluster, world, devices.device_kind(devices.read(device), devices.sight(own)))
    if cluster.num_devices != world:
        raise PinError(
            f"the cluster has {cluster.num_devices} devices but this job has {world} process{'es' * (world != 1)}; "
            f"start it with torchrun --nproc-per-node {cluster.num_devices}, or pass cluster='local'. Without that "
            "cluster autoplan.plan(model, cluster) plans, and autoplan.compile(model, plan, folder) writes the program;"
            " on the command line `autoplan plan` and `autoplan compile` do"
        )
    return cluster


def _rows_in_pieces(plan: Plan, given: bool, async_tp: bool | str) -> int | None:
    """Return the rows of products that hide collectives behind pieces; None: send them one by one."""
    return plan.rows if async_tp is not False and (plan.async_tp or (given and async_tp is True)) else None


def _values(
    model: nn.Module, weights: str | Path | None, init: Init | None, seed: int, device: torch.device
) -> tuple[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]]:
    """Return parameters and buffers by name. Raises CaptureError, on all ranks, if one of them has no values."""
    if weights is None and not is_empty(model):
        parameters, buffers = _tensors(model)
        _same_values(parameters, buffers, device)
        return parameters, buffers
    found: tuple[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]] | None = None
    problem = None
    try:
        found = values_of(model, None if weights is None else Path(weights), init, seed)
    except CaptureError as exc:
        problem = str(exc)
    try:
        agree(problem, device)
    except AgreedValueError as exc:
        raise CaptureError(str(exc)) from None
    assert found is not None
    return found


def _written(folder: Path, plan: Plan, program: Program, task: _Task) -> Path:
    """Write plan and program on rank 0; return the folder on every rank once they are written."""

    def write() -> None:
        used = {b.name for stage in program.spec.stages for b in stage.buffers}
        outline = outline_of(task.model, task.loss_fn)
        buffers = {name: str(b) for name, b in outline.buffers.items() if name in used}
        write_program(folder, plan, program, buffers, outline.facts)

    _agree(write, "writing the program")
    return folder


def _check_optimizer(optimizer: Any) -> None:
    """Raise PinError unless `optimizer` is None or a function that makes an optimizer."""
    if optimizer is None or (callable(optimizer) and not isinstance(optimizer, torch.optim.Optimizer)):
        return
    kind = type(optimizer)
    example = "functools.partial(torch.optim.AdamW, lr=3e-4)"
    if isinstance(optimizer, torch.optim.Optimizer):
        name = f"torch.optim.{kind.__name__}" if hasattr(torch.optim, kind.__name__) else kind.__name__
        lr = optimizer.defaults.get("lr")
        example = f"functools.partial({name}{'' if lr is None else f', lr={lr!r}'})"
    raise PinError(
        f"optimizer is of type {kind.__name__}; it must be a function from parameters to an optimizer, since this "
        f"rank's shards are made after planning: {example}"
    )


def _check_run(
    cluster: Cluster,
    pins: Mapping[str, Any],
    precision: str,
    compression: Compression | None,
    async_tp: bool | str,
    compile: bool | str,
) -> None:
    """Raise PinError for pins and arguments that cannot be, whatever the model is."""
    if compression is not None:
        try:
            check_compression(compression)
        except ValueError as exc:
            raise PinError(str(exc)) from exc
    facts = Facts(
        cluster.num_devices,
        precision=precision,
        device_type=cluster.device_type,
        gradient_compression="PowerSGD" if isinstance(compression, PowerSGD) else compression or "",
        async_tp=async_tp,
        compile=compile,
        compile_backends=_backends() if isinstance(compile, str) and compile != AUTO else (),
    )
    check_pins(Pins(pins), facts)


def _backends() -> tuple[str, ...]:
    """Return the names of all backends of torch.compile, also those for debugging."""
    return tuple(torch.compiler.list_backends(exclude_tags=()))


def _with_memory(cluster: Cluster, placement: devices.Placement) -> Cluster:
    """Return the cluster with this rank's memory: its share of its GPU and of the host, or of the machine."""
    share = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // placement.on_host
    if placement.device.type == "cuda":
        total = torch.cuda.get_device_properties(placement.device).total_memory // placement.on_device
        return cluster.with_(memory_gb=_USABLE * total / 1e9, host_memory_gb=_USABLE * share / 1e9)
    return cluster.with_(memory_gb=_USABLE * share / 1e9)


_USABLE = 0.9  # of the memory: the rest is for the system, the interpreter and its libraries


def _machine_profile(
    graph: ModelGraph | None,
    cluster: Cluster,
    global_batch_size: int,
    seq_len: int,
    pins: Mapping[str, Any],
    target_len: int | None = None,
    device: torch.device | None = None,
    precision: str = "native",
) -> Profile | None:
    """Return this machine's profile, after measuring the model's operations that it lacks. Every rank calls it."""
    from autoplan.profiler import calm, run

    given = run.resolve()
    if given != "measure":
        return given
    key = run.machine_key(cluster.num_devices, cluster.device_type)

    def wanted() -> tuple[str | None, list[ProfilerTask], tuple[str, ...], bool]:
        if graph is None:
            raise AutoplanError("only rank 0 plans")
        have = run.cached_profile(key)
        facts = Facts.of(graph, cluster, global_batch_size, seq_len, target_len=target_len)
        checked = space(graph, cluster, global_batch_size, pins, facts=facts)
        cases = {(c.tp, c.micro_batch_size, c.cp) for c in checked.candidates}
        tasks: dict[str, ProfilerTask] = {}
        for tp, size, cp in sorted(cases):
            for task in run.graph_tasks(graph, [tp], {"b": size, "s": seq_len // cp, "t": target_len or seq_len}):
                tasks.setdefault(task.work.key, task)
        missing = [t for k, t in tasks.items() if have is None or k not in have.settled]
        again = have is None or bool(calm.disturbed_parts(have, calm.load_average(), os.cpu_count() or 1))
        dtypes = run.main_dtypes(graph, executed_precision(precision))
        return (None if have is None else have.to_json()), missing, dtypes, again

    have_json, tasks, dtypes, again = _agree(wanted, "listing what to measure")
    have = None if have_json is None else Profile.from_json(have_json)
    if have is not None and not tasks and not again:
        return have
    budget_s = float(os.environ.get("AUTOPLAN_PROFILE_BUDGET_S", _PROFILE_BUDGET_S))
    found = run.measure_in_job(tasks, budget_s, known=have, dtypes=dtypes, device=device)
    if dist.get_rank() == 0:
        run.keep_profile(found, key)
    return found


_PROFILE_BUDGET_S = 60.0


def _agree(work: Callable[[], _T], what: str) -> _T:
    """Run `work` on rank 0; return its result, or raise its error, on every rank. `what`: shown to waiting ranks."""
    box: list[Any] = [None]
    failure: Exception | None = None
    with work_of_first(what):
        if dist.get_rank() == 0:
            try:
                box[0] = work()
            except AutoplanError as exc:
                failure = box[0] = exc
            except Exception as exc:  # not the user's error, but the others must not wait for a plan that never comes
                failure, box[0] = exc, AutoplanError(f"rank 0 could not plan: {type(exc).__name__}: {exc}")
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(box, src=0)
    if failure is not None:
        raise agreed(failure)
    if isinstance(box[0], AutoplanError):
        raise box[0]
    result: _T = box[0]
    return result


def _on_first(work: Callable[[], _T], what: str) -> _T | None:
    """Run `work` on rank 0 and return its result there, None on the others. Its error is raised on every rank."""
    kept: list[_T] = []
    _agree(lambda: kept.append(work()), what)
    return kept[0] if kept else None


def _type_check(program: Program) -> None:
    """Run `autoplan.codegen.check` on the program in a child process, since it needs a process group of its own."""
    ours = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    environment = {k: v for k, v in os.environ.items() if k not in ours}
    with tempfile.TemporaryDirectory() as folder:
        program.write(Path(folder))
        command = [sys.executable, "-m", "autoplan.codegen.check", folder, "--sequence", "64"]
        result = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, check=False)
    if result.returncode:
        raise LayoutError(f"the emitted program does not type-check:\n{result.stderr[-4000:]}")


def _tensors(model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    return (
        {n: p.detach() for n, p in model.named_parameters()},
        {n: b.detach() for n, b in all_buffers(model)},
    )


def _check_same_model(model: nn.Module, device: torch.device) -> None:
    """Raise CaptureError, on all ranks, if their models differ in names, shapes or dtypes."""
    everything = {**dict(model.named_parameters(remove_duplicate=False)), **dict(all_buffers(model))}
    outlines = {n: f"{str(t.dtype)[6:]}{list(t.shape)}" for n, t in everything.items()}
    found = first_difference(outlines, device)
    if found is not None:
        here, there = found.of_first or "missing", found.of_rank or "missing"
        raise CaptureError(
            f"the ranks have different models: {found.name} is {here} on rank 0 and {there} on rank {found.rank}; "
            "every rank passes the same model (its values may differ, rank 0's are used)"
        )


def _same_values(parameters: dict[str, torch.Tensor], buffers: dict[str, torch.Tensor], device: torch.device) -> None:
    """Replace the values of this rank that differ from rank 0's (an unseeded model), so that every plan starts alike.

    Values are compared where they are. Those that differ are sent to the hosts of the other ranks, which takes a bucket
    of device memory (`autoplan.runtime.whole`).
    """
    if dist.get_world_size() == 1:
        return
    everything = {**parameters, **buffers}
    prints = [fingerprint({"": t}) for t in everything.values()]
    for (name, tensor), differs in zip(everything.items(), different(prints, device), strict=True):
        if differs:
            value = torch.empty(tensor.shape, dtype=tensor.dtype)
            if dist.get_rank() == 0:
                value.copy_(tensor)
            broadcast_whole(value, 0, device)
            (parameters if name in parameters else buffers)[name] = value


def _aliases(model: nn.Module) -> dict[str, tuple[str, ...]]:
    names: dict[int, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(p), []).append(name)
    return {mine[0]: tuple(mine[1:]) for mine in names.values() if len(mine) > 1}


def _not_in(spec: ProgramSpec, model: nn.Module, values: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return the rest of the model's state: persistent buffers, and frozen parameters that the loss does not need.

    `values`: its parameters and buffers by their first names.
    """
    params = {n: p for n, p in model.named_parameters(remove_duplicate=False)}
    used = {id(params[p.name]) for stage in spec.stages for p in stage.params}
    named = {**params, **{n: b for n, b in all_buffers(model, remove_duplicate=False)}}
    first = {id(t): n for n, t in reversed([*model.named_parameters(), *all_buffers(model)])}
    out: dict[str, Any] = {}
    for name, value in model.state_dict().items():
        if name in params and id(params[name]) in used:
            continue
        out[name] = values[first[id(named[name])]].detach().clone() if name in named else value
    return out
