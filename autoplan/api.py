"""The door: `autoplan.parallelize(model, cluster, ...)` turns a module into this rank's part of a parallel program."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autoplan.capture.cache import cached
from autoplan.capture.export import LossFn, capture
from autoplan.capture.huggingface import default_example, is_hf_model
from autoplan.codegen.program import Program, compile_program
from autoplan.cost_models.cluster import Cluster
from autoplan.cost_models.config import ParallelConfig
from autoplan.cost_models.errors import AutoplanError, CaptureError, LayoutError, PinError
from autoplan.plan import Plan, make_plan
from autoplan.runtime.failure import init_process_group, watch
from autoplan.runtime.model import OptimizerFactory, ParallelModel
from autoplan.search.pins import read_pins


def parallelize(
    model: nn.Module,
    cluster: Cluster | str = "local",
    *,
    optimizer: OptimizerFactory | None = None,
    example_inputs: Mapping[str, torch.Tensor] | None = None,
    loss_fn: LossFn | None = None,
    pins: Mapping[str, Any] | None = None,
    folder: str | Path | None = None,
    seed: int = 0,
    timeout_s: float | None = None,
    check: bool = False,
) -> ParallelModel:
    """Parallelise `model` over `cluster`; call it on every rank (under torchrun), each with the same model.

    Args:
        model: an ordinary module on the CPU or this rank's device. Rank 0's values are used everywhere.
        cluster: a Cluster, or 'local' for all processes of this job.
        optimizer: `parameters -> Optimizer`, e.g. `functools.partial(torch.optim.AdamW, lr=3e-4)`. None: memory is
            planned for AdamW and you make your own from `pm.parameters()`.
        example_inputs: name -> tensor [batch, sequence, ...], one data-parallel rank's part of a batch. Not needed for
            a Hugging Face causal language model.
        loss_fn: `(model output, batch) -> scalar loss`; not needed if the model returns its loss.
        pins: fixed choices: tp, pp, dp, zero_stage (0-3), num_micro_batches, recompute ('none', 'full' or a mapping
            block -> one), stages (layers per pipeline stage), schedule. What is not pinned gets the default stated in
            autoplan.search.pins.
        folder: where to write the emitted program (`stageN.py`, `program.json`); a temporary folder by default.
        seed: of dropout.
        check: type-check the emitted program with spmd_types in a process of its own before it runs (some seconds).
        timeout_s: how long any collective may wait before the job fails (default: AUTOPLAN_TIMEOUT_S or 10 minutes).

    Returns: a ParallelModel: `loss = pm.step(batch)`, `pm.optimizer`, `pm.clip_grad_norm_`, `pm.state_dict()`,
        `pm.plan`, `pm.source`.
    Raises: PinError, CaptureError and other AutoplanErrors, the same on every rank.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    world = dist.get_world_size() if dist.is_initialized() else world
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    if isinstance(cluster, str):
        cluster = Cluster.parse(cluster, world, device_type)
    if cluster.num_devices != world:
        raise PinError(
            f"the cluster has {cluster.num_devices} devices but this job has {world} processes; start it with "
            f"torchrun --nproc-per-node {cluster.num_devices}, or pass cluster='local'"
        )
    config = read_pins(pins or {}, world)
    if example_inputs is None:
        if not is_hf_model(model):
            raise CaptureError("example_inputs is needed to capture a model that is not a Hugging Face language model")
        example_inputs = default_example(model)
    absent = [n for n, t in (*model.named_parameters(), *model.named_buffers()) if t.is_meta]
    if absent:
        raise CaptureError(
            f"{absent[0]!r} is on the meta device and has no values; build the model on the CPU (or load it) first"
        )
    device = _start(cluster, timeout_s)
    plan, program = _agree(model, cluster, config, example_inputs, loss_fn, check)
    parameters, buffers = _tensors(model)
    if world > 1:
        _same_values(parameters, buffers, device)
    if folder is not None and dist.get_rank() == 0:
        program.write(Path(folder))
    if folder is not None and world > 1:
        dist.barrier()
    pm = ParallelModel(
        program.spec,
        program.sources,
        parameters,
        buffers,
        num_micro_batches=config.num_micro_batches,
        optimizer=optimizer,
        device=device,
        folder=Path(folder) if folder is not None else None,
        seed=seed,
        aliases=_aliases(model),
        extra_state=_persistent_buffers(model),
    )
    pm.plan = plan
    return pm


def plan_program(
    model: nn.Module,
    cluster: Cluster,
    config: ParallelConfig,
    example_inputs: Mapping[str, torch.Tensor],
    loss_fn: LossFn | None = None,
) -> tuple[Plan, Program]:
    """Capture, plan and compile in this process; no process group needed."""
    graph = (
        capture(model, example_inputs, loss_fn)
        if loss_fn
        else cached(model, example_inputs, lambda: capture(model, example_inputs))
    )
    shape = next(iter(example_inputs.values())).shape
    env = {"b": max(1, shape[0] // config.num_micro_batches), "s": shape[1] if len(shape) > 1 else 1}
    plan, layouts, _ = make_plan(graph, cluster, config, env)
    return plan, compile_program(graph, layouts)


def _start(cluster: Cluster, timeout_s: float | None) -> torch.device:
    """Process group and device of this rank."""
    if cluster.device_type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        device = torch.device("cuda", torch.cuda.current_device())
    else:
        device = torch.device("cpu")
    if dist.is_initialized():  # by the caller: watch it, and give the groups to come the timeout
        watch(timeout_s)
    else:
        backend = "nccl" if device.type == "cuda" else "gloo"
        if "RANK" in os.environ:
            init_process_group(backend, timeout_s=timeout_s)
        else:
            store = dist.HashStore()  # type: ignore[attr-defined]  # torch has it here without saying so in its stubs
            init_process_group(backend, timeout_s=timeout_s, store=store, rank=0, world_size=1)
    return device


def _agree(
    model: nn.Module,
    cluster: Cluster,
    config: ParallelConfig,
    example_inputs: Mapping[str, torch.Tensor],
    loss_fn: LossFn | None,
    check: bool,
) -> tuple[Plan, Program]:
    """Rank 0 captures, plans and compiles; everybody gets the same result, or the same error."""
    box: list[Any] = [None]
    failure: Exception | None = None
    if dist.get_rank() == 0:
        try:
            box[0] = plan_program(model, cluster, config, example_inputs, loss_fn)
            if check:
                _type_check(box[0][1])
        except AutoplanError as exc:
            failure = box[0] = exc
        except Exception as exc:  # not a user's error, but the others must not wait for a plan that never comes
            failure, box[0] = exc, AutoplanError(f"rank 0 could not plan: {type(exc).__name__}: {exc}")
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(box, src=0)
    if failure is not None:
        raise failure
    if isinstance(box[0], AutoplanError):
        raise box[0]
    plan, program = box[0]
    return plan, program


def _type_check(program: Program) -> None:
    """Run `autoplan.codegen.check` on the program: a child process, since it needs a process group of its own."""
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
        {n: b.detach() for n, b in model.named_buffers()},
    )


def _same_values(parameters: dict[str, torch.Tensor], buffers: dict[str, torch.Tensor], device: torch.device) -> None:
    """Use rank 0's values wherever a rank was given others (an unseeded model), so that every plan starts alike."""
    everything = {**parameters, **buffers}
    prints = [float(t.double().sum()) + 1e-3 * float(t.double().abs().sum()) for t in everything.values()]
    sums = torch.tensor(prints, device=device)
    theirs = sums.clone()
    dist.broadcast(theirs, 0)
    different = (sums != theirs).to(torch.int32)
    dist.all_reduce(different, op=dist.ReduceOp.MAX)
    for (name, tensor), differs in zip(everything.items(), different.tolist(), strict=True):
        if differs:
            moved = tensor.to(device).contiguous().clone()
            dist.broadcast(moved, 0)
            target = parameters if name in parameters else buffers
            target[name] = moved


def _aliases(model: nn.Module) -> dict[str, tuple[str, ...]]:
    names: dict[int, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(p), []).append(name)
    return {mine[0]: tuple(mine[1:]) for mine in names.values() if len(mine) > 1}


def _persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    params = dict(model.named_parameters(remove_duplicate=False))
    return {n: t.detach() for n, t in model.state_dict().items() if n not in params}
