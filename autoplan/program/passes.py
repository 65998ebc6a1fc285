"""Passes from statements to statements, for features that layouts do not express; `passes` gives their order.

Programs that run and programs that are only priced take different passes: Megatron-LM gathers keys and values where the
runtime here has a ring, and experts over ep x etp can be priced with a layout that was solved for experts over tp.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from autoplan.config.context_methods import ContextMethod
from autoplan.ir.layout import Mesh
from autoplan.ops.record import OpKind, Trait
from autoplan.ops.table import op_has, op_kind
from autoplan.program.context_parallel import context_parallelism
from autoplan.program.expert_degrees import ExpertDegrees
from autoplan.program.megatron_kernels import Kernels
from autoplan.program.regions import logits
from autoplan.program.statements import Collective, LoweredBlock, Op, Pass, Statement
from autoplan.program.token_dispatch import token_dispatch
from autoplan.units import HALF


@dataclass(frozen=True)
class PassFacts:
    """The facts that decide which passes a program takes.

    Attributes:
        context: ranks that every sequence is cut over.
        methods: context-parallel method of every block.
        experts: degrees of experts that are not where the layout has them.
        kernels: kernels that the program runs with.
        mesh: mesh of a program that runs; None if the numbers of ranks are not known yet.
    """

    context: int = 1
    methods: Mapping[str, ContextMethod] = field(default_factory=dict)
    experts: ExpertDegrees | None = None
    kernels: Kernels = field(default_factory=Kernels)
    mesh: Mesh | None = None


def executed(mesh: Mesh, methods: Mapping[str, ContextMethod]) -> PassFacts:
    """Return the stack of a program that runs on `mesh`."""
    experts = None
    if mesh.has("ep"):
        experts = ExpertDegrees(mesh.size("ep"), mesh.size("etp") if mesh.has("etp") else 1, executed=True)
    return PassFacts(mesh.size("cp") if mesh.has("cp") else 1, methods, experts, mesh=mesh)


def passes(stack: PassFacts) -> tuple[Pass, ...]:
    """Return the passes of a stack, in order."""
    out: list[Pass] = [vocabulary_losses, batch_sums(stack.mesh)]
    if stack.context > 1:
        out.append(context_parallelism(stack.context, stack.methods, megatron=stack.kernels.megatron))
    if stack.experts is not None:
        out.append(token_dispatch(stack.experts))
    if stack.kernels.loss.narrow:
        out.append(fused_losses)
    return tuple(out)


def rewritten(lowered: LoweredBlock, stack: PassFacts) -> LoweredBlock:
    """Return the statements of a block after all passes of a stack."""
    for change in passes(stack):
        lowered = change(lowered)
    return lowered


def vocabulary_losses(lowered: LoweredBlock) -> LoweredBlock:
    """Add the all-reduces of losses over a sharded vocabulary: the largest logit of every token, then its sums."""

    def sent(op: Op) -> Op:
        if op.strategy.special != "vocab_cross_entropy":
            return op
        (given, target), over = op.inputs, tuple(a.name for a in lowered.axes)
        dtype = "float32" if given.dtype in HALF else given.dtype
        tokens, sums = lowered.elements(target, op.strategy.inputs[1]), 3 if op.node.attrs.get("label_smoothing") else 2
        sizes = (tokens, tokens * sums)
        return replace(
            op,
            collectives=tuple(
                Collective(op.node.name, "all_reduce", over, size, dtype, "forward", of_layout=True) for size in sizes
            ),
        )

    return lowered.map_ops(OpKind.LOSS, sent)


_PARTS = {"b": "dp", "s": "cp"}  # symbol of a size -> axis that splits a micro-batch along it


def batch_sums(mesh: Mesh | None) -> Pass:
    """Return the pass that adds the sums of losses that couple samples, over the ranks that share a micro-batch.

    The gradients of these sums are summed likewise.

    Args:
        mesh: axes of one rank are left out. None: all axes may have several ranks.
    """

    def axis_of(op: Op) -> str:
        """Return the axis to sum over; empty if it has one rank."""
        axes = [axis for symbol, axis in _PARTS.items() if symbol in op.node.attrs["over"]]
        if mesh is not None:
            axes = [a for a in axes if mesh.has(a) and mesh.size(a) > 1]
        return "replicas" if len(axes) > 1 else axes[0] if axes else ""

    def keywords(op: Op) -> Op:
        axis = axis_of(op)
        return replace(op, over=(("axis", axis),)) if axis else op

    def rewritten(lowered: LoweredBlock) -> LoweredBlock:
        def summed(op: Op) -> Op:
            sums = op_has(op.node.op, Trait.SUMS_RANKS)
            if not sums and not op_has(op.node.op, Trait.EXTREME_OF_RANKS):
                return keywords(op)
            axis, value = axis_of(op), op.inputs[0]
            size = lowered.elements(value, op.strategy.inputs[0])
            phases = ("forward", "backward")[: 1 + (sums and value.requires_grad)] if axis else ()
            sends = (Collective(value.name, "all_reduce", (axis,), size, value.dtype, phase) for phase in phases)
            return replace(keywords(op), collectives=tuple(sends))

        return lowered.map_ops(OpKind.COLLECTIVE, summed)

    return rewritten


def fused_losses(lowered: LoweredBlock) -> LoweredBlock:
    """Let a fused loss read the logits as the product left them, so that casts between the two are not made."""
    found: dict[str, str] = dict.fromkeys(logits(lowered.statements), "")  # dtype of the product, by variable
    out: list[Statement] = []
    for statement in lowered.statements:
        if isinstance(statement, Op) and statement.args:
            statement = _read_narrow(statement, found)
        out.append(statement)
    return replace(lowered, statements=tuple(out))


def _read_narrow(op: Op, found: dict[str, str]) -> Op:
    source, target = str(op.args[0]), op.targets[0]
    if target in found:
        casts = op_has(op.node.op, Trait.CAST)
        found[target] = found.get(source) or (op.inputs[0] if casts else op.values[0]).dtype
        return replace(op, logits_dtype=found[target]) if casts else op
    if op_kind(op.node.op) is OpKind.LOSS and found.get(source):
        return replace(op, logits_dtype=found[source])
    return op
