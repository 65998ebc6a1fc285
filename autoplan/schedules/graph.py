"""Actions of a schedule as a graph: which action waits for which, and why a schedule never finishes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from autoplan.schedules.orders import Action, F, W

if TYPE_CHECKING:
    import networkx as nx

ActionResult = tuple[bool, int, int]  # what an action makes: (activations, not gradients; chunk; micro-batch)
ActionPlace = tuple[int, int]  # rank, position in its list


def needed_by(action: Action, last_chunk: int) -> ActionResult | None:
    """What an action waits for beside its rank; nothing if it is a forward of the first chunk."""
    kind, chunk, micro_batch, _ = action
    if kind is F:
        return (True, chunk - 1, micro_batch) if chunk else None
    if kind is W:
        return False, chunk, micro_batch
    return (True, chunk, micro_batch) if chunk == last_chunk else (False, chunk + 1, micro_batch)


def action_graph(table: Sequence[Sequence[Action]]) -> nx.DiGraph:
    """The actions of all ranks by (rank, position), with an edge from each to those that wait for it.

    An edge is labelled `rank` between actions that follow each other on a rank, else by what is handed on. What joined
    actions make is there when the last of them has ended. A node has `missing` if nothing makes what its action needs.
    """
    import networkx as nx  # of errors and tests: a search never asks

    graph = nx.DiGraph()
    makers: dict[ActionResult, ActionPlace] = {}
    for rank, row in enumerate(table):
        for at, action in enumerate(row):
            graph.add_node((rank, at), action=action)
            if at:
                graph.add_edge((rank, at - 1), (rank, at), waits="rank")
            if action.kind is not W:
                end = next((k for k in range(at, len(row)) if not row[k].joined), None)
                if end is not None:
                    makers[action.kind is F, action.chunk, action.micro_batch] = (rank, end)
    last_chunk = max((a.chunk for row in table for a in row), default=0)
    for place, action in list(graph.nodes(data="action")):
        wanted = needed_by(action, last_chunk)
        if wanted is None:
            continue
        if wanted in makers:
            graph.add_edge(makers[wanted], place, waits=shown(wanted))
        else:
            graph.nodes[place]["missing"] = shown(wanted)
    return graph


def shown(result: ActionResult) -> str:
    """A result by the action that makes it, as torch writes actions."""
    forward, chunk, micro_batch = result
    return f"{chunk}{'F' if forward else 'B'}{micro_batch}"


def deadlock(table: Sequence[Sequence[Action]]) -> str:
    """Why a schedule never finishes: a result that no action makes, or the circle of actions that wait for each other.

    Returns: clauses such as `1B0 comes after 1F1 on rank 1, 1F1 of rank 1 waits for 0F1 of rank 0`; "" for a schedule
        that finishes.
    """
    import networkx as nx

    graph = action_graph(table)
    missing = [(place, name) for place, name in graph.nodes(data="missing") if name is not None]
    if missing:
        (rank, at), name = missing[0]
        return f"nothing makes {name}, which {table[rank][at]} of rank {rank} waits for"
    try:
        circle = nx.find_cycle(graph)
    except nx.NetworkXNoCycle:
        return ""
    steps = []
    for before, after in reversed(circle):
        (rank, at), (other, position) = after, before
        if graph.edges[before, after]["waits"] == "rank":
            steps.append(f"{table[rank][at]} comes after {table[other][position]} on rank {rank}")
        else:
            steps.append(f"{table[rank][at]} of rank {rank} waits for {table[other][position]} of rank {other}")
    return ", ".join(steps)
