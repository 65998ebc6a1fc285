"""One record per operation: everything that the planner, the prices and the emitted programs know of it.

A record says how the op is captured, how it can be split, what it computes, which bytes it keeps for the backward, and
its text in a program. Records stand in files by family and are merged in `autoplan.ops.table`; other code asks
`op_kind`, `op_has` or `op_record` and compares no names. Priced work that is not an op of the graph (an optimizer step)
has a record with only a kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from enum import Enum, auto
from typing import Any

from autoplan.ir.graph import Node, Value
from autoplan.ir.layout import AxisType
from autoplan.ir.symbols import Expr, Shape
from autoplan.ops.arguments import Lowering
from autoplan.ops.language import OpRule, bind, parse
from autoplan.ops.saved import Form, OpFacts, SavedRule, keeps
from autoplan.ops.strides import ViewStrides
from autoplan.ops.text import Emitter, TextTemplate

WITHOUT_AUTOCAST = "without_autocast"  # attribute: a product in a region where the model turns torch.autocast off
IndexSizes = Sequence[Sequence[int]]
Builder = Callable[[Node, list[Shape], list[Shape]], OpRule]
Flops = Callable[[Node, Sequence[Value], Value, OpRule], Expr]
IndexLimits = Callable[[Mapping[str, Any], IndexSizes, IndexSizes], dict[int, range]]


class OpKind(Enum):
    """The kind of an op for layouts, prices and memory."""

    ELEMENTWISE = "elementwise"
    VIEW = "view"  # the same memory in another shape
    PRODUCT = "product"  # product of matrices
    ATTENTION = "attention"
    EXPERTS = "experts"
    NORM = "norm"
    SOFTMAX = "softmax"
    REDUCTION = "reduction"  # sum or mean over dims
    COUNT = "count"  # counts the elements of a tensor by their value
    JOIN = "join"  # concatenation
    EMBEDDING = "embedding"
    LOSS = "loss"
    FACTORY = "factory"  # makes a tensor from sizes and numbers
    COLLECTIVE = "collective"  # between the ranks that share a micro-batch
    UPDATE = "update"  # updates parameters or gradients, outside of the graph
    OTHER = "other"  # a kernel of its own, measured by its own name


# they neither read nor write their inputs; small fills and sums over ranks are priced elsewhere or not at all
_AS_VIEW = frozenset((OpKind.VIEW, OpKind.FACTORY, OpKind.COLLECTIVE))
_MULTIPLIES = frozenset((OpKind.PRODUCT, OpKind.ATTENTION, OpKind.EXPERTS))
# programs release dead variables before ops of these kinds
_HEAVY = frozenset((OpKind.PRODUCT, OpKind.ATTENTION, OpKind.LOSS, OpKind.EXPERTS))
# torch takes their floating operands in one dtype alone
_ONE_DTYPE = frozenset((*_MULTIPLIES, OpKind.NORM, OpKind.LOSS, OpKind.OTHER))
_FUSES = frozenset((OpKind.ELEMENTWISE, OpKind.REDUCTION, OpKind.JOIN, *_AS_VIEW))
# the name under which kinds are measured, if it is not the name of the op
_MEASURED_AS = {
    OpKind.PRODUCT: "linear",
    OpKind.NORM: "norm",
    OpKind.SOFTMAX: "softmax",
    OpKind.REDUCTION: "reduce",
    **dict.fromkeys(_AS_VIEW, "view"),
}


class Linear(Enum):
    """The operands in which an op is linear, so that a pending sum in them is a pending sum of the output.

    Only where spmd_types, which checks the emitted program, knows the op to be linear too.
    """

    NO = auto()
    ALL = auto()  # in all operands together
    ONE = auto()  # in any one of them, with the others fixed
    FIRST = auto()  # in the first, with the others fixed


@dataclass(frozen=True)
class Inside:
    """The work of an op that is a program of its own, in a forward: kernels, and the bytes that they read and write."""

    kernels: int
    moved_bytes: float


class Trait(Enum):
    """A property of ops that some passes ask for."""

    FOLLOWS = auto()  # may follow the layout of its producer: does not grow its input
    TRANSCENDENTAL = auto()  # its kernel computes more than a few instructions per element
    ACTIVATION = auto()  # an activation function of an MLP
    POINTWISE = auto()  # may stand between an activation function and the product after it
    IN_CORE = auto()  # may stand between the two products of attention that is written out
    VARIANCE = auto()  # in a norm that is written out: between the normed value and the root
    SQUARE = auto()  # in such a norm: reads the normed value
    ROOT = auto()  # in such a norm: the reciprocal root
    RESCALES = auto()  # in such a norm: after the root
    PASSES_GRADIENT = auto()  # its backward needs neither inputs nor arithmetic
    CAST = auto()  # to another dtype
    RESIZES = auto()  # makes a given shape; does nothing to a tensor of that shape
    TAKES_DTYPE = auto()  # its dtype attribute is the dtype of its output
    STOPS_GRADIENT = auto()
    RANDOM = auto()  # draws numbers by its place in the program and the element's place in the whole tensor
    DROPS = auto()  # zeroes elements with the probability `p`, by such numbers
    CHOOSES = auto()  # marks or counts the choices of a router
    DIVIDES = auto()  # divides its first operand by its second
    SCALES = auto()  # multiplies by a number
    AVERAGES = auto()  # divides by the number of elements that it adds up
    SUMS_RANKS = auto()  # adds up over the ranks that share a micro-batch
    EXTREME_OF_RANKS = auto()  # takes the largest or smallest over them
    UPDATES = auto()  # writes to buffers, its last inputs; nothing uses its result
    KEEPS_NUMBERS = auto()  # hands on numbers as they are
    FILLS = auto()  # made in every part of a batch with the part's own size
    RUNS_ON_DEVICE = auto()  # cannot run on meta tensors, or has other strides there than its kernels give


@dataclass(frozen=True)
class OpRecord:
    """Everything known of one op.

    Attributes:
        name: name of the op in the IR.
        kind: its kind for layouts, prices and memory.
        rule: how it can be split: a line of the rule language, or a function of node and shapes.
        saved: the rule of the bytes that it keeps for its backward.
        saved_form: gives the rule of a form of the op that keeps something else, if any.
        text: its right-hand side in a program: a template of argument positions and attribute names, or a function.
        aten: the ATen ops that become it, and how their arguments become inputs and attributes.
        linear: operands through which a pending sum passes.
        flops: arithmetic of the forward; None: one operation per element of the first output.
        strides: strides of the outputs of a view; None for other ops.
        special: type of the output under a split of a marked label (`@name` in the rule).
        weights: positions of the weights of a product, whose gradients may be computed later.
        factor_names: names for the factors that a label of the rule stands for.
        variable: the name of its result in a program, if not its own.
        index_limits: the numbers that integer inputs may have, by position, from attributes and local shapes.
        inside: of an op that is a program of its own: what its forward does, from local sizes; None: it is one kernel.
        traits: properties that passes ask for, given as `has`.
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
    inside: Callable[[OpFacts], Inside] | None = None
    has: InitVar[Iterable[Trait]] = ()
    traits: frozenset[Trait] = field(init=False, default=frozenset())
    # derived from `kind`, `rule` and `text`
    build: Builder | None = field(init=False, default=None)
    emit: Emitter | None = field(init=False, default=None)
    as_view: bool = field(init=False, default=False)
    multiplies: bool = field(init=False, default=False)
    fuses: bool = field(init=False, default=False)
    heavy: bool = field(init=False, default=False)
    one_dtype: bool = field(init=False, default=False)
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
            "heavy": self.kind in _HEAVY,
            "one_dtype": self.kind in _ONE_DTYPE,
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
    """Return an op of kind OTHER with a new output.

    Args:
        aten: the ATen op, if it is not `<name>.default`.
    """
    targets = {f"aten.{aten or f'{name}.default'}": lowering}
    return OpRecord(name, OpKind.OTHER, rule, keeps(kept, form=Form.NEW), text, targets, has=traits)


def _line(text: str) -> Builder:
    template = parse(text)

    def build(node: Node, ins: list[Shape], outs: list[Shape]) -> OpRule:
        return bind(template, ins, outs)

    return build
