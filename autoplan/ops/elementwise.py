"""Records of element-wise ops: of one tensor, of a tensor and a number, of two tensors, masks, casts, dropout."""

from __future__ import annotations

from collections.abc import Mapping

from autoplan.ops.arguments import Alias, Args, IrOp, IrResult, Lowering, alias, binary, by_name, default
from autoplan.ops.record import Linear, OpKind, OpRecord, Trait
from autoplan.ops.saved import Form, Gradient, OpFacts, SavedRule, keeps, units
from autoplan.ops.text import Emitter, OpText

UNARY = "[*a] -> [*a]"
UNARY_LINEAR = "~[*a] -> [*a]"
BINARY = "[*a], [*a] -> [*a]"

_NOTHING = keeps()
_PASS = keeps(gradient=Gradient.PASS)
_INPUT, _INPUT_1, _INPUT_2 = keeps("x0<0"), keeps("x0<0", workspace=units(0, 1)), keeps("x0<0", workspace=units(0, 2))
_OUTPUT, _OUTPUT_1 = keeps("y0<0"), keeps("y0<0", workspace=units(0, 1))
_EXTREMUM = keeps("x0<0,1 x1<0,1", workspace=units(0, 2))

FOLLOWS, TRANSCENDENTAL, POINTWISE, IN_CORE = Trait.FOLLOWS, Trait.TRANSCENDENTAL, Trait.POINTWISE, Trait.IN_CORE
KEEPS_NUMBERS, PASSES_GRADIENT, RESCALES = Trait.KEEPS_NUMBERS, Trait.PASSES_GRADIENT, Trait.RESCALES


def _record(
    name: str,
    text: str | Emitter,
    saved: SavedRule,
    *traits: Trait,
    aten: Mapping[str, Lowering] | None = None,
    rule: str = UNARY,
    linear: Linear = Linear.NO,
) -> OpRecord:
    return OpRecord(name, OpKind.ELEMENTWISE, rule, saved, text, aten or {}, linear=linear, has=traits)


def _unary(name: str, text: str, saved: SavedRule, *traits: Trait, linear: Linear = Linear.NO) -> OpRecord:
    """Return the record of a function of one tensor without attributes."""
    rule = UNARY if linear is Linear.NO else UNARY_LINEAR
    return _record(name, text, saved, *traits, aten=default(name), rule=rule, linear=linear)


def _activation(name: str, text: str, saved: SavedRule, *traits: Trait) -> OpRecord:
    """Return the record of an activation function without attributes."""
    return _unary(name, text, saved, FOLLOWS, Trait.ACTIVATION, POINTWISE, *traits)


def _operator(
    name: str, symbol: str, rule: str, saved: SavedRule, *traits: Trait, linear: Linear = Linear.NO
) -> OpRecord:
    """Return the record of an operator between two tensors; ATen has it with a number as well."""
    aten = {f"aten.{name}.{overload}": binary(name) for overload in ("Tensor", "Scalar")}
    return _record(name, f"{{0}} {symbol} {{1}}", saved, *traits, aten=aten, rule=rule, linear=linear)


def _scaled(name: str, text: str) -> OpRecord:
    """Return the record of a tensor multiplied or divided by the attribute `scalar`."""
    traits = FOLLOWS, POINTWISE, IN_CORE, Trait.SCALES
    return _record(name, text, _NOTHING, *traits, rule=UNARY_LINEAR, linear=Linear.ALL)


def _function(name: str, text: str, saved: SavedRule, *aten: str) -> OpRecord:
    """Return the record of a function of two tensors; `aten` names the ATen ops that become it."""
    return _record(name, text, saved, aten={f"aten.{x}": binary(name) for x in aten}, rule=BINARY)


def _rsub(a: Args) -> IrResult:
    difference = IrOp("rsub_scalar", ("$0",), {"scalar": a["other"]})
    if a.get("alpha", 1) == 1:
        return IrOp("rsub_scalar", (a["self"],), {"scalar": a["other"]})
    return [IrOp("mul_scalar", (a["self"],), {"scalar": a["alpha"]}), difference]


def _gelu_text(t: OpText) -> str:
    how = t.attrs["approximate"]
    return f"F.gelu({t.args[0]}" + (f", approximate={how!r})" if how != "none" else ")")


# -- dropout -----------------------------------------------------------------------------------------------------------

_RANDOM_BLOCK = 1 << 18  # elements that are drawn at a time on the CPU (runtime/random_bits.py)


def _dropout(a: Args) -> IrResult:
    if not a["train"] or a["p"] == 0.0:
        return Alias(a["input"])
    return IrOp("dropout", (a["input"],), {"p": float(a["p"])})


def _dropout_extra(f: OpFacts) -> tuple[int, ...]:
    """Return the bytes of state and start of the counter-based generator, kept on the CPU only.

    On a GPU the micro-batch holds them (runtime/dropout.py).
    """
    return (8, 8) if f.attrs["p"] and f.device_type == "cpu" else ()


def _dropout_workspace(f: OpFacts) -> tuple[int, ...]:
    if not f.attrs["p"] or f.device_type != "cpu":  # elsewhere one kernel draws and applies the mask
        return (0, 0)
    x = f.inputs[0]
    # the mask while it is drawn; then the mask and the scaled input
    both = x.num_elements + max(random_block_bytes(f, 3), x.num_bytes)
    return (both, both)


def random_block_bytes(f: OpFacts, num_tensors: int) -> int:
    """Return the bytes of tensors of int64 for the elements of the first input that are drawn at a time on the CPU."""
    return num_tensors * 8 * min(f.inputs[0].num_elements, _RANDOM_BLOCK)


_COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "gt": ">", "le": "<=", "ge": ">="}
_CASTS = ("to.dtype", "to.dtype_layout", "_to_copy.default", "to.device")  # the last has a dtype too
_GELU = default("gelu", by_name("gelu", approximate="none"))
_CLAMP = default("clamp", by_name("clamp", min=None, max=None))
_COPIES = ("clone", "contiguous", "alias", "lift_fresh_copy")

RECORDS = (
    # activation functions
    _activation("silu", "F.silu({0})", _INPUT, TRANSCENDENTAL),
    _activation("relu", "F.relu({0})", _OUTPUT),
    _activation("tanh", "torch.tanh({0})", _OUTPUT, TRANSCENDENTAL),
    _activation("sigmoid", "torch.sigmoid({0})", _OUTPUT, TRANSCENDENTAL),
    _record("gelu", _gelu_text, _INPUT, FOLLOWS, Trait.ACTIVATION, POINTWISE, TRANSCENDENTAL, aten=_GELU),
    _record("softplus", "F.softplus({0})", _INPUT, Trait.ACTIVATION, POINTWISE, TRANSCENDENTAL),
    # functions of one tensor
    _unary("exp", "torch.exp({0})", _OUTPUT, FOLLOWS, TRANSCENDENTAL),
    _unary("log", "torch.log({0})", _INPUT_1, FOLLOWS, TRANSCENDENTAL),
    _unary("cos", "torch.cos({0})", _INPUT_1, FOLLOWS, TRANSCENDENTAL),
    _unary("sin", "torch.sin({0})", _INPUT_1, FOLLOWS, TRANSCENDENTAL),
    _unary("erf", "torch.erf({0})", _INPUT_2, FOLLOWS, TRANSCENDENTAL),
    _unary("abs", "torch.abs({0})", _INPUT_1, FOLLOWS),
    _unary("square", "torch.square({0})", _INPUT_2, FOLLOWS, POINTWISE, Trait.VARIANCE, Trait.SQUARE),
    _unary("rsqrt", "torch.rsqrt({0})", _OUTPUT_1, FOLLOWS, Trait.ROOT),
    _unary("sqrt", "torch.sqrt({0})", _OUTPUT_1, FOLLOWS),
    _unary("neg", "-{0}", _NOTHING, FOLLOWS, PASSES_GRADIENT, linear=Linear.ALL),
    _unary("logical_not", "torch.logical_not({0})", _NOTHING),
    _unary("bitwise_not", "~{0}", _NOTHING),
    # functions of a tensor and a number
    _record("add_scalar", "{0} + {scalar}", _PASS, FOLLOWS, POINTWISE, Trait.VARIANCE, PASSES_GRADIENT),
    _scaled("mul_scalar", "{0} * {scalar}"),
    _scaled("div_scalar", "{0} / {scalar}"),
    _record("rsub_scalar", "{scalar} - {0}", _NOTHING, aten={"aten.rsub.Scalar": _rsub}),
    _record(
        "pow_scalar",
        "{0}.pow({scalar})",
        _INPUT_2,
        FOLLOWS,
        TRANSCENDENTAL,
        POINTWISE,
        Trait.VARIANCE,
        Trait.SQUARE,
        aten={"aten.pow.Tensor_Scalar": by_name("pow_scalar", "self", "scalar=exponent")},
    ),
    *(_record(f"{name}_scalar", f"{{0}} {symbol} {{scalar}}", _NOTHING) for name, symbol in _COMPARISONS.items()),
    _record("clamp", "{0}.clamp({min}, {max})", _INPUT_2, POINTWISE, aten=_CLAMP),
    # functions of two tensors
    _operator("add", "+", "[*a] + [*a] -> [*a]", _PASS, IN_CORE, RESCALES, PASSES_GRADIENT, linear=Linear.ALL),
    _operator("sub", "-", "[*a] + [*a] -> [*a]", _PASS, PASSES_GRADIENT, linear=Linear.ALL),
    _operator(
        "mul",
        "*",
        "[*a] * [*a] -> [*a]",
        keeps("x1<0 x0<1"),
        FOLLOWS,
        POINTWISE,
        Trait.VARIANCE,
        Trait.SQUARE,
        RESCALES,
        linear=Linear.ONE,
    ),
    _operator(
        "div",
        "/",
        "[*a] * [*a] -> [*a]",
        keeps("x1<0,1 x0<1", workspace=units(0, 1)),
        Trait.SCALES,
        Trait.DIVIDES,
        linear=Linear.FIRST,
    ),
    *(_operator(name, symbol, BINARY, _NOTHING) for name, symbol in _COMPARISONS.items()),
    _record(
        "pow", "torch.pow({0}, {1})", keeps("x0<0,1 x1<0,1 y0<1", workspace=units(0, 2)), TRANSCENDENTAL, rule=BINARY
    ),
    _function("maximum", "torch.maximum({0}, {1})", _EXTREMUM, "maximum.default", "max.other"),
    _function("minimum", "torch.minimum({0}, {1})", _EXTREMUM, "minimum.default", "min.other"),
    _function("logical_and", "torch.logical_and({0}, {1})", _NOTHING, "logical_and.default"),
    _function("logical_or", "torch.logical_or({0}, {1})", _NOTHING, "logical_or.default"),
    _function("bitwise_and", "{0} & {1}", _NOTHING, "bitwise_and.Tensor", "__and__.Tensor"),
    _function("bitwise_or", "{0} | {1}", _NOTHING, "bitwise_or.Tensor", "__or__.Tensor"),
    # choices by a mask
    _record(
        "where",
        "torch.where({0}, {1}, {2})",
        keeps("x0<1,2"),
        IN_CORE,
        KEEPS_NUMBERS,
        aten={"aten.where.self": by_name("where", "condition self other")},
        rule="#[*a], [*a], [*a] -> [*a]",
    ),
    _record(
        "masked_fill",
        "{0}.masked_fill({1}, {scalar})",
        keeps("x1<0"),
        IN_CORE,
        KEEPS_NUMBERS,
        aten={"aten.masked_fill.Scalar": by_name("masked_fill", "self mask", "scalar=value")},
        rule="[*a], #[*a] -> [*a]",
    ),
    # copies and casts
    _record(
        "clone",
        "{0}.clone()",
        _NOTHING,
        PASSES_GRADIENT,
        KEEPS_NUMBERS,
        aten={f"aten.{name}.default": alias("self") for name in _COPIES},
        rule=UNARY_LINEAR,
    ),
    _record(
        "to",
        lambda t: f"{t.args[0]}.to(torch.{t.attrs['dtype']})",
        _NOTHING,
        FOLLOWS,
        POINTWISE,
        IN_CORE,
        RESCALES,
        KEEPS_NUMBERS,
        Trait.CAST,
        Trait.TAKES_DTYPE,
        aten={f"aten.{name}": by_name("to", "self", "dtype") for name in _CASTS},
    ),
    OpRecord(
        "dropout",
        OpKind.ELEMENTWISE,
        UNARY,
        keeps(form=Form.NEW, extra=_dropout_extra, workspace=_dropout_workspace),
        lambda t: f"dropout({t.args[0]}, {t.attrs['p']}, rng, {t.over})",
        default("dropout", _dropout),
        variable="dropped",
        has=(FOLLOWS, POINTWISE, IN_CORE, Trait.RANDOM, Trait.DROPS, Trait.RUNS_ON_DEVICE),
    ),
)
