"""Experts whose rows only the host can count, as operators of a compiled graph.

How many rows an expert gets is known when the graph runs: with token dispatch, with experts on several ranks, and where
every expert has a product of its own. A compiler could not go on tracing there. So counting rows, exchanging them and
the products are operators, with results of a size that the compiler does not know. Counts are tensors on the host, so
that operators read them without waiting for the device. What stands between the operators is traced.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Any

import torch
import torch.distributed as dist

from autoplan.runtime import expert_rows
from autoplan.runtime.expert_exchange import count_rows, exchange
from autoplan.runtime.expert_forms import ExpertForm
from autoplan.runtime.expert_products import Groups, TracedGroups, by_expert_counted, in_one_product, of_sources
from autoplan.runtime.expert_rows import Chosen, Gradients, Needs
from autoplan.runtime.operators import Operator, define_operators
from autoplan.runtime.private import group_named, ignored_sizes, new_size

_OPERATORS = torch.ops.autoplan_experts
_ROWS = (
    "Tensor places, Tensor? weights, Tensor ends, Tensor held, int k, str activation, bool gated, bool interleaved, "
    "bool transposed, bool scales_inputs, float? alpha, float? limit"
)


def traced(groups: Groups) -> bool:
    """Return True if the rows are those of a graph that is being traced."""
    return isinstance(groups, TracedGroups)


def _host(counts: list[int]) -> torch.Tensor:
    return torch.tensor(counts, dtype=torch.int64)


# -- which rows, and where they go -------------------------------------------------------------------------------------


def traced_by_expert(index: torch.Tensor, num_local: int, first: int | None, ranks: int) -> tuple[torch.Tensor, Groups]:
    """Sort places as `expert_products.by_expert` does."""
    with ignored_sizes():
        places, ends, held = _OPERATORS.by_expert(index, num_local, first, ranks)
    return places, TracedGroups(ends, None, held)


def _by_expert(index: torch.Tensor, num_local: int, first: int | None, ranks: int) -> tuple[torch.Tensor, ...]:
    places, ends, counts = by_expert_counted(index, num_local, first, ranks)
    return places.clone(), ends, _host(counts)


def _like_by_expert(index: torch.Tensor, num_local: int, *_: Any) -> tuple[torch.Tensor, ...]:
    return index.new_empty(new_size()), index.new_empty(num_local, dtype=torch.int32), _host_like(num_local)


def _host_like(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.int64, device="cpu")


@dataclass(frozen=True)
class TracedRanks:
    """The way of rows to the ranks of a group, in a graph.

    Attributes:
        sent, come: int64 on the host, rows by rank.
        here, there: tensors with as many rows as this rank sends (`times` as many), and gets.
        group: name of the group.
    """

    sent: torch.Tensor
    come: torch.Tensor
    here: torch.Tensor
    there: torch.Tensor
    group: str
    times: int = 1

    def move(self, rows: torch.Tensor, back: bool) -> torch.Tensor:
        """Exchange the rows; a collective."""
        there, here = (self.come, self.sent) if back else (self.sent, self.come)
        like, times = (self.here, self.times) if back else (self.there, 1)
        out: torch.Tensor = _OPERATORS.move(rows, there, here, like, times, self.group)
        return out


def dispatch(
    index: torch.Tensor, num_local: int, group: dist.ProcessGroup | None, inner: dist.ProcessGroup | None
) -> tuple[torch.Tensor, TracedRanks | None, TracedRanks | None, torch.Tensor, Groups]:
    """Count the rows of a token dispatch. `group`, `inner`: as of `count_rows`.

    Returns:
        The places [t k] in [t, k] by expert; their way to the ranks of their experts, None without `group`, and from
        there to the parts of every expert, None without `inner`; the order by expert of the rows that come; their
        groups.
    """
    names = [None if g is None else g.group_name for g in (group, inner)]
    with ignored_sizes():
        chosen, arrived, order, ends, held, sent, come, each, parts = _OPERATORS.dispatch(index, num_local, *names)
    between = chosen if names[0] is None else arrived if names[1] is not None else order
    there = None if names[0] is None else TracedRanks(sent, come, chosen, between, names[0])
    to_parts = None if names[1] is None else TracedRanks(each, parts, between, order, names[1], each.shape[0])
    return chosen, there, to_parts, order, TracedGroups(ends, None, held)


def _dispatch(index: torch.Tensor, num_local: int, group: str | None, inner: str | None) -> tuple[torch.Tensor, ...]:
    groups = [None if name is None else group_named(name) for name in (group, inner)]
    ranks, ways = (1 if g is None else dist.get_world_size(g) for g in groups)
    found = count_rows(index, num_local, ranks, groups[0], ways, groups[1])
    order, of_rows = of_sources(found.theirs, found.known, num_local, True)
    num_rows = sum(found.come)
    counts = (of_rows.counts or [], found.sent, found.come, [num_rows] * ways, found.parts)
    assert of_rows.ends is not None
    return found.chosen, index.new_empty(num_rows, 0), order, of_rows.ends, *map(_host, counts)


def _like_dispatch(
    index: torch.Tensor, num_local: int, group: str | None, inner: str | None
) -> tuple[torch.Tensor, ...]:
    ranks, ways = (1 if name is None else dist.get_world_size(group_named(name)) for name in (group, inner))
    arrived, order = index.new_empty(new_size(), 0), index.new_empty(new_size())
    ends = index.new_empty(num_local, dtype=torch.int32)
    return index.new_empty(index.numel()), arrived, order, ends, *map(_host_like, (num_local, ranks, ranks, ways, ways))


def _move(rows: torch.Tensor, sent: torch.Tensor, come: torch.Tensor, _: Any, __: int, name: str) -> torch.Tensor:
    return exchange(rows, sent.tolist(), come.tolist(), group_named(name))


def _like_move(rows: torch.Tensor, _: Any, __: Any, like: torch.Tensor, times: int, name: str) -> torch.Tensor:
    return rows.new_empty(like.shape[0] * times, rows.shape[1])


# -- the products ------------------------------------------------------------------------------------------------------


def traced_forward(
    hidden: torch.Tensor, chosen: Chosen, groups: Groups, *operands: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `expert_rows.forward`."""
    out, first = _OPERATORS.forward(hidden, *operands, *_rows(chosen, groups))
    return out, first


def traced_backward(
    grad: torch.Tensor,
    hidden: torch.Tensor,
    chosen: Chosen,
    groups: Groups,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    down_bias: torch.Tensor | None,
    first: torch.Tensor,
    need: Needs,
) -> Gradients:
    """Compute `expert_rows.backward`."""
    needs = list(astuple(need))
    operands = (hidden, gate_up, down, down_bias, first)
    found = iter(_OPERATORS.backward(grad, *operands, needs, *_rows(chosen, groups)))
    return tuple(next(found) if needed else None for needed in needs)


def _rows(chosen: Chosen, groups: Groups) -> tuple[Any, ...]:
    assert isinstance(groups, TracedGroups)
    return chosen.places, chosen.weights, groups.ends, groups.held, chosen.k, *astuple(chosen.form)


def _given(
    hidden: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, rows: tuple[Any, ...]
) -> tuple[Chosen, Groups]:
    places, weights, ends, held, k, *form = rows
    groups = Groups(ends if in_one_product(hidden, gate_up, down) else None, held.tolist())
    return Chosen(places, weights, k, ExpertForm(*form)), groups


def _forward(hidden: torch.Tensor, gate_up: Any, down: Any, *more: Any) -> tuple[torch.Tensor, torch.Tensor]:
    biases, rows = more[:2], more[2:]
    return expert_rows.forward(hidden, *_given(hidden, gate_up, down, rows), gate_up, down, *biases)


def _like_forward(
    hidden: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, _: Any, __: Any, places: torch.Tensor, *rows: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    transposed = ExpertForm(*rows[4:]).transposed
    columns = gate_up.shape[2 if transposed else 1]
    return torch.empty_like(hidden), hidden.new_empty(places.shape[0], columns)


def _backward(
    grad: torch.Tensor,
    hidden: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    down_bias: torch.Tensor | None,
    first: torch.Tensor,
    need: list[bool],
    *rows: Any,
) -> list[torch.Tensor]:
    chosen, groups = _given(hidden, gate_up, down, rows)
    found = expert_rows.backward(grad, hidden, chosen, groups, gate_up, down, down_bias, first, Needs(*need))
    return [x for x in found if x is not None]


def _like_backward(
    grad: torch.Tensor,
    hidden: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    down_bias: torch.Tensor | None,
    first: torch.Tensor,
    need: list[bool],
    places: torch.Tensor,
    weights: torch.Tensor | None,
    *_: Any,
) -> list[torch.Tensor]:
    num = gate_up.shape[0]
    first_bias, second_bias = first.new_empty(num, first.shape[1]), grad.new_empty(num, grad.shape[1])
    like = (hidden, weights, gate_up, down, first_bias, second_bias)
    return [x.new_empty(x.shape) for x, needed in zip(like, need, strict=True) if needed and x is not None]


_LIBRARY = define_operators(
    "autoplan_experts",
    (
        Operator(
            "by_expert(Tensor index, int num_local, int? first, int ranks) -> (Tensor, Tensor, Tensor)",
            _by_expert,
            _like_by_expert,
        ),
        Operator(
            f"dispatch(Tensor index, int num_local, str? group, str? inner) -> ({', '.join(['Tensor'] * 9)})",
            _dispatch,
            _like_dispatch,
        ),
        Operator(
            "move(Tensor rows, Tensor sent, Tensor come, Tensor like, int times, str group) -> Tensor",
            _move,
            _like_move,
        ),
        Operator(
            "forward(Tensor hidden, Tensor gate_up, Tensor down, Tensor? gate_up_bias, Tensor? down_bias, "
            f"{_ROWS}) -> (Tensor, Tensor)",
            _forward,
            _like_forward,
        ),
        Operator(
            "backward(Tensor grad, Tensor hidden, Tensor gate_up, Tensor down, Tensor? down_bias, Tensor first, "
            f"bool[] need, {_ROWS}) -> Tensor[]",
            _backward,
            _like_backward,
        ),
    ),
)
