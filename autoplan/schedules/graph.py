"""The actions of a schedule as a graph: which action waits for which, and why a schedule never finishes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from autoplan.schedules.orders import Action, F, W

if TYPE_CHECKING:
    import networkx as nx

ActionResult = tuple[bool, int, int]  # the result of an action: (activations, not gradients; chunk; micro-batch)
ActionPlace = tuple[int, int]  # rank, position in its list


def needed_by(action: Action, last_chunk: int) -> ActionResult | None:
    """Return the result that an action waits for (besides its rank); None for a forward of the first chunk."""
    kind, chunk, micro_batch, _ = action
    if kind is F:
        return (True, chunk - 1, micro_batch) if chunk else None
    if kind is W:
        return False, chunk, micro_batch
    return (True, chunk, micro_batch) if chunk == last_chunk else (False, chunk + 1, micro_batch)


def action_graph(table: Sequence[Sequence[Action]]) -> nx.DiGraph[ActionPlace]:
    """Return the actions of all ranks as a graph.

    Nodes are (rank, position in the rank's list). An edge leads from an action to each action that waits for it. Its
    label `waits` is `rank` between consecutive actions of a rank, else the result that is handed on. The result of
    joined actions exists once the last of them has ended. A node has the attribute `missing` if no action makes the
    result that it needs.
    """
    import networkx as nx  # only errors and tests need it, a search does not

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
    """Return the name of the action that makes a result, as torch writes actions."""
    forward, chunk, micro_batch = result
    return f"{chunk}{'F' if forward else 'B'}{micro_batch}"


def deadlock(table: Sequence[Sequence[Action]]) -> str:
    """Explain why a schedule never finishes: a result that no action makes, or a cycle of waiting actions.

    Returns: Clauses such as `1B0 comes after 1F1 on rank 1, 1F1 of rank 1 waits for 0F1 of rank 0`; "" if the schedule
        finishes.
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
