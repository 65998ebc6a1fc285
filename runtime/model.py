"""ParallelModel: the program of this rank, ready to train."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from autoplan.files import write_whole
from autoplan.runtime.agree import own_error_everywhere
from autoplan.runtime.alone import LoneRank
from autoplan.runtime.async_tp import hides_behind_pieces, largest_product
from autoplan.runtime.batch import Batches
from autoplan.runtime.checkpoint.contents import TrainingProgress
from autoplan.runtime.checkpoint.door import Checkpoints
from autoplan.runtime.compiled import compile_blocks
from autoplan.runtime.compression import Compression
from autoplan.runtime.evaluate import Waves, evaluating, evaluation_key, only_trains
from autoplan.runtime.failure import guarded
from autoplan.runtime.given_module import GivenModule
from autoplan.runtime.host_memory import give_back_freed_memory
from autoplan.runtime.mesh import AxisMesh, use_mesh
from autoplan.runtime.model_state import ModelState
from autoplan.runtime.offload import PARAMETERS, HostShards, check_offload
from autoplan.runtime.optim import DroppedGradients, check_elementwise, guard_step, keep_parameters, on_local_shards
from autoplan.runtime.outputs import Each, Outputs, why_no_outputs
from autoplan.runtime.param_groups import ParamGroups, grouped_parameters, settings_of
from autoplan.runtime.params import declare, fill, fill_buffers, reduce_deferred
from autoplan.runtime.pipeline import PipelineRunner, PipelineStagePart
from autoplan.runtime.precision import MASTER, Copies, LossScaler, MixedPrecision, check_precision
from autoplan.runtime.program import copy_beside_computing, load_module, unwritten_folder
from autoplan.runtime.replicas import Replicas
from autoplan.runtime.settings import same_groups_everywhere
from autoplan.runtime.shards import Shards, show_states
from autoplan.runtime.spec import ParamSpec, ProgramSpec, ScheduleSpec, StageSpec
from autoplan.runtime.stage_inputs import StageInputs
from autoplan.runtime.state_methods import StateMethods
from autoplan.runtime.step_loss import step_loss
from autoplan.runtime.tied import TiedGradients, share_tied
from autoplan.runtime.total import TotalLoss
from autoplan.runtime.values import dtypes_of
from autoplan.runtime.zero import GradientSync, apply_zero, reduces_beside

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
Batch = Mapping[str, torch.Tensor]


class ParallelModel(StateMethods):
    """One rank's part of a parallel program.

    Args:
        spec: the program.
        sources: file name -> emitted text of every stage.
        parameters, buffers: full tensors by their original names (views are fine; only this rank's shards are copied),
            or `autoplan.runtime.values.MadeTensors` of them: at most one block that ZeRO shards is whole at a time.
        num_micro_batches: the number of equal parts into which `step` cuts this rank's batch.
        optimizer: `parameters -> Optimizer` (e.g. `functools.partial(torch.optim.AdamW, lr=3e-4)`), or None.
        param_groups: the optimizer's groups of parameters (`autoplan.runtime.param_groups`); None: one group.
        device: where to run.
        folder: where the emitted modules are written, for readers; by default nowhere.
        seed: seed of dropout and all other random numbers of a forward.
        dtype: a floating dtype to run in instead of the captured one (for parity in float64).
        aliases: further names of tied parameters, for `state_dict`.
        extra_state: persistent buffers and other state that the loss does not need, for `state_dict`.
        mesh: the device mesh; by default one is made from `spec.axes` and `spec.groups`.
        compile: backend of torch.compile for the blocks (see autoplan.runtime.compiled), or None.
        async_tp: rows that a rank's products of tensor parallelism take of a micro-batch, to let compiled blocks
            (inductor) overlap collectives with pieces of them where that works and is faster
            (`autoplan.runtime.async_tp`); None: do not.
        gradient_compression: compression of ZeRO 0's all-reduce (`autoplan.runtime.compression`).
        alone: what a rank is given that runs without the others, in a rehearsal; None: it asks them.

    Attributes:
        plan, given: the Plan and the form of the module this came from (set by autoplan.parallelize).
        source: file name -> emitted text.
        stages: this rank's modules by stage index, in model order; several if there are virtual stages.
        optimizer: the optimizer over the local parts of this rank's shards, or None.
        loss_scaler: the loss scaler of a float16 program, else None.
        precision: the dtypes of a mixed-precision program, else None.
        progress: steps and samples so far, and the seed of dropout.
        data_rank, data_world: index of this rank's part of the global batch, and the number of parts.
        last_load: when `load_checkpoint` last set `progress`; None: never.

    Example:
        `autoplan.parallelize` makes one. On one device:

        >>> import torch, autoplan
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 8))
        >>> batch = {"input": torch.ones(4, 8)}
        >>> def loss_fn(output, batch):
        ...     return output.square().mean()
        >>> pm = autoplan.parallelize(model, "local", example_inputs=batch, loss_fn=loss_fn, global_batch_size=4)
        >>> pm.step(batch).shape, sorted(pm.state_dict())
        (torch.Size([]), ['0.bias', '0.weight', '1.bias', '1.weight'])
    """

    def __init__(
        self,
        spec: ProgramSpec,
        sources: Mapping[str, str],
        parameters: Mapping[str, torch.Tensor],
        buffers: Mapping[str, torch.Tensor],
        *,
        num_micro_batches: int = 1,
        optimizer: OptimizerFactory | None = None,
        param_groups: ParamGroups | None = None,
        device: torch.device | str = "cpu",
        folder: Path | None = None,
        seed: int = 0,
        dtype: torch.dtype | None = None,
        aliases: Mapping[str, tuple[str, ...]] | None = None,
        extra_state: Mapping[str, Any] | None = None,
        mesh: AxisMesh | None = None,
        compile: str | None = None,
        async_tp: int | None = None,
        gradient_compression: Compression | None = None,
        alone: LoneRank | None = None,
    ) -> None:
        self.spec: ProgramSpec = spec
        self.source: dict[str, str] = dict(sources)
        self.plan: Any = None  # a Plan, whose class the runtime does not know
        self.exporter: Any = None
        self.given: GivenModule | None = None
        self.num_micro_batches: int = num_micro_batches
        self.device: torch.device = torch.device(device)
        self.progress: TrainingProgress = TrainingProgress(seed)
        self.mesh: AxisMesh = mesh or AxisMesh(spec.axes, dict(spec.groups), device_type=self.device.type)
        self._replicas = Replicas(spec, self.mesh)
        self.data_rank: int = self._coordinate("dp")
        self.data_world: int = self.mesh.size("dp")
        self._specs = {s.index: s for s in spec.stages_of(self._coordinate("pp"))}
        self._dtype = dtype
        self._given = dtypes_of(parameters)
        double = torch.float64 in self._given.values()
        self._loss_dtype = dtype or (torch.float64 if double else torch.float32)
        self.precision: MixedPrecision | None = MixedPrecision.of(spec)
        check_precision(spec, self.precision, dtype, gradient_compression)
        self._num_evaluations = self._num_evaluations_of_step = self._num_own_steps = 0
        self.training: bool = True
        self.folder: Path | None = folder
        self.stages: dict[int, nn.Module] = {index: self._build(mine, buffers) for index, mine in self._specs.items()}
        params = [p for stage in spec.stages for p in stage.params]
        if compile is not None:
            hidden = [] if async_tp is None else self._hidden(params, async_tp)
            for stage in self.stages.values():
                compile_blocks(stage, compile, hidden)
        self._state = ModelState(
            spec,
            self.mesh,
            self.stages,
            Shards(self.mesh, params, split=not self._replicas.plain),
            device=self.device,
            aliases=aliases or {},
            extra=extra_state or {},
            buffers=buffers,
            order=self._given,
            dtype=dtype,
            stored=self._stored_dtype,
        )
        self._compression = gradient_compression
        self._on_host = check_offload(spec.offload)
        self._syncs, self._copies = self._synchronised(parameters)
        self._state.host = self._host = self._host_shards()
        self.loss_scaler: LossScaler | None = self._make_loss_scaler()
        self._tied = TiedGradients(spec, self.mesh, self.stages)
        self.mesh.connect(self.device, "pp", self._neighbours())
        self._inputs = StageInputs(spec, self.mesh, self.stage, self.device, self._loss_dtype, dtype)
        self._alone = alone
        counts = None if alone is None else alone.counts
        batches = functools.partial(Batches, mesh=self.mesh, device=self.device, given=counts, dtype=dtype)
        self._batches = batches(spec, num_micro_batches=num_micro_batches)
        self._evaluated, self._evaluated_inputs, self._evaluated_batches = spec, self._inputs, self._batches
        if spec.evaluation is not None:
            self._evaluated = spec.evaluation
            self._evaluated_inputs = StageInputs(
                spec.evaluation, self.mesh, self.stage, self.device, self._loss_dtype, dtype
            )
            self._evaluated_batches = batches(spec.evaluation, num_micro_batches=num_micro_batches)
        self._runner: PipelineRunner | None = None
        self._runner_shape: tuple[int, ...] = ()
        self._checkpoints = Checkpoints(self.device)
        self.optimizer = None
        self._updated = []
        self._dropped = None
        if optimizer is not None:
            self.optimizer = self._make_optimizer(optimizer, param_groups)
            self._same_groups = same_groups_everywhere(optimizer, param_groups, self.mesh.size("pp"))
            check_elementwise(self.optimizer, sharded=not self._state.whole_here)
            guard_step(self.optimizer)
            keep_parameters(self.optimizer)
            self._dropped = DroppedGradients(self.optimizer)

    def _hidden(self, params: list[ParamSpec], rows: int) -> list[dist.ProcessGroup]:
        """Return the groups whose collectives compiled blocks hide behind pieces of products of `rows` rows."""
        groups = [self.mesh.group("tp")] if self.mesh.size("tp") > 1 else []
        size = largest_product(params, self.mesh, rows)
        return [group for group in groups if hides_behind_pieces(group, self.device, size)]

    def _neighbours(self) -> list[tuple[int, int]]:
        """Return the ranks of the pipeline between which stages send, each pair once and in order."""
        home = {stage.index: rank for rank in range(self.mesh.size("pp")) for stage in self.spec.stages_of(rank)}
        pairs = {(home[i], home[i + 1]) for i in range(len(home) - 1)}
        return sorted({(min(pair), max(pair)) for pair in pairs if pair[0] != pair[1]})

    def _make_loss_scaler(self) -> LossScaler | None:
        """Make the scaler of a float16 program and let it scale the output of the last stage. Otherwise return None."""
        if self.precision is None or not self.precision.scales_loss:
            return None
        scaler = LossScaler()
        last = self.stages.get(len(self.spec.stages) - 1)
        if last is not None:  # after the hooks of fully_shard, which then see the unscaled loss
            last.register_forward_hook(lambda module, inputs, output: scaler.scaled(output))
        return scaler

    def _make_optimizer(self, factory: OptimizerFactory, groups: ParamGroups | None) -> torch.optim.Optimizer:
        """Return an optimizer over the local parts of all trained parameters and all copies of tied parameters."""
        trained = [(s, p) for s, p in self._state.places() if p.requires_grad]
        given: list[nn.Parameter] = []

        def make(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
            given.extend(parameters)
            if groups is None:
                return factory(given)
            shapes = {p.name: p.shape for stage in self.spec.stages for p in stage.params if p.trainable}
            every = {name: shapes[name] for name in self._given if name in shapes}  # in the order of the model
            made: list[Any] = grouped_parameters(
                [s.name for s, _ in trained], given if trained else [], settings_of(groups, every)
            )
            return factory(made)

        held = [self._held(p) for _, p in trained]
        made = functools.partial(on_local_shards, make, held, apart=not self._state.whole_here)
        optimizer = made() if self._alone is not None else own_error_everywhere(made, "optimizer", self.device)
        shown = [self._state.shown(s, p) for s, p in trained]
        show_states(optimizer, list(zip(given, shown, strict=bool(trained))))
        self._updated = [(s.name, local, whole) for (s, _), local, whole in zip(trained, given, shown, strict=False)]
        return optimizer

    def _synchronised(self, parameters: Mapping[str, torch.Tensor]) -> tuple[dict[int, GradientSync], Copies | None]:
        """Fill the parameters and apply ZeRO to every stage; return its syncs and the 16-bit copies of parameters that
        it does not gather."""
        precision, copies, syncs = self.precision, None, {}

        def fill_stage(index: int, block: str | None = None) -> None:
            give_back_freed_memory()  # of the block before, which is sharded now
            fill(self.stages[index], self._specs[index], parameters, self.mesh.size, self._coordinate, block)

        if self._replicas.plain:
            for index in self.stages:
                fill_stage(index)
            copies = self._make_copies()
        # gradients summed in 16 bits are reduced in the 16-bit copies
        in_copies = copies is not None and precision is not None and precision.gradients != MASTER
        leaf = copies.leaf if copies is not None else _itself
        with copies.in_place() if copies is not None and in_copies else nullcontext():
            for index, stage in self.stages.items():
                mine = self._specs[index]
                syncs[index] = apply_zero(
                    stage,
                    self._replicas.submesh(),
                    self.spec.zero_stage,
                    schedule=self._schedule,
                    apart=self._dispatched(mine),
                    apart_mesh=self._replicas.submesh_of_experts(),
                    policies=precision.policies(mine.params) if precision is not None and copies is None else None,
                    compression=self._compression,
                    offload=PARAMETERS in self._on_host,
                    beside=leaf if reduces_beside(self.device.type) else None,
                    fill=functools.partial(fill_stage, index),
                )
                fill_stage(index)  # what ZeRO does not shard
        # copies of the parameters that fully_shard ignores: experts without replicas
        return syncs, copies if copies is not None else self._make_copies()

    def _host_shards(self) -> HostShards | None:
        """Return the trained shards that stay on the host (except those that `fully_shard` offloads), or None."""
        if not self._on_host:
            return None
        moved = PARAMETERS in self._on_host
        mine = [p for p in self._trained() if not (moved and isinstance(p, DTensor))]
        if self._copies is None:
            return HostShards(mine)
        host = HostShards(mine, self._copies.unused)
        self._copies.read_from(host.sources)
        return host

    def _trained(self) -> Iterator[nn.Parameter]:
        """Yield the trained parameters that the blocks hold: on the device, unless `fully_shard` offloads them."""
        for _, parameter in self._state.places():
            if parameter.requires_grad:
                yield parameter

    def _held(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the tensor that the optimizer updates: the parameter itself, or its copy on the host."""
        return self._state.held(parameter)

    def _make_copies(self) -> Copies | None:
        if self.precision is None:
            return None
        uses = [
            (p, self.stages[mine.index].get_submodule(f"blocks.{p.block}"))
            for mine in self._specs.values()
            for p in mine.params
        ]
        return Copies(uses, self.precision)

    @property
    def _schedule(self) -> ScheduleSpec | None:
        """The schedule of the pipeline; None for a model in one stage, whatever was pinned."""
        return self.spec.schedule if self.mesh.size("pp") > 1 else None

    @property
    def stage(self) -> nn.Module:
        """The module of this rank's first stage in model order (its only stage, unless there are virtual stages)."""
        return next(iter(self.stages.values()))

    def _coordinate(self, axis: str) -> int:
        return self.mesh.coordinate(axis)

    def _build(self, mine: StageSpec, buffers: Mapping[str, torch.Tensor]) -> nn.Module:
        path, text = (self.folder or unwritten_folder()) / mine.source, self.source[mine.source]
        if self.folder is not None and (not path.exists() or path.read_bytes() != text.encode()):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, text)
        module = load_module(path, f"autoplan_program_{abs(hash(str(path)))}_{mine.index}", text)
        stage: nn.Module = module.Stage()
        declare(stage, mine, self.mesh.size, self.device, self._stored_dtype)
        fill_buffers(stage, mine, buffers, self.device, self._dtype)
        if self._replicas.plain:
            share_tied(stage, mine, self.spec.tied)
        copy_beside_computing(stage, self.device)
        return stage

    def _dispatched(self, mine: StageSpec) -> list[nn.Parameter]:
        """Return the experts' parameters under token dispatch: sharded over `ep`, replicated over `edp`."""
        return [
            self.stages[mine.index].get_submodule(f"blocks.{p.block}").get_parameter(p.attr)
            for p in mine.params
            if any(s.axis == "ep" for s in p.shards)
        ]

    # -- parameters -------------------------------------------------------------------------------------------------

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield (original name, this rank's shard) in the order of the model, each name once: of a tied parameter the
        first copy.

        If the program splits parameters, they are DTensors of the model's own shapes (`autoplan.runtime.shards`).
        """
        self._gradients_used()
        return self._state.named_parameters()

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield this rank's trained shards, for an optimizer. If the optimizer's state is offloaded, the shards are on
        the host, with their gradients once `step` has returned; `step` copies them to the device."""
        for _, parameter in self.named_parameters():
            if parameter.requires_grad:
                yield parameter

    # -- training ---------------------------------------------------------------------------------------------------

    def train(self, mode: bool = True) -> ParallelModel:
        """Allow steps (`mode`), or only evaluations; return self, as nn.Module does.

        The program keeps the mode that the model had in `parallelize`, with dropout or without: warns if it was eval.
        """
        if mode and self.given is not None:
            self.given.warn_of_eval_mode()
        self.training = mode
        return self

    def eval(self) -> ParallelModel:
        """Allow evaluations only: `step` raises an error until `train()` is called."""
        return self.train(False)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients. `step` does so by itself; loops that call it anyway stay as they are."""
        if not set_to_none:
            raise ValueError("zero_grad(set_to_none=False): gradients are dropped, never set to zero")
        self._leave_out_gradients()

    @guarded("step")
    def step(self, batch: Batch | list[Batch]) -> torch.Tensor:
        """Run forward and backward of all micro-batches of this data-parallel rank's part of the batch.

        Gradients of the previous step are dropped. The gradients are complete (summed over ranks, micro-batches and
        tied copies) when this returns. Follow with `clip_grad_norm_` and `optimizer.step()`.

        Args:
            batch: name -> tensor [B, ...] with the names the model was captured with. Ranks with equal `data_rank` give
                the same batch. B is divisible by `num_micro_batches`; data-parallel ranks may have another B where the
                loss is a mean over tokens. A list of batches of the same shapes is one step on all of them (gradient
                accumulation): the loss is the mean over their valid tokens, gradients are reduced once.

        Returns: the loss of the global batch (the mean over all valid tokens) on every rank, a 0-dim tensor.
        Raises:
            ValueError: a batch that does not fit (on any rank), different batches on ranks of one `data_rank` (compared
                now and then), settings of the optimizer or arguments of the last `clip_grad_norm_` that differ between
                ranks, a step under `torch.no_grad`, or a number that the forward or the loss function reads and that
                was another one in the capture (`given_numbers`). All ranks raise it and can continue.
            RankFailure: this or another rank failed.
        """
        several = isinstance(batch, list) and all(isinstance(each, Mapping) for each in batch)
        return step_loss(self._step(cast("list[Batch]", batch if several else [batch])))

    def _step(self, batches: Sequence[Batch]) -> torch.Tensor:
        if self.given is not None:
            self.given.warn_before_step(first=not self._num_own_steps)
        problem = self._batches.problem(batches) if self.training else "pm.eval() was called; call pm.train() first"
        problem = problem or self._changed()
        parts = [] if problem is not None else [part for batch in batches for part in self._batches.cut(batch)]
        keys = self.progress.seed, self.progress.num_steps
        with self._in_mesh():
            counts = self._batches.settle(
                batches,
                problem,
                lambda: self._inputs.count(parts, len(batches), *keys, self.data_rank),
                data_rank=self.data_rank,
                step=self._num_own_steps,
                settings=self._settings,
            )
            denominators = self._inputs.denominators(counts)
            self._state.follow_first_copies()
            if self._dropped is not None:
                self._dropped.begin()
            self._drop_gradients()
            if self._host is not None:
                self._host.give_parameters()
            generators = self._inputs.generators(parts, len(batches), *keys, counts.samples, self.data_rank)
            self._inputs.complete(parts, denominators, generators)
            total = self._total(next(iter(self._syncs.values())) if len(self._syncs) == 1 else None)
            losses = self._run(parts, total.send)
            sent = self.precision.gradients if self.precision is not None else None
            reduce_deferred(self._state.pending(), self.mesh, sent, self.device)
            self._tied.sum_tied(self.device)
            if self.loss_scaler is not None:
                overflows = None if self._alone is None else self._alone.overflows
                self.loss_scaler.unscale_(self._trained(), self.device, self.mesh.world_size, overflows)
        if self._host is not None:
            self._host.take_gradients()
        if self._dropped is not None:
            self._dropped.made()
        self.progress.num_steps += 1
        self._num_own_steps += 1
        self._num_evaluations_of_step = 0
        self.progress.num_samples += sum(counts.samples)
        return total.result(losses)

    def _changed(self) -> str | None:
        return self._state.trained_otherwise() or (None if self.given is None else self.given.changed())

    def _in_mesh(self) -> AbstractContextManager[AxisMesh]:
        return use_mesh(self.mesh, untyped=("pp",) if self.mesh.size("pp") > 1 else (), only_checked=True)

    def _total(self, sync: GradientSync | None = None) -> TotalLoss:
        apart = self._alone is not None
        return TotalLoss(self.mesh, self._replicas.all, self.device, self._loss_dtype, None if apart else sync)

    @guarded("eval_step")
    def eval_step(self, batch: Batch) -> torch.Tensor:
        """Return the loss of a batch as the module computes it in `eval()`, without a backward and without dropout.

        Batch norm has its running statistics, codebooks stay. Gradients, buffers and counters stay as they are.

        Args:
            batch: as for `step`, with any number of samples; data-parallel ranks may have different numbers.

        Returns: the loss of the global batch on every rank, a 0-dim tensor.
        Raises:
            ValueError: a batch that does not fit (on any rank), or a model that updates buffers and whose evaluation
                could not be captured or laid out beside its training. All ranks raise it and can continue.
            RankFailure: this or another rank failed.
        """
        with torch.inference_mode(False), torch.no_grad():
            return step_loss(self._evaluate(batch))

    @guarded("eval_outputs")
    def eval_outputs(
        self, batch: Batch, *, rows: str = "own", each: Each | None = None
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Evaluate a batch as `eval_step` does; return also what the model returns besides the loss, on every rank.

        Args:
            batch: as for `eval_step`.
            rows: `own`, the outputs of this data-parallel rank's samples; `all`, those of the global batch, in the
                order of the data-parallel ranks.
            each: reduces the outputs of a micro-batch (name -> tensor, whole) to those to return, tensors [rows, ...]:
                `lambda out: {"guess": out["logits"].argmax(-1)}` keeps no logits. It gets the outputs of the last
                pipeline stage that makes any.

        Returns: the loss of the global batch, and the outputs by name: `logits` of a mapping (Hugging Face), `0` of a
            tuple, `output` of a tensor alone. Outputs that the loss does not depend on are left out.

        Raises: as `eval_step`; ValueError also for a program without outputs, and for another value of `rows`.
        """
        with torch.inference_mode(False), torch.no_grad():
            outputs = Outputs(self._evaluated, self.mesh, self.stages, self._evaluated_inputs, self.device, each)
            loss = self._evaluate(batch, why_no_outputs(self._evaluated, rows, each), outputs)
            return step_loss(loss), outputs.result(rows)

    def _evaluate(self, batch: Batch, problem: str | None = None, outputs: Outputs | None = None) -> torch.Tensor:
        with evaluating(self.stages.values()):
            return self._run_evaluation(batch, problem, outputs)

    def _run_evaluation(self, batch: Batch, problem: str | None, outputs: Outputs | None) -> torch.Tensor:
        inputs, batches = self._evaluated_inputs, self._evaluated_batches
        problem = problem or batches.problem_of_evaluation(batch) or only_trains(self.spec)
        problem = problem or self._changed()
        num = batches.num_parts(batch, problem)
        if problem is None and num:
            problem = batches.problem_of_evaluation(batch, num)
        parts: list[dict[str, Any]] = [] if problem is not None or not num else batches.cut(batch, num)
        keys = self.progress.seed, evaluation_key(self.progress.num_steps, self._num_evaluations_of_step)
        count = functools.partial(inputs.count, parts, 1, *keys, self.data_rank)
        with self._in_mesh():
            counts = batches.settle([batch], problem, count, data_rank=self.data_rank, step=self._num_evaluations)
        denominators = inputs.denominators(counts)
        self._state.follow_first_copies()
        if self._host is not None:
            self._host.give_parameters()
        generators: Sequence[torch.Tensor | None] = [None] * len(parts)  # no dropout
        if self.spec.evaluation is not None:  # which has what an evaluation draws, and nothing else
            generators = inputs.generators(parts, 1, *keys, counts.samples, self.data_rank)
        inputs.complete(parts, denominators, generators)
        waves = Waves(self._evaluated, self.mesh, self.stages, inputs, self.device)
        with ExitStack() as entered:
            entered.enter_context(self._in_mesh())
            if self._copies is not None:
                entered.enter_context(self._copies.in_place())
            if outputs is not None:
                entered.enter_context(outputs.asked())
            losses = waves.run(parts, outputs.take if outputs is not None else None)
        if self._host is not None:
            self._host.wait_until_given()
        self._num_evaluations += 1
        self._num_evaluations_of_step += 1
        return self._total().result(losses)

    def _run(
        self, parts: list[dict[str, torch.Tensor]], after_forwards: Callable[[list[torch.Tensor]], None]
    ) -> list[torch.Tensor]:
        """Run forward and backward, with the 16-bit copies in place if there are any."""
        if self._copies is None:
            return self._runner_for(parts[0]).run(parts, after_forwards)
        self._copies.drop_gradients()
        with self._copies.in_place():
            losses = self._runner_for(parts[0]).run(parts, after_forwards)
        self._copies.collect()
        return losses

    def _runner_for(self, part: dict[str, Any]) -> PipelineRunner:
        env = self._inputs.sizes(part)
        shape = tuple(env[k] for k in sorted(env))
        if self._runner is None or self._runner_shape != shape:
            parts = [
                PipelineStagePart(
                    index,
                    self.stages[index],
                    self._syncs[index],
                    self._inputs.carried(mine.carried_in, part),
                    self._inputs.carried(mine.carried_out, part),
                )
                for index, mine in self._specs.items()
            ]
            self._runner = PipelineRunner(
                parts,
                self.mesh.submesh("pp"),
                num_stages=len(self.spec.stages),
                device=self.device,
                schedule=self._schedule,
                vote=None if self._alone is None else self._alone.vote,
            )
            self._runner_shape = shape
        return self._runner

    def _stored_dtype(self, p: ParamSpec) -> torch.dtype:
        """Return the dtype in which a parameter is stored: that of its values, unless another was asked for."""
        given = self._given[p.name]
        if self.precision is not None:
            return self.precision.stored(p, given)
        return self._dtype if self._dtype is not None and given.is_floating_point else given

    def __repr__(self) -> str:
        degrees = " ".join(f"{n}={k}" for n, k in self.mesh.axes.items())
        micro_batches = f"{self.num_micro_batches} micro-batches"
        held = f"stage {', '.join(map(str, self.stages))}"
        return f"ParallelModel({self.spec.model}, {degrees}, {held}, {micro_batches})"


def _itself(parameter: nn.Parameter) -> nn.Parameter:
    return parameter
