"""The differences between two graphs, in words: parameters, inputs, calls of blocks, operations of a block.

Names of models, notes and places in source files are not compared: they change nothing that runs. `warn_of_changes`
says what else is another one than a plan was made for: the version of autoplan, the cluster and its figures.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TypeVar

from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.errors import PinError
from autoplan.ir.graph import Block, Call, ModelGraph, Node, Parameter, Value
from autoplan.plans.document import of_cluster, of_version, what_differs
from autoplan.plans.record import Plan

_MOST = 3  # differences that an error names
_T = TypeVar("_T")


def warn_of_changes(plan: Plan, cluster: Cluster | None = None) -> None:
    """Warn if the version or the cluster is not the one that a plan was made for, in the words of `autoplan estimate`.

    Args:
        cluster: the cluster that it will run on; None: the plan's, as its text is read now.
    """
    document = plan.document
    if cluster is None:
        try:
            cluster = Cluster.parse(document.get("asked", {}).get("cluster", ""))
        except PinError:  # no text describes it, or its file is not here
            cluster = None
    now = of_version() if cluster is None else of_version() | of_cluster(cluster)
    found = what_differs(document.get("made_for", {}), now)
    if found:
        text = f"the plan of {plan.model} that was given: {'; '.join(found)}; `autoplan estimate PLAN` prices it again"
        warnings.warn(text, UserWarning, stacklevel=2)


def graph_differences(then: ModelGraph, now: ModelGraph) -> list[str]:
    """Return the first differences between the graph of a plan and the captured one; empty if none matters."""
    found = [
        *_tensors("parameter", then.params, now.params),
        *_tensors("buffer", then.buffers, now.buffers),
        *_values("input", {n: then.values[n] for n in then.inputs}, {n: now.values[n] for n in now.inputs}),
    ]
    if found:
        return found
    found += _calls({c.name: c for c in then.calls}, {c.name: c for c in now.calls})
    for name in then.blocks:
        if name in now.blocks:
            found += _blocks(then.blocks[name], now.blocks[name])
    if then.loss_counts != now.loss_counts:
        found.append(f"the loss counts {now.loss_counts[0].what}, in the plan {then.loss_counts[0].what}")
    if then.bounds != now.bounds:
        found.append(f"its lengths are bounded by {dict(now.bounds)}, in the plan by {dict(then.bounds)}")
    if not found and [c.name for c in then.calls] != [c.name for c in now.calls]:
        found.append("its blocks are called in another order")
    return found


def differences_text(found: list[str]) -> str:
    """Return the first differences as one clause."""
    more = len(found) - _MOST
    return "; ".join(found[:_MOST]) + (f"; and {more} more" if more > 0 else "")


def _missing(what: str, then: Mapping[str, _T], now: Mapping[str, _T]) -> list[str]:
    gone = [f"{what} {name} is missing" for name in then if name not in now]
    new = [f"{what} {name} is not in the plan" for name in now if name not in then]
    return [*gone, *new]


def _tensors(what: str, then: Mapping[str, Parameter], now: Mapping[str, Parameter]) -> list[str]:
    found = _missing(what, then, now)
    for name in then:
        if name not in now or then[name] == now[name]:
            continue
        a, b = then[name], now[name]
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            found.append(f"{what} {name} is {b.dtype}{list(b.shape)}, in the plan {a.dtype}{list(a.shape)}")
        elif a.trainable != b.trainable:
            found.append(f"{what} {name} is {_trained(b)}, in the plan {_trained(a)}")
        else:
            found.append(f"{what} {name} is tied to {_tied(b)}, in the plan to {_tied(a)}")
    return found


def _trained(p: Parameter) -> str:
    return "trained" if p.trainable else "frozen"


def _tied(p: Parameter) -> str:
    return ", ".join(p.aliases) or "nothing"


def _values(what: str, then: Mapping[str, Value], now: Mapping[str, Value]) -> list[str]:
    changed = [name for name in then if name in now and then[name] != now[name]]
    texts = [f"{what} {name} is {_of_value(now[name])}, in the plan {_of_value(then[name])}" for name in changed]
    return _missing(what, then, now) + texts


def _of_value(value: Value) -> str:
    grad = ", with a gradient" if value.requires_grad else ""
    return f"{value.dtype}[{', '.join(map(str, value.shape))}]{grad}"


def _calls(then: Mapping[str, Call], now: Mapping[str, Call]) -> list[str]:
    found = _missing("block", then, now)
    for name in then:
        if name in now and then[name] != now[name]:
            a, b = then[name], now[name]
            what = f"is a {b.block}, in the plan a {a.block}" if a.block != b.block else "takes or gives other values"
            found.append(f"block {name} {what}")
    return found


def _blocks(then: Block, now: Block) -> list[str]:
    if len(then.nodes) != len(now.nodes):
        return [f"block {then.name} has {len(now.nodes)} operations, in the plan {len(then.nodes)}"]
    for a, b in zip(then.nodes, now.nodes, strict=True):
        if _content(a) != _content(b):
            return [f"operation {a.name} of block {then.name} is {_of_node(b)}, in the plan {_of_node(a)}"]
    if (then.inputs, then.outputs) != (now.inputs, now.outputs):
        return [f"block {then.name} takes or gives other values than in the plan"]
    return _values(f"value of block {then.name}", then.values, now.values)


def _content(node: Node) -> tuple[object, ...]:
    return node.name, node.op, node.inputs, node.outputs, dict(node.attrs), node.scope


def _of_node(node: Node) -> str:
    attrs = [f"{name}={value}" for name, value in node.attrs.items()]
    return f"{node.op}({', '.join([*map(str, node.inputs), *attrs])})"
