"""The rule language, the reshape refinement, factor inference, and the plain-data graph underneath them."""

import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoplan.errors import GraphError, RuleError
from autoplan.ir.graph import Block, Call, ModelGraph, Node, Parameter, Value, check
from autoplan.ir.symbols import Expr, product
from autoplan.ops.factors import infer_factors, occurrences
from autoplan.ops.labels import align
from autoplan.ops.language import Role, bind, parse
from autoplan.ops.table import RECORDS, SPECIAL_OUTPUT, rule_for

B, S = Expr.symbol("b"), Expr.symbol("s")


def shape(*sizes: Expr | int) -> tuple[Expr, ...]:
    return tuple(Expr.of(size) for size in sizes)


# ---------------------------------------------------------------------------------------------------------------------
# Parsing.


def test_a_line_says_dims_roles_and_marks() -> None:
    t = parse("[*b,i] * [o,i] + [o] -> [*b,o]")
    assert [o.dims for o in t.inputs] == [(("*b",), ("i",)), (("o",), ("i",)), (("o",),)]
    assert [o.role for o in t.inputs] == [Role.MUL, Role.MUL, Role.ADD]
    t = parse("[b,kv g,s!,d!], #[b,kv] -> [b,kv g]")
    assert t.inputs[0].dims == (("b",), ("kv", "g"), ("s",), ("d",)) and t.whole == {"s", "d"}
    assert [o.role for o in t.inputs] == [Role.OTHER, Role.INDEX]
    t = parse("[v@vocab_embedding,h] * #[*b!] -> [*b,h]")
    assert t.special == {"v": "vocab_embedding"} and t.whole == {"*b"}
    assert [o.role for o in t.inputs] == [Role.MUL, Role.INDEX]
    assert parse("~[*a] -> []").inputs[0].role is Role.LINEAR and parse("[] -> []").outputs[0].dims == ()


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("[a] [a]", "no '->'"),
        ("[a] / [b] -> [a]", "/"),
        ("[a] [b] -> [a]", "[b]"),
        ("* [a] -> [a]", "* [a]"),
        ("[a -> [a]", "[a"),
        ("[[a]] -> [a]", "[["),
        ("x[a] -> [a]", "x"),
        ("[a] -> [a] tail", "tail"),
        ("[a,,b] -> [a]", "empty dim"),
        ("[a,] -> [a]", "empty dim"),
        ("[a-b] -> [a]", "a-b"),
        ("[A] -> [A]", "'A'"),
        ("[a@] -> [a]", "a@"),
        ("[a *b] -> [a]", "any number of dims into one"),
        ("[*a,*b] -> [*a]", "two labels for any number"),
        ("[a] -> ", "after '->'"),
        ("[a] -> ~[a]", "after '->'"),
        ("[a] -> [a] + [b]", "after '->'"),
    ],
)
def test_a_malformed_line_is_refused_with_what_cannot_be_read(line: str, word: str) -> None:
    with pytest.raises(RuleError) as error:
        parse(line)
    assert word in str(error.value) and repr(line) in str(error.value)


def test_every_line_of_the_table_reads() -> None:
    lines = [r.rule for r in RECORDS.values() if isinstance(r.rule, str)]
    assert len(lines) > 50
    for line in lines:
        template = parse(line)
        assert set(template.special.values()) <= set(SPECIAL_OUTPUT)
        labels = {label for operand in (*template.inputs, *template.outputs) for dim in operand.dims for label in dim}
        assert template.whole <= labels and set(template.special) <= labels


# ---------------------------------------------------------------------------------------------------------------------
# Binding.


def test_a_star_takes_the_leading_dims_and_broadcasts() -> None:
    rule = bind(parse("[*a] + [*a] -> [*a]"), [shape(B, S, 8), shape(S, 1)], [shape(B, S, 8)])
    assert rule.inputs == ((("a0",), ("a1",), ("a2",)), (("a1",), ()))
    assert rule.outputs == ((("a0",), ("a1",), ("a2",)),)
    # the shorter operand first: labels count from the longest
    rule = bind(parse("[*a], [*a] -> [*a]"), [shape(8), shape(B, 8)], [shape(B, 8)])
    assert rule.inputs == ((("a1",),), (("a0",), ("a1",)))
    rule = bind(parse("[*b!,i] -> [*b,i]"), [shape(2, 3, 4)], [shape(2, 3, 4)])
    assert rule.whole >= {"b0", "b1"} and "i" not in rule.whole
    assert bind(parse("[*b,i] * [o,i] -> [*b,o]"), [shape(4), shape(6, 4)], [shape(6)]).inputs[0] == (("i",),)


def test_a_dim_of_size_one_has_no_label() -> None:
    rule = bind(parse("[*b,i] * [o,i] -> [*b,o]"), [shape(B, 1, 1), shape(8, 1)], [shape(B, 1, 8)])
    assert rule.inputs == ((("b0",), (), ()), (("o",), ())) and rule.outputs == ((("b0",), (), ("o",)),)
    assert rule.labels == ("b0", "o") and not rule.contracted("o") and not rule.contracted("i")


def test_contraction_is_a_label_without_output() -> None:
    rule = bind(parse("[*b,i] * [o,i] -> [*b,o]"), [shape(B, 4), shape(8, 4)], [shape(B, 8)])
    assert [rule.contracted(label) for label in ("b0", "i", "o")] == [False, True, False]


@pytest.mark.parametrize(
    ("ins", "outs"),
    [
        ([shape(4)], [shape(2, 3)]),  # a weight of one dim
        ([shape(), shape(6, 4)], [shape(6)]),  # nothing to contract
        ([shape(4), shape(6, 4), shape(6)], [shape(6)]),  # one operand too many
        ([shape(4), shape(6, 4)], [shape(6), shape(6)]),
    ],
)
def test_operands_that_do_not_fit_are_refused(ins: list[Any], outs: list[Any]) -> None:
    line = "[*b,i] * [o,i] -> [*b,o]"
    with pytest.raises(RuleError) as error:
        bind(parse(line), [ins[0], *ins[1:]] if len(ins) > 1 else [shape(3, 4), ins[0]], outs)
    assert line in str(error.value)


def test_trailing_operands_may_be_absent() -> None:
    rule = bind(parse(str(RECORDS["layer_norm"].rule)), [shape(B, S, 8), shape(8)], [shape(B, S, 8)])
    assert rule.inputs[1] == (("n",),) and rule.roles == (Role.OTHER, Role.OTHER) and rule.whole == {"n"}


# ---------------------------------------------------------------------------------------------------------------------
# Refining a reshape.

factor_sizes = st.lists(st.sampled_from([B, S, S + 1, *map(Expr.of, (2, 3, 4, 6, 7))]), min_size=1, max_size=6)


@st.composite
def grouped(draw: st.DrawFn) -> tuple[list[Expr], tuple[Expr, ...], tuple[Expr, ...]]:
    """Factors, and two shapes that group neighbouring ones, with dims of size 1 strewn in."""
    factors = draw(factor_sizes)

    def group() -> tuple[Expr, ...]:
        dims: list[Expr] = []
        current: list[Expr] = []
        for i, factor in enumerate(factors):
            current.append(factor)
            if i == len(factors) - 1 or draw(st.booleans()):
                dims.append(product(current))
                current = []
            if not current and draw(st.integers(0, 4)) == 0:
                dims.insert(draw(st.integers(0, len(dims))), Expr.of(1))
        return tuple(dims)

    return factors, group(), group()


@given(grouped())
def test_a_reshape_of_products_is_refined(case: tuple[list[Expr], tuple[Expr, ...], tuple[Expr, ...]]) -> None:
    factors, left, right = case
    found = align(left, right)
    assert found is not None
    for dims, labels in ((left, found.left), (right, found.right)):
        assert len(labels) == len(dims)
        for size, mine in zip(dims, labels, strict=True):
            assert product([found.sizes[label] for label in mine]) == size and (size.value != 1) == bool(mine)
    # both sides list every label once, in the same order: a reshape keeps the order of the elements
    flat = [label for dim in found.left for label in dim]
    assert flat == [label for dim in found.right for label in dim] == list(found.sizes)
    assert product(list(found.sizes.values())) == product(factors)
    # as coarse as possible: two neighbours that share a dim on one side are apart on the other
    for a, b in itertools.pairwise(flat):
        assert not all(any(a in dim and b in dim for dim in side) for side in (found.left, found.right))


@given(grouped())
def test_refining_does_not_depend_on_the_direction(
    case: tuple[list[Expr], tuple[Expr, ...], tuple[Expr, ...]],
) -> None:
    _, left, right = case
    forth, back = align(left, right), align(right, left)
    assert forth is not None and back is not None
    assert (forth.left, forth.right, forth.sizes) == (back.right, back.left, back.sizes)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (shape(6, 4), shape(8, 3)),
        (shape(B, S), shape(S, B)),
        (shape(4), shape(2)),
        (shape(2), shape(2, 2)),
        (shape(S + 1), shape(S)),
    ],
)
def test_other_reshapes_have_no_refinement(left: tuple[Expr, ...], right: tuple[Expr, ...]) -> None:
    assert align(left, right) is None


def test_a_reshape_without_refinement_stays_whole() -> None:
    node = Node("view", "reshape", ("x",), ("y",))
    values = {"x": Value("x", shape(6, 4), "float32", True), "y": Value("y", shape(8, 3), "float32", True)}
    rule = rule_for(node, values)
    assert rule.whole == set(rule.labels) and len(rule.labels) == 4


# ---------------------------------------------------------------------------------------------------------------------
# Graphs by hand.


def value(name: str, *sizes: Expr | int, dtype: str = "float32", grad: bool = True) -> Value:
    return Value(name, shape(*sizes), dtype, grad)


def block(name: str, values: list[Value], nodes: list[Node], inputs: str, params: str, outputs: str) -> Block:
    return Block(
        name,
        tuple(inputs.split()),
        tuple(params.split()),
        (),
        tuple(outputs.split()),
        tuple(nodes),
        {v.name: v for v in values},
    )


def node(op: str, inputs: str, outputs: str, **attrs: Any) -> Node:
    return Node(outputs.split()[0], op, tuple(inputs.split()), tuple(outputs.split()), attrs, source="model.py:7")


def parameter(name: str, *sizes: int) -> Parameter:
    return Parameter(name, sizes, "float32", True)


def attention_graph(heads: int = 4, kv: int = 2, hidden: int = 16, rows: int | None = None) -> ModelGraph:
    """Projections, views to heads, attention, back to the residual; two calls and a head tied to the embedding."""
    width, small = heads * 8, kv * 8
    layer = block(
        "layer",
        [
            value("x", B, S, hidden),
            value("wq", width, hidden),
            value("wk", small, hidden),
            value("wo", hidden, rows or width),
            value("q", B, S, width),
            value("k", B, S, small),
            value("q4", B, S, heads, 8),
            value("k4", B, S, kv, 8),
            value("qt", B, heads, S, 8),
            value("kt", B, kv, S, 8),
            value("a", B, heads, S, 8),
            value("at", B, S, heads, 8),
            value("flat", B, S, width),
            value("o", B, S, hidden),
            value("y", B, S, hidden),
        ],
        [
            node("linear", "x wq", "q"),
            node("linear", "x wk", "k"),
            node("reshape", "q", "q4"),
            node("reshape", "k", "k4"),
            node("transpose", "q4", "qt", dim0=1, dim1=2),
            node("transpose", "k4", "kt", dim0=1, dim1=2),
            node("attention", "qt kt kt", "a", causal=True, scale=None),
            node("transpose", "a", "at", dim0=1, dim1=2),
            node("reshape", "at", "flat"),
            node("linear", "flat wo", "o"),
            node("add", "x o", "y"),
        ],
        "x",
        "wq wk wo",
        "y",
    )
    embed = block(
        "embed",
        [value("ids", B, S, dtype="int64", grad=False), value("table", 32, hidden), value("h", B, S, hidden)],
        [node("embedding", "table ids", "h", padding_idx=-1)],
        "ids",
        "table",
        "h",
    )
    head = block(
        "head",
        [
            value("h", B, S, hidden),
            value("w", 32, hidden),
            value("target", B * S, dtype="int64", grad=False),
            value("logits", B, S, 32),
            value("rows", B * S, 32),
            value("loss"),
        ],
        [
            node("linear", "h w", "logits"),
            node("reshape", "logits", "rows"),
            node("cross_entropy_sum", "rows target", "loss", ignore_index=-100, label_smoothing=0.0),
        ],
        "h target",
        "w",
        "loss",
    )
    blocks = {"embed": embed, "layer": layer, "head": head}
    local = {"wq": "wq", "wk": "wk", "wo": "wo"}
    calls = [Call("embed", "embed", ("ids",), ("h0",), {"table": "table"}, {})]
    for i in range(2):
        calls.append(
            Call(
                f"layers.{i}", "layer", (f"h{i}",), (f"h{i + 1}",), {k: f"layers.{i}.{v}" for k, v in local.items()}, {}
            )
        )
    calls.append(Call("head", "head", ("h2", "target"), ("loss",), {"w": "table"}, {}))
    sizes = {"wq": (width, hidden), "wk": (small, hidden), "wo": (hidden, rows or width)}
    params = {"table": Parameter("table", (32, hidden), "float32", True, ("head.weight",))}
    params |= {f"layers.{i}.{n}": parameter(f"layers.{i}.{n}", *size) for i in range(2) for n, size in sizes.items()}
    values = [
        value("ids", B, S, dtype="int64", grad=False),
        value("target", B * S, dtype="int64", grad=False),
        *(value(f"h{i}", B, S, hidden) for i in range(3)),
        value("loss"),
    ]
    return ModelGraph(
        "by_hand",
        ("ids", "target"),
        "loss",
        {v.name: v for v in values},
        blocks,
        tuple(calls),
        params,
        {},
        "tokens",
        "target",
    )


def test_factors_travel_from_views_to_weights_and_across_blocks() -> None:
    graph = infer_factors(attention_graph())
    layer, head = graph.blocks["layer"].values, graph.blocks["head"].values
    assert layer["wq"].dims == (("kv", "group", "head"), ("hidden",))
    assert layer["wk"].dims == (("kv", "head"), ("hidden",)) or layer["wk"].dims == (("kv", "head2"), ("hidden",))
    assert layer["wo"].dims is not None and layer["wo"].dims[1][:2] == ("kv", "group")
    assert layer["x"].dims == layer["y"].dims == (("b",), ("s",), ("hidden",)) == graph.values["h2"].dims
    assert head["w"].dims == (("vocab",), ("hidden",)) == graph.blocks["embed"].values["table"].dims
    assert head["rows"].dims == (("b", "s"), ("vocab",)) and head["loss"].dims == ()
    assert graph.values["target"].dims == (("b", "s"),)
    assert graph.factor_sizes({"b": 2, "s": 8})["kv"] == 2 and graph.factors["b"] == B
    assert infer_factors(graph) == graph
    assert str(graph).startswith("model by_hand:") and "float32[kv group head, hidden]" in str(graph)
    # as many key-value heads as heads: no group; one key-value head: only a group
    dims = infer_factors(attention_graph(kv=4)).blocks["layer"].values["wq"].dims
    assert dims is not None and dims[0][0] == "kv" and len(dims[0]) == 2
    dims = infer_factors(attention_graph(kv=1)).blocks["layer"].values["wq"].dims
    assert dims is not None and dims[0][0] == "group" and len(dims[0]) == 2


def test_a_fused_projection_splits_into_chunks_heads_and_head() -> None:
    values = [
        value("x", B, S, 16),
        value("w", 96, 16),
        value("qkv", B, S, 96),
        *(value(n, B, S, 32) for n in "qkv"),
        value("q4", B, S, 4, 8),
        value("y", B, S, 32),
    ]
    nodes = [
        node("linear", "x w", "qkv"),
        Node("c", "chunk", ("qkv",), ("q", "k", "v"), {"dim": -1}),
        node("reshape", "q", "q4"),
        node("mul", "k v", "y"),
    ]
    one = block("one", values, nodes, "x", "w", "y")
    top = {"x": value("x", B, S, 16), "y": value("y", B, S, 32)}
    call = Call("one", "one", ("x",), ("y",), {"w": "w"}, {})
    graph = infer_factors(ModelGraph("m", ("x",), "y", top, {"one": one}, (call,), {"w": parameter("w", 96, 16)}, {}))
    dims = graph.blocks["one"].values["w"].dims
    assert dims is not None and [graph.factors[f].value for f in dims[0]] == [3, 4, 8]
    assert dims[0][0] == "chunks" and graph.values["y"].dims == (("b",), ("s",), dims[0][1:])
    rule = rule_for(nodes[1], graph.blocks["one"].values)
    values_of = [graph.blocks["one"].values[n] for n in ("qkv", "q", "k", "v")]
    places = occurrences(rule, values_of, graph.factors)
    assert [(p.operand, p.start, p.count) for p in places["rest"]] == [(0, 1, 2), (1, 0, 2), (2, 0, 2), (3, 0, 2)]


def test_factors_that_cannot_be_named_are_refused() -> None:
    with pytest.raises(RuleError, match=r"linear at model\.py:7: dim 1 of wo \(24\)"):
        infer_factors(attention_graph(rows=24))
    graph = attention_graph()
    target = replace(graph.values["target"], shape=shape(S * B + 1))
    with pytest.raises(GraphError, match="call head, target"):
        infer_factors(replace(graph, values={**graph.values, "target": target}))
    with pytest.raises(GraphError, match="run infer_factors"):
        occurrences(
            rule_for(graph.blocks["layer"].nodes[0], graph.blocks["layer"].values), list(graph.values.values())[:3], {}
        )


# ---------------------------------------------------------------------------------------------------------------------
# The graph as text.


NOT_OF_PLANS = ("evaluation", "no_evaluation", "no_sequence")  # of a graph


def variants(obj: Any) -> Iterator[Any]:
    """The object with one thing changed, for every thing that counts in a comparison and in the hash of a graph."""
    if isinstance(obj, bool):
        yield not obj
    elif isinstance(obj, str):
        yield f"{obj}_"
    elif isinstance(obj, (int, float, Expr)):
        yield obj + 1
    elif obj is None:
        yield "something"
    elif isinstance(obj, Mapping):
        for key, old in obj.items():
            yield {k: v for k, v in obj.items() if k != key}
            yield {(f"{key}_" if k == key else k): v for k, v in obj.items()}
            for new in variants(old):
                yield {**obj, key: new}
    elif isinstance(obj, tuple):
        for i, old in enumerate(obj):
            yield obj[:i] + obj[i + 1 :]
            for new in variants(old):
                yield (*obj[:i], new, *obj[i + 1 :])
    else:
        for field in (each for each in dataclasses.fields(obj) if each.compare and each.name not in NOT_OF_PLANS):
            for new in variants(getattr(obj, field.name)):
                yield replace(obj, **{field.name: new})


def tiny() -> ModelGraph:
    """Everything a graph can hold, once."""
    attrs = {"scale": 0.5, "dims": (1, -1), "causal": True, "none": None, "size": S * 2, "word": "tanh"}
    x = Value("x", shape(B, 4), "float32", True, (("b",), ("f",)))
    w = Value("w", shape(4), "float32", True, (("f",),))
    c = Value("c", shape(4), "float32", False, (("f",),))
    y = replace(x, name="y")
    mul = Node("n", "mul", ("x", None, "w"), ("y",), attrs, "mlp", "a.py:3")
    one = Block("one", ("x",), ("w",), ("c",), ("y",), (mul,), {"x": x, "w": w, "c": c, "y": y})
    call = Call("one", "one", ("x",), ("y",), {"w": "full.w"}, {"c": "full.c"})
    return ModelGraph(
        "tiny", ("x",), "y", {"x": x, "y": y}, {"one": one}, (call,),
        {"full.w": Parameter("full.w", (4,), "float32", True, ("alias",))},
        {"full.c": Parameter("full.c", (4,), "float32", False)},
        "samples", "x", -1, {"b": B, "f": Expr.of(4)},
    )  # fmt: skip


def test_the_text_reads_back() -> None:
    for graph in (tiny(), attention_graph(), infer_factors(attention_graph())):
        again = ModelGraph.from_json(graph.to_json())
        assert again == graph and again.to_json() == graph.to_json() and again.content_hash == graph.content_hash
    attrs = ModelGraph.from_json(tiny().to_json()).blocks["one"].nodes[0].attrs
    assert {k: type(v) for k, v in attrs.items()} == {
        k: type(v) for k, v in tiny().blocks["one"].nodes[0].attrs.items()
    }
    with pytest.raises(GraphError, match="not plain data"):
        bad = replace(tiny().blocks["one"].nodes[0], attrs={"x": object()})
        replace(tiny(), blocks={"one": replace(tiny().blocks["one"], nodes=(bad,))}).to_json()


def test_the_hash_changes_when_anything_changes() -> None:
    graph = tiny()
    hashes = [g.content_hash for g in variants(graph)]
    assert len(hashes) > 150
    assert len({graph.content_hash, *hashes}) == len(hashes) + 1
    # but not with the order of dictionaries, and not from run to run
    turned = replace(graph, factors=dict(reversed(graph.factors.items())))
    assert turned.content_hash == graph.content_hash == tiny().content_hash
    # nor with the positions that a config names, which are a note for users
    assert replace(graph, positions=4096).content_hash == graph.content_hash
    # nor with the graph of its evaluation
    more = replace(graph, evaluation=tiny(), no_evaluation="why", no_sequence="why")
    assert more.content_hash == graph.content_hash
    kinds = [1, 1.0, True, "1", None, Expr.of(1)]
    one = graph.blocks["one"]
    seen = {
        replace(graph, blocks={"one": replace(one, nodes=(replace(one.nodes[0], attrs={"a": k}),))}).content_hash
        for k in kinds
    }
    assert len(seen) == len(kinds)


def test_a_graph_with_one_change_is_refused_or_still_consistent() -> None:
    """The checker never fails in another way, and catches what is not a label, an attribute or a flag."""
    refused = total = 0
    for graph in variants(tiny()):
        total += 1
        try:
            check(graph)
        except GraphError:
            refused += 1
    print(refused, total)
    assert refused > total // 3


def test_text_of_another_version_or_broken_graph_is_refused() -> None:
    data = json.loads(tiny().to_json())
    with pytest.raises(GraphError, match="schema 99"):
        ModelGraph.from_json(json.dumps({**data, "schema": 99}))
    data["graph"]["blocks"]["one"]["nodes"][0]["inputs"][0] = "ghost"
    with pytest.raises(GraphError, match="'ghost' before it is defined"):
        ModelGraph.from_json(json.dumps(data))


@pytest.mark.parametrize("text", ["", "+", "b+", "b--s", "b**s", "b s", "2/0", "1/2/3", "b*%", "(b)", "b^2"])
def test_malformed_sizes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="malformed size"):
        Expr.parse(text)


def test_sizes_read_as_people_write_them() -> None:
    assert Expr.parse(" 2*b * s - 1 ") == B * S * 2 - 1 and Expr.parse("-b") == B * -1
    assert Expr.parse("1/2*s").evaluate({"s": 6}) == 3
    assert B.divide(0) is None and Expr.of(0).divide(B) == Expr.of(0) and Expr.of(0).value == 0
    with pytest.raises(KeyError, match="s"):
        S.evaluate({"b": 1})
