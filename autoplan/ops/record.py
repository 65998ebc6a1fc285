"""One record per operation: everything that the planner, the prices and the emitted programs know of it.

A record says how the op is captured, how it can be split, what it computes, what it keeps for the backward and how it
is written in a program. Records stand in files by family and are merged in `autoplan.ops.table`; other code asks
`op_kind`, `op_has` or `op_record` and compares no names. Work that is no op of the graph but has a price
(an optimizer step) has a record with a kind only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from enum import Enum, auto
from typing import Any

from autoplan.ir.graph import Node, Value
from autoplan.ir.layout import AxisType
from autoplan.ir.symbols import Expr
from autoplan.ops.arguments import Lowering
from autoplan.ops.language import OpRule, bind, parse
from autoplan.ops.saved import Form, OpFacts, SavedRule, keeps
from autoplan.ops.strides import ViewStrides
from autoplan.ops.text import Emitter, TextTemplate

Shape = tuple[Expr, ...]
Builder = Callable[[Node, list[Shape], list[Shape]], OpRule]
Flops = Callable[[Node, Sequence[Value], Value, OpRule], Expr]
IndexLimits = Callable[[Mapping[str, Any], Sequence[Sequence[int]], Sequence[Sequence[int]]], dict[int, int]]


class OpKind(Enum):
    """What an op is to layouts, prices and memory."""

    ELEMENTWISE = "elementwise"
    VIEW = "view"  # the same memory in another shape
    PRODUCT = "product"  # of matrices
    ATTENTION = "attention"
    EXPERTS = "experts"
    NORM = "norm"
    SOFTMAX = "softmax"
    REDUCTION = "reduction"  # sum or mean over dims
    COUNT = "count"  # of the elements of a tensor by their value
    JOIN = "join"  # concatenation
    EMBEDDING = "embedding"
    LOSS = "loss"
    FACTORY = "factory"  # makes a tensor of sizes and numbers
    COLLECTIVE = "collective"  # between the ranks that share a micro-batch
    UPDATE = "update"  # of parameters or gradients, outside of the graph
    OTHER = "other"  # a kernel of its own, which is measured by its own name


# nothing of their inputs is read or written; small fills and sums over ranks are priced elsewhere or not at all
_AS_VIEW = frozenset((OpKind.VIEW, OpKind.FACTORY, OpKind.COLLECTIVE))
_MULTIPLIES = frozenset((OpKind.PRODUCT, OpKind.ATTENTION, OpKind.EXPERTS))
_FUSES = frozenset((OpKind.ELEMENTWISE, OpKind.REDUCTION, OpKind.JOIN, *_AS_VIEW))
# the name of the class of measurements, where it is not that of the op
_MEASURED_AS = {
    OpKind.PRODUCT: "linear",
    OpKind.NORM: "norm",
    OpKind.SOFTMAX: "softmax",
    OpKind.REDUCTION: "reduce",
    **dict.fromkeys(_AS_VIEW, "view"),
}


class Linear(Enum):
    """In which operands an op is linear, so that a pending sum in them is a pending sum of the output.

    Only what spmd_types, which checks the emitted program, also knows to be linear.
    """

    NO = auto()
    ALL = auto()  # in all operands together
    ONE = auto()  # in any one of them, the others given
    FIRST = auto()  # in the first, the others given


class Trait(Enum):
    """A property that some passes ask for."""

    FOLLOWS = auto()  # may follow the layout of its producer: does not grow its input
    TRANSCENDENTAL = auto()  # its kernel computes more than a few instructions per element
    ACTIVATION = auto()  # an activation function of an MLP
    POINTWISE = auto()  # may stand between an activation function and the product after it
    IN_CORE = auto()  # may stand between the two products of attention that is written out
    VARIANCE = auto()  # in a norm that is written out: from what is normed to the root
    SQUARE = auto()  # in such a norm: reads what is normed
    ROOT = auto()  # in such a norm: the reciprocal root
    RESCALES = auto()  # in such a norm: behind the root
    PASSES_GRADIENT = auto()  # its backward needs neither inputs nor arithmetic
    CAST = auto()  # to another dtype
    RESIZES = auto()  # makes the shape that it is given; does nothing to a tensor of that shape
    TAKES_DTYPE = auto()  # its dtype attribute is that of its output
    STOPS_GRADIENT = auto()
    RANDOM = auto()  # draws numbers by its place in the program and in the whole tensor
    CHOOSES = auto()  # says or counts what a router chose
    SCALES = auto()  # multiplies by a number
    AVERAGES = auto()  # divides by the number of elements that it adds up
    SUMS_RANKS = auto()  # adds up over the ranks that share a micro-batch
    KEEPS_NUMBERS = auto()  # hands on numbers as they are
    FILLS = auto()  # made anew in every part of a batch, with the part's own size
    RUNS_ON_DEVICE = auto()  # cannot run on meta tensors, or has other strides there than its kernels give


@dataclass(frozen=True)
class OpRecord:
    """Everything known of one op.

    Attributes:
        name: of the op in the IR.
        kind: what it is to layouts, prices and memory.
        rule: how it can be split: a line of the rule language, or a function of node and shapes.
        saved: what it keeps for its backward. `saved_form` gives the rule of a form that keeps something else, if any.
        text: its right-hand side in a program: a template of argument positions and attribute names, or a function.
        aten: the ATen ops that become it, and how their arguments become inputs and attributes.
        linear: through which operands a pending sum passes.
        flops: arithmetic of the forward; None: one operation per element of the first output.
        strides: of the outputs of a view; None for everything else.
        special: what a split of a marked label (`@name` in the rule) makes of the output.
        weights: positions of the weights of a product, whose gradients may be computed later.
        factor_names: names for the factors that a label of the rule stands for.
        variable: the name of its result in a program, if not its own.
        index_limits: for integer inputs by position what they are below, from attributes and local shapes.
        traits: what passes over the graph ask for, given as `has`.
    """

    name: str
    kind: OpKind
    rule: str | Builder | None = None
    saved: SavedRule | None = None
    text: str | Emitter | None = None
    aten: Mapping[str, Lowering] = field(default_factory=dict)
    linear: Linear = Linear.NO
    flops: Flops | None = None
    saved_form: Callable[[OpFacts], SavedRule | None] | None = None
    strides: ViewStrides | None = None
    special: Mapping[str, AxisType] = field(default_factory=dict)
    weights: tuple[int, ...] = ()
    factor_names: Mapping[str, str] = field(default_factory=dict)
    variable: str | None = None
    index_limits: IndexLimits | None = None
    has: InitVar[Iterable[Trait]] = ()
    traits: frozenset[Trait] = field(init=False, default=frozenset())
    # derived of `kind`, `rule` and `text`
    build: Builder | None = field(init=False, default=None)
    emit: Emitter | None = field(init=False, default=None)
    as_view: bool = field(init=False, default=False)
    multiplies: bool = field(init=False, default=False)
    fuses: bool = field(init=False, default=False)
    measured_as: str = field(init=False, default="")

    def __post_init__(self, has: Iterable[Trait]) -> None:
        traits = frozenset(has)
        own = self.name
        if self.kind is OpKind.ELEMENTWISE:
            own = "transcendental" if Trait.TRANSCENDENTAL in traits else "elementwise"
        derived = {
            "traits": traits,
            "build": _line(self.rule) if isinstance(self.rule, str) else self.rule,
            "emit": TextTemplate(self.text) if isinstance(self.text, str) else self.text,
            "as_view": self.kind in _AS_VIEW,
            "multiplies": self.kind in _MULTIPLIES,
            "fuses": self.kind in _FUSES,
            "measured_as": _MEASURED_AS.get(self.kind, own),
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)


def other(
    name: str,
    rule: str | Builder,
    text: str | Emitter,
    lowering: Lowering,
    kept: str = "",
    *traits: Trait,
    aten: str = "",
) -> OpRecord:
    """An op of kind OTHER with a new output; `aten` if the ATen op is not `<name>.default`."""
    targets = {f"aten.{aten or f'{name}.default'}": lowering}
    return OpRecord(name, OpKind.OTHER, rule, keeps(kept, form=Form.NEW), text, targets, has=traits)


def _line(text: str) -> Builder:
    template = parse(text)

    def build(node: Node, ins: list[Shape], outs: list[Shape]) -> OpRule:
        return bind(template, ins, outs)

    return build
