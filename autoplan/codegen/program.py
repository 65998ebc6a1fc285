"""Assemble the program: stages, values that travel between them, one source file per stage, ProgramSpec, ledger."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from autoplan.codegen.context_cuts import context_cuts
from autoplan.codegen.dtype_limits import dtype_limits
from autoplan.codegen.emit import Context, block_source, method_source
from autoplan.codegen.index_limits import index_limits
from autoplan.codegen.ledger import sent, with_gradients
from autoplan.codegen.outputs import FoundOutput, find_output, terms
from autoplan.codegen.schedules import schedule_spec
from autoplan.codegen.sizes import size_sources
from autoplan.codegen.stage_names import StageNames
from autoplan.codegen.whole_sizes import whole_sizes
from autoplan.config.context_methods import ContextMethod
from autoplan.config.precision import executed_precision
from autoplan.config.recompute import recompute_kind, region_groups
from autoplan.errors import LayoutError
from autoplan.files import write_whole
from autoplan.ir.fresh import FreshNames
from autoplan.ir.graph import LOSS_SHARE, Block, Call, ModelGraph, denominator, of_the_batch
from autoplan.ir.layout import Axis, Layout, Mesh
from autoplan.ir.symbols import Expr
from autoplan.ops.batch import batch_obstacle, uses_batch_size
from autoplan.ops.table import backward_reads_params, updated_buffers
from autoplan.program.evaluation import apart, evaluation_layouts
from autoplan.program.expert_degrees import Spread
from autoplan.program.lower import BlockLowering, identifier
from autoplan.program.passes import executed, rewritten
from autoplan.program.problem import Selection
from autoplan.program.statements import Collective, LoweredBlock, local_bytes, local_shape
from autoplan.runtime.spec import (
    BufferSpec,
    CarriedSpec,
    LedgerEntry,
    ParamSpec,
    ProgramSpec,
    ShardSpec,
    SizeBound,
    StageSpec,
    TiedPlace,
    TiedSpec,
)
from autoplan.schedules.schedule import backward_follows, ranks_of_chunks
from autoplan.units import DTYPE_BYTES, LossUnit


@dataclass(frozen=True)
class Layouts:
    """Everything codegen takes from a plan."""

    mesh: Mesh
    axes: tuple[Axis, ...]  # the sub-axes that layouts are chosen on
    selection: Selection
    stages: tuple[tuple[str, ...], ...]  # calls that depend on parameters, per stage
    zero_stage: int
    schedule: str
    recompute: Mapping[str, str]  # call -> none, full, selective, offload, or regions (see autoplan.program.regions)
    virtual_stages: int = 1  # stages per rank of the pipeline; the schedule places them
    context: Mapping[str, ContextMethod] = field(default_factory=dict)  # block -> its context-parallel method
    precision: str = "native"
    offload: tuple[str, ...] = ()  # state kept on the host (autoplan.runtime.offload)


@dataclass(frozen=True)
class Program:
    """The ProgramSpec and the source text of every stage."""

    spec: ProgramSpec
    sources: Mapping[str, str]  # file name -> text

    def write(self, folder: Path) -> None:
        """Write `program.json` and the stage files, each atomically."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in {**self.sources, "program.json": self.spec.to_json()}.items():
            write_whole(folder / name, text)


class _Compiler:
    """Makes a program of a graph.

    Args:
        held: block -> names of parameters and buffers -> attributes of the class that is emitted for it elsewhere.
    """

    def __init__(
        self, graph: ModelGraph, layouts: Layouts, held: Mapping[str, Mapping[str, str]] = MappingProxyType({})
    ) -> None:
        self.graph, self.layouts = graph, layouts
        self.evaluation: _Compiler | None = None
        self.no_evaluation = graph.no_evaluation
        self.precision = executed_precision(layouts.precision)
        groups = {members: name for name, members in layouts.mesh.groups.items()}
        groups[tuple(a.name for a in layouts.axes)] = "tp"  # also if experts cut them further
        self.cut_over = layouts.mesh.size("cp") if layouts.mesh.has("cp") else None  # ranks that sequences are cut over
        self.ctx = Context(graph.factors, layouts.axes, groups, {"b": layouts.mesh.size("dp"), "s": self.cut_over or 1})
        stack = executed(layouts.mesh, layouts.context)
        self.lowered: dict[str, LoweredBlock] = {
            name: rewritten(
                BlockLowering(graph, block, layouts.selection, layouts.axes, held.get(name, {})).run(), stack
            )
            for name, block in graph.blocks.items()
        }
        self.calls = {c.name: c for c in graph.calls}
        self.free_names = graph.free_calls()
        self.free = [c for c in graph.calls if c.name in self.free_names]
        self.free_flow, self.spans = graph.flow([[c.name] for c in self.free]), graph.flow(layouts.stages).spans()
        self.layout_of: dict[str, Layout] = {}  # of top-level values
        for call in graph.calls:
            self.layout_of |= zip(call.outputs, self.lowered[call.block].output_layouts, strict=True)
        self.stage_of = {name: i for i, names in enumerate(layouts.stages) for name in names}

    def with_evaluation(self) -> _Compiler:
        """Return this, which makes the evaluation too if it has a graph of its own that fits into the same stages."""
        if self.graph.evaluation is None:
            return self
        layouts = self.layouts
        try:
            found = evaluation_layouts(
                self.graph, layouts.selection, layouts.axes, layouts.stages, cut=self.cut_over not in (None, 1)
            )
            held = {name: self._attributes(name, block) for name, block in found.graph.blocks.items()}
            methods = {name: how for name, how in layouts.context.items() if name in found.graph.blocks}
            other = replace(
                layouts, selection=found.selection, stages=found.stages, recompute={}, context=methods, offload=()
            )
            self.evaluation = _Compiler(found.graph, other, held)
        except LayoutError as exc:
            self.no_evaluation = f"its evaluation does not fit beside its training: {exc}"
        return self

    def _attributes(self, name: str, block: Block) -> dict[str, str]:
        """Return the attributes with the parameters and buffers of a block in evaluation; add buffers that only it
        reads."""
        lowered = self.lowered.get(name)
        if lowered is None:
            return {}
        held = {p.value.name: p.attr for p in lowered.params} | {v.name: attr for attr, v in lowered.buffers}
        unused = FreshNames(held.values())
        more = [(unused.fresh(identifier(x)), block.values[x]) for x in block.buffers if x not in held]
        self.lowered[name] = replace(lowered, buffers=(*lowered.buffers, *more))
        return held | {value.name: attr for attr, value in more}

    @functools.cached_property
    def names(self) -> StageNames:
        """The variables of the methods of a stage."""
        return StageNames([self.graph, *([self.evaluation.graph] if self.evaluation is not None else [])])

    @functools.cached_property
    def sites(self) -> dict[str, int]:
        """The first number of a draw (a dropout is one) of every call that draws: a property of the model, the same in
        every plan. A call that draws more in evaluation has as many numbers."""
        most: dict[str, int] = {}
        for compiler in (self, *((self.evaluation,) if self.evaluation is not None else ())):
            for call in compiler.graph.calls:
                most[call.name] = max(most.get(call.name, 0), compiler.lowered[call.block].num_draws)
        first = itertools.accumulate(most.values(), initial=0)
        return {name: site for (name, num), site in zip(most.items(), first, strict=False) if num}

    def _free_calls(self, stage: int) -> list[Call]:
        """Return the parameter-free calls that this stage needs (recomputed, not received)."""
        return self._free_for([v for name in self.layouts.stages[stage] for v in self.calls[name].inputs])

    def _free_for(self, needed: Iterable[str]) -> list[Call]:
        """Return the parameter-free calls that lead to these values, or to what the loss counts, in program order."""
        flow, targets = self.free_flow, (count.target for count in self.graph.loss_counts)
        makers = {flow.makes[v] for v in (*needed, *targets) if v in flow.makes}
        return [self.free[i] for i in sorted(makers | flow.leading_to(makers))]

    def _carried(self, boundary: int) -> list[str]:
        """Return the values that cross from stage `boundary` to the next, in order of production."""
        return [value for value, (made, last) in self.spans.items() if made <= boundary < last]

    def run(self) -> Program:
        stages, sources, ledger, gradients = [], {}, [], with_gradients(self.graph, self.lowered)
        for index in range(len(self.layouts.stages)):
            name = f"stage{index}.py"
            spec = self._stage_spec(index, name)
            stages.append(spec)
            sources[name] = self._source(index, spec)
            ledger += self._ledger(index, gradients)
        mesh = self.layouts.mesh
        program = ProgramSpec(
            model=self.graph.name,
            axes=tuple((a.name, a.size) for a in mesh.axes),
            groups=tuple((name, tuple(members)) for name, members in mesh.groups.items()),
            zero_stage=self.layouts.zero_stage,
            schedule=schedule_spec(self.layouts.schedule),
            inputs=tuple(n for n in self.graph.inputs if of_the_batch(n)),
            sizes_from=size_sources(self.graph),
            loss_count=self.graph.loss_count,
            more_loss_counts=tuple((denominator(i), c.what) for i, c in enumerate(self.graph.loss_counts) if i),
            stages=tuple(stages),
            tied=self._tied(),
            recompute=tuple(sorted(self.layouts.recompute.items())),
            ledger=tuple(ledger),
            input_shapes=tuple(
                (n, tuple(terms(s) for s in self.graph.values[n].shape)) for n in self.graph.inputs if of_the_batch(n)
            ),
            compute_dtype=self.precision.compute,
            gradient_dtype=self.precision.gradients,
            autocast_dtype=self.precision.autocast,
            stage_ranks=self._stage_ranks(),
            loss_share=LOSS_SHARE in self.graph.inputs,
            offload=self.layouts.offload,
            bounds=tuple(SizeBound(symbol, *limits) for symbol, limits in self._bounds()),
            whole=whole_sizes([self.lowered[call.block] for call in self.graph.calls]),
            outputs=tuple(found.spec for found in self._found(self.calls)),
            input_dtypes=tuple((n, self.graph.values[n].dtype) for n in self.graph.inputs if of_the_batch(n)),
            index_limits=index_limits(self.graph),
            dtype_limits=dtype_limits(self.graph),
            one_part=batch_obstacle(self.graph) or "",
            equal_samples=uses_batch_size(self.graph),
            no_evaluation=self.no_evaluation,
            draws=any(self.lowered[call.block].num_draws for call in self.graph.calls),
            draws_counts=self._draws_counts(),
            sequence_chunks=self.graph.sequence_chunks,
        )
        if self.evaluation is not None:
            other = replace(self.evaluation.run().spec, inputs=program.inputs, ledger=())
            program = replace(program, evaluation=other)
        return Program(program, sources)

    def _found(self, calls: Iterable[str]) -> list[FoundOutput]:
        """Return the statements of these calls that make the results of the model besides the loss."""
        mine, found = set(calls) - self.free_names, []
        for result in (r for r in self.graph.results if r.call in mine):
            lowered = self.lowered[self.calls[result.call].block]
            home = self.stage_of[result.call], identifier(result.call)
            found.append(find_output(lowered, result, *home, cut=self.cut_over is not None, parts=self.graph.parts))
        return [each for each in found if each is not None]

    def _stage_ranks(self) -> tuple[int, ...]:
        num_ranks = len(self.layouts.stages) // self.layouts.virtual_stages
        return ranks_of_chunks(self.layouts.schedule, num_ranks, self.layouts.virtual_stages)

    def _bounds(self) -> list[tuple[str, tuple[int, int | None]]]:
        """Return the bounds of lengths that are symbols; shapes of inputs have those that are numbers."""
        symbols = {source.symbol for source in size_sources(self.graph)}
        return [(symbol, limits) for symbol, limits in sorted(self.graph.bounds.items()) if symbol in symbols]

    def _tied(self) -> tuple[TiedSpec, ...]:
        out = []
        for full, uses in self.graph.tied_params.items():
            if not self.graph.params[full].trainable:
                continue
            places = []
            for call, local in uses:
                attr = next(p.attr for p in self.lowered[self.calls[call].block].params if p.value.name == local)
                places.append(TiedPlace(self.stage_of[call], identifier(call), attr))
            out.append(TiedSpec(full, tuple(places)))
        return tuple(out)

    def _stage_spec(self, index: int, source: str) -> StageSpec:
        params, buffers = [], []
        for call in [*self._free_calls(index), *(self.calls[n] for n in self.layouts.stages[index])]:
            lowered = self.lowered[call.block]
            block = identifier(call.name)
            for p in lowered.params:
                full = self.graph.params[call.params[p.value.name]]
                shape = tuple(tuple(self._number(self.graph.factors[f]) for f in dim) for dim in p.value.dims or ())
                shards = tuple(
                    ShardSpec(a.name, t.dim, t.factor)
                    for a, t in zip(self.layouts.axes, p.stored, strict=True)
                    if t.is_shard
                )
                pending = tuple(a.name for a, s, u in zip(self.layouts.axes, p.stored, p.used, strict=True) if s != u)
                used = tuple((a.name, u.kind_name) for a, u in zip(self.layouts.axes, p.used, strict=True))
                if p.spread:
                    shards = tuple(ShardSpec(s.axis, s.dim, s.position) for s in p.spread)
                    pending, used = (), self._expert_weight_types(p.spread)
                params.append(
                    ParamSpec(
                        block, p.attr, full.name, full.shape, shape, full.dtype, full.trainable, shards, pending, used
                    )
                )
            made = self.graph.blocks[call.block]
            updated = updated_buffers(made.nodes, made.buffers)
            own = {**self._buffers_in_evaluation(call), **call.buffers}
            for attr, value in lowered.buffers:
                if value.name in own:
                    buffers.append(BufferSpec(block, attr, own[value.name], value.name in updated))
        for call, module in self._free_in_evaluation(index):
            if self.evaluation is not None and module != identifier(call.name):
                found = self.evaluation.lowered[call.block].buffers
                buffers += [BufferSpec(module, attr, call.buffers[value.name]) for attr, value in found]
        return StageSpec(
            index,
            source,
            tuple(self.layouts.stages[index]),
            tuple(params),
            tuple(buffers),
            tuple(map(self._carried_spec, self._carried(index - 1))),
            tuple(map(self._carried_spec, self._carried(index))),
        )

    def _buffers_in_evaluation(self, call: Call) -> Mapping[str, str]:
        other = self.evaluation.calls.get(call.name) if self.evaluation is not None else None
        return other.buffers if other is not None and other.block == call.block else {}

    def _free_in_evaluation(self, stage: int) -> list[tuple[Call, str]]:
        """Return the parameter-free calls of the evaluation that a stage needs, and the module that computes each: that
        of training if it computes the same."""
        if self.evaluation is None:
            return []
        out, training = [], {call.name: call for call in self._free_calls(stage)}
        for call in self.evaluation._free_calls(stage):
            like = training.get(call.name)
            same = (
                like is not None
                and like.buffers == call.buffers
                and self._free_text(like) == (self.evaluation._free_text(call))
            )
            out.append((call, identifier(call.name if same else f"evaluated {call.name}")))
        return out

    def _free_text(self, call: Call) -> list[str]:
        return method_source(self.lowered[call.block], self._context(free=True), "forward")[0]

    def _context(self, free: bool) -> Context:
        """Return the facts for the text of a block; sequences are cut after blocks without parameters."""
        return replace(self.ctx, parts={**self.ctx.parts, "s": 1}) if free else self.ctx

    def _expert_weight_types(self, spread: Sequence[Spread]) -> tuple[tuple[str, str], ...]:
        """Return the type of expert weights on every sub-axis of tp.

        Each rank has other weights (S), or a copy for its own tokens (R).
        """
        mesh = self.layouts.mesh
        apart = {atom for part in spread for atom in mesh.atoms(part.axis)}
        return tuple((atom, "S" if atom in apart else "R") for atom in mesh.atoms("tp"))

    @staticmethod
    def _number(size: Expr) -> int:
        value = size.value
        if value is None:
            raise ValueError(f"a parameter cannot have the symbolic size {size}")
        return value

    def _carried_spec(self, name: str) -> CarriedSpec:
        value, layout = self.graph.values[name], self.layout_of[name]
        shape = tuple(terms(s) for s in local_shape(value, layout, self.graph.factors, self.layouts.axes))
        types = tuple((a.name, t.kind_name) for a, t in zip(self.layouts.axes, layout, strict=True))
        return CarriedSpec(name, shape, value.dtype, types, value.requires_grad)

    def _ledger(self, index: int, gradients: Mapping[str, Set[str]]) -> list[LedgerEntry]:
        out = []
        for name in self.layouts.stages[index]:
            for c in sent(self.lowered[self.calls[name].block], gradients[name]):
                axis = self.layouts.mesh.canonical(c.axes[0] if len(c.axes) == 1 else self.ctx.groups[c.axes])
                size = c.num_elements * self._sent_width(c)
                out.append(LedgerEntry(index, name, c.what, c.kind, axis, terms(size), c.phase, c.per))
        last = len(self.layouts.stages) - 1
        homes = self._stage_ranks()  # values that stay on a rank are not sent
        sends = [(v, "forward") for v in self._carried(index)] if homes[index] != homes[min(index + 1, last)] else []
        back = [v for v in self._carried(index - 1) if self.graph.values[v].requires_grad]
        sends += [(v, "backward") for v in back] if homes[index] != homes[max(index - 1, 0)] else []
        for value, phase in sends:
            size = local_bytes(self.graph.values[value], self.layout_of[value], self.graph.factors, self.layouts.axes)
            out.append(LedgerEntry(index, "stage", value, "send_recv", "pp", terms(size), phase, "micro_batch"))
        return out

    def _sent_width(self, c: Collective) -> int:
        """Return the bytes of a sent element. Gradients of a parameter may be summed in a dtype of their own."""
        wide = self.precision.gradients if c.per == "step" and c.dtype == self.precision.compute else None
        return DTYPE_BYTES[wide or c.dtype]

    def _source(self, index: int, spec: StageSpec) -> str:
        free = self._free_calls(index)
        mine = [self.calls[n] for n in self.layouts.stages[index]]
        blocks: dict[str, list[str]] = {}
        for call in (*free, *mine):
            blocks.setdefault(call.block, []).append(call.name)
        degrees = " ".join(f"{a.name}={a.size}" for a in self.layouts.mesh.axes)
        lines = [
            f'"""{self.graph.name}, stage {index} of {len(self.layouts.stages)} ({degrees}). Generated by autoplan; '
            "safe to read and to step through.",
            "",
            "Comments give the dtype, the local shape and the type on every sub-axis of what a line makes: R "
            "replicate, I invariant,",
            "S(factor) shard, P pending sum. b is the micro-batch of this data-parallel rank, s the sequence "
            + ('length."""' if not self.graph.has_target else 'length, t that of the target."""'),
            "",
            "from autoplan.runtime.program import *  # noqa: F403",
            "",
            "",
        ]
        needs: dict[str, dict[str, bool]] = {}
        others: dict[str, dict[str, bool]] = {}  # of the evaluation
        for name, calls in blocks.items():
            free_block = set(calls) <= self.free_names
            groups = {g for call in calls for g in region_groups(self.layouts.recompute.get(call, "none"))}
            given = {} if free_block else self._outputs(calls)
            more: list[str] = []
            if self.evaluation is not None and not free_block and name in self.evaluation.lowered:
                more, others[name] = self._evaluated(name, calls)
            ctx = self._context(free_block)
            text, needs[name] = block_source(self.lowered[name], ctx, calls, free_block, groups, given, more)
            lines += text
        modules = self._free_in_evaluation(index)
        for call, module in modules:
            if self.evaluation is not None and call.block not in others:
                block, ctx = self.evaluation.lowered[call.block], self.evaluation._context(free=True)
                text, others[call.block] = block_source(block, ctx, [call.name], True)
                lines += text if module != identifier(call.name) else []
        lines += self._stage_class(index, spec, free, mine, needs, modules)
        if self.evaluation is not None:
            lines += self.evaluation._stage_methods(index, self.graph, modules, others, self._count(needs))
        return "\n".join(lines) + "\n"

    def _outputs(self, calls: Iterable[str]) -> dict[int, list[str]]:
        """Return the lines behind statements of these calls that keep results for an evaluation that asks for them."""
        given: dict[int, list[str]] = {}
        for found in self._found(calls):
            given.setdefault(found.statement, []).append(f"self.output({found.spec.name!r}, {found.variable})")
        return {at: list(dict.fromkeys(texts)) for at, texts in given.items()}

    def _evaluated(self, block: str, calls: Sequence[str]) -> tuple[list[str], dict[str, bool]]:
        """Return the method of a block that computes its evaluation, and what it takes; no lines if that is its
        training."""
        other = self.evaluation
        assert other is not None
        lines, needs = method_source(other.lowered[block], other.ctx, "evaluate", (), other._outputs(calls))
        made = self.graph.blocks[block]
        if not updated_buffers(made.nodes, made.buffers):
            trained, _ = method_source(self.lowered[block], self.ctx, "evaluate", (), self._outputs(calls))
            lines = [] if trained == lines else lines
        return lines, needs

    def _stage_methods(
        self,
        index: int,
        training: ModelGraph,
        modules: Sequence[tuple[Call, str]],
        needs: Mapping[str, Mapping[str, bool]],
        count: list[str],
    ) -> list[str]:
        """Return the methods of a stage that evaluate and, if that is another count than `count`, count entries."""
        mine, of = [self.calls[n] for n in self.layouts.stages[index]], {call.name: name for call, name in modules}
        inputs = [n for n in training.inputs if of_the_batch(n)] + [n for n in self.graph.inputs if not of_the_batch(n)]
        lines = ["", *self._run("evaluate", index, inputs, [call for call, _ in modules], mine, needs, of)]
        other = self._count(needs, of, [n for n in inputs if of_the_batch(n)])
        if other == count:
            return lines
        return [*lines, "", other[0].replace("def count", "def count_evaluated"), *other[1:]]

    def _stage_class(
        self,
        index: int,
        spec: StageSpec,
        free: Sequence[Call],
        mine: Sequence[Call],
        needs: Mapping[str, Mapping[str, bool]],
        more: Sequence[tuple[Call, str]],
    ) -> list[str]:
        lines = ["class Stage(nn.Module):", f'    """Stage {index}: {", ".join(c.name for c in mine)}."""', ""]
        lines += ["    def __init__(self) -> None:", "        super().__init__()"]
        for call in free:
            lines += self._free_module(identifier(call.name), call, self.lowered[call.block])
        for call, module in more:
            if self.evaluation is not None and module != identifier(call.name):
                lines += self._free_module(module, call, self.evaluation.lowered[call.block])
        lines.append("        self.blocks = nn.ModuleDict(")
        lines.append("            {")
        for call in mine:
            lowered = self.lowered[call.block]
            options = []
            how = self.layouts.recompute.get(call.name, "none")
            if how != "none":
                options.append(f"recompute={how!r}")
            if call.name in self.sites:
                options.append(f"site={self.sites[call.name]}")
            gathered = self._gathered(call, how)
            if gathered != "again":
                options.append(f"gathered={gathered!r}")
            lines.append(f"                {identifier(call.name)!r}: {lowered.class_name}({', '.join(options)}),")
        lines += ["            }", "        )", ""]
        lines += self._run("forward", index, self.graph.inputs, free, mine, needs)
        lines += ["", *self._count(needs)]
        return lines

    def _free_module(self, module: str, call: Call, lowered: LoweredBlock) -> list[str]:
        """Return the lines that make the module of a parameter-free call."""
        site = [f"        self.{module}.site = {self.sites[call.name]}"] if lowered.num_draws else []
        return [f"        self.{module} = {lowered.class_name}()", *site]

    def _run(
        self,
        name: str,
        index: int,
        inputs: Sequence[str],
        free: Sequence[Call],
        mine: Sequence[Call],
        needs: Mapping[str, Mapping[str, bool]],
        modules: Mapping[str, str] = MappingProxyType({}),
    ) -> list[str]:
        """Return the method of a stage that runs its calls."""
        carried, outs = (list(map(self.names.of, self._carried(i))) for i in (index - 1, index))
        outs = outs or [self.names.of(self.graph.output)]
        given, lines_of_inputs = self.names.arguments(inputs, ["rng"])
        args = ["self", *(f"{c}: Tensor" for c in carried), *given]
        returns = "Tensor" if len(outs) == 1 else f"tuple[{', '.join(['Tensor'] * len(outs))}]"
        lines = [f"    def {name}({', '.join(args)}) -> {returns}:", *lines_of_inputs]
        lines += self._prologue([*free, *mine], needs)
        for call in free:
            lines.append(f"        {self._call_text(call, False, needs, modules)}")
        if self.cut_over is not None:
            lines += context_cuts(self.graph, free, mine, self.names.of)
            lines += ["        s = context_length(s, 'cp')"] * any(needs[call.block].get("s") for call in mine)
        for call in mine:
            lines.append(f"        {self._call_text(call, True, needs)}")
        lines.append(f"        return {', '.join(outs)}")
        return lines

    def _gathered(self, call: Call, recompute: str) -> str:
        """Return what happens to parameters that ZeRO 3 gathers for a forward (see `runtime.program.Block`)."""
        if self.layouts.zero_stage < 3 or not call.params:
            return "again"
        if not recompute_kind(recompute).recomputes and not backward_reads_params(self.lowered[call.block].block):
            return "drop"
        last = call is self.graph.calls[-1]
        return "keep" if last and backward_follows(self.layouts.schedule, len(self.layouts.stages)) else "again"

    def _prologue(self, calls: Sequence[Call], needs: Mapping[str, Mapping[str, bool]]) -> list[str]:
        used = {n for c in calls for n, yes in needs[c.block].items() if yes}
        lines = []
        sizes = size_sources(self.graph)
        lines += [f"        {size.symbol} = {self.names.size(size)}" for size in sizes if size.symbol in used]
        if "device" in used:
            lines.append(f"        device = {self.names.of(sizes[0].input)}.device")
        return lines

    def _call_text(
        self,
        call: Call,
        has_params: bool,
        needs: Mapping[str, Mapping[str, bool]],
        modules: Mapping[str, str] = MappingProxyType({}),
    ) -> str:
        name = modules.get(call.name) or identifier(call.name)
        target = f"self.blocks[{name!r}]" if has_params else f"self.{name}"
        args = [self.names.of(v) for v in call.inputs] + [f"{n}={n}" for n, yes in needs[call.block].items() if yes]
        return f"{', '.join(map(self.names.of, call.outputs))} = {target}({', '.join(args)})"

    def _draws_counts(self) -> bool:
        """Return True if what the loss counts depends on random numbers."""
        return any(self.lowered[call.block].num_draws for call in self._free_for([]))

    def _count(
        self,
        needs: Mapping[str, Mapping[str, bool]],
        modules: Mapping[str, str] = MappingProxyType({}),
        inputs: Sequence[str] = (),
    ) -> list[str]:
        """Return the lines of `count`: the number of entries of this micro-batch in the mean of the loss.

        Args:
            modules: call -> module, where it has not the name of the call.
            inputs: its arguments; by default the inputs of the graph.
        """
        inputs = inputs or [n for n in self.graph.inputs if of_the_batch(n)]
        args, lines_of_inputs = self.names.arguments(inputs, ["rng"] * self._draws_counts())
        lines = [f"    def count({', '.join(['self', *args])}) -> Tensor:"]
        lines.append('        """Number of entries of this micro-batch that the mean of the loss runs over."""')
        lines += lines_of_inputs
        counts = [count for count in self.graph.loss_counts if count.what in (LossUnit.TOKENS, LossUnit.TOTAL)]
        if counts:
            chain = self._free_for([])
            lines += self._prologue(chain, needs)
            lines += [f"        {self._call_text(c, False, needs, modules)}" for c in chain]
            targets = [self.names.of(count.target or "") for count in counts]
            found = [target if count.what is LossUnit.TOTAL else f"({target} != {count.ignore_index}).sum()"
                     for count, target in zip(counts, targets, strict=True)]  # fmt: skip
            every = ", ".join(f"{text}.to(torch.float64)" for text in found)
            lines.append(f"        return {found[0] if len(found) == 1 else f'torch.stack([{every}])'}")
        elif self.graph.loss_count is LossUnit.SAMPLES:
            size = size_sources(self.graph)[0]
            lines.append(f"        return torch.tensor({self.names.size(size)})")
        else:
            lines.append("        return torch.tensor(0)")
        return lines


def compile_program(graph: ModelGraph, layouts: Layouts) -> Program:
    """Lower a captured model under a plan's layouts. Pure: plain values in, text and JSON out."""
    graph, selection, copied = apart(graph, layouts.selection)
    if copied:
        methods = {new: layouts.context[old] for new, old in copied.items() if old in layouts.context}
        layouts = replace(layouts, selection=selection, context={**layouts.context, **methods})
    return _Compiler(graph, layouts).with_evaluation().run()
