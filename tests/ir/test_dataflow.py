"""What depends on what, and what is equal to what: against networkx."""

import networkx as nx
from hypothesis import given
from hypothesis import strategies as st

from autoplan.ir.dataflow import Classes, Dataflow

Steps = list[tuple[list[str], list[str]]]


@st.composite
def steps(draw: st.DrawFn) -> Steps:
    """Each step reads values of earlier ones and of inputs, and writes one or two."""
    out: Steps = []
    for i in range(draw(st.integers(1, 12))):
        known = ["x", "y", *(v for _, writes in out for v in writes)]
        reads = draw(st.lists(st.sampled_from(known), max_size=3))
        out.append((reads, [f"v{i}", f"w{i}"][: draw(st.integers(1, 2))]))
    return out


def graph_of(found: Steps) -> nx.DiGraph:
    graph = nx.DiGraph()
    graph.add_nodes_from(range(len(found)))
    for i, (_, writes) in enumerate(found):
        graph.add_edges_from((i, k) for k, (reads, _) in enumerate(found) if set(reads) & set(writes))
    return graph


@given(steps(), st.data())
def test_dataflow_is_that_of_networkx(found: Steps, data: st.DataObject) -> None:
    flow, graph = Dataflow(found), graph_of(found)
    at = data.draw(st.integers(0, len(found) - 1))
    assert flow.leading_to([at]) == nx.ancestors(graph, at)
    assert flow.following([at]) == nx.descendants(graph, at)
    chosen = data.draw(st.sets(st.integers(0, len(found) - 1)))
    parts = sorted(tuple(sorted(part)) for part in nx.weakly_connected_components(graph.subgraph(chosen)))
    assert flow.parts(chosen) == parts
    through = nx.ancestors(graph.subgraph({at, *chosen}), at)
    assert flow.leading_to([at], chosen.__contains__) - {at} == through
    spans = flow.spans()
    assert set(spans) == {v for _, writes in found for v in writes}
    for cut in range(1, len(found)):  # between steps: a value crosses it if an edge of its own does
        crossing = {v for v, (made, last) in spans.items() if made < cut <= last}
        made_before = {v for _, writes in found[:cut] for v in writes}
        assert crossing == made_before & {v for reads, _ in found[cut:] for v in reads}


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=12))
def test_classes_are_the_connected_parts(pairs: list[tuple[int, int]]) -> None:
    classes = Classes[int]()
    for a, b in pairs:
        classes.join(a, b)
        assert classes.find(a) == classes.find(b)
    found = classes.members()
    assert all(root in keys and all(classes.find(k) == root for k in keys) for root, keys in found.items())
    assert sorted(map(sorted, found.values())) == sorted(map(sorted, nx.connected_components(nx.Graph(pairs))))
    assert 3 in classes or all(3 not in pair for pair in pairs)


def test_the_second_of_two_classes_gives_the_representative() -> None:
    classes = Classes[str]()
    classes.join("a", "b")
    classes.join("b", "c")
    assert classes.find("a") == "c" and classes.members() == {"c": ["b", "a", "c"]}
