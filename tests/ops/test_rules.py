"""Every strategy of every rule against the op on one device: outputs, gradients, types; and every conversion."""

import itertools
import re
from dataclasses import replace

import pytest
from parity import spread_out
from rule_case import ENV, FACTORS, SETTING, Case, case
from rule_cases import CASES
from spmd_types import SpmdTypeError, register_local_autograd_function

from autoplan.errors import RuleError
from autoplan.ir.graph import Node, Value
from autoplan.ir.layout import AxisType, I, Layout, P, R, conversion, shard
from autoplan.ir.symbols import Expr
from autoplan.ops.record import Linear, OpKind, OpRecord, Trait
from autoplan.ops.strategies import Strategy, axis_choices
from autoplan.ops.table import ATEN, RECORDS, flops, merged_records, rule_for
from autoplan.runtime import in_parts
from experiments.shared.op_parity import (
    MESHES,
    Reference,
    check_types,
    convert,
    ranks,
    run,
    strategies_of,
    text_of,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.distributed._functional_collectives.*:FutureWarning")

GROUPS: dict[str, list[Case]] = {}
for _case in CASES:
    GROUPS.setdefault(_case.op, []).append(_case)


def test_every_op_has_a_rule_an_emitter_and_a_case() -> None:
    # experts are priced, not executed yet: tests/capture/test_experts.py runs their rule in plain torch
    executed = {name for name, r in RECORDS.items() if r.build is not None}
    assert executed == {name for name, r in RECORDS.items() if r.emit is not None and (r.saved or r.saved_form)}
    assert executed == set(GROUPS) | {"experts"}
    for name in set(RECORDS) - executed:  # as captured, or work outside of the graph
        assert RECORDS[name].aten or RECORDS[name].kind is OpKind.UPDATE
    for record in RECORDS.values():
        assert (record.kind is OpKind.VIEW) == (record.strides is not None)
        assert record.linear is Linear.NO or record.build is not None


def test_a_name_is_given_once() -> None:
    silu = RECORDS["silu"]
    for again in (silu, OpRecord("swish", OpKind.ELEMENTWISE, aten=silu.aten)):
        with pytest.raises(RuleError, match=r"silu.* is given twice: in the records of 'silu' and "):
            merged_records([*RECORDS.values(), again])
    assert merged_records(RECORDS.values()) == RECORDS and set(ATEN) > set(silu.aten)


def test_traits_of_written_out_modules() -> None:
    """Which ops a written-out norm consists of, and what a cast is: names that other modules no longer know."""
    of = {t: {name for name, r in RECORDS.items() if t in r.traits} for t in Trait}
    assert of[Trait.ROOT] == {"rsqrt"} and of[Trait.CAST] == {"to"}
    assert of[Trait.RANDOM] == {"dropout", "draw", "dropped_attention"}
    assert of[Trait.SQUARE] < of[Trait.VARIANCE] and of[Trait.ACTIVATION] < of[Trait.POINTWISE]
    assert all(of.values())


def test_an_unknown_op_says_which_line_to_write() -> None:
    node = Node("n", "bitshift", ("x",), ("y",), source="model.py:12")
    values = {n: Value(n, (Expr.symbol("b"),), "float32", True) for n in "xy"}
    with pytest.raises(RuleError, match=re.escape("model.py:12")) as error:
        rule_for(node, values)
    assert "add one to a family in autoplan/ops" in str(error.value) and "_unary('bitshift', " in str(error.value)
    with pytest.raises(RuleError, match="no record"), ranks(MESHES["2"], FACTORS) as (_, ctx):
        text_of(replace(GROUPS["silu"][0], op="bitshift"), strategies_of(GROUPS["silu"][0], MESHES["2"])[0], ctx)


def _cases(mesh: str) -> list[object]:
    slow = [] if mesh == "2" else [pytest.mark.slow]
    return [pytest.param(mesh, op, marks=slow, id=f"{mesh}-{op}") for op in GROUPS]


@pytest.mark.parametrize(("mesh_name", "op"), [p for m in MESHES for p in _cases(m)])
def test_every_strategy_computes_the_op(mesh_name: str, op: str) -> None:
    """Numbers: forward and gradients on simulated ranks."""
    axes = MESHES[mesh_name]
    with ranks(axes, FACTORS) as (mesh, ctx):
        for c in GROUPS[op]:
            reference = Reference(c)
            for strategy in strategies_of(c, axes):
                run(reference, strategy, mesh, ctx)


@pytest.mark.parametrize("mesh_name", ["2", "2x2"])
def test_every_strategy_type_checks(mesh_name: str) -> None:
    """The types of rules and runtime agree: spmd_types infers the output types that the strategy states."""
    axes = MESHES[mesh_name]
    register_local_autograd_function(in_parts._Attention)  # of this rank's heads and rows: it communicates nothing
    with ranks(axes, FACTORS) as (mesh, ctx):
        for c in CASES:
            for strategy in strategies_of(c, axes):
                try:
                    check_types(c, strategy, ctx, mesh)
                except (SpmdTypeError, AssertionError) as exc:
                    raise AssertionError(f"{c.name} under {strategy.name}: {text_of(c, strategy, ctx)}") from exc


# The ways to run an op on one sub-axis, written down: the search must not lose one, nor win one by accident.
# `+` joins the inputs, `->` the output; b never splits here.
EXPECTED = {
    "linear(b, s, hidden; out, hidden)": "R+R->R I+I->I S(1.0)+R->S(1.0) S(2.0)+S(1.0)->P R+S(0.0)->S(2.0)",
    "linear(b, s, hidden; hidden, hidden)": "R+R->R I+I->I S(1.0)+R->S(1.0) S(2.0)+S(1.0)->P R+S(0.0)->S(2.0)",
    "add(b, s, kv group head; kv group head)": (
        "R+R->R I+I->I S(1.0)+R->S(1.0) S(2.0)+S(0.0)->S(2.0) S(2.1)+S(0.1)->S(2.1) S(2.2)+S(0.2)->S(2.2) P+P->P"
    ),
    "mul(b, s, kv group head; b, s, 1)": (
        "R+R->R I+I->I S(1.0)+S(1.0)->S(1.0) S(2.0)+R->S(2.0) S(2.1)+R->S(2.1) S(2.2)+R->S(2.2) P+R->P R+P->P"
    ),
    "div([]; const: [])": "R+R->R I+R->I P+R->P",
    "silu(b, s, kv group head)": "R->R I->I S(1.0)->S(1.0) S(2.0)->S(2.0) S(2.1)->S(2.1) S(2.2)->S(2.2)",
    "layer_norm(b, s, hidden; hidden; hidden) eps=1e-06 weight=True bias=True": (
        "R+R+R->R I+I+I->I S(1.0)+R+R->S(1.0)"
    ),
    "embedding(vocab, hidden; int16: b, s) padding_idx=-1": (
        "R+R->R I+R->I S(0.0)+R->P S(1.0)+R->S(2.0) R+S(1.0)->S(1.0)"
    ),
    "embedding(two minor, hidden; int16: b s) padding_idx=-1": (
        "R+R->R I+R->I S(0.0)+R->P S(1.0)+R->S(1.0) R+S(0.1)->S(0.1)"
    ),
    "cross_entropy_sum(b s, vocab; target16: b s) ignore_index=-100 label_smoothing=0.0": (
        "R+R->R I+R->I S(0.1)+S(0.1)->P S(1.0)+R->I"
    ),
    "attention(b, kv group, s, head; b, kv, s, head; b, kv, s, head) causal=True scale=None": (
        "R+R+R->R I+I+I->I S(1.0)+S(1.0)+S(1.0)->S(1.0) S(1.1)+R+R->S(1.1)"
    ),
    "mean(b, s, kv group head) dims=(-1,) keepdim=True": (
        "R->R I->I S(1.0)->S(1.0) S(2.0)->P S(2.1)->P S(2.2)->P P->P"
    ),
    "cat(b, s, head; const: b, s, head) dim=2": "R+R->R I+R->I S(1.0)+S(1.0)->S(1.0) P+P->P",
    "masked_fill(b, s, kv group head; bool: s, 1) scalar=-2.0": (
        "R+R->R I+R->I S(1.0)+S(0.0)->S(1.0) S(2.0)+R->S(2.0) S(2.1)+R->S(2.1) S(2.2)+R->S(2.2)"
    ),
    "eq(b, s, kv group head; b, s, 1)": (
        "R+R->R I+I->R S(1.0)+S(1.0)->S(1.0) S(2.0)+R->S(2.0) S(2.1)+R->S(2.1) S(2.2)+R->S(2.2)"
    ),
    "arange() start=0 end=s dtype=int64": "->R",
}


@pytest.mark.parametrize("name", EXPECTED)
def test_the_choices_of_an_op_are_these(name: str) -> None:
    c = next(c for c in CASES if c.name == name)
    found = [
        f"{'+'.join(map(str, x.inputs))}->{'+'.join(map(str, x.outputs))}"
        for x in axis_choices(c.node, c.values, FACTORS)
        if x.factor is None or "b" not in FACTORS[x.factor].symbols
    ]
    assert sorted(found) == sorted(EXPECTED[name].split())
    assert len({s.name for s in strategies_of(c, MESHES["2"])}) == len(strategies_of(c, MESHES["2"]))


def test_small_factors_mix_with_others_and_large_ones_do_not() -> None:
    attention = GROUPS["attention"][0]
    assert [s.name for s in strategies_of(attention, MESHES["4"])] == ["R", "I", "S(group)"]  # two key-value heads
    names = {s.name: s for s in strategies_of(attention, MESHES["2x2"])}
    assert list(names) == ["R", "I", "S(kv)xR", "S(kv)xI", "S(kv)xS(group)", "S(group)"]
    assert names["S(kv)xS(group)"].num_shards == 4 and names["S(kv)xR"].num_shards == 2
    linear = next(c for c in CASES if c.name == "linear(b, s, hidden; kv group head, hidden)")
    assert "S(s)xS(hidden)" not in {s.name for s in strategies_of(linear, MESHES["2x2"])}


def test_flops_count_multiply_adds() -> None:
    def count(name: str) -> float:
        c = next(c for c in CASES if c.name == name)
        return float(flops(c.node, c.values, rule_for(c.node, c.values)).evaluate({"b": 2, "s": 8}))

    assert count("linear(b, s, hidden; out, hidden)") == 2 * 2 * 8 * 8 * 12
    assert count("matmul(b, heads, s, head; b, heads, head, keys)") == 2 * 2 * 4 * 8 * 4 * 4
    # scores and values, half of them under a causal mask
    attention = "attention(b, kv group, s, head; b, kv, s, head; b, kv, s, head) causal={} scale={}"
    assert count(attention.format(False, 0.3)) == 2 * (2 * 2 * 8 * 8 * 8 * 4)
    assert count(attention.format(True, None)) == count(attention.format(False, 0.3)) / 2
    assert count("silu(b, s, kv group head)") == 2 * 8 * 32


# ---------------------------------------------------------------------------------------------------------------------
# Negative controls: the harness sees a wrong rule.


def _strategy(c: Case, name: str, mesh: str = "2") -> Strategy:
    return next(s for s in strategies_of(c, MESHES[mesh]) if s.name == name)


LINEAR = next(c for c in CASES if c.name == "linear(b, s, hidden; out, hidden)")
BIAS = next(c for c in CASES if c.name == "add(b, s, kv group head; kv group head)")
MEAN = next(c for c in CASES if c.name == "mean(b, s, kv group head) dims=(-1,) keepdim=True")
NORM = next(c for c in CASES if c.name.startswith("layer_norm(b, s, hidden; hidden; hidden)"))
EMBED = next(c for c in CASES if c.name == "embedding(two minor, hidden; int16: b s) padding_idx=-1")
WRONG: dict[str, tuple[Case, str, dict[str, object], str | None]] = {
    "partial claimed replicated": (LINEAR, "S(hidden)", {"outputs": ((R,),)}, None),
    "partial claimed invariant": (LINEAR, "S(hidden)", {"outputs": ((I,),)}, None),
    "shard claimed replicated": (LINEAR, "S(out)", {"outputs": ((R,),)}, None),
    "shard of another dim": (LINEAR, "S(out)", {"outputs": ((shard(1),),)}, None),
    "replicated claimed partial": (LINEAR, "R", {"outputs": ((P,),)}, None),
    "replicated claimed invariant: its gradient is a sum": (LINEAR, "S(out)", {"inputs": ((I,), (shard(0),))}, None),
    "invariant claimed replicated: its gradient is not a sum": (LINEAR, "I", {"inputs": ((R,), (R,))}, None),
    "weight not cut": (LINEAR, "S(out)", {"inputs": ((R,), (R,))}, None),
    "a bias added on every rank": (BIAS, "P", {"inputs": ((P,), (R,))}, None),
    "mean of a shard without the division": (MEAN, "S(group)", {}, "x0.mean(-1, keepdim=True)"),
    "partial through what is not linear": (GROUPS["gelu"][0], "R", {"inputs": ((P,),), "outputs": ((P,),)}, None),
    "a split normalised dim": (
        NORM, "R", {"inputs": ((shard(2),), (shard(0),), (shard(0),)), "outputs": ((shard(2),),)}, None
    ),
    "a minor factor of the vocabulary": (
        EMBED, "S(two)", {"inputs": ((shard(0, 1),), (R,))}, "vocab_parallel_embedding(x1, x0, 'tp')"
    ),
    "another shard of the same shape": (
        next(c for c in CASES if c.name == "reshape(b, s, kv group head)"), "S(kv)", {"inputs": ((shard(2, 1),),)}, None
    ),
}  # fmt: skip


@pytest.mark.parametrize("control", WRONG)
def test_a_wrong_rule_is_caught(control: str) -> None:
    c, name, changes, text = WRONG[control]
    right = _strategy(c, name)
    with ranks(MESHES["2"], FACTORS) as (mesh, ctx):
        reference = Reference(c)
        run(reference, right, mesh, ctx)
        with pytest.raises((AssertionError, RuntimeError)):
            run(reference, replace(right, **changes), mesh, ctx, text)  # type: ignore[arg-type]


def test_a_wrong_emitter_is_caught() -> None:
    wrong = replace(MEAN, ref=lambda x: x.mean(1, keepdim=True))
    with pytest.raises(AssertionError, match="is not plain torch"):
        Reference(wrong)


# ---------------------------------------------------------------------------------------------------------------------
# Conversions.

VALUE = case("clone", ["s, kv group, head"], "s, kv group, head", None).values["x0"]
TYPES: list[AxisType] = [R, I, P, shard(0), shard(1, 0), shard(1, 1), shard(2)]


def test_the_text_and_the_gradient_of_a_type() -> None:
    assert [str(t) for t in TYPES] == ["R", "I", "P", "S(0.0)", "S(1.0)", "S(1.1)", "S(2.0)"]
    assert [t.gradient() for t in TYPES] == [P, I, R, *TYPES[3:]]


@pytest.mark.parametrize("mesh_name", ["2", "4"])
def test_conversions_on_one_axis(mesh_name: str) -> None:
    """All pairs but R -> I and S -> P, which are not conversions of this algebra."""
    size = MESHES[mesh_name][0].size
    kinds = [t for t in TYPES if not t.is_shard or SETTING.sizes[VALUE.dims[t.dim][t.factor]] % size == 0]  # type: ignore[index]
    with ranks(MESHES[mesh_name], FACTORS) as (mesh, ctx):
        for a, b in itertools.product(kinds, kinds):
            impossible = (a is R and b is I) or (a.is_shard and b is P)
            assert (conversion((a,), (b,)) is None) == impossible, (a, b)
            if not impossible:
                convert(VALUE, (a,), (b,), mesh, ctx, ENV)


def test_conversions_on_one_axis_of_the_size_of_the_outer_factor() -> None:
    """[kv group] over 2 with 2 kv heads: the outer factor is 1 on every rank."""
    with ranks(MESHES["2"], FACTORS) as (mesh, ctx):
        for value in (VALUE, case("clone", ["two kv, kv two"], "two kv, kv two", None).values["x0"]):
            kinds = [shard(d, f) for d, dim in enumerate(value.dims or ()) for f in range(len(dim))]
            for a, b in itertools.product(kinds, kinds):
                convert(value, (a,), (b,), mesh, ctx, ENV)


def _pairs() -> list[tuple[Layout, Layout]]:
    """Layouts of a value whose factors all divide by both sub-axes, but kv, which has only two."""
    layouts = [(a, b) for a in TYPES for b in TYPES if (a, b) != (shard(1, 0), shard(1, 0))]
    return [(a, b) for a in layouts for b in layouts]


@pytest.mark.parametrize("part", spread_out(range(4), 4))
def test_conversions_on_two_sub_axes(part: int) -> None:
    done = 0
    with ranks(MESHES["2x2"], FACTORS) as (mesh, ctx):
        for source, target in _pairs()[part::4]:
            if conversion(source, target) is not None:
                convert(VALUE, source, target, mesh, ctx, ENV)
                done += 1
    assert done > 300


def test_what_cannot_be_converted_on_two_sub_axes() -> None:
    """Only pairs with an impossible axis, or shards of one factor that would leave or arrive in the wrong order."""
    for source, target in _pairs():
        single = [conversion((a,), (b,)) for a, b in zip(source, target, strict=True)]
        nested = (
            any(x[0].is_shard and x[0] in (source[1], target[1]) for x in (source, target)) and source[0] != target[0]
        )
        if conversion(source, target) is None:
            assert None in single or nested, (source, target)
        else:
            assert None not in single
    s = shard(0)
    assert conversion((s, s), (R, s)) is None and conversion((R, s), (s, s)) is None
    assert [x.axes for x in conversion((s, s), (s, R)) or ()] == [(1,)]
    # what all sub-axes do alike is one collective over their product
    for a, b in [(P, R), (P, I), (P, s), (s, R), (s, I), (I, R), (I, s), (s, shard(2))]:
        assert [x.axes for x in conversion((a, a), (b, b)) or ()] == [(0, 1)], (a, b)


def test_a_wrong_conversion_is_caught() -> None:
    with ranks(MESHES["2"], FACTORS) as (mesh, ctx):
        for source, target, text in [
            ((P,), (R,), "x"),
            ((I,), (R,), "x"),
            ((R,), (P,), "x"),
            ((P,), (R,), "all_reduce(x, 'tp', dst=I)"),
            ((shard(1, 1),), (R,), "all_gather(x, 'tp', dim=1, dst=R)"),
            ((R,), (shard(1, 1),), "slice_(x, 'tp', dim=1, src=R)"),
        ]:
            convert(VALUE, source, target, mesh, ctx, ENV)
            with pytest.raises(AssertionError):
                convert(VALUE, source, target, mesh, ctx, ENV, text)
