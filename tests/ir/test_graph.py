"""Symbolic sizes and the ModelGraph: algebra, text forms, checker, hash."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import models
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoplan.capture.export import capture
from autoplan.errors import GraphError
from autoplan.ir.graph import ModelGraph, check
from autoplan.ir.symbols import Expr, product
from autoplan.ops.factors import infer_factors

B, S = Expr.symbol("b"), Expr.symbol("s")

monomials = st.lists(st.sampled_from(["b", "s"]), max_size=3).map(lambda xs: tuple(sorted(xs)))
polynomials = st.dictionaries(monomials, st.integers(-6, 6), max_size=4).map(
    lambda d: sum((product([Expr.symbol(n) for n in m]) * c for m, c in d.items()), Expr.of(0))
)
environments = st.fixed_dictionaries({"b": st.integers(1, 7), "s": st.integers(1, 7)})


@given(polynomials, polynomials, environments)
def test_algebra_is_that_of_numbers(x: Expr, y: Expr, env: dict[str, int]) -> None:
    assert (x + y).evaluate(env) == x.evaluate(env) + y.evaluate(env)
    assert (x * y).evaluate(env) == x.evaluate(env) * y.evaluate(env)
    assert (x - y).evaluate(env) == x.evaluate(env) - y.evaluate(env)
    assert x + y == y + x and x * y == y * x


@given(polynomials, polynomials)
def test_division_is_exact_or_refused(x: Expr, y: Expr) -> None:
    quotient = x.divide(y)
    if quotient is not None:
        assert quotient * y == x
    if y.terms:
        assert (x * y).divide(y) == x


@given(polynomials)
def test_text_round_trip(x: Expr) -> None:
    assert Expr.parse(str(x)) == x
    half = x.scale(Fraction(1, 2))
    assert Expr.parse(str(half)) == half


def test_sizes() -> None:
    assert (B * S).divide(S) == B
    assert (S + 1).divide(2) is None
    assert (B * S - B).divide(B) == S - 1
    assert str(2 * B * S + 1) == "2*b*s+1"
    assert Expr.of(6).value == 6 and B.value is None
    with pytest.raises(ValueError, match="cannot read '%'"):
        Expr.parse("b*%")


@pytest.fixture(scope="module")
def graph() -> ModelGraph:
    return capture(
        models.make_gpt(num_layers=2),
        {k.replace("input_ids", "ids"): v for k, v in models.token_batch(2, 8).items()},
        models.gpt_loss,
    )


def test_json(graph: ModelGraph) -> None:
    assert ModelGraph.from_json(graph.to_json()) == graph
    with pytest.raises(GraphError, match="schema 99"):
        ModelGraph.from_json(json.dumps({"schema": 99, "graph": {}}))


def rename_output(g: ModelGraph) -> ModelGraph:
    return replace(g, output="nothing")


def undefined_input(g: ModelGraph) -> ModelGraph:
    block = g.blocks["layer"]
    first = replace(block.nodes[0], inputs=("nowhere", *block.nodes[0].inputs[1:]))
    return replace(g, blocks={**g.blocks, "layer": replace(block, nodes=(first, *block.nodes[1:]))})


def defined_twice(g: ModelGraph) -> ModelGraph:
    block = g.blocks["layer"]
    return replace(g, blocks={**g.blocks, "layer": replace(block, nodes=(*block.nodes, block.nodes[-1]))})


def wrong_factors(g: ModelGraph) -> ModelGraph:
    return replace(g, factors={**g.factors, "hidden": Expr.of(33)})


def unknown_factor(g: ModelGraph) -> ModelGraph:
    return replace(g, factors={k: v for k, v in g.factors.items() if k != "hidden"})


def missing_parameter(g: ModelGraph) -> ModelGraph:
    calls = tuple(replace(c, params=dict(list(c.params.items())[1:])) if c.block == "layer" else c for c in g.calls)
    return replace(g, calls=calls)


def other_shape(g: ModelGraph) -> ModelGraph:
    name = next(n for n in g.params if "qkv.weight" in n)
    return replace(g, params={**g.params, name: replace(g.params[name], shape=(1, 1))})


def unknown_block(g: ModelGraph) -> ModelGraph:
    return replace(g, calls=(replace(g.calls[0], block="elsewhere"), *g.calls[1:]))


def calls_out_of_order(g: ModelGraph) -> ModelGraph:
    return replace(g, calls=g.calls[::-1])


BREAKS: list[tuple[Callable[[ModelGraph], ModelGraph], str]] = [
    (rename_output, "output 'nothing' is not computed"),
    (undefined_input, "uses 'nowhere' before it is defined"),
    (defined_twice, "is defined twice"),
    (wrong_factors, "multiply to another size"),
    (unknown_factor, "unknown factor 'hidden'"),
    (missing_parameter, "does not bind exactly the parameters"),
    (other_shape, "has another shape than"),
    (unknown_block, "unknown block 'elsewhere'"),
    (calls_out_of_order, "before it is defined"),
]


@pytest.mark.parametrize(("break_it", "message"), BREAKS, ids=[f.__name__ for f, _ in BREAKS])
def test_checker_refuses(graph: ModelGraph, break_it: Callable[[ModelGraph], ModelGraph], message: str) -> None:
    check(graph)
    with pytest.raises(GraphError, match=message):
        check(break_it(graph))
    assert break_it(graph).content_hash != graph.content_hash


def test_a_graph_is_the_same_whatever_order_its_mappings_have(graph: ModelGraph) -> None:
    """As captured, as read from a file, and anyhow: a solver breaks ties by the order of what it is asked."""

    def order(g: ModelGraph) -> str:
        return repr(g)  # of its mappings, too

    read = ModelGraph.from_json(graph.to_json())
    assert order(read) == order(graph) == order(graph.in_order())
    blocks = {n: replace(b, values=dict(reversed(b.values.items()))) for n, b in reversed(graph.blocks.items())}
    turned = replace(graph, blocks=blocks, values=dict(reversed(graph.values.items())))
    assert repr(turned.blocks) != repr(graph.blocks) and turned == graph
    assert order(turned.in_order()) == order(infer_factors(turned).in_order()) == order(graph)
    assert list(graph.blocks) == list(dict.fromkeys(call.block for call in graph.calls))


def test_inference_is_stable(graph: ModelGraph) -> None:
    """Inferring again changes nothing; a size that is no whole number is refused."""
    assert infer_factors(graph) == graph
    with pytest.raises(GraphError, match="not a whole number"):
        replace(graph, factors={"half": S.scale(Fraction(1, 2))}).factor_sizes({"b": 2, "s": 7})
